"""The tensors of a case: always the same ones for the same case; its call, and its gradients."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tilewise
from tilelab.cases.case import Case
from tilelab.cases.variants import EVERY_MASK, EVERY_SCORE, Draw, Maker, tabled
from tilewise import KeyBlocks, masks
from tilewise.errors import InvalidArgument
from tilewise.inspect.calls import lowered
from tilewise.problem import Operands, Problem
from tilewise.variants.values import Mask, Score, as_mask, as_score


class Inputs(NamedTuple):
    """The tensors of a case, and the keywords of the call."""

    q: Tensor  # these three: dense [B, H, S, D], packed [T, H, D]
    k: Tensor
    v: Tensor
    mask: Mask | None  # these five: as in ``tilewise.attention``
    score: Score | None
    sinks: Tensor | None
    scale: float | None
    dropout_p: float
    seed: int  # of the dropout
    # Where sequences of queries and of keys begin and end; None if dense.
    cu_seqlens: tuple[Tensor, Tensor] | None
    keys: KeyBlocks | None = None  # the lists of keys that rows read, or None

    @property
    def slots(self) -> list[int]:
        """The captured tensors of the score that a gradient is defined for, in order."""
        if self.score is None:
            return []
        biases = {instr.slots[0] for instr in self.score.program if instr.op == "bias"}
        learned = {i for i, tensor in enumerate(self.score.captured) if tensor.requires_grad}
        return sorted(biases | learned)

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The tensors that a gradient is defined for, by name: q, k, v, captured 0.., sinks."""
        found = {"q": self.q, "k": self.k, "v": self.v}
        if self.score is not None:
            found |= {f"captured {slot}": self.score.captured[slot] for slot in self.slots}
        if self.sinks is not None:
            found["sinks"] = self.sinks
        return found

    def keywords(self) -> dict[str, Any]:
        """The keywords of the public call, but for ``keys``."""
        return {
            "mask": self.mask,
            "score": self.score,
            "sinks": self.sinks,
            "scale": self.scale,
            "dropout_p": self.dropout_p,
            "seed": self.seed if self.dropout_p else None,
        }

    def replaced(self, leaves: Mapping[str, Tensor]) -> Inputs:
        """Return the inputs with other tensors in the place of their leaves."""
        score = self.score
        if score is not None:
            captured = list(score.captured)
            for slot in self.slots:
                captured[slot] = leaves[f"captured {slot}"]
            score = Score(score.program, tuple(captured))
        q, k, v = leaves["q"], leaves["k"], leaves["v"]
        return self._replace(q=q, k=k, v=v, score=score, sinks=leaves.get("sinks"))

    def detached(self) -> Inputs:
        """Return the same inputs without gradients."""
        return self.replaced({name: leaf.detach() for name, leaf in self.leaves.items()})

    def convert(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """Return the same inputs with every differentiable tensor changed, as new leaves."""
        leaves = self.leaves.items()
        return self.replaced({n: change(leaf.detach()).requires_grad_() for n, leaf in leaves})


def _lay_out(values: Tensor, layout: str) -> Tensor:
    """Return [B, H, S, D] (or packed [S, H, D]) values in a memory layout; gaps hold NaN."""
    sizes = values.shape
    if layout == "bshd":
        rows_first = values.transpose(-3, -2).clone(memory_format=torch.contiguous_format)
        return rows_first.transpose(-3, -2)
    if layout == "strided":
        gaps = values.new_full((*sizes, 2), math.nan)
        gaps[..., 0] = values
        return gaps[..., 0]
    if layout == "expanded":
        return values[:1, :1].expand(sizes) if len(sizes) == 4 else values[:, :1].expand(sizes)
    if layout == "sliced":
        wide = values.new_full([size + 3 for size in sizes], math.nan)
        wide[tuple(slice(1, size + 1) for size in sizes)] = values
        return wide[tuple(slice(1, size + 1) for size in sizes)]
    return values


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor in another dtype with the same strides (``to`` would pack sparse ones)."""
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() == 0:
        return tensor.to(dtype)
    flat = tensor.as_strided((extent,), (1,))
    return flat.to(dtype).as_strided(tensor.shape, tensor.stride())


def _postfix(words: Sequence[str | Maker], draw: Draw) -> Mask | None:
    stack: list[Mask] = []
    for word in words:
        if word == "not":
            stack.append(~stack.pop())
        elif word == "tiles":
            stack.append(tabled(stack.pop(), draw))
        elif word in ("and", "or"):
            second, first = stack.pop(), stack.pop()
            stack.append(first & second if word == "and" else first | second)
        else:
            stack.append(as_mask(_made(word, EVERY_MASK, draw)))
    return stack.pop() if stack else None


def _draw(case: Case, draw: int, device: torch.device | str) -> Draw:
    """Return what draws the numbers of a case: the same ones for the same case and draw."""
    device = torch.device(device)
    generator = None
    if device.type != "meta":
        seed = zlib.crc32(repr(case.of(torch.float64)).encode()) + draw
        generator = torch.Generator(device).manual_seed(seed)
    batch = case.batch if case.sequences is None else len(case.sequences)
    queries, keys = _lengths(case)
    sizes = batch, case.heads, max(queries), max(keys), min(keys)
    return Draw(*sizes, case.dtype, device, generator)


def _lengths(case: Case) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the queries and the keys of each sequence; of a dense case those of an item."""
    if case.sequences is None:
        return (case.queries,), (case.keys,)
    queries, keys = zip(*case.sequences, strict=True) if case.sequences else ((0,), (0,))
    return queries, keys


def _made(word: str | Maker, known: Mapping[str, Maker], drawn: Draw) -> Any:
    if isinstance(word, str) and word not in known:
        required = f"a word of cases/variants.py: {', '.join(known)}"
        raise InvalidArgument("case", f"the mask or score {word!r}", required)
    return (known[word] if isinstance(word, str) else word)(drawn)


def _steps(case: Case, drawn: Draw) -> list[Any]:
    return [_made(word, EVERY_SCORE, drawn) for word in case.score]


def variant_of(case: Case, device: torch.device | str) -> tuple[Any, Any]:
    """Return the mask and the score of a case alone, as ``tilewise.attention`` takes them.

    They are without gradients, and one that is a Python function stays one.
    """
    drawn = _draw(case, 0, device)._replace(learns=False)
    if len(case.mask) == 1:
        mask = _made(case.mask[0], EVERY_MASK, drawn)
    else:
        mask = _postfix(case.mask, drawn)
    scores = _steps(case, drawn)
    return mask, scores[0] if len(scores) == 1 else scores or None


def build(case: Case, draw: int = 0, device: torch.device | str = "cpu") -> Inputs:
    """Return the tensors of a case: the same for the same case and draw, close for all dtypes.

    On the device "meta" they have no values.
    """
    drawn = _draw(case, draw, device)
    packed = case.sequences is not None
    queries, keys = _lengths(case)

    def tensor(heads: int, length: int, width: int, layout: str, gain: float) -> Tensor:
        shape = (length, heads, width) if packed else (case.batch, heads, length, width)
        values = gain * drawn.normal(*shape, dtype=torch.float64)
        return _cast(_lay_out(values, layout), case.dtype).requires_grad_()

    q_layout = "contiguous" if case.layout == "expanded" else case.layout
    q = tensor(case.heads, sum(queries), case.head_dim, q_layout, case.gain)
    k = tensor(case.kv_heads, sum(keys), case.head_dim, case.layout, case.gain)
    if case.layout == "latent":
        v = k.detach()[..., : case.value_dim].requires_grad_()
    else:
        v = tensor(case.kv_heads, sum(keys), case.value_dim, case.layout, 1.0)
    mask = _postfix(case.mask, drawn)
    score = as_score(steps) if (steps := _steps(case, drawn)) else None
    sinks = None
    if case.sinks:
        dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
        sinks = drawn.normal(case.heads, dtype=dtype).requires_grad_()
    seed = 0 if drawn.generator is None else int(drawn.whole(0, 2**62))
    cu = None
    if case.sequences is not None:
        ends = [[0, *accumulate(lengths)] for lengths in (queries, keys)]
        ends = ends if case.sequences else [[0], [0]]
        cu_q, cu_k = (torch.tensor(each, dtype=torch.int64, device=device) for each in ends)
        cu = cu_q, cu_k
    lists = _lists(case, drawn) if case.listed else None
    return Inputs(q, k, v, mask, score, sinks, case.scale, case.dropout_p, seed, cu, lists)


def _lists(case: Case, drawn: Draw) -> KeyBlocks:
    """Return lists of each head of keys, with repeats and holes; the first of several is empty."""
    groups, blocks = -(-case.queries // case.list_rows), -(-case.keys // case.list_block)
    found = drawn.whole(-1, max(blocks, 1), case.batch, case.kv_heads, groups, case.listed)
    found[:, :, : groups > 1] = -1
    return KeyBlocks(found.int(), case.list_block, case.list_rows)


def listed_mask(inputs: Inputs) -> Mask | None:
    """Return the mask of a call, with what its key lists name: what a call without lists takes."""
    if inputs.keys is None:
        return inputs.mask
    indices, block, rows = inputs.keys
    queries, keys = inputs.q.shape[2], inputs.k.shape[2]
    blocks = -(-keys // block)
    named = torch.where(indices < 0, blocks, indices).long()
    seen = torch.zeros(*indices.shape[:3], blocks + 1, dtype=torch.bool, device=indices.device)
    seen = seen.scatter(-1, named, True)[..., :blocks]
    seen = seen.repeat_interleave(block, -1)[..., :keys]
    seen = seen.repeat_interleave(rows, 2)[:, :, :queries]
    mask = masks.dense(seen.repeat_interleave(inputs.q.shape[1] // seen.shape[1], 1))
    return mask if inputs.mask is None else mask & inputs.mask


class Sent(NamedTuple):
    """The gradients that are sent into out, lse and entropy; None for zero."""

    out: Any = None
    lse: Any = None
    entropy: Any = None


def send(inputs: Inputs, seed: int = 7, *, entropy: bool = False) -> Sent:
    """Return random gradients of out and lse, and on request of the entropy."""
    device, dtype = inputs.q.device, inputs.q.dtype
    generator = torch.Generator(device).manual_seed(seed)
    rows = inputs.q.shape[:-1]
    of_rows = rows if inputs.cu_seqlens is None else rows[::-1]
    out = torch.randn(*rows, inputs.v.size(-1), generator=generator, device=device).to(dtype)
    facts = torch.randn(1 + entropy, *of_rows, generator=generator, device=device)
    return Sent(out, *facts.to(torch.float64 if dtype == torch.float64 else torch.float32))


def call(inputs: Inputs, backend: str | None, **keywords: Any) -> Any:
    """Return what the public call gives."""
    keywords = {**inputs.keywords(), "backend": backend, **keywords}
    q, k, v = inputs.q, inputs.k, inputs.v
    if inputs.cu_seqlens is None:
        return tilewise.attention(q, k, v, keys=inputs.keys, **keywords)
    return tilewise.attention_varlen(q, k, v, *inputs.cu_seqlens, **keywords)


def gradients(inputs: Inputs, outputs: Sequence[Tensor], sent: Sent) -> dict[str, Tensor]:
    """Return the gradient of every leaf, by name: zeros where no output depends on it."""
    leaves = inputs.leaves
    used = [
        (output, grad.to(output.dtype))
        for output, grad in zip(outputs, sent, strict=False)
        if grad is not None
    ]
    outputs, weights = zip(*used, strict=True)
    grads = torch.autograd.grad(
        outputs, list(leaves.values()), weights, allow_unused=True, materialize_grads=True
    )
    return dict(zip(leaves, grads, strict=True))


def problem_of(
    inputs: Inputs, backend: str | None = "tiled", **more: Any
) -> tuple[Problem, Operands]:
    """Return the problem and the operands that a public call makes of the inputs.

    Key lists are a mask there. What the backend "tiled" reads on the processor lies there. ``more``
    are other keywords: pages, scales.
    """
    starts = inputs.cu_seqlens or (None, None)
    keywords = {**inputs.keywords(), "mask": listed_mask(inputs), "backend": backend, **more}
    return lowered(inputs.q, inputs.k, inputs.v, *starts, **keywords)
