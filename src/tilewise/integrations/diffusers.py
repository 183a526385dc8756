"""diffusers' backend ``xformers`` by tilewise: boolean masks, and context parallelism.

diffusers gives xformers a boolean mask of four dimensions as numbers to add, 1 and 0. Here the
pairs that it excludes are excluded. Its own ring refuses masks. Here a model that
``enable_parallelism`` splits computes attention by
``tilewise.distributed.context_parallel_attention`` over the mesh of its ``ContextParallelConfig``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.compat import installed
from tilewise.distributed import context_parallel_attention, unshard
from tilewise.distributed.layout import Schedule
from tilewise.errors import InvalidArgument, Unsupported
from tilewise.functional import MaskLike, ScoreLike

__all__ = ["register"]


def register() -> None:
    """Let ``set_attention_backend("xformers")`` take boolean masks and ``ContextParallelConfig``.

    Call it once, after ``tilewise.compat.install("xformers")``: the name stands for tilewise then.
    Without it diffusers adds a boolean mask [B, heads or 1, queries or 1, keys] to the scores as 1
    and 0, which excludes nothing.

    With a ``ContextParallelConfig``, lengths must divide by the number of processes. Masks are
    padding masks: [B, keys] or [B, 1, 1, keys], of the keys of this process, boolean or added to
    the scores. Causal calls and ``return_lse`` are refused.

    Raises:
        Unsupported: ``xformers`` is not tilewise's stand-in.
    """
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    if not installed("xformers"):
        raise Unsupported(
            "diffusers' backend xformers by tilewise, without its stand-in",
            fix='call tilewise.compat.install("xformers") before diffusers is imported',
        )
    name = AttentionBackendName.XFORMERS
    alone = _AttentionBackendRegistry._backends[name]
    if alone.__module__ == __name__:
        return
    constraints = _AttentionBackendRegistry._constraints[name]

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _parallel_config: Any = None,
    ) -> Any:
        config = getattr(_parallel_config, "context_parallel_config", None)
        if config is None:
            if attn_mask is not None and attn_mask.dtype == torch.bool and attn_mask.dim() == 4:
                attn_mask = torch.where(attn_mask, 0.0, -torch.inf).to(query.dtype)
            given = query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
            return alone(*given, return_lse=return_lse)
        if is_causal or return_lse:
            asked = "is_causal" if is_causal else "return_lse"
            raise Unsupported(
                f"{asked}=True with diffusers' ContextParallelConfig",
                fix="call tilewise.distributed.context_parallel_attention in a processor",
            )
        return _shared(query, key, value, attn_mask, dropout_p, scale, config)

    _AttentionBackendRegistry.register(name, constraints, supports_context_parallel=True)(attention)


def _shared(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    scale: float | None,
    config: Any,
) -> Tensor:
    """Return attention of this process's rows [B, S, H, D] over those of all processes."""
    schedule: Schedule = "ring"
    mesh, count = config._mesh["ring", "ulysses"], config.ring_degree * config.ulysses_degree
    if config.ring_degree == 1:
        mesh, schedule = config._ulysses_mesh, "ulysses"
    elif config.ulysses_degree == 1:
        mesh = config._ring_mesh
    mask: MaskLike = None
    score: ScoreLike = None
    if attn_mask is not None:
        own = _of_keys(attn_mask, key)
        whole = unshard(own, mesh, 1, schedule, length=count * key.shape[1])
        if whole.is_floating_point():
            score = lambda s, b, h, m, n: s + whole[b, n]  # noqa: E731  its twin is one too
        else:
            mask = lambda b, h, m, n: whole[b, n]  # noqa: E731
    out: Tensor = context_parallel_attention(
        *(x.transpose(1, 2) for x in (query, key, value)),
        mesh=mesh,
        schedule=schedule,
        mask=mask,
        score=score,
        scale=scale,
        dropout_p=dropout_p,
    )
    return out.transpose(1, 2)


def _of_keys(attn_mask: Tensor, key: Tensor) -> Tensor:
    """Return a padding mask as [B, keys]."""
    batch, keys = key.shape[:2]
    shape = tuple(attn_mask.shape)
    fits = shape in {(size, *ones, keys) for size in (1, batch) for ones in ((), (1, 1))}
    if not fits:
        raise InvalidArgument(
            "attn_mask",
            f"shape {shape}",
            f"the padding of this process's keys: [{batch}, {keys}] or [{batch}, 1, 1, {keys}]",
            "For other masks, write a processor: docs/model-libraries.md.",
        )
    return attn_mask.reshape(shape[0], keys).expand(batch, keys)
