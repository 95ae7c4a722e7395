"""Laws of `RunConfig`: what is written reads back, and what is wrong is told in one line."""

import dataclasses
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from silograph.core.config import RunConfig, changed_values, checked, make_config, not_said_again
from silograph.core.errors import ConfigError
from silograph.core.run_file import parse_option, read_toml, write_toml
from silograph.core.setting_values import hidden_widths, parse_rating_scale, parse_widths
from silograph.experiment.resolve.resolve import choose, fill_defaults

SEEDS = st.integers(0, 2**63 - 1)
COUNTS = st.integers(1, 10**6)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
POSITIVE = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
SHARE = st.floats(0, 1, exclude_max=True)
OPTION_NAME = st.text(max_size=10)
SCALARS = st.booleans() | st.integers() | FINITE | st.text()

FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "evaluate_clients": st.none() | st.sampled_from(["all", "participants"]),
    "evaluation_min_count": st.none() | st.integers(0, 10**6),
    "dataset": st.text(),
    "data_dir": st.none() | st.text(),
    "columns": st.none() | st.text(),
    "na_values": st.none() | st.text(),
    "repeated_edges": st.none() | st.sampled_from(["mean", "sum", "count", "last", "first"]),
    "directed": st.sampled_from(["none", "along", "against", "both"]),
    "largest_component": st.booleans(),
    "features": st.sampled_from(["given", "degree", "constant", "onehot-degree"]),
    "normalize": st.sampled_from(["none", "row"]),
    "edge_weights": st.sampled_from(["use", "ignore"]),
    "split": st.text(),
    "partition": st.text(),
    "clients": st.none() | COUNTS,
    "alpha": POSITIVE,
    "favored_classes": st.none() | COUNTS,
    "favor": st.floats(1, 1e300),
    "clients_per_part": COUNTS,
    "part_share": st.floats(0, 1, exclude_min=True),
    "share_mean": st.floats(0, 1, exclude_min=True),
    "share_variance": st.floats(0, 1e300),
    "share_classes": st.none() | COUNTS,
    "drop_edges": st.floats(0, 1),
    "participation": st.floats(0, 1, exclude_min=True),
    "selector": st.sampled_from(["all", "uniform", "round_robin"]),
    "collect": st.floats(0, 1),
    "min_nodes_per_row": st.integers(1, 10**6),
    "min_silos_per_row": st.integers(1, 10**6),
    "scale": POSITIVE,
    "rating_scale": st.none() | st.tuples(st.floats(-9, 0), POSITIVE).map(parse_rating_scale),
    "model": st.text(),
    "layers": st.none() | COUNTS,
    "hidden": COUNTS | st.lists(COUNTS, min_size=1, max_size=4).map(parse_widths),
    "head": st.sampled_from(["conv", "linear"]),
    "dropout": SHARE,
    "input_dropout": SHARE,
    "attention_dropout": SHARE,
    "residual": st.booleans(),
    "heads": st.none() | COUNTS,
    "hops": st.none() | COUNTS,
    "teleport": st.none() | st.floats(0, 1),
    "method": st.text(),
    "aggregator": st.sampled_from(["mean", "median", "trimmed_mean"]),
    "server_optimizer": st.none() | st.sampled_from(["none", "momentum", "adam"]),
    "options": st.dictionaries(OPTION_NAME, SCALARS, max_size=4),
    "rounds": COUNTS,
    "local_epochs": COUNTS,
    "batch_size": st.none() | COUNTS,
    "fanout": st.none() | st.text(),
    "neighbors": st.none() | st.text(),
    "optimizer": st.none() | st.sampled_from(["adam", "sgd"]),
    "lr": st.none() | POSITIVE,
    "lr_schedule": st.text(),
    "warmup_rounds": st.integers(0, 2**63 - 1),
    "weight_decay": st.none() | st.floats(min_value=0, allow_infinity=False),
    "decay_layers": st.sampled_from(["all", "first"]),
    "momentum": SHARE,
    "keep_optimizer": st.none() | st.booleans(),
    "weights_as": st.sampled_from(["exact", "float16", "int8", "int4"]),
    "weight_rows": st.sampled_from(["all", "used"]),
    "secure_aggregation": st.booleans(),
    "dp_epsilon": st.none() | st.floats(0.1, 100),
    "dp_delta": st.none() | st.floats(1e-9, 0.1),
    "dp_unit": st.sampled_from([None, "silo", "node"]),
    "dp_clip": st.none() | st.floats(0.1, 100),
    "dp_clip_quantile": st.none() | st.floats(0.1, 0.9),
    "dp_degree": st.none() | st.integers(1, 100),
    "patience": st.none() | COUNTS,
    "class_weight": st.sampled_from([None, "balanced", '{"a": 2.0}']),
    "threshold": st.sampled_from([None, "f1", "recall@fpr=0.01", "cost=1:20"]),
    "positive": st.none() | st.sampled_from(["1", "fraud"]),
    "relevant": st.none() | st.floats(0, 5),
    "metric": st.none() | st.text(),
    "target": st.none() | st.text(),
    "max_bytes": st.none() | COUNTS,
    "max_seconds": st.none() | POSITIVE,
    "speeds": st.none() | st.text(),
    "links": st.none() | st.text(),
    "max_virtual_seconds": st.none() | POSITIVE,
    "eval_every": COUNTS,
    "seed": SEEDS,
    "partition_seed": st.none() | SEEDS,
    "split_seed": st.none() | SEEDS,
    "init_seed": st.none() | SEEDS,
    "dtype": st.sampled_from(["float32", "float64"]),
    "device": st.text(),
    "threads": COUNTS,
    "kernels": st.sampled_from(["auto", "compiled", "torch"]),
    "block_size": st.none() | COUNTS,
    "engine": st.sampled_from(["local", "ray"]),
    "workers": st.none() | st.just("auto") | st.integers(1, 9999),
    "address": st.none() | st.text(),
    "keep_every": st.none() | st.integers(0, 10**6),
    "strict": st.booleans(),
    "feature_drift": st.booleans(),
    "local_bias": st.booleans(),
    "checkpoint_every": st.none() | st.integers(0, 10**6),
    "tracker": st.none() | st.text(),
    "out": st.none() | st.text(),
}
VALUES = st.fixed_dictionaries({}, optional=FIELDS)

