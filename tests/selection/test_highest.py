"""Choosing by scores, by the definition: sort by score, then by draw, then by place."""

import numpy as np
import pytest
import torch

from silograph.core.errors import ProtocolError
from silograph.core.key import Key, hash_texts
from silograph.selection.base import draw_by_name, draw_ids, highest, mask_of_top, race_scores
from silograph.selection.oort import quantile
from silograph.selection.registry import SELECTORS

IDS = tuple(f"silo {i}" for i in range(40))
DRAWS = np.random.default_rng(0)


@pytest.mark.parametrize("value", [0, 1, 1 << 63, (1 << 64) - 1])
def test_draws_are_those_of_the_names(value: int) -> None:
    key = Key(value)
    expected = key.uniform(hash_texts(IDS))[:, 0]
    assert torch.equal(torch.from_numpy(draw_by_name(IDS, key)), expected)


@pytest.mark.parametrize("number", [0, 1, 7, 39, 40])
@pytest.mark.parametrize("kinds", [1, 3, 1000])
def test_the_highest_are_those_of_a_sort(number: int, kinds: int) -> None:
    scores, key = DRAWS.integers(0, kinds, len(IDS)).astype(float), Key.of(number)
    scores[3], scores[5] = np.inf, -np.inf
    draws = draw_by_name(IDS, key)
    by_draw = sorted(range(len(IDS)), key=lambda i: (-scores[i], draws[i]))[:number]
    assert highest(IDS, scores, number, key) == [IDS[i] for i in sorted(by_draw)]
    by_place = sorted(range(len(IDS)), key=lambda i: (-scores[i], i))[:number]
    assert mask_of_top(scores, number).nonzero()[0].tolist() == sorted(by_place)
    lowest = sorted(range(len(IDS)), key=lambda i: draws[i])[:number]
    assert draw_ids(IDS, number, key) == [IDS[i] for i in sorted(lowest)]


def test_weight_0_comes_last_in_a_race() -> None:
    weights = np.where(np.arange(len(IDS)) < 30, 0.0, 1.0)
    found = race_scores(IDS, weights, Key.of(1))
    assert np.isfinite(found).all()
    assert mask_of_top(found, 10).nonzero()[0].tolist() == list(range(30, 40))


@pytest.mark.parametrize("count", [1, 2, 21, 40])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.95, 1.0])
def test_quantiles_are_torchs(count: int, share: float) -> None:
    values = DRAWS.random(count)
    assert quantile(values, share) == float(torch.from_numpy(values).quantile(share))


def test_scores_that_rank_nobody_are_refused() -> None:
    scores = np.zeros(3)
    with pytest.raises(ProtocolError, match="at least 4 clients, none of them NaN, got 3, 0 of"):
        highest(IDS[:3], scores, 4, Key.of(0))
    scores[1] = np.nan
    with pytest.raises(ProtocolError, match="at least 2 clients, none of them NaN, got 3, 1 of"):
        highest(IDS[:3], scores, 2, Key.of(0))


@pytest.mark.parametrize("name", ["power_of_choice", "oort", "harmony", "round_robin"])
def test_a_run_that_began_with_more_than_there_are_goes_on_with_all(name: str) -> None:
    """Its options were taken then, and a run that goes on does not begin anew."""
    selector, ids = SELECTORS[name], IDS[:5]
    state = selector.init(ids, selector.options())
    given = selector.options(clients=10)
    assert selector.draw(ids, given, state, 2, Key.of(0)) == list(ids)
