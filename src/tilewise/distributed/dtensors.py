"""DTensors in and out: their local rows are computed with, and results are wrapped like q."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from tilewise.distributed.layout import Layout, Schedule
from tilewise.errors import InvalidArgument


class Wrapped(NamedTuple):
    """Local tensors of a call with DTensors, and how a result becomes one.

    Args:
        q, k, v: of this process.
        sinks: all of them; their gradient is a sum over processes that is still to be taken.
        wrap: makes a DTensor of a local result, whose sequence is in the given dimension.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    wrap: Callable[[Tensor, int], Tensor]


def is_dtensor(x: object) -> bool:
    """Return whether something is a DTensor; nothing is before torch has loaded them."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def unwrap(q: Any, k: Any, v: Any, sinks: Any, dim: int, schedule: Schedule | Layout) -> Wrapped:
    """Return the local tensors of DTensors.

    Args:
        q: a DTensor, sharded along the sequence by each dimension of its mesh.
        k: sharded likewise, over the same mesh.
        v: likewise.
        sinks: a replicated DTensor, a tensor, or None.
        dim: of the sequence, in q, k and v.
        schedule: of the call.

    Raises:
        InvalidArgument: naming one that is no DTensor, or is sharded otherwise; a schedule by which
            a process holds more than one run of rows, as no DTensor is sharded like that.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    for name, x in (("q", q), ("k", k), ("v", v)):
        if not is_dtensor(x):
            raise InvalidArgument(name, "a plain tensor", "a DTensor, as the others are")
        mesh, placements = x.device_mesh, tuple(x.placements)
        if mesh != q.device_mesh or any(each != Shard(dim) for each in placements):
            required = f"q's mesh, and Shard({dim}) in each of its dimensions"
            raise InvalidArgument(name, f"{mesh} with {placements}", required)
    if schedule == "zigzag" or isinstance(schedule, Layout):
        came = "a Layout" if isinstance(schedule, Layout) else repr(schedule)
        required = "'ring', 'gather' or 'ulysses' with DTensors: Shard gives a process one run"
        fix = "For 'zigzag' or a Layout, pass plain tensors that tilewise.distributed.shard cut."
        raise InvalidArgument("schedule", came, required, fix)
    if is_dtensor(sinks):
        if any(each != Replicate() for each in sinks.placements):
            raise InvalidArgument("sinks", str(sinks.placements), "Replicate")
        sinks = sinks.to_local(grad_placements=[Partial()] * sinks.device_mesh.ndim)
    mesh = q.device_mesh

    def wrap(x: Tensor, of: int) -> Tensor:
        found: Tensor = DTensor.from_local(x, mesh, [Shard(of)] * mesh.ndim, run_check=False)
        return found

    return Wrapped(q.to_local(), k.to_local(), v.to_local(), sinks, wrap)
