"""Laws of `rating_profiles`: biases to begin with, folds that do not see themselves, no tables."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import silograph as sg
from mistakes import raises_code
from rating_graphs import rating_graph
from runs import SCORING_COSTS, assert_close, files_of, rows_of, run_until, same_bits, weights_of
from silograph.core.errors import ConfigError, DataError, ProtocolError
from silograph.core.key import Key
from silograph.graph.block.block import ClientBlock, kinds, make_block, pairs_of, whole
from silograph.graph.graph import Split
from silograph.graph.partition.partition import make_partition
from silograph.graph.partition.split import draw_split
from silograph.nn.rating_factors import OFFSET, RatingBiases
from silograph.nn.rating_profiles import PROFILE, RatingProfiles, profiles_of

MODEL = RatingProfiles(hidden=6, layers=2, dropout=0.0, damping=3.0, folds=4)
OPTIONS: dict[str, Any] = {
    "model": "rating_profiles",
    "method": "fedavg",
    "clients": 3,
    "partition": "category",
    "split": "0.6/0.2/0.2",
    "rounds": 3,
    "hidden": 8,
    "layers": 2,
    "dropout": 0.0,
    "lr": 0.01,
    "local_epochs": 2,
    "batch_size": 32,
    "dtype": "float64",
    "options": {"damping": 3.0},
}


def block_of(clients: int = 1, *, flip: bool = False) -> ClientBlock:
    """Ratings of a small graph; `flip` changes those that validate and test."""
    graph = rating_graph(20, 30, 300)
    cut = make_partition(graph, "random", clients=clients, key=Key.of(0))
    cut = whole(graph) if clients == 1 else cut
    split = draw_split(graph, cut, ratios=(0.5, 0.2, 0.3), key=Key.of(1))
    if flip:
        others = graph.labeled & ~split.train
        graph.y[others] = 6 - graph.y[others]
    return make_block(graph, cut, split, torch.float64)[0]


def weights_drawn(seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights whose heads are not 0."""
    key = Key.of(seed)
    return {
        n: key.fold(n).matrix(*s, *([1] * (2 - len(s)))).view(s) - 0.5
        for n, s in MODEL.weight_shapes.items()
    }


def test_the_first_predictions_are_those_of_the_biases() -> None:
    block = block_of()
    first = MODEL.forward(MODEL.init_weights(Key.of(0), torch.float64), block)
    biases = RatingBiases(3.0).forward({OFFSET: torch.zeros(1, dtype=torch.float64)}, block)
    torch.testing.assert_close(first, biases, rtol=0, atol=1e-6)


def test_a_fold_is_predicted_as_if_its_ratings_were_none_that_train() -> None:
    """Profiles of a fold are those of a client that trains on the other folds alone."""
    block, weights = block_of(), weights_drawn()
    found, row = profiles_of(MODEL, block), pairs_of(block).row
    said = MODEL.predict_pairs(weights, block, torch.arange(len(row)), None)
    assert sorted(found.fold.unique().tolist()) == [0, 1, 2, 3, 4]
    for fold in range(MODEL.folds):
        out = torch.zeros(len(block.y), dtype=torch.bool)
        out[row[found.fold == fold]] = True
        split = Split(block.split.train & ~out, block.split.val, out)
        without, _ = make_block(
            rating_graph(20, 30, 300), whole(rating_graph(20, 30, 300)), split, torch.float64
        )
        theirs = MODEL.forward(weights, without)[row]
        mine = found.fold == fold
        torch.testing.assert_close(said[mine], theirs[mine], rtol=0, atol=1e-12)


def test_labels_that_validate_and_test_reach_no_prediction() -> None:
    weights = weights_drawn()
    plain, flipped = (MODEL.forward(weights, block_of(flip=flip)) for flip in (False, True))
    assert torch.equal(plain, flipped)


def test_a_profile_by_hand() -> None:
    """User 0 rates items 5 and 6 by 5 and 3, user 1 rates item 5 by 1; damping 1."""
    graph = sg.ratings(
        ratings=np.array([[0, 5, 5], [0, 6, 3], [1, 5, 1]]), trust=np.array([[1, 0]])
    )
    all_train = Split(
        graph.labeled, torch.zeros_like(graph.labeled), torch.zeros_like(graph.labeled)
    )
    block = make_block(graph, whole(graph), all_train, torch.float64)[0]
    model = RatingProfiles(4, 1, 0.0, damping=1.0, folds=2)
    found = profiles_of(model, block)
    x, bias = found.x[-1], found.bias[-1]
    user, item = found.user, found.item
    assert float(found.mean[-1]) == 3
    # Ridge: (2 + 1) b_0 = 2 - b_5 - b_6, 2 b_1 = -2 - b_5, 3 b_5 = 0 - b_0 - b_1, 2 b_6 = -b_0.
    a = torch.tensor(
        [[3.0, 0, 1, 1], [0, 2, 1, 0], [1, 1, 3, 0], [1, 0, 0, 2]], dtype=torch.float64
    )
    solved = torch.linalg.solve(a, torch.tensor([2.0, -2, 0, 0], dtype=torch.float64))
    places = [int(user[0]), int(user[2]), int(item[0]), int(item[1])]
    torch.testing.assert_close(bias[places], solved, rtol=0, atol=1e-9)
    first = x[places[0]]
    assert float(first[1]) == pytest.approx(2 / 3)
    assert float(first[2]) == pytest.approx(np.log(3) / 3)
    assert float(first[4]) == pytest.approx(float(solved[2:].mean()))
    assert float(x[places[1], 9]) == pytest.approx(float(solved[0]) / 2)
    assert x.shape == (4, PROFILE)
    assert int((kinds(block.x) > 0).sum()) == 4


