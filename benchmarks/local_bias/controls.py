"""How far apart two centralized models are that differ by chance alone: controls of local bias.

    python benchmarks/local_bias/controls.py --data-dir ../shared/data

trains the centralized GCN of `clients.md` with other dropout draws, and from other initial weights,
and fills the table of controls in. It continues where it stopped; `--max-minutes 0` only writes.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

import silograph as sg
from silograph.core.config import make_config
from silograph.core.resolved_config import training_key
from silograph.experiment.run.setup import first_weights, prepare, uncut_block
from silograph.experiment.terminal_table import markdown_table
from silograph.graph.graph import Graph
from silograph.study.reproduce import replace_section

sys.path.insert(0, str(Path(__file__).parent))

from recipe_clients import SEEDS, SHARED, plain

LINES = Path(__file__).with_name("controls.jsonl")
PAGE = Path(__file__).with_name("clients.md")
OTHER = 100  # added to a seed that is to be another one
CONTROLS: Mapping[str, tuple[int, int]] = {  # added to the seed of draws, and to that of weights
    "the same weights and draws": (0, 0),
    "other dropout draws": (OTHER, 0),
    "other initial weights": (0, OTHER),
}


def logits_of(graph: Graph, draws: int, weights: int) -> Tensor:
    """Return the logits (N, K) of centralized GCN after the last round."""
    options = SHARED | {"method": "centralized", "keep_optimizer": True, "local_bias": False}
    asked: dict[str, Any] = options | {"seed": draws, "init_seed": weights}
    setup = prepare(make_config(asked), graph)
    fed, cfg, key = setup.federation, setup.method_config, training_key(setup.config)
    state = setup.method.init(fed, cfg, first_weights(setup), key)
    for t in range(1, setup.config.rounds + 1):
        fed.start_round(t)
        state, _ = setup.method.round(fed, cfg.in_round(t), state, t, key)
    assert state.weights is not None  # the method has a server
    return cfg.backend.predict(cfg.model, state.weights, uncut_block(setup))


def measure(lines: list[dict[str, Any]], data_dir: str | None, until: float) -> None:
    """Append the distances that are missing."""
    graph = sg.load("pubmed", data_dir=data_dir)
    for seed in SEEDS:
        if any(line["seed"] == seed for line in lines) or time.monotonic() >= until:
            continue
        found = {
            name: logits_of(graph, seed + draws, seed + weights)
            for name, (draws, weights) in CONTROLS.items()
        }
        reference = found.pop(next(iter(CONTROLS)))
        apart = {
            name: float((logits - reference).double().norm(dim=1).mean())
            for name, logits in found.items()
        }
        lines.append({"seed": seed, **apart})
        with LINES.open("a") as file:
            file.write(json.dumps(lines[-1]) + "\n")
        print(lines[-1], flush=True)


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the mean distance for each control."""
    names = list(CONTROLS)[1:]
    rows = [[n, str(len(lines)), plain([line[n] for line in lines])] for n in names]
    return markdown_table(["centralized GCN and the same with", "seeds", "distance"], rows)


def main() -> None:
    """Measure what is missing, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir")
    parser.add_argument("--max-minutes", type=float, default=float("inf"))
    args = parser.parse_args()
    lines = [json.loads(line) for line in LINES.open()] if LINES.exists() else []
    measure(lines, args.data_dir, time.monotonic() + 60 * args.max_minutes)
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(replace_section(text, "controls", table(lines)), encoding="utf-8")


if __name__ == "__main__":
    main()
