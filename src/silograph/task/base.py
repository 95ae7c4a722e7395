"""`Task`: what is predicted of a node, and how predictions are scored.

n: nodes. K: outputs of the model. C: clients. j: judged rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from silograph.graph.graph import LabelForm, Schema
from silograph.task.counts import JudgedRows
from silograph.task.scores import ALWAYS, ClassScores, Part, ScoreRequest, Scores

ClientValues = tuple[float | None, ...]  # of each client, None where it has no judged node


@dataclass(frozen=True)
class CountSpec:
    """What a client may report of its predictions under one name.

    Attributes:
        shape: of the tensor of one client.
        dtype: of its values.
        low: least value; None is any.
        high: largest value; None is any.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    low: float | None = None
    high: float | None = None


class Task(Protocol):
    """What is predicted of a node. A task is a frozen value, registered in `TASKS`.

    Clients report counts and sums over their judged rows and nothing else, and the server makes
    scores of them.
    """

    @property
    def name(self) -> str:
        """Name in the config."""

    @property
    def labels(self) -> LabelForm:
        """The form of labels that it predicts; see `Graph.task`."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the scores that it has, as results show them; the loss is the last one."""

    @property
    def primary(self) -> str:
        """The metric that picks the best round unless the run names another one."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Metrics that rounds.csv always has."""

    @property
    def by_client(self) -> tuple[str, ...]:
        """Metrics that are worked out for each client by itself; see `client_scores`."""

    @property
    def wide(self) -> bool:
        """Whether a node has one label for each output, y (n, K), and not one in all, y (n,)."""

    @property
    def classes(self) -> bool:
        """Whether labels are whole numbers of classes or bits; otherwise they are any numbers."""

    @property
    def histograms(self) -> bool:
        """Whether counts have histograms of log-odds."""

    @property
    def constant(self) -> str:
        """Name of the best constant prediction, such as `largest class`."""

    def outputs(self, schema: Schema) -> int:
        """Return the number of outputs of a model."""

    def loss(self, logits: Tensor, y: Tensor, class_weight: Tensor | None = None) -> Tensor:
        """Return the loss of every node (n,) from logits (n, K); 0 where no label is known.

        `class_weight` (K,): factor of the loss of each class, see `node_loss`; None without any,
        and for numbers.
        """

    def tally(self, rows: JudgedRows, *, val_histogram: bool = False) -> dict[str, Tensor]:
        """Return counts and sums by client, each (C, ...), for `val` and `test`.

        `val.nodes`, `test.nodes` (C,) int32 and `val.loss`, `test.loss` (C,) float64 are among
        them. With `val_histogram`, tasks with histograms have that of validation nodes, too.

        Raises:
            ProtocolError: logits or labels that are not those of the rows.
        """

    def counts(self, outputs: int, *, val_histogram: bool = False) -> Mapping[str, CountSpec]:
        """Return the specs of `tally` for one client, by name."""

    def scores(
        self, counts: Mapping[str, Tensor], part: Part, request: ScoreRequest = ALWAYS
    ) -> Scores | None:
        """Return the scores of `val` or `test` from all clients' counts; None without any node.

        `request`: which scores besides those that every run has.
        """

    def client_scores(self, counts: Mapping[str, Tensor], part: Part) -> dict[str, ClientValues]:
        """Return the scores of each client by itself, for the metrics of `by_client`."""

    def class_scores(self, counts: Mapping[str, Tensor], part: Part) -> tuple[ClassScores, ...]:
        """Return the scores of each class or label bit, none where there are no classes."""

    def decide(self, logits: Tensor) -> Tensor:
        """Return what logits (n, K) predict, in the form of labels; on the CPU."""

    def probabilities(self, logits: Tensor) -> Tensor | None:
        """Return the probability of each class or bit, (n, K) float64; None for numbers."""

    def constant_logits(self, y: Tensor, outputs: int) -> Tensor:
        """Return the logits (K,) float64 that are best for all of these training labels at once."""