def test_all_figures_of_profiles_by_loops() -> None:
    """Biases are as they were found; the rest is worked out anew, node by node."""
    model = dataclasses.replace(MODEL, damping=2.0)
    block = block_of()
    found, pairs = profiles_of(model, block), pairs_of(block)
    train, value = block.split.train[pairs.row], block.y[pairs.row]
    rated = [
        (int(u), int(i), float(r))
        for u, i, r, some in zip(found.user, found.item, value, train, strict=True)
        if some
    ]
    mean = sum(r for _, _, r in rated) / len(rated)
    b = found.bias[-1].tolist()
    every = range(len(b))
    error = {(u, i): (r - mean - b[u] - b[i]) ** 2 for u, i, r in rated}
    usual = sum(error.values()) / len(error)
    entity = (kinds(block.x) > 0).any(dim=1).nonzero()[:, 0].tolist()
    place = {row: number for number, row in enumerate(entity)}
    trusted: list[list[int]] = [[] for _ in entity]
    for one, other in zip(block.adj.row.tolist(), block.adj.indices.tolist(), strict=True):
        if one in place and other in place:
            trusted[place[one]].append(place[other])
    near = [[i for u, i, _ in rated if u == v] + [u for u, i, _ in rated if i == v] for v in every]
    told = [[r - mean for u, i, r in rated if v in (u, i)] for v in every]
    raw = [sum(told[v]) / (len(told[v]) + 2) for v in every]
    size = [np.log(1 + len(near[v])) / 3 for v in every]
    errors = [[e for ends, e in error.items() if v in ends] for v in every]
    spread = [(sum(errors[v]) + 2 * usual) / (len(errors[v]) + 2) for v in every]
    around = [
        [sum(f[w] for w in near[v]) / max(len(near[v]), 1) for v in every]
        for f in (b, raw, size, spread)
    ]
    twice = [sum(around[0][w] for w in near[v]) / max(len(near[v]), 1) for v in every]
    friends = [[w for w in trusted[v] if near[w]] for v in every]
    trust = [sum(b[w] for w in friends[v]) / (len(friends[v]) + 2) for v in every]
    number = [np.log(1 + len(trusted[v])) / 3 for v in every]
    wanted = torch.tensor(
        [b, raw, size, spread, *around, twice, trust, number], dtype=torch.float64
    ).T
    torch.testing.assert_close(found.x[-1], wanted, rtol=0, atol=1e-12)
    assert max(len(each) for each in friends) > 1


def test_a_block_of_several_clients_is_refused() -> None:
    with pytest.raises(ProtocolError, match="expected a block of one client for ratings, got 2"):
        MODEL.forward(weights_drawn(), block_of(2))


@pytest.mark.law(sample=24)
@pytest.mark.parametrize("method", ["fedavg", "local", "scaffold", "fedper", "centralized"])
def test_methods_train_it_and_only_weights_travel(method: str) -> None:
    own = {"optimizer": "sgd"} if method == "scaffold" else {}
    result = sg.run(rating_graph(30, 40, 600), **OPTIONS | own | {"method": method})
    losses = [row["train_loss"] for row in rows_of(result)]
    assert losses[-1] < losses[0]
    assert result.ledger.bytes_by_kind.keys() <= {"control", "evaluation", "weights", "statistics"}
    is_alone = method in ("local", "centralized")  # no sums of shared biases then
    assert is_alone == ("statistics" not in result.ledger.bytes_by_kind)


def test_one_client_is_the_centralized_run_and_engines_agree() -> None:
    graph = rating_graph()
    alone = {n: v for n, v in OPTIONS.items() if n != "partition"} | {"clients": 1}
    central = sg.run(graph, **alone | {"method": "centralized", "partition": "random"})
    ours = sg.run(graph, **alone | {"partition": whole(graph), "keep_optimizer": True})
    assert_close(ours, central, 1e-12, *SCORING_COSTS)
    results = [sg.run(graph, **OPTIONS, strict=strict) for strict in (False, True)]
    assert same_bits(*(weights_of(result) for result in results))


def test_a_run_resumes_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, out = rating_graph(), tmp_path / "cut"
    options = OPTIONS | {"dropout": 0.3, "relevant": 4.0}
    sg.run(graph, **options, out=str(tmp_path / "whole"))
    run_until(monkeypatch, graph, 1, out, **options)
    sg.resume(out, graph=graph)
    assert files_of(out) == files_of(tmp_path / "whole")
    model = sg.load_model(tmp_path / "whole" / "model.safetensors")
    assert isinstance(model.shape, RatingProfiles)


def test_a_files_shape_is_checked(tmp_path: Path) -> None:
    """Sizes of a file that no run writes do not make memory."""
    result = sg.run(rating_graph(), **OPTIONS)
    assert result.model is not None
    for changed in ({"layers": 10**9}, {"hidden": (8, 8, 8)}, {"hidden": 10**9}):
        shape = dataclasses.replace(result.model.shape, **changed)  # type: ignore[type-var]
        dataclasses.replace(result.model, shape=shape).save(tmp_path / "m")
        with pytest.raises(DataError, match="expected weights of RatingProfiles"):
            sg.load_model(tmp_path / "m")


def test_the_model_alone_predicts_nothing() -> None:
    result = sg.run(rating_graph(), **OPTIONS)
    assert result.model is not None
    with pytest.raises(DataError, match="expected a model of nodes, got model rating"):
        result.model.predict(rating_graph())


def test_folds_are_two_at_least() -> None:
    with raises_code(ConfigError, "option-value", option="folds", got=1):
        sg.run(rating_graph(), **OPTIONS | {"options": {"folds": 1}})
