"""The bytes of a secure sum's messages, which simulations count as sessions send them.

| message | from | fields |
|---|---|---|
| keys | silo | `keys`: two public keys, the digest of a secret, a proof; `seed` of the order |
| keys | server | `silos`: names of all; `seed`; `keys`: those of the silo and its partners |
| shares | silo | `shares`: sealed ones for each holder, and their digests |
| shares | server | `from`: who has dealt; `shares`: for this silo |
| masked values | silo | `masked` (n,) int64, in the call's own kind |
| masks | server | `states`: which silos have sent masked values, and which have vanished |
| masks | silo | `tags`: that confirm these to each partner; `unusable`: whose shares are no use |
| masks | server | `tags`: those for this silo |
| masks | silo | `shares`: one of each |
"""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import torch

from silograph.core.payload import Payload, Stacked
from silograph.federation.frame import frame_sizes
from silograph.federation.secure.partners import topology_of

MASKED = "masked"  # the field with a masked vector
KEYS_BYTES = 32 + 32 + 16  # of the keys of a silo
PROOF_BYTES = 32  # that they are its own; zeros where it has no secret with the others
DEALT_BYTES = 64 + 16 + 16 + 16  # of shares for one holder: two shares, their seal, two digests
SHARE_BYTES = 32
SEED_BYTES = 32  # of the order of partners
TAG_BYTES = 16  # by which a silo confirms to another who is there


def bytes_field(*shape: int) -> Stacked:
    """Return a field of bytes for one client, all 0 and in the memory of one byte."""
    return Stacked(torch.zeros((), dtype=torch.uint8).expand(1, *shape))


def names_as_bytes(names: Sequence[str]) -> bytes:
    """Return names as they are sent."""
    return "\n".join(names).encode()


def digest_of_names(names: Sequence[str]) -> bytes:
    """Return what names the silos that a call goes to, 32 bytes."""
    return blake2b(names_as_bytes(names), digest_size=32).digest()


class SumSizes:
    """Lengths of the frames of one sum in which nobody vanishes, the same for every silo.

    Args:
        op: name of the op.
        names: of the silos.
        values: n, of a reply.
    """

    def __init__(self, op: str, names: Sequence[str], values: int) -> None:
        self._op = op
        partners = topology_of(len(names)).partners
        holders = partners + 1
        number = torch.zeros((), dtype=torch.int64)
        self.masked = self._size({MASKED: Stacked(number.expand(1, values))})
        key_bytes = KEYS_BYTES + PROOF_BYTES
        seed, listed = bytes_field(SEED_BYTES), bytes_field(len(names_as_bytes(names)))
        self.keys_up = self._size({"keys": bytes_field(key_bytes), "seed": seed})
        keys = bytes_field(holders, key_bytes)
        self.keys_down = self._size({"silos": listed, "seed": seed, "keys": keys})
        self.shares_up = self._size({"shares": bytes_field(holders, DEALT_BYTES)})
        dealt = bytes_field(partners, DEALT_BYTES)
        self.shares_down = self._size({"from": bytes_field(holders), "shares": dealt})
        tags = bytes_field(holders, TAG_BYTES)
        self.masks_down = self._size({"states": bytes_field(len(names))}) + self._size(
            {"tags": tags}
        )
        self.masks_up = self._size({"tags": tags, "unusable": bytes_field(holders)}) + self._size(
            {"shares": bytes_field(holders, SHARE_BYTES)}
        )

    def _size(self, payload: Payload) -> int:
        return int(frame_sizes(self._op, payload, 1)[0])

    def of_each(self, size: int, clients: int) -> np.ndarray:
        """Return a size for each client, (k,) int64."""
        return np.full(clients, size, dtype=np.int64)
