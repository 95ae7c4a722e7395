"""FedGraph's agent where one silo is five times slower: beside constants, on other seeds.

    python benchmarks/fedgraph/unlike_speeds.py DIR DATA_DIR    trains and runs what is missing
    python benchmarks/fedgraph/unlike_speeds.py                 writes the table of what is there

Seeds decide cut, split, weights and draws: agents train with seeds 0 to 4, all are judged with 100
to 104. Fixed policies are drawn over the agent's ranges and chosen by their return with seed 0.
"""

import json
import lzma
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

import silograph as sg
from silograph.control import ddpg
from silograph.core.config import make_config
from silograph.core.files import write_atomic
from silograph.core.key import Key
from silograph.experiment.terminal_table import markdown_table
from silograph.study.reproduce import replace_section
from silograph.study.train_agent import AgentTraining, train_agent

HERE = Path(__file__).parent
LINES, PAGE = HERE / "unlike_speeds.jsonl.xz", HERE / "unlike_speeds.md"
JUDGED, TRAINED, DRAWS, EPISODES = (100, 101, 102, 103, 104), 5, 10, 45
KNOBS = ("kappa", "keep_1", "keep_2")
RUN: dict[str, Any] = {
    "dataset": "cora",
    "method": "fedgraph",
    "clients": 5,
    "partition": "metis",
    "model": "gcn",
    "layers": 2,
    "hidden": 64,
    "dropout": 0.5,
    "rounds": 20,
    "optimizer": "adam",
    "server_optimizer": "none",
    "lr": 0.03,
    "weight_decay": 5e-4,
    "keep_optimizer": True,
    "kernels": "torch",
    "threads": 1,
    "speeds": "0.1,0.1,0.1,0.1,0.02",
    "links": "1000:0.0005",
}
TARGETS = {"first": 0.85, "second": 0.7}  # Lambda of both attempts
OMEGA, DISCOUNT = 128.0, 0.9
Line = dict[str, Any]


def read() -> list[Line]:
    """Return the lines that have run."""
    if not LINES.exists():
        return []
    return [json.loads(text) for text in lzma.decompress(LINES.read_bytes()).splitlines()]


def agent_path(attempt: str, folder: Path, data_dir: str) -> Path:
    """Train the agent of an attempt, or what is missing of its episodes, and return its file."""
    options = {"policy": "ddpg", "target": TARGETS[attempt]}
    config = make_config({**RUN, "options": options, "data_dir": data_dir})
    out = folder / attempt
    return train_agent(AgentTraining(config, EPISODES, TRAINED), out)


def constant_agent(action: Tensor, like: Path, path: Path) -> Path:
    """Write an agent whose action (A,) is always the same, and return its file."""
    tensors = load_file(like)
    last = max(name for name in tensors if name.startswith("net/actor/"))[: -len(".weight")]
    tensors[f"{last}.weight"] = torch.zeros_like(tensors[f"{last}.weight"])
    tensors[f"{last}.bias"] = torch.logit(action.double(), eps=1e-4).float()
    ddpg.write_agent(path, tensors)
    return path


def play(policy: str, path: Path, seed: int, data_dir: str) -> Line:
    """Run an agent that does not explore; return scores, seconds and its mean action by client."""
    actions: list[Tensor] = []
    act = ddpg.act

    def recorded(actor: Any, state: Tensor) -> Tensor:
        actions.append(act(actor, state)[0])
        return act(actor, state)

    ddpg.act = recorded
    try:
        own: dict[str, Any] = {"policy": "ddpg", "agent": str(path), "explore": False}
        result = sg.run(**RUN, seed=seed, options=own, data_dir=data_dir)
    finally:
        ddpg.act = act
    rows = result.rounds
    assert result.test.server is not None
    stacked = torch.stack(actions)
    return {
        "policy": policy,
        "seed": seed,
        "action": stacked.mean(0).tolist(),
        "moved": float(stacked.std(0).mean()),
        "validation": [row["val_server_accuracy"] for row in rows],
        "virtual": [row["virtual_seconds"] for row in rows],
        "test": result.test.server.accuracy,
    }


def return_of(line: Line, scale: Line) -> float:
    """Return the discounted return of rounds 2 on, by target, alpha and beta of an attempt."""
    total, clock = 0.0, line["virtual"]
    for t, score in enumerate(line["validation"][1:]):
        late = clock[t + 1] - clock[t] - scale["beta"]
        total += DISCOUNT**t * (OMEGA ** (score - scale["target"]) - scale["alpha"] * late)
    return total


