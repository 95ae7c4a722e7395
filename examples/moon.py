"""MOON: embeddings are drawn to those of the server's model, away from the client's last ones.

Shows: a term of the local loss that reads embeddings, and what clients keep between rounds. Silos
that allow the file run it, too: `silograph silo --allow-code moon.py`
(docs/how_to/run_own_code_at_silos.md).

Q. Li, B. He, D. Song: "Model-contrastive federated learning", CVPR 2021, equations 2 and 3. Here
the embedding is what enters the last layer, without a projection head.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

import silograph as sg
from silograph import methods as m


@dataclass(frozen=True)
class MoonOptions:
    """Weight and temperature of the contrast."""

    mu: float = field(default=1.0, metadata={"help": "weight of the contrast"})
    temperature: float = field(default=0.5, metadata={"help": "smaller is sharper"})


@dataclass(frozen=True, eq=False)
class Contrast:
    """The term; `others` (n, 2, D) are embeddings by the server's and by the last own model."""

    options: MoonOptions
    others: m.Ragged | None = None

    def of(self, clients: Tensor) -> "Contrast":
        """Return the term of some clients."""
        return self if self.others is None else replace(self, others=self.others.take(clients))

    def flops(self, width: int) -> float:
        """Return the operations of two cosines, and twice as many on the way back."""
        return 36.0 * width

    def __call__(self, nodes: m.StepNodes) -> Tensor:
        """Return how far each node is from the server's embedding rather than the last own."""
        assert self.others is not None  # filled in at the clients
        alike = cosine_similarity(nodes.embeddings[:, None], self.others.t[nodes.row], dim=2)
        return -self.options.mu * (alike / self.options.temperature).log_softmax(dim=1)[:, 0]


@dataclass(frozen=True)
class LastModel:
    """The weights where a client's training ended; none before it has trained."""

    last: Annotated[Mapping[str, m.Stacked], m.exact_weights(m.Stacked, "last", optional=True)]


@m.op(m.Kind.WEIGHTS)
def train_moon(
    clients: m.Clients[MoonOptions], state: LastModel, request: m.GlobalModel
) -> tuple[LastModel, m.LocalModel]:
    """Train as FedAvg does, with the term."""
    server, last = request.weights, {name: w.t for name, w in state.last.items()}
    near, far = (clients.embeddings(weights) for weights in (server, last or server))
    term = Contrast(clients.options, m.Ragged(torch.stack([near.t, far.t], dim=1), near.off))
    fitted = clients.fit(server, replace(clients.cfg, losses=(term,)))
    return LastModel(m.stack(fitted.tensors)), m.LocalModel.of(fitted, clients.block)


NEEDS = m.Needs(losses=lambda options: (Contrast(options),))
TITLE = "average of models that contrast embeddings with the server's and their last ones"
METHOD = replace(m.averaging(train_moon, LastModel), name="moon", options=MoonOptions, needs=NEEDS)
METHOD = replace(METHOD, title=TITLE, reference="Li, He and Song, CVPR 2021", cautions=())

if __name__ == "__main__":
    graph = sg.load("digits")
    print(graph)
    print(sg.run(graph, method=METHOD, clients=4, rounds=5, local_epochs=3, hidden=32))
