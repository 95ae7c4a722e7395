"""Curves as SVG by matplotlib, on white, so that they are legible on light and dark pages."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from silograph.core.errors import SilographError

# Okabe and Ito's colors, told apart without color vision; yellow left out, too faint on white.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
INK = "#222222"
LEGEND_COLUMNS, LEGEND_INCHES = 2, 0.23  # of the legend; a line of it is so high
Points = tuple[Sequence[float], Sequence[float]]


@dataclass(frozen=True)
class Curves:
    """A plot of lines.

    Attributes:
        title: of the plot.
        x: label of the horizontal axis.
        y: label of the vertical axis.
        lines: x and y of each line, by its name.
        errors: half the height of the bar at each point, by the name of the line.
        markers: whether points are marked; that of a line of one point always is.
        joined: whether lines join the points; not where x only numbers things.
        bottom: where the vertical axis begins; None shows all points.
        scale: of the horizontal axis.
    """

    title: str
    x: str
    y: str
    lines: Mapping[str, Points]
    errors: Mapping[str, Sequence[float]] = field(default_factory=dict)
    markers: bool = False
    joined: bool = True
    bottom: float | None = None
    scale: Literal["linear", "log"] = "linear"


def check_plots() -> None:
    """Raise `SilographError` where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise SilographError(
            "expected matplotlib for the plots of the page, got no such package: "
            "pip install 'silograph[plots]'"
        ) from None


def svg_of(curves: Curves) -> str:
    """Return a plot as SVG; the same curves give the same text."""
    check_plots()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {"svg.hashsalt": "silograph", "svg.fonttype": "none"}
    style |= {"font.size": 11}
    style |= {"text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK}
    with rc_context(style):
        rows = -(-len(curves.lines) // LEGEND_COLUMNS)
        size = 8, 4 + LEGEND_INCHES * rows
        figure = Figure(figsize=size, facecolor="white", layout="constrained")
        axes = figure.add_subplot()
        for number, (name, (x, y)) in enumerate(curves.lines.items()):
            axes.errorbar(
                x,
                y,
                yerr=curves.errors.get(name),
                label=name,
                color=COLORS[number % len(COLORS)],
                linestyle=("-", "--", ":")[number // len(COLORS) % 3] if curves.joined else "",
                marker="o" if curves.markers or len(x) == 1 else None,  # one point is no line
                capsize=3,
            )
        axes.set(title=curves.title, xlabel=curves.x, ylabel=curves.y, xscale=curves.scale)
        axes.set_ylim(bottom=curves.bottom)
        axes.grid(color="#dddddd")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        if curves.markers:  # few points: their own values, not round numbers
            axes.set_xticks(sorted({value for x, _ in curves.lines.values() for value in x}))
        if curves.lines:  # below, where it hides nothing
            figure.legend(loc="outside lower center", ncols=LEGEND_COLUMNS, frameon=False)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"
