"""Attacks succeed where the docs say so, and fail where a threshold is said to stop them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import silograph as sg
from commands import Capture, printed
from leaks import OPTIONS
from mistakes import raises_code
from runs import MakeGraph
from silograph.core.config import make_config
from silograph.core.errors import ConfigError
from silograph.evaluation.evaluate import tally_by_client
from silograph.exchange import passes
from silograph.experiment.run.setup import prepare
from silograph.methods import METHODS, bns, cagnet
from silograph.nn.optim import SGD, Adam
from silograph.study.attack import (
    BACKWARD,
    CRAFTED,
    FORWARD,
    NOTHING,
    UNMEASURED,
    Finding,
    attack,
    craft_weights,
    evaluation_findings,
    find_separable_nodes,
    infer_labels,
    occurring_features,
    record_server_view,
    same_up_to_scale,
    single_labels,
    single_rows,
    solve_features,
    unmeasured_notes,
    weights_without_gradient,
    write_findings,
)
from silograph.task.counts import CountRules, JudgedRows

RUN: dict[str, Any] = {"clients": 4, "partition": "random", "hidden": 4, "dtype": "float64"}


def found(make_graph: MakeGraph, **options: Any) -> dict[str, Finding]:
    """Findings by the first words of what is recovered."""
    config = make_config({**RUN, **options})
    return {one.recovered.split(",")[0]: one for one in attack(config, make_graph(60))}


FEATURES, LABELS = "features of nodes", "labels of training nodes alone behind a row"


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({"method": "label_guided"}, 0.5),
        ({"method": "bns", "options": {"rate": 0.5}}, 0.5),
        ({"method": "cagnet"}, 0.99),
    ],
    ids=lambda value: value["method"] if isinstance(value, dict) else "",
)
def test_features_and_labels_from_rows(
    make_graph: MakeGraph, options: dict[str, Any], least: float
) -> None:
    seen = found(make_graph, **options)
    assert seen[FEATURES].share >= least
    assert seen[LABELS].share > 0.2
    assert (seen[LABELS].right or 0) > 0.95


def test_two_nodes_behind_every_row_stop_features_and_not_all_labels(make_graph: MakeGraph) -> None:
    plain = found(make_graph, method="label_guided")
    least = found(make_graph, method="label_guided", min_nodes_per_row=2)
    assert least[FEATURES].share < 0.05
    assert plain[FEATURES].share > 0.05
    assert least[LABELS].share == 0 < plain[LABELS].share
    others = least["labels of training nodes"]
    assert 0 < others.share < plain["labels of training nodes"].share
    single = "messages of single nodes"
    assert least[FEATURES].share < least[single].share < plain[single].share


def test_crafted_weights_give_single_rows(make_graph: MakeGraph) -> None:
    own = {"method": "fedopt", "hidden": 64, "clients": 15, "lr": 0.1, "local_epochs": 1}
    seen = found(make_graph, **own)
    rows = seen["what enters the first layer at training nodes"]
    assert rows.server == "active"
    assert rows.share > 0.8


def test_nothing_applies_or_nothing_can(make_graph: MakeGraph, tmp_path: Path) -> None:
    seen = found(make_graph, method="local")
    assert all(one.share == 0 for one in seen.values())
    write_findings([], make_config({"method": "local"}), tmp_path / "none")
    assert NOTHING in (tmp_path / "none" / "attack.md").read_text(encoding="utf-8")
    assert UNMEASURED in (tmp_path / "none" / "attack.md").read_text(encoding="utf-8")
    with raises_code(ConfigError, "existing-output"):
        write_findings([], make_config({}), tmp_path / "none")
    with pytest.raises(ConfigError, match=r"trains at silos to attack, got centralized, which tr"):
        attack(make_config({"method": "centralized"}), make_graph(30))


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if not m.setting.uncut])
def test_every_method_of_silos_can_be_attacked(make_graph: MakeGraph, name: str) -> None:
    options = {"sample": 30} if name == "label_guided" else OPTIONS.get(name, {})
    seen = found(make_graph, method=name, options=options)
    assert all(0 <= one.share <= 1 for one in seen.values())
    assert "labels of test nodes that are alone at their silo" in seen


def test_the_command(make_graph: MakeGraph, tmp_path: Path, capsys: Capture) -> None:
    del make_graph
    text = printed(
        capsys, "attack", "digits", "--clients", "500", "--partition", "random", "--hidden", "8",
        "--out", str(tmp_path / "found"), "--json",
    )  # fmt: skip
    lines = json.loads(text)
    kept = json.loads((tmp_path / "found" / "attack.json").read_text(encoding="utf-8"))
    assert kept["findings"] == lines
    shares = {line["recovered"]: line["share"] for line in lines}
    assert shares["labels of test nodes that are alone at their silo"] > 0.2
    assert "| attack | what is recovered |" in (tmp_path / "found" / "attack.md").read_text("utf-8")


# --- the functions by themselves ------------------------------------------------------------------


def test_messages_are_solved_as_soon_as_there_are_enough() -> None:
    x = torch.rand(5, 6, dtype=torch.float64)
    maps = [torch.rand(6, 4, dtype=torch.float64) for _ in range(4)]
    places = [torch.tensor(p) for p in ([0, 1, 2], [2, 0], [0, 3, 2], [0, 4])]
    rows = [x[p] @ w for p, w in zip(places, maps, strict=True)]
    where, solved = solve_features(maps, rows, places)
    assert sorted(where.tolist()) == [0, 2]  # three steps of 4 equations for 6 unknowns
    torch.testing.assert_close(solved, x[where], rtol=0, atol=1e-9)
    assert same_up_to_scale(3 * solved, x).tolist() == [True, False, True, False, False]
    assert not same_up_to_scale(solved + 0.01 * torch.rand(2, 6).double(), x).any()


def test_signs_name_a_class_only_where_all_behind_have_it() -> None:
    share = torch.full((3,), 1 / 3)
    own = [share - torch.nn.functional.one_hot(torch.tensor(k), 3) for k in (0, 1, 1)]
    rows = torch.stack([own[0], own[1] + own[2], own[0] + own[1], torch.zeros(3)])
    assert infer_labels(rows).tolist() == [0, 1, -1, -1]


def test_a_node_is_separable_if_others_cancel() -> None:
    behind = torch.tensor([[1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 1, 1]])
    assert find_separable_nodes(behind).tolist() == [True, True, True, False, False]
    assert find_separable_nodes(behind[:2]).tolist() == [False] * 5
    assert find_separable_nodes(torch.zeros(0, 2)).tolist() == [False, False]
    assert find_separable_nodes(torch.zeros(3, 2)).tolist() == [False, False]


@pytest.mark.parametrize("seed", range(5))
def test_separable_nodes_are_those_in_the_span(seed: int) -> None:
    """The oracle is the pseudoinverse: the projector onto the rows has 1 at such a node."""
    drawn = torch.Generator().manual_seed(seed)
    behind = torch.rand(40, 30, generator=drawn) * (torch.rand(40, 30, generator=drawn) < 0.06)
    projector = torch.linalg.pinv(behind.double(), rtol=1e-9) @ behind.double()
    found = projector.diagonal() > 1 - 1e-6
    assert 0 < int(found.sum()) < 30
    assert find_separable_nodes(behind).tolist() == found.tolist()


@pytest.mark.parametrize("optimizer", [SGD(0.1, 5e-4), Adam(0.01, 5e-4)])
def test_features_that_move(optimizer: SGD | Adam) -> None:
    start = {"0.weight": torch.rand(5, 3)}
    idle = weights_without_gradient(start, optimizer, 2)["0.weight"]
    assert (idle != start["0.weight"]).all()
    after = idle.clone()
    after[[1, 4]] += 0.01
    assert occurring_features(after[None], idle).tolist() == [[False, True, False, False, True]]


def test_rows_of_a_crafted_step() -> None:
    """Two layers without neighbors, one step of SGD on three rows."""
    x = torch.tensor([[1.0, 0, 2], [0, 1, 0], [3, 1, 4]], dtype=torch.float64)
    y, zero = torch.tensor([0, 1, 1]), torch.zeros(3, 16, dtype=torch.float64)
    like = {"0.weight": zero, "0.bias": zero[0], "1.weight": zero.T[:, :2], "1.bias": zero[0, :2]}
    sent = craft_weights(like, 4.0, 3.0)
    leaves = {name: w.clone().requires_grad_() for name, w in sent.items()}
    hidden = (x @ leaves["0.weight"] + leaves["0.bias"]).relu()
    logits = hidden @ leaves["1.weight"] + leaves["1.bias"]
    loss = torch.nn.functional.cross_entropy(logits, y)
    grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    after = {name: (w - 0.1 * grads[name])[None] for name, w in sent.items()}
    assert same_up_to_scale(single_rows(sent, after)[0], x, 1e-6).all()


def test_the_label_of_a_node_that_is_counted_alone() -> None:
    assert single_labels(torch.tensor([[0, 1, 0], [0, 0, 0], [0, 2, 0]])).tolist() == [1, -1, -1]


def test_what_the_server_overhears_changes_nothing(make_graph: MakeGraph) -> None:
    """The attack's simulation trains as runs do: its first steps have the bits of theirs."""
    graph = make_graph(60)
    before = sg.run(graph, method="fedopt", rounds=1, **RUN)
    found(make_graph, method="fedopt")
    after = sg.run(graph, method="fedopt", rounds=1, **RUN)
    assert before.rounds[0]["train_loss"] == after.rounds[0]["train_loss"]


