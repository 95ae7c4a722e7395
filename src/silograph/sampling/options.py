"""Options of the neighbor samplers that have a flag of their own; nothing here needs torch."""

from dataclasses import field
from typing import Annotated

from pydantic import BeforeValidator
from pydantic.dataclasses import dataclass

from silograph.core.config import STRICT


@dataclass(frozen=True, config=STRICT)
class FanoutOptions:
    """The help text is the documentation of the field."""

    fanout: Annotated[str, BeforeValidator(str)] = field(
        default="10", metadata={"help": "neighbors drawn of a node, hop by hop: 10,5; 0 is all"}
    )
