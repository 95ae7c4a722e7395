"""Graphs by name: files on this machine first, then the loaders of torch_geometric; or generated.

n: nodes. F: features a node.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import scipy.sparse as sp
import torch

from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError, DataError, mistake, reword_error, unknown
from silograph.core.numeric_state import standard_numerics
from silograph.core.setting_values import ends_of
from silograph.graph.csr import CSR
from silograph.graph.generated import (
    PREFIX,
    VARIABLE,
    ProgressCallback,
    cache_folder,
    data_folders,
    generate,
    parse,
)
from silograph.graph.graph import MISSING, Graph
from silograph.graph.partition.split import time_column
from silograph.graph.read.arrays import from_arrays
from silograph.graph.read.checked_pickle import check_arrays, check_kept
from silograph.graph.read.columns import NaValues
from silograph.graph.read.contents import ending_of, stem_of
from silograph.graph.read.csv import COLUMNS, ColumnNames, from_csv, graph_of_edges, parse_columns
from silograph.graph.read.graph_files import COLUMNS as GRAPH_COLUMNS
from silograph.graph.read.graph_files import load_graph_file
from silograph.graph.read.in_memory import from_pyg
from silograph.graph.read.npz import archive_has_ratings, is_rating_table, load_npz
from silograph.graph.read.ogb import FOLDERS, is_ogb, load_ogb
from silograph.graph.read.ratings import RATING_COLUMNS, SCALE, ratings
from silograph.graph.read.tables import (
    EDGE_FORMATS,
    EDGE_LISTS,
    FORMATS,
    GRAPH_FILES,
    OTHER_FORMATS,
    RATING_FORMATS,
    RepeatedEdges,
    other_format,
)
from silograph.graph.silos.data import Silos
from silograph.graph.silos.read import is_silo, is_silos, read_silos, silos_have_ratings
from silograph.graph.silos.shards import is_shards, shards_have_ratings

DATASETS = {
    "amazon_computers": "co-purchases of computers: 13,752 nodes, 10 classes",
    "amazon_photo": "co-purchases of photo goods: 7,650 nodes, 8 classes",
    "amazon_products": "co-reviewed products: 1,569,960 nodes, 107 label bits, GraphSAINT split",
    "ciao": "ratings of products: 7,317 users, 104,957 items, 281,867 ratings, trust",
    "citation_domains": "papers of 3 bibliographies (silos): 23,779 nodes, 5 label bits",
    "citeseer": "citations: 3,327 nodes, 6 classes, Planetoid split",
    "coauthor_cs": "co-authors in computer science: 18,333 nodes, 15 classes",
    "coauthor_physics": "co-authors in physics: 34,493 nodes, 5 classes",
    "cora": "citations: 2,708 nodes, 7 classes, Planetoid split",
    "digits": "handwritten digits, 8 nearest neighbors: 1,797 nodes, 10 classes, no download",
    "epinions": "ratings of products: 18,088 users, 261,649 items, 756,345 ratings, trust",
    "facebook100_20schools": "friends at 20 colleges (silos): 52,662 nodes, 2 classes",
    "generated:amazon2m": "in the shape of Amazon2M: 2,449,029 nodes, 47 classes, --scale",
    "generated:ogbn-products": "in the shape of ogbn-products: the same, split by rank, --scale",
    "generated:reddit": "in the shape of Reddit: 232,965 nodes, 41 classes, --scale",
    "generated:yelp": "in the shape of Yelp: 716,847 nodes, 100 label bits, --scale",
    "minesweeper": "a 100 by 100 game board: 10,000 nodes, 2 classes, first of 10 splits",
    "ogbn-arxiv": "citations: 169,343 nodes, 40 classes, split by year, raw folder",
    "ogbn-products": "co-purchases: 2,449,029 nodes, 47 classes, split by rank, raw folder",
    "pubmed": "citations: 19,717 nodes, 3 classes, Planetoid split",
    "reddit2": "posts, sparser than Reddit: 232,965 nodes, 41 classes, split by date",
    "twitch": "streamers in 7 countries (silos): 36,890 nodes, 2 classes",
    "webkb": "web pages of 4 universities (silos): 877 nodes, 5 classes",
    "yelp": "reviewers and friends: 716,847 nodes, 100 label bits, GraphSAINT split",
}
ALIASES = {
    "amazonproducts": "amazon_products",
    "computers": "amazon_computers",
    "cs": "coauthor_cs",
    "photo": "amazon_photo",
    "physics": "coauthor_physics",
}


RATINGS = ("ratings", "trust")
SHOWN = 5  # tables of a folder in an error


@standard_numerics()
def load(
    name: str | os.PathLike[str],
    *,
    data_dir: str | os.PathLike[str] | None = None,
    scale: float = 1.0,
    columns: ColumnNames | None = None,
    rating_scale: tuple[float, float] | None = None,
    na_values: NaValues | None = None,
    repeated_edges: RepeatedEdges | None = None,
    time: str | None = None,
    with_labels: bool = True,
    report: ProgressCallback | None = None,
) -> Graph:
    """Return a graph by name or path.

    >>> load("digits").num_nodes
    1797

    Args:
        name: a name of `DATASETS` (or an alias, in any case), looked for as <name>.npz in
            `data_dir`, $SILOGRAPH_DATA and ../shared/data, there too as a raw folder of the Open
            Graph Benchmark (`ogbn_arxiv`), then with torch_geometric, which may download; any
            other <name>.npz in those folders; or a path: of an .npz file, of a graph or a table of
            ratings; of a GraphML, GEXF or GML file (see `silograph.graph.read.graph_files`); of a
            list of edges (.txt, .edges, .edgelist, .mtx) beside a table of nodes; of a table
            ratings.csv or ratings.dat; of a folder with nodes.csv and edges.csv, with ratings.csv
            and perhaps trust.csv, or with raw and split (see `silograph.graph.read.ogb`). Tables
            may be .csv, .tsv, .npz or .parquet, and text may be packed by gzip (.csv.gz). Or
            `generated:NAME` or `generated:NAME@SEED`: see `generate`.
        data_dir: folder of the files; also where torch_geometric and `generate` keep their own.
            Otherwise that is $SILOGRAPH_DATA or ~/.cache/silograph.
        scale: of a generated graph; all others have scale 1.
        columns: what a folder of tables calls its columns: `id=key,label=kind`, or a dict such as
            `{"id": "key"}`, see `from_csv`; also attributes of a GraphML, GEXF or GML file; of
            ratings `user=userId,item=movieId`, see `ratings`.
        rating_scale: least and largest rating of a folder of tables of ratings; None is 1 to 5.
        na_values: words or numbers that count as missing in a folder of tables of nodes, or in `x`
            and `y` of an .npz file, besides the usual ones; see `from_csv`.
        repeated_edges: what an edge weighs that a file lists several times, see `from_arrays`;
            None is `mean`.
        time: column of the nodes' times in tables, or key in an .npz file, see `from_csv`.
        with_labels: False leaves the labels of a folder of tables of nodes out, see `from_csv`.
        report: told what is being generated, as by `generate`.

    Raises:
        ConfigError: no graph of that name, naming the nearest; or a scale that it cannot have.
        DataError: a file or folder is absent or cannot be used, or a download failed.
    """
    if isinstance(name, str) and is_generated(name):
        check_columns(name, columns)
        check_rating_scale(name, rating_scale)
        check_na_values(name, na_values)
        check_repeated_edges(name, repeated_edges)
        preset, seed = parse(name)
        return generate(preset, scale=scale, seed=seed, data_dir=data_dir, report=report)
    check_scale(name, scale)
    path = locate(name, data_dir=data_dir)
    if path is not None:
        return _load_path(
            path,
            columns,
            rating_scale,
            na_values,
            repeated_edges,
            time,
            with_labels=with_labels,
        )
    name, folders = os.fspath(name), data_folders(data_dir)
    plain = ALIASES.get(name.lower(), name.lower())
    if plain in DATASETS:
        check_columns(name, columns)
        check_rating_scale(name, rating_scale)
        check_na_values(name, na_values)
        check_repeated_edges(name, repeated_edges)
    if plain == "digits":
        return _digits()
    if plain in LOADERS:
        return load_pyg(plain, cache_folder(data_dir))
    if plain in DATASETS:
        file = f"{plain}.npz" + (f" or {FOLDERS[plain]}/raw" if plain in FOLDERS else "")
        raise DataError(
            f"expected {file} in one of {', '.join(map(str, folders))}, got no such file: "
            f"put it there, or give its folder as data_dir or ${VARIABLE}",
            **mistake("missing-file", file),
        )
    readable = {*EDGE_FORMATS, *RATING_FORMATS, *GRAPH_FILES}
    if ending_of(Path(name)) in readable or Path(name).suffix.lower() in OTHER_FORMATS:
        raise DataError(
            f"expected a file or folder, got {name}: no such file", **mistake("missing-file", name)
        )
    raise unknown("dataset", name, DATASETS | ALIASES)


def locate(
    name: str | os.PathLike[str], *, data_dir: str | os.PathLike[str] | None = None
) -> Path | None:
    """Return the file or folder that `load` reads for a name or path, None for its other ways.

    Raises:
        DataError: a folder to search is absent.
    """
    if not isinstance(name, str | os.PathLike):
        raise DataError(f"expected the name or path of a graph, got {type(name).__name__}")
    folders = data_folders(data_dir)
    if isinstance(name, str) and is_generated(name):
        return None
    if isinstance(name, os.PathLike) or is_path(name):
        return Path(name).expanduser()
    plain = ALIASES.get(name.lower(), name.lower())
    files = [f"{word}.npz" for word in (name, plain) if word]
    files += [FOLDERS[plain]] if plain in FOLDERS else []
    paths = [folder / file for folder in folders for file in files]
    return next((path for path in paths if path.is_file() or (path / "raw").is_dir()), None)


def is_generated(name: str) -> bool:
    """Whether `load` takes a name for that of a generated graph."""
    return name.lower().startswith(PREFIX)


def check_scale(name: object, scale: float) -> None:
    """Raise `ConfigError` for a scale other than 1 of a graph that is not generated."""
    if scale != 1:
        raise ConfigError(
            f"scale: expected 1 with {name}, got {scale}: only generated graphs have another, such "
            f"as {PREFIX}reddit",
            **mistake("unread-option", "scale", str(name)),
        )


def check_columns(name: object, columns: ColumnNames | None) -> None:
    """Raise `ConfigError` for names of columns of what is no folder of tables."""
    if columns is not None:
        raise ConfigError(
            "columns: expected a folder of nodes.csv and edges.csv, or of ratings.csv, got dataset "
            f"{name}: give the folder of tables, or leave columns out",
            **mistake("unread-option", "columns", str(name)),
        )


def check_rating_scale(name: object, rating_scale: object) -> None:
    """Raise `ConfigError` for a scale of ratings of what is no folder of tables of ratings."""
    if rating_scale is not None:
        raise ConfigError(
            f"rating_scale: expected a folder of ratings.csv, got dataset {name}: leave "
            "rating_scale out",
            **mistake("unread-option", "rating_scale", str(name)),
        )


def check_na_values(name: object, na_values: object) -> None:
    """Raise `ConfigError` for missing values of what is no table of nodes."""
    if na_values is not None:
        raise ConfigError(
            "na_values: expected a folder of nodes.csv and edges.csv or an .npz file, got dataset "
            f"{name}: leave na_values out",
            **mistake("unread-option", "na_values", str(name)),
        )


def check_repeated_edges(name: object, repeated_edges: object) -> None:
    """Raise `ConfigError` for a rule for repeated edges of what is no list of edges."""
    if repeated_edges is not None:
        raise ConfigError(
            f"repeated_edges: expected a file or folder of a graph, got dataset {name}: leave "
            "repeated_edges out",
            **mistake("unread-option", "repeated_edges", str(name)),
        )


def is_path(name: str) -> bool:
    """Whether `load` takes a name for a path."""
    if is_generated(name):
        return False
    separators = [os.sep, os.altsep or os.sep]
    if name.lower().endswith((".npz", ".csv")) or any(mark in name for mark in separators):
        return True
    # A folder that happens to be called cora must not hide the dataset.
    names = DATASETS.keys() | ALIASES.keys()
    return bool(name) and name.lower() not in names and Path(name).exists()


def _load_path(
    path: Path,
    columns: ColumnNames | None,
    rating_scale: tuple[float, float] | None,
    na_values: NaValues | None,
    repeated_edges: RepeatedEdges | None,
    time: str | None,
    *,
    with_labels: bool,
) -> Graph:
    if not path.exists():
        raise DataError(
            f"expected a file or folder, got {path}: no such file", **mistake("missing-file", path)
        )
    if is_shards(path):
        raise DataError(
            f"expected one graph, got {path}, which holds shards: only silograph run reads them; "
            "give the data that they were written from",
            **mistake("wrong-format", path),
        )
    if is_silo(path) or is_silos(path):
        raise DataError(
            f"expected one graph, got {path}, which holds silos' own data: use sg.read_silo or "
            "sg.read_silos, or run the folder of all silos",
            **mistake("wrong-format", path),
        )
    tables = tables_of(path)
    if not tables and not with_labels and (nodes := _first_table(path, "nodes", FORMATS)):
        tables = {"nodes": nodes}  # new nodes, which nothing joins yet
    if "ratings" in tables:
        check_na_values(path, na_values)
        check_repeated_edges(path, repeated_edges)
        column_names: dict[str, Any] = (
            {} if columns is None else parse_columns(columns, RATING_COLUMNS)
        )
        table, folder = tables["ratings"], path.resolve()
        scale, trust = rating_scale or SCALE, tables.get("trust")
        name = stem_of(folder) if path.is_file() else folder.name
        return ratings(table, trust=trust, scale=scale, columns=column_names, name=name)
    is_graph_file = path.is_file() and ending_of(path) in GRAPH_FILES
    options: dict[str, Any] = {
        "repeated_edges": repeated_edges or "mean",
        "time": time,
        "na_values": na_values or (),
    }
    if tables or is_graph_file:
        check_rating_scale(path, rating_scale)
        valid_names = GRAPH_COLUMNS if is_graph_file else COLUMNS
        table_columns: dict[str, Any] = (
            {} if columns is None else parse_columns(columns, valid_names)
        )
        options["with_labels"] = with_labels
        if is_graph_file:
            return load_graph_file(path, columns=table_columns, **options)
        name = stem_of(path) if path.is_file() else path.resolve().name
        if "nodes" not in tables:
            if not with_labels:
                return graph_of_edges(path, table_columns, repeated_edges or "mean")
            raise DataError(
                f"{path}: expected labels of nodes for a list of edges, got none: put nodes.csv "
                f"with columns id and label into {path.parent}"
            )
        files: dict[str, Any] = {"edges": None, **tables}
        return from_csv(**files, **table_columns, **options, name=name)
    _check_readable(path)
    check_columns(path, columns)
    check_rating_scale(path, rating_scale)
    if path.is_dir():
        check_na_values(path, na_values)
        return load_ogb(path, options["repeated_edges"])
    options["time"] = time if with_labels else None  # nodes to predict on need none
    return load_npz(path, **options)


def _check_readable(path: Path) -> None:
    """Raise `DataError` for a folder without tables, and for a table without its folder."""
    if path.is_dir() and not is_ogb(path):
        raise DataError(
            "expected a folder with nodes.csv and edges.csv, with ratings.csv (or .csv.gz, .tsv, "
            f".npz or .parquet), or one of the Open Graph Benchmark with raw and split, got {path}"
            f"{_tables_in(path)}",
            **mistake("wrong-format", path),
        )
    if path.is_file() and path.suffix.lower() != ".npz" and ending_of(path) in FORMATS:
        remedy = f"give its folder, {path.parent}"
        if stem_of(path).lower() not in ("nodes", "edges", "ratings", "trust"):
            remedy = (
                "give the folder of nodes.csv and edges.csv, or of ratings.csv, or use "
                "sg.from_csv(nodes=..., edges=...) or sg.ratings(...)"
            )
        raise DataError(
            f"expected an .npz file or a folder, got {path}: {remedy}",
            **mistake("wrong-format", path),
        )
    what = other_format(path)
    if what is not None and path.is_file():
        raise DataError(
            f"expected an .npz file or a folder, got {path}, {what}",
            **mistake("wrong-format", path),
        )


def _tables_in(folder: Path) -> str:
    """Describe other tables of a folder that the user may mean, and their use, for an error."""
    names = sorted(file.name for file in folder.iterdir() if file.is_file())
    tables = [name for name in names if ending_of(Path(name)) in FORMATS]
    if tables:
        return (
            f", which has {', '.join(tables[:SHOWN])}: rename them, or use sg.from_csv(nodes=..., "
            "edges=..., id=..., label=...) or sg.ratings(...)"
        )
    other = next((name for name in names if other_format(folder / name)), None)
    return "" if other is None else f", which has {other}, {other_format(folder / other)}"


def tables_of(path: Path) -> dict[str, Path]:
    """Return the tables that a graph is read from; none of other folders and files.

    In a folder the first table counts that is there, in the order of the formats. A file may be a
    table of ratings, which then has no trust, or a list of edges, whose nodes are in a table beside
    it.
    """
    if path.is_file():
        if ending_of(path) in EDGE_LISTS:
            nodes = _first_table(path.parent, "nodes", FORMATS)
            return {"edges": path} | ({} if nodes is None else {"nodes": nodes})
        has_ratings = ending_of(path) in RATING_FORMATS and (
            stem_of(path).lower() == "ratings" or ending_of(path) not in FORMATS
        )
        return {"ratings": path} if is_rating_table(path) or has_ratings else {}
    graph = {
        "nodes": _first_table(path, "nodes", FORMATS),
        "edges": _first_table(path, "edges", EDGE_FORMATS),
    }
    ratings = {name: _first_table(path, name, RATING_FORMATS) for name in RATINGS}
    tables = ratings if None in graph.values() else graph
    files = {name: file for name, file in tables.items() if file is not None}
    return {} if list(files) == ["trust"] else files


def _first_table(path: Path, name: str, formats: Sequence[str]) -> Path | None:
    files = (path / f"{name}{ending}" for ending in formats)
    return next((file for file in files if file.is_file()), None)


def _digits() -> Graph:
    """Return the digits of scikit-learn, every image joined to its 8 nearest ones."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = digits.data.astype(np.float64)  # 0..16: the squared distances are exact
    square = (pixels**2).sum(axis=1)
    distance = square[:, None] + square - 2 * pixels @ pixels.T
    np.fill_diagonal(distance, np.inf)
    # A stable order breaks ties by row, so that every machine builds the same graph.
    neighbors = np.argsort(distance, axis=1, kind="stable")[:, :8]
    return from_arrays(
        edge_index=np.stack([np.repeat(np.arange(len(neighbors)), 8), neighbors.ravel()]),
        x=pixels / 16,
        y=digits.target,
        class_names=[str(digit) for digit in digits.target_names],
        name="digits",
    )


