"""Secure sums in sessions: the bits of the other engine, silos that vanish or lie, and refusals."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cryptography")

from mistakes import raises_code
from sessions import TOKEN, DirectLink, facts, session, table
from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Shared, Stacked, State
from silograph.federation.base import AwayError, Gather, Reduce, Sum, WeightedMean
from silograph.federation.field_specs import COUNT, FieldSpec
from silograph.federation.frame import Envelope, decode, encode
from silograph.federation.in_process import InProcess
from silograph.federation.program import Call, Program, Repeat
from silograph.federation.secure.revealed import RevealedSums
from silograph.federation.secure.sizes import digest_of_names
from silograph.federation.secure.sums import SecureSums, SumError
from silograph.federation.secure.wire import all_keys_payload, read_keys
from silograph.federation.session.engine import Session
from silograph.federation.session.message import (
    Message,
    Type,
    call_body,
    pack,
    read_call,
    read_reply,
    reply_body,
    unpack,
)
from silograph.federation.session.peer import Peer
from silograph.federation.session.responder import Responder
from silograph.federation.session.state_store import StateStore
from silograph.federation.session.summed_reply import SumContext, SummedReply
from silograph.graph.block.block import ClientBlock, Route

Built = tuple[ClientBlock, Route]
KEY, WIDTH = Key.of(3), 5


def work(cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key) -> Any:
    """Return numbers that differ between clients, and how many nodes they have."""
    nodes = block.off.diff()
    rows = key.uniform(block.row_key, WIDTH)
    sums = torch.zeros(block.num_clients, WIDTH, dtype=rows.dtype)
    sums.index_add_(0, block.client, rows)
    return state, {"w": Stacked(sums / nodes[:, None]), "nodes": Stacked(nodes)}


OPS = table(work)
SPECS = {"w": FieldSpec(Stacked, (WIDTH,)), "nodes": COUNT}
CALL = Call(work, Kind.WEIGHTS, KEY, {}, SPECS)
PROGRAM = Program((), lambda _: Repeat((CALL,), 100), 100, {})
REDUCES: list[Reduce] = [Sum(), WeightedMean("nodes")]
Change = Callable[[bytes], bytes | None]


@pytest.fixture
def built(make_graph: Callable[..., Any], cut_block: Callable[..., Built]) -> Built:
    return cut_block(make_graph(60), 6)


def secure_session(
    built: Built,
    *,
    least: int = 2,
    silo_least: int = 2,
    patience: float = 0.0,
    sums: SecureSums | None = None,
) -> tuple[Session, dict[str, DirectLink]]:
    sums = sums or SecureSums(built[0].num_clients, silo_least)
    fed, links = session(
        *built, None, OPS, program=PROGRAM, secure=sums, least=least, patience=patience
    )
    fed.start_round(1)
    return fed, links


def result_of(fed: Any, reduce: Reduce = REDUCES[1], to: Any = None) -> dict[str, torch.Tensor]:
    reply = fed.call(work, {}, what=Kind.WEIGHTS, key=KEY, reduce=reduce, to=to)
    return {name: field.t for name, field in reply.items()}


def oracle(built: Built, names: list[str], reduce: Reduce = REDUCES[1]) -> dict[str, torch.Tensor]:
    """The same of those silos in one process; sums are those of the same fixed point."""
    here = InProcess(None, *built, block_size=4, secure=True)
    here.start_round(1)
    return result_of(here, reduce, names)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("reduce", REDUCES, ids=["sum", "mean"])
def test_both_engines_give_the_same_bits_and_ledger(built: Built, reduce: Reduce) -> None:
    for to in (None, list(range(1, 4))):  # each in a run of its own: they are of the same values
        fed, links = secure_session(built)
        here = InProcess(None, *built, block_size=4, secure=True)
        here.start_round(1)
        names = None if to is None else [fed.ids[place] for place in to]
        assert same(result_of(fed, reduce, names), result_of(here, reduce, names))
        assert fed.ledger.records == here.ledger.records
    fed, links = secure_session(built)
    plain = InProcess(None, *built, block_size=4)
    for name, t in result_of(plain, reduce).items():
        torch.testing.assert_close(result_of(fed, reduce)[name], t, rtol=0, atol=1e-6)
    del links


def test_a_sparse_sum_has_the_bits_and_the_ledger_of_a_simulation(
    make_graph: Callable[..., Any], cut_block: Callable[..., Built]
) -> None:
    built = cut_block(make_graph(200), 52)
    proofs = SecureSums(52, 2, secret=b"s" * 32, needs_proofs=True)
    fed, links = secure_session(built, sums=proofs)
    here = InProcess(None, *built, block_size=52, secure=True)
    here.start_round(1)
    assert same(result_of(fed), result_of(here))
    assert fed.ledger.records == here.ledger.records
    # In another run, for the values are the same: one sends no keys, one another seed of the
    # order, one no shares.
    fed, links = secure_session(built, sums=proofs)
    late, liar, lost = fed.ids[5], fed.ids[9], fed.ids[20]
    vanishing(links[late], Type.CALL)
    vanishing(links[lost], Type.SHARE)

    def change(data: bytes) -> bytes:
        if unpack(data).type is not Type.REPLY:
            return data
        message = unpack(data)
        meter, frame = read_reply(message.body)
        envelope, fields = decode(frame)
        wrong = {**fields, "seed": Stacked(torch.zeros_like(fields["seed"].t))}
        return pack(
            replace(message, body=reply_body(Kind.WEIGHTS, meter, encode(envelope, wrong, 0)))
        )

    links[liar].change = change
    assert same(result_of(fed), oracle(built, [n for n in fed.ids if n not in (late, lost)]))
    assert set(fed.away) == {late, lost}


STEPS = {
    Type.CALL: "keys",
    Type.SHARE: "shares",
    Type.MASK: "masked",
    Type.CONFIRM: "confirming",
    Type.UNMASK: "unmasking",
}
LATE = (Type.CONFIRM, Type.UNMASK)


def changing(field: str, change_of: Callable[[bytes], bytes], place: int | None = None) -> Change:
    """Change a field of bytes of what a silo sends, or one row of it."""

    def change(data: bytes) -> bytes:
        message = unpack(data)
        if message.type not in (Type.REPLY, Type.SUMMED):
            return data
        meter, frame = (
            read_reply(message.body) if message.type is Type.REPLY else (None, message.body)
        )
        envelope, fields = decode(frame)
        if field not in fields or fields[field].t.shape[-1] != 112:  # bytes of keys, or of shares
            return data
        t = fields[field].t[0].clone()
        row = t if place is None else t[place]
        row[:] = torch.tensor(list(change_of(bytes(row.tolist()))), dtype=torch.uint8)
        body = encode(envelope, {**fields, field: Stacked(t[None])}, 0)
        return pack(
            replace(message, body=body if meter is None else reply_body(Kind.WEIGHTS, meter, body))
        )

    return change


def vanishing(link: DirectLink, step: Type) -> None:
    """Let a silo vanish before it answers a step."""

    def change(data: bytes) -> bytes | None:
        return None if unpack(link.requests[-1]).type is step else data

    link.change = change


@pytest.mark.parametrize("step", STEPS, ids=STEPS.values())
def test_sums_go_on_without_a_silo_that_vanishes(built: Built, step: Type) -> None:
    fed, links = secure_session(built)
    gone = list(fed.ids[1:2])  # 5 of 6 unmask
    for name in gone:
        vanishing(links[name], step)
    there = [name for name in fed.ids if name not in gone or step in LATE]
    assert same(result_of(fed), oracle(built, there))
    assert set(fed.away) == set(gone)


@pytest.mark.parametrize("step", STEPS, ids=STEPS.values())
def test_below_the_threshold_the_round_waits(built: Built, step: Type) -> None:
    fed, links = secure_session(built, least=4)  # 5 of 6 unmask
    for name in fed.ids[:3]:
        vanishing(links[name], step)
    with raises_code(AwayError, "too-few-silos"):
        result_of(fed)


@pytest.mark.parametrize("step", STEPS, ids=STEPS.values())
def test_below_the_threshold_the_round_is_repeated_with_those_that_are_left(
    built: Built, step: Type
) -> None:
    """Unless they have revealed shares: then it takes the same silos again."""
    fed, links = secure_session(built, patience=1.0)
    gone = list(fed.ids[:2])
    for name in gone:
        vanishing(links[name], step)
    if step is Type.CALL:  # four silos are left, of whom three are enough
        assert same(result_of(fed), oracle(built, list(fed.ids[2:])))
        return
    with raises_code(AwayError, "too-few-silos") as caught:
        result_of(fed)
    fed.rejoin(caught.value)  # type: ignore[arg-type]
    fed.start_round(1)
    if step is not Type.UNMASK:
        assert same(result_of(fed), oracle(built, list(fed.ids[2:])))
        assert set(fed.away) == set(gone)
        return
    missing = {"expected": 6, "got": 4, "missing": gone}
    with raises_code(AwayError, "too-few-silos", **missing) as caught:
        result_of(fed)
    with raises_code(ProtocolError, "too-few-silos", **missing):  # they do not come back
        fed.rejoin(caught.value)  # type: ignore[arg-type]


def test_a_sum_that_was_revealed_in_part_goes_on_with_silos_that_are_back(built: Built) -> None:
    fed, links = secure_session(built, patience=5.0)
    gone = list(fed.ids[:2])
    for name in gone:
        vanishing(links[name], Type.UNMASK)
    with raises_code(AwayError, "too-few-silos") as caught:
        result_of(fed)
    back = {name: attached_again(links[name]) for name in gone}
    fed._returned = lambda: back
    fed.rejoin(caught.value)  # type: ignore[arg-type]
    fed._returned = dict
    fed.start_round(1)
    assert same(result_of(fed), oracle(built, list(fed.ids)))


def test_few_silos_wait_for_those_who_may_have_unmasked_an_earlier_sum(
    make_graph: Callable[..., Any], cut_block: Callable[..., Built]
) -> None:
    """Five of seven are enough to unmask a sum; two alone do not know whether they did."""
    built = cut_block(make_graph(70), 7)
    fed, links = secure_session(built, patience=5.0)
    gone = list(fed.ids[:5])
    for name in gone:
        vanishing(links[name], Type.CONFIRM)
    caught: Any
    with raises_code(AwayError, "too-few-silos") as caught:
        result_of(fed)
    fed.rejoin(caught.value)
    fed.start_round(1)
    with raises_code(AwayError, "secure-sum") as caught:  # both refuse
        result_of(fed)
    assert set(fed.away) == set(gone)
    fed.rejoin(caught.value)
    fed.start_round(1)
    with raises_code(AwayError, "too-few-silos", expected=7, got=2, missing=gone) as caught:
        result_of(fed)
    back = {name: attached_again(links[name]) for name in gone}
    fed._returned = lambda: back
    fed.rejoin(caught.value)
    fed._returned = dict
    fed.start_round(1)
    assert same(result_of(fed), oracle(built, list(fed.ids)))


def attached_again(link: DirectLink) -> Peer:
    """Return a silo that has lost its connection and is back."""
    link.change = lambda data: data
    link.worker.attach()
    link.answers.clear()
    peer = Peer(link.worker._name or "", link, TOKEN)
    peer.ask(Type.START, {}, None)
    return peer


def test_masked_values_never_repeat(built: Built) -> None:
    fed, links = secure_session(built)
    seen: dict[str, list[np.ndarray]] = {name: [] for name in links}

    def record(name: str) -> Change:
        def change(data: bytes) -> bytes:
            message = unpack(data)
            if message.type is Type.SUMMED and "masked" in (fields := decode(message.body)[1]):
                seen[name].append(fields["masked"].t.numpy().copy())
            return data

        return change

    for name, link in links.items():
        link.change = record(name)
    for _ in range(2):
        result_of(fed)
    for first, second in seen.values():
        assert not (first == second).any()


def test_a_silo_that_reveals_other_shares_is_dropped_and_named(built: Built) -> None:
    fed, links = secure_session(built)
    liar = fed.ids[2]

    def change(data: bytes) -> bytes:
        message = unpack(data)
        if message.type is Type.SUMMED and unpack(links[liar].requests[-1]).type is Type.UNMASK:
            envelope, fields = decode(message.body)
            shares = fields["shares"].t.clone()
            shares[0, 1, 0] ^= 1
            body = encode(envelope, {"shares": Stacked(shares)}, 0)
            return pack(replace(message, body=body))
        return data

    links[liar].change = change
    assert same(result_of(fed), oracle(built, list(fed.ids)))
    assert fed.away == (liar,)


def test_a_silo_whose_shares_tell_another_secret_spoils_one_round_and_is_named(
    built: Built,
) -> None:
    fed, links = secure_session(built, patience=5.0)
    liar = fed.ids[0]

    def change(data: bytes) -> bytes:
        """Deal shares of another secret than that of the digest."""
        if unpack(data).type is Type.REPLY:
            summed = links[liar].worker._summed
            assert summed is not None
            summed._sum._own_secret += 1
        return data

    links[liar].change = change
    with raises_code(AwayError, "secure-sum", silo=liar) as caught:
        result_of(fed)
    assert fed.away == (liar,)
    fed.rejoin(caught.value)  # type: ignore[arg-type]
    fed.start_round(1)
    # Shares were revealed: no other sum of these values is, and the run ends with the liar's name.
    with raises_code(ProtocolError, "too-few-silos", missing=[liar]) as caught:
        result_of(fed)
    assert not isinstance(caught.value, AwayError)


def test_a_silo_with_wrong_keys_is_dropped_and_its_partners_stay(built: Built) -> None:
    """It is the sender that goes, not those who refuse what it sent."""
    proofs = SecureSums(6, 2, secret=b"s" * 32, needs_proofs=True)
    for change_of, redone in (
        (lambda row: row[:32] * 2 + row[64:], False),  # one key twice: the server sees it
        (lambda row: bytes(32) + row[32:], False),  # a point of small order
        (lambda row: row[:80] + bytes(32), True),  # no proof: silos see it
    ):
        fed, links = secure_session(built, patience=5.0, sums=proofs)
        liar = fed.ids[3]
        links[liar].change = changing("keys", change_of)
        others = [name for name in fed.ids if name != liar]
        if redone:
            with raises_code(AwayError, "secure-sum", silo=liar) as caught:
                result_of(fed)
            fed.rejoin(caught.value)  # type: ignore[arg-type]
            fed.start_round(1)
        assert same(result_of(fed), oracle(built, others))
        assert fed.away == (liar,)


def test_a_silo_that_blames_another_one_alone_goes_itself(built: Built) -> None:
    fed, links = secure_session(built)
    liar, victim = fed.ids[2], fed.ids[4]

    def change(data: bytes) -> bytes:
        message = unpack(data)
        if unpack(links[liar].requests[-1]).type is not Type.SHARE:
            return data
        body = facts(reason="expected keys, got others", silo=victim)
        return pack(replace(message, type=Type.REFUSED, body=body))

    links[liar].change = change
    assert same(result_of(fed), oracle(built, [name for name in fed.ids if name != liar]))
    assert fed.away == (liar,)


def test_one_silo_without_usable_shares_spoils_nothing(built: Built) -> None:
    """Shares that a hostile dealer has sealed wrong for one silo, or that it says it cannot use."""
    fed, links = secure_session(built)
    dealer = fed.ids[1]
    links[dealer].change = changing("shares", lambda row: bytes(64) + row[64:], place=4)
    assert same(result_of(fed), oracle(built, list(fed.ids)))
    assert not fed.away


def test_a_round_is_not_summed_again_without_one_silo(built: Built, tmp_path: Path) -> None:
    """All are started anew: the server does not know of the first sum, silos do by their files."""
    fed, links = secure_session(built, patience=5.0)
    for name, link in links.items():
        link.worker._store = StateStore(tmp_path / name)
    first = result_of(fed)
    for name, link in links.items():
        link.worker._store = StateStore(tmp_path / name)
    fed.rejoin(AwayError("again", (), 0))
    fed.start_round(1)
    fed._unmasked.clear()
    vanishing(links[fed.ids[5]], Type.CALL)
    with raises_code(AwayError, "secure-sum", silo="") as caught:
        result_of(fed)
    assert fed.away == (fed.ids[5],)
    fed.rejoin(caught.value)  # type: ignore[arg-type]
    fed.start_round(1)
    lost = [fed.ids[5]]
    with raises_code(AwayError, "too-few-silos", missing=lost) as caught:
        result_of(fed)
    back = {lost[0]: attached_again(links[lost[0]])}
    fed._returned = lambda: back
    fed.rejoin(caught.value)  # type: ignore[arg-type]
    fed.start_round(1)
    assert same(result_of(fed), first)
    assert same(first, oracle(built, list(fed.ids)))


def test_what_was_unmasked_is_forgotten_when_the_run_is_over(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "run")
    store.revealed.add("1 1 work", "", frozenset("ab"))
    with raises_code(SumError, "secure-sum", silo=""):
        StateStore(tmp_path / "run").revealed.check("1 1 work", "", frozenset("abc"))
    store.drop()
    StateStore(tmp_path / "run").revealed.check("1 1 work", "", frozenset("abc"))


def test_a_silo_that_is_back_is_left_out_of_a_sum_that_was_without_it(built: Built) -> None:
    fed, links = secure_session(built, patience=5.0)
    late = fed.ids[2]
    vanishing(links[late], Type.MASK)
    peer = fed.peers[late]
    first = result_of(fed)
    assert same(first, oracle(built, [name for name in fed.ids if name != late]))
    peer = attached_again(links[late])
    fed.peers = {name: fed.peers.get(name, peer) for name in fed.ids}
    fed.rejoin(AwayError("again", (), 0))
    fed.start_round(1)
    assert same(result_of(fed), first)
    assert not fed.away


@pytest.mark.parametrize("values", ["huge", "negative count"])
def test_totals_that_no_silos_can_have_are_refused(built: Built, values: str) -> None:
    """A hostile silo masks whatever it likes; what is beyond all bounds shows in the sum."""
    fed, links = secure_session(built)

    def change(data: bytes) -> bytes:
        summed = links[fed.ids[0]].worker._summed
        if unpack(data).type is Type.REPLY and summed is not None:
            place = 0 if values == "negative count" else 3  # nodes, then w
            summed._values[place] += np.uint64(2**63 if values == "huge" else 2**64 - 1000)
        return data

    links[fed.ids[0]].change = change
    with raises_code(ProtocolError, "field-out-of-bounds"):
        result_of(fed, REDUCES[0])
    fed, links = secure_session(built)
    links[fed.ids[0]].change = change
    with raises_code(ProtocolError, "field-out-of-bounds"):
        result_of(fed, REDUCES[1])


def refusal(worker: Responder, kind: Type, body: bytes) -> dict[str, Any]:
    answer = unpack(worker.answer(pack(Message(kind, TOKEN, worker._sequence + 1, body))))
    assert answer.type is Type.REFUSED
    return answer.facts()


def test_a_silo_tells_nothing_but_what_was_agreed(built: Built) -> None:
    """A server may ask for a reply as it is, or for steps again: it learns nothing by that."""
    fed, links = secure_session(built)
    result_of(fed)
    worker, requests = links[fed.ids[0]].worker, links[fed.ids[0]].requests
    by_type = {unpack(data).type: unpack(data) for data in requests}
    for step in (Type.SHARE, Type.MASK, Type.CONFIRM, Type.UNMASK):  # each once
        refusal(worker, step, bytes(by_type[step].body))
    call = read_call(by_type[Type.CALL].body)
    refusal(worker, Type.CALL, call_body(replace(call, by=None)))
    frame = encode(Envelope("work", Kind.MASKS, 1, 7), {}, 0)
    refusal(worker, Type.UNMASK, frame)


def test_a_silo_that_agreed_to_plain_replies_masks_none(built: Built) -> None:
    fed, links = session(*built, None, OPS, program=PROGRAM)
    fed.start_round(1)
    result_of(fed)
    worker, requests = links[fed.ids[0]].worker, links[fed.ids[0]].requests
    call = read_call(next(m.body for m in map(unpack, requests) if m.type is Type.CALL))
    refusal(worker, Type.CALL, call_body(replace(call, by="nodes")))


def test_silos_enforce_their_least_number(built: Built) -> None:
    fed, links = secure_session(built, silo_least=5)
    with raises_code(ProtocolError, "too-few-silos"):
        result_of(fed, to=list(fed.ids[:4]))
    del links


@pytest.mark.parametrize("reduce", [None, Gather("w"), Gather("w", fold=Sum())])
def test_single_replies_are_refused_at_the_server(built: Built, reduce: Reduce | None) -> None:
    for fed in (secure_session(built)[0], InProcess(None, *built, 4, secure=True)):
        with pytest.raises(ProtocolError):
            fed.call(work, {}, what=Kind.WEIGHTS, key=KEY, reduce=reduce)
        with pytest.raises(ProtocolError):
            fed.call(work, {}, what=Kind.WEIGHTS, key=KEY, reduce=Sum(), to=[fed.ids[0]])


UNLIKE = ["nothing", "weights of a mean", "weights of a model", "silos", "called silos"]


@pytest.mark.parametrize("what", UNLIKE)
def test_silos_that_are_asked_for_unlike_things_share_nothing(what: str) -> None:
    """By such a question a server could tell one silo's part of a sum from that of the others."""
    names, envelope = ("a", "b", "c"), Envelope("train", Kind.WEIGHTS, 1, 0)
    sums = SecureSums(3, 2, secret=b"s" * 32, needs_proofs=True)
    reply = {"w": Stacked(torch.ones(1, WIDTH)), "nodes": Stacked(torch.tensor([4]))}
    replies = {}
    for name in names:
        other = name == "a"
        by = "" if other and what == "weights of a mean" else "nodes"
        weights = torch.full((2,), float(other and what == "weights of a model"))
        agreed = replace(sums, silos=2**20) if other and what == "silos" else sums
        inbox = {"weights/w": Shared(weights)}
        called = digest_of_names([*names, "d"] if other and what == "called silos" else names)
        context = SumContext(name, TOKEN, called, agreed, RevealedSums())
        replies[name] = SummedReply(context, envelope, reply, by, inbox)
    keys, seeds = {}, {}
    for name, each in replies.items():
        keys[name], seeds[name] = read_keys(each.keys()[1])
    payload = all_keys_payload("b", names, keys, seeds["b"])
    if what == "nothing":
        assert replies["b"].answer(Type.SHARE, replace(envelope, kind=Kind.KEYS), payload)
        return
    with raises_code(ProtocolError, "secure-sum", silo="a"):
        replies["b"].answer(Type.SHARE, replace(envelope, kind=Kind.KEYS), payload)
