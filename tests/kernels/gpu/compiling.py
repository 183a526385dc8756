"""Compiles emitted functions for a chip that is not there; run as a program, without interpreting.

``python -m tests.kernels.gpu.compiling cuda:90 causal alibi`` prints a line per variant.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.variants.calls import Call
from tests.variants_catalogue import CATALOGUE
from tilewise.kernels.gpu.expressions.variant import Captures, Variant, captures, variant_of

_TYPES = {
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.bool: "*i1",
    torch.uint8: "*u8",
}


@triton.jit
def _everything(
    out,
    indices,
    scores,
    M,
    N,
    mask_tensors,
    mask_shapes,
    score_tensors,
    score_shapes,
    SEEN: tl.constexpr,
    KEYS: tl.constexpr,
    QUERIES: tl.constexpr,
    SCORES: tl.constexpr,
    INDICES: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    b = tl.program_id(0)
    h = tl.program_id(1)
    m0 = tl.program_id(2) * BM
    m = (m0 + tl.arange(0, BM))[:, None]
    low = tl.cast(0, tl.int32)
    high = tl.cast(N, tl.int32)
    if KEYS is not None:
        low, _, _, high = KEYS(b, m0, m0 + BM, M, N, mask_tensors, mask_shapes)
        first, full_low, full_high, last = QUERIES(b, 0, BN, M, N, mask_tensors, mask_shapes)
        tl.store(indices + b, first + full_low + full_high + last)
    for n0 in range(low, high, BN):
        n = (n0 + tl.arange(0, BN))[None, :]
        at = m.to(tl.int64) * N + n
        s = tl.load(scores + at)
        seen = (m < M) & (n < N)
        if SEEN is not None:
            seen = seen & SEEN(b, h, m, n, M, N, mask_tensors, mask_shapes)
        for i in tl.static_range(len(SCORES)):
            found = SCORES[i](s, b, h, m, n, M, N, score_tensors, score_shapes)
            tl.store(out + at + i, found, mask=seen)
        for i in tl.static_range(len(INDICES)):
            found = INDICES[i](s, b, h, m, n, M, N, score_tensors, score_shapes)
            tl.store(indices + at + i, found, mask=seen)


def _signature(given: Captures) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The types of tensors and of shape numbers; ones are constants, as in a launch."""
    types = tuple([_TYPES[tensor.dtype] for tensor in given.tensors])
    return types, tuple(["constexpr" if number == 1 else "i32" for number in given.shapes])


def compiled(
    variant: Variant, mask: Sequence[Tensor], score: Sequence[Tensor], target: GPUTarget
) -> Any:
    """All functions of a variant in one kernel, for a target."""
    arguments: dict[str, Any] = {"out": "*fp32", "indices": "*i64", "scores": "*fp32"}
    arguments |= {"M": "i32", "N": "i32"}
    constants: dict[tuple[int, ...], Any] = {}
    for name, tensors in (("mask", mask), ("score", score)):
        given = captures([tensor.detach() for tensor in tensors])
        types, numbers = _signature(given)
        arguments |= {f"{name}_tensors": types, f"{name}_shapes": numbers}
        place = _everything.arg_names.index(f"{name}_shapes")
        constants |= {(place, at): 1 for at, number in enumerate(given.shapes) if number == 1}
    scores = tuple([f for f in (variant.score, variant.gain, *variant.loads) if f is not None])
    for name, value in {
        "SEEN": variant.seen,
        "KEYS": variant.keys_of,
        "QUERIES": variant.queries_of,
        "SCORES": scores,
        "INDICES": variant.load_indices,
        "BM": 64,
        "BN": 64,
    }.items():
        arguments[name] = "constexpr"
        constants[(_everything.arg_names.index(name),)] = value
    source = ASTSource(_everything, signature=arguments, constexprs=constants)
    return triton.compile(source, target=target, options={"num_warps": 4})


def main(target: str, names: Sequence[str]) -> None:
    """Compile some variants of the catalogue (all without names)."""
    backend, _, chip = target.partition(":")
    arch = int(chip) if chip.isdigit() else chip
    width = 64 if chip.startswith("gfx9") else 32
    for variant in CATALOGUE:
        if names and variant.name not in names:
            continue
        problem, operands = Call(variant, torch.float32).asked()
        given = operands.mask_tensors, operands.score_tensors
        ranks = [tuple([each.dim() for each in tensors]) for tensors in given]
        kernel = compiled(
            variant_of(problem, ranks[0], ranks[1]), *given, GPUTarget(backend, arch, width)
        )
        binary = kernel.asm["cubin" if backend == "cuda" else "hsaco"]
        print(variant.name, len(binary), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
