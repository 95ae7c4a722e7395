"""A user's own torch.nn.Module as a model, one client at a time.

Its named parameters are the weights. A module is built anew for every use, so nothing that it
remembers (a cached adjacency, say) passes from one client to another, and its own draws
(torch.nn.Dropout) are seeded by a key: they depend on client and step, not on who came before.

n: rows. F: features. K: outputs.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from silograph.core.errors import ConfigError, ProtocolError
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import NO_STATE, Patched, Stacked, State
from silograph.core.text import state_of_fields
from silograph.core.work import report_each, work_for
from silograph.graph.block.block import ClientBlock, SparseRows
from silograph.graph.graph import LabelForm
from silograph.nn.conv import Params
from silograph.nn.fit import (
    LOSS_FLOPS,
    Fitted,
    Training,
    TrainingInputs,
    label_losses,
    own_copy,
    start_fields,
    whole,
    whole_memory,
)
from silograph.nn.forward import NO_TABLES
from silograph.nn.mini_batches import batches

# --- Counting the operations of code that does not report them: a user's own module --------------
#
# Matrix products as torch counts them (2 for a multiplication with an addition), 1 for each value
# that an elementwise operation gives, 1 for each value that a sum, mean, maximum or softmax reads.


READS = frozenset(
    {"sum", "mean", "amax", "max", "logsumexp", "cumsum", "index_add", "scatter_add"}
    | {"scatter_reduce", "segment_reduce", "_softmax", "_log_softmax"}
    | {"_softmax_backward_data", "_log_softmax_backward_data", "native_layer_norm"}
)


class OperationCounter(TorchDispatchMode):
    """Adds up what passes while it is entered, on the way back too.

    Attributes:
        flops: operations so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else torch imports its compiler at the first operation and asks it before each one.
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation and count it."""
        out = func(*args, **(kwargs or {}))
        self.flops += _count_operations(func, args, kwargs or {}, out)
        return out


def _count_operations(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    formula: Callable[..., int] | None = flop_registry.get(func.overloadpacket)
    if formula is not None:
        return formula(*args, **kwargs, out_val=out)
    if torch.Tag.pointwise in func.tags:
        return out.numel() if isinstance(out, Tensor) and out.is_floating_point() else 0
    if func.overloadpacket.__name__.rstrip("_") in READS:
        return max((t.numel() for t in args if isinstance(t, Tensor)), default=0)
    return 0


def _exclude_from_compiler(function: Any) -> None:
    """Keep torch's compiler, which a user's module may call, from compiling the counting."""
    # Private names, which other versions of torch may not have: then the counting is compiled, too.
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    needed_names = ("_FrameExecStrategy", "_FrameAction", "set_code_exec_strategy")
    if all(hasattr(frames, name) for name in needed_names):
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        frames.set_code_exec_strategy(function.__code__, skip)


_exclude_from_compiler(OperationCounter.__torch_dispatch__)


Make = Callable[[int, int], nn.Module]
BUILD = Key.of(0)  # everything that is no weight is drawn alike in every run


@dataclass(frozen=True)
class ModuleModel:
    """A model whose layers are a module's.

    Attributes:
        name: how the user named it, FILE.py:NAME or package.module:NAME.
        make: called with F and K; returns a module whose forward(x, edge_index) gives (n, K) from
            x (n, F) and edge_index (2, E) int64, both directions of every edge, no self loops.
        features: F.
        outputs: K.
        task: what the outputs mean.
        directed: along: edge_index has every edge from its source to its target only.
    """

    name: str
    make: Make
    features: int
    outputs: int
    task: LabelForm
    directed: Literal["none", "along"] = "none"

    noun = "a torch.nn.Module of your own"
    staged = None
    single_client_only = True
    meets_all = False
    solved_flops = 0
    first_maps = ()  # a module does not tell
    table_widths = NO_TABLES

    __getstate__ = state_of_fields

    @cached_property
    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every weight, shared form."""
        weights = weights_of(build(self, BUILD))
        return MappingProxyType({name: tuple(w.shape) for name, w in weights.items()})

    @property
    def source(self) -> str | None:
        """Text of the class; None if it was typed into an interpreter."""
        try:
            return inspect.getsource(self.make)
        except (OSError, TypeError):
            return None

    def init_weights(self, key: Key, dtype: torch.dtype) -> Params:
        """Return initial weights as the constructor draws them, in torch's default dtype."""
        weights = weights_of(build(self, key))
        return {name: w.to(dtype).contiguous() for name, w in weights.items()}

    def forward(
        self, weights: Mapping[str, Tensor], block: ClientBlock, *, tables: State = NO_STATE
    ) -> Tensor:
        """Return logits (n, K) of one client, nothing dropped; weights shared or (1, ...)."""
        del tables
        client, shapes = client_of(block), self.weight_shapes
        client_weights = {
            name: w if w.shape == shapes[name] else w[0] for name, w in weights.items()
        }
        with OperationCounter() as tally:
            out = call(
                self, module_for(self, client.x, training=False), client_weights, client, BUILD
            )
        report_each(float(tally.flops))
        return out

    def fit(self, training: Training, inputs: TrainingInputs) -> Fitted:
        """Train one client; every step passes all of its nodes and edges.

        Raises:
            ConfigError: the module raises, or returns something else than logits.
        """
        return _train_client(self, training, inputs)

    def first_tables(self, block: ClientBlock, key: Key) -> State:
        """There are no tables."""
        del block, key
        return NO_STATE

    def described(self) -> dict[str, Any]:
        """Return its name and its sizes."""
        sizes = {"features": self.features, "outputs": self.outputs, "task": self.task}
        way = {} if self.directed == "none" else {"directed": self.directed}
        return {"module": self.name, **sizes, **way}


