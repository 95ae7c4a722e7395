"""The page of one run: what its sections say, put into the template."""

import dataclasses
import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from silograph.core.config import ENGINE, RunConfig
from silograph.core.files import write_atomic
from silograph.evaluation.views import means_of
from silograph.experiment.report.reading import (
    AXES,
    VIEWS,
    Axis,
    Curve,
    RunRecord,
    Scale,
    bars,
    curves,
    dots_of,
    heat,
    path_of,
    quantile,
    size_text,
    spread,
    thin_indices,
    units_of,
)
from silograph.experiment.result_files import CONFIG, FACT, KNOB, REPORT, VIRTUAL, Row
from silograph.federation.privacy.budget import BudgetUse
from silograph.task.metric_table import LOSS, Metric, metric_of, reported, title_of

# --- config table --------------------------------------------------------------------------------
# What a page says of configs: a table, what differs from the defaults, and how to run it again.


FIELDS = {f.name: f for f in dataclasses.fields(RunConfig) if f.name != "out"}
FIRST = ("method", "model")
OPTIONS = "Options of the parts"
SEEDS = ("seed", "partition_seed", "split_seed", "init_seed")


@dataclass(frozen=True)
class ConfigRow:
    """A row of the config's table.

    Attributes:
        name: the key.
        value: as the run used it.
        help: what it means.
        changed: whether the user set it to another value than the default.
        filled: whether it was left open and the run chose.
    """

    name: str
    value: str
    help: str
    changed: bool
    filled: bool


def default_of(name: str) -> Any:
    """Return the default of a config's field."""
    field = FIELDS[name]
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def text_of(value: Any) -> str:
    """Return a config's value as a page shows it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return ", ".join(f"{k}={text_of(v)}" for k, v in value.items()) or "-"
    return str(value)


def used_values(run: RunRecord) -> dict[str, Any]:
    """Return every key of a run with the value that was used; options of parts as PART.NAME."""
    config, options = run.about["config"], run.about["config"]["options"]
    return {**{k: v for k, v in config.items() if k in FIELDS and k != "options"}, **options}


def given_of(run: RunRecord) -> dict[str, Any]:
    """Return the keys that were given and are not the default, likewise."""
    return {**{k: v for k, v in run.given.items() if k != "options"}, **run.given["options"]}


def help_of(run: RunRecord, name: str) -> str:
    """Return what a key means."""
    text: str = FIELDS[name].metadata["help"] if name in FIELDS else run.about["help"].get(name, "")
    return text


def settings(run: RunRecord) -> dict[str, list[ConfigRow]]:
    """Return the rows of the config's table by group, groups in their first order."""
    changed = given_of(run)
    table: dict[str, list[ConfigRow]] = {}
    for name, value in used_values(run).items():
        if not applies(run, name, value) and name not in changed:
            continue
        field = FIELDS.get(name)
        row = ConfigRow(
            name=name,
            value=text_of(value),
            help=help_of(run, name),
            changed=name in changed,
            filled=field is not None and name not in changed and value != default_of(name),
        )
        table.setdefault(OPTIONS if field is None else field.metadata["group"], []).append(row)
    return table


def applies(run: RunRecord, name: str, value: Any) -> bool:
    """Whether a key has any effect on a run."""
    config = run.about["config"]
    matters = {
        "momentum": config.get("optimizer") == "sgd",
        "scale": value != 1.0,
        "edge_weights": "edge_weights" in run.about["dataset"],
        "evaluation_min_count": bool(value),
        "min_nodes_per_row": value != 1,
        "min_silos_per_row": value != 1,
        "weights_as": value != "exact",
        "weight_rows": value != "all",
        "secure_aggregation": bool(value),
        "largest_component": run.cut is not None,
        "drop_edges": run.cut is not None,
        "local_bias": run.cut is not None,
        "strict": run.cut is not None,
        "block_size": run.cut is not None,
        "engine": value != "local",
        "layers": "module" not in run.about["model"],
        "hidden": "module" not in run.about["model"] and config.get("layers") != 1,
    }
    return value is not None and matters.get(name, True)


def flags(changed: Mapping[str, Any]) -> list[str]:
    """Return the command-line flags that say these values."""
    words: list[str] = []
    for name, value in changed.items():
        key = short_of(name)
        flag = "--" + key.replace("_", "-")
        if key not in FIELDS:
            plain = value if isinstance(value, str) else json.dumps(value)
            words += ["--option", f"{name}={plain}"]
        elif isinstance(value, bool):
            words.append(flag if value else FIELDS[key].metadata["off"] or f"--no-{flag[2:]}")
        else:
            words += [flag, str(value)]
    return words


