"""What comparisons and searches share: the arguments of a call, and the plan in their folder."""

import dataclasses
import json
import logging
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from silograph.core.config import RunConfig, make_config
from silograph.core.errors import ConfigError, SilographError, mistake
from silograph.core.files import check_regular, write_atomic
from silograph.core.setting_values import Scalar
from silograph.core.text import short_repr
from silograph.experiment.resolve.parts import (
    named_parts,
    with_model_for,
    without_foreign_options,
    without_unread,
)
from silograph.experiment.resolve.run_request import (
    CutGraph,
    Own,
    apply_partition,
    merge_config,
    name_of,
    own_of,
    parse_call_arguments,
    with_absolute_paths,
)
from silograph.experiment.result_files import UNCHECKED, with_digest, without_digest
from silograph.graph.datasets import source_of
from silograph.graph.graph import Graph
from silograph.graph.silos.data import Silos
from silograph.study.cells import Cell

LOG = logging.getLogger("silograph")
FIELDS = {f.name: f for f in dataclasses.fields(RunConfig)}


# --- Arguments of a call --------------------------------------------------------------------------


def checked_list(what: str, values: object) -> tuple[Any, ...]:
    """Return a list as a tuple.

    Raises:
        ConfigError: not a list, empty, or with an entry twice.
    """
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise ConfigError(f"expected a list of {what}, got {short_repr(values)}")
    entries = tuple(values)
    if not entries:
        raise ConfigError(f"expected at least one of {what}, got none")
    for number, value in enumerate(entries):
        if value in entries[:number]:
            raise ConfigError(f"expected {what} that differ, got {short_repr(value)} twice")
    return entries


def checked_mapping(what: str, values: object) -> Mapping[str, Any]:
    """Return a mapping, an empty one for None; raise `ConfigError` for anything else."""
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise ConfigError(f"expected {what} as a dict, got {values!r}")
    return values


def checked_seeds(seeds: object) -> tuple[int, ...]:
    """Return seeds: those of a list, or 0, 1, ... for a number.

    Raises:
        ConfigError: below 1, empty, or no whole numbers.
    """
    if isinstance(seeds, int) and not isinstance(seeds, bool):
        if seeds < 1:
            raise ConfigError(
                f"seeds: expected at least one, got {seeds}",
                **mistake("option-value", "seeds", seeds),
            )
        return tuple(range(seeds))
    checked_values = checked_list("seeds", seeds)
    for seed in checked_values:
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ConfigError(f"expected seeds that are whole numbers from 0, got {seed!r}")
    return checked_values


@dataclass(frozen=True, eq=False)
class StudyBase:
    """What the runs of a study have in common.

    Attributes:
        config: of all runs; what a study varies replaces its values.
        graph: the graph, where it is in memory.
        own: parts that are values.
        call_options: fields of the config that the call gave, parts by their names.
    """

    config: RunConfig
    graph: Graph | None
    own: Own
    call_options: Mapping[str, Any]

    def vary(
        self,
        fields: Mapping[str, Any],
        options: Mapping[str, Scalar],
        base_options: Mapping[str, Scalar],
    ) -> RunConfig:
        """Return the config of a run, without options that its parts do not have or read.

        Args:
            fields: values that replace those of the base.
            options: options that are varied.
            base_options: options of the base, without those that are varied.
        """
        values = {name: value for name, value in vars(self.config).items() if value is not None}
        config = make_config(values | dict(fields) | {"options": {**base_options, **options}})
        method = self.own.methods.get(config.method)
        config = with_model_for(config, self.graph, method)
        read_options = without_unread(config.options, options, named_parts(config, method))
        return without_foreign_options(dataclasses.replace(config, options=read_options), method)

    def cell(self, labels: Mapping[str, Scalar], config: RunConfig) -> Cell:
        """Return the cell of a run, with its parts that are values."""
        method, model = self.own.methods.get(config.method), self.own.models.get(config.model or "")
        return Cell(labels, config, self.graph, method, model)

    def to_dict(self) -> dict[str, Any]:
        """Return the beginning of a plan, as plain values."""
        in_memory = self.graph is not None
        base = with_absolute_paths(dataclasses.replace(self.config, out=None), in_memory=in_memory)
        config = {name: v for name, v in dataclasses.asdict(base).items() if v is not None}
        return {"in_memory": in_memory, "values": self.own.names, "config": config}


