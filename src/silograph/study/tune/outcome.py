"""What a search leaves: every trial, and the winner's scores; as table or data."""

import dataclasses
import hashlib
import json
import logging
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rich.console import Console

from silograph.core.config import RunConfig, Scalar, in_full, not_said_again
from silograph.core.errors import ConfigError, SilographError, unknown
from silograph.core.setting_values import Range, declared, parse_range
from silograph.core.text import html_lines, html_table
from silograph.experiment.resolve.parts import (
    TABLES,
    check_some_have,
    find_method,
    find_option,
    named_parts,
    options_of,
)
from silograph.experiment.resolve.resolve import choose
from silograph.experiment.resolve.run_request import Own
from silograph.experiment.result_files import frame_of
from silograph.experiment.run.result import VIEWS
from silograph.experiment.terminal_table import (
    markdown_table,
    mean_and_deviation,
    print_number_table,
    printed_text,
)
from silograph.methods.base import Method
from silograph.study.cells import APART, Cell, Line
from silograph.study.study_request import FIELDS, StudyBase, checked_list
from silograph.task.metric_table import METRICS, Metric

if TYPE_CHECKING:
    import pandas as pd


# --- What a search tries next: a pure function of its number and of the trials before it ---------
#
# optuna proposes (tree-structured Parzen estimators; Watanabe, "Tree-structured Parzen estimator",
# 2023); it keeps nothing, so a search that was stopped goes on as if it had not been.


TrialParams = Mapping[str, Scalar]


@dataclass(frozen=True)
class Trial:
    """One setting that was tried.

    Attributes:
        number: from 0.
        params: values of the tuned keys.
        values: validation scores by seed, of the seeds that have run; None where training
            diverged.
        error: what went wrong, or None.
        whole: whether every seed has run.
        metric: what the scores are.
    """

    number: int
    params: TrialParams
    values: tuple[float | None, ...]
    error: str | None
    whole: bool
    metric: Metric = METRICS["accuracy"]

    @property
    def diverged(self) -> int:
        """Number of seeds whose training diverged."""
        return sum(value is None for value in self.values)

    @property
    def scores(self) -> tuple[float, ...]:
        """Validation scores by seed, the worst there is where training diverged."""
        worst = 0.0 if self.metric.higher else math.inf
        return tuple(worst if value is None else value for value in self.values)

    @property
    def mean(self) -> float | None:
        """Mean validation score; None unless every seed has one."""
        return sum(self.scores) / len(self.scores) if self.whole and self.scores else None


def check_optuna() -> None:
    """Raise `SilographError` where optuna is not installed."""
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise SilographError(
            "expected optuna for tune, got no such package: pip install 'silograph[tune]'"
        ) from None


def propose(
    number: int, ranges: Mapping[str, Range], before: Sequence[Trial], seed: int
) -> TrialParams:
    """Return the values to try.

    Args:
        number: of the new trial; with `seed` it decides what is drawn.
        ranges: of the tuned keys.
        before: earlier trials; those without a mean are left out.
        seed: of the search.
    """
    import optuna

    optuna.logging.set_verbosity(logging.ERROR)
    distributions = {key: _distribution(r) for key, r in ranges.items()}
    text = f"silograph search {seed} {number}".encode()
    own = int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")
    sampler = optuna.samplers.TPESampler(seed=own)
    higher = not before or before[0].metric.higher
    study = optuna.create_study(direction="maximize" if higher else "minimize", sampler=sampler)
    for trial in before:
        if trial.mean is not None:
            study.add_trial(
                optuna.trial.create_trial(
                    params=dict(trial.params), distributions=distributions, value=trial.mean
                )
            )
    return dict(study.ask(distributions).params)


def _distribution(values: Range) -> Any:
    from optuna import distributions

    if values.kind == "choice":
        return distributions.CategoricalDistribution(values.choices)
    log = values.kind == "log"
    if isinstance(values.low, int) and isinstance(values.high, int):
        return distributions.IntDistribution(values.low, values.high, log=log)
    return distributions.FloatDistribution(values.low, values.high, log=log)


