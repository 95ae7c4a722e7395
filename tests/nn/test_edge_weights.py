"""Laws of weighted edges in convolutions: PyG's layers, invariances, and weights of 1."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.nn import APPNP, GCNConv, GraphConv

import silograph as sg
from layers import model_of
from runs import weights_of
from silograph.core.key import Key
from silograph.graph.block.block import ClientBlock, make_block, whole
from silograph.graph.graph import Graph, Split
from silograph.nn.backends import COMPILED
from silograph.nn.forward import forward_pass
from silograph.nn.mini_batches import FULL, Fanout, Neighbors, sampled_pass

NODES = 30


def weighted(scale: float = 1.0, *, zeros: bool = False) -> Graph:
    """A graph with weights from 0.1 to 3, some of them 0 if asked for."""
    draws = np.random.default_rng(3)
    pairs = np.array([(a, b) for a in range(NODES) for b in range(a) if (7 * a + b) % 5 == 0]).T
    weight = np.asarray(draws.uniform(0.1, 3, pairs.shape[1])) * scale
    weight = np.where(np.arange(len(weight)) % 4 == 0, 0 if zeros else weight, weight)
    x, y = draws.normal(size=(NODES, 7)), draws.integers(0, 3, NODES)
    return sg.from_arrays(edge_index=pairs, edge_weight=weight, x=x, y=y)


def block_of(graph: Graph) -> ClientBlock:
    none = torch.zeros(graph.num_nodes, dtype=torch.bool)
    return make_block(graph, whole(graph), Split(~none, none, none), torch.float64)[0]


def gcn(x: Tensor, edges: Tensor, weight: Tensor, w: dict[str, Tensor]) -> Tensor:
    conv = GCNConv(7, 3).double()
    conv.lin.weight, conv.bias = (torch.nn.Parameter(t) for t in (w["0.weight"].T, w["0.bias"]))
    return _called(conv, x, edges, weight)


def graphconv(x: Tensor, edges: Tensor, weight: Tensor, w: dict[str, Tensor]) -> Tensor:
    conv = GraphConv(7, 3).double()
    conv.lin_rel.weight = torch.nn.Parameter(w["0.weight"].T)
    conv.lin_rel.bias = torch.nn.Parameter(w["0.bias"])
    conv.lin_root.weight = torch.nn.Parameter(w["0.root"].T)
    return _called(conv, x, edges, weight)


def appnp(x: Tensor, edges: Tensor, weight: Tensor, w: dict[str, Tensor]) -> Tensor:
    return _called(APPNP(K=3, alpha=0.2), x @ w["0.weight"] + w["0.bias"], edges, weight)


def _called(conv: torch.nn.Module, x: Tensor, edges: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = conv(x, edges, weight)
    return out


Oracle = Callable[[Tensor, Tensor, Tensor, dict[str, Tensor]], Tensor]
ORACLES: dict[str, Oracle] = {"gcn": gcn, "graphconv": graphconv, "appnp": appnp}


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("name", ORACLES)
def test_the_layers_are_those_of_pyg(name: str, zeros: bool) -> None:
    """Outputs, and gradients of features, to 1e-10; weights' gradients follow by linearity."""
    graph = weighted(zeros=zeros)
    assert graph.edge_weight is not None
    block, model = block_of(graph), model_of(name, layers=1)
    weights = model.init_weights(Key.of(1), torch.float64)
    inputs = [torch.as_tensor(block.x).clone().requires_grad_() for _ in range(2)]
    theirs = ORACLES[name](inputs[0], graph.edge_index, graph.edge_weight, weights)
    shown = replace(block, x=inputs[1])
    ours = model.forward(weights, shown)
    assert torch.allclose(ours, theirs, atol=1e-10, rtol=0)
    pull = torch.arange(3 * NODES).double().view(NODES, 3).sin()
    pairs = zip((theirs, ours), inputs, strict=True)
    grads = [torch.autograd.grad((out * pull).sum(), x)[0] for out, x in pairs]
    assert torch.allclose(grads[0], grads[1], atol=1e-10, rtol=0)
    if model.stages[0].conv.kernel and name != "appnp":
        assert torch.allclose(COMPILED.predict(model, weights, block), theirs, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", ORACLES)
def test_weights_of_one_are_no_weights(name: str) -> None:
    """Bit for bit, also where they are there."""
    graph = weighted()
    assert graph.edge_weight is not None
    plain = replace(graph, edge_weight=None)
    ones = replace(graph, edge_weight=torch.ones_like(graph.edge_weight))
    model = model_of(name)
    weights = model.init_weights(Key.of(1), torch.float64)
    found = [model.forward(weights, block_of(each)) for each in (plain, ones, graph)]
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0], found[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_degrees_are_sums_of_weights_in_every_part_of_a_block(dtype: torch.dtype) -> None:
    graph = replace(weighted(), silo=torch.arange(NODES) % 3, silo_names=("a", "b", "c"))
    cut = sg.make_partition(graph, "silo", clients=None, key=Key.of(0))
    none = torch.zeros(NODES, dtype=torch.bool)
    block = make_block(graph, cut, Split(none, none, none))[0].to("cpu", dtype)
    for part in (block, block.called(torch.tensor([2, 0])), block.take(torch.tensor([1]))):
        assert part.adj.values is not None
        dense = torch.zeros(part.adj.num_rows, dtype=torch.float64)
        dense.index_add_(0, part.adj.row, part.adj.values.double())
        assert torch.allclose(part.adj.weighted_degree.double(), dense, rtol=1e-6)
        assert part.adj.weighted_degree.dtype is dtype
    plain = replace(graph, edge_weight=None)
    bare = make_block(plain, cut, Split(none, none, none))[0].to("cpu", dtype)
    assert torch.equal(bare.adj.weighted_degree, bare.adj.degree.to(dtype))


def test_scales() -> None:
    """Twice the weights are twice GraphConv's sum; GCN forgets the scale of very large ones."""
    conv = model_of("graphconv", layers=1)
    weights = conv.init_weights(Key.of(1), torch.float64)
    alone = weights | {name: torch.zeros_like(weights[name]) for name in ("0.root", "0.bias")}
    sums = [conv.forward(alone, block_of(weighted(scale))) for scale in (1.0, 2.0)]
    assert torch.allclose(2 * sums[0], sums[1], atol=1e-12)
    model = model_of("gcn", layers=1)
    weights = model.init_weights(Key.of(1), torch.float64)
    found = [model.forward(weights, block_of(weighted(scale))) for scale in (1.0, 1e9, 2e9)]
    assert torch.allclose(found[1], found[2], atol=1e-6)
    assert not torch.allclose(found[0], found[1], atol=1e-2)


@pytest.mark.law(sample=3)
@pytest.mark.parametrize("name", ORACLES)
def test_drawn_edges_keep_their_weights(name: str) -> None:
    """All neighbors give the whole pass; few are right on the mean over many draws."""
    model, block = model_of(name, layers=1, dropout=0.0), block_of(weighted())
    weights = model.init_weights(Key.of(1), torch.float64)
    seeds, off = torch.arange(NODES), torch.tensor([0, NODES])
    sums = [stage.conv.sums for stage in model.stages]
    whole_pass = model.forward(weights, block)
    x = torch.as_tensor(block.x)

    def drawn(neighbors: Neighbors, key: Key) -> Tensor:
        inputs = sampled_pass(block, x, seeds, off, neighbors, key, sums, {})[0]
        return forward_pass(model, weights, inputs, None)

    assert torch.allclose(drawn(FULL, Key.of(0)), whole_pass, atol=1e-12)
    if name != "appnp":
        many = torch.stack([drawn(Fanout((2,)), Key.of(k)) for k in range(1000)])
        error = many.std(0) / 1000**0.5
        assert bool(((many.mean(0) - whole_pass).abs() <= 5 * error + 1e-12).all())


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("name", ["gcn", "graphconv"])
@pytest.mark.parametrize("more", [{}, {"batch_size": 4}, {"batch_size": 4, "fanout": "2,2"}])
def test_both_backends_agree(name: str, more: dict[str, Any]) -> None:
    options: dict[str, Any] = {
        "clients": 3,
        "partition": "random",
        "rounds": 3,
        "hidden": 8,
        "dtype": "float64",
    }
    runs = [
        sg.run(weighted(zeros=True), model=name, method="fedavg", kernels=kernels, **options | more)
        for kernels in ("torch", "compiled")
    ]
    ours, theirs = (weights_of(run) for run in runs)
    assert ours is not None
    assert theirs is not None
    for key, w in ours.items():
        assert torch.allclose(theirs[key], w, atol=1e-10, rtol=0)
