"""BERT of any size in one file, over sequences without padding, with attention as one argument.

The architecture is that of the published weights. It has learned positions and token types,
post-norm layers and a perceptron with the exact form of GELU. Its head is for masked tokens (tied
to the token embedding) or for classes. Sequences of different lengths lie one after the other
(``Packed``), so no layer computes padding. Every token attends to its own sequence, or to the part
of it that a mask leaves. Attention is ``tilewise.attention_varlen`` or one of the padded
implementations beside it. ``save`` and ``load`` use the Hugging Face layout: ``folders.py``.

Dimensions: B sequences, T tokens of all of them, V vocabulary.

Source: Devlin et al., BERT: Pre-training of Deep Bidirectional Transformers for Language
Understanding (2019); the small sizes: Turc et al., Well-Read Students Learn Better (2019).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from tilelab.models import folders
from tilelab.models.layers import Packed, SelfAttention, check_shape, initialise, through, who_sees
from tilewise import masks
from tilewise.errors import InvalidArgument
from tilewise.nn import Implementation

HeadKind = Literal["none", "masked", "classes"]
HeadPooling = Literal["first", "mean", "pairs"]
Pattern = Callable[[int], masks.Mask]
EPS = 1e-12


@dataclass(frozen=True)
class Shape:
    """The numbers of a BERT.

    Raises:
        InvalidArgument: a number that is not positive, or ``heads`` that do not divide ``width``.
    """

    layers: int
    heads: int
    width: int
    feed_forward: int | None = None  # channels inside the perceptron; None for four times the width
    context: int = 512  # the most positions
    vocabulary: int = 30522  # token ids
    kinds: int = 2  # token types
    embedding_dropout: float = 0.0  # these three: probabilities in training mode
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0  # also of a head of classes

    def __post_init__(self) -> None:
        check_shape(self, "feed_forward", "context", "vocabulary", "kinds")


PRESETS = {
    "tiny": Shape(layers=2, heads=2, width=128),
    "mini": Shape(layers=4, heads=4, width=256),
    "small": Shape(layers=4, heads=8, width=512),
    "medium": Shape(layers=8, heads=8, width=512),
    "base": Shape(layers=12, heads=12, width=768),
    "large": Shape(layers=24, heads=16, width=1024),
}


_ARCHITECTURES: Mapping[HeadKind, str] = {
    "none": "BertModel",
    "masked": "BertForMaskedLM",
    "classes": "BertForSequenceClassification",
}
LAYOUT = folders.Layout(
    family="a BERT",
    # A head of classes over the mean of all tokens is the other type: no library shall draw a
    # pooler for its classifier.
    kinds=("bert", "tilewise-bert"),
    prefix="bert.",
    outside=("classifier.", "cls."),
    layers="encoder.layer",
    modules={
        "attention.query": "attention.self.query",
        "attention.key": "attention.self.key",
        "attention.value": "attention.self.value",
        "attention.output": "attention.output.dense",
        "attention_norm": "attention.output.LayerNorm",
        "expand": "intermediate.dense",
        "contract": "output.dense",
        "mlp_norm": "output.LayerNorm",
    },
    parameters={
        "tokens.weight": "embeddings.word_embeddings.weight",
        "positions.weight": "embeddings.position_embeddings.weight",
        "kinds.weight": "embeddings.token_type_embeddings.weight",
        "norm.weight": "embeddings.LayerNorm.weight",
        "norm.bias": "embeddings.LayerNorm.bias",
    },
    heads={
        "pooler.weight": "pooler.dense.weight",
        "pooler.bias": "pooler.dense.bias",
        "classifier.weight": "classifier.weight",
        "classifier.bias": "classifier.bias",
        "transform.weight": "cls.predictions.transform.dense.weight",
        "transform.bias": "cls.predictions.transform.dense.bias",
        "transform_norm.weight": "cls.predictions.transform.LayerNorm.weight",
        "transform_norm.bias": "cls.predictions.transform.LayerNorm.bias",
        "token_bias": "cls.predictions.bias",
    },
    tied={
        "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    left_out=("position_ids", "cls.seq_relationship.weight", "cls.seq_relationship.bias"),
    numbers={
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "width": "hidden_size",
        "feed_forward": "intermediate_size",
        "context": "max_position_embeddings",
        "vocabulary": "vocab_size",
        "kinds": "type_vocab_size",
    },
    dropouts=folders.ENCODER_DROPOUTS,
    dropout=0.1,
    said={"hidden_act": ("gelu",), "layer_norm_eps": (EPS,), "tie_word_embeddings": (True,)},
    unsaid={
        "position_embedding_type": ("absolute",),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
    },
)


class Layer(nn.Module):
    """norm(x + attention(x)), then norm(x + perceptron(x)); [T, width] to the same."""

    def __init__(self, shape: Shape, implementation: Implementation) -> None:
        super().__init__()
        assert shape.feed_forward is not None
        self.attention = SelfAttention(
            shape.width, shape.heads, shape.attention_dropout, implementation
        )
        self.attention_norm = nn.LayerNorm(shape.width, eps=EPS)
        self.expand = nn.Linear(shape.width, shape.feed_forward)
        self.contract = nn.Linear(shape.feed_forward, shape.width)
        self.mlp_norm = nn.LayerNorm(shape.width, eps=EPS)
        self.dropout = nn.Dropout(shape.residual_dropout)

    def forward(
        self, x: Tensor, packed: Packed, mask: masks.Mask | None = None, seen: Tensor | None = None
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
        pooling: of ``"classes"``: ``"first"`` (tanh of a linear map of the first token),
            ``"mean"`` of all tokens of the sequence, or ``"pairs"``: sequences 2 i and 2 i + 1 are
            a pair with means u and v, divided by their root mean squares, and the head sees
            ``|u - v|`` and ``u * v``. It starts at 0: drawn weights would drown what the two have
            in common. Source: Tai et al., Improved Semantic Representations (2015), equation 15.
    """

    kind: HeadKind = "none"
    classes: int = 2
    pooling: HeadPooling = "first"


