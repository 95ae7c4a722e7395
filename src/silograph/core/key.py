"""Counter-based randomness: every draw is a pure function of a key and of what it is for.

A `Key` is 64 bits. Folding in a purpose, a round, an epoch or a layer gives a new key, so no
draw depends on how many were made before it, on the order of clients, or on how clients are
grouped into blocks. A draw for a row (a node) also takes that row's own 64-bit `row_key`.

The mixing function is the finalizer of SplitMix64 (Steele, Lea, Flood: "Fast splittable
pseudorandom number generators", OOPSLA 2014). It is integer arithmetic modulo 2^64 only, so
torch and compiled kernels give the same bits on every device.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: the increment of SplitMix64
MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MULTIPLIER_2 = 0x94D049BB133111EB
MIX_STEPS: tuple[tuple[np.uint64, np.uint64 | None], ...] = (
    (np.uint64(30), np.uint64(MULTIPLIER_1)),
    (np.uint64(27), np.uint64(MULTIPLIER_2)),
    (np.uint64(31), None),
)
CACHED_WORDS = 1 << 13  # words that are mixed together
Words = TypeVar("Words", Tensor, np.ndarray)
DROPOUT_LEVELS = 1 << 16  # a dropout decision takes 16 of a word's 64 bits


def signed(value: int) -> int:
    """Return the int64 that has the same 64 bits as `value` modulo 2^64."""
    value &= MASK
    return value - (1 << 64) if value >> 63 else value


def mix(value: int) -> int:
    """Return the SplitMix64 finalizer of a 64-bit integer, in [0, 2^64)."""
    value &= MASK
    value = ((value ^ (value >> 30)) * MULTIPLIER_1) & MASK
    value = ((value ^ (value >> 27)) * MULTIPLIER_2) & MASK
    return value ^ (value >> 31)


def _shift(words: Words, bits: int) -> Words:
    """Logical right shift of int64 words; their own shift keeps the sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def mix_words(words: Words) -> Words:
    """Return `mix` of every element of an int64 tensor or array, as int64 with the same bits."""
    if isinstance(words, np.ndarray):
        return _mix_array(words)
    if words.device.type == "cpu":
        return torch.from_numpy(_mix_array(words.numpy()))
    words = (words ^ _shift(words, 30)) * signed(MULTIPLIER_1)
    words = (words ^ _shift(words, 27)) * signed(MULTIPLIER_2)
    mixed: Words = words ^ _shift(words, 31)
    return mixed


def _mix_array(words: np.ndarray) -> np.ndarray:
    """Return `mix_words` of an int64 array, by unsigned shifts, part by part in the cache."""
    mixed = np.array(words, order="C").view(np.uint64)
    flat = mixed.reshape(-1)
    shifted = np.empty(min(len(flat), CACHED_WORDS), np.uint64)
    for start in range(0, len(flat), CACHED_WORDS):
        part = flat[start : start + CACHED_WORDS]
        other = shifted[: len(part)]
        for bits, multiplier in MIX_STEPS:
            np.right_shift(part, bits, out=other)
            np.bitwise_xor(part, other, out=part)
            if multiplier is not None:
                np.multiply(part, multiplier, out=part)
    return mixed.view(np.int64)


