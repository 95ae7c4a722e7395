"""A cut graph written as one folder a silo, as if each had made its own.

Reading the folders gives the blocks of the cut: rows stand in their order, and cross-silo edges
are listed so that halo slots come out in theirs.
"""

import csv
import io
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from silograph.core.errors import ConfigError, DataError, mistake
from silograph.core.files import opens_private
from silograph.core.numeric_state import standard_numerics
from silograph.core.run_file import toml_value
from silograph.graph.block.block import connect
from silograph.graph.csr import CSR
from silograph.graph.graph import MISSING, Graph, Split, pairs_among, with_directions
from silograph.graph.partition.partition import Partition
from silograph.graph.partition.split import TIME
from silograph.graph.read.arrays import PARTS
from silograph.graph.read.ratings import SCALE
from silograph.graph.read.tables import pyarrow
from silograph.graph.silos.data import DIRECTIONS
from silograph.graph.silos.read import (
    CROSS,
    EDGES,
    FEATURES,
    FEDERATION,
    NODES,
    RATINGS,
    SECRET,
    SPEC,
    TRUST,
)

Columns = Mapping[str, np.ndarray]
WRITTEN = ("csv", "npz", "parquet")  # formats of tables
PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


@standard_numerics()
def write_silos(
    path: str | os.PathLike[str],
    graph: Graph,
    partition: Partition,
    split: Split,
    *,
    format: str = "csv",
    secret: bytes | None = None,
    directed: bool = False,
    cross_edges: bool = True,
) -> tuple[Path, ...]:
    """Write one folder for each client of a cut; see `silograph.graph.silos.read` for the format.

    Only their owner may read them: they hold features, labels and keys.

    Args:
        path: folder to make; an empty one may be there. It is there whole or not at all.
        graph: the uncut graph.
        partition: who holds which of its nodes; no two clients the same one.
        split: what the nodes are for.
        format: of the tables: csv, npz or parquet.
        secret: what silos share and the server does not know, written into every folder.
        directed: whether edges are written with their directions.
        cross_edges: whether silos know their edges to nodes of other silos. Differential privacy
            needs folders without.

    Returns:
        The silos' folders, in the order of `partition.ids`.

    Raises:
        ConfigError: the format is not known, or there is something at `path`.
        DataError: two clients hold the same node, or the format cannot hold a key or name; or
            `directed`, and every edge goes both ways.
    """
    graph = with_directions(graph) if directed else replace(graph, directed_weight=None)
    target = Path(path)
    check_target(target, format)
    folders = _folders(partition.ids)
    whole = Path(os.path.abspath(target))
    making = whole.with_name(f".{whole.name}.{os.getpid()}")
    try:
        making.mkdir(mode=0o700, parents=True)
        try:
            for name, columns in zip(folders, _tables(graph, partition, split), strict=True):
                (making / name).mkdir(mode=0o700)
                if CROSS in columns and not cross_edges:
                    columns[CROSS] = {n: values[:0] for n, values in columns[CROSS].items()}
                write_tables(making / name, columns, format, graph.feature_names)
            for name, silo in zip(folders, partition.ids, strict=True):
                cut = f"partition_hash = {toml_value(partition.hash)}\n"
                write_text(making / name / SPEC, _spec(graph, silo) + cut + _column_names(graph))
                if secret is not None:
                    with open(making / name / SECRET, "xb", opener=opens_private) as file:
                        file.write(secret)
            folder_list = ", ".join(toml_value(name) for name in folders)
            write_text(
                making / FEDERATION, f"name = {toml_value(graph.name)}\nsilos = [{folder_list}]\n"
            )
            making.rename(whole)
        except BaseException:
            shutil.rmtree(making, ignore_errors=True)
            raise
    except OSError as error:
        raise ConfigError(
            f"expected to make the folder {target}, got: {error.strerror}",
            **mistake("unwritable-path", target),
        ) from None
    return tuple(target / name for name in folders)


def check_target(target: Path, format: str) -> None:
    """Raise `ConfigError` unless folders of silos can be written there in this format."""
    if format not in WRITTEN:
        raise ConfigError(
            f"expected format csv, npz or parquet, got {format!r}",
            **mistake("option-value", "format", format),
        )
    if target.is_dir() and not any(target.iterdir()):
        return
    if os.path.lexists(target):
        raise ConfigError(
            f"expected a folder that is empty or does not exist yet, got {target}: choose another "
            "--out, nothing was overwritten",
            **mistake("existing-output", target),
        )


def _folders(ids: tuple[str, ...]) -> list[str]:
    """Return names of folders: the silos' own where all can be, else silo_00, silo_01, ..."""
    plain = all(PLAIN.fullmatch(name) for name in ids)
    if plain and len({name.lower() for name in ids}) == len(ids) and FEDERATION not in ids:
        return list(ids)
    width = max(2, len(str(len(ids) - 1)))
    return [f"silo_{number:0{width}d}" for number in range(len(ids))]


