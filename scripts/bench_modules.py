"""What the modules beside attention take, next to plain torch: scripts/bench_modules.py.

- ``loss``: ``linear_cross_entropy``, forward and backward, beside torch's; ``few`` tokens, and
  ``large`` vocabularies of 128,000 words and more.
- ``indexer``: ``top_keys``.
- ``latent``: decoding over a latent cache. "read" adds up the bytes of the cache, so its time over
  ours is the share of the memory's bandwidth.
- ``model``: a decoded token of a layer of transformers' DeepSeek-V3, where that is installed.
- ``lists``: attention by key lists over two lengths, alone, so that a call follows a call. 64 rows
  of 64 heads of width 128 that share a key head.
- ``neighbours``: rows whose lists differ by a share of their keys, alone and with shared lists.
- ``heads``: RMSNorm and rotation of heads in one pass (``nn.rotary(norm=)``), beside torch's own.
- ``block``: a Llama-like block, and parts of it that could be fused. For each part there are the
  operations of torch, and products that read and write as many numbers as one fused pass would.
  The block over the difference is what fusing could give at most.

One thread, its processor time, all methods in turn; medians, and ratios of medians to the first
method. Bytes are the peak of a call beyond its operands, the results among them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import tilewise
from tilelab.common.clock import interleave, seconds_of
from tilelab.common.environment import write_runs
from tilelab.common.memory import highest
from tilewise import masks
from tilewise.engine import shared_lists
from tilewise.serving.pages import quantised

SINGLE, HALF = torch.float32, torch.bfloat16
# Tokens, width, words; the dtypes of hidden states and weights.
LOSSES = (
    (2048, 768, 32000, SINGLE, SINGLE),
    (1024, 768, 128000, SINGLE, SINGLE),
    (1024, 512, 256000, SINGLE, SINGLE),
    (2048, 768, 32000, HALF, HALF),
    (1024, 768, 128000, HALF, HALF),
    (1024, 512, 256000, HALF, HALF),
    (2048, 768, 32000, HALF, SINGLE),
)
FEW = tuple(
    (tokens, 768, 50257, dtype, dtype) for dtype in (SINGLE, HALF) for tokens in (32, 64, 256)
)
INT8, FLOAT8 = torch.int8, torch.float8_e4m3fn
# Queries and keys.
INDEXED = (
    (4096, 4096, SINGLE),
    (256, 32768, SINGLE),
    (256, 32768, HALF),
    (256, 32768, INT8),
    (256, 32768, FLOAT8),
    (1, 32768, SINGLE),
    (1, 32768, INT8),
    (1, 32768, FLOAT8),
)
INDEX_HEADS, INDEX_WIDTH, CHOSEN = 64, 128, 2048
LATENT, VALUES, TOKENS, HEADS, PAGE = 576, 512, 65536, (1, 2, 4, 8, 16, 128), 128
CACHED = (1024, 4096, 16384)
LISTED, LISTED_KEYS, ROWS = (2048, 8192, 32768), (32768, 131072), 64
CHANGES, SHARING = (0.0, 0.02, 0.05, 0.1, 0.2), (1, 4, 8, 16, 32, 64)  # of keys a row; heads
# Batch, heads, tokens, width.
NORMED = ((4, 12, 1024, 64), (1, 16, 4096, 64), (1, 32, 4096, 128))
BLOCK, HIDDEN = (2, 1024, 768), 2048  # batch, tokens, width; the feed-forward part's width
MEASURED = 1 << 24  # bytes: the peak of a smaller call is within the noise


class Case(NamedTuple):
    """Calls that give the same, the one to compare with first."""

    module: str
    name: str
    dtype: torch.dtype
    calls: Mapping[str, Callable[[], Any]]
    operand_bytes: int  # of the operands, and of the gradients if there are some


def drawn(dtype: torch.dtype, *sizes: int) -> Tensor:
    """Return standard normal numbers, the same for the same sizes."""
    generator = torch.Generator().manual_seed(len(sizes))
    return torch.randn(sizes, generator=generator).to(dtype)


def losses(sizes: Sequence[tuple[Any, ...]] = LOSSES) -> Iterator[Case]:
    """Yield the loss of vocabularies. Plain code makes it of float32 logits, as trainers do."""
    for tokens, width, words, dtype, weights in sizes:
        hidden = drawn(dtype, tokens, width).requires_grad_()
        weight = (drawn(weights, words, width) * width**-0.5).requires_grad_()
        targets = torch.arange(tokens) * 7919 % words

        def gradients(
            loss: Callable[[Tensor, Tensor, Tensor], Tensor],
            operands: tuple[Tensor, Tensor, Tensor] = (hidden, weight, targets),
        ) -> tuple[Tensor, ...]:
            return torch.autograd.grad(loss(*operands), operands[:2])

        ways = {"plain": plain_loss, "tilewise": tilewise.linear_cross_entropy}
        own = getattr(functional, "linear_cross_entropy", None)
        if own is not None and dtype == weights:
            ways["torch"] = own
            if words == LOSSES[0][2]:
                options = torch.nn.LinearCrossEntropyOptions()
                ways["torch, in chunks"] = partial(own, options=options)
        name = f"{tokens:,} tokens, width {width}, {words:,} words"
        name += ", weights in float32" if dtype != weights else ""
        both = 2 * (hidden.nbytes + weight.nbytes)
        calls = {each: partial(gradients, loss) for each, loss in ways.items()}
        yield Case("loss", name, dtype, calls, both)


def plain_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss from all logits."""
    logits = functional.linear(hidden, weight.to(hidden.dtype)).float()
    return functional.cross_entropy(logits, targets)


