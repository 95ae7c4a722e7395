"""Machine code that holds all that it calls, and so gives the same bits in every process.

numba copies the functions that a kernel calls into the kernel's own code, and optimizes them there
once more. But the linker takes the first function of a name that the process has loaded, and leaves
later ones out. A process that compiles has loaded the callees before the kernel, and would go on
with them; one that finds the kernel on disk has loaded nothing else, and goes on with the copies.
Sums that may be reordered have other last bits in one than in the other. So the names of copies are
made local to the kernel: its calls can reach nothing else, whatever was loaded and in which order.
"""

from collections.abc import Callable
from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.compiler_machinery import PassManager


class _Library(JITCodeLibrary):
    """Code of one kernel."""

    def _optimize_final_module(self) -> None:
        """Optimize all of it as numba does, then make the names of copies local."""
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
    managers: list[PassManager] = passes()
    return managers
