"""What tables 1 and 2 come to, by dataset and number of clients: the first thing on their pages."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from personal_cells import (
    METHODS,
    NAMES,
    Place,
    Printed,
    accuracy,
    by_seed,
    each_best,
    lines_of,
    paired,
    scores,
)

from silograph.experiment.terminal_table import markdown_table
from silograph.study.cells import Line
from silograph.study.reproduce import StudyLines

POINT = 1.0  # how far a base may be below the paper's cell
CONTROLS = {
    "uniform": "FedGrAINS less uniform top-k",
    "untrained": "less an untrained network",
    "batches": "less batches without a sampler",
}
HEAD = ["place", "seeds", "bases within a point or above", "by each client's round"]
HEAD += ["+ FedGrAINS at or above its cell"]
Reading = Callable[[Line], float | None]
Scored = Callable[[str, str], dict[int, float]]  # scores by seed of a method with a sampler


def ahead(
    found: StudyLines, place: Place, printed: Printed, sampler: str, read: Reading = accuracy
) -> dict[str, float]:
    """Return our mean less the paper's, in points, of the methods that have run."""
    gaps = {}
    for method in METHODS:
        paper = printed.get((method, sampler), {}).get((place.dataset, place.clients))
        lines = lines_of(found, place, method, sampler).values()
        values = [value for line in lines if (value := read(line)) is not None]
        if values and paper is not None:
            gaps[method] = 100 * statistics.mean(values) - paper
    return gaps


def added(scored: Scored, methods: Iterable[str], control: str) -> list[float]:
    """Return FedGrAINS less a control by method, in points, each a mean over shared seeds."""
    means = []
    for method in methods:
        ours, theirs = scored(method, "fedgrains"), scored(method, control)
        each = [100 * (ours[seed] - theirs[seed]) for seed in ours.keys() & theirs.keys()]
        means += [statistics.mean(each)] if each else []
    return means


def ranged(values: Sequence[float]) -> str:
    """Return the mean of some differences, with the least and the largest."""
    if not values:
        return "-"
    mean = statistics.mean(values)
    return f"{mean:+.2f} ({min(values):+.2f} to {max(values):+.2f})"


def seeds_of(found: StudyLines, place: Place) -> str:
    """Return how many seeds the methods alone have, fewest to most."""
    counts = [len(by_seed(found, place, method, "")) for method in METHODS]
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def counts_in(gaps: dict[str, float], least: float) -> str:
    """Return how many differences are at least so much, of how many, and who is below."""
    below = [f"{name} {gap:+.1f}" for name, gap in gaps.items() if gap < least]
    text = f"{len(gaps) - len(below)} of {len(gaps)}"
    return text + (f" ({', '.join(below)})" if below else "") if gaps else "-"


def verdict(found: StudyLines, places: Sequence[Place], printed: Printed) -> str:
    """Return a line for each place that has cells, and one for all of them."""
    rows, every = [], {control: list[float]() for control in CONTROLS}
    totals: list[list[bool]] = [[], [], []]  # of the three columns of counts
    for place in places:
        bases = ahead(found, place, printed, "")
        if not bases:
            continue
        own = ahead(found, place, printed, "", each_best)
        sampled = ahead(found, place, printed, "fedgrains")
        judged = ((bases, -POINT), (own, -POINT), (sampled, 0.0))
        for total, (gaps, least) in zip(totals, judged, strict=True):
            total += [gap >= least for gap in gaps.values()]
        scored = partial(by_seed, found, place)
        gains = {control: added(scored, METHODS, control) for control in CONTROLS}
        for control, values in gains.items():
            every[control] += values
        rows.append(
            [
                f"{NAMES[place.dataset]}, {place.clients}",
                seeds_of(found, place),
                counts_in(bases, -POINT),
                counts_in(own, -POINT),
                counts_in(sampled, 0.0),
                *(ranged(values) for values in gains.values()),
            ]
        )
    if not rows:
        return "No cell has run."
    counts = [f"{sum(total)} of {len(total)}" for total in totals]
    rows.append(["all", "", *counts, *(ranged(values) for values in every.values())])
    return markdown_table([*HEAD, *CONTROLS.values()], rows)


def by_place(found: StudyLines, places: Sequence[Place], printed: Printed) -> str:
    """Return a headline and a table for each place that has cells."""
    return "\n\n".join(
        f"## {NAMES[place.dataset]}, {place.clients} clients\n\n{scores(found, place, printed)}"
        for place in places
        if any(by_seed(found, place, method, "") for method in METHODS)
    )


def on_top(
    places: Mapping[str, Scored],
    methods: Sequence[str],
    trained: Mapping[str, Callable[[str], dict[int, float]]] | None = None,
) -> str:
    """Return for each place with cells who is ahead alone, and what FedGrAINS adds to all.

    Methods are compared on the seeds that all have which ran alone.

    Args:
        places: scores by name.
        methods: which.
        trained: scores of the methods alone where they may train otherwise than with FedGrAINS.
    """
    rows = []
    for name, scored in places.items():
        each = {m: trained[name](m) if trained else scored(m, "") for m in methods}
        alone = {method: scores for method, scores in each.items() if scores}
        shared = set.intersection(*map(set, alone.values())) if alone else set()
        if not shared:
            continue
        means = {m: statistics.mean(each[s] for s in shared) for m, each in alone.items()}
        first, *others = sorted(means, key=lambda method: -means[method])
        second = paired(alone[first], alone[others[0]]) if others else "-"
        local = paired(alone[first], alone.get("local", {})) if first != "local" else ""
        differences = [added(scored, methods, control) for control in ("", *CONTROLS)]
        gains = [ranged(values) if any(values) else "-" for values in differences]
        behind = f"{', '.join(others[:1])}: {second}" if others else "-"
        row = [name, f"{len(shared)}, {len(alone)} of {len(methods)}", first]
        rows.append([*row, f"{100 * means[first]:.1f}", behind, local, *gains])
    heads = ["where", "seeds, methods", "ahead alone", "its score", "before the next, paired"]
    heads += ["before `local`, paired", "FedGrAINS less the method alone", *CONTROLS.values()]
    return markdown_table(heads, rows) if rows else "No cell has run."
