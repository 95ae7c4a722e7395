"""What a controller is: it sets the knobs of a round from what the run has shown.

A knob is an option of a method that may change from round to round. The method declares its range
beside the field, as ranges for tuning are: `metadata={"knob": lin(1, 20)}`; the option's value is
the first one. Silos know the range from the config, and refuse any other value.

C: clients of the federation.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from silograph.core.errors import ConfigError, TrainingError
from silograph.core.key import Key
from silograph.core.payload import Field, Shared, Stacked
from silograph.core.setting_values import Range
from silograph.federation.base import positions_of
from silograph.federation.field_specs import FieldSpec, FieldSpecs

ControllerState = Mapping[str, Tensor]
KNOB, BY_CLIENT = "knob", "by_client"  # metadata of an option


@dataclass(frozen=True)
class Knob:
    """A number that may change from round to round.

    Attributes:
        name: of the option.
        low: least value; whole numbers only where both ends are whole.
        high: largest value.
        start: value of the option.
        by_client: whether each client has a value of its own.
    """

    name: str
    low: float
    high: float
    start: float
    by_client: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Of its values: int64 for whole numbers, else float64."""
        whole = isinstance(self.low, int) and isinstance(self.high, int)
        return torch.int64 if whole else torch.float64

    def constant(self, value: float, clients: int) -> Tensor:
        """Return a value as a tensor, () or (C,), at the nearer end if it is out of range."""
        shape = (clients,) if self.by_client else ()
        return torch.full(shape, min(max(value, self.low), self.high), dtype=self.dtype)

    def check(self, value: Tensor | None, clients: int, who: str) -> None:
        """Raise `TrainingError` unless `who` has given a value, () or (C,), within the range."""
        shape = (clients,) if self.by_client else ()
        if value is None or value.shape != shape or value.dtype is not self.dtype:
            description = (
                "none" if value is None else f"{value.dtype} of shape {tuple(value.shape)}"
            )
            raise TrainingError(
                f"expected knob {self.name} as {self.dtype} of shape {shape} from {who}, got "
                f"{description}"
            )
        if not bool(((value >= self.low) & (value <= self.high)).all()):  # so not if it is NaN
            raise TrainingError(
                f"expected knob {self.name} in {self.low:g} to {self.high:g} from {who}, got "
                f"{value.flatten()[:4].tolist()}"
            )


@dataclass(frozen=True)
class RunStanding:
    """Where a run stands; the same after it was killed and resumed.

    Attributes:
        round: the last round that is over; 0 before the first.
        clients: C.
        bytes: of all messages so far.
        bytes_left: of `max_bytes`, None if there is no limit.
        scored: number of the last round that was scored; None if scores are not kept (see
            `Needs.score_first`).
        val_loss: pooled validation loss of that round, in the view that picks the round; None
            without validation nodes.
        val_score: likewise of the run's metric.
        virtual_seconds: of the virtual clock so far, None without one.
        weights: the server's model after that round, nothing if it has none.
        rounds_left: rounds up to the last one of the run.
    """

    round: int
    clients: int
    bytes: int
    bytes_left: int | None
    scored: int | None
    val_loss: float | None
    val_score: float | None
    virtual_seconds: float | None = None
    weights: Mapping[str, Tensor] = field(default_factory=dict, compare=False, repr=False)
    rounds_left: int = 0


Knobs = Sequence[Knob]
Propose = Callable[[Any, Knobs, ControllerState, RunStanding, Key], Mapping[str, Tensor]]
StateAtFirst = Callable[[Any, Knobs, RunStanding], ControllerState]
Learn = Callable[
    [Any, Knobs, ControllerState, RunStanding, Mapping[str, float], Mapping[str, Tensor]],
    ControllerState,
]


Note = Callable[[Any, ControllerState, int], str | None]


def no_note(options: object, state: ControllerState, rounds: int) -> None:
    """Return no line for the result of a run."""
    del options, state, rounds


def remember_nothing(options: object, knobs: Knobs, standing: RunStanding) -> ControllerState:
    """Return the state of a controller that remembers nothing."""
    del options, knobs, standing
    return {}


@dataclass(frozen=True)
class Controller:
    """A controller: pure functions. Their state is tensors in the server's checkpoint.

    Attributes:
        name: what users call it.
        title: one line for listings.
        propose: from options, knobs, state, standing before the round, and a key: a value for every
            knob, of its dtype, within its range, () or (C,).
        init: from options, knobs and the standing before round 1, scores of the first weights
            included: the state.
        observe: from options, knobs, state, the standing after a round, the round's facts with
            `train_loss` if there is one and the measured `seconds` that it took, and the values of
            the knobs in it: the next state, with tensors of its own. None: the controller learns
            nothing.
        needs_scores: whether it decides by scores: then methods that use it score the first
            weights and keep the last scores (`Needs.score_first`).
        options: of its own; a method that has any for it sets them with `replace`.
        note: from options, the state after a run and the number of its rounds: a line for the
            result; None is nothing.
    """

    name: str
    title: str
    propose: Propose
    init: StateAtFirst = remember_nothing
    observe: Learn | None = None
    needs_scores: bool = False
    options: Any = None
    note: Note = no_note


def knobs_of(options: Any, names: Collection[str] | None = None) -> tuple[Knob, ...]:
    """Return the knobs that the options of a method declare; an option that is None is none.

    Args:
        options: of the method.
        names: of the options that are knobs in this run; all that are declared by default.

    Raises:
        ConfigError: a range of choices, or a value outside its range.
    """
    return tuple(
        _declared_knob(f, getattr(options, f.name))
        for f in dataclasses.fields(options)
        if KNOB in f.metadata
        and getattr(options, f.name) is not None
        and (names is None or f.name in names)
    )


