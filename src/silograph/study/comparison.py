"""What a comparison says: means and spread over seeds, paired tests, costs; as table or data."""

import csv
import io
import json
import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from silograph.core.config import Scalar
from silograph.core.kinds import Kind
from silograph.core.text import count_of, decimals, html_lines, html_table
from silograph.experiment.resolve.parts import find_method
from silograph.experiment.resolve.resolve import choose, fill_defaults
from silograph.experiment.result_files import ALL_BIASES, frame_of
from silograph.experiment.run.result import VIEWS
from silograph.experiment.terminal_table import (
    better_untrained,
    markdown_table,
    mean_and_deviation,
    print_number_table,
    printed_text,
)
from silograph.graph.datasets import is_path
from silograph.methods.base import seen_by
from silograph.nn.model_options import RATING_MODELS
from silograph.study import latex
from silograph.study.arms import (
    Labels,
    check_same,
    labels_of_baseline,
    names_of_arms,
    reference_of,
)
from silograph.study.cells import LASTING, Cell, Line, metric_in, words_of
from silograph.study.paired_tests import (
    ComparisonRequest,
    ComparisonRow,
    Paired,
    Test,
    holm,
    overlap_of,
    paired_test,
    power_of,
)
from silograph.study.ranking import FEWEST_ARMS, FEWEST_DATA_SETS, Ranking, rank_arms
from silograph.task.metric_table import METRICS, Metric

if TYPE_CHECKING:
    import pandas as pd


# --- What single runs and tests of a comparison come to ------------------------------------------


ROW_KINDS = (  # of what belongs to single nodes; scores are a kind of their own
    Kind.EMBEDDINGS,
    Kind.FEATURES,
    Kind.PARTIAL_SUMS,
    Kind.COTANGENTS,
    Kind.GENERATED,
    Kind.HALO_KEYS,
)


def without_errors(lines: Sequence[Line]) -> list[Line]:
    """Return the lines of runs without an error."""
    return [line for line in lines if "error" not in line]


def cost_of(line: Line, name: str) -> Any:
    """Return a cost of a run; None: not known."""
    if name == "row_bytes":
        return sum(line["bytes"]["by_kind"].get(kind, 0) for kind in ROW_KINDS)
    return line["bytes"]["total"] if name == "bytes" else line.get(name)


def test_columns(
    reference: str | None, test: Paired | None, adjusted: float | None
) -> ComparisonRow:
    """Return the columns of a paired test; `adjusted`: its p-value among several tests."""
    if test is None:
        names = ("pairs", "difference", "low", "high", "p", "p_holm")
        return {"reference": reference, **dict.fromkeys(names)}
    return {
        "reference": reference,
        "pairs": test.n,
        "difference": test.mean,
        "low": test.low,
        "high": test.high,
        "p": test.p,
        "p_holm": adjusted,
    }


