"""A plain torch loop over clients with dense matrices: the oracle of methods that change steps."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from silograph.graph.block.block import ClientBlock, SparseRows
from silograph.nn.conv import Params

Change = Callable[[str, Tensor, Tensor], Tensor]  # name, gradient, weight


def dense_client(block: ClientBlock, client: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """GCN's normalized adjacency (n, n), features (n, F), labels and training rows of a client."""
    part = block.take(torch.tensor([client]))
    n = len(part.y)
    adj = torch.eye(n, dtype=torch.float64)
    adj[part.adj.row, part.adj.indices.long()] += 1
    scale = adj.sum(1) ** -0.5
    x = part.x
    if isinstance(x, SparseRows):
        features = torch.zeros(n, x.csr.num_cols, dtype=torch.float64)
        assert x.csr.values is not None
        features[x.csr.row, x.csr.indices.long()] = x.csr.values
    else:
        features = x
    return scale[:, None] * adj * scale, features, part.y, part.split.train


def sgd_steps(
    data: Sequence[Tensor], start: Params, *, steps: int, lr: float, decay: float, change: Change
) -> Params:
    """SGD on the cross-entropy of a two-layer GCN without dropout."""
    adj, x, y, train = data
    w = {name: t.clone() for name, t in start.items()}
    for _ in range(steps):
        w = {name: t.detach().requires_grad_() for name, t in w.items()}
        hidden = torch.relu(adj @ (x @ w["0.weight"]) + w["0.bias"])
        out = adj @ (hidden @ w["1.weight"]) + w["1.bias"]
        loss = torch.nn.functional.cross_entropy(out[train], y[train])
        grads = dict(zip(w, torch.autograd.grad(loss, list(w.values())), strict=True))
        with torch.no_grad():
            w = {k: t - lr * (change(k, grads[k], t) + decay * t) for k, t in w.items()}
    return w
