"""Masks over the matrices of a model's layers: weights of their own, entry by entry.

C: clients.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import hardshrink

from silograph.core.key import Key
from silograph.core.payload import NO_STATE, State
from silograph.core.text import state_of_fields
from silograph.core.work import report_each
from silograph.graph.block.block import ClientBlock, Rows
from silograph.graph.graph import LabelForm
from silograph.nn import fit
from silograph.nn.conv import Conv, Messages, Params, Scales
from silograph.nn.forward import NO_TABLES, Stage, forward_pass, whole_pass
from silograph.nn.model import Model

MASK = "mask_"  # begins the name of a weight's mask, inside its layer


def is_mask(name: str) -> bool:
    """Whether a weight is a mask."""
    return name.partition(".")[2].startswith(MASK)


@dataclass(frozen=True)
class SparseMasks:
    """The gradient l1 sign(M) of the masks' L1 norm."""

    l1: float
    alike: ClassVar[bool] = False
    flops: ClassVar[int] = 2
    copies: ClassVar[int] = 1

    def of(self, clients: Tensor) -> "SparseMasks":
        """Return itself."""
        del clients
        return self

    def __call__(
        self, grads: Params, weights: Mapping[str, Tensor], start: Mapping[str, Tensor]
    ) -> Params:
        """Return the corrected gradients."""
        del start
        return {
            name: g.add(weights[name].sign(), alpha=self.l1) if is_mask(name) else g
            for name, g in grads.items()
        }


@dataclass(frozen=True)
class NearStart:
    """The gradient of the distance |W - V| of each tensor from where training started; 0 at V."""

    weight: float
    alike: ClassVar[bool] = False
    flops: ClassVar[int] = 6  # difference, norm 2, quotient, product, sum
    copies: ClassVar[int] = 1  # the start

    def of(self, clients: Tensor) -> "NearStart":
        """Return itself."""
        del clients
        return self

    def __call__(
        self, grads: Params, weights: Mapping[str, Tensor], start: Mapping[str, Tensor]
    ) -> Params:
        """Return the corrected gradients."""
        return {
            name: g if is_mask(name) else self._add_direction(g, weights[name] - start[name])
            for name, g in grads.items()
        }

    def _add_direction(self, grad: Tensor, difference: Tensor) -> Tensor:
        """Add the direction of the difference between weights and start to a gradient (C, ...)."""
        length = difference.flatten(1).norm(dim=1).view(-1, *[1] * (difference.dim() - 1))
        if not bool(length.any()):  # the first step of a round
            return grad
        scale = torch.where(length > 0, self.weight / length, 0.0)
        return difference.mul_(scale).add_(grad)


@dataclass(frozen=True)
class MaskedConv:
    """A convolution whose matrices have masks.

    Attributes:
        inner: the convolution.
        least: what a mask's entry must reach in evaluation.
    """

    inner: Conv
    least: float
    kernel: ClassVar[None] = None

    @property
    def name(self) -> str:
        """That of the convolution, with masks."""
        return f"masked {self.inner.name}"

    @property
    def sums(self) -> bool:
        """As of the convolution."""
        return self.inner.sums

    @property
    def scales(self) -> Scales | None:
        """As of the convolution."""
        return self.inner.scales

    @property
    def indivisible(self) -> str:
        """As of the convolution."""
        return self.inner.indivisible

    @property
    def maps(self) -> tuple[str, ...]:
        """Names of the matrices and of their masks."""
        return (*self.inner.maps, *(MASK + name for name in self.inner.maps))

    @property
    def rooted(self) -> bool:
        """As of the convolution."""
        return self.inner.rooted

    @property
    def weighs(self) -> bool:
        """As of the convolution."""
        return self.inner.weighs

    def init(self, key: Key, inputs: int, outputs: int) -> Params:
        """Return the convolution's weights, and masks of ones."""
        p = self.inner.init(key, inputs, outputs)
        return p | {MASK + name: torch.ones_like(p[name]) for name in self.inner.maps}

    def masked_weights(self, p: Mapping[str, Tensor]) -> Params:
        """Return the weights that the convolution computes with; without gradients, pruned ones."""
        masked_weights = {name: w for name, w in p.items() if not name.startswith(MASK)}
        for name in self.inner.maps:
            mask = p[MASK + name]
            if not torch.is_grad_enabled():  # in evaluation
                mask = prune_mask(mask, self.least)
            report_each(masked_weights[name][0].numel() * (3 if torch.is_grad_enabled() else 1))
            masked_weights[name] = masked_weights[name] * mask
        return masked_weights

    def map(self, p: Mapping[str, Tensor], x: Rows, off: Tensor) -> Tensor:
        """Return z (n, O)."""
        return self.inner.map(self.masked_weights(p), x, off)

    def combine(self, p: Mapping[str, Tensor], z: Tensor, m: Messages) -> Tensor:
        """Return the sum over neighbors, s (r, O)."""
        return self.inner.combine(p, z, m)

    def finish(self, p: Mapping[str, Tensor], x: Rows, s: Tensor, m: Messages) -> Tensor:
        """Return the output (n, O)."""
        return self.inner.finish(self.masked_weights(p) if self.rooted else p, x, s, m)


