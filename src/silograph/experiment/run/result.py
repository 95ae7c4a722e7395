"""The result of a run: scores by view, the table of rounds, the model, config and costs."""

import json
import math
import os
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch import Tensor

from silograph.aggregation.aggregators import MEAN
from silograph.core.errors import ConfigError, lookup
from silograph.core.key import Key
from silograph.core.payload import ranges
from silograph.core.resolved_config import ResolvedConfig, training_key
from silograph.core.text import count_of, decimals, html_lines, html_table, state_of_fields
from silograph.evaluation.evaluate import counts_of
from silograph.evaluation.views import means_of
from silograph.exchange.collect import collect, local_graph
from silograph.experiment.report import write_report
from silograph.experiment.report.reading import WITHHELD, scores_are_withheld, size_text
from silograph.experiment.resolve.data import Cut, clients_block
from silograph.experiment.resolve.privacy import privacy_of, spare_releases
from silograph.experiment.resolve.resolve import DTYPES
from silograph.experiment.resolve.user_code import absolute, import_spec, names_file
from silograph.experiment.result_files import ALL_BIASES, FACT, MODELS, VIRTUAL, Row, frame_of
from silograph.experiment.run.round_scores import (
    JudgedRound,
    baseline_scores,
    check_loss,
    chosen_threshold,
    count_scored_clients,
    metrics_of,
    run_metric,
    scores_by_class,
    scores_by_client,
    scores_of_best_by_client,
    scores_of_decisions,
    scores_of_threshold,
    task_in,
    uncut_counts,
    uncut_rows,
    views_of,
)
from silograph.experiment.run.selecting import make_run_control
from silograph.experiment.run.setup import Setup, first_weights
from silograph.experiment.run.snapshot import CONTROLLER, DISTANCES, STATISTICS, Snapshot, part_of
from silograph.experiment.run.trained_model import Preprocessing, TrainedModel
from silograph.experiment.terminal_table import (
    advice_of,
    better_personalized_text,
    better_untrained,
    better_untrained_text,
    print_number_table,
    printed_text,
)
from silograph.federation.in_process import InProcess
from silograph.federation.ledger import Ledger
from silograph.federation.privacy.release import shares_of
from silograph.federation.privacy.updates import spent_facts
from silograph.graph.block.block import make_block, whole
from silograph.graph.column_statistics import EDGE_WEIGHTS, FEATURES, ColumnStatistics
from silograph.graph.graph import pairs_among
from silograph.graph.heterogeneity import count_shared
from silograph.graph.partition.split import time_column
from silograph.methods.base import AnyMethod, Method, NoOptions, client_weights, seen_by
from silograph.methods.fedavg import CENTRALIZED
from silograph.nn.conv import Params
from silograph.nn.model_options import RatingBiasesOptions
from silograph.nn.rating_factors import solved_biases
from silograph.task.base import ClientValues
from silograph.task.counts import JudgedRows, confusion
from silograph.task.decision_scores import DecisionScores
from silograph.task.metric_table import METRICS, Metric, reported
from silograph.task.registry import task_of
from silograph.task.scores import ClassScores, Scores, Views
from silograph.task.threshold import Threshold, ThresholdScores, threshold_line

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
        decisions: average precision, calibration and the like, of test nodes at the best round, in
            the view that picks the round; None where the task has no classes, or no client has
            sent a histogram of scores.
        threshold: from which probability on a node is taken for the positive class, and what that
            does; None where the run asks for none, or it could not be chosen.
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
        feature_drift: distance of each client's features to those of all others, (C,) float64 by
            feature, the largest first, NaN where nobody knows it; empty unless the config has
            `feature_drift`.
        local_bias: mean distance of logits to those of a centralized model from the same initial
            weights after as many epochs; None unless the config has `local_bias`.
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
    decisions: DecisionScores | None
    threshold: ThresholdScores | None
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
    feature_drift: Mapping[str, Tensor]
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
            state = state | {"method": import_spec(state["method"], Method)}
        self.__dict__.update(state)

    def __repr__(self) -> str:
        """Return what the command line prints; the fields hold thousands of numbers."""
        return self.summary()

    def _repr_html_(self) -> str:
        title, columns, rows = self._table()
        head = html_lines([title]) if self._is_withheld else html_table(title, columns, rows)
        return head + html_lines([*self._views(), *self._lines()])

    @property
    def bytes(self) -> int:
        """Bytes of all messages, both directions, evaluation included."""
        return self.ledger.bytes

    @property
    def flops(self) -> float:
        """Floating-point operations of all clients."""
        return self.ledger.flops

    @property
    def privacy(self) -> dict[str, Any] | None:
        """What the run has cost at most by differential privacy; None without it.

        Spare releases count in full: only the silos know which rounds were released twice.
        """
        privacy = privacy_of(self.config)
        if privacy is None:
            return None
        rounds = max((record.round for record in self.ledger.records), default=0)
        releases = rounds + spare_releases(self.config) if rounds else 0
        return spent_facts(privacy, {privacy.noise_multiplier: releases})

    @property
    def metric(self) -> Metric:
        """The metric that picked the best round."""
        return METRICS[self.config.metric]

    @property
    def better_untrained(self) -> list[str]:
        """What is better than the model although it needs no training, by the run's metric.

        Names of constant predictions, of `untrained` and of the baseline. Biases of all silos'
        ratings together do not count, as no silo has them.
        """
        scores = getattr(self.test, self.method.evaluate.view)
        return better_untrained(self.metric, scores, self._untrained_at_silos)

    @property
    def _untrained_at_silos(self) -> dict[str, Scores]:
        baseline = {} if self.baseline is None else {self.constant: self.baseline}
        return baseline | {n: s for n, s in self.untrained.items() if n != ALL_BIASES}

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
        models_by_client: Mapping[str, TrainedModel | None] = self.models or dict.fromkeys(
            ids, self.model
        )
        model = lookup(models_by_client, client, "client")
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
            **untrained_entry({n: reported_scores(s) for n, s in self.untrained.items()}),
            "better_untrained": self.better_untrained,
            "by_class": [{"class": name, **vars(s)} for name, s in self.class_scores.items()],
            **({} if self.decisions is None else {"decisions": self.decisions.to_dict()}),
            **({} if self.threshold is None else {"threshold": self.threshold.to_dict()}),
            "confusion": None if self.confusion is None else self.confusion.tolist(),
            "local_bias": self.local_bias,
            **({} if self.privacy is None else {"privacy": self.privacy}),
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
        return write_report(self.result_dir, path).path

    def summary(self, width: int | None = None) -> str:
        """Return what the command line prints: scores by view, costs, and what picked the round.

        Args:
            width: columns of text; None: those of the terminal, 80 where there is none.
        """
        return printed_text(self.print_to, width)

    def print_to(self, console: Console) -> None:
        """Print the scores by view, what the run cost, and what picked the round."""
        title, columns, rows = self._table()
        if self._is_withheld:
            console.print(title)
        else:
            print_number_table(console, columns, rows, title)
            console.print()
        for line in self._views():
            console.print(line, style="dim")
        for line in self._lines():
            console.print(line)
        if self.result_dir is not None:
            console.print(f"written to {self.result_dir}", soft_wrap=True)
            if self.models:
                own = f"models of {count_of(len(self.models), 'client')}"
                console.print(f"{own}: {Path(self.result_dir) / MODELS}", soft_wrap=True)

    @property
    def _is_withheld(self) -> bool:
        """See `scores_are_withheld`."""
        return scores_are_withheld(self.config.dp_epsilon, is_simulation=self.cut is not None)

    def _table(self) -> tuple[str, list[str], list[list[str]]]:
        """Return title, columns and rows of the scores."""
        config, names = self.config, self.reported
        scores_by_view = {view: getattr(self.test, view) for view in VIEWS}
        existing_views = {
            view: scores for view, scores in scores_by_view.items() if scores is not None
        }
        scores_by_view = existing_views or {self.method.evaluate.view: None}
        if self.baseline is not None:
            untrained_scores = {self.constant: self.baseline, **self.untrained}
            scores_by_view = (
                {**untrained_scores, **scores_by_view}
                if self.untrained
                else {**scores_by_view, **untrained_scores}
            )
        rows = [
            [view, *(METRICS[name].text(scores and scores.get(name)) for name in names)]
            for view, scores in scores_by_view.items()
        ]
        sampler_note = "" if config.neighbors in ("full", "fanout") else f" with {config.neighbors}"
        clients = f"{count_of(config.clients, 'client')} ({config.partition})"
        description = f"{self.method.name}{sampler_note}, {clients}"
        columns = ["test", *(METRICS[name].title for name in names)]
        return f"{Path(config.dataset).stem}, {description}", columns, rows

    def _views(self) -> list[str]:
        """Return what each view means."""
        means = means_of([seen_by(self.method, self.config)])
        views = (view for view in VIEWS if getattr(self.test, view) is not None)
        return [f"{view}: {means[view]}" for view in views]

    def _lines(self) -> Iterator[str]:
        """Yield what stands below the table: costs, and what picked the round."""
        if away := self.judged_without:
            yield f"judged without the nodes of {', '.join(away)}: away in that round"
        if self._is_withheld:
            yield WITHHELD
        elif self.cut is None or self.config.evaluation_min_count > 1:
            for view, numbers in self._scored_by_few().items():
                auc = f", the AUC over {numbers['auc']}" if "auc" in numbers else ""
                client_counts = f"{numbers['nodes']} of {self.config.clients} clients"
                yield f"{view}: test scores are over {client_counts}{auc}"
            yield from self._missing_scores()
        yield from (f"{name} was {reason}" for name, reason in self.left_out.items())
        kinds = self.ledger.bytes_by_kind
        parts = ", ".join(f"{name} {size_text(size)}" for name, size in kinds.items())
        yield f"bytes: {size_text(self.bytes)} ({parts})"
        if not self._is_withheld:
            yield self._work()
        if self.virtual_seconds is not None:
            clock_settings = f"speeds {self.config.speeds}, links {self.config.links}"
            yield f"virtual time: {self.virtual_seconds:,.1f} s ({clock_settings})"
        if self.local_bias is not None:
            distance_note = "mean distance of logits to a centralized model's"
            yield f"local bias: {self.local_bias:.4g}, {distance_note}"
        yield from self._privacy_lines()
        if self.held is not None:
            yield f"held by the server: features, labels and edges of {self.held:.0%} of the nodes"
        if self.cut is not None and (leaks := self.cut.test_leaks):
            tests = int(self.cut.copies_split.test.sum())
            leak_note = "copies of test nodes train at another client, so test scores are too high"
            yield f"leaks: {leaks:,} of {tests:,} {leak_note}"
        if self.cut is not None and (
            shared := count_shared(self.cut.graph, self.cut.partition.copies)
        ):
            users, items = shared["shared_users"], shared["shared_items"]
            counts = f"{count_of(users, 'user')} and {count_of(items, 'item')}"
            yield f"shared: {counts} are in two clients or more"
        yield f"stopped: {self.stopped}"
        why_no_validation = self._missing_validation()
        chosen_by = (
            "by validation" if why_no_validation is None else f"the last one: {why_no_validation}"
        )
        yield (
            f"best round {self.best_round} of {self.config.rounds} ({chosen_by}), "
            f"{self.seconds:.1f} s{self._compiled()}, "
            f"peak memory {size_text(self.peak_memory_bytes)}"
        )
        limits = {"patience": self.config.patience, "target": self.config.target}
        unused_limits = " and ".join(name for name, value in limits.items() if value is not None)
        if why_no_validation is not None and unused_limits:
            yield f"{unused_limits} could not stop the run: there were no validation scores to read"
        if self.config.threshold is not None:
            yield threshold_line(self.config.threshold, self.threshold)
        yield from self._notes()

    def _notes(self) -> Iterator[str]:
        """Yield what to change, or to compare with."""
        if self.advice is not None:
            yield f"note: {self.advice}"
        if (noise := self._noise_note()) is not None:
            yield f"note: {noise}"
        view = self.method.evaluate.view
        worse = better_untrained_text(
            self.metric, view, getattr(self.test, view), self._untrained_at_silos
        )
        better = None
        if self.config.dp_epsilon is None:  # few methods for own models could be used instead
            better = better_personalized_text(
                self.metric, view, self.test.server, self.test.personalized
            )
        for note in (worse, better):
            if note is not None:
                yield f"note: {note}"

    def _noise_note(self) -> str | None:
        """Return what to do where the noise of a round is longer than what silos can send in it."""
        privacy = privacy_of(self.config)
        if privacy is None or self.model is None or not self.rounds:
            return None
        silos = int(self.rounds[-1]["participants"] or 1)
        num_weights = sum(w.numel() for w in self.model.weights.values())
        shares = shares_of(silos, secure=self.config.secure_aggregation)
        # In units of the clip: the noise of the sum, and the longest sum of all silos.
        noise = privacy.noise_multiplier * privacy.sensitivity
        noise *= math.sqrt(silos / shares * num_weights)
        longest = float(silos)
        if privacy.unit == "node":
            if self.cut is None:  # the numbers of training nodes stay with the silos
                return None
            longest = float(self.cut.copies_split.train.sum())
        if noise <= longest:
            return None
        more = (
            "more silos" if privacy.unit == "silo" else "more training nodes, a smaller dp_degree"
        )
        return (
            f"the noise of a round is about {noise / longest:,.1f} times as long as all "
            f"{'updates' if privacy.unit == 'silo' else 'gradients'} together can be: use fewer "
            f"weights (layers, hidden), fewer rounds, {more} or a larger dp_epsilon, and compare "
            "with --method local"
        )

    def _privacy_lines(self) -> Iterator[str]:
        """Yield what differential privacy has cost, and what is outside its guarantee."""
        spent = self.privacy
        if spent is None:
            return
        releases = count_of(spent["releases"], "release")
        spare = spare_releases(self.config)
        releases += f", {spare} of them spare, for rounds that must be repeated" if spare else ""
        yield (
            f"differential privacy of a {spent['unit']}: epsilon {spent['epsilon']:.4g} at delta "
            f"{spent['delta']:g} of {releases} (noise multiplier {spent['noise_multiplier']:.4g})"
        )
        if self.cut is not None:
            yield "scores are measured outside this guarantee, and the noise follows from the seed"

    def _missing_validation(self) -> str | None:
        """Return why no validation score picked the round; None where one did."""
        if self.config.dp_epsilon is not None:
            return "differential privacy"
        if getattr(self.val, self.method.evaluate.view) is not None:
            return None
        if self.cut is not None and not bool(self.cut.copies_split.val.any()):
            return "no validation nodes"
        return "no client sent validation counts"

    def _missing_scores(self) -> list[str]:
        """Return why test scores are missing, in a line, if a least count is the reason."""
        scores, least = (
            getattr(self.test, self.method.evaluate.view),
            self.config.evaluation_min_count,
        )
        if scores is None or least < 2 or None not in scores.values():
            return []
        return [
            f"scores are missing: clients report no count of fewer than {least} nodes (more test "
            "nodes, or --evaluation-min-count, change that)"
        ]

    def _scored_by_few(self) -> dict[str, dict[str, int]]:
        """Return `scored_clients` of the views in which some clients have no part."""
        num_clients = self.config.clients
        return {
            view: dict(scored)
            for view, scored in self.scored_clients.items()
            if min(scored.values()) < num_clients
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
        seconds = self.compile_seconds
        return f" (and {seconds:.1f} s to compile kernels, once)" if seconds >= 0.05 else ""


def untrained_entry(scores_by_name: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry `untrained` of the result, or nothing for tasks without such scores."""
    return {"untrained": dict(scores_by_name)} if scores_by_name else {}


# --- local bias ----------------------------------------------------------------------------------
# Local bias: how far a federation's model is from the one that centralized training gives.
#
# Zhang, Luo, Feng, Liu, Zhou and Zheng, "Tackling the local bias in federated graph learning",
# 2021, sections 3.1 and 4.2: the mean Euclidean distance between the logits of the two, both from
# the same initial weights and after as many epochs. It needs the uncut graph: simulation only.


PROGRESS_LINES = 5  # about the centralized model


def local_bias(
    setup: Setup, first: Params, last: Params, rounds: int, key: Key, report: Callable[[str], None]
) -> float:
    """Return the mean distance of logits to those of a model that is trained centrally here.

    Both models are those of the last round. Each node is seen as in the `server` view. The
    centralized model has the run's optimizer, which it keeps, its schedule and its draws.

    Args:
        setup: the run.
        first: weights before the first round.
        last: the server's weights after the last one.
        rounds: rounds that were trained.
        key: the key of training.
        report: called with the progress of the centralized model.
    """
    cut, cfg, device = setup.cut, setup.method_config, setup.device
    dtype = DTYPES[setup.config.dtype]
    block, route = clients_block(cut, dtype)
    uncut, no_route = make_block(cut.graph, whole(cut.graph), cut.split, dtype)
    if not setup.method.setting.uncut:  # a node draws as it does at its client
        row_key = uncut.row_key.clone()
        row_key[cut.partition.copies] = block.row_key
        uncut = replace(uncut, row_key=row_key)
    uncut = uncut.to(device, dtype)
    central = replace(
        cfg,
        keep_optimizer=True,
        participation=1.0,
        options=NoOptions(),
        corrections=(),
        losses=(),
        aggregator=MEAN,
    )
    fed = InProcess(central, uncut, no_route, 1)
    state = CENTRALIZED.init(fed, central, first, key)
    for t in range(1, rounds + 1):
        fed.start_round(t)
        state, _ = CENTRALIZED.round(fed, central.in_round(t), state, t, key)
        if t % -(-rounds // PROGRESS_LINES) == 0:
            report(f"centralized model for local bias, round {t}/{rounds}")
    assert state.weights is not None  # the method has a server
    reference = cfg.backend.predict(cfg.model, state.weights, uncut)[cut.partition.copies]
    if setup.method.evaluate.all_silos or setup.method.setting.uncut:
        federated_logits = cfg.backend.predict(cfg.model, last, uncut)[cut.partition.copies]
    else:
        graph = block.to(device, dtype)
        if setup.config.collect:
            clients = InProcess(cfg, graph, route, graph.num_clients)
            collect(clients, setup.config.collect, key.fold("collect"))
            graph = local_graph(graph, clients.states()[0])
        # The clients' own nodes, without those that were fetched.
        own_rows = ranges(graph.off[:-1], block.off.diff().to(graph.off.device))
        federated_logits = cfg.backend.predict(cfg.model, last, graph)[own_rows]
    return float((federated_logits - reference).double().norm(dim=1).mean())


# --- untrained -----------------------------------------------------------------------------------
# What predicts ratings without any training: scores that every other score is read beside.
#
# Biases are those of `silograph.nn.rating_factors` with its default damping. The experiment works
# them out, as it knows all ratings; silos of their own tell theirs to nobody.
#
# p: ratings. R: ratings that train.


TURNS = 60  # iterations for the biases: the remaining error is far below the noise


def untrained_scores(setup: Setup) -> dict[str, Scores]:
    """Return test scores by name: silo mean, silo biases (in each silo) and all biases (of all).

    Nothing for other tasks, where silos hold the data, and without test ratings.
    """
    if setup.schema.task != "rating" or setup.simulated is None:
        return {}
    graph, split = setup.cut.graph, setup.cut.split
    assert isinstance(graph.x, Tensor)  # a rating graph says what its nodes are
    pairs, owner = pairs_among(graph.x, graph.adj), setup.cut.partition.owner
    is_held = owner[pairs.row] >= 0
    row, user, item = (t[is_held] for t in (pairs.row, pairs.user, pairs.item))
    value, silo, train = graph.y[row].double(), owner[row], split.train[row]
    test = split.test[row]
    if not bool(test.any()) or not bool(train.any()):
        return {}
    size, clients = graph.num_nodes, len(setup.cut.partition.ids)
    single_group = torch.zeros_like(silo)
    scores_by_name = {}
    for name, group, damping in (
        ("silo mean", silo, None),
        ("silo biases", silo, RatingBiasesOptions().damping),
        (ALL_BIASES, single_group, RatingBiasesOptions().damping),
    ):
        ends = torch.stack([group * size + user, group * size + item])
        predictions, is_seen = _predict_ratings(value, group, ends, train, damping)
        rows = JudgedRows(
            predictions[test][:, None],
            graph.y[row[test]],
            torch.zeros_like(row[test], dtype=torch.bool),
            silo[test],
            clients,
            "rating",
            seen=is_seen[test],
        )
        scores = task_of("rating").scores(counts_of(rows), "test")
        assert scores is not None  # there are test ratings
        scores_by_name[name] = scores
    return scores_by_name


def _predict_ratings(
    value: Tensor, group: Tensor, ends: Tensor, train: Tensor, damping: float | None
) -> tuple[Tensor, Tensor]:
    """Return predictions (p,) float64, and which user and item train in the group, (p,) bool.

    Args:
        value: (p,) float64 ratings.
        group: (p,) int64 whose mean and biases a rating is predicted by.
        ends: (2, p) int64 user and item, each apart in every group.
        train: (p,) bool.
        damping: of biases; None: means alone.
    """
    names, name_index = torch.unique(ends, return_inverse=True)
    num_ratings = torch.bincount(group[train], minlength=int(group.max()) + 1)
    total = torch.zeros(len(num_ratings), dtype=torch.float64).index_add(
        0, group[train], value[train]
    )
    mean = (total / num_ratings.clamp(min=1))[group]
    is_trained = torch.zeros(len(names), dtype=torch.bool)
    is_trained[name_index[:, train]] = True
    is_seen = is_trained[name_index].all(dim=0)
    if damping is None:
        return mean, is_seen
    user, item = name_index
    residual = (value - mean)[train]
    bias = solved_biases(user[train], item[train], residual, len(names), damping, TURNS)
    return mean + bias[user] + bias[item], is_seen


# --- make result ---------------------------------------------------------------------------------
# From the last snapshot of a run to its result: the best round in every view, models and costs.


def make_result(
    setup: Setup,
    snapshot: Snapshot,
    rows: Sequence[Row],
    path: str | None,
    handed_over_bytes: int,
    report: Callable[[str], None],
    compile_seconds: float = 0.0,
) -> Result:
    """Return the result of a run that is over.

    Args:
        setup: the run.
        snapshot: after its last round.
        rows: the table of rounds.
        path: the result folder, or None.
        handed_over_bytes: what it took to give the clients the model.
        report: called with a line before slow steps.
        compile_seconds: that this process has spent on compiling kernels.

    Raises:
        TrainingError: the loss of the best model on the uncut graph is not finite.
    """
    best, config = snapshot.best, setup.config
    assert best is not None  # a run ends after a judged round
    rows_of_all = uncut_view_counts = None
    has_tables = bool(setup.method_config.model.table_widths)  # of all clients nobody has them
    if best.weights is not None and setup.simulated is not None and not has_tables:
        rows_of_all = uncut_rows(setup, best.weights)
        uncut_view_counts = uncut_counts(setup, rows_of_all)
    val, test = views_of(setup, best, uncut_view_counts)
    check_loss([val.uncut], "val", best.round)
    check_loss([test.uncut], "test", best.round)
    task, statistics = task_in(setup), common_statistics(setup, snapshot)
    mean = mean_edge_weight(setup, snapshot)
    threshold = chosen_threshold(setup, best)
    return Result(
        config=replace(config, out=path),
        method=setup.method,
        held=setup.method.setting.held(setup.method_config.options),
        test=test,
        val=val,
        each_best=scores_of_best_by_client(setup, snapshot.each),
        baseline=baseline_scores(setup, best),
        untrained=untrained_scores(setup),
        constant=task.constant,
        metrics=metrics_of(setup),
        client_scores=scores_by_client(setup, best, uncut_view_counts),
        class_scores=scores_by_class(setup, best),
        decisions=scores_of_decisions(setup, best),
        threshold=scores_of_threshold(setup, best, threshold),
        confusion=None if rows_of_all is None else confusion(rows_of_all),
        client_facts=snapshot.client_facts,
        judged_without=best.away,
        # A sum over silos does not say of how many it is.
        scored_clients={} if config.secure_aggregation else count_scored_clients(best),
        left_out=setup.federation.left_out,
        best_round=best.round,
        rounds=tuple(rows),
        stopped=snapshot.stopped or f"all {count_of(config.rounds, 'round')}",
        advice=_advice(setup, best, rows, snapshot),
        model=None
        if best.weights is None
        else _model(setup, best.weights, statistics, mean, threshold),
        models=_own_models(setup, best, statistics, mean, threshold),
        feature_drift=_feature_drift(setup, snapshot),
        local_bias=_local_bias(setup, snapshot, report),
        ledger=setup.federation.ledger,
        executed=snapshot.executed,
        handed_over_bytes=handed_over_bytes,
        partition_hash=setup.partition_hash,
        cut=setup.simulated,
        seconds=snapshot.seconds,
        compile_seconds=compile_seconds,
        virtual_seconds=snapshot.virtual_seconds,
        peak_memory_bytes=peak_memory_bytes(),
        result_dir=path,
    )


def _advice(setup: Setup, best: JudgedRound, rows: Sequence[Row], snapshot: Snapshot) -> str | None:
    """Return whether the number of rounds was too small or too large, None if neither."""
    by_scores = None
    # With differential privacy more rounds need more noise, and scores choose no round.
    if setup.config.dp_epsilon is None:
        by_scores = advice_of(
            rows,
            setup.method.evaluate.view,
            run_metric(setup),
            best.round,
            rounds=setup.config.rounds,
            patience=setup.config.patience,
        )
    run_control, controller_note = make_run_control(setup), None
    if run_control is not None:
        controller, memory = run_control.controller, part_of(snapshot.state, CONTROLLER)
        controller_note = controller.note(controller.options, memory, snapshot.round)
    deviation = setup.method.deviation(setup.method_config.options)
    lines = deviation, controller_note, *_notes_on_facts(setup, rows), by_scores
    return "; ".join(line for line in lines if line is not None) or None


def _notes_on_facts(setup: Setup, rows: Sequence[Row]) -> tuple[str | None, str | None]:
    """Return what the method and the neighbor sampler say of the facts, None for nothing."""
    names = [name for name in rows[-1] if name.startswith(FACT)]
    facts = {
        name.removeprefix(FACT): [float(v) for row in rows if (v := row[name]) is not None]
        for name in names
    }
    method, cfg = setup.method, setup.method_config
    method_note = None if method.note is None else method.note(cfg.options, facts)
    return method_note, cfg.schedule.neighbors.note(facts)


def _model(
    setup: Setup,
    weights: Params,
    statistics: ColumnStatistics | None,
    mean: float | None,
    threshold: Threshold | None,
) -> TrainedModel:
    """Return weights as a model, with how data were prepared for it."""
    config = setup.config
    preprocessing = Preprocessing(
        config.features,
        config.normalize,
        setup.feature_names,
        config.edge_weights,
        statistics,
        mean,
        config.repeated_edges,
        time_column(config.split),
    )
    shape, names = setup.method_config.model, setup.schema.class_names
    return TrainedModel(shape, weights, names, preprocessing, threshold)


def common_statistics(setup: Setup, snapshot: Snapshot) -> ColumnStatistics | None:
    """Return the (F,) statistics of features that all clients have in common, None without."""
    statistics = part_of(snapshot.state, STATISTICS)
    if f"{FEATURES}/mean" in statistics:
        return ColumnStatistics(statistics[f"{FEATURES}/mean"], statistics[f"{FEATURES}/deviation"])
    cut = setup.simulated
    if cut is None or cut.statistics is None or cut.statistics.mean.dim() > 1:
        return None
    return cut.statistics


def mean_edge_weight(setup: Setup, snapshot: Snapshot) -> float | None:
    """Return what divided the weights of edges of all clients, None where nothing did."""
    mean = part_of(snapshot.state, STATISTICS).get(f"{EDGE_WEIGHTS}/mean")
    if mean is not None:
        return float(mean)
    return None if setup.simulated is None else setup.simulated.mean_edge_weight


def _own_models(
    setup: Setup,
    best: JudgedRound,
    common: ColumnStatistics | None,
    mean: float | None,
    threshold: Threshold | None,
) -> dict[str, TrainedModel]:
    """Return the clients' own models of the best round, if they have any.

    Args:
        setup: of the run.
        best: the best round.
        common: statistics of features that all clients have in common; None: none, or each its own.
        mean: of weights of edges.
        threshold: of all clients' models.
    """
    if best.own is None:
        return {}
    shapes, models = setup.method_config.model.weight_shapes, {}
    client_statistics = None if setup.simulated is None else setup.simulated.statistics
    for number, client in enumerate(setup.federation.ids):
        statistics = common
        if common is None and client_statistics is not None:
            statistics = client_statistics.of_client(number)
        weights = client_weights(shapes, best.own, number)
        models[client] = _model(setup, weights, statistics, mean, threshold)
    return models


def _feature_drift(setup: Setup, snapshot: Snapshot) -> dict[str, Tensor]:
    """Return the distances of clients (C,) by feature, the largest first; NaN: not known."""
    distances = part_of(snapshot.state, STATISTICS).get(DISTANCES)
    if distances is None:
        return {}
    columns = torch.where(distances < 0, torch.nan, distances).T
    names = setup.feature_names or [str(number) for number in range(len(columns))]
    order = distances.amax(dim=0).argsort(descending=True, stable=True)
    return {names[number]: columns[number] for number in order.tolist()}


def _local_bias(setup: Setup, snapshot: Snapshot, report: Callable[[str], None]) -> float | None:
    """Return the distance to a centralized model, None without `local_bias` in the config."""
    last_weights = snapshot.state.weights
    if not setup.config.local_bias or last_weights is None:
        return None
    key = training_key(setup.config)
    return local_bias(setup, first_weights(setup), last_weights, snapshot.round, key, report)


def peak_memory_bytes() -> int:
    """Return the peak resident memory of this process in bytes."""
    with suppress(OSError, StopIteration):  # Linux; ru_maxrss begins with the parent's peak
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        peak = next(line for line in lines if line.startswith("VmHWM:"))
        return int(peak.split()[1]) * 1024  # "VmHWM:   123456 kB"
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return own if sys.platform == "darwin" else own * 1024
