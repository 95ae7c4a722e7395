"""Server steps against their equations, worked out by hand; and steps of users."""

from pathlib import Path
from typing import Any

import pytest
import torch

import silograph as sg
from conftest import MakeGraph
from runs import FAST, go, run_until, same_bits, weights_of
from silograph.aggregation.server_optimizers import (
    ScaleFreeAdam,
    ServerAdam,
    ServerMomentum,
    ServerStep,
    take_mean,
)
from silograph.core.config import make_config
from silograph.core.errors import ConfigError, OpError, ProtocolError
from silograph.core.payload import fields_under
from silograph.deploy.server import check_deployable
from silograph.methods.base import RoundReport, ServerState
from silograph.methods.fedavg import FEDAVG
from silograph.methods.ops import SERVER_OPTIMIZER, Server
from silograph.nn.conv import Params

NOTHING: Params = {}
START = {"w": torch.tensor([1.0, 2.0], dtype=torch.float64)}
MEANS = [{"w": torch.tensor(v, dtype=torch.float64)} for v in ([2.0, 2.0], [4.0, 1.0], [3.0, 5.0])]


def test_replace_is_fedavg() -> None:
    weights, memory = take_mean(START, MEANS[0], {})
    assert weights == MEANS[0]
    assert memory == {}


def test_momentum_zero_and_unit_step_is_fedavg() -> None:
    weights, memory = START, NOTHING
    for mean in MEANS:
        weights, memory = ServerMomentum(lr=1.0, momentum=0.0)(weights, mean, memory)
        torch.testing.assert_close(weights["w"], mean["w"], rtol=0, atol=1e-15)


def test_momentum_by_hand() -> None:
    """v1 = .5*0 + (2-1) = 1, x1 = 1 + .1*1 = 1.1; v2 = .5*1 + (4-1.1) = 3.4, x2 = 1.1 + .34."""
    step = ServerMomentum(lr=0.1, momentum=0.5)
    weights, memory = step(START, MEANS[0], {})
    assert weights["w"][0].item() == 1.1
    weights, memory = step(weights, MEANS[1], memory)
    assert abs(weights["w"][0].item() - 1.44) < 1e-15
    assert set(memory) == {"velocity/w"}


def test_momentum_is_sgd_on_the_pseudo_gradient() -> None:
    """The oracle: torch's SGD with gradient x - mean."""
    p = START["w"].clone().requires_grad_()
    oracle = torch.optim.SGD([p], lr=0.3, momentum=0.9)
    weights, memory = START, NOTHING
    for mean in MEANS:
        p.grad = p.detach() - mean["w"]
        oracle.step()
        weights, memory = ServerMomentum(lr=0.3, momentum=0.9)(weights, mean, memory)
        torch.testing.assert_close(weights["w"], p.detach(), rtol=0, atol=1e-14)


def test_adam_by_hand() -> None:
    """Delta = 1: m = .1, v = .01, x = 1 + .5 * .1 / (.1 + .1) = 1.25; Delta = 0 moves nothing."""
    step = ServerAdam(lr=0.5, beta1=0.9, beta2=0.99, tau=0.1)
    weights, memory = step(START, MEANS[0], {})
    torch.testing.assert_close(weights["w"], torch.tensor([1.25, 2.0]).double(), rtol=0, atol=1e-14)
    assert set(memory) == {"first/w", "second/w"}
    # Second step, Delta = 4 - 1.25 = 2.75: m = .9*.1 + .1*2.75 = .365,
    # v = .99*.01 + .01*2.75^2 = .085525, x = 1.25 + .5*.365 / (sqrt(v) + .1).
    weights, _ = step(weights, MEANS[1], memory)
    expected = 1.25 + 0.5 * 0.365 / (0.085525**0.5 + 0.1)
    assert abs(weights["w"][0].item() - expected) < 1e-14


# --- the step that is free of scale ---------------------------------------------------------------

SCALE_FREE = ScaleFreeAdam(lr=0.01, beta1=0.9, beta2=0.99, relative_tau=0.1)


def steps_along(
    step: ServerStep, changes: list[Params], dtype: torch.dtype = torch.float64
) -> list[Params]:
    """The steps that follow these changes; weights are 0, so that a change is exact."""
    zeros, memory, taken = {k: torch.zeros_like(c) for k, c in changes[0].items()}, NOTHING, []
    for change in changes:
        new, memory = step(zeros, change, memory)
        taken.append(new)
    assert all(w.dtype is dtype for new in taken for w in new.values())
    return taken


