"""What the models have in common: checks of their numbers, first weights, the pre-norm layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tilewise.errors import InvalidArgument
from tilewise.nn import Attention

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

    Args:
        attention: of the layer.
        norm: makes each of the two.
        width, inner: channels outside and inside the perceptron.
        gelu: the form of GELU, ``"none"`` for the exact one or ``"tanh"``.
        dropout: probability at the end of both branches.
        bias: of the perceptron's two products.
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

    def forward(self, x: Tensor, attend: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """[B, S, width] -> [B, S, width]; ``attend`` is there for the layer's own attention."""
        attend = self.attention if attend is None else attend
        x = x + self.dropout(attend(self.attention_norm(x)))
        hidden = functional.gelu(self.expand(self.mlp_norm(x)), approximate=self.gelu)
        out: Tensor = x + self.dropout(self.contract(hidden))
        return out
