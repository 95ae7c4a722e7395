"""Scores on receipt: what a round was worth is known when the next one has trained.

The clients' own models are scored in their round. The server's model is scored by who receives it
to train in the next round, before it trains, and sent for that to the other clients only. The last
round is scored at once.
"""

from dataclasses import dataclass

from silograph.core.errors import TrainingError
from silograph.core.payload import Stacked, under
from silograph.core.resolved_config import training_key
from silograph.evaluation.evaluate import own_counts, received_counts
from silograph.evaluation.on_receipt import RECEIVED
from silograph.experiment.result_files import Row
from silograph.experiment.run.divergence import check_loss
from silograph.experiment.run.round_scores import (
    Counts,
    Judged,
    judged,
    row_of,
    server_columns,
)
from silograph.experiment.run.setup import Setup
from silograph.methods.base import RoundReport
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
    fed, key = setup.federation, training_key(setup.config)
    own = own_counts(fed, key.fold("judge own", t))
    now = judged(setup, t, None, own, None, fed.away)
    _check(now)
    return Pending(now, row_of(setup, now, report, seconds, virtual))


def counts_on_receipt(setup: Setup, t: int, weights: Params, report: RoundReport) -> Counts:
    """Return all clients' counts of the server's model of round t.

    Args:
        setup: the run.
        t: the round.
        weights: the server's model after it.
        report: of the next round, in which some clients have scored it.

    Raises:
        TrainingError: the method's clients do not score what they receive.
    """
    fields = {name: Stacked(tensor) for name, tensor in report.trained.items()}
    received = under(RECEIVED, fields)
    if not received:
        raise TrainingError(
            f"expected a method whose clients score what they receive for eval_on_receipt, got "
            f"{setup.method.name}: its round must go through local_round, and its op send what "
            "`told` returns"
        )
    key = training_key(setup.config).fold("judge server", t)
    return received_counts(setup.federation, weights, received, report.trained["answered"], key)


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