# --- Where the data of a run are: found by one call, read by another -----------------------------


Data = Graph | Silos


@dataclass(frozen=True)
class Source:
    """The place of data.

    Attributes:
        kind: `memory`, a `name` of a dataset, the `path` of a graph, `silos`, a folder of them, or
            `shards`, a folder of these.
        dataset: the name or path that the user gave.
        path: from the root on, None where data are made or downloaded.
        data_dir: the folder that was searched.
        columns: the names of columns in a folder of tables, as for `load`.
        rating_scale: of a folder of tables of ratings, as `load` takes it.
        na_values: of a folder of tables or an .npz file, as one text.
        repeated_edges: the rule for edges that are listed several times, as for `load`.
        time: column of the nodes' times, as for `load`.
    """

    kind: Literal["memory", "name", "path", "silos", "shards"]
    dataset: str
    path: str | None = None
    data_dir: str | None = None
    columns: str | None = None
    rating_scale: str | None = None
    na_values: str | None = None
    repeated_edges: RepeatedEdges | None = None
    time: str | None = None

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
            if self.repeated_edges is not None:
                raise ConfigError(
                    "repeated_edges: expected it in the silo.toml of each silo, got one for all of "
                    f"{self.dataset}: write repeated_edges = {self.repeated_edges!r} there"
                )
            return read_silos(Path(self.dataset).expanduser())
        data_dir = self.path if self.kind == "name" else None
        return load(
            data_dir or self.dataset,
            data_dir=self.data_dir,
            scale=scale,
            columns=self.columns,
            rating_scale=ends_of(self.rating_scale),
            na_values=self.na_values,
            repeated_edges=self.repeated_edges,
            time=self.time,
            with_labels=with_labels,
            report=report,
        )

    def has_ratings(self) -> bool:
        """Whether the data are ratings of users and items; no table or array is read for it.

        False for data that cannot be read; `read` raises the error.
        """
        if self.path is None:
            return False
        path = Path(self.path)
        if self.kind == "silos":
            return silos_have_ratings(path)
        if self.kind == "shards":
            return shards_have_ratings(path)
        return "ratings" in tables_of(path) or archive_has_ratings(path)

    def to_dict(self) -> dict[str, str | None] | None:
        """Return the fields as plain values, paths absolute; None for data in memory."""
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
    repeated_edges: RepeatedEdges | None = None,
    time: str | None = None,
    data: Data | None = None,
) -> Source:
    """Return where data are; nothing is read.

    Args:
        dataset: a name, or a path.
        data_dir: folder that is looked into first.
        columns: of a folder of tables.
        rating_scale: of a folder of tables of ratings.
        na_values: of a folder of tables or an .npz file, as one text.
        repeated_edges: the rule for edges that are listed several times.
        time: column of the nodes' times.
        data: what is in memory already.

    Raises:
        DataError: a folder to search is absent.
    """
    if data is not None:
        return Source("memory", dataset)
    path, file, folder = locate(dataset, data_dir=data_dir), None, None
    kind: Literal["name", "path", "silos", "shards"] = "path" if is_path(dataset) else "name"
    if path is not None:
        file = str(path.absolute())
        if kind == "path":
            kind = "shards" if is_shards(path) else "silos" if is_silos(path) else kind
    elif data_dir or os.environ.get("SILOGRAPH_DATA"):
        folder = absolute_path(data_dir or os.environ["SILOGRAPH_DATA"])
    return Source(
        kind,
        dataset,
        path=file,
        data_dir=folder,
        columns=columns,
        rating_scale=rating_scale,
        na_values=na_values,
        repeated_edges=repeated_edges,
        time=time,
    )


