"""Laws of terms of the local loss, and of MOON of the tutorial and FedProto, which have one."""

import re
import runpy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import GCNConv

import silograph as sg
from runs import MakeGraph, same_bits, weights_of
from silograph.core.config import RunConfig
from silograph.core.errors import ConfigError
from silograph.core.payload import Patched, Stacked, dense
from silograph.graph.graph import subgraph
from silograph.methods import (
    FEDAVG,
    Clients,
    Empty,
    GlobalModel,
    Kind,
    LocalModel,
    Method,
    Needs,
    StepNodes,
    averaging,
    op,
)

TESTS = Path(__file__).parents[1]
PROTO = TESTS / "fedproto.py"
TUTORIAL = (TESTS.parent / "docs" / "tutorials" / "own_parts.md").read_text(encoding="utf-8")
MOON = re.findall(r"^%%writefile moon\.py\n(.*?)^```", TUTORIAL, re.MULTILINE | re.DOTALL)[0]
RUN: dict[str, Any] = {
    "clients": 3,
    "partition": "random",
    "rounds": 3,
    "local_epochs": 3,
    "hidden": 8,
    "kernels": "torch",
    "dtype": "float64",
}


@pytest.fixture(scope="module")
def moon(tmp_path_factory: pytest.TempPathFactory) -> Method[Any]:
    path = tmp_path_factory.mktemp("tutorial") / "moon.py"
    path.write_text(MOON, encoding="utf-8")
    method = runpy.run_path(str(path))["METHOD"]
    assert isinstance(method, Method)
    return method


def close(one: sg.Result, other: sg.Result, atol: float) -> bool:
    ours, theirs = weights_of(one), weights_of(other)
    assert ours is not None
    assert theirs is not None
    return all(torch.allclose(ours[name], w, atol=atol) for name, w in theirs.items())


@pytest.mark.parametrize(("code", "lines"), [(MOON, 60), (PROTO.read_text("utf-8"), 125)])
def test_the_example_is_short(code: str, lines: int) -> None:
    """FedProto has messages of its own, which are declared, so that it runs at silos, too."""
    assert len(code.splitlines()) < lines


@pytest.fixture(scope="module")
def proto() -> Any:
    return runpy.run_path(str(PROTO))


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("more", [{}, {"batch_size": 5}, {"collect": 0.5}, {"participation": 0.7}])
def test_without_weight_fedproto_is_local(
    make_graph: MakeGraph, proto: Any, more: dict[str, Any]
) -> None:
    graph = make_graph(40)
    ours = sg.run(graph, method=proto["METHOD"], options={"pull": 0.0}, **RUN | more)
    theirs = sg.run(graph, method="local", **RUN | more)
    assert [r["train_loss"] for r in ours.rounds] == [r["train_loss"] for r in theirs.rounds]
    for name, model in theirs.models.items():
        assert same_bits(ours.models[name].weights, model.weights)
    assert ours.bytes > theirs.bytes


@pytest.mark.parametrize("more", [{}, {"strict": True}, {"block_size": 1}])
def test_prototypes_are_means_over_all_training_nodes(
    make_graph: MakeGraph, proto: Any, more: dict[str, Any]
) -> None:
    """With models that never move, prototypes are means of the first model's embeddings."""
    states: list[Any] = []

    def look(*given: Any) -> Any:
        found = proto["METHOD"].round(*given)
        states.append(found[0].memory["mean"])
        return found

    graph = make_graph(40)
    still = RUN | {"lr": 1e-300, "optimizer": "sgd", "weight_decay": 0.0, "rounds": 2}
    result = sg.run(graph, method=replace(proto["METHOD"], round=look), **still | more)
    cut = result.cut
    assert cut is not None
    model = next(iter(result.models.values()))
    shape: Any = model.shape
    hidden = replace(model, shape=replace(shape, layers=1, outputs=8))
    found = torch.zeros(graph.num_classes, 9, dtype=torch.float64)
    train = cut.split.train & graph.labeled
    for nodes in cut.partition.nodes:
        z = torch.relu(hidden.logits(subgraph(graph, nodes)))
        z = torch.cat([z, torch.ones_like(z[:, :1])], dim=1)[train[nodes]]
        found.index_add_(0, graph.y[nodes][train[nodes]], z)
    assert bool((found[:, -1] > 0).all())
    assert torch.allclose(states[0], found / found[:, -1:], atol=1e-12)
    assert torch.equal(states[0], states[1])


