"""Laws of splits by a column of times: no test node is older than a training node of its client."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import silograph as sg
from mistakes import raises_code
from runs import same_bits, weights_of
from silograph.core.errors import ConfigError, DataError
from silograph.core.key import Key
from silograph.graph.datasets import load
from silograph.graph.graph import Graph
from silograph.graph.partition.partition import Partition, make_partition
from silograph.graph.partition.split import choose_split, time_column
from silograph.graph.read.arrays import from_arrays
from silograph.graph.read.csv import from_csv
from silograph.graph.silos.data import silo_split
from silograph.graph.silos.export import write_silos
from silograph.graph.silos.read import read_silos

HOW = "time:opened:0.6/0.2/0.2"
KEY = Key.of(0)
N = 40
TIMES = [(7 * row) % 17 for row in range(N)]  # several nodes of one time
DATES = [f"2024-{1 + time // 2:02d}-{1 + 20 * (time % 2):02d}" for time in TIMES]
OPTIONS: dict[str, Any] = {"rounds": 1, "hidden": 2, "clients": 3, "partition": "random"}


def cut(graph: Graph) -> Partition:
    return make_partition(graph, "random", clients=3, key=KEY)


def write(folder: Path, times: list[Any]) -> Path:
    folder.mkdir(exist_ok=True)
    rows = (f"{row},{row % 2},{time},{row / 4}\n" for row, time in enumerate(times))
    (folder / "nodes.csv").write_text("id,label,opened,a\n" + "".join(rows))
    edges = "".join(f"{row},{(row + 1) % N}\n" for row in range(N))
    (folder / "edges.csv").write_text(f"source,target\n{edges}")
    return folder


def assert_in_order(graph: Graph, partition: Partition, shares: tuple[float, ...]) -> None:
    split = choose_split(graph, partition, HOW, KEY)
    time = graph.columns["opened"]
    for nodes in partition.nodes:
        parts = [nodes[mask[nodes]] for mask in vars(split).values()]
        labeled = int(graph.labeled[nodes].sum())
        for part, share in zip(parts, shares, strict=True):
            assert abs(len(part) - share * labeled) <= 1
        for earlier, later in ((0, 1), (1, 2), (0, 2)):
            if len(parts[earlier]) and len(parts[later]):
                assert float(time[parts[earlier]].max()) <= float(time[parts[later]].min())


@given(st.lists(st.floats(-1e9, 1e9), min_size=N, max_size=N))
def test_no_test_node_is_older_than_a_training_node_of_its_client(times: list[float]) -> None:
    ring = [[*range(N)], [*range(1, N), 0]]
    graph = from_arrays(edge_index=ring, y=[row % 2 for row in range(N)])
    object.__setattr__(graph, "columns", {"opened": torch.tensor(times, dtype=torch.float64)})
    assert_in_order(graph, cut(graph), (0.6, 0.2, 0.2))


def test_all_forms_of_times_give_the_same_split(tmp_path: Path) -> None:
    graphs = {
        "numbers": load(write(tmp_path / "numbers", TIMES), time="opened"),
        "dates": load(write(tmp_path / "dates", DATES), time="opened"),
        "times": load(
            write(tmp_path / "times", [f"{date}T09:30:00+02:00" for date in DATES]), time="opened"
        ),
        "csv": from_csv(
            nodes=tmp_path / "dates" / "nodes.csv",
            edges=tmp_path / "dates" / "edges.csv",
            time="opened",
        ),
    }
    x, ring = np.arange(N)[:, None] / 4, [[*range(N)], [*range(1, N), 0]]
    arrays: dict[str, Any] = {"x": x, "edge_index": ring, "y": np.arange(N) % 2}
    for name, opened in {
        "npz": np.array(TIMES),
        "npz dates": np.array(DATES, dtype="datetime64[D]"),
        "npz words": np.array(DATES),
    }.items():
        np.savez(tmp_path / f"{name}.npz", **arrays, opened=opened)
        graphs[name] = load(tmp_path / f"{name}.npz", time="opened")
    expected = choose_split(graphs["numbers"], cut(graphs["numbers"]), HOW, KEY)
    for name, graph in graphs.items():
        assert graph.num_features == 1, name  # times are no feature
        split = choose_split(graph, cut(graph), HOW, KEY)
        for part, mask in vars(split).items():
            assert torch.equal(mask, getattr(expected, part)), name
        assert_in_order(graph, cut(graph), (0.6, 0.2, 0.2))


def test_times_are_features_where_that_is_said(tmp_path: Path) -> None:
    path = write(tmp_path / "a", TIMES)
    columns = {"features": ["a", "opened"]}
    graph = load(path, columns=columns, time="opened")
    assert graph.feature_names == ("a", "opened")
    assert graph.columns["opened"].tolist() == TIMES
    result = sg.run(path, split=HOW, columns="features=a+opened", **OPTIONS)
    assert result.cut is not None
    assert result.cut.graph.feature_names == ("a", "opened")


def test_runs_split_by_the_column(tmp_path: Path) -> None:
    path = write(tmp_path / "a", DATES)
    out = tmp_path / "run"
    result = sg.run(path, split=HOW, out=str(out), **OPTIONS)
    assert result.cut is not None
    graph, split = result.cut.graph, result.cut.split
    assert graph.feature_names == ("a",)
    time = graph.columns["opened"]
    for nodes in result.cut.partition.nodes:
        train, test = (nodes[mask[nodes]] for mask in (split.train, split.test))
        assert float(time[train].max()) <= float(time[test].min())
    # Predictions leave the column out, too, and take tables without it.
    assert sg.load_model(out).preprocessing.time == "opened"
    from silograph.experiment.run.predictions import predict_to

    assert predict_to(out, path, tmp_path / "a.csv") == N
    lines = (path / "nodes.csv").read_text().splitlines()
    cells = [line.split(",") for line in lines]
    (path / "nodes.csv").write_text("".join(f"{c[0]},{c[3]}\n" for c in cells))
    assert predict_to(out, path, tmp_path / "b.csv") == N
    assert (tmp_path / "a.csv").read_text() == (tmp_path / "b.csv").read_text()


def test_comparisons_take_splits_by_time(tmp_path: Path) -> None:
    path = write(tmp_path / "a", TIMES)
    asked: dict[str, Any] = {"methods": ["local", "fedavg"], "seeds": [0, 1], "processes": 0}
    compared = sg.compare(path, split=HOW, **asked, **OPTIONS)
    assert len(compared.rows) >= 2


@pytest.mark.parametrize(
    ("times", "line"),
    [
        (
            [*TIMES[:-2], "", "NA"],
            r"a time in column 'opened' for every .* 2 nodes without",
        ),
        ([*TIMES[:-1], "soon"], r"line 41, column 'opened': expected a finite number, got 'soon'"),
        ([*DATES[:-1], "soon"], r"line 41, .*: expected a date or time such as .*, got 'soon'"),
        ([*DATES[:-1], "11/02/2024"], r"line 41, .* got '11/02/2024': write all times"),
        ([*DATES[:-1], "7"], r"line 41, .* got '7': write all times of the column as numbers, or"),
        ([*TIMES[:-1], "inf"], r"line 41, .*: expected a finite number, got 'inf'"),
    ],
)
def test_times_that_are_none_are_one_line(times: list[Any], line: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a", times)
    with pytest.raises(DataError, match=line) as caught:
        sg.run(path, split=HOW, **OPTIONS)
    assert "\n" not in str(caught.value)


def test_what_has_no_times_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a", TIMES)
    for how, line in (
        ("time:closed:0.6/0.2/0.2", r"nodes\.csv, line 1: expected a column 'closed', got columns"),
        ("time:label:0.6/0.2/0.2", r"expected a column of times that means nothing else, got 'l"),
        ("time:0.6/0.2/0.2", r"expected a column 'time' with times of the nodes of 'a', got none"),
    ):
        with pytest.raises(DataError, match=line):
            sg.run(path, split=how, **OPTIONS)
    with raises_code(DataError, "missing-column", column="opened"):
        sg.run(load(path), split=HOW, **OPTIONS)
    with raises_code(ConfigError, "option-value", option="split", got="most"):
        sg.run(path, split="time:opened:most", **OPTIONS)
    np.savez(tmp_path / "a.npz", edge_index=[[0], [1]], y=[0, 1])
    with raises_code(DataError, "missing-column", column="opened"):
        sg.run(tmp_path / "a.npz", split=HOW, features="degree", **OPTIONS)


def test_unlabeled_nodes_need_no_time(tmp_path: Path) -> None:
    path = write(tmp_path / "a", TIMES)
    text = (path / "nodes.csv").read_text()
    (path / "nodes.csv").write_text(f"{text}90,,,1\n")
    graph = load(path, time="opened")
    assert not choose_split(graph, cut(graph), HOW, KEY).train[-1]


def test_the_column_of_a_split() -> None:
    assert time_column("time:a:b:0.6/0.2/0.2") == "a:b"
    for how in ("time:0.6/0.2/0.2", "0.6/0.2/0.2", "by-client:0.6/0.2/0.2", "fold=1/5", "public"):
        assert time_column(how) is None


# --- Silos ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["csv", "npz"])
def test_silos_split_by_columns_of_their_own(format: str, tmp_path: Path) -> None:
    graph = load(write(tmp_path / "a", DATES), time="opened")
    partition = cut(graph)
    split = choose_split(graph, partition, HOW, KEY.fold("split"))
    write_silos(tmp_path / "silos", graph, partition, split, format=format)
    silos = read_silos(tmp_path / "silos")
    for how in (HOW, "time:0.6/0.2/0.2"):  # by the silo's own name, or by that of all
        for silo, nodes in zip(silos.members, partition.nodes, strict=True):
            own = silo_split(silo, how, KEY.fold("split"))
            assert torch.equal(own.train, split.train[nodes])
            assert torch.equal(own.test, split.test[nodes])
    with raises_code(DataError, "missing-column", column="closed"):
        sg.run(tmp_path / "silos", split="time:closed:0.6/0.2/0.2", rounds=1, hidden=2)
    options: dict[str, Any] = {"rounds": 2, "hidden": 2, "split": HOW}
    one = sg.run(graph, partition="random", clients=3, **options)
    assert one.cut is not None
    of_folders = tmp_path / "cut"
    write_silos(of_folders, graph, one.cut.partition, one.cut.split, format=format)
    other = sg.run(of_folders, **options)
    assert same_bits(weights_of(one), weights_of(other))


def test_a_silos_times_that_are_missing_are_one_line(tmp_path: Path) -> None:
    graph = load(write(tmp_path / "a", DATES), time="opened")
    partition = cut(graph)
    write_silos(tmp_path / "silos", graph, partition, choose_split(graph, partition, HOW, KEY))
    table = tmp_path / "silos" / "client_01" / "nodes.csv"
    lines = table.read_text().splitlines()
    table.write_text("\n".join([*lines[:-1], lines[-1].rpartition(",")[0] + ","]) + "\n")
    with pytest.raises(
        DataError, match=r"labeled node of 'client_01', got 1 node without"
    ) as caught:
        sg.run(tmp_path / "silos", split=HOW, rounds=1, hidden=2)
    assert "\n" not in str(caught.value)
