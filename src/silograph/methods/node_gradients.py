"""Rounds with differential privacy of nodes: sums of clipped gradients of single training nodes.

Daigavane, Madan, Sinha, Thakurta, Aggarwal and Jain, "Node-level differentially private graph
neural networks", 2021 (arXiv 2111.15521), algorithm 2. Each round is one step: a silo sums the
clipped gradients of its training nodes, each in its subgraph along few sampled edges. The engine,
or the silo itself, adds noise before the sum leaves, as it does for updates of whole silos
(`silograph.methods.clipped_updates`).

What we changed: a step takes all training nodes. A batch of a share q of them would have about q
times the signal, and after amplification about q times the noise, besides the noise of the draw.
So no draw must be secret, and the number of training nodes need not be public. Silos send sums, not
means, so the server divides by a public number: how far one node can move the sum, in clips.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from silograph.core.kinds import Kind
from silograph.core.payload import Shared, Stacked, tensors_under
from silograph.federation.base import Sum
from silograph.federation.messages import Empty
from silograph.federation.privacy.release import needs_noise
from silograph.federation.privacy.updates import CLIP_UNITS, clip_to_grid
from silograph.methods.base import RoundReport, ServerState
from silograph.methods.clipped_updates import ClippedUpdate
from silograph.methods.local_training import GlobalModel
from silograph.methods.ops import Clients, Server, op
from silograph.nn.bounded_subgraphs import gradients_by_node, num_hops


@needs_noise
@op(Kind.WEIGHTS)
def sum_clipped_gradients(
    clients: Clients[Any], state: Empty, request: GlobalModel
) -> tuple[Empty, ClippedUpdate]:
    """Sum the clipped gradients of all training nodes of each client; noise is still to come."""
    privacy, model, block = clients.cfg.privacy, clients.cfg.model.staged, clients.block
    assert privacy is not None  # else the round does not call it
    assert model is not None  # likewise
    assert num_hops(model) == privacy.hops  # which the noise is for
    weights = {n: w.t if isinstance(w, Shared) else w for n, w in request.weights.items()}
    shapes = {name: w.shape for name, w in weights.items()}
    sizes = [shape.numel() for shape in shapes.values()]
    total = torch.zeros(block.num_clients, sum(sizes), dtype=torch.int64)
    for gradients, owner in gradients_by_node(model, weights, block, privacy.degree, clients.key):
        clipped = clip_to_grid(gradients.cpu().numpy(), privacy.clip)
        total.index_add_(0, owner, torch.from_numpy(clipped))
    parts = zip(shapes.items(), total.to(block.off.device).split(sizes, 1), strict=True)
    fields = {n: Stacked(t.reshape(-1, *shape)) for (n, shape), t in parts}
    return state, ClippedUpdate(fields)


def step_along_gradients(
    server: Server[Any], state: ServerState
) -> tuple[ServerState, Mapping[str, Tensor], RoundReport]:
    """Take one step along the noised sum of the selected clients.

    Args:
        server: of the round.
        state: weights w_t.

    Returns:
        The state as it was, weights after the step, and the report.
    """
    privacy, optimizer, weights = server.cfg.privacy, server.cfg.optimizer, state.weights
    assert privacy is not None  # else the plain round is run
    assert weights is not None  # set by init
    client_ids = server.select()
    reply = server.call(sum_clipped_gradients, GlobalModel(weights), to=client_ids, reduce=Sum())
    total = tensors_under("update", reply)
    unit = privacy.clip / CLIP_UNITS / privacy.sensitivity / len(client_ids)
    new = {name: w.detach().clone()[None] for name, w in weights.items()}
    grads = {name: (total[name].double() * unit).to(w.dtype)[None] for name, w in weights.items()}
    optimizer.step_(new, grads, optimizer.init(new))
    return state, {name: w[0] for name, w in new.items()}, RoundReport(client_ids, None)
