"""BERT of any size in one file, over sequences without padding, with attention as one argument.

The architecture is that of the published weights. It has learned positions and token types,
post-norm layers and a perceptron with the exact form of GELU. Its head is for masked tokens (tied
to the token embedding) or for classes. Sequences of different lengths lie one after the other
(``Packed``), so no layer computes padding. Every token attends to its own sequence, or to the part
of it that a mask leaves. Attention is ``tilewise.attention_varlen`` or one of the padded
implementations beside it. ``save`` and ``load`` use the Hugging Face layout: ``bert_files.py``.

Dimensions: B sequences, T tokens of all of them, V vocabulary.

Source: Devlin et al., BERT: Pre-training of Deep Bidirectional Transformers for Language
Understanding (2019); the small sizes: Turc et al., Well-Read Students Learn Better (2019).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tilelab.models import bert_files as files
from tilelab.models.packed import Packed, attend_padded
from tilelab.models.packed import seen as who_sees
from tilewise import SoftmaxStats, attention_varlen, masks
from tilewise.errors import InvalidArgument
from tilewise.nn import Implementation

Pattern = Callable[[int], masks.Mask]
EPS = 1e-12
STD = 0.02  # of every weight matrix and embedding at the start


@dataclass(frozen=True)
class Shape:
    """The numbers of a BERT.

    Args:
        layers, heads, width: of the transformer; ``heads`` divides ``width``.
        feed_forward: channels inside the perceptron; None for four times the width.
        context: the most positions.
        vocabulary: token ids.
        kinds: token types.
        embedding_dropout, attention_dropout, residual_dropout: probabilities in training mode; the
            last one is also that of a head of classes.

    Raises:
        InvalidArgument: a number that is not positive, or ``heads`` that do not divide ``width``.
    """

    layers: int
    heads: int
    width: int
    feed_forward: int | None = None
    context: int = 512
    vocabulary: int = 30522
    kinds: int = 2
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.feed_forward is None:
            object.__setattr__(self, "feed_forward", 4 * self.width)
        for name in ("layers", "heads", "width", "feed_forward", "context", "vocabulary", "kinds"):
            if getattr(self, name) < 1:
                raise InvalidArgument(name, str(getattr(self, name)), "1 or more")
        if self.width % self.heads:
            raise InvalidArgument("width", str(self.width), f"a multiple of heads={self.heads}")
        for name in ("embedding_dropout", "attention_dropout", "residual_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise InvalidArgument(name, str(getattr(self, name)), "a number in [0, 1)")


PRESETS = {
    "tiny": Shape(layers=2, heads=2, width=128),
    "mini": Shape(layers=4, heads=4, width=256),
    "small": Shape(layers=4, heads=8, width=512),
    "medium": Shape(layers=8, heads=8, width=512),
    "base": Shape(layers=12, heads=12, width=768),
    "large": Shape(layers=24, heads=16, width=1024),
}


class SelfAttention(nn.Module):
    """Attention of every token to its own sequence, [T, width] to the same.

    Args:
        shape: of the model.
        implementation: ``"tilewise"`` (no padding), or ``"sdpa"`` and ``"plain"``, which pad to the
            longest sequence and mask the padding; the attribute may be changed at any time.

    Attributes:
        on_statistics: None, or called with the ``SoftmaxStats`` of every forward pass ([H, T] each)
            of ``"tilewise"``; the others keep none.
    """

    def __init__(self, shape: Shape, implementation: Implementation) -> None:
        super().__init__()
        self.heads, self.dropout_p = shape.heads, shape.attention_dropout
        self.implementation: Implementation = implementation
        self.on_statistics: Callable[[SoftmaxStats], None] | None = None
        self.query = nn.Linear(shape.width, shape.width)
        self.key = nn.Linear(shape.width, shape.width)
        self.value = nn.Linear(shape.width, shape.width)
        self.output = nn.Linear(shape.width, shape.width)

    def forward(
        self,
        x: Tensor,
        packed: Packed,
        mask: masks.Mask | None = None,
        seen: Tensor | None = None,
    ) -> Tensor:
        """[T, width] -> [T, width], every token to all of its sequence that the mask leaves.

        Args:
            x: [T, width].
            packed: the sequences.
            mask: who of a sequence sees whom; None for everybody.
            seen: what ``packed.seen`` says of both, for the padded implementations; None to ask it.
        """
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1))
            for project in (self.query, self.key, self.value)
        )
        dropout_p = self.dropout_p if self.training else 0.0
        if self.implementation == "tilewise":
            out = self._unpadded(q, k, v, packed.borders, mask, dropout_p)
        elif self.implementation in ("plain", "sdpa"):
            seen = who_sees(packed, mask, self.heads) if seen is None else seen
            out = attend_padded(q, k, v, packed, seen, dropout_p, self.implementation)
        else:
            required = "'plain' or 'sdpa' or 'tilewise'"
            raise InvalidArgument("implementation", repr(self.implementation), required)
        merged: Tensor = self.output(out.flatten(1))
        return merged

    def _unpadded(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        borders: Tensor,
        mask: masks.Mask | None,
        dropout_p: float,
    ) -> Tensor:
        rest: dict[str, Any] = {"mask": mask, "dropout_p": dropout_p}
        out: Tensor
        if self.on_statistics is None:
            out = attention_varlen(q, k, v, borders, borders, **rest)
            return out
        found = attention_varlen(q, k, v, borders, borders, **rest, return_stats=True)
        assert found.stats is not None
        self.on_statistics(found.stats)
        out = found.out
        return out


class Layer(nn.Module):
    """norm(x + attention(x)), then norm(x + perceptron(x)); [T, width] to the same."""

    def __init__(self, shape: Shape, implementation: Implementation) -> None:
        super().__init__()
        assert shape.feed_forward is not None
        self.attention = SelfAttention(shape, implementation)
        self.attention_norm = nn.LayerNorm(shape.width, eps=EPS)
        self.expand = nn.Linear(shape.width, shape.feed_forward)
        self.contract = nn.Linear(shape.feed_forward, shape.width)
        self.mlp_norm = nn.LayerNorm(shape.width, eps=EPS)
        self.dropout = nn.Dropout(shape.residual_dropout)

    def forward(
        self,
        x: Tensor,
        packed: Packed,
        mask: masks.Mask | None = None,
        seen: Tensor | None = None,
    ) -> Tensor:
        """[T, width] -> [T, width]; arguments as of ``SelfAttention``."""
        x = self.attention_norm(x + self.dropout(self.attention(x, packed, mask, seen)))
        hidden = functional.gelu(self.expand(x))
        out: Tensor = self.mlp_norm(x + self.dropout(self.contract(hidden)))
        return out


class Head(NamedTuple):
    """The head of a BERT.

    Args:
        kind: ``"none"``: the hidden states [T, width]. ``"masked"``: logits of tokens [P, V] at the
            places that are asked for. ``"classes"``: logits of sequences [B, classes].
        classes: of ``"classes"``; 1 for a number.
        pooling: of ``"classes"``: ``"first"`` (tanh of a linear map of the first token) or
            ``"mean"`` of all tokens of the sequence.
    """

    kind: Literal["none", "masked", "classes"] = "none"
    classes: int = 2
    pooling: Literal["first", "mean"] = "first"


class BERT(nn.Module):
    """An encoder with a head.

    Weights depend on ``shape``, ``head`` and ``seed`` alone, never on the attention, and making
    them leaves torch's global random state as it is. The model is made on the CPU in float32.

    Args:
        shape: its numbers.
        head: what it ends in.
        implementation: which attention runs; nothing else depends on it.
        pattern: the tokens of the longest sequence of a call -> who of a sequence sees whom in it,
            a mask of ``(h, m, n)`` in which m and n count within the sequence; None for everybody.
        seed: of the weights.
        checkpointing: keep only the input of each layer, and compute the layer again in the
            backward pass (with the same dropout).
    """

    def __init__(
        self,
        shape: Shape,
        *,
        head: Head = Head(),  # noqa: B008  never changed
        implementation: Implementation = "tilewise",
        pattern: Pattern | None = None,
        seed: int = 0,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.shape, self.head, self.checkpointing = shape, head, checkpointing
        self.pattern = pattern
        self.drawn: tuple[str, ...] = ()  # parameters that are not those of a loaded folder
        width = shape.width
        with torch.device("meta"):  # torch's own initialisation would draw from the global state
            self.tokens = nn.Embedding(shape.vocabulary, width)
            self.positions = nn.Embedding(shape.context, width)
            self.kinds = nn.Embedding(shape.kinds, width)
            self.norm = nn.LayerNorm(width, eps=EPS)
            self.dropout = nn.Dropout(shape.embedding_dropout)
            self.layers = nn.ModuleList(Layer(shape, implementation) for _ in range(shape.layers))
            if head.kind == "masked":
                self.transform, self.transform_norm = nn.Linear(width, width), nn.LayerNorm(width)
                self.transform_norm.eps = EPS
                self.token_bias = nn.Parameter(torch.empty(shape.vocabulary))
            elif head.kind == "classes":
                if head.pooling == "first":
                    self.pooler = nn.Linear(width, width)
                self.head_dropout = nn.Dropout(shape.residual_dropout)
                self.classifier = nn.Linear(width, head.classes)
        self.to_empty(device="cpu")
        self._initialise(seed)

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        """Normal weights of ``STD``; gains are 1 and biases 0."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=STD, generator=generator)
            else:
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)

    def forward(self, packed: Packed, wanted: Tensor | None = None) -> Tensor:
        """Return the output of the head.

        Args:
            packed: sequences, each of at most ``shape.context`` tokens.
            wanted: of a head of masked tokens: which tokens, int64 [P] into T.

        Returns:
            see ``Head``.

        Raises:
            InvalidArgument: a sequence that is longer than the context.
        """
        if packed.longest > self.shape.context:
            required = f"sequences of at most the context {self.shape.context}"
            raise InvalidArgument("packed", f"one of {packed.longest} tokens", required)
        x = self.tokens(packed.tokens) + self.positions(packed.places) + self.kinds(packed.kinds)
        x = self.dropout(self.norm(x))
        recompute = self.checkpointing and torch.is_grad_enabled()
        mask = None if self.pattern is None else self.pattern(packed.longest)
        attentions = (each for each in self.modules() if isinstance(each, SelfAttention))
        pads = any(each.implementation != "tilewise" for each in attentions)
        asked = (packed, mask, who_sees(packed, mask, self.shape.heads) if pads else None)
        for layer in self.layers:
            x = checkpoint(layer, x, *asked, use_reentrant=False) if recompute else layer(x, *asked)
        if self.head.kind == "masked":
            assert wanted is not None
            x = self.transform_norm(functional.gelu(self.transform(x[wanted])))
            return functional.linear(x, self.tokens.weight, self.token_bias)
        if self.head.kind == "classes":
            x = self.head_dropout(self._pooled(x, packed))
            logits: Tensor = self.classifier(x)
            return logits
        hidden: Tensor = x
        return hidden

    def _pooled(self, x: Tensor, packed: Packed) -> Tensor:
        """[T, width] -> [B, width]."""
        if self.head.pooling == "first":
            pooled: Tensor = self.pooler(x[packed.borders[:-1]]).tanh()
            return pooled
        mean: Tensor = torch.segment_reduce(x, "mean", lengths=packed.borders.diff(), axis=0)
        return mean

    def save(self, folder: Path) -> None:
        """Write ``config.json`` and ``model.safetensors``, each whole or not at all.

        The layout is Hugging Face's, and so is every model but one. Hugging Face has no head of
        classes over the ``"mean"`` and would draw a pooler for the classifier. So that model has
        another type, ``"tilewise-bert"``, which transformers refuses where it chooses the class by
        the type (``AutoModel``). ``BertModel.from_pretrained`` still reads the encoder.
        ``BertForSequenceClassification.from_pretrained``, called by its name, still draws a pooler.
        """
        values = files.config(vars(self.shape), EPS, self.head)
        files.write(folder, self.state_dict(), self.shape.layers, values)


