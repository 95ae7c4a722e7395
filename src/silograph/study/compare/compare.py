"""`compare`: methods on the same cuts, splits and initial weights, seed by seed."""

import dataclasses
import json
import logging
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Unpack

from silograph.core.config import RunConfig, in_full, make_config, not_said_again
from silograph.core.errors import ConfigError, SilographError, unknown
from silograph.core.files import check_regular, write_atomic
from silograph.core.numeric_state import standard_numerics
from silograph.core.setting_values import Scalar
from silograph.core.text import shown
from silograph.experiment.report import COMPARISON as PLAN
from silograph.experiment.report import LINES, PAIRED
from silograph.experiment.report import TABLES as PAGE
from silograph.experiment.resolve.asked_run import (
    Own,
    check_identifiable,
    merge_config,
    name_of,
    own_of,
    with_absolute_paths,
    with_model_for,
)
from silograph.experiment.resolve.cutting import cut_for_studies, refuse_in_memory
from silograph.experiment.resolve.own_partition import parse_call_arguments
from silograph.experiment.resolve.parts import (
    TABLES,
    find_method,
    find_option,
    named_parts,
    own_code,
    owners_of,
)
from silograph.experiment.resolve.resolve import resolve_without_data
from silograph.experiment.resolve.trusted_code import Trust, check_trusted
from silograph.experiment.resolve.varied_parts import (
    check_some_have,
    has_option,
    without_foreign_options,
    without_method,
    without_unread,
)
from silograph.experiment.result_files import (
    UNCHECKED,
    with_digest,
    without_digest,
    write_with_sums,
)
from silograph.experiment.run.run import check_mode
from silograph.experiment.run_options import StudyOptions
from silograph.experiment.signature import with_keywords
from silograph.graph.graph import Graph
from silograph.methods.base import Method
from silograph.study.cells import APART, Cell, Line, digest_of, words_of
from silograph.study.compare.comparison import VIEW_CHOICES, Comparison
from silograph.study.compare.tables import TESTS, ComparisonRequest, Test, paired_tables
from silograph.study.study import (
    ExecutionOptions,
    StudyFile,
    check_processes,
    load_study_data,
    read_lines,
    run_missing_cells,
)
from silograph.task.metric_table import added, metric_of

# --- The request of a comparison, checked before anything runs -----------------------------------


FIELDS = [f.name for f in dataclasses.fields(RunConfig)]
SHARED = ("partition", "model", "neighbors", "selector", "aggregator")  # parts of all methods
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


def checked_list(what: str, values: object) -> tuple[Any, ...]:
    """Return a list as a tuple.

    Raises:
        ConfigError: not a list, empty, or with an entry twice.
    """
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise ConfigError(f"expected a list of {what}, got {shown(values)}")
    entries = tuple(values)
    if not entries:
        raise ConfigError(f"expected at least one of {what}, got none")
    for number, value in enumerate(entries):
        if value in entries[:number]:
            raise ConfigError(f"expected {what} that differ, got {shown(value)} twice")
    return entries


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


def checked_mapping(what: str, values: object) -> Mapping[str, Any]:
    """Return a mapping, an empty one for None; raise `ConfigError` for anything else."""
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise ConfigError(f"expected {what} as a dict, got {values!r}")
    return values


