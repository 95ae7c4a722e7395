"""What of a user's own torch.nn.Module is refused: one line each, before anything is written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runs import MakeGraph, go
from silograph.cli import run_app
from silograph.core.config import make_config
from silograph.core.errors import ConfigError, ProtocolError
from silograph.core.key import Key
from silograph.experiment.resolve.exclusions import own_module
from silograph.graph.block.block import ClientBlock, Route
from silograph.nn.backends import BACKENDS
from silograph.nn.own_module import ModuleModel

MakeBlock = Callable[..., tuple[ClientBlock, Route]]
OWN: dict[str, Any] = {"hidden": 128}  # its default: a module decides by itself
SOURCE = """
import torch

class Net(torch.nn.Module):
    pass
"""


class Raises(nn.Module):
    def __init__(self, *sizes: int) -> None:
        raise ValueError("no\nluck")


class NoSuper(nn.Module):
    def __init__(self, features: int, outputs: int) -> None:
        self.lin = nn.Linear(features, outputs)


class NoModule:
    def __init__(self, features: int, outputs: int) -> None:
        pass


class OneArgument(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()


class Empty(nn.Module):
    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return x


class Base(nn.Module):
    """What mistakes are made of."""

    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()
        self.lin = nn.Linear(features, outputs)


class Linear(Base):
    """What works."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.lin(x)
        return out


class WrongShape(Base):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.lin(x)[:, :2]
        return out


class NoTensor(Base):
    def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor]:
        return (self.lin(x),)


class OtherDtype(Base):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.lin(x).half()
        return out


class Fails(Base):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        raise RuntimeError("mat1 and mat2\ncannot be multiplied")


class Constants(Base):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.lin(x).detach()
        return out


class Normed(Base):
    def __init__(self, features: int, outputs: int) -> None:
        super().__init__(features, outputs)
        self.norm = nn.BatchNorm1d(outputs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.norm(self.lin(x))
        return out


class Lazy(nn.Module):
    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()
        self.lin = nn.LazyLinear(outputs)


HERE = __name__
CALL = f"expected {HERE}:{{name}}(7, 3) to build a torch.nn.Module, got "
OUT = f"expected {HERE}:{{name}} to return (4, 3) torch.float64 from x and edge_index, got "
MISTAKES: dict[type, str] = {
    Raises: CALL + "ValueError: no luck",
    NoSuper: CALL + "AttributeError: cannot assign module before Module.__init__() call",
    NoModule: CALL + "NoModule",
    Empty: f"expected parameters to train in {HERE}:{{name}}, got none",
    WrongShape: OUT + "(4, 2) torch.float64",
    OtherDtype: OUT + "(4, 3) torch.float16",
    NoTensor: OUT + "tuple",
    Fails: OUT + "RuntimeError: mat1 and mat2 cannot be multiplied",
    Constants: f"expected outputs of {HERE}:{{name}} that depend on its parameters, got constants",
    Normed: f"expected {HERE}:{{name}} to keep its state in parameters, got BatchNorm1d with the "
    "buffer norm.running_mean, which is no weight and would stay behind: use LayerNorm or "
    "GraphNorm",
    Lazy: f"expected parameters of known shape in {HERE}:{{name}}, got lazy lin.weight: give its "
    "layer the number of inputs",
}


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("module", MISTAKES, ids=lambda m: m.__name__)
def test_mistakes_are_one_line_before_anything_is_written(
    make_graph: MakeGraph, tmp_path: Path, module: type
) -> None:
    with pytest.raises(ConfigError) as caught:
        go(make_graph(), model=module, out=str(tmp_path / "o"), **OWN)
    assert str(caught.value) == MISTAKES[module].format(name=module.__name__)
    assert not list(tmp_path.iterdir())


def test_a_constructor_of_another_form(make_graph: MakeGraph) -> None:
    with pytest.raises(ConfigError, match=r"got TypeError: .*takes 2 positional arguments but 3"):
        go(make_graph(), model=OneArgument, **OWN)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 3}, "layers=3"),
        ({"hidden": 8}, "hidden=8"),
        ({"dropout": 0.1}, "dropout=0.1"),
        ({"fanout": "3"}, "fanout=3"),
        ({"neighbors": "fanout"}, "neighbors=fanout"),
    ],
)
def test_options_of_layers_are_refused(
    make_graph: MakeGraph, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        go(make_graph(), model=Linear, **OWN | options)
    name = message.partition("=")[0]
    assert str(caught.value) == (
        f"expected {name} with silograph's own models only, got {message} with model "
        f"{HERE}:Linear, which decides by itself: leave it out"
    )


@pytest.mark.parametrize(
    ("options", "owners"),
    [
        (
            {"residual": True},
            "model gcn, model sage, model graphconv, model gin, model gat, model appnp and model "
            "mlp have it",
        ),
        ({"heads": 2}, "model gat and model rating_gat have it"),
    ],
)
def test_options_of_other_models_are_refused(
    make_graph: MakeGraph, options: dict[str, Any], owners: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        go(make_graph(), model=Linear, **OWN | options)
    assert str(caught.value) == (
        f"{next(iter(options))}: model module has no such option, but {owners}: leave it out, or "
        "choose one of them"
    )


def test_compiled_kernels_are_refused(make_graph: MakeGraph) -> None:
    with pytest.raises(ConfigError, match=r"got: a torch.nn.Module of your own is not compiled"):
        go(make_graph(), model=Linear, kernels="compiled", **OWN)


def test_a_module_that_is_made_already(make_graph: MakeGraph) -> None:
    with pytest.raises(ConfigError) as caught:
        go(make_graph(), model=Linear(7, 3), **OWN)
    assert str(caught.value) == (
        "expected a class or function that makes a module as model, got Linear itself: give the "
        "class, for every client has a module of its own"
    )


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nowhere.py:Net", "expected to import nowhere.py, got FileNotFoundError"),
        ("mine.py", "expected FILE.py:NAME or package.module:NAME, got 'mine.py'"),
        ("nowhere:Net", "expected to import nowhere, got ModuleNotFoundError"),
        ("mine.py:Nett", "unknown class or function in mine.py 'Nett': did you mean 'Net'?"),
        ("mine.py:number", "expected a class or function in mine.py:number, got int"),
    ],
)
def test_names_that_lead_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SOURCE + "number = 3\n")
    with pytest.raises(ConfigError) as caught:
        own_module(make_config({"model": spec}))
    assert str(caught.value).startswith(message)
    assert run_app(["run", "nothing-here.npz", "--model", spec]) == 2


def test_a_module_that_fails_on_some_clients_only(make_graph: MakeGraph) -> None:
    class Picky(Base):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            if len(x) > 4:  # passes the check
                raise IndexError("out of range")
            out: Tensor = self.lin(x)
            return out

    with pytest.raises(
        ConfigError,
        match=r"to return \(15, 3\) .*, got IndexError: out of range\nin train, round 1",
    ):
        go(make_graph(60), model=Picky, **OWN)


def test_ops_on_blocks_of_many_are_lifted_or_refused(
    make_graph: MakeGraph, cut_block: MakeBlock
) -> None:
    block, _ = cut_block(make_graph(60), 4)
    model = ModuleModel("Net", Linear, 7, 3, "multiclass")
    with pytest.raises(ProtocolError) as caught:
        BACKENDS["torch"].predict(model, model.init_weights(Key.of(0), torch.float64), block)
    assert str(caught.value) == (
        "expected a block of one client for a torch.nn.Module, got 4: lift the op by per_client"
    )
