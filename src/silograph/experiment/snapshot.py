"""A run between two rounds, as tensors and facts, and back: what a checkpoint holds.

Everything that decides the rest of the run is here or in the config; draws come from keys, so
there is no random state to save.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from silograph.core.config import write_toml
from silograph.core.errors import CheckpointError
from silograph.core.payload import Ragged, Stacked, State
from silograph.experiment.judging import Judged
from silograph.experiment.setup import Setup, versions
from silograph.federation.checkpoint import Checkpoint
from silograph.graph.graph import fingerprint
from silograph.methods.base import ServerState

NUMERIC = ("silograph", "torch", "numpy")  # packages whose version decides the bits of a result


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A run after a round.

    Attributes:
        round: the round that is over; 0 before the first.
        state: the server's.
        best: the best round so far, None before the first judged one.
        seconds: of training so far.
        stopped: why the run is over, None while it goes on.
    """

    round: int
    state: ServerState
    best: Judged | None
    seconds: float
    stopped: str | None


def identity(setup: Setup) -> dict[str, str]:
    """Return what a checkpoint must share with the run that goes on from it."""
    config = write_toml(replace(setup.config, out=None))
    found = versions()
    return {
        "config": hashlib.blake2b(config.encode(), digest_size=8).hexdigest(),
        "graph": fingerprint(setup.cut.graph),
        "partition": setup.cut.partition.hash,
        **{name: found[name] for name in NUMERIC},
    }


def to_checkpoint(
    setup: Setup, snapshot: Snapshot, same: Mapping[str, str], sizes: Mapping[str, int]
) -> Checkpoint:
    """Return the checkpoint of a snapshot.

    Args:
        setup: the run.
        snapshot: where it is.
        same: `identity(setup)`, worked out once.
        sizes: bytes of the folder's growing files that belong to this snapshot.
    """
    state, best = snapshot.state, snapshot.best
    tensors = _named("server/memory", state.memory) | _named("server/weights", state.weights or {})
    for number, block in enumerate(setup.federation.states()):
        for name, field in block.items():
            tensors[f"client/{number}/{name}/t"] = field.t
            if isinstance(field, Ragged):
                tensors[f"client/{number}/{name}/off"] = field.off
    if best is not None:
        tensors |= _named("best/personalised", best.personalised)
        tensors |= _named("best/server", best.server or {})
        if best.round != snapshot.round:  # else they are the server's weights
            tensors |= _named("best/weights", best.weights or {})
    facts = {
        "same": dict(same),
        "sizes": dict(sizes),
        "best_round": None if best is None else best.round,
        "seconds": snapshot.seconds,
        "stopped": snapshot.stopped,
    }
    return Checkpoint(snapshot.round, tensors, facts)


def _named(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}/{name}": t for name, t in tensors.items()}


def check_identity(facts: Mapping[str, Any], same: Mapping[str, str]) -> None:
    """Raise `CheckpointError` unless a checkpoint belongs to this very run.

    Raises:
        CheckpointError: names what differs, and both values.
    """
    theirs = facts.get("same", {})
    for name, ours in same.items():
        if theirs.get(name) != ours:
            raise CheckpointError(
                f"expected a checkpoint with {name} {ours}, got one with {theirs.get(name)}: going "
                "on would not give the numbers of an uninterrupted run; start a new run"
            )


def from_checkpoint(setup: Setup, checkpoint: Checkpoint) -> tuple[Snapshot, list[State]]:
    """Return the snapshot and the clients' states by block.

    Raises:
        CheckpointError: something that every checkpoint has is missing.
    """
    device = setup.uncut.off.device
    parts = {name: t.to(device) for name, t in checkpoint.tensors.items()}
    facts = checkpoint.facts
    has_model = setup.method.judge == "server"
    try:
        weights = _below("server/weights", parts) if has_model else None
        state = ServerState(weights, _below("server/memory", parts))
        best, best_round = None, facts["best_round"]
        if best_round is not None:
            now = best_round == checkpoint.round
            best = Judged(
                round=best_round,
                server=_below("best/server", parts) if has_model else None,
                personalised=_below("best/personalised", parts),
                weights=weights if now or not has_model else _below("best/weights", parts),
            )
        seconds, stopped = facts["seconds"], facts["stopped"]
    except KeyError as error:
        raise CheckpointError(f"expected {error} in the checkpoint, got none") from None
    states = [
        _state(_below(f"client/{number}", parts))
        for number in range(len(setup.federation.states()))
    ]
    return Snapshot(checkpoint.round, state, best, seconds, stopped), states


def _below(prefix: str, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    start = f"{prefix}/"
    return {name.removeprefix(start): t for name, t in parts.items() if name.startswith(start)}


def _state(parts: Mapping[str, Tensor]) -> State:
    state: dict[str, Stacked | Ragged] = {}
    for key, t in parts.items():
        name, _, role = key.rpartition("/")
        if role == "t":
            off = parts.get(f"{name}/off")
            state[name] = Stacked(t) if off is None else Ragged(t, off)
    return state
