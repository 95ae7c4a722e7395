"""What a run leaves: scores by view, the table of rounds, the model, and how it came about."""

import io
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from torch import Tensor

from silograph.core.errors import ConfigError, lookup
from silograph.core.html import html_lines, html_table
from silograph.core.pickling import state_of_fields
from silograph.core.resolved_config import ResolvedConfig
from silograph.core.text import counted, decimals
from silograph.evaluation.views import means_of
from silograph.experiment.data_frame import frame_of
from silograph.experiment.report import write_report
from silograph.experiment.report.figures import size_text
from silograph.experiment.resolve.cutting import Cut
from silograph.experiment.resolve.user_code import absolute, imported, names_file
from silograph.experiment.result_files import MODELS, VIRTUAL, Row
from silograph.experiment.run.trained_model import TrainedModel
from silograph.experiment.terminal_table import console_to, print_fitted
from silograph.federation.ledger import Ledger
from silograph.graph.column_statistics import ColumnStatistics
from silograph.methods.base import AnyMethod, Method, seen_by
from silograph.task.base import ClientValues
from silograph.task.metric_table import METRICS, Metric, reported
from silograph.task.scores import ClassScores, Scores, Views

if TYPE_CHECKING:
    import pandas as pd

VIEWS = tuple(f.name for f in fields(Views))


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """The outcome of a run.

    Attributes:
        config: the run's config, every default and seed written out.
        method: what trained.
        held: share of the nodes that the server held itself; None is no node.
        test: scores on test nodes at the best round, by view.
        val: scores on validation nodes at the best round, by view.
        each_best: `val` and `test` scores of the clients' own models, of each client in the round
            that its own validation nodes like best; without AUC. None in runs that were begun
            before there was such a choice.
        baseline: test scores of the best constant prediction by all training labels; where silos
            hold these, by the classes of validation nodes, without AUC. None without test nodes,
            and for numbers that silos hold.
        untrained: test scores of what else predicts without training, by name: of ratings means
            and biases, in simulation.
        constant: what that prediction is called.
        metrics: names of the scores that the task has.
        client_scores: test scores of each client at the best round, by metric and by the views
            that exist; None for a client without test nodes.
        class_scores: test scores of each class at the best round, by its name, in the view that
            picks the round; none where the task has no classes.
        confusion: how many test nodes of a class (row) the server's model took for a class (column)
            on the uncut graph, (K, K) int64; None where silos hold the labels, which never say it,
            where the server has no model, and where a node is not of one class.
        client_facts: what the method reports of each client in the last round, (C,) tensors.
        judged_without: clients that were away when the best round was judged, whose nodes are in
            no score; silos of a real federation only.
        scored_clients: number of clients behind the test scores of the best round, by view: `nodes`
            have reported any test node, and `auc` a histogram, where the task has one.
        left_out: why silos were left out of the run for good, by their names.
        best_round: the round (from 1) that validation picked; the last one where no client
            has validation nodes or sent their counts.
        rounds: one row for each judged round; bytes and flops are totals so far.
        stopped: why the run ended.
        advice: what the course of the scores, and what sets knobs, say about the number of rounds;
            None is nothing.
        model: the server's model at the best round; None where the server has none.
        models: the clients' own models at the best round, by client; empty where they
            predict with the server's, and where silos keep theirs.
        local_bias: mean distance of logits to those of a centralized model from the same initial
            weights after as many epochs; None unless the config asked for it.
        ledger: what every call cost.
        executed: floating-point operations executed here, all rounds and clients; less than the
            ledger's where work that each client is charged for is done once. None: not known.
        handed_over_bytes: of the model that silos get when the run is over, which are not in the
            ledger; in a simulation those that silos of their own would get.
        partition_hash: hash of the cut.
        cut: the graph as it was used, with the client and the part of every node; None where
            silos held it.
        seconds: wall-clock seconds of the rounds and of what clients do before the first,
            evaluation included, without compiling kernels or loading them from the cache.
        compile_seconds: besides these, what went into compiling kernels in the process that ended
            the run; 0 where they were compiled before.
        virtual_seconds: of the virtual clock; None without one.
        peak_memory_bytes: the process's peak resident memory in bytes.
        result_dir: the result folder, or None.
    """

    config: ResolvedConfig
    method: AnyMethod
    held: float | None
    test: Views
    val: Views
    each_best: Mapping[str, Scores | None] | None
    baseline: Scores | None
    untrained: Mapping[str, Scores]
    constant: str
    metrics: tuple[str, ...]
    client_scores: Mapping[str, Mapping[str, ClientValues]]
    class_scores: Mapping[str, ClassScores]
    confusion: Tensor | None
    client_facts: Mapping[str, Tensor]
    judged_without: tuple[str, ...]
    scored_clients: Mapping[str, Mapping[str, int]]
    left_out: Mapping[str, str]
    best_round: int
    rounds: tuple[Row, ...]
    stopped: str
    advice: str | None
    model: TrainedModel | None
    models: Mapping[str, TrainedModel]
    local_bias: float | None
    ledger: Ledger
    executed: float | None
    handed_over_bytes: int
    partition_hash: str
    cut: Cut | None
    seconds: float
    compile_seconds: float
    virtual_seconds: float | None
    peak_memory_bytes: int
    result_dir: str | None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle holds: of a method that a user's file defines, the file's name."""
        state = state_of_fields(self)
        if names_file(self.config.method):
            state["method"] = absolute(self.config.method)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what a pickle holds; a file that defines the method is run again."""
        if isinstance(state["method"], str):
            state = state | {"method": imported(state["method"], Method)}
        self.__dict__.update(state)

    def __repr__(self) -> str:
        """Return what the command line prints; the fields hold thousands of numbers."""
        return self.summary()

    def _repr_html_(self) -> str:
        return html_table(*self._table()) + html_lines([*self._views(), *self._lines()])

    @property
    def bytes(self) -> int:
        """Bytes of all messages, both directions, evaluation included."""
        return self.ledger.bytes

    @property
    def flops(self) -> float:
        """Floating-point operations of all clients."""
        return self.ledger.flops

    @property
    def metric(self) -> Metric:
        """The metric that picked the best round."""
        return METRICS[self.config.metric]

    @property
    def client_accuracy(self) -> Mapping[str, ClientValues]:
        """Test accuracy of each client, by view; empty where the task has no accuracy."""
        return self.client_scores.get("accuracy", {})

    @property
    def reported(self) -> list[str]:
        """Names of the scores that tables show, the run's metric first."""
        metric = self.metric.name
        # Stable: the others stay in their order.
        return sorted(reported(self.metrics, metric), key=lambda name: name != metric)

    def reported_scores(self, scores: Scores | None) -> dict[str, float | None] | None:
        """Return the scores that results show; None where a view does not exist."""
        if scores is None:
            return None
        return {name: scores[name] for name in reported(scores, self.metric.name)}

    @property
    def client_statistics(self) -> Mapping[str, ColumnStatistics]:
        """What standardized each client's features, by client, where each has its own.

        Empty with other `normalize` than `standard_client`, and where silos keep theirs.
        """
        statistics = None if self.cut is None else self.cut.statistics
        if self.cut is None or statistics is None or statistics.mean.dim() == 1:
            return {}
        ids = self.cut.partition.ids
        return {client: statistics.of_client(number) for number, client in enumerate(ids)}

    def model_of(self, client: str) -> TrainedModel:
        """Return the model that a client predicts with: its own, or the server's.

        Features that were standardized by each client's own statistics are standardized by those
        of this client.

        Raises:
            ConfigError: there is no such client, or none of its models is here.
        """
        ids = () if self.cut is None else self.cut.partition.ids
        known: Mapping[str, TrainedModel | None] = self.models or dict.fromkeys(ids, self.model)
        model = lookup(known, client, "client")
        if model is None:
            raise ConfigError(
                f"expected a model of {client}, got none: method {self.method.name} has none here"
            )
        if model.preprocessing.needs_client:
            return model.for_client(self.client_statistics[client])
        return model

    def to_dict(self) -> dict[str, Any]:
        """Return the final result as plain values, as `--json` prints it."""
        config, reported_scores = self.config, self.reported_scores
        return {
            "dataset": config.dataset,
            "method": self.method.name,
            "clients": config.clients,
            "partition": config.partition,
            "rounds": config.rounds,
            "seed": config.seed,
            "partition_hash": self.partition_hash,
            "test": {view: reported_scores(getattr(self.test, view)) for view in VIEWS},
            "val": {view: scores and dict(scores) for view, scores in vars(self.val).items()},
            "each_best": self.each_best
            and {part: reported_scores(s) for part, s in self.each_best.items()},
            "metric": self.metric.name,
            "baseline": self.baseline
            and {"name": self.constant, "scores": reported_scores(self.baseline)},
            **named_untrained({n: reported_scores(s) for n, s in self.untrained.items()}),
            "by_class": [{"class": name, **vars(s)} for name, s in self.class_scores.items()],
            "confusion": None if self.confusion is None else self.confusion.tolist(),
            "local_bias": self.local_bias,
            **(
                {}
                if self.cut is None or not self.cut.test_leaks
                else {"test_leaks": self.cut.test_leaks}
            ),
            "judged_without": list(self.judged_without),
            **({"scored_clients": few} if (few := self._scored_by_few()) else {}),
            **({"left_out": dict(self.left_out)} if self.left_out else {}),
            "best_round": self.best_round,
            "stopped": self.stopped,
            "advice": self.advice,
            "bytes": {
                "total": self.bytes,
                "by_kind": self.ledger.bytes_by_kind,
                "handed_over": self.handed_over_bytes,
            },
            "flops": self.flops,
            "flops_by_part": self.ledger.flops_by_part,
            "flops_executed": self.executed,
            "seconds": round(self.seconds, 3),
            "compile_seconds": round(self.compile_seconds, 3),
            **({} if self.virtual_seconds is None else {VIRTUAL: self.virtual_seconds}),
            "peak_memory_bytes": self.peak_memory_bytes,
            "result_dir": self.result_dir,
        }

    def to_json(self) -> str:
        """Return `to_dict` as one line of JSON."""
        return json.dumps(self.to_dict())

    def to_dataframe(self) -> "pd.DataFrame":
        """Return the table of rounds as a pandas DataFrame.

        Raises:
            SilographError: pandas is not installed.
        """
        return frame_of(self.rounds, "result.rounds")

    def report(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Write the page of this run and return its path.

        Args:
            path: the page's file; None is report.html in the result folder, which is there anyway.

        Raises:
            ConfigError: the run has no result folder (`out`), or `path` holds something else.
        """
        if self.result_dir is None:
            raise ConfigError(
                "expected a run with a result folder for report(), got one without: give out=DIR "
                "to sg.run"
            )
        return write_report(self.result_dir, path)

    def summary(self, width: int | None = None) -> str:
        """Return what the command line prints: scores by view, costs, and what picked the round.

        Args:
            width: columns of text; None: those of the terminal, 80 where there is none.
        """
        file = io.StringIO()
        self.print_to(console_to(file, width))
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines())

    def print_to(self, console: Console) -> None:
        """Print the scores by view, what the run cost, and what picked the round."""
        title, columns, rows = self._table()
        print_fitted(console, columns, rows, title)
        console.print()
        for line in self._views():
            console.print(line, style="dim")
        for line in self._lines():
            console.print(line)
        if self.result_dir is not None:
            console.print(f"written to {self.result_dir}", soft_wrap=True)
            if self.models:
                own = f"models of {counted(len(self.models), 'client')}"
                console.print(f"{own}: {Path(self.result_dir) / MODELS}", soft_wrap=True)

    def _table(self) -> tuple[str, list[str], list[list[str]]]:
        """Return title, columns and rows of the scores."""
        config, names = self.config, self.reported
        found = {view: getattr(self.test, view) for view in VIEWS}
        scored = {view: scores for view, scores in found.items() if scores is not None}
        found = scored or {self.method.evaluate.view: None}
        if self.baseline is not None:
            first = {self.constant: self.baseline, **self.untrained}
            found = {**first, **found} if self.untrained else {**found, **first}
        rows = [
            [view, *(METRICS[name].text(scores and scores.get(name)) for name in names)]
            for view, scores in found.items()
        ]
        drawn = "" if config.neighbors in ("full", "fanout") else f" with {config.neighbors}"
        clients = f"{counted(config.clients, 'client')} ({config.partition})"
        about = f"{self.method.name}{drawn}, {clients}"
        columns = ["test", *(METRICS[name].title for name in names)]
        return f"{Path(config.dataset).stem}, {about}", columns, rows

    def _views(self) -> list[str]:
        """Return what each view means."""
        means = means_of([seen_by(self.method, self.config)])
        views = (view for view in VIEWS if getattr(self.test, view) is not None)
        return [f"{view}: {means[view]}" for view in views]

    def _lines(self) -> Iterator[str]:
        """Yield what stands below the table: costs, and what picked the round."""
        if away := self.judged_without:
            yield f"judged without the nodes of {', '.join(away)}: away in that round"
        if self.cut is None or self.config.evaluation_min_count > 1:
            for view, numbers in self._scored_by_few().items():
                auc = f", the AUC over {numbers['auc']}" if "auc" in numbers else ""
                few = f"{numbers['nodes']} of {self.config.clients} clients"
                yield f"{view}: test scores are over {few}{auc}"
        yield from (f"{name} was {reason}" for name, reason in self.left_out.items())
        kinds = self.ledger.bytes_by_kind
        parts = ", ".join(f"{name} {size_text(size)}" for name, size in kinds.items())
        yield f"bytes: {size_text(self.bytes)} ({parts})"
        yield self._work()
        if self.virtual_seconds is not None:
            shown = f"speeds {self.config.speeds}, links {self.config.links}"
            yield f"virtual time: {self.virtual_seconds:,.1f} s ({shown})"
        if self.local_bias is not None:
            mean = "mean distance of logits to a centralized model's"
            yield f"local bias: {self.local_bias:.4g}, {mean}"
        if self.held is not None:
            yield f"held by the server: features, labels and edges of {self.held:.0%} of the nodes"
        if self.cut is not None and (leaks := self.cut.test_leaks):
            tests = int(self.cut.copies_split.test.sum())
            where = "copies of test nodes train at another client, so test scores are too high"
            yield f"leaks: {leaks:,} of {tests:,} {where}"
        yield f"stopped: {self.stopped}"
        unread = self._missing_validation()
        how = "by validation" if unread is None else f"the last one: {unread}"
        yield (
            f"best round {self.best_round} of {self.config.rounds} ({how}), "
            f"{self.seconds:.1f} s{self._compiled()}, "
            f"peak memory {size_text(self.peak_memory_bytes)}"
        )
        limits = {"patience": self.config.patience, "target": self.config.target}
        asked = " and ".join(name for name, value in limits.items() if value is not None)
        if unread is not None and asked:
            yield f"{asked} could not stop the run: there were no validation scores to read"
        if self.advice is not None:
            yield f"note: {self.advice}"

    def _missing_validation(self) -> str | None:
        """Return why no validation score picked the round; None where one did."""
        if getattr(self.val, self.method.evaluate.view) is not None:
            return None
        if self.cut is not None and not bool(self.cut.copies_split.val.any()):
            return "no validation nodes"
        return "no client sent validation counts"

    def _scored_by_few(self) -> dict[str, dict[str, int]]:
        """Return `scored_clients` of the views in which some clients have no part."""
        number = self.config.clients
        return {
            view: dict(scored)
            for view, scored in self.scored_clients.items()
            if min(scored.values()) < number
        }

    def _work(self) -> str:
        """Return what clients by themselves compute, by part, and what was executed here."""
        parts = ", ".join(
            f"{n} {decimals(f / 1e9, 2)}" for n, f in self.ledger.flops_by_part.items()
        )
        line = f"work: {decimals(self.flops / 1e9, 2)} GFLOP at the clients ({parts})"
        if self.executed is None:
            return line
        return f"{line}; executed here: {decimals(self.executed / 1e9, 2)}"

    def _compiled(self) -> str:
        """Return how much time went into compiling besides, nothing where none did."""
        spent = self.compile_seconds
        return f" (and {spent:.1f} s to compile kernels, once)" if spent >= 0.05 else ""


def named_untrained(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the key of what predicts without training, none for tasks that have nothing."""
    return {"untrained": dict(found)} if found else {}
