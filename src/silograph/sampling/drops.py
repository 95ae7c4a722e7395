"""Dropping edges or nodes at random: what samplers that learn are compared with.

Rong, Huang, Xu and Huang, "DropEdge: Towards deep graph convolutional networks on node
classification", ICLR 2020. A drawn share of the edges is dropped, both directions of an edge
together, and convolutions scale by the degrees that are left. Here each layer and step draws anew:
the paper's layer-wise form.

Feng et al., "Graph random neural networks for semi-supervised learning on graphs", NeurIPS 2020,
section 3.1 (DropNode). A drawn share of the nodes sends no messages, and those of the others count
1 / keep. Here a node's own row is never dropped, as it is no message of a neighbor.

`bernoulli` drops each message by itself (Fang et al., "DropMessage: Unifying random dropping for
graph neural networks", AAAI 2023, drops single entries of it).

n: rows. e: edges.
"""

from dataclasses import field
from typing import Annotated

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from silograph.core.config import STRICT
from silograph.core.key import Key, mix_words, signed
from silograph.core.payload import State
from silograph.core.ranges import lin
from silograph.graph.block.block import ClientBlock
from silograph.nn.any_model import AnyModel
from silograph.nn.neighbors import Drawn, Reached, Stateless, edges_of, uniform_of


@dataclass(frozen=True, config=STRICT)
class DropOptions:
    """The help text is the documentation of the field."""

    drop: Annotated[float, Field(ge=0, lt=1)] = field(
        default=0.5,
        metadata={"help": "probability with which one is dropped", "tune": lin(0.0, 0.9)},
    )


@dataclass(frozen=True)
class DropEdge(Stateless):
    """Drops edges, both directions together.

    Attributes:
        drop: probability.
    """

    drop: float

    def why_not(self, model: AnyModel) -> str | None:
        """A model must take edges layer by layer."""
        return edges_by_layer(model)

    def draw(self, block: ClientBlock, reached: Reached, hop: int, key: Key, state: State) -> Drawn:
        """Keep edges by a hash that is the same from both ends."""
        del hop, state
        every = edges_of(block, reached.rows)
        kept = self._kept(block, key, reached.rows[every.position], every.neighbor)
        left = self._kept(block, key, block.adj.row, block.adj.indices.long())
        degree = torch.bincount(block.adj.row[left], minlength=block.adj.num_rows)
        share = every.share[kept]
        return Drawn(every.position[kept], every.neighbor[kept], share, degree.to(share.dtype))

    def _kept(self, block: ClientBlock, key: Key, a: Tensor, b: Tensor) -> Tensor:
        """Return which edges between rows a and b (e,) are kept, (e,) bool."""
        hashed = mix_words(block.row_key ^ signed(key.value))
        return uniform_of(mix_words(hashed[a] + hashed[b])) >= self.drop


@dataclass(frozen=True)
class DropNode(Stateless):
    """Drops the messages of nodes.

    Attributes:
        drop: probability.
    """

    drop: float

    def why_not(self, model: AnyModel) -> str | None:
        """A model must take edges layer by layer."""
        return edges_by_layer(model)

    def draw(self, block: ClientBlock, reached: Reached, hop: int, key: Key, state: State) -> Drawn:
        """Keep senders by hashes of their keys."""
        del hop, state
        every = edges_of(block, reached.rows)
        hashed = mix_words(block.row_key ^ signed(key.value))
        kept = uniform_of(hashed[every.neighbor]) >= self.drop
        return Drawn(
            every.position[kept], every.neighbor[kept], every.share[kept] / (1 - self.drop)
        )


def edges_by_layer(model: AnyModel) -> str | None:
    """Return why a model cannot take other edges in each layer, or None if it can."""
    return None if model.staged is not None else f"{model.noun} sees all edges of a client"
