"""Weights on their way: as float16, bytes or half bytes, and only the rows that a client uses.

Three things that any method which averages weights can use (`SentWeights`):

- *Down*, matrices are rounded to float16, or to bytes or half bytes with a scale for each row. The
  server keeps its own weights as they are, so what is rounded does not add up over rounds.
- *Up*, clients send by how much a matrix has changed from what they got, rounded likewise. What
  was rounded off waits in their state and is added to the next change (error feedback: Seide, Fu,
  Droppo, Li and Yu, INTERSPEECH 2014; Karimireddy, Rebjock, Stich and Jaggi, ICML 2019). So the
  sum of what a client has sent is the sum of its changes, less what waits.
- *Used rows*: a client gets and sends the rows of first weights whose features occur at its nodes;
  the server works out the others, which no data moves (`silograph.federation.decoder`). This is
  exact, and it shows the server which features occur at a client.

Vectors (biases) always travel exactly.

State of a client: `sent/used` (U,) int32 features that occur, `sent/left/NAME` what was rounded
off: (U, D) of first weights, (C, ...) of others. C: clients. R: rows of a matrix.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import (
    Field,
    Patched,
    Payload,
    Ragged,
    Shared,
    Stacked,
    State,
    StateField,
    owners,
    take,
)
from silograph.core.setting_values import SentWeights
from silograph.exchange.passes import weight_specs
from silograph.exchange.rows import learn_rows, learn_rows_steps, row_numbers
from silograph.federation.base import Federation, WeightedMean
from silograph.federation.decoder import (
    LARGEST,
    SCALE,
    SCALED,
    Decoder,
    as_bytes,
    as_half_bytes,
    as_halves,
    from_small,
    packed_width,
    rows_for,
    rows_from,
    unpacked,
)
from silograph.federation.field_specs import FieldSpec, FieldSpecs
from silograph.federation.program import Call, Steps
from silograph.graph.block.block import ClientBlock, SparseRows
from silograph.nn.conv import Params
from silograph.nn.fit import dtype_of
from silograph.nn.forward import AnyModel

USED, LEFT = "sent/used", "sent/left/"
FIRST, OFF = "sent/used", "sent/off"  # of the server's memory: used rows of all clients
NAMES = "weights/"
SMALL_DTYPES = {"float16": torch.float16, "int8": torch.int8, "int4": torch.uint8}


class SendingConfig(Protocol):
    """The settings that decide how a method's weights are sent; see `MethodConfig`."""

    @property
    def model(self) -> AnyModel:
        """The model."""

    @property
    def sent(self) -> SentWeights:
        """How its weights are encoded."""

    @property
    def keep_optimizer(self) -> bool:
        """Whether clients keep what the optimizer remembers."""


@dataclass(frozen=True)
class WeightsForm:
    """The form of messages with weights in a run.

    Attributes:
        small: names of the weights that travel as small numbers.
        first: first weights, whose rows of features that a client does not have are known.
        rows: those of `first` of which used rows travel only.
        dtype: of small numbers as they travel; None: there are none.
    """

    small: tuple[str, ...]
    first: tuple[str, ...]
    rows: tuple[str, ...]
    dtype: torch.dtype | None


def form_of(cfg: SendingConfig) -> WeightsForm:
    """Return the form of a method's weights (`MethodConfig.sent`)."""
    sent, exact = cfg.sent, cfg.sent.numbers == "exact"
    shapes = cfg.model.weight_shapes
    first = () if cfg.keep_optimizer else tuple(cfg.model.first_maps)
    return WeightsForm(
        small=() if exact else tuple(name for name, shape in shapes.items() if len(shape) > 1),
        first=first,
        rows=first if sent.rows == "used" else (),
        dtype=None if exact else SMALL_DTYPES[sent.numbers],
    )


