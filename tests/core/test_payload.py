"""Laws of payloads: taking apart and joining again changes nothing.

Rows carry their own number, so that a row in the wrong place shows.
"""

import weakref
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.payload import (
    Field,
    Payload,
    Ragged,
    Shared,
    Stacked,
    concatenate,
    join,
    offsets,
    owners,
    put,
    ranges,
    rows_of,
    state_of,
    take,
    take_all,
)

LENGTHS = st.lists(st.integers(0, 4), min_size=1, max_size=7)


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def ragged(lengths: list[int], start: int = 0) -> Ragged:
    """Return runs of two-column rows that count up from `start`."""
    numbers = torch.arange(start, start + sum(lengths))
    return Ragged(torch.stack([numbers, -numbers], dim=1), ints([0, *accumulate(lengths)]))


def stacked(clients: int, start: int = 0) -> Stacked:
    return Stacked(torch.arange(start, start + 6 * clients).view(clients, 2, 3))


def runs(field: Ragged) -> list[list[list[int]]]:
    """Return the rows of each client, read straight from the offsets."""
    ends = field.off.tolist()
    return [field.t[a:b].tolist() for a, b in pairwise(ends)]


def equal(left: Field, right: Field) -> bool:
    if isinstance(left, Ragged) and isinstance(right, Ragged):
        return torch.equal(left.t, right.t) and torch.equal(left.off, right.off)
    return type(left) is type(right) and torch.equal(left.t, right.t)


@st.composite
def lengths_and_positions(draw: st.DrawFn, unique: bool = False) -> tuple[list[int], list[int]]:
    lengths = draw(LENGTHS)
    chosen = draw(st.lists(st.integers(0, len(lengths) - 1), max_size=9, unique=unique))
    return lengths, chosen


@given(case=lengths_and_positions())
def test_row_arithmetic_equals_lists(case: tuple[list[int], list[int]]) -> None:
    lengths, chosen = case
    off = offsets(ints(lengths))
    ends = [0, *accumulate(lengths)]
    assert off.tolist() == ends
    assert owners(off).tolist() == [c for c, length in enumerate(lengths) for _ in range(length)]
    expected = [row for c in chosen for row in range(ends[c], ends[c + 1])]
    assert rows_of(off, ints(chosen)).tolist() == expected
    starts = [7 * c for c in chosen]
    expected = [s + i for s, c in zip(starts, chosen, strict=True) for i in range(lengths[c])]
    assert ranges(ints(starts), ints([lengths[c] for c in chosen])).tolist() == expected


@given(case=lengths_and_positions())
def test_take_picks_the_clients_in_order(case: tuple[list[int], list[int]]) -> None:
    lengths, chosen = case
    rows, slices = ragged(lengths), stacked(len(lengths))
    taken = take(rows, ints(chosen))
    assert isinstance(taken, Ragged)
    assert runs(taken) == [runs(rows)[c] for c in chosen]
    assert take(slices, ints(chosen)).t.tolist() == [slices.t[c].tolist() for c in chosen]


@given(lengths=LENGTHS)
def test_parts_of_every_client_join_to_the_whole(lengths: list[int]) -> None:
    clients = torch.arange(len(lengths)).split(1)
    for field in (ragged(lengths), stacked(len(lengths)), Shared(torch.ones(3))):
        assert equal(concatenate([take(field, c) for c in clients]), field)
        assert equal(take(field, torch.arange(len(lengths))), field)


@given(left=LENGTHS, right=LENGTHS)
def test_joining_keeps_the_order_of_the_parts(left: list[int], right: list[int]) -> None:
    joined = concatenate([ragged(left), ragged(right, start=100)])
    assert isinstance(joined, Ragged)
    assert runs(joined) == runs(ragged(left)) + runs(ragged(right, start=100))


@given(case=lengths_and_positions(), seed=st.integers(0, 99))
def test_taking_twice_is_taking_once(case: tuple[list[int], list[int]], seed: int) -> None:
    lengths, chosen = case
    first = ints(chosen)
    second = torch.randperm(len(chosen), generator=torch.Generator().manual_seed(seed))[:3]
    for field in (ragged(lengths), stacked(len(lengths))):
        assert equal(take(take(field, first), second), take(field, first[second]))


