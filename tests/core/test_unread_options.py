"""Options that nothing reads: who says so, and what a user hears."""

from typing import Any

import pytest

import silograph as sg
from mistakes import raises_code
from silograph.core.config import make_config, unread
from silograph.core.errors import ConfigError
from silograph.experiment.resolve.parts import TABLES, choose_parts, options_of
from silograph.methods import METHODS
from silograph.nn.backends import CompiledBackend

EXCHANGES = {"interval", "tau", "owners", "sent", "moved"}
WEIGHS = {"warmup", "floor"}
AGENT = {"target", "time", "explore", "agent_state", "agent_seed"}


@pytest.mark.parametrize(
    ("method", "given", "expected"),
    [
        ("fedais", {}, set()),
        ("fedais", {"nodes": "random"}, WEIGHS),
        ("fedall", {}, {"ratio", *WEIGHS}),
        ("fedlocal", {}, {"ratio", *WEIGHS, *EXCHANGES}),
        ("fedlocal", {"halo": "drawn", "nodes": "importance"}, set()),
        ("fedais", {"policy": "ddpg"}, {"interval"}),
        ("fedpub", {"masks": False}, {"l1"}),
    ],
)
def test_what_is_unread_follows_from_the_other_options(
    method: str, given: dict[str, Any], expected: set[str]
) -> None:
    agent = set() if method == "fedpub" or "policy" in given else AGENT
    assert unread(METHODS[method].options, given) == expected | agent


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"method": "fedall", "options": {"ratio": 0.1}},
            "option method.ratio: fedall does not read it with nodes=all, got 0.1: leave it out, "
            "or give nodes=random or importance",
        ),
        (
            {"method": "fedlocal", "options": {"tau": 9}},
            "give halo=drawn, held or all",
        ),
        (
            {"neighbors": "fedgrains", "options": {"policy": "uniform", "width": 8}},
            "option neighbors.width: fedgrains does not read it with policy=uniform, got 8",
        ),
        (
            {"method": "fedpub", "options": {"masks": False, "l1": 0.5}},
            "option method.l1: fedpub does not read it with masks=false, got 0.5: leave it out, or "
            "give masks=true",
        ),
        (
            {"neighbors": "fedgrains", "options": {"log_z": "constant", "log_z_lr": 0.5}},
            "option neighbors.log_z_lr: fedgrains does not read it with log_z=constant, got 0.5",
        ),
    ],
)
def test_a_value_that_nothing_reads_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        choose_parts(make_config({"dataset": "cora", **given}))
    assert message in str(raised.value)


def test_the_default_may_be_said() -> None:
    choose_parts(make_config({"dataset": "cora", "method": "fedall", "options": {"ratio": 0.7}}))


def test_every_condition_names_an_option_and_values_that_it_takes() -> None:
    found = 0
    for part in (part for table in TABLES.values() for part in table.values()):
        for f in options_of(part).values():
            for other, wanted in f.metadata.get("read_if", {}).items():
                for value in wanted:
                    part.options(**{other: value})
                found += 1
    assert found > 10


@pytest.fixture
def torch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run without compiled kernels: compiling those of flow networks takes minutes."""
    monkeypatch.setattr(CompiledBackend, "why_not", lambda *_: "this test needs none")


@pytest.mark.usefixtures("torch_only")
def test_tuning_leaves_them_out(make_graph: Any) -> None:
    """A controlled sampler has no flow network to tune; a trained one has."""
    given: dict[str, Any] = {"trials": 1, "rounds": 1, "clients": 2, "batch_size": 8}
    given |= {"partition": "random", "neighbors": "fedgrains", "method": "local", "processes": 0}
    searched = {}
    for policy in ("trained", "uniform"):
        tuned = sg.tune(make_graph(), **given, options={"neighbors.policy": policy})
        searched[policy] = set(tuned.trials[0].params)
    assert {"neighbors.k", "neighbors.degrees"} <= searched["uniform"]
    assert searched["trained"] - searched["uniform"] == {
        f"neighbors.{name}" for name in ("alpha", "lr", "log_z")
    }


@pytest.mark.usefixtures("torch_only")
def test_trials_leave_out_what_their_other_values_make_unread(make_graph: Any) -> None:
    given: dict[str, Any] = {"rounds": 1, "clients": 2, "batch_size": 8, "partition": "random"}
    given |= {"neighbors": "fedgrains", "method": "local", "processes": 0}
    ranges = {"neighbors.policy": "trained,uniform", "neighbors.alpha": "10:1000:log"}
    tuned = sg.tune(make_graph(), **given, trials=6, ranges=ranges)
    assert {trial.params["neighbors.policy"] for trial in tuned.trials} == {"trained", "uniform"}
    given["options"] = {"neighbors.log_z_lr": 0.5}  # unread only where log Z is constant
    tuned = sg.tune(make_graph(), **given, trials=4, keys=["neighbors.log_z"])
    assert {trial.params["neighbors.log_z"] for trial in tuned.trials} == {"learned", "constant"}
    given["options"] = {"neighbors.policy": "uniform", "neighbors.width": 8}
    with raises_code(ConfigError, "unread-option", option="neighbors.width", part="fedgrains"):
        sg.tune(make_graph(), **given, trials=1, keys=["neighbors.k"])


@pytest.mark.usefixtures("torch_only")
def test_comparisons_leave_out_what_is_unread_at_a_point(make_graph: Any) -> None:
    given: dict[str, Any] = {"rounds": 1, "clients": 2, "batch_size": 8, "partition": "random"}
    given |= {"neighbors": "fedgrains", "methods": ["local"], "processes": 0, "seeds": 1}
    over: dict[str, Any] = {"neighbors.policy": ["trained", "uniform"]}
    alpha = {"neighbors": {"alpha": 1e3}}
    found = sg.compare(make_graph(), **given, over=over, options=alpha)
    options = {cell.labels["neighbors.policy"]: cell.config.options for cell in found.cells}
    assert "neighbors.alpha" in options["trained"]
    assert "neighbors.alpha" not in options["uniform"]
    over = {"masks": ["true", "false"], "l1": [1e-4, 1e-2]}
    found = sg.compare(make_graph(), **{**given, "methods": ["fedpub"]}, over=over)
    assert {cell.labels["masks"] for cell in found.cells if "l1" in cell.config.options} == {"true"}
    for method, key in (("fedlocal", "tau"), ("fedall", "ratio")):
        plain = {k: v for k, v in given.items() if k not in ("neighbors", "batch_size", "methods")}
        with pytest.raises(ConfigError, match=f"one of these runs reads, got {key}: other options"):
            sg.compare(make_graph(), **plain, methods=[method], over={key: [1, 0.5]})
