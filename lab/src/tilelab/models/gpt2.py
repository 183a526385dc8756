"""GPT-2 of any size in one file, with attention as one argument.

The architecture is that of the published weights: learned positions and pre-norm layers. The
perceptron has four times the width and the tanh form of GELU. The head is the token embedding
itself. The ``Shape`` also has single changes of later models: rotary positions, fewer key/value
heads, RMSNorm, QK-norm, a head of its own, no biases. ``save`` and ``load`` use the Hugging Face
layout (``config.json`` and ``model.safetensors``): ``folders.py``.

Dimensions: B batch, S positions, V vocabulary.

Source: Radford et al., Language Models are Unsupervised Multitask Learners (2019).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from tilelab.models import folders
from tilelab.models.layers import STD, Layer, Unembedding, check_shape, through
from tilewise import masks
from tilewise.errors import InvalidArgument, Unsupported
from tilewise.nn import Attention, Implementation, Rotary
from tilewise.variants.values import Mask, Score

EPS = 1e-5
_POSITIONS, _NORMS = ("learned", "rotary", "none"), ("layer", "rms")


@dataclass(frozen=True)
class Shape:
    """The numbers of a GPT-2.

    Raises:
        InvalidArgument: a number that is not positive, or numbers that do not fit together.

    Sources: RoFormer (Su et al. 2021), GQA (Ainslie et al. 2023), RMSNorm (Zhang and Sennrich
    2019), QK-norm (Henry et al. 2020).
    """

    layers: int
    heads: int  # a divisor of ``width``
    width: int
    context: int = 1024  # the most positions
    vocabulary: int = 50257  # token ids
    embedding_dropout: float = 0.0  # these three: probabilities in training mode
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    kv_heads: int | None = None  # key/value heads, a divisor of ``heads``; None for as many
    # A table added to the tokens, or queries and keys that are turned (``tilewise.nn.rotary``).
    positions: Literal["learned", "rotary", "none"] = "learned"
    norm: Literal["layer", "rms"] = "layer"  # LayerNorm, or RMSNorm: neither mean nor bias
    qk_norm: bool = False  # normalise queries and keys, see ``tilewise.nn.Attention``
    tied: bool = True  # whether the head is the token embedding, or a matrix of its own
    bias: bool = True  # of the products of layers; those of LayerNorm belong to ``norm``
    std: float = STD  # the standard deviation of the first weights

    def __post_init__(self) -> None:
        check_shape(self, "context", "vocabulary")
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            required = f"a divisor of heads={self.heads}"
            raise InvalidArgument("kv_heads", str(self.kv_heads), required)
        for name, known in (("positions", _POSITIONS), ("norm", _NORMS)):
            if getattr(self, name) not in known:
                required = f"one of {', '.join(known)}"
                raise InvalidArgument(name, repr(getattr(self, name)), required)
        if not (self.std > 0 and math.isfinite(self.std)):
            raise InvalidArgument("std", str(self.std), "a number above 0")
        if self.positions == "rotary" and (self.width // self.heads) % 2:
            came = f"rotary with a head width of {self.width // self.heads}"
            raise InvalidArgument("positions", came, "an even head width")

    @property
    def kv_width(self) -> int:
        """Channels of all keys of a token, and of all values."""
        return (self.kv_heads or self.heads) * (self.width // self.heads)


# ``tiny`` is for laptops and reads bytes; the others are the published ones (124M to 1.6B).
PRESETS = {
    "tiny": Shape(layers=4, heads=4, width=128, context=256, vocabulary=256),
    "small": Shape(layers=12, heads=12, width=768),
    "medium": Shape(layers=24, heads=16, width=1024),
    "large": Shape(layers=36, heads=20, width=1280),
    "xl": Shape(layers=48, heads=25, width=1600),
}


LAYOUT = folders.Layout(
    family="a GPT-2",
    kinds=("gpt2", "tilewise-gpt2"),
    prefix="transformer.",
    layers="h",
    modules={
        "attention_norm": "ln_1",
        "attention.qkv": "attn.c_attn",
        "attention.output": "attn.c_proj",
        "attention.query_norm": "attn.q_norm",  # this and the next GPT-2 itself lacks
        "attention.key_norm": "attn.k_norm",
        "mlp_norm": "ln_2",
        "expand": "mlp.c_fc",
        "contract": "mlp.c_proj",
    },
    parameters={
        "tokens.weight": "wte.weight",
        "positions.weight": "wpe.weight",
        "norm.weight": "ln_f.weight",
        "norm.bias": "ln_f.bias",
    },
    tied={"lm_head.weight": "wte.weight"},
    left_out=(".attn.bias", ".attn.masked_bias"),  # causal masks of old files
    numbers={
        "layers": "n_layer",
        "heads": "n_head",
        "width": "n_embd",
        "context": "n_positions",
        "vocabulary": "vocab_size",
    },
    dropouts={
        "embedding_dropout": ("embd_pdrop",),
        "attention_dropout": ("attn_pdrop",),
        "residual_dropout": ("resid_pdrop",),
    },
    dropout=0.1,
    said={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "layer_norm_epsilon": (EPS,),
        "tie_word_embeddings": (True, False),
    },
    unsaid={
        "add_cross_attention": (False,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "scale_attn_weights": (True,),
    },
)
_UNTIED = replace(
    LAYOUT,
    parameters={**LAYOUT.parameters, "head.weight": "lm_head.weight"},
    tied={},
    outside=("lm_head.",),
)
# What GPT-2 itself has none of; said in the file of a model that has it.
_FACTORS = {
    "kv_heads": None,
    "positions": "learned",
    "norm": "layer",
    "qk_norm": False,
    "bias": True,
}
# What Hugging Face's own GPT-2 has too.
_SAID = {"tied": ("tie_word_embeddings", True), "std": ("initializer_range", STD)}
_FUSED = ("query", "key", "value")


def _layout(shape: Shape) -> folders.Layout:
    return LAYOUT if shape.tied else _UNTIED


def _config_of(shape: Shape) -> dict[str, Any]:
    factors = {name: getattr(shape, name) for name in _FACTORS}
    standard = factors == _FACTORS
    values = LAYOUT.config(vars(shape), "GPT2LMHeadModel" if standard else None)
    values |= {key: getattr(shape, name) for name, (key, _) in _SAID.items()}
    return values if standard else values | factors


def _as_stored(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors as in a file: matrices of layers [in, out], query, key, value as one."""
    parts: dict[str, list[Tensor]] = {}
    for name, each in state.items():
        for fused in _FUSED:
            name = name.replace(f"attention.{fused}.", "attention.qkv.")
        turned = each.t() if name.startswith("layers.") else each  # a vector stays
        parts.setdefault(name, []).append(turned)
    return {name: torch.cat(those, dim=-1) for name, those in parts.items()}


