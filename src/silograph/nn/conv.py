"""Convolutions, each split into the parts that a federation needs to tell apart.

    z = map(x)                                  linear, at the node that sends
    s = combine(z)                              the sum over neighbors; plain ones are
        = post * (A @ (pre * z)) + own * z      scaled on both sides, with the node's own z
    out = finish(x, s)                          bias, further self terms, what comes after the sum

Only the sum crosses clients, so only the sum has to know about them; each side scales by its
own degrees, so no degree travels. In the backward pass `pre` and `post` swap.

Every function takes weights that are shared by all clients or stacked by client (`segment`).

n: rows. I, O: input and output width. C: clients.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from silograph.core.key import Key, keep_probability, mix_words, signed
from silograph.core.payload import offsets
from silograph.core.work import report_entries, report_rows
from silograph.graph.block.block import ClientBlock, Rows, SparseRows
from silograph.graph.csr import CSR, index_dtype
from silograph.nn.segment import (
    edge_product,
    gradients,
    segment_bias,
    segment_heads,
    segment_linear,
    sparse_product,
)

# --- Messages: the edges of one layer, with the degrees and offsets of both ends -----------------
#
# C: clients.


@dataclass(frozen=True, eq=False)
class EdgeDraws:
    """Dropout of attention, drawn for an edge and head from the keys of both of its ends.

    Attributes:
        drop: probability with which an edge or self loop is dropped.
        sender: (s,) int64 keys of the sending rows.
        receiver: (r,) int64 keys of the receiving rows.
        key: of the draws.
    """

    drop: float
    sender: Tensor
    receiver: Tensor
    key: Key

    def apply_dropout(self, weight: Tensor, row: Tensor | None, column: Tensor | None) -> Tensor:
        """Return attention (m, heads) with entries dropped and the rest scaled to keep the mean.

        Args:
            weight: (m, heads).
            row: (m,) int64 receiver of each entry; None: each receiver's self loop, (r, heads).
            column: (m,) int64 sender of each entry, likewise.
        """
        receiver_words = mix_words(self.receiver ^ signed(self.key.value))
        receiver_words = receiver_words if row is None else receiver_words[row]
        sender_words = self.receiver if column is None else self.sender[column]
        is_kept = self.key.keep(receiver_words ^ sender_words, weight.shape[1], self.drop)
        return weight * is_kept.to(weight.dtype) * (1 / keep_probability(self.drop))


# Scales of senders (s, 1), of receivers (r, 1) and of own rows (r, 1); None: 1, of own rows 0.
ScaleValues = tuple[Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True, eq=False)
class Messages:
    """The edges of one layer: r rows receive from s rows, and are among these.

    Attributes:
        adj: (r, s), no self loops. Values are weights of edges, times how many a drawn one stands
            for.
        symmetric: whether `adj` is.
        sender: (s, 1) floating point, sum of the weights of each sending row's edges; where all are
            1, its number of neighbors.
        receiver: (r, 1) the same of each receiving row.
        own: (r,) int64 positions of the receiving rows among the senders; None: the same rows.
        sender_off: (C + 1,) offsets of each client's senders.
        off: (C + 1,) offsets of each client's receivers.
        beside: (r, O) sums over neighbors that other silos hold, scaled by those; None: none.
        attention: dropout of attention; None: nothing is dropped.
        gate: (s,) that scales the row of each sender after `map`; None: 1. Samplers learn from
            its gradient.
        loop: (r, 1) degree that scales the own row of a receiver; None: `receiver`.
        reverse: of messages along the directions of edges, those against them; None: edges have no
            directions.
        operators: matrices that `operator` has built, by convolution.
        scales: values that `_cached_scales` has computed, by convolution.
    """

    adj: CSR
    symmetric: bool
    sender: Tensor
    receiver: Tensor
    own: Tensor | None
    sender_off: Tensor
    off: Tensor
    beside: Tensor | None = None
    attention: "EdgeDraws | None" = None
    gate: Tensor | None = None
    loop: Tensor | None = None
    reverse: "Messages | None" = None
    operators: dict[object, CSR] = field(default_factory=dict, init=False, repr=False)
    scales: dict[object, ScaleValues] = field(default_factory=dict, init=False, repr=False)

    def own_of(self, z: Tensor) -> Tensor:
        """Return the receivers' rows of z (s, D), (r, D)."""
        return z if self.own is None else z.index_select(0, self.own)

    def own_rows(self, x: Rows) -> Rows:
        """Return the receivers' rows of features."""
        if isinstance(x, Tensor):
            return self.own_of(x)
        if self.own is None:
            return x
        return SparseRows(x.csr.select_rows(self.own), self.off, feature=x.feature)

    def with_dropout(self, drop: float, row_key: Tensor, key: Key) -> "Messages":
        """Return the messages of a step that drops attention; `row_key` (s,) of the senders."""
        draws = EdgeDraws(drop, row_key, self.own_of(row_key), key)
        reverse = self.reverse and self.reverse.with_dropout(drop, row_key, key)
        return replace(self, attention=draws, reverse=reverse)


