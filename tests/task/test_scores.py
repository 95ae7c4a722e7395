"""Laws of the scores: scikit-learn's, from counts alone.

The logits are the features (an `mlp` of one layer with the identity as weight), so that the
reference sees the very predictions that were counted.

C: clients. K: classes or label bits. B: bins.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score, roc_auc_score
from torch import Tensor

from silograph.evaluation.evaluate import counts_of, rows_here
from silograph.graph.block.block import ClientBlock, make_block
from silograph.graph.graph import MISSING, Graph, LabelForm, Split
from silograph.graph.partition.partition import Partition
from silograph.nn.backends import TORCH
from silograph.nn.model import Model
from silograph.task.counts import BINS, STEEPNESS, JudgedRows, log_odds, node_loss
from silograph.task.scores import Scores, auc_of, score

MakeGraph = Callable[..., Graph]

CLIENTS, K, N = 5, 4, 1000
TASKS = pytest.mark.parametrize("task", ["multiclass", "multilabel"])
CLOSE = 1e-10


@dataclass(frozen=True)
class Case:
    """A block whose features are logits, and its counts."""

    block: ClientBlock
    counts: dict[str, Tensor]
    task: LabelForm

    def judged(self, client: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return logits and labels of the test nodes, of all clients or of one."""
        mask = self.block.split.test
        if client is not None:
            mask = mask & (self.block.client == client)
        assert isinstance(self.block.x, Tensor)
        return self.block.x[mask].numpy(), self.block.y[mask].numpy()

    def scores(self) -> Scores:
        result = score(self.counts, "test", self.task)
        assert result is not None
        return result


def make_case(
    make_graph: MakeGraph,
    task: LabelForm,
    *,
    seed: int = 0,
    classes: int = K,
    y: Tensor | None = None,
    missing: float = 0.3,
) -> Case:
    """Return logits that know something of the labels; the last client judges nothing."""
    generator = torch.Generator().manual_seed(seed)
    multilabel = task == "multilabel"
    shape, kinds = ((N, classes), 2) if multilabel else ((N,), classes)
    drawn = torch.randint(0, kinds, shape, generator=generator)
    y = drawn if y is None else y
    noise = 2 * torch.randn(N, classes, generator=generator)
    hint = y if multilabel else torch.nn.functional.one_hot(y, classes)
    y = torch.where(torch.rand(shape, generator=generator) < missing, MISSING, y)
    graph = replace(
        make_graph(N, features=1), x=(noise + 2 * hint).float(), y=y, num_classes=classes
    )
    # Clients of very different sizes: a mean over clients is not the pooled mean.
    ends = [0, 10, 50, 200, 900, N]
    nodes = tuple(torch.arange(a, b) for a, b in pairwise(ends))
    partition = Partition(tuple("abcde"), nodes, N, "hand")
    test = (torch.rand(N, generator=generator) < 0.8) & (torch.arange(N) < 900)
    split = Split(torch.arange(N) >= 900, torch.zeros(N, dtype=torch.bool), test)
    block, _ = make_block(graph, partition, split, torch.float64)
    model = Model("mlp", classes, 1, classes, 1, 0.0, task)
    eye = torch.eye(classes, dtype=torch.float64)
    weights = {"0.weight": eye, "0.bias": torch.zeros(classes, dtype=torch.float64)}
    return Case(
        block, counts_of(rows_here(TORCH, model, weights, block, block.client, CLIENTS)), task
    )


