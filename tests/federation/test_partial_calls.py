"""Calls to some clients: taken blocks and states that are written in place change no number."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import pytest
import torch

import silograph as sg
from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.payload import Payload, Ragged, Stacked, State, offsets, put, take_all
from silograph.federation.base import overwrites, per_client, reads
from silograph.federation.check import run_op
from silograph.federation.in_process import BlockState, CalledBlocks
from silograph.graph.block.block import ClientBlock, SparseRows
from silograph.graph.graph import Graph

Cut = Callable[..., tuple[ClientBlock, object]]


def fields() -> State:
    """Four clients with a slice and a run of rows each."""
    off = offsets(torch.tensor([2, 0, 3, 1]))
    return {"slice": Stacked(torch.arange(8.0).view(4, 2)), "rows": Ragged(torch.arange(6.0), off)}


def changed(part: State, by: float) -> State:
    slices, rows = part["slice"], part["rows"]
    assert isinstance(rows, Ragged)
    return {"slice": Stacked(slices.t + by), "rows": Ragged(rows.t - by, rows.off)}


def test_writing_in_place_is_putting() -> None:
    state, expected = BlockState(4, fields()), dict(fields())
    for number, at in enumerate([[0, 2], [1, 3], [0, 1, 2], [2]]):
        positions = torch.tensor(at)
        old = state.take(positions)
        new = changed(old, number + 1)
        state.put(old, new, positions)
        expected = {name: put(expected[name], new[name], positions) for name in expected}
    assert all(torch.equal(state.all()[name].t, expected[name].t) for name in expected)


def test_nobody_else_sees_what_is_written() -> None:
    given, at = fields(), torch.tensor([0, 2])
    saved = {name: f.t.clone() for name, f in given.items()}
    state = BlockState(4, given)
    old = state.take(at)
    state.put(old, changed(old, 1), at)
    assert all(torch.equal(given[name].t, saved[name]) for name in saved)
    kept = state.export()
    saved = {name: f.t.clone() for name, f in kept.items()}
    old = state.take(at)
    state.put(old, changed(old, 1), at)
    assert all(torch.equal(kept[name].t, saved[name]) for name in saved)


def test_a_tensor_under_two_names_is_not_written_to() -> None:
    state, at = BlockState(4, {"a": Stacked(torch.zeros(4))}), torch.tensor([1])
    old = state.take(at)
    state.put(old, {"a": Stacked(torch.ones(1))}, at)
    whole = state.all()
    state.replace({**whole, "b": whole["a"]})
    old = state.take(at)
    state.put(old, {**old, "a": Stacked(torch.full((1,), 5.0))}, at)
    assert state.all()["a"].t.tolist() == [0, 5, 0, 0]
    assert state.all()["b"].t.tolist() == [0, 1, 0, 0]


def test_a_field_that_did_not_change_keeps_its_memory() -> None:
    state, at = BlockState(4, fields()), torch.tensor([1, 2])
    before = state.all()["rows"]
    old = state.take(at)
    state.put(old, {**old, "slice": Stacked(old["slice"].t + 1)}, at)
    assert state.all()["rows"] is before


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (Ragged(torch.zeros(1), torch.tensor([0, 1])), "keep the type of a state field"),
        (Stacked(torch.zeros(1, 3)), r"state 'slice' of torch.float32 and shape \(2,\)"),
        (Stacked(torch.zeros(1, 2).double()), "got torch.float64"),
    ],
)
def test_fields_of_another_form_are_refused(new: Stacked | Ragged, message: str) -> None:
    state, at = BlockState(4, fields()), torch.tensor([3])
    old = state.take(at)
    with pytest.raises(ProtocolError, match=message):
        state.put(old, {"rows": changed(old, 1)["rows"], "slice": new}, at)
    assert torch.equal(state.all()["rows"].t, fields()["rows"].t)


def test_rows_may_become_more() -> None:
    state, at = BlockState(4, fields()), torch.tensor([1])
    old = state.take(at)
    more = Ragged(torch.tensor([7.0, 8.0]), torch.tensor([0, 2]))
    state.put(old, {**old, "rows": more}, at)
    assert state.all()["rows"].t.tolist() == [0, 1, 7, 8, 2, 3, 4, 5]


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("at", [[0, 3], [2], [0, 1, 2, 3]])
def test_called_is_take(
    make_graph: Callable[..., Graph],
    cut_block: Cut,
    sparse: bool,
    at: list[int],
) -> None:
    block, _ = cut_block(make_graph(60, sparse=sparse), 4)
    positions = torch.tensor(at)
    one, other = block.called(positions), block.take(positions)
    for a, b in ((one.adj, other.adj), (one.halo.adj, other.halo.adj)):
        assert torch.equal(a.indptr, b.indptr)
        assert torch.equal(a.indices, b.indices)
    if isinstance(one.x, SparseRows) and isinstance(other.x, SparseRows):
        mine, theirs = one.x.used, other.x.used
        assert torch.equal(mine.feature, theirs.feature)
        assert torch.equal(mine.off, theirs.off)
        assert torch.equal(mine.csr.indices, theirs.csr.indices)
        assert torch.equal(mine.csr.transposed.indices, theirs.csr.transposed.indices)
    assert one.ids == other.ids
    assert torch.equal(one.row_key, other.row_key)


def test_a_called_block_copies_a_field_when_it_is_asked_for(
    make_graph: Callable[..., Graph], cut_block: Cut
) -> None:
    block, _ = cut_block(make_graph(60), 4)
    positions = torch.tensor([1, 3])
    part, whole = block.called(positions), block.take(positions)
    assert vars(part).keys() == {"ids", "source", "memo"}
    assert torch.equal(part.y, whole.y)
    assert {"off", "x", "split", "adj", "row_key", "halo"}.isdisjoint(vars(part))
    for one, other in ((part.split, whole.split), (part.halo, whole.halo)):
        for name, t in vars(other).items():
            assert not isinstance(t, torch.Tensor) or torch.equal(getattr(one, name), t)
    assert torch.equal(part.off, whole.off)
    assert type(whole) is ClientBlock
    assert whole.source is None


@pytest.mark.parametrize("kernels", ["compiled", "torch"])
def test_a_round_with_half_of_the_clients_reads_and_writes_their_rows_only(
    make_graph: Callable[..., Graph],
    monkeypatch: pytest.MonkeyPatch,
    kernels: Literal["compiled", "torch"],
) -> None:
    """FedAvg between evaluations: nothing is read, and what they say of their judged rows kept."""
    take, put_, calls = BlockState.take, BlockState.put, list[tuple[int, dict[str, int], int]]()

    def reading(self: BlockState, *given: object) -> State:
        found = take(self, *given)  # type: ignore[arg-type]
        assert found == {}
        return found

    def writing(self: BlockState, old: State, new: State, at: torch.Tensor, *given: object) -> None:
        known = self.all()["own/logits"]
        assert isinstance(known, Ragged)
        theirs = int(known.off.diff()[at].sum())
        calls.append((len(at), {name: len(f.t) for name, f in new.items()}, theirs))
        put_(self, old, new, at, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(BlockState, "take", reading)
    monkeypatch.setattr(BlockState, "put", writing)
    run = partial(sg.run, make_graph(60), method="fedavg", clients=4, hidden=4, kernels=kernels)
    run(participation=0.5, rounds=3, eval_every=3)
    assert len(calls) == 3
    for clients, written, theirs in calls:
        assert clients == 2
        assert written == {"own/logits": theirs}


def test_blocks_are_kept_for_as_many_clients_as_there_are(
    make_graph: Callable[..., Graph],
    cut_block: Cut,
) -> None:
    block, _ = cut_block(make_graph(40), 4)
    blocks = CalledBlocks(block)
    first = blocks.take(torch.tensor([0, 1]))
    second = blocks.take(torch.tensor([2, 3]))
    assert blocks.take(torch.tensor([0, 1])) is first
    blocks.take(torch.tensor([1]))  # five clients: the one that was used least recently goes
    assert blocks.take(torch.tensor([0, 1])) is first
    assert blocks.take(torch.tensor([2, 3])) is not second
    assert blocks.take(torch.arange(4)) is block
    assert take_all({}, torch.tensor([0])) == {}


@reads("slice")
def add_one(
    cfg: object, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Reads one field of two, and makes a third."""
    assert set(state) == {"slice"}
    new = Stacked(state["slice"].t + 1)
    return {"slice": new, "new": new}, {}


