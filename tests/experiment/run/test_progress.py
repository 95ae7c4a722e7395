"""Laws of progress: short, on standard error, one line on a terminal of 80 columns."""

import re
import sys
import time

import pytest

from silograph.experiment.run.progress import best_mode, show_progress
from terminals import ANSI, on_terminal

METRIC = "val accuracy 0.812  train loss 0.423"


def plain_lines(capsys: pytest.CaptureFixture[str], total: int, metric: str = METRIC) -> list[str]:
    with show_progress(total, "plain") as display:
        for done in range(1, total + 1):
            display.update(done, metric)
    short_repr = capsys.readouterr()
    assert short_repr.out == ""
    return short_repr.err.splitlines()


@pytest.mark.parametrize("total", [1, 2, 5, 9, 10, 11, 15, 19, 20, 29, 99, 100, 101, 1000, 12345])
def test_plain_progress_is_about_ten_lines(capsys: pytest.CaptureFixture[str], total: int) -> None:
    lines = plain_lines(capsys, total)
    assert min(total, 6) <= len(lines) <= 12
    assert lines[0].startswith(f"round 1/{total}  ")
    assert lines[-1] == f"round {total}/{total}  0 s left  {METRIC}"
    done = [int(line.split("/")[0].removeprefix("round ")) for line in lines]
    assert done == sorted(set(done))
    for line in lines:
        assert re.fullmatch(rf"round \d+/{total}  (\d+ s left  )?{METRIC}", line)
        assert len(line) <= 80
    assert all(" s left " in line for line in lines[1:])


def test_plain_progress_before_the_first_evaluation(capsys: pytest.CaptureFixture[str]) -> None:
    lines = plain_lines(capsys, 2, metric="")
    assert lines == ["round 1/2", "round 2/2  0 s left"]


def test_the_seconds_that_are_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with show_progress(20, "plain") as display:
        for done in range(1, 21):
            now += 2 if done > 1 else 70  # kernels are compiled in the first
            display.update(done, METRIC)
    short_repr = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[:2] for line in short_repr[:3]] == [
        ["round 1/20", METRIC.split("  ")[0]],
        ["round 2/20", "36 s left"],
        ["round 4/20", "32 s left"],
    ]


def test_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress(3, "none") as display:
        display.update(1, METRIC)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("terminal", "mode"), [(True, "live"), (False, "plain")])
def test_the_mode_follows_standard_error(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, mode: str
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    assert best_mode() == mode


LIVE = f"""
import time
from silograph.experiment.run.progress import best_mode, show_progress
assert best_mode() == "live"
start, skip = time.monotonic(), 0.0
clock = time.monotonic
with show_progress(1000, best_mode()) as display:
    time.monotonic = lambda: clock() + skip
    for done in range(1, 1001):
        skip += 4.5  # of an hour and more, as on a large graph
        display.update(done, {METRIC!r})
        if done % 250 == 0:
            time.sleep(0.12)
print("result")
"""


@pytest.mark.parametrize(("columns", "environment"), [(80, {}), (140, {}), (80, {"NO_COLOR": "1"})])
def test_live_progress_is_one_line_of_the_terminal(
    columns: int, environment: dict[str, str]
) -> None:
    short_repr, printed = on_terminal(LIVE, columns, **environment)
    assert printed == "result\n"
    assert ("\x1b[3" in short_repr) == (not environment)  # colors, unless they are unwanted
    # Every frame starts with a carriage return; the last one ends with the only line feed.
    frames = [frame.strip(" \n") for frame in ANSI.sub("", short_repr).split("\r") if frame.strip()]
    assert frames[0].startswith("round    0/1000 ")
    assert len(frames) >= 4
    for frame in frames:
        assert "\n" not in frame
        assert len(frame) <= columns
    for frame in frames[1:]:
        assert len(frame) > columns - 5  # the bar takes what is left
        assert re.fullmatch(rf"round +\d+/1000 [━╸╺ ]+ (\d+ s left)? {METRIC}", frame)
    assert frames[-1].startswith("round 1000/1000 ")
    assert " 0 s left " in frames[-1]
    assert any(re.search(r" [12]\d{3} s left ", frame) for frame in frames)
    assert short_repr.endswith("\x1b[?25h")  # the cursor is back