def test_an_attack_that_was_not_tried_is_named() -> None:
    one = Finding(CRAFTED, "rows", 0.5, 10, None, "active")
    other = Finding("read", "words", 0.5, 10, None, "honest but curious")
    assert unmeasured_notes([other]) == [UNMEASURED]
    assert unmeasured_notes([other, one]) == []


def binary_graph(nodes: int = 400, width: int = 40) -> sg.Graph:
    """A graph whose features are bits at random, half of them set, and its labels as well."""
    draw = np.random.default_rng(0)
    edges = draw.integers(0, nodes, (2, 2 * nodes))
    x = (draw.random((nodes, width)) < 0.5).astype(np.float32)
    return sg.from_arrays(edge_index=edges, x=x, y=draw.integers(0, 3, nodes), name="bits")


def test_evaluations_of_crafted_weights_tell_labels_and_features_without_a_least_count() -> None:
    graph = binary_graph()
    plain: dict[str, Any] = {"clients": 2, "partition": "random", "hidden": 8, "model": "mlp"}
    for least in (0, 5):
        config = make_config({**plain, "evaluation_min_count": least})
        setup = prepare(config, graph)
        labels, features = evaluation_findings(setup, record_server_view(setup, 1).blocks[0])
        if least == 0:
            assert labels.share > 0.95
            assert (labels.right or 0) > 0.99
            assert features.share > 0.95
            assert (features.right or 0) > 0.9
        else:
            assert labels.share < 0.05
            assert (features.right or 0) < 0.75  # half of the bits are set


