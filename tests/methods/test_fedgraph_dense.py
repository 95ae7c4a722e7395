"""A round of FedGraph in dense matrices: clients have rates, neighbors and weights of their own."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from runs import FAST
from silograph.core.config import make_config
from silograph.core.key import Key, mix_words, signed
from silograph.experiment.run.run import first_snapshot
from silograph.experiment.run.setup import prepare
from silograph.federation.in_process import InProcess
from silograph.graph.block.block import ClientBlock, Route
from silograph.graph.graph import Graph
from silograph.methods.fedgraph import FEDGRAPH
from silograph.nn.conv import Params

MakeGraph = Callable[..., Graph]
LAYERS, LR = 4, 0.5
FIRST = {"all": 0, "hidden": 1, "none": LAYERS}  # layer that hears other silos


def uniform(words: Tensor) -> Tensor:
    return words.double() * 2.0**-64 + 0.5


def drawn_batch(block: ClientBlock, kappa: Tensor, key: Key) -> Tensor:
    """Which rows are in the batches, (n,) bool: the kappa training rows of the least words."""
    words = key.fold("batch").words(block.row_key, 1)[:, 0]
    found = torch.zeros_like(block.split.train)
    for c, most in enumerate(kappa.tolist()):
        mine = ((block.client == c) & block.split.train).nonzero()[:, 0]
        found[mine[words[mine].argsort()[:most]]] = True
    return found


def sums(
    block: ClientBlock, route: Route, keep: Tensor, key: Key, first: int, rescale: str
) -> list[Tensor]:
    """Every layer's matrix (n, n), eq. 7: what a row that receives counts of each row that sends.

    A row of another silo is its owner's; its key, by which it is drawn, is that of the slot.
    """
    n = len(block.row_key)
    near = torch.zeros(n, n, dtype=torch.float64)
    near[block.adj.row, block.adj.indices.long()] = 1
    slot = block.halo.adj.indices.long()
    owner = block.halo.boundary[route.target][slot]
    far = torch.zeros_like(near)
    far[block.halo.adj.row, owner] = 1
    sender = block.row_key.repeat(n, 1)
    sender[block.halo.adj.row, owner] = block.halo.key[slot]
    found = []
    for layer in range(LAYERS):
        edges = near + far if layer >= first else near
        chance = keep[block.client, min(layer, 2)][:, None]
        hashed = mix_words(block.row_key ^ signed(key.fold("neighbors", layer).value))
        kept = edges * (uniform(mix_words(hashed[:, None] ^ sender)) <= chance)
        count, degree = kept.sum(1, keepdim=True), edges.sum(1, keepdim=True)
        kept = kept * (degree / count.clamp(min=1)) if rescale == "degree" else kept / chance
        root = (degree + 1).rsqrt()
        found.append(root * (kept + torch.eye(n, dtype=torch.float64)) * root.T)
    return found


def passed(
    x: Tensor, matrices: list[Tensor], w: Params, sent: list[Tensor], mine: Tensor
) -> Tensor:
    """Return the logits of the rows `mine`, whose owner has weights w; others' rows are given."""
    for layer, matrix in enumerate(matrices):
        z = torch.where(mine[:, None], x @ w[f"{layer}.weight"], sent[layer])
        x = matrix @ z + w[f"{layer}.bias"]
        x = torch.relu(x) if layer < LAYERS - 1 else x
    return x


def features(block: ClientBlock) -> Tensor:
    assert isinstance(block.x, Tensor)
    return block.x


def messages(block: ClientBlock, matrices: list[Tensor], own: list[Params]) -> list[Tensor]:
    """Return h W of all rows in every layer, each by the weights of its owner (eq. 3)."""
    x, sent = features(block), []
    for layer, matrix in enumerate(matrices):
        weight, bias = (
            torch.stack([w[f"{layer}.{name}"] for w in own])[block.client]
            for name in ("weight", "bias")
        )
        sent.append((x[:, None] @ weight)[:, 0])
        x = torch.relu(matrix @ sent[-1] + bias)
    return sent


def dense_round(
    block: ClientBlock, route: Route, start: Params, keys: list[Key], first: int, rescale: str
) -> Params:
    """Steps of SGD at every client, then the mean by the sizes of the last batches (eq. 8)."""
    own = [start] * block.num_clients
    for key in keys:
        batch = drawn_batch(block, KAPPA, key)
        matrices = sums(block, route, KEEP, key, first, rescale)
        sent, new = messages(block, matrices, own), []
        for c, w in enumerate(own):
            leaves = {name: t.clone().requires_grad_() for name, t in w.items()}
            logits = passed(features(block), matrices, leaves, sent, block.client == c)
            mine = batch & (block.client == c)
            loss = cross_entropy(logits[mine], block.y[mine])
            grads = torch.autograd.grad(loss, list(leaves.values()))
            new.append({n: w[n] - LR * g for n, g in zip(leaves, grads, strict=True)})
        own = new
    size = torch.bincount(block.client[batch]).double()
    return {n: sum(s * w[n] for s, w in zip(size / size.sum(), own, strict=True)) for n in start}


KAPPA = torch.tensor([2, 1024, 3, 1])
KEEP = torch.tensor(
    [[0.9, 0.5, 0.3], [0.4, 0.8, 0.6], [1.0, 0.2, 0.7], [0.6, 1.0, 0.5]], dtype=torch.float64
)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("rescale", ["degree", "inverse"])
@pytest.mark.parametrize("share", ["all", "hidden", "none"])
def test_a_round_is_that_of_dense_matrices(make_graph: MakeGraph, share: str, rescale: str) -> None:
    """Kappa and rates differ by client and layer, and owners' weights after the first step."""
    options = {"share": share, "rescale": rescale, "local_steps": 3, "keep_3": 0.5}
    shape = {"layers": LAYERS, "dropout": 0.0, "weight_decay": 0.0, "block_size": 4}
    steps = {"optimizer": "sgd", "lr": LR, "momentum": 0.0, "keep_optimizer": False}
    config = {
        **FAST,
        **shape,
        **steps,
        "method": "fedgraph",
        "server_optimizer": "none",
        "options": options,
    }
    setup = prepare(make_config(config), make_graph(60))
    fed, start = setup.federation, first_snapshot(setup).state
    assert isinstance(fed, InProcess)
    assert start.weights is not None
    knobs = {"kappa": KAPPA, **{f"keep_{n + 1}": KEEP[:, n] for n in range(3)}}
    cfg, key = replace(setup.method_config, knobs=knobs), Key.of(3)
    fed.start_round(1)
    found, _ = FEDGRAPH.round(fed, cfg, start, 1, key)
    last = key.fold("train", 1)
    keys = [last.fold("step", 0), last.fold("step", 1), last]
    expected = dense_round(
        fed._host.blocks[0].all, fed.route, start.weights, keys, FIRST[share], rescale
    )
    assert found.weights is not None
    for name, w in expected.items():
        torch.testing.assert_close(found.weights[name], w, rtol=0, atol=1e-10)
