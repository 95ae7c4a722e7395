"""Rounds with differential privacy of whole silos: clipped updates, of which only a sum is used.

McMahan, Ramage, Talwar and Zhang, "Learning differentially private recurrent language models", ICLR
2018, algorithm 1 (DP-FedAvg). Clients train as in the plain round. They send nothing but their
clipped update (`silograph.federation.privacy.updates`), to which the engine, or the silo itself,
adds noise before it leaves. Neither loss, number of nodes nor counts leave.

What we changed: all called silos count alike, and those that are away count as zeros, so that the
denominator is fixed; the noise is integer, and is added by the silos, not by the server.

With a quantile the clip adapts (Andrew, Thakkar, McMahan and Ramaswamy, "Differentially private
learning with adaptive clipping", NeurIPS 2021, algorithm 1). The server sends the clip of the
round. Clients also send whether their update is within it, with noise like all else, and the server
moves the clip towards the quantile. The guarantee does not depend on the clip that a server sends:
the integers that leave are as large for any.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from silograph.core.kinds import Kind
from silograph.core.payload import Shared, Stacked, dense, tensors_under
from silograph.exchange.passes import weight_specs
from silograph.exchange.sent_weights import inbox_spec
from silograph.federation.base import Sum
from silograph.federation.field_specs import FieldSpec, FieldSpecs
from silograph.federation.messages import Empty
from silograph.federation.privacy.release import needs_noise
from silograph.federation.privacy.updates import (
    LEAST_CLIP,
    MOST_CLIP,
    clipped_updates,
    mean_update,
    next_clip,
    share_within,
)
from silograph.methods.base import MethodConfig, RoundReport, ServerState
from silograph.methods.ops import Clients, Server, op

CLIP = "clip"  # in the server's memory: of the next round
FACTS = {
    "clip": "Largest norm of an update in the round; longer ones were scaled to it.",
    "share_within_clip": "Share of silos whose updates were within the clip, with noise.",
}


def update_specs(cfg: MethodConfig) -> FieldSpecs:
    """Return the specs of updates: integers in the shapes of the run's weights."""
    own = weight_specs(cfg.model, Stacked, "update")
    return {name: FieldSpec(Stacked, spec.shape, torch.int64) for name, spec in own.items()}


def adapts_clip(cfg: MethodConfig) -> bool:
    """Whether the clip of a run follows a quantile of norms."""
    return cfg.privacy is not None and cfg.privacy.quantile is not None


def clip_specs(cfg: MethodConfig) -> FieldSpecs:
    """Return the specs of the clip that a server sends; none for a fixed clip, which all know."""
    spec = FieldSpec(Shared, (), torch.float64, low=LEAST_CLIP, high=MOST_CLIP)
    return {"clip": spec} if adapts_clip(cfg) else {}


def within_clip_specs(cfg: MethodConfig) -> FieldSpecs:
    """Return the spec of `within_clip`: whether a client's norm is within the clip."""
    return {"within_clip": FieldSpec(Stacked, (), torch.int64)} if adapts_clip(cfg) else {}


@dataclass(frozen=True)
class ModelToUpdate:
    """The server's weights w_t, in the form that the run sends weights in.

    Attributes:
        weights: w_t.
        clip: () float64 C_t, where it adapts.
    """

    weights: Annotated[Mapping[str, Tensor], inbox_spec]
    clip: Annotated[Tensor | None, clip_specs] = None


@dataclass(frozen=True)
class ClippedUpdate:
    """Trained minus received weights as integers whose norm is bounded; noise is still to come.

    Attributes:
        update: (C, ...) int64, of each client.
        within_clip: (C,) int64, B if its norm is at most C_t, else -B, where the clip adapts.
    """

    update: Annotated[Mapping[str, Stacked], update_specs]
    within_clip: Annotated[Stacked | None, within_clip_specs] = None


@needs_noise
@op(Kind.WEIGHTS)
def train_clipped(
    clients: Clients[Any], state: Empty, request: ModelToUpdate
) -> tuple[Empty, ClippedUpdate]:
    """Train E local epochs from w_t, and clip the update (UserUpdate)."""
    privacy = clients.cfg.privacy
    assert privacy is not None  # else the round does not call it
    fitted = clients.fit(request.weights)
    trained = {name: dense(w) for name, w in fitted.weights.items()}
    start = {name: w.t if isinstance(w, Shared) else w for name, w in request.weights.items()}
    clip = privacy.clip if request.clip is None else float(request.clip)
    return state, ClippedUpdate(*clipped_updates(trained, start, clip, privacy))


def average_clipped(
    server: Server[Any], state: ServerState
) -> tuple[ServerState, Mapping[str, Tensor], RoundReport]:
    """Train at the selected clients.

    Args:
        server: of the round.
        state: weights w_t, and the clip C_t in the memory after the first round, if it adapts.

    Returns:
        The state with the clip of the next round, w_t plus the mean update, and the report.
    """
    privacy, weights = server.cfg.privacy, state.weights
    assert privacy is not None  # else the plain round is run
    assert weights is not None  # set by init
    client_ids, report_facts = server.select(), dict[str, float]()
    clip, sent_clip = privacy.clip, None
    if privacy.quantile is not None:
        sent_clip = state.memory.get(CLIP, torch.tensor(privacy.clip, dtype=torch.float64))
        clip = float(sent_clip)
    request = ModelToUpdate(weights, sent_clip)
    reply = server.call(train_clipped, request, to=client_ids, reduce=Sum())
    total, silos = tensors_under("update", reply), len(client_ids)
    mean = mean_update(total, weights, clip, silos, privacy.clip_units)
    if privacy.quantile is not None:
        within = share_within(int(reply["within_clip"].t), silos)
        following = torch.tensor(next_clip(clip, within, privacy.quantile), dtype=torch.float64)
        state = ServerState(weights, {**state.memory, CLIP: following})
        report_facts = dict(zip(FACTS, (clip, within), strict=True))
    return state, mean, RoundReport(client_ids, None, report_facts)
