"""Predictions of a model that a run has left, as a table of the nodes of a graph or a silo."""

import io
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from silograph.core.errors import ConfigError, DataError, mistake, unknown
from silograph.core.files import check_new_file, to_text, write_atomic
from silograph.core.numeric_state import standard_numerics
from silograph.experiment.result_files import (
    ABOUT,
    CLIENT_STATISTICS,
    MODEL,
    MODELS,
    check_written,
    file_of,
    names_of_clients,
    read_json,
)
from silograph.experiment.run.trained_model import TrainedModel, load_model, read_client_statistics
from silograph.graph.column_statistics import ColumnStatistics
from silograph.graph.datasets import check_columns, check_na_values, find_source
from silograph.graph.graph import Graph
from silograph.graph.read.tables import RepeatedEdges, pyarrow
from silograph.graph.silos.data import Silo, Silos
from silograph.graph.silos.prepare import EDGES_FOR, NO_LABELS, PREPARED, prepare
from silograph.graph.silos.read import SPEC, is_silo, read_silo, read_spec
from silograph.nn.own_module import Make
from silograph.task.registry import task_of

LOG = logging.getLogger("silograph")


@standard_numerics()
def predict_to(
    run: str | os.PathLike[str],
    data: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    model: Make | None = None,
    data_dir: str | None = None,
    columns: str | None = None,
    na_values: str | None = None,
    client: str | None = None,
) -> int:
    """Write a table with a row for each node and return their number.

    It is Parquet where the file's name ends so, with all digits of probabilities; else CSV.

    Args:
        run: result folder of a run, of a silo, or a model's file.
        data: folder of a silo, or name or path of a graph.
        out: the file, which must not be there; only its owner may read it.
        model: the class of the model, if it was a torch.nn.Module of yours.
        data_dir: folder of data sets that `data` names.
        columns: of a folder of tables, as `load` takes it.
        na_values: words or numbers with commas that count as missing in a graph's tables.
        client: whose statistics or own model are used, where clients differ in that; None: the
            silo's whose folder `data` is.

    Raises:
        ConfigError: `out` is there already, or its folder is not; or `data` are several silos; or
            there is no such client.
        DataError: there is no model, or it is not one for these data, or they are of another cut.
    """
    check_new_file(Path(out))
    folder = Path(run)
    own = has_own_models(folder)
    model_files = _models_in(folder / MODELS) if own else [model_file(folder)]
    if not model_files:
        raise DataError(
            f"expected models of clients in {folder / MODELS}, got none: train again",
            **mistake("missing-file", folder / MODELS),
        )
    trained = load_model(model_files[0], model=model)
    trained.check_says_all()  # before data are read: of ratings they have a scale
    by_client = own or trained.preprocessing.needs_client
    if client is not None and not by_client:
        raise ConfigError(
            f"expected no client for a model that all clients use alike, got {client!r}: leave "
            "--client out",
            **mistake("unread-option", "client", str(run)),
        )
    if own and client is not None and client not in (client_names := names_of_clients(folder)):
        raise unknown("client", client, client_names)
    rules = trained.preprocessing
    graph_or_silo = read_data(
        data,
        data_dir,
        columns,
        na_values,
        repeated_edges=rules.repeated_edges,
        time=rules.time,
        with_labels=False,
    )
    # Labels play no part in a prediction, and some nodes may have labels of some classes only.
    names = {*trained.class_names}
    if isinstance(graph_or_silo, Graph) and names.issuperset(graph_or_silo.class_names):
        graph_or_silo = replace(graph_or_silo, class_names=())
    if by_client and client is None and isinstance(graph_or_silo, Silo):
        _check_same_cut(folder if own or folder.is_dir() else folder.parent, Path(data))
        client = graph_or_silo.name
    if own:
        trained = load_model(model_file(folder, client), model=model)
    elif by_client:
        statistics = _statistics_of(folder, client, trained.shape.features)
        trained = trained.for_client(statistics)
    header, *rows = table(trained, graph_or_silo)
    if Path(out).suffix == ".parquet":
        arrow, parquet = pyarrow(Path(out))
        values = {str(name): [row[i] for row in rows] for i, name in enumerate(header)}
        buffer = io.BytesIO()
        parquet.write_table(arrow.table(values), buffer)
        write_atomic(Path(out), buffer.getvalue(), private=True)
    else:
        # Six digits of probabilities, which are the last columns, where there are any.
        has_probabilities = task_of(trained.shape.task).classes
        first = len(header) - (trained.shape.outputs if has_probabilities else 0)
        texts = [[*row[:first], *(f"{p:.6g}" for p in row[first:])] for row in rows]
        write_atomic(Path(out), to_text([header, *texts]), private=True)
    return len(rows)


