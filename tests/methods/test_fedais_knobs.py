"""Laws of FedAIS under an agent: it sets the interval, and the share of nodes of each client."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import silograph as sg
from remote_runs import finish, lines, remote, setup_of
from runs import FAST, assert_close, go, rows_of, run_until, same_bits, weights_of
from sessions import TOKEN, worker_of
from silograph.control import DRAWN, FIXED, Controller
from silograph.control.ddpg import PROFILE
from silograph.core.config import make_config
from silograph.core.errors import CheckpointError, ConfigError
from silograph.core.payload import Shared, Stacked
from silograph.experiment.resolve.run_program import program_of
from silograph.experiment.run.run import first_snapshot
from silograph.federation.checkpoint import read_checkpoint, to_bytes
from silograph.federation.frame import FIELD, decode, encode
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
from silograph.graph.graph import Graph
from silograph.methods import Method
from silograph.methods.fedais import (
    FEDAIS,
    FedAISOptions,
    controller_of,
    knobs_of_run,
    moving_knobs,
)
from silograph.study.train_agent import AgentTraining, train_agent

MakeGraph = Callable[..., Graph]
FEW: dict[str, Any] = {"batches": 3, "drawn": 3, "tau": 2}
RUN: dict[str, Any] = {
    **FAST,
    "method": "fedais",
    "model": "sage",
    "speeds": "1,2,4",  # an agent's reward has the seconds of a virtual clock
    "participation": 0.75,
}


def with_policy(policy: str, **other: Any) -> dict[str, Any]:
    return {**RUN, "options": {**FEW, "policy": policy, **other}}


def controlled(controller: Controller) -> Method[FedAISOptions]:
    """FedAIS under a controller; which knobs there are, options say."""
    needs = replace(FEDAIS.needs, controller=lambda _: controller)
    return replace(FEDAIS, name="controlled", needs=needs)


@pytest.mark.law(sample=24)
@pytest.mark.parametrize("kernels", ["torch", "compiled"])
@pytest.mark.parametrize("unbiased", [False, True])
def test_constant_knobs_are_the_run_without_them(
    make_graph: MakeGraph, kernels: str, *, unbiased: bool
) -> None:
    """Bit for bit; a called client gets one field more, its ratio."""
    graph, own = make_graph(60), {"unbiased": unbiased}
    given = {**with_policy("drawn", **own), "method": controlled(FIXED), "kernels": kernels}
    plain = {**with_policy("rule", interval="fixed", **own), "kernels": kernels}
    one, other = go(graph, **given), go(graph, **plain)
    assert same_bits(weights_of(one), weights_of(other))
    skipped = ("bytes", "fact_knob_ratio", "virtual_seconds")  # a message more takes a while
    for a, b in zip(rows_of(one), rows_of(other), strict=True):
        assert a["fact_knob_ratio"] == pytest.approx(FedAISOptions().ratio)
        ours, theirs = ({k: v for k, v in r.items() if not k.startswith(skipped)} for r in (a, b))
        assert ours == theirs
    size = FIELD.size + len("knobs/ratio") + 8
    for told, bare in zip(one.ledger.records, other.ledger.records, strict=True):
        more = size * (told.op == "open_round" and told.direction == "down")
        assert bool((told.bytes == bare.bytes + more).all())


def test_each_client_draws_its_own_share_alike_in_both_backends(make_graph: MakeGraph) -> None:
    graph, found = make_graph(80), list[Tensor]()

    def drawn(*args: Any) -> Mapping[str, Tensor]:
        values = DRAWN.propose(*args)
        found.append(values["ratio"])
        return values

    method = controlled(replace(DRAWN, propose=drawn))
    given = {**with_policy("drawn"), "participation": 1.0, "method": method, "local_epochs": 1}
    one, other = (go(graph, **given, kernels=kernels) for kernels in ("torch", "compiled"))
    assert_close(one, other, 1e-10)
    assert one.ledger.bytes_by_kind == other.ledger.bytes_by_kind
    setup = setup_of(graph, FEDAIS, model="sage")
    nodes = torch.cat([part.all.num_train for part in setup.federation._host.blocks])  # type: ignore[attr-defined]
    assert len(torch.cat(found).unique()) == 16
    for row, share in zip(one.rounds, found[:4], strict=True):
        assert bool(((share >= 0.05) & (share <= 1)).all())
        count = torch.floor(share * nodes + 0.5).clamp(min=1)
        assert row["fact_rows_trained"] == pytest.approx(float(count.mean()))


def test_an_agent_sets_both_alike_after_a_kill_and_over_a_session(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the agent's profile, with clients that take no part."""
    graph, last = make_graph(40), PROFILE + 2
    given = {**with_policy("ddpg"), "rounds": last, "block_size": 1}
    whole = go(graph, **given)
    run_until(monkeypatch, graph, last - 1, tmp_path / "half", **given)
    again = sg.resume(tmp_path / "half", graph=graph)
    rest = {k: v for k, v in given.items() if k != "method"}
    there = finish(remote(setup_of(graph, FEDAIS, **rest))[0])
    for other in (again, there):
        assert same_bits(weights_of(whole), weights_of(other))
        assert rows_of(whole) == rows_of(other)
        assert lines(whole.ledger.records) == lines(other.ledger.records)
    assert len(set(whole.client_facts["knob_ratio"].tolist())) == 4
    assert len({row["fact_knob_ratio"] for row in whole.rounds}) == last
    assert len({row["fact_knob_tau"] for row in whole.rounds}) > 1


