"""What variants in Python cost: scripts/bench_variants.py [--json FILE] [--rounds N] [--flex].

One thread, processor time of the calling thread, all cases in turn in one process; medians, and
the extra time over attention without a variant. ``--flex`` adds torch's compiled flex_attention
(forward; it has no backward on a CPU), whose compilation takes some ten seconds for each variant.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tilewise
from tilelab.common.clock import interleave, seconds_of
from tilewise import masks, scores
from tilewise.chips import detect
from tilewise.inspect.peaks import isa

HEADS, LENGTH, WIDTH = 4, 2048, 64
SLOPES = torch.tensor([2.0 ** -(2 * head + 2) for head in range(HEADS)])
TABLE = torch.randn(HEADS, 2 * LENGTH, generator=torch.Generator().manual_seed(0))
DOCUMENT = torch.arange(LENGTH) // 300
CAP = 30.0

Function = Callable[..., Any]


def alibi(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
    """Signed, so that it is no built-in one."""
    return s + SLOPES[h] * (n - m)


def softcap(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
    """A product, so that it is no built-in one."""
    return CAP * torch.tanh(s * (1 / CAP))


def window(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
    """A window as a score: no tile is skipped."""
    return torch.where((m - n < 1024) & (n - m < 1024), s, -math.inf)


def relative(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
    """A table over distances."""
    return s + TABLE[h, m - n + LENGTH - 1]


def documents(b: Any, h: Any, m: Any, n: Any) -> Any:
    """Causal within documents."""
    return (m >= n) & (DOCUMENT[m] == DOCUMENT[n])


CASES: dict[str, dict[str, Any]] = {
    "no variant": {},
    "ALiBi, built in": {"score": scores.alibi(SLOPES)},
    "ALiBi, Python": {"score": alibi},
    "window as a score, Python": {"score": window},
    "softcap, built in": {"score": scores.softcap(CAP)},
    "softcap, Python": {"score": softcap},
    "relative table, Python": {"score": relative},
    "documents and causal, Python": {"mask": documents},
    "statistics": {"return_stats": True},
    "statistics and top key": {"return_stats": "top1"},
    "causal, built in": {"mask": masks.causal()},
}
FLEX: dict[str, Function | None] = {
    "no variant": None,
    "ALiBi, Python": alibi,
    "window as a score, Python": window,
    "softcap, Python": softcap,
    "relative table, Python": relative,
}


def measure(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of processor time of every call, in turn."""
    for call in calls.values():
        call()
    return interleave(calls, dict.fromkeys(calls, 1), rounds, lambda call, _: seconds_of(call))


def forward_calls(q: Any, k: Any, v: Any) -> dict[str, Callable[[], Any]]:
    """The forward pass of every case."""

    def call(keywords: dict[str, Any]) -> Callable[[], Any]:
        return lambda: tilewise.attention(q, k, v, **keywords)

    return {name: call(keywords) for name, keywords in CASES.items()}


def backward_calls(q: Any, k: Any, v: Any) -> dict[str, Callable[[], Any]]:
    """The backward pass of every case, by q, k and v."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))

    def call(keywords: dict[str, Any]) -> Callable[[], Any]:
        found = tilewise.attention(q, k, v, **keywords)
        out = found if isinstance(found, torch.Tensor) else found.out
        grad = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

    return {name: call(keywords) for name, keywords in CASES.items()}


def flex_calls(q: Any, k: Any, v: Any) -> dict[str, Callable[[], Any]]:
    """The forward pass of flex_attention, compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    # It stops compiling after eight variants, with a warning: begin anew for each dtype.
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)

    def call(score: Function | None) -> Callable[[], Any]:
        return lambda: compiled(q, k, v, score_mod=score)

    return {name: call(score) for name, score in FLEX.items()}


def table(samples: dict[str, list[float]], flex: dict[str, list[float]]) -> list[str]:
    """Lines of Markdown."""
    base = statistics.median(samples["no variant"])
    lines = ["| variant | ms | extra | flex_attention, ms | ratio |", "|---|---|---|---|---|"]
    for name, times in samples.items():
        mine = statistics.median(times)
        other = statistics.median(flex[name]) if name in flex else None
        said = f"{other * 1e3:.1f} | {other / mine:.1f}x" if other is not None else " | "
        lines.append(f"| {name} | {mine * 1e3:.1f} | {(mine / base - 1) * 100:+.1f} % | {said} |")
    return lines


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--flex", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = {
        "chip": detect().name,
        "isa": isa(),
        "system": platform.platform(terse=True),
        "torch": torch.__version__,
        "shape": [1, HEADS, LENGTH, WIDTH],
        "passes": {},
    }
    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(1)
        shape = (1, HEADS, LENGTH, WIDTH)
        q, k, v = (torch.randn(shape, generator=generator).to(dtype) for _ in range(3))
        name = str(dtype).removeprefix("torch.")
        samples = measure(forward_calls(q, k, v), options.rounds)
        flex = measure(flex_calls(q, k, v), options.rounds) if options.flex else {}
        back = measure(backward_calls(q, k, v), options.rounds)
        record["passes"][name] = {"forward": samples, "flex_forward": flex, "backward": back}
        print(f"\n{name}, forward\n", *table(samples, flex), sep="\n")
        print(f"\n{name}, backward\n", *table(back, {}), sep="\n")
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
