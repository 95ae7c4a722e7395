"""The most work that one call can be at a silo, of what is fixed before the first round."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from silograph.core.resolved_config import ResolvedConfig
from silograph.experiment.resolve.user_code import is_spec
from silograph.federation.field_specs import EDGES, ROWS, TRAIN
from silograph.federation.session.limits import WorkBound
from silograph.methods.base import AnyMethod, MethodConfig

PER_WEIGHT = 6  # of a row: multiply and add, forward and twice on the way back
PER_VALUE = 40  # of a row or an edge: scales, softmax, draws, activations, loss, and the way back
PER_PARAMETER = 40  # of a step: optimizer, decay, corrections
MARGIN = 10  # times that, for what methods do besides


def most_work(
    config: ResolvedConfig, method: AnyMethod, cfg: MethodConfig[Any], sizes: Mapping[str, int]
) -> WorkBound | None:
    """Return a bound of the floating-point operations of any one call at a silo.

        steps = epochs ceil(training nodes / batch size) + 1
        step  = 6 R P + 40 (R + E) D + 40 P
        bound = MARGIN steps step

    R and E are rows and edges with the halo's, P the parameters of the model and of the networks of
    its sampler, one a hop, D their widths added up, those of the model once a hop, and those of its
    tables. A step takes all rows at most, and the one more is for scores. Biases of ratings are
    solved in turns over all rows besides. With ConsisRec, each rating meets the neighbors of both
    its ends, which are all rows at most: so many stand in place of edges.

    Where a method trains another network, R and E have the rows that it makes, and edges to them.
    The bound is the larger one of the model's and of that network's, which also compares each row
    with all that a call brings: 2 R operations for each number.

    Args:
        config: of the run.
        method: its method.
        cfg: what its ops read.
        sizes: of the silo, by TRAIN, ROWS and EDGES, as it has reported.

    Returns:
        None for code of users: it may do anything, and its bound is time.
    """
    if is_spec(config.method) or is_spec(config.model) or method.calls is None or ROWS not in sizes:
        return None
    named = method.calls.other_network
    other = None if named is None else named(cfg)
    made = other.made if other else 0
    rows = sizes[ROWS] * (1 + made)
    edges = sizes[EDGES] * (1 + made) + 2 * made * sizes[ROWS]
    if cfg.model.meets_all:
        edges = 2 * rows * rows
    steps = cfg.schedule.epochs * -(-sizes[TRAIN] // (cfg.schedule.batch_size or 2**62)) + 1
    own, drawn = list(cfg.model.weight_shapes.values()), cfg.schedule.neighbors.maps(cfg.model)
    hops = int(cfg.model.described().get("hops") or 1)
    widths = hops * _widths(own) + _widths(drawn) + sum(cfg.model.table_widths.values())
    solved = cfg.model.solved_flops * rows
    work = steps * _step([*own, *drawn], widths, rows, edges) + solved
    if not other:
        return WorkBound(float(MARGIN * work))
    shapes = list(other.shapes.values())
    besides = (other.steps + 1) * _step(shapes, _widths(shapes), rows, edges)
    return WorkBound(float(MARGIN * max(work, besides)), float(MARGIN * 2 * sizes[ROWS]))


def _widths(shapes: Sequence[Sequence[int]]) -> int:
    return sum(map(sum, shapes))


def _step(shapes: Sequence[Sequence[int]], widths: int, rows: int, edges: int) -> int:
    """Return the operations of a step through maps of such shapes."""
    weights = sum(map(math.prod, shapes))
    return (
        PER_WEIGHT * rows * weights
        + PER_VALUE * (rows + edges) * widths
        + (PER_PARAMETER * weights)
    )