VIEW_CHOICES = ("own", *VIEWS)
COSTS = ("bytes", "row_bytes", "flops", "seconds", "peak_memory_bytes", "best_round", "local_bias")
TEST_NAMES = {
    "t": "Student's paired t-test",
    "resampled": "Student's paired t-test, corrected for splits that overlap (Nadeau and Bengio)",
    "wilcoxon": "Wilcoxon's signed ranks",
}
Point = tuple[Scalar, ...]  # values of the keys that make tables


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """The outcome of a comparison.

    Attributes:
        request: what was compared.
        cells: all of its cells.
        lines: the outcome of each cell, in the order of the cells; None where a cell has not run.
        folder: where it was written, or None.
        point_keys: keys that are varied and whose values have tables of their own.
    """

    request: ComparisonRequest
    cells: tuple[Cell, ...]
    lines: tuple[Line | None, ...]
    folder: str | None = None
    point_keys: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Return the tables."""
        return self.summary()

    def _repr_html_(self) -> str:
        parts = [
            html_table(": ".join(w for w in (title_of(self), title) if w), columns, rows)
            for title, columns, rows in _all_tables(self, math.inf)
        ]
        return "".join(parts) + html_lines(self._text_lines())

    def _text_lines(self) -> list[str]:
        """Return what stands below the tables: notes, and what failed."""
        return [*self.notes, *(f"failed: {line}" for line in self.failed_alike)]

    @cached_property
    def rows(self) -> list[ComparisonRow]:
        """One dict for each arm and table: means over seeds, and the test.

        `arm` is its name and `method` that of its method; what is varied has a key each, None for
        an arm that has no such option. `VIEW_mean` and `VIEW_std` (sample standard deviation, None
        for one seed) are of the metric on test nodes, over the `seeds` that have scores; `diverged`
        and `failed` count the others.
        Costs are means. `difference`, `low`, `high` (95 % interval) and `p`,
        `p_holm` compare with the arm `reference` of the same table, in the `view` of the tests: one
        for all arms, None for an arm that has no scores in it and is not tested.
        """
        return [row for point in self._points for row in self._rows_at(point)]

    def _point(self, cell: Cell) -> Point:
        return tuple(cell.labels[key] for key in self.point_keys)

    @cached_property
    def _points(self) -> list[Point]:
        """The values of what makes tables, in the order of the tables."""
        return list(dict.fromkeys(self._point(cell) for cell in self.cells))

    @cached_property
    def arms(self) -> dict[str, Labels]:
        """Labels of each arm by its name, in the order of the tables."""
        labels = {json.dumps(each): each for each in map(self._arm_labels, self.cells)}
        order: list[Any] = [arm.label for arm in self.request.all_arms]
        ordered = sorted(labels.values(), key=lambda each: order.index(next(iter(each.items()))))
        return dict(zip(names_of_arms(ordered), ordered, strict=True))

    def _arm_labels(self, cell: Cell) -> Labels:
        apart = ("seed", *self.point_keys)
        return {key: value for key, value in cell.labels.items() if key not in apart}

    @cached_property
    def arm_of(self) -> dict[Cell, str]:
        """The name of the arm of each cell."""
        names = {json.dumps(labels): name for name, labels in self.arms.items()}
        return {cell: names[json.dumps(self._arm_labels(cell))] for cell in self.cells}

    def _select(
        self, point: Point | None = None, arm: str | None = None
    ) -> list[tuple[Cell, Line | None]]:
        """Return cells with their lines: all, or those of a point, of an arm, or of both."""
        return [
            (cell, line)
            for cell, line in zip(self.cells, self.lines, strict=True)
            if point in (None, self._point(cell)) and arm in (None, self.arm_of[cell])
        ]

    def lines_of(self, point: Point | None = None, arm: str | None = None) -> list[Line]:
        """Return the lines of cells that have run, also of failed ones; see `_select`."""
        return [line for _, line in self._select(point, arm) if line is not None]

    def _arms_at(self, point: Point) -> list[str]:
        """Return the arms of a table."""
        there = {self.arm_of[cell] for cell in self.cells if self._point(cell) == point}
        return [name for name in self.arms if name in there]

    def check_arms(self) -> None:
        """Raise `ConfigError` for a baseline that is no arm, and arms whose runs are no pairs."""
        _ = self._baseline
        seed = self.request.seeds[0]
        for point in self._points:
            cells = [c for c in self.cells if self._point(c) == point and c.labels["seed"] == seed]
            check_same(cells, [self.arm_of[cell] for cell in cells])

    @cached_property
    def _baseline(self) -> Labels | None:
        """The labels that the baseline names."""
        name = self.request.baseline
        return None if name is None else labels_of_baseline(name, self.arms)

    def _metric(self, lines: Sequence[Line | None]) -> Metric:
        """Return the metric that lines are compared by."""
        name = self.request.metric
        return metric_in(lines) or METRICS["accuracy"] if name is None else METRICS[name]

    @property
    def metrics(self) -> list[Metric]:
        """The metrics of the comparison: one, unless what is varied makes tasks differ."""
        return list(dict.fromkeys(self._metric(self.lines_of(p)) for p in self._points))

    def _rows_at(self, point: Point) -> list[ComparisonRow]:
        metric, arms = self._metric(self.lines_of(point)), self._arms_at(point)
        rows = [self._means(point, arm, metric) for arm in arms]
        for view_name in VIEWS:
            means = [row[f"{view_name}_mean"] for row in rows]
            best = metric.best(means)
            for row in rows:
                row["best"] += (
                    [view_name] if best is not None and row[f"{view_name}_mean"] == best else []
                )
        view = self._test_view(point)
        lines = {arm: without_errors(self.lines_of(point, arm)) for arm in arms}
        scores = {arm: self._scores(lines[arm], view, metric) for arm in arms}
        references = self._references(point, scores, metric)
        tests: dict[str, Paired] = {}
        test, overlap = self._test(point)
        for arm, reference in references.items():
            # An arm whose runs all failed has a test of no pairs; one without the view has none.
            if arm == reference or not all(scores[a] or not lines[a] for a in (arm, reference)):
                continue
            shared_seeds = sorted(scores[arm].keys() & scores[reference].keys())
            own, others = ([scores[a][s] for s in shared_seeds] for a in (arm, reference))
            tests[arm] = paired_test(own, others, test, overlap)
        adjusted = dict(zip(tests, holm([test.p for test in tests.values()]), strict=True))
        for row in rows:
            arm = row["arm"]
            row["view"] = view if scores[arm] else None
            row |= test_columns(references.get(arm), tests.get(arm), adjusted.get(arm))
        return rows

    def _references(
        self, point: Point, scores: Mapping[str, Mapping[int, float]], metric: Metric
    ) -> dict[str, str]:
        """Return the arm that each arm is tested against, without those that have none.

        It is the best of the table unless the request names a baseline.

        Args:
            point: of the table.
            scores: of each arm, by seed.
            metric: of the scores.
        """
        arms = {name: self.arms[name] for name in self._arms_at(point)}
        if self._baseline is not None:
            references = {name: reference_of(name, self._baseline, arms) for name in arms}
        else:
            means = {arm: statistics.mean(s.values()) for arm, s in scores.items() if s}
            best = max(means, key=lambda arm: metric.goodness(means[arm]), default=None)
            references = dict.fromkeys(arms, best)
        return {name: other for name, other in references.items() if other is not None}

    def _test_view(self, point: Point) -> str | None:
        """Return the view whose scores are tested at values of what is varied.

        Scores of two views are never compared: they are of different models, or of nodes that see
        different neighbors. Unless the request names a view, it is one that all arms have, and
        of several the one that most arms are about. If there is none, it is the view that most
        arms have, a baseline among them; arms without it are not tested.
        """
        request = self.request
        if request.view != "own":
            return request.view
        metric, arms = self._metric(self.lines_of(point)), self._arms_at(point)
        own_views = [self._judging_view(point, arm) for arm in arms]
        arms_by_view = {
            view: [
                arm
                for arm in arms
                if self._scores(without_errors(self.lines_of(point, arm)), view, metric)
            ]
            for view in VIEWS
        }
        labels = self._baseline
        baselines = [arm for arm in arms if labels and labels.items() <= self.arms[arm].items()]
        ranks = {
            view: (len(names), own_views.count(view))
            for view, names in arms_by_view.items()
            if names and (not baselines or any(name in names for name in baselines))
        }
        return max(ranks, key=lambda view: ranks[view]) if ranks else None  # the first of equals

    def _test(self, point: Point) -> tuple[Test, float]:
        """Return the test at values of what is varied, and how far its seeds' splits overlap."""
        config = self._select(point)[0][0].config
        overlap = overlap_of(config.split, config.split_seed)
        if self.request.test == "auto":
            return ("t", 0.0) if overlap is None else ("resampled", overlap)
        return self.request.test, overlap or 0.0

    def _test_notes(self) -> list[str]:
        """Return which test is printed, if one is, and what so many seeds can show."""
        request = self.request
        if not self.tests:
            return []
        views = dict.fromkeys(self._test_view(point) for point in self._points)
        view = f"the {' or '.join(view or 'missing' for view in views)} view"
        tests = dict.fromkeys(self._test(point) for point in self._points)
        if len(request.seeds) == 1:
            powers = dict.fromkeys(power_of(1, *test) for test in tests)
            return [f"difference: in {view}", *self._view_notes(), *powers]
        notes = [
            f"paired test: {TEST_NAMES[test]}, two-sided, seed by seed, in {view}"
            for test in dict.fromkeys(test for test, _ in tests)
        ]
        notes += self._view_notes()
        splits_overlap = any(overlap for _, overlap in tests)
        if splits_overlap and request.test in ("t", "wilcoxon"):
            notes.append(
                "every seed splits the graph anew, and such splits overlap: p-values are too "
                "small; --test resampled corrects this"
            )
        return notes + [power_of(len(request.seeds), *test) for test in tests]

    def _view_notes(self) -> list[str]:
        """Return in which view each arm is judged, and which arms are not tested."""
        pairs = [
            (self._judging_view(point, arm), self.names[arm])
            for point in self._points
            for arm in self._arms_at(point)
        ]
        names_by_view: dict[str, dict[str, None]] = {}
        for view, name in pairs:
            names_by_view.setdefault(view, {})[name] = None
        texts = [f"{view} ({', '.join(names)})" for view, names in names_by_view.items()]
        notes = [f"views that pick the rounds: {'; '.join(texts)}"] if len(texts) > 1 else []
        untested = dict.fromkeys(
            self.names[row["arm"]] for row in self.rows if row["view"] is None and row["seeds"]
        )
        if untested:
            notes.append(
                f"not tested, for want of a view that the compared arms share: "
                f"{', '.join(untested)}"
            )
        without_reference = dict.fromkeys(
            self.names[row["arm"]] for row in self.rows if row["reference"] is None and row["seeds"]
        )
        if without_reference:
            notes.append(
                f"not tested, as several arms are {self.request.baseline} and none of them is like "
                f"these: {', '.join(without_reference)}"
            )
        return notes

    @property
    def tests(self) -> bool:
        """Whether there is another arm to test one against."""
        return len(self.arms) > 1

    @cached_property
    def names(self) -> Mapping[str, str]:
        """What tables call the arms: methods of a file by their own names, if these differ."""
        own_names = {
            str(cell.labels["method"]): find_method(cell.config, cell.method).name
            for cell in self.cells
            if "method" in cell.labels
        }
        own = [
            {**labels, "method": own_names[str(labels["method"])]} if "method" in labels else labels
            for labels in self.arms.values()
        ]
        names = names_of_arms(own)
        is_unique = len(set(own_names.values())) == len(own_names)
        return dict(zip(self.arms, names if is_unique else self.arms, strict=True))

    def _means(self, point: Point, arm: str, metric: Metric) -> ComparisonRow:
        labels, cell = self.arms[arm], self._select(point, arm)[0][0]
        row: ComparisonRow = {"arm": arm, "method": labels.get("method", cell.config.method)}
        at_point = dict(zip(self.point_keys, point, strict=True))
        row |= {key: at_point.get(key, labels.get(key)) for key in self.request.over}
        method_lines = self.lines_of(point, arm)
        lines = without_errors(method_lines)
        failed_lines = [line for line in method_lines if "error" in line]
        diverged = sum(line.get("kind") == LASTING for line in failed_lines)
        row |= {"seeds": len(lines), "diverged": diverged, "failed": len(failed_lines) - diverged}
        for view in VIEWS:
            scores = self._scores(lines, view, metric).values()
            row[f"{view}_mean"], row[f"{view}_std"] = mean_and_deviation(scores)
        row["best"] = []
        row["metric"] = metric.name
        for cost in COSTS:
            row[cost], _ = mean_and_deviation(cost_of(line, cost) for line in lines)
        return row

    def _scores(self, lines: Sequence[Line], view: str | None, metric: Metric) -> dict[int, float]:
        """Return the metric by seed, where there is one."""
        scores = {}
        for line in lines:
            view_scores = line["test"].get(view)
            if view_scores is not None and view_scores.get(metric.name) is not None:
                scores[line["config"]["seed"]] = view_scores[metric.name]
        return scores

    def _judging_view(self, point: Point, arm: str) -> str:
        """Return the view that picks the rounds of an arm."""
        cell = self._select(point, arm)[0][0]
        return find_method(cell.config, cell.method).evaluate.view

    def _arms_by_server_view(self) -> dict[str, list[str]]:
        """Return how nodes are seen in the server view, and the arms of each kind."""
        arms_by_description: dict[str, list[str]] = {}
        for cell in self.cells:
            method = find_method(cell.config, cell.method)
            if method.evaluate.view != "server":
                continue
            description = seen_by(method, cell.config)
            names = arms_by_description.setdefault(description, [])
            name = self.names[self.arm_of[cell]]
            if name not in names:
                names.append(name)
        return arms_by_description

    @cached_property
    def constants(self) -> list[ComparisonRow]:
        """One dict for each value of what is varied: scores of the best constant prediction.

        `mean` and `std` over seeds of the metric on test nodes, and its `name`, such as
        `largest class`; both None where no line says it.
        """
        return [self._constant_at(point) for point in self._points]

    def _constant_at(self, point: Point) -> ComparisonRow:
        lines = self.lines_of(point)
        metric = self._metric(lines)
        # All methods of a seed have one partition, so any of their lines says it.
        constant_by_seed = {
            line["config"]["seed"]: line["constant"]
            for line in lines
            if line.get("constant") is not None
        }
        constants = constant_by_seed.values()
        mean, deviation = mean_and_deviation(c["scores"].get(metric.name) for c in constants)
        name = next((constant["name"] for constant in constants), None)
        return {"name": name, "metric": metric.name, "mean": mean, "std": deviation}

    def _still_improving(self) -> list[str]:
        """Return which arms had their best round last, in one line or none."""
        texts = []
        for arm in self.arms:
            finished_lines = without_errors(self.lines_of(arm=arm))
            # Runs of more than one evaluation that were best in the last planned round. With
            # differential privacy the last round is always the result.
            num_improving = sum(
                line["config"].get("dp_epsilon") is None
                and len(line["curve"]["round"]) > 1
                and line["best_round"] == line["rounds"] == line["config"]["rounds"]
                for line in finished_lines
            )
            if num_improving:
                texts.append(
                    f"{self.names[arm]} in {num_improving} of "
                    f"{count_of(len(finished_lines), 'run')}"
                )
        message = "the last round was the best one, and scores were still improving: raise --rounds"
        return [f"{message} ({', '.join(texts)})"] if texts else []

    def _identical_arms(self) -> list[list[str]]:
        """Return the groups of arms whose runs coincide in all scores and losses."""
        groups: dict[str, list[str]] = {}
        for arm in self.arms:
            arm_lines = [line for _, line in self._select(arm=arm)]
            if all(line is not None and "error" not in line for line in arm_lines):
                outcomes = []  # scores and curves, without costs
                for line in filter(None, arm_lines):
                    curve = {n: v for n, v in line["curve"].items() if n not in ("bytes", "flops")}
                    outcomes.append([line["val"], line["test"], curve])
                groups.setdefault(json.dumps(outcomes), []).append(self.names[arm])
        return [names for names in groups.values() if len(names) > 1]

    def _untrained(self) -> list[str]:
        """Return what predicts ratings without training, for each point."""
        notes = []
        for point in self._points:
            lines = without_errors(self.lines_of(point))
            scores_by_line = [line["untrained"] for line in lines if "untrained" in line]
            metric = self._metric(lines)
            texts = []
            for name in scores_by_line[0] if scores_by_line else ():
                values = [line_scores[name].get(metric.name) for line_scores in scores_by_line]
                if None not in values:
                    texts.append(f"{name} {metric.text(sum(values) / len(values))}")
            if texts:
                point_text = f" ({', '.join(map(str, point))})" if len(self._points) > 1 else ""
                notes.append(
                    f"without training, test {metric.title}{point_text}: {', '.join(texts)}"
                )
            worse = {
                self.names[arm]: None
                for arm in self._arms_at(point)
                for line in without_errors(self.lines_of(point, arm))
                if better_untrained(
                    metric,
                    line["test"][line["judge"]],
                    {n: s for n, s in line.get("untrained", {}).items() if n != ALL_BIASES},
                )
            }
            if worse:
                notes.append(f"worse than without training in some run: {', '.join(worse)}")
        return notes

    def _cautions(self) -> list[str]:
        """Return cautions about arms that are trained with the defaults of their methods."""
        arms_by_caution: dict[str, dict[str, None]] = {}
        for cell in self.cells:
            method = find_method(cell.config, cell.method)
            default_config = replace(cell.config, optimizer=None, lr=None, local_epochs=None)
            values, default_values = (
                fill_defaults(c, choose(c, cell.method)) for c in (cell.config, default_config)
            )
            has_ratings = cell.config.model in RATING_MODELS
            caution = method.caution_on("ratings" if has_ratings else "labels of nodes")
            if caution and values == default_values:
                arms_by_caution.setdefault(caution, {})[self.names[self.arm_of[cell]]] = None
        return [f"{', '.join(names)}: {caution}" for caution, names in arms_by_caution.items()]

    def _without_options(self) -> list[str]:
        """Return which runs have not the options that tables are of, a line for each option."""
        keys = self.point_keys
        notes, options = (
            [],
            [key for key in keys if any(key in c.config.options for c in self.cells)],
        )
        for key in options:
            none = []
            for arm, name in self.names.items():
                cells = [cell for cell, _ in self._select(arm=arm)]
                without = [c.labels for c in cells if key not in c.config.options]
                at = (", ".join(f"{k}={e[k]}" for k in keys if k not in options) for e in without)
                is_of_all = len(without) == len(cells)
                part = "" if is_of_all else f" at {' and '.join(dict.fromkeys(at))}"
                none += [f"{name}{part}"] if without else []
            if none:
                notes.append(
                    f"without option {key}, alike for each of its values: {', '.join(none)}"
                )
        return notes

    def _deviations(self) -> list[str]:
        """Return which arms are not what the paper of their method has."""
        arms_by_text: dict[str, dict[str, None]] = {}
        for cell in self.cells:
            method = choose(cell.config, cell.method).method
            if (text := method.part.deviation(method.options)) is not None:
                arms_by_text.setdefault(text, {})[self.names[self.arm_of[cell]]] = None
        return [f"{', '.join(names)}: {text}" for text, names in arms_by_text.items()]

    @cached_property
    def ranking(self) -> Ranking | None:
        """Ranks over data sets; None below two arms or three data sets, and where more is varied.

        Arms without a score on one of the data sets are in no rank.
        """
        if self.point_keys != ("dataset",) or len(self._points) < FEWEST_DATA_SETS:
            return None
        goodness: dict[str, list[float]] = {arm: [] for arm in self.arms}
        for row in self.rows:
            if row["view"] is not None:
                mean = row[f"{row['view']}_mean"]
                goodness[row["arm"]].append(METRICS[row["metric"]].goodness(mean))
        scores = {
            arm: values for arm, values in goodness.items() if len(values) == len(self._points)
        }
        return rank_arms(scores) if len(scores) >= FEWEST_ARMS else None

    @property
    def failed(self) -> list[str]:
        """One line of text for each cell that failed."""
        pairs = self._select()
        return [f"{c.name}: {line['error']}" for c, line in pairs if line and "error" in line]

    @property
    def failed_alike(self) -> list[str]:
        """The same, with one line for seeds that failed with the same error."""
        seeds: dict[tuple[str, str], list[str]] = {}
        for cell, line in self._select():
            if line is not None and "error" in line:
                labels = {name: value for name, value in cell.labels.items() if name != "seed"}
                seeds.setdefault((words_of(labels), line["error"]), []).append(
                    str(cell.labels["seed"])
                )
        return [
            f"{name}, seed{'s' * (len(failed_seeds) > 1)} {', '.join(failed_seeds)}: {error}"
            for (name, error), failed_seeds in seeds.items()
        ]

    @property
    def legend(self) -> str:
        """What the tables of scores show."""
        metric_texts = " and ".join(
            f"{metric.name} on test nodes, {'higher' if metric.higher else 'lower'} is better"
            for metric in self.metrics
        )
        return (
            f"mean ± sample standard deviation over seeds, {metric_texts}; * best mean of its view"
        )

    @property
    def notes(self) -> list[str]:
        """What a reader of the numbers must know."""
        request = self.request
        notes = [self.legend, *self._test_notes(), *(self.ranking.notes if self.ranking else [])]
        arms_by_description = self._arms_by_server_view()
        if len(arms_by_description) > 1:
            texts = "; ".join(
                f"{', '.join(names)}: {description}"
                for description, names in arms_by_description.items()
            )
            notes.append(f"the server view sees a node differently ({texts}); the uncut view alike")
        if self.tests and request.baseline is None and len(request.seeds) > 1:
            notes.append(
                "the reference is the best mean of the same scores, which favors it: p-values are "
                "too small; name a baseline to avoid that"
            )
        notes += [
            f"{' and '.join(names)} have the same scores and losses in every round: with these "
            "settings they are the same method"
            for names in self._identical_arms()
        ]
        notes += self._without_options()
        notes += self._still_improving()
        notes += self._untrained()
        notes += self._cautions()
        notes += self._deviations()
        if any(row["diverged"] or row["failed"] for row in self.rows):
            notes.append(
                "means and tests leave out seeds without a result, which favors arms that have "
                "such seeds"
            )
        versions = {json.dumps(line["versions"], sort_keys=True) for line in self.lines if line}
        if len(versions) > 1:
            notes.append(f"cells were computed with {len(versions)} sets of versions")
        return notes

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            **asdict(self.request),
            "metric": " ".join(metric.name for metric in self.metrics),
            "rows": self.rows,
            "constants": self.constants,
            "ranking": None if self.ranking is None else asdict(self.ranking),
            "notes": self.notes,
            "failed": self.failed,
            "cells": list(self.lines),
            "folder": self.folder,
        }

    def to_json(self) -> str:
        """Return `to_dict` as one line of JSON."""
        return json.dumps(self.to_dict(), allow_nan=False)

    def to_dataframe(self) -> "pd.DataFrame":
        """Return `rows` as a pandas DataFrame.

        Raises:
            SilographError: pandas is not installed.
        """
        return frame_of(self.rows, "comparison.rows")

    def summary(self, width: int = 140) -> str:
        """Return tables and notes as text of at most so many columns."""

        def print_to(console: Console) -> None:
            for title, columns, rows in _all_tables(self, width):
                words = [word for word in (title_of(self), title) if word]
                print_number_table(console, columns, rows, ": ".join(words))
                console.print()
            for line in self._text_lines():
                console.print(line)

        return printed_text(print_to, width)

    def to_markdown(self) -> str:
        """Return tables and notes as Markdown."""
        parts = [f"# Comparison: {title_of(self)}"]
        for title, columns, rows in _all_tables(self, -math.inf):
            parts += [f"## {title}", markdown_table(columns, rows)]
        parts.append("\n".join(f"- {note}" for note in self.notes))
        if self.failed_alike:
            parts.append("## failed\n\n" + "\n".join(f"- {line}" for line in self.failed_alike))
        return "\n\n".join(parts) + "\n"

    def to_latex(self) -> str:
        """Return tables as LaTeX for the package booktabs, with notes as comments.

        In tables of scores the best mean is bold and the second underlined. With several tables of
        scores, their first is of the tested views, a column for each.
        """
        comments = (title_of(self), "in the preamble: \\usepackage{booktabs}", *self.notes)
        tables = ["\n".join(f"% {line}" for line in comments)]
        points = rows_by_point(self)
        if len(points) > 1:
            tables.append(_latex_of_points(self, points))
        for number, (point, rows, constant) in enumerate(points, start=1):
            of = ": ".join(word for word in (title_of(self), point) if word)
            suffix = f"-{number}" if len(points) > 1 else ""
            tables.append(_latex_of_scores(self, of, rows, constant, f"tab:scores{suffix}"))
            if self.tests:
                tables.append(_latex_of_tests(self, of, rows, f"tab:tests{suffix}"))
        if self.ranking is not None:
            columns, ranks = ranking_table(self, self.ranking)
            texts = [[latex.escape(text) for text in row] for row in ranks]
            caption = f"Mean ranks over {self.ranking.datasets} data sets."
            tables.append(latex.table(caption, "tab:ranking", columns, texts))
        return "\n\n".join(tables) + "\n"

    def to_csv(self) -> str:
        """Return `rows` as CSV; an entry with several words has spaces between them."""
        file = io.StringIO()
        writer = csv.DictWriter(file, list(self.rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, "best": " ".join(row["best"])} for row in self.rows)
        return file.getvalue()