def drawn_changes(rounds: int, dtype: torch.dtype = torch.float64) -> list[Params]:
    """Changes of two tensors, of sizes as they differ between weights."""
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        spread = torch.exp(2 * torch.randn(*shape, generator=g, dtype=dtype))
        return 1e-3 * torch.randn(*shape, generator=g, dtype=dtype) * spread

    return [{"a": draw(5, 3), "b": 10 * draw(4)} for _ in range(rounds)]


def scaled_by(changes: list[Params], factor: float, names: str = "ab") -> list[Params]:
    return [{k: c * factor if k in names else c for k, c in each.items()} for each in changes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("relative_tau", [0.0, 0.1, 1.0])
def test_a_step_is_free_of_scale(relative_tau: float, dtype: torch.dtype) -> None:
    """All changes times c leave every step what it is, bit for bit where c is a power of two."""
    changes = drawn_changes(6, dtype)
    step = ScaleFreeAdam(0.01, 0.9, 0.99, relative_tau)
    ours = steps_along(step, changes, dtype)
    for factor, exact in ((2.0**-20, True), (2.0**20, True), (1e-4, False), (3e3, False)):
        theirs = steps_along(step, scaled_by(changes, factor), dtype)
        for a, b in zip(ours, theirs, strict=True):
            for name in a:
                rtol = 0 if exact else {torch.float32: 1e-5, torch.float64: 1e-13}[dtype]
                torch.testing.assert_close(a[name], b[name], rtol=rtol, atol=0)


def test_tensors_have_scales_of_their_own() -> None:
    """So small features, whose weights get small gradients, do not slow the first layer down."""
    changes = drawn_changes(4)
    ours = steps_along(SCALE_FREE, changes)
    theirs = steps_along(SCALE_FREE, scaled_by(changes, 2.0**-12, "a"))
    assert all(torch.equal(a[k], b[k]) for a, b in zip(ours, theirs, strict=True) for k in a)


def test_an_absolute_tau_has_a_scale() -> None:
    """What `ServerAdam` does not hold: below tau its steps shrink with the changes."""
    changes = drawn_changes(3)
    ours, theirs = (
        steps_along(ServerAdam(0.01, 0.9, 0.99, 1e-5), scaled_by(changes, c))[-1] for c in (1, 1e-5)
    )
    assert theirs["a"].abs().max() < 0.1 * ours["a"].abs().max()


def test_scale_free_adam_by_hand() -> None:
    """Changes 3 and 4 in one tensor, then 0 and 4; tau is 1 of the root mean square.

    First: m' = (3, 4), v' = (9, 16), root mean square sqrt(12.5); steps 3 / (3 + sqrt(12.5)) and
    4 / (4 + sqrt(12.5)). Second, b1 = b2 = .5: m = (.75, 3), m' = m / .75 = (1, 4),
    v = (2.25, 12), v' = (3, 16), root mean square sqrt(9.5).
    """
    step = ScaleFreeAdam(lr=1.0, beta1=0.5, beta2=0.5, relative_tau=1.0)
    zero = {"w": torch.zeros(2, dtype=torch.float64)}
    first, memory = step(zero, {"w": torch.tensor([3.0, 4.0]).double()}, {})
    expected = [3 / (3 + 12.5**0.5), 4 / (4 + 12.5**0.5)]
    torch.testing.assert_close(
        first["w"], torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0
    )
    assert set(memory) == {"first/w", "second/w", "steps"}
    second, memory = step(zero, {"w": torch.tensor([0.0, 4.0]).double()}, memory)
    expected = [1 / (3**0.5 + 9.5**0.5), 4 / (4 + 9.5**0.5)]
    torch.testing.assert_close(
        second["w"], torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0
    )
    assert int(memory["steps"]) == 2


def test_without_tau_it_is_adam() -> None:
    """The oracle: torch's Adam with gradient x - mean and no eps."""
    p = START["w"].clone().requires_grad_()
    oracle = torch.optim.Adam([p], lr=0.3, betas=(0.9, 0.99), eps=0.0)
    weights, memory = START, NOTHING
    for mean in ({"w": MEANS[1]["w"]}, {"w": MEANS[2]["w"]}, {"w": MEANS[1]["w"]}):
        p.grad = p.detach() - mean["w"]
        oracle.step()
        weights, memory = ScaleFreeAdam(0.3, 0.9, 0.99, 0.0)(weights, mean, memory)
        torch.testing.assert_close(weights["w"], p.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("relative_tau", [0.0, 0.1])
def test_a_tensor_that_never_changed_stays(relative_tau: float) -> None:
    """Also one whose changes are too small to be squared: no step, and no division by zero."""
    step = ScaleFreeAdam(0.01, 0.9, 0.99, relative_tau)
    for change in (0.0, 1e-30):
        start = {"w": torch.zeros(3)}
        new, _ = step(start, {"w": torch.full((3,), change)}, {})
        assert new["w"].tolist() == [0.0, 0.0, 0.0]


def test_input_is_untouched() -> None:
    for step in (ServerMomentum(1.0, 0.9), ServerAdam(0.1, 0.9, 0.99, 1e-3), SCALE_FREE):
        _, memory = step(START, MEANS[0], {})
        before = {k: m.clone() for k, m in memory.items()}
        step(START, MEANS[1], memory)
        assert START["w"].tolist() == [1.0, 2.0]
        assert all(torch.equal(memory[k], before[k]) for k in before)


# --- of users ------------------------------------------------------------------------------------

# FedAdagrad of Reddi et al. (2021), algorithm 2, with a memory of other names than the library's.
OWN = """
from dataclasses import dataclass

from silograph.aggregation.server_optimizers import ServerOptimizer


@dataclass(frozen=True)
class Options:
    server_lr: float = 0.1


@dataclass(frozen=True)
class Adagrad:
    lr: float

    def __call__(self, weights, mean, memory):
        sums = {n: memory.get(n, 0 * w) + (mean[n] - w) ** 2 for n, w in weights.items()}
        new = {n: w + self.lr * (mean[n] - w) / (sums[n].sqrt() + 1e-3) for n, w in weights.items()}
        return new, sums


def make(options):
    return Adagrad(options.server_lr)


ADAGRAD = ServerOptimizer("adagrad", "sums of squares", "Reddi et al., 2021", Options, make)
"""


def test_one_of_a_file_remembers_what_it_returned(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After two rounds its memory is the sum of both squared changes; a resumed run has it, too."""
    (tmp_path / "mine.py").write_text(OWN)
    spec, graph = f"{tmp_path / 'mine.py'}:ADAGRAD", make_graph()
    asked = {"method": "fedavg", "optimizer": "sgd", "server_optimizer": spec, "dtype": "float64"}
    whole = go(graph, **asked, rounds=3)
    seen: list[Params] = []

    step = Server.step

    def watched(self: Server, state: ServerState, mean: Params, report: RoundReport) -> Any:
        seen.append(fields_under(SERVER_OPTIMIZER, state.memory))
        return step(self, state, mean, report)

    monkeypatch.setattr(Server, "step", watched)
    go(graph, **asked, rounds=3)
    first, second, third = seen
    assert not first
    assert second.keys() == third.keys() == (weights_of(whole) or {}).keys()
    assert all(bool((third[name] > sums).any()) for name, sums in second.items())
    monkeypatch.undo()
    run_until(monkeypatch, graph, 3, tmp_path / "run", **{**FAST, **asked, "rounds": 3})
    again = sg.resume(tmp_path / "run", graph=graph, trust=True)
    assert same_bits(weights_of(again), weights_of(whole))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (("return new, sums", "return {}, sums"), ProtocolError, "expected weights of the same"),
        (("memory.get", "memory.got"), OpError, "server optimizer .* failed with AttributeError"),
    ],
)
def test_one_that_is_wrong_is_named(
    make_graph: MakeGraph,
    tmp_path: Path,
    change: tuple[str, str],
    error: type[Exception],
    message: str,
) -> None:
    (tmp_path / "mine.py").write_text(OWN.replace(*change))
    with pytest.raises(error, match=message):
        go(make_graph(), method="fedavg", server_optimizer=f"{tmp_path / 'mine.py'}:ADAGRAD")


def test_real_federations_take_silographs_own_alone() -> None:
    with pytest.raises(ConfigError, match="expected one of silograph's own server_optimizer parts"):
        check_deployable(make_config({"server_optimizer": "mine.py:ADAGRAD"}), FEDAVG)
    check_deployable(make_config({"server_optimizer": "adam"}), FEDAVG)
