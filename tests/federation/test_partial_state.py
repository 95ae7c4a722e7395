"""State fields that some clients have: as if every client were a block of its own."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch

import silograph as sg
from remote_runs import finish, lines, remote, setup_of
from runs import FAST, go, rows_of, run_until, same_bits, weights_of
from sessions import session, table
from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import (
    Field,
    Patched,
    Payload,
    Ragged,
    Stacked,
    State,
    StateField,
    offsets,
    tensors_under,
)
from silograph.federation.base import Federation, Gather, Op, Reduce, Sum, WeightedMean
from silograph.federation.check import HAS
from silograph.federation.checkpoint import (
    Checkpoint,
    from_bytes,
    state_from,
    state_tensors,
    to_bytes,
)
from silograph.federation.field_specs import Extent, FieldSpec, check_against
from silograph.federation.in_process import BlockState, InProcess
from silograph.graph.block.block import ClientBlock, Route
from silograph.graph.graph import Graph
from silograph.methods import (
    FEDAVG,
    Clients,
    GlobalModel,
    LocalModel,
    Method,
    RoundReport,
    Server,
    ServerState,
    average_and_step,
    calls,
    each_as_base,
    exact_weights,
    op,
    program,
)

CLIENTS = 5
KEY = Key.of(0)
Built = tuple[ClientBlock, Route]
Own = dict[str, list[float]]  # a client's fields


@pytest.fixture
def built(make_graph: Callable[..., Graph], cut_block: Callable[..., Built]) -> Built:
    return cut_block(make_graph(40), CLIENTS)


def part_of(own: list[Own], name: str, at: list[int]) -> Stacked | Ragged:
    """What some clients have; names that begin with r are of rows."""
    values = [own[c][name] for c in at]
    t = torch.tensor([v for value in values for v in value], dtype=torch.float64)
    if name[0] == "r":
        return Ragged(t, offsets(torch.tensor([len(value) for value in values])))
    return Stacked(t)


def through_a_checkpoint(state: BlockState) -> BlockState:
    tensors = state_tensors(state.export())
    found = from_bytes(b"".join(to_bytes(Checkpoint(1, tensors, {}))))
    return BlockState(CLIENTS, state_from(found.tensors))


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("seed", range(8))
def test_a_block_state_is_a_dictionary_of_each_client(seed: int) -> None:
    """Fields are created, changed in value and in length, and dropped, by calls to any clients."""
    rng = random.Random(seed)
    state, own = BlockState(CLIENTS), [Own() for _ in range(CLIENTS)]
    for step in range(60):
        at = sorted(rng.sample(range(CLIENTS), rng.randint(1, CLIENTS)))
        groups = state.groups(torch.tensor(at))
        assert sorted(c for g in groups for c in g.tolist()) == at
        for group in groups:
            members = group.tolist()
            names = own[members[0]].keys()
            assert all(own[c].keys() == names for c in members)
            every = len(members) == CLIENTS
            old = state.all() if every else state.take(group)
            assert old.keys() == names
            for name, field in old.items():
                expected = part_of(own, name, members)
                assert type(field) is type(expected)
                assert all(
                    torch.equal(a, b) for a, b in zip(*map(parts, (field, expected)), strict=True)
                )
            kept = [n for n in ("s", "r", "r2") if rng.random() < 0.8]
            for c in members:
                own[c] = {
                    n: [rng.random() for _ in range(rng.randint(0, 4) if n[0] == "r" else 1)]
                    for n in kept
                }
            new: State = {n: part_of(own, n, members) for n in kept}
            state.replace(new) if every else state.put(old, new, group)
        if step % 7 == 0:
            state = through_a_checkpoint(state)


def parts(field: Stacked | Ragged) -> tuple[torch.Tensor, ...]:
    return (field.t, field.off) if isinstance(field, Ragged) else (field.t,)


def test_writing_some_clients_rows_moves_nobody_elses() -> None:
    """Bytes that a call copies do not grow with the clients: memory is replaced now and then."""
    state, clients, rows = BlockState(200), 200, 50
    for c in range(clients):
        at = torch.tensor([c])
        old = state.take(at)
        state.put(old, {"r": Ragged(torch.full((rows,), float(c)), torch.tensor([0, rows]))}, at)
    memory = set()
    for c in range(clients):
        at = torch.tensor([c])
        old = state.take(at)
        longer = Ragged(torch.full((rows + 1,), float(c)), torch.tensor([0, rows + 1]))
        state.put(old, {"r": longer}, at)
        memory.add(state._partial["r"]._rows.data_ptr())
    assert len(memory) <= 5
    runs = state.all()["r"]
    assert isinstance(runs, Ragged)
    assert torch.equal(runs.t, torch.arange(200.0).repeat_interleave(rows + 1))


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (Ragged(torch.zeros(1), torch.tensor([0, 1])), "keep the type of a state field"),
        (Stacked(torch.zeros(1, 3)), r"state 'slice' of torch.float32 and shape \(\)"),
        (Stacked(torch.zeros(1).double()), "got torch.float64"),
    ],
)
def test_one_clients_field_has_the_form_of_the_others(new: Stacked | Ragged, message: str) -> None:
    state = BlockState(3)
    state.put({}, {"slice": Stacked(torch.zeros(1))}, torch.tensor([0]))
    with pytest.raises(ProtocolError, match=message):
        state.put({}, {"slice": new}, torch.tensor([2]))


def test_what_was_shown_is_not_written_to() -> None:
    state, at = BlockState(3), torch.tensor([1])
    state.put({}, {"a": Stacked(torch.ones(1))}, at)
    shown = state.export()
    assert shown[HAS + "a"].t.tolist() == [False, True, False]
    state.put(state.take(at), {"a": Stacked(torch.full((1,), 2.0))}, at)
    assert shown["a"].t.tolist() == [1]
    assert state.export()["a"].t.tolist() == [2]


# Ops that act by what the clients have; two fields of their own.


def visit(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Count visits, and keep drawn rows of the own nodes at the first."""
    first = "visits" not in state
    visits = torch.ones(block.num_clients) if first else state["visits"].t + 1
    new: dict[str, StateField] = {**state, "visits": Stacked(visits)}
    if first:
        new["seen"] = Ragged(key.uniform(block.row_key), block.off)
    reply: dict[str, Field] = {
        "first": Stacked(torch.full((block.num_clients,), first)),
        "visits": Stacked(visits),
        "n": Stacked(block.off.diff().double()),
        "w": touched(block, first=first),
    }
    return new, reply


