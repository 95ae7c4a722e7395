"""Laws of the keys: equal to a definition in Python's integers, and free of position and order.

The definition is written out here a second time, on integers of any size; bounds on means are
five standard deviations of what they bound. All keys are fixed, so that nothing here is flaky.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from silograph.core.key import (
    GOLDEN,
    Key,
    draws_of_keys,
    hash_text,
    keep_probability,
    mix,
    mix_words,
    signed,
)

BITS = 2**64
INT64 = st.integers(-(2**63), 2**63 - 1)
SEED = st.integers(-(2**70), 2**70)


def finalizer(word: int) -> int:
    """SplitMix64's output function, on unsigned integers."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % BITS
    word = (word ^ word >> 27) * 0x94D049BB133111EB % BITS
    return word ^ word >> 31


def draws(key: Key, row_keys: list[int], width: int) -> list[list[int]]:
    """The unsigned words of `Key.words`: row r is one SplitMix64 stream, started by key and row."""
    starts = [finalizer((row % BITS) ^ key.value) for row in row_keys]
    return [[finalizer((s + j * GOLDEN) % BITS) for j in range(1, width + 1)] for s in starts]


def unsigned(words: Tensor) -> list[list[int]]:
    return [[word % BITS for word in row] for row in words.tolist()]


def some_rows(n: int, seed: int = 1) -> Tensor:
    """Return n row keys over all of int64, negative ones too."""
    return mix_words(torch.arange(seed * 10**6, seed * 10**6 + n))


def test_mix_gives_the_published_outputs_of_splitmix64() -> None:
    # The generator's first outputs for seed 0 and seed 1234567, from its reference implementation.
    first = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    assert [mix(i * GOLDEN) for i in range(1, 5)] == first
    second = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [mix(1234567 + i * GOLDEN) for i in range(1, 4)] == second


@given(value=SEED)
def test_mix_equals_its_definition_for_every_integer(value: int) -> None:
    assert mix(value) == finalizer(value % BITS)


@given(value=SEED)
def test_signed_keeps_the_bits_and_fits_int64(value: int) -> None:
    assert signed(value) % BITS == value % BITS
    assert -(2**63) <= signed(value) < 2**63


@given(words=st.lists(INT64, max_size=20))
def test_mix_words_has_the_bits_of_mix(words: list[int]) -> None:
    mixed = mix_words(torch.tensor(words, dtype=torch.int64))
    assert mixed.dtype == torch.int64
    assert [word % BITS for word in mixed.tolist()] == [mix(word) for word in words]


def test_hash_text_is_pinned() -> None:
    # The output of `printf TEXT | b2sum -l 64`, read as little-endian bytes.
    assert hash_text("").to_bytes(8, "little").hex() == "e4a6a0577479b2b4"
    assert hash_text("dropout").to_bytes(8, "little").hex() == "2af113fef7194397"


@given(seed=SEED)
def test_a_key_is_64_bits_for_every_seed(seed: int) -> None:
    assert Key.of(seed).value == finalizer((seed + GOLDEN) % BITS)


def test_fold_equals_its_definition() -> None:
    key = Key.of(5)
    expected = key.value
    for number in (hash_text("layer"), 3, -1, 2**63):
        expected = finalizer((expected * GOLDEN + number + 1) % BITS)
    assert key.fold("layer", 3, -1, 2**63) == Key(expected)


@given(seed=SEED, parts=st.lists(st.integers(-(2**63), 2**64) | st.text(max_size=5), max_size=4))
def test_folding_at_once_is_folding_one_by_one(seed: int, parts: list[int | str]) -> None:
    key = Key.of(seed)
    for part in parts:
        key = key.fold(part)
    assert key == Key.of(seed).fold(*parts)


def test_folds_of_different_parts_differ() -> None:
    key = Key.of(0)
    parts: list[tuple[int | str, ...]] = [
        (), ("a",), ("b",), ("a", "b"), ("b", "a"), ("ab",), (0,), (1,), (0, 1), (1, 0), (0, 0),
        ("0",), ("a", 1), (1, "a"), ("",), (-1,),
    ]  # fmt: skip
    assert len({key.fold(*part) for part in parts}) == len(parts)
    assert len({Key.of(seed).fold(*part) for seed in range(50) for part in parts}) == 50 * len(
        parts
    )


@given(seed=SEED, rows=st.lists(INT64, max_size=6), width=st.integers(0, 9))
def test_words_equal_their_definition(seed: int, rows: list[int], width: int) -> None:
    key = Key.of(seed)
    words = key.words(torch.tensor(rows, dtype=torch.int64), width)
    assert words.shape == (len(rows), width)
    assert unsigned(words) == draws(key, rows, width)


@given(seed=SEED, rows=st.lists(INT64, max_size=6), width=st.integers(0, 9))
def test_uniform_is_the_upper_53_bits(seed: int, rows: list[int], width: int) -> None:
    key = Key.of(seed)
    uniform = key.uniform(torch.tensor(rows, dtype=torch.int64), width)
    assert uniform.dtype == torch.float64
    # 53 bits are what a double holds: the comparison is exact.
    expected = [[(word >> 11) / 2**53 for word in row] for row in draws(key, rows, width)]
    assert uniform.tolist() == expected


