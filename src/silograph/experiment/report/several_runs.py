"""The page of several runs: curves over each other, final scores, and where the configs differ."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from silograph.evaluation.views import means_of
from silograph.experiment.report.page import (
    SEEDS,
    axis_of,
    differences,
    environment,
    given_of,
    help_of,
    named_units,
    text_of,
    used_values,
)
from silograph.experiment.report.reading import (
    MOST_POINTS,
    VIEWS,
    Curve,
    RunRecord,
    curves,
    thin_indices,
)
from silograph.experiment.terminal_table import mean_and_deviation
from silograph.task.metric_table import Metric

COLORS = 8  # of the style sheet
DASHES = 3
SPEAKING = ("dataset", "method", "partition", "model")  # settings whose values need no name
MOST_OF_ALL = 6000  # points of a figure


def comparison_page(
    runs: Sequence[RunRecord],
    paired: Mapping[str, Any] | None = None,
    warnings: Sequence[str] = (),
) -> str:
    """Return the HTML page that compares runs.

    Args:
        runs: the runs.
        paired: tables of their comparison, as `paired_tables` makes them; None: there is none.
        warnings: what a reader of these tables must know; those of runs are added.
    """
    different = differences([used_values(run) for run in runs])
    # What a method fills in goes without saying, and so does a default that is written out.
    given_names = [
        name for name in differences([given_of(run) for run in runs]) if name in different
    ]
    kinds = [label_of(run, [name for name in given_names if name not in SEEDS]) for run in runs]
    labels = [label_of(run, given_names) for run in runs]
    if (arms := names_of_arms(paired or {}, runs)) is not None:
        seeds = [label_of(run, [name for name in given_names if name in SEEDS]) for run in runs]
        kinds = arms
        labels = [", ".join(filter(None, each)) for each in zip(arms, seeds, strict=True)]
    groups = list(dict.fromkeys(kinds))
    looks = [look_of(groups.index(kind)) for kind in kinds]
    names = unique(labels, runs)
    figures = learning_curves(runs, names, looks)
    scored = (paired or {}).get("scores", [])  # comparisons of old have none
    means = group_rows(runs, kinds) if len(groups) < len(runs) else []
    return (
        environment()
        .get_template("comparison.html")
        .render(
            runs=[row_of(*row) for row in zip(runs, names, looks, strict=True)],
            groups=[{"name": group, "look": look_of(n)} for n, group in enumerate(groups)],
            means_of_groups=[] if scored else means,
            best_runs=[] if scored or means else best_cells(runs),
            scores=scored,
            different=different,
            help={
                name: next(filter(None, (help_of(run, name) for run in runs)), "")
                for name in different
            },
            same={
                name: runs[0].method if name == "method" else text_of(value)
                for name in ("dataset", "method", "partition", "clients", "model", "rounds")
                if name not in different
                and (value := runs[0].about["config"].get(name)) is not None
            },
            constants=sorted({run.baseline["name"] for run in runs if run.baseline}),
            cuts=len({run.about["partition_hash"] for run in runs}),
            each_its_own=cuts_follow_seeds(runs),
            paired=paired,
            warnings=[*warnings, *(line for run in runs for line in run.warnings)],
            graphs=len({run.about["same"]["graph"] for run in runs}),
            judges=sorted({run.judge for run in runs}),
            multilabel=any(run.about["model"]["task"] == "multilabel" for run in runs),
            metric=runs[0].metric.title,
            means=means_of(run.heard for run in runs),
            views=VIEWS,
            figures=figures,
            figure_data={figure["key"]: figure["data"] for figure in figures},
            axes=[axis_of(rows) for rows in rows_for_curves(runs)],
            units=named_units([axis_of(rows) for rows in rows_for_curves(runs)]),
        )
    )


def names_of_arms(paired: Mapping[str, Any], runs: Sequence[RunRecord]) -> list[str] | None:
    """Return the named arm of each run; None where a comparison has none, or not of all runs.

    Args:
        paired: tables of a comparison, as `paired_tables` makes them.
        runs: the runs.
    """
    names = [paired.get("runs", {}).get(Path(run.path).name) for run in runs]
    return names if all(names) else None


def in_order_of(
    plan: Mapping[str, Any], runs: Sequence[RunRecord], folders: Iterable[str] = ()
) -> list[RunRecord]:
    """Return the runs of a comparison in the order of its tables; others are the last.

    Args:
        plan: what compare.json says: `over`, `methods` and `seeds`.
        runs: the runs.
        folders: names of folders in this order, where arms have names.
    """
    if places := {folder: place for place, folder in enumerate(folders)}:
        return sorted(runs, key=lambda run: places.get(Path(run.path).name, len(places)))
    varied = plan.get("over", {})

    def place(run: RunRecord) -> list[int]:
        values = used_values(run)
        # Options may be varied by their names without their parts.
        options = {k.rpartition(".")[2]: v for k, v in reversed(values.items()) if "." in k}
        values = options | values
        pairs = [(values.get(key), varied[key]) for key in varied]
        pairs += [(values.get(key), plan.get(f"{key}s", ())) for key in ("method", "seed")]
        return [
            list(key_values).index(v) if v in key_values else len(key_values)
            for v, key_values in pairs
        ]

    return sorted(runs, key=place)


def cuts_follow_seeds(runs: Sequence[RunRecord]) -> bool:
    """Return whether runs with the same seeds have one partition, and others another one."""
    pairs = {(seeds_of(run), run.about["partition_hash"]) for run in runs}
    return len(pairs) == len({seeds for seeds, _ in pairs}) == len({cut for _, cut in pairs})


def group_rows(runs: Sequence[RunRecord], kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Return mean and sample standard deviation of each group's test scores, by view.

    Runs without a result are in no mean; their number is shown. Of runs with the same seeds, which
    are no sample, the first counts.
    """
    table, values, graphs = [], [], []
    for number, kind in enumerate(dict.fromkeys(kinds)):
        group = [run for run, run_kind in zip(runs, kinds, strict=True) if run_kind == kind]
        finished_runs = [run for run in group if run.result is not None]
        states = [open_state(run) for run in group if run.result is None]
        counted_runs = list({seeds_of(run): run for run in reversed(finished_runs)}.values())
        states += ["of the same seeds"] * (len(finished_runs) - len(counted_runs))
        scores = {
            view: [r.scores("test").get(view, {}).get(r.metric.name) for r in counted_runs]
            for view in VIEWS
        }
        values.append({view: mean_and_deviation(of_view)[0] for view, of_view in scores.items()})
        graphs.append(tuple(sorted({run.about["same"]["graph"] for run in group})))
        table.append(
            {
                "name": kind or group[0].method,
                "look": look_of(number),
                "judges": sorted({run.judge for run in group}),
                "runs": len(group),
                "done": len(counted_runs),
                "without": ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states)),
                "scores": {view: _spread(of_view) for view, of_view in scores.items()},
                "constant": _spread(map(constant_of, counted_runs)),
            }
        )
    marked = mark_best(values, graphs, runs[0].metric)
    return [row | {"best": best} for row, best in zip(table, marked, strict=True)]


