"""The ways of doing a work: ours, torch's, plain attention and its cures, and published ones.

FlexAttention takes masks and scores as functions of tensors, which are made from their programs.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import tilewise
from tilelab.cases.variants import seen_by
from tilelab.common.torch_private import keep_buffers
from tilelab.peers.approximations import (
    Operands,
    bigbird,
    directions,
    linear,
    linformer,
    local,
    longformer,
    performer,
    projection,
    reformer,
)
from tilelab.peers.work import SEED, Attend, Given, Work, chunked, plain, problem_of, seen_rows
from tilewise import masks, patterns
from tilewise.compat.sdpa import scaled_dot_product_attention as by_torchs_signature
from tilewise.variants.program import Instr
from tilewise.variants.values import Mask, Score

OURS = "tilewise"
_CAUSAL = ("causal",)
ROWS = 256  # of a chunk of plain attention
_WITH_GRADIENTS = 1.6  # three matrices at the softmax's backward in the place of two
Make = Callable[[Work, Given], Attend]


@dataclass(frozen=True)
class Method:
    """A way of doing a work."""

    name: str  # for tables
    make: Make  # gives the function; masks are made here, not in the timed call
    exact: bool = True  # whether the 2x rule holds it; else its error is printed
    why_not: Callable[[Work], str] = lambda _: ""  # what it cannot do of a work; empty if it can
    # How many matrices of all heads its forward pass holds at once, roughly.
    matrices: Callable[[Work], float] = lambda _: 0.0
    same_dropout: bool = False  # whether it drops what ours drops
    statistics: bool = False  # whether it gives statistics of rows

    def bytes(self, work: Work) -> float:
        """About what its matrices need: for what is not to be tried."""
        times = 1.0 if work.passes == "forward" else _WITH_GRADIENTS
        return work.matrix_bytes * self.matrices(work) * times


def exact(device: str, *, with_flex: bool = True) -> list[Method]:
    """Return all exact methods that a device has."""
    backends = tuple(_SDPA) if device == "cuda" else ("flash", "math")
    found = [ours(), *(sdpa(name) for name in backends), written_out()]
    return [*found, *cures(), *([flex()] if with_flex else [])]


def ours() -> Method:
    """tilewise.attention."""
    return Method(
        OURS, lambda work, given: _ours(work, work.drawn_mask), same_dropout=True, statistics=True
    )


def by_door() -> Method:
    """Ours by the arguments of torch's function, with what that costs."""

    def make(work: Work, given: Given) -> Attend:
        grouped = work.heads != work.kv_heads
        return lambda q, k, v: by_torchs_signature(q, k, v, enable_gqa=grouped)

    return Method(OURS, make)


def block_sparse(name: str, pattern: Callable[[int], Any]) -> Method:
    """Ours with a block-sparse pattern on top: fast, and not what the work is."""

    def make(work: Work, given: Given) -> Attend:
        mask = pattern(work.keys)
        if work.mask:
            mask = mask & work.drawn_mask
        return _ours(work, tilewise.BlockMask.of(mask, work.keys, batch=work.batch).to(work.device))

    return Method(f"{OURS} {name}", make, exact=False)


def by_lists() -> Method:
    """tilewise.attention by key lists.

    They are what the mask lets each row see: of all heads the same keys, of all rows as many.
    """

    def make(work: Work, given: Given) -> Attend:
        seen = shown(work, given, work.queries)[0, 0]
        keys = seen.nonzero()[:, 1].view(1, 1, work.queries, -1).to(torch.int32)
        keys = keys.expand(work.batch, -1, -1, -1)
        return lambda q, k, v: tilewise.attention(q, k, v, keys=keys)

    return Method(OURS, make)


def by_drawn_lists() -> Method:
    """tilewise.attention by the lists of a work that has some, which never were a mask."""

    def make(work: Work, _: Given) -> Attend:
        keys = work.drawn_lists.expand(work.batch, 1, -1, -1)
        return lambda q, k, v: tilewise.attention(q, k, v, keys=keys)

    return Method(f"{OURS}, key lists", make)


def masked_by_lists() -> Method:
    """Torch's scaled_dot_product_attention with the lists of a work as a mask."""

    def make(work: Work, _: Given) -> Attend:
        mask = seen_by(work.drawn_lists, work.keys)
        grouped = work.heads != work.kv_heads
        return lambda q, k, v: scaled_dot_product_attention(
            q, k, v, attn_mask=mask, enable_gqa=grouped
        )

    # The mask, and the same in the operands' dtype.
    return Method("sdpa, mask", make, matrices=lambda work: 1.25 / (work.batch * work.heads))


def over_all_keys() -> Method:
    """Ours without the mask: what lists save, and not what the work is."""
    return Method(f"{OURS}, all keys", lambda work, given: _ours(work, None), exact=False)


