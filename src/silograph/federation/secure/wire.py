"""The fields of a secure sum's messages; `silograph.federation.secure.sizes` lists them.

Holders of a silo's shares, itself and its partners, stand in the order of their names. Whatever has
another form is refused before it is read.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch

from silograph.core.payload import Payload, Stacked
from silograph.federation.secure.partners import partners_of
from silograph.federation.secure.protocol import (
    DIGEST_BYTES,
    SEALED_BYTES,
    Confirmation,
    Dealt,
    PublicKeys,
    Revealed,
)
from silograph.federation.secure.sizes import (
    DEALT_BYTES,
    KEYS_BYTES,
    MASKED,
    PROOF_BYTES,
    SEED_BYTES,
    SHARE_BYTES,
    TAG_BYTES,
    names_as_bytes,
)
from silograph.federation.secure.sums import SumError

MOST_SILOS = 10**5


def holders_of(name: str, silos: Sequence[str], seed: bytes) -> list[str]:
    """Return who holds shares of a silo's secrets, in the order of their names.

    Args:
        name: of the silo.
        silos: all silos of the sum.
        seed: of the order of partners.

    Raises:
        SumError: the silo is not among them, or they are repeated.
    """
    if name not in silos or len(set(silos)) < len(silos) or len(silos) > MOST_SILOS:
        raise SumError(f"expected {name} once among the silos of a secure sum, got others")
    return sorted((name, *partners_of(tuple(silos), seed)[name]))


def _bytes_field(rows: Sequence[bytes], width: int) -> Stacked:
    data = np.frombuffer(b"".join(rows), np.uint8).reshape(1, len(rows), width)
    return Stacked(torch.from_numpy(data.copy()))


def _read(payload: Payload, name: str, *shape: int | None) -> np.ndarray:
    """Return a field of bytes of this shape; raise `SumError` for anything else."""
    field = payload.get(name)
    t = None if not isinstance(field, Stacked) else field.t
    expected = (1, *shape)
    if t is None or t.dtype is not torch.uint8 or t.dim() != len(expected):
        raise SumError(f"expected bytes in {name!r} of a secure sum, got others")
    if any(w is not None and w != n for w, n in zip(expected, t.shape, strict=True)):
        raise SumError(f"expected {name!r} of another shape in a secure sum, got {tuple(t.shape)}")
    return t[0].numpy()


def _row_field(row: bytes) -> Stacked:
    return Stacked(_bytes_field([row], len(row)).t[:, 0])


def keys_payload(keys: PublicKeys, seed: bytes) -> dict[str, Stacked]:
    """Return a silo's public keys, and its seed of the order of partners, as fields."""
    return {"keys": _row_field(_key_row(keys)), "seed": _row_field(seed)}


def read_keys(payload: Payload) -> tuple[PublicKeys, bytes]:
    """Return a silo's public keys, and its seed of the order of partners."""
    keys = _keys_of(_read(payload, "keys", KEYS_BYTES + PROOF_BYTES).tobytes())
    return keys, _read(payload, "seed", SEED_BYTES).tobytes()


def _key_row(keys: PublicKeys) -> bytes:
    return keys.text + keys.proof


def _keys_of(row: bytes) -> PublicKeys:
    return PublicKeys(row[:32], row[32:64], row[64:KEYS_BYTES], row[KEYS_BYTES:])


def all_keys_payload(
    name: str, silos: Sequence[str], keys: Mapping[str, PublicKeys], seed: bytes
) -> dict[str, Stacked]:
    """Return what a silo gets of all public keys; zeros for partners that have sent none."""
    width = KEYS_BYTES + PROOF_BYTES
    rows = [_key_row(keys[h]) if h in keys else bytes(width) for h in holders_of(name, silos, seed)]
    return {
        "silos": _row_field(names_as_bytes(silos)),
        "seed": _row_field(seed),
        "keys": _bytes_field(rows, width),
    }


def read_all_keys(payload: Payload, name: str) -> tuple[list[str], bytes, dict[str, PublicKeys]]:
    """Return all silos, the seed of their order, and public keys of a silo and its partners."""
    try:
        silos = _read(payload, "silos", None).tobytes().decode().split("\n")
    except UnicodeDecodeError:
        raise SumError("expected names of silos in a secure sum, got other bytes") from None
    seed = _read(payload, "seed", SEED_BYTES).tobytes()
    holders = holders_of(name, silos, seed)
    rows = _read(payload, "keys", len(holders), KEYS_BYTES + PROOF_BYTES)
    pairs = zip(holders, rows, strict=True)
    return silos, seed, {h: _keys_of(row.tobytes()) for h, row in pairs if row.any()}


def _dealt_row(part: Dealt) -> bytes:
    return part.sealed.ljust(SEALED_BYTES, b"\0") + part.mask_digest + part.own_digest


