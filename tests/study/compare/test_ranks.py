"""Laws of ranks over data sets: figures are those of scipy, and few data sets show little."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import silograph as sg
from commands import save
from conftest import planted_graph
from silograph.study.comparison import Comparison
from silograph.study.ranking import rank_arms

SCORES = {"a": [0.7, 0.8, 0.6, 0.9], "b": [0.9, 0.9, 0.8, 0.8], "c": [0.8, 0.7, 0.6, 0.7]}


def test_ranks_and_tests_are_those_of_scipy() -> None:
    ranking = rank_arms(SCORES)
    ranks = np.array([stats.rankdata([-s[n] for s in SCORES.values()]) for n in range(4)]).mean(0)
    assert list(ranking.mean_ranks) == ["b", "a", "c"]
    assert list(ranking.mean_ranks.values()) == pytest.approx(sorted(ranks))
    assert ranking.p == pytest.approx(stats.friedmanchisquare(*SCORES.values()).pvalue)
    # Table 5 of Demšar: q for three arms at the 5 % level.
    assert ranking.critical_difference == pytest.approx(2.343 * math.sqrt(3 * 4 / 24), abs=1e-3)
    wide = (ranks[2] - ranks[1]) / math.sqrt(3 * 4 / 48)
    assert ranking.p_values["c"] == pytest.approx(stats.studentized_range.sf(wide, 3, np.inf))


def test_a_difference_is_critical_where_its_p_value_is_below_the_level() -> None:
    many = {"a": [0.9] * 8, "b": [0.8] * 8, "c": [0.7] * 8}
    ranking = rank_arms(many)
    for arm, p in ranking.p_values.items():
        assert (p < 0.05) == (ranking.mean_ranks[arm] - 1 > ranking.critical_difference)


def test_two_arms_and_ties() -> None:
    two = rank_arms({"a": [0.5, 0.6, 0.7], "b": [0.4, 0.4, 0.4]})
    assert two.p is None
    assert two.critical_difference == pytest.approx(1.960 / math.sqrt(3), abs=1e-3)
    assert "Friedman's test needs 3 arms" in two.notes[0]
    assert two.notes[1].endswith("which 3 data sets cannot show for any two of 2 arms")
    tied = rank_arms({"a": [0.5] * 3, "b": [0.5] * 3, "c": [0.5] * 3})
    assert set(tied.mean_ranks.values()) == {2.0}
    assert tied.p == 1.0


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    folder = tmp_path_factory.mktemp("ranked")
    paths = []
    for number in range(3):
        paths.append(folder / f"g{number}.npz")
        save(paths[-1], planted_graph(40 + 10 * number))
    arms: dict[str, Any] = {m: {"method": m} for m in ("fedavg", "fedprox", "local")}
    small: dict[str, Any] = {"clients": 2, "rounds": 1, "hidden": 4, "partition": "random"}
    return sg.compare(paths, arms=arms, seeds=2, processes=0, **small)


def test_several_data_sets_are_ranked_by_mean_scores(ranked: Comparison) -> None:
    assert ranked.point_keys == ("dataset",)
    assert ranked.ranking is not None
    views = {row["view"] for row in ranked.rows}
    (view,) = views
    scores = {
        arm: [row[f"{view}_mean"] for row in ranked.rows if row["arm"] == arm]
        for arm in ranked.arms
    }
    assert ranked.ranking == rank_arms(scores)
    for text in (ranked.summary(80), ranked.to_markdown(), ranked.to_latex(), ranked.to_json()):
        assert "ranking" in text
        assert f"{ranked.ranking.critical_difference:.2f}" in text
    assert max(len(line) for line in ranked.summary(80).splitlines()) <= 80


def test_fewer_data_sets_or_an_arm_without_scores(ranked: Comparison) -> None:
    paths = list(dict.fromkeys(cell.config.dataset for cell in ranked.cells))
    keep = [cell.config.dataset != paths[0] for cell in ranked.cells]
    two = replace(
        ranked,
        cells=tuple(c for c, k in zip(ranked.cells, keep, strict=True) if k),
        lines=tuple(line for line, k in zip(ranked.lines, keep, strict=True) if k),
    )
    assert two.ranking is None
    assert "ranking" not in two.summary()
    failed = tuple(
        {"error": "why", "versions": (line or {})["versions"]}
        if ranked.arm_of[cell] == "local" and cell.config.dataset == paths[0]
        else line
        for cell, line in zip(ranked.cells, ranked.lines, strict=True)
    )
    without = replace(ranked, lines=failed).ranking
    assert without is not None
    assert set(without.mean_ranks) == {"fedavg", "fedprox"}


def test_one_path_is_no_list(tmp_path: Path) -> None:
    save(tmp_path / "g.npz", planted_graph(30))
    table = sg.compare(
        [str(tmp_path / "g.npz")], methods=["local"], seeds=1, processes=0, rounds=1, clients=2
    )
    assert [row["dataset"] for row in table.rows] == [str(tmp_path / "g.npz")]
