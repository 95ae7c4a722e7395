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
from silograph.core.errors import ConfigError, DataError, unknown
from silograph.core.files import check_regular, write_atomic
from silograph.core.numeric_state import standard_numerics
from silograph.core.run_file import write_toml
from silograph.core.setting_values import Range, declared
from silograph.experiment.resolve.asked_run import (
    check_identifiable,
    merge_config,
    name_of,
    own_of,
    with_absolute_paths,
    with_model_for,
)
from silograph.experiment.resolve.cutting import cut_for_studies, refuse_in_memory
from silograph.experiment.resolve.own_partition import CallArguments, parse_call_arguments
from silograph.experiment.resolve.parts import TABLES, named_parts, own_code, unset_options
from silograph.experiment.resolve.resolve import choose, with_defaults
from silograph.experiment.resolve.trusted_code import Trust, check_trusted
from silograph.experiment.resolve.user_code import is_spec
from silograph.experiment.resolve.varied_parts import is_unread
from silograph.experiment.result_files import UNCHECKED, with_digest, without_digest
from silograph.experiment.run.run import check_mode
from silograph.experiment.run_options import TuneOptions
from silograph.experiment.signature import with_keywords
from silograph.graph.graph import Graph
from silograph.study.cells import Cell, Line, is_final, metric_in
from silograph.study.compare.compare import (
    check_no_seed,
    checked_list,
    checked_mapping,
    checked_seeds,
)
from silograph.study.compare.comparison import VIEW_CHOICES
from silograph.study.study import (
    ExecutionOptions,
    StudyFile,
    check_processes,
    load_study_data,
    read_lines,
    run_missing_cells,
)
from silograph.study.tune.outcome import (
    FIELDS,
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


def check_folder(out: Path | None) -> None:
    """Raise `ConfigError` where the folder contains something else than a search."""
    if out is None or not os.path.lexists(out) or _is_empty(out):
        return
    if not any((out / name).is_file() for name in (PLAN, LINES)):
        raise ConfigError(
            f"expected a folder of a search, or none yet, got {out}: choose another --out, "
            "nothing was overwritten"
        )


def read_proposed_params(space: Space, out: Path | None) -> list[TrialParams]:
    """Return the settings that an existing search has proposed, in their order.

    Raises:
        ConfigError: the folder holds another search.
    """
    if out is None or not (out / PLAN).is_file():
        return []
    plan, current_plan = read_plan(out), json.loads(json.dumps(space.plan()))
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


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def write_plan(
    space: Space, proposed: Sequence[TrialParams], trials: int, out: Path | None
) -> None:
    """Write the proposed settings before they are tried."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        plan = space.plan() | {"trials": trials, "asked": list(proposed)}
        text = json.dumps(with_digest(plan), indent=2)
        write_atomic(out / PLAN, text + "\n")


def read_plan(folder: Path) -> dict[str, Any]:
    """Return the plan of a search.

    Raises:
        ConfigError: it is unreadable.
    """
    path = folder / PLAN
    check_regular(path)
    try:
        saved, has_digest = without_digest(json.loads(path.read_text(encoding="utf-8")), str(path))
        plan: dict[str, Any] = {"values": []} | saved
        plan["asked"] = [dict(params) for params in plan["asked"]]
        plan |= {key: plan[key] for key in ("in_memory", "config", "ranges", "seeds", "trials")}
    except DataError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"expected the plan of a search in {path}, got: {error}") from None
    if not has_digest:
        LOG.warning("%s", UNCHECKED.format(path))
    return plan


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
    refuse_in_memory(graph)
    check_optuna()
    check_numbers(trials, max_minutes, search_seed)
    if view not in VIEW_CHOICES:
        raise unknown("view", view, VIEW_CHOICES)
    own = own_of([run_options.get("method"), run_options.get("model")])
    call = parse_call_arguments(graph, dict(run_options))
    base_config, graph_in_memory = _base_config(call, config)
    requested_keys = keys if isinstance(keys, Iterable) else ()  # anything else is refused below
    if "model" not in {*(requested_keys or ()), *(ranges or {})}:
        base_config = with_model_for(
            base_config, graph_in_memory, own.methods.get(base_config.method)
        )
    space = Space(base_config, {}, checked_seeds(seeds), view, search_seed, graph_in_memory, own)
    space = replace(space, view=space.method.evaluate.view if view == "own" else view)
    fixed = given_keys(call.options, base_config, own)
    space = _with_ranges(space, keys, ranges, fixed)
    if keys is None and progress != "none":
        _report_fixed_keys(space, fixed)
    check_ends(space, call.options)
    deadline = None if max_minutes == math.inf else time.monotonic() + 60 * max_minutes
    num_processes = check_processes(
        processes, base_config.threads, [*own.names, *added([base_config.metric])]
    )
    execution = ExecutionOptions(num_processes, progress, test=False, deadline=deadline)
    return _search(space, trials, execution, None if out is None else Path(out))


def _with_ranges(
    space: Space,
    keys: Sequence[str] | None,
    ranges: Mapping[str, Range | str] | None,
    fixed: Collection[str],
) -> Space:
    """Return the space with the ranges of `keys`, or of all unfixed keys with a range."""
    base, own, user_ranges = space.base, space.own, checked_mapping("ranges", ranges)
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


def _base_config(call: CallArguments, config: RunConfig | None) -> tuple[RunConfig, Graph | None]:
    """Return the base config of all trials, and its graph where that is in memory.

    Parts that are values are replaced by their names.

    Raises:
        ConfigError: a key or value that it cannot have.
    """
    check_no_seed(call.options)
    options = dict(call.options)
    options |= {key: name_of(options[key]) for key in ("method", "model") if key in options}
    base = replace(merge_config(call.graph, config, options)[0], out=None)
    if base.tracker is not None:
        raise ConfigError(
            f"expected no tracker of a search, got {base.tracker!r}: it would be told the test "
            "scores of trials; track the winner, which is run from its file"
        )
    graph_in_memory = call.graph if isinstance(call.graph, Graph) else None
    if call.partition is not None:
        graph_in_memory, base = cut_for_studies(graph_in_memory, call.partition, base)
    return base, graph_in_memory


def _report_fixed_keys(space: Space, fixed: Collection[str]) -> None:
    options = {f.name: f for f in dataclasses.fields(space.method.options)}
    options |= part_options(space.base, space.own)
    keys = [key for key in declared(FIELDS | options) if key in fixed]
    if keys:
        say(f"given, and so not searched: {', '.join(keys)}")


def _search(space: Space, trials: int, execution: ExecutionOptions, out: Path | None) -> Tuned:
    """Run the missing trials, test the winner, and write the results."""
    check_folder(out)
    if out is not None:
        check_identifiable(space.own)
    proposed = read_proposed_params(space, out)
    path = None if out is None else out / LINES
    _fetch_graphs(space, proposed[:trials], trials, path)
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
            config=space.base if best is None else space.config(best.params),
            method=space.method.name,
            winner=tuple(_run_winner(space, best, execution, out)),
            folder=None if out is None else str(out),
        )
        if out is not None:
            write_atomic(out / PAGE, outcome.to_markdown())
            if best is not None:
                in_memory = space.graph is not None
                config = with_absolute_paths(outcome.config, in_memory=in_memory)
                parts = choose(config, space.own.methods.get(config.method))
                run_file = write_toml(with_defaults(config, parts), unset_options(config, parts))
                write_atomic(out / BEST, run_file)
    return outcome


def _fetch_graphs(
    space: Space, proposed: Sequence[TrialParams], trials: int, path: Path | None
) -> None:
    """Read the graph once, unless all trials have run; see `fetch`."""
    cells = [cell for n, params in enumerate(proposed) for cell in space.cells(n, params)]
    if len(proposed) < trials:
        cells += space.cells(len(proposed), {})
    load_study_data(cells, [] if path is None else read_lines(path), path)


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
            scored_trials[0].metric if scored_trials else METRICS[space.base.metric or "accuracy"]
        )
        return [replace(trial_by_number[n], metric=metric) for n in sorted(trial_by_number)]

    write_plan(space, proposed, trials, out)

    def iter_cells() -> Iterator[Cell]:
        for number in range(trials):
            if execution.deadline is not None and time.monotonic() >= execution.deadline:
                return
            if number == len(proposed):
                proposed.append(propose(number, space.ranges, finished_trials(), space.seed))
                write_plan(space, proposed, trials, out)
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
    plan = read_plan(Path(folder))
    if plan["in_memory"]:
        raise ConfigError(
            f"expected the graph of the search in {folder}, got none: it was made in memory; "
            "call sg.tune with it and the same out again"
        )
    if plan["values"]:
        raise ConfigError(
            f"expected {', '.join(plan['values'])} of the search in {folder}, got none: it was "
            "given as a value; call sg.tune with it and the same out again"
        )
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
