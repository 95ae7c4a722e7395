"""Laws of `silograph compare`: flags, tables, exit codes, Ctrl-C and what goes on after it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from test_cli import flags_of

from commands import Capture, everything, printed
from forked import Forked
from mistakes import raises_code
from silograph.cli import run_app
from silograph.cli.flags import resume_hint
from silograph.cli.studies import parse_method_options, parse_seeds, parse_varied_values
from silograph.core.errors import ConfigError

pytestmark = pytest.mark.usefixtures("work")

QUICK = ["--rounds", "2", "--clients", "3", "--partition", "random", "--hidden", "4"]
COMPARE = ["compare", "g.npz", *QUICK, "--methods", "local,fedavg", "--seeds", "2"]


def test_the_table_and_the_folder(work: Path, capsys: Capture) -> None:
    text = printed(capsys, *COMPARE, "--processes", "0", "--out", "c")
    assert text.splitlines()[0].endswith("g.npz, 3 clients, random: scores")
    assert all(len(line) <= 80 for line in text.splitlines())
    assert text.endswith("compare.md, .tex, .csv, figures/\nwritten to c\n")
    assert {path.name for path in (work / "c").iterdir()} == {
        *("checksums.json", "compare.json", "compare.jsonl", "compare.md", "paired.json", "runs"),
        *("compare.tex", "compare.csv", "command.json", "figures"),
    }
    again = printed(capsys, *COMPARE, "--processes", "0", "--out", "c")
    assert again == text  # nothing ran: seconds too are the same
    assert printed(capsys, "resume", "c", "--quiet") == text
    assert capsys.readouterr().err == ""
    said = "the comparison in c was complete: nothing was trained"
    assert run_app(["resume", "c"]) == 0
    assert capsys.readouterr().err.splitlines()[-1] == said
    lines = Path("c", "compare.jsonl").read_text().splitlines(keepends=True)
    Path("c", "compare.jsonl").write_text("".join(lines[:-1]))
    assert run_app(["resume", "c"]) == 0
    assert said not in capsys.readouterr().err


def test_a_reader_who_leaves_is_no_error_of_a_run(work: Path) -> None:
    """As `silograph resume DIR | head`: there is nothing to resume."""
    with pytest.raises(BrokenPipeError), resume_hint(str(work), trust=False):
        raise BrokenPipeError(32, "Broken pipe")


def test_json_and_the_default_folder(work: Path, capsys: Capture) -> None:
    flags = ["--over", "model=gcn,mlp", "--options", "fedopt.server_lr=0.1", "--json"]
    flags += ["--processes", "0", "--baseline", "fedopt", "--view", "personalized"]
    flags += ["--metric", "f1_macro", "--test", "wilcoxon"]
    command = ["compare", "g.npz", *QUICK, "--methods", "fedopt", "--seeds", "0,5", *flags]
    told = json.loads(printed(capsys, *command))
    assert [row["model"] for row in told["rows"]] == ["gcn", "mlp"]
    assert (told["baseline"], told["view"], told["metric"]) == (
        "fedopt",
        "personalized",
        "f1_macro",
    )
    assert (told["test"], told["seeds"]) == ("wilcoxon", [0, 5])
    options = [line["config"]["options"]["server_optimizer.server_lr"] for line in told["cells"]]
    assert options == [0.1] * 4
    assert told["folder"].startswith("runs/g-compare-2")
    assert (work / told["folder"] / "compare.md").is_file()


def test_a_failed_cell_is_exit_code_1(capsys: Capture) -> None:
    lr = ["--lr", "1e30", "--seeds", "1", "--processes", "0", "--out", "c"]
    assert run_app(["compare", "g.npz", *QUICK, "--methods", "local,fedavg", *lr]) == 1
    out, err = capsys.readouterr()
    assert "failed: fedavg, seed 0: expected a finite " in out
    assert "1 failed" in err
    assert "Traceback" not in out + err


WRONG: dict[str, tuple[list[str], str]] = {
    "method": (["--methods", "fedavgg"], "unknown method 'fedavgg': did you mean 'fedavg'"),
    "empty": (
        ["--methods", "local,,fedavg"],
        "expected --methods as a list like a,b, got 'local,,",
    ),
    "nothing": (["--methods", ""], "expected --methods as a list like a,b, got ''"),
    "seeds": (["--seeds", "0"], "--seeds: expected at least one, got 0"),
    "seeds as words": (
        ["--seeds", "all"],
        "expected --seeds as a number or a list like 0,1,2, got",
    ),
    "over": (["--over", "clients"], "expected --over KEY=VALUE,VALUE, got 'clients'"),
    "over twice": (["--over", "lr=1", "--over", "lr=2"], "expected --over lr once, got it twice"),
    "over nothing": (["--over", "lr="], "expected --over lr as a list like a,b, got ''"),
    "key": (["--over", "clientz=1"], "unknown key to vary 'clientz': did you mean 'clients'"),
    "options": (
        ["--options", "mu=1"],
        "expected --options METHOD.NAME=VALUE, or PART.NAME=VALUE for all methods, such as",
    ),
    "option": (
        ["--options", "fedavg.mu=1"],
        "error: --options fedavg.mu: method fedavg has no such option, but method fedprox has it: ",
    ),
    "option's method": (
        ["--options", "fedopt.mu=1"],
        "unknown method or part with options 'fedopt'",
    ),
    "folder": (["--out", "."], "expected a folder of a comparison, or none yet, got ."),
    "flag of a run": (["--method", "local"], "No such option: --method"),
    "weights": (
        ["--weights-as", "int4"],
        "error: expected --weights-as exact and --weight-rows all for method local, got ",
    ),
    "varied": (
        ["--over", "min-nodes-per-row=1,2"],
        "leave --min-nodes-per-row out (runs of local, --min-nodes-per-row 2)",
    ),
    "model": (
        ["--methods", "local,fedais", "--model", "gat", "--hidden", "8"],
        "expected a model whose sums can be shared, got GAT: ",
    ),
    "names the method": (
        ["--methods", "local,fedais", "--model", "gat", "--hidden", "8"],
        "use --model gcn, graphconv, gin, sage or appnp (runs of fedais)",
    ),
    "layers": (
        ["--methods", "local,fedper", "--options", "fedper.private=2"],
        "error: --options fedper.private: expected less than the number of layers, 2, got 2: ",
    ),
    "dataset": (["--over", "dataset=corra"], "unknown dataset 'corra': did you mean 'cora'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_one_line(work: Path, capsys: Capture, case: str) -> None:
    arguments, message = WRONG[case]
    before = everything(work)
    command = ["compare", "g.npz", *QUICK, "--methods", "local,fedavg", "--out", "c", *arguments]
    assert run_app(command) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
    assert everything(work) == before


def test_texts_of_flags() -> None:
    assert parse_seeds("4") == 4
    assert parse_seeds("4, 5") == [4, 5]
    assert parse_varied_values(["local-epochs=1,2"]) == {"local_epochs": [1, 2]}
    assert parse_method_options(["a.x=1", "a.y=b"]) == {"a": {"x": 1, "y": "b"}}
    with raises_code(ConfigError, "option-value", option="options", got="a=b.c"):
        parse_method_options(["a=b.c"])


def test_the_set_of_flags() -> None:
    """A fixed list: those of a run, without what a comparison has of its own."""
    own = {"--methods", "--seeds", "--over", "--options", "--baseline", "--metric", "--view"}
    own |= {"--arm", "--arms", "--test", "--processes"}
    assert flags_of("compare") == (flags_of("run") - {"--method", "--option", "--seed"}) | own
    own = {"--trials", "--max-minutes", "--seeds", "--keys", "--range", "--view", "--search-seed"}
    assert flags_of("tune") == (flags_of("run") - {"--seed"}) | own | {"--processes"}
    own = {"--datasets", "--only", "--out", "--data-dir", "--processes", "--max-minutes"}
    assert flags_of("reproduce") == own | {"--recipes", "--quiet", "--trust", "--help"}


# --- as a program ---------------------------------------------------------------------------------

SCRIPT = (
    "import os, signal; os.setsid(); signal.signal(signal.SIGINT, signal.default_int_handler);"
    "from silograph.cli import main; main()"
)


def started(*arguments: str) -> Forked:
    """Start a command in a process group of its own, which its workers share."""
    command, pipe = [sys.executable, "-c", SCRIPT, *arguments], subprocess.PIPE
    return Forked(command, None, pipe, pipe, text=True)


def nobody_is_left(group: int) -> bool:
    """Whether every process of a group ends; waits for it a while."""
    for _ in range(600):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.usefixtures("forked")  # the workers that go on with it
@pytest.mark.parametrize(
    "signal_sent", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
)
def test_a_comparison_is_stopped_and_goes_on(
    work: Path, capsys: Capture, signal_sent: signal.Signals
) -> None:
    """Two processes run when Ctrl-C, or worse, comes; no process is left, and lines are whole."""
    folder = work / "it's"
    arguments = [*COMPARE, "--out", "it's", "--processes", "2"]
    arguments[arguments.index("--rounds") + 1] = "50"
    process = started(*arguments)
    while not (folder / "compare.jsonl").exists() or not (folder / "compare.jsonl").stat().st_size:
        assert process.poll() is None
        time.sleep(0.05)
    if signal_sent == signal.SIGINT:
        os.killpg(process.pid, signal_sent)  # as a terminal does
    else:
        process.kill()
    _, err = process.communicate(timeout=600)
    assert nobody_is_left(process.pid)
    assert "Traceback" not in err
    if signal_sent == signal.SIGINT:
        assert process.returncode == 130
        hint = """to go on: silograph resume 'it'"'"'s'"""
        assert err.splitlines()[-2:] == ["interrupted", hint]
    before = (folder / "compare.jsonl").read_bytes()
    told = json.loads(printed(capsys, "resume", "it's", "--quiet", "--json"))
    assert (folder / "compare.jsonl").read_bytes().startswith(before)
    assert len((folder / "compare.jsonl").read_bytes().splitlines()) == 4
    assert told["failed"] == []
    whole: Any = json.loads(
        printed(capsys, *arguments[:-3], "whole", "--processes", "0", "--quiet", "--json")
    )
    for ours, theirs in zip(told["cells"], whole["cells"], strict=True):
        assert {k: ours[k] for k in ("test", "curve", "bytes")} == {
            k: theirs[k] for k in ("test", "curve", "bytes")
        }
