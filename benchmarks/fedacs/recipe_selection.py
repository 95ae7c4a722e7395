"""Figures 3 to 9 and table V of FedACS: which clients train, by bytes, work and virtual time.

Levels are shares of the way from the mean's RMSE to full participation's best, as a model that has
learned nothing reaches the paper's own; these stand in a table of their own.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

from silograph.experiment.report.reading import size_text
from silograph.experiment.terminal_table import markdown_table
from silograph.study.cells import Line
from silograph.study.reproduce import Curves, Page, Recipe, StudyLines

sys.path.insert(0, str(Path(__file__).parent))

from acs_cells import (
    AVERAGE,
    BANDIT,
    BUDGETS,
    CLIENTS,
    CUTS,
    DATASETS,
    EVERYBODY,
    NUMBER,
    ROWS,
    SAME,
    SEEDS,
    SHARES,
    Cost,
    alone,
    cells,
    cost_to,
    levels,
    line_of,
    lines_of,
    mean_of,
    operations,
    training_bytes,
    virtual,
    within,
)
from recipe_profiles import TOLD, compared, differences, scores, told
from recipe_ratings import without_training

COSTS: dict[str, tuple[Cost, Callable[[float], str]]] = {
    "bytes": (training_bytes, lambda v: size_text(round(v))),
    "GFLOP": (operations, lambda v: f"{v / 1e9:,.0f}"),
    "virtual seconds": (virtual, lambda v: f"{v:,.1f}"),
}
# Table III and V of the paper: RMSE, KB and seconds, of Ciao and of Epinions.
PAPER: dict[str, dict[str, tuple[float, float | None, float | None]]] = {
    EVERYBODY: {"ciao": (1.053, 851, 119), "epinions": (1.196, 851, 538)},
    BANDIT: {"ciao": (1.039, 568, 98), "epinions": (1.170, 476, 406)},
    "Rand": {"ciao": (1.049, 760, 191), "epinions": (1.178, 702, 627)},
    "Oort": {"ciao": (1.051, 673, 173), "epinions": (1.209, 605, 895)},
    NUMBER: {"ciao": (1.057, None, None), "epinions": (1.185, None, None)},
    CLIENTS: {"ciao": (1.050, None, None), "epinions": (1.180, None, None)},
    "POW": {"ciao": (1.064, 690, 294), "epinions": (1.184, 690, 703)},
}
# Targets of RMSE that the paper names, by figure, data and cut (of figure 9 those of its text).
TARGETS: list[tuple[str, str, str, tuple[float, ...]]] = [
    ("3", "ciao", AVERAGE, (2.0, 1.6, 1.2, 1.1)),
    ("3", "epinions", AVERAGE, (1.3,)),
    ("5", "ciao", AVERAGE, (1.055,)),
    ("5", "ciao", "Skewed, 10 clients", (1.071,)),
    ("5", "ciao", "Extreme, 10 clients", (1.041,)),
    ("5", "epinions", AVERAGE, (1.219,)),
    ("5", "epinions", "Skewed, 10 clients", (1.222,)),
    ("5", "epinions", "Extreme, 10 clients", (1.190,)),
    ("7", "ciao", "5 clients", (1.058,)),
    ("7", "ciao", "20 clients", (1.012,)),
    ("7", "epinions", "5 clients", (1.182,)),
    ("7", "epinions", "20 clients", (1.230,)),
    ("9", "ciao", AVERAGE, (1.2,)),
    ("9", "epinions", AVERAGE, (1.1,)),
]
PLOTTED = (EVERYBODY, BANDIT, SAME, "Rand", "Oort", "POW")
PARTS = (BANDIT, NUMBER, CLIENTS, SAME)


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean; None where one value is missing."""
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known and len(known) == len(values) else None


def whole_of(found: StudyLines, dataset: str, cut: str, seed: int) -> Line:
    """Return full participation's line, which `lines_of` has seen."""
    line = line_of(found, dataset, cut, EVERYBODY, seed)
    assert line is not None
    return line


