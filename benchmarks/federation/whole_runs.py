"""Whole runs with silo processes on this machine: seconds, CPU, bytes on the wire, kills.

    python benchmarks/federation/whole_runs.py --data-dir ../shared/data --part training
    python benchmarks/federation/whole_runs.py --data-dir ../shared/data --part wire
    python benchmarks/federation/whole_runs.py --data-dir ../shared/data --part kills

Server and silos are commands of silograph, over TLS on loopback. Each part prints rows of a table.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from proxy import Proxy
from silograph.core.config import RunConfig, make_config
from silograph.core.run_file import write_toml
from silograph.deploy.demo import export_silos
from silograph.federation.session.identity import make_certificates

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"local_epochs": 3},
    "label_guided": {"options": {"sample": 5000}},
}


class Command:
    """A command of silograph as a fresh process; what it says on standard error is in `log`."""

    def __init__(self, log: Path, *words: object) -> None:
        temporary = log.parent / "tmp"
        temporary.mkdir(exist_ok=True)
        self.log = log
        with log.open("a") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "silograph", *map(str, words)],
                env={**os.environ, "TMPDIR": str(temporary)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=file,
            )

    def said(self) -> str:
        """Return what it has said."""
        return self.log.read_text()

    def kill(self) -> None:
        """Kill it at once."""
        self.process.send_signal(signal.SIGKILL)
        assert self.process.wait() == -signal.SIGKILL

    def ends_well(self) -> None:
        """Wait until it ends, and fail unless it ends well."""
        assert self.process.wait(timeout=120) == 0, self.said()


def waited(command: Command) -> float:
    """Wait for a command to end well, and return the CPU seconds that it took."""
    _, status, used = os.wait4(command.process.pid, 0)
    command.process.returncode = os.waitstatus_to_exitcode(status)
    assert command.process.returncode == 0, command.said()
    return used.ru_utime + used.ru_stime


def until(is_so: Callable[[], bool]) -> float:
    """Wait, and return when it was."""
    while not is_so():
        time.sleep(0.01)
    return time.monotonic()


class Federation:
    """Folders of silos, and commands that train on them."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self.folder = folder
        self.silos = export_silos(config, folder / "silos", "npz")
        make_certificates(folder / "certs", ["127.0.0.1"], days=1)
        (folder / "run.toml").write_text(write_toml(config), encoding="utf-8")
        self.address = "127.0.0.1:0"

    def server(self, *words: object) -> Command:
        """Start the server; return when it listens."""
        before = (self.folder / "server.log").exists() and len(self._log())
        certs = ("--certs", self.folder / "certs", "--accept-first-keys")
        server = Command(
            self.folder / "server.log",
            *("server", "--listen", self.address, *certs, "--quiet", *words),
        )
        until(lambda: "listening on " in self._log()[int(before) :])
        self.address = self._log()[int(before) :].partition("listening on ")[2].split()[0]
        return server

    def first(self, out: str) -> Command:
        """Start the server of a new run."""
        return self.server("--config", self.folder / "run.toml", "--out", self.folder / out)

    def silo(self, number: int, address: str | None = None) -> Command:
        """Start a silo."""
        ca = ("--ca", self.folder / "certs" / "ca.pem")
        data = ("--data", self.silos[number], "--wait", 120)
        return Command(
            self.folder / f"silo_{number}.log",
            *("silo", "--server", address or self.address, *ca, *data),
        )

    def result(self, out: str) -> dict[str, float]:
        """Return what a run cost."""
        told = json.loads((self.folder / out / "result.json").read_text(encoding="utf-8"))
        return {"seconds": told["seconds"], "bytes": told["bytes"]["total"]}

    def rounds(self, out: str) -> int:
        """Return how many rounds a run has judged so far."""
        path = self.folder / out / "rounds.csv"
        return max(0, len(path.read_text().splitlines()) - 1) if path.exists() else 0

    def says(self, line: str) -> Callable[[], bool]:
        """Return whether the server has said something, once more than so far."""
        before = self._log().count(line)
        return lambda: self._log().count(line) > before

    def _log(self) -> str:
        return (self.folder / "server.log").read_text()