def _dealt_of(text: bytes) -> Dealt:
    middle = SEALED_BYTES + DIGEST_BYTES
    return Dealt(text[:SEALED_BYTES], text[SEALED_BYTES:middle], text[middle:])


def dealt_payload(dealt: Mapping[str, Dealt]) -> dict[str, Stacked]:
    """Return what a silo deals to all holders; its own row has digests only."""
    return {"shares": _bytes_field([_dealt_row(dealt[h]) for h in sorted(dealt)], DEALT_BYTES)}


def read_dealt(payload: Payload, holders: Sequence[str]) -> dict[str, Dealt]:
    """Return what a silo has dealt to each recipient."""
    rows = _read(payload, "shares", len(holders), DEALT_BYTES)
    return {h: _dealt_of(row.tobytes()) for h, row in zip(holders, rows, strict=True)}


def shares_payload(dealt: Mapping[str, Dealt], holders: Sequence[str]) -> dict[str, Stacked]:
    """Return what others have dealt to a silo; `holders`: those of its own shares."""
    flags = bytes(recipient in dealt for recipient in holders)
    rows = [_dealt_row(dealt[recipient]) for recipient in holders if recipient in dealt]
    return {
        "from": _row_field(flags),
        "shares": _bytes_field(rows, DEALT_BYTES),
    }


def read_shares(payload: Payload, holders: Sequence[str]) -> dict[str, Dealt]:
    """Return what others have dealt to a silo."""
    flags = _read(payload, "from", len(holders))
    dealers = [recipient for recipient, flag in zip(holders, flags.tolist(), strict=True) if flag]
    return read_dealt(payload, dealers)


def masked_payload(values: np.ndarray) -> dict[str, Stacked]:
    """Return masked values (n,) uint64 as a field."""
    return {MASKED: Stacked(torch.from_numpy(values.view(np.int64))[None])}


def read_masked(payload: Payload, size: int) -> np.ndarray:
    """Return masked values (n,) uint64; raise `SumError` for another number of them."""
    field = payload.get(MASKED)
    is_whole = isinstance(field, Stacked) and len(payload) == 1
    if not is_whole or field.t.dtype is not torch.int64 or field.t.shape != (1, size):  # type: ignore[union-attr]
        raise SumError(f"expected {size} masked values, got something else")
    return field.t[0].numpy().view(np.uint64)  # type: ignore[union-attr]


def states_payload(states: Mapping[str, int]) -> dict[str, Stacked]:
    """Return the states of all silos as a field, in their order."""
    return {"states": _row_field(bytes(states.values()))}


def read_states(payload: Payload, silos: Sequence[str]) -> dict[str, int]:
    """Return the states of all silos, in their order; `silos`: their names."""
    return dict(zip(silos, _read(payload, "states", len(silos)).tolist(), strict=True))


def confirmed_payload(confirmed: Confirmation, holders: Sequence[str]) -> dict[str, Stacked]:
    """Return a silo's confirmation as fields, with zeros for holders that get none."""
    flags = bytes(recipient in confirmed.unusable for recipient in holders)
    return {**tags_payload(confirmed.tags, holders), "unusable": _row_field(flags)}


def read_confirmed(payload: Payload, holders: Sequence[str]) -> Confirmation:
    """Return a silo's confirmation."""
    flags = _read(payload, "unusable", len(holders)).tolist()
    unusable = frozenset(h for h, flag in zip(holders, flags, strict=True) if flag)
    return Confirmation(read_tags(payload, holders), unusable)


def tags_payload(tags: Mapping[str, bytes], holders: Sequence[str]) -> dict[str, Stacked]:
    """Return tags as a field, with zeros for holders without one."""
    rows = [tags.get(recipient, bytes(TAG_BYTES)) for recipient in holders]
    return {"tags": _bytes_field(rows, TAG_BYTES)}


def read_tags(payload: Payload, holders: Sequence[str]) -> dict[str, bytes]:
    """Return the tags of each recipient."""
    rows = _read(payload, "tags", len(holders), TAG_BYTES)
    return {h: row.tobytes() for h, row in zip(holders, rows, strict=True)}


def revealed_payload(revealed: Revealed, holders: Sequence[str]) -> dict[str, Stacked]:
    """Return revealed shares as a field, with zeros for holders whose are not revealed."""
    shares = {**revealed.own, **revealed.mask}
    rows = [shares.get(recipient, bytes(SHARE_BYTES)) for recipient in holders]
    return {"shares": _bytes_field(rows, SHARE_BYTES)}


def read_revealed(
    payload: Payload, present: Collection[str], vanished: Collection[str], holders: Sequence[str]
) -> Revealed:
    """Return the shares that a silo has revealed."""
    rows = _read(payload, "shares", len(holders), SHARE_BYTES)
    shares = {h: row.tobytes() for h, row in zip(holders, rows, strict=True)}
    return Revealed({n: shares[n] for n in present}, {n: shares[n] for n in vanished})
