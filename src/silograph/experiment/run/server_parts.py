"""What parts of a run keep in the server's memory beside the method, and so in checkpoints."""

from collections.abc import Mapping

from torch import Tensor

from silograph.core.errors import CheckpointError
from silograph.core.payload import named
from silograph.methods.base import ServerState

SELECTOR, CONTROLLER, SELECTED = "selector/", "controller/", "selected/"
STATISTICS = "statistics/"  # what was fitted to the training data of all clients
PARTS = SELECTOR, CONTROLLER, SELECTED, STATISTICS


def without_parts(state: ServerState) -> ServerState:
    """Return the server's state as the method knows it."""
    kept = {n: t for n, t in state.memory.items() if not n.startswith(PARTS)}
    return state if len(kept) == len(state.memory) else ServerState(state.weights, kept)


def parts_on_cpu(memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the server's memory with what parts keep on the CPU, where they compute."""
    return {name: t.cpu() if name.startswith(PARTS) else t for name, t in memory.items()}


class PartMemory(dict[str, Tensor]):
    """What a part keeps between rounds, by name.

    A checkpoint of an older version may lack a name that the part reads now.
    """

    def __init__(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self._part = part

    def __missing__(self, name: str) -> Tensor:
        """Raise `CheckpointError`, of one line in place of a traceback."""
        raise CheckpointError(
            f"expected {name!r} in what the {self._part} keeps between rounds, got "
            f"{', '.join(sorted(self)) or 'nothing'}: if the run was resumed, its checkpoint is of "
            "another version, so begin a new run"
        )


def part_of(state: ServerState, prefix: str) -> Mapping[str, Tensor]:
    """Return what one part keeps."""
    kept = state.memory.items()
    own = {name.removeprefix(prefix): t for name, t in kept if name.startswith(prefix)}
    return PartMemory(prefix.removesuffix("/"), own)


def with_part(state: ServerState, prefix: str, known: Mapping[str, Tensor]) -> ServerState:
    """Return the server's state with what one part keeps from now on."""
    others = {name: t for name, t in state.memory.items() if not name.startswith(prefix)}
    return ServerState(state.weights, {**others, **named(prefix[:-1], known)})
