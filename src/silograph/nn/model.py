"""A model is a row of stages: convolutions, with ReLU and dropout between them.

n: rows. F: features. K: outputs (classes or label bits). C: clients.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from silograph.core.errors import ConfigError, lookup
from silograph.core.key import Key
from silograph.core.payload import NO_STATE, State
from silograph.core.text import state_of_fields
from silograph.core.work import report_entries, report_rows
from silograph.graph.block.block import ClientBlock, Rows, SparseRows
from silograph.graph.graph import LabelForm
from silograph.nn import fit
from silograph.nn.conv import (
    GAT,
    GCN,
    GIN,
    MLP,
    SAGE,
    Conv,
    Directed,
    GraphConv,
    Params,
    PlainConv,
    Propagation,
    Scales,
    is_before_sum,
)
from silograph.nn.forward import (
    NO_TABLES,
    Stage,
    Staged,
    after_dropout,
    dropout_factors,
    forward_pass,
    leave,
    whole_pass,
)
from silograph.nn.model_options import MODEL_KINDS, ModelKind
from silograph.nn.reach import Reach, used_features
from silograph.nn.segment import gradients, product_gradients, segment_sum, sparse_product

DRAWN_AT_MOST = 1 << 22  # entries of a weight that is drawn only to learn its shape


@dataclass(frozen=True)
class Model:
    """The shape of a model; its weights are a flat mapping, names like `0.weight`.

    Attributes:
        conv: name in `MODELS`.
        features: F.
        hidden: width of the hidden layers, or a width for each of them.
        outputs: K.
        layers: number of layers with weights.
        dropout: probability with which a hidden activation is dropped in training.
        task: what the outputs mean.
        residual: whether hidden layers add their input to their output.
        heads: attention heads of `gat`.
        hops: propagation steps of `appnp`.
        teleport: weight of a prediction in each of them.
        head: what the last layer is: a convolution as the others, or a linear classifier.
        input_dropout: probability with which a feature is dropped in training.
        attention_dropout: the same for the attention of `gat`.
        directed: which way messages pass an edge; none: both ways.
    """

    conv: str
    features: int
    hidden: int | tuple[int, ...]
    outputs: int
    layers: int
    dropout: float
    task: LabelForm
    residual: bool = False
    heads: int = 1
    hops: int = 0
    teleport: float = 0.0
    head: Literal["conv", "linear"] = "conv"
    input_dropout: float = 0.0
    attention_dropout: float = 0.0
    directed: Literal["none", "along", "against", "both"] = "none"

    __getstate__ = state_of_fields

    def __post_init__(self) -> None:
        """Raise `ConfigError` unless there is a width for each hidden layer."""
        if isinstance(self.hidden, tuple) and len(self.hidden) != self.layers - 1:
            count = self.layers - 1
            raise ConfigError(
                f"expected a width for each of {count} hidden layers, got {len(self.hidden)}"
            )

    @property
    def widths(self) -> list[int]:
        """F, hidden, ..., K."""
        hidden = self.hidden
        if isinstance(hidden, int):
            hidden = (hidden,) * (self.layers - 1)
        return [self.features, *hidden, self.outputs]

    single_client_only = False
    meets_all = False
    solved_flops = 0
    source = None
    table_widths = NO_TABLES

    @property
    def noun(self) -> str:
        """The name of its convolution, and which way its messages go, in messages."""
        way = "" if self.directed == "none" else f" with directed={self.directed}"
        return f"model {self.conv}{way}"

    @cached_property
    def staged(self) -> "Model":
        """The model itself."""
        return self

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The stages; weights of stage i are named `i.NAME`.

        Raises:
            ConfigError: no such model.
        """
        stages = lookup(MODELS, self.conv, "model")(self)
        way = self.directed
        if way == "none":
            return stages
        return tuple(
            dataclasses.replace(stage, conv=Directed(stage.conv, way)) if stage.conv.sums else stage
            for stage in stages
        )

    @cached_property
    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every weight, shared form."""
        largest_size = max(stage.inputs * stage.outputs for stage in self.stages)
        # On the meta device nothing is drawn, whatever sizes a file or a server asks for; but it
        # imports torch's compiler, which takes longer than drawing a model of usual size.
        with torch.device("meta" if largest_size > DRAWN_AT_MOST else "cpu"):
            weights = self.init_weights(Key.of(0), torch.float32)
        return MappingProxyType({name: tuple(w.shape) for name, w in weights.items()})

    @cached_property
    def first_maps(self) -> tuple[str, ...]:
        """Names of the weights that meet the features, and meet them linearly."""
        return tuple(f"0.{name}" for name in self.stages[0].conv.maps)

    def init_weights(self, key: Key, dtype: torch.dtype) -> Params:
        """Return initial weights; drawn in float64, so that dtypes start from the same numbers."""
        return {
            f"{number}.{name}": value.to(dtype)
            for number, s in enumerate(self.stages)
            for name, value in s.conv.init(key.fold(number), s.inputs, s.outputs).items()
        }

    def forward(
        self,
        weights: Mapping[str, Tensor],
        block: ClientBlock,
        key: Key | None = None,
        *,
        tables: State = NO_STATE,
    ) -> Tensor:
        """Return logits (n, K) from internal edges.

        Args:
            weights: shared by all clients, or with a leading dimension C.
            block: the rows.
            key: key of the dropout draws; None turns dropout off.
            tables: none.
        """
        del tables
        dtype = next(iter(weights.values())).dtype
        return forward_pass(self, weights, whole_pass(self, block, dtype), key)

    fit = fit.fit

    def first_tables(self, block: ClientBlock, key: Key) -> State:
        """There are no tables."""
        del block, key
        return NO_STATE

    def described(self) -> dict[str, Any]:
        """Return the shape as plain values."""
        values = dataclasses.asdict(self)
        if self.directed == "none":  # as files of models say that were written before
            del values["directed"]
        return values


def layers_of(model: Model, conv: Callable[[int], Conv]) -> tuple[Stage, ...]:
    """Return layers with ReLU and dropout between them; `conv` gets the number of the layer."""
    last = model.layers - 1
    return tuple(
        Stage(
            MLP if layer == last and model.head == "linear" else conv(layer),
            inputs,
            outputs,
            drop=model.dropout if layer else model.input_dropout,
            relu=layer < last,
            # Kipf and Welling, ICLR 2017, eq. 14, where widths are equal.
            skip=model.residual and 0 < layer < last,
            edge_drop=model.attention_dropout,
        )
        for layer, (inputs, outputs) in enumerate(itertools.pairwise(model.widths))
    )


def _perceptron(model: Model, layer: int) -> int:
    """Return the width inside a layer of `gin`: that of the hidden layer, in the last as before."""
    if isinstance(model.hidden, int):
        return model.hidden
    return model.hidden[min(layer, len(model.hidden) - 1)]


def _appnp(model: Model) -> tuple[Stage, ...]:
    """Return an MLP and then `hops` steps that mix its predictions (see `Propagation`)."""
    step = Stage(
        Propagation(model.teleport),
        model.outputs,
        model.outputs,
        drop=0.0,
        relu=False,
        teleport=model.teleport,
    )
    return layers_of(model, lambda _: MLP) + (step,) * model.hops


MODELS: dict[str, Callable[[Model], tuple[Stage, ...]]] = {
    "gcn": lambda model: layers_of(model, lambda _: GCN),
    "sage": lambda model: layers_of(model, lambda _: SAGE),
    "graphconv": lambda model: layers_of(model, lambda _: GraphConv),
    "gin": lambda model: layers_of(model, lambda layer: GIN(_perceptron(model, layer))),
    "gat": lambda model: layers_of(model, lambda layer: GAT(model.heads, layer < model.layers - 1)),
    "appnp": _appnp,
    "mlp": lambda model: layers_of(model, lambda _: MLP),
}


def add_model(kind: ModelKind, stages: Callable[[Model], tuple[Stage, ...]]) -> None:
    """Add a model to those that a run of this process can name.

    Args:
        kind: its name, title, reference and options, such as `LayerOptions`.
        stages: its layers, from the shape of a model; see `layers_of`.

    Raises:
        ConfigError: there is another model of that name.
    """
    if kind.name in MODEL_KINDS or kind.name in MODELS:
        raise ConfigError(f"expected a new name of a model, got {kind.name!r}: choose another one")
    MODELS[kind.name] = stages
    MODEL_KINDS[kind.name] = kind


# --- A stage in two halves, before and after its sum over neighbors, forward and backward --------
#
#     z = before(x)          dropout, the linear map      gradients of x and of the map's weights
#     s = the sum, which other silos share (see `silograph.nn.reach`)
#     x' = after(x, s)       bias, self terms, ReLU       gradients of x, s and the other weights
#
# Between the halves silos exchange rows, and no autograd graph outlives an op: each half is
# computed anew on the way back, from what entered it.
#
# C: clients. r: rows that take part. I, O: width before and after. F: features. U: used features.


@dataclass(frozen=True, eq=False)
class Inputs:
    """The inputs of both halves of a stage.

    Attributes:
        model: the shape.
        number: of the stage, from 0.
        x: (r, I) inputs; features in compact form if sparse (see `entering`).
        origin: (r, O) inputs of the first stage with a restart; None before that stage.
        key: key of the step; None turns dropout off.
        reach: the rows and edges of the pass.
    """

    model: Staged
    number: int
    x: Rows
    origin: Tensor | None
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
    """Return the features of the rows that take part; sparse ones of a part as used columns."""
    if len(reach.rows) == len(block.row_key):
        return block.x
    if not isinstance(block.x, SparseRows):
        return block.x.index_select(0, reach.rows)
    used = used_features(block.x, reach)
    return SparseRows(used.csr, reach.off, feature=used.feature)


def _with_used_columns(x: Rows) -> Rows:
    """Return sparse features as used columns only, (r, U)."""
    if not isinstance(x, SparseRows) or x.feature is not None:
        return x
    return SparseRows(x.used.csr, x.off, feature=x.used.feature)


Half = Literal["before", "after"]  # of a stage: up to its sum, and from it on


def stage_weights(number: int, weights: Mapping[str, Tensor], half: Half | None = None) -> Params:
    """Return the weights of a stage, shared form, without prefix.

    `half`: return only those that it reads.
    """
    prefix = f"{number}."
    params = {k.removeprefix(prefix): w for k, w in weights.items() if k.startswith(prefix)}
    if half is not None:
        params = {k: w for k, w in params.items() if is_before_sum(k) == (half == "before")}
    return params


def _meeting_features(params: Mapping[str, Tensor], stage_inputs: Inputs) -> Mapping[str, Tensor]:
    """Return weights with the rows that the columns of the inputs meet."""
    x = stage_inputs.x
    if not isinstance(x, SparseRows) or x.feature is None:
        return params
    maps = stage_inputs.stage.conv.maps
    return {name: w.index_select(0, x.feature) if name in maps else w for name, w in params.items()}


def _with_all_columns(stage_inputs: Inputs) -> Inputs:
    """Return inputs whose sparse features meet whole weights: fewer rows than weights' are read."""
    at, x = stage_inputs, stage_inputs.x
    if not isinstance(x, SparseRows) or x.feature is None:
        return at
    operators, name = at.reach.operators, "features, all columns"
    if name not in operators:
        columns = x.feature[x.csr.indices.long()]
        operators[name] = x.csr.with_columns(columns, at.model.stages[0].inputs)
    return replace(at, x=SparseRows(operators[name], x.off))


