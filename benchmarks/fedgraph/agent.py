"""Does FedGraph's agent learn? Judged beside a constant at its own mean policy, on other seeds.

    silograph train-agent cora ... --option agent_state=pca --out DIR/time as the page says
    silograph train-agent cora ... --option time=none --out DIR/scores     a reward without time
    silograph tune cora ... --out DIR/tuned                                fixed rates
    python benchmarks/fedgraph/agent.py DIR DATA_DIR       runs what agent.jsonl lacks

Seeds decide partition, split, weights and draws; those of training are 0 to 4, these are 5 to 9.
Rates of each client apart are tuned here, as `silograph tune` tunes those of all: by as many draws,
over the same ranges, seeds and rounds. An agent that says the same whatever it sees sets them.
What has not been trained or tuned is left out. A line is run again where it was another agent's.
`python benchmarks/fedgraph/agent.py` alone writes the page of what is there.
"""

import hashlib
import json
import math
import statistics
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import silograph as sg
from silograph.control.ddpg import write_agent
from silograph.core.files import write_atomic
from silograph.core.key import Key
from silograph.experiment.terminal_table import markdown_table
from silograph.study.reproduce import Curves, replace_section, svg_of

HERE = Path(__file__).parent
LINES, EPISODES = HERE / "agent.jsonl", HERE / "agent_episodes.jsonl"
SEEDS, TRAINED, TRIALS = (5, 6, 7, 8, 9), (0, 1, 2, 3, 4), 20
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
    "optimizer": "adam",
    "keep_optimizer": True,
    "server_optimizer": "none",
    "rounds": 30,
    "threads": 1,
}
AS_PAPER = {"policy": "ddpg", "agent_state": "pca"}
KNOBS = ("kappa", "keep_1", "keep_2")
TARGET, OMEGA, DISCOUNT = 0.9016, 128.0, 0.9
AGENT, MEAN, ZEROED, SCORES = "agent", "constant at its mean", "state zeroed", "reward without time"
TUNED, APART = "tuned", "tuned, each client apart"
FIXED: dict[str, dict[str, Any]] = {
    "drawn": {"policy": "drawn"},
    "all": {"kappa": 1024, "keep_1": 1.0, "keep_2": 1.0},
    "defaults": {},
}
POLICIES = (AGENT, MEAN, ZEROED, SCORES, f"{MEAN}, {SCORES}", TUNED, APART, *FIXED)
FILES = {AGENT: "time", SCORES: "scores", ZEROED: "zeroed", APART: "apart"}  # folders of agents
Line = dict[str, Any]


def file_of(policy: str, folder: Path) -> Path:
    """Return the file of an agent; that without a state is made of the other one."""
    path = folder / FILES[policy] / "agent.safetensors"
    if policy == ZEROED and (whole := file_of(AGENT, folder)).exists():
        from safetensors.torch import load_file

        tensors = load_file(whole)
        path.parent.mkdir(exist_ok=True)
        write_agent(path, {**tensors, "axes": torch.zeros_like(tensors["axes"])})
    return path


def agent_of(trial: int, folder: Path) -> Path:
    """Return the file of an agent that always says a trial's rates, each client's drawn apart."""
    from safetensors.torch import load_file

    path = folder / FILES[APART] / f"trial-{trial:02}.safetensors"
    if not path.exists():
        tensors = load_file(file_of(AGENT, folder))  # its shapes are those of the run
        last = max(name for name in tensors if name.startswith("net/actor/"))[: -len(".weight")]
        size = len(tensors[f"{last}.bias"])
        action = Key.of(0).fold("each client apart", trial).matrix(1, size)[0]
        said = {f"{last}.weight": torch.zeros_like(tensors[f"{last}.weight"])}
        write_agent(path, {**tensors, **said, f"{last}.bias": torch.logit(action).float()})
    return path


def tune_apart(folder: Path, data_dir: str) -> None:
    """Run what is missing of the trials, and copy the best one's agent by validation."""
    home = folder / FILES[APART]
    home.mkdir(exist_ok=True)
    trials = read(home / "trials.jsonl")
    for trial in range(TRIALS):
        options = {**AS_PAPER, "agent": str(agent_of(trial, folder)), "explore": False}
        for seed in TRAINED[sum(line["trial"] == trial for line in trials) :]:
            line = line_of(APART, seed, options, data_dir)
            found = {"trial": trial, "seed": seed, "validation": max(line["validation"])}
            trials.append({**found, "virtual_seconds": line["virtual"][-1]})
            write_atomic(home / "trials.jsonl", "".join(json.dumps(t) + "\n" for t in trials))
    means = [
        statistics.mean(t["validation"] for t in trials if t["trial"] == n) for n in range(TRIALS)
    ]
    best = means.index(max(means))
    print("each client apart: trial", best, [round(100 * mean, 2) for mean in means], flush=True)
    write_atomic(home / "agent.safetensors", agent_of(best, folder).read_bytes())


