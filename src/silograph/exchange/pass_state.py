"""The state of a client while a pass through the model is under way.

C: clients. r: rows that take part. S: halo slots. I, O: width of what enters a stage, and of its
sum.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from silograph.core.payload import Ragged, Stacked
from silograph.federation.ops import Clients
from silograph.nn.fit import check_places
from silograph.nn.reach import Reach, boundary_reach, full_reach, partial_reach


@dataclass(frozen=True)
class PassState:
    """The state of a client in a pass, and before it the rows that take part.

    A method that runs on some rows names them before the pass begins (see
    `silograph.nn.reach.partial_reach`), or, where all rows take part, the weights of messages to
    and from other silos (see `boundary_reach`). It leaves these out if all rows count alike.

    Attributes:
        rows: (r,) int64 that take part, as each client counts, ascending.
        own: (r, 1) weights of their messages to themselves.
        cross: (r, 1) of those to other silos.
        inner: (e,) of those along edges inside a client.
        heard: (S,) whether a halo slot's row takes part.
        loss: (r,) weights of their losses.
        slot: (S,) weights of messages to and from halo slots.
        contributors: (s,) int64 number of silos that contribute to the row of each slot that takes
            part, where a least number is asked of masked rows.
        train: (C,) bool, whether entries are dropped.
        weights: (C, ...) views of one tensor, by name.
        x: (r, I) what enters a stage, by its number.
        z: (r, O) what the first half of a stage gives, until its sum is complete.
        s: (r, O) its sum.
        grad: (r, O) gradient of what leaves the stage at hand.
        sum: (r, O) gradient of its sum, until those of other silos have come.
        enter: (r, I) gradient of what enters it.
        origin: (r, O) gradient of the restart.
        gradient: of the weights, by name.
    """

    PREFIX: ClassVar[str] = "pass/"
    rows: Ragged | None = None
    own: Ragged | None = None
    cross: Ragged | None = None
    inner: Ragged | None = None
    heard: Ragged | None = None
    loss: Ragged | None = None
    slot: Ragged | None = None
    contributors: Ragged | None = None
    train: Stacked | None = None
    weights: Mapping[str, Stacked] = field(default_factory=dict)
    x: Mapping[str, Ragged] = field(default_factory=dict)
    z: Mapping[str, Ragged] = field(default_factory=dict)
    s: Mapping[str, Ragged] = field(default_factory=dict)
    grad: Ragged | None = None
    sum: Ragged | None = None
    enter: Ragged | None = None
    origin: Ragged | None = None
    gradient: Mapping[str, Stacked | Ragged] = field(default_factory=dict)


InPass = TypeVar("InPass", bound=PassState)


def reach_of(clients: Clients, state: PassState) -> Reach:
    """Return which rows send messages to which in this pass: all, unless the state names some."""
    block = clients.block
    if state.rows is None and state.slot is None:
        return full_reach(block)
    cached = block.memo.get("reach")
    if isinstance(cached, tuple) and cached[0] == clients.key:
        cached_reach: Reach = cached[1]
        return cached_reach
    if state.slot is not None:
        reach = boundary_reach(block, state.slot.t)
    else:
        assert state.rows is not None  # see above
        rows = check_places(state.rows, block.off, "rows that take part")
        weights = {"own": state.own, "cross": state.cross}
        weights |= {"inner": state.inner, "heard": state.heard}
        own_weights = {name: None if part is None else part.t for name, part in weights.items()}
        reach = partial_reach(block, rows, **own_weights)
    block.memo["reach"] = (clients.key, reach)  # for the other ops of the pass
    return reach
