"""Errors by their code and fields, whatever they say."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from silograph.core.errors import SilographError


@contextmanager
def raises_code(
    kind: type[SilographError], code: str, **fields: Any
) -> Iterator[pytest.ExceptionInfo[SilographError]]:
    """Expect an error of a class with a code and, among its fields, these values."""
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    values = {name: error.fields.get(name) for name in fields}
    assert (error.code, values) == (code, fields), str(error)
