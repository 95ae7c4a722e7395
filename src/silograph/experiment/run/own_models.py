"""Models that clients have of their own, as a simulation keeps them: those of the best round.

At a silo of a real federation the silo keeps its own (`silograph.deploy.silo_result`).
"""

from collections.abc import Sequence
from urllib.parse import quote

import torch

from silograph.core.payload import State
from silograph.experiment.run.setup import Setup
from silograph.nn.conv import Params

LONGEST = 100  # characters of a client's name in the name of a file


def own_weights(setup: Setup, server: Params | None, states: Sequence[State]) -> Params | None:
    """Return the weights that the clients predict with, (C, ...) or the same for all.

    None where they predict with the server's model, and where silos keep their states.

    Args:
        setup: the run.
        server: the server's weights, if it has any.
        states: of the clients, by block.
    """
    own = setup.method.own_weights
    if own is None or not states:
        return None
    tensors = ({name: field.t for name, field in state.items()} for state in states)
    parts = [own(setup.method_config, server or {}, state) for state in tensors]
    if len(parts) == 1:
        return parts[0]
    shapes = setup.method_config.model.weight_shapes
    return {
        name: w if tuple(w.shape) == shapes[name] else torch.cat([part[name] for part in parts])
        for name, w in parts[0].items()
    }


def file_of(number: int, client: str) -> str:
    """Return the name of the file of a client's own model; names may have any letters.

    >>> file_of(3, "St. Mary/north")
    '3-St.%20Mary%2Fnorth.safetensors'
    """
    return f"{number}-{quote(client, safe='')[:LONGEST]}.safetensors"
