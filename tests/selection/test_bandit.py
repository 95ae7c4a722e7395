"""FedACS' bandit on tables worked by hand, and its laws over random rewards."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from silograph.core.key import Key
from silograph.federation.base import positions_of
from silograph.selection.base import RoundFacts, SelectorState
from silograph.selection.ucb import UCB, UcbOptions, arms_of, draw, init, observe

IDS = ("a", "b", "c")
LN2, LN3, LN4, LN5 = (math.log(n) for n in (2, 3, 4, 5))


def facts(
    chosen: str, score: float | None, *, away: str = "", higher: bool = False, ids: str = "abc"
) -> RoundFacts:
    """What a round shows: 0.1 of the budget for each selected client."""
    selected = torch.tensor([name in chosen for name in ids])
    answered = torch.tensor([name in chosen and name not in away for name in ids])
    zeros = torch.zeros(len(ids))
    return RoundFacts(
        selected,
        answered,
        zeros.long(),
        zeros.double(),
        zeros.long,
        None,
        None,
        scoring=lambda: score,
        higher=higher,
        costing=lambda: 0.1 * len(chosen),
    )


def watch(options: UcbOptions, *rounds: RoundFacts) -> SelectorState:
    state = init(IDS, options)
    for t, seen in enumerate(rounds, 1):
        state = observe(options, state, t, seen)
    return state


def choices(options: UcbOptions, state: SelectorState, t: int) -> set[str]:
    """What may be drawn, by the draws of many keys."""
    return {"".join(draw(IDS, options, state, t, Key.of(seed))) for seed in range(40)}


TARGET = UcbOptions(target=2.0)
TABLE = [
    # Round 1 takes all; the score that it begins with tells of no round.
    facts("abc", 4.0),
    # r_1 = 3: g_1 = (1 - 3/2) log 1 = 0, and R_3 = 0 - .3.
    facts("ab", 3.0),
    # r_2 = 1: g_2 = log(2)/2, R_2 = log(2)/2 - .2; clients a and b have log(2)/2 of 2 counts.
    facts("c", 1.0),
    # r_3 = 1.5: g_3 = log(3)/4, R_1 = log(3)/4 - .1; client c has log(3)/4 of 2 counts.
    facts("ac", 1.5),
    # r_4 = 2: g_4 = 0, R_2 has one more count and -.2; a and c one more count.
    facts("a", 2.0),
]


def test_the_table_of_three_arms() -> None:
    state = watch(TARGET, *TABLE)
    numbers = [LN3 / 4 - 0.1, LN2 / 2 - 0.2 - 0.2, -0.3]
    assert state["number_reward"].tolist() == pytest.approx(numbers, abs=1e-12)
    assert state["number_count"].tolist() == [1, 2, 1]
    clients = [LN2 / 2, LN2 / 2, LN3 / 4]
    assert state["reward"].tolist() == pytest.approx(clients, abs=1e-12)
    assert state["count"].tolist() == [3, 2, 3]
    assert (int(state["last_arm"]), state["last_clients"].tolist()) == (0, [True, False, False])


def test_choices_of_the_table() -> None:
    """Round 1 all; rounds 2 and 3 the other numbers; then eq. 16 and 17."""
    assert choices(TARGET, watch(TARGET), 1) == {"abc"}
    assert choices(TARGET, watch(TARGET, *TABLE[:1]), 2) == {"a", "b", "c", "ab", "ac", "bc"}
    assert choices(TARGET, watch(TARGET, *TABLE[:2]), 3) == {"a", "b", "c"}
    # t = 4. Number 1 waits for its reward; 2: log(2)/2 - .2 + sqrt(2 log 4) beats 3's -.3.
    # Client c: 0 + sqrt(2 log 4) = 1.67; a and b tie at log(2)/4 + sqrt(log 4) = 1.35.
    assert choices(TARGET, watch(TARGET, *TABLE[:3]), 4) == {"ac", "bc"}
    # t = 5. 1: log(3)/4 - .1 = .175 beats 2's .147 with the same bonus. a and b tie again:
    # log(2)/4 + sqrt(log 5) = 1.44, c: log(3)/8 + sqrt(log 5) = 1.41.
    assert choices(TARGET, watch(TARGET, *TABLE[:4]), 5) == {"a", "b"}
    # t = 6: 1: .175 + sqrt(2 log 6) = 2.07, 2: -.027 + sqrt(log 6) = 1.31, 3: -.3 + 1.89 = 1.59.
    # Client b: log(2)/4 + sqrt(log 6) = 1.51 beats a: log(2)/6 + sqrt(2 log(6) / 3) = 1.21.
    assert choices(TARGET, watch(TARGET, *TABLE), 6) == {"b"}


def test_equal_numbers_take_the_smaller_one() -> None:
    state = watch(TARGET, *TABLE)
    even = torch.tensor([0.5, 0.5, 0.5], dtype=torch.float64)
    tied = {**state, "number_reward": even, "number_count": torch.tensor([1, 1, 1])}
    assert {len(drawn) for drawn in choices(TARGET, tied, 6)} == {1}


def test_higher_scores_are_better_where_the_metric_says_so() -> None:
    """r_2 = .6 of a target of .5: (.6 / .5 - 1) log 2."""
    options = UcbOptions(target=0.5)
    seen = [facts("abc", 0.1), facts("ab", 0.2), facts("c", 0.6)]
    state = watch(options, *(replace(each, higher=True) for each in seen))
    assert float(state["reward"][0]) == pytest.approx(0.2 * LN2)


def test_without_a_target_rewards_are_relative_to_the_first_score() -> None:
    state = watch(UcbOptions(), facts("abc", 4.0), facts("ab", 3.0), facts("c", 1.0))
    assert float(state["target"]) == 4.0
    assert float(state["reward"][0]) == pytest.approx((1 - 1 / 4) * LN2)
    low = watch(UcbOptions(), facts("abc", 0.0, higher=True))
    assert float(low["target"]) == 0.01


@pytest.mark.parametrize("score", [None, math.nan, math.inf])
def test_a_round_without_a_score_counts_for_nobody(score: float | None) -> None:
    before = watch(TARGET, *TABLE[:2])
    after = observe(TARGET, before, 3, facts("c", score))
    for name in ("number_reward", "number_count", "reward", "count"):
        assert torch.equal(after[name], before[name])
    assert after["tried"].tolist() == [True, False, True]  # 2 is tried again
    assert choices(TARGET, after, 4) == {"ab", "ac", "bc"}


def test_a_silo_that_was_away_gets_neither_reward_nor_count() -> None:
    state = watch(TARGET, TABLE[0], facts("ab", 3.0, away="b"), TABLE[2])
    assert state["count"].tolist() == [2, 1, 1]
    assert state["reward"].tolist() == pytest.approx([LN2 / 2, 0, 0])


def test_a_client_without_a_count_comes_first() -> None:
    state = watch(TARGET, facts("abc", 4.0, away="c"), *TABLE[1:2], facts("a", 1.0))
    assert state["count"].tolist() == [2, 2, 0]
    assert all("c" in drawn for drawn in choices(TARGET, state, 4))


def test_ablations_draw_one_level() -> None:
    state = watch(TARGET, *TABLE)
    number = UcbOptions(target=2.0, level="number")
    assert choices(number, state, 6) == {"a", "b", "c"}
    clients = UcbOptions(target=2.0, level="clients")
    # Then a: log(2)/6 = .116 is above c: log(3)/12 = .092 with the same bonus.
    assert choices(clients, state, 6) == {"b", "ab", "abc"}


def test_arms_are_on_a_grid() -> None:
    assert arms_of(5, UcbOptions()).tolist() == [1, 2, 3, 4, 5]
    assert arms_of(100, UcbOptions(arms=10)).tolist() == [1, 12, 23, 34, 45, 56, 67, 78, 89, 100]
    assert arms_of(100, UcbOptions(arms=3, least_clients=50)).tolist() == [50, 75, 100]
    assert arms_of(4, UcbOptions(arms=9, least_clients=3)).tolist() == [3, 4]


@given(
    scores=st.lists(st.none() | st.floats(0, 10), min_size=1, max_size=30),
    seed=st.integers(0, 5),
    arms=st.none() | st.integers(2, 6),
    least=st.integers(1, 6),
    away=st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_laws_over_random_rewards(
    scores: list[float | None], seed: int, arms: int | None, least: int, away: list[bool]
) -> None:
    """Every arm is tried as soon as scores allow; counts are those of scored, answered rounds."""
    ids = "abcdef"
    most = max(2, len(ids) + 1 - least)  # more are refused
    options = UcbOptions(arms=arms and min(arms, most), least_clients=least)
    numbers = arms_of(len(ids), options).tolist()
    gone = "".join(name for name, is_away in zip(ids, away, strict=True) if is_away)
    state, seen = init(ids, options), []
    for t, score in enumerate(scores, 1):
        chosen = draw(ids, options, state, t, Key.of(seed).fold(t))
        positions_of(ids, chosen)
        assert len(chosen) in numbers
        state = observe(options, state, t, facts("".join(chosen), score, away=gone, ids=ids))
        seen.append(set(chosen))
    scored = [chosen for chosen, after in zip(seen, scores[1:], strict=False) if after is not None]
    assert int(state["number_count"].sum()) == len(scored)
    counts = [0 if n in gone else sum(n in chosen for chosen in scored) for n in ids]
    assert state["count"].tolist() == counts
    if None not in scores:
        explored = {len(chosen) for chosen in seen[: len(numbers)]}
        assert len(explored) == min(len(numbers), len(seen))
    assert UCB.on_receipt


@pytest.mark.parametrize("score", [1e299, 1e308])
def test_sums_of_rewards_stay_finite(score: float) -> None:
    """Else no arm would be the best any more; who reports such losses has the worst rewards."""
    state = watch(TARGET, facts("abc", 4.0), *(facts("ab", score) for _ in range(9)), facts("c", 1))
    assert all(bool(t.isfinite().all()) for t in state.values() if t.is_floating_point())
    assert bool(state["tried"].all())
    assert choices(TARGET, state, 12) == {"abc"}


def by_algorithm_1(ids: str, scores: list[float], target: float, seed: int) -> list[list[str]]:
    """Check every choice of a run against sums and bonuses worked out anew, round by round.

    Args:
        ids: clients, one letter each.
        scores: of the model that round t begins with, which tells of round t - 1.
        target: of the scores.
        seed: of the draws.
    """
    options = UcbOptions(target=target)
    rounds: list[list[str]] = []
    state = init(tuple(ids), options)
    of_number: dict[int, list[float]] = {m: [] for m in range(1, len(ids) + 1)}
    of_client: dict[str, list[float]] = {name: [] for name in ids}

    def bound(rewards: list[float], t: int) -> float:
        return sum(rewards) / len(rewards) + math.sqrt(2 * math.log(t) / len(rewards))

    for t, score in enumerate(scores, 1):
        chosen = draw(tuple(ids), options, state, t, Key.of(seed).fold(t))
        if t > len(ids):
            told = {m: bound(rewards, t) for m, rewards in of_number.items() if rewards}
            assert len(chosen) == max(told, key=lambda m: (told[m], -m))
            worth = {name: bound(of_client[name], t) for name in ids}
            others = [worth[name] for name in ids if name not in chosen]
            assert min(worth[name] for name in chosen) >= max(others, default=-math.inf)
        if t > 1:
            gain = (1 - score / target) * math.log(t - 1)
            of_number[len(rounds[-1])].append(gain - 0.1 * len(rounds[-1]))
            for name in rounds[-1]:
                of_client[name].append(gain)
        state = observe(options, state, t, facts("".join(chosen), score, ids=ids))
        rounds.append(chosen)
    return rounds


@given(scores=st.lists(st.floats(0.5, 3), min_size=6, max_size=20), seed=st.integers(0, 9))
def test_choices_are_those_of_algorithm_1(scores: list[float], seed: int) -> None:
    rounds = by_algorithm_1("abcd", scores, 1.5, seed)
    assert rounds[0] == list("abcd")
    assert sorted(len(chosen) for chosen in rounds[1:4]) == [1, 2, 3]
