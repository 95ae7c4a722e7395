"""`compare`: methods on the same cuts, splits and initial weights, seed by seed."""

import dataclasses
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Unpack

from silograph.core.config import RunConfig, in_full, make_config, not_said_again, with_keywords
from silograph.core.errors import ConfigError, unknown
from silograph.core.files import check_regular
from silograph.core.numeric_state import standard_numerics
from silograph.core.setting_values import Scalar
from silograph.experiment.report import COMPARISON as PLAN
from silograph.experiment.report import LINES, PAIRED
from silograph.experiment.report import TABLES as PAGE
from silograph.experiment.resolve.parts import (
    TABLES,
    check_some_have,
    find_method,
    find_option,
    has_option,
    named_parts,
    owners_of,
    without_method,
)
from silograph.experiment.resolve.resolve import resolve_without_data
from silograph.experiment.resolve.run_request import check_identifiable, name_of
from silograph.experiment.resolve.user_code import Trust, check_trusted, own_code
from silograph.experiment.result_files import with_digest, write_with_sums
from silograph.experiment.run.run import check_mode
from silograph.experiment.run_options import StudyOptions
from silograph.methods.base import Method
from silograph.study.cells import APART, Cell, Line, digest_of, words_of
from silograph.study.comparison import VIEW_CHOICES, Comparison, paired_tables
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


def check(request: ComparisonRequest) -> None:
    """Raise `ConfigError` for names that do not exist."""
    for name in request.options:
        if name not in (*request.methods, *SHARED):
            raise unknown("method or part with options", name, [*request.methods, *SHARED])
    if request.baseline is not None and request.baseline not in request.methods:
        raise unknown("baseline", request.baseline, request.methods)
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
            raise ConfigError(f"{error} (runs of {name})") from None


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
        name: checked_mapping(f"options of {name}", method_options)
        for name, method_options in options_by_method.items()
    }


@with_keywords(StudyOptions)
@standard_numerics()
def compare(
    graph: Any = None,
    *,
    methods: Sequence[str | Method],
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
    """Run methods on the same cuts, splits and initial weights, and compare them seed by seed.

    >>> import silograph as sg
    >>> small = {"clients": 3, "rounds": 2, "hidden": 4}
    >>> table = sg.compare("digits", methods=["local", "fedavg"], seeds=2, processes=0, **small)
    >>> [row["method"] for row in table.rows]
    ['local', 'fedavg']

    Args:
        graph: as for `run`.
        methods: methods, by name or as values.
        seeds: how many (from 0 on), or which.
        over: further fields of `RunConfig`, or options of parts as NAME or PART.NAME, and the
            values that each takes; every method runs with every combination.
        options: options of methods, by method: `{"fedopt": {"server_lr": 0.01}}`.
        baseline: the method that others are tested against; None for the best in the tables.
        metric: the score that is compared, and that picks each run's best round; None is that of
            the task.
        view: of the paired test: server, uncut, personalized, or own: one that all methods have,
            of several the one that most methods are about.
        test: `t` (Student), `resampled` (corrected for splits of one graph that overlap),
            `wilcoxon`, or `auto`: resampled where every seed splits the graph anew, else t.
        processes: runs at the same time, each in a process of its own; None for as many as there
            are cores for their threads, 0 for this process alone, as where methods or models are
            values.
        out: folder for lines, tables and result folders; if it holds the same cells, or part of
            them, they are not run again. None writes nothing.
        progress: `live`, `plain` or `none`, on standard error.
        config: where to start from.
        run_options: fields of `RunConfig`, for all methods.

    Raises:
        SilographError: something about the options, the graph or the folder cannot be used.
    """
    check_mode(progress)
    for method in (checked_methods := checked_list("methods", methods)):
        if not isinstance(method, str | Method):
            raise ConfigError(f"expected methods or their names as methods, got {method!r}")
    values_by_key = checked_over(over)
    models = values_by_key.get("model", ())
    values_by_key |= {"model": tuple(map(name_of, models))} if models else {}
    for key, values in values_by_key.items():
        checked_list(f"values of {key}", values)
    request = ComparisonRequest(
        methods=checked_list("methods", [name_of(method) for method in checked_methods]),
        seeds=checked_seeds(seeds),
        over=values_by_key,
        options=checked_options(options),
        baseline=baseline,
        metric=metric,
        view=view,
        test=test,
    )
    check(request)
    base = parse_base(graph, config, dict(run_options), [*checked_methods, *models])
    if metric is not None:
        base = replace(base, config=replace(base.config, metric=metric))
    request = replace(request, metric=metric or base.config.metric)
    check_some_have({*base.call_options, *request.over}, base.config, request.over)
    own_values = [*base.own.names, *added([request.metric])]
    execution = ExecutionOptions(
        check_processes(processes, base.config.threads, own_values), progress
    )
    plan = ComparisonPlan(request, base)
    cells = plan.cells()
    check_cells(cell for cell in cells if cell.config.seed == request.seeds[0])
    return _run_comparison(plan, cells, execution, None if out is None else Path(out))


@dataclass(frozen=True, eq=False)
class ComparisonPlan:
    """A comparison before it runs.

    Attributes:
        request: what is compared.
        base: what all runs have in common.
    """

    request: ComparisonRequest
    base: StudyBase

    def cells(self) -> list[Cell]:
        """Return the cells, one seed of everything after the other, so that pairs end early.

        Raises:
            ConfigError: a method, an option or a value that cannot be used.
        """
        request, cells = self.request, []
        points = list(product(*request.over.values()))
        for seed, point, method in product(request.seeds, points, request.methods):
            varied = dict(zip(request.over, point, strict=True))
            labels = {"method": method, **varied, "seed": seed}
            cells.append(self.base.cell(labels, self._config(method, varied, seed)))
            _ = cells[-1].start  # a wrong name costs no run
        for key in request.over:
            if key not in FIELDS and not any(key in cell.config.options for cell in cells):
                check_key(key, cells[0].config, cells[0].method)
        return cells

    def _config(self, method: str, varied: Mapping[str, Scalar], seed: int) -> RunConfig:
        """Return the config of a method, without varied options that its parts do not have."""
        fields = {key: value for key, value in varied.items() if key in FIELDS}
        fields |= {"method": method, "seed": seed}
        method_options, value = self._method_options(method), self.base.own.methods.get(method)
        parts = named_parts(self.base.vary(fields, {}, {}), value)
        options = {k: v for k, v in varied.items() if k not in FIELDS and has_option(k, parts)}
        for key, option in product(options, method_options):
            if find_option(key, parts) == find_option(option, parts):
                raise ConfigError(
                    f"expected {key} of {method} either varied or with a value, got both: leave "
                    "one of them out"
                )
        # Options of the base config, without those of another method, and what replaces them.
        base_config, base_options = self.base.config, dict(self.base.config.options)
        if base_options and method != base_config.method:
            base_value = self.base.own.methods.get(base_config.method)
            base_options = without_method(base_config, find_method(base_config, base_value))
        set_keys = [*in_full(fields), *options, *method_options]
        base_options = not_said_again(base_options, set_keys) | method_options
        return self.base.vary(fields | {"out": None}, options, base_options)

    def _method_options(self, method: str) -> dict[str, Scalar]:
        """Return the options for all methods, by part, and those for this one."""
        part_options = {
            f"{kind}.{name}": value
            for kind in SHARED
            if kind not in self.request.methods
            for name, value in self.request.options.get(kind, {}).items()
        }
        own_options = self.request.options.get(method, {})
        return not_said_again(part_options, list(own_options)) | dict(own_options)


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
                "overwritten"
            )
    return lines