def unmix_words(words: Tensor) -> Tensor:
    """Return what `mix_words` made these words of: it loses nothing."""
    for bits, multiplier in ((31, MULTIPLIER_2), (27, MULTIPLIER_1), (30, 1)):
        unshifted = words
        for _ in range(64 // bits):
            unshifted = words ^ _shift(unshifted, bits)
        words = unshifted * signed(pow(multiplier, -1, 1 << 64))
    return words


def hash_text(text: str) -> int:
    """Return a stable 64-bit hash of a string."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def hash_texts(texts: Iterable[str]) -> Tensor:
    """Return `hash_text` of every string, (n,) int64 with the same bits."""
    return torch.tensor([signed(hash_text(text)) for text in texts], dtype=torch.int64)


@dataclass(frozen=True)
class Key:
    """A 64-bit key from which draws are made; `fold` derives others from it.

    >>> Key.of(7).fold("dropout", 3) == Key.of(7).fold("dropout", 3)
    True
    """

    value: int

    @staticmethod
    def of(seed: int) -> "Key":
        """Return the root key of a seed."""
        return Key(mix(seed + GOLDEN))

    def fold(self, *parts: int | str) -> "Key":
        """Return the key for a purpose, given as names and counters, order included."""
        value = self.value
        for part in parts:
            number = hash_text(part) if isinstance(part, str) else part
            value = mix(value * GOLDEN + number + 1)
        return Key(value)

    def words(self, row_key: Tensor, width: int) -> Tensor:
        """Return random words, (n, width) int64, for rows with keys (n,) int64."""
        rows = mix_words(row_key ^ signed(self.value))
        columns = torch.arange(1, width + 1, device=row_key.device) * signed(GOLDEN)
        return mix_words(rows[:, None] + columns)

    def uniform(self, row_key: Tensor, width: int = 1) -> Tensor:
        """Return draws from [0, 1) on a grid of 2^-53, (n, width) float64."""
        return (_shift(self.words(row_key, width), 11)).double() * 2.0**-53

    def draws(self, row_key: np.ndarray) -> np.ndarray:
        """Return the draws of `uniform` (n,) float64 for an array: few rows cost less in NumPy."""
        return _first_draws(row_key ^ signed(self.value))

    def matrix(self, rows: int, columns: int) -> Tensor:
        """Return draws from [0, 1), (rows, columns) float64, for something that is no row."""
        return self.uniform(torch.arange(rows), columns)

    def keep(self, row_key: Tensor, width: int, drop: float) -> Tensor:
        """Return which entries dropout keeps, (n, width) bool.

        `drop` is rounded to a multiple of 2^-16 below 1 (see `keep_probability`): four decisions
        share one 64-bit word, entry j taking bits 16 (j mod 4) and up of word j // 4.
        """
        threshold = _threshold(drop)
        words = self.words(row_key, -(-width // 4))
        if words.device.type == "cpu":
            levels = words.numpy().view(np.uint16)[:, :width]  # little-endian: low bits first
            return torch.from_numpy(levels >= np.uint16(threshold))
        lanes = words.view(torch.int16)[:, :width]
        # Flipping the top bit turns an unsigned comparison into a signed one.
        return (lanes ^ -32768) >= threshold - 32768

    def keep_entries(self, row_key: Tensor, column: Tensor, drop: float) -> Tensor:
        """Return the decisions of `keep` for some entries only, (m,) bool.

        Args:
            row_key: (m,) int64 of each entry's row.
            column: (m,) int64 of each entry.
            drop: see `keep`.
        """
        words = mix_words(row_key ^ signed(self.value))
        words = mix_words(words + (column // 4 + 1) * signed(GOLDEN))
        return ((words >> 16 * (column % 4)) & (DROPOUT_LEVELS - 1)) >= _threshold(drop)


def draws_of_keys(keys: Sequence[Key], counts: Sequence[int]) -> np.ndarray:
    """Return `Key.draws` of the row keys 0, 1, ... for several keys, one key after the other.

    Args:
        keys: K of them.
        counts: number of draws of each key, (K,).

    Returns:
        Numbers from [0, 1), (sum of counts,) float64.
    """
    values = np.array([signed(key.value) for key in keys])
    places = np.concatenate([np.arange(count) for count in counts])
    return _first_draws(places ^ values.repeat(counts))


def _first_draws(words: np.ndarray) -> np.ndarray:
    """Return the draws (n,) float64 of the first column, from row keys (n,) XOR the key."""
    words = mix_words(mix_words(words) + signed(GOLDEN))
    return _shift(words, 11).astype(np.float64) * 2.0**-53


def keep_probability(drop: float) -> float:
    """Return the exact probability with which `Key.keep` keeps an entry."""
    return 1.0 - _threshold(drop) / DROPOUT_LEVELS


def _threshold(drop: float) -> int:
    """Return how many of the levels are dropped: not all, since the rest is scaled to make up."""
    return min(round(drop * DROPOUT_LEVELS), DROPOUT_LEVELS - 1)
