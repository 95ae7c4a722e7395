"""The page of one run: what its sections say, put into the template."""

from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from silograph.evaluation.views import means_of
from silograph.experiment.report.clients import client_figure
from silograph.experiment.report.config_table import commands, settings
from silograph.experiment.report.cut import cut_figures
from silograph.experiment.report.figures import (
    AXES,
    Axis,
    Curve,
    curves,
    size_text,
    thinned,
    units_of,
)
from silograph.experiment.report.reading import VIEWS, RunRecord
from silograph.experiment.result_files import FACT, VIRTUAL, Row
from silograph.task.metric_table import LOSS, title_of

MOST_ROWS = 200  # of the table of rounds


@cache
def environment() -> jinja2.Environment:
    """Return the templates; everything they print is escaped."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates", encoding="utf-8")
    found = jinja2.Environment(
        loader=loader,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    found.filters |= {"size": size_text, "score": score_text, "number": number_text}
    found.filters |= {"cell": cell_text, "short": short_text}
    return found


def score_text(value: float | None) -> str:
    """Return a score as the command line prints it; see `Metric.text`."""
    return "-" if value is None else f"{value:.4f}" if abs(value) < 1e4 else f"{value:.6g}"


def number_text(value: float) -> str:
    """Return a number with separators; three digits are enough for a measured one."""
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def cell_text(value: float | None) -> str:
    """Return a cell of the table of rounds."""
    return "" if value is None else str(value) if isinstance(value, int) else f"{value:.6g}"


def short_text(cell: str) -> str:
    """Return a cell of clients.csv, with six digits where it is no whole number."""
    return cell if cell.isdigit() or not cell else f"{float(cell):.6g}"


def run_page(run: RunRecord) -> str:
    """Return the HTML page of a run."""
    best = run.best_row
    figures = learning(run)
    return (
        environment()
        .get_template("run.html")
        .render(
            run=run,
            config=run.about["config"],
            best=best,
            state=state_of(run),
            chosen=chosen_of(run),
            views=VIEWS,
            means=means_of([run.heard]),
            names={name: title_of(name) for name in run.reported},
            scores={part: run.scores(part) for part in ("test", "val")},
            figures=figures,
            constants=constant_facts(run.rows),
            figure_data={figure["key"]: figure["data"] for figure in figures},
            axes=[axis_of(kept_rows(run))],
            units=named_units([axis_of(kept_rows(run))]),
            traffic=traffic(run),
            clients=client_figure(run),
            cut=cut_figures(run),
            settings=settings(run),
            commands=commands(run),
            table=[run.rows[i] for i in thinned(len(run.rows), most=MOST_ROWS)],
        )
    )


def state_of(run: RunRecord) -> str:
    """Return how far the run is, as a sentence."""
    last = run.rows[-1]["round"] if run.rows else 0
    if run.diverged is not None:
        return f"training diverged after round {last}: lower the learning rate"
    if run.result is None:
        return (
            f"not finished: round {last} of {run.about['config']['rounds']} is the last one judged"
        )
    return f"finished: {run.result['stopped']}"


def chosen_of(run: RunRecord) -> str:
    """Return how the best round is chosen, as a sentence."""
    if not run.by_validation:
        if run.result is not None and run.result["val"]["uncut"] is not None:
            return "The last round is reported: no client sent validation counts to choose by."
        return (
            "The last round is reported: there are no validation nodes to choose by, or no client "
            "sent their counts."
        )
    return (
        f"The best round is chosen by validation {run.metric.title} of the {run.judge} view, ties "
        "by validation loss. Test scores are shown, and decide nothing."
    )


def kept_rows(run: RunRecord) -> list[Row]:
    """Return the rows that curves go through."""
    best = run.best_row
    place = [i for i, row in enumerate(run.rows) if row is best]
    return [run.rows[i] for i in thinned(len(run.rows), place)]


def named_units(axes: Sequence[Axis]) -> dict[str, str]:
    """Return what curves of a page can stand against, with the words for it."""
    return {unit: AXES[unit] for unit in units_of(axes)}


def axis_of(rows: Sequence[Row]) -> dict[str, list[float | None]]:
    """Return the x values of a run's curves."""
    columns = rows[0].keys() if rows else AXES.keys() - {VIRTUAL}
    return {unit: [row[unit] for row in rows] for unit in AXES if unit in columns}


