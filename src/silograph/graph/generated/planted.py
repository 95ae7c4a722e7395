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

import fcntl
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import expit, logit, ndtri
from torch import Tensor

from silograph.core.errors import DataError
from silograph.core.files import hold_folder
from silograph.core.key import Key

# --- array folder --------------------------------------------------------------------------------
# Folders of arrays on disk: written in blocks, there whole or not at all, read by mapping.
#
#     manifest.json       what the arrays are of, with the dtype and shape of each
#     NAME.npy            one plain array each
#
# n: rows of a matrix.


MANIFEST = "manifest.json"
COLUMN_BITS = 32  # of a 64-bit entry; the bits above hold the row
MOST_BUCKETS = 200  # files that are open at the same time; some systems allow 256
_PARTIAL = ".partial-"  # begins the name of a folder that is being made


def write_blocks(
    path: Path, dtype: npt.DTypeLike, shape: tuple[int, ...], blocks: Iterator[np.ndarray]
) -> None:
    """Write one .npy file from blocks of rows that together have this shape."""
    header = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": shape}
    num_written = 0
    with path.open("xb") as file:
        np.lib.format.write_array_header_2_0(file, header)
        for block in blocks:
            file.write(np.ascontiguousarray(block, dtype=dtype).data)
            num_written += len(block)
    assert num_written == shape[0]  # a header that lies would read as a damaged file