def indexers() -> Iterator[Case]:
    """Yield an indexer's choice under a causal mask."""
    for queries, keys, dtype in INDEXED:
        stored = dtype if dtype.itemsize > 1 else SINGLE
        q = drawn(stored, 1, INDEX_HEADS, queries, INDEX_WIDTH)
        k = drawn(stored, 1, 1, keys, INDEX_WIDTH)
        weights, scales = drawn(stored, 1, queries, INDEX_HEADS), None
        if stored is not dtype:
            q, of_q = quantised(q, dtype)
            k, scales = quantised(k, dtype)
            weights = weights * of_q.transpose(1, 2)
        chosen = partial(
            tilewise.top_keys, q, k, weights, CHOSEN, mask=masks.causal(), key_scales=scales
        )
        calls = {"plain": partial(plain_keys, q, k, weights, scales), "tilewise": chosen}
        name = f"{queries:,} queries, {keys:,} keys, {INDEX_HEADS} heads, k = {CHOSEN:,}"
        yield Case("indexer", name, dtype, calls, q.nbytes + k.nbytes + weights.nbytes)


def plain_keys(q: Tensor, k: Tensor, weights: Tensor, scales: Tensor | None) -> Tensor:
    """Return the keys with the largest scores, from all scores in float32."""
    q, k, weights = (x.float() for x in (q, k, weights))
    scores = torch.einsum("bhmd,bnd->bmhn", q, k[:, 0]).mul_(INDEX_WIDTH**-0.5).relu_()
    total = torch.einsum("bmhn,bmh->bmn", scores, weights)
    if scales is not None:
        total *= scales
    rows, keys = total.shape[1:]
    hidden = torch.ones(rows, keys, dtype=torch.bool).triu_(keys - rows + 1)
    return total.masked_fill_(hidden, -torch.inf).topk(min(CHOSEN, keys)).indices


def latents() -> Iterator[Case]:
    """Yield a decoded token of several numbers of heads over one latent cache."""
    scale = 192**-0.5
    for dtype in (SINGLE, HALF):
        cache = drawn(dtype, 1, 1, TOKENS, LATENT)
        pages = cache.view(-1, 1, PAGE, LATENT)
        table = torch.arange(len(pages), dtype=torch.int32)[None]
        step = tilewise.PagedStep(table, torch.tensor([TOKENS], dtype=torch.int32), page_size=PAGE)
        for heads in HEADS:
            q = drawn(dtype, 1, heads, 1, LATENT)
            near = cache, cache[..., :VALUES]
            calls: dict[str, Callable[[], Any]] = {
                "read": cache.view(torch.int64).sum,
                "tilewise": partial(tilewise.attention, q, *near, scale=scale),
                "in pages": partial(
                    tilewise.attention_paged, q, pages, pages[..., :VALUES], step, scale=scale
                ),
            }
            name = f"{heads} heads, {TOKENS:,} tokens of {LATENT}"
            yield Case("latent", name, dtype, calls, cache.nbytes)


