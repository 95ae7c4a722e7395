"""What the silo's half of a session is given: the silo's data, and what it makes of a run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any, Protocol

import torch

from silograph.core.payload import Payload, State
from silograph.federation.field_specs import Extent, extent_of
from silograph.federation.joining.matching import Disagreement, Hello
from silograph.federation.program import Course
from silograph.graph.block.block import ClientBlock


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a silo has of a run that is over.

    Attributes:
        run: what names the run, in hexadecimal; not its token, which nobody else may know.
        round: the best one.
        weights: those that the server sent; nothing where it has none or keeps them.
        state: the silo's own after that round; None where it took no part in it.
    """

    run: str
    round: int
    weights: Payload
    state: State | None


def run_name(token: bytes) -> str:
    """Return what names a run to people, of its token; see `Outcome`."""
    return blake2b(token, digest_size=16).hexdigest()


def keep_nothing(outcome: Outcome) -> None:
    """Do nothing with what a run has come to."""
    del outcome


@dataclass(frozen=True, eq=False)
class Prepared:
    """What a silo has made of the run's config.

    Attributes:
        cfg: what ops read.
        block: the silo's own rows, where it computes.
        device: that place.
        course: what the run does, call by call.
        nodes: how many it has, by TRAIN, VAL and TEST; the server is told once.
        note: what the silo agrees to, in one line for its people.
        keep: writes down what the run has come to.
    """

    cfg: Any
    block: ClientBlock
    device: torch.device
    course: Course
    nodes: Mapping[str, int] = field(default_factory=dict)
    note: str = ""
    keep: Callable[[Outcome], None] = keep_nothing

    @cached_property
    def extent(self) -> Extent:
        """What the rows of messages and states are measured by."""
        return extent_of(self.block)


class Holder(Protocol):
    """A silo's own data, and what it says and makes of them."""

    def hello(self, run: bytes) -> Hello:
        """Return what the silo shows of itself, tags made with the run's nonce."""

    def explain(self, run: bytes, disagreement: Disagreement) -> None:
        """Tell the silo's own people, not the server, which edge the other silo does not list."""

    def prepare(self, facts: Mapping[str, Any]) -> Prepared:
        """Return what ops are given, from what the server tells of the run."""
