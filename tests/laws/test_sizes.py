"""Functions stay short, and take few parameters."""

import ast
from functools import cache
from pathlib import Path

import silograph as sg

ROOT = Path(sg.__file__).parent
MOST_STATEMENTS, MOST_PARAMETERS = 48, 10


@cache
def functions() -> list[tuple[str, ast.FunctionDef]]:
    return [
        (f"{path.relative_to(ROOT)}:{node.name}", node)
        for path in sorted(ROOT.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    ]


def statements_of(node: ast.FunctionDef) -> int:
    """Statements of a function, nested ones too, and its docstring.

    Lines would count comments and what long names wrap, which are meant to be there.
    """
    return sum(isinstance(each, ast.stmt) for each in ast.walk(node)) - 1


def parameters_of(node: ast.FunctionDef) -> int:
    given = node.args
    names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return sum(name != "self" for name in names)


def test_functions_are_short() -> None:
    counts = {name: statements_of(node) for name, node in functions()}
    assert not {name: count for name, count in counts.items() if count > MOST_STATEMENTS}


def test_functions_take_few_parameters() -> None:
    """Except where the parameters are the keywords that users of `silograph` are given."""
    many = {name for name, node in functions() if parameters_of(node) > MOST_PARAMETERS}
    assert {name.partition(":")[2] for name in many} <= set(sg.__all__), many
    assert len(many) == 4  # compare, tune, from_arrays, from_csv: a keyword for each thing to say
