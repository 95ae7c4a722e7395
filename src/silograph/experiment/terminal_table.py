"""Tables for the terminal."""

import io
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import IO

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from silograph.core.text import count_of
from silograph.experiment.result_files import Row
from silograph.task.metric_table import LOSS, METRICS, Metric


def console_to(file: IO[str], width: int | None = None) -> Console:
    """Return what prints to a file; names of files and clients are text, whatever signs they hold.

    Args:
        file: where it prints.
        width: in columns; None: that of the terminal, 80 where there is none.
    """
    # In a notebook rich would show the text beside the file, which then stays empty.
    return Console(
        file=file, width=width, markup=False, emoji=False, highlight=False, force_jupyter=False
    )


def printed_text(print_to: Callable[[Console], None], width: int | None) -> str:
    """Return what a function prints to a console of a width, without spaces at ends of lines."""
    file = io.StringIO()
    print_to(console_to(file, width))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def mean_and_deviation(values: Iterable[float | None]) -> tuple[float | None, float | None]:
    """Return mean and sample standard deviation of the values that there are.

    >>> mean_and_deviation([1.0, None, 3.0]), mean_and_deviation([1.0]), mean_and_deviation([])
    ((2.0, 1.4142135623730951), (1.0, None), (None, None))
    """
    numbers = [value for value in values if value is not None]
    return (
        statistics.mean(numbers) if numbers else None,
        statistics.stdev(numbers) if len(numbers) > 1 else None,
    )