def internal_messages(block: ClientBlock, dtype: torch.dtype) -> Messages:
    """Return the messages along internal edges: cross-client edges are dropped."""
    return block.once(("messages", dtype), Messages, lambda: _build_messages(block, dtype))


def _build_messages(block: ClientBlock, dtype: torch.dtype) -> Messages:
    values = block.adj.values
    if values is not None and values.dim() == 2:
        along, against = (_one_way(block, way, dtype) for way in (ALONG_COLUMN, AGAINST_COLUMN))
        return replace(along, reverse=against)
    degree = block.adj.weighted_degree.to(dtype)[:, None]
    return Messages(block.adj, True, degree, degree, None, block.off, block.off)


# Columns of weights by direction (nnz, 2) of the edges along which a row receives, and against.
ALONG_COLUMN, AGAINST_COLUMN = 1, 0


def edges_one_way(adj: CSR, way: int) -> CSR:
    """Return the entries with a weight in a column of the values (nnz, 2), and these weights."""
    assert adj.values is not None  # of both directions
    weight = adj.values[:, way]
    is_edge = ~weight.isnan()
    lengths = torch.bincount(adj.row[is_edge], minlength=adj.num_rows)
    starts = offsets(lengths).to(adj.indices.dtype)
    return CSR(starts, adj.indices[is_edge], weight[is_edge], adj.num_cols)


def _one_way(block: ClientBlock, way: int, dtype: torch.dtype) -> Messages:
    edges = edges_one_way(block.adj, way)
    sender = edges.transposed.weighted_degree.to(dtype)[:, None]
    receiver = edges.weighted_degree.to(dtype)[:, None]
    # A self loop goes both ways. Its degree is the geometric mean of the row's two, itself counted
    # in both, so that a scale 1 / d of own rows is d^-1/2 of either side, as at other edges.
    loop = ((sender + 1) * (receiver + 1)).sqrt() - 1
    return Messages(edges, False, sender, receiver, None, block.off, block.off, loop=loop)


Params = dict[str, Tensor]


DegreeScale = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Scales:
    """A plain sum over neighbors, post * (A @ (pre * z)) + own * z, from degrees (n, 1).

    Attributes:
        pre: the sender's scale (n, 1); None: 1.
        post: the receiver's scale (n, 1); None: 1.
        own: weight of the receiver's own z (n, 1); None: 0.
    """

    pre: DegreeScale | None = None
    post: DegreeScale | None = None
    own: DegreeScale | None = None

    def sender_scale(self, degree: Tensor) -> Tensor | None:
        """Return the sender's scale (n, 1), or None for 1."""
        return None if self.pre is None else self.pre(degree)

    def receiver_scale(self, degree: Tensor) -> Tensor | None:
        """Return the receiver's scale (n, 1), or None for 1."""
        return None if self.post is None else self.post(degree)

    def itself(self, degree: Tensor) -> Tensor | None:
        """Return the weight of the receiver's own z (n, 1), or None for 0."""
        return None if self.own is None else self.own(degree)


