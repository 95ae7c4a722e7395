"""Laws of biases: scikit-learn's ridge in every silo, the same on the uncut graph, no weight."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

import silograph as sg
from mistakes import raises_code
from rating_graphs import rating_graph
from silograph.core.config import make_config
from silograph.core.key import Key
from silograph.experiment.run.setup import prepare, uncut_block
from silograph.graph.block.block import ClientBlock, make_block, pairs_of
from silograph.graph.partition.partition import make_partition
from silograph.graph.partition.split import choose_split
from silograph.nn.rating_factors import RatingBiases

KEY = Key.of(7)
CLOSE = 1e-10
GIVEN: dict[str, Any] = {
    "model": "rating_biases",
    "clients": 3,
    "partition": "category",
    "split": "0.6/0.2/0.2",
    "rounds": 1,
    "dtype": "float64",
}


def block_of(clients: int = 3) -> ClientBlock:
    graph = rating_graph()
    partition = make_partition(graph, "category", clients=clients, key=KEY)
    split = choose_split(graph, partition, "0.6/0.2/0.2", KEY)
    return make_block(graph, partition, split, torch.float64)[0]


def by_ridge(block: ClientBlock, damping: float) -> np.ndarray:
    """Return the predictions for each rating of a block by scikit-learn, client by client."""
    pairs, train = pairs_of(block), block.split.train.numpy()
    row, user, item = (t.numpy() for t in (pairs.row, pairs.user, pairs.item))
    one_hot = np.zeros((len(row), len(block.y)))
    one_hot[np.arange(len(row)), user] = 1
    one_hot[np.arange(len(row)), item] = 1
    y, client = block.y.numpy()[row], block.client.numpy()[row]
    said = np.zeros(len(row))
    for number in range(block.num_clients):
        mine = client == number
        fits = mine & train[row]
        mean = y[fits].mean()
        model = Ridge(alpha=damping, fit_intercept=False, solver="cholesky")
        model.fit(one_hot[fits], y[fits] - mean)
        said[mine] = mean + model.predict(one_hot[mine])
    return said


@pytest.mark.parametrize("damping", [1.0, 5.0])
@pytest.mark.parametrize("clients", [1, 3])
def test_biases_are_those_of_a_ridge_regression_in_each_silo(damping: float, clients: int) -> None:
    block, model = block_of(clients), RatingBiases(damping)
    said = model.forward(model.init_weights(KEY, torch.float64), block)[pairs_of(block).row, 0]
    torch.testing.assert_close(said, torch.from_numpy(by_ridge(block, damping)), rtol=0, atol=CLOSE)


def test_one_at_a_time_is_all_together() -> None:
    block, model = block_of(), RatingBiases(2.0)
    zero = model.init_weights(KEY, torch.float64)
    alone = [model.forward(zero, block.take(torch.tensor([c]))) for c in range(3)]
    assert torch.equal(torch.cat(alone), model.forward(zero, block))


def test_runs_score_silos_apart_and_all_ratings_together() -> None:
    """The server's view has each silo's biases, the uncut view those of all ratings."""
    graph = rating_graph()
    setup = prepare(make_config({**GIVEN, "method": "fedavg"}), graph)
    result = sg.run(graph, **GIVEN, method="fedavg")
    central = sg.run(graph, **GIVEN, method="centralized")
    means = sg.run(graph, **GIVEN, method="local", options={"terms": "mean"})
    local = sg.run(graph, **GIVEN, method="local")
    whole = uncut_block(setup)
    rows = pairs_of(whole).row
    test = whole.split.test[rows].numpy()
    errors = (by_ridge(whole, 5.0) - whole.y[rows].numpy())[test]
    assert result.test.uncut is not None
    assert central.test.server is not None
    assert result.test.server is not None
    assert local.test.personalized is not None
    assert means.test.personalized is not None
    wanted = pytest.approx(np.sqrt((errors**2).mean()), abs=CLOSE)
    assert result.test.uncut.rmse == wanted
    assert central.test.server.rmse == wanted
    assert result.test.server.rmse == local.test.personalized.rmse
    block = clients_of_setup(setup)
    train, y = block.split.train, block.y
    total = 0.0
    for c in range(3):
        mine = block.client == c
        mean = y[mine & train].mean()
        total += float((y[mine & block.split.test] - mean).square().sum())
    count = int(block.split.test.sum())
    assert means.test.personalized.rmse == pytest.approx((total / count) ** 0.5, abs=CLOSE)
    assert local.ledger.bytes_by_kind["weights"] < 1000


def clients_of_setup(setup: Any) -> ClientBlock:
    cut = setup.cut
    return make_block(cut.graph, cut.partition, cut.split, torch.float64)[0]


def test_damping_must_be_above_0() -> None:
    with raises_code(sg.ConfigError, "option-value", option="damping", got=0):
        sg.run(rating_graph(), **GIVEN, options={"damping": 0})


def test_clients_without_training_ratings_predict_0() -> None:
    block, model = block_of(), RatingBiases(2.0)
    none = torch.zeros_like(block.split.train)
    block = replace(block, split=replace(block.split, train=none))
    assert not model.forward(model.init_weights(KEY, torch.float64), block).any()
