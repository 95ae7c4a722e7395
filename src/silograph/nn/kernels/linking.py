"""Machine code that holds all that it calls, and so gives the same bits in every process.

numba copies the functions that a kernel calls into the kernel's own code, and optimizes them there
once more. But the linker takes the first function of a name that the process has loaded, and leaves
later ones out. A process that compiles has loaded the callees before the kernel, and would go on
with them; one that finds the kernel on disk has loaded nothing else, and goes on with the copies.
Sums that may be reordered have other last bits in one than in the other. So the names of copies are
made local to the kernel: its calls can reach nothing else, whatever was loaded and in which order.
"""

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


class SelfContained(Compiler):
    """Compiles a kernel that no other compiled function calls."""

    def define_pipelines(self) -> list[PassManager]:
        """Return numba's own passes; they fill the library that they find in the state."""
        state = self.state
        name = state.func_id.func_qualname
        state.library = _Library(state.targetctx.codegen(), name)  # type: ignore[no-untyped-call]
        state.library.enable_object_caching()
        passes: list[PassManager] = super().define_pipelines()  # type: ignore[no-untyped-call]
        return passes