def options_of(policy: str, folder: Path, lines: Sequence[Line]) -> dict[str, Any] | None:
    """Return the options of a policy; None if it is not known yet."""
    if policy in FILES:
        path = file_of(policy, folder)
        own = {**AS_PAPER, "agent": str(path), "explore": False, "target": TARGET}
        return own if path.exists() else None
    if policy.startswith(MEAN):
        of = SCORES if policy.endswith(SCORES) else AGENT
        mine = [line for line in lines if line["policy"] == of]
        if len(mine) < len(SEEDS):
            return None
        means = {name: statistics.mean(line["knobs"][name] for line in mine) for name in KNOBS}
        return {**means, "kappa": round(means["kappa"])}
    if policy == TUNED:
        path = folder / "tuned" / "best.toml"
        if not path.exists():
            return None
        known = tomllib.loads(path.read_text())["options"]
        return {name: known.get(name, known.get(f"method.{name}")) for name in KNOBS}
    return FIXED[policy]


def described(options: dict[str, Any]) -> dict[str, Any]:
    """Return options with the digest of an agent's file in place of its path."""
    if "agent" not in options:
        return options
    data = Path(options["agent"]).read_bytes()
    return {**options, "agent": hashlib.blake2b(data, digest_size=8).hexdigest()}


def line_of(policy: str, seed: int, options: dict[str, Any], data_dir: str) -> Line:
    """Run a policy and return what it did."""
    result = sg.run("cora", seed=seed, options=options, data_dir=data_dir, **RUN)
    rows = result.rounds
    assert result.test.server is not None
    over_rounds = {n: [float(row[f"fact_knob_{n}"] or 0) for row in rows] for n in KNOBS}
    return {
        "policy": policy,
        "seed": seed,
        "options": described(options),
        "knobs": {n: statistics.mean(values) for n, values in over_rounds.items()},
        "over_rounds": over_rounds,
        "validation": [row["val_server_accuracy"] for row in rows],
        "virtual": [row["virtual_seconds"] for row in rows],
        "seconds": result.seconds,
        "flops": rows[-1]["flops"],
        "bytes": rows[-1]["bytes"],
        "test": result.test.server.accuracy,
    }


def time_to(line: Line, score: float) -> float:
    """Return the virtual seconds until a validation score; infinity if it was not reached."""
    pairs = zip(line["validation"], line["virtual"], strict=True)
    return next((seconds for found, seconds in pairs if found >= score), math.inf)


def reward(line: Line, scale: dict[str, float]) -> float:
    """Return the discounted return of rounds 2 on (eq. 9): the first one's seconds hold set-up."""
    total, clock = 0.0, line["virtual"]
    for t, score in enumerate(line["validation"][1:]):
        late = clock[t + 1] - clock[t] - scale["beta"]
        total += DISCOUNT**t * (OMEGA ** (score - TARGET) - scale["alpha"] * late)
    return total


def spread(values: Sequence[float], digits: int) -> str:
    """Return mean ± standard deviation, or how many are finite where not all are."""
    finite = [v for v in values if math.isfinite(v)]
    if len(finite) < len(values):
        return f"{len(finite)} of {len(values)} reached it"
    return f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def read(path: Path) -> list[Line]:
    """Return the lines of a file, none if there is no file."""
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def judge(folder: Path, data_dir: str) -> None:
    """Run what is missing, seed after seed of each policy."""
    lines = read(LINES)
    for policy in POLICIES:
        options = options_of(policy, folder, lines)
        for seed in SEEDS if options is not None else ():
            assert options is not None
            here = [n for n, o in enumerate(lines) if (o["policy"], o["seed"]) == (policy, seed)]
            if here and lines[here[0]]["options"] == described(options):
                continue
            lines = [line for n, line in enumerate(lines) if n not in here]
            lines.append(line_of(policy, seed, options, data_dir))
            LINES.write_text("".join(json.dumps(line) + "\n" for line in lines))
            print(policy, seed, lines[-1]["test"], lines[-1]["virtual"][-1], flush=True)