# --- The tables of a comparison, as texts -------------------------------------------------------


WIDE = 140  # columns from which scores and costs stand side by side
Column = tuple[str, Callable[[ComparisonRow], str]]
Titled = tuple[str, list[Column]]


def format_value(row: ComparisonRow, value: float | None, *, signed: bool = False) -> str:
    """Return a score of a row, or a difference of two, in the unit of all tables and files."""
    if value is None:
        return "-"
    text = METRICS[row["metric"]].text(value)
    return f"+{text}" if signed and value >= 0 else text


def small(p: float | None) -> str:
    """Return a p-value."""
    return "-" if p is None else "< .001" if p < 0.001 else f"{p:.3f}".lstrip("0")


def format_cost(value: float | None, unit: float, digits: int) -> str:
    """Return a cost in its unit."""
    return "-" if value is None else decimals(value / unit, digits)


def _score(view: str) -> Column:
    def text(row: ComparisonRow) -> str:
        score = _mean_and_spread(row, row[f"{view}_mean"], row[f"{view}_std"])
        few = f" ({_of_all(row)})" if row["diverged"] or row["failed"] else ""
        return f"{score}{'*' if view in row['best'] else ''}{few}"

    return view, text


def _mean_and_spread(row: ComparisonRow, mean: float | None, spread: float | None) -> str:
    """Return a mean of a row's metric ± its deviation, if there is one."""
    return f"{format_value(row, mean)}{'' if spread is None else f' ± {format_value(row, spread)}'}"


