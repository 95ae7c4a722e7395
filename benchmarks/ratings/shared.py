"""Biases that silos share, beside those of each silo: writes the tables of shared.md.

    python benchmarks/ratings/shared.py --data-dir ../shared/data

runs the cells that shared.jsonl does not hold yet, in one process; `--max-minutes 0` only writes
the page. Sets but Ciao are generated. FilmTrust-like ratings have the numbers of users, items and
ratings of FilmTrust (1,508, 2,071 and 35,494), its scale from 0.5 to 4, popular items, qualities of
items, moods of users and four factors of taste; 10 silos hold them in four ways. Three shops have
users and items in common in part.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

import silograph as sg
from silograph.experiment.terminal_table import markdown_table
from silograph.graph.graph import Graph
from silograph.study.paired_tests import half_width
from silograph.study.reproduce import replace_section

LINES, PAGE = (Path(__file__).with_name(f"shared.{end}") for end in ("jsonl", "md"))
SEEDS = range(5)
USERS, ITEMS, RATINGS, SILOS = 1508, 2071, 35494, 10
Line = dict[str, Any]


def film_trust_like(seed: int, by: str) -> Graph:
    """Return generated ratings; `by` says what tells silos apart.

    `ratings`: users and items are in several silos; `users`: items are; `items`: users are;
    `both`: nothing is in two silos, as each has users and items of its own.
    """
    rng = np.random.default_rng(seed)
    popular, active = (np.arange(ITEMS) + 1.0) ** -0.9, rng.lognormal(0, 1.0, USERS)
    user = rng.choice(USERS, 6 * RATINGS, p=active / active.sum())
    item = rng.choice(ITEMS, 6 * RATINGS, p=popular / popular.sum())
    _, first = np.unique(user * ITEMS + item, return_index=True)
    chosen = np.sort(first)[:RATINGS]
    user, item = user[chosen], item[chosen]
    mood, quality = rng.normal(0, 0.4, USERS), rng.normal(0, 0.45, ITEMS)
    taste, kind = rng.normal(size=(USERS, 4)), rng.normal(size=(ITEMS, 4))
    stars = 3 + mood[user] + quality[item] + 0.15 * (taste[user] * kind[item]).sum(axis=1)
    stars += rng.normal(0, 0.68, RATINGS)
    of_user, of_item = rng.integers(0, SILOS, USERS), rng.integers(0, SILOS, ITEMS)
    silo = {
        "ratings": rng.integers(0, SILOS, RATINGS),
        "users": of_user[user],
        "items": of_item[item],
        "both": of_user[user],
    }[by]
    if by == "both":
        item = item + ITEMS * silo
    table = np.stack([user, item, (2 * stars).round().clip(1, 8) / 2], axis=1)
    return sg.ratings(table, categories=[f"silo {n}" for n in silo], scale=(0.5, 4))


def shops(seed: int) -> Graph:
    """Return ratings of three shops, with 320 of 600 users and 220 of 400 items each."""
    rng = np.random.default_rng(seed)
    quality, mood = rng.normal(0, 0.7, 400), rng.normal(0, 0.4, 600)
    taste, kind = rng.normal(size=(600, 4)), rng.normal(size=(400, 4))
    tables, names = [], []
    for name in ("books", "films", "games"):
        people, things = rng.choice(600, 320, replace=False), rng.choice(400, 220, replace=False)
        user, item = rng.choice(people, 3200), rng.choice(things, 3200)
        _, first = np.unique(user * 400 + item, return_index=True)
        user, item = user[first], item[first]
        stars = 3.4 + quality[item] + mood[user] + 0.25 * (taste[user] * kind[item]).sum(axis=1)
        stars += rng.normal(0, 0.5, len(user))
        # A pair has one rating in a graph: that of the first shop that has it.
        tables.append(np.stack([user, item, (2 * stars).round().clip(1, 10) / 2], axis=1))
        names += [name] * len(user)
    table = np.concatenate(tables)
    _, first = np.unique(table[:, 0] * 400 + table[:, 1], return_index=True)
    categories = np.array(names)[first].tolist()
    return sg.ratings(table[first], categories=categories, scale=(0.5, 5))


# What is shared; the graph; the number of silos; shares of the split; batch size.
Set = tuple[str, Callable[[int], Any], int, str, int]
CIAO = "Ciao, by category"
SETS: dict[str, Set] = {
    "FilmTrust-like, cut by ratings": (
        "users and items",
        lambda seed: film_trust_like(seed, "ratings"),
        SILOS,
        "0.6/0.2/0.2",
        1024,
    ),
    "FilmTrust-like, cut by users": (
        "items",
        lambda seed: film_trust_like(seed, "users"),
        SILOS,
        "0.6/0.2/0.2",
        1024,
    ),
    "three shops": ("users and items, in part", shops, 3, "0.6/0.2/0.2", 1024),
    "FilmTrust-like, cut by items": (
        "users",
        lambda seed: film_trust_like(seed, "items"),
        SILOS,
        "0.6/0.2/0.2",
        1024,
    ),
    "FilmTrust-like, nothing in common": (
        "nothing",
        lambda seed: film_trust_like(seed, "both"),
        SILOS,
        "0.6/0.2/0.2",
        1024,
    ),
    CIAO: ("users, and few items", lambda _: "ciao", SILOS, "0.8/0.1/0.1", 4096),
}
MODELS: dict[str, tuple[str, str]] = {
    "biases, items shared": ("rating_biases", "items"),
    "biases, all shared": ("rating_biases", "all"),
    "profiles, none shared": ("rating_profiles", "none"),
    "profiles, all shared": ("rating_profiles", "all"),
}
BIASES = list(MODELS)[:2]
DAMPINGS = (1.0, 2.0, 3.0, 5.0, 10.0)  # of all shared biases, on the first seed
CHOSEN = 3.0  # by validation; the default of `rating_profiles`
TUNED = [*list(SETS)[:4], CIAO]
ALONE, TOGETHER = "silo biases", "all biases"


def cells() -> list[tuple[str, str, int, float]]:
    """Return set, model, seed and damping of each cell, the most important ones first."""
    generated = [s for s in SETS if s != CIAO]
    grid = [(s, m, seed, 5.0) for seed in SEEDS for s in generated for m in list(MODELS)[1:]]
    tried = [(s, BIASES[1], 0, d) for s in TUNED for d in DAMPINGS if d != 5.0]
    large = [(CIAO, BIASES[1], seed, 5.0) for seed in SEEDS]
    items = [(s, BIASES[0], seed, 5.0) for seed in SEEDS for s in generated]
    best = [(s, "profiles, all shared", seed, CHOSEN) for seed in SEEDS for s in generated]
    best += [(CIAO, BIASES[1], seed, CHOSEN) for seed in SEEDS]
    cells_in_order = [*grid, *large, *tried, *items, *best]
    return list(dict.fromkeys(cells_in_order))


def run(cell: tuple[str, str, int, float], graph: Any, data_dir: str | None) -> Line:
    """Run a cell; return its line."""
    name, model_name, seed, damping = cell
    _, _, silos, split, batch_size = SETS[name]
    model, shared = MODELS[model_name]
    is_trained = model == "rating_profiles"
    result = sg.run(
        graph,
        data_dir=data_dir if graph == "ciao" else None,
        model=model,
        method="fedavg",
        clients=silos,
        split=split,
        seed=seed,
        rounds=10 if is_trained else 1,
        hidden=32,
        lr=0.01,
        batch_size=batch_size if is_trained else None,
        options={"model.shared": shared, "model.damping": damping},
        partition="random" if name.endswith("by ratings") else "category",
    )
    assert result.val.server is not None
    assert result.test.server is not None
    return {
        "cell": list(cell),
        "val": result.val.server["rmse"],
        "test": result.test.server["rmse"],
        "untrained": {n: scores["rmse"] for n, scores in result.untrained.items()},
        "bytes": result.bytes,
        "statistics_bytes": result.ledger.bytes_by_kind.get("statistics", 0),
        "seconds": result.seconds,
    }


def measure(lines: list[Line], data_dir: str | None, minutes: float) -> None:
    """Append the cells that are missing."""
    until, graphs = time.monotonic() + 60 * minutes, dict[tuple[str, int], Any]()
    done = {tuple(line["cell"]) for line in lines}
    for cell in cells():
        if cell in done:
            continue
        if time.monotonic() > until:
            return
        if cell[0::2][:2] not in graphs:
            graphs = {cell[0::2][:2]: SETS[cell[0]][1](cell[2])}
        lines.append(run(cell, graphs[cell[0::2][:2]], data_dir))
        with LINES.open("a", encoding="utf-8") as file:
            file.write(json.dumps(lines[-1]) + "\n")


def spread(values: Sequence[float]) -> str:
    """Return mean and sample standard deviation."""
    if len(values) < 2:
        return f"{mean(values):.4f}" if values else "-"
    return f"{mean(values):.4f} ± {float(np.std(values, ddof=1)):.4f}"


def interval(values: Sequence[float]) -> str:
    """Return the mean of differences with its 95 % interval."""
    if len(values) < 2:
        return f"{mean(values):+.4f}" if values else "-"
    half = half_width(len(values)) * float(np.std(values, ddof=1))
    return f"{mean(values):+.4f} ({mean(values) - half:+.4f} to {mean(values) + half:+.4f})"


def summary(lines: list[Line]) -> str:
    """Return the main table: RMSE by set, and the recommended model less each silo's biases."""
    head = ["set", "shared", "seeds", "silo biases", *MODELS, "the same, damping 3 (default)"]
    head += ["biases of all ratings", "default less silo biases", "of the distance"]
    rows = []
    for name in SETS:
        by_model = {
            m: [n for n in lines if n["cell"][:2] == [name, m] and n["cell"][3] == 5.0]
            for m in MODELS
        }
        model = BIASES[1] if name == CIAO else "profiles, all shared"
        best = [n for n in lines if n["cell"][:2] == [name, model] and n["cell"][3] == CHOSEN]
        if not best:
            continue
        alone, together = ([n["untrained"][x] for n in best] for x in (ALONE, TOGETHER))
        gains = [n["test"] - n["untrained"][ALONE] for n in best]
        gap = mean(alone) - mean(together)
        tests = spread([n["test"] for n in best]) + (" (biases)" if name == CIAO else "")
        rows.append(
            [
                name,
                SETS[name][0],
                str(len(best)),
                spread(alone),
                *(spread([n["test"] for n in by_model[m]]) for m in MODELS),
                tests,
                spread(together),
                interval(gains),
                f"{-mean(gains) / gap:.0%}" if abs(gap) > 0.002 else "-",
            ]
        )
    return markdown_table(head, rows)


