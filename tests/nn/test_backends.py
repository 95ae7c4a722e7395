"""One law for all tiers: compiled kernels do what torch does, up to rounding, work included."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from layers import COMPILED_MODELS
from silograph.core.errors import ProtocolError
from silograph.core.key import Key
from silograph.core.payload import Patched, Stacked
from silograph.core.work import Meter, metered
from silograph.graph.block.block import ClientBlock, Route
from silograph.graph.graph import Graph
from silograph.nn.backends import BACKENDS, COMPILED
from silograph.nn.conv import (
    GCN,
    SAGE,
    Params,
    PlainConv,
    Scales,
    glorot_init,
    inverse,
    inverse_root,
    rooted_init,
)
from silograph.nn.correction import Correction, Proximal
from silograph.nn.fit import (
    Fitted,
    Schedule,
    Training,
    TrainingInputs,
    stacked_copies,
    untouched_rows_after,
    whole_memory,
)
from silograph.nn.forward import Stage
from silograph.nn.masked import NearStart, SparseMasks
from silograph.nn.mini_batches import Fanout
from silograph.nn.model import MODELS, Model, layers_of
from silograph.nn.optim import SGD, Adam, Optimizer

pytest.importorskip("numba")

MakeGraph = Callable[..., Graph]
CutBlock = Callable[..., tuple[ClientBlock, Route]]
TOLERANCE = 1e-10
TIERS: tuple[str, ...] = ("torch", "compiled")
ADAM = Adam(lr=0.05, weight_decay=5e-4)
MODEL = Model("gcn", 4, 4, 2, 2, 0.0, "multiclass")
SCHEDULES = {
    "full": Schedule(3),
    "batches": Schedule(2, batch_size=3),
    "drawn": Schedule(2, batch_size=4, neighbors=Fanout((2, 1))),
    "drawn, one batch": Schedule(2, neighbors=Fanout((1, 2))),
    "every neighbor of the first hop": Schedule(2, batch_size=4, neighbors=Fanout((0, 2))),
}


@dataclass(frozen=True)
class Case:
    model: Model
    block: ClientBlock
    optimizer: Optimizer
    schedule: Schedule
    start: Params
    memory: Params | None
    corrections: tuple[Correction, ...] = ()

    @property
    def training(self) -> Training:
        return Training(self.model, self.optimizer, self.schedule, self.corrections)

    def run(self, kernels: str) -> tuple[Fitted, Meter]:
        with metered(self.block.num_clients) as meter:
            fitted = BACKENDS[kernels].fit(
                self.training, TrainingInputs(self.block, self.start, self.memory, Key.of(3))
            )
        return fitted, meter


def whole(field: Stacked | Patched) -> torch.Tensor:
    return field.stacked().t if isinstance(field, Patched) else field.t


def case_of(make_graph: MakeGraph, cut_block: CutBlock, **changes: Any) -> Case:
    options: dict[str, Any] = {
        "conv": "gcn",
        "layers": 2,
        "hidden": 6,
        "head": "conv",
        "dropout": 0.5,
        "input_dropout": 0.0,
        "sparse": True,
        "multilabel": False,
        "optimizer": ADAM,
        "schedule": Schedule(3),
        "shared": True,
        "keep": False,
        "clients": 4,
        "dtype": torch.float64,
        "missing": 0.1,
        "corrections": (),
    } | changes
    graph = make_graph(
        60,
        features=12,
        sparse=options["sparse"],
        multilabel=options["multilabel"],
        missing=options["missing"],
    )
    block, _ = cut_block(graph, options["clients"], dtype=options["dtype"])
    model = Model(
        options["conv"],
        12,
        options["hidden"],
        graph.num_classes,
        options["layers"],
        options["dropout"],
        graph.task,
        head=options["head"],
        input_dropout=options["input_dropout"],
    )
    start = model.init_weights(Key.of(1), options["dtype"])
    if not options["shared"]:
        start = stacked_copies(start, block.num_clients)
    memory = None
    if options["keep"]:
        stacked = start if not options["shared"] else stacked_copies(start, block.num_clients)
        memory = options["optimizer"].init(stacked)
    steps = options["optimizer"], options["schedule"]
    return Case(model, block, *steps, start, memory, options["corrections"])


def assert_equal(case: Case, tolerance: float = TOLERANCE) -> None:
    (ours, our_work), (theirs, their_work) = case.run("compiled"), case.run("torch")
    assert ours.weights.keys() == theirs.weights.keys()
    for name, w in theirs.weights.items():
        assert type(ours.weights[name]) is type(w)
        torch.testing.assert_close(
            whole(ours.weights[name]), whole(w), rtol=0, atol=tolerance, msg=name
        )
    assert list(ours.memory) == list(theirs.memory)
    for name, m in theirs.memory.items():
        torch.testing.assert_close(ours.memory[name], m, rtol=0, atol=tolerance, msg=name)
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=0, atol=tolerance)
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=0, atol=tolerance)
    assert torch.equal(ours.steps, theirs.steps)
    assert torch.equal(our_work.flops, their_work.flops)
    for kind in their_work.apart:
        assert torch.equal(our_work.part(kind).flops, their_work.part(kind).flops)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("conv", COMPILED_MODELS)
def test_layers_and_schedules(
    make_graph: MakeGraph, cut_block: CutBlock, conv: str, sparse: bool, schedule: str
) -> None:
    changes = {"conv": conv, "sparse": sparse, "schedule": SCHEDULES[schedule]}
    assert_equal(case_of(make_graph, cut_block, **changes))


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("conv", COMPILED_MODELS)
def test_depth(make_graph: MakeGraph, cut_block: CutBlock, conv: str, layers: int) -> None:
    for schedule in (Schedule(2), Schedule(2, batch_size=3, neighbors=Fanout((2,) * layers))):
        changes = {"conv": conv, "layers": layers, "schedule": schedule}
        assert_equal(case_of(make_graph, cut_block, **changes))


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("head", ["conv", "linear"])
@pytest.mark.parametrize("conv", ["gcn", "sage"])
def test_widths_and_heads(make_graph: MakeGraph, cut_block: CutBlock, conv: str, head: str) -> None:
    """Hidden layers wider and narrower than each other and than the outputs."""
    hops = 2 if head == "linear" else 3
    schedules = Schedule(2), Schedule(2, batch_size=3, neighbors=Fanout((2,) * hops))
    for schedule, hidden in itertools.product(schedules, ((7, 2), (1, 9))):
        changes = {"conv": conv, "head": head, "hidden": hidden, "layers": 3, "schedule": schedule}
        for keep, sparse in ((False, True), (True, False)):
            assert_equal(case_of(make_graph, cut_block, keep=keep, sparse=sparse, **changes))
    assert_equal(case_of(make_graph, cut_block, conv=conv, head=head, dtype=torch.float64))


def test_a_list_of_equal_widths_is_one_width(make_graph: MakeGraph, cut_block: CutBlock) -> None:
    for kernels in TIERS:
        one, listed = (
            case_of(make_graph, cut_block, layers=3, hidden=hidden).run(kernels)[0]
            for hidden in (6, (6, 6))
        )
        assert torch.equal(one.logits, listed.logits)


@pytest.mark.parametrize(
    ("scales", "rooted"),
    [
        (Scales(), False),
        (Scales(inverse, None, inverse_root), False),
        (Scales(None, inverse_root), True),
    ],
)
def test_a_convolution_of_ones_own_is_compiled(
    make_graph: MakeGraph,
    cut_block: CutBlock,
    monkeypatch: pytest.MonkeyPatch,
    scales: Scales,
    rooted: bool,
) -> None:
    """A convolution is a value: its scales and its second matrix are all that kernels need."""
    own = PlainConv("Own", rooted_init if rooted else glorot_init, scales, rooted=rooted)
    monkeypatch.setitem(MODELS, "own", lambda model: layers_of(model, lambda _: own))
    for schedule in (Schedule(2), SCHEDULES["drawn"]):
        assert_equal(case_of(make_graph, cut_block, conv="own", schedule=schedule))


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    "optimizer",
    [ADAM, Adam(0.05), SGD(0.3), SGD(0.3, 1e-3), SGD(0.3, 1e-3, 0.9)],
    ids=lambda o: f"{type(o).__name__}-{o.weight_decay}",
)
def test_optimizers_and_starts(
    make_graph: MakeGraph, cut_block: CutBlock, optimizer: Optimizer, shared: bool, keep: bool
) -> None:
    for schedule in (Schedule(3), Schedule(2, batch_size=4)):
        changes = {"optimizer": optimizer, "shared": shared, "keep": keep, "schedule": schedule}
        case = case_of(make_graph, cut_block, **changes)
        assert_equal(case)
        if keep:  # and on from there
            after, _ = case.run("torch")
            weights = {name: whole(w) for name, w in after.weights.items()}
            assert_equal(replace(case, start=weights, memory=whole_memory(after.memory)))


@pytest.mark.law(sample=24)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("conv", COMPILED_MODELS)
def test_a_pull_to_the_start(
    make_graph: MakeGraph, cut_block: CutBlock, conv: str, sparse: bool, schedule: str
) -> None:
    pull = (Proximal(0.5),)
    changes = {"conv": conv, "sparse": sparse, "schedule": SCHEDULES[schedule]}
    case = case_of(make_graph, cut_block, corrections=pull, **changes)
    assert_equal(case)
    for optimizer, keep in itertools.product((SGD(0.3, 1e-3), SGD(0.3, 1e-3, 0.9)), (True, False)):
        changes |= {"optimizer": optimizer, "keep": keep, "shared": not keep}
        assert_equal(case_of(make_graph, cut_block, corrections=pull, **changes))
    for kernels in TIERS:
        free, held = (
            whole(replace(case, corrections=c).run(kernels)[0].weights["0.weight"])
            for c in ((), pull)
        )
        assert not torch.equal(free, held)


def test_pulls_add_up(make_graph: MakeGraph, cut_block: CutBlock) -> None:
    case = case_of(make_graph, cut_block, corrections=(Proximal(0.5),))
    for kernels in TIERS:
        one, _ = case.run(kernels)
        two, _ = replace(case, corrections=(Proximal(0.2), Proximal(0.3))).run(kernels)
        for name, w in one.weights.items():
            torch.testing.assert_close(
                whole(two.weights[name]), whole(w), rtol=0, atol=TOLERANCE, msg=name
            )


@pytest.mark.parametrize(
    "schedule", [Schedule(3), Schedule(2, batch_size=5, neighbors=Fanout((3, 2)))]
)
def test_labels_of_bits(make_graph: MakeGraph, cut_block: CutBlock, schedule: Schedule) -> None:
    changes = {"multilabel": True, "schedule": schedule, "missing": 0.2}
    assert_equal(case_of(make_graph, cut_block, **changes))


def test_one_client_and_no_dropout(make_graph: MakeGraph, cut_block: CutBlock) -> None:
    assert_equal(case_of(make_graph, cut_block, clients=1, dropout=0.0))


def without_training_nodes(block: ClientBlock, client: int) -> ClientBlock:
    train = block.split.train & (block.client != client)
    return replace(block, split=replace(block.split, train=train))


@pytest.mark.parametrize("schedule", [Schedule(2), Schedule(2, batch_size=2)])
@pytest.mark.parametrize("keep", [True, False])
def test_a_client_without_training_nodes_stays_as_it_is(
    make_graph: MakeGraph, cut_block: CutBlock, keep: bool, schedule: Schedule
) -> None:
    case = case_of(make_graph, cut_block, keep=keep, schedule=schedule)
    case = replace(case, block=without_training_nodes(case.block, 2))
    assert_equal(case)
    for kernels in TIERS:
        fitted, _ = case.run(kernels)
        for name, w in fitted.weights.items():
            assert torch.equal(whole(w)[2], case.start[name])
        assert fitted.loss[2] == 0


@pytest.mark.parametrize("kernels", ["torch", "compiled"])
def test_nobody_has_training_nodes(
    make_graph: MakeGraph, cut_block: CutBlock, kernels: str
) -> None:
    case = case_of(make_graph, cut_block)
    none = torch.zeros_like(case.block.split.train)
    block = replace(case.block, split=replace(case.block.split, train=none))
    fitted, meter = replace(case, block=block).run(kernels)
    for name, w in fitted.weights.items():
        assert torch.equal(whole(w), stacked_copies(case.start, 4)[name])
    assert not bool(fitted.loss.any())
    assert not bool(meter.flops.any())


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_clients_of_a_block_have_the_bits_of_blocks_of_one(
    make_graph: MakeGraph, cut_block: CutBlock, threads: int
) -> None:
    torch.set_num_threads(threads)
    for schedule in (Schedule(3), Schedule(2, batch_size=4, neighbors=Fanout((2, 2)))):
        case = case_of(make_graph, cut_block, schedule=schedule)
        many, _ = case.run("compiled")
        for c in range(case.block.num_clients):
            one, _ = replace(case, block=case.block.take(torch.tensor([c]))).run("compiled")
            for name, w in many.weights.items():
                assert torch.equal(whole(w)[c], whole(one.weights[name])[0])
            assert torch.equal(many.logits[case.block.client == c], one.logits)


@pytest.mark.parametrize("conv", COMPILED_MODELS)
def test_float32_is_near(make_graph: MakeGraph, cut_block: CutBlock, conv: str) -> None:
    case = case_of(make_graph, cut_block, conv=conv, dtype=torch.float32)
    ours, theirs = case.run("compiled")[0].logits, case.run("torch")[0].logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    assert torch.equal(ours.argmax(1), theirs.argmax(1))


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("conv", COMPILED_MODELS)
def test_predictions(make_graph: MakeGraph, cut_block: CutBlock, conv: str, sparse: bool) -> None:
    for layers, shared in itertools.product((1, 2, 3), (True, False)):
        case = case_of(
            make_graph, cut_block, conv=conv, sparse=sparse, layers=layers, shared=shared
        )
        found = []
        for kernels in TIERS:
            with metered(case.block.num_clients) as meter:
                found.append(
                    (BACKENDS[kernels].predict(case.model, case.start, case.block), meter.flops)
                )
        torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=TOLERANCE)
        assert torch.equal(found[0][1], found[1][1])


FIRST = [SGD(0.1, 1e-2, 0.9, "first"), Adam(0.1, 1e-2, decay_layers="first")]


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("conv", ["gcn", "sage", "mlp"])
def test_dropout_of_features(
    make_graph: MakeGraph, cut_block: CutBlock, conv: str, sparse: bool, schedule: str
) -> None:
    about: dict[str, Any] = {"conv": conv, "sparse": sparse, "schedule": SCHEDULES[schedule]}
    for dropout in (0.0, 0.5):
        case = case_of(make_graph, cut_block, **about, dropout=dropout, input_dropout=0.3)
        assert_equal(case)
        whole_x = replace(case, model=replace(case.model, input_dropout=0.0))
        assert not torch.allclose(case.run("torch")[0].logits, whole_x.run("torch")[0].logits)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("optimizer", FIRST)
@pytest.mark.parametrize("layers", [1, 3])
def test_decay_of_the_first_layer(
    make_graph: MakeGraph, cut_block: CutBlock, optimizer: Optimizer, layers: int, keep: bool
) -> None:
    about: dict[str, Any] = {"optimizer": optimizer, "layers": layers, "keep": keep}
    for mu in ((), (Proximal(0.5),)):
        case = case_of(make_graph, cut_block, **about, input_dropout=0.3, corrections=mu)
        assert_equal(case)


@pytest.mark.parametrize("mu", [0.0, 0.7])
@pytest.mark.parametrize(
    "optimizer", [ADAM, Adam(0.1), SGD(0.1, 1e-2), SGD(0.1, 1e-2, 0.9), *FIRST]
)
def test_weights_at_rest(optimizer: Optimizer, mu: float) -> None:
    start = Key.of(0).matrix(5, 3)
    weights = {"0.w": start[None].clone()}
    state = optimizer.init(weights)
    for _ in range(4):
        optimizer.step_(weights, {"0.w": mu * (weights["0.w"] - start)}, state)
    training = Training(MODEL, optimizer, Schedule(1), (Proximal(mu),) if mu else ())
    for found in (
        untouched_rows_after(training, start, 4),
        BACKENDS["torch"].untouched_rows_after(training, start, 4),
        BACKENDS["compiled"].untouched_rows_after(training, start, 4),
    ):
        torch.testing.assert_close(found, weights["0.w"][0], rtol=0, atol=1e-14)
    assert torch.equal(start, Key.of(0).matrix(5, 3))


def test_why_a_model_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    several = {0: GCN, 1: SAGE}
    monkeypatch.setitem(MODELS, "several", lambda model: layers_of(model, several.__getitem__))
    bare = Stage(GCN, 4, 4, drop=0.0, relu=False), Stage(GCN, 4, 2, drop=0.0, relu=False)
    monkeypatch.setitem(MODELS, "bare", lambda _: bare)
    training, cpu = Training(MODEL, ADAM, Schedule(1), (Proximal(1.0),)), torch.device("cpu")
    assert COMPILED.why_not(training, cpu) is None
    reason = COMPILED.why_not(replace(training, model=replace(MODEL, conv="gat")), cpu)
    assert reason == "model gat is not compiled"
    skipping = replace(MODEL, residual=True, layers=3)
    reason = COMPILED.why_not(replace(training, model=skipping), cpu)
    assert reason == "residual connections are not compiled"
    reason = COMPILED.why_not(replace(training, model=replace(MODEL, conv="several")), cpu)
    assert reason == "model several has several convolutions, which is not compiled"
    rooted = PlainConv("Own", rooted_init, Scales(own=inverse), rooted=True)
    monkeypatch.setitem(MODELS, "rooted", lambda model: layers_of(model, lambda _: rooted))
    reason = COMPILED.why_not(replace(training, model=replace(MODEL, conv="rooted")), cpu)
    assert reason == "model rooted is not compiled"
    reason = COMPILED.why_not(replace(training, model=replace(MODEL, conv="bare")), cpu)
    assert reason == "model bare has other steps between its layers, which is not compiled"
    reason = COMPILED.why_not(replace(training, corrections=(Zero(),)), cpu)
    assert reason == "correction Zero is not compiled"
    assert COMPILED.why_not(training, torch.device("cuda")) == "device cuda is not a CPU"


def test_a_correction_that_is_not_compiled_is_refused(
    make_graph: MakeGraph, cut_block: CutBlock
) -> None:
    case = case_of(make_graph, cut_block, corrections=(Zero(),))
    reason = "correction Zero is not compiled"
    message = f"^expected training that is compiled, got: {reason}; run with kernels=torch$"
    with pytest.raises(ProtocolError, match=message):
        case.run("compiled")


def test_a_start_with_strides_has_the_same_bits_and_no_kernel_of_its_own(
    make_graph: MakeGraph, cut_block: CutBlock
) -> None:
    from silograph.nn.kernels import training

    case = case_of(make_graph, cut_block)
    fitted, _ = case.run("compiled")
    known = len(training.train.signatures)  # type: ignore[attr-defined]
    turned = {name: w.t().contiguous().t() for name, w in case.start.items()}
    assert not turned["0.weight"].is_contiguous()
    again, _ = replace(case, start=turned).run("compiled")
    assert len(training.train.signatures) == known  # type: ignore[attr-defined]
    for name, field in fitted.weights.items():
        assert torch.equal(whole(again.weights[name]), whole(field))


def test_corrections_of_masks_are_refused_where_weights_have_none(
    make_graph: MakeGraph, cut_block: CutBlock
) -> None:
    """Before a run they say that the model will be wrapped, so the run may be compiled."""
    for pulls in ((SparseMasks(0.1), NearStart(0.5)), (NearStart(0.5),)):
        case = case_of(make_graph, cut_block, corrections=pulls)
        with pytest.raises(ProtocolError, match=f"{type(pulls[0]).__name__} is not compiled; run"):
            case.run("compiled")
        with pytest.raises(ProtocolError, match=f"{type(pulls[0]).__name__} is not compiled; run"):
            COMPILED.untouched_rows_after(case.training, case.start["0.weight"], 2)
        reason = COMPILED.why_not(case.training, torch.device("cpu"))
        assert reason == (None if len(pulls) > 1 else "correction NearStart is not compiled")


class Zero:
    """A correction that changes nothing, and treats clients apart: every weight is trained."""

    alike = False
    flops = copies = 0

    def of(self, clients: torch.Tensor) -> "Zero":
        del clients
        return self

    def __call__(
        self, grads: Params, weights: Mapping[str, torch.Tensor], start: Mapping[str, torch.Tensor]
    ) -> Params:
        del weights, start
        return grads


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_weights_that_are_left_out_are_where_training_takes_them(
    make_graph: MakeGraph, cut_block: CutBlock, schedule: str
) -> None:
    for pull in ((), (Proximal(0.5),)):
        case = case_of(make_graph, cut_block, corrections=pull, schedule=SCHEDULES[schedule])
        compact, _ = case.run("torch")
        dense, _ = replace(case, corrections=(*pull, Zero())).run("torch")
        assert isinstance(compact.weights["0.weight"], Patched)
        assert isinstance(dense.weights["0.weight"], Stacked)
        for name, w in dense.weights.items():
            torch.testing.assert_close(
                whole(compact.weights[name]), whole(w), rtol=0, atol=TOLERANCE, msg=name
            )


def test_all_layers_are_compiled_or_known_not_to_be() -> None:
    assert set(COMPILED_MODELS) <= set(MODELS)


def test_training_changes_nothing_that_it_was_given(
    make_graph: MakeGraph, cut_block: CutBlock
) -> None:
    for keep, kernels in itertools.product((True, False), TIERS):
        case = case_of(make_graph, cut_block, keep=keep, shared=not keep)
        before = {k: w.clone() for k, w in {**case.start, **(case.memory or {})}.items()}
        case.run(kernels)
        for name, w in {**case.start, **(case.memory or {})}.items():
            np.testing.assert_array_equal(w.numpy(), before[name].numpy())


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("sparse", [True, False])
def test_what_was_worked_out_for_one_model_and_schedule_is_not_used_for_another(
    make_graph: MakeGraph, cut_block: CutBlock, sparse: bool
) -> None:
    """Several of them on one block, and on a part of it, in turn: as each by itself."""
    shapes: dict[str, dict[str, Any]] = {
        "first": {"hidden": 6},
        "wider": {"hidden": 9},
        "deeper": {"hidden": 6, "layers": 3},
        "other sums": {"hidden": 6, "conv": "sage"},
        "more epochs": {"hidden": 6, "schedule": Schedule(5)},
        "other steps": {"hidden": 6, "schedule": Schedule(2, batch_size=4)},
        "fewer neighbors": {
            "hidden": 6,
            "schedule": Schedule(2, batch_size=4, neighbors=Fanout((1, 1))),
        },
        "more neighbors": {
            "hidden": 6,
            "schedule": Schedule(2, batch_size=4, neighbors=Fanout((3, 3))),
        },
    }
    block = case_of(make_graph, cut_block, sparse=sparse).block
    part = torch.tensor([0, 2])
    for _ in range(2):
        for changes in shapes.values():
            case = case_of(make_graph, cut_block, sparse=sparse, shared=True, keep=False, **changes)
            for mine, own in ((block, case.block), (block.called(part), case.block.called(part))):
                (found, work), (alone, its_work) = (
                    replace(case, block=b).run("compiled") for b in (mine, own)
                )
                assert torch.equal(found.logits, alone.logits)
                assert torch.equal(work.flops, its_work.flops)
                predicted, plain = (
                    COMPILED.predict(case.model, case.start, b) for b in (mine, own)
                )
                assert torch.equal(predicted, plain)