def test_a_silo_refuses_other_ratios(make_graph: MakeGraph) -> None:
    setup = setup_of(
        make_graph(), FEDAIS, options={**FEW, "policy": "drawn"}, model="sage", rounds=1
    )
    bodies, answer = asked_of(setup)
    opens = [body for body in bodies if read_call(body).op.endswith(":open_round")]
    assert len(opens) == 1
    one = torch.ones(1, dtype=torch.float64)
    wild: list[tuple[Any, str]] = [
        (Stacked(one * 1.5), "values up to 1, got 1.5 for 'knobs/ratio'"),
        (Stacked(one * 0.01), "values from 0.05, got 0.01 for 'knobs/ratio'"),
        (Stacked(-one), "values from 0.05, got -1"),
        (Stacked(one * torch.nan), "finite numbers, got NaN"),
        (Stacked(one * torch.inf), "finite numbers, got"),
        (Stacked(one.float()), "dtype torch.float64, got torch.float32"),
        (Stacked(torch.ones(1, 2, dtype=torch.float64)), "knobs/ratio"),
        (Shared(one[0]), "knobs/ratio"),
        (None, "knobs/ratio"),
    ]
    for body in bodies:
        if body is opens[0]:
            for field, text in wild:
                found = answer(changed(body, field))
                assert found.type is Type.REFUSED
                assert text in str(found.facts()["reason"])
        assert answer(body).type is Type.REPLY


def test_a_silo_that_agreed_to_the_rules_takes_no_ratio(make_graph: MakeGraph) -> None:
    setup = setup_of(make_graph(), FEDAIS, options=FEW, model="sage", rounds=1)
    bodies, answer = asked_of(setup)
    for body in bodies:
        if read_call(body).op.endswith(":open_round"):
            found = answer(changed(body, Stacked(torch.full((1,), 0.7, dtype=torch.float64))))
            assert found.type is Type.REFUSED
            assert "knobs/ratio" in str(found.facts()["reason"])
        assert answer(body).type is Type.REPLY


def asked_of(setup: Any) -> tuple[list[bytes], Callable[[bytes], Message]]:
    """The calls that a silo got in an honest run, and a worker of it that has seen none yet."""
    over, links = remote(setup)
    finish(over)
    name, program = (
        over.federation.ids[3],
        program_of(setup.config, setup.schema, setup.method, setup.method_config),
    )
    found = [unpack(data) for data in links[name].requests]
    block = setup.federation._host.blocks[3].all
    worker, number = worker_of(block, setup.method_config, own_ops(), program=program), 0

    def answer(body: bytes, kind: Type = Type.CALL) -> Message:
        nonlocal number
        number += 1
        return unpack(worker.answer(pack(Message(kind, TOKEN, number, body))))

    answer(b"{}", Type.START)
    return [bytes(m.body) for m in found if m.type is Type.CALL], answer


def changed(body: bytes, field: Any) -> bytes:
    call = read_call(body)
    envelope, inbox = decode(call.frame)
    inbox.pop("knobs/ratio", None)
    inbox |= {} if field is None else {"knobs/ratio": field}
    return call_body(CallBody(call.op, call.key, call.rows, encode(envelope, inbox, 0)))


def names(**options: Any) -> tuple[set[str], set[str]]:
    found = FedAISOptions(**options)
    return {knob.name for knob in knobs_of_run(found)}, set(moving_knobs(found))


