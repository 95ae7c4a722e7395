"""NeighGen: how many neighbors of a node are missing, and what their features are.

Zhang, Yang, Li, Sun and Yiu, "Subgraph federated learning with missing neighbor generation",
NeurIPS 2021, sections 4.2 and 4.3. Every client has one of its own:

    z_v     = two layers of GraphSAGE on the client's graph                        encoder
    d_v     = z_v . w + b                                                          dGen
    x_v^p   = (z_v + e_v^p) W + c,  e normal, for each p < round(d_v)              fGen

It learns on a graph some of whose nodes are hidden, with H_v the hidden neighbors of v; the loss
is the mean over the nodes v that are not hidden of

    smooth L1(d_v, |H_v|) + weight * sum over p < round(d_v) of min over u in H_v of |x_v^p - x_u|^2

C: clients. n: rows. k: generated rows. m: pairs of generated and hidden rows. F: features.
H: width.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from silograph.core.key import Key
from silograph.core.payload import offsets, ranges
from silograph.core.work import report_entries, report_rows
from silograph.graph.block.block import ClientBlock, SparseRows, dense_rows
from silograph.graph.block.extension import neighbor_keys
from silograph.graph.csr import CSR
from silograph.nn.conv import Messages, Params, convolve
from silograph.nn.conv.base import glorot, rooted_init
from silograph.nn.conv.sage import SAGE
from silograph.nn.segment import (
    gradients,
    segment_bias,
    segment_linear,
    segment_sum,
    sparse_product,
)

AT_ONCE = 1 << 24  # numbers of pairs of rows that are compared at once
TINY = 2.0**-53


@dataclass(frozen=True)
class NeighGen:
    """A generator as a value; its weights are (C, ...).

    Attributes:
        features: F.
        width: H.
        most: neighbors that a node gets at most.
    """

    features: int
    width: int
    most: int

    def init(self, key: Key) -> Params:
        """Return the weights that all clients begin with, float64, shared form.

        The degree predictor begins at 0, so nothing is generated before it has learned.
        """
        width = self.width
        first = rooted_init(key.fold("first"), self.features, width)
        second = rooted_init(key.fold("second"), width, width)
        zero = torch.zeros(width, dtype=torch.float64)
        return {
            **{f"first.{name}": w for name, w in first.items()},
            **{f"second.{name}": w for name, w in second.items()},
            "degree.weight": zero[:, None],
            "degree.bias": zero[:1],
            "feature.weight": glorot(key.fold("feature"), width, self.features),
            "feature.bias": torch.zeros(self.features, dtype=torch.float64),
        }

    def encode(self, weights: Mapping[str, Tensor], block: ClientBlock, along: Messages) -> Tensor:
        """Return z (n, H) of the rows of a block, by messages among them."""
        h = convolve(SAGE, _layer(weights, "first"), block.x, along).relu()
        report_rows(block.off, self.width * (1 + gradients(h)))
        return convolve(SAGE, _layer(weights, "second"), h, along)

    def missing(self, weights: Mapping[str, Tensor], z: Tensor, off: Tensor) -> Tensor:
        """Return d (n,), how many neighbors rows seem to lack."""
        d = segment_linear(z, weights["degree.weight"], off)
        return segment_bias(d, weights["degree.bias"], off)[:, 0]

    def counted(self, d: Tensor) -> Tensor:
        """Return how many neighbors are generated for each row, (n,) int64."""
        return d.detach().nan_to_num(0.0).clamp(0, self.most).round().long()

    def generate(self, weights: Mapping[str, Tensor], z: Tensor, made: "Made", key: Key) -> Tensor:
        """Return the features of generated neighbors (k, F), each with noise of its own."""
        noise = torch.special.ndtri(key.uniform(made.key, self.width).clamp(min=TINY))
        x = z[made.host] + noise.to(z.dtype)
        report_rows(made.off, self.width * (1 + gradients(z)))
        return segment_bias(
            segment_linear(x, weights["feature.weight"], made.off),
            weights["feature.bias"],
            made.off,
        )


def _layer(weights: Mapping[str, Tensor], name: str) -> Params:
    return {k.partition(".")[2]: w for k, w in weights.items() if k.startswith(f"{name}.")}


@dataclass(frozen=True, eq=False)
class Made:
    """Which neighbors are generated.

    Attributes:
        host: (k,) int64 row that each is a neighbor of, ascending.
        key: (k,) int64 row keys.
        off: (C + 1,) int64 those of each client.
    """

    host: Tensor
    key: Tensor
    off: Tensor


def made_for(block: ClientBlock, count: Tensor) -> Made:
    """Return the neighbors that are generated, from how many each row gets (n,) int64."""
    host = torch.repeat_interleave(count)
    return Made(host, neighbor_keys(block.row_key, host), offsets(count)[block.off])


@dataclass(frozen=True, eq=False)
class Impaired:
    """Clients' graphs with some nodes hidden.

    Attributes:
        along: messages among the rows that are not hidden.
        hidden: (n,) bool.
        edges: (n, n) from rows that are not hidden to their hidden neighbors.
    """

    along: Messages
    hidden: Tensor
    edges: CSR


def impaired(block: ClientBlock, hidden: Tensor) -> Impaired:
    """Return the graphs of a block without the rows hidden (n,) bool, and their edges."""
    assert block.adj.values is not None  # blocks carry values of the run's dtype
    row, column, n = block.adj.row, block.adj.indices.long(), len(hidden)
    seen, lost = ~hidden[row] & ~hidden[column], ~hidden[row] & hidden[column]
    device, dtype = block.off.device, block.adj.values.dtype
    inner, outer = (
        CSR.from_pairs(row[part].cpu(), column[part].cpu(), (n, n)).to(device, dtype)
        for part in (seen, lost)
    )
    degree = inner.degree.to(dtype)[:, None]
    along = Messages(inner, True, degree, degree, None, block.off, block.off)
    return Impaired(along, hidden, outer)


def objective(
    gen: NeighGen,
    weights: Mapping[str, Tensor],
    block: ClientBlock,
    graph: Impaired,
    key: Key,
    weight: float,
    answers: Tensor | None = None,
) -> Tensor:
    """Return the sum of the clients' losses; see the head of this file.

    Args:
        gen: the generator.
        weights: (C, ...).
        block: the clients.
        graph: theirs, with hidden nodes.
        key: of the noise.
        weight: of the features' part.
        answers: (k, F) gradients by the generated rows of what other clients add to that part.
    """
    z = gen.encode(weights, block, graph.along)
    d = gen.missing(weights, z, block.off)
    share = _shares(block, graph.hidden, z.dtype)
    report_rows(block.off, 6 * (1 + gradients(d)))
    total = (smooth_l1_loss(d, graph.edges.degree.to(d.dtype), reduction="none") * share).sum()
    made = made_for(block, gen.counted(d).masked_fill(graph.hidden, 0))
    x = gen.generate(weights, z, made, key)
    near = nearest_hidden(x.detach(), made, block, graph.edges)
    found = near >= 0
    report_rows(made.off, 3 * gen.features * (1 + gradients(x)))
    apart = (x[found] - dense_rows(block, near[found])).square().sum(1)
    total = total + weight * (apart * share[made.host[found]]).sum()
    if answers is not None:
        total = total + weight * ((x * answers).sum(1) * share[made.host]).sum()
    return total


def shown(
    gen: NeighGen, weights: Mapping[str, Tensor], block: ClientBlock, graph: Impaired, key: Key
) -> tuple[Tensor, Tensor]:
    """Return the rows that `objective` generates (k, F), and those of each client (C + 1,)."""
    with torch.no_grad():
        z = gen.encode(weights, block, graph.along)
        count = gen.counted(gen.missing(weights, z, block.off))
        made = made_for(block, count.masked_fill(graph.hidden, 0))
        return gen.generate(weights, z, made, key), made.off


def _shares(block: ClientBlock, hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return one over the number of rows of the client that are not hidden; 0 for hidden ones."""
    here = (~hidden).to(dtype)
    return here / segment_sum(here, block.off).clamp(min=1)[block.client]


