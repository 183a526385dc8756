"""The Triton backend: attention on GPUs of several makers, with two kernels for Hopper alone.

Here is a kernel launch as a value: what runs it, compiles it for another chip, or shows it.
Host code of the passes makes Launches and nothing else, from tensors on any device, ``meta``
included; whoever wants the work done calls ``run``. The gate compiles the same values for chips
that are not there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple


class Launch(NamedTuple):
    """One kernel launch.

    Args:
        kernel: a ``triton.jit`` function.
        grid: programs along up to three axes.
        arguments: by name: tensors, numbers, tuples of both; no constexprs.
        constants: the constexprs by name: numbers, strings, jit functions, None.
        warps, stages: as ``triton.jit`` knows them.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    warps: int = 4
    stages: int = 2


def run(launches: Iterable[Launch]) -> list[Any]:
    """Run launches in order on the current stream, and return the compiled kernels.

    An empty grid is no launch. It has None in the place of its kernel, and so has every launch in
    Triton's interpreter.
    """
    return [
        kernel[grid](**arguments, **constants, num_warps=warps, num_stages=stages)
        if all(grid)
        else None
        for kernel, grid, arguments, constants, warps, stages in launches
    ]
