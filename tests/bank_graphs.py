"""Generated accounts of three banks with transfers, whose amounts carry no signal."""

import numpy as np

import silograph as sg
from silograph.graph.graph import Graph

BANKS = ("north", "south", "west")
SIZES = (900, 700, 500)


def bank_graph(shrink: int = 1, *, seed: int = 0) -> Graph:
    """Return accounts as nodes, transfers as edges, and whether an account is a fraud.

    Fraud depends on an account's own features and on the ring that it is in, which shows in those
    that it pays. Weights are amounts of money: log-normal, and the same for all pairs of accounts.
    45 % of the accounts have a label.

    Args:
        shrink: divides the number of accounts and transfers.
        seed: of all draws.
    """
    rng = np.random.default_rng(seed)
    bank = np.repeat(np.arange(len(BANKS)), [size // shrink for size in SIZES])
    n = len(bank)
    ring = rng.random(n) < 0.1
    own = rng.normal(size=n)
    x = np.column_stack([own, rng.normal(size=(n, 3)) + ring[:, None]])
    fraud = own + 2.5 * ring > 1.5
    source = rng.integers(0, n, 9000 // shrink)
    target = rng.integers(0, n, len(source))
    for edge in np.flatnonzero(rng.random(len(source)) < 0.9):
        like = np.flatnonzero((bank == bank[source[edge]]) & (ring == ring[source[edge]]))
        target[edge] = rng.choice(like)
    amount = rng.lognormal(4, 1.3, len(source)).round(2)
    apart = source != target
    return sg.from_arrays(
        edge_index=np.stack([source, target])[:, apart],
        edge_weight=amount[apart],
        x=x,
        y=np.where(rng.random(n) < 0.45, fraud, -1).astype(np.int64),
        silo=bank,
        silo_names=BANKS,
        name="banks",
    )
