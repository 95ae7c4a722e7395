"""Kernels equal what they stand in for: draws bit for bit, losses and steps up to rounding."""

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import silograph
from silograph.core.key import Key, hash_text, keep_probability, mix, mix_words, signed
from silograph.graph.block.block import ClientBlock, Route
from silograph.graph.graph import Graph
from silograph.nn import kernel_block
from silograph.nn import kernel_block as kernel_model
from silograph.nn.backends import COMPILED
from silograph.nn.fit import Schedule, Training
from silograph.nn.mini_batches import FULL, Fanout, Reached, batches
from silograph.nn.model import Model
from silograph.nn.optim import SGD
from silograph.task.counts import node_loss

pytest.importorskip("numba")

import numba

from silograph.nn.kernels import arrays, draws, layers, training
from silograph.nn.kernels import training as loss_kernels

MakeGraph = Callable[..., Graph]
CutBlock = Callable[..., tuple[ClientBlock, Route]]
WORD = st.integers(0, 2**64 - 1)
DROPS = [0.0, 1e-6, 0.3, 0.5, 0.999, 1 - 1e-9]


@cache
def called(function: Any) -> Callable[..., Any]:
    """A function that kernels copy, as one that Python may call."""
    # As for kernels: what is returned to a function that counts references must have been counted.
    options: dict[str, Any] = {"_nrt": function.targetoptions["_nrt"]}
    made: Callable[..., Any] = numba.njit(fastmath=arrays.FAST, error_model="numpy", **options)(
        function.py_func
    )
    return made


def test_python_cannot_call_what_kernels_copy() -> None:
    """They have no code for Python to call; without the refusal such a call ends the process."""
    word = np.uint64(7)

    def copying(word: Any) -> Any:
        return draws.mix(word)

    copies: Any = numba.njit(copying)
    for _ in range(2):
        with pytest.raises(TypeError, match=r"^mix is for kernels to copy: Python cannot call it$"):
            draws.mix(word)
        assert copies(word) == mix(7)  # now it is compiled for such numbers


SIZES = (0, 1, 2, 5)


@pytest.mark.law(sample=6)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_products_have_the_bits_of_numpy_dot_in_kernels(dtype: Any) -> None:
    """Of vectors, matrices and empty ones, each of both factors in rows or in columns."""

    @numba.njit
    def dot(a: Any, b: Any, out: Any) -> None:
        np.dot(a, b, out)

    @numba.njit
    def multiply(a: Any, b: Any, out: Any) -> None:
        layers.multiply(a, b, out)

    rng = np.random.default_rng(0)
    for (m, k, n), orders in itertools.product(
        itertools.product(SIZES, repeat=3), itertools.product("CF", repeat=2)
    ):
        a, b = (
            np.asarray(rng.normal(size=shape), dtype, order=order)  # type: ignore[call-overload]
            for shape, order in zip(((m, k), (k, n)), orders, strict=True)
        )
        expected, got = np.full((m, n), 7, dtype), np.full((m, n), 7, dtype)
        dot(a, b, expected)
        multiply(a, b, got)
        assert np.array_equal(got, expected), (m, k, n, orders)


def test_products_of_strided_matrices_or_mixed_types_are_not_compiled() -> None:
    @numba.njit
    def multiply(a: Any, b: Any, out: Any) -> None:
        layers.multiply(a, b, out)

    square = np.ones((4, 4))
    for factors in ((square[::2, ::2], square[:2, :2].copy()), (square, square.astype(np.float32))):
        with pytest.raises(numba.TypingError, match="products need contiguous matrices"):
            multiply(*factors, np.empty((len(factors[0]), factors[1].shape[1])))


@given(word=WORD)
def test_mix_is_mix(word: int) -> None:
    assert called(draws.mix)(np.uint64(word)) == mix(word)


@given(key=WORD, number=WORD)
def test_fold_is_fold(key: int, number: int) -> None:
    assert called(draws.fold)(np.uint64(key), np.uint64(number)) == Key(key).fold(number).value


@given(key=WORD, number=st.integers(0, 2**63 - 1))
def test_counters_of_loops_fold_like_any_number(key: int, number: int) -> None:
    assert called(draws.fold)(np.uint64(key), number) == Key(key).fold(number).value


@pytest.mark.parametrize("name", ["epoch", "batch", "dropout", "order", "neighbors"])
def test_purposes_are_those_of_the_torch_form(name: str) -> None:
    """Key of a text = key of its hash, which the kernels hold as a constant."""
    constants = {
        "epoch": training._EPOCH,
        "batch": training._BATCH,
        "dropout": layers._DROPOUT,
        "order": draws._ORDER,
        "neighbors": draws._NEIGHBORS,
    }
    assert int(constants[name]) == hash_text(name)
    assert called(draws.fold)(np.uint64(7), constants[name]) == Key(7).fold(name).value


