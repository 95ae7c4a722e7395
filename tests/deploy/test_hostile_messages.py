"""Messages that no honest server sends: what a silo does with each of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_hostile_server import (
    LOCAL,
    Hostile,
    again,
    end,
    go_round,
    reason,
    result,
    silo,
    trained,
)

from sessions import TOKEN
from silograph.core.kinds import Kind
from silograph.core.payload import Field, Shared, Stacked
from silograph.core.resolved_config import training_key
from silograph.federation.checkpoint import read_checkpoint
from silograph.federation.frame import Envelope, encode
from silograph.federation.session.audit import STATES_STAY, Audit, open_audit, read_audit
from silograph.federation.session.message import CallBody, Type, call_body, facts_body, qualified
from silograph.federation.session.state_store import runs_left
from silograph.graph.silos.data import Silo
from silograph.methods.fedavg import train
from silograph.methods.local_only import begin_own

__all__ = ["silo"]  # a fixture


@pytest.mark.parametrize(
    ("told", "line"),
    [
        ({"min_silos": 3}, "expected config, schema, hand_over and code of a server, got 'min_sil"),
        ({"hand_over": "yes"}, "expected whether silos get the model, got 'yes'"),
        ({"hand_over": 1}, "expected whether silos get the model, got 1"),
        ({"hand_over": None}, "expected whether silos get the model, got None"),
        ({"schema": None}, "expected the schema of this silo's data, {'num_features': 7, "),
        ({"schema": {"num_features": 9}}, "expected the schema of this silo's data, "),
        ({"config": None}, "expected the server's config, got none"),
        ({"code": ["x"]}, ""),
    ],
    ids=str,
)
def test_start_says_what_a_silo_knows_and_nothing_else(
    silo: Silo, tmp_path: Path, told: dict[str, Any], line: str
) -> None:
    """Else it would agree to what it does not do."""
    server = Hostile(silo, state=tmp_path / "run")
    facts = server.facts(method="fedavg")
    assert reason(server.ask(Type.START, facts_body({**facts, **told}))).startswith(line)
    assert not (tmp_path / "run").exists()
    assert server.ask(Type.START, facts_body(facts)).type is Type.DONE  # nothing was agreed to


@pytest.mark.parametrize("change", [{"num_classes": 3.0}, {"num_features": 7.0}])
def test_a_schema_has_whole_numbers(silo: Silo, change: dict[str, float]) -> None:
    server = Hostile(silo)
    facts = server.facts(method="fedavg")
    assert facts["schema"].items() >= {n: int(v) for n, v in change.items()}.items()
    wrong = {**facts, "schema": {**facts["schema"], **change}}
    said = reason(server.ask(Type.START, facts_body(wrong)))
    assert said.startswith("expected the schema of this silo's data, ")
    shuffled = {**facts, "schema": dict(reversed(facts["schema"].items()))}
    assert server.ask(Type.START, facts_body(shuffled)).type is Type.DONE


@pytest.mark.parametrize("kind", [Type.KEEP, Type.LOAD])
@pytest.mark.parametrize("number", [True, False, None, 0.0, "0", -2, [0], 10**4000])
def test_rounds_are_whole_numbers(silo: Silo, kind: Type, number: Any) -> None:
    server = Hostile(silo)
    server.start(method="fedavg")
    server.begin()
    said = reason(server.ask(kind, facts_body({"round": number, "committed": []})))
    assert said.startswith(("expected the number of a round, got", "expected a round up to 2, got"))


@pytest.mark.parametrize("committed", [[True], [-1], [-(10**4000)], [0.0], [[0]], {"0": 0}, "0"])
def test_rounds_that_the_server_holds_are_whole_numbers(silo: Silo, committed: Any) -> None:
    server = Hostile(silo)
    server.start(method="fedavg")
    server.begin()
    said = reason(server.ask(Type.KEEP, facts_body({"round": 0, "committed": committed})))
    assert said.startswith("expected the rounds that the server holds, got")


@pytest.mark.parametrize("when", ["in the run", "in another stream", "in another process"])
def test_an_end_without_a_result_leaves_the_states(silo: Silo, tmp_path: Path, when: str) -> None:
    """They hold the only model of `local`; and END needs no START before it."""
    server = trained(silo, tmp_path)
    if when == "in another process":
        server = Hostile(silo, state=tmp_path / "state")
    elif when == "in another stream":
        server.worker.attach()
        server.sequence = 0
    end(server)
    assert [path.name for path in (tmp_path / "state").glob("round-*")]
    assert server.worker.ended == ""


def test_states_go_once_a_result_is_written_whatever_stream_ends_the_run(
    silo: Silo, tmp_path: Path
) -> None:
    server = trained(silo, tmp_path)
    assert result(server, {}).type is Type.DONE
    again(server)
    end(server)
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("number", [2, 3])
def test_a_round_that_never_was_is_not_the_best_one(
    silo: Silo, tmp_path: Path, number: int
) -> None:
    """The silo has no state of it, so the result would have no model, and END drops the states."""
    server = trained(silo, tmp_path)
    assert reason(result(server, {}, number)) == (
        f"expected calls of round 2 before the result of the run, got round {number} as the best "
        "one"
    )
    end(server)
    assert [path.name for path in (tmp_path / "state").glob("round-*")]
    assert not (tmp_path / "results").exists()


def test_who_was_away_in_the_best_round_keeps_its_states(silo: Silo, tmp_path: Path) -> None:
    """They have the only model of `local`; nobody but the server knows of rounds without it."""
    server = trained(silo, tmp_path)
    again(server)
    assert server.ask(Type.LOAD, facts_body({"round": 1})).type is Type.DONE
    assert result(server, {}, 2).type is Type.DONE
    (folder,) = (tmp_path / "results").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == [
        "checksums.json",
        "report.html",
        "result.json",
    ]
    end(server)
    (file,) = (tmp_path / "state").glob("round-*")
    shapes = {name: t.shape for name, t in read_checkpoint(file, 1).tensors.items()}
    for name, shape in server.method_config.model.weight_shapes.items():
        assert shapes[f"weights/{name}/t"] == (1, *shape)  # as the docs tell its owner


def test_who_was_away_in_the_best_round_gets_the_servers_model(silo: Silo, tmp_path: Path) -> None:
    server = Hostile(silo, state=tmp_path / "state", results=tmp_path / "results")
    options = {"method": "fedavg", "eval_every": 2}
    server.start(**options)
    server.begin()
    server.train(server.weights())
    assert server.ask(Type.KEEP, facts_body({"round": 1, "committed": []})).type is Type.DONE
    server.worker.attach()
    server.sequence = 0
    assert server.start(**options).type is Type.DONE
    assert server.ask(Type.LOAD, facts_body({"round": 1})).type is Type.DONE
    assert result(server, server.weights(), 2).type is Type.DONE
    (folder,) = (tmp_path / "results").iterdir()
    assert (folder / "model.safetensors").exists()
    assert json.loads((folder / "result.json").read_text())["took_part"] is False
    end(server)
    assert not (tmp_path / "state").exists()  # there is nothing of its own in them


def test_who_was_not_asked_in_the_best_round_was_in_it_all_the_same(
    silo: Silo, tmp_path: Path
) -> None:
    """Others were selected; the silo keeps its state of before as that of the round."""
    server = Hostile(silo, state=tmp_path / "state", results=tmp_path / "results")
    server.start(**LOCAL, participation=0.5)
    key = training_key(server.config).fold("init")
    server.call(begin_own, server.weights(), Kind.WEIGHTS, key, 0)
    go_round(server, 1)
    assert server.ask(Type.KEEP, facts_body({"round": 2, "committed": [1]})).type is Type.DONE
    assert result(server, {}, 2).type is Type.DONE
    assert list((tmp_path / "results").glob("*/model.safetensors"))
    end(server)
    assert not (tmp_path / "state").exists()


def test_a_result_without_the_silos_model_does_not_stand_for_one_with_it(
    silo: Silo, tmp_path: Path
) -> None:
    """Told before the silo has done the round, and once more when it has."""
    server = trained(silo, tmp_path)
    again(server)
    assert server.ask(Type.LOAD, facts_body({"round": 1})).type is Type.DONE
    assert result(server, {}, 2).type is Type.DONE
    again(server)
    assert server.ask(Type.LOAD, facts_body({"round": 1})).type is Type.DONE
    go_round(server, 2)
    said = reason(result(server, {}, 2))
    assert said.startswith("expected a result with this silo's own model in ")
    end(server)
    assert [path.name for path in (tmp_path / "state").glob("round-*")]


@pytest.mark.parametrize("told", ["no result", "one without its model", "its result"])
def test_states_and_the_audit_agree_on_whether_a_run_is_over(
    silo: Silo, tmp_path: Path, told: str
) -> None:
    """Where states stay another process may go on with the run, and else none can."""
    path = tmp_path / "audit.jsonl"

    def process(audit: Audit) -> Hostile:
        state = tmp_path / "states" / TOKEN.hex()
        return Hostile(silo, state=state, results=tmp_path / "results", audit=audit)

    with open_audit(path, {}) as (audit, _):
        server = process(audit)
        server.start(**LOCAL)
        key = training_key(server.config).fold("init")
        server.call(begin_own, server.weights(), Kind.WEIGHTS, key, 0)
        go_round(server, 1)
        again(server)
        assert server.ask(Type.LOAD, facts_body({"round": 1})).type is Type.DONE
        if told != "no result":
            number = 1 if told == "its result" else 2
            assert result(server, {}, number).type is Type.DONE
        end(server)
        audit.to_end(lambda: server.worker.ended or None)
    with path.open("rb") as file:
        (run,) = read_audit(file).runs
    assert run.ended is not None
    stays = told != "its result"
    assert run.ended.facts["reason"] == (STATES_STAY if stays else None)
    assert runs_left(tmp_path / "states") == ([TOKEN] if stays else [])
    with open_audit(path, {}) as (audit, _):
        said = process(audit).start(**LOCAL)
    if stays:
        assert said.type is Type.DONE
    else:
        assert "got one that this silo has seen the end of" in reason(said)


def test_who_goes_back_keeps_what_is_done_then(silo: Silo, tmp_path: Path) -> None:
    """Not the later states of before, in whose favor a state just kept would be dropped."""
    options = {**LOCAL, "rounds": 6, "eval_every": 6}
    server = Hostile(silo, state=tmp_path / "state")
    server.start(**options)
    key = training_key(server.config).fold("init")
    server.call(begin_own, server.weights(), Kind.WEIGHTS, key, 0)
    for t in range(1, 5):
        go_round(server, t)
    assert server.ask(Type.LOAD, facts_body({"round": 1})).type is Type.DONE
    go_round(server, 2)
    kept = sorted(path.name for path in (tmp_path / "state").glob("round-*"))
    assert kept == [f"round-{t:09d}.checkpoint" for t in (1, 2)]
    other = Hostile(silo, state=tmp_path / "state")
    assert other.start(**options).type is Type.DONE
    assert reason(other.ask(Type.LOAD, facts_body({"round": 4}))).endswith("of round 4, got none")
    assert other.ask(Type.LOAD, facts_body({"round": 2})).type is Type.DONE


def test_a_call_that_is_cut_short_or_too_long_reaches_no_op(silo: Silo) -> None:
    """At every byte of its head and of the frame's, and behind its end."""
    server = Hostile(silo)
    server.start(method="fedavg")
    server.begin()
    key = training_key(server.config).fold("train", 1)
    frame = encode(Envelope("train", Kind.WEIGHTS, 1, 1), server.weights(), 0)
    body = call_body(CallBody(qualified(train), key, False, frame))
    for wrong in (*(body[:size] for size in range(0, len(body), 7)), body + b"\0", body + frame):
        assert server.ask(Type.CALL, wrong).type is Type.REFUSED
    assert server.ask(Type.CALL, body).type is Type.REPLY


