"""Laws of the views: who is judged by which model on which graph, checked by dense matrices."""

import dataclasses
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, roc_auc_score
from torch import Tensor

from runs import MakeGraph, assert_close, blind, go, of, rows_of, some_of, weights_of
from silograph.core.errors import PartitionError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Ragged, tensors_under
from silograph.experiment.run.round_scores import uncut_counts, uncut_rows
from silograph.experiment.run.setup import Setup
from silograph.graph.graph import MISSING, Graph, Split, subgraph
from silograph.graph.partition.partition import Partition
from silograph.methods import METHODS
from silograph.methods.fedavg import train
from silograph.methods.local_training import shared
from silograph.nn.conv import Params
from silograph.task.scores import Scores, score

NO_VALIDATION = "0.5/0/0.5"


# --- what the views mean --------------------------------------------------------------------------


def by_hand(weights: Params, graph: Graph, nodes: Tensor) -> Tensor:
    """Logits of a two-layer GCN on the subgraph of `nodes`, with dense matrices."""
    adjacency = torch.zeros(graph.num_nodes, graph.num_nodes, dtype=torch.float64)
    adjacency[graph.edge_index[0], graph.edge_index[1]] = 1
    a = adjacency[nodes][:, nodes] + torch.eye(len(nodes), dtype=torch.float64)
    root = a.sum(dim=1).rsqrt()
    a = root[:, None] * a * root
    assert isinstance(graph.x, Tensor)
    hidden = torch.relu(a @ graph.x[nodes].double() @ weights["0.weight"] + weights["0.bias"])
    return a @ hidden @ weights["1.weight"] + weights["1.bias"]


def judge_by_hand(setup: Setup, logits: Tensor) -> Scores:
    """Scores of test nodes that a client holds, multi-class, by scikit-learn."""
    cut = setup.cut
    test = cut.split.test & (cut.partition.owner >= 0)
    y, owner, out = cut.graph.y[test], cut.partition.owner[test], logits[test]
    predicted = out.argmax(dim=1)
    right = (predicted == y).double()
    by_client = [float(right[owner == c].mean()) for c in owner.unique()]
    p = torch.softmax(out, dim=1)
    aucs = [roc_auc_score((y == k).numpy(), p[:, k].numpy()) for k in y.unique()]
    return Scores(
        {
            "accuracy": float(right.mean()),
            "accuracy_client_mean": sum(by_client) / len(by_client),
            "f1_macro": float(f1_score(y, predicted, average="macro")),
            "f1_micro": float(f1_score(y, predicted, average="micro")),
            "auc": float(np.mean(aucs)),
            "loss": float(torch.nn.functional.cross_entropy(out, y)),
        }
    )


def assert_scores(got: Scores | None, expected: Scores) -> None:
    assert got is not None
    ours, theirs = dict(got), dict(expected)
    assert ours.pop("auc") == pytest.approx(theirs.pop("auc"), abs=0.02)  # 256 bins
    assert ours == pytest.approx(theirs, rel=0, abs=1e-12)


def test_the_views_of_the_servers_model(make_graph: MakeGraph, setups: list[Setup]) -> None:
    graph = make_graph(90)
    result = go(graph, rounds=6)
    weights = of(result)
    everyone = torch.arange(graph.num_nodes)
    assert_scores(result.test.uncut, judge_by_hand(setups[0], by_hand(weights, graph, everyone)))
    apart = torch.zeros(graph.num_nodes, graph.num_classes, dtype=torch.float64)
    for nodes in setups[0].cut.partition.nodes:
        apart[nodes] = by_hand(weights, graph, nodes)
    assert_scores(result.test.server, judge_by_hand(setups[0], apart))
    assert result.test.server != result.test.uncut


def own_models(setup: Setup, stacked: Params) -> Tensor:
    """Logits of every node by its own client's model, weights (C, ...)."""
    graph = setup.cut.graph
    logits = torch.zeros(graph.num_nodes, graph.num_classes, dtype=torch.float64)
    for client, nodes in enumerate(setup.cut.partition.nodes):
        own = {k: w[client] for k, w in stacked.items()}
        logits[nodes] = by_hand(own, graph, nodes)
    return logits


