"""Messages and client states as frozen dataclasses: one description of all that crosses a wire.

A field of a message is annotated with what both ends check before they read it:

    @dataclass(frozen=True)
    class LocalModel:
        weights: Annotated[Mapping[str, Stacked | Patched], model_weights(Stacked)]
        nodes: Annotated[Stacked, TRAINED]

The annotation is a `FieldSpec`, or a function of the method's config that returns one, or that
returns several by their names on the wire: `weights/NAME` for a mapping called `weights`, and none
where a run does not have the field. The type says how values are held:

- `Tensor`: one for all clients (`Shared` on the wire);
- `Stacked`, `Patched` or `Ragged`: a part for each client;
- a mapping from names to one of these; `X | None` where some runs lack the field;

Where a class has `PREFIX`, the names of its fields begin with it, so that parts of a state are told
apart: `PREFIX: ClassVar[str] = "pass/"`.

So specs, sizes, the table of what leaves a silo and the messages themselves follow from one class.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from inspect import get_annotations
from types import NoneType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from torch import Tensor

from silograph.core.errors import ConfigError, ProtocolError
from silograph.core.payload import Field, Ragged, Shared, fields_under
from silograph.federation.field_specs import FieldSpec, FieldSpecs, exactly

Message = TypeVar("Message")
SpecsByConfig = Callable[[Any], FieldSpecs]
Specs = FieldSpec | Callable[[Any], FieldSpec | FieldSpecs]


def round_number(cfg: object) -> FieldSpec:
    """Annotate a field with the number of the round, which a server can only send as it is.

    `specs_of` puts the number in.
    """
    raise TypeError(f"expected specs of a round, got those of {cfg}")


@dataclass(frozen=True)
class Empty:
    """A message without fields, and the state of a client that keeps none of its own."""


@dataclass(frozen=True)
class _Declared:
    """A field of a message.

    Attributes:
        attribute: of the class.
        name: on the wire, and how its names there begin if it holds several values.
        specs: what its values must be; None in a class that never crosses, such as a mean.
        is_mapping: whether it holds several values by name.
        is_shared: whether values are tensors, one for all clients.
        is_rows: whether they have rows of single nodes.
        is_optional: whether it may be None.
    """

    attribute: str
    name: str
    specs: Specs | None
    is_mapping: bool
    is_shared: bool
    is_rows: bool
    is_optional: bool


def _read_fields(cls: Any) -> tuple[_Declared, ...]:
    """Return the fields of a message class, in order."""
    hints = get_type_hints(cls, include_extras=True)
    declared = []
    for field in dataclasses.fields(cls):
        kind, specs = hints[field.name], None
        if get_origin(kind) is Annotated:
            kind, specs = get_args(kind)[:2]
        is_optional = NoneType in get_args(kind)
        if is_optional:  # X | None
            kind = get_args(kind)[0]
        is_mapping = get_origin(kind) is Mapping
        value_type = get_args(kind)[1] if is_mapping else kind
        declared.append(
            _Declared(
                attribute=field.name,
                name=_prefix(cls, field.name) + field.name,
                specs=specs,
                is_mapping=is_mapping,
                is_shared=value_type is Tensor,
                is_rows=value_type is Ragged,
                is_optional=is_optional,
            )
        )
    return tuple(declared)


declared_fields: Callable[[Any], tuple[_Declared, ...]] = cache(_read_fields)


def _prefix(cls: type, attribute: str) -> str:
    """Return how the name of a field begins, by the class in which it is declared."""
    owner = next(c for c in cls.__mro__ if attribute in get_annotations(c))
    return getattr(owner, "PREFIX", "")


def specs_of(cls: type, cfg: Any, number: int = 0) -> dict[str, FieldSpec]:
    """Return the specs of a message or a state in a run, by name on the wire.

    Args:
        cls: the class.
        cfg: of the method.
        number: of the round.

    Raises:
        ConfigError: a field has no specs.
    """
    specs: dict[str, FieldSpec] = {}
    for field in declared_fields(cls):
        if field.specs is round_number:
            specs[field.name] = exactly(number)
            continue
        own = field.specs(cfg) if callable(field.specs) else field.specs
        if own is None:
            raise ConfigError(
                f"expected Annotated[TYPE, SPECS] for {field.attribute} of {cls.__name__}, so that "
                "both ends can check it, got no specs: see docs/reference/method_interface.md"
            )
        own = {field.attribute: own} if isinstance(own, FieldSpec) else own
        prefix = field.name.removesuffix(field.attribute)
        specs |= {prefix + name: spec for name, spec in own.items()}
    return specs


def to_payload(message: Any) -> dict[str, Any]:
    """Return the fields of a message or a state as they are sent or stored."""
    payload: dict[str, Any] = {}
    for field in declared_fields(type(message)):
        value = getattr(message, field.attribute)
        if value is None:
            continue
        if not field.is_mapping:
            payload[field.name] = Shared(value) if field.is_shared else value
        elif field.is_shared:
            payload |= {f"{field.name}/{name}": Shared(t) for name, t in value.items()}
        else:
            payload |= {f"{field.name}/{name}": part for name, part in value.items()}
    return payload


def from_payload(cls: type[Message], payload: Mapping[str, Field]) -> Message:
    """Return a message or a state from fields; others than its own are passed over.

    Raises:
        ProtocolError: a field is missing.
    """
    values: dict[str, Any] = {}
    for field in declared_fields(cls):
        if field.is_mapping:
            parts = fields_under(field.name, payload)
            held = {n: f.t for n, f in parts.items()} if field.is_shared else parts
            values[field.attribute] = None if field.is_optional and not parts else held
            continue
        part = payload.get(field.name)
        if part is None and not field.is_optional:
            raise ProtocolError(f"expected the field {field.name!r} of {cls.__name__}, got none")
        values[field.attribute] = part.t if part is not None and field.is_shared else part
    return cls(**values)


def is_own_field(cls: Any, name: str) -> bool:
    """Return whether a name on the wire, or in a state, is that of a field of a class."""
    return f"{name}/".startswith(tuple(f"{field.name}/" for field in declared_fields(cls)))
