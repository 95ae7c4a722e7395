"""Fields that travel as rows of a base: the same numbers for fewer bytes, and what is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import scipy.sparse as sp
import torch

import silograph as sg
from remote_runs import finish, lines, remote, setup_of
from runs import FAST, go, of, rows_of, run_until, same_bits, weights_of
from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import (
    Field,
    Payload,
    Ragged,
    Shared,
    Stacked,
    State,
    take,
    tensors_under,
)
from silograph.exchange.rows import learn_rows, learn_rows_steps, row_numbers
from silograph.federation.base import Federation, WeightedMean
from silograph.federation.decoder import Decoder, onto, rows_for, rows_from
from silograph.federation.field_specs import COUNT, LOSS, Extent, FieldSpec, check_against
from silograph.federation.fold import Reduction
from silograph.federation.frame import decode, encode
from silograph.federation.messages import to_payload
from silograph.federation.program import Call, Calls, Maybe, Steps
from silograph.federation.session.message import Type, pack, read_reply, reply_body, unpack
from silograph.graph.block.block import ClientBlock, SparseRows
from silograph.graph.csr import CSR
from silograph.graph.graph import Graph
from silograph.methods import (
    FEDAVG,
    Clients,
    LocalModel,
    Method,
    MethodConfig,
    Params,
    RoundReport,
    ServerState,
    begin,
    shared,
    stacked_copies,
    state_specs,
    untouched_rows_after_round,
    weight_specs,
)
from silograph.selection.base import select_uniform

MakeGraph = Callable[..., Graph]
FIRST = "weights/0.weight"
BASE = torch.arange(12.0).view(6, 2)
KNOWN = Ragged(torch.tensor([1, 4, 0, 4, 5]).int(), torch.tensor([0, 2, 2, 5]))
ROWS = Decoder(known={"w": KNOWN}, others={"w": BASE})


def test_rows_go_there_and_back() -> None:
    rows = rows_for(BASE, KNOWN)
    assert rows.t.tolist() == [[2, 3], [8, 9], [0, 1], [8, 9], [10, 11]]
    field = onto(BASE, Ragged(rows.t + 100, rows.off), KNOWN)
    dense = field.stacked()
    for c, numbers in enumerate(([1, 4], [], [0, 4, 5])):
        expected = BASE.clone()
        expected[numbers] += 100
        assert torch.equal(dense.t[c], expected)
    for form in (field, dense, replace(field, index=field.index, t=field.t)):
        found = rows_from(form, KNOWN)
        assert torch.equal(found.t, rows.t + 100)
        assert torch.equal(found.off, KNOWN.off)
    other = Ragged(torch.tensor([0, 1, 2]).int(), torch.tensor([0, 1, 2, 3]))
    assert torch.equal(rows_from(field, other).t, dense.t[torch.arange(3), torch.arange(3)])


def test_a_mean_of_rows_is_that_of_whole_slices() -> None:
    weights = {"n": Stacked(torch.tensor([1.0, 2.0, 5.0]))}
    rows = Ragged(rows_for(BASE, KNOWN).t.sqrt(), KNOWN.off)
    found = Reduction(WeightedMean("n", {"w": BASE}, ROWS), 3)
    found.add({"w": rows, **weights}, torch.arange(3))
    expected = Reduction(WeightedMean("n", {"w": BASE}), 3)
    expected.add({"w": onto(BASE, rows, KNOWN).stacked(), **weights}, torch.arange(3))
    assert torch.equal(found.result()["w"].t, expected.result()["w"].t)


def test_numbers_of_rows_that_do_not_fit() -> None:
    rows = Ragged(torch.zeros(5, 2), torch.tensor([0, 1, 3, 5]))
    with pytest.raises(ProtocolError, match=r"expected \[2, 0, 3\] rows of shape \(2,\), which"):
        onto(BASE, rows, KNOWN)
    with pytest.raises(ProtocolError, match=r"got \[2, 0, 3\] of \(3,\)"):
        onto(BASE, Ragged(torch.zeros(5, 3), KNOWN.off), KNOWN)
    with pytest.raises(ProtocolError, match="expected what 'w' is taken around, and its rows of 3"):
        Reduction(WeightedMean("n", sent=replace(ROWS, others={})), 3)
    with pytest.raises(ProtocolError, match=r"got .* rows of 3"):
        Reduction(WeightedMean("n", {"w": BASE}, ROWS), 4)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([1, 1], "ascending numbers, each once"),
        ([2, 1], "ascending numbers, each once"),
        ([-1, 1], "values from 0, got -1"),
        ([1, 6], "values up to 5, got 6"),
        (list(range(7)), "values up to 5, got 6"),
    ],
)
def test_row_numbers_that_are_none(numbers: list[int], message: str) -> None:
    used = Ragged(torch.tensor(numbers).int(), torch.tensor([0, len(numbers)]))
    with pytest.raises(ProtocolError, match=message):
        check_against({"u": used}, {"u": row_numbers(6)}, Extent(1, torch.float32, {}), "here")


# FedAvg whose first weights travel as the rows of features that occur at a client.


def begin_narrow(
    cfg: MethodConfig, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    new, _ = begin(cfg, block, state, inbox, key)
    assert isinstance(block.x, SparseRows)
    used = Ragged(block.x.used.feature.int(), block.x.used.off)
    return {**new, "used": used}, {"used": used}


def train_narrow(
    cfg: MethodConfig, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Other rows than the used ones do not matter here, and do not come back."""
    used, first = state["used"], inbox[FIRST]
    assert isinstance(used, Ragged)
    assert isinstance(first, Ragged)
    start = stacked_copies(
        {n: w for n, w in tensors_under("weights", inbox).items() if n != "0.weight"},
        block.num_clients,
    )
    zeros = first.t.new_zeros(block.num_features, first.t.shape[1])
    start["0.weight"] = onto(zeros, first, used).stacked().t
    clients = Clients[Any](cfg, block, key, dict(state))
    reply = to_payload(LocalModel.of(clients.fit(start), block))
    found = reply[FIRST]
    assert not isinstance(found, Ragged)
    reply[FIRST] = rows_from(found, used)
    return clients.state, reply