def _of_all(row: ComparisonRow) -> str:
    return f"{row['seeds']} of {row['seeds'] + row['diverged'] + row['failed']}"


def _seeds(row: ComparisonRow) -> str:
    """Return the number of seeds in the means, and what became of the others."""
    without = [f"{row[what]} {what}" for what in ("diverged", "failed") if row[what]]
    return "; ".join([_of_all(row), *without]) if without else str(row["seeds"])


def _tested() -> list[Column]:
    """Return the columns of paired tests."""

    def interval(row: ComparisonRow) -> str:
        if row["low"] is None:
            return "-"
        low, high = (format_value(row, row[end], signed=True) for end in ("low", "high"))
        return f"{low} to {high}"

    def difference(row: ComparisonRow) -> str:
        if row["arm"] == row["reference"]:
            return "reference"
        if row["view"] is None and row["seeds"]:
            return "no common view"
        return format_value(row, row["difference"], signed=True)

    return [
        ("difference", difference),
        ("95 % interval", interval),
        ("p", lambda row: small(row["p"])),
        ("p, Holm", lambda row: small(row["p_holm"])),
        ("view", lambda row: row["view"] or "-"),
        ("pairs", lambda row: "-" if row["pairs"] is None else str(row["pairs"])),
    ]


SCORES: list[Column] = [*(_score(view) for view in VIEWS), ("seeds", _seeds)]
TESTED = _tested()
COST_COLUMNS: list[Column] = [
    ("MB", lambda row: format_cost(row["bytes"], 1e6, 1)),
    ("GFLOP", lambda row: format_cost(row["flops"], 1e9, 1)),
    ("seconds", lambda row: format_cost(row["seconds"], 1, 1)),
    ("peak MB", lambda row: format_cost(row["peak_memory_bytes"], 1e6, 0)),
    ("best round", lambda row: format_cost(row["best_round"], 1, 0)),
]
ROWS: Column = ("rows MB", lambda row: format_cost(row["row_bytes"], 1e6, 1))
BIAS: Column = (
    "local bias",
    lambda row: "-" if row["local_bias"] is None else f"{row['local_bias']:.4g}",
)


