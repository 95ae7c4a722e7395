"""Silos whose answers cannot be: they are named, no honest one is, and the run goes on."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from sessions import TOKEN, DirectLink, session, table, worker_of
from silograph.core.errors import CheckpointError, ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Ragged, Shared, Stacked, State
from silograph.core.work import Meter
from silograph.federation.base import AwayError, Sum, WeightedMean
from silograph.federation.checkpoint import Checkpoint, from_bytes, to_bytes
from silograph.federation.field_specs import TRAINED, FieldSpec, extent_at_server
from silograph.federation.frame import decode, encode
from silograph.federation.program import Call, Program
from silograph.federation.session.engine import (
    FAR_UPDATE,
    FIRST_CALLS,
    MOST_RATE,
    Answer,
    Failures,
    Session,
    UsualUpdate,
    UsualUpdates,
    advise_on_resume,
    check_work,
    find_unusable,
    measure_update,
)
from silograph.federation.session.events import Cause, Event, both, log_event
from silograph.federation.session.identity import Register
from silograph.federation.session.message import Type, pack, read_reply, reply_body, unpack
from silograph.federation.session.peer import Limits, Peer
from silograph.graph.block.block import ClientBlock, Route

Built = tuple[ClientBlock, Route]
KEY = Key.of(3)
WEIGHTS: Payload = {"weights/w": Shared(torch.ones(3))}
MEAN = WeightedMean("nodes")


def train(cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key) -> Any:
    """Add .1 to every weight; a client has as many nodes as rows."""
    w = inbox["weights/w"].t + torch.full((block.num_clients, 3), 0.1)
    return {"n": Stacked(w.sum(1))}, {"weights/w": Stacked(w), "nodes": Stacked(block.off.diff())}


OPS = table(train)


@pytest.fixture
def built(make_graph: Callable[..., Any], cut_block: Callable[..., Built]) -> Built:
    return cut_block(make_graph(40), 4)


def limited(built: Built, **limits: Any) -> tuple[Session, dict[str, DirectLink]]:
    fed, links = session(*built, None, OPS, least=1)
    fed._limits = replace(fed._limits, **limits)
    fed._failures = Failures(fed._limits.failures)
    return fed, links


def once(fed: Session, t: int) -> Payload:
    fed.start_round(t)
    return fed.call(train, WEIGHTS, what=Kind.WEIGHTS, key=KEY, reduce=MEAN)


def changed(change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> Callable[[bytes], bytes]:
    """What changes the fields of replies."""

    def apply(data: bytes) -> bytes:
        message = unpack(data)
        if message.type is not Type.REPLY:
            return data
        meter, frame = read_reply(message.body)
        envelope, fields = decode(frame)
        body = reply_body(envelope.kind, meter, encode(envelope, change(fields), 0))
        return pack(replace(message, body=body))

    return apply


def weights_of(value: float) -> Callable[[bytes], bytes]:
    return changed(lambda fields: {**fields, "weights/w": Stacked(torch.full((1, 3), value))})


@pytest.mark.parametrize("value", [3e38, -3e38, 2e6, float("nan"), float("inf")])
def test_weights_far_beyond_those_of_others_name_the_silo(
    built: Built, value: float, caplog: pytest.LogCaptureFixture
) -> None:
    fed, links = limited(built)
    links["client_02"].change = weights_of(value)
    assert torch.allclose(once(fed, 1)["weights/w"].t, torch.full((3,), 1.1))
    assert fed.away == ("client_02",)
    assert "round 1 has lost client_02: expected a reply of train, got one with NaN or inf" in (
        caplog.text
    )


def test_weights_that_all_have_are_nobodys_lie(built: Built) -> None:
    fed, links = limited(built)
    for link in links.values():
        link.change = weights_of(1e9)
    assert torch.allclose(once(fed, 1)["weights/w"].t, torch.full((3,), 1e9))
    links["client_02"].change = weights_of(1e9 * FAR_UPDATE * 0.9)
    once(fed, 2)
    assert fed.away == ()


@pytest.mark.parametrize(("factor", "away"), [(0.9, ()), (1.1, ("client_02",))])
def test_updates_are_held_to_the_largest_usual_one(
    built: Built, factor: float, away: tuple[str, ...]
) -> None:
    """The median of a round, of any round: updates shrink while training goes on."""
    fed, links = limited(built)
    for value in (5.0, 1.1):  # norms of the update: 4 and .1 times the square root of 3
        for link in links.values():
            link.change = weights_of(value)
        once(fed, int(10 * value))
    assert fed.away == ()
    links["client_02"].change = weights_of(1 + 4 * FAR_UPDATE * factor)
    once(fed, 60)
    assert fed.away == away


def test_a_majority_of_a_later_round_does_not_lift_the_bound(built: Built) -> None:
    """The first calls settle what is usual: after them those who lie are dropped, the rest stay."""
    fed, links = limited(built)
    for t in range(1, FIRST_CALLS + 1):
        once(fed, t)
    liars = ["client_01", "client_02", "client_03"]
    for name in liars:
        links[name].change = weights_of(1 + 2 * FAR_UPDATE)
    assert torch.allclose(once(fed, FIRST_CALLS + 1)["weights/w"].t, torch.full((3,), 1.1))
    assert fed.away == tuple(liars)


@pytest.mark.parametrize(("liars", "dropped"), [(1, False), (2, True), (3, True)])
@pytest.mark.parametrize("norm", [0.9 * FAR_UPDATE, 4 * FAR_UPDATE])
def test_half_of_the_first_calls_can_hold_the_bound_down_to_its_least(
    built: Built, liars: int, dropped: bool, norm: float
) -> None:
    """Of four silos two or three send no change: then honest updates of norm 4000 are dropped."""
    fed, links = limited(built)
    names = list(links)
    for place, name in enumerate(names):
        links[name].change = weights_of(1.0 if place < liars else 1 + norm / 3**0.5)
    for t in range(1, FIRST_CALLS + 1):
        once(fed, t)
    dropped = dropped and norm > FAR_UPDATE
    assert fed.away == (tuple(names[liars:]) if dropped else ())
    for name in names:
        links[name].change = weights_of(1 + norm / 3**0.5)
    once(fed, FIRST_CALLS + 1)  # now all of them are honest, and who answers stays
    assert fed.away == (tuple(names[liars:]) if dropped else ())


def test_a_run_that_goes_on_knows_what_was_usual(built: Built) -> None:
    """Updates of norm 400 were usual: without that 1e5 would be a lie in the round after."""
    fed, links = limited(built)
    for link in links.values():
        link.change = weights_of(1 + 400 / 3**0.5)
    once(fed, 1)
    fed.keep(1, ())
    checkpoint = from_bytes(b"".join(to_bytes(Checkpoint(1, {}, {"e": dict(fed.remembered)}))))
    for link in links.values():
        link.change = lambda data: data
    links["client_02"].change = weights_of(1e5)
    for remembered, away in ((checkpoint.facts["e"], ()), ({}, ("client_02",))):
        fed.restore(1, (), (), remembered)
        once(fed, 2)
        assert fed.away == away


def test_a_round_that_is_done_again_counts_once(built: Built) -> None:
    fed, _ = limited(built, patience=1.0)
    once(fed, 1)
    before = fed.remembered
    once(fed, 2)
    assert fed.remembered != before
    fed.rejoin(AwayError("", [], 0))
    assert fed.remembered == before


def test_the_largest_median_of_the_first_calls_is_usual() -> None:
    usual = UsualUpdate()
    assert usual.most([None, 3.0, 5.0, 1e9]) == 5 * FAR_UPDATE
    assert usual.most([]) == usual.most([0.1]) == FAR_UPDATE
    assert usual.after([1e9, None, math.inf]) is usual  # one silo's
    for number in range(FIRST_CALLS):
        assert usual.calls == number
        usual = usual.after([float(number), 7.0 - number, 1e9])
    assert (usual.norm, usual.calls) == (7.0, FIRST_CALLS)
    assert usual.after([1e5, 1e5]) is usual
    assert usual.most([1e5, 1e5]) == 7 * FAR_UPDATE


@pytest.mark.parametrize(
    "told",
    [
        *([], 3, "x", {"train": 1}, {"train": [1.0]}, {"train": [1.0, 0]}, {"train": [1, 1]}),
        *({"train": [1.0, n]} for n in (FIRST_CALLS + 1, True, 1.0)),
        *({"train": [norm, 1]} for norm in (math.nan, math.inf, -1.0, "1")),
    ],
    ids=str,
)
def test_what_no_engine_remembers(told: Any) -> None:
    with pytest.raises(CheckpointError, match="expected the usual norm of updates by op in the ch"):
        UsualUpdates({"usual_updates": told})
    with pytest.raises(CheckpointError, match="it is damaged; begin a new run"):
        UsualUpdates([told])  # type: ignore[arg-type]


def test_what_a_silo_alone_says_is_usual_for_no_later_round(built: Built) -> None:
    """Else one round of a hostile silo would lift the bound of all that follow."""
    fed, links = limited(built)
    links["client_02"].change = weights_of(1e5)
    fed.start_round(1)
    one = fed.call(train, WEIGHTS, what=Kind.WEIGHTS, key=KEY, reduce=MEAN, to=["client_02"])
    assert torch.equal(one["weights/w"].t, torch.full((3,), 1e5))
    assert not fed.away
    assert torch.allclose(once(fed, 2)["weights/w"].t, torch.full((3,), 1.1))
    assert fed.away == ("client_02",)


def test_lies_do_not_add_up_over_rounds(built: Built) -> None:
    """A silo that each time says as much as it may moves the mean by the same again, not more."""
    fed, links = limited(built)
    sent, far = torch.ones(3), []
    for t in range(1, 9):
        says = sent + 0.999 * FAR_UPDATE / 3**0.5
        links["client_02"].change = weights_of(float(says.max()))
        fed.start_round(t)
        inbox = {"weights/w": Shared(sent)}
        sent = fed.call(train, inbox, what=Kind.WEIGHTS, key=KEY, reduce=MEAN)["weights/w"].t
        assert fed.away == ()
        far.append(float(sent.max()))
    steps = torch.tensor(far).diff()
    assert float(steps.max()) < 1.01 * float(steps.min())


def of_rows(place: int, value: float) -> Answer:
    reply: Payload = {"x": Ragged(torch.full((2, 3), value), torch.tensor([0, 2]))}
    return Answer(place, reply, (("x", Ragged, torch.float32, 3),), 1, Meter(1))


def test_rows_far_beyond_those_of_others_are_of_nobody_else() -> None:
    """Those who are handed such rows would overflow, refuse them, and be named for it."""
    honest = [of_rows(0, 1.0), of_rows(1, 2.0)]
    assert find_unusable([*honest, of_rows(2, 3e29)], None) == {2: Cause.NOT_FINITE}
    assert find_unusable([*honest, of_rows(2, 1e5)], None) == {}
    nan = float("nan")
    assert find_unusable([of_rows(3, nan)], None) == {3: Cause.NOT_FINITE}  # asked alone
    both = {0: Cause.NOT_FINITE, 1: Cause.NOT_FINITE}  # two who agree get nobody else left out
    assert find_unusable([of_rows(0, nan), of_rows(1, nan)], None) == both
    # Used rows of weights go on to nobody: where all diverge it is training.
    assert find_unusable([of_rows(0, nan), of_rows(1, nan)], WeightedMean("nodes")) == {}
    assert find_unusable([of_rows(0, nan)], WeightedMean("nodes")) == {0: Cause.NOT_FINITE}


def test_sums_stay_finite(built: Built) -> None:
    fed, links = limited(built)
    links["client_01"].change = weights_of(3e38)
    fed.start_round(1)
    found = fed.call(train, WEIGHTS, what=Kind.WEIGHTS, key=KEY, reduce=Sum())
    assert bool(found["weights/w"].t.isfinite().all())
    assert fed.away == ("client_01",)


def test_an_update_beyond_the_norm_is_a_failed_answer(
    built: Built, caplog: pytest.LogCaptureFixture
) -> None:
    honest = 0.1 * 3**0.5
    fed, links = limited(built, update_norm=1.01 * honest)
    once(fed, 1)
    assert not fed.away
    links["client_03"].change = weights_of(1.2)
    once(fed, 2)
    assert fed.away == ("client_03",)
    assert "expected an update of norm 0.17494 at most, got 0.34641" in caplog.text.replace(
        "0.174937", "0.17494"
    )


def test_work_that_nobody_does_is_no_answer(built: Built, caplog: pytest.LogCaptureFixture) -> None:
    fed, links = limited(built)

    def lies(data: bytes) -> bytes:
        message = unpack(data)
        if message.type is not Type.REPLY:
            return data
        meter, frame = read_reply(message.body)
        meter.add_each(1e299)
        return pack(replace(message, body=reply_body(Kind.WEIGHTS, meter, bytes(frame))))

    links["client_00"].change = lies
    once(fed, 1)
    assert fed.away == ("client_00",)
    assert "round 1 has lost client_00: expected work of at most 1e+16 operations" in caplog.text
    assert fed.ledger.flops < 1e16
    meter = Meter(1)
    meter.add_each(MOST_RATE * 5)
    check_work(meter, 5.0)
    with pytest.raises(ProtocolError, match=r"got 5e\+16 in 4 s"):
        check_work(meter, 4.0)


def test_after_three_failures_a_silo_is_left_out_for_good(
    built: Built, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[Event] = []
    fed, links = limited(built, failures=3)
    fed._report = both(log_event, told.append)
    bad = links["client_01"]

    def returned() -> dict[str, Peer]:
        if "client_01" in fed.peers:
            return {}
        bad.worker.attach()
        peer = Peer("client_01", DirectLink(bad.worker, bad.change), TOKEN)
        peer.ask(Type.START, {}, None)
        return {"client_01": peer}

    fed._returned = returned
    bad.change = weights_of(float("nan"))
    for t in range(1, 7):
        once(fed, t)
        assert ("client_01" in fed.left_out) == (t >= 3)
    lost = [r for r in caplog.records if getattr(r, "event", "") == "dropped"]
    assert [(r.silo, r.round) for r in lost] == [("client_01", t) for t in (1, 2, 3)]  # type: ignore[attr-defined]
    (line,) = [r.getMessage() for r in caplog.records if getattr(r, "event", "") == "left_out"]
    assert line.startswith("client_01 is left out after 3 failures, the last one: expected a reply")
    register = Register(None, 4)
    assert register.refusal("client_01", b"key") is None
    for event in told:
        register.take(event)
    assert register.refusal("client_01", b"key") == line
    assert register.refusal("client_02", b"key") is None


def test_silos_that_are_gone_or_late_have_not_failed() -> None:
    failures = Failures(2)
    for cause in (Cause.GONE, Cause.LATE, Cause.UNLIKE, Cause.GONE):
        assert failures.add("north", "why", cause) is None
    assert failures.add("north", "why", Cause.REFUSED) is None
    assert failures.add("north", "again", Cause.GARBAGE) == (
        "left out after 2 failures, the last one: again"
    )
    assert failures.add("north", "more", Cause.GARBAGE) is None  # said once
    never = Failures(None)
    assert [never.add("north", "why", Cause.GARBAGE) for _ in range(9)] == [None] * 9


def test_a_run_that_stops_says_how_to_resume_it_without_the_silo(built: Built) -> None:
    fed, links = limited(built, least=4)
    links["client_01"].change = weights_of(float("nan"))
    with pytest.raises(ProtocolError, match=r"client_01: .*: --resume with --least 3$"):
        once(fed, 1)
    fed, links = limited(built)
    links["client_01"].change = weights_of(float("nan"))
    fed.start_round(1)
    with pytest.raises(ProtocolError, match="every silo is needed here: mend client_01, then"):
        fed.call(train, WEIGHTS, what=Kind.WEIGHTS, key=KEY)
    assert advise_on_resume([], 3, summable=True) == ""


def with_nodes(told: Stacked, fields: dict[str, Any]) -> dict[str, Any]:
    return {**fields, "nodes": told}


def test_counts_beyond_the_nodes_of_the_start_are_refused(
    built: Built, caplog: pytest.LogCaptureFixture
) -> None:
    """2^62 nodes would make the model of one silo that of the server."""
    block, route = built
    rows = block.off.diff().tolist()
    reply_specs = {"weights/w": FieldSpec(Stacked, (3,), torch.float32), "nodes": TRAINED}
    calls = Call(
        train, Kind.WEIGHTS, KEY, {"weights/w": FieldSpec(Shared, (3,), torch.float32)}, reply_specs
    )
    state = {"n": FieldSpec(Stacked, (), torch.float32)}
    program = Program((), lambda _: calls, 9, state)
    for nodes, lie in ((2**62, "up to 2.14748e+09"), (rows[2] + 1, f"at most the {rows[2]} train")):
        fed, links = session(block, route, None, OPS, least=1, program=program)
        fed._extents = [
            extent_at_server(route, c, torch.float32, {"train": n}) for c, n in enumerate(rows)
        ]
        told = Stacked(torch.tensor([nodes]))
        links["client_02"].change = changed(partial(with_nodes, told))
        caplog.clear()
        once(fed, 1)
        assert fed.away == ("client_02",)
        assert lie in caplog.text


def test_a_state_that_is_not_finite_is_not_saved(built: Built) -> None:
    program = Program(
        (),
        lambda _: Call(
            train,
            Kind.WEIGHTS,
            KEY,
            {"weights/w": FieldSpec(Shared, (3,), torch.float32)},
            {"weights/w": FieldSpec(Stacked, (3,), torch.float32), "nodes": TRAINED},
        ),
        9,
        {"n": FieldSpec(Stacked, (), torch.float32)},
    )
    worker = worker_of(built[0].take(torch.tensor([0])), None, OPS, program=program)
    link = DirectLink(worker)
    peer = Peer("client_00", link, TOKEN)
    peer.ask(Type.START, {}, None)
    fed, _ = session(*built, None, OPS, program=program)
    fed.peers = {"client_00": peer}
    fed._limits = Limits(least=1)
    big = {"weights/w": Shared(torch.full((3,), 3e38))}  # finite, but not their sum
    fed.start_round(1)
    fed.call(train, big, what=Kind.WEIGHTS, key=KEY, to=["client_00"])
    with pytest.raises(ProtocolError, match=r"NaN or infinity for 'n' .*: round 1 is not saved"):
        fed.keep(1, ())
    assert worker._store._states == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [1.0, -7.5, 0.0, math.inf, -math.inf, math.nan])
def test_compiled_and_plain_measures_of_an_update_agree(dtype: torch.dtype, value: float) -> None:
    pytest.importorskip("numba")
    sent = {"weights/w": Shared(torch.linspace(-1, 1, 35, dtype=dtype).reshape(7, 5))}
    new = sent["weights/w"].t[None] * 3 - 0.25
    new[0, 4, 2] = value
    reply = {"weights/w": Stacked(new), "n": Stacked(torch.ones(1))}
    plain, unknown = measure_update(reply, sent, None, 0)
    compiled, largest = measure_update(reply, sent, None, 0, compiled=True)
    assert unknown == {}
    assert plain is not None
    assert compiled == pytest.approx(plain, rel=1e-12, nan_ok=True)
    finite = math.isfinite(value)
    assert largest == {"weights/w": float(new.abs().max()) if finite else math.inf}
    for name, field in (("weights/w", Stacked(new[:, :6])), ("weights/v", Stacked(new))):
        assert measure_update({name: field}, sent, None, 0, compiled=True) == (None, {})
    without = {"weights/w": Stacked(new), "n": Stacked(torch.zeros(1))}
    assert measure_update(without, sent, WeightedMean("n"), 0, compiled=True) == (None, {})
