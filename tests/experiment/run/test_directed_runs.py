"""Laws of runs along directions: simulation, folders, session, blocks, resume, predictions."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch_geometric.nn import SAGEConv

import silograph as sg
from runs import FAST, go, little_work, rows_of, same_bits, weights_of
from silograph.cli import run_app
from silograph.core.errors import ConfigError, DataError
from silograph.deploy.server_settings import ServerSettings
from silograph.experiment.run.predictions import predict_to
from silograph.graph.block.block import extended
from silograph.graph.graph import Graph, fingerprint, largest_component, subgraph, with_directions
from silograph.graph.silos.data import silo_fingerprint
from silograph.methods import METHODS
from silograph.nn.model import Model
from silograph.study.workers import read_graph, write_graph
from silos import config_of, federate, folders

MakeGraph = Callable[..., Graph]
LOCAL = [n for n, method in METHODS.items() if method.weighs_edges]
RATINGS = {"fedacs", "fedmf", "fedgnn", "fesog"}
WAYS = ("along", "against", "both")


def directed(graph: Graph, *, weighted: bool = True) -> Graph:
    """The graph with edges that go one way or both, by its nodes' places, and with weights."""
    row, column = graph.edge_index
    low, high = torch.minimum(row, column), torch.maximum(row, column)
    kind = (low * 5 + high * 3) % 3  # up, down, both ways
    is_listed = (kind == 2) | ((kind == 0) == (row < column))
    weight = ((row * 7 + column * 13) % 10 + 1).double() / 5
    weight = torch.where(is_listed, weight, -1.0)
    if not weighted:
        return replace(graph, directed_weight=is_listed.to(torch.int8) * 2 - 1)
    mean = torch.where(kind == 2, (weight + weight[graph.adj.by_column]) / 2, 0)
    mean = torch.where(kind == 2, mean, torch.maximum(weight, weight[graph.adj.by_column]))
    return replace(graph, edge_weight=mean, directed_weight=weight)


@pytest.fixture
def graph(make_graph: MakeGraph) -> Graph:
    return directed(make_graph(60))


def on_silos(folder: str, **options: Any) -> sg.Result:
    own = {name: value for name, value in FAST.items() if name != "clients"}
    return sg.run(folder, **own | {"partition": "silo"} | options)