def class_scores(case: Case) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return truth and probability of every class, known labels only."""
    logits, y = case.judged()
    if case.task == "multiclass":
        p = torch.from_numpy(logits).softmax(1).numpy()
        return [(y == k, p[:, k]) for k in range(logits.shape[1])]
    known = y != MISSING
    p = torch.from_numpy(logits).sigmoid().numpy()
    return [(y[known[:, k], k] == 1, p[known[:, k], k]) for k in range(logits.shape[1])]


def binned(p: np.ndarray, classes: int) -> np.ndarray:
    """Return the bin of each probability of one of several classes; of a label bit: 2."""
    z = STEEPNESS * (np.log(p / (1 - p)) + np.log(classes - 1))
    bins: np.ndarray = np.floor((1 + z / (1 + np.abs(z))) / 2 * BINS).astype(int)
    return bins


@pytest.mark.parametrize("seed", range(3))
def test_multiclass_scores_equal_scikit_learn(make_graph: MakeGraph, seed: int) -> None:
    case = make_case(make_graph, "multiclass", seed=seed)
    logits, y = case.judged()
    assert MISSING in case.block.y  # and none of them judges
    assert MISSING not in y
    predicted, got = logits.argmax(1), case.scores()
    assert got.accuracy == pytest.approx(accuracy_score(y, predicted), abs=CLOSE)
    assert got.f1_macro == pytest.approx(f1_score(y, predicted, average="macro"), abs=CLOSE)
    assert got.f1_micro == pytest.approx(f1_score(y, predicted, average="micro"), abs=CLOSE)
    assert got.f1_micro == pytest.approx(got.accuracy, abs=CLOSE)
    p = torch.from_numpy(logits).softmax(1).numpy()
    reference = roc_auc_score(y, p, multi_class="ovr", average="macro")
    assert got.auc == pytest.approx(reference, abs=5e-3)
    loss = node_loss(torch.from_numpy(logits), torch.from_numpy(y), "multiclass").mean()
    assert got.loss == pytest.approx(float(loss), abs=CLOSE)


@pytest.mark.parametrize("seed", range(3))
def test_multilabel_scores_equal_scikit_learn_on_known_bits(
    make_graph: MakeGraph, seed: int
) -> None:
    case = make_case(make_graph, "multilabel", seed=seed)
    logits, y = case.judged()
    known = y != MISSING
    assert 0 < known.sum() < known.size
    predicted, got = logits > 0, case.scores()
    assert got.accuracy == pytest.approx(accuracy_score(y[known], predicted[known]), abs=CLOSE)
    assert got.f1_micro == pytest.approx(f1_score(y[known], predicted[known]), abs=CLOSE)
    single = [f1_score(y[known[:, k], k], predicted[known[:, k], k]) for k in range(K)]
    assert got.f1_macro == pytest.approx(np.mean(single), abs=CLOSE)
    reference = np.mean([roc_auc_score(true, p) for true, p in class_scores(case)])
    assert got.auc == pytest.approx(reference, abs=5e-3)
    loss = node_loss(torch.from_numpy(logits), torch.from_numpy(y), "multilabel").mean()
    assert got.loss == pytest.approx(float(loss), abs=CLOSE)


@pytest.mark.law(sample=6)
@TASKS
@pytest.mark.parametrize("seed", range(3))
def test_auc_is_exact_for_the_binned_scores(
    make_graph: MakeGraph, task: LabelForm, seed: int
) -> None:
    case = make_case(make_graph, task, seed=seed)
    got = case.scores().auc
    pairs, classes = class_scores(case), K if task == "multiclass" else 2
    exact = np.mean([roc_auc_score(true, binned(p, classes)) for true, p in pairs])
    assert got == pytest.approx(exact, abs=CLOSE)
    # Binning only turns pairs within a bin into ties, each worth 1/2 instead of 0 or 1.
    ties = []
    for true, p in pairs:
        bins = binned(p, classes)
        right, wrong = (np.bincount(bins[truth], minlength=BINS) for truth in (true, ~true))
        ties.append((right * wrong).sum() / right.sum() / wrong.sum() / 2)
    full = np.mean([roc_auc_score(true, p) for true, p in pairs])
    assert abs(exact - full) <= np.mean(ties) + CLOSE


# --- the area under the curve, whatever the scores look like --------------------------------------

OFFSET = torch.tensor([0.3, -0.2, 0.05, 0.25], dtype=torch.float64)
LOGITS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "confident": lambda noise, hint: 10 * (noise + hint),
    "trained": lambda noise, hint: 10 * OFFSET + 2 * (noise + hint),
    "hardly begun": lambda noise, hint: OFFSET + 0.1 * (noise + hint),
    "one small step": lambda noise, hint: 0.1 * OFFSET + 0.02 * (noise + hint),
    "heavy tails": lambda noise, hint: (torch.pi * (torch.special.ndtr(noise) - 0.5)).tan() + hint,
}


def auc_both_ways(rows: JudgedRows) -> tuple[float | None, float]:
    """The AUC of counts, and of scikit-learn on the same log-odds, known labels only."""
    got = auc_of(counts_of(rows)["test.histogram"])
    odds = log_odds(rows.logits, rows.task).numpy()
    single = []
    for k in range(odds.shape[1]):
        y = (rows.y == k).long() if rows.task == "multiclass" else rows.y[:, k]
        known = (y != MISSING).numpy()
        single.append(roc_auc_score(y.numpy()[known], odds[known, k]))
    return got, float(np.mean(single))


def scored(task: LabelForm, kind: str, seed: int, n: int) -> JudgedRows:
    """Test nodes of seven clients; in multi-label a third of the bits is missing."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(n, K, generator=generator, dtype=torch.float64)
    if task == "multiclass":
        y = torch.randint(0, K, (n,), generator=generator)
        hint = torch.nn.functional.one_hot(y, K)
    else:
        y = torch.randint(0, 2, (n, K), generator=generator)
        hint = y
        y = torch.where(torch.rand(n, K, generator=generator) < 0.3, MISSING, y)
    group = torch.randint(0, 7, (n,), generator=generator)
    val = torch.zeros(n, dtype=torch.bool)
    return JudgedRows(LOGITS[kind](noise, hint), y, val, group, 7, task)