def score_table(found: StudyLines, dataset: str, cut: str) -> str:
    """Return mean participation, scores at the best round, and RMSE at equal budgets."""
    heads = ["", "seeds", "mean clients", *TOLD]
    heads += [f"RMSE, {share:.0%} of the bytes" for share in BUDGETS]
    rows = []
    for row in ROWS:
        lines = lines_of(found, dataset, cut, row)
        if not lines:
            continue
        most = {s: training_bytes(whole_of(found, dataset, cut, s))[-1] for s in lines}
        part = statistics.mean(training_bytes(line)[-1] / most[s] for s, line in lines.items())
        texts = told([*lines.values()], "server")
        for share in BUDGETS:
            got = mean([within(line, share * most[s]) for s, line in lines.items()])
            texts.append("-" if got is None else f"{got:.4f}")
        rows.append([row, str(len(lines)), f"{part * CUTS[cut][0]:.1f}", *texts])
    return markdown_table(heads, rows)


def cost_table(found: StudyLines, dataset: str, cut: str, unit: str) -> str:
    """Return what each row takes to the levels, and in all."""
    cost, text = COSTS[unit]
    rows = []
    for row in ROWS:
        lines = lines_of(found, dataset, cut, row)
        if not lines:
            continue
        goals = {s: levels(whole_of(found, dataset, cut, s)) for s in lines}
        texts = []
        for place in range(len(SHARES)):
            got = mean([cost_to(line, goals[s][place], cost) for s, line in lines.items()])
            texts.append("never" if got is None else text(got))
        texts.append(text(statistics.mean(cost(line)[-1] for line in lines.values())))
        rows.append([row, *texts])
    return markdown_table([unit, *(f"{share:.0%} of the way" for share in SHARES), "all"], rows)


def untrained(found: StudyLines, dataset: str, cut: str) -> tuple[float, float] | None:
    """Return the test RMSE of the mean and of biases in each silo, seed 0; None: not run."""
    lines = found.scored([alone(dataset, cut)])
    return (mean_of(lines[0]), lines[0]["test"]["server"]["rmse"]) if lines else None


def part_of(found: StudyLines, dataset: str, cut: str) -> str:
    """Return the tables of a cut."""
    text = f"**{dataset}, {cut}**"
    known = untrained(found, dataset, cut)
    if known is not None:
        text += f": the mean's RMSE is {known[0]:.4f}, "
        text += f"that of biases in each silo, without any byte, {known[1]:.4f} (seed 0)."
    if not lines_of(found, dataset, cut, EVERYBODY):
        return f"{text} No cell that trains has run."
    tables = [score_table(found, dataset, cut)]
    tables += [cost_table(found, dataset, cut, unit) for unit in COSTS]
    return "\n\n".join([text, *tables])


def ratio(value: float | None, whole: float | None) -> str:
    """Return a share of full participation's cost, - where one is not told."""
    return "-" if value is None or not whole else f"{value / whole:.2f}"


def beside_paper(found: StudyLines) -> str:
    """Return RMSE and shares of full participation's bytes and time, beside tables III and V."""
    heads = ["", "data", "RMSE, paper", "RMSE", "bytes, paper", "bytes", "time, paper", "time"]
    rows = []
    for dataset, (row, published) in product(DATASETS, PAPER.items()):
        rmse, size, seconds = published[dataset]
        _, all_size, all_seconds = PAPER[EVERYBODY][dataset]
        lines = lines_of(found, dataset, AVERAGE, row)
        wholes = [whole_of(found, dataset, AVERAGE, seed) for seed in lines]
        ours = [
            mean([c(a)[-1] / c(b)[-1] for a, b in zip(lines.values(), wholes, strict=True)])
            for c in (training_bytes, virtual)
        ]
        theirs = [ratio(size, all_size), ratio(seconds, all_seconds)]
        score = scores([*lines.values()], "server", "rmse")
        told_ours = ["-" if v is None else f"{v:.2f}" for v in ours]
        rows.append([row, dataset, f"{rmse:.3f}", score, theirs[0], told_ours[0]])
        rows[-1] += [theirs[1], told_ours[1]]
    return markdown_table(heads, rows)


