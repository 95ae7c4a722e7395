"""Laws of `tune`: validation alone decides, and a search that was stopped goes on exactly."""

import builtins
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import silograph as sg
from commands import Capture, printed
from mistakes import raises_code
from runs import MakeGraph
from silograph.cli import run_app
from silograph.cli.studies import parse_ranges
from silograph.core.config import make_config
from silograph.core.errors import ConfigError, SilographError
from silograph.core.run_file import read_toml
from silograph.core.setting_values import choice, lin, log
from silograph.experiment.result_files import with_digest, without_digest
from silograph.study.study import read_lines
from silograph.study.tune import Trial, best_of, propose, resume_search

pytest.importorskip("optuna")
pytestmark = pytest.mark.usefixtures("work")

SHORT: dict[str, Any] = {"clients": 3, "partition": "random", "rounds": 2, "hidden": 4}
RANGES = {"lr": "0.001:1.0:log", "server_lr": "0.001:0.5:log", "local_epochs": "1:3"}
SEARCH: dict[str, Any] = SHORT | {"keys": ["lr"], "ranges": RANGES, "processes": 0}
FLAGS = ["--rounds", "2", "--clients", "3", "--partition", "random", "--processes", "0"]


def trial(number: int, value: float, error: str | None = None, **params: Any) -> Trial:
    return Trial(number, params, (value,), error, True)


# --- what is tried --------------------------------------------------------------------------------


def test_a_proposal_is_a_function_of_what_came_before() -> None:
    ranges = {"lr": log(1e-3, 1.0), "e": lin(1, 3), "d": lin(0.0, 0.5), "m": choice("a", "b")}
    before: list[Trial] = []
    for number in range(14):
        params = propose(number, ranges, before, 0)
        assert propose(number, ranges, before, 0) == params
        assert 1e-3 <= float(params["lr"]) <= 1
        assert params["e"] in (1, 2, 3)
        assert 0 <= float(params["d"]) <= 0.5
        assert params["m"] in ("a", "b")
        value = -abs(float(params["lr"]) - 0.1)
        before.append(Trial(number, params, (value,), None, True))
    first = propose(0, ranges, [], 0)
    assert len({str(propose(0, ranges, [], seed)) for seed in range(5)}) == 5
    assert propose(1, ranges, [], 0) != first
    unknown_yet = Trial(14, first, (), "why", False)
    assert propose(15, ranges, [*before, unknown_yet], 0) == propose(15, ranges, before, 0)
    assert propose(15, ranges, before, 0) != propose(15, ranges, [], 0)


def test_the_best_is_the_earliest_of_the_best_that_went_well() -> None:
    trials = [trial(0, 0.5), trial(1, 0.7), trial(2, 0.7), trial(3, 0.9, "diverged")]
    assert best_of([*trials, Trial(4, {}, (1.0,), None, False)]) == trials[1]
    assert best_of([trials[3]]) is None


# --- a search -------------------------------------------------------------------------------------


def test_trials_are_plain_runs_and_the_winner_is_by_validation(make_graph: MakeGraph) -> None:
    found = sg.tune(make_graph(), trials=4, seeds=2, out="t", **SEARCH)
    assert [t.number for t in found.trials] == [0, 1, 2, 3]
    for each in found.trials:
        assert list(each.params) == ["lr", "server_lr", "local_epochs"]
        options = {"server_lr": each.params["server_lr"]}
        given = SHORT | {k: v for k, v in each.params.items() if k != "server_lr"}
        runs = [sg.run(make_graph(), seed=s, options=options, **given) for s in (0, 1)]
        values = [run.val.server.accuracy for run in runs if run.val.server]
        assert list(each.values) == values
        if each == found.best:
            tests = [run.test.server.accuracy or 0 for run in runs if run.test.server]
            assert found.test["server"] == sum(tests) / 2
    assert found.best is not None
    assert found.best.mean == max(t.mean or 0 for t in found.trials)
    assert "test" not in Path("t/tune.jsonl").read_text(encoding="utf-8")
    assert len(read_lines(Path("t/tune.jsonl"))) == 8
    assert [line["labels"]["seed"] for line in read_lines(Path("t/winner.jsonl"))] == [0, 1]
    config = make_config(read_toml("t/best.toml"))
    assert config.lr == found.best.params["lr"]
    server_lr = found.best.params["server_lr"]
    assert config.options["server_optimizer.server_lr"] == server_lr
    given = read_toml("t/best.toml", anew=True)  # what is no default of the library
    assert given["options"] == {"server_optimizer.server_lr": server_lr}
    assert not given.keys() & {"partition_seed", "split_seed", "init_seed", "optimizer"}


