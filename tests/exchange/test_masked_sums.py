"""Masked partial sums in sessions: noise on the wire, fresh masks, and what is refused."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

pytest.importorskip("cryptography")

from remote_runs import finish, lines, remote, setup_of
from runs import MakeGraph, weights_of
from sessions import TOKEN, Change, DirectLink
from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Ragged, offsets
from silograph.exchange.passes import add_remote_sums, send_partial_sums
from silograph.exchange.rows import relay_sum
from silograph.federation.base import Op
from silograph.federation.frame import decode, encode
from silograph.federation.session.message import Message, Type, pack, read_call, read_reply, unpack
from silograph.federation.session.peer import Peer
from silograph.methods import METHODS

SENDS = {"send_partial_sums", "send_cotangents", "serve"}
LABEL_GUIDED = METHODS["label_guided"]


def frame_of(message: Message) -> tuple[str, Payload]:
    """Return the op and the fields of an answer to a call."""
    envelope, fields = decode(read_reply(message.body)[1])
    return envelope.op, fields


def recording(seen: list[torch.Tensor]) -> Change:
    """Return what notes the rows that leave a silo."""

    def change(data: bytes) -> bytes:
        message = unpack(data)
        if message.type is Type.REPLY:
            op, fields = frame_of(message)
            if op in SENDS:
                seen.append(fields["rows"].t.clone())
        return data

    return change


@pytest.mark.parametrize(
    ("method", "own"),
    [
        ("label_guided", {}),
        ("label_guided", {"min_silos_per_row": 2}),
        ("label_guided", {"dtype": "float64"}),
        ("bns", {"options": {"rate": 0.5}}),
    ],
    ids=["all rows", "of two silos", "float64", "single rows"],
)
def test_what_leaves_is_uniform_and_the_result_that_of_a_simulation(
    method: str, own: dict[str, Any], make_graph: MakeGraph
) -> None:
    own = {"secure_aggregation": True, **own}
    here = finish(setup_of(make_graph(60), METHODS[method], **own))
    far, links = remote(setup_of(make_graph(60), METHODS[method], **own))
    seen: list[torch.Tensor] = []
    for link in links.values():
        link.change = recording(seen)
    there = finish(far)
    assert lines(here.ledger.records) == lines(there.ledger.records)
    a, b = weights_of(here), weights_of(there)
    assert a is not None
    assert b is not None
    assert all(torch.equal(a[name], b[name]) for name in a)
    for dtype in {t.dtype for t in seen}:  # sums as 64 bits, single rows as those of their values
        values = torch.cat([t.flatten() for t in seen if t.dtype is dtype]).numpy()
        assert len(np.unique(values)) >= len(values) - 2 > 1000
        for part in values.view(np.uint8).reshape(len(values), -1).T:
            assert chisquare(np.bincount(part, minlength=256)).pvalue > 1e-6


def test_a_round_that_is_done_again_has_other_masks(make_graph: MakeGraph) -> None:
    """A silo that is lost in a pass comes back, and the round has the result that it would have."""
    undisturbed = finish(setup_of(make_graph(60), LABEL_GUIDED, secure_aggregation=True))
    back: dict[str, Peer] = {}

    def returned() -> Mapping[str, Peer]:
        peers = dict(back)
        back.clear()
        return peers

    setup = setup_of(make_graph(60), LABEL_GUIDED, secure_aggregation=True)
    far, links = remote(setup, returned=returned, patience=5.0)
    lost, seen = next(iter(links)), dict[str, list[torch.Tensor]]()
    failures = iter([True])

    def change(data: bytes) -> bytes | None:
        message = unpack(data)
        is_reply = message.type is Type.REPLY
        if is_reply and frame_of(message)[0] == "send_cotangents" and next(failures, False):
            worker = links[lost].worker
            worker.attach()
            link = DirectLink(worker, recording(seen.setdefault(lost, [])))
            peer = Peer(lost, link, TOKEN)
            peer.ask(Type.START, {}, None)
            back[lost] = peer
            return None
        return recording(seen.setdefault(lost, []))(data)

    for name, link in links.items():
        link.change = change if name == lost else recording(seen.setdefault(name, []))
    there = finish(far)
    a, b = weights_of(undisturbed), weights_of(there)
    assert a is not None
    assert b is not None
    assert all(torch.equal(a[name], b[name]) for name in a)
    for messages in seen.values():  # the same parts were sent twice, by other masks
        values = torch.cat([t.flatten() for t in messages])
        assert len(values.unique()) == len(values)


def tamper(link: DirectLink, tampered: Callable[[str, dict[str, Any]], Payload | None]) -> None:
    """Let a server change what it sends to a silo; `tampered` returns other fields of an op."""
    send: Callable[[bytes, int], None] = link.send

    def send_tampered(data: bytes, most: int) -> None:
        message = unpack(data)
        if message.type is Type.CALL:
            call = read_call(message.body)
            envelope, fields = decode(call.frame)
            changed = tampered(envelope.op, dict(fields))
            if changed is not None:
                frame = encode(envelope, changed, 0)
                position = bytes(message.body).index(bytes(call.frame))
                body = bytes(message.body)[:position] + frame
                data = pack(replace(message, body=body))
        send(data, most)

    link.send = send_tampered  # type: ignore[method-assign]


def test_an_owner_refuses_other_contributors_in_a_later_pass(make_graph: MakeGraph) -> None:
    far, links = remote(setup_of(make_graph(60), LABEL_GUIDED, secure_aggregation=True))
    passes = iter(range(100))

    def tampered(op: str, fields: dict[str, Any]) -> Payload | None:
        if op != "agree_on_keys" or next(passes) != 1:
            return None
        sets = fields["row_silos"].t.clone()
        row = int((np.unpackbits(sets.numpy(), axis=1).sum(1) > 1).argmax())
        sets[row, 0] &= sets[row, 0] - 1  # one of several less
        return fields | {"row_silos": replace(fields["row_silos"], t=sets)}

    tamper(next(iter(links.values())), tampered)
    with pytest.raises(ProtocolError, match="contributors of earlier passes"):
        finish(far)


@pytest.mark.parametrize("what", ["a weight", "a row", "keys"])
def test_a_server_that_changes_what_one_silo_gets_makes_noise(
    what: str, make_graph: MakeGraph
) -> None:
    """Silos refuse the sums; the run ends, and nobody has read a part."""
    far, links = remote(setup_of(make_graph(60), LABEL_GUIDED, secure_aggregation=True))

    def tampered(op: str, fields: dict[str, Any]) -> Payload | None:
        if what == "a weight" and op == "begin":
            name = next(name for name in fields if name.startswith("weights/"))
            return fields | {name: replace(fields[name], t=fields[name].t + 1)}
        if what == "a row" and op == "add_remote_sums":
            return fields | {"sum": replace(fields["sum"], t=fields["sum"].t + 2**62)}
        if what == "keys" and op == "agree_on_keys":
            keys = fields["keys"].t.clone()
            keys[1, 0] ^= 1
            return fields | {"keys": replace(fields["keys"], t=keys)}
        return None

    tamper(next(iter(links.values())), tampered)
    with pytest.raises(ProtocolError, match=r"masks|confirm the same list"):
        finish(far)


def test_sums_that_lack_a_silo_are_left_out_where_calls_go_on(make_graph: MakeGraph) -> None:
    """What is left of a masked sum is noise, so receivers get whole sums only."""
    fed = setup_of(make_graph(60), LABEL_GUIDED, secure_aggregation=True).federation
    route, handed = fed.route, list[Payload]()
    there = torch.ones(len(fed.ids), dtype=torch.int64)
    there[0] = 0

    class WithoutFirst:
        """A federation whose first client is away."""

        ids, away = fed.ids, (fed.ids[0],)

        def __init__(self) -> None:
            self.route = route

        def call(self, op: Op, inbox: Payload, **_: Any) -> Payload:
            if op is send_partial_sums:
                off = offsets(route.slot_off.diff() * there)
                return {"rows": Ragged(torch.ones(int(off[-1]), 2, dtype=torch.int64), off)}
            handed.append(inbox)
            return {}

    relay_sum(
        WithoutFirst(),  # type: ignore[arg-type]
        send_partial_sums,
        add_remote_sums,
        what=Kind.PARTIAL_SUMS,
        key=Key.of(1),
        masked=True,
        allow_missing=True,
    )
    row = handed[0]["row"]
    assert isinstance(row, Ragged)
    places = route.boundary_off[:-1].repeat_interleave(row.off.diff()) + row.t.long()
    touched = route.target[: int(route.slot_off[1])]
    rows = torch.arange(int(route.boundary_off[-1]))
    assert 0 < len(places) < len(rows)
    assert torch.equal(places, rows[~torch.isin(rows, touched)])
    assert torch.equal(handed[0]["sum"].t[:, 0], torch.bincount(route.target)[places])