def before(params: Mapping[str, Tensor], stage_inputs: Inputs) -> Tensor:
    """Return z, (r, O).

    Without dropout z of sparse features depends on the weight alone. The latest one is kept on the
    reach, so that scoring and the next pass with equal weights compute it once. Callers must not
    write to z.
    """
    at = _with_all_columns(stage_inputs)
    x = at.x
    drops = at.key is not None and at.stage.drop > 0
    # Other convolutions may map otherwise, and report other work.
    is_product = isinstance(at.stage.conv, PlainConv | GIN)
    if drops or not is_product or not isinstance(x, SparseRows):
        return _before(params, at)
    weight = params["weight"]
    known = known_product(at.reach, weight)
    if known is not None:
        report_entries(x.csr.indptr, at.reach.off, 2 * weight.shape[-1])
        return known
    z = _before(params, at)
    if at.key is None:
        at.reach.feature_product[:] = [(_bits_of(weight).copy(), z)]
    return z


def known_product(reach: Reach, weight: Tensor) -> Tensor | None:
    """Return the product z (r, H) that `before` has cached, if it is that of a weight (F, H)."""
    if not reach.feature_product:
        return None
    (latest, product), bits = reach.feature_product[0], _bits_of(weight)
    # NumPy takes a quarter of the time of `torch.equal`, and bits tell 0 from -0. Most other
    # weights differ in the first row.
    same = np.array_equal(latest[:1], bits[:1]) and np.array_equal(latest, bits)
    return product if same else None