def narrow_init(fed: Federation, cfg: MethodConfig, weights: Params, key: Key) -> ServerState:
    used = learn_rows(fed, begin_narrow, key=key)
    return ServerState(weights, {"used/t": used.t, "used/off": used.off})


def narrow_round(
    fed: Federation, cfg: MethodConfig, state: ServerState, t: int, key: Key
) -> tuple[ServerState, RoundReport]:
    assert state.weights is not None
    known = Ragged(state.memory["used/t"], state.memory["used/off"])
    chosen = select_uniform(fed.ids, cfg.participation, key.fold("select", t))
    positions = torch.tensor([fed.ids.index(name) for name in chosen])
    mine = take(known, positions)
    assert isinstance(mine, Ragged)
    inbox: dict[str, Field] = {
        **shared("weights", state.weights),
        FIRST: rows_for(state.weights["0.weight"], mine),
    }
    around = untouched_rows_after_round(cfg, state.weights)
    mean = WeightedMean("nodes", around, Decoder(known={FIRST: known}, others=around))
    own = key.fold("train", t)
    reply = fed.call(train_narrow, inbox, what=Kind.WEIGHTS, key=own, to=chosen, reduce=mean)
    return ServerState(tensors_under("weights", reply), state.memory), RoundReport(
        tuple(chosen), float(reply["loss"].t)
    )


def narrow_steps(cfg: MethodConfig, t: int, key: Key) -> Steps:
    inbox_specs, reply_specs = (dict(weight_specs(cfg.model, form)) for form in (Shared, Stacked))
    width = reply_specs[FIRST].shape[1]
    inbox_specs[FIRST] = FieldSpec(Ragged, (width,), rows="state/used")
    reply_specs[FIRST] = FieldSpec(Ragged, (width,), rows=f"inbox/{FIRST}")
    both = {**reply_specs, "nodes": COUNT, "loss": LOSS}
    return Maybe(Call(train_narrow, Kind.WEIGHTS, key.fold("train", t), inbox_specs, both))


