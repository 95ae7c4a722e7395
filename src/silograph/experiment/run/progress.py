"""Progress of long work: a live line on a terminal, plain lines elsewhere."""

import importlib.util
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable
from urllib.parse import urlsplit

from silograph.core.errors import ConfigError, missing_package, mistake, unknown
from silograph.core.resolved_config import ResolvedConfig
from silograph.experiment.result_files import Row
from silograph.experiment.run.result import VIEWS, Result

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from rich.progress import Progress as Bar
    from torch.utils.tensorboard import SummaryWriter

    from silograph.graph.generated import ProgressCallback


PLAIN_LINES = 10  # a run prints about this many plain lines


@runtime_checkable
class Progress(Protocol):
    """Called after every round."""

    def update(self, done: int, metric: str) -> None:
        """Show that `done` rounds are over, and the current metric."""


class Silent:
    """Shows nothing."""

    def update(self, done: int, metric: str) -> None:
        """Do nothing."""


class Plain:
    """Prints about ten lines over a run."""

    def __init__(self, total: int, first_round: int) -> None:
        self._total = total
        self._first = first_round
        self._pace = Pace(total)

    def update(self, rounds_done: int, metric: str) -> None:
        """Print a line now and then."""
        step = -(-self._total // PLAIN_LINES)  # rounded up
        time_left = self._pace.left(rounds_done)
        if rounds_done == self._first + 1 or rounds_done % step == 0 or rounds_done == self._total:
            words = (f"round {rounds_done}/{self._total}", time_left, metric)
            print("  ".join(w for w in words if w), file=sys.stderr, flush=True)  # noqa: T201


class Pace:
    """Estimates how long the remaining rounds will take, from those since the first one.

    The first one is not counted: kernels may be compiled in it, and data loaded.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._began: tuple[int, float] | None = None  # the first round shown, and when

    def left(self, rounds_done: int) -> str:
        """Return the time left in words, an empty text while it is not known."""
        now = time.monotonic()
        if self._began is None:
            self._began = rounds_done, now
        first, start_time = self._began
        if rounds_done == self._total:
            return "0 s left"
        if rounds_done == first:
            return ""
        return (
            f"{(now - start_time) / (rounds_done - first) * (self._total - rounds_done):.0f} s left"
        )


@contextmanager
def show_progress(total: int, mode: str | Progress, rounds_done: int = 0) -> Iterator[Progress]:
    """Yield a progress display: `live`, `plain` or `none`; it goes to standard error.

    Args:
        total: rounds of the run.
        mode: how to show them, or an object whose `update` is called after every round.
        rounds_done: rounds that were over before.
    """
    if not isinstance(mode, str):
        yield mode
    elif mode == "none":
        yield Silent()
    elif mode == "plain":
        yield Plain(total, rounds_done)
    else:
        with _live(total, rounds_done) as live:
            yield live


def round_bar() -> "Bar":
    """Return an empty line of rounds, as a terminal shows it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("round"),
        MofNCompleteColumn(),
        BarColumn(bar_width=None),  # what the other columns leave
        TextColumn("{task.fields[left]}"),
        TextColumn("{task.fields[metric]}"),
    )
    return Bar(*columns, console=Console(stderr=True), expand=True)


@contextmanager
def _live(total: int, rounds_done: int) -> Iterator[Progress]:
    with round_bar() as bar:
        task = bar.add_task("", total=total, completed=rounds_done, left="", metric="first round")
        pace = Pace(total)

        class Live:
            def update(self, done: int, metric: str) -> None:
                bar.update(task, completed=done, left=pace.left(done), metric=metric)

        yield Live()


def best_mode() -> str:
    """Return `live` when standard error is a terminal, else `plain`."""
    return "live" if sys.stderr.isatty() else "plain"


def generation_callback(progress: str | Progress) -> "ProgressCallback | None":
    """Return a callback that shows, on standard error, that a graph is being generated."""
    percent_by_task: dict[str, int] = {}  # percent, by what is being made

    def report(task: str, fraction: float) -> None:
        percent = int(100 * fraction)
        if task not in percent_by_task:
            print(task, file=sys.stderr, flush=True)  # noqa: T201
        elif progress == "live" and percent > percent_by_task[task]:
            end = "\n" if percent == 100 else ""
            print(f"\r{percent:3d} %", end=end, file=sys.stderr, flush=True)  # noqa: T201
        percent_by_task[task] = percent

    return report if isinstance(progress, str) and progress != "none" else None


UNSAID_SAMPLERS = ("full", "fanout")  # every backend draws them


