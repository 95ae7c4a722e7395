"""Figures as text that a parser of somebody else reads, and the port where it stands."""

import http.client
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from mistakes import raises_code
from silograph.core.config import make_config
from silograph.core.errors import ConfigError
from silograph.core.kinds import Kind
from silograph.deploy.metrics import (
    CONTENT_TYPE,
    Figures,
    serve_metrics,
)
from silograph.experiment.resolve.resolve import resolve
from silograph.experiment.run.progress import RunFacts
from silograph.federation.ledger import Ledger, Record
from silograph.federation.session.events import Board, Cause, Event, SiloState, What
from silograph.graph.graph import Schema

Found = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parsed(text: bytes) -> Found:
    """The samples by name and labels."""
    found: Found = {}
    for family in text_string_to_metric_families(text.decode()):
        assert family.documentation
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


def value(found: Found, name: str, **labels: str) -> float:
    return found["silograph_" + name, tuple(sorted(labels.items()))]


@given(st.lists(st.text(min_size=1), max_size=5, unique=True))
def test_any_name_of_a_silo_comes_back(names: list[str]) -> None:
    figures = Figures()
    figures.follow(Board(names, len(names), figures.take), 1)
    found = parsed(figures.text())
    assert {dict(labels)["silo"] for name, labels in found if name.endswith("_silo_state")} == {
        *names
    }
    assert value(found, "silos_expected") == len(names)


def record(direction: Any, what: Kind, *sizes: int) -> Record:
    k = len(sizes)
    return Record(1, 1, "train", what, direction, np.arange(k), np.array(sizes), np.zeros(k))


def followed() -> tuple[Figures, Board, list[float], list[Ledger]]:
    figures, now, ledgers = Figures(lambda: 1e9), [0.0], [Ledger(2)]
    board = Board(("a", "b"), 2, figures.take, lambda: now[0])
    figures.follow(board, 9)
    figures.add_up(lambda: ledgers[-1])
    return figures, board, now, ledgers


def test_figures_of_what_happened() -> None:
    figures, board, now, ledgers = followed()
    config = resolve(make_config({"rounds": 9}), Schema(2, 2, "multiclass")).config
    figures.begin(config, RunFacts("fedavg", 3, None, "", {}))
    for name in "ab":
        board.take(Event(What.ATTACHED, name))
        board.take(Event(What.ASKED, name, 4, op="train"))
    now[0] = 0.5
    board.take(Event(What.ANSWERED, "a"))
    board.take(Event(What.ANSWERED, "a"))  # to no call
    board.take(Event(What.DROPPED, "b", 4, cause=Cause.LATE, reason="too slow"))
    board.take(Event(What.DISCARDED, "b"))
    board.take(Event(What.REFUSED, "mallory", address="x", reason="y"))
    board.take(Event(What.STRANGER, address="x", reason="y"))
    ledgers[0].append(record("down", Kind.WEIGHTS, 5, 7))
    found = parsed(figures.text())
    assert value(found, "rounds_total") == 3
    board.take(Event(What.ROUND, round=4, rounds=9))
    ledgers[0].append(record("up", Kind.WEIGHTS, 1, 2))
    figures.round({"round": 4, "val_server_accuracy": 0.75, "val_server_loss": None})
    found = parsed(figures.text())
    assert value(found, "start_time_seconds") == 1e9
    assert value(found, "rounds_total") == 4
    assert value(found, "rounds_planned") == 9
    assert value(found, "silos_expected") == 2
    assert value(found, "exchanged_bytes_total", direction="down", kind="weights") == 12
    assert value(found, "exchanged_bytes_total", direction="up", kind="weights") == 3
    assert value(found, "call_seconds_count", silo="a") == 1
    assert value(found, "call_seconds_sum", silo="a") == 0.5
    assert {c: value(found, "drops_total", cause=c) for c in Cause} == {
        c: float(c is Cause.LATE) for c in Cause
    }
    for name, expected in (("a", SiloState.CONNECTED), ("b", SiloState.LATE)):
        for state in SiloState:
            labels = {"silo": name, "silograph_silo_state": str(state)}
            assert value(found, "silo_state", **labels) == (state is expected)
    for name in ("refusals", "strangers", "discarded_answers"):
        assert value(found, f"{name}_total") == 1
    assert value(found, "returns_total") == 0
    scores = {key[1]: v for key, v in found.items() if key[0].endswith("validation_score")}
    assert scores == {(("score", "accuracy"), ("view", "server")): 0.75}


