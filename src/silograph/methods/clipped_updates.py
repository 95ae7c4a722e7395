"""Rounds with differential privacy of whole silos: clipped updates, of which only a sum is used.

McMahan, Ramage, Talwar and Zhang, "Learning differentially private recurrent language models", ICLR
2018, algorithm 1 (DP-FedAvg). Clients train as in the plain round. They send nothing but their
clipped update (`silograph.federation.privacy.updates`), to which the engine, or the silo itself,
adds noise before it leaves. Neither loss, number of nodes nor counts leave.

What we changed: all called silos count alike, and those that are away count as zeros, so that the
denominator is fixed; the noise is integer, and is added by the silos, not by the server.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from silograph.core.kinds import Kind
from silograph.core.payload import Shared, Stacked, dense, tensors_under
from silograph.exchange.passes import weight_specs
from silograph.federation.base import Sum
from silograph.federation.field_specs import FieldSpec, FieldSpecs
from silograph.federation.messages import Empty
from silograph.federation.privacy.release import needs_noise
from silograph.federation.privacy.updates import clipped_updates, mean_update
from silograph.methods.base import MethodConfig, RoundReport
from silograph.methods.local_training import GlobalModel
from silograph.methods.ops import Clients, Server, op


def update_specs(cfg: MethodConfig) -> FieldSpecs:
    """Return the specs of updates: integers in the shapes of the run's weights."""
    own = weight_specs(cfg.model, Stacked, "update")
    return {name: FieldSpec(Stacked, spec.shape, torch.int64) for name, spec in own.items()}


@dataclass(frozen=True)
class ClippedUpdate:
    """Trained minus received weights as integers whose norm is bounded; noise is still to come."""

    update: Annotated[Mapping[str, Stacked], update_specs]


@needs_noise
@op(Kind.WEIGHTS)
def train_clipped(
    clients: Clients[Any], state: Empty, request: GlobalModel
) -> tuple[Empty, ClippedUpdate]:
    """Train E local epochs from w_t, and clip the update (UserUpdate)."""
    assert clients.cfg.privacy is not None  # else the round does not call it
    fitted = clients.fit(request.weights)
    trained = {name: dense(w) for name, w in fitted.weights.items()}
    start = {name: w.t if isinstance(w, Shared) else w for name, w in request.weights.items()}
    return state, ClippedUpdate(clipped_updates(trained, start, clients.cfg.privacy.clip))


def average_clipped(
    server: Server[Any], weights: Mapping[str, Tensor]
) -> tuple[Mapping[str, Tensor], RoundReport]:
    """Train at the selected clients; return received weights plus the mean update, and the report.

    Args:
        server: of the round.
        weights: w_t.
    """
    assert server.cfg.privacy is not None  # else the plain round is run
    client_ids = server.select()
    reply = server.call(train_clipped, GlobalModel(weights), to=client_ids, reduce=Sum())
    total = tensors_under("update", reply)
    mean = mean_update(total, weights, server.cfg.privacy.clip, len(client_ids))
    return mean, RoundReport(client_ids, None)
