"""What attacks on weights and counts recover from a simulated run."""

from typing import Any

import torch
from torch import Tensor

from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import dense
from silograph.experiment.run.setup import Setup, first_weights
from silograph.federation.base import WeightedMean
from silograph.graph.block.block import ClientBlock
from silograph.methods.local_training import rests, shared, train
from silograph.nn.conv.base import as_matrix
from silograph.nn.model import Model
from silograph.nn.optim import SGD
from silograph.study.attack.finding import Finding, features, first_map, share
from silograph.study.attack.from_counts import single_labels
from silograph.study.attack.from_rows import same_up_to_scale
from silograph.study.attack.from_weights import (
    crafted,
    occurring_features,
    single_rows,
    untouched,
)
from silograph.study.attack.overheard import Overheard

CRAFTED = "send crafted weights once"


def words_of(seen: Overheard, setup: Setup, block: ClientBlock) -> list[Finding]:
    """Compare first weights with those of a silo without data."""
    cfg, name = setup.method_config.in_round(1), f"weights/{first_map(setup)}"
    calls = [
        call for call in seen.calls if call.name == "local_training.train" and name in call.reply
    ]
    plain = not cfg.corrections and not cfg.losses and cfg.schedule.whole
    if not calls or not plain or cfg.keep_optimizer:
        return []
    sent = {k.removeprefix("weights/"): f.t for k, f in calls[0].inbox.items()}
    idle = rests(cfg, sent).get(name)
    if idle is None:
        return []
    idle = idle.reshape(sent[first_map(setup)].shape)
    found = occurring_features(dense(calls[0].reply[name]), idle)
    support = (features(block) != 0).split(block.off.diff().tolist())
    there = torch.stack([part.any(0) for part in support])
    rows = [bool((part == own).all(1).any()) for part, own in zip(support, found, strict=True)]
    trains = block.num_train > 0
    made, both = "see which first weights moved", int((found & there).sum())
    return [
        Finding(
            made,
            "features that occur at a silo",
            both / max(int(there.sum()), 1),
            int(there.sum()),
            both / max(int(found.sum()), 1),
            "honest but curious",
        ),
        Finding(
            made,
            "silos of which a node's features are seen, all of them and no other",
            share(torch.tensor(rows)[trains]),
            int(trains.sum()),
            None,
            "honest but curious",
        ),
    ]


def crafted_rows(setup: Setup, block: ClientBlock) -> list[Finding]:
    """Send weights that make a step of SGD hold single rows."""
    cfg, model = setup.method_config.in_round(1), setup.method_config.model
    names = {"0.weight", "0.bias", "1.weight", "1.bias"}
    fits = isinstance(model, Model) and set(model.weight_shapes) == names
    one = cfg.schedule.epochs == 1 and cfg.schedule.whole and isinstance(cfg.optimizer, SGD)
    plain = not cfg.corrections and not cfg.losses and not cfg.keep_optimizer
    averages = setup.method.name in {"fedavg", "fedopt"}
    if not (fits and one and plain and averages) or setup.schema.task != "multiclass":
        return []
    inputs = first_inputs(setup, block)
    sums = inputs.sum(1)
    weights = crafted(first_weights(setup), float(sums.mean()), float(sums.std()))
    fed, key = Overheard(setup.federation), Key.of(setup.config.seed).fold("attack")
    setup.method.init(fed, cfg, weights, key)
    fed.call(
        train, shared("weights", weights), what=Kind.WEIGHTS, key=key, reduce=WeightedMean("nodes")
    )
    after = {name: dense(fed.calls[-1].reply[f"weights/{name}"]) for name in names}
    rows = single_rows(untouched(weights, cfg.optimizer, 1), after)
    hits = [
        same_up_to_scale(rows[c], inputs[block.off[c] : block.off[c + 1]], 1e-3)
        for c in range(block.num_clients)
    ]
    hit = torch.cat(hits)[block.split.train]
    what = "what enters the first layer at training nodes, to 1e-3"
    return [Finding(CRAFTED, what, share(hit), len(hit), None, "active")]


def first_inputs(setup: Setup, block: ClientBlock) -> Tensor:
    """Return what the first layer's weights meet, summed over neighbors where it sums, (n, F)."""
    model: Any = setup.method_config.model.staged
    conv, x = model.stages[0].conv, features(block)
    if not conv.sums or conv.scales is None:
        return x
    degree = block.adj.weighted_degree.to(x.dtype)[:, None]
    matrix = as_matrix(conv.scales, block.adj, degree, conv.scales.itself(degree))
    return matrix.tensor.to(x.dtype) @ x


def tested_labels(seen: Overheard) -> list[Finding]:
    """Read the label of a silo's only test node off its counts."""
    calls = [call for call in seen.calls if {"test.tp", "test.fn"} <= call.reply.keys()]
    if not calls:
        return []
    counts = calls[-1].reply["test.tp"].t + calls[-1].reply["test.fn"].t
    known = single_labels(counts) >= 0
    nodes, made = int(counts.sum()), "read a silo's counts by class"
    what = "labels of test nodes that are alone at their silo"
    return [
        Finding(made, what, int(known.sum()) / max(nodes, 1), nodes, None, "honest but curious")
    ]
