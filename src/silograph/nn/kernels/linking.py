"""Machine code that holds all that it calls, and so gives the same bits in every process.

numba copies the functions that a kernel calls into the kernel's own code, and optimizes them there
once more. But the linker takes the first function of a name that the process has loaded, and leaves
later ones out. A process that compiles has loaded the callees before the kernel, and would go on
with them; one that finds the kernel on disk has loaded nothing else, and goes on with the copies.
Sums that may be reordered have other last bits in one than in the other. So the names of copies are
made local to the kernel: its calls can reach nothing else, whatever was loaded and in which order.

So nothing calls the machine code of a function that kernels copy. None is made of it: it is kept as
the code that kernels copy from, and compiling takes a sixth less.
"""

from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.compiler_machinery import PassManager

_ENVIRONMENT = "_ZN08NumbaEnv"  # how numba's names of them begin


class _Library(JITCodeLibrary):
    """Code of one kernel."""

    def _optimize_final_module(self) -> None:
        """Optimize all of it as numba does, then make the names of copies local."""
        super()._optimize_final_module()  # type: ignore[no-untyped-call]
        for function in self._final_module.functions:
            if not function.is_declaration and function.linkage.name == "linkonce_odr":
                function.linkage = "internal"


class _ToCopy(JITCodeLibrary):
    """Code of a function that kernels copy, without machine code."""

    def _finalize_final_module(self) -> None:
        """Keep the code for kernels; load nothing but the variables of numba's environments."""
        self._finalize_dynamic_globals()  # type: ignore[no-untyped-call]
        self._verify_declare_only_symbols()  # type: ignore[no-untyped-call]
        self._finalized = True  # it can be linked now
        whole = self._get_module_for_linking()  # type: ignore[no-untyped-call]
        rest = self._codegen._create_empty_module(self.name)  # type: ignore[no-untyped-call]
        for variable in whole.global_variables:
            if variable.name.startswith(_ENVIRONMENT):
                kind = ir.IntType(8).as_pointer()
                kept = ir.GlobalVariable(rest, kind, variable.name)
                kept.linkage, kept.initializer = "common", ir.Constant(kind, None)
        self._final_module = binding.parse_assembly(str(rest))
        super()._finalize_final_module()  # type: ignore[no-untyped-call]


class SelfContained(Compiler):
    """Compiles a kernel that no other compiled function calls."""

    def define_pipelines(self) -> list[PassManager]:
        """Return numba's own passes, which fill a library of a kernel."""
        return _passes(self, super().define_pipelines(), _Library)  # type: ignore[no-untyped-call]


class ForKernels(Compiler):
    """Compiles a function that only kernels call, and functions that they call."""

    def define_pipelines(self) -> list[PassManager]:
        """Return numba's own passes, which fill a library that is for copies only."""
        return _passes(self, super().define_pipelines(), _ToCopy)  # type: ignore[no-untyped-call]


def _passes(
    compiler: Compiler, passes: list[PassManager], library: type[JITCodeLibrary]
) -> list[PassManager]:
    """Return the passes, which fill the library that they find in the state: put it there."""
    state = compiler.state
    state.library = library(state.targetctx.codegen(), state.func_id.func_qualname)
    state.library.enable_object_caching()
    return passes