def predict_tables_to(
    run: str | os.PathLike[str],
    tables: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    like: str | os.PathLike[str] | None = None,
    model: Make | None = None,
    client: str | None = None,
) -> int:
    """Prepare raw tables as a silo's were, and write predictions for their nodes; see `predict_to`.

    Args:
        run: result folder of a silo or a run, or a model's file in one.
        tables: folder of the raw tables.
        out: the file, which must not be there.
        like: folder that `silograph prepare` made, whose schema and fitted values count; None:
            those that the silo has saved beside its model.
        model: as for `predict_to`.
        client: as for `predict_to`.

    Raises:
        ConfigError: as `predict_to`.
        DataError: as `predict_to`; or it is not known how the silo's tables were prepared, or the
            tables cannot be read.
    """
    check_new_file(Path(out))
    folder = Path(run) if Path(run).is_dir() else Path(run).parent
    if like is None:
        if not (folder / PREPARED).is_file():
            raise DataError(
                f"expected {PREPARED} in {folder}, by which tables are prepared as those of the "
                "silo were, got none: give the folder that silograph prepare made by --like, or a "
                "prepared folder by --data in place of --tables",
                **mistake("missing-file", folder / PREPARED),
            )
        check_written(folder, [PREPARED])
    with tempfile.TemporaryDirectory(prefix="silograph-") as made:
        for silo in prepare(tables, like=folder if like is None else like, out=Path(made) / "silo"):
            for note in silo.notes:
                # Nodes to be predicted need no labels, and nobody waits for lists of their edges.
                if note != NO_LABELS and EDGES_FOR not in note:
                    LOG.warning("%s: %s", silo.name, note)
        return predict_to(run, Path(made) / "silo", out, model=model, client=client)


def _statistics_of(run: Path, client: str | None, features: int) -> ColumnStatistics:
    """Return by what the data of a client are standardized, of a run where each has its own.

    Args:
        run: the result folder, or the file of the model in it.
        client: the client; None: not named.
        features: F of the model.

    Raises:
        ConfigError: no client was named, or there is none of that name.
        DataError: the folder does not have the statistics.
    """
    folder = run if run.is_dir() else run.parent
    path = folder / CLIENT_STATISTICS
    if not path.is_file():
        raise DataError(
            f"the model in {run} was trained with normalize standard_client, and its clients' "
            "statistics are not there: silos keep their own, so predict at a silo with the result "
            "that it has kept, or train with normalize standard",
            **mistake("missing-file", path),
        )
    check_written(folder, [CLIENT_STATISTICS])
    if client is None:
        client_names = names_of_clients(folder)
        raise ConfigError(
            f"the model in {run} was trained with normalize standard_client, where each client "
            f"has its own means and deviations: choose one by --client, of {_some(client_names)}",
            **mistake("missing-option", "client"),
        )
    return read_client_statistics(path, client, features)


def read_data(
    data: str | os.PathLike[str],
    data_dir: str | None = None,
    columns: str | None = None,
    na_values: str | None = None,
    *,
    repeated_edges: RepeatedEdges | None = None,
    time: str | None = None,
    with_labels: bool = True,
) -> Graph | Silo:
    """Return a silo from its folder, or a graph by name or path.

    Args:
        data: folder, name or path.
        data_dir: folder of data sets that `data` names.
        columns: of tables, as `load` takes it.
        na_values: as `load` takes it.
        repeated_edges: as `load` takes it; a silo has its own.
        time: column of times in tables, as `load` takes it.
        with_labels: whether labels in tables of nodes are read.

    Raises:
        ConfigError: the folder of several silos, or options that the data cannot have.
        DataError: the data cannot be read.
    """
    if is_silo(Path(data)):
        check_columns(data, columns)
        check_na_values(data, na_values)
        return read_silo(data)
    source = find_source(
        os.fspath(data),
        data_dir=data_dir,
        columns=columns,
        na_values=na_values,
        repeated_edges=repeated_edges,
        time=time,
    )
    contents = source.read(scale=1.0, with_labels=with_labels)
    if isinstance(contents, Silos):
        raise ConfigError(
            f"expected the folder of one silo, got {os.fspath(data)}, which holds "
            f"{_some(contents.ids)}: name one of their folders",
            **mistake("wrong-format", data),
        )
    return contents