def test_the_personalized_view_of_fedavg_is_the_locally_trained_models(
    make_graph: MakeGraph, setups: list[Setup]
) -> None:
    graph = make_graph(90)
    result = go(graph, rounds=4, split=NO_VALIDATION)
    before = of(go(graph, rounds=3, split=NO_VALIDATION))
    key = Key.of(0).fold("training").fold("train", 4)
    fed = setups[0].federation
    reply = fed.call(train, shared("weights", before), what=Kind.WEIGHTS, key=key)
    expected = judge_by_hand(setups[0], own_models(setups[0], tensors_under("weights", reply)))
    assert_scores(result.test.personalized, expected)
    assert result.test.personalized != result.test.server


def test_the_personalized_view_of_local_is_the_clients_own_models(
    make_graph: MakeGraph, setups: list[Setup]
) -> None:
    result = go(make_graph(90), method="local", split=NO_VALIDATION)
    (state,) = setups[0].federation.states()
    expected = judge_by_hand(setups[0], own_models(setups[0], tensors_under("weights", state)))
    assert_scores(result.test.personalized, expected)


# --- clients that did not take part ---------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "fedopt"])
def test_a_client_that_has_not_trained_finds_all_classes_alike(
    make_graph: MakeGraph, setups: list[Setup], method: str
) -> None:
    """One of four clients has trained; the others have no model of their own."""
    graph = make_graph(90)
    result = go(graph, method=method, rounds=1, participation=0.25, split=NO_VALIDATION)
    setup = setups[0]
    config = setup.config
    assert config.init_seed is not None
    key = Key.of(config.init_seed).fold("init")
    start = setup.method_config.model.init_weights(key, torch.float64)
    fed = setup.federation
    (state,) = fed.states()
    kept = state["own/logits"]
    assert isinstance(kept, Ragged)
    trained = [c for c in range(4) if kept.t[kept.off[c] : kept.off[c + 1]].any()]
    assert len(trained) == 1
    call = Key.of(0).fold("training").fold("train", 1)
    reply = fed.call(train, shared("weights", start), what=Kind.WEIGHTS, key=call)
    logits = own_models(setup, tensors_under("weights", reply))
    logits[setup.cut.partition.owner != trained[0]] = 0
    assert_scores(result.test.personalized, judge_by_hand(setup, logits))


def test_a_client_of_local_that_has_not_trained_has_the_initial_weights(
    make_graph: MakeGraph, setups: list[Setup]
) -> None:
    result = go(make_graph(90), method="local", rounds=1, participation=0.25, split=NO_VALIDATION)
    setup = setups[0]
    assert setup.config.init_seed is not None
    key = Key.of(setup.config.init_seed).fold("init")
    start = setup.method_config.model.init_weights(key, torch.float64)
    (state,) = setup.federation.states()
    own = tensors_under("weights", state)
    same = [all(torch.equal(own[k][c], w) for k, w in start.items()) for c in range(4)]
    assert sorted(same) == [False, True, True, True]
    assert_scores(result.test.personalized, judge_by_hand(setup, own_models(setup, own)))


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("method", METHODS)
def test_scores_do_not_depend_on_how_often_rounds_are_judged(
    make_graph: MakeGraph, method: str
) -> None:
    """Half of the clients a round, no validation: the last round is judged, however often."""
    options = {"method": method, "rounds": 5, "split": NO_VALIDATION, **some_of(method, 0.5)}
    options["options"] = blind(method)
    often, seldom, once = (go(make_graph(90), eval_every=e, **options) for e in (1, 2, 5))
    assert often.test.personalized is not None
    for other in (seldom, once):
        assert other.best_round == often.best_round == 5
        assert other.test == often.test
        assert {
            k: v for k, v in rows_of(other)[-1].items() if "bytes" not in k and k != "flops"
        } == {k: v for k, v in rows_of(often)[-1].items() if "bytes" not in k and k != "flops"}