@dataclass(frozen=True, eq=False, repr=False)
class Tuned:
    """The outcome of a search.

    Attributes:
        ranges: what was searched.
        seeds: of every trial.
        view: whose validation scores counted.
        trials: all of them, in the order in which they were proposed.
        best: the winner; None where no trial went well.
        config: the run with the winner's values; its seeds are the base's.
        method: name of the method.
        winner: lines of the winner with its test scores, by seed.
        folder: where it was written, or None.
    """

    ranges: Mapping[str, Range]
    seeds: tuple[int, ...]
    view: str
    trials: tuple[Trial, ...]
    best: Trial | None
    config: RunConfig
    method: str
    winner: tuple[Line, ...]
    folder: str | None = None

    def __repr__(self) -> str:
        """Return the table."""
        return self.summary()

    def _repr_html_(self) -> str:
        title = f"search: {self.method} on {self.config.dataset}"
        return html_table(title, *self._texts()) + html_lines(self.notes)

    @property
    def metric(self) -> Metric:
        """The metric that was searched by."""
        return self.trials[0].metric if self.trials else METRICS["accuracy"]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One dict for each trial: its values and its validation score, never a test score."""
        return [
            {
                "trial": trial.number,
                **trial.params,
                "val_mean": _finite(trial.mean),
                "val_std": _spread(trial.scores),
                "best": self.best is not None and trial.number == self.best.number,
                "diverged": trial.diverged,
                "error": trial.error,
            }
            for trial in self.trials
        ]

    @property
    def test(self) -> dict[str, float | None]:
        """The winner's test score by view, mean over seeds."""
        scored = [line["test"] for line in self.winner if "error" not in line]
        means = {}
        for view in VIEWS:
            scores = (test[view].get(self.metric.name) for test in scored if test[view])
            means[view], _ = mean_and_deviation(scores)
        return means

    @property
    def notes(self) -> list[str]:
        """What a reader of the numbers must know."""
        seeds = ", ".join(map(str, self.seeds))
        what = f"{self.metric.title} on validation nodes"
        notes = [f"val: {what}, {self.view} view, mean over seeds {seeds}"]
        if self.best is None:
            return [*notes, "no trial went well"]
        tests = [f"{v} {self._text(a)}" for v, a in self.test.items() if a is not None]
        tests += self._constant()
        notes.append(f"best: trial {self.best.number}; on test nodes: {', '.join(tests)}")
        notes.append(
            f"its validation score is the best of {len(self.trials)} and so too good; seeds that "
            "were searched with favor it against methods that were not"
        )
        return notes

    def _constant(self) -> list[str]:
        """Return what the best constant prediction has on test nodes, in one text or none."""
        constants = [line["constant"] for line in self.winner if line.get("constant")]
        mean, _ = mean_and_deviation(c["scores"].get(self.metric.name) for c in constants)
        return [] if mean is None else [f"{constants[0]['name']} {self._text(mean)}"]

    def _text(self, value: float) -> str:
        """Return a score in the unit of all tables and files."""
        return self.metric.text(value)

    def _texts(self) -> tuple[list[str], list[list[str]]]:
        rows = []
        for row in sorted(self.rows, key=lambda r: -self.metric.goodness(r["val_mean"])):
            spread = "" if row["val_std"] is None else f" ± {self._text(row['val_std'])}"
            mean = "-" if row["val_mean"] is None else f"{self._text(row['val_mean'])}{spread}"
            if row["diverged"]:
                mean = f"{row['diverged']} of {len(self.seeds)} diverged"
            params = [_short(row[key]) for key in self.ranges]
            rows.append([f"{row['trial']}{'*' if row['best'] else ''}", mean, *params])
        keys = [key.replace("_", " ") for key in self.ranges]  # so that they wrap
        return ["trial", "val", *keys], rows

    def summary(self, width: int = 140) -> str:
        """Return the trials, best first, and notes as text of at most so many columns."""

        def print_to(console: Console) -> None:
            print_number_table(console, *self._texts())
            console.print()
            for note in self.notes:
                console.print(note)

        return printed_text(print_to, width)

    def to_markdown(self) -> str:
        """Return ranges, trials and notes as a page."""
        ranges = [[key, str(values)] for key, values in self.ranges.items()]
        parts = [
            f"# Search: {self.method} on {self.config.dataset}",
            markdown_table(["key", "range"], ranges),
            markdown_table(*self._texts()),
            "\n".join(f"- {note}" for note in self.notes),
        ]
        return "\n\n".join(parts) + "\n"

    def to_json(self) -> str:
        """Return everything as one line of JSON."""
        values = {
            "method": self.method,
            "ranges": {key: str(r) for key, r in self.ranges.items()},
            "seeds": self.seeds,
            "view": self.view,
            "metric": self.metric.name,
            "trials": self.rows,
            "best": None if self.best is None else dict(self.best.params),
            "test": self.test,
            "winner": list(self.winner),
            "notes": self.notes,
            "folder": self.folder,
        }
        return json.dumps(values, allow_nan=False)

    def to_dataframe(self) -> "pd.DataFrame":
        """Return `rows` as a pandas DataFrame.

        Raises:
            SilographError: pandas is not installed.
        """
        return frame_of(self.rows, "tuned.rows")


def _finite(mean: float | None) -> float | None:
    return mean if mean is not None and math.isfinite(mean) else None


def _spread(scores: tuple[float, ...]) -> float | None:
    return statistics.stdev(scores) if len(scores) > 1 and all(map(math.isfinite, scores)) else None


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


# --- What a search tries: keys with their ranges, over a run -------------------------------------


