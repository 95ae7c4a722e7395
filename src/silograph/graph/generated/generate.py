"""Generated graphs by name: of the shape of known large ones, made in blocks and kept on disk.

`silograph.graph.generated.planted` says by what law. n: nodes.
"""

import math
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from silograph.core.errors import ConfigError, DataError, lookup
from silograph.core.key import Key
from silograph.core.numeric_state import standard_numerics
from silograph.graph.csr import CSR
from silograph.graph.generated.planted import (
    DENSEST,
    Bits,
    Entries,
    GraphPlan,
    GraphShape,
    Nodes,
    OneClass,
    alone,
    draw_edges,
    features,
    making,
    read_folder,
    write_blocks,
    write_manifest,
)
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
                raise DataError(f"expected a folder as {what}, got {folder}: no such folder")
    return [*folders, Path("../shared/data")]


VERSION = 1  # of the law: graphs of another one are kept apart
PREFIX = "generated:"
INT32 = 2**31  # entries and nodes from which offsets and columns need 64 bits, as in `CSR`
PARTS = ("indptr", "indices", "x", "y", "train", "val", "test", "community")
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
"""Told what is being made, and the share (0 to 1) of it that is done."""


@dataclass(frozen=True)
class Blocks:
    """How much is in memory at a time; the graph does not depend on it.

    Attributes:
        draws: edges drawn in one block. Few, so that a block stays in a core's own cache.
        values: features or label bits in one block.
        entries: entries of the adjacency in one bucket.
    """

    draws: int = 1 << 16
    values: int = 1 << 20
    entries: int = 1 << 21


@dataclass(frozen=True)
class GenerateRequest:
    """The arguments of `generate`, checked.

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
    def plan(self) -> GraphPlan:
        """The graph to make."""
        return GraphPlan(
            shape=self.shape,
            nodes=self.nodes,
            edges=round(self.shape.edges * self.scale),
            communities=round(self.shape.communities * self.scale),
            key=Key.of(self.seed).fold("generated", self.preset),
        )

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
        report: told now and then what is being made, and how much of it is done.

    Returns:
        A graph with its planted communities as silos, and with a split.

    Raises:
        ConfigError: no preset of that name (names the nearest), or scale or seed out of range.
        DataError: the graph's folder is damaged or cannot be written, or the disk is too small.
    """
    if not isinstance(name, str):
        raise ConfigError(f"expected the name of a generated graph, got {type(name).__name__}")
    recipe = GenerateRequest(name.lower(), scale, seed)
    parent = cache_folder(data_dir) / "generated"
    folder, report_progress = parent / recipe.folder, report or (lambda _what, _share: None)
    if not folder.exists():
        try:
            with alone(
                parent, lambda: report_progress(f"waiting for another process in {parent}", 0.0)
            ):
                if not folder.exists():  # another process may have made it meanwhile
                    _check_space(recipe, parent)
                    make(recipe, folder, Blocks(), report_progress)
        except OSError as error:
            raise DataError(
                f"expected to keep {recipe.name} in {folder}, got: {error.strerror}"
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


def _check_space(recipe: GenerateRequest, parent: Path) -> None:
    """Raise `DataError` where the disk is too small, before an hour is spent on it."""
    plan, shape = recipe.plan, recipe.shape
    # Two directions: entries of 8 bytes, a third more at worst while they are drawn, then of 4.
    per_edge = 2 * (8 * 4 / 3 + 4)
    per_node = 4 * shape.features + 8 * (shape.classes if shape.multilabel else 1) + 15
    need, free = plan.edges * per_edge + plan.nodes * per_node, shutil.disk_usage(parent).free
    if free < need:
        raise DataError(
            f"expected {need / 1e9:,.1f} GB of free disk for {recipe.name} at scale "
            f"{recipe.scale:g}, got {free / 1e9:,.1f} GB at {parent}: give another folder as "
            "data_dir or $SILOGRAPH_DATA, or a smaller scale"
        )


def read(recipe: GenerateRequest, folder: Path) -> Graph:
    """Return the graph that `make` left in a folder.

    Raises:
        DataError: the folder is damaged.
    """
    arrays = read_folder(folder, PARTS, recipe.about)
    indptr, indices, x, y, train, val, test, silo = (torch.from_numpy(arrays[p]) for p in PARTS)
    if int(indptr[0]) != 0 or int(indptr[-1]) != len(indices):
        raise DataError(
            f"expected a whole graph in {folder}, got offsets that do not fit the edges: delete "
            "the folder, and it is made again"
        )
    count = len(recipe.plan.sizes)
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


def make(recipe: GenerateRequest, folder: Path, blocks: Blocks, report: ProgressCallback) -> None:
    """Make a graph and put it into a folder, all or nothing.

    Memory holds some arrays of size n, and one block.
    """
    plan = recipe.plan
    what = (
        f"generating {recipe.name}, scale {recipe.scale:g}: {plan.nodes:,} nodes, "
        f"{plan.edges:,} edges, to be kept in {folder}"
    )
    report(what, 0.0)
    with making(folder) as partial:
        nodes = Nodes(plan)
        draws = _write_edges(nodes, partial, blocks, lambda share: report(what, 0.7 * share))
        _write_nodes(nodes, partial, blocks, lambda share: report(what, 0.7 + 0.2 * share))
        write_manifest(partial, recipe.about)
        graph = read(recipe, partial)
        counts = {"nodes": graph.num_nodes, "edges": graph.num_edges, "draws": draws}
        write_manifest(partial, recipe.about | counts | {"fingerprint": fingerprint(graph)})
    report(what, 1.0)


def _write_edges(
    nodes: Nodes, folder: Path, blocks: Blocks, report: Callable[[float], None]
) -> int:
    """Write indptr and indices; return how many draws they took."""
    plan, place = nodes.plan, folder / "entries"
    place.mkdir()
    entries = Entries(place, plan.nodes, 2 * plan.edges, blocks.entries)
    draws = draw_edges(nodes, entries, blocks.draws, report)
    count = len(entries)
    dtype = np.int32 if max(count, plan.nodes) < INT32 else np.int64
    degrees = []

    def columns() -> Iterator[np.ndarray]:
        for degree, column in entries.take_rows():
            degrees.append(degree)
            yield column

    write_blocks(folder / "indices.npy", dtype, (count,), columns())
    place.rmdir()
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(degrees))])
    np.save(folder / "indptr.npy", offsets.astype(dtype))
    return draws


def _write_nodes(
    nodes: Nodes, folder: Path, blocks: Blocks, report: Callable[[float], None]
) -> None:
    """Write labels, features, split and communities."""
    shape, n = nodes.plan.shape, nodes.plan.nodes
    step = max(blocks.values // max(shape.features, shape.classes), 1)
    spans = [(start, min(start + step, n)) for start in range(0, n, step)]
    labels = Bits(nodes) if shape.multilabel else OneClass(nodes)
    rows = (labels.rows(*span) for span in spans)
    write_blocks(folder / "y.npy", np.int64, labels.size, rows)

    def values() -> Iterator[np.ndarray]:
        for start, end in spans:
            yield features(nodes, labels, start, end)
            report(end / n)

    write_blocks(folder / "x.npy", np.float32, (n, shape.features), values())
    np.save(folder / "community.npy", nodes.community.astype(np.int64))
    for part, mask in zip(("train", "val", "test"), nodes.split(), strict=True):
        np.save(folder / f"{part}.npy", mask)
