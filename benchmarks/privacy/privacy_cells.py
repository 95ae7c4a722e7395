"""Cells of the pages on differential privacy: how settings are chosen, and what is measured.

Settings are chosen by validation accuracy on a seed of its own, then measured on others. A line of
JSON is appended for each run that is not in the file yet, so an interrupted command goes on.
"""

import json
import lzma
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

import silograph as sg
from silograph.experiment.terminal_table import markdown_table
from silograph.study.plots import Curves, svg_of
from silograph.study.reproduce import replace_section

CHOICE_SEED, SEEDS = 100, (0, 1, 2)
NO_NOISE = 1e12  # epsilon so large that the noise is 2^-12 times the clip
EPSILONS = (1.0, 2.0, 4.0, 8.0, NO_NOISE)
# At which epsilon the settings are chosen that an epsilon is measured with.
CHOSEN_AT = {1.0: 1.0, 2.0: 1.0, 4.0: 8.0, 8.0: 8.0, NO_NOISE: NO_NOISE}
GRAPHS = ("cora", "citeseer", "pubmed")
Settings = dict[str, Any]
Line = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """A cut of a graph."""

    graph: str
    cut: str
    silos: int


@dataclass(frozen=True)
class Arm:
    """One column of a table.

    Attributes:
        name: of the column, such as `local` or `epsilon 1`.
        fixed: options of all its runs.
        stages: grids of settings by name; each choice is kept in the grids after it.
        chosen_at: options of the runs that choose, in place of those of the arm.
        choice: names the choice, which arms may share; empty: the arm's own.
        chosen_on: where settings are chosen; None: at each place.
    """

    name: str
    fixed: Settings
    stages: Sequence[Mapping[str, Settings]] = ()
    chosen_at: Settings = field(default_factory=dict)
    choice: str = ""
    chosen_on: Callable[["Place"], "Place"] | None = None


ArmsAt = Callable[[Place], Sequence[Arm]]


class Cells:
    """Runs of a page, and the file of their lines.

    Args:
        path: of the file.
        data_dir: folder of the graphs; None: nothing is run.
    """

    def __init__(self, path: Path, data_dir: str | None = None) -> None:
        self._path, self._data_dir = path, data_dir
        packed = path.with_name(path.name + ".xz")  # of lines that are there for good
        texts = lzma.decompress(packed.read_bytes()).splitlines() if packed.exists() else []
        texts += path.read_bytes().splitlines() if path.exists() else []
        self.lines = [json.loads(text) for text in texts]
        self._graphs = dict[str, sg.Graph]()

    def measure(self, places: Iterable[Place], arms: Sequence[Arm]) -> None:
        """Choose the settings of each arm at each place, and run its seeds."""
        for place in places:
            for arm in arms:
                name, settings = self.choose(place, arm)
                for seed in SEEDS:
                    self._run(place, arm.name, name, seed, arm.fixed | settings)

    def choose(self, place: Place, arm: Arm) -> tuple[str, Settings]:
        """Return the settings with the highest validation accuracy, and their name."""
        names, chosen = list[str](), dict[str, Any]()
        where = place if arm.chosen_on is None else arm.chosen_on(place)
        for grid in arm.stages:
            scores = dict[str, float]()
            for name, settings in grid.items():
                options = arm.fixed | arm.chosen_at | chosen | settings
                whole = ", ".join([*names, name])
                line = self._run(where, arm.choice or arm.name, whole, CHOICE_SEED, options)
                scores[name] = line["val"]
            names.append(max(scores, key=lambda name: scores[name]))
            chosen |= grid[names[-1]]
        return ", ".join(names) or "defaults", chosen

    def last_choice(self, place: Place, arm: Arm) -> dict[str, float]:
        """Return validation accuracies in percent of the last grid of an arm, by name."""
        where = place if arm.chosen_on is None else arm.chosen_on(place)
        before = self.choose(place, replace(arm, stages=arm.stages[:-1]))[0]
        own = {
            line["settings"]: 100 * line["val"]
            for line in self._of(where, arm.choice or arm.name, (CHOICE_SEED,))
        }
        return {name: own[f"{before}, {name}"] for name in arm.stages[-1]}

    def scores(self, place: Place, arm: Arm) -> list[float]:
        """Return test accuracies in percent of all seeds, with the settings that were chosen."""
        name, _ = self.choose(place, arm)
        own = self._of(place, arm.name, SEEDS)
        return [100 * line["test"] for line in own if line["settings"] == name]

    def cost(self) -> str:
        """Return how many runs there are, and their CPU time."""
        minutes = sum(line["seconds"] for line in self.lines) / 60
        return f"{len(self.lines):,} runs, {minutes:.0f} minutes of CPU time of one core."

    def _of(self, place: Place, arm: str, seeds: Sequence[int]) -> list[Line]:
        return [
            line
            for line in self.lines
            if (line["graph"], line["cut"], line["silos"]) == (place.graph, place.cut, place.silos)
            and line["arm"] == arm
            and line["seed"] in seeds
        ]

    def _run(self, place: Place, arm: str, name: str, seed: int, options: Settings) -> Line:
        """Return the line of a run, which is run if it is not in the file."""
        for line in self._of(place, arm, (seed,)):
            if line["settings"] == name:
                return line
        assert self._data_dir is not None, (place, arm, name, seed)
        if place.graph not in self._graphs:
            self._graphs[place.graph] = sg.load(place.graph, data_dir=self._data_dir)
        start = time.process_time()
        result = sg.run(
            self._graphs[place.graph],
            clients=place.silos,
            partition=place.cut,
            seed=seed,
            **options,
        )
        is_local = options["method"] == "local"
        scores = result.test.personalized if is_local else result.test.server
        assert scores is not None
        val = "val_personalized_accuracy" if is_local else "val_server_accuracy"
        (row,) = (row for row in result.rounds if row["round"] == result.best_round)
        model = result.model
        new: Line = {
            "graph": place.graph,
            "cut": place.cut,
            "silos": place.silos,
            "arm": arm,
            "settings": name,
            "seed": seed,
            "val": row[val],
            "test": scores["accuracy"],
            "weights": 0 if model is None else sum(map(torch.numel, model.weights.values())),
            "noise_multiplier": result.privacy and result.privacy["noise_multiplier"],
            "seconds": round(time.process_time() - start, 1),
        }
        self.lines.append(new)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(new) + "\n")
        return new


