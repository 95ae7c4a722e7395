"""A federation on one machine: silos' folders, a server and a process for each silo, compared.

Everything is in a temporary folder and on a port that the system chose; nothing is left of it.
"""

import dataclasses
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from silograph.core.config import RunConfig
from silograph.core.errors import SilographError
from silograph.core.numeric_state import standard_numerics
from silograph.core.run_file import write_toml
from silograph.core.text import count_of
from silograph.deploy.allowed_code import portable_name
from silograph.deploy.server import check_run, natural_sort_key, with_absolute_code, with_min_count
from silograph.deploy.silo_result import RESULTS
from silograph.experiment.resolve.data import load_and_cut
from silograph.experiment.resolve.run_program import BESIDES
from silograph.experiment.resolve.user_code import is_spec
from silograph.experiment.result_files import LEDGER, MODEL, MODELS, RESULT
from silograph.experiment.run.progress import best_mode, generation_callback
from silograph.experiment.run.run import run
from silograph.federation.session.wire import need_packages
from silograph.graph.partition.partition import names_clients
from silograph.graph.silos.export import check_target, write_silos
from silograph.task.metric_table import METRICS

# --- A graph cut as a run would cut it, written as folders of silos ------------------------------


@standard_numerics()
def export_silos(
    config: RunConfig,
    out: str | os.PathLike[str],
    format: str = "csv",
    *,
    cross_edges: bool = True,
) -> tuple[Path, ...]:
    """Cut and split the graph of a config, and write one folder a client.

    All get the same new secret, by which they agree on the edges between them, if there are
    `cross_edges`.

    Returns:
        The silos' folders, in client order.

    Raises:
        SilographError: something about the config, the graph or the cut cannot be used, or there
            is something at `out`.
    """
    check_target(Path(out), format)  # before a minute of loading
    cut = load_and_cut(config, generation_callback(best_mode()))
    secret = secrets.token_bytes(32)
    return write_silos(
        out,
        cut.graph,
        cut.partition,
        cut.split,
        format=format,
        secret=secret,
        cross_edges=cross_edges,
    )


LISTENING = "listening on "
KEYS = "keys.txt"  # public keys of the silos
SECONDS_TO_STOP = 10
SECONDS_TO_START = 600  # a busy machine needs minutes to start all processes
DEFAULT_SILOS = 3
SameThing = Literal["model", "silos' models", "scores"]


@dataclass(frozen=True)
class Demonstration:
    """What came of it.

    Attributes:
        silos: how many processes.
        compared: the server's model; the silos' models where it has none; all scores where no end
            has a whole model.
        weights: whether that is the same in both runs, bit for bit.
        ledger: whether both counted the same bytes and work in every call.
        size: bytes exchanged.
        metric: the run's metric.
        score: it, on test nodes, if there are any: of the server's model, or of the silos' own.
        federated_seconds: of training with processes.
        simulated_seconds: of training in one process.
    """

    silos: int
    compared: SameThing
    weights: bool
    ledger: bool
    size: int
    metric: str
    score: float | None
    federated_seconds: float
    simulated_seconds: float

    @property
    def same(self) -> bool:
        """Whether both runs are the same."""
        return self.weights and self.ledger

    def lines(self) -> Iterator[str]:
        """Yield the lines that are printed."""
        answer = {True: "the same, bit for bit", False: "NOT THE SAME"}
        silos = count_of(self.silos, "silo")
        yield f"{silos} and a server, each a process of its own, over TLS on 127.0.0.1"
        yield f"{self.compared:<14}{answer[self.weights]} as in the simulation"
        yield f"ledger        {answer[self.ledger]}: {self.size:,} bytes"
        if self.score is not None:
            metric = METRICS[self.metric]
            whose = "silos' own models" if self.compared != "model" else "server's model"
            yield f"{metric.title:<14}{metric.text(self.score)} ({whose}, test nodes)"
        yield (
            f"training      {self.federated_seconds:.2f} s with processes, "
            f"{self.simulated_seconds:.2f} s in one"
        )


def demonstrate(config: RunConfig, report: Callable[[str], None] = lambda _: None) -> Demonstration:
    """Run a federation of processes and the same simulation, and compare them.

    Args:
        config: of the run; 3 clients unless it says otherwise.
        report: called with a line for each step.

    Raises:
        SilographError: the config cannot be used by silos, or a process failed.
    """
    need_packages()
    from silograph.federation.session.identity import SiloKey, key_line, make_certificates

    if config.clients is None and not names_clients(config.partition):
        config = dataclasses.replace(config, clients=DEFAULT_SILOS)
    config = dataclasses.replace(config, out=None, tracker=None)
    config = with_min_count(with_absolute_code(config))  # in the simulation, too
    check_run(config)
    with tempfile.TemporaryDirectory(prefix="silograph-") as name:
        folder = Path(name)
        silos = export_silos(config, folder / "silos", "npz")
        report(f"{count_of(len(silos), 'silo')} written")
        config = dataclasses.replace(config, clients=len(silos), block_size=1)
        make_certificates(folder / "certs", ["127.0.0.1"], days=31)
        keys = [key_line(silo.name, SiloKey.load(silo / "key.pem").public) for silo in silos]
        (folder / KEYS).write_text("".join(f"{line}\n" for line in keys), encoding="utf-8")
        (folder / "run.toml").write_text(write_toml(config), encoding="utf-8")
        _federate(folder, silos, config, report)
        report("the same once more, in one process")
        simulation = run(config=dataclasses.replace(config, out=str(folder / "simulated")))
        return _compare_runs(folder, silos, simulation.seconds)


