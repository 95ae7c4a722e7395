"""Draws by importance: eq. 8, draws without replacement, and the unbiased way."""

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from silograph.core.key import Key
from silograph.core.payload import offsets, owners
from silograph.methods.fedais import (
    draw_order,
    draw_systematically,
    first_nodes,
    inclusion_probabilities,
    probabilities,
)
from silograph.nn.segment import segment_sum

SIZES = torch.tensor([5, 0, 1, 7])
OFF = offsets(SIZES)
KEYS = torch.arange(13) * 7 + 3


def changes() -> Tensor:
    drawn = Key.of(1).uniform(torch.arange(13))[:, 0] - 0.5
    return torch.where(torch.arange(13) == 5, 0.0, drawn)  # the third client's only loss stayed


@pytest.mark.parametrize("floor", [0.0, 0.1, 1.0])
def test_probabilities_are_those_of_eq_8(floor: float) -> None:
    p = probabilities(changes(), OFF, floor)
    for a, b in itertools.pairwise(OFF.tolist()):
        size = changes()[a:b].abs()
        if b > a:
            even = torch.full((b - a,), 1 / (b - a), dtype=torch.float64)
            share = size / size.sum() if float(size.sum()) else even
            torch.testing.assert_close(p[a:b], (1 - floor) * share + floor * even)
            assert float(p[a:b].sum()) == pytest.approx(1)


def test_the_first_draw_follows_p_and_the_second_what_is_left() -> None:
    p = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    off, draws = torch.tensor([0, 4]), 5_000
    keys = torch.arange(4)
    orders = torch.stack([draw_order(p, off, keys, Key.of(s)) for s in range(draws)])
    assert bool((orders.sort(1).values == keys).all())  # without replacement
    first = torch.bincount(orders[:, 0], minlength=4) / draws
    torch.testing.assert_close(first.double(), p, rtol=0, atol=0.015)
    for i, j in itertools.permutations(range(4), 2):
        share = ((orders[:, 0] == i) & (orders[:, 1] == j)).double().mean()
        assert float(share) == pytest.approx(float(p[i] * p[j] / (1 - p[i])), abs=0.015)


def test_draws_are_those_of_each_client_alone_in_any_numbering() -> None:
    p, key = probabilities(changes(), OFF, 0.1), Key.of(4)
    count = torch.tensor([3, 0, 1, 4])
    rows, off = first_nodes(draw_order(p, OFF, KEYS, key), OFF, count)
    assert off.diff().tolist() == count.tolist()
    for c, (a, b) in enumerate(itertools.pairwise(OFF.tolist())):
        mine = rows[off[c] : off[c + 1]]
        turned = torch.arange(b - 1, a - 1, -1)
        one = draw_order(p[turned], torch.tensor([0, b - a]), KEYS[turned], key)
        assert turned[one[: int(count[c])]].tolist() == mine.tolist()


def inclusions_of_one(p: list[float], count: int) -> list[float]:
    """min(1, c p) with c by bisection."""
    low, high = 0.0, 1e9
    for _ in range(200):
        c = (low + high) / 2
        low, high = (c, high) if sum(min(1, c * x) for x in p) < count else (low, c)
    return [min(1, low * x) for x in p]


def test_inclusions_sum_to_the_count_and_are_proportional_below_1() -> None:
    p = probabilities(changes() ** 3, OFF, 0.05)
    for count in itertools.product([1, 3, 5], [0], [1], [1, 4, 6, 7]):
        wanted = torch.tensor(count)
        pi = inclusion_probabilities(p, OFF, wanted)
        torch.testing.assert_close(segment_sum(pi, OFF), wanted.double())
        for c, (a, b) in enumerate(itertools.pairwise(OFF.tolist())):
            if b > a:
                oracle = inclusions_of_one(p[a:b].tolist(), count[c])
                assert pi[a:b].tolist() == pytest.approx(oracle, abs=1e-6)


