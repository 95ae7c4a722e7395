"""`tune`: search settings of a method by validation scores alone, then judge the winner once."""

import dataclasses
import hashlib
import json
import logging
import math
import os
import statistics
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Unpack

from rich.console import Console

from silograph.core.config import (
    RunConfig,
    Scalar,
    in_full,
    make_config,
    not_said_again,
    with_keywords,
)
from silograph.core.errors import (
    ConfigError,
    SilographError,
    missing_package,
    mistake,
    reword_error,
    unknown,
)
from silograph.core.files import write_atomic
from silograph.core.numeric_state import standard_numerics
from silograph.core.run_file import write_toml
from silograph.core.setting_values import Range, declared, parse_range
from silograph.core.text import html_lines, html_table
from silograph.experiment.resolve.parts import (
    TABLES,
    check_some_have,
    find_method,
    find_option,
    is_unread,
    named_parts,
    options_of,
    unset_options,
    with_model_for,
)
from silograph.experiment.resolve.resolve import choose, cores_of_run, with_defaults
from silograph.experiment.resolve.run_request import Own, check_identifiable, with_absolute_paths
from silograph.experiment.resolve.user_code import Trust, check_trusted, is_spec, own_code
from silograph.experiment.result_files import frame_of
from silograph.experiment.run.result import VIEWS
from silograph.experiment.run.run import check_mode
from silograph.experiment.run_options import TuneOptions
from silograph.experiment.terminal_table import (
    markdown_table,
    mean_and_deviation,
    print_number_table,
    printed_text,
)
from silograph.methods.base import Method
from silograph.study.cells import APART, Cell, Line, is_final, metric_in
from silograph.study.comparison import VIEW_CHOICES
from silograph.study.study import (
    ExecutionOptions,
    StudyFile,
    check_processes,
    load_study_data,
    read_lines,
    run_missing_cells,
)
from silograph.study.study_request import (
    FIELDS,
    StudyBase,
    check_resumable,
    check_study_folder,
    checked_list,
    checked_mapping,
    checked_seeds,
    parse_base,
    read_plan,
    write_plan,
)
from silograph.study.workers import say
from silograph.task.metric_table import METRICS, Metric, added

# --- What a search leaves: every trial, and the winner's scores; as table or data -----------------


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
        raise missing_package("optuna", "tune", "tune", SilographError) from None


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


BY_NAME = ("method", "server_optimizer")  # parts whose options say whose they are


def given_keys(run_options: Mapping[str, Any], base: RunConfig, own: Own) -> set[str]:
    """Return the keys of a run and the options of its parts that have a value already."""
    return {*run_options, *(key_of(key, base, own) for key in run_options.get("options", {}))}


def key_of(key: Any, base: RunConfig, own: Own) -> Any:
    """Return the one name of a key: NAME of a field or a `BY_NAME` option, else PART.NAME."""
    if not isinstance(key, str) or key in FIELDS:  # `chosen_ranges` refuses what is no text
        return key
    try:
        kind, name = find_option(key, named_parts(base, own.methods.get(base.method)))
    except ConfigError:  # it is no key; `chosen_ranges` says so
        return key
    return name if kind in BY_NAME else f"{kind}.{name}"


def part_options(base: RunConfig, own: Own) -> "dict[str, dataclasses.Field[Any]]":
    """Return the options of all parts but the method, as `key_of` names them."""
    parts = named_parts(base, own.methods.get(base.method))
    return {
        name if kind in BY_NAME else f"{kind}.{name}": f
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
        others: options of the other parts, of `part_options`.

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
            raise ConfigError(
                f"expected a range for {key}, got none: give --range {key}=LOW:HIGH",
                **mistake("missing-option", "range"),
            )
        if key in fixed:
            raise ConfigError(
                f"expected {key} either with a value or searched, got both: leave one of them out",
                **mistake("repeated-option", key),
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
            f"{value!r}",
            **mistake("option-value", key, repr(value)),
        )
    try:
        return parse_range(str(value))  # what the plan of a search says
    except ConfigError as error:
        raise reword_error(error, f"range of {key}: {error}", ConfigError) from None


def check_ends(space: Space) -> None:
    """Raise `ConfigError` where a config cannot have the ends or choices of a range."""
    base = space.base
    ends_by_kind = {kind: space.ranges[kind].ends for kind in TABLES if kind in space.ranges}
    check_some_have({*base.call_options, *space.ranges}, base.config, ends_by_kind)
    for key, values in space.ranges.items():
        for value in values.ends:
            config = space.config({key: value})
            choose(config, base.own.methods.get(config.method))


# --- The search -----------------------------------------------------------------------------------


# --- A search's folder: its plan, and the settings that it tries, in their order -----------------


LOG = logging.getLogger("silograph")
PLAN, LINES, WINNER, PAGE, BEST = (
    *("tune.json", "tune.jsonl", "winner.jsonl", "tune.md"),
    "best.toml",
)


def read_search_plan(folder: Path) -> dict[str, Any]:
    """Return the plan of a search; see `read_plan`."""
    needed = ("ranges", "seeds", "trials", "asked")
    plan = read_plan(folder / PLAN, "search", needed)
    try:
        return plan | {"asked": [dict(params) for params in plan["asked"]]}
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"expected the plan of a search in {folder / PLAN}, got: {error}",
            **mistake("damaged-file", folder / PLAN),
        ) from None


