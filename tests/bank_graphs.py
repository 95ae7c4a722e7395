"""Generated accounts of three banks with transfers, whose amounts carry no signal."""

import numpy as np

import silograph as sg
from silograph.graph.graph import Graph

BANKS = ("north", "south", "west")
SIZES = (900, 700, 500)


def bank_graph(shrink: int = 1, *, seed: int = 0) -> Graph:
    """Return accounts as nodes, transfers as edges, and whether an account belongs to a ring.

    An account's own features say little about its ring, the mean over those it deals with says
    much: accounts of a ring transact with others of the ring and of their bank in 80 % of cases.
    Weights are amounts of money with the same log-normal distribution for all pairs, so that a
    weighted mean over neighbors has the variance of far fewer neighbors. 45 % of the accounts have
    a label.

    Args:
        shrink: divides the number of accounts and transfers, which are 2,100 and 9,300.
        seed: of all draws.
    """
    rng = np.random.default_rng(seed)
    bank = np.repeat(np.arange(len(BANKS)), [size // shrink for size in SIZES])
    n = len(bank)
    ring = rng.random(n) < 0.12
    x = np.column_stack([rng.normal(size=(n, 6)) + 0.35 * ring[:, None], rng.normal(size=(n, 2))])
    source, target = rng.integers(0, n, (2, 9300 // shrink))
    for edge in np.flatnonzero(rng.random(len(source)) < 0.8):
        like = np.flatnonzero((bank == bank[source[edge]]) & (ring == ring[source[edge]]))
        target[edge] = rng.choice(like)
    amount = rng.lognormal(4, 1.3, len(source)).round(2)
    apart = source != target
    return sg.from_arrays(
        edge_index=np.stack([source, target])[:, apart],
        edge_weight=amount[apart],
        x=x,
        y=np.where(rng.random(n) < 0.45, ring, -1).astype(np.int64),
        silo=bank,
        silo_names=BANKS,
        name="banks",
    )
