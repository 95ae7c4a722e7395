"""What attacks on sums and rows recover from a simulated run."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from silograph.core.payload import Ragged, owners
from silograph.experiment.run.setup import Setup
from silograph.graph.block.block import ClientBlock
from silograph.study.attack.finding import Finding, features, first_map, share
from silograph.study.attack.from_rows import (
    labels_behind,
    same_up_to_scale,
    separable,
    solved_features,
)
from silograph.study.attack.overheard import Overheard, SeenCall

FORWARD = (
    "stages.contribute",
    "bns.serve",
    "cagnet.send",
)  # ops whose replies have rows of a stage
BACKWARD = ("stages.return_sums", "cagnet.send_back")


def rows_seen(call: SeenCall, fed: Overheard) -> tuple[Tensor, Tensor]:
    """Return the rows (k, D) of a reply, and which slot, boundary row or node each belongs to."""
    rows = call.reply["rows"]
    assert isinstance(rows, Ragged)
    if call.name.startswith("cagnet."):
        return rows.t, torch.arange(len(rows.t))
    field = call.inbox.get("row") if call.name == "bns.serve" else call.reply.get("slot")
    starts = fed.route.boundary_off if call.name == "bns.serve" else fed.route.slot_off
    if field is None:
        return rows.t, torch.arange(len(rows.t))
    return rows.t, starts[:-1][owners(rows.off)] + field.t.long()


def features_of(seen: Overheard, setup: Setup, block: ClientBlock) -> list[Finding]:
    """Solve first-stage messages for features."""
    maps: list[Tensor] = []
    rows: list[Tensor] = []
    places: list[Tensor] = []
    name, weights = "", None
    for call in seen.calls:
        if call.name == "stages.begin" and f"weights/{first_map(setup)}" in call.inbox:
            weights = call.inbox[f"weights/{first_map(setup)}"].t
        here = call.name in FORWARD and "stage" in call.inbox
        if weights is None or not here or int(call.inbox["stage"].t) != 0:
            continue
        if name not in ("", call.name):  # evaluation's sums, after rows of training
            continue
        name = call.name
        found = rows_seen(call, seen)
        maps, rows, places = [*maps, weights], [*rows, found[0]], [*places, found[1]]
    if not maps or _drawn(setup):
        return []
    where, solved = solved_features(maps, rows, places)
    starts = {"bns.serve": seen.route.boundary_off, "cagnet.send": block.off}.get(
        name, seen.route.slot_off
    )
    silo = torch.searchsorted(starts, where, right=True) - 1
    x = features(block)
    hits = [
        same_up_to_scale(solved[silo == c], x[block.off[c] : block.off[c + 1]])
        for c in range(block.num_clients)
    ]
    hit = torch.cat(hits)
    what = "sums" if name == "stages.contribute" else "rows"
    made = f"solve the first layer's {what} of {len(maps)} steps"
    return [
        Finding(
            made,
            "features of nodes, to 1e-4 up to a factor",
            share(hit),
            len(hit),
            None,
            "honest but curious",
        )
    ]


def _drawn(setup: Setup) -> bool:
    """Whether what stands behind a row is drawn anew in every step, which is not measured."""
    return getattr(setup.method_config.options, "sample", None) is not None


def separable_of(seen: Overheard, setup: Setup, block: ClientBlock) -> list[Finding]:
    """Count the nodes whose messages rows give to a server that has the silos' edges as well."""
    calls = [call for call in seen.calls if call.name == "stages.contribute"]
    if not calls or _drawn(setup) or setup.method.rows != "sums":
        return []
    _, sent = rows_seen(calls[0], seen)
    halo = block.halo.adj
    kept = torch.zeros(halo.num_cols, dtype=torch.bool)
    kept[sent] = True
    hits = [
        separable(halo.tensor.to_dense()[rows][:, slots][:, kept[slots]].T)
        for rows, slots in zip(_runs(block.off), _runs(block.halo.off), strict=True)
    ]
    made = "combine the sums, knowing each silo's edges from elsewhere"
    what, hit = "messages of single nodes, which give their features", torch.cat(hits)
    return [Finding(made, what, share(hit), len(hit), None, "honest but curious")]


def _runs(off: Tensor) -> list[slice]:
    return [slice(a, b) for a, b in pairwise(off.tolist())]


def labels_of(seen: Overheard, setup: Setup, block: ClientBlock) -> list[Finding]:
    """Read training labels off the signs of the last layer's cotangents."""
    if setup.schema.task != "multiclass" or _drawn(setup):
        return []
    wide = setup.schema.num_classes
    calls = [c for c in seen.calls if c.name in BACKWARD and c.reply["rows"].t.shape[1] == wide]
    if not calls:
        return []
    last = max(int(call.inbox["stage"].t) for call in calls)
    parts = [rows_seen(call, seen) for call in calls if int(call.inbox["stage"].t) == last]
    place, node = nodes_behind(calls[0].name, block)
    guess = first_guesses(parts, int(max(seen.route.slot_off[-1], block.off[-1])))
    claimed = guess[place]
    right = claimed == block.y[node]
    single = torch.bincount(place, minlength=len(guess))[place] == 1
    count, good = int(block.split.train.sum()), int(right.sum())
    claims = int((claimed >= 0).sum())
    made = "read the signs of the last layer's cotangents"
    return [
        Finding(
            made,
            what,
            len(node[right & mask].unique()) / max(count, 1),
            count,
            good / claims if claims else None,
            "honest but curious",
        )
        for what, mask in (
            ("labels of training nodes alone behind a row", single),
            ("labels of training nodes, those among others of their class included", right),
        )
    ]


def first_guesses(parts: Sequence[tuple[Tensor, Tensor]], places: int) -> Tensor:
    """Return what the first row of each place says, (places,) classes, -1 for nothing.

    Before training all classes are about as likely, so signs are clear.
    """
    guess = torch.full((places,), -1)
    fresh = torch.ones(places, dtype=torch.bool)
    for rows, where in parts:
        new = fresh[where]
        guess[where[new]] = labels_behind(rows[new])
        fresh[where] = False
    return guess


def nodes_behind(op: str, block: ClientBlock) -> tuple[Tensor, Tensor]:
    """Return the training nodes that can be behind each place of replies, as (place, node)."""
    if op == "cagnet.send_back":
        node = block.split.train.nonzero()[:, 0]
        return node, node
    halo = block.halo.adj
    kept = block.split.train[halo.row]
    return halo.indices.long()[kept], halo.row[kept]
