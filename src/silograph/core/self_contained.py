"""Machine code that holds all that it calls, and so gives the same bits in every process.

numba copies the functions that a kernel calls into the kernel's own code, and optimizes them
there once more. But the linker takes the first function of a name that the process has loaded,
and leaves later ones out. A process that compiles has loaded the callees before the kernel, and
would go on with them; one that finds the kernel on disk has loaded nothing else, and goes on
with the copies. Sums that may be reordered have other last bits in one than in the other. So
the names of copies are made local to the kernel: its calls can reach nothing else, whatever was
loaded and in which order.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from numba import njit
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.compiler_machinery import PassManager
from numba.core.untyped_passes import RewriteSemanticConstants

from silograph.core.pointers import AbsentMembers

Function = TypeVar("Function", bound=Callable[..., Any])


_WRAPPER = "_ZN7cpython"  # how names begin of what Python calls


class _Library(JITCodeLibrary):
    """Code of one kernel."""

    def _optimize_final_module(self) -> None:
        """Optimize it as numba does, then make the names of copies local.

        The function that turns objects of Python into arguments runs once a call: it is as long as
        all arrays of the arguments together, and not worth the time.
        """
        for function in self._final_module.functions:
            if not function.is_declaration and function.name.startswith(_WRAPPER):
                function.add_function_attribute("noinline")
                function.add_function_attribute("optnone")
        super()._optimize_final_module()  # type: ignore[no-untyped-call]
        for function in self._final_module.functions:
            if not function.is_declaration and function.linkage.name == "linkonce_odr":
                function.linkage = "internal"


class _CopiedLibrary(JITCodeLibrary):
    """Code that kernels copy: it is optimized there, and never becomes machine code of its own.

    Optimizing and translating every function by itself took half of the time of compilation.
    """

    def _optimize_final_module(self) -> None:
        """Leave the code to the kernels."""

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()  # type: ignore[no-untyped-call]
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """Return 0: there is no machine code."""
        del name
        return 0

    @property
    def codegen(self) -> Any:
        """The code generator; it has no place for the constants of a function without code."""
        return _WithoutEnvironments(self._codegen)


class _WithoutEnvironments:
    """A code generator that stores no environments, which only errors and objects of Python use."""

    def __init__(self, codegen: Any) -> None:
        self._codegen = codegen

    def set_env(self, name: str, environment: object) -> None:
        """Store nothing."""

    def __getattr__(self, name: str) -> Any:
        """Return what the code generator has."""
        return getattr(self._codegen, name)


class CopiedCode(Compiler):
    """Compiles a function that kernels copy."""

    def define_pipelines(self) -> list[PassManager]:
        """Return numba's own passes; they fill the library that they find in the state."""
        return _passes_with(_CopiedLibrary, self, super().define_pipelines)


class SelfContained(Compiler):
    """Compiles a kernel that no other compiled function calls."""

    def define_pipelines(self) -> list[PassManager]:
        """Return numba's own passes; they fill the library that they find in the state."""
        passes = _passes_with(_Library, self, super().define_pipelines)
        self.state.library.enable_object_caching()
        return passes


def _passes_with(
    library: type[JITCodeLibrary], compiler: Compiler, passes: Callable[[], Any]
) -> list[PassManager]:
    """Return passes that fill a library of this kind, made for the function of the compiler."""
    state = compiler.state
    name = state.func_id.func_qualname
    state.library = library(state.targetctx.codegen(), name)
    managers: Any = passes()
    for manager in managers:
        manager.add_pass_after(AbsentMembers, RewriteSemanticConstants)
        manager.finalize()
    return list(managers)


def copied(
    function: Function, options: Mapping[str, Any], *, counts_references: bool = False
) -> Function:
    """Return a function compiled for kernels to copy, which Python cannot call.

    Args:
        function: what is compiled.
        options: of `numba.njit`.
        counts_references: whether it allocates arrays; else it keeps none alive.
    """
    more: dict[str, Any] = {"no_cpython_wrapper": True, "_nrt": counts_references}
    made: Any = njit(**options, **more, pipeline_class=CopiedCode)(function)

    def refuse(*_: Any, **__: Any) -> None:
        raise TypeError(f"{function.__name__} is for kernels to copy: Python cannot call it")

    def add_overload(code: Any) -> None:
        made.overloads[tuple(code.signature.args)] = code

    # A call would jump to a wrapper that is not there: it must find no code, and may make none.
    made._compile_for_args, made.add_overload = refuse, add_overload
    return cast(Function, made)
