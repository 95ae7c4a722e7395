"""Laws of `Patched` fields: they mean, weigh and travel as the `Stacked` field they stand for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import silograph as sg
from patches import Drawn, drawn, patched
from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import (
    Field,
    Patched,
    Payload,
    Shared,
    Stacked,
    State,
    concatenate,
    from_bases,
    join,
    state_of,
    take,
    take_all,
)
from silograph.federation.frame import Envelope, decode, encode, frame_sizes
from silograph.federation.in_process import InProcess
from silograph.graph.block.block import ClientBlock, Route
from silograph.graph.graph import Graph

ENVELOPE = Envelope("train", Kind.WEIGHTS, 3, 7)
CLIENTS = 5


def equal(field: Field, dense: torch.Tensor) -> bool:
    return isinstance(field, Stacked) and torch.equal(field.t, dense)


@given(drawn=drawn())
def test_slices_are_bases_with_their_rows_replaced(drawn: Drawn) -> None:
    before = drawn.field.base.clone()
    assert equal(drawn.field.stacked(), drawn.dense)
    for c, expected in enumerate(drawn.dense):
        assert torch.equal(drawn.field.slice(c), expected)
    assert torch.equal(drawn.field.base, before)


@given(drawn=drawn())
def test_the_form_of_a_field_takes_its_rows_from_whole_slices(drawn: Drawn) -> None:
    field = drawn.field
    assert torch.equal(field.like(Stacked(drawn.dense)).t, field.t)
    other = drawn.dense + 1
    found = field.like(Stacked(other))
    expected = torch.stack([field.base[g] for g in field.which])
    for c in range(len(field.which)):
        mine = field.index[field.off[c] : field.off[c + 1]]
        expected[c, mine] = other[c, mine]
    assert equal(found.stacked(), expected)


@given(drawn=drawn(), data=st.data())
def test_taking_is_taking_from_the_dense_form(drawn: Drawn, data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.integers(0, len(drawn.dense) - 1), max_size=6))
    positions = torch.tensor(chosen, dtype=torch.int64)
    for part in (take(drawn.field, positions), take_all({"w": drawn.field}, positions)["w"]):
        assert isinstance(part, Patched)
        assert equal(part.stacked(), drawn.dense[positions])


@given(drawn=drawn())
def test_parts_of_every_client_join_to_the_whole(drawn: Drawn) -> None:
    parts = [take(drawn.field, c) for c in torch.arange(len(drawn.dense)).split(1)]
    assert equal(concatenate(parts), drawn.dense)
    assert equal(concatenate([drawn.field]), drawn.dense)


@given(seed=st.integers(0, 99), sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_fields_over_different_bases_join(seed: int, sizes: list[int]) -> None:
    values = Key.of(seed).matrix(2 * len(sizes), 4 * 3).view(len(sizes), 2, 4, 3)
    parts = [
        patched(bases, [1] * size, [{c: bases[0, 0]} for c in range(size)])
        for bases, size in zip(values, sizes, strict=True)
    ]
    expected = torch.cat([dense for _, dense in parts])
    assert equal(concatenate([field for field, _ in parts]), expected)
    assert equal(join([{"w": field} for field, _ in parts])["w"], expected)


@given(drawn=drawn(), name=st.text(max_size=12))
def test_frames_are_those_of_the_dense_form(drawn: Drawn, name: str) -> None:
    clients = len(drawn.dense)
    ours: dict[str, Field] = {name: drawn.field}
    theirs: dict[str, Field] = {name: Stacked(drawn.dense)}
    sizes = frame_sizes("train", ours, clients)
    assert sizes.tolist() == frame_sizes("train", theirs, clients).tolist()
    for position in range(clients):
        data = encode(ENVELOPE, ours, position)
        assert data == encode(ENVELOPE, theirs, position)
        assert len(data) == sizes[position]
        assert equal(decode(data)[1][name], drawn.dense[position : position + 1])


def example(clients: int = CLIENTS) -> Patched:
    return patched(torch.zeros(1, 2, 2), [0] * clients, [{} for _ in range(clients)])[0]


def test_dense_and_patched_parts_do_not_join() -> None:
    parts: list[Field] = [example(), example().stacked()]
    with pytest.raises(ProtocolError, match=r"one kind of field .* got Patched, Stacked$"):
        concatenate(parts)


def test_state_may_be_patched_but_is_never_shared() -> None:
    field = example()
    assert state_of({"w": field}) == {"w": field}
    with pytest.raises(ProtocolError, match="Stacked or Ragged state field 'w', got Shared"):
        state_of({"w": Shared(torch.zeros(1))})


def answering(state: dict[str, Any], reply: dict[str, Field]) -> Callable[..., Any]:
    """An op that leaves this state and this reply."""

    def op(
        cfg: Any, block: ClientBlock, old: State, inbox: Payload, key: Key
    ) -> tuple[State, Payload]:
        return state, reply

    return op


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("inbox", "state", "reply", "message"),
    [
        (example(4), None, None, "a part for each of 5 clients, got 4 for 'w' in inbox of op"),
        (None, example(4), None, "a part for each of 5 clients, got 4 for 'w' in state after op"),
        (None, None, example(4), "a part for each of 5 clients, got 4 for 'w' in reply of op"),
    ],
    ids=["inbox", "state", "reply"],
)
def test_patched_fields_have_a_part_for_each_client(
    make_graph: Callable[..., Graph],
    cut_block: Callable[..., tuple[ClientBlock, Route]],
    inbox: Patched | None,
    state: Patched | None,
    reply: Patched | None,
    message: str,
    strict: bool,
) -> None:
    fed = InProcess(None, *cut_block(make_graph(40), CLIENTS), CLIENTS, strict=strict)
    given, kept, sent = ({} if f is None else {"w": f} for f in (inbox, state, reply))
    with pytest.raises(ProtocolError, match=f"^expected {message}$"):
        fed.call(answering(kept, dict(sent)), given, what=Kind.CONTROL, key=Key.of(0))


@pytest.mark.parametrize("block_size", [2, CLIENTS])
@pytest.mark.parametrize("strict", [False, True])
def test_a_patched_inbox_arrives_as_its_slices(
    make_graph: Callable[..., Graph],
    cut_block: Callable[..., tuple[ClientBlock, Route]],
    strict: bool,
    block_size: int,
) -> None:
    """Every client gets its own, those that are called in whatever blocks, and bytes are whole."""
    bases = Key.of(0).matrix(2, 6).view(2, 3, 2)
    patches = [{c % 3: bases[0, 0]} for c in range(CLIENTS)]
    fed = InProcess(None, *cut_block(make_graph(40), CLIENTS), block_size, strict=strict)

    def back(
        cfg: Any, block: ClientBlock, old: State, inbox: Payload, key: Key
    ) -> tuple[State, Payload]:
        assert isinstance(inbox["w"], Patched)
        return {}, {"w": inbox["w"].stacked()}

    for which in ([0, 1, 1, 0, 1], [0, 1, 1]):
        field, dense = patched(bases, which, patches[: len(which)])
        to = fed.ids[: len(which)]
        reply = fed.call(back, {"w": field}, what=Kind.WEIGHTS, key=Key.of(0), to=to)
        assert equal(reply["w"], dense)
        down, up = fed.ledger.records[-2:]
        assert (down.bytes == up.bytes).all()


def test_one_of_several_bases() -> None:
    bases, which = Key.of(0).matrix(2, 6).view(2, 3, 2), torch.tensor([1, 0, 1])
    for t in (bases, bases[:, 0, 0], bases[:, 0]):
        field = from_bases(t, which)
        whole = field.stacked() if isinstance(field, Patched) else field
        assert equal(whole, t[which])
        assert isinstance(field, Patched) == (t.dim() > 1)


@pytest.mark.parametrize("strict", [False, True])
def test_a_patched_reply_arrives_as_its_dense_form(
    make_graph: Callable[..., Graph],
    cut_block: Callable[..., tuple[ClientBlock, Route]],
    strict: bool,
) -> None:
    bases = Key.of(0).matrix(2, 6).view(2, 3, 2)
    field, dense = patched(bases, [0, 1, 1, 0, 1], [{c % 3: bases[0, 0]} for c in range(CLIENTS)])
    fed = InProcess(None, *cut_block(make_graph(40), CLIENTS), CLIENTS, strict=strict)
    reply = fed.call(answering({}, {"w": field}), {}, what=Kind.WEIGHTS, key=Key.of(0))
    assert equal(reply["w"], dense)


def test_training_makes_no_whole_tensors_of_the_first_weights(
    make_graph: Callable[..., Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have a row for each feature; it would take several times as long as the training."""
    rows, stacked = set[int](), Patched.stacked

    def watched(field: Patched) -> Stacked:
        rows.add(field.base.shape[1])
        return stacked(field)

    monkeypatch.setattr(Patched, "stacked", watched)
    graph = make_graph(60, 3, 300, sparse=True)
    result = sg.run(graph, method="fedavg", clients=4, rounds=2, hidden=4)
    assert result.config.kernels == "compiled"
    assert 300 not in rows
