"""The methods, by the name users give; and all that it takes to write another.

docs/reference/method_interface.md describes the latter.
"""

import copyreg
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from silograph.aggregation.server_optimizers import ServerAdam, ServerMomentum
from silograph.control import Controller, RunStanding, knob_fields, knob_specs
from silograph.core.errors import lookup
from silograph.core.key import Key
from silograph.core.kinds import Kind
from silograph.core.payload import (
    Patched,
    Payload,
    Ragged,
    Shared,
    Stacked,
    State,
    dense,
    stack,
    tensors_under,
    with_prefix,
)
from silograph.evaluation.scoring import AllSilos, HaloSums, OwnGraph, personal
from silograph.exchange.passes import weight_specs
from silograph.exchange.pull import PullForm, pull
from silograph.exchange.rows import learn_rows, learn_rows_steps, row_numbers
from silograph.federation.base import Federation, Gather, Op, Sum, WeightedMean, per_client
from silograph.federation.decoder import Decoder, onto, rows_for, rows_from
from silograph.federation.field_specs import COUNT, LOSS, TRAINED, FieldSpec
from silograph.federation.messages import Empty
from silograph.federation.program import Call, Calls, Either, Maybe, Repeat, up_to
from silograph.graph.block.block import ClientBlock
from silograph.methods.base import (
    AnyMethod,
    AtSilos,
    Caution,
    Method,
    MethodConfig,
    Needs,
    NoOptions,
    RoundReport,
    ServerHolds,
    ServerState,
    Uncut,
    keep_previous_if_not_finite,
)
from silograph.methods.bns import BNS
from silograph.methods.cagnet import CAGNET
from silograph.methods.fedacs import FEDACS
from silograph.methods.fedais import FEDAIS
from silograph.methods.fedais import PRESETS as FEDAIS_PRESETS
from silograph.methods.fedavg import CENTRALIZED, FEDAVG, FEDOPT, average_and_step, averaging, train
from silograph.methods.fedgnn import FEDGNN
from silograph.methods.fedgraph import FEDGRAPH
from silograph.methods.fedmf import FEDMF
from silograph.methods.fedper import FEDPER
from silograph.methods.fedprox import FEDPROX
from silograph.methods.fedpub import FEDPUB
from silograph.methods.fedsage import FEDSAGE_LOCAL, FEDSAGEPLUS
from silograph.methods.fesog import FESOG
from silograph.methods.gcfl import GCFL, GCFLPLUS
from silograph.methods.graphsaint import GRAPHSAINT
from silograph.methods.label_guided import LABEL_GUIDED
from silograph.methods.llcg import LLCG
from silograph.methods.local_only import LOCAL, InitialModel, OwnModel, begin_own
from silograph.methods.local_training import (
    AveragedModel,
    GlobalModel,
    LocalModel,
    begin,
    each_as_base,
    exact_weights,
    selected,
    shared,
    stacked,
    state_specs,
    untouched_rows_after_round,
    zero_weights,
)
from silograph.methods.ops import (
    ClientOp,
    Clients,
    Fetch,
    Server,
    anyone,
    calls,
    op,
    program,
    repeat,
    when,
)
from silograph.methods.scaffold import SCAFFOLD
from silograph.nn.conv import Params
from silograph.nn.correction import Correction, LossTerm, Proximal, Shift, StepNodes
from silograph.nn.fit import Fitted, Start, Training, TrainingInputs, stacked_copies

METHODS: dict[str, AnyMethod] = {
    method.name: method
    for method in (
        LOCAL,
        FEDAVG,
        FEDACS,
        FEDMF,
        FEDGNN,
        FESOG,
        FEDOPT,
        FEDPROX,
        FEDPER,
        GCFL,
        GCFLPLUS,
        FEDPUB,
        FEDSAGEPLUS,
        FEDSAGE_LOCAL,
        SCAFFOLD,
        LLCG,
        FEDGRAPH,
        LABEL_GUIDED,
        BNS,
        CAGNET,
        CENTRALIZED,
        GRAPHSAINT,
        FEDAIS,
        *FEDAIS_PRESETS,
    )
}