NASTY = 'a"b\\c\\u0041\'\'\'"""\n\r\t\b\f\x00\x1b\x7f\x85\u2028é漢\U0001f600\ufeff'


def one_line(call: Callable[[], object]) -> str:
    """Return the message of the `ConfigError` that a call raises; it must be one line."""
    with pytest.raises(ConfigError, match=r"\A[^\r\n]+\Z") as caught:
        call()
    assert caught.value.__cause__ is None
    return str(caught.value)


def test_every_field_is_part_of_the_round_trip() -> None:
    names = {field.name for field in dataclasses.fields(RunConfig)}
    assert names == set(FIELDS)


@settings(max_examples=60)
@given(values=VALUES)
@example(values={"dataset": NASTY, "options": {"text": NASTY, "true": True, "one": 1, "1": 1.0}})
@example(values={"options": {"a": 1e-300, "b": 1e16, "c": 5e-324, "d": -0.0, "e": 10**30}})
def test_what_is_written_reads_back(values: dict[str, Any]) -> None:
    config = make_config(values)
    again = make_config(tomllib.loads(write_toml(config)))
    assert again == config
    # 1 == 1.0 == True in Python: an option must also keep its type.
    assert {k: repr(v) for k, v in again.options.items()} == {
        k: repr(v) for k, v in config.options.items()
    }


