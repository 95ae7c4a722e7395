"""Laws of used rows: features without the columns that a client does not have, and nothing else."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from silograph.graph.block.block import ClientBlock, Route, SparseRows
from silograph.graph.csr import CSR
from silograph.graph.graph import Graph

MakeGraph = Callable[..., Graph]
CutBlock = Callable[..., tuple[ClientBlock, Route]]


def dense(matrix: CSR) -> Tensor:
    return torch.from_numpy(matrix.scipy(np.float64).toarray())


def sparse_rows(
    make_graph: MakeGraph, cut_block: CutBlock, seed: int, width: int, clients: int
) -> tuple[ClientBlock, SparseRows]:
    block, _ = cut_block(make_graph(20, features=width, sparse=True, seed=seed), clients)
    assert isinstance(block.x, SparseRows)
    return block, block.x


@given(seed=st.integers(0, 99), width=st.integers(1, 30), clients=st.integers(1, 6))
def test_used_rows_are_the_features_that_occur(
    make_graph: MakeGraph, cut_block: CutBlock, seed: int, width: int, clients: int
) -> None:
    block, x = sparse_rows(make_graph, cut_block, seed, width, clients)
    whole, used = dense(x.csr), x.used
    compact = dense(used.csr)
    assert used.off.tolist()[0] == 0
    assert used.off.tolist()[-1] == len(used.feature) == used.csr.num_cols
    for c in range(clients):
        rows, mine = block.client == c, slice(int(used.off[c]), int(used.off[c + 1]))
        occurs = torch.zeros(width, dtype=torch.bool)
        occurs[x.csr.indices[rows[x.csr.row]].long()] = True
        features = used.feature[mine]
        assert features.tolist() == occurs.nonzero()[:, 0].tolist()
        assert torch.equal(compact[rows][:, mine], whole[rows][:, features])
        assert not bool(compact[~rows][:, mine].any())


@given(seed=st.integers(0, 99), width=st.integers(1, 30), group=st.permutations(range(4)))
def test_a_client_uses_the_same_rows_in_every_block(
    make_graph: MakeGraph, cut_block: CutBlock, seed: int, width: int, group: list[int]
) -> None:
    block, x = sparse_rows(make_graph, cut_block, seed, width, 4)
    part = block.take(torch.tensor(group[:2])).x
    assert isinstance(part, SparseRows)
    for position, c in enumerate(group[:2]):
        ours, theirs = (
            rows.used.feature[rows.used.off[i] : rows.used.off[i + 1]].tolist()
            for rows, i in ((part, position), (x, c))
        )
        assert ours == theirs


@pytest.mark.parametrize("clients", [1, 3])
def test_clients_without_features_use_no_row(
    make_graph: MakeGraph, cut_block: CutBlock, clients: int
) -> None:
    block, x = sparse_rows(make_graph, cut_block, 0, 5, clients)
    nothing = CSR.from_pairs(torch.empty(0).long(), torch.empty(0).long(), (20, 5))
    empty = SparseRows(nothing.to("cpu", torch.float64), x.off)
    assert empty.used.off.tolist() == [0] * (clients + 1)
    assert empty.used.csr.num_cols == 0
    assert block.num_clients == clients