def test_only_knobs_that_change_anything_are_set() -> None:
    assert names() == ({"tau"}, {"tau"})
    assert names(interval="fixed") == ({"tau"}, set())
    assert names(policy="ddpg") == ({"tau", "ratio"},) * 2
    assert names(policy="ddpg", halo="none") == ({"ratio"},) * 2
    assert names(policy="drawn", nodes="all") == ({"tau"},) * 2
    agent = controller_of(FedAISOptions(policy="ddpg", target=0.5, agent_seed=3)).options
    assert (agent.target, agent.seed) == (0.5, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": "all", "halo": "none"}, "expected an option that policy=ddpg can set, got none"),
        ({"ratio": 0.01}, "expected ratio in 0.05 to 1, its range during a run, got 0.01"),
    ],
)
def test_runs_in_which_nothing_can_be_set_are_refused(
    make_graph: MakeGraph, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        go(make_graph(40), **with_policy("ddpg", **options))
    go(make_graph(40), **{**with_policy("rule", **options), "rounds": 1})


def test_an_agent_of_fedais_is_trained(make_graph: MakeGraph, tmp_path: Path) -> None:
    config = make_config({**with_policy("ddpg"), "rounds": 2})
    path = train_agent(AgentTraining(config, 1, seeds=1), tmp_path, make_graph(40))
    assert path.exists()


def test_the_interval_of_a_run_follows_its_validation_loss(make_graph: MakeGraph) -> None:
    """Eq. 11: F_0 is that of the first weights, F_t that of the last scored round."""
    graph, start = make_graph(60), 40
    given = {**RUN, "lr": 0.02, "rounds": 8, "eval_every": 2}
    given["options"] = {**FEW, "batches": 10, "tau": start}
    own = {name: value for name, value in given.items() if name != "method"}
    result = go(graph, **given)
    first = first_snapshot(setup_of(graph, FEDAIS, **own)).scores
    assert first is not None
    assert first.val["server"] is not None
    f_0 = first.val["server"].loss
    assert f_0 is not None
    losses, rows = {0: f_0}, [dict[str, Any](row) for row in result.rounds]
    for row in rows:
        t = int(row["round"])
        before = losses[max(s for s in losses if s < t)]
        expected = math.ceil(math.sqrt(before / f_0) * start)
        assert row["fact_knob_tau"] == expected
        assert row["fact_exchanges"] == math.ceil(10 / expected)
        losses[t] = row["val_server_loss"]
    assert len({row["fact_knob_tau"] for row in rows}) > 2


@pytest.mark.law(sample=12)
@pytest.mark.parametrize("share", [0.8, 0.6])
@pytest.mark.parametrize(("every", "interval"), [(1, "adaptive"), (5, "adaptive"), (5, "bound")])
def test_a_limit_of_bytes_is_kept_to_the_last_round(
    make_graph: MakeGraph, share: float, every: int, interval: str
) -> None:
    """Also where few rounds are scored, which costs much and not in every round."""
    options = {"batches": 5, "tau": 1, "interval": interval}
    given = {"rounds": 20, "lr": 0.01, "participation": 1.0, "eval_every": every}
    run = {**RUN, "clients": 6, **given, "options": options}
    graph = make_graph(100)
    full = go(graph, **run)
    least = go(graph, **{**run, "options": {**options, "tau": 100, "interval": "fixed"}})
    limit = int(least.ledger.bytes + share * (full.ledger.bytes - least.ledger.bytes))
    found = go(graph, **run, max_bytes=limit)
    assert found.rounds[-1]["round"] == 20
    assert "max_bytes" not in found.stopped
    assert 0.85 * limit < found.ledger.bytes < limit


@pytest.mark.parametrize("limit", [None, 10**12])
def test_a_checkpoint_without_what_the_interval_goes_by_is_one_line(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    """As those of versions that did not remember the dearest round."""
    out = tmp_path / "run"
    given = {**RUN, "options": FEW, "max_bytes": limit, "checkpoint_every": 1}
    run_until(monkeypatch, make_graph(), 3, out, **given)
    for path in out.glob("checkpoints/round-*"):
        found = read_checkpoint(path, int(path.stem.rpartition("-")[2]))
        tensors = {n: t for n, t in found.tensors.items() if not n.endswith("controller/dear")}
        assert len(tensors) == len(found.tensors) - 1
        path.write_bytes(b"".join(to_bytes(replace(found, tensors=tensors))))
    with pytest.raises(CheckpointError) as caught:
        sg.resume(out, graph=make_graph())
    assert str(caught.value) == (
        "expected 'dear' in what the controller keeps between rounds, got batches, bytes, "
        "exchange, first, fixed: its functions must return the same names in every round; a "
        "checkpoint of another version needs a new run"
    )