def short_of(name: str) -> str:
    """Return the key of `RunConfig` that says an option, if there is one; else the whole name."""
    kind, _, own = name.partition(".")
    return own if own in FIELDS and FIELDS[own].metadata.get("part") == kind else name


def keywords(changed: Mapping[str, Any]) -> str:
    """Return the keywords in Python that say these values, each behind a comma."""
    short = {short_of(name): value for name, value in changed.items()}
    plain = {name: value for name, value in short.items() if name in FIELDS}
    options = {name: value for name, value in short.items() if name not in FIELDS}
    plain |= {"options": options} if options else {}
    return "".join(f", {name}={value!r}" for name, value in plain.items())


def commands(run: RunRecord) -> dict[str, str]:
    """Return how to run it again and how to go on, by what it is for."""
    changed, code = given_of(run), bool(run.about.get("code"))
    if run.about.get("source") is None:  # a graph in memory: only Python has it
        changed.pop("dataset", None)
        return {
            "again": f"sg.run(graph{keywords(changed)})",
            "resume": f"sg.resume({run.path!r}, graph=graph{', trust=True' * code})",
        }
    dataset = changed.pop("dataset", default_of("dataset"))
    trust = ["--trust"] * code
    return {
        "again": shlex.join(["silograph", "run", dataset, *flags(changed)]),
        "from its file": shlex.join(
            ["silograph", "run", "--config", str(Path(run.path, CONFIG)), *trust]
        ),
        "resume": shlex.join(["silograph", "resume", run.path, *trust]),
    }


