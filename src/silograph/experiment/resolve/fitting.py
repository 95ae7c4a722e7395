"""What a run fits to the training data of its clients before the first round.

Federated sums: `sum_specs` says which ones a run has, `complete_block` what becomes of the results
at a client. How to add one is in `silograph.exchange.statistics`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from silograph.core.config import RunConfig
from silograph.core.errors import DataError
from silograph.core.payload import State
from silograph.core.resolved_config import ResolvedConfig
from silograph.exchange.statistics import SumSpec, SumSpecs, statistics_in
from silograph.experiment.resolve.edge_weights import silo_with_edges
from silograph.federation.field_specs import EDGES
from silograph.graph.block.block import ClientBlock, SparseRows
from silograph.graph.column_statistics import (
    EDGE_WEIGHTS,
    FEATURES,
    ColumnStatistics,
    standardize,
)
from silograph.graph.csr import CSR
from silograph.graph.features import narrowing_problem
from silograph.graph.graph import normalized_rows
from silograph.graph.silos.data import Silo
from silograph.methods.base import AnyMethod


def sum_specs(config: RunConfig | ResolvedConfig, features: int, method: AnyMethod) -> SumSpecs:
    """Return the federated sums of a run by name.

    Args:
        config: of the run.
        features: F, of the features as they are used.
        method: of the run; one that trains uncut has one client, which needs no sums of others.
    """
    specs: dict[str, SumSpec] = {}
    if config.normalize == "standard" and not method.setting.uncut:
        specs[FEATURES] = SumSpec(features)
    if config.edge_weights == "scale" and not method.setting.uncut:
        specs[EDGE_WEIGHTS] = SumSpec(1, among=EDGES, deviation=False)
    return specs


def complete_block(
    block: ClientBlock, silo: Silo, statistics: Mapping[str, ColumnStatistics]
) -> ClientBlock:
    """Return the block of a silo once the federated sums of the run are known.

    Args:
        block: as `silo_block` made it, where it computes.
        silo: its data, with the features and the weights of edges of the run.
        statistics: the results by name; without any, the block is returned as it is.

    Raises:
        DataError: features are sparse, or the mean of edge weights cannot be one.
    """
    assert block.adj.values is not None  # blocks carry values of the run's dtype
    device, dtype = block.off.device, block.adj.values.dtype
    if FEATURES in statistics:
        x = standardize(silo.x, statistics[FEATURES])
        block = replace(block, x=x.to(device, dtype))
    if EDGE_WEIGHTS in statistics:
        mean = float(statistics[EDGE_WEIGHTS].mean)
        if not 0 <= mean < math.inf:  # it comes from the server
            raise DataError(f"expected the mean of edge weights to be 0 or more, got {mean:g}")
        scaled = silo_with_edges(silo, "scale", mean)
        cross, halo = scaled.cross, block.halo.adj
        shape = halo.num_rows, halo.num_cols
        edges = scaled.graph.weighted_adj.to(device, dtype)
        between = CSR.from_pairs(cross.row, cross.slot, shape, cross.weight).to(device, dtype)
        block = replace(block, adj=edges, halo=replace(block.halo, adj=between))
    return block


def narrowing_line(silo: Silo, block: ClientBlock, normalize: str) -> str | None:
    """Return which features of a silo lose distinct values in its block, or None."""
    before = normalized_rows(silo.x) if normalize == "row" else silo.x
    x, names = block.x, silo.feature_names
    after = x.csr.to("cpu", torch.float64) if isinstance(x, SparseRows) else x.cpu()
    return narrowing_problem(before, after, names, standardized=normalize.startswith("standard"))


class BlockInState:
    """Completes a silo's block by what its state holds, and keeps the latest one.

    Args:
        block: as `silo_block` made it, where it computes.
        silo: its data.
        warn: told in a line where features lose values.
    """

    def __init__(self, block: ClientBlock, silo: Silo, warn: Callable[[str], None]) -> None:
        self._block = block
        self._silo = silo
        self._warn = warn
        self._completed: tuple[dict[str, ColumnStatistics], ClientBlock] = ({}, block)

    def __call__(self, state: State) -> ClientBlock:
        """Return the block that ops are given with a state."""
        statistics = statistics_in(state)
        known, block = self._completed
        if _alike(known, statistics):
            return block
        block = complete_block(self._block, self._silo, statistics)
        self._completed = statistics, block
        if (line := narrowing_line(self._silo, block, "standard")) is not None:
            self._warn(line)
        return block


def _alike(ours: Mapping[str, ColumnStatistics], theirs: Mapping[str, ColumnStatistics]) -> bool:
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name].mean, theirs[name].mean)
        and torch.equal(ours[name].deviation, theirs[name].deviation)
        for name in ours
    )
