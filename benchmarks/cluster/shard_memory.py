"""Memory and CPU time of sharding a graph, and of ten rounds of FedAvg on the shards.

    python benchmarks/cluster/shard_memory.py [--share 100]

The graph has a share of the nodes and edges of ogbn-papers100M (111 M nodes, 1.6 G edges), drawn at
random, its 128 features and 172 classes; 1,000 clients are cut at random. Each step is a process of
its own, so that its peak is that of the step.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from worker_costs import drawn_graph

import silograph as sg

NODES, EDGES, FEATURES, CLASSES = 111_059_956, 1_615_685_872, 128, 172
CLIENTS, ROUNDS = 1000, 10


def shard(folder: Path, share: int) -> dict[str, float]:
    """Draw a graph and write its shards; return what that took."""
    graph = drawn_graph(NODES // share, EDGES // share, FEATURES, CLASSES)
    drawn, start = peak_bytes(), time.process_time()
    shards = sg.shard(graph, clients=CLIENTS, partition="random", out=str(folder))
    seconds = time.process_time() - start
    return {"files": shards.clients.num_bytes, "graph_peak": drawn, "shard_seconds": seconds}


def train(folder: Path) -> dict[str, float]:
    """Train on shards; return what that took."""
    imported, start = peak_bytes(), time.process_time()
    sg.run(folder, rounds=ROUNDS, hidden=64, eval_every=ROUNDS)
    return {"imported_peak": imported, "train_seconds": time.process_time() - start}


def peak_bytes() -> int:
    """Return the peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Run both steps, and print a line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--share", type=int, default=100, help="one in so many nodes and edges")
    parser.add_argument("--step", choices=["shard", "train"])
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.step is not None:
        row = shard(given.folder, given.share) if given.step == "shard" else train(given.folder)
        sys.stdout.write(json.dumps(row | {f"{given.step}_peak": peak_bytes()}) + "\n")
        return
    with tempfile.TemporaryDirectory() as name:
        row = {"share": given.share}
        for step in ("shard", "train"):
            words = ["--step", step, "--folder", f"{name}/shards", "--share", str(given.share)]
            command = [sys.executable, __file__, *words]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            row |= json.loads(done.stdout.splitlines()[-1])
    sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
