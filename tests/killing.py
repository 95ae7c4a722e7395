"""Runs a federation that is killed with SIGKILL at random instants; used by test_resume.py.

    python -m killing METHODS FOLDER KILLS SEED

For each of the methods (separated by commas) makes FOLDER/METHOD/reference without interruption,
then runs in FOLDER/METHOD/0, FOLDER/METHOD/1, ... that are killed and resumed until KILLS kills
have landed. Prints a line with the number of runs and of kills for each. Children are forked from
this process, so that none spends its life importing.
"""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import silograph as sg
from runs import some_of

ROUNDS = 12


def graph() -> sg.Graph:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 120)
    near = np.where(y[:, None] == y[None, :], 0.08, 0.01)
    x = (rng.normal(size=(3, 30))[y] + rng.normal(size=(120, 30))).astype(np.float32)
    edges = np.array(np.nonzero(np.triu(rng.random((120, 120)) < near, 1)))
    return sg.from_arrays(edge_index=edges, x=x, y=y)


def go_on(folder: Path, method: str) -> None:
    if folder.exists():
        sg.resume(folder, graph=graph())
    else:
        options: dict[str, Any] = {"keep_optimizer": True, "block_size": 2}
        options |= some_of(method, 0.6)
        sg.run(
            graph(), method=method, clients=5, rounds=ROUNDS, hidden=8, out=str(folder), **options
        )


def killed_after(work: Callable[[], object], seconds: float) -> bool:
    """Do some work in a child; return whether it was killed before it had finished."""
    child = os.fork()
    if child == 0:
        try:
            work()
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


def main(methods: str, where: str, kills: str, seed: str) -> None:
    torch.set_num_threads(1)
    for method in methods.split(","):
        kill(method, Path(where) / method, int(kills), random.Random(int(seed)))


def kill(method: str, folder: Path, kills: int, rng: random.Random) -> None:
    go_on(folder / "warm-up", method)
    begin = time.monotonic()
    go_on(folder / "reference", method)
    whole = time.monotonic() - begin
    landed = runs = 0
    while landed < kills:
        # Short and long lives alike: some runs are killed many times, some hardly started.
        run = partial(go_on, folder / str(runs), method)
        if killed_after(run, 1.2 * whole * rng.random() ** 1.5):
            landed += 1
        else:
            runs += 1
    go_on(folder / str(runs), method)
    sys.stdout.write(f"{runs + 1} {landed}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