@settings(max_examples=50)
@given(values=VALUES)
def test_a_config_holds_what_it_was_given(values: dict[str, Any]) -> None:
    config = make_config(values)
    default = RunConfig()
    for field in dataclasses.fields(RunConfig):
        expected = values.get(field.name, getattr(default, field.name))
        assert repr(getattr(config, field.name)) == repr(expected)


def test_a_run_file_reads_back_from_disk(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    config = make_config({"dataset": "é\n漢", "options": {"mu": 0.5}})
    path.write_text(write_toml(config), encoding="utf-8")
    assert make_config(read_toml(path)) == config
    assert make_config(read_toml(str(path))) == config


@pytest.mark.parametrize(
    ("values", "start", "got"),
    [
        (
            {"partition": "dirichlet", "alpha": 0.0},
            "alpha: input should be greater than 0",
            "got 0.0",
        ),
        ({"partition": "dirichlet", "alpha": float("nan")}, "alpha: input should be", "got nan"),
        (
            {"partition": "class_biased", "favored_classes": 0},
            "favored_classes: input should be greater than",
            "got 0",
        ),
        (
            {"partition": "class_biased", "favor": 0.5},
            "favor: input should be greater than or equal to 1",
            "got 0.5",
        ),
        (
            {"partition": "metis_overlapping", "clients_per_part": 0},
            "clients_per_part: input should be greater than",
            "got 0",
        ),
        (
            {"partition": "metis_overlapping", "part_share": 0.0},
            "part_share: input should be greater than 0",
            "got 0.0",
        ),
        (
            {"partition": "shares", "share_mean": 2.0},
            "share_mean: input should be less than or equal to 1",
            "got 2.0",
        ),
        (
            {"partition": "shares", "share_variance": -1.0},
            "share_variance: input should be greater than",
            "got -1.0",
        ),
        ({"participation": 0.0}, "participation: input should be greater than 0", "got 0.0"),
        ({"participation": 1.5}, "participation: input should be less than or equal to 1", "1.5"),
        ({"heads": 0, "model": "gat"}, "heads: input should be greater than", "got 0"),
        ({"hops": 0, "model": "appnp"}, "hops: input should be greater than", "got 0"),
        ({"teleport": 2.0, "model": "appnp"}, "teleport: input should be less than", "got 2.0"),
    ],
)
def test_an_option_out_of_range_is_told_by_its_part(
    values: dict[str, Any], start: str, got: str
) -> None:
    [option] = values.keys() - {"partition", "model"}
    dotted = {k: v for k, v in values.items() if k != option} | {
        "options": {option: values[option]}
    }
    ways = (values, dotted) if values[option] == values[option] else (values,)  # no nan there
    for asked in ways:
        message = one_line(lambda asked=asked: choose(make_config(asked)))  # type: ignore[misc]
        assert message.startswith(start)
        assert got in message
        # An option of the run's own needs no part to be named.
        assert ("(options of " in message) == (values[option] == values[option])


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError, match="rounds"):
        RunConfig().rounds = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("round", "rounds"),
        ("local-epochs", "local_epochs"),
        ("Seed", "seed"),
        ("drop_out", "dropout"),
    ],
)
def test_an_unknown_key_names_the_nearest(key: str, near: str) -> None:
    message = one_line(lambda: make_config({"seed": 1, key: 3}, source="run.toml"))
    assert message == f"unknown key in run.toml '{key}': did you mean '{near}'?"


def test_an_unknown_key_that_is_near_to_none() -> None:
    message = one_line(lambda: make_config({"seed": 1, "qqqq": 3}, source="run.toml"))
    assert message.startswith(
        "unknown key in run.toml 'qqqq'; choices: address, aggregator, alpha, attention_dropout, b"
    )
    assert message.endswith("; options of a method or another part stand under options")


