"""DDPG: an update by hand and against torchrl, a toy task, an agent's file and what it keeps."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from mistakes import raises_code
from silograph.control import AgentOptions, Knob, RunStanding
from silograph.control import ddpg as agents
from silograph.control.base import ControllerState
from silograph.control.ddpg import (
    ACTOR,
    CRITIC,
    SIZE,
    Learning,
    Networks,
    Transitions,
    act,
    actor_loss,
    critic_loss,
    first_networks,
    principal,
    read_agent,
    sketch_of,
    update_networks,
    value,
    write_agent,
)
from silograph.core.errors import ConfigError
from silograph.core.key import Key
from silograph.core.payload import with_prefix
from silograph.nn.conv import Params

KNOBS = (Knob("share", 0.0, 1.0, 0.5), Knob("size", 1, 9, 4, by_client=True))
CLIENTS = 3


# --- one update, by hand --------------------------------------------------------------------------


def by_hand() -> tuple[Networks, Transitions]:
    """One value of state and of action, two hidden units, of which one is off in each network."""
    one = torch.tensor
    actor: Params = {
        "0.weight": one([[1.0], [-1.0]]),
        "0.bias": one([0.0, 0.0]),
        "1.weight": one([[0.5, 2.0]]),
        "1.bias": one([-1.0]),
    }
    critic: Params = {
        "0.weight": one([[1.0, 2.0], [-1.0, -1.0]]),
        "0.bias": one([0.0, 0.0]),
        "1.weight": one([[0.5, 3.0]]),
        "1.bias": one([0.25]),
    }
    weights: Params = {}
    for name, own in (("actor", actor), ("critic", critic)):
        weights |= with_prefix(name, own) | with_prefix(f"target_{name}", own)
    blank = first_networks(1, 1, (2,), Key.of(0))
    zero = {name: torch.zeros_like(t) for name, t in blank.memory.items()}
    found = Transitions(one([[2.0]]), one([[0.5]]), one([1.0]), one([[4.0]]))
    return Networks(weights, zero), found


def test_one_update_is_worked_out_by_hand() -> None:
    networks, found = by_hand()
    # Actor: hidden (s, 0), so a = sigmoid(s / 2 - 1): a(4) = sigmoid(1), a(2) = 1/2.
    a_after = 1 / (1 + math.exp(-1))
    assert float(act(networks.part("target_actor"), found.after)) == pytest.approx(a_after)
    # Critic: hidden (s + 2 a, 0), q = (s + 2 a) / 2 + 1/4.
    q_after, q = (4 + 2 * a_after) / 2 + 0.25, (2 + 2 * 0.5) / 2 + 0.25
    error = 1.0 + 0.9 * q_after - q
    leaves = {n: w.requires_grad_() for n, w in networks.part(CRITIC).items()}
    loss = critic_loss(leaves, networks, found, 0.9)
    assert loss.item() == pytest.approx(error**2, rel=1e-6)
    grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    # dL/dq = -2 error; the second hidden unit is off.
    by_name = {
        "0.weight": [[2 * 0.5, 0.5 * 0.5], [0, 0]],
        "0.bias": [0.5, 0],
        "1.weight": [[3, 0]],
        "1.bias": [1],
    }
    for name, expected in by_name.items():
        torch.testing.assert_close(grads[name], -2 * error * torch.tensor(expected).float())
    # dq/da = 1 (2 times 1/2), da/d(before the sigmoid) = 1/4, and the hidden unit is s = 2.
    own = {n: w.detach().requires_grad_() for n, w in networks.part(ACTOR).items()}
    loss = actor_loss(own, networks.part(CRITIC), found.state)
    assert float(loss.detach()) == pytest.approx(-q)
    climbed = dict(zip(own, torch.autograd.grad(loss, list(own.values())), strict=True))
    torch.testing.assert_close(climbed["1.weight"], torch.tensor([[-0.5, 0.0]]))
    torch.testing.assert_close(climbed["1.bias"], torch.tensor([-0.25]))
    torch.testing.assert_close(climbed["0.weight"], torch.tensor([[-0.25], [0.0]]))
    # The first step of Adam is lr along the sign of the gradient, and none where it is 0.
    learning = Learning(actor_lr=0.01, critic_lr=0.1, follow=0.25, critic_decay=0.01)
    before = {n: w.detach().clone() for n, w in networks.weights.items()}
    after = update_networks(Networks(before, networks.memory), found, learning).weights
    assert error > 0
    expected = torch.tensor([[0.6, 2.9]])  # 1/2 up by 0.1; 3 has no gradient but its decay's
    torch.testing.assert_close(after["critic/1.weight"], expected, rtol=0, atol=1e-6)
    expected = torch.tensor([[0.51, 2.0]])  # the critic still wants more
    torch.testing.assert_close(after["actor/1.weight"], expected, rtol=0, atol=1e-6)
    expected = torch.tensor([[0.525, 2.975]])  # a quarter of the way from 1/2 to 0.6
    torch.testing.assert_close(after["target_critic/1.weight"], expected, rtol=0, atol=1e-6)
    assert all(torch.equal(before[n], networks.weights[n]) for n in before)


@pytest.mark.parametrize(("centering", "weight"), [(0.0, 0.5), (0.03, 0.49)])
def test_what_the_critic_does_not_value_goes_back_to_the_middle(
    centering: float, weight: float
) -> None:
    """The critic does not see the action; the actor has sigmoid(1) in state 4, above the middle."""
    networks, found = by_hand()
    blind = networks.weights | {"critic/0.weight": torch.tensor([[1.0, 0.0], [-1.0, 0.0]])}
    learning = Learning(actor_lr=0.01, critic_lr=0.0, centering=centering)
    there = replace(found, state=found.after)
    after = update_networks(Networks(blind, networks.memory), there, learning).weights
    expected = torch.tensor([[weight, 2.0]])
    torch.testing.assert_close(after["actor/1.weight"], expected, rtol=0, atol=1e-6)


def test_losses_are_those_of_torchrl() -> None:
    modules, objectives = (pytest.importorskip(f"torchrl.{n}") for n in ("modules", "objectives"))
    tensordict = pytest.importorskip("tensordict")
    networks = first_networks(3, 2, (5, 4), Key.of(4))

    class Net(torch.nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.own = torch.nn.ParameterDict(
                {n.replace(".", "_"): w.clone() for n, w in networks.part(name).items()}
            )
            self.acts = name == ACTOR

        def forward(self, *x: Tensor) -> Tensor:
            own = {n.replace("_", "."): w for n, w in self.own.items()}
            if self.acts:
                return act(own, x[0])
            return value(own, x[0], x[1])[:, None]

    draws = torch.Generator().manual_seed(1)
    state, after = (torch.randn(7, 3, generator=draws) for _ in range(2))
    action, reward = torch.rand(7, 2, generator=draws), torch.randn(7, generator=draws)
    actor = modules.Actor(Net(ACTOR), in_keys=["observation"])
    critic = modules.ValueOperator(Net(CRITIC), in_keys=["observation", "action"])
    theirs = objectives.DDPGLoss(
        actor, critic, loss_function="l2", delay_actor=True, delay_value=True
    )
    theirs.make_value_estimator(gamma=0.9)
    done = torch.zeros(7, 1, dtype=torch.bool)
    nexts = {"observation": after, "reward": reward[:, None], "done": done, "terminated": done}
    told = theirs(
        tensordict.TensorDict(
            {"observation": state, "action": action, "next": nexts}, batch_size=[7]
        )
    )
    found = Transitions(state, action, reward, after)
    ours = critic_loss(networks.part(CRITIC), networks, found, 0.9)
    torch.testing.assert_close(ours, told["loss_value"].detach())
    ours = actor_loss(networks.part(ACTOR), networks.part(CRITIC), state)
    torch.testing.assert_close(ours, told["loss_actor"].detach())


# --- a toy task -----------------------------------------------------------------------------------

TOY = AgentOptions(
    state="pca",  # of a summary's norms none shows the sign of a weight
    time="measured",
    target=1.0,
    omega=1.0,
    hidden=(64, 32),
    learning=Learning(actor_lr=1e-3, critic_lr=1e-3, discount=0.1),
)


def played(*, blind: bool, steps: int = 1500) -> float:
    """The mean distance to the optimum of the last rounds, without noise.

    Weights are drawn alike in [-1, 1]; the best value of the knob is (w + 1) / 2, and a round takes
    as many seconds as the square of the distance: so time alone tells which value was good.
    """
    knobs = (Knob("share", 0.0, 1.0, 0.5),)

    def standing(t: int) -> RunStanding:
        w = 2 * best(t)[None] - 1
        shown = torch.zeros(1) if blind else torch.cat([w, -w, 2 * w]).float()
        return RunStanding(t, 1, 0, None, t, 1.0, 0.5, 0.0, {"w": shown})

    def best(t: int) -> Tensor:
        return Key.of(9).fold("world", t).matrix(1, 1)[0, 0]

    state: ControllerState = agents.init(TOY, knobs, standing(0))
    for t in range(1, steps + 1):
        values = agents.propose(TOY, knobs, state, standing(t - 1), Key.of(3).fold(t))
        took = float((values["share"] - best(t - 1)).square())
        state = agents.observe(TOY, knobs, state, standing(t), {"seconds": took}, values)
    quiet, missed = replace(TOY, explore=False), 0.0
    for t in range(steps, steps + 100):
        values = agents.propose(quiet, knobs, state, standing(t), Key.of(0))
        missed += float((values["share"] - best(t)).abs()) / 100
        facts = {"seconds": 0.0}
        state = agents.observe(quiet, knobs, state, standing(t + 1), facts, values)
    return missed


@pytest.mark.slow
def test_an_optimum_that_depends_on_the_state_is_learned_and_not_without_it() -> None:
    assert played(blind=False) < 0.08
    assert played(blind=True) > 0.2  # the best constant misses by 1/4


# --- what it keeps --------------------------------------------------------------------------------

SMALL = AgentOptions(hidden=(8, 4), capacity=30, batch=5)
SMALL_PCA = replace(SMALL, state="pca")
LAYERS = 1


def standing_at(t: int, score: float = 0.4) -> RunStanding:
    weights = {"0.weight": Key.of(2).fold(t).matrix(6, 5).float(), "0.bias": torch.zeros(5)}
    return RunStanding(t, CLIENTS, 0, None, t, 1.0, score, 2.0 * t + t % 3, weights)


def after_rounds(count: int, options: AgentOptions = SMALL) -> ControllerState:
    state: ControllerState = agents.init(options, KNOBS, standing_at(0))
    for t in range(1, count + 1):
        values = agents.propose(options, KNOBS, state, standing_at(t - 1), Key.of(1).fold(t))
        for knob in KNOBS:
            knob.check(values[knob.name], CLIENTS, "the agent")
        told = {"seconds": 1.0}
        state = agents.observe(options, KNOBS, state, standing_at(t, 0.4 + t / 100), told, values)
    return state


@pytest.mark.parametrize("options", [SMALL, SMALL_PCA])
def test_the_profile_fixes_the_scales_of_states_and_of_time(options: AgentOptions) -> None:
    state = after_rounds(agents.PROFILE, options)
    seconds = torch.tensor([2.0 + (t % 3) - ((t - 1) % 3) for t in range(1, 21)]).double()
    torch.testing.assert_close(state["profile/seconds"], seconds)
    assert float(state["beta"]) == float(seconds.min())
    assert float(state["alpha"]) == pytest.approx(1 / float(seconds.mean()))
    term = (seconds - seconds.min()) / seconds.mean()
    score = state["profile/score"]
    expected = 128 ** (score - 0.9) - term
    torch.testing.assert_close(state["replay/reward"][:20].double(), expected, rtol=0, atol=1e-6)
    later = after_rounds(agents.PROFILE + 15, options)
    scale = "axes" if options is SMALL_PCA else "scale"
    assert all(torch.equal(later[n], state[n]) for n in ("mean", scale, "alpha", "beta"))
    assert not torch.equal(later["net/actor/0.weight"], state["net/actor/0.weight"])
    assert torch.equal(later["replay/after"][20], later["replay/state"][21])
    assert int(later["rounds"]) == 35


def drawn(state: ControllerState, rounds: int, number: int) -> Tensor:
    """What is proposed for the clients by an agent that has seen so many rounds."""
    seen, knobs = {**state, "rounds": torch.tensor(rounds)}, (Knob("keep", 0, 1.0, 0.5, True),)
    return agents.propose(SMALL, knobs, seen, standing_at(0), Key.of(number))["keep"]


def test_half_of_what_is_drawn_is_alike_at_all_clients() -> None:
    state = dict(agents.blank_agent(SMALL, (Knob("keep", 0, 1.0, 0.5, True),), CLIENTS, LAYERS))
    state["observation"] = torch.zeros_like(state["mean"])
    for rounds in range(agents.PROFILE):
        assert len(drawn(state, rounds, rounds).unique()) == (CLIENTS if rounds % 2 else 1)
    found = torch.stack([drawn(state, 200, number) for number in range(2000)])  # noise of .21
    together = torch.corrcoef(found.T)
    assert (together[~torch.eye(CLIENTS, dtype=torch.bool)] - 0.5).abs().max() < 0.1
    assert (found.std(0) - 0.3 * 0.998**180).abs().max() < 0.01
    assert (found.mean(0) - 0.5).abs().max() < 0.02


def test_a_reward_without_time() -> None:
    state = after_rounds(agents.PROFILE + 5, replace(SMALL, time="none"))
    assert float(state["alpha"]) == 0
    expected = 128 ** (torch.tensor([0.4 + t / 100 for t in range(1, 26)]) - 0.9)
    torch.testing.assert_close(state["replay/reward"][:25], expected)
    unclocked = replace(standing_at(0), virtual_seconds=None)
    assert agents.init(replace(SMALL, time="none"), KNOBS, unclocked)


def test_the_oldest_transitions_make_room() -> None:
    """30 are kept: those of rounds 31 to 33 stand where the first three stood."""
    later, before = after_rounds(33), after_rounds(30)
    assert torch.equal(later["replay/reward"][3:], before["replay/reward"][3:])
    assert not torch.equal(later["replay/reward"][:3], before["replay/reward"][:3])


def test_without_exploring_nothing_is_learned_and_no_noise_is_added() -> None:
    state, quiet = after_rounds(25), replace(SMALL, explore=False)
    one, two = (agents.propose(quiet, KNOBS, state, standing_at(25), Key.of(k)) for k in (1, 2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    new = agents.observe(quiet, KNOBS, state, standing_at(26), {"seconds": 1.0}, one)
    agent = agents.agent_of(state)
    assert all(torch.equal(new[n], state[n]) for n in agent)
    assert float(new["observation"][0]) == pytest.approx(math.log(27))


def test_an_agent_of_many_clients_is_below_20_mb() -> None:
    knobs = (
        *KNOBS,
        Knob("keep", 0.0, 1.0, 0.5, by_client=True),
        Knob("k", 1, 9, 2, by_client=True),
    )
    agent = agents.blank_agent(AgentOptions(state="pca"), knobs, 50, LAYERS)
    assert sum(t.nbytes for t in agent.values()) < 20e6


def test_knobs_are_actions_and_back() -> None:
    action = torch.tensor([0.25, 0.0, 0.5, 1.0])
    values = agents.to_knobs(KNOBS, action, CLIENTS)
    assert values["share"].item() == 0.25
    assert values["size"].tolist() == [1, 5, 9]
    torch.testing.assert_close(agents.to_action(KNOBS, values), action)


def test_a_summary_is_that_of_its_definition() -> None:
    before = {"0.weight": torch.tensor([[3.0, 0.0]]), "1.weight": torch.tensor([1.0])}
    after = {
        "0.weight": torch.tensor([[3.0, 4.0]]),
        "0.bias": torch.tensor([12.0]),
        "1.weight": torch.tensor([-1.0]),
    }
    standing = replace(standing_at(6, 0.7), weights=after)
    seen = agents.summary_of(standing, 2.5, 0.6, before | {"0.bias": torch.tensor([9.0])})
    expected = torch.tensor([math.log(7), 0.7, 0.1, 2.5, 13.0, 1.0, 5.0, 2.0]).double()
    torch.testing.assert_close(seen, expected, rtol=0, atol=1e-7)


def test_a_summary_does_not_see_which_hidden_unit_is_which() -> None:
    """Units in another order and of other signs, as of another initialization, look alike."""
    order, sign = torch.tensor([2, 0, 1]), torch.tensor([1.0, -1.0, 1.0])

    def weights(t: int, *, other: bool) -> dict[str, Tensor]:
        first, second = Key.of(t).matrix(4, 3), Key.of(50 + t).matrix(3, 2)
        if other:
            first, second = (first * sign)[:, order], (second * sign[:, None])[order]
        return {"0.weight": first, "1.weight": second}

    ours, theirs = (
        agents.summary_of(
            replace(standing_at(3), weights=weights(3, other=other)),
            1.0,
            0.3,
            weights(2, other=other),
        )
        for other in (False, True)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    sketches = [sketch_of(weights(3, other=other)) for other in (False, True)]
    assert float((sketches[0] - sketches[1]).norm() / sketches[0].norm()) > 0.5


def test_summaries_are_scaled_by_the_profile_and_bounded() -> None:
    summaries = Key.of(1).matrix(agents.PROFILE, 8) * 100
    summaries[:, 6] = 3.0
    alpha, beta = torch.tensor(0.5).double(), torch.tensor(2.0).double()
    mean, scale = agents.scale_of_summaries(summaries, alpha, beta)
    agent = {"mean": mean, "scale": scale}
    seen = agents.scaled_state(agent, summaries).double()
    torch.testing.assert_close(seen[:, agents.SECONDS], ((summaries[:, 3] - 2) / 2).clamp(-5, 5))
    others = [n for n in range(8) if n not in (agents.SECONDS, 6)]
    torch.testing.assert_close(seen.std(0)[others], torch.ones(6).double())
    assert bool((seen[:, 6] == 0).all())
    assert float(agents.scaled_state(agent, summaries + 1e9)[0, 0]) == agents.LARGEST_STATE


def test_principal_components_are_those_of_the_covariance() -> None:
    rows = Key.of(1).matrix(20, SIZE)
    mean, axes = principal(rows, 20)
    seen = (rows - mean) @ axes
    covariance = seen.T @ seen
    assert float((covariance - covariance.diagonal().diag()).abs().max()) < 1e-9
    assert float(seen[:, 0].square().mean()) == pytest.approx(1)
    assert bool((covariance.diagonal().diff() <= 1e-9).all())


def test_a_sketch_keeps_inner_products_in_expectation() -> None:
    one, two = Key.of(1).matrix(1, 5000)[0] - 0.5, Key.of(2).matrix(1, 5000)[0] - 0.5
    a, b = sketch_of({"w": one}), sketch_of({"w": one + 0.3 * two})
    exact = float(one @ (one + 0.3 * two))
    assert abs(float(a @ b) / exact - 1) < 0.2
    assert torch.equal(sketch_of({"b": two, "a": one}), sketch_of({"a": one, "b": two}))


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [SMALL, SMALL_PCA])
def test_an_agent_goes_on_from_its_file(tmp_path: Path, options: AgentOptions) -> None:
    state, path = after_rounds(25, options), tmp_path / "agent.safetensors"
    agent, first = agents.agent_of(state), agents.init(options, KNOBS, standing_at(0))
    of_the_run = {"observation", "seconds"} | set(with_prefix("weights", standing_at(0).weights))
    assert set(state) - set(agent) == {n for n in of_the_run if n in state}
    write_agent(path, agent)
    again = agents.init(replace(options, agent=str(path)), KNOBS, standing_at(0))
    assert all(torch.equal(again[n], t) for n, t in agent.items())
    assert all(torch.equal(again[n], first[n]) for n in set(state) - set(agent))


@pytest.mark.parametrize(("there", "here"), [(SMALL, SMALL_PCA), (SMALL_PCA, SMALL)])
def test_an_agent_of_the_other_kind_of_state_is_refused(
    tmp_path: Path, there: AgentOptions, here: AgentOptions
) -> None:
    path = tmp_path / "agent.safetensors"
    write_agent(path, agents.blank_agent(there, KNOBS, CLIENTS, LAYERS))
    message = (
        f"expected an agent with agent_state={here.state} in .*, got one with "
        f"agent_state={there.state}: give --option agent_state={there.state}, or train another"
    )
    with pytest.raises(ConfigError, match=message):
        agents.init(replace(here, agent=str(path)), KNOBS, standing_at(0))


def test_an_agent_of_a_deeper_model_or_an_older_reward_is_refused(tmp_path: Path) -> None:
    path, agent = tmp_path / "agent.safetensors", agents.blank_agent(SMALL, KNOBS, CLIENTS, 3)
    write_agent(path, agent)
    with pytest.raises(ConfigError, match="knobs, or a model of another number of layers, or anot"):
        agents.init(replace(SMALL, agent=str(path)), KNOBS, standing_at(0))
    path.write_bytes(safetensors.torch.save(agent, agents.OLD_FORMAT))
    with raises_code(ConfigError, "other-version"):
        agents.init(replace(SMALL, agent=str(path)), KNOBS, standing_at(0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": torch.zeros(1)}, "expected extra of shape None in the agent"),
        ({"axes": torch.zeros(3, 3)}, r"expected axes of shape \(1024, 20\) .* got \(3, 3\)"),
        ({"beta": torch.tensor(torch.nan).double()}, "expected finite numbers .* in beta"),
        ({"alpha": torch.tensor(1.0)}, "expected alpha as torch.float64"),
        ({"rounds": torch.tensor(-1)}, "expected rounds from 0 to 2147483647 .* got -1"),
        ({"rounds": torch.tensor(2**62)}, "expected rounds from 0 to 2147483647 in the agent"),
        (
            {"beta": torch.tensor(1e300, dtype=torch.float64)},
            "expected numbers up to 1e.12 in .* got beta",
        ),
    ],
)
def test_other_files_are_refused(tmp_path: Path, change: dict[str, Tensor], message: str) -> None:
    path = tmp_path / "agent.safetensors"
    like = agents.blank_agent(SMALL_PCA, KNOBS, CLIENTS, LAYERS)
    write_agent(path, {**like, **change})
    with pytest.raises(ConfigError, match=message):
        read_agent(path, like)


def test_what_is_no_agent_is_refused(tmp_path: Path) -> None:
    like, path = agents.blank_agent(SMALL, KNOBS, CLIENTS, LAYERS), tmp_path / "model.safetensors"
    path.write_bytes(safetensors.torch.save(like))
    with pytest.raises(ConfigError, match=r"expected an agent in .* got another file"):
        read_agent(path, like)
    path.write_bytes(b"no tensors")
    mend = r"give the file agent\.safetensors that silograph train-agent wrote$"
    with pytest.raises(ConfigError, match=f"expected an agent in .*: {mend}"):
        read_agent(path, like)
    with pytest.raises(ConfigError, match=f"expected an agent in .*none, got no such file: {mend}"):
        read_agent(tmp_path / "none", like)
    with pytest.raises(ConfigError, match=f"expected an agent in .*, got a folder: {mend}"):
        read_agent(tmp_path, like)


@pytest.mark.parametrize(("there", "said"), [(4, "4 clients"), (1, "1 client")])
def test_an_agent_of_another_number_of_clients_names_both(
    tmp_path: Path, there: int, said: str
) -> None:
    path = tmp_path / "agent.safetensors"
    write_agent(path, agents.blank_agent(SMALL, KNOBS, there, LAYERS))
    message = f"trained for other knobs, or for {said}, where this run has 3$"
    with pytest.raises(ConfigError, match=message):
        agents.init(replace(SMALL, agent=str(path)), KNOBS, standing_at(0))
    two = (KNOBS[1], replace(KNOBS[1], name="more"))
    write_agent(path, agents.blank_agent(SMALL, KNOBS, 4, LAYERS))  # 5 values, of no 2 by client
    with pytest.raises(ConfigError, match=r"other knobs, or another number of clients$"):
        agents.init(replace(SMALL, agent=str(path)), two, standing_at(0))


@pytest.mark.parametrize(
    ("options", "change", "message"),
    [
        ({}, {"weights": {}}, "expected a method whose server has a model for ddpg"),
        ({}, {"val_score": None}, "expected validation nodes, whose score is in the reward"),
        ({}, {"val_score": 3.0}, "expected a --metric from 0 to 1"),
        ({}, {"virtual_seconds": None}, "expected a virtual clock, whose seconds are in the rew"),
        ({"explore": False}, {}, "expected an agent that has seen 20 rounds or more"),
    ],
)
def test_runs_that_teach_an_agent_nothing_are_refused(
    options: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        agents.init(replace(SMALL, **options), KNOBS, replace(standing_at(0), **change))