def test_a_sum_of_losses_tells_forty_labels_without_a_least_count_and_few_with_one() -> None:
    """Each node's margin is its own power of two, so an exact sum spells the labels in binary.

    With a least count a sum is a whole number of at most 8 for each node. So it has one of 321
    values, which is 8.3 bits for 40 nodes, and larger margins all count the same.
    """
    y = torch.from_numpy(np.random.default_rng(0).integers(0, 2, 40))
    nobody, alone = torch.zeros(40, dtype=torch.bool), torch.zeros(40, dtype=torch.int64)

    def sum_of_losses(margins: torch.Tensor, rules: CountRules) -> float:
        logits = torch.stack([margins, torch.zeros(40)], dim=1)  # exact in float32
        rows = JudgedRows(logits, y, nobody, alone, 1, "multiclass")
        return float(tally_by_client(rows, rules)["test.loss"])

    margins = 50.0 * 2.0 ** torch.arange(40)
    wrong = int(sum_of_losses(margins, CountRules()) / 50)
    assert [wrong >> place & 1 for place in range(40)] == y.tolist()
    limited = CountRules(5, level="counts")
    assert sum_of_losses(margins, limited) == 8 * int(y.sum())  # no more than how many are wrong
    for scale in (1.0, 2.0**-20, 2.0**-38):
        total = sum_of_losses(margins * scale, limited)
        assert total == round(total)
        assert 0 <= total <= 8 * 40


def test_attacks_look_for_ops_that_exist() -> None:
    """An op that has moved to another module is not seen, and the attack would find nothing."""
    homes = (passes, bns, cagnet)
    ops = {
        f"{home.__name__.rpartition('.')[2]}.{name}"
        for home in homes
        for name, value in vars(home).items()
        if getattr(value, "__module__", "") == home.__name__
    }
    assert {*FORWARD, *BACKWARD, "passes.begin"} <= ops


def test_secure_aggregation_leaves_attacks_the_sums_of_all_silos(make_graph: MakeGraph) -> None:
    """What is told of single silos is gone; what sums tell stays, of all silos together."""
    options: dict[str, Any] = {"method": "fedopt", "hidden": 64, "lr": 0.1, "local_epochs": 1}
    plain = found(make_graph, **options)
    secure = found(make_graph, **options, secure_aggregation=True)
    assert plain.keys() == secure.keys()
    silos, rows = "silos of which a node's features are seen", "what enters the first layer"
    silos, rows = (
        next(name for name in plain if name.startswith(start)) for start in (silos, rows)
    )
    assert (plain[silos].of, secure[silos].of) == (4, 1)
    assert secure[rows].share < plain[rows].share


@pytest.mark.parametrize(
    "options", [{"method": "label_guided"}, {"method": "bns", "options": {"rate": 0.5}}]
)
def test_secure_aggregation_leaves_attacks_no_row(
    make_graph: MakeGraph, options: dict[str, Any]
) -> None:
    """Signs of noise are right by chance only."""
    plain = found(make_graph, **options)
    secure = found(make_graph, **options, secure_aggregation=True)
    assert plain.keys() == secure.keys()
    single = "messages of single nodes"
    for name in plain.keys() & {FEATURES, single}:
        assert secure[name].share == 0 < plain[name].share
    assert (secure[LABELS].right or 0) < 0.5 < (plain[LABELS].right or 0)
