"""Logs of the command line: lines for people, JSON lines in a file, nothing left configured."""

import io
import json
import logging
import re
import sys
from pathlib import Path

import pytest

from mistakes import raises_code
from silograph.core.errors import ConfigError
from silograph.deploy.display import logging_to
from silograph.federation.session.events import Cause, Event, What, log_event
from terminals import on_terminal

LOG = logging.getLogger("silograph")
DROPPED = Event(What.DROPPED, "a", 3, op="train", cause=Cause.LATE, reason="too slow")


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_an_event_for_people_and_in_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log"
    with logging_to(path):
        log_event(DROPPED)
    shown = capsys.readouterr()
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    assert re.fullmatch(rf"{stamp} round 3 has lost a: too slow\n", shown.err)
    (line,) = lines_of(path)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", str(line.pop("time")))
    assert line == {
        "level": "warning",
        "event": "dropped",
        "message": "round 3 has lost a: too slow",
        "silo": "a",
        "round": 3,
        "op": "train",
        "cause": "late",
        "reason": "too slow",
    }
    assert list(lines_of(path)[0])[:4] == ["time", "level", "event", "message"]


def test_lines_are_added_and_one_a_record(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for _ in range(2):
        with logging_to(path):
            LOG.warning("two\nlines of %s", "ü")
    assert [line["message"] for line in lines_of(path)] == ["two\nlines of ü"] * 2
    assert {line["event"] for line in lines_of(path)} == {"note"}


def test_what_others_say_cannot_steer_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with logging_to(tmp_path / "log"):
        LOG.warning("%s has torch %s", "a", "1\x1b[2J\x9b2J")
    assert capsys.readouterr().err.endswith(" a has torch 1?[2J?2J\n")
    assert (tmp_path / "log").read_text(encoding="utf-8").isascii()


def test_what_others_say_is_no_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with logging_to(None):
        LOG.warning("%s has torch %s", "a", "1\n2026-11-22 00:45:07 b is attached")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("torch 1?2026-11-22 00:45:07 b is attached")


def test_a_traceback_has_lines_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    with logging_to(None):
        try:
            raise ValueError("a\x1b[2J")
        except ValueError:
            log_event(Event(What.FAILED, "a", 1, op="train", reason="ValueError"))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("train failed: ValueError")
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: a?[2J"


def test_a_log_is_for_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with logging_to(path):
        path.rename(tmp_path / "log.1")
        log_event(DROPPED)  # into a new file
    assert {p.stat().st_mode & 0o777 for p in (path, tmp_path / "log.1")} == {0o600}


def test_what_progress_shows_is_in_the_file_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log"
    with logging_to(path):
        log_event(Event(What.ROUND, round=1, rounds=2))
        log_event(Event(What.ENDED, reason="x"))
    assert capsys.readouterr().err == ""
    assert [line["event"] for line in lines_of(path)] == ["round", "ended"]


@pytest.mark.parametrize(("level", "logged"), [("debug", 3), ("info", 2), ("warning", 1)])
def test_levels(tmp_path: Path, level: str, logged: int) -> None:
    path = tmp_path / "log"
    with logging_to(path, level):
        for event in (Event(What.ASKED, "a", 1), Event(What.ATTACHED, "a"), DROPPED):
            log_event(event)
    assert len(lines_of(path)) == logged


def test_a_traceback_is_a_field(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with logging_to(path):
        try:
            raise ValueError("inside")
        except ValueError:
            log_event(Event(What.FAILED, "a", 1, reason="ValueError"))
    (line,) = lines_of(path)
    assert str(line["traceback"]).endswith("ValueError: inside")
    assert line["level"] == "error"


def test_nothing_is_left_configured(tmp_path: Path) -> None:
    before = (LOG.level, list(LOG.handlers))
    with pytest.raises(ZeroDivisionError), logging_to(tmp_path / "log", "debug"):
        raise ZeroDivisionError
    assert (LOG.level, LOG.handlers) == before


def test_a_file_that_is_rotated_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with logging_to(path):
        log_event(DROPPED)
        path.rename(tmp_path / "log.1")
        log_event(DROPPED)
    assert len(lines_of(path)) == len(lines_of(tmp_path / "log.1")) == 1


def test_a_disk_that_is_full_ends_the_file_not_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with logging_to(tmp_path / "log"):
        handler = LOG.handlers[-1]

        class Full(io.StringIO):
            def write(self, text: str) -> int:
                raise OSError(28, "No space left on device")

        monkeypatch.setattr(handler, "stream", Full())
        log_event(DROPPED)
        log_event(DROPPED)
        monkeypatch.undo()
    shown = capsys.readouterr().err.splitlines()
    assert [line.split(" ", 2)[2] for line in shown] == [
        str(DROPPED),
        f"nothing more is written to {tmp_path / 'log'}: [Errno 28] No space left on device",
        str(DROPPED),
    ]


def test_lines_follow_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with logging_to(None):
        other = io.StringIO()
        monkeypatch.setattr(sys, "stderr", other)
        log_event(DROPPED)
    assert other.getvalue().count("\n") == 1


def test_logs_that_cannot_be(tmp_path: Path) -> None:
    with (
        raises_code(ConfigError, "unwritable-path"),
        logging_to(tmp_path),
    ):
        pass
    with (
        raises_code(ConfigError, "unknown-name", what="level", got="loud"),
        logging_to(None, "loud"),
    ):
        pass


@pytest.mark.parametrize("columns", [80, 30])
def test_long_lines_are_wrapped_on_a_terminal_only(
    columns: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = "/a/" + "long-path/" * 9
    words = [f"word{number}" for number in range(40)]
    script = (
        "import logging\n"
        "from silograph.deploy.display import logging_to\n"
        "with logging_to(None):\n"
        f"    logging.getLogger('silograph').warning({' '.join([*words, path])!r})\n"
    )
    shown, _ = on_terminal(script, columns)
    lines = shown.splitlines()
    assert len(lines) > 3
    assert all(len(line) <= max(columns, 40) for line in lines if path not in line)
    assert " ".join(shown.split()).endswith(" ".join([*words, path]))
    with logging_to(None):
        LOG.warning("%s", " ".join(words))
    assert len(capsys.readouterr().err.splitlines()) == 1