def prune_mask(mask: Tensor, least: float) -> Tensor:
    """Return a mask with 0 where |M| is below the least value, in one pass."""
    limit = torch.tensor(least, dtype=mask.dtype)  # `hardshrink` cuts off what is on the edge, too
    return hardshrink(mask, float(limit.nextafter(limit.new_tensor(-torch.inf))))


@dataclass(frozen=True)
class Masked:
    """A model of layers whose matrices have masks, which are weights as all others.

    Attributes:
        inner: the model.
        least: see `MaskedConv`.
    """

    inner: Model
    least: float
    single_client_only: ClassVar[bool] = False
    meets_all: ClassVar[bool] = False
    solved_flops: ClassVar[int] = 0
    source: ClassVar[None] = None
    table_widths: ClassVar[Mapping[str, int]] = NO_TABLES

    __getstate__ = state_of_fields

    @property
    def features(self) -> int:
        """F."""
        return self.inner.features

    @property
    def outputs(self) -> int:
        """K."""
        return self.inner.outputs

    @property
    def task(self) -> LabelForm:
        """As of the model."""
        return self.inner.task

    @property
    def noun(self) -> str:
        """As of the model, with masks."""
        return f"{self.inner.noun} with masks"

    @property
    def staged(self) -> "Masked":
        """The model itself."""
        return self

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The stages."""
        return tuple(
            replace(stage, conv=MaskedConv(stage.conv, self.least)) for stage in self.inner.stages
        )

    @cached_property
    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every weight and mask."""
        shapes = self.inner.weight_shapes
        masks = {mask: shapes[name] for name, mask in self.masks.items()}
        return MappingProxyType({**shapes, **masks})

    @property
    def masks(self) -> dict[str, str]:
        """The name of the mask of every matrix that has one."""
        return {
            f"{number}.{name}": f"{number}.{MASK}{name}"
            for number, stage in enumerate(self.inner.stages)
            for name in stage.conv.maps
        }

    @property
    def first_maps(self) -> tuple[str, ...]:
        """Names of the weights that meet the features, and of their masks."""
        return tuple(f"0.{name}" for name in self.stages[0].conv.maps)

    def init_weights(self, key: Key, dtype: torch.dtype) -> Params:
        """Return the model's initial weights, and masks of ones."""
        weights = self.inner.init_weights(key, dtype)
        return weights | {m: torch.ones_like(weights[name]) for name, m in self.masks.items()}

    def forward(
        self, weights: Mapping[str, Tensor], block: ClientBlock, *, tables: State = NO_STATE
    ) -> Tensor:
        """Return logits (n, K) from internal edges; there are no tables."""
        del tables
        dtype = next(iter(weights.values())).dtype
        return forward_pass(self, weights, whole_pass(self, block, dtype), None)

    def products_(
        self, weights: Mapping[str, Tensor], pruned_masks: Mapping[str, Tensor]
    ) -> Params:
        """Return weights with which the model without masks predicts the same.

        Args:
            weights: without masks.
            pruned_masks: they are overwritten by the products.
        """
        return {
            name: pruned_masks[self.masks[name]].mul_(weights[name])
            if name in self.masks
            else weights[name]
            for name in self.inner.weight_shapes
        }

    fit = fit.fit

    def first_tables(self, block: ClientBlock, key: Key) -> State:
        """There are no tables."""
        del block, key
        return NO_STATE

    def described(self) -> dict[str, Any]:
        """Return the shape as plain values."""
        return asdict(self)