def read_proposed_params(space: Space, out: Path | None) -> list[TrialParams]:
    """Return the settings that an existing search has proposed, in their order.

    Raises:
        ConfigError: the folder holds another search.
    """
    if out is None or not (out / PLAN).is_file():
        return []
    plan, current_plan = read_search_plan(out), json.loads(json.dumps(space.to_dict()))
    plan_config, now_config = (
        make_config(p["config"], source=str(out)) for p in (plan, current_plan)
    )
    different_keys = [
        key for key in current_plan if key != "config" and plan.get(key) != current_plan[key]
    ]
    different_keys += [] if plan_config == now_config else ["config"]
    if different_keys:
        raise ConfigError(
            f"expected a folder of this search, got {out} with another {different_keys[0]}: choose "
            "another --out, nothing was overwritten",
            **mistake("existing-output", out),
        )
    proposed: list[TrialParams] = plan["asked"]
    return proposed


def is_search(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder is that of a search."""
    return (Path(folder) / PLAN).is_file()


@with_keywords(TuneOptions)
@standard_numerics()
def tune(
    graph: Any = None,
    *,
    trials: int = 30,
    max_minutes: float = math.inf,
    seeds: int | Sequence[int] = 1,
    keys: Sequence[str] | None = None,
    ranges: Mapping[str, Range | str] | None = None,
    view: str = "own",
    search_seed: int = 0,
    processes: int | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: str = "none",
    config: RunConfig | None = None,
    **run_options: Unpack[TuneOptions],
) -> Tuned:
    """Search settings of a method by validation scores; the winner alone is judged on test nodes.

    Args:
        graph: as for `run`.
        trials: settings to try.
        max_minutes: no trial starts later.
        seeds: how many (from 0 on), or which; a trial is judged by their mean.
        keys: fields of `RunConfig` and options of the method to tune; None for all that declare a
            range and have no value in `run_options`.
        ranges: ranges in place of those declared, or of further keys: `Range` or text such as
            `0.001:0.3:log`, `1:5` and `gcn,sage`.
        view: server, uncut, personalized, or own: the view that the method is about.
        search_seed: another one tries other settings.
        processes: as for `compare`; only a search with one process is repeatable.
        out: folder for lines, tables and the best run file; an existing search is resumed. None
            writes nothing.
        progress: `live`, `plain` or `none`, on standard error.
        config: where to start from.
        run_options: fields of `RunConfig`, `method` among them, for all trials; a method or model
            as a value keeps the search in this process.

    Raises:
        SilographError: optuna is not installed, or something cannot be used.
    """
    check_mode(progress)
    check_optuna()
    check_numbers(trials, max_minutes, search_seed)
    if view not in VIEW_CHOICES:
        raise unknown("view", view, VIEW_CHOICES)
    base = parse_base(graph, config, dict(run_options))
    if base.config.tracker is not None:
        raise ConfigError(
            f"expected no tracker of a search, got {base.config.tracker!r}: it would be told the "
            "test scores of trials; track the winner, which is run from its file"
        )
    base_config = replace(base.config, out=None)
    requested_keys = keys if isinstance(keys, Iterable) else ()  # anything else is refused below
    if "model" not in {*(requested_keys or ()), *(ranges or {})}:
        method = base.own.methods.get(base_config.method)
        base_config = with_model_for(base_config, base.graph, method)
    base = replace(base, config=base_config)
    space = Space(base, {}, checked_seeds(seeds), view, search_seed)
    space = replace(space, view=space.method.evaluate.view if view == "own" else view)
    fixed = given_keys(base.call_options, base_config, base.own)
    space = _with_ranges(space, keys, ranges, fixed)
    if keys is None and progress != "none":
        options = {f.name: f for f in dataclasses.fields(space.method.options)}
        options |= part_options(base_config, base.own)
        if fixed_keys := [key for key in declared(FIELDS | options) if key in fixed]:
            say(f"given, and so not searched: {', '.join(fixed_keys)}")
    check_ends(space)
    deadline = None if max_minutes == math.inf else time.monotonic() + 60 * max_minutes
    own_values = [*base.own.names, *added([base_config.metric])]
    num_processes = check_processes(processes, cores_of_run(base_config), own_values)
    execution = ExecutionOptions(num_processes, progress, test=False, deadline=deadline)
    return _search(space, trials, execution, None if out is None else Path(out))


def _with_ranges(
    space: Space,
    keys: Sequence[str] | None,
    ranges: Mapping[str, Range | str] | None,
    fixed: Collection[str],
) -> Space:
    """Return the space with the ranges of `keys`, or of all unfixed keys with a range."""
    base, own, user_ranges = space.base.config, space.base.own, checked_mapping("ranges", ranges)
    requested_keys = (
        None if keys is None else [key_of(key, base, own) for key in checked_list("keys", keys)]
    )
    user_ranges = {key_of(key, base, own): values for key, values in user_ranges.items()}
    ranges_by_key = chosen_ranges(
        space.method, requested_keys, user_ranges, fixed, part_options(base, own)
    )
    if keys is None:  # options that nothing reads are not tried
        parts = named_parts(base, own.methods.get(base.method))
        ranges_by_key = {
            key: values
            for key, values in ranges_by_key.items()
            if key in FIELDS or key in user_ranges or not is_unread(key, parts, base.options)
        }
    return replace(space, ranges=ranges_by_key)


def check_numbers(trials: object, max_minutes: object, search_seed: object) -> None:
    """Raise `ConfigError` for a budget or a seed that cannot be one."""
    if isinstance(trials, bool) or not isinstance(trials, int) or trials < 1:
        raise ConfigError(
            f"trials: expected at least one, got {trials!r}",
            **mistake("option-value", "trials", trials),
        )
    if not isinstance(max_minutes, int | float) or not max_minutes > 0:
        raise ConfigError(
            f"max_minutes: expected more than 0, got {max_minutes!r}",
            **mistake("option-value", "max_minutes", max_minutes),
        )
    if isinstance(search_seed, bool) or not isinstance(search_seed, int):
        raise ConfigError(
            f"search_seed: expected a whole number, got {search_seed!r}",
            **mistake("option-value", "search_seed", search_seed),
        )


def _search(space: Space, trials: int, execution: ExecutionOptions, out: Path | None) -> Tuned:
    """Run the missing trials, test the winner, and write the results."""
    if out is not None:
        check_study_folder(out, (PLAN, LINES), "search")
        check_identifiable(space.base.own)
    proposed = read_proposed_params(space, out)
    path = None if out is None else out / LINES
    # Read the graph once, unless all trials have run.
    cells = [c for n, params in enumerate(proposed[:trials]) for c in space.cells(n, params)]
    cells += space.cells(len(proposed), {}) if len(proposed) < trials else []
    load_study_data(cells, [] if path is None else read_lines(path), path)
    with StudyFile(path) as file:
        file.warn_of_unchecked()
        finished_trials = _run_trials(space, proposed, trials, execution, file, out)
        best = best_of(finished_trials)
        outcome = Tuned(
            ranges=dict(space.ranges),
            seeds=space.seeds,
            view=space.view,
            trials=tuple(finished_trials),
            best=best,
            config=space.base.config if best is None else space.config(best.params),
            method=space.method.name,
            winner=tuple(_run_winner(space, best, execution, out)),
            folder=None if out is None else str(out),
        )
        if out is not None:
            write_atomic(out / PAGE, outcome.to_markdown())
            if best is not None:
                in_memory = space.base.graph is not None
                config = with_absolute_paths(outcome.config, in_memory=in_memory)
                parts = choose(config, space.base.own.methods.get(config.method))
                run_file = write_toml(with_defaults(config, parts), unset_options(config, parts))
                write_atomic(out / BEST, run_file)
    return outcome


def _run_trials(
    space: Space,
    proposed: list[TrialParams],
    trials: int,
    execution: ExecutionOptions,
    file: StudyFile,
    out: Path | None,
) -> list[Trial]:
    """Run trials up to their number; proposed params are appended to `proposed`."""
    trial_by_number = {
        n: trial_of(space, file, n, proposed[n]) for n in range(min(trials, len(proposed)))
    }

    def finished_trials() -> list[Trial]:
        """Return the finished trials, with the metric of any of their lines."""
        scored_trials = [
            trial for trial in trial_by_number.values() if trial.diverged < len(trial.values)
        ]
        metric = (
            scored_trials[0].metric
            if scored_trials
            else METRICS[space.base.config.metric or "accuracy"]
        )
        return [replace(trial_by_number[n], metric=metric) for n in sorted(trial_by_number)]

    def write_proposed_params() -> None:
        """Write the proposed settings before they are tried."""
        if out is not None:
            plan = space.to_dict() | {"trials": trials, "asked": list(proposed)}
            write_plan(out / PLAN, plan)

    write_proposed_params()

    def iter_cells() -> Iterator[Cell]:
        for number in range(trials):
            if execution.deadline is not None and time.monotonic() >= execution.deadline:
                return
            if number == len(proposed):
                proposed.append(propose(number, space.ranges, finished_trials(), space.seed))
                write_proposed_params()
            yield from space.cells(number, proposed[number])

    def on_cell(cell: Cell, line: Line) -> None:
        del line  # it is in the file already
        number = int(cell.labels["trial"])
        trial_by_number[number] = trial_of(space, file, number, proposed[number])

    run_missing_cells(iter_cells(), file, execution, trials * len(space.seeds), on_cell)
    return finished_trials()


def trial_of(space: Space, file: StudyFile, number: int, params: TrialParams) -> Trial:
    """Return a trial with the values of its finished lines."""
    cells = space.cells(number, params)
    lines = [line for cell in cells if (line := file.find_line(cell.digest)) is not None]
    errors = [line["error"] for line in lines if "error" in line]
    lasting = [line for line in lines if is_final(line)]
    return Trial(
        number=number,
        params=params,
        values=tuple(value_of(line, space.view) for line in lasting),
        error=errors[0] if errors else None,
        whole=len(lasting) == len(cells),
        metric=metric_in(lasting) or METRICS["accuracy"],
    )


def value_of(line: Line, view: str) -> float | None:
    """Return the validation score of a line, None where training diverged."""
    if "error" in line:
        return None
    metric = metric_in([line])
    assert metric is not None  # it has no error
    value: float | None = (line["val"][view] or {}).get(metric.name)
    if value is None:
        raise ConfigError(
            f"expected validation scores in the {view} view, got none of {metric.name}: choose "
            "another --view or --metric, or a split with more validation nodes"
        )
    return value


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """Return the trial with the best mean validation score, the earliest of equals."""
    valid_trials = [trial for trial in trials if trial.mean is not None and trial.error is None]
    return max(valid_trials, key=lambda t: (t.metric.goodness(t.mean), -t.number), default=None)


def _run_winner(
    space: Space, best: Trial | None, execution: ExecutionOptions, out: Path | None
) -> list[Line]:
    """Run the winner once more, this time with its test scores."""
    if best is None:
        return []
    cells = [replace(c, labels={"seed": c.labels["seed"]}) for c in space.cells(0, best.params)]
    with StudyFile(None if out is None else out / WINNER, is_locked=True) as file:
        run_missing_cells(cells, file, replace(execution, test=True, deadline=None), len(cells))
        lines = [file.find_line(cell.digest) for cell in cells]
    return [line for line in lines if line is not None]


@standard_numerics()
def resume_search(
    folder: str | os.PathLike[str],
    *,
    trust: Trust = False,
    processes: int | None = None,
    progress: str = "none",
) -> Tuned:
    """Resume an interrupted search, up to its number of trials.

    `trust` as in `silograph.resume`.

    Raises:
        ConfigError: its plan is unreadable or names code that is not trusted, or its graph was in
            memory.
    """
    plan = read_search_plan(Path(folder))
    check_resumable(plan, folder, "search")
    config = make_config(plan["config"], source=str(Path(folder) / PLAN))
    choices = {kind: str(plan["ranges"].get(kind, "")).split(",") for kind in TABLES}
    code_in_ranges = {
        f"{kind} {word}": word for kind, ws in choices.items() for word in ws if is_spec(word)
    }
    check_trusted(own_code(config) | code_in_ranges, trust, folder)
    return tune(
        config=config,
        trials=plan["trials"],
        keys=list(plan["ranges"]),
        ranges=plan["ranges"],
        seeds=plan["seeds"],
        view=plan["view"],
        search_seed=plan["search_seed"],
        processes=processes,
        out=folder,
        progress=progress,
    )
