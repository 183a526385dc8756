"""What the modules beside attention take, next to plain torch: scripts/bench_modules.py.

- ``loss``: ``linear_cross_entropy``, forward and backward.
- ``indexer``: ``top_keys``.
- ``latent``: decoding over a latent cache. "read" adds up the bytes of the cache, so its time over
  ours is the share of the memory's bandwidth.

One thread, its processor time, all methods in turn; medians, and ratios to plain torch or to
reading. Bytes are the peak of a call beyond its operands, the results among them.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

import tilewise
from tilelab.common.clock import interleave, seconds_of
from tilelab.common.environment import describe
from tilelab.common.memory import highest
from tilewise import masks

DTYPES = (torch.float32, torch.bfloat16)
LOSSES = ((2048, 768, 32000), (1024, 768, 128000), (1024, 512, 256000))  # tokens, width, words
INDEXED = ((4096, 4096), (256, 32768), (1, 32768))  # queries and keys
INDEX_HEADS, INDEX_WIDTH, CHOSEN = 64, 128, 2048
LATENT, VALUES, TOKENS, HEADS = 576, 512, 65536, (1, 2, 4, 8, 16, 128)
MEASURED = 1 << 24  # bytes: the peak of a smaller call is within the noise


class Case(NamedTuple):
    """Calls that give the same, the one to compare with first."""

    module: str
    name: str
    dtype: str
    calls: Mapping[str, Callable[[], Any]]
    operand_bytes: int  # of the operands, and of the gradients if there are some


def drawn(dtype: torch.dtype, *sizes: int) -> Tensor:
    """Return standard normal numbers, the same for the same sizes."""
    generator = torch.Generator().manual_seed(len(sizes))
    return torch.randn(sizes, generator=generator).to(dtype)


def losses() -> Iterator[Case]:
    """Yield the loss of vocabularies; plain code makes it in float32, as trainers do."""
    for dtype in DTYPES:
        for tokens, width, words in LOSSES:
            hidden = drawn(dtype, tokens, width).requires_grad_()
            weight = (drawn(dtype, words, width) * width**-0.5).requires_grad_()
            targets = torch.arange(tokens) * 7919 % words

            def gradients(
                loss: Callable[[Tensor, Tensor, Tensor], Tensor],
                operands: tuple[Tensor, Tensor, Tensor] = (hidden, weight, targets),
            ) -> tuple[Tensor, ...]:
                return torch.autograd.grad(loss(*operands), operands[:2])

            name = f"{tokens} tokens, width {width}, {words:,} words"
            calls = {"plain": partial(gradients, plain_loss)}
            calls["tilewise"] = partial(gradients, tilewise.linear_cross_entropy)
            both = 2 * (hidden.nbytes + weight.nbytes)
            yield Case("loss", name, str(dtype), calls, both)


def plain_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss from all logits."""
    return functional.cross_entropy(functional.linear(hidden, weight).float(), targets)


def indexers() -> Iterator[Case]:
    """Yield an indexer's choice under a causal mask."""
    for queries, keys in INDEXED:
        q = drawn(torch.float32, 1, INDEX_HEADS, queries, INDEX_WIDTH)
        k = drawn(torch.float32, 1, 1, keys, INDEX_WIDTH)
        weights = drawn(torch.float32, 1, queries, INDEX_HEADS)
        chosen = partial(tilewise.top_keys, q, k, weights, CHOSEN, mask=masks.causal())
        calls = {"plain": partial(plain_keys, q, k, weights), "tilewise": chosen}
        name = f"{queries:,} queries, {keys:,} keys, {INDEX_HEADS} heads, k = {CHOSEN:,}"
        yield Case("indexer", name, str(q.dtype), calls, q.nbytes + k.nbytes + weights.nbytes)


def plain_keys(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """Return the keys with the largest scores, from all scores."""
    scores = torch.einsum("bhmd,bnd->bmhn", q, k[:, 0]).mul_(INDEX_WIDTH**-0.5).relu_()
    total = torch.einsum("bmhn,bmh->bmn", scores, weights)
    rows, keys = total.shape[1:]
    hidden = torch.ones(rows, keys, dtype=torch.bool).triu_(keys - rows + 1)
    return total.masked_fill_(hidden, -torch.inf).topk(min(CHOSEN, keys)).indices


def latents() -> Iterator[Case]:
    """Yield a decoded token of several numbers of heads over one latent cache."""
    for dtype in DTYPES:
        cache = drawn(dtype, 1, 1, TOKENS, LATENT)
        for heads in HEADS:
            q = drawn(dtype, 1, heads, 1, LATENT)
            read = cache.view(torch.int64).sum
            attend = partial(tilewise.attention, q, cache, cache[..., :VALUES], scale=192**-0.5)
            name = f"{heads} heads, {TOKENS:,} tokens of {LATENT}"
            yield Case("latent", name, str(dtype), {"read": read, "tilewise": attend}, cache.nbytes)


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Return the seconds of every call, and its bytes."""
    held = {}
    for name, call in case.calls.items():
        call()
        held[name] = highest(call, "cpu")[0]
    once = dict.fromkeys(case.calls, 1)
    samples = interleave(case.calls, once, rounds, lambda call, _: seconds_of(call))
    about = {"module": case.module, "case": case.name, "dtype": case.dtype}
    return {**about, "operand_bytes": case.operand_bytes, "peak_bytes": held, "samples": samples}


def line(found: dict[str, Any]) -> str:
    """Return a row of the table: milliseconds, the ratio to the first method, bytes."""
    (first, base), *_ = found["samples"].items()
    cells = [found["module"], found["case"], found["dtype"].removeprefix("torch.")]
    for name, times in found["samples"].items():
        pairs = zip(times, base, strict=True)
        ratio = statistics.median(own / other for own, other in pairs)
        cell = f"{name} {1e3 * statistics.median(times):.4g} ms"
        if name != first:
            cell += f", {ratio:.2f}"
        if (held := found["peak_bytes"][name]) >= MEASURED:
            cell += f", {held / 2**20:,.0f} MiB"
        cells.append(cell)
    return "| " + " | ".join(cells) + " |"


MODULES = {"loss": losses, "indexer": indexers, "latent": latents}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--modules", nargs="+", choices=MODULES, default=list(MODULES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = {"machine": describe(1), "runs": []}
    for module in options.modules:
        for case in MODULES[module]():
            found = measure(case, options.rounds)
            print(line(found), flush=True)
            record["runs"].append(found)
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
