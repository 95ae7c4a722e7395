"""The task on ratings: the number that a user gives an item, with squared error.

n: nodes. C: clients. j: judged rows.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.graph.graph import LabelForm, Schema
from silograph.task.base import ClientValues, CountSpec
from silograph.task.counts import JudgedRows
from silograph.task.metric_table import LOSS, metrics_of_labels, own_scores
from silograph.task.ranking import ranking_scores
from silograph.task.scores import PARTS, ClassScores, Part, Scores

SUMS = ("square", "absolute", "seen.square", "unseen.square")
NUMBERS = ("nodes", "seen.nodes", "unseen.nodes")


@dataclass(frozen=True)
class RatingTask:
    """Regression on one number a rating; NaN at users and items; see `Task`.

    A rating is unseen where its user or its item has no training rating at the client that holds
    it. Rankings count where they were asked for (`silograph.evaluation.ranking`).
    """

    name: str = "rating"
    labels: LabelForm = "rating"
    primary: str = "rmse"
    columns: tuple[str, ...] = ("rmse", "rmse_seen", "rmse_unseen", "mae", LOSS)
    by_client: tuple[str, ...] = ("rmse", "mae")
    wide: bool = False
    classes: bool = False
    histograms: bool = False
    constant: str = "global mean"

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the scores."""
        return metrics_of_labels(self.labels)

    def outputs(self, schema: Schema) -> int:
        """Return 1."""
        del schema
        return 1

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the squared error of every rating, (n,); 0 where there is none."""
        known = ~torch.isnan(y)
        numbers = y.to(logits.dtype).nan_to_num(nan=0.0)
        return torch.where(known, logits[:, 0] - numbers, 0.0).square()

    def tally(self, rows: JudgedRows, *, val_histogram: bool = False) -> dict[str, Tensor]:
        """Return counts and sums by client, each (C,).

        For `val` and `test`: `*.nodes` int32 judged ratings, `*.seen.nodes` and `*.unseen.nodes`
        those of them whose users and items train, or do not; `*.loss`, `*.square`, `*.absolute`,
        `*.seen.square` and `*.unseen.square` float64 sums of losses and errors. Where nobody says
        which are seen, none count as either.

        Raises:
            ProtocolError: predictions or ratings that are not those of the rows.
        """
        del val_histogram  # numbers have no histograms
        _check(rows)
        error = rows.logits[:, 0].double() - rows.y.double()
        nobody = torch.zeros_like(rows.val)
        kinds = {"": ~nobody, "seen.": nobody, "unseen.": nobody}
        if rows.seen is not None:
            kinds |= {"seen.": rows.seen, "unseen.": ~rows.seen}
        fields: dict[str, Tensor] = {}
        for part, chosen in zip(PARTS, (rows.val, ~rows.val), strict=True):
            for kind, mask in kinds.items():
                which = chosen & mask
                count = torch.bincount(rows.group[which], minlength=rows.groups)
                fields[f"{part}.{kind}nodes"] = count.int()
                fields[f"{part}.{kind}square"] = rows.summed(error[which].square(), which)
            fields[f"{part}.absolute"] = rows.summed(error[chosen].abs(), chosen)
            fields[f"{part}.loss"] = fields[f"{part}.square"].clone()
        return fields

    def counts(self, outputs: int, *, val_histogram: bool = False) -> Mapping[str, CountSpec]:
        """Return what `tally` gives of one client."""
        del outputs, val_histogram
        specs: dict[str, CountSpec] = {}
        for part in PARTS:
            specs |= {f"{part}.{name}": CountSpec((), torch.int32, low=0) for name in NUMBERS}
            names = (*SUMS, "loss")
            specs |= {f"{part}.{name}": CountSpec((), torch.float64, low=0) for name in names}
        return specs

    def scores(self, counts: Mapping[str, Tensor], part: Part) -> Scores | None:
        """Return the scores of `val` or `test` over all ratings; None without any."""
        nodes = int(counts[f"{part}.nodes"].sum())
        if nodes == 0:
            return None
        own = [value for value in self.client_scores(counts, part)["rmse"] if value is not None]
        return Scores(
            {
                "rmse": _root_mean(counts, part, ""),
                "rmse_seen": _root_mean(counts, part, "seen."),
                "rmse_unseen": _root_mean(counts, part, "unseen."),
                "mae": float(counts[f"{part}.absolute"].sum()) / nodes,
                "rmse_client_mean": sum(own) / len(own),
                **ranking_scores(counts, part),
                **own_scores(self.labels, counts, part),
            }
        )

    def client_scores(self, counts: Mapping[str, Tensor], part: Part) -> dict[str, ClientValues]:
        """Return the scores of each client by itself."""
        nodes = counts[f"{part}.nodes"].long().tolist()
        square, absolute = (counts[f"{part}.{name}"].tolist() for name in ("square", "absolute"))
        return {
            "rmse": tuple(
                math.sqrt(s / n) if n else None for s, n in zip(square, nodes, strict=True)
            ),
            "mae": tuple(a / n if n else None for a, n in zip(absolute, nodes, strict=True)),
        }

    def class_scores(self, counts: Mapping[str, Tensor], part: Part) -> tuple[ClassScores, ...]:
        """There are no classes."""
        del counts, part
        return ()

    def decide(self, logits: Tensor) -> Tensor:
        """Return the predicted ratings, (n,)."""
        return logits[:, 0]

    def probabilities(self, logits: Tensor) -> None:
        """Return None: a number has no classes."""
        del logits

    def constant_logits(self, y: Tensor, outputs: int) -> Tensor:
        """Return the mean rating, (1,) float64."""
        del outputs
        return y.double().mean(dim=0, keepdim=True)


def _root_mean(counts: Mapping[str, Tensor], part: Part, kind: str) -> float | None:
    nodes = int(counts[f"{part}.{kind}nodes"].sum())
    return math.sqrt(float(counts[f"{part}.{kind}square"].sum()) / nodes) if nodes else None


def _check(rows: JudgedRows) -> None:
    """Raise `ProtocolError` unless every row has one prediction and one rating."""
    logits, y, count = rows.logits, rows.y, len(rows.group)
    if logits.shape != (count, 1) or not logits.is_floating_point():
        raise ProtocolError(
            f"expected predictions of {count} judged ratings, got {logits.dtype} of shape "
            f"{tuple(logits.shape)}"
        )
    if y.shape != (count,) or not y.is_floating_point() or len(rows.val) != count:
        raise ProtocolError(
            f"expected {count} ratings and masks to judge predictions by, got {y.dtype} of shape "
            f"{tuple(y.shape)} and {len(rows.val)} masks"
        )


RATING = RatingTask()