def nearest_hidden(x: Tensor, made: Made, block: ClientBlock, edges: CSR) -> Tensor:
    """Return the hidden neighbor of each generated row's node that is nearest to it, (k,) int64.

    -1 where the node has none.
    """
    counts = edges.degree[made.host]
    other = edges.indices.long()[ranges(edges.indptr.long()[made.host], counts)]
    which = torch.repeat_interleave(counts)
    report_entries(offsets(counts), made.off, 3 * x.shape[1])
    pairs = torch.arange(len(which), device=x.device).split(max(1, AT_ONCE // x.shape[1]))
    apart = [(x[which[p]] - dense_rows(block, other[p])).square().sum(1) for p in pairs]
    place = first_least(torch.cat(apart), which, len(x))
    return torch.where(place >= 0, torch.cat([other, other.new_zeros(1)])[place], -1)


def first_least(value: Tensor, group: Tensor, groups: int) -> Tensor:
    """Return where each group has its least value first, (groups, ...) int64; -1 where it has none.

    Args:
        value: (m, ...).
        group: (m,) int64 which group each belongs to.
        groups: how many there are.
    """
    shape, count = value.shape[1:], len(value)
    index = group.view(-1, *[1] * len(shape)).expand_as(value)
    least = value.new_full((groups, *shape), torch.inf)
    least = least.scatter_reduce(0, index, value, "amin")
    number = torch.arange(count, device=value.device).view(-1, *[1] * len(shape))
    here = torch.where(value == least.gather(0, index), number, count)
    first = here.new_full((groups, *shape), count).scatter_reduce(0, index, here, "amin")
    return torch.where(first == count, -1, first)


def pulls(x: Tensor, block: ClientBlock) -> Tensor:
    """Return 2 (x - x_u) of rows x (k, F), u the nearest row of each client, (C, k, F).

    That is the gradient of min over u of |x - x_u|^2. It is 0 for clients without rows.
    """
    parts = [_pulls(p, block) for p in x.split(max(1, AT_ONCE // max(1, len(block.row_key))))]
    return torch.cat(parts, dim=1)


def _pulls(x: Tensor, block: ClientBlock) -> Tensor:
    """Return the same of so few rows that their distances to all rows of the block fit memory."""
    length, product = _products(x, block)
    near = first_least(length[:, None] - 2 * product, block.client, block.num_clients)  # (C, k)
    empty = x.new_zeros(1, x.shape[1])
    rows = dense_rows(block, near.clamp(min=0).flatten()) if len(length) else empty
    found = 2 * (x - rows.expand(near.numel(), -1).view(*near.shape, x.shape[1]))
    return torch.where((near >= 0)[..., None], found, 0.0)


def _products(x: Tensor, block: ClientBlock) -> tuple[Tensor, Tensor]:
    """Return the squared lengths of a block's rows (n,), and their products with x (n, k)."""
    work = 2 * (1 + len(x))
    if not isinstance(block.x, SparseRows):
        report_rows(block.off, work * block.x.shape[1])
        return block.x.square().sum(1), block.x @ x.T
    csr = block.x.csr
    assert csr.values is not None  # features always carry values
    report_entries(csr.indptr, block.off, work)
    length = x.new_zeros(csr.num_rows).index_add_(0, csr.row, csr.values.square())
    return length, sparse_product(csr, x.T.contiguous())
