"""Laws of layers along directions: dense formulas, PyG's DirGNNConv, reversal, symmetric graphs."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.nn import DirGNNConv, SAGEConv

import silograph as sg
from layers import model_of
from silograph.core.key import Key
from silograph.graph.block.block import ClientBlock, make_block, whole
from silograph.graph.csr import CSR
from silograph.graph.graph import Graph, Split, with_directions
from silograph.nn.forward import forward_pass
from silograph.nn.mini_batches import FULL, Fanout, sampled_pass
from silograph.nn.model import MODELS, Model

NODES = 30
SUMS = [name for name in MODELS if name != "mlp"]
WAYS = ("along", "against", "both")


def listed() -> tuple[np.ndarray, np.ndarray]:
    """Edges (2, E), some of them in both directions, others in one, with weights."""
    draws = np.random.default_rng(4)
    pairs = np.array([(a, b) for a in range(NODES) for b in range(NODES) if (7 * a + b) % 9 == 0])
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    return pairs.T, draws.uniform(0.1, 3, len(pairs))


def graph_of(edges: np.ndarray, weight: np.ndarray | None = None) -> Graph:
    draws = np.random.default_rng(5)
    x, y = draws.normal(size=(NODES, 7)), draws.integers(0, 3, NODES)
    return sg.from_arrays(edge_index=edges, edge_weight=weight, x=x, y=y)


def block_of(graph: Graph) -> ClientBlock:
    none = torch.zeros(graph.num_nodes, dtype=torch.bool)
    return make_block(graph, whole(graph), Split(~none, none, none), torch.float64)[0]


def directed_block(edges: np.ndarray, weight: np.ndarray | None = None) -> ClientBlock:
    return block_of(with_directions(graph_of(edges, weight)))


def dense(edges: np.ndarray, weight: np.ndarray | None) -> Tensor:
    """A (n, n): row i has the weights of the edges that lead to i."""
    a = torch.zeros(NODES, NODES, dtype=torch.float64)
    a[edges[1], edges[0]] = 1 if weight is None else torch.from_numpy(weight)
    return a


def normalized(a: Tensor) -> Tensor:
    """(D_in + I)^-1/2 (A + I) (D_out + I)^-1/2."""
    receiver, sender = (a.sum(1) + 1).rsqrt(), (a.sum(0) + 1).rsqrt()
    return receiver[:, None] * (a + torch.eye(NODES, dtype=a.dtype)) * sender


def gcn(a: Tensor, x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    return normalized(a) @ (x @ w[f"0.{name}weight"])


def sage(a: Tensor, x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    a = (a > 0).double()
    return a / a.sum(1, keepdim=True).clamp(min=1) @ (x @ w[f"0.{name}weight"])


def graphconv(a: Tensor, x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    return a @ (x @ w[f"0.{name}weight"])


def gin(a: Tensor, x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    a = (a > 0).double()
    return (a + torch.eye(NODES, dtype=a.dtype)) @ (x @ w[f"0.{name}weight"])


def gat(a: Tensor, x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    """The mean of two heads."""
    z = (x @ w[f"0.{name}weight"]).view(NODES, 2, -1)
    sent, got = ((z * w[f"0.{name}{end}"]).sum(2).T for end in ("sender", "receiver"))
    score = torch.nn.functional.leaky_relu(got[:, :, None] + sent[:, None], 0.2)
    is_edge = (a > 0) | torch.eye(NODES, dtype=torch.bool)
    return torch.einsum("hij,jhd->id", score.masked_fill(~is_edge, -torch.inf).softmax(2), z) / len(
        score
    )


Sum = Callable[[Tensor, Tensor, dict[str, Tensor], str], Tensor]
DENSE: dict[str, Sum] = {"gcn": gcn, "sage": sage, "graphconv": graphconv, "gin": gin, "gat": gat}


def finished(conv: str, s: Tensor, x: Tensor, w: dict[str, Tensor]) -> Tensor:
    if "0.root" in w:
        s = s + x @ w["0.root"]
    s = s + w["0.bias"]
    return s.relu() @ w["0.out"] + w["0.out_bias"] if conv == "gin" else s


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("conv", DENSE)
def test_layers_and_all_gradients_are_those_of_dense_matrices(conv: str, way: str) -> None:
    edges, weight = listed()
    values = weight if conv in ("gcn", "graphconv") else None
    block, model = directed_block(edges, values), model_of(conv, layers=1, directed=way)
    start = model.init_weights(Key.of(1), torch.float64)
    ours, theirs = ({n: w.clone().requires_grad_() for n, w in start.items()} for _ in range(2))
    xs = [torch.as_tensor(block.x).clone().requires_grad_() for _ in range(2)]
    out = model.forward(ours, replace(block, x=xs[0]))
    a, call = dense(edges, values), DENSE[conv]
    s = {
        "along": lambda: call(a, xs[1], theirs, ""),
        "against": lambda: call(a.T, xs[1], theirs, ""),
        "both": lambda: (call(a, xs[1], theirs, "") + call(a.T, xs[1], theirs, "against_")) / 2,
    }[way]()
    expected = finished(conv, s, xs[1], theirs)
    assert torch.allclose(out, expected, atol=1e-10, rtol=0)
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    for result in (out, expected):
        (result * slope).sum().backward()
    assert xs[0].grad is not None
    assert xs[1].grad is not None
    assert torch.allclose(xs[0].grad, xs[1].grad, atol=1e-10, rtol=0)
    for name, w in ours.items():
        assert w.grad is not None
        assert theirs[name].grad is not None
        assert torch.allclose(w.grad, theirs[name].grad, atol=1e-10, rtol=0), name  # type: ignore[arg-type]


def test_sage_both_ways_is_the_layer_of_dir_gnn() -> None:
    """With alpha = 1/2, in the form of PyG's DirGNNConv."""
    edges, _ = listed()
    block, model = directed_block(edges), model_of("sage", layers=1, directed="both")
    w = model.init_weights(Key.of(1), torch.float64)
    conv = DirGNNConv(SAGEConv(7, 3, root_weight=False, bias=False), alpha=0.5).double()
    names = {"conv_in.lin_l": "weight", "conv_out.lin_l": "against_weight", "lin": "root"}
    state = {f"{theirs}.weight": w[f"0.{ours}"].T for theirs, ours in names.items()}
    conv.load_state_dict(state | {"lin.bias": w["0.bias"]})
    expected = conv(torch.as_tensor(block.x), torch.from_numpy(edges))
    assert torch.allclose(model.forward(w, block), expected, atol=1e-12, rtol=0)


