"""What a step of label-guided global training costs beside CAGNET, BNS-GCN and FedAvg.

    python benchmarks/local_bias/training_overhead.py --data-dir ../shared/data

measures the cells that `overhead.jsonl` does not hold yet, one line each, and rewrites
`overhead.md` and its plots; it can be stopped and continued. A race times epochs that nobody
judges, all methods in turn, in one process on one thread. A cell of memory runs every method in a
process of its own.
"""

import argparse
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "speed"))

from recipe_pubmed import ALL, DRAWN, PROTOCOL, VARIANTS
from side import Ours, Row, add_line, latest, machine, write_page
from timing import Plan, medians, ratios, take_turns
from training_overhead_page import plots, text

from silograph.core.config import make_config
from silograph.experiment.run.setup import prepare
from silograph.graph.datasets import is_generated, load
from silograph.graph.graph import Graph

HERE = Path(__file__).parent
LINES, PAGE = HERE / "overhead.jsonl", HERE / "overhead.md"
MANY_ROUNDS = 10**6  # a benchmark stops by itself
CLIENTS = (4, 8)
SAMPLES = (1000, 2500, 5000, 10000, None)
WARM_UP, ROUNDS = 2, 3  # of a measurement of memory


@dataclass(frozen=True)
class Shape:
    """A graph and what trains on it.

    Attributes:
        sample: nodes drawn in a step.
        options: of a run, where they differ from those of the recipe.
    """

    sample: int
    options: dict[str, Any] = field(default_factory=dict)


SCALE = 0.1
SHAPES = {
    "pubmed": Shape(5000),
    # The paper draws 50,000 nodes of Reddit; the share is the same.
    "reddit": Shape(
        round(50_000 * SCALE),
        {"dataset": "generated:reddit", "scale": SCALE, "split": "public", "layers": 4},
    ),
}


def sides_of(sample: int | None) -> dict[str, dict[str, Any]]:
    """Return the methods, by name."""
    drawn = DRAWN | {"normalize": "conditional", "sample": sample}
    return {
        "drawn": ALL | {"options": drawn},
        "all nodes": ALL,
        "BNS-GCN, rate .1": VARIANTS["BNS-GCN, rate .1"][0],
        "CAGNET": VARIANTS["CAGNET, GCN"][0],
        "FedAvg": VARIANTS["FedAvg, GCN"][0],
        "FedAvg, torch kernels": VARIANTS["FedAvg, GCN"][0] | {"kernels": "torch"},
    }


def graph_of(options: dict[str, Any], data_dir: str | None) -> Graph:
    """Return the graph of a run; a generated one is kept where all others of its kind are."""
    name = options["dataset"]
    if is_generated(name):
        return load(name, scale=options["scale"])
    return load(name, data_dir=data_dir)


def ours(shape: str, clients: int, own: dict[str, Any], data_dir: str | None) -> Ours:
    """Return a method on a shape, ready to train."""
    options = PROTOCOL | SHAPES[shape].options | {"model": "gcn", "lr": 0.01, "seed": 0} | own
    options |= {"clients": clients, "rounds": MANY_ROUNDS}
    config = make_config(options)
    return Ours(prepare(config, graph_of(options, data_dir)))


def race(shape: str, clients: int, plan: Plan) -> Row:
    """Time epochs of all methods, and count what they send."""
    methods = sides_of(SHAPES[shape].sample)
    sides = {name: ours(shape, clients, own, plan.data_dir) for name, own in methods.items()}
    before = {name: sent(side) for name, side in sides.items()}
    spent = take_turns({name: side.train for name, side in sides.items()}, plan)
    model = sides["drawn"].setup
    route = model.federation.route
    return {
        "shape": shape,
        "clients": clients,
        "turns": len(spent["drawn"]),
        "seconds": {name: medians(turns) for name, turns in spent.items()},
        "over_cagnet": {name: ratios(spent, name, "CAGNET") for name in sides},
        "over_fedavg": {name: ratios(spent, name, "FedAvg") for name in sides},
        "bytes": {name: epoch_bytes(side, before[name]) for name, side in sides.items()},
        "nodes": model.cut.graph.num_nodes,
        "edges": model.cut.graph.num_edges,
        "slots": int(route.slot_off[-1]),
        "sample": SHAPES[shape].sample,
        "layers": model.config.layers,
        "hidden": model.config.hidden,
    }


def sent(side: Ours) -> dict[str, int]:
    """Return bytes so far, by kind."""
    return side.setup.federation.ledger.bytes_by_kind


