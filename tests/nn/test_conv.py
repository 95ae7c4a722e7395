"""Laws of the convolutions: PyG's layers with the same weights, client by client, in any order."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from layers import CONVS, model_of, reference
from silograph.core.key import Key
from silograph.graph.block.block import ClientBlock, Route, Rows, SparseRows, make_block, whole
from silograph.graph.csr import CSR
from silograph.graph.graph import Graph, Split, subgraph
from silograph.nn.conv import (
    GAT,
    GCN,
    GIN,
    MLP,
    SAGE,
    Conv,
    GraphConv,
    Params,
    Propagation,
    Scales,
    as_matrix,
    convolve,
    glorot,
    internal_messages,
    operator,
)
from silograph.nn.model import MODELS

MakeGraph = Callable[..., Graph]
MakeBlock = Callable[..., tuple[ClientBlock, Route]]

OUT = 6
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
    close(got, reference(CONVS[name], p, dense_x(block), graph.edge_index, OUT).detach())


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
        return reference(CONVS[name], leaves, x, graph.edge_index, OUT)

    for left, right in zip(grads(ours), grads(theirs), strict=True):
        close(left, right)


@pytest.mark.law(sample=6)
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


# Bounds of uniform draws by I = 64, O = 32, H = 16 and 4 heads: Glorot is sqrt(6 / (I + O)), that
# of torch's linear layers 1 / sqrt(I). None: all zeros.
ROOTED = {"weight": ((64, 32), 1 / 8), "root": ((64, 32), 1 / 8), "bias": ((32,), 1 / 8)}
INITIAL: dict[str, tuple[Conv, Mapping[str, tuple[tuple[int, ...], float | None]]]] = {
    "gcn": (GCN, {"weight": ((64, 32), 0.25), "bias": ((32,), None)}),
    "mlp": (MLP, {"weight": ((64, 32), 0.25), "bias": ((32,), None)}),
    "sage": (
        SAGE,
        {"weight": ((64, 32), 1 / 8), "root": ((64, 32), 1 / 8), "bias": ((32,), 1 / 8)},
    ),
    "graphconv": (
        GraphConv,
        {"weight": ((64, 32), 1 / 8), "root": ((64, 32), 1 / 8), "bias": ((32,), 1 / 8)},
    ),
    "gin": (
        GIN(16),
        {
            "weight": ((64, 16), 1 / 8),
            "bias": ((16,), 1 / 8),
            "out": ((16, 32), 1 / 4),
            "out_bias": ((32,), 1 / 4),
        },
    ),
    "gat": (
        GAT(4, concat=True),
        {
            "weight": ((64, 32), 0.25),
            "sender": ((4, 8), 0.5**0.5),
            "receiver": ((4, 8), 0.5**0.5),
            "bias": ((32,), None),
        },
    ),
    "gat, mean": (
        GAT(4, concat=False),
        {
            "weight": ((64, 128), (6 / 192) ** 0.5),
            "sender": ((4, 32), (6 / 36) ** 0.5),
            "receiver": ((4, 32), (6 / 36) ** 0.5),
            "bias": ((32,), None),
        },
    ),
    "propagation": (Propagation(0.1), {}),
}


@pytest.mark.parametrize("name", INITIAL)
def test_initial_weights(name: str) -> None:
    conv, expected = INITIAL[name]
    params = conv.init(Key.of(0), 64, 32)
    assert {k: tuple(v.shape) for k, v in params.items()} == {
        k: s for k, (s, _) in expected.items()
    }
    assert all(v.dtype == torch.float64 for v in params.values())
    for k, value in params.items():
        bound = expected[k][1]
        if bound is None:
            assert not value.any()
            continue
        assert float(value.abs().max()) <= bound
        n = value.numel()
        # Uniform in +-b: variance b^2/3, variance of the square 4 b^4/45; 5 standard deviations.
        assert abs(float(value.mean())) <= 5 * bound / (3 * n) ** 0.5
        assert (
            abs(float(value.square().mean()) - bound**2 / 3) <= 5 * bound**2 * (4 / 45 / n) ** 0.5
        )
    drawn = [v for k, v in params.items() if expected[k][1] is not None]
    # No weight is a copy of another.
    assert len({tuple(v.flatten()[:8].tolist()) for v in drawn}) == len(drawn)
    again, other = (conv.init(Key.of(seed), 64, 32) for seed in (0, 1))
    assert all(torch.equal(again[k], params[k]) for k in params)
    if drawn:
        assert not torch.equal(other["weight"], params["weight"])


def test_glorot_depends_on_key_and_both_widths() -> None:
    key = Key.of(1)
    # The same draws, at other widths: only the scale differs.
    close(glorot(key, 4, 20)[:, :2] * 2, glorot(key, 4, 2))


def test_convolutions_say_who_sums_and_whose_sum_has_parts() -> None:
    convs = {name: model_of(name).stages[-1].conv for name in MODELS}
    assert [name for name, conv in convs.items() if not conv.sums] == ["mlp"]
    assert [name for name, conv in convs.items() if conv.scales is None] == ["gat"]
    assert [name for name, conv in convs.items() if conv.indivisible] == ["gat"]
    reason = convs["gat"].indivisible
    assert reason.startswith("attention weighs each edge by both of its ends")


def test_no_model_has_two_sums_in_a_stage() -> None:
    for name in MODELS:
        model = model_of(name, layers=3)
        hears = 3 if name == "appnp" else 0 if name == "mlp" else 3
        assert sum(stage.conv.sums for stage in model.stages) == hears
        assert len(model.stages) == (6 if name == "appnp" else 3)


def test_operators_of_one_block_do_not_mix(make_graph: MakeGraph) -> None:
    """StepRule with another restart have another matrix; equal ones share it."""
    messages = internal_messages(uncut(make_graph(20)), torch.float64)
    one, two = (operator(Propagation(t).scales, messages) for t in (0.1, 0.5))
    assert operator(Propagation(0.1).scales, messages) is one
    assert one.values is not None
    assert two.values is not None
    close(one.values / 0.9, two.values / 0.5)
    close(one.values / 0.9, operator(GCN.scales, messages).values)  # type: ignore[arg-type]


@pytest.mark.parametrize("has_own", [False, True])
def test_a_sum_is_one_matrix_with_loops_and_without_zeros(has_own: bool) -> None:
    weights = torch.tensor([[0.5, 2, 0], [3, 0, 0], [0, 0, 0]], dtype=torch.float64)
    places = torch.tensor([[0, 0, 1, 2], [0, 1, 0, 1]])  # the last one has the value 0
    adj = CSR.from_pairs(places[0], places[1], (3, 3), weights[places[0], places[1]])
    degree = torch.tensor([[2.0], [4], [0]], dtype=torch.float64)
    scales = Scales(lambda d: d + 1, lambda d: 1 / (d + 1))
    own = degree if has_own else None
    matrix = as_matrix(scales, adj, degree, degree, own)
    expected = weights * (degree + 1).T / (degree + 1) + torch.diag(degree[:, 0] * has_own)
    close(matrix.tensor.to_dense(), expected)
    assert matrix.nnz == int((expected != 0).sum())


def test_attention_does_not_overflow(make_graph: MakeGraph) -> None:
    """A constant added to all logits of a receiver cancels, however large it is."""
    block = uncut(isolate(make_graph(30), [4]))
    x = torch.cat([dense_x(block), torch.ones(30, 1, dtype=torch.float64)], dim=1)
    p = random_weights("gat", 8, 0)
    p["weight"] = p["weight"].abs()  # logits above 0, where the leaky ReLU is linear
    p["sender"], p["receiver"] = p["sender"].abs(), p["receiver"].abs()
    x = x.abs()
    messages = internal_messages(block, torch.float64)
    expected = convolve(CONVS["gat"], p, x, messages)
    assert bool(expected.isfinite().all())
    huge = {**p, "receiver": p["receiver"] * 1e4}
    close(convolve(CONVS["gat"], huge, x, messages), expected)
