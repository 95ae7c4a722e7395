"""The one line of a silo."""

import re

import pytest

from silograph.deploy.display import SiloActivity, SiloLine, activity_after, show_silo
from silograph.federation.session.events import Event, What, log_event
from terminals import ANSI, on_terminal

CALLS = [
    Event(What.ATTACHED, "north", address="h:1"),
    Event(What.ASKED, "north", 3, op="train", bytes=1_500_000),
    Event(What.ANSWERED, "north", 3, op="train", bytes=2000),
    Event(What.ASKED, "north", 4, op="judge_server", bytes=500_000),
]


def test_a_line_counts_calls_and_bytes() -> None:
    seen, line = SiloActivity(), SiloLine("north")
    for event in CALLS:
        seen = activity_after(seen, event)
        line.take(event)
    assert seen == SiloActivity("working", 4, "judge_server", calls=1, down=2_000_000, up=2000)
    shown = "north  working  round 4  1 call  2.00 MB in  2.0 kB out  judge_server"
    assert line.__rich__().plain == shown


@pytest.mark.parametrize(
    ("what", "shown"),
    [
        (What.LOST, "north  tries to connect"),
        (What.STOPPED, "north  waits for the server"),
        (What.ENDED, "north  the run is over"),
        (What.DECLINED, "north  connecting"),
    ],
)
def test_what_a_silo_does_without_calls(what: What, shown: str) -> None:
    line = SiloLine("north")
    line.take(Event(what, "north", address="h:1", reason="gone"))
    assert line.__rich__().plain == shown


def test_without_a_terminal_there_is_only_the_log() -> None:
    with show_silo("plain", "north") as report:
        assert report is log_event


LIVE = f"""
import time
from silograph.deploy.display import logging_to
from silograph.deploy.display import show_silo
from silograph.federation.session.events import Event, What

with logging_to(None), show_silo("live", "north") as report:
    for event in {[(e.what.name, e.round, e.op, e.bytes, e.address) for e in CALLS]!r}:
        what, number, op, size, address = event
        report(Event(What[what], "north", number, op=op, bytes=size, address=address))
        time.sleep(0.3)
print("result")
"""


def test_on_a_terminal_it_is_one_line_below_the_log() -> None:
    shown, printed = on_terminal(LIVE, 60)
    assert printed == "result\n"
    lines = [part for line in re.split(r"[\r\n]+", ANSI.sub("", shown)) if (part := line.strip())]
    assert len([line for line in lines if line.endswith(" north is attached to h:1")]) == 1
    assert lines[-1] == "north  working  round 4  1 call  2.00 MB in  2.0 kB out  ju…"
