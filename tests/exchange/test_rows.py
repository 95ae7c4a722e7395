"""Rows across clients: sums and boundary rows equal products with the uncut graph."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Field, Payload, Ragged, Shared, Stacked, State
from silograph.exchange.pull import pull
from silograph.exchange.rows import publish, relay_sum
from silograph.federation.base import Op
from silograph.federation.in_process import InProcess
from silograph.graph.block.block import ClientBlock, Route
from silograph.graph.graph import Graph

KEY = Key.of(0)
CLIENTS = 5
Blocks = tuple[ClientBlock, Route]
SIZES = pytest.mark.parametrize("block_size", [1, 2, 5])
STRICT = pytest.mark.parametrize("strict", [False, True])


@pytest.fixture
def cut(make_graph: Callable[..., Graph], cut_block: Callable[..., Blocks]) -> Blocks:
    return cut_block(make_graph(50), CLIENTS)


def engine(cut: Blocks, block_size: int, *, strict: bool = False) -> InProcess:
    return InProcess(None, *cut, block_size, strict=strict)


def field_of(fed: InProcess, name: str) -> Tensor:
    return torch.cat([state[name].t for state in fed.states()])


def features(block: ClientBlock) -> Tensor:
    assert isinstance(block.x, Tensor)
    return block.x


def give_all(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    rows = torch.from_numpy(block.halo.adj.transposed.scipy().toarray()) @ features(block)
    return state, {"rows": Ragged(rows, block.halo.off)}


def give_some(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Every second slot, by the client's own count."""
    _, reply = give_all(cfg, block, state, inbox, key)
    rows = reply["rows"].t
    local = torch.cat([torch.arange(n) for n in block.halo.off.diff().tolist()])
    chosen = local % 2 == (inbox["first"].t if "first" in inbox else 0)
    counts = torch.stack([c.sum() for c in chosen.split(block.halo.off.diff().tolist())])
    off = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    return state, {"rows": Ragged(rows[chosen], off), "slot": Ragged(local[chosen].int(), off)}


