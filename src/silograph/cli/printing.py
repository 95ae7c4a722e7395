"""What commands print: tables for people on standard output, or JSON for programs."""

import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap

from rich.console import Console

from silograph.aggregation.server_optimizers import NONE
from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError, canonical_name, lookup, unknown
from silograph.core.text import count_of, printable
from silograph.experiment.report import write_inspection
from silograph.experiment.resolve.data import load_and_cut
from silograph.experiment.resolve.parts import TABLES, NamedPart
from silograph.experiment.run.progress import best_mode, generation_callback
from silograph.experiment.run.recommender import MODEL, POPULAR, Recommender
from silograph.experiment.run.result import Result
from silograph.experiment.terminal_table import console_to, print_number_table, table_of
from silograph.graph.datasets import DATASETS
from silograph.graph.heterogeneity import describe
from silograph.graph.silos.inspect import inspect_silos
from silograph.graph.silos.read import is_silo, read_silo, read_silos
from silograph.methods import METHODS
from silograph.methods.base import Method, Needs
from silograph.study.attack import NOTHING, Finding, finding_row, unmeasured_notes

MOST_ROWS = 40  # clients shown one by one
MOST_COLUMNS = 8  # classes beside each other


def _console() -> Console:
    """Return standard output."""
    return console_to(sys.stdout)


def print_result(result: Result) -> None:
    """Print the scores by view, and where the rest stands."""
    result.print_to(_console())


def print_cut(config: RunConfig, *, as_json: bool, quick: bool = False) -> None:
    """Cut a graph as a run would, and print what the cut did; `quick` without clustering."""
    cut = load_and_cut(config, generation_callback(best_mode()))
    statistics = describe(cut.graph, cut.partition, copies=cut.copies_split, clustering=not quick)
    rows = statistics.client_rows()
    totals = statistics.totals()
    about = {
        "dataset": cut.graph.name,
        "partition": config.partition,
        "clients": len(rows),
        "hash": cut.partition.hash,
    }
    if as_json:
        print(json.dumps({**about, **totals, "by_client": rows}))  # noqa: T201
        return
    console = _console()
    shown_rows = rows[:MOST_ROWS]
    title = f"{cut.graph.name} cut by {config.partition} into {count_of(len(rows), 'client')}"
    names = [name for name in rows[0] if name != "clustering"]  # one column too many for 80
    columns = [name.replace("_", " ") for name in names]
    print_number_table(
        console, columns, [[row[name] for name in names] for row in shown_rows], title
    )
    console.print()
    if len(rows) > len(shown_rows):
        console.print(
            f"... and {count_of(len(rows) - len(shown_rows), 'more client')} (all of them: --json)"
        )
    for name, value in totals.items():
        text = "-" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)
        console.print(f"{name.replace('_', ' ')}: {text}")
    console.print(f"partition hash: {cut.partition.hash}")


