"""Servers and silos as processes that get SIGKILL: nothing is lost, nothing is left."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc")
pytest.importorskip("cryptography")

from test_allowed_code import own_heads

import silograph as sg
from processes import Command, begin_forks, children, is_listened_to
from runs import files_of
from silograph.core.run_file import write_toml
from silograph.federation.session.identity import make_certificates
from silograph.graph.graph import Graph
from silos import ALLOW, config_of, folders
from victims import Victim

BASE: dict[str, Any] = {"partition": "random", "rounds": 4, "hidden": 8}
# Cases by a name of their own: few are chosen of many, and in each round one silo takes no part.
CASES: dict[str, dict[str, Any]] = {
    "fedgrains": {
        "method": "fedavg",
        "neighbors": "fedgrains",
        "options": {"neighbors.k": 2, "neighbors.width": 6, "neighbors.lr": 0.1},
        "batch_size": 4,
        "local_epochs": 2,
        "participation": 0.6,
    },
    "fedais": {"method": "fedais", "participation": 0.6},
    "standardized": {"method": "fedavg", "normalize": "standard"},
}
MakeGraph = Callable[..., Graph]


@pytest.fixture(autouse=True, scope="module")
def forks() -> None:
    begin_forks()


class Place:
    """A federation on this machine: the last silo stops in round 3, the others go on."""

    def __init__(
        self, path: Path, graph: Graph, method: str, clients: int, *, tls: bool, every: int = 1
    ) -> None:
        self.path = path
        self.code: list[Path] = []
        if method == "own":
            self.code = [path / "own_heads.py"]
            self.code[0].write_text(own_heads(), encoding="utf-8")
            method = f"{self.code[0]}:METHOD"
        options = CASES.get(method, {"method": method})
        self.config = config_of(clients, **BASE, **options, checkpoint_every=every)
        self.silos = folders(graph, self.config, path / "silos")
        (path / "run.toml").write_text(write_toml(self.config), encoding="utf-8")
        self.started: list[Command] = []
        self.victim = Victim()
        self.tls = tls
        if tls:
            make_certificates(path / "certs", ["127.0.0.1"])
        self.address = ""

    def server(self, *words: object) -> Command:
        certs = ("--certs", self.path / "certs", "--accept-first-keys")
        how = certs if self.tls else ("--insecure",)
        listen = ("--listen", self.address or "127.0.0.1:0")
        server = self._start("server", "server", *listen, *how, "--quiet", *words)
        while not self.address:
            assert server.poll() is None, server.said()
            for line in server.said().splitlines():
                if "listening on " in line:
                    self.address = line.rpartition("listening on ")[2]
            time.sleep(0.02)
        return server

    def silo(self, number: int) -> Command:
        how = ("--ca", self.path / "certs" / "ca.pem") if self.tls else ("--insecure",)
        secret = ("--secret", self.path / "silos" / "secret")
        data = ["--data", self.silos[number], "--allow", ",".join(ALLOW)]
        data += [word for file in self.code for word in ("--allow-code", file)]
        return self._start(
            f"silo_{number}", "silo", "--server", self.address, *data, *secret, *how, "--wait", 60
        )

    def begin(self, *words: object) -> tuple[Command, list[Command]]:
        """Start all, and return server and silos when the last silo is in an op of round 3."""
        run = ("--config", self.path / "run.toml", "--trust", "--out", self.path / "out")
        server = self.server(*run, *words)
        members = [self.silo(number) for number in range(len(self.silos) - 1)]
        ca = self.path / "certs" / "ca.pem" if self.tls else None
        self.victim.take_part(self.address, self.silos[-1], 3, ca, self.code)
        self.victim.hears("attached")
        self.victim.hears("working")
        return server, members

    def _start(self, name: str, *words: object) -> Command:
        self.started.append(Command(self.path / f"{name}.log", *words))
        return self.started[-1]

    def end(self) -> None:
        for command in self.started:
            if command.poll() is None:
                command.kill()
        self.victim.end()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Callable[..., Place]]:
    made: list[Place] = []

    def make(*args: Any, **named: Any) -> Place:
        made.append(Place(tmp_path, *args, **named))
        return made[-1]

    yield make
    for each in made:
        each.end()


def assert_as_if_nothing_had_been(place: Place, graph: Graph, before: set[str]) -> None:
    """What the run has left is what the simulation leaves, and nothing else is left."""
    sg.run(graph, config=place.config, block_size=1, out=str(place.path / "whole"))
    ours, theirs = files_of(place.path / "out"), files_of(place.path / "whole")
    assert ours.get("model") == theirs.get("model")
    assert ours["ledger"] == theirs["ledger"]
    assert ours["rows"] == theirs["rows"]
    place.victim.end()
    assert children() == before
    assert not is_listened_to(place.address)
    assert not list((place.path / "tmp").iterdir())
    assert not list(place.path.glob("silos/*/state/*"))
    assert not list((place.path / "out").rglob(".*"))  # files that were being written


@pytest.mark.law(sample=6)
@pytest.mark.parametrize(
    ("method", "clients", "tls"),
    [
        ("scaffold", 2, False),
        ("own", 2, False),
        ("fedgrains", 3, False),
        ("fedais", 3, False),
        ("standardized", 2, False),
        pytest.param("scaffold", 3, True, marks=pytest.mark.slow),
        pytest.param("label_guided", 3, True, marks=pytest.mark.slow),
    ],
)
def test_a_server_that_is_killed_in_a_round(
    make_graph: MakeGraph, place: Callable[..., Place], method: str, clients: int, tls: bool
) -> None:
    """Silos that wait attach to the next server by themselves, also from the middle of an op."""
    before, graph = children(), make_graph(60)
    here = place(graph, method, clients, tls=tls)
    server, members = here.begin()
    server.kill()
    server = here.server("--trust", "--resume", here.path / "out")
    here.victim.signal(signal.SIGUSR1)
    here.victim.hears("attached")
    here.victim.hears("")
    for each in (server, *members):
        each.ends_well()
    assert "the run goes on after round 2" in server.said()
    assert members[0].said().count("is attached to") == 2
    assert_as_if_nothing_had_been(here, graph, before)


def test_silos_wait_for_a_server_that_is_told_to_stop(
    make_graph: MakeGraph, place: Callable[..., Place]
) -> None:
    before, graph = children(), make_graph(60)
    here = place(graph, "scaffold", 2, tls=False)
    log = here.path / "log.jsonl"
    server, (member,) = here.begin("--log-file", log)
    server.send(signal.SIGTERM)
    here.victim.signal(signal.SIGUSR1)  # it may go on
    assert server.wait(600) == 130
    *_, why, how = server.said().splitlines()
    assert "did not hear" not in server.said()
    assert why == "interrupted"
    assert json.loads(log.read_text().splitlines()[-1])["event"] == "stopped"
    assert how.startswith(f"to go on: silograph server --resume {here.path / 'out'} ")
    server = here.server("--trust", "--resume", here.path / "out")
    here.victim.hears("attached")
    here.victim.hears("")
    for each in (server, member):
        each.ends_well()
    waits = (
        f"the server at {here.address} was stopped: client_00 waits for it for up to 60 s (until "
    )
    assert waits in member.said()
    assert_as_if_nothing_had_been(here, graph, before)


def test_a_silo_that_is_told_to_stop(make_graph: MakeGraph, place: Callable[..., Place]) -> None:
    here = place(make_graph(60), "scaffold", 2, tls=False)
    _, (member,) = here.begin()
    while member.said().count("is attached to") < 1:
        assert member.poll() is None, member.said()
        time.sleep(0.02)
    member.send(signal.SIGTERM)
    assert member.wait(600) == 130
    assert member.said().splitlines()[-1] == "interrupted"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "every"),
    [
        ("scaffold", 1),
        ("label_guided", 1),
        ("bns", 2),
        ("own", 1),
        ("fedgrains", 1),
        ("fedais", 1),
        ("standardized", 1),
    ],
)
def test_everybody_is_killed_and_started_again(
    make_graph: MakeGraph, place: Callable[..., Place], method: str, every: int
) -> None:
    before, graph = children(), make_graph(60)
    here = place(graph, method, 3, tls=True, every=every)
    server, members = here.begin()
    for each in (server, *members):
        each.kill()
    here.victim.signal(signal.SIGKILL)
    server = here.server("--trust", "--resume", here.path / "out")
    members = [here.silo(number) for number in range(3)]
    for each in (server, *members):
        each.ends_well()
    assert_as_if_nothing_had_been(here, graph, before)


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 4, 0])
def test_a_silo_that_is_killed_in_an_op_and_started_again(
    make_graph: MakeGraph, place: Callable[..., Place], every: int
) -> None:
    """Silos write every round down, however seldom the server does."""
    before, graph = children(), make_graph(60)
    here = place(graph, "label_guided", 3, tls=True, every=every)
    server, members = here.begin()
    here.victim.signal(signal.SIGKILL)
    members.append(here.silo(2))
    for each in (server, *members):
        each.ends_well()
    assert "round 3 waits up to 60 s for client_02, and is done again" in server.said()
    assert "client_02 is back, with its state of round 2" in server.said()
    assert_as_if_nothing_had_been(here, graph, before)


def test_code_that_has_changed_meanwhile_is_refused_at_both_ends(
    make_graph: MakeGraph, place: Callable[..., Place]
) -> None:
    here = place(make_graph(60), "own", 2, tls=False)
    server, (member,) = here.begin()
    for each in (server, member):
        each.kill()
    here.victim.signal(signal.SIGKILL)
    (code,) = here.code
    text = code.read_text()
    code.write_text(text + "# changed\n")
    again = Command(
        here.path / "again.log", "server", "--resume", here.path / "out", "--listen", here.address,
        "--insecure", "--trust",
    )  # fmt: skip
    assert again.wait(600) == 2
    assert again.said().startswith("error: expected a run with method ")
    code.write_text(text)
    server = here.server("--trust", "--resume", here.path / "out", "--wait", 60)
    (here.path / "changed").mkdir()
    here.code = [here.path / "changed" / code.name]
    here.code[0].write_text(text + "# changed\n")
    members = [here.silo(number) for number in range(2)]
    for each in (server, *members):
        assert (each.wait(600) or 0) > 0
    assert "the server and this silo have different versions" in server.said()
    assert "refused: expected own_heads.py with digest " in members[0].said()