def best_cells(runs: Sequence[RunRecord]) -> list[set[str]]:
    """Return the views in which each run has the best test score of all runs on its graph."""
    values = [
        {view: s.get(run.metric.name) for view, s in run.scores("test").items()} for run in runs
    ]
    graphs = [run.about["same"]["graph"] for run in runs]
    return mark_best(values, graphs, runs[0].metric)


def mark_best(
    values: Sequence[Mapping[str, float | None]], graphs: Sequence[object], metric: Metric
) -> list[set[str]]:
    """Return the views in which each row has the best value of all rows with the same graph.

    Args:
        values: of each row, by view.
        graphs: what each row is of: scores on different graphs say nothing about each other.
        metric: of the values; it says whether higher or lower ones are better.
    """
    marks: list[set[str]] = [set() for _ in values]
    for view, graph in product(VIEWS, dict.fromkeys(graphs)):
        rows = [n for n, row_graph in enumerate(graphs) if row_graph == graph]
        best = metric.best(values[n].get(view) for n in rows)
        for n in rows if best is not None and len(rows) > 1 else ():
            marks[n] |= {view} if values[n].get(view) == best else set()
    return marks


def seeds_of(run: RunRecord) -> tuple[Any, ...]:
    """Return the seeds of a run."""
    return tuple(run.about["config"].get(name) for name in SEEDS)


def constant_of(run: RunRecord) -> float | None:
    """Return the test score of the best constant prediction, None where nobody knows it."""
    score: float | None = (run.baseline or {"scores": {}})["scores"].get(run.metric.name)
    return score


