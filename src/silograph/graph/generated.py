"""Generated graphs by name: of the shape of known large ones, without a download.

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
drawing. Sums are of integers and so are exact: machines agree bit for bit, unless their logarithms
differ just where a rounded draw does. A graph is kept on disk as plain arrays, and mapped.

n: nodes. F: features. T: label bits. C: communities. K: classes. B: rows or draws of a block.
"""

import json
import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.special import expit, logit, ndtri
from torch import Tensor

from silograph.core.errors import ConfigError, DataError, lookup, mistake
from silograph.core.key import Key
from silograph.core.numeric_state import standard_numerics
from silograph.graph.csr import CSR
from silograph.graph.graph import Graph, Split, fingerprint

# --- The folders of graphs -----------------------------------------------------------------------


VARIABLE = "SILOGRAPH_DATA"


def cache_folder(data_dir: str | os.PathLike[str] | None) -> Path:
    """Return the folder of downloaded and generated graphs.

    Raises:
        DataError: a folder that was given is absent.
    """
    is_set = data_dir is not None or os.environ.get(VARIABLE)
    return data_folders(data_dir)[0] if is_set else Path.home() / ".cache" / "silograph"


def data_folders(data_dir: str | os.PathLike[str] | None) -> list[Path]:
    """Return the folders to search, first to last.

    Raises:
        DataError: a folder that was given is absent.
    """
    folders_by_source = {"data_dir": data_dir, f"${VARIABLE}": os.environ.get(VARIABLE) or None}
    folders = []
    for what, folder in folders_by_source.items():
        if folder is not None:
            folders.append(Path(folder).expanduser())
            if not folders[-1].is_dir():
                raise DataError(
                    f"expected a folder as {what}, got {folder}: no such folder",
                    **mistake("missing-file", folder),
                )
    return [*folders, Path("../shared/data")]


# --- What a graph is like ------------------------------------------------------------------------

VERSION = 1  # of the law: graphs of another one are kept apart
PREFIX = "generated:"
MANIFEST = "manifest.json"  # what the arrays of a folder are of, with the dtype and shape of each
INT32 = 2**31  # entries and nodes from which offsets and columns need 64 bits, as in `CSR`
PARTS = ("indptr", "indices", "x", "y", "train", "val", "test", "community")
BLOCK_DRAWS = 1 << 16  # edges drawn at a time: few, so that they stay in a core's own cache
BLOCK_VALUES = 1 << 20  # features or label bits that are drawn at a time
DENSEST = 0.25  # share of all pairs, at most; beyond, few draws are new edges
CROWDED = 0.5  # draws a pair inside a community, at most
SHORTFALL = 0.001  # of the edges, at which drawing ends
WEIGHT_UNIT = 1 << 16  # propensities are multiples of 1 / WEIGHT_UNIT
UNIT = 4096  # features and means are multiples of 1 / UNIT
LEVELS = 1 << 16  # a normal draw, and that of a bit, take 16 of a word's 64 bits
FEWEST_COMMUNITIES = 20  # of a graph with label bits; otherwise one a class
COLUMN_BITS = 32  # of an entry (row, column) as one int64; the bits above hold the row


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


_AMAZON2M = GraphShape(
    nodes=2_449_029,
    edges=61_859_140,
    features=100,
    classes=47,
    communities=752,
    skew=1.0,
    sigma=1.3,
    inside=0.75,
    stray=0.15,
    signal=2.2,
    split=(0.65, 0.05),
)
_REDDIT = GraphShape(
    nodes=232_965,
    edges=57_307_946,
    features=602,
    classes=41,
    communities=82,
    skew=0.6,
    sigma=1.0,
    inside=0.75,
    stray=0.06,
    signal=2.6,
    split=(0.66, 0.10),
)
_YELP = GraphShape(
    nodes=716_847,
    edges=6_977_410,
    features=300,
    classes=100,
    communities=240,
    skew=0.5,
    sigma=1.2,
    inside=0.75,
    stray=0.0,
    signal=0.8,
    split=(0.75, 0.10),
    contrast=2.0,
    multilabel=True,
)
PRESETS = {
    "amazon2m": _AMAZON2M,
    "ogbn-products": replace(_AMAZON2M, split=(0.08, 0.02), by_rank=True),
    "reddit": _REDDIT,
    "yelp": _YELP,
}
"""Shapes by name. Sizes, shares and kind of the split are those of these data:

- amazon2m: products. W.-L. Chiang et al.: "Cluster-GCN: an efficient algorithm for training deep
  and large graph convolutional networks", KDD 2019. Split at random there, without validation
  nodes; the shares here are our own.
- ogbn-products: W. Hu et al.: "Open Graph Benchmark: datasets for machine learning on graphs",
  NeurIPS 2020. The same products, split by sales rank. Here other draws, and rank goes with
  degree.
- reddit: posts. W. Hamilton, R. Ying, J. Leskovec: "Inductive representation learning on large
  graphs", NeurIPS 2017. Split by date there, at random here.
- yelp: users. H. Zeng et al.: "GraphSAINT: graph sampling based inductive learning method", ICLR
  2020. Split at random.

All else (communities, skew, sigma, inside, stray, signal) is chosen and not fitted: degrees, sizes
of classes and scores are not those of the data that a preset is named after.
"""

