"""StepRule of the optimizers on vectors, as torch's fused kernels take them."""

import numpy as np

from silograph.core.numba_extensions import pointer_to
from silograph.nn.kernels.arrays import ZERO, Array, StepRule, compiled, kernel

TOGETHER = 4096  # values without data that are updated in one step: they stay in the cache


@compiled
def adam(p: Array, g: Array, m: Array, v: Array, steps: StepRule, t: int) -> None:
    """Take step number t of Adam."""
    length, root = adam_factors(steps, t)
    adam_step(p, g, m, v, steps, t, length, root)


@compiled
def adam_factors(steps: StepRule, t: int) -> tuple[float, float]:
    """Return the length of step number t of Adam, and the factor of its root."""
    return steps.lr / (1 - steps.beta1**t), 1 / np.sqrt(1 - steps.beta2**t)


@compiled
def adam_step(
    p: Array, g: Array, m: Array, v: Array, steps: StepRule, t: int, length: float, factor: float
) -> None:
    """Take step number t of Adam; its factors are those of `adam_factors`.

    Moments are not read after a client's only step, so Adam allocates no rows for them.
    """
    b1, b2 = p.dtype.type(steps.beta1), p.dtype.type(steps.beta2)
    # Worked out in float64: in float32 1 - 0.999 is 5e-5 off, and float32 results with it.
    c1, c2 = p.dtype.type(1 - steps.beta1), p.dtype.type(1 - steps.beta2)
    decay, eps = p.dtype.type(steps.decay), p.dtype.type(steps.eps)
    size, root = p.dtype.type(length), p.dtype.type(factor)
    if t == 1:  # both moments are 0 and their corrections cancel: nothing to load, no root
        lr = p.dtype.type(steps.lr)
        if m.shape[0] == 0:
            for h in range(p.shape[0]):
                grad = g[h] + decay * p[h]
                p[h] -= lr * grad / (abs(grad) + eps)
            return
        for h in range(p.shape[0]):
            grad = g[h] + decay * p[h]
            m[h] = c1 * grad
            v[h] = c2 * grad * grad
            p[h] -= lr * grad / (abs(grad) + eps)
        return
    for h in range(p.shape[0]):
        grad = g[h] + decay * p[h]
        first = b1 * m[h] + c1 * grad
        second = b2 * v[h] + c2 * grad * grad
        m[h] = first
        v[h] = second
        p[h] -= size * first / (np.sqrt(second) * root + eps)


@compiled
def sgd(p: Array, g: Array, m: Array, steps: StepRule, t: int) -> None:
    """Take step number t of SGD: v = mu v + g, at first v = g."""
    lr, decay = p.dtype.type(steps.lr), p.dtype.type(steps.decay)
    if steps.beta1 == 0:
        for h in range(p.shape[0]):
            p[h] -= lr * (g[h] + decay * p[h])
    else:
        mu = p.dtype.type(steps.beta1)
        if t == 1:
            for h in range(p.shape[0]):
                m[h] = 0
        for h in range(p.shape[0]):
            m[h] = mu * m[h] + g[h] + decay * p[h]
            p[h] -= lr * m[h]


@compiled
def pull(p: Array, g: Array, start: Array, steps: StepRule) -> None:
    """Add to g the gradient of mu/2 |p - start|^2."""
    mu = p.dtype.type(steps.mu)
    for h in range(p.shape[0]):
        g[h] += mu * (p[h] - start[h])


@compiled
def step(p: Array, g: Array, start: Array, m: Array, v: Array, steps: StepRule, t: int) -> None:
    """Take step number t along g, which it may change.

    Before the first, moments may hold anything; `start` is read only where there is a pull.
    """
    if steps.mu > 0:
        pull(p, g, start, steps)
    if steps.adam:
        adam(p, g, m, v, steps, t)
    else:
        sgd(p, g, m, steps, t)


@compiled
def steps_without_data(
    p: Array,
    m: Array,
    v: Array,
    steps: StepRule,
    before: int,
    count: int,
    start: Array,
    grad: Array,
) -> None:
    """Take `count` steps after the first `before` with gradient 0; fills `start` and `grad`."""
    for h in range(p.shape[0]):
        start[h] = p[h]
    for t in range(count):
        for h in range(p.shape[0]):
            grad[h] = 0
        step(p, grad, start, m, v, steps, before + t + 1)


@kernel
def untouched_rows_after(p: Array, steps: StepRule, count: int, memory: Array) -> None:
    """Take the first `count` steps of a fresh optimizer with gradient 0 on weights p (N,).

    `memory` is (4, `TOGETHER`): a kernel that allocates takes longer to compile.
    """
    rest_range(p, pointer_to(steps), count, memory[0], memory[1], memory[2], memory[3])


@kernel
def kept_rows_after(
    p: Array,
    m: Array,
    v: Array,
    wanted: Array,
    steps: StepRule,
    before: int,
    count: int,
    memory: Array,
) -> None:
    """Take `count` steps with gradient 0 on weights p (R, D) and their moments, in place.

    Args:
        p: weights.
        m: first moments, or velocities.
        v: second moments, (0, D) if the optimizer has none.
        wanted: (R,) bool rows that are needed; the others are left as they are.
        steps: the optimizer.
        before: steps that it has taken.
        count: steps to take.
        memory: (2, `TOGETHER`).
    """
    kept_range(p, m, v, wanted, pointer_to(steps), before, count, memory[0], memory[1])


@compiled
def kept_range(
    p: Array,
    m: Array,
    v: Array,
    wanted: Array,
    steps: StepRule,
    before: int,
    count: int,
    start: Array,
    grad: Array,
) -> None:
    """Do what `kept_rows_after` does."""
    width = p.shape[1]
    weights, first, second = p.reshape(p.size), m.reshape(m.size), v.reshape(v.size)
    most = start.shape[0] // width if start.shape[0] > width else 1
    row = 0
    while row < p.shape[0]:
        if not wanted[row]:
            row += 1
            continue
        end = row + 1
        while end < p.shape[0] and end - row < most and wanted[end]:
            end += 1
        # A row wider than the memory is updated in several pieces.
        for a in range(row * width, end * width, start.shape[0]):
            b = min(a + start.shape[0], end * width)
            m_part, v_part = first[a:b], second[a:b]
            steps_without_data(weights[a:b], m_part, v_part, steps, before, count, start, grad)
        row = end


@compiled
def rest_range(
    p: Array, steps: StepRule, count: int, start: Array, grad: Array, m: Array, v: Array
) -> None:
    """Do what `untouched_rows_after` does."""
    for begin in range(0, p.shape[0], TOGETHER):
        part = p[begin : begin + TOGETHER]
        steps_without_data(part, m, v, steps, ZERO, count, start, grad)
