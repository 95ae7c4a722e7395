"""From lines of `bench.jsonl` to the tables of `bench.md`."""

from collections.abc import Iterable, Mapping

from cells import BATCH, EPOCHS, METHODS, PROCESSES, RACES, SAMPLED, THREADS, Row

OTHERS = (*EPOCHS, *METHODS, *SAMPLED, *THREADS, *PROCESSES, "help", "first-round", "memory")
NOT_YET = "{} | not measured"


def spread(quartiles: list[float]) -> str:
    """Return median and quartiles."""
    low, middle, high = (f"{q:.1f}" if quartiles[1] >= 10 else f"{q:.2f}" for q in quartiles)
    return f"{middle} ({low} to {high})"


def race_lines(name: str, row: Row) -> list[str]:
    """Return the cells of a race: a line for the tuned loop, and one for each variant of ours."""
    ms = {side: f"{1000 * clocks['cpu']:.1f}" for side, clocks in row["seconds_a_round"].items()}
    lines = []
    for side in ("tuned", *row["kernels"]):
        over, aim = row["over_loop"][side], RACES[name].aims.get(side)
        ours = side != "tuned"
        fields = [
            f"silograph, {side}" if ours else f"tuned loop, {row['form']} features",
            ms["loop"],
            ms[side],
            spread(over["cpu"]),
            spread(over["wall"]),
            f"at least {aim:g}" if aim is not None else "-",
            spread(row["over_tuned"][side]["cpu"]) if ours else "-",
            ", ".join(f"{row['apart'][dtype][side]:.0e}" for dtype in ("float32", "float64")),
        ]
        lines.append(" | ".join([name, *fields]))
    return lines


def other_lines(name: str, row: Row) -> list[str]:
    """Return what, figure and aim of a cell that is no race."""
    if name in EPOCHS:
        shape, most = EPOCHS[name]
        what = f"federated over centralized, {shape.dataset}, {shape.clients} clients"
        return [
            f"{what}, {label} | CPU {spread(part['ratio']['cpu'])}, "
            f"wall clock {spread(part['ratio']['wall'])} | at most {most:g}"
            for label, part in row["epochs"].items()
        ]
    if name in METHODS:
        method, shape, most = METHODS[name]
        return [
            f"{method} over fedavg, {shape.dataset}, {shape.clients} clients, {label} | CPU "
            f"{spread(part['ratio']['cpu'])}, wall clock {spread(part['ratio']['wall'])} | "
            f"at most {most:g}"
            for label, part in row["epochs"].items()
        ]
    if name in SAMPLED:
        shape, most = SAMPLED[name]
        what = f"fedavg + FedGrAINS over fedavg, batches of {BATCH}, {shape.dataset}"
        return [
            f"{what}, {shape.clients} clients, {label} | CPU {spread(part['ratio']['cpu'])}, "
            f"wall clock {spread(part['ratio']['wall'])} | at most {most:g}"
            for label, part in row["epochs"].items()
        ]
    if name in THREADS:
        what = f"1 thread over 2, {name.removeprefix('threads-')}"
        return [f"{what} | wall clock {spread(row['ratio']['wall'])} | -"]
    if name in PROCESSES:
        what = f"1 process over 2 that exchange nothing, {name.removeprefix('processes-')}"
        return [f"{what} | wall clock {spread(row['ratio']['wall'])} | -"]
    if name == "memory":
        what = "peak memory, coauthor_cs, 1,000 clients, width 256"
        return [
            f"{what}, {variant} | {peak if isinstance(peak, str) else f'{peak:.2f} GB'} | "
            "under 1.5 GB"
            for variant, peak in row["peak_gb"].items()
        ]
    what, aim = {
        "help": ("`silograph --help`", "CPU under 0.4 s"),
        "first-round": ("`silograph run cora --rounds 1`, to its end", "wall clock under 6 s"),
    }[name]
    spent = row["seconds_a_call"]
    return [f"{what} | CPU {spent['cpu']:.2f} s, wall clock {spent['wall']:.2f} s | {aim}"]


def lines_of(name: str, row: Row) -> list[str]:
    """Return a cell's lines of its table."""
    return race_lines(name, row) if name in RACES else other_lines(name, row)


def table(head: list[str], lines: Iterable[str]) -> list[str]:
    """Return a table in Markdown; a line too short is filled up."""
    cells = [line.split(" | ") for line in lines]
    filled = [line + [""] * (len(head) - len(line)) for line in cells]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *filled)]


def tables(rows: Mapping[str, Row]) -> str:
    """Return the generated part of the page from the latest line of each cell."""
    races, others = (
        [
            line
            for n in names
            for line in (lines_of(n, rows[n]) if n in rows else [NOT_YET.format(n)])
        ]
        for names in (RACES, OTHERS)
    )
    head = [
        "cell",
        "side",
        "plain loop, ms",
        "side, ms",
        "times as fast as the plain loop, CPU",
        "wall clock",
        "aim",
        "times as fast as the tuned loop, CPU",
        "logits apart, float32, float64",
    ]
    parts = [*table(head, races), "", *table(["what", "measured", "aim"], others)]
    used = sorted({f"{row['processor']}, {row['cores']} cores" for row in rows.values()})
    if used:
        loads = [load for row in rows.values() for load in row["load"]]
        parts += ["", f"{'; '.join(used)}; load average {min(loads):.1f} to {max(loads):.1f}."]
    return "\n".join(parts)
