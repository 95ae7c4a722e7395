"""Laws of the convolutions: PyG's layers with the same weights, client by client, in any order."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import GCNConv, SAGEConv

from silograph.core.key import Key
from silograph.graph.block import ClientBlock, Rows, SparseRows, make_block, whole
from silograph.graph.csr import CSR
from silograph.graph.graph import Graph, Split, subgraph
from silograph.graph.halo import Route
from silograph.nn.conv import CONVS, Params, convolve, glorot, internal_messages

MakeGraph = Callable[..., Graph]
MakeBlock = Callable[..., tuple[ClientBlock, Route]]

OUT = 5
EVERY_CONV = pytest.mark.parametrize("name", sorted(CONVS))
BOTH_FEATURES = pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])


def close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)


def isolate(graph: Graph, nodes: list[int]) -> Graph:
    """Return the graph without the edges of these nodes."""
    edges = graph.edge_index
    edges = edges[:, ~torch.isin(edges, torch.tensor(nodes)).any(dim=0)]
    return replace(
        graph, adj=CSR.from_pairs(edges[0], edges[1], (graph.num_nodes, graph.num_nodes))
    )


def uncut(graph: Graph) -> ClientBlock:
    everyone = torch.ones(graph.num_nodes, dtype=torch.bool)
    return make_block(graph, whole(graph), Split(everyone, ~everyone, ~everyone), torch.float64)[0]


def dense_x(block: ClientBlock) -> Tensor:
    return block.x.csr.tensor.to_dense() if isinstance(block.x, SparseRows) else block.x


def random_weights(name: str, features: int, seed: int) -> Params:
    """Return weights with every entry away from zero, biases too."""
    params = CONVS[name].init(Key.of(seed), features, OUT)
    generator = torch.Generator().manual_seed(seed)
    return {
        k: torch.randn(v.shape, dtype=torch.float64, generator=generator) for k, v in params.items()
    }


def reference(name: str, p: Mapping[str, Tensor], features: int) -> Any:
    """Return PyG's layer with these weights, as a function of dense x and edge_index."""
    layer: Any
    if name == "mlp":
        layer = torch.nn.Linear(features, OUT).double()
        pairs = [(layer.weight, p["weight"].T), (layer.bias, p["bias"])]
    elif name == "gcn":
        layer = GCNConv(features, OUT).double()
        pairs = [(layer.lin.weight, p["weight"].T), (layer.bias, p["bias"])]
    else:
        layer = SAGEConv(features, OUT).double()
        pairs = [
            (layer.lin_l.weight, p["weight"].T),
            (layer.lin_r.weight, p["root"].T),
            (layer.lin_l.bias, p["bias"]),
        ]
    with torch.no_grad():
        for parameter, value in pairs:
            assert parameter.shape == value.shape
            parameter.copy_(value)
    assert len(pairs) == len(list(layer.parameters()))
    return layer if name != "mlp" else lambda x, _: layer(x)


def outputs_and_grads(
    name: str, p: Params, x: Rows, block: ClientBlock, cotangent: Tensor
) -> tuple[Tensor, Params]:
    """Return the output, and the gradients of (output * cotangent).sum()."""
    leaves = {k: v.clone().requires_grad_() for k, v in p.items()}
    out = convolve(CONVS[name], leaves, x, internal_messages(block, torch.float64))
    grads = torch.autograd.grad((out * cotangent).sum(), list(leaves.values()))
    return out.detach(), dict(zip(leaves, grads, strict=True))


@EVERY_CONV
@BOTH_FEATURES
@pytest.mark.parametrize("seed", range(3))
def test_a_convolution_equals_pyg(
    make_graph: MakeGraph, name: str, sparse: bool, seed: int
) -> None:
    graph = isolate(make_graph(40, seed=seed, sparse=sparse), [0, 7, 39])
    block = uncut(graph)
    p = random_weights(name, graph.num_features, seed)
    got = convolve(CONVS[name], p, block.x, internal_messages(block, torch.float64))
    close(got, reference(name, p, graph.num_features)(dense_x(block), graph.edge_index).detach())


@EVERY_CONV
def test_gradients_equal_pyg(make_graph: MakeGraph, name: str) -> None:
    graph = isolate(make_graph(40), [0, 7, 39])
    block = uncut(graph)
    p = random_weights(name, graph.num_features, 3)
    cotangent = torch.randn(
        40, OUT, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )

    def grads(layer: Callable[[Tensor, Mapping[str, Tensor]], Tensor]) -> tuple[Tensor, ...]:
        leaves = {k: v.clone().requires_grad_() for k, v in p.items()}
        x = dense_x(block).clone().requires_grad_()
        out = layer(x, leaves)
        return torch.autograd.grad((out * cotangent).sum(), [x, *leaves.values()])

    def ours(x: Tensor, leaves: Mapping[str, Tensor]) -> Tensor:
        return convolve(CONVS[name], leaves, x, internal_messages(block, torch.float64))

    def theirs(x: Tensor, leaves: Mapping[str, Tensor]) -> Tensor:
        layer = reference(name, p, graph.num_features)
        if name == "mlp":
            return x @ leaves["weight"] + leaves["bias"]
        names = {
            "gcn": {"lin.weight": "weight", "bias": "bias"},
            "sage": {"lin_l.weight": "weight", "lin_r.weight": "root", "lin_l.bias": "bias"},
        }[name]
        swapped = {
            theirs: leaves[mine].T if leaves[mine].dim() == 2 else leaves[mine]
            for theirs, mine in names.items()
        }
        out: Tensor = torch.func.functional_call(layer, swapped, (x, graph.edge_index))
        return out

    for left, right in zip(grads(ours), grads(theirs), strict=True):
        close(left, right)


