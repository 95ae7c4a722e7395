"""The page of `silograph check`: what silos' folders hold, before anything trains."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from silograph.experiment.report.page import environment
from silograph.experiment.report.reading import BOX, Scale, heat
from silograph.graph.silos.inspect import ColumnSummary, Inspection, SiloSummary

MOST_FIGURES = 60  # columns with a histogram of their own
MOST_ROWS = 1000  # columns in the table
MOST_LINES = 8  # silos with a line of their own in a histogram; there are as many colors


def data_page(inspection: Inspection, name: str) -> str:
    """Return the HTML page about the data of silos; `name` is its title."""
    ids = [silo.silo for silo in inspection.silos]
    graphs = [silo for silo in inspection.silos if isinstance(silo, SiloSummary)]
    # Columns of two values, such as 0 and 1, are one picture; constant ones have none.
    two_valued = [c for c in inspection.columns if len(c.histogram[0]) == 2][:MOST_FIGURES]
    figures = [c for c in inspection.columns if len(c.histogram[0]) > 2][:MOST_FIGURES]
    return (
        environment()
        .get_template("data.html")
        .render(
            name=name,
            inspection=inspection,
            summaries=_summary_table(inspection),
            graphs=graphs,
            classes=_class_shares(graphs),
            degrees=_degrees(graphs),
            features=list(dict.fromkeys(f for silo in graphs for f in silo.missing)),
            columns=inspection.columns[:MOST_ROWS],
            two_valued=_heat_of(
                ids,
                [c.column for c in two_valued],
                [[_shares(c.histogram[silo])[1] for c in two_valued] for silo in range(len(ids))],
            )
            if two_valued
            else None,
            histograms=[(column, _histogram(column, ids)) for column in figures],
            axes=[],
            figure_data={},
        )
    )


def _summary_table(inspection: Inspection) -> dict[str, Any]:
    """Return names of columns, and a row of texts for each silo and for all together."""
    records = [dataclasses.asdict(silo) for silo in inspection.silos]
    names = [n for n, value in records[0].items() if isinstance(value, int | float)]

    def text(name: str, value: float) -> str:
        return f"{value:.2f}" if name.startswith("mean") else f"{value:,}"

    rows = [[record["silo"], *(text(n, record[n]) for n in names)] for record in records]
    if len(records) > 1:
        # Users, items and edges between silos are at several silos, so their sums say nothing.
        sums = ("nodes", "labeled", "edges", "isolated", "ratings")
        total = {n: f"{sum(r[n] for r in records):,}" if n in sums else "" for n in names}
        rows.append(["all", *total.values()])
    return {"columns": ["silo", *(n.replace("_", " ") for n in names)], "rows": rows}


def _heat_of(
    rows: Sequence[str], columns: Sequence[str], shares: Sequence[Sequence[float | None]]
) -> dict[str, Any]:
    """Return a heat map of shares 0..1 with the numbers as percents; None is not known."""
    return {
        "rows": rows,
        "columns": columns,
        "paths": heat([[value or 0.0 for value in row] for row in shares]),
        "counts": [["-" if v is None else f"{v:.1%}" for v in row] for row in shares],
    }


def _class_shares(graphs: Sequence[SiloSummary]) -> dict[str, Any] | None:
    names = list(dict.fromkeys(name for silo in graphs for name in silo.classes))
    shares = [[silo.classes.get(name) for name in names] for silo in graphs]
    return _heat_of([silo.silo for silo in graphs], names, shares) if names else None


def _degrees(graphs: Sequence[SiloSummary]) -> dict[str, Any] | None:
    count = max((len(silo.degrees) for silo in graphs), default=0)
    if count < 2:  # no silo has an edge
        return None
    names = ["0", "1", *(f"{2**k}-{2 ** (k + 1) - 1}" for k in range(1, count - 1))]
    shares = [
        [number / max(silo.nodes, 1) for number in silo.degrees]
        + [0.0] * (count - len(silo.degrees))
        for silo in graphs
    ]
    return _heat_of([silo.silo for silo in graphs], names, shares)


def _histogram(column: ColumnSummary, ids: Sequence[str]) -> dict[str, Any]:
    """Return outlines of a column's histograms: all silos as an area, and a line for each.

    Of many silos, the two that differ most have a line.
    """
    together = [sum(counts) for counts in zip(*column.histogram, strict=True)]
    chosen = range(len(ids)) if len(ids) <= MOST_LINES else [ids.index(i) for i in column.between]
    shares = [_shares(column.histogram[silo]) for silo in chosen]
    y = Scale(0.0, max([*_shares(together), *(v for line in shares for v in line), 1e-9]))
    return {
        "area": f"M0 {BOX}L{_outline(_shares(together), y)[1:]}V{BOX}z",
        "lines": [
            {"name": ids[silo], "look": f"color{place}", "d": _outline(line, y)}
            for place, (silo, line) in enumerate(zip(chosen, shares, strict=True))
        ]
        if len(ids) > 1
        else [],
        "ticks": y.marks(max_ticks=3),
        "ends": [f"{column.low:.4g}", f"{column.high:.4g}"],
    }


def _shares(counts: Sequence[int]) -> list[float]:
    return [count / max(sum(counts), 1) for count in counts]


def _outline(shares: Sequence[float], y: Scale) -> str:
    """Return the SVG path over the tops of bars of one width, from left to right."""
    width = BOX / len(shares)
    tops = [
        f"L{i * width:.0f} {BOX * (1 - y.share(v)):.0f}H{(i + 1) * width:.0f}"
        for i, v in enumerate(shares)
    ]
    return "M" + "".join(tops)[1:]
