"""The view of a server: rounds and silos, in any terminal, with few silos and with many."""

import io
import re

import pytest
from rich.console import Console

from silograph.deploy.display import (
    MOST_ROWS,
    LiveSilos,
    RoundsOnly,
    describe_missing_silos,
    show_silos,
    summary,
)
from silograph.experiment.run.progress import Silent, show_progress
from silograph.federation.session.events import Board, Cause, Event, What
from terminals import ANSI, on_terminal

METRIC = "val accuracy 0.812  train loss 0.423"
GONE = "expected an answer, got the end of the stream: it is gone"


def board(silos: int) -> tuple[Board, list[float]]:
    """All are attached and have been asked; silo 1 is gone, 2 late, 3 back, 4 still works."""
    now = [0.0]
    names = [f"hospital_{c:02d}" for c in range(silos)]
    found = Board(names, silos, lambda event: None, lambda: now[0])
    for name in names:
        found.take(Event(What.ATTACHED, name))
        found.take(Event(What.ASKED, name, 7, op="train"))
    for name in names[:1] + names[5:]:
        found.take(Event(What.ANSWERED, name))
    for name, cause in zip(names[1:4], (Cause.GONE, Cause.LATE, Cause.LATE), strict=True):
        found.take(Event(What.DROPPED, name, 7, cause=cause, reason=GONE))
    found.take(Event(What.ATTACHED, names[3]))
    now[0] = 30.0
    return found, now


def drawn(view: LiveSilos, columns: int) -> list[str]:
    console = Console(width=columns, file=io.StringIO(), force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(view)
    return ANSI.sub("", capture.get()).splitlines()


@pytest.mark.parametrize("columns", [60, 80, 140])
@pytest.mark.parametrize("silos", [5, 12, 13, 60])
def test_the_view_fits_the_terminal(silos: int, columns: int) -> None:
    view = LiveSilos(20, board(silos)[0])
    view.start(0)
    view.update(7, METRIC)
    lines = drawn(view, columns)
    assert all(len(line.rstrip()) <= columns for line in lines)
    assert lines[0].startswith("round  7/20 ")
    if columns >= 80:
        assert lines[0].rstrip().endswith(METRIC)
    found = "".join(lines[1:])
    counted = f"silos {silos - 4} connected, 1 working, 1 waiting, 1 late, 1 dropped"
    assert lines[1].rstrip() == counted
    rows = [line.split() for line in lines[2:]]
    assert len(rows) == (silos if silos <= MOST_ROWS else 4)
    states = {row[0]: row[1:4] for row in rows}
    assert states["hospital_01"] == ["dropped", "30", "s"]
    assert states["hospital_02"] == ["late", "30", "s"]
    assert states["hospital_03"] == ["waiting", "30", "s"]
    assert states["hospital_04"] == ["working", "30", "s"]
    assert ("hospital_00" in states) == (silos <= MOST_ROWS)
    assert ("…" in found) == (columns < 140)  # only reasons are cut


def test_a_view_of_many_that_are_gone_is_short() -> None:
    wall = Board([f"silo_{c}_{'x' * 60}" for c in range(64)], 64, lambda event: None)
    lines = drawn(LiveSilos(20, wall), 80)
    assert lines[0].split()[-3:] == ["waiting", "for", "silos"]
    assert len(lines) == 2 + MOST_ROWS + 1
    assert lines[-1].strip() == "and 52 more"
    assert all(len(line.rstrip()) <= 80 for line in lines)


def test_all_that_work_for_long_are_as_they_should_be() -> None:
    now = [0.0]
    wall = Board([f"s{c}" for c in range(40)], 40, lambda event: None, lambda: now[0])
    for c in range(40):
        wall.take(Event(What.ASKED, f"s{c}", 1, op="train"))
    now[0] = 600.0
    assert len(drawn(LiveSilos(20, wall), 80)) == 2


def test_silos_without_a_name_are_counted() -> None:
    wall = Board((), 3, lambda event: None)
    wall.take(Event(What.ATTACHED, "a"))
    texts = [text for text, _ in summary(wall.standings(), wall.room)]
    assert texts == ["1 connected", "2 waiting"]


def test_lines_of_no_terminal_name_who_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    wall, _ = board(5)
    with show_silos("plain", 2, wall) as display:
        display.start(0)
        display.update(1, METRIC)
        for name in ("hospital_01", "hospital_02", "hospital_03"):
            wall.take(Event(What.RETURNED, name, 0))
        display.update(2, METRIC)
    assert capsys.readouterr().err.splitlines() == [
        f"round 1/2  {METRIC}  2 of 5 silos, without hospital_01, hospital_02, hospital_03",
        f"round 2/2  0 s left  {METRIC}",
    ]
    many = Board([f"s{c}" for c in range(9)], 9, lambda event: None)
    assert (
        describe_missing_silos(many.standings(), 9) == "0 of 9 silos, without s0, s1, s2 and 6 more"
    )


def test_plain_lines_go_on_where_the_run_does(capsys: pytest.CaptureFixture[str]) -> None:
    wall = Board((), 0, lambda event: None)
    with show_silos("plain", 40, wall) as display:
        display.start(21)
        display.update(22, METRIC)
    assert capsys.readouterr().err == f"round 22/40  {METRIC}\n"


def test_who_else_is_told_of_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[tuple[int, str]] = []

    class Listener:
        def update(self, done: int, metric: str) -> None:
            told.append((done, metric))

    wall, _ = board(5)
    with show_silos(Listener(), 2, wall) as display:
        display.start(0)
        display.update(1, METRIC)
    with show_silos("none", 2, wall) as display, show_progress(2, "none") as other:
        display.update(1, METRIC)
        assert isinstance(display, RoundsOnly)
        assert isinstance(other, Silent)
    assert told == [(1, METRIC)]
    assert capsys.readouterr() == ("", "")


LIVE = f"""
import time
from silograph.deploy.display import logging_to
from silograph.deploy.display import show_silos
from silograph.federation.session.events import Event, What, log_event
from silograph.federation.session.events import Board

board = Board(["north", "south"], 2, log_event)
with logging_to(None), show_silos("live", 9, board) as display:
    for name in ("north", "south"):
        board.take(Event(What.ATTACHED, name))
    display.start(0)
    for done in range(1, 10):
        if done == 5:
            board.take(Event(What.DROPPED, "south", 5, reason={GONE!r}))
        display.update(done, {METRIC!r})
        time.sleep(0.1)
print("result")
"""


@pytest.mark.parametrize("columns", [80, 140])
def test_lines_of_the_log_do_not_tear_the_view(columns: int) -> None:
    shown, printed = on_terminal(LIVE, columns)
    assert printed == "result\n"
    lines = [part for line in re.split(r"[\r\n]+", ANSI.sub("", shown)) if (part := line.strip())]
    for text in ("north is attached (1 of 2)", "south is attached (2 of 2)"):
        (line,) = [line for line in lines if text in line]
        assert re.fullmatch(rf"[-\d]+ [:\d]+ {re.escape(text)}", line)
    whole = " ".join(lines)
    assert f"round 5 has lost south: {GONE}" in whole
    rounds = [line for line in lines if line.startswith("round") and METRIC in line]
    assert all(re.fullmatch(rf"round +\d/9 .* {METRIC}", line) for line in rounds)
    assert rounds[-1].startswith("round 9/9")
    assert lines[-4:-1] == [rounds[-1], "silos 1 connected, 1 dropped", "north  connected"]
    assert re.fullmatch(r"south  dropped .*round 5: .*", lines[-1])
