"""A graph of torch_geometric becomes a federation.

Shows: `sg.from_pyg` on a `Data`, its masks included; a cut into clients by METIS; training on the
split that came with the data; the server's model saved, loaded and used on a graph.

The graph is generated here: four groups of nodes that mostly link to their own. Pass yours, such
as `Planetoid(root, "Cora")[0]`, instead.
"""

import tempfile
from pathlib import Path

import torch
from torch_geometric.data import Data
from torch_geometric.utils import stochastic_blockmodel_graph

import silograph as sg

torch.manual_seed(0)
sizes, within, across = [100] * 4, 0.08, 0.005
link = [[within if a == b else across for b in range(4)] for a in range(4)]
y = torch.arange(4).repeat_interleave(100)
order = torch.randperm(400)
masks = torch.zeros(3, 400, dtype=torch.bool)
for mask, part in zip(masks, order.split([120, 120, 160]), strict=True):
    mask[part] = True
data = Data(
    x=torch.eye(4)[y] + 1.5 * torch.randn(400, 4),
    edge_index=stochastic_blockmodel_graph(sizes, link),
    y=y,
    train_mask=masks[0],
    val_mask=masks[1],
    test_mask=masks[2],
)

graph = sg.from_pyg(data, name="groups")
print(graph)
result = sg.run(graph, clients=5, partition="metis", split="public", rounds=40, hidden=16)
print(result)
print(f"best round by validation: {result.best_round}, {result.bytes / 1e6:.2f} MB exchanged")

assert result.model is not None
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "groups.safetensors")
    result.model.save(path)
    model = sg.load_model(path)
right = model.predict(graph) == y.numpy()
print(f"the model from its file, on the test nodes: {right[data.test_mask.numpy()].mean():.3f}")
