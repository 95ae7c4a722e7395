"""Local optimizer by server step, for 10, 100 and 300 clients: where the defaults come from.

    python benchmarks/defaults/sweep.py --data-dir ../shared/data --minutes 60

runs the cells that `sweep.jsonl` does not hold yet, the deciding ones first, and rewrites the
tables of `sweep.md` and `curves.svg`. It can be stopped and continued at any time; `--minutes 0`
only writes the page. Settings are compared by validation accuracy of the server's model alone.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

import silograph as sg

HERE = Path(__file__).parent
CELLS, PAGE, CURVES = HERE / "sweep.jsonl", HERE / "sweep.md", HERE / "curves.svg"
Row = dict[str, Any]
Pair = tuple[str, int]
Cell = tuple[Pair, "Setting", int, str]  # the last: a name in VARIANTS

# Everything that decides a cell stands here, so that a change of the defaults changes no cell.
PROTOCOL: dict[str, Any] = {
    "partition": "metis",
    "split": "0.2/0.4/0.4",
    "largest_component": False,
    "normalize": "none",
    "participation": 1.0,
    "model": "gcn",
    "layers": 2,
    "hidden": 128,
    "dropout": 0.5,
    "rounds": 100,
    "momentum": 0.0,
    "keep_optimizer": False,
}


def momentum(lr: float) -> dict[str, Any]:
    """Return the options of a server step with momentum .9."""
    options = {"server_optimizer": "momentum", "server_lr": lr, "server_momentum": 0.9}
    return {"method": "fedopt", "options": options}


def adam(lr: float, tau: float = 1e-3) -> dict[str, Any]:
    """Return the options of a server step of Adam."""
    options = {"server_optimizer": "adam", "server_lr": lr, "server_tau": tau}
    return {"method": "fedopt", "options": options | {"server_beta1": 0.9, "server_beta2": 0.99}}


SERVERS: dict[str, dict[str, Any]] = {
    "replace": {"method": "fedavg"},
    "momentum .9": momentum(1.0),
    "momentum .9, lr .3": momentum(0.3),
    "Adam .01": adam(0.01),
    "Adam .01, tau 1e-4": adam(0.01, 1e-4),
    "Adam .01, tau 1e-5": adam(0.01, 1e-5),
    "Adam .003, tau 1e-4": adam(0.003, 1e-4),
    "Adam .005, tau 1e-5": adam(0.005, 1e-5),
    "Adam .03, tau 1e-4": adam(0.03, 1e-4),
    "Adam .03": adam(0.03),
}
COLORS = ("#0b6e4f", "#b36b00", "#9d2449")


@dataclass(frozen=True)
class Setting:
    """What a row of the tables stands for."""

    optimizer: str
    lr: float
    server: str
    epochs: int
    weight_decay: float = 5e-4

    @property
    def name(self) -> str:
        """Return the label of the setting."""
        local = f"{'Adam' if self.optimizer == 'adam' else 'SGD'} {self.lr:g}".replace("0.", ".")
        decay = "" if self.weight_decay else ", no weight decay"
        return f"{local} x {self.epochs}{decay} / {self.server}"

    def options(self) -> dict[str, Any]:
        """Return the fields of `RunConfig`."""
        local = {"optimizer": self.optimizer, "lr": self.lr, "local_epochs": self.epochs}
        return SERVERS[self.server] | local | {"weight_decay": self.weight_decay}


NAIVE = Setting("adam", 0.01, "replace", 1)
NO_DECAY = Setting("adam", 0.01, "replace", 1, weight_decay=0.0)
DEFAULT = Setting("sgd", 0.1, "Adam .005, tau 1e-5", 1)
LOCALS = (("sgd", 0.5), ("sgd", 0.1), ("sgd", 1.0), ("adam", 0.01), ("adam", 0.001))
STEPS = ("momentum .9", "Adam .01", "replace", "Adam .03")
BY_NAME: dict[str, Setting] = {
    s.name: s
    for s in (
        NAIVE,
        Setting("sgd", 0.5, "momentum .9", 3),
        Setting("sgd", 0.1, "Adam .01", 1),
        NO_DECAY,
        *(Setting(*local, server, e) for server, e, local in product(STEPS, (1, 3), LOCALS)),
        Setting("sgd", 0.5, "momentum .9, lr .3", 3),
        Setting("sgd", 2.0, "replace", 1),
        Setting("sgd", 1.0, "Adam .01, tau 1e-4", 1),
        Setting("sgd", 1.0, "Adam .01, tau 1e-4", 3),
        Setting("sgd", 1.0, "Adam .01, tau 1e-5", 1),
        Setting("sgd", 1.0, "Adam .003, tau 1e-4", 1),
        Setting("sgd", 1.0, "Adam .03, tau 1e-4", 1),
        DEFAULT,
        Setting("sgd", 0.1, "Adam .01, tau 1e-5", 1),
        Setting("sgd", 0.1, "Adam .01, tau 1e-4", 1),
        Setting("sgd", 0.1, "Adam .01, tau 1e-5", 3),
    )
}
DRAWN = (DEFAULT, NO_DECAY, NAIVE)
DATASETS, CLIENTS, SEEDS = ("cora", "citeseer", "pubmed"), (10, 100, 300), (0, 1, 2)
FULL: tuple[Pair, ...] = (("cora", 100), ("cora", 10))  # every setting runs here
THIRD: tuple[Pair, ...] = (("pubmed", 100),)  # those within MARGIN of the best in both
REST: tuple[Pair, ...] = (
    ("citeseer", 100),
    ("cora", 300),
    ("pubmed", 10),
    ("citeseer", 10),
    ("pubmed", 300),
    ("citeseer", 300),
)
PAIRS = FULL + THIRD + REST
MARGIN, KEEP = 0.03, 5
VARIANTS: dict[str, dict[str, Any]] = {  # of the protocol; "" is the protocol itself
    "": {},
    "GraphSAGE": {"model": "sage"},
    "3 layers": {"layers": 3},
    "no dropout": {"dropout": 0.0},
    "features divided by row sums": {"normalize": "row"},
    "cut at random": {"partition": "random"},
    "cut by label, Dirichlet .5": {"partition": "dirichlet"},
    "10 % of the clients in a round": {"participation": 0.1},
}


def run_cell(cell: Cell, data_dir: str | None) -> Row:
    """Return one line of the cells' file; accuracies are pooled over all clients' nodes."""
    (dataset, clients), setting, seed, variant = cell
    row: Row = {"dataset": dataset, "clients": clients, "setting": setting.name, "seed": seed}
    row |= {"variant": variant} if variant else {}
    options = PROTOCOL | setting.options() | VARIANTS[variant]
    row |= {"options": setting.options(), "versions": versions()}
    try:
        result = sg.run(dataset, clients=clients, seed=seed, data_dir=data_dir, **options)
    except sg.TrainingError as error:
        return row | {"val": None, "diverged": str(error)}
    assert result.val.server is not None  # every setting here trains a model of the server's
    assert result.test.server is not None
    assert result.test.uncut is not None
    assert result.test.personalised is not None
    curve = [float(r["val_server_accuracy"] or 0.0) for r in result.rounds]
    best = max(curve)
    return (
        row
        | {
            "val": result.val.server.accuracy,
            "test": result.test.server.accuracy,
            "test_last": result.rounds[-1]["test_server_accuracy"],
            "test_uncut": result.test.uncut.accuracy,
            "test_personalised": result.test.personalised.accuracy,
            "best_round": result.best_round,
            "round_95": 1 + next(t for t, value in enumerate(curve) if value >= 0.95 * best),
            "seconds": round(result.seconds, 2),
            "bytes": result.bytes,
            "kernels": result.config.kernels,
            "partition": result.partition_hash,
        }
        | ({"curve": [round(100 * v, 1) for v in curve]} if cell[0] == FULL[0] else {})
    )


def versions() -> dict[str, str]:
    """Return the versions of what computes."""
    return {
        "silograph": sg.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def value_of(row: Row) -> float:
    """Return the validation accuracy that settings are compared by; 0 where training diverged."""
    return 0.0 if row["val"] is None else float(row["val"])


def of(rows: list[Row], pair: Pair, setting: str | None = None, variant: str = "") -> list[Row]:
    """Return the rows of a dataset and number of clients, and of a setting if one is given."""
    here = [
        r for r in rows if (r["dataset"], r["clients"], r.get("variant", "")) == (*pair, variant)
    ]
    return here if setting is None else [r for r in here if r["setting"] == setting]


def ranked(rows: list[Row], pairs: tuple[Pair, ...]) -> list[str]:
    """Return the settings that ran in all pairs, best mean validation accuracy of seed 0 first."""
    means = {}
    for name in BY_NAME:
        first = [[r for r in of(rows, pair, name) if r["seed"] == 0] for pair in pairs]
        if all(first):
            means[name] = statistics.mean(value_of(r[0]) for r in first)
    return sorted(means, key=lambda name: -means[name])


def kept_of(rows: list[Row]) -> list[Setting]:
    """Return what runs everywhere: naive, the best of three pairs, the best with each server."""
    best = [BY_NAME[name] for name in ranked(rows, FULL + THIRD) if name != NAIVE.name]
    plain = [next(s for s in best if s.server == server) for server in STEPS]
    return list(dict.fromkeys([NAIVE, DEFAULT, *best[:KEEP], *plain]))


def close(rows: list[Row], name: str) -> bool:
    """Whether a setting comes within MARGIN of the best in both of the first pairs."""
    values = [(value_of(of(rows, p, name)[0]), best_value(rows, p)) for p in FULL]
    return all(value >= best - MARGIN for value, best in values)


def plan(rows: list[Row]) -> Iterator[Cell]:
    """Yield the cells in order; `rows` grows while it is read."""
    yield from ((pair, s, 0, "") for pair in FULL for s in BY_NAME.values())
    going = [s for s in BY_NAME.values() if s in (NAIVE, NO_DECAY) or close(rows, s.name)]
    yield from ((pair, s, 0, "") for pair in THIRD for s in going)
    kept = kept_of(rows)
    yield from ((pair, s, 0, "") for pair in REST for s in kept)
    yield from product(PAIRS, kept, SEEDS[1:], ("",))
    yield from product(FULL[:1], (DEFAULT, NAIVE), SEEDS[:1], VARIANTS)
    yield from ((pair, s, 0, "") for s in going for pair in REST)


def run_missing(rows: list[Row], minutes: float, data_dir: str | None) -> None:
    """Run what is missing until the time is over; every cell is written as it ends."""
    end = time.monotonic() + 60 * minutes
    for pair, setting, seed, variant in plan(rows):
        if time.monotonic() > end:
            return
        if any(row["seed"] == seed for row in of(rows, pair, setting.name, variant)):
            continue
        rows.append(run_cell((pair, setting, seed, variant), data_dir))
        with CELLS.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
        told = [rows[-1].get(key) for key in ("val", "test", "seconds")]
        print(*pair, setting.name, seed, variant, *told, flush=True)


def spread(values: list[float]) -> str:
    """Return a mean in percent, with the standard deviation where there are three values."""
    mean = f"{100 * statistics.mean(values):.1f}"
    return mean if len(values) < len(SEEDS) else f"{mean} ± {100 * statistics.stdev(values):.1f}"


def cell_text(rows: list[Row]) -> str:
    """Return test accuracy at the best validation round, and that validation accuracy."""
    if not rows:
        return "-"
    if any(row["val"] is None for row in rows):
        return "diverged"
    rows = rows if len(rows) == len(SEEDS) else rows[:1]
    test = spread([row["test"] for row in rows])
    return f"{test} ({100 * statistics.mean(row['val'] for row in rows):.1f})"


def grid(head: list[str], lines: list[list[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join("| " + " | ".join(x) + " |" for x in (head, ["---"] * len(head), *lines))


def dataset_table(rows: list[Row], dataset: str) -> str:
    """Return the table of a dataset: settings by number of clients, in the order of SERVERS."""
    lines = []
    order = list(SERVERS)
    for name in sorted(BY_NAME, key=lambda n: (order.index(BY_NAME[n].server), n)):
        cells = [cell_text(of(rows, (dataset, k), name)) for k in CLIENTS]
        if any(cell != "-" for cell in cells):
            label = f"**{name}**" if BY_NAME[name] in (NAIVE, DEFAULT) else name
            lines.append([label, *cells])
    return grid(["local / server", *(f"{k} clients" for k in CLIENTS)], lines)


def mean_over(rows: list[Row], name: str, seeds: tuple[int, ...], key: str) -> str:
    """Return the mean over all nine pairs and these seeds in percent, or - if a cell is missing."""
    here = [r for p in PAIRS for r in of(rows, p, name) if r["seed"] in seeds]
    if len(here) < len(PAIRS) * len(seeds):
        return "-"
    return f"{100 * statistics.mean(float(r[key] or 0.0) for r in here):.2f}"


def means_table(rows: list[Row]) -> str:
    """Return means over the cells, and how far a setting stays behind the best, at the worst."""
    lines = []
    for name in ranked(rows, FULL + THIRD):
        first = [of(rows, p, name)[0] for p in PAIRS if of(rows, p, name)]
        gaps = [best_value(rows, (r["dataset"], r["clients"])) - value_of(r) for r in first]
        three = statistics.mean(value_of(r) for r in first[: len(FULL + THIRD)])
        texts = [f"{100 * three:.2f}", mean_over(rows, name, SEEDS[:1], "val")]
        texts += [mean_over(rows, name, SEEDS, key) for key in ("val", "test")]
        texts.append(f"{100 * max(gaps):.1f}" + ("" if len(first) == len(PAIRS) else " *"))
        rounds = statistics.mean(r["round_95"] for r in first)
        label = f"**{name}**" if BY_NAME[name] in (NAIVE, DEFAULT) else name
        lines.append([label, *texts, f"{rounds:.0f}"])
    head = ["local / server", "3 cells", "9 cells", "9 cells, 3 seeds", "test, 9 cells, 3 seeds"]
    return grid([*head, "worst gap", "rounds to 95 %"], lines)


def best_value(rows: list[Row], pair: Pair) -> float:
    """Return the best validation accuracy of seed 0 of any setting."""
    return max([value_of(r) for r in of(rows, pair) if r["seed"] == 0])


def pair_table(rows: list[Row]) -> str:
    """Return the default beside the naive setting, in all cells."""
    lines = []
    for pair, setting in product(product(DATASETS, CLIENTS), (DEFAULT, NAIVE)):
        here = of(rows, pair, setting.name)
        if here:
            keys = ("test", "test_last", "test_uncut", "test_personalised")
            texts = [spread([r[k] for r in here]) if k in here[-1] else "-" for k in keys]
            rounds = statistics.mean(r["round_95"] for r in here)
            which = "default" if setting is DEFAULT else "naive"
            lines.append([pair[0], str(pair[1]), which, *texts, f"{rounds:.0f}"])
    head = ["dataset", "clients", "setting", "by validation", "last round", "uncut view"]
    return grid([*head, "personalised", "rounds to 95 %"], lines)


def variant_table(rows: list[Row]) -> str:
    """Return default and naive setting under changes of the protocol, first pair, seed 0."""
    lines = []
    for variant in VARIANTS:
        here = [of(rows, FULL[0], s.name, variant)[:1] for s in (DEFAULT, NAIVE)]
        lines.append([variant or "as in the tables", *(cell_text(cell) for cell in here)])
    return grid(["Cora, 100 clients, seed 0", "default", "naive"], lines)


def draw(curves: dict[str, list[float]], title: str) -> str:
    """Return an SVG of accuracies in percent by round, one line for each setting."""
    width, height, left, top, bottom = 720, 360, 52, 44, 316

    def x(t: float) -> float:
        return left + (width - left - 24) * t / 100

    def y(value: float) -> float:
        return bottom - (bottom - top) * value / 100

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="13" fill="#222">',
        f"<title>{title}</title>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{left}" y="24" font-size="15">{title}</text>',
    ]
    for v in range(0, 101, 20):
        parts.append(f'<path d="M{left} {y(v):.0f}H{width - 24}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y(v) + 4:.0f}" text-anchor="end">{v} %</text>')
    for t in range(0, 101, 20):
        parts.append(f'<text x="{x(t):.0f}" y="{bottom + 20}" text-anchor="middle">{t}</text>')
    parts.append(f'<text x="{x(50):.0f}" y="{height - 6}" text-anchor="middle">round</text>')
    for (name, curve), color in zip(curves.items(), COLORS, strict=True):
        points = " ".join(f"{x(t):.1f},{y(v):.1f}" for t, v in enumerate(curve, start=1))
        line = f'fill="none" stroke="{color}" stroke-width="2"'
        parts.append(f'<polyline points="{points}" {line}/>')
        label = y(curve[-1]) + (-10 if curve[-1] > 50 else 18)
        parts.append(
            f'<text x="{width - 28}" y="{label:.0f}" text-anchor="end" fill="{color}">{name}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Run what is missing, then write tables and curves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir")
    parser.add_argument("--minutes", type=float, default=60.0, help="when to start no more cells")
    args = parser.parse_args()
    rows = [json.loads(line) for line in CELLS.read_text().splitlines()] if CELLS.exists() else []
    run_missing(rows, args.minutes, args.data_dir)
    tables = {dataset: dataset_table(rows, dataset) for dataset in DATASETS}
    tables |= {"means": means_table(rows), "default and naive": pair_table(rows)}
    tables["variants"] = variant_table(rows)
    page = PAGE.read_text()
    for name, text in tables.items():
        mark = f"<!-- {name} -->"
        before, _, after = page.split(mark)
        page = f"{before}{mark}\n{text}\n{mark}{after}"
    PAGE.write_text(page)
    pair = ("cora", 100)
    curves = {s.name: of(rows, pair, s.name)[0]["curve"] for s in DRAWN}
    CURVES.write_text(draw(curves, "Cora, METIS, 100 clients: validation accuracy by round"))


if __name__ == "__main__":
    main()
