"""The task on numbers at nodes: regression with squared error.

n: nodes. K: targets of a node. C: clients. j: judged rows.
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
from silograph.task.scores import PARTS, ClassScores, Part, Scores

SUMS = ("square", "absolute")


@dataclass(frozen=True)
class ValueTask:
    """Regression on one or several numbers a node; NaN marks those that are missing; see `Task`."""

    name: str = "node_value"
    labels: LabelForm = "node_value"
    primary: str = "rmse"
    columns: tuple[str, ...] = ("rmse", "mae", "rmse_client_mean", LOSS)
    by_client: tuple[str, ...] = ("rmse", "mae")
    wide: bool = True
    classes: bool = False
    histograms: bool = False
    constant: str = "mean target"

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the scores."""
        return metrics_of_labels(self.labels)

    def outputs(self, schema: Schema) -> int:
        """Return the number of targets."""
        return schema.num_classes

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the mean squared error of every node over its known targets, (n,); else 0."""
        known = ~torch.isnan(y)
        error = torch.where(known, logits - y.to(logits.dtype).nan_to_num(nan=0.0), 0.0)
        return error.square().sum(dim=1) / known.sum(dim=1).clamp(min=1)

    def tally(self, rows: JudgedRows, *, val_histogram: bool = False) -> dict[str, Tensor]:
        """Return counts and sums by client.

        For `val` and `test`: `*.nodes` (C,) int32 judged nodes, `*.loss` (C,) sum of node losses,
        `*.known` (C, K) int32 judged targets, `*.square` and `*.absolute` (C, K) sums of their
        errors; sums are float64.

        Raises:
            ProtocolError: logits or targets that are not those of the rows.
        """
        del val_histogram  # numbers have no histograms
        _check(rows)
        logits = rows.logits.double()
        known, loss = ~torch.isnan(rows.y), self.loss(logits, rows.y)
        error = torch.where(known, logits - rows.y.double().nan_to_num(nan=0.0), 0.0)
        tallies = {"known": known.int(), "square": error.square(), "absolute": error.abs()}
        fields: dict[str, Tensor] = {}
        for part, chosen in zip(PARTS, (rows.val, ~rows.val), strict=True):
            nodes = torch.bincount(rows.group[chosen], minlength=rows.groups)
            fields[f"{part}.nodes"] = nodes.int()
            fields[f"{part}.loss"] = rows.summed(loss[chosen], chosen)
            for name, values in tallies.items():
                fields[f"{part}.{name}"] = rows.summed(values[chosen], chosen)
        return fields

    def counts(self, outputs: int, *, val_histogram: bool = False) -> Mapping[str, CountSpec]:
        """Return what `tally` gives of one client."""
        del val_histogram
        specs: dict[str, CountSpec] = {}
        for part in PARTS:
            specs[f"{part}.nodes"] = CountSpec((), torch.int32, low=0)
            specs[f"{part}.loss"] = CountSpec((), torch.float64)
            specs[f"{part}.known"] = CountSpec((outputs,), torch.int32, low=0)
            specs |= {f"{part}.{name}": CountSpec((outputs,), torch.float64) for name in SUMS}
        return specs

    def scores(self, counts: Mapping[str, Tensor], part: Part) -> Scores | None:
        """Return the scores of `val` or `test` over all targets; None without any node."""
        nodes = int(counts[f"{part}.nodes"].sum())
        if nodes == 0:
            return None
        square, absolute, known = (
            float(counts[f"{part}.{name}"].sum()) + float(_merged(counts, part, name).sum())
            for name in (*SUMS, "known")
        )
        own = [value for value in self.client_scores(counts, part)["rmse"] if value is not None]
        return Scores(
            {
                "rmse": math.sqrt(square / known),
                "mae": absolute / known,
                "rmse_client_mean": sum(own) / len(own),
                **own_scores(self.labels, counts, part),
            }
        )

    def client_scores(self, counts: Mapping[str, Tensor], part: Part) -> dict[str, ClientValues]:
        """Return the scores of each client by itself."""
        square, absolute, known = (
            (counts[f"{part}.{name}"].sum(1) + _merged(counts, part, name)).tolist()
            for name in (*SUMS, "known")
        )
        return {
            "rmse": tuple(
                math.sqrt(s / n) if n else None for s, n in zip(square, known, strict=True)
            ),
            "mae": tuple(a / n if n else None for a, n in zip(absolute, known, strict=True)),
        }

    def class_scores(self, counts: Mapping[str, Tensor], part: Part) -> tuple[ClassScores, ...]:
        """There are no classes."""
        del counts, part
        return ()

    def decide(self, logits: Tensor) -> Tensor:
        """Return the predicted numbers, (n,) where a node has one target, else (n, K)."""
        return logits[:, 0] if logits.shape[1] == 1 else logits

    def probabilities(self, logits: Tensor) -> None:
        """Return None: a number has no classes."""
        del logits

    def constant_logits(self, y: Tensor, outputs: int) -> Tensor:
        """Return the mean (K,) float64 of each target, 0 where none is known."""
        del outputs
        return y.double().nanmean(dim=0).nan_to_num(nan=0.0)


def _merged(counts: Mapping[str, Tensor], part: Part, name: str) -> Tensor:
    """Return the counts or sums of targets that clients have merged, (C,); zeros if none may be."""
    merged = counts.get(f"{part}.merged.{name}")
    return torch.zeros_like(counts[f"{part}.nodes"]) if merged is None else merged


def _check(rows: JudgedRows) -> None:
    """Raise `ProtocolError` unless every row has outputs, and a target for each of them."""
    logits, y, count = rows.logits, rows.y, len(rows.group)
    if logits.dim() != 2 or len(logits) != count or not logits.is_floating_point():
        raise ProtocolError(
            f"expected predictions of {count} judged rows, got {logits.dtype} of shape "
            f"{tuple(logits.shape)}"
        )
    if y.shape != logits.shape or not y.is_floating_point() or len(rows.val) != count:
        raise ProtocolError(
            f"expected numbers of shape {tuple(logits.shape)} and {count} masks to judge "
            f"predictions by, got {y.dtype} of shape {tuple(y.shape)} and {len(rows.val)} masks"
        )


NODE_VALUE = ValueTask()
