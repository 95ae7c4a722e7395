"""Counting the operations of code that does not report them: a user's own module.

Matrix products as torch counts them (2 for a multiplication with an addition), 1 for each value
that an elementwise operation gives, 1 for each value that a sum, mean, maximum or softmax reads.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

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
        self.flops += _flops(func, args, kwargs or {}, out)
        return out


def _flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    formula: Callable[..., int] | None = flop_registry.get(func.overloadpacket)
    if formula is not None:
        return formula(*args, **kwargs, out_val=out)
    if torch.Tag.pointwise in func.tags:
        return out.numel() if isinstance(out, Tensor) and out.is_floating_point() else 0
    if func.overloadpacket.__name__.rstrip("_") in READS:
        return max((t.numel() for t in args if isinstance(t, Tensor)), default=0)
    return 0


def _left_alone_by_the_compiler(function: Any) -> None:
    """Keep torch's compiler, which a user's module may call, from compiling the counting."""
    # Private names, which other versions of torch may not have: then the counting is compiled, too.
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    wanted = ("_FrameExecStrategy", "_FrameAction", "set_code_exec_strategy")
    if all(hasattr(frames, name) for name in wanted):
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        frames.set_code_exec_strategy(function.__code__, skip)


_left_alone_by_the_compiler(OperationCounter.__torch_dispatch__)
