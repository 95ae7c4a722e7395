"""The data of a study: read once, and still what its finished lines were computed on.

A graph in a file of the user's, or in memory, is part of what a cell is known by. A dataset by name
is not, so that a recipe means the same on every machine; its lines say what they were computed on.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError
from silograph.experiment.resolve.cutting import as_used
from silograph.experiment.resolve.edge_weights import with_edges
from silograph.graph.datasets import is_path
from silograph.graph.graph import Graph, fingerprint
from silograph.graph.source import source_of
from silograph.study.cells import Cell, Line, digest_of, lasts, named_file_hash

Done = Sequence[tuple[RunConfig, Line]]


def fetch(cells: Iterable[Cell], lines: Iterable[Line], path: Path | None) -> None:
    """Read the graphs of missing cells, and refuse lines that were computed on other graphs.

    A wrong name is told at once, and nothing is downloaded twice. Where nothing is missing, a
    graph is read only if its file is not the one that a line names.

    Args:
        cells: those that are asked for.
        lines: those that are there.
        path: where they are, for the error.

    Raises:
        SilographError: a graph cannot be read, or is not that of the lines.
    """
    known = {digest_of(line): line for line in lines if lasts(line)}
    groups: dict[tuple[Any, ...], list[Cell]] = defaultdict(list)
    for cell in cells:
        if cell.graph is None:
            given = cell.config
            reading_options = given.data_dir, given.columns, given.na_values, given.rating_scale
            groups[given.dataset, given.scale, *reading_options].append(cell)
    for (dataset, scale, *_), group in groups.items():
        done = [(c.config, known[c.digest]) for c in group if c.digest in known]
        if len(done) < len(group) or _changed(done):
            graph = source_of(group[0].config).read(scale)
            if isinstance(graph, Graph) and not is_path(dataset):
                _check(graph, done, path)


def _changed(done: Done) -> bool:
    """Whether the file of a dataset is there, and is not the one that a line names."""
    hashes = {line["data"]["file"] for _, line in done if "data" in line}
    return bool(hashes) and bool({named_file_hash(done[0][0])} - hashes - {None})


def _check(graph: Graph, done: Done, path: Path | None) -> None:
    """Raise `ConfigError` where a line was computed on another graph, if it says on which."""
    hashes: dict[tuple[bool, str, str, str | None], set[str]] = {}
    for config, line in done:
        if "data" not in line:  # written before lines said it
            continue
        use = config.largest_component, config.normalize, config.features, config.edge_weights
        theirs = line["data"]["graph"]
        if use not in hashes:
            # A model that has no place for weights of edges was trained without.
            both = (graph, with_edges(graph, "ignore"))
            hashes[use] = {fingerprint(as_used(config, each)) for each in both}
        if theirs not in hashes[use]:
            ours = fingerprint(as_used(config, graph))
            raise ConfigError(
                f"expected {config.dataset} as it was for the lines of {path} (graph {theirs}), "
                f"got another (graph {ours}): put its file back, or choose another --out, nothing "
                "was overwritten"
            )