@pytest.mark.parametrize(
    "change",
    [
        {"extra": Shared(torch.zeros(1))},
        {"weights/0.weight\0": Shared(torch.zeros(7, 8))},
        {"weights/0.bias": Stacked(torch.zeros(1, 8))},
        {"weights/0.bias": Shared(torch.zeros(0))},
        {"weights/0.bias": Shared(torch.zeros(8, 0))},
        {"weights/0.bias": Shared(torch.full((8,), -torch.inf))},
        {"weights/0.bias": Shared(torch.zeros(8, dtype=torch.int64))},
    ],
    ids=str,
)
def test_fields_that_are_not_agreed_reach_no_op(silo: Silo, change: dict[str, Field]) -> None:
    server = Hostile(silo)
    server.start(method="fedavg")
    server.begin()
    assert "inbox of train" in reason(server.train({**server.weights(), **change}))
    fewer = dict(list(server.weights().items())[1:])
    assert reason(server.train(fewer)).endswith(", got none in inbox of train")
    assert server.train(server.weights()).type is Type.REPLY


def test_weights_at_the_end_of_the_range_hold_nobody_up(silo: Silo) -> None:
    """They are finite numbers: the reply may be NaN, and the silo goes on with the next round."""
    server = Hostile(silo)
    server.start(method="fedavg", rounds=3, eval_every=3)
    server.begin()
    most = torch.finfo(torch.float32).max
    huge: dict[str, Field] = {
        name: Shared(torch.full_like(field.t, most)) for name, field in server.weights().items()
    }
    assert server.train(huge).type is Type.REPLY
    assert server.train(server.weights(), 2).type is Type.REPLY


