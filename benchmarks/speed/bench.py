"""How fast rounds are: silograph beside a plain loop over torch_geometric models.

    python benchmarks/speed/bench.py --data-dir ../shared/data

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
from functools import lru_cache, partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch
from cells import (
    BATCH,
    EPOCHS,
    FASTEST,
    METHODS,
    PROCESSES,
    RACES,
    SAMPLED,
    THREADS,
    VARIANTS,
    Row,
    Shape,
)
from loop import PlainLoop, TunedLoop, best_form
from page import lines_of, tables
from side import Ours, add_line, latest, machine, write_page
from timing import Plan, commands, medians, ratios, take_turns

from silograph.experiment.resolve.resolve import DTYPES
from silograph.experiment.run.setup import Setup, prepare
from silograph.graph.block.block import make_block
from silograph.graph.datasets import load
from silograph.graph.graph import Graph, subgraph
from silograph.nn.conv import Params

HERE = Path(__file__).parent
LINES, PAGE = HERE / "bench.jsonl", HERE / "bench.md"
GUARD_ROUNDS = 2
# Most that logits may be apart. In float32 Adam turns the rounding of a gradient near 0 into a
# step, so that float64 has to tell whether the same is computed.
TOLERANCE = {"float64": 1e-8, "float32": 1e-2}
ADDRESS_SPACE = 8 << 30  # B; a run that wants more fails by itself instead of by the system


class Side(Protocol):
    """A runner of a race."""

    @property
    def weights(self) -> Params:
        """The averaged model."""

    def round(self) -> object:
        """Run one round and judge it."""


@lru_cache(maxsize=1)
def graph_of(dataset: str, data_dir: str | None) -> Graph:
    """Return a graph; the last one is kept, as neighboring cells share it."""
    return load(dataset, data_dir=data_dir)


def ours(shape: Shape, plan: Plan, **options: Any) -> Ours:
    """Return silograph's side of a shape."""
    return Ours(prepare(shape.config(**options), graph_of(shape.dataset, plan.data_dir)))


def sides_of(
    shape: Shape, plan: Plan, form: str | None, dtype: str = "float32"
) -> tuple[dict[str, Side], str, Setup]:
    """Return all sides with the same first weights, the tuned loop's form, and a set-up of ours.

    Args:
        shape: the federation.
        plan: where the data are.
        form: how the tuned loop holds features; None tries all forms.
        dtype: precision of all sides.
    """
    mine = {name: ours(shape, plan, dtype=dtype, **own) for name, own in VARIANTS.items()}
    setup, weights = mine[FASTEST].setup, mine[FASTEST].weights
    form = form or best_form(setup.cut, setup.config, weights)
    plain = PlainLoop(setup.cut, setup.config, weights)
    tuned = TunedLoop(setup.cut, setup.config, weights, form)
    return {"loop": plain, "tuned": tuned, **mine}, form, setup


def agreement(shape: Shape, plan: Plan, form: str, dtype: str) -> dict[str, float]:
    """Return how far each side's logits are from the loop's after some rounds without dropout.

    Raises:
        RuntimeError: a side does other work than the loop.
    """
    sides, _, setup = sides_of(replace(shape, dropout=0.0), plan, form, dtype)
    block, _ = make_block(setup.cut.graph, setup.cut.partition, setup.cut.split, DTYPES[dtype])
    logits = {}
    for name, side in sides.items():
        for _ in range(GUARD_ROUNDS):
            side.round()
        with torch.no_grad():
            logits[name] = setup.method_config.model.forward(side.weights, block)
    plain = logits.pop("loop")
    apart = {name: float((out - plain).abs().max()) for name, out in logits.items()}
    if not all(gap <= TOLERANCE[dtype] for gap in apart.values()):  # NaN fails too
        raise RuntimeError(
            f"expected {dtype} logits within {TOLERANCE[dtype]:g} of the loop's after "
            f"{GUARD_ROUNDS} rounds, got {apart}: the sides do not do the same work"
        )
    return {name: float(f"{gap:.2g}") for name, gap in apart.items()}


def race(shape: Shape, plan: Plan) -> Row:
    """Race the loops and every variant of ours."""
    sides, form, setup = sides_of(shape, plan, None)
    apart = {dtype: agreement(shape, plan, form, dtype) for dtype in TOLERANCE}
    spent = take_turns({name: side.round for name, side in sides.items()}, plan)
    return {
        "apart": apart,
        "form": form,
        "turns": len(spent["loop"]),
        "seconds_a_round": {name: medians(turns) for name, turns in spent.items()},
        "over_loop": {name: ratios(spent, "loop", name) for name in ("tuned", *VARIANTS)},
        "over_tuned": {name: ratios(spent, "tuned", name) for name in VARIANTS},
        "partition": setup.cut.partition.hash,
    }