def deep(conv: str, way: str) -> Model:
    """A model with dropout, of features and attention as well."""
    attention = 0.3 if conv == "gat" else 0.0
    return model_of(conv, dropout=0.4, directed=way, attention_dropout=attention)


@pytest.mark.parametrize("conv", SUMS)
def test_along_the_reversed_graph_is_against_the_graph(conv: str) -> None:
    edges, weight = listed()
    outputs = []
    for pairs, way in ((edges, "against"), (edges[::-1], "along")):
        model = deep(conv, way)
        weights = model.init_weights(Key.of(1), torch.float64)
        outputs.append(model.forward(weights, directed_block(pairs, weight), Key.of(2)))
    assert torch.equal(*outputs)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("conv", SUMS)
@pytest.mark.parametrize("weighted", [False, True])
def test_a_symmetric_graph_has_no_direction(conv: str, weighted: bool) -> None:
    """Both ways with equal weights it is the plain layer, too."""
    edges, weight = listed()
    graph = graph_of(edges, weight if weighted else None)
    assert graph.edge_weight is not None or not weighted
    both = replace(graph, directed_weight=torch.ones(graph.adj.nnz, dtype=torch.int8))
    plain, block = deep(conv, "none"), block_of(with_directions(both, symmetric=True))
    weights = plain.init_weights(Key.of(1), torch.float64)
    expected = plain.forward(weights, block_of(graph), Key.of(2))
    for way in WAYS:
        model = deep(conv, way)
        doubled = {n: weights[n.replace("against_", "")] for n in model.weight_shapes}
        out = model.forward(doubled, block, Key.of(2))
        assert torch.allclose(out, expected, atol=1e-12, rtol=0)
        # The first direction starts from the weights of the plain layer.
        own = model.init_weights(Key.of(1), torch.float64)
        assert all(torch.equal(own[name], w) for name, w in weights.items())


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("conv", SUMS)
def test_batches_with_all_neighbors_are_the_whole_pass(conv: str, way: str) -> None:
    edges, weight = listed()
    block, model = directed_block(edges, weight if conv in ("gcn", "graphconv") else None), None
    model = model_of(conv, layers=2, directed=way)
    weights = model.init_weights(Key.of(1), torch.float64)
    seeds, off = torch.tensor([3, 17, 8]), torch.tensor([0, 3])
    sums = [stage.conv.sums for stage in model.stages]
    hops = sum(sums)
    for sampler in (FULL, Fanout((NODES,) * hops)):
        inputs, _ = sampled_pass(block, block.x, seeds, off, sampler, Key.of(2), sums, {})
        out = forward_pass(model, weights, inputs, None)
        assert torch.allclose(out, model.forward(weights, block)[seeds], atol=1e-12, rtol=0)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("way", ["along", "against"])