@pytest.mark.parametrize(
    ("done", "asked"),
    [
        pytest.param(0, 0, marks=pytest.mark.slow),
        pytest.param(5, 5, marks=pytest.mark.slow),
        (11, 12),
    ],
)
def test_a_stopped_search_goes_on_exactly(make_graph: MakeGraph, done: int, asked: int) -> None:
    """Stopped after every line, and with trials proposed and not run: the same trials, in order."""
    whole = sg.tune(make_graph(), trials=13, out="whole", **SEARCH)  # beyond the random start
    lines = Path("whole/tune.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    plan = json.loads(Path("whole/tune.json").read_text(encoding="utf-8"))
    plan_values, _ = without_digest(plan, "the plan")
    folder = Path("stopped")
    folder.mkdir()
    text = "".join(lines[:done]) + lines[done][:30]
    (folder / "tune.jsonl").write_text(text, encoding="utf-8")
    if asked:
        kept = with_digest({**plan_values, "asked": plan["asked"][:asked]})
        (folder / "tune.json").write_text(json.dumps(kept), encoding="utf-8")
    again = sg.tune(make_graph(), trials=13, out=folder, **SEARCH)
    assert again.trials == whole.trials
    assert again.best == whole.best
    assert again.test == whole.test
    assert json.loads((folder / "tune.json").read_text(encoding="utf-8")) == plan


@pytest.mark.usefixtures("forked")
def test_more_trials_and_another_process_go_on(capsys: Capture) -> None:
    command = ["tune", "g.npz", *FLAGS, "--hidden", "4", "--keys", "lr", "--quiet", "--out", "t"]
    printed(capsys, *command, "--trials", "2")
    first = Path("t/tune.jsonl").read_bytes()
    told = json.loads(printed(capsys, *command, "--trials", "3", "--json"))
    assert [row["trial"] for row in told["trials"]] == [0, 1, 2]
    assert Path("t/tune.jsonl").read_bytes().startswith(first)
    assert json.loads(printed(capsys, "resume", "t", "--quiet", "--json")) == told
    assert capsys.readouterr().err == ""
    said = "the search in t was complete: nothing was trained"
    assert run_app(["resume", "t"]) == 0
    assert capsys.readouterr().err.splitlines()[-1] == said
    Path("t/winner.jsonl").unlink()
    assert run_app(["resume", "t"]) == 0
    assert said not in capsys.readouterr().err


def test_time_is_up(make_graph: MakeGraph) -> None:
    found = sg.tune(make_graph(), trials=3, max_minutes=1e-9, **SEARCH)
    assert (found.trials, found.best, found.winner) == ((), None, ())
    assert "no trial went well" in found.summary()


def test_a_trial_that_diverges_counts_as_nothing(make_graph: MakeGraph) -> None:
    search = SEARCH | {"keys": ["lr"], "ranges": {"lr": "0.01,1e30"}, "method": "fedavg"}
    found = sg.tune(make_graph(), trials=6, **search)
    values = {t.params["lr"]: (t.mean, t.error is None) for t in found.trials}
    assert values[1e30] == (0.0, False)
    assert values[0.01][1]
    assert found.best is not None
    assert found.best.params == {"lr": 0.01}
    assert "1 of 1 diverged" in found.summary()
    assert {row["lr"]: row["diverged"] for row in found.rows} == {1e30: 1, 0.01: 0}


# --- forms ----------------------------------------------------------------------------------------


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("width", [80, 140])
def test_the_table_fits_and_shows_no_test_score_of_a_trial(
    make_graph: MakeGraph, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched = {k: v for k, v in SHORT.items() if k not in ("lr", "hidden")}
    found = sg.tune(make_graph(), trials=3, seeds=2, **searched, processes=0)
    text = found.summary(width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text
    assert "±" in text
    assert repr(found) == found.summary()
    keys = set(found.rows[0]) - set(found.ranges)
    assert keys == {"trial", "val_mean", "val_std", "best", "diverged", "error"}
    assert {"lr", "hidden", "server_lr"} <= found.ranges.keys()
    told = json.loads(found.to_json())
    assert told["best"] == dict(found.best.params if found.best else {})
    assert f"| {found.trials[0].number}" in found.to_markdown()
    real = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name in ("pandas", "optuna"):
            raise ImportError
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with raises_code(SilographError, "missing-package", package="pandas", extra="pandas"):
        found.to_dataframe()
    with raises_code(SilographError, "missing-package", package="optuna", extra="tune"):
        sg.tune(make_graph())


def test_the_command(work: Path, capsys: Capture) -> None:
    flags = ["--trials", "2", "--range", "hidden=2,4", "--keys", "lr,weight-decay"]
    text = printed(capsys, "tune", "g.npz", *FLAGS, *flags, "--out", "t u")
    assert text.splitlines()[-2:] == [
        "written to t u",
        "run the winner: silograph run --config 't u/best.toml'",
    ]
    assert {path.name for path in (work / "t u").iterdir()} == {
        *("tune.json", "tune.jsonl", "tune.md", "winner.jsonl", "best.toml")
    }
    printed(capsys, "run", "--config", "t u/best.toml", "--quiet", "--out", "r")


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "trials": ({"trials": 0}, "trials: expected at least one, got 0"),
    "minutes": ({"max_minutes": 0}, "max_minutes: expected more than 0, got 0"),
    "seeds": ({"seeds": 0}, "seeds: expected at least one, got 0"),
    "view": ({"view": "servr"}, "unknown view 'servr': did you mean 'server'"),
    "view that is not": (
        {"view": "server", "method": "local"},
        "expected validation scores in the",
    ),
    "key": ({"keys": ["lrr"]}, "unknown key to tune 'lrr': did you mean 'lr'"),
    "no keys": ({"keys": []}, "expected at least one of keys, got none"),
    "a folder": (
        {"keys": ["data_dir"], "ranges": {"data_dir": "a,b"}},
        "unknown key to tune 'data_dir'",
    ),
    "tracker": ({"tracker": "mlflow"}, "expected no tracker of a search, got 'mlflow'"),
    "the seed": ({"keys": ["seed"]}, "unknown key to tune 'seed'"),
    "no range": ({"keys": ["layers"]}, "expected a range for layers, got none: give --range lay"),
    "range": ({"ranges": {"lr": "1:0"}}, "expected a range with LOW < HIGH"),
    "end of a range": ({"ranges": {"dropout": "0:2"}}, "dropout: input should be less than 1, got"),
    "end of an option's": ({"ranges": {"server_lr": "-1:1"}}, "server_lr: input should be greater"),
    "range that is no text": (
        {"ranges": {"hidden": [4, 8]}},
        "expected a range of hidden as text, such as '0.001:0.3:log', '1:5' or '16,64', got [4, 8]",
    ),
    "ranges as a list": ({"ranges": ["lr"]}, "expected ranges as a dict, got ['lr']"),
    "a seed": ({"seed": 1}, "expected seeds for several runs, got seed=1: give seeds=[...]"),
    "choice": ({"ranges": {"model": "gcn,gccn"}}, "unknown model 'gccn': did you mean 'gcn'"),
    "a value and a key": (
        {"lr": 0.1, "keys": ["lr"]},
        "expected lr either with a value or searched, got both: leave one of them out",
    ),
    "an option and a range": (
        {"options": {"server_lr": 0.1}, "ranges": {"server_lr": "0.1:1"}},
        "expected server_lr either with a value or searched, got both",
    ),
    "a value for each": (
        {"method": "local", "lr": 1, "weight_decay": 0, "dropout": 0, "local_epochs": 1},
        "expected at least one key to tune, got a value for each: leave one out",
    ),
    "a range that no cut reads": (
        {"ranges": {"alpha": "0.1:1.0"}},
        "alpha: partition random has no such option, but partition dirichlet",
    ),
    "half a range": ({"ranges": {"lr": "0.1"}}, "range of lr: expected a range LOW:HIGH"),
    "minutes as text": ({"max_minutes": "1"}, "max_minutes: expected more than 0, got '1'"),
    "search seed": ({"search_seed": "a"}, "search_seed: expected a whole number, got 'a'"),
    "keys as a number": ({"keys": 3}, "expected a list of keys, got 3"),
    "a key that is no text": ({"keys": [3]}, "unknown key to tune 3"),
    "method": ({"method": "fedop"}, "unknown method 'fedop': did you mean 'fedopt'"),
    "progress": ({"progress": "loud"}, "expected progress live, plain or none, got 'loud'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_one_line(make_graph: MakeGraph, case: str) -> None:
    given, message = WRONG[case]
    with pytest.raises(ConfigError) as caught:
        sg.tune(make_graph(), **(SHORT | {"processes": 0} | given))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_value_that_is_given_is_not_searched(capsys: Capture) -> None:
    command = ["tune", "g.npz", *FLAGS, "--trials", "1", "--json", "--out"]
    flags = ["--hidden", "4", "--dropout", "0", "--option", "server_relative_tau=0.001"]
    told = json.loads(printed(capsys, *command, "t", *flags))
    assert list(told["ranges"]) == ["local_epochs", "lr", "weight_decay", "server_lr"]
    config = make_config(read_toml("t/best.toml"))
    tau = config.options["server_optimizer.server_relative_tau"]
    assert (config.hidden, config.dropout, tau) == (4, 0.0, 0.001)
    assert run_app([*command, "u", *flags]) == 0
    assert (
        "given, and so not searched: hidden, dropout, server_relative_tau"
        in capsys.readouterr().err
    )
    file = ["--config", "t/best.toml", "--keys", "lr"]  # what a file says is where it starts from
    assert list(json.loads(printed(capsys, *command, "v", *file))["ranges"]) == ["lr"]


def test_folders(make_graph: MakeGraph) -> None:
    Path("mine").mkdir()
    Path("mine/x").write_text("mine", encoding="utf-8")
    for taken in ("mine", "g.npz"):
        with raises_code(ConfigError, "existing-output"):
            sg.tune(make_graph(), out=taken, **SEARCH)
    sg.tune(make_graph(), trials=1, out="t", **SEARCH)
    with raises_code(ConfigError, "existing-output", path="t"):
        sg.tune(make_graph(), trials=1, seeds=2, out="t", **SEARCH)
    with raises_code(ConfigError, "part-not-saved", part="graph", path="t"):
        resume_search("t")
    shutil.copy("t/tune.json", "whole.json")
    for text in ("{", '{"asked": []}', '{"asked": 3}'):
        Path("t/tune.json").write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=r"expected the plan of a search in t/tune\.json"):
            resume_search("t")


def test_texts_of_ranges() -> None:
    assert parse_ranges(["local-epochs=1:3", "lr=1,2"]) == {"local_epochs": "1:3", "lr": "1,2"}
    for wrong in (["lr"], ["lr=1,2", "lr=1,2"]):
        with raises_code(ConfigError, "option-value", option="range"):
            parse_ranges(wrong)
    assert run_app(["tune", "g.npz", "--range", "lr"]) == 2