def test_nodes_that_no_client_holds_do_not_judge(
    make_graph: MakeGraph, setups: list[Setup]
) -> None:
    """The whole graph carries messages, and only what clients hold is scored."""
    graph = make_graph(90)
    weights = of(go(graph))
    setup = setups[0]
    order = torch.randperm(90, generator=torch.Generator().manual_seed(0))
    nodes = tuple(part.sort().values for part in order[:50].split([10, 15, 25]))
    partition = Partition(("a", "b", "c"), nodes, 90, "hand")
    test = torch.arange(90) % 3 > 0
    split = Split(~test, test & False, test)
    setup = replace(setup, simulated=replace(setup.cut, partition=partition, split=split))
    assert 0 < int((test & (partition.owner < 0)).sum()) < int(test.sum())
    counts = uncut_counts(setup, uncut_rows(setup, weights))
    assert counts["test.nodes"].tolist() == [int(test[part].sum()) for part in nodes]
    logits = by_hand(weights, graph, torch.arange(90))
    assert_scores(score(counts, "test", "multiclass"), judge_by_hand(setup, logits))
    assert score(counts, "val", "multiclass") is None


# --- methods without one of the views -------------------------------------------------------------


def test_local_has_no_server_model(make_graph: MakeGraph) -> None:
    result = go(make_graph(), method="local")
    assert weights_of(result) is None
    assert (result.test.server, result.test.uncut) == (None, None)
    assert (result.val.server, result.val.uncut) == (None, None)
    assert result.to_dict()["test"]["server"] is None
    for row in result.rounds:
        assert {v for k, v in row.items() if "server" in k} == {None}
        assert isinstance(row["val_personalized_accuracy"], float)


def test_centralized_is_judged_on_the_uncut_graph(
    make_graph: MakeGraph, setups: list[Setup]
) -> None:
    graph = make_graph(90)
    result = go(graph, method="centralized")
    server, uncut = result.test.server, result.test.uncut
    assert server is not None
    assert uncut is not None
    # One client holds all nodes: its accuracy is the mean. `uncut` counts by the cut's owners.
    assert server.accuracy_client_mean == server.accuracy
    assert_scores(server, Scores({**uncut, "accuracy_client_mean": uncut.accuracy}))
    everyone = torch.arange(graph.num_nodes)
    assert_scores(uncut, judge_by_hand(setups[0], by_hand(of(result), graph, everyone)))
    assert result.config.clients == 4


def test_one_client_is_centralized(make_graph: MakeGraph) -> None:
    options = {"clients": 1, "dropout": 0.0, "rounds": 6}
    one = go(make_graph(), keep_optimizer=True, **options)
    all_in_one = go(make_graph(), method="centralized", **options)
    for name, w in of(one).items():
        torch.testing.assert_close(of(all_in_one)[name], w, rtol=0, atol=1e-10)
    assert one.best_round == all_in_one.best_round


# --- labels, silos, participants ------------------------------------------------------------------


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("missing", [0.0, 0.3])
def test_a_multilabel_graph_runs_and_reports(
    make_graph: MakeGraph, setups: list[Setup], method: str, missing: float
) -> None:
    graph = make_graph(90, multilabel=True, missing=missing)
    result = go(graph, method=method)
    own = result.test.personalized
    assert own is not None
    assert None not in dataclasses.astuple(own)
    assert setups[0].method_config.model.task == "multilabel"
    weights = weights_of(result)
    if weights is None:
        return
    split = setups[0].cut.split
    y = graph.y[split.test]
    right = by_hand(weights, graph, torch.arange(90))[split.test] > 0
    assert result.test.uncut is not None
    assert result.test.uncut.accuracy == float((right == (y == 1)).double().mean())
    assert result.test.uncut.f1_micro == pytest.approx(f1_score(y, right, average="micro"))


