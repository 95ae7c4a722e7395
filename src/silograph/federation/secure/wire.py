"""The fields of a secure sum's messages; `silograph.federation.secure.sizes` lists them.

Holders of a silo's shares, itself and its partners, stand in the order of their names. Whatever has
another form is refused before it is read.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from silograph.core.payload import Payload, Stacked
from silograph.federation.secure.partners import partners_of
from silograph.federation.secure.protocol import (
    DIGEST_BYTES,
    SEALED_BYTES,
    Dealt,
    PublicKeys,
    Revealed,
)
from silograph.federation.secure.sizes import (
    DEALT_BYTES,
    KEYS_BYTES,
    MASKED,
    PROOF_BYTES,
    SHARE_BYTES,
    names_as_bytes,
)
from silograph.federation.secure.sums import SumError

ABSENT, PRESENT, VANISHED = 0, 1, 2
MOST_SILOS = 10**5


def holders_of(name: str, silos: Sequence[str], about: bytes) -> list[str]:
    """Return who holds shares of a silo's secrets, in the order of their names.

    Raises:
        SumError: the silo is not among them, or they are repeated.
    """
    if name not in silos or len(set(silos)) < len(silos) or len(silos) > MOST_SILOS:
        raise SumError(f"expected {name} once among the silos of a secure sum, got others")
    return sorted((name, *partners_of(tuple(silos), about)[name]))


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


def keys_payload(keys: PublicKeys) -> dict[str, Stacked]:
    """Return a silo's public keys as fields."""
    row = _key_row(keys)
    return {"keys": Stacked(_bytes_field([row], len(row)).t[:, 0])}


def read_keys(payload: Payload) -> PublicKeys:
    """Return a silo's public keys."""
    return _keys_of(_read(payload, "keys", KEYS_BYTES + PROOF_BYTES).tobytes())


def _key_row(keys: PublicKeys) -> bytes:
    return keys.text + keys.proof


def _keys_of(row: bytes) -> PublicKeys:
    return PublicKeys(row[:32], row[32:64], row[64:KEYS_BYTES], row[KEYS_BYTES:])


def all_keys_payload(
    name: str, silos: Sequence[str], keys: Mapping[str, PublicKeys], about: bytes
) -> dict[str, Stacked]:
    """Return what a silo gets of all public keys."""
    names = names_as_bytes(silos)
    holders = holders_of(name, silos, about)
    return {
        "silos": Stacked(_bytes_field([names], len(names)).t[:, 0]),
        "keys": _bytes_field(
            [_key_row(keys[recipient]) for recipient in holders], KEYS_BYTES + PROOF_BYTES
        ),
    }


def read_all_keys(
    payload: Payload, name: str, about: bytes
) -> tuple[list[str], dict[str, PublicKeys]]:
    """Return the names of all silos, and the public keys of a silo and its partners."""
    try:
        silos = _read(payload, "silos", None).tobytes().decode().split("\n")
    except UnicodeDecodeError:
        raise SumError("expected names of silos in a secure sum, got other bytes") from None
    holders = holders_of(name, silos, about)
    rows = _read(payload, "keys", len(holders), KEYS_BYTES + PROOF_BYTES)
    return silos, {h: _keys_of(row.tobytes()) for h, row in zip(holders, rows, strict=True)}


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
        "from": Stacked(_bytes_field([flags], len(flags)).t[:, 0]),
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


def request_payload(
    present: Sequence[str], vanished: Sequence[str], holders: Sequence[str]
) -> dict[str, Stacked]:
    """Return of which silos shares are asked for, and of which kind."""
    state = dict.fromkeys(present, PRESENT) | dict.fromkeys(vanished, VANISHED)
    flags = bytes(state.get(recipient, ABSENT) for recipient in holders)
    return {"present": Stacked(_bytes_field([flags], len(flags)).t[:, 0])}


def read_request(payload: Payload, holders: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return of which silos shares of own masks are asked for, and of which those of mask keys."""
    flags = _read(payload, "present", len(holders)).tolist()
    by_flag = [[h for h, f in zip(holders, flags, strict=True) if f == k] for k in (1, 2)]
    return by_flag[0], by_flag[1]


def revealed_payload(revealed: Revealed, holders: Sequence[str]) -> dict[str, Stacked]:
    """Return revealed shares as a field, with zeros for holders whose are not asked for."""
    shares = {**revealed.own, **revealed.mask}
    rows = [shares.get(recipient, bytes(SHARE_BYTES)) for recipient in holders]
    return {"shares": _bytes_field(rows, SHARE_BYTES)}


def read_revealed(
    payload: Payload, present: Sequence[str], vanished: Sequence[str], holders: Sequence[str]
) -> Revealed:
    """Return the shares that a silo has revealed."""
    rows = _read(payload, "shares", len(holders), SHARE_BYTES)
    shares = {h: row.tobytes() for h, row in zip(holders, rows, strict=True)}
    return Revealed({n: shares[n] for n in present}, {n: shares[n] for n in vanished})
