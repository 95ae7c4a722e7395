"""Laws of the model: a stack of layers, and dropout that no grouping of clients changes."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from layers import MODELS_WITH_SKIPS, model_of, reference_model
from silograph.core.errors import ConfigError
from silograph.core.key import Key, keep_probability
from silograph.graph.block.block import ClientBlock, Route, SparseRows
from silograph.graph.graph import Graph
from silograph.nn.conv import Params
from silograph.nn.forward import dropped
from silograph.nn.model import MODELS, Model

MakeGraph = Callable[..., Graph]
MakeBlock = Callable[..., tuple[ClientBlock, Route]]

EVERY_CONV = pytest.mark.parametrize("conv", sorted(MODELS))
SKIPS = pytest.mark.parametrize(("conv", "residual"), MODELS_WITH_SKIPS)
DROP = 0.4
KEEP = keep_probability(DROP)


def stacked_weights(model: Model, clients: int) -> Params:
    own = [model.init_weights(Key.of(c), torch.float64) for c in range(clients)]
    return {name: torch.stack([p[name] for p in own]) for name in own[0]}


def edges(block: ClientBlock) -> Tensor:
    return torch.stack([block.adj.row, block.adj.indices.long()])


def close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)


def dense_x(block: ClientBlock) -> Tensor:
    return block.x.csr.tensor.to_dense() if isinstance(block.x, SparseRows) else block.x


@pytest.mark.law(sample=6)
@SKIPS
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("layers", [1, 4])
def test_forward_is_a_stack_of_pyg_layers(
    make_graph: MakeGraph,
    cut_block: MakeBlock,
    conv: str,
    residual: bool,
    sparse: bool,
    layers: int,
) -> None:
    block, _ = cut_block(make_graph(40, sparse=sparse), 3)
    model = model_of(conv, layers=layers, residual=residual)
    weights = model.init_weights(Key.of(1), torch.float64)
    with torch.no_grad():
        expected = reference_model(model, weights, dense_x(block), edges(block))
    # The model has dropout, but without a key there is none.
    close(model.forward(weights, block), expected)


@pytest.mark.parametrize("conv", sorted(set(MODELS) - {"appnp", "mlp"}))
@pytest.mark.parametrize(("hidden", "head"), [((8, 4), "conv"), ((8, 4), "linear"), (6, "linear")])
def test_widths_and_heads_are_those_of_pyg_layers(
    make_graph: MakeGraph,
    cut_block: MakeBlock,
    conv: str,
    hidden: int | tuple[int, ...],
    head: str,
) -> None:
    """With a linear head the last layer, and no other, ignores the graph."""
    block, _ = cut_block(make_graph(40), 3)
    model = model_of(conv, layers=3, hidden=hidden, head=head)
    assert [stage.conv.sums for stage in model.stages] == [True, True, head == "conv"]
    weights = model.init_weights(Key.of(1), torch.float64)
    with torch.no_grad():
        expected = reference_model(model, weights, dense_x(block), edges(block))
    close(model.forward(weights, block), expected)


def test_a_list_has_a_width_for_each_hidden_layer() -> None:
    assert model_of("gcn", layers=3, hidden=(8, 4)).widths == [7, 8, 4, 3]
    with pytest.raises(ConfigError, match=r"^expected a width for each of 1 hidden layers, got 2$"):
        model_of("gcn", layers=2, hidden=(8, 4))


@SKIPS
def test_gradients_are_those_of_pyg_layers(
    make_graph: MakeGraph, cut_block: MakeBlock, conv: str, residual: bool
) -> None:
    block, _ = cut_block(make_graph(40), 3)
    model = model_of(conv, layers=4, residual=residual)
    leaves = {
        k: w.requires_grad_() for k, w in model.init_weights(Key.of(1), torch.float64).items()
    }
    generator = torch.Generator().manual_seed(0)
    cotangent = torch.randn(40, 3, dtype=torch.float64, generator=generator)
    ours, theirs = (
        torch.autograd.grad((out * cotangent).sum(), list(leaves.values()))
        for out in (
            model.forward(leaves, block),
            reference_model(model, leaves, dense_x(block), edges(block)),
        )
    )
    assert all(bool(grad.any()) for grad in ours)
    for left, right in zip(ours, theirs, strict=True):
        close(left, right)


@SKIPS
def test_dropout_falls_on_the_hidden_rows_by_key_layer_and_row_key(
    make_graph: MakeGraph, cut_block: MakeBlock, conv: str, residual: bool
) -> None:
    """Before the convolutions of hidden layers only: skips and restarts are whole."""
    block, _ = cut_block(make_graph(40), 3)
    model, key = model_of(conv, layers=4, residual=residual), Key.of(8)
    weights = model.init_weights(Key.of(1), torch.float64)
    masks = {
        layer: key.fold("dropout", layer).keep(block.row_key, 6, DROP).double() / KEEP
        for layer in range(1, 4)
    }
    with torch.no_grad():
        expected = reference_model(model, weights, dense_x(block), edges(block), masks)
    close(model.forward(weights, block, key), expected)


@pytest.mark.parametrize("teleport", [0.0, 0.5, 1.0])
def test_a_restart_is_between_propagation_and_none(
    make_graph: MakeGraph, cut_block: MakeBlock, teleport: float
) -> None:
    block, _ = cut_block(make_graph(40), 3)
    model = model_of("appnp", teleport=teleport)
    weights = model.init_weights(Key.of(1), torch.float64)
    out = model.forward(weights, block)
    close(out, reference_model(model, weights, dense_x(block), edges(block)))
    if teleport == 1:  # the MLP's predictions
        close(out, replace(model, conv="mlp").forward(weights, block))


def test_skips_need_three_layers(make_graph: MakeGraph, cut_block: MakeBlock) -> None:
    for layers, skips in ((1, []), (2, []), (3, [1]), (5, [1, 2, 3])):
        model = model_of("gcn", layers=layers, residual=True)
        assert [n for n, stage in enumerate(model.stages) if stage.skip] == skips


@EVERY_CONV
def test_a_dropout_of_0_draws_nothing(
    make_graph: MakeGraph, cut_block: MakeBlock, conv: str
) -> None:
    block, _ = cut_block(make_graph(40), 3)
    model = replace(model_of(conv), dropout=0.0)
    weights = model.init_weights(Key.of(1), torch.float64)
    assert torch.equal(model.forward(weights, block, Key.of(0)), model.forward(weights, block))


@pytest.mark.law(sample=6)
@EVERY_CONV
@pytest.mark.parametrize("sparse", [False, True])
def test_stacked_forward_does_not_depend_on_the_grouping(
    make_graph: MakeGraph, cut_block: MakeBlock, conv: str, sparse: bool
) -> None:
    block, _ = cut_block(make_graph(60, sparse=sparse), 5)
    model, key = model_of(conv), Key.of(8)
    weights = stacked_weights(model, 5)
    out = model.forward(weights, block, key)
    for positions in ([0], [1], [2], [3], [4], [3, 1], [4, 0, 2]):
        chosen = torch.tensor(positions)
        part = {name: w[chosen] for name, w in weights.items()}
        got = model.forward(part, block.take(chosen), key)
        # Bit by bit: products run client by client, and so do the draws.
        assert torch.equal(got, torch.cat([out[block.client == c] for c in positions]))


@EVERY_CONV
def test_shared_forward_does_not_depend_on_the_grouping(
    make_graph: MakeGraph, cut_block: MakeBlock, conv: str
) -> None:
    block, _ = cut_block(make_graph(60), 5)
    model, key = model_of(conv), Key.of(8)
    weights = model.init_weights(Key.of(1), torch.float64)
    out = model.forward(weights, block, key)
    for c in range(5):
        # One product over all rows may round differently from a product over some.
        close(model.forward(weights, block.take(torch.tensor([c])), key), out[block.client == c])


def test_dropout_masks_do_not_depend_on_the_grouping(
    make_graph: MakeGraph, cut_block: MakeBlock
) -> None:
    block, _ = cut_block(make_graph(60), 5)
    ones, key = torch.ones(60, 9, dtype=torch.float64), Key.of(2)
    whole = dropped(ones, DROP, block.row_key, key)
    assert set(whole.unique().tolist()) == {0.0, 1 / keep_probability(DROP)}
    for c in range(5):
        rows = block.client == c
        one = block.take(torch.tensor([c]))
        assert torch.equal(dropped(ones[rows], DROP, one.row_key, key), whole[rows])
    assert not torch.equal(dropped(ones, DROP, block.row_key, key.fold(1)), whole)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("drop", [0.1, 0.5, 0.9])
def test_dropout_is_unbiased(drop: float) -> None:
    rows, draws = torch.arange(20), 4000
    x = torch.linspace(-2, 3, 20 * 6, dtype=torch.float64).view(20, 6)
    total = torch.zeros_like(x)
    for draw in range(draws):
        total += dropped(x, drop, rows, Key.of(0).fold(draw))
    # The factor is 0 or 1/p: its variance is (1 - p)/p. Five standard deviations of the mean.
    p = keep_probability(drop)
    bound = 5 * x.abs() * ((1 - p) / p / draws) ** 0.5
    assert bool(((total / draws - x).abs() <= bound + 1e-12).all())


def test_dropout_scales_the_gradient_as_the_value() -> None:
    x = torch.linspace(1, 2, 12, dtype=torch.float64).view(4, 3).requires_grad_()
    out = dropped(x, DROP, torch.arange(4), Key.of(0))
    (grad,) = torch.autograd.grad(out.sum(), x)
    close(grad * x, out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dropout_keeps_the_dtype(dtype: torch.dtype) -> None:
    assert dropped(torch.ones(4, 3, dtype=dtype), 0.5, torch.arange(4), Key.of(0)).dtype == dtype


@EVERY_CONV
def test_initial_weights_are_the_same_numbers_in_both_precisions(conv: str) -> None:
    model = model_of(conv)
    double = model.init_weights(Key.of(3), torch.float64)
    single = model.init_weights(Key.of(3), torch.float32)
    assert list(double) == list(single)
    for name, value in double.items():
        assert single[name].dtype == torch.float32
        assert torch.equal(single[name], value.float())


NAMES = {
    "gcn": ("weight", "bias"),
    "mlp": ("weight", "bias"),
    "appnp": ("weight", "bias"),
    "sage": ("weight", "root", "bias"),
    "graphconv": ("weight", "root", "bias"),
    "gin": ("weight", "bias", "out", "out_bias"),
    "gat": ("weight", "sender", "receiver", "bias"),
}


@EVERY_CONV
def test_initial_weights_of_every_layer(conv: str) -> None:
    model = model_of(conv, layers=3)
    weights = model.init_weights(Key.of(3), torch.float64)
    assert model.widths == [7, 6, 6, 3]
    assert list(weights) == [f"{layer}.{name}" for layer in range(3) for name in NAMES[conv]]
    if conv in ("gcn", "sage", "mlp", "graphconv", "appnp"):
        for layer, (inputs, outputs) in enumerate([(7, 6), (6, 6), (6, 3)]):
            assert weights[f"{layer}.weight"].shape == (inputs, outputs)
            assert weights[f"{layer}.bias"].shape == (outputs,)
    # No layer starts as a copy of another, drawn at equal or at other widths.
    assert not torch.equal(weights["1.weight"], weights["0.weight"][:6])
    deeper = replace(model, layers=4).init_weights(Key.of(3), torch.float64)
    assert not torch.equal(deeper["1.weight"], deeper["2.weight"])
    # A layer's draws depend on its number and widths only.
    assert torch.equal(deeper["1.weight"], weights["1.weight"])
    other = model.init_weights(Key.of(4), torch.float64)
    assert not torch.equal(other["0.weight"], weights["0.weight"])


def test_widths_of_heads_and_perceptrons() -> None:
    """Heads stand side by side in hidden layers; perceptrons are as wide as these."""
    shapes = {
        conv: {k: tuple(w.shape) for k, w in model.init_weights(Key.of(0), torch.float32).items()}
        for conv, model in {"gat": model_of("gat"), "gin": model_of("gin")}.items()
    }
    assert shapes["gat"] == {
        "0.weight": (7, 6),
        "0.sender": (2, 3),
        "0.receiver": (2, 3),
        "0.bias": (6,),
        "1.weight": (6, 2 * 3),
        "1.sender": (2, 3),
        "1.receiver": (2, 3),
        "1.bias": (3,),
    }
    assert shapes["gin"] == {
        "0.weight": (7, 6),
        "0.bias": (6,),
        "0.out": (6, 6),
        "0.out_bias": (6,),
        "1.weight": (6, 6),
        "1.bias": (6,),
        "1.out": (6, 3),
        "1.out_bias": (3,),
    }


def test_one_layer_goes_from_features_to_outputs() -> None:
    assert model_of("gcn", layers=1).widths == [7, 3]


def test_layers_past_the_tenth_keep_their_own_weights(
    make_graph: MakeGraph, cut_block: MakeBlock
) -> None:
    # "1." is a prefix of "1.weight", not of "10.weight" or "11.weight".
    block, _ = cut_block(make_graph(20), 2)
    model = replace(model_of("mlp", layers=12), dropout=0.0)
    weights = {
        name: w if w.dim() == 2 else w + 1.0  # keeps units alive through all layers
        for name, w in model.init_weights(Key.of(0), torch.float64).items()
    }
    assert isinstance(block.x, Tensor)
    h = block.x
    for layer in range(12):
        h = h @ weights[f"{layer}.weight"] + weights[f"{layer}.bias"]
        h = h if layer == 11 else h.relu()
    assert float(h.std(dim=0).min()) > 1e-4
    close(model.forward(weights, block), h)


def test_an_unknown_convolution_is_told(make_graph: MakeGraph, cut_block: MakeBlock) -> None:
    model = replace(model_of("gcn"), conv="gcm")
    message = r"^unknown model 'gcm': did you mean 'gcn'\?$"
    with pytest.raises(ConfigError, match=message):
        model.init_weights(Key.of(0), torch.float64)
    block, _ = cut_block(make_graph(20), 2)
    with pytest.raises(ConfigError, match=message):
        model.forward(model_of("gcn").init_weights(Key.of(0), torch.float64), block)