def plan_text(config: ResolvedConfig) -> str:
    """Describe kernels, sampler, block size and threads of a run."""
    threads = "1 thread" if config.threads == 1 else f"{config.threads} threads"
    clients = "client" if config.block_size == 1 else "clients"
    draws_in_torch = config.kernels == "torch" and config.neighbors not in UNSAID_SAMPLERS
    sampler_note = f", neighbors={config.neighbors} drawn in torch" if draws_in_torch else ""
    workers = "" if config.workers in (None, 1) else f", {config.workers} workers"
    workers = workers.replace("auto workers", "workers: auto")
    return (
        f"{config.kernels} kernels{sampler_note}, {config.block_size} {clients} at once, "
        f"{threads}{workers}{', on Ray' if config.engine == 'ray' else ''}"
    )


def line_printer(progress: str | Progress) -> Callable[[str], None]:
    """Return what prints a line on standard error; nothing for `none` or an object."""

    def print_line(line: str) -> None:
        if isinstance(progress, str) and progress != "none":
            print(line, file=sys.stderr, flush=True)  # noqa: T201

    return print_line


# --- Trackers, which log a run as it goes, such as TensorBoard and MLflow ------------------------
#
# A tracker influences nothing, and a run continues without one that fails. The packages are extras
# (`silograph[tensorboard]`, `silograph[mlflow]`) and imported only when they are used.


LOG = logging.getLogger("silograph")


@dataclass(frozen=True)
class RunFacts:
    """What a tracker receives about a run besides its config.

    Attributes:
        method: name of the method.
        done: rounds that were over before; above 0 where a run goes on after an interruption.
        result_dir: the result folder, or None.
        partition_hash: hash of the cut.
        versions: of the packages that decide numbers.
    """

    method: str
    done: int
    result_dir: str | None
    partition_hash: str
    versions: Mapping[str, str]


class Tracker(Protocol):
    """Logs a run: its beginning, every scored round, its end.

    A resumed run begins again, and reports the rounds after its checkpoint once more, with the same
    values except seconds: replace or keep what was logged of rounds after `facts.done`, but do not
    log it twice. A run that is interrupted has no end.
    """

    def begin(self, config: ResolvedConfig, facts: RunFacts) -> None:
        """The run begins, or goes on."""

    def round(self, row: Row) -> None:
        """A round was judged; `row` is its row of the table of rounds."""

    def end(self, result: Result) -> None:
        """The run is over."""


class TensorBoard:
    """Writes events for TensorBoard; those of rounds that come again are purged."""

    def __init__(self, folder: str | None = None) -> None:
        """Write to `folder`/NAME for a result folder NAME; None is `tensorboard` in the latter."""
        self._folder = folder
        self._writer: SummaryWriter

    def begin(self, config: ResolvedConfig, facts: RunFacts) -> None:
        """Open the folder and show the config as a text."""
        from torch.utils.tensorboard import SummaryWriter

        result_dir = Path(facts.result_dir or ".")
        folder = (
            result_dir / "tensorboard"
            if self._folder is None
            else Path(self._folder, result_dir.name)
        )
        self._writer = SummaryWriter(str(folder), purge_step=facts.done + 1)
        lines = [f"    {name}: {value}" for name, value in tracker_params(config, facts).items()]
        self._writer.add_text("config", "\n".join(lines), facts.done)

    def round(self, row: Row) -> None:
        """Write a round's values; `val_server_accuracy` becomes `val/server_accuracy`."""
        for name, value in values_of(row).items():
            group, _, score_name = name.partition("_")
            has_group = group in ("val", "test", "train", "fact")
            tag = f"{group}/{score_name}" if has_group else f"cost/{name}"
            self._writer.add_scalar(tag, value, int(row["round"] or 0))
        self._writer.flush()

    def end(self, result: Result) -> None:
        """Write the final scores at the best round, and close."""
        for name, value in final_values(result).items():
            self._writer.add_scalar(f"final/{name}", value, result.best_round)
        self._writer.close()


class MLflow:
    """Logs to an MLflow server; a run that goes on is found by the id in its result folder."""

    def __init__(self, uri: str | None = None, experiment: str = "silograph") -> None:
        """Log to `uri`; None is what MLflow takes by itself (MLFLOW_TRACKING_URI)."""
        self._uri = uri
        self._experiment = experiment
        self._client: MlflowClient
        self._run = ""
        self._logged = 0  # the last round that the server knows

    def begin(self, config: ResolvedConfig, facts: RunFacts) -> None:
        """Make a run, or go on with the one whose id the result folder has."""
        from mlflow import MlflowClient

        self._client = MlflowClient(self._uri)
        id_file = None if facts.result_dir is None else Path(facts.result_dir, "mlflow-run.txt")
        if id_file is not None and id_file.exists():
            self._run = id_file.read_text(encoding="utf-8").strip()
            history = self._client.get_metric_history(self._run, "bytes")
            self._logged = max((metric.step for metric in history), default=0)
            return
        experiment = self._client.get_experiment_by_name(self._experiment)
        experiment_id = experiment and experiment.experiment_id
        name = f"{facts.method} on {Path(config.dataset).stem}"
        run = self._client.create_run(
            experiment_id or self._client.create_experiment(self._experiment), run_name=name
        )
        self._run = run.info.run_id
        if id_file is not None:
            id_file.write_text(self._run + "\n", encoding="utf-8")
        for key, value in tracker_params(config, facts).items():
            self._client.log_param(self._run, key, value)

    def round(self, row: Row) -> None:
        """Log a round's values, unless they were logged before an interruption."""
        step = int(row["round"] or 0)
        if step > self._logged:
            for name, value in values_of(row).items():
                self._client.log_metric(self._run, name, value, step=step)

    def end(self, result: Result) -> None:
        """Log the final scores and say that the run is over."""
        for name, value in final_values(result).items():
            self._client.log_metric(self._run, f"final_{name}", value, step=result.best_round)
        self._client.set_terminated(self._run)


