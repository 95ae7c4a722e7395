"""How silograph extends numba: tuples by pointer, absent members, self-contained code.

Compiled functions get large tuples by pointer, and leave out code for absent members.

numba passes every number of every array of a tuple as an argument of its own: some hundred for each
call, which took half of the time of compilation. A pointer is one argument, and a function loads
the members that it reads.

A member that is None, such as the masks of a model without any, makes code for it needless:
`if own.mask_state is not None:` is decided before the function is compiled. numba itself decides it
for arguments, but not for members of arguments.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from numba import njit
from numba.core import cgutils as untyped_cgutils
from numba.core import ir as untyped_ir
from numba.core import types
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.compiler_machinery import FunctionPass, PassManager, register_pass
from numba.core.imputils import impl_ret_borrowed as untyped_borrowed
from numba.core.ir_utils import get_definition
from numba.core.ir_utils import guard as untyped_guard
from numba.core.typing.templates import AttributeTemplate
from numba.core.untyped_passes import RewriteSemanticConstants
from numba.extending import infer_getattr, intrinsic, lower_getattr_generic, models, register_model

T = TypeVar("T")
cgutils: Any = untyped_cgutils  # numba's own functions have no types
ir: Any = untyped_ir
impl_ret_borrowed: Any = untyped_borrowed
guard: Any = untyped_guard
NAMED_TUPLE: Any = types.BaseNamedTuple


class Pointer(types.Type):
    """Type of a pointer to a named tuple."""

    def __init__(self, target: types.BaseNamedTuple) -> None:
        self.target: Any = target
        super().__init__(name=f"Pointer({target})")


@register_model(Pointer)
class _PointerModel(models.PrimitiveModel):
    def __init__(self, manager: Any, pointer: Pointer) -> None:
        target = manager.lookup(pointer.target).get_data_type()
        super().__init__(manager, pointer, target.as_pointer())  # type: ignore[no-untyped-call]


def type_of_member(of: Any, name: str) -> Any:
    """Return the type of a member of a named tuple, or of a pointer to one; None: it has none."""
    target: Any = of.target if isinstance(of, Pointer) else of
    if not isinstance(target, NAMED_TUPLE) or name not in target.fields:
        return None
    member = target.types[target.fields.index(name)]
    by_pointer = isinstance(of, Pointer) and isinstance(member, NAMED_TUPLE)
    return Pointer(member) if by_pointer else member


@infer_getattr
class _Members(AttributeTemplate):
    key = Pointer

    def generic_resolve(self, pointer: Any, name: str) -> Any:  # type: ignore[override]
        return type_of_member(pointer, name)


@lower_getattr_generic(Pointer)  # type: ignore[untyped-decorator, no-untyped-call]
def _load_member(context: Any, builder: Any, pointer: Pointer, value: Any, name: str) -> Any:
    """Return a pointer to a member that is a tuple itself; load any other."""
    index = pointer.target.fields.index(name)
    place, member = cgutils.gep_inbounds(builder, value, 0, index), pointer.target.types[index]
    if isinstance(member, NAMED_TUPLE):
        return place
    loaded = context.data_model_manager[member].load_from_data_pointer(builder, place)
    return impl_ret_borrowed(context, builder, member, loaded) if context.enable_nrt else loaded


def _pointer_to(typing: Any, of: types.BaseNamedTuple) -> Any:
    """Return a pointer to a copy of a named tuple, which has the same members.

    The copy is in the stack frame of the function that calls this. It keeps no arrays alive: see
    `keep_until_here`.
    """
    del typing

    def store(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del signature
        model = context.data_model_manager[of]
        place = cgutils.alloca_once(builder, model.get_data_type())
        builder.store(model.as_data(builder, arguments[0]), place)
        return place

    return Pointer(of)(of), store


def _keep_until_here(typing: Any, of: types.Type) -> Any:
    """Do nothing: numba frees the arrays of a variable after the last line that names it."""
    del typing
    return types.none(of), lambda context, *_: context.get_dummy_value()


# To who reads a kernel a pointer to a tuple is the tuple.
pointer_to: Callable[[T], T] = cast(Any, intrinsic(_pointer_to))
keep_until_here: Callable[[Any], None] = cast(Any, intrinsic(_keep_until_here))


@register_pass(mutates_CFG=False, analysis_only=False)  # type: ignore[no-untyped-call]
class AbsentMembers(FunctionPass):
    """Decides whether members are None, so that numba leaves out code for those that are."""

    _name = "absent_members"

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def run_pass(self, state: Any) -> bool:
        """Replace comparisons with None of members of a function's arguments."""
        function = state.func_ir
        for block in function.blocks.values():
            for statement in block.find_insts(ir.Assign):
                absent = _is_absent(function, state.args, statement.value)
                if absent is not None:
                    constant = ir.Const(absent, statement.loc)
                    definitions = function._definitions[statement.target.name]
                    definitions[definitions.index(statement.value)] = constant
                    statement.value = constant
        return True


def _is_absent(function: Any, arguments: Any, value: Any) -> bool | None:
    """Return what a comparison of a member with None gives; None for all else."""
    compares = {operator.is_: True, operator.is_not: False}
    if not isinstance(value, ir.Expr) or value.op != "binop" or value.fn not in compares:
        return None
    other, member = (guard(get_definition, function, side) for side in (value.rhs, value.lhs))
    if (
        not isinstance(other, ir.Const)
        or other.value is not None
        or not isinstance(member, ir.Expr)
    ):
        return None
    member_type = _type_of(function, arguments, member)
    return None if member_type is None else (member_type == types.none) is compares[value.fn]


def _type_of(function: Any, arguments: Any, value: Any) -> Any:
    """Return the type of an argument, or of a member of one; None for all else."""
    if isinstance(value, ir.Var):
        value = guard(get_definition, function, value)
    if isinstance(value, ir.Arg):
        return arguments[value.index]
    if not isinstance(value, ir.Expr) or value.op != "getattr":
        return None
    of = _type_of(function, arguments, value.value)
    return None if of is None else type_of_member(of, value.attr)


# --- Machine code that holds all that it calls, and so has the same bits in every process ---------
#
# numba copies the functions that a kernel calls into the kernel's own code, and optimizes them
# there once more. But the linker takes the first function of a name that the process has loaded,
# and leaves later ones out. A process that compiles has loaded the callees before the kernel, and
# would go on with them; one that finds the kernel on disk has loaded nothing else, and goes on
# with the copies. Sums that may be reordered have other last bits in one than in the other. So
# the names of copies are made local to the kernel: its calls can reach nothing else, whatever was
# loaded and in which order.


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
