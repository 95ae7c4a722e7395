"""What generating a graph takes: seconds, memory and disk; and what the graphs are like.

    python benchmarks/speed/generate.py --folder DIR

Every cell is made once in a process of its own on one core, into DIR, which needs 5 GB, and
deleted again. `--cells NAME:SCALE ...` chooses cells, `--scores` trains linear models instead.
The tables in generate.md are what it prints.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

import silograph as sg
from silograph.graph.graph import Graph

CELLS = ("yelp:1", "reddit:0.1", "reddit:1", "amazon2m:0.1", "ogbn-products:1", "amazon2m:1.62")
SCORED = ("reddit:0.1", "amazon2m:0.1", "ogbn-products:0.1", "yelp:0.1")
ROWS = 1 << 16  # nodes looked at in one block
STEPS, BATCH = 400, 8192  # of a linear model
MADE = 0.9  # share that is done when all arrays are on disk, but not yet mapped for the fingerprint


def peak() -> float:
    """Return the most memory this process has had so far, in MiB; pages of mapped files count."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(name: str, scale: float, folder: str) -> dict[str, float]:
    """Return the figures of one cell."""
    before_mapping = 0.0

    def report(_what: str, share: float) -> None:
        nonlocal before_mapping
        if share <= MADE:
            before_mapping = peak()

    os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
    wall, cpu = time.perf_counter(), time.process_time()
    sg.generate(name, scale=scale, data_dir=folder, report=report)
    row = {"seconds": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    row |= {"before_mapping": before_mapping, "peak": peak()}
    wall = time.perf_counter()
    graph = sg.generate(name, scale=scale, data_dir=folder)
    row["again"] = time.perf_counter() - wall
    files = Path(folder, "generated").rglob("*.*")
    row["disk"] = sum(file.stat().st_size for file in files if file.is_file()) / 1e9
    return row | structure(graph)


def structure(graph: Graph) -> dict[str, float]:
    """Return degrees, and the share of edges inside a community."""
    degree = graph.adj.degree
    assert graph.silo is not None
    inside, home = 0, graph.silo.int()
    for start in range(0, graph.num_nodes, ROWS):
        end = min(start + ROWS, graph.num_nodes)
        first, last = int(graph.adj.indptr[start]), int(graph.adj.indptr[end])
        mine = torch.repeat_interleave(home[start:end], degree[start:end])
        inside += int((mine == home[graph.adj.indices[first:last].long()]).sum())
    return {
        "nodes": graph.num_nodes,
        "edges": graph.num_edges,
        "mean": float(degree.double().mean()),
        "median": float(degree.double().median()),
        "largest": int(degree.max()),
        "alone": float((degree == 0).double().mean()),
        "inside": inside / graph.adj.nnz,
    }


def linear(graph: Graph, features: list[np.ndarray]) -> float:
    """Return test accuracy (micro F1 of label bits) of a linear model trained with Adam."""
    assert graph.split is not None
    x = torch.from_numpy(np.concatenate(features, axis=1))
    x = (x - x.mean(dim=0)) / x.std(dim=0)
    torch.manual_seed(0)
    model = torch.nn.Linear(x.shape[1], graph.num_classes)
    adam = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-4)
    train, test = graph.split.train.nonzero()[:, 0], graph.split.test
    bits = graph.task == "multilabel"
    for _ in range(STEPS):
        rows = train[torch.randint(len(train), (min(len(train), BATCH),))]
        out, y = model(x[rows]), graph.y[rows]
        loss = binary_cross_entropy_with_logits(out, y.float()) if bits else cross_entropy(out, y)
        adam.zero_grad()
        loss.backward()
        adam.step()
    with torch.no_grad():
        out, y = model(x[test]), graph.y[test]
    if not bits:
        return float((out.argmax(dim=1) == y).double().mean())
    return float(2 * ((out > 0) & (y == 1)).sum() / ((out > 0).sum() + y.sum()))


def scores(name: str, scale: float, folder: str) -> dict[str, float]:
    """Return scores of linear models that see features, and means of them over neighbors."""
    torch.set_num_threads(1)
    graph = sg.generate(name, scale=scale, data_dir=folder)
    assert isinstance(graph.x, torch.Tensor)
    adjacency = graph.adj.scipy(np.float32)
    share = (1 / graph.adj.degree.clamp(min=1).float().numpy())[:, None]
    x = graph.x.numpy()
    near = share * (adjacency @ x)
    far = share * (adjacency @ near)
    return {
        "features": linear(graph, [x]),
        "hop": linear(graph, [x, near]),
        "hops": linear(graph, [x, near, far]),
    }


def row_of(cell: str, found: dict[str, float], scored: bool) -> str:
    """Return one line of a table."""
    name, scale = cell.split(":")
    if scored:
        cells = [f"{found[key]:.3f}" for key in ("features", "hop", "hops")]
    else:
        cells = [f"{found['nodes']:,.0f}", f"{found['edges']:,.0f}"]
        cells += [f"{found['seconds']:.0f}", f"{found['cpu']:.0f}"]
        cells += [f"{found['before_mapping']:,.0f}", f"{found['peak']:,.0f}"]
        cells += [f"{found['disk']:.2f}", f"{1000 * found['again']:.0f}"]
        cells += [f"{found['mean']:.1f}", f"{found['median']:.0f}", f"{found['largest']:,.0f}"]
        cells += [f"{100 * found['alone']:.1f} %", f"{found['inside']:.2f}"]
    return f"| {name} | {scale} | " + " | ".join(cells) + " |"


def main() -> None:
    """Print a table, each cell measured in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--cells", nargs="+")
    parser.add_argument("--scores", action="store_true")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        name, scale, folder = given.one
        print(json.dumps((scores if given.scores else measure)(name, float(scale), folder)))
        return
    columns = "graph | scale | features | + neighbors | + their neighbors"
    if not given.scores:
        columns = (
            "graph | scale | nodes | edges | s | CPU s | MiB | MiB, mapped | GB on disk | "
            "ms again | mean degree | median | largest | none | inside"
        )
    print(f"| {columns} |\n|" + "---|" * (columns.count("|") + 1))
    for cell in given.cells or (SCORED if given.scores else CELLS):
        folder = tempfile.mkdtemp(dir=given.folder)
        try:
            command = [sys.executable, __file__, "--one", *cell.split(":"), folder]
            command += ["--scores"] * given.scores
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        finally:
            shutil.rmtree(folder)
        print(row_of(cell, json.loads(done.stdout), given.scores), flush=True)


if __name__ == "__main__":
    main()
