"""FedGraph's exchange with other neighbor samplers: limits, draws across silos, parity, bytes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import silograph as sg
from remote_runs import finish, lines, remote
from runs import FAST, go, of, rows_of, run_until, same_bits
from silograph.core.config import make_config
from silograph.core.errors import ConfigError
from silograph.core.key import Key
from silograph.core.payload import offsets, owners
from silograph.experiment.run.setup import prepare
from silograph.graph.block.block import ClientBlock, Route
from silograph.graph.graph import Graph
from silograph.methods.fedgraph import SampledStage, StageDraw, sampled_stage
from silograph.nn.mini_batches import Fanout, Neighbors, Reached
from silograph.sampling.layer_wise import FastGCN

MakeGraph = Callable[..., Graph]
CutBlock = Callable[..., tuple[ClientBlock, Route]]
PLAIN: dict[str, Any] = {"method": "fedgraph", "dropout": 0.0, "weight_decay": 0.0}
SAMPLERS: dict[str, dict[str, Any]] = {
    "fanout": {"fanout": "2,1"},
    "fastgcn": {"neighbors": "fastgcn", "options": {"neighbors.size": 6}},
    "ladies": {"neighbors": "ladies", "options": {"neighbors.size": 6}},
    "drop_edge": {"neighbors": "drop_edge"},
}


def config_of(sampler: str, **options: Any) -> dict[str, Any]:
    """Return the keys of a run with a sampler; its method's options are `options`."""
    own = SAMPLERS[sampler]
    method_options = {f"method.{name}": value for name, value in options.items()}
    return {**PLAIN, **own, "options": {**own.get("options", {}), **method_options}}


# --- limits ---------------------------------------------------------------------------------------


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("sampler", ["fanout", "fastgcn", "ladies", "drop_edge"])
def test_without_sharing_it_is_fedopt_with_that_sampler(
    make_graph: MakeGraph, monkeypatch: pytest.MonkeyPatch, sampler: str
) -> None:
    """FedOpt draws by the key of the first batch of its first epoch."""
    graph, other = make_graph(60), {"rounds": 3, "keep_optimizer": False, "kernels": "torch"}
    steps = {"method": "fedopt", "lr": 0.1, "local_epochs": 1}  # FedGraph's by default
    theirs = go(graph, **{**PLAIN, **SAMPLERS[sampler]} | steps | other)
    monkeypatch.setattr(
        "silograph.methods.fedgraph.step_key",
        lambda clients, state: clients.key.fold("epoch", 0).fold("batch", 0),
    )
    ours = go(graph, **config_of(sampler, share="none", kappa=1024) | other)
    for name, w in of(theirs).items():
        torch.testing.assert_close(of(ours)[name], w, rtol=0, atol=1e-10)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("share", ["all", "hidden"])
def test_a_sampler_that_takes_all_is_rates_of_one(make_graph: MakeGraph, share: str) -> None:
    graph, other = make_graph(60), {**PLAIN, "rounds": 2, "layers": 3}
    all_kept = {"keep_1": 1.0, "keep_2": 1.0, "rescale": "inverse", "share": share}
    rates = go(graph, **other, options=all_kept)
    sampler = go(graph, **other, fanout="0", options={"method.share": share})
    assert same_bits(of(rates), of(sampler))
    assert lines(rates.ledger.records) == lines(sampler.ledger.records)


# --- draws across silos ---------------------------------------------------------------------------


def drawn_by(block: ClientBlock, rows: Tensor, sampler: Neighbors, key: Key) -> SampledStage:
    """Return a shared stage of some rows, ascending."""
    clients = torch.arange(block.num_clients)
    counts = torch.bincount(block.client[rows], minlength=block.num_clients)
    reached = Reached(rows, torch.zeros_like(rows), clients, offsets(counts))
    unread = torch.full((block.num_clients,), 0.5, dtype=torch.float64)
    draw = StageDraw(True, unread, shared=True, by_degree=True, sampler=sampler)
    return sampled_stage(block, reached, 0, draw, rows[:0], key)


def weights_of(block: ClientBlock, stage: SampledStage) -> Tensor:
    """Return what each row of the block and each slot counts in the sums of a stage, (r, n + S)."""
    n, slots = len(block.row_key), len(block.halo.key)
    weights = torch.zeros(len(stage.output_rows.rows), n + slots, dtype=torch.float64)
    own = stage.own_neighbors
    weights[own.position, own.neighbor] = own.share
    first = block.halo.off[:-1].repeat_interleave(stage.slots.off.diff())
    halo = stage.halo_weights
    assert halo.values is not None
    weights[halo.row, n + (stage.slots.t.long() + first)[halo.indices.long()]] = halo.values
    return weights


def complete(block: ClientBlock) -> Tensor:
    """Return all edges, (n, n + S)."""
    n = len(block.row_key)
    edges = torch.zeros(n, n + len(block.halo.key), dtype=torch.float64)
    edges[block.adj.row, block.adj.indices.long()] = 1
    edges[block.halo.adj.row, n + block.halo.adj.indices.long()] = 1
    return edges