NO_FIELDS: Mapping[str, "dataclasses.Field[Any]"] = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class Space:
    """The search space: what all trials have in common, ranges, seeds and view.

    Attributes:
        base: of all trials; tuned keys replace its values.
        ranges: of the tuned keys: fields of `RunConfig`, or options of the method.
        seeds: every trial runs with all of them.
        view: whose validation scores count.
        seed: of the search.
    """

    base: StudyBase
    ranges: Mapping[str, Range]
    seeds: tuple[int, ...]
    view: str
    seed: int

    def config(self, params: TrialParams) -> RunConfig:
        """Return the run with these values."""
        fields = {key: value for key, value in params.items() if key in FIELDS}
        options = {key: value for key, value in params.items() if key not in FIELDS}
        set_keys = [*in_full(fields), *options]
        return self.base.vary(fields, options, not_said_again(self.base.config.options, set_keys))

    def cells(self, number: int, params: TrialParams) -> list[Cell]:
        """Return the cells of a trial, one for each seed."""
        config = self.config(params)
        return [
            self.base.cell({"trial": number, "seed": seed}, replace(config, seed=seed))
            for seed in self.seeds
        ]

    @property
    def method(self) -> Method:
        """Return the method."""
        config = self.base.config
        return find_method(config, self.base.own.methods.get(config.method))

    def to_dict(self) -> dict[str, Any]:
        """Return what must be equal for a search to be resumed, as plain values."""
        return {
            **self.base.to_dict(),
            "ranges": {key: str(values) for key, values in self.ranges.items()},
            "seeds": list(self.seeds),
            "view": self.view,
            "search_seed": self.seed,
        }


def given_keys(run_options: Mapping[str, Any], base: RunConfig, own: Own) -> set[str]:
    """Return the keys of a run and the options of its parts that have a value already."""
    return {*run_options, *(key_of(key, base, own) for key in run_options.get("options", {}))}


def key_of(key: Any, base: RunConfig, own: Own) -> Any:
    """Return the one name of a key: NAME of a field or the method's option, else PART.NAME."""
    if not isinstance(key, str) or key in FIELDS:  # `chosen_ranges` refuses what is no text
        return key
    try:
        kind, name = find_option(key, named_parts(base, own.methods.get(base.method)))
    except ConfigError:  # it is no key; `chosen_ranges` says so
        return key
    return name if kind == "method" else f"{kind}.{name}"


def part_options(base: RunConfig, own: Own) -> "dict[str, dataclasses.Field[Any]]":
    """Return the options of all parts but the method, as PART.NAME."""
    parts = named_parts(base, own.methods.get(base.method))
    return {
        f"{kind}.{name}": f
        for kind, part in parts.items()
        if kind != "method"
        for name, f in options_of(part).items()
    }


def chosen_ranges(
    method: Method,
    keys: Sequence[str] | None,
    user_ranges: Mapping[str, Range | str],
    fixed: Collection[str] = (),
    others: Mapping[str, "dataclasses.Field[Any]"] = NO_FIELDS,
) -> dict[str, Range]:
    """Return the ranges of the keys that are tuned.

    Args:
        method: whose options may be tuned.
        keys: keys to tune; None for all that declare a range and have no value yet.
        user_ranges: ranges in place of those declared.
        fixed: keys that have a value already.
        others: options of the other parts, as PART.NAME.

    Raises:
        ConfigError: a key does not exist (names the nearest), has no range or a value already, or
            a range is wrong.
    """
    options = {f.name: f for f in dataclasses.fields(method.options)} | dict(others)
    checked_ranges = {key: checked_range(key, value) for key, value in user_ranges.items()}
    range_by_key = declared(FIELDS | options) | checked_ranges
    requested_keys = [*([] if keys is None else checked_list("keys", keys)), *user_ranges]
    for key in requested_keys:
        if key in APART or (key not in FIELDS and key not in options):
            raise unknown("key to tune", key, declared(FIELDS | options))
        if key not in range_by_key:
            raise ConfigError(f"expected a range for {key}, got none: give --range {key}=LOW:HIGH")
        if key in fixed:
            raise ConfigError(
                f"expected {key} either with a value or searched, got both: leave one of them out"
            )
    tuned_keys = (
        [key for key in range_by_key if key not in fixed] if keys is None else requested_keys
    )
    if not tuned_keys:
        raise ConfigError("expected at least one key to tune, got a value for each: leave one out")
    return {key: range_by_key[key] for key in tuned_keys}


def checked_range(key: str, value: object) -> Range:
    """Parse a range, which may be text; raise `ConfigError` for anything else."""
    if not isinstance(value, str | Range):
        raise ConfigError(
            f"expected a range of {key} as text, such as '0.001:0.3:log', '1:5' or '16,64', got "
            f"{value!r}"
        )
    try:
        return parse_range(str(value))  # what the plan of a search says
    except ConfigError as error:
        raise ConfigError(f"range of {key}: {error}") from None


def check_ends(space: Space) -> None:
    """Raise `ConfigError` where a config cannot have the ends or choices of a range."""
    base = space.base
    ends_by_kind = {kind: space.ranges[kind].ends for kind in TABLES if kind in space.ranges}
    check_some_have({*base.call_options, *space.ranges}, base.config, ends_by_kind)
    for key, values in space.ranges.items():
        for value in values.ends:
            config = space.config({key: value})
            choose(config, base.own.methods.get(config.method))
