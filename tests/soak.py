"""Runs a federation of many silo processes for long, under random faults, and watches its memory.

    python -m soak FOLDER ROUNDS SILOS SECONDS SEED

Every few rounds a silo is killed or terminated, and started again, or stopped for a moment. It
ends after ROUNDS rounds or SECONDS seconds. Prints a JSON object: the rounds that are over, the
faults by kind, memory (bytes) of the server and the largest silo as the rounds go on, and what was
lost. Children are forked from this process.
"""

import csv
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from conftest import planted_graph
from federation_killing import Killed
from silograph.federation.session.audit import read_audit
from silos import config_of, folders

MOST_ROUNDS = 4  # between faults


def memory_of(process: int) -> int:
    """Return the resident bytes of a process that are its own; 0 if it is gone."""
    with suppress(OSError):
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith(("Private_Dirty:", "Anonymous:")):
                return int(line.split()[1]) * 1024
    return 0


def rounds_over(out: Path) -> int:
    """Return how many rounds have their scores in the result folder."""
    with suppress(OSError):
        return max(0, len((out / "rounds.csv").read_text().splitlines()) - 1)
    return 0


def fault(killed: Killed, rng: random.Random, faults: Counter[str]) -> None:
    """Do one of the faults to one of the silos."""
    silos = {child: who for child, who in killed.alive.items() if who >= 0}
    child = rng.choice(sorted(silos))
    kind = rng.choice(("killed", "stopped", "terminated"))
    faults[kind] += 1
    if kind == "stopped":  # shorter than keepalive
        os.kill(child, signal.SIGSTOP)
        time.sleep(rng.random())
        os.kill(child, signal.SIGCONT)
        return
    number = signal.SIGKILL if kind == "killed" else signal.SIGTERM
    with suppress(ProcessLookupError):
        os.kill(child, number)
    os.waitpid(child, 0)
    del killed.alive[child]
    killed.start(silos[child])


def main(where: str, rounds: str, silos: str, seconds: str, seed: str) -> None:
    torch.set_num_threads(1)
    folder, rng, faults = Path(where), random.Random(int(seed)), Counter[str]()
    config = config_of(
        int(silos), partition="random", rounds=int(rounds), hidden=8, method="fedavg"
    )
    killed = Killed(folder, config, folders(planted_graph(400), config, folder / "silos"))
    begin, memory = time.monotonic(), list[tuple[int, int, int]]()
    for who in range(-1, len(killed.silos)):
        killed.start(who)
    next_fault = 2  # in the round after this one
    while not killed.is_complete and time.monotonic() - begin < float(seconds):
        time.sleep(0.2)
        killed.reap()
        done = rounds_over(killed.out)
        if done and (not memory or done >= memory[-1][0] + max(1, int(rounds) // 40)):
            sizes = {child: memory_of(child) for child in killed.alive}
            server = max((n for child, n in sizes.items() if killed.alive[child] < 0), default=0)
            largest = max(n for child, n in sizes.items() if killed.alive[child] >= 0)
            memory.append((done, server, largest))
        if done >= next_fault:
            time.sleep(0.5 * rng.random())
            fault(killed, rng, faults)
            next_fault = done + rng.randrange(1, MOST_ROUNDS + 1)
    is_complete, done = killed.is_complete, rounds_over(killed.out)
    killed.end()
    sys.stdout.write(
        json.dumps(
            {
                "rounds": done,
                "complete": is_complete,
                "seconds": round(time.monotonic() - begin),
                "faults": faults,
                "memory": memory,
                "lost": lost(killed),
            }
        )
        + "\n"
    )


def lost(killed: Killed) -> dict[str, Any]:
    """Return what a federation has lost: rounds without scores, and lines of audits."""
    with (killed.out / "rounds.csv").open() as file:
        numbers = [int(row["round"]) for row in csv.DictReader(file)]
    damaged = []
    for silo in killed.silos:
        with (silo / "audit.jsonl").open("rb") as audit:
            broken = read_audit(audit).broken
        if broken is not None and not broken.is_torn:
            damaged.append(silo.name)
    missing = sorted(set(range(1, max(numbers, default=0) + 1)) - set(numbers))
    return {"rounds": missing, "audits": damaged}


if __name__ == "__main__":
    main(*sys.argv[1:])
