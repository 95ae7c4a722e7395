"""`compare`: arms on the same cuts, splits and initial weights, seed by seed."""

import dataclasses
import json
import os
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, Unpack

from silograph.core.config import RunConfig, in_full, make_config, not_said_again, with_keywords
from silograph.core.errors import ConfigError, canonical_name, mistake, reword_error, unknown
from silograph.core.numeric_state import standard_numerics
from silograph.core.setting_values import Scalar
from silograph.experiment.report import COMPARISON as PLAN
from silograph.experiment.report import LINES
from silograph.experiment.resolve.parts import (
    FLAT,
    TABLES,
    check_some_have,
    find_method,
    find_option,
    has_option,
    named_parts,
    owners_of,
    without_parts,
)
from silograph.experiment.resolve.resolve import cores_of_run, resolve_without_data
from silograph.experiment.resolve.run_request import check_identifiable, name_of
from silograph.experiment.resolve.user_code import Trust, check_trusted, own_code
from silograph.experiment.run.run import check_mode
from silograph.experiment.run_options import StudyOptions
from silograph.methods import METHODS
from silograph.methods.base import Method
from silograph.study.arms import (
    ArmSettings,
    check_own_options,
    checked_arms,
    code_of_arms,
    error_in_arm,
    keys_of_points,
    read_arms,
)
from silograph.study.cells import APART, Cell, Line, digest_of, words_of
from silograph.study.comparison import VIEW_CHOICES, Comparison
from silograph.study.comparison_files import check_files, write_files
from silograph.study.paired_tests import TESTS, ComparisonRequest, Test
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
from silograph.task.metric_table import added, metric_of

# --- The request of a comparison, checked before anything runs -----------------------------------


# Parts of all methods.
SHARED = ("partition", "model", "neighbors", "selector", "aggregator", "server_optimizer")
VARIABLE = [name for name in FIELDS if name not in APART]


def check(request: ComparisonRequest, methods: Collection[str]) -> None:
    """Raise `ConfigError` for names that do not exist.

    Args:
        request: what is compared.
        methods: of all arms.
    """
    for name in request.options:
        if name not in (*methods, *SHARED):
            raise unknown("method or part with options", name, [*methods, *SHARED])
    if request.metric is not None:
        metric_of(request.metric)
    if request.view not in VIEW_CHOICES:
        raise unknown("view", request.view, VIEW_CHOICES)
    if request.test not in TESTS:
        raise unknown("test", request.test, TESTS)
    for key in request.over:
        if isinstance(key, str) and key.startswith("options."):
            raise ConfigError(f"expected NAME or PART.NAME of an option to vary, got {key!r}")
        if not isinstance(key, str) or (key in FIELDS and key not in VARIABLE):
            raise unknown("key to vary", key, VARIABLE)


def check_key(key: str, config: RunConfig, method: Method | None) -> None:
    """Raise `ConfigError` for a key to vary that is neither a field nor an option of these parts.

    Args:
        key: to vary.
        config: of a run.
        method: its method, where that is a value.
    """
    if owners_of(key.rpartition(".")[2]):
        kind, name = find_option(key, named_parts(config, method))
        raise ConfigError(
            f"expected a key that one of these runs reads, got {key}: other options of {kind} say "
            f"that nothing reads {name}: leave it out, or change those"
        )
    raise unknown("key to vary", key, VARIABLE)


def check_cells(cells: Iterable[Cell]) -> None:
    """Raise `ConfigError`, which names the runs, for runs that are impossible with any data."""
    for cell in cells:
        try:
            resolve_without_data(cell.config, cell.method)
        except ConfigError as error:
            name = words_of({key: value for key, value in cell.labels.items() if key != "seed"})
            raise reword_error(error, f"{error} (runs of {name})", ConfigError) from None


def checked_over(over: object) -> dict[str, tuple[Any, ...]]:
    """Return what varies, with the values of every key.

    Raises:
        ConfigError: not a dict of lists.
    """
    values_by_key = checked_mapping("over", over)
    partitions = values_by_key.get("partition", ())
    if not isinstance(partitions, str) and isinstance(partitions, Sequence):
        for partition in partitions:
            if not isinstance(partition, str):
                raise ConfigError(
                    "expected partitions to vary by name or as FILE.csv, got "
                    f"{type(partition).__name__}"
                )
    return {key: checked_list(f"values of {key}", values) for key, values in values_by_key.items()}


def checked_options(options: object) -> dict[str, Mapping[str, Any]]:
    """Return the options of methods; raise `ConfigError` for anything but a dict of dicts."""
    options_by_method = checked_mapping("options", options)
    return {
        canonical_name(str(name), METHODS, "method"): checked_mapping(
            f"options of {name}", method_options
        )
        for name, method_options in options_by_method.items()
    }