def _from_stored(tensors: Mapping[str, Tensor], shape: Shape) -> dict[str, Tensor]:
    """Return the inverse of ``_as_stored``."""
    found = {}
    for name, each in tensors.items():
        turned = each.t() if name.startswith("layers.") else each
        if "attention.qkv." in name:
            widths = [shape.width, shape.kv_width, shape.kv_width]
            for fused, part in zip(_FUSED, turned.split_with_sizes(widths), strict=True):
                found[name.replace("qkv", fused)] = part
        else:
            found[name] = turned
    return found


def _norm(shape: Shape) -> nn.Module:
    kind = nn.RMSNorm if shape.norm == "rms" else nn.LayerNorm
    return kind(shape.width, eps=EPS)


def _layer(shape: Shape, implementation: Implementation, mask: Mask, score: Score | None) -> Layer:
    attention = Attention(
        shape.width,
        shape.heads,
        kv_heads=shape.kv_heads,
        bias=shape.bias,
        qk_norm=shape.qk_norm,
        rotary=Rotary() if shape.positions == "rotary" else None,
        mask=mask,
        score=score,
        dropout_p=shape.attention_dropout,
        implementation=implementation,
    )
    return Layer(
        attention,
        partial(_norm, shape),
        width=shape.width,
        inner=4 * shape.width,
        gelu="tanh",
        dropout=shape.residual_dropout,
        bias=shape.bias,
    )


class Rows(NamedTuple):
    """Some rows of a sequence: their positions, int64 [S], and the length of all of it."""

    places: Tensor
    length: int


def first_places(documents: Tensor) -> Tensor:
    """Return where each token's document begins, int64 [B, S], from document numbers [B, S]."""
    places = torch.arange(documents.shape[1], device=documents.device).expand(documents.shape)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return places.masked_fill(~begins, 0).cummax(dim=1).values