@given(
    seed=SEED,
    rows=st.lists(INT64, max_size=6),
    width=st.integers(0, 9),
    drop=st.floats(0, 1, exclude_max=True),
)
@example(seed=0, rows=[0, -1], width=5, drop=1 - 1e-9)
def test_keep_compares_16_bit_lanes(seed: int, rows: list[int], width: int, drop: float) -> None:
    key = Key.of(seed)
    keep = key.keep(torch.tensor(rows, dtype=torch.int64), width, drop)
    assert keep.shape == (len(rows), width)
    threshold = min(round(drop * 2**16), 2**16 - 1)
    words = draws(key, rows, -(-width // 4))
    lanes = [[row[j // 4] >> 16 * (j % 4) & 0xFFFF for j in range(width)] for row in words]
    assert keep.tolist() == [[lane >= threshold for lane in row] for row in lanes]


@pytest.mark.parametrize("drop", [0.0, 0.3, 0.999])
def test_entries_have_the_decisions_of_their_rows(drop: float) -> None:
    rows, key = torch.arange(20) * 7 - 40, Key.of(3)
    whole = key.keep(rows, 11, drop)
    row, column = (
        t.flatten() for t in torch.meshgrid(torch.arange(20), torch.arange(11), indexing="ij")
    )
    assert torch.equal(key.keep_entries(rows[row], column, drop).view(20, 11), whole)


def test_keep_decides_at_the_very_lane() -> None:
    key, rows = Key.of(0), [-1, 0, 5]
    for i, row in enumerate(draws(key, rows, 2)):
        for j in range(8):
            lane = row[j // 4] >> 16 * (j % 4) & 0xFFFF
            # A lane equal to the threshold is kept, one below it is dropped.
            for threshold, kept in ((lane, True), (lane + 1, False)):
                keep = key.keep(torch.tensor(rows), 8, threshold / 2**16)
                assert bool(keep[i, j]) == kept


@given(drop=st.floats(0, 1, exclude_max=True))
@example(drop=1 - 1e-9)
def test_keep_probability_is_the_share_of_lanes_that_are_kept(drop: float) -> None:
    threshold = min(round(drop * 2**16), 2**16 - 1)
    assert keep_probability(drop) == len(range(threshold, 2**16)) / 2**16
    assert keep_probability(drop) > 0  # activations are divided by it


@pytest.mark.parametrize("drop", [0.0, 2**-18])
def test_nothing_is_dropped_at_0(drop: float) -> None:
    assert Key.of(0).keep(some_rows(500), 40, drop).all()
    assert keep_probability(drop) == 1


@pytest.mark.parametrize("drop", [0.1, 0.3, 0.5, 0.75, 0.999, 1 - 1e-9])
def test_share_kept_is_the_keep_probability(drop: float) -> None:
    n, width = 4000, 50
    share = float(Key.of(3).fold("share").keep(some_rows(n), width, drop).double().mean())
    p = keep_probability(drop)
    assert abs(p - (1 - drop)) <= 2**-16
    assert abs(share - p) <= 5 * math.sqrt(p * (1 - p) / (n * width))


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1])
def test_uniform_has_the_moments_of_the_uniform_distribution(seed: int) -> None:
    x = Key.of(seed).uniform(some_rows(5000), 40)
    n = x.numel()
    assert float(x.min()) >= 0
    assert float(x.max()) < 1
    # Var(u) = 1/12; Var((u - 1/2)^2) = 1/80 - 1/144.
    assert abs(float(x.mean()) - 1 / 2) <= 5 * math.sqrt(1 / 12 / n)
    second = float(((x - 1 / 2) ** 2).mean())
    assert abs(second - 1 / 12) <= 5 * math.sqrt((1 / 80 - 1 / 144) / n)


def test_draws_of_other_keys_rows_and_columns_are_uncorrelated() -> None:
    rows, n, width = torch.arange(20_000), 20_000, 3  # neighboring counters: the hardest case
    keys = [Key.of(0), Key.of(1), Key.of(0).fold("dropout", 1), Key.of(0).fold("dropout", 2)]
    x = torch.cat([key.uniform(rows, width) for key in keys], dim=1)
    x = torch.cat([x, x.roll(1, dims=0)], dim=1)
    off_diagonal = torch.corrcoef(x.T) - torch.eye(x.shape[1])
    assert float(off_diagonal.abs().max()) <= 5 / math.sqrt(n)


@pytest.mark.parametrize("name", ["words", "uniform", "keep"])
def test_draws_for_a_row_do_not_depend_on_the_other_rows(name: str) -> None:
    def draw(rows: Tensor) -> Tensor:
        key = Key.of(11)
        return key.keep(rows, 7, 0.4) if name == "keep" else getattr(key, name)(rows, 7)

    rows = some_rows(60)
    whole = draw(rows)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    assert torch.equal(draw(rows[order]), whole[order])
    subset = torch.tensor([41, 3, 3, 59])
    assert torch.equal(draw(rows[subset]), whole[subset])
    # A view with a stride is a row key like any other.
    assert torch.equal(draw(rows[::2]), whole[::2])


@pytest.mark.parametrize("name", ["words", "uniform", "keep"])
def test_a_wider_draw_starts_with_the_narrower_one(name: str) -> None:
    def draw(width: int) -> Tensor:
        key, rows = Key.of(-7), some_rows(20)
        return key.keep(rows, width, 0.4) if name == "keep" else getattr(key, name)(rows, width)

    widest = draw(13)
    for width in range(13):
        assert torch.equal(draw(width), widest[:, :width])


def test_draws_of_several_keys_are_those_of_each() -> None:
    keys, counts = [Key.of(seed) for seed in range(4)], [3, 0, 1, 5]
    each = [key.draws(np.arange(count)) for key, count in zip(keys, counts, strict=True)]
    assert draws_of_keys(keys, counts).tolist() == np.concatenate(each).tolist()


def test_matrix_is_the_draw_for_counted_rows() -> None:
    key = Key.of(9)
    assert torch.equal(key.matrix(5, 3), key.uniform(torch.arange(5), 3))
    assert torch.equal(key.matrix(5, 3), key.matrix(8, 4)[:5, :3])
