"""What people and monitoring systems see of a federation, and what nobody does: its secrets."""

import base64
import json
import os
import secrets
import socket
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mistakes import raises_code

grpc = pytest.importorskip("grpc")
pytest.importorskip("cryptography")

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: E402
from cryptography.hazmat.primitives.serialization import load_pem_private_key  # noqa: E402
from prometheus_client.openmetrics.parser import text_string_to_metric_families  # noqa: E402

from forked import Forked  # noqa: E402
from silo_folders import folder  # noqa: E402
from silograph.core.errors import ConfigError, DataError  # noqa: E402
from silograph.deploy.display import logging_to  # noqa: E402
from silograph.deploy.server import serve  # noqa: E402
from silograph.deploy.server_settings import ServerSettings  # noqa: E402
from silograph.deploy.silo import Attendance, take_part_in_run  # noqa: E402
from silograph.experiment.result_files import Row  # noqa: E402
from silograph.experiment.run.progress import RunFacts  # noqa: E402
from silograph.experiment.run.result import Result  # noqa: E402
from silograph.federation.session import hub  # noqa: E402
from silograph.federation.session.events import Event, EventCallback, What, both, log_event  # noqa: E402
from silograph.federation.session.identity import is_signed  # noqa: E402
from silograph.federation.session.wire import PATH  # noqa: E402
from silograph.graph.graph import Graph  # noqa: E402
from silograph.graph.silos.read import read_silo  # noqa: E402
from silos import ALLOW, config_of, federate, folders  # noqa: E402

PLAIN = ServerSettings("127.0.0.1:0", insecure=True, patience=600)
OWN = ("7f3c1a", "90bd42", "sarcoma-1d", "melanoma-2e", "tumor-width")  # of the silos' own data
CLASSES = 'classes = ["sarcoma-1d", "melanoma-2e"]'
NORTH = {
    "silo.toml": f'name = "north"\nfeatures = 2\n{CLASSES}\n',
    "nodes.csv": "id,label,split\na-7f3c1a,sarcoma-1d,train\nb-7f3c1a,melanoma-2e,val\n",
    "features.csv": "id,tumor-width,age\na-7f3c1a,1,2\nb-7f3c1a,0.5,0\n",
    "edges.csv": "source,target\na-7f3c1a,b-7f3c1a\n",
    "cross_edges.csv": "own,silo,remote\na-7f3c1a,south,k-90bd42\nb-7f3c1a,south,k-90bd42\n",
}
SOUTH = {
    "silo.toml": f'name = "south"\nfeatures = 2\n{CLASSES}\n',
    "nodes.csv": "id,label,split\nk-90bd42,melanoma-2e,train\nl-90bd42,sarcoma-1d,test\n",
    "features.csv": "id,tumor-width,age\nk-90bd42,1,2\nl-90bd42,0,1\n",
    "edges.csv": "source,target\n",
    "cross_edges.csv": "own,silo,remote\nk-90bd42,north,a-7f3c1a\nk-90bd42,north,b-7f3c1a\n",
}


class EveryRound:
    """Does something after each round."""

    def __init__(self, do: Callable[[Row], None]) -> None:
        self.do = do

    def begin(self, config: Any, facts: RunFacts) -> None:
        pass

    def round(self, row: Row) -> None:
        self.do(row)

    def end(self, result: Result) -> None:
        pass


def scraped(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=600) as answer:
        found: bytes = answer.read()
    return found.decode()