def pair(one: Callable[[], object], other: Callable[[], object], plan: Plan) -> Row:
    """Time rounds of two sides; return the ratio of the first to the second."""
    spent = take_turns({"one": one, "other": other}, plan)
    return {
        "turns": len(spent["one"]),
        "seconds_a_round": [medians(spent["one"]), medians(spent["other"])],
        "ratio": ratios(spent, "one", "other"),
    }


def epoch(shape: Shape, plan: Plan) -> Row:
    """Time federated rounds over as many centralized epochs, both with our fastest kernels."""
    row: Row = {}
    for epochs in (1, 3):
        own = replace(shape, epochs=epochs)
        fed, center = (
            ours(own, plan, method=method, **VARIANTS[FASTEST])
            for method in ("fedavg", "centralized")
        )
        plural = "s" if epochs > 1 else ""
        row[f"{epochs} epoch{plural}, not judged"] = pair(fed.train, center.train, plan)
        row[f"{epochs} epoch{plural}, judged"] = pair(fed.round, center.round, plan)
    return {"epochs": row}


def method(name: str, shape: Shape, plan: Plan) -> Row:
    """Time rounds of a method over rounds of FedAvg, both with our fastest kernels."""
    row: Row = {}
    for epochs in (1, 3):
        own = replace(shape, epochs=epochs)
        this, fedavg = (
            ours(own, plan, method=each, **VARIANTS[FASTEST]) for each in (name, "fedavg")
        )
        row[f"{epochs} epoch{'s' if epochs > 1 else ''}"] = pair(this.round, fedavg.round, plan)
    return {"epochs": row}


def sampled(shape: Shape, plan: Plan) -> Row:
    """Time FedGrAINS over the same batches of all neighbors, both with our fastest kernels."""
    row: Row = {}
    for epochs in (1, 3):
        own = replace(shape, epochs=epochs)
        chosen = ours(own, plan, batch_size=BATCH, neighbors="fedgrains", **VARIANTS[FASTEST])
        full = ours(own, plan, batch_size=BATCH, **VARIANTS[FASTEST])
        row[f"{epochs} epoch{'s' if epochs > 1 else ''}"] = pair(chosen.round, full.round, plan)
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


def show_help(_plan: Plan) -> Row:
    """Time the help page."""
    return {"seconds_a_call": commands(lambda _: ["--help"], 9)}


def first_round(plan: Plan) -> Row:
    """Time a whole run of one round, default config: an upper bound of the way to that round."""
    place = [] if plan.data_dir is None else ["--data-dir", plan.data_dir]
    start = ["run", "cora", "--rounds", "1", "--quiet", *place, "--out"]
    return {"seconds_a_call": commands(lambda out: [*start, out], 5)}


CHILD = """
import json, resource, sys
import silograph as sg
limit, options = json.loads(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
sg.run(**options)
# Not ru_maxrss: on Linux a process inherits it from the one that started it.
print([line for line in open("/proc/self/status") if line.startswith("VmHWM")][0].split()[1])
"""


def memory(plan: Plan) -> Row:
    """Return the peak resident memory of a run of 1,000 clients in GB, by variant (Linux)."""
    run = {"dataset": "coauthor_cs", "clients": 1000, "hidden": 256, "rounds": 3}
    peaks: dict[str, float | str] = {}
    for name, options in VARIANTS.items():
        given = json.dumps([ADDRESS_SPACE, {**run, "data_dir": plan.data_dir, **options}])
        child = [sys.executable, "-c", CHILD, given]
        done = subprocess.run(child, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            peaks[name] = round(int(done.stdout) * 1024 / 1e9, 3)
        else:
            why = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            peaks[name] = f"failed: {why[0][:120].replace('|', '/')}"
    return {"peak_gb": peaks}


CELLS: dict[str, Callable[[Plan], Row]] = {
    **{name: partial(race, shape) for name, shape in RACES.items()},
    **{name: partial(epoch, shape) for name, (shape, _) in EPOCHS.items()},
    **{cell: partial(method, name, shape) for cell, (name, shape, _) in METHODS.items()},
    **{name: partial(sampled, shape) for name, (shape, _) in SAMPLED.items()},
    **{name: partial(threads, shape) for name, shape in THREADS.items()},
    **{name: partial(processes, shape) for name, shape in PROCESSES.items()},
    "help": show_help,
    "first-round": first_round,
    "memory": memory,
}


def measure(name: str, plan: Plan) -> Row:
    """Return one line of `bench.jsonl`."""
    before, began = os.getloadavg()[0], time.monotonic()
    figures = CELLS[name](plan)
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
    plan = Plan(given.data_dir, max(2, given.rounds), given.seconds)
    torch.set_num_threads(1)
    rows, failed = latest(LINES), []
    write_page(PAGE, tables(rows))
    for name in given.cells:
        if not given.force and name in rows and rows[name]["kernels"] == list(VARIANTS):
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
