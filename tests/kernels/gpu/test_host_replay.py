"""Replays with tensors that host code makes for itself, with a stand-in for compiled kernels."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise.kernels.gpu import Launch
from tilewise.kernels.gpu.replay import Replays, renewed
from tilewise.problem import Operands
from tilewise.validation import dense_problem
from tilewise.variants.float8 import FLOAT8


class _Kernel:
    """A kernel, compiled or not, that keeps what it is launched with: addresses of tensors."""

    arg_names = ("x", "made")

    def __init__(self) -> None:
        self.given: list[list[Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def start(*arguments: Any, **named: Any) -> _Kernel:
            self.given.append(_addresses(arguments or [named[name] for name in self.arg_names]))
            return self

        return start


def _addresses(arguments: Any) -> list[Any]:
    return [
        _addresses(each)
        if isinstance(each, tuple)
        else each.data_ptr()
        if isinstance(each, Tensor)
        else each
        for each in arguments
    ]


class _Calls:
    """Calls of one plan, whose host code takes one or more renewed tensors."""

    def __init__(self, make: Callable[..., tuple[Tensor, ...]], *given: Tensor) -> None:
        self.kernel, self.replays = _Kernel(), Replays()
        self.make, self.given, self.hosted = make, given, 0

    def run(self, x: Tensor) -> None:
        def launches() -> list[Launch]:
            self.hosted += 1
            made = renewed(self.make, self.given or (x, None), 3)
            assert renewed(self.make, self.given or (x, None), 3) is made
            return [Launch(self.kernel, (1,), {"x": x, "made": (*made, 7)}, {})]

        self.replays.run("place", (x,), launches)


@pytest.fixture
def kept() -> list[Tensor]:
    """What ``_keeping`` made, in order."""
    return []


def _keeping(kept: list[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    def make(sources: tuple[Tensor | None, ...], size: int) -> tuple[Tensor, ...]:
        (source, *_) = sources
        assert source is not None
        kept.append(source.new_full((size,), float(source[0])))
        return (kept[-1],)

    return make


def test_they_are_made_of_the_tensors_of_this_call(kept: list[Tensor]) -> None:
    """Once in each call, and handed to the kernel where the first call's were."""
    calls = _Calls(_keeping(kept))
    given = [torch.full((4,), float(number)) for number in range(3)]
    for x in given:
        calls.run(x)
    assert calls.hosted == 1
    assert [float(made[0]) for made in kept] == [0, 1, 2]
    expected = [[x.data_ptr(), [made.data_ptr(), 7]] for x, made in zip(given, kept, strict=True)]
    assert calls.kernel.given == expected


def test_of_another_size_they_are_for_the_host_code() -> None:
    """Numbers in the arguments hold for tensors of one form."""
    sizes = iter([3, 5, 5, 5])  # by the host code, and in vain by a replay
    calls = _Calls(lambda sources, size: (torch.empty(next(sizes)),))
    x = torch.ones(4)
    calls.run(x)
    assert calls.hosted == 1
    calls.run(x)
    calls.run(x)
    assert calls.hosted == 2


def test_a_replay_keeps_none_alive() -> None:
    seen: list[weakref.ref[Tensor]] = []

    def make(sources: tuple[Tensor, ...], size: int) -> tuple[Tensor, ...]:
        made = torch.empty(size)
        seen.append(weakref.ref(made))
        return (made,)

    calls = _Calls(make)
    for _ in range(2):
        x = torch.ones(4)
        calls.run(x)
        seen.append(weakref.ref(x))
        del x
    assert calls.hosted == 1
    assert [each() for each in seen] == [None] * 4


def test_sources_are_given_tensors(kept: list[Tensor]) -> None:
    """Of anything else a replay could not tell what it is in its own call."""
    calls = _Calls(_keeping(kept), torch.ones(1))
    calls.run(torch.ones(4))
    calls.run(torch.ones(4))
    assert calls.hosted == 2


