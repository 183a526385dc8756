"""The guard sees what it says it sees, and nothing where there is nothing: planted bugs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.kernels.gpu.guard import GuardError, Watch, guarded

ROWS, WIDTH = 5, 8


def numbers(*sizes: int) -> Tensor:
    count = int(torch.Size(sizes).numel())
    return torch.arange(count, dtype=torch.float32).reshape(sizes)


@triton.jit
def scale_rows(
    x, out, stride, rows, WIDTH: tl.constexpr, EXTRA: tl.constexpr, MASKED: tl.constexpr
):
    """out = 2 x, a program for two rows; EXTRA rows too many, or no mask at all."""
    row = tl.program_id(0) * 2 + tl.arange(0, 2)
    column = tl.arange(0, WIDTH)
    place = row[:, None] * stride + column[None, :]
    if MASKED:
        seen = row[:, None] < rows + EXTRA
        tl.store(out + place, 2 * tl.load(x + place, mask=seen, other=0.0), mask=seen)
    else:
        tl.store(out + place, 2 * tl.load(x + place))


def scaled(x: Tensor, out: Tensor, extra: int = 0, masked: bool = True) -> None:
    rows, width = x.shape
    grid = (triton.cdiv(rows, 2),)
    scale_rows[grid](x, out, x.stride(0), rows, WIDTH=width, EXTRA=extra, MASKED=masked)


def test_a_right_kernel_passes() -> None:
    x = numbers(ROWS, WIDTH)
    out = torch.empty_like(x)
    scaled(x, out)
    assert torch.equal(out, 2 * x)


def test_a_mask_that_is_off_by_one() -> None:
    x = numbers(ROWS, WIDTH)
    with pytest.raises(GuardError, match=r"load out of bounds of x \(5, 8\): 8 of 16 elements"):
        scaled(x, torch.empty_like(x), extra=1)


def test_a_missing_bound() -> None:
    x = numbers(ROWS, WIDTH)
    with pytest.raises(GuardError, match=r"scale_rows, program \(2, 0, 0\).*out of bounds of x"):
        scaled(x, torch.empty_like(x), masked=False)


def test_memory_of_another_tensor_is_out_of_bounds() -> None:
    """The row beyond x is there: it is the first row of out, in the same storage."""
    both = numbers(2 * ROWS, WIDTH)
    with pytest.raises(GuardError, match="load out of bounds of x"):
        scaled(both[:ROWS], both[ROWS:], extra=1)


def test_the_gap_of_a_strided_view_is_out_of_bounds() -> None:
    wide = numbers(ROWS, 2 * WIDTH)
    x = wide[:, :WIDTH]
    out = torch.empty_strided(x.shape, x.stride())
    scaled(x, out)
    assert torch.equal(out, 2 * x)
    narrow = wide[:, : WIDTH - 1]
    with pytest.raises(GuardError, match=r"out of bounds of x \(5, 7\): 2 of 16 elements"):
        scale_rows[(3,)](narrow, out, 2 * WIDTH, ROWS, WIDTH=WIDTH, EXTRA=0, MASKED=True)


def test_views_that_share_a_storage_keep_to_their_own() -> None:
    """q, k and v as slices of one tensor; and a transposed view, whose elements are all its own."""
    packed = numbers(ROWS, 3, WIDTH)
    first, second = packed[:, 0], packed[:, 1]
    scale_rows[(3,)](first, second, 3 * WIDTH, ROWS, WIDTH=WIDTH, EXTRA=0, MASKED=True)
    assert torch.equal(second, 2 * first)
    square = numbers(WIDTH, WIDTH)
    scale_rows[(4,)](square.T, square.T, WIDTH, WIDTH, WIDTH=WIDTH, EXTRA=0, MASKED=True)
    assert torch.equal(square, 2 * numbers(WIDTH, WIDTH))


def test_an_empty_tensor_has_no_element() -> None:
    empty = torch.empty(0, WIDTH)
    scale_rows[(1,)](empty, empty, WIDTH, 0, WIDTH=WIDTH, EXTRA=0, MASKED=True)
    with pytest.raises(GuardError, match=r"out of bounds of x \(0, 8\)"):
        scale_rows[(1,)](empty, empty, WIDTH, 0, WIDTH=WIDTH, EXTRA=1, MASKED=True)


@triton.jit
def overwrite_input(x, out, WIDTH: tl.constexpr):
    """Every program reads row 0, and one of them writes it."""
    row, column = tl.program_id(0), tl.arange(0, WIDTH)
    seen = tl.load(x + column)
    tl.store(out + row * WIDTH + column, seen)


@pytest.mark.parametrize("seed", range(8))
def test_a_write_of_what_another_reads(watched: Watch, seed: int) -> None:
    """Through two views of one storage, whichever of the programs comes first."""
    watched.reseed(seed)
    x = numbers(4, WIDTH)
    with pytest.raises(GuardError, match="race: "):
        overwrite_input[(4,)](x[0], x, WIDTH=WIDTH)
    out = torch.empty(4, WIDTH)
    overwrite_input[(4,)](x[0], out, WIDTH=WIDTH)
    assert torch.equal(out, x[:1].expand(4, -1))


@triton.jit
def count(totals, values, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    tl.atomic_add(totals + column, tl.load(values + tl.program_id(0) * WIDTH + column))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_integer_atomics_may_meet(dtype: torch.dtype) -> None:
    totals, values = torch.zeros(WIDTH, dtype=dtype), numbers(ROWS, WIDTH).to(dtype)
    count[(ROWS,)](totals, values, WIDTH=WIDTH)
    assert torch.equal(totals, values.sum(0).to(dtype))


def test_float_atomics_may_not_meet() -> None:
    totals = torch.zeros(WIDTH)
    count[(1,)](totals, numbers(1, WIDTH), WIDTH=WIDTH)
    assert torch.equal(totals, numbers(WIDTH))
    with pytest.raises(GuardError, match=r"depends on the order, .* of totals by program"):
        count[(ROWS,)](totals, numbers(ROWS, WIDTH), WIDTH=WIDTH)


@triton.jit
def mix(totals, KIND: tl.constexpr):
    """Odd programs add, even ones do something that does not commute with it."""
    if tl.program_id(0) % 2 == 1:
        tl.atomic_add(totals, 3)
    elif KIND == "max":
        tl.atomic_max(totals, 5)
    elif KIND == "exchange":
        tl.atomic_xchg(totals, 5)
    elif KIND == "swap":
        tl.atomic_cas(totals, tl.full((), 0, tl.int64), tl.full((), 5, tl.int64))
    else:
        tl.atomic_add(totals, 5)


@pytest.mark.parametrize("kind", ["max", "exchange", "swap"])
def test_atomics_of_several_kinds_may_not_meet(kind: str) -> None:
    with pytest.raises(GuardError, match=r"depends on the order, .* of totals by program"):
        mix[(4,)](torch.zeros((), dtype=torch.int64), KIND=kind)
    totals = torch.zeros((), dtype=torch.int64)
    mix[(4,)](totals, KIND="add")
    assert totals.item() == 16


@triton.jit
def do_one(x, out, DEED: tl.constexpr):
    if DEED == "read":
        tl.store(out, tl.load(x))
    elif DEED == "write":
        tl.store(x, 7)
    else:
        tl.atomic_add(x, 7)


@triton.jit
def meet(x, out, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Two programs do something to one element."""
    if tl.program_id(0) == 0:
        do_one(x, out, FIRST)
    else:
        do_one(x, out + 1, SECOND)