@pytest.mark.parametrize(
    ("values", "start", "got"),
    [
        ({"clients": 0}, "clients: input should be greater than or equal to 1", "got 0"),
        ({"drop_edges": 1.5}, "drop_edges: input should be less than or equal to 1", "got 1.5"),
        ({"layers": 0}, "layers: input should be greater than or equal to 1", "got 0"),
        ({"layers": 1.5}, "layers: input should be a valid integer", "got 1.5"),
        ({"hidden": -1}, "hidden: expected a width of 1 or more, or one for each hidden", "got -1"),
        ({"dropout": 1.0}, "dropout: input should be less than 1", "got 1.0"),
        ({"dropout": -0.1}, "dropout: input should be greater than or equal to 0", "got -0.1"),
        ({"rounds": 0}, "rounds: input should be greater than or equal to 1", "got 0"),
        ({"local_epochs": 0}, "local_epochs: input should be greater than", "got 0"),
        ({"optimizer": "a\nb"}, "optimizer: input should be 'adam' or 'sgd'", r"got 'a\nb'"),
        ({"lr": 0.0}, "lr: input should be greater than 0", "got 0.0"),
        ({"lr": float("inf")}, "lr: input should be a finite number", "got inf"),
        ({"weight_decay": -1e-9}, "weight_decay: input should be greater than", "got -1e-09"),
        ({"momentum": 1.0}, "momentum: input should be less than 1", "got 1.0"),
        ({"max_bytes": "0B"}, "max_bytes: input should be greater than or equal to 1", "got 0"),
        ({"max_bytes": "10 mb"}, "max_bytes: expected a number of bytes, or of kB", "got '10 mb'"),
        ({"max_bytes": "-1MB"}, "max_bytes: expected a number of bytes, or of kB", "got '-1MB'"),
        ({"eval_every": 0}, "eval_every: input should be greater than", "got 0"),
        ({"seed": -1}, "seed: input should be greater than or equal to 0", "got -1"),
        ({"seed": 2**63}, "seed: input should be less than", f"got {2**63}"),
        ({"split_seed": -1}, "split_seed: input should be greater than", "got -1"),
        ({"dtype": "float16"}, "dtype: input should be 'float32' or 'float64'", "got 'float16'"),
        ({"threads": 0}, "threads: input should be greater than or equal to 1", "got 0"),
        ({"block_size": 0}, "block_size: input should be greater than", "got 0"),
        ({"block_size": 2**63}, "block_size: input should be less than", f"got {2**63}"),
        (
            {"normalize": "Row"},
            "normalize: input should be 'none', 'row', 'standard' or 'standard_client'",
            "got 'Row'",
        ),
        ({"dataset": 3}, "dataset: input should be a valid string", "got 3"),
        ({"options": 3}, "options: input should be a valid", "got 3"),
        ({"options": {"mu": [1, 2]}}, "options.mu", "got [1, 2]"),
    ],
)
def test_a_value_out_of_range_is_told_in_one_line(
    values: dict[str, Any], start: str, got: str
) -> None:
    message = one_line(lambda: make_config(values, source="run.toml"))
    assert message.startswith(start)
    assert got in message
    assert message.endswith("(run.toml)")


@pytest.mark.parametrize(
    ("given", "count"),
    [
        (1, 1),
        ("1000", 1000),
        ("12B", 12),
        ("1kB", 1000),
        ("0.3 kB", 300),
        (" 10MB ", 10**7),
        ("1.5GB", 1_500_000_000),
        ("0.0019kB", 1),
    ],
)
def test_bytes_may_have_a_unit(given: int | str, count: int) -> None:
    config = make_config({"max_bytes": given})
    assert config.max_bytes == count
    assert f"max_bytes = {count}\n" in write_toml(config)


