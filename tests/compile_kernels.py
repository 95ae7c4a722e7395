"""Compiles kernels of one precision and leaves them on the disk: python compile_kernels.py float32.

Of the suite's two workers one would compile what the first test needs, for most of a minute, and
the other wait for it. Each does one precision instead, before its first test.
"""

import sys
from typing import Any

import silograph as sg


def main(dtype: Any) -> None:
    """Run what needs most of them: training on a client's own graph, and on stored rows."""
    for method in ("fedavg", "fedais"):
        sg.run(
            "digits",
            method=method,
            clients=2,
            partition="random",
            rounds=1,
            hidden=4,
            dtype=dtype,
            kernels="compiled",
        )


if __name__ == "__main__":
    main(sys.argv[1])