def _federate(
    folder: Path, silos: Sequence[Path], config: RunConfig, report: Callable[[str], None]
) -> None:
    """Start server and silos, wait until all have ended, and stop the remaining ones."""
    certs = folder / "certs"
    with _processes() as start_process:
        server = start_process(
            subprocess.PIPE,
            *("server", "--config", folder / "run.toml", "--trust", "--json"),
            *("--listen", "127.0.0.1:0"),
            *("--certs", certs, "--keys", folder / KEYS),
            *("--out", folder / "federated", "--quiet"),
            *("--rejoin-seconds", 0, "--wait", SECONDS_TO_START),  # nobody starts a silo again
        )
        address = _read_address(server, report)
        allow = ",".join((portable_name(config.method), *BESIDES))
        common: list[object] = ["--server", address, "--ca", certs / "ca.pem", "--allow", allow]
        common += ["--wait", SECONDS_TO_START]
        for spec in dict.fromkeys((config.method, config.model or "")):
            common += ["--allow-code", spec.rpartition(":")[0]] if is_spec(spec) else []
        logs = [folder / f"{silo.name}.log" for silo in silos]
        members = []
        for silo, log in zip(silos, logs, strict=True):
            with log.open("w") as file:
                members.append(
                    start_process(file, "silo", "--data", silo, *common, "--wait", SECONDS_TO_START)
                )
        report(f"{count_of(len(members), 'silo')} started; they wait for each other and train")
        server_errors = _wait_for_end(server, members)
        if server_errors is not None and server.returncode != 0:
            raise SilographError(f"the server failed: {_error_line(server_errors)}")
        for member, log in zip(members, logs, strict=True):
            if member.poll() if server_errors is None else member.wait():
                raise SilographError(f"a silo failed: {_error_line(log.read_text())}")


def _wait_for_end(
    server: "subprocess.Popen[str]", silos: Sequence["subprocess.Popen[str]"]
) -> str | None:
    """Return what the server wrote to standard error; None where it waits for a silo that failed.

    A silo that fails because of the server ends before it, so the server gets time to say why.
    """
    seconds_left = SECONDS_TO_STOP
    while seconds_left:
        try:
            return server.communicate(timeout=1)[1]
        except subprocess.TimeoutExpired:
            seconds_left -= any(silo.poll() for silo in silos)
    return None


def _read_address(server: "subprocess.Popen[str]", report: Callable[[str], None]) -> str:
    """Return the address of the server, from its first line on standard error."""
    assert server.stderr is not None
    last_line = ""
    for line in server.stderr:
        last_line = line.strip()
        report(last_line)
        if LISTENING in last_line:
            return last_line.rpartition(LISTENING)[2]
    raise SilographError(f"the server failed: {last_line}")


def _error_line(text: str) -> str:
    """Return the error that a command has printed; without one, the last line."""
    lines = [line for line in text.splitlines() if line.strip()] or ["it said nothing"]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines)[-1].removeprefix("error: ")


@contextmanager
def _processes() -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Yield a function that starts commands of silograph; all end with this process."""
    started: list[subprocess.Popen[str]] = []
    read_end, write_end = os.pipe()  # `write_end` closes with this process; then the others end

    def start(errors: int | IO[str], *words: object) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "silograph.cli.child_process", *map(str, words)]
        started.append(
            subprocess.Popen(
                command,
                stdin=read_end,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                text=True,
            )
        )
        return started[-1]

    try:
        yield start
    finally:
        for process in started:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + SECONDS_TO_STOP
        for process in started:
            try:
                process.wait(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stderr is not None:
                process.stderr.close()
        os.close(read_end)
        os.close(write_end)


def _equal_files(first: Path, second: Path) -> bool:
    """Whether two files of models exist and are equal."""
    return first.exists() and second.exists() and first.read_bytes() == second.read_bytes()


def _equal_own_models(simulated: Path, silos: Sequence[Path]) -> bool:
    """Whether all silos' own models are those of the clients of a simulation."""
    simulated_models = sorted(
        (simulated / MODELS).iterdir(), key=lambda path: natural_sort_key(path.name)
    )
    silo_models = [next((silo / RESULTS).glob(f"*/{MODEL}"), None) for silo in silos]
    return len(simulated_models) == len(silo_models) and all(
        silo_model is not None and _equal_files(silo_model, simulated_model)
        for silo_model, simulated_model in zip(silo_models, simulated_models, strict=True)
    )


def _compare_models(
    federated: Path, simulated: Path, silos: Sequence[Path]
) -> tuple[SameThing, bool]:
    """Return which results of two runs are compared, and whether they are equal."""
    if (simulated / MODEL).exists():
        return "model", _equal_files(federated / MODEL, simulated / MODEL)
    if (simulated / MODELS).exists():
        return "silos' models", _equal_own_models(simulated, silos)
    federated_result, simulated_result = (
        json.loads((path / RESULT).read_text(encoding="utf-8")) for path in (federated, simulated)
    )
    return "scores", all(
        federated_result[part]["personalized"] == simulated_result[part]["personalized"]
        for part in ("val", "test")
    )


def _compare_runs(folder: Path, silos: Sequence[Path], seconds: float) -> Demonstration:
    federated, simulated = folder / "federated", folder / "simulated"
    result = json.loads((federated / RESULT).read_text(encoding="utf-8"))
    compared_thing, is_same = _compare_models(federated, simulated, silos)
    scores = result["test"]["server" if compared_thing == "model" else "personalized"]
    return Demonstration(
        silos=len(silos),
        compared=compared_thing,
        weights=is_same,
        ledger=(federated / LEDGER).read_bytes() == (simulated / LEDGER).read_bytes(),
        size=result["bytes"]["total"],
        metric=result["metric"],
        score=None if scores is None else scores[result["metric"]],
        federated_seconds=result["seconds"],
        simulated_seconds=seconds,
    )
