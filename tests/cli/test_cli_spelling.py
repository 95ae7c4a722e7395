"""Laws of settings in messages: flags on the command line, Python's names in Python."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import silograph as sg
from commands import MakeGraph, save
from silograph.cli import run_app
from silograph.cli.flags import spell_as_flags


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("add edge_weights=ignore, and", "add --edge-weights ignore, and"),
        ("weights (edge_weights=ignore); all", "weights (--edge-weights ignore); all"),
        ("got keep_optimizer=True.", "got --keep-optimizer."),
        ("use strict=false: why", "use --no-strict: why"),
        ("weight_rows=used: then", "--weight-rows used: then"),
        ("rounds: input is 0", "--rounds: input is 0"),
        ("use normalize row or none", "use --normalize row or none"),
        ("leave normalize out", "leave --normalize out"),
        ("use normalize=paper", "use --option normalize=paper"),
        ("raise warmup_rounds", "raise --warmup-rounds"),
        ("lr=0.1 and momentum=0.9", "--lr 0.1 and --momentum 0.9"),
        ("option lr: give lr itself", "--option lr: give --lr itself"),
        ("listen: expected HOST:PORT", "--listen: expected HOST:PORT"),
        ("max_update_norm: expected 1", "--max-update-norm: expected 1"),
        ("use batch_size; choices: lr, batch_size", "use --batch-size; choices: lr, batch_size"),
        ("alpha: got 0 (options of dirichlet)", "--alpha: got 0 (options of dirichlet)"),
        ("alpha: got 0 (options of fedprox)", "--option alpha: got 0 (options of fedprox)"),
        ("clients: got 0 (options of oort)", "--option clients: got 0 (options of oort)"),
    ],
)
def test_settings_are_spelled_as_flags(said: str, shown: str) -> None:
    assert spell_as_flags(said) == shown
    assert spell_as_flags(shown) == shown


@pytest.mark.parametrize(
    "said",
    [
        "rounds: input is 0 (mine.toml)",
        "2 rounds of 3 clients and a method: an lr",
        "unknown 'local_epochs', 'rounds=3'",
        "no file at runs/local_epochs or local_epochs/x or local_epochs.csv",
        "selector.least_clients and fedais.local_epochs",
        "expected explore=false, --option drawn=3",
        "methods (fedavg)",
        "got 'my rounds=3 cell' and \"lr=1 or 2\"",
        "sg.run(local_epochs=2, lr=0.1)",
    ],
)
def test_other_words_stay(said: str) -> None:
    assert spell_as_flags(said) == said


def test_a_warning_spells_flags_on_the_command_line_only(
    make_graph: MakeGraph, work: Path, caplog: pytest.LogCaptureFixture
) -> None:
    graph = make_graph()
    edges = graph.edge_index.shape[1]
    save("weighted.npz", graph, edge_weight=np.ones(edges) * 2)
    options: dict[str, Any] = {"rounds": 1, "clients": 2, "partition": "random", "hidden": 4}
    sg.run("weighted.npz", edge_weights="ignore", **options)
    flags = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    command = ["run", "weighted.npz", *flags, "--edge-weights", "ignore", "--quiet", "--out", "x"]
    assert run_app(command) == 0
    said = "edge weights are not used (%s); every edge counts 1"
    assert [line for line in caplog.messages if line.startswith("edge weights")] == [
        said % "edge_weights=ignore",
        said % "--edge-weights ignore",
    ]