def has_ratings(data: Data) -> bool:
    """Whether data in memory are ratings of users and items."""
    graph = data.members[0].graph if isinstance(data, Silos) else data
    return graph.task == "rating"


def source_of(config: RunConfig, *, data: Data | None = None) -> Source:
    """Return the place of a config's data, with its settings for reading them."""
    return find_source(
        config.dataset,
        data_dir=config.data_dir,
        columns=config.columns,
        rating_scale=config.rating_scale,
        na_values=config.na_values,
        repeated_edges=config.repeated_edges,
        time=time_column(config.split),
        data=data,
    )


def absolute_path(path: str) -> str:
    """Return the path from the root on; `~` is the user's home, as in `load`."""
    return os.path.abspath(os.path.expanduser(path))


# --- The loaders of torch_geometric, which download what is not there -----------------------------
# n: nodes. F: features a node.


# Class of torch_geometric.datasets and the name it knows the graph by, where it has several.
LOADERS = {
    "amazon_computers": ("Amazon", "Computers"),
    "amazon_photo": ("Amazon", "Photo"),
    "amazon_products": ("AmazonProducts", None),
    "citeseer": ("Planetoid", "CiteSeer"),
    "coauthor_cs": ("Coauthor", "CS"),
    "coauthor_physics": ("Coauthor", "Physics"),
    "cora": ("Planetoid", "Cora"),
    "pubmed": ("Planetoid", "PubMed"),
    "reddit2": ("Reddit2", None),
    "yelp": ("Yelp", None),
}


