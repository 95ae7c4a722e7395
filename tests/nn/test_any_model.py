"""A kind of model is one class: a closed-form kind goes through training, judging and files."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from silograph.core.errors import ConfigError, ProtocolError
from silograph.core.key import Key
from silograph.core.payload import NO_STATE, Stacked, State
from silograph.evaluation.evaluate import counts_of, rows_here
from silograph.exchange.passes import divisible
from silograph.experiment.resolve.resolve import choose_block_size
from silograph.federation.in_process import InProcess
from silograph.graph.block.block import ClientBlock, Route
from silograph.graph.graph import Graph, LabelForm
from silograph.methods.base import MethodConfig, NoOptions
from silograph.methods.fedavg import FEDAVG
from silograph.nn.backends import BACKENDS, COMPILED, TORCH
from silograph.nn.fit import Fitted, Schedule, Training, TrainingInputs, start_fields, whole
from silograph.nn.forward import NO_TABLES
from silograph.nn.model import Model
from silograph.nn.optim import SGD
from silograph.nn.own_module import OperationCounter
from silograph.nn.own_module import _exclude_from_compiler as leave_alone
from silograph.sampling.neighbors import Bernoulli

MakeGraph = Callable[..., Graph]
CutBlock = Callable[..., tuple[ClientBlock, Route]]
LR, KEY = 0.3, Key.of(5)


@dataclass(frozen=True)
class Logistic:
    """Logistic regression on a node's own features, with the gradient X^T (softmax - y) / n."""

    features: int
    outputs: int
    task: LabelForm = "multiclass"

    noun = "a logistic regression"
    staged = None
    single_client_only = False
    meets_all = False
    solved_flops = 0
    source = None
    first_maps = ()
    table_widths = NO_TABLES

    @property
    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {"0.weight": (self.features, self.outputs), "0.bias": (self.outputs,)}

    def init_weights(self, key: Key, dtype: torch.dtype) -> dict[str, Tensor]:
        del key
        return {name: torch.zeros(s, dtype=dtype) for name, s in self.weight_shapes.items()}

    def forward(
        self, weights: Mapping[str, Tensor], block: ClientBlock, *, tables: State = NO_STATE
    ) -> Tensor:
        del tables
        assert isinstance(block.x, Tensor)
        w, b = weights["0.weight"], weights["0.bias"]
        if w.dim() == 2:
            return block.x @ w + b
        return (block.x[:, None] @ w[block.client])[:, 0] + b[block.client]

    def fit(self, training: Training, inputs: TrainingInputs) -> Fitted:
        block, start = inputs.block, inputs.start
        assert isinstance(block.x, Tensor)
        clients = block.num_clients
        w = {name: whole(field) for name, field in start_fields(self, start, clients).items()}
        loss = torch.zeros(clients, dtype=torch.float64)
        for _ in range(training.schedule.epochs):
            log_p = self.forward(w, block).log_softmax(1)
            for c in range(clients):
                rows = (block.client == c) & block.split.train
                error = log_p[rows].exp() - torch.eye(self.outputs)[block.y[rows]]
                loss[c] = -log_p[rows, block.y[rows]].mean()
                w["0.weight"][c] -= LR * block.x[rows].T @ error / len(error)
                w["0.bias"][c] -= LR * error.mean(0)
        steps = torch.full((clients,), training.schedule.epochs)
        fields: Any = {name: Stacked(t) for name, t in w.items()}
        return Fitted(fields, {}, loss, self.forward(w, block), steps)

    def first_tables(self, block: ClientBlock, key: Key) -> State:
        del block, key
        return NO_STATE

    def described(self) -> dict[str, Any]:
        return asdict(self)


def test_a_kind_trains_and_is_judged_as_any_other(
    make_graph: MakeGraph, cut_block: CutBlock
) -> None:
    """It is an MLP of one layer, which silograph has: the same weights, losses and scores."""
    graph = make_graph(60, features=9, sparse=False)
    block, route = cut_block(graph, 4)
    own = Logistic(9, graph.num_classes)
    theirs = Model("mlp", 9, 4, graph.num_classes, 1, 0.0, "multiclass")
    start, found = own.init_weights(KEY, torch.float64), []
    for model in (own, theirs):
        cfg = MethodConfig(model, SGD(LR), Schedule(3), False, 1.0, NoOptions())
        fed = InProcess(cfg, block, route, 2, single_client_only=model.single_client_only)
        state, losses = FEDAVG.init(fed, cfg, start, KEY), []
        for t in (1, 2):
            state, report = FEDAVG.round(fed, cfg, state, t, KEY)
            losses.append(report.train_loss)
        assert state.weights is not None
        counts = counts_of(rows_here(TORCH, model, state.weights, block, block.client, 4))
        found.append((state.weights, losses, counts))
    (w, losses, counts), (same_w, same_losses, same_counts) = found
    for name in w:
        torch.testing.assert_close(w[name], same_w[name], rtol=0, atol=1e-12)
    assert losses == pytest.approx(same_losses, abs=1e-12)
    for name in counts:
        torch.testing.assert_close(counts[name], same_counts[name], rtol=0, atol=1e-10)


def test_a_kind_that_nobody_can_look_into_says_so(
    make_graph: MakeGraph, cut_block: CutBlock
) -> None:
    graph = make_graph(30, features=9, sparse=False)
    block, _ = cut_block(graph, 3)
    model = Logistic(9, graph.num_classes)
    training = Training(model, SGD(LR), Schedule(1))
    reason = "a logistic regression is not compiled"
    assert COMPILED.why_not(training, torch.device("cpu")) == reason
    assert TORCH.why_not(training, torch.device("cpu")) is None
    start = model.init_weights(KEY, torch.float64)
    for call in (
        lambda: COMPILED.fit(training, TrainingInputs(block, start, None, KEY)),
        lambda: COMPILED.predict(model, start, block),
    ):
        with pytest.raises(ProtocolError, match=f"got: {reason}; run with kernels=torch$"):
            call()
    with pytest.raises(ConfigError, match="for sums over all silos, got a logistic regression, wh"):
        divisible(model)
    assert Bernoulli(0.5).why_not(model) == "a logistic regression sees all edges of a client"
    assert choose_block_size(training, block, TORCH, torch.device("cpu"), keep_optimizer=False) == 3


def test_backends_have_the_names_of_the_config() -> None:
    assert {name: backend.name for name, backend in BACKENDS.items()} == {
        "compiled": "compiled",
        "torch": "torch",
    }


def test_counting_is_not_compiled_with_a_module_that_compiles_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch's compiler is told so by private names, which other versions may not have."""
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def product(x: Tensor) -> Tensor:
        return torch.relu(x @ x).sum()

    x = torch.ones(3, 3)
    with OperationCounter() as plain:
        product(x)
    with OperationCounter() as tally:
        torch.compile(product, backend=backend)(x)
    assert tally.flops == plain.flops > 54
    assert len(graphs) <= 1  # there are three more where the counting is compiled
    for gone in ("eval_frame._FrameAction", "eval_frame"):
        monkeypatch.delattr(f"torch._C._dynamo.{gone}")
        leave_alone(product)
