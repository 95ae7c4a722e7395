"""The audit file of a silo: it continues, stays small, and nothing leaves without a line."""

import json
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from mistakes import raises_code
from silograph.core.errors import ConfigError, PolicyError, ProtocolError
from silograph.core.kinds import Kind
from silograph.core.payload import Shared
from silograph.federation.frame import Envelope
from silograph.federation.session.audit import (
    NO_LINE,
    NOT_AGREED,
    WRITTEN_OUT,
    Audit,
    AuditReading,
    _form,
    line_of,
    open_audit,
    read_audit,
)

ABOUT = {"server": "there:8443", "authority": "a", "policy": "p"}
REPLY = {"w": Shared(torch.zeros(3)), "n": Shared(torch.tensor(1))}


def read(path: Path) -> AuditReading:
    with path.open("rb") as file:
        return read_audit(file)


def answer(audit: Audit, run: str, frame: bytes = b"frame", round_: int = 1) -> None:
    envelope = Envelope("train", Kind.WEIGHTS, round_, 1)
    audit.of_run(run).record_reply(envelope, REPLY, frame)


def test_what_is_written_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with open_audit(path, ABOUT) as (audit, note):
        assert note == f"{path} has 0 lines, each as it was written"
        run = audit.of_run("r1")
        run.record_hello(b"hello")
        run.record_agreement({"method": "fedavg"})
        run.record_reply(Envelope("train", Kind.WEIGHTS, 1, 1), REPLY, b"frame")
        assert run.sent == 10
        assert audit.to_end(lambda: "why") == "why"
    assert path.stat().st_mode & 0o777 == 0o600
    found = read(path)
    (seen,) = found.runs
    assert found.broken is None
    assert found.lines == 4
    assert seen.bytes == {"hello": 5, "weights": 5}
    assert seen.agreed is not None
    assert seen.agreed.facts.items() >= ABOUT.items()
    assert seen.ended is not None
    assert seen.ended.facts.items() >= {"reason": "why", "calls": 1, "bytes": 10}.items()
    with path.open() as file:
        told = file.read()
    assert '"fields": {"w": 12, "n": 8}' in told


NAMES = [
    "plain",
    'a "quoted" name',
    "back\\slash",
    "caf\u00e9 \U0001f642",
    "\ud800",
    "\n\t\x00\x7f",
    "100 %d %s %%",
    "",
]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
@pytest.mark.parametrize("begins", [True, False])
def test_a_line_of_a_call_is_the_json_of_its_facts(tmp_path: Path, name: str, begins: bool) -> None:
    """It is put together by hand; `json.dumps` writes the same bytes."""
    path = tmp_path / "audit.jsonl"
    with open_audit(path, ABOUT) as (audit, _):
        former = audit.head
        reply = {name: REPLY["w"], f"{name}/2": REPLY["n"]}
        envelope = Envelope(name, Kind.WEIGHTS, 3, 1)
        audit.of_run(name).record_reply(envelope, reply, b"frame", begins=begins)
    line = path.read_bytes()
    facts = {
        "time": json.loads(line)["time"],
        "event": "answered",
        "run": name,
        "round": 3,
        **({"begins": True} if begins else {}),
        "op": name,
        "kind": "weights",
        "bytes": 5,
        "fields": {name: 12, f"{name}/2": 8},
    }
    assert line == line_of(facts, former)[0]
    assert json.loads(line).items() >= facts.items()