def load(
    folder: Path,
    *,
    head: Head | None = Head(),  # noqa: B008  never changed
    implementation: Implementation = "tilewise",
    pattern: Pattern | None = None,
    seed: int = 0,
    checkpointing: bool = False,
    **dropout: float,
) -> BERT:
    """Return a BERT from a folder in the Hugging Face layout.

    Weights of half precision are widened to float32, those of float64 stay so.

    Args:
        folder: with ``config.json`` and ``model.safetensors``, of an encoder with any head.
        head: what the model ends in; None for what it was saved with. What the folder lacks of it
            is drawn from the seed, and named in the model's ``drawn``; so is a classifier that the
            folder has for other classes, or over another pooling. What the folder has of other
            heads is left out.
        implementation: as for ``BERT``.
        pattern: as for ``BERT``.
        seed: of what is drawn.
        checkpointing: as for ``BERT``.
        dropout: numbers of ``Shape`` in place of the folder's: ``residual_dropout=0.1``.

    Raises:
        InvalidArgument: not such a folder, tensors that are missing, too many or misshapen, or a
            head that is not known where none was named.
        Unsupported: a BERT that computes something else, e.g. with another activation.
    """
    shape = Shape(**{**files.numbers(folder, EPS), **dropout})
    model = BERT(
        shape,
        head=Head(*files.head_of(folder)) if head is None else head,
        implementation=implementation,
        pattern=pattern,
        seed=seed,
        checkpointing=checkpointing,
    )
    state, model.drawn = files.read(folder, model.state_dict(), shape.layers)
    if state["tokens.weight"].dtype == torch.float64:
        model.double()
    model.load_state_dict(state)
    return model
