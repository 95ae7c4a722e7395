"""Speeds and links of clients as users write them; nothing here needs torch."""

import math

from silograph.core.errors import ConfigError

EQUAL, LOGNORMAL = "equal", "lognormal"
DEFAULT_LINKS = "10:0.05"


def parse_speeds(text: str) -> tuple[float, ...] | None:
    """Return speeds in 10^9 operations a second, which clients have in turn; None: drawn.

    >>> parse_speeds("equal"), parse_speeds("1,2,4"), parse_speeds("lognormal")
    ((1.0,), (1.0, 2.0, 4.0), None)

    Raises:
        ConfigError: another form, or a speed that is not above 0.
    """
    if text in (EQUAL, LOGNORMAL):
        return (1.0,) if text == EQUAL else None
    speeds = tuple(_number(part) for part in text.split(","))
    if not all(speed > 0 for speed in speeds):
        raise ConfigError(
            f"speeds: expected equal, lognormal, or numbers above 0 of 10^9 operations a second "
            f"such as 1,2,4, got {text!r}"
        )
    return speeds


def parse_links(text: str) -> tuple[tuple[float, float], ...]:
    """Return MB/s and seconds of latency for each call, which clients have in turn.

    >>> parse_links("10:0.05,0.5:0.2")
    ((10.0, 0.05), (0.5, 0.2))

    Raises:
        ConfigError: another form, no bandwidth above 0, or a latency below 0.
    """
    links = []
    for part in text.split(","):
        rate, colon, latency = part.partition(":")
        link = _number(rate), _number(latency)
        if not colon or not link[0] > 0 or not link[1] >= 0:
            raise ConfigError(
                f"links: expected MB/s:SECONDS of latency for each call, such as 10:0.05 or "
                f"10:0.05,0.5:0.2, got {text!r}"
            )
        links.append(link)
    return tuple(links)


def _number(text: str) -> float:
    """Return a finite number, NaN where the text is none."""
    try:
        number = float(text)
    except ValueError:
        return math.nan
    return number if math.isfinite(number) else math.nan
