"""The most work that one call can be at a silo, of what is fixed before the first round."""

import math
from collections.abc import Mapping
from typing import Any

from silograph.core.resolved_config import ResolvedConfig
from silograph.experiment.resolve.user_code import is_spec
from silograph.federation.field_specs import EDGES, ROWS, TRAIN
from silograph.methods.base import AnyMethod, MethodConfig
from silograph.nn.neighbors import Fanout, Full

PER_WEIGHT = 6  # of a row: multiply and add, forward and twice on the way back
PER_VALUE = 40  # of a row or an edge: scales, softmax, draws, activations, loss, and the way back
PER_PARAMETER = 40  # of a step: optimizer, decay, corrections
MARGIN = 10  # times that, for what methods do besides


def most_work(
    config: ResolvedConfig, method: AnyMethod, cfg: MethodConfig[Any], sizes: Mapping[str, int]
) -> float | None:
    """Return a bound of the floating-point operations of any one call at a silo.

        steps = epochs ceil(training nodes / batch size) + 1
        bound = MARGIN steps (6 R P + 40 (R + E) D hops + 40 P)

    R and E are rows and edges with the halo's, P the parameters of the model and D its widths
    added up. A step takes all rows at most, and the one more is for scores.

    Args:
        config: of the run.
        method: its method.
        cfg: what its ops read.
        sizes: of the silo, by TRAIN, ROWS and EDGES, as it has reported.

    Returns:
        None where nobody knows: for code of users, networks besides the model, ratings.
    """
    own = is_spec(config.method) or is_spec(config.model)
    besides = method.calls is None or method.calls.trains_others
    plain = isinstance(cfg.schedule.neighbors, Full | Fanout) and cfg.model.task != "rating"
    if own or besides or not plain or ROWS not in sizes:
        return None
    shapes = cfg.model.weight_shapes.values()
    weights = sum(map(math.prod, shapes))
    widths = sum(map(sum, shapes)) * int(cfg.model.described().get("hops") or 1)
    steps = cfg.schedule.epochs * -(-sizes[TRAIN] // (cfg.schedule.batch_size or 2**62)) + 1
    values = PER_WEIGHT * sizes[ROWS] * weights + PER_VALUE * (sizes[ROWS] + sizes[EDGES]) * widths
    return float(MARGIN * steps * (values + PER_PARAMETER * weights))
