"""Laws of weighted edges in runs: who uses them, who refuses them, and that none is lost."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from torch_geometric.nn import GCNConv

import silograph as sg
from bank_graphs import bank_graph
from mistakes import raises_code
from runs import FAST, go, little_work, rows_of, same_bits, weights_of
from silograph.cli import run_app
from silograph.core.errors import ConfigError, DataError
from silograph.experiment.resolve.data import with_edges
from silograph.graph.graph import Graph, fingerprint, largest_component, subgraph
from silograph.graph.silos.data import silo_fingerprint
from silograph.methods import METHODS
from silograph.study.workers import read_graph, write_graph

MakeGraph = Callable[..., Graph]
LOCAL = [n for n, method in METHODS.items() if method.weighs_edges]
NONE = "edge weights are not used: {}; every edge counts 1"


def weighed(graph: Graph, scale: float = 1.0) -> Graph:
    """The graph with weights between 0 and 2 that depend on its edges' keys only."""
    low, high = graph.edge_index.min(dim=0).values, graph.edge_index.max(dim=0).values
    weight = ((low * 7 + high * 13) % 10).double() / 5 * scale
    return replace(graph, edge_weight=weight)


@pytest.fixture
def graph(make_graph: MakeGraph) -> Graph:
    return weighed(make_graph(60))


def on_silos(folder: str, **options: Any) -> sg.Result:
    own = {name: value for name, value in FAST.items() if name != "clients"}
    return sg.run(folder, **own | {"partition": "silo"} | options)


SKIPPED = {"fedacs", "fedmf", "fedgnn", "fesog"}  # of ratings


@pytest.mark.law(sample=3)
@pytest.mark.parametrize("method", sorted({*METHODS} - SKIPPED))
def test_a_method_uses_weights_or_refuses_them(graph: Graph, method: str, tmp_path: Path) -> None:
    bare, out = replace(graph, edge_weight=None), str(tmp_path / "run")
    options: dict[str, Any] = {"method": method, **little_work(method)}
    if method not in LOCAL:
        line = f"^expected edges without weights for method {method}, which .*: add edge_weights=ig"
        with pytest.raises(ConfigError, match=line):
            go(graph, method=method, out=out)
        assert not Path(out).exists()
    else:
        assert rows_of(go(graph, rounds=2, **options)) != rows_of(go(bare, rounds=2, **options))
    ignored = go(graph, rounds=1, edge_weights="ignore", **options)
    assert rows_of(ignored) == rows_of(go(bare, rounds=1, **options))


@pytest.mark.parametrize("method", ["fedavg", "llcg", "centralized"])
def test_weights_of_one_are_no_weights(graph: Graph, method: str) -> None:
    assert graph.edge_weight is not None
    ones = replace(graph, edge_weight=torch.ones_like(graph.edge_weight))
    runs = [go(g, method=method, rounds=2) for g in (ones, replace(graph, edge_weight=None))]
    assert same_bits(weights_of(runs[0]), weights_of(runs[1]))


def test_one_client_is_centralized(graph: Graph) -> None:
    one = {"clients": 1, "rounds": 3, "keep_optimizer": True, "dropout": 0.0}
    found = [weights_of(go(graph, method=m, **one)) for m in ("fedavg", "centralized")]
    assert found[0] is not None
    assert found[1] is not None
    for name, w in found[0].items():
        assert torch.allclose(w, found[1][name], atol=1e-12)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize(
    ("collect", "use"), [(0.0, "use"), (1.0, None), (0.0, "scale"), (1.0, "scale")]
)
def test_a_run_on_exported_folders_is_the_run_on_the_cut(
    graph: Graph, work: Path, collect: float, use: str | None
) -> None:
    options: dict[str, Any] = {"rounds": 2, "collect": collect, "edge_weights": use}
    theirs = go(graph, **options)
    assert theirs.cut is not None
    for form in ("csv", "npz"):
        sg.write_silos(form, graph, theirs.cut.partition, theirs.cut.split, format=form)
        ours = on_silos(form, **options)
        assert rows_of(ours) == rows_of(theirs)
        assert same_bits(weights_of(ours), weights_of(theirs))
        assert ours.test.uncut == theirs.test.uncut
        silo = sg.read_silos(form).members[0]
        assert silo.weighted