def test_a_restart_continues_the_chain_and_the_counts(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    for start, (run, server) in enumerate([("r1", "there:1"), ("r1", "there:2"), ("r2", "far:1")]):
        with open_audit(path, ABOUT | {"server": server}) as (audit, note):
            assert note.startswith(f"{path} has {2 * start} lines")
            audit.of_run(run).record_agreement({})
            answer(audit, run)
    with open_audit(path, ABOUT) as (audit, _):
        assert audit.of_run("r1").sent == 10
        assert audit.of_run("r1").others == (1, 0)
        assert audit.of_run("r2").others == (1, 1)  # the other one was with `there`
        assert audit.of_run("r3").others == (2, 1)
    with open_audit(path, ABOUT | {"authority": "another"}) as (audit, _):
        assert audit.of_run("r3").others == (2, 0)
    assert read(path).broken is None
    assert [run.agreements for run in read(path).runs] == [2, 1]


def test_an_error_ends_a_run_in_the_file_too(tmp_path: Path) -> None:
    def fail() -> str | None:
        raise KeyboardInterrupt

    path = tmp_path / "audit.jsonl"
    with open_audit(path, ABOUT) as (audit, _):
        audit.of_run("r1").record_agreement({})
        with pytest.raises(KeyboardInterrupt):
            audit.to_end(fail)
    (run,) = read(path).runs
    assert run.ended is not None
    assert run.ended.facts["reason"] == "KeyboardInterrupt"


@pytest.mark.parametrize("cut", [1, 30])
def test_a_torn_line_is_cut_off_and_told(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "audit.jsonl"
    with open_audit(path, ABOUT) as (audit, _):
        audit.of_run("r1").record_agreement({})
        size = path.stat().st_size
        answer(audit, "r1")
    os.truncate(path, path.stat().st_size - cut)
    torn = path.stat().st_size - size
    with open_audit(path, ABOUT) as (audit, note):
        assert f"; {torn} bytes of a line without an end were cut off" in note
        answer(audit, "r1")
    found = read(path)
    assert found.broken is None
    assert found.lines == 3
    assert f'"event": "torn", "line": 2, "bytes": {torn}' in path.read_text()


def test_a_file_that_was_changed_is_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with open_audit(path, ABOUT) as (audit, _):
        audit.of_run("r1").record_agreement({})
        answer(audit, "r1")
    before = path.read_bytes()
    path.write_bytes(before.replace(b"there", b"their"))
    with (
        pytest.raises(ConfigError, match=r"as this silo wrote it, got other contents in line 1: "),
        open_audit(path, ABOUT),
    ):
        pass
    assert path.read_bytes() == before.replace(b"there", b"their")


def test_one_process_writes(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with (
        open_audit(path, ABOUT),
        raises_code(ConfigError, "folder-in-use"),
        open_audit(path, ABOUT),
    ):
        pass
    with (
        raises_code(ConfigError, "unwritable-path"),
        open_audit(tmp_path / "none" / "audit.jsonl", ABOUT),
    ):
        pass


@pytest.mark.parametrize("wrote", [None, 10])
def test_nothing_leaves_that_cannot_be_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrote: int | None
) -> None:
    path = tmp_path / "audit.jsonl"
    real = os.write

    def full(file: int, data: bytes) -> int:
        if wrote is None:
            raise OSError(28, "No space left on device")
        return real(file, data[:wrote])

    with open_audit(path, ABOUT) as (audit, _):
        audit.of_run("r1").record_agreement({})
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            with pytest.raises(
                PolicyError, match=r"expected to write down in audit.jsonl what lea"
            ):
                answer(audit, "r1")
        answer(audit, "r1")
    assert read(path).broken is None
    assert read(path).lines == 2


def test_a_line_that_cannot_be_forced_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: int) -> None:
        raise OSError(5, "Input/output error")

    with open_audit(tmp_path / "audit.jsonl", ABOUT) as (audit, _):
        monkeypatch.setattr(os, "fdatasync", fail)
        with pytest.raises(PolicyError, match="got: Input/output error: nothing more is sent"):
            audit.of_run("r1").record_agreement({})


def test_what_is_repeated_without_end_takes_few_lines(tmp_path: Path) -> None:
    """10,000 refusals and hellos: 16 lines each, then one for each power of two up to 8,192."""
    path = tmp_path / "audit.jsonl"
    with open_audit(path, ABOUT) as (audit, _):
        run = audit.of_run("r1")
        for _ in range(10_000):
            run.record_refusal("no")
            run.record_hello(b"hello")
        run.record_agreement({})
        assert audit.to_end(lambda: None) is None
    each = WRITTEN_OUT + 9  # 32 to 8,192
    found = read(path)
    assert found.lines == 2 * each + 2
    (seen,) = found.runs
    assert seen.refused == 10_000  # 8,192 in lines of their own, the others with the end
    assert seen.ended is not None
    assert seen.ended.facts["refusals_without_a_line"] == 10_000 - 8_192
    assert seen.bytes["hello"] == 5 * 8_192
    assert run.sent == 50_000


def test_without_a_file_only_counts(tmp_path: Path) -> None:
    with open_audit(None, ABOUT) as (audit, note):
        answer(audit, "r1")
        assert note == ""
        assert audit.of_run("r1").sent == 0  # a record of its own
        run: Any = audit.of_run("r2")
        run.record_hello(b"12")
        assert run.sent == 2
    assert not list(tmp_path.iterdir())


def test_a_name_is_of_one_run(tmp_path: Path) -> None:
    """Else a server could have any number of runs that count as one."""
    path = tmp_path / "audit.jsonl"
    with open_audit(path, ABOUT) as (audit, _):
        audit.of_run("r1").check_again("d1")
        audit.of_run("r1").record_agreement({"config": "d1"})
    with open_audit(path, ABOUT) as (audit, _):  # after a crash
        run = audit.of_run("r1")
        run.check_again("d1")
        with pytest.raises(ProtocolError, match="agreed to in this run before, got another one"):
            run.check_again("d2")
        run.record_agreement({"config": "d1"})
        assert audit.to_end(lambda: None) is None
    with open_audit(path, ABOUT) as (audit, _):
        with pytest.raises(ProtocolError, match="got one that this silo has seen the end of"):
            audit.of_run("r1").check_again("d1")
        audit.of_run("r2").check_again("d1")


def test_an_end_before_an_agreement_is_not_that_of_the_run(tmp_path: Path) -> None:
    """One process was interrupted; the next one only showed its hello and heard that it is over."""
    path = tmp_path / "audit.jsonl"
    with open_audit(path, ABOUT) as (audit, _):
        audit.of_run("r1").record_agreement({"config": "d1"})
        audit.to_end(lambda: "lost")
    with open_audit(path, ABOUT) as (audit, _):
        audit.of_run("r1").record_hello(b"hello")
        assert audit.to_end(lambda: None) is None
    (seen,) = read(path).runs
    assert seen.ended is not None
    assert seen.ended.facts["reason"] == NOT_AGREED
    with open_audit(path, ABOUT) as (audit, _):
        audit.of_run("r1").check_again("d1")


@pytest.mark.parametrize("reason", ["lost", None])
def test_a_run_that_is_over_stays_so_whoever_shows_itself(
    tmp_path: Path, reason: str | None
) -> None:
    path = tmp_path / "audit.jsonl"
    with open_audit(path, ABOUT) as (audit, _):
        run = audit.of_run("r1")
        run.record_agreement({"config": "d1"})
        run.record_hello(b"hello")  # to a server that goes on
        audit.to_end(lambda: None)
    with open_audit(path, ABOUT) as (audit, _):
        audit.of_run("r1").record_hello(b"hello")
        audit.to_end(lambda: reason)
    (seen,) = read(path).runs
    assert seen.ended is not None
    assert (seen.ended.line, seen.ended.facts["reason"]) == (3, None)
    with (
        open_audit(path, ABOUT) as (audit, _),
        pytest.raises(ProtocolError, match="got one that this silo has seen the end of"),
    ):
        audit.of_run("r1").check_again("d1")


def test_hellos_to_runs_that_nothing_came_of_count() -> None:
    audit = Audit()
    for number in range(3):
        audit.of_run(f"r{number}").record_hello(b"hello")
    last = audit.of_run("r3")
    last.record_hello(b"hello")
    assert last.sent == 20
    last.record_agreement({})
    assert last.sent == 20
    assert audit.of_run("r4").sent == 15


@pytest.mark.parametrize(
    "facts",
    [
        {"event": "answered", "round": 1, "kind": "weights", "bytes": 10**400},
        {"event": "answered", "round": 1, "kind": "weights", "bytes": -1},
        {"event": "answered", "round": "1", "kind": "weights", "bytes": 1},
        {"event": "hello", "bytes": "many"},
    ],
    ids=str,
)
def test_numbers_that_nobody_writes_break_the_chain(tmp_path: Path, facts: Any) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_bytes(line_of({"run": "r1", **facts}, NO_LINE)[0])
    broken = read(path).broken
    assert broken is not None
    assert "expected what silograph writes in an audit file" in str(broken)


def test_nothing_follows_a_torn_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = tmp_path / "audit.jsonl", os.write

    def fails(*_: Any) -> None:
        raise OSError

    with open_audit(path, ABOUT) as (audit, _):
        answer(audit, "r1")
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", lambda file, line: write(file, line[:9]))
            patch.setattr(os, "ftruncate", fails)
            with pytest.raises(PolicyError, match="No space left"):
                answer(audit, "r1")
        with pytest.raises(PolicyError, match="its last line could not be written"):
            answer(audit, "r1")
    with open_audit(path, ABOUT) as (audit, note):
        assert "cut" in note
        answer(audit, "r1")
    assert read(path).broken is None


def test_a_file_whose_lines_have_tags_is_continued(tmp_path: Path) -> None:
    """Lines of calls had a tag of the frame once: they are whole, and others follow them."""
    path = tmp_path / "audit.jsonl"
    facts = {"run": "r1", "round": 1, "kind": "weights", "bytes": 5, "tag": "0" * 64}
    line, _ = line_of({"time": "t", "event": "answered", **facts}, NO_LINE)
    path.write_bytes(line)
    with open_audit(path, ABOUT) as (audit, _):
        assert audit.of_run("r1").sent == 5
        answer(audit, "r1")
    assert [path.name for path in tmp_path.iterdir()] == ["audit.jsonl"]  # and nothing beside it
    found = read(path)
    assert found.broken is None
    assert [run.calls for run in found.runs] == [{"weights": 2}]


def test_forms_of_lines_are_not_kept_without_end() -> None:
    """A server that made a silo answer with ever new names would fill its memory."""
    audit = Audit()
    for number in range(2000):
        reply = {f"w{number}": REPLY["w"]}
        audit.of_run("r1").record_reply(Envelope("train", Kind.WEIGHTS, 1, 1), reply, b"frame")
    assert _form.cache_info().currsize <= 1024


@pytest.mark.parametrize("seconds", [0.0, 0.0009, 0.9995, 1.0, 59.999, 60.0, 86399.9996])
def test_the_time_of_a_line_is_that_of_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """The date is made once a second; every line has its own second all the same."""
    path, start = tmp_path / "audit.jsonl", 1_700_000_000
    with open_audit(path, ABOUT) as (audit, _):
        for more in (0.0, seconds, seconds + 0.001):
            moment = round((start + more) * 10**9)
            monkeypatch.setattr(time, "time_ns", lambda moment=moment: moment)
            answer(audit, "r1")
            told = json.loads(path.read_text().splitlines()[-1])["time"]
            found = datetime.fromisoformat(told.replace("Z", "+00:00"))
            assert found == datetime.fromtimestamp(moment // 10**6 / 1000, UTC)
            assert len(told) == len("2023-11-14T22:13:20.000Z")


def test_a_pipe_is_no_audit_file(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "audit.jsonl")
    with (
        pytest.raises(ConfigError, match=r"expected a file at .*audit.jsonl, got something else"),
        open_audit(path, ABOUT),
    ):
        pass


def test_rounds_that_are_done_again_are_counted_over_restarts(tmp_path: Path) -> None:
    """Rounds 0, 1, 2 once, then 2 again; a restart does 2 a third time, and goes on to 3."""
    path, about = tmp_path / "audit.jsonl", {"server": "there:1"}

    def rounds(audit: Audit, *numbers: int) -> int:
        run = audit.of_run("r1")
        for number in numbers:
            for begins in (True, False):  # two calls in each round
                envelope = Envelope("train", Kind.WEIGHTS, number, 1)
                run.record_reply(envelope, REPLY, b"frame", begins=begins)
        return run.repeats_with(numbers[-1] + 1)

    with open_audit(path, about) as (audit, _):
        assert rounds(audit, 0, 1, 2, 2) == 1
    assert [run.repeats for run in read(path).runs] == [1]
    with open_audit(path, about) as (audit, _):
        assert rounds(audit, 2, 3) == 2
    assert [run.repeats for run in read(path).runs] == [2]


def test_a_full_file_takes_no_call_but_says_why_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often a server has rounds done again, the file has at most its size and a margin."""
    path = tmp_path / "audit.jsonl"
    monkeypatch.setattr("silograph.federation.session.audit.MOST_FILE", 2000)
    with open_audit(path, ABOUT) as (audit, _):
        audit.of_run("r1").record_agreement({})
        written = 0
        while written < 10 and path.stat().st_size < 1700:  # a line has some 300 bytes
            answer(audit, "r1")
            written += 1
        with pytest.raises(PolicyError, match=r"expected at most 2,000 bytes in audit.jsonl, got"):
            answer(audit, "r1")
        before = path.stat().st_size
        assert 1500 < before <= 2000
        audit.of_run("r1").record_refusal("full")
        audit.to_end(lambda: "full")
    assert read(path).broken is None
    assert path.stat().st_size > before
    with (
        pytest.raises(ConfigError, match=r"move the file away, the next start begins a new one"),
        open_audit(path, ABOUT),
    ):
        pass
