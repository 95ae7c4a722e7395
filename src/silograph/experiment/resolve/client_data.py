"""Silos' own data in one process: the clients that they would make, and what only we can see."""

import hashlib
from dataclasses import replace
from typing import Any

import torch

from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError
from silograph.core.key import Key
from silograph.core.resolved_config import ResolvedConfig
from silograph.exchange.statistics import SumSpec, fit_from_sums
from silograph.experiment.resolve.cutting import (
    STANDARD,
    Cut,
    clients_block,
    cut_graph,
    scale_edge_weights,
    standardize_cut,
    trainable,
)
from silograph.experiment.resolve.edge_weights import silo_as_used, with_edges
from silograph.experiment.resolve.fitting import complete_block, narrowing_line
from silograph.experiment.resolve.own_partition import GIVEN, CutGraph, cut_by
from silograph.experiment.resolve.parts import Parts
from silograph.federation.joining.matching import agree
from silograph.graph.block.block import ClientBlock, make_block, whole
from silograph.graph.block.halo import Route
from silograph.graph.column_statistics import EDGE_WEIGHTS, FEATURES
from silograph.graph.csr import CSR
from silograph.graph.features import narrowing_problem
from silograph.graph.graph import Graph
from silograph.graph.silos.data import (
    Silo,
    Silos,
    join_blocks,
    join_silos,
    silo_block,
    silo_fingerprint,
    silo_split,
)
from silograph.graph.silos.joined_ratings import join_rating_silos
from silograph.graph.source import source_of

CUT = "silo"  # what a run's `partition` says of silos that are there already


def refuse_in_memory(data: object) -> None:
    """Raise `ConfigError` for silos in memory, where several runs read them from their folder."""
    if isinstance(data, Silos):
        raise ConfigError(
            "expected the path of the silos' folder for several runs, got silos in memory: give "
            "the path"
        )


def cut_for_studies(
    graph: Graph | None, partition: Any, config: RunConfig
) -> tuple[Graph, RunConfig]:
    """Return the graph of several runs with its partition, and the config that says its hash.

    Args:
        graph: the graph; None: it is loaded by the config.
        partition: the value.
        config: of the runs.

    Raises:
        ConfigError: silos, or a partition in which a node has several clients or none.
        PartitionError: it is none of this graph.
    """
    data: Graph | Silos | None = graph
    if data is None:
        data = source_of(config).read(config.scale)
    found, config = cut_by(data, partition, config)
    if isinstance(found, CutGraph):
        raise ConfigError(
            "expected a partition in which every node has one client for several runs, got another "
            "in memory: run it alone with sg.run"
        )
    return found, config


def cut_already(config: RunConfig) -> RunConfig:
    """Return the config of a run on silos, which says that they are the cut.

    Raises:
        ConfigError: it names another cut.
    """
    if config.partition not in (RunConfig().partition, CUT):
        got = "one in memory" if config.partition.startswith(GIVEN) else config.partition
        raise ConfigError(
            f"partition: expected none with silos, got {got}: they are cut already; "
            "leave partition out"
        )
    return replace(config, partition=CUT)


def clients_of(
    config: ResolvedConfig, parts: Parts, data: Graph | CutGraph | Silos, dtype: torch.dtype
) -> tuple[Cut, ClientBlock, Route]:
    """Return the clients of a graph that is cut for them, or of silos, as one block.

    Args:
        config: of the run.
        parts: of the run; with a method that trains uncut, one client holds the whole graph.
        data: the graph, perhaps cut already, or the silos.
        dtype: of features and edges.

    Raises:
        SilographError: the graph, the cut, the split or the silos cannot be used.
    """
    uncut, standard = parts.method.part.setting.uncut, config.normalize in STANDARD
    weighs = config.edge_weights in ("log", "scale")
    if isinstance(data, Silos):
        if not uncut:
            return joined(config, data, dtype)
        # Features and weights of edges are transformed below, in float64 until then.
        raw = replace(config, normalize="none") if standard else config
        raw = replace(raw, edge_weights="use") if weighs else raw
        cut, _, _ = joined(raw, data, torch.float64 if standard or weighs else dtype)
    else:
        cut = cut_graph(config, data, parts.partition)
    sums = {}
    if config.edge_weights == "log" and cut.graph.edge_weight is not None:
        cut = replace(cut, graph=with_edges(cut.graph, "log"), given=cut.fingerprint)
    if config.edge_weights == "scale":
        cut, sums[EDGE_WEIGHTS] = scale_edge_weights(cut, uncut=uncut)
    if standard:
        federated = config.normalize == "standard"
        cut, sums[FEATURES] = standardize_cut(cut, dtype, uncut=uncut, federated=federated)
    elif isinstance(data, Graph | CutGraph):
        x, names = cut.graph.x, cut.graph.feature_names
        used = x.to("cpu", dtype) if isinstance(x, CSR) else x.to(dtype)
        problem = narrowing_problem(x, used, names, standardized=False)
        cut = replace(cut, narrowing=problem)
    if uncut:
        block, route = make_block(cut.graph, whole(cut.graph), cut.split, dtype)
    else:
        block, route = clients_block(cut, dtype)
    return cut, replace(block, sums=sums), route


