"""Training an agent: ordinary runs, one after the other, each with its own seed, carry it on.

    OUT/agent.safetensors              the agent after the last episode, for --option agent=FILE
    OUT/episodes.jsonl                 a line for each episode that is over
    OUT/agents/agent-0007.safetensors  the agent after episode 7; there are those of the last two

An episode that was interrupted is run again from its beginning, with the same result.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from silograph.control.ddpg import PROFILE, AgentOptions, agent_of, write_agent
from silograph.core.config import ENGINE, RunConfig
from silograph.core.errors import ConfigError, mistake
from silograph.core.files import write_atomic
from silograph.core.numeric_state import standard_numerics
from silograph.core.payload import fields_under
from silograph.experiment.result_files import CHECKPOINTS, FACT, KNOB
from silograph.experiment.run.run import run
from silograph.experiment.run.snapshot import CONTROLLER
from silograph.federation.checkpoint import CheckpointFolder
from silograph.graph.graph import Graph

EPISODES = "episodes.jsonl"
EPISODE = ".episode"  # folder of the run that is going on; removed before and after
AGENT = "agent.safetensors"
AGENTS = "agents"
# Files of a first episode that was killed.
FIRST_EPISODE_FILES = {EPISODE, AGENTS, f"{EPISODES}.partial"}
EpisodeCallback = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class AgentTraining:
    """How an agent is trained.

    Attributes:
        config: of every episode; its method is controlled by an agent (`policy=ddpg`).
        episodes: how many runs, those that are over included.
        seeds: how many partitions, splits and initial weights they take turns in; draws of
            training differ in every episode.
    """

    config: RunConfig
    episodes: int
    seeds: int


@standard_numerics()
def train_agent(
    training: AgentTraining,
    out: Path,
    graph: Graph | None = None,
    report: EpisodeCallback = lambda _: None,
) -> Path:
    """Train an agent, or resume its training; return the path of the agent.

    Args:
        training: how.
        out: folder of the agent.
        graph: of the episodes; None reads that of the config.
        report: called with the line of every episode that is over.

    Raises:
        ConfigError: the folder holds something else, or another training, or the config has no
            agent.
    """
    config = training.config
    if config.options.get("policy", config.options.get("method.policy")) != "ddpg":
        raise ConfigError(
            "expected a method whose knobs an agent sets, got none: give --method fedgraph "
            "--option policy=ddpg"
        )
    check_folder(out)
    lines = lines_in(out)
    for line in lines:
        check_same(line, training, out)
    for number in range(len(lines), training.episodes):
        lines.append(episode(training, out, graph, number))
        text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
        write_atomic(out / EPISODES, text)
        write_atomic(out / AGENT, agent_path(out, len(lines)).read_bytes())
        report(lines[-1])
    return out / AGENT


def check_folder(out: Path) -> None:
    """Raise `ConfigError` where there is something that is neither an agent's folder nor empty."""
    if not os.path.lexists(out) or (out / EPISODES).exists():
        return
    if not out.is_dir() or any(path.name not in FIRST_EPISODE_FILES for path in out.iterdir()):
        raise ConfigError(
            f"expected a new or empty folder for the agent, or that of an agent, got {out}: choose "
            "another --out, nothing was overwritten",
            **mistake("existing-output", out),
        )


def lines_in(out: Path) -> list[dict[str, Any]]:
    """Return the lines of finished episodes; raise `ConfigError` for an invalid file."""
    path = out / EPISODES
    if not path.exists():
        return []
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if not all(line["episode"] == number for number, line in enumerate(lines, 1)):
            raise ValueError("their order")
        if not all(isinstance(line["training"], str) for line in lines):
            raise ValueError("a line without its training")
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"expected the episodes of an agent in {path}, got: {error}",
            **mistake("damaged-file", path),
        ) from None
    return lines


def missing_rounds(out: Path) -> int:
    """Return how many rounds an agent lacks before it has learned anything: 0 if it has."""
    episodes = lines_in(out)
    return max(PROFILE + 1 - (episodes[-1].get("rounds", 0) if episodes else 0), 0)


