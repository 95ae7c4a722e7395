"""Pickles and copies of frozen values, such as results that leave a user's process pool.

The library itself reads no pickle, neither from files nor from the network.
"""

import dataclasses
from typing import Any


def state_of_fields(self: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, as its `__getstate__`.

    What a `cached_property` has derived from them is left out: it is derived again on demand, and
    some of it, such as a read-only mapping, cannot be pickled.
    """
    return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
