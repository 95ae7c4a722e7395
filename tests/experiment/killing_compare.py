"""Runs a comparison that is killed with SIGKILL at random instants; used by test_compare.py.

    python killing_compare.py FOLDER KILLS SEED

Makes FOLDER/reference without interruption, then compares in FOLDER/0, FOLDER/1, ... that are
killed and gone on with until KILLS kills have landed. Prints the number of comparisons and of
kills. Children are forked from this process, so that none spends its life importing.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from killing import graph

import silograph as sg


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


def killed_after(folder: Path, seconds: float) -> bool:
    """Return whether the child was killed before it had finished."""
    child = os.fork()
    if child == 0:
        try:
            go_on(folder)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0
        return False
    return True


def main(where: str, kills: str, seed: str) -> None:
    torch.set_num_threads(1)
    folder, rng = Path(where), random.Random(int(seed))
    go_on(folder / "warm-up")
    begin = time.monotonic()
    go_on(folder / "reference")
    whole = time.monotonic() - begin
    landed = studies = 0
    while landed < int(kills):
        if killed_after(folder / str(studies), 1.2 * whole * rng.random()):
            landed += 1
        else:
            studies += 1
    go_on(folder / str(studies))
    sys.stdout.write(f"{studies + 1} {landed}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
