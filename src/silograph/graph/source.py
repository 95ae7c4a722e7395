"""Where the data of a run are: found by one call, read by another."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from silograph.core.config import RunConfig
from silograph.core.rating_scale import ends_of
from silograph.graph.datasets import (
    check_columns,
    check_na_values,
    check_rating_scale,
    check_scale,
    is_generated,
    is_path,
    load,
    locate,
    tables_of,
)
from silograph.graph.generated.generate import ProgressCallback
from silograph.graph.graph import Graph
from silograph.graph.read.npz import archive_has_ratings
from silograph.graph.silos.data import Silos
from silograph.graph.silos.read import is_silos, read_silos, silos_have_ratings

Data = Graph | Silos


@dataclass(frozen=True)
class Source:
    """Where data are.

    Attributes:
        kind: `memory`, a `name` of a dataset, the `path` of a graph, or `silos`, a folder of them.
        dataset: what the user calls them.
        path: from the root on, None where data are made or downloaded.
        data_dir: folder that was looked into.
        columns: what a folder of tables calls its columns, as `load` takes it.
        rating_scale: of a folder of tables of ratings, as `load` takes it.
        na_values: of a folder of tables or an .npz file, as one text.
    """

    kind: Literal["memory", "name", "path", "silos"]
    dataset: str
    path: str | None = None
    data_dir: str | None = None
    columns: str | None = None
    rating_scale: str | None = None
    na_values: str | None = None

    def read(
        self, scale: float, report: ProgressCallback | None = None, *, with_labels: bool = True
    ) -> Data:
        """Return the data.

        Args:
            scale: of a generated graph.
            report: told what is being generated.
            with_labels: whether labels in tables of nodes are read.

        Raises:
            SilographError: they cannot be read, or cannot be scaled.
        """
        if not is_generated(self.dataset):
            check_scale(self.dataset, scale)
        if self.kind == "silos":
            check_columns(self.dataset, self.columns)
            check_rating_scale(self.dataset, self.rating_scale)
            check_na_values(self.dataset, self.na_values)
            return read_silos(Path(self.dataset).expanduser())
        found = self.path if self.kind == "name" else None
        return load(
            found or self.dataset,
            data_dir=self.data_dir,
            scale=scale,
            columns=self.columns,
            rating_scale=ends_of(self.rating_scale),
            na_values=self.na_values,
            with_labels=with_labels,
            report=report,
        )

    def has_ratings(self) -> bool:
        """Whether the data are ratings of users and items; no table or array is read for it.

        False for what cannot be read: to read it says why.
        """
        if self.path is None:
            return False
        path = Path(self.path)
        if self.kind == "silos":
            return silos_have_ratings(path)
        return "ratings" in tables_of(path) or archive_has_ratings(path)

    def told(self) -> dict[str, str | None] | None:
        """Return what finds the data again from any folder; None where they were in memory."""
        if self.kind == "memory":
            return None
        if self.path is not None:
            return {"dataset": self.path, "data_dir": None}
        return {"dataset": self.dataset, "data_dir": self.data_dir}


def find_source(
    dataset: str,
    *,
    data_dir: str | None = None,
    columns: str | None = None,
    rating_scale: str | None = None,
    na_values: str | None = None,
    data: Data | None = None,
) -> Source:
    """Return where data are; nothing is read.

    Args:
        dataset: a name, or a path.
        data_dir: folder that is looked into first.
        columns: of a folder of tables.
        rating_scale: of a folder of tables of ratings.
        na_values: of a folder of tables or an .npz file, as one text.
        data: what is in memory already.

    Raises:
        DataError: a folder to search is absent.
    """
    if data is not None:
        return Source("memory", dataset)
    path = locate(dataset, data_dir=data_dir)
    if path is None:
        folder = data_dir or os.environ.get("SILOGRAPH_DATA") or None
        folder = None if folder is None else absolute_path(folder)
        return Source("name", dataset, None, folder, columns, rating_scale, na_values)
    named = not is_path(dataset)
    kind: Literal["name", "path", "silos"] = "name" if named else "path"
    kind = "silos" if is_silos(path) and not named else kind
    return Source(kind, dataset, str(path.absolute()), None, columns, rating_scale, na_values)


def has_ratings(data: Data) -> bool:
    """Whether data in memory are ratings of users and items."""
    graph = data.members[0].graph if isinstance(data, Silos) else data
    return graph.task == "rating"


def source_of(config: RunConfig, *, data: Data | None = None) -> Source:
    """Return where the data of a config are, with all that it says of how they are read."""
    return find_source(
        config.dataset,
        data_dir=config.data_dir,
        columns=config.columns,
        rating_scale=config.rating_scale,
        na_values=config.na_values,
        data=data,
    )


def absolute_path(path: str) -> str:
    """Return the path from the root on; `~` is the user's home, as in `load`."""
    return os.path.abspath(os.path.expanduser(path))