class GPT2(nn.Module):
    """Predicts the next token.

    Weights depend on ``shape`` and ``seed`` alone, never on the attention, and making them leaves
    torch's global random state as it is. The model is made on the CPU in float32.

    ``mask`` says who sees whom; None is for causal. ``pattern`` maps the number of positions of a
    call to a further mask for it, such as a table of blocks, which is of one size; None for none.
    ``checkpointing`` is as of ``layers.through``.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        implementation: Implementation = "tilewise",
        mask: Mask | None = None,
        score: Score | None = None,
        pattern: Callable[[int], Mask] | None = None,
        seed: int = 0,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        mask = masks.causal() if mask is None else mask
        self.shape, self.pattern, self.checkpointing = shape, pattern, checkpointing
        self.extra_config: dict[str, Any] = {}  # keys of a loaded config that say nothing here
        with torch.device("meta"):  # torch's own initialisation would draw from the global state
            self.tokens = nn.Embedding(shape.vocabulary, shape.width)
            learned = shape.positions == "learned"
            self.positions = nn.Embedding(shape.context, shape.width) if learned else None
            self.dropout = nn.Dropout(shape.embedding_dropout)
            self.layers = nn.ModuleList(
                _layer(shape, implementation, mask, score) for _ in range(shape.layers)
            )
            self.norm = _norm(shape)
            self.head = None if shape.tied else Unembedding(shape.width, shape.vocabulary)
        self.to_empty(device="cpu")
        self._initialise(seed)

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        """Draw normal weights of ``shape.std``, smaller by sqrt(2 layers) where branches add up.

        Gains are 1 and biases 0. The parts of GPT-2 that a shape lacks (positions, heads of keys
        and values) are drawn all the same, and a head of its own is drawn last. The other weights
        are therefore those of a GPT-2 of the same seed.
        """
        shape, generator = self.shape, torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                ends_branch = name.endswith(("attention.output.weight", "contract.weight"))
                shrink = math.sqrt(2 * shape.layers) if ends_branch else 1.0
                grouped = name.endswith(("attention.key.weight", "attention.value.weight"))
                whole = parameter.new_empty(shape.width, shape.width) if grouped else parameter
                whole.normal_(std=shape.std / shrink, generator=generator)
                parameter.copy_(whole[: len(parameter)])
            else:
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
            if name == "tokens.weight" and self.positions is None:
                parameter.new_empty(shape.context, shape.width).normal_(generator=generator)

    def forward(
        self, tokens: Tensor, documents: Tensor | None = None, rows: Rows | None = None
    ) -> Tensor:
        """Logits of the next token at every position.

        Args:
            tokens: int64 [B, S], S at most ``shape.context``.
            documents: integer [B, S], the document of each token, whose tokens lie beside each
                other; None where a row is one. A token sees those of its own document, and
                positions count from the document's first token in the row: logits are those that
                each document has alone (a pattern of blocks counts within the row).
            rows: where the tokens lie in a longer sequence, whose attention is shared
                (``tilewise.distributed.context_parallel``); None where they are all of it.

        Returns:
            [B, S, V].

        Raises:
            InvalidArgument: another shape, or more positions than the model has.
        """
        return self.logits(self.features(tokens, documents, rows))

    def features(
        self, tokens: Tensor, documents: Tensor | None = None, rows: Rows | None = None
    ) -> Tensor:
        """Return what ``logits`` takes, [B, S, width]; arguments are those of ``forward``."""
        length = tokens.shape[-1] if rows is None else rows.length
        if tokens.dim() != 2 or length > self.shape.context:
            required = f"[B, S] with S at most the context {self.shape.context}"
            raise InvalidArgument("tokens", f"shape {list(tokens.shape)}", required)
        places = torch.arange(length, device=tokens.device) if rows is None else rows.places
        seen = None if self.pattern is None else self.pattern(length)
        if documents is not None:
            places = places - first_places(documents)
            own = masks.document(documents)
            seen = own if seen is None else seen & own
        x = self.dropout(self.embedded(tokens, places))
        plain = seen is None and rows is None
        more: dict[str, Any] = {} if plain else {"mask": seen, "positions": places}
        features: Tensor = self.norm(through(self.layers, x, self.checkpointing, **more))
        return features

    def logits(self, x: Tensor) -> Tensor:
        """Return the head's output of what the last norm gave, [..., width] -> [..., V]."""
        return functional.linear(x, self.unembedding)

    @property
    def unembedding(self) -> Tensor:
        """The head's matrix, [V, width]."""
        return (self.tokens if self.head is None else self.head).weight

    def embedded(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Return the input of the first layer, before dropout, [..., width]; places broadcast."""
        x: Tensor = self.tokens(tokens)
        return x if self.positions is None else x + self.positions(places)

    def save(self, folder: Path) -> None:
        """Write ``config.json`` and ``model.safetensors``, each whole or not at all.

        The folder is made where it is missing; files of an earlier save are replaced.
        """
        values = {**self.extra_config, **_config_of(self.shape)}
        _layout(self.shape).write(folder, _as_stored(self.state_dict()), values)


def load(folder: Path, **keywords: Any) -> GPT2:
    """Return a GPT-2 from a folder in the Hugging Face layout.

    Weights of half precision are widened to float32, those of float64 stay so.

    Args:
        folder: with ``config.json`` and ``model.safetensors``.
        keywords: others of ``GPT2``.

    Raises:
        InvalidArgument: not such a folder, or tensors that are missing, too many or misshapen.
        Unsupported: a GPT-2 that computes something else, e.g. with another activation.
    """
    values = LAYOUT.read_config(folder)
    given = LAYOUT.shape(values)
    if values.get("n_inner") not in (None, 4 * given["width"]):
        raise Unsupported(f"a GPT-2 with n_inner {values['n_inner']}: only 4 * n_embd is known")
    if values["model_type"] == LAYOUT.kinds[1]:
        given |= {name: values.get(name, standard) for name, standard in _FACTORS.items()}
    given |= {name: values.get(key, standard) for name, (key, standard) in _SAID.items()}
    shape = Shape(**given)
    model = GPT2(shape, **keywords)
    own = _config_of(shape)
    model.extra_config = {key: value for key, value in values.items() if key not in own}
    state, _ = _layout(shape).read(folder, _as_stored(model.state_dict()))
    folders.fill(model, _from_stored(state, shape))
    return model
