"""Laws of a split: ratios hold within every client, and numbering does not matter."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import silograph as sg
from conftest import planted_graph
from mistakes import raises_code
from silograph.core.errors import ConfigError, DataError
from silograph.core.key import Key
from silograph.experiment.resolve.data import Cut, clients_block
from silograph.graph.block.block import whole
from silograph.graph.csr import CSR
from silograph.graph.graph import MISSING, Graph, Split, subgraph
from silograph.graph.heterogeneity import describe, leaked_tests
from silograph.graph.partition.partition import Partition, make_partition
from silograph.graph.partition.split import (
    choose_split,
    copies_split,
    draw_split,
    drawn_split,
    full_split,
    parse_ratios,
    public_split,
)

RATIOS = (0.2, 0.4, 0.4)


def sample(nodes: int, seed: int = 0) -> Graph:
    """Return a graph without edges; about one node in five is unlabelled."""
    rng = np.random.default_rng(seed)
    y = torch.from_numpy(rng.integers(0, 3, nodes))
    y[torch.from_numpy(rng.random(nodes) < 0.2)] = MISSING
    none = torch.zeros(0, dtype=torch.int64)
    return Graph(
        adj=CSR.from_pairs(none, none, (nodes, nodes)),
        x=torch.zeros(nodes, 1),
        y=y,
        num_classes=3,
        node_id=rng.permutation(10 * nodes)[:nodes],
    )


def cut(graph: Graph, clients: int) -> Partition:
    return make_partition(graph, "random", clients=clients, key=Key.of(0))


@settings(max_examples=60)
@given(
    nodes=st.integers(30, 120),
    clients=st.integers(1, 6),
    parts=st.tuples(st.integers(3, 10), st.integers(0, 10), st.integers(0, 10)),
    rest=st.sampled_from([0, 5]),
)
def test_ratios_hold_for_every_client(
    nodes: int, clients: int, parts: tuple[int, int, int], rest: int
) -> None:
    total = sum(parts) + rest
    train, val, test = (part / total for part in parts)
    graph = sample(nodes, seed=nodes)
    partition = cut(graph, clients)
    split = draw_split(graph, partition, ratios=(train, val, test), key=Key.of(1))
    roles = torch.stack([split.train, split.val, split.test]).long()
    assert roles.sum(dim=0).max() <= 1
    assert not roles[:, ~graph.labeled].any()
    for client in range(clients):
        mine = partition.owner == client
        size = int((mine & graph.labeled).sum())
        counts = roles[:, mine].sum(dim=1).tolist()
        # Each end point is rounded once: at most 1/2 off; a difference of two, at most 1.
        for end, share in enumerate(np.cumsum([train, val, test]), start=1):
            assert sum(counts[:end]) == pytest.approx(share * size, abs=0.5 + 1e-6)
        if rest == 0:
            assert sum(counts) == size


def test_a_split_by_hand() -> None:
    # 5 labeled nodes at .2 / .4 / .4: ends at 1, 3, 5; 2 nodes: round(.4) = 0, round(1.2) = 1.
    graph = replace(sample(8), y=torch.tensor([0, 1, 2, 0, 1, MISSING, 0, 1]))
    partition = Partition(("a", "b"), (torch.arange(6), torch.tensor([6, 7])), 8, "hand")
    split = draw_split(graph, partition, ratios=RATIOS, key=Key.of(0))
    counts = [
        [int(mask[part].sum()) for mask in (split.train, split.val, split.test)]
        for part in partition.nodes
    ]
    assert counts == [[1, 2, 2], [0, 1, 1]]


def test_a_split_is_a_function_of_the_key() -> None:
    graph = sample(100)
    first, again, other = (
        draw_split(graph, cut(graph, 4), ratios=RATIOS, key=Key.of(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(first.train, again.train)
    assert torch.equal(first.test, again.test)
    assert not torch.equal(first.train, other.train)


def test_renumbering_the_nodes_does_not_change_their_roles() -> None:
    graph = sample(100)
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    shuffled = subgraph(graph, order)
    before, after = (
        draw_split(g, cut(g, 5), ratios=RATIOS, key=Key.of(3)) for g in (graph, shuffled)
    )
    assert torch.equal(before.train[order], after.train)
    assert torch.equal(before.val[order], after.val)
    assert torch.equal(before.test[order], after.test)


def test_overlapping_clients_share_one_role_and_unheld_nodes_have_none() -> None:
    graph = replace(sample(7), y=torch.zeros(7, dtype=torch.int64))
    held = (torch.tensor([0, 1, 2, 3]), torch.tensor([2, 3, 4, 5]))
    partition = Partition(("a", "b"), held, 7, "hand")
    split = draw_split(graph, partition, ratios=(0.5, 0.25, 0.25), key=Key.of(0))
    # Client a answers for 0 to 3, b for 4 and 5; nobody holds 6.
    assert [int(split.train[:4].sum()), int(split.train[4:6].sum())] == [2, 1]
    assert not (split.train | split.val | split.test)[6]


def test_multilabel_nodes_with_one_known_bit_take_part() -> None:
    y = torch.tensor([[1, MISSING], [MISSING, MISSING], [0, 0]])
    graph = replace(sample(3), y=y, num_classes=2)
    split = draw_split(graph, cut(graph, 1), ratios=(1.0, 0.0, 0.0), key=Key.of(0))
    assert split.train.tolist() == [True, False, True]


def test_public_split_leaves_out_unlabelled_nodes() -> None:
    graph = sample(50)
    every = torch.ones(50, dtype=torch.bool)
    none = ~every
    given_split = replace(graph, split=Split(every, none, every))
    split = public_split(given_split)
    assert torch.equal(split.train, graph.labeled)
    assert torch.equal(split.test, graph.labeled)
    assert not split.val.any()
    chosen = choose_split(given_split, cut(graph, 2), "public", Key.of(0))
    assert torch.equal(chosen.train, split.train)


def test_choose_split_reads_ratios() -> None:
    graph = sample(60)
    partition = cut(graph, 3)
    chosen = choose_split(graph, partition, "0.2/0.4/0.4", Key.of(9))
    made = draw_split(graph, partition, ratios=RATIOS, key=Key.of(9))
    assert torch.equal(chosen.train, made.train)
    assert torch.equal(chosen.val, made.val)
    assert parse_ratios(" .7 / .2 / .1 ") == (0.7, 0.2, 0.1)
    draw_split(graph, partition, ratios=(0.7, 0.2, 0.1), key=Key.of(0))  # sums to 1 - 1e-16


@pytest.mark.parametrize("folds", [2, 3, 5])
def test_folds_leave_every_node_out_of_training_once(folds: int) -> None:
    graph, partition = sample(83), cut(sample(83), 4)
    made = [
        choose_split(graph, partition, f"fold={i}/{folds}", Key.of(2)) for i in range(1, folds + 1)
    ]
    outside = torch.stack([split.val | split.test for split in made]).sum(0)
    assert torch.equal(outside, graph.labeled.long())
    for split in made:
        assert torch.equal(split.train.long() + split.val + split.test, graph.labeled.long())
        for client in range(4):
            mine = partition.owner == client
            size = int((graph.labeled & mine).sum())
            for part in (split.val, split.test):
                assert abs(int((part & mine).sum()) - size / folds / 2) <= 1


@pytest.mark.parametrize("how", ["fold=0/5", "fold=6/5", "fold=1/1", "fold=1", "fold=a/5", "fold="])
def test_folds_that_are_none_are_refused(how: str) -> None:
    graph = sample(10)
    with raises_code(ConfigError, "option-value", option="split"):
        choose_split(graph, cut(graph, 1), how, Key.of(0))


@pytest.mark.parametrize(
    "how", ["publik", "", "0.2/0.8", "0.2/0.4/0.2/0.2", "a/b/c", "0.2,0.4,0.4"]
)
def test_malformed_ratios_are_refused(how: str) -> None:
    graph = sample(10)
    with raises_code(ConfigError, "option-value", option="split"):
        choose_split(graph, cut(graph, 1), how, Key.of(0))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("0/0.5/0.5", "expected a training ratio above 0 and none below, got 0/0.5/0.5"),
        ("0.5/-0.1/0.5", "got 0.5/-0.1/0.5"),
        ("nan/0.5/0.5", "got nan/0.5/0.5"),
        ("0.5/0.5/nan", "got 0.5/0.5/nan"),
        ("inf/0/0", "sum to at most 1, such as 0.2/0.4/0.4, got inf/0/0"),
        ("0.5/0.5/0.1", r"at most 1, such as 0.2/0.4/0.4, got 0.5/0.5/0.1 = 1.1"),
    ],
)
def test_ratios_out_of_range_are_refused(how: str, message: str) -> None:
    graph = sample(10)
    with pytest.raises(ConfigError, match=message):
        choose_split(graph, cut(graph, 1), how, Key.of(0))


def test_a_split_that_trains_nobody_is_refused() -> None:
    graph = replace(sample(10), y=torch.zeros(10, dtype=torch.int64))
    with raises_code(DataError, "no-training-nodes"):
        choose_split(graph, cut(graph, 10), "0.2/0.4/0.4", Key.of(0))


def test_the_full_split_trains_on_all_that_is_not_judged() -> None:
    graph = sample(30)
    val, test = torch.arange(30) < 8, (torch.arange(30) >= 8) & (torch.arange(30) < 15)
    few = Split(torch.arange(30) == 29, val, test)
    split = full_split(replace(graph, split=few))
    assert torch.equal(split.val, val & graph.labeled)
    assert torch.equal(split.test, test & graph.labeled)
    assert torch.equal(split.train, graph.labeled & ~val & ~test)
    chosen = choose_split(replace(graph, split=few), cut(graph, 2), "full", Key.of(0))
    assert torch.equal(chosen.train, split.train)
    with pytest.raises(DataError, match="expected a graph with a public split, got 'graph'"):
        full_split(sample(5))


def test_a_missing_public_split_is_refused() -> None:
    with pytest.raises(DataError, match="expected a graph with a public split, got 'graph'"):
        public_split(sample(5))


# --- a split by client ----------------------------------------------------------------------------

BY_CLIENT = "by-client:0.5/0.2/0.3"


def overlapping(graph: Graph) -> Partition:
    return make_partition(
        graph, "shares", clients=4, key=Key.of(2), share_mean=0.6, share_variance=0.0
    )


def by_client(graph: Graph, partition: Partition) -> Split:
    found = copies_split(graph, partition, BY_CLIENT, Key.of(1))
    assert found is not None
    return found


def test_a_split_made_once_tells_no_copies_apart() -> None:
    graph = sample(60)
    assert copies_split(graph, overlapping(graph), "0.5/0.2/0.3", Key.of(1)) is None


def test_each_client_splits_what_it_holds() -> None:
    graph = sample(90)
    partition = overlapping(graph)
    copies = by_client(graph, partition)
    for c, nodes in enumerate(partition.nodes):
        mine = partition.client_of_node == c
        alone = Partition((partition.ids[c],), (nodes,), graph.num_nodes, "hand")
        own = by_client(graph, alone)
        known = int(graph.labeled[nodes].sum())
        ends = [int(share * known + 0.5 + 1e-9) for share in (0.5, 0.7, 1.0)]
        for part, size in zip(("train", "val", "test"), np.diff([0, *ends]), strict=True):
            mask = getattr(copies, part)[mine]
            assert torch.equal(mask, getattr(own, part))  # whoever else takes part
            assert int(mask.sum()) == size
            assert not bool((mask & ~graph.labeled[nodes]).any())


def test_owners_roles_are_the_graphs_and_leaks_are_counted() -> None:
    graph = sample(90)
    partition = overlapping(graph)
    copies = by_client(graph, partition)
    split = choose_split(graph, partition, BY_CLIENT, Key.of(1))
    roles: dict[int, dict[int, str]] = {}
    for row, (node, client) in enumerate(
        zip(partition.copies.tolist(), partition.client_of_node.tolist(), strict=True)
    ):
        role = [part for part in ("train", "val", "test") if getattr(copies, part)[row]]
        assert len(role) <= 1
        roles.setdefault(node, {})[client] = role[0] if role else ""
    for node, by_holder in roles.items():
        owns = by_holder[int(partition.owner[node])]
        assert [p for p in ("train", "val", "test") if getattr(split, p)[node]] == [owns] * bool(
            owns
        )
    leaks = sum(
        list(by_holder.values()).count("test")
        for by_holder in roles.values()
        if "train" in by_holder.values()
    )
    assert leaks > 0
    assert leaked_tests(copies, partition) == leaks
    assert describe(graph, partition, copies=copies).test_leaks == leaks
    assert describe(graph, partition, split).test_leaks == 0


def test_a_block_has_the_roles_of_copies() -> None:
    graph = sample(90)
    partition = overlapping(graph)
    copies = by_client(graph, partition)
    split = choose_split(graph, partition, BY_CLIENT, Key.of(1))
    block, _ = clients_block(Cut(graph, partition, split, copies=copies), torch.float32)
    assert all(
        torch.equal(a, b)
        for a, b in zip(vars(block.split).values(), vars(copies).values(), strict=True)
    )
    assert Cut(graph, partition, split).test_leaks == 0


def test_silos_split_their_own_as_the_simulation_does() -> None:
    graph = sample(90)
    partition = cut(graph, 3)
    copies = by_client(graph, partition)
    for c, nodes in enumerate(partition.nodes):
        own = subgraph(graph, nodes)
        found = drawn_split(own, whole(own, partition.ids[c]), BY_CLIENT, Key.of(1))
        for part in ("train", "val", "test"):
            assert torch.equal(
                getattr(found, part), getattr(copies, part)[partition.client_of_node == c]
            )


@pytest.mark.parametrize("how", ["by-client:public", "by-client:fold=1/5", "by-client:"])
def test_only_shares_are_split_by_client(how: str) -> None:
    graph = sample(60)
    with raises_code(ConfigError, "option-value", option="split"):
        choose_split(graph, overlapping(graph), how, Key.of(1))


def test_a_run_says_how_many_test_nodes_train_elsewhere(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = sg.run(
        planted_graph(), clients=3, partition="shares", split=BY_CLIENT, rounds=1, kernels="torch"
    )
    assert result.cut is not None
    leaks, tests = result.cut.test_leaks, int(result.cut.copies_split.test.sum())
    assert result.to_dict()["test_leaks"] == leaks > 0
    result.print_to(Console(width=200))
    told = " ".join(capsys.readouterr().out.split())
    assert f"leaks: {leaks} of {tests} copies of test nodes train at another client" in told
