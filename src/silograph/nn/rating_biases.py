"""What a model of ratings must be compared with: a silo's mean, and biases of users and items.

    r_ui = mean + b_u + b_i,   min over b of sum (r_ui - mean - b_u - b_i)^2 + damping * sum b^2

Koren, Bell and Volinsky, "Matrix factorization techniques for recommender systems", Computer 2009,
section on biases. Each client solves it for its own training ratings, whatever the optimizer;
nothing that was learned is sent. Users and items without a training rating have bias 0.

The minimum is found by turns, exact in the biases of users, then of items (Gauss-Seidel). Each
client's is its own, so blocks change nothing. On the uncut graph it is that of all ratings.

n: rows. C: clients.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from silograph.core.key import Key
from silograph.core.payload import NO_STATE, Stacked, State
from silograph.core.pickling import state_of_fields
from silograph.core.work import report_rows
from silograph.graph.block.block import ClientBlock
from silograph.graph.block.pairs import pairs_of
from silograph.graph.graph import LabelForm
from silograph.nn.any_model import NO_TABLES
from silograph.nn.conv import Params
from silograph.nn.schedule import Fitted, Training, TrainingInputs
from silograph.nn.segment import segment_sum
from silograph.nn.start import start_fields, whole
from silograph.task.ranking import Factors

OFFSET = "offset"  # a weight, as a model has some: added to all predictions, and always 0
FEATURES = 2  # what says whether a node is a user or an item
TURNS = 300  # d / (d + damping) a turn for d ratings of a user or item at most
PER_TURN = 4.0  # operations for each row


@dataclass(frozen=True)
class RatingBiases:
    """The mean of a client's ratings, with or without biases.

    Attributes:
        damping: penalty on squared biases.
        terms: what is added to the mean: `biases`, or nothing: `mean`.
    """

    damping: float
    terms: Literal["biases", "mean"] = "biases"

    features = FEATURES
    outputs = 1
    task: LabelForm = dataclasses.field(default="rating", init=False)
    noun = "model rating_biases"
    staged = None
    one_by_one = True  # clients are few and large
    meets_all = False
    solved_flops = PER_TURN * TURNS
    first_maps = ()
    source = None
    table_widths = NO_TABLES

    __getstate__ = state_of_fields

    @property
    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every weight, shared form."""
        return MappingProxyType({OFFSET: (1,)})

    def init_weights(self, key: Key, dtype: torch.dtype) -> Params:
        """Return zero."""
        del key
        return {OFFSET: torch.zeros(1, dtype=dtype)}

    def first_tables(self, block: ClientBlock, key: Key) -> State:
        """There are no tables: biases follow from a client's ratings."""
        del block, key
        return NO_STATE

    def forward(
        self, weights: Mapping[str, Tensor], block: ClientBlock, *, tables: State = NO_STATE
    ) -> Tensor:
        """Return predictions (n, 1), 0 at users and items."""
        del tables
        offset, pairs = weights[OFFSET], pairs_of(block)
        mean, bias = self._solved(block)
        client = block.client[pairs.row]
        own = offset[client, 0] if offset.dim() == 2 else offset[0]
        out = offset.new_zeros(len(block.y), 1)
        said = mean[client] + bias[pairs.user] + bias[pairs.item]
        out[pairs.row, 0] = said.to(out.dtype) + own
        return out

    def factors(
        self, weights: Mapping[str, Tensor], block: ClientBlock, *, tables: State = NO_STATE
    ) -> Factors:
        """Return the biases of items, which order them for all users alike."""
        del tables
        offset, (mean, bias) = weights[OFFSET], self._solved(block)
        own = offset[block.client, 0] if offset.dim() == 2 else offset[0]
        bias, mean = bias.to(offset.dtype), mean.to(offset.dtype)
        none = bias.new_zeros(len(bias), 0)
        return Factors(none, none, bias, mean[block.client] + bias + own)

    def fit(self, training: Training, inputs: TrainingInputs) -> Fitted:
        """Solve for every client; weights and what the optimizer keeps stay as they are."""
        del training
        block, start = inputs.block, inputs.start
        fields = start_fields(self, start, block.num_clients)
        offset = whole(fields[OFFSET])
        logits = self.forward({OFFSET: offset}, block)
        train = block.split.train
        error = torch.where(train, logits[:, 0] - block.y.nan_to_num(), 0.0)
        loss = segment_sum(error.square(), block.off) / block.num_train.clamp(min=1)
        steps = (block.num_train > 0).long().cpu()
        return Fitted(
            {OFFSET: Stacked(offset)},
            dict(inputs.memory or {}),
            loss.to(logits.dtype),
            logits,
            steps,
        )

    def described(self) -> dict[str, Any]:
        """Return the options as plain values."""
        return {"kind": "biases", **dataclasses.asdict(self)}

    def _solved(self, block: ClientBlock) -> tuple[Tensor, Tensor]:
        """Return `biases`, worked out once."""
        turns = TURNS if self.terms == "biases" else 0
        name = ("biases", self.damping, turns)
        return block.once(name, tuple, lambda: biases(block, self.damping, turns))


def biases(block: ClientBlock, damping: float, turns: int = TURNS) -> tuple[Tensor, Tensor]:
    """Return means of the clients' training ratings, (C,), and biases of rows, (n,), float64."""
    pairs = pairs_of(block)
    train = block.split.train[pairs.row]
    row, user, item = (t[train] for t in (pairs.row, pairs.user, pairs.item))
    value, client = block.y[row].double(), block.client[row]
    total = torch.zeros(block.num_clients, dtype=torch.float64, device=value.device)
    mean = total.index_add(0, client, value) / block.num_train.clamp(min=1)
    left = value - mean[client]
    report_rows(block.off, PER_TURN * turns)
    return mean, solved_biases(user, item, left, len(block.y), damping, turns)


def solved_biases(
    user: Tensor, item: Tensor, left: Tensor, count: int, damping: float, turns: int = TURNS
) -> Tensor:
    """Return the biases of ends, (count,) float64, from what ratings leave of the mean.

    Args:
        user: (R,) int64 user of each rating, below `count`.
        item: (R,) int64 its item, likewise.
        left: (R,) float64 the rating, less the mean.
        count: number of ends.
        damping: penalty on squared biases.
        turns: of the solution.
    """
    bias = torch.zeros(count, dtype=torch.float64, device=left.device)
    total = torch.bincount(torch.cat([user, item]), minlength=count) + damping
    for _ in range(turns):
        for ends, others in ((user, item), (item, user)):
            rest = torch.zeros_like(bias).index_add_(0, ends, left - bias[others])
            bias[ends] = (rest / total)[ends]
    return bias
