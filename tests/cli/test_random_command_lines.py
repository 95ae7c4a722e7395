"""Random command lines and run files: exit code 0, 1 or 2, one line for a mistake, no traceback.

What trains, listens or connects is replaced by the resolution of its config, so that nothing takes
long; everything before that is as users have it.
"""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import click
import pytest

from commands import Capture, save
from conftest import planted_graph
from silograph.cli import command_line, run_app
from silograph.core.config import RunConfig
from silograph.experiment.resolve.resolve import resolve_without_data
from silograph.experiment.resolve.run_request import merge_config
from silograph.methods import METHODS

VALUES = (
    *("0", "1", "-1", "2", "3.5", "1e308", "nan", "inf", "-inf", "1e-300", "99999999999999999999"),
    *("", " ", "a", "true", "none", "random", "metis", "cora", "g.npz", "out", "../x", "/dev/null"),
    *(
        "a=b",
        "k=2",
        "share=all",
        "x.py:METHOD",
        "*",
        "--",
        "\u00e4",
        "\U0001f600",
        "a" * 300,
        "1,2",
    ),
    *("5:1", "localhost:0", "[::1]:1", "0.5/0.2/0.3", "2k", "1,2", "{", "[]", '"', "\\", "\t"),
    *(*METHODS, "gcn", "sgd", "adam", "oort", "fedgrains", "compiled", "torch", "cpu", "cuda:7"),
)
# Commands that wait, compile or train whatever their arguments are.
LEFT_OUT = {"compile", "demo-federation", "train-agent", "reproduce"}
ERROR = "error: "


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a graph, in which no command takes long."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    save("g.npz", planted_graph(40))

    def resolve(config: RunConfig | None = None, **named: Any) -> None:
        fields = {name: value for name, value in named.items() if name in RunConfig.__annotations__}
        merged = merge_config(None, config or RunConfig(), fields)[0]
        resolve_without_data(merged, device="cpu")

    for place in (
        "silograph.experiment.run.run.run",
        "silograph.experiment.run.run.resume",
        "silograph.deploy.server.serve",
        "silograph.deploy.server.resume_server",
        "silograph.deploy.silo.take_part_in_run",
    ):
        monkeypatch.setattr(place, lambda *given, **named: resolve(*given[:0], **named))
    monkeypatch.setattr("silograph.study.attack.attack", lambda *_, **__: [])
    monkeypatch.setattr("silograph.study.compare.compare", lambda *_, **__: None)
    monkeypatch.setattr("silograph.study.tune.tune", lambda *_, **__: None)
    for printer in ("print_comparison", "print_search"):
        monkeypatch.setattr(f"silograph.cli.studies.{printer}", lambda *_, **__: 0)
    monkeypatch.setattr("silograph.cli.printing.print_result", lambda *_: None)


def random_line(rng: random.Random) -> list[str]:
    """Return a command with flags of its own, mostly, and values that may fit."""
    group = command_line()
    assert isinstance(group, click.Group)
    name = rng.choice(sorted(group.commands.keys() - LEFT_OUT))
    words = [name]
    parameters = group.commands[name].params
    for _ in range(rng.randrange(6) if parameters else 0):
        parameter = rng.choice(parameters)
        if isinstance(parameter, click.Argument):
            words.append(rng.choice(VALUES))
            continue
        words.append(rng.choice([*parameter.opts, *parameter.secondary_opts]))
        is_flag = isinstance(parameter, click.Option) and parameter.is_flag
        if not is_flag and rng.random() < 0.95:
            words.append(rng.choice(VALUES))
    if rng.random() < 0.1:
        words.insert(rng.randrange(len(words) + 1), rng.choice(VALUES))
    return words


def random_run_file(rng: random.Random) -> str:
    """Return the text of a run file whose keys exist, mostly, with values of any type."""
    names = [*RunConfig.__annotations__, "metod", "options.tau", "neighbors.k"]
    values: tuple[str, ...] = (
        "1",
        "-1",
        "0.5",
        "nan",
        "inf",
        "true",
        '"fedavg"',
        '"x"',
        "[]",
        "{}",
        "[1, 2]",
        "''",
    )
    values += ("2026-01-01", "1e400", "99999999999999999999", '"\\u0000"', '"random"', '"gcn"')
    lines = [f"{rng.choice(names)} = {rng.choice(values)}" for _ in range(rng.randrange(1, 6))]
    if rng.random() < 0.1:
        lines.append(rng.choice(["[", "= 1", "a b", "\x00", "[options]\nx = 1", "[[a]]"]))
    return "\n".join(lines) + "\n"


def try_lines(capsys: Capture, cases: int, seed: int) -> Counter[int]:
    """Try command lines and run files in turn, and return how often each exit code came."""
    rng, codes = random.Random(seed), Counter[int]()
    for number in range(cases):
        if number % 2:
            Path("run.toml").write_text(random_run_file(rng), encoding="utf-8")
            words = [rng.choice(["run", "partition", "compare"]), "--config", "run.toml"]
        else:
            words = random_line(rng)
        code = run_app(words)
        shown = capsys.readouterr()
        codes[code] += 1
        assert code in (0, 1, 2), words
        assert "Traceback" not in shown.err, words
        if code == 2:
            assert ERROR in shown.err.lower() or "usage" in shown.err.lower(), words
    return codes


@pytest.mark.usefixtures("quick")
def test_some_random_lines(capsys: Capture) -> None:
    codes = try_lines(capsys, 60, seed=0)
    assert codes[2] > 20


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("seed", range(1, 6))
def test_five_thousand_random_lines(capsys: Capture, seed: int) -> None:
    codes = try_lines(capsys, 1000, seed)
    assert codes[2] > 300