@pytest.mark.law(sample=3)
@pytest.mark.parametrize("method", sorted({*METHODS} - RATINGS))
def test_a_method_reads_directions_or_refuses_them(
    graph: Graph, method: str, tmp_path: Path
) -> None:
    bare, out = replace(graph, directed_weight=None), str(tmp_path / "run")
    options: dict[str, Any] = {"method": method, **little_work(method), "edge_weights": "ignore"}
    plain = rows_of(go(bare, rounds=1, **options))
    assert rows_of(go(graph, rounds=1, **options)) == plain  # nobody has asked for directions
    if method in LOCAL:
        assert rows_of(go(graph, rounds=1, directed="along", **options)) != plain
        return
    line = f"^expected a method whose clients train on edges of their own for .*, got {method}, "
    with pytest.raises(ConfigError, match=line):
        go(graph, directed="along", out=out, **options)
    assert not Path(out).exists()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"model": "mlp"}, "layers sum over neighbors for directed=along, got model mlp: leave"),
        ({"neighbors": "ladies"}, "full or fanout for directed=along, got ladies, whose draws"),
    ],
)
def test_what_knows_no_directions_is_refused(graph: Graph, options: Any, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        go(graph, directed="along", edge_weights="ignore", **options)


def test_a_module_gets_edges_from_sources_to_targets(graph: Graph, work: Path) -> None:
    """So a module with PyG's layer is the layer along edges."""
    options: dict[str, Any] = {"rounds": 2, "collect": 1.0, "hidden": 128}
    for way in ("against", "both"):
        with pytest.raises(ConfigError, match=f"^expected directed=along for .*, got {way}$"):
            go(graph, model=Along, directed=way, **options)
    result = go(graph, model=Along, directed="along", out="run", **options)
    assert rows_of(result) != rows_of(go(graph, model=Along, **options))
    model = sg.load_model("run/model.safetensors", model=Along)
    assert result.model is not None
    expected = model.logits(graph)
    assert torch.equal(expected, result.model.logits(graph))
    layer = Model("sage", 7, 8, 3, 1, 0.0, "multiclass", directed="along")
    names = {"lin_l.weight": "0.weight", "lin_r.weight": "0.root", "lin_l.bias": "0.bias"}
    weights = {names[name.removeprefix("conv.")]: w.t() for name, w in model.weights.items()}
    same = replace(model, shape=layer, weights=weights).logits(graph)
    assert torch.allclose(same, expected, atol=1e-12)
    with pytest.raises(DataError, match=r"^expected edges with directions in planted"):
        model.logits(replace(graph, directed_weight=None))


class Along(torch.nn.Module):
    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()
        self.conv = SAGEConv(features, outputs)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.conv(x, edge_index)
        return out


def test_a_graph_without_directions_is_refused(make_graph: MakeGraph, work: Path) -> None:
    line = "^expected edges with directions in planted, got none: leave directed out, or list each"
    with pytest.raises(DataError, match=line):
        go(make_graph(), directed="along")
    ones = torch.ones(make_graph().adj.nnz, dtype=torch.int8)
    with pytest.raises(DataError, match="got edges that all go both ways: leave directed out"):
        go(replace(make_graph(), directed_weight=ones), directed="along")
    cut = go(make_graph(), rounds=1).cut
    assert cut is not None
    with pytest.raises(DataError, match=line):
        sg.write_silos("silos", make_graph(), cut.partition, cut.split, directed=True)
    assert not Path("silos").exists()
    sg.write_silos("silos", make_graph(), cut.partition, cut.split)
    line = r"^expected edges with directions in silo client_00, .*: write directed = true in its"
    with pytest.raises(DataError, match=line):
        on_silos("silos", directed="both")


@pytest.mark.law(sample=24)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"directed": "along", "collect": 1.0},
        {"directed": "against", "collect": 0.5, "model": "gat"},
        {"directed": "both", "edge_weights": "scale"},
        {"directed": "both", "collect": 1.0, "edge_weights": "scale", "batch_size": 5},
        {"directed": "both", "method": "centralized"},
        {"directed": "none", "collect": 1.0},
    ],
)
def test_a_run_on_exported_folders_is_the_run_on_the_cut(
    make_graph: MakeGraph, work: Path, options: dict[str, Any], weighted: bool
) -> None:
    graph = directed(make_graph(60), weighted=weighted)
    if not weighted and "edge_weights" in options:
        options = options | {"edge_weights": "use"}
    theirs = go(graph, rounds=2, **options)
    assert theirs.cut is not None
    for form in ("csv", "npz"):
        sg.write_silos(
            form, graph, theirs.cut.partition, theirs.cut.split, format=form, directed=True
        )
        ours = on_silos(form, rounds=2, **options)
        assert rows_of(ours) == rows_of(theirs)
        assert same_bits(weights_of(ours), weights_of(theirs))
        assert ours.test.uncut == theirs.test.uncut
        silo = sg.read_silos(form).members[0]
        assert silo.directed_weight is not None
        assert silo.weighted is weighted


def test_directed_folders_without_directed_runs_are_as_undirected_ones(
    graph: Graph, work: Path
) -> None:
    cut = go(graph, rounds=1).cut
    assert cut is not None
    sg.write_silos("plain", graph, cut.partition, cut.split)
    sg.write_silos("directed", graph, cut.partition, cut.split, directed=True)
    assert "direction" not in Path("plain/client_00/cross_edges.csv").read_text()
    runs = [on_silos(name, rounds=2, collect=1.0) for name in ("plain", "directed")]
    assert rows_of(runs[0]) == rows_of(runs[1])
    assert same_bits(weights_of(runs[0]), weights_of(runs[1]))
    prints = [silo_fingerprint(sg.read_silos(n).members[0]) for n in ("plain", "directed")]
    assert prints[0] != prints[1]  # a silo's state is of its directions, too


