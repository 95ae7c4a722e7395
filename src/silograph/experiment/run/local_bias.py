"""Local bias: how far a federation's model is from the one that centralized training gives.

Zhang, Luo, Feng, Liu, Zhou and Zheng, "Tackling the local bias in federated graph learning", 2021,
sections 3.1 and 4.2: the mean Euclidean distance between the logits of the two, both from the same
initial weights and after as many epochs. It needs the uncut graph: simulation only.
"""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from silograph.aggregation.aggregators import MEAN
from silograph.core.key import Key
from silograph.core.payload import ranges
from silograph.exchange.collect import collect, local_graph
from silograph.experiment.resolve.cutting import clients_block
from silograph.experiment.resolve.resolve import DTYPES
from silograph.experiment.run.setup import Setup
from silograph.federation.in_process import InProcess
from silograph.graph.block.block import ClientBlock, make_block, whole
from silograph.methods.base import NoOptions
from silograph.methods.centralized import CENTRALIZED
from silograph.nn.conv import Params

TOLD = 5  # lines about the centralized model


def local_bias(
    setup: Setup, first: Params, last: Params, rounds: int, key: Key, tell: Callable[[str], None]
) -> float:
    """Return the mean distance of logits to those of a model that is trained centrally here.

    Both models are those of the last round. Each node is seen as in the `server` view. The
    centralized model has the run's optimizer, which it keeps, its schedule and its draws.

    Args:
        setup: the run.
        first: weights before the first round.
        last: the server's weights after the last one.
        rounds: rounds that were trained.
        key: the key of training.
        tell: told now and then how far the centralized model is.
    """
    cut, cfg, device = setup.cut, setup.method_config, setup.device
    dtype = DTYPES[setup.config.dtype]
    block, route = clients_block(cut, dtype)
    uncut, no_route = make_block(cut.graph, whole(cut.graph), cut.split, dtype)
    if not setup.method.setting.uncut:  # a node draws as it does at its client
        row_key = uncut.row_key.clone()
        row_key[cut.partition.copies] = block.row_key
        uncut = replace(uncut, row_key=row_key)
    uncut = uncut.to(device, dtype)
    central = replace(
        cfg,
        keep_optimizer=True,
        participation=1.0,
        options=NoOptions(),
        corrections=(),
        losses=(),
        aggregator=MEAN,
    )
    fed = InProcess(central, uncut, no_route, 1)
    state = CENTRALIZED.init(fed, central, first, key)
    for t in range(1, rounds + 1):
        fed.start_round(t)
        state, _ = CENTRALIZED.round(fed, central.in_round(t), state, t, key)
        if t % -(-rounds // TOLD) == 0:
            tell(f"centralized model for local bias, round {t}/{rounds}")
    assert state.weights is not None  # the method has a server
    reference = cfg.backend.predict(cfg.model, state.weights, uncut)[cut.partition.copies]
    if setup.method.evaluate.all_silos or setup.method.setting.uncut:
        ours = cfg.backend.predict(cfg.model, last, uncut)[cut.partition.copies]
    else:
        graph = block.to(device, dtype)
        if setup.config.collect:
            clients = InProcess(cfg, graph, route, graph.num_clients)
            collect(clients, setup.config.collect, key.fold("collect"))
            graph = local_graph(graph, clients.states()[0])
        ours = _own_rows(cfg.backend.predict(cfg.model, last, graph), block, graph)
    return float((ours - reference).double().norm(dim=1).mean())


def _own_rows(logits: Tensor, block: ClientBlock, graph: ClientBlock) -> Tensor:
    """Return the rows (n, K) that clients hold, without those that they have fetched."""
    rows: Tensor = logits[ranges(graph.off[:-1], block.off.diff().to(graph.off.device))]
    return rows
