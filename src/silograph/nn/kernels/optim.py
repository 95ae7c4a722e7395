"""StepRule of the optimizers on vectors, as torch's fused kernels take them."""

import numpy as np

from silograph.core.numba_extensions import pointer_to
from silograph.nn.kernels.arrays import Array, StepRule, compiled, kernel

TOGETHER = 4096  # values that `untouched_rows_after` updates in one step: they stay in the cache


@compiled
def adam(p: Array, g: Array, m: Array, v: Array, steps: StepRule, t: int) -> None:
    """Take step number t of Adam."""
    b1, b2 = p.dtype.type(steps.beta1), p.dtype.type(steps.beta2)
    # Worked out in float64: in float32 1 - 0.999 is 5e-5 off, and float32 results with it.
    c1, c2 = p.dtype.type(1 - steps.beta1), p.dtype.type(1 - steps.beta2)
    decay, eps = p.dtype.type(steps.decay), p.dtype.type(steps.eps)
    size = p.dtype.type(steps.lr / (1 - steps.beta1**t))
    root = p.dtype.type(1 / np.sqrt(1 - steps.beta2**t))
    if t == 1:  # both moments are 0 and their corrections cancel: nothing to load, no root
        lr = p.dtype.type(steps.lr)
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


@kernel
def untouched_rows_after(p: Array, steps: StepRule, count: int, memory: Array) -> None:
    """Take the first `count` steps of a fresh optimizer with gradient 0 on weights p (N,).

    `memory` is (4, `TOGETHER`): a kernel that allocates takes longer to compile.
    """
    rest_range(p, pointer_to(steps), count, memory[0], memory[1], memory[2], memory[3])


@compiled
def rest_range(
    p: Array, steps: StepRule, count: int, start: Array, grad: Array, m: Array, v: Array
) -> None:
    """Do what `untouched_rows_after` does."""
    for begin in range(0, p.shape[0], TOGETHER):
        part = p[begin : begin + TOGETHER]
        for h in range(part.shape[0]):
            start[h] = part[h]
        for t in range(count):
            for h in range(part.shape[0]):
                grad[h] = 0
            step(part, grad, start, m, v, steps, t + 1)