DEEDS = ("read", "write", "update")


@pytest.mark.parametrize("deeds", list(itertools.product(DEEDS, repeat=2)), ids="-".join)
def test_every_way_of_meeting(watched: Watch, deeds: tuple[str, str]) -> None:
    """In this order of the two; only readers, and only updaters, may meet."""
    first, second = deeds
    watched.reseed(None)
    x, out = torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    if first == second != "write":
        meet[(2,)](x, out, FIRST=first, SECOND=second)
        assert x.item() == (14 if first == "update" else 0)
        return
    past = {"read": "read", "write": "written", "update": "updated"}[first]
    present = {"read": "reads", "write": "writes", "update": "updates"}[second]
    error = (
        rf"program \(1, 0, 0\).*{present} an element that was {past} of x by program \(0, 0, 0\)"
    )
    with pytest.raises(GuardError, match=error):
        meet[(2,)](x, out, FIRST=first, SECOND=second)


@triton.jit
def take_numbers(counter, out):
    """Programs take the next free place: right in any order, and another result in each."""
    tl.store(out + tl.program_id(0), tl.atomic_add(counter, 1))


def test_programs_run_in_an_order_of_the_seed(watched: Watch) -> None:
    def places(seed: int | None) -> list[Any]:
        counter, out = torch.zeros(1, dtype=torch.int64), torch.empty(12, dtype=torch.int64)
        watched.reseed(seed)
        take_numbers[(12,)](counter, out)
        assert sorted(out.tolist()) == list(range(12))  # each program once
        return out.tolist()

    assert places(None) == list(range(12))
    assert places(1) == places(1) != places(None)
    assert places(2) != places(1)


