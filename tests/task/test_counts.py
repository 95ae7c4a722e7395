"""Laws of the counts: what a client says of its predictions, and no more than that.

Logits are chosen freely: they are the features. An `mlp` of one layer with the identity as weight
returns just these.

C: clients. K: classes or label bits. B: bins.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Shared, State, with_prefix
from silograph.core.setting_values import PLAIN_WEIGHTS
from silograph.evaluation.evaluate import (
    counts_of,
    judge_own,
    judge_server,
    no_logits,
    own_counts,
    rows_here,
    server_counts,
)
from silograph.federation.in_process import InProcess
from silograph.graph.block.block import ClientBlock, Route, make_block, whole
from silograph.graph.graph import MISSING, Graph, LabelForm, Split, subgraph
from silograph.graph.partition.partition import Partition
from silograph.methods.local_training import shared
from silograph.nn.backends import BACKENDS, TORCH
from silograph.nn.fit import Schedule
from silograph.nn.model import Model
from silograph.task.counts import (
    ALL_COUNTS,
    BINS,
    CLIP,
    STEEPNESS,
    CountRules,
    JudgedRows,
    bins_of,
    judged_mask,
    judged_rows,
    judges_of,
    log_odds,
    node_loss,
    tally,
)
from silograph.task.scores import auc_of

MakeGraph = Callable[..., Graph]
MakeBlock = Callable[..., tuple[ClientBlock, Route]]

CLIENTS, K = 4, 3
TASKS = pytest.mark.parametrize("task", ["multiclass", "multilabel"])


def identity(task: LabelForm, classes: int = K) -> tuple[Model, dict[str, Tensor]]:
    """Return the model whose logits are the features."""
    weights = {
        "0.weight": torch.eye(classes, dtype=torch.float64),
        "0.bias": torch.zeros(classes, dtype=torch.float64),
    }
    return Model("mlp", classes, 1, classes, 1, 0.0, task), weights


def case(
    make_graph: MakeGraph, cut_block: MakeBlock, task: LabelForm, n: int = 60
) -> tuple[ClientBlock, Route]:
    graph = make_graph(n, features=K, multilabel=task == "multilabel", missing=0.2)
    if task == "multilabel":  # single bits are missing too
        drawn = torch.rand(n, K, generator=torch.Generator().manual_seed(0))
        graph.y[drawn < 0.2] = MISSING
    return cut_block(graph, CLIENTS)


def rows_of(block: ClientBlock, group: Tensor | None = None, groups: int = 0) -> JudgedRows:
    """The judged rows of a block whose features are logits, by client unless said otherwise."""
    assert isinstance(block.x, Tensor)
    logits = block.x[judged_mask(block)]
    if group is None:
        return judged_rows(block, logits, block.client, block.num_clients)
    return judged_rows(block, logits, group, groups)


def pooled(rows: JudgedRows) -> dict[str, Tensor]:
    fields = tally(rows)
    return {**fields, "test.histogram": fields["test.histogram"].sum(0)}


def free_rows(logits: Tensor, y: Tensor) -> JudgedRows:
    """Rows of one client, all of them for testing."""
    nobody = torch.zeros(len(y), dtype=torch.bool)
    task: LabelForm = "multiclass" if y.dim() == 1 else "multilabel"
    return JudgedRows(logits, y, nobody, torch.zeros(len(y), dtype=torch.int64), 1, task)


def same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(got) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-10, check_dtype=False)


def config(model: Model) -> SimpleNamespace:
    return SimpleNamespace(
        model=model,
        backend=TORCH,
        schedule=Schedule(1),
        relevant=None,
        count_rules=CountRules(val_histogram=True),
        sent=PLAIN_WEIGHTS,
    )


Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


def shapes(fields: dict[str, Tensor]) -> Shapes:
    return {name: (tuple(t.shape), t.dtype) for name, t in fields.items()}


def shapes_of_a_tally(clients: int) -> Shapes:
    expected: Shapes = {}
    for part in ("val", "test"):
        expected[f"{part}.nodes"] = ((clients,), torch.int32)
        expected[f"{part}.loss"] = ((clients,), torch.float64)
        for name in ("known", "tp", "fp", "fn"):
            expected[f"{part}.{name}"] = ((clients, K), torch.int32)
    return expected | {"test.histogram": ((clients, K, 2, BINS), torch.int32)}


@TASKS
def test_counts_equal_a_loop_over_nodes(
    make_graph: MakeGraph, cut_block: MakeBlock, task: LabelForm
) -> None:
    block, _ = case(make_graph, cut_block, task)
    got = tally(rows_of(block))
    assert isinstance(block.x, Tensor)
    for part, mask in (("val", block.split.val), ("test", block.split.test)):
        expected = {
            name: torch.zeros(CLIENTS, K, dtype=torch.int32) for name in ("known", "tp", "fp", "fn")
        }
        nodes = torch.zeros(CLIENTS, dtype=torch.int32)
        for i in mask.nonzero()[:, 0].tolist():
            c, logits, y = int(block.client[i]), block.x[i], block.y[i]
            nodes[c] += 1
            for k in range(K):
                if task == "multiclass":
                    predicted, true, known = int(logits.argmax()) == k, int(y) == k, True
                else:
                    predicted, true, known = bool(logits[k] > 0), int(y[k]) == 1, int(y[k]) >= 0
                expected["known"][c, k] += known
                expected["tp"][c, k] += known and predicted and true
                expected["fp"][c, k] += known and predicted and not true
                expected["fn"][c, k] += known and true and not predicted
        assert torch.equal(got[f"{part}.nodes"], nodes)
        for name, value in expected.items():
            assert torch.equal(got[f"{part}.{name}"], value)
        loss = node_loss(block.x, block.y, task)
        sums = torch.stack([loss[mask & (block.client == c)].sum() for c in range(CLIENTS)])
        torch.testing.assert_close(got[f"{part}.loss"], sums, rtol=1e-10, atol=1e-10)


def scores_by_hand(block: ClientBlock, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-odds, truth and known of nodes (n,) bool, (t, K)."""
    assert isinstance(block.x, Tensor)
    x, y = block.x[mask], block.y[mask]
    if y.dim() == 1:
        p = x.softmax(1)
        true = y[:, None] == torch.arange(K)
        return (p / (1 - p)).log(), true, torch.ones_like(true)
    return x, y == 1, y != MISSING