def print_inspection(data: Path, out: Path | None, *, as_json: bool) -> None:
    """Print what the folders of silos hold, and what looks wrong; a page of it goes to `out`."""
    members = (read_silo(data),) if is_silo(data) else read_silos(data).members
    inspection = inspect_silos(members)
    if out is not None:
        write_inspection(inspection, data, out)
    if as_json:
        print(json.dumps(inspection.to_dict()))  # noqa: T201
        return
    console, title = _console(), count_of(len(inspection.silos), "silo")
    summaries = [asdict(silo) for silo in inspection.silos[:MOST_ROWS]]
    shares = [silo.pop("classes", {}) for silo in summaries]
    for silo in summaries:  # the page has them
        silo.pop("degrees", None)
        silo.pop("missing", None)
    means = [name for name in summaries[0] if name.startswith("mean")]
    rows = [[f"{v:.2f}" if name in means else v for name, v in silo.items()] for silo in summaries]
    print_number_table(console, [name.replace("_", " ") for name in summaries[0]], rows, title)
    classes = list(dict.fromkeys(name for share in shares for name in share))
    if 0 < len(classes) <= MOST_COLUMNS:
        rows = [
            [silo["silo"], *(f"{share[c]:.1%}" if c in share else "-" for c in classes)]
            for silo, share in zip(summaries, shares, strict=True)
        ]
        print_number_table(console, ["silo", *map(printable, classes)], rows, "share of classes")
    if inspection.columns:
        rows = [
            [c.column, *(f"{v:.4g}" for v in (c.low, c.mean, c.high)), f"{c.drift:.2f}"]
            for c in inspection.columns[:MOST_ROWS]
        ]
        between = [" and ".join(c.between) or "-" for c in inspection.columns]
        rows = [[*row, silos] for row, silos in zip(rows, between, strict=False)]
        heads = ["column", "least", "mean", "largest", "drift", "between"]
        print_number_table(console, heads, rows, "columns, by drift between silos (0 to 1)")
    more = max(len(inspection.silos), len(inspection.columns)) > MOST_ROWS
    console.print("\n... and more (all of it: --json)" if more else "")
    for line in inspection.warnings or ("nothing looks wrong",):
        console.print(line, soft_wrap=True)
    if out is not None:
        console.print(f"written to {out}", soft_wrap=True)


def print_findings(findings: Sequence[Finding], out: Path, *, as_json: bool) -> None:
    """Print what attacks recover."""
    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings]))  # noqa: T201
        return
    console = _console()
    if findings:
        console.print(
            table_of(("share", "right", "recovered"), [_short(finding) for finding in findings])
        )
    for finding in findings:
        console.print(f"{finding.recovered}: {finding.attack} (server: {finding.server})")
    if not findings:
        console.print(NOTHING)
    for line in unmeasured_notes(findings):
        console.print(line)
    console.print(f"written to {out / 'attack.json'} and attack.md")


def _short(finding: Finding) -> list[str]:
    """Return the figures of a finding, and what is recovered up to the first comma."""
    _, what, share, precision, _ = finding_row(finding)
    return [share, precision, what.partition(",")[0]]


def print_methods(names: Sequence[str] = ()) -> None:
    """Print methods with their options and defaults: those that are named, else all.

    Raises:
        ConfigError: there is no such method (names the nearest).
    """
    names = [canonical_name(name, METHODS, "method") for name in names]
    for name in names:
        if name not in METHODS and (kind := next((k for k in TABLES if name in TABLES[k]), None)):
            raise ConfigError(
                f"expected names of methods, got {name!r}, which is for --{kind}: silograph parts "
                f"{name} shows it"
            )
        lookup(METHODS, name, "method")
    _print_parts([METHODS[name] for name in dict.fromkeys(names)] or METHODS.values())


def print_parts(names: Sequence[str] = ()) -> None:
    """Print parts that a run chooses by name, with their options.

    Args:
        names: kinds of parts, and parts; all by default.

    Raises:
        ConfigError: there is no such kind or part.
    """
    all_names = [*TABLES, *(name for table in TABLES.values() for name in table)]
    names = [canonical_name(name, dict.fromkeys(all_names), "part") for name in names]
    for name in names:
        if name not in all_names:
            raise unknown("part", name, all_names)
    for kind, table in TABLES.items():
        is_whole_kind = not names or kind in names
        shown_parts = [part for name, part in table.items() if is_whole_kind or name in names]
        if shown_parts:
            _print_hanging(_console(), f"--{kind} NAME", style="bold underline")
            _print_parts(shown_parts)


