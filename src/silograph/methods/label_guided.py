"""Label-guided global training: one model, trained on all silos' graphs as if they were one.

Zhang, Luo, Feng, Liu, Zhou and Zheng, "Tackling the local bias in federated graph learning", 2021
(algorithm 1). In every step all silos together run a forward and a backward pass through the model;
sums over neighbors reach other silos as partial sums (`silograph.exchange.passes`). Gradients of
the weights are summed, and the server takes one step, so that there is one model.

In a step silos draw nodes and say which boundary rows take part (`draw`, `tell_drawn`,
`hear_drawn`), then follow the calls that are listed in `silograph.exchange.passes`.

Without sampling this is centralized training, to rounding. With `sample` every silo draws nodes by
label, so that classes appear as often as in all silos, and the pass runs on those and the edges
among them (section 2.2 and eq. 5). Client i draws s_i nodes with replacement,

    Q_i(u) = n^{psi(u)} / (n_i^{psi(u)} sum over the classes k of client i of n^k),

psi(u) the training label of u, n^k and n_i^k the training nodes of class k in all silos and in i. A
node is in the sample with probability p(u) = 1 - (1 - Q_i(u))^{s_i}.

What we changed: the loss is divided by the number of training nodes that take part; with
`weigh_loss` each counts 1/p and the number is that of all, which makes the loss of drawn rows
unbiased. Judged with complete sums, too: a node of the test set hears all its neighbors. With
`min_nodes_per_row` or `min_silos_per_row` above 1 sums are not complete: what has fewer own nodes
or silos behind it counts as 0, forward, backward and in scores, and degrees stay as they are.

Nodes without a training label count as a class of their own (the paper does not say). Messages are
divided by p(u) as in eq. 5 (`paper`). That is unbiased where all rows are evaluated and only
senders are drawn (`rows = "all"`). Rows and senders from one sample are dependent within a silo, so
`conditional` divides by the probability that u is drawn if v is: 1 for u = v, p(u, v) / p(v) in one
silo, with p(u, v) = 1 - (1 - Q_u)^s - (1 - Q_v)^s + (1 - Q_u - Q_v)^s, and p(u) across silos.

C: clients. n: rows. r: drawn rows. K: classes. B: boundary rows. S: halo slots.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass as options_class
from torch import Tensor

from silograph.core.config import STRICT
from silograph.core.errors import ConfigError, DataError, ProtocolError, mistake
from silograph.core.key import Key, draws_of_keys
from silograph.core.kinds import Kind
from silograph.core.payload import Ragged, Shared, Stacked, offsets
from silograph.evaluation.scoring import AllSilos
from silograph.exchange.pass_state import PassState
from silograph.exchange.passes import divisible, gradients
from silograph.exchange.pull import Fetch
from silograph.exchange.rows import Relayed
from silograph.federation.base import Federation, Sum
from silograph.federation.field_specs import (
    BOUNDARY,
    COUNT,
    NODES,
    SLOTS,
    FieldSpec,
    FieldSpecs,
)
from silograph.federation.messages import Empty
from silograph.federation.ops import CallContext
from silograph.graph.block.block import ClientBlock
from silograph.methods.base import Method, MethodConfig, Needs, RoundReport, ServerState
from silograph.methods.global_training import (
    START_TOGETHER,
    calls_of_steps,
    check_together,
    start_together,
    steps_together,
    without_optimizer,
)
from silograph.methods.ops import Clients, Server, calls, op, program, when
from silograph.nn.conv import Params
from silograph.nn.mini_batches import WeightedSampler, build_sampler
from silograph.nn.reach import edges_among

LOG = logging.getLogger("silograph")
Normalize = Literal["paper", "conditional", "none"]


@options_class(frozen=True, config=STRICT)
class LabelGuidedOptions:
    """What is drawn and how it is weighed; the help texts are the documentation of the fields."""

    sample: Annotated[int, Field(ge=1)] | None = field(
        default=None,
        metadata={"help": "nodes drawn in a step, all silos together; none: all nodes"},
    )
    normalize: Normalize = field(
        default="paper",
        metadata={
            "help": "divide messages by p(u) (paper), p(u | v) (conditional), nothing (none)"
        },
    )
    rows: Literal["drawn", "all"] = field(
        default="drawn",
        metadata={"help": "rows that are evaluated in a step, drawn or all; only drawn ones send"},
    )
    weigh_loss: bool = field(
        default=False, metadata={"help": "weigh a drawn node's loss by 1/p: unbiased, less steady"}
    )


def check(cfg: MethodConfig[LabelGuidedOptions]) -> None:
    """Raise `ConfigError` for options about drawn nodes where none are drawn, and other steps."""
    defaults, options = LabelGuidedOptions(), cfg.options
    names = [name for name in vars(defaults) if getattr(options, name) != getattr(defaults, name)]
    if options.sample is None and names:
        raise ConfigError(
            f"expected sample with {names[0]}, which says how drawn nodes count, got none: give "
            f"--option sample=NODES, or leave out {', '.join(names)}",
            **mistake("missing-option", "sample"),
        )
    check_together(cfg)


def draws_rows(cfg: MethodConfig[LabelGuidedOptions]) -> bool:
    """Return whether nodes are drawn."""
    return cfg.options.sample is not None


def evaluates_drawn(cfg: MethodConfig[LabelGuidedOptions]) -> bool:
    """Return whether only drawn nodes are evaluated, so that silos must know of each other's."""
    return cfg.options.rows == "drawn"