ProgressCallback = Callable[[str, float], None]
"""Called with what is being made, and the share (0 to 1) of it that is done."""


@dataclass(frozen=True)
class GenerateRequest:
    """The arguments of `generate`, checked: everything that decides the bits of a graph.

    Raises:
        ConfigError: the preset is not known, or scale or seed is out of range.
    """

    preset: str
    scale: float
    seed: int

    def __post_init__(self) -> None:
        """Check everything, for it becomes the name of a folder."""
        shape, scale = lookup(PRESETS, self.preset, "generated graph"), self.scale
        if isinstance(scale, bool) or not isinstance(scale, int | float):
            raise ConfigError(f"expected a number as scale, got {scale!r}")
        if not 0 < scale < math.inf:  # NaN fails too
            raise ConfigError(f"expected a scale above 0, got {scale}")
        if type(self.seed) is not int or not 0 <= self.seed < 2**63:
            raise ConfigError(f"expected a whole number from 0 as seed, got {self.seed!r}")
        fewest = max(math.ceil(shape.mean_degree / DENSEST) + 1, shape.classes)
        most = 2**31 - 1  # columns have 32 bits
        if not fewest <= self.nodes <= most:
            bounds = [math.ceil(1e5 * fewest / shape.nodes) / 1e5, math.floor(most / shape.nodes)]
            raise ConfigError(
                f"expected a scale of {bounds[0]:g} to {bounds[1]:g} for {self.preset}, got "
                f"{scale:g}: at a mean degree of {shape.mean_degree:.0f} and {shape.classes} "
                f"classes, {fewest} nodes are the fewest and {most:,} the most"
            )

    @property
    def shape(self) -> GraphShape:
        """Its law."""
        return PRESETS[self.preset]

    @property
    def nodes(self) -> int:
        """Nodes at this scale."""
        return round(min(self.shape.nodes * self.scale, 2.0**62))

    @property
    def edges(self) -> int:
        """Undirected edges at this scale; the mean degree is the same."""
        return round(self.shape.edges * self.scale)

    @property
    def key(self) -> Key:
        """The root of all draws."""
        return Key.of(self.seed).fold("generated", self.preset)

    @property
    def sizes(self) -> np.ndarray:
        """Nodes of every community, (C,) int64, each at least one; there are enough for a class."""
        turn = FEWEST_COMMUNITIES if self.shape.multilabel else self.shape.classes
        number = np.arange(max(round(self.shape.communities * self.scale), turn))
        weight = (1.0 + number % turn) ** -self.shape.skew * (1.0 + number // turn) ** -0.5
        share = weight / weight.sum()
        sizes: np.ndarray = 1 + np.floor((self.nodes - len(number)) * share).astype(np.int64)
        sizes[: self.nodes - int(sizes.sum())] += 1  # what rounding down left over
        return sizes

    @property
    def name(self) -> str:
        """The name of the graph for `load`; the scale is not part of it."""
        return f"{PREFIX}{self.preset}" + (f"@{self.seed}" if self.seed else "")

    @property
    def folder(self) -> str:
        """Name of its folder; `repr` distinguishes all scales."""
        return f"{self.preset}-{float(self.scale)!r}-{self.seed}-v{VERSION}"

    @property
    def about(self) -> dict[str, Any]:
        """The expected entries of its manifest."""
        return {
            "version": VERSION,
            "preset": self.preset,
            "scale": float(self.scale),
            "seed": self.seed,
            "shape": asdict(self.shape) | {"split": list(self.shape.split)},
        }


class Nodes:
    """Communities and ranks of the nodes.

    Nodes in the order of their communities are at positions 0..n-1, so that a community is a
    range of positions. Node numbers tell nothing.

    Attributes:
        plan: the graph to make.
        number: (n,) int64, 0..n-1.
        sizes: (C,) int64, nodes of every community.
        at: (n,) int32, node at every position.
        place: (n,) int32, community of every position.
        community: (n,) int32, community of every node.
        rank: (n,) float64 standard normal: a node's propensity is exp(sigma * rank).
    """

    def __init__(self, plan: GenerateRequest) -> None:
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


def draw_edges(nodes: Nodes, report: Callable[[float], None]) -> tuple[np.ndarray, int]:
    """Draw edges until there are enough; return their entries (2 m,) int64, sorted, and the draws.

    The first go draws as many as are wanted. Every other one draws those still missing, over the
    share that was new in the go before: less is new from go to go, so that it hardly ever gives
    more than are wanted.
    """
    drawing, num_edges = Drawing(nodes), nodes.plan.edges
    edges = np.empty(0, np.int64)  # from the lower to the higher node
    num_draws, new = 0, 1.0
    while num_edges - len(edges) > SHORTFALL * num_edges:
        more = math.ceil((num_edges - len(edges)) / new)
        blocks, before = [edges], len(edges)
        for start in range(num_draws, num_draws + more, BLOCK_DRAWS):
            a, b = drawing.pairs(start, min(start + BLOCK_DRAWS, num_draws + more))
            low, high = np.minimum(a, b).astype(np.int64), np.maximum(a, b).astype(np.int64)
            blocks.append((low << COLUMN_BITS | high)[low != high])
            report((before + (start - num_draws) * new) / num_edges)
        drawn = np.concatenate(blocks)
        drawn[before:].sort()
        drawn.sort(kind="stable")  # merges the two sorted runs
        edges = drawn[np.diff(drawn, prepend=-1) != 0]
        new = max(len(edges) - before, 1) / more  # a short go may give none
        num_draws += more
    columns = edges & (1 << COLUMN_BITS) - 1
    entries = np.concatenate([edges, columns << COLUMN_BITS | edges >> COLUMN_BITS])
    entries.sort()
    return entries, num_draws


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


def _means(plan: GenerateRequest) -> np.ndarray:
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


# --- Making and reading --------------------------------------------------------------------------


@standard_numerics()
def generate(
    name: str,
    *,
    scale: float = 1.0,
    seed: int = 0,
    data_dir: str | os.PathLike[str] | None = None,
    report: ProgressCallback | None = None,
) -> Graph:
    """Return a generated graph, memory-mapped; only the first call makes it.

    Args:
        name: a name of `PRESETS`: amazon2m, ogbn-products, reddit or yelp, in any case.
        scale: factor of nodes and edges, and of communities as long as there are enough for the
            classes; the mean degree stays.
        seed: another one is another graph of the same shape.
        data_dir: folder in which the graph is kept, under `generated/`. Otherwise that is
            $SILOGRAPH_DATA or ~/.cache/silograph.
        report: called now and then with what is being made, and how much of it is done.

    Returns:
        A graph with its planted communities as silos, and with a split.

    Raises:
        ConfigError: no preset of that name (names the nearest), or scale or seed out of range.
        DataError: the graph's folder is damaged or cannot be written.
    """
    if not isinstance(name, str):
        raise ConfigError(f"expected the name of a generated graph, got {type(name).__name__}")
    recipe = GenerateRequest(name.lower(), scale, seed)
    folder = cache_folder(data_dir) / "generated" / recipe.folder
    if not folder.exists():
        try:
            make(recipe, folder, report or (lambda _what, _share: None))
        except OSError as error:
            raise DataError(
                f"expected to keep {recipe.name} in {folder}, got: {error.strerror}",
                **mistake("unwritable-path", folder),
            ) from None
    return read(recipe, folder)


def parse(name: str) -> tuple[str, int]:
    """Return preset and seed of a name that begins with `generated:`.

    >>> parse("generated:reddit"), parse("generated:reddit@7")
    (('reddit', 0), ('reddit', 7))

    Raises:
        ConfigError: the seed is no number.
    """
    preset, at, seed = name[len(PREFIX) :].partition("@")
    if at and not (seed.isascii() and seed.isdigit()):
        raise ConfigError(f"expected a whole number from 0 as seed after @, got {name!r}")
    return preset, int(seed or 0)


def read(recipe: GenerateRequest, folder: Path) -> Graph:
    """Return the graph that `make` left in a folder, mapped: nothing is read before it is used.

    Raises:
        DataError: the folder is damaged, and has to be deleted.
    """
    try:
        about = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        for key, value in recipe.about.items():
            if about[key] != value:
                raise ValueError(f"{key} {about[key]!r} instead of {value!r}")
        arrays = [_mapped(folder / f"{part}.npy") for part in PARTS]
        if describe_arrays(folder) != about["arrays"]:
            raise ValueError(f"arrays that are not those of {MANIFEST}")
        indptr, indices, x, y, train, val, test, silo = map(torch.from_numpy, arrays)
        if int(indptr[0]) != 0 or int(indptr[-1]) != len(indices):
            raise ValueError("offsets that do not fit the edges")
    # A foreign manifest surfaces as one of these, and numpy's reader raises the last two.
    except (KeyError, TypeError, AttributeError, OSError, ValueError, EOFError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise DataError(
            f"expected a whole graph in {folder}, got {reason}: delete the folder, and it is made "
            "again",
            **mistake("damaged-file", folder),
        ) from None
    count = len(recipe.sizes)
    digits = len(str(count - 1))
    return Graph(
        adj=CSR(indptr, indices, None, recipe.nodes),
        x=x,
        y=y,
        num_classes=recipe.shape.classes,
        node_id=np.arange(recipe.nodes),
        name=recipe.name,
        split=Split(train, val, test),
        silo=silo,
        silo_names=tuple(f"community_{number:0{digits}d}" for number in range(count)),
    )


def _mapped(path: Path) -> np.ndarray:
    """Map an array copy-on-write, as torch warns of arrays that it cannot write to."""
    array: np.ndarray = np.load(path, mmap_mode="c", allow_pickle=False)
    return array


def describe_arrays(folder: Path) -> dict[str, list[Any]]:
    """Return the dtype and shape of every array in a folder."""
    arrays = {path.stem: _mapped(path) for path in sorted(folder.glob("*.npy"))}
    return {name: [array.dtype.str, list(array.shape)] for name, array in arrays.items()}


def make(recipe: GenerateRequest, folder: Path, report: ProgressCallback) -> None:
    """Make a graph and put it into a folder, all or nothing.

    Memory holds all of the graph, and its edges three times while they are drawn.
    """
    what = (
        f"generating {recipe.name}, scale {recipe.scale:g}: {recipe.nodes:,} nodes, "
        f"{recipe.edges:,} edges, to be kept in {folder}"
    )
    report(what, 0.0)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder.parent) as temporary:
        partial = Path(temporary) / folder.name
        partial.mkdir()
        nodes = Nodes(recipe)
        draws = _write_edges(nodes, partial, lambda share: report(what, 0.7 * share))
        _write_nodes(nodes, partial, lambda share: report(what, 0.7 + 0.2 * share))
        about = recipe.about | {"arrays": describe_arrays(partial)}
        (partial / MANIFEST).write_text(json.dumps(about), encoding="utf-8")
        graph = read(recipe, partial)
        about |= {"nodes": graph.num_nodes, "edges": graph.num_edges, "draws": draws}
        about |= {"fingerprint": fingerprint(graph)}
        text = json.dumps(about, indent=2)
        (partial / MANIFEST).write_text(text + "\n", encoding="utf-8")
        if not folder.exists():  # another process may have made it meanwhile
            partial.rename(folder)
    report(what, 1.0)


def _write_edges(nodes: Nodes, folder: Path, report: Callable[[float], None]) -> int:
    """Write indptr and indices; return how many draws they took."""
    entries, draws = draw_edges(nodes, report)
    count = nodes.plan.nodes
    dtype = np.int32 if max(len(entries), count) < INT32 else np.int64
    offsets = np.searchsorted(entries, np.arange(count + 1) << COLUMN_BITS)
    np.save(folder / "indptr.npy", offsets.astype(dtype))
    np.save(folder / "indices.npy", (entries & (1 << COLUMN_BITS) - 1).astype(dtype))
    return draws


def _write_nodes(nodes: Nodes, folder: Path, report: Callable[[float], None]) -> None:
    """Write labels, features, split and communities."""
    shape, n = nodes.plan.shape, nodes.plan.nodes
    labels = Bits(nodes) if shape.multilabel else OneClass(nodes)
    y, x = np.empty(labels.size, np.int64), np.empty((n, shape.features), np.float32)
    step = max(BLOCK_VALUES // max(shape.features, shape.classes), 1)
    for start in range(0, n, step):
        end = min(start + step, n)
        y[start:end] = labels.rows(start, end)
        x[start:end] = features(nodes, labels, start, end)
        report(end / n)
    np.save(folder / "y.npy", y)
    np.save(folder / "x.npy", x)
    np.save(folder / "community.npy", nodes.community.astype(np.int64))
    for part, mask in zip(("train", "val", "test"), nodes.split(), strict=True):
        np.save(folder / f"{part}.npy", mask)
