"""Rows of which only those are sent that have moved since they were last sent.

An owner keeps each boundary row as it last sent it, with a number that grows when it sends another
(its version). Requesters say which version they have (`PullForm.since`), and get the row as it was
last sent if theirs is older. So what anybody holds after an exchange is the row that the owner
would send, to within the bound, and the owner need not know who has asked.

State of an owner: `moved/NAME` (B, ...) of each field of the form, int32 `moved/version` (B,); of a
requester: `history/version` (S,). Versions are the numbers of batches before which rows were sent.

B: boundary rows. S: halo slots. k: rows that are asked for.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from silograph.core.payload import Payload, Ragged, Stacked, State, offsets
from silograph.exchange.pull import NO_VERSION, PullForm
from silograph.federation.field_specs import BOUNDARY, SLOTS, FieldSpec, FieldSpecs
from silograph.federation.small_numbers import from_small
from silograph.graph.block.block import ClientBlock
from silograph.nn.doors import check_places, dtype_of
from silograph.nn.segment import segment_sum

SENT, SENT_VERSION, VERSION = "moved/", "moved/version", "history/version"


def blank_moved(form: PullForm, block: ClientBlock) -> dict[str, Stacked | Ragged]:
    """Return the state of clients that have neither sent nor got a row."""
    found: dict[str, Stacked | Ragged] = {}
    rows, device = len(block.halo.boundary), block.off.device
    for name, spec in form.fields.items():
        shape = (rows, *(n or 0 for n in spec.shape))
        t = torch.zeros(shape, dtype=spec.dtype or dtype_of(block), device=device)
        found[f"{SENT}{name}"] = Ragged(t, block.halo.boundary_off)
    for name, off in (SENT_VERSION, block.halo.boundary_off), (VERSION, block.halo.off):
        t = torch.full((int(off[-1]),), NO_VERSION, dtype=torch.int32, device=device)
        found[name] = Ragged(t, off)
    return found


def moved_specs(form: PullForm) -> FieldSpecs:
    """Return the specs of what a state holds."""
    sent = {f"{SENT}{name}": replace(spec, rows=BOUNDARY) for name, spec in form.fields.items()}
    version = FieldSpec(Ragged, (), torch.int32, low=NO_VERSION)
    return sent | {
        SENT_VERSION: replace(version, rows=BOUNDARY),
        VERSION: replace(version, rows=SLOTS),
    }


def row_values(fields: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the rows (k, D) of each stage, float64, from fields `rows/I` and maybe `scale/I`."""
    found = []
    for name, t in fields.items():
        kind, _, number = name.partition("/")
        if kind == "rows":
            scale = fields.get(f"scale/{number}")
            found.append(from_small(t, scale, torch.float64))
    return found


def moved_only(
    block: ClientBlock, state: State, inbox: Payload, reply: Payload, bound: float, now: int
) -> tuple[dict[str, Stacked | Ragged], dict[str, Stacked | Ragged]]:
    """Return an owner's state and its reply to a pull of changed rows.

    A row is sent anew if it is further from what was last sent than `bound` times the length of
    that, over all stages together, or if a requester has a later version than the owner: then the
    owner has gone back to an older state and does not know what was sent since.

    Args:
        block: the owners.
        state: theirs.
        inbox: `row` (k,) boundary rows that are wanted, `since` (k,) versions.
        reply: `answered` (k,) bool, and the fields of those that are.
        bound: at least 0.
        now: number of the batch, which becomes the version of rows that have moved.
    """
    row, since, answered = inbox["row"], inbox["since"].t, reply["answered"]
    assert isinstance(row, Ragged)  # from `pull`
    has = answered.t
    off = next(f.off for n, f in reply.items() if n != "answered" and isinstance(f, Ragged))
    place = check_places(row, block.halo.boundary_off, "boundary rows")[has]
    fresh = {name: field.t for name, field in reply.items() if name != "answered"}
    sent = {name: state[f"{SENT}{name}"].t for name in fresh}
    before = row_values({name: t[place] for name, t in sent.items()})
    distance, size = torch.zeros(2, len(place), dtype=torch.float64, device=place.device)
    for old, new in zip(before, row_values(fresh), strict=True):
        distance, size = distance + (new - old).square().sum(1), size + old.square().sum(1)
    version = state[SENT_VERSION].t
    within = (version[place] != NO_VERSION) & (distance <= bound**2 * size)
    forgot = since[has] > version[place]
    goes = ~within | forgot  # so does a row that is not finite, whose distance says nothing
    version = version.index_fill(0, place[goes], now)
    new_state = {**state, SENT_VERSION: Ragged(version, block.halo.boundary_off)}
    for name, t in fresh.items():
        sent[name] = sent[name].index_copy(0, place[goes], t[goes])
        new_state[f"{SENT}{name}"] = Ragged(sent[name], block.halo.boundary_off)
    changed = version[place] > since[has]
    later = place[changed]
    ends = offsets(segment_sum(changed.long(), off))
    out: dict[str, Stacked | Ragged] = {
        "answered": Ragged(has, row.off),
        "changed": Ragged(changed, off),
        "version": Ragged(version[later], ends),
    }
    return new_state, out | {name: Ragged(t[later], ends) for name, t in sent.items()}


def with_versions(
    block: ClientBlock, state: State, inbox: Payload, place: Tensor
) -> tuple[dict[str, Stacked | Ragged], Tensor]:
    """Return a requester's state with the versions that came, and the slots (r,) they are of.

    Args:
        block: the requesters.
        state: theirs.
        inbox: `changed` of the answered slots, `version` (r,) of those.
        place: the answered slots.
    """
    later = place[inbox["changed"].t]
    version = state[VERSION].t.index_copy(0, later, inbox["version"].t)
    return {**state, VERSION: Ragged(version, block.halo.off)}, later