@dataclass(frozen=True)
class TrackerKind:
    """A tracker that has a name.

    Attributes:
        make: builds it from what stands behind `=`.
        module: what must be installed.
    """

    make: Callable[[str | None], Tracker]
    module: str


TRACKERS = {
    "tensorboard": TrackerKind(TensorBoard, "tensorboard"),
    "mlflow": TrackerKind(MLflow, "mlflow"),
}


def make_tracker(text: str) -> Tracker:
    """Return the tracker of `NAME` or `NAME=WHERE`.

    Raises:
        ConfigError: an unknown name, nothing behind `=`, or a package that is not installed.
    """
    name, equals, where = text.partition("=")
    if name not in TRACKERS:
        raise unknown("tracker", name, TRACKERS)
    if equals and not where:
        raise ConfigError(
            f"tracker: expected {name}=WHERE or {name}, got {text!r}",
            **mistake("option-value", "tracker", text),
        )
    if urlsplit(where).password is not None:
        raise ConfigError(
            f"expected {name}=WHERE without a password, which would stand in the run's files: set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        )
    if importlib.util.find_spec(TRACKERS[name].module) is None:
        raise missing_package(TRACKERS[name].module, f"the tracker {name}", name, ConfigError)
    return TRACKERS[name].make(where or None)


def check_trackers(trackers: object) -> None:
    """Raise `ConfigError` for anything but a list of trackers."""
    if not isinstance(trackers, list | tuple):
        raise ConfigError(f"expected a list of trackers, got {trackers!r}: give trackers=[...]")
    for tracker in trackers:
        if not all(callable(getattr(tracker, each, None)) for each in ("begin", "round", "end")):
            raise ConfigError(
                f"expected trackers with begin, round and end, got {tracker!r}: those with a name "
                "are tracker='tensorboard' and tracker='mlflow'"
            )


class TrackerGroup:
    """The trackers of a run; one that fails is removed, with a warning."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)

    def _notify_all(self, moment: str, notify: Callable[[Tracker], None]) -> None:
        for tracker in tuple(self._trackers):
            try:
                notify(tracker)
            except Exception as error:
                self._trackers.remove(tracker)
                reason = (str(error).splitlines() or [""])[0]
                LOG.warning(
                    "%s failed %s and is told no more: %s: %s",
                    type(tracker).__name__,
                    moment,
                    type(error).__name__,
                    reason,
                )

    def begin(self, config: ResolvedConfig, facts: RunFacts) -> None:
        """Tell all of the beginning."""
        self._notify_all("at the beginning", lambda tracker: tracker.begin(config, facts))

    def round(self, row: Row) -> None:
        """Tell all of a round; each has a row of its own."""
        self._notify_all(f"in round {row['round']}", lambda tracker: tracker.round(dict(row)))

    def end(self, result: Result) -> None:
        """Tell all of the end."""
        self._notify_all("at the end", lambda tracker: tracker.end(result))


def tracker_params(config: ResolvedConfig, facts: RunFacts) -> dict[str, str]:
    """Return config, options, partition hash and versions as texts."""
    excluded = ("options", "tracker")
    config_texts = {
        k: str(v) for k, v in vars(config).items() if v is not None and k not in excluded
    }
    given_options = {name: value for name, value in config.options.items() if value is not None}
    options = {f"option_{name}": str(value) for name, value in given_options.items()}
    versions = {f"version_{name}": version for name, version in facts.versions.items()}
    return config_texts | options | {"partition_hash": facts.partition_hash} | versions


def values_of(row: Row) -> dict[str, float]:
    """Return the values of a row that are not None."""
    return {k: float(v) for k, v in row.items() if v is not None and k != "round"}


def final_values(result: Result) -> dict[str, float]:
    """Return the existing test scores of the best round."""
    values: dict[str, float] = {}
    for view in VIEWS:
        scores = result.reported_scores(getattr(result.test, view)) or {}
        values |= {f"test_{view}_{k}": value for k, value in scores.items() if value is not None}
    return values
