"""Laws of the command line: flags are fields, and it is a well-behaved program."""

import dataclasses
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click
import pytest
import typer
from typer.core import TyperArgument, TyperOption

import silograph
from commands import PLAN, QUICK, RESULT_KEYS, Capture, printed, warm_up
from forked import Forked
from silograph.cli import ORDER, run_app
from silograph.cli.flags import COMMON, CUT_FIELDS, CommandGroup, app, usage_error
from silograph.core.config import RunConfig, make_config
from silograph.core.errors import SilographError
from silograph.core.run_file import read_toml, write_toml
from silograph.graph.partition.partition import PARTITIONERS
from silograph.methods import METHODS
from silograph.nn.model_options import MODEL_KINDS

pytestmark = pytest.mark.usefixtures("work")


# Field: command line, line of a run file, value. The list is fixed: a new flag is a decision.
FLAGS: dict[str, tuple[list[str], str, Any]] = {
    "dataset": (["cora"], 'dataset = "cora"', "cora"),
    "data_dir": (["--data-dir", "d"], 'data_dir = "d"', "d"),
    "columns": (["--columns", "id=key"], 'columns = "id=key"', "id=key"),
    "na_values": (["--na-values", "-9,x"], 'na_values = "-9,x"', "-9,x"),
    "scale": (["--scale", "0.5"], "scale = 0.5", 0.5),
    "rating_scale": (["--rating-scale", "1,10"], 'rating_scale = "1,10"', "1.0,10.0"),
    "repeated_edges": (["--repeated-edges", "sum"], 'repeated_edges = "sum"', "sum"),
    "directed": (["--directed", "both"], 'directed = "both"', "both"),
    "largest_component": (["--largest-component"], "largest_component = true", True),
    "features": (["--features", "degree"], 'features = "degree"', "degree"),
    "normalize": (["--normalize", "row"], 'normalize = "row"', "row"),
    "edge_weights": (["--edge-weights", "ignore"], 'edge_weights = "ignore"', "ignore"),
    "split": (["--split", "public"], 'split = "public"', "public"),
    "partition": (["--partition", "silo"], 'partition = "silo"', "silo"),
    "clients": (["--clients", "7"], "clients = 7", 7),
    "alpha": (["--alpha", "0.1"], "alpha = 0.1", 0.1),
    "favored_classes": (["--favored-classes", "3"], "favored_classes = 3", 3),
    "favor": (["--favor", "5"], "favor = 5.0", 5.0),
    "clients_per_part": (["--clients-per-part", "4"], "clients_per_part = 4", 4),
    "part_share": (["--part-share", "0.4"], "part_share = 0.4", 0.4),
    "share_mean": (["--share-mean", "0.6"], "share_mean = 0.6", 0.6),
    "share_variance": (["--share-variance", "0.5"], "share_variance = 0.5", 0.5),
    "share_classes": (["--share-classes", "3"], "share_classes = 3", 3),
    "drop_edges": (["--drop-edges", "0.25"], "drop_edges = 0.25", 0.25),
    "participation": (["--participation", "0.25"], "participation = 0.25", 0.25),
    "selector": (["--selector", "round_robin"], 'selector = "round_robin"', "round_robin"),
    "model": (["--model", "sage"], 'model = "sage"', "sage"),
    "layers": (["--layers", "3"], "layers = 3", 3),
    "hidden": (["--hidden", "16,8"], 'hidden = "16,8"', "16,8"),
    "head": (["--head", "linear"], 'head = "linear"', "linear"),
    "dropout": (["--dropout", "0"], "dropout = 0", 0.0),
    "input_dropout": (["--input-dropout", "0.5"], "input_dropout = 0.5", 0.5),
    "attention_dropout": (["--attention-dropout", "0.6"], "attention_dropout = 0.6", 0.6),
    "residual": (["--residual"], "residual = true", True),
    "heads": (["--heads", "4"], "heads = 4", 4),
    "hops": (["--hops", "5"], "hops = 5", 5),
    "teleport": (["--teleport", "0.2"], "teleport = 0.2", 0.2),
    "method": (["--method", "fedavg"], 'method = "fedavg"', "fedavg"),
    "aggregator": (["--aggregator", "median"], 'aggregator = "median"', "median"),
    "server_optimizer": (["--server-optimizer", "adam"], 'server_optimizer = "adam"', "adam"),
    "options": (
        ["--option", "server_lr=0.5", "--option", "server-tau=0.1"],
        "options = {server_lr = 0.5, server_tau = 0.1}",
        {"server_lr": 0.5, "server_tau": 0.1},
    ),
    "rounds": (["--rounds", "9"], "rounds = 9", 9),
    "local_epochs": (["--local-epochs", "5"], "local_epochs = 5", 5),
    "batch_size": (["--batch-size", "32"], "batch_size = 32", 32),
    "fanout": (["--fanout", "10,5"], 'fanout = "10,5"', "10,5"),
    "neighbors": (["--neighbors", "bernoulli"], 'neighbors = "bernoulli"', "bernoulli"),
    "collect": (["--collect", "0.5"], "collect = 0.5", 0.5),
    "min_nodes_per_row": (["--min-nodes-per-row", "3"], "min_nodes_per_row = 3", 3),
    "min_silos_per_row": (["--min-silos-per-row", "2"], "min_silos_per_row = 2", 2),
    "optimizer": (["--optimizer", "sgd"], 'optimizer = "sgd"', "sgd"),
    "lr": (["--lr", "1e-3"], "lr = 1e-3", 0.001),
    "lr_schedule": (["--lr-schedule", "cosine"], 'lr_schedule = "cosine"', "cosine"),
    "warmup_rounds": (["--warmup-rounds", "3"], "warmup_rounds = 3", 3),
    "weight_decay": (["--weight-decay", "0"], "weight_decay = 0.0", 0.0),
    "decay_layers": (["--decay-layers", "first"], 'decay_layers = "first"', "first"),
    "momentum": (["--momentum", "0.9"], "momentum = 0.9", 0.9),
    "keep_optimizer": (["--no-keep-optimizer"], "keep_optimizer = false", False),
    "weights_as": (["--weights-as", "int8"], 'weights_as = "int8"', "int8"),
    "weight_rows": (["--weight-rows", "used"], 'weight_rows = "used"', "used"),
    "secure_aggregation": (["--secure-aggregation"], "secure_aggregation = true", True),
    "dp_epsilon": (["--dp-epsilon", "4"], "dp_epsilon = 4.0", 4.0),
    "dp_delta": (["--dp-delta", "1e-5"], "dp_delta = 1e-5", 1e-5),
    "dp_unit": (["--dp-unit", "silo"], 'dp_unit = "silo"', "silo"),
    "dp_clip": (["--dp-clip", "0.5"], "dp_clip = 0.5", 0.5),
    "dp_clip_quantile": (["--dp-clip-quantile", "0.5"], "dp_clip_quantile = 0.5", 0.5),
    "dp_degree": (["--dp-degree", "2"], "dp_degree = 2", 2),
    "eval_every": (["--eval-every", "10"], "eval_every = 10", 10),
    "patience": (["--patience", "5"], "patience = 5", 5),
    "target": (["--target", "accuracy=0.8"], 'target = "accuracy=0.8"', "accuracy=0.8"),
    "class_weight": (["--class-weight", "balanced"], 'class_weight = "balanced"', "balanced"),
    "threshold": (["--threshold", "cost=1:20"], 'threshold = "cost=1:20"', "cost=1:20"),
    "positive": (["--positive", "fraud"], 'positive = "fraud"', "fraud"),
    "relevant": (["--relevant", "3.5"], "relevant = 3.5", 3.5),
    "evaluate_clients": (
        ["--evaluate-clients", "participants"],
        'evaluate_clients = "participants"',
        "participants",
    ),
    "evaluation_min_count": (["--evaluation-min-count", "5"], "evaluation_min_count = 5", 5),
    "metric": (["--metric", "f1_macro"], 'metric = "f1_macro"', "f1_macro"),
    "max_bytes": (["--max-bytes", "1kB"], "max_bytes = 1000", 1000),
    "max_seconds": (["--max-seconds", "2.5"], "max_seconds = 2.5", 2.5),
    "speeds": (["--speeds", "1,2"], 'speeds = "1,2"', "1,2"),
    "links": (["--links", "10:0.1"], 'links = "10:0.1"', "10:0.1"),
    "max_virtual_seconds": (
        ["--max-virtual-seconds", "9.5"],
        "max_virtual_seconds = 9.5",
        9.5,
    ),
    "engine": (["--engine", "ray"], 'engine = "ray"', "ray"),
    "workers": (["--workers", "auto"], 'workers = "auto"', "auto"),
    "address": (["--address", "auto"], 'address = "auto"', "auto"),
    "keep_every": (["--keep-every", "3"], "keep_every = 3", 3),
    "strict": (["--strict"], "strict = true", True),
    "checkpoint_every": (["--checkpoint-every", "0"], "checkpoint_every = 0", 0),
    "feature_drift": (["--feature-drift"], "feature_drift = true", True),
    "local_bias": (["--local-bias"], "local_bias = true", True),
    "seed": (["--seed", "1"], "seed = 1", 1),
    "partition_seed": (["--partition-seed", "2"], "partition_seed = 2", 2),
    "split_seed": (["--split-seed", "3"], "split_seed = 3", 3),
    "init_seed": (["--init-seed", "4"], "init_seed = 4", 4),
    "dtype": (["--dtype", "float64"], 'dtype = "float64"', "float64"),
    "device": (["--device", "cuda:1"], 'device = "cuda:1"', "cuda:1"),
    "threads": (["--threads", "2"], "threads = 2", 2),
    "kernels": (["--kernels", "torch"], 'kernels = "torch"', "torch"),
    "block_size": (["--block-size", "8"], "block_size = 8", 8),
    "tracker": (["--tracker", "mlflow"], 'tracker = "mlflow"', "mlflow"),
    "out": (["--out", "o"], 'out = "o"', "o"),
}
ONLY_FLAGS = {"--config", "--trust", "--json", "--quiet", "--help", "--help-all"}