def table_of(columns: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> Table:
    """Return a table for the terminal: words to the left in the first column, numbers right."""
    table = Table(
        title=title or None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=number == 0)
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    return table


def print_number_table(
    console: Console, columns: Sequence[str], rows: Sequence[Sequence[object]], title: str = ""
) -> None:
    """Print a table of numbers without truncation, if the first column and one more fit.

    Words of the header stand below each other where there is no room. Columns that do not fit even
    so follow in a table of their own, with the first column again.
    """
    texts = [[str(cell) for cell in row] for row in rows]
    for number, (column_ids, widths) in enumerate(
        _split_into_tables(columns, texts, console.width)
    ):
        if number or title:
            console.print("" if number else title, style="table.title")
        names = [columns[n] for n in column_ids]
        cells = [[row[n] for n in column_ids] for row in texts]
        table = table_of(names, cells)
        for column, width in zip(table.columns, widths, strict=True):
            column.width = width
        console.print(table)


def _split_into_tables(
    columns: Sequence[str], rows: Sequence[Sequence[str]], width: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the numbers of the columns of each table, and their widths."""
    cells = [max((cell_len(row[n]) for row in rows), default=0) for n in range(len(columns))]
    full_widths = [max(cells[n], cell_len(name)) for n, name in enumerate(columns)]
    min_widths = [max([cells[n], *map(cell_len, name.split())]) for n, name in enumerate(columns)]
    min_widths[0] = full_widths[0]  # it is never wrapped
    remaining = list(range(1, len(columns)))
    if not remaining:
        yield [0], [full_widths[0]]
    while remaining:
        right_edges = accumulate(
            (min_widths[n] for n in remaining), lambda total, more: total + more + 2
        )
        room = width - min_widths[0] - 3
        count = max(1, sum(end <= room for end in right_edges))
        column_ids, remaining = [0, *remaining[:count]], remaining[count:]
        yield (
            column_ids,
            _narrow_columns(
                [full_widths[n] for n in column_ids], [min_widths[n] for n in column_ids], width
            ),
        )


def _narrow_columns(full_widths: Sequence[int], min_widths: Sequence[int], width: int) -> list[int]:
    """Return widths that fit, the widest column narrowed first, none below its least width."""
    widths = list(full_widths)
    # A table takes one column after each cell, and one between two.
    while sum(widths) + 2 * len(widths) - 1 > width and widths != list(min_widths):
        _, widest = max((current, n) for n, current in enumerate(widths) if current > min_widths[n])
        widths[widest] -= 1
    return widths


# --- advice --------------------------------------------------------------------------------------
# What the course of a run says about its number of rounds: too few, or more than it needed.


STEP = 5  # patience is suggested in multiples of this
WORTH = 0.25  # share of the rounds that patience must save to be worth a line


def advice_of(
    rows: Sequence[Row],
    view: str,
    metric: Metric,
    best_round: int,
    *,
    rounds: int,
    patience: int | None,
) -> str | None:
    """Return one line about the number of rounds, or None where there is nothing to say.

    Args:
        rows: the evaluated rounds of a run that is over.
        view: the view that picks the best round.
        metric: the metric that picks it.
        best_round: the round that was picked.
        rounds: the number of rounds in the config.
        patience: the run's patience, None where it has none.
    """
    best = _best_so_far(rows, f"val_{view}", metric)
    if len(best) < 2 or best[-1][1] != best_round:
        return None  # no course without two evaluations; rounds without some silos compare apart
    last = best[-1][0]
    if last == best_round == rounds:
        return (
            f"validation {metric.title} was still improving at the last round: raise --rounds "
            f"(now {rounds})"
        )
    longest_wait = max((t - b for t, b in best if t < best_round), default=0)
    sufficient_patience = STEP * (max(longest_wait, STEP) // STEP + 1)
    saved_rounds = last - best_round - sufficient_patience
    if patience is not None or saved_rounds < WORTH * rounds:
        return None
    return (
        f"the best round was {best_round} of {rounds}: --patience {sufficient_patience} gives the "
        f"same model {count_of(saved_rounds, 'round')} earlier"
    )


def _best_so_far(rows: Sequence[Row], prefix: str, metric: Metric) -> list[tuple[int, int]]:
    """Return each evaluated round with the best one up to it, by the metric and then the loss."""
    best_by_round: list[tuple[int, int]] = []
    best: tuple[float, float] | None = None
    for row in rows:
        value, loss = row[f"{prefix}_{metric.name}"], row[f"{prefix}_{LOSS}"]
        if value is None or loss is None:
            continue
        rank, t = (metric.goodness(value), METRICS[LOSS].goodness(loss)), int(row["round"] or 0)
        best_round = t if best is None or rank > best else best_by_round[-1][1]
        best = rank if best is None else max(best, rank)
        best_by_round.append((t, best_round))
    return best_by_round


def better_untrained(
    metric: Metric,
    scores: Mapping[str, float | None] | None,
    untrained: Mapping[str, Mapping[str, float | None]],
) -> list[str]:
    """Return what is better than a trained model although it needs no training, by name.

    Args:
        metric: the run's.
        scores: test scores of the model.
        untrained: test scores of what a silo could predict by without any model.
    """
    value = None if scores is None else scores.get(metric.name)
    if value is None:
        return []
    return [
        name
        for name, others in untrained.items()
        if metric.goodness(others.get(metric.name)) > metric.goodness(value)
    ]


def better_untrained_text(
    metric: Metric,
    view: str,
    scores: Mapping[str, float | None] | None,
    untrained: Mapping[str, Mapping[str, float | None]],
) -> str | None:
    """Return one line about a model that is worse than no model at all; None where it is better.

    Args:
        metric: the run's.
        view: that picks the best round.
        scores: test scores of that view.
        untrained: see `better_untrained`.
    """
    names = better_untrained(metric, scores, untrained)
    if scores is None or not names:
        return None
    texts = ", ".join(f"{name} {metric.text(untrained[name][metric.name])}" for name in names)
    return (
        f"test {metric.title} of the {view} view, {metric.text(scores[metric.name])}, is worse "
        f"than without training: {texts}"
    )


def better_personalized_text(
    metric: Metric,
    view: str,
    server: Mapping[str, float | None] | None,
    personalized: Mapping[str, float | None] | None,
) -> str | None:
    """Return one line about clients whose own models are better than the server's; None otherwise.

    Args:
        metric: the run's.
        view: that picks the best round; own models are the aim of a method if that is theirs.
        server: test scores of the server's model; None: there are none.
        personalized: those of the models that clients have after they trained; likewise.
    """
    values = [None if s is None else s.get(metric.name) for s in (server, personalized)]
    shared, own = values
    if view != "server" or shared is None or own is None:
        return None
    if not metric.goodness(own) > metric.goodness(shared):  # also where one of them is NaN
        return None
    own_text, shared_text = metric.text(own), metric.text(shared)
    if own_text == shared_text:
        return None
    return (
        f"the clients' own models (personalized) are better than the server's: test {metric.title} "
        f"{own_text}, not {shared_text}; compare with --method local and with methods for own "
        "models, such as fedper"
    )


# --- Tables as Markdown --------------------------------------------------------------------------


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table.

    >>> print(markdown_table(["method", "accuracy"], [["fedavg", "70.0"]]))
    | method | accuracy |
    | --- | --- |
    | fedavg | 70.0 |
    """
    lines = (head, ["---"] * len(head), *rows)
    return "\n".join("| " + " | ".join(_cell(text) for text in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
