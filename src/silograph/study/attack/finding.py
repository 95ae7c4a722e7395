"""`Finding`: what an attack recovers, and what its measurements share."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from silograph.experiment.run.setup import Setup
from silograph.graph.block.block import ClientBlock


@dataclass(frozen=True)
class Finding:
    """What an attack recovers.

    Attributes:
        attack: what the server does.
        recovered: what it has then.
        share: of how many that there are.
        of: that number.
        right: share of its guesses that are right; None where they are exact by construction.
        server: `honest but curious`, or `active`: it sends what the run does not call for.
    """

    attack: str
    recovered: str
    share: float
    of: int
    right: float | None
    server: Literal["honest but curious", "active"]


def first_map(setup: Setup) -> str:
    """Return the name of the weights that features meet."""
    model = setup.method_config.model.staged
    names = () if model is None else model.stages[0].conv.maps
    return f"0.{names[0]}" if names else next(iter(setup.method_config.model.weight_shapes))


def features(block: ClientBlock) -> Tensor:
    """Return features as a dense matrix (n, F)."""
    return block.x if isinstance(block.x, Tensor) else block.x.csr.tensor.to_dense()


def share(hit: Tensor) -> float:
    """Return the share of what is true."""
    return float(hit.double().mean()) if len(hit) else 0.0
