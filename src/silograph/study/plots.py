"""Curves as SVG and PDF by matplotlib, on white, so that they are legible on light and dark pages.

The same curves give the same bytes: files have no date.
"""

import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from silograph.core.errors import SilographError, missing_package

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colors, which color-blind readers can tell apart; yellow is too faint on white.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
DASHES = ("-", "--", "-.", ":")
INK = "#222222"
LEGEND_COLUMNS, LEGEND_INCHES = 2, 0.23  # of the legend; a line of it is so high
Points = tuple[Sequence[float], Sequence[float]]


@dataclass(frozen=True)
class Curves:
    """A plot of lines.

    Attributes:
        title: of the plot; empty for none.
        x: label of the horizontal axis.
        y: label of the vertical axis.
        lines: x and y of each line, by its name.
        errors: half the height of the bar at each point, by the name of the line.
        markers: whether points are marked; that of a line of one point always is.
        joined: whether lines join the points; not where x only numbers things.
        bottom: where the vertical axis begins; None shows all points.
        scale: of the horizontal axis.
        bands: half the height of the band around each point, by the name of the line.
        print: whether it is for a paper: smaller, and lines differ in dashes as well as colors.
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
    bands: Mapping[str, Sequence[float]] = field(default_factory=dict)
    print: bool = False


def check_plots(what: str = "the plots of the page") -> None:
    """Raise `SilographError` where matplotlib is not installed; `what` needs it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise missing_package("matplotlib", what, "plots", SilographError) from None


def svg_of(curves: Curves) -> str:
    """Return a plot as SVG; the same curves give the same text."""
    file = io.StringIO()
    with _drawn(curves) as figure:
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def pdf_of(curves: Curves) -> bytes:
    """Return a plot as PDF, with its fonts; the same curves give the same bytes."""
    file = io.BytesIO()
    nothing = {"CreationDate": None, "Creator": None, "Producer": None}
    with _drawn(curves) as figure:
        figure.savefig(file, format="pdf", metadata=nothing)
    return file.getvalue()


@contextmanager
def _drawn(curves: Curves) -> "Iterator[Figure]":
    """Draw a plot, and keep its style until it is saved."""
    check_plots()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # Text of SVG stays text. PDF gets whole fonts (42): many publishers refuse its default.
    style: dict[Any, Any] = {"svg.hashsalt": "silograph", "svg.fonttype": "none"}
    style |= {"pdf.fonttype": 42, "font.size": 9 if curves.print else 11}
    style |= {"text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK}
    with rc_context(style), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names in letters that the font does not have
        rows = -(-len(curves.lines) // LEGEND_COLUMNS)
        width, height = (4.5, 2.6) if curves.print else (8, 4)
        legend_height = LEGEND_INCHES * rows * (0.8 if curves.print else 1)
        figure = Figure((width, height + legend_height), facecolor="white", layout="constrained")
        _draw(curves, figure)
        yield figure


def _draw(curves: Curves, figure: "Figure") -> None:
    axes = figure.add_subplot()
    for number, (name, (x, y)) in enumerate(curves.lines.items()):
        color = COLORS[number % len(COLORS)]
        dashes = DASHES[number % len(DASHES)]
        if not curves.print:
            dashes = ("-", "--", ":")[number // len(COLORS) % 3]
        axes.errorbar(
            x,
            y,
            yerr=curves.errors.get(name),
            label=name,
            color=color,
            linestyle=dashes if curves.joined else "",
            marker="o" if curves.markers or len(x) == 1 else None,  # one point is no line
            capsize=3,
        )
        if name in curves.bands:
            ends = zip(y, curves.bands[name], strict=True)
            low, high = zip(*((value - half, value + half) for value, half in ends), strict=True)
            axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
    axes.set(title=curves.title, xlabel=curves.x, ylabel=curves.y, xscale=curves.scale)
    axes.set_ylim(bottom=curves.bottom)
    axes.grid(color="#dddddd")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if curves.markers:  # few points: their own values, not round numbers
        axes.set_xticks(sorted({value for x, _ in curves.lines.values() for value in x}))
    if curves.lines:  # below, where it hides nothing
        figure.legend(loc="outside lower center", ncols=LEGEND_COLUMNS, frameon=False)