# --- flags and keys -------------------------------------------------------------------------------


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """The configs that `run` is called with; no run is made."""
    seen: list[RunConfig] = []

    def spy(*, config: RunConfig, progress: str) -> None:
        seen.append(config)
        raise SilographError("seen")

    monkeypatch.setattr("silograph.experiment.run.run.run", spy)
    return seen


def config_of(configs: list[RunConfig], *arguments: str) -> RunConfig:
    assert run_app(["run", *arguments]) == 2
    return configs.pop()


def flags_of(command: str) -> set[str]:
    group = typer.main.get_command(app)  # click keeps the names of the first `--help` that it makes
    assert isinstance(group, click.Group)
    chosen = group.commands[command]
    parameters = chosen.get_params(click.Context(chosen))
    return {name for p in parameters for name in (*p.opts, *p.secondary_opts) if name[0] == "-"}


def test_the_set_of_flags() -> None:
    """A fixed list: one flag for each field but the dataset, and what is no field."""
    assert set(FLAGS) == {f.name for f in dataclasses.fields(RunConfig)}
    fields = {"--" + name.replace("_", "-") for name in FLAGS} - {"--dataset", "--options"}
    assert flags_of("run") == fields | ONLY_FLAGS | {
        "--option",
        "--all-components",
        "--no-keep-optimizer",
        "--no-residual",
        "--no-local-bias",
        "--no-feature-drift",
        "--plain-aggregation",
        "--no-strict",
    }
    cut = {"--" + name.replace("_", "-") for name in CUT_FIELDS if name != "options"}
    own = {"--all-components", "--quick"}
    assert flags_of("partition") == (cut | {"--option"} | ONLY_FLAGS | own) - {"--quiet"}
    assert flags_of("methods") == flags_of("datasets") == {"--help"}