# --- Set-up: Q and s_i of each client (section 2.2) ----------------------------------------------


def share_specs(cfg: MethodConfig[LabelGuidedOptions]) -> FieldSpecs:
    """Return the spec of Q, where nodes are drawn."""
    spec = FieldSpec(Ragged, (), torch.float64, rows=NODES, low=0)
    return {"share": spec} if draws_rows(cfg) else {}


def draws_specs(cfg: MethodConfig[LabelGuidedOptions]) -> FieldSpecs:
    """Return the spec of s_i, where nodes are drawn."""
    spec = FieldSpec(Stacked, (), torch.int64, low=0, high=cfg.options.sample)
    return {"draws": spec} if draws_rows(cfg) else {}


def labels_spec(
    form: type[Shared] | type[Stacked],
) -> Callable[[MethodConfig[LabelGuidedOptions]], FieldSpec]:
    """Return the spec of counts of labels, the last one of nodes without a training label."""
    return lambda cfg: FieldSpec(form, (cfg.model.outputs + 1,), torch.int64, low=0)


@dataclass(frozen=True)
class ClientState:
    """What a client draws by.

    Attributes:
        share: (n,) float64 Q.
        draws: (C,) int64 s_i.
    """

    PREFIX: ClassVar[str] = "sampler/"
    share: Annotated[Ragged, share_specs]
    draws: Annotated[Stacked, draws_specs]


@dataclass(frozen=True)
class LabelCounts:
    """Number of a client's nodes with each training label, (C, K + 1), the last without one."""

    labels: Annotated[Stacked, labels_spec(Stacked)]


@dataclass(frozen=True)
class NodeCount:
    """Number of nodes, (C,)."""

    nodes: Annotated[Stacked, COUNT]


@dataclass(frozen=True)
class Draws:
    """What clients compute Q by.

    Attributes:
        labels: (K + 1,) numbers of the nodes of all silos with each training label.
        draws: (C,) int64 s_i.
    """

    labels: Annotated[Tensor, labels_spec(Shared)]
    draws: Annotated[Stacked, draws_specs]


@op(Kind.STATISTICS)
def tell_labels(clients: Clients, state: Empty, _: Empty) -> tuple[Empty, LabelCounts]:
    """Count training labels."""
    counts = _label_counts(clients.block, clients.cfg.model.outputs)
    return state, LabelCounts(Stacked(counts))


@op(Kind.STATISTICS)
def tell_nodes(clients: Clients, state: Empty, _: Empty) -> tuple[Empty, NodeCount]:
    """Count nodes."""
    return state, NodeCount(Stacked(clients.block.off.diff()))


@op(Kind.STATISTICS)
def learn(clients: Clients, _state: Empty, request: Draws) -> tuple[ClientState, Empty]:
    """Compute Q."""
    block, outputs = clients.block, clients.cfg.model.outputs
    totals, own_counts = request.labels.double(), _label_counts(block, outputs)
    label, client = _training_labels(block, outputs), block.client
    present = (totals * (own_counts > 0)).sum(1)
    share = totals[label] / (own_counts[client, label] * present[client])
    draws = _check_draws(block, request.draws.t)
    return ClientState(Ragged(share, block.off), Stacked(draws)), Empty()


