"""What the models are made of: checks of their numbers, first weights, layers, packed sequences.

``products`` multiplies 16 bits on processors that multiply float32 faster. Packed sequences have
different lengths and stand one after the other, without padding. Dimensions:
B sequences, T tokens of all of them, S tokens of the longest, H heads of D channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tilelab.common.torch_private import TorchDispatchMode
from tilewise import SoftmaxStats, attention_varlen, masks
from tilewise.errors import InvalidArgument
from tilewise.inspect.calls import Block, lowered, visible
from tilewise.inspect.peaks import fast_products
from tilewise.nn import Attention, Implementation

STD = 0.02  # of every weight matrix at the start


def check_shape(shape: Any, *others: str) -> None:
    """Make sure that numbers are positive, that heads divide the width, and of the dropouts.

    ``feed_forward`` is set to four times the width where it is None. The ``others`` are names of
    numbers beside ``layers``, ``heads`` and ``width``.
    """
    if "feed_forward" in others and shape.feed_forward is None:
        object.__setattr__(shape, "feed_forward", 4 * shape.width)
    for name in ("layers", "heads", "width", *others):
        if getattr(shape, name) < 1:
            raise InvalidArgument(name, str(getattr(shape, name)), "1 or more")
    if shape.width % shape.heads:
        raise InvalidArgument("width", str(shape.width), f"a multiple of heads={shape.heads}")
    for name in ("embedding_dropout", "attention_dropout", "residual_dropout"):
        if not 0.0 <= getattr(shape, name) < 1.0:
            raise InvalidArgument(name, str(getattr(shape, name)), "a number in [0, 1)")


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Draw normal weights of ``STD``; gains are 1 and biases 0."""
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 or name == "class_token":
            parameter.normal_(std=STD, generator=generator)
        else:
            parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)


class Unembedding(nn.Linear):
    """A head with a row for each token and no bias; optimizers treat it like an embedding."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__(width, vocabulary, bias=False)


class Layer(nn.Module):
    """x + attention(norm(x)), then x + perceptron(norm(x)); [B, S, width] to the same.

    ``norm`` makes each of the two. ``inner`` and ``bias`` are of the perceptron, whose ``gelu`` is
    ``"none"`` for the exact form or ``"tanh"``. ``dropout`` is at the end of both branches.
    """

    def __init__(
        self,
        attention: Attention,
        norm: Callable[[], nn.Module],
        *,
        width: int,
        inner: int,
        gelu: str,
        dropout: float,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.gelu = gelu
        self.attention_norm = norm()
        self.attention = attention
        self.mlp_norm = norm()
        self.expand = nn.Linear(width, inner, bias=bias)
        self.contract = nn.Linear(inner, width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, attend: Callable[..., Tensor] | None = None, **seen: Any
    ) -> Tensor:
        """[B, S, width] -> [B, S, width]; ``attend`` is there for the layer's own attention."""
        attend = self.attention if attend is None else attend
        x = x + self.dropout(attend(self.attention_norm(x), **seen))
        hidden = functional.gelu(self.expand(self.mlp_norm(x)), approximate=self.gelu)
        out: Tensor = x + self.dropout(self.contract(hidden))
        return out


def through(layers: nn.ModuleList, x: Tensor, checkpointing: bool, **given: Any) -> Tensor:
    """Return x after all layers; with checkpointing only their inputs are kept for the backward.

    Then each layer is computed again in the backward pass, with the same dropout.
    """
    again = checkpointing and torch.is_grad_enabled()
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=False, **given) if again else layer(x, **given)
    return x


class Packed(NamedTuple):
    """Sequences of different lengths, one after the other."""

    tokens: Tensor  # int64 [T]
    kinds: Tensor  # token types, int64 [T]
    places: Tensor  # the position of each token in its sequence, int64 [T]
    borders: Tensor  # int32 [B + 1]: sequence i has the tokens borders[i] to borders[i + 1]
    longest: int  # tokens of the longest sequence

    def to(self, device: torch.device) -> Packed:
        """Return the same on a device."""
        tokens, kinds, places, borders = (each.to(device) for each in self[:4])
        return Packed(tokens, kinds, places, borders, self.longest)

    def padded_rows(self) -> Tensor:
        """Return where each token lies in [B * longest], int64 [T]."""
        at = torch.arange(len(self.tokens), device=self.tokens.device, dtype=self.borders.dtype)
        sequence = torch.bucketize(at, self.borders[1:], right=True)
        return sequence * self.longest + self.places


def pack(rows: Sequence[Sequence[int]], kinds: Sequence[Sequence[int]] | None = None) -> Packed:
    """Sequences of token ids as one; without ``kinds`` all token types are 0.

    Raises:
        InvalidArgument: no sequence, an empty one, or types of other lengths.
    """
    lengths = [len(row) for row in rows]
    if not lengths or min(lengths) < 1:
        required = "one sequence or more, each of one token or more"
        raise InvalidArgument("rows", f"lengths {lengths}", required)
    if kinds is not None and [len(row) for row in kinds] != lengths:
        came = f"lengths {[len(row) for row in kinds]}"
        raise InvalidArgument("kinds", came, f"those of rows, {lengths}")
    tokens = torch.tensor([token for row in rows for token in row], dtype=torch.int64)
    types = torch.zeros_like(tokens)
    if kinds is not None:
        types = torch.tensor([kind for row in kinds for kind in row], dtype=torch.int64)
    places = torch.cat([torch.arange(length) for length in lengths])
    borders = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return Packed(tokens, types, places, borders, max(lengths))