def training(folder: Path, config: RunConfig) -> None:
    """Print what a run costs with processes, and what it costs in one process."""
    fed = Federation(folder, config)
    server = fed.first("out")
    members = [fed.silo(number) for number in range(len(fed.silos))]
    cpu = [waited(each) for each in (server, *members)]
    ours = fed.result("out")
    word = ("run", "--config", folder / "run.toml", "--quiet", "--block-size", 1)
    alone = Command(folder / "run.log", *word, "--out", folder / "alone")
    alone_cpu, theirs = waited(alone), fed.result("alone")
    assert ours["bytes"] == theirs["bytes"]
    same = _model(folder / "out") == _model(folder / "alone")
    print(
        f"| {config.method} | {len(fed.silos)} | {config.rounds} | {ours['seconds']:.1f} | "
        f"{theirs['seconds']:.1f} | {cpu[0]:.1f} + {sum(cpu[1:]):.1f} | {alone_cpu:.1f} | "
        f"{ours['bytes'] / 1e6:.1f} | {'yes' if same else 'NO'} |",
        flush=True,
    )


def _model(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def wire(folder: Path, config: RunConfig) -> None:
    """Print the ledger's bytes beside those that a proxy saw."""
    fed = Federation(folder, config)
    server = fed.first("out")
    with Proxy(fed.address) as proxy:
        members = [fed.silo(n, proxy.address) for n in range(len(fed.silos))]
        for each in (server, *members):
            waited(each)
        seen = proxy.up + proxy.down
    ledger = fed.result("out")["bytes"]
    print(
        f"| {config.method} | {config.dataset} | {len(fed.silos)} | {config.rounds} | {ledger:,} | "
        f"{seen:,} | {100 * (seen / ledger - 1):.2f} % |",
        flush=True,
    )


def kills(folder: Path, config: RunConfig) -> None:
    """Print how long it takes to notice a killed silo, and to go on after kills."""
    fed = Federation(folder, config)
    server = fed.first("out")
    members = [fed.silo(number) for number in range(len(fed.silos))]
    last = fed.silos[-1].name
    until(lambda: fed.rounds("out") >= 3)
    noticed, back = fed.says(f"has lost {last}"), fed.says(f"{last} is back")
    members[-1].kill()
    began = time.monotonic()
    members[-1] = fed.silo(len(fed.silos) - 1)
    seen = until(noticed) - began
    started = until(lambda: members[-1].said().count("is attached") > 1)
    print(
        f"silo killed: noticed after {seen:.2f} s; started again it is attached after "
        f"{started - began:.2f} s, and takes part {until(back) - started:.2f} s later",
        flush=True,
    )
    for pause in (0.0, 10.0):
        judged = fed.rounds("out")
        until(lambda judged=judged: fed.rounds("out") >= judged + 3)  # type: ignore[misc]
        goes_on = fed.says("the run goes on after round")
        server.kill()
        time.sleep(pause)
        began, rows = time.monotonic(), fed.rounds("out")
        server = fed.server("--resume", fed.folder / "out")
        listening = time.monotonic()
        resumed = until(goes_on) - listening
        until(lambda rows=rows: fed.rounds("out") > rows)  # type: ignore[misc]
        print(
            f"server killed and started again {pause:g} s later: it listens after "
            f"{listening - began:.2f} s; {resumed:.2f} s later all silos are back, and "
            f"{time.monotonic() - listening:.2f} s later a round is over",
            flush=True,
        )
    for each in (server, *members):
        each.process.kill()
        each.process.wait()


PARTS = {"training": training, "wire": wire, "kills": kills}
HEADS = {
    "training": "| method | silos | rounds | s, processes | s, one process | CPU s, server + silos "
    "| CPU s, one process | MB | same bits |\n|---|---|---|---|---|---|---|---|---|",
    "wire": "| method | graph | silos | rounds | bytes, ledger | bytes, wire | excess |\n"
    "|---|---|---|---|---|---|---|",
}


def main() -> None:
    """Print one part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--data-dir", default="../shared/data")
    parser.add_argument("--dataset", default="pubmed")
    parser.add_argument("--silos", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--methods", default="fedavg,label_guided")
    given = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores", flush=True)
    print(HEADS.get(given.part, ""), flush=True)
    options = {"clients": given.silos, "rounds": given.rounds, "dataset": given.dataset}
    for method in given.methods.split(","):
        config = make_config(
            {**options, "method": method, "data_dir": given.data_dir, **METHODS[method]}
        )
        if given.part == "kills":
            config = replace(config, rounds=100_000)
        with tempfile.TemporaryDirectory(prefix="silograph-") as name:
            PARTS[given.part](Path(name), config)


if __name__ == "__main__":
    main()
