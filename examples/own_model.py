"""A model of your own: any torch.nn.Module that takes features and edges.

Shows: a class handed to `sg.run(model=...)`, trained client by client, averaged by its named
parameters, and used again. On the command line: `--model own_model.py:TwoSteps`.
"""

import torch
from torch import Tensor, nn
from torch_geometric.nn import SGConv

import silograph as sg


class TwoSteps(nn.Module):
    """Features averaged over two hops, then a perceptron; made with the graph's numbers."""

    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()
        self.spread = SGConv(features, 64, K=2)
        self.norm = nn.LayerNorm(64)  # not BatchNorm, whose statistics are no weights
        self.dropout = nn.Dropout(0.2)
        self.out = nn.Linear(64, outputs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return (n, outputs) from x (n, features) and edge_index (2, edges)."""
        h = torch.relu(self.norm(self.spread(x, edge_index)))
        out: Tensor = self.out(self.dropout(h))
        return out


graph = sg.load("digits")
print(graph)
for name, model in (("GCN", "gcn"), ("own", TwoSteps)):
    result = sg.run(graph, model=model, clients=4, partition="metis", rounds=15)
    scores = result.test.server
    assert scores is not None
    print(f"{name}: accuracy {scores.accuracy:.4f}, {result.bytes / 1e6:.2f} MB")
assert result.model is not None
print({name: tuple(w.shape) for name, w in result.model.weights.items()})
