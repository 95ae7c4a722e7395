"""FedAvg beside OpenFGL and a round in C++, with equal work on all sides."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from cells import CPP, FASTEST, KEPT, OPENFGL, OURS, REBUILT, VARIANTS, Row, Shape
from floor import Floor, build_floor
from openfgl_loop import OpenFGL
from race import Side, logits_apart, ours
from side import Ours
from timing import Act, Plan, medians, ratios, take_turns


@contextmanager
def peer_sides(shape: Shape, plan: Plan) -> Iterator[tuple[Mapping[str, Side], Ours]]:
    """Give all sides that can run here, with the same first weights, and one of ours."""
    mine = {
        name: ours(shape, plan, keep_optimizer=keeps, **VARIANTS[FASTEST])
        for name, keeps in OURS.items()
    }
    setup, weights = mine[REBUILT].setup, mine[REBUILT].weights
    sides: dict[str, Side] = {**mine}
    if plan.openfgl is not None:
        for name, (keeps, both) in OPENFGL.items():
            sides[name] = OpenFGL(
                *(plan.openfgl, setup.cut, setup.config, weights),
                keep_optimizer=keeps,
                both_models=both,
            )
    with tempfile.TemporaryDirectory() as folder:
        program = build_floor(Path(folder))
        if program is None:
            yield sides, mine[REBUILT]
            return
        floor = Floor(program, Path(folder), setup.cut, setup.config, weights)
        try:
            yield sides | {CPP: floor}, mine[REBUILT]
        finally:
            floor.child.close()


def keeps_optimizer(name: str) -> bool:
    """Whether clients of a side keep Adam's state between rounds."""
    return OURS[name] if name in OURS else name in OPENFGL and OPENFGL[name][0]


def peers_apart(shape: Shape, plan: Plan) -> dict[str, float]:
    """Return how far logits are from ours with the same optimizer, after rounds without dropout."""
    apart: dict[str, float] = {}
    with peer_sides(replace(shape, dropout=0.0), plan) as (sides, one):
        for reference, keeps in OURS.items():
            alike = {name: side for name, side in sides.items() if keeps_optimizer(name) == keeps}
            apart |= logits_apart(alike, reference, one.setup, "float32")
    return apart


def race_peers(shape: Shape, plan: Plan) -> Row:
    """Race OpenFGL, C++ and ours, with the optimizer kept and rebuilt."""
    apart = peers_apart(shape, plan)
    with peer_sides(shape, plan) as (sides, one):
        acts: dict[str, Act] = {
            name: side.child if isinstance(side, Floor) else side.round
            for name, side in sides.items()
        }
        spent = take_turns(acts, plan)
    return {
        "apart": apart,
        "turns": len(spent[REBUILT]),
        "seconds_a_round": {name: medians(turns) for name, turns in spent.items()},
        "over_ours": {
            name: {own: ratios(spent, name, own) for own in OURS}
            for name in OPENFGL
            if name in spent
        },
        "over_cpp": {own: ratios(spent, own, CPP) for own in OURS if CPP in spent},
        "kept_over_rebuilt": ratios(spent, KEPT, REBUILT),
        "partition": one.setup.cut.partition.hash,
    }
