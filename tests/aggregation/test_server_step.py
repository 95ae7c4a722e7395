"""Server steps against their equations, worked out by hand."""

import torch

from silograph.aggregation.server_step import ServerAdam, ServerMomentum, replace
from silograph.nn.conv import Params

NOTHING: Params = {}
START = {"w": torch.tensor([1.0, 2.0], dtype=torch.float64)}
MEANS = [{"w": torch.tensor(v, dtype=torch.float64)} for v in ([2.0, 2.0], [4.0, 1.0], [3.0, 5.0])]


def test_replace_is_fedavg() -> None:
    weights, memory = replace(START, MEANS[0], {})
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


def test_input_is_untouched() -> None:
    for step in (ServerMomentum(1.0, 0.9), ServerAdam(0.1, 0.9, 0.99, 1e-3)):
        _, memory = step(START, MEANS[0], {})
        before = {k: m.clone() for k, m in memory.items()}
        step(START, MEANS[1], memory)
        assert START["w"].tolist() == [1.0, 2.0]
        assert all(torch.equal(memory[k], before[k]) for k in before)
