"""Inputs of the silo's half of a session: the silo's data, and what it prepares for a run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any, Protocol

import torch

from silograph.core.errors import PolicyError, mistake
from silograph.core.payload import Payload, State
from silograph.core.text import count_of
from silograph.federation.field_specs import Extent, extent_of
from silograph.federation.matching import Disagreement, Hello
from silograph.federation.program import Course
from silograph.federation.secure.row_form import RowNames
from silograph.federation.secure.sums import SecureSums
from silograph.federation.session.audit import RunAudit
from silograph.federation.session.private_reply import PrivateReplies
from silograph.graph.block.block import ClientBlock


@dataclass(frozen=True, eq=False)
class Outcome:
    """The result of a run at a silo.

    Attributes:
        run: what names the run, in hexadecimal; not its token, which nobody else may know.
        round: the best one.
        weights: those that the server sent; nothing where it has none or keeps them.
        state: the silo's own after that round; None where it took no part in it.
        latest: the silo's own state when the run was over.
    """

    run: str
    round: int
    weights: Payload
    state: State | None
    latest: State = field(default_factory=dict)


def run_name(token: bytes) -> str:
    """Return the public name of a run from its token; see `Outcome`."""
    return blake2b(token, digest_size=16).hexdigest()


@dataclass(frozen=True)
class SendingBounds:
    """Bounds of the data that leave a silo in a run, besides the agreed program.

    Attributes:
        kinds: of replies; None: all.
        most_bytes: of all frames of the run, also those of earlier processes; None: no bound.
        most_repeats: rounds of the run that are done again, also in other processes; None: no
            bound.
    """

    kinds: tuple[str, ...] | None = None
    most_bytes: int | None = None
    most_repeats: int | None = None

    def check_repeats(self, repeats: int) -> None:
        """Raise `PolicyError` if the number of repeated rounds would exceed the bound."""
        if self.most_repeats is not None and repeats > self.most_repeats:
            raise PolicyError(
                f"expected at most {count_of(self.most_repeats, 'round')} to be done again in a "
                "run (most_repeats of this silo's policy), got one more: the silo leaves the run",
                **mistake("refused-by-policy", "most_repeats"),
            )

    def check(self, kind: str, sent: int, size: int) -> None:
        """Raise `PolicyError` where a reply must not leave.

        Args:
            kind: of it.
            sent: bytes that have left before it.
            size: of its frame.
        """
        if self.kinds is not None and kind not in self.kinds:
            raise PolicyError(
                f"expected replies of {', '.join(self.kinds) or 'no kind'}, as this silo's policy "
                f"says, got one of {kind}: the silo leaves the run",
                **mistake("refused-by-policy", "kinds"),
            )
        self.check_size(sent, size)

    def check_size(self, sent: int, size: int) -> None:
        """Raise `PolicyError` if a frame exceeds the bound of bytes; see `check`."""
        if self.most_bytes is not None and sent + size > self.most_bytes:
            raise PolicyError(
                f"expected at most {self.most_bytes:,} bytes to leave in a run (most_bytes of this "
                f"silo's policy), got {size:,} more after {sent:,}: the silo leaves the run",
                **mistake("refused-by-policy", "most_bytes"),
            )


NO_BOUNDS = SendingBounds()


@dataclass(frozen=True, eq=False)
class Prepared:
    """What a silo has prepared from the run's config.

    Attributes:
        cfg: what ops read.
        block: the silo's own rows, where it computes.
        device: that place.
        course: what the run does, call by call.
        nodes: how many it has, by TRAIN, VAL, TEST, ROWS and EDGES; sent to the server once.
        note: what the silo agrees to, in one line for its people.
        store_result: writes the result of the run to a folder.
        plan: what the run sends, in lines for its people.
        agreed: the same in facts for the audit file.
        sends_rows: whether rounds may have replies with rows of single nodes. (Those of set-up are
            all known when the silo agrees.)
        own_model: whether the silo predicts with weights that are nowhere but in its state.
        secure: what was agreed of secure sums; None: replies are sent as they are.
        rows: what the silo knows of the rows that it exchanges, for secure sums.
        private: noise and charges of what leaves; None: a run without differential privacy.
        block_in: the block that ops get with a state of the silo, which may hold what completes
            the block (`silograph.exchange.collect`); None: it is always `block`.
    """

    cfg: Any
    block: ClientBlock
    device: torch.device
    course: Course
    nodes: Mapping[str, int] = field(default_factory=dict)
    note: str = ""
    store_result: Callable[[Outcome], None] = lambda _: None
    plan: tuple[str, ...] = ()
    agreed: Mapping[str, Any] = field(default_factory=dict)
    sends_rows: bool = False
    own_model: bool = False
    secure: SecureSums | None = None
    rows: RowNames | None = None
    private: PrivateReplies | None = None
    block_in: Callable[[State], ClientBlock] | None = None

    @cached_property
    def extent(self) -> Extent:
        """What the rows of messages and states are measured by."""
        return extent_of(self.block)


class SiloData(Protocol):
    """A silo's own data: its hello, explanations and preparation of a run."""

    def hello(self, run: bytes) -> Hello:
        """Return the silo's hello, with tags made from the run's nonce."""

    def explain(self, run: bytes, disagreement: Disagreement) -> None:
        """Report to the silo's own staff, not to the server, which edge the other silo lacks."""

    def prepare(self, facts: Mapping[str, Any], audit: RunAudit) -> Prepared:
        """Prepare the inputs of ops from the server's facts of the run and the data sent so far."""