def _spec(graph: Graph, name: str) -> str:
    """Return the text of a silo.toml."""
    if graph.task == "rating":
        low, high = graph.scale or SCALE
        return f'name = {toml_value(name)}\ntask = "rating"\nscale = [{low!r}, {high!r}]\n'
    names = ", ".join(toml_value(label) for label in graph.class_names)
    integer = np.issubdtype(graph.node_id.dtype, np.integer)
    return (
        f"name = {toml_value(name)}\n"
        f"task = {toml_value(graph.task)}\n"
        f"classes = {f'[{names}]' if names else graph.num_classes}\n"
        f"features = {graph.num_features}\n"
        f"sparse = {toml_value(isinstance(graph.x, CSR))}\n"
        f"keys = {toml_value('integer' if integer else 'text')}\n"
        + "directed = true\n"
        * graph.is_directed
    )


def _times(graph: Graph) -> dict[str, Tensor]:
    """Return the times of nodes (n,) by the name of their column; nothing where there are none."""
    return {name: c for name, c in graph.columns.items() if c.is_floating_point()}


def _column_names(graph: Graph) -> str:
    """Return the end of a silo.toml, which names the column of times."""
    names = [] if graph.task == "rating" else [name for name in _times(graph) if name != TIME]
    return "".join(f"\n[columns]\n{TIME} = {toml_value(name)}\n" for name in names)


