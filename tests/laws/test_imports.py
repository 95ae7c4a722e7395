"""Imports run one way, and importing costs nothing that is not used."""

import ast
import subprocess
import sys
from pathlib import Path

import silograph

ROOT = Path(silograph.__file__).parent
LAYERS = [
    {"core"},
    {"graph"},
    {"nn"},
    {"federation"},
    {"sampling", "selection", "aggregation", "evaluation", "recommendation"},
    {"methods"},
    {"experiment"},
    {"recipes"},
    {"cli", "__init__"},
    {"__main__"},
]


def layer_of(room: str) -> int:
    return next(number for number, rooms in enumerate(LAYERS) if room in rooms)


def imported_rooms(source: str) -> set[str]:
    """Rooms of silograph that a file imports, wherever in the file."""
    modules = [
        name
        for node in ast.walk(ast.parse(source))
        for name in (
            [node.module]
            if isinstance(node, ast.ImportFrom) and node.module
            else [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else []
        )
    ]
    return {m.split(".")[1] for m in modules if m.startswith("silograph.")}


def test_the_check_sees_imports_inside_functions() -> None:
    assert imported_rooms("def f():\n    from silograph.nn.conv import GCN") == {"nn"}


def test_imports_run_one_way() -> None:
    backwards = []
    for path in ROOT.rglob("*.py"):
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        for other in imported_rooms(path.read_text()):
            same_room = room == other
            if not same_room and layer_of(other) >= layer_of(room):
                backwards.append(f"{path.relative_to(ROOT)} imports {other}")
    assert not backwards


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys; from silograph.cli import run_app; run_app(['--help']); "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode
        == 0
    )


def test_public_names() -> None:
    assert sorted(silograph.__all__) == silograph.__all__
    for name in silograph.__all__:
        assert getattr(silograph, name) is not None
    assert set(dir(silograph)) == {*silograph.__all__, "__version__"}