def check_same(line: dict[str, Any], training: AgentTraining, out: Path) -> None:
    """Raise `ConfigError` where a finished episode belongs to another training."""
    description = describe_training(training)
    if line["training"] != description:
        raise ConfigError(
            f"expected to go on with the training in {out}, got another config "
            f"({describe_differences(line['training'], description)}): take another folder, or ask "
            "for what is there",
            **mistake("existing-output", out),
        )


def describe_differences(old_training: str, new_training: str) -> str:
    """Return the keys by which two trainings differ, with the value of each."""
    old_values, new_values = _flatten(old_training), _flatten(new_training)
    keys = [
        key for key in {**old_values, **new_values} if old_values.get(key) != new_values.get(key)
    ]
    return ", ".join(
        f"{key}={_value_text(old_values, key)} there, {_value_text(new_values, key)} now"
        for key in keys
    )


def _value_text(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key)
    return value if isinstance(value, str) else json.dumps(value)


def _flatten(text: str) -> dict[str, Any]:
    """Return the settings of a training's description by key; {} for an invalid description."""
    try:
        description = json.loads(text)
        config = dict(description["config"])
        options = {f"option {name}": value for name, value in config.pop("options").items()}
        return {**config, **options, "seeds": description["seeds"]}
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}


def describe_training(training: AgentTraining) -> str:
    """Return the settings of a training as JSON, without the number of episodes."""
    config_values = {
        f.name: getattr(training.config, f.name)
        for f in fields(training.config)
        if f.name not in ("out", *ENGINE)
    }
    return json.dumps(
        {"config": config_values, "seeds": training.seeds}, sort_keys=True, default=str
    )


def agent_path(out: Path, episodes: int) -> Path:
    """Return the file of the agent after so many episodes."""
    return out / AGENTS / f"agent-{episodes:04d}.safetensors"


def config_of(training: AgentTraining, out: Path, number: int) -> RunConfig:
    """Return the config of an episode, counted from 0."""
    config, turn = training.config, number % training.seeds
    options = dict(config.options)
    if number > 0:
        options["agent"] = str(agent_path(out, number).resolve())
    return replace(
        config,
        options=options,
        seed=config.seed + number,
        partition_seed=config.seed + turn,
        split_seed=config.seed + turn,
        init_seed=config.seed + turn,
        checkpoint_every=config.rounds,
        out=str(out / EPISODE),
    )


def episode(training: AgentTraining, out: Path, graph: Graph | None, number: int) -> dict[str, Any]:
    """Run an episode and write the agent after it; return its line."""
    config = config_of(training, out, number)
    folder = out / EPISODE
    shutil.rmtree(folder, ignore_errors=True)  # of an episode that was interrupted
    result = run(graph, config=config)
    checkpoint, _ = CheckpointFolder(folder / CHECKPOINTS).latest()
    assert checkpoint is not None  # the run has written one after its last round
    controller_memory = fields_under(f"server/memory/{CONTROLLER[:-1]}", checkpoint.tensors)
    agent = agent_of(controller_memory)
    path = agent_path(out, number + 1)
    path.parent.mkdir(exist_ok=True)
    write_agent(path, agent)
    agent_path(out, number - 1).unlink(missing_ok=True)
    shutil.rmtree(folder)
    rows, view = result.rounds, result.method.evaluate.view
    validation = [row[f"val_{view}_{result.metric.name}"] for row in rows]
    return {
        "training": describe_training(training),
        "episode": number + 1,
        "rounds": int(agent["rounds"]),
        "return": discounted_return(agent, len(rows)),
        "best_validation": result.metric.best(validation),
        "virtual_seconds": rows[-1].get("virtual_seconds"),
        "seconds": result.seconds,
        **{key: rows[-1][key] for key in rows[-1] if key.startswith(FACT + KNOB)},
    }


def discounted_return(agent: dict[str, Tensor], rounds: int) -> float | None:
    """Return the discounted return of the last so many rounds; None before the profile is over."""
    seen, rewards = int(agent["rounds"]), agent["replay/reward"]
    if seen < PROFILE or rounds > min(seen, len(rewards)):
        return None
    place = torch.arange(seen - rounds, seen) % len(rewards)
    powers = AgentOptions().learning.discount ** torch.arange(rounds)
    return float((rewards[place] * powers).sum())
