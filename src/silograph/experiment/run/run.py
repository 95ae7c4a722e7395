"""`run` and `resume`: one experiment from config to result."""

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from silograph.core.config import RunConfig, make_config
from silograph.core.errors import ConfigError, StateError, TrainingError
from silograph.core.numeric_state import standard_numerics, torch_threads
from silograph.core.resolved_config import ResolvedConfig
from silograph.core.run_file import read_toml
from silograph.experiment.report import add_report
from silograph.experiment.resolve.asked_run import parse_request
from silograph.experiment.resolve.exclusions import own_module
from silograph.experiment.resolve.own_partition import (
    GIVEN,
    CutGraph,
    parse_call_arguments,
    restore_partition,
)
from silograph.experiment.resolve.parts import Parts, own_code
from silograph.experiment.resolve.resolve import choose
from silograph.experiment.resolve.trusted_code import Trust, check_code, check_trusted
from silograph.experiment.resolve.user_code import is_spec
from silograph.experiment.result_files import LEDGER, Row
from silograph.experiment.run.clock import watch_first_use
from silograph.experiment.run.loop import first_snapshot, train
from silograph.experiment.run.progress import (
    Progress,
    Tracker,
    TrackerGroup,
    check_trackers,
    generation_callback,
    make_tracker,
    plan_text,
    show_progress,
)
from silograph.experiment.run.result import Result
from silograph.experiment.run.result_folder import ResultFolder, check_free
from silograph.experiment.run.setup import Setup, prepare, set_up
from silograph.experiment.run.snapshot import Snapshot, check_identity, from_checkpoint, identity
from silograph.experiment.run_options import RunOptions
from silograph.experiment.signature import with_keywords
from silograph.federation.checkpoint import Checkpoint
from silograph.federation.program import BLANK
from silograph.graph.datasets import Source, source_of
from silograph.graph.graph import Graph
from silograph.graph.silos.data import Silos
from silograph.methods import METHODS
from silograph.methods.base import Method
from silograph.nn.own_module import Make

LOG = logging.getLogger("silograph")
MODES = ("live", "plain", "none")


@with_keywords(RunOptions)
@standard_numerics()
def run(
    graph: Any = None,
    *,
    config: RunConfig | ResolvedConfig | None = None,
    method: Method | str | None = None,
    progress: str | Progress = "none",
    trackers: Sequence[Tracker] = (),
    **options: Unpack[RunOptions],
) -> Result:
    """Train a federation and return its result.

    >>> import silograph as sg
    >>> result = sg.run("digits", clients=4, partition="random", rounds=2, hidden=8)
    >>> result.best_round in (1, 2)
    True

    Args:
        graph: a graph (also PyG `Data` or a networkx graph), or the name or path of one; or a
            list of PyG `Data`, each the graph of one client; or silos, or the path of a folder
            that holds their folders; None takes `dataset` of the config.
        config: where to start from, also that of a result; None means all defaults.
        method: a name, `FILE.py:NAME`, `package.module:NAME`, or a method as a value, which has a
            name of its own; None takes that of the config.
        progress: `live`, `plain` or `none`, on standard error; or an object whose
            `update` is called after every round.
        trackers: further trackers, besides `tracker` of the config.
        options: fields of `RunConfig`, replacing those of `config`. A result folder is written
            only if `out` is among them or in `config`. `model` may also be a class of your own,
            whose call with numbers of features and outputs gives a torch.nn.Module. `partition`
            may also be an array with the client of every node, (n,) numbers from 0 or names, a
            `Partition`, or a function of the graph that returns either.

    Raises:
        SilographError: something about the options, the graph or the cut cannot be used.
    """
    check_mode(progress)
    check_trackers(trackers)
    # Before any data is read: a wrong name should not cost a minute.
    request = parse_request(graph, config, method, options)
    tracker_group = make_trackers(request.config, trackers)
    if request.config.out is not None:
        check_free(request.config.out)
    simulation = request.read_and_resolve(generation_callback(progress))
    with torch_threads(simulation.user_config.threads):
        return _start_run(
            set_up(simulation), simulation.user_config, request.source, progress, tracker_group
        )


def _start_run(
    setup: Setup,
    user_config: RunConfig,
    source: Source,
    progress: str | Progress,
    tracker_group: TrackerGroup,
) -> Result:
    """Train from the first round on, with a result folder if the config has `out`."""
    first = first_snapshot(setup)  # before there is a folder: weights may not fit into memory
    if user_config.out is None:
        return continue_training(setup, None, progress, first, [], tracker_group)
    with closing(ResultFolder.create(user_config.out, setup, user_config, source)) as folder:
        return _train_and_report_divergence(
            folder,
            lambda: continue_training(setup, folder, progress, first, [], tracker_group),
            new=True,
        )