def test_a_ledger_that_goes_on_from_records_is_counted_once() -> None:
    figures, _, _, ledgers = followed()
    ledgers[0].append(record("down", Kind.WEIGHTS, 5, 7))
    figures.text()
    ledgers.append(Ledger(2, [record("down", Kind.WEIGHTS, 1, 1)]))
    found = parsed(figures.text())
    assert value(found, "exchanged_bytes_total", direction="down", kind="weights") == 2


def test_figures_before_anything() -> None:
    found = parsed(Figures().text())
    assert value(found, "rounds_total") == 0
    assert value(found, "silos_expected") == 0


@contextmanager
def answered(method: str, path: str, text: bytes = b"# EOF\n") -> Iterator[Any]:
    with serve_metrics(lambda: text, "0") as address:
        connection = http.client.HTTPConnection(address, timeout=600)
        connection.request(method, path)
        yield connection.getresponse()
        connection.close()


@pytest.mark.parametrize("path", ["/metrics", "/metrics?x=1"])
def test_get_is_answered(path: str) -> None:
    with answered("GET", path, "ü".encode()) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"] == CONTENT_TYPE
        assert answer.headers["Server"].strip() == "silograph"
        assert answer.read() == "ü".encode()


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/"), ("GET", "/metrics/x"), ("POST", "/metrics"), ("HEAD", "/metrics")],
)
def test_nothing_else_is(method: str, path: str) -> None:
    with answered(method, path) as answer:
        assert (answer.status, answer.read()) == (404, b"")


def test_who_hangs_up_or_says_nonsense_is_no_concern(capsys: pytest.CaptureFixture[str]) -> None:
    with serve_metrics(lambda: b"# EOF\n", "0") as address:
        host, _, port = address.rpartition(":")
        for said in (b"", b"\x00\xff\r\n\r\n", b"GET " + b"x" * 70_000):
            with socket.create_connection((host, int(port))) as stream:
                stream.sendall(said)
        connection = http.client.HTTPConnection(address, timeout=600)
        connection.request("GET", "/metrics")
        assert connection.getresponse().status == 200
        connection.close()
    assert capsys.readouterr() == ("", "")


def test_the_port_is_of_this_machine_and_free_afterwards() -> None:
    with serve_metrics(lambda: b"", "0") as address:
        host, _, port = address.rpartition(":")
        assert host == "127.0.0.1"
        taken = r"metrics: expected a free address, got \d+: Address already in use"
        with pytest.raises(ConfigError, match=taken), serve_metrics(lambda: b"", port):
            pass
    with serve_metrics(lambda: b"", port) as again:
        assert again == address
    with serve_metrics(lambda: b"", "localhost:0") as other:
        assert other.startswith("localhost:")


@pytest.mark.parametrize("text", ["x", "", "65536", "host:", ":1", "-1"])
def test_what_is_no_address(text: str) -> None:
    wrong = raises_code(ConfigError, "option-value", option="metrics", got=text)
    with wrong, serve_metrics(lambda: b"", text):
        pass


def test_an_address_of_another_machine() -> None:
    line = r"metrics: expected a free address, got 192\.0\.2\.1:9: Cannot assign requested address"
    with pytest.raises(ConfigError, match=line), serve_metrics(lambda: b"", "192.0.2.1:9"):
        pass
