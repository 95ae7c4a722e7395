"""Options of parts that have a flag of their own, as the command line shows them without torch."""

import dataclasses
from typing import Any

from silograph.core.config import RunConfig
from silograph.graph.partition.options import (
    ClassBiasedOptions,
    DirichletOptions,
    MetisOverlappingOptions,
    SharesOptions,
)
from silograph.nn.model_options import MODEL_KINDS, RATING_MODELS
from silograph.sampling.options import FanoutOptions
from silograph.selection.options import UniformOptions

DECLARED: dict[str, dict[str, type]] = {
    "partition": {
        "dirichlet": DirichletOptions,
        "class_biased": ClassBiasedOptions,
        "metis_overlapping": MetisOverlappingOptions,
        "shares": SharesOptions,
    },
    "model": {n: kind.options for n, kind in MODEL_KINDS.items() if n not in RATING_MODELS},
    "neighbors": {"fanout": FanoutOptions},
    "selector": {"uniform": UniformOptions},
}


def help_of(field: "dataclasses.Field[Any]") -> str:
    """Return the help of a field of `RunConfig`; that of a part's option is the part's own."""
    if "part" not in field.metadata:
        text: str = field.metadata["help"]
        return text
    declared = DECLARED[field.metadata["part"]]
    own = {
        part: option
        for part, kind in declared.items()
        for option in dataclasses.fields(kind)
        if option.name == field.name
    }
    of = "" if len(own) == len(declared) > 1 else f"{', '.join(own)}: "
    first = next(iter(own.values()))
    # What happens without an option that has no value of its own is in its text.
    default = "" if first.default is None else f" (default: {str(first.default).lower()})"
    return f"{of}{first.metadata['help']}{default}"


HELP = {f.name: help_of(f) for f in dataclasses.fields(RunConfig)}
