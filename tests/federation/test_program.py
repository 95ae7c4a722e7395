"""What a silo does in a run: the calls that its config gives, in their order, and nothing else."""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch

from runs import little_work, with_values
from sessions import TOKEN, session, shares_of_work, worker_of
from silograph.core.config import make_config
from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Ragged, Shared, Stacked
from silograph.experiment.resolve import run_program
from silograph.experiment.resolve.data import clients_of
from silograph.experiment.resolve.run_program import beyond_weights, most_work, program_of
from silograph.experiment.run.progress import Silent, TrackerGroup
from silograph.experiment.run.run import first_snapshot, train
from silograph.experiment.run.setup import Setup, prepare
from silograph.federation.field_specs import (
    BOUNDARY,
    SLOTS,
    Extent,
    FieldSpec,
    check_against,
    exactly,
    places,
)
from silograph.federation.frame import Envelope, decode, encode
from silograph.federation.in_process import InProcess
from silograph.federation.program import (
    MOST_TIMES,
    AlikeRounds,
    Call,
    Course,
    Either,
    Maybe,
    Program,
    Repeat,
    Steps,
    bytes_of_steps,
    calls_of,
    can_end,
)
from silograph.federation.session.message import (
    CallBody,
    Message,
    Type,
    call_body,
    own_ops,
    pack,
    read_call,
    unpack,
)
from silograph.federation.session.responder import Responder
from silograph.graph.graph import Graph
from silograph.methods import FEDAVG, METHODS, AllSilos

DEPLOYED = [name for name, m in METHODS.items() if m.setting.at_server is None]
ALIKE = [n for n in DEPLOYED if (c := METHODS[n].calls) and isinstance(c.round, AlikeRounds)]
CASES: list[dict[str, Any]] = [
    *({"method": name, **little_work(name)} for name in DEPLOYED),
    {"method": "local", "participation": 0.5, "keep_optimizer": True, "collect": 0.5},
    {
        "method": "fedavg",
        "participation": 0.5,
        "optimizer": "sgd",
        "momentum": 0.9,
        "keep_optimizer": True,
        "eval_every": 2,
    },
    {"method": "fedavg", "selector": "round_robin", "options": {"selector.clients": 2}},
    {"method": "local", "selector": "all"},
    {"method": "fedper", "participation": 0.5, "layers": 3, "options": {"private": 2}},
    {"method": "fedper", "options": {"private": 0}},
    {"method": "gcflplus", "participation": 0.5, "neighbors": "fedgrains", "batch_size": 3},
    {"method": "fedpub", "participation": 0.5, "options": {"masks": False}},
    {"method": "fedsageplus", "participation": 0.5, "options": {"generator_epochs": 9}},
    {"method": "fedopt", "collect": 0.5, "model": "gat", "heads": 2},
    {"method": "fedprox", "eval_every": 3, "max_bytes": 1000},
    {"method": "label_guided", "options": {"sample": 20}, "local_epochs": 2, "layers": 3},
    {"method": "label_guided", "options": {"sample": 20, "rows": "all"}, "model": "gin"},
    {"method": "label_guided", "model": "appnp", "hops": 2},
    {"method": "label_guided", "model": "mlp"},
    {"method": "bns", "model": "graphconv", "options": {"rate": 0.5}},
    {"method": "cagnet", "model": "sage"},
    {"method": "fedgraph", "options": {"kappa": 4, "local_steps": 2}, "layers": 3},
    {"method": "fedgraph", "options": {"share": "all", "keep_2": 0.3}, "model": "sage"},
    {"method": "fedgraph", "options": {"share": "none", "policy": "drawn"}},
    {"method": "fedgraph", "fanout": "2"},
]


def setup_of(graph: Graph, **options: Any) -> Setup:
    plain = {"clients": 3, "partition": "random", "hidden": 8, "rounds": 3, "block_size": 1}
    return prepare(make_config({**plain, **options}), graph)


