"""Your own CSV tables become a federation.

Shows: `sg.from_csv` on a table of nodes and one of edges; a column that says who holds each node;
`--partition silo`, one client for each of them; predictions for nodes whose label is missing.

The tables are written here, so that the example runs anywhere: accounts of three banks, money
that goes between them, and the label of some accounts. Put your own files in their place.
"""

import csv
import tempfile
from pathlib import Path

import numpy as np

import silograph as sg

BANKS = ("alpha", "beta", "gamma")


def write_tables(folder: Path) -> None:
    """Write nodes.csv and edges.csv: 300 accounts, a quarter without a label."""
    rng = np.random.default_rng(0)
    kind = rng.integers(0, 2, 300)  # 1: a mule account
    bank = rng.integers(0, len(BANKS), 300)
    label = np.where(rng.random(300) < 0.25, "", np.array(["regular", "mule"])[kind])
    with (folder / "nodes.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["id", "label", "silo", "payments", "amount", "age"])
        features = rng.normal(size=(300, 3)) + (kind[:, None] - 0.5) * [0.6, 0.8, 0.0]
        for row, values in enumerate(features.round(3).tolist()):
            table.writerow([f"account-{row}", label[row], BANKS[bank[row]], *values])
    with (folder / "edges.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["source", "target"])
        for a, b in rng.integers(0, 300, (6000, 2)):
            if rng.random() < (0.6 if kind[a] == kind[b] else 0.1):
                table.writerow([f"account-{a}", f"account-{b}"])


with tempfile.TemporaryDirectory() as name:
    write_tables(Path(name))
    graph = sg.from_csv(nodes=Path(name, "nodes.csv"), edges=Path(name, "edges.csv"), name="banks")
print(graph)
print("silos:", ", ".join(graph.silo_names))

result = sg.run(graph, partition="silo", split="0.5/0.25/0.25", rounds=30, hidden=16)
print(result)

model = result.model
assert model is not None  # only local training has no server model
classes = model.predict(graph)
unknown = np.flatnonzero(graph.y.numpy() == -1)
for row in unknown[:3]:
    print(graph.node_id[row], "without a label, predicted:", graph.class_names[classes[row]])