@given(case=lengths_and_positions(unique=True))
def test_putting_back_what_was_taken_changes_nothing(case: tuple[list[int], list[int]]) -> None:
    lengths, chosen = case
    for field in (ragged(lengths), stacked(len(lengths))):
        part = take(field, ints(chosen))
        assert isinstance(part, Stacked | Ragged)
        assert equal(put(field, part, ints(chosen)), field)


@given(case=lengths_and_positions(unique=True), data=st.data())
def test_put_replaces_the_chosen_clients_only(
    case: tuple[list[int], list[int]], data: st.DataObject
) -> None:
    lengths, chosen = case
    new_lengths = [data.draw(st.integers(0, 4)) for _ in chosen]  # runs may grow and shrink
    into, part = ragged(lengths), ragged(new_lengths, start=100)
    result = put(into, part, ints(chosen))
    assert isinstance(result, Ragged)
    expected = runs(ragged(lengths))
    for c, rows in zip(chosen, runs(part), strict=True):
        expected[c] = rows
    assert runs(result) == expected
    assert equal(into, ragged(lengths))  # the old state is left as it was

    slices, new = stacked(len(lengths)), stacked(len(chosen), start=1000)
    expected_slices = slices.t.tolist()
    for c, value in zip(chosen, new.t.tolist(), strict=True):
        expected_slices[c] = value
    assert put(slices, new, ints(chosen)).t.tolist() == expected_slices
    assert equal(slices, stacked(len(lengths)))


def test_take_all_takes_every_field() -> None:
    payload: dict[str, Field] = {
        "a": stacked(3),
        "b": ragged([2, 0, 1]),
        "c": Shared(torch.ones(())),
    }
    taken = take_all(payload, ints([2, 1]))
    assert list(taken) == ["a", "b", "c"]
    assert taken["c"] is payload["c"]
    assert all(equal(taken[name], take(payload[name], ints([2, 1]))) for name in payload)


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ([stacked(1), ragged([1])], "Ragged, Stacked"),
        ([Shared(torch.ones(1)), stacked(1), stacked(1)], "Shared, Stacked"),
    ],
)
def test_parts_of_different_kinds_do_not_join(fields: list[Field], kinds: str) -> None:
    with pytest.raises(
        ProtocolError, match=f"^expected one kind of field from every block, got {kinds}$"
    ):
        concatenate(fields)


@pytest.mark.parametrize(
    ("into", "part", "names"),
    [
        (stacked(2), ragged([1]), "Stacked, got Ragged"),
        (ragged([1, 2]), stacked(1), "Ragged, got Stacked"),
    ],
)
def test_state_keeps_its_type(into: Stacked | Ragged, part: Stacked | Ragged, names: str) -> None:
    with pytest.raises(ProtocolError, match=f"^expected state of type {names}: an op must keep"):
        put(into, part, ints([0]))


def test_state_belongs_to_one_client_each() -> None:
    fields: dict[str, Field] = {"a": stacked(2), "b": ragged([1, 0])}
    assert state_of(fields) == fields  # the very same fields: they compare by identity
    with pytest.raises(
        ProtocolError, match=r"^expected a Stacked or Ragged state field 'w', got Shared"
    ):
        state_of({**fields, "w": Shared(torch.ones(1))})


def test_large_parts_are_joined_as_small_ones_and_freed_on_the_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths: list[list[int]] = [[2, 0], [3], [1, 4, 0]]
    dead: list[int] = []

    def parts() -> list[Payload]:
        made = [ragged(some, start) for some, start in zip(lengths, (0, 2, 5), strict=True)]
        for number, field in enumerate(made):
            weakref.finalize(field.t, dead.append, number)
        models = [torch.full((len(some), 2), float(len(some))) for some in lengths]
        return [{"rows": f, "model": Stacked(t)} for f, t in zip(made, models, strict=True)]

    small, given = join(parts()), parts()
    del dead[:]
    monkeypatch.setattr("silograph.core.payload.LARGE", 0)
    large = join(given)
    assert given == []
    assert dead == [2, 1, 0]
    assert large.keys() == small.keys()
    assert all(torch.equal(large[name].t, small[name].t) for name in small)
    rows, same = large["rows"], small["rows"]
    assert isinstance(rows, Ragged)
    assert isinstance(same, Ragged)
    assert torch.equal(rows.off, same.off)
