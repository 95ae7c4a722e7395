"""Clocks: rounds taken in turn, commands, and what is told of them."""

import gc
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

CLOCKS = ("wall", "cpu")
WARM_UP = 3  # rounds of every side before the first that counts: compilation, caches, allocator
FEWEST_TURNS = 5
# A turn is as many rounds as take this long: in a run, too, rounds follow rounds of their kind.
TURN_SECONDS, MOST_A_TURN = 0.1, 10


@dataclass(frozen=True)
class Plan:
    """How to measure.

    Attributes:
        data_dir: where graphs are looked for first.
        turns: most turns of a side.
        seconds: no new turn begins after so long, once there are `FEWEST_TURNS`.
        openfgl: a checkout of OpenFGL, None if there is none.
        before: a checkout of an earlier silograph with its environment in `.venv`, or None.
    """

    data_dir: str | None
    turns: int
    seconds: float
    openfgl: Path | None = None
    before: Path | None = None


@dataclass(frozen=True)
class Spent:
    """Seconds by the wall clock, and of CPU time of all threads."""

    wall: float
    cpu: float


Turns = Mapping[str, list[Spent]]  # by side; turn i of one side is next to turn i of the others


class Child:
    """A process that takes commands on its standard input and answers each with numbers.

    To `rounds N` it runs N rounds and answers with their seconds by the wall clock and of CPU.
    """

    def __init__(self, command: Sequence[str]) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def ask(self, command: str) -> list[float]:
        """Return the answer to a command."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"process ended with code {self._process.wait()} at: {command}")
        return [float(word) for word in answer.split()]

    def close(self) -> None:
        """Let it end."""
        self._process.communicate()


Act = Callable[[], object] | Child  # runs a round


def timed(act: Act, rounds: int) -> Spent:
    """Return what one of several rounds takes; garbage is collected before, not within."""
    if isinstance(act, Child):
        wall, cpu = act.ask(f"rounds {rounds}")
        return Spent(wall / rounds, cpu / rounds)
    gc.collect()
    gc.disable()
    try:
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(rounds):
            act()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    finally:
        gc.enable()
    return Spent(wall / rounds, cpu / rounds)


def take_turns(sides: Mapping[str, Act], plan: Plan, rounds_of_turn: int | None = None) -> Turns:
    """Return what rounds of every side took; sides take turns in changing order.

    Args:
        sides: what runs a round.
        plan: how many turns.
        rounds_of_turn: how many rounds make a turn; None: as many as take `TURN_SECONDS`. Where
            rounds differ, as many on all sides make neighboring turns the same rounds.
    """
    gc.collect()
    gc.freeze()  # or every collection would walk all modules, and empty the processor's cache
    try:
        fitting = {name: _warmed_up(act) for name, act in sides.items()}
        rounds = {name: rounds_of_turn or number for name, number in fitting.items()}
        spent: dict[str, list[Spent]] = {name: [] for name in sides}
        names, end = list(sides), time.monotonic() + plan.seconds
        for turn in range(plan.turns):
            if turn >= FEWEST_TURNS and time.monotonic() > end:
                break
            for place in range(len(names)):
                name = names[(turn + place) % len(names)]
                spent[name].append(timed(sides[name], rounds[name]))
    finally:
        gc.unfreeze()
    return spent


def _warmed_up(act: Act) -> int:
    """Run the rounds that do not count; return how many make a turn."""
    last = [timed(act, 1) for _ in range(WARM_UP)][-1]
    return min(MOST_A_TURN, math.ceil(TURN_SECONDS / last.wall))


def ratios(spent: Turns, over: str, under: str) -> dict[str, list[float]]:
    """Return lower quartile, median and upper quartile of over / under, by clock."""
    found = {}
    for clock in CLOCKS:
        pairs = zip(spent[over], spent[under], strict=True)
        quotients = [getattr(a, clock) / getattr(b, clock) for a, b in pairs]
        quartiles = statistics.quantiles(quotients, n=4, method="inclusive")
        found[clock] = [round(q, 3) for q in quartiles]
    return found


def medians(spent: list[Spent], *, digits: int = 5) -> dict[str, float]:
    """Return median seconds by clock."""
    return {c: round(statistics.median(getattr(s, c) for s in spent), digits) for c in CLOCKS}


def command(*arguments: str) -> Spent:
    """Return what a `silograph` command takes from start to exit."""
    program = str(Path(sys.executable).with_name("silograph"))
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([program, *arguments], check=True, capture_output=True)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Spent(wall, cpu)


def commands(arguments: Callable[[str], list[str]], repeats: int) -> dict[str, float]:
    """Return median seconds of a command; a first call, which warms caches, is left out.

    Args:
        arguments: of the command, from a path at which there is nothing yet.
        repeats: calls that count.
    """
    with tempfile.TemporaryDirectory() as folder:
        spent = [command(*arguments(f"{folder}/{call}")) for call in range(repeats + 1)]
    return medians(spent[1:], digits=3)