def parse_base(
    graph: Any,
    config: RunConfig | None,
    run_options: Mapping[str, Any],
    parts: Iterable[Any] = (),
) -> StudyBase:
    """Merge the arguments of a call into what all runs have in common.

    Args:
        graph: as for `run`.
        config: where to start from.
        run_options: fields of the config, in which parts may be values.
        parts: further parts that may be values.

    Raises:
        ConfigError: silos in memory, a seed of one run, or a key or value that cannot be used.
        PartitionError: a partition that is none of this graph.
    """
    if isinstance(graph, Silos):
        raise ConfigError(
            "expected the path of the silos' folder for several runs, got silos in memory: give "
            "the path"
        )
    if "seed" in run_options:
        seed = run_options["seed"]
        raise ConfigError(
            f"expected seeds for several runs, got seed={seed!r}: give seeds=[...]",
            **mistake("conflicting-options", ["seed", "seeds"]),
        )
    own = own_of([*parts, *(run_options.get(kind) for kind in ("method", "model"))])
    call = parse_call_arguments(
        graph, run_options, None if config is None else config.repeated_edges
    )
    options = call.options
    options |= {kind: name_of(options[kind]) for kind in ("method", "model") if kind in options}
    base, _ = merge_config(call.graph, config, options)
    data = call.graph if isinstance(call.graph, Graph) else None
    if call.partition is not None:
        uncut_data = source_of(base).read(base.scale) if data is None else data
        cut_data, base = apply_partition(uncut_data, call.partition, base)
        if isinstance(cut_data, CutGraph):
            raise ConfigError(
                "expected a partition in which every node has one client for several runs, got "
                "another in memory: run it alone with sg.run"
            )
        data = cut_data
    return StudyBase(base, data, own, options)


# --- The folder of a study, which begins with its plan -------------------------------------------


def is_empty(folder: Path) -> bool:
    """Whether a folder is one, and holds nothing."""
    return folder.is_dir() and not any(folder.iterdir())


def check_study_folder(folder: Path, names: Collection[str], what: str) -> None:
    """Raise `ConfigError` where a folder contains something else than a study.

    Args:
        folder: which may not exist yet.
        names: files of which a study has one.
        what: the kind of study.
    """
    is_study = any((folder / name).is_file() for name in names)
    if os.path.lexists(folder) and not is_study and not is_empty(folder):
        raise ConfigError(
            f"expected a folder of a {what}, or none yet, got {folder}: choose another --out, "
            "nothing was overwritten",
            **mistake("existing-output", folder),
        )


def write_plan(path: Path, plan: Mapping[str, Any]) -> None:
    """Write the plan of a study with its digest."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(with_digest(plan), indent=2) + "\n")


def read_plan(path: Path, what: str, needed: Collection[str]) -> dict[str, Any]:
    """Return the plan of a study.

    Args:
        path: of the plan.
        what: the kind of study.
        needed: keys that it must have.

    Raises:
        ConfigError: it is unreadable.
        DataError: it has been altered.
    """
    check_regular(path)
    try:
        saved, has_digest = without_digest(json.loads(path.read_text(encoding="utf-8")), str(path))
        plan = {"values": [], **saved}
        for key in ("in_memory", "config", *needed):
            plan[key]  # raises if it is missing
        make_config(plan["config"], source=str(path))
    except SilographError:
        raise
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"expected the plan of a {what} in {path}, got: {error}",
            **mistake("damaged-file", path),
        ) from None
    if not has_digest:
        LOG.warning("%s", UNCHECKED.format(path))
    return plan


def check_resumable(plan: Mapping[str, Any], folder: str | os.PathLike[str], what: str) -> None:
    """Raise `ConfigError` where what a study had in memory is missing.

    Args:
        plan: of the study.
        folder: of the study.
        what: the kind of study.
    """
    function = {"comparison": "sg.compare", "search": "sg.tune"}[what]
    again = f"call {function} with it and the same out again"
    if plan["in_memory"]:
        raise ConfigError(
            f"expected the graph of the {what} in {folder}, got none: it was made in memory; "
            f"{again}",
            **mistake("part-not-saved", "graph", folder),
        )
    if plan["values"]:
        raise ConfigError(
            f"expected {', '.join(plan['values'])} of the {what} in {folder}, got none: it was "
            f"given as a value; {again}",
            **mistake("part-not-saved", ", ".join(plan["values"]), folder),
        )
