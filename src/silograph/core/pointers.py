"""Compiled functions get large tuples by pointer, and leave out code for absent members.

numba passes every number of every array of a tuple as an argument of its own: some hundred for each
call, which took half of the time of compilation. A pointer is one argument, and a function loads
the members that it reads.

A member that is None, such as the masks of a model without any, makes code for it needless:
`if own.mask_state is not None:` is decided before the function is compiled. numba itself decides it
for arguments, but not for members of arguments.
"""

import operator
from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba.core import cgutils as untyped_cgutils
from numba.core import ir as untyped_ir
from numba.core import types
from numba.core.compiler_machinery import FunctionPass, register_pass
from numba.core.imputils import impl_ret_borrowed as untyped_borrowed
from numba.core.ir_utils import get_definition
from numba.core.ir_utils import guard as untyped_guard
from numba.core.typing.templates import AttributeTemplate
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
