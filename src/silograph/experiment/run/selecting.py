"""Selection in a run: clients are drawn before a round, and the selector observes its result.

The selector's state is part of the server's memory, with the prefix `selector/`, and so of
checkpoints. So is the number of selections so far, with the prefix `selected/`, if it is limited.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from silograph.control import Controller, Knob, RunStanding
from silograph.core.errors import ConfigError, ProtocolError, TrainingError, mistake, reword_error
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.resolved_config import training_key
from silograph.core.text import count_of
from silograph.evaluation.evaluate import sum_histograms
from silograph.evaluation.scoring import RECEIVED, VALIDATION
from silograph.experiment.report.reading import size_text
from silograph.experiment.resolve.resolve import DTYPES
from silograph.experiment.result_files import KNOB
from silograph.experiment.run.clock import Limit, Stop, clock_of
from silograph.experiment.run.round_scores import Counts, JudgedRound, run_metric, scores_of
from silograph.experiment.run.setup import Setup
from silograph.experiment.run.snapshot import CONTROLLER, SELECTED, SELECTOR, part_of, with_part
from silograph.federation.base import at_server, positions_of
from silograph.federation.ledger import Record, records_of_last_round
from silograph.federation.program import AlikeRounds, bytes_of_steps, calls_of
from silograph.methods.base import MethodConfig, RoundReport, ServerState
from silograph.methods.local_training import selected
from silograph.selection.base import RoundFacts, SelectionLimits, Selector, resized
from silograph.task.registry import task_of

REPORTED = {"answered": torch.bool, "nodes": torch.int64, "loss": torch.float64}  # by a round
COUNT = "selections"  # of clients that trained, in all rounds so far, () int64


@dataclass(frozen=True, eq=False)
class Selection:
    """What selects clients in a run.

    Attributes:
        selector: the selector.
        options: its options.
        setup: the run.
    """

    selector: Selector
    options: Any
    setup: Setup

    def begin(self, state: ServerState) -> ServerState:
        """Return the server's first state with that of the selector.

        Raises:
            ConfigError: the limits of the selector cannot be met.
        """
        self._check_feedback()
        with at_server(self.selector.init, f"selector {self.selector.name}", 0):
            memory = self.selector.init(self.setup.federation.ids, self.options)
        state = with_part(state, SELECTOR, memory)
        if self.setup.method_config.selector_has_budget:
            state = with_part(state, SELECTED, {COUNT: torch.tensor(0)})
            self._check_limits(state)
        return state

    def _check_feedback(self) -> None:
        """Raise `ConfigError` where the method does not report what the selector needs."""
        setup, calls = self.setup, self.setup.method.calls
        uses_feedback = (
            self.selector.observe is not None or self.setup.method_config.selector_has_budget
        )
        if uses_feedback and setup.method.evaluate.crosses:
            raise ConfigError(
                f"expected selector uniform, round_robin or all, without limits, for "
                f"{setup.method.name}, which does not report its clients one by one, got selector "
                f"{self.selector.name}",
                **mistake("conflicting-options", ["method", "selector"]),
            )
        if not self.selector.on_receipt or calls is None:
            return
        steps = calls.round(setup.method_config, 1, training_key(setup.config))
        if not any(
            name.startswith(f"{RECEIVED}/") for c in calls_of(steps) for name in c.reply_specs
        ):
            raise ConfigError(
                f"expected a method whose clients score the model that they receive for selector "
                f"{self.selector.name}, got {setup.method.name}: use selector uniform, "
                "round_robin or all",
                **mistake("conflicting-options", ["method", "selector"]),
            )

    def choose(self, state: ServerState, t: int, key: Key) -> MethodConfig:
        """Return what the method's round reads, with the clients that are selected.

        Raises:
            ProtocolError: the selector chose nobody, unknown clients, or changed their order.
        """
        client_ids = self._draw(state, t, key)
        if self.setup.method_config.selector_has_budget:
            num_clients = self._limits(state, t).number(len(client_ids))
            assert num_clients is not None  # else the run had ended: see `reason_to_stop`
            ids = self.setup.federation.ids
            client_ids = resized(client_ids, ids, num_clients, key.fold("select", t, "limits"))
        uses_feedback = self.selector.observe is not None
        cfg = self.setup.method_config
        return replace(
            cfg,
            selected=tuple(client_ids),
            selector_uses_feedback=uses_feedback or cfg.selector_has_budget,
        )

    def _draw(self, state: ServerState, t: int, key: Key) -> list[str]:
        ids = self.setup.federation.ids
        memory = part_of(state, SELECTOR)
        with at_server(self.selector.draw, f"selector {self.selector.name}", t):
            client_ids = self.selector.draw(ids, self.options, memory, t, key.fold("select", t))
        try:
            positions_of(ids, client_ids)
        except ProtocolError as error:
            raise reword_error(
                error, f"selector {self.selector.name} in round {t}: {error}", ProtocolError
            ) from None
        return list(client_ids)

    def reason_to_stop(self, state: ServerState, t: int) -> Stop | None:
        """Return why round t is not started (the budget does not pay for it), or None."""
        if self._budget is None or t > self.setup.config.rounds:
            return None
        limits = self._limits(state, t)
        if limits.most == limits.clients:
            return None  # whomever the selector draws
        num_clients = len(self._draw(state, t, training_key(self.setup.config)))
        if limits.number(num_clients) is not None:
            return None
        num_clients, bytes_left = (
            max(num_clients, self._min_clients),
            self._budget - self._spent_bytes(),
        )
        return Stop(
            Limit.SELECTOR_BUDGET,
            f"a round of {count_of(num_clients, 'client')} takes "
            f"{size_text(num_clients * self._bytes_per_client(t))}, {size_text(bytes_left)} of "
            f"{size_text(self._budget)} are left",
        )

    @property
    def _budget(self) -> int | None:
        budget: int | None = getattr(self.options, "budget", None)
        return budget

    @property
    def _min_clients(self) -> int:
        return getattr(self.options, "least_clients", None) or 1

    @property
    def _min_selections(self) -> int:
        return getattr(self.options, "least_selections", None) or 0

    def _spent_bytes(self) -> int:
        """Return the bytes so far, evaluation apart."""
        ledger = self.setup.federation.ledger
        return ledger.bytes - ledger.bytes_by_kind.get("evaluation", 0)

    def _bytes_per_client(self, t: int) -> int:
        """Return the bytes of a round at one client, evaluation apart; see `_bytes_of_round`."""
        calls = self.setup.method.calls
        alike = calls is not None and isinstance(calls.round, AlikeRounds)
        return self._cached_bytes_of_round(1 if alike else t)

    @cached_property
    def _cached_bytes_of_round(self) -> Callable[[int], int]:
        """Cached `_bytes_of_round`: it is read before a round and again when the round begins."""
        return lru_cache(maxsize=1)(self._bytes_of_round)

    def _bytes_of_round(self, t: int) -> int:
        """Return the bytes of a round at one client, evaluation apart.

        Raises:
            ConfigError: the size is unknown before the round.
        """
        setup, calls = self.setup, self.setup.method.calls
        num_bytes = None
        if calls is not None:
            steps = calls.round(setup.method_config, t, training_key(setup.config))
            num_bytes = bytes_of_steps(steps, DTYPES[setup.config.dtype])
        if num_bytes is None:
            raise ConfigError(
                f"expected a method whose messages are of a known size for selector.budget, got "
                f"{setup.method.name}: leave the budget out, or use max_bytes",
                **mistake("conflicting-options", ["method", "selector.budget"]),
            )
        return num_bytes

    def _limits(self, state: ServerState, t: int) -> SelectionLimits:
        """Return what limits the rounds from t on."""
        affordable = None
        if self._budget is not None:
            affordable = max(0, self._budget - self._spent_bytes()) // self._bytes_per_client(t)
        return SelectionLimits(
            clients=len(self.setup.federation.ids),
            least=self._min_clients,
            affordable=affordable,
            selections_left=self._min_selections - int(state.memory[SELECTED + COUNT]),
            rounds=self.setup.config.rounds - t + 1,
        )

    def _check_limits(self, state: ServerState) -> None:
        """Raise `ConfigError` where the limits cannot be met from round 1 on."""
        limits, name = self._limits(state, 1), self.selector.name
        if limits.least > limits.clients:
            raise ConfigError(
                f"option selector.least_clients: expected at most "
                f"{count_of(limits.clients, 'client')}, got {limits.least}: lower it",
                **mistake("option-value", "selector.least_clients", limits.least),
            )
        cost = "" if self._budget is None else self._describe_budget(limits)
        if limits.affordable is not None and limits.affordable < limits.least:
            raise self._budget_error(limits.least, "a round", cost)
        if not limits.can_be_met:
            raise ConfigError(
                f"option selector.least_selections: expected at most {limits.most_in_all}, which "
                f"{count_of(limits.rounds, 'round')} of {limits.least} to "
                f"{count_of(limits.clients, 'client')} can have, got {limits.selections_left}"
                + (cost and f" with a budget of {cost}")
                + ": lower it",
                **mistake("option-value", "selector.least_selections", limits.selections_left),
            )
        num_clients = len(self._draw(state, 1, training_key(self.setup.config)))
        if limits.number(num_clients) is None:
            raise self._budget_error(num_clients, f"the first round of {name}", cost)

    def _budget_error(self, clients: int, what: str, cost: str) -> ConfigError:
        """Return the error for a budget that does not pay for so many clients."""
        needed = self._spent_bytes() + clients * self._bytes_per_client(1)
        return ConfigError(
            f"option selector.budget: expected at least {needed:,} bytes, which pay for {what}, of "
            f"{count_of(clients, 'client')}, got {cost}: raise it"
        )

    def _describe_budget(self, limits: SelectionLimits) -> str:
        """Return what a client costs and what the budget pays for, in words."""
        assert self._budget is not None  # called only for a selector with a budget
        return (
            f"{size_text(self._budget)}: {size_text(self._spent_bytes())} are spent before round 1 "
            f"and a client takes {size_text(self._bytes_per_client(1))} in a round, so "
            f"{limits.affordable} selections in all"
        )

    def observe(
        self,
        before: ServerState,
        after: ServerState,
        t: int,
        report: RoundReport,
        counts: Counts | None,
    ) -> ServerState:
        """Return the server's state after a round, with what the selector has learned.

        Args:
            before: the server's state before the round, which has the selector's.
            after: the state that the method returned.
            t: number of the round.
            report: of the round.
            counts: of the evaluation, None if there was none.
        """
        memory = part_of(before, SELECTOR)
        if self.selector.observe is not None:
            facts = self._facts(report, counts, t)
            with at_server(self.selector.observe, f"selector {self.selector.name}", t):
                memory = self.selector.observe(self.options, memory, t, facts)
        after = with_part(after, SELECTOR, memory)
        if not self.setup.method_config.selector_has_budget:
            return after
        answered = report.trained.get("answered", torch.zeros(0, dtype=torch.bool))
        num_selections = before.memory[SELECTED + COUNT] + answered.sum()
        return with_part(after, SELECTED, {COUNT: num_selections})

    def _facts(self, report: RoundReport, counts: Counts | None, t: int) -> RoundFacts:
        setup = self.setup
        ids, ledger = setup.federation.ids, setup.federation.ledger
        clients, records = len(ids), records_of_last_round(ledger, t)
        selected = torch.zeros(clients, dtype=torch.bool)
        selected[positions_of(ids, report.participants)] = True
        answered, nodes, loss = (
            torch.zeros(clients, dtype=dtype)
            if (tensor := report.trained.get(name)) is None
            else tensor.to("cpu", dtype)
            for name, dtype in REPORTED.items()
        )
        val_loss = val_accuracy = None
        if counts is not None:
            accuracies = task_of(setup.schema.task).client_scores(counts, "val").get("accuracy")
            if accuracies is not None:  # numbers have none
                values = [float("nan") if value is None else value for value in accuracies]
                val_accuracy = torch.tensor(values, dtype=torch.float64)
            val_loss = (counts["val.loss"] / counts["val.nodes"]).cpu().double()
        received = self._received(report)
        return RoundFacts(
            selected=selected,
            answered=answered,
            nodes=nodes,
            train_loss=loss.masked_fill(nodes <= 0, float("nan")),
            counting=partial(_bytes_by_client, records, clients),
            val_loss=val_loss,
            val_accuracy=val_accuracy,
            received=received,
            scoring=partial(self._score, received),
            higher=run_metric(setup).higher,
            costing=partial(self._cost, records),
            timing=partial(self._seconds, records),
        )

    def _seconds(self, records: Sequence[Record]) -> Tensor | None:
        """Return the virtual seconds (C,) of each client in some records, None without a clock."""
        clock = clock_of(self.setup.config, self.setup.federation.ids)
        return None if clock is None else torch.from_numpy(clock.by_client(records))

    def _received(self, report: RoundReport) -> dict[str, Tensor]:
        """Return the counts of the model that clients received, on the CPU.

        Raises:
            TrainingError: the selector needs them, and the method's clients do not send them.
        """
        if not self.selector.on_receipt:
            return {}
        prefix, validation_prefix = f"{RECEIVED}/", f"{RECEIVED}/{VALIDATION}"
        counts = {n: t for n, t in report.trained.items() if n.startswith(validation_prefix)}
        received = {name.removeprefix(prefix): t.cpu() for name, t in counts.items()}
        if not received:
            raise TrainingError(
                f"expected a method whose clients score what they receive for selector "
                f"{self.selector.name}, got {self.setup.method.name}: average by "
                "Server.average, and let its op reply with LocalModel.of(...)"
            )
        return received

    def _score(self, received: Counts) -> float | None:
        """Return the run's metric of counts of validation nodes, None without any."""
        if not received or not int(received["val.nodes"].sum()):
            return None
        counts = sum_histograms(received, self.setup.method_config.count_rules)
        scores = scores_of(self.setup, counts, "val")
        return None if scores is None else scores[run_metric(self.setup).name]

    def _cost(self, records: Sequence[Record]) -> float:
        """Return the share of a round's records in the budget; see `RoundFacts.cost`."""
        training = [record for record in records if record.what is not Kind.EVALUATION]
        if self._budget is not None:
            return sum(int(record.bytes.sum()) for record in training) / self._budget
        clients = len(self.setup.federation.ids)
        called = np.zeros(clients, dtype=bool)
        for record in training:
            called[record.clients[record.bytes > 0]] = True
        return int(called.sum()) / (clients * self.setup.config.rounds)


