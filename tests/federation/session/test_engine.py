"""The session engine next to the in-process one, and what it does with silos that fail."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from mistakes import raises_code
from sessions import TOKEN, DirectLink, session, table, worker_of
from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Ragged, Shared, Stacked, State
from silograph.core.work import report_each, report_rows, work_for
from silograph.exchange.rows import relay_sum
from silograph.federation.base import AwayError, Gather, Reduce, Sum, WeightedMean
from silograph.federation.frame import decode, encode
from silograph.federation.in_process import InProcess
from silograph.federation.session.engine import TRIES, Session
from silograph.federation.session.events import Cause
from silograph.federation.session.hub import say_goodbye
from silograph.federation.session.message import Type, pack, read_call, read_reply, unpack
from silograph.federation.session.peer import Arrived, LostError, Peer
from silograph.federation.session.responder import Responder
from silograph.graph.block.block import ClientBlock, Route

Built = tuple[ClientBlock, Route]
KEY = Key.of(3)


def begin(cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key) -> Any:
    return {"n": Stacked(torch.zeros(block.num_clients))}, {}


def work(cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key) -> Any:
    """Sums of features with noise, some work of the call's kind and some of another."""
    noise = key.uniform(block.row_key, 2).to(block.x.dtype)  # type: ignore[union-attr]
    sums = torch.zeros(block.num_clients, 2, dtype=noise.dtype)
    sums.index_add_(0, block.client, noise * inbox["scale"].t)
    report_rows(block.off, 3)
    with work_for(Kind.EVALUATION):
        report_each(5)
    n = state["n"].t + 1
    nodes = block.off.diff().to(noise.dtype)
    return {"n": Stacked(n)}, {"sum": Stacked(sums), "nodes": Stacked(nodes), "n": Stacked(n)}


def send_rows(cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key) -> Any:
    ones = torch.ones(block.halo.adj.num_cols, 1)
    return state, {"rows": Ragged(ones, block.halo.off)}


def take_sums(cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key) -> Any:
    return {**state, "sum": inbox["sum"]}, {}


def foreign(cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key) -> Any:
    return state, {}


OPS = table(begin, work, send_rows, take_sums)
SCALE: Payload = {"scale": Shared(torch.tensor(0.7, dtype=torch.float64))}
REDUCES: list[Reduce | None] = [None, Sum(), WeightedMean("nodes")]


@pytest.fixture
def built(make_graph: Callable[..., Any], cut_block: Callable[..., Built]) -> Built:
    return cut_block(make_graph(40), 4)


def played(fed: Session | InProcess) -> list[dict[str, torch.Tensor]]:
    found = []
    fed.call(begin, {}, what=Kind.CONTROL, key=KEY)
    for t in (1, 2):
        fed.start_round(t)
        for reduce in REDUCES:
            for to in (None, [fed.ids[1], fed.ids[3]]):
                reply = fed.call(work, SCALE, what=Kind.WEIGHTS, key=KEY, to=to, reduce=reduce)
                found.append({name: field.t for name, field in reply.items()})
        relay_sum(fed, send_rows, take_sums, what=Kind.PARTIAL_SUMS, key=KEY)
    return found


@pytest.mark.parametrize("early", [True, False])
def test_sums_can_be_those_of_who_is_there(built: Built, early: bool) -> None:
    """Owners get what the others know of their rows, as if who is away had sent zeros."""
    fed, links = session(*built, None, OPS, least=1)
    how: dict[str, Any] = {"what": Kind.PARTIAL_SUMS, "key": KEY}
    lost, position = fed.ids[2], 2
    links[lost].change = lambda _: None
    if early:
        fed.call(begin, {}, what=Kind.EVALUATION, key=KEY)
        assert fed.away == (lost,)
    relay_sum(fed, send_rows, take_sums, **how, allow_missing=True)
    assert fed.away == (lost,)
    route = built[1]
    slots = torch.arange(len(route.target))
    theirs = (slots < route.slot_off[position]) | (slots >= route.slot_off[position + 1])
    expected = route.target[theirs].bincount(minlength=int(route.boundary_off[-1])).double()
    assert not torch.equal(expected, route.target.bincount(minlength=len(expected)).double())
    for c, name in enumerate(fed.ids):
        if name != lost:
            mine = slice(int(route.boundary_off[c]), int(route.boundary_off[c + 1]))
            got = links[name].worker._state["sum"].t[:, 0].double()
            assert torch.equal(got, expected[mine])
    for name in fed.ids:
        links[name].change = lambda _: None
    relay_sum(fed, send_rows, take_sums, **how, allow_missing=True)  # nobody is there
    assert set(fed.away) == set(fed.ids)