def paper_targets(found: StudyLines) -> str:
    """Return what the paper's targets of RMSE ask for, seed 0."""
    heads = ["figure", "data", "cut", "target", "RMSE of the mean"]
    heads += ["RMSE of silo biases", EVERYBODY, BANDIT]
    rows = []
    for figure, dataset, cut, targets in TARGETS:
        known = untrained(found, dataset, cut)
        lines = [line_of(found, dataset, cut, row, 0) for row in (EVERYBODY, BANDIT)]
        for target in targets:
            told = ["-", "-"] if known is None else [f"{value:.4f}" for value in known]
            free = known is not None and known[0] <= target
            ends = ["0" if free else to_target(line, target) for line in lines]
            rows.append([figure, dataset, cut, f"{target:g}", *told, *ends])
    return markdown_table(heads, rows)


def to_target(line: Line | None, target: float) -> str:
    """Return the bytes to a target."""
    if line is None:
        return "-"
    spent = cost_to(line, target, training_bytes)
    return "never" if spent is None else size_text(round(spent))


def verdict(found: StudyLines, dataset: str) -> str:
    """Return the bandit beside uniform selection at its own mean participation."""
    ends: list[tuple[float, float]] = []
    ratios: list[float] = []
    for cut, seed in product(CUTS, SEEDS):
        ours, theirs = (line_of(found, dataset, cut, row, seed) for row in (BANDIT, SAME))
        if ours is None or theirs is None:
            continue
        ends.append((ours["test"]["server"]["rmse"], theirs["test"]["server"]["rmse"]))
        goal = levels(whole_of(found, dataset, cut, seed))[-1]
        spent = [cost_to(line, goal, training_bytes) for line in (ours, theirs)]
        if spent[0] is not None and spent[1] is not None:
            ratios.append(spent[0] / spent[1])
    if not ends:
        return f"**{dataset}**: nothing is known yet of FedACS' bandit."
    pairs = differences([a for a, _ in ends], [b for _, b in ends])
    cost = "nowhere do both get to 90 % of the way"
    if ratios:
        cost = (
            f"it takes {statistics.geometric_mean(ratios):.2f} times the bytes to 90 % of the way "
            f"where both get there ({len(ratios)} of {len(pairs)})"
        )
    wins = sum(value < 0 for value in pairs)
    return (
        f"{of_everybody(found, dataset)}\n\n"
        f"Beside uniform selection at its own mean participation FedACS' bandit is "
        f"{on_average(found, dataset)} in test RMSE on Average with 10 clients. Over all pairs of "
        f"cut and seed that have run the difference is {statistics.mean(pairs):+.4f} "
        f"(below 0 it is better; better in {wins} of {len(pairs)}), and {cost}."
    )


def of_everybody(found: StudyLines, dataset: str) -> str:
    """Return what the bandit takes of full participation's bytes to 90 % of the way."""
    ratios: list[float | None] = []
    for cut, seed in product(CUTS, SEEDS):
        lines = [line_of(found, dataset, cut, row, seed) for row in (BANDIT, EVERYBODY)]
        ours, whole = lines
        if ours is not None and whole is not None:
            spent = cost_to(ours, levels(whole)[-1], training_bytes)
            most = cost_to(whole, levels(whole)[-1], training_bytes)
            ratios.append(None if spent is None or most is None else spent / most)
    known = [ratio for ratio in ratios if ratio is not None]
    if not known:
        return f"**{dataset}**: what FedACS takes to 90 % of the way is not known yet."
    low, high = min(known), max(known)
    return (
        f"**{dataset}**: to 90 % of the way from the mean's RMSE to full participation's best "
        f"FedACS takes {statistics.geometric_mean(known):.2f} times full participation's bytes "
        f"({low:.2f} to {high:.2f}) where it gets there, {len(known)} of {len(ratios)} pairs of "
        "cut and seed."
    )


def on_average(found: StudyLines, dataset: str) -> str:
    """Return how the bandit compares on the first cut, by the paired test over seeds."""
    values: list[list[float | None]] = [[], []]
    for place, row in enumerate((BANDIT, SAME)):
        lines = [line_of(found, dataset, AVERAGE, row, seed) for seed in SEEDS]
        values[place] = [line["test"]["server"]["rmse"] if line else None for line in lines]
    return compared(values[0], values[1])