def check_no_seed(run_options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a seed of one run."""
    if "seed" in run_options:
        seed = run_options["seed"]
        raise ConfigError(f"expected seeds for several runs, got seed={seed!r}: give seeds=[...]")


def checked_seeds(seeds: object) -> tuple[int, ...]:
    """Return seeds: those of a list, or 0, 1, ... for a number.

    Raises:
        ConfigError: below 1, empty, or no whole numbers.
    """
    if isinstance(seeds, int) and not isinstance(seeds, bool):
        if seeds < 1:
            raise ConfigError(f"seeds: expected at least one, got {seeds}")
        return tuple(range(seeds))
    checked_values = checked_list("seeds", seeds)
    for seed in checked_values:
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ConfigError(f"expected seeds that are whole numbers from 0, got {seed!r}")
    return checked_values


LOG = logging.getLogger("silograph")


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
    refuse_in_memory(graph)
    call = parse_call_arguments(graph, dict(run_options))
    request, own, options_with_names = _replace_values_by_names(
        ComparisonRequest(
            methods=checked_list("methods", methods),
            seeds=checked_seeds(seeds),
            over=checked_over(over),
            options=checked_options(options),
            baseline=baseline,
            metric=metric,
            view=view,
            test=test,
        ),
        call.options,
    )
    base_config, _ = merge_config(call.graph, config, options_with_names)
    if metric is not None:
        base_config = replace(base_config, metric=metric)
    request = replace(request, metric=metric or base_config.metric)
    check_some_have({*options_with_names, *request.over}, base_config, request.over)
    execution = ExecutionOptions(
        check_processes(processes, base_config.threads, [*own.names, *added([request.metric])]),
        progress,
    )
    graph_in_memory = call.graph if isinstance(call.graph, Graph) else None
    if call.partition is not None:
        graph_in_memory, base_config = cut_for_studies(graph_in_memory, call.partition, base_config)
    plan = ComparisonPlan(request, base_config, own, graph_in_memory)
    cells = plan.cells()
    check_cells(cell for cell in cells if cell.config.seed == request.seeds[0])
    return _run_comparison(plan, cells, execution, None if out is None else Path(out))


def _replace_values_by_names(
    request: ComparisonRequest, run_options: Mapping[str, Any]
) -> tuple[ComparisonRequest, Own, dict[str, Any]]:
    """Replace parts that are values by their names in request and options; also return the parts.

    Raises:
        ConfigError: a name that does not exist, or a seed of one run.
    """
    check_no_seed(run_options)
    for name in request.methods:
        if not isinstance(name, str | Method):
            raise ConfigError(f"expected methods or their names as methods, got {name!r}")
    models = request.over.get("model", ())
    own = own_of([*request.methods, *models, run_options.get("model")])
    over = {**request.over, **({"model": tuple(map(name_of, models))} if models else {})}
    for key, values in over.items():
        checked_list(f"values of {key}", values)
    methods = checked_list("methods", [name_of(method) for method in request.methods])
    request = replace(request, methods=methods, over=over)
    check(request)
    options = dict(run_options)
    if "model" in options:
        options["model"] = name_of(options["model"])
    return request, own, options


@dataclass(frozen=True, eq=False)
class ComparisonPlan:
    """A comparison before it runs.

    Attributes:
        request: what is compared.
        base: the config of all runs; what is compared replaces its values.
        own: parts that are values.
        graph: the graph, where it is in memory.
    """

    request: ComparisonRequest
    base: RunConfig
    own: Own
    graph: Graph | None

    def cells(self) -> list[Cell]:
        """Return the cells, one seed of everything after the other, so that pairs end early.

        Raises:
            ConfigError: a method, an option or a value that cannot be used.
        """
        request, cells = self.request, []
        points = list(product(*request.over.values()))
        for seed, point, method in product(request.seeds, points, request.methods):
            varied = dict(zip(request.over, point, strict=True))
            config = self._config(method, varied, seed)
            labels = {"method": method, **varied, "seed": seed}
            parts = self.own.methods.get(method), self.own.models.get(config.model or "")
            cells.append(Cell(labels, config, self.graph, *parts))
            _ = cells[-1].start  # a wrong name costs no run
        for key in request.over:
            if key not in FIELDS and not any(key in cell.config.options for cell in cells):
                check_key(key, cells[0].config, cells[0].method)
        return cells

    def _config(self, method: str, varied: Mapping[str, Scalar], seed: int) -> RunConfig:
        """Return the config of a method, without varied options that its parts do not have."""
        values = {
            name: method_value
            for name, method_value in vars(self.base).items()
            if method_value is not None
        }
        method_options, method_value = self._method_options(method), self.own.methods.get(method)
        fields = {key: field_value for key, field_value in varied.items() if key in FIELDS}
        base = make_config(values | fields | {"method": method, "options": {}})
        parts = named_parts(with_model_for(base, self.graph, method_value), method_value)
        options = {k: v for k, v in varied.items() if k not in FIELDS and has_option(k, parts)}
        for key, option in product(options, method_options):
            if find_option(key, parts) == find_option(option, parts):
                raise ConfigError(
                    f"expected {key} of {method} either varied or with a value, got both: leave "
                    "one of them out"
                )
        set_keys = [*in_full(fields), *options, *method_options]
        base_options = not_said_again(self._base_options(method), set_keys) | dict(method_options)
        read_options = without_unread(base_options | options, options, parts)
        changes = {**fields, "method": method, "options": read_options, "seed": seed, "out": None}
        config = with_model_for(make_config(values | changes), self.graph, method_value)
        return without_foreign_options(config, method_value)

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

    def _base_options(self, method: str) -> dict[str, Scalar]:
        """Return the options of the base config, without those of another method."""
        if method == self.base.method or not self.base.options:
            return dict(self.base.options)
        base_method = find_method(self.base, self.own.methods.get(self.base.method))
        return without_method(self.base, base_method)

    def to_dict(self) -> dict[str, Any]:
        """Return what `resume` reads: the request, and the config of the runs."""
        in_memory = self.graph is not None
        base = replace(with_absolute_paths(self.base, in_memory=in_memory), out=None)
        config = {k: v for k, v in dataclasses.asdict(base).items() if v is not None}
        plan_values = {"in_memory": in_memory, "values": self.own.names, "config": config}
        return plan_values | dataclasses.asdict(self.request)


def _read_checked_lines(folder: Path, cells: Sequence[Cell]) -> list[Line]:
    """Return the lines of the folder of a comparison, none where there is no folder yet.

    Raises:
        ConfigError: something else is there, or cells that this comparison does not have.
    """
    is_comparison_folder = any((folder / name).is_file() for name in (PLAN, LINES))
    if os.path.lexists(folder) and not is_comparison_folder and not _is_empty(folder):
        raise ConfigError(
            f"expected a folder of a comparison, or none yet, got {folder}: choose another --out, "
            "nothing was overwritten"
        )
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


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def _run_comparison(
    plan: ComparisonPlan, cells: Sequence[Cell], execution: ExecutionOptions, out: Path | None
) -> Comparison:
    """Run the missing cells, write lines and tables, and return the comparison."""
    if out is None:
        load_study_data(cells, [], None)
        with StudyFile(None) as file:
            run_missing_cells(cells, file, execution, len(cells))
        return _collect_comparison(plan, cells, file, None)
    check_identifiable(plan.own)
    for name in (PAGE, PAIRED):
        check_regular(out / name)
    load_study_data(cells, _read_checked_lines(out, cells), out / LINES)
    with StudyFile(out / LINES) as file:
        file.warn_of_unchecked()
        for unfinished in (out / "runs").glob(".*"):  # from a process that was killed
            shutil.rmtree(unfinished, ignore_errors=True)
        write_atomic(out / PLAN, json.dumps(with_digest(plan.to_dict()), indent=2) + "\n")
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


def _collect_code(plan: Mapping[str, Any], config: RunConfig) -> dict[str, str]:
    """Return the code that a plan names: in its config, its methods and its varied values."""
    varied = {kind: values for kind, values in plan["over"].items() if kind in TABLES}
    code = own_code(config)
    for kind, values in {"method": plan["methods"], **varied}.items():
        for number, value in enumerate(values):
            code_of_value = own_code(replace(config, **{kind: value}))
            code |= {f"{kind} {number + 1}": code_of_value[kind]} if kind in code_of_value else {}
    return code


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
    check_regular(path)
    try:
        plan, has_digest = without_digest(json.loads(path.read_text(encoding="utf-8")), str(path))
        in_memory, config = plan.pop("in_memory"), plan.pop("config")
        values = plan.pop("values", [])
        check_trusted(_collect_code(plan, make_config(config, source=str(path))), trust, folder)
    except SilographError:
        raise
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ConfigError(f"expected the plan of a comparison in {path}, got: {error}") from None
    if not has_digest:
        LOG.warning("%s", UNCHECKED.format(path))
    if in_memory:
        raise ConfigError(
            f"expected the graph of the comparison in {folder}, got none: it was made in memory; "
            "call sg.compare with it and the same out again"
        )
    if values:
        raise ConfigError(
            f"expected {', '.join(values)} of the comparison in {folder}, got none: it was given "
            "as a value; call sg.compare with it and the same out again"
        )
    return compare(
        config=make_config(config, source=str(path)),
        processes=processes,
        out=folder,
        progress=progress,
        **plan,
    )
