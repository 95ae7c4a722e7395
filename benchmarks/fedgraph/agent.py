"""Does FedGraph's agent learn? Judged beside a constant at its own mean policy, on other seeds.

    silograph train-agent cora ... --out AGENT        as the page says
    python benchmarks/fedgraph/agent.py AGENT DATA_DIR     runs what agent.jsonl lacks

Seeds decide partition, split, weights and draws; those of training are 0 to 4, these are 5 to 9.
"""

import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import silograph as sg
from silograph.experiment.markdown import markdown_table

HERE = Path(__file__).parent
SEEDS = (5, 6, 7, 8, 9)
RUN: dict[str, Any] = {
    "clients": 20,
    "partition": "shares",
    "hidden": 16,
    "dropout": 0.5,
    "lr": 0.01,
    "weight_decay": 5e-4,
    "kernels": "torch",
    "speeds": "equal",
    "method": "fedgraph",
    "rounds": 30,
    "threads": 1,
}
KNOBS = ("kappa", "keep_1", "keep_2")
TARGET, OMEGA, DISCOUNT = 0.9016, 128.0, 0.9


def options_of(policy: str, agent: str, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the options of a policy; the constant is the mean of the agent's on all its seeds."""
    if policy == "agent":
        return {"policy": "ddpg", "agent": agent, "explore": False, "target": TARGET}
    if policy == "constant at its mean":
        mine = [line for line in lines if line["policy"] == "agent"]
        means = {name: statistics.mean(line["knobs"][name] for line in mine) for name in KNOBS}
        return {
            "kappa": round(means["kappa"]),
            "keep_1": means["keep_1"],
            "keep_2": means["keep_2"],
        }
    if policy == "drawn":
        return {"policy": "drawn"}
    if policy == "all":
        return {"kappa": 1024, "keep_1": 1.0, "keep_2": 1.0}
    return {}


POLICIES = ("agent", "constant at its mean", "drawn", "all", "defaults")


def line_of(policy: str, seed: int, options: dict[str, Any]) -> dict[str, Any]:
    """Run a policy and return what it did."""
    result = sg.run("cora", seed=seed, options=options, data_dir=sys.argv[2], **RUN)
    rows = result.rounds
    assert result.test.server is not None
    over_rounds = {n: [float(row[f"fact_knob_{n}"] or 0) for row in rows] for n in KNOBS}
    return {
        "policy": policy,
        "seed": seed,
        "options": {k: v for k, v in options.items() if k != "agent"},
        "knobs": {n: statistics.mean(values) for n, values in over_rounds.items()},
        "over_rounds": over_rounds,
        "validation": [row["val_server_accuracy"] for row in rows],
        "virtual": [row["virtual_seconds"] for row in rows],
        "seconds": result.seconds,
        "flops": rows[-1]["flops"],
        "bytes": rows[-1]["bytes"],
        "test": result.test.server.accuracy,
    }


def time_to(line: dict[str, Any], score: float) -> float:
    """Return the virtual seconds until a validation score; infinity if it was not reached."""
    pairs = zip(line["validation"], line["virtual"], strict=True)
    return next((seconds for found, seconds in pairs if found >= score), math.inf)


def reward(line: dict[str, Any], alpha: float, beta: float) -> float:
    """Return the discounted return of a run (eq. 9)."""
    before, total = 0.0, 0.0
    for t, (score, virtual) in enumerate(zip(line["validation"], line["virtual"], strict=True)):
        took, before = virtual - before, virtual
        total += DISCOUNT**t * (OMEGA ** (score - TARGET) - alpha * (took - beta))
    return total


def spread(values: Sequence[float], digits: int) -> str:
    """Return mean ± standard deviation."""
    if any(math.isinf(v) for v in values):
        return f"{sum(math.isfinite(v) for v in values)} of {len(values)} reached it"
    return f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def main() -> None:
    """Run what is missing and write the table."""
    agent, path = str(Path(sys.argv[1]).resolve()), HERE / "agent.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
    for policy in POLICIES:
        for seed in SEEDS:
            if any(line["policy"] == policy and line["seed"] == seed for line in lines):
                continue
            lines.append(line_of(policy, seed, options_of(policy, agent, lines)))
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
            print(policy, seed, lines[-1]["test"], lines[-1]["virtual"][-1], flush=True)
    print(table(lines, *scale_of(agent)))


def scale_of(agent: str) -> tuple[float, float]:
    """Return alpha and beta of the agent's reward."""
    from safetensors.torch import load_file

    tensors = load_file(agent)
    return float(tensors["alpha"]), float(tensors["beta"])


def table(lines: Sequence[dict[str, Any]], alpha: float, beta: float) -> str:
    """Return what each policy did."""
    reached = [max(line["validation"]) for line in lines if line["policy"] == "all"]
    goal = statistics.mean(reached) - 0.01
    rows = []
    for policy in POLICIES:
        mine = [line for line in lines if line["policy"] == policy]
        if len(mine) < 2:
            continue
        means = [statistics.mean(line["knobs"][name] for line in mine) for name in KNOBS]
        rows.append(
            [
                policy,
                f"{means[0]:.0f}, {means[1]:.2f}, {means[2]:.2f}",
                spread([100 * line["test"] for line in mine], 1),
                spread([reward(line, alpha, beta) for line in mine], 2),
                spread([line["virtual"][-1] for line in mine], 2),
                spread([time_to(line, goal) for line in mine], 2),
                spread([line["flops"] / 1e9 for line in mine], 1),
            ]
        )
    goals = f"virtual s to {100 * goal:.1f} % validation"
    head = ["policy", "mean kappa, keep_1, keep_2", "test", "return", "virtual s", goals, "GFlop"]
    return markdown_table(head, rows)


if __name__ == "__main__":
    main()