def test_a_fanout_counts_neighbors_of_all_silos(make_graph: MakeGraph, cut_block: CutBlock) -> None:
    """At most two of them; each stands for degree / drawn, in the same way wherever it is drawn."""
    block, _ = cut_block(make_graph(60), 3)
    rows, edges = torch.arange(len(block.row_key)), complete(block)
    weights = weights_of(block, drawn_by(block, rows, Fanout((2,)), Key.of(1)))
    assert bool((weights[edges == 0] == 0).all())
    degree = edges.sum(1)
    assert torch.equal((weights > 0).sum(1), degree.clamp(max=2).long())
    torch.testing.assert_close(weights.sum(1), degree)
    n = len(rows)
    assert bool((weights[:, :n] > 0).any())
    assert bool((weights[:, n:] > 0).any())
    # A row that another silo requests has the neighbors that it has in any other batch.
    some = rows[::3]
    fewer = weights_of(block, drawn_by(block, some, Fanout((2,)), Key.of(1)))
    assert torch.equal(fewer, weights[some])


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("sampler", [Fanout((2,)), FastGCN(6)])
def test_draws_are_unbiased_over_all_silos(
    make_graph: MakeGraph, cut_block: CutBlock, sampler: Neighbors
) -> None:
    block, _ = cut_block(make_graph(40), 3)
    rows, count = torch.arange(len(block.row_key)), 1000
    total, squares = torch.zeros_like(complete(block)), torch.zeros_like(complete(block))
    for number in range(count):
        weights = weights_of(block, drawn_by(block, rows, sampler, Key.of(number)))
        total, squares = total + weights, squares + weights.square()
    mean = total / count
    error = (squares / count - mean.square()).clamp(min=0).sqrt() / count**0.5
    assert bool(((mean - complete(block)).abs() <= 5 * error + 1e-12).all())


def test_fastgcn_draws_the_same_nodes_for_all_rows_of_a_client(
    make_graph: MakeGraph, cut_block: CutBlock
) -> None:
    block, _ = cut_block(make_graph(60), 3)
    rows, edges = torch.arange(len(block.row_key)), complete(block)
    weights = weights_of(block, drawn_by(block, rows, FastGCN(5), Key.of(2)))
    of_sender = torch.cat([block.client, owners(block.halo.off)])
    for client in range(3):
        mine = of_sender == client
        used = (weights[:, mine] > 0).any(0)
        assert 0 < int(used.sum()) <= 5
        is_drawn = (edges[:, mine] > 0) & used
        assert torch.equal(weights[:, mine] > 0, is_drawn)


# --- whole runs -----------------------------------------------------------------------------------


@pytest.mark.law(sample=6)
@pytest.mark.parametrize(
    ("sampler", "share"),
    [
        ("fanout", "hidden"),
        ("fastgcn", "hidden"),
        pytest.param("fanout", "all", marks=pytest.mark.slow),
        pytest.param("fastgcn", "all", marks=pytest.mark.slow),
        pytest.param("ladies", "hidden", marks=pytest.mark.slow),
        pytest.param("drop_edge", "all", marks=pytest.mark.slow),
    ],
)
def test_killed_and_resumed_in_blocks_and_over_a_session_it_is_the_same(
    make_graph: MakeGraph,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sampler: str,
    share: str,
) -> None:
    graph = make_graph(60)
    options = {**config_of(sampler, share=share, kappa=5, local_steps=2), "dropout": 0.5}
    straight = go(graph, **options, block_size=1)
    run_until(monkeypatch, graph, 3, tmp_path / "cut", **FAST | options | {"block_size": 1})
    again = sg.resume(tmp_path / "cut", graph=graph)
    over, _ = remote(prepare(make_config({**FAST, **options, "block_size": 1}), graph))
    for other in (again, finish(over)):
        assert same_bits(of(straight), of(other))
        assert rows_of(straight) == rows_of(other)
        assert lines(straight.ledger.records) == lines(other.ledger.records)
    together = go(graph, **options, block_size=4)
    for name, w in of(straight).items():
        torch.testing.assert_close(of(together)[name], w, rtol=0, atol=1e-10)
    assert lines(straight.ledger.records) == lines(together.ledger.records)


def test_only_rows_that_were_drawn_travel(make_graph: MakeGraph) -> None:
    """Bytes of rows grow with the fan-out, up to those of all neighbors."""
    graph = make_graph(80)
    sizes = [
        go(graph, **PLAIN, fanout=fanout, rounds=2).ledger.bytes_by_kind["embeddings"]
        for fanout in ("1", "2", "0")
    ]
    assert sizes[0] < sizes[1] < sizes[2]
    few, many = (
        go(graph, **PLAIN, neighbors="fastgcn", options={"neighbors.size": size}, rounds=2)
        for size in (2, 1024)
    )
    assert few.ledger.bytes_by_kind["embeddings"] < many.ledger.bytes_by_kind["embeddings"]
    assert many.ledger.bytes_by_kind["embeddings"] <= sizes[2]


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"neighbors": "fedgrains"}, "expected a neighbor sampler that remembers nothing with fed"),
        (
            {"fanout": "2", "options": {"method.policy": "drawn"}},
            "expected policy=fixed where neighbors draws in place of keep_1 and keep_2, got",
        ),
        (
            {"fanout": "2", "options": {"method.keep_1": 0.25}},
            "expected no keep_1 where neighbors draws in its place, got keep_1=0.25: leave one",
        ),
        (
            {"neighbors": "fastgcn", "options": {"method.rescale": "inverse"}},
            "expected no rescale where neighbors draws in its place, got rescale=inverse",
        ),
        ({"fanout": "2,2,2"}, "fanout: expected one number or 2"),
    ],
)
def test_samplers_that_cannot_draw_are_refused(
    make_graph: MakeGraph, other: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        go(make_graph(), **{"method": "fedgraph", **other})