@pytest.mark.law(sample=3)
@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_and_its_key_are_the_same(configs: list[RunConfig], name: str) -> None:
    arguments, line, value = FLAGS[name]
    Path("run.toml").write_text(line, encoding="utf-8")
    given = config_of(configs, *arguments, "--out", "o")
    assert getattr(given, name) == value
    assert given != RunConfig(out="o") or name == "out"
    assert config_of(configs, "--config", "run.toml", "--out", "o") == given
    Path("back.toml").write_text(write_toml(given), encoding="utf-8")
    assert config_of(configs, "--config", "back.toml") == given


def test_all_flags_and_all_keys_are_the_same(configs: list[RunConfig]) -> None:
    arguments = [word for words, _, _ in FLAGS.values() for word in words]
    given = config_of(configs, *arguments)
    assert dataclasses.asdict(given) == {name: value for name, (_, _, value) in FLAGS.items()}
    text = "\n".join(line for _, line, _ in FLAGS.values())
    Path("run.toml").write_text(text, encoding="utf-8")
    assert config_of(configs, "--config", "run.toml") == given


def test_no_flag_is_the_default(configs: list[RunConfig]) -> None:
    assert replace(config_of(configs), out=None) == RunConfig()
    assert config_of(configs).out is not None


def test_a_flag_goes_over_the_file(configs: list[RunConfig]) -> None:
    text = 'dataset = "cora"\nrounds = 5\nlargest_component = true\nkeep_optimizer = true\n'
    Path("run.toml").write_text(text, encoding="utf-8")
    given = config_of(configs, "--config", "run.toml", "--rounds", "6", "--all-components")
    assert (given.dataset, given.rounds) == ("cora", 6)
    assert (given.largest_component, given.keep_optimizer) == (False, True)
    given = config_of(configs, "digits", "--config", "run.toml", "--no-keep-optimizer")
    assert (given.dataset, given.rounds, given.keep_optimizer) == ("digits", 5, False)