def take_sums(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    total, place = inbox["sum"], torch.arange(len(block.halo.boundary))
    if "row" in inbox:
        row = inbox["row"]
        assert isinstance(row, Ragged)
        start = torch.repeat_interleave(block.halo.boundary_off[:-1], row.off.diff())
        place = row.t.long() + start
    at_rows = torch.zeros(len(block.row_key), total.t.shape[1], dtype=total.t.dtype)
    at_rows[block.halo.boundary[place]] = total.t
    return {**state, "got": Ragged(at_rows, block.off)}, {}


def cross_edges(cut: Blocks) -> Tensor:
    """(n, n) cross-client edges, worked out from slots and route one by one."""
    block, route = cut
    edges = torch.zeros(len(block.row_key), len(block.row_key), dtype=torch.float64)
    halo = torch.from_numpy(block.halo.adj.scipy().toarray())
    for row, slot in halo.nonzero().tolist():
        edges[row, block.halo.boundary[route.target[slot]]] = 1
    return edges


@STRICT
@SIZES
def test_sums_are_products_with_cross_client_edges(
    cut: Blocks, block_size: int, strict: bool
) -> None:
    fed = engine(cut, block_size, strict=strict)
    relay_sum(fed, give_all, take_sums, what=Kind.PARTIAL_SUMS, key=KEY)
    edges = cross_edges(cut)
    assert torch.equal(edges, edges.T)  # each edge is known at both ends
    assert edges.any()
    expected = edges @ features(cut[0])
    torch.testing.assert_close(field_of(fed, "got"), expected, rtol=0, atol=1e-12)


def test_sums_have_the_same_bits_in_blocks_of_any_size(cut: Blocks) -> None:
    got = []
    for size in (1, 2, 5):
        fed = engine(cut, size)
        relay_sum(fed, give_all, take_sums, what=Kind.PARTIAL_SUMS, key=KEY)
        got.append(field_of(fed, "got"))
    assert torch.equal(got[0], got[1])
    assert torch.equal(got[0], got[2])


@SIZES
def test_only_named_slots_are_added(cut: Blocks, block_size: int) -> None:
    block, route = cut
    fed = engine(cut, block_size)
    relay_sum(fed, give_some, take_sums, what=Kind.PARTIAL_SUMS, key=KEY)
    _, reply = give_all(None, block, {}, {}, KEY)
    expected = torch.zeros_like(features(block))
    for slot, row in enumerate(reply["rows"].t):
        client = int(torch.searchsorted(block.halo.off, slot, right=True)) - 1
        if (slot - int(block.halo.off[client])) % 2 == 0:
            expected[block.halo.boundary[route.target[slot]]] += row
    torch.testing.assert_close(field_of(fed, "got"), expected, rtol=0, atol=1e-12)


def give_numbers(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Some slots in float32."""
    state, reply = give_some(cfg, block, state, inbox, key)
    rows = reply["rows"]
    assert isinstance(rows, Ragged)
    return state, {**reply, "rows": Ragged(rows.t.float(), rows.off)}


@pytest.mark.parametrize("give", [give_some, give_numbers])
def test_slots_may_change_from_relay_to_relay(cut: Blocks, give: Op) -> None:
    """Where rows go is remembered, but only for equal slots."""
    block, route = cut
    fed = engine(cut, 2)
    for first in (0, 1, 1, 0):
        inbox, sums = {"first": Shared(torch.tensor(first))}, []
        for each in (fed, engine((block, replace(route)), 5)):
            relay_sum(each, give, take_sums, what=Kind.PARTIAL_SUMS, key=KEY, inbox=inbox)
            sums.append(field_of(each, "got"))
        assert sums[0].any()
        assert torch.equal(*sums)


@pytest.mark.parametrize("give", [give_all, give_some])
def test_clients_that_take_no_part_are_neither_asked_nor_told(cut: Blocks, give: Op) -> None:
    block, _ = cut
    fed = engine(cut, 2)
    relay_sum(fed, give_all, take_sums, what=Kind.PARTIAL_SUMS, key=KEY)
    everyone = field_of(fed, "got")
    to = [block.ids[1], block.ids[3]]
    relay_sum(fed, give, take_sums, what=Kind.PARTIAL_SUMS, key=KEY, to=to)
    got = field_of(fed, "got")
    inside = torch.isin(block.client, torch.tensor([1, 3]))
    assert torch.equal(got[~inside], everyone[~inside])
    if give is give_all:
        expected = cross_edges(cut) * inside[:, None] * inside
        wanted = (expected @ features(block))[inside]
        torch.testing.assert_close(got[inside], wanted, rtol=0, atol=1e-12)


def ask_some(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """The last slot of every client first, then its first one."""
    sizes = block.halo.off.diff()
    slots = torch.stack([sizes - 1, torch.zeros_like(sizes)], 1).flatten()
    return state, {"slot": Ragged(slots.int(), 2 * torch.arange(block.num_clients + 1))}


def serve(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    halo = block.halo
    if "row" not in inbox:
        return state, {"rows": Ragged(features(block)[halo.boundary], halo.boundary_off)}
    row = inbox["row"]
    assert isinstance(row, Ragged)
    place = row.t.long() + torch.repeat_interleave(halo.boundary_off[:-1], row.off.diff())
    return state, {"rows": Ragged(features(block)[halo.boundary[place]], row.off)}


def store(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    rows = inbox["rows"]
    assert isinstance(rows, Ragged)
    return {**state, "got": rows}, {}


@STRICT
@SIZES
def test_boundary_rows_arrive_in_every_slot(cut: Blocks, block_size: int, strict: bool) -> None:
    block, route = cut
    fed = engine(cut, block_size, strict=strict)
    pull(fed, None, serve, store, what=Kind.FEATURES, key=KEY)
    expected = features(block)[block.halo.boundary[route.target]]
    assert torch.equal(field_of(fed, "got"), expected)


@STRICT
@SIZES
def test_asked_rows_arrive_in_the_order_of_asking(
    cut: Blocks, block_size: int, strict: bool
) -> None:
    block, route = cut
    fed = engine(cut, block_size, strict=strict)
    pull(fed, ask_some, serve, store, what=Kind.FEATURES, key=KEY)
    slots = torch.stack([block.halo.off[1:] - 1, block.halo.off[:-1]], 1).flatten()
    expected = features(block)[block.halo.boundary[route.target[slots]]]
    assert torch.equal(field_of(fed, "got"), expected)
    kinds = {(record.op, record.what) for record in fed.ledger.records}
    assert ("ask_some", Kind.HALO_KEYS) in kinds
    assert ("serve", Kind.FEATURES) in kinds


def test_rows_are_served_once_however_many_ask(cut: Blocks) -> None:
    block, route = cut
    fed = engine(cut, 5)
    pull(fed, ask_some, serve, store, what=Kind.FEATURES, key=KEY)
    slots = torch.stack([block.halo.off[1:] - 1, block.halo.off[:-1]], 1).flatten()
    served = next(r for r in fed.ledger.records if r.op == "serve" and r.direction == "up")
    fresh = engine(cut, 5)
    pull(fresh, None, serve, store, what=Kind.FEATURES, key=KEY)
    all_rows = next(r for r in fresh.ledger.records if r.op == "serve" and r.direction == "up")
    width = features(block).shape[1] * 8
    fewer = len(block.halo.boundary) - len(route.target[slots].unique())
    assert int(all_rows.bytes.sum() - served.bytes.sum()) == fewer * width


def send_name(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    return state, {"nodes": Stacked(block.off.diff()), "x": Ragged(features(block), block.off)}


def answer(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """How many nodes there are here for each of the sender's, and what its rows add up to."""
    sizes = block.off.diff() * inbox["nodes"].t
    sums = inbox["x"].t.sum(0).expand(block.num_clients, -1).contiguous()
    return state, {"sizes": Stacked(sizes), "sums": Stacked(sums)}


def take_answers(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    return {"sizes": Stacked(inbox["sizes"].t), "sums": Stacked(inbox["sums"].t)}, {}


def no_answers(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    width, clients = features(block).shape[1], block.num_clients
    sums = torch.zeros(clients, width, dtype=torch.float64)
    return {"sizes": Stacked(torch.zeros(clients, dtype=torch.int64)), "sums": Stacked(sums)}, {}


@STRICT
@SIZES
def test_everyone_hears_the_sum_of_the_others_answers(
    cut: Blocks, block_size: int, strict: bool
) -> None:
    block, _ = cut
    fed = engine(cut, block_size, strict=strict)
    fed.call(no_answers, {}, what=Kind.CONTROL, key=KEY)
    publish(fed, send_name, answer, take_answers, what=Kind.GENERATED, key=KEY)
    sizes = block.off.diff()
    assert torch.equal(field_of(fed, "sizes"), sizes * (sizes.sum() - sizes))
    totals = torch.stack([part.sum(0) for part in features(block).split(sizes.tolist())])
    expected = (CLIENTS - 1) * totals
    torch.testing.assert_close(field_of(fed, "sums"), expected, rtol=0, atol=1e-12)


def test_a_client_alone_publishes_to_nobody(cut: Blocks) -> None:
    fed = engine(cut, 5)
    publish(fed, send_name, answer, take_answers, what=Kind.GENERATED, key=KEY, to=[cut[0].ids[2]])
    assert fed.ledger.bytes == 0


@STRICT
@SIZES
def test_rows_do_not_leave_by_a_plain_call(cut: Blocks, block_size: int, strict: bool) -> None:
    fed = engine(cut, block_size, strict=strict)
    with pytest.raises(
        ProtocolError, match=r"got Ragged \(rows cross by relay_sum, pull or publish"
    ):
        fed.call(give_all, {}, what=Kind.CONTROL, key=KEY)


def replying(make: Callable[[ClientBlock], dict[str, Field]]) -> Op:
    def op(
        cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
    ) -> tuple[State, Payload]:
        return state, make(block)

    return op


def too_few(block: ClientBlock) -> dict[str, Field]:
    sizes = (block.halo.off.diff() - 1).clamp(min=0)
    off = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    return {"rows": Ragged(torch.zeros(int(off[-1]), 2), off)}


def unknown_slot(block: ClientBlock) -> dict[str, Field]:
    off = torch.arange(block.num_clients + 1)
    return {
        "rows": Ragged(torch.zeros(block.num_clients, 2), off),
        "slot": Ragged(block.halo.off.diff().int(), off),
    }


def stacked_rows(block: ClientBlock) -> dict[str, Field]:
    return {"rows": Stacked(torch.zeros(block.num_clients, 2))}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (too_few, "expected a row for each slot from op, got"),
        (unknown_slot, "expected slots that exist from op, got others"),
        (stacked_rows, r"expected a Ragged field 'rows' in the reply of op, got \['rows'\]"),
    ],
)
def test_wrong_contributions(
    cut: Blocks, make: Callable[[ClientBlock], dict[str, Field]], message: str
) -> None:
    with pytest.raises(ProtocolError, match=message):
        relay_sum(engine(cut, 2), replying(make), take_sums, what=Kind.PARTIAL_SUMS, key=KEY)


def test_slots_of_clients_that_take_no_part(cut: Blocks) -> None:
    to = [cut[0].ids[0], cut[0].ids[2]]
    with pytest.raises(ProtocolError, match="expected slots of clients that take part, got some"):
        pull(engine(cut, 5), None, serve, store, what=Kind.FEATURES, key=KEY, to=to)


def one_row(block: ClientBlock) -> dict[str, Field]:
    off = torch.arange(block.num_clients + 1)
    return {"rows": Ragged(torch.zeros(block.num_clients, 1), off)}


def test_owners_that_serve_other_rows_than_asked(cut: Blocks) -> None:
    with pytest.raises(ProtocolError, match=r"expected \d+ rows from op of client_0\d, got 1$"):
        pull(engine(cut, 5), None, replying(one_row), store, what=Kind.FEATURES, key=KEY)


def test_what_all_ops_get_besides(cut: Blocks) -> None:
    seen: list[int] = []

    def told(
        cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
    ) -> tuple[State, Payload]:
        seen.append(int(inbox["stage"].t))
        return give_all(cfg, block, state, inbox, key)

    stage = {"stage": Shared(torch.tensor(3))}
    relay_sum(engine(cut, 5), told, take_sums, what=Kind.PARTIAL_SUMS, key=KEY, inbox=stage)
    assert seen == [3]
