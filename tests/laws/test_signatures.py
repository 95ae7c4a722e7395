"""Editors and notebooks complete the keywords of `run` and its relatives, and help is readable."""

import dataclasses
import inspect
from typing import Any

import pytest

import silograph as sg
import typed_options
from silograph.core.config import RunConfig

FIELDS = {f.name: f for f in dataclasses.fields(RunConfig)}
LEFT_OUT: dict[str, set[str]] = {
    "run": set(),
    "compare": {"method", "seed"},
    "tune": {"seed"},
}


def test_the_keywords_are_those_of_the_config() -> None:
    text = typed_options.PATH.read_text(encoding="utf-8")
    assert text == typed_options.source(), "the fields of RunConfig changed: make options"


@pytest.mark.parametrize("name", LEFT_OUT)
def test_every_field_is_a_keyword_with_its_default(name: str) -> None:
    parameters = inspect.signature(getattr(sg, name)).parameters
    assert FIELDS.keys() - parameters.keys() == LEFT_OUT[name]
    assert not [p for p in parameters.values() if p.kind is p.VAR_KEYWORD]
    for key in FIELDS.keys() & parameters.keys() - {"options", "method", "metric", "out"}:
        assert parameters[key].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[key].default == FIELDS[key].default


@pytest.mark.parametrize("name", [n for n in sg.__all__ if callable(getattr(sg, n))])
def test_help_names_no_internals(name: str) -> None:
    part: Any = getattr(sg, name)
    functions = [part, *(f for f in vars(part).values() if inspect.isfunction(f))]
    for each in functions:
        with_signature = inspect.isfunction(each) or dataclasses.is_dataclass(each)
        told = str(inspect.signature(each)) if with_signature else ""
        for internal in ("numpy._", "FieldInfo", "_sparsetools", "scipy.sparse._"):
            assert internal not in told