def test_options_of_the_file_and_of_flags_join(configs: list[RunConfig]) -> None:
    text = 'method = "fedopt"\n[options]\nserver_lr = 0.1\nserver_tau = 0.2\n'
    Path("run.toml").write_text(text, encoding="utf-8")
    given = config_of(configs, "--config", "run.toml", "--option", "server_tau=0.3")
    assert given.options == {"server_lr": 0.1, "server_tau": 0.3}
    given = config_of(configs, "--config", "run.toml")
    assert given.options == {"server_lr": 0.1, "server_tau": 0.2}


@pytest.mark.parametrize("flag", ["--quiet", "--json", None])
def test_which_progress_is_shown(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, flag: str | None
) -> None:
    warm_up()
    capsys.readouterr()
    code = run_app(["run", "g.npz", *QUICK, "--out", "x", *([flag] if flag else [])])
    assert code == 0
    lines = capsys.readouterr().err.splitlines()
    expected = [] if flag == "--quiet" else [PLAN, "round 1/2", "round 2/2"]
    assert [line.split("  ")[0] for line in lines] == expected
    if expected:
        assert lines[1].startswith("round 1/2  train loss ")  # no pace and no score is known yet
        assert lines[2].startswith("round 2/2  0 s left  val accuracy 0.")


@pytest.mark.parametrize(
    "command", ["run", "compare", "reproduce", "tune", "partition", "methods", "datasets"]
)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_every_command_has_help(capsys: Capture, command: str, flag: str) -> None:
    text = printed(capsys, command, flag)
    assert text.strip().startswith(f"Usage: silograph {command} [OPTIONS]")
    flags = flags_of(command)
    text = printed(capsys, command, "--help-all") if "--help-all" in flags else text
    assert all(name in text for name in flags)
    assert command in printed(capsys, flag)