class Conv(Protocol):
    """A convolution; see the head of this file for its parts. A value: equal ones do the same."""

    @property
    def name(self) -> str:
        """Name in messages."""

    @property
    def sums(self) -> bool:
        """Whether neighbors are summed at all."""

    @property
    def scales(self) -> Scales | None:
        """The sum, if it is plain: each silo can send its part; None: see `indivisible`."""

    @property
    def indivisible(self) -> str:
        """Why silos cannot each send their part of the sum; empty where `scales` are given."""

    @property
    def weighs(self) -> bool:
        """Whether weights of edges scale the terms of its sum."""

    @property
    def maps(self) -> tuple[str, ...]:
        """Names of the weights (I, O) that meet x, and meet it linearly."""

    @property
    def rooted(self) -> bool:
        """Whether `finish` reads x."""

    @property
    def kernel(self) -> str | None:
        """Name of its compiled form in `silograph.nn.kernels.arrays.FORMS`; None: there is none."""

    def init(self, key: Key, inputs: int, outputs: int) -> Params:
        """Return initial weights in float64, shared form."""

    def map(self, p: Mapping[str, Tensor], x: Rows, off: Tensor) -> Tensor:
        """Return z (n, O)."""

    def combine(self, p: Mapping[str, Tensor], z: Tensor, m: Messages) -> Tensor:
        """Return the sum over neighbors, s (r, O)."""

    def finish(self, p: Mapping[str, Tensor], x: Rows, s: Tensor, m: Messages) -> Tensor:
        """Return the output (n, O)."""


def convolve(conv: Conv, p: Mapping[str, Tensor], x: Rows, messages: Messages) -> Tensor:
    """Return one convolution of x (n, I), (n, O)."""
    z = conv.map(p, x, messages.sender_off)
    if messages.gate is not None:
        report_rows(messages.sender_off, 2 * z.shape[1])  # a product and a sum, for the gradient
        z = z * messages.gate[:, None]
    s = conv.combine(p, z, messages)
    return conv.finish(p, x, s, messages)


def operator(scales: Scales, messages: Messages) -> CSR:
    """Return post * A * pre + own as one matrix (n, n), for messages among the same rows.

    One product in place of four passes over the rows.
    """
    if scales not in messages.operators:
        own_scale = scales.itself(_loop_degree(messages))
        degrees = messages.sender, messages.receiver
        messages.operators[scales] = as_matrix(scales, messages.adj, *degrees, own_scale)
    return messages.operators[scales]


def _cached_scales(scales: Scales, messages: Messages) -> ScaleValues:
    """Return the values of scales for these messages, computed once."""
    if scales not in messages.scales:
        sender, receiver = messages.sender, messages.receiver
        values = scales.sender_scale(sender), scales.receiver_scale(receiver)
        messages.scales[scales] = *values, scales.itself(_loop_degree(messages))
    return messages.scales[scales]


def _loop_degree(messages: Messages) -> Tensor:
    return messages.receiver if messages.loop is None else messages.loop


def as_matrix(
    scales: Scales, adj: CSR, sender: Tensor, receiver: Tensor, own: Tensor | None
) -> CSR:
    """Return post * adj * pre + own as one matrix (n, n).

    Args:
        scales: of both sides.
        adj: (n, n) weights of edges.
        sender: (n, 1) degrees that scales of senders are made of.
        receiver: (n, 1) degrees that scales of receivers are made of.
        own: (n, 1) weight of a row's own message; None: 0.
    """
    # In NumPy: SciPy's sums and products of matrices take ten times as long for few edges.
    # 1. Values of the edges.
    size = len(sender)
    post, pre, itself = (
        np.full(size, default) if scale is None else scale[:, 0].double().cpu().numpy()
        for scale, default in (
            (scales.receiver_scale(receiver), 1.0),
            (scales.sender_scale(sender), 1.0),
            (own, 0.0),
        )
    )
    row, column = adj.row.cpu().numpy(), adj.indices.cpu().numpy()
    values = post[row] if adj.values is None else post[row] * adj.values.cpu().numpy()
    values *= pre[column]
    # 2. Own messages, on the diagonal: added to edges that are there, appended where there is none.
    entry, diagonal = row * size + column, np.arange(size) * (size + 1)
    place = np.searchsorted(entry, diagonal)
    is_there = np.append(entry, -1)[place] == diagonal
    values[place[is_there]] += itself[is_there]
    entry = np.concatenate([entry, diagonal[~is_there]])
    values = np.concatenate([values, itself[~is_there]])
    # 3. In the order of rows and columns, without zeros.
    order = entry.argsort(kind="stable")
    order = order[values[order] != 0]
    row, column = np.divmod(entry[order], max(size, 1))
    device, dtype = sender.device, index_dtype(len(order), size)
    return CSR(
        torch.from_numpy(np.searchsorted(row, np.arange(size + 1))).to(device, dtype),
        torch.from_numpy(column).to(device, dtype),
        torch.from_numpy(values[order]).to(device, sender.dtype),
        size,
    )


