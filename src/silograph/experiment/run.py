"""`run` and `resume`: one experiment from config to result."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from silograph.core.config import RunConfig, make_config, read_toml, resolve_seeds
from silograph.core.errors import ConfigError
from silograph.experiment.folder import ResultFolder, check_free
from silograph.experiment.loop import first_snapshot, train
from silograph.experiment.progress import show_progress
from silograph.experiment.result import Result, Row
from silograph.experiment.setup import Setup, choose_method, prepare
from silograph.experiment.snapshot import Snapshot, check_identity, from_checkpoint, identity
from silograph.graph.datasets import load
from silograph.graph.graph import Graph

LOG = logging.getLogger("silograph")
MODES = ("live", "plain", "none")


def run(
    graph: Graph | str | os.PathLike[str] | None = None,
    *,
    config: RunConfig | None = None,
    progress: str = "none",
    **options: Any,
) -> Result:
    """Train a federation and return what came of it.

    >>> import silograph as sg
    >>> result = sg.run("digits", clients=4, partition="random", rounds=2, hidden=8)
    >>> result.best_round in (1, 2)
    True

    Args:
        graph: a graph, or the name or path of one; None takes `dataset` of the config.
        config: where to start from; None means all defaults.
        progress: `live`, `plain` or `none`, on standard error.
        options: fields of `RunConfig`, replacing those of `config`. A result folder is written
            only if `out` is among them or in `config`.

    Raises:
        SilographError: something about the options, the graph or the cut cannot be used.
    """
    names = {} if config is None else {k: v for k, v in vars(config).items() if v is not None}
    if isinstance(graph, str | os.PathLike):
        options = {**options, "dataset": os.fspath(graph)}
    config = resolve_seeds(make_config(names | options))
    choose_method(config)  # before any data is read: a wrong name should not cost a minute
    check_mode(progress)
    if config.out is not None:
        check_free(config.out)
        config = with_absolute_paths(config)
    if isinstance(graph, Graph):
        config = replace(config, dataset=graph.name)
    else:
        graph = load(config.dataset, data_dir=config.data_dir)
    with torch_threads(config.threads):
        setup = prepare(config, graph)
        start = first_snapshot(setup)  # before there is a folder: weights may not fit into memory
        folder = None
        if config.out is not None:
            folder = ResultFolder.create(config.out, setup, identity(setup))
        try:
            return _go_on(setup, folder, progress, start, [])
        finally:
            if folder is not None:
                folder.close()


def resume(
    path: str | os.PathLike[str], *, graph: Graph | None = None, progress: str = "none"
) -> Result:
    """Go on with a run that was interrupted, as if it had not been, and return its result.

    A run that is complete is not trained again: its result is worked out once more.

    Args:
        path: the run's result folder.
        graph: the graph, for a run on one that `load` does not find.
        progress: `live`, `plain` or `none`, on standard error.

    Raises:
        ConfigError: there is no run at `path`, or another process is writing it.
        CheckpointError: the checkpoint is of another config, graph or version, or no whole one
            is left.
    """
    check_mode(progress)
    target = Path(path)
    folder = ResultFolder(target)
    try:
        config = make_config(read_toml(target / "config.toml"), source=f"{target}/config.toml")
        if graph is None:
            graph = load(config.dataset, data_dir=config.data_dir)
        with torch_threads(config.threads):
            setup = prepare(config, graph)
            snapshot, rows = _restore(setup, folder)
            return _go_on(setup, folder, progress, snapshot, rows)
    finally:
        folder.close()


def _restore(setup: Setup, folder: ResultFolder) -> tuple[Snapshot, list[Row]]:
    """Bring federation and folder back to the latest whole checkpoint, or to the start."""
    checkpoint, damaged = folder.checkpoints.latest()
    for line in damaged:
        assert checkpoint is not None  # `latest` raises where none is whole
        LOG.warning("%s; going on from round %d", line, checkpoint.round)
    if checkpoint is None:
        folder.cut_back(dict.fromkeys(folder.sizes(), 0))
        return first_snapshot(setup), []
    check_identity(checkpoint.facts, identity(setup))
    snapshot, states = from_checkpoint(setup, checkpoint)
    rows, records = folder.cut_back(checkpoint.facts["sizes"])
    setup.federation.restore(states, records)
    return snapshot, rows


def _go_on(
    setup: Setup, folder: ResultFolder | None, progress: str, snapshot: Snapshot, rows: list[Row]
) -> Result:
    with show_progress(setup.config.rounds, progress, done=snapshot.round) as display:
        return train(setup, folder, display, snapshot, rows)


def check_mode(progress: str) -> None:
    """Raise `ConfigError` for a way of showing progress that does not exist."""
    if progress not in MODES:
        raise ConfigError(f"expected progress live, plain or none, got {progress!r}")


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Return the config with its paths made absolute, so that a run can go on from anywhere."""
    data_dir = None if config.data_dir is None else os.path.abspath(config.data_dir)
    is_path = os.path.exists(config.dataset) and (
        os.sep in config.dataset or config.dataset.endswith(".npz")
    )
    dataset = os.path.abspath(config.dataset) if is_path else config.dataset
    return replace(config, data_dir=data_dir, dataset=dataset)


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Use this many torch threads inside the block: part of what makes two runs equal."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
