"""CPU time of a round with silo processes on this machine, against the same run in one process.

    python benchmarks/federation/cpu_a_round.py --data-dir ../shared/data

Server and silos are commands of silograph, over TLS on loopback, with one thread of torch each. The
CPU time of every process is read after an early and after a late round, so that imports, reading
and set-up do not count. Federation and simulation (blocks of one client, the same options) take
turns; figures are medians over the turns.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from whole_runs import Command, Federation

from silograph.core.config import RunConfig, make_config

TICKS = os.sysconf("SC_CLK_TCK")  # a second


def cpu_seconds(command: Command) -> float:
    """Return the CPU seconds of a process so far, user and system."""
    stat = Path(f"/proc/{command.process.pid}/stat").read_text()
    user, system = stat.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / TICKS


def num_rounds(out: Path) -> int:
    """Return how many rounds the table of a run has."""
    path = out / "rounds.csv"
    return max(0, path.read_bytes().count(b"\n") - 1) if path.exists() else 0


def read_after(out: Path, least: int, commands: Sequence[Command]) -> tuple[int, list[float]]:
    """Wait for so many rounds; return their number, and the CPU seconds of each process."""
    while (rounds := num_rounds(out)) < least:
        assert all(each.process.poll() is None for each in commands), commands[0].said()
        time.sleep(0.02)
    return rounds, [cpu_seconds(each) for each in commands]


def measure(out: Path, early: int, late: int, commands: Sequence[Command]) -> list[float]:
    """Return the CPU milliseconds of a round of each process, and end them."""
    first, before = read_after(out, early, commands)
    last, after = read_after(out, late, commands)
    for each in commands:
        each.process.kill()
        each.process.wait()
    return [1e3 * (b - a) / (last - first) for a, b in zip(before, after, strict=True)]


def take_turn(folder: Path, config: RunConfig, early: int, late: int) -> tuple[list[float], float]:
    """Return CPU milliseconds of a round: of server and silos, and of the simulation."""
    fed = Federation(folder, config)
    commands = [fed.first("out"), *(fed.silo(number) for number in range(len(fed.silos)))]
    processes = measure(folder / "out", early, late, commands)
    words = ("run", "--config", folder / "run.toml", "--quiet", "--block-size", 1)
    alone = Command(folder / "run.log", *words, "--out", folder / "alone")
    return processes, measure(folder / "alone", early, late, [alone])[0]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", default="../shared/data")
    parser.add_argument("--dataset", default="cora")
    parser.add_argument("--silos", type=int, default=3)
    parser.add_argument("--early", type=int, default=20, help="round of the first reading")
    parser.add_argument("--late", type=int, default=120, help="round of the second one")
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    config = make_config(
        {
            "dataset": arguments.dataset,
            "data_dir": str(Path(arguments.data_dir).resolve()),
            "clients": arguments.silos,
            "partition": "metis",
            "local_epochs": 1,
            "rounds": 10 * arguments.late,
            # What a server of real silos takes by itself, for the simulation as well.
            "evaluate_clients": "participants",
            "evaluation_min_count": 5,
        }
    )
    print("| turn | server | silos, sum | server + silos | simulation | ratio |")
    print("|---|---|---|---|---|---|")
    ratios = []
    for turn in range(arguments.turns):
        with tempfile.TemporaryDirectory() as folder:
            (server, *silos), alone = take_turn(
                Path(folder), config, arguments.early, arguments.late
            )
        total = server + sum(silos)
        ratios.append(total / alone)
        cells = (server, sum(silos), total, alone)
        figures = " | ".join(f"{cell:.1f}" for cell in cells)
        print(f"| {turn + 1} | {figures} | {ratios[-1]:.2f} |", flush=True)
    print(f"\nratio, median: {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