def test_fedproto_learns_and_differs(make_graph: MakeGraph, proto: Any) -> None:
    graph = make_graph(40)
    runs = [
        sg.run(graph, method=proto["METHOD"], options={"pull": w}, **RUN | {"rounds": 6})
        for w in (0.0, 3.0)
    ]
    losses = [[float(row["train_loss"] or 0) for row in r.rounds] for r in runs]
    assert losses[0][0] == losses[1][0]  # nobody has a prototype yet
    assert losses[0][1] < losses[1][1]
    assert losses[1][-1] < losses[1][1]


@pytest.mark.law(sample=6)
@pytest.mark.parametrize(
    "more", [{}, {"batch_size": 5}, {"fanout": "2,2"}, {"collect": 0.5}, {"model": "appnp"}]
)
@pytest.mark.parametrize("sparse", [False, True])
def test_without_weight_it_is_fedavg(
    make_graph: MakeGraph, moon: Method[Any], more: dict[str, Any], sparse: bool
) -> None:
    graph = make_graph(40, sparse=sparse)
    ours = sg.run(graph, method=moon, options={"mu": 0.0}, **RUN | more)
    theirs = sg.run(graph, method="fedavg", **RUN | more)
    assert same_bits(weights_of(ours), weights_of(theirs))
    named = 2 * 3 * 3 * len("_moon")  # in both directions, of clients, in rounds
    sent = [run.ledger.bytes_by_kind["weights"] for run in (ours, theirs)]  # scored apart or not
    assert sent[0] == sent[1] + named
    assert ours.flops > theirs.flops
    assert [r["train_loss"] for r in ours.rounds] == [r["train_loss"] for r in theirs.rounds]


def test_it_learns_and_differs(make_graph: MakeGraph, moon: Method[Any]) -> None:
    graph = make_graph(40)
    ours, theirs = (sg.run(graph, method=m, **RUN | {"rounds": 6}) for m in (moon, "fedavg"))
    losses = [float(row["train_loss"] or 0) for row in ours.rounds]
    assert losses[-1] < losses[0]
    assert not same_bits(weights_of(ours), weights_of(theirs))


def test_in_the_first_round_it_only_adds_a_constant(
    make_graph: MakeGraph, moon: Method[Any]
) -> None:
    """The client's last model is the server's: -log(1/2) a node, whose gradient is 0."""
    one = RUN | {"rounds": 1, "local_epochs": 1}
    ours, theirs = (sg.run(make_graph(40), method=m, **one) for m in (moon, "fedavg"))
    more = float(ours.rounds[0]["train_loss"] or 0) - float(theirs.rounds[0]["train_loss"] or 0)
    assert more == pytest.approx(torch.log(torch.tensor(2.0)).item(), abs=1e-6)
    assert close(ours, theirs, 1e-6)


@pytest.mark.law(sample=3)
@pytest.mark.parametrize("more", [{}, {"strict": True}, {"block_size": 1}])
def test_all_ways_to_compute_agree(
    make_graph: MakeGraph, moon: Method[Any], more: dict[str, Any]
) -> None:
    graph = make_graph(40)
    some = RUN | {"participation": 0.7}
    one, other = (sg.run(graph, method=moon, **some | m) for m in ({}, more))
    assert close(one, other, 1e-12)


def test_it_resumes(make_graph: MakeGraph, moon: Method[Any], tmp_path: Path) -> None:
    graph, out = make_graph(40), tmp_path / "run"
    whole = sg.run(graph, method=moon, **RUN)
    sg.run(graph, method=moon, out=str(out), **RUN)
    for path in sorted((out / "checkpoints").iterdir())[-1:]:
        path.unlink()  # the last one: round 3 is computed again
    (out / "result.json").unlink()
    assert same_bits(weights_of(sg.resume(out, graph=graph, method=moon)), weights_of(whole))


