"""Set-up of a simulation: from a resolved run and its data to a federation of one process."""

import contextlib
import hashlib
import importlib.metadata
import logging
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType

import torch

from silograph.core.config import RunConfig
from silograph.core.key import Key
from silograph.core.resolved_config import ResolvedConfig
from silograph.core.work import keep_freed_memory
from silograph.exchange.collect import SumSpecs
from silograph.experiment.resolve.data import Cut
from silograph.experiment.resolve.parts import Parts
from silograph.experiment.resolve.resolve import (
    DTYPES,
    SimulatedRun,
    resolve_simulation,
)
from silograph.experiment.resolve.run_request import CutGraph
from silograph.federation.base import Engine
from silograph.federation.in_process import InProcess
from silograph.graph.block.block import ClientBlock, make_block, whole
from silograph.graph.graph import Graph, Schema, schema_of
from silograph.graph.silos.data import Silos
from silograph.graph.silos.shards import Shards
from silograph.methods.base import Method, MethodConfig
from silograph.nn.conv import Params
from silograph.nn.own_module import Make

LOG = logging.getLogger("silograph")
PACKAGES = ("silograph", "torch", "torch-geometric", "numpy", "scipy", "scikit-learn", "pymetis")
EXTRAS = ("numba",)
KEEP_EVERY = 10  # rounds between copies of states, by default


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide numbers."""
    return {"python": platform.python_version(), **_installed()}


@cache  # a quarter of the time of a short run: every package's whole description is parsed
def _installed() -> Mapping[str, str]:
    versions_by_name = {name: importlib.metadata.version(name) for name in PACKAGES}
    for name in EXTRAS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions_by_name[name] = importlib.metadata.version(name)
    return MappingProxyType(versions_by_name)


@dataclass(frozen=True, eq=False)
class Setup:
    """Everything that a run needs before its first round.

    Attributes:
        config: with every default written out.
        parts: the parts that it names, with their options.
        schema: features and classes.
        method_config: what ops read.
        federation: the engine.
        device: where it computes.
        simulated: the graph and how it was cut; None where silos hold it, or shards.
        server_block: nodes that the server holds itself; None is no node.
        edge_weights: what becomes of the weights of edges; None where there are none, or where
            silos of their own say so.
        feature_names: names of the given features in their order; empty where nobody knows them.
        sums: federated sums that come first, by name.
        why_torch: why torch computes where compiled kernels would be faster; None: it does not, or
            the config names torch.
        shards: the files of the clients' blocks; None where these are in memory, or at silos.
    """

    config: ResolvedConfig
    parts: Parts
    schema: Schema
    method_config: MethodConfig
    federation: Engine
    device: torch.device
    simulated: Cut | None = None
    server_block: ClientBlock | None = None
    edge_weights: str | None = None
    feature_names: tuple[str, ...] = ()
    sums: SumSpecs = field(default_factory=dict)
    why_torch: str | None = None
    shards: Shards | None = None

    @property
    def is_simulation(self) -> bool:
        """Whether this process has all clients, in memory or in files."""
        return self.simulated is not None or self.shards is not None

    @property
    def method(self) -> Method:
        """The method."""
        return self.parts.method.part

    @property
    def cut(self) -> Cut:
        """The cut of a simulation."""
        assert self.simulated is not None  # nobody asks where silos hold the graph
        return self.simulated

    def close(self) -> None:
        """End what the engine has started."""
        self.federation.close()

    @property
    def partition_hash(self) -> str:
        """What names the cut, or the silos and which of their nodes are neighbors."""
        if self.simulated is not None:
            return self.simulated.partition.hash
        if self.shards is not None:
            return self.shards.partition_hash
        ids, route = self.federation.ids, self.federation.route
        digest = hashlib.blake2b(repr(ids).encode(), digest_size=16)
        for places in (route.target, route.slot_off, route.boundary_off):
            digest.update(places.numpy().tobytes())
        return digest.hexdigest()


def uncut_block(setup: Setup) -> ClientBlock:
    """Return the uncut graph as one client; it belongs to the experiment, not to the server."""
    cut = setup.cut
    block, _ = make_block(cut.graph, whole(cut.graph), cut.split)
    return block.to(setup.device, DTYPES[setup.config.dtype])


def prepare(
    config: RunConfig,
    data: Graph | CutGraph | Silos,
    parts: Parts | None = None,
    make: Make | None = None,
) -> Setup:
    """Build everything a simulation needs; nothing is written anywhere.

    Args:
        config: the config of the run.
        data: the graph, perhaps cut already, or the silos that hold it.
        parts: of the config, if they were chosen already.
        make: the module that `config.model` names, if it is one; None: it is imported.

    Raises:
        SilographError: something about config or graph cannot be used.
    """
    return set_up(resolve_simulation(config, data, parts, make))


def set_up(run: SimulatedRun) -> Setup:
    """Build the federation of a run in one process, and say what to know of its data."""
    config, method_config = run.resolved.config, run.resolved.method_config
    for line in run.warnings:
        LOG.warning(line)
    keep_freed_memory()
    federation, shards = make_engine(run), run.shards
    if run.simulated is not None:
        graph = run.simulated.graph
        schema, feature_names = schema_of(graph), graph.feature_names
    else:
        assert shards is not None
        schema, feature_names = shards.schema, shards.feature_names
    return Setup(
        config,
        run.resolved.parts,
        schema,
        method_config,
        federation,
        run.resolved.device,
        run.simulated,
        run.server_block,
        run.edge_weights,
        feature_names,
        run.sums,
        why_torch=run.resolved.why_torch,
        shards=shards,
    )


def make_engine(run: SimulatedRun) -> Engine:
    """Return the engine that the config of a run names, started.

    Raises:
        ConfigError: there is no such cluster, or workers cannot read the run.
    """
    config, method_config, workers = run.resolved.config, run.resolved.method_config, run.workers
    assert config.block_size is not None  # written out
    strict, compiled = config.strict, method_config.backend.compiled
    single_client_only = method_config.model.single_client_only
    if config.engine == "local" and workers == 1:
        return InProcess(
            method_config,
            run.clients,
            run.route,
            config.block_size,
            strict=strict,
            compiled=compiled,
            single_client_only=single_client_only,
            secure=config.secure_aggregation,
            privacy=method_config.privacy,
        )
    from silograph.federation.workers.engine import Pool, Workers
    from silograph.federation.workers.processes import ProcessPool
    from silograph.federation.workers.ray_actors import RayPool
    from silograph.federation.workers.worker import WorkerSettings

    def make_pool(most: int) -> Pool:
        if config.engine == "local":
            return ProcessPool(most)
        return RayPool(most, config.address, config.threads, is_exact=workers is not None)

    level = LOG.getEffectiveLevel()
    return Workers(
        WorkerSettings(method_config, strict, single_client_only, config.threads, level),
        run.clients,
        run.route,
        config.block_size,
        make_pool,
        workers=workers,
        keep_every=KEEP_EVERY if config.keep_every is None else config.keep_every,
        compiled=compiled,
    )


def first_weights(setup: Setup) -> Params:
    """Return the initial weights."""
    config = setup.config
    key = Key.of(config.init_seed).fold("init")
    weights = setup.method_config.model.init_weights(key, DTYPES[config.dtype])
    return {name: w.to(setup.device) for name, w in weights.items()}
