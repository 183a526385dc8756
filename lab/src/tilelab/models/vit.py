"""A vision transformer (ViT) of any size in one file, with attention as one argument.

An image is cut into square patches, each of them a token: a linear map of its pixels plus a learned
position. The architecture is that of the published weights: a class token, pre-norm layers, and a
perceptron with the exact form of GELU. A linear head reads the class token, or the mean of all
patches where there is no class token. With patches of one pixel the tokens are the pixels, row by
row, as in the image tasks of the Long Range Arena. ``save`` and ``load`` use the Hugging Face
layout: ``folders.py``.

Dimensions: B images, P patches, C channels.

Sources: Dosovitskiy et al., An Image is Worth 16x16 Words (2021); the two smallest sizes: Touvron
et al., Training Data-efficient Image Transformers (2021).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tilelab.models import folders
from tilelab.models.layers import Layer, check_shape, initialise, through
from tilewise.errors import InvalidArgument
from tilewise.nn import Attention, Implementation
from tilewise.variants.values import Mask, Score, as_mask

EPS = 1e-12
# What may differ from a folder's shape.
_FREE = ("classes", "embedding_dropout", "attention_dropout", "residual_dropout")

Pooling = Literal["first", "mean"]


@dataclass(frozen=True)
class Shape:
    """The numbers of a ViT.

    Raises:
        InvalidArgument: a number that is not positive, or one that does not divide the other.
    """

    layers: int
    heads: int  # a divisor of ``width``
    width: int
    image: int = 224  # pixels of a side of the images, which are squares
    patch: int = 16  # pixels of a side of a patch, a divisor of ``image``
    channels: int = 3  # numbers of a pixel: 1 of gray, 3 of colour
    classes: int = 1000  # of the head
    feed_forward: int | None = None  # channels inside the perceptron; None for four times the width
    pooling: Pooling = "first"  # the head sees a class token, or the ``"mean"`` of all patches
    embedding_dropout: float = 0.0  # these three: probabilities in training mode
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0

    def __post_init__(self) -> None:
        check_shape(self, "feed_forward", "image", "patch", "channels", "classes")
        if self.image % self.patch:
            raise InvalidArgument("patch", str(self.patch), f"a divisor of image={self.image}")
        if self.pooling not in ("first", "mean"):
            raise InvalidArgument("pooling", repr(self.pooling), "'first' or 'mean'")

    @property
    def patches(self) -> int:
        """P, the patches of an image."""
        return (self.image // self.patch) ** 2

    @property
    def tokens(self) -> int:
        """Tokens of an image: its patches, and the class token where there is one."""
        return self.patches + (self.pooling == "first")


PRESETS = {
    "tiny": Shape(layers=12, heads=3, width=192),
    "small": Shape(layers=12, heads=6, width=384),
    "base": Shape(layers=12, heads=12, width=768),
    "large": Shape(layers=24, heads=16, width=1024),
}


LAYOUT = folders.Layout(
    family="a ViT",
    # A ViT without a class token is the other type: no library shall draw one for it.
    kinds=("vit", "tilewise-vit"),
    prefix="vit.",
    outside=("classifier.",),
    layers="encoder.layer",
    modules={
        "attention.query": "attention.attention.query",
        "attention.key": "attention.attention.key",
        "attention.value": "attention.attention.value",
        "attention.output": "attention.output.dense",
        "attention_norm": "layernorm_before",
        "expand": "intermediate.dense",
        "contract": "output.dense",
        "mlp_norm": "layernorm_after",
    },
    parameters={
        "class_token": "embeddings.cls_token",
        "positions.weight": "embeddings.position_embeddings",
        "embed.weight": "embeddings.patch_embeddings.projection.weight",
        "embed.bias": "embeddings.patch_embeddings.projection.bias",
        "norm.weight": "layernorm.weight",
        "norm.bias": "layernorm.bias",
    },
    heads={"classifier.weight": "classifier.weight", "classifier.bias": "classifier.bias"},
    # Of encoders trained otherwise: a head over the class token, a token for hidden patches.
    left_out=("pooler.dense.weight", "pooler.dense.bias", "embeddings.mask_token"),
    numbers={
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "width": "hidden_size",
        "feed_forward": "intermediate_size",
        "image": "image_size",
        "patch": "patch_size",
        "channels": "num_channels",
    },
    dropouts=folders.ENCODER_DROPOUTS,
    dropout=0.0,
    said={"hidden_act": ("gelu",), "layer_norm_eps": (EPS,), "qkv_bias": (True,)},
    unsaid={},
)


def _layer(
    shape: Shape, implementation: Implementation, mask: Mask | None, score: Score | None
) -> Layer:
    attention = Attention(
        shape.width,
        shape.heads,
        bias=True,
        mask=mask,
        score=score,
        dropout_p=shape.attention_dropout,
        implementation=implementation,
    )
    assert shape.feed_forward is not None
    return Layer(
        attention,
        lambda: nn.LayerNorm(shape.width, eps=EPS),
        width=shape.width,
        inner=shape.feed_forward,
        gelu="none",
        dropout=shape.residual_dropout,
    )


def _with_class_token(mask: Mask, patches: int) -> Mask:
    """Return a mask over the patches, and a token behind them that sees and is seen by all."""

    def own(b: Any, h: Any, m: Any, n: Any) -> Any:
        return (m == patches) | (n == patches)

    return mask | as_mask(own)


class ViT(nn.Module):
    """Classifies images.

    In a sequence the patches come first, row by row, and the class token last: patterns of blocks
    begin at the first patch.

    Weights depend on ``shape`` and ``seed`` alone, never on the attention, and making them leaves
    torch's global random state as it is. The model is made on the CPU in float32.

    ``mask`` says who sees whom among the patches (of a table of blocks: it counts the class token
    too); the class token sees and is seen by all. None is for everybody. ``checkpointing`` is as of
    ``layers.through``.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        implementation: Implementation = "tilewise",
        mask: Mask | None = None,
        score: Score | None = None,
        seed: int = 0,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.shape, self.checkpointing = shape, checkpointing
        self.drawn: tuple[str, ...] = ()  # parameters that a loaded folder did not have
        first = shape.pooling == "first"
        if mask is not None and first:
            mask = _with_class_token(mask, shape.patches)
        with torch.device("meta"):  # torch's own initialisation would draw from the global state
            self.embed = nn.Linear(shape.channels * shape.patch**2, shape.width)
            self.class_token = nn.Parameter(torch.empty(shape.width)) if first else None
            self.positions = nn.Embedding(shape.tokens, shape.width)  # the class token's first
            self.dropout = nn.Dropout(shape.embedding_dropout)
            self.layers = nn.ModuleList(
                _layer(shape, implementation, mask, score) for _ in range(shape.layers)
            )
            self.norm = nn.LayerNorm(shape.width, eps=EPS)
            self.classifier = nn.Linear(shape.width, shape.classes)
        initialise(self, seed)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the classes: [B, C, image, image] of the dtype of the weights to [B, classes].

        Raises:
            InvalidArgument: images of another size, or of other channels.
        """
        shape = self.shape
        sides = (shape.channels, shape.image, shape.image)
        if images.dim() != 4 or tuple(images.shape[1:]) != sides:
            required = f"[B, {', '.join(map(str, sides))}]"
            raise InvalidArgument("images", f"shape {list(images.shape)}", required)
        x = self.embed(self.cut(images))
        table = self.positions.weight
        if self.class_token is None:
            x = x + table
        else:
            # Positions first: under autocast the patches alone are narrow before they have theirs.
            last = (self.class_token + table[0]).expand(len(x), 1, -1)
            x = torch.cat([x + table[1:], last], dim=1)
        x = self.dropout(x)
        x = self.norm(through(self.layers, x, self.checkpointing))
        seen = x.mean(1) if self.class_token is None else x[:, -1]
        logits: Tensor = self.classifier(seen)
        return logits

    def cut(self, images: Tensor) -> Tensor:
        """Patches, row by row: [B, C, image, image] -> [B, P, C patch patch]."""
        side, channels = self.shape.patch, self.shape.channels
        count = self.shape.image // side
        split = images.reshape(-1, channels, count, side, count, side)  # [B, C, y, py, x, px]
        return split.permute(0, 2, 4, 1, 3, 5).reshape(len(images), count**2, channels * side**2)

    def save(self, folder: Path) -> None:
        """Write ``config.json`` and ``model.safetensors``, each whole or not at all."""
        shape, first = self.shape, self.class_token is not None
        values = LAYOUT.config(vars(shape), "ViTForImageClassification" if first else None)
        state = _as_stored(self.state_dict(), shape)
        LAYOUT.write(folder, state, values | folders.labels(shape.classes))


def _as_stored(state: Mapping[str, Tensor], shape: Shape) -> dict[str, Tensor]:
    shapes = {
        "embed.weight": (-1, shape.channels, shape.patch, shape.patch),
        "class_token": (1, -1, shape.width),
        "positions.weight": (1, -1, shape.width),
    }
    return {name: each.reshape(shapes.get(name, each.shape)) for name, each in state.items()}


def load(folder: Path, *, shape: Shape | None = None, **keywords: Any) -> ViT:
    """Return a ViT from a folder in the Hugging Face layout.

    Weights of half precision are widened to float32, those of float64 stay so.

    Args:
        folder: with ``config.json`` and ``model.safetensors``, of an encoder with a head or none.
        shape: None for the folder's. Another one may have other dropouts, and other classes: a head
            that the folder lacks, or has with other classes, is drawn from the seed, and named in
            the model's ``drawn``.
        keywords: others of ``ViT``; the seed is of what is drawn.

    Raises:
        InvalidArgument: not such a folder, one of other numbers than were asked for, or tensors
            that are missing, too many or misshapen.
        Unsupported: a ViT that computes something else, e.g. with another activation.
    """
    values = LAYOUT.read_config(folder)
    found = Shape(
        **LAYOUT.shape(values),
        classes=folders.classes_of(values),
        pooling="first" if values["model_type"] == LAYOUT.kinds[0] else "mean",
    )
    shape = found if shape is None else shape
    for name, value in vars(found).items():
        if name not in _FREE and getattr(shape, name) != value:
            came, required = f"{name} {getattr(shape, name)!r}", f"{value!r}, as in {folder}"
            raise InvalidArgument("shape", came, required)
    model = ViT(shape, **keywords)
    own = model.state_dict()
    state, model.drawn = LAYOUT.read(folder, _as_stored(own, shape))
    folders.fill(model, {name: each.reshape(own[name].shape) for name, each in state.items()})
    return model