def joined(
    config: ResolvedConfig, silos: Silos, dtype: torch.dtype
) -> tuple[Cut, ClientBlock, Route]:
    """Let silos split their nodes, make their blocks and agree, each from its own data.

    Args:
        config: of the run.
        silos: their data.
        dtype: of features and edges.

    Returns:
        The graph that they hold together, which only one process can see; all of them as one
        block; who answers for each halo slot.

    Raises:
        DataError: silos disagree, or one lacks the split that is asked for.
    """
    route = agree(silos)
    use = config.edge_weights
    members = [silo_as_used(silo, config.features, use) for silo in silos.members]
    silos = replace(silos, members=tuple(members))
    blocks = [client_block(silo, config, dtype) for silo in silos.members]
    block, statistics, mean = join_blocks(blocks), None, None
    specs: dict[str, SumSpec] = {}
    if config.normalize == "standard":
        specs[FEATURES] = SumSpec(block.num_features)
    if config.edge_weights == "scale":
        specs[EDGE_WEIGHTS] = SumSpec(1, deviation=False)
    if specs:
        fitted = fit_from_sums(block.sums, specs)
        pairs = zip(silos.members, blocks, strict=True)
        blocks = [complete_block(own, silo, fitted) for silo, own in pairs]
        block = join_blocks(blocks)
        statistics = fitted.get(FEATURES)
        if EDGE_WEIGHTS in fitted:
            mean = float(fitted[EDGE_WEIGHTS].mean)
    if config.normalize == "standard_client":
        statistics = block.sums[FEATURES].own_statistics()
    digest = hashlib.blake2b(digest_size=8)
    for silo in silos.members:
        digest.update(silo_fingerprint(silo).encode())
    rated = silos.members[0].graph.task == "rating"
    held = join_rating_silos(silos, block) if rated else join_silos(silos, block, route)
    pairs = zip(silos.members, blocks, strict=True)
    lines = (narrowing_line(silo, own, config.normalize) for silo, own in pairs)
    problem = next(filter(None, lines), None)
    cut = Cut(*held, digest.hexdigest(), statistics=statistics, narrowing=problem)
    cut = replace(cut, mean_edge_weight=mean)
    return trainable(config, cut), block, route


def client_block(silo: Silo, config: ResolvedConfig, dtype: torch.dtype) -> ClientBlock:
    """Return the block that a silo makes of its data alone.

    `silo` has the features and the weights of edges that the config asks for.

    Raises:
        ConfigError: a split that is none.
        DataError: the silo lacks the split that is asked for.
    """
    split = silo_split(silo, config.split, Key.of(config.split_seed).fold("split"))
    use = config.edge_weights
    return silo_block(silo, split, dtype, normalize=config.normalize, edge_weights=use)


def check_uncut(config: RunConfig, silos: Silos) -> None:
    """Raise `ConfigError` for options that cut a graph, where silos hold their parts already."""
    for name in ("largest_component", "drop_edges"):
        if getattr(config, name):
            raise ConfigError(
                f"expected silos' data as they are, got {name}={getattr(config, name)}: nobody "
                "holds the whole graph; leave it out, or give it to export-silos"
            )
    if config.clients not in (None, len(silos.ids)):
        raise ConfigError(
            f"clients: expected {len(silos.ids)}, one for each silo, got {config.clients}: leave "
            "clients out"
        )