@pytest.mark.law(sample=6)
@TASKS
@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize(("seed", "n"), [(0, 300), (1, 300), (2, 3000), (3, 30_000)])
def test_auc_is_that_of_the_scores_at_every_size_and_spread(
    task: LabelForm, kind: str, seed: int, n: int
) -> None:
    rows = scored(task, kind, seed, n)
    for logits in (rows.logits, rows.logits.float()):
        got, expected = auc_both_ways(replace(rows, logits=logits))
        assert 0.55 < expected < 0.99
        # Scores far from those of a model that knows nothing share wider bins.
        assert got == pytest.approx(expected, abs=1e-2 if kind == "confident" else 5e-3)


@TASKS
def test_scores_closer_than_a_bin_are_ties(task: LabelForm) -> None:
    """A model whose scores all lie in one bin has an AUC of .5, the price of fixed bins."""
    rows = scored(task, "confident", 0, 3000)
    got, expected = auc_both_ways(replace(rows, logits=1e-6 * rows.logits))
    assert expected > 0.55
    assert got == 0.5


@TASKS
@pytest.mark.parametrize("value", [0.0, 0.1, 1e4])
def test_equal_scores_are_worth_exactly_half(task: LabelForm, value: float) -> None:
    rows = scored(task, "confident", 0, 3000)
    logits = value + torch.zeros_like(rows.logits)
    for alike in (logits, logits.float(), logits + OFFSET):
        assert auc_both_ways(replace(rows, logits=alike)) == (0.5, 0.5)


@TASKS
def test_auc_with_broken_logits_ranks_them_at_the_ends(task: LabelForm) -> None:
    rows = scored(task, "confident", 0, 3000)
    logits = rows.logits.clone()
    logits[::7, 0], logits[1::7, 1], logits[2::7, 2] = torch.nan, torch.inf, -torch.inf
    got, expected = auc_both_ways(replace(rows, logits=logits))
    assert got == pytest.approx(expected, abs=1e-2)


def test_client_mean_leaves_out_clients_without_nodes(make_graph: MakeGraph) -> None:
    for task in ("multiclass", "multilabel"):
        case = make_case(make_graph, "multiclass" if task == "multiclass" else "multilabel")
        own = []
        for c in range(CLIENTS):
            logits, y = case.judged(c)
            if len(y):
                hits = logits.argmax(1) == y if task == "multiclass" else (logits > 0) == (y == 1)
                own.append(hits[y != MISSING].mean())
        assert len(own) == CLIENTS - 1  # the last client has training nodes only
        got = case.scores()
        assert got.accuracy_client_mean == pytest.approx(np.mean(own), abs=CLOSE)
        assert got.accuracy is not None
        assert abs(got.accuracy - np.mean(own)) > 1e-3  # not the same thing


@TASKS
def test_scores_do_not_depend_on_the_order_of_clients(
    make_graph: MakeGraph, task: LabelForm
) -> None:
    case = make_case(make_graph, task)
    flipped = {
        name: t if name == "test.histogram" else t.flip(0) for name, t in case.counts.items()
    }
    other, got = score(flipped, "test", task), case.scores()
    assert other is not None
    assert dict(other) == pytest.approx(dict(got), abs=CLOSE)


@TASKS
def test_no_nodes_have_no_scores(make_graph: MakeGraph, task: LabelForm) -> None:
    case = make_case(make_graph, task)
    assert score(case.counts, "val", task) is None
    empty = {name: torch.zeros_like(t) for name, t in case.counts.items()}
    assert score(empty, "test", task) is None


