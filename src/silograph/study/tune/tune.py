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
from silograph.study.cells import Cell, Line, lasts, metric_in
from silograph.study.compare.compare import (
    check_no_seed,
    checked_list,
    checked_mapping,
    checked_seeds,
)
from silograph.study.compare.comparison import VIEW_CHOICES
from silograph.study.study import How, StudyFile, check_processes, fetch, read_lines, run_missing
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
from silograph.task.scores import METRICS, added

# --- A search's folder: its plan, and the settings that it tries, in their order -----------------


LOG = logging.getLogger("silograph")
PLAN, LINES, WINNER, PAGE, BEST = (
    *("tune.json", "tune.jsonl", "winner.jsonl", "tune.md"),
    "best.toml",
)


def check_folder(out: Path | None) -> None:
    """Raise `ConfigError` where something else than a search is."""
    if out is None or not os.path.lexists(out) or _is_empty(out):
        return
    if not any((out / name).is_file() for name in (PLAN, LINES)):
        raise ConfigError(
            f"expected a folder of a search, or none yet, got {out}: choose another --out, "
            "nothing was overwritten"
        )


def asked_params(space: Space, out: Path | None) -> list[TrialParams]:
    """Return the settings of a search that is there, in the order in which they were proposed.

    Raises:
        ConfigError: it is a search of something else.
    """
    if out is None or not (out / PLAN).is_file():
        return []
    plan, now = read_plan(out), json.loads(json.dumps(space.plan()))
    plan_config, now_config = (make_config(p["config"], source=str(out)) for p in (plan, now))
    differs = [key for key in now if key != "config" and plan.get(key) != now[key]]
    differs += [] if plan_config == now_config else ["config"]
    if differs:
        raise ConfigError(
            f"expected a folder of this search, got {out} with another {differs[0]}: choose "
            "another --out, nothing was overwritten"
        )
    asked: list[TrialParams] = plan["asked"]
    return asked


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def write_plan(space: Space, asked: Sequence[TrialParams], trials: int, out: Path | None) -> None:
    """Write what was proposed before it is tried."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        plan = space.plan() | {"trials": trials, "asked": list(asked)}
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
        told, has_digest = without_digest(json.loads(path.read_text(encoding="utf-8")), str(path))
        plan: dict[str, Any] = {"values": []} | told
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
        max_minutes: when to try no more.
        seeds: how many (from 0 on), or which; a trial is judged by their mean.
        keys: fields of `RunConfig` and options of the method to tune; None for all that declare a
            range and that are not given among `run_options`.
        ranges: ranges in place of those declared, or of further keys: `Range` or text such as
            `0.001:0.3:log`, `1:5` and `gcn,sage`.
        view: server, uncut, personalized, or own: the view that the method is about.
        search_seed: another one tries other settings.
        processes: as for `compare`; one process repeats exactly, more try what is then known.
        out: folder for lines, tables and the best run file; a search that is there goes on. None
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
    base, held = _base(call, config)
    named = keys if isinstance(keys, Iterable) else ()  # anything else is refused below
    if "model" not in {*(named or ()), *(ranges or {})}:
        base = with_model_for(base, held, own.methods.get(base.method))
    space = Space(base, {}, checked_seeds(seeds), view, search_seed, held, own)
    space = replace(space, view=space.method.evaluate.view if view == "own" else view)
    fixed = given_keys(call.options, base, own)
    space = _with_ranges(space, keys, ranges, fixed)
    if keys is None and progress != "none":
        _tell_fixed(space, fixed)
    check_ends(space, call.options)
    until = None if max_minutes == math.inf else time.monotonic() + 60 * max_minutes
    at_once = check_processes(processes, base.threads, [*own.names, *added([base.metric])])
    how = How(at_once, progress, test=False, until=until)
    return _searched(space, trials, how, None if out is None else Path(out))


def _with_ranges(
    space: Space,
    keys: Sequence[str] | None,
    ranges: Mapping[str, Range | str] | None,
    fixed: Collection[str],
) -> Space:
    """Return the space with what is tuned: `keys`, or all with a range that are not fixed."""
    base, own, given = space.base, space.own, checked_mapping("ranges", ranges)
    asked = None if keys is None else [key_of(key, base, own) for key in checked_list("keys", keys)]
    given = {key_of(key, base, own): values for key, values in given.items()}
    found = chosen_ranges(space.method, asked, given, fixed, part_options(base, own))
    if keys is None:  # what nothing reads is not worth a trial
        parts = named_parts(base, own.methods.get(base.method))
        found = {
            key: values
            for key, values in found.items()
            if key in FIELDS or key in given or not is_unread(key, parts, base.options)
        }
    return replace(space, ranges=found)


def check_numbers(trials: object, max_minutes: object, search_seed: object) -> None:
    """Raise `ConfigError` for a budget or a seed that cannot be one."""
    if isinstance(trials, bool) or not isinstance(trials, int) or trials < 1:
        raise ConfigError(f"trials: expected at least one, got {trials!r}")
    if not isinstance(max_minutes, int | float) or not max_minutes > 0:
        raise ConfigError(f"max_minutes: expected more than 0, got {max_minutes!r}")
    if isinstance(search_seed, bool) or not isinstance(search_seed, int):
        raise ConfigError(f"search_seed: expected a whole number, got {search_seed!r}")


def _base(call: CallArguments, config: RunConfig | None) -> tuple[RunConfig, Graph | None]:
    """Return the run that settings are tried on, and its graph where that is in memory.

    Parts that are values stand by their names.

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
    held = call.graph if isinstance(call.graph, Graph) else None
    if call.partition is not None:
        held, base = cut_for_studies(held, call.partition, base)
    return base, held


