"""What attacks recover from a run, by simulation: the server's view, judged by the silos' data."""

import dataclasses
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from scipy.linalg import qr
from torch import Tensor

from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError, mistake
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.numeric_state import standard_numerics
from silograph.core.payload import (
    Payload,
    Ragged,
    Shared,
    Stacked,
    State,
    dense,
    owners,
    with_prefix,
)
from silograph.core.resolved_config import training_key
from silograph.evaluation.evaluate import own_counts, server_counts
from silograph.exchange.collect import collect
from silograph.exchange.passes import (
    add_remote_cotangents,
    add_remote_sums,
    send_cotangents,
    send_partial_sums,
)
from silograph.experiment.run.round_scores import weights_message
from silograph.experiment.run.setup import Setup, first_weights, prepare
from silograph.experiment.terminal_table import markdown_table
from silograph.federation.base import Federation, Op, WeightedMean
from silograph.federation.ledger import Ledger
from silograph.graph.block.block import ClientBlock, Route
from silograph.graph.datasets import source_of
from silograph.graph.graph import Graph
from silograph.methods.bns import serve, store
from silograph.methods.fedavg import train
from silograph.methods.local_training import shared, untouched_rows_after_round
from silograph.nn.conv import Params, as_matrix
from silograph.nn.model import Model
from silograph.nn.optim import SGD, Optimizer
from silograph.task.counts import BINS, STEEPNESS, CountRules, bins_of, log_odds
from silograph.task.least_count import spread_bins

# --- overheard -----------------------------------------------------------------------------------
# What the server of a simulated run sees: every message of every silo, before it is folded.

MASKED_FIELDS: Mapping[Op, str] = {
    send_partial_sums: "rows",
    send_cotangents: "rows",
    add_remote_sums: "sum",
    add_remote_cotangents: "sum",
    serve: "rows",
    store: "rows",
}  # fields of messages that silos mask in runs with secure aggregation


@dataclass(frozen=True, eq=False)
class SeenCall:
    """A call of one block of clients: what they were sent and what they replied, by client.

    Attributes:
        name: MODULE.OP, without the rooms that the module is in.
        inbox: what was sent.
        reply: what came, before anything is folded.
    """

    name: str
    inbox: Payload
    reply: Payload


@dataclass(frozen=True, eq=False)
class RecordingFederation:
    """A federation of one block whose server writes down what it sees.

    Attributes:
        fed: the engine.
        calls: all calls, in order.
        blocks: the silos' own data, by which attacks are judged; no server has them.
        secure: whether the server sees sums of replies only: those are written down as the reply
            of one silo, that of all together. In place of masked rows it sees noise.
    """

    fed: Federation
    calls: list[SeenCall] = field(default_factory=list)
    blocks: list[ClientBlock] = field(default_factory=list)
    secure: bool = False

    @property
    def ids(self) -> tuple[str, ...]:
        """See `Federation`."""
        return self.fed.ids

    @property
    def route(self) -> Route:
        """See `Federation`."""
        return self.fed.route

    @property
    def away(self) -> tuple[str, ...]:
        """See `Federation`."""
        return self.fed.away

    @property
    def ledger(self) -> Ledger:
        """See `Federation`."""
        return self.fed.ledger

    def start_round(self, number: int) -> None:
        """See `Federation`."""
        self.fed.start_round(number)

    def call(self, op: Op, inbox: Payload, **call_options: Any) -> Payload:
        """Call an op, and record the inbox and reply of every silo."""
        name = f"{op.__module__.rpartition('.')[2]}.{op.__name__}"

        @wraps(op)
        def record_and_call(
            cfg: Any, block: ClientBlock, state: State, op_inbox: Payload, key: Key
        ) -> tuple[State, Payload]:
            state, reply = op(cfg, block, state, op_inbox, key)
            seen_inbox, seen_reply = _copy_inbox(op_inbox), reply
            if self.secure and op in MASKED_FIELDS:
                masks = key.fold("masks", len(self.calls))
                seen_inbox, seen_reply = (
                    _with_noise(part, MASKED_FIELDS[op], masks) for part in (seen_inbox, reply)
                )
            self.calls.append(SeenCall(name, seen_inbox, seen_reply))
            self.blocks[:] = [block]
            return state, reply

        result = self.fed.call(record_and_call, inbox, **call_options)
        if self.secure and not call_options.get("rows", False):
            sums = {n: Stacked(f.t[None]) for n, f in result.items() if isinstance(f, Shared)}
            self.calls[-1] = replace(self.calls[-1], reply=sums)
        return result


def _recording(setup: Setup) -> RecordingFederation:
    return RecordingFederation(setup.federation, secure=setup.config.secure_aggregation)


def seen_apart(setup: Setup, block: ClientBlock) -> Tensor:
    """Return the offsets of the nodes whose replies the server can tell apart, (G + 1,) int64.

    Those of each silo; with secure aggregation all nodes together.
    """
    return block.off[[0, -1]] if setup.config.secure_aggregation else block.off


