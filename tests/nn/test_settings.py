"""Laws of the settings of training: dropout of features and of attention, by known masks."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from layers import model_of
from silograph.core.key import Key, keep_probability
from silograph.graph.block.block import ClientBlock, Route, SparseRows
from silograph.graph.graph import Graph
from silograph.nn.conv import GAT, SLOPE, Params, internal_messages
from silograph.nn.model import MODELS

MakeGraph = Callable[..., Graph]
MakeBlock = Callable[..., tuple[ClientBlock, Route]]

DROP = 0.4
KEY = Key.of(8)


def close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


def dense_x(block: ClientBlock) -> Tensor:
    return block.x.csr.tensor.to_dense() if isinstance(block.x, SparseRows) else block.x


def gradients(loss: Tensor, weights: Params) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(weights.values())))


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("conv", sorted(MODELS))
def test_features_are_dropped_by_the_draws_of_stage_0(
    make_graph: MakeGraph, cut_block: MakeBlock, conv: str, sparse: bool, stacked: bool
) -> None:
    """As the same model on features that a known mask has gone over, hidden draws included."""
    block, _ = cut_block(make_graph(40, sparse=sparse), 3)
    model = model_of(conv, features=block.num_features, input_dropout=DROP)
    keep = KEY.fold("dropout", 0).keep(block.row_key, block.num_features, DROP)
    masked = replace(block, x=dense_x(block) * keep / keep_probability(DROP))
    weights = model.init_weights(Key.of(1), torch.float64)
    if stacked:
        weights = {n: torch.stack([w, 2 * w, -w]) for n, w in weights.items()}
    weights = {n: w.requires_grad_() for n, w in weights.items()}
    ours = model.forward(weights, block, KEY)
    theirs = replace(model, input_dropout=0.0).forward(weights, masked, KEY)
    close(ours, theirs)
    pairs = zip(gradients(ours.sum(), weights), gradients(theirs.sum(), weights), strict=True)
    for left, right in pairs:
        close(left, right)
    assert torch.equal(
        model.forward(weights, block), replace(model, input_dropout=0.0).forward(weights, block)
    )


def attention(p: Params, z: Tensor, block: ClientBlock, heads: int) -> Tensor:
    """Return the softmax over neighbors and self as a dense (n, n, heads)."""
    n = len(z)
    own = z.view(n, heads, -1)
    sent, heard = (own * p["sender"]).sum(2), (own * p["receiver"]).sum(2)
    score = leaky_relu(sent[None] + heard[:, None], SLOPE)
    linked = torch.eye(n, dtype=torch.bool)
    linked[block.adj.row, block.adj.indices.long()] = True
    return score.masked_fill(~linked[..., None], -torch.inf).softmax(1)


def test_attention_is_dropped_after_its_softmax(
    make_graph: MakeGraph, cut_block: MakeBlock
) -> None:
    """By Velickovic et al., section 3.3; self loops, too, each edge and head by itself."""
    block, _ = cut_block(make_graph(30), 2)
    conv, n = GAT(2, concat=False), len(block.y)
    p = conv.init(Key.of(1), block.num_features, 4)
    messages = internal_messages(block, torch.float64)
    z = conv.map(p, block.x, block.off)
    dropping = messages.with_dropout(DROP, block.row_key, KEY)
    assert dropping.attention is not None
    row, column = (t.flatten() for t in torch.meshgrid(*2 * [torch.arange(n)], indexing="ij"))
    ones = torch.ones(n * n, 2, dtype=torch.float64)
    factor = dropping.attention.apply_dropout(ones, row, column).view(n, n, 2)
    weight = attention(p, z, block, 2) * factor
    expected = torch.einsum("ijh,jhd->ihd", weight, z.view(n, 2, -1))
    close(conv.combine(p, z, dropping), expected)
    kept = factor > 0
    close(factor[kept], torch.full_like(factor[kept], 1 / keep_probability(DROP)))
    assert abs(float(kept.double().mean()) - keep_probability(DROP)) < 0.04
    assert not torch.equal(kept, kept.transpose(0, 1))  # both directions by themselves
    assert not torch.equal(kept[..., 0], kept[..., 1])


def test_dropped_attention_does_not_depend_on_the_grouping(
    make_graph: MakeGraph, cut_block: MakeBlock
) -> None:
    block, _ = cut_block(make_graph(40, sparse=True), 3)
    model = model_of("gat", features=block.num_features, input_dropout=DROP, attention_dropout=DROP)
    weights = model.init_weights(Key.of(1), torch.float64)
    together = model.forward(weights, block, KEY)
    apart = [model.forward(weights, block.take(torch.tensor([c])), KEY) for c in range(3)]
    close(together, torch.cat(apart))
    plain = replace(model, attention_dropout=0.0).forward(weights, block, KEY)
    assert not torch.allclose(together, plain)
