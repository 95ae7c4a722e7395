"""Keys that are replaced or revoked while a federation runs, and audit heads that silos share."""

import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("grpc")
pytest.importorskip("cryptography")

import silograph as sg
from runs import same_bits, weights_of
from silograph.cli import run_app
from silograph.deploy.key_watch import KeyWatch
from silograph.deploy.server_settings import ServerSettings
from silograph.deploy.silo import take_part_in_run
from silograph.federation.session.audit import read_audit
from silograph.federation.session.events import Event, What
from silograph.federation.session.identity import Register, SiloKey, key_line, make_certificates
from silograph.federation.session.key_versions import rotate_key
from silograph.graph.graph import Graph
from silos import config_of, federate, folders
from streams import until
from victims import Victim

PLAIN = ServerSettings("127.0.0.1:0", insecure=True, patience=600)
BASE: dict[str, Any] = {"partition": "random", "rounds": 4, "hidden": 8, "method": "scaffold"}
MakeGraph = Callable[..., Graph]


def watch_of(
    settings: ServerSettings, register: Register, events: list[Event], days: list[float]
) -> KeyWatch:
    hub: Any = SimpleNamespace(end_replaced=lambda: ["north"])
    start = datetime.now(UTC)
    return KeyWatch(
        settings, register, hub, events.append, lambda: start + timedelta(days=days[-1])
    )


def test_files_of_keys_are_read_again_and_damaged_ones_change_nothing(tmp_path: Path) -> None:
    keys, revoked = tmp_path / "keys.txt", tmp_path / "revoked.txt"
    one, two = SiloKey.new().public, SiloKey.new().public
    keys.write_text(key_line("north", one))
    revoked.write_text("")
    register, events = Register(None, 1, {"north": one}), list[Event]()
    watch = watch_of(replace(PLAIN, keys=keys, revoked=revoked), register, events, [0.0])
    watch.look()
    assert events == []
    revoked.write_text(one.hex())
    watch.look()
    assert [event.what for event in events] == [What.KEYS]
    assert not register.is_current("north", one)
    for text in ("north x", ""):  # damaged, or being written
        keys.write_text(text)
        watch.look()
    assert "has an error" in str(events[-1])
    assert not register.is_current("north", one)
    keys.write_text(key_line("north", two))
    watch.look()
    assert register.is_current("north", two)
    assert len(events) == 4


@pytest.mark.parametrize("are_former_lines_there", [True, False])
def test_a_version_signed_by_a_revoked_key_or_its_successor_is_refused(
    tmp_path: Path, are_former_lines_there: bool
) -> None:
    keys, revoked = tmp_path / "keys.txt", tmp_path / "revoked.txt"
    first = SiloKey.load(tmp_path / "key.pem").public
    second, third = (rotate_key(tmp_path / "key.pem", "north") for _ in range(2))
    last = third if are_former_lines_there else second
    lines = [key_line("north", first), second.line, third.line]
    keys.write_text("\n".join(lines) if are_former_lines_there else second.line)
    revoked.write_text("")
    register, events = Register(None, 1, {"north": first}), list[Event]()
    watch = watch_of(replace(PLAIN, keys=keys, revoked=revoked), register, events, [0.0])
    watch.start()
    watch.close()
    assert register.is_current("north", last.public)
    revoked.write_text(first.hex())
    watch.look()
    assert not register.is_current("north", last.public)
    refused = [event.silo for event in events if event.what is What.KEYS and event.silo]
    assert refused == ["north"] * (2 if are_former_lines_there else 1)
    other = SiloKey.new().public
    keys.write_text(key_line("north", other))
    watch.look()
    assert register.is_current("north", other)


def test_a_key_is_revoked_though_the_file_of_keys_has_an_error(tmp_path: Path) -> None:
    keys, revoked = tmp_path / "keys.txt", tmp_path / "revoked.txt"
    own = SiloKey.new().public
    keys.write_text(key_line("north", own))
    revoked.write_text("")
    register = Register(None, 1, {"north": own})
    watch = watch_of(replace(PLAIN, keys=keys, revoked=revoked), register, [], [0.0])
    keys.write_text("north x")
    revoked.write_text(own.hex())
    watch.look()
    assert not register.is_current("north", own)


