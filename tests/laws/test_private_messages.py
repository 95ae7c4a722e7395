"""With differential privacy only declared replies leave: noised integers, and zeros of evaluation.

The oracle is the program of a run, which a silo enforces: every call has its fields declared.
"""

from typing import Any

import pytest
import torch

pytest.importorskip("dp_accounting")

from silograph.core.config import make_config
from silograph.core.errors import ConfigError
from silograph.core.kinds import Kind
from silograph.experiment.resolve.resolve import resolve_without_data
from silograph.experiment.resolve.run_program import program_of
from silograph.federation.privacy.release import is_noised
from silograph.federation.program import calls_of
from silograph.methods import METHODS

DP: dict[str, Any] = {"dp_epsilon": 4.0, "dp_delta": 1e-5, "dp_unit": "silo", "clients": 8}
INSIDE = ("fedavg", "fedacs", "fedopt", "fedprox")
OPTIONS: list[dict[str, Any]] = [
    {},
    {"secure_aggregation": True},
    {"options": {"participation": 0.5}},
    {"keep_optimizer": True, "optimizer": "adam"},
    {"neighbors": "fanout", "fanout": "3,3", "batch_size": 8},
    {"neighbors": "fedgrains"},
    {"metric": "auc"},
    {"model": "sage"},
    {"eval_every": 3, "evaluation_min_count": 0},
    {"server_optimizer": "adam"},
    {"dp_clip_quantile": 0.5},
]


def test_these_methods_and_no_others_are_inside() -> None:
    assert {name for name, method in METHODS.items() if method.clips_updates} == set(INSIDE)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_reply_is_noised_or_says_nothing(method: str, options: dict[str, Any]) -> None:
    selector = {"selector": "all"} if method == "fedacs" else {}
    selector = {} if "options" in options and method == "fedacs" else selector
    config = make_config(DP | selector | options | {"method": method})
    if method not in INSIDE or (method == "fedacs" and not selector):
        with pytest.raises(ConfigError):
            resolve_without_data(config)
        return
    run = resolve_without_data(config)
    assert run is not None
    program = program_of(run.config, run.schema, run.parts.method.part, run.method_config)
    released = 0
    for number in range(program.rounds + 1):
        steps = program.setup if number == 0 else program.round(number)
        for call in calls_of(steps):
            if is_noised(call.op):
                assert {spec.dtype for spec in call.reply_specs.values()} == {torch.int64}
                others = {n for n in call.reply_specs if not n.startswith("update/")}
                assert others == ({"within_clip"} if "dp_clip_quantile" in options else set())
                released += 1
            else:
                assert not call.reply_specs or call.reply_kind is Kind.EVALUATION
    assert released == run.config.rounds
