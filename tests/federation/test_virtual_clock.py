"""The virtual clock is a pure function of the ledger, and agrees with sums made by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remote_runs import finish, remote, setup_of
from runs import go, rows_of
from silograph.core.config import make_config
from silograph.core.errors import ConfigError
from silograph.core.kinds import Kind
from silograph.core.setting_values import parse_links, parse_speeds
from silograph.experiment.result_files import read_rounds
from silograph.experiment.run.clock import clock_of
from silograph.federation.ledger import Ledger, Record, VirtualClock, records_of_last_round
from silograph.graph.graph import Graph
from silograph.methods import METHODS

MakeGraph = Callable[..., Graph]
CLOCK = VirtualClock(np.array([1.0, 2.0]), np.array([10.0, 5.0]), np.array([0.5, 0.25]))


def record(
    t: int, step: int, clients: list[int], size: int, flops: float, what: Kind = Kind.WEIGHTS
) -> Record:
    each = np.ones(len(clients))
    return Record(
        t, step, "op", what, "up", np.array(clients), (each * size).astype(np.int64), each * flops
    )


def test_a_call_takes_as_long_as_its_slowest_client() -> None:
    """Down 10 bytes, up 20 bytes and 6 operations: 6/1 + 30/10 + .5 and 6/2 + 30/5 + .25."""
    call = [record(1, 1, [0, 1], 10, 0), record(1, 1, [0, 1], 20, 6)]
    assert CLOCK.seconds(call) == 9.5
    assert CLOCK.by_client(call).tolist() == [9.5, 9.25]
    again = [*call, record(1, 2, [1], 5, 0)]
    assert CLOCK.seconds(again) == 9.5 + 1.25
    assert CLOCK.by_client(again).tolist() == [9.5, 10.5]


def test_evaluation_takes_no_time() -> None:
    call = [record(1, 1, [0], 10, 1), record(1, 1, [0], 0, 100, Kind.EVALUATION)]
    assert CLOCK.seconds(call) == CLOCK.seconds(call[:1]) == 2.5
    assert CLOCK.seconds([]) == 0


def test_the_last_round_of_a_ledger() -> None:
    records = [record(0, 1, [0], 1, 0), record(1, 1, [0], 2, 0), record(1, 2, [0], 3, 0)]
    assert list(records_of_last_round(Ledger(2, records), 1)) == records[1:]
    assert list(records_of_last_round(Ledger(2, records), 2)) == []
    assert list(records_of_last_round(Ledger(2, records[:1]), 0)) == records[:1]


CLOCKS: list[dict[str, Any]] = [
    {"speeds": "1,2,4"},
    {"speeds": "lognormal", "links": "1:0.1,0.5:0"},
    {"links": "10:0"},
]


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("given", CLOCKS)
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "cagnet"])
def test_runs_show_what_the_ledger_gives(
    make_graph: MakeGraph, method: str, given: dict[str, Any]
) -> None:
    """Both engines, rounds that are scored now and then, and no other figure changes."""
    own: dict[str, Any] = {"method": method, "lr": 0.05, "eval_every": 2}
    result, plain = go(make_graph(), **own, **given), go(make_graph(), **own)
    clock = clock_of(result.config, [f"{c}" for c in range(4)])
    assert clock is not None
    ids = result.cut.partition.ids if result.cut is not None else ()
    clock = clock_of(result.config, ids)
    assert clock is not None
    for row in result.rounds:
        past = [r for r in result.ledger.records if r.round <= int(row["round"] or 0)]
        assert row["virtual_seconds"] == pytest.approx(clock.seconds(past), rel=1e-12)
    assert result.to_dict()["virtual_seconds"] == result.rounds[-1]["virtual_seconds"]
    without = [{k: v for k, v in r.items() if k != "virtual_seconds"} for r in rows_of(result)]
    assert without == rows_of(plain)
    assert "virtual_seconds" not in plain.to_dict()
    del own["method"]
    far, _ = remote(setup_of(make_graph(), METHODS[method], **own, **given))
    assert [row["virtual_seconds"] for row in finish(far).rounds] == [
        row["virtual_seconds"] for row in result.rounds
    ]


def test_speeds_belong_to_names(make_graph: MakeGraph) -> None:
    config = go(make_graph(), speeds="lognormal", rounds=1).config
    one, other = clock_of(config, ["a", "b", "c"]), clock_of(config, ["c", "a"])
    assert one is not None
    assert other is not None
    assert one.speed[[2, 0]].tolist() == other.speed.tolist()
    assert len(set(one.speed)) == 3


def test_lognormal_speeds_have_their_median_and_spread(make_graph: MakeGraph) -> None:
    """10,000 draws of exp(z): the median of log(speed) within .04, its deviation within .03."""
    config = go(make_graph(), speeds="lognormal", rounds=1).config
    clock = clock_of(config, [str(c) for c in range(10_000)])
    assert clock is not None
    z = np.log(clock.speed / 1e9)
    assert abs(np.median(z)) < 0.04
    assert abs(z.std() - 1) < 0.03


def test_numbers_go_to_clients_in_turn(make_graph: MakeGraph) -> None:
    config = go(make_graph(), speeds="1,4", links="2:0.5", rounds=1).config
    clock = clock_of(config, ["a", "b", "c"])
    assert clock is not None
    assert clock.speed.tolist() == [1e9, 4e9, 1e9]
    assert clock.bandwidth.tolist() == [2e6] * 3
    assert clock.latency.tolist() == [0.5] * 3


def test_a_run_stops_at_its_limit(make_graph: MakeGraph, tmp_path: Path) -> None:
    whole = go(make_graph(), rounds=6, speeds="equal")
    limit = whole.rounds[2]["virtual_seconds"]
    result = go(
        make_graph(), rounds=6, max_virtual_seconds=limit, speeds="equal", out=str(tmp_path / "a")
    )
    assert len(result.rounds) == 3
    assert result.stopped.startswith("max_virtual_seconds: ")
    rows = read_rounds(tmp_path / "a" / "rounds.csv")
    assert [row["virtual_seconds"] for row in rows] == [
        row["virtual_seconds"] for row in whole.rounds[:3]
    ]
    page = (tmp_path / "a" / "report.html").read_text()
    assert "virtual seconds" in page


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"speeds": "fast"}, "speeds: expected equal, lognormal, or numbers above 0"),
        ({"speeds": "1,0"}, "speeds: expected equal, lognormal, or numbers above 0"),
        ({"speeds": "1,nan"}, "speeds: expected equal, lognormal, or numbers above 0"),
        ({"links": "10"}, "links: expected MB/s:SECONDS"),
        ({"links": "0:1"}, "links: expected MB/s:SECONDS"),
        ({"links": "1:-1"}, "links: expected MB/s:SECONDS"),
        ({"links": "inf:0"}, "links: expected MB/s:SECONDS"),
        ({"max_virtual_seconds": 0}, "greater than 0"),
    ],
)
def test_what_is_no_clock_is_refused(
    make_graph: MakeGraph, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        go(make_graph(), **given)


def test_half_a_clock_is_completed(make_graph: MakeGraph) -> None:
    assert make_config({}).speeds is None
    found = go(make_graph(), rounds=1, max_virtual_seconds=100).config
    assert (found.speeds, found.links) == ("equal", "10:0.05")
    assert parse_speeds("equal") == (1.0,)
    assert parse_links("1:0") == ((1.0, 0.0),)