def test_figures_are_those_of_the_ledger(make_graph: Callable[..., Graph], tmp_path: Path) -> None:
    config = config_of(3, partition="random", rounds=3, hidden=8, method="scaffold")
    told: list[Event] = []
    texts: list[str] = []

    def scrape(row: Row) -> None:
        (address,) = [e.address for e in told if e.what is What.METRICS]
        texts.append(scraped(str(address)))

    def run(*given: Any, report: EventCallback) -> Result:
        return serve(*given, trackers=[EveryRound(scrape)], report=both(told.append, report))

    venue = replace(PLAIN, metrics="0")
    result = federate(folders(make_graph(60), config, tmp_path / "silos"), config, venue, run=run)
    for number, text in enumerate(texts, start=1):
        expected: dict[tuple[str, str], int] = {}
        for r in result.ledger.records:
            if r.round <= number + 1:  # whose clients have scored what this one came to
                at = (str(r.direction), str(r.what))
                expected[at] = expected.get(at, 0) + int(r.bytes.sum())
        samples = [s for f in text_string_to_metric_families(text) for s in f.samples]
        found = {
            (s.labels["direction"], s.labels["kind"]): s.value
            for s in samples
            if s.name == "silograph_exchanged_bytes_total"
        }
        assert found == expected
        values = {s.name: s.value for s in samples}
        assert values["silograph_rounds_total"] == min(number, 2)  # the last one is not over yet
        scores = {s.labels["score"]: s.value for s in samples if s.labels.get("view") == "server"}
        row = result.rounds[number - 1]
        assert scores["accuracy"] == row["val_server_accuracy"]
        calls = [s.value for s in samples if s.name == "silograph_call_seconds_count"]
        assert len(calls) == 3
    answered = [e for e in told if e.what is What.ANSWERED and e.seconds is not None]
    assert sum(calls) <= len(answered)
    assert [e.round for e in told if e.what is What.ROUND] == [1, 2, 3]
    assert told[-1] == Event(What.ENDED, bytes=result.ledger.bytes)
    address = next(str(e.address) for e in told if e.what is What.METRICS)
    host, _, port = address.rpartition(":")
    with socket.create_server((host, int(port))):  # free again
        pass


def test_a_port_that_is_taken_starts_nothing() -> None:
    told: list[Event] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(
            ConfigError, match=f"metrics: expected a free address, got {port}: Address already"
        ):
            serve(config_of(2), replace(PLAIN, metrics=port), report=told.append)
    assert told == []


