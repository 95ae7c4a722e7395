"""From lines of `bench.jsonl` to the tables of `bench.md`."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from cells import (
    BATCH,
    CPP,
    EPOCHS,
    EQUAL,
    KEPT,
    KEPT_MEMORY,
    METHODS,
    MOST_KEPT,
    MOST_KEPT_MEMORY,
    MOST_OVER_CPP,
    OPENFGL,
    PEER_AIMS,
    PEERS,
    PROCESSES,
    RACES,
    REBUILT,
    SAMPLED,
    SILOS,
    THREADS,
    VERSIONS,
    Row,
    Shape,
)

OTHERS = (
    *(*EPOCHS, *METHODS, *SAMPLED, "memory-kept", *VERSIONS, *SILOS),
    *(*THREADS, *PROCESSES, "help", "first-round", "memory"),
)
NOT_YET = "{} | not measured"
RACE_HEAD = (
    "cell",
    "side",
    "plain loop, ms",
    "side, ms",
    "times as fast as the plain loop, CPU",
    "wall clock",
    "aim",
    "times as fast as the tuned loop, CPU",
    "logits apart, float32, float64",
)
PEER_HEAD = (
    "cell",
    "side",
    "CPU ms",
    "times as long as silograph, Adam rebuilt",
    "times as long as silograph, Adam kept",
    "aim",
    "logits apart",
)
# What the sides do in a round, besides training: see "How it was measured".
FACT_HEAD = ("side", "Adam of a client", "models scored", "scores", "dropout", "ledger")
LOOP_FACTS = ("rebuilt each round", "server's", "accuracy of validation and test nodes")
OPENFGL_SCORES = "loss and accuracy of training, validation and test nodes"
OUR_SCORES = "loss, accuracy and F1 of validation and test nodes, AUC of test nodes"
BOTH = "each client's own and the server's"
FACTS: dict[str, tuple[str, ...]] = {
    "plain loop, tuned loop": (*LOOP_FACTS, "0, in `-dropout` 0.5", "no"),
    **{
        name: (
            "kept" if keeps else "rebuilt each round",
            BOTH if both else "each client's own",
            *(OPENFGL_SCORES, "0.5", "no"),
        )
        for name, (keeps, both) in OPENFGL.items()
    },
    CPP: ("rebuilt each round", BOTH, "accuracy of validation and test nodes", "0.5", "no"),
    "silograph in races with loops": ("rebuilt each round", BOTH, OUR_SCORES, "as they", "yes"),
    REBUILT: ("rebuilt each round", BOTH, OUR_SCORES, "0.5", "yes"),
    KEPT: ("kept", BOTH, OUR_SCORES, "0.5", "yes"),
    "silograph, other figures": (
        "by method, alike on both sides",
        BOTH,
        OUR_SCORES,
        "alike",
        "yes",
    ),
}


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


def peer_lines(name: str, row: Row) -> list[str]:
    """Return the cells of a race with OpenFGL and C++: a line for each side."""
    lines = []
    for side in (*OPENFGL, CPP, REBUILT, KEPT):
        clocks, over = row["seconds_a_round"].get(side), row["over_ours"].get(side)
        if clocks is None:
            lines.append(f"{name} | {side} | not measured")
            continue
        aim = PEER_AIMS.get((name, EQUAL.get(side, "")))
        fields = [
            f"{1000 * clocks['cpu']:.1f}",
            *(spread(over[own]["cpu"]) if over else "-" for own in (REBUILT, KEPT)),
            f"at least {aim:g}" if aim is not None else "-",
            f"{row['apart'][side]:.0e}" if side in row["apart"] else "-",
        ]
        lines.append(" | ".join([name, side, *fields]))
    return lines


def place_of(shape: Shape) -> str:
    """Return a shape's graph and clients in words."""
    return f"{shape.dataset}, {shape.clients} clients"


def peer_ratio_lines(name: str, row: Row) -> list[str]:
    """Return ratios of ours in a race with OpenFGL and C++."""
    shape = PEERS[name]
    where = f"{place_of(shape)}, {shape.epochs} epoch{'s' if shape.epochs > 1 else ''}"
    has_aim = shape.clients == 100 and shape.epochs == 1
    most_cpp, most_kept = (
        f"at most {most:g}" if has_aim else "-" for most in (MOST_OVER_CPP, MOST_KEPT)
    )
    kept = row["kept_over_rebuilt"]
    lines = [f"Adam kept over rebuilt, {where} | {clocks_of(kept)} | {most_kept}"]
    if REBUILT in row["over_cpp"]:
        over = clocks_of(row["over_cpp"][REBUILT])
        lines.append(f"silograph over C++, Adam rebuilt, {where} | {over} | {most_cpp}")
    return lines


def clocks_of(ratio: Mapping[str, list[float]]) -> str:
    """Return a ratio by both clocks."""
    return f"CPU {spread(ratio['cpu'])}, wall clock {spread(ratio['wall'])}"


def compared(name: str) -> tuple[str, float] | None:
    """Return what a cell with several local epochs compares, and the most that it should be."""
    if name in EPOCHS:
        shape, most = EPOCHS[name]
        return f"federated over centralized, {place_of(shape)}", most
    if name in METHODS:
        method, shape, most = METHODS[name]
        return f"{method} over fedavg, {place_of(shape)}", most
    if name in SAMPLED:
        shape, most = SAMPLED[name]
        return f"fedavg + FedGrAINS over fedavg, batches of {BATCH}, {place_of(shape)}", most
    return None