def program(setup: Setup) -> Program:
    return program_of(setup.config, setup.schema, setup.method, setup.method_config)


@dataclass(frozen=True)
class Recorded:
    """A run by its program: what each silo was asked, and a worker that has done nothing yet."""

    asked: dict[str, list[bytes]]
    fresh: Callable[..., Responder]


def record(setup: Setup) -> Recorded:
    """Run over a session in which both ends hold each other to the program."""
    fed = setup.federation
    assert isinstance(fed, InProcess)
    blocks = {name: block.all for name, block in zip(fed.ids, fed._host.blocks, strict=True)}
    _, whole, _ = clients_of(setup.config, setup.parts, setup.cut.graph, torch.float32)
    agreed = program(setup)
    work = partial(most_work, setup.config, setup.method, setup.method_config)
    remote, links = session(
        whole, fed.route, setup.method_config, own_ops(), program=agreed, most_work=work
    )
    started = replace(setup, federation=remote, simulated=None, server_block=None)
    with shares_of_work() as shares:
        train(started, None, Silent(), first_snapshot(started), [], TrackerGroup(()))
    assert 0 < max(shares) < 0.1  # honest work stays far below its bound

    def fresh(name: str, *, rows: bool = True) -> Responder:
        worker = worker_of(blocks[name], setup.method_config, own_ops(), program=agreed, rows=rows)
        answer(worker, pack(Message(Type.START, TOKEN, 1, b"{}")))
        return worker

    return Recorded({name: link.requests[1:] for name, link in links.items()}, fresh)


def answer(worker: Responder, data: bytes) -> Message:
    return unpack(worker.answer(data))


def refused(found: Message) -> str | None:
    return str(found.facts()["reason"]) if found.type is Type.REFUSED else None


