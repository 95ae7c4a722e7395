"""What both backends know of FedGrAINS' sampler: how it chooses and learns, not how that is done.

The sampler, in torch, is `silograph.sampling.fedgrains`; its compiled form is `nn.flow_compiled`.
"""

from dataclasses import dataclass
from typing import Literal

Policy = Literal["trained", "untrained", "uniform"]
Credit = Literal["balance", "gate"]
Score = Literal["probability", "odds"]
GATE_FLOPS = 8  # of a candidate, with gate credit: the score, its mean, and the way back


@dataclass(frozen=True)
class FlowRule:
    """How a flow network chooses the nodes of a step.

    Attributes:
        k: nodes chosen in a layer, client and step.
        hops: layers.
        alpha: scale of the loss in the reward.
        lr: rate of the flow network.
        learns_z: whether log Z is learned; else 0.
        log_z_lr: rate of z.
        sampled_degrees: whether convolutions scale by degrees in what was chosen.
        policy: who chooses.
        width: H.
        credit: what the network learns from: the trajectory balance, or the gradient of the loss
            at the gate of each chosen node's messages.
        score: what is drawn by: log p, or log p / (1 - p), which is the logit.
        weighs: whether evaluation weighs messages by the network's scores.
    """

    k: int
    hops: int
    alpha: float = 1e5
    lr: float = 1e-3
    learns_z: bool = True
    log_z_lr: float = 0.1
    sampled_degrees: bool = False
    policy: Policy = "trained"
    width: int = 128
    credit: Credit = "balance"
    score: Score = "probability"
    weighs: bool = False

    @property
    def trains_z(self) -> bool:
        """Whether the state has log Z, which the balance alone reads."""
        return self.learns_z and self.credit == "balance"


def rule_of(sampler: object) -> FlowRule | None:
    """Return the rule that compiled kernels follow in place of a sampler's own draws, or None.

    None also for a class that is derived from such a sampler: it may draw in another way.
    """
    states = FlowRule in type(sampler).__bases__
    return sampler if isinstance(sampler, FlowRule) and states else None