def tables_of(comparison: "Comparison", width: float) -> list[Titled]:
    """Return the tables that fit a width."""
    has_local_bias = any(row["local_bias"] is not None for row in comparison.rows)
    has_row_bytes = any(row["row_bytes"] for row in comparison.rows)
    costs = [COST_COLUMNS[0], *[ROWS] * has_row_bytes, *COST_COLUMNS[1:], *[BIAS] * has_local_bias]
    tested = [("paired test", tested_columns(comparison))] * comparison.tests
    if width >= WIDE:
        sections = [
            ("scores, and costs as means of a run", [*SCORES, *costs]),
            *tested,
        ]
    else:
        sections = [("scores", SCORES), *tested, ("costs, mean of a run", costs)]
    return [(title, [name_column(comparison), *columns]) for title, columns in sections]


def _all_tables(
    comparison: "Comparison", width: float
) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield title, columns and rows of each table that fits a width, as texts."""
    for point, rows, constant in rows_by_point(comparison):
        for title, columns in tables_of(comparison, width):
            full_title = ": ".join(word for word in (point, title) if word)
            yield full_title, [name for name, _ in columns], _texts(columns, rows, constant)
    if comparison.ranking is not None:
        yield "ranking", *ranking_table(comparison, comparison.ranking)


def ranking_table(comparison: "Comparison", ranking: Ranking) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows of the ranks over data sets, best first."""
    rows = [
        [
            comparison.names[arm],
            f"{rank:.2f}",
            "best" if arm not in ranking.p_values else f"+{rank - best:.2f}",
            small(ranking.p_values.get(arm)),
        ]
        for best in [min(ranking.mean_ranks.values())]
        for arm, rank in ranking.mean_ranks.items()
    ]
    return [name_column(comparison)[0], "mean rank", "from best", "p, Nemenyi"], rows