def propagate(scales: Scales, z: Tensor, messages: Messages) -> Tensor:
    """Return post * (A @ (pre * z) + beside) + own * z, (n, O)."""
    pre, post, own_scale = _cached_scales(scales, messages)
    width, passes = z.shape[1], 1 + gradients(z)
    report_entries(messages.adj.indptr, messages.off, 2 * width * passes)
    report_rows(messages.sender_off, width * passes * (pre is not None))
    report_rows(messages.off, width * passes * ((post is not None) + 2 * (own_scale is not None)))
    if messages.own is None and messages.beside is None:
        matrix = operator(scales, messages)
        # Scales on both sides are the same up to a factor.
        is_symmetric = messages.symmetric and (pre is None) == (post is None)
        return sparse_product(matrix, z, symmetric=is_symmetric)
    s = sparse_product(messages.adj, z if pre is None else pre * z)  # new, so changed in place
    s = s if messages.beside is None else s.add_(messages.beside)
    s = s if post is None else s.mul_(post)
    return s if own_scale is None else s.add_(own_scale * messages.own_of(z))


def propagate_back(conv: "PlainConv", grad: Tensor, messages: Messages) -> Tensor:
    """Return the gradient of z (s, O) from that of `conv.combine` (r, O), along drawn edges.

    The work is not reported.
    """
    scales, own_places = conv.scales, messages.own
    assert own_places is not None  # drawn edges lead to some of the senders
    if not conv.sums:
        return grad.new_zeros(len(messages.sender), grad.shape[1]).index_add_(0, own_places, grad)
    pre, post, own_scale = _cached_scales(scales, messages)
    z = sparse_product(messages.adj.transposed, grad if post is None else post * grad)
    z = z if pre is None else z.mul_(pre)
    return z if own_scale is None else z.index_add_(0, own_places, own_scale * grad)


def glorot(key: Key, inputs: int, outputs: int) -> Tensor:
    """Uniform in +-sqrt(6 / (I + O)) (Glorot and Bengio, AISTATS 2010), (I, O) float64."""
    bound: float = (6 / (inputs + outputs)) ** 0.5
    return (2 * key.matrix(inputs, outputs) - 1) * bound


def uniform(key: Key, inputs: int, outputs: int) -> Tensor:
    """Uniform in +-1/sqrt(I), torch's default for linear layers, (I, O) float64."""
    bound: float = inputs**-0.5
    return (2 * key.matrix(inputs, outputs) - 1) * bound


def uniform_bias(key: Key, inputs: int, outputs: int) -> Tensor:
    """Return the bias of such a layer, (O,) float64."""
    bound: float = inputs**-0.5
    return ((2 * key.matrix(1, outputs) - 1) * bound)[0]


def glorot_init(key: Key, inputs: int, outputs: int) -> Params:
    """Return Glorot weight, zero bias."""
    bias = torch.zeros(outputs, dtype=torch.float64)
    return {"weight": glorot(key.fold("weight"), inputs, outputs), "bias": bias}


def rooted_init(key: Key, inputs: int, outputs: int) -> Params:
    """Return weights of neighbors, of the node itself, and a bias, all uniform."""
    return {
        "weight": uniform(key.fold("weight"), inputs, outputs),
        "root": uniform(key.fold("root"), inputs, outputs),
        "bias": uniform_bias(key.fold("bias"), inputs, outputs),
    }


def linear_map(p: Mapping[str, Tensor], x: Rows, off: Tensor) -> Tensor:
    """Return X W, (n, O)."""
    return segment_linear(x, p["weight"], off)


def add_root(p: Mapping[str, Tensor], x: Rows, s: Tensor, m: Messages) -> Tensor:
    """Return s (n, O) plus the node's own row, through its own weight."""
    report_rows(m.off, s.shape[1])
    own = segment_linear(m.own_rows(x), p["root"], m.off)
    return s + own if gradients(s, own) else own.add_(s)


def inverse_root(degree: Tensor) -> Tensor:
    """Return d^-1/2 with the self loop counted."""
    return (degree + 1).rsqrt()


