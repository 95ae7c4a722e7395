"""Stored rows of the layers between features and outputs, of own nodes and of the halo.

Clients keep what last entered each stage of their own rows, and what owners have sent of their halo
slots. A slot keeps its row until a later one comes; how old it is counts in batches. What is done
with stored rows is in `silograph.nn.stored_rows`.

State: `history/own/I` (n, D) of own rows, I the number of the stage that they enter;
`history/halo/I` (S, D) of slots, scaled by their owners; `history/seen` (S,) int64 number of the
batch before which a slot's rows came, -1 if never; `history/passes` (C,) int32 how often all own
rows were worked out. With shared features `history/halo/0` (S, F) has those of the halo.

C: clients. n: rows. S: halo slots. k: wanted rows. D: width.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Ragged, Stacked, State, offsets, owners, under
from silograph.exchange.moved_rows import with_versions
from silograph.exchange.pull import PullForm, pull, pull_steps, rows_of_width
from silograph.exchange.stages import finish, inputs_of
from silograph.federation.base import Federation
from silograph.federation.field_specs import NODES, SLOTS, FieldSpec, FieldSpecs
from silograph.federation.program import Steps
from silograph.federation.small_numbers import LARGEST, as_bytes, from_small
from silograph.graph.block.block import ClientBlock, dense_rows
from silograph.nn.doors import check_places, dtype_of
from silograph.nn.forward import Staged
from silograph.nn.segment import sparse_product
from silograph.nn.stage_halves import before
from silograph.nn.stored_batches import surroundings
from silograph.nn.stored_rows import StoredRows, stored_stages, to_send

OWN, HALO, SEEN, PASSES = "history/own/", "history/halo/", "history/seen", "history/passes"
NEVER = -1
ASKED = "round/asked"  # slots that a client has asked for, (k,) int32


def blank_history(model: Staged, block: ClientBlock) -> dict[str, Stacked | Ragged]:
    """Return the history of clients that know no row yet."""
    rows, slots, device = len(block.row_key), len(block.halo.key), block.off.device
    dtype = dtype_of(block)
    fields: dict[str, Stacked | Ragged] = {}
    for number in stored_stages(model):
        width = model.stages[number].inputs
        own = torch.zeros(rows, width, dtype=dtype, device=device)
        fields[f"{OWN}{number}"] = Ragged(own, block.off)
        halo = torch.zeros(slots, width, dtype=dtype, device=device)
        fields[f"{HALO}{number}"] = Ragged(halo, block.halo.off)
    never = torch.full((slots,), NEVER, device=device)
    fields[SEEN] = Ragged(never, block.halo.off)
    none = torch.zeros(block.num_clients, dtype=torch.int32, device=device)
    return fields | {PASSES: Stacked(none)}


def history_specs(model: Staged, *, features: bool) -> FieldSpecs:
    """Return what a state holds of a history; `features`: of those of the halo, too."""
    specs: dict[str, FieldSpec] = {}
    for number in stored_stages(model):
        width = model.stages[number].inputs
        specs[f"{OWN}{number}"] = FieldSpec(Ragged, (width,), rows=NODES)
        specs[f"{HALO}{number}"] = FieldSpec(Ragged, (width,), rows=SLOTS)
    if features:
        specs[f"{HALO}0"] = FieldSpec(Ragged, (model.features,), rows=SLOTS)
    specs[SEEN] = FieldSpec(Ragged, (), torch.int64, rows=SLOTS, low=NEVER)
    return specs | {PASSES: FieldSpec(Stacked, (), torch.int32, low=0)}


def stored_in(state: State, *, halo: bool = True) -> StoredRows:
    """Return the stored rows of a state; without the halo, those of own rows only."""
    own = {int(k.removeprefix(OWN)): f.t for k, f in state.items() if k.startswith(OWN)}
    seen = state[SEEN].t
    if not halo:
        return StoredRows(own, {}, torch.zeros_like(seen, dtype=torch.bool))
    slots = {int(k.removeprefix(HALO)): f.t for k, f in state.items() if k.startswith(HALO)}
    return StoredRows(own, slots, seen != NEVER)


def with_own(
    state: State, block: ClientBlock, entered: Mapping[int, Tensor]
) -> dict[str, Stacked | Ragged]:
    """Return a state whose own rows are what has entered each stage, (n, D)."""
    return {**state, **{f"{OWN}{number}": Ragged(x, block.off) for number, x in entered.items()}}


def put_own_(state: State, rows: Tensor, entered: Mapping[int, Tensor]) -> None:
    """Write what has entered each stage, (k, D), to own rows (k,) of a state, in place."""
    for number, x in entered.items():
        state[f"{OWN}{number}"].t.index_copy_(0, rows, x)


def rows_form(model: Staged, *, small: bool = False, since: bool = False) -> PullForm:
    """Return what the pull of stored rows carries: those of every stage, of slots asked for.

    Args:
        model: whose stages rows enter.
        small: as whole numbers of a byte, with a scale for each row.
        since: only rows that have changed (see `silograph.exchange.moved_rows`).
    """
    fields: dict[str, FieldSpec] = {}
    for number in stored_stages(model):
        shape = (model.stages[number].inputs,)
        if small:
            fields[f"scale/{number}"] = FieldSpec(Ragged, (), torch.float32, low=0, high=LARGEST)
        fields[f"rows/{number}"] = FieldSpec(Ragged, shape, torch.int8 if small else None)
    return PullForm(fields, missing="keep", since=since, some=True, asked=ASKED)


def wanted_rows(block: ClientBlock, row: Ragged) -> Tensor:
    """Return the rows (k,) int64 of a block that boundary rows (k,) are."""
    return block.halo.boundary[check_places(row, block.halo.boundary_off, "boundary rows")]


def answer(
    model: Staged, block: ClientBlock, state: State, row: Ragged, *, small: bool
) -> dict[str, Stacked | Ragged]:
    """Return stored rows of boundary rows (k,), of clients that have any.

    Out: `answered` (k,) bool, `rows/I` (r, D) of those that are; `small`: and `scale/I` (r,).
    """
    member = owners(row.off)
    has = (state[PASSES].t > 0)[member]
    counts = torch.where(state[PASSES].t > 0, row.off.diff(), 0)
    off = offsets(counts)
    rows, around = wanted_rows(block, row)[has], surroundings(block)
    reply: dict[str, Stacked | Ragged] = {"answered": Ragged(has, row.off)}
    for number in stored_stages(model):
        x = state[f"{OWN}{number}"].t[rows]
        sent = to_send(model, number, around, rows, x, off)
        if small:
            sent, scale = as_bytes(sent)
            reply[f"scale/{number}"] = Ragged(scale, off)
        reply[f"rows/{number}"] = Ragged(sent, off)
    return reply


def with_arrived(
    model: Staged, block: ClientBlock, state: State, inbox: Payload, now: int, *, small: bool
) -> dict[str, Stacked | Ragged]:
    """Return a state with the rows that came for the slots in `ASKED`, seen `now`.

    Rows of slots, and when they were seen, are written in place.
    """
    asked = state[ASKED]
    assert isinstance(asked, Ragged)  # as the client left it
    place = check_places(asked, block.halo.off, "halo slots")[inbox["answered"].t]
    state[SEEN].t.index_fill_(0, place, now)
    new = dict(state)
    if "changed" in inbox:  # what did not come is as its owner would send it
        new, place = with_versions(block, state, inbox, place)
    for number in stored_stages(model):
        name = f"{HALO}{number}"
        rows = inbox[f"rows/{number}"].t
        if small:
            rows = from_small(rows, inbox[f"scale/{number}"].t, state[name].t.dtype)
        state[name].t.index_copy_(0, place, rows)
    return new


def share_features(fed: Federation, key: Key) -> None:
    """Let every client fetch the features of its whole halo, once."""
    pull(fed, None, send_features, keep_features, what=Kind.FEATURES, key=key)


def share_features_steps(features: int, key: Key) -> Steps:
    """Return the calls of `share_features`."""
    what, form = Kind.FEATURES, rows_of_width(features)
    return pull_steps(None, send_features, keep_features, what=what, key=key, form=form)


def send_features(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Send features of all boundary rows, scaled as the first stage wants. Out: `rows` (k, F)."""
    del inbox, key
    rows = block.halo.boundary
    off = block.halo.boundary_off
    x = dense_rows(block, rows)
    return state, {
        "rows": Ragged(to_send(cfg.model.staged, 0, surroundings(block), rows, x, off), off)
    }