def load_pyg(name: str, root: Path) -> Graph:
    """Return a graph of `LOADERS` by name; its files are kept in a folder below `root`.

    A download is made aside and moved when it is whole; a folder that cannot be read is left as it
    was found.

    Raises:
        DataError: the download failed, or the files are damaged.
    """
    kind, known_as = LOADERS[name]
    folder = root / (known_as or kind)
    try:
        if not any(folder.glob("raw/*")):
            _download(name, folder)
        with _left_as_found(folder):
            return _graph(name, _data(name, root))
    except DataError as error:
        raise reword_error(error, f"{folder / 'raw'}: {error}", DataError) from None
    except Exception as error:  # whatever network, disk or a damaged file may raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise DataError(
            f"expected to read or download {name} into {folder / 'raw'}, got {reason}: put "
            f"{name}.npz into a folder and give it as data_dir or $SILOGRAPH_DATA"
        ) from error


def _data(name: str, root: Path) -> Any:
    """Return the `torch_geometric.data.Data` of a graph."""
    from torch_geometric import datasets

    kind, known_as = LOADERS[name]
    loader = _checked(getattr(datasets, kind))
    for processed_file in sorted((root / (known_as or kind) / "processed").glob("*.pt")):
        check_kept(processed_file)
    if known_as is None:  # such a loader takes the whole of `root` for its own
        return loader(root=str(root / kind))[0]
    return loader(root=str(root), name=known_as)[0]