def run_missing(folder: Path, data_dir: str) -> None:
    """Train both agents, draw fixed policies, and judge all of them."""
    folder.mkdir(exist_ok=True)
    lines = read()

    def add(policy: str, path: Path, seed: int) -> None:
        if not any((e["policy"], e["seed"]) == (policy, seed) for e in lines):
            lines.append(play(policy, path, seed, data_dir))
            write_lines(lines)
            print(policy, seed, f"{lines[-1]['test']:.3f}", flush=True)

    for attempt, target in TARGETS.items():
        agent = agent_path(attempt, folder, data_dir)
        tensors = load_file(agent)
        scale = {n: float(tensors[n]) for n in ("alpha", "beta")} | {"target": target}
        fixed: dict[str, Path] = {}
        for number in range(DRAWS):
            alike = Key.of(7).fold(number).matrix(1, 3)[0].repeat_interleave(RUN["clients"])
            apart = Key.of(8).fold(number).matrix(1, 3 * RUN["clients"])[0]
            for name, action in (("alike", alike), ("apart", apart)):
                path = folder / f"{name}-{number}.safetensors"
                fixed[f"{name} {number}"] = constant_agent(action, agent, path)
        half = torch.full((3 * RUN["clients"],), 0.5)
        for name, action in (("middle", half), ("all", torch.ones_like(half))):
            fixed[name] = constant_agent(action, agent, folder / f"{name}.safetensors")
        for name, path in fixed.items():
            add(name, path, 0)
        tried = [e for e in lines if e["policy"] in fixed and e["seed"] == 0]
        best = max(tried, key=lambda e: return_of(e, scale))["policy"]
        for seed in JUDGED:
            add(f"{attempt}: agent", agent, seed)
            add(best, fixed[best], seed)
            add("all", fixed["all"], seed)
        mine = [torch.tensor(e["action"]) for e in lines if e["policy"] == f"{attempt}: agent"]
        by_client = torch.stack(mine).mean(0)
        over_clients = by_client.view(3, -1).mean(1).repeat_interleave(RUN["clients"])
        for name, action in (("its mean, by client", by_client), ("its mean", over_clients)):
            path = folder / f"{attempt} {name}.safetensors"
            for seed in JUDGED:
                add(f"{attempt}: {name}", constant_agent(action, agent, path), seed)
        lines = [e for e in lines if e["policy"] != f"{attempt}: scale"]
        lines.append({"policy": f"{attempt}: scale", "seed": -1, "best": best, **scale})
        write_lines(lines)


def write_lines(lines: Sequence[Line]) -> None:
    """Write the lines."""
    text = "".join(json.dumps(line) + "\n" for line in lines)
    write_atomic(LINES, lzma.compress(text.encode()))


def mean_pm(values: Sequence[float], digits: int) -> str:
    """Return mean ± standard deviation."""
    return f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def table(lines: Sequence[Line]) -> str:
    """Return returns, scores and seconds of the judged policies of both attempts."""
    rows = []
    for attempt in TARGETS:
        scales = [e for e in lines if e["policy"] == f"{attempt}: scale"]
        if not scales:
            continue
        policies = [f"{attempt}: {n}" for n in ("agent", "its mean, by client", "its mean")]
        agents = [e for e in lines if e["policy"] == policies[0] and e["seed"] in JUDGED]
        ours = {e["seed"]: return_of(e, scales[0]) for e in agents}
        for policy in (*policies, scales[0]["best"], "all"):
            mine = [e for e in lines if e["policy"] == policy and e["seed"] in JUDGED]
            returns = {e["seed"]: return_of(e, scales[0]) for e in mine}
            less = [ours[seed] - r for seed, r in returns.items()]
            actions = torch.tensor([e["action"] for e in mine]).mean(0).view(3, -1)
            others, slow = actions[:, :-1].mean(1), actions[:, -1]
            title = policy.removeprefix(f"{attempt}: ")
            title = f"best fixed ({title})" if policy == scales[0]["best"] else title
            rows.append(
                [
                    f"{attempt}, target {TARGETS[attempt]:g}",
                    title,
                    mean_pm(list(returns.values()), 2),
                    "-" if policy == policies[0] else mean_pm(less, 2),
                    mean_pm([100 * e["test"] for e in mine], 1),
                    f"{statistics.mean(e['virtual'][-1] for e in mine):.1f}",
                    ", ".join(f"{v:.2f}" for v in others.tolist()),
                    ", ".join(f"{v:.2f}" for v in slow.tolist()),
                ]
            )
    head = ["attempt", "policy", "return", "agent less it", "test", "virtual s"]
    return markdown_table([*head, "kappa, keep_1, keep_2 of 0..1", "of the slow silo"], rows)


def main() -> None:
    """Run what is missing where folders are given, and write the table."""
    if len(sys.argv) > 1:
        run_missing(Path(sys.argv[1]).resolve(), sys.argv[2])
    write_atomic(PAGE, replace_section(PAGE.read_text(), "table", table(read())))


if __name__ == "__main__":
    main()