def _bits_of(weight: Tensor) -> np.ndarray:
    """Return the bits of a weight as int32, to compare them."""
    bits: np.ndarray = weight.detach().contiguous().view(torch.int32).cpu().numpy()
    return bits


def _before(params: Mapping[str, Tensor], stage_inputs: Inputs) -> Tensor:
    """Return z, (r, O), from weights whose rows the columns of the inputs meet."""
    return stage_inputs.stage.conv.map(
        params, _inputs_after_dropout(stage_inputs), stage_inputs.reach.off
    )


def after(params: Mapping[str, Tensor], stage_inputs: Inputs, s: Tensor) -> Tensor:
    """Return the outputs of the stage, (r, O)."""
    return _after(params, _with_all_columns(stage_inputs), s)


def _after(params: Mapping[str, Tensor], stage_inputs: Inputs, s: Tensor) -> Tensor:
    """Do what `after` does, from weights whose rows the columns of the inputs meet."""
    conv, messages = stage_inputs.stage.conv, stage_inputs.reach.messages
    # Dropout is drawn anew by every half, so only where it is looked at.
    out = conv.finish(
        params, _inputs_after_dropout(stage_inputs) if conv.rooted else stage_inputs.x, s, messages
    )
    return leave(stage_inputs.stage, out, stage_inputs.x, stage_inputs.origin, messages)