class BERT(nn.Module):
    """An encoder with a head.

    Weights depend on ``shape``, ``head`` and ``seed`` alone, never on the attention, and making
    them leaves torch's global random state as it is. The model is made on the CPU in float32.

    ``pattern`` takes the tokens of the longest sequence of a call, and gives who of a sequence sees
    whom in it: a mask of ``(h, m, n)`` in which m and n count within the sequence. None is for
    everybody. ``checkpointing`` is as of ``layers.through``.
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
                seen = 2 * width if head.pooling == "pairs" else width
                self.classifier = nn.Linear(seen, head.classes)
        initialise(self, seed)
        if head.kind == "classes" and head.pooling == "pairs":
            nn.init.zeros_(self.classifier.weight)

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
        mask = None if self.pattern is None else self.pattern(packed.longest)
        attentions = (each for each in self.modules() if isinstance(each, SelfAttention))
        pads = any(each.implementation != "tilewise" for each in attentions)
        seen = who_sees(packed, mask, self.shape.heads) if pads else None
        x = through(self.layers, x, self.checkpointing, packed=packed, mask=mask, seen=seen)
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
        """[T, width] -> [B, width], of pairs [B / 2, 2 width]."""
        if self.head.pooling == "first":
            pooled: Tensor = self.pooler(x[packed.borders[:-1]]).tanh()
            return pooled
        mean: Tensor = torch.segment_reduce(x, "mean", lengths=packed.borders.diff(), axis=0)
        if self.head.pooling == "pairs":
            scaled = functional.normalize(mean, dim=1) * math.sqrt(self.shape.width)
            u, v = scaled[0::2], scaled[1::2]
            return torch.cat([(u - v).abs(), u * v], dim=1)
        return mean

    def save(self, folder: Path) -> None:
        """Write ``config.json`` and ``model.safetensors``, each whole or not at all.

        The layout is Hugging Face's, and so is every model but one. Hugging Face has no head of
        classes over the ``"mean"`` or ``"pairs"`` and would draw a pooler. So that model has
        another type, ``"tilewise-bert"``, which transformers refuses where it chooses the class by
        the type (``AutoModel``). ``BertModel.from_pretrained`` still reads the encoder.
        ``BertForSequenceClassification.from_pretrained``, called by its name, still draws a pooler.
        """
        kind, classes, pooling = self.head
        ours_alone = kind == "classes" and pooling != "first"
        values = LAYOUT.config(vars(self.shape), None if ours_alone else _ARCHITECTURES[kind])
        if ours_alone:
            values["pooling"] = pooling
        if kind == "classes":
            values |= folders.labels(classes)
            if classes == 1:
                values["problem_type"] = "regression"
        LAYOUT.write(folder, self.state_dict(), values, "" if kind == "none" else None)


def load(
    folder: Path,
    *,
    head: Head | None = Head(),  # noqa: B008  never changed
    dropouts: Mapping[str, float] | None = None,
    **keywords: Any,
) -> BERT:
    """Return a BERT from a folder in the Hugging Face layout.

    Weights of half precision are widened to float32, those of float64 stay so.

    Args:
        folder: with ``config.json`` and ``model.safetensors``, of an encoder with any head.
        head: what the model ends in; None for what it was saved with. What the folder lacks of it
            is drawn from the seed, and named in the model's ``drawn``; so is a classifier that the
            folder has for other classes, or over another pooling. What the folder has of other
            heads is left out.
        dropouts: numbers of ``Shape`` in place of the folder's, by name.
        keywords: others of ``BERT``; the seed is of what is drawn.

    Raises:
        InvalidArgument: not such a folder, tensors that are missing, too many or misshapen, or a
            head that is not known where none was named.
        Unsupported: a BERT that computes something else, e.g. with another activation.
    """
    values = LAYOUT.read_config(folder)
    model = BERT(
        Shape(**{**LAYOUT.shape(values), **(dropouts or {})}),
        head=_head_of(folder, values) if head is None else head,
        **keywords,
    )
    state, model.drawn = LAYOUT.read(folder, model.state_dict())
    folders.fill(model, state)
    return model


def _head_of(folder: Path, values: Mapping[str, Any]) -> Head:
    classes = folders.classes_of(values)
    if values["model_type"] == LAYOUT.kinds[1]:
        return Head("classes", classes, values.get("pooling", "mean"))
    said = values.get("architectures") or [_ARCHITECTURES["none"]]
    for kind, name in _ARCHITECTURES.items():
        if said == [name]:
            return Head(kind, classes)
    required = f"one of {', '.join(_ARCHITECTURES.values())}"
    fix = "Say which head it shall have."
    raise InvalidArgument("head", f"None, and {folder} with {said}", required, fix)
