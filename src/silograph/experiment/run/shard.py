"""`shard`: cut a graph once, and write a file for each client, which runs read in its place."""

import os
import shutil
from pathlib import Path
from typing import Any, Unpack

import torch

from silograph.core.config import RunConfig, with_keywords
from silograph.core.errors import ConfigError, mistake
from silograph.core.numeric_state import standard_numerics
from silograph.experiment.resolve.exclusions import check_exclusions, exclusions_of_shards
from silograph.experiment.resolve.resolve import RunRequest, SimulatedRun, parse_request
from silograph.experiment.resolve.run_request import IN_SHARDS
from silograph.experiment.run.result_folder import figures_of, sizes_of
from silograph.experiment.run_options import RunOptions
from silograph.graph.block.block import ClientBlock, SparseRows
from silograph.graph.silos.shards import Shards, read_shards, write_clients, write_manifest


@with_keywords(RunOptions)
@standard_numerics()
def shard(
    graph: Any = None,
    *,
    config: RunConfig | None = None,
    **options: Unpack[RunOptions],
) -> Shards:
    """Cut and split a graph, and write one file for each client into a new folder.

    `sg.run(FOLDER)` trains on it like on the graph, with the same results; a client's file is read
    when the client is called, by the worker that has it.

    Args:
        graph: as for `run`.
        config: where to start from; None means all defaults.
        options: `out`, the folder to make; and those of the data, their split and cut, and
            `dtype`, which runs on the shards cannot change. What only training reads is no part of
            the files.

    Raises:
        SilographError: something about options, graph or cut cannot be used, or there is something
            at `out`.
    """
    request = parse_request(graph, config, None, options)
    if request.config.out is None:
        raise ConfigError(
            "expected the folder to make as out, got none", **mistake("missing-option", "out")
        )
    folder = Path(request.config.out).expanduser()
    if os.path.lexists(folder):
        raise ConfigError(
            f"expected a folder that does not exist yet, got {folder}: choose another --out, "
            "nothing was overwritten",
            **mistake("existing-output", folder),
        )
    _check(request)
    run = request.read_and_resolve()
    partial = folder.with_name(f"{folder.name}.partial")
    try:
        partial.mkdir()
    except OSError as error:
        raise ConfigError(
            f"expected to make the folder {partial}, got: {error.strerror}",
            **mistake("unwritable-path", partial),
        ) from None
    try:
        write_manifest(_write_clients(run, partial))
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return read_shards(folder)


def _check(request: RunRequest) -> None:
    """Raise `ConfigError` for options with which clients could not be read one by one."""
    config = request.config
    if request.source.kind == "shards":
        raise ConfigError(
            f"expected a graph or silos to cut, got {config.dataset}, which holds shards: give the "
            "data that they were written from",
            **mistake("option-value", "dataset", config.dataset),
        )
    check_exclusions(exclusions_of_shards(config, request.parts))


def _write_clients(run: SimulatedRun, folder: Path) -> Shards:
    """Write the clients of a run, and return what the manifest says of them."""
    block, cut, config = run.clients, run.simulated, run.resolved.config
    assert isinstance(block, ClientBlock)  # the graph is in memory
    assert cut is not None
    graph, copies = cut.graph, cut.partition.copies
    weighted = run.edge_weights is not None
    settings = {name: getattr(config, name) for name in IN_SHARDS}
    settings |= {"partition": config.partition}
    settings["edge_weights"] = config.edge_weights if weighted else None
    client_rows, figures = figures_of(cut)
    is_several = len(torch.unique(copies)) < len(copies)
    return Shards(
        clients=write_clients(folder, block),
        route=run.route,
        schema=run.resolved.schema,
        name=graph.name,
        settings=settings,
        num_train=block.num_train,
        columns=block.x.used.off.diff() if isinstance(block.x, SparseRows) else None,
        feature_names=graph.feature_names,
        overlapping=run.resolved.parts.partition.part.overlapping or is_several,
        weighted=weighted and config.edge_weights != "ignore",
        scale=graph.scale,
        fingerprint=cut.fingerprint,
        partition_hash=cut.partition.hash,
        warnings=run.warnings,
        sizes=sizes_of(graph),
        client_rows=tuple(client_rows),
        figures=figures,
    )