def differences(lines: list[Line]) -> str:
    """Return paired differences of test RMSE, model less model, on the same seeds."""
    pairs = [
        ("biases, all shared", ALONE),
        ("biases, items shared", ALONE),
        ("profiles, none shared", ALONE),
        ("profiles, all shared", "profiles, none shared"),
        ("profiles, all shared", "biases, all shared"),
    ]
    rows = []
    for name in SETS:
        cells_of = [line for line in lines if line["cell"][0] == name and line["cell"][3] == 5.0]
        score = {(n["cell"][1], n["cell"][2]): n["test"] for n in cells_of}
        score |= {(ALONE, n["cell"][2]): n["untrained"][ALONE] for n in cells_of}
        row = [name]
        for one, other in pairs:
            both = [s for s in SEEDS if (one, s) in score and (other, s) in score]
            row.append(interval([score[one, s] - score[other, s] for s in both]))
        rows.append(row)
    return markdown_table(["test RMSE", *(f"{a} less {b}" for a, b in pairs)], rows)


def dampings(lines: list[Line]) -> str:
    """Return validation RMSE by damping, biases of all shared, first seed."""
    rows = []
    for name in TUNED:
        values = {n["cell"][3]: n["val"] for n in lines if n["cell"][:3] == [name, BIASES[1], 0]}
        rows.append([name, *(f"{values[d]:.4f}" if d in values else "-" for d in DAMPINGS)])
    return markdown_table(["validation RMSE", *(f"{d:g}" for d in DAMPINGS)], rows)


def costs(lines: list[Line]) -> str:
    """Return bytes and seconds, first seed."""
    rows = []
    for name in SETS:
        for model in MODELS:
            of_cell = [n for n in lines if n["cell"] == [name, model, 0, 5.0]]
            rows += [
                [
                    name,
                    model,
                    f"{n['statistics_bytes'] / 1e6:.2f}",
                    f"{n['bytes'] / 1e6:.2f}",
                    f"{n['seconds']:.1f}",
                ]
                for n in of_cell
            ]
    return markdown_table(["set", "model", "MB shared before training", "MB", "seconds"], rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir")
    parser.add_argument("--max-minutes", type=float, default=30.0)
    arguments = parser.parse_args()
    known: list[Line] = []
    if LINES.exists():
        known = [json.loads(line) for line in LINES.read_text(encoding="utf-8").splitlines()]
    measure(known, arguments.data_dir, arguments.max_minutes)
    page = PAGE.read_text(encoding="utf-8")
    for section, table in (
        ("summary", summary),
        ("differences", differences),
        ("dampings", dampings),
        ("costs", costs),
    ):
        page = replace_section(page, section, table(known))
    PAGE.write_text(page, encoding="utf-8")
