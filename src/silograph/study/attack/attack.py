"""What attacks recover from a run, by simulation: the server's view, judged by the silos' data."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError
from silograph.core.numeric_state import standard_numerics
from silograph.experiment.markdown import markdown_table
from silograph.experiment.run.setup import Setup, prepare
from silograph.graph.graph import Graph
from silograph.graph.source import source_of
from silograph.study.attack.finding import Finding, first_map
from silograph.study.attack.from_evaluations import evaluation_findings
from silograph.study.attack.measured_rows import features_of, labels_of, separable_of
from silograph.study.attack.measured_weights import (
    CRAFTED,
    crafted_rows,
    tested_labels,
    words_of,
)
from silograph.study.attack.overheard import overhear

COLUMNS = ("attack", "what is recovered", "share", "right", "server")
UNMEASURED = (
    "Not measured: weights that an active server crafts. The attack here needs --optimizer sgd, "
    "one local step and a two-layer gcn under fedavg or fedopt; other settings stop it, and not a "
    "server that crafts for them."
)
NOTHING = "no attack that silograph knows applies to this run, which does not make it safe"
MOST_STEPS = 200
ALL = 10**9  # clients in a block


@standard_numerics()
def attack(asked: RunConfig, graph: Graph | None = None) -> list[Finding]:
    """Simulate a run and return what attacks recover from it; none if none applies.

    Args:
        asked: the run; its rounds are as many as the attacks need.
        graph: its data, if not what the config names.

    Raises:
        SilographError: the run cannot be made, or is none of silos.
    """
    data = source_of(asked).read(asked.scale) if graph is None else graph
    setup = prepare(dataclasses.replace(asked, block_size=ALL), data)
    if setup.method.setting.uncut:
        raise ConfigError(
            f"expected a method that trains at silos to attack, got {setup.method.name}, which "
            "trains on the uncut graph in simulation only: choose another method"
        )
    seen = overhear(setup, rounds_of(setup))
    block = seen.blocks[0]
    return [
        *features_of(seen, setup, block),
        *separable_of(seen, setup, block),
        *labels_of(seen, setup, block),
        *words_of(seen, setup, block),
        *crafted_rows(setup, block),
        *tested_labels(seen),
        *evaluation_findings(setup, block),
    ]


def write_findings(found: Sequence[Finding], config: RunConfig, folder: Path) -> None:
    """Write `attack.json` and `attack.md` into a new folder.

    Raises:
        ConfigError: the folder exists.
    """
    if folder.exists():
        raise ConfigError(f"expected a folder to make, got {folder}, which exists: use another")
    folder.mkdir(parents=True)
    rows = [dataclasses.asdict(one) for one in found]
    text = json.dumps({"method": config.method, "findings": rows}, indent=1)
    (folder / "attack.json").write_text(text + "\n", encoding="utf-8")
    page = f"# What a server recovers from {config.method} on {config.dataset}\n\n"
    table = markdown_table(COLUMNS, [shown_row(one) for one in found]) if found else NOTHING
    told = "".join(f"\n{line}\n" for line in unmeasured(found))
    (folder / "attack.md").write_text(page + table + "\n" + told, encoding="utf-8")


def unmeasured(found: Sequence[Finding]) -> list[str]:
    """Return a line for an attack that could not be tried, none if all were."""
    return [] if any(one.attack == CRAFTED for one in found) else [UNMEASURED]


def shown_row(found: Finding) -> list[str]:
    """Return a finding as the texts of `COLUMNS`."""
    right = "-" if found.right is None else f"{100 * found.right:.1f} %"
    count = f"{100 * found.share:.1f} % of {found.of:,}"
    return [found.attack, found.recovered, count, right, found.server]


def rounds_of(setup: Setup) -> int:
    """Return how many rounds give as many equations as there are features, at most a few."""
    if setup.method.rows == "none":
        return 1
    width = setup.method_config.model.weight_shapes[first_map(setup)][1]
    rounds = -(-setup.schema.num_features // width) + 2
    rate = float(getattr(setup.method_config.options, "rate", 1.0))
    return min(int(rounds / rate), MOST_STEPS)