class Entries:
    """A set of entries (row, column) of a matrix, kept on disk in buckets of neighboring rows.

    An entry is one int64, row * 2^32 + column. Memory holds one bucket at a time. What was added
    last counts only when `settle` is through.
    """

    def __init__(self, folder: Path, num_rows: int, expected: int, bucket: int) -> None:
        """Make an empty set.

        Args:
            folder: an empty folder for the buckets.
            num_rows: n, below 2^31.
            expected: about how many entries there will be.
            bucket: about how many of them memory holds at a time.
        """
        count = min(max(-(-expected // bucket), 1), MOST_BUCKETS, num_rows)
        self._num_rows = num_rows
        self._rows = -(-num_rows // count)  # of a bucket
        count = -(-num_rows // self._rows)
        self._paths = [folder / f"{number:04d}" for number in range(count)]
        self._sizes = [0] * count  # of the sorted head of each file

    def __len__(self) -> int:
        """Return how many there are, as of `settle`."""
        return sum(self._sizes)

    def add(self, blocks: Iterator[np.ndarray]) -> None:
        """Add entries in blocks (k,) int64, any of which may be there already."""
        with ExitStack() as stack:
            files = [stack.enter_context(path.open("ab")) for path in self._paths]
            for entries in blocks:
                bucket = ((entries >> COLUMN_BITS) // self._rows).astype(np.uint16)
                # 16 bits are sorted by radix, several times faster than by comparing entries.
                entries = entries[np.argsort(bucket, kind="stable")]
                ends = np.cumsum(np.bincount(bucket, minlength=len(files)))
                for file, part in zip(files, np.split(entries, ends[:-1]), strict=True):
                    file.write(part.data)

    def settle(self) -> Iterator[float]:
        """Sort what was added, drop what is there twice; yield the share that is done."""
        for number, path in enumerate(self._paths):
            self._sizes[number] = _settle(path, self._sizes[number])
            yield (number + 1) / len(self._paths)

    def take_rows(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield entries a row and their columns, bucket by bucket; the set is gone afterwards.

        Rows ascend, and so do the columns within a row.
        """
        for number, path in enumerate(self._paths):
            entries = np.fromfile(path, np.int64)
            path.unlink()
            first = number * self._rows
            rows = min(self._rows, self._num_rows - first)
            starts = np.arange(first, first + rows + 1) << COLUMN_BITS
            yield np.diff(np.searchsorted(entries, starts)), entries.astype(np.uint32)


def _settle(path: Path, head: int) -> int:
    """Sort a bucket whose first `head` entries are sorted, drop repeated ones, return the size."""
    entries = np.fromfile(path, np.int64)
    if len(entries) == head:
        return head
    entries[head:].sort()
    entries.sort(kind="stable")  # merges the two sorted runs
    entries = entries[np.diff(entries, prepend=-1) != 0]
    path.write_bytes(entries.data)
    return len(entries)


@contextmanager
def making(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that is `folder` afterwards, or gone where the block raises."""
    partial = folder.with_name(_PARTIAL + folder.name)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def alone(folder: Path, wait: Callable[[], None]) -> Iterator[None]:
    """Let no other process make anything in `folder`; `wait` is called if one does.

    What killed processes left behind is cleared away.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = hold_folder(folder)
    if handle is None:
        wait()
        handle = os.open(folder, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        for partial in folder.glob(f"{_PARTIAL}*"):
            shutil.rmtree(partial)
        yield
    finally:
        os.close(handle)


def write_manifest(folder: Path, about: Mapping[str, Any]) -> None:
    """Write the manifest of the arrays in `folder`, with the dtype and shape of each."""
    arrays = {}
    for path in sorted(folder.glob("*.npy")):
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        arrays[path.stem] = [array.dtype.str, list(array.shape)]
    text = json.dumps({**about, "arrays": arrays}, indent=2)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def read_folder(
    folder: Path, names: Sequence[str], same: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Return arrays of a folder, mapped copy-on-write: nothing is read before it is used.

    Args:
        folder: made by `making` with `write_manifest`.
        names: of the arrays.
        same: entries of the manifest that must be as given.

    Raises:
        DataError: the folder is damaged, and has to be deleted.
    """
    try:
        about = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        for key, value in same.items():
            if about[key] != value:
                raise ValueError(f"{key} {about[key]!r} instead of {value!r}")
        return {name: _mapped(folder, name, about["arrays"][name]) for name in names}
    # A foreign manifest surfaces as one of these, and numpy's reader raises the last two.
    except (KeyError, TypeError, AttributeError, OSError, ValueError, EOFError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise DataError(
            f"expected a whole graph in {folder}, got {reason}: delete the folder, and it is made "
            "again"
        ) from None


def _mapped(folder: Path, name: str, about: Sequence[Any]) -> np.ndarray:
    # Copy-on-write, for torch warns of arrays that it cannot write to.
    array: np.ndarray = np.load(folder / f"{name}.npy", mmap_mode="c", allow_pickle=False)
    if [array.dtype.str, list(array.shape)] != list(about):
        raise ValueError(f"{name}.npy of {array.dtype} {array.shape} instead of {about}")
    return array


DENSEST = 0.25  # share of all pairs, at most; beyond, few draws are new edges
CROWDED = 0.5  # draws a pair inside a community, at most
SHORTFALL = 0.001  # of the edges, at which drawing ends
WEIGHT_UNIT = 1 << 16  # propensities are multiples of 1 / WEIGHT_UNIT
UNIT = 4096  # features and means are multiples of 1 / UNIT
LEVELS = 1 << 16  # a normal draw, and that of a bit, take 16 of a word's 64 bits
FEWEST_COMMUNITIES = 20  # of a graph with label bits; otherwise one a class


@dataclass(frozen=True)
class GraphShape:
    """The shape of a generated graph at scale 1.

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

    def internal_odds(self) -> np.ndarray:
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
        too_low = np.flatnonzero(self.ends[position] <= ticket)
        while len(too_low):
            position[too_low] += 1
            too_low = too_low[self.ends[position[too_low]] <= ticket[too_low]]
        return position


def uniform_below(u: np.ndarray, width: "np.ndarray | int") -> np.ndarray:
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
        self._inside = nodes.internal_odds()
        self._key = nodes.plan.key.fold("edges")

    def pairs(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Return both ends of the draws `first` to `last` - 1, each (B,) int32."""
        u = self._key.uniform(torch.arange(first, last), 3).numpy()
        wheel, nodes = self._wheel, self._nodes
        one = wheel.find(uniform_below(u[:, 0], wheel.total))
        home = nodes.place[one]
        is_internal = u[:, 2] < self._inside[home]
        first_node = np.where(is_internal, self._begin[home], 0)
        width = np.where(is_internal, self._width[home], wheel.total)
        other = wheel.find(first_node + uniform_below(u[:, 1], width))
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
    drawing, num_edges = Drawing(nodes), nodes.plan.edges
    num_draws, have, new, before, span = 0, 0, 1.0, 0.0, 0.8

    def draw_pairs(first: int, last: int) -> Iterator[np.ndarray]:
        for number, part in enumerate(drawing.entries(first, last, block)):
            yield part
            report(before + span / 2 * min((number + 1) * block / (last - first), 1.0))

    while num_edges - have > SHORTFALL * num_edges:
        more = math.ceil((num_edges - have) / new)
        entries.add(draw_pairs(num_draws, num_draws + more))
        for share in entries.settle():
            report(before + span / 2 * (1 + share))
        before, span = before + span, span / 5  # the next go is shorter
        new = max(len(entries) // 2 - have, 1) / more  # a short go may give none
        num_draws, have = num_draws + more, len(entries) // 2
    return num_draws


# --- labels and features --------------------------------------------------------------------------


class OneClass:
    """Labels and means of features where a node has one class."""

    def __init__(self, nodes: Nodes) -> None:
        plan, shape = nodes.plan, nodes.plan.shape
        self.size: tuple[int, ...] = (plan.nodes,)
        u = plan.key.fold("stray").uniform(nodes.number, 2).numpy()
        other = nodes.place[uniform_below(u[:, 1], plan.nodes)]
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
        noise = _normal(plan.key.fold("odds"), torch.arange(len(nodes.sizes)), bits) / UNIT
        chance = expit(logit(base) + plan.shape.contrast * noise.astype(np.float64))
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
