"""GPT-2 of any size in one file, with attention as one argument.

The architecture is that of the published weights: learned positions and pre-norm layers. The
perceptron has four times the width and the tanh form of GELU. The head is the token embedding
itself. The ``Shape`` also has single changes of later models: rotary positions, fewer key/value
heads, RMSNorm, QK-norm. ``save`` and ``load`` use the Hugging Face layout (``config.json`` and
``model.safetensors``): see ``gpt2_files.py``.

Dimensions: B batch, S positions, V vocabulary.

Source: Radford et al., Language Models are Unsupervised Multitask Learners (2019).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tilelab.models import folders
from tilelab.models import gpt2_files as files
from tilelab.models.gpt2_files import Shape
from tilewise import masks
from tilewise.errors import InvalidArgument
from tilewise.nn import Attention, Implementation, Rotary
from tilewise.variants.values import Mask, Score

__all__ = ["GPT2", "PRESETS", "Shape", "first_places", "load"]

STD = 0.02  # of every weight matrix at the start; those that end a residual branch get less


# ``tiny`` is for laptops and reads bytes; the others are the published ones (124M to 1.6B).
PRESETS = {
    "tiny": Shape(layers=4, heads=4, width=128, context=256, vocabulary=256),
    "small": Shape(layers=12, heads=12, width=768),
    "medium": Shape(layers=24, heads=16, width=1024),
    "large": Shape(layers=36, heads=20, width=1280),
    "xl": Shape(layers=48, heads=25, width=1600),
}


def _norm(shape: Shape) -> nn.Module:
    kind = nn.RMSNorm if shape.norm == "rms" else nn.LayerNorm
    return kind(shape.width, eps=files.EPS)


class Layer(nn.Module):
    """x + attention(norm(x)), then x + perceptron(norm(x)); [B, S, width] to the same.

    Args:
        shape: of the model.
        implementation, mask, score: of the attention.
    """

    def __init__(
        self, shape: Shape, implementation: Implementation, mask: Mask, score: Score | None
    ) -> None:
        super().__init__()
        self.attention_norm = _norm(shape)
        self.attention = Attention(
            shape.width,
            shape.heads,
            kv_heads=shape.kv_heads,
            bias=True,
            qk_norm=shape.qk_norm,
            rotary=Rotary() if shape.positions == "rotary" else None,
            mask=mask,
            score=score,
            dropout_p=shape.attention_dropout,
            implementation=implementation,
        )
        self.mlp_norm = _norm(shape)
        self.expand = nn.Linear(shape.width, 4 * shape.width)
        self.contract = nn.Linear(4 * shape.width, shape.width)
        self.dropout = nn.Dropout(shape.residual_dropout)

    def forward(self, x: Tensor, attend: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """[B, S, width] -> [B, S, width]; ``attend`` is there for the layer's own attention."""
        attend = self.attention if attend is None else attend
        x = x + self.dropout(attend(self.attention_norm(x)))
        hidden = functional.gelu(self.expand(self.mlp_norm(x)), approximate="tanh")
        out: Tensor = x + self.dropout(self.contract(hidden))
        return out


