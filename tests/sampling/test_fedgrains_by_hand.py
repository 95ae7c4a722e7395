"""FedGrAINS' algorithm 1 in plain torch: batches, draws, both networks' steps, node by node."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid

from silograph.core.key import Key
from silograph.core.payload import State
from silograph.graph.block.block import ClientBlock, make_block, whole
from silograph.graph.graph import Graph, Split
from silograph.nn.backends import BACKENDS
from silograph.nn.conv import Params
from silograph.nn.fit import Schedule, Training, TrainingInputs
from silograph.nn.mini_batches import Drawn, Reached
from silograph.nn.model import Model
from silograph.nn.optim import SGD
from silograph.sampling.fedgrains import FedGrains

NODES, TRAIN, BATCH, K, ALPHA = 24, 10, 4, 3, 5.0
RATE, FLOW_RATE, Z_RATE = 0.2, 0.02, 0.1


@dataclass
class ByHand:
    """The oracle: the graph, the model that is trained, and the flow network."""

    block: ClientBlock
    w: Params
    flow: Params
    sampled: bool
    adj: Tensor = field(init=False)
    x: Tensor = field(init=False)
    z: Tensor | None = None
    adam: torch.optim.Optimizer | None = None

    def __post_init__(self) -> None:
        assert isinstance(self.block.x, Tensor)
        self.adj, self.x = self.block.adj.tensor.to_dense().double(), self.block.x
        for t in (*self.w.values(), *self.flow.values()):
            t.requires_grad_()

    def logits(self, hop_of: dict[int, int], reached: set[int]) -> dict[int, Tensor]:
        """Two layers of GCN on all that are reached or candidates, along edges of the reached."""
        rows = sorted(hop_of)
        among = torch.eye(len(rows), dtype=torch.float64)
        for a, u in enumerate(rows):
            for b, v in enumerate(rows):
                if self.adj[u, v] and (u in reached or v in reached):
                    among[a, b] = 1
        operator = among / torch.outer(among.sum(1), among.sum(1)).sqrt()
        layer = self.flow["indicator"][[hop_of[v] for v in rows]]
        h = torch.relu(
            operator @ (self.x[rows] @ self.flow["features"] + layer) + self.flow["bias"]
        )
        out = operator @ (h @ self.flow["last"].T) + self.flow["last_bias"]
        return {v: out[a, 0] for a, v in enumerate(rows)}

    def draw(self, hop_of: dict[int, int], hop: int, key: Key) -> tuple[set[int], Tensor]:
        """Eq. 3.6: the top k of log p + Gumbel noise; and log P_F of having chosen them."""
        reached = set(hop_of)
        near = {v for u in reached for v in range(NODES) if self.adj[u, v]} - reached
        logit = self.logits(hop_of | dict.fromkeys(near, hop + 1), reached)
        score = {}
        for v in near:
            u = key.fold("gumbel").uniform(self.block.row_key[[v]])[0, 0]
            score[v] = float(logsigmoid(logit[v].detach()) - torch.log(-torch.log(u)))
        chosen = set(sorted(near, key=lambda v: -score[v])[:K])
        p = {v: torch.sigmoid(logit[v]) for v in near}
        each = [torch.log(p[v]) if v in chosen else torch.log(1 - p[v]) for v in sorted(near)]
        return chosen, torch.stack(each).sum() if each else torch.zeros(())

    def layer(self, number: int, h: Tensor, heard: set[int], sent: set[int]) -> Tensor:
        """A GCN layer along edges from `sent` to `heard`, by degrees of the graph or of these."""
        along = torch.zeros_like(self.adj)
        for u in heard:
            along[u, sorted(sent)] = self.adj[u, sorted(sent)]
        degree = self.adj.sum(1)
        if self.sampled:
            both = torch.maximum(along, along.T)
            degree = both.sum(1)
        scale = (degree + 1).rsqrt()
        mixed = scale[:, None] * ((along + torch.eye(NODES)) * scale) @ h
        return mixed @ self.w[f"{number}.weight"] + self.w[f"{number}.bias"]

    def step(self, batch: list[int], keys: list[Key]) -> list[set[int]]:
        """Lines 6 to 20 of algorithm 1; return whom was chosen, by layer."""
        hop_of, sets, log_p = dict.fromkeys(batch, 0), [set(batch)], torch.zeros(())
        picked = []
        for hop, key in enumerate(keys):
            chosen, one = self.draw(hop_of, hop, key)
            hop_of |= dict.fromkeys(chosen, hop + 1)
            log_p = log_p + one
            picked.append(chosen)
            sets.append(set(hop_of))
        h = torch.relu(self.layer(0, self.x, sets[1], sets[2]))
        out = self.layer(1, h, sets[0], sets[1])
        loss = cross_entropy(out[batch], self.block.y[batch])
        grads = torch.autograd.grad(loss, list(self.w.values()))
        with torch.no_grad():
            for w, g in zip(self.w.values(), grads, strict=True):
                w -= RATE * g
        self._flow_step(log_p, loss.detach())
        return picked

    def _flow_step(self, log_p: Tensor, loss: Tensor) -> None:
        """Eq. 3.5 with log Z = alpha z, which begins where the first step is balanced."""
        if self.z is None or self.adam is None:
            self.z = (-loss - log_p.detach() / ALPHA).requires_grad_()
            flow = {"params": [*self.flow.values()], "lr": FLOW_RATE}
            self.adam = torch.optim.Adam([flow, {"params": [self.z], "lr": Z_RATE}])
            for t in (*self.flow.values(), self.z):
                t.grad = torch.zeros_like(t)
        else:
            self.adam.zero_grad()
            (ALPHA * self.z + log_p + ALPHA * loss).square().backward()
        self.adam.step()


@dataclass(frozen=True)
class Recorded(FedGrains):
    """The sampler, which notes down what it was asked and gave."""

    calls: list[tuple[Reached, Key, Drawn]] = field(default_factory=list, compare=False)

    def draw(self, block: ClientBlock, reached: Reached, hop: int, key: Key, state: State) -> Drawn:
        drawn = super().draw(block, reached, hop, key, state)
        self.calls.append((reached, key, drawn))
        return drawn


@pytest.mark.parametrize("sampled", [True, False])
def test_training_is_algorithm_1(make_graph: Callable[..., Graph], sampled: bool) -> None:
    """Two epochs of three batches: choices, the model, the flow network and z."""
    graph = make_graph(NODES)
    train = torch.arange(NODES) < TRAIN
    block, _ = make_block(graph, whole(graph), Split(train, ~train, ~train), torch.float64)
    model = Model("gcn", graph.num_features, 6, graph.num_classes, 2, 0.0, graph.task)
    start = model.init_weights(Key.of(1), torch.float64)
    sampler = Recorded(K, 2, ALPHA, FLOW_RATE, True, Z_RATE, sampled, "trained", 5)
    state = dict(sampler.init(block, model, Key.of(0)))
    state["bias"] = replace(state["bias"], t=state["bias"].t + 0.2)
    first = {n: state[n].t.clone() for n in ("features", "indicator", "bias", "last", "last_bias")}
    fitted = BACKENDS["torch"].fit(
        Training(model, SGD(RATE), Schedule(2, BATCH, sampler)),
        TrainingInputs(block, start, None, Key.of(3), state),
    )
    flow = {n: (t[0] if n != "features" else t).clone() for n, t in first.items()}
    oracle = ByHand(block, {n: w.clone() for n, w in start.items()}, flow, sampled)
    assert len(sampler.calls) == 2 * 2 * 3
    for outer, inner in zip(sampler.calls[::2], sampler.calls[1::2], strict=True):
        batch = outer[0].rows.tolist()
        picked = oracle.step(batch, [outer[1], inner[1]])
        reached = set(batch)
        for chosen, (_, _, drawn) in zip(picked, (outer, inner), strict=True):
            assert set(drawn.neighbor.tolist()) - reached == chosen
            reached |= chosen
    for name, w in oracle.w.items():
        torch.testing.assert_close(fitted.tensors[name][0], w.detach(), rtol=0, atol=1e-9)
    assert oracle.z is not None
    torch.testing.assert_close(fitted.neighbors["log_z"].t[0], oracle.z.detach(), rtol=0, atol=1e-9)
    for name, w in oracle.flow.items():
        found = fitted.neighbors[name].t
        found = found if name == "features" else found[0]
        assert not torch.equal(found, first[name].view_as(found))
        torch.testing.assert_close(found, w.detach(), rtol=0, atol=1e-9)
