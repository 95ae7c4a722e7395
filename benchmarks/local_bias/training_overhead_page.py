"""From lines of `overhead.jsonl` to the tables and plots of `overhead.md`."""

from collections.abc import Mapping
from pathlib import Path

from page import spread
from side import Row

from silograph.experiment.terminal_table import markdown_table
from silograph.study.reproduce import Curves, svg_of
from silograph.study.study import read_lines

HERE = Path(__file__).parent
RUNS = HERE / "pubmed.jsonl"  # lines of the recipe local_bias/pubmed
TITLES = {"pubmed": "PubMed", "reddit": "generated Reddit"}
# Table 3 of the paper: seconds and MB of an epoch.
PAPER = {
    ("pubmed", 4): {"CAGNET": (0.3063, 20.20), "FedAvg": (0.0937, 10.65), "drawn": (0.0526, 3.50)},
    ("reddit", 4): {
        "CAGNET": (21.1358, 698.09),
        "FedAvg": (12.0175, 285.00),
        "drawn": (3.3379, 60.85),
    },
    ("pubmed", 8): {"CAGNET": (0.4078, 10.10), "FedAvg": (0.0994, 5.46), "drawn": (0.1701, 1.75)},
    ("reddit", 8): {
        "CAGNET": (15.2789, 349.34),
        "FedAvg": (4.5173, 104.38),
        "drawn": (3.3461, 30.43),
    },
}
LEAST_SAVED = 0.8  # of CAGNET's time, on the large graph
FACTOR = 2  # c of CAGNET 1.5D
RATE = 0.1  # of BNS-GCN
ALL_AT_ONCE = "FedAvg, torch kernels"  # as global training; compiled: one silo after the other
CURVES = {  # name in the plot: variant of the recipe, method of the race
    "drawn, conditional": ("global, GCN, drawn, conditional", "drawn"),
    "all nodes": ("global, GCN, all nodes", "all nodes"),
    "FedAvg": ("FedAvg, GCN", "FedAvg"),
}
Rows = Mapping[str, Row]


def text(rows: Rows) -> str:
    """Return the generated part of the page."""
    races = [row for shape, m in PAPER if (row := rows.get(f"{shape}-{m}")) is not None]
    peaks = [row for shape, m in PAPER if (row := rows.get(f"memory-{shape}-{m}")) is not None]
    parts = []
    if races:
        parts += ["## Time", times(races), *map(aim, races), "## Bytes", sizes(races)]
    if peaks:
        parts += ["## Memory", peaks_of(peaks)]
    if "samples" in rows:
        parts += ["## Sample size (PubMed, 8 silos)", samples(rows["samples"])]
    cells = [f"{kind}{shape}-{m}" for kind in ("", "memory-") for shape, m in PAPER]
    missing = [name for name in [*cells, "samples"] if name not in rows]
    if missing:
        parts.append(f"Not measured yet: {', '.join(missing)}.")
    return "\n\n".join(part for part in [*parts, measured_on(rows)] if part)


def case(row: Row) -> str:
    """Return what a line is about."""
    return f"{TITLES[row['shape']]}, {row['clients']} silos"


def published(row: Row, side: str, over: str, column: int) -> str:
    """Return a ratio of table 3, or nothing."""
    figures = PAPER[row["shape"], row["clients"]]
    if side not in figures or side == over:
        return "-"
    return f"{figures[side][column] / figures[over][column]:.2f}"


def times(races: list[Row]) -> str:
    """Return CPU seconds of an epoch, and ratios beside the paper's."""
    lines = [
        [
            case(row),
            side,
            f"{1000 * clocks['cpu']:.0f}",
            spread(row["over_cagnet"][side]["cpu"]) if side != "CAGNET" else "1",
            published(row, side, "CAGNET", 0),
            spread(row["over_fedavg"][side]["cpu"]) if side != "FedAvg" else "1",
            published(row, side, "FedAvg", 0),
        ]
        for row in races
        for side, clocks in row["seconds"].items()
    ]
    head = ["", "training", "CPU ms an epoch", "over CAGNET", "paper", "over FedAvg", "paper"]
    return markdown_table(head, lines)


def aim(row: Row) -> str:
    """Return whether the large graph takes as much less time than CAGNET as it should."""
    if row["shape"] != "reddit":
        return ""
    saved = 1 - row["over_cagnet"]["drawn"]["cpu"][1]
    verdict = "met" if saved >= LEAST_SAVED else "not met"
    return (
        f"Aim on the large graph, {row['clients']} silos: at least {LEAST_SAVED:.0%} less time "
        f"than CAGNET. Measured: {saved:.0%} less, **{verdict}**."
    )


