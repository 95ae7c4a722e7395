"""What selection costs a round with 1,000 clients: CPU time at the server; prints a table.

    python benchmarks/selection/cost.py ../shared/data [pubmed | coauthor_cs | ...]

FedOpt, 1,000 clients, 250 of them in a round where their number is fixed, a GCN of width 128 as on
the page of selectors, no result folder, one thread. Selection is what chooses clients before a
round, and learns from it after it; it is timed inside rounds, so that a figure is a share of the
very rounds it is a part of. Scores on receipt, which some selectors ask for, are clients' work and
not counted as selection. Uniform selection is there for what any choice of some clients costs; what
a selector adds to a round is the rest.
"""

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch

import silograph as sg
from silograph.core.config import make_config
from silograph.experiment.run import run as loop
from silograph.experiment.run import selecting
from silograph.experiment.run.clock import TrainingClock
from silograph.experiment.run.selecting import Selection
from silograph.experiment.run.setup import prepare
from silograph.experiment.run.snapshot import without_parts
from silograph.graph.graph import Graph
from silograph.methods import local_training

CLIENTS, ROUNDS, WARM_UP = 1_000, 30, 12
SELECTORS: Mapping[str, Mapping[str, Any]] = {
    "uniform": {"participation": 0.25},
    "power_of_choice": {"selector.clients": 250},
    "oort": {"selector.clients": 250},
    "harmony": {"selector.clients": 250},
    "ucb": {"selector.arms": 10},
    "ucb with a budget": {"selector.arms": 10, "selector.budget": 10**15},
    "round_robin": {"selector.clients": 250},
}


class Spent:
    """CPU seconds of the process in the functions that it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, whose time is added up."""

        @wraps(call)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - began

        return wrapped


def shares(graph: Graph, name: str, options: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return medians: ms of a round, ms of its selection, and the share of it."""
    asked = {
        "clients": CLIENTS,
        "partition": "random",
        "hidden": 128,
        "split": "0.2/0.4/0.4",
        "rounds": ROUNDS + WARM_UP,
        "eval_every": 10**6,
        "method": "fedopt",
        "selector": name.split()[0],
        "speeds": "lognormal",
        "links": "10:0.05",
        "options": {key: value for key, value in options.items() if "." in key},
        **{key: value for key, value in options.items() if "." not in key},
    }
    setup = prepare(make_config(asked), graph)
    spent, rounds, parts = Spent(), [], []
    names: list[tuple[Any, str]] = [
        (Selection, each) for each in ("choose", "observe", "reason_to_stop")
    ]
    if name == "uniform":  # which methods draw themselves
        names = [(local_training, "selected"), (selecting, "selected")]
    with ExitStack() as stack:
        for owner, each in names:
            timed = spent.timed(getattr(owner, each))
            stack.enter_context(patch.object(owner, each, timed))
        snapshot, selection = loop.first_snapshot(setup), loop._make_selection(setup)
        for _ in range(ROUNDS + WARM_UP):
            spent.seconds, began = 0.0, time.process_time()
            begun = loop.begin_round(setup, selection, snapshot, TrainingClock(0.0))
            state = without_parts(snapshot.state)
            trained = setup.method.round(setup.federation, begun.cfg, state, begun.t, begun.key)
            snapshot, _ = loop.finish_round(setup, selection, snapshot, begun, *trained)
            rounds.append(time.process_time() - began)
            parts.append(spent.seconds)
    rounds, parts = rounds[WARM_UP:], parts[WARM_UP:]
    ratios = [part / whole for part, whole in zip(parts, rounds, strict=True)]
    return tuple(statistics.median(v) for v in (rounds, parts, ratios))  # type: ignore[return-value]


def main(data: str, dataset: str = "pubmed") -> None:
    """Print the table."""
    torch.set_num_threads(1)
    graph = sg.load(dataset, data_dir=data)
    print("| selector | ms a round | of which selection | share |")
    print("|---|---|---|---|")
    for name, options in SELECTORS.items():
        whole, part, share = shares(graph, name, options)
        print(f"| {name} | {1e3 * whole:.1f} | {1e3 * part:.2f} | {share:.1%} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