def models() -> Iterator[Case]:
    """Yield a decoded token of one layer of DeepSeek-V3 behind a cache, for all that may read it.

    The layer has 16 heads, a hidden size and a feed-forward part of 2,048, and 1,000 words.
    """
    try:
        import transformers
    except ImportError as error:
        print(f"without models: {error}")
        return
    from tilewise.integrations.transformers import absorb, latent_cache, register

    register()
    config = transformers.DeepseekV3Config(
        vocab_size=1000,
        hidden_size=2048,
        intermediate_size=2048,
        num_hidden_layers=1,
        num_attention_heads=16,
        num_key_value_heads=16,
        kv_lora_rank=VALUES,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=LATENT - VALUES,
        v_head_dim=128,
        mlp_layer_types=["dense"],
        max_position_embeddings=2 * CACHED[-1],
    )
    torch.manual_seed(0)
    kind = transformers.DeepseekV3ForCausalLM
    whole = kind._from_config(config, attn_implementation="tilewise").eval()
    for dtype in (SINGLE, HALF):
        by_name = {name: deepcopy(whole).to(dtype) for name in ("eager", "sdpa", "tilewise")}
        for name, model in by_name.items():
            model.set_attn_implementation(name)
        absorbed = deepcopy(by_name["tilewise"])
        absorb(absorbed)
        ways = {**by_name, "absorb": absorbed, "absorb, latent_cache": absorbed}
        for tokens in CACHED:
            ids = torch.randint(1000, (1, tokens), generator=torch.Generator().manual_seed(1))
            usual, own = transformers.DynamicCache(config=config), latent_cache(absorbed)
            for cache in (usual, own):
                decoded(by_name["tilewise"], ids, cache)
            caches = [*(deepcopy(usual) for _ in range(4)), own]
            calls = {
                name: partial(decoded, model, ids[:, :1], cache)
                for (name, model), cache in zip(ways.items(), caches, strict=True)
            }
            yield Case("model", f"{tokens:,} tokens in the cache", dtype, calls, 0)


def decoded(model: Any, token: Tensor, cache: Any) -> Tensor:
    """Return the logits of more tokens, which the cache keeps."""
    with torch.no_grad():
        found: Tensor = model(token, past_key_values=cache).logits
    return found


def listed() -> Iterator[Case]:
    """Yield calls with random lists, forward and in both passes."""
    for dtype, keys, many in product((SINGLE, HALF), LISTED_KEYS, LISTED):
        q = drawn(dtype, 1, 64, ROWS, 128).requires_grad_()
        k, v = (drawn(dtype, 1, 1, keys, 128).requires_grad_() for _ in range(2))
        drawing = torch.rand(1, 1, ROWS, keys, generator=torch.Generator().manual_seed(0))
        call = partial(tilewise.attention, keys=drawing.topk(many).indices.int())
        name = f"{many:,} of {keys:,} keys"
        held = sum(x.nbytes for x in (q, k, v))
        yield Case("lists", f"{name}, forward", dtype, {"tilewise": no_grad(call, q, k, v)}, held)
        both = {"tilewise": both_passes(call, q, k, v)}
        yield Case("lists", f"{name}, both passes", dtype, both, 2 * held)


