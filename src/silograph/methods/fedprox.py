"""FedProx: FedAvg whose local steps are pulled back to where they started.

Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith, "Federated optimization in heterogeneous
networks", MLSys 2020, algorithm 2.

A client lowers its loss + mu/2 ||w - w_t||^2, so every gradient gets mu (w - w_t).

What we changed: the paper draws clients by their size and takes their plain mean; we draw them
uniformly and weight by training nodes, as FedAvg does here. All clients do the same work: nobody
stops early. With mu = 0 this is FedAvg, bit for bit; and so it is with one step a round, which
starts where the pull is 0. So the default is three local epochs.

The default of mu has the best mean validation accuracy over four cuts (METIS; local Adam, 3 local
epochs, 100 rounds, seeds 0 and 1, all else by default), server view:

    mu                 0     0.01   0.1    0.3    1
    Cora, 10 clients   .771  .840   .850   -      .761
    Cora, 100          .403  .694   .804   .801   .768
    CiteSeer, 10       .731  .738   .736   .734   .662
    PubMed, 10         .861  .861   .843   .789   .709

With local SGD of rate 0.1 no mu up to 0.1 moves Cora by more than .001: such steps stay near.
"""

import dataclasses
from dataclasses import field
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from silograph.core.config import STRICT
from silograph.core.setting_values import log
from silograph.methods.base import Caution, Needs
from silograph.methods.fedavg import FEDAVG
from silograph.nn.correction import Proximal


@dataclass(frozen=True, config=STRICT)
class FedProxOptions:
    """The help text is the documentation of the field."""

    mu: Annotated[float, Field(ge=0)] = field(
        default=0.1,
        metadata={
            "help": "pull back to the start of the round, from the second step on",
            "tune": log(1e-3, 10.0),
        },
    )


def corrections(options: FedProxOptions) -> tuple[Proximal, ...]:
    """Return the pull; none at all for mu = 0."""
    return (Proximal(options.mu),) if options.mu else ()


FEDPROX = dataclasses.replace(
    FEDAVG,
    name="fedprox",
    title="average of models that stay near the last average",
    reference="Li et al., Federated optimization in heterogeneous networks, MLSys 2020",
    options=FedProxOptions,
    needs=Needs(local_epochs=3, corrections=corrections),
    cautions=(
        Caution(
            "clients train with adam, as for fedavg; with 100 small clients the pull is not "
            "enough: on Photo the result is far behind local, on Cora 21 to 30 points behind "
            "fedopt (benchmarks/defaults/beside_fedopt.md)",
            of="labels of nodes",
        ),
    ),
)