def before_back(
    params: Mapping[str, Tensor], stage_inputs: Inputs, grad: Tensor, clients: int
) -> Gradients:
    """Return the gradients of `before` from dLoss/dz (r, O)."""
    conv = stage_inputs.stage.conv
    if isinstance(stage_inputs.x, Tensor):
        if isinstance(conv, PlainConv):
            return _gradients_of_product(params, stage_inputs, stage_inputs.x, grad, clients)
    elif params.keys() <= set(conv.maps):
        return _gradients_of_map(params, stage_inputs, grad)
    return _half_gradients(params, stage_inputs, None, grad, clients)


def after_back(
    params: Mapping[str, Tensor],
    stage_inputs: Inputs,
    s: Tensor,
    outputs: Tensor,
    grad: Tensor,
    clients: int,
) -> Gradients:
    """Return the gradients of `after` from those of the stage's outputs (r, O)."""
    stage = stage_inputs.stage
    is_plain = isinstance(stage.conv, PlainConv) and not stage.conv.rooted
    if is_plain and not stage.skip and stage_inputs.origin is None:
        return _gradients_of_bias(stage_inputs, outputs, grad)
    return _half_gradients(params, stage_inputs, s, grad, clients)


def _gradients_of_map(
    params: Mapping[str, Tensor], stage_inputs: Inputs, grad: Tensor
) -> Gradients:
    """Return the gradients of weights that meet sparse features linearly: z itself is not needed.

    The work reported is that of autograd, which computes z once more.
    """
    at = replace(stage_inputs, x=_with_used_columns(stage_inputs.x))
    x = _inputs_after_dropout(at)
    assert isinstance(x, SparseRows)  # see `before_back`
    weights = dict[str, Tensor]()
    for name in params:
        report_entries(x.csr.indptr, at.reach.off, 4 * grad.shape[1])
        weights[name] = sparse_product(x.csr.transposed, grad)
    return Gradients(None, None, None, weights)


