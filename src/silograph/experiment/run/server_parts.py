"""What parts of a run keep in the server's memory beside the method, and so in checkpoints."""

from collections.abc import Mapping

from torch import Tensor

from silograph.core.payload import named
from silograph.methods.base import ServerState

SELECTOR, CONTROLLER, SELECTED = "selector/", "controller/", "selected/"
PARTS = SELECTOR, CONTROLLER, SELECTED


def without_parts(state: ServerState) -> ServerState:
    """Return the server's state as the method knows it."""
    kept = {n: t for n, t in state.memory.items() if not n.startswith(PARTS)}
    return state if len(kept) == len(state.memory) else ServerState(state.weights, kept)


def part_of(state: ServerState, prefix: str) -> Mapping[str, Tensor]:
    """Return what one part keeps."""
    kept = state.memory.items()
    return {name.removeprefix(prefix): t for name, t in kept if name.startswith(prefix)}


def with_part(state: ServerState, prefix: str, known: Mapping[str, Tensor]) -> ServerState:
    """Return the server's state with what one part keeps from now on."""
    others = {name: t for name, t in state.memory.items() if not name.startswith(prefix)}
    return ServerState(state.weights, {**others, **named(prefix[:-1], known)})
