"""Which ops a session runs: silograph's own, by qualified name. The table is closed."""

import inspect
import re
import sys
from collections.abc import Mapping

from silograph.core.errors import ProtocolError, unknown
from silograph.federation.base import Op

PARAMETERS = ("cfg", "block", "state", "inbox", "key")
PACKAGE = "silograph."


def qualified(op: Op) -> str:
    """Return `module:name` of a module-level function."""
    return f"{op.__module__.removeprefix(PACKAGE)}:{op.__name__}"


def own_ops() -> dict[str, Op]:
    """Return the ops of all modules of silograph that are loaded, by qualified name.

    An op is a public module-level function with the five parameters of an op. What a name of the
    table stands for is decided here, before any message comes: no message loads anything.
    """
    found: dict[str, Op] = {}
    loaded = sys.modules.copy()  # in one step: other threads may be importing
    for name in sorted(name for name in loaded if name.startswith(PACKAGE)):
        for member, op in vars(loaded[name]).copy().items():
            if not inspect.isfunction(op) or op.__module__ != name or member.startswith("_"):
                continue
            if op.__name__ == member and tuple(inspect.signature(op).parameters) == PARAMETERS:
                found[qualified(op)] = op
    return found


def name_of(ops: Mapping[str, Op], op: Op) -> str:
    """Return the name of an op in the table.

    Raises:
        ProtocolError: it is not in the table, so silos could not run it.
    """
    name = qualified(op)
    if ops.get(name) is not op:
        raise ProtocolError(
            f"expected an op of silograph's own modules, got {op.__module__}.{op.__qualname__}: "
            "no code travels to silos"
        )
    return name


def op_of(ops: Mapping[str, Op], name: str) -> Op:
    """Return the op of a name; raise `ProtocolError` where the table has none."""
    if name not in ops:
        raise ProtocolError(re.split("; choices| Choices", str(unknown("op", name, ops)))[0])
    return ops[name]