def _with_noise(message: Payload, name: str, key: Key) -> Payload:
    """Return a message as the server sees it, with noise in place of the rows that silos mask."""
    rows = message.get(name)
    if not isinstance(rows, Ragged):
        return message
    noise = key.words(torch.arange(len(rows.t)), rows.t.shape[1])
    return {**message, name: replace(rows, t=noise)}


def _copy_inbox(inbox: Payload) -> Payload:
    """Return the inbox with copies of shared weights, because servers update them in place."""
    return {n: Shared(f.t.clone()) if isinstance(f, Shared) else f for n, f in inbox.items()}


def record_server_view(setup: Setup, rounds: int) -> RecordingFederation:
    """Train some rounds of a run and score the last, and return what its server saw."""
    fed, key = _recording(setup), training_key(setup.config)
    method, cfg = setup.method, setup.method_config
    knobs = {k.name: k.constant(k.start, len(fed.ids)) for k in method.needs.knobs(cfg.options)}
    cfg = replace(cfg, knobs=knobs)
    fed.start_round(0)
    if setup.config.collect:
        collect(fed, setup.config.collect, key.fold("collect"))
    state = method.init(fed, cfg, first_weights(setup), key.fold("init"))
    for t in range(1, rounds + 1):
        fed.start_round(t)
        state, _ = method.round(fed, cfg.in_round(t), state, t, key)
    if state.weights is not None:
        judging = key.fold("judge server", rounds)
        inbox = weights_message(setup, state, fed.ids)
        method.evaluate.counts(fed, cfg.model, inbox, judging, cfg.count_rules)
    own_counts(fed, key.fold("judge own", rounds), cfg.count_rules)
    return fed


# --- An attack on the counts of evaluation. C: silos. K: classes ---------------------------------


def single_labels(counts: Tensor) -> Tensor:
    """Return the label of the only node that a silo counts by class (C, K), -1 for several."""
    return counts.argmax(1).where(counts.sum(1) == 1, -1)


# --- from rows -----------------------------------------------------------------------------------
# Attacks on sums and rows: features from first-stage messages, labels from last cotangents.
#
# They see what the server sees, and nothing else.
#
# T: steps. F: features. H: width of the first stage. S: rows seen. K: classes.


MOST_GROUPS = 64  # of rows seen in the same steps; each is a system of its own