@with_keywords(StudyOptions)
@standard_numerics()
def compare(
    graph: Any = None,
    *,
    methods: Sequence[str | Method] = (),
    arms: Mapping[str, Mapping[str, Any]] | str | os.PathLike[str] | None = None,
    seeds: int | Sequence[int] = 3,
    over: Mapping[str, Sequence[Any]] | None = None,
    options: Mapping[str, Mapping[str, Scalar]] | None = None,
    baseline: str | None = None,
    metric: str | None = None,
    view: str = "own",
    test: Test = "auto",
    processes: int | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: str = "none",
    config: RunConfig | None = None,
    **run_options: Unpack[StudyOptions],
) -> Comparison:
    """Run arms on the same cuts, splits and initial weights, and compare them seed by seed.

    >>> import silograph as sg
    >>> small = {"clients": 3, "rounds": 2, "hidden": 4}
    >>> table = sg.compare("digits", methods=["local", "fedavg"], seeds=2, processes=0, **small)
    >>> [row["arm"] for row in table.rows]
    ['local', 'fedavg']
    >>> arms = {"wide": {"method": "fedavg", "hidden": 8}, "GIN": {"model": "gin"}}
    >>> table = sg.compare("digits", arms=arms, seeds=2, processes=0, **small)
    >>> [(row["arm"], row["method"]) for row in table.rows]
    [('wide', 'fedavg'), ('GIN', 'fedopt')]

    Args:
        graph: as for `run`; or a list of names and paths of graphs, which makes tables by dataset
            and, from three on, a ranking.
        methods: methods, by name or as values: each is an arm.
        arms: further arms by name, each with its settings: fields of `RunConfig`, and options of
            parts as NAME or PART.NAME; or the path of a TOML file with `[arms]`. Data, cut and
            split are those of all.
        seeds: how many (from 0 on), or which.
        over: further fields of `RunConfig`, or options of parts as NAME or PART.NAME, and the
            values that each takes; every arm runs with every combination. Values that change the
            data or the cut have tables of their own; those of other keys are arms.
        options: options of methods, by method: `{"fedopt": {"server_lr": 0.01}}`.
        baseline: the arm that others are tested against; None for the best in the tables. A method
            or KEY=VALUE that several arms have: each is tested against the arm that is like it.
        metric: the score that is compared, and that picks each run's best round; None is that of
            the task.
        view: of the paired test: server, uncut, personalized, or own: one that all arms have, of
            several the one that most arms are about.
        test: `t` (Student), `resampled` (corrected for splits of one graph that overlap),
            `wilcoxon`, or `auto`: resampled where every seed splits the graph anew, else t.
        processes: runs at the same time, each in a process of its own; None for as many as there
            are cores for their threads, 0 for this process alone, as where methods or models are
            values.
        out: folder for lines, tables, figures and result folders; if it holds the same cells, or
            part of them, they are not run again. None writes nothing.
        progress: `live`, `plain` or `none`, on standard error.
        config: where to start from.
        run_options: fields of `RunConfig`, for all arms.

    Raises:
        SilographError: something about the options, the graph or the folder cannot be used.
    """
    check_mode(progress)
    checked_methods = () if arms and not methods else checked_list("methods", methods)
    for method in checked_methods:
        if not isinstance(method, str | Method):
            raise ConfigError(f"expected methods or their names as methods, got {method!r}")
    settings = checked_arms(read_arms(arms) if isinstance(arms, str | os.PathLike) else arms)
    graph, values_by_key = _with_datasets(graph, checked_over(over))
    models = values_by_key.get("model", ())
    values_by_key |= {"model": tuple(map(name_of, models))} if models else {}
    for key, values in values_by_key.items():
        checked_list(f"values of {key}", values)
    parts = [s[kind] for s in settings.values() for kind in ("method", "model") if kind in s]
    method_names = [canonical_name(name_of(m), METHODS, "method") for m in checked_methods]
    request = ComparisonRequest(
        methods=checked_list("methods", method_names) if method_names else (),
        arms={
            name: {key: name_of(v) if key in ("method", "model") else v for key, v in s.items()}
            for name, s in settings.items()
        },
        seeds=checked_seeds(seeds),
        over=values_by_key,
        options=checked_options(options),
        baseline=baseline,
        metric=metric,
        view=view,
        test=test,
    )
    base = parse_base(graph, config, dict(run_options), [*checked_methods, *models, *parts])
    check(request, [s.fields.get("method", base.config.method) for s in request.all_arms])
    if metric is not None:
        base = replace(base, config=replace(base.config, metric=metric))
    request = replace(request, metric=metric or base.config.metric)
    set_parts = {k: [*values_by_key.get(k, ()), *_values_of(request, k)] for k in TABLES}
    check_some_have(
        {*base.call_options, *request.over}, base.config, {k: v for k, v in set_parts.items() if v}
    )
    own_values = [*base.own.names, *added([request.metric])]
    execution = ExecutionOptions(
        check_processes(processes, cores_of_run(base.config), own_values), progress
    )
    plan = ComparisonPlan(request, base)
    cells = plan.cells()
    check_cells(cell for cell in cells if cell.config.seed == request.seeds[0])
    comparison = Comparison(request, tuple(cells), (), None, plan.keys_of_points)
    comparison.check_arms()
    return _run_comparison(comparison, base, execution, None if out is None else Path(out))


