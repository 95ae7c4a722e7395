"""Functions stay short, and take few parameters."""

import ast
from functools import cache
from pathlib import Path

import silograph as sg

ROOT = Path(sg.__file__).parent
MOST_LINES, MOST_PARAMETERS = 60, 10


@cache
def functions() -> list[tuple[str, ast.FunctionDef]]:
    return [
        (f"{path.relative_to(ROOT)}:{node.name}", node)
        for path in sorted(ROOT.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    ]


def lines_of(node: ast.FunctionDef) -> int:
    """Lines of a function without its docstring."""
    said = node.body[0]
    documented = ast.get_docstring(node) is not None
    assert node.end_lineno is not None
    assert said.end_lineno is not None
    docstring = said.end_lineno - said.lineno + 1 if documented else 0
    return node.end_lineno - node.lineno + 1 - docstring


def parameters_of(node: ast.FunctionDef) -> int:
    given = node.args
    names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return sum(name != "self" for name in names)


def test_functions_are_short() -> None:
    long = {name: lines_of(node) for name, node in functions() if lines_of(node) > MOST_LINES}
    assert long == {}


def test_functions_take_few_parameters() -> None:
    """Except where the parameters are the keywords that users of `silograph` are given."""
    many = {name for name, node in functions() if parameters_of(node) > MOST_PARAMETERS}
    assert {name.partition(":")[2] for name in many} <= set(sg.__all__), many
    assert len(many) == 4  # compare, tune, from_arrays, from_csv: a keyword for each thing to say
