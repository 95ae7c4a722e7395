"""Runs a comparison that is killed with SIGKILL at random instants; used by test_compare.py.

    python -m killing_compare FOLDER KILLS SEED

Makes FOLDER/reference without interruption, then compares in FOLDER/0, FOLDER/1, ... that are
killed and gone on with until KILLS kills have landed. Prints the number of comparisons and of
kills. Children are forked from this process, so that none spends its life importing.
"""

import random
import sys
import time
from functools import partial
from pathlib import Path

import torch

import silograph as sg
from killing import graph, killed_after


def go_on(folder: Path) -> None:
    sg.compare(
        graph(),
        methods=["local", "fedopt"],
        seeds=2,
        processes=0,
        clients=4,
        rounds=6,
        hidden=8,
        out=folder,
    )


def main(where: str, kills: str, seed: str) -> None:
    torch.set_num_threads(1)
    folder, rng = Path(where), random.Random(int(seed))
    go_on(folder / "warm-up")
    begin = time.monotonic()
    go_on(folder / "reference")
    whole = time.monotonic() - begin
    landed = studies = 0
    while landed < int(kills):
        study = partial(go_on, folder / str(studies))
        if killed_after(study, 1.2 * whole * rng.random()):
            landed += 1
        else:
            studies += 1
    go_on(folder / str(studies))
    sys.stdout.write(f"{studies + 1} {landed}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
