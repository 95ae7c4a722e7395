"""Training of all silos together, the centralized training that it should be, and whole rounds."""

from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import Tensor

from silograph.core.key import Key
from silograph.exchange.pull import History, blank
from silograph.federation.in_process import InProcess
from silograph.graph.block.block import ClientBlock, Route, make_block, whole
from silograph.graph.graph import Graph
from silograph.graph.partition.partition import Partition, make_partition
from silograph.graph.partition.split import draw_split
from silograph.methods.base import Method, MethodConfig, RoundReport, ServerState
from silograph.methods.fedais import FedAISOptions
from silograph.nn.forward import Staged
from silograph.nn.model import Model
from silograph.nn.stored_rows import StoredRows
from silograph.task.counts import node_loss

KEY = Key.of(5)
EPOCHS = {"fedgraph": 1}  # of methods that take no other number
# Options of methods whose set-up would take long.
SHORT: dict[str, dict[str, int]] = {
    name: {"generator_epochs": 12, "cross_epochs": 2} for name in ("fedsageplus", "fedsage_local")
}
STEPS = 50
SHARED = ("gcn", "graphconv", "gin", "sage", "appnp")  # models whose sums silos can share


def model_of(conv: str, **other: object) -> Model:
    own: dict[str, object] = {"layers": 3, "dropout": 0.4, "hops": 3, "teleport": 0.1}
    own |= {"residual": conv == "gcn"} | other
    return Model(conv, 7, 6, outputs=3, task="multiclass", **own)  # type: ignore[arg-type]


def blank_rows(model: Model | Staged, block: ClientBlock, *, halo: bool = True) -> StoredRows:
    """What clients have stored that have trained in no round."""
    own = SimpleNamespace(staged=model.staged if isinstance(model, Model) else model)
    cfg = SimpleNamespace(model=own, options=FedAISOptions())
    return blank(History, cfg, block).readable(halo=halo)


def cut_of(graph: Graph, clients: int, how: str) -> tuple[ClientBlock, Route, ClientBlock]:
    """Return the clients, the route, and the uncut graph with the same draws for each node."""
    return cut_by(graph, make_partition(graph, how, clients=clients, key=Key.of(0)))


def cut_by(graph: Graph, partition: Partition) -> tuple[ClientBlock, Route, ClientBlock]:
    """Return the same for a given cut."""
    split = draw_split(graph, partition, ratios=(0.4, 0.3, 0.3), key=Key.of(1))
    block, route = make_block(graph, partition, split, torch.float64)
    uncut, _ = make_block(graph, whole(graph), split, torch.float64)
    keys = torch.empty_like(uncut.row_key)
    keys[torch.cat(partition.nodes)] = block.row_key
    return block, route, replace(uncut, row_key=keys)


def train(
    method: Method,
    block: ClientBlock,
    route: Route,
    cfg: MethodConfig,
    size: int,
    steps: int = STEPS,
) -> tuple[list[float], dict[str, Tensor]]:
    """Train in blocks of `size` clients; return the losses and the last weights."""
    fed = InProcess(cfg, block, route, size)
    state = method.init(fed, cfg, cfg.model.init_weights(Key.of(2), torch.float64), KEY)
    losses = []
    for t in range(1, steps + 1):
        state, report = method.round(fed, cfg, state, t, KEY)
        assert report.train_loss is not None
        losses.append(report.train_loss)
    assert state.weights is not None
    return losses, state.weights


def held_of(block: ClientBlock) -> ClientBlock:
    """Return the nodes of the first client by name, as what a server holds."""
    return block.take(torch.tensor([block.ids.index(min(block.ids))]))


def with_first_knobs(method: Method, cfg: MethodConfig, clients: int) -> MethodConfig:
    """Return a config whose knobs are what its options say."""
    knobs = {k.name: k.constant(k.start, clients) for k in method.needs.knobs(cfg.options)}
    return replace(cfg, knobs=knobs)


def whole_round(
    method: Method,
    fed: InProcess,
    cfg: MethodConfig,
    held: ClientBlock,
    state: ServerState,
    t: int,
    key: Key,
) -> tuple[ServerState, RoundReport]:
    """Do a round as runs do it: the method's, then the server's own steps, if it has any."""
    cfg = with_first_knobs(method, cfg, len(fed.ids))
    state, report = method.round(fed, cfg, state, t, key)
    on_held = method.setting.on_held
    return state if on_held is None else on_held(cfg, held, state, t, key), report


def train_centrally(uncut: ClientBlock, cfg: MethodConfig) -> tuple[list[float], dict[str, Tensor]]:
    """Autograd and torch's Adam on the joined graph."""
    assert isinstance(cfg.model, Model)
    start = cfg.model.init_weights(Key.of(2), torch.float64)
    weights = {name: w.clone().requires_grad_() for name, w in start.items()}
    adam = torch.optim.Adam(weights.values(), lr=0.01, weight_decay=5e-4)
    rows, losses = uncut.split.train, []
    for t in range(1, STEPS + 1):
        adam.zero_grad()
        logits = cfg.model.forward(weights, uncut, KEY.fold("train", t, "epoch", 0, "batch", 0))
        loss = node_loss(logits[rows], uncut.y[rows], cfg.model.task).mean()
        loss.backward()
        adam.step()
        losses.append(float(loss.detach()))
    return losses, {name: w.detach() for name, w in weights.items()}
