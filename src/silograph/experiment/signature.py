"""Signatures that say each keyword, for `help` and for completion in notebooks."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_type_hints

from silograph.core.config import RunConfig

F = TypeVar("F", bound=Callable[..., Any])
FIELDS = {f.name: f for f in fields(RunConfig)}


def with_keywords(options: type) -> Callable[[F], F]:
    """Return a decorator that spells `**options: Unpack[options]` out in a function's signature.

    Type checkers read the annotation; `inspect.signature` would tell people its name alone.

    Args:
        options: a TypedDict whose keys are fields of `RunConfig`, with its defaults.
    """
    spelled = [_keyword(name, kind) for name, kind in get_type_hints(options).items()]

    def spell_out(function: F) -> F:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        new_signature = signature.replace(parameters=[*own, *spelled])
        function.__signature__ = new_signature  # type: ignore[attr-defined]
        return function

    return spell_out


def _keyword(name: str, kind: Any) -> inspect.Parameter:
    default = FIELDS[name].default
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default={} if default is MISSING else default,
        annotation=kind,
    )
