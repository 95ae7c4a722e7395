"""Laws of every registered controller, and runs in which one sets the knobs."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import silograph as sg
from remote_runs import finish, lines, remote, setup_of
from runs import FAST, go, of, rows_of, run_until, same_bits, weights_of
from sessions import TOKEN, table, worker_of
from silograph.control import (
    BOUND_INTERVAL,
    CONTROLLERS,
    LOSS_INTERVAL,
    Controller,
    Knob,
    RunStanding,
    knob_specs,
    knobs_of,
)
from silograph.control.base import ControllerState, Knobs
from silograph.control.bound_interval import NUMBERS
from silograph.core.errors import ConfigError, TrainingError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Patched, Payload, Shared, Stacked, State, tensors_under
from silograph.core.setting_values import choice, lin, log
from silograph.experiment.resolve.run_program import program_of
from silograph.experiment.run.run import first_snapshot
from silograph.federation.base import Federation
from silograph.federation.checkpoint import Checkpoint, from_bytes, to_bytes
from silograph.federation.field_specs import COUNT, LOSS, FieldSpec
from silograph.federation.frame import decode, encode
from silograph.federation.messages import to_payload
from silograph.federation.program import Call, Calls, Maybe, Steps, up_to
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
from silograph.graph.block.block import ClientBlock
from silograph.graph.graph import Graph
from silograph.methods import (
    FEDAVG,
    METHODS,
    Clients,
    LocalModel,
    Method,
    MethodConfig,
    Needs,
    RoundReport,
    ServerState,
    WeightedMean,
    knob_fields,
    shared,
    state_specs,
    weight_specs,
)
from silograph.methods.fedavg import FEDAVG_PROGRAM

MakeGraph = Callable[..., Graph]
MOST = 6
SEEN: list[RunStanding] = []  # what controllers were told, in order


# A controller in the way of FedAIS, eq. 11: tau_t = ceil(sqrt(F_t / F_0) * tau_0).


def remember_first(options: Any, knobs: Knobs, standing: RunStanding) -> ControllerState:
    return {"first": torch.tensor(standing.val_loss, dtype=torch.float64)}


def by_loss(
    options: Any, knobs: Knobs, state: ControllerState, standing: RunStanding, key: Key
) -> Mapping[str, Tensor]:
    SEEN.append(standing)
    assert standing.val_loss is not None
    share = math.sqrt(standing.val_loss / float(state["first"]))
    return {k.name: k.constant(math.ceil(share * k.start), standing.clients) for k in knobs}


BY_LOSS = Controller("by_loss", "eq. 11", by_loss, remember_first, needs_scores=True)


# One that draws, and remembers what it has drawn and seen.


def nothing_yet(options: Any, knobs: Knobs, standing: RunStanding) -> ControllerState:
    return {"center": torch.tensor(0.5, dtype=torch.float64)}


def around_center(
    options: Any, knobs: Knobs, state: ControllerState, standing: RunStanding, key: Key
) -> Mapping[str, Tensor]:
    draw = key.uniform(torch.arange(standing.clients))[:, 0].double()
    found = {k.name: k.constant(k.start, standing.clients) for k in knobs}
    return {**found, "mix": (state["center"] + 0.2 * (draw - 0.5)).clamp(0, 1)}


def follow(
    options: Any,
    knobs: Knobs,
    state: ControllerState,
    standing: RunStanding,
    facts: Mapping[str, float],
    values: Mapping[str, Tensor],
) -> ControllerState:
    seen = values["mix"].mean() + facts["again"] / 100 - facts.get("train_loss", 0) / 1000
    return {"center": (state["center"] + seen.clamp(0, 1)) / 2}


DRAWN = Controller("drawn", "around what was seen", around_center, nothing_yet, follow)
TABLE = {**CONTROLLERS, "by_loss": BY_LOSS, "drawn": DRAWN}
CLOCK = {"speeds": "1,2,4"}  # an agent's reward has the seconds of a virtual clock


# A method whose clients take as many epochs as one knob says, mixed by another; the server makes a
# further call for each epoch beyond the first.


@dataclass(frozen=True)
class PacedOptions:
    epochs: int = field(default=2, metadata={"knob": lin(1, MOST)})
    mix: float = field(default=1.0, metadata={"knob": lin(0.0, 1.0), "by_client": True})
    how: str = "fixed"


def train_paced(
    cfg: MethodConfig, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    epochs, start = int(inbox["knobs/epochs"].t), tensors_under("weights", inbox)
    paced = replace(cfg, schedule=replace(cfg.schedule, epochs=epochs))
    clients = Clients[Any](paced, block, key, dict(state))
    reply = to_payload(LocalModel.of(clients.fit(start), block))
    for name, w in start.items():
        found = reply[f"weights/{name}"]
        t = found.stacked().t if isinstance(found, Patched) else found.t
        mix = inbox["knobs/mix"].t.view(-1, *[1] * w.dim()).to(w.dtype)
        reply[f"weights/{name}"] = Stacked(w.lerp(t, mix.expand_as(t)))
    return clients.state, reply


def again(
    cfg: MethodConfig, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    return state, {}


def paced_round(
    fed: Federation, cfg: MethodConfig, state: ServerState, t: int, key: Key
) -> tuple[ServerState, RoundReport]:
    assert state.weights is not None
    chosen, own = tuple(fed.ids[t % 2 :]), key.fold("train", t)
    inbox = {**shared("weights", state.weights), **knob_fields(cfg.knobs, fed.ids, chosen)}
    mean = WeightedMean("nodes")
    reply = fed.call(train_paced, inbox, what=Kind.WEIGHTS, key=own, to=chosen, reduce=mean)
    weights = tensors_under("weights", reply)
    more = int(cfg.knobs["epochs"]) - 1
    for number in range(more):
        fed.call(again, {}, what=Kind.CONTROL, key=key.fold("again", t, number), to=chosen)
    report = RoundReport(chosen, float(reply["loss"].t), facts={"again": float(more)})
    return ServerState(weights, {}), report


def paced_steps(cfg: MethodConfig, t: int, key: Key) -> Steps:
    inbox_specs = {**weight_specs(cfg.model, Shared), **knob_specs(cfg.options)}
    reply_specs = {**weight_specs(cfg.model, Stacked), "nodes": COUNT, "loss": LOSS}

    def one(number: int) -> Steps:
        return Call(again, Kind.CONTROL, key.fold("again", t, number))

    trains = Call(train_paced, Kind.WEIGHTS, key.fold("train", t), inbox_specs, reply_specs)
    return Maybe((trains, up_to(MOST - 1, one)))


PACED: Method[PacedOptions] = Method(
    name="paced",
    title="local epochs that follow a knob",
    reference="none",
    options=PacedOptions,
    init=FEDAVG_PROGRAM["init"],
    round=paced_round,
    needs=Needs(score_first=True, controller=lambda options: TABLE[options.how]),
    calls=Calls(setup=FEDAVG_PROGRAM["calls"].setup, round=paced_steps, state=state_specs),
)


def run_of(how: str, **options: Any) -> dict[str, Any]:
    return {"method": PACED, "options": {"how": how, **options}, "block_size": 1}


# Laws of controllers.

KNOBS = (Knob("a", 1, 9, 4), Knob("b", 0.5, 2.0, 1.0), Knob("mix", 0.0, 1.0, 0.5, by_client=True))


def standing_at(t: int) -> RunStanding:
    loss = 2.0 / (t + 1)
    weights = {"w": torch.full((4,), loss)}
    return RunStanding(t, 3, 100 * t, 1000 - 100 * t, t, loss, 1 - loss / 3, 2.0 * t, weights)


def play(found: Controller, state: ControllerState, first: int, last: int) -> list[list[float]]:
    """The knobs of some rounds, each from a state that went through a checkpoint."""
    values = []
    for t in range(first, last):
        state = from_bytes(b"".join(to_bytes(Checkpoint(t, dict(state), {})))).tensors
        key = Key.of(3).fold("control", t)
        knobs = found.propose(found.options, KNOBS, state, standing_at(t - 1), key)
        for knob in KNOBS:
            knob.check(knobs.get(knob.name), 3, found.name)
        values.append([float(v) for t in knobs.values() for v in t.flatten()])
        if found.observe is not None:
            facts = {"train_loss": 1.0 / t, "again": 1.0}
            state = found.observe(found.options, KNOBS, state, standing_at(t), facts, knobs)
    return values


@pytest.mark.parametrize("found", TABLE.values(), ids=list(TABLE))
def test_laws_of_every_controller(found: Controller) -> None:
    state = found.init(found.options, KNOBS, standing_at(0))
    saved = {name: t.clone() for name, t in state.items()}
    values = play(found, state, 1, 8)
    assert values == play(found, state, 1, 8)
    assert all(torch.equal(state[name], saved[name]) for name in saved)


def test_fixed_knobs_are_the_options() -> None:
    assert play(CONTROLLERS["fixed"], {}, 1, 4) == [[4, 1, 0.5, 0.5, 0.5]] * 3


def test_the_interval_of_the_least_bound_by_hand() -> None:
    """Eq. 10 of FedAIS: J = 2, 10 rounds of 100 bytes with exchanges of 10, eta = 100."""
    (knob,) = KNOBS[:1]

    def at(t: int, loss: float, *w: float) -> RunStanding:
        bytes = 100 + 100 * t
        return RunStanding(t, 3, bytes, None, t, loss, 0.5, None, {"w": torch.tensor(w)}, 10 - t)

    facts = {"batches": 2.0, "row_bytes": 50.0, "exchanges": 5.0, "rate": 100.0}
    state = BOUND_INTERVAL.init(None, [knob], at(0, 2.0, 0.0, 0.0))
    taus = []
    # Moves (3, 4), (0, 5) and (0, 5): spreads 1, 2 and 3; curvatures sqrt(10) / 10 and 0.
    rounds = [((3.0, 4.0), 27.0, 1.8), ((3.0, 9.0), 29.0, 1.8), ((3.0, 14.0), 31.0, 0.25)]
    for t, (w, moved, loss) in enumerate(rounds, start=1):
        assert BOUND_INTERVAL.observe is not None
        known = facts | {"moved": moved}
        state = BOUND_INTERVAL.observe(None, [knob], state, at(t, loss, *w), known, {})
        for found in (loss, loss / 3, 0.0):
            now = at(t, found, *w)
            taus.append(int(BOUND_INTERVAL.propose(None, [knob], state, now, Key.of(0))["a"]))
    # sqrt(2 F / (curved^2 spread)): after two rounds sqrt(F / .075), after three sqrt(F / .025).
    assert taus == [4, 4, 4, 5, 3, 1, 4, 2, 1]


@pytest.mark.parametrize("bad", [1e308, float("inf"), float("nan")])
def test_a_client_that_reports_a_wild_move_leaves_estimates_that_are_numbers(bad: float) -> None:
    (knob,) = KNOBS[:1]
    state = BOUND_INTERVAL.init(None, [knob], standing_at(0))
    for t in range(1, 4):
        assert BOUND_INTERVAL.observe is not None
        facts = {"batches": 2.0, "rate": 1.0, "moved": bad}
        state = BOUND_INTERVAL.observe(None, [knob], state, standing_at(t), facts, {})
        knobs = BOUND_INTERVAL.propose(None, [knob], state, standing_at(t), Key.of(0))
        assert 1 <= int(knobs["a"]) <= 9
    assert all(bool(t.isfinite().all()) for t in state.values())


@pytest.mark.parametrize("bad", [1e200, float("inf"), float("nan")])
def test_a_loss_of_any_size_leaves_the_interval_in_its_range(bad: float) -> None:
    (knob,) = KNOBS[:1]
    state = dict(BOUND_INTERVAL.init(None, [knob], standing_at(0)))
    state |= {name: torch.tensor(1e-200, dtype=torch.float64) for name in NUMBERS}
    now = replace(standing_at(1), val_loss=bad)
    assert 1 <= int(BOUND_INTERVAL.propose(None, [knob], state, now, Key.of(0))["a"]) <= 9


@pytest.mark.parametrize("first", [0.0, 2.0, float("inf"), float("nan")])
@pytest.mark.parametrize("bad", [1e300, float("inf"), float("nan")])
def test_an_interval_by_a_loss_of_any_size_is_in_its_range(first: float, bad: float) -> None:
    (knob,) = KNOBS[:1]
    state = LOSS_INTERVAL.init(None, [knob], replace(standing_at(0), val_loss=first))
    now = replace(standing_at(1), val_loss=bad)
    assert 1 <= int(LOSS_INTERVAL.propose(None, [knob], state, now, Key.of(0))["a"]) <= 9


def test_the_interval_follows_the_loss() -> None:
    """Eq. 11 of FedAIS by hand: tau_0 = 4, F_0 = 2."""
    (knob,) = KNOBS[:1]
    state = remember_first(None, [knob], standing_at(0))
    losses = [2.0, 1.9, 1.125, 1.12, 0.5, 0.49, 0.0, 8.0, 20.0]
    taus = [
        int(by_loss(None, [knob], state, replace(standing_at(1), val_loss=f), Key.of(0))["a"])
        for f in losses
    ]
    assert taus == [4, 4, 3, 3, 2, 2, 1, 8, 9]  # at least 1 and at most 9, the range


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "knob a as torch.int64 of shape .* from me, got none"),
        (torch.tensor(2.0), "got torch.float32 of shape"),
        (torch.tensor([2]), r"got torch.int64 of shape \(1,\)"),
        (torch.tensor(10), r"expected knob a in 1 to 9 from me, got \[10\]"),
    ],
)
def test_what_a_controller_may_not_propose(value: Tensor | None, message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        KNOBS[0].check(value, 3, "me")


def test_a_value_that_is_no_number_is_out_of_range() -> None:
    with pytest.raises(TrainingError, match=r"expected knob b in 0.5 to 2 from me, got \[nan\]"):
        KNOBS[1].check(torch.tensor(torch.nan, dtype=torch.float64), 3, "me")


@dataclass(frozen=True)
class Chosen:
    size: int = field(default=1, metadata={"knob": choice(1, 2)})


@dataclass(frozen=True)
class Scaled:
    rate: float = field(default=0.1, metadata={"knob": log(0.01, 1.0)})
    whole: int = 3


def test_knobs_are_declared_beside_options() -> None:
    assert knobs_of(Scaled(rate=0.5)) == (Knob("rate", 0.01, 1.0, 0.5),)
    assert knobs_of(Scaled(rate=0.5))[0].dtype is torch.float64
    assert knob_specs(Scaled()) == {
        "knobs/rate": FieldSpec(Shared, (), torch.float64, low=0.01, high=1.0)
    }
    with pytest.raises(ConfigError, match="expected a range LOW:HIGH of knob size, got choices"):
        knobs_of(Chosen())
    with pytest.raises(ConfigError, match=r"expected rate in 0.01 to 1, its range during a run"):
        knobs_of(Scaled(rate=2.0))
    with pytest.raises(ConfigError, match=r"expected epochs in 1 to 6, .* got 2.5"):
        knobs_of(PacedOptions(epochs=2.5))  # type: ignore[arg-type]


# Runs.


def test_fixed_knobs_are_the_method_without_them(make_graph: MakeGraph) -> None:
    graph = make_graph()
    plain = replace(FEDAVG, name="halves", round=half_round)
    one = go(graph, **run_of("fixed", epochs=3))
    other = go(graph, method=plain, local_epochs=3, block_size=1)
    for name, w in of(other).items():
        torch.testing.assert_close(of(one)[name], w, rtol=0, atol=1e-12)
    assert [row["fact_knob_epochs"] for row in one.rounds] == [3] * 4
    assert [row["fact_knob_mix"] for row in one.rounds] == [1] * 4


def half_round(
    fed: Federation, cfg: MethodConfig, state: ServerState, t: int, key: Key
) -> tuple[ServerState, RoundReport]:
    return FEDAVG.round(fed, replace(cfg, selected=fed.ids[t % 2 :]), state, t, key)


@pytest.mark.parametrize("every", [1, 2])
def test_knobs_follow_the_last_scores(make_graph: MakeGraph, every: int) -> None:
    graph, options = make_graph(), {**run_of("by_loss", epochs=5), "rounds": 5, "max_bytes": 10**6}
    SEEN.clear()
    result = go(graph, **options, eval_every=every)
    first = first_snapshot(setup_of(graph, **options)).scores
    assert first is not None
    assert first.val["server"] is not None
    f_0 = first.val["server"].loss
    assert f_0 is not None
    rows: list[dict[str, Any]] = [dict(row) for row in result.rounds]
    losses = {0: f_0, **{row["round"]: row["val_server_loss"] for row in rows}}
    for row in rows:
        t = int(row["round"])
        scored = max(s for s in losses if s < t)
        assert row["fact_knob_epochs"] == min(6, math.ceil(math.sqrt(losses[scored] / f_0) * 5))
        standing = SEEN[t - 1]
        assert (standing.round, standing.scored) == (t - 1, scored)
        assert standing.val_loss == losses[scored]
        assert standing.bytes_left == 10**6 - standing.bytes
        assert standing.bytes == sum(
            int(r.bytes.sum()) for r in result.ledger.records if r.round < t
        )
    assert len({row["fact_knob_epochs"] for row in rows}) > 1


@pytest.mark.law(sample=3)
@pytest.mark.parametrize("how", ["by_loss", "drawn", "ddpg"])
def test_killed_and_resumed_and_over_a_session_knobs_are_the_same(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    graph, options = make_graph(), {**run_of(how), "eval_every": 2, **CLOCK}
    whole = go(graph, **options, out=str(tmp_path / "whole"))
    run_until(monkeypatch, graph, 4, tmp_path / "half", **{**FAST, **options})
    again_ = sg.resume(tmp_path / "half", graph=graph, method=PACED)
    over, _ = remote(setup_of(graph, **options), train_paced, again)
    there = finish(over)
    for other in (again_, there):
        assert same_bits(weights_of(whole), weights_of(other))
        assert rows_of(whole) == rows_of(other)
        assert lines(whole.ledger.records) == lines(other.ledger.records)
    knobs = {k: t.tolist() for k, t in whole.client_facts.items() if k.startswith("knob")}
    assert len(set(knobs["knob_mix"])) == (1 if how == "by_loss" else 4)
    assert (tmp_path / "whole" / "clients.csv").read_text().count("knob_mix") == 1


def test_a_controller_that_needs_scores_says_so(make_graph: MakeGraph) -> None:
    blind = replace(PACED, needs=replace(PACED.needs, score_first=False))
    with pytest.raises(
        ConfigError, match=r"expected a method that scores .* needs Needs\(score_fi"
    ):
        go(make_graph(), **{**run_of("by_loss"), "method": blind})


def test_a_proposal_out_of_range_ends_the_run(make_graph: MakeGraph) -> None:
    wild = replace(CONTROLLERS["fixed"], propose=lambda *_: {"epochs": torch.tensor(7)})
    method = replace(PACED, needs=replace(PACED.needs, controller=lambda _: wild))
    with pytest.raises(
        TrainingError, match="knob epochs in 1 to 6 from controller fixed in round 1"
    ):
        go(make_graph(), **{**run_of("fixed"), "method": method})


# What silos hold a server to.


def changed_knob(body: bytes, name: str, value: Tensor) -> bytes:
    call = read_call(body)
    envelope, inbox = decode(call.frame)
    form = type(inbox[f"knobs/{name}"])
    inbox[f"knobs/{name}"] = form(value)  # type: ignore[call-arg]
    return call_body(CallBody(call.op, call.key, call.rows, encode(envelope, inbox, 0)))


def test_a_silo_refuses_knobs_and_calls_beyond_their_range(make_graph: MakeGraph) -> None:
    setup = setup_of(make_graph(), **run_of("fixed", epochs=MOST), rounds=2)
    over, links = remote(setup, train_paced, again)
    finish(over)
    name = over.federation.ids[3]
    found = [unpack(data) for data in links[name].requests]
    bodies = [bytes(m.body) for m in found if m.type is Type.CALL]
    program = program_of(setup.config, setup.schema, setup.method, setup.method_config)
    ops = {**own_ops(), **table(train_paced, again)}
    block = setup.federation._host.blocks[3].all  # type: ignore[attr-defined]
    worker, number = worker_of(block, setup.method_config, ops, program=program), 0

    def asked(kind: Type, body: bytes) -> Message:
        nonlocal number
        number += 1
        return unpack(worker.answer(pack(Message(kind, TOKEN, number, body))))

    def refused(body: bytes) -> str:
        answer = asked(Type.CALL, body)
        assert answer.type is Type.REFUSED
        return str(answer.facts()["reason"])

    asked(Type.START, b"{}")
    mixed = torch.tensor([1.5], dtype=torch.float64)
    wild = [
        ("epochs", torch.tensor(MOST + 1), "values up to 6, got 7 for 'knobs/epochs'"),
        ("epochs", torch.tensor(0), "values from 1, got 0"),
        ("epochs", torch.tensor(2.0), "dtype torch.int64, got torch.float32"),
        ("mix", mixed, "values up to 1, got 1.5"),
        ("mix", mixed * torch.nan, "finite numbers, got NaN"),
    ]
    repeated = 0
    for body in bodies:
        op = read_call(body).op.rpartition(":")[2]
        if op == "train_paced":
            assert all(text in refused(changed_knob(body, n, v)) for n, v, text in wild)
        assert asked(Type.CALL, body).type is Type.REPLY
        if op == "again":
            repeated += 1
            assert "as agreed" in refused(body) or "with the key" in refused(body)
    assert repeated == 2 * (MOST - 1)


def test_knobs_that_nothing_moves_are_what_the_options_say() -> None:
    """A silo that agreed to fixed rates takes no others from its server."""
    for name in ("fedgraph", "fedlocal", "fedall"):
        method = METHODS[name]
        specs = knob_specs(method.options(), varies=False)
        knobs = {f"knobs/{knob.name}": knob.start for knob in knobs_of(method.options())}
        assert {n: (s.low, s.high) for n, s in specs.items()} == {
            n: (k, k) for n, k in knobs.items()
        }
        assert knobs