def test_silos_that_disagree_on_a_direction(graph: Graph, work: Path) -> None:
    cut = go(graph, rounds=1).cut
    assert cut is not None
    sg.write_silos("silos", graph, cut.partition, cut.split, directed=True)
    table = Path("silos/client_01/cross_edges.csv")
    head, *lines = table.read_text().splitlines()
    assert head == "own,silo,remote,direction,weight"
    ends = [line.split(",")[:3] for line in lines]
    one_way = next(i for i, edge in enumerate(ends) if ends.count(edge) == 1)
    first = lines.pop(one_way)
    cells = first.split(",")
    turned = ",".join([*cells[:3], "in" if cells[3] == "out" else "out", cells[4]])
    table.write_text("\n".join([head, turned, *lines]) + "\n")
    line = r"it in cross_edges .*, too, with directed = true and direction (in|out) with weight "
    with pytest.raises(DataError, match=line):
        on_silos("silos", directed="along")
    for wrong, line in (
        ([head, first.replace(",out,", ",up,").replace(",in,", ",up,")], "expected out or in, got"),
        (["own,silo,remote,weight", ",".join(cells[:3] + cells[4:])], "'direction'"),
        ([head, first, first], "expected an edge not yet on line 2"),
    ):
        table.write_text("\n".join(wrong) + "\n")
        with pytest.raises(DataError, match=line):
            sg.read_silo("silos/client_01")


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("options", [{}, {"collect": 1.0, "model": "gat"}, {"batch_size": 4}])
def test_blocks_of_any_size_have_the_same_bits(graph: Graph, options: dict[str, Any]) -> None:
    runs = [go(graph, rounds=2, directed="both", block_size=size, **options) for size in (1, 3, 4)]
    for run in runs[1:]:
        assert same_bits(weights_of(run), weights_of(runs[0]))
        assert rows_of(run) == rows_of(runs[0])


def test_a_run_is_resumed(graph: Graph, tmp_path: Path) -> None:
    out = tmp_path / "run"
    whole = go(graph, rounds=3, directed="both", out=str(out))
    (out / "result.json").unlink()
    sorted((out / "checkpoints").iterdir())[-1].unlink()
    resumed = sg.resume(out, graph=graph)
    assert same_bits(weights_of(resumed), weights_of(whole))
    assert resumed.config.directed == "both"


def test_against_the_reversed_graph_is_along_the_graph(graph: Graph) -> None:
    assert graph.directed_weight is not None
    turned = replace(graph, directed_weight=graph.directed_weight[graph.adj.by_column])
    runs = [go(graph, directed="along", collect=1.0), go(turned, directed="against", collect=1.0)]
    assert same_bits(weights_of(runs[0]), weights_of(runs[1]))
    assert rows_of(runs[0]) == rows_of(runs[1])


def test_a_saved_model_reads_directions(graph: Graph, work: Path) -> None:
    result = go(graph, rounds=2, directed="along", out="run")
    model = result.model
    assert model is not None
    assert result.cut is not None
    back = sg.load_model("run/model.safetensors")
    assert torch.equal(back.logits(graph), model.logits(graph))
    assert graph.directed_weight is not None
    turned = replace(graph, directed_weight=graph.directed_weight[graph.adj.by_column])
    assert not torch.equal(back.logits(turned), model.logits(graph))
    line = "^expected edges with directions in planted, got none: leave directed out"
    with pytest.raises(DataError, match=line):
        back.logits(replace(graph, directed_weight=None))
    sg.write_silos("silos", graph, result.cut.partition, result.cut.split, directed=True)
    silo = sg.read_silo("silos/client_00")
    nodes = result.cut.partition.nodes[0]
    assert torch.allclose(back.logits(silo), back.logits(subgraph(graph, nodes)), atol=1e-12)
    assert predict_to("run", "silos/client_00", "p.csv") == len(silo.y)
    # A version of silograph that knows no directions does not load it.
    model.save("model")
    with safe_open("model", framework="pt") as file:
        saved = json.loads(file.metadata()["silograph model 1"])
    assert saved["preprocessing"]["version"] == 3
    plain = go(graph, rounds=1).model
    assert plain is not None
    assert "directed" not in plain.shape.described()