def test_inclusions_do_not_depend_on_other_clients() -> None:
    """Probabilities of very different sizes, some 0, beside many clients with a whole each."""
    sizes = torch.arange(200) % 23
    off, size = offsets(sizes), 10.0 ** (-24 * Key.of(3).matrix(int(sizes.sum()), 1)[:, 0])
    size[torch.arange(len(size)) % 5 == 0] = 0
    p, count = probabilities(size, off, 0.0), torch.floor(0.7 * sizes.double() + 0.5).long()
    pi = inclusion_probabilities(p, off, count)
    for c, (a, b) in enumerate(itertools.pairwise(off.tolist())):
        alone = inclusion_probabilities(p[a:b], torch.tensor([0, b - a]), count[c : c + 1])
        assert torch.equal(pi[a:b], alone)
        some = int((p[a:b] > 0).sum())
        assert float(pi[a:b].sum()) == pytest.approx(min(int(count[c]), some), rel=1e-9)
        assert bool((pi[a:b][p[a:b] == 0] == 0).all())


def test_systematic_draws_have_their_inclusions_by_enumeration() -> None:
    """A piece of length pi meets a grid with a random start with probability pi: all starts."""
    pi = inclusion_probabilities(
        probabilities(changes(), OFF, 0.2), OFF, torch.tensor([2, 0, 1, 3])
    )
    starts = 4000

    hits = torch.zeros(13, dtype=torch.float64)
    for number in range(starts):
        found = draw_systematically(
            pi, OFF, KEYS, _Fixed(5, (number + 0.5) / starts), torch.arange(4)
        )
        hits += found
        counts = segment_sum(found.long(), OFF)
        assert counts.tolist() in ([2, 0, 1, 3],)
    torch.testing.assert_close(hits / starts, pi, rtol=0, atol=2 / starts)


@dataclass(frozen=True)
class _Fixed(Key):
    """A key whose uniform draws all have one value."""

    start: float = 0.0

    def fold(self, *parts: int | str) -> Key:
        return self if parts == ("start",) else Key(self.value).fold(*parts)

    def uniform(self, row_key: Tensor, width: int = 1) -> Tensor:
        return torch.full((len(row_key), width), self.start, dtype=torch.float64)


def test_weighed_losses_are_unbiased_by_enumeration() -> None:
    """The mean over all starts of sum of f / (n pi) is the mean of f of each client."""
    f = Key.of(8).uniform(torch.arange(13))[:, 0]
    pi = inclusion_probabilities(
        probabilities(changes(), OFF, 0.2), OFF, torch.tensor([2, 0, 1, 3])
    )
    starts, total = 4000, torch.zeros(4, dtype=torch.float64)
    for number in range(starts):
        found = draw_systematically(
            pi, OFF, KEYS, _Fixed(5, (number + 0.5) / starts), torch.arange(4)
        )
        total += segment_sum(torch.where(found, f / (SIZES[owners(OFF)] * pi), 0), OFF) / starts
    mean = segment_sum(f, OFF) / SIZES.clamp(min=1)
    torch.testing.assert_close(total, mean, rtol=0, atol=2e-3)


def test_changes_of_any_size_give_probabilities() -> None:
    """Their sum would be infinite."""
    p = probabilities(torch.tensor([1e308, 1.5e308, 1.0, 3.0]), torch.tensor([0, 2, 4]), 0.0)
    assert p.tolist() == [0.5, 0.5, 0.25, 0.75]


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_loss_that_is_no_number_changes_nobody_elses_draws(bad: float) -> None:
    """It counts as no change, so that its client draws by the others."""
    change, wild = changes(), changes()
    change[1], wild[1] = 0.0, bad
    p, count = probabilities(wild, OFF, 0.2), torch.tensor([2, 0, 1, 3])
    assert torch.equal(p, probabilities(change, OFF, 0.2))
    assert bool(p.isfinite().all())
    found = draw_systematically(
        inclusion_probabilities(p, OFF, count), OFF, KEYS, Key.of(4), torch.arange(4)
    )
    assert segment_sum(found.long(), OFF).tolist() == count.tolist()