@pytest.mark.law(sample=12)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_run_by_its_program_is_the_run(
    make_graph: Callable[..., Graph], case: dict[str, Any]
) -> None:
    """Each call of each method is what its program says, with fields as it says, at both ends."""
    setup = setup_of(make_graph(60), **case)
    found = record(setup)
    for name, asked in found.asked.items():
        worker = found.fresh(name)
        for number, data in enumerate(asked, start=2):
            message = unpack(data)
            again = pack(Message(message.type, TOKEN, number, message.body))
            assert refused(answer(worker, again)) is None


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("method", ALIKE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounds_that_are_alike_have_messages_of_the_same_bytes(
    make_graph: Callable[..., Graph], method: str, dtype: torch.dtype
) -> None:
    setup = setup_of(make_graph(60), method=method, rounds=90)
    cfg, calls = setup.method_config, setup.method.calls
    assert calls is not None
    sizes = {bytes_of_steps(calls.round(cfg, t, Key.of(t)), dtype) for t in (1, 2, 3, 10, 90)}
    assert len(sizes) == 1


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("method", DEPLOYED)
def test_numbers_are_predicted_by_the_program(
    make_graph: Callable[..., Graph], method: str
) -> None:
    """A regression asks for sums and no histograms, and both ends hold each other to that."""
    graph = with_values(make_graph(60), 2, missing=0.2)
    setup = setup_of(graph, method=method, rounds=2, **little_work(method))
    found = record(setup)
    for name, asked in found.asked.items():
        worker = found.fresh(name)
        for number, data in enumerate(asked, start=2):
            message = unpack(data)
            again = pack(Message(message.type, TOKEN, number, message.body))
            assert refused(answer(worker, again)) is None


@pytest.mark.parametrize(
    ("options", "method", "names"),
    [
        ({}, FEDAVG, ()),
        ({"collect": 0.5}, FEDAVG, ("collect",)),
        ({"method": "bns"}, METHODS["bns"], ("bns",)),
        ({"method": "fedsageplus"}, METHODS["fedsageplus"], ("fedsageplus",)),
        ({"method": "fedsage_local"}, METHODS["fedsage_local"], ()),
        ({}, replace(FEDAVG, evaluate=AllSilos()), ("fedavg",)),  # its scores take sums of rows
    ],
)
def test_what_sends_rows_has_to_be_allowed(
    make_graph: Callable[..., Graph], options: dict[str, Any], method: Any, names: tuple[str, ...]
) -> None:
    setup = setup_of(make_graph(60), **{"method": "fedavg", **options})
    assert beyond_weights(setup.config, method, setup.method_config) == names


def late(first: int) -> Any:
    """FedAvg whose round `first` alone is one of a method that sends rows."""
    plain, rows = METHODS["fedavg"].calls, METHODS["bns"].calls
    assert plain is not None
    assert rows is not None

    def steps(cfg: Any, t: int, key: Key) -> Steps:
        return (
            rows.round(replace(cfg, options=METHODS["bns"].options()), t, key)
            if t == first
            else (plain.round(cfg, t, key))
        )

    return replace(FEDAVG, calls=replace(plain, round=steps))


@pytest.mark.parametrize(("first", "names"), [(2, ("fedavg",)), (9, ("fedavg",)), (10, ())])
def test_rows_of_later_rounds_are_found(
    make_graph: Callable[..., Graph], monkeypatch: pytest.MonkeyPatch, first: int, names: Any
) -> None:
    """Of the first and the last round that can be looked at; the bound is 9 rounds here."""
    setup = setup_of(make_graph(60), method="fedavg", rounds=20)
    each = len(list(calls_of(program(setup).steps(1))))
    monkeypatch.setattr(run_program, "MOST_LOOKED_AT", each * 11)  # set-up, the last and 9 rounds
    assert beyond_weights(setup.config, late(first), setup.method_config) == names


def test_rows_that_nobody_foresaw_do_not_leave(make_graph: Callable[..., Graph]) -> None:
    """A silo that agreed to a run without rows refuses the call, before the op is run."""
    setup = setup_of(make_graph(60), method="bns", rounds=1)
    found = record(setup)
    name, asked = next(iter(found.asked.items()))
    worker = found.fresh(name, rows=False)
    said = []
    for number, data in enumerate(asked, start=2):
        message = unpack(data)
        said.append(
            refused(answer(worker, pack(Message(message.type, TOKEN, number, message.body))))
        )
    first = next(line for line in said if line is not None)
    assert first.startswith("expected no rows of single nodes in a run that this silo agreed to")
    assert first.endswith("in round 1, whose reply has such rows")


def calls(asked: list[bytes]) -> list[bytes]:
    return [bytes(unpack(data).body) for data in asked if unpack(data).type is Type.CALL]


def changed(body: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    """A call that is not the next one: of another op, kind, key, round or with other fields."""
    call = read_call(body)
    envelope, inbox = decode(call.frame)
    match rng.choice(["op", "kind", "key", "round", "field", "shape", "dtype", "nan", "missing"]):
        case "op":
            return rng.choice(others)
        case "kind":
            kind = rng.choice([k for k in Kind if k is not envelope.kind])
            envelope = Envelope(envelope.op, kind, envelope.round, envelope.step)
        case "key":
            call = CallBody(call.op, Key(rng.getrandbits(64)), call.rows, call.frame)
        case "round":
            number = rng.choice([0, envelope.round + 1, 2**31 - 1])
            envelope = Envelope(envelope.op, envelope.kind, number, envelope.step)
        case "field":
            inbox["more"] = Shared(torch.zeros(3))
        case "shape":
            inbox = {
                n: Shared(torch.zeros(1, *f.t.shape, dtype=f.t.dtype)) for n, f in inbox.items()
            }
        case "dtype":
            inbox = {n: Shared(f.t.to(torch.float16)) for n, f in inbox.items()}
        case "nan":
            inbox = {
                n: Shared(torch.full_like(f.t, torch.nan) if f.t.is_floating_point() else f.t)
                for n, f in inbox.items()
            }
        case "missing":
            inbox.popitem() if inbox else None
    frame = encode(envelope, inbox, 0)
    return call_body(CallBody(call.op, call.key, call.rows, frame))


# Where a selector decides, a client may be passed over: what comes next is not one call alone.
EVERYBODY = [case for case in CASES if case["method"] != "fedacs"][:8]


@pytest.mark.parametrize("case", EVERYBODY, ids=str)
def test_a_call_that_is_not_the_next_one_is_refused(
    make_graph: Callable[..., Graph], case: dict[str, Any]
) -> None:
    """At every point of a run what is not the agreed call gets no reply and changes nothing."""
    found = record(setup_of(make_graph(60), **case, rounds=2, participation=1))
    name = next(iter(found.asked))
    bodies = calls(found.asked[name])
    rng, sequence, worker = random.Random(5), itertools.count(2), found.fresh(name)

    def ask(body: bytes) -> Message:
        return answer(worker, pack(Message(Type.CALL, TOKEN, next(sequence), body)))

    for body in bodies:
        for _ in range(4):
            wrong = changed(body, rng, bodies)
            if same(wrong, body):
                continue
            assert refused(ask(wrong)) is not None
        assert ask(body).type is Type.REPLY


def same(one: bytes, other: bytes) -> bool:
    """Whether two calls ask for the same; numbers of an inbox may differ."""
    a, b = read_call(one), read_call(other)
    (one_envelope, first), (other_envelope, second) = decode(a.frame), decode(b.frame)
    forms = [
        {
            n: (type(f), f.t.dtype, f.t.shape, bool(f.t.double().isfinite().all()))
            for n, f in p.items()
        }
        for p in (first, second)
    ]
    return (a.op, a.key, one_envelope.kind, one_envelope.round, forms[0]) == (
        b.op,
        b.key,
        other_envelope.kind,
        other_envelope.round,
        forms[1],
    )


def op_a(cfg: Any, block: Any, state: Any, inbox: Any, key: Any) -> Any:
    raise NotImplementedError


def op_b(cfg: Any, block: Any, state: Any, inbox: Any, key: Any) -> Any:
    raise NotImplementedError


KEY = Key.of(1)
A, B = Call(op_a, Kind.WEIGHTS, KEY), Call(op_b, Kind.CONTROL, KEY)


def course(*steps: Steps, rounds: int = 3) -> Course:
    return Course(Program((), lambda _: steps, rounds, {}))


def take(run: Course, number: int, op: Any, what: Kind, key: Key) -> None:
    _, after = run.find(number, op, what, key)
    run.advance(number, after)


def accepts(steps: Steps, word: str) -> bool:
    """Whether a course takes a word of ops as a whole round."""
    run = course(steps)
    try:
        for letter in word:
            call = {"a": A, "b": B}[letter]
            take(run, 1, call.op, call.what, KEY)
        run.check_whole()
    except ProtocolError:
        return False
    return True


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ((A, B), {"ab"}),
        ((A, Maybe(B)), {"a", "ab"}),
        ((Maybe((A, B)), B), {"b", "abb"}),
        ((Maybe(A), Maybe(B)), {"", "a", "b", "ab"}),
        ((A, (), (Maybe(A), B)), {"ab", "aab"}),
        (Either((A, B), B), {"ab", "b"}),
        (Either((A, Maybe(B)), Maybe(B)), {"", "a", "ab", "b"}),
        (Repeat((A, Maybe(B)), 0), {""}),
        (Repeat((A, Maybe(B)), 2), {"", "a", "ab", "aa", "aab", "aba", "abab"}),
        ((Repeat(A, 3), B), {"b", "ab", "aab", "aaab"}),
    ],
)
def test_the_words_of_a_program(steps: Steps, words: set[str]) -> None:
    """All words up to four letters: exactly those that the steps spell."""
    every = ("".join(w) for n in range(5) for w in itertools.product("ab", repeat=n))
    assert {word for word in every if (word or can_end(steps)) and accepts(steps, word)} == words
    letters = {"a": op_a, "b": op_b}
    assert {call.op for call in calls_of(steps)} == {letters[c] for word in words for c in word}


