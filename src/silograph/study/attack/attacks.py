"""What attacks on sums and rows recover from a simulated run."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from itertools import pairwise
from typing import Any, Literal

import torch
from scipy.linalg import qr
from torch import Tensor

from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Ragged, Shared, State, dense, owners
from silograph.core.resolved_config import training_key
from silograph.evaluation.evaluate import own_counts
from silograph.exchange.collect import collect
from silograph.experiment.run.round_scores import weights_message
from silograph.experiment.run.setup import Setup, first_weights
from silograph.federation.base import Federation, Op, WeightedMean
from silograph.federation.ledger import Ledger
from silograph.graph.block.block import ClientBlock, Route
from silograph.methods.fedavg import train
from silograph.methods.local_training import shared, untouched_rows_after_round
from silograph.nn.conv import Params
from silograph.nn.conv.layers import as_matrix
from silograph.nn.model import Model
from silograph.nn.optim import SGD, Optimizer

# --- overheard -----------------------------------------------------------------------------------
# What the server of a simulated run sees: every message of every silo, before it is folded.


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
    """

    fed: Federation
    calls: list[SeenCall] = field(default_factory=list)
    blocks: list[ClientBlock] = field(default_factory=list)

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
            self.calls.append(SeenCall(name, _copy_inbox(op_inbox), reply))
            self.blocks[:] = [block]
            return state, reply

        return self.fed.call(record_and_call, inbox, **call_options)


def _copy_inbox(inbox: Payload) -> Payload:
    """Return the inbox with copies of shared weights, because servers update them in place."""
    return {n: Shared(f.t.clone()) if isinstance(f, Shared) else f for n, f in inbox.items()}


def record_server_view(setup: Setup, rounds: int) -> RecordingFederation:
    """Train some rounds of a run and score the last, and return what its server saw."""
    fed, key = RecordingFederation(setup.federation), training_key(setup.config)
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
    is_kept[places] = True
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
    support = (features(block) != 0).split(block.off.diff().tolist())
    is_present = torch.stack([part.any(0) for part in support])
    is_exact = [bool((part == own).all(1).any()) for part, own in zip(support, occurs, strict=True)]
    trains = block.num_train > 0
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
    fits = isinstance(model, Model) and set(model.weight_shapes) == names
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
    fed, key = RecordingFederation(setup.federation), Key.of(setup.config.seed).fold("attack")
    setup.method.init(fed, cfg, weights, key)
    fed.call(
        train, shared("weights", weights), what=Kind.WEIGHTS, key=key, reduce=WeightedMean("nodes")
    )
    after = {name: dense(fed.calls[-1].reply[f"weights/{name}"]) for name in names}
    rows = single_rows(weights_without_gradient(weights, cfg.optimizer, 1), after)
    hits = [
        same_up_to_scale(rows[c], inputs[block.off[c] : block.off[c + 1]], 1e-3)
        for c in range(block.num_clients)
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
    matrix = as_matrix(conv.scales, block.adj, degree, conv.scales.itself(degree))
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