def keep_episodes(folder: Path) -> None:
    """Write what is known of the trainings: returns by episode, scales of time, runs of tuning."""
    from safetensors.torch import load_file

    kept = []
    for policy in (AGENT, SCORES):
        path = folder / FILES[policy]
        if (path / "agent.safetensors").exists():
            tensors = load_file(path / "agent.safetensors")
            scale = {name: float(tensors[name]) for name in ("alpha", "beta")}
            of = ("episode", "return", "best_validation", "virtual_seconds")
            kept += [
                {"policy": policy, **{name: line[name] for name in of}, **scale}
                for line in read(path / "episodes.jsonl")
            ]
    for line in read(folder / TUNED / "tune.jsonl"):
        kept.append({"policy": TUNED, **line["labels"], "virtual_seconds": line["virtual_seconds"]})
    kept += [{"policy": APART, **line} for line in read(folder / FILES[APART] / "trials.jsonl")]
    EPISODES.write_text("".join(json.dumps(line) + "\n" for line in kept))


def table(lines: Sequence[Line], episodes: Sequence[Line]) -> str:
    """Return what each policy did."""
    trained = {p: [e for e in episodes if e["policy"] == p] for p in (AGENT, SCORES, TUNED, APART)}
    reached = [max(line["validation"]) for line in lines if line["policy"] == "all"]
    goal, rows = statistics.mean(reached) - 0.01, []
    for policy in POLICIES:
        mine = [line for line in lines if line["policy"] == policy]
        if len(mine) < 2:
            continue
        means = [statistics.mean(line["knobs"][name] for line in mine) for name in KNOBS]
        times = [time_to(line, goal) for line in mine]
        of = {ZEROED: AGENT, MEAN: AGENT}.get(policy, policy.removeprefix(f"{MEAN}, "))
        before = sum(line["virtual_seconds"] for line in trained.get(of, []))
        rows.append(
            [
                policy,
                str(len(mine)),
                f"{means[0]:.0f}, {means[1]:.2f}, {means[2]:.2f}",
                spread([100 * line["test"] for line in mine], 1),
                spread([reward(line, trained[AGENT][0]) for line in mine], 2),
                spread([line["virtual"][-1] for line in mine], 2),
                spread(times, 2),
                f"{statistics.mean(times) + before:.0f}" if all(map(math.isfinite, times)) else "-",
                spread([line["flops"] / 1e9 for line in mine], 1),
            ]
        )
    head = ["policy", "seeds", "mean kappa, keep_1, keep_2", "test", "return", "virtual s"]
    head += [f"virtual s to {100 * goal:.1f} % validation", "with its training's", "GFlop"]
    return markdown_table(head, rows)


def smoothed(values: Sequence[float], over: int = 10) -> list[float]:
    """Return means of up to so many values up to each."""
    return [statistics.mean(values[max(0, n + 1 - over) : n + 1]) for n in range(len(values))]


def returns(episodes: Sequence[Line], policy: str) -> Curves:
    """Return the discounted return of each episode, noise of exploring included."""
    mine = [e for e in episodes if e["policy"] == policy and e["return"] is not None]
    x, y = [e["episode"] for e in mine], [e["return"] for e in mine]
    lines = {"episode": (x, y), "mean of ten": (x, smoothed(y))} if mine else {}
    title = "Cora, 20 clients, 30 rounds an episode"
    return Curves(f"{title}, {policy}", "episode", "discounted return", lines)


def over_rounds(lines: Sequence[Line], knob: str) -> Curves:
    """Return the mean value of a knob by round."""
    drawn = {}
    for policy in (AGENT, ZEROED, SCORES):
        mine = [line["over_rounds"][knob] for line in lines if line["policy"] == policy]
        if mine:
            means = [statistics.mean(values) for values in zip(*mine, strict=True)]
            drawn[policy] = (list(range(1, len(means) + 1)), means)
    return Curves(f"Mean {knob} of all clients", "round", knob, drawn, bottom=0)


def main() -> None:
    """Run what is missing, and write table and plots."""
    if len(sys.argv) > 1:
        folder = Path(sys.argv[1]).resolve()
        tune_apart(folder, sys.argv[2])
        keep_episodes(folder)
        judge(folder, sys.argv[2])
    lines, episodes, page = read(LINES), read(EPISODES), HERE / "agent.md"
    page.write_text(replace_section(page.read_text(), "table", table(lines, episodes)))
    plots = {"returns": returns(episodes, AGENT), "returns_scores": returns(episodes, SCORES)}
    plots |= {knob: over_rounds(lines, knob) for knob in ("kappa", "keep_2")}
    for name, plot in plots.items():
        (HERE / f"agent_{name}.svg").write_text(svg_of(plot))


if __name__ == "__main__":
    main()