def changed_method(name: str, changes: Mapping[str, Any]) -> AnyMethod:
    """Return a method of the library with other values of some fields; the one that is pickled.

    Raises:
        ConfigError: unknown method (names the nearest).
    """
    method: AnyMethod = lookup(METHODS, name, "method")
    return replace(method, **changes) if changes else method


def _reduce_method(method: AnyMethod) -> tuple[Callable[..., AnyMethod], tuple[Any, ...]]:
    """Pickle a method of the library by its name, and a variant of one by what it changes.

    Their programs hold functions without a name of their own, which pickle cannot write. A method
    that shares its round with none of the library is written by its fields.
    """
    values = {field.name: getattr(method, field.name) for field in fields(method)}
    related = [
        (
            method_of_library.name,
            {n: value for n, value in values.items() if getattr(method_of_library, n) is not value},
        )
        for method_of_library in METHODS.values()
        if method_of_library.round is method.round
    ]
    if not related:
        return Method, tuple(values.values())
    return changed_method, min(related, key=lambda pair: len(pair[1]))


copyreg.pickle(Method, _reduce_method)  # here, as `Method` itself does not know the methods

__all__ = [
    "BNS",
    "CAGNET",
    "CENTRALIZED",
    "COUNT",
    "FEDACS",
    "FEDAIS",
    "FEDAVG",
    "FEDGNN",
    "FEDGRAPH",
    "FEDMF",
    "FEDOPT",
    "FEDPER",
    "FEDPROX",
    "FEDPUB",
    "FEDSAGEPLUS",
    "FEDSAGE_LOCAL",
    "FESOG",
    "GCFL",
    "GCFLPLUS",
    "GRAPHSAINT",
    "LABEL_GUIDED",
    "LLCG",
    "LOCAL",
    "LOSS",
    "METHODS",
    "SCAFFOLD",
    "TRAINED",
    "AllSilos",
    "AtSilos",
    "AveragedModel",
    "Call",
    "Calls",
    "Caution",
    "ClientBlock",
    "ClientOp",
    "Clients",
    "Controller",
    "Correction",
    "Decoder",
    "Either",
    "Empty",
    "Federation",
    "Fetch",
    "FieldSpec",
    "Fitted",
    "Gather",
    "GlobalModel",
    "HaloSums",
    "InitialModel",
    "Key",
    "Kind",
    "LocalModel",
    "LossTerm",
    "Maybe",
    "Method",
    "MethodConfig",
    "Needs",
    "NoOptions",
    "Op",
    "OwnGraph",
    "OwnModel",
    "Params",
    "Patched",
    "Payload",
    "Proximal",
    "PullForm",
    "Ragged",
    "Repeat",
    "RoundReport",
    "RunStanding",
    "Server",
    "ServerAdam",
    "ServerHolds",
    "ServerMomentum",
    "ServerState",
    "Shared",
    "Shift",
    "Stacked",
    "Start",
    "State",
    "StepNodes",
    "Sum",
    "Training",
    "TrainingInputs",
    "Uncut",
    "WeightedMean",
    "anyone",
    "average_and_step",
    "averaging",
    "begin",
    "begin_own",
    "calls",
    "dense",
    "each_as_base",
    "exact_weights",
    "keep_previous_if_not_finite",
    "knob_fields",
    "knob_specs",
    "learn_rows",
    "learn_rows_steps",
    "onto",
    "op",
    "per_client",
    "personal",
    "program",
    "pull",
    "repeat",
    "row_numbers",
    "rows_for",
    "rows_from",
    "selected",
    "shared",
    "stack",
    "stacked",
    "stacked_copies",
    "state_specs",
    "tensors_under",
    "train",
    "untouched_rows_after_round",
    "up_to",
    "weight_specs",
    "when",
    "with_prefix",
    "zero_weights",
]