def _ours(work: Work, mask: Any) -> Attend:
    if callable(mask):
        mask = masks.function(mask)  # called once, and not in every timed call
    keywords: dict[str, Any] = {"mask": mask, "score": work.drawn_score, "backend": work.backend}
    if work.dropout_p:
        keywords |= {"dropout_p": work.dropout_p, "seed": SEED}
    if work.statistics:
        keywords["return_stats"] = "top1" if work.statistics == "top1" else True
        return lambda q, k, v: tilewise.attention(q, k, v, **keywords).out
    return lambda q, k, v: tilewise.attention(q, k, v, **keywords)


_SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def sdpa(name: str = "") -> Method:
    """Return the scaled_dot_product_attention of torch with one of its backends.

    ``name`` is cudnn, flash, efficient or math; empty where torch chooses.
    """
    kind = _SDPA.get(name)

    def make(work: Work, given: Given) -> Attend:
        keywords: dict[str, Any] = {"dropout_p": work.dropout_p}
        if work.heads != work.kv_heads:
            keywords["enable_gqa"] = True
        causal, mask = as_dense(work, given)
        if causal:
            keywords["is_causal"] = True
        elif mask is not None:
            keywords["attn_mask"] = mask

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # Why a backend declines: its error says so too.
            with nullcontext() if kind is None else sdpa_kernel(kind), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return scaled_dot_product_attention(q, k, v, **keywords)

        return attend

    def matrices(work: Work) -> float:
        return 3.0 if name == "math" else 1.5 if work.mask not in ((), _CAUSAL) else 0.0

    return Method(f"sdpa {name}".rstrip(), make, True, no_score, matrices)


def as_dense(work: Work, given: Given) -> tuple[bool, Tensor | None]:
    """Return a work's variant as torch's sdpa takes it: whether it is causal, or else its mask.

    The mask is True where a pair attends, or what a bias adds to the scores; None for neither.
    """
    if work.mask == _CAUSAL and work.queries == work.keys:  # torch aligns the first rows
        return True, None
    if work.mask:
        return False, shown(work, given, work.queries)
    return False, _added(work) if work.score else None


def no_score(work: Work) -> str:
    """Return that a work has a score that is more than a bias; empty if it has none."""
    return "it takes no score function" if work.score and _added(work) is None else ""


def _added(work: Work) -> Tensor | None:
    """Return the tensor that a score adds, where it does nothing else and there is no mask."""
    score = work.drawn_score
    if work.mask or not isinstance(score, Score):
        return None
    return score.captured[0] if [each.op for each in score.program] == ["bias"] else None


def written_out() -> Method:
    """Plain attention, which writes its matrix."""
    return Method("plain", plain, matrices=lambda _: 2.5)


def method_named(name: str, device: str, rows: int) -> Method:
    """Return the method of that name; ``rows`` are those of a chunk, for a cure."""
    lists = [by_drawn_lists(), over_all_keys(), masked_by_lists()]
    every = [*cures(rows), sdpa(), *exact(device), *rivals(), *lists]
    return next(method for method in every if method.name == name)


def cures(rows: int = ROWS) -> list[Method]:
    """Plain attention some rows at a time, keeping its parts or computing them again."""
    return [
        Method(
            "plain, chunked",
            lambda work, given: chunked(work, given, rows),
            matrices=lambda work: 0.0 if work.passes == "forward" else 1.0,
        ),
        Method(
            "plain, checkpointed",
            lambda work, given: chunked(work, given, rows, again=True),
            why_not=lambda work: "it is the chunked one" if work.passes == "forward" else "",
        ),
    ]


def flex(*, compiled: bool = True) -> Method:
    """FlexAttention."""

    def make(work: Work, given: Given) -> Attend:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        block_mask, score = None, flex_score(work)
        if work.mask:
            sizes = own_masks(work, given)
            mask = flex_mask(work) or _looked_up(work, given)
            block_mask = create_block_mask(
                mask, *sizes, work.queries, work.keys, device=work.device
            )
        function: Any = flex_attention
        if compiled:
            torch.compiler.reset()  # it stops compiling after some variants
            keep_buffers()  # gradients are asked for again and again from one graph
            function = torch.compile(flex_attention, dynamic=False)
        grouped = work.heads != work.kv_heads
        return lambda q, k, v: function(
            q, k, v, score_mod=score, block_mask=block_mask, enable_gqa=grouped
        )

    def why_not(work: Work) -> str:
        if work.dropout_p:
            return "it has no dropout"
        if work.device == "cpu" and work.passes != "forward":
            return "it has no backward on a CPU"
        return "the score is no function" if work.score and flex_score(work) is None else ""

    def matrices(work: Work) -> float:
        return 1.0 if work.mask else 0.0  # of its block mask, while it is made

    return Method("flex_attention", make, True, why_not, matrices)


def own_masks(work: Work, given: Given) -> tuple[int | None, int | None]:
    """Return how many batch items and heads have a mask of their own; None where all share one."""
    batches, heads = shown(work, given, 1).shape[:2]
    return (batches if batches > 1 else None), (heads if heads > 1 else None)