@TASKS
def test_the_histograms_hold_every_judged_label_in_its_bin(
    make_graph: MakeGraph, cut_block: MakeBlock, task: LabelForm
) -> None:
    block, _ = case(make_graph, cut_block, task)
    fields = tally(rows_of(block), val_histogram=True)
    for part, mask in (("val", block.split.val), ("test", block.split.test)):
        scores, true, known = scores_by_hand(block, mask)
        expected = torch.zeros(CLIENTS, K, 2, BINS, dtype=torch.int32)
        client = block.client[mask]
        middle = math.log(K - 1) if task == "multiclass" else 0.0
        for i, k in known.nonzero().tolist():
            z = STEEPNESS * (float(scores[i, k]) + middle)
            expected[client[i], k, int(true[i, k]), int((1 + z / (1 + abs(z))) / 2 * BINS)] += 1
        got = fields[f"{part}.histogram"]
        assert torch.equal(got, expected)
        assert torch.equal(got.sum(dim=(2, 3)).int(), fields[f"{part}.known"])
        right = fields[f"{part}.tp"] + fields[f"{part}.fn"]
        assert torch.equal(got[:, :, 1].sum(dim=2).int(), right)
    del fields["val.histogram"]
    assert all(torch.equal(fields[name], t) for name, t in tally(rows_of(block)).items())


@pytest.mark.parametrize("classes", [1, 2, 7, 1000])
def test_bins_ascend_with_the_score_and_hold_a_model_that_knows_nothing_in_the_middle(
    classes: int,
) -> None:
    scores = torch.linspace(-CLIP, CLIP, 20_001, dtype=torch.float64)
    bins = bins_of(scores, classes)
    assert bool((bins.diff() >= 0).all())
    assert bool((bins >= 0).all())
    assert bool((bins < BINS).all())
    assert bins[0] == 0
    if classes < 1000:  # of many classes hardly a score is above the middle
        assert bins[-1] == BINS - 1
    alike = log_odds(torch.full((3, classes), 0.1), "multiclass") if classes > 1 else None
    if alike is not None:
        assert bins_of(alike, classes).unique().tolist() == [BINS // 2]


def groupings(rows: int) -> list[tuple[Tensor, int]]:
    """All in one, each alone, and at random in any order; the last group of these is empty."""
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.zeros(rows, dtype=torch.int64), 1),
        (torch.arange(rows), rows),
        (torch.randint(0, 5, (rows,), generator=generator), 6),
    ]


