"""A model of your own: any torch.nn.Module that takes features and edges.

Shows: a class given to `sg.run(model=...)`, trained client by client, averaged by its named
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
        self.norm = nn.LayerNorm(64)  # not BatchNorm, whose statistics are not weights
        self.out = nn.Linear(64, outputs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return (n, outputs) from x (n, features) and edge_index (2, edges)."""
        out: Tensor = self.out(torch.relu(self.norm(self.spread(x, edge_index))))
        return out


if __name__ == "__main__":
    graph = sg.load("digits")
    print(graph)
    for model in ("gcn", TwoSteps):
        result = sg.run(graph, model=model, clients=4, partition="metis", rounds=15)
        assert result.test.server is not None
        print(f"{model}: accuracy {result.test.server.accuracy:.4f}, {result.bytes / 1e6:.2f} MB")
    assert result.model is not None
    print({name: tuple(weight.shape) for name, weight in result.model.weights.items()})