NARROW: Method = replace(
    FEDAVG,
    name="narrow",
    init=narrow_init,
    round=narrow_round,
    calls=Calls(
        setup=lambda cfg, key: learn_rows_steps(begin_narrow, key=key, size=cfg.model.features),
        round=narrow_steps,
        state=lambda cfg: {**state_specs(cfg), "used": row_numbers(cfg.model.features)},
    ),
)
RUN: dict[str, Any] = {"participation": 0.5, "clients": 6}


def sparse_graph(make_graph: MakeGraph) -> Graph:
    """Features of which few occur at one client."""
    return make_graph(60, features=80, sparse=True)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("block_size", [1, 6])
def test_it_is_fedavg_for_fewer_bytes(make_graph: MakeGraph, block_size: int) -> None:
    graph, itemsize = thin(sparse_graph(make_graph)), 8
    one = go(graph, method=NARROW, **RUN, block_size=block_size)
    other = go(graph, **RUN, block_size=block_size)
    for name, w in of(other).items():
        torch.testing.assert_close(of(one)[name], w, rtol=0, atol=1e-12)
    setup = setup_of(graph, NARROW, **RUN)
    used = [int(b.all.x.used.off[-1]) for b in setup.federation._host.blocks]  # type: ignore[attr-defined]
    shape = of(other)["0.weight"].shape
    assert max(used) < shape[0]
    pairs = [
        (a, b)
        for a, b in zip(training(one), training(other), strict=True)
        if a.clients.tolist() == b.clients.tolist()
    ]
    assert len(pairs) == 8
    for a, b in pairs:
        longer = len("train_narrow") - len("train")
        saved = [(shape[0] - used[c]) * shape[1] * itemsize for c in a.clients.tolist()]
        assert (b.bytes - a.bytes + longer).tolist() == saved


def thin(graph: Graph) -> Graph:
    """Each feature occurs at few nodes."""
    assert isinstance(graph.x, CSR)
    x = torch.from_numpy(graph.x.scipy().toarray())
    mask = torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < 0.05
    return replace(graph, x=CSR.from_scipy(sp.csr_matrix((x * mask).numpy())))


def training(result: sg.Result) -> list[Any]:
    return [r for r in result.ledger.records if r.op.startswith("train") and r.what == "weights"]


def test_killed_and_resumed_and_over_a_session_it_is_the_same(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, options = thin(sparse_graph(make_graph)), {"method": NARROW, **RUN, "block_size": 1}
    whole = go(graph, **options)
    run_until(monkeypatch, graph, 3, tmp_path / "half", **{**FAST, **options})
    again = sg.resume(tmp_path / "half", graph=graph, method=NARROW)
    over, _ = remote(setup_of(graph, **options), begin_narrow, train_narrow)
    there = finish(over)
    for other in (again, there):
        assert same_bits(weights_of(whole), weights_of(other))
        assert rows_of(whole) == rows_of(other)
        assert lines(whole.ledger.records) == lines(other.ledger.records)


def one_row_less(data: bytes) -> bytes:
    """Take a row from what a silo sends back of its training."""
    message = unpack(data)
    if message.type is not Type.REPLY:
        return data
    meter, frame = read_reply(message.body)
    envelope, reply = decode(frame)
    if envelope.op != "train_narrow":
        return data
    t = reply[FIRST].t[1:]
    reply[FIRST] = Ragged(t, torch.tensor([0, len(t)]))
    body = reply_body(envelope.kind, meter, encode(envelope, reply, 0))
    return pack(replace(message, body=body))


def test_a_silo_that_sends_other_rows_than_it_uses_is_away(make_graph: MakeGraph) -> None:
    options = {"method": NARROW, **RUN, "participation": 1.0, "rounds": 1}
    setup = setup_of(thin(sparse_graph(make_graph)), **options)
    over, links = remote(setup, begin_narrow, train_narrow, least=1)
    name = over.federation.ids[2]
    links[name].change = one_row_less
    finish(over)
    assert over.federation.away == (name,)
