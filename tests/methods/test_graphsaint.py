"""GraphSAINT as a method: what a step computes, and that runs repeat."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import silograph as sg
from mistakes import raises_code
from runs import files_of, run_until
from silograph.core.errors import ConfigError, DataError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.exchange.passes import gradients
from silograph.experiment.run.setup import Setup
from silograph.federation.in_process import InProcess
from silograph.graph.block.block import ClientBlock, Route, make_block, whole
from silograph.graph.graph import Graph
from silograph.graph.partition.split import draw_split
from silograph.methods.base import MethodConfig
from silograph.methods.graphsaint import (
    GRAPHSAINT,
    GraphSAINTOptions,
    draw,
    draw_subgraph,
    presample,
)
from silograph.nn.fit import Schedule
from silograph.nn.model import Model
from silograph.nn.optim import Adam
from silograph.task.counts import node_loss

KEY = Key.of(5)
STEPS = 20
CONVS = ("gcn", "graphconv", "gin", "sage", "appnp", "mlp")
SMALL: dict[str, dict[str, Any]] = {
    "node": {"sampler": "node", "budget": 15, "sample_coverage": 5},
    "edge": {"sampler": "edge", "budget": 10, "sample_coverage": 5},
    "walk": {"sampler": "walk", "budget": 6, "sample_coverage": 5},
}
RUN: dict[str, Any] = {
    "method": "graphsaint",
    "clients": 4,
    "partition": "random",
    "rounds": 3,
    "hidden": 8,
    "dtype": "float64",
}
Blocks = tuple[ClientBlock, Route]


def model_of(conv: str, **other: object) -> Model:
    own: dict[str, object] = {"layers": 3, "dropout": 0.4, "hops": 3, "teleport": 0.1} | other
    return Model(conv, 7, 6, outputs=3, task="multiclass", **own)  # type: ignore[arg-type]


def config_of(model: Model, **options: object) -> MethodConfig:
    own = GraphSAINTOptions(**options)  # type: ignore[arg-type]
    return MethodConfig(model, Adam(0.01, weight_decay=5e-4), Schedule(1), True, 1.0, own)


def uncut(graph: Graph) -> Blocks:
    cut = whole(graph)
    split = draw_split(graph, cut, ratios=(0.4, 0.3, 0.3), key=Key.of(1))
    return make_block(graph, cut, split, torch.float64)


def train(
    built: Blocks, cfg: MethodConfig, size: int = 1, rounds: int = STEPS
) -> tuple[list[float | None], dict[str, Tensor]]:
    fed = InProcess(cfg, *built, size)
    state = GRAPHSAINT.init(fed, cfg, cfg.model.init_weights(Key.of(2), torch.float64), KEY)
    losses = []
    for t in range(1, rounds + 1):
        state, report = GRAPHSAINT.round(fed, cfg, state, t, KEY)
        losses.append(report.train_loss)
    assert state.weights is not None
    return losses, state.weights


@pytest.mark.law(sample=24)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("conv", CONVS)
def test_subgraphs_of_all_nodes_are_centralized_training(
    make_graph: Callable[..., Graph], conv: str, normalize: bool
) -> None:
    """Autograd and torch's Adam on the whole graph: every norm is 1 then."""
    block, route = uncut(make_graph(30, sparse=normalize))
    cfg = config_of(model_of(conv), sampler="node", budget=2000, steps=1, normalize=normalize)
    assert isinstance(cfg.model, Model)
    start = cfg.model.init_weights(Key.of(2), torch.float64)
    weights = {name: w.clone().requires_grad_() for name, w in start.items()}
    adam = torch.optim.Adam(weights.values(), lr=0.01, weight_decay=5e-4)
    rows, expected = block.split.train, []
    for t in range(1, STEPS + 1):
        step = KEY.fold("train", t, "epoch", 0, "batch", 0)
        assert len(draw_subgraph(block, cfg.options, step)) == 30
        adam.zero_grad()
        logits = cfg.model.forward(weights, block, step)
        loss = node_loss(logits[rows], block.y[rows], cfg.model.task).mean()
        loss.backward()
        adam.step()
        expected.append(float(loss.detach()))
    losses, ours = train((block, route), cfg)
    assert losses == pytest.approx(expected, rel=0, abs=1e-10)
    for name, w in weights.items():
        torch.testing.assert_close(ours[name], w.detach(), rtol=0, atol=1e-10)


