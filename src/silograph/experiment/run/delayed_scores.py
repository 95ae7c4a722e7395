"""Scores on receipt: what a round was worth is known when the next one has trained.

The clients' own models are scored in their round. The server's model is scored by who receives it
to train in the next round, before it trains, and sent for that to the other clients only. The last
round is scored at once.
"""

from dataclasses import dataclass

from silograph.core.errors import TrainingError
from silograph.core.payload import Stacked, under
from silograph.core.resolved_config import training_key
from silograph.evaluation.evaluate import received_counts
from silograph.evaluation.on_receipt import RECEIVED
from silograph.experiment.result_files import Row
from silograph.experiment.run.divergence import check_loss
from silograph.experiment.run.round_scores import (
    Counts,
    Judged,
    judged,
    own_counts_of,
    row_of,
    scored_by_participants,
    server_columns,
    weights_message,
)
from silograph.experiment.run.setup import Setup
from silograph.methods.base import RoundReport, ServerState
from silograph.nn.conv import Params


@dataclass(frozen=True, eq=False)
class Pending:
    """A round whose server's model is not scored yet.

    Attributes:
        judged: scores of the clients' own models.
        row: of the table of rounds, without scores of the server's model.
    """

    judged: Judged
    row: Row


def begin(
    setup: Setup, t: int, report: RoundReport, seconds: float, virtual: float | None
) -> Pending:
    """Score the clients' own models of a round."""
    own = own_counts_of(setup, t, training_key(setup.config))
    now = judged(setup, t, None, own, None, setup.federation.away)
    _check(now)
    return Pending(now, row_of(setup, now, report, seconds, virtual))


def counts_on_receipt(setup: Setup, t: int, state: ServerState, report: RoundReport) -> Counts:
    """Return all clients' counts of the server's model of round t.

    Args:
        setup: the run.
        t: the round.
        state: the server's after it.
        report: of the next round, in which some clients have scored it.

    Raises:
        TrainingError: the method's clients do not score what they receive.
    """
    fields = {name: Stacked(tensor) for name, tensor in report.trained.items()}
    received = under(RECEIVED, fields)
    if not received:
        raise TrainingError(
            f"expected clients of {setup.method.name} to score the model that they receive, got a "
            "round without such counts: call by local_round and keep its report, or set "
            "Method.scores_on_receipt to False"
        )
    fed, config = setup.federation, setup.config
    answered = zip(fed.ids, report.trained["answered"].tolist(), strict=True)
    others = [name for name, has in answered if not has and name not in fed.away]
    if scored_by_participants(setup):
        others = []
    inbox = weights_message(setup, state, others) if others else {}
    key, ranks = training_key(config).fold("judge server", t), config.relevant is not None
    return received_counts(
        fed, received, others, inbox, key, setup.method_config.count_rules, ranks=ranks
    )


def complete(setup: Setup, pending: Pending, server: Counts, weights: Params) -> tuple[Judged, Row]:
    """Return a round with the scores of the server's model, and its row."""
    half, away = pending.judged, setup.federation.away
    gone = tuple(name for name in setup.federation.ids if name in {*half.away, *away})
    now = judged(setup, half.round, server, half.personalized, weights, gone)
    _check(now)
    return now, pending.row | server_columns(setup, now)


def _check(now: Judged) -> None:
    check_loss(now.val.values(), "val", now.round)
    check_loss(now.test.values(), "test", now.round)
