"""PyG's own layers as oracle: the same weights, in PyG's names and layout."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import (
    APPNP,
    GATConv,
    GCNConv,
    GINConv,
    SAGEConv,
)
from torch_geometric.nn import GraphConv as PyGGraphConv

from silograph.nn.conv import GAT, GCN, GIN, MLP, SAGE, Conv, GraphConv, PlainConv
from silograph.nn.model import MODELS, Model

CONVS: dict[str, Conv] = {
    "gcn": GCN,
    "sage": SAGE,
    "graphconv": GraphConv,
    "gin": GIN(4),
    "gat": GAT(3, concat=True),
    "gat, mean": GAT(2, concat=False),
    "mlp": MLP,
}


def model_of(
    conv: str, features: int = 7, outputs: int = 3, layers: int = 2, **options: Any
) -> Model:
    """Return a small model with whatever options its layers take."""
    own: dict[str, dict[str, Any]] = {"gat": {"heads": 2}, "appnp": {"hops": 3, "teleport": 0.2}}
    given: dict[str, Any] = {"hidden": 6, "dropout": 0.4, "task": "multiclass"}
    given |= own.get(conv, {}) | options
    return Model(conv, features, outputs=outputs, layers=layers, **given)


COMPILED_MODELS = [conv for conv in MODELS if all(s.conv.kernel for s in model_of(conv).stages)]
MODELS_WITH_SKIPS = [(conv, skips) for conv in MODELS for skips in (False, True)]


class _Linear(nn.Module):
    """A linear layer with the arguments of a convolution."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.lin = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        del edges
        out: Tensor = self.lin(x)
        return out


def pyg_layer(conv: Conv, inputs: int, outputs: int) -> nn.Module:
    """Return PyG's layer of the same kind."""
    layer: Any
    match conv:
        case PlainConv("GCN"):
            layer = GCNConv(inputs, outputs)
        case PlainConv("SAGE"):
            layer = SAGEConv(inputs, outputs)
        case PlainConv("GraphConv"):
            layer = PyGGraphConv(inputs, outputs)
        case GIN(hidden):
            layer = GINConv(
                nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))
            )
        case GAT(heads, concat):
            layer = GATConv(inputs, outputs // heads if concat else outputs, heads, concat)
        case _:
            layer = _Linear(inputs, outputs)
    found: nn.Module = layer.double()
    return found


def pyg_weights(conv: Conv, p: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return our weights under PyG's names; differentiable."""
    match conv:
        case PlainConv("GCN" | "MLP" as plain):
            name = "lin.bias" if plain == "MLP" else "bias"
            return {"lin.weight": p["weight"].T, name: p["bias"]}
        case PlainConv("SAGE"):
            names = ("lin_l.weight", "lin_r.weight", "lin_l.bias")
        case PlainConv("GraphConv"):
            names = ("lin_rel.weight", "lin_root.weight", "lin_rel.bias")
        case GIN():
            pairs = {"nn.0": ("weight", "bias"), "nn.2": ("out", "out_bias")}
            return {
                f"{theirs}.{kind}": p[ours].T if kind == "weight" else p[ours]
                for theirs, both in pairs.items()
                for kind, ours in zip(("weight", "bias"), both, strict=True)
            }
        case GAT():
            return {
                "lin.weight": p["weight"].T,
                "att_src": p["sender"][None],
                "att_dst": p["receiver"][None],
                "bias": p["bias"],
            }
        case _:
            raise AssertionError(conv)
    weight, root, bias = names
    return {weight: p["weight"].T, root: p["root"].T, bias: p["bias"]}


def reference(
    conv: Conv, p: Mapping[str, Tensor], x: Tensor, edges: Tensor, outputs: int
) -> Tensor:
    """Return what PyG's layer gives with these weights; differentiable."""
    layer, weights = pyg_layer(conv, x.shape[1], outputs), pyg_weights(conv, p)
    assert weights.keys() == {name for name, _ in layer.named_parameters()}
    assert all(weights[name].shape == w.shape for name, w in layer.named_parameters())
    out: Tensor = torch.func.functional_call(layer, weights, (x, edges))
    return out


def reference_model(
    model: Model,
    weights: Mapping[str, Tensor],
    x: Tensor,
    edges: Tensor,
    masks: Mapping[int, Tensor] | None = None,
) -> Tensor:
    """Return the logits of a stack of PyG's layers.

    Args:
        model: the shape.
        weights: shared form.
        x: features, dense.
        edges: both directions.
        masks: what the input of a layer is multiplied with.
    """
    for layer in range(model.layers):
        stage = model.stages[layer]
        p = {k.partition(".")[2]: w for k, w in weights.items() if k.split(".")[0] == str(layer)}
        h = x * masks[layer] if masks and layer else x
        h = reference(stage.conv, p, h, edges, model.widths[layer + 1])
        if layer < model.layers - 1:
            h = h.relu()
            h = h + x if model.residual and layer else h
        x = h
    if model.conv == "appnp":
        x = APPNP(model.hops, model.teleport)(x, edges)
    return x
