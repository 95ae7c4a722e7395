"""An attack on a planted node: a lower bound of epsilon, beside what runs with its unit claim.

The server knows all of a silo's graph and asks whether one node is in it. It knows the sum of
clipped gradients with the node and the one without, and chooses weights and draws of edges.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("dp_accounting")

from conftest import planted_graph
from membership import gaussian_lower_bound, lower_bound
from runs import FAST
from silograph.core.config import make_config
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Stacked
from silograph.experiment.run.setup import first_weights, prepare
from silograph.federation.messages import to_payload
from silograph.federation.privacy.release import SimulatedNoise, shares_of
from silograph.federation.privacy.updates import CLIP_UNITS, UpdatePrivacy
from silograph.graph.graph import Graph
from silograph.graph.read.arrays import from_arrays
from silograph.methods.local_training import GlobalModel
from silograph.methods.node_gradients import sum_clipped_gradients
from silograph.nn.bounded_subgraphs import most_changed_subgraphs, most_nodes_within

EPSILON, DELTA = 4.0, 1e-5
TRIALS = 20_000
SILOS = 10
KEYS = 200  # draws of edges among which the server chooses
DP: dict[str, Any] = {"dp_epsilon": EPSILON, "dp_delta": DELTA, "dp_unit": "node"}
CANARY = 0
# Features by role. Those of the canary and of what is sampled in its place have another sign than
# the hosts', so gradients of all of them change their sign where the canary goes.
FEATURES = {"canary": -5e3, "host": 1e3, "filler": 0.0, "substitute": -5e2}


def planted(degree: int, *, is_member: bool) -> Graph:
    """Return the graph of one silo: a canary with K hosts, each with K - 1 fillers and one more.

    A host has K + 1 edges, so it samples its substitute in the canary's place once that is gone.
    """
    roles, edges = ["canary"], list[tuple[int, int]]()
    for _ in range(degree):
        host = len(roles)
        own = ["filler"] * (degree - 1) + ["substitute"]
        roles += ["host", *own]
        edges += [(CANARY, host), *((host, host + 1 + n) for n in range(degree))]
    ids = list(range(len(roles)))
    if not is_member:
        del roles[CANARY], ids[CANARY]
        edges = [(a - 1, b - 1) for a, b in edges if a != CANARY]
    every = np.ones(len(roles), bool)
    return from_arrays(
        edge_index=np.array(edges).T,
        x=np.array([[FEATURES[role]] for role in roles]),
        y=np.zeros(len(roles), np.int64),
        num_classes=2,
        node_id=np.array(ids),
        split=(every, ~every, ~every),
        silo=np.zeros(len(roles), np.int64),
        silo_names=["silo"],
    )


@cache
def clipped_sums(degree: int, layers: int, *, is_member: bool) -> torch.Tensor:
    """Return the silo's clipped sum at each draw of edges, (KEYS, d) float64, before any noise."""
    options = {"partition": "silo", "clients": None, "split": "public", "layers": layers}
    graph = planted(degree, is_member=is_member)
    setup = prepare(make_config(FAST | DP | options | {"dp_degree": degree, "hidden": 2}), graph)
    weights = {n: torch.zeros_like(w) for n, w in first_weights(setup).items()}
    if layers == 2:  # hidden rows are the parts above and below 0 of what a node sums up
        weights["0.weight"] += torch.tensor([[1.0, -1.0]])
    inbox = to_payload(GlobalModel(weights))
    totals = list[torch.Tensor]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedNoise, "add", lambda self, reply, *_: reply)
        for number in range(KEYS):
            reply = setup.federation.call(
                sum_clipped_gradients, inbox, what=Kind.WEIGHTS, key=Key.of(number)
            )
            totals.append(torch.cat([field.t.flatten() for field in reply.values()]))
    return torch.stack(totals).double()