def dense(row: Row, side: str) -> float:
    """Return what table 1 has all silos send, forward and backward (FedAvg: down and up), in bytes.

    CAGNET's formula is that of one process, so it counts once for each silo.
    """
    m, layers, d = row["clients"], row["layers"], row["hidden"]
    n, drawn, halo = row["nodes"], row["sample"], row["slots"]
    floats = {
        "drawn": m * drawn * layers * d,
        "all nodes": m * n * layers * d,
        "BNS-GCN, rate .1": RATE * halo * layers * d,
        "CAGNET": m * (n / FACTOR + FACTOR * n / m) * layers * d,
    }.get(side, m * layers * d**2)
    return 4 * 2 * float(floats)


def sizes(races: list[Row]) -> str:
    """Return bytes of an epoch by kind, beside the paper's formula."""
    lines = []
    for row in races:
        for side, kinds in row["bytes"].items():
            if "kernels" in side:  # sends the same
                continue
            largest = sorted(kinds.items(), key=lambda item: -item[1])
            told = ", ".join(f"{k} {v / 1e6:.2f}" for k, v in largest if v >= 5e3)
            total = f"{sum(kinds.values()) / 1e6:.2f}"
            lines.append([case(row), side, total, told, f"{dense(row, side) / 1e6:.2f}"])
    head = ["", "training", "MB an epoch", "by kind, MB", "table 1, both ways, MB"]
    return markdown_table(head, lines)


def peaks_of(rows: list[Row]) -> str:
    """Return the memory that an epoch needs, and ratios beside the paper's."""
    lines = []
    for row in rows:
        found = row["epoch_bytes"]
        for side, needed in found.items():
            fields = [case(row), side, f"{needed / row['clients'] / 1e6:.1f}"]
            for over, like in (("CAGNET", "CAGNET"), (ALL_AT_ONCE, "FedAvg")):
                fields.append(f"{needed / found[over]:.2f}" if side != over else "1")
                fields.append(published(row, side, like, 1))
            lines.append(fields)
    head = ["", "training", "MB a silo", "over CAGNET", "paper", f"over {ALL_AT_ONCE}", "paper"]
    return markdown_table(head, lines)


def drawn_nodes(name: str, row: Row) -> int:
    """Return the number of nodes that a side of the cell `samples` draws."""
    nodes: int = row["nodes"] if name == "None" else int(name)
    return nodes


def samples(row: Row) -> str:
    """Return time and bytes by the number of nodes drawn."""
    lines = [
        [
            f"all {row['nodes']:,}" if name == "None" else f"{int(name):,}",
            f"{1000 * clocks['cpu']:.0f}",
            spread(row["over_all"][name]["cpu"]) if name != "None" else "1",
            f"{sum(row['bytes'][name].values()) / 1e6:.2f}",
        ]
        for name, clocks in row["seconds"].items()
    ]
    head = ["nodes drawn", "CPU ms an epoch", "over all nodes", "MB an epoch"]
    return markdown_table(head, lines)


def measured_on(rows: Rows) -> str:
    """Return which machine this is of, and how busy it was."""
    if not rows:
        return ""
    used = sorted({f"{row['processor']}, {row['cores']} cores" for row in rows.values()})
    loads = [load for row in rows.values() for load in row["load"]]
    turns = [row["turns"] for row in rows.values() if "turns" in row]
    told = f"{'; '.join(used)}; load average {min(loads):.1f} to {max(loads):.1f}"
    return f"{told}; {min(turns)} to {max(turns)} turns." if turns else f"{told}."


def plots(rows: Rows) -> dict[str, str]:
    """Return the plots as SVG, by file."""
    found = {}
    if "samples" in rows:
        row = rows["samples"]
        points = [(drawn_nodes(s, row), 1000 * c["cpu"]) for s, c in row["seconds"].items()]
        line = [p[0] for p in points], [p[1] for p in points]
        title = "PubMed, 8 silos: time by nodes drawn"
        curves = Curves(title, "nodes drawn", "CPU ms an epoch", {"global": line}, markers=True)
        found["overhead_samples.svg"] = svg_of(curves)
    if "pubmed-8" in rows:
        lines = convergence(rows["pubmed-8"])
        title = "PubMed, 8 silos: validation micro F1 by time, seed 0"
        found["overhead_f1.svg"] = svg_of(Curves(title, "CPU seconds, all silos", "%", lines))
    return found


def convergence(row: Row) -> dict[str, tuple[list[float], list[float]]]:
    """Return validation micro F1 against the time of training, at rate .01 and seed 0."""
    runs = {
        line["labels"]["variant"]: line["curve"]
        for line in read_lines(RUNS)
        if line["labels"]["lr"] == 0.01 and line["labels"]["seed"] == 0 and "curve" in line
    }
    lines = {}
    for name, (variant, side) in CURVES.items():
        if variant in runs:
            curve, step = runs[variant], row["seconds"][side]["cpu"]
            lines[name] = ([step * t for t in curve["round"]], [100 * v for v in curve["val"]])
    return lines
