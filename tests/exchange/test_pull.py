"""Pull in all its forms: what arrives in which slot, what it costs, and what is refused."""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import silograph as sg
from mistakes import raises_code
from remote_runs import finish, lines, remote, setup_of
from runs import FAST, go, rows_of, run_until, same_bits, weights_of
from sessions import TOKEN, DirectLink, session, table, worker_of
from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Field, Payload, Ragged, Shared, Stacked, State, offsets
from silograph.exchange.pull import (
    NO_VERSION,
    PLAIN,
    PullForm,
    _reply_specs,
    _version_problem,
    pull,
)
from silograph.federation.base import AwayError, Federation, Op, Sum
from silograph.federation.field_specs import BOUNDARY, SLOTS, FieldSpec, FieldSpecs, places
from silograph.federation.frame import DIMENSION, FIELD, HEADER, Envelope, decode, encode
from silograph.federation.in_process import InProcess
from silograph.federation.program import Call, Either, Maybe, Program, Steps
from silograph.federation.session.engine import Session
from silograph.federation.session.message import (
    CallBody,
    Message,
    Type,
    call_body,
    pack,
    read_call,
    read_reply,
    reply_body,
    unpack,
)
from silograph.graph.block.block import ClientBlock, Route
from silograph.graph.graph import Graph
from silograph.methods import (
    FEDAVG,
    Calls,
    Method,
    MethodConfig,
    Params,
    RoundReport,
    Server,
    ServerState,
    average_and_step,
    state_specs,
    train,
)
from silograph.methods.fedavg import FEDAVG_PROGRAM
from silograph.methods.local_training import begin

CLIENTS = 5
WIDTH = 3
KEY = Key.of(3)
Built = tuple[ClientBlock, Route]
FIELDS: FieldSpecs = {
    "q": FieldSpec(Ragged, (WIDTH,), torch.int8),
    "scale": FieldSpec(Ragged, (1,), torch.float64),
}
FORM = PullForm(FIELDS, requested="halo/asked")
FORMS = [
    replace(FORM, missing="keep" if keep else "fail", since=since, some=some)
    for keep, since, some in itertools.product([False, True], repeat=3)
]


# Clients whose rows change now and then, as whole numbers and a scale for each row.