def _bytes_by_client(records: Sequence[Record], clients: int) -> Tensor:
    """Return the bytes of each client in some records, (clients,) int64."""
    sizes = np.zeros(clients, dtype=np.int64)
    for record in records:
        sizes[record.clients] += record.bytes
    return torch.from_numpy(sizes)


def check_report(setup: Setup, cfg: MethodConfig, report: RoundReport, t: int, key: Key) -> None:
    """Raise `ProtocolError` where a round trained unselected clients or does not report who.

    Args:
        setup: the run.
        cfg: what the round has read.
        report: of the round.
        t: its number.
        key: the run's.
    """
    method = setup.method
    if report.aggregator != cfg.aggregator.name:
        raise ProtocolError(
            f"expected method {method.name} to use aggregator {cfg.aggregator.name}, got a round "
            "without it: call by Server.average and keep its report, or leave aggregator out"
        )
    if report.train_loss is not None and report.server_optimizer != cfg.server_optimizer:
        raise ProtocolError(
            f"expected method {method.name} to use server optimizer {cfg.server_optimizer}, got a "
            "round without it: return server.step(state, mean, report), or leave "
            "server_optimizer out"
        )
    if not method.selects or (cfg.selected is None and cfg.participation == 1):
        return
    unselected = set(report.participants).difference(selected(setup.federation, cfg, t, key))
    if unselected:
        raise ProtocolError(
            f"expected method {method.name} to train at selected clients only, got "
            f"{min(unselected)} besides in round {t}: give fed.call to=selected(fed, cfg, t, key), "
            "and RoundReport the same clients"
        )
    has_no_scores = cfg.score_on_receipt and not report.trained  # which has an error of its own
    if cfg.selector_uses_feedback and not has_no_scores and "answered" not in report.trained:
        raise ProtocolError(
            f"expected method {method.name} to report who trained, for a selector that learns from "
            f"it or has limits, got RoundReport.trained without 'answered' in round {t}: call by "
            "Server.average and keep its report, or use selector uniform, round_robin or all"
        )


