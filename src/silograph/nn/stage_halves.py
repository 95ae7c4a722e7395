"""A stage in two halves, before and after its sum over neighbors, forward and backward.

    z = before(x)          dropout, the linear map      gradients of x and of the map's weights
    s = the sum, which other silos share (see `silograph.nn.reach`)
    x' = after(x, s)       bias, self terms, ReLU       gradients of x, s and the other weights

Between the halves silos exchange rows, and no autograd graph outlives an op: each half is computed
anew on the way back, from what entered it.

C: clients. r: rows that take part. I, O: width before and after. F: features. U: used features.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from silograph.core.errors import ConfigError
from silograph.core.key import Key
from silograph.graph.block.block import ClientBlock, Rows, SparseRows
from silograph.nn.conv import Conv, Params, Scales
from silograph.nn.forward import Stage, Staged, after_dropout, leave
from silograph.nn.reach import Reach


@dataclass(frozen=True, eq=False)
class Inputs:
    """What both halves of a stage read.

    Attributes:
        model: the shape.
        number: of the stage, from 0.
        x: (r, I) what enters; features in compact form if sparse (see `entering`).
        origin: (r, O) what entered the first stage with a restart; None before that stage.
        row_key: (r,) of the rows.
        key: key of the step; None turns dropout off.
        reach: who hears whom.
    """

    model: Staged
    number: int
    x: Rows
    origin: Tensor | None
    row_key: Tensor
    key: Key | None
    reach: Reach

    @property
    def stage(self) -> Stage:
        """The stage."""
        return self.model.stages[self.number]


@dataclass(frozen=True, eq=False)
class Gradients:
    """Gradients of a half.

    Attributes:
        x: (r, I); None for features.
        s: (r, O) of the sum, or of z; None where a half has none.
        origin: (r, O) or None.
        weights: of each client, (C, ...); of compact weights (U, H).
    """

    x: Tensor | None
    s: Tensor | None
    origin: Tensor | None
    weights: Params


def scales_of(conv: Conv) -> Scales:
    """Return the scales of a sum; raise `ConfigError` where silos cannot share it."""
    if conv.scales is None:
        raise ConfigError(
            f"expected a model whose sums can be shared, got {conv.name}: "
            f"{conv.indivisible}; use model=gcn, graphconv, gin, sage or appnp"
        )
    return conv.scales


def entering(block: ClientBlock, reach: Reach) -> Rows:
    """Return the features of the rows that take part; sparse ones as used columns only, (r, U)."""
    everything = len(reach.rows) == len(block.row_key)
    if not isinstance(block.x, SparseRows):
        return block.x if everything else block.x[reach.rows]
    if "features" not in reach.operators:  # every op of a pass wants them, and their transpose
        used = block.x.used.csr
        reach.operators["features"] = used if everything else used.select_rows(reach.rows)
    return SparseRows(reach.operators["features"], reach.off, feature=block.x.used.feature)


def stage_weights(
    block: ClientBlock, number: int, stage: Stage, weights: Mapping[str, Tensor]
) -> Params:
    """Return the weights of a stage, shared form, without prefix; compact where x is sparse."""
    prefix = f"{number}."
    params = {k.removeprefix(prefix): w for k, w in weights.items() if k.startswith(prefix)}
    if number == 0 and isinstance(block.x, SparseRows):
        for name in stage.conv.maps:
            params[name] = params[name][block.x.used.feature]
    return params


def before(params: Mapping[str, Tensor], at: Inputs) -> Tensor:
    """Return z, (r, O)."""
    return at.stage.conv.map(params, _dropped(at), at.reach.off)


def after(params: Mapping[str, Tensor], at: Inputs, s: Tensor) -> Tensor:
    """Return what leaves the stage, (r, O)."""
    conv, messages = at.stage.conv, at.reach.messages
    # Dropout is drawn anew by every half, so only where it is looked at.
    out = conv.finish(params, _dropped(at) if conv.rooted else at.x, s, messages)
    return leave(at.stage, out, at.x, at.origin, messages)


def before_back(params: Mapping[str, Tensor], at: Inputs, grad: Tensor, clients: int) -> Gradients:
    """Return the gradients of `before` from dLoss/dz (r, O)."""
    return _back(params, at, None, grad, clients)


def after_back(
    params: Mapping[str, Tensor], at: Inputs, s: Tensor, grad: Tensor, clients: int
) -> Gradients:
    """Return the gradients of `after` from those of what leaves the stage (r, O)."""
    return _back(params, at, s, grad, clients)


def _back(
    params: Mapping[str, Tensor], at: Inputs, s: Tensor | None, grad: Tensor, clients: int
) -> Gradients:
    leaves: dict[str, Tensor] = {}
    x: Rows = at.x
    if isinstance(x, Tensor) and at.number > 0:
        x = leaves["x"] = x.detach().requires_grad_()
    origin = at.origin
    if origin is not None:
        origin = leaves["origin"] = origin.detach().requires_grad_()
    if s is not None:
        s = leaves["s"] = s.detach().requires_grad_()
    own = {name: _of_clients(w, at, name, clients).requires_grad_() for name, w in params.items()}
    inputs = Inputs(at.model, at.number, x, origin, at.row_key, at.key, at.reach)
    with torch.enable_grad():
        out = before(own, inputs) if s is None else after(own, inputs, s)
    if not out.requires_grad:  # nothing that learns comes in
        return Gradients(None, None, None, {})
    wanted = [*leaves.values(), *own.values()]
    found = torch.autograd.grad(out, wanted, grad, allow_unused=True)
    grads = dict(zip([*leaves, *(f"weights/{name}" for name in own)], found, strict=True))
    weights = {name: g for name in own if (g := grads[f"weights/{name}"]) is not None}
    return Gradients(grads.get("x"), grads.get("s"), grads.get("origin"), weights)


def _of_clients(w: Tensor, at: Inputs, name: str, clients: int) -> Tensor:
    """Return weights that every client has its own gradient of: compact ones have that already."""
    if at.number == 0 and isinstance(at.x, SparseRows) and name in at.stage.conv.maps:
        return w.detach().clone()
    return w.detach().expand(clients, *w.shape)


def _dropped(at: Inputs) -> Rows:
    """Return what enters the convolution, after dropout."""
    return after_dropout(at.stage, at.number, at.x, at.row_key, at.reach.off, at.key)