def start(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """An owner's rows are drawn and have version 0; a requester has none."""
    halo, form = block.halo, torch.float64
    slots, rows = int(halo.off[-1]), int(halo.boundary_off[-1])
    drawn = key.uniform(block.row_key, WIDTH)[halo.boundary].to(form)
    new: dict[str, Stacked | Ragged] = {
        "mine/value": Ragged(drawn, halo.boundary_off),
        "mine/version": Ragged(torch.zeros(rows, dtype=torch.int32), halo.boundary_off),
        "halo/value": Ragged(torch.zeros(slots, WIDTH, dtype=form), halo.off),
        "halo/version": Ragged(torch.full((slots,), -1, dtype=torch.int32), halo.off),
        "halo/asked": Ragged(torch.zeros(0, dtype=torch.int32), halo.off * 0),
    }
    return {**state, **new}, {}


def move(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Half of the rows change. In: `t` shared."""
    value, version, t = state["mine/value"], state["mine/version"], inbox["t"].t
    drawn = key.uniform(block.row_key)[block.halo.boundary, 0] < 0.5
    moved = torch.where(drawn[:, None], value.t - t, value.t)
    later = torch.where(drawn, t.int(), version.t)
    off = block.halo.boundary_off
    new: State = {"mine/value": Ragged(moved, off), "mine/version": Ragged(later, off)}
    return {**state, **new}, {}


def ask(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """A drawn half of the slots."""
    halo, version = block.halo, state["halo/version"].t
    place = (key.fold("ask").uniform(halo.key)[:, 0] < 0.5).nonzero()[:, 0]
    client = torch.searchsorted(halo.off, place, right=True) - 1
    off = offsets(torch.bincount(client, minlength=block.num_clients))
    slot = Ragged((place - halo.off[client]).int(), off)
    reply: dict[str, Field] = {"slot": slot}
    if form_of(cfg).since:
        reply["version"] = Ragged(version[place], off)
    return {**state, "halo/asked": slot}, reply


def serve(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Where rows may be missing, owners do not have every third one."""
    form, row, reply = form_of(cfg), inbox["row"], dict[str, Field]()
    assert isinstance(row, Ragged)
    start_of = torch.repeat_interleave(block.halo.boundary_off[:-1], row.off.diff())
    place, sent = row.t.long() + start_of, torch.ones(len(row.t), dtype=torch.bool)
    client = torch.repeat_interleave(torch.arange(block.num_clients), row.off.diff())

    def of(t: Tensor) -> Ragged:
        return Ragged(t, offsets(torch.bincount(client[sent], minlength=block.num_clients)))

    if form.missing == "keep":
        answered = row.t % 3 != 0
        reply["answered"] = Ragged(answered, row.off)
        sent = answered
    if form.since:
        changed = state["mine/version"].t[place] > inbox["since"].t
        reply["changed"] = of(changed[sent])
        sent = sent & changed
        reply["version"] = of(state["mine/version"].t[place[sent]])
    q, scale = whole_numbers(state["mine/value"].t[place[sent]])
    return state, {**reply, "q": of(q), "scale": of(scale)}


def whole_numbers(rows: Tensor) -> tuple[Tensor, Tensor]:
    scale = rows.abs().amax(1, keepdim=True) / 127
    return (rows / scale).round().to(torch.int8), scale


def store(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Write what came over what was there."""
    form, slot, halo = form_of(cfg), state["halo/asked"], block.halo
    assert isinstance(slot, Ragged)
    place = slot.t.long() + torch.repeat_interleave(halo.off[:-1], slot.off.diff())
    for name, given in (("answered", form.missing == "keep"), ("changed", form.since)):
        if given:
            place = place[inbox[name].t]
    value, version = state["halo/value"].t.clone(), state["halo/version"].t.clone()
    value[place] = inbox["q"].t * inbox["scale"].t
    version[place] = inbox["version"].t if form.since else 0
    new: State = {"halo/value": Ragged(value, halo.off), "halo/version": Ragged(version, halo.off)}
    return {**state, **new}, {}


def form_of(cfg: Any) -> PullForm:
    return cfg if isinstance(cfg, PullForm) else METHOD_FORM


@dataclass
class Oracle:
    """The same one slot and one row after the other, on the joined clients."""

    block: ClientBlock
    route: Route
    form: PullForm

    def __post_init__(self) -> None:
        state, _ = start(None, self.block, {}, {}, KEY)
        self.value, self.version = state["mine/value"].t, state["mine/version"].t
        self.halo, self.has = state["halo/value"].t.clone(), state["halo/version"].t.clone()
        self.bytes: dict[str, int] = {}

    def of(self, place: int, off: Tensor) -> int:
        return int(torch.searchsorted(off, place, right=True)) - 1

    def move(self, to: Sequence[int], t: int, key: Key) -> None:
        drawn = key.uniform(self.block.row_key)[self.block.halo.boundary, 0] < 0.5
        for row in drawn.nonzero()[:, 0].tolist():
            if self.of(row, self.route.boundary_off) in to:
                self.value[row], self.version[row] = self.value[row] - t, t

    def pull(self, to: Sequence[int], owners: Sequence[int], key: Key) -> None:
        """Write what arrives, and count the bytes by op and direction."""
        form, halo = self.form, self.block.halo
        drawn = (key.fold("ask").uniform(halo.key)[:, 0] < 0.5).nonzero()[:, 0].tolist()
        asked = [s for s in drawn if self.of(s, halo.off) in to]
        target = {s: int(self.route.target[s]) for s in asked}
        known = {s: r for s, r in target.items() if self.of(r, self.route.boundary_off) in owners}
        wanted = sorted(set(known.values()))
        local = {
            r: r - int(self.route.boundary_off[self.of(r, self.route.boundary_off)]) for r in wanted
        }
        keep = form.missing == "keep"
        held = {r for r in wanted if not keep or local[r] % 3 != 0}
        oldest = {r: min(int(self.has[s]) for s in known if known[s] == r) for r in wanted}
        came = {r for r in held if not form.since or int(self.version[r]) > oldest[r]}
        answered = [s for s in known if known[s] in held]
        sent = [
            s
            for s in answered
            if known[s] in came and (not form.since or self.version[known[s]] > self.has[s])
        ]
        called = {self.of(r, self.route.boundary_off) for r in wanted} if form.some else set(to)
        since = form.since
        self.bytes = {
            "ask up": sizes("ask", len(to), ["slot"] + ["version"] * since)
            + 4 * len(asked) * (1 + since),
            "serve down": sizes("serve", len(called), ["row"] + ["since"] * since)
            + 4 * len(wanted) * (1 + since),
            "serve up": self.rows("serve", len(called), len(wanted), len(held), len(came)),
            "store down": self.rows("store", len(to), len(asked), len(answered), len(sent)),
        }
        if form.some and not wanted:
            self.bytes |= {"serve up": 0, "serve down": 0, "store down": 0}
        for s in sent:
            q, scale = whole_numbers(self.value[known[s]][None])
            self.halo[s] = (q * scale)[0]
            self.has[s] = self.version[known[s]] if form.since else 0

    def rows(self, op: str, frames: int, asked: int, answered: int, sent: int) -> int:
        keep, since = self.form.missing == "keep", self.form.since
        names = ["answered"] * keep + ["changed", "version"] * since
        fixed = sizes(op, frames, names) + frames * (head("q", 2) + head("scale", 2))
        return fixed + keep * asked + since * (answered + 4 * sent) + sent * (WIDTH + 8)


def head(name: str, dims: int) -> int:
    return FIELD.size + len(name) + dims * DIMENSION.size


def sizes(op: str, frames: int, names: list[str]) -> int:
    """Bytes of frames with empty fields of one dimension."""
    return frames * (HEADER.size + len(op) + sum(head(name, 1) for name in names))


@pytest.fixture
def built(make_graph: Callable[..., Graph], cut_block: Callable[..., Built]) -> Built:
    return cut_block(make_graph(50), CLIENTS)


PLAN = [([0, 3], [0, 3, 4]), ([1, 2, 3], [0, 1]), ([0, 1, 2, 3, 4], None), ([2], [2]), ([3], None)]


def play(fed: Federation, form: PullForm, seen: Callable[[int], None] = lambda _: None) -> None:
    """Rounds in which some rows move and some clients ask some owners."""
    fed.call(start, {}, what=Kind.CONTROL, key=KEY)
    for t, (to, owners) in enumerate(PLAN, 1):
        if not form.some and form.missing == "fail":
            to, owners = list(range(CLIENTS)), None
        fed.start_round(t)
        key, names = KEY.fold(t), [fed.ids[c] for c in to]
        told = {"t": Shared(torch.tensor(t))}
        if owners is not None and form.missing == "fail":
            owners = None
        fed.call(move, told, what=Kind.CONTROL, key=key, to=names)
        who = None if owners is None else [fed.ids[c] for c in owners]
        what = Kind.EMBEDDINGS
        pull(fed, ask, serve, store, what=what, key=key, to=names, owners=who, form=form)
        seen(t)


def spent(fed: Federation, t: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for record in fed.ledger.records:
        if record.round == t and record.op in ("ask", "serve", "store"):
            name = f"{record.op} {record.direction}"
            found[name] = found.get(name, 0) + int(record.bytes.sum())
    return found


def field_of(fed: InProcess, name: str) -> Tensor:
    return torch.cat([state[name].t for state in fed.states()])


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("form", FORMS, ids=lambda f: f"{f.missing} {f.since} {f.some}")
@pytest.mark.parametrize("block_size", [1, 2, 5])
def test_slots_hold_what_an_oracle_says(built: Built, form: PullForm, block_size: int) -> None:
    fed = InProcess(form, *built, block_size, strict=block_size == 2)
    oracle, everyone = Oracle(*built, form), list(range(CLIENTS))

    def look(t: int) -> None:
        to, owners = PLAN[t - 1]
        if not form.some and form.missing == "fail":
            to, owners = everyone, None
        if form.missing == "fail":
            owners = None
        key = KEY.fold(t)
        oracle.move(to, t, key)
        may = to if not form.some else everyone if owners is None else owners
        oracle.pull(to, may, key)
        assert torch.equal(field_of(fed, "halo/value"), oracle.halo)
        assert torch.equal(field_of(fed, "halo/version"), oracle.has)
        found = spent(fed, t)
        assert {name: found.get(name, 0) for name in oracle.bytes} == oracle.bytes

    play(fed, form, look)
    assert bool((oracle.has >= 0).any())


def fall_back(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Owners are at version 5 again, of which every second slot knows; others have version 9."""
    halo = block.halo
    had = torch.where(halo.key % 2 == 0, 5, 9).int()
    now = torch.full_like(state["mine/version"].t, 5)
    versions = {"halo/version": Ragged(had, halo.off)}
    return {**state, **versions, "mine/version": Ragged(now, halo.boundary_off)}, {}


def test_rows_of_an_owner_that_fell_back_come_where_askers_have_several_versions(
    built: Built,
) -> None:
    """By the oldest version alone the owner would not know that somebody has a later one."""
    form = next(f for f in FORMS if f.since and f.missing == "fail")
    fed = InProcess(form, *built, 1)
    fed.call(start, {}, what=Kind.CONTROL, key=KEY)
    fed.call(fall_back, {}, what=Kind.CONTROL, key=KEY)
    before, mine = field_of(fed, "halo/version"), field_of(fed, "mine/value")
    pull(fed, ask, serve, store, what=Kind.EMBEDDINGS, key=KEY, form=form)
    halo, target = built[0].halo, built[1].target
    asked = KEY.fold("ask").uniform(halo.key)[:, 0] < 0.5
    rows = {v: {int(r) for r in target[asked & (before == v)]} for v in (5, 9)}
    both = rows[5] & rows[9]
    stale = [
        s for s in range(len(target)) if asked[s] and before[s] == 9 and int(target[s]) in both
    ]
    assert stale
    q, scale = whole_numbers(mine[target[stale]])
    assert torch.equal(field_of(fed, "halo/value")[stale], q * scale)
    assert bool((field_of(fed, "halo/version")[stale] == 5).all())


# Over a session, in which both ends hold each other to the program.


def pull_steps(
    ask: Op | None,
    serve: Op,
    store: Op,
    *,
    what: Kind,
    key: Key,
    inbox: FieldSpecs | None = None,
    form: PullForm,
) -> Steps:
    """Return the calls of `pull`, as methods with typed ops derive them from their messages."""
    inbox_specs = dict(inbox or {})
    names_rows = ask is not None or form.some
    request = {**inbox_specs, "row": places(BOUNDARY)} if names_rows else inbox_specs
    ask_specs: dict[str, FieldSpec] = {"slot": places(SLOTS)}
    if form.since:
        version = FieldSpec(Ragged, (), torch.int32, low=NO_VERSION)
        request["since"] = replace(version, rows="own/row")
        ask_specs["version"] = replace(version, rows="own/slot")
    serve_specs = _reply_specs(form, "inbox/row" if names_rows else BOUNDARY)
    is_counted = ask is None or not form.requested
    counted_by = SLOTS if is_counted else f"state/{form.requested}"
    store_specs = _reply_specs(form, counted_by, fewer=is_counted and ask is not None)
    problem = _version_problem if form.since else None
    serve_call = Call(serve, what, key, request, serve_specs, problem)
    store_call = Call(store, what, key, {**inbox_specs, **store_specs})
    first = () if ask is None else Call(ask, Kind.HALO_KEYS, key, inbox_specs, ask_specs)
    if not form.some:
        return first, serve_call, store_call
    return Either((first, Maybe(serve_call), Maybe(store_call)), Maybe(serve_call))


def program(form: PullForm) -> Program:
    """What `play` calls; `move` is not for everybody."""
    told = FieldSpec(Shared, (), torch.int64)

    def steps(t: int) -> Steps:
        key, what = KEY.fold(t), Kind.EMBEDDINGS
        moves = Maybe(Call(move, Kind.CONTROL, key, {"t": told}))
        pulled = pull_steps(ask, serve, store, what=what, key=key, form=form)
        return moves, pulled if form.some else Maybe(pulled)

    return Program(Call(start, Kind.CONTROL, KEY), steps, len(PLAN), HISTORY)


HISTORY: FieldSpecs = {
    "mine/value": FieldSpec(Ragged, (WIDTH,), torch.float64, rows=BOUNDARY),
    "mine/version": FieldSpec(Ragged, (), torch.int32, rows=BOUNDARY),
    "halo/value": FieldSpec(Ragged, (WIDTH,), torch.float64, rows=SLOTS),
    "halo/version": FieldSpec(Ragged, (), torch.int32, rows=SLOTS),
    "halo/asked": FieldSpec(Ragged, (), torch.int32, rows=SLOTS, fewer=True),
}
OPS = (start, move, ask, serve, store)


def joined_by(built: Built, form: PullForm) -> tuple[Session, dict[str, DirectLink]]:
    return session(*built, form, table(*OPS), least=1, program=program(form))


@pytest.mark.law(sample=3)
@pytest.mark.parametrize("form", FORMS, ids=lambda f: f"{f.missing} {f.since} {f.some}")
def test_a_session_is_the_same_to_the_bit(built: Built, form: PullForm) -> None:
    fed = InProcess(form, *built, 2)
    other, links = joined_by(built, form)
    play(fed, form)
    play(other, form)
    assert lines(fed.ledger.records) == lines(other.ledger.records)
    for name in ("halo/value", "halo/version", "halo/asked"):
        at_silos = torch.cat([link.worker._state[name].t for link in links.values()])
        assert torch.equal(field_of(fed, name), at_silos)


def once(fed: Federation, form: PullForm, to: list[int] | None = None) -> None:
    fed.start_round(1)
    names = None if to is None else [fed.ids[c] for c in to]
    what = Kind.EMBEDDINGS
    pull(fed, ask, serve, store, what=what, key=KEY.fold(1), to=names, form=form)


KEEP = replace(FORM, missing="keep", since=True, some=True)


@pytest.mark.parametrize("lost", [2, 0])
def test_rows_of_an_owner_that_is_away_stay_as_they_were(built: Built, lost: int) -> None:
    """Whether it is gone before the pull, or in it; a requester that is gone asks nothing."""
    block, route = built
    fed, links = joined_by(built, KEEP)
    fed.call(start, {}, what=Kind.CONTROL, key=KEY)
    names, oracle = list(links), Oracle(block, route, KEEP)
    links[names[lost]].change = lambda data: None
    once(fed, KEEP, [0, 1])
    assert (names[lost] in fed.away) == (lost == 0 or bool(served_by(fed, lost)))
    asking = [1] if lost == 0 else [0, 1]
    oracle.pull(asking, [c for c in range(CLIENTS) if c != lost], KEY.fold(1))
    for c in asking:
        mine = slice(int(route.slot_off[c]), int(route.slot_off[c + 1]))
        assert torch.equal(links[names[c]].worker._state["halo/value"].t, oracle.halo[mine])


def served_by(fed: Federation, client: int) -> bool:
    return any(r.op == "serve" and client in r.clients for r in fed.ledger.records)


def test_where_nobody_answers_nothing_changes(built: Built) -> None:
    fed, links = joined_by(built, KEEP)
    fed.call(start, {}, what=Kind.CONTROL, key=KEY)
    for link in list(links.values())[1:]:
        link.change = lambda data: None
    once(fed, KEEP, [0])
    silo = links[fed.ids[0]].worker
    assert not silo._state["halo/value"].t.any()
    assert {r.op for r in fed.ledger.records} == {"start", "ask", "serve"}


def test_a_pull_in_which_no_row_may_be_missing_waits_for_its_owners(built: Built) -> None:
    form = replace(FORM, some=True)
    fed, links = joined_by(built, form)
    fed.call(start, {}, what=Kind.CONTROL, key=KEY)
    links[fed.ids[2]].change = lambda data: None
    with raises_code(AwayError, "too-few-silos", expected=5, got=4, missing=["client_02"]):
        once(fed, form, [0, 1])


def test_clients_without_halo_pull_nothing(built: Built) -> None:
    block, _ = built
    alone = block.take(torch.tensor([0]))
    nothing = torch.zeros(0, dtype=torch.int64)
    halo = alone.halo
    empty = replace(
        halo,
        off=halo.off * 0,
        adj=halo.adj.select_rows(torch.arange(0)),
        key=halo.key[:0],
        boundary=halo.boundary[:0],
        boundary_off=halo.boundary_off * 0,
    )
    zeros = torch.zeros(2, dtype=torch.int64)
    for form in FORMS:
        fed = InProcess(form, replace(alone, halo=empty), Route(nothing, zeros, zeros), 1)
        play_alone(fed, form)


def play_alone(fed: InProcess, form: PullForm) -> None:
    fed.call(start, {}, what=Kind.CONTROL, key=KEY)
    once(fed, form)
    assert len(field_of(fed, "halo/value")) == 0


# What a hostile server or silo may not do.


def requests_of(built: Built, form: PullForm, client: int) -> tuple[ClientBlock, list[bytes]]:
    """The bodies of the calls that one silo gets in round 1."""
    fed, links = joined_by(built, form)
    fed.call(start, {}, what=Kind.CONTROL, key=KEY)
    once(fed, form, [0, 1])
    found = [unpack(data) for data in links[fed.ids[client]].requests]
    bodies = [bytes(message.body) for message in found if message.type is Type.CALL]
    return built[0].take(torch.tensor([client])), bodies


def changed_call(body: bytes, change: Callable[[dict[str, Field]], None]) -> bytes:
    call = read_call(body)
    envelope, inbox = decode(call.frame)
    change(inbox)
    return call_body(CallBody(call.op, call.key, call.rows, encode(envelope, inbox, 0)))


def with_rows(t: Tensor) -> Ragged:
    return Ragged(t, torch.tensor([0, len(t)]))


def set_row(numbers: Sequence[int]) -> Callable[[dict[str, Field]], None]:
    def change(inbox: dict[str, Field]) -> None:
        row = torch.tensor(numbers, dtype=torch.int32)
        inbox |= {"row": with_rows(row), "since": with_rows(torch.zeros_like(row))}

    return change


def one_more(name: str) -> Callable[[dict[str, Field]], None]:
    def change(inbox: dict[str, Field]) -> None:
        t = inbox[name].t
        inbox[name] = with_rows(torch.cat([t, t[:1]]))

    return change


@pytest.mark.parametrize(
    ("number", "change", "message"),
    [
        (2, set_row([0, 0]), "ascending places, each once, got others for 'row'"),
        (2, set_row([1, 0]), "ascending places, each once"),
        (2, set_row([-1]), "places that exist"),
        (2, set_row([10**6]), "places that exist"),
        (2, set_row(range(50)), r"at most \d+ rows, got 50 for 'row'"),
        (3, one_more("answered"), r"\d+ rows, got \d+ for 'answered' in inbox of store"),
        (3, one_more("changed"), r"\d+ rows, got \d+ for 'changed'"),
        (3, one_more("version"), r"\d+ rows, got \d+ for 'version'"),
        (3, one_more("q"), r"\d+ rows, got \d+ for 'q'"),
        (3, one_more("scale"), r"\d+ rows, got \d+ for 'scale'"),
    ],
)
def test_a_silo_refuses_rows_beyond_what_was_declared(
    built: Built, number: int, change: Callable[[dict[str, Field]], None], message: str
) -> None:
    block, bodies = requests_of(built, KEEP, 1)
    names = [read_call(body).op.rpartition(":")[2] for body in bodies]
    assert names == ["start", "ask", "serve", "store"]
    worker = worker_of(block, KEEP, table(*OPS), program=program(KEEP))
    told = itertools.count(1)

    def asked(kind: Type, body: bytes) -> Message:
        return unpack(worker.answer(pack(Message(kind, TOKEN, next(told), body))))

    asked(Type.START, b"{}")
    for body in bodies[:number]:
        assert asked(Type.CALL, body).type is Type.REPLY
    answer = asked(Type.CALL, changed_call(bodies[number], change))
    assert answer.type is Type.REFUSED
    assert re.search(message, str(answer.facts()["reason"]))
    assert asked(Type.CALL, bodies[number]).type is Type.REPLY  # nothing has changed


@pytest.mark.parametrize(
    ("order", "names"),
    [
        (["start", "store"], "expected .* got test_pull.store"),
        (["start", "serve", "serve"], "expected the next round in round 1, as agreed, got"),
        (["start", "serve", "ask"], "expected the next round in round 1"),
        (["start", "ask", "serve", "serve"], r"test_pull.store \(embeddings\) or the next round"),
        (["start", "ask", "store", "serve"], "expected the next round in round 1"),
    ],
)
def test_a_silo_asks_and_answers_once_in_a_pull(built: Built, order: list[str], names: str) -> None:
    block, bodies = requests_of(built, KEEP, 1)
    by_name = {read_call(body).op.rpartition(":")[2]: body for body in bodies}
    worker = worker_of(block, KEEP, table(*OPS), program=program(KEEP))
    worker.answer(pack(Message(Type.START, TOKEN, 1, b"{}")))
    for number, name in enumerate(order, 2):
        answer = unpack(worker.answer(pack(Message(Type.CALL, TOKEN, number, by_name[name]))))
        assert (answer.type is Type.REPLY) == (number < len(order) + 1)
    assert re.search(names, str(answer.facts()["reason"]))


def reply_with(
    name: str, make: Callable[[dict[str, Field]], None] | None = None, op: str = "serve"
) -> Callable[[bytes], bytes]:
    """Change a field of the reply to an op on its way."""

    def change(data: bytes) -> bytes:
        message = unpack(data)
        if message.type is not Type.REPLY:
            return data
        meter, frame = read_reply(message.body)
        envelope, reply = decode(frame)
        if envelope.op != op:
            return data
        (make or one_more(name))(reply)
        frame = encode(
            Envelope(envelope.op, envelope.kind, envelope.round, envelope.step), reply, 0
        )
        body = reply_body(envelope.kind, meter, frame)
        return pack(Message(message.type, message.token, message.sequence, body))

    return change


@pytest.mark.parametrize("name", ["answered", "changed", "version", "q", "scale"])
def test_an_owner_whose_answer_is_wrong_is_away(built: Built, name: str) -> None:
    fed, links = joined_by(built, KEEP)
    fed.call(start, {}, what=Kind.CONTROL, key=KEY)
    links[fed.ids[3]].change = reply_with(name)
    once(fed, KEEP, [0, 1])
    assert fed.away == (fed.ids[3],)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("slots", [[-1], [10**6], [0, 0], [1, 0], [2**31 - 1]])
def test_slots_that_are_none_name_who_asked_for_them(
    built: Built, slots: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """No owner is blamed, and the others get their rows."""

    def ask_for(reply: dict[str, Field]) -> None:
        slot = torch.tensor(slots, dtype=torch.int32)
        reply |= {"slot": with_rows(slot), "version": with_rows(torch.zeros_like(slot))}

    fed, links = joined_by(built, KEEP)
    fed.call(start, {}, what=Kind.CONTROL, key=KEY)
    links[fed.ids[1]].change = reply_with("", ask_for, "ask")
    once(fed, KEEP)
    assert fed.away == (fed.ids[1],)
    assert f"has lost {fed.ids[1]}: expected" in caplog.text
    assert any(r.op == "store" for r in fed.ledger.records)


def wrong(make: Callable[[dict[str, Field]], None]) -> Op:
    def serve(
        cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
    ) -> tuple[State, Payload]:
        reply = dict(serve_honestly(cfg, block, state, inbox, key)[1])
        make(reply)
        return state, reply

    return serve


serve_honestly = serve


def early(reply: dict[str, Field]) -> None:
    version = reply["version"]
    assert isinstance(version, Ragged)
    reply["version"] = Ragged(version.t - 1, version.off)


def test_an_owner_that_sends_earlier_versions_is_away_and_the_others_go_on(
    built: Built, caplog: pytest.LogCaptureFixture
) -> None:
    fed, links = joined_by(built, KEEP)
    fed.call(start, {}, what=Kind.CONTROL, key=KEY)
    liar = fed.ids[3]
    for name in fed.ids[:2]:
        state = links[name].worker._state
        version = state["halo/version"]
        links[name].worker._state = {**state, "halo/version": replace(version, t=version.t + 6)}
    links[liar].change = reply_with("version", again)
    once(fed, KEEP, [0, 1])
    assert fed.away == (liar,)
    assert f"has lost {liar}: expected later versions of changed rows, got those" in caplog.text


def again(reply: dict[str, Field]) -> None:
    """Claim that all rows have changed, to the version 0."""
    changed = reply["changed"]
    assert isinstance(changed, Ragged)
    rows, off = len(changed.t), changed.off
    reply["changed"] = Ragged(torch.ones(rows, dtype=torch.bool), off)
    reply["version"] = Ragged(torch.zeros(rows, dtype=torch.int32), off)
    reply["q"] = Ragged(torch.zeros(rows, WIDTH, dtype=torch.int8), off)
    reply["scale"] = Ragged(reply["scale"].t.new_zeros(rows, 1), off)


def without_rows(name: str, reply: dict[str, Field]) -> None:
    field = reply[name]
    assert isinstance(field, Ragged)
    reply[name] = Ragged(field.t[:0], field.off * 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (early, r"expected later versions of changed rows, got .* ones from serve of client_0\d"),
        (partial(without_rows, "q"), r"expected \d+ rows from serve of client_0\d, got 0 in 'q'"),
        (partial(without_rows, "answered"), r"rows from serve of client_0\d, got 0 in 'answered'"),
        (lambda reply: reply.pop("scale"), "expected a Ragged field 'scale' in the reply of serve"),
    ],
)
def test_answers_of_another_form(
    built: Built, make: Callable[[dict[str, Field]], None], message: str
) -> None:
    fed = InProcess(KEEP, *built, 2)
    fed.call(start, {}, what=Kind.CONTROL, key=KEY)
    with pytest.raises(ProtocolError, match=message):
        pull(fed, ask, wrong(make), store, what=Kind.EMBEDDINGS, key=KEY, form=KEEP)


def test_changed_rows_need_somebody_who_says_what_it_has(built: Built) -> None:
    fed, form = InProcess(None, *built, 2), replace(PLAIN, since=True)
    with pytest.raises(ProtocolError, match="clients that ask in a pull of changed rows"):
        pull(fed, None, serve, store, what=Kind.EMBEDDINGS, key=KEY, form=form)


# A method whose selected clients pull from all.

METHOD_FORM = replace(FORM, missing="keep", since=True, some=True)


def begin_history(
    cfg: MethodConfig, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    new, reply = begin(cfg, block, state, inbox, key)
    return start(cfg, block, new, {}, key)[0], reply


def tell_sum(
    cfg: MethodConfig, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """What the slots hold, so that runs can be compared by it."""
    value = state["halo/value"]
    assert isinstance(value, Ragged)
    ends = torch.cat([torch.zeros(1).double(), value.t.sum(1).cumsum(0)])[value.off]
    return state, {"halo": Stacked(ends.diff())}


def history_init(fed: Federation, cfg: MethodConfig, weights: Params, key: Key) -> ServerState:
    fed.call(begin_history, {}, what=Kind.CONTROL, key=key)
    return ServerState(weights, {})


def history_round(
    fed: Federation, cfg: MethodConfig, state: ServerState, t: int, key: Key
) -> tuple[ServerState, RoundReport]:
    new, report = average_and_step(Server(fed, cfg, t, key), state, train)
    to, own = report.participants, key.fold("pull", t)
    fed.call(move, {"t": Shared(torch.tensor(t))}, what=Kind.CONTROL, key=own, to=to)
    what = Kind.EMBEDDINGS
    pull(fed, ask, serve, store, what=what, key=own, to=to, form=METHOD_FORM)
    total = fed.call(tell_sum, {}, what=Kind.STATISTICS, key=own, reduce=Sum())
    return new, replace(report, facts={"halo": float(total["halo"].t)})


def history_steps(cfg: MethodConfig, t: int, key: Key) -> Steps:
    own, what = key.fold("pull", t), Kind.EMBEDDINGS
    told = {"t": FieldSpec(Shared, (), torch.int64, low=t, high=t)}
    return (
        FEDAVG_PROGRAM["calls"].round(cfg, t, key),
        Maybe(Call(move, Kind.CONTROL, own, told)),
        pull_steps(ask, serve, store, what=what, key=own, form=METHOD_FORM),
        Call(tell_sum, Kind.STATISTICS, own, {}, {"halo": FieldSpec(Stacked)}),
    )


STALE: Method = replace(
    FEDAVG,
    name="history",
    init=history_init,
    round=history_round,
    calls=Calls(
        setup=lambda cfg, key: Call(begin_history, Kind.CONTROL, key),
        round=history_steps,
        state=lambda cfg: {**state_specs(cfg), **HISTORY},
    ),
)
RUN: dict[str, Any] = {"method": STALE, "participation": 0.5}


def test_a_method_that_pulls_resumes_and_runs_at_silos(
    make_graph: Callable[..., Graph], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = make_graph()
    whole = go(graph, **RUN, block_size=1, out=str(tmp_path / "whole"))
    over, _ = remote(setup_of(graph, **RUN), *OPS, begin_history, tell_sum)
    there = finish(over)
    assert same_bits(weights_of(whole), weights_of(there))
    assert lines(whole.ledger.records) == lines(there.ledger.records)
    run_until(monkeypatch, graph, 3, tmp_path / "half", **{**FAST, **RUN, "block_size": 1})
    again = sg.resume(tmp_path / "half", graph=graph, method=STALE)
    assert same_bits(weights_of(whole), weights_of(again))
    assert rows_of(whole) == rows_of(again) == rows_of(there)
    assert all(row["fact_halo"] for row in whole.rounds)
