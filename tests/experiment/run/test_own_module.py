"""Laws of runs with a user's own torch.nn.Module."""

import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import GCNConv, GINConv

import silograph as sg
from crossed import crossed
from mistakes import raises_code
from runs import FAST, MakeGraph, files_of, go, of, rows_of, run_until, same_bits, some_of
from silograph.cli import run_app
from silograph.core.errors import CheckpointError, ConfigError, DataError
from silograph.core.key import Key
from silograph.graph.block.block import ClientBlock, Route
from silograph.methods import METHODS
from silograph.nn.forward import AnyModel
from silograph.nn.model import Model
from silograph.nn.own_module import ModuleModel

MakeBlock = Callable[..., tuple[ClientBlock, Route]]
HIDDEN = FAST["hidden"]
OWN: dict[str, Any] = {"hidden": 128}  # its default: a module decides by itself


# Sums over all silos are refused with modules: tests/methods/test_label_guided.py.
# FedPUB looks at the layers of a model.
ALONE = [n for n, method in METHODS.items() if not method.evaluate.crosses and n != "fedpub"]


class Net(nn.Module):
    """Two of PyG's graph convolutions, as a user would write it."""

    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()
        self.a, self.b = GCNConv(features, HIDDEN), GCNConv(HIDDEN, outputs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.b(functional.relu(self.a(x, edge_index)), edge_index)
        return out


class Dropping(Net):
    """The same with randomness of its own, an unused parameter and a scalar one."""

    def __init__(self, features: int, outputs: int) -> None:
        super().__init__(features, outputs)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = functional.dropout(functional.relu(self.a(x, edge_index)), 0.5, self.training)
        out: Tensor = self.b(h * self.scale, edge_index)
        return out


class Constant(nn.Module):
    """GIN of PyG keeps its epsilon in a buffer that never changes."""

    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()
        self.a = GINConv(nn.Linear(features, outputs), eps=0.5)
        self.register_buffer("shift", torch.rand(outputs))  # drawn, so it must be drawn alike

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.a(x, edge_index) + self.shift
        return out


def renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """GCN's weights under the names and in the layout of `Net`."""
    names = {"0.weight": "a.lin.weight", "0.bias": "a.bias"}
    names |= {"1.weight": "b.lin.weight", "1.bias": "b.bias"}
    return {names[k]: w.T.contiguous() if w.dim() == 2 else w for k, w in weights.items()}


@pytest.mark.law(sample=24)
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(
    ("method", "optimizer"),
    [(name, o) for name in ALONE for o in ("adam", "sgd")[METHODS[name].needs.plain_sgd :]],
)
def test_a_module_written_as_gcn_is_gcn(
    make_graph: MakeGraph,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    optimizer: str,
    sparse: bool,
) -> None:
    """Given the same initial weights: weights, losses and scores; names cost other bytes."""
    graph = make_graph(60, sparse=sparse, missing=0.1)
    shape = Model("gcn", graph.num_features, HIDDEN, graph.num_classes, 2, 0.0, graph.task)
    options: dict[str, Any] = {"method": method, "optimizer": optimizer, "local_epochs": 2}
    options |= some_of(method, 0.5)
    if sparse and not METHODS[method].setting.uncut:
        options["collect"] = 0.4
    if method in ("fedgnn", "fesog"):  # noise is by entry, and a module has its own layout
        options["options"] = {"noise": 0.0}
    theirs = go(graph, kernels="torch", dropout=0.0, **options)

    def equal(model: AnyModel, key: Key, dtype: torch.dtype) -> dict[str, Tensor]:
        return renamed(shape.init_weights(key, dtype))

    monkeypatch.setattr(ModuleModel, "init_weights", equal)
    ours = go(graph, model=Net, **OWN | options)
    for a, b in zip(rows_of(ours), rows_of(theirs), strict=True):
        for name in b.keys() - {"flops", "bytes", "bytes_evaluation"}:
            same = a[name] is b[name] or a[name] == pytest.approx(b[name], rel=0, abs=1e-10)
            assert same, name
    if METHODS[method].evaluate.view == "server":  # others keep no whole model
        for name, w in renamed(of(theirs)).items():
            torch.testing.assert_close(of(ours)[name], w, rtol=0, atol=1e-10)


@pytest.mark.law(sample=24)
@crossed(
    {"module": (Dropping, Constant), "method": ALONE},
    quick=[*((Dropping, name) for name in ALONE), (Constant, "local"), (Constant, "fedavg")],
)
def test_grouping_changes_no_bit(
    make_graph: MakeGraph, module: type[nn.Module], method: str
) -> None:
    graph = make_graph(60)
    if (module, method) == (Constant, "fedper"):
        pytest.skip("FedPer needs a layer beside its private one")
    options = {"method": method, "batch_size": 3, "model": module, "rounds": 2} | OWN
    one, many = (go(graph, block_size=size, **options) for size in (1, 4))
    assert rows_of(one) == rows_of(many)
    assert list(one.ledger.records) == list(many.ledger.records)
    if METHODS[method].evaluate.view == "server":  # others keep no whole model
        assert same_bits(of(one), of(many))


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("method", ["fedopt", "local"])
def test_an_interrupted_run_goes_on(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    graph = make_graph(60)
    options = FAST | OWN | {"method": method, "model": Dropping, "keep_optimizer": True}
    sg.run(graph, **options, out=str(tmp_path / "whole"))
    run_until(monkeypatch, graph, 3, tmp_path / "cut", **options)
    sg.resume(tmp_path / "cut", graph=graph, model=Dropping)
    assert files_of(tmp_path / "cut") == files_of(tmp_path / "whole")


def test_strict_frames_hold_its_weights(make_graph: MakeGraph) -> None:
    graph = make_graph(60)
    plain, strict = (go(graph, model=Dropping, strict=s, **OWN) for s in (False, True))
    assert same_bits(of(plain), of(strict))


def test_outside_draws_are_left_alone(make_graph: MakeGraph) -> None:
    graph = make_graph(60)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first = go(graph, model=Dropping, rounds=2, **OWN)
    assert torch.equal(torch.rand(2), expected)
    again = go(graph, model=Dropping, rounds=2, **OWN)
    other = go(graph, model=Dropping, rounds=2, init_seed=5, **OWN)
    assert same_bits(of(first), of(again))
    assert not same_bits(of(first), of(other))


def test_its_own_draws_differ_by_client_and_step(make_graph: MakeGraph) -> None:
    seen: list[float] = []

    class Draws(Net):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            if self.training:
                seen.append(float(torch.rand(1)))
            return super().forward(x, edge_index)

    go(make_graph(60), model=Draws, rounds=2, local_epochs=3, **OWN)
    assert len(seen[1:]) == 2 * 3 * 4  # the first is of the check
    assert len(set(seen[1:])) == 2 * 3 * 4


def test_saved_and_loaded(make_graph: MakeGraph, tmp_path: Path) -> None:
    graph, path = make_graph(60), tmp_path / "model.safetensors"
    model = go(graph, model=Constant, **OWN).model
    assert model is not None
    model.save(path)
    back = sg.load_model(path, model=Constant)
    assert back.shape == model.shape
    assert np.array_equal(back.predict(graph), model.predict(graph))
    with pytest.raises(DataError) as caught:
        sg.load_model(path)
    assert str(caught.value) == (
        f"expected the class of the model in {path}, got none: it is a torch.nn.Module, "
        f"{__name__}:Constant, and files are not trusted to name code; use "
        "sg.load_model(PATH, model=...)"
    )


def test_work_is_counted(make_graph: MakeGraph) -> None:
    """Products are two thirds of the work at least, and evaluation is a third of training."""
    graph = make_graph(60, features=100)

    class Linear(nn.Module):
        def __init__(self, features: int, outputs: int) -> None:
            super().__init__()
            self.a = nn.Linear(features, outputs, bias=False)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            out: Tensor = self.a(x)
            return out

    result = go(graph, model=Linear, rounds=1, method="fedavg", optimizer="sgd", **OWN)
    train = [r for r in result.ledger.records if r.op == "train" and r.direction == "up"]
    found = {str(r.what): r.flops.sum() for r in train}
    work, judged = found["weights"] + found["optimizer"], found["evaluation"]
    # Products: forward and the gradient of the weight; loss 7 a class of a training node; SGD with
    # weight decay 4 a parameter, at 4 clients.
    trained = round(0.4 * 60)
    assert judged == 2 * 60 * 100 * 3
    assert work == pytest.approx(2 * judged + 7 * 3 * trained + 4 * 4 * 300, abs=7 * 3 * 3)


# --- names ----------------------------------------------------------------------------------------

SOURCE = textwrap.dedent(
    """
    import torch

    class Net(torch.nn.Module):
        def __init__(self, features, outputs):
            super().__init__()
            self.lin = torch.nn.Linear(features, outputs)

        def forward(self, x, edge_index):
            return self.lin(x)
    """
)
QUICK = ["--clients", "3", "--partition", "random", "--rounds", "3", "--quiet"]


def test_a_file_on_the_command_line(
    work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (work / "mine.py").write_text(SOURCE)
    assert run_app(["run", "g.npz", *QUICK, "--model", "mine.py:Net", "--out", "o", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rounds"] == 3
    config = (work / "o" / "config.toml").read_text()
    assert f'model = "{work / "mine.py"}:Net"' in config
    about = json.loads((work / "o" / "run.json").read_text())["model"]
    sizes = {"features": 7, "outputs": 3, "task": "multiclass"}
    page = (work / "o" / "report.html").read_text()
    assert "mine.py:Net." in page  # and no layers, which are its own affair
    assert about == {"module": f"{work / 'mine.py'}:Net", **sizes}
    monkeypatch.chdir(work.parent)
    assert run_app(["resume", str(work / "o"), "--json", "--quiet", "--trust"]) == 0
    again = sg.resume(work / "o", trust=True)
    assert again.model is not None
    assert again.model.shape.features == 7


def test_a_file_that_has_changed_is_not_gone_on_with(
    make_graph: MakeGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    graph = make_graph(60)
    options = FAST | OWN | {"model": f"{path}:Net"}
    run_until(monkeypatch, graph, 3, tmp_path / "cut", **options)
    path.write_text(SOURCE.replace("self.lin(x)", "2 * self.lin(x)"))
    with raises_code(CheckpointError, "foreign-checkpoint", what="model"):
        sg.resume(tmp_path / "cut", graph=graph, trust=True)


def test_a_class_typed_into_an_interpreter_has_no_source(
    make_graph: MakeGraph, tmp_path: Path
) -> None:
    names: dict[str, Any] = {"__name__": "nowhere"}
    exec(SOURCE, names)
    graph, options = make_graph(60), FAST | OWN | {"model": names["Net"], "rounds": 1}
    sg.run(graph, **options, out=str(tmp_path / "o"))
    same = json.loads((tmp_path / "o" / "run.json").read_text())["same"]
    assert "source of the model" not in same
    assert sg.resume(tmp_path / "o", graph=graph, model=names["Net"]).model is not None


def test_a_class_that_cannot_be_imported_is_asked_for(
    make_graph: MakeGraph, tmp_path: Path
) -> None:
    class Local(Net):
        pass

    graph, out = make_graph(60), tmp_path / "o"
    sg.run(graph, **FAST | OWN | {"model": Local, "rounds": 1}, out=str(out))
    with pytest.raises(ConfigError) as caught:
        sg.resume(out, graph=graph)
    assert str(caught.value).endswith("; or give the class: sg.resume(DIR, model=...)")
    assert sg.resume(out, graph=graph, model=Local).model is not None


def test_functions_may_make_modules(make_graph: MakeGraph) -> None:
    def make(features: int, outputs: int) -> nn.Module:
        return Net(features, outputs)

    assert same_bits(
        of(go(make_graph(), model=make, **OWN)), of(go(make_graph(), model=Net, **OWN))
    )
