"""Your own data become a federation: CSV tables, or a graph of torch_geometric.

Shows: `sg.from_csv` with a column that says which bank has an account, `partition="silo"`, and
predictions for accounts without a label; `sg.from_pyg` with the masks of a `Data`.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch_geometric.data import Data

import silograph as sg

rng = np.random.default_rng(0)
mule, bank = rng.integers(0, 2, 300), rng.integers(0, 3, 300)
nodes = ["id,label,silo,payments,age"]
for row, (m, b) in enumerate(zip(mule, bank, strict=True)):
    label = "" if row % 4 == 0 else "mule" if m else "regular"
    nodes.append(f"account-{row},{label},bank {b},{rng.normal() + 2 * m:.2f},{rng.normal():.2f}")
pairs = [(a, b) for a, b in rng.integers(0, 300, (3000, 2)) if mule[a] == mule[b]]
with tempfile.TemporaryDirectory() as folder:
    Path(folder, "nodes.csv").write_text("\n".join(nodes))
    edges = ["source,target", *(f"account-{a},account-{b}" for a, b in pairs)]
    Path(folder, "edges.csv").write_text("\n".join(edges))
    graph = sg.from_csv(nodes=Path(folder, "nodes.csv"), edges=Path(folder, "edges.csv"))
print(graph)
print(result := sg.run(graph, partition="silo", split="0.5/0.25/0.25", rounds=20, hidden=16))
assert result.model is not None
print("account-0:", graph.class_names[result.model.predict(graph)[0]])

x, y = torch.eye(2)[mule] + torch.randn(300, 2), torch.as_tensor(mule)
data = Data(x=x, y=y, edge_index=torch.as_tensor(np.array(pairs)).T)
data.train_mask, data.val_mask, data.test_mask = (
    torch.arange(300) // 100 == torch.arange(3)[:, None]
)
print(graph := sg.from_pyg(data, name="pyg"))
print(sg.run(graph, clients=5, partition="metis", split="public", rounds=20, hidden=16))