def _tables(graph: Graph, partition: Partition, split: Split) -> Iterator[dict[str, Columns]]:
    """Yield the columns of every silo's tables."""
    if graph.task == "rating":
        yield from _rating_tables(graph, partition, split)
        return
    if graph.has_numbers:
        raise DataError(
            "expected classes or label bits to write as silos' folders, got numbers to predict: a "
            "regression runs in simulation only"
        )
    nodes, client_of_row, names = (
        partition.copies,
        partition.client_of_node,
        np.array(partition.ids),
    )
    if len(torch.unique(nodes)) < len(nodes):
        raise DataError(
            "expected a cut in which no two clients hold the same node, got one with copies "
            f"({partition.method}): both owners of an edge must know of it; cut by metis, louvain, "
            "random, dirichlet, class_biased or silo"
        )
    # Cross-silo edges: the row of the own end, and the row of the other end at its owner.
    adj, halo, route = connect(graph, partition)
    key, remote = graph.node_id[nodes.numpy()], halo.boundary[route.target]
    by_slot = torch.sort(halo.adj.indices.long(), stable=True).indices
    # Internal edges, each in one direction only, or in those that it has.
    once, weight = adj.row < adj.indices.long(), {}
    far_columns: dict[str, np.ndarray] = {}
    if graph.is_directed:
        assert graph.edge_weight is not None  # of both directions, and so are these
        assert adj.values is not None
        assert halo.adj.values is not None
        once = ~adj.values[:, 0].isnan()
        far_values = halo.adj.values[by_slot].flatten()
        way = torch.arange(len(far_values))[~far_values.isnan()]
        by_slot = by_slot[way // 2]
        far_columns["direction"] = np.array(DIRECTIONS)[(way % 2).numpy()]
        if not bool((graph.edge_weight.nan_to_num(1) == 1).all()):
            weight = {"weight": adj.values[once, 0].numpy()}
            far_columns["weight"] = far_values[way].numpy()
    elif adj.values is not None and halo.adj.values is not None:
        weight = {"weight": adj.values[once].numpy()}
        far_columns["weight"] = halo.adj.values[by_slot].numpy()
    row, far = halo.adj.row[by_slot], remote[halo.adj.indices.long()[by_slot]]
    source, target = adj.row[once], adj.indices.long()[once]
    masks = split.map(lambda mask: mask & graph.labeled)
    for client, held_nodes in enumerate(partition.nodes):
        is_internal, is_cross = client_of_row[source] == client, client_of_row[row] == client
        yield {
            NODES: {
                "id": graph.node_id[held_nodes.numpy()],
                **_labels(graph, held_nodes),
                "split": _parts(masks, held_nodes),
                **{name: times[held_nodes].numpy() for name, times in _times(graph).items()},
            },
            **({FEATURES: _features(graph, held_nodes)} if graph.num_features else {}),
            EDGES: {
                "source": key[source[is_internal].numpy()],
                "target": key[target[is_internal].numpy()],
                **{name: values[is_internal] for name, values in weight.items()},
            },
            CROSS: {
                "own": key[row[is_cross].numpy()],
                "silo": names[client_of_row[far[is_cross]].numpy()],
                "remote": key[far[is_cross].numpy()],
                **{name: values[is_cross] for name, values in far_columns.items()},
            },
        }


def _rating_tables(
    graph: Graph, partition: Partition, split: Split
) -> Iterator[dict[str, Columns]]:
    """Yield the columns of every silo's tables of ratings and trust."""
    assert isinstance(graph.x, Tensor)  # the kinds of nodes
    pairs = pairs_among(graph.x, graph.adj)
    name = np.array([key[len("u:") :] for key in graph.node_id.tolist()])
    user = graph.x[:, 0] > 0
    row, column = graph.edge_index
    trusting = user[row] & user[column] & (row < column)
    row, column = row[trusting], column[trusting]
    for nodes in partition.nodes:
        is_member = torch.zeros(graph.num_nodes, dtype=torch.bool)
        is_member[nodes] = True
        is_own = is_member[pairs.row]
        rows, has_both = pairs.row[is_own], is_member[row] & is_member[column]
        yield {
            RATINGS: {
                "user": name[pairs.user[is_own].numpy()],
                "item": name[pairs.item[is_own].numpy()],
                "rating": graph.y[rows].numpy(),
                **({TIME: graph.columns[TIME][rows].numpy()} if TIME in graph.columns else {}),
                "split": _parts(split, rows),
            },
            TRUST: {
                "truster": name[row[has_both].numpy()],
                "trustee": name[column[has_both].numpy()],
            },
        }


def _labels(graph: Graph, nodes: Tensor) -> dict[str, np.ndarray]:
    """Return one column of labels, or one for each label bit."""
    y = graph.y[nodes].numpy()
    if graph.task == "multilabel":
        return {f"label_{bit}": y[:, bit] for bit in range(graph.num_classes)}
    if not graph.class_names:
        return {"label": y}
    return {"label": np.array([*graph.class_names, ""])[y]}  # MISSING is the last


def _parts(split: Split, nodes: Tensor) -> np.ndarray:
    words = np.full(len(nodes), "", dtype="<U5")
    for part in PARTS:
        words[getattr(split, part)[nodes].numpy()] = part
    return words


def _features(graph: Graph, nodes: Tensor) -> dict[str, np.ndarray]:
    """Return the columns of an .npz file of features, and the keys."""
    id = graph.node_id[nodes.numpy()]
    if isinstance(graph.x, Tensor):
        return {"id": id, "x": graph.x[nodes].numpy()}
    x = graph.x.select_rows(nodes)
    assert x.values is not None  # features always carry values
    return {
        "id": id,
        "x_data": x.values.numpy(),
        "x_indices": x.indices.numpy(),
        "x_indptr": x.indptr.numpy(),
        "x_shape": np.array([x.num_rows, x.num_cols]),
    }


def _as_table(features: Columns, names: Sequence[str]) -> Columns:
    """Return features as the columns of a table with keys."""
    id = features["id"]
    if "x" in features:
        plain = "id" in names or any(name != name.strip() for name in names)
        if not names or plain:
            names = [f"f{i}" for i in range(features["x"].shape[1])]
        return {"id": id, **dict(zip(names, features["x"].T, strict=True))}
    row = np.repeat(np.arange(len(id)), np.diff(features["x_indptr"]))
    return {"id": id[row], "feature": features["x_indices"], "value": features["x_data"]}


def write_tables(
    folder: Path, tables: Mapping[str, Columns], format: str, names: Sequence[str]
) -> None:
    """Write the tables of a silo's folder, which only their owner may read.

    Args:
        folder: which exists and holds none of them.
        tables: the columns of each table; those of features are `id` and `x` (n, F), or the parts
            of a CSR matrix.
        format: csv, npz or parquet.
        names: of the features.
    """
    for stem, columns in tables.items():
        file = folder / f"{stem}.{format}"
        if format == "npz":
            stored = dict(columns)
            if stem == FEATURES:
                del stored["id"]
                stored |= {"names": np.array(names)} if names else {}
            with open(file, "xb", opener=opens_private) as handle:
                np.savez(handle, allow_pickle=False, **stored)
            continue
        table = _as_table(columns, names) if stem == FEATURES else columns
        if format == "csv":
            write_text(file, csv_text(table))
        else:
            arrow, parquet = pyarrow(file)
            arrow_table = arrow.table({name: arrow.array(column) for name, column in table.items()})
            with open(file, "xb", opener=opens_private) as handle:
                parquet.write_table(arrow_table, handle)


def csv_text(columns: Columns) -> str:
    """Return the text of a table of columns."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*(_cells(name, column) for name, column in columns.items()), strict=True))
    return text.getvalue()


def _cells(name: str, column: np.ndarray) -> list[str]:
    if name == "weight":
        return [repr(value) for value in column.tolist()]  # as many digits as it takes
    if column.dtype.kind == "f":
        # All digits, since tables are read in float64: with fewer, standardized features differ.
        return [repr(value).removesuffix(".0") for value in column.tolist()]
    cells = [str(value) for value in column.tolist()]
    if name.startswith("label") and column.dtype.kind == "i":
        return ["" if cell == str(MISSING) else cell for cell in cells]
    for cell in cells:
        if cell != cell.strip() or (not cell and name not in ("label", "split")):
            raise DataError(
                f"expected keys and names without spaces at their ends for CSV, got {cell!r}: "
                "use --format npz"
            )
    return cells


def write_text(path: Path, text: str) -> None:
    """Write a new file of text that only its owner may read."""
    with open(path, "x", encoding="utf-8", newline="", opener=opens_private) as file:
        file.write(text)