@pytest.mark.law(sample=6)
@TASKS
@pytest.mark.parametrize("conv", ["gcn", "sage", "mlp"])
@pytest.mark.parametrize("personal", [False, True], ids=["shared", "stacked"])
def test_counts_of_a_block_are_counts_of_blocks_of_one(
    make_graph: MakeGraph, cut_block: MakeBlock, task: LabelForm, conv: str, personal: bool
) -> None:
    block, _ = case(make_graph, cut_block, task)
    model = Model(conv, K, 5, K, 2, 0.5, task)
    own = [model.init_weights(Key.of(c if personal else 0), torch.float64) for c in range(CLIENTS)]
    weights = {k: torch.stack([p[k] for p in own]) for k in own[0]}

    def ask(part: ClientBlock, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The reply about the server's model, or about the clients' own."""
        cfg, key, state = config(model), Key.of(0), no_logits(model, part)
        if personal:
            own = {"own/logits": judges_of(part).select(model.forward(tensors, part))}
            _, reply = judge_own(cfg, part, state | own, {}, key)
        else:
            inbox = {name: Shared(w) for name, w in with_prefix("weights", tensors).items()}
            _, reply = judge_server(cfg, part, state, inbox, key)
        return {name: field.t for name, field in reply.items()}

    got = ask(block, weights if personal else own[0])
    for c in range(CLIENTS):
        mine = {k: w[c : c + 1] for k, w in weights.items()} if personal else own[0]
        one = ask(block.take(torch.tensor([c])), mine)
        same(one, {name: value[c : c + 1] for name, value in got.items()})


@TASKS
def test_a_tally_by_other_groups_is_the_same_counts_sorted_anew(
    make_graph: MakeGraph, cut_block: MakeBlock, task: LabelForm
) -> None:
    block, _ = case(make_graph, cut_block, task)
    everyone = pooled(rows_of(block))
    split = block.split
    for group, groups in groupings(len(block.y)):
        rows = rows_of(block, group, groups)
        got = tally(rows)
        assert torch.equal(got["test.histogram"].sum(0), everyone["test.histogram"])
        for name, value in got.items():
            if name != "test.histogram":
                total = everyone[name].sum(0).to(value.dtype)
                torch.testing.assert_close(value.sum(0).to(value.dtype), total, rtol=1e-10, atol=0)
        for g in range(groups):
            mine = group == g
            alone = replace(block, split=Split(split.train, split.val & mine, split.test & mine))
            one = rows_of(alone, torch.zeros_like(group), 1)
            same({name: value[g : g + 1] for name, value in got.items()}, tally(one))


@TASKS
@pytest.mark.parametrize("block_size", [1, 3, CLIENTS])
def test_what_clients_return_is_what_one_process_counts(
    make_graph: MakeGraph, cut_block: MakeBlock, task: LabelForm, block_size: int
) -> None:
    block, route = case(make_graph, cut_block, task)
    model = Model("gcn", K, 5, K, 2, 0.5, task)
    weights = model.init_weights(Key.of(0), torch.float64)
    fed = InProcess(config(model), block, route, block_size=block_size)

    def begin(cfg: object, part: ClientBlock, *_: object) -> tuple[State, dict[str, Shared]]:
        return no_logits(model, part), {}

    fed.call(begin, {}, what=Kind.CONTROL, key=Key.of(0))
    same(
        server_counts(fed, shared("weights", weights), Key.of(0), ALL_COUNTS),
        counts_of(
            rows_here(TORCH, model, weights, block, block.client, CLIENTS), val_histogram=True
        ),
    )
    # Nobody has trained: to them all classes are alike.
    zeros = torch.zeros(int(judged_mask(block).sum()), K, dtype=torch.float64)
    own = own_counts(fed, Key.of(0), ALL_COUNTS)
    same(own, counts_of(judged_rows(block, zeros, block.client, CLIENTS), val_histogram=True))
    assert own["test.histogram"].shape == (K, 2, BINS)
    assert auc_of(own["test.histogram"]) == 0.5


@TASKS
def test_shapes_depend_on_clients_classes_and_bins_only(
    make_graph: MakeGraph, cut_block: MakeBlock, task: LabelForm
) -> None:
    model, weights = identity(task)
    cfg, key = config(model), Key.of(0)
    cfg.count_rules = ALL_COUNTS
    inbox = {name: Shared(w) for name, w in with_prefix("weights", weights).items()}
    # As many nodes as B or K or more: no shape may be that of rows by chance.
    for n in (20, 60, 300):
        block, _ = case(make_graph, cut_block, task, n)
        untrained: State = no_logits(model, block)
        trained: State = {
            **untrained,
            "own/logits": judges_of(block).select(model.forward(weights, block)),
        }
        for state in (untrained, trained):
            for judge in (judge_server, judge_own):
                _, reply = judge(cfg, block, state, inbox, key)
                fields = {name: field.t for name, field in reply.items()}
                assert shapes(fields) == shapes_of_a_tally(CLIENTS)


@TASKS
def test_counts_do_not_tell_one_node_from_another(make_graph: MakeGraph, task: LabelForm) -> None:
    graph = make_graph(60, features=K, multilabel=task == "multilabel")
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    counts = []
    for g in (graph, subgraph(graph, order)):
        role = torch.from_numpy(g.node_id // 3 % 3)  # by name: the same nodes judge
        split = Split(role == 0, role == 1, role == 2)
        block, _ = make_block(g, whole(g), split, torch.float64)
        counts.append(pooled(rows_of(block)))
    assert counts[0]["val.nodes"].tolist() == counts[0]["test.nodes"].tolist() == [20]
    same(counts[1], counts[0])


def test_training_nodes_and_features_do_not_count(
    make_graph: MakeGraph, cut_block: MakeBlock
) -> None:
    model, weights = identity("multiclass")
    block, _ = case(make_graph, cut_block, "multiclass")
    assert isinstance(block.x, Tensor)
    unjudged = ~(block.split.val | block.split.test)
    assert unjudged.any()
    x = torch.where(unjudged[:, None], 100 * block.x, block.x)
    y = torch.where(unjudged, (block.y + 1) % K, block.y)
    changed = counts_of(
        rows_here(TORCH, model, weights, replace(block, x=x, y=y), block.client, CLIENTS)
    )
    got = counts_of(rows_here(TORCH, model, weights, block, block.client, CLIENTS))
    for name, value in pooled(rows_of(block)).items():
        assert torch.equal(changed[name], value)
        assert torch.equal(got[name], value)


@TASKS
def test_very_confident_logits_stay_finite(task: LabelForm) -> None:
    # Right and sure, wrong and sure, and undecided, for both classes.
    x = torch.tensor([[1e4, -1e4], [-1e4, 1e4], [1e4, -1e4], [-1e4, 1e4], [0.0, 0.0], [1e4, 1e4]])
    y = torch.tensor([0, 1, 1, 0, 0, 1])
    rows = free_rows(x, y if task == "multiclass" else torch.stack([1 - y, y], dim=1))
    got = pooled(rows)
    assert all(torch.isfinite(t.double()).all() for t in got.values())
    assert got["test.histogram"].sum(dim=(1, 2)).tolist() == [6, 6]
    # Class 0: nodes 0 and 4 and 3 are right, at +1e4, at 0 and at -1e4.
    right, wrong = got["test.histogram"][0, 1], got["test.histogram"][0, 0]
    assert right[right > 0].tolist() == [1, 1, 1]
    # Equal logits are log-odds 0 to one class of many, at any size; not to a single bit.
    assert wrong[right > 0].tolist() == ([1, 1, 1] if task == "multiclass" else [1, 0, 2])


@TASKS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logits_that_are_no_numbers_rank_lowest_and_infinite_ones_at_the_ends(
    task: LabelForm, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, K, generator=generator).to(dtype)
    y = torch.arange(40) % K
    y = y if task == "multiclass" else torch.nn.functional.one_hot(y, K)
    logits[0, 0], logits[1, 0], logits[2, 0] = torch.nan, torch.inf, -torch.inf
    logits[3], logits[4] = torch.inf, -torch.inf
    odds = log_odds(logits, task)
    assert bool(torch.isfinite(odds).all())
    assert odds[:3, 0].tolist() == [-CLIP, CLIP, -CLIP]
    assert bool((odds[5:, 0].abs() < CLIP).all())
    if task == "multilabel":
        assert odds[3].unique().tolist() == [CLIP]
        assert odds[4].unique().tolist() == [-CLIP]
    else:  # all classes alike, at any size: one of K
        torch.testing.assert_close(odds[3:5].exp(), torch.full((2, K), 1 / (K - 1)).double())
        assert odds[1, 1:].tolist() == [-CLIP] * (K - 1)  # surely another class
    bins = pooled(free_rows(logits, y))["test.histogram"]
    assert bins.sum(dim=(1, 2)).tolist() == [40] * K
    # The three rows sit at the ends, beyond all others.
    filled = bins[0].sum(0).nonzero()[:, 0]
    assert filled[[0, -1]].tolist() == [0, BINS - 1]
    for row, end in ((0, 0), (1, BINS - 1), (2, 0)):
        one = pooled(free_rows(logits[row : row + 1], y[row : row + 1]))
        assert bool(one["test.histogram"][0, :, end].any())


@TASKS
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nothing_but_broken_logits_ranks_nothing(task: LabelForm, value: float) -> None:
    y = torch.arange(12) % K
    y = y if task == "multiclass" else torch.nn.functional.one_hot(y, K)
    got = pooled(free_rows(torch.full((12, K), value), y))
    assert auc_of(got["test.histogram"]) == 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_odds_keep_the_order_of_confident_logits(dtype: torch.dtype) -> None:
    # Two classes: the log-odds of class 0 are the difference of the logits.
    difference = torch.linspace(-30, 30, 25, dtype=dtype)
    odds = log_odds(torch.stack([difference, torch.zeros_like(difference)], dim=1), "multiclass")
    assert odds.dtype == torch.float64
    # Up to 16 to 1e-7: 1 - p has lost half the digits of a double there.
    inside = difference.abs() <= 16
    torch.testing.assert_close(odds[inside, 0], difference[inside].double(), rtol=0, atol=1e-7)
    assert bool((odds[:, 0].diff() > 0).all())
    assert torch.equal(log_odds(difference[:, None], "multilabel"), difference[:, None])


@TASKS
def test_clients_without_judged_nodes_count_nothing(make_graph: MakeGraph, task: LabelForm) -> None:
    graph = make_graph(20, features=K, multilabel=task == "multilabel")
    partition = Partition(("a", "b"), (torch.arange(10), torch.arange(10, 20)), 20, "hand")
    first = torch.arange(20) < 10
    block, _ = make_block(graph, partition, Split(~first, first & False, first), torch.float64)
    for name, value in tally(rows_of(block)).items():
        assert not value[1].any()
        assert bool(value[0].any()) != name.startswith("val.")
    # And a block in which nobody judges.
    nobody = make_block(graph, partition, Split(~first | first, first & False, first & False))[0]
    empty = pooled(rows_of(nobody))
    empty["test.histogram"] = empty["test.histogram"].expand(2, K, 2, BINS)
    assert shapes(empty) == {
        name: (shape, torch.int64 if "histogram" in name else dtype)
        for name, (shape, dtype) in shapes_of_a_tally(2).items()
    }
    assert not any(t.any() for t in empty.values())


def test_counting_uses_no_dropout_and_no_gradient(
    make_graph: MakeGraph, cut_block: MakeBlock
) -> None:
    block, _ = case(make_graph, cut_block, "multiclass")
    model = Model("gcn", K, 5, K, 2, 0.9, "multiclass")
    weights = {
        name: w.requires_grad_() for name, w in model.init_weights(Key.of(0), torch.float64).items()
    }
    got = counts_of(rows_here(TORCH, model, weights, block, block.client, CLIENTS))
    own = judges_of(block).select(BACKENDS["torch"].predict(model, weights, block))
    assert not own.t.requires_grad
    assert not any(t.requires_grad for t in got.values())
    with torch.no_grad():
        logits = model.forward(weights, block)
    predicted = logits.argmax(dim=1)
    assert torch.equal(own.t, logits[judged_mask(block)])
    assert own.off.diff().tolist() == block.count(judged_mask(block)).tolist()
    right = (predicted == block.y) & block.split.test
    assert torch.equal(got["test.tp"].sum(1), block.count(right))
