"""Laws of the task on ratings: scikit-learn's scores from sums alone, seen and unseen apart.

C: clients.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import mean_absolute_error, root_mean_squared_error

from silograph.core.errors import ProtocolError
from silograph.task.counts import JudgedRows
from silograph.task.rating_value import RATING
from silograph.task.scores import PARTS

N, C = 400, 7
CLOSE = 1e-12


def drawn(seed: int = 0) -> JudgedRows:
    """Ratings with predictions; the last client has none."""
    rng = np.random.default_rng(seed)
    y = rng.integers(1, 6, N).astype(float)
    logits, val = y + rng.normal(size=N), rng.random(N) < 0.5
    parts = logits[:, None], y, val, rng.integers(0, C - 1, N), rng.random(N) < 0.7
    out, rating, part, client, seen = (torch.from_numpy(a) for a in parts)
    return JudgedRows(out, rating, part, client, C, "rating", seen=seen)


@pytest.mark.parametrize("seed", range(3))
def test_scores_are_those_of_scikit_learn_on_pooled_predictions(seed: int) -> None:
    rows = drawn(seed)
    counts = RATING.tally(rows)
    assert rows.seen is not None
    for part, chosen in zip(PARTS, (rows.val, ~rows.val), strict=True):
        scores = RATING.scores(counts, part)
        assert scores is not None
        for name, mask in {
            "": chosen,
            "_seen": chosen & rows.seen,
            "_unseen": chosen & ~rows.seen,
        }.items():
            pair = rows.y[mask].numpy(), rows.logits[mask, 0].numpy()
            assert scores[f"rmse{name}"] == pytest.approx(root_mean_squared_error(*pair), abs=CLOSE)
        pair = rows.y[chosen].numpy(), rows.logits[chosen, 0].numpy()
        assert scores.mae == pytest.approx(mean_absolute_error(*pair), abs=CLOSE)
        assert scores.loss == pytest.approx(root_mean_squared_error(*pair) ** 2, abs=CLOSE)
        own = RATING.client_scores(counts, part)["rmse"]
        for client in range(C - 1):
            mine = chosen & (rows.group == client)
            pair = rows.y[mask := mine].numpy(), rows.logits[mask, 0].numpy()
            assert own[client] == pytest.approx(root_mean_squared_error(*pair), abs=CLOSE)
        assert own[-1] is None
        mean = np.mean([value for value in own if value is not None])
        assert scores.rmse_client_mean == pytest.approx(mean, abs=CLOSE)


def test_counts_are_as_they_are_declared() -> None:
    counts, specs = RATING.tally(drawn()), RATING.counts(1)
    assert counts.keys() == specs.keys()
    for name, spec in specs.items():
        assert tuple(counts[name].shape) == (C, *spec.shape)
        assert counts[name].dtype is spec.dtype
        assert spec.low == 0


def test_nobody_is_seen_where_nobody_says_so() -> None:
    scores = RATING.scores(RATING.tally(replace(drawn(), seen=None)), "test")
    assert scores is not None
    assert (scores.rmse_seen, scores.rmse_unseen) == (None, None)
    none = {name: torch.zeros_like(t) for name, t in RATING.tally(drawn()).items()}
    assert RATING.scores(none, "val") is None


def test_the_mean_is_the_best_constant() -> None:
    y = drawn().y
    best = RATING.constant_logits(y, 1)
    torch.testing.assert_close(best, y.mean()[None])
    assert torch.equal(RATING.decide(drawn().logits), drawn().logits[:, 0])


def test_the_loss_is_the_squared_error_where_there_is_a_rating() -> None:
    y = torch.tensor([3.0, torch.nan], dtype=torch.float64)
    loss = RATING.loss(torch.tensor([[1.0], [9.0]]), y)
    assert loss.tolist() == [4.0, 0.0]


@pytest.mark.parametrize("name", ["logits", "y"])
def test_rows_of_another_shape_are_refused(name: str) -> None:
    rows = drawn()
    with pytest.raises(ProtocolError, match="judge"):
        RATING.tally(replace(rows, **{name: getattr(rows, name)[1:]}))
