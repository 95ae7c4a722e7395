"""Laws of the model: a stack of layers, and dropout that no grouping of clients changes."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import GCNConv, SAGEConv

from silograph.core.errors import ConfigError
from silograph.core.key import Key, keep_probability
from silograph.graph.block import ClientBlock, SparseRows
from silograph.graph.graph import Graph
from silograph.graph.halo import Route
from silograph.nn.conv import CONVS, Params
from silograph.nn.model import Model, dropout, forward, init_weights

MakeGraph = Callable[..., Graph]
MakeBlock = Callable[..., tuple[ClientBlock, Route]]

EVERY_CONV = pytest.mark.parametrize("conv", sorted(CONVS))
DROP = 0.4


def model_of(conv: str, layers: int = 3) -> Model:
    return Model(conv, 7, 6, 3, layers, DROP, "multiclass")


def stacked_weights(model: Model, clients: int) -> Params:
    own = [init_weights(model, Key.of(c), torch.float64) for c in range(clients)]
    return {name: torch.stack([p[name] for p in own]) for name in own[0]}


def reference(conv: str, p: Mapping[str, Tensor], layer: int) -> Any:
    """Return PyG's layer with the weights of a layer, as a function of x and edge_index."""
    weight, bias = p[f"{layer}.weight"], p[f"{layer}.bias"]
    module: Any
    if conv == "mlp":
        return lambda x, _: x @ weight + bias
    if conv == "gcn":
        module = GCNConv(*weight.shape).double()
        values = {"lin.weight": weight.T, "bias": bias}
    else:
        module = SAGEConv(*weight.shape).double()
        root = p[f"{layer}.root"]
        values = {"lin_l.weight": weight.T, "lin_r.weight": root.T, "lin_l.bias": bias}
    module.load_state_dict(values)
    return module


def edges(block: ClientBlock) -> Tensor:
    return torch.stack([block.adj.row, block.adj.indices.long()])


def close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)


@EVERY_CONV
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("layers", [1, 3])
def test_forward_is_a_stack_of_pyg_layers(
    make_graph: MakeGraph, cut_block: MakeBlock, conv: str, sparse: bool, layers: int
) -> None:
    block, _ = cut_block(make_graph(40, sparse=sparse), 3)
    model = model_of(conv, layers)
    weights = init_weights(model, Key.of(1), torch.float64)
    h = block.x.csr.tensor.to_dense() if isinstance(block.x, SparseRows) else block.x
    with torch.no_grad():
        for layer in range(layers):
            h = reference(conv, weights, layer)(h, edges(block))
            h = h if layer == layers - 1 else h.relu()
    # The model has dropout, but without a key there is none.
    close(forward(model, weights, block), h)


@EVERY_CONV
def test_dropout_falls_on_the_hidden_rows_by_key_layer_and_row_key(
    make_graph: MakeGraph, cut_block: MakeBlock, conv: str
) -> None:
    block, _ = cut_block(make_graph(40), 3)
    model, key = model_of(conv), Key.of(8)
    weights = init_weights(model, Key.of(1), torch.float64)
    assert isinstance(block.x, Tensor)
    h = block.x
    with torch.no_grad():
        for layer in range(model.layers):
            if layer:
                keep = key.fold("dropout", layer).keep(block.row_key, h.shape[1], DROP)
                h = h * keep / keep_probability(DROP)
            h = reference(conv, weights, layer)(h, edges(block))
            h = h if layer == model.layers - 1 else h.relu()
    close(forward(model, weights, block, key), h)


@EVERY_CONV
def test_a_dropout_of_0_draws_nothing(
    make_graph: MakeGraph, cut_block: MakeBlock, conv: str
) -> None:
    block, _ = cut_block(make_graph(40), 3)
    model = replace(model_of(conv), dropout=0.0)
    weights = init_weights(model, Key.of(1), torch.float64)
    assert torch.equal(forward(model, weights, block, Key.of(0)), forward(model, weights, block))


@EVERY_CONV
@pytest.mark.parametrize("sparse", [False, True])
def test_stacked_forward_does_not_depend_on_the_grouping(
    make_graph: MakeGraph, cut_block: MakeBlock, conv: str, sparse: bool
) -> None:
    block, _ = cut_block(make_graph(60, sparse=sparse), 5)
    model, key = model_of(conv), Key.of(8)
    weights = stacked_weights(model, 5)
    out = forward(model, weights, block, key)
    for positions in ([0], [1], [2], [3], [4], [3, 1], [4, 0, 2]):
        chosen = torch.tensor(positions)
        part = {name: w[chosen] for name, w in weights.items()}
        got = forward(model, part, block.take(chosen), key)
        # Bit by bit: products run client by client, and so do the draws.
        assert torch.equal(got, torch.cat([out[block.client == c] for c in positions]))


@EVERY_CONV
def test_shared_forward_does_not_depend_on_the_grouping(
    make_graph: MakeGraph, cut_block: MakeBlock, conv: str
) -> None:
    block, _ = cut_block(make_graph(60), 5)
    model, key = model_of(conv), Key.of(8)
    weights = init_weights(model, Key.of(1), torch.float64)
    out = forward(model, weights, block, key)
    for c in range(5):
        # One product over all rows may round differently from a product over some.
        close(forward(model, weights, block.take(torch.tensor([c])), key), out[block.client == c])


