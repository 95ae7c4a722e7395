"""What a controller is: it sets the knobs of a round from what the run has shown.

A knob is an option of a method that may change from round to round. The method declares its range
beside the field, as ranges for tuning are: `metadata={"knob": lin(1, 20)}`; the option's value is
the first one. Silos know the range from the config, and refuse any other value.

C: clients of the federation.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from silograph.core.errors import ConfigError, TrainingError
from silograph.core.key import Key
from silograph.core.ranges import Range

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
            got = "none" if value is None else f"{value.dtype} of shape {tuple(value.shape)}"
            raise TrainingError(
                f"expected knob {self.name} as {self.dtype} of shape {shape} from {who}, got {got}"
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


def nothing_to_say(options: object, state: ControllerState, rounds: int) -> None:
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
    note: Note = nothing_to_say


def knobs_of(options: Any, names: Collection[str] | None = None) -> tuple[Knob, ...]:
    """Return the knobs that the options of a method declare; an option that is None is none.

    Args:
        options: of the method.
        names: of the options that are knobs in this run; all that are declared by default.

    Raises:
        ConfigError: a range of choices, or a value outside its range.
    """
    return tuple(
        _knob(f, getattr(options, f.name))
        for f in dataclasses.fields(options)
        if KNOB in f.metadata
        and getattr(options, f.name) is not None
        and (names is None or f.name in names)
    )


def _knob(option: "dataclasses.Field[Any]", start: Any) -> Knob:
    declared: Range = option.metadata[KNOB]
    if declared.kind == "choice":
        raise ConfigError(
            f"expected a range LOW:HIGH of knob {option.name}, got choices: a knob is a number"
        )
    knob = Knob(
        option.name, declared.low, declared.high, start, bool(option.metadata.get(BY_CLIENT))
    )
    if not knob.low <= start <= knob.high or (start % 1 and knob.dtype is torch.int64):
        raise ConfigError(
            f"expected {option.name} in {declared.low:g} to {declared.high:g}, its range during a "
            f"run, got {start}"
        )
    return knob
