"""Triton's interpreter, made as faithful to the chips as numpy allows.

Triton runs kernels in numpy where ``TRITON_INTERPRET=1`` was set when it was imported, one program
after another. What it gets wrong by itself, silently, and ``faithful`` puts right:

* dots, casts, sums and comparisons of bfloat16 and fp8 worked on raw bits or rounded half up;
  fp8 did not saturate; the bits of any dot depended on the shape of its block;
* tf32 was ignored: tensor cores read 10 bits of a float32's fraction;
* ``tl.fma`` rounded twice; ``tl.umulhi`` of negative numbers was another number;
* ``tl.maximum``, ``minimum``, ``clamp`` and ``tl.max`` handed a NaN on, or warned of it; a float
  that no integer holds became any integer instead of the nearest;
* float arguments and loop variables were Python's own, with Python's precision and ``//``; an
  integer argument of 32 to 64 bits had 32; and the argument 1 was a number, which a compiled
  kernel sees as a constant.

Not modelled: the order of sums in ``tl.sum`` and within one matrix instruction, approximate
exponentials, fp8's short accumulators, warps, shared memory, barriers, and anything that happens at
the same time.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as upstream

from tests.kernels.gpu.floats import NARROW, Array, decoded, encoded, fused, to_tf32

Handle = upstream.TensorHandle
Builder = upstream.InterpreterBuilder
_RTNE = upstream._ir.ROUNDING_MODE.RTNE
_TF32 = upstream._ir.INPUT_PRECISION.TF32
_TF32X3 = upstream._ir.INPUT_PRECISION.TF32x3
_PROPAGATE = upstream._ir.PROPAGATE_NAN.ALL

_cast = Builder.cast_impl
_binary = Builder.binary_op
_argument = upstream._implicit_cvt
_patch_lang = upstream._patch_lang
_patch_lang_tensor = upstream._patch_lang_tensor
_min_max = upstream.ReduceOps.min_max
_sum_upstream = upstream.ReduceOps.sum
_call = upstream.GridExecutor.__call__
_run = upstream.InterpretedFunction.run


# ---- casts and arithmetic ------------------------------------------------------------------------


def _codes_of(data: Array, source: Any, target: Any, rounding: Any) -> Array:
    """Stands in for upstream's conversion between floats: bits in, bits out."""
    values = decoded(data, source)
    codes = encoded(values, target).view(f"uint{target.primitive_bitwidth}")
    if rounding not in (None, _RTNE):  # towards zero: the code before
        codes = codes - (np.abs(decoded(codes, target)) > np.abs(values)).astype(codes.dtype)
    return codes


def _nearest_integers(values: Array, dtype: Any) -> Array:
    """Towards zero, as chips do it: what is too large becomes the limit, NaN becomes 0."""
    limits = np.iinfo(upstream._get_np_dtype(dtype))
    low = values <= float(limits.min)
    high = values >= float(limits.max)
    inside = np.where(low | high | np.isnan(values), 0, values).astype(limits.dtype)
    return np.where(high, limits.max, np.where(low, limits.min, inside)).astype(limits.dtype)


def _cast_faithfully(self: Any, handle: Any, target: Any) -> Any:
    source, dtype = handle.dtype.scalar, target.scalar
    if source.is_floating() and dtype.is_floating():
        codes = _codes_of(handle.data, source, dtype, None)
        return Handle(codes.view(upstream._get_np_dtype(dtype)), dtype)
    if source.is_floating() and dtype.is_int() and dtype != tl.int1:
        return Handle(_nearest_integers(decoded(handle.data, source), dtype), dtype)
    if dtype in NARROW:  # by way of float32, as Triton compiles it
        return Handle(encoded(handle.data.astype(np.float32), dtype), dtype)
    return _cast(self, handle, target)


def _binary_faithfully(self: Any, left: Any, right: Any, operation: Any) -> Any:
    dtype = left.dtype.scalar
    if dtype not in NARROW:
        result = _binary(self, left, right, operation).data
    else:
        values = operation(decoded(left.data, dtype), decoded(right.data, dtype))
        result = values if values.dtype == np.bool_ else encoded(values, dtype)
    # Upstream says that a comparison of floats is a float.
    return Handle(result, tl.int1 if result.dtype == np.bool_ else dtype)


def _fma(self: Any, x: Any, y: Any, z: Any) -> Any:
    dtype = z.dtype.scalar
    if dtype == tl.float64 or not dtype.is_floating():
        return Handle(x.data * y.data + z.data, dtype)
    values = [decoded(each.data, dtype) for each in (x, y, z)]
    return Handle(encoded(fused(*values), dtype), dtype)


