"""Units, scripts and container files that pages name: they parse, and every flag exists."""

import configparser
import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import click
import pytest

from silograph.cli import command_line

ROOT = Path(__file__).parents[2]
FILES = ROOT / "examples" / "deploy"
UNITS = ["silograph-server.service", "silograph-silo.service"]
HOW_TO = ROOT / "docs" / "how_to"
PAGES = sorted(HOW_TO.glob("*.md"))
DEPLOYMENT = HOW_TO / "deploy_a_server.md"
COMMAND = re.compile(r"\bsilograph ((?:server|silo|certs|export-silos|predict)\b[^`\n#>]*)")
INSTRUCTIONS = [
    "ARG",
    "FROM",
    "WORKDIR",
    "COPY",
    "RUN",
    "ENV",
    "USER",
    "STOPSIGNAL",
    "ENTRYPOINT",
    "CMD",
]


def parsed(words: Sequence[str]) -> dict[str, object]:
    """What the command line understands; an unknown flag or a missing one is an error."""
    group = command_line()
    assert isinstance(group, click.Group)
    command = group.commands[words[0]]
    parent = click.Context(group, **group.context_settings)  # click keeps the first names of help
    return dict(command.make_context(words[0], list(words[1:]), parent).params)


def unit(name: str) -> configparser.ConfigParser:
    found = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",))
    found.optionxform = str  # type: ignore[assignment,method-assign] # names keep their case
    found.read_string((FILES / name).read_text())
    return found


@pytest.mark.parametrize("name", UNITS)
def test_a_unit(name: str) -> None:
    found = unit(name)
    assert found.sections() == ["Unit", "Service", "Install"]
    service = found["Service"]
    program, *words = shlex.split(service["ExecStart"])
    assert program.startswith("/opt/silograph/bin/")
    if program.endswith("/silograph-serve"):
        words = ["server", *words]
    told = parsed(words)
    assert told["wait"] == 7 * 86400
    assert not told.get("no_wait")
    assert service["SuccessExitStatus"] == "130"  # of Ctrl-C and SIGTERM
    assert service["RestartPreventExitStatus"] == "2"  # of mistakes


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([], ["--config", "run.toml", "--out", "run", "--keys", "k", "--silos", "a,b"]),
        (["session.json"], ["--resume", "run"]),
        (["session.json", "result.json"], None),
    ],
    ids=["begins", "continues", "is over"],
)
def test_the_script_that_begins_or_continues_a_run(
    tmp_path: Path, files: list[str], words: list[str] | None
) -> None:
    stand_in = tmp_path / "bin" / "silograph"
    stand_in.parent.mkdir()
    stand_in.write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
    stand_in.chmod(0o755)
    (tmp_path / "run").mkdir()
    for name in files:
        (tmp_path / "run" / name).touch()
    names = {"CONFIG": "run.toml", "RUN": "run", "SILOS": "a,b", "KEYS": "k"}
    environment = {f"SILOGRAPH_{name}": value for name, value in names.items()}
    path = f"{stand_in.parent}{os.pathsep}{os.environ['PATH']}"
    flags = ["--listen", "h:1", "--certs", "my certs"]
    said = subprocess.run(
        ["sh", str(FILES / "silograph-serve"), *flags],
        env={"PATH": path, **environment},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    if words is None:
        assert said == "the run is over: its result is in run\n"
        return
    assert said.splitlines() == ["server", *words, *flags]
    (tmp_path / "run.toml").touch()
    parsed([str(tmp_path / word) if word == "run.toml" else word for word in said.splitlines()])


def test_the_container_file() -> None:
    text = (FILES / "Containerfile").read_text()
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    steps = [line.split(maxsplit=1) for line in lines if not line.startswith("#")]
    assert {step for step, _ in steps} <= set(INSTRUCTIONS)
    for step, rest in steps:
        if step == "COPY":
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
    assert "://" not in text
    assert ["ENTRYPOINT", '["silograph"]'] in steps


def commands(page: Path) -> list[str]:
    """Every command of the two ends on a page, also those behind the name of an image."""
    code = re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    joined = "\n".join(code).replace("\\\n", " ")
    return [found.strip() for found in COMMAND.findall(joined)]


@pytest.mark.parametrize("command", sorted({c for page in PAGES for c in commands(page)}))
def test_commands_of_the_pages_exist(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").touch()
    if command.split()[0] in ("server", "silo", "certs", "export-silos"):
        parsed(shlex.split(command))


def test_the_container_starts_the_server() -> None:
    """The flags behind `silograph-serve` are those of the server."""
    text = DEPLOYMENT.read_text().replace("\\\n", " ")
    (flags,) = re.findall(r"--entrypoint silograph-serve silograph (.*)", text)
    parsed(["server", *shlex.split(flags)])


def test_every_file_is_on_the_page() -> None:
    text = DEPLOYMENT.read_text()
    for file in FILES.iterdir():
        assert f"(../../examples/deploy/{file.name})" in text