@dataclass(frozen=True)
class Pull:
    """FedProto's term: embeddings near prototypes of their classes, here all at 1."""

    weight: float = 1.0
    rows: int | None = None  # sent wrong

    def of(self, clients: Tensor) -> "Pull":
        return self

    def flops(self, width: int) -> float:
        return 3.0 * width

    def __call__(self, nodes: StepNodes) -> Tensor:
        prototypes = torch.ones(3, nodes.embeddings.shape[1], dtype=nodes.embeddings.dtype)
        assert len(nodes.embeddings) == len(nodes.logits) == len(nodes.y) == len(nodes.row)
        assert int(nodes.off[-1]) == len(nodes.y)
        away = (nodes.embeddings - prototypes[nodes.y]).square().mean(dim=1)
        return self.weight * away[: self.rows]


def with_term(term: Pull) -> Method[Any]:
    return replace(FEDAVG, name="pull", needs=Needs(losses=lambda _: (term,)))


def test_a_term_needs_no_op(make_graph: MakeGraph) -> None:
    """A method whose term is the same in every round is FedAvg with `Needs.losses`."""
    graph = make_graph(40)
    found = [
        float(sg.run(graph, method=with_term(Pull(w)), **RUN).rounds[0]["train_loss"] or 0)
        for w in (0.0, 1.0)
    ]
    plain = sg.run(graph, method="fedavg", **RUN).rounds[0]["train_loss"]
    assert found[0] == plain
    assert found[1] > found[0]


@pytest.mark.parametrize(
    ("term", "more", "expected"),
    [
        (
            Pull(),
            {"kernels": "compiled"},
            "loss term Pull is not compiled; use kernels=torch",
        ),
        (Pull(), {"layers": 1}, "a model of one layer has no embeddings"),
        (
            Pull(),
            {"model": GCNConv, "hidden": RunConfig().hidden},
            "got: a torch.nn.Module of your own does not show the embeddings",
        ),
        (Pull(rows=1), {}, r"expected a loss \(\d+,\) of Pull, one for each node, got \(1,\)"),
    ],
)
def test_what_cannot_be_trained(
    make_graph: MakeGraph, term: Pull, more: dict[str, Any], expected: str
) -> None:
    with pytest.raises(Exception, match=expected) as raised:
        sg.run(make_graph(40), method=with_term(term), **RUN | more)
    if term.rows is None:
        assert isinstance(raised.value, ConfigError)


def test_auto_takes_torch(make_graph: MakeGraph) -> None:
    result = sg.run(make_graph(40), method=with_term(Pull()), **RUN | {"kernels": "auto"})
    assert result.config.kernels == "torch"


@pytest.mark.parametrize("kernels", ["compiled", "torch"])
def test_trained_weights_are_tensors(make_graph: MakeGraph, kernels: str) -> None:
    """With sparse features some are held as rows over a base, and still subtract."""
    seen: list[dict[str, Tensor]] = []
    forms = set[type]()

    @op(Kind.WEIGHTS)
    def look(clients: Clients[Any], state: Empty, request: GlobalModel) -> tuple[Empty, LocalModel]:
        start, fitted = request.weights, clients.fit(request.weights)
        forms.update(type(f) for f in fitted.weights.values())
        seen.append({name: w - start[name] for name, w in fitted.tensors.items()})
        reply = LocalModel.of(fitted, clients.block)
        assert all(torch.equal(dense(w), fitted.tensors[n]) for n, w in reply.weights.items())
        return state, reply

    graph = make_graph(40, sparse=True)
    sg.run(graph, method=replace(averaging(look), name="look"), **RUN | {"kernels": kernels})
    assert forms == {Patched, Stacked}
    for name, difference in seen[0].items():
        assert difference.dim() == (3 if name.endswith("weight") else difference.dim())
        assert len(difference) == 3
        assert difference.abs().sum() > 0


def test_dense() -> None:
    base = torch.arange(6.0).reshape(1, 3, 2)
    field = Patched(
        base, torch.zeros(2, dtype=torch.int64), torch.full((1, 2), 9.0),
        torch.tensor([2]), torch.tensor([0, 0, 1]),
    )  # fmt: skip
    assert dense(field).tolist() == [[[0, 1], [2, 3], [4, 5]], [[0, 1], [2, 3], [9, 9]]]
    assert dense(Stacked(base)) is base