def _declared_knob(option: "dataclasses.Field[Any]", start: Any) -> Knob:
    range_of_knob: Range = option.metadata[KNOB]
    if range_of_knob.kind == "choice":
        raise ConfigError(
            f"expected a range LOW:HIGH of knob {option.name}, got choices: a knob is a number"
        )
    knob = Knob(
        option.name,
        range_of_knob.low,
        range_of_knob.high,
        start,
        bool(option.metadata.get(BY_CLIENT)),
    )
    if not knob.low <= start <= knob.high or (start % 1 and knob.dtype is torch.int64):
        raise ConfigError(
            f"expected {option.name} in {range_of_knob.low:g} to {range_of_knob.high:g}, its range "
            f"during a run, got {start}"
        )
    return knob


# --- Knobs that stay what the options say --------------------------------------------------------


def propose(
    options: object, knobs: Knobs, state: ControllerState, standing: RunStanding, key: Key
) -> Mapping[str, Tensor]:
    """Return the first values."""
    del options, state, key
    return {knob.name: knob.constant(knob.start, standing.clients) for knob in knobs}


FIXED = Controller("fixed", "knobs stay what the options say", propose)


# --- Knobs on their way to clients: fields of an inbox, and what silos hold them to --------------
#
# C: clients of the federation. k: clients of a call.


PREFIX = "knobs/"


def knob_fields(
    knobs: Mapping[str, Tensor], ids: Sequence[str], to: Sequence[str] | None = None
) -> dict[str, Field]:
    """Return the fields `knobs/NAME` of an inbox: shared, or a value for each called client.

    Args:
        knobs: values of a round, () or (C,).
        ids: of the federation.
        to: clients that are called; all by default.
    """
    positions = positions_of(ids, to)
    return {PREFIX + n: Stacked(t[positions]) if t.dim() else Shared(t) for n, t in knobs.items()}


def knob_specs(
    options: Any, *, varies: bool = True, names: Collection[str] | None = None
) -> FieldSpecs:
    """Return the specs of these fields, with the ranges that the options declare.

    Args:
        options: of the method.
        varies: whether a controller sets the knobs; if not, clients accept only the options'
            values.
        names: of the knobs that are sent; all by default.
    """
    return {
        PREFIX + knob.name: FieldSpec(
            Stacked if knob.by_client else Shared,
            (),
            knob.dtype,
            low=knob.low if varies else knob.start,
            high=knob.high if varies else knob.start,
        )
        for knob in knobs_of(options, names)
    }


# --- round costs ---------------------------------------------------------------------------------
# What exchanges and all else cost in a round, and the interval that a limit of bytes allows.
#
# If a run has a limit of bytes, an interval is the least from the controller's own on with which
# what is left lasts to the last round. The estimate takes the cost of an exchange from the last
# round, and what else a round costs from the mean of all, since only some are scored. By how much
# the dearest round exceeds that mean is set aside, since the last round is scored. Before a round
# has been scored that is not known, so a limit can be exceeded by what scoring costs.
#
# State between rounds, each a () float64, all but the last in bytes:
#
#     bytes      the ledger's total
#     fixed      mean of a round without exchanges
#     dear       largest of a round without exchanges
#     exchange   one exchange of the last round, at all clients
#     batches    how many the last round had


ROW_BYTES, EXCHANGES, BATCHES = "row_bytes", "exchanges", "batches"  # facts of a round


def no_costs(standing: RunStanding) -> ControllerState:
    """Return the costs before the first round, which has nothing to do with those of set-up."""
    return _to_tensors(
        {"bytes": standing.bytes, "fixed": 0, "dear": 0, "exchange": 0, "batches": 0}
    )


def costs_after(
    state: ControllerState, standing: RunStanding, facts: Mapping[str, float]
) -> ControllerState:
    """Return the costs updated by one more round."""
    rows, num_exchanges = facts.get(ROW_BYTES, 0.0), facts.get(EXCHANGES, 0.0)
    mean, other_bytes = float(state["fixed"]), standing.bytes - float(state["bytes"]) - rows
    return _to_tensors(
        {
            "bytes": standing.bytes,
            "fixed": mean + (other_bytes - mean) / max(standing.round, 1),
            "dear": max(float(state["dear"]), other_bytes),
            "exchange": rows / max(num_exchanges, 1),
            "batches": facts.get(BATCHES, 0.0),
        }
    )


def affordable_interval(
    knob: Knob, wanted: float, state: ControllerState, standing: RunStanding
) -> Tensor:
    """Return the least whole interval that the bytes left allow, from `wanted` rounded up on.

    It is the largest of the knob where no interval suffices. `wanted` may be 0: silos may report a
    loss of 0.
    """
    least = max(1, math.ceil(min(wanted, knob.high)))
    return knob.constant(_least_interval(least, int(knob.high), state, standing), standing.clients)


def _least_interval(tau: int, largest: int, state: ControllerState, standing: RunStanding) -> int:
    """Return the least interval from `tau` on that the bytes left allow; `largest` if none does."""
    batches, exchange_bytes = float(state["batches"]), float(state["exchange"])
    bytes_left, rounds = standing.bytes_left, standing.rounds_left
    if bytes_left is None or not rounds or not batches or not exchange_bytes:
        return tau
    fixed = float(state["fixed"])
    num_exchanges = (
        (bytes_left - (float(state["dear"]) - fixed)) / rounds - fixed
    ) / exchange_bytes
    if num_exchanges >= math.ceil(batches / tau):
        return tau
    return (
        max(tau, math.ceil(batches / math.floor(num_exchanges))) if num_exchanges >= 1 else largest
    )


def _to_tensors(numbers: Mapping[str, float]) -> ControllerState:
    return {name: torch.tensor(float(n), dtype=torch.float64) for name, n in numbers.items()}
