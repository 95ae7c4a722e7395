"""What a model does, as one vector: its mean output on a random graph that all clients have.

Baek, Jeong, Jin, Yoon and Hwang, "Personalized subgraph federated learning", ICML 2023, section
3.2: models that do the same are alike, whatever their weights are. The graph has communities of 100
nodes, joined inside with probability .1, and normal features.

The mean is taken before the last product with weights where it can be: mean over rows of
A X W + b = (mean of A X) W + b. Then a model of one layer before its classifier is looked at
through one row of features, and one of two through n x F features once.

C: clients. n: rows of the graph. F: features. D: width of the embedding.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from silograph.core.key import Key
from silograph.core.work import report_rows, work_of
from silograph.graph.block.block import ClientBlock
from silograph.graph.csr import CSR
from silograph.nn.conv import Messages, Params, convolve
from silograph.nn.conv.base import operator
from silograph.nn.conv.plain import PlainConv
from silograph.nn.forward import Stage, Staged, last_layer, leave

COMMUNITY, INSIDE = 100, 0.1  # nodes of a community of the shared graph, and their edges
SHARED_GRAPH = Key.of(0).fold("fedpub")
MOST = 1 << 22  # features of copies of the shared graph that are in memory at once


def body(model: Staged) -> tuple[Stage, ...]:
    """Return the stages before the classifier, the last one without its ReLU."""
    stages = model.stages[: max(last_layer(model), 1)]
    return (*stages[:-1], replace(stages[-1], relu=False))


@dataclass(frozen=True, eq=False)
class _SharedGraph:
    """A random graph that all clients have.

    Attributes:
        x: (n, F) normal features.
        adj: (n, n) edges inside communities, values 1.
    """

    x: Tensor
    adj: CSR

    def messages(self, clients: int) -> Messages:
        """Return who hears whom in as many copies."""
        n = len(self.x)
        adj = CSR.block_diagonal([self.adj] * clients)
        degree = adj.degree.to(self.x.dtype)[:, None]
        off = torch.arange(clients + 1, device=self.x.device) * n
        return Messages(adj, True, degree, degree, None, off, off)


def shared_graph(block: ClientBlock, communities: int) -> _SharedGraph:
    """Return the graph, drawn once for a block: the same for all clients and in all runs."""
    name = ("fedpub", communities)
    return block.origin.once(name, _SharedGraph, lambda: _drawn_graph(block, communities))


def _drawn_graph(block: ClientBlock, communities: int) -> _SharedGraph:
    assert block.adj.values is not None  # blocks carry values of the run's dtype
    dtype, device = block.adj.values.dtype, block.off.device
    n, each = communities * COMMUNITY, SHARED_GRAPH.fold("edges")
    u = torch.stack([each.fold(c).matrix(COMMUNITY, COMMUNITY) for c in range(communities)])
    part, a, b = (torch.triu(u, 1).where(u < INSIDE, 0) > 0).nonzero().T
    rows, cols = part * COMMUNITY + a, part * COMMUNITY + b
    adj = CSR.from_pairs(torch.cat([rows, cols]), torch.cat([cols, rows]), (n, n))
    noise = SHARED_GRAPH.fold("features").matrix(n, block.num_features)
    x = torch.special.ndtri(noise.clamp(min=2.0**-53)).to(device, dtype)
    return _SharedGraph(x, adj.to(device, dtype))


@dataclass(frozen=True, eq=False)
class _Means:
    """Means over the rows that enter a stage of one matrix before a plain sum.

    Attributes:
        heard: (C, I) of what the sum over neighbors makes of them.
        own: (C, I) of the rows themselves.
    """

    heard: Tensor
    own: Tensor


def functional_embedding(
    model: Staged, block: ClientBlock, weights: Params, communities: int
) -> Tensor:
    """Return what each client's model gives on the shared graph, mean over its nodes, (C, D).

    Args:
        model: of layers.
        block: the clients.
        weights: theirs, (C, ...), without masks.
        communities: of the shared graph.
    """
    graph, stages = shared_graph(block, communities), body(model)
    with torch.no_grad():
        if len(stages) == 1 and isinstance(stages[0].conv, PlainConv):
            means = _common_means(block, graph, stages[0].conv, communities)
            return _through(stages[0], means, _of_stage(weights, 0))
        many, parts = max(1, MOST // graph.x.numel()), []
        for positions in torch.arange(block.num_clients).split(many):
            mine = {name: w[positions[0] : positions[-1] + 1] for name, w in weights.items()}
            with work_of(positions):
                parts.append(_outputs(stages, graph, mine, len(positions)))
        return torch.cat(parts)


def _of_stage(weights: Mapping[str, Tensor], number: int) -> Params:
    """Return the weights of a stage by their names in it."""
    prefix = f"{number}."
    return {k.removeprefix(prefix): w for k, w in weights.items() if k.startswith(prefix)}


def _outputs(
    stages: tuple[Stage, ...], graph: _SharedGraph, weights: Params, clients: int
) -> Tensor:
    """Return the mean output of models (C, ...) on copies of a graph, (C, D)."""
    messages = graph.messages(clients)
    x = graph.x.repeat(clients, 1)
    for number, stage in enumerate(stages):
        p = _of_stage(weights, number)
        if number == len(stages) - 1 and isinstance(stage.conv, PlainConv):
            report_rows(messages.off, 2 * x.shape[1] * (stage.conv.sums + 1))
            return _through(stage, _means(stage.conv, x, messages, clients), p)
        x = leave(stage, convolve(stage.conv, p, x, messages), x, None, messages)
    return x.view(clients, len(graph.x), -1).mean(1)


def _common_means(
    block: ClientBlock, graph: _SharedGraph, conv: PlainConv, communities: int
) -> _Means:
    """Return the means of the graph's features, which are the same for all, worked out once.

    They count as work of nobody, as the graph itself does.
    """
    name = ("fedpub", communities, conv)
    found = block.origin.once(name, _Means, lambda: _means(conv, graph.x, graph.messages(1), 1))
    clients = block.num_clients
    return _Means(found.heard.expand(clients, -1), found.own.expand(clients, -1))


def _means(conv: PlainConv, x: Tensor, messages: Messages, clients: int) -> _Means:
    """Return the means of the rows (C * n, I) of copies of the graph."""
    rows = x.view(clients, -1, x.shape[1])
    own = rows.mean(1)
    if not conv.sums:
        return _Means(own, own)
    matrix, n = operator(conv.scales, messages), rows.shape[1]
    assert matrix.values is not None  # an operator has some
    share = matrix.values.new_zeros(len(x)).index_add_(0, matrix.indices.long(), matrix.values) / n
    return _Means(torch.einsum("n,cni->ci", share[:n], rows), own)


def _through(stage: Stage, means: _Means, p: Params) -> Tensor:
    """Return the mean of what a stage without ReLU gives, (C, O), from those that enter it."""
    off = torch.arange(len(means.own) + 1, device=means.own.device)
    one = means.own.new_ones(len(means.own), 1)
    nobody = CSR(torch.zeros_like(off), off[:0], None, len(one))
    messages = Messages(nobody, True, one, one, None, off, off)
    out = stage.conv.finish(p, means.own, stage.conv.map(p, means.heard, off), messages)
    return leave(stage, out, means.own, None, messages)
