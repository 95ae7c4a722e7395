"""`run`: one experiment from config to result."""

import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from silograph.core.config import RunConfig, make_config, resolve_seeds
from silograph.core.errors import ConfigError
from silograph.core.key import Key
from silograph.evaluation.counts import tally
from silograph.evaluation.scores import Part, Scores, Views, score
from silograph.experiment.folder import ResultFolder, check_free
from silograph.experiment.progress import Progress, show_progress
from silograph.experiment.result import Result, Row
from silograph.experiment.setup import DTYPES, Setup, choose_method, prepare
from silograph.graph.datasets import load
from silograph.graph.graph import Graph, Split
from silograph.methods.base import RoundReport, ServerState
from silograph.methods.local_training import own_counts, server_counts
from silograph.nn.conv import Params
from silograph.nn.model import forward, init_weights

Counts = Mapping[str, Tensor]


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
    if config.out is not None:
        check_free(config.out)
    if progress not in ("live", "plain", "none"):
        raise ConfigError(f"expected progress live, plain or none, got {progress!r}")
    if isinstance(graph, Graph):
        config = replace(config, dataset=graph.name)
    else:
        graph = load(config.dataset, data_dir=config.data_dir)
    with torch_threads(config.threads):
        setup = prepare(config, graph)
        folder = None if config.out is None else ResultFolder(config.out, setup)
        with show_progress(config.rounds, progress) as display:
            return _train(setup, folder, display)


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Use this many torch threads inside the block: part of what makes two runs equal."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, eq=False)
class Judged:
    """A round as validation sees it."""

    round: int
    server: Counts | None
    personalised: Counts
    weights: Params | None


def _train(setup: Setup, folder: ResultFolder | None, display: Progress) -> Result:
    config, method, fed = setup.config, setup.method, setup.federation
    assert config.init_seed is not None  # resolved
    weights = init_weights(
        setup.method_config.model, Key.of(config.init_seed).fold("init"), DTYPES[config.dtype]
    )
    weights = {name: w.to(setup.uncut.off.device) for name, w in weights.items()}
    key = Key.of(config.seed).fold("training")
    start = time.monotonic()
    state = method.init(fed, setup.method_config, weights, key.fold("init"))
    best: Judged | None = None
    rows: list[Row] = []
    metric = ""
    for t in range(1, config.rounds + 1):
        judge = t % config.eval_every == 0 or t == config.rounds
        state, report = method.round(fed, setup.method_config, state, t, judge, key)
        if judge:
            judged = _judge(setup, state, t, key)
            best = judged if best is None or _better(setup, judged, best) else best
            rows.append(_row(setup, judged, report, time.monotonic() - start))
            metric = _metric(setup, rows[-1])
            if folder is not None:
                folder.add_round(rows[-1])
        display.update(t, metric)
    assert best is not None  # the last round is always judged
    result = _result(setup, best, rows, folder, time.monotonic() - start)
    if folder is not None:
        folder.finish(result)
    return result


def _judge(setup: Setup, state: ServerState, t: int, key: Key) -> Judged:
    fed = setup.federation
    server = None
    if state.weights is not None:
        server = server_counts(fed, state.weights, key.fold("judge server", t))
    return Judged(t, server, own_counts(fed, key.fold("judge own", t)), state.weights)


def _scores(setup: Setup, judged: Judged, part: Part) -> dict[str, Scores | None]:
    task = setup.cut.graph.task
    server = None if judged.server is None else score(judged.server, part, task)
    return {"server": server, "personalised": score(judged.personalised, part, task)}


def _better(setup: Setup, new: Judged, old: Judged) -> bool:
    """Whether `new` is chosen over `old`: by validation accuracy, then loss; later if none."""
    view = setup.method.judge
    ours, theirs = (_scores(setup, judged, "val")[view] for judged in (new, old))
    if ours is None or theirs is None:
        return True
    assert ours.accuracy is not None  # both are of judged nodes
    assert theirs.accuracy is not None
    assert ours.loss is not None
    assert theirs.loss is not None
    return (ours.accuracy, -ours.loss) > (theirs.accuracy, -theirs.loss)


def _row(setup: Setup, judged: Judged, report: RoundReport, seconds: float) -> Row:
    row: Row = {
        "round": judged.round,
        "participants": len(report.participants),
        "train_loss": report.train_loss,
    }
    for part in ("val", "test"):
        for view, scores in _scores(setup, judged, part).items():
            for name in ("accuracy", "accuracy_client_mean", "f1_macro", "auc", "loss"):
                if (part, name) != ("val", "auc"):
                    value = None if scores is None else getattr(scores, name)
                    row[f"{part}_{view}_{name}"] = value
    return row | {"seconds": round(seconds, 3)}


def _metric(setup: Setup, row: Row) -> str:
    value = row[f"val_{setup.method.judge}_accuracy"]
    accuracy = "-" if value is None else f"{value:.3f}"
    loss = "-" if row["train_loss"] is None else f"{row['train_loss']:.3f}"
    return f"val accuracy {accuracy}  train loss {loss}"


def peak_memory_bytes() -> int:
    """Return the peak resident memory of this process in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _uncut_counts(setup: Setup, weights: Params) -> Counts:
    """Judge the server's model on the uncut graph, each node counted for its owner."""
    model, block, partition = setup.method_config.model, setup.uncut, setup.cut.partition
    owner = partition.owner.to(block.off.device)
    held = owner >= 0
    split = Split(block.split.train & held, block.split.val & held, block.split.test & held)
    with torch.no_grad():
        logits = forward(model, weights, block)
        judged = replace(block, split=split)
        fields = tally(logits, judged, owner, len(partition.ids), model.task)
    return {name: field.t for name, field in fields.items()}


def _result(
    setup: Setup, best: Judged, rows: list[Row], folder: ResultFolder | None, seconds: float
) -> Result:
    graph = setup.cut.graph
    uncut: Counts | None = None
    if best.weights is not None:
        uncut = _uncut_counts(setup, best.weights)
    views = {}
    for part in ("val", "test"):
        on_uncut = None if uncut is None else score(uncut, part, graph.task)
        views[part] = Views(uncut=on_uncut, **_scores(setup, best, part))
    return Result(
        config=replace(setup.config, out=None if folder is None else str(folder.path)),
        test=views["test"],
        val=views["val"],
        best_round=best.round,
        rounds=tuple(rows),
        model=setup.method_config.model,
        weights=best.weights,
        partition_hash=setup.cut.partition.hash,
        seconds=seconds,
        peak_memory_bytes=peak_memory_bytes(),
        result_dir=None if folder is None else str(Path(folder.path)),
    )