def _print_parts(parts: Iterable[NamedPart]) -> None:
    console, first_with = _console(), dict[tuple[str, ...], NamedPart]()
    for part in parts:
        _print_hanging(console, f"{part.name}: {part.title}", style="bold")
        if reference := getattr(part, "reference", ""):
            _print_hanging(console, f"  {reference}")
        if isinstance(part, Method):
            _print_hanging(console, f"  clients: {_training(part.needs)}")
        option_fields = dataclasses.fields(part.options)
        # A preset has the options of another method, which stands above it.
        base = first_with.setdefault(
            tuple(f"{f.name} {f.metadata['help']}" for f in option_fields), part
        )
        base_defaults = {f.name: f.default for f in dataclasses.fields(base.options)}
        if base is not part and option_fields:
            differing_defaults = {
                f.name: f.default for f in option_fields if f.default != base_defaults[f.name]
            }
            differing_options = ", ".join(
                f"{n}={str(value).lower()}" for n, value in differing_defaults.items()
            )
            _print_hanging(
                console, f"  options of {base.name}, with {differing_options or 'its defaults'}"
            )
            option_fields = ()
        for f in option_fields:
            default = str(f.default).lower()
            _print_hanging(console, f"  --option {f.name}={default}  {f.metadata['help']}")
        if isinstance(part, Method) and part.caution:
            _print_hanging(console, f"  Caution: {part.caution}")
        if isinstance(part, Method) and (deviation := part.deviation(part.options())):
            _print_hanging(console, f"  By default {deviation}")


def _training(needs: Needs) -> str:
    """Return how clients train by default."""
    passes = "1 local epoch" if needs.local_epochs == 1 else f"{needs.local_epochs} local epochs"
    optimizer_note = ", optimizer state kept between rounds" if needs.keep_optimizer else ""
    selector_note = "" if needs.selector == "uniform" else f", selected by {needs.selector}"
    rate = needs.learning_rate(needs.optimizer)
    decay = "" if needs.weight_decay else ", no weight decay"
    takes_step = needs.server_optimizer != NONE.name
    server_note = f"; server optimizer {needs.server_optimizer}" if takes_step else ""
    clients = f"{needs.optimizer} {rate:g}{decay}, {passes} in a round"
    return f"{clients}{optimizer_note}{selector_note}{server_note}"


def _print_hanging(console: Console, text: str, style: str | None = None) -> None:
    """Print a line; what does not fit stands indented below it."""
    lines = wrap(text, console.width, subsequent_indent=" " * 6, break_on_hyphens=False)
    console.print("\n".join(lines), style=style, soft_wrap=True)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table of words."""
    table = table_of(columns, rows)
    for column in table.columns:
        column.justify = "left"
    _console().print(table)


def print_recommended(
    recommender: Recommender, user: str, item: str | None, top: int, *, as_json: bool
) -> None:
    """Print items with their predicted ratings, and with what orders those that are clipped.

    A user whom the silo does not know gets its popular items, and the output says so.
    """
    is_known = recommender.knows(user)
    if item is None:
        best = recommender.best_items if is_known else lambda _, top: recommender.popular_items(top)
        rows = best(user, top)
    elif is_known:
        rows = [(item, recommender.predict(user, item), recommender.score(user, item))]
    else:
        rows = [(item, *recommender.mean_of(item))]
    if as_json:
        keys, source = ("item", "rating", "score"), MODEL if is_known else POPULAR
        items = [dict(zip(keys, row, strict=True)) for row in rows]
        print(json.dumps({"user": user, "source": source, "items": items}))  # noqa: T201
        return
    if not is_known:
        print(  # noqa: T201
            f"user {printable(user)} is unknown to this silo: "
            + ("its popular items" if item is None else "the item's mean rating")
            + ", by the model's means over all users"
        )
    if item is not None:
        print(f"{rows[0][1]:.2f}")  # noqa: T201
    elif not rows:
        print(f"user {user} has rated all items of this silo")  # noqa: T201
    else:
        columns = ["item", "predicted rating", "unclipped"]
        print_table(columns, [(printable(name), f"{r:.2f}", f"{s:.3f}") for name, r, s in rows])


def print_datasets() -> None:
    """Print every dataset that is known by name."""
    table = table_of(["dataset", "what it is"], list(DATASETS.items()))
    table.columns[1].justify = "left"
    _console().print(table)
