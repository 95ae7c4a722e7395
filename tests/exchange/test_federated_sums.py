"""Federated sums: their checks, and the same bits in blocks of any size and after resuming."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import silograph as sg
from runs import MakeGraph, files_of, of, run_until, same_bits
from silograph.core.errors import CheckpointError, ProtocolError
from silograph.core.key import Key
from silograph.core.payload import Shared, Stacked
from silograph.exchange.collect import (
    SumSpec,
    fit_from_sums,
    fit_statistics,
    statistics_in,
    statistics_state,
    statistics_steps,
)
from silograph.experiment.resolve.data import BlockInState
from silograph.federation.checkpoint import CheckpointFolder, read_checkpoint
from silograph.federation.field_specs import EDGES, TRAIN, Extent, check_against
from silograph.federation.in_process import InProcess
from silograph.federation.program import Call, calls_of
from silograph.graph.block.block import ClientBlock, Route, make_block
from silograph.graph.column_statistics import FEATURES, ClientSums
from silograph.graph.graph import Graph
from silograph.graph.partition.partition import make_partition
from silograph.graph.partition.split import draw_split
from silograph.graph.silos.data import silo_block, silo_split
from silograph.graph.silos.export import write_silos

KEY, WIDE = Key.of(1), torch.float64
SPECS = {FEATURES: SumSpec(3), "weights": SumSpec(1, EDGES, deviation=False)}
OPTIONS: dict[str, Any] = {
    "method": "fedavg",
    "clients": 5,
    "partition": "random",
    "rounds": 3,
    "hidden": 8,
    "normalize": "standard",
}


def blocks(graph: Graph, clients: int) -> tuple[ClientBlock, Route]:
    """Return clients with sums of two names, one of which asks for a mean only."""
    partition = make_partition(graph, "random", clients=clients, key=KEY)
    split = draw_split(graph, partition, ratios=(0.5, 0.3, 0.2), key=KEY)
    block, route = make_block(graph, partition, split, WIDE)
    draws = torch.Generator().manual_seed(2)
    count = torch.arange(clients)  # the first has no rows
    total = torch.randn(clients, 3, generator=draws, dtype=WIDE) * count[:, None]
    squares = torch.rand(clients, 3, generator=draws, dtype=WIDE) * count[:, None]
    features = ClientSums(count, total, squares)
    weights = ClientSums(count, total[:, :1].abs(), squares[:, :1])
    return replace(block, sums={FEATURES: features, "weights": weights}), route


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("size", [1, 2, 7])
def test_named_sums_are_those_of_all_clients_to_the_bit(
    make_graph: MakeGraph, size: int, strict: bool
) -> None:
    block, route = blocks(make_graph(60), 7)
    fed = InProcess(None, block, route, size, strict=strict)
    fitted = fit_statistics(fed, SPECS, KEY)
    expected = fit_from_sums(block.sums, SPECS)
    assert fitted.keys() == expected.keys() == SPECS.keys()
    for name, found in fitted.items():
        assert torch.equal(found.mean, expected[name].mean)
        assert torch.equal(found.deviation, expected[name].deviation)
    assert fitted["weights"].deviation.tolist() == [1]
    extent = Extent(min(size, 7), WIDE, {})
    check_against(fed.states()[0], statistics_state(SPECS), extent, "the state")
    kept = statistics_in(fed.states()[0])
    assert torch.equal(kept[FEATURES].deviation, fitted[FEATURES].deviation)
    names = [record.op for record in fed.ledger.records if record.direction == "up"]
    assert names == ["send_sums", "send_squares", "keep_statistics"]


def calls(specs: dict[str, SumSpec] = SPECS) -> dict[str, Call]:
    return {call.op.__name__: call for call in calls_of(statistics_steps(specs, KEY))}


def test_a_mean_alone_needs_no_second_sum() -> None:
    assert list(calls({"weights": SPECS["weights"]})) == ["send_sums", "keep_statistics"]


AT_SERVER = Extent(1, torch.float32, {}, {TRAIN: 9, EDGES: 20})


def sums_of_one(**change: torch.Tensor) -> dict[str, Any]:
    fields = {
        "count_features": torch.tensor([9]),
        "total_features": torch.ones(1, 3, dtype=WIDE),
        "count_weights": torch.tensor([20]),
        "total_weights": torch.ones(1, 1, dtype=WIDE),
    } | change
    return {name.replace("_", "/"): Stacked(t) for name, t in fields.items()}


def test_a_silo_cannot_report_sums_that_cannot_be() -> None:
    call = calls()["send_sums"]
    call.check_reply({}, sums_of_one(), AT_SERVER)
    row = torch.ones(1, 3, dtype=WIDE)
    for change, line in (
        ({"count_features": torch.tensor([10])}, "at most the 9 train nodes"),
        ({"count_features": torch.tensor([-1])}, "values from 0"),
        ({"count_weights": torch.tensor([21])}, "at most the 20 edges nodes"),
        ({"total_features": row * torch.nan}, "finite sums, got NaN or infinity in 'total/featur"),
        ({"total_features": row * torch.inf}, "values up to 1e"),
        ({"total_features": row * -1e120}, "values from -1e"),
        ({"total_features": row * 1e102}, "sums of features of at most 1e"),
        ({"count_features": torch.tensor([0])}, "sums of features of at most 1e"),
        ({"total_features": row.float()}, "dtype torch.float64"),
        ({"total_features": row[:, :2]}, "shape"),
    ):
        with pytest.raises(ProtocolError, match=line):
            call.check_reply({}, sums_of_one(**change), AT_SERVER)
    call = calls()["send_squares"]
    inbox = {"mean/features": Shared(row[0])}
    call.check_reply(inbox, {"squares/features": Stacked(row)}, AT_SERVER)
    for value in (-1.0, torch.nan, torch.inf):
        with pytest.raises(ProtocolError):
            call.check_reply(inbox, {"squares/features": Stacked(row * value)}, AT_SERVER)


def test_a_server_cannot_send_statistics_that_cannot_be() -> None:
    call, row = calls()["keep_statistics"], torch.ones(3, dtype=WIDE)
    good = {"mean/features": row, "deviation/features": row, "mean/weights": row[:1]}
    call.check_inbox({n: Shared(t) for n, t in good.items()}, AT_SERVER, {})
    for change in (
        {"mean/features": row * torch.nan},
        {"mean/features": row * 1e120},
        {"deviation/features": -row},
        {"deviation/features": row * torch.inf},
        {"mean/features": row[:2]},
        {"mean/weights": row},
        {"other": row},
    ):
        fields = {name: Shared(t) for name, t in (good | change).items()}
        with pytest.raises(ProtocolError):
            call.check_inbox(fields, AT_SERVER, {})


def test_blocks_of_any_size_train_alike(make_graph: MakeGraph) -> None:
    runs = [sg.run(make_graph(), **OPTIONS, block_size=size) for size in (1, 2, 5)]
    assert all(same_bits(of(run), of(runs[0])) for run in runs)
    assert all(run.ledger.records == runs[0].ledger.records for run in runs)


def test_a_run_that_was_interrupted_goes_on_to_the_same_bits(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, out = make_graph(), tmp_path / "cut"
    options = OPTIONS | {"checkpoint_every": 1}
    whole = sg.run(graph, **options, out=str(tmp_path / "whole"))
    run_until(monkeypatch, graph, 2, out, **options)
    resumed = sg.resume(out, graph=graph)
    assert files_of(out) == files_of(tmp_path / "whole")
    assert whole.model is not None
    assert resumed.model is not None
    assert torch.equal(resumed.model.logits(graph), whole.model.logits(graph))


def test_checkpoints_without_usable_statistics_are_refused(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, out = make_graph(), tmp_path / "cut"
    run_until(monkeypatch, graph, 2, out, **OPTIONS)
    path = next(out.glob("checkpoints/round-*"))
    good = read_checkpoint(path, 1)
    name = "server/memory/statistics/features/mean"
    for change, line in (
        ({}, "statistics/features/mean"),
        ({name: good.tensors[name] * torch.nan}, "of another form"),
        ({name: good.tensors[name][:2]}, "of another form"),
    ):
        others = {n: t for n, t in good.tensors.items() if n != name}
        CheckpointFolder(path.parent).write(replace(good, tensors={**others, **change}))
        with pytest.raises(CheckpointError, match=line):
            sg.resume(out, graph=graph)


def test_a_silo_completes_its_block_by_its_state(make_graph: MakeGraph, tmp_path: Path) -> None:
    graph = make_graph(60)
    cut = make_partition(graph, "random", clients=2, key=KEY)
    split = draw_split(graph, cut, ratios=(0.5, 0.3, 0.2), key=KEY)
    silo = sg.read_silo(write_silos(tmp_path / "silos", graph, cut, split, format="npz")[0])
    block = silo_block(silo, silo_split(silo, "public", KEY), normalize="standard")
    lines: list[str] = []
    block_in = BlockInState(block, silo, lines.append)
    assert block_in({}) is block
    mean = torch.full((1, graph.num_features), 0.5, dtype=WIDE)
    state = {
        "statistics/mean/features": Stacked(mean),
        "statistics/deviation/features": Stacked(mean * 4),
    }
    completed = block_in(state)
    assert torch.allclose(completed.x, (block.x - 0.5) / 2)  # type: ignore[arg-type, operator]
    assert completed.x.dtype == block.x.dtype  # type: ignore[union-attr]
    again = {name: Stacked(field.t.clone()) for name, field in state.items()}
    assert block_in(again) is completed  # as after LOAD: kernels and memos stay
    assert block_in({}).x is block.x
    assert not lines  # float32 features keep their values