def _clamp(self: Any, x: Any, low: Any, high: Any, propagate_nan: Any) -> Any:
    most, least = (np.maximum, np.minimum) if propagate_nan == _PROPAGATE else (np.fmax, np.fmin)
    return Handle(least(most(x.data, low.data), high.data), x.dtype.scalar)


def _umulhi(self: Any, left: Any, right: Any) -> Any:
    """The high half of the product of two unsigned numbers, whatever their types say."""
    data = left.data
    a, b = (each.data.view(f"uint{8 * data.itemsize}") for each in (left, right))
    if data.itemsize == 8:
        high = upstream.np_umulhi_u64(a, b)
    else:
        wide = f"uint{16 * data.itemsize}"
        high = (a.astype(wide) * b.astype(wide)) >> np.array(8 * data.itemsize, wide)
    return Handle(high.astype(a.dtype).view(data.dtype), left.dtype.scalar)


def _bfloat16(self: Any, value: float) -> Any:
    return Handle(encoded(np.array([value], np.float32), tl.bfloat16), tl.bfloat16)


def _accumulated(left: Array, right: Array, start: Array, step: int) -> Array:
    """start + left @ right in float32, rounded every ``step`` products: the same sums anywhere.

    A matrix library adds in an order that depends on the shape; a chip does not, and kernels may
    count on two dots that have the same rows giving the same numbers.
    """
    total, left, right = start.astype(np.float32), left.astype(np.float64), right.astype(np.float64)
    for first in range(0, left.shape[-1], step):
        chosen = slice(first, first + step)
        products = np.matmul(left[..., chosen], right[..., chosen, :])
        total = (total + products).astype(np.float32)
    return total


def _dot(self: Any, a: Any, b: Any, d: Any, precision: Any, _short_accumulator: Any) -> Any:
    dtype = a.dtype.scalar
    if dtype == tl.float64 or dtype.is_int():
        wide = d.data.dtype
        return Handle(np.matmul(a.data.astype(wide), b.data.astype(wide)) + d.data, d.dtype.scalar)
    left, right = decoded(a.data, dtype), decoded(b.data, b.dtype.scalar)
    if dtype != tl.float32:
        step = 256 // dtype.primitive_bitwidth
        total = _accumulated(left, right, d.data, step)
    elif precision not in (_TF32, _TF32X3):
        total = _accumulated(left, right, d.data, 1)
    else:
        high_left, high_right, total = to_tf32(left), to_tf32(right), d.data
        if precision == _TF32X3:
            total = _accumulated(to_tf32(left - high_left), high_right, total, 8)
            total = _accumulated(high_left, to_tf32(right - high_right), total, 8)
        total = _accumulated(high_left, high_right, total, 8)
    return Handle(total.astype(d.data.dtype), d.dtype.scalar)