def _train_and_report_divergence(
    folder: ResultFolder, train: Callable[[], Result], *, new: bool
) -> Result:
    """Train; on divergence, note it in the folder, or remove a new folder without rounds."""
    try:
        return train()
    except TrainingError as error:
        if new and not folder.has_rounds:
            folder.remove()
        else:
            folder.record_divergence(str(error))
            add_report(folder.path)
        raise


def make_trackers(config: RunConfig, trackers: Sequence[Tracker]) -> TrackerGroup:
    """Return the trackers of a run; raise `ConfigError` for one that cannot be used."""
    config_trackers = [] if config.tracker is None else [make_tracker(config.tracker)]
    return TrackerGroup([*config_trackers, *trackers])


@standard_numerics()
def resume(
    path: str | os.PathLike[str],
    *,
    graph: Any = None,
    partition: Any = None,
    model: Make | None = None,
    method: Method | None = None,
    trust: Trust = False,
    progress: str | Progress = "none",
    trackers: Sequence[Tracker] = (),
) -> Result:
    """Resume an interrupted run and return its result.

    The result is identical to that of an uninterrupted run. A complete run is not trained again:
    its result is computed once more.

    Args:
        path: the run's result folder.
        graph: the graph or silos, for a run on what was in memory.
        partition: the partition, for a run whose partition was passed as a value.
        model: the class of the model, for a run with one that cannot be imported.
        method: the method, for a run whose method was passed as a value.
        trust: whether code may be imported that the folder names, as a run with `FILE.py:NAME` has
            it; or which, as `FILE.py:NAME`.
        progress: `live`, `plain` or `none`, on standard error; or an object whose
            `update` is called after every round.
        trackers: further trackers, besides `tracker` of the config.

    Raises:
        ConfigError: there is no run at `path`, another process is writing it, or it names code that
            is not trusted.
        CheckpointError: a file or the code of the run has changed, the checkpoint is of another
            config, graph or version, or no whole one is left.
    """
    check_mode(progress)
    check_trackers(trackers)
    target = Path(path)
    folder = ResultFolder(target)
    try:
        about = folder.about()
        if not about["simulated"]:
            raise ConfigError(
                f"expected a run of this process in {target}, got one whose graph silos hold: "
                "use silograph server --resume"
            )
        config = make_config(read_toml(target / "config.toml"), source=f"{target}/config.toml")
        given_values = {
            name: value for name, value in (("method", method), ("model", model)) if value
        }
        _check_trusted(config, given_values, trust, target)
        check_code(about["code"], config, given_values)
        parts = _choose_parts(config, method)
        model = _import_module_again(config) if model is None else model
        tracker_group = make_trackers(config, trackers)
        data = _load_data_again(graph, partition, config, about["source"], target, progress)
        with torch_threads(config.threads):
            setup = prepare(config, data, parts, model)
            check_identity(about["same"], identity(setup), config)
            snapshot, rows = restore_run(setup, folder, about["same"])
            return _train_and_report_divergence(
                folder,
                lambda: continue_training(
                    setup, folder, progress, snapshot, rows, tracker_group, is_resumed=True
                ),
                new=False,
            )
    finally:
        folder.close()


def _check_trusted(
    config: RunConfig, given_values: Mapping[str, Any], trust: Trust, folder: Path
) -> None:
    """Raise `ConfigError` for code of a run's config that is neither a value nor trusted."""
    named_code = {kind: spec for kind, spec in own_code(config).items() if kind not in given_values}
    try:
        check_trusted(named_code, trust, folder)
    except ConfigError as error:
        hint = "; or give the class: sg.resume(DIR, model=...)" if "model" in named_code else ""
        raise ConfigError(f"{error}{hint}") from None


def _load_data_again(
    graph: Any,
    partition: Any,
    config: RunConfig,
    source: Mapping[str, str | None] | None,
    folder: Path,
    progress: str | Progress,
) -> Graph | CutGraph | Silos:
    """Return the graph of a resumed run, with its partition where that was in memory."""
    if partition is None and graph is None and config.partition.startswith(GIVEN):
        raise ConfigError(
            f"expected the partition of the run in {folder}, got none: it was made in memory; use "
            "sg.resume(DIR, partition=...)"
        )
    call = parse_call_arguments(graph, {} if partition is None else {"partition": partition})
    data = call.graph
    if not isinstance(data, Graph | Silos):
        data = _read_again(source, config, folder, progress)
    return data if partition is None else restore_partition(data, call.partition, config)


def _read_again(
    source: Mapping[str, str | None] | None,
    config: RunConfig,
    folder: Path,
    progress: str | Progress,
) -> Graph | Silos:
    """Read the data of a resumed run; raise `ConfigError` where they were in memory."""
    name = None if source is None else source["dataset"]
    if source is None or name is None:
        raise ConfigError(
            f"expected the graph of the run in {folder}, got none: it was made in memory; "
            "use sg.resume(DIR, graph=...)"
        )
    source_data = source_of(replace(config, dataset=name, data_dir=source["data_dir"]))
    return source_data.read(config.scale, generation_callback(progress))


