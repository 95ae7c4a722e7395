"""Rounds of a run in this process whenever told to: a side of a race, see `timing.Child`.

    python turns.py CONFIG

runs `sg.run` with a config in JSON. It uses nothing else of silograph, so that any version can be
measured: the Python that is called says which. Round 1, in which kernels are compiled, comes before
the first command. `score 0` is answered with the latest score that the run shows.
"""

import gc
import json
import re
import sys
import time

import silograph as sg


class Turns:
    """Progress of a run that waits for commands between rounds."""

    def __init__(self) -> None:
        self.rounds_left = 1
        self.begun: tuple[float, float] | None = None

    def update(self, done: int, metric: str) -> None:
        """Answer the command that is over, and wait for the next one."""
        del done
        self.rounds_left -= 1
        if self.rounds_left > 0:
            return
        if self.begun is None:
            gc.collect()
            gc.freeze()
        else:
            wall, cpu = self.begun
            print(time.perf_counter() - wall, time.process_time() - cpu, flush=True)
        while self.rounds_left == 0:
            command, _, number = sys.stdin.readline().partition(" ")
            if not command:  # standard input is closed
                raise SystemExit
            if command == "score":
                print(*re.findall(r"\d*\.\d+", metric)[:1], flush=True)
            else:
                self.rounds_left = int(number)
        gc.collect()
        gc.disable()
        self.begun = time.perf_counter(), time.process_time()


if __name__ == "__main__":
    sg.run(**json.loads(sys.argv[1]), progress=Turns())