def who_sees(packed: Packed, mask: masks.Mask | None, heads: int) -> Tensor:
    """Return who sees whom: bool [B, 1, 1, S] for padding alone, [B, H or 1, S, S] with a mask.

    The mask says who of a sequence sees whom in it; None for everybody.
    """
    batch, longest = len(packed.borders) - 1, packed.longest
    real = torch.zeros(batch * longest, dtype=torch.bool, device=packed.tokens.device)
    real = real.index_fill(0, packed.padded_rows(), True).view(batch, 1, 1, longest)
    if mask is None:
        return real
    rows = torch.empty(1, heads, longest, 1, device=real.device)
    problem, operands = lowered(rows, rows, rows, mask=mask)
    block = Block(range(longest), range(longest), longest, longest, range(1), range(heads))
    allowed = visible(problem.mask, operands.mask_tensors, block, real.device)
    # Padding as a query sees all keys: a row that saw none would be NaN, and reach the gradients.
    return real & (allowed | ~real.transpose(-2, -1))


class SelfAttention(nn.Module):
    """Attention of every token to its own sequence, [T, width] to the same.

    Args:
        width, heads, dropout_p: of the layer.
        implementation: ``"tilewise"`` (no padding), or ``"sdpa"`` and ``"plain"``, which pad to the
            longest sequence and mask the padding; the attribute may be changed at any time.

    Attributes:
        on_statistics: None, or called with the ``SoftmaxStats`` of every forward pass ([H, T] each)
            of ``"tilewise"``; the others keep none.
        sharper: factor of the scale 1 / sqrt(head width); 1 unless something is wrong on purpose.
    """

    def __init__(
        self, width: int, heads: int, dropout_p: float, implementation: Implementation
    ) -> None:
        super().__init__()
        self.heads, self.dropout_p = heads, dropout_p
        self.implementation: Implementation = implementation
        self.on_statistics: Callable[[SoftmaxStats], None] | None = None
        self.sharper = 1.0
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def forward(
        self, x: Tensor, packed: Packed, mask: masks.Mask | None = None, seen: Tensor | None = None
    ) -> Tensor:
        """[T, width] -> [T, width], every token to all of its sequence that the mask leaves.

        ``seen`` is what ``who_sees`` says, for the padded implementations; None to ask it.
        """
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1))
            for project in (self.query, self.key, self.value)
        )
        if self.sharper != 1.0:
            q = q * self.sharper
        dropout_p = self.dropout_p if self.training else 0.0
        out: Tensor
        if self.implementation == "tilewise":
            ends = packed.borders
            rest: dict[str, Any] = {"mask": mask, "dropout_p": dropout_p}
            if self.on_statistics is None:
                out = attention_varlen(q, k, v, ends, ends, **rest)
            else:
                found = attention_varlen(q, k, v, ends, ends, **rest, return_stats=True)
                assert found.stats is not None
                self.on_statistics(found.stats)
                out = found.out
        elif self.implementation in ("plain", "sdpa"):
            seen = who_sees(packed, mask, self.heads) if seen is None else seen
            out = self._padded(q, k, v, packed, seen, dropout_p)
        else:
            required = "'plain' or 'sdpa' or 'tilewise'"
            raise InvalidArgument("implementation", repr(self.implementation), required)
        merged: Tensor = self.output(out.flatten(1))
        return merged

    def _padded(
        self, q: Tensor, k: Tensor, v: Tensor, packed: Packed, allowed: Tensor, dropout_p: float
    ) -> Tensor:
        """Return attention of [T, H, D] through [B, H, S, D] with padding."""
        rows = packed.padded_rows()
        batch, longest = len(packed.borders) - 1, packed.longest

        def pad(x: Tensor) -> Tensor:
            whole = x.new_zeros(batch * longest, *x.shape[1:]).index_copy(0, rows, x)
            return whole.view(batch, longest, *x.shape[1:]).transpose(1, 2)

        q, k, v = pad(q), pad(k), pad(v)
        if self.implementation == "sdpa":
            out = functional.scaled_dot_product_attention(q, k, v, allowed, dropout_p)
        else:
            scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
            scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
            out = functional.dropout(scores.softmax(-1), dropout_p) @ v
        return out.transpose(1, 2).flatten(0, 1)[rows]


_ATEN = torch.ops.aten
_PRODUCTS = (_ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default, _ATEN.baddbmm.default)
_NARROW = (torch.bfloat16, torch.float16)


class ProductsInFloat32(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Multiply matrices of 16 bits in float32, and round the results to 16 bits.

    A product of two such numbers is exact in float32, so the results differ from torch's by the
    order of their sums alone. Backward passes are part of it.
    """

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """See above."""
        kwargs = kwargs or {}
        if func not in _PRODUCTS or args[0].dtype not in _NARROW or not args[0].is_cpu:
            return func(*args, **kwargs)
        return func(*(each.float() for each in args), **kwargs).to(args[0].dtype)


def products(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    """Return what multiplies matrices of a dtype on a device in the faster way."""
    slow = device.type == "cpu" and dtype in _NARROW and not fast_products(dtype)
    return ProductsInFloat32() if slow else nullcontext()  # type: ignore[no-untyped-call]