def inverse(degree: Tensor) -> Tensor:
    """Return 1 / d with the self loop counted."""
    return 1 / (degree + 1)


# --- plain ---------------------------------------------------------------------------------------
# Convolutions of one matrix before a plain sum: what GCN, GraphConv, GraphSAGE and MLP share.


@dataclass(frozen=True)
class PlainConv:
    """The sum of X W over neighbors, with scales, and b; if rooted, plus X W_root.

    Weights: weight (I, O), root (I, O) if rooted, bias (O,).

    Attributes:
        name: what messages call it.
        init: draws initial weights.
        scales: of the sum.
        sums: whether neighbors are summed; else the layer is linear.
        rooted: whether the node's own row has a weight of its own.
        weighs: whether weights of edges scale the terms of the sum, and their sums are degrees.
    """

    name: str
    init: Callable[[Key, int, int], Params]
    scales: Scales
    sums: bool = True
    rooted: bool = False
    weighs: bool = False
    indivisible = ""

    @property
    def maps(self) -> tuple[str, ...]:
        """Names of the matrices."""
        return ("weight", "root") if self.rooted else ("weight",)

    @property
    def kernel(self) -> str | None:
        """Name of its compiled form; none has both a weight and a scale for the node's own row."""
        if not self.sums:
            return "linear"
        if not self.rooted:
            return "sum"
        return "rooted sum" if self.scales.own is None else None

    def map(self, p: Mapping[str, Tensor], x: Rows, off: Tensor) -> Tensor:
        """Return X W, (n, O): sums are linear, so W may come before them."""
        return linear_map(p, x, off)

    def combine(self, p: Mapping[str, Tensor], z: Tensor, m: Messages) -> Tensor:
        """Return the sum, (r, O)."""
        del p
        return propagate(self.scales, z, m) if self.sums else m.own_of(z)

    def finish(self, p: Mapping[str, Tensor], x: Rows, s: Tensor, m: Messages) -> Tensor:
        """Add the node's own row, if it has a weight of its own, and the bias."""
        return segment_bias(add_root(p, x, s, m) if self.rooted else s, p["bias"], m.off)


# --- GCN: the graph convolution of Kipf and Welling ----------------------------------------------
#
# D^-1/2 (A + I) D^-1/2 X W + b, D the degrees of A + I. Weights of edges are the entries of A, and
# degrees their sums; a self loop has weight 1.
#
# Kipf and Welling, "Semi-supervised classification with graph convolutional networks", ICLR 2017,
# eq. 2. Glorot weight, zero bias, as in PyG's GCNConv.


GCN = PlainConv(
    "GCN", glorot_init, Scales(pre=inverse_root, post=inverse_root, own=inverse), weighs=True
)


# --- GraphConv: the sum of the neighbors, and the node itself with a weight of its own -----------
#
# The 1-dimensional GNN of Morris and others: A X W + X W_root + b.
# Weights of edges are the entries of A.
#
# Morris, Ritzert, Fey, Hamilton, Lenssen, Rattan and Grohe, "Weisfeiler and Leman go neural:
# higher-order graph neural networks", AAAI 2019, eq. 5, in the form of PyG's GraphConv with sums.
# All weights are uniform in +-1/sqrt(I), as there.


GraphConv = PlainConv("GraphConv", rooted_init, Scales(), rooted=True, weighs=True)


# --- MLP: a linear layer that ignores the graph, X W + b; Glorot weight, zero bias ---------------


MLP = PlainConv("MLP", glorot_init, Scales(own=torch.ones_like), sums=False)


# --- One step of APPNP: neighbors are averaged, nothing is learned -------------------------------


def _post_scale(degree: Tensor, factor: float) -> Tensor:
    return factor * inverse_root(degree)


def _own_scale(degree: Tensor, factor: float) -> Tensor:
    return factor / (degree + 1)


@dataclass(frozen=True)
class _ScaledBy:
    """A scale with its second argument; unlike partial functions, equal ones are equal."""

    scale: Callable[[Tensor, float], Tensor]
    argument: float

    def __call__(self, degree: Tensor) -> Tensor:
        return self.scale(degree, self.argument)