@pytest.mark.parametrize("together", [1, 2, 3])
def test_answers_are_read_some_together(
    built: Built, monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    """However many are, the same silos are dropped, and sums have the same bits."""

    def answers() -> tuple[torch.Tensor, tuple[str, ...]]:
        fed, links = session(*built, None, OPS, least=1)
        fed.call(begin, {}, what=Kind.CONTROL, key=KEY)
        links[fed.ids[0]].change = lambda _: b"garbage"
        links[fed.ids[2]].change = lambda _: None
        reply = fed.call(work, SCALE, what=Kind.WEIGHTS, key=KEY, reduce=Sum())
        return reply["sum"].t, fed.away

    expected, away = answers()
    monkeypatch.setattr("silograph.federation.session.engine.READ_TOGETHER", together)
    got, also_away = answers()
    assert torch.equal(got, expected)
    assert away == also_away == (built[0].ids[0], built[0].ids[2])


def test_both_engines_give_the_same_bits_and_the_same_ledger(built: Built) -> None:
    block, route = built
    remote, links = session(block, route, None, OPS)
    here = InProcess(None, block, route, 1)
    for ours, theirs in zip(played(remote), played(here), strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert remote.ledger.records == here.ledger.records
    assert remote.states() == ()
    assert (remote.ids, remote.route) == (here.ids, here.route)
    for position, link in enumerate(links.values()):  # the ledger's bytes are the frames'
        calls = [m for m in map(unpack, link.requests) if m.type is Type.CALL]
        assert [len(read_call(call.body).frame) for call in calls] == [
            int(r.bytes[r.clients == position].item())
            for r in remote.ledger.records
            if r.direction == "down" and position in r.clients
        ]


def test_rules_are_those_of_the_other_engine(built: Built) -> None:
    block, route = built
    fed, _ = session(block, route, None, OPS)
    fed.call(begin, {}, what=Kind.CONTROL, key=KEY)
    with pytest.raises(ProtocolError, match="expected clients of this federation, got 'x'"):
        fed.call(work, SCALE, what=Kind.WEIGHTS, key=KEY, to=["x"])
    with pytest.raises(ProtocolError, match="expected an op of silograph's own modules"):
        fed.call(foreign, {}, what=Kind.CONTROL, key=KEY)
    with pytest.raises(ProtocolError, match=r"expected .* for 'scale' in inbox of work"):
        fed.call(work, {"scale": Stacked(torch.zeros(3))}, what=Kind.WEIGHTS, key=KEY)


def test_an_op_that_breaks_a_rule_fails_the_call(built: Built) -> None:
    block, route = built
    fed, _ = session(block, route, None, OPS)
    fed.call(begin, {}, what=Kind.CONTROL, key=KEY)
    with pytest.raises(ProtocolError, match="rows cross by relay_sum, pull or publish only"):
        fed.call(send_rows, {}, what=Kind.CONTROL, key=KEY)


def changed(change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> Callable[[bytes], bytes]:
    """Change the fields of a reply on its way."""

    def apply(data: bytes) -> bytes:
        message = unpack(data)
        if message.type is not Type.REPLY:
            return data
        _, frame = read_reply(message.body)
        head = bytes(message.body)[: len(message.body) - len(frame)]
        envelope, fields = decode(frame)
        body = head + encode(envelope, change(fields), 0)
        return pack(replace(message, body=body))

    return apply


def with_field(name: str, t: torch.Tensor) -> Callable[[bytes], bytes]:
    return changed(lambda fields: {**fields, name: Stacked(t)})


def other_call(data: bytes) -> bytes:
    message = unpack(data)
    if message.type is not Type.REPLY:
        return data
    _, frame = read_reply(message.body)
    head = bytes(message.body)[: len(message.body) - len(frame)]
    envelope, fields = decode(frame)
    return pack(replace(message, body=head + encode(replace(envelope, step=99), fields, 0)))


NAN = float("nan")
FAULTS: dict[str, tuple[Callable[[bytes], bytes | None], str]] = {
    "gone": (lambda data: None, "the end of the stream"),
    "garbage": (lambda data: b"\x00" * 50, "expected a message that starts with"),
    "cut short": (lambda data: data[:-3], "bytes of values by the header"),
    "empty": (lambda data: b"", "expected a message of"),
    "other run": (lambda data: pack(replace(unpack(data), token=bytes(16))), "of this run, got"),
    "repeated": (lambda data: pack(replace(unpack(data), sequence=1)), "got 1: repeated or lost"),
    "no reply": (lambda data: pack(replace(unpack(data), type=Type.DONE)), "expected REPLY"),
    "of another call": (other_call, "expected a reply of work"),
    "NaN": (with_field("sum", torch.tensor([[NAN, 1.0]], dtype=torch.float64)), "NaN or infinity"),
    "shape": (with_field("sum", torch.zeros(1, 3, dtype=torch.float64)), "fields unlike those"),
    "dtype": (with_field("sum", torch.zeros(1, 2)), "fields unlike those"),
    "another field": (with_field("x", torch.zeros(1)), "fields unlike those"),
    "rows": (
        changed(lambda f: {**f, "x": Ragged(torch.zeros(2), torch.tensor([0, 2]))}),
        "got Ragged",
    ),
    "shared": (changed(lambda f: {**f, "x": Shared(torch.zeros(2))}), "got Shared"),
}

CAUSES = {"gone": "gone", "NaN": "not_finite"}
CAUSES |= dict.fromkeys(("shape", "dtype", "another field"), "unlike")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_silo_that_fails_is_left_out_of_the_mean(
    built: Built, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    block, route = built
    fed, links = session(block, route, None, OPS, least=2)
    fed.call(begin, {}, what=Kind.CONTROL, key=KEY)
    fed.start_round(1)
    lost = fed.ids[0]
    links[lost].change, says = FAULTS[fault]
    reply = fed.call(work, SCALE, what=Kind.WEIGHTS, key=KEY, reduce=WeightedMean("nodes"))

    rest = InProcess(None, block.take(torch.tensor([1, 2, 3])), route, 1)
    rest.call(begin, {}, what=Kind.CONTROL, key=KEY)
    left = rest.call(work, SCALE, what=Kind.WEIGHTS, key=KEY, reduce=WeightedMean("nodes"))
    assert all(torch.equal(reply[name].t, left[name].t) for name in left)
    (record,) = [r for r in caplog.records if getattr(r, "event", None) == "dropped"]
    line, told = record.getMessage(), vars(record)
    assert (told["event"], told["silo"], told["round"], told["op"]) == ("dropped", lost, 1, "work")
    assert told["cause"] == CAUSES.get(fault, "garbage")
    assert line.startswith(f"round 1 has lost {lost}: expected")
    assert says in line
    assert links[lost].closed
    down, up = [r for r in fed.ledger.records if r.round == 1][:2]
    assert (list(down.clients), list(up.clients)) == ([0, 1, 2, 3], [1, 2, 3])

    counts = fed.call(work, SCALE, what=Kind.EVALUATION, key=KEY)  # who is gone counts nothing
    assert counts["nodes"].t[0] == 0
    assert torch.equal(counts["nodes"].t[1:], block.off.diff()[1:].double())


def test_what_is_gathered_goes_on_without_a_silo(built: Built) -> None:
    block, route = built
    fed, links = session(block, route, None, OPS, least=2)
    here = InProcess(None, block, route, 2)
    reduce = Gather("nodes", fold=WeightedMean("nodes"))
    for engine in (fed, here):
        engine.call(begin, {}, what=Kind.CONTROL, key=KEY)
        engine.start_round(1)
    found, expected = (
        engine.call(work, SCALE, what=Kind.WEIGHTS, key=KEY, reduce=reduce)
        for engine in (fed, here)
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].t, expected[name].t) for name in expected)
    assert fed.ledger.records == here.ledger.records

    links[fed.ids[0]].change = lambda data: None
    found = fed.call(work, SCALE, what=Kind.WEIGHTS, key=KEY, reduce=reduce)
    assert found["by_client/answered"].t.tolist() == [False, True, True, True]
    assert found["by_client/nodes"].t[0] == 0
    assert torch.equal(found["by_client/nodes"].t[1:], expected["by_client/nodes"].t[1:])
    for name in fed.ids[1:3]:
        links[name].change = lambda data: None
    with raises_code(
        ProtocolError,
        "too-few-silos",
        expected=2,
        got=1,
        missing=["client_00", "client_01", "client_02"],
    ):
        fed.call(work, SCALE, what=Kind.WEIGHTS, key=KEY, reduce=reduce)


def test_a_round_needs_its_least_number_of_silos(built: Built) -> None:
    block, route = built
    fed, links = session(block, route, None, OPS, least=3)
    fed.call(begin, {}, what=Kind.CONTROL, key=KEY)
    fed.start_round(1)
    for name in fed.ids[:2]:
        links[name].change = lambda data: None
    with pytest.raises(
        ProtocolError,
        match=f"expected at least 3 silos to answer work, got 2; {fed.ids[0]}: expected an answer, "
        rf"got the end of the stream: it is gone; {fed.ids[1]}: ",
    ):
        fed.call(work, SCALE, what=Kind.WEIGHTS, key=KEY, reduce=Sum())


def test_what_is_no_sum_needs_all_silos(built: Built) -> None:
    block, route = built
    for op, rows in ((work, False), (send_rows, True)):
        fed, links = session(block, route, None, OPS, least=1)
        fed.call(begin, {}, what=Kind.CONTROL, key=KEY)
        links[fed.ids[2]].change = lambda data: None
        with pytest.raises(
            ProtocolError,
            match=f"expected all silos to answer {op.__name__}, whose replies are no sums, got "
            f"none from {fed.ids[2]}: ",
        ):
            fed.call(op, SCALE, what=Kind.CONTROL, key=KEY, rows=rows)


def test_training_that_diverges_everywhere_is_no_fault_of_silos(built: Built) -> None:
    block, route = built
    fed, _ = session(block, route, None, OPS, least=1)
    fed.call(begin, {}, what=Kind.CONTROL, key=KEY)
    infinite: Payload = {"scale": Shared(torch.tensor(NAN, dtype=torch.float64))}
    reply = fed.call(work, infinite, what=Kind.WEIGHTS, key=KEY, reduce=WeightedMean("nodes"))
    assert bool(reply["sum"].t.isnan().all())
    assert len(fed.call(work, SCALE, what=Kind.CONTROL, key=KEY)["n"].t) == 4  # all still there


def test_a_silo_comes_back_with_the_state_it_had(built: Built) -> None:
    """It misses round 2 after having worked in it; `n` counts the rounds that a silo saw."""
    block, route = built
    back: dict[str, Peer] = {}

    def returned() -> Mapping[str, Peer]:
        found = dict(back)
        back.clear()
        return found

    fed, links = session(block, route, None, OPS, least=1, returned=returned)
    lost = fed.ids[1]
    fed.call(begin, {}, what=Kind.CONTROL, key=KEY)
    seen = []
    for t in (1, 2, 3, 4):
        fed.start_round(t)
        links[lost].change = (lambda data: None) if t == 2 else (lambda data: data)
        fed.call(work, SCALE, what=Kind.WEIGHTS, key=KEY, reduce=Sum())
        seen.append(fed.call(work, SCALE, what=Kind.EVALUATION, key=KEY)["n"].t.tolist())
        if t == 2:
            worker = links[lost].worker
            worker.attach()
            again = Peer(lost, DirectLink(worker), TOKEN)
            again.ask(Type.START, {}, None)
            back[lost] = again
    assert seen == [[2, 2, 2, 2], [4, 0, 4, 4], [6, 4, 6, 6], [8, 6, 8, 8]]


def test_a_silo_without_its_state_stays_out(built: Built, caplog: pytest.LogCaptureFixture) -> None:
    block, route = built
    new = Peer(block.ids[1], DirectLink(worker_of(block.take(torch.tensor([1])), None, OPS)), TOKEN)
    new.ask(Type.START, {}, None)
    given = [{}, {}, {block.ids[1]: new}]
    fed, links = session(block, route, None, OPS, least=1, returned=lambda: given.pop(0))
    fed.call(begin, {}, what=Kind.CONTROL, key=KEY)
    for t in (1, 2, 3):
        fed.start_round(t)
        links[block.ids[1]].change = (lambda data: None) if t == 2 else (lambda data: data)
        fed.call(work, SCALE, what=Kind.WEIGHTS, key=KEY, reduce=Sum())
    assert f"{block.ids[1]} is back, but cannot take part: expected the silo's state" in caplog.text


def test_a_run_goes_on_from_a_round(built: Built) -> None:
    block, route = built
    fed, _ = session(block, route, None, OPS)
    fed.call(begin, {}, what=Kind.CONTROL, key=KEY)
    for t in (1, 2):
        fed.start_round(t)
        fed.call(work, SCALE, what=Kind.WEIGHTS, key=KEY, reduce=Sum())
        fed.keep(t, ())
        records = fed.ledger.records
    fed.start_round(3)
    lost = fed.call(work, SCALE, what=Kind.WEIGHTS, key=KEY, reduce=Sum())
    expected = fed.ledger.records
    fed.restore(2, (), records)
    assert fed.ledger.records == records
    fed.start_round(3)
    again = fed.call(work, SCALE, what=Kind.WEIGHTS, key=KEY, reduce=Sum())
    assert torch.equal(again["n"].t, lost["n"].t)
    assert fed.ledger.records == expected
    with pytest.raises(ProtocolError, match=r"expected client_\d+ to go on, got: expected the"):
        fed.restore(7, (), records)


class Returning:
    """Gives silos back when it is asked, with the workers that they had or with new ones."""

    def __init__(self) -> None:
        self.back: dict[str, Responder] = {}

    def __call__(self) -> Mapping[str, Peer]:
        found = {}
        for name, worker in self.back.items():
            worker.attach()
            found[name] = Peer(name, DirectLink(worker), TOKEN)
            found[name].ask(Type.START, {}, None)
        self.back.clear()
        return found


@pytest.mark.parametrize("lost", [[1], [0, 3], [0, 1, 2, 3]], ids=str)
def test_a_round_is_done_again_once_silos_are_back(built: Built, lost: list[int]) -> None:
    """Silos 1 and 3 see round 2 only: the others come back with an older state."""
    block, route = built
    returned = Returning()
    fed, links = session(block, route, None, OPS, returned=returned, patience=30)
    here = InProcess(None, block, route, 1)
    few = [fed.ids[1], fed.ids[3]]

    def part(fed: Session | InProcess, number: int) -> Payload:
        fed.start_round(number)
        fed.call(work, SCALE, what=Kind.WEIGHTS, key=KEY, to=few if number == 2 else None)
        return fed.call(
            work,
            SCALE,
            what=Kind.WEIGHTS,
            key=KEY,
            reduce=Sum(),
            to=few if number == 2 else None,
        )

    for each in (fed, here):
        each.call(begin, {}, what=Kind.CONTROL, key=KEY)
        part(each, 1)
        part(each, 2)
    for c in lost:
        answers = iter([lambda data: data, lambda data: None])  # the second answer of the round
        links[fed.ids[c]].change = lambda data, answers=answers: next(answers)(data)  # type: ignore[misc]
    with pytest.raises(AwayError) as failure:
        part(fed, 3)
    assert failure.value.names == tuple(fed.ids[c] for c in lost)
    assert failure.value.needed == len(lost)
    returned.back = {fed.ids[c]: links[fed.ids[c]].worker for c in lost}
    fed.rejoin(failure.value)
    ours, theirs = part(fed, 3), part(here, 3)
    assert all(torch.equal(ours[name].t, theirs[name].t) for name in theirs)
    assert fed.ledger.records == here.ledger.records


def test_silos_that_do_not_come_back(built: Built) -> None:
    block, route = built
    for patience, says in ((0.0, "it is gone$"), (0.3, "it is gone; not back within 0.3 s")):
        fed, links = session(block, route, None, OPS, patience=patience)
        links[fed.ids[2]].change = lambda data: None
        with pytest.raises(AwayError) as failure:
            fed.call(begin, {}, what=Kind.CONTROL, key=KEY, reduce=Sum())
        with pytest.raises(ProtocolError, match=f"expected at least 4 silos to .*{says}"):
            fed.rejoin(failure.value)


def test_silos_that_come_back_without_their_state(built: Built) -> None:
    block, route = built
    returned = Returning()
    fed, links = session(block, route, None, OPS, returned=returned, patience=30)
    fed.call(begin, {}, what=Kind.CONTROL, key=KEY)
    fed.start_round(1)
    links[fed.ids[2]].change = lambda data: None
    with pytest.raises(AwayError) as failure:
        fed.call(work, SCALE, what=Kind.WEIGHTS, key=KEY, reduce=Sum())
    returned.back = {fed.ids[2]: worker_of(block.take(torch.tensor([2])), None, OPS)}
    with pytest.raises(
        ProtocolError,
        match=f"expected silos to come back with their states, got {fed.ids[2]}: expected the "
        "silo's state of round 0, got none",
    ):
        fed.rejoin(failure.value)


def test_a_round_is_not_done_again_forever(built: Built) -> None:
    block, route = built
    fed, _ = session(block, route, None, OPS, patience=30)
    fed.call(begin, {}, what=Kind.CONTROL, key=KEY)
    away = AwayError("expected an answer", fed.ids[:1], 1)
    for t in (1, 2):
        fed.start_round(t)
        for _ in range(TRIES):
            fed.rejoin(away)  # back at once, each time
        with pytest.raises(AwayError, match="expected an answer"):
            fed.rejoin(away)


def test_a_silo_that_refuses_is_not_waited_for(built: Built) -> None:
    block, route = built
    fed, links = session(block, route, None, OPS, patience=30)
    fed.start_round(1)
    links[fed.ids[0]].change = lambda data: b"garbage"
    with pytest.raises(ProtocolError) as failure:
        fed.call(begin, {}, what=Kind.CONTROL, key=KEY, reduce=Sum())
    assert not isinstance(failure.value, AwayError)


def test_a_round_counts_once_silos_have_written_it_down(built: Built) -> None:
    block, route = built
    fed, links = session(block, route, None, OPS, least=3)
    fed.call(begin, {}, what=Kind.CONTROL, key=KEY)
    links[fed.ids[0]].change = lambda data: None
    fed.keep(0, ())
    assert fed.ids[0] not in fed.peers
    links[fed.ids[1]].change = lambda data: b"garbage"
    with pytest.raises(
        ProtocolError, match=r"expected at least 3 silos to write round 1 down, got 2; client_00: "
    ) as failure:
        fed.keep(1, ())
    assert isinstance(failure.value, AwayError)  # the first may be back


def test_late_silos_share_one_deadline(
    built: Built, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A clock that only waiting moves: three late silos take as long as one."""
    block, route = built
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    fed, links = session(block, route, None, OPS, least=1, seconds=5.0)
    fed.call(begin, {}, what=Kind.CONTROL, key=KEY)

    def late(seconds: float | None) -> Arrived:
        assert seconds is not None
        clock[0] += seconds
        raise LostError("expected an answer, got none", Cause.LATE)

    for name in fed.ids[1:]:
        monkeypatch.setattr(links[name], "receive", late)
    fed.call(work, SCALE, what=Kind.WEIGHTS, key=KEY, reduce=Sum())
    assert clock[0] == 5.0
    says = "has lost client_0[123]: expected its answers of a round within 5 s, got too few\n"
    assert len(re.findall(says, caplog.text)) == 3
    assert list(fed.peers) == [fed.ids[0]]


def test_a_silo_has_so_many_seconds_for_all_its_answers_of_a_round(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two seconds an answer are in time for two calls of a round, not for three.

    Who is quick has the whole time left, although its answers are looked at after the slow one's.
    """
    block, route = built
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    fed, links = session(block, route, None, OPS, least=1, seconds=5.0)
    slow, quick = links[fed.ids[0]], fed.ids[1:]
    left: list[float | None] = []

    def slowly(seconds: float | None) -> Arrived:
        assert seconds is not None
        clock[0] += min(2.0, seconds)
        if seconds < 2:
            raise LostError("expected an answer, got none", Cause.LATE)
        arrived = slow.answers.popleft()
        assert arrived is not None
        return Arrived(arrived.data, clock[0])

    def quickly(seconds: float | None, receive: Any = links[quick[0]].receive) -> Any:
        left.append(seconds)
        return receive(seconds)

    fed.call(begin, {}, what=Kind.CONTROL, key=KEY)
    monkeypatch.setattr(slow, "receive", slowly)
    monkeypatch.setattr(links[quick[0]], "receive", quickly)
    for number in (1, 2):
        fed.start_round(number)
        for _ in range(2):
            fed.call(work, SCALE, what=Kind.WEIGHTS, key=KEY, reduce=Sum())
    assert list(fed.peers) == list(fed.ids)
    fed.call(work, SCALE, what=Kind.WEIGHTS, key=KEY, reduce=Sum())
    assert tuple(fed.peers) == quick
    assert clock[0] == 9.0
    assert left == [3.0, 3.0, 3.0, 3.0, 4.0]  # of 5, less what was waited for the slow one


def test_a_silo_hears_why_it_is_dropped(built: Built, caplog: pytest.LogCaptureFixture) -> None:
    block, route = built
    fed, links = session(block, route, None, OPS, least=1)
    fed.call(begin, {}, what=Kind.CONTROL, key=KEY)
    fed.start_round(1)
    links[fed.ids[1]].change = lambda data: b"garbage"
    links[fed.ids[2]].change = lambda data: None  # its stream has ended: there is nobody to tell
    fed.call(work, SCALE, what=Kind.WEIGHTS, key=KEY, reduce=Sum())
    types = {name: unpack(link.requests[-1]).type for name, link in links.items()}
    assert types == {fed.ids[i]: Type.DISMISSED if i == 1 else Type.CALL for i in range(4)}
    assert all(links[fed.ids[i]].closed for i in (1, 2))
    said = [r.getMessage() for r in caplog.records if "got 7" in r.getMessage()]
    reason = "expected a message of 29 to 1073741824 bytes, got 7"
    assert said == [
        f"round 1 has lost {fed.ids[1]}: {reason}",
        f"the server goes on without this silo: {reason}",
    ]


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_silos_that_differ_nobody_knows_who_is_wrong(
    make_graph: Callable[..., Any],
    cut_block: Callable[..., Built],
    caplog: pytest.LogCaptureFixture,
    first: int,
) -> None:
    block, route = cut_block(make_graph(40), 2)
    fed, links = session(block, route, None, OPS, least=1)
    fed.call(begin, {}, what=Kind.CONTROL, key=KEY)
    links[fed.ids[first]].change = with_field("sum", torch.zeros(1, 7))
    with pytest.raises(ProtocolError, match="expected at least 1 silo to answer work, got 0; "):
        fed.call(work, SCALE, what=Kind.WEIGHTS, key=KEY, reduce=Sum())
    says = "has lost client_0[01]: expected .* got one with fields unlike those of the others\n"
    assert len(re.findall(says, caplog.text)) == 2


def test_a_silo_with_a_weight_below_zero_is_dropped(
    built: Built, caplog: pytest.LogCaptureFixture
) -> None:
    block, route = built
    fed, links = session(block, route, None, OPS, least=3)
    fed.call(begin, {}, what=Kind.CONTROL, key=KEY)
    links[fed.ids[2]].change = with_field("nodes", torch.tensor([-1.0]).double())
    fed.call(work, SCALE, what=Kind.WEIGHTS, key=KEY, reduce=WeightedMean("nodes"))
    assert fed.ids[2] not in fed.peers
    assert "expected a weight of at least 0 from work, got less" in caplog.text


def test_the_end_is_told(built: Built, caplog: pytest.LogCaptureFixture) -> None:
    block, route = built
    fed, links = session(block, route, None, OPS)
    links[fed.ids[0]].change = lambda data: None
    say_goodbye(fed.peers, "diverged")
    assert [link.worker.ended for link in links.values()] == ["diverged"] * 4
    assert all(link.closed for link in links.values())
    assert f"{fed.ids[0]} did not hear the last message" in caplog.text


def test_a_stop_is_told_and_ends_no_run(built: Built) -> None:
    block, route = built
    fed, links = session(block, route, None, OPS)
    say_goodbye(fed.peers, None)
    assert all(link.worker.stopped and link.closed for link in links.values())
    assert [link.worker.ended for link in links.values()] == [None] * 4