@triton.jit
def where_am_i(out, COLUMNS: tl.constexpr):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    place = (x * tl.num_programs(1) + y) * tl.num_programs(2) + z
    tl.store(out + place, x * 100 + y * 10 + z)


def test_every_program_of_a_three_dimensional_grid_runs_once() -> None:
    out = torch.full((3, 2, 4), -1, dtype=torch.int32)
    where_am_i[(3, 2, 4)](out, COLUMNS=1)
    x, y, z = torch.meshgrid(*map(torch.arange, out.shape), indexing="ij")
    assert torch.equal(out.long(), x * 100 + y * 10 + z)


@triton.jit
def fold(x, out, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    tl.store(out + column // 2, tl.load(x + column))


def test_one_store_of_two_values_to_one_element() -> None:
    fold[(1,)](torch.ones(WIDTH), torch.empty(WIDTH // 2), WIDTH=WIDTH)  # equal values: no matter
    with pytest.raises(GuardError, match="different values to one element of out"):
        fold[(1,)](numbers(WIDTH), torch.empty(WIDTH // 2), WIDTH=WIDTH)


@triton.jit
def load_some(x, out, count, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    tl.store(out + column, tl.load(x + column, mask=column < count))


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8],
    ids=str,
)
def test_hidden_lanes_of_a_load_are_undefined(dtype: torch.dtype) -> None:
    """NaN, or for integers a number far off."""
    out = torch.zeros(WIDTH, dtype=dtype)
    load_some[(1,)](torch.ones(3, dtype=dtype), out, 3, WIDTH=WIDTH)
    assert out[:3].eq(1).all()
    assert bool((out[3:].isnan() if dtype.is_floating_point else out[3:].gt(WIDTH)).all())


@triton.jit
def product(out, left, right):
    tl.store(out, left * right)


def test_an_overflow_of_int32() -> None:
    out = torch.zeros(1, dtype=torch.int64)
    product[(1,)](out, 1 << 20, 1 << 10)
    assert out.item() == 1 << 30
    with pytest.raises(GuardError, match="mul overflows int32"):
        product[(1,)](out, 1 << 20, 1 << 11)
    product[(1,)](out, 1 << 40, 1 << 11)  # int64 holds it
    assert out.item() == 1 << 51


@triton.jit
def tuple_of_tensors(tensors, out, WIDTH: tl.constexpr, EXTRA: tl.constexpr):
    column = tl.arange(0, WIDTH)
    tl.store(out + column, tl.load(tensors[0] + column) + tl.load(tensors[1] + column + EXTRA))


def test_tensors_in_a_tuple_are_watched() -> None:
    pair, out = (numbers(WIDTH), numbers(WIDTH)), torch.empty(WIDTH)
    tuple_of_tensors[(1,)](pair, out, WIDTH=WIDTH, EXTRA=0)
    assert torch.equal(out, 2 * numbers(WIDTH))
    with pytest.raises(GuardError, match=r"out of bounds of tensors\[1\] \(8,\): 1 of 8"):
        tuple_of_tensors[(1,)](pair, out, WIDTH=WIDTH, EXTRA=1)


@triton.jit
def in_a_function(x, out, WIDTH: tl.constexpr):
    tl.store(out + tl.arange(0, WIDTH), beyond(x, WIDTH))


@triton.jit
def beyond(x, WIDTH: tl.constexpr):
    return tl.load(x + tl.arange(0, WIDTH) + 1)


def test_an_error_comes_through_functions_as_it_is() -> None:
    with pytest.raises(GuardError, match=r"^in_a_function, program \(0, 0, 0\) \(order by seed"):
        in_a_function[(1,)](numbers(WIDTH), torch.empty(WIDTH), WIDTH=WIDTH)


def test_one_guard_at_a_time() -> None:
    with pytest.raises(RuntimeError, match="already"), guarded():
        pass