def touched(block: ClientBlock, *, first: bool) -> Patched:
    """Rows that differ from a base: other ones of clients that are called for the first time."""
    clients = torch.arange(block.num_clients)
    return Patched(
        base=torch.zeros(1, 4, 2, dtype=torch.float64),
        which=torch.zeros(block.num_clients, dtype=torch.int64),
        t=block.off.diff().double()[:, None] * torch.tensor([[0.1, 1 / 3]]).double(),
        index=torch.full_like(clients, 1 if first else 2),
        off=torch.arange(block.num_clients + 1),
    )


def grow(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Keep one row more than before."""
    runs = torch.ones(block.num_clients, dtype=torch.int64)
    if "grown" in state:
        before = state["grown"]
        assert isinstance(before, Ragged)
        runs = before.off.diff() + 1
    off = offsets(runs)
    return {**state, "grown": Ragged(torch.arange(int(off[-1])), off)}, {"runs": Stacked(runs)}


def forget(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    return {n: f for n, f in state.items() if n != "seen"}, {}


PLAN: list[tuple[Op, list[int] | None]] = [
    (visit, [0, 3]),
    (grow, [3]),
    (visit, [0, 1, 2]),
    (grow, None),
    (visit, None),
    (forget, [0, 3]),
    (visit, [3, 4]),
    (grow, [1, 2]),
    (visit, None),
]


def talk(fed: Federation) -> list[Payload]:
    """Make the calls of the plan, replies reduced in every way, and once as they are."""
    found = []
    for number, (visited, at) in enumerate(PLAN):
        to = None if at is None else [fed.ids[c] for c in at]
        mean = WeightedMean("n", {"w": torch.zeros(4, 2, dtype=torch.float64)})
        reduce: Reduce | None = [None, Gather("visits", "first", fold=mean), mean][number % 3]
        if visited is forget:
            reduce = None
        elif visited is grow:
            reduce = [Sum(), None][number % 2]
        key = KEY.fold(number)
        found.append(fed.call(visited, {}, what=Kind.CONTROL, key=key, to=to, reduce=reduce))
    return found


def same(one: list[Payload], other: list[Payload]) -> bool:
    return all(
        a.keys() == b.keys() and all(torch.equal(dense(a[n]), dense(b[n])) for n in a)
        for a, b in zip(one, other, strict=True)
    )


def dense(field: Any) -> torch.Tensor:
    found: torch.Tensor = field.stacked().t if isinstance(field, Patched) else field.t
    return found


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("block_size", [1, 2, 5])
def test_blocks_of_any_size_are_a_session(built: Built, block_size: int, strict: bool) -> None:
    fed = InProcess(None, *built, block_size, strict=strict)
    other, links = session(*built, None, table(visit, grow, forget))
    assert same(talk(fed), talk(other))
    assert lines(fed.ledger.records) == lines(other.ledger.records)
    single_client_only = InProcess(None, *built, 1)
    talk(single_client_only)
    for c, (state, link) in enumerate(
        zip(single_client_only.states(), links.values(), strict=True)
    ):
        at_silo = link.worker._state
        assert state.keys() == at_silo.keys()
        assert ("seen" in state) == (c not in (0, 3)), c
        assert all(torch.equal(state[n].t, at_silo[n].t) for n in state)


def test_states_come_back_from_a_checkpoint(built: Built) -> None:
    fed = InProcess(None, *built, 2)
    talk(fed)
    again = InProcess(None, *built, 2)
    states = [state_from(state_tensors(state)) for state in fed.states()]
    again.restore(1, states, fed.ledger.records)
    fed.start_round(2)
    again.start_round(2)
    assert same(talk(fed), talk(again))
    assert lines(fed.ledger.records) == lines(again.ledger.records)


def reserved(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    return {HAS + "x": Stacked(torch.zeros(block.num_clients))}, {}


def test_names_that_mark_fields_are_refused(built: Built) -> None:
    fed = InProcess(None, *built, 2)
    with pytest.raises(ProtocolError, match=r"do not begin with 'has\?/' after reserved, got"):
        fed.call(reserved, {}, what=Kind.CONTROL, key=KEY)


def test_specs_say_which_fields_may_be_lacking() -> None:
    extent = Extent(1, torch.float32, {})
    needed, own = FieldSpec(Stacked), FieldSpec(Stacked, optional=True)
    rows = FieldSpec(Ragged, rows="own/slot", optional=True)
    check_against({"a": Stacked(torch.zeros(1))}, {"a": needed, "b": own}, extent, "state")
    with pytest.raises(ProtocolError, match="expected 'a', got none in state"):
        check_against({"b": Stacked(torch.zeros(1))}, {"a": needed, "b": own}, extent, "state")
    field = Ragged(torch.zeros(2), torch.tensor([0, 2]))
    with pytest.raises(ProtocolError, match="expected 'slot' beside its rows, got none for 'b'"):
        check_against({"b": field}, {"slot": own, "b": rows}, extent, "state")


# A method whose clients keep something from their first round on.


@dataclass(frozen=True)
class LastModel:
    """The client's own model of its last round, (C, ...), if it has trained."""

    last: Annotated[Mapping[str, Stacked] | None, exact_weights(Stacked, "last", optional=True)]


@op(Kind.WEIGHTS)
def train_visited(
    clients: Clients[Any], state: LastModel, request: GlobalModel
) -> tuple[LastModel, LocalModel]:
    """Train from the mean of the server's weights and the client's own last ones, if it has any."""
    if state.last is None:
        fitted = clients.fit(request.weights)
    else:
        own = {n: Stacked((w + state.last[n].t) / 2) for n, w in request.weights.items()}
        fitted = clients.fit(each_as_base(own))
    model = LocalModel.of(fitted, clients.block)
    dense = {n: w.stacked() if isinstance(w, Patched) else w for n, w in model.weights.items()}
    return LastModel(dense), replace(model, weights=dense)


@calls(train_visited)
def visited_round(server: Server[Any], state: ServerState) -> tuple[ServerState, RoundReport]:
    return average_and_step(server, state, train_visited)


VISITED: Method = replace(FEDAVG, name="visited", **program(visited_round, state=LastModel))
RUN: dict[str, Any] = {"method": VISITED, "participation": 0.5, "rounds": 5}


def test_a_method_keeps_what_selected_clients_created(
    make_graph: Callable[..., Graph], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a session, in blocks, killed and resumed: the same bits and the same ledger."""
    graph = make_graph()
    whole = go(graph, **RUN, block_size=1)
    over, links = remote(setup_of(graph, **RUN), train_visited)
    there = finish(over)
    assert same_bits(weights_of(whole), weights_of(there))
    assert lines(whole.ledger.records) == lines(there.ledger.records)
    blocks = go(graph, **RUN, out=str(tmp_path / "whole"))
    run_until(monkeypatch, graph, 3, tmp_path / "half", **{**FAST, **RUN})
    again = sg.resume(tmp_path / "half", graph=graph, method=VISITED)
    assert same_bits(weights_of(blocks), weights_of(again))
    assert rows_of(blocks) == rows_of(again)
    own = [tensors_under("last", link.worker._state) for link in links.values()]
    assert any(own)