@pytest.mark.parametrize("at", [[0, 1, 2, 3], [1, 2]])
def test_an_op_is_given_what_it_reads_and_leaves_the_rest(
    make_graph: Callable[..., Graph], cut_block: Cut, at: list[int]
) -> None:
    """A call to all clients, and a call to some of them, of which no other field is copied."""
    block, _ = cut_block(make_graph(20), 4)
    state, positions = BlockState(4, fields()), torch.tensor(at)
    rows = state.all()["rows"]
    old = state.all() if len(at) == 4 else state.take(positions, add_one.__dict__["reads"])
    part = block if len(at) == 4 else block.take(positions)
    new, _ = run_op(add_one, None, part, old, {}, Key.of(0), rows=False)
    if len(at) == 4:
        assert new["rows"] is old["rows"]
        state.replace(new)
    else:
        assert set(old) == {"slice"}
        state.put(old, new, positions)
    assert state.all()["rows"] is rows or len(at) == 4
    expected = fields()["slice"].t
    expected[positions] += 1
    shown = state.export()
    assert torch.equal(shown["slice"].t, expected)
    assert torch.equal(shown["rows"].t, fields()["rows"].t)
    assert torch.equal(shown["new"].t, expected[positions])


def test_an_op_for_one_client_declares_the_same_on_any_block() -> None:
    assert per_client(add_one).__dict__["reads"] == ("slice",)


