"""Calls that several processes compute together, each as one process would return it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tests.cases import drawn
from tests.variants.calls import Call, Sizes
from tests.variants_catalogue import CATALOGUE
from tilewise.distributed import context_parallel_attention, shard, unshard

NAMES = {variant.name: variant for variant in CATALOGUE}
# One of each kind of operation; the other names of the catalogue are thorough.
CORE = {
    "causal",
    "window",
    "lengths",
    "documents",
    "layout",
    "alibi",
    "softcap",
    "relative",
    "sinks",
}
names = pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=() if each in CORE else pytest.mark.thorough) for each in NAMES],
)
SIZES = Sizes()
WIDTH = 8


class Way(NamedTuple):
    """How processes share a sequence: a schedule; of so many places in the ring, 0 for all."""

    schedule: Any
    rings: int = 0

    def mesh(self, group: dist.ProcessGroup) -> Any:
        """The group, or a mesh of its processes: a ring, whose places share heads."""
        return _mesh(group, self.rings) if self.rings else group


@cache
def _mesh(group: dist.ProcessGroup, rings: int) -> DeviceMesh:
    """Made once: each mesh makes groups, and gloo's threads for a group never end."""
    ranks = torch.arange(dist.get_world_size(group)).view(rings, -1)
    return DeviceMesh("cpu", ranks, mesh_dim_names=("ring", "heads"))


WAYS = {
    "ring": Way("ring"),
    "zigzag": Way("zigzag"),
    "gather": Way("gather"),
    "ulysses": Way("ulysses"),
    "zigzag-ulysses": Way("zigzag", 2),
}


def together(
    group: dist.ProcessGroup,
    way: Way,
    leaves: dict[str, Tensor],
    grads: tuple[Tensor, Tensor],
    starts: tuple[Tensor, Tensor] | None = None,
    **keywords: Any,
) -> dict[str, Tensor]:
    """Return out, lse and the gradient of every leaf: rows put together, gradients added up.

    Args:
        group: the processes.
        way: how they share.
        leaves: of the whole call: q, k, v and others that the keywords hold.
        grads: of out and lse.
        starts: cu_seqlens of packed q, k and v.
        keywords: of the call.
    """
    mesh, packed = way.mesh(group), starts or ()
    of_rows = 0 if packed else 2
    of_lse = 1 if packed else 2

    def cut(x: Tensor, dim: int) -> Tensor:
        return shard(x, mesh, dim, way.schedule)

    q, k, v = (cut(leaves[name], of_rows) for name in "qkv")
    out, lse, _ = context_parallel_attention(
        q, k, v, *packed, mesh=mesh, schedule=way.schedule, return_lse=True, **keywords
    )
    incoming = cut(grads[0], of_rows).to(out.dtype), cut(grads[1], of_lse).to(lse.dtype)
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    found = torch.autograd.grad([out, lse], list(wanted.values()), incoming, materialize_grads=True)
    length = leaves["q"].shape[of_rows]
    results = {
        name: unshard(x.detach(), mesh, dim, way.schedule, length=length)
        for name, x, dim in (("out", out, of_rows), ("lse", lse, of_lse))
    }
    for name, grad in zip(wanted, found, strict=True):
        # In float32 at least: each process has the gradient of its rows.
        total = grad.to(torch.promote_types(grad.dtype, torch.float32)).contiguous()
        dist.all_reduce(total, group=group)
        results[name] = total.to(grad.dtype)
    return results


def variant(
    group: dist.ProcessGroup,
    way: Way,
    name: str,
    dtype: torch.dtype,
    sizes: Sizes,
    more: Mapping[str, Any] = MappingProxyType({}),
    late: bool = False,
    fixed: str = "",
) -> dict[str, Tensor]:
    """Return the results of a variant of the catalogue; ``late`` holds every other process up.

    Those of q, k and v that ``fixed`` names take no gradient.
    """
    call = Call(NAMES[name], dtype, sizes)
    for each in fixed:
        call.leaves[each].requires_grad_(False)
    time.sleep(0.2 * late * (dist.get_rank(group) % 2))
    grads = call.grad_out, call.grad_lse
    return together(group, way, call.leaves, grads, **call.formula, **more)


class Packed:
    """A variant over packed sequences of different lengths."""

    def __init__(self, name: str, lengths: list[tuple[int, int]], dtype: torch.dtype) -> None:
        queries, keys = (torch.tensor([0, *each]).cumsum(0) for each in zip(*lengths, strict=True))
        longest = max(max(pair) for pair in lengths)
        made = NAMES[name].make(Sizes(len(lengths), 4, longest, longest), dtype)
        shapes = {"q": (int(queries[-1]), 4, WIDTH), "k": (int(keys[-1]), 2, WIDTH)}
        shapes["v"] = shapes["k"]
        self.starts = queries, keys
        self.leaves = {
            each: drawn(*shape, seed=at, dtype=dtype).requires_grad_()
            for at, (each, shape) in enumerate(shapes.items())
        } | made.captured
        if NAMES[name].sinks:
            self.leaves["sinks"] = drawn(4, seed=5, dtype=dtype).requires_grad_()
        self.grads = (
            drawn(*shapes["q"], seed=7, dtype=dtype),
            drawn(4, shapes["q"][0], seed=8, dtype=dtype),
        )
        self.keywords: dict[str, Any] = {
            "mask": made.mask,
            "score": made.score,
            "sinks": self.leaves.get("sinks"),
        }

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """The packed operands."""
        return self.leaves["q"], self.leaves["k"], self.leaves["v"]


def packed(
    group: dist.ProcessGroup,
    way: Way,
    name: str,
    lengths: list[tuple[int, int]],
    dtype: torch.dtype,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """Return the results of a variant over packed sequences."""
    call = Packed(name, lengths, dtype)
    return together(group, way, call.leaves, call.grads, call.starts, **call.keywords, **more)


def listed(
    group: dist.ProcessGroup, name: str, keys: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the results of a variant over key lists [B, 1, M, K] of all rows."""
    call, way = Call(NAMES[name], dtype, SIZES), WAYS["gather"]
    own = shard(keys, group, 2, way.schedule)
    grads = call.grad_out, call.grad_lse
    return together(group, way, call.leaves, grads, keys=own, **call.formula)
