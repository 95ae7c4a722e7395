"""What the ops of FedAIS read of a run and of a client's state.

The fields are those of `silograph.methods.fedais_clients`. C: clients.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from silograph.control import BOUND_INTERVAL
from silograph.core.payload import (
    Ragged,
    State,
)
from silograph.exchange.history import (
    ASKED,
    SEEN,
    rows_form,
    stored_in,
)
from silograph.exchange.passes import divisible
from silograph.exchange.pull import PullForm
from silograph.graph.block.block import ClientBlock, SparseRows
from silograph.methods.fedais_options import Config, controller_of
from silograph.nn.conv import Params
from silograph.nn.neighbors import FULL, Fanout, Neighbors
from silograph.nn.segment import segment_sum
from silograph.nn.steps import Held
from silograph.nn.stored_batches import (
    surroundings,
)
from silograph.nn.stored_rows import StoredRows, Surroundings

LOSSES = "importance/loss"


IN_TRAINING, BASE = "round/model/", "round/base/"


ROWS, SHARE = "round/rows", "round/share"


DONE = "round/done"  # (C,) int32 batches of this round so far


TALLY = "round/tally"  # (C, 4): loss, rows, ages, and slots, summed over the batches so far


FIXED_IN_ROUND = (ROWS, SHARE, ASKED, SEEN)


def neighbors_of(cfg: Config) -> Neighbors:
    """Return what draws the neighbors of a batch."""
    return Fanout((cfg.options.drawn,)) if cfg.options.drawn else FULL


def stored_of(cfg: Config, state: State) -> StoredRows:
    """Return the stored rows that the clients read."""
    return stored_in(state, halo=cfg.options.halo != "none")


def fields_under(prefix: str, state: State) -> Held:
    """Return the fields whose names begin so, without it."""
    return {k.removeprefix(prefix): f for k, f in state.items() if k.startswith(prefix)}


def is_compiled(cfg: Config) -> bool:
    """Return whether batches are trained by the compiled kernels.

    They read slots' rows from the second stage on; with shared features torch trains.
    """
    # Kernels of stored rows do not drop features of a batch's senders.
    drops = cfg.backend.compiled and divisible(cfg.model).stages[0].drop > 0
    return cfg.backend.compiled and not cfg.options.share_features and not drops


def trained_of(cfg: Config, state: State) -> Held:
    """Return the clients in training, weights by name; empty between rounds."""
    held = fields_under(IN_TRAINING, state)
    if not held or not is_compiled(cfg):
        return held
    from silograph.nn import stored_compiled  # numba takes a while to import

    return stored_compiled.unpacked(divisible(cfg.model), held)


def as_trained(cfg: Config, held: Held) -> Held:
    """Return clients before their first step in the form in which they are trained."""
    if not is_compiled(cfg):
        return held
    from silograph.nn import stored_compiled

    return stored_compiled.packed(divisible(cfg.model), held)


def sends_bytes(cfg: Config) -> bool:
    """Return whether rows of others come as bytes with a scale for each row."""
    return cfg.options.sent == "int8"


def pull_form_of(cfg: Config) -> PullForm:
    """Return what an exchange carries."""
    since = cfg.options.moved is not None
    return rows_form(divisible(cfg.model), small=sends_bytes(cfg), since=since)


def tells_moves(cfg: Config) -> bool:
    """Return whether clients tell how far their models have moved, which sets the interval."""
    return controller_of(cfg.options) is BOUND_INTERVAL


def squared_move(block: ClientBlock, held: Held, start: Mapping[str, Tensor]) -> Tensor:
    """Return the squared length of each client's move from shared weights, (C,) float64.

    Rows of features that a client does not have are left out: they only decay.
    """
    total = torch.zeros(block.num_clients, dtype=torch.float64, device=block.off.device)
    for name, field in ((k.removeprefix("weights/"), f) for k, f in held.items()):
        if name not in start:  # moments
            continue
        if isinstance(field, Ragged):
            assert isinstance(block.x, SparseRows)  # only then are there used rows
            change = field.t - start[name][block.x.used.feature]
            total += segment_sum(change.double().square().sum(1), field.off)
        else:
            change = (field.t - start[name]).double().flatten(1)
            total += change.square().sum(1)
    return total


def untouched(cfg: Config, weights: Mapping[str, Tensor], steps: int) -> Params:
    """Return what most rows of clients' first weights are after a round, to take a mean around."""
    if cfg.keep_optimizer or cfg.options.share_features:
        return {}
    found = {n: cfg.backend.rest(cfg.training, weights[n], steps) for n in cfg.model.first_maps}
    return {f"weights/{name}": w for name, w in found.items()}


def around_of(cfg: Config, block: ClientBlock) -> Surroundings:
    """Return the graph that the clients sum over."""
    return surroundings(block, halo=cfg.options.halo != "none")
