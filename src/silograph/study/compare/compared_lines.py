"""What single runs and tests of a comparison come to."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from silograph.core.kinds import Kind
from silograph.study.cells import Cell, Line, words_of
from silograph.study.compare.asked import ComparisonRow
from silograph.study.compare.paired_statistics import Paired
from silograph.task.metric_table import Metric

ROW_KINDS = (  # of what belongs to single nodes; scores are a kind of their own
    Kind.EMBEDDINGS,
    Kind.FEATURES,
    Kind.PARTIAL_SUMS,
    Kind.COTANGENTS,
    Kind.GENERATED,
    Kind.HALO_KEYS,
)


def without_errors(lines: Sequence[Line]) -> list[Line]:
    """Return the lines of runs that came to an end."""
    return [line for line in lines if "error" not in line]


def failures(cells: Sequence[Cell], lines: Sequence[Line | None]) -> list[str]:
    """Return a line of text for what failed, one for seeds that failed alike."""
    seeds: dict[tuple[str, str], list[str]] = {}
    for cell, line in zip(cells, lines, strict=True):
        if line is not None and "error" in line:
            others = {name: value for name, value in cell.labels.items() if name != "seed"}
            alike = (words_of(others), line["error"])
            seeds.setdefault(alike, []).append(str(cell.labels["seed"]))
    return [
        f"{name}, seed{'s' * (len(found) > 1)} {', '.join(found)}: {error}"
        for (name, error), found in seeds.items()
    ]


def own_views(pairs: Iterable[tuple[str, str]]) -> str:
    """Return which view picks the rounds of each method, given pairs of both."""
    methods: dict[str, dict[str, None]] = {}
    for view, name in pairs:
        methods.setdefault(view, {})[name] = None
    several = [f"{view} ({', '.join(names)})" for view, names in methods.items()]
    return f"views that pick the rounds: {'; '.join(several if several[1:] else methods)}"


def ends_best(line: Line) -> bool:
    """Whether a run of more than one evaluation was best in the last round that it was to have."""
    last = line["config"]["rounds"]
    return len(line["curve"]["round"]) > 1 and line["best_round"] == line["rounds"] == last


def outcome_of(line: Line) -> list[Any]:
    """Return what a run came to, without its costs."""
    curve = {name: values for name, values in line["curve"].items() if name != "bytes"}
    return [line["val"], line["test"], curve]


def metric_in_words(metric: Metric) -> str:
    """Return what is shown of a metric."""
    return f"{metric.name} on test nodes, {'higher' if metric.higher else 'lower'} is better"


def best_mean(scores: Mapping[str, Mapping[int, float]], metric: Metric) -> str | None:
    """Return which of several series of scores, by seed, has the best mean."""
    means = {m: statistics.mean(by_seed.values()) for m, by_seed in scores.items() if by_seed}
    return max(means, key=lambda m: metric.goodness(means[m])) if means else None


def cost_of(line: Line, name: str) -> Any:
    """Return what a run cost; None is not known."""
    if name == "row_bytes":
        return sum(line["bytes"]["by_kind"].get(kind, 0) for kind in ROW_KINDS)
    return line["bytes"]["total"] if name == "bytes" else line.get(name)


def tested_columns(
    reference: str | None, test: Paired | None, adjusted: float | None
) -> ComparisonRow:
    """Return the columns of a paired test; `adjusted`: its p-value among several tests."""
    if test is None:
        names = ("pairs", "difference", "low", "high", "p", "p_holm")
        return {"reference": reference, **dict.fromkeys(names)}
    return {
        "reference": reference,
        "pairs": test.n,
        "difference": test.mean,
        "low": test.low,
        "high": test.high,
        "p": test.p,
        "p_holm": adjusted,
    }
