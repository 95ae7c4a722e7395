"""The cells of `defaults/sweep`: local optimizer by server step, for 10, 100 and 300 clients.

Cells run in the order in which they decide: every setting on two graphs, the better ones on a
third, the best everywhere. Settings are compared by validation accuracy of the server's model.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from silograph.core.config import Scalar
from silograph.study.cells import Cell, Line
from silograph.study.reproduce import StudyLines, cell

Pair = tuple[str, int]  # dataset and number of clients

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
    options = {"server_lr": lr, "server_momentum": 0.9}
    return {"method": "fedopt", "server_optimizer": "momentum", "options": options}


def adam(lr: float, tau: float = 1e-3) -> dict[str, Any]:
    """Return the options of a server step of Adam."""
    options = {"server_lr": lr, "server_tau": tau}
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
    "cut by label, Dirichlet .5": {"partition": "dirichlet", "alpha": 0.5},
    "10 % of the clients in a round": {"participation": 0.1},
}
# Whether the settings also train other graphs, with GCN and GraphSAGE; judged every 5 rounds.
GRAPHS: dict[str, dict[str, Any]] = {
    "amazon_photo": {"clients": 50},
    "digits": {"clients": 10},
    "minesweeper": {"clients": 20},
    "webkb": {"partition": "silo"},
}
MODELS, ROBUST_SEEDS = ("gcn", "sage"), (0, 1)
ROBUST = (
    DEFAULT,
    Setting("sgd", 0.1, "Adam .01, tau 1e-5", 1),
    Setting("sgd", 0.5, "momentum .9", 1),
    NAIVE,
)


@cache
def cell_of(pair: Pair, setting: Setting, seed: int, variant: str = "") -> Cell:
    """Return a cell of the sweep."""
    dataset, clients = pair
    labels: dict[str, Scalar] = {"dataset": dataset, "clients": clients}
    labels |= {"setting": setting.name, "seed": seed}
    options = PROTOCOL | setting.options() | VARIANTS[variant] | {"dataset": dataset}
    labels |= {"variant": variant} if variant else {}
    return cell(labels, **options, clients=clients, seed=seed)


@cache
def robust_cell(graph: str, model: str, setting: Setting, seed: int) -> Cell:
    """Return a cell on another graph."""
    labels: dict[str, Scalar] = {"dataset": graph, "model": model}
    labels |= {"setting": setting.name, "seed": seed}
    options = PROTOCOL | setting.options() | GRAPHS[graph] | {"model": model, "eval_every": 5}
    return cell(labels, **options, dataset=graph, seed=seed)


def value_of(line: Line) -> float:
    """Return the validation accuracy that settings are compared by; 0 where training diverged."""
    return 0.0 if "error" in line else float(line["val"]["server"]["accuracy"])


def lines_of(
    found: StudyLines, pair: Pair, setting: Setting, seeds: Sequence[int] = SEEDS, variant: str = ""
) -> list[Line]:
    """Return the lines of a setting, by seed, those that have run."""
    lines = (found.any(cell_of(pair, setting, seed, variant)) for seed in seeds)
    return [line for line in lines if line is not None]


def first_value(found: StudyLines, pair: Pair, setting: Setting) -> float | None:
    """Return the validation accuracy of seed 0, None if it has not run."""
    lines = lines_of(found, pair, setting, SEEDS[:1])
    return value_of(lines[0]) if lines else None


def best_value(found: StudyLines, pair: Pair) -> float:
    """Return the best validation accuracy of seed 0 of any setting."""
    values = (first_value(found, pair, setting) for setting in BY_NAME.values())
    return max((value for value in values if value is not None), default=0.0)


def ranked(found: StudyLines, pairs: Sequence[Pair]) -> list[str]:
    """Return the settings that ran in all pairs, best mean validation accuracy of seed 0 first."""
    means = {}
    for name, setting in BY_NAME.items():
        values = [first_value(found, pair, setting) for pair in pairs]
        known = [value for value in values if value is not None]
        if len(known) == len(pairs):
            means[name] = statistics.mean(known)
    return sorted(means, key=lambda name: -means[name])


def kept_of(found: StudyLines) -> list[Setting]:
    """Return what runs everywhere: naive, the best of three pairs, the best with each server."""
    best = [BY_NAME[name] for name in ranked(found, FULL + THIRD) if name != NAIVE.name]
    by_server = (next((s for s in best if s.server == server), None) for server in STEPS)
    plain = [s for s in by_server if s is not None]
    return list(dict.fromkeys([NAIVE, DEFAULT, *best[:KEEP], *plain]))


def going_of(found: StudyLines) -> list[Setting]:
    """Return what comes within MARGIN of the best in both of the first pairs, and the naive two."""
    best = {pair: best_value(found, pair) for pair in FULL}
    close = [
        s
        for s in BY_NAME.values()
        if all((first_value(found, p, s) or 0.0) >= best[p] - MARGIN for p in FULL)
    ]
    return [s for s in BY_NAME.values() if s in (NAIVE, NO_DECAY) or s in close]


def all_ran(found: StudyLines, cells: Sequence[Cell]) -> bool:
    """Whether every cell has a line."""
    return all(found.any(c) is not None for c in cells)


def stages(found: StudyLines) -> Iterator[list[Cell]]:
    """Yield groups of cells; each depends on the lines of those before it."""
    yield [cell_of(pair, s, 0) for pair in FULL for s in BY_NAME.values()]
    going = going_of(found)
    yield [cell_of(pair, s, 0) for pair in THIRD for s in going]
    kept = kept_of(found)
    yield [
        *(cell_of(pair, s, 0) for pair in REST for s in kept),
        *(cell_of(pair, s, seed) for pair, s, seed in product(PAIRS, kept, SEEDS[1:])),
        *(cell_of(FULL[0], s, 0, v) for s, v in product((DEFAULT, NAIVE), VARIANTS)),
        *(robust_cell(*each) for each in product(GRAPHS, MODELS, ROBUST, ROBUST_SEEDS)),
        *(cell_of(pair, s, 0) for s in going for pair in REST),
    ]


def cells(found: StudyLines) -> list[Cell]:
    """Return the cells that can be named so far, each once."""
    named: list[Cell] = []
    for stage in stages(found):
        named += stage
        if not all_ran(found, stage):
            break
    return list({tuple(c.labels.items()): c for c in named}.values())
