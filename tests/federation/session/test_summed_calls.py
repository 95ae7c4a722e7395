"""Secure sums in sessions: the bits of the other engine, silos that vanish or lie, and refusals."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cryptography")

from mistakes import raises_code
from sessions import TOKEN, DirectLink, session, table
from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Shared, Stacked, State
from silograph.federation.base import AwayError, Gather, Reduce, Sum, WeightedMean
from silograph.federation.field_specs import COUNT, FieldSpec
from silograph.federation.frame import Envelope, decode, encode
from silograph.federation.in_process import InProcess
from silograph.federation.program import Call, Program, Repeat
from silograph.federation.secure.sums import SecureSums
from silograph.federation.secure.wire import all_keys_payload, read_keys
from silograph.federation.session.engine import Session
from silograph.federation.session.message import Message, Type, call_body, pack, read_call, unpack
from silograph.federation.session.responder import Responder
from silograph.federation.session.summed_reply import SummedReply, name_of_sum
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
    built: Built, *, least: int = 2, silo_least: int = 2, patience: float = 0.0
) -> tuple[Session, dict[str, DirectLink]]:
    sums = SecureSums(built[0].num_clients, silo_least)
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
    fed, links = secure_session(built)
    here = InProcess(None, *built, block_size=4, secure=True)
    here.start_round(1)
    for to in (None, list(fed.ids[1:4])):
        assert same(result_of(fed, reduce, to), result_of(here, reduce, to))
    assert fed.ledger.records == here.ledger.records
    plain = InProcess(None, *built, block_size=4)
    for name, t in result_of(plain, reduce).items():
        torch.testing.assert_close(result_of(fed, reduce)[name], t, rtol=0, atol=1e-6)
    del links


STEPS = {Type.CALL: "keys", Type.SHARE: "shares", Type.MASK: "masked", Type.UNMASK: "unmasking"}


def vanishing(link: DirectLink, step: Type) -> None:
    """Let a silo vanish before it answers a step."""

    def change(data: bytes) -> bytes | None:
        return None if unpack(link.requests[-1]).type is step else data

    link.change = change


@pytest.mark.parametrize("step", STEPS, ids=STEPS.values())
@pytest.mark.parametrize("lost", [1, 2])
def test_sums_go_on_without_silos_that_vanish(built: Built, step: Type, lost: int) -> None:
    fed, links = secure_session(built)
    gone = list(fed.ids[1 : 1 + lost])
    for name in gone:
        vanishing(links[name], step)
    there = [name for name in fed.ids if name not in gone or step is Type.UNMASK]
    assert same(result_of(fed), oracle(built, there))
    assert set(fed.away) == set(gone)


@pytest.mark.parametrize("step", STEPS, ids=STEPS.values())
def test_below_the_threshold_the_round_waits(built: Built, step: Type) -> None:
    fed, links = secure_session(built, least=4)  # 4 of 6 unmask
    for name in fed.ids[:3]:
        vanishing(links[name], step)
    with raises_code(AwayError, "too-few-silos"):
        result_of(fed)


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
    assert same(result_of(fed), oracle(built, [name for name in fed.ids if name != liar]))


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
    for step in (Type.SHARE, Type.MASK, Type.UNMASK):  # each once
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


@pytest.mark.parametrize("what", ["nothing", "weights of a mean", "weights of a model", "silos"])
def test_silos_that_are_asked_for_unlike_things_share_nothing(what: str) -> None:
    """By such a question a server could tell one silo's part of a sum from that of the others."""
    names, envelope = ("a", "b", "c"), Envelope("train", Kind.WEIGHTS, 1, 0)
    about, sums = name_of_sum(envelope), SecureSums(3, 2, secret=b"s" * 32, needs_proofs=True)
    reply = {"w": Stacked(torch.ones(1, WIDTH)), "nodes": Stacked(torch.tensor([4]))}
    replies = {}
    for name in names:
        other = name == "a"
        by = "" if other and what == "weights of a mean" else "nodes"
        weights = torch.full((2,), float(other and what == "weights of a model"))
        agreed = replace(sums, silos=2**20) if other and what == "silos" else sums
        inbox = {"weights/w": Shared(weights)}
        replies[name] = SummedReply(name, envelope, reply, by, agreed, TOKEN, inbox)
    keys = {name: read_keys(each.keys()[1]) for name, each in replies.items()}
    payload = all_keys_payload("b", names, keys, about)
    if what == "nothing":
        assert replies["b"].answer(Type.SHARE, replace(envelope, kind=Kind.KEYS), payload)
        return
    with raises_code(ProtocolError, "secure-sum", silo="a"):
        replies["b"].answer(Type.SHARE, replace(envelope, kind=Kind.KEYS), payload)