def test_every_parameter_has_help_with_every_click() -> None:
    """Click 8.5 clears the help of arguments when typer creates them."""
    group = typer.main.get_command(app)
    assert isinstance(group, CommandGroup)
    parameters = [p for each in group.commands.values() for p in each.params]
    expected = [p.help for p in parameters if isinstance(p, TyperArgument | TyperOption)]
    assert len(expected) == len(parameters)
    assert all(expected)
    for parameter in parameters:
        if isinstance(parameter, TyperArgument):
            parameter.help = None
    CommandGroup(commands=group.commands)
    assert [p.help for p in parameters if isinstance(p, TyperArgument | TyperOption)] == expected


def test_similar_commands_are_named_once(capsys: Capture) -> None:
    """Click 8.4 names them, too, when it formats the message."""

    class ErrorOfNewClick(click.UsageError):
        def format_message(self) -> str:
            return f"{self.message} (Did you mean one of: 'resume', 'run'?)"

    message = "No such command 'rum'. Did you mean 'run', 'resume'?"
    assert usage_error(ErrorOfNewClick(message)) == message
    assert run_app(["rum"]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def test_of_a_flag_given_twice_the_last_value_counts(capsys: Capture) -> None:
    """As on most command lines: a script's flags can be followed by one's own."""
    command = ["run", "g.npz", *QUICK, "--quiet", "--out", "x", "--rounds", "1", "--hidden", "3"]
    assert run_app(command) == 0
    assert capsys.readouterr().err == ""
    config = make_config(read_toml("x/config.toml"))
    assert (config.rounds, config.hidden) == (1, 3)


def test_help_begins_with_what_most_users_begin_with(capsys: Capture) -> None:
    listed = re.findall(r"^│ ([a-z][a-z-]*)  ", printed(capsys, "--help"), flags=re.MULTILINE)
    assert listed[:3] == ["run", "resume", "compare"]
    assert sorted(listed) == sorted(ORDER)


def test_help_states_every_default(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "500")  # so that no text is wrapped
    text = printed(capsys, "run", "--help-all")
    for field in dataclasses.fields(RunConfig):
        if field.name not in ("dataset", "options"):
            default = "" if field.default is None else f" (default: {str(field.default).lower()})"
            choices = get_args(field.type) if get_origin(field.type) is Literal else ()
            listed = f": {' or '.join(choices)}" if choices else ""
            assert f"{field.metadata['help']}{listed}{default}" in text


def test_help_shows_what_most_people_need(capsys: Capture) -> None:
    text = printed(capsys, "run", "--help")
    shown = set(re.findall(r"^│ (--[a-z-]+)", text, flags=re.MULTILINE))
    common = {f"--{name.replace('_', '-')}" for name in COMMON} - {"--options"} | {"--option"}
    assert shown == common | ONLY_FLAGS
    assert "Examples:" in text
    examples = [line.strip() for line in text.split("Examples:")[1].splitlines() if line.strip()]
    assert len(examples) == 5
    assert all(len(line) <= 78 and line.startswith("silograph run ") for line in examples)
    # What was hidden once is shown the next time.
    assert "--dtype" in printed(capsys, "run", "--help-all")
    assert "--dtype" not in printed(capsys, "run", "--help")


@pytest.mark.parametrize(
    ("field", "table"), [("method", METHODS), ("partition", PARTITIONERS), ("model", MODEL_KINDS)]
)
def test_help_names_every_choice(field: str, table: Mapping[str, object]) -> None:
    text = next(f for f in dataclasses.fields(RunConfig) if f.name == field).metadata["help"]
    assert all(name in text for name in table)


def test_version(capsys: Capture) -> None:
    assert printed(capsys, "--version") == f"silograph {silograph.__version__}\n"


# --- as a program ---------------------------------------------------------------------------------


def test_the_program_and_its_pipe(work: Path) -> None:
    warm_up()
    command = [sys.executable, "-m", "silograph", "run", "g.npz", *QUICK, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert list(json.loads(done.stdout)) == RESULT_KEYS
    assert done.stdout.count("\n") == 1
    shown = [line.split("  ")[0] for line in done.stderr.splitlines()]
    assert shown == [PLAN, "round 1/2", "round 2/2"], done.stderr


@pytest.mark.parametrize(
    "sent", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_the_program_is_interrupted(work: Path, sent: signal.Signals) -> None:
    """Ctrl-C, or what services are stopped with, in a run of a million rounds."""
    warm_up()
    # A test suite in the background of a shell has the signal switched off, for children too.
    script = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from silograph.cli import main; main()"
    )
    command = [sys.executable, "-c", script, "run", "g.npz", *QUICK, "--rounds", "1000000"]
    pipe = subprocess.PIPE
    process = Forked([*command, "--out", "x"], None, pipe, pipe, text=True)
    assert process.stderr is not None
    begins = [process.stderr.readline(), process.stderr.readline()]
    rounds_file = Path("x", "rounds.csv")
    while process.poll() is None:  # the first round is scored when the second one trains
        if rounds_file.exists() and rounds_file.stat().st_size > 0:
            break
        time.sleep(0.01)
    os.kill(process.pid, sent)  # before anything is asserted: the run would go on for days
    out, err = process.communicate()
    assert begins[0] == f"{PLAN}\n"
    assert begins[1].startswith("round 1/1000000  ")
    assert process.returncode == 130
    assert out == ""
    assert err.splitlines()[-2:] == ["interrupted", "to go on: silograph resume x"]
    assert "Traceback" not in err
    assert not Path("x", "result.json").exists()
    rounds = rounds_file.read_bytes()
    assert rounds.endswith(b"\n")
    assert len({line.count(b",") for line in rounds.splitlines()}) == 1


IMPORTING = """
import os, signal, sys

stop, number, lost = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "lost"
del sys.argv[1:4]

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == stop:
            try:
                os.kill(os.getpid(), number)
            except KeyboardInterrupt:
                if lost:  # as C extensions do
                    raise ImportError("numpy.core.multiarray failed to import") from None
                raise

# A test suite in the background of a shell has the signal switched off, for children too.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Finder())
from silograph.__main__ import main  # as the program does
main()
"""


@pytest.mark.law(sample=12)
@pytest.mark.parametrize("outcome", ["raised", "lost"])
@pytest.mark.parametrize(
    ("module", "sent"),
    [
        ("click", signal.SIGINT),
        ("click", signal.SIGTERM),
        ("silograph.cli.flags", signal.SIGINT),
        ("numpy", signal.SIGINT),
        ("numpy.linalg", signal.SIGINT),
        ("torch._C", signal.SIGINT),
        ("silograph.experiment.run.progress", signal.SIGINT),  # after torch
    ],
)
def test_the_program_is_interrupted_while_it_imports(
    work: Path, module: str, sent: signal.Signals, outcome: str
) -> None:
    """One line and no traceback, also where C code makes another error of the interrupt."""
    told = [module, str(int(sent)), outcome]
    command = [sys.executable, "-c", IMPORTING, *told, "run", "g.npz", *QUICK, "--out", "x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_the_installed_program_handles_signals_before_it_imports_the_command_line() -> None:
    (program,) = importlib.metadata.entry_points(group="console_scripts", name="silograph")
    code = (
        f"import signal, sys; import {program.module};"
        "handled = signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL;"
        "sys.exit(not handled or 'silograph.cli' in sys.modules or 'typing' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=600, check=False).returncode == 0


def test_the_program_is_stopped_while_python_ends() -> None:
    script = (
        "import atexit, os, signal, sys; from silograph.cli import main;"
        "atexit.register(print, 'ended');"
        "atexit.register(os.kill, os.getpid(), signal.SIGTERM); main()"
    )
    command = [sys.executable, "-c", script, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0
    assert done.stdout.endswith("ended\n")
    assert done.stderr == ""


def test_help_loads_nothing_slow() -> None:
    script = (
        "import sys; from silograph.cli import run_app; run_app(['run', '--help']);"
        "sys.exit(bool({'torch', 'scipy', 'sklearn', 'pandas'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr


def test_the_server_does_not_offer_a_dataset(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["server", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "which the server does not have (default: silos)" in text
    assert "default: digits" not in text
