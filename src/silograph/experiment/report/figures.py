"""What figures are made of: axes, paths and shares, as plain values for the templates.

Curves are SVG paths in a box of 1000 x 1000 that the page stretches to any width; labels are text
beside it, so they are readable on a phone, too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from silograph.experiment.result_files import VIRTUAL

BOX = 1000
MOST_POINTS = 400  # of a curve
LEVELS = 12  # of a heat map
AXES = {
    "round": "rounds",
    "bytes": "bytes",
    "seconds": "seconds",
    VIRTUAL: "virtual seconds",  # of runs with a virtual clock
}
Axis = Mapping[str, "Values"]
Values = Sequence[float | None]


def size_text(size: int) -> str:
    """Return bytes as a text; kB are 10^3 bytes, MB 10^6 and GB 10^9.

    >>> size_text(2_158_973_440), size_text(158_973_440), size_text(13_200), size_text(440)
    ('2.16 GB', '158.97 MB', '13.2 kB', '440 B')
    """
    if size >= 1e9:
        return f"{size / 1e9:,.2f} GB"
    if size >= 1e6:
        return f"{size / 1e6:,.2f} MB"
    return f"{size / 1e3:.1f} kB" if size >= 1e3 else f"{size} B"


@dataclass(frozen=True)
class Tick:
    """A place on an axis: `at` is its share of the axis, in percent."""

    at: float
    text: str


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return round numbers within low..high, about `most` of them.

    >>> ticks(0, 100)
    [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]
    """
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def spread(values: Sequence[float], margin: float = 0.0) -> tuple[float, float]:
    """Return the least and the largest value, apart from each other, with a margin."""
    low, high = min(values), max(values)
    if high - low < 1e-9 * max(abs(low), abs(high), 1e-3):
        return low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1)
    return low - margin * (high - low), high + margin * (high - low)


@dataclass(frozen=True)
class Scale:
    """A linear scale from low..high to 0..1."""

    low: float
    high: float

    def share(self, value: float) -> float:
        """Return where a value stands, 0..1."""
        return (value - self.low) / (self.high - self.low)

    def marks(self, unit: str = "", most: int = 5) -> list[Tick]:
        """Return ticks; bytes are shown in MB and other millions as M, rounds are whole numbers."""
        factor = 1e6 if unit == "bytes" else 1.0
        values = ticks(self.low / factor, self.high / factor, most)
        values = [v for v in values if unit != "round" or v == int(v)]
        millions = max(map(abs, values), default=0) >= 1e6  # there is room for seven signs
        shown = [f"{v / 1e6:,.10g} M" if millions else f"{v:,.10g}" for v in values]
        places = [round(100 * self.share(v * factor), 2) for v in values]
        return [Tick(at, text) for at, text in zip(places, shown, strict=True)]


@dataclass(frozen=True)
class Curve:
    """A line of a figure.

    Attributes:
        name: what the legend calls it.
        look: CSS classes: a color and a stroke.
        ys: values, None where there is none.
        axis: number of the x values that it stands over.
    """

    name: str
    look: str
    ys: Values
    axis: int = 0


def thinned(count: int, keep: Sequence[int] = (), most: int = MOST_POINTS) -> list[int]:
    """Return about `most` numbers out of 0..count - 1, evenly, the last and `keep` among them."""
    step = max(1, math.ceil(count / most))
    return sorted({*range(0, count, step), count - 1, *keep}) if count else []


def path_of(xs: Values, ys: Values, x: Scale, y: Scale) -> str:
    """Return the SVG path through the points, broken where a value is missing."""
    steps, pen = [], "M"
    for a, b in zip(xs, ys, strict=True):
        if a is None or b is None:
            pen = "M"
            continue
        steps.append(f"{pen}{BOX * x.share(a):.0f} {BOX * (1 - y.share(b)):.0f}")
        pen = "L"
    return "".join(steps)


