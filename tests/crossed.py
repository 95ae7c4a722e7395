"""Crossings of settings of a test: a few run by default, and all of them in the slow suite."""

from collections.abc import Collection, Mapping, Sequence
from itertools import product
from typing import Any

import pytest


def crossed(
    settings: Mapping[str, Sequence[Any]], quick: Collection[tuple[Any, ...]]
) -> pytest.MarkDecorator:
    """Parametrize by every crossing of the settings; those that are not in `quick` are slow.

    Raises:
        ValueError: `quick` holds what is no crossing of the settings.
    """
    cases = list(product(*settings.values()))
    if strange := [case for case in quick if case not in cases]:
        raise ValueError(f"expected crossings of {', '.join(settings)}, got {strange}")
    return pytest.mark.parametrize(
        tuple(settings),
        [pytest.param(*c, marks=() if c in quick else pytest.mark.slow) for c in cases],
    )