# --- Control in a run: knobs are set before a round, and the round is observed after it ----------


@dataclass(frozen=True, eq=False)
class RunControl:
    """What sets the knobs of a run.

    Attributes:
        controller: the controller.
        knobs: of the run, see `Needs.knobs`.
        setup: the run.
    """

    controller: Controller
    knobs: tuple[Knob, ...]
    setup: Setup

    def begin(
        self, state: ServerState, scores: JudgedRound | None, virtual: float | None
    ) -> ServerState:
        """Return the server's first state with that of the controller; `virtual`: see `propose`."""
        controller, run_standing = self.controller, self._make_standing(0, scores, state, virtual)
        if controller.needs_scores and scores is None:
            raise ConfigError(
                "expected a method that scores the first weights for controller "
                f"{controller.name}, got {self.setup.method.name}: it needs Needs(score_first=True)"
            )
        return with_part(
            state, CONTROLLER, controller.init(controller.options, self.knobs, run_standing)
        )

    def propose(
        self,
        state: ServerState,
        scores: JudgedRound | None,
        virtual: float | None,
        t: int,
        key: Key,
    ) -> Mapping[str, Tensor]:
        """Return the knobs of a round.

        Args:
            state: the server's before the round.
            scores: the last ones, None where the run does not keep them.
            virtual: seconds of the virtual clock so far, None without one.
            t: number of the round.
            key: of the run.

        Raises:
            TrainingError: the controller has left one out, or set one to what it may not be.
        """
        controller, memory = self.controller, part_of(state, CONTROLLER)
        run_standing = self._make_standing(t - 1, scores, state, virtual)
        values = controller.propose(
            controller.options, self.knobs, memory, run_standing, key.fold("control", t)
        )
        description = f"controller {controller.name} in round {t}"
        for knob in self.knobs:
            knob.check(values.get(knob.name), run_standing.clients, description)
        return {knob.name: values[knob.name] for knob in self.knobs}

    def observe(
        self,
        before: ServerState,
        after: ServerState,
        t: int,
        report: RoundReport,
        scores: JudgedRound | None,
        values: Mapping[str, Tensor],
        virtual: float | None,
        seconds: float,
    ) -> ServerState:
        """Return the server's state after a round, with what the controller has learned.

        Args:
            before: the server's state before the round, which has the controller's.
            after: the server's state after the round.
            t: number of the round.
            report: of the round, as the method has returned it.
            scores: the last ones, None where the run does not keep them.
            values: the knobs of the round.
            virtual: seconds of the virtual clock so far, None without one.
            seconds: that the round took, measured.
        """
        controller, memory = self.controller, part_of(before, CONTROLLER)
        if controller.observe is not None:
            facts = {**report.facts, "seconds": seconds}
            if report.train_loss is not None:
                facts["train_loss"] = report.train_loss
            run_standing = self._make_standing(t, scores, after, virtual)
            memory = controller.observe(
                controller.options, self.knobs, memory, run_standing, facts, values
            )
        return with_part(after, CONTROLLER, memory)

    def _make_standing(
        self, t: int, scores: JudgedRound | None, state: ServerState, virtual: float | None
    ) -> RunStanding:
        setup, ledger = self.setup, self.setup.federation.ledger
        max_bytes, loss, score = setup.config.max_bytes, None, None
        if scores is not None:
            val_scores = scores.val[setup.method.evaluate.view]
            if val_scores is not None:
                loss, score = val_scores.loss, val_scores[run_metric(setup).name]
            elif scores.away and self.controller.needs_scores:
                raise TrainingError(
                    f"expected validation scores of round {scores.round} for controller "
                    f"{self.controller.name}, got none: {', '.join(scores.away)} were away, and "
                    "nobody else has validation nodes; resume the run once they are back"
                )
        return RunStanding(
            round=t,
            clients=len(setup.federation.ids),
            bytes=ledger.bytes,
            bytes_left=None if max_bytes is None else max_bytes - ledger.bytes,
            scored=None if scores is None else scores.round,
            val_loss=loss,
            val_score=score,
            virtual_seconds=virtual,
            weights=state.weights or {},
            rounds_left=setup.config.rounds - t,
        )


def make_run_control(setup: Setup) -> RunControl | None:
    """Return what sets the knobs of a run, None where its method has none."""
    options, needs = setup.method_config.options, setup.method.needs
    knobs = needs.knobs(options)
    return RunControl(needs.controller(options), knobs, setup) if knobs else None


def with_knobs(report: RoundReport, values: Mapping[str, Tensor]) -> RoundReport:
    """Return the report of a round with the knobs among its facts, those by client as a mean."""
    means = {f"{KNOB}{name}": t.double().mean().item() for name, t in values.items()}
    client_facts = {f"{KNOB}{name}": t.double() for name, t in values.items() if t.dim()}
    assert all(map(math.isfinite, means.values()))  # they are within their ranges
    return replace(
        report,
        facts={**report.facts, **means},
        client_facts={**report.client_facts, **client_facts},
    )