def _checked(loader: type[Any]) -> Callable[..., Any]:
    """Return a loader that looks at raw files before it reads them."""

    def process(self: Any) -> None:
        for path in sorted(Path(self.raw_dir).glob("ind.*")):  # of Planetoid
            if not path.name.endswith(".test.index"):  # which is text
                check_arrays(path)
        loader.process(self)

    return type(loader.__name__, (loader,), {"process": process})


def _graph(name: str, data: Any) -> Graph:
    if LOADERS[name][1] is None:
        return from_pyg(data, name=name)
    # The words are mostly absent; held sparse, as in the .npz files.
    data.x = CSR.from_scipy(sp.csr_matrix(data.x.numpy()))
    graph = from_pyg(data, name=name)
    return _without_labels(graph) if name == "citeseer" else graph


def _without_labels(graph: Graph) -> Graph:
    """Mark the nodes without words: the source has no label for them, the loader writes 0."""
    assert isinstance(graph.x, CSR)  # made so above
    return replace(graph, y=torch.where(graph.x.degree == 0, MISSING, graph.y))


def _download(name: str, folder: Path) -> None:
    """Have the loader fill `folder`; two processes that do so at once do not meet."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder.parent) as aside:
        _data(name, Path(aside))
        with suppress(OSError):  # not empty: another process was first
            for empty in (folder / "raw", folder):
                empty.rmdir()
        with suppress(OSError):
            (Path(aside) / folder.name).rename(folder)


@contextmanager
def _left_as_found(folder: Path) -> Iterator[None]:
    """Take away what a block writes into `folder` where it raises: it would pass for whole."""
    before = set(folder.rglob("*"))
    try:
        yield
    except BaseException:
        for path in set(folder.rglob("*")) - before:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(True)
        raise