def name_column(comparison: "Comparison") -> Column:
    """Return the first column of all tables."""
    names = comparison.names
    are_methods = all(list(labels) == ["method"] for labels in comparison.arms.values())
    return ("method" if are_methods else "arm", lambda row: names[row["arm"]])


def tested_columns(comparison: "Comparison") -> list[Column]:
    """Return the columns of paired tests; if arms have several references, these have a column."""
    references = [{row["reference"] for row in rows} for _, rows, _ in rows_by_point(comparison)]
    names = comparison.names
    against: Column = (
        "against",
        lambda row: "-" if row["arm"] == row["reference"] else names.get(row["reference"], "-"),
    )
    return [*[against] * any(len(each) > 1 for each in references), *TESTED]


def paired_tables(comparison: "Comparison") -> dict[str, Any]:
    """Return scores and paired tests as texts, and the notes on them, for the page of a folder.

    They are those of the terminal, so that both have one unit, one order and one mark of the best.
    """
    name = name_column(comparison)

    def make_rows(columns: Sequence[Column]) -> list[dict[str, Any]]:
        return [
            {
                "title": point,
                "columns": [title for title, _ in columns],
                "rows": _texts(columns, rows, constant),
            }
            for point, rows, constant in rows_by_point(comparison)
        ]

    tests = make_rows([name, *tested_columns(comparison)]) if comparison.tests else []
    if comparison.ranking is not None:
        columns, rows = ranking_table(comparison, comparison.ranking)
        tests.append({"title": "ranking", "columns": columns, "rows": rows})
    return {
        "scores": make_rows([name, *SCORES]),
        "tables": tests,
        "notes": list(comparison.notes),
        "runs": _names_of_runs(comparison),
    }


