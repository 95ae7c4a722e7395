"""Runs federations whose server and silos get signals at random instants.

    python -m federation_killing CASE FOLDER KILLS SEED [SIGNALS]

SIGNALS are KILL (default), or several such as TERM,INT, of which one is drawn each time. It makes
federations in FOLDER/0, FOLDER/1, ... until KILLS of them have landed in them, compares what
each has left with the simulation in FOLDER/whole, and prints a line with the numbers of
federations, of kills of servers and of kills of silos. Whoever is killed, or ends without the run
being over, is started again. Children are forked from this process, which never uses gRPC itself.
"""

import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import silograph as sg
from conftest import planted_graph
from rating_graphs import rating_graph
from runs import files_of
from silograph.core.config import RunConfig
from silograph.core.stop_signals import handle_signals
from silograph.deploy.server import SESSION, resume_server, serve
from silograph.deploy.server_settings import ServerSettings
from silograph.deploy.silo import Attendance, take_part_in_run
from silograph.graph.graph import Graph
from silograph.graph.silos.read import read_silo
from silograph.methods import METHODS
from silos import config_of, folders

SILOS = 3
MOST_KILLS = 12  # of one federation
PAUSE = 1.0  # seconds between them, at most
LONGEST = 240.0  # seconds of one federation; longer is a hang
# Methods by name, and other tasks. Numbers of nodes are learned in simulation only.
CASES: dict[str, dict[str, Any]] = {
    "multilabel": {"method": "fedopt"},
    "ratings": {"method": "fedavg", "model": "rating_mf", "options": {"model.embedding": 4}},
    "shared_items": {
        "method": "fedmf",
        "model": "rating_mf",
        "options": {"model.embedding": 4, "model.items": 64},
    },
}


def graph_of(case: str) -> Graph:
    """Return the data of a case."""
    if case in ("ratings", "shared_items"):
        return rating_graph()
    return planted_graph(60, multilabel=case == "multilabel")


def config_for(case: str) -> RunConfig:
    """Return the config of a case."""
    options = CASES.get(case, {"method": case})
    return config_of(SILOS, partition="random", rounds=6, hidden=8, **options)


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as end:
        end.bind(("127.0.0.1", 0))
        return int(end.getsockname()[1])


class Killed:
    """One federation, and who is alive in it.

    Args:
        folder: of everything that it leaves.
        config: of the run.
        silos: folders of the silos.
    """

    def __init__(self, folder: Path, config: RunConfig, silos: tuple[Path, ...]) -> None:
        self.folder, self.silos = folder, silos
        self.out = folder / "out"
        self.config = replace(config, out=str(self.out))
        self.settings = ServerSettings(
            f"127.0.0.1:{free_port()}", insecure=True, patience=60.0, rejoin=60.0
        )
        self.alive: dict[int, int] = {}  # silo, or -1 for the server, by process
        self.done: set[int] = set()  # who has ended well

    def start(self, who: int) -> None:
        """Fork the server or a silo."""
        child = os.fork()
        if child:
            self.alive[child] = who
            return
        code = 1
        handle_signals()
        try:
            with open(self.folder / f"{who}.log", "a") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            self._serve() if who < 0 else self._take_part(who)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def _serve(self) -> None:
        if (self.out / SESSION).exists():
            resume_server(self.out, self.settings)
            return
        if self.out.exists():  # killed while it made the folder: nobody has begun
            self.out.rename(self.folder / f"unborn-{time.monotonic_ns()}")
        serve(self.config, self.settings)

    def _take_part(self, who: int) -> None:
        folder = self.silos[who]
        how = Attendance(
            self.settings.listen,
            folder / "key.pem",
            folder.parent / "secret",
            insecure=True,
            state=folder / "state",
            audit=folder / "audit.jsonl",
            patience=30.0,
            allow=(*METHODS, "collect", "items", "users"),
        )
        reason = take_part_in_run(read_silo(folder), how)
        if reason is not None:
            raise RuntimeError(reason)

    @property
    def is_complete(self) -> bool:
        """Whether the run is over."""
        return (self.out / "result.json").exists()

    def reap(self) -> None:
        """Start whoever has ended too early."""
        for child, who in list(self.alive.items()):
            ended, status = os.waitpid(child, os.WNOHANG)
            if not ended:
                continue
            del self.alive[child]
            if status == 0:
                self.done.add(who)
            elif not self.is_complete:
                self.start(who)

    def hit_one(self, rng: random.Random, signals: Sequence[int]) -> int | None:
        """Send the server or a silo a signal, and return which; None if it had ended."""
        child = rng.choice(sorted(self.alive))
        who = self.alive.pop(child)
        with suppress(ProcessLookupError):
            os.kill(child, rng.choice(signals))
        _, status = os.waitpid(child, 0)
        if status == 0:
            self.done.add(who)
            return None
        self.start(who)
        return who

    def end(self) -> None:
        """Kill whoever is left."""
        for child in self.alive:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        self.alive.clear()


def federate(killed: Killed, kills: int, rng: random.Random, signals: Sequence[int]) -> list[int]:
    """Run a federation in which so many signals land, at most, and return who was hit."""
    begin, victims = time.monotonic(), list[int]()
    for who in range(-1, len(killed.silos)):
        killed.start(who)
    try:
        while not killed.is_complete or -1 in killed.alive.values():
            if time.monotonic() - begin > LONGEST:
                raise TimeoutError(f"{killed.folder} hangs after kills of {victims}")
            time.sleep(PAUSE * rng.random())
            killed.reap()
            if len(victims) < kills and killed.alive and not killed.is_complete:
                victim = killed.hit_one(rng, signals)
                victims += [] if victim is None else [victim]
        until = time.monotonic() + 5  # silos that were told of the end
        while killed.alive and time.monotonic() < until:
            time.sleep(0.02)
            killed.reap()
    finally:
        killed.end()
    return victims


def main(case: str, where: str, kills: str, seed: str, signals: str = "KILL") -> None:
    torch.set_num_threads(1)
    folder, rng = Path(where), random.Random(int(seed))
    graph, config = graph_of(case), config_for(case)
    sg.run(graph, config=config, block_size=1, out=str(folder / "whole"))
    expected = files_of(folder / "whole")
    numbers = [signal.Signals[f"SIG{name}"] for name in signals.split(",")]
    victims, number = list[int](), 0
    while len(victims) < int(kills):
        own = folder / str(number)
        own.mkdir()
        silos = folders(graph, config, own / "silos")
        killed = Killed(own, config, silos)
        most = min(MOST_KILLS, int(kills) - len(victims))
        victims += federate(killed, most, rng, numbers)
        files = files_of(own / "out")
        for name in ("model", "ledger", "rows"):
            assert files[name] == expected[name], (own, name)
        number += 1
    servers = sum(who < 0 for who in victims)
    sys.stdout.write(f"{number} {servers} {len(victims) - servers}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
