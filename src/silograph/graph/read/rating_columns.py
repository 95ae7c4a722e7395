"""Names of the columns of tables of ratings and trust, and what a table may call them."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from silograph.core.errors import DataError, unknown
from silograph.core.text import shown

USER, ITEM, RATING, TIME, CATEGORY = "user", "item", "rating", "time", "category"
SPLIT = "split"
TRUSTER, TRUSTEE = "truster", "trustee"
OF_RATINGS, OF_TRUST = (USER, ITEM, RATING, TIME, SPLIT, CATEGORY), (TRUSTER, TRUSTEE)
RATING_COLUMNS = (*OF_RATINGS, *OF_TRUST)  # that a table may call otherwise


def check_columns(columns: Any, ratings: Any, trust: Any) -> None:
    """Raise for names of columns that ratings do not have, or of what is no table."""
    if not isinstance(columns, Mapping) or not all(isinstance(n, str) for n in columns.values()):
        raise DataError(
            f'columns: expected a mapping such as {{"user": "userId"}}, got {shown(columns)}'
        )
    tables = {OF_RATINGS: ratings, OF_TRUST: trust}
    for column in columns:
        if column not in RATING_COLUMNS:
            raise DataError(f"columns: {unknown('column', column, RATING_COLUMNS)}")
        for known, given in tables.items():
            if column in known and not isinstance(given, str | os.PathLike):
                what = "trust" if known is OF_TRUST else "ratings"
                raise DataError(
                    f"columns: expected a table of {what} for its column {column}, got "
                    f"{'none' if given is None else 'an array'}: leave {column} out"
                )


def only(columns: Mapping[str, str], known: Sequence[str]) -> dict[str, str]:
    """Return what is said of some of the columns."""
    return {name: called for name, called in columns.items() if name in known}


def how_named(name: str) -> str:
    """Return how one says what a table calls a column."""
    return (
        f"name yours: --columns {name}=NAME, in sg.ratings columns={{{name!r}: NAME}}, in a "
        "silo.toml under [columns]"
    )