def packed(form: WeightsForm, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Encode numbers (..., D); return them and the scales of rows if they have any."""
    if form.dtype is torch.float16:
        return as_halves(x), None
    return as_half_bytes(x) if form.dtype is torch.uint8 else as_bytes(x)


# Specs, which both ends enforce.


def inbox_spec(cfg: SendingConfig) -> FieldSpecs:
    """Return the specs of weights sent to clients."""
    if cfg.sent.plain:
        return weight_specs(cfg.model, Shared)
    return _weight_specs(cfg, Shared, f"state/{USED}")


def reply_spec(cfg: SendingConfig) -> FieldSpecs:
    """Return the specs of weights sent to the server."""
    if cfg.sent.plain:
        return weight_specs(cfg.model, Stacked)
    first = form_of(cfg).rows[:1]
    rows = f"inbox/{NAMES}{first[0]}" if first else ""
    return _weight_specs(cfg, Stacked, rows)


def later_reply_spec(cfg: SendingConfig) -> FieldSpecs:
    """Return the specs of weights sent to the server in answer to those of an earlier call.

    Their rows cannot be counted by the inbox; `Decoder.known` counts them, silo by silo.
    """
    return {name: replace(spec, rows="") for name, spec in reply_spec(cfg).items()}


def _weight_specs(cfg: SendingConfig, whole: type[Shared] | type[Stacked], rows: str) -> FieldSpecs:
    form, specs = form_of(cfg), dict[str, FieldSpec]()
    for name, shape in cfg.model.weight_shapes.items():
        dtype = form.dtype if name in form.small else None
        some = name in form.rows
        if dtype is not None:
            shape = (*shape[:-1], packed_width(dtype, shape[-1]))
        kind, size, count = (Ragged, shape[1:], rows) if some else (whole, shape, "")
        specs[f"{NAMES}{name}"] = FieldSpec(kind, tuple(size), dtype, rows=count)
        if dtype in SCALED:
            specs[f"{SCALE}{NAMES}{name}"] = FieldSpec(
                kind, tuple(size[:-1]), torch.float32, rows=count, low=0, high=LARGEST
            )
    return specs


def state_spec(cfg: SendingConfig) -> FieldSpecs:
    """Return the specs of what a client's state holds between rounds."""
    if cfg.sent.plain:
        return {}
    form, specs = form_of(cfg), {USED: row_numbers(cfg.model.features)}
    for name in form.small:
        shape = tuple(cfg.model.weight_shapes[name])
        first = name in form.first
        specs[f"{LEFT}{name}"] = (
            FieldSpec(Ragged, shape[1:], rows=f"own/{USED}") if first else FieldSpec(Stacked, shape)
        )
    return specs


# Set-up.


def tell_used(
    cfg: SendingConfig, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Store which features occur, and residuals of 0. In: nothing. Out: `used` if sent."""
    del inbox, key
    form, used, dtype = form_of(cfg), used_of(block), dtype_of(block)
    new: dict[str, StateField] = {**state, USED: used}
    for name in form.small:
        shape, device = cfg.model.weight_shapes[name], block.off.device
        if name in form.first:
            rows = torch.zeros(len(used.t), *shape[1:], dtype=dtype, device=device)
            new[f"{LEFT}{name}"] = Ragged(rows, used.off)
        else:
            whole = torch.zeros(block.num_clients, *shape, dtype=dtype, device=device)
            new[f"{LEFT}{name}"] = Stacked(whole)
    return new, {"used": used} if cfg.sent.rows == "used" else {}


def used_of(block: ClientBlock) -> Ragged:
    """Return the features (U,) int32 that occur at clients; all where features are dense."""
    if isinstance(block.x, SparseRows):
        return Ragged(block.x.used.feature.int(), block.x.used.off)
    count, clients = block.num_features, block.num_clients
    all_features = torch.arange(count, dtype=torch.int32, device=block.off.device).repeat(clients)
    return Ragged(all_features, torch.arange(clients + 1, device=block.off.device) * count)


def learn_form(fed: Federation, cfg: SendingConfig, key: Key) -> Params:
    """Prepare clients for weights in this form; return what the server stores of it."""
    if cfg.sent.plain:
        return {}
    if cfg.sent.rows == "all":
        fed.call(tell_used, {}, what=Kind.CONTROL, key=key)
        return {}
    used = learn_rows(fed, tell_used, key=key)
    return {FIRST: used.t.cpu(), OFF: used.off.cpu()}


def remembered_form(memory: Mapping[str, Tensor]) -> Params:
    """Return the fields of `learn_form` in a server's memory."""
    return {name: memory[name] for name in (FIRST, OFF) if name in memory}


def check_remembered(cfg: SendingConfig, memory: Mapping[str, Tensor], clients: int) -> None:
    """Raise `ValueError` for a memory without the used rows of so many clients, if it has any."""
    if cfg.sent.rows != "used":
        return
    used, off = memory.get(FIRST), memory.get(OFF)
    if used is None or off is None or used.dim() != 1 or used.dtype != torch.int32:
        raise ValueError(FIRST)
    if off.shape != (clients + 1,) or off.dtype != torch.int64:
        raise ValueError(OFF)
    if int(off[0]) or int(off[-1]) != len(used) or bool((off.diff() < 0).any()):
        raise ValueError(OFF)
    if bool(((used < 0) | (used >= cfg.model.features)).any()):
        raise ValueError(FIRST)
    owner = owners(off)
    if bool(((used.diff() <= 0) & (owner.diff() == 0)).any()):  # ascending at each client
        raise ValueError(FIRST)


def learn_steps(cfg: SendingConfig, key: Key) -> Steps:
    """Return the calls of `learn_form`."""
    if cfg.sent.plain:
        return ()
    if cfg.sent.rows == "all":
        return Call(tell_used, Kind.CONTROL, key)
    return learn_rows_steps(tell_used, key=key, size=cfg.model.features)


# Down.


def encode_weights(
    cfg: SendingConfig, weights: Mapping[str, Tensor], memory: Mapping[str, Tensor], to: Tensor
) -> dict[str, Field]:
    """Return the message with the server's weights.

    Args:
        cfg: of the method.
        weights: the server's.
        memory: of `learn_form`.
        to: (k,) int64 positions of the clients that get it.
    """
    form, message = form_of(cfg), dict[str, Field]()
    used = take(Ragged(memory[FIRST], memory[OFF]), to) if form.rows else None
    for name, w in weights.items():
        parts: dict[str, Tensor | None] = {f"{NAMES}{name}": w}
        if name in form.small:
            t, scale = packed(form, w)
            parts = {f"{NAMES}{name}": t, f"{SCALE}{NAMES}{name}": scale}
        for field, t in ((f, t) for f, t in parts.items() if t is not None):
            if name in form.rows:
                assert isinstance(used, Ragged)  # take keeps the type
                message[field] = rows_for(t, used)
            else:
                message[field] = Shared(t)
    return message


def decode_weights(
    cfg: SendingConfig, block: ClientBlock, state: State, inbox: Payload
) -> dict[str, Shared]:
    """Decode received weights, `weights/*`; rows that no client of the block uses are 0.

    Where only used rows travel, clients of a block share one table: the server sends each row
    alike to all clients that use it.

    Raises:
        ProtocolError: rows of one feature that differ between clients.
    """
    form, weights = form_of(cfg), dict[str, Shared]()
    for name, shape in cfg.model.weight_shapes.items():
        field, scale = inbox[f"{NAMES}{name}"], inbox.get(f"{SCALE}{NAMES}{name}")
        t = field.t
        if name in form.small:
            t = unpacked(t, shape[-1])
            t = from_small(t, None if scale is None else scale.t, dtype_of(block))
        if name in form.rows:
            rows, used = t, state[USED].t.long()
            t = rows.new_zeros(tuple(shape)).index_copy_(0, used, rows)
            if not torch.equal(t[used], rows):
                raise ProtocolError(
                    f"expected the same rows of {name} for all clients that use them, got others"
                )
        weights[f"{NAMES}{name}"] = Shared(t)
    return weights


# Up.


def encode_reply(
    cfg: SendingConfig,
    state: State,
    start: Mapping[str, Shared],
    reply: Payload,
    weights_without_data: Mapping[str, Tensor],
) -> tuple[dict[str, StateField], dict[str, Field]]:
    """Encode trained weights for the reply; return the clients' state and their reply.

    Args:
        cfg: of the method.
        state: of the clients.
        start: what they started from; see `arrived`.
        reply: with `weights/*` (C, ...).
        weights_without_data: first weights `weights/*` after a round without data that begins
            with `start`.
    """
    form, used = form_of(cfg), state[USED]
    assert isinstance(used, Ragged)  # of `tell_used`
    new, new_reply = dict(state), dict(reply)
    for name in {**dict.fromkeys(form.rows), **dict.fromkeys(form.small)}:
        own = f"{NAMES}{name}"
        field = reply[own]
        assert isinstance(field, Stacked | Patched)  # trained weights
        if name not in form.small:
            new_reply[own] = rows_from(field, used)
            continue
        residual, base = new[f"{LEFT}{name}"], weights_without_data.get(own, start[own].t)
        rows = rows_from(field, used) if isinstance(residual, Ragged) else field
        assert not isinstance(rows, Patched)  # has rows that are known
        at = base[used.t.long()] if isinstance(residual, Ragged) else base
        change = rows.t - at + residual.t
        sent = packed(form, change)
        decoded = from_small(unpacked(sent[0], change.shape[-1]), sent[1], change.dtype)
        new_residual = (change - decoded).nan_to_num(0.0, 0.0, 0.0)
        new[f"{LEFT}{name}"] = replace(residual, t=new_residual)
        parts: list[Field]
        if isinstance(residual, Stacked):
            parts = [Stacked(t) for t in sent if t is not None]
        elif name in form.rows:
            parts = [Ragged(t, used.off) for t in sent if t is not None]
        else:
            which, others = _other_rows(form, field, base)
            parts = [
                Patched(whole, which, t, used.t.long(), used.off)
                for whole, t in zip(others, sent, strict=True)
                if whole is not None and t is not None
            ]
        new_reply |= zip((own, f"{SCALE}{own}"), parts, strict=False)  # halves have no scales
    return new, new_reply


def _other_rows(
    form: WeightsForm, field: Stacked | Patched, base: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor | None]]:
    """Return which slices clients have outside of used rows, and these as `packed` changes."""
    if isinstance(field, Patched):  # clients that took fewer steps have other rows
        return field.which, packed(form, field.base - base)
    which = torch.zeros(len(field.t), dtype=torch.int64, device=field.t.device)
    return which, packed(form, base[None] - base)


def mean_of(
    cfg: SendingConfig,
    by: str,
    weights: Mapping[str, Tensor],
    memory: Mapping[str, Tensor],
    weights_without_data: Mapping[str, Tensor],
    *,
    steps: str = "",
    after: Callable[[str, int], Tensor] | None = None,
) -> WeightedMean:
    """Return the reduction of replies in this form, to new weights `weights/*`.

    Args:
        cfg: of the method.
        by: field of the clients' weights in the mean.
        weights: the server's, that were sent.
        memory: of `learn_form`.
        weights_without_data: first weights `weights/*` after a round without data.
        steps: see `Decoder`.
        after: likewise.
    """
    form = form_of(cfg)
    bases = {f"{NAMES}{n}": weights_without_data.get(f"{NAMES}{n}", weights[n]) for n in form.small}
    sent = Decoder(bases, others=weights_without_data)
    if form.rows:
        used = Ragged(memory[FIRST], memory[OFF])
        used_rows = {f"{NAMES}{name}": used for name in form.rows}
        sent = replace(sent, known=used_rows, steps=steps, after=after)
    return WeightedMean(by, weights_without_data, sent)
