"""Small kernels for the gate's own tests: a good one, and one for each thing that can be bad."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def good(a, b, out, steps, SIZE: tl.constexpr):
    """out = sum over steps of a_i b_i: matrix instructions, asynchronous copies, nothing spilled.

    Too many stages need too much shared memory, too few warps too many registers.
    """
    row = tl.arange(0, SIZE)[:, None]
    column = tl.arange(0, SIZE)[None, :]
    total = tl.zeros([SIZE, SIZE], tl.float32)
    for i in range(steps):
        x = tl.load(a + i * SIZE * SIZE + row * SIZE + column)
        y = tl.load(b + i * SIZE * SIZE + row * SIZE + column)
        total = tl.dot(x, y, total)
    tl.store(out + row * SIZE + column, total.to(out.dtype.element_ty))


@triton.jit
def chain(a, b, out, steps, SIZE: tl.constexpr):
    """out = sum over steps of (a b_i^T) b_i: one product enters the other, as in attention."""
    row = tl.arange(0, SIZE)[:, None]
    column = tl.arange(0, SIZE)[None, :]
    x = tl.load(a + row * SIZE + column)
    total = tl.zeros([SIZE, SIZE], tl.float32)
    for i in range(steps):
        y = tl.load(b + i * SIZE * SIZE + row * SIZE + column)
        total = tl.dot(tl.dot(x, tl.trans(y)).to(y.dtype), y, total)
    tl.store(out + row * SIZE + column, total.to(out.dtype.element_ty))


@triton.jit
def by_hand(a, b, out, SIZE: tl.constexpr):
    """The same for one step, without a matrix instruction."""
    row = tl.arange(0, SIZE)
    x = tl.load(a + row[:, None] * SIZE + row[None, :])
    y = tl.load(b + row[:, None] * SIZE + row[None, :])
    total = tl.sum(x[:, :, None].to(tl.float32) * y[None, :, :].to(tl.float32), 1)
    tl.store(out + row[:, None] * SIZE + row[None, :], total.to(out.dtype.element_ty))


@triton.jit
def broken(a):
    """Does not compile."""
    tl.static_assert(False, "broken on purpose")


@triton.jit
def many_kinds(tensor, number, one, tuples, floating, nothing, flag, FUNCTION: tl.constexpr):
    """Every kind of argument that a launch may have."""
    value = tl.load(tensor) * number + one + floating + tl.load(tuples[0][0]) * tuples[1]
    tl.store(tensor, value)