def epoch_bytes(side: Ours, before: dict[str, int]) -> dict[str, float]:
    """Return mean bytes of an epoch by kind, both directions, from those before the first."""
    rounds = side.snapshot.round
    return {
        kind: round((total - before.get(kind, 0)) / rounds, 1)
        for kind, total in sent(side).items()
        if total > before.get(kind, 0)
    }


def samples(plan: Plan) -> Row:
    """Time epochs on PubMed, 8 clients, by the number of nodes drawn."""
    sides = {
        str(sample): ours(
            "pubmed", 8, ALL if sample is None else sides_of(sample)["drawn"], plan.data_dir
        )
        for sample in SAMPLES
    }
    before = {name: sent(side) for name, side in sides.items()}
    spent = take_turns({name: side.train for name, side in sides.items()}, plan)
    return {
        "turns": len(spent["None"]),
        "seconds": {name: medians(turns) for name, turns in spent.items()},
        "over_all": {name: ratios(spent, name, "None") for name in sides},
        "bytes": {name: epoch_bytes(side, before[name]) for name, side in sides.items()},
        "nodes": sides["None"].setup.cut.graph.num_nodes,
    }


def memory(shape: str, clients: int, plan: Plan) -> Row:
    """Measure how much memory an epoch needs, each method in a process of its own."""
    found = {}
    for name in sides_of(None):
        asked = json.dumps([shape, clients, name, plan.data_dir])
        child = [sys.executable, __file__, "--child", asked]
        done = subprocess.run(child, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{name}: {done.stderr.strip().splitlines()[-1:]}")
        found[name] = json.loads(done.stdout.splitlines()[-1])
    return {"shape": shape, "clients": clients, "epoch_bytes": found}


def child(shape: str, clients: int, name: str, data_dir: str | None) -> float:
    """Return the median of what epochs needed beyond what was there before, in bytes."""
    torch.set_num_threads(1)
    side = ours(shape, clients, sides_of(SHAPES[shape].sample)[name], data_dir)
    for _ in range(WARM_UP):
        side.train()
    return statistics.median(needed(side.train) for _ in range(ROUNDS))


def needed(act: Callable[[], object]) -> int:
    """Return how far resident memory rises above what it was, in bytes (Linux, glibc)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free but not given back is no rise later
    resident = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    act()
    return status("VmHWM") - resident


def status(name: str) -> int:
    """Return a figure of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


CELLS: dict[str, Callable[[Plan], Row]] = {
    **{f"{s}-{c}": partial(race, s, c) for s in SHAPES for c in CLIENTS},
    "samples": samples,
    **{f"memory-{s}-{c}": partial(memory, s, c) for s in SHAPES for c in CLIENTS},
}


def measure(name: str, plan: Plan) -> Row:
    """Return one line of `overhead.jsonl`."""
    before, began = os.getloadavg()[0], time.monotonic()
    figures = CELLS[name](plan)
    return {
        "cell": name,
        **figures,
        "took": round(time.monotonic() - began, 1),
        "load": [round(load, 2) for load in (before, os.getloadavg()[0])],
        **machine(),
    }


def write(rows: dict[str, Row]) -> None:
    """Write the page and its plots."""
    write_page(PAGE, text(rows))
    for name, svg in plots(rows).items():
        (PAGE.parent / name).write_text(svg)


def arguments() -> argparse.Namespace:
    """Return what the command line says."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--data-dir", help="folder in which graphs are looked for first")
    parser.add_argument(
        "--cells",
        nargs="*",
        choices=CELLS,
        default=list(CELLS),
        metavar="CELL",
        help="which cells (default: all); none only rewrites the page; one of " + ", ".join(CELLS),
    )
    parser.add_argument("--rounds", type=int, default=30, help="most turns of a method")
    parser.add_argument("--seconds", type=float, default=60, help="no new turn after this long")
    parser.add_argument("--force", action="store_true", help="measure again what is there")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure what is missing; write line and page after every cell."""
    given = arguments()
    if given.child:
        print(child(*json.loads(given.child)))
        return
    plan = Plan(given.data_dir, max(2, given.rounds), given.seconds)
    torch.set_num_threads(1)
    rows = latest(LINES)
    for name in given.cells:
        if given.force or name not in rows:
            rows[name] = measure(name, plan)
            add_line(LINES, rows[name])
            print(f"{name} ({rows[name]['took']} s)", flush=True)
            write(rows)
    write(rows)


if __name__ == "__main__":
    main()