@EVERY_CONV
@BOTH_FEATURES
def test_stacked_weights_are_shared_weights_client_by_client(
    make_graph: MakeGraph, cut_block: MakeBlock, name: str, sparse: bool
) -> None:
    block, _ = cut_block(isolate(make_graph(50, sparse=sparse), [3, 4]), 6)
    own = [random_weights(name, block.num_features, seed) for seed in range(6)]
    stacked = {k: torch.stack([p[k] for p in own]) for k in own[0]}
    generator = torch.Generator().manual_seed(1)
    cotangent = torch.randn(50, OUT, dtype=torch.float64, generator=generator)
    out, grads = outputs_and_grads(name, stacked, block.x, block, cotangent)
    for c in range(6):
        rows = block.client == c
        one = block.take(torch.tensor([c]))
        for p, pick in ((own[c], lambda g: g), ({k: v[None] for k, v in own[c].items()}, _first)):
            out_c, grads_c = outputs_and_grads(name, p, one.x, one, cotangent[rows])
            close(out_c, out[rows])
            for k in stacked:
                close(pick(grads_c[k]), grads[k][c])


def _first(grad: Tensor) -> Tensor:
    return grad[0]


@EVERY_CONV
@BOTH_FEATURES
def test_shared_weights_are_equal_slices_and_collect_their_gradients(
    make_graph: MakeGraph, cut_block: MakeBlock, name: str, sparse: bool
) -> None:
    block, _ = cut_block(make_graph(50, sparse=sparse), 4)
    shared = random_weights(name, block.num_features, 0)
    stacked = {k: torch.stack([v] * 4) for k, v in shared.items()}
    generator = torch.Generator().manual_seed(1)
    cotangent = torch.randn(50, OUT, dtype=torch.float64, generator=generator)
    out, grads = outputs_and_grads(name, shared, block.x, block, cotangent)
    out_stacked, grads_stacked = outputs_and_grads(name, stacked, block.x, block, cotangent)
    close(out, out_stacked)
    for k in shared:
        close(grads[k], grads_stacked[k].sum(dim=0))


@EVERY_CONV
@BOTH_FEATURES
def test_renumbering_the_nodes_renumbers_the_output(
    make_graph: MakeGraph, name: str, sparse: bool
) -> None:
    graph = isolate(make_graph(40, sparse=sparse), [5])
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    p = random_weights(name, graph.num_features, 0)
    outputs = []
    for block in (uncut(graph), uncut(subgraph(graph, order))):
        messages = internal_messages(block, torch.float64)
        outputs.append(convolve(CONVS[name], p, block.x, messages))
    close(outputs[0][order], outputs[1])


@pytest.mark.parametrize(
    ("name", "shapes", "bound"),
    [
        # Glorot: sqrt(6 / (I + O)) with I + O = 96; SAGE: 1 / sqrt(I).
        ("gcn", {"weight": (64, 32), "bias": (32,)}, 0.25),
        ("mlp", {"weight": (64, 32), "bias": (32,)}, 0.25),
        ("sage", {"weight": (64, 32), "root": (64, 32), "bias": (32,)}, 0.125),
    ],
)
def test_initial_weights(name: str, shapes: dict[str, tuple[int, ...]], bound: float) -> None:
    params = CONVS[name].init(Key.of(0), 64, 32)
    assert {k: tuple(v.shape) for k, v in params.items()} == shapes
    assert all(v.dtype == torch.float64 for v in params.values())
    for k, value in params.items():
        if k == "bias" and name != "sage":
            assert not value.any()
            continue
        assert float(value.abs().max()) <= bound
        n = value.numel()
        # Uniform in +-b: variance b^2/3, variance of the square 4 b^4/45; 5 standard deviations.
        assert abs(float(value.mean())) <= 5 * bound / (3 * n) ** 0.5
        assert (
            abs(float(value.square().mean()) - bound**2 / 3) <= 5 * bound**2 * (4 / 45 / n) ** 0.5
        )
    assert not torch.equal(params["weight"], params.get("root", params["weight"] + 1))
    again, other = (CONVS[name].init(Key.of(seed), 64, 32) for seed in (0, 1))
    assert all(torch.equal(again[k], params[k]) for k in shapes)
    assert not torch.equal(other["weight"], params["weight"])


def test_glorot_depends_on_key_and_both_widths() -> None:
    key = Key.of(1)
    # The same draws, at other widths: only the scale differs.
    close(glorot(key, 4, 20)[:, :2] * 2, glorot(key, 4, 2))


def test_the_table_of_convolutions_says_who_sums() -> None:
    assert {name: conv.sums for name, conv in CONVS.items()} == {
        "gcn": True,
        "sage": True,
        "mlp": False,
    }
