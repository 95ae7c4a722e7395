"""Imports run one way, and importing costs nothing that is not used."""

import ast
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import silograph

ROOT = Path(silograph.__file__).parent
# Rooms, or single modules, in the order in which they build on each other; the longest name counts.
# Those in one set do not import each other.
ROOMS = [
    {"core"},
    {"graph"},
    {"graph.read"},
    {"graph.partition"},
    {"graph.block"},
    {"graph.silos", "graph.generated", "graph.heterogeneity"},
    {"graph.datasets"},
    {"graph.source"},
    {"task"},
    {"federation.field_specs"},
    {"nn", "federation"},
    {"federation.matching"},
    {"federation.session"},
    {"exchange"},
    {"sampling", "selection", "aggregation", "control"},
    {"evaluation"},
    {"methods"},
    {"experiment"},
    {"experiment.resolve", "experiment.report"},
    # From parts over a request that names them and its data to a resolved run.
    {"experiment.resolve.flat_options", "experiment.resolve.user_code"},
    {"experiment.resolve.parts"},
    {"experiment.resolve.run_request"},
    {"experiment.resolve.data"},
    {"experiment.resolve.privacy"},
    {"experiment.resolve.exclusions"},
    {"experiment.resolve.resolve", "experiment.resolve.run_program"},
    {"experiment.run"},
    {"study"},
    {"study.paired_tests"},
    {"study.ranking"},
    {"study.comparison", "study.attack"},
    {"study.comparison_files"},
    {"study.compare"},
    {"study.tune", "study.reproduce"},
    {"deploy"},
    {"cli", "__init__"},
    {"__main__"},
]


def room_of(module: str) -> str:
    """The room of a module, both without `silograph.`."""
    parts = module.split(".")
    names = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next(name for name in names for rooms in ROOMS if name in rooms)


def place_of(module: str) -> int:
    room = room_of(module)
    return next(place for place, rooms in enumerate(ROOMS) if room in rooms)


def module_of(path: Path) -> str:
    """The dotted name of a file, without `silograph.`; that of a package for its __init__.py."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


FILES = {module_of(path): path for path in ROOT.rglob("*.py")}


def imported_modules(source: str, modules: Iterable[str] = FILES) -> set[str]:
    """Modules of silograph that a file imports, wherever in the file."""
    modules = set(modules)
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            for name in inner.values():
                is_module = name.removeprefix("silograph.") in modules
                names.append(name if is_module else node.module)
    return {name.removeprefix("silograph.") for name in names if name.startswith("silograph.")}


@cache
def imports() -> dict[str, set[str]]:
    return {name: imported_modules(path.read_text()) for name, path in FILES.items()}


def test_the_check_sees_imports_inside_functions() -> None:
    source = "def f():\n    from silograph.nn.conv import GCN\n    from silograph.nn import fit, x"
    assert imported_modules(source, ["nn.conv", "nn.fit"]) == {"nn.conv", "nn.fit", "nn"}


def test_imports_run_one_way() -> None:
    backwards = [
        f"{module} imports {other}"
        for module, others in imports().items()
        for other in others
        if room_of(module) != room_of(other) and place_of(other) >= place_of(module)
    ]
    assert not backwards


def in_circles(graph: Mapping[str, set[str]]) -> list[str]:
    """Nodes that lead back to themselves, or lie between such nodes."""
    left = {name: others & graph.keys() for name, others in graph.items()}
    while ends := {name for name, others in left.items() if not others}:
        left = {name: others - ends for name, others in left.items() if name not in ends}
    return sorted(left)


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert in_circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": set()}) == ["a", "b", "c"]
    assert in_circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    assert not in_circles(imports())


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
