"""Graphs by the loaders of torch_geometric, which download what is not there.

n: nodes. F: features a node.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import scipy.sparse as sp
import torch

from silograph.core.errors import DataError
from silograph.graph.csr import CSR
from silograph.graph.graph import MISSING, Graph
from silograph.graph.read.checked_pickle import check_arrays, check_kept
from silograph.graph.read.in_memory import from_pyg

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
        raise DataError(f"{folder / 'raw'}: {error}") from None
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
