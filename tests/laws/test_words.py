"""Names that only their authors understood stay away; the list grows as more of them go."""

import ast
from collections.abc import Iterator
from pathlib import Path

import silograph

ROOT = Path(silograph.__file__).parent
RIDDLES = frozenset(
    {"doors", "rests", "standing_behind", "says_all", "meeting", "parting", "venue", "tethered"}
    | {"Urn", "fill", "one_by_one", "asked_again", "spelled_out", "completed", "go_to", "arrived"}
    | {"finite_or_old", "alike_rows", "leaving", "cut_again", "_gone_back", "_begun", "_ending"}
    | {"Venue", "Meeting", "Holder", "Greetings", "greeting", "go_on", "asked_run"}
    | {"behind", "limited", "observed", "told", "taken", "known_values", "tell", "found", "rest"}
    | {"lose", "contribute", "absorb", "hand_in", "lacking", "gives", "takes", "kept", "outgoing"}
    | {"holder", "under", "below", "named", "shown", "counted", "asked", "said"}
)


def identifiers(tree: ast.AST) -> Iterator[str]:
    """Yield the names of variables, attributes, parameters, functions and classes."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name


def test_riddles_are_no_identifiers() -> None:
    assert set(identifiers(ast.parse("class A:\n def f(self, x): return x.go_to"))) & RIDDLES
    used = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in ROOT.rglob("*.py")
        for name in identifiers(ast.parse(path.read_text(encoding="utf-8")))
        if name in RIDDLES
    }
    assert not used