def dense_loss(
    block: ClientBlock, fed: InProcess, model: Model, weights: dict[str, Tensor]
) -> Tensor:
    """Loss of a drawn subgraph, message by message: the oracle of the way back."""
    state = fed.states()[0]
    n, rows = len(block.row_key), state["pass/rows"].t
    number, nodes, edges = (state[f"saint/{x}"].t.double() for x in ("subgraphs", "nodes", "edges"))
    taken = torch.zeros(n).double()
    taken[rows] = 1
    degree = block.adj.degree.double()[:, None]
    v, u = block.adj.row, block.adj.indices.long()
    weight = torch.zeros(n, n).double()
    weight[v, u] = (nodes[v] + 1) / (edges + 1) * taken[v] * taken[u]
    if model.conv == "gcn":
        weight = (weight + torch.diag(taken)) / ((degree + 1) * (degree.T + 1)).sqrt()
    if model.conv == "sage":
        weight = weight / degree.clamp(min=1)
    assert isinstance(block.x, Tensor)
    h = block.x
    for layer in range(model.layers):
        own = weights[f"{layer}.root"] if model.conv == "sage" else torch.zeros(1).double()
        mine = h @ own if model.conv == "sage" else own
        h = weight @ (h @ weights[f"{layer}.weight"]) + mine + weights[f"{layer}.bias"]
        h = torch.relu(h) if layer < model.layers - 1 else h
    train_rows = block.split.train & (taken > 0)
    losses = node_loss(h[train_rows], block.y[train_rows], "multiclass")
    return (losses * (number + 1) / (nodes[train_rows] + 1)).sum() / block.split.train.sum()


@pytest.mark.parametrize("sampler", SMALL)
@pytest.mark.parametrize("conv", ["gcn", "sage"])
def test_a_step_is_autograd_of_the_weighed_loss(
    make_graph: Callable[..., Graph], conv: str, sampler: str
) -> None:
    built = uncut(make_graph(40))
    model = model_of(conv, dropout=0.0)
    cfg = config_of(model, **SMALL[sampler])
    weights = model.init_weights(KEY, torch.float64)
    fed = InProcess(cfg, *built, 1)
    fed.call(presample, {}, what=Kind.STATISTICS, key=KEY)
    fed.call(draw, {}, what=Kind.CONTROL, key=KEY)
    assert len(fed.states()[0]["pass/rows"].t) < 30
    leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
    expected = dense_loss(built[0], fed, model, leaves)
    grads, loss = gradients(fed, model, weights, KEY, weighed=True)
    assert loss == pytest.approx(float(expected.detach()), abs=1e-12)
    for name, g in zip(leaves, torch.autograd.grad(expected, list(leaves.values())), strict=True):
        torch.testing.assert_close(grads[name], g, rtol=0, atol=1e-12)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("conv", ["appnp", "gin"])
@pytest.mark.parametrize("sampler", SMALL)
def test_several_clients_each_draw_from_their_own_graph(
    make_graph: Callable[..., Graph], cut_block: Callable[..., Blocks], conv: str, sampler: str
) -> None:
    """Not what the method is for, but its ops are those of any block."""
    built = cut_block(make_graph(60, sparse=True), 3)
    cfg = config_of(model_of(conv), **SMALL[sampler])
    one, wanted = train(built, cfg, 1, rounds=4)
    for size in (2, 3):
        losses, weights = train(built, cfg, size, rounds=4)
        assert losses == pytest.approx(one, rel=0, abs=1e-10)
        for name, w in wanted.items():
            torch.testing.assert_close(weights[name], w, rtol=0, atol=1e-10)


def test_without_a_drawn_training_node_there_is_no_step(
    make_graph: Callable[..., Graph],
) -> None:
    block, route = uncut(make_graph(30))
    cfg = config_of(model_of("gcn"), sampler="node", budget=1, steps=1, sample_coverage=1)
    fed = InProcess(cfg, block, route, 1)
    state = GRAPHSAINT.init(fed, cfg, cfg.model.init_weights(Key.of(2), torch.float64), KEY)
    seen = set()
    for t in range(1, 20):
        new, report = GRAPHSAINT.round(fed, cfg, state, t, KEY)
        assert new.weights is not None
        assert state.weights is not None
        stays = all(torch.equal(w, new.weights[name]) for name, w in state.weights.items())
        drawn = draw_subgraph(block, cfg.options, KEY.fold("train", t, "epoch", 0, "batch", 0))
        assert stays == (report.train_loss is None) == (not block.split.train[drawn].any())
        seen.add(stays)
        state = new
    assert seen == {False, True}