def test_parts_of_a_graph_keep_their_directions(graph: Graph, tmp_path: Path) -> None:
    nodes = torch.randperm(graph.num_nodes, generator=torch.Generator().manual_seed(0))
    first, second = (with_directions(g).weighted_adj for g in (graph, subgraph(graph, nodes)))
    for column in (0, 1):
        dense = []
        for adj in (first, second):
            assert adj.values is not None
            dense.append(adj.with_values(adj.values[:, column]).scipy().toarray())
        order = nodes.numpy()
        assert np.array_equal(dense[0][np.ix_(order, order)], dense[1], equal_nan=True)
    part = largest_component(graph)
    assert part.directed_weight is not None
    assert len(part.directed_weight) == part.adj.nnz
    write_graph(tmp_path / "g.npz", graph)
    again = read_graph(tmp_path / "g.npz")
    assert fingerprint(with_directions(again)) == fingerprint(with_directions(graph))
    bare = replace(graph, directed_weight=None)
    assert fingerprint(graph) == fingerprint(bare)  # runs that read no directions
    assert fingerprint(with_directions(graph)) != fingerprint(bare)


@pytest.mark.law(sample=24)
@pytest.mark.parametrize("way", ["along", "both"])
@pytest.mark.parametrize("weighted", [True, False])
def test_a_session_has_the_bits_of_a_simulation(
    make_graph: MakeGraph, tmp_path: Path, way: str, weighted: bool
) -> None:
    pytest.importorskip("grpc")
    pytest.importorskip("cryptography")
    graph = directed(make_graph(90), weighted=weighted)
    config = config_of(
        3,
        partition="random",
        split="0.4/0.3/0.3",
        rounds=2,
        hidden=8,
        model="gcn",
        directed=way,
        collect=0.5,
        edge_weights="scale" if weighted else None,
    )
    silos = folders(graph, config, tmp_path / "silos")
    settings = ServerSettings("127.0.0.1:0", seconds=60, insecure=True)
    settings = replace(settings, silos=tuple(silo.name for silo in silos))
    silo_lines = list[str]()
    out = str(tmp_path / "run")
    ours = federate(silos, replace(config, out=out), settings, silo_lines=silo_lines, keep=True)
    theirs = sg.run(graph, config=config, block_size=1)
    assert same_bits(weights_of(ours), weights_of(theirs))
    assert ours.test.server == theirs.test.server
    lines = [[r.to_line() for r in result.ledger.since(0)] for result in (ours, theirs)]
    assert lines[0] == lines[1]
    results = [Path(line.partition(" are in ")[2]) for line in silo_lines if " are in " in line]
    assert len(results) == len(silos)
    assert theirs.model is not None
    for folder in results:
        own = sg.load_model(folder / "model.safetensors")
        assert torch.equal(own.logits(graph), theirs.model.logits(graph))