def _with_datasets(
    graph: Any, over: dict[str, tuple[Any, ...]]
) -> tuple[Any, dict[str, tuple[Any, ...]]]:
    """Return the first graph of a list of names, and what varies with the list; see `compare`.

    Raises:
        ConfigError: an empty list, a name twice, or datasets that are varied, too.
    """
    if not isinstance(graph, list | tuple) or not all(
        isinstance(name, str | os.PathLike) for name in graph
    ):
        return graph, over
    names = checked_list("datasets", [os.fspath(name) for name in graph])
    if "dataset" in over:
        raise ConfigError(
            "expected datasets once, got a list of them and over: leave one out",
            **mistake("repeated-option", "dataset"),
        )
    return graph[0], {"dataset": names, **over}


def _values_of(request: ComparisonRequest, key: str) -> list[Any]:
    """Return the values of a field that arms set."""
    return [s.fields[key] for s in request.all_arms if key in s.fields]


@dataclass(frozen=True, eq=False)
class ComparisonPlan:
    """A comparison before it runs.

    Attributes:
        request: what is compared.
        base: what all runs have in common.
    """

    request: ComparisonRequest
    base: StudyBase

    @cached_property
    def keys_of_points(self) -> tuple[str, ...]:
        """Keys whose values have tables of their own."""
        config = self.base.config
        return keys_of_points(self.request.over, config, self.base.own.methods.get(config.method))

    def cells(self) -> list[Cell]:
        """Return the cells, one seed of everything after the other, so that pairs end early.

        Of values that an arm does not have, such as an option of another sampler, it has the cells
        of one.

        Raises:
            ConfigError: a method, an option or a value that cannot be used.
        """
        request = self.request
        cells: dict[str, Cell] = {}
        points = list(product(*request.over.values()))
        for seed, point, arm in product(request.seeds, points, request.all_arms):
            varied = dict(zip(request.over, point, strict=True))
            try:
                config = self._config(arm, varied, seed)
            except ConfigError as error:
                raise error_in_arm(arm, error) from None
            own = {
                key: value
                for key, value in varied.items()
                if key in self.keys_of_points or _has_value(config, key, value)
            }
            labels = {arm.label[0]: arm.label[1], **own, "seed": seed}
            if (text := json.dumps(labels)) in cells:
                continue
            cells[text] = self.base.cell(labels, config)
            try:
                _ = cells[text].start  # a wrong name costs no run
            except ConfigError as error:
                raise error_in_arm(arm, error) from None
        for key in request.over:
            if key not in FIELDS and not any(key in c.config.options for c in cells.values()):
                first = next(iter(cells.values()))
                check_key(key, first.config, first.method)
        return list(cells.values())

    def _config(self, arm: ArmSettings, varied: Mapping[str, Scalar], seed: int) -> RunConfig:
        """Return the config of an arm, without varied options that its parts do not have."""
        base_config, name = self.base.config, arm.label[1]
        method = arm.fields.get("method", base_config.method)
        fields = {key: value for key, value in varied.items() if key in FIELDS}
        for key in fields:
            if key in arm.fields:
                raise _both_error(key, name)
        fields = {**arm.fields, **fields, "method": method, "seed": seed}
        own_options, value = self._own_options(arm, method), self.base.own.methods.get(method)
        parts = named_parts(self.base.vary(fields, {}, {}), value)
        check_own_options(arm, parts)
        options = {k: v for k, v in varied.items() if k not in FIELDS and has_option(k, parts)}
        for key, option in product(options, own_options):
            if find_option(key, parts) == find_option(option, parts):
                raise _both_error(key, name)
        # Options of the base config, without those of parts that are replaced, and what does that.
        base_options = dict(base_config.options)
        if base_options:
            base_method = find_method(base_config, self.base.own.methods.get(base_config.method))
            base_options = without_parts(base_config, self._replaced(arm, method), base_method)
        set_keys = [*in_full(fields), *options, *own_options]
        base_options = not_said_again(base_options, set_keys) | own_options
        return self.base.vary(fields | {"out": None}, options, base_options)

    def _replaced(self, arm: ArmSettings, method: str) -> set[str]:
        """Return the kinds of parts of which an arm has another than the base config."""
        base_config = self.base.config
        kinds = {k for k in TABLES if k in arm.fields and arm.fields[k] != getattr(base_config, k)}
        return kinds | ({"method"} if method != base_config.method else set())

    def _own_options(self, arm: ArmSettings, method: str) -> dict[str, Scalar]:
        """Return the options for all methods, by part, those for this one, and those of the arm."""
        replaced = self._replaced(arm, method)
        part_options = {
            f"{kind}.{name}": value
            for kind in SHARED
            if kind not in self.request.methods and kind not in replaced
            for name, value in self.request.options.get(kind, {}).items()
        }
        own_options = self.request.options.get(method, {})
        options = not_said_again(part_options, list(own_options)) | dict(own_options)
        set_keys = [*in_full(arm.fields), *arm.options]
        return not_said_again(options, set_keys) | dict(arm.options)


