"""The pictures of `pictures.md`, from the lines of `pictures.jsonl`."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from silograph.study.reproduce import COLORS, Curves, svg_of

Row = Mapping[str, Any]
Matrix = Sequence[Sequence[float]]
CELL, GAP, TOP, LEFT = 20, 60, 76, 40
ROUNDS, BAR, WIDE = 100, 18, 5.0  # of the cluster tree: its end, height of a client, px a round
SHADES = (*COLORS, "#7f7f7f", "#8c564b", "#666600")  # one for each of ten clusters
NAMES = {"metis": "10 disjoint parts", "metis_overlapping": "2 parts, five random halves of each"}


def pictures(found: Mapping[str, Row]) -> dict[str, str]:
    """Return the pictures as SVG by file; what has not run is left out."""
    drawn = {}
    for partition in NAMES:
        drawn[f"similarity_{partition}.svg"] = (f"similarity {partition}", similarity)
        drawn[f"clusters_{partition}.svg"] = (f"clusters {partition}", tree)
    made = {n: draw(found[cell], n) for n, (cell, draw) in drawn.items() if cell in found}
    curves = {
        "sweep_k.svg": sweep(found, "k", "nodes that a client chooses in a layer of a step, k"),
        "sweep_alpha.svg": sweep(found, "alpha", "scale of the loss in the reward, alpha"),
        "chosen.svg": chosen(found),
    }
    return made | {name: svg_of(each) for name, each in curves.items() if each.lines}


def _page(width: float, height: float, about: str, lines: Sequence[str]) -> str:
    """Return an SVG on a ground of its own: legible on light and dark pages."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" font-family="Helvetica, Arial, sans-serif" '
        f'font-size="12" role="img" aria-label="{about}">'
    )
    ground = f'<rect width="{width:.0f}" height="{height:.0f}" rx="10" fill="#ffffff"/>'
    return "\n".join([head, ground, *lines, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, *, anchor: str = "start", fill: str = "#333") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="{fill}">{text}</text>'


def similarity(row: Row, name: str) -> str:
    """Return what FED-PUB finds alike beside what the clients hold, a square for each."""
    partition = name.removeprefix("similarity_").removesuffix(".svg")
    panels = {
        "FED-PUB: cosine of embeddings": row["cosine"],
        "FED-PUB: what a client (row) takes": row["share"],
        "cosine of label counts": row["labels"],
        "edges between the clients' nodes": row["edges"],
    }
    side = CELL * len(row["cosine"])
    lines = [_text(LEFT, 26, f"Cora, {NAMES[partition]}, round {ROUNDS}")]
    for number, (title, matrix) in enumerate(panels.items()):
        lines += _heat(LEFT + number * (side + GAP), title, matrix)
    width = LEFT + len(panels) * (side + GAP) - GAP + 30
    return _page(width, TOP + side + 30, "Likeness of clients by FED-PUB beside their data", lines)


def _heat(left: float, title: str, matrix: Matrix) -> list[str]:
    """Return a square of a matrix; its diagonal is not colored, the rest from least to most."""
    values = [v for i, row in enumerate(matrix) for j, v in enumerate(row) if i != j]
    low, high = min(values), max(values)
    lines = [
        _text(left, TOP - 26, title),
        _text(left, TOP - 10, f"white {low:.4g}, blue {high:.4g}", fill="#666"),
    ]
    for i, row in enumerate(matrix):
        y = TOP + CELL * i
        lines.append(_text(left - 6, y + 14, str(i), anchor="end", fill="#666"))
        lines.append(
            _text(left + CELL * (i + 0.5), TOP + CELL * len(matrix) + 16, str(i), anchor="middle")
        )
        for j, value in enumerate(row):
            share = (value - low) / (high - low) if high > low else 0.0
            fill = "#dddddd" if i == j else _blue(share)
            lines.append(
                f'<rect x="{left + CELL * j:.0f}" y="{y}" width="{CELL}" height="{CELL}" '
                f'fill="{fill}" stroke="#fff" stroke-width=".5"/>'
            )
    return lines


def _blue(share: float) -> str:
    """Return a color from white to blue."""
    ends = zip((255, 255, 255), (0, 80, 150), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in ends)


def tree(row: Row, name: str) -> str:
    """Return the clusters of GCFL+ over rounds, a row for each client; a cluster has a color."""
    partition = name.removeprefix("clusters_").removesuffix(".svg")
    splits: Sequence[tuple[int, Sequence[int]]] = row["splits"]
    history = list(zip(*(cluster for _, cluster in splits), strict=True))
    order = sorted(range(len(history)), key=lambda client: (*history[client], client))
    starts = [number for number, _ in splits]
    lines = [
        _text(20, 26, f"Clusters of GCFL+, Cora, {NAMES[partition]}"),
        _text(20, 44, "a row for each client, a color for each cluster", fill="#666"),
    ]
    for place, client in enumerate(order):
        y = TOP - 16 + (BAR + 2) * place
        lines.append(_text(70, y + 13, f"client {client}", anchor="end", fill="#666"))
        for start, end, cluster in zip(
            starts, [*starts[1:], ROUNDS + 1], history[client], strict=True
        ):
            lines.append(
                f'<rect x="{80 + WIDE * (start - 1):.0f}" y="{y}" '
                f'width="{WIDE * (end - start):.1f}" height="{BAR}" '
                f'fill="{SHADES[cluster % len(SHADES)]}"/>'
            )
            lines.append(
                _text(83 + WIDE * (start - 1), y + 13, str(cluster), fill="#fff")
                if end - start > 3
                else ""
            )
    bottom = TOP - 16 + (BAR + 2) * len(order)
    for number in (1, *starts[1:], ROUNDS):
        x = 80 + WIDE * (number - 1)
        lines.append(_text(x, bottom + 16, str(number), anchor="middle", fill="#666"))
    lines.append(_text(80 + WIDE * ROUNDS / 2, bottom + 34, "round", anchor="middle"))
    lines = [line for line in lines if line]
    return _page(110 + WIDE * ROUNDS, bottom + 46, "Clusters of GCFL+ by round", lines)


def sweep(found: Mapping[str, Row], name: str, label: str) -> Curves:
    """Return accuracy over an option of FedGrAINS with FedAvg, where two seeds or more have run."""
    by_line: dict[str, dict[float, list[float]]] = {}
    for row in found.values():
        kind, *rest = row["cell"].split()
        if kind == "sweep" and rest[0] == name:
            _, value, policy, _ = rest
            for view in ("server", "personalized"):
                points = by_line.setdefault(f"{policy}, {view}", {})
                points.setdefault(float(value), []).append(row[view])
    lines, errors = {}, {}
    for line, points in by_line.items():
        whole = {x: y for x, y in sorted(points.items()) if len(y) > 1}
        lines[line] = (list(whole), [statistics.mean(y) for y in whole.values()])
        errors[line] = [statistics.stdev(y) for y in whole.values()]
    title = "Cora, 10 clients by METIS, FedAvg + FedGrAINS: test accuracy"
    scale: Literal["linear", "log"] = "log" if name == "alpha" else "linear"
    return Curves(title, label, "%", lines, errors, markers=True, scale=scale)


def chosen(found: Mapping[str, Row]) -> Curves:
    """Return by how much more chosen edges to candidates join nodes of one class than all do."""
    lines: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
    for policy in ("trained", "untrained"):
        rows = [found[n] for n in found if n.startswith(f"chosen {policy} ")]
        if rows:
            clients, kept = _shares(rows, "kept_same", "kept")
            every = _shares(rows, "same", "edges")[1]
            lines[policy] = (clients, [a - b for a, b in zip(kept, every, strict=True)])
    title = "Cora: edges to neighbors of one class, chosen less all candidates"
    return Curves(title, "client", "percentage points", lines, markers=True, joined=False)


def _shares(rows: Sequence[Row], part: str, of: str) -> tuple[list[float], list[float]]:
    """Return a share for each client, in percent, over all seeds."""
    clients = range(len(rows[0][of]))
    parts = [sum(row[part][c] for row in rows) for c in clients]
    wholes = [sum(row[of][c] for row in rows) for c in clients]
    return list(clients), [100 * a / b for a, b in zip(parts, wholes, strict=True)]
