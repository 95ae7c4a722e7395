"""Centralized training: one model, the uncut graph, full batch. The reference, not a federation.

It is FedAvg with one client that holds everything and keeps its optimizer, so one round is
`local_epochs` ordinary training steps.
"""

from dataclasses import replace

from silograph.methods.base import Needs, Uncut
from silograph.methods.fedavg import FEDAVG

CENTRALIZED = replace(
    FEDAVG,
    name="centralized",
    title="one model on the uncut graph (no silos)",
    reference="Kipf and Welling, Semi-supervised classification with graph convolutional "
    "networks, ICLR 2017",
    needs=Needs(keep_optimizer=True),
    small_weights=False,
    setting=Uncut(),
    aggregates=False,
    server_step=False,
    cautions=(),
)