def test_steps_repeated_a_billion_times_cost_what_a_few_cost() -> None:
    """So no config makes a silo's program long."""
    run = course(A, Repeat(B, 10**9))
    take(run, 1, op_a, Kind.WEIGHTS, KEY)
    for _ in range(20):
        take(run, 1, op_b, Kind.CONTROL, KEY)
    assert len(list(calls_of(Repeat(B, 10**9)))) == 1


def test_what_is_not_agreed_is_refused_by_name() -> None:
    run = course(A, Maybe(B))
    with pytest.raises(
        ProtocolError,
        match=r"^expected test_program.op_a \(weights\) in round 1, as "
        r"agreed, got test_program.op_b \(control\)$",
    ):
        take(run, 1, op_b, Kind.CONTROL, KEY)
    with pytest.raises(ProtocolError, match=r"got test_program.op_a \(features\)"):
        take(run, 1, op_a, Kind.FEATURES, KEY)
    with pytest.raises(ProtocolError, match="the key that the config's seed gives, got another"):
        take(run, 1, op_a, Kind.WEIGHTS, Key.of(2))
    take(run, 1, op_a, Kind.WEIGHTS, KEY)
    with pytest.raises(ProtocolError, match=r"op_b \(control\) or the next round in round 1"):
        take(run, 1, op_a, Kind.WEIGHTS, KEY)


