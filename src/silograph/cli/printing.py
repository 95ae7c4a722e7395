"""What commands print: tables for people on standard output, or JSON for programs."""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import wrap

from rich.console import Console

from silograph.core.config import RunConfig
from silograph.core.resolved_config import asked_again
from silograph.evaluation.views import means_of
from silograph.experiment.report.figures import size_text
from silograph.experiment.resolve.cutting import load_and_cut
from silograph.experiment.resolve.parts import TABLES, NamedPart, choose_parts
from silograph.experiment.run.progress import best_mode, generating
from silograph.experiment.run.result import VIEWS, Result
from silograph.experiment.terminal_table import table_of
from silograph.graph.datasets import DATASETS
from silograph.graph.measure.statistics import describe
from silograph.methods import METHODS
from silograph.methods.base import Method, Needs, seen_by
from silograph.task.metric_table import METRICS

MOST_ROWS = 40  # clients shown one by one


def _console() -> Console:
    """Return standard output; names of files and clients are text, whatever signs they hold."""
    return Console(markup=False, emoji=False, highlight=False)


def print_result(result: Result) -> None:
    """Print the scores by view, and where the rest stands."""
    console, config = _console(), result.config
    rows = []
    for view in VIEWS:
        if view == "uncut" and result.cut is None:  # nobody has that graph
            continue
        scores = getattr(result.test, view)
        values = {name: None if scores is None else scores[name] for name in result.reported}
        rows.append([view, *(METRICS[name].text(value) for name, value in values.items())])
    if result.baseline is not None:
        values = {name: result.baseline[name] for name in result.reported}
        rows.append(
            [result.constant, *(METRICS[name].text(value) for name, value in values.items())]
        )
    columns = ["test", *(METRICS[name].title for name in result.reported)]
    about = f"{config.method}, {config.clients} clients ({config.partition})"
    title = f"{Path(config.dataset).stem}, {about}"
    console.print(table_of(columns, rows, title))
    console.print()
    chosen_method = choose_parts(asked_again(config)).method
    method, options = chosen_method.part, chosen_method.options
    means = means_of([seen_by(method, config)])
    for view in VIEWS:
        if getattr(result.test, view) is not None:
            console.print(f"{view}: {means[view]}", style="dim")
    if away := result.judged_without:
        console.print(f"judged without the nodes of {', '.join(away)}: away in that round")
    chosen = any(getattr(result.val, view) is not None for view in VIEWS)
    kinds = result.ledger.bytes_by_kind
    parts = ", ".join(f"{name} {size_text(size)}" for name, size in kinds.items())
    console.print(f"bytes: {size_text(result.bytes)} ({parts})")
    console.print(f"work: {result.flops / 1e9:,.2f} GFLOP at the clients")
    if result.local_bias is not None:
        console.print(
            f"local bias: {result.local_bias:.4g}, mean distance of logits to a centralized model's"
        )
    if (share := method.setting.held(options)) is not None:
        console.print(f"held by the server: features, labels and edges of {share:.0%} of the nodes")
    console.print(f"stopped: {result.stopped}")
    console.print(
        f"best round {result.best_round} of {config.rounds} "
        f"({'by validation' if chosen else 'the last one: no validation nodes'}), "
        f"{result.seconds:.1f} s, peak memory {size_text(result.peak_memory_bytes)}"
    )
    if result.advice is not None:
        console.print(f"note: {result.advice}")
    if result.result_dir is not None:
        console.print(f"written to {result.result_dir}", soft_wrap=True)


def print_cut(config: RunConfig, *, as_json: bool, quick: bool = False) -> None:
    """Cut a graph as a run would, and print what the cut did; `quick` without clustering."""
    cut = load_and_cut(config, generating(best_mode()))
    statistics = describe(cut.graph, cut.partition, cut.split, clustering=not quick)
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
    shown = rows[:MOST_ROWS]
    title = f"{cut.graph.name} cut by {config.partition} into {len(rows)} clients"
    names = [name for name in rows[0] if name != "clustering"]  # one column too many for 80
    columns = [name.replace("_", " ") for name in names]
    console.print(table_of(columns, [[row[name] for name in names] for row in shown], title))
    console.print()
    if len(rows) > len(shown):
        console.print(f"... and {len(rows) - len(shown)} more clients (all of them: --json)")
    for name, value in totals.items():
        text = "-" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)
        console.print(f"{name.replace('_', ' ')}: {text}")
    console.print(f"partition hash: {cut.partition.hash}")


def print_methods() -> None:
    """Print every method with its options and their defaults."""
    _print_parts(METHODS.values())


def print_parts() -> None:
    """Print all parts that a run chooses by name, with their options."""
    for kind, table in TABLES.items():
        _print_hanging(_console(), f"--{kind} NAME", style="bold underline")
        _print_parts(table.values())


def _print_parts(parts: Iterable[NamedPart]) -> None:
    console = _console()
    for part in parts:
        _print_hanging(console, f"{part.name}: {part.title}", style="bold")
        if reference := getattr(part, "reference", ""):
            _print_hanging(console, f"  {reference}")
        if isinstance(part, Method):
            _print_hanging(console, f"  clients: {_training(part.needs)}")
        for f in dataclasses.fields(part.options):
            default = str(f.default).lower()
            _print_hanging(console, f"  --option {f.name}={default}  {f.metadata['help']}")
        if isinstance(part, Method) and part.caution:
            _print_hanging(console, f"  Caution: {part.caution}")


def _training(needs: Needs) -> str:
    """Return how clients train by default."""
    passes = "1 local epoch" if needs.local_epochs == 1 else f"{needs.local_epochs} local epochs"
    kept = ", optimizer state kept between rounds" if needs.keep_optimizer else ""
    return f"{needs.optimizer} {needs.learning_rate(needs.optimizer):g}, {passes} in a round{kept}"


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


def print_datasets() -> None:
    """Print every dataset that is known by name."""
    table = table_of(["dataset", "what it is"], list(DATASETS.items()))
    table.columns[1].justify = "left"
    _console().print(table)