def neighbours() -> Iterator[Case]:
    """Yield 128 rows with 1,024 of 8,192 keys, by each row's list and by lists that rows share."""
    rules = {"_FORWARD": shared_lists._FORWARD, "_BACKWARD": shared_lists._BACKWARD}
    none = {name: rule._replace(worth=0.0) for name, rule in rules.items()}
    for dtype, heads, change in product((SINGLE, HALF), SHARING, CHANGES):
        q = drawn(dtype, 1, heads, 128, 128).requires_grad_()
        k, v = (drawn(dtype, 1, 1, 8192, 128).requires_grad_() for _ in range(2))
        call = partial(tilewise.attention, keys=changing(128, 1024, 8192, change))
        runs = {"forward": no_grad(call, q, k, v), "both passes": both_passes(call, q, k, v)}

        def under(rule: dict[str, Any], run: Callable[[], Any]) -> Callable[[], Any]:
            def ruled() -> Any:
                for name, value in rule.items():
                    setattr(shared_lists, name, value)
                return run()

            return ruled

        calls = {
            f"{way}, {words}": under(rule, run)
            for way, run in runs.items()
            for words, rule in (("alone", none), ("shared", rules))
        }
        name = f"{heads} heads to a key head, {change:.0%} of the keys change"
        yield Case("neighbours", name, dtype, calls, q.nbytes + k.nbytes + v.nbytes)


def changing(rows: int, many: int, keys: int, change: float) -> Tensor:
    """Return lists [1, 1, rows, many]: each row replaces a share of the keys of the row before."""
    generator = torch.Generator().manual_seed(0)
    found = [torch.randperm(keys, generator=generator)[:many]]
    new = int(many * change)
    for _ in range(rows - 1):
        free = torch.ones(keys, dtype=torch.bool).index_fill_(0, found[-1], False).nonzero()[:, 0]
        kept = found[-1][torch.randperm(many, generator=generator)[new:]]
        drawn_keys = free[torch.randperm(len(free), generator=generator)[:new]]
        found.append(torch.cat((kept, drawn_keys)))
    return torch.stack(found).int()[None, None]


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads as model code does, with angles [S, D] in the dtype of ``x``."""
    one, two = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-two, one), dim=-1) * sin


def both_passes(call: Callable[..., Tensor], *leaves: Tensor) -> Callable[[], Any]:
    """Return a call that computes the gradients of ``leaves`` too."""
    grad = torch.ones_like(call(*leaves))
    return lambda: torch.autograd.grad(call(*leaves), leaves, grad)


def normed_heads() -> Iterator[Case]:
    """Yield RMSNorm and rotation of heads, forward and in both passes."""
    for dtype, sizes in product((SINGLE, HALF), NORMED):
        batch, heads, tokens, width = sizes
        x = drawn(dtype, *sizes).requires_grad_()
        weight = drawn(dtype, width).requires_grad_()
        positions = torch.arange(tokens)
        angles = positions[:, None] * 10000.0 ** -(torch.arange(0, width, 2) / width)
        cos, sin = (
            f(torch.cat((angles, angles), dim=-1)).to(dtype) for f in (torch.cos, torch.sin)
        )

        def plain(x: Tensor, weight: Tensor, cos: Tensor = cos, sin: Tensor = sin) -> Tensor:
            return turned(functional.rms_norm(x, x.shape[-1:], weight, 1e-6), cos, sin)

        def ours(x: Tensor, weight: Tensor, positions: Tensor = positions) -> Tensor:
            return tilewise.nn.rotary(x, positions, norm=tilewise.nn.HeadNorm(weight))

        name = f"{batch} x {tokens:,} tokens, {heads} heads of {width}"
        forward = {"plain": no_grad(plain, x, weight), "tilewise": no_grad(ours, x, weight)}
        yield Case("heads", f"{name}, forward", dtype, forward, x.nbytes)
        both = {"plain": both_passes(plain, x, weight), "tilewise": both_passes(ours, x, weight)}
        yield Case("heads", f"{name}, both passes", dtype, both, 2 * x.nbytes)


def no_grad(call: Callable[..., Tensor], *given: Tensor) -> Callable[[], Tensor]:
    """Return a call without gradients."""

    def run() -> Tensor:
        with torch.no_grad():
            return call(*given)

    return run


class Block(nn.Module):
    """RMSNorm, attention with normalised and rotated heads, RMSNorm, SwiGLU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width, eps=1e-6) for _ in range(2))
        self.attention = tilewise.nn.Attention(
            width, width // 64, mask=masks.causal(), rotary=tilewise.nn.Rotary(), qk_norm=True
        )
        self.up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, width] to the same."""
        x = x + self.attention(self.norms[0](x))
        a, b = self.up(self.norms[1](x)).chunk(2, dim=-1)
        out: Tensor = x + self.down(swiglu(a, b))
        return out


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    """Return silu(a) b."""
    return functional.silu(a) * b


def gated(x: Tensor, gate: Tensor) -> Tensor:
    """Return what a sigmoid gate lets through."""
    return x * torch.sigmoid(gate)


def blocks() -> Iterator[Case]:
    """Yield a block and its parts, all in both passes."""
    for dtype in (SINGLE, HALF):
        torch.manual_seed(0)
        block = Block(BLOCK[-1], HIDDEN).to(dtype)
        x, y = (drawn(dtype, *BLOCK).requires_grad_() for _ in range(2))
        a, b = (drawn(dtype, *BLOCK[:2], HIDDEN).requires_grad_() for _ in range(2))
        weight = drawn(dtype, BLOCK[-1]).requires_grad_()

        def forward(x: Tensor, *_: Tensor, block: Block = block) -> Tensor:
            out: Tensor = block(x)
            return out

        def summed(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
            both = x + y
            return both + functional.rms_norm(both, both.shape[-1:], weight, 1e-6)

        def centred(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
            both = x + y
            return both + functional.layer_norm(both, both.shape[-1:], weight)

        calls = {
            "block": both_passes(forward, x, *block.parameters()),
            "SwiGLU": both_passes(swiglu, a, b),
            "SwiGLU in one pass": one_pass(a, b),
            "residual and norm, twice": twice(both_passes(summed, x, y, weight)),
            "residual and LayerNorm, twice": twice(both_passes(centred, x, y, weight)),
            "residual and norm in one pass, twice": twice(one_pass(x, y)),
            "gate": both_passes(gated, x, y),
            "gate in one pass": one_pass(x, y),
        }
        name = f"{BLOCK[0]} x {BLOCK[1]:,} tokens, width {BLOCK[2]}, hidden {HIDDEN:,}"
        yield Case("block", name, dtype, calls, x.nbytes)


def twice(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return two calls as one."""
    return lambda: (call(), call())