def tables(
    block: ClientBlock, width: int = 6, fanout: tuple[int, ...] = (), drop: float = 0.0
) -> tuple[arrays.RowArrays, arrays.ModelShape, arrays.Scratch]:
    """The arrays of a block, of a two-layer model of this hidden width, and a thread's memory."""
    model = Model("gcn", block.num_features, width, 3, 2, drop, "multiclass")
    data = kernel_block.prepare_block(model, block, compact=False)
    shape = kernel_model.model_shape(
        model, Schedule(1, neighbors=Fanout(fanout) if fanout else FULL)
    )
    clients, dtype = np.arange(block.num_clients), np.dtype(np.float64)
    return data.rows, shape, arrays.scratch(data.rows, data.inputs, shape, clients, dtype, 1, 1)


@settings(max_examples=30)
@given(key=WORD, width=st.integers(1, 13), drop=st.sampled_from(DROPS))
def test_drop_is_keep(
    make_graph: MakeGraph, cut_block: CutBlock, key: int, width: int, drop: float
) -> None:
    block, _ = cut_block(make_graph(12), 1)
    rows, shape, memory = tables(block, width, drop=drop)
    h = np.arange(1.0, 12 * width + 1).reshape(12, width)
    expected = Key(key).keep(block.row_key, width, drop).numpy() * h * (1 / keep_probability(drop))
    for i in range(12):
        called(draws.drop)(
            h, i, rows.row_key[i], np.uint64(key), shape.threshold, shape.scale, memory
        )
    np.testing.assert_array_equal(h, expected)


@settings(max_examples=30)
@given(key=WORD, size=st.integers(1, 30))
def test_shuffled_is_the_order_of_batches(
    make_graph: MakeGraph, cut_block: CutBlock, key: int, size: int
) -> None:
    block, _ = cut_block(make_graph(60), 1)
    rows, _, _ = tables(block)
    parts = batches(block, size, Key(key))
    order = np.empty_like(rows.train)
    called(draws.shuffled)(rows.train, rows.row_key, np.uint64(key), order)
    if len(parts) > 1:  # one batch is not put in order
        assert torch.cat(parts).tolist() == order.tolist()
    assert sorted(order.tolist()) == rows.train.tolist()


Edges = list[dict[tuple[int, int], float]]


def edges_by_torch(
    block: ClientBlock, seeds: list[int], fanout: tuple[int, ...], key: Key
) -> Edges:
    """Row, neighbor, and how many edges it stands for, of each layer; the last layer is the first.

    Rows of a layer are those of the layer above and their neighbors.
    """
    rows, found = seeds, []
    for hop, count in enumerate(fanout):
        layer = len(fanout) - 1 - hop
        t = torch.tensor(rows)
        reached = Reached(t, torch.zeros_like(t), torch.tensor([0]), torch.tensor([0, len(t)]))
        edges = Fanout((count,)).draw(block, reached, 0, key.fold("neighbors", layer), {})
        parts = edges.position, edges.neighbor, edges.share
        drawn = zip(*(part.tolist() for part in parts), strict=True)
        found.append({(rows[i], j): s for i, j, s in drawn})
        rows = [*rows, *sorted({j for _, j in found[-1]} - set(rows))]
    return found


@settings(max_examples=30)
@given(
    key=WORD,
    client=st.integers(0, 2),
    fanout=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    some=st.integers(1, 6),
)
def test_sample_draws_the_edges_of_the_torch_form(
    make_graph: MakeGraph,
    cut_block: CutBlock,
    key: int,
    client: int,
    fanout: tuple[int, int],
    some: int,
) -> None:
    block, _ = cut_block(make_graph(45), 3)
    rows, shape, memory = tables(block, fanout=fanout)
    one = block.take(torch.tensor([client]))
    seeds = one.split.train.nonzero()[:some, 0].tolist()
    called(draws.sample)(rows, client, shape, np.array(seeds), np.uint64(key), memory)
    first = int(block.adj.indptr[block.off[client]])
    pairs = zip(one.adj.row.tolist(), one.adj.indices.tolist(), strict=True)
    values = {pair: rows.value[first + e] for e, pair in enumerate(pairs)}
    expected = edges_by_torch(one, seeds, fanout, Key(key))
    for layer, drawn in zip((1, 0), expected, strict=True):
        found = {}
        for i in range(memory.m[layer + 1]):
            for e in range(memory.ptr[layer, i], memory.ptr[layer, i + 1]):
                edge = int(memory.nodes[i]), int(memory.nodes[memory.col[e]])
                assert edge not in found
                found[edge] = memory.value[e] / values[edge]
        assert found == pytest.approx(drawn, rel=1e-12)
    assert memory.nodes[: len(seeds)].tolist() == seeds
    assert memory.m[2] == len(seeds)
    assert bool((memory.place == -1).all())  # ready for the next step