def test_columns_of_ones_in_silos_folders_are_no_weights(graph: Graph, work: Path) -> None:
    """So methods that refuse weights take such folders."""
    bare = replace(graph, edge_weight=None)
    cut = go(bare, rounds=1).cut
    assert cut is not None
    sg.write_silos("bare", bare, cut.partition, cut.split)
    sg.write_silos("ones", graph, cut.partition, cut.split)
    for table in Path("ones").glob("*/*edges.csv"):
        head, *lines = table.read_text().splitlines()
        assert head.endswith(",weight")
        assert lines
        ones = [line.rpartition(",")[0] + ",1" for line in lines]
        table.write_text("\n".join([head, *ones]) + "\n")
    members = [sg.read_silos(folder).members for folder in ("bare", "ones")]
    assert not any(silo.weighted for silo in members[1])
    assert [silo_fingerprint(s) for s in members[1]] == [silo_fingerprint(s) for s in members[0]]


def test_silos_that_disagree_on_an_edge(graph: Graph, work: Path) -> None:
    cut = go(graph, rounds=1).cut
    assert cut is not None
    sg.write_silos("silos", graph, cut.partition, cut.split)
    table = Path("silos/client_01/cross_edges.csv")
    head, first, *rest = table.read_text().splitlines()
    table.write_text("\n".join([head, first.rpartition(",")[0] + ",77", *rest]) + "\n")
    with raises_code(
        DataError, "silos-disagree", what="edges", silo="client_00", other="client_01"
    ):
        on_silos("silos")
    table.write_text("\n".join([head, first.rpartition(",")[0] + ",-1", *rest]) + "\n")
    with raises_code(
        DataError,
        "bad-cell",
        path="silos/client_01/cross_edges.csv",
        row=2,
        column="weight",
        got="-1",
    ):
        on_silos("silos")


