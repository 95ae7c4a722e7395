"""Label-guided sampling: every silo draws nodes so that classes appear as often as in all silos.

Zhang, Luo, Feng, Liu, Zhou and Zheng, "Tackling the local bias in federated graph learning", 2021,
section 2.2 and eq. 5. Client i draws s_i nodes with replacement,

    Q_i(u) = n^{psi(u)} / (n_i^{psi(u)} sum over the classes k of client i of n^k),

psi(u) the training label of u, n^k and n_i^k the training nodes of class k in all silos and in i. A
node is in the sample with probability p(u) = 1 - (1 - Q_i(u))^{s_i}.

What we changed: nodes without a training label count as a class of their own (the paper does not
say). Messages are divided by p(u) as in eq. 5 (`paper`). That is unbiased where all rows are
evaluated and only senders are drawn (`rows = "all"`). Rows and senders from one sample are
dependent within a silo, so `conditional` divides by the probability that u is drawn if v is: 1 for
u = v, p(u, v) / p(v) in one silo, with p(u, v) = 1 - (1 - Q_u)^s - (1 - Q_v)^s + (1 - Q_u - Q_v)^s,
and p(u) across silos.

State: `sampler/share` (n,) float64 Q, `sampler/draws` (C,) int64 s_i, and for a step what
`silograph.exchange.passes` reads. C: clients. n: rows. r: drawn rows. K: classes.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from silograph.core.errors import ConfigError, DataError, ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Ragged, Shared, Stacked, State, offsets
from silograph.exchange.pull import pull, pull_steps, rows_of_width
from silograph.federation.base import Federation, Sum
from silograph.federation.field_specs import COUNT, NODES, FieldSpec, FieldSpecs
from silograph.federation.program import Call, Steps
from silograph.graph.block.block import ClientBlock
from silograph.nn.reach import edges_among

# --- Draws with replacement that do not depend on the order in which items are numbered ----------
#
# k: items.


@dataclass(frozen=True, eq=False)
class WeightedSampler:
    """Items with the probabilities that they are drawn.

    Attributes:
        items: (k,) int64, in the order of their keys.
        up_to: (k,) float64 shares of the items so far, summed; the last is the sum of all.
    """

    items: Tensor
    cumulative: Tensor

    def draw(self, draws: int, key: Key) -> Tensor:
        """Return drawn items, (draws,) int64; there must be one to draw."""
        ticket = (
            key.uniform(torch.arange(draws, device=self.items.device))[:, 0] * self.cumulative[-1]
        )
        drawn_items = torch.searchsorted(self.cumulative, ticket, right=True)
        return self.items[drawn_items.clamp(max=len(self.items) - 1)]


def build_sampler(share: Tensor, item_key: Tensor) -> WeightedSampler:
    """Return the urn of items 0..k-1.

    Args:
        share: (k,) float64, probability of each, up to a common factor.
        item_key: (k,) int64, which do not depend on the numbering.
    """
    order = item_key.argsort()
    return WeightedSampler(order, share[order].cumsum(0))


LOG = logging.getLogger("silograph")
Normalize = Literal["paper", "conditional", "none"]


class Weighing(Protocol):
    """How drawn rows are weighed: options of a method."""

    @property
    def normalize(self) -> Normalize:
        """How messages are divided."""

    @property
    def rows(self) -> Literal["drawn", "all"]:
        """Which rows are evaluated; only drawn ones send."""

    @property
    def weigh_loss(self) -> bool:
        """Whether the loss of a drawn row is divided by p."""


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
    totals = fed.call(tell_labels, {}, what=Kind.STATISTICS, key=key, reduce=Sum())["labels"].t
    nodes = fed.call(tell_nodes, {}, what=Kind.STATISTICS, key=key)["nodes"].t.tolist()
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
    inbox: Payload = {"labels": Shared(totals), "draws": Stacked(torch.tensor(draws))}
    fed.call(learn, inbox, what=Kind.STATISTICS, key=key)


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


def draw_rows(fed: Federation, options: Weighing, key: Key) -> None:
    """Draw the rows of a step, and let silos send each other which boundary rows were drawn."""
    fed.call(draw, {}, what=Kind.CONTROL, key=key)
    if options.rows == "drawn":
        pull(fed, None, tell_drawn, hear_drawn, what=Kind.HALO_KEYS, key=key)


def set_up_sampler_steps(sample: int, classes: int, key: Key) -> Steps:
    """Return the calls of `set_up`."""
    what, labels = Kind.STATISTICS, FieldSpec(Stacked, (classes + 1,), torch.int64, low=0)
    inbox_specs = {
        "labels": FieldSpec(Shared, (classes + 1,), torch.int64, low=0),
        "draws": FieldSpec(Stacked, (), torch.int64, low=0, high=sample),
    }
    return (
        Call(tell_labels, what, key, {}, {"labels": labels}),
        Call(tell_nodes, what, key, {}, {"nodes": COUNT}),
        Call(learn, what, key, inbox_specs),
    )


def draw_steps(options: Weighing, key: Key) -> Steps:
    """Return the calls of `draw_rows`."""
    draw_call = Call(draw, Kind.CONTROL, key)
    if options.rows != "drawn":
        return draw_call
    what, dtype = Kind.HALO_KEYS, torch.bool
    boundary_calls = pull_steps(
        None, tell_drawn, hear_drawn, what=what, key=key, form=rows_of_width(1, dtype)
    )
    return draw_call, boundary_calls


def sampler_specs(sample: int) -> FieldSpecs:
    """Return the specs of the sampler's state between rounds."""
    return {
        "sampler/share": FieldSpec(Ragged, (), torch.float64, rows=NODES, low=0),
        "sampler/draws": FieldSpec(Stacked, (), torch.int64, low=0, high=sample),
    }


