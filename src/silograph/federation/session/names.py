"""Which ops a session runs, by qualified name: silograph's own and users'. Tables are closed.

An op is a public module-level function with the five parameters of an op. What a name of a table
stands for is decided before any message comes: no message loads anything.
"""

import inspect
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FunctionType, ModuleType

from silograph.core.errors import ConfigError, ProtocolError, unknown
from silograph.federation.base import Op
from silograph.federation.program import Program, calls_of

PARAMETERS = ("cfg", "block", "state", "inbox", "key")
PACKAGE = "silograph."
STARRED = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


def module_name(op: Op) -> str:
    """Return what the module of an op is called on every machine.

    A file that was run is a module whose name is its path and a colon; this is the file's name.
    """
    name = op.__module__
    return Path(name[:-1]).name if name.endswith(".py:") else name


def qualified(op: Op) -> str:
    """Return `module:name` of a module-level function."""
    module = module_name(op)
    return f"{module.removeprefix(PACKAGE) if is_library(op) else module}:{op.__name__}"


def is_library(op: Op) -> bool:
    """Return whether an op is one of silograph's own."""
    return op.__module__.startswith(PACKAGE)


def is_op(value: object) -> bool:
    """Return whether a value is an op that a name can stand for."""
    return (
        inspect.isfunction(value)
        and value.__qualname__ == value.__name__
        and not value.__name__.startswith("_")
        and _parameters(value) == PARAMETERS
    )


def _parameters(function: FunctionType) -> tuple[str, ...]:
    """Return the names of a function's parameters; a signature takes far longer."""
    code = function.__code__
    if vars(function) or code.co_kwonlyargcount or code.co_flags & STARRED:
        return tuple(inspect.signature(function).parameters)
    return code.co_varnames[: code.co_argcount]


def ops_in(modules: Iterable[ModuleType]) -> dict[str, Op]:
    """Return the ops that modules define, by qualified name."""
    found: dict[str, Op] = {}
    for module in modules:
        for member, value in vars(module).copy().items():
            if not inspect.isfunction(value) or value.__module__ != module.__name__:
                continue
            if value.__name__ == member and is_op(value):
                found[qualified(value)] = value
    return found


def own_ops() -> dict[str, Op]:
    """Return the ops of all modules of silograph that are loaded, by qualified name."""
    loaded = sys.modules.copy()  # in one step: other threads may be importing
    return ops_in(loaded[name] for name in sorted(loaded) if name.startswith(PACKAGE))


def with_ops(ops: Mapping[str, Op], more: Iterable[Op]) -> dict[str, Op]:
    """Return a table with more ops.

    Raises:
        ConfigError: one of them cannot be named, or has the name of another.
    """
    found = dict(ops)
    for op in more:
        name = qualified(op)
        if not is_op(op):
            raise ConfigError(
                f"expected ops that are public functions of a module with the parameters "
                f"({', '.join(PARAMETERS)}), got {op.__module__}.{op.__qualname__}"
            )
        if found.setdefault(name, op) is not op:
            whose = "silograph has" if is_library(found[name]) else "other code has"
            raise ConfigError(
                f"expected an op with a name of its own, got {name}, which {whose}, too: rename "
                "its module"
            )
    return found


def ops_of(program: Program) -> tuple[Op, ...]:
    """Return the ops that a program calls, each once."""
    both = program.setup, program.round(1), program.round(program.rounds)
    return tuple(dict.fromkeys(call.op for steps in both for call in calls_of(steps)))


def name_of(ops: Mapping[str, Op], op: Op) -> str:
    """Return the name of an op in the table.

    Raises:
        ProtocolError: it is not in the table, so silos could not run it.
    """
    name = qualified(op)
    if ops.get(name) is not op:
        raise ProtocolError(
            f"expected an op of silograph's own modules or of the method's declared calls, got "
            f"{op.__module__}.{op.__qualname__}: no code travels to silos"
        )
    return name


def op_of(ops: Mapping[str, Op], name: str) -> Op:
    """Return the op of a name; raise `ProtocolError` where the table has none."""
    if name not in ops:
        raise ProtocolError(str(unknown("op", name, ops)).split("; choices")[0])
    return ops[name]