@dataclass(frozen=True)
class Propagation:
    """A step of personalized PageRank without its restart: (1 - a) D^-1/2 (A + I) D^-1/2 X.

    Gasteiger, Bojchevski and Günnemann, "Predict then propagate: graph neural networks meet
    personalized PageRank", ICLR 2019, eq. 4; the restart, a times what the first step began
    with, is added by the stage (`silograph.nn.forward.Stage.teleport`). No weights.

    Attributes:
        teleport: a, probability of a restart.
    """

    teleport: float
    name = "Propagation"
    sums = True
    indivisible = ""
    maps = ()
    rooted = False
    weighs = True
    kernel = None

    @property
    def scales(self) -> Scales:
        """The scales of GCN, times 1 - a."""
        factor = 1 - self.teleport
        return Scales(inverse_root, _ScaledBy(_post_scale, factor), _ScaledBy(_own_scale, factor))

    def init(self, key: Key, inputs: int, outputs: int) -> Params:
        """Return no weights."""
        del key, inputs, outputs
        return {}

    def map(self, p: Mapping[str, Tensor], x: Rows, off: Tensor) -> Tensor:
        """X."""
        del p, off
        assert isinstance(x, Tensor)  # linear stages come first
        return x

    def combine(self, p: Mapping[str, Tensor], z: Tensor, m: Messages) -> Tensor:
        """Return the sum, (r, O)."""
        del p
        return propagate(self.scales, z, m)

    def finish(self, p: Mapping[str, Tensor], x: Rows, s: Tensor, m: Messages) -> Tensor:
        """Return the sum unchanged."""
        del p, x, m
        return s


# --- GraphSAGE with the mean of the neighbors: mean(X_N) W + X W_root + b ------------------------
#
# Hamilton, Ying and Leskovec, "Inductive representation learning on large graphs", NeurIPS 2017,
# algorithm 1 with the mean aggregator, in the form of PyG's SAGEConv. A node without neighbors has
# mean 0. All weights are uniform in +-1/sqrt(I), as there.


def mean(degree: Tensor) -> Tensor:
    """Return 1 / d."""
    return 1 / degree.clamp(min=1)


SAGE = PlainConv("SAGE", rooted_init, Scales(post=mean), rooted=True)


# --- GIN: the sum of a node and its neighbors, then a perceptron ---------------------------------


@dataclass(frozen=True)
class GIN:
    """Graph isomorphism layer: relu((A + (1 + eps) I) X W + b) W_out + b_out, with eps = 0.

    Xu, Hu, Leskovec and Jegelka, "How powerful are graph neural networks?", ICLR 2019, eq. 4.1,
    in the form of PyG's GINConv. What we changed: eps is fixed (the paper's GIN-0), and the
    perceptron has no batch norm, whose running statistics are no weights and depend on who is in
    the batch. Its first matrix is linear, so it comes before the sum.
    Weights: weight (I, H), bias (H,), out (H, O), out_bias (O,).

    Attributes:
        hidden: H, width between the perceptron's two matrices.
    """

    hidden: int
    name = "GIN"
    sums = True
    scales = Scales(own=torch.ones_like)  # 1 + eps
    indivisible = ""
    maps = ("weight",)
    rooted = False
    weighs = False
    kernel = None

    def init(self, key: Key, inputs: int, outputs: int) -> Params:
        """Uniform in +-1/sqrt(inputs of the matrix), as in torch's linear layers."""
        return {
            "weight": uniform(key.fold("weight"), inputs, self.hidden),
            "bias": uniform_bias(key.fold("bias"), inputs, self.hidden),
            "out": uniform(key.fold("out"), self.hidden, outputs),
            "out_bias": uniform_bias(key.fold("out_bias"), self.hidden, outputs),
        }

    def map(self, p: Mapping[str, Tensor], x: Rows, off: Tensor) -> Tensor:
        """X W, (n, H)."""
        return linear_map(p, x, off)

    def combine(self, p: Mapping[str, Tensor], z: Tensor, m: Messages) -> Tensor:
        """Return the sum, (r, H)."""
        del p
        return propagate(self.scales, z, m)

    def finish(self, p: Mapping[str, Tensor], x: Rows, s: Tensor, m: Messages) -> Tensor:
        """Apply the rest of the perceptron."""
        del x
        h = torch.relu(segment_bias(s, p["bias"], m.off))
        report_rows(m.off, h.shape[1] * (1 + gradients(h)))
        return segment_bias(segment_linear(h, p["out"], m.off), p["out_bias"], m.off)