def _looked_up(work: Work, given: Given) -> Callable[..., Any]:
    """Return the mask as a lookup in the whole matrix."""
    pairs = shown(work, given, work.queries)
    batches, heads = pairs.shape[:2]
    return lambda b, h, m, n: pairs[b if batches > 1 else 0, h if heads > 1 else 0, m, n]


def shown(work: Work, given: Given, rows: int) -> Tensor:
    """Return which pairs of the first rows attend, [B or 1, Hq or 1, rows, N]."""
    seen = seen_rows(*problem_of(work, given), [range(rows)])
    assert seen is not None
    return ~seen.hidden


def rivals() -> list[Method]:
    """Our block-sparse kernel with the paper's pattern, then what others published."""
    return [
        block_sparse("butterfly", lambda _: patterns.butterfly(128)),
        _published("local", local),
        _published("Longformer", longformer),
        _published("BigBird", bigbird),
        _published("Linformer", linformer, project=lambda work: projection(work.keys)),
        _published("Reformer", reformer),
        _published("linear attention", linear, drops=False),
        _published("Performer", performer, drops=False, rows=_directions),
    ]


def _directions(work: Work) -> Tensor:
    return directions(max(1, round(work.head_dim * math.log(work.head_dim))), work.head_dim)


def _published(
    name: str,
    attend: Callable[..., Tensor],
    *,
    drops: bool = True,
    **drawn: Callable[[Work], Tensor],
) -> Method:
    """Return a published method; ``drawn`` makes tensors that it takes, in the operands' dtype."""

    def make(work: Work, given: Given) -> Attend:
        more = {key: of(work).to(given.q) for key, of in drawn.items()}
        keys = shown(work, given, 1)[0, 0, 0] if work.mask == ("padded",) else None
        return lambda q, k, v: attend(Operands(q, k, v, keys, work.dropout_p), **more)

    def why_not(work: Work) -> str:
        if work.dropout_p and not drops:
            return "it has no probabilities to drop"
        return "it has no grouped keys" if work.heads != work.kv_heads else ""

    return Method(name, make, exact=False, why_not=why_not)


Function = Callable[..., Any]


def flex_mask(work: Work) -> Function | None:
    """Return the mask as a function (b, h, m, n); None where only its whole matrix can say it."""
    mask = work.drawn_mask
    if not isinstance(mask, Mask):
        return mask if callable(mask) else None
    stack: list[Function] = []
    for instr in mask.program:
        if instr.op in ("and", "or"):
            second, first = stack.pop(), stack.pop()
            stack.append(_joined(first, second, instr.op))
            continue
        leaf = _leaf(instr, [mask.captured[slot] for slot in instr.slots], work.keys - work.queries)
        if leaf is None:
            return None
        stack.append(leaf)
    return stack.pop()


def _joined(first: Function, second: Function, word: str) -> Function:
    if word == "and":
        return lambda b, h, m, n: first(b, h, m, n) & second(b, h, m, n)
    return lambda b, h, m, n: first(b, h, m, n) | second(b, h, m, n)


def _leaf(instr: Instr, captured: list[Tensor], beyond: int) -> Function | None:
    """Return an operation of a mask; ``beyond`` is how many more keys there are than queries."""
    if instr.op == "same_document":
        queries, keys = (_lookup(ids) for ids in captured)
        return lambda b, h, m, n: queries(b, m) == keys(b, n)
    if instr.op == "below" and not captured:
        (length,) = instr.params
        return lambda b, h, m, n: n < length
    if instr.op != "band":
        return None
    left, right, anchor = (int(number) for number in instr.params)
    shift = beyond * anchor
    if left < 0:
        return lambda b, h, m, n: n <= m + (shift + right)
    if right < 0:
        return lambda b, h, m, n: m - n <= left - shift
    return lambda b, h, m, n: (m - n <= left - shift) & (n - m <= shift + right)


def flex_score(work: Work) -> Function | None:
    """Return the score as a function (s, b, h, m, n); None where it is none and has no such one."""
    score = work.drawn_score
    if not isinstance(score, Score):
        return score if callable(score) else None
    if len(score.program) > 1:
        return None
    ((op, params, slots),) = score.program
    captured = [_lookup(score.captured[slot]) for slot in slots]
    if op == "softcap":
        cap = params[0]
        return lambda s, b, h, m, n: cap * torch.tanh(s / cap)
    if op == "bias":
        return lambda s, b, h, m, n: s + captured[0](b, h, m, n)
    if op != "alibi" or work.queries != work.keys:
        return None
    if work.mask == ("causal",):  # no distance is below 0
        return lambda s, b, h, m, n: s - captured[0](b, h) * (m - n)
    return lambda s, b, h, m, n: s - captured[0](b, h) * torch.abs(m - n)


def _lookup(tensor: Tensor) -> Function:
    """Return what reads a tensor at a place; dimensions of 1 and absent ones do not count."""
    kept = [index - tensor.dim() for index, size in enumerate(tensor.shape) if size > 1]
    table = tensor.squeeze()
    return lambda *place: table[tuple([place[index] for index in kept])]