def tell_labels(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Count training labels. In: nothing. Out: `labels` (C, K + 1), the last without a label."""
    del inbox, key
    return state, {"labels": Stacked(_label_counts(block, cfg.model.outputs))}


def tell_nodes(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Count nodes. In: nothing. Out: `nodes` (C,)."""
    del cfg, inbox, key
    return state, {"nodes": Stacked(block.off.diff())}


def learn(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Compute Q. In: `labels` (K + 1,) of all silos, `draws` (C,). Out: nothing."""
    del key
    totals, own_counts = inbox["labels"].t.double(), _label_counts(block, cfg.model.outputs)
    label, client = _training_labels(block, cfg.model.outputs), block.client
    present = (totals * (own_counts > 0)).sum(1)
    share = totals[label] / (own_counts[client, label] * present[client])
    draws = _check_draws(block, inbox["draws"].t)
    new: dict[str, Stacked | Ragged] = {
        "sampler/share": Ragged(share, block.off),
        "sampler/draws": Stacked(draws),
    }
    return {**state, **new}, {}


def draw(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Draw rows and work out the weights of their messages. In: nothing. Out: nothing."""
    del inbox
    share, draws = state["sampler/share"].t, _check_draws(block, state["sampler/draws"].t)
    parts = [
        draw_distinct_rows(share[a:b], block.row_key[a:b], int(s), key.fold("sample", name))
        for a, b, s, name in zip(block.off[:-1], block.off[1:], draws, block.ids, strict=True)
    ]
    off = offsets(torch.tensor([len(part) for part in parts], device=block.off.device))
    drawn_rows_of_clients = Ragged(torch.cat(parts), off)
    return {
        **state,
        **weighted_pass_fields(block, drawn_rows_of_clients, share, draws, cfg.options),
    }, {}


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


def weighted_pass_fields(
    block: ClientBlock, drawn_in_clients: Ragged, share: Tensor, draws: Tensor, options: Weighing
) -> dict[str, Ragged]:
    """Return the fields with the rows of a step and their weights (see `stages`).

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
    p = inclusion_probability(share, draws[block.client])
    message_weight = torch.zeros(len(p), dtype=torch.float64, device=p.device)
    message_weight[rows] = 1 if options.normalize == "none" else 1 / p[rows]
    rows_in_pass, off = rows, drawn_in_clients.off
    if options.rows == "all":
        rows_in_pass, off = torch.arange(len(p), device=p.device), block.off
        local = rows_in_pass - block.off[block.client]
    else:
        local = drawn_in_clients.t
    edges = edges_among(block, rows_in_pass)
    v, u = rows_in_pass[edges.row], rows_in_pass[edges.indices.long()]
    own_weight = cross = message_weight[rows_in_pass].to(dtype)[:, None]
    inner = message_weight[u]
    if options.normalize == "conditional" and options.rows == "drawn":
        own_weight = torch.ones_like(own_weight)
        inner = p[v] / joint_inclusion_probability(share[u], share[v], draws[block.client[v]])
    fields = {
        "rows": Ragged(local, off),
        "own": Ragged(own_weight, off),
        "cross": Ragged(cross, off),
        "inner": Ragged(inner.to(dtype), edges.indptr.long()[off]),
    }
    if options.weigh_loss and options.rows == "drawn":
        fields["loss"] = Ragged((1 / p[rows_in_pass]).to(dtype), off)
    return {f"pass/{name}": field for name, field in fields.items()}


def tell_drawn(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Send which boundary rows were drawn. In: nothing. Out: `rows` (B, 1) bool."""
    del cfg, inbox, key
    local = state["pass/rows"]
    assert isinstance(local, Ragged)  # from `draw`
    is_drawn = torch.zeros(len(block.row_key), dtype=torch.bool, device=local.t.device)
    is_drawn[local.t + torch.repeat_interleave(block.off[:-1], local.off.diff())] = True
    return state, {"rows": Ragged(is_drawn[block.halo.boundary][:, None], block.halo.boundary_off)}


def hear_drawn(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Store which halo slots stand for drawn rows. In: `rows` (S, 1) bool. Out: nothing."""
    del cfg, key
    return {**state, "pass/heard": Ragged(inbox["rows"].t[:, 0], block.halo.off)}, {}


def draw_distinct_rows(share: Tensor, row_key: Tensor, draws: int, key: Key) -> Tensor:
    """Return the distinct rows of one client that `draws` draws with replacement hit, ascending.

    The draws do not depend on the order of the rows.

    Args:
        share: (n,) float64 probabilities.
        row_key: (n,).
        draws: s.
        key: the client's.
    """
    if draws == 0:
        return row_key.new_zeros(0)
    rows: Tensor = torch.unique(build_sampler(share, row_key).draw(draws, key))
    return rows


def inclusion_probability(q: Tensor, draws: Tensor) -> Tensor:
    """Return 1 - (1 - q)^s."""
    return -torch.expm1(draws * torch.log1p(-q.clamp(max=1)))


def joint_inclusion_probability(q: Tensor, other: Tensor, draws: Tensor) -> Tensor:
    """Return the probability that two nodes of a silo are both drawn."""
    neither = torch.pow((1 - q - other).clamp(min=0), draws)
    return inclusion_probability(q, draws) + inclusion_probability(other, draws) - 1 + neither


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