@contextmanager
def seeded(key: Key, device: torch.device) -> Iterator[None]:
    """Seed torch's generator by a key inside the block; restore its state after it."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        # Without a device, torch would note down the stack of every call, for when there is one.
        has_accelerator = torch.accelerator.is_available()
        (torch.manual_seed if has_accelerator else torch.default_generator.manual_seed)(key.value)
        yield


def build(model: ModuleModel, key: Key) -> nn.Module:
    """Return the module as its constructor makes it.

    Raises:
        ConfigError: it raises, or makes something else.
    """
    call = f"{model.name}({model.features}, {model.outputs})"
    try:
        with seeded(key, torch.device("cpu")):
            module = model.make(model.features, model.outputs)
    except Exception as error:
        raise ConfigError(
            f"expected {call} to build a torch.nn.Module, got {describe_error(error)}"
        ) from error
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"expected {call} to build a torch.nn.Module, got {type(module).__name__}"
        )
    return module


def describe_error(error: Exception) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def weights_of(module: nn.Module) -> Params:
    """Return the parameters that are trained, by name, each once."""
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


@dataclass(frozen=True, eq=False)
class Client:
    """One client as its module sees it.

    Attributes:
        x: (n, F), dense.
        edges: (2, E) int64.
        name: of the client; draws depend on it.
    """

    x: Tensor
    edges: Tensor
    name: str


def client_of(block: ClientBlock) -> Client:
    """Return the only client of a block.

    Raises:
        ProtocolError: there are more.
    """
    if block.num_clients != 1:
        raise ProtocolError(
            f"expected a block of one client for a torch.nn.Module, got {block.num_clients}: lift "
            "the op by per_client"
        )
    x = block.x.csr.tensor.to_dense() if isinstance(block.x, SparseRows) else block.x
    edges = torch.stack([block.adj.row, block.adj.indices.long()])
    values = block.adj.values
    if values is not None and values.dim() == 2:
        edges = edges[:, ~values[:, 0].isnan()]  # from the row to the column
    return Client(x, edges, block.ids[0])


def module_for(model: ModuleModel, x: Tensor, *, training: bool) -> nn.Module:
    """Return a module built anew for data like x."""
    return build(model, BUILD).to(x.device, x.dtype).train(training)


def call(
    model: ModuleModel, module: nn.Module, weights: Mapping[str, Tensor], client: Client, key: Key
) -> Tensor:
    """Return logits (n, K) of a module with these weights (shared form).

    Raises:
        ConfigError: it raises, or returns something else.
    """
    expectation = (
        f"expected {model.name} to return ({len(client.x)}, {model.outputs}) {client.x.dtype}"
    )
    try:
        with seeded(key.fold("module", client.name), client.x.device):
            out = torch.func.functional_call(module, dict(weights), (client.x, client.edges))
    except Exception as error:
        raise ConfigError(
            f"{expectation} from x and edge_index, got {describe_error(error)}"
        ) from error
    if not isinstance(out, Tensor):
        raise ConfigError(f"{expectation} from x and edge_index, got {type(out).__name__}")
    if out.shape != (len(client.x), model.outputs) or out.dtype != client.x.dtype:
        raise ConfigError(
            f"{expectation} from x and edge_index, got {tuple(out.shape)} {out.dtype}"
        )
    return out


def check(model: ModuleModel, dtype: torch.dtype, device: torch.device) -> None:
    """Try the module on a path of four nodes.

    Raises:
        ConfigError: it cannot be trained by a federation; says why.
    """
    module = build(model, BUILD)
    lazy = [name for name, t in _parameters_and_buffers(module) if is_lazy(t)]
    if lazy:
        raise ConfigError(
            f"expected parameters of known shape in {model.name}, got lazy {lazy[0]}: give its "
            "layer the number of inputs"
        )
    if not weights_of(module):
        raise ConfigError(f"expected parameters to train in {model.name}, got none")
    x = Key.of(1).matrix(4, model.features).to(device, dtype)
    steps = torch.tensor([[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]], device=device)
    module = module.to(device, dtype).train()
    buffers_before = {name: b.clone() for name, b in module.named_buffers()}
    leaves = {name: w.clone().requires_grad_() for name, w in weights_of(module).items()}
    out = call(model, module, leaves, Client(x, steps, "check"), BUILD)
    if not out.requires_grad:
        raise ConfigError(
            f"expected outputs of {model.name} that depend on its parameters, got constants"
        )
    changed = [
        name for name, b in module.named_buffers() if not torch.equal(b, buffers_before[name])
    ]
    if changed:
        owner = type(module.get_submodule(changed[0].rpartition(".")[0])).__name__
        raise ConfigError(
            f"expected {model.name} to keep its state in parameters, got {owner} with the buffer "
            f"{changed[0]}, which is no weight and would stay behind: use LayerNorm or GraphNorm"
        )


def _parameters_and_buffers(module: nn.Module) -> Sequence[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _train_client(model: ModuleModel, training: Training, inputs: TrainingInputs) -> Fitted:
    optimizer, schedule = training.optimizer, training.schedule
    block, memory = inputs.block, inputs.memory
    client = client_of(block)
    weights = {name: whole(field) for name, field in start_fields(model, inputs.start, 1).items()}
    start = {name: w.clone() for name, w in weights.items()} if training.corrections else {}
    state = (
        optimizer.init(weights)
        if memory is None
        else {k: own_copy(m) for k, m in whole_memory(memory).items()}
    )
    module = module_for(model, client.x, training=True)
    total, steps = torch.zeros(1, dtype=torch.float64, device=client.x.device), 0
    for epoch in range(schedule.epochs if int(block.num_train) else 0):
        total = torch.zeros_like(total)
        epoch_key = inputs.key.fold("epoch", epoch)
        for number, seeds in enumerate(batches(block, schedule.batch_size, epoch_key)):
            leaves = {name: w.detach()[0].requires_grad_() for name, w in weights.items()}
            step_key = epoch_key.fold("batch", number)
            loss, gradients = _loss_and_gradients(
                model, module, leaves, client, block.y, seeds, step_key, block.class_weight
            )
            grads = {name: g[None] for name, g in gradients.items()}
            optimizer.step_(weights, training.correct(grads, weights, start), state)
            report_each(training.step_flops, Kind.OPTIMIZER)
            steps += 1
            total = total + loss.double() * len(seeds) / block.num_train
    with torch.no_grad(), work_for(Kind.EVALUATION):
        logits = model.forward(weights, block)
    final_memory = {} if memory is None else state
    fields: dict[str, Stacked | Patched] = {name: Stacked(w) for name, w in weights.items()}
    return Fitted(fields, final_memory, total.to(logits.dtype), logits, torch.tensor([steps]))


def _loss_and_gradients(
    model: ModuleModel,
    module: nn.Module,
    leaves: Params,
    client: Client,
    y: Tensor,
    seeds: Tensor,
    key: Key,
    class_weight: Tensor | None,
) -> tuple[Tensor, Params]:
    """Return the mean loss of rows `seeds` (s,), and its gradients; see `label_losses`."""
    with OperationCounter() as tally:
        logits = call(model, module, leaves, client, key)
    logits_leaf = logits.detach().requires_grad_()
    off = torch.tensor([0, len(seeds)], device=seeds.device)
    loss = label_losses(model, logits_leaf[seeds], y[seeds], off, class_weight).mean()
    cotangent = torch.autograd.grad(loss, logits_leaf)
    with tally:
        grads = torch.autograd.grad(
            logits, list(leaves.values()), cotangent, allow_unused=True, materialize_grads=True
        )
    report_each(float(tally.flops + LOSS_FLOPS * model.outputs * len(seeds)))
    return loss.detach(), dict(zip(leaves, grads, strict=True))