def _both_error(key: str, arm: str) -> ConfigError:
    return ConfigError(
        f"expected {key} of {arm} either varied or with a value, got both: leave one of them out",
        **mistake("repeated-option", key),
    )


def _has_value(config: RunConfig, key: str, value: Scalar) -> bool:
    """Whether a run has a value that is varied: its parts may not have the option."""
    if key not in FIELDS:
        return key in config.options
    return key not in FLAT or value is None or getattr(config, key) is not None


def _read_checked_lines(folder: Path, cells: Sequence[Cell]) -> list[Line]:
    """Return the lines of the folder of a comparison, none where there is no folder yet.

    Raises:
        ConfigError: something else is there, or cells that this comparison does not have.
    """
    check_study_folder(folder, (PLAN, LINES), "comparison")
    lines = read_lines(folder / LINES)
    cell_digests = {cell.digest for cell in cells}
    for line in lines:
        if digest_of(line) not in cell_digests:
            labels = ", ".join(f"{key} {value}" for key, value in line["labels"].items())
            raise ConfigError(
                f"expected a folder whose cells are among those asked for, got {folder} with "
                f"{labels} of another config or source: choose another --out, nothing was "
                "overwritten",
                **mistake("existing-output", folder),
            )
    return lines


def _run_comparison(
    comparison: Comparison, base: StudyBase, execution: ExecutionOptions, out: Path | None
) -> Comparison:
    """Run the missing cells, write lines and tables, and return the comparison."""
    cells = comparison.cells
    if out is None:
        load_study_data(cells, [], None)
        with StudyFile(None) as file:
            run_missing_cells(cells, file, execution, len(cells))
        return _with_lines(comparison, file, None)
    check_identifiable(base.own)
    check_files(out)
    load_study_data(cells, _read_checked_lines(out, cells), out / LINES)
    with StudyFile(out / LINES) as file:
        file.warn_of_unchecked()
        for unfinished in (out / "runs").glob(".*"):  # from a process that was killed
            shutil.rmtree(unfinished, ignore_errors=True)
        write_plan(out / PLAN, base.to_dict() | dataclasses.asdict(comparison.request))
        run_missing_cells(cells, file, replace(execution, runs=out / "runs"), len(cells))
        comparison = _with_lines(comparison, file, str(out))
        write_files(comparison, base, out)
    return comparison


def _with_lines(comparison: Comparison, file: StudyFile, folder: str | None) -> Comparison:
    lines = tuple(file.find_line(cell.digest) for cell in comparison.cells)
    return replace(comparison, lines=lines, folder=folder)


def is_comparison(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder is that of a comparison."""
    return (Path(folder) / PLAN).is_file()


@standard_numerics()
def resume_comparison(
    folder: str | os.PathLike[str],
    *,
    trust: Trust = False,
    processes: int | None = None,
    progress: str = "none",
) -> Comparison:
    """Resume an interrupted comparison; `trust` as in `silograph.resume`.

    Raises:
        ConfigError: its plan is unreadable or names code that is not trusted, or its graph was in
            memory.
    """
    path = Path(folder) / PLAN
    plan = read_plan(path, "comparison", ("methods", "seeds", "over", "options"))
    config = make_config(plan.pop("config"), source=str(path))
    # The code that a plan names: in its config, its arms and its varied values.
    code = own_code(config)
    varied = {kind: values for kind, values in plan["over"].items() if kind in TABLES}
    for kind, values in {"method": plan["methods"], **varied}.items():
        for number, value in enumerate(values):
            code_of_value = own_code(replace(config, **{kind: value}))
            code |= {f"{kind} {number + 1}": code_of_value[kind]} if kind in code_of_value else {}
    code |= code_of_arms(plan.get("arms", {}), config)
    check_trusted(code, trust, folder)
    check_resumable(plan, folder, "comparison")
    arguments = {key: v for key, v in plan.items() if key not in ("in_memory", "values")}
    return compare(config=config, processes=processes, out=folder, progress=progress, **arguments)