def _spread(scores: Iterable[float | None]) -> str:
    """Return mean ± sample standard deviation of scores, a dash without any."""
    mean, deviation = mean_and_deviation(scores)
    spread = "" if deviation is None else f" ± {deviation:.4f}"
    return "-" if mean is None else f"{mean:.4f}{spread}"


def label_of(run: RunRecord, names: Sequence[str]) -> str:
    """Return what a run is called by the settings, as given, that tell it from others."""
    values = used_values(run) | {"method": run.method}
    texts = {name: text_of(values.get(name)) for name in names}
    return ", ".join(v if name in SPEAKING else f"{name} {v}" for name, v in texts.items())


def unique(labels: list[str], runs: Sequence[RunRecord]) -> list[str]:
    """Return labels that no two runs share: their folders' names where settings do not do."""
    if len(set(labels)) == len(labels) and all(labels):
        return labels
    folders = [Path(run.path).name for run in runs]
    if len(set(folders)) < len(folders):
        folders = [run.path for run in runs]
    return folders


def look_of(number: int) -> str:
    """Return the color and the dashes of a group of runs."""
    return f"color{number % COLORS} dash{number // COLORS % DASHES}"


def rows_for_curves(runs: Sequence[RunRecord]) -> list[list[Any]]:
    """Return the rows of each run that its curves go through."""
    max_points = min(MOST_POINTS, max(50, MOST_OF_ALL // len(runs)))
    return [
        [run.rows[i] for i in thin_indices(len(run.rows), max_points=max_points)] for run in runs
    ]


def learning_curves(
    runs: Sequence[RunRecord], names: Sequence[str], looks: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the curves: the metric by which rounds are chosen, training loss, the test metric."""
    tables = rows_for_curves(runs)
    axes = [axis_of(rows) for rows in tables]

    def figure(key: str, columns: Sequence[str], title: str, caption: str) -> dict[str, Any] | None:
        lines = [
            Curve(names[n], looks[n], [row.get(columns[n]) for row in rows], axis=n)
            for n, rows in enumerate(tables)
        ]
        drawn_figure = curves(key, lines, axes)
        return None if drawn_figure is None else drawn_figure | {"title": title, "says": caption}

    view, title = "of the view that chooses the run's round", runs[0].metric.title
    figures = [
        figure(
            "val",
            [f"val_{run.judge}_{run.metric.name}" for run in runs],
            f"Validation {title}",
            f"{title[:1].upper()}{title[1:]} on validation nodes, {view}.",
        ),
        figure(
            "train",
            ["train_loss"] * len(runs),
            "Training loss",
            "Mean loss of a training node, of a round's participants.",
        ),
        figure(
            "test",
            [f"test_{run.judge}_{run.metric.name}" for run in runs],
            f"Test {title}",
            f"{title[:1].upper()}{title[1:]} on test nodes, {view}; nothing is chosen by it.",
        ),
    ]
    return [drawn_figure for drawn_figure in figures if drawn_figure is not None]


def open_state(run: RunRecord) -> str:
    """Return what a table says of a run without a result."""
    return "not finished" if run.diverged is None else "diverged"


def row_of(run: RunRecord, name: str, look: str) -> dict[str, Any]:
    """Return a run's row of the table of scores."""
    best, test = run.best_row, run.scores("test").get(run.judge, {})
    return {
        "name": name,
        "look": look,
        "path": run.path,
        "config": {key: text_of(value) for key, value in used_values(run).items()},
        "judge": run.judge,
        "best_round": None if best is None else best["round"],
        "rounds": run.rows[-1]["round"] if run.rows else 0,
        "over": run.result is not None,
        "stopped": run.result["stopped"] if run.result else open_state(run),
        "test": {view: s[run.metric.name] for view, s in run.scores("test").items()},
        "constant": constant_of(run),
        "client_mean": next((v for n, v in test.items() if n.endswith("client_mean")), None),
        "val": run.scores("val").get(run.judge, {}).get(run.metric.name),
        "bytes": run.total_bytes,
        "seconds": run.seconds,
        "hash": run.about["partition_hash"],
        "by_class": run.class_scores[0],
        "class_view": run.class_scores[1],
        "confusion": (run.result or {}).get("confusion"),
    }
