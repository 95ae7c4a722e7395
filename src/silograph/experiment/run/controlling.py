"""Control in a run: knobs are set before a round, and the round is observed after it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from silograph.control import Controller, Knob, RunStanding
from silograph.core.errors import ConfigError, TrainingError
from silograph.core.key import Key
from silograph.experiment.run.round_scores import Judged, run_metric
from silograph.experiment.run.server_parts import CONTROLLER, part_of, with_part
from silograph.experiment.run.setup import Setup
from silograph.methods.base import RoundReport, ServerState


@dataclass(frozen=True, eq=False)
class Controlling:
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
        self, state: ServerState, scores: Judged | None, virtual: float | None
    ) -> ServerState:
        """Return the server's first state with that of the controller; `virtual`: see `propose`."""
        found, standing = self.controller, self._standing(0, scores, state, virtual)
        if found.needs_scores and scores is None:
            raise ConfigError(
                f"expected a method that scores the first weights for controller {found.name}, got "
                f"{self.setup.method.name}: it needs Needs(score_first=True)"
            )
        return with_part(state, CONTROLLER, found.init(found.options, self.knobs, standing))

    def propose(
        self, state: ServerState, scores: Judged | None, virtual: float | None, t: int, key: Key
    ) -> Mapping[str, Tensor]:
        """Return the knobs of a round.

        Args:
            state: the server's before the round.
            scores: the last ones, None where they are not kept.
            virtual: seconds of the virtual clock so far, None without one.
            t: number of the round.
            key: of the run.

        Raises:
            TrainingError: the controller has left one out, or set one to what it may not be.
        """
        found, known = self.controller, part_of(state, CONTROLLER)
        standing = self._standing(t - 1, scores, state, virtual)
        values = found.propose(found.options, self.knobs, known, standing, key.fold("control", t))
        who = f"controller {found.name} in round {t}"
        for knob in self.knobs:
            knob.check(values.get(knob.name), standing.clients, who)
        return {knob.name: values[knob.name] for knob in self.knobs}

    def observe(
        self,
        before: ServerState,
        after: ServerState,
        t: int,
        report: RoundReport,
        scores: Judged | None,
        values: Mapping[str, Tensor],
        virtual: float | None,
        seconds: float,
    ) -> ServerState:
        """Return the server's state after a round, with what the controller has learned.

        Args:
            before: the server's state before the round, which has the controller's.
            after: what the round has made of it.
            t: number of the round.
            report: of the round, as the method has returned it.
            scores: the last ones, None where they are not kept.
            values: the knobs of the round.
            virtual: seconds of the virtual clock so far, None without one.
            seconds: that the round took, measured.
        """
        found, known = self.controller, part_of(before, CONTROLLER)
        if found.observe is not None:
            facts = {**report.facts, "seconds": seconds}
            if report.train_loss is not None:
                facts["train_loss"] = report.train_loss
            standing = self._standing(t, scores, after, virtual)
            known = found.observe(found.options, self.knobs, known, standing, facts, values)
        return with_part(after, CONTROLLER, known)

    def _standing(
        self, t: int, scores: Judged | None, state: ServerState, virtual: float | None
    ) -> RunStanding:
        setup, ledger = self.setup, self.setup.federation.ledger
        most, loss, score = setup.config.max_bytes, None, None
        if scores is not None:
            found = scores.val[setup.method.evaluate.view]
            if found is not None:
                loss, score = found.loss, found[run_metric(setup).name]
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
            bytes_left=None if most is None else most - ledger.bytes,
            scored=None if scores is None else scores.round,
            val_loss=loss,
            val_score=score,
            virtual_seconds=virtual,
            weights=state.weights or {},
            rounds_left=setup.config.rounds - t,
        )


def controlling(setup: Setup) -> Controlling | None:
    """Return what sets the knobs of a run, None where its method has none."""
    options, needs = setup.method_config.options, setup.method.needs
    knobs = needs.knobs(options)
    return Controlling(needs.controller(options), knobs, setup) if knobs else None


def with_knobs(report: RoundReport, values: Mapping[str, Tensor]) -> RoundReport:
    """Return the report of a round with the knobs among its facts, those by client as a mean."""
    means = {f"knob_{name}": t.double().mean().item() for name, t in values.items()}
    own = {f"knob_{name}": t.double() for name, t in values.items() if t.dim()}
    assert all(map(math.isfinite, means.values()))  # they are within their ranges
    return replace(
        report, facts={**report.facts, **means}, client_facts={**report.client_facts, **own}
    )
