"""Laws of regression: scikit-learn's scores from sums alone, and losses by hand.

n: nodes. K: targets of a node. C: clients.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import mean_absolute_error, root_mean_squared_error
from torch import Tensor

import silograph as sg
from mistakes import raises_code
from runs import FAST, MakeGraph, go, same_bits, weights_of, with_values
from silograph.core.config import RunConfig
from silograph.core.errors import DataError, ProtocolError
from silograph.experiment.run.setup import prepare
from silograph.graph.silos.export import write_silos
from silograph.nn.backends import COMPILED
from silograph.nn.fit import Schedule, Training, check_labels
from silograph.nn.model import Model
from silograph.nn.optim import SGD
from silograph.task.counts import JudgedRows
from silograph.task.node_labels import NODE_VALUE
from silograph.task.scores import PARTS

N, C = 400, 7
CLOSE = 1e-12
COLUMNS = pytest.mark.parametrize("columns", [1, 3])


def drawn(columns: int, *, missing: float = 0.2, seed: int = 0) -> JudgedRows:
    """Rows with predictions, far from 0 so that sums lose digits where they can."""
    rng = np.random.default_rng(seed)
    y = 50 + rng.normal(size=(N, columns))
    logits = y + rng.normal(size=(N, columns))
    y[rng.random((N, columns)) < missing] = np.nan
    y[:, 0] = np.where(np.isnan(y).all(axis=1), 0.0, y[:, 0])  # a judged node has a target
    val, group = rng.random(N) < 0.5, rng.integers(0, C - 1, N)  # the last client has no node
    out, targets, part, client = (torch.from_numpy(a) for a in (logits, y, val, group))
    return JudgedRows(out, targets, part, client, C, "node_value")


def known_pairs(rows: JudgedRows, chosen: Tensor) -> tuple[np.ndarray, np.ndarray]:
    y, logits = rows.y[chosen], rows.logits[chosen]
    known = ~torch.isnan(y)
    return y[known].numpy(), logits[known].numpy()


@COLUMNS
@pytest.mark.parametrize("seed", range(3))
def test_scores_are_those_of_scikit_learn_on_pooled_predictions(columns: int, seed: int) -> None:
    rows = drawn(columns, seed=seed)
    counts = NODE_VALUE.tally(rows)
    for part, chosen in zip(PARTS, (rows.val, ~rows.val), strict=True):
        scores = NODE_VALUE.scores(counts, part)
        assert scores is not None
        pair = known_pairs(rows, chosen)
        assert scores.rmse == pytest.approx(root_mean_squared_error(*pair), abs=CLOSE)
        assert scores.mae == pytest.approx(mean_absolute_error(*pair), abs=CLOSE)
        own = NODE_VALUE.client_scores(counts, part)
        for client in range(C - 1):
            mine = known_pairs(rows, chosen & (rows.group == client))
            expected = root_mean_squared_error(*mine), mean_absolute_error(*mine)
            found = own["rmse"][client], own["mae"][client]
            assert found == pytest.approx(expected, abs=CLOSE)
        assert (own["rmse"][-1], own["mae"][-1]) == (None, None)
        mean = np.mean([value for value in own["rmse"] if value is not None])
        assert scores.rmse_client_mean == pytest.approx(mean, abs=CLOSE)


def test_counts_are_as_they_are_declared() -> None:
    counts = NODE_VALUE.tally(drawn(3))
    specs = NODE_VALUE.counts(3)
    assert counts.keys() == specs.keys()
    for name, spec in specs.items():
        assert counts[name].shape == (C, *spec.shape)
        assert counts[name].dtype == spec.dtype
    assert NODE_VALUE.scores({name: 0 * t for name, t in counts.items()}, "val") is None


def test_counts_of_all_clients_are_those_of_each_alone() -> None:
    rows = drawn(2)
    together = NODE_VALUE.tally(rows)
    for client in range(C):
        mine = rows.group == client
        nobody = torch.zeros(int(mine.sum()), dtype=torch.int64)
        alone = NODE_VALUE.tally(
            JudgedRows(rows.logits[mine], rows.y[mine], rows.val[mine], nobody, 1, rows.task)
        )
        for name, t in alone.items():
            assert torch.equal(together[name][client : client + 1], t)


def test_the_loss_is_the_mean_squared_error_of_known_targets() -> None:
    logits = torch.tensor([[1.0, 2.0], [0.0, 4.0], [7.0, 7.0]], requires_grad=True)
    y = torch.tensor([[0.0, 4.0], [math.nan, 1.0], [math.nan, math.nan]], dtype=torch.float64)
    loss = NODE_VALUE.loss(logits, y)
    assert loss.tolist() == [(1 + 4) / 2, 9.0, 0.0]
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert grad.tolist() == [[1.0, -2.0], [0.0, 6.0], [0.0, 0.0]]  # (p - y) * 2 / known


def test_the_best_constant_is_the_mean() -> None:
    y = torch.tensor([[1.0, math.nan], [3.0, math.nan], [math.nan, math.nan]])
    assert NODE_VALUE.constant_logits(y, 2).tolist() == [2.0, 0.0]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"y": torch.zeros(4)}, r"expected numbers of shape \(4, 2\) and 4 masks"),
        ({"y": torch.zeros(4, 2, dtype=torch.int64)}, "expected numbers of shape"),
        ({"logits": torch.zeros(3, 2)}, "expected predictions of 4 judged rows, got"),
        ({"logits": torch.zeros(4, 2).long()}, "expected predictions of 4 judged rows, got"),
        ({"val": torch.zeros(3, dtype=torch.bool)}, "and 3 masks"),
    ],
)
def test_rows_that_cannot_be_judged_are_refused(changes: dict[str, Tensor], text: str) -> None:
    plain: dict[str, Any] = {
        "logits": torch.zeros(4, 2),
        "y": torch.zeros(4, 2),
        "val": torch.zeros(4, dtype=torch.bool),
        "group": torch.zeros(4, dtype=torch.int64),
    }
    with pytest.raises(ProtocolError, match=text):
        NODE_VALUE.tally(JudgedRows(groups=1, task="node_value", **(plain | changes)))


def test_kernels_are_not_for_numbers(make_graph: MakeGraph) -> None:
    model = Model("gcn", 7, 4, 1, 2, 0.0, "node_value")
    training = Training(model, SGD(0.1), Schedule(1, None), ())
    told = COMPILED.why_not(training, torch.device("cpu"))
    assert told == "task node_value is not compiled"
    graph = with_values(make_graph())
    assert go(graph, rounds=1).config.kernels == "torch"
    with pytest.raises(sg.ConfigError, match="got: task node_value is not compiled; use kernels="):
        go(graph, kernels="compiled")


def test_a_model_for_another_task_is_refused(make_graph: MakeGraph) -> None:
    graph = with_values(make_graph())
    setup = prepare(RunConfig(clients=1, method="fedavg"), graph)
    block: Any = setup.federation
    block = block._host.blocks[0].all

    def training(outputs: int, task: Any) -> Training:
        return Training(Model("gcn", 7, 4, outputs, 2, 0.0, task), SGD(0.1), Schedule(1))

    with pytest.raises(ProtocolError, match="expected 1 bits as labels"):
        check_labels(training(1, "multilabel"), block)
    with pytest.raises(ProtocolError, match="expected 2 numbers as labels"):
        check_labels(training(2, "node_value"), block)
    classes = replace(block, y=torch.zeros(len(block.y), 3, dtype=torch.int64))
    with pytest.raises(ProtocolError, match="expected 3 numbers as labels"):
        check_labels(training(3, "node_value"), classes)


# --- graphs ---------------------------------------------------------------------------------------

EDGES = [[0, 1], [1, 2]]


def made(y: Any, **options: Any) -> sg.Graph:
    return sg.from_arrays(edge_index=EDGES, x=np.eye(3), y=y, **options)


def test_numbers_with_fractions_are_targets() -> None:
    graph = made(np.array([0.5, np.nan, 2.0]))
    assert graph.task == "node_value"
    assert graph.y.dtype == torch.float64
    assert graph.y.shape == (3, 1)
    assert graph.labeled.tolist() == [True, False, True]
    assert "targets=1, task='node_value'" in repr(graph)
    assert made([0.5, None, 2.0]).y.flatten().tolist()[::2] == [0.5, 2.0]
    several = made([[1.5, 2.0], [3.0, np.nan], [np.nan, np.nan]], class_names=["a", "b"])
    assert (several.num_classes, several.class_names) == (2, ("a", "b"))
    assert several.labeled.tolist() == [True, True, False]


def test_whole_numbers_are_classes_unless_said_otherwise() -> None:
    assert made(np.array([0.0, 1.0, np.nan])).task == "multiclass"
    assert made(np.array([0.0, 1.0, np.nan]), task="node_value").task == "node_value"
    assert made([-1.0, 0.0, 5.0], task="node_value").y.flatten().tolist() == [-1.0, 0.0, 5.0]


@pytest.mark.parametrize(
    ("y", "options", "text"),
    [
        (
            [0, 1, 2],
            {"task": "node_value"},
            "expected floating point targets in y for node_value",
        ),
        (
            [0.5, np.inf, 1.0],
            {},
            r"expected finite targets, or NaN .* got inf at node 1",
        ),
        ([np.nan] * 3, {"task": "node_value"}, "expected at least one known target in each"),
        ([[0.5, np.nan]] * 3, {}, "in each column of y, got none in column 1"),
        ([0.5, 1.0], {}, r"expected targets y of shape \(3,\) or \(3, T\), got \(2,\)"),
        (
            ["a", "b", "c"],
            {"task": "node_value"},
            "expected numbers as targets in y, got dtype",
        ),
        ([0.5, "b", None], {"task": "node_value"}, "expected"),
        ([0.5, 1.5, 2.5], {"num_classes": 2}, "expected num_classes 1, the columns of y, got 2"),
        ([0.5, 1.5, 2.5], {"class_names": ["a", "b"]}, "got 1 and 2 names"),
        ([0.5, 1.0, 2.0], {"task": "multiclass"}, "need task='node_value'"),
        (
            [0, 1, 0],
            {"task": "multilabel"},
            "expected labels for multilabel, got y of",
        ),
        (
            [0, 1, 0],
            {"task": "values"},
            "expected task multiclass, multilabel, node_value",
        ),
    ],
)
def test_targets_that_cannot_be(y: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(DataError, match=text) as caught:
        made(np.array(y) if not any(isinstance(v, str) for v in y) else y, **options)
    assert "\n" not in str(caught.value)


def test_files_hold_targets(tmp_path: Any) -> None:
    y = np.array([0.5, np.nan, 2.0])
    np.savez(tmp_path / "a.npz", x=np.eye(3), edge_index=EDGES, y=y)
    whole = np.array([1.0, 2.0, 4.0])
    np.savez(tmp_path / "b.npz", x=np.eye(3), edge_index=EDGES, y=whole, task="node_value")
    assert sg.load(str(tmp_path / "a.npz")).y.flatten().tolist()[::2] == [0.5, 2.0]
    assert sg.load(str(tmp_path / "b.npz")).task == "node_value"
    folder = tmp_path / "c"
    folder.mkdir()
    (folder / "edges.csv").write_text("source,target\na,b\nb,c\n")
    (folder / "nodes.csv").write_text("id,value,x\na,1,2\nb,,3\nc,7,4\n")
    graph = sg.load(str(folder))
    assert graph.task == "node_value"
    assert graph.num_features == 1
    assert graph.y.flatten().tolist()[::2] == [1.0, 7.0]
    (folder / "nodes.csv").write_text("id,value_age,value_size,x\na,1,2,3\nb,,3,3\nc,7,4,3\n")
    assert sg.load(str(folder)).class_names == ("age", "size")
    (folder / "nodes.csv").write_text("id,value,x\na,1,2\nb,much,3\nc,7,4\n")
    with raises_code(DataError, "bad-cell", row=3, column="value", got="much"):
        sg.load(str(folder))
    (folder / "nodes.csv").write_text("id,label,value\na,1,2\nb,0,3\nc,1,4\n")
    assert sg.load(str(folder)).task == "multiclass"  # the value is a feature


def test_cuts_by_class_and_silos_folders_refuse_numbers(
    make_graph: MakeGraph, tmp_path: Any
) -> None:
    graph = with_values(make_graph())
    with pytest.raises(sg.PartitionError, match="got numbers to predict: use 'metis'"):
        go(graph, partition="dirichlet")
    with pytest.raises(DataError, match="a node for label-guided sampling, got numbers"):
        go(graph, method="label_guided", options={"sample": 20})
    cut = go(graph, rounds=1).cut
    assert cut is not None
    with pytest.raises(DataError, match="got numbers to predict: a regression runs in simulation"):
        write_silos(tmp_path / "silos", cut.graph, cut.partition, cut.split)
    assert not list(tmp_path.rglob("*.toml"))


# --- runs -----------------------------------------------------------------------------------------


@pytest.mark.law(sample=6)
@pytest.mark.parametrize(
    "method",
    ["local", "fedavg", "fedopt", "fedprox", "scaffold", "centralized", "label_guided", "bns"],
)
def test_methods_learn_numbers(make_graph: MakeGraph, method: str) -> None:
    graph = with_values(make_graph(120), missing=0.1)
    result = go(graph, method=method, rounds=40, model="mlp", layers=1, lr=0.1)
    column = f"val_{'personalized' if method == 'local' else 'server'}_rmse"
    values = [row[column] for row in result.rounds]
    assert values[result.best_round - 1] == min(v for v in values if v is not None)
    scores = result.test.server or result.test.personalized
    assert scores is not None
    assert result.baseline is not None
    assert scores.rmse is not None
    assert scores.rmse < 0.5 * (result.baseline.rmse or 0)
    assert result.summary().splitlines()[1].split()[:2] == ["test", "RMSE"]


def test_scores_of_a_run_are_those_of_its_predictions(make_graph: MakeGraph) -> None:
    graph = with_values(make_graph(90), 2, missing=0.2)
    result = go(graph, rounds=3)
    assert result.cut is not None
    assert result.model is not None
    assert result.test.uncut is not None
    test = result.cut.split.test
    y, out = graph.y[test].numpy(), result.model.predict(result.cut.graph)[test.numpy()]
    assert out.shape == y.shape
    known = ~np.isnan(y)
    assert result.test.uncut.rmse == pytest.approx(
        root_mean_squared_error(y[known], out[known]), abs=CLOSE
    )
    error = mean_absolute_error(y[known], out[known])
    assert result.test.uncut.mae == pytest.approx(error, abs=CLOSE)
    train = np.nanmean(graph.y[result.cut.split.train].numpy(), axis=0)
    assert result.baseline is not None
    constant = np.broadcast_to(train, y.shape)[known]
    expected = root_mean_squared_error(y[known], constant)
    assert result.baseline.rmse == pytest.approx(expected, abs=CLOSE)
    single = go(with_values(make_graph(90)), rounds=1).model
    assert single is not None
    assert single.predict(graph).shape == (90,)


def test_blocks_of_one_train_and_judge_the_same(make_graph: MakeGraph) -> None:
    graph = with_values(make_graph(90), 2, missing=0.2)
    for method in ("fedavg", "local"):
        one, all_ = (go(graph, method=method, block_size=size) for size in (1, 4))
        assert one.val == all_.val
        assert same_bits(weights_of(one), weights_of(all_))
        assert one.ledger.bytes_by_kind == all_.ledger.bytes_by_kind


def test_the_ledger_has_sums_in_place_of_histograms(make_graph: MakeGraph) -> None:
    columns, clients = 2, 4
    result = go(with_values(make_graph(90), columns), rounds=1, method="local")
    records = [r for r in result.ledger.records if (r.op, r.direction) == ("judge_own", "up")]
    assert len(records) == 1
    # For val and test: nodes int32, loss float64; known int32 and two sums float64 a target.
    values = 2 * (4 + 8 + columns * (4 + 8 + 8))
    sizes = records[0].bytes.tolist()
    assert len(sizes) == clients
    assert all(values < size < values + 400 for size in sizes)


def test_a_killed_run_resumes_bit_for_bit(make_graph: MakeGraph, tmp_path: Any) -> None:
    graph = with_values(make_graph(60), 2, missing=0.1)
    whole = go(graph, method="fedopt", rounds=6, out=str(tmp_path / "a"))

    class KilledError(Exception):
        pass

    def killed(done: int, text: str) -> None:
        del text
        if done == 3:
            raise KilledError

    class Display:
        update = staticmethod(killed)

    with pytest.raises(KilledError):
        sg.run(
            graph,
            method="fedopt",
            rounds=6,
            out=str(tmp_path / "b"),
            progress=Display(),
            **{k: v for k, v in FAST.items() if k not in ("method", "rounds")},
        )
    again = sg.resume(tmp_path / "b", graph=graph)
    assert same_bits(weights_of(again), weights_of(whole))
    assert again.val == whole.val
    rows = [
        [{k: v for k, v in row.items() if k != "seconds"} for row in r.rounds]
        for r in (whole, again)
    ]
    assert rows[0] == rows[1]


def test_a_regression_is_compared_tuned_and_shown(make_graph: MakeGraph, tmp_path: Any) -> None:
    graph = with_values(make_graph(90))
    small: dict[str, Any] = {"clients": 3, "partition": "random", "rounds": 3, "hidden": 4}
    table = sg.compare(graph, methods=["local", "fedavg"], seeds=2, processes=0, **small)
    assert {row["metric"] for row in table.rows} == {"rmse"}
    best = [row["method"] for row in table.rows if "personalized" in row["best"]]
    means = {row["method"]: row["personalized_mean"] for row in table.rows}
    assert best == [min(means, key=lambda name: means[name])]
    assert "rmse on test nodes, lower is better" in table.summary()
    assert "in percent" not in table.summary()
    pytest.importorskip("optuna")
    found = sg.tune(
        graph, trials=3, keys=["lr"], ranges={"lr": "0.001:1.0:log"}, processes=0, **small
    )
    assert found.best is not None
    assert found.best.mean == min(trial.mean for trial in found.trials if trial.mean is not None)
    assert found.metric.name == "rmse"
    result = go(graph, rounds=2, out=str(tmp_path / "x"))
    page = (tmp_path / "x" / "report.html").read_text(encoding="utf-8")
    for text in ("test RMSE, server", "mean target", "Test RMSE of each client", ", 1 target."):
        assert text in page
    assert "Mix of labels" not in page
    header = (tmp_path / "x" / "clients.csv").read_text(encoding="utf-8").splitlines()[0]
    assert "test_server_rmse" in header
    assert "test_server_mae" in header
    assert "val_server_rmse" in result.rounds[0]
    with raises_code(sg.ConfigError, "unknown-name", what="metric", got="rsme", suggestion="rmse"):
        go(graph, target="rsme=0.5")
    reached = go(graph, rounds=30, target="1.0")
    assert "validation rmse" in reached.stopped or reached.stopped == "all 30 rounds"
