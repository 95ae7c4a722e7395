"""CPU of a round of real silos, all processes together, beside the same run in one process."""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "federation"))

from cells import ADAM, Row
from timing import Plan, Spent, medians, ratios
from whole_runs import Command, Federation

from silograph.core.config import make_config

FIRST, LAST = 20, 80  # rounds between which CPU is read; connections and kernels come before
TURNS = 2
# The simulation in one block, and in blocks of one client as silos have them.
SIMULATIONS: dict[str, list[object]] = {"simulation": [], "blocks of 1": ["--block-size", 1]}


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process so far, of all its threads (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def round_of(commands: Sequence[Command], rounds_done: Callable[[], int]) -> Spent:
    """Return the seconds of a round of a run that has been started, CPU of all its processes."""

    def wait_for(number: int) -> tuple[int, float, float]:
        while (done := rounds_done()) < number:
            assert all(each.process.poll() is None for each in commands), commands[0].said()
            time.sleep(0.02)
        return done, time.perf_counter(), sum(cpu_seconds(each.process.pid) for each in commands)

    first, wall, cpu = wait_for(FIRST)
    last, wall_after, cpu_after = wait_for(LAST)
    for each in commands:
        each.ends_well()
    return Spent((wall_after - wall) / (last - first), (cpu_after - cpu) / (last - first))


def race_silos(number: int, plan: Plan) -> Row:
    """Time rounds of silos over rounds of simulations with the same result, by TLS on loopback."""
    values: dict[str, Any] = {"dataset": "cora", "clients": number, "partition": "metis"}
    own = {"method": "fedavg", "local_epochs": 1, "rounds": LAST + 5, "data_dir": plan.data_dir}
    own["evaluation_min_count"] = 5  # a server's default, and more work than a simulation's, 0
    spent: dict[str, list[Spent]] = {"silos": [], **{name: [] for name in SIMULATIONS}}
    weights: dict[str, bytes] = {}
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fed = Federation(folder, make_config(values | ADAM | own))
        for turn in range(TURNS):
            out = folder / f"silos-{turn}"
            commands = [fed.first(out.name), *map(fed.silo, range(number))]
            spent["silos"].append(round_of(commands, partial(fed.rounds, out.name)))
            weights["silos"] = (out / "model.safetensors").read_bytes()
            for kind, words in SIMULATIONS.items():
                out = folder / f"{kind}-{turn}"
                start = ("run", "--config", folder / "run.toml", "--quiet", *words, "--out", out)
                command = Command(folder / "run.log", *start)
                spent[kind].append(round_of([command], partial(fed.rounds, out.name)))
                weights[kind] = (out / "model.safetensors").read_bytes()
    return {
        "turns": TURNS,
        "seconds_a_round": {name: medians(turns) for name, turns in spent.items()},
        "over": {name: ratios(spent, "silos", name) for name in SIMULATIONS},
        "same_model": {name: weights[name] == weights["silos"] for name in SIMULATIONS},
    }