def learning(run: RunRecord) -> list[dict[str, Any]]:
    """Return the curves of the metric and the loss; the view that chooses is drawn thicker."""
    rows = kept_rows(run)
    if not rows:
        return []
    axes, best = [axis_of(rows)], run.best_row
    at = None if best is None else {unit: float(best[unit] or 0) for unit in axes[0]}

    def line(column: str, name: str, look: str) -> Curve:
        return Curve(name, look, [row.get(column) for row in rows])

    def lines(score: str) -> list[Curve]:
        return [
            line(
                f"{part}_{view}_{score}",
                f"{'validation' if part == 'val' else 'test'}, {view}",
                f"{view} {part}{' judge' if view == run.judge and part == 'val' else ''}",
            )
            for part in ("val", "test")
            for view in ("server", "personalized")
        ]

    metric = run.metric
    scores = curves(metric.name, lines(metric.name), axes, at) if metric.name != LOSS else None
    loss = curves("loss", [line("train_loss", "training", "train"), *lines("loss")], axes, at)
    found = []
    if scores is not None:
        label = "bottom" if metric.higher else "top"
        found.append(scores | {"title": headed(metric.title), "label": label, "says": says_of(run)})
    if loss is not None:
        one = "rating" if run.about["model"]["task"] == "rating" else "node"
        says = (
            f"Mean loss of a {one}; training: of the round's participants before their last step."
        )
        found.append(loss | {"title": "Loss", "label": "top", "says": says})
    constant = {name for name, values in told_of(run.rows).items() if len(values) == 1}
    return found + facts_of(rows, axes, at, constant if len(run.rows) > 1 else set())


def facts_of(
    rows: Sequence[Row],
    axes: list[dict[str, list[float | None]]],
    at: dict[str, float] | None,
    constant: Collection[str],
) -> list[dict[str, Any]]:
    """Return a curve for each figure that the method reports of a round and that changes."""
    found = []
    for column in (name for name in told_of(rows) if name not in constant):
        name = column.removeprefix(FACT)
        figure = curves(column, [Curve(name, "train", [r.get(column) for r in rows])], axes, at)
        if figure is not None:
            title = name.replace("_", " ")
            found.append(
                figure | {"title": title, "label": "top", "says": "Reported by the method."}
            )
    return found


def told_of(rows: Sequence[Row]) -> dict[str, set[float | None]]:
    """Return the columns of what the method reports of rounds, with their different values."""
    names = [name for name in rows[0] if name.startswith(FACT)] if rows else []
    return {name: {row.get(name) for row in rows} for name in names}


def constant_facts(rows: Sequence[Row]) -> list[str]:
    """Return what the method reports alike of all rounds, where there are several."""
    found = []
    for name, values in told_of(rows).items():
        (value, *more) = values
        if len(rows) > 1 and not more and value is not None:
            found.append(f"{name.removeprefix(FACT).replace('_', ' ')} {value:,.10g}")
    return found


def headed(title: str) -> str:
    """Return a title as it stands at the head of a figure."""
    return title[0].upper() + title[1:]


def says_of(run: RunRecord) -> str:
    """Return what the run's metric is, as a sentence."""
    bits = run.metric.name == "accuracy" and run.about["model"]["task"] == "multilabel"
    return run.metric.says.replace("right labels", "right label bits") if bits else run.metric.says


def traffic(run: RunRecord) -> dict[str, Any] | None:
    """Return bytes by kind, down and up, most first; None where nothing was sent."""
    down, up = (
        {kind: size for (kind, direction), size in run.traffic.items() if direction == way}
        for way in ("down", "up")
    )
    total = {kind: down.get(kind, 0) + up.get(kind, 0) for kind in {*down, *up}}
    kinds = sorted((k for k in total if total[k]), key=lambda k: (-total[k], k))
    if not kinds:
        return None
    rows = [
        {"kind": k, "down": down.get(k, 0), "up": up.get(k, 0), "total": total[k]} for k in kinds
    ]
    return {"rows": rows, "most": total[kinds[0]], "total": sum(total.values())}