@pytest.mark.law(sample=6)
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("sage", "SAGE has no place for them"),
        ("gin", "GIN has no place for them"),
        ("gat", "GAT has no place for them"),
        ("mlp", "model mlp reads no edges"),
        (GCNConv, "a torch.nn.Module of your own is told of edges without them"),
    ],
)
def test_what_has_no_place_for_weights_says_so(
    graph: Graph, model: Any, reason: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    more = {"hidden": 128} if model is GCNConv else {}
    found = go(graph, model=model, rounds=1, out=str(tmp_path / "run"), **more)
    assert caplog.messages == [NONE.format(reason)]
    assert found.config.edge_weights == "ignore"
    about = json.loads((tmp_path / "run/run.json").read_text())
    assert about["dataset"]["edge_weights"] == NONE.format(reason)
    bare = go(replace(graph, edge_weight=None), model=model, rounds=1, **more)
    assert rows_of(bare) == rows_of(found)
    assert len(caplog.messages) == 1


def test_what_a_model_does_not_weigh_another_one_does(graph: Graph, work: Path) -> None:
    """A run file does not say ignore where nobody has said so."""
    cut = go(graph, rounds=1).cut
    assert cut is not None
    sg.write_silos("silos", graph, cut.partition, cut.split)
    first = ["run", "silos", "--model", "sage", "--rounds", "1", "--quiet", "--out", "one"]
    assert run_app(first) == 0
    said, _, defaults = (work / "one/config.toml").read_text().partition("[defaults]")
    assert "edge_weights" not in said
    assert '\nedge_weights = "ignore"\n' in defaults
    for out, more, use in (
        ("same", [], "ignore"),
        ("other", ["--model", "gcn"], "log"),
        ("told", ["--model", "gcn", "--edge-weights", "ignore"], "ignore"),
    ):
        again = ["run", "--config", "one/config.toml", "--quiet", *more, "--out", out]
        assert run_app(again) == 0
        about = json.loads((work / out / "run.json").read_text())
        assert about["config"]["edge_weights"] == use
    assert 'edge_weights = "ignore"' in (work / "told/config.toml").read_text().split("[def")[0]


def test_the_first_lines_and_files_say_what_is_used(
    graph: Graph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    found = go(graph, rounds=1, progress="plain", out=str(out))
    line = "edge weights are used by gcn, as log2(1 + weight)"
    assert line in capsys.readouterr().err.splitlines()[:3]
    assert found.config.edge_weights == "log"
    about = json.loads((out / "run.json").read_text())
    assert about["dataset"]["edge_weights"] == line
    assert 'edge_weights = "log"' in (out / "config.toml").read_text()
    assert ">edge_weights<" in (out / "report.html").read_text()
    plain = go(replace(graph, edge_weight=None), rounds=1, out=str(tmp_path / "plain"))
    assert "edge_weights" not in json.loads((tmp_path / "plain/run.json").read_text())["dataset"]
    assert ">edge_weights<" not in (tmp_path / "plain/report.html").read_text()
    assert plain.config.edge_weights == "use"


def test_draws_that_know_no_weights_are_refused(graph: Graph) -> None:
    for name in ("bernoulli", "drop_edge", "ladies"):
        with pytest.raises(ConfigError, match=f"full or fanout with weights of .* {name}"):
            go(graph, neighbors=name)


def test_a_saved_model_predicts_as_it_was_trained(graph: Graph, tmp_path: Path) -> None:
    bare = replace(graph, edge_weight=None)
    for use, same in (("use", False), ("log", False), ("scale", False), ("ignore", True)):
        model = go(graph, rounds=2, edge_weights=use).model
        assert model is not None
        model.save(tmp_path / use)
        back = sg.load_model(tmp_path / use)
        assert torch.equal(back.logits(graph), model.logits(graph))
        assert torch.equal(back.logits(graph), back.logits(bare)) is same
    half: Any = "half"
    other = replace(back.preprocessing, edge_weights=half)
    replace(back, preprocessing=other).save(tmp_path / "half")
    with pytest.raises(DataError, match=r"^expected a model's shape in"):
        sg.load_model(tmp_path / "half")


def test_parts_of_a_graph_keep_their_weights(graph: Graph, tmp_path: Path) -> None:
    nodes = torch.randperm(graph.num_nodes, generator=torch.Generator().manual_seed(0))
    dense = [g.weighted_adj.scipy().toarray() for g in (graph, subgraph(graph, nodes))]
    order = nodes.numpy()
    assert np.array_equal(dense[0][np.ix_(order, order)], dense[1])
    kept = largest_component(graph)
    assert kept.edge_weight is not None
    assert len(kept.edge_weight) == kept.adj.nnz
    write_graph(tmp_path / "g.npz", graph)
    assert fingerprint(read_graph(tmp_path / "g.npz")) == fingerprint(graph)
    assert fingerprint(weighed(graph, 2.0)) != fingerprint(graph)
    assert fingerprint(replace(graph, edge_weight=None)) != fingerprint(graph)


def test_a_run_goes_on(graph: Graph, tmp_path: Path) -> None:
    out = tmp_path / "run"
    whole = go(graph, rounds=3, out=str(out))
    (out / "result.json").unlink()
    sorted((out / "checkpoints").iterdir())[-1].unlink()
    assert same_bits(weights_of(sg.resume(out, graph=graph)), weights_of(whole))


@pytest.mark.parametrize(
    ("weight", "match"),
    [
        (
            [1.0, -0.5],
            r"^expected edge weights from 0 to 3.4e38 .*, got -0\.5 at edge 1 \(1 such edge\)",
        ),
        ([1.0, np.nan], r"^expected edge weights from 0 to 3.4e38 \(float32\), got nan at edge 1"),
        ([1e39, 1.0], r"^expected edge weights from 0 to 3.4e38 \(float32\), got 1e\+39 at edge 0"),
        ([1.0], r"^expected edge_weight of shape \(2,\), one number an edge, got \(1,\)"),
        (["a", "b"], r"^expected edge_weight of shape \(2,\), one number an edge, got \(2,\)"),
    ],
)
def test_what_is_no_weight(weight: Any, match: str) -> None:
    with pytest.raises(DataError, match=match):
        sg.from_arrays(edge_index=[[0, 1], [1, 2]], edge_weight=weight, y=[0, 1, 0])


def test_an_edge_that_is_listed_twice_has_the_mean(caplog: pytest.LogCaptureFixture) -> None:
    edges, y = np.array([[0, 1, 1, 2, 2], [1, 0, 2, 1, 2]]), [0, 1, 0]
    same = sg.from_arrays(edge_index=edges, edge_weight=[0.1, 0.1, 3, 3, 9], y=y)
    assert same.edge_weight is not None
    assert same.edge_weight.tolist() == [0.1, 0.1, 3, 3]
    assert not caplog.messages
    given = [1, 2, 3, 4, 9]
    found = []
    for order in ([0, 1, 2, 3, 4], [4, 1, 3, 2, 0]):
        weight = np.array(given)[order]
        found.append(sg.from_arrays(edge_index=edges[:, order], edge_weight=weight, y=y))
        assert found[-1].edge_weight is not None
        assert found[-1].edge_weight.tolist() == [1.5, 1.5, 3.5, 3.5]
    assert caplog.messages == 2 * [
        "graph: 2 edges listed with several weights, as in both directions: the mean counts (in "
        "runs with directed each direction has its own)"
    ]
    net: Any = nx.DiGraph()
    net.add_weighted_edges_from([(0, 1, 1.0), (1, 0, 2.0)])
    for node in net:
        net.nodes[node]["y"] = node
    mean = sg.from_networkx(net).edge_weight
    assert mean is not None
    assert mean.tolist() == [1.5, 1.5]


def test_weights_in_tables(
    work: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    lines = [f"{i},{i % 2},{i % 3}" for i in range(30)]
    Path("nodes.csv").write_text("\n".join(["id,label,f", *lines]) + "\n")
    edges = [f"{i},{(i * 7 + 1) % 30},{i / 10 if i % 3 else ''}" for i in range(30)]
    Path("edges.csv").write_text("\n".join(["source,target,cost", *edges]) + "\n")
    argv = ["run", ".", "--clients", "2", "--rounds", "1", "--hidden", "4"]
    assert run_app(argv) == 0
    assert caplog.messages == ["edges.csv: values of edges (cost) are not used"]
    assert "edge weights" not in capsys.readouterr().err
    assert run_app([*argv, "--columns", "weight=cost"]) == 0
    assert "edge weights are used by gcn" in capsys.readouterr().err
    assert len(caplog.messages) == 1
    assert run_app([*argv, "--columns", "weight=cost", "--edge-weights", "ignore"]) == 0
    assert caplog.messages[1:] == [
        "edge weights are not used (--edge-weights ignore); every edge counts 1"
    ]
    capsys.readouterr()
    graph = sg.from_csv(nodes="nodes.csv", edges="edges.csv", weight="cost")
    assert graph.edge_weight is not None
    pairs = zip(graph.edge_index.T.tolist(), graph.edge_weight.tolist(), strict=True)
    assert {tuple(pair): w for pair, w in pairs}[(0, 1)] == 1  # an empty cell
    Path("edges.csv").write_text("source,target,weight\n0,1,much\n")
    assert run_app(argv) == 2
    assert (
        "column 'weight': expected a weight from 0 to 3.4e38 (float32) or nothing, got 'much'"
        in (capsys.readouterr().err)
    )


def test_scaled_weights_have_mean_one_over_the_edges_that_clients_hold(graph: Graph) -> None:
    assert graph.edge_weight is not None
    found = go(graph, rounds=2, edge_weights="scale")
    assert found.cut is not None
    held = found.cut.graph.edge_weight
    assert held is not None
    mean = float(graph.edge_weight.mean())
    assert torch.allclose(held, graph.edge_weight / mean, rtol=1e-12)
    assert found.cut.fingerprint == fingerprint(graph)
    assert found.model is not None
    assert found.model.preprocessing.mean_edge_weight == pytest.approx(mean, rel=1e-12)
    # A factor of all weights, such as another currency, changes nothing.
    other = replace(graph, edge_weight=graph.edge_weight * 1024)
    assert rows_of(go(other, rounds=2, edge_weights="scale")) == rows_of(found)


def test_the_mean_does_not_depend_on_blocks(graph: Graph) -> None:
    runs = [go(graph, rounds=2, edge_weights="scale", block_size=size) for size in (1, 4)]
    assert same_bits(weights_of(runs[0]), weights_of(runs[1]))
    assert rows_of(runs[0]) == rows_of(runs[1])


def test_a_mean_is_of_the_training_data_in_predictions(graph: Graph, tmp_path: Path) -> None:
    """Edges of a file are divided by the mean of the run, not by their own."""
    model = go(graph, rounds=2, edge_weights="scale").model
    assert model is not None
    model.save(tmp_path / "model")
    back = sg.load_model(tmp_path / "model")
    mean = back.preprocessing.mean_edge_weight
    assert mean is not None
    assert graph.edge_weight is not None
    half = replace(graph, edge_weight=graph.edge_weight / 2)
    raw = replace(back.preprocessing, edge_weights="use", mean_edge_weight=None)
    by_hand = replace(back, preprocessing=raw)
    scaled = replace(half, edge_weight=half.edge_weight.double() / mean)  # type: ignore[union-attr]
    assert torch.equal(back.logits(half), by_hand.logits(scaled))
    for bad in (None, -1.0, float("inf")):
        other = replace(back.preprocessing, mean_edge_weight=bad)
        replace(back, preprocessing=other).save(tmp_path / "bad")
        with pytest.raises(DataError, match=r"^expected a model's shape in"):
            sg.load_model(tmp_path / "bad")


@pytest.mark.parametrize("use", ["log", "scale", "use", None])
def test_without_weights_every_rule_is_the_same(graph: Graph, use: Any) -> None:
    bare = replace(graph, edge_weight=None)
    result = go(bare, rounds=1, edge_weights=use)
    assert rows_of(result) == rows_of(go(bare, rounds=1, edge_weights="ignore"))
    assert result.config.edge_weights == "use"
    assert "statistics" not in result.ledger.bytes_by_kind


@pytest.mark.parametrize("use", ["log", "scale"])
def test_edges_without_weights_count_as_edges_of_weight_one(graph: Graph, use: Any) -> None:
    """So clients whose data have none are treated as those beside them that have weights."""
    assert graph.edge_weight is not None
    ones = replace(graph, edge_weight=torch.ones_like(graph.edge_weight))
    bare = replace(graph, edge_weight=None)
    used = [with_edges(each, use, 4.0).edge_weight for each in (ones, bare)]
    assert used[0] is not None
    assert used[1] is not None
    assert torch.equal(used[0], used[1])
    assert float(used[0][0]) == 0.25 if use == "scale" else 1.0


def test_by_default_logarithms_of_weights_are_used(graph: Graph) -> None:
    result = go(graph, rounds=1)
    assert result.config.edge_weights == "log"
    assert rows_of(result) == rows_of(go(graph, rounds=1, edge_weights="log"))


def test_raw_amounts_of_money_are_behind() -> None:
    """Amounts without signal make a weighted mean over neighbors noisy, least so by logarithm."""
    banks = bank_graph(2)
    own = {"method": "fedopt", "partition": "silo", "rounds": 20, "kernels": "torch"}
    options: dict[str, Any] = {name: v for name, v in FAST.items() if name != "clients"} | own
    auc = dict[str, float]()
    for use in ("use", "scale", "log"):
        scores = sg.run(banks, **options, metric="auc", edge_weights=use).val.server
        assert scores is not None
        assert scores.auc is not None
        auc[use] = scores.auc
    assert auc["use"] < auc["scale"]
    assert auc["use"] < auc["log"] - 0.01


def test_a_negative_weight_has_no_logarithm(graph: Graph) -> None:
    assert graph.edge_weight is not None
    below = replace(graph, edge_weight=graph.edge_weight - 1)
    line = r"^expected edge weights from 0 in .* with edge_weights=log, got -1: change these"
    with pytest.raises(DataError, match=line):
        go(below, rounds=1, edge_weights="log")


@pytest.mark.parametrize(
    ("factor", "use", "said"),
    [(1.0, "use", 0), (1000.0, "use", 1), (0.001, "use", 1), (1000.0, "log", 0)],
)
def test_weights_on_another_scale_than_self_loops_are_named(
    make_graph: MakeGraph, caplog: pytest.LogCaptureFixture, factor: float, use: str, said: int
) -> None:
    go(weighed(make_graph(60), factor), rounds=1, edge_weights=use)
    assert len(caplog.messages) == said
    assert all("set edge_weights=log or edge_weights=scale" in line for line in caplog.messages)