def _check_draws(block: ClientBlock, draws: Tensor) -> Tensor:
    """Return numbers of draws (C,); raise `ProtocolError` for more than a client has nodes.

    Every draw takes memory, and `shares` gives no silo more.
    """
    nodes = block.off.diff()
    is_valid = not draws.is_floating_point() and draws.shape == nodes.shape
    if not is_valid or not bool(((draws >= 0) & (draws <= nodes)).all()):
        raise ProtocolError(
            f"expected draws of at most {nodes[:4].tolist()}, the nodes of the clients, got "
            f"{draws.flatten()[:4].tolist()}"
        )
    return draws


def _training_labels(block: ClientBlock, classes: int) -> Tensor:
    """Return the class of every training node, `classes` for all other nodes, (n,) int64."""
    if block.y.dim() != 1:
        description = "numbers" if block.y.is_floating_point() else "several"
        raise DataError(
            f"expected one label a node for label-guided sampling, got {description}: use "
            "sample=none"
        )
    return torch.where(block.split.train, block.y, classes)


def _label_counts(block: ClientBlock, classes: int) -> Tensor:
    """Count the nodes of each client with each of the K + 1 labels, (C, K + 1) int64."""
    cell = block.client * (classes + 1) + _training_labels(block, classes)
    counts = torch.bincount(cell, minlength=block.num_clients * (classes + 1))
    return counts.view(block.num_clients, classes + 1)


SET_UP_SAMPLER = tell_labels, tell_nodes, learn


def set_up_sampler(fed: Federation, sample: int, normalize: Normalize, key: Key) -> None:
    """Let every client compute its probabilities and its number of draws.

    Args:
        fed: the federation.
        sample: s, draws of all silos together in a step.
        normalize: how messages are divided.
        key: unused by the ops, as nothing is drawn yet.

    Raises:
        ConfigError: more draws than nodes, or single draws with `conditional`.
        DataError: a class without training nodes, or several labels a node.
    """
    context = CallContext(None, key)
    totals = context.call(fed, tell_labels, Empty(), Sum())["labels"].t
    nodes = context.call(fed, tell_nodes, Empty())["nodes"].t.tolist()
    empty = (totals[:-1] == 0).nonzero()[:, 0].tolist()
    if empty:
        raise DataError(
            f"expected training nodes of every class, got none of class {empty[0]} in any silo: "
            "use another split, or no sampling (sample=none)"
        )
    if sample > sum(nodes):
        raise ConfigError(
            f"expected sample of at most {sum(nodes)}, the nodes of all silos, got {sample}"
        )
    draws = shares(sample, nodes)
    if normalize == "conditional" and 1 in draws:
        raise ConfigError(
            f"expected at least 2 draws from every silo with normalize=conditional, got 1 from "
            f"{fed.ids[draws.index(1)]}: raise sample, or use normalize=paper"
        )
    if num_idle := draws.count(0):
        LOG.warning(
            "%d of %d silos draw no node in any step (%s first): raise sample, %d now",
            num_idle,
            len(draws),
            fed.ids[draws.index(0)],
            sample,
        )
    context.call(fed, learn, Draws(totals, Stacked(torch.tensor(draws))))


