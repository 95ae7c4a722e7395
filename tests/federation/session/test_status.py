"""Events in, standings out; every event is one line and one record."""

import logging

import pytest

from silograph.federation.session.events import (
    FIELDS,
    Board,
    Cause,
    Event,
    SiloState,
    Standing,
    What,
    after,
    counts,
    log_event,
)

A = Standing(SiloState.WAITING, 0.0)
CALL = Event(What.ASKED, "a", 3, op="train")
LATE = Event(What.DROPPED, "a", 3, op="train", cause=Cause.LATE, reason="too slow")
GONE = Event(What.DROPPED, "a", 3, cause=Cause.GONE, reason="gone")


def states(*events: Event, start: Standing = A) -> list[SiloState]:
    """The states that a silo goes through, one second an event."""
    found = []
    for now, event in enumerate(events, start=1):
        start = after(start, event, float(now))
        found.append(start.state)
    return found


@pytest.mark.parametrize(
    ("whats", "expected"),
    [
        ([Event(What.ATTACHED, "a")], ["connected"]),
        ([Event(What.ATTACHED), CALL, Event(What.ANSWERED)], ["connected", "working", "connected"]),
        ([CALL, LATE, Event(What.ANSWERED)], ["working", "late", "late"]),  # as if it never came
        ([CALL, GONE, Event(What.DISCARDED)], ["working", "dropped", "dropped"]),
        (
            [LATE, Event(What.ATTACHED), Event(What.RETURNED, "a", 2), CALL],
            ["late", "waiting", "connected", "working"],
        ),
        ([GONE, Event(What.ATTACHED), Event(What.UNFIT)], ["dropped", "waiting", "dropped"]),
        ([CALL, Event(What.ATTACHED)], ["working", "working"]),  # its old stream is not over yet
        ([Event(What.ANSWERED), Event(What.UNHEARD)], ["waiting", "waiting"]),
    ],
)
def test_what_events_make_of_a_silo(whats: list[Event], expected: list[str]) -> None:
    assert states(*whats) == expected


def test_a_standing_says_since_when_and_why() -> None:
    asked = after(A, CALL, 5.0)
    assert asked == Standing(SiloState.WORKING, 5.0, 3, "train")
    assert after(asked, Event(What.ANSWERED, "a"), 6.0) == Standing(
        SiloState.CONNECTED, 6.0, 3, "train"
    )
    assert after(asked, GONE, 7.0) == Standing(SiloState.DROPPED, 7.0, 3, "train", "gone")
    assert after(after(asked, LATE, 7.0), Event(What.ATTACHED), 8.0).reason == "too slow"


def board(*names: str, room: int = 2) -> tuple[Board, list[Event], list[float]]:
    told: list[Event] = []
    now = [0.0]
    return Board(names, room, told.append, lambda: now[0]), told, now


def test_a_board_adds_what_it_knows() -> None:
    wall, told, now = board()
    wall.take(Event(What.ATTACHED, "b"))
    wall.take(Event(What.ATTACHED, "a"))
    assert [str(e) for e in told] == ["b is attached (1 of 2)", "a is attached (2 of 2)"]
    wall.take(CALL)
    now[0] = 0.25
    wall.take(Event(What.ANSWERED, "a", bytes=7))
    assert told[-1] == Event(What.ANSWERED, "a", 3, op="train", seconds=0.25, bytes=7)
    wall.take(Event(What.ANSWERED, "a", bytes=9))  # to no call
    assert told[-1] == Event(What.ANSWERED, "a", bytes=9)
    wall.take(GONE)
    wall.take(Event(What.ATTACHED, "a"))
    assert str(told[-1]) == "a is attached"
    assert list(wall.standings()) == ["b", "a"]


def test_names_that_only_claim_to_be_silos_have_no_standing() -> None:
    wall, told, _ = board("a")
    wall.take(Event(What.REFUSED, "mallory", address="ipv4:1.2.3.4:5", reason="no"))
    wall.take(Event(What.STRANGER, address="ipv4:1.2.3.4:5", reason="no"))
    wall.take(Event(What.LISTENING, address="localhost:1"))
    assert list(wall.standings()) == ["a"]
    assert len(told) == 3


def test_counts_have_those_without_a_name() -> None:
    wall, _, _ = board("a", room=4)
    wall.take(Event(What.ATTACHED, "a"))
    assert counts(wall.standings(), 4) == {
        "waiting": 3,
        "connected": 1,
        "working": 0,
        "late": 0,
        "dropped": 0,
    }


FULL = Event(
    What.NOTE,
    silo="a",
    round=3,
    rounds=9,
    op="train",
    cause=Cause.LATE,
    reason="why",
    seconds=1.5,
    bytes=10,
    address="h:1",
    silos=1,
    room=2,
    note="n",
)


@pytest.mark.parametrize("what", What)
def test_every_event_is_one_line_and_one_record(
    what: What, caplog: pytest.LogCaptureFixture
) -> None:
    event = Event(what, **FULL.fields)  # type: ignore[arg-type]
    line = str(event)
    assert line
    assert "None" not in line
    assert "\n" not in line
    caplog.set_level(logging.DEBUG, "silograph")
    log_event(event)
    (record,) = caplog.records
    assert (record.getMessage(), record.levelno) == (line, event.level)
    fields = vars(record)
    assert {name: fields[name] for name in FIELDS} == FULL.fields
    assert fields["event"] == what.value


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (Event(What.ATTACHED, "a", address="h:1"), "a is attached to h:1"),
        (Event(What.ANSWERED, "a"), "a has answered"),
        (Event(What.ENDED), "the run is over"),
        (Event(What.ENDED, reason="x"), "the run failed: x"),
        (Event(What.ROUND, round=1, rounds=2), "round 1 of 2 is over: not judged"),
        (Event(What.FAILED), "an op failed"),
        (
            Event(What.LOST, "a", address="h:1", reason="x"),
            "a has no stream to h:1, tries again: x",
        ),
        (
            Event(What.STOPPED, "a", address="h:1", seconds=9.0, note="until then"),
            "the server at h:1 was stopped: a waits for it for up to 9 s (until then)",
        ),
        (Event(What.STOPPED, silos=0), "the server was stopped"),
        (
            Event(What.STOPPED),
            "the server was stopped: its silos wait until the run is continued",
        ),
        (Event(What.RETURNED, "a", -1), "a is back, before it had any state"),
        (Event(What.NOTE, note="a\nb\x1b[31m\x9b"), "a?b?[31m?"),  # no line and no color of its own
    ],
)
def test_lines_do_without_what_is_not_known(event: Event, line: str) -> None:
    assert str(event) == line


def test_levels() -> None:
    assert Event(What.ASKED).level == logging.DEBUG
    assert Event(What.ATTACHED).level == logging.INFO
    assert Event(What.DROPPED).level == logging.WARNING
    assert Event(What.ENDED).level == logging.INFO
    assert Event(What.ENDED, reason="x").level == Event(What.FAILED).level == logging.ERROR