def worst_sums(degree: int, layers: int, rounds: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sums with and without the canary, each (T, d) int64, at the draws that show it most.

    Both have the same draws: the server knows the key of each.
    """
    member, other = (clipped_sums(degree, layers, is_member=m) for m in (True, False))
    worst = (member - other).norm(dim=1).argsort(descending=True, stable=True)[:rounds]
    return member[worst].long(), other[worst].long()


def scores(
    sums: tuple[torch.Tensor, torch.Tensor], privacy: UpdatePrivacy, *, secure: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return how like sums with the canary noised ones are, (TRIALS,) with it and without it.

    It is the logarithm of the ratio of likelihoods but for a factor: no test is more powerful
    (Neyman and Pearson). Trials stand side by side in one reply. Its noise is that of one silo, or
    with secure aggregation of the fewest shares that are ever unmasked, without that of a silo that
    works with the server.
    """
    member, other = sums
    direction = (member - other).double() / CLIP_UNITS
    fewest = shares_of(SILOS, secure=secure)
    noise, ids = SimulatedNoise(privacy, secure=secure), [str(n) for n in range(fewest)]
    projections = list[np.ndarray]()
    for number, known in enumerate((member, other)):
        values = torch.zeros(fewest, TRIALS, *known.shape, dtype=torch.int64)
        values[0] += known
        reply = noise.add({"update/w": Stacked(values)}, ids, Key.of(number), SILOS)
        moved = (reply["update/w"].t.sum(0) - other).double() / CLIP_UNITS
        projections.append((moved * direction).sum((1, 2)).numpy())
    return projections[0], projections[1]


def privacy_of_run(degree: int, layers: int, rounds: int) -> UpdatePrivacy:
    options = {"dp_degree": degree, "layers": layers, "rounds": rounds, "hidden": 2}
    privacy = prepare(make_config(FAST | DP | options), planted_graph()).method_config.privacy
    assert privacy is not None
    return privacy


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_a_canary_moves_the_sum_nearly_as_far_as_one_node_can(degree: int) -> None:
    """All 2 K + 1 changed subgraphs but its own turn a whole clip into its opposite."""
    member, other = worst_sums(degree, layers=1, rounds=1)
    moved = float((member - other).double().norm()) / CLIP_UNITS
    assert moved == pytest.approx(4 * degree + 1, rel=1e-3)
    assert moved < 2 * most_changed_subgraphs(degree, 1) == 4 * degree + 2


@pytest.mark.parametrize(
    ("degree", "layers", "rounds", "secure"),
    [(1, 1, 1, False), (3, 1, 1, False), (3, 1, 10, False), (3, 1, 1, True), (2, 2, 1, False)],
)
def test_an_attack_on_a_planted_node_stays_below_the_claim(
    degree: int, layers: int, rounds: int, secure: bool
) -> None:
    privacy, sums = privacy_of_run(degree, layers, rounds), worst_sums(degree, layers, rounds)
    bound = gaussian_lower_bound(*scores(sums, privacy, secure=secure), DELTA)
    assert EPSILON / 3 < bound < EPSILON
    if layers == 1:  # the canary is nearly the worst, and so is the accountant's bound
        assert bound > 0.6 * EPSILON
    # A bound that knows nothing of the noise, either.
    assert lower_bound(*scores(sums, privacy, secure=secure), DELTA) < bound
    # The same attack nearly without noise finds more than a third of the claim.
    plain = replace(privacy, noise_multiplier=2.0**-12)
    assert lower_bound(*scores(sums, plain, secure=secure), DELTA) > EPSILON / 3


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_the_attack_finds_noise_that_is_for_too_few_subgraphs(degree: int) -> None:
    """For that of one node, and for all that have the canary in them, but none that change after.

    The last is the bound of the paper, in which no other edge is sampled in a lost one's place.
    """
    privacy, sums = privacy_of_run(degree, 1, 1), worst_sums(degree, 1, 1)
    for changed in (1, most_nodes_within(degree, 1)):
        too_little = replace(privacy, sensitivity=2 * changed)
        bound = gaussian_lower_bound(*scores(sums, too_little, secure=False), DELTA)
        assert bound > EPSILON
    too_little = replace(privacy, sensitivity=2)
    assert lower_bound(*scores(sums, too_little, secure=False), DELTA) > EPSILON
