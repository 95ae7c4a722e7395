"""Silos' own data in one process: the clients that they would make, and what only we can see."""

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError
from silograph.core.key import Key
from silograph.experiment.resolve.cutting import Cut, cut_graph, trainable
from silograph.experiment.resolve.own_partition import CutGraph, cut_by
from silograph.federation.joining.matching import agree
from silograph.graph.block.block import ClientBlock, make_block, whole
from silograph.graph.block.halo import Route
from silograph.graph.datasets import check_columns, check_scale, is_path, load
from silograph.graph.features import check_given
from silograph.graph.generated.generate import ProgressCallback
from silograph.graph.graph import Graph
from silograph.graph.silos.data import (
    Silo,
    Silos,
    featured,
    join_blocks,
    join_silos,
    silo_block,
    silo_fingerprint,
    silo_split,
)
from silograph.graph.silos.read import is_silos, read_silos

CUT = "silo"  # what a run's `partition` says of silos that are there already


def load_data(
    name: str,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    scale: float = 1.0,
    columns: str | None = None,
    report: ProgressCallback | None = None,
) -> Graph | Silos:
    """Return a graph by name or path, as `load` does, or the silos of a folder that holds some."""
    if names_silos(name):
        check_scale(name, scale)
        check_columns(name, columns)
        return read_silos(Path(name).expanduser())
    return load(name, data_dir=data_dir, scale=scale, columns=columns, report=report)


def names_silos(name: str) -> bool:
    """Whether a dataset is the path of a folder that holds silos."""
    return is_path(name) and is_silos(Path(name).expanduser())


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
        how: dict[str, Any] = {"data_dir": config.data_dir, "columns": config.columns}
        data = load_data(config.dataset, scale=config.scale, **how)
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
        raise ConfigError(
            f"expected no partition with silos, got {config.partition}: they are cut already; "
            "leave it out"
        )
    return replace(config, partition=CUT)


def clients_of(
    config: RunConfig, data: Graph | CutGraph | Silos, dtype: torch.dtype, *, uncut: bool
) -> tuple[Cut, ClientBlock, Route]:
    """Return the clients of a graph that is cut for them, or of silos, as one block.

    Args:
        config: of the run; seeds must be resolved.
        data: the graph, perhaps cut already, or the silos.
        dtype: of features and edges.
        uncut: whether the one client holds the whole graph.

    Raises:
        SilographError: the graph, the cut, the split or the silos cannot be used.
    """
    if isinstance(data, Silos):
        cut, block, route = joined(config, data, dtype)
        if not uncut:
            return cut, block, route
    else:
        cut = cut_graph(config, data)
        check_given(config.features, cut.graph.num_features, cut.graph.name)
    partition = whole(cut.graph) if uncut else cut.partition
    return cut, *make_block(cut.graph, partition, cut.split, dtype)


def joined(config: RunConfig, silos: Silos, dtype: torch.dtype) -> tuple[Cut, ClientBlock, Route]:
    """Let silos split their nodes, make their blocks and agree, each from its own data.

    Args:
        config: of the run; seeds must be resolved.
        silos: their data.
        dtype: of features and edges.

    Returns:
        The graph that they hold together, which only one process can see; all of them as one
        block; who answers for each halo slot.

    Raises:
        ConfigError: an option that needs the whole graph, or cuts it.
        DataError: silos disagree, or one lacks the split that is asked for.
    """
    check_uncut(config, silos)
    route = agree(silos)
    silos = replace(silos, members=tuple(featured(s, config.features) for s in silos.members))
    block = join_blocks([client_block(silo, config, dtype) for silo in silos.members])
    digest = hashlib.blake2b(digest_size=8)
    for silo in silos.members:
        digest.update(silo_fingerprint(silo).encode())
    cut = Cut(*join_silos(silos, block, route), digest.hexdigest())
    return trainable(config, cut), block, route


def client_block(silo: Silo, config: RunConfig, dtype: torch.dtype) -> ClientBlock:
    """Return the block that a silo makes of its data alone; seeds must be resolved.

    `silo` has the features that the config asks for.

    Raises:
        ConfigError: a split that is none.
        DataError: the silo lacks the split that is asked for.
    """
    assert config.split_seed is not None  # resolved
    split = silo_split(silo, config.split, Key.of(config.split_seed).fold("split"))
    return silo_block(silo, split, dtype, normalize=config.normalize == "row")


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
            f"expected {len(silos.ids)} clients, one for each silo, got {config.clients}: leave it "
            "out"
        )
