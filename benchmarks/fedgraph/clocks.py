"""FedGraph beside full batches, GraphSAGE and FastGCN in one exchange, under two virtual clocks.

    python benchmarks/fedgraph/clocks.py DATA_DIR    runs what the lines lack, writes the page
    python benchmarks/fedgraph/clocks.py             writes the page of what is there

Both clocks are functions of a run's ledger, so one run has the seconds of both. Learning rates are
chosen by the validation score of a seed that is not among those of the table.
"""

import json
import lzma
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import silograph as sg
from silograph.core.files import write_atomic
from silograph.experiment.terminal_table import markdown_table
from silograph.federation.ledger import VirtualClock
from silograph.study.reproduce import replace_section

HERE = Path(__file__).parent
LINES, PAGE = HERE / "clocks.jsonl.xz", HERE / "clocks.md"
SEEDS, TUNING_SEED, RATES, ROUNDS = (0, 1, 2), 10, (0.03, 0.1, 0.3), 30
RUN: dict[str, Any] = {
    "method": "fedgraph",
    "clients": 10,
    "partition": "metis",
    "model": "gcn",
    "layers": 2,
    "hidden": 128,
    "dropout": 0.5,
    "local_epochs": 1,
    "optimizer": "adam",
    "server_optimizer": "none",
    "weight_decay": 5e-4,
    "keep_optimizer": True,
    "kernels": "torch",
    "threads": 1,
}
FULL, SMALL, HALF = "full batch", "FedGraph, small", "FedGraph, half"
METHODS: dict[str, dict[str, Any]] = {
    FULL: {"options": {"kappa": 1024, "keep_1": 1.0, "keep_2": 1.0}},
    HALF: {"options": {"kappa": 256, "keep_1": 0.5, "keep_2": 0.5}},
    SMALL: {"options": {"kappa": 64, "keep_1": 0.2, "keep_2": 0.2}},
    "GraphSAGE (25, 10)": {"fanout": "25,10", "options": {"kappa": 256}},
    "FastGCN (256)": {
        "neighbors": "fastgcn",
        "options": {"neighbors.size": 256, "method.kappa": 256},
    },
}
# Operations a second, bytes a second, seconds of latency.
CLOCKS = {"messages": (1e9, 10e6, 0.05), "computation": (1e8, 1e9, 0.0005)}
Line = dict[str, Any]


def read() -> list[Line]:
    """Return the lines that have run."""
    if not LINES.exists():
        return []
    return [json.loads(text) for text in lzma.decompress(LINES.read_bytes()).splitlines()]


def write(lines: Sequence[Line]) -> None:
    """Write the lines."""
    text = "".join(json.dumps(line) + "\n" for line in lines)
    write_atomic(LINES, lzma.compress(text.encode()))


def seconds_by_round(result: sg.Result, clock: str) -> list[float]:
    """Return the seconds of a clock after each round, those before round 1 included."""
    speed, bandwidth, latency = (np.full(RUN["clients"], v) for v in CLOCKS[clock])
    records, total, by_round = list(result.ledger.records), 0.0, list[float]()
    for t in range(ROUNDS + 1):
        mine = [record for record in records if record.round == t]
        total += VirtualClock(speed, bandwidth, latency).seconds(mine)
        by_round.append(total)
    return by_round[1:]


def line_of(method: str, lr: float, seed: int, data_dir: str) -> Line:
    """Run a method."""
    own = {**RUN, **METHODS[method], "lr": lr, "seed": seed, "rounds": ROUNDS}
    result = sg.run("pubmed", data_dir=data_dir, **own)
    rows = result.rounds
    assert result.test.server is not None
    return {
        "method": method,
        "lr": lr,
        "seed": seed,
        "validation": [row["val_server_accuracy"] for row in rows],
        "virtual": {clock: seconds_by_round(result, clock) for clock in CLOCKS},
        "test": result.test.server.accuracy,
        "row_bytes": result.ledger.bytes_by_kind.get("embeddings", 0),
    }