@overwrites("slice")
def add_in_place(
    cfg: object, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Add one, in the memory that it is given."""
    state["slice"].t.add_(1)
    return state, {}


def test_what_an_op_overwrites_is_nobody_elses(
    make_graph: Callable[..., Graph], cut_block: Cut
) -> None:
    """Whoever holds the state before the call, after it, or what it was made of, sees no change."""
    block, _ = cut_block(make_graph(40), 4)
    given, written = fields(), ("slice",)
    state = BlockState(4, given)
    held: list[tuple[State, torch.Tensor]] = []
    expected = fields()["slice"].t
    for number, at in enumerate([[0, 1, 2, 3], [1, 3], [0, 1, 2, 3], [0, 1, 2, 3], [2]]):
        positions = torch.tensor(at)
        whole = len(at) == 4
        old = state.all(written) if whole else state.take(positions)
        part = block if whole else block.take(positions)
        new, _ = add_in_place(None, part, old, {}, Key.of(0))
        if whole:
            state.replace(new, written)
        else:
            state.put(old, new, positions, written)
        expected[positions] += 1
        assert torch.equal(state.all()["slice"].t, expected)
        if number != 2:  # the call after that one goes on in the same memory
            shown = state.export()
            held.append((shown, shown["slice"].t.clone()))
    assert torch.equal(given["slice"].t, fields()["slice"].t)
    assert all(torch.equal(shown["slice"].t, was) for shown, was in held)
    run_op(add_in_place, None, block, given, {}, Key.of(0), rows=False)
    assert torch.equal(given["slice"].t, fields()["slice"].t)


def test_a_block_goes_on_in_the_memory_that_it_made_its_own() -> None:
    state, written = BlockState(4, fields()), ("slice",)
    own = state.all(written)["slice"]
    state.replace({**state.all(), "new": Stacked(torch.zeros(4))})
    assert state.all(written)["slice"] is own
    made = Stacked(torch.zeros(4, 2))
    state.replace({**state.all(), "slice": made}, written)
    assert state.all(written)["slice"] is made
    state.replace({**state.all(), "slice": own})  # an op that does not say so may keep what it made
    assert state.all(written)["slice"] is not own
    own = state.all()["slice"]
    state.replace({**state.all(), "alias": Stacked(own.t[:, None])})
    assert state.all(written)["slice"].t.data_ptr() != own.t.data_ptr()