def test_silos_refuse_a_run_along_directions_that_they_do_not_have(
    make_graph: MakeGraph, tmp_path: Path
) -> None:
    pytest.importorskip("grpc")
    pytest.importorskip("cryptography")
    config = config_of(2, partition="random", split="0.4/0.3/0.3", rounds=1, hidden=8, model="gcn")
    silos = folders(make_graph(60), config, tmp_path / "silos")
    settings = ServerSettings("127.0.0.1:0", seconds=60, insecure=True)
    settings = replace(settings, silos=tuple(silo.name for silo in silos))
    config = replace(config, directed="along", out=str(tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"edges with directions in silo client_0., got edges wi"):
        federate(silos, config, settings)


def test_commands_keep_directions(graph: Graph, work: Path) -> None:
    edges = graph.edge_index.T[with_directions(graph).edge_weight[:, 0] > 0].tolist()  # type: ignore[index]
    lines = [f"{a},{b}" for a, b in edges]
    Path("t").mkdir()
    Path("t/edges.csv").write_text("\n".join(["source,target", *lines]) + "\n")
    nodes = [f"{i},{int(graph.y[i])},{i % 5}" for i in range(graph.num_nodes)]
    Path("t/nodes.csv").write_text("\n".join(["id,label,f", *nodes]) + "\n")
    same = ["--clients", "2", "--partition", "random", "--directed", "both"]
    assert run_app(["export-silos", "t", *same, "--out", "silos"]) == 0
    assert "directed = true" in Path("silos/client_00/silo.toml").read_text()
    few = ["--rounds", "1", "--hidden", "4", "--quiet", "--directed", "both"]
    assert run_app(["run", "silos", "--split", "public", *few, "--out", "ours"]) == 0
    assert run_app(["run", "t", *same, *few, "--out", "theirs"]) == 0
    models = [sg.load_model(f"{name}/model.safetensors").weights for name in ("ours", "theirs")]
    assert same_bits(*models)
    assert run_app(["predict", "theirs", "--data", "t", "--out", "p.csv"]) == 0


def test_labels_of_sources_are_learned_along_edges_only() -> None:
    """A node's label is the most frequent kind among the sources of edges that lead to it."""
    draws = np.random.default_rng(0)
    n, kinds = 400, 3
    kind = draws.integers(0, kinds, n)
    source, target = np.repeat(np.arange(n), 4), draws.integers(0, n, 4 * n)
    x = np.eye(kinds)[kind]
    votes = np.zeros((n, kinds))
    np.add.at(votes, target, x[source])
    graph = sg.from_arrays(edge_index=[source, target], x=x, y=votes.argmax(1))
    options: dict[str, Any] = {"model": "sage", "rounds": 40, "hidden": 16, "collect": 1.0}
    accuracy = {}
    for way in ("none", *WAYS):
        scores = go(graph, directed=way, **options).test.server
        assert scores is not None
        assert scores.accuracy is not None
        accuracy[way] = scores.accuracy
    assert min(accuracy["along"], accuracy["both"]) > 0.9
    assert max(accuracy["none"], accuracy["against"]) < 0.7


@pytest.mark.parametrize("edges", [[[], []], [[0, 1], [1, 0]]])
def test_a_model_predicts_on_few_nodes_whose_edges_happen_to_be_symmetric(
    graph: Graph, edges: list[list[int]]
) -> None:
    """New nodes may have no edges at all."""
    model = go(graph, rounds=1, directed="along").model
    assert model is not None
    x = graph.x[:3] if isinstance(graph.x, torch.Tensor) else graph.x
    few = sg.from_arrays(edge_index=np.array(edges, dtype=np.int64), x=x, y=[0, 1, 2])
    assert not few.is_directed
    assert len(model.predict(few)) == 3


def test_collected_neighbors_see_edges_the_other_way_round(graph: Graph, cut_block: Any) -> None:
    """The two ends of each edge agree on its weights, and an own row keeps those of its halo."""
    block = cut_block(with_directions(graph), 3)[0]
    slots = torch.arange(len(block.halo.key))
    features = torch.zeros(len(slots), block.num_features, dtype=block.x.dtype)
    larger = extended(block, slots, block.halo.off, features)
    assert len(larger.row_key) == len(block.row_key) + len(slots)
    values, order = larger.adj.values, larger.adj.by_column
    assert values is not None
    torch.testing.assert_close(values, values[order].flip(1), rtol=0, atol=0, equal_nan=True)
    assert block.adj.values is not None
    assert block.halo.adj.values is not None
    halo = block.halo.adj.values
    expected = torch.cat([block.adj.values, halo, halo.flip(1)])
    assert sorted(values.nan_to_num(-1).tolist()) == sorted(expected.nan_to_num(-1).tolist())
