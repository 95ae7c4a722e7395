"""Updates of DDPG against `torch.nn` and `torch.optim`, with targets that are not the networks."""

import copy
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from silograph.control import AgentOptions, Knob, RunStanding
from silograph.control import ddpg as agents
from silograph.control.base import ControllerState
from silograph.control.ddpg import Learning, Networks, Transitions, first_networks, update_networks
from silograph.core.key import Key
from silograph.nn.conv import Params

STATES, ACTIONS, HIDDEN = 3, 2, (5, 4)


def module_of(weights: Mapping[str, Tensor]) -> nn.Sequential:
    """Return a network of `torch.nn` with these weights."""
    layers: list[nn.Module] = []
    for number in range(len(weights) // 2):
        own = nn.Linear(*weights[f"{number}.weight"].shape[::-1])
        own.weight.data = weights[f"{number}.weight"].clone()
        own.bias.data = weights[f"{number}.bias"].clone()
        layers += [own, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def weights_of(module: nn.Sequential) -> Params:
    linears = [layer for layer in module if isinstance(layer, nn.Linear)]
    found: Params = {}
    for number, layer in enumerate(linears):
        found[f"{number}.weight"], found[f"{number}.bias"] = layer.weight.data, layer.bias.data
    return found


def batches(count: int) -> list[Transitions]:
    draws = torch.Generator().manual_seed(1)
    return [
        Transitions(
            torch.randn(7, STATES, generator=draws),
            torch.rand(7, ACTIONS, generator=draws),
            torch.randn(7, generator=draws),
            torch.randn(7, STATES, generator=draws),
        )
        for _ in range(count)
    ]


def theirs(start: Networks, how: Learning, found: list[Transitions]) -> dict[str, Params]:
    """Algorithm 1 of Lillicrap et al. as it is printed, and what we added to the actor's loss."""
    nets = {name: module_of(start.part(name)) for name in ("actor", "critic")}
    targets = {name: module_of(start.part(f"target_{name}")) for name in nets}
    climbs = torch.optim.Adam(nets["actor"].parameters(), how.actor_lr)
    fits = torch.optim.Adam(
        nets["critic"].parameters(), how.critic_lr, weight_decay=how.critic_decay
    )
    for one in found:
        with torch.no_grad():
            later = torch.sigmoid(targets["actor"](one.after))
            value = targets["critic"](torch.cat([one.after, later], 1))[:, 0]
        q = nets["critic"](torch.cat([one.state, one.action], 1))[:, 0]
        fits.zero_grad()
        nn.functional.mse_loss(q, one.reward + how.discount * value).backward()
        fits.step()
        raw = nets["actor"](one.state)
        q = copy.deepcopy(nets["critic"])(torch.cat([one.state, torch.sigmoid(raw)], 1))
        climbs.zero_grad()
        (how.centering * (raw**2).mean() - q.mean()).backward()
        climbs.step()
        for name, net in nets.items():
            for slow, fast in zip(targets[name].parameters(), net.parameters(), strict=True):
                slow.data = how.follow * fast.data + (1 - how.follow) * slow.data
    own = {name: weights_of(net) for name, net in nets.items()}
    return own | {f"target_{name}": weights_of(net) for name, net in targets.items()}


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_updates_are_those_of_modules_and_optimizers(decay: float) -> None:
    first, other = (first_networks(STATES, ACTIONS, HIDDEN, Key.of(n)) for n in (1, 2))
    weights = {
        n: w if n.startswith("target_") else other.weights[n] for n, w in first.weights.items()
    }
    start = Networks({n: 3 * w for n, w in weights.items()}, first.memory)
    how = Learning(actor_lr=0.05, critic_lr=0.1, critic_decay=decay, follow=0.3, centering=0.1)
    ours = start
    for one in batches(20):
        ours = update_networks(ours, one, how)
    for name, own in theirs(start, how, batches(20)).items():
        for n, w in own.items():
            torch.testing.assert_close(ours.part(name)[n], w, rtol=0, atol=1e-4)


# --- what enters an update ------------------------------------------------------------------------

KNOBS = (Knob("share", 0.0, 1.0, 0.5),)
SMALL = AgentOptions(hidden=(8, 4), capacity=64, batch=5, least_noise=0.05)


def standing_at(t: int) -> RunStanding:
    """Rounds of 3, 4 and 5 seconds in turns."""
    weights = {"w": Key.of(2).fold(t).matrix(6, 5).float()}
    seconds = float(sum(3 + n % 3 for n in range(t)))
    return RunStanding(t, 1, 0, None, t, 1.0, 0.4 + t / 100, seconds, weights)


def after_rounds(count: int) -> ControllerState:
    state: ControllerState = agents.init(SMALL, KNOBS, standing_at(0))
    for t in range(1, count + 1):
        values = agents.propose(SMALL, KNOBS, state, standing_at(t - 1), Key.of(1).fold(t))
        state = agents.observe(SMALL, KNOBS, state, standing_at(t), {}, values)
    return state


def test_the_time_term_counts_from_the_shortest_round_of_the_profile() -> None:
    """Beta is 3 s, and the mean over the 20 rounds of the profile 3.95 s."""
    state = after_rounds(agents.PROFILE + 3)
    assert float(state["beta"]) == 3
    assert float(state["alpha"]) == pytest.approx(1 / 3.95)
    more = torch.tensor([float(n % 3) for n in range(23)])
    score = torch.tensor([0.4 + t / 100 for t in range(1, 24)])
    torch.testing.assert_close(
        state["replay/reward"][:23], 128 ** (score - 0.9) - more / 3.95, rtol=0, atol=1e-5
    )


def test_rounds_that_nearly_tie_cost_nearly_nothing() -> None:
    """A round that is longer by a share of the mean costs that share, however the others tie."""
    state = dict(agents.blank_agent(SMALL, KNOBS, 1, 1))
    state["profile/seconds"] = 2.0 + 1e-9 * torch.arange(agents.PROFILE).double()
    state["profile/score"] = torch.full((agents.PROFILE,), 0.9).double()
    state["profile/observation"] = Key.of(1).matrix(agents.PROFILE, len(state["mean"]))
    done = agents._finish_profile(SMALL, state)
    torch.testing.assert_close(done["replay/reward"][: agents.PROFILE], torch.ones(agents.PROFILE))
    longer = agents.rewards(SMALL, done, torch.tensor(0.9), torch.tensor(2.2).double())
    assert float(longer) == pytest.approx(1 - 0.1, abs=1e-6)


def test_updates_draw_anew_in_every_round_among_what_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[list[float]] = []

    def noted(networks: Networks, found: Transitions, learning: Learning) -> Networks:
        drawn.append(found.reward.tolist())
        return networks

    monkeypatch.setattr(agents, "update_networks", noted)
    state = after_rounds(agents.PROFILE + 30)
    known = state["replay/reward"].tolist()
    for number, rewards in enumerate(drawn, start=agents.PROFILE + 1):
        assert set(rewards) <= set(known[:number])
    assert len(drawn) == 30
    places = [known.index(rewards[0]) / n for n, rewards in enumerate(drawn, agents.PROFILE + 1)]
    assert min(places) < 0.2
    assert max(places) > 0.8


def test_noise_does_not_fall_below_its_least() -> None:
    state = dict(agents.blank_agent(SMALL, KNOBS, 1, 1))
    state |= {"observation": torch.zeros_like(state["mean"]), "rounds": torch.tensor(10_000)}
    found = [
        agents.propose(SMALL, KNOBS, state, standing_at(0), Key.of(n))["share"] for n in range(1000)
    ]
    quiet = agents.propose(replace(SMALL, explore=False), KNOBS, state, standing_at(0), Key.of(0))
    spread = (torch.stack(found) - quiet["share"]).square().mean().sqrt()
    assert float(spread) == pytest.approx(0.05, rel=0.1)