def test_dropout_masks_do_not_depend_on_the_grouping(
    make_graph: MakeGraph, cut_block: MakeBlock
) -> None:
    block, _ = cut_block(make_graph(60), 5)
    ones, key = torch.ones(60, 9, dtype=torch.float64), Key.of(2)
    whole = dropout(ones, DROP, block.row_key, key)
    assert set(whole.unique().tolist()) == {0.0, 1 / keep_probability(DROP)}
    for c in range(5):
        rows = block.client == c
        one = block.take(torch.tensor([c]))
        assert torch.equal(dropout(ones[rows], DROP, one.row_key, key), whole[rows])
    assert not torch.equal(dropout(ones, DROP, block.row_key, key.fold(1)), whole)


@pytest.mark.parametrize("drop", [0.1, 0.5, 0.9])
def test_dropout_is_unbiased(drop: float) -> None:
    rows, draws = torch.arange(20), 4000
    x = torch.linspace(-2, 3, 20 * 6, dtype=torch.float64).view(20, 6)
    total = torch.zeros_like(x)
    for draw in range(draws):
        total += dropout(x, drop, rows, Key.of(0).fold(draw))
    # The factor is 0 or 1/p: its variance is (1 - p)/p. Five standard deviations of the mean.
    p = keep_probability(drop)
    bound = 5 * x.abs() * ((1 - p) / p / draws) ** 0.5
    assert bool(((total / draws - x).abs() <= bound + 1e-12).all())


def test_dropout_scales_the_gradient_as_the_value() -> None:
    x = torch.linspace(1, 2, 12, dtype=torch.float64).view(4, 3).requires_grad_()
    out = dropout(x, DROP, torch.arange(4), Key.of(0))
    (grad,) = torch.autograd.grad(out.sum(), x)
    close(grad * x, out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dropout_keeps_the_dtype(dtype: torch.dtype) -> None:
    assert dropout(torch.ones(4, 3, dtype=dtype), 0.5, torch.arange(4), Key.of(0)).dtype == dtype


@EVERY_CONV
def test_initial_weights_are_the_same_numbers_in_both_precisions(conv: str) -> None:
    model = model_of(conv)
    double = init_weights(model, Key.of(3), torch.float64)
    single = init_weights(model, Key.of(3), torch.float32)
    assert list(double) == list(single)
    for name, value in double.items():
        assert single[name].dtype == torch.float32
        assert torch.equal(single[name], value.float())


@EVERY_CONV
def test_initial_weights_of_every_layer(conv: str) -> None:
    model = model_of(conv)
    weights = init_weights(model, Key.of(3), torch.float64)
    assert model.widths == [7, 6, 6, 3]
    names = ["weight", "root", "bias"] if conv == "sage" else ["weight", "bias"]
    expected = {
        f"{layer}.{name}": (outputs,) if name == "bias" else (inputs, outputs)
        for layer, (inputs, outputs) in enumerate([(7, 6), (6, 6), (6, 3)])
        for name in names
    }
    assert {name: tuple(w.shape) for name, w in weights.items()} == expected
    # No layer starts as a copy of another, drawn at equal or at other widths.
    assert not torch.equal(weights["1.weight"], weights["0.weight"][:6])
    deeper = init_weights(replace(model, layers=4), Key.of(3), torch.float64)
    assert not torch.equal(deeper["1.weight"], deeper["2.weight"])
    # A layer's draws depend on its number and widths only.
    assert torch.equal(deeper["1.weight"], weights["1.weight"])
    other = init_weights(model, Key.of(4), torch.float64)
    assert not torch.equal(other["0.weight"], weights["0.weight"])


def test_one_layer_goes_from_features_to_outputs() -> None:
    assert model_of("gcn", 1).widths == [7, 3]


def test_layers_past_the_tenth_keep_their_own_weights(
    make_graph: MakeGraph, cut_block: MakeBlock
) -> None:
    # "1." is a prefix of "1.weight", not of "10.weight" or "11.weight".
    block, _ = cut_block(make_graph(20), 2)
    model = replace(model_of("mlp", 12), dropout=0.0)
    weights = {
        name: w if w.dim() == 2 else w + 1.0  # keeps units alive through all layers
        for name, w in init_weights(model, Key.of(0), torch.float64).items()
    }
    assert isinstance(block.x, Tensor)
    h = block.x
    for layer in range(12):
        h = h @ weights[f"{layer}.weight"] + weights[f"{layer}.bias"]
        h = h if layer == 11 else h.relu()
    assert float(h.std(dim=0).min()) > 1e-4
    close(forward(model, weights, block), h)


def test_an_unknown_convolution_is_told(make_graph: MakeGraph, cut_block: MakeBlock) -> None:
    model = replace(model_of("gcn"), conv="gcm")
    message = r"^unknown convolution 'gcm': did you mean 'gcn'\? Choices: gcn, mlp, sage$"
    with pytest.raises(ConfigError, match=message):
        init_weights(model, Key.of(0), torch.float64)
    block, _ = cut_block(make_graph(20), 2)
    with pytest.raises(ConfigError, match=message):
        forward(model, init_weights(model_of("gcn"), Key.of(0), torch.float64), block)
