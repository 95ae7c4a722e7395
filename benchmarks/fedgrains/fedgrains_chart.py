"""The chart of `partitions.md`: the paper's figures against ours, a point for each cell."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedgrains_tables import (
    CLIENTS,
    CLUSTERING,
    DATASETS,
    HELLINGER,
    HETEROGENEITY,
    MISSING,
    UNCUT,
    Printed,
)

Row = Mapping[str, Any]
SIDE, GAP, LEFT, TOP = 210, 70, 58, 92
COLORS = dict(zip(DATASETS, ("#2a6f97", "#c1666b", "#7a9e5f", "#8d6cab", "#c08a2e"), strict=True))
GRAY = "#8a8a8a"


@dataclass(frozen=True)
class Panel:
    """One square: what it shows, its range, the paper's cells, and how to read a row of ours.

    Attributes:
        title: two lines.
        high: end of both axes.
        printed: the paper's cells.
        ours: the figure of a row.
        literal: the figure of a row as the paper's words say it, or None where that is `ours`.
        share: whether the paper's cells are edges, shown as a share of the graph's.
    """

    title: tuple[str, str]
    high: float
    printed: Printed
    ours: Callable[[Row], float]
    literal: Callable[[Row], float] | None = None
    share: bool = False


PANELS = (
    Panel(
        ("missing links", "share of the edges, tables 5 and 6"),
        0.5,
        MISSING,
        lambda row: 2 * row["missing"] / UNCUT[row["dataset"]][1],
        share=True,
    ),
    Panel(("clustering coefficient", "table 4"), 0.5, CLUSTERING, lambda row: row["clustering"]),
    Panel(
        ("label heterogeneity", "table 4"),
        0.8,
        HETEROGENEITY,
        lambda row: row["labels"][
            "distance, median over pairs"
            if row["scenario"] == "disjoint"
            else "distance, median over the whole matrix"
        ],
        lambda row: row["labels"]["divergence, median over pairs"],
    ),
    Panel(
        ("Hellinger distance of degrees", "tables 7 and 8"),
        0.8,
        HELLINGER,
        lambda row: row["degrees"]["50 bins over each client's own range"],
        lambda row: row["degrees"]["one bin a degree"],
    ),
)


def chart(rows: Sequence[Row]) -> str:
    """Return the chart as SVG, on a ground of its own: legible on light and dark pages."""
    width = LEFT + len(PANELS) * (SIDE + GAP) - 20
    height = TOP + SIDE + 52
    about = "The paper's figures against ours, a point for each cell of tables 4 to 8."
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="Helvetica, Arial, sans-serif" font-size="12" role="img" '
        f'aria-label="{about}">',
        f'<rect width="{width}" height="{height}" rx="10" fill="#ffffff"/>',
        *_legend(),
    ]
    for number, panel in enumerate(PANELS):
        lines += _panel(panel, rows, LEFT + number * (SIDE + GAP))
    return "\n".join([*lines, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, *, anchor: str = "start", fill: str = "#333") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="{fill}">{text}</text>'


def _mark(x: float, y: float, scenario: str, color: str, *, hollow: bool = False) -> str:
    paint = f'fill="{"none" if hollow else color}" stroke="{color}" stroke-width="1.4"'
    if scenario == "disjoint":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" {paint}/>'
    return f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" {paint}/>'


def _legend() -> list[str]:
    lines, x = [], 20
    for dataset, name in DATASETS.items():
        lines += [_mark(x, 20, "disjoint", COLORS[dataset]), _text(x + 10, 24, name)]
        x += 92
    for scenario in CLIENTS:
        lines += [_mark(x, 20, scenario, "#333"), _text(x + 10, 24, scenario)]
        x += 92
    lines += [
        _mark(x + 10, 20, "disjoint", GRAY, hollow=True),
        _mark(x + 24, 20, "overlapping", GRAY, hollow=True),
        _text(x + 36, 24, "as the paper's words define it, where that is another figure"),
    ]
    return lines


def _panel(panel: Panel, rows: Sequence[Row], left: float) -> list[str]:
    bottom = TOP + SIDE
    lines = [
        _text(left, TOP - 28, panel.title[0]),
        _text(left, TOP - 12, panel.title[1], fill="#666"),
        f'<rect x="{left}" y="{TOP}" width="{SIDE}" height="{SIDE}" fill="none" stroke="#bbb"/>',
        f'<line x1="{left}" y1="{bottom}" x2="{left + SIDE}" y2="{TOP}" stroke="#bbb" '
        'stroke-dasharray="4 4"/>',
        _text(left + SIDE / 2, bottom + 36, "paper", anchor="middle"),
        f'<text transform="translate({left - 38} {TOP + SIDE / 2}) rotate(-90)" '
        'text-anchor="middle" fill="#333">ours</text>',
    ]
    for step in range(3):
        value = panel.high * step / 2
        place = SIDE * step / 2
        lines.append(_text(left + place, bottom + 18, f"{value:g}", anchor="middle", fill="#666"))
        lines.append(_text(left - 6, bottom - place + 4, f"{value:g}", anchor="end", fill="#666"))
    for reading in (panel.literal, panel.ours):
        if reading is not None:
            lines += _points(panel, rows, left, reading, hollow=reading is panel.literal)
    return lines


def _points(
    panel: Panel, rows: Sequence[Row], left: float, reading: Callable[[Row], float], *, hollow: bool
) -> list[str]:
    lines = []
    for scenario, counts in CLIENTS.items():
        for dataset, color in COLORS.items():
            for number, clients in enumerate(counts):
                cell = (dataset, scenario, clients)
                ours = [
                    reading(row)
                    for row in rows
                    if (row["dataset"], row["scenario"], row["clients"]) == cell
                ]
                if ours:
                    paper = panel.printed[scenario][dataset][number]
                    paper = 2 * paper / UNCUT[dataset][1] if panel.share else paper
                    x = left + SIDE * paper / panel.high
                    y = TOP + SIDE * (1 - statistics.mean(ours) / panel.high)
                    lines.append(_mark(x, y, scenario, GRAY if hollow else color, hollow=hollow))
    return lines