def test_rounds_follow_each_other() -> None:
    run = course(A)
    with pytest.raises(ProtocolError, match="expected calls of round 1, got one of 2"):
        take(run, 2, op_a, Kind.WEIGHTS, KEY)
    with pytest.raises(ProtocolError, match="expected a round up to 3, got 4"):
        take(run, 4, op_a, Kind.WEIGHTS, KEY)
    take(run, 1, op_a, Kind.WEIGHTS, KEY)
    take(run, 2, op_a, Kind.WEIGHTS, KEY)
    with pytest.raises(ProtocolError, match="expected round 2 or a later one, got 1"):
        take(run, 1, op_a, Kind.WEIGHTS, KEY)
    half = course(A, B)
    take(half, 1, op_a, Kind.WEIGHTS, KEY)
    with pytest.raises(ProtocolError, match=r"expected test_program.op_b .* before round 1 is"):
        take(half, 2, op_a, Kind.WEIGHTS, KEY)


def test_rounds_in_which_nothing_has_to_happen_may_be_passed_over() -> None:
    run = course(Maybe(A))
    take(run, 3, op_a, Kind.WEIGHTS, KEY)


def test_a_client_that_was_away_goes_on_with_the_others() -> None:
    run = course(A)
    take(run, 1, op_a, Kind.WEIGHTS, KEY)
    run.jump_to(1)
    take(run, 3, op_a, Kind.WEIGHTS, KEY)  # round 2 was done without it
    with pytest.raises(ProtocolError, match="expected round 3 or a later one, got 2"):
        take(run, 2, op_a, Kind.WEIGHTS, KEY)


def test_a_round_is_not_begun_without_end() -> None:
    run = course(A)
    for _ in range(MOST_TIMES):
        take(run, 1, op_a, Kind.WEIGHTS, KEY)
        run.jump_to(0)
    with pytest.raises(ProtocolError, match=f"expected round 1 at most {MOST_TIMES} times"):
        take(run, 1, op_a, Kind.WEIGHTS, KEY)


EXTENT = Extent(1, torch.float32, {SLOTS: [4], BOUNDARY: [3]})


def ragged(t: torch.Tensor) -> Ragged:
    return Ragged(t, torch.tensor([0, len(t)]))