def run_missing(data_dir: str) -> None:
    """Run what is missing: all rates with the tuning seed, then the chosen ones with the others."""
    lines = read()

    def add(method: str, lr: float, seed: int) -> None:
        if not any((e["method"], e["lr"], e["seed"]) == (method, lr, seed) for e in lines):
            lines.append(line_of(method, lr, seed, data_dir))
            write(lines)
            print(method, lr, seed, f"{max(lines[-1]['validation']):.4f}", flush=True)

    for method in METHODS:
        for lr in RATES:
            add(method, lr, TUNING_SEED)
    for seed in SEEDS:
        for method in METHODS:
            add(method, rate_of(lines, method), seed)


def rate_of(lines: Sequence[Line], method: str) -> float:
    """Return the learning rate with the best validation score of the tuning seed."""
    tried = [e for e in lines if e["method"] == method and e["seed"] == TUNING_SEED]
    best: float = max(tried, key=lambda e: max(e["validation"]))["lr"]
    return best


def time_to(line: Line, goal: float, clock: str) -> float | None:
    """Return the seconds until a validation score; None if it was not reached."""
    pairs = zip(line["validation"], line["virtual"][clock], strict=True)
    return next((s for score, s in pairs if score >= goal), None)


def time_text(lines: Sequence[Line], goals: dict[int, float], clock: str) -> str:
    """Return the mean seconds to the goals, or how many seeds reached theirs."""
    times = [time_to(line, goals[line["seed"]], clock) for line in lines]
    reached = [t for t in times if t is not None]
    if len(reached) < len(times):
        return f"{len(reached)} of {len(times)}"
    return f"{statistics.mean(reached):.1f}"


def table(lines: Sequence[Line]) -> str:
    """Return the table; a seed's goal is the best validation score of full batches less a point."""
    judged = [e for e in lines if e["seed"] in SEEDS]
    goals = {e["seed"]: max(e["validation"]) - 0.01 for e in judged if e["method"] == FULL}
    rows = []
    for method in METHODS:
        mine = [e for e in judged if e["method"] == method and e["seed"] in goals]
        if not mine:
            continue
        tests = [100 * e["test"] for e in mine]
        spread = f" ± {statistics.stdev(tests):.1f}" if len(tests) > 1 else ""
        per_round = [
            statistics.mean(e["virtual"][clock][-1] for e in mine) / ROUNDS for clock in CLOCKS
        ]
        rows.append(
            [
                method,
                f"{rate_of(lines, method):g}",
                str(len(mine)),
                f"{statistics.mean(tests):.1f}{spread}",
                *(time_text(mine, goals, clock) for clock in CLOCKS),
                *(f"{s:.2f}" for s in per_round),
                f"{statistics.mean(e['row_bytes'] for e in mine) / 1e6:.1f}",
            ]
        )
    head = ["method", "rate", "seeds", "test"]
    head += [f"s to the goal, {clock}" for clock in CLOCKS]
    head += [f"s a round, {clock}" for clock in CLOCKS]
    return markdown_table([*head, "MB of rows"], rows)


def rates_table(lines: Sequence[Line]) -> str:
    """Return the best validation scores of the tuning seed."""
    rows = []
    for method in METHODS:
        scores = {
            e["lr"]: max(e["validation"])
            for e in lines
            if e["method"] == method and e["seed"] == TUNING_SEED
        }
        rows.append([method, *(f"{100 * scores[lr]:.1f}" if lr in scores else "-" for lr in RATES)])
    return markdown_table(["method", *(f"rate {lr:g}" for lr in RATES)], rows)


def main() -> None:
    """Run what is missing where data is given, and write the page."""
    if len(sys.argv) > 1:
        run_missing(sys.argv[1])
    text, lines = PAGE.read_text(), read()
    for name, section in (("table", table(lines)), ("rates", rates_table(lines))):
        text = replace_section(text, name, section)
    write_atomic(PAGE, text)


if __name__ == "__main__":
    main()