def test_a_round_takes_the_steps_of_its_passes(make_graph: Callable[..., Graph]) -> None:
    """As many as subgraphs have nodes of the graph, or as many as are asked for."""
    for options, local_epochs in (({}, 1), ({}, 2), ({"steps": 3}, 2)):
        cfg = config_of(model_of("gcn"), **SMALL["walk"] | options)
        cfg = replace(cfg, schedule=Schedule(local_epochs))
        fed = InProcess(cfg, *uncut(make_graph(60)), 1)
        state = GRAPHSAINT.init(fed, cfg, cfg.model.init_weights(KEY, torch.float64), KEY)
        GRAPHSAINT.round(fed, cfg, state, 1, KEY)
        taken = sum(r.op == "draw" and r.direction == "down" for r in fed.ledger.records)
        counts = fed.states()[0]
        mean = float(counts["saint/nodes"].t.sum() / counts["saint/subgraphs"].t)
        assert taken == local_epochs * (options.get("steps") or round(60 / mean))
        assert taken > 3


@pytest.mark.law(sample=6)
@pytest.mark.parametrize(
    ("options", "ahead"),
    [
        ({}, True),
        ({"steps": 2}, True),
        ({"normalize": False}, True),
        ({"steps": 2, "normalize": False}, False),
    ],
)
def test_subgraphs_are_drawn_ahead_where_anything_is_read_off_them(
    make_graph: Callable[..., Graph], options: dict[str, Any], ahead: bool
) -> None:
    cfg = config_of(model_of("gcn"), **SMALL["walk"] | options)
    fed = InProcess(cfg, *uncut(make_graph(60)), 1)
    state = GRAPHSAINT.init(fed, cfg, cfg.model.init_weights(KEY, torch.float64), KEY)
    assert any(record.op == "presample" for record in fed.ledger.records) == ahead
    _, report = GRAPHSAINT.round(fed, cfg, state, 1, KEY)
    assert report.train_loss is not None


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("sampler", SMALL)
def test_a_run_is_judged_on_the_whole_graph_and_resumes_its_bits(
    make_graph: Callable[..., Graph],
    setups: list[Setup],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sampler: str,
) -> None:
    run: dict[str, Any] = RUN | {"options": SMALL[sampler]}
    result = sg.run(make_graph(60), **run, out=str(tmp_path / "whole"))
    run_until(monkeypatch, make_graph(60), 2, tmp_path / "cut", **run)
    sg.resume(tmp_path / "cut", graph=make_graph(60))
    assert files_of(tmp_path / "cut") == files_of(tmp_path / "whole")
    server, uncut_view = result.test.server, result.test.uncut
    assert server is not None
    assert uncut_view is not None
    assert (server.accuracy, result.test.personalized) == (uncut_view.accuracy, server)
    assert server.loss == pytest.approx(uncut_view.loss, abs=1e-12)
    assert setups[0].federation.ids == ("uncut",)
    (state,) = setups[0].federation.states()
    assert not any(name.startswith("pass/") for name in state)


@pytest.mark.parametrize("options", [{"participation": 0.5}, {"batch_size": 4}, {"fanout": "3,3"}])
def test_steps_that_are_not_those_of_subgraphs(
    make_graph: Callable[..., Graph], options: dict[str, Any]
) -> None:
    with raises_code(ConfigError, "conflicting-options", options=["method", *options]):
        sg.run(make_graph(40), **RUN | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": "edges"}, "sampler: input should be 'node', 'edge' or 'walk', got 'edges'"),
        ({"budget": 0}, "budget: input should be greater than or equal to 1, got 0"),
        ({"walk_length": 0}, "walk_length: input should be greater than or equal to 1, got 0"),
        ({"steps": 0}, "steps: input should be greater than or equal to 1, got 0"),
        ({"sample_coverage": 0}, "sample_coverage: input should be greater than or equal to 1"),
        ({"sizes": 5}, "option sizes: method graphsaint, .* no such option"),
    ],
)
def test_options_out_of_range(
    make_graph: Callable[..., Graph], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        sg.run(make_graph(40), **RUN | {"options": options})


def test_models_and_graphs_that_do_not_go(make_graph: Callable[..., Graph]) -> None:
    with pytest.raises(ConfigError, match="expected a model whose sums can be shared, got GAT: "):
        sg.run(make_graph(40), **RUN, model="gat")
    graph = make_graph(40)
    lonely = replace(graph, adj=graph.adj.select_rows(torch.arange(0)))
    empty = replace(lonely.adj, indptr=torch.zeros(41, dtype=torch.int32))
    with pytest.raises(DataError, match="edges to draw from at every client, got none at uncut"):
        sg.run(replace(graph, adj=empty), **RUN | {"options": SMALL["edge"]})
