"""GCFL and GCFL+ beside a loop over clients: criteria, cuts by trying all, means, in torch."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from plain import dense_client, sgd_steps
from silograph.core.key import Key
from silograph.federation.in_process import InProcess
from silograph.graph.block.block import ClientBlock, Route
from silograph.graph.graph import Graph
from silograph.methods import GCFL, GCFLPLUS, MethodConfig, Params
from silograph.methods.base import AnyMethod
from silograph.methods.gcfl import GCFLOptions, GCFLPlusOptions
from silograph.nn.fit import Schedule
from silograph.nn.model import Model
from silograph.nn.optim import SGD

KEY, FIRST = Key.of(5), Key.of(9)
CLIENTS, ROUNDS = 8, 7
OWN = {"epsilon1": 0.15, "epsilon2": 0.02, "warmup": 1}  # the first decides


def flat(weights: Params) -> Tensor:
    return torch.cat([weights[name].flatten() for name in sorted(weights)])


def warped(a: list[float], b: list[float]) -> float:
    """Least cost of a path through all pairs, by the table."""
    table = {(-1, -1): 0.0}
    for i, j in itertools.product(range(len(a)), range(len(b))):
        before = ((i - 1, j), (i, j - 1), (i - 1, j - 1))
        table[i, j] = (a[i] - b[j]) ** 2 + min(table.get(p, math.inf) for p in before)
    return math.sqrt(table[len(a) - 1, len(b) - 1])


def least_cut(weight: dict[frozenset[int], float], members: list[int]) -> set[int]:
    """The side without the first member of the cut that weighs least, of all there are."""
    others = members[1:]
    sides = (set(s) for k in range(1, len(members)) for s in itertools.combinations(others, k))
    return min(
        sides,
        key=lambda s: sum(weight[frozenset((i, j))] for i in s for j in set(members) - s),
    )


@dataclass
class ByHand:
    """The oracle: clusters of clients, each with a model."""

    data: list[tuple[Tensor, Tensor, Tensor, Tensor]]
    plus: bool
    clusters: list[tuple[list[int], Params]]
    series: list[list[float]] = field(default_factory=lambda: [[] for _ in range(CLIENTS)])
    splits: int = 0

    def round(self, t: int) -> None:
        """Train, look whether clusters are to be split, take means."""
        change: dict[int, Params] = {}
        for members, model in self.clusters:
            for c in members:
                kept = {"steps": 2, "lr": 0.3, "decay": 5e-3}
                ended = sgd_steps(self.data[c], model, **kept, change=lambda _, g, w: g)  # type: ignore[arg-type]
                change[c] = {name: w - model[name] for name, w in ended.items()}
                self.series[c].append(float(flat(change[c]).norm()))
        parts = [
            p for members, model in self.clusters for p in self._parts(t, members, change, model)
        ]
        if len(parts) > len(self.clusters):
            self.splits += 1
            self.series = [[] for _ in range(CLIENTS)]
        self.clusters = [(members, self._mean(members, model, change)) for members, model in parts]

    def _parts(
        self, t: int, members: list[int], change: dict[int, Params], model: Params
    ) -> list[tuple[list[int], Params]]:
        moved = torch.stack([flat(change[c]) for c in members])
        short = float(moved.mean(0).norm()) < OWN["epsilon1"]
        long = max(float(m.norm()) for m in moved) > OWN["epsilon2"]
        ready = not self.plus or all(len(self.series[c]) >= 2 for c in members)
        if not (short and long and ready and len(members) > 2 and t > OWN["warmup"]):
            return [(members, model)]
        side = least_cut(self._weights(members, moved), members)
        return [(sorted(set(members) - side), model), (sorted(side), model)]

    def _weights(self, members: list[int], moved: Tensor) -> dict[frozenset[int], float]:
        pairs = list(itertools.combinations(range(len(members)), 2))
        found = {}
        for i, j in pairs:
            cosine = float(moved[i] @ moved[j] / moved[i].norm() / moved[j].norm())
            a, b = (self.series[members[k]][-2:] for k in (i, j))
            found[frozenset((members[i], members[j]))] = -warped(a, b) if self.plus else 1 + cosine
        least = min(found.values()) if self.plus else 0.0
        return {pair: w - least for pair, w in found.items()}

    def _mean(self, members: list[int], model: Params, change: dict[int, Params]) -> Params:
        nodes = {c: int(self.data[c][3].sum()) for c in members}
        total = sum(nodes.values())
        return {
            name: w + sum(nodes[c] / total * change[c][name] for c in members)
            for name, w in model.items()
        }


def planted(make_graph: Callable[..., Graph], cut_block: Callable[..., tuple[ClientBlock, Route]]):  # type: ignore[no-untyped-def]
    """Groups of clients that call the classes by other names, and have other numbers of nodes."""
    graph = make_graph(160, classes=3)
    block, route = cut_block(graph, CLIENTS)
    turned = (block.y + block.client // 3) % 3
    kept = Key.of(4).uniform(block.row_key)[:, 0] < 0.4 + 0.07 * block.client
    split = replace(block.split, train=block.split.train & kept)
    return graph, replace(block, y=turned, split=split), route


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("method", [GCFL, GCFLPLUS], ids=lambda method: method.name)
def test_gcfl_is_the_loop_over_clients(
    make_graph: Callable[..., Graph],
    cut_block: Callable[..., tuple[ClientBlock, Route]],
    method: AnyMethod,
) -> None:
    """Clusters and their models, round by round, over several splits."""
    graph, block, route = planted(make_graph, cut_block)
    assert len(set(block.num_train.tolist())) > 2
    plus = method is GCFLPLUS
    cfg: MethodConfig = MethodConfig(
        model=Model("gcn", graph.num_features, 6, 3, 2, 0.0, graph.task),
        optimizer=SGD(0.3, 5e-3),
        schedule=Schedule(2),
        keep_optimizer=False,
        participation=1.0,
        options=GCFLPlusOptions(**OWN, sequence=2) if plus else GCFLOptions(**OWN),  # type: ignore[arg-type]
    )
    fed, first = InProcess(cfg, block, route, 3), cfg.model.init_weights(FIRST, torch.float64)
    state = method.init(fed, cfg, first, KEY)
    data = [dense_client(block, c) for c in range(CLIENTS)]
    oracle = ByHand(data, plus, [(list(range(CLIENTS)), dict(first))])
    for t in range(1, ROUNDS + 1):
        state, report = method.round(fed, cfg, state, t, KEY)
        oracle.round(t)
        number = state.memory["cluster"].tolist()
        assert report.facts["clusters"] == len(oracle.clusters)
        for members, model in oracle.clusters:
            assert [c for c in range(CLIENTS) if number[c] == number[members[0]]] == members
            for name, w in model.items():
                ours = state.memory[f"weights/{name}"][number[members[0]]]
                torch.testing.assert_close(ours, w, rtol=0, atol=1e-10)
    assert oracle.splits >= 2
