"""What leaves a silo: declared kinds, and that labels, edges and features are not among them."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import least_squares
from torch import Tensor

import silograph as sg
from leaks import OPTIONS, Sent, blocks_of, documented, found_in
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import Payload, Ragged, State, take
from silograph.experiment.run.setup import Setup, first_weights
from silograph.federation.check import check_results
from silograph.federation.frame import Envelope, encode
from silograph.federation.in_process import BlockHost, InProcess
from silograph.graph.block.block import ClientBlock, Route, connect
from silograph.graph.graph import Graph
from silograph.graph.partition.partition import make_partition
from silograph.methods import METHODS
from silograph.methods.base import MethodConfig
from silograph.methods.label_guided import LABEL_GUIDED, LabelGuidedOptions
from silograph.nn.fit import Schedule
from silograph.nn.model import Model
from silograph.nn.optim import Adam

ROOT = Path(__file__).parents[2]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """Every payload that a client sends while the test goes, as it is encoded."""
    seen: Sent = []
    carried = BlockHost._send_over_wire
    replies: list[bool] = []

    def check(*args: Any, **own: Any) -> State:
        replies.append(True)
        return check_results(*args, **own)

    def spy(self: BlockHost, envelope: Envelope, payload: Payload, clients: int) -> Payload:
        if replies:  # between an op's answer and the next call: this is what it answered
            for position in range(clients):
                part = {name: take(f, torch.tensor([position])) for name, f in payload.items()}
                encode(envelope, payload, position)
                seen.append((envelope, part))
            replies.clear()
        return carried(self, envelope, payload, clients)

    monkeypatch.setattr("silograph.federation.in_process.check_results", check)
    monkeypatch.setattr(BlockHost, "_send_over_wire", spy)
    return seen


def run_method(name: str, graph: Graph, **other: Any) -> None:
    sg.run(
        graph,
        clients=4,
        partition="random",
        method=name,
        rounds=2,
        hidden=8,
        dtype="float64",  # that of most tests: masks need not be compiled for another one
        strict=True,
        block_size=1,
        options=OPTIONS.get(name, {}),
        **other,
    )


@pytest.mark.parametrize("name", METHODS)
def test_methods_send_what_the_docs_have_and_no_labels_edges_or_features(
    make_graph: Callable[..., Graph], sent: Sent, setups: list[Setup], name: str
) -> None:
    run_method(name, make_graph(60))
    kinds = {envelope.kind.value for envelope, fields in sent if fields} - {"evaluation"}
    assert kinds == documented()[name]
    assert found_in(sent, blocks_of(setups[0])) == set()


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "local", "llcg"])
def test_collecting_adds_features(make_graph: Callable[..., Graph], sent: Sent, name: str) -> None:
    run_method(name, make_graph(60), collect=0.5)
    kinds = {envelope.kind.value for envelope, fields in sent if fields} - {"evaluation"}
    assert kinds == documented()[name] | {"features", "halo_keys"}


def test_features_are_found_where_they_do_leave(
    make_graph: Callable[..., Graph], sent: Sent, setups: list[Setup]
) -> None:
    run_method("fedavg", make_graph(60), collect=0.5)
    assert found_in(sent, blocks_of(setups[0])) == {("features", "features")}


@pytest.mark.parametrize(("how", "percent"), [("random", 65), ("metis", 71)])
def test_slots_of_pubmed_that_one_row_touches(how: str, percent: int) -> None:
    """The figures of docs/explanation/privacy.md."""
    shared = ROOT.parent / "shared" / "data"
    if not shared.exists():
        pytest.skip("needs PubMed in ../shared/data")
    graph = sg.load("pubmed", data_dir=shared)
    partition = make_partition(graph, how, clients=8, key=Key.of(0).fold("partition"))
    _, halo, _ = connect(graph, partition)
    touching = torch.bincount(halo.adj.indices.long(), minlength=halo.adj.num_cols)
    assert round(100 * float((touching == 1).double().mean())) == percent
    assert f"{percent} %" in (ROOT / "docs" / "explanation" / "privacy.md").read_text(
        encoding="utf-8"
    )


def test_only_the_exchange_lets_rows_through() -> None:
    sources = (ROOT / "src" / "silograph").rglob("*.py")
    with_rows = {p.name for p in sources if re.search(r"\brows=True\b", p.read_text("utf-8"))}
    assert with_rows == {"rows.py", "pull.py", "masked_sums.py"}


def test_features_can_be_worked_out_from_single_partial_sums(
    make_graph: Callable[..., Graph],
    cut_block: Callable[..., tuple[ClientBlock, Route]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server solves message = scale x W for x in four steps (docs/explanation/privacy.md)."""
    block, route = cut_block(make_graph(40), 4)
    cfg = MethodConfig(
        Model("gcn", 7, 4, 3, 2, 0.0, "multiclass"),
        Adam(0.01),
        Schedule(1),
        True,
        1.0,
        LabelGuidedOptions(),
    )
    fed = InProcess(cfg, block, route, 4)
    messages, maps = [], []
    call = InProcess.call

    def overhear(self: InProcess, op: Any, inbox: Payload, **own: Any) -> Payload:
        reply = call(self, op, inbox, **own)
        if op.__name__ == "begin":
            maps.append(inbox["weights/0.weight"].t.clone())
        if op.__name__ == "send_partial_sums" and int(inbox["stage"].t) == 0:
            assert own["what"] == Kind.PARTIAL_SUMS
            assert isinstance(reply["rows"], Ragged)
            messages.append(reply["rows"].t)
        return reply

    monkeypatch.setattr(InProcess, "call", overhear)
    weights = cfg.model.init_weights(Key.of(2), torch.float64)
    state = LABEL_GUIDED.init(fed, cfg, weights, Key.of(0))
    for t in range(1, 5):
        state, _ = LABEL_GUIDED.round(fed, cfg, state, t, Key.of(0))
    equations, known = torch.cat(maps, 1).T, torch.cat(messages, 1).T  # (4 H, F), (4 H, S)
    solved = torch.linalg.lstsq(equations, known).solution.T
    halo = block.halo.adj
    touching = torch.bincount(halo.indices.long(), minlength=halo.num_cols)
    single = (touching == 1).nonzero()[:, 0]
    assert len(single) > 10
    order = halo.indices.long().argsort(stable=True)
    first = torch.searchsorted(halo.indices.long()[order], single)
    sender = halo.row[order][first]
    assert isinstance(block.x, Tensor)
    scale = ((block.adj.degree + halo.degree)[sender] + 1).double().rsqrt()[:, None]
    torch.testing.assert_close(solved[single], scale * block.x[sender], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_rows_of_hidden_layers_give_what_entered_the_first_one(
    make_graph: Callable[..., Graph], sent: Sent, setups: list[Setup]
) -> None:
    """FedGraph says that h^(2) W^(2) hides features. The server knows the weights of every round.

    All neighbors, no dropout: what a row's first layer sums over stays the same, and every round
    gives 3 more equations for its 7 values and its unknown scale. A node without neighbors at its
    own silo sums over itself only: those are its features.
    """
    everything = {"kappa": 1024, "keep_1": 1.0, "keep_2": 1.0}
    graph, shape = make_graph(60), {"hidden": 8, "dtype": "float64", "kernels": "torch"}
    sg.run(
        graph,
        clients=4,
        partition="random",
        method="fedgraph",
        rounds=14,
        dropout=0.0,
        lr=0.1,
        strict=True,
        block_size=1,
        options=everything,
        **shape,  # type: ignore[arg-type]
    )
    setup = setups[0]
    ids, weights = setup.federation.ids, [first_weights(setup)]
    rows: list[list[Tensor]] = [[] for _ in ids]
    for envelope, fields in sent:
        if envelope.kind is Kind.EMBEDDINGS and "rows" in fields:
            rows[min(range(len(ids)), key=lambda c: len(rows[c]))].append(fields["rows"].t)
    updates = [fields for e, fields in sent if e.kind is Kind.WEIGHTS and "nodes" in fields]
    for start in range(0, len(updates), len(ids)):
        found = updates[start : start + len(ids)]
        nodes = [float(fields["nodes"].t) for fields in found]
        weights.append(
            {
                name: torch.stack(
                    [n * f[f"weights/{name}"].t[0] for n, f in zip(nodes, found, strict=True)]
                ).sum(0)
                / sum(nodes)
                for name in weights[0]
            }
        )
    recovered, alone = 0, 0
    total = sum(len(r[0]) for r in rows)
    for block, seen in zip(blocks_of(setup), rows, strict=True):
        assert isinstance(block.x, Tensor)
        adj = torch.zeros(len(block.y), len(block.y), dtype=torch.float64)
        adj[block.adj.row, block.adj.indices.long()] = 1
        scale = (adj.sum(1) + 1).rsqrt()
        truth = scale[:, None] * ((adj + torch.eye(len(adj))) @ (scale[:, None] * block.x))
        observed = torch.stack(seen, dim=1)  # (rows, rounds, 3)
        for values in observed:
            guess = inverted(values, weights[:-1])
            error, place = (truth - guess).abs().amax(1).min(0)
            recovered += bool(error < 1e-6)
            isolated = bool(block.adj.degree[place] == 0)
            alone += isolated and bool((block.x[place] - guess).abs().max() < 1e-6)
    assert total > 20
    assert recovered >= 0.9 * total
    assert alone > 0


def inverted(values: Tensor, weights: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """What entered the first layer of a row, from what it sent in each round (T, 3)."""
    arrays = [{name: w.numpy() for name, w in each.items()} for each in weights]
    target, size = values.numpy(), len(arrays[0]["0.weight"])

    def misses(unknown: np.ndarray) -> np.ndarray:
        found = [
            np.maximum(unknown[:-1] @ w["0.weight"] + w["0.bias"], 0) @ w["1.weight"]
            for w in arrays
        ]
        missed: np.ndarray = unknown[-1] * np.stack(found) - target
        return missed.ravel()

    best, generator = None, np.random.default_rng(0)
    for _ in range(12):
        start = np.append(generator.normal(size=size), 0.5)
        tried = least_squares(misses, start, xtol=1e-15, ftol=1e-15, gtol=1e-15)
        if best is None or tried.cost < best.cost:
            best = tried
        if best.cost < 1e-20:
            break
    assert best is not None
    return torch.from_numpy(best.x[:-1])