def memory_lines(what: str, row: Row, aim: str) -> list[str]:
    """Return the peak memory of each variant of a run."""
    return [
        f"{what}, {variant} | {peak if isinstance(peak, str) else f'{peak:.2f} GB'} | {aim}"
        for variant, peak in row["peak_gb"].items()
    ]


def other_lines(name: str, row: Row) -> list[str]:
    """Return what, figure and aim of a cell that is no race."""
    pair = compared(name)
    if pair is not None:
        return [
            f"{pair[0]}, {label} | {clocks_of(part['ratio'])} | at most {pair[1]:g}"
            for label, part in row["epochs"].items()
        ]
    if name in VERSIONS:
        version = VERSIONS[name]
        options = version.options
        where = place_of(Shape(options["dataset"], options["clients"]))
        drawn = f", sample={options['options']['sample']}" if name.endswith("-drawn") else ""
        ms = [f"{1000 * clocks['cpu']:.0f}" for clocks in row["seconds_a_round"]]
        what = f"{options['method']}{drawn}, {row['before']} over now, {where}"
        return [
            f"{what}, {ms[0]} and {ms[1]} ms | {clocks_of(row['ratio'])} | at least "
            f"{version.least:g}"
        ]
    if name in SILOS:
        number, most = SILOS[name]
        took = {side: f"{1000 * s['cpu']:.0f}" for side, s in row["seconds_a_round"].items()}
        return [
            f"round of {number} silos over {side}, cora, CPU {took['silos']} and {took[side]} ms | "
            f"{clocks_of(ratio)} | {f'at most {most:g}' if side == 'simulation' else '-'}"
            for side, ratio in row["over"].items()
        ]
    if name == "memory-kept":
        rebuilt, kept = (row["peak_gb"][variant] for variant in KEPT_MEMORY)
        what = "peak memory, cora, 100 clients, Adam"
        lines = memory_lines(what, row, "-")
        if isinstance(rebuilt, str) or isinstance(kept, str):
            return lines
        ratio = f"{kept / rebuilt:.2f}, imports alone take {row['imports_gb']:.2f} GB"
        return [*lines, f"{what} kept over rebuilt | {ratio} | at most {MOST_KEPT_MEMORY:g}"]
    if name in THREADS:
        what = f"1 thread over 2, {name.removeprefix('threads-')}"
        return [f"{what} | wall clock {spread(row['ratio']['wall'])} | -"]
    if name in PROCESSES:
        what = f"1 process over 2 that exchange nothing, {name.removeprefix('processes-')}"
        return [f"{what} | wall clock {spread(row['ratio']['wall'])} | -"]
    if name == "memory":
        what = "peak memory, coauthor_cs, 1,000 clients, width 256"
        return memory_lines(what, row, "under 1.5 GB")
    what, aim = {
        "help": ("`silograph --help`", "CPU under 0.4 s"),
        "first-round": ("`silograph run cora --rounds 1`, to its end", "wall clock under 6 s"),
    }[name]
    spent = row["seconds_a_call"]
    return [f"{what} | CPU {spent['cpu']:.2f} s, wall clock {spent['wall']:.2f} s | {aim}"]


def lines_of(name: str, row: Row) -> list[str]:
    """Return a cell's lines of its tables."""
    if name in PEERS:
        return [*peer_lines(name, row), *peer_ratio_lines(name, row)]
    return race_lines(name, row) if name in RACES else other_lines(name, row)


def table(head: Sequence[str], lines: Iterable[str]) -> list[str]:
    """Return a table in Markdown; a line too short is filled up."""
    cells = [line.split(" | ") for line in lines]
    filled = [line + [""] * (len(head) - len(line)) for line in cells]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *filled)]


def lines_or_gap(
    names: Iterable[str], rows: Mapping[str, Row], lines: Callable[[str, Row], list[str]]
) -> list[str]:
    """Return the lines of cells; of one that is not measured, a line that says so."""
    return [
        line
        for name in names
        for line in (lines(name, rows[name]) if name in rows else [NOT_YET.format(name)])
    ]


def tables(rows: Mapping[str, Row]) -> str:
    """Return the generated part of the page from the latest line of each cell."""
    facts = (" | ".join([side, *told]) for side, told in FACTS.items())
    ratios = [line for name in PEERS if name in rows for line in peer_ratio_lines(name, rows[name])]
    parts = [
        *(*table(FACT_HEAD, facts), ""),
        *(*table(PEER_HEAD, lines_or_gap(PEERS, rows, peer_lines)), ""),
        *(*table(RACE_HEAD, lines_or_gap(RACES, rows, race_lines)), ""),
        *table(("what", "measured", "aim"), [*ratios, *lines_or_gap(OTHERS, rows, other_lines)]),
    ]
    used = sorted({f"{row['processor']}, {row['cores']} cores" for row in rows.values()})
    if used:
        loads = [load for row in rows.values() for load in row["load"]]
        parts += ["", f"{'; '.join(used)}; load average {min(loads):.1f} to {max(loads):.1f}."]
    return "\n".join(parts)
