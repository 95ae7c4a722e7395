"""How fast rounds are, beside loops over torch_geometric models, OpenFGL, C++, earlier versions.

    python benchmarks/speed/bench.py --data-dir ../shared/data [--openfgl DIR] [--before DIR]

measures the cells that `bench.jsonl` does not hold yet, one line each, and rewrites the tables in
`bench.md`; it can be stopped and continued. A race times rounds of the loops of `loop.py` and of
silograph in turn, in one process on one thread, every round judged on all sides; its figures are
medians of the ratios of neighboring turns. All sides first show that they train the same weights.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from cells import (
    BATCH,
    EPOCHS,
    FASTEST,
    KEPT_MEMORY,
    METHODS,
    PEERS,
    PROCESSES,
    RACES,
    SAMPLED,
    SILOS,
    THREADS,
    VARIANTS,
    VERSIONS,
    Row,
    Shape,
)
from page import lines_of, tables
from peers import race_peers
from race import ours, pair, race
from side import Ours, add_line, latest, machine, write_page
from silo_rounds import race_silos
from timing import Plan, commands
from versions import race_versions

from silograph.experiment.run.setup import prepare
from silograph.graph.graph import subgraph

HERE = Path(__file__).parent
LINES, PAGE = HERE / "bench.jsonl", HERE / "bench.md"
ADDRESS_SPACE = 8 << 30  # B; a run that wants more fails by itself instead of by the system


def epochs_text(number: int) -> str:
    """Return a number of local epochs in words."""
    return f"{number} epoch{'s' if number > 1 else ''}"


def epoch(shape: Shape, plan: Plan) -> Row:
    """Time federated rounds over as many centralized epochs, both with our fastest kernels."""
    row: Row = {}
    for epochs in (1, 3):
        own = replace(shape, epochs=epochs)
        fed, center = (
            ours(own, plan, method=method, **VARIANTS[FASTEST])
            for method in ("fedavg", "centralized")
        )
        row[f"{epochs_text(epochs)}, not judged"] = pair(fed.train, center.train, plan)
        row[f"{epochs_text(epochs)}, judged"] = pair(fed.round, center.round, plan)
    return {"epochs": row}


def over(shape: Shape, plan: Plan, one: dict[str, Any], other: dict[str, Any]) -> Row:
    """Time rounds with some options over rounds with others, both with our fastest kernels."""
    row: Row = {}
    for epochs in (1, 3):
        own = replace(shape, epochs=epochs)
        first, second = (ours(own, plan, **asked, **VARIANTS[FASTEST]) for asked in (one, other))
        row[epochs_text(epochs)] = pair(first.round, second.round, plan)
    return {"epochs": row}


def threads(shape: Shape, plan: Plan) -> Row:
    """Time rounds on one thread over rounds on two, with our fastest kernels."""
    one, two = (ours(shape, plan, threads=n, **VARIANTS[FASTEST]).round for n in (1, 2))
    return pair(one, two, plan)


def half(shape: Shape, plan: Plan, number: int) -> Ours:
    """Return our side with every second client, sorted by size, as a federation of its own."""
    whole = ours(shape, plan, **VARIANTS[FASTEST]).setup.cut
    sizes = torch.tensor([len(nodes) for nodes in whole.partition.nodes])
    chosen = sizes.argsort(descending=True, stable=True)[number::2]
    nodes = torch.cat([whole.partition.nodes[client] for client in chosen.tolist()])
    silo = torch.repeat_interleave(torch.arange(len(chosen)), sizes[chosen])
    graph = subgraph(replace(whole.graph, silo=None, split=whole.split), nodes)
    options = {"partition": "silo", "clients": None, "split": "public", **VARIANTS[FASTEST]}
    names = tuple(whole.partition.ids[client] for client in chosen.tolist())
    cut = replace(graph, silo=silo, silo_names=names)
    return Ours(prepare(shape.config(**options), cut))


def train_half(shape: Shape, plan: Plan, channel: Connection) -> None:
    """Run a round of the second half whenever told to."""
    torch.set_num_threads(1)
    side = half(shape, plan, 1)
    channel.send(None)
    while channel.recv():
        side.round()
        channel.send(None)


def processes(shape: Shape, plan: Plan) -> Row:
    """Time rounds of one process over rounds of two that wait for each other but send nothing.

    What two processes could give at best: weights and clients' state would have to cross besides.
    """
    whole, first = ours(shape, plan, **VARIANTS[FASTEST]), half(shape, plan, 0)
    here, there = get_context("spawn").Pipe()
    child = get_context("spawn").Process(target=train_half, args=(shape, plan, there))
    child.start()
    here.recv()

    def both() -> None:
        here.send(True)
        first.round()
        here.recv()

    try:
        return pair(whole.round, both, plan)
    finally:
        here.send(False)
        child.join()


def show_help(plan: Plan) -> Row:
    """Time the help page."""
    del plan
    return {"seconds_a_call": commands(lambda _: ["--help"], 9)}


def first_round(plan: Plan) -> Row:
    """Time a whole run of one round, default config: an upper bound of the way to that round."""
    place = [] if plan.data_dir is None else ["--data-dir", plan.data_dir]
    start = ["run", "cora", "--rounds", "1", "--quiet", *place, "--out"]
    return {"seconds_a_call": commands(lambda out: [*start, out], 5)}


CHILD = """
import json, resource, sys
import silograph as sg, torch
run = sg.run  # imports it
limit, options = json.loads(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
def peak():  # not ru_maxrss: on Linux a process inherits it from the one that started it
    return [line for line in open("/proc/self/status") if line.startswith("VmHWM")][0].split()[1]
start = peak()
run(**options)
print(start, peak())
"""


def memory(options: dict[str, Any], variants: dict[str, dict[str, Any]], plan: Plan) -> Row:
    """Return the peak resident memory in GB of a run, by variant, and of its imports (Linux)."""
    peaks: dict[str, float | str] = {}
    imports = 0.0
    for name, own in variants.items():
        given = json.dumps([ADDRESS_SPACE, {**options, "data_dir": plan.data_dir, **own}])
        child = [sys.executable, "-c", CHILD, given]
        done = subprocess.run(child, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            imports, peaks[name] = (round(int(n) * 1024 / 1e9, 3) for n in done.stdout.split())
        else:
            why = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            peaks[name] = f"failed: {why[0][:120].replace('|', '/')}"
    return {"peak_gb": peaks, "imports_gb": imports}


LARGE_RUN = {"dataset": "coauthor_cs", "clients": 1000, "hidden": 256, "rounds": 3}
DRAWN = {"batch_size": BATCH}
KEPT_RUN = Shape("cora", 100, 1).options() | {"rounds": 3}
CELLS: dict[str, Callable[..., Row]] = {  # of a `plan`
    **{name: partial(race, shape) for name, shape in RACES.items()},
    **{name: partial(epoch, shape) for name, (shape, _) in EPOCHS.items()},
    **{
        cell: partial(over, shape, one={"method": name}, other={})
        for cell, (name, shape, _) in METHODS.items()
    },
    **{
        cell: partial(over, shape, one=DRAWN | {"neighbors": "fedgrains"}, other=DRAWN)
        for cell, (shape, _) in SAMPLED.items()
    },
    **{name: partial(race_peers, shape) for name, shape in PEERS.items()},
    "memory-kept": partial(memory, KEPT_RUN, KEPT_MEMORY),
    **{name: partial(race_versions, version) for name, version in VERSIONS.items()},
    **{name: partial(race_silos, number) for name, (number, _) in SILOS.items()},
    **{name: partial(threads, shape) for name, shape in THREADS.items()},
    **{name: partial(processes, shape) for name, shape in PROCESSES.items()},
    "help": show_help,
    "first-round": first_round,
    "memory": partial(memory, LARGE_RUN, VARIANTS),
}


def measure(name: str, plan: Plan) -> Row:
    """Return one line of `bench.jsonl`."""
    before, began = os.getloadavg()[0], time.monotonic()
    figures = CELLS[name](plan=plan)
    return {
        "cell": name,
        "kernels": list(VARIANTS),
        **figures,
        "took": round(time.monotonic() - began, 1),
        "load": [round(load, 2) for load in (before, os.getloadavg()[0])],
        **machine(),
    }


def arguments() -> argparse.Namespace:
    """Return what the command line says."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--data-dir", help="folder in which graphs are looked for first")
    parser.add_argument("--openfgl", type=Path, help="checkout of OpenFGL, raced in peers-*")
    parser.add_argument(
        "--before",
        type=Path,
        help="checkout of an earlier silograph with its environment in .venv, for before-*",
    )
    parser.add_argument(
        "--cells",
        nargs="*",
        choices=CELLS,
        default=list(CELLS),
        metavar="CELL",
        help="which cells (default: all); none only rewrites the page; one of " + ", ".join(CELLS),
    )
    parser.add_argument("--rounds", type=int, default=30, help="most turns of a side")
    parser.add_argument("--seconds", type=float, default=60, help="no new turn after this long")
    parser.add_argument("--force", action="store_true", help="measure again what is there")
    return parser.parse_args()


def main() -> None:
    """Measure what is missing; write line and page after every cell."""
    given = arguments()
    turns = max(2, given.rounds)
    plan = Plan(given.data_dir, turns, given.seconds, given.openfgl, given.before)
    torch.set_num_threads(1)
    rows, failed = latest(LINES), []
    write_page(PAGE, tables(rows))
    for name in given.cells:
        if not given.force and name in rows and rows[name]["kernels"] == list(VARIANTS):
            continue
        if name in VERSIONS and plan.before is None:
            print(f"{name}: skipped, as it needs --before", file=sys.stderr)
            continue
        try:
            rows[name] = measure(name, plan)
        except RuntimeError as error:  # the other cells do not depend on it
            failed.append(name)
            print(f"{name}: FAILED: {error}", file=sys.stderr, flush=True)
            continue
        add_line(LINES, rows[name])
        write_page(PAGE, tables(rows))
        print(*lines_of(name, rows[name]), f"({rows[name]['took']} s)", sep="\n  ", flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
