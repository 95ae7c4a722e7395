"""The virtual clock of a run: from what its config says to every client's speed and link."""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from silograph.core.client_speeds import parse_links, parse_speeds
from silograph.core.key import Key, hash_texts
from silograph.core.resolved_config import ResolvedConfig
from silograph.federation.virtual_clock import VirtualClock

SPEED, BANDWIDTH = 1e9, 1e6  # of one unit: operations a second, bytes a second


def clock_of(config: ResolvedConfig, ids: Sequence[str]) -> VirtualClock | None:
    """Return the clock of a run, None where it has none.

    Speeds that are drawn are exp(z) with z standard normal, by seed and name of the client.
    """
    if config.speeds is None or config.links is None:
        return None
    return _clock(config.speeds, config.links, config.seed, tuple(ids))


@lru_cache(maxsize=4)  # asked for in every round
def _clock(speed_text: str, link_text: str, seed: int, ids: tuple[str, ...]) -> VirtualClock:
    given, clients = parse_speeds(speed_text), np.arange(len(ids))
    if given is None:
        u = Key.of(seed).fold("speeds").uniform(hash_texts(ids), 2).numpy()
        speeds = np.exp(np.sqrt(-2 * np.log(1 - u[:, 0])) * np.cos(2 * math.pi * u[:, 1]))
    else:
        speeds = np.array(given)[clients % len(given)]
    links = np.array(parse_links(link_text))
    rate, latency = links[clients % len(links)].T
    return VirtualClock(SPEED * speeds, BANDWIDTH * rate, latency.copy())
