"""Laws of trackers: told of every round once, they change nothing, and may fail."""

import importlib.util
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commands import QUICK
from runs import FAST, MakeGraph, go, outcome, rows_of, run_until
from silograph.cli import run_app
from silograph.core.errors import ConfigError, install_command
from silograph.core.resolved_config import ResolvedConfig
from silograph.experiment.result_files import Row, read_rounds
from silograph.experiment.run.progress import MLflow, RunFacts, TensorBoard, make_tracker
from silograph.experiment.run.result import Result
from silograph.experiment.run.run import resume, run

HERE = {name: importlib.util.find_spec(name) is not None for name in ("tensorboard", "mlflow")}
MISSING = {name: f"{name} is not installed" for name in HERE}


@dataclass
class Recording:
    """Keeps what it is told."""

    begun: list[tuple[ResolvedConfig, RunFacts]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    ended: list[Result] = field(default_factory=list)

    def begin(self, config: ResolvedConfig, facts: RunFacts) -> None:
        self.begun.append((config, facts))

    def round(self, row: Row) -> None:
        self.rows.append(row)

    def end(self, result: Result) -> None:
        self.ended.append(result)


class Failing(Recording):
    """Fails at one moment, and spoils what it is given."""

    def __init__(self, moment: str) -> None:
        super().__init__()
        self.moment = moment
        self.calls = 0

    def _call(self, moment: str) -> None:
        self.calls += 1
        if moment == self.moment:
            raise ConnectionError("no route\nto host")

    def begin(self, config: ResolvedConfig, facts: RunFacts) -> None:
        super().begin(config, facts)
        self._call("begin")

    def round(self, row: Row) -> None:
        row.clear()
        self._call("round")

    def end(self, result: Result) -> None:
        super().end(result)
        self._call("end")


def test_a_tracker_is_told_of_everything_once(make_graph: MakeGraph, tmp_path: Path) -> None:
    tracker = Recording()
    result = go(make_graph(), trackers=[tracker], out=str(tmp_path / "x"), eval_every=3)
    [(config, facts)] = tracker.begun
    assert config == result.config
    assert (facts.done, facts.result_dir) == (0, str(tmp_path / "x"))
    assert facts.partition_hash == result.partition_hash
    assert {"silograph", "torch"} <= facts.versions.keys()
    assert tuple(tracker.rows) == result.rounds
    assert [row["round"] for row in tracker.rows] == [3, 4]
    assert tracker.ended == [result]
    assert (tmp_path / "x" / "report.html").exists()


def test_a_run_without_a_folder_is_tracked(make_graph: MakeGraph) -> None:
    tracker = Recording()
    result = go(make_graph(), trackers=[tracker])
    assert tracker.begun[0][1].result_dir is None
    assert tuple(tracker.rows) == result.rounds


@pytest.mark.parametrize("moment", ["begin", "round", "end"])
def test_a_failing_tracker_changes_nothing(
    make_graph: MakeGraph, caplog: pytest.LogCaptureFixture, moment: str
) -> None:
    graph, failing, other = make_graph(), Failing(moment), Recording()
    plain = go(graph)
    with caplog.at_level(logging.WARNING, "silograph"):
        tracked = go(graph, trackers=[failing, other])
    assert outcome(tracked) == outcome(plain)
    assert rows_of(tracked) == rows_of(plain)
    assert list(tracked.ledger.records) == list(plain.ledger.records)
    when = {"begin": "at the beginning", "round": "in round 1", "end": "at the end"}[moment]
    assert caplog.messages == [
        f"Failing failed {when} and is told no more: ConnectionError: no route"
    ]
    assert failing.calls == {"begin": 1, "round": 2, "end": 6}[moment]
    assert (len(other.begun), len(other.rows), len(other.ended)) == (1, 4, 1)


def test_a_tracker_goes_on_with_the_run(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, first, second = make_graph(), Recording(), Recording()
    options = FAST | {"checkpoint_every": 2}
    run_until(monkeypatch, graph, 4, tmp_path / "x", **options, trackers=[first])
    assert [row["round"] for row in first.rows] == [1, 2]  # round 3 is scored in round 4
    assert first.ended == []
    result = resume(tmp_path / "x", graph=graph, trackers=[second])
    assert second.begun[0][1].done == 2
    assert [row["round"] for row in second.rows] == [2, 3, 4]  # round 2 was scored in round 3
    assert tuple(second.rows) == result.rounds[1:]
    third = Recording()
    resume(tmp_path / "x", graph=graph, trackers=[third])  # it is complete
    assert third == Recording()


# --- by name --------------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every package found."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tensorbord", "unknown tracker 'tensorbord': did you mean 'tensorboard'?"),
        ("tensorboard=", "tracker: expected tensorboard=WHERE or tensorboard, got"),
        ("mlflow=http://me:secret@host", "expected mlflow=WHERE without a password"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_a_wrong_tracker_is_refused(
    make_graph: MakeGraph, tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        go(make_graph(), tracker=text, out=str(tmp_path / "x"))
    assert "secret" not in str(caught.value)
    assert not (tmp_path / "x").exists()


@pytest.mark.usefixtures("work")
@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_a_missing_package_is_one_line_before_training(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, name: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert run_app(["run", "g.npz", *QUICK, "--tracker", name, "--out", "x"]) == 2
    assert capsys.readouterr().err == (
        f"error: expected {name} for the tracker {name}, got no such package: "
        f"{install_command(name)}\n"
    )
    assert not Path("x").exists()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (3, "expected a list of trackers, got 3: give trackers=[...]"),
        ("mlflow", "expected a list of trackers, got 'mlflow': give"),
        ([3], "expected trackers with begin, round and end, got 3: those with a name are tracker="),
        (["mlflow"], "expected trackers with begin, round and end, got 'mlflow'"),
    ],
)
def test_what_is_no_tracker(
    make_graph: MakeGraph, tmp_path: Path, given: Any, expected: str
) -> None:
    out = tmp_path / "x"
    with pytest.raises(ConfigError) as caught:
        go(make_graph(), trackers=given, out=str(out))
    assert expected in str(caught.value)
    assert not out.exists()
    go(make_graph(), out=str(out))
    with pytest.raises(ConfigError) as caught:
        resume(out, graph=make_graph(), trackers=given)
    assert expected in str(caught.value)


@pytest.mark.usefixtures("installed")
def test_trackers_have_names() -> None:
    assert isinstance(make_tracker("tensorboard"), TensorBoard)
    assert isinstance(make_tracker("mlflow=http://host:5000"), MLflow)


def test_packages_are_not_imported_unless_used(make_graph: MakeGraph) -> None:
    before = set(sys.modules)
    go(make_graph(), rounds=1)
    assert not {"tensorboard", "mlflow", "torch.utils.tensorboard"} & (set(sys.modules) - before)


def test_the_tracker_takes_no_part_in_the_numbers(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run may go on with another tracker, whose name stands in its config."""
    made: list[str] = []
    tracker = Recording()

    def make(text: str) -> Recording:
        made.append(text)
        return tracker

    monkeypatch.setattr("silograph.experiment.run.run.make_tracker", make)
    graph, out = make_graph(), tmp_path / "x"
    run_until(monkeypatch, graph, 3, out, **FAST, tracker="tensorboard=events")
    assert made == ["tensorboard=events"]
    text = (out / "config.toml").read_text()
    where = f"tensorboard={Path('events').absolute()}"
    assert where in text
    (out / "config.toml").write_text(text.replace(where, "mlflow"))
    resume(out, graph=graph)
    assert made == ["tensorboard=events", "mlflow"]
    assert [row["round"] for row in tracker.rows] == [1, 2, 3, 4]


# --- TensorBoard ----------------------------------------------------------------------------------


class Writer:
    """Stands for torch's SummaryWriter."""

    made: list["Writer"] = []  # noqa: RUF012

    def __init__(self, folder: str, purge_step: int) -> None:
        self.folder, self.purge_step = folder, purge_step
        self.scalars: list[tuple[str, float, int]] = []
        self.texts: dict[str, str] = {}
        self.closed = False
        Writer.made.append(self)

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.append((tag, value, step))

    def add_text(self, tag: str, text: str, step: int) -> None:
        self.texts[tag] = text
        assert step == 0

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


@pytest.mark.usefixtures("installed")
def test_what_tensorboard_is_told(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Writer.made.clear()
    module = SimpleNamespace(SummaryWriter=Writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    out = tmp_path / "x"
    result = go(make_graph(), method="local", tracker="tensorboard", out=str(out))
    [writer] = Writer.made
    assert (writer.folder, writer.purge_step, writer.closed) == (str(out / "tensorboard"), 1, True)
    last = {tag: value for tag, value, step in writer.scalars if step == 4}
    row = result.rounds[-1]
    assert last["val/personalized_accuracy"] == row["val_personalized_accuracy"]
    assert last["train/loss"] == row["train_loss"]
    assert last["cost/bytes"] == row["bytes"]
    assert not [tag for tag in last if "server" in tag]  # local has no such view
    assert result.test.personalized is not None
    final = ("final/test_personalized_accuracy", result.test.personalized.accuracy)
    assert (*final, result.best_round) in writer.scalars
    go(make_graph(), tracker=f"tensorboard={tmp_path}", out=str(tmp_path / "y"))
    assert Writer.made[-1].folder == str(tmp_path / "y")  # runs do not mix in one folder
    assert "    method: local\n" in writer.texts["config"]
    assert result.partition_hash in writer.texts["config"]


@pytest.mark.skipif(not HERE["tensorboard"], reason=MISSING["tensorboard"])
@pytest.mark.filterwarnings("default")  # of packages that are not ours
def test_events_of_an_interrupted_run_read_back(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    graph, out = make_graph(), tmp_path / "x"
    options = FAST | {"checkpoint_every": 2, "tracker": "tensorboard"}
    run_until(monkeypatch, graph, 4, out, **options)
    resume(out, graph=graph)
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    rows = read_rounds(out / "rounds.csv")
    for tag, column in (("val/server_accuracy", "val_server_accuracy"), ("cost/bytes", "bytes")):
        found = [(event.step, event.value) for event in events.Scalars(tag)]
        assert [step for step, _ in found] == [1, 2, 3, 4]
        assert [v for _, v in found] == pytest.approx([row[column] for row in rows])


# --- MLflow ---------------------------------------------------------------------------------------


@pytest.mark.skipif(not HERE["mlflow"], reason=MISSING["mlflow"])
@pytest.mark.filterwarnings("default")  # of packages that are not ours
def test_an_mlflow_run_goes_on(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri, graph, out = (tmp_path / "store").as_uri(), make_graph(), tmp_path / "x"
    options = FAST | {"checkpoint_every": 2, "tracker": f"mlflow={uri}"}
    run_until(monkeypatch, graph, 4, out, **options)
    result = resume(out, graph=graph)
    client = MlflowClient(uri)
    found = client.get_experiment_by_name("silograph")
    [only] = client.search_runs([found.experiment_id])
    history = client.get_metric_history(only.info.run_id, "val_server_accuracy")
    rows = read_rounds(out / "rounds.csv")
    assert sorted((metric.step, metric.value) for metric in history) == [
        (row["round"], row["val_server_accuracy"]) for row in rows
    ]
    assert only.info.status == "FINISHED"
    assert only.data.params["partition_hash"] == result.partition_hash
    assert (only.data.params["method"], only.data.params["hidden"]) == ("fedavg", "8")
    assert result.test.server is not None
    assert only.data.metrics["final_test_server_accuracy"] == result.test.server.accuracy


class Client:
    """Stands for MLflow's client; what it knows outlives it."""

    runs: dict[str, dict[str, Any]] = {}  # noqa: RUF012

    def __init__(self, uri: str | None) -> None:
        self.uri = uri

    def get_experiment_by_name(self, _: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        return name

    def create_run(self, experiment: str, run_name: str) -> Any:
        assert experiment == "silograph"
        number = f"run{len(Client.runs)}"
        Client.runs[number] = {"name": run_name, "params": {}, "metrics": [], "over": False}
        return SimpleNamespace(info=SimpleNamespace(run_id=number))

    def log_param(self, run_id: str, key: str, value: str) -> None:
        Client.runs[run_id]["params"][key] = value

    def log_metric(self, run_id: str, key: str, value: float, step: int) -> None:
        Client.runs[run_id]["metrics"].append((key, value, step))

    def get_metric_history(self, run_id: str, key: str) -> list[Any]:
        logged = Client.runs[run_id]["metrics"]
        return [SimpleNamespace(step=step) for name, _, step in logged if name == key]

    def set_terminated(self, run_id: str) -> None:
        Client.runs[run_id]["over"] = True


@pytest.mark.usefixtures("installed")
def test_what_mlflow_is_told(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Client.runs.clear()
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=Client))
    graph, out = make_graph(), tmp_path / "x"
    run_until(monkeypatch, graph, 4, out, **FAST | {"checkpoint_every": 2, "tracker": "mlflow"})
    assert not Client.runs["run0"]["over"]
    result = resume(out, graph=graph)
    [(number, known)] = Client.runs.items()
    assert (out / "mlflow-run.txt").read_text() == f"{number}\n"
    assert (known["name"], known["over"]) == ("fedavg on planted", True)
    steps = [step for key, _, step in known["metrics"] if key == "val_server_accuracy"]
    assert steps == [1, 2, 3, 4]
    assert "final_test_uncut_accuracy" in {key for key, _, _ in known["metrics"]}
    assert known["params"]["hidden"] == str(result.config.hidden)
    assert "tracker" not in known["params"]
    run(graph, **FAST, tracker="mlflow")  # without a folder it is a run of its own
    assert list(Client.runs) == ["run0", "run1"]