@given(
    row=WORD,
    keys=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=12, unique=True),
    data=st.data(),
)
def test_smallest_scores_win(row: int, keys: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(keys)))
    words, col = np.array(keys, np.int64), np.arange(len(keys), dtype=np.int32)
    scores, edges = np.empty(count, np.int64), np.empty(count, np.int64)
    called(draws.smallest)(
        scores, edges, 0, len(keys), np.uint64(row), words.view(np.uint64), col, count
    )
    expected = mix_words(torch.tensor(keys) ^ signed(row))
    assert scores.tolist() == expected.sort().values[:count].tolist()
    assert edges.tolist() == expected.argsort()[:count].tolist()


LOGIT = st.floats(-800, 800)


@given(logits=st.lists(LOGIT, min_size=1, max_size=6), data=st.data(), weight=st.floats(0.01, 1))
def test_softmax_gradient_is_that_of_autograd(
    logits: list[float], data: st.DataObject, weight: float
) -> None:
    y = data.draw(st.integers(0, len(logits) - 1))
    leaf = torch.tensor([logits], dtype=torch.float64, requires_grad=True)
    loss = node_loss(leaf, torch.tensor([y]), "multiclass")
    (grad,) = torch.autograd.grad(weight * loss.sum(), leaf)
    out = np.array([logits])
    found = called(loss_kernels.softmax_gradient)(out, 0, y, weight)
    assert found == pytest.approx(float(loss.detach()), rel=1e-10, abs=1e-10)
    np.testing.assert_allclose(out, grad.numpy(), rtol=0, atol=1e-12)


@given(
    bits=st.lists(st.tuples(LOGIT, st.integers(-1, 1)), min_size=1, max_size=6),
    weight=st.floats(0.01, 1),
)
def test_gradient_of_bits_is_that_of_autograd(bits: list[tuple[float, int]], weight: float) -> None:
    logits, y = [v for v, _ in bits], np.array([b for _, b in bits])
    leaf = torch.tensor([logits], dtype=torch.float64, requires_grad=True)
    loss = node_loss(leaf, torch.from_numpy(y)[None], "multilabel")
    (grad,) = torch.autograd.grad(weight * loss.sum(), leaf)
    out = np.array([logits])
    found = called(loss_kernels.bits_gradient)(out, 0, y, weight)
    assert found == pytest.approx(float(loss.detach()), rel=1e-10, abs=1e-10)
    np.testing.assert_allclose(out, grad.numpy(), rtol=0, atol=1e-12)


@pytest.mark.slow  # compiles every kernel
def test_a_change_in_any_file_of_the_kernels_compiles_them_anew(tmp_path: Path) -> None:
    """Numba itself looks at the file of the function only, and would go on with old code."""
    package = tmp_path / "silograph"
    shutil.copytree(Path(silograph.__file__).parent, package)
    shutil.rmtree(package / "nn" / "kernels" / "__pycache__", ignore_errors=True)
    code = (
        "import numpy as np\n"
        "from silograph.nn.kernels.optim import untouched_rows_after\n"
        "from silograph.nn.kernels.arrays import StepRule\n"
        "rule = StepRule(False, 0.1, 0.5, 0.0, 0, 0.0, 0.0, 0.0, 0.0)\n"
        "untouched_rows_after(np.ones(1), rule, 1, np.empty((4, 1)))\n"
        "print(sum(untouched_rows_after.stats.cache_misses.values()))\n"
    )

    def misses() -> str:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        environment.pop("NUMBA_CACHE_DIR", None)
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True
        )
        return done.stdout.strip() or done.stderr

    assert [misses(), misses()] == ["1", "0"]
    masks = package / "nn" / "kernels" / "masks.py"
    masks.write_text(masks.read_text() + "\n# changed\n")
    assert [misses(), misses()] == ["1", "0"]


def test_steps_without_data_see_weights_that_are_written_in_place() -> None:
    """Results are kept for weights of the same bits, which torch does not see NumPy change."""
    model, optimizer = Model("gcn", 2, 2, 1, 2, 0.0, "multiclass"), SGD(0.1, 0.5)
    training = Training(model, optimizer, Schedule(1))
    start = torch.arange(6.0).reshape(2, 3)
    for _ in range(2):
        for steps in (1, 2):
            fresh = COMPILED.untouched_rows_after(
                Training(model, optimizer, Schedule(1)), start.clone(), steps
            )
            assert torch.equal(COMPILED.untouched_rows_after(training, start, steps), fresh)
        start.numpy()[0, 0] += 1
