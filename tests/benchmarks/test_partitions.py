"""The page on partitions says what its lines say."""

import json
import re
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "fedgrains"))

import partitions
from fedgrains_chart import chart as draw
from fedgrains_readings import degree_readings, hellinger, in_base_2, label_readings
from fedgrains_tables import CLIENTS, DATASETS, UNCUT, missing_by_table_4

import silograph as sg
from conftest import MakeGraph
from silograph.core.key import Key
from silograph.graph.heterogeneity import degree_distances, describe


def test_the_page_in_the_repository_is_that_of_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [json.loads(line) for line in partitions.CELLS.read_text().splitlines()]
    assert {(r["dataset"], r["scenario"], r["clients"], r["seed"]) for r in rows} == {
        cell for dataset in DATASETS for cell in partitions.cells_of(dataset)
    }
    page, chart = partitions.PAGE.read_text(), partitions.CHART.read_text()
    monkeypatch.setattr(partitions, "PAGE", tmp_path / "page.md")
    partitions.PAGE.write_text(re.sub(r"^\|.*\n", "", page, flags=re.MULTILINE))
    partitions.write_page(rows)
    assert partitions.PAGE.read_text() == page
    assert draw(rows) == chart
    ET.fromstring(chart)


def test_a_cell_agrees_with_the_statistics_of_the_cut(make_graph: MakeGraph) -> None:
    graph = make_graph(120)
    row = partitions.cell(graph, "cora", "disjoint", 4, 0)
    cut = sg.make_partition(graph, "metis", clients=4, key=Key.of(0))
    figures = describe(graph, cut)
    assert row["hash"] == cut.hash
    assert row["missing"] == figures.edges_cut
    assert row["labels"]["distance, mean over pairs"] == pytest.approx(figures.label_distance)
    assert row["labels"]["divergence, mean over pairs"] == pytest.approx(figures.label_divergence)
    assert row["degrees"]["one bin a degree"] == pytest.approx(figures.degree_distance)
    assert 0 < row["metis"]["k-way"] < graph.num_edges
    overlapping = partitions.cell(graph, "cora", "overlapping", 10, 0)
    assert "metis" not in overlapping
    assert overlapping["nodes"] == pytest.approx(30, abs=1)


def test_readings_by_hand(make_graph: MakeGraph) -> None:
    graph = make_graph(60)
    cut = sg.make_partition(graph, "random", clients=2, key=Key.of(0))
    apart = replace(graph, y=(torch.arange(60) >= 30).long())
    halves = sg.Partition(("a", "b"), (torch.arange(30), torch.arange(30, 60)), 60, "hand")
    read = label_readings(describe(graph, cut))
    # One pair: the matrix is 0 d d 0, whose median is d / 2.
    d = read["distance, mean over pairs"]
    assert read["distance, median over pairs"] == d
    assert read["distance, median over the whole matrix"] == pytest.approx(d / 2)
    assert read["divergence, mean over pairs"] == pytest.approx(d**2)
    base_2 = in_base_2(label_readings(describe(apart, halves)))
    assert base_2["distance, mean over pairs, base 2"] == pytest.approx(1)  # at most 1, either
    assert base_2["divergence, mean over pairs, base 2"] == pytest.approx(1)
    degrees = [np.array([1, 1, 3]), np.array([2, 2, 6])]
    told = degree_readings(degrees)
    assert told["one bin a degree"] == pytest.approx(1)
    # Bins of a client's own range do not see that the second has twice the degrees of the first.
    assert told["50 bins over each client's own range"] == pytest.approx(0)
    assert hellinger(np.array([[1, 1], [4, 0]])) == pytest.approx(np.sqrt(1 - np.sqrt(1 / 2)))
    client = torch.tensor([0, 0, 0, 1, 1, 1])
    assert degree_distances(client, torch.tensor(np.concatenate(degrees)), 2) == pytest.approx(1)


def test_table_4_implies_missing_links() -> None:
    assert missing_by_table_4("cora", 0) == (10138 - 5 * 1866) / 2
    assert sum("**" in line for line in partitions.consistency()) == 2  # CiteSeer and Photo
    assert set(UNCUT) == set(DATASETS)
    assert [len(counts) for counts in CLIENTS.values()] == [3, 3]


def test_a_graph_that_is_not_there_is_left_out_with_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str, data_dir: str | None) -> sg.Graph:
        raise sg.DataError(f"expected {name}.npz in {data_dir}")

    monkeypatch.setattr("silograph.load", missing, raising=False)
    monkeypatch.setattr(partitions, "CELLS", tmp_path / "cells.jsonl")
    rows: list[partitions.Row] = []
    partitions.measure(rows, "nowhere")
    assert rows == []
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{name} left out: expected {name}.npz in nowhere" for name in DATASETS]
    assert "not measured" in "\n".join(partitions.sections(rows)["missing disjoint"])
