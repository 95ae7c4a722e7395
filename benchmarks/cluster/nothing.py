"""An op that computes nothing: what a call of it costs is what any call costs besides its op."""

from typing import Any

from silograph.core.key import Key
from silograph.core.payload import Payload, Stacked, State
from silograph.graph.block.block import ClientBlock


def nothing(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Reply with the weights that came, and weight 1, as training does."""
    del cfg, key
    clients = block.num_clients
    rows = {n: Stacked(f.t.expand(clients, *f.t.shape)) for n, f in inbox.items()}
    return state, {**rows, "n": Stacked(block.num_train.double().clamp(min=1))}