# --- Gat ------------------------------------------------------------------------------------------
# GAT: neighbors weighted by attention.


SLOPE = 0.2  # of the leaky ReLU
EDGE_FLOPS = 6  # an edge or self loop, a head: add, leaky ReLU, maximum, difference, exp, sum


@dataclass(frozen=True)
class GAT:
    """Graph attention with self loops: for each head, out_i = sum over j of a_ij (W x_j) + b.

        a_ij = softmax over j, in N(i) or i itself, of leaky_relu(u . W x_j + v . W x_i)

    Veličković, Cucurull, Casanova, Romero, Liò and Bengio, "Graph attention networks", ICLR 2018,
    eq. 3 to 6, in the form of PyG's GATConv. Heads stand side by side, or their mean is taken.
    In training, attention is dropped where the model asks for it (section 3.3; `EdgeDraws`).
    Over drawn neighbors, one that stands for k has weight k in the softmax: a ratio of unbiased
    sums, exact where all are drawn.
    Weights: weight (I, heads * D), sender u (heads, D), receiver v (heads, D), bias (O,).

    Attributes:
        heads: number of them.
        concat: whether heads stand side by side, O = heads * D; else their mean, O = D.
    """

    heads: int
    concat: bool
    name = "GAT"
    sums = True
    scales = None
    indivisible = (
        "attention weighs each edge by both of its ends and by all edges of the receiver, so its "
        "sum is not one of parts that silos can work out alone"
    )
    maps = ("weight",)
    rooted = False
    weighs = False
    kernel = None

    def init(self, key: Key, inputs: int, outputs: int) -> Params:
        """Glorot weights, zero bias, as in PyG's GATConv."""
        width = outputs // self.heads if self.concat else outputs
        return {
            "weight": glorot(key.fold("weight"), inputs, self.heads * width),
            "sender": glorot(key.fold("sender"), self.heads, width),
            "receiver": glorot(key.fold("receiver"), self.heads, width),
            "bias": torch.zeros(outputs, dtype=torch.float64),
        }

    def map(self, p: Mapping[str, Tensor], x: Rows, off: Tensor) -> Tensor:
        """X W, (n, heads * D)."""
        return linear_map(p, x, off)

    def combine(self, p: Mapping[str, Tensor], z: Tensor, m: Messages) -> Tensor:
        """Return the attentive mean of z (s, heads * D) over neighbors and self, (r, heads, D)."""
        rows, columns = m.adj.row, m.adj.indices.long()
        own = m.own_of(z)
        sent = segment_heads(z, p["sender"], m.sender_off)
        receiver_logits = segment_heads(own, p["receiver"], m.off)
        edge = leaky_relu(
            sent.index_select(0, columns) + receiver_logits.index_select(0, rows), SLOPE
        )
        loop = leaky_relu(m.own_of(sent) + receiver_logits, SLOPE)
        where = rows[:, None].expand_as(edge)
        # The largest is taken off so that nothing overflows; it cancels.
        top = loop.detach().scatter_reduce(0, where, edge.detach(), "amax")
        edge, loop = (edge - top.index_select(0, rows)).exp(), (loop - top).exp()
        if m.own is not None:
            assert m.adj.values is not None  # drawn edges say what they stand for
            edge = edge * m.adj.values[:, None]
        total = loop.index_add(0, rows, edge)
        self._report(z, edge, m)
        if m.attention is not None:
            edge = m.attention.apply_dropout(edge, rows, columns)
            loop = m.attention.apply_dropout(loop, None, None)
        s = edge_product(m.adj, edge, z.view(len(z), self.heads, -1))
        s = s + loop[..., None] * own.view(s.shape)
        return s / total[..., None]

    def _report(self, z: Tensor, edge: Tensor, m: Messages) -> None:
        passes = 1 + gradients(edge)
        softmax = (EDGE_FLOPS + 2 * (m.attention is not None)) * self.heads * passes
        report_entries(m.adj.indptr, m.off, softmax + 2 * z.shape[1] * (passes + gradients(z)))
        loops = softmax + 2 * z.shape[1] * (passes + gradients(z))
        report_rows(m.off, loops + z.shape[1] * passes)  # the division

    def finish(self, p: Mapping[str, Tensor], x: Rows, s: Tensor, m: Messages) -> Tensor:
        """Concatenate or average the heads, and add the bias."""
        del x
        if self.concat:
            return segment_bias(s.flatten(1), p["bias"], m.off)
        report_rows(m.off, s[0].numel() * (1 + gradients(s)) if len(s) else 0)
        return segment_bias(s.mean(dim=1), p["bias"], m.off)