@pytest.mark.parametrize("lr", [float("nan"), float("inf"), -1.0, "a", [0.1], 10**400])
def test_numbers_of_a_config_are_finite(silo: Silo, lr: Any) -> None:
    server = Hostile(silo)
    facts = server.facts(method="fedavg")
    facts["config"]["lr"] = lr
    assert reason(server.ask(Type.START, facts_body(facts)))


@pytest.mark.parametrize("name", ["lr", "rounds", "hidden", "threads", "partition"])
def test_null_leaves_no_default_to_a_silo(silo: Silo, name: str) -> None:
    """Both ends would read their own default, and what was agreed to would not say it."""
    server = Hostile(silo)
    facts = server.facts(method="fedavg")
    facts["config"][name] = None
    said = reason(server.ask(Type.START, facts_body(facts)))
    assert "every default written out, got none of" in said or said.startswith(name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rounds", 2.0),
        ("rounds", "2"),
        ("seed", False),
        ("seed", 0.0),
        ("local_bias", 0),
        ("keep_optimizer", "no"),
        ("hidden", 8.0),
        ("clients", True),
        ("options.method.beta", "0.9"),
        ("options.model.residual", 0),
        ("options.server_optimizer.server_lr", True),
    ],
)
def test_a_config_says_what_the_silo_reads(silo: Silo, name: str, value: Any) -> None:
    """Else who reads what was agreed to, in the audit or in run.json, reads another run."""
    server = Hostile(silo)
    facts = server.facts(method="fedopt")
    place, _, key = name.partition(".")
    told = facts["config"]["options"] if place == "options" else facts["config"]
    told[key if place == "options" else name] = value
    said = reason(server.ask(Type.START, facts_body(facts)))
    assert (key or name).rpartition(".")[2] in said
    assert server.start(method="fedopt").type is Type.DONE  # nothing was agreed to


@pytest.mark.parametrize("name", ["\ud800", "\x1b[2J", "a\nb", "../../x", 5, None, [], {}])
def test_names_of_a_config_are_those_that_a_silo_has(silo: Silo, name: Any) -> None:
    server = Hostile(silo)
    facts = server.facts(method="fedavg")
    facts["config"]["method"] = name
    said = reason(server.ask(Type.START, facts_body(facts)))
    assert said.isprintable()
    json.dumps(said).encode()
