"""Laws of parts that users wrote: what is named is found, and every mistake is one line."""

import importlib.metadata
import os
import re
import sys
from pathlib import Path

import pytest

from silograph.core.errors import ConfigError, install_command
from silograph.experiment.resolve.user_code import EXTRAS, absolute, digest, import_spec, is_spec

SOURCE = """
from dataclasses import dataclass

@dataclass
class Part:
    number: "int" = 3

VALUE = Part().number
"""


@pytest.fixture
def part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "part.py"
    path.write_text(SOURCE)
    return path


def test_what_has_a_colon_is_imported() -> None:
    assert is_spec("part.py:VALUE")
    assert is_spec("os:sep")
    assert not is_spec("fedavg")


def test_a_file_by_any_path(part: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(part.parent))
    for spec in ("part.py:VALUE", f"{part}:VALUE", "~/part.py:VALUE"):
        assert import_spec(spec, int) == 3
        assert absolute(spec) == f"{part}:VALUE"


def test_a_file_is_read_anew(part: Path) -> None:
    assert import_spec("part.py:VALUE", int) == 3
    before = digest("part.py:VALUE")
    part.write_text("VALUE = 41 + 1\n")
    assert import_spec("part.py:VALUE", int) == 42
    assert digest("part.py:VALUE") == digest(f"{part}:VALUE") != before


def test_a_module_by_its_name() -> None:
    assert import_spec("os.path:sep", str) == os.sep
    assert absolute("os.path:sep") == "os.path:sep"
    assert digest("sys:path") == "sys"  # it has no file


def test_a_module_of_the_working_folder(part: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file there is found, also by a program that does not stand in it."""
    paths = [path for path in sys.path if path not in ("", os.getcwd())]
    monkeypatch.setattr(sys, "path", paths)
    (part.parent / "part_of_here.py").write_text(SOURCE)
    assert import_spec("part_of_here:VALUE", int) == 3
    assert sys.path == paths
    before = digest("part_of_here:VALUE")
    assert before == digest("part_of_here.py:VALUE")
    (part.parent / "part_of_here.py").write_text(SOURCE + "# changed\n")
    assert digest("part_of_here:VALUE") != before
    del sys.modules["part_of_here"]
    with pytest.raises(ConfigError, match="expected to import gone, got ModuleNotFoundError: No "):
        digest("gone:X")
    (part.parent / "part_fails").mkdir()
    (part.parent / "part_fails" / "__init__.py").write_text("1 / 0")
    with pytest.raises(ConfigError, match=r"expected to import part_fails\.x, got ModuleNotFoundE"):
        digest("part_fails.x:X")  # which imports no package
    with pytest.raises(ConfigError, match=r"expected to import part_fails\.x, got ZeroDivisionEr"):
        import_spec("part_fails.x:X", int)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (":VALUE", "expected FILE.py:NAME or package.module:NAME, got ':VALUE'"),
        ("part.py", "expected FILE.py:NAME or package.module:NAME, got 'part.py'"),
        ("part.py:", "expected FILE.py:NAME or package.module:NAME, got 'part.py:'"),
        ("part.py:a b", "expected FILE.py:NAME or package.module:NAME, got 'part.py:a b'"),
        ("gone.py:VALUE", "expected to import gone.py, got FileNotFoundError: "),
        ("no_such_module:X", "got ModuleNotFoundError: No module named 'no_such_module'"),
        ("part.txt/x:X", "got ModuleNotFoundError: 'part.txt/x' is no name of a module, nor a f"),
        ("part.py:VALUES", "unknown int in part.py 'VALUES'; choices: VALUE"),
        ("part.py:Part", "expected a int in part.py:Part, got type: name a value of that type"),
    ],
)
def test_mistakes_are_one_line(part: Path, spec: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        import_spec(spec, int)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = 1\ny = x / 0\n", "got ZeroDivisionError: division by zero ({path}, line 2)"),
        ("def f(:\n", "got SyntaxError: invalid syntax"),
        ("import sys\nsys.exit('done')\n", "got SystemExit: done ({path}, line 2)"),
        ("import no_such_module", "got ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_a_file_that_fails_is_one_line(part: Path, source: str, expected: str) -> None:
    names = set(sys.modules)
    part.write_text(source)
    with pytest.raises(ConfigError) as caught:
        import_spec("part.py:VALUE", int)
    assert f"expected to import part.py, {expected.format(path=part)}" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert set(sys.modules) == names


@pytest.mark.parametrize(("package", "extra"), EXTRAS.items())
def test_a_package_of_an_extra_is_named(
    part: Path, monkeypatch: pytest.MonkeyPatch, package: str, extra: str
) -> None:
    metadata = importlib.metadata.metadata("silograph").get_all("Provides-Extra") or []
    assert extra in metadata
    monkeypatch.setitem(sys.modules, package, None)
    part.write_text(f"import {package}.inner\n")
    with pytest.raises(ConfigError, match=rf": {re.escape(install_command(extra))}$"):
        import_spec("part.py:VALUE", int)


def test_a_file_that_fails_leaves_what_it_was(part: Path) -> None:
    assert import_spec("part.py:VALUE", int) == 3
    held = sys.modules[f"{part}:"]
    part.write_text("raise ValueError")
    with pytest.raises(ConfigError, match=r"got ValueError \(.*line 1\)"):
        import_spec("part.py:VALUE", int)
    assert sys.modules[f"{part}:"] is held