@pytest.mark.parametrize(
    ("given", "written", "layers", "widths"),
    [
        (64, 64, None, (64,)),
        ("64", 64, 4, (64, 64, 64)),
        (64, 64, 1, ()),
        ("256,128", "256,128", None, (256, 128)),
        (" 256, 128,", "256,128", 3, (256, 128)),
        ([256, 128], "256,128", None, (256, 128)),
        ((64,), "64,", None, (64,)),
        ("064,", "64,", 2, (64,)),
    ],
)
def test_hidden_is_a_width_for_all_or_for_each(
    given: Any, written: int | str, layers: int | None, widths: tuple[int, ...]
) -> None:
    config = make_config({"hidden": given, "layers": layers})
    assert config.hidden == written
    assert hidden_widths(config.hidden, config.layers) == widths
    assert make_config(tomllib.loads(write_toml(config))) == config


@pytest.mark.parametrize(
    "odd", [0, -1, 10**18, "", ",", "a", "1,,2", "1,0", "1,-2", "1.5", [], [1.5], "1," * 1001, {}]
)
def test_odd_widths_are_refused_in_one_line(odd: Any) -> None:
    message = one_line(lambda: make_config({"hidden": odd}, source="run.toml"))
    assert message.startswith("hidden: expected a width of 1 or more, or one for each hidden layer")