def test_a_label_bit_alone_may_be_missing(make_graph: MakeGraph, setups: list[Setup]) -> None:
    graph = make_graph(90, multilabel=True)
    y = graph.y.clone()
    y[::2, 1] = MISSING
    result = go(replace(graph, y=y))
    right = by_hand(of(result), graph, torch.arange(90)) > 0
    test = setups[0].cut.split.test
    known = (y != MISSING)[test]
    expected = (right == (y == 1))[test][known].double().mean()
    assert result.test.uncut is not None
    assert result.test.uncut.accuracy == pytest.approx(float(expected), abs=1e-12)


def test_nodes_without_a_label_neither_train_nor_judge(
    make_graph: MakeGraph, setups: list[Setup]
) -> None:
    graph = make_graph(90, missing=0.3)
    result = go(graph)
    split = setups[0].cut.split
    assert not bool(((split.train | split.val | split.test) & ~graph.labeled).any())
    everyone = torch.arange(90)
    expected = judge_by_hand(setups[0], by_hand(of(result), graph, everyone))
    assert_scores(result.test.uncut, expected)


def in_silos(graph: Graph, names: tuple[str, ...]) -> Graph:
    silo = torch.arange(graph.num_nodes) % len(names)
    return replace(graph, silo=silo, silo_names=names)


@pytest.mark.parametrize("method", ["fedavg", "fedopt"])
def test_a_client_without_labels_has_weight_zero(make_graph: MakeGraph, method: str) -> None:
    graph = in_silos(make_graph(90), ("a", "b", "c"))
    assert graph.silo is not None
    kept = torch.nonzero(graph.silo.ne(2))[:, 0]
    graph = replace(graph, y=torch.where(graph.silo == 2, MISSING, graph.y))
    others = replace(subgraph(graph, kept), silo_names=("a", "b"), name="others")
    options = {"method": method, "partition": "silo", "clients": None}
    three, two = go(graph, **options), go(others, **options)
    assert [row["participants"] for row in three.rounds] == [3] * 4
    assert_close(three, two, 1e-12, "participants", "bytes", "bytes_evaluation", "flops")


def test_rounds_in_which_nobody_can_train_change_nothing(make_graph: MakeGraph) -> None:
    """Two clients, one without labels; one client a round."""
    graph = in_silos(make_graph(60), ("a", "b"))
    assert graph.silo is not None
    graph = replace(graph, y=torch.where(graph.silo == 1, MISSING, graph.y))
    options = {"partition": "silo", "clients": None, "participation": 0.5, "rounds": 12}
    result = go(graph, **options)
    rows = rows_of(result)
    ranks = [(row["val_server_accuracy"], -row["val_server_loss"]) for row in rows]
    assert result.best_round == 1 + ranks.index(max(ranks))  # the first of equal ones
    losses = [row["train_loss"] for row in rows]
    assert None in losses
    assert any(loss is not None and math.isfinite(loss) for loss in losses)
    accuracy = [(row["test_server_accuracy"], row["test_server_loss"]) for row in rows]
    for before, after, loss in zip(accuracy[:-1], accuracy[1:], losses[1:], strict=True):
        assert (before == after) == (loss is None)


def test_as_many_clients_as_silos(make_graph: MakeGraph) -> None:
    graph = in_silos(make_graph(), ("north", "south", "west"))
    result = go(graph, partition="silo", clients=None)
    assert result.config.clients == 3
    assert result.to_dict()["clients"] == 3
    with pytest.raises(PartitionError, match="clients: expected 3, one for each silo, got 4"):
        go(graph, partition="silo", clients=4)


def test_ten_clients_unless_said_otherwise(make_graph: MakeGraph) -> None:
    assert go(make_graph(), clients=None).config.clients == 10


@pytest.mark.law(sample=6)
@pytest.mark.parametrize(
    ("share", "expected"), [(1.0, 8), (0.5, 4), (0.3, 2), (0.01, 1)]
)  # max(1, round(share * 8))
@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_participation(make_graph: MakeGraph, method: str, share: float, expected: int) -> None:
    result = go(make_graph(80), method=method, clients=8, participation=share)
    assert [row["participants"] for row in result.rounds] == [expected] * 4