@pytest.mark.parametrize("packed", [False, True])
def test_transposed_values_are_memory_of_each_call(packed: bool) -> None:
    """Of float8: the launch that transposes and the one that reads take the same memory, made anew.

    The next call of this form runs no host code for that.
    """
    pytest.importorskip("triton")
    from tilewise.kernels.gpu.config import Blocks
    from tilewise.kernels.gpu.walk.float8 import transpose_values

    kernel, replays, turned = _Kernel(), Replays(), []
    shape = (100, 2, 64) if packed else (1, 2, 100, 64)
    calls = [torch.zeros(2, *shape, dtype=FLOAT8).unbind() for _ in range(2)]
    nothing: dict[str, Any] = {"scale": None, "dropout_p": 0.0, "sinks": None}
    problem = dense_problem(*[torch.zeros(1, 2, 100, 64)] * 3, mask=(), score=(), **nothing)
    problem = problem._replace(dtype=FLOAT8, layout="varlen" if packed else "dense")

    def launches(v: Tensor) -> list[Launch]:
        cu = torch.tensor([0, 100]) if packed else None
        operands = Operands(v, v, v, cu_seqlens_k=cu)
        read, (before,) = transpose_values(problem, operands, Blocks(64, 64, 4, 1))
        turned.append(read.v)
        mine, made = before.arguments["v"], before.arguments["transposed"]
        return [
            Launch(kernel, (1,), {"x": mine, "made": (made,)}, {}),
            Launch(kernel, (1,), {"x": made, "made": (read.v, 7)}, {}),
        ]

    for k, v in calls:  # parts of one memory, and v of it
        replays.run("place", (k, v), partial(launches, v))
    assert len(turned) == 1
    for (_, v), (mine, (made,)), (read, (again, _)) in zip(
        calls, kernel.given[::2], kernel.given[1::2], strict=True
    ):
        assert mine == v.data_ptr()
        assert made == read == again
    # The first call's is alive still, and not the second's.
    assert kernel.given[1][0] == turned[0].data_ptr() != kernel.given[3][0]


def test_lists_of_tiles_follow_their_table() -> None:
    """Changed in place, or another one: a replay takes the lists that host code would take."""
    pytest.importorskip("triton")
    from tilewise.kernels.gpu.expressions import Table
    from tilewise.kernels.gpu.walk.lists import tile_lists

    kernel, replays, hosted = _Kernel(), Replays(), []
    q = torch.empty(1, 2, 64, 8)
    nothing: dict[str, Any] = {"scale": None, "dropout_p": 0.0, "sinks": None}
    problem = dense_problem(q, q, q, mask=(), score=(), **nothing)

    def lists(table: Tensor) -> Any:
        operands = Operands(q, q, q, (table,))
        return tile_lists(problem, operands, [Table(0, 16, 16, True)], 16, 16)

    def launches(table: Tensor) -> list[Launch]:
        hosted.append(table)
        return [Launch(kernel, (1,), {"x": table, "made": tuple(lists(table))}, {})]

    def run(table: Tensor) -> None:
        replays.run("place", (table,), lambda: launches(table))

    table, other = torch.ones(2, 1, 1, 4, 4, dtype=torch.uint8).unbind()
    run(table)
    before = kernel.given[-1]
    run(table)
    assert kernel.given[-1] == before
    table[0, 0, 0] = 0
    run(table)
    assert kernel.given[-1] == [table.data_ptr(), _addresses(lists(table))] != before
    assert lists(table).counts[0, 0, :, 1].tolist() == [0, 4, 4, 4]
    run(other)
    assert kernel.given[-1] == [other.data_ptr(), _addresses(lists(other))]
    with torch.inference_mode():
        inferred = torch.zeros_like(table)
        run(inferred)
    assert kernel.given[-1][0] == inferred.data_ptr()
    assert len(hosted) == 1