def keep_features(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Keep the features of all slots. In: `rows` (S, F). Out: nothing."""
    del cfg, key
    return {**state, f"{HALO}0": Ragged(inbox["rows"].t, block.halo.off)}, {}


def finish_alone(
    cfg: Any, block: ClientBlock, state: State, inbox: Payload, key: Key
) -> tuple[State, Payload]:
    """Finish the first stage of a pass with what the client has itself. In, out: nothing.

    These are its own features, with degrees of its own graph; where it keeps those of its halo, all
    neighbors' features with their full degrees.
    """
    del inbox
    at, params = inputs_of(cfg, block, state, key, 0)
    z = before(params, at)
    arrived = torch.zeros_like(z)
    field = state.get(f"{HALO}0")
    if field is None:
        degree = block.adj.degree.to(z.dtype)[:, None]
        at = replace(at, reach=replace(at.reach, degree=degree, operators={}))
    else:
        first = under("pass/weights", state).items()
        whole = {name.removeprefix("0."): w[0] for name, w in first if name.startswith("0.")}
        sent = at.stage.conv.map(whole, field.t, block.halo.off)
        arrived = sparse_product(block.halo.adj, sent)
    new = {**state, "pass/z/0": Ragged(z, at.reach.off)}
    return finish(cfg, block, new, key, at, params, arrived), {}
