"""`tune`: search settings of a method by validation scores alone, then judge the winner once."""

import dataclasses
import json
import logging
import math
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from silograph.core.config import RunConfig, make_config
from silograph.core.errors import ConfigError, unknown
from silograph.core.files import write_atomic
from silograph.core.numeric_state import standard_numerics
from silograph.core.run_file import write_toml
from silograph.core.setting_values import Range, declared
from silograph.experiment.resolve.parts import (
    TABLES,
    is_unread,
    named_parts,
    unset_options,
    with_model_for,
)
from silograph.experiment.resolve.resolve import choose, with_defaults
from silograph.experiment.resolve.run_request import check_identifiable, with_absolute_paths
from silograph.experiment.resolve.user_code import Trust, check_trusted, is_spec, own_code
from silograph.experiment.run.run import check_mode
from silograph.experiment.run_options import TuneOptions
from silograph.experiment.signature import with_keywords
from silograph.study.cells import Cell, Line, is_final, metric_in
from silograph.study.compare.comparison import VIEW_CHOICES
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
    check_resumable,
    check_study_folder,
    checked_list,
    checked_mapping,
    checked_seeds,
    parse_base,
    read_plan,
    write_plan,
)
from silograph.study.tune.outcome import (
    Space,
    Trial,
    TrialParams,
    Tuned,
    check_ends,
    check_optuna,
    chosen_ranges,
    given_keys,
    key_of,
    part_options,
    propose,
)
from silograph.study.workers import say
from silograph.task.metric_table import METRICS, added

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
            f"expected the plan of a search in {folder / PLAN}, got: {error}"
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
            "another --out, nothing was overwritten"
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
    num_processes = check_processes(processes, base_config.threads, own_values)
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
        raise ConfigError(f"trials: expected at least one, got {trials!r}")
    if not isinstance(max_minutes, int | float) or not max_minutes > 0:
        raise ConfigError(f"max_minutes: expected more than 0, got {max_minutes!r}")
    if isinstance(search_seed, bool) or not isinstance(search_seed, int):
        raise ConfigError(f"search_seed: expected a whole number, got {search_seed!r}")


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