def _names_of_runs(comparison: "Comparison") -> dict[str, str]:
    """Return the arm and table of each run by its folder; none where settings tell all arms."""
    if not comparison.request.arms:
        return {}
    names = {}
    places = {name: place for place, name in enumerate(comparison.arms)}
    for cell in sorted(comparison.cells, key=lambda cell: places[comparison.arm_of[cell]]):
        varied = [f"{key} {cell.labels[key]}" for key in comparison.point_keys]
        words = [comparison.names[comparison.arm_of[cell]], *varied]
        names[cell.folder_name] = ", ".join(words)
    return names


def rows_by_point(comparison: "Comparison") -> list[tuple[str, list[ComparisonRow], ComparisonRow]]:
    """Return the rows of each table, what it is of in words, and the constant."""
    keys = comparison.point_keys
    grouped_rows = groupby(comparison.rows, key=lambda row: [row[key] for key in keys])
    return [
        (", ".join(f"{k} {value}" for k, value in zip(keys, point, strict=True)), list(rows), last)
        for (point, rows), last in zip(grouped_rows, comparison.constants, strict=True)
    ]


def title_of(comparison: "Comparison") -> str:
    """Return dataset and metric in words."""
    config = comparison.cells[0].config
    varied_values = comparison.request.over
    name = Path(config.dataset).name if is_path(config.dataset) else config.dataset
    words = [] if "dataset" in varied_values else [name]
    words += (
        []
        if "clients" in varied_values or config.clients is None
        else [count_of(config.clients, "client")]
    )
    words += [] if "partition" in varied_values else [config.partition]
    first_labels = {next(iter(labels.values())) for labels in comparison.arms.values()}
    if len(first_labels) == 1 < len(comparison.arms):  # else the names of arms have it
        words += [str(first_labels.pop())]
    return ", ".join(words)