def solve_features(
    maps: Sequence[Tensor], rows: Sequence[Tensor], places: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Recover the inputs of first-stage messages, by solving message = x @ map over all steps.

    The server knows the weights, and the inputs of a message stay the same from step to step, so T
    steps give T H equations for F unknowns.

    Args:
        maps: (F, H) first weights of each step.
        rows: (S_t, H) messages of each step.
        places: (S_t,) what each message belongs to: a slot, a boundary row.

    Returns:
        (S,) places with as many equations as unknowns, and (S, F) float64 solutions: a sum over
        the nodes that contribute to a place, each scaled by a number that depends on its degree.
    """
    needed = -(-maps[0].shape[0] // maps[0].shape[1]) + 1
    seen: dict[int, list[int]] = defaultdict(list)
    for step, step_places in enumerate(places):
        for place in step_places.tolist():
            seen[place].append(step)
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for place, steps in seen.items():
        if len(steps) >= needed:
            groups[tuple(steps[:needed])].append(place)
    largest = sorted(groups.items(), key=lambda group: -len(group[1]))[:MOST_GROUPS]
    solved_places = [torch.zeros(0, dtype=torch.int64)]
    solutions = [maps[0].new_zeros(0, len(maps[0]))]
    for steps_of, group_members in largest:
        group_places = torch.tensor(group_members).sort().values
        messages = [_rows_at(rows[t], places[t], group_places) for t in steps_of]
        equations = torch.cat([maps[t] for t in steps_of], 1).T.double()
        values = torch.cat(messages, 1).T.double()
        solutions.append(torch.linalg.lstsq(equations, values).solution.T)
        solved_places.append(group_places)
    return torch.cat(solved_places), torch.cat([s.double() for s in solutions])


def _rows_at(rows: Tensor, places: Tensor, place_ids: Tensor) -> Tensor:
    """Return the rows (k, H) at some places (k,), ascending."""
    order = places.argsort()
    return rows[order[torch.searchsorted(places[order], place_ids)]]


def find_separable_nodes(counts: Tensor) -> Tensor:
    """Return which nodes' own messages are linear combinations of a silo's rows, (n,) bool.

    Args:
        counts: (S, n) how often each node is behind each row: what a server knows that has the
            silo's edges from elsewhere.
    """
    if not len(counts):
        return torch.zeros(counts.shape[1], dtype=torch.bool)
    # Pivoted, for it tells the rank; a singular value decomposition fails where many values repeat.
    q, r, _ = qr(counts.double().numpy().T, mode="economic", pivoting=True)
    sizes = abs(r.diagonal())
    spanned = q[:, sizes > 1e-9 * max(sizes[0], 1e-300)]
    return torch.from_numpy((spanned**2).sum(1) > 1 - 1e-6)


def infer_labels(cotangents: Tensor) -> Tensor:
    """Infer the only class of the training nodes in each row's sum (S, K), -1 for several.

    A training node's gradient is p - 1 at its class and p > 0 elsewhere, so it is negative there
    only. A sum over nodes of one class is negative at that class only, too.
    """
    negative = cotangents < 0
    is_single = negative.sum(1) == 1
    return negative.long().argmax(1).where(is_single, -1)


def same_up_to_scale(solved: Tensor, truth: Tensor, tolerance: float = 1e-4) -> Tensor:
    """Return which rows of truth (n, F) a solution (S, F) equals up to a factor, (n,) bool.

    Both are divided by their length; no entry may differ by more than the tolerance.
    """
    hit = torch.zeros(len(truth), dtype=torch.bool)
    own: Tensor = truth.norm(dim=1)
    lengths = own, solved.norm(dim=1)
    real = solved[lengths[1] > 1e-9] / lengths[1][lengths[1] > 1e-9, None]
    if not len(real) or not len(truth):
        return hit
    unit = truth.double() / lengths[0].double().clamp(min=1e-12)[:, None]
    for part in real.split(4096):
        nearest = (part @ unit.T).argmax(1)
        hit[nearest[(part - unit[nearest]).abs().amax(1) <= tolerance]] = True
    return hit & (own > 0)


# --- from weights --------------------------------------------------------------------------------
# Attacks on the weights of local training: which features occur, and rows by crafted weights.
#
# They see what the server sees, and nothing else.
#
# C: silos. F: features. H: width of the first hidden layer. K: classes.


def weights_without_gradient(
    weights: Mapping[str, Tensor], optimizer: Optimizer, steps: int
) -> Params:
    """Return what weights become in some steps of a silo whose data give no gradient at all."""
    own = {name: w[None].clone() for name, w in weights.items()}
    state = optimizer.init(own)
    for _ in range(steps):
        optimizer.step_(own, {name: torch.zeros_like(w) for name, w in own.items()}, state)
    return {name: w[0] for name, w in own.items()}


def occurring_features(after: Tensor, without_data: Tensor) -> Tensor:
    """Return which features occur where silos trained, (C, F) bool.

    The row of a feature that no node has moves by weight decay alone.

    Args:
        after: (C, F, H) first weights that each silo sent.
        without_data: (F, H) what `untouched` says of them.
    """
    return (after - without_data).abs().amax(2) > 1e-9


def craft_weights(weights: Mapping[str, Tensor], center: float, spread: float) -> Params:
    """Return weights of two layers under which an SGD step holds single rows.

    Fowl, Geiping, Czaja, Goldblum and Goldstein, "Robbing the fed", ICLR 2022: all hidden units
    measure the sum of a row's features, with thresholds that differ, and reach the classes by one
    and the same vector. So the gradients of two neighboring units differ by those rows only whose
    sum is between their thresholds.

    Args:
        weights: of the run's model; two layers, with biases.
        center: what the server takes for the mean of the sums.
        spread: and for their deviation; thresholds are the quantiles of a normal distribution.
    """
    own = {name: torch.zeros_like(w) for name, w in weights.items()}
    hidden, classes = weights["0.weight"].shape[1], weights["1.weight"].shape[1]
    share = (torch.arange(hidden, dtype=torch.float64) + 0.5) / hidden
    thresholds = center + spread * 2**0.5 * torch.erfinv(2 * share - 1)
    small = 1e-4  # hidden values are small and gradients large: neither saturates nor rounds
    own["0.weight"] += small
    own["0.bias"] -= (small * thresholds).to(own["0.bias"].dtype)
    own["1.weight"] += torch.linspace(-1, 1, classes).to(own["1.weight"].dtype) / small**0.5
    return own


def single_rows(sent: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Tensor:
    """Return what enters the first layer of single rows, if the guess is right, (C, 2 H - 1, F).

    The gradient of a unit's weights is the sum of the rows that it is open for, each times a
    number; that of its bias is the sum of these numbers. So their ratio is a row where one row
    alone is between two thresholds, or alone above one.

    Args:
        sent: crafted weights, as a silo without data makes them; see `untouched`.
        after: (C, ...) what each silo sent back.
    """
    change = after["0.weight"].double() - sent["0.weight"].double()
    bias = after["0.bias"].double() - sent["0.bias"].double()
    change = torch.cat([change, change.diff(dim=2)], 2)
    bias = torch.cat([bias, bias.diff(dim=1)], 1)
    return (change / torch.where(bias == 0, torch.inf, bias)[:, None]).transpose(1, 2)


# --- `Finding`: what an attack recovers, and what its measurements share -------------------------


@dataclass(frozen=True)
class Finding:
    """What an attack recovers.

    Attributes:
        attack: what the server does.
        recovered: what it has then.
        share: of how many that there are.
        of: that number.
        right: share of its guesses that are right; None where they are exact by construction.
        server: `honest but curious`, or `active`: it sends what the run does not call for.
    """

    attack: str
    recovered: str
    share: float
    of: int
    right: float | None = None
    server: Literal["honest but curious", "active"] = "honest but curious"


def first_map(setup: Setup) -> str:
    """Return the name of the weights that features meet."""
    model = setup.method_config.model.staged
    names = () if model is None else model.stages[0].conv.maps
    return f"0.{names[0]}" if names else next(iter(setup.method_config.model.weight_shapes))


def features(block: ClientBlock) -> Tensor:
    """Return features as a dense matrix (n, F)."""
    return block.x if isinstance(block.x, Tensor) else block.x.csr.tensor.to_dense()


def share(hit: Tensor) -> float:
    """Return the share of what is true."""
    return float(hit.double().mean()) if len(hit) else 0.0


FORWARD = (
    "passes.send_partial_sums",
    "bns.serve",
    "cagnet.send",
)  # ops whose replies have rows of a stage
BACKWARD = ("passes.send_cotangents", "cagnet.send_back")


def rows_seen(call: SeenCall, fed: RecordingFederation) -> tuple[Tensor, Tensor]:
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


def attack_features(seen: RecordingFederation, setup: Setup, block: ClientBlock) -> list[Finding]:
    """Solve first-stage messages for features."""
    maps: list[Tensor] = []
    rows: list[Tensor] = []
    places: list[Tensor] = []
    name, weights = "", None
    for call in seen.calls:
        if call.name == "passes.begin" and f"weights/{first_map(setup)}" in call.inbox:
            weights = call.inbox[f"weights/{first_map(setup)}"].t
        is_first_stage = call.name in FORWARD and "stage" in call.inbox
        if weights is None or not is_first_stage or int(call.inbox["stage"].t) != 0:
            continue
        if name not in ("", call.name):  # evaluation's sums, after rows of training
            continue
        name = call.name
        call_rows, call_places = rows_seen(call, seen)
        maps.append(weights)
        rows.append(call_rows)
        places.append(call_places)
    if not maps or _draws_neighbors(setup):
        return []
    where, solved = solve_features(maps, rows, places)
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
    what = "sums" if name == "passes.send_partial_sums" else "rows"
    attack_name = f"solve the first layer's {what} of {len(maps)} steps"
    recovered = "features of nodes, to 1e-4 up to a factor"
    return [Finding(attack_name, recovered, share(hit), len(hit))]


def _draws_neighbors(setup: Setup) -> bool:
    """Whether what stands behind a row is drawn anew in every step, which is not measured."""
    return getattr(setup.method_config.options, "sample", None) is not None


def attack_separable_rows(
    seen: RecordingFederation, setup: Setup, block: ClientBlock
) -> list[Finding]:
    """Count the nodes whose messages rows give to a server that has the silos' edges as well."""
    calls = [call for call in seen.calls if call.name == "passes.send_partial_sums"]
    if not calls or _draws_neighbors(setup) or setup.method.rows != "sums":
        return []
    _, places = rows_seen(calls[0], seen)
    halo = block.halo.adj
    is_kept = torch.zeros(halo.num_cols, dtype=torch.bool)
    is_kept[places] = not setup.config.secure_aggregation  # else the server can read none
    hits = [
        find_separable_nodes(halo.tensor.to_dense()[rows][:, slots][:, is_kept[slots]].T)
        for rows, slots in zip(_runs(block.off), _runs(block.halo.off), strict=True)
    ]
    attack_name = "combine the sums, knowing each silo's edges from elsewhere"
    what, hit = "messages of single nodes, which give their features", torch.cat(hits)
    return [Finding(attack_name, what, share(hit), len(hit))]


def _runs(off: Tensor) -> list[slice]:
    return [slice(a, b) for a, b in pairwise(off.tolist())]


def attack_labels(seen: RecordingFederation, setup: Setup, block: ClientBlock) -> list[Finding]:
    """Read training labels off the signs of the last layer's cotangents."""
    if setup.schema.task != "multiclass" or _draws_neighbors(setup):
        return []
    wide = setup.schema.num_classes
    calls = [c for c in seen.calls if c.name in BACKWARD and c.reply["rows"].t.shape[1] == wide]
    if not calls:
        return []
    last = max(int(call.inbox["stage"].t) for call in calls)
    parts = [rows_seen(call, seen) for call in calls if int(call.inbox["stage"].t) == last]
    place, node = contributing_nodes(calls[0].name, block)
    guess = first_guesses(parts, int(max(seen.route.slot_off[-1], block.off[-1])))
    claimed = guess[place]
    is_right = claimed == block.y[node]
    single = torch.bincount(place, minlength=len(guess))[place] == 1
    count, num_right = int(block.split.train.sum()), int(is_right.sum())
    claims = int((claimed >= 0).sum())
    attack_name = "read the signs of the last layer's cotangents"
    return [
        Finding(
            attack_name,
            what,
            len(node[is_right & mask].unique()) / max(count, 1),
            count,
            num_right / claims if claims else None,
        )
        for what, mask in (
            ("labels of training nodes alone behind a row", single),
            ("labels of training nodes, those among others of their class included", is_right),
        )
    ]


def first_guesses(parts: Sequence[tuple[Tensor, Tensor]], places: int) -> Tensor:
    """Infer a class from the first row of each place, (places,) int64, -1 for none.

    Before training all classes are about as likely, so signs are clear.
    """
    guess = torch.full((places,), -1)
    fresh = torch.ones(places, dtype=torch.bool)
    for rows, where in parts:
        new = fresh[where]
        guess[where[new]] = infer_labels(rows[new])
        fresh[where] = False
    return guess


def contributing_nodes(op: str, block: ClientBlock) -> tuple[Tensor, Tensor]:
    """Return the training nodes that can contribute to each place of replies, as (place, node)."""
    if op == "cagnet.send_back":
        node = block.split.train.nonzero()[:, 0]
        return node, node
    halo = block.halo.adj
    is_training = block.split.train[halo.row]
    return halo.indices.long()[is_training], halo.row[is_training]


# --- What attacks on weights and counts recover from a simulated run -----------------------------


CRAFTED = "send crafted weights once"


def attack_first_weights(
    seen: RecordingFederation, setup: Setup, block: ClientBlock
) -> list[Finding]:
    """Compare first weights with those of a silo without data."""
    cfg, name = setup.method_config.in_round(1), f"weights/{first_map(setup)}"
    calls = [call for call in seen.calls if call.name == "fedavg.train" and name in call.reply]
    is_plain = not cfg.corrections and not cfg.losses and cfg.schedule.whole
    if not calls or not is_plain or cfg.keep_optimizer:
        return []
    sent_weights = {k.removeprefix("weights/"): f.t for k, f in calls[0].inbox.items()}
    idle = untouched_rows_after_round(cfg, sent_weights).get(name)
    if idle is None:
        return []
    idle = idle.reshape(sent_weights[first_map(setup)].shape)
    occurs = occurring_features(dense(calls[0].reply[name]), idle)
    off = seen_apart(setup, block)
    support = (features(block) != 0).split(off.diff().tolist())
    is_present = torch.stack([part.any(0) for part in support])
    is_exact = [bool((part == own).all(1).any()) for part, own in zip(support, occurs, strict=True)]
    trains = torch.tensor([bool(block.split.train[rows].any()) for rows in _runs(off)])
    attack, num_true = "see which first weights moved", int((occurs & is_present).sum())
    return [
        Finding(
            attack,
            "features that occur at a silo",
            num_true / max(int(is_present.sum()), 1),
            int(is_present.sum()),
            num_true / max(int(occurs.sum()), 1),
        ),
        Finding(
            attack,
            "silos of which a node's features are seen, all of them and no other",
            share(torch.tensor(is_exact)[trains]),
            int(trains.sum()),
        ),
    ]


def attack_with_crafted_weights(setup: Setup, block: ClientBlock) -> list[Finding]:
    """Recover single rows from a step of SGD on crafted weights."""
    cfg, model = setup.method_config.in_round(1), setup.method_config.model
    names = {"0.weight", "0.bias", "1.weight", "1.bias"}
    # `first_inputs` sums over all neighbors.
    fits = isinstance(model, Model) and model.directed == "none"
    fits = fits and set(model.weight_shapes) == names
    is_single_step = (
        cfg.schedule.epochs == 1 and cfg.schedule.whole and isinstance(cfg.optimizer, SGD)
    )
    plain = not cfg.corrections and not cfg.losses and not cfg.keep_optimizer
    averages = setup.method.name in {"fedavg", "fedopt"}
    if not (fits and is_single_step and plain and averages) or setup.schema.task != "multiclass":
        return []
    inputs = first_inputs(setup, block)
    sums = inputs.sum(1)
    weights = craft_weights(first_weights(setup), float(sums.mean()), float(sums.std()))
    fed, key = _recording(setup), Key.of(setup.config.seed).fold("attack")
    setup.method.init(fed, cfg, weights, key)
    fed.call(
        train, shared("weights", weights), what=Kind.WEIGHTS, key=key, reduce=WeightedMean("nodes")
    )
    after = {name: dense(fed.calls[-1].reply[f"weights/{name}"]) for name in names}
    rows = single_rows(weights_without_gradient(weights, cfg.optimizer, 1), after)
    hits = [
        same_up_to_scale(rows[group], inputs[nodes], 1e-3)
        for group, nodes in enumerate(_runs(seen_apart(setup, block)))
    ]
    hit = torch.cat(hits)[block.split.train]
    what = "what enters the first layer at training nodes, to 1e-3"
    return [Finding(CRAFTED, what, share(hit), len(hit), server="active")]


def first_inputs(setup: Setup, block: ClientBlock) -> Tensor:
    """Return what the first layer's weights meet, summed over neighbors where it sums, (n, F)."""
    model: Any = setup.method_config.model.staged
    conv, x = model.stages[0].conv, features(block)
    if not conv.sums or conv.scales is None:
        return x
    degree = block.adj.weighted_degree.to(x.dtype)[:, None]
    matrix = as_matrix(conv.scales, block.adj, degree, degree, conv.scales.itself(degree))
    return matrix.tensor.to(x.dtype) @ x


def attack_test_counts(seen: RecordingFederation) -> list[Finding]:
    """Read the label of a silo's only test node off its counts."""
    calls = [call for call in seen.calls if {"test.tp", "test.fn"} <= call.reply.keys()]
    if not calls:
        return []
    counts = calls[-1].reply["test.tp"].t + calls[-1].reply["test.fn"].t
    is_single = single_labels(counts) >= 0
    nodes, attack = int(counts.sum()), "read a silo's counts by class"
    what = "labels of test nodes that are alone at their silo"
    return [Finding(attack, what, int(is_single.sum()) / max(nodes, 1), nodes)]


# --- All attacks on a run -------------------------------------------------------------------------


# --- from evaluations ----------------------------------------------------------------------------
# Attacks on replies of evaluation: an active server that has weights of its own making scored.
#
# Labels: the server knows features and edges of test nodes, so it knows the bins of each node
# under any weights. Each histogram of a class then says which share of the nodes near a bin have
# the class, and a few random models single out each node's own.
#
# Features: the server knows nothing of the nodes. Under weights that add up features, the score
# of one node is above all others. It is above by more, if weights of a feature are raised that
# the node has; so the highest occupied bin tells the node's features, one in each evaluation.
#
# C: silos. F: features. K: classes. B: bins. T: evaluations. j: test nodes.


LABEL_CALLS = 12
FEATURE_CALLS = 100  # about as many as a run has rounds
TRIALS = 10  # evaluations in which a node is looked for that stands apart
SURE = 0.99
SPREAD = 0.3  # deviation of log-odds, which fills most bins
LINEAR = 4 * SPREAD  # bias of hidden units: nearly all are above 0
MADE = "have crafted weights scored"


def evaluation_findings(setup: Setup, block: ClientBlock) -> list[Finding]:
    """Return what evaluations of crafted weights tell; none where no such weights are known here.

    Args:
        setup: of a run.
        block: all silos' own data, by which the attacks are judged.
    """
    cfg, calls = setup.method_config, setup.method.calls
    model = cfg.model
    fits = isinstance(model, Model) and model.conv in ("gcn", "mlp") and model.layers == 2
    scored = calls is not None and calls.scores_server(cfg) and not setup.method.evaluate.crosses
    if not fits or not scored or setup.schema.task != "multiclass":
        return []
    return [*_labels(setup, block), *_features(setup, block)]


def _scored(setup: Setup, key: Key) -> "ScoredNodes":
    fed = _recording(setup)
    setup.method.init(fed, setup.method_config, first_weights(setup), key)
    return ScoredNodes(fed, key, setup.method_config.count_rules)


class ScoredNodes:
    """Silos that evaluate weights, and a server that reads their replies.

    Args:
        fed: the silos.
        key: of the calls.
        rules: what the replies hold.
    """

    def __init__(self, fed: RecordingFederation, key: Key, rules: CountRules) -> None:
        self._fed, self._key, self._rules = fed, key, rules

    def reply(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the counts of each silo, (C, ...)."""
        inbox = {name: Shared(w) for name, w in with_prefix("weights", weights).items()}
        server_counts(self._fed, inbox, self._key, self._rules)
        return {name: field.t for name, field in self._fed.calls[-1].reply.items()}


def _labels(setup: Setup, block: ClientBlock) -> list[Finding]:
    key = Key.of(setup.config.seed).fold("attack labels")
    cfg, silos = setup.method_config, _scored(setup, key)
    test = block.split.test.nonzero()[:, 0]
    y, off = block.y[test], seen_apart(setup, block)
    client = torch.bucketize(test, off[1:], right=True)
    replies_and_bins = []
    for call in range(LABEL_CALLS):
        weights = dict(cfg.model.init_weights(key.fold("call", call), first_dtype(setup)))
        odds = log_odds(cfg.backend.predict(cfg.model, weights, block)[test], "multiclass")
        scale = SPREAD / max(float(odds.std(0).mean()), 1e-9)
        weights |= {name: w * scale for name, w in weights.items() if name.startswith("1.")}
        logits = cfg.backend.predict(cfg.model, weights, block)[test]
        bins = bins_of(log_odds(logits, "multiclass"), cfg.model.outputs)
        replies_and_bins.append((silos.reply(weights), bins))
    min_count = cfg.count_rules.min_count
    prior = label_shares([reply for reply, _ in replies_and_bins])
    chances = torch.stack(
        [chances_of(reply, bins, client, prior, min_count) for reply, bins in replies_and_bins]
    ).log()
    logs = chances.sum(0) - (LABEL_CALLS - 1) * prior[client].log()
    shares = logs.nan_to_num(nan=-1e9, neginf=-1e9).softmax(dim=1)
    confidence, predictions = shares.max(dim=1)
    is_sure = confidence >= SURE
    what = f"labels of test nodes whose features and edges are known, {LABEL_CALLS} evaluations"
    accuracy = float((predictions == y)[is_sure].double().mean()) if bool(is_sure.any()) else None
    return [Finding(MADE, what, float(is_sure.double().mean()), len(y), accuracy, "active")]


def first_dtype(setup: Setup) -> torch.dtype:
    """Return the dtype of the run's weights."""
    return next(iter(first_weights(setup).values())).dtype


def label_shares(replies: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Return the share of test nodes of each class at each silo, (C, K) float64; not all 0."""
    class_counts = torch.stack([reply["test.tp"] + reply["test.fn"] for reply in replies]).amax(0)
    shares = class_counts.double() + 1
    return shares / shares.sum(1, keepdim=True)


def chances_of(
    reply: Mapping[str, Tensor], bins: Tensor, client: Tensor, prior: Tensor, min_count: int
) -> Tensor:
    """Return how likely each class is for each node by one reply, (j, K) float64.

    Args:
        reply: counts of all silos, with histograms (C, K, 2, B).
        bins: (j, K) of the nodes.
        client: (j,) their silos.
        prior: (C, K) float64, for classes of which no histogram came.
        min_count: the least count of the run.
    """
    table = reply["test.histogram"]
    merges = "test.merged.tp" in reply
    guess = prior[client].clone()
    for silo in client.unique().tolist():
        rows = (client == silo).nonzero()[:, 0]
        for k in range(bins.shape[1]):
            if not bool(table[silo, k].any()):
                continue
            own, true = bins[rows, k], table[silo, k, 1].double()
            nodes = torch.bincount(own, minlength=BINS).double()
            if merges:  # near a bin, and not quite sure
                true = spread_bins(table[silo : silo + 1, k : k + 1], min_count)[0, 1]
                true, nodes = smooth(true) + prior[silo, k], smooth(nodes) + 1
            guess[rows, k] = (true / nodes.clamp(min=1e-9))[own].clamp(max=1)
    return guess


def smooth(counts: Tensor, width: int = 3) -> Tensor:
    """Return the sums (B,) of counts within some bins of each bin."""
    ones = counts.new_ones(1, 1, 2 * width + 1)
    return torch.nn.functional.conv1d(counts[None, None], ones, padding=width)[0, 0]


def _features(setup: Setup, block: ClientBlock) -> list[Finding]:
    key = Key.of(setup.config.seed).fold("attack features")
    cfg, silos = setup.method_config, _scored(setup, key)
    inputs = features(block).double()
    if setup.config.model != "mlp" or not bool((inputs != 0).any()):
        return []  # sums over neighbors have features of many nodes
    entry = float(inputs[inputs != 0].abs().median())  # the server knows such data
    test, groups = block.split.test, _runs(seen_apart(setup, block))
    silo = max(range(len(groups)), key=lambda group: int(test[groups[group]].sum()))
    trials = []
    for trial in range(TRIALS):
        u = key.fold("trial", trial).matrix(inputs.shape[1], 1)[:, 0] - 0.5
        u = u / max(float((inputs @ u).std()), 1e-9) * SPREAD
        top, second = highest(silos.reply(linear_score_weights(setup, u)), silo)
        trials.append((score_at(top) - score_at(second), u, top))
    gap, u, top = max(trials, key=lambda trial: trial[0])
    rows = torch.zeros_like(test)
    rows[groups[silo]] = test[groups[silo]]
    scores = cfg.backend.predict(cfg.model, linear_score_weights(setup, u), block)[:, 0]
    order = scores.masked_fill(~rows, -torch.inf).argsort(descending=True)
    target = int(order[cfg.count_rules.min_count // 2])  # in the middle of the highest group
    tested_features = (inputs != 0).sum(0).argsort(descending=True)[:FEATURE_CALLS]
    score_rose = []
    for feature in tested_features.tolist():
        raised_weights = u.clone()
        raised_weights[feature] += gap / 2 / entry  # not so far that others come by
        score_rose.append(
            highest(silos.reply(linear_score_weights(setup, raised_weights)), silo)[0] > top
        )
    predicted, is_present = torch.tensor(score_rose), inputs[target][tested_features] != 0
    what = f"features of one test node, {len(tested_features)} evaluations"
    accuracy = float((predicted == is_present).double().mean())
    share_right = float(predicted[is_present].double().mean()) if bool(is_present.any()) else 0.0
    return [Finding(MADE, what, share_right, int(is_present.sum()), accuracy, "active")]


def linear_score_weights(setup: Setup, u: Tensor) -> dict[str, Tensor]:
    """Return weights under which the score of class 0 of a row x (F,) without neighbors is x u.

    The logits of all other classes are 0, so the log-odds of class 0 is that and a bias.
    """
    shapes, dtype = setup.method_config.model.weight_shapes, first_dtype(setup)
    hidden, classes = shapes["1.weight"]
    assert hidden is not None  # of a model that is known
    out = torch.zeros(hidden, int(classes or 0), dtype=dtype)
    out[:, 0] = 1 / hidden
    bias = torch.zeros(out.shape[1], dtype=dtype)
    return {
        "0.weight": u[:, None].to(dtype).expand(-1, hidden).contiguous(),
        "0.bias": torch.full((hidden,), LINEAR, dtype=dtype),
        "1.weight": out,
        "1.bias": bias,
    }


def highest(reply: Mapping[str, Tensor], silo: int) -> tuple[int, int]:
    """Return the two highest occupied bins of class 0 at a silo, 0 for one that does not exist."""
    occupied = reply["test.histogram"][silo, 0].sum(dim=0).nonzero()[:, 0].tolist()
    second, first = [0, 0, *occupied][-2:]
    return first, second


def score_at(place: int) -> float:
    """Return the log-odds in the middle of a bin, less those of a model that knows nothing."""
    v = 2 * (place + 0.5) / BINS - 1
    return v / (1 - abs(v)) / STEEPNESS


COLUMNS = ("attack", "what is recovered", "share", "right", "server")
UNMEASURED = (
    "Not measured: weights that an active server crafts. The attack here needs --optimizer sgd, "
    "one local step and a two-layer gcn under fedavg or fedopt; other settings stop it, and not a "
    "server that crafts for them."
)
NOTHING = "no attack that silograph knows applies to this run, which does not make it safe"
MOST_STEPS = 200
ALL = 10**9  # clients in a block


@standard_numerics()
def attack(config: RunConfig, graph: Graph | None = None) -> list[Finding]:
    """Simulate a run and return what attacks recover from it; none if none applies.

    Args:
        config: the run; its rounds are as many as the attacks need.
        graph: its data, if not what the config names.

    Raises:
        SilographError: the run cannot be set up, or its method does not train at silos.
    """
    data = source_of(config).read(config.scale) if graph is None else graph
    here = dataclasses.replace(config, block_size=ALL, engine="local", workers=1, address=None)
    setup = prepare(here, data)
    if setup.method.setting.uncut:
        raise ConfigError(
            f"expected a method that trains at silos to attack, got {setup.method.name}, which "
            "trains on the uncut graph in simulation only: choose another method"
        )
    seen = record_server_view(setup, rounds_of(setup))
    block = seen.blocks[0]
    return [
        *attack_features(seen, setup, block),
        *attack_separable_rows(seen, setup, block),
        *attack_labels(seen, setup, block),
        *attack_first_weights(seen, setup, block),
        *attack_with_crafted_weights(setup, block),
        *attack_test_counts(seen),
        *evaluation_findings(setup, block),
    ]


def write_findings(findings: Sequence[Finding], config: RunConfig, folder: Path) -> None:
    """Write `attack.json` and `attack.md` into a new folder.

    Raises:
        ConfigError: the folder exists.
    """
    if folder.exists():
        raise ConfigError(
            f"expected a folder to make, got {folder}, which exists: use another",
            **mistake("existing-output", folder),
        )
    folder.mkdir(parents=True)
    rows = [dataclasses.asdict(finding) for finding in findings]
    text = json.dumps({"method": config.method, "findings": rows}, indent=1)
    (folder / "attack.json").write_text(text + "\n", encoding="utf-8")
    page = f"# What a server recovers from {config.method} on {config.dataset}\n\n"
    table = (
        markdown_table(COLUMNS, [finding_row(finding) for finding in findings])
        if findings
        else NOTHING
    )
    notes = "".join(f"\n{line}\n" for line in unmeasured_notes(findings))
    (folder / "attack.md").write_text(page + table + "\n" + notes, encoding="utf-8")


def unmeasured_notes(findings: Sequence[Finding]) -> list[str]:
    """Return a note on an attack that could not be tried, or nothing."""
    return [] if any(finding.attack == CRAFTED for finding in findings) else [UNMEASURED]


def finding_row(finding: Finding) -> list[str]:
    """Return a finding as the texts of `COLUMNS`."""
    precision = "-" if finding.right is None else f"{100 * finding.right:.1f} %"
    count = f"{100 * finding.share:.1f} % of {finding.of:,}"
    return [finding.attack, finding.recovered, count, precision, finding.server]


def rounds_of(setup: Setup) -> int:
    """Return how many rounds give as many equations as there are features, at most a few."""
    if setup.method.rows == "none":
        return 1
    width = setup.method_config.model.weight_shapes[first_map(setup)][1]
    rounds = -(-setup.schema.num_features // width) + 2
    rate = float(getattr(setup.method_config.options, "rate", 1.0))
    return min(int(rounds / rate), MOST_STEPS)