def dots_of(xs: Values, ys: Values, x: Scale, y: Scale) -> str:
    """Return a path of points; round line ends make them dots."""
    points = [
        f"M{BOX * x.share(a):.0f} {BOX * (1 - y.share(b)):.0f}h0"
        for a, b in zip(xs, ys, strict=True)
        if a is not None and b is not None
    ]
    return "".join(points)


def curves(
    key: str,
    lines: Sequence[Curve],
    axes: Sequence[Mapping[str, Values]],
    best: Mapping[str, float] | None = None,
) -> dict[str, Any] | None:
    """Return a figure of curves over rounds, bytes and seconds; None without any value.

    Args:
        key: name of the figure, unique on the page.
        lines: the curves; those without values are left out.
        axes: x values of the curves by axis.
        best: where on each axis the best round stands.
    """
    lines = [line for line in lines if any(v is not None for v in line.ys)]
    if not lines:
        return None
    values = [v for line in lines for v in line.ys if v is not None]
    y, whole = Scale(*spread(values, 0.04)), all(float(v).is_integer() for v in values)
    panels = [_panel(unit, lines, axes, y, best) for unit in units_of(axes)]
    data = {
        "series": [
            {
                "name": line.name,
                "look": line.look,
                "axis": line.axis,
                "y": [short(v) for v in line.ys],
            }
            for line in lines
        ]
    }
    single = all(sum(v is not None for v in line.ys) == 1 for line in lines)
    marks = y.marks("round" if whole else "")
    found = {"key": key, "y": y, "ticks": marks, "panels": panels, "lines": lines, "data": data}
    return found | {"single": single, "millions": any(mark.text.endswith("M") for mark in marks)}


def units_of(axes: Sequence[Axis]) -> list[str]:
    """Return the units that all axes have."""
    return [unit for unit in AXES if all(unit in axis for axis in axes)]


def _panel(
    unit: str,
    lines: Sequence[Curve],
    axes: Sequence[Mapping[str, Values]],
    y: Scale,
    best: Mapping[str, float] | None,
) -> dict[str, Any]:
    """Return the curves of a figure over one of its x axes."""
    x = Scale(*spread([v for line in lines for v in axes[line.axis][unit] if v is not None]))
    paths = []
    for line in lines:
        xs, few = axes[line.axis][unit], sum(v is not None for v in line.ys) <= 3
        dots = dots_of(xs, line.ys, x, y) if few else ""
        paths.append({"look": line.look, "d": path_of(xs, line.ys, x, y), "dots": dots})
    return {
        "unit": unit,
        "label": "MB, all messages" if unit == "bytes" else AXES[unit],
        "low": x.low,
        "high": x.high,
        "ticks": x.marks(unit),
        "best": None if best is None else round(100 * x.share(best[unit]), 2),
        "paths": paths,
    }


def short(value: float | None) -> float | None:
    """Return a value with as many digits as a page shows."""
    return None if value is None else float(f"{value:.6g}")


def heat(rows: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
    """Return one path of unit squares for each level of shade, from shares 0..1 by row."""
    paths: dict[int, list[str]] = {}
    for j, row in enumerate(rows):
        for i, value in enumerate(row):
            level = math.ceil(min(value, 1.0) * LEVELS)
            if level:
                paths.setdefault(level, []).append(f"M{i} {j}h1v1h-1z")
    return [
        {"opacity": round(level / LEVELS, 3), "d": "".join(paths[level])} for level in sorted(paths)
    ]


def bars(values: Sequence[float], most: int = 500) -> dict[str, Any]:
    """Return the outline of bars sorted from large to small, of at most `most` of them."""
    ordered = sorted(values, reverse=True)
    kept = [ordered[i] for i in thinned(len(ordered), most=most)]
    y = Scale(0.0, max(kept[0], 1e-9))
    width = BOX / len(kept)
    steps = [
        f"L{i * width:.1f} {BOX * (1 - y.share(v)):.0f}H{(i + 1) * width:.1f}"
        for i, v in enumerate(kept)
    ]
    return {"d": f"M0 {BOX}{''.join(steps)}V{BOX}z", "ticks": y.marks(most=4), "count": len(values)}


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` of the values lie, linear between neighbors."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