def forms(secret: bytes) -> set[str]:
    """What a secret, or its first half, could look like in a text."""
    found = set()
    for part in (secret, secret[: len(secret) // 2]):
        hexadecimal = part.hex()
        found |= {hexadecimal, hexadecimal.upper(), repr(part)[2:-1], part.decode("latin-1")}
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            found.add(
                encode(part).decode().rstrip("=")[:-1]
            )  # the last one depends on what follows
    return found


def leaked(text: str, hidden: list[bytes], words: tuple[str, ...]) -> list[str]:
    """Secrets and words that a text has."""
    return [form for secret in hidden for form in forms(secret) if form in text] + [
        word for word in words if word in text
    ]


def test_leaks_would_be_found() -> None:
    secret = bytes(range(100, 132))
    for shown in (
        secret.hex(),
        repr(secret),
        secret[:16].hex(),
        base64.b64encode(secret).decode(),
        base64.urlsafe_b64encode(secret + b"more").decode(),
    ):
        assert leaked(f"x{shown}y", [secret], ()), shown
    assert leaked("k-90bd42", [], OWN) == ["90bd42"]
    assert not leaked("round 1 of 2", [secret], OWN)


class Recorder:
    """What the server draws and hears of signatures."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hidden: list[bytes] = []
        draw, check = secrets.token_bytes, is_signed

        def drawn(size: int) -> bytes:
            self.hidden.append(draw(size))
            return self.hidden[-1]

        def checked(public: bytes, signature: bytes, text: bytes) -> bool:
            self.hidden.append(signature)
            return check(public, signature, text)

        monkeypatch.setattr("secrets.token_bytes", drawn)
        monkeypatch.setattr(hub, "is_signed", checked)


def private_of(path: Path) -> list[bytes]:
    """A key's file: its lines, and the key itself."""
    key = load_pem_private_key(path.read_bytes(), password=None)
    assert isinstance(key, Ed25519PrivateKey)
    return [key.private_bytes_raw(), path.read_bytes().splitlines()[1]]


def intrude(address: str, silo: Path) -> None:
    """A silo with another key under a name that is taken, and a stream of nonsense."""
    other = Attendance(address, silo / "other.pem", silo.parent / "secret", insecure=True)
    with pytest.raises(ConfigError, match="expected the key that north is registered with"):
        take_part_in_run(read_silo(silo), other, lambda event: None)
    with grpc.insecure_channel(address) as channel:
        said = channel.stream_stream(PATH)(iter([b"SGM1 my password is opensesame"]))
        assert list(said) == []


@pytest.fixture
def started() -> Iterator[list[Forked]]:
    """Processes, of which none is left at the end."""
    found: list[Forked] = []
    yield found
    for process in found:
        process.kill()
        process.wait()


def silo_process(path: Path, address: str) -> Forked:
    """A silo on the command line that logs all there is."""
    command = [sys.executable, "-m", "silograph", "silo", "--data", str(path), "--insecure"]
    command += ["--server", address, "--secret", str(path.parent / "secret")]
    command += ["--log-file", str(path / "log"), "--log-level", "debug"]
    command += ["--allow", ",".join(ALLOW)]
    with (path / "said").open("wb") as said:
        return Forked(command, stdout=said, stderr=said)


def test_no_secret_is_in_a_log_or_a_figure(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    started: list[Forked],
) -> None:
    """Silos are processes of the command line; all logs have all there is."""
    silos = [folder(tmp_path / n, files) for n, files in (("north", NORTH), ("south", SOUTH))]
    shared = os.urandom(32)
    (tmp_path / "secret").write_bytes(shared)
    (tmp_path / "secret").chmod(0o600)
    recorder, address, texts = Recorder(monkeypatch), dict[What, str](), list[str]()

    def report(event: Event) -> None:
        log_event(event)
        if event.what in (What.METRICS, What.LISTENING):
            address[event.what] = str(event.address)
        if event.what is What.LISTENING:
            for path in silos:
                started.append(silo_process(path, str(event.address)))

    def intruded(row: Row) -> None:
        intrude(address[What.LISTENING], silos[0])
        texts.append(scraped(address[What.METRICS]))

    options = {"split": "public", "kernels": "torch", "hidden": 4, "method": "label_guided"}
    config = config_of(2, **options, rounds=1, options={"sample": 2}, out=str(tmp_path / "out"))
    venue = replace(PLAIN, metrics="0", silos=("north", "south"))
    with logging_to(tmp_path / "log", "debug"):
        serve(config, venue, trackers=[EveryRound(intruded)], report=report)
    assert [process.wait(600) for process in started] == [0, 0]

    token = json.loads((tmp_path / "out" / "session.json").read_text())["token"]
    hidden = [shared, *recorder.hidden, *(k for p in silos for k in private_of(p / "key.pem"))]
    assert bytes.fromhex(token) in hidden
    assert len(recorder.hidden) >= 8  # token, two nonces of streams and one of edges, signatures
    server = (tmp_path / "log").read_text() + capsys.readouterr().err + "".join(texts)
    assert leaked(server, hidden, (*OWN, "opensesame")) == []
    for path in silos:
        own = (path / "log").read_text() + (path / "said").read_text()
        assert leaked(own, hidden, OWN) == []  # nothing was wrong that it would have to explain
        lines = [json.loads(line) for line in (path / "log").read_text().splitlines()]
        assert {"note", "agreed", "attached", "asked", "answered", "kept", "ended"} == {
            line["event"] for line in lines
        }
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    expected = {"metrics", "listening", "attached", "asked", "answered", "refused", "stranger"}
    assert {line["event"] for line in lines} == expected | {"note", "round", "ended"}
    refused = next(line for line in lines if line["event"] == "refused")
    assert refused["silo"] == "north"
    assert refused["address"].startswith("ipv4:127.0.0.1:")


def test_a_server_hears_nothing_of_the_edge_that_a_silo_explains(tmp_path: Path) -> None:
    untold = {"cross_edges.csv": "own,silo,remote\na-7f3c1a,south,k-90bd42\n"}
    silos = [folder(tmp_path / "north", NORTH | untold), folder(tmp_path / "south", SOUTH)]
    (tmp_path / "secret").write_bytes(os.urandom(32))
    (tmp_path / "secret").chmod(0o600)
    said: list[str] = []
    told: list[Event] = []

    def run(*given: Any, report: EventCallback) -> Result:
        return serve(*given, report=both(told.append, report))

    with raises_code(DataError, "silos-disagree", what="edges", silo="south", other="north"):
        federate(silos, config_of(2, split="public"), PLAIN, silo_lines=said, run=run)
    assert any("90bd42" in line for line in said)  # the silo's own log may
    assert leaked(" ".join(map(repr, told)), [], OWN) == []
    assert told[-1].what is What.ENDED
    assert "south itself says which" in str(told[-1].reason)
