"""Rows that many clients have alike are in a checkpoint once.

A client that has no node with some feature never changes the weights of that feature, and its
optimizer's moments of them stay what everybody's are. With many clients most rows of a first layer
are such rows. They are found by comparing bits, so nothing needs to know why they are alike, and
what is read is what was written bit for bit.

C: clients. R: rows of a client.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

LEAST = 2**20  # bytes of a tensor that is worth looking at
GAIN = 0.25  # share of rows that must be alike
# Who reads a file makes at most so many bytes of each of its own: one client in 16 stays whole.
MOST_TIMES = 16
KEY = 16  # words of a row, spread over it, by whose sum the most common one is found
PARTS = ("alike", "common", "own")


def packed(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Return tensors with alike rows once, and the names of those that are packed.

    A packed tensor (C, R, ...) is replaced by `NAME/common` (R, ...), the most common row of each
    number; `NAME/alike` (C, R) bool, who has it; and `NAME/own` (n, ...), all other rows in order.

    Args:
        tensors: by name, contiguous and on the CPU.
    """
    found: dict[str, Tensor] = {}
    names = []
    for name, t in tensors.items():
        alike = _alike(t) if t.dim() > 2 and len(t) > 1 and t.nbytes >= LEAST else None
        if alike is None:
            found[name] = t
            continue
        number, common = alike
        parts = (common, t[number, torch.arange(t.shape[1])], t[~common])
        found |= {f"{name}/{part}": p for part, p in zip(PARTS, parts, strict=True)}
        names.append(name)
    return found, names


def unpacked(tensors: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Return the tensors that `packed` was given.

    Raises:
        ValueError: parts that are missing, do not fit, or say more than `MOST_TIMES` of themselves.
        TypeError: names that are none.
    """
    found = dict(tensors)
    for name in names:
        try:
            alike, common, own = (found.pop(f"{name}/{part}") for part in PARTS)
        except KeyError as error:
            raise ValueError(f"rows of {error} are missing") from None
        _check(name, alike, common, own)
        t = common.expand(len(alike), *common.shape).clone()
        t[~alike] = own
        found[name] = t
    return found


def _alike(t: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return who has the most common row of each number (R,), and who has it, too (C, R).

    None is where too few have.
    """
    bits = t.flatten(2).view(torch.uint8)
    if bits.shape[2] % 4:
        return None
    words = bits.view(torch.int32)
    some = words[:, :, :: -(-words.shape[2] // KEY)].long()
    keys = (some * (2 * torch.arange(some.shape[2]) + 1)).sum(2)
    common, number = keys.mode(0)
    if (keys == common).float().mean() < GAIN:
        return None
    alike = (words == words[number, torch.arange(t.shape[1])]).all(2)
    alike[: len(t) // MOST_TIMES + 1] = False
    return None if alike.float().mean() < GAIN else (number, alike)


def _check(name: str, alike: Tensor, common: Tensor, own: Tensor) -> None:
    """Raise `ValueError` for parts that do not fit each other."""
    fits = (
        alike.dtype is torch.bool
        and alike.dim() == 2
        and common.dim() > 1
        and common.dtype is own.dtype
        and alike.shape[1] == len(common)
        and common.shape[1:] == own.shape[1:]
        and int((~alike).sum()) == len(own)
    )
    if not fits or alike.numel() > MOST_TIMES * len(own):
        raise ValueError(f"rows of {name!r} do not fit")