def _check_same_cut(run: Path, silo: Path) -> None:
    """Raise `DataError` for the folder of a client that has other nodes than its namesake had.

    Nothing is known of folders that no cut was written to. Where the silos came with the data,
    their names are those of the data, and nodes are numbered in the silos' order.
    """
    silo_hash = read_spec(silo / SPEC).partition_hash
    about = read_json(run / ABOUT) if (run / ABOUT).is_file() else {}
    run_hash, config = about.get("partition_hash"), about.get("config")
    if not isinstance(config, dict) or config.get("partition") == "silo":
        return
    if silo_hash is not None and silo_hash != run_hash:
        raise DataError(
            f"expected a client's folder of the cut of {run} (hash {run_hash}), got {silo}, of "
            f"another one ({silo_hash}): write it by silograph export-silos with the dataset, "
            "partition, clients and seed of the run",
            **mistake("model-mismatch", "partition", run_hash, silo_hash),
        )


def _models_in(folder: Path) -> list[Path]:
    """Return the models' files in a folder; a file of the system is no model."""
    return sorted(folder.glob(f"*{Path(MODEL).suffix}"))


def _some(names: Sequence[str]) -> str:
    """Return the first of many names, for a message, and how many there are.

    >>> _some(["north", "south"]), _some(["a", "b", "c", "d"])
    ('north, south', 'a, b, c, ... (4)')
    """
    return ", ".join(names[:3]) + (f", ... ({len(names)})" if len(names) > 3 else "")


def has_own_models(run: Path) -> bool:
    """Return whether each client of a result folder has a model, and there is none of all."""
    return (run / MODELS).is_dir() and not (run / MODEL).exists()


def model_file(run: Path, silo: str | None = None) -> Path:
    """Return the model's file of a result folder: that of all, or the silo's own.

    Raises:
        DataError: there is none.
    """
    if not run.is_dir():
        return run
    if (run / MODEL).exists():
        return run / MODEL
    if not has_own_models(run):
        if own := _models_in(run):
            raise DataError(
                f"expected a result folder or a model's file, got {run}, a folder of models: give "
                f"one of its files, such as {own[0]}",
                **mistake("wrong-format", run),
            )
        raise DataError(
            f"expected a model in {run}, got none: the run is not over, its server keeps the "
            "model, or its method has no whole one, as fedper",
            **mistake("missing-file", run / MODEL),
        )
    client_names = names_of_clients(run)
    if silo not in client_names:
        raise DataError(
            f"expected the folder of a client, for each has a model of its own, got "
            f"{'a graph' if silo is None else silo}: write clients' folders by silograph "
            f"export-silos, and give that of one of {_some(client_names)}, or add --client NAME, "
            f"or give a model's file, such as {run / MODELS / file_of(0, client_names[0])}, in "
            f"place of {run}",
            **mistake("missing-option", "client"),
        )
    return run / MODELS / file_of(client_names.index(silo), silo)


def table(model: TrainedModel, data: Graph | Silo) -> Iterator[list[object]]:
    """Yield the header and a row for each node.

    A row has the node's key, what the threshold of the model decides, if it has one, the most
    likely class or bits, and probabilities.
    """
    decided, likely = model.predict(data), model.probabilities(data)
    names = model.class_names or [str(k) for k in range(model.shape.outputs)]
    has_several_columns = decided.ndim == 2
    prediction_columns = (
        [f"predicted_{name}" for name in names] if has_several_columns else ["predicted"]
    )
    probability_columns = [] if likely is None else [f"p_{name}" for name in names]
    one_of = model.shape.task == "multiclass"
    decisions: Sequence[object] | None = None
    if model.threshold is not None and likely is not None:
        is_positive = model.threshold.decide(likely).astype(int)
        values_by_decision: Sequence[object] = (0, 1)
        if one_of:
            positive = model.threshold.positive
            values_by_decision = (names[1 - positive], names[positive])
        decisions = [values_by_decision[value] for value in is_positive]
    decision_column = [] if decisions is None else ["decision"]
    yield ["id", *decision_column, *prediction_columns, *probability_columns]
    for row, key in enumerate(data.node_id.tolist()):
        values = decided[row].tolist()
        cells = values if has_several_columns else [names[values] if one_of else values]
        if decisions is not None:
            cells = [decisions[row], *cells]
        yield [key, *cells, *([] if likely is None else likely[row].tolist())]
