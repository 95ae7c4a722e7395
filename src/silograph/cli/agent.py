"""`silograph train-agent`: episodes of an agent, one run after the other."""

import shlex
from pathlib import Path
from typing import Any

import typer

from silograph.cli.flags import FIELDS, Given, command
from silograph.cli.hints import going_on
from silograph.core.errors import ConfigError
from silograph.core.text import counted


@command(
    "train-agent",
    [name for name in FIELDS if name not in ("checkpoint_every", "tracker")],
    {
        "episodes": (
            int,
            typer.Option(100, "--episodes", help="runs, those that are over included"),
        ),
        "seeds": (
            int,
            typer.Option(
                5,
                "--seeds",
                help="partitions, splits and first weights that episodes take turns in",
            ),
        ),
        "quiet": (bool, typer.Option(False, "--quiet", help="show no progress")),
    },
)
def train_agent_command(given: Given, episodes: int, seeds: int, quiet: bool) -> None:
    """Train an agent that sets a method's knobs, over runs with seeds of their own."""
    from silograph.control.ddpg import PROFILE
    from silograph.study.train_agent import AgentTraining, lacking, train_agent

    config = given.config
    if config.out is None:
        raise ConfigError("expected a folder for the agent, got none: give --out FOLDER")
    if episodes < 1 or seeds < 1:
        raise ConfigError(f"expected 1 or more episodes and seeds, got {episodes} and {seeds}")
    out = Path(config.out)
    with going_on(f"the same command, which goes on in {shlex.quote(config.out)}"):
        path = train_agent(
            AgentTraining(config, episodes, seeds), out, told=(lambda _: None) if quiet else _show
        )
    missing = lacking(out)
    if missing:
        typer.echo(
            f"written to {path}: nothing was learned yet, for the first {PROFILE} rounds of an "
            f"agent are its profile: {counted(missing, 'more round')} at least: raise --episodes"
        )
    else:
        typer.echo(f"written to {path}: use it with --option agent={path} --option explore=false")


def _show(line: dict[str, Any]) -> None:
    found = line["return"]
    shown = "profile" if found is None else f"return {found:.3f}"
    score = line["best_validation"]
    validation = "-" if score is None else f"{score:.3f}"
    typer.echo(f"episode {line['episode']}: {shown}, validation {validation}", err=True)