def _reduce(self: Any, values: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
    """Upstream's nanmax warns of rows of NaN; fmax is the chips' maximum, and silent."""
    silent = {np.nanmax: np.fmax.reduce, np.nanmin: np.fmin.reduce}
    return _min_max(self, values, silent.get(val_reduce_op, val_reduce_op), idx_reduce_op)


def _sum(self: Any, block: Any) -> Any:
    """A sum of narrow floats has narrow partial sums: of halves, in the way of a tree."""
    dtype = block.dtype.scalar
    if dtype not in NARROW:
        return _sum_upstream(self, block)
    values = decoded(block.handle.data, dtype)
    values = values.reshape(-1) if self.axis is None else np.moveaxis(values, self.axis, 0)
    while len(values) > 1:
        half = len(values) // 2
        values = decoded(encoded(values[:half] + values[half:], dtype), dtype)
    total = encoded(values[0], dtype).reshape(values.shape[1:])
    if self.keep_dims:
        whole = tuple(range(block.handle.data.ndim))
        total = np.expand_dims(total, whole if self.axis is None else self.axis)
    return self.to_tensor(total, block.dtype)


# ---- arguments, loops, launches ------------------------------------------------------------------


class _One(int):
    """An argument that is 1: a constant in a compiled kernel, and a plain 1 in this one."""


def _typed_argument(argument: Any) -> Any:
    """A kernel's argument as a compiled kernel sees it."""
    if isinstance(argument, _One):
        return 1
    if isinstance(argument, bool):
        return tl.tensor(Handle(np.array([argument], np.bool_), tl.int1), tl.int1)
    if isinstance(argument, float):
        return tl.tensor(Handle(np.array([argument], np.float32), tl.float32), tl.float32)
    made = _argument(argument)
    if isinstance(argument, int):  # upstream keeps the wide in too few bits
        made.handle.data = made.handle.data.astype(upstream._get_np_dtype(made.dtype))
    return made


def _specialized(argument: Any) -> Any:
    if isinstance(argument, tuple):
        made = map(_specialized, argument)
        return type(argument)(*made) if hasattr(argument, "_fields") else tuple(made)
    return _One(1) if type(argument) is int and argument == 1 else argument


def _run_specialized(self: Any, *positional: Any, grid: Any, warmup: bool, **named: Any) -> Any:
    """Arguments that are 1 become constants, but for those that ask not to be specialized."""
    parameters = inspect.signature(self.fn).parameters
    kept = {name for name, each in parameters.items() if "constexpr" in str(each.annotation)}
    for each in self.kwargs.get("do_not_specialize") or ():
        kept.add(list(parameters)[each] if isinstance(each, int) else each)
    first = [
        argument if name in kept else _specialized(argument)
        for name, argument in zip(parameters, positional, strict=False)
    ]
    rest = {
        name: argument if name in kept or name not in parameters else _specialized(argument)
        for name, argument in named.items()
    }
    return _run(self, *first, grid=grid, warmup=warmup, **rest)


def _typed_range(first: Any, last: Any = None, step: Any = 1, **_options: Any) -> Iterator[Any]:
    """``range`` and ``tl.range`` in a kernel: loop variables are numbers of the chip's."""
    start, end = (0, first) if last is None else (first, last)
    wide = any(getattr(each, "dtype", None) == tl.int64 for each in (start, end, step))
    dtype, kind = (tl.int64, np.int64) if wide else (tl.int32, np.int32)
    for number in range(start, end, step):
        yield tl.tensor(Handle(np.array([number], kind), dtype), dtype)


class _Rewriter(upstream.ASTTransformer):  # type: ignore[misc]
    """Upstream's, which makes assigned values tensors, and loop variables too."""

    def visit_For(self, node: ast.For) -> ast.For:  # noqa: N802  (ast's name)
        self.generic_visit(node)
        called = node.iter.func if isinstance(node.iter, ast.Call) else None
        if getattr(called, "id", None) == "range" or getattr(called, "attr", None) == "range":
            assert isinstance(node.iter, ast.Call)
            node.iter.func = ast.copy_location(ast.Name("_typed_range", ast.Load()), node.iter)
        return node


def _patch_tensor(tensor: Any, scope: Any) -> None:
    _patch_lang_tensor(tensor, scope)
    # Triton 3.6 makes an int of an array in a way that numpy warns of.
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


class _Launches:
    """Patches ``tl`` once a launch; upstream does it in every call of a function within it."""

    def __init__(self) -> None:
        self.scopes: list[Any] = []
        self.patched: set[str] = set()

    def patch(self, function: Any) -> Any:
        modules = filter(inspect.ismodule, function.__globals__.values())
        found = {each.__name__ for each in modules if each in (tl, tl.core)}
        if not found or not found <= self.patched:
            self.scopes.append(_patch_lang(function))
            self.patched |= found
        return upstream._LangPatchScope()  # the caller restores nothing: ``call`` does

    def call(self, executor: Any, *positional: Any, **named: Any) -> Any:
        try:
            with np.errstate(all="ignore"):  # a chip does not warn
                return _call(executor, *positional, **named)
        finally:
            self.patched.clear()
            while self.scopes:
                self.scopes.pop().restore()


@contextmanager
def faithful() -> Iterator[None]:
    """Make the interpreter faithful meanwhile."""
    launches = _Launches()
    changes: dict[Any, dict[str, Any]] = {
        upstream: {
            "_convert_float": _codes_of,
            "_implicit_cvt": _typed_argument,
            "_patch_lang": launches.patch,
            "_patch_lang_tensor": _patch_tensor,
            "_typed_range": _typed_range,
        },
        Builder: {
            "cast_impl": _cast_faithfully,
            "binary_op": _binary_faithfully,
            "create_fma": _fma,
            "create_clampf": _clamp,
            "create_maxnumf": lambda self, x, y: self.binary_op(x, y, np.fmax),
            "create_minnumf": lambda self, x, y: self.binary_op(x, y, np.fmin),
            "create_umulhi": _umulhi,
            "create_dot": _dot,
            "get_bf16": _bfloat16,
        },
        upstream.ReduceOps: {"min_max": _reduce, "sum": _sum},
        upstream.FunctionRewriter: {"ast_transformer": _Rewriter()},
        upstream.InterpretedFunction: {"run": _run_specialized},
        upstream.GridExecutor: {"__call__": lambda self, *a, **k: launches.call(self, *a, **k)},
    }
    with ExitStack() as stack:
        for owner, members in changes.items():
            for name, value in members.items():
                stack.enter_context(mock.patch.object(owner, name, value, create=True))
        yield
