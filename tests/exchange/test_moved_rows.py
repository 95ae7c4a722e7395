"""Rows that are sent only if they moved: the law, what it costs, and that runs stay the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mistakes import raises_code
from remote_runs import finish, lines, remote, setup_of
from runs import FAST, go, rows_of, run_until, same_bits, weights_of
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Ragged
from silograph.exchange.pull import LastSent, RequestedRows, SentRows, blank, moved_only
from silograph.graph.block.block import ClientBlock
from silograph.graph.graph import Graph
from silograph.methods.base import MethodConfig
from silograph.methods.fedais import (
    FEDAIS,
    FedAISOptions,
    begin_stored,
    serve,
    train_batches,
)
from silograph.nn.fit import Schedule
from silograph.nn.optim import SGD
from together import cut_of, model_of

MakeGraph = Callable[..., Graph]
RUN: dict[str, Any] = {
    "method": FEDAIS,
    "clients": 5,
    "participation": 0.6,
    "model": "sage",
    "hidden": 8,
    "rounds": 4,
    "lr": 0.01,
    "local_epochs": 1,
    "kernels": "torch",
}
FEW: dict[str, Any] = {"batches": 3, "tau": 1, "interval": "fixed", "drawn": 0}


def wanted_of(block: ClientBlock, seed: int) -> Ragged:
    """Some boundary rows of every client."""
    mask = Key.of(seed).matrix(len(block.halo.boundary), 1)[:, 0] < 0.5
    off = block.halo.boundary_off
    client = torch.searchsorted(off, mask.nonzero()[:, 0], right=True) - 1
    ends = torch.searchsorted(mask.nonzero()[:, 0], off)
    return Ragged((mask.nonzero()[:, 0] - off[client]).int(), ends)


def nothing_sent(block: ClientBlock) -> LastSent:
    """The state of owners of rows of one stage that have sent none."""
    cfg = MethodConfig(
        model=model_of("sage", layers=2),
        optimizer=SGD(0.1),
        schedule=Schedule(1),
        keep_optimizer=False,
        participation=1.0,
        options=FedAISOptions(moved=0.0),
    )
    return blank(LastSent, cfg, block)


def every_row(off: Tensor, rows: Tensor) -> SentRows:
    """The reply of owners that have all rows."""
    answered = Ragged(torch.ones(len(rows), dtype=torch.bool), off)
    return SentRows(answered, None, None, {}, {"1": Ragged(rows, off)})


@pytest.fixture(scope="module")
def block(request: pytest.FixtureRequest) -> ClientBlock:
    make_graph: MakeGraph = request.getfixturevalue("make_graph")
    return cut_of(make_graph(30), 3, "random")[0]


@given(seed=st.integers(0, 10_000), bound=st.sampled_from([0.0, 0.1, 0.5, 2.0]))
def test_what_is_held_is_the_owners_row_to_within_the_bound(
    block: ClientBlock, seed: int, bound: float
) -> None:
    """Several exchanges beside a loop that remembers each row by itself."""
    state = nothing_sent(block)
    width = state.sent_rows["1"].t.shape[1]
    last: dict[int, tuple[int, torch.Tensor]] = {}
    held: dict[int, tuple[int, torch.Tensor]] = {}
    rows = Key.of(seed).matrix(len(block.halo.boundary), width) - 0.5
    for now in range(4):
        rows = rows + 0.3 * (Key.of(seed).fold(now).matrix(*rows.shape) - 0.5)
        wanted = wanted_of(block, seed + now)
        client = torch.repeat_interleave(torch.arange(3), wanted.off.diff())
        place = wanted.t.long() + block.halo.boundary_off[client]
        since = torch.tensor([held[p][0] if p in held else -1 for p in place.tolist()]).int()
        request = RequestedRows(wanted, Ragged(since, wanted.off))
        state, sent = moved_only(
            block, state, request, every_row(wanted.off, rows[place]), bound, now
        )
        assert sent.changed is not None
        assert sent.version is not None
        expected = []
        for p in place.tolist():
            known = last.get(p)
            if known is None or (rows[p] - known[1]).norm() > bound * known[1].norm():
                last[p] = (now, rows[p])
            expected.append(p not in held or held[p][0] < last[p][0])
        assert sent.changed.t.tolist() == expected
        came = place[sent.changed.t].tolist()
        versions = sent.version.t.tolist()
        for p, version, row in zip(came, versions, sent.rows["1"].t, strict=True):
            held[p] = (version, row)
        for p in place.tolist():
            assert torch.equal(held[p][1], last[p][1])
            assert (held[p][1] - rows[p]).norm() <= bound * held[p][1].norm() + 1e-12


def test_a_row_that_is_not_finite_is_no_row_that_stayed(block: ClientBlock) -> None:
    state = nothing_sent(block)
    every = Ragged(
        torch.cat([torch.arange(int(n)) for n in block.halo.boundary_off.diff()]).int(),
        block.halo.boundary_off,
    )
    since = Ragged(torch.full((len(every.t),), -1).int(), every.off)
    for now, value in enumerate([1.0, float("nan")]):
        rows = torch.full_like(state.sent_rows["1"].t, value)
        request = RequestedRows(every, since)
        state, sent = moved_only(block, state, request, every_row(every.off, rows), 9.0, now)
        assert sent.changed is not None
        assert bool(sent.changed.t.all())
        since = Ragged(torch.full((len(every.t),), now).int(), every.off)


def test_an_owner_that_fell_back_to_an_older_state_sends_its_rows_anew(block: ClientBlock) -> None:
    off = block.halo.boundary_off
    every = Ragged(torch.cat([torch.arange(int(n)) for n in off.diff()]).int(), off)

    def exchange(
        state: LastSent, value: float, now: int, since: int
    ) -> tuple[LastSent, Tensor, Tensor, Tensor]:
        rows = torch.full_like(state.sent_rows["1"].t, value)
        request = RequestedRows(every, Ragged(torch.full_like(every.t, since), off))
        new, sent = moved_only(block, state, request, every_row(off, rows), 0.1, now)
        assert sent.changed is not None
        assert sent.version is not None
        return new, sent.changed.t, sent.version.t, sent.rows["1"].t

    older, *_ = exchange(nothing_sent(block), 1.0, 5, -1)
    newer, *_, rows = exchange(older, 3.0, 7, 5)
    assert bool((rows == 3).all())
    assert not bool(exchange(newer, 3.0, 8, 7)[1].any())
    _, changed, version, rows = exchange(older, 1.0, 8, 7)  # requesters have the rows of batch 7
    assert bool(changed.all())
    assert bool((version == 8).all() & (rows == 1).all())


def training_bytes(result: Any) -> int:
    return int(result.ledger.bytes_by_kind["embeddings"])


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("sent", ["exact", "int8"])
def test_at_bound_0_a_run_is_the_same_for_fewer_bytes(make_graph: MakeGraph, sent: str) -> None:
    graph = make_graph(40)
    usual = go(graph, **RUN, options={**FEW, "sent": sent})
    same, coarse = (
        go(graph, **RUN, options={**FEW, "sent": sent, "moved": bound}) for bound in (0.0, 1e9)
    )
    assert same_bits(weights_of(usual), weights_of(same))
    assert training_bytes(coarse) < training_bytes(same)


def test_bytes_are_their_closed_form_given_the_rows_that_moved(make_graph: MakeGraph) -> None:
    """Nobody trains: a row moves once, when it is first sent, however often it is asked for."""
    graph = make_graph(40)
    still = {**RUN, "optimizer": "sgd", "lr": 1e-30, "participation": 1.0, "weight_decay": 0.0}
    options = {"tau": 10, "interval": "fixed", "halo": "all", "owners": "stored", "moved": 0.5}
    whole, half = (go(graph, **{**still, "rounds": n}, options=options) for n in (4, 3))
    setup = setup_of(graph, **still, options=options)
    route = setup.federation.route
    slots, rows = int(route.slot_off[-1]), int(route.boundary_off[-1])
    sizes = {op: [0] * 4 for op in ("serve", "close_round")}
    for record in whole.ledger.records:
        if record.op in sizes and record.what is Kind.EMBEDDINGS:
            sizes[record.op][record.round - 1] += int(record.bytes.sum())
    before, later = ({op: both[place] for op, both in sizes.items()} for place in (0, -1))
    item, width = 8, 8
    # The first time: version and row of all. Later: one byte each for answered and changed.
    assert before["serve"] - later["serve"] == rows * (4 + item * width)
    assert before["close_round"] - later["close_round"] == slots * (4 + item * width)
    assert training_bytes(whole) - training_bytes(half) == sum(later.values())


def test_killed_and_resumed_and_over_a_session_it_is_the_same(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {**FEW, "moved": 0.2, "sent": "int8"}
    graph, options = make_graph(40), {**RUN, "options": own, "block_size": 1}
    whole = go(graph, **options)
    run_until(monkeypatch, graph, 3, tmp_path / "half", **{**FAST, **options})
    again = sg_resume(tmp_path / "half", graph)
    over, _ = remote(setup_of(graph, **options), begin_stored, serve, train_batches)
    there = finish(over)
    for other in (again, there):
        assert same_bits(weights_of(whole), weights_of(other))
        assert rows_of(whole) == rows_of(other)
        assert lines(whole.ledger.records) == lines(other.ledger.records)


def sg_resume(folder: Path, graph: Graph) -> Any:
    import silograph as sg

    return sg.resume(folder, graph=graph)


def test_options_of_moved_rows(make_graph: MakeGraph) -> None:
    from silograph.core.errors import ConfigError

    with raises_code(ConfigError, "option-value", option="moved", got=-1.0):
        go(make_graph(30), **RUN, options={"moved": -1.0})
    assert go(make_graph(30), **{**RUN, "rounds": 1}).config.options["method.moved"] is None
