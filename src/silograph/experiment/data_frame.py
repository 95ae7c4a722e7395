"""Rows as a pandas DataFrame; pandas is not installed with silograph."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from silograph.core.errors import SilographError

if TYPE_CHECKING:
    import pandas as pd


def frame_of(rows: Sequence[Mapping[str, Any]], instead: str) -> "pd.DataFrame":
    """Return rows as a pandas DataFrame.

    Args:
        rows: dicts with the same keys.
        instead: where the rows are without pandas.

    Raises:
        SilographError: pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError:
        raise SilographError(
            "expected pandas for to_dataframe(), got no such package: pip install "
            f"'silograph[pandas]', or use {instead}"
        ) from None
    return pd.DataFrame(list(rows))
