"""A run in one process, resolved whole: its config and parts, and its data cut for the clients."""

from dataclasses import dataclass, replace

from silograph.core.config import RunConfig
from silograph.core.key import Key
from silograph.exchange.statistics import SumSpecs
from silograph.experiment.resolve.client_data import clients_of
from silograph.experiment.resolve.cutting import Cut, held_block, scale_line
from silograph.experiment.resolve.edge_weights import check_edge_weights, describe_weight_scale
from silograph.experiment.resolve.fitting import sum_specs
from silograph.experiment.resolve.own_partition import CutGraph, with_own_partition
from silograph.experiment.resolve.parts import Parts
from silograph.experiment.resolve.plan import with_block_size
from silograph.experiment.resolve.resolve import DTYPES, Resolved, resolve
from silograph.graph.block.block import ClientBlock
from silograph.graph.block.halo import Route
from silograph.graph.graph import Graph
from silograph.graph.silos.data import Silos
from silograph.nn.own_module import Make


@dataclass(frozen=True, eq=False)
class SimulatedRun:
    """All that a run in one process is, before anything is computed.

    Attributes:
        asked: what was asked for, as a result folder keeps it.
        resolved: what it does, with the number of clients that are computed at once.
        cut: the graph and how it was cut.
        block: all clients.
        route: who answers for each halo slot.
        held: nodes that the server holds itself; None is no node.
        edge_weights: what becomes of the weights of edges; None where there are none.
        sums: federated sums of the run, by name.
        warnings: lines on what of the data is not used, or may keep the model from learning.
    """

    asked: RunConfig
    resolved: Resolved
    cut: Cut
    block: ClientBlock
    route: Route
    held: ClientBlock | None
    edge_weights: str | None
    warnings: tuple[str, ...]
    sums: SumSpecs


def simulated(
    asked: RunConfig,
    data: Graph | CutGraph | Silos,
    parts: Parts | None = None,
    make: Make | None = None,
) -> SimulatedRun:
    """Resolve a run on data that are there, and cut them; arguments as for `prepare`."""
    if not isinstance(data, Silos):
        data = with_own_partition(asked, data)
    found = resolve(asked, data, parts, make)
    dtype, method = DTYPES[found.config.dtype], found.parts.method
    weights = check_edge_weights(asked, found.config, method.part, found.method_config.model, data)
    cut, block, route = clients_of(found.config, found.parts, data, dtype)
    config = with_block_size(found.config, found.method_config.training, block)
    share, held = method.part.setting.held(method.options), None
    if share is not None:
        key = Key.of(config.seed).fold("server's nodes")
        held = held_block(cut, share, key).to(found.device, dtype)
    block = block.to(found.device, dtype)
    unused = weights if config.edge_weights == "ignore" else None
    scale = describe_weight_scale(config.edge_weights, cut.graph.edge_weight)
    lines = (unused, scale, scale_line(config, cut.graph), cut.narrowing)
    warnings = tuple(line for line in lines if line)
    found = replace(found, config=config)
    sums = sum_specs(config, cut.graph.num_features, method.part)
    return SimulatedRun(asked, found, cut, block, route, held, weights, warnings, sums)