def shares(sample: int, nodes: Sequence[int]) -> list[int]:
    """Return s_i = n_i s / n of every silo, rounded by largest remainder so that their sum is s.

    >>> shares(10, [5, 5, 6])
    [3, 3, 4]
    """
    total = sum(nodes)
    draws = [sample * n // total for n in nodes]
    by_rest = sorted(range(len(nodes)), key=lambda i: (-(sample * nodes[i] % total), i))
    for i in by_rest[: sample - sum(draws)]:
        draws[i] += 1
    return draws


@calls(*START_TOGETHER, when(draws_rows, *SET_UP_SAMPLER))
def setup(server: Server, weights: Params) -> ServerState:
    """Set up the clients, and what they draw by."""
    state, options = start_together(server, weights), server.options
    if options.sample is not None:
        set_up_sampler(server.fed, options.sample, options.normalize, server.key)
    return state


# --- Before each step: drawn rows, and the weights of their messages (eq. 5) ---------------------


@dataclass(frozen=True)
class StepState(PassState, ClientState):
    """State of a client that has drawn rows for a step."""


@dataclass(frozen=True)
class DrawnRows:
    """Which boundary rows were drawn, (B, 1) bool."""

    rows: Annotated[Ragged, FieldSpec(Ragged, (1,), torch.bool, rows=BOUNDARY)]


@dataclass(frozen=True)
class DrawnSlots:
    """Which halo slots stand for drawn rows, (S, 1) bool."""

    rows: Annotated[Ragged, FieldSpec(Ragged, (1,), torch.bool, rows=SLOTS)]


@op(Kind.CONTROL)
def draw(
    clients: Clients[LabelGuidedOptions], state: ClientState, _: Empty
) -> tuple[StepState, Empty]:
    """Draw rows and work out the weights of their messages."""
    block, key, draws = clients.block, clients.key, _check_draws(clients.block, state.draws.t)
    keys = [key.fold("sample", name) for name in block.ids]
    sampling = sampling_of(block, state.share.t, draws)
    drawn = draw_distinct_rows(sampling.samplers, draws.tolist(), keys)
    rows = weighted_rows(block, drawn, state.share.t, draws, clients.options)
    return StepState(**vars(state), **vars(rows)), Empty()


@dataclass(frozen=True, eq=False)
class Sampling:
    """What does not change from draw to draw.

    Attributes:
        share: (n,) float64 Q.
        draws: (C,) int64 s_i.
        samplers: of the rows of each client, as it counts them.
        probability: (n,) float64 p, with which a row is in the sample.
    """

    share: Tensor
    draws: Tensor
    samplers: tuple[WeightedSampler, ...]
    probability: Tensor


def sampling_of(block: ClientBlock, share: Tensor, draws: Tensor) -> Sampling:
    """Return the samplers and probabilities of a block's draws, computed at its first step."""
    cached = block.memo.get("sampling")
    if isinstance(cached, Sampling) and cached.share is share and cached.draws is draws:
        return cached
    sizes = block.off.diff().tolist()
    parts = zip(share.split(sizes), block.row_key.split(sizes), strict=True)
    samplers = tuple(build_sampler(*part) for part in parts)
    p = inclusion_probability(share, draws[block.client])
    block.memo["sampling"] = sampling = Sampling(share, draws, samplers, p)
    return sampling


def draw_distinct_rows(
    samplers: Sequence[WeightedSampler], draws: Sequence[int], keys: Sequence[Key]
) -> Ragged:
    """Return the distinct rows of each client that are drawn with replacement, ascending.

    The draws do not depend on the order of the rows.

    Args:
        samplers: of each client's rows.
        draws: number of draws of each client.
        keys: of the draws of each client.
    """
    # In NumPy, and the random numbers of all clients at once: each has few.
    numbers = np.split(draws_of_keys(keys, draws), np.cumsum(draws)[:-1])
    device, parts = samplers[0].items.device, list[np.ndarray]()
    for sampler, own in zip(samplers, numbers, strict=True):
        is_drawn = np.zeros(len(sampler.items), bool)
        if len(own):
            is_drawn[sampler.items.cpu().numpy()[sampler.find(own)]] = True
        parts.append(np.flatnonzero(is_drawn))
    off = offsets(torch.tensor([len(part) for part in parts]))
    return Ragged(torch.from_numpy(np.concatenate(parts)).to(device), off.to(device))


def inclusion_probability(q: Tensor, draws: Tensor) -> Tensor:
    """Return 1 - (1 - q)^s."""
    return -torch.expm1(draws * torch.log1p(-q.clamp(max=1)))


def joint_inclusion_probability(q: Tensor, other: Tensor, draws: Tensor) -> Tensor:
    """Return the probability that two nodes of a silo are both drawn."""
    neither = torch.pow((1 - q - other).clamp(min=0), draws)
    return inclusion_probability(q, draws) + inclusion_probability(other, draws) - 1 + neither


def weighted_rows(
    block: ClientBlock,
    drawn_in_clients: Ragged,
    share: Tensor,
    draws: Tensor,
    options: LabelGuidedOptions,
) -> PassState:
    """Return the rows of a step and the weights of their messages.

    Args:
        block: C clients.
        drawn_in_clients: (r,) int64 rows, numbered per client, ascending.
        share: (n,) float64 Q.
        draws: (C,) int64 s_i.
        options: how drawn rows are weighed.
    """
    assert block.adj.values is not None  # blocks carry values of the run's dtype
    dtype = block.adj.values.dtype
    rows = drawn_in_clients.t + torch.repeat_interleave(block.off[:-1], drawn_in_clients.off.diff())
    p = sampling_of(block, share, draws).probability
    message_weight = torch.zeros(len(p), dtype=torch.float64, device=p.device)
    message_weight[rows] = 1 if options.normalize == "none" else 1 / p[rows]
    rows_in_pass, off = rows, drawn_in_clients.off
    if options.rows == "all":
        rows_in_pass, off = torch.arange(len(p), device=p.device), block.off
        local = rows_in_pass - block.off[block.client]
    else:
        local = drawn_in_clients.t
    edges = edges_among(block, rows_in_pass)
    u = rows_in_pass[edges.indices.long()]
    own_weight = cross = message_weight[rows_in_pass].to(dtype)[:, None]
    inner = message_weight[u]
    if options.normalize == "conditional" and options.rows == "drawn":
        v, own_weight = rows_in_pass[edges.row], torch.ones_like(own_weight)
        inner = p[v] / joint_inclusion_probability(share[u], share[v], draws[block.client[v]])
    weighs_loss = options.weigh_loss and options.rows == "drawn"
    return PassState(
        rows=Ragged(local, off),
        own=Ragged(own_weight, off),
        cross=Ragged(cross, off),
        inner=Ragged(inner.to(dtype), edges.indptr.long()[off]),
        loss=Ragged((1 / p[rows_in_pass]).to(dtype), off) if weighs_loss else None,
    )


@op(Kind.HALO_KEYS)
def tell_drawn(clients: Clients, state: PassState, _: Empty) -> tuple[PassState, DrawnRows]:
    """Send which boundary rows were drawn."""
    block, local = clients.block, state.rows
    assert local is not None  # from `draw`
    is_drawn = torch.zeros(len(block.row_key), dtype=torch.bool, device=local.t.device)
    is_drawn[local.t + torch.repeat_interleave(block.off[:-1], local.off.diff())] = True
    boundary = is_drawn[block.halo.boundary][:, None]
    return state, DrawnRows(Ragged(boundary, block.halo.boundary_off))


@op(Kind.HALO_KEYS)
def hear_drawn(clients: Clients, state: PassState, request: DrawnSlots) -> tuple[PassState, Empty]:
    """Store which halo slots stand for drawn rows."""
    heard = Ragged(request.rows.t[:, 0], clients.block.halo.off)
    return replace(state, heard=heard), Empty()


DRAWN_ROWS = Fetch[Empty](None, tell_drawn, hear_drawn)


# --- Round (algorithm 1) -------------------------------------------------------------------------


@calls(
    calls_of_steps(when(draws_rows, draw, when(evaluates_drawn, DRAWN_ROWS)), is_named=draws_rows)
)
def train_round(server: Server, state: ServerState) -> tuple[ServerState, RoundReport]:
    """Take `local_epochs` steps, all silos together; facts count incomplete sums."""
    relayed: list[Relayed] = []
    state, report = steps_together(server, state, partial(step, relayed=relayed))
    if server.cfg.row_minimum.limits:
        facts = vars(sum(relayed, Relayed()))
        report = replace(report, facts={f"rows_{name}": n for name, n in facts.items()})
    return state, report


def step(
    server: Server,
    weights: Mapping[str, Tensor],
    relayed: list[Relayed] | None = None,
) -> tuple[Params, float | None]:
    """Draw nodes, and return the gradients of their loss; `relayed` gets counts of sums."""
    cfg = server.cfg
    if draws_rows(cfg):
        server.call(draw, Empty())
        if evaluates_drawn(cfg):
            server.exchange(DRAWN_ROWS, Empty())
    return gradients(
        server.fed,
        divisible(cfg.model),
        weights,
        server.call_key,
        weighed=cfg.options.weigh_loss,
        row_minimum=cfg.row_minimum,
        relayed=relayed,
    )


LABEL_GUIDED = Method(
    name="label_guided",
    title="one model on the joined graph, on all nodes or those drawn by label",
    reference="Zhang et al., Tackling the local bias in federated graph learning, 2021",
    options=LabelGuidedOptions,
    **program(train_round, setup=setup, state=ClientState, trained=without_optimizer),
    check=check,
    evaluate=AllSilos(),
    needs=Needs(keep_optimizer=True),
    rows="sums",
    facts={
        "rows_sent": "Rows that clients sent for sums over silos.",
        "rows_left_out": "Rows that clients left out, since they are of too few nodes.",
        "rows_withheld": "Sums that the server did not send on, since too few silos are in them.",
    },
    only_sums=True,
)
