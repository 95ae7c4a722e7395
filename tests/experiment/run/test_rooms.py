"""What a run enters before its first round: what is asked, the data, the set-up, in this order."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import silograph
from runs import go
from silograph.graph.graph import Graph

ROOT = str(Path(silograph.__file__).parent)


def room_of(frame: FrameType) -> str:
    """The folder of the package that a frame's code is in, two levels deep in `experiment`."""
    path = frame.f_code.co_filename
    if not path.startswith(ROOT):
        return ""
    parts = Path(path).relative_to(ROOT).parts[:-1]
    return "/".join(parts[: 2 if parts[:1] == ("experiment",) else 1])


def test_the_config_is_resolved_once_and_then_left_alone(make_graph: Callable[..., Graph]) -> None:
    """`experiment/run` calls `experiment/resolve` before and after any data are read, no more."""
    seen: list[str] = []
    over = False

    def entered(frame: FrameType, event: str, _: object) -> None:
        nonlocal over
        over |= frame.f_code.co_name == "begin_round"
        before = frame.f_back
        if event != "call" or over or before is None:
            return
        if (room_of(before), room_of(frame)) == ("experiment/run", "experiment/resolve"):
            seen.append(frame.f_code.co_name)

    graph = make_graph()
    go(graph, rounds=1)  # imports apart
    sys.setprofile(entered)
    try:
        go(graph, rounds=1)
    finally:
        sys.setprofile(None)
    assert over
    assert seen == ["parse_request", "read_and_resolve"]