def _tell_fixed(space: Space, fixed: Collection[str]) -> None:
    options = {f.name: f for f in dataclasses.fields(space.method.options)}
    options |= part_options(space.base, space.own)
    keys = [key for key in declared(FIELDS | options) if key in fixed]
    if keys:
        say(f"given, and so not searched: {', '.join(keys)}")


def _searched(space: Space, trials: int, how: How, out: Path | None) -> Tuned:
    """Try what has not been tried, judge the winner, and write all of it."""
    check_folder(out)
    if out is not None:
        check_identifiable(space.own)
    asked = asked_params(space, out)
    path = None if out is None else out / LINES
    _fetch(space, asked[:trials], trials, path)
    with StudyFile(path) as file:
        file.warn_of_unchecked()
        tried = _try(space, asked, trials, how, file, out)
        best = best_of(tried)
        found = Tuned(
            ranges=dict(space.ranges),
            seeds=space.seeds,
            view=space.view,
            trials=tuple(tried),
            best=best,
            config=space.base if best is None else space.config(best.params),
            method=space.method.name,
            winner=tuple(_judged(space, best, how, out)),
            folder=None if out is None else str(out),
        )
        if out is not None:
            write_atomic(out / PAGE, found.to_markdown())
            if best is not None:
                in_memory = space.graph is not None
                config = with_absolute_paths(found.config, in_memory=in_memory)
                parts = choose(config, space.own.methods.get(config.method))
                again = write_toml(with_defaults(config, parts), unset_options(config, parts))
                write_atomic(out / BEST, again)
    return found


def _fetch(space: Space, asked: Sequence[TrialParams], trials: int, path: Path | None) -> None:
    """Read the graph once, unless all trials have run; see `fetch`."""
    cells = [cell for n, params in enumerate(asked) for cell in space.cells(n, params)]
    if len(asked) < trials:
        cells += space.cells(len(asked), {})
    fetch(cells, [] if path is None else read_lines(path), path)


def _try(
    space: Space, asked: list[TrialParams], trials: int, how: How, file: StudyFile, out: Path | None
) -> list[Trial]:
    """Run trials up to their number; `asked` grows by what is proposed."""
    tried = {n: trial_of(space, file, n, asked[n]) for n in range(min(trials, len(asked)))}

    def known() -> list[Trial]:
        """Return what has been tried, by the metric that any trial tells."""
        told = [trial for trial in tried.values() if trial.diverged < len(trial.values)]
        metric = told[0].metric if told else METRICS[space.base.metric or "accuracy"]
        return [replace(tried[n], metric=metric) for n in sorted(tried)]

    write_plan(space, asked, trials, out)

    def source() -> Iterator[Cell]:
        for number in range(trials):
            if how.until is not None and time.monotonic() >= how.until:
                return
            if number == len(asked):
                asked.append(propose(number, space.ranges, known(), space.seed))
                write_plan(space, asked, trials, out)
            yield from space.cells(number, asked[number])

    def ended(cell: Cell, line: Line) -> None:
        del line  # it stands in the file by now
        number = int(cell.labels["trial"])
        tried[number] = trial_of(space, file, number, asked[number])

    run_missing(source(), file, how, trials * len(space.seeds), ended)
    return known()


def trial_of(space: Space, file: StudyFile, number: int, params: TrialParams) -> Trial:
    """Return what is known of a trial."""
    cells = space.cells(number, params)
    lines = [line for cell in cells if (line := file.found(cell.digest)) is not None]
    errors = [line["error"] for line in lines if "error" in line]
    lasting = [line for line in lines if lasts(line)]
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
    good = [trial for trial in trials if trial.mean is not None and trial.error is None]
    return max(good, key=lambda t: (t.metric.goodness(t.mean), -t.number), default=None)


def _judged(space: Space, best: Trial | None, how: How, out: Path | None) -> list[Line]:
    """Run the winner once more, this time with its test scores."""
    if best is None:
        return []
    cells = [replace(c, labels={"seed": c.labels["seed"]}) for c in space.cells(0, best.params)]
    with StudyFile(None if out is None else out / WINNER, held=True) as file:
        run_missing(cells, file, replace(how, test=True, until=None), len(cells))
        lines = [file.found(cell.digest) for cell in cells]
    return [line for line in lines if line is not None]


@standard_numerics()
def resume_search(
    folder: str | os.PathLike[str],
    *,
    trust: Trust = False,
    processes: int | None = None,
    progress: str = "none",
) -> Tuned:
    """Go on with a search that was interrupted, up to the trials that it was asked for.

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
    named = {f"{kind} {word}": word for kind, ws in choices.items() for word in ws if is_spec(word)}
    check_trusted(own_code(config) | named, trust, folder)
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