def courses(found: StudyLines, rows: Sequence[str], title: str) -> Curves:
    """Return test RMSE by bytes on Ciao's first cut, seed 0."""
    lines: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
    for row in rows:
        line = line_of(found, "ciao", AVERAGE, row, 0)
        if line is not None:
            megabytes = [spent / 1e6 for spent in training_bytes(line)]
            lines[row] = (megabytes, line["curve"]["test"])
    return Curves(title, "MB without evaluation", "test RMSE", lines)


def choices(found: StudyLines) -> Curves:
    """Return the share of clients that train by round, of the bandit with seed 0."""
    lines: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
    for dataset, cut in product(DATASETS, CUTS):
        line = line_of(found, dataset, cut, BANDIT, 0)
        if line is not None:
            share = [100 * n / CUTS[cut][0] for n in line["curve"]["participants"]]
            lines[f"{dataset}, {cut}"] = (line["curve"]["round"], share)
    title, y = "FedACS' bandit, seed 0", "clients that train, %"
    return Curves(title, "round", y, lines, markers=True, bottom=0)


def page(found: StudyLines) -> Page:
    """Return the page."""
    sections = {"verdict": "\n\n".join(verdict(found, d) for d in DATASETS)}
    sections |= {
        "floor": without_training(found),
        "paper": beside_paper(found),
        "targets": paper_targets(found),
    }
    for dataset in DATASETS:
        sections[dataset] = "\n\n".join(part_of(found, dataset, cut) for cut in CUTS)
    plots = {
        "selection_figure3.svg": courses(found, PLOTTED, "Ciao, Average, 10 clients, seed 0"),
        "selection_figure9.svg": courses(found, PARTS, "Ciao, Average, FedACS' parts, seed 0"),
        "selection_choices.svg": choices(found),
    }
    return Page(sections, plots)


RECIPE = Recipe(
    name="fedacs/selection",
    title="FedACS' figures: which clients train, five cuts of Ciao and Epinions",
    cells=cells,
    page=page,
    text="""\
# Which clients train, on ratings

<!-- paper -->
<!-- paper -->

FedACS, its parts and other client selectors were run on two data sets of ratings, in five cuts
each. FedACS is not measurably different from uniform selection of as many clients, and half of the
clients save half of the bytes for about .01 of RMSE. Select clients uniformly, and fewer of them
to save bytes.

<!-- verdict -->
<!-- verdict -->

## How it was measured

The model is `rating_gcn` with 5 layers as in [tables.md](tables.md), in 20 rounds of 5 full-batch
epochs. Rand, Oort and POW take half of the clients. Scores are means ± standard deviations over
three seeds. The first table is of the cut Average with 10 clients. Its bytes and time are shares
of full participation's, since the paper's KB are not totals of a run.

*The way* goes from the RMSE of predicting the mean to the best one with all clients. `never` means
not within 20 rounds for at least one seed. The virtual clock draws speeds around 1 GFLOP/s with
links of 10 MB/s and 50 ms.

## Without training

Biases of each silo send no byte, and those of all ratings are centralized
([ratings.md](ratings.md)).

<!-- floor -->
<!-- floor -->

## The paper's targets

The paper counts bytes to targets of RMSE (figures 3, 5, 7 and 9). They are 0 where predicting the
mean reaches a target. Seed 0.

<!-- targets -->
<!-- targets -->

## Figures 3 and 9, choices over time

![Test RMSE by bytes, by selector.](selection_figure3.svg)

![Test RMSE by bytes, of the parts of FedACS.](selection_figure9.svg)

![Share of clients that the bandit chooses, by round.](selection_choices.svg)

## Ciao

<!-- ciao -->
<!-- ciao -->

## Epinions

<!-- epinions -->
<!-- epinions -->

## Limits

- All selectors are behind the biases of each silo, which need no training.
- The paper also has Harmony, which learns from counts of classes. Ratings have none.
- Ten of the bandit's twenty rounds explore numbers of clients.
- Bytes are without evaluation.
- The virtual clock is a model, and no setting was tuned. Oort prefers fast clients, so its figures
  differ from those of [tables.md](tables.md), where all are equally fast.

<!-- again -->
<!-- again -->

<!-- cells -->
<!-- cells -->

<!-- machine -->
<!-- machine -->
""",
)
