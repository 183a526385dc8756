"""A block whose attention is shared among processes: for models that know nothing of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import routes
from tilewise.distributed.attention import context_parallel_attention
from tilewise.distributed.layout import Layout, Schedule
from tilewise.distributed.mesh import Mesh
from tilewise.distributed.sharding import shard
from tilewise.errors import InvalidArgument, Unsupported


@contextmanager
def context_parallel(
    mesh: Mesh,
    *,
    buffers: Sequence[Tensor] = (),
    buffer_seq_dims: Sequence[int] = (),
    no_restore_buffers: Sequence[Tensor] = (),
    schedule: Schedule | Layout = "zigzag",
    timeout: timedelta | None = None,
) -> Iterator[None]:
    """Within the block, attention is ``context_parallel_attention``, in a model as it is.

    That holds for ``tilewise.nn.Attention``, for what ``tilewise.sdpa()`` takes of torch's
    function, and for ``attn_implementation="tilewise"`` of transformers. ``tilewise.attention``
    called by name stays on one process. Everything else of a model works row by row, so each
    process computes with its own rows of the buffers: tokens, positions, labels. Take the backward
    pass inside of the block if it computes attention anew (activation checkpointing); else it may
    come later.

    The shape is that of ``torch.distributed.tensor.experimental.context_parallel``.

    Args:
        mesh: as in ``context_parallel_attention``.
        buffers: tensors [..., S, ...] with the whole sequence, the same on every process. Within
            the block they hold the rows of this process, [..., rows, ...]; after it they are whole
            again, with what they held.
        buffer_seq_dims: the dimension of the sequence, of each buffer.
        no_restore_buffers: those of the buffers that may stay cut, [..., rows, ...].
        schedule: as in ``context_parallel_attention``.
        timeout: likewise.

    Raises:
        InvalidArgument: not a dimension for each buffer, a buffer that requires a gradient, or one
            of ``no_restore_buffers`` that is not among them.
    """
    if len(buffers) != len(buffer_seq_dims):
        required = f"a dimension for each of the {len(buffers)} buffers"
        raise InvalidArgument("buffer_seq_dims", str(list(buffer_seq_dims)), required)
    for at, buffer in enumerate(buffers):
        if buffer.requires_grad:
            fix = "Cut it by tilewise.distributed.shard, whose gradient is defined."
            raise InvalidArgument(f"buffers[{at}]", "a tensor with gradient", "one without", fix)
    kept = {id(buffer) for buffer in no_restore_buffers}
    if not kept <= {id(buffer) for buffer in buffers}:
        raise InvalidArgument("no_restore_buffers", "a tensor of its own", "some of the buffers")
    parts = [
        shard(buffer, mesh, dim, schedule)
        for buffer, dim in zip(buffers, buffer_seq_dims, strict=True)
    ]
    with torch.no_grad():
        # ``set_`` gives a tensor another memory; what it had stays alive in a view.
        whole = [(x, x.view_as(x)) for x in buffers if id(x) not in kept]
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.set_(part)  # type: ignore[call-overload]
    try:
        with routes.routed(_Shared(mesh, schedule, timeout)):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in whole:
                buffer.set_(before)  # type: ignore[call-overload]


class _Shared(NamedTuple):
    """The route of a block."""

    mesh: Mesh
    schedule: Schedule | Layout
    timeout: timedelta | None

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Any:
        """Compute ``tilewise.attention`` over the rows of all processes."""
        return self._call(q, k, v, keywords)

    def attention_varlen(
        self, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, **keywords: Any
    ) -> Any:
        """Compute ``tilewise.attention_varlen`` over the rows of all processes."""
        return self._call(q, k, v, keywords | {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k})

    def _call(self, q: Tensor, k: Tensor, v: Tensor, keywords: dict[str, Any]) -> Any:
        given = {name: x for name, x in keywords.items() if x is not None and x is not False}
        for name in ("return_stats", "plan"):
            if name in given:
                raise Unsupported(
                    f"{name}= with a sequence that several processes share",
                    fix="leave it out, or compute this layer on one process",
                )
        return context_parallel_attention(
            q, k, v, mesh=self.mesh, schedule=self.schedule, timeout=self.timeout, **given
        )