def differences(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys in which configs differ; method and model come first."""
    names = dict.fromkeys(name for config in configs for name in config)
    different_names = [name for name in names if len({text_of(c.get(name)) for c in configs}) > 1]
    return sorted(different_names, key=lambda name: name not in FIRST)


# --- What a page shows of the cut: sizes, mix of labels, edges between clients -------------------
#
# All of it is known in a simulation only: silos would tell neither label counts nor edges.


MOST_SHOWN = 60  # clients shown one by one
MOST_CELLS = 1500  # of a table of label counts
CountTable = list[list[int]]
PARTS = ("train", "val", "test")


def cut_figures(run: RunRecord) -> dict[str, Any] | None:
    """Return the figures of the cut; for many clients, sorted bars in place of one row a client.

    None where silos held the graph.
    """
    cut = run.cut
    if cut is None:
        return None
    figures: dict[str, Any] = {
        "clients": len(run.clients),
        "totals": {
            k: cut[k] for k in ("edges", "edges_cut", "cut_share", "label_distance", "homophily")
        },
        "sizes": None,
        "labels": None,
        "between": None,
        "many": None,
    }
    if len(run.clients) > MOST_SHOWN:
        return figures | {"many": sorted_bars(run, cut["labels"])}
    labels = label_mix(run, cut["labels"], cut["classes"]) if cut["classes"] else None
    return figures | {
        "sizes": sizes(run),
        "labels": labels,
        "between": edge_heat_map(run, cut["between"]),
    }


def sizes(run: RunRecord) -> dict[str, Any]:
    """Return each client's nodes by what they are for."""
    nodes = [int(row["nodes"]) for row in run.clients]
    counts = [{part: int(row[part]) for part in PARTS} for row in run.clients]
    for num_nodes, count in zip(nodes, counts, strict=True):
        count["other"] = num_nodes - sum(count.values())
    return {
        "rows": [
            {"client": row["client"], "nodes": num_nodes, "parts": count}
            for row, num_nodes, count in zip(run.clients, nodes, counts, strict=True)
        ],
        "most": max(nodes),
        "parts": [part for part in (*PARTS, "other") if any(count[part] for count in counts)],
    }


def shares(counts: list[int], nodes: int, *, multilabel: bool) -> list[float]:
    """Return the share of each class among a client's labels, or among its nodes for label bits."""
    total = nodes if multilabel else sum(counts)
    return [count / total if total else 0.0 for count in counts]


def label_mix(run: RunRecord, labels: CountTable, names: list[Any]) -> dict[str, Any]:
    """Return the heat map of clients by classes."""
    multilabel = run.about["model"]["task"] == "multilabel"
    nodes = [int(row["nodes"]) for row in run.clients]
    table = [
        shares(counts, n, multilabel=multilabel) for counts, n in zip(labels, nodes, strict=True)
    ]
    classes = [str(name) for name in names]
    return {
        "multilabel": multilabel,
        "columns": classes,
        "rows": [row["client"] for row in run.clients],
        "paths": heat(table),
        "counts": labels if len(classes) * len(labels) <= MOST_CELLS else None,
    }


def edge_heat_map(run: RunRecord, counts: CountTable | None) -> dict[str, Any] | None:
    """Return the heat map of cross-client edges; None for one client or without such edges."""
    largest = max((n for row in counts or () for n in row), default=0)
    if counts is None or not largest:
        return None
    names = [row["client"] for row in run.clients]
    return {
        "columns": names,
        "rows": names,
        "most": largest,
        "paths": heat([[n / largest for n in row] for row in counts]),
        "counts": counts,
    }


def sorted_bars(run: RunRecord, labels: CountTable) -> list[dict[str, Any]]:
    """Return sizes, the share of the largest class, and cross-client edges, largest first."""
    multilabel = run.about["model"]["task"] == "multilabel"
    nodes = [int(row["nodes"]) for row in run.clients]
    mix = [
        max(shares(counts, n, multilabel=multilabel), default=0.0)
        for counts, n in zip(labels, nodes, strict=True)
    ]
    ends = [
        int(row["cross_edges"]) / max(int(row["cross_edges"]) + int(row["internal_edges"]), 1)
        for row in run.clients
    ]
    what = (
        "nodes that have its commonest bit"
        if multilabel
        else "labels that are of its largest class"
    )
    bars_of_labels = {
        "title": "Commonest label" if multilabel else "Largest class",
        "says": f"Share of a client's {what}; 1 is a client of one kind.",
        **bars(mix),
    }
    return [
        {"title": "Nodes", "says": "Nodes of each client.", **bars(nodes)},
        *([bars_of_labels] if any(labels) else []),
        {
            "title": "Cut edges",
            "says": "Share of a client's edges that lead to another client.",
            **bars(ends),
        },
    ]


# --- What a page shows of the clients: how good the best round's models are at each of them ------


TENTH = 20  # the worst tenth is shown for at least so many clients


def client_figure(run: RunRecord) -> dict[str, Any] | None:
    """Return the score of every client; None before the end, or without test nodes."""
    metric = run.client_metric
    values = {view: run.client_scores(view) for view in VIEWS}
    values = {view: figure for view, figure in values.items() if figure}
    if not values:
        return None
    view = run.judge if run.judge in values else next(iter(values))
    judged_scores = [v for v in values[view] if v is not None]
    order = sorted(range(len(run.clients)), key=lambda c: metric.goodness(values[view][c]))
    scale = Scale(*spread([v for figure in values.values() for v in figure if v is not None], 0.05))
    low = judged_scores.index(min(judged_scores, key=metric.goodness))
    names = [
        row["client"] for row, v in zip(run.clients, values[view], strict=True) if v is not None
    ]
    figure = {
        "view": view,
        "views": list(values),
        "metric": metric,
        "median": quantile(judged_scores, 0.5),
        # A tenth of fewer clients is one of them, or less.
        "low": quantile(judged_scores, 0.1 if metric.higher else 0.9)
        if len(judged_scores) >= TENTH
        else None,
        "least": judged_scores[low],
        "least_name": names[low],
        "judged": len(judged_scores),
        "ticks": scale.marks(max_ticks=4),
    }
    if len(run.clients) > MOST_SHOWN:
        return figure | {"rows": [], "curve": by_rank(values, view, metric)}
    rows = [
        {
            "client": run.clients[c]["client"],
            "test": run.clients[c].get("test", ""),
            "dots": [
                {"view": v, "value": value, "at": round(100 * scale.share(value), 2)}
                for v in values
                if (value := values[v][c]) is not None
            ],
        }
        for c in reversed(order)
    ]
    return figure | {"rows": rows, "curve": None}


def by_rank(
    values: Mapping[str, Sequence[float | None]], view: str, metric: Metric
) -> dict[str, Any]:
    """Return the clients' scores, each view sorted from the worst, over the share of clients."""
    ordered = {
        v: sorted((x for x in view_values if x is not None), key=metric.goodness)
        for v, view_values in values.items()
    }
    y = Scale(*spread([x for view_values in ordered.values() for x in view_values], 0.04))
    lines = []
    for v, view_values in ordered.items():
        points = thin_indices(len(view_values))
        x = Scale(0, max(len(view_values) - 1, 1))
        look = f"{v} val{' judge' if v == view else ''}"
        path = path_of(points, [view_values[i] for i in points], x, y)
        lines.append({"name": v, "look": look, "d": path})
    return {"ticks": y.marks(), "lines": lines}


MOST_ROWS = 200  # of the table of rounds
MOST_FEATURES = 30  # of the table of drift


@cache
def environment() -> jinja2.Environment:
    """Return the templates; everything they print is escaped."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates", encoding="utf-8")
    jinja_environment = jinja2.Environment(
        loader=loader,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    jinja_environment.filters |= {"size": size_text, "score": score_text, "number": number_text}
    jinja_environment.filters |= {"cell": cell_text, "short": short_text}
    return jinja_environment


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
    figures = learning_curves(run)
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
            constants=constant_facts(run),
            figure_data={figure["key"]: figure["data"] for figure in figures},
            axes=[axis_of(kept_rows(run))],
            units=named_units([axis_of(kept_rows(run))]),
            traffic=traffic(run),
            clients=client_figure(run),
            decisions=decision_figure((run.result or {}).get("decisions")),
            threshold=(run.result or {}).get("threshold"),
            cut=cut_figures(run),
            drift=drift_table(run),
            settings=settings(run),
            commands=commands(run),
            table=[run.rows[i] for i in thin_indices(len(run.rows), max_points=MOST_ROWS)],
        )
    )


def drift_table(run: RunRecord) -> dict[str, Any] | None:
    """Return the client that differs most in each feature, for the features that differ most."""
    rows: dict[str, dict[str, Any]] = {}
    for row in run.feature_drift:
        if row["distance"]:
            most = rows.setdefault(row["feature"], {**row, "distance": -1.0})
            distance = float(row["distance"])
            if distance > most["distance"]:
                rows[row["feature"]] = {**row, "distance": distance}
    if not rows:
        return None
    more = max(0, len(rows) - MOST_FEATURES)
    return {"rows": list(rows.values())[:MOST_FEATURES], "more": more}


def decision_figure(decisions: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return scores of decisions and the reliability curve; None where a result has none."""
    if decisions is None:
        return None
    parts, scale = decisions["reliability"], Scale(0, 1)
    xs = [part["predicted"] for part in parts]
    ys = [part["share"] for part in parts]
    return {
        **decisions,
        "titles": {name: title_of(name) for name in decisions["scores"]},
        "ticks": scale.marks(),
        "line": path_of(xs, ys, scale, scale),
        "dots": dots_of(xs, ys, scale, scale),
    }


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
    if run.is_private:
        text = "With differential privacy the last round is the result, not one chosen by scores."
        return f"{text} {run.withheld}" if run.withheld else text
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
    return [run.rows[i] for i in thin_indices(len(run.rows), place)]


def named_units(axes: Sequence[Axis]) -> dict[str, str]:
    """Return what curves of a page can stand against, with the words for it."""
    return {unit: AXES[unit] for unit in units_of(axes)}


def axis_of(rows: Sequence[Row]) -> dict[str, list[float | None]]:
    """Return the x values of a run's curves."""
    columns = rows[0].keys() if rows else AXES.keys() - {VIRTUAL}
    return {unit: [row[unit] for row in rows] for unit in AXES if unit in columns}


def learning_curves(run: RunRecord) -> list[dict[str, Any]]:
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
    figures = []
    if scores is not None:
        counts_bits = metric.name == "accuracy" and run.about["model"]["task"] == "multilabel"
        says = metric.says
        says = says.replace("right labels", "right label bits") if counts_bits else says
        label = "bottom" if metric.higher else "top"
        figures.append(
            scores
            | {
                "title": metric.title[:1].upper() + metric.title[1:],
                "label": label,
                "says": says,
            }
        )
    if loss is not None:
        item = "rating" if run.about["model"]["task"] == "rating" else "node"
        caption = (
            f"Mean loss of a {item}; training: of the round's participants before their last step."
        )
        figures.append(loss | {"title": "Loss", "label": "top", "says": caption})
    constant = {name for name, values in values_by_fact(run.rows).items() if len(values) == 1}
    return figures + facts_of(run, rows, axes, at, constant if len(run.rows) > 1 else set())


def facts_of(
    run: RunRecord,
    rows: Sequence[Row],
    axes: list[dict[str, list[float | None]]],
    at: dict[str, float] | None,
    constant: Collection[str],
) -> list[dict[str, Any]]:
    """Return a curve for each figure that the method reports of a round and that changes."""
    figures = []
    for column in (name for name in values_by_fact(rows) if name not in constant):
        name = column.removeprefix(FACT)
        figure = curves(column, [Curve(name, "train", [r.get(column) for r in rows])], axes, at)
        if figure is not None:
            figures.append(figure | {"title": name.replace("_", " "), "label": "top"})
            figures[-1]["says"] = fact_text(run, name) or "Reported by the method."
    return figures


def fact_text(run: RunRecord, name: str) -> str:
    """Return what a figure of rounds is, in one sentence; nothing where its method does not say."""
    if name == "scored_clients":
        return "Clients whose nodes are in the scores of the round."
    if name.startswith(KNOB):
        return f"Set by the controller: {help_of(run, f'method.{name.removeprefix(KNOB)}')}."
    text: str = run.about["method"].get("facts", {}).get(name, "")
    return text


def values_by_fact(rows: Sequence[Row]) -> dict[str, set[float | None]]:
    """Return the columns of what the method reports of rounds, with their different values."""
    names = [name for name in rows[0] if name.startswith(FACT)] if rows else []
    return {name: {row.get(name) for row in rows} for name in names}


def constant_facts(run: RunRecord) -> list[tuple[str, str, str]]:
    """Return name, value and meaning of what is reported alike in all of several rounds."""
    texts = []
    for column, values in values_by_fact(run.rows).items():
        (value, *more) = values
        if len(run.rows) > 1 and not more and value is not None:
            name = column.removeprefix(FACT)
            texts.append((name.replace("_", " "), f"{value:,.10g}", fact_text(run, name)))
    return texts


def traffic(run: RunRecord) -> dict[str, Any] | None:
    """Return bytes by kind, down and up, most first; None where nothing was sent."""
    down, up = (
        {
            kind: size
            for (kind, direction), size in run.traffic.items()
            if direction == wanted_direction
        }
        for wanted_direction in ("down", "up")
    )
    total = {kind: down.get(kind, 0) + up.get(kind, 0) for kind in {*down, *up}}
    kinds = sorted((k for k in total if total[k]), key=lambda k: (-total[k], k))
    if not kinds:
        return None
    rows = [
        {"kind": k, "down": down.get(k, 0), "up": up.get(k, 0), "total": total[k]} for k in kinds
    ]
    return {"rows": rows, "most": total[kinds[0]], "total": sum(total.values())}


# --- The page of a silo about a run that it took part in: its own scores and nothing of others ---


SILO_VIEWS = ("server", "personalized")
# Of a simulation: which graph it loads, how it cuts it, and what needs it uncut. Silos have theirs.
LOADING = (
    "dataset",
    "data_dir",
    "columns",
    "na_values",
    "scale",
    "rating_scale",
    "repeated_edges",
    "largest_component",
    "drop_edges",
)
CUTTING = ("partition", "alpha", "favored_classes", "favor", "clients_per_part", "part_share")
DRAWING = ("share_mean", "share_variance", "share_classes", "partition_seed")
COMPUTING = ("local_bias", "strict", "block_size", *ENGINE)
UNUSED = (*LOADING, *CUTTING, *DRAWING, *COMPUTING)


def write_silo_report(folder: Path, about: Mapping[str, Any]) -> None:
    """Write the page into a silo's folder of a run; `about` is what result.json says."""
    write_atomic(folder / REPORT, silo_page(about), private=True)


def silo_page(about: Mapping[str, Any]) -> str:
    """Return the HTML page."""
    names = next((list(scores) for part in ("test", "val") for scores in about[part].values()), [])
    metric_names = sorted(
        reported(names, about["metric"]), key=lambda name: name != about["metric"]
    )
    config, budget = about["config"], (about["privacy"] or {}).get("budget")
    return (
        environment()
        .get_template("silo.html")
        .render(
            about=about,
            config=config,
            metric=metric_of(about["metric"]),
            names={name: title_of(name) for name in metric_names},
            views=SILO_VIEWS,
            means=means_of([about["seen"]]),
            decisions=decision_figure(about.get("decisions")),
            threshold=about.get("threshold"),
            budget=None if budget is None else BudgetUse(**budget),
            settings={
                n: (text_of(config[n]), FIELDS[n].metadata["help"])
                for n in FIELDS
                if n in config and n not in UNUSED
            },
            axes=[],
            figure_data={},
        )
    )