def _run_comparison(
    plan: ComparisonPlan, cells: Sequence[Cell], execution: ExecutionOptions, out: Path | None
) -> Comparison:
    """Run the missing cells, write lines and tables, and return the comparison."""
    if out is None:
        load_study_data(cells, [], None)
        with StudyFile(None) as file:
            run_missing_cells(cells, file, execution, len(cells))
        return _collect_comparison(plan, cells, file, None)
    check_identifiable(plan.base.own)
    for name in (PAGE, PAIRED):
        check_regular(out / name)
    load_study_data(cells, _read_checked_lines(out, cells), out / LINES)
    with StudyFile(out / LINES) as file:
        file.warn_of_unchecked()
        for unfinished in (out / "runs").glob(".*"):  # from a process that was killed
            shutil.rmtree(unfinished, ignore_errors=True)
        write_plan(out / PLAN, plan.base.to_dict() | dataclasses.asdict(plan.request))
        run_missing_cells(cells, file, replace(execution, runs=out / "runs"), len(cells))
        comparison = _collect_comparison(plan, cells, file, str(out))
        paired = json.dumps(with_digest(paired_tables(comparison)), indent=2) + "\n"
        write_with_sums(out, {PAGE: comparison.to_markdown(), PAIRED: paired})
    return comparison


def _collect_comparison(
    plan: ComparisonPlan, cells: Sequence[Cell], file: StudyFile, folder: str | None
) -> Comparison:
    lines = tuple(file.find_line(cell.digest) for cell in cells)
    return Comparison(plan.request, tuple(cells), lines, folder)


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
    # The code that a plan names: in its config, its methods and its varied values.
    code = own_code(config)
    varied = {kind: values for kind, values in plan["over"].items() if kind in TABLES}
    for kind, values in {"method": plan["methods"], **varied}.items():
        for number, value in enumerate(values):
            code_of_value = own_code(replace(config, **{kind: value}))
            code |= {f"{kind} {number + 1}": code_of_value[kind]} if kind in code_of_value else {}
    check_trusted(code, trust, folder)
    check_resumable(plan, folder, "comparison")
    arguments = {key: v for key, v in plan.items() if key not in ("in_memory", "values")}
    return compare(config=config, processes=processes, out=folder, progress=progress, **arguments)
