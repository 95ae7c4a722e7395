"""The law of generated graphs: communities, edges, labels and features, drawn block by block.

The edges follow the degree-corrected planted partition of B. Karrer, M. Newman: "Stochastic
blockmodels and community structure in networks", Phys. Rev. E 83, 2011. Each node has a community
and a propensity. An edge is two ends, each drawn in proportion to propensity: the first among all
nodes, the second with probability `inside` in the community of the first, else among all again.
Repeated edges and self loops are dropped, and drawing goes on until there are edges enough.

Features and labels carry the communities. Where a node has one class, it is that of its community
or, with probability `stray`, that of another node drawn at random; features are the mean of the
class plus noise. Where it has label bits, each community has probabilities of its own, and
features are a mean for every bit that is set plus noise. Noise is normal with variance 1.

Every draw is a function of the seed and of the number of the node, or of the edge in the order of
drawing, so that blocks of any size give the same graph. Sums are of integers and so are exact:
machines agree bit for bit, unless their logarithms differ just where a rounded draw does.

n: nodes. F: features. T: label bits. C: communities. K: classes. B: rows or draws of a block.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from scipy.special import expit, logit, ndtri
from torch import Tensor

from silograph.core.key import Key
from silograph.graph.generated.array_folder import COLUMN_BITS, Entries

DENSEST = 0.25  # share of all pairs, at most; beyond, few draws are new edges
CROWDED = 0.5  # draws a pair inside a community, at most
SHORTFALL = 0.001  # of the edges, at which drawing ends
WEIGHT_UNIT = 1 << 16  # propensities are multiples of 1 / WEIGHT_UNIT
UNIT = 4096  # features and means are multiples of 1 / UNIT
LEVELS = 1 << 16  # a normal draw, and that of a bit, take 16 of a word's 64 bits
FEWEST_COMMUNITIES = 20  # of a graph with label bits; otherwise one a class


@dataclass(frozen=True)
class GraphShape:
    """What a generated graph is like at scale 1.

    Attributes:
        nodes: n.
        edges: undirected edges.
        features: F.
        classes: K, or T.
        communities: C; they are dealt to the classes in turn.
        skew: the k-th class has a share of the nodes in proportion to k^-skew.
        sigma: standard deviation of the logarithm of a node's propensity.
        inside: share of the draws that stay in the community; less in a community so small
            that they would be more than `CROWDED` of its pairs.
        stray: share of nodes with the class of another node; with label bits not used.
        signal: length of the mean of a class (or bit), in standard deviations of the noise.
        split: shares of training and validation nodes; all others test.
        contrast: standard deviation of the log odds of a label bit over the communities; with
            classes not used.
        multilabel: whether a node has T bits and not one class.
        by_rank: whether the training nodes are those of high rank and not any; rank is half
            propensity (on a logarithmic scale), half chance.
    """

    nodes: int
    edges: int
    features: int
    classes: int
    communities: int
    skew: float
    sigma: float
    inside: float
    stray: float
    signal: float
    split: tuple[float, float]
    contrast: float = 0.0
    multilabel: bool = False
    by_rank: bool = False

    @property
    def mean_degree(self) -> float:
        """Mean number of neighbors."""
        return 2 * self.edges / self.nodes


@dataclass(frozen=True)
class GraphPlan:
    """One graph: everything that decides its bits.

    Attributes:
        shape: its law.
        nodes: n, which replaces that of the shape.
        edges: undirected edges, which replace those of the shape; the mean degree is the same.
        communities: C wanted; there are more where a graph needs more.
        key: root of all draws.
    """

    shape: GraphShape
    nodes: int
    edges: int
    communities: int
    key: Key

    @property
    def sizes(self) -> np.ndarray:
        """Nodes of every community, (C,) int64, each at least one."""
        turn = FEWEST_COMMUNITIES if self.shape.multilabel else self.shape.classes
        number = np.arange(max(self.communities, turn))
        weight = (1.0 + number % turn) ** -self.shape.skew * (1.0 + number // turn) ** -0.5
        share = weight / weight.sum()
        sizes: np.ndarray = 1 + np.floor((self.nodes - len(number)) * share).astype(np.int64)
        sizes[: self.nodes - int(sizes.sum())] += 1  # what rounding down left over
        return sizes


class Nodes:
    """Communities and ranks of the nodes.

    Nodes in the order of their communities are at positions 0..n-1, so that a community is a
    range of positions. Node numbers tell nothing.

    Attributes:
        plan: of the graph.
        number: (n,) int64, 0..n-1.
        sizes: (C,) int64, nodes of every community.
        at: (n,) int32, node at every position.
        place: (n,) int32, community of every position.
        community: (n,) int32, community of every node.
        rank: (n,) float64 standard normal: a node's propensity is exp(sigma * rank).
    """

    def __init__(self, plan: GraphPlan) -> None:
        self.plan, self.sizes = plan, plan.sizes
        self.number = torch.arange(plan.nodes)
        words = plan.key.fold("community").words(self.number, 1)[:, 0]
        self.at = np.argsort(words.numpy(), kind="stable").astype(np.int32)
        self.place = np.repeat(np.arange(len(self.sizes), dtype=np.int32), self.sizes)
        self.community = np.empty_like(self.place)
        self.community[self.at] = self.place
        self.rank = _ranks(plan.key.fold("propensity"), self.number)

    def weights(self) -> np.ndarray:
        """Return the propensity at every position, (n,) int64 multiples of 1 / WEIGHT_UNIT.

        At most so much that the expected degree is `DENSEST` of all nodes.
        """
        shape = self.plan.shape
        mean = math.exp(shape.sigma**2 / 2)
        most = mean * self.plan.nodes * DENSEST / shape.mean_degree
        weight = np.minimum(np.exp(shape.sigma * self.rank), most) * WEIGHT_UNIT
        weights: np.ndarray = np.maximum(np.rint(weight), 1).astype(np.int64)[self.at]
        return weights

    def inside(self) -> np.ndarray:
        """Return the share of draws that stay in each community, (C,) float64."""
        shape = self.plan.shape
        return np.minimum(shape.inside, CROWDED * (self.sizes - 1) / shape.mean_degree)

    def split(self) -> list[np.ndarray]:
        """Return the masks of training, validation and test nodes, each (n,) bool."""
        shape, n = self.plan.shape, self.plan.nodes
        rank = _ranks(self.plan.key.fold("split"), self.number)
        if shape.by_rank:
            rank += self.rank
        role = np.empty(n, np.int64)
        role[np.argsort(-rank, kind="stable")] = np.arange(n)
        ends = np.rint(np.cumsum(shape.split) * n)
        return [role < ends[0], (role >= ends[0]) & (role < ends[1]), role >= ends[1]]


def _ranks(key: Key, rows: Tensor) -> np.ndarray:
    """Return one standard normal draw a row, (n,) float64, with tails to 8 and not `LEVELS`."""
    normal: np.ndarray = ndtri(key.uniform(rows).numpy()[:, 0] + 2.0**-54)  # never 0
    return normal


# --- edges ----------------------------------------------------------------------------------------


class Wheel:
    """Draws positions in proportion to integer weights (n,).

    A table says where in the running sum of the weights to begin, a few steps before the end.
    A binary search in a sum of millions misses the processor's caches at most of its steps:
    with 4 million weights it took 20 times as long.
    """

    def __init__(self, weights: np.ndarray) -> None:
        self.ends = np.cumsum(weights)
        self.total = int(self.ends[-1])
        assert self.total < 2**52  # so that float64 counts them one by one
        self._shift = (self.total // (4 * len(weights))).bit_length()
        marks = np.arange((self.total >> self._shift) + 1) << self._shift
        self._begin = np.searchsorted(self.ends, marks, side="right").astype(np.int32)

    def find(self, ticket: np.ndarray) -> np.ndarray:
        """Return the positions whose parts of 0..total-1 hold these tickets (B,) int64."""
        position: np.ndarray = self._begin[ticket >> self._shift]
        late = np.flatnonzero(self.ends[position] <= ticket)
        while len(late):
            position[late] += 1
            late = late[self.ends[position[late]] <= ticket[late]]
        return position


def below(u: np.ndarray, width: "np.ndarray | int") -> np.ndarray:
    """Return whole numbers below `width` (B,) from draws u in [0, 1), (B,) int64."""
    # The product may round up to `width` itself.
    whole: np.ndarray = np.minimum((u * width).astype(np.int64), np.asarray(width) - 1)
    return whole


class Drawing:
    """Draws edges: a function from numbers 0, 1, 2, ... to pairs of nodes."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes, self._wheel = nodes, Wheel(nodes.weights())
        ends = self._wheel.ends[np.cumsum(nodes.sizes) - 1]
        self._begin = np.concatenate([[0], ends[:-1]])
        self._width = ends - self._begin
        self._inside = nodes.inside()
        self._key = nodes.plan.key.fold("edges")

    def pairs(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Return both ends of the draws `first` to `last` - 1, each (B,) int32."""
        u = self._key.uniform(torch.arange(first, last), 3).numpy()
        wheel, nodes = self._wheel, self._nodes
        one = wheel.find(below(u[:, 0], wheel.total))
        home = nodes.place[one]
        stays = u[:, 2] < self._inside[home]
        begin = np.where(stays, self._begin[home], 0)
        width = np.where(stays, self._width[home], wheel.total)
        other = wheel.find(begin + below(u[:, 1], width))
        return nodes.at[one], nodes.at[other]

    def entries(self, first: int, last: int, block: int) -> Iterator[np.ndarray]:
        """Yield both directions of these draws, self loops left out, (<= 2 B,) as in `Entries`."""
        for start in range(first, last, block):
            a, b = self.pairs(start, min(start + block, last))
            proper = a != b
            a, b = a[proper].astype(np.int64), b[proper].astype(np.int64)
            yield np.concatenate([a << COLUMN_BITS | b, b << COLUMN_BITS | a])


def draw_edges(nodes: Nodes, entries: Entries, block: int, report: Callable[[float], None]) -> int:
    """Add edges until there are enough; return the number of draws.

    The first go draws as many as are wanted. Every other one draws those still missing, over the
    share that was new in the go before: less is new from go to go, so that it hardly ever gives
    more than are wanted.
    """
    drawing, wanted = Drawing(nodes), nodes.plan.edges
    drawn, have, new, before, span = 0, 0, 1.0, 0.0, 0.8

    def told(first: int, last: int) -> Iterator[np.ndarray]:
        for number, part in enumerate(drawing.entries(first, last, block)):
            yield part
            report(before + span / 2 * min((number + 1) * block / (last - first), 1.0))

    while wanted - have > SHORTFALL * wanted:
        more = math.ceil((wanted - have) / new)
        entries.add(told(drawn, drawn + more))
        for share in entries.settle():
            report(before + span / 2 * (1 + share))
        before, span = before + span, span / 5  # the next go is shorter
        new = max(len(entries) // 2 - have, 1) / more  # a short go may give none
        drawn, have = drawn + more, len(entries) // 2
    return drawn


# --- labels and features --------------------------------------------------------------------------


class OneClass:
    """Labels and means of features where a node has one class."""

    def __init__(self, nodes: Nodes) -> None:
        plan, shape = nodes.plan, nodes.plan.shape
        self.size: tuple[int, ...] = (plan.nodes,)
        u = plan.key.fold("stray").uniform(nodes.number, 2).numpy()
        other = nodes.place[below(u[:, 1], plan.nodes)]
        self._y = np.where(u[:, 0] < shape.stray, other, nodes.community) % shape.classes
        self._means = _means(plan)

    def rows(self, start: int, end: int) -> np.ndarray:
        """Return the classes of nodes `start` to `end` - 1, (B,) int32."""
        return self._y[start:end]

    def means(self, start: int, end: int) -> np.ndarray:
        """Return the features of these nodes without noise, (B, F) float32, whole numbers."""
        means: np.ndarray = self._means[self._y[start:end]]
        return means


class Bits:
    """Labels and means of features where a node has T bits.

    Bit t is set with log odds base_t + contrast * g_ct: the base rate falls from .35 to .02 over
    the bits, and g_ct, standard normal, lets the odds differ from community to community.
    """

    def __init__(self, nodes: Nodes) -> None:
        plan, bits = nodes.plan, nodes.plan.shape.classes
        self.size: tuple[int, ...] = (plan.nodes, bits)
        self._nodes, self._key = nodes, plan.key.fold("bits")
        base = np.rint(np.geomspace(0.35, 0.02, bits) * LEVELS) / LEVELS
        near = _normal(plan.key.fold("odds"), torch.arange(len(nodes.sizes)), bits) / UNIT
        chance = expit(logit(base) + plan.shape.contrast * near.astype(np.float64))
        self._levels = np.rint(chance * (LEVELS - 1)).astype(np.uint16)  # (C, T)
        self._means = _means(plan)
        self._centre = np.rint(base @ self._means.astype(np.float64)).astype(np.float32)

    def rows(self, start: int, end: int) -> np.ndarray:
        """Return the bits of nodes `start` to `end` - 1, (B, T) bool."""
        draws = _lanes(self._key, self._nodes.number[start:end], self.size[1])
        bits: np.ndarray = draws < self._levels[self._nodes.community[start:end]]
        return bits

    def means(self, start: int, end: int) -> np.ndarray:
        """Return the features of these nodes without noise, (B, F) float32, whole numbers."""
        # Sums of whole numbers far below 2^24: exact in whichever order they are taken.
        means: np.ndarray = self.rows(start, end).astype(np.float32) @ self._means - self._centre
        return means


Labels = OneClass | Bits


def features(nodes: Nodes, labels: Labels, start: int, end: int) -> np.ndarray:
    """Return the features of nodes `start` to `end` - 1, (B, F) float32."""
    plan = nodes.plan
    noise = _normal(plan.key.fold("noise"), nodes.number[start:end], plan.shape.features)
    x: np.ndarray = (noise + labels.means(start, end)) * np.float32(1 / UNIT)
    return x


def _means(plan: GraphPlan) -> np.ndarray:
    """Return what every class (or bit) adds to the features, (K, F) float32, whole numbers."""
    shape = plan.shape
    draws = _normal(plan.key.fold("means"), torch.arange(shape.classes), shape.features)
    return np.rint(draws * np.float32(shape.signal / math.sqrt(shape.features)))


def _lanes(key: Key, rows: Tensor, width: int) -> np.ndarray:
    """Return draws of 16 bits, four from each word as in `Key.keep`, (B, width) uint16."""
    lanes: np.ndarray = key.words(rows, -(-width // 4)).numpy().view(np.uint16)[:, :width]
    return lanes


def _normal(key: Key, rows: Tensor, width: int) -> np.ndarray:
    """Return normal draws in units of 1 / UNIT, (B, width) float32, whole numbers.

    Each is one of `LEVELS` quantiles, the largest 4.3.
    """
    draws: np.ndarray = _quantiles()[_lanes(key, rows, width)]
    return draws


@cache
def _quantiles() -> np.ndarray:
    middle = (np.arange(LEVELS) + 0.5) / LEVELS
    return np.rint(ndtri(middle) * UNIT).astype(np.float32)
