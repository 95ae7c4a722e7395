"""A model is a row of stages: convolutions, with ReLU and dropout between them.

n: rows. F: features. K: outputs (classes or label bits). C: clients.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from silograph.core.errors import ConfigError, lookup
from silograph.core.key import Key
from silograph.core.payload import NO_STATE, State
from silograph.core.pickling import state_of_fields
from silograph.graph.block.block import ClientBlock
from silograph.graph.graph import LabelForm
from silograph.nn import fit
from silograph.nn.any_model import NO_TABLES
from silograph.nn.conv import Conv, Params
from silograph.nn.conv.gat import GAT
from silograph.nn.conv.gcn import GCN
from silograph.nn.conv.gin import GIN
from silograph.nn.conv.graphconv import GraphConv
from silograph.nn.conv.mlp import MLP
from silograph.nn.conv.propagation import Propagation
from silograph.nn.conv.sage import SAGE
from silograph.nn.forward import Stage, forward_pass, whole_pass
from silograph.nn.model_options import MODEL_KINDS, ModelKind
from silograph.nn.schedule import Fitted, Training, TrainingInputs

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

    one_by_one = False
    meets_all = False
    solved_flops = 0
    source = None
    table_widths = NO_TABLES

    @property
    def noun(self) -> str:
        """Its convolution."""
        return f"model {self.conv}"

    @property
    def staged(self) -> "Model":
        """The model itself."""
        return self

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The stages; weights of stage i are named `i.NAME`.

        Raises:
            ConfigError: no such model.
        """
        return lookup(MODELS, self.conv, "model")(self)

    @cached_property
    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every weight, shared form."""
        largest = max(stage.inputs * stage.outputs for stage in self.stages)
        # On the meta device nothing is drawn, whatever sizes a file or a server asks for; but it
        # imports torch's compiler, which takes longer than drawing a model of usual size.
        with torch.device("meta" if largest > DRAWN_AT_MOST else "cpu"):
            weights = self.init_weights(Key.of(0), torch.float32)
        return MappingProxyType({name: tuple(w.shape) for name, w in weights.items()})

    @property
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

    def fit(self, training: Training, inputs: TrainingInputs) -> Fitted:
        """Train every client of a block; see `silograph.nn.fit.fit`."""
        return fit.fit(self, training, inputs)

    def first_tables(self, block: ClientBlock, key: Key) -> State:
        """There are no tables."""
        del block, key
        return NO_STATE

    def described(self) -> dict[str, Any]:
        """Return the shape as plain values."""
        return dataclasses.asdict(self)


def layers_of(model: Model, conv: Callable[[int], Conv]) -> tuple[Stage, ...]:
    """Return layers with ReLU and dropout between them; `conv` is told which one it is."""
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
