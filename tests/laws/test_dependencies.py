"""Packages that the library imports are those that pyproject.toml declares, in bounds that hold."""

import ast
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import silograph

ROOT = Path(__file__).parents[2]
SOURCE = Path(silograph.__file__).parent
# Names of imports whose packages are called something else.
PACKAGES = {
    "grpc": "grpcio",
    "mlflow": "mlflow-skinny",
    "sklearn": "scikit-learn",
    "sknetwork": "scikit-network",
}
NOT_IMPORTED_BY_NAME = {"tensorboard"}  # torch.utils.tensorboard imports it


def imported_packages(source: str) -> set[str]:
    """Return the names of packages that a file imports, wherever in the file.

    Left out are the standard library and silograph itself.
    """
    modules = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules.add(node.module or "")
    names = {module.partition(".")[0] for module in modules}
    names -= {"silograph", *sys.stdlib_module_names}
    return {canonicalize_name(PACKAGES.get(name, name)) for name in names}


def declared_requirements() -> dict[str, Requirement]:
    """Return what pyproject.toml declares for users, by name; development tools are left out."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [
        *project["dependencies"],
        *(r for name in extras if name not in ("dev", "docs") for r in extras[name]),
    ]
    requirements = [Requirement(line) for line in lines]
    return {str(canonicalize_name(requirement.name)): requirement for requirement in requirements}


def test_imported_packages_are_found() -> None:
    source = "import a.b, os\nfrom sklearn.x import y\ndef f():\n    import c_d\nfrom . import e"
    assert imported_packages(source) == {"a", "scikit-learn", "c-d"}


def test_every_imported_package_is_declared_and_every_declared_one_is_imported() -> None:
    imported = set()
    for path in SOURCE.rglob("*.py"):
        imported |= imported_packages(path.read_text())
    declared = set(declared_requirements())
    assert declared - NOT_IMPORTED_BY_NAME == imported


def test_tested_versions_are_within_the_bounds() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {str(canonicalize_name(name)): v for name, v in (line.split("==") for line in lines)}
    requirements = declared_requirements()
    for name in requirements.keys() & pinned.keys():
        assert requirements[name].specifier.contains(pinned[name]), name
    assert len(requirements.keys() & pinned.keys()) >= len(requirements) - 1  # pandas is not pinned


@pytest.mark.parametrize("name", ["click", "typer", "pymetis"])
def test_versions_that_fail_are_outside_the_bounds(name: str) -> None:
    """They were once allowed: no click beside typer 0.26, no `CSRAdjacency` in pymetis 2025.1."""
    failing = {"click": ("8.1.8", "8.2.1"), "typer": ("0.15.4", "0.26.0"), "pymetis": ("2025.1.1",)}
    specifier = declared_requirements()[name].specifier
    assert not any(specifier.contains(version) for version in failing[name])
