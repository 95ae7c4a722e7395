"""Training of an agent: it stops and goes on, its file is used, and silos never see a path."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from mistakes import raises_code
from runs import FAST, go, rows_of
from silograph.cli import run_app
from silograph.control.ddpg import PROFILE
from silograph.core.config import make_config
from silograph.core.errors import ConfigError
from silograph.deploy.server import start_facts
from silograph.experiment.run.setup import prepare
from silograph.graph.graph import Graph
from silograph.study import train_agent as training
from silograph.study.train_agent import AgentTraining, missing_rounds, train_agent

MakeGraph = Callable[..., Graph]
RUN: dict[str, Any] = {
    **FAST,
    "method": "fedgraph",
    "rounds": 12,
    "clients": 2,
    "speeds": "1,2",
    "options": {"policy": "ddpg", "share": "none"},
}


def asked(episodes: int, **other: Any) -> AgentTraining:
    return AgentTraining(make_config({**RUN, **other}), episodes, seeds=2)


def test_a_training_that_stopped_goes_on_as_if_it_had_not(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = make_graph(60)
    whole = train_agent(asked(3), tmp_path / "whole", graph)
    train_agent(asked(1), tmp_path / "parts", graph)

    def stopped(*args: Any, **options: Any) -> Any:
        (tmp_path / "parts" / ".episode").mkdir()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(training, "run", stopped)
        with pytest.raises(KeyboardInterrupt):
            train_agent(asked(3), tmp_path / "parts", graph)
    parts = train_agent(asked(3), tmp_path / "parts", graph)
    ours, theirs = load_file(whole), load_file(parts)
    assert ours.keys() == theirs.keys()
    assert all((ours[name] == theirs[name]).all() for name in ours)
    assert int(ours["rounds"]) == 36 > PROFILE
    lines = (tmp_path / "parts" / "episodes.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    assert [line["episode"] for line in found] == [1, 2, 3]
    assert [line["return"] is None for line in found] == [True, False, False]
    assert sorted(p.name for p in (tmp_path / "parts" / "agents").iterdir()) == [
        "agent-0002.safetensors",
        "agent-0003.safetensors",
    ]
    configs = [training.config_of(asked(3), tmp_path, number) for number in range(3)]
    assert [c.seed for c in configs] == [0, 1, 2]
    assert [c.partition_seed for c in configs] == [0, 1, 0]

    # What it has learned is used, and stays as it is.
    options = {**RUN["options"], "agent": str(whole), "explore": False}
    one, two = (go(graph, **{**RUN, "options": options, "seed": seed}) for seed in (5, 5))
    assert rows_of(one) == rows_of(two)

    with raises_code(ConfigError, "existing-output") as raised:
        train_agent(asked(4, hidden=16), tmp_path / "parts", graph)
    hidden = RUN["hidden"]
    assert f"another config (hidden={hidden} there, 16 now): take another" in str(raised.value)
    (tmp_path / "parts" / "episodes.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="expected the episodes of an agent in"):
        train_agent(asked(4), tmp_path / "parts", graph)


def test_what_differs_between_trainings_is_named_key_by_key() -> None:
    there, ours = asked(1), asked(1, lr=0.5, options={**RUN["options"], "share": "all"})
    said = training.describe_differences(
        training.describe_training(there), training.describe_training(ours)
    )
    assert said == "lr=0.05 there, 0.5 now, option share=none there, all now"
    assert training.describe_differences("of another version", "null") == ""


def test_what_ends_within_the_profile_says_that_nothing_was_learned(
    make_graph: MakeGraph, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = make_graph(60)
    result = go(graph, **RUN)
    assert result.advice is not None
    line = "all 12 rounds were the agent's profile (it takes 20): the agent set nothing"
    assert result.advice.startswith(line)
    path = train_agent(asked(1), Path("agents"), graph)
    assert missing_rounds(Path("agents")) == PROFILE + 1 - 12
    options = {**RUN["options"], "agent": str(path)}
    longer = go(graph, **{**RUN, "options": options})  # 24 rounds in all, 4 of them the agent's
    assert "profile" not in (longer.advice or "")
    fixed = go(graph, **{**RUN, "options": {"share": "none"}, "rounds": 1})
    assert "profile" not in (fixed.advice or "")
    command = ["train-agent", "g.npz", "--method", "fedgraph", "--option", "policy=ddpg"]
    command += ["--option", "share=none", "--rounds", "1", "--clients", "2", "--speeds", "equal"]
    for episodes, missing, quiet in (
        ("1", "20 more rounds", ["--quiet"]),
        ("2", "19 more rounds", []),
    ):
        more = ["--episodes", episodes, "--out", "a", "--hidden", "4", *quiet]
        assert run_app([*command, *more]) == 0
        shown, told = capsys.readouterr()
        assert ("episode 2: profile, validation" in told) is (not quiet)
        assert bool(told) is (not quiet)
        assert "nothing was learned yet" in shown
        assert f"{missing} at least: raise --episodes" in shown
        assert "use it with" not in shown


def test_a_folder_of_anything_else_is_not_changed(make_graph: MakeGraph, tmp_path: Path) -> None:
    graph, out = make_graph(60), tmp_path / "run"
    go(graph, **{**RUN, "rounds": 1, "out": str(out)})
    there = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    (tmp_path / "file").write_text("of another")
    for path in (out, tmp_path / "file"):
        with raises_code(ConfigError, "existing-output"):
            train_agent(asked(1), path, graph)
    assert there == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_a_first_episode_that_was_killed_is_begun_again(
    make_graph: MakeGraph, tmp_path: Path
) -> None:
    one = asked(1, rounds=1)
    whole = train_agent(one, tmp_path / "whole", make_graph(60))
    (tmp_path / "begun" / "agents").mkdir(parents=True)
    (tmp_path / "begun" / "agents" / "agent-0001.safetensors").write_bytes(b"half")
    (tmp_path / "begun" / ".episode").mkdir()
    begun = train_agent(one, tmp_path / "begun", make_graph(60))
    assert begun.read_bytes() == whole.read_bytes()
    (tmp_path / "empty").mkdir()
    assert train_agent(one, tmp_path / "empty", make_graph(60)).read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(
    ("method", "policy"), [("fedgraph", "drawn"), ("fedgraph", None), ("fedais", None)]
)
def test_an_agent_that_no_policy_uses_is_refused(
    make_graph: MakeGraph, tmp_path: Path, method: str, policy: str | None
) -> None:
    own = {"agent": "nosuch.safetensors"} | ({} if policy is None else {"policy": policy})
    with raises_code(ConfigError, "conflicting-options", options=["policy", "agent"]):
        go(make_graph(60), **{**RUN, "method": method, "options": own, "out": str(tmp_path / "r")})
    assert not (tmp_path / "r").exists()


def test_a_config_without_an_agent_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a method whose knobs an agent sets, got none"):
        train_agent(asked(1, options={}), tmp_path)


def test_the_path_of_an_agent_stays_at_the_server(make_graph: MakeGraph) -> None:
    config = make_config({**RUN, "options": {**RUN["options"], "agent": "/at/the/server"}})
    setup = prepare(config, make_graph(60))
    assert setup.config.options["method.agent"] == "/at/the/server"
    told = start_facts(setup.config, setup.schema)
    assert "method.agent" not in told["config"]["options"]
    assert "/at/the/server" not in json.dumps(told)
    other = replace(setup.config, options={**setup.config.options, "method.agent": None})
    assert start_facts(other, setup.schema) == told
