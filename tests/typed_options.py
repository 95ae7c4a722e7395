"""Writes the keywords of `run`, `compare` and `tune` for type checkers: `make options`."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from textwrap import wrap
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BeforeValidator

import silograph
from silograph.core.config import RunConfig
from silograph.experiment.resolve.flat_options import HELP

PATH = Path(silograph.__file__).parent / "experiment" / "run_options.py"
TYPES = {
    "class_weight": "str | os.PathLike[str] | Mapping[str, float] | None",
    "method": "Method | str",
    "model": "Make | str",
    "na_values": "str | Sequence[str | float] | None",
    "options": "Mapping[str, Scalar]",
    "partition": "str | os.PathLike[str] | Partition | Sequence[int] | np.ndarray | Tensor | "
    "Callable[[Graph], Any]",
}
TEXTS = HELP | {
    "out": "result folder (default: none is written)",
    "options": "options of the method and of other chosen parts, as NAME or PART.NAME; parts: "
    "method, partition, model, neighbors, selector, aggregator, server_optimizer (see silograph "
    "parts)",
}
STUDIED = ("method", "options", "metric")  # of all runs of a search; a comparison varies them
OWN = ("seed", "out", "options", "metric")  # of one run, where `method` stands apart
START = '''\
"""Keywords of `run`, `compare` and `tune`, for editors and type checkers.

Made from `RunConfig` by `make options`: change the fields there.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict

import numpy as np
from torch import Tensor

from silograph.core.setting_values import Scalar
from silograph.graph.graph import Graph
from silograph.graph.partition.partition import Partition
from silograph.methods.base import Method
from silograph.nn.own_module import Make
'''


def written(kind: Any) -> str:
    """Return a type of a field as source; bounds are left to the config, which checks them."""
    if get_origin(kind) is Annotated:
        inner, *about = get_args(kind)
        texts = any(isinstance(part, BeforeValidator) for part in about)
        plain = written(inner)
        return f"str | {plain}" if texts and "str" not in plain else plain
    if get_origin(kind) is Literal:
        choices = ", ".join(f'"{choice}"' for choice in get_args(kind))
        return f"Literal[{choices}]"
    if get_origin(kind) in (Union, UnionType):
        return " | ".join(map(written, get_args(kind)))
    if kind is NoneType:
        return "None"
    assert isinstance(kind, type), kind
    return kind.__name__


def typed(name: str, kind: str) -> list[str]:
    """Return the line of a key, or a bracketed type where it is longer than a line."""
    line = f"    {name}: {kind}"
    if len(line) <= 100:
        return [line]
    first, *others = kind.split(" | ")
    return [f"    {name}: (", f"        {first}", *(f"        | {o}" for o in others), "    )"]


def class_of(name: str, base: str, about: str, names: Iterable[str]) -> str:
    """Return the source of a class with these fields of `RunConfig`."""
    lines = [f"class {name}({base}, total=False):", f'    """{about}"""', ""]
    fields = {field.name: field for field in dataclasses.fields(RunConfig)}
    for each in names:
        lines += typed(each, TYPES.get(each) or written(fields[each].type))
        lines += wrap(TEXTS[each], 97, initial_indent='    """', subsequent_indent="    ")
        lines[-1] += '"""'
    return "\n".join(lines) + "\n"


def source() -> str:
    """Return the text of the file."""
    names = [field.name for field in dataclasses.fields(RunConfig)]
    shared = [name for name in names if name not in {*STUDIED, *OWN}]
    parts = [
        class_of("StudyOptions", "TypedDict", "Fields that all runs of a study share.", shared),
        class_of("TuneOptions", "StudyOptions", "Keywords of `tune`.", STUDIED),
        class_of("RunOptions", "StudyOptions", "Keywords of `run`.", OWN),
    ]
    return "\n\n".join([START, *parts])


if __name__ == "__main__":
    PATH.write_text(source(), encoding="utf-8")
