"""Options of the selectors that have a flag of their own; nothing here needs torch."""

from dataclasses import field
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from silograph.core.config import STRICT


@dataclass(frozen=True, config=STRICT)
class UniformOptions:
    """The help text is the documentation of the field."""

    participation: Annotated[float, Field(gt=0, le=1)] = field(
        default=1.0, metadata={"help": "share of clients that train in a round"}
    )
