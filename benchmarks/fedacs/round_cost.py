"""What a round on a rating graph costs, beside an epoch on all ratings in one graph.

    python benchmarks/fedacs/round_cost.py DATA [epinions | ciao]

prints the tables of round_cost.md. Every row is a process of its own, so that its peak of memory
is its own; rows take turns. CPU seconds of a round without evaluation, the median of three rounds
after a first one, and the range of these medians over turns.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import silograph as sg
from silograph.core.config import make_config
from silograph.core.key import Key
from silograph.experiment.run.run import first_snapshot
from silograph.experiment.run.setup import Setup, prepare

ROUNDS, TURNS = 3, 1
ROWS: dict[str, dict[str, Any]] = {
    "all ratings in one graph": {"method": "centralized", "clients": 20},
    "10 clients": {"method": "fedavg", "clients": 10},
    "20 clients": {"method": "fedavg", "clients": 20},
}
MODELS: dict[str, dict[str, Any]] = {
    f"rating_gcn, {kernels}": {
        "model": "rating_gcn",
        "layers": 5,
        "options": {"model.embedding": 64},
        "kernels": kernels,
    }
    for kernels in ("torch", "compiled")
}
ASKED: dict[str, Any] = {
    "partition": "category",
    "split": "0.8/0.1/0.1",
    "hidden": 32,
    "dropout": 0.0,
    "optimizer": "adam",
    "lr": 0.01,
    "weight_decay": 5e-4,
    "local_epochs": 1,
    "keep_optimizer": False,
}
PARTS = {
    "products of matrices": ("mm", "addmm", "bmm"),
    "sums over edges": ("_embedding_bag_forward_only", "_SparseProduct"),
    "rows taken and added": ("index_select", "scatter_add_", "index", "index_add_", "nonzero"),
    "sums, products and ReLU of entries": (
        *("add", "add_", "mul", "mul_", "clamp_min", "threshold_backward", "sub", "sum", "div"),
        *("addcmul_", "addcdiv_", "addcdiv", "sqrt", "square", "pow", "neg", "lerp_"),
    ),
    "memory set and copied": ("fill_", "copy_", "zero_"),
}


def peak() -> float:
    """Return the most memory that this process has had, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def rounds_of(setup: Setup) -> Callable[[int], float]:
    """Return a function that runs a round and returns its CPU seconds."""
    state = [first_snapshot(setup).state]

    def go(t: int) -> float:
        began = time.process_time()
        state[0], _ = setup.method.round(
            setup.federation, setup.method_config, state[0], t, Key.of(t)
        )
        return time.process_time() - began

    return go


def shares(go: Callable[[int], float]) -> dict[str, float]:
    """Return which share of a round's time is spent on what."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        go(ROUNDS + 2)
    spent: Counter[str] = Counter()
    for event in found.key_averages():
        name = event.key.removeprefix("aten::")
        part = next((part for part, names in PARTS.items() if name in names), "other")
        spent[part] += event.self_cpu_time_total
    return {part: spent[part] / spent.total() for part in (*PARTS, "other")}


def table_bytes(setup: Setup) -> int:
    """Return the bytes of the clients' tables."""
    fields = (item for state in setup.federation.states() for item in state.items())
    return sum(f.t.numel() * f.t.element_size() for name, f in fields if name.startswith("tables/"))


def measure(data: str, dataset: str, model: str, row: str) -> dict[str, Any]:
    """Return figures of one row."""
    graph = sg.load(dataset, data_dir=data)
    asked = ASKED | MODELS[model] | ROWS[row] | {"rounds": 3}
    setup = prepare(make_config(asked | {"dataset": "given"}), graph)
    go = rounds_of(setup)
    go(1)
    seconds = [go(t) for t in range(2, 2 + ROUNDS)]
    told: dict[str, Any] = {"seconds": statistics.median(seconds), "peak": peak()}
    told |= {"tables": table_bytes(setup), "shares": shares(go)}
    with tempfile.TemporaryDirectory() as out:
        sg.run(graph, **asked, out=str(Path(out) / "run"), checkpoint_every=1)
        sizes = [path.stat().st_size for path in Path(out).rglob("*.checkpoint")]
    return told | {"checkpoint": max(sizes), "peak_of_run": peak()}


def main(data: str, dataset: str) -> None:
    """Print the tables of all rows."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for _ in range(TURNS):
        for model in MODELS:
            for row in ROWS:
                command = [sys.executable, __file__, data, dataset, model, row]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                told = json.loads(done.stdout.splitlines()[-1])
                found.setdefault((model, row), []).append(told)
    print(f"\n| {dataset} | | CPU s | of turns | times one graph | peak | tables | checkpoint |")
    print("|---|---|---|---|---|---|---|---|")
    for (model, row), each in found.items():
        one = found[model, next(iter(ROWS))]
        seconds = [told["seconds"] for told in each]
        ratio = statistics.median(
            told["seconds"] / a["seconds"] for told, a in zip(each, one, strict=True)
        )
        last = each[-1]
        ends = f"{min(seconds):.2f} to {max(seconds):.2f}"
        size = f"{last['checkpoint'] / last['tables']:.3f} x tables"
        memory = f"{max(told['peak_of_run'] for told in each):.2f} GB"
        cells = [f"{statistics.median(seconds):.2f}", ends, f"{ratio:.2f}", memory]
        print("|", " | ".join([model, row, *cells, f"{last['tables'] / 1e6:.0f} MB", size]), "|")
    print(f"\n| {dataset} | {' | '.join(f'{m}, {r}' for m, r in found)} |")
    print("|---" * (1 + len(found)) + "|")
    for part in (*PARTS, "other"):
        told = [statistics.median(t["shares"][part] for t in each) for each in found.values()]
        print(f"| {part} | {' | '.join(f'{share:.0%}' for share in told)} |")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    if len(sys.argv) > 3:
        print(json.dumps(measure(*sys.argv[1:5])))
    else:
        main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "epinions")