@pytest.mark.parametrize(
    ("spec", "field", "message"),
    [
        (FieldSpec(Shared, (2,)), Stacked(torch.zeros(1, 2)), "a Shared field, got Stacked"),
        (FieldSpec(Shared, (2,)), Shared(torch.zeros(2).double()), "dtype torch.float32, got"),
        (FieldSpec(Shared, (2,)), Shared(torch.zeros(1, 2)), r"shape \(2\), got \(1, 2\)"),
        (
            FieldSpec(Shared, (2, None)),
            Shared(torch.zeros(3, 5)),
            r"shape \(2, any\), got \(3, 5\)",
        ),
        (
            FieldSpec(Stacked, (2,)),
            Stacked(torch.zeros(2, 2)),
            "a slice for each of 1 cl",
        ),
        (FieldSpec(Ragged, (2,), rows=SLOTS), ragged(torch.zeros(3, 2)), "4 rows, got 3"),
        (
            FieldSpec(Ragged, (2,), rows=SLOTS, fewer=True),
            ragged(torch.zeros(5, 2)),
            "at most 4 rows, got 5",
        ),
        (FieldSpec(Ragged, (2,), rows="own/b"), ragged(torch.zeros(5, 2)), "2 rows, got 5"),
        (FieldSpec(Ragged, (2,), rows="inbox/c"), ragged(torch.zeros(5, 2)), "1 rows, got 5"),
        (FieldSpec(Ragged, (2,), rows="marked/b"), ragged(torch.zeros(2, 2)), "0 rows, got 2"),
        (FieldSpec(Ragged, (2,), rows="state/d"), ragged(torch.zeros(2, 2)), "'d' beside its rows"),
        (FieldSpec(Shared, (2,)), Shared(torch.tensor([0, torch.inf])), "finite numbers, got NaN"),
        (FieldSpec(Shared, (2,)), Shared(torch.tensor([torch.nan, 0])), "finite numbers, got NaN"),
        (exactly(3), Shared(torch.tensor(2, dtype=torch.int32)), "values from 3, got 2"),
        (exactly(3), Shared(torch.tensor(4, dtype=torch.int32)), "values up to 3, got 4"),
        (places(SLOTS), ragged(torch.tensor([0, 4]).int()), "places that exist, got others"),
        (places(SLOTS), ragged(torch.tensor([-1, 2]).int()), "places that exist, got others"),
        (places(SLOTS), ragged(torch.tensor([2, 2]).int()), "ascending places, each once"),
        (places(BOUNDARY), ragged(torch.tensor([1, 0]).int()), "ascending places, each once"),
        (
            FieldSpec(Ragged, (), rows=SLOTS),
            Ragged(torch.zeros(4), torch.tensor([0, 2])),
            "a run of rows for each of 1 clients",
        ),
    ],
)
def test_what_a_field_must_be(spec: FieldSpec, field: Any, message: str) -> None:
    others = FieldSpec(Ragged, (), rows="none")
    fields = {"a": field, "b": ragged(torch.zeros(2))}
    inbox = {"c": ragged(torch.zeros(1))}
    with pytest.raises(ProtocolError, match=rf"^expected {message}.* for 'a' in here$"):
        check_against(
            fields, {"a": spec, "b": others}, EXTENT, "here", others={"inbox": inbox}, finite=True
        )


def test_large_finite_numbers_are_finite() -> None:
    """Their sum is not."""
    t = torch.full((3,), torch.finfo(torch.float32).max)
    specs = {"a": FieldSpec(Shared, (3,))}
    check_against({"a": Shared(t)}, specs, EXTENT, "here", finite=True)


def test_fields_that_are_missing_or_too_many() -> None:
    specs = {"a": FieldSpec(Shared), "b": FieldSpec(Shared)}
    with pytest.raises(ProtocolError, match="expected 'b', got none in here"):
        check_against({"a": Shared(torch.zeros(()))}, specs, EXTENT, "here")
    fields = {n: Shared(torch.zeros(())) for n in "abc"}
    with pytest.raises(ProtocolError, match="expected no field 'c' in here"):
        check_against(fields, specs, EXTENT, "here")