# --- Convolutions along the directions of edges, against them, or both ---------------------------


Way = Literal["along", "against", "both"]
SECOND_DIRECTION = "against_"  # begins the names of weights of the second direction


@dataclass(frozen=True)
class Directed:
    """A convolution whose messages pass each edge one way, or both ways with weights of their own.

    With both, the sum over neighbors is the mean of that over the sources of edges that lead here
    and that over the targets of edges that start here: alpha = 1/2 of Dir-GNN (Rossi, Charpentier,
    Di Giovanni, Frasca, Günnemann and Bronstein, "Edge directionality improves learning on
    heterophilic graphs", LoG 2023). What stands before and in the sum has weights for each
    direction: those called weight, sender and receiver. What follows it (the node's own weight,
    bias, perceptron) is shared. Scales are those of the paper's D_out^-1/2 A D_in^-1/2: a sender's
    by its edges in that direction, a receiver's by those along which it receives. What we changed:
    self loops of GCN and GAT stay, so that a graph whose edges go both ways gives what the plain
    convolution does.

    Attributes:
        conv: the convolution of each direction.
        way: along edges (from source to target), against them, or both.
    """

    conv: Conv
    way: Way
    sums = True
    scales = None
    indivisible = "silos share sums over edges that go both ways only"
    kernel = None

    @property
    def name(self) -> str:
        """Name of the convolution, in messages."""
        return f"{self.conv.name} with directed={self.way}"

    @property
    def weighs(self) -> bool:
        """Whether weights of edges scale the terms of its sum."""
        return self.conv.weighs

    @property
    def rooted(self) -> bool:
        """Whether `finish` reads x."""
        return self.conv.rooted

    @property
    def maps(self) -> tuple[str, ...]:
        """Names of the weights (I, O) that meet x, and meet it linearly."""
        doubled = [n for n in self.conv.maps if n in BEFORE_SUM and self.way == "both"]
        return (*self.conv.maps, *(SECOND_DIRECTION + name for name in doubled))

    def init(self, key: Key, inputs: int, outputs: int) -> Params:
        """Return initial weights, those of the second direction by draws of their own."""
        weights = self.conv.init(key, inputs, outputs)
        if self.way == "both":
            second = self.conv.init(key.fold("against"), inputs, outputs)
            weights |= {SECOND_DIRECTION + n: w for n, w in second.items() if n in BEFORE_SUM}
        return weights

    def map(self, p: Mapping[str, Tensor], x: Rows, off: Tensor) -> Tensor:
        """Return z of each direction, side by side."""
        z = self.conv.map(p, x, off)
        return z if self.way != "both" else torch.cat([z, self.conv.map(_second(p), x, off)], dim=1)

    def combine(self, p: Mapping[str, Tensor], z: Tensor, m: Messages) -> Tensor:
        """Return the sum over neighbors."""
        against = m if m.reverse is None else m.reverse  # without directions both are the same
        if self.way != "both":
            return self.conv.combine(p, z, m if self.way == "along" else against)
        first, second = z.tensor_split(2, dim=1)
        s = self.conv.combine(p, first, m) + self.conv.combine(_second(p), second, against)
        report_rows(m.off, (2 + gradients(s)) * (s[0].numel() if len(s) else 0))
        return s / 2

    def finish(self, p: Mapping[str, Tensor], x: Rows, s: Tensor, m: Messages) -> Tensor:
        """Return the output (n, O)."""
        return self.conv.finish(p, x, s, m)


BEFORE_SUM = ("weight", "sender", "receiver")  # weights that `map` and `combine` read


def is_before_sum(name: str) -> bool:
    """Return whether `map` and `combine` read a weight, and `finish` does not."""
    return name.removeprefix(SECOND_DIRECTION) in BEFORE_SUM


def _second(p: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the weights of the second direction by the names that a convolution has for them."""
    prefix = SECOND_DIRECTION
    return {**p, **{n.removeprefix(prefix): w for n, w in p.items() if n.startswith(prefix)}}