def test_validation_has_all_scores_and_the_auc_where_histograms_came(make_graph: MakeGraph) -> None:
    case = make_case(make_graph, "multiclass")
    moved = {name.replace("test.", "val."): t for name, t in case.counts.items()}
    assert score({**case.counts, **moved}, "val", "multiclass") == Scores({**case.scores()})
    del moved["val.histogram"]
    val = score({**case.counts, **moved}, "val", "multiclass")
    assert val == Scores({**case.scores(), "auc": None})


def test_a_class_that_is_absent_is_left_out(make_graph: MakeGraph) -> None:
    # Class 3 of 4 has no node, but is predicted; classes 4 and 5 of 6 are neither.
    y = torch.arange(N) % 3
    case = make_case(make_graph, "multiclass", y=y)
    logits, true = case.judged()
    predicted = logits.argmax(1)
    assert 3 in predicted
    got = case.scores()
    # Predicted and never right: F1 is 0 there, and it counts, as in scikit-learn.
    assert got.f1_macro == pytest.approx(f1_score(true, predicted, average="macro"), abs=CLOSE)
    exact = [roc_auc_score(t, binned(p, K)) for t, p in class_scores(case)[:3]]
    assert got.auc == pytest.approx(np.mean(exact), abs=CLOSE)

    def pad(name: str, t: Tensor) -> Tensor:
        dim = 0 if name == "test.histogram" else 1
        zeros = torch.zeros_like(t.narrow(dim, 0, 2)) if t.dim() > 1 else t
        return torch.cat([t, zeros], dim=dim) if t.dim() > 1 else t

    counts = {name: pad(name, t) for name, t in case.counts.items()}
    assert score(counts, "test", "multiclass") == got


def test_one_class_alone_has_no_auc(make_graph: MakeGraph) -> None:
    case = make_case(make_graph, "multiclass", y=torch.ones(N, dtype=torch.int64), missing=0.0)
    got = case.scores()
    assert got.auc is None
    logits, y = case.judged()
    assert got.accuracy == pytest.approx(accuracy_score(y, logits.argmax(1)), abs=CLOSE)


def test_multilabel_without_any_positive_has_no_f1(make_graph: MakeGraph) -> None:
    case = make_case(make_graph, "multilabel", y=torch.zeros(N, K, dtype=torch.int64))
    no_hits = {
        name: torch.zeros_like(t) if name in ("test.tp", "test.fp", "test.fn") else t
        for name, t in case.counts.items()
    }
    got = score(no_hits, "test", "multilabel")
    assert got is not None
    assert (got.f1_macro, got.f1_micro, got.auc) == (None, None, None)
    assert got.accuracy == 1.0


def test_auc_by_hand() -> None:
    histogram = torch.zeros(2, 2, BINS, dtype=torch.int32)
    # Wrong at bins 0, 5, 5; right at bins 5, 9. Pairs won: 1 + 2 * 1/2 + 3 = 5 of 6.
    histogram[0, 0, 0], histogram[0, 0, 5], histogram[0, 1, 5], histogram[0, 1, 9] = 1, 2, 1, 1
    histogram[1, 0, 3] = 7  # nothing right: cannot be judged
    assert auc_of(histogram) == pytest.approx(5 / 6, abs=CLOSE)
    assert auc_of(histogram[1:]) is None
    # Counts whose products pass 2^31 and 2^53.
    large = torch.zeros(1, 2, BINS, dtype=torch.int32)
    large[0, 0, 1], large[0, 1, 2], large[0, 1, 0] = 2**30, 2**29, 2**29
    assert auc_of(large) == pytest.approx(0.5, abs=CLOSE)


def test_counts_near_the_end_of_int32_do_not_overflow() -> None:
    n = 2**30
    counts = {
        f"test.{name}": torch.tensor([[value, value]], dtype=torch.int32)
        for name, value in {"known": n, "tp": n // 2, "fp": 0, "fn": n // 4}.items()
    }
    counts["test.nodes"] = torch.tensor([n], dtype=torch.int32)
    counts["test.loss"] = torch.tensor([float(n)], dtype=torch.float64)
    counts = {name: torch.cat([t] * 4) for name, t in counts.items()}
    counts["test.histogram"] = torch.zeros(2, 2, BINS, dtype=torch.int32)
    got = score(counts, "test", "multilabel")
    assert got is not None
    # Of n bits a quarter is missed: accuracy 3/4; F1 = 2 * 1/2 / (2 * 1/2 + 1/4) = 4/5.
    want = {"accuracy": 0.75, "accuracy_client_mean": 0.75, "f1_macro": 0.8, "f1_micro": 0.8}
    assert dict(got) == want | {"auc": None, "loss": 1.0}
