"""What recipes on local steps and a server step have in common: GraphSAGE of 32 units, 50 rounds.

Everything that decides a cell stands here and in the recipe, so that a change of the defaults
changes no cell.
"""

from typing import Any

from silograph.core.config import Scalar

SMALL_SAGE: dict[str, Any] = {
    "split": "0.2/0.4/0.4",
    "largest_component": False,
    "normalize": "none",
    "model": "sage",
    "layers": 2,
    "hidden": 32,
    "dropout": 0.5,
    "rounds": 50,
    "momentum": 0.0,
}
# Options of the server optimizer `adam`, as FedOpt has them by default.
ADAM_STEP: dict[str, Scalar] = {
    "server_lr": 0.01,
    "server_beta1": 0.9,
    "server_beta2": 0.99,
    "server_relative_tau": 0.01,
}