def name_of(epsilon: float) -> str:
    """Return the title of a column."""
    return "clipped only" if epsilon == NO_NOISE else f"epsilon {epsilon:g}"


def spread(scores: Sequence[float]) -> str:
    """Return mean and standard deviation of scores."""
    if len(scores) < 2:
        return "".join(f"{score:.1f}" for score in scores) or "-"
    return f"{mean(scores):.1f} ± {stdev(scores):.1f}"


def table(cells: Cells, places: Iterable[Place], arms_at: ArmsAt) -> str:
    """Return test accuracies by place and arm."""
    return _table(
        places,
        arms_at,
        lambda arm: arm.name,
        lambda place, arm: spread(cells.scores(place, arm)),
    )


def choices(cells: Cells, places: Iterable[Place], arms_at: ArmsAt) -> str:
    """Return which settings were chosen."""
    return _table(
        places,
        arms_at,
        lambda arm: arm.choice or arm.name,
        lambda place, arm: cells.choose(place, arm)[0],
    )


def _table(
    places: Iterable[Place],
    arms_at: ArmsAt,
    title_of: Callable[[Arm], str],
    text_of: Callable[[Place, Arm], str],
) -> str:
    rows, titles = list[list[str]](), list[str]()
    for place in places:
        arms = arms_at(place)
        titles = [title_of(arm) for arm in arms]
        texts = (text_of(place, arm) for arm in arms)
        rows.append([place.graph, place.cut, f"{place.silos:,}", *texts])
    return markdown_table(["graph", "cut", "silos", *titles], rows)


def gaps(cells: Cells, title: str, places: Iterable[Place], arms_at: ArmsAt) -> str:
    """Return an SVG of points above local training against epsilon, with standard deviations.

    Args:
        cells: that were measured.
        title: of the plot.
        places: a line each.
        arms_at: local training, and an arm for each epsilon but that without noise.
    """
    epsilons = list(EPSILONS[:-1])
    lines: dict[str, tuple[list[float], list[float]]] = {
        "local training": (epsilons, [0.0] * len(epsilons))
    }
    errors = dict[str, list[float]]()
    for place in places:
        local, *private = arms_at(place)
        name = f"{place.graph}, {place.cut}, {place.silos:,} silos"
        alone = mean(cells.scores(place, local))
        scores = [cells.scores(place, arm) for arm in private]
        lines[name] = epsilons, [mean(values) - alone for values in scores]
        errors[name] = [stdev(values) for values in scores]
    y = "points above local training"
    curves = Curves(title, "epsilon", y, lines, errors=errors, markers=True)
    return svg_of(curves)


def write_page(path: Path, sections: Mapping[str, str], plot: str) -> None:
    """Write sections between the marks of a page, and the plot beside it."""
    text = path.read_text(encoding="utf-8")
    for name, section in sections.items():
        text = replace_section(text, name, section)
    path.write_text(text, encoding="utf-8")
    path.with_suffix(".svg").write_text(plot, encoding="utf-8")
