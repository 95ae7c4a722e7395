"""FedACS: FedAvg among clients that a bandit selects, for fewer bytes.

Xu, Gao, Liu, Ma and Huang, "FedACS: An adaptive client selection framework for
communication-efficient federated graph learning", IEEE Transactions on Mobile Computing 2025,
algorithm 1.

Its server averages as FedAvg does, so this is FedAvg with another default of `selector`:
`silograph.selection.ucb` has the bandit, its options, and what we changed. The paper's models are
`rating_gcn` with five layers and `rating_gat` with two, of width 32, with SGD of a rate that
it does not name. The first is the default on ratings. Here clients train by Adam unless told
otherwise, as for FedAvg.
"""

import dataclasses

from silograph.methods.base import AnyMethod, Caution, DefaultModel, Needs
from silograph.methods.fedavg import FEDAVG

FEDACS: AnyMethod = dataclasses.replace(
    FEDAVG,
    name="fedacs",
    title="average of the models of clients that a bandit selects",
    reference="Xu et al., FedACS: An adaptive client selection framework for "
    "communication-efficient federated graph learning, IEEE TMC 2025",
    needs=Needs(selector="ucb", rating_model=DefaultModel("rating_gcn", layers=5, hidden=32)),
    small_weights=False,
    cautions=(
        Caution(
            "its paper's models are --model rating_gcn --layers 5 --hidden 32 (the default) and "
            "--model rating_gat --layers 2 --hidden 32",
            of="ratings",
        ),
        Caution(
            "the defaults are those of fedavg, and fail where these do",
            of="labels of nodes",
        ),
    ),
)