def test_drawn_neighbors_are_unbiased_in_each_direction(way: str) -> None:
    """The mean over many draws of a plain sum nears the sum over all neighbors."""
    edges, weight = listed()
    block, model = directed_block(edges, weight), model_of("graphconv", layers=1, directed=way)
    weights = model.init_weights(Key.of(1), torch.float64)
    seeds, off = torch.arange(NODES), torch.tensor([0, NODES])
    total = torch.zeros(NODES, 3, dtype=torch.float64)
    draws = 2000
    for number in range(draws):
        inputs, _ = sampled_pass(
            block, block.x, seeds, off, Fanout((2,)), Key.of(number), [True], {}
        )
        total += forward_pass(model, weights, inputs, None)
    assert torch.allclose(total / draws, model.forward(weights, block), atol=0.4)


def test_weights_of_both_directions() -> None:
    edges, weight = np.array([[0, 1, 1, 2], [1, 0, 2, 0]]), np.array([5.0, 3.0, 2.0, 1.0])
    graph = sg.from_arrays(edge_index=edges, edge_weight=weight, y=[0, 1, 0])
    pairs = list(zip(*graph.edge_index.tolist(), strict=True))
    assert graph.edge_weight is not None
    assert graph.directed_weight is not None
    assert dict(zip(pairs, graph.edge_weight.tolist(), strict=True))[0, 1] == 4
    ways = with_directions(graph).edge_weight
    assert ways is not None
    weights = dict(zip(pairs, ways.nan_to_num(-1).tolist(), strict=True))
    assert weights == {
        (0, 1): [5, 3],
        (1, 0): [3, 5],
        (1, 2): [2, -1],
        (2, 1): [-1, 2],
        (2, 0): [1, -1],
        (0, 2): [-1, 1],
    }
    # Weights that are replaced or left out count in both directions.
    for other in (None, torch.full((6,), 7.0)):
        plain = sg.from_arrays(edge_index=edges[:, 2:], y=[0, 1, 0])
        given = None if other is None else other[: plain.adj.nnz]
        first = with_directions(replace(plain, edge_weight=given)).edge_weight
        assert first is not None
        assert set(first.nan_to_num(-1).flatten().tolist()) == {-1, 1 if other is None else 7}


def test_two_columns_of_values_are_sorted_as_one() -> None:
    rows, cols = torch.tensor([2, 0, 1, 0]), torch.tensor([0, 2, 1, 0])
    values = torch.arange(8.0).view(4, 2)
    both = CSR.from_pairs(rows, cols, (3, 3), values)
    assert both.values is not None
    for column in (0, 1):
        one = CSR.from_pairs(rows, cols, (3, 3), values[:, column])
        assert one.values is not None
        assert torch.equal(one.indices, both.indices)
        assert torch.equal(one.values, both.values[:, column])