@pytest.mark.parametrize(("days", "says"), [(5, "ends on"), (-1, "ended on"), (40, None)])
def test_a_server_warns_once_a_day_before_its_certificate_ends(
    tmp_path: Path, days: int, says: str | None
) -> None:
    make_certificates(tmp_path / "certs", ["localhost"], days=60)
    pair = tmp_path / "certs" / "server.pem", tmp_path / "certs" / "server.key"
    events, now = list[Event](), [60.0 - days]
    settings = replace(PLAIN, insecure=False, certificate=pair)
    watch = watch_of(settings, Register(None, 1), events, now)
    for _ in range(3):
        watch.look()
    assert [event.what for event in events] == ([] if says is None else [What.EXPIRES])
    assert says is None or says in str(events[0])
    now.append(now[0] + 1)
    watch.look()
    assert len(events) == (0 if says is None else 2)


def test_a_silo_whose_key_is_revoked_goes_on_with_its_next_key(
    make_graph: MakeGraph, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its stream is ended in a round, and the run has the bits of one without all this."""
    graph, config = make_graph(60), config_of(3, **BASE)
    silos = folders(graph, config, tmp_path / "silos")
    keys, revoked = tmp_path / "keys.txt", tmp_path / "revoked.txt"
    public = [SiloKey.load(folder / "key.pem").public for folder in silos]
    lines = [key_line(f"client_0{i}", key) for i, key in enumerate(public)]
    keys.write_text("\n".join(lines) + "\n")
    revoked.write_text("")
    victims = [Victim(), Victim()]
    address, threads = list[str](), list[threading.Thread]()

    def revoke() -> None:
        victims[0].hears("attached")
        victims[0].hears("working")
        (silos[2] / "key.pem").unlink()
        new = key_line("client_02", SiloKey.load(silos[2] / "key.pem").public)
        keys.write_text("\n".join([*lines[:2], new]) + "\n")
        revoked.write_text(public[2].hex())
        until(lambda: "the streams of client_02 were ended" in caplog.text)
        victims[0].end()
        victims[1].take_part(address[0], silos[2], hang=99)

    def start(at: str) -> None:
        address.append(at)
        victims[0].take_part(at, silos[2], hang=2)
        threads.append(threading.Thread(target=revoke))
        threads[0].start()

    settings = replace(PLAIN, keys=keys, revoked=revoked)
    try:
        result = federate(silos[:2], config, settings, on_address=start)
        threads[0].join()
        victims[1].hears("attached")
        victims[1].hears("")
    finally:
        for victim in victims:
            victim.end()
    whole = sg.run(graph, config=config, block_size=1)
    assert same_bits(weights_of(result), weights_of(whole))
    assert result.ledger.records == whole.ledger.records
    assert "round 2 waits up to 60 s for client_02, and is done again" in caplog.text


def test_heads_of_audits_are_at_the_other_silos(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(3, **BASE | {"rounds": 1})
    silos = folders(make_graph(60), config, tmp_path / "silos")
    logs = [folder / "audit.jsonl" for folder in silos]
    settings = replace(PLAIN, share_audit_heads=True)

    def with_audit(data: Any, attendance: Any, report: Any) -> str | None:
        folder = attendance.key.parent
        return take_part_in_run(data, replace(attendance, audit=folder / "audit.jsonl"), report)

    monkeypatch.setattr("silos.take_part_in_run", with_audit)
    federate(silos, config, settings)
    readings = []
    for log in logs:
        with log.open("rb") as file:
            readings.append(read_audit(file))
    for reading in readings:
        assert reading.broken is None
        assert max(reading.signed) == reading.lines
        assert sorted(each.name for each in reading.heads) == [f"client_0{i}" for i in range(3)]
    keys = tmp_path / "keys.txt"
    public = [SiloKey.load(folder / "key.pem").public for folder in silos]
    keys.write_text("\n".join(key_line(f"client_0{i}", key) for i, key in enumerate(public)))
    words = ["audit", str(logs[0]), "--keys", str(keys), "--witness", str(logs[1])]
    assert run_app(words) == 0
    # Without the lines after the agreement the file is whole, and yet not what others have seen.
    whole = logs[0].read_bytes().splitlines(keepends=True)
    agreed = next(i for i, line in enumerate(whole) if b'"event": "signed"' in line)
    logs[0].write_bytes(b"".join(whole[: agreed + 1]))
    assert run_app(words[:4]) == 0
    assert run_app(words) == 1
    keys.write_text(key_line("client_00", public[1]))
    assert run_app(words[:4]) == 1