def _asked(layer: nn.Module, mask: Mask, places: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the attention of a layer with a further mask and with positions of its own."""
    return partial(cast("Attention", layer.attention), mask=mask, positions=places)


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

    Args:
        shape: its numbers.
        implementation: which attention runs; nothing else depends on it.
        mask: who sees whom; None for causal.
        score: a change of the attention's scores; None for none.
        pattern: the number of positions of a call -> a further mask for it, such as a table of
            blocks, which is of one size; None for none.
        seed: of the weights.
        checkpointing: keep only the input of each layer, and compute the layer again in the
            backward pass (with the same dropout).
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
                Layer(shape, implementation, mask, score) for _ in range(shape.layers)
            )
            self.norm = _norm(shape)
        self.to_empty(device="cpu")
        self._initialise(seed)

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        """Draw normal weights of ``STD``, smaller by sqrt(2 layers) where branches add up.

        Gains are 1 and biases 0. The parts of GPT-2 that a shape lacks (positions, heads of keys
        and values) are drawn all the same. The other weights are therefore those of a GPT-2 of the
        same seed.
        """
        shape, generator = self.shape, torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                ends_branch = name.endswith(("attention.output.weight", "contract.weight"))
                shrink = math.sqrt(2 * shape.layers) if ends_branch else 1.0
                grouped = name.endswith(("attention.key.weight", "attention.value.weight"))
                whole = parameter.new_empty(shape.width, shape.width) if grouped else parameter
                whole.normal_(std=STD / shrink, generator=generator)
                parameter.copy_(whole[: len(parameter)])
            else:
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
            if name == "tokens.weight" and self.positions is None:
                parameter.new_empty(shape.context, shape.width).normal_(generator=generator)

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Logits of the next token at every position.

        Args:
            tokens: int64 [B, S], S at most ``shape.context``.
            documents: integer [B, S], the document of each token, whose tokens lie beside each
                other; None where a row is one. A token sees those of its own document, and
                positions count from the document's first token in the row: logits are those that
                each document has alone (a pattern of blocks counts within the row).

        Returns:
            [B, S, V].

        Raises:
            InvalidArgument: another shape, or more positions than the model has.
        """
        if tokens.dim() != 2 or tokens.shape[1] > self.shape.context:
            required = f"[B, S] with S at most the context {self.shape.context}"
            raise InvalidArgument("tokens", f"shape {list(tokens.shape)}", required)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        seen = None if self.pattern is None else self.pattern(tokens.shape[1])
        if documents is not None:
            places = places - first_places(documents)
            own = masks.document(documents)
            seen = own if seen is None else seen & own
        x = self.dropout(self.embedded(tokens, places))
        recompute = self.checkpointing and torch.is_grad_enabled()
        for layer in self.layers:
            asked = (x, None if seen is None else _asked(layer, seen, places))
            x = checkpoint(layer, *asked, use_reentrant=False) if recompute else layer(*asked)
        return functional.linear(self.norm(x), self.tokens.weight)

    def embedded(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Return the input of the first layer, before dropout; [..., width].

        Args:
            tokens: int64 [...].
            places: the position of each, of a shape that broadcasts to that of ``tokens``.
        """
        x: Tensor = self.tokens(tokens)
        return x if self.positions is None else x + self.positions(places)

    def save(self, folder: Path) -> None:
        """Write ``config.json`` and ``model.safetensors``, each whole or not at all.

        Args:
            folder: made where it is missing; files of an earlier save are replaced.
        """
        tensors = files.to_file(self.state_dict(), self.shape)
        folders.write(folder, tensors, {**self.extra_config, **files.config_of(self.shape)})


def load(
    folder: Path,
    *,
    implementation: Implementation = "tilewise",
    mask: Mask | None = None,
    score: Score | None = None,
) -> GPT2:
    """Return a GPT-2 from a folder in the Hugging Face layout.

    Weights of half precision are widened to float32, those of float64 stay so.

    Args:
        folder: with ``config.json`` and ``model.safetensors``.
        implementation: as for ``GPT2``.
        mask: as for ``GPT2``.
        score: as for ``GPT2``.

    Raises:
        InvalidArgument: not such a folder, or tensors that are missing, too many or misshapen.
        Unsupported: a GPT-2 that computes something else, e.g. with another activation.
    """
    values = files.read_config(folder)
    shape = Shape(**files.numbers_of(values))
    model = GPT2(shape, implementation=implementation, mask=mask, score=score)
    own = files.config_of(shape)
    model.extra_config = {key: value for key, value in values.items() if key not in own}
    path = folder / folders.WEIGHTS
    tensors = files.read_tensors(path)
    files.check_tensors(path, tensors, files.to_file(model.state_dict(), shape))
    if tensors["wte.weight"].dtype == torch.float64:
        model.double()
    model.load_state_dict(files.from_file(tensors, shape))
    return model