def one_pass(a: Tensor, b: Tensor) -> Callable[[], Any]:
    """Return what reads five tensors and makes three, as each of the fused parts would."""
    a, b = a.detach(), b.detach()
    return lambda: (a * b, b * a, a.clone())


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Return the seconds of every call, and its bytes."""
    held = {}
    for name, call in case.calls.items():
        call()
        held[name] = highest(call, "cpu")[0]
    once = dict.fromkeys(case.calls, 1)
    samples = interleave(case.calls, once, rounds, lambda call, _: seconds_of(call))
    about = {"module": case.module, "case": case.name, "dtype": str(case.dtype)}
    return {**about, "operand_bytes": case.operand_bytes, "peak_bytes": held, "samples": samples}


def line(found: dict[str, Any]) -> str:
    """Return a row of the table: milliseconds, the ratio to the first method, bytes."""
    medians = {name: statistics.median(times) for name, times in found["samples"].items()}
    base = next(iter(medians.values()))
    cells = [found["module"], found["case"], found["dtype"].removeprefix("torch.")]
    for name, seconds in medians.items():
        cell = f"{name} {1e3 * seconds:.4g} ms, {seconds / base:.2f}"
        if (held := found["peak_bytes"][name]) >= MEASURED:
            cell += f", {held / 2**20:,.0f} MiB"
        cells.append(cell)
    return "| " + " | ".join(cells) + " |"


MODULES = {
    "loss": losses,
    "large": partial(losses, [size for size in LOSSES if size[2] >= 128000]),
    "few": partial(losses, FEW),
    "indexer": indexers,
    "latent": latents,
    "model": models,
    "lists": listed,
    "neighbours": neighbours,
    "heads": normed_heads,
    "block": blocks,
}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--modules", nargs="+", choices=MODULES, default=list(MODULES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = chain.from_iterable(MODULES[module]() for module in options.modules)
    write_runs((measure(case, options.rounds) for case in cases), line, options.json)


if __name__ == "__main__":
    main()
