"""The ledger: totals, records that survive a file, and the meter behind the work."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from silograph.core.errors import CheckpointError
from silograph.core.kinds import Kind
from silograph.core.work import metered, report_each, report_entries, report_rows, work_of
from silograph.federation.ledger import Ledger, Record

SIZES = st.lists(st.integers(0, 2**40), min_size=1, max_size=5)


@st.composite
def records(draw: st.DrawFn) -> Record:
    size = draw(SIZES)
    start = draw(st.integers(0, 5))
    clients = draw(
        st.sampled_from([np.arange(start, start + len(size)), np.arange(len(size)) * 2 + start])
    )
    flops = st.lists(st.floats(0, 1e18), min_size=len(size), max_size=len(size))
    return Record(
        round=draw(st.integers(0, 9)),
        step=draw(st.integers(1, 9)),
        op=draw(st.text(max_size=5)),
        what=draw(st.sampled_from(Kind)),
        direction=draw(st.sampled_from(["down", "up"])),
        clients=clients.astype(np.int64),
        bytes=np.array(draw(st.one_of(st.just(size), st.just([size[0]] * len(size))))),
        flops=np.array(draw(flops)),
    )


@given(records())
def test_a_record_survives_its_line(record: Record) -> None:
    line = record.to_line()
    assert "\n" not in line
    back = Record.from_line(line)
    assert back == record
    assert back.clients.tolist() == record.clients.tolist()
    assert back.bytes.tolist() == record.bytes.tolist()
    assert back.flops.tolist() == record.flops.tolist()


@pytest.mark.parametrize("line", ["", "{", "[]", "{}", '{"round": 1}', "null"])
def test_lines_that_are_no_records(line: str) -> None:
    with pytest.raises(CheckpointError, match="expected a record of the ledger, got"):
        Record.from_line(line)


@given(st.lists(records(), max_size=6))
def test_totals_are_sums(given_records: list[Record]) -> None:
    ledger = Ledger(20)
    for record in given_records:
        ledger.append(record)
    assert ledger.bytes == sum(int(r.bytes.sum()) for r in given_records)
    assert sum(ledger.bytes_by_kind.values()) == ledger.bytes
    sizes, flops = ledger.by_client()
    assert sizes.sum() == ledger.bytes
    np.testing.assert_allclose(flops.sum(), ledger.flops)
    again = Ledger(20, ledger.records)
    assert (again.bytes, again.flops, again.bytes_by_kind) == (
        ledger.bytes,
        ledger.flops,
        ledger.bytes_by_kind,
    )
    assert list(ledger.since(2)) == given_records[2:]
    assert len(ledger) == len(given_records)


def test_work_goes_to_the_clients_that_do_it() -> None:
    with metered(4) as meter:
        report_each(1.0)
        with work_of(torch.tensor([3, 1])):
            report_rows(torch.tensor([0, 5, 15]), 2.0)  # 5 and 10 rows
            with work_of(torch.tensor([1])):  # the second of the two
                report_each(100.0)
    assert meter.flops.tolist() == [1, 121, 1, 11]


def test_work_of_entries_and_repeated_reports() -> None:
    """Rows 0 and 1 with 2 and 3 entries at client 0, row 2 with 4 entries at client 1."""
    off, starts = torch.tensor([0, 2, 3]), torch.tensor([0, 2, 5, 9])
    with metered(2) as meter:
        report_entries(starts, off, 10.0)
        report_entries(starts, off, 1.0)
        report_rows(off, 0.5)
    assert meter.flops.tolist() == [5 * 11 + 1, 4 * 11 + 0.5]


def test_nobody_counts_outside_a_meter() -> None:
    report_each(1.0)
    with metered(1) as meter:
        pass
    with work_of(torch.tensor([0])):
        report_each(1.0)
        report_rows(torch.tensor([0, 1]), 1.0)
    assert meter.flops.tolist() == [0]


def test_rounds_that_are_alike_are_kept_once() -> None:
    """The same numbers in another dtype, and other numbers, are not taken for one another."""
    ledger, zeros, at = Ledger(3), np.zeros(3), np.arange(3)
    sizes = [np.full(3, size, dtype=np.int64) for size in (0, 7, 7, *range(400), 7)]
    for size in sizes:
        ledger.append(Record(1, 1, "op", Kind.WEIGHTS, "up", at, size, zeros))
    records = ledger.records
    assert [r.bytes.tolist() for r in records] == [size.tolist() for size in sizes]
    assert {(r.bytes.dtype, r.flops.dtype) for r in records} == {(np.dtype("i8"), np.dtype("f8"))}
    assert ledger.bytes == sum(int(size.sum()) for size in sizes)
    assert records[1].bytes is records[2].bytes
    assert records[0].clients is records[2].clients
    assert records[0].flops is not records[0].bytes
    minus = Record(2, 1, "op", Kind.WEIGHTS, "up", at, sizes[0], np.array([-0.0, 0.0, 0.0]))
    ledger.append(minus)  # equal to zeros, and other bits
    assert np.signbit(ledger.records[-1].flops).tolist() == [True, False, False]


def test_records_are_copies_that_share_memory_and_nothing_else() -> None:
    """Arrays of any length, also longer than a block; what was given may change afterwards."""
    ledger, given, wanted = Ledger(5), [], []
    for number, clients in enumerate((1, 3, 5, 1 << 17, 2, 0, 4)):
        at, size = np.arange(clients), np.full(clients, number, dtype=np.int64)
        work = np.full(clients, number / 3)
        wanted.append((at.tolist(), size.tolist(), work.tolist()))
        given.append((at, size, work))
        ledger.append(Record(1, number + 1, "op", Kind.CONTROL, "up", at, size, work))
    for arrays in given:
        for array in arrays:
            array[:] = 7
    for record, lists in zip(ledger.records, wanted, strict=True):
        found = record.clients.tolist(), record.bytes.tolist(), record.flops.tolist()
        assert found == lists
        assert record.clients.dtype == record.bytes.dtype == np.int64
        assert record.flops.dtype == np.float64
        with pytest.raises(ValueError, match="read-only"):
            record.bytes[:] = 0


@pytest.mark.parametrize(
    "change",
    [
        {"clients": {"from": 0, "times": 10**12}},
        {"bytes": {"all": 1, "times": -1}},
        {"flops": {"all": 1, "times": "3"}},
        {"clients": [[0, 1]]},
        {"clients": [0]},
        {"bytes": [10**30, 1]},
        {"round": "1"},
        {"round": True},
        {"op": 5},
        {"direction": "sideways"},
        {"what": []},
        {"more": 1},
    ],
    ids=repr,
)
def test_a_line_of_other_fields_is_no_record(change: dict[str, Any]) -> None:
    good: dict[str, Any] = {
        "round": 1,
        "step": 1,
        "op": "f",
        "what": "weights",
        "direction": "up",
        "clients": [0, 1],
        "bytes": [3, 4],
        "flops": [0.0, 1.0],
    }
    Record.from_line(json.dumps(good))
    with pytest.raises(CheckpointError, match="expected a record of the ledger, got"):
        Record.from_line(json.dumps(good | change))