def test_widths_and_layers_agree() -> None:
    message = one_line(lambda: hidden_widths("256,128", 2))
    assert message == (
        "expected 3 layers with hidden=256,128, got 2: leave layers out, or give one width for all"
    )


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class NoOptions:
    """A method without options."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Options:
    """A method with one option that has no default, and one that has."""

    share: int
    mu: float = 0.5


def test_checked_options_of_a_method() -> None:
    assert checked(Options, {"share": 2}, "options of x") == Options(2, 0.5)
    assert checked(NoOptions, {}, "options of x") == NoOptions()
    message = one_line(lambda: checked(NoOptions, {"mu": 1}, "options of x"))
    assert message == "expected no options in options of x, got 'mu'"
    message = one_line(lambda: checked(Options, {"share": 2, "nu": 1}, "options of x"))
    expected = "unknown key in options of x 'nu': did you mean 'mu'?"
    assert message == expected
    message = one_line(lambda: checked(Options, {"share": "x"}, "options of x"))
    assert message == "share: input should be a valid integer, got 'x' (options of x)"
    message = one_line(lambda: checked(Options, {"share": 1.5}, "options of x"))
    assert message == "share: input should be a valid integer, got 1.5 (options of x)"
    message = one_line(lambda: checked(Options, {}, "options of x"))
    assert message.startswith("share: ")


def test_checked_does_not_change_its_input() -> None:
    values = {"options": {"mu": 1}, "rounds": 2}
    make_config(values)
    assert values == {"options": {"mu": 1}, "rounds": 2}


@given(seed=SEEDS, own=st.tuples(st.none() | SEEDS, st.none() | SEEDS, st.none() | SEEDS))
def test_seeds_that_are_not_given_are_the_seed(
    seed: int, own: tuple[int | None, int | None, int | None]
) -> None:
    names = ("partition_seed", "split_seed", "init_seed")
    given_seeds: dict[str, Any] = dict(zip(names, own, strict=True))
    config = make_config({"seed": seed, **given_seeds})
    found = fill_defaults(config, choose(config))
    expected = [seed if value is None else value for value in own]  # 0 is a seed of its own
    assert [found[name] for name in names] == expected


def test_a_run_file_that_cannot_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "missing.toml"
    message = one_line(lambda: read_toml(missing))
    assert message == f"expected a run file at {missing}, got: No such file or directory"
    assert one_line(lambda: read_toml(tmp_path)).startswith(f"expected a run file at {tmp_path}")


@pytest.mark.parametrize("table", ["", "[defaults]\n"])
@pytest.mark.parametrize("value", ["true", "false"])
def test_run_files_of_earlier_versions_name_an_option_that_is_the_default_now(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, table: str, value: str
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f"rounds = 3\n{table}eval_on_receipt = {value}\n", encoding="utf-8")
    assert make_config(read_toml(path)) == RunConfig(rounds=3)
    warned = "eval_on_receipt is no option any more" in caplog.text
    assert warned == (value == "true" and not table)


def test_what_was_left_open_stands_apart_and_is_left_out_of_runs_that_differ(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.toml"
    config = make_config(
        {"lr": 0.1, "split_seed": 3, "options": {"method.mu": 1, "model.heads": 2}}
    )
    path.write_text(write_toml(config, {"lr", "init_seed", "model.heads"}), encoding="utf-8")
    assert make_config(read_toml(path)) == config
    anew = make_config(read_toml(path, anew=True))
    assert (anew.lr, anew.split_seed, anew.options) == (None, 3, {"method.mu": 1})


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("defaults = 3\n", "expected tables [options], [defaults] and [defaults.options] in "),
        ("options = 3\n[defaults]\n", "expected tables [options], [defaults] and [defaults."),
        ("[defaults]\noptions = 3\n", "expected tables [options], [defaults] and [defaults."),
        ("[defaults]\nlrr = 3\n", "expected keys of a run under [defaults] in "),
    ],
)
@pytest.mark.parametrize("anew", [True, False])
def test_what_was_left_open_is_tables_of_keys(
    tmp_path: Path, content: str, expected: str, anew: bool
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(content, encoding="utf-8")
    assert one_line(lambda: read_toml(path, anew=anew)).startswith(expected)


@pytest.mark.parametrize(
    ("options", "names", "left"),
    [
        ({"method.mu": 1, "mu": 2, "model.mu": 3}, ["mu"], []),
        ({"method.mu": 1, "mu": 2, "model.mu": 3}, ["method.mu"], ["model.mu"]),
        ({"method.mu": 1, "nu": 2}, ["partition.nu", "model.mu"], ["method.mu"]),
    ],
)
def test_an_option_is_the_same_by_either_name(
    options: dict[str, Any], names: list[str], left: list[str]
) -> None:
    assert list(not_said_again(options, names)) == left


def test_a_key_replaces_the_option_that_it_is() -> None:
    config = make_config({"options": {"partition.alpha": 0.3, "method.alpha": 1, "method.lr": 2}})
    changed = changed_values(config, {"alpha": 0.4, "lr": 0.1})
    assert changed["options"] == {"method.alpha": 1, "method.lr": 2}


@pytest.mark.parametrize(
    "content", [b"seed = \n", b"seed = 1\nseed = 2\n", b"[options\n", b'dataset = "\xff"\n']
)
def test_a_run_file_that_is_not_toml(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    assert one_line(lambda: read_toml(path)).startswith(f"expected TOML in {path}, got: ")


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("mu=0.5", "mu", 0.5),
        ("mu=1", "mu", 1),
        ("mu=-1e-3", "mu", -1e-3),
        ("flag=true", "flag", True),
        ("flag=True", "flag", "True"),  # TOML is lower case; the option's own type decides later
        ("server-lr = 2", "server_lr", 2),
        ("name=adam", "name", "adam"),
        ("name='a b'", "name", "a b"),
        ('name="1"', "name", "1"),
        ("name=", "name", ""),
        ("name=a=b", "name", "a=b"),
        ("name=[1, 2]", "name", "[1, 2]"),
        ("name={a = 1}", "name", "{a = 1}"),
        ("name=2020-01-01", "name", "2020-01-01"),
        ("a-b=c-d", "a_b", "c-d"),
    ],
)
def test_options_of_the_command_line(text: str, name: str, value: object) -> None:
    assert repr(parse_option(text)) == repr((name, value))


@pytest.mark.parametrize("text", ["mu", "", "=1", "  =1", "a\nb"])
def test_an_option_without_a_name_or_a_value(text: str) -> None:
    message = one_line(lambda: parse_option(text))
    assert re.fullmatch(r"expected --option NAME=VALUE, got '.*'", message)
    assert message.endswith(repr(text))
