"""The numbers of a GPT-2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tilewise.errors import InvalidArgument

__all__ = ["Shape"]

_POSITIONS, _NORMS = ("learned", "rotary", "none"), ("layer", "rms")


@dataclass(frozen=True)
class Shape:
    """The numbers of a GPT-2.

    Args:
        layers, heads, width: of the transformer; ``heads`` divides ``width``.
        context: the most positions.
        vocabulary: token ids.
        embedding_dropout, attention_dropout, residual_dropout: probabilities in training mode.
        kv_heads: key/value heads, a divisor of ``heads``; None for as many.
        positions: ``"learned"`` (a table that is added to the tokens), ``"rotary"`` (queries and
            keys are turned, see ``tilewise.nn.rotary``) or ``"none"``.
        norm: ``"layer"`` (LayerNorm) or ``"rms"`` (RMSNorm: neither mean nor bias).
        qk_norm: normalise queries and keys, see ``tilewise.nn.Attention``.

    Raises:
        InvalidArgument: a number that is not positive, or numbers that do not fit together.

    Sources: RoFormer (Su et al. 2021), GQA (Ainslie et al. 2023), RMSNorm (Zhang and Sennrich
    2019), QK-norm (Henry et al. 2020).
    """

    layers: int
    heads: int
    width: int
    context: int = 1024
    vocabulary: int = 50257
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    kv_heads: int | None = None
    positions: Literal["learned", "rotary", "none"] = "learned"
    norm: Literal["layer", "rms"] = "layer"
    qk_norm: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "width", "context", "vocabulary"):
            if getattr(self, name) < 1:
                raise InvalidArgument(name, str(getattr(self, name)), "1 or more")
        if self.width % self.heads:
            raise InvalidArgument("width", str(self.width), f"a multiple of heads={self.heads}")
        for name in ("embedding_dropout", "attention_dropout", "residual_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise InvalidArgument(name, str(getattr(self, name)), "a number in [0, 1)")
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            required = f"a divisor of heads={self.heads}"
            raise InvalidArgument("kv_heads", str(self.kv_heads), required)
        for name, known in (("positions", _POSITIONS), ("norm", _NORMS)):
            if getattr(self, name) not in known:
                required = f"one of {', '.join(known)}"
                raise InvalidArgument(name, repr(getattr(self, name)), required)
        if self.positions == "rotary" and (self.width // self.heads) % 2:
            came = f"rotary with a head width of {self.width // self.heads}"
            raise InvalidArgument("positions", came, "an even head width")

    @property
    def kv_width(self) -> int:
        """Channels of all keys of a token, and of all values."""
        return (self.kv_heads or self.heads) * (self.width // self.heads)