def _gradients_of_product(
    params: Mapping[str, Tensor], stage_inputs: Inputs, x: Tensor, grad: Tensor, clients: int
) -> Gradients:
    """Return the gradients of dropout and a product x W; the work reported is that of autograd."""
    weight, off = params["weight"], stage_inputs.reach.off
    inputs, outputs = weight.shape
    of_x = stage_inputs.number > 0
    dropped = _inputs_after_dropout(stage_inputs)
    assert isinstance(dropped, Tensor)  # as x
    report_rows(off, 2 * inputs * outputs * (2 + of_x))
    weights, sizes = weight.expand(clients, *weight.shape), off.diff().tolist()
    grad_x, grad_weight = product_gradients(dropped, weights, grad, sizes, of_x=of_x)
    if grad_x is not None and dropped is not x:
        report_rows(off, 2 * inputs)
        grad_x *= stage_inputs.reach.dropout_masks[stage_inputs.number][1]
    return Gradients(grad_x, None, None, {"weight": grad_weight})


def _gradients_of_bias(stage_inputs: Inputs, outputs: Tensor, grad: Tensor) -> Gradients:
    """Return the gradients of a bias and ReLU; the work reported is that of autograd."""
    off = stage_inputs.reach.off
    report_rows(off, 2 * grad.shape[1] * (1 + stage_inputs.stage.relu))
    if stage_inputs.stage.relu:
        grad = torch.ops.aten.threshold_backward(grad, outputs, 0)
    return Gradients(None, grad, None, {"bias": segment_sum(grad, off)})


def _half_gradients(
    params: Mapping[str, Tensor], stage_inputs: Inputs, s: Tensor | None, grad: Tensor, clients: int
) -> Gradients:
    leaves: dict[str, Tensor] = {}
    x = _with_used_columns(stage_inputs.x)
    stage_inputs = replace(stage_inputs, x=x)
    params = _meeting_features(params, stage_inputs)
    if isinstance(x, Tensor) and stage_inputs.number > 0:
        x = leaves["x"] = x.detach().requires_grad_()
    origin = stage_inputs.origin
    if origin is not None:
        origin = leaves["origin"] = origin.detach().requires_grad_()
    if s is not None:
        s = leaves["s"] = s.detach().requires_grad_()
    client_weights = {
        name: _weights_of_clients(w, stage_inputs, name, clients).requires_grad_()
        for name, w in params.items()
    }
    leaf_inputs = Inputs(
        stage_inputs.model,
        stage_inputs.number,
        x,
        origin,
        stage_inputs.key,
        stage_inputs.reach,
    )
    with torch.enable_grad():
        out = (
            _before(client_weights, leaf_inputs)
            if s is None
            else _after(client_weights, leaf_inputs, s)
        )
    if not out.requires_grad:  # no input has a gradient
        return Gradients(None, None, None, {})
    differentiated = [*leaves.values(), *client_weights.values()]
    gradients = torch.autograd.grad(out, differentiated, grad, allow_unused=True)
    grads = dict(
        zip([*leaves, *(f"weights/{name}" for name in client_weights)], gradients, strict=True)
    )
    weights = {name: g for name in client_weights if (g := grads[f"weights/{name}"]) is not None}
    return Gradients(grads.get("x"), grads.get("s"), grads.get("origin"), weights)


def _weights_of_clients(w: Tensor, stage_inputs: Inputs, name: str, clients: int) -> Tensor:
    """Return weights with a slice for each client, so that each has a gradient of its own.

    Compact weights have rows of their own for each client already; nothing writes to them.
    """
    if (
        stage_inputs.number == 0
        and isinstance(stage_inputs.x, SparseRows)
        and name in stage_inputs.stage.conv.maps
    ):
        return w.detach()
    return w.detach().expand(clients, *w.shape)


def _inputs_after_dropout(stage_inputs: Inputs) -> Rows:
    """Return the inputs of the convolution, after dropout."""
    at, stage, x, reach = stage_inputs, stage_inputs.stage, stage_inputs.x, stage_inputs.reach
    if at.key is None or stage.drop == 0 or isinstance(x, SparseRows):
        return after_dropout(stage, at.number, x, reach.row_key, reach.off, at.key)
    # Drawn once for the ways forward and back.
    name = at.key, stage.drop, x.shape[1]
    latest = reach.dropout_masks.get(at.number)
    if latest is None or latest[0] != name:
        key = at.key.fold("dropout", at.number)
        factors = dropout_factors(reach.row_key, x, stage.drop, key)
        latest = reach.dropout_masks[at.number] = name, factors
    report_rows(reach.off, 2 * x.shape[1] * (1 + gradients(x)))
    return x * latest[1]
