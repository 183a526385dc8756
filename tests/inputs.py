"""The tensors of a case: always the same ones for the same case."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.captured import MASKS, SCORES, Shape
from tests.cases import Case
from tilewise.variants.values import Mask, Score, as_score


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normal numbers, the same ones for the same shape and seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Inputs(NamedTuple):
    """The tensors of a case, and the keywords of the call.

    ``leaves`` are the tensors that a gradient is defined for, by name: q, k, v, bias0.., sinks.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask | None
    score: Score | None
    sinks: Tensor | None
    scale: float | None
    dropout_p: float
    seed: int
    cu_seqlens: tuple[Tensor, Tensor] | None

    @property
    def slots(self) -> list[int]:
        """The captured tensors of the score that are biases, in order."""
        steps = () if self.score is None else self.score.program
        return [instr.slots[0] for instr in steps if instr.op == "bias"]

    @property
    def leaves(self) -> dict[str, Tensor]:
        """What can be differentiated, by name."""
        found = {"q": self.q, "k": self.k, "v": self.v}
        if self.score is not None:
            captured = self.score.captured
            found |= {f"bias{i}": captured[slot] for i, slot in enumerate(self.slots)}
        if self.sinks is not None:
            found["sinks"] = self.sinks
        return found

    def keywords(self) -> dict[str, Any]:
        """The keywords of the public call."""
        return {
            "mask": self.mask,
            "score": self.score,
            "sinks": self.sinks,
            "scale": self.scale,
            "dropout_p": self.dropout_p,
            "seed": self.seed if self.dropout_p else None,
        }

    def replaced(self, leaves: Mapping[str, Tensor]) -> Inputs:
        """The inputs with other tensors in the place of their leaves."""
        score = self.score
        if score is not None:
            captured = list(score.captured)
            for i, slot in enumerate(self.slots):
                captured[slot] = leaves[f"bias{i}"]
            score = Score(score.program, tuple(captured))
        q, k, v = leaves["q"], leaves["k"], leaves["v"]
        return self._replace(q=q, k=k, v=v, score=score, sinks=leaves.get("sinks"))

    def detached(self) -> Inputs:
        """The same inputs without gradients."""
        return self.replaced({name: leaf.detach() for name, leaf in self.leaves.items()})

    def convert(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """The same inputs with every differentiable tensor changed, as new leaves."""
        leaves = self.leaves.items()
        return self.replaced({n: change(leaf.detach()).requires_grad_() for n, leaf in leaves})


def _lay_out(values: Tensor, layout: str) -> Tensor:
    """[B, H, S, D] (or packed [S, H, D]) values in a memory layout; gaps hold NaN."""
    sizes = values.shape
    if layout == "bshd":
        return values.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "strided":
        gaps = torch.full((*sizes, 2), math.nan, dtype=torch.float64)
        gaps[..., 0] = values
        return gaps[..., 0]
    if layout == "expanded":
        return values[:1, :1].expand(sizes) if len(sizes) == 4 else values[:, :1].expand(sizes)
    if layout == "sliced":
        wide = torch.full([size + 3 for size in sizes], math.nan, dtype=torch.float64)
        wide[tuple(slice(1, size + 1) for size in sizes)] = values
        return wide[tuple(slice(1, size + 1) for size in sizes)]
    return values


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in another dtype with the same strides (``to`` would pack what is sparse)."""
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() == 0:
        return tensor.to(dtype)
    flat = tensor.as_strided((extent,), (1,))
    return flat.to(dtype).as_strided(tensor.shape, tensor.stride())


def _postfix(case: Case, shape: Shape, generator: torch.Generator) -> Mask | None:
    stack: list[Mask] = []
    for word in case.mask:
        if word == "not":
            stack.append(~stack.pop())
        elif word in ("and", "or"):
            second, first = stack.pop(), stack.pop()
            stack.append(first & second if word == "and" else first | second)
        else:
            stack.append(MASKS[word](shape, generator))
    return stack.pop() if stack else None


def build(case: Case, draw: int = 0) -> Inputs:
    """The tensors of a case: the same for the same case and draw, and close for all dtypes."""
    seed = zlib.crc32(repr(case.of(torch.float64)).encode()) + draw
    generator = torch.Generator().manual_seed(seed)
    lead: tuple[int, ...] = (case.batch,)
    shape, cu = Shape(case.batch, case.heads, case.queries, case.keys, case.keys), None
    if case.sequences is not None:
        lengths = torch.tensor(case.sequences, dtype=torch.int64).reshape(-1, 2)
        cu_q, cu_k = torch.nn.functional.pad(lengths.cumsum(0), (0, 0, 1, 0)).unbind(1)
        cu = (cu_q.contiguous(), cu_k.contiguous())
        queries, keys = zip(*case.sequences, strict=True) if case.sequences else ((0,), (0,))
        shape = Shape(len(case.sequences), case.heads, max(queries), max(keys), min(keys))

    def tensor(heads: int, length: int, width: int, layout: str, gain: float) -> Tensor:
        sizes = (length, heads, width) if cu is not None else (*lead, heads, length, width)
        values = gain * torch.randn(sizes, generator=generator, dtype=torch.float64)
        return _cast(_lay_out(values, layout), case.dtype).requires_grad_()

    q_rows = int(cu[0][-1]) if cu else case.queries
    k_rows = int(cu[1][-1]) if cu else case.keys
    q_layout = "contiguous" if case.layout == "expanded" else case.layout
    q = tensor(case.heads, q_rows, case.head_dim, q_layout, case.gain)
    k = tensor(case.kv_heads, k_rows, case.head_dim, case.layout, case.gain)
    v = tensor(case.kv_heads, k_rows, case.value_dim, case.layout, 1.0)
    mask = _postfix(case, shape, generator)
    parts = [SCORES[word](shape, generator, case.dtype) for word in case.score]
    sinks = None
    if case.sinks:
        dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
        sinks = torch.randn(case.heads, generator=generator, dtype=torch.float64).to(dtype)
        sinks.requires_grad_()
    seed = int(torch.randint(2**62, (), generator=generator))
    score = as_score(parts) if parts else None
    return Inputs(q, k, v, mask, score, sinks, case.scale, case.dropout_p, seed, cu)