def _texts(
    columns: Sequence[Column], rows: Sequence[ComparisonRow], constant: ComparisonRow
) -> list[list[str]]:
    """Return the rows as text; tables of scores end with the best constant prediction."""
    texts = [[text(row) for _, text in columns] for row in rows]
    if constant["mean"] is None or SCORES[0] not in columns:
        return texts
    text = _mean_and_spread(constant, constant["mean"], constant["std"])
    filled = {v for v in VIEWS if any(row[f"{v}_mean"] is not None for row in rows)}
    ends = [text if name in filled else "-" for name, _ in columns[1:]]
    return [*texts, [constant["name"], *ends]]


# --- The same as LaTeX ---------------------------------------------------------------------------


SPREAD = r"mean $\pm$ sample standard deviation over seeds; best in bold, second underlined"


def _latex_of_points(
    comparison: "Comparison", points: Sequence[tuple[str, list[ComparisonRow], ComparisonRow]]
) -> str:
    """Return the scores of all points in one table, each in the view of its paired tests."""
    columns = []
    for _, rows, _ in points:
        view = next((row["view"] for row in rows if row["view"] is not None), None)
        cells = {} if view is None else _latex_scores(rows, view)
        columns.append([cells.get(arm, "--") for arm in comparison.arms])
    names = map(latex.escape, comparison.names.values())
    titles = [point for point, *_ in points]
    if comparison.point_keys == ("dataset",):
        titles = [Path(str(rows[0]["dataset"])).stem for _, rows, _ in points]
    metrics = " or ".join(metric.title for metric in comparison.metrics)
    return latex.table(
        f"{latex.escape(f'{title_of(comparison)}: test {metrics}')}; {SPREAD}.",
        "tab:scores",
        [latex.escape(name_column(comparison)[0]), *map(latex.escape, titles)],
        [list(row) for row in zip(names, *columns, strict=True)],
    )


def _latex_of_scores(
    comparison: "Comparison",
    title: str,
    rows: Sequence[ComparisonRow],
    constant: ComparisonRow,
    label: str,
) -> str:
    """Return the scores of one point, a column for each view in which there are some."""
    metric = METRICS[rows[0]["metric"]]
    views = [view for view in VIEWS if any(row[f"{view}_mean"] is not None for row in rows)]
    cells = {view: _latex_scores(rows, view) for view in views}
    last_rows = []
    if constant["mean"] is not None:
        text = latex.escape(_mean_and_spread(constant, constant["mean"], constant["std"]))
        last_rows = [[latex.escape(constant["name"]), *[text] * len(views)]]
    return latex.table(
        f"{latex.escape(f'{title}: test {metric.title} by view')}; {SPREAD}.",
        label,
        [latex.escape(name_column(comparison)[0]), *views],
        [
            [latex.escape(comparison.names[row["arm"]]), *(cells[v][row["arm"]] for v in views)]
            for row in rows
        ],
        last_rows,
    )


def _latex_scores(rows: Sequence[ComparisonRow], view: str) -> dict[str, str]:
    """Return the cells of a view by arm, with the best mean in bold and the second underlined."""
    means = {row["arm"]: row[f"{view}_mean"] for row in rows}
    metric = METRICS[rows[0]["metric"]]
    best = metric.best(means.values())
    second = metric.best(mean for mean in means.values() if mean != best)
    cells = {}
    for row in rows:
        mean, spread = row[f"{view}_mean"], row[f"{view}_std"]
        text = latex.escape(_mean_and_spread(row, mean, spread))
        commands = {best: r"\textbf", second: r"\underline"}
        if mean is not None and mean in commands:
            text = f"{commands[mean]}{{{text}}}"
        few = f" ({_of_all(row)})" if row["diverged"] or row["failed"] else ""
        cells[row["arm"]] = f"{text}{few}"
    return cells


def _latex_of_tests(
    comparison: "Comparison", title: str, rows: Sequence[ComparisonRow], label: str
) -> str:
    """Return the paired tests of one point."""
    columns = [name_column(comparison), *tested_columns(comparison)]
    view = next((row["view"] for row in rows if row["view"] is not None), "no common")
    # Signs are those of mathematics, not hyphens.
    number = re.compile(r"[+-][\d.]+")
    return latex.table(
        latex.escape(f"{title}: paired tests by seed, {view} view"),
        label,
        [latex.escape(name) for name, _ in columns if name != "view"],
        [
            [
                text if not n else number.sub(lambda match: f"${match[0]}$", text)
                for n, text in enumerate(
                    latex.escape(text(row)) for name, text in columns if name != "view"
                )
            ]
            for row in rows
        ],
    )