def _import_module_again(config: RunConfig) -> Make | None:
    """Import the module of a resumed run."""
    try:
        return own_module(config)
    except ConfigError as error:
        raise ConfigError(f"{error}; or give the class: sg.resume(DIR, model=...)") from error


def _choose_parts(config: RunConfig, method: Method | None) -> Parts:
    """Return the parts of a run; raise `ConfigError` where a method as a value is missing."""
    if method is None and config.method not in METHODS and not is_spec(config.method):
        raise ConfigError(
            f"expected the method {config.method!r} of the run, got none: it was given as a value; "
            "use sg.resume(DIR, method=...)"
        )
    return choose(config, method)


def restore_run(
    setup: Setup, folder: ResultFolder, run_identity: Mapping[str, str]
) -> tuple[Snapshot, list[Row]]:
    """Bring federation and folder back to the latest usable checkpoint, or to the start."""
    folder.set_identity(run_identity)
    folder.checkpoints.drop_partial()
    problems: list[str] = []
    for checkpoint in folder.checkpoints.each(folder.why_checkpoint_unusable):
        if isinstance(checkpoint, str):
            problems.append(checkpoint)
            continue
        try:
            snapshot, rows = _restore_snapshot(setup, folder, checkpoint)
        except StateError as error:  # silos may still have the round before
            problems.append(f"round {checkpoint.round} cannot be gone on from: {error}")
            continue
        for line in problems:
            LOG.warning("%s; going on from round %d", line, checkpoint.round)
        return snapshot, rows
    if problems:
        raise folder.checkpoints.none_usable(problems)
    if folder.is_complete:
        raise ConfigError(
            f"expected a run to go on with in {folder.path}, got a complete one without "
            "checkpoints: its result is in result.json"
        )
    folder.truncate_files(dict.fromkeys(folder.sizes(), 0))
    if setup.simulated is None:  # silos may remember more
        setup.federation.restore(BLANK, (), ())
    return first_snapshot(setup), []


def _restore_snapshot(
    setup: Setup, folder: ResultFolder, checkpoint: Checkpoint
) -> tuple[Snapshot, list[Row]]:
    """Bring federation and folder back to a checkpoint, the folder last.

    Raises:
        StateError: a silo lacks its state of that round; no file was changed.
    """
    facts = checkpoint.facts
    best_weights = folder.checkpoints.best(facts["best_round"]) if facts["best_apart"] else None
    snapshot, states = from_checkpoint(setup, checkpoint, best_weights)
    sizes = {name: size for name, (size, _) in facts["prefixes"].items()}
    records, remembered = folder.records(sizes[LEDGER]), facts.get("engine", {})
    setup.federation.restore(snapshot.round, states, records, remembered)
    return snapshot, folder.truncate_files(sizes)


def continue_training(
    setup: Setup,
    folder: ResultFolder | None,
    progress: str | Progress,
    snapshot: Snapshot,
    rows: list[Row],
    trackers: TrackerGroup,
    report: Callable[[str], None] | None = None,
    *,
    is_resumed: bool = False,
) -> Result:
    """Continue a run from a snapshot to its end, and show its progress.

    `report` is called with the lines at the beginning; None prints them on standard error, unless
    `progress` is `none`. `is_resumed`: the run is resumed, so the round is reported from which it
    continues.
    """

    def say(line: str) -> None:
        if isinstance(progress, str) and progress != "none":
            print(line, file=sys.stderr, flush=True)  # noqa: T201

    report = say if report is None else report
    if not (folder and folder.is_complete):  # else nothing is left to do
        report(plan_text(setup.config))
        if setup.why_torch is not None:
            report(setup.why_torch)
        if is_resumed:
            report(_resume_message(snapshot.round + 1, setup.config.rounds))
        if setup.edge_weights is not None and setup.config.edge_weights != "ignore":
            report(setup.edge_weights)
    watch = watch_first_use(setup.config.kernels, report)
    with (
        show_progress(setup.config.rounds, progress, rounds_done=snapshot.round) as display,
        watch as w,
    ):
        return train(setup, folder, display, snapshot, rows, trackers, w)


def _resume_message(first: int, rounds: int) -> str:
    """Return a line that names the round from which a run continues."""
    if first == 1:
        return f"there is no checkpoint: beginning again with round 1 of {rounds}"
    return f"going on with round {first} of {rounds}"


def check_mode(progress: object) -> None:
    """Raise `ConfigError` for a way of showing progress that does not exist."""
    if progress not in MODES and not isinstance(progress, Progress):
        raise ConfigError(f"expected progress live, plain or none, got {progress!r}")
