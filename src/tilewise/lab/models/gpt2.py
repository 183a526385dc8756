"""GPT-2 of any size in one file, with attention as one argument.

The architecture is that of the published weights: learned positions, pre-norm layers, a perceptron
of four times the width with the tanh form of GELU, and a head that is the token embedding itself.
``save`` and ``load`` use the Hugging Face layout (``config.json`` and ``model.safetensors``).

Dimensions: B batch, S positions, V vocabulary.

Source: Radford et al., Language Models are Unsupervised Multitask Learners (2019).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tilewise import masks
from tilewise.errors import InvalidArgument, Unsupported
from tilewise.nn import Attention, Implementation
from tilewise.variants.values import Mask, Score

__all__ = ["GPT2", "PRESETS", "Shape", "load"]

CONFIG, WEIGHTS = "config.json", "model.safetensors"
EPS = 1e-5
STD = 0.02  # of every weight matrix at the start; those that end a residual branch get less


@dataclass(frozen=True)
class Shape:
    """The numbers of a GPT-2.

    Args:
        layers, heads, width: of the transformer; ``heads`` divides ``width``.
        context: the most positions.
        vocabulary: token ids.
        embedding_dropout, attention_dropout, residual_dropout: probabilities in training mode.

    Raises:
        InvalidArgument: a number that is not positive, or ``heads`` that do not divide ``width``.
    """

    layers: int
    heads: int
    width: int
    context: int = 1024
    vocabulary: int = 50257
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "width", "context", "vocabulary"):
            if getattr(self, name) < 1:
                raise InvalidArgument(name, str(getattr(self, name)), "1 or more")
        if self.width % self.heads:
            raise InvalidArgument("width", str(self.width), f"a multiple of heads={self.heads}")
        for name in ("embedding_dropout", "attention_dropout", "residual_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise InvalidArgument(name, str(getattr(self, name)), "a number in [0, 1)")


# ``tiny`` is for laptops and reads bytes; the others are the published ones (124M to 1.6B).
PRESETS = {
    "tiny": Shape(layers=4, heads=4, width=128, context=256, vocabulary=256),
    "small": Shape(layers=12, heads=12, width=768),
    "medium": Shape(layers=24, heads=16, width=1024),
    "large": Shape(layers=36, heads=20, width=1280),
    "xl": Shape(layers=48, heads=25, width=1600),
}


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
        self.attention_norm = nn.LayerNorm(shape.width, eps=EPS)
        self.attention = Attention(
            shape.width,
            shape.heads,
            bias=True,
            mask=mask,
            score=score,
            dropout_p=shape.attention_dropout,
            implementation=implementation,
        )
        self.mlp_norm = nn.LayerNorm(shape.width, eps=EPS)
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


class GPT2(nn.Module):
    """Predicts the next token.

    Weights depend on ``shape`` and ``seed`` alone, never on the attention, and making them leaves
    torch's global random state as it is. The model is made on the CPU in float32.

    Args:
        shape: its numbers.
        implementation: which attention runs; nothing else depends on it.
        mask: who sees whom; None for causal.
        score: a change of the attention's scores; None for none.
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
        seed: int = 0,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        mask = masks.causal() if mask is None else mask
        self.shape, self.checkpointing = shape, checkpointing
        self.extra_config: dict[str, Any] = {}  # keys of a loaded config that say nothing here
        with torch.device("meta"):  # torch's own initialisation would draw from the global state
            self.tokens = nn.Embedding(shape.vocabulary, shape.width)
            self.positions = nn.Embedding(shape.context, shape.width)
            self.dropout = nn.Dropout(shape.embedding_dropout)
            self.layers = nn.ModuleList(
                Layer(shape, implementation, mask, score) for _ in range(shape.layers)
            )
            self.norm = nn.LayerNorm(shape.width, eps=EPS)
        self.to_empty(device="cpu")
        self._initialise(seed)

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        """Normal weights of ``STD``, less where branches add up (by sqrt(2 layers)).

        Gains are 1 and biases 0.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                ends_branch = name.endswith(("attention.output.weight", "contract.weight"))
                shrink = math.sqrt(2 * self.shape.layers) if ends_branch else 1.0
                parameter.normal_(std=STD / shrink, generator=generator)
            else:
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token at every position.

        Args:
            tokens: int64 [B, S], S at most ``shape.context``.

        Returns:
            [B, S, V].

        Raises:
            InvalidArgument: another shape, or more positions than the model has.
        """
        if tokens.dim() != 2 or tokens.shape[1] > self.shape.context:
            required = f"[B, S] with S at most the context {self.shape.context}"
            raise InvalidArgument("tokens", f"shape {list(tokens.shape)}", required)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(places))
        recompute = self.checkpointing and torch.is_grad_enabled()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        return functional.linear(self.norm(x), self.tokens.weight)

    def save(self, folder: Path) -> None:
        """Write ``config.json`` and ``model.safetensors``, each whole or not at all.

        Args:
            folder: made where it is missing; files of an earlier save are replaced.
        """
        folder.mkdir(parents=True, exist_ok=True)
        weights, config = folder / f".{WEIGHTS}.new", folder / f".{CONFIG}.new"
        save_file(_to_file(self.state_dict(), self.shape), weights, metadata={"format": "pt"})
        values = {**self.extra_config, **_config(self.shape)}
        config.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
        os.replace(weights, folder / WEIGHTS)
        os.replace(config, folder / CONFIG)


def load(
    folder: Path,
    *,
    implementation: Implementation = "tilewise",
    mask: Mask | None = None,
    score: Score | None = None,
) -> GPT2:
    """A GPT-2 from a folder in the Hugging Face layout.

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
    values = _read_config(folder)
    shape = _shape(values)
    model = GPT2(shape, implementation=implementation, mask=mask, score=score)
    model.extra_config = {key: value for key, value in values.items() if key not in _config(shape)}
    tensors = _read_tensors(folder / WEIGHTS)
    _check_tensors(folder / WEIGHTS, tensors, _to_file(model.state_dict(), shape))
    if tensors["wte.weight"].dtype == torch.float64:
        model.double()
    model.load_state_dict(_from_file(tensors, shape))
    return model


# What a layer's tensors are called here and in the file. Hugging Face keeps the matrices of a
# layer as [in, out]; query, key and value are one matrix there, see ``_to_file``.
_COPIED = {
    "attention_norm.weight": "ln_1.weight",
    "attention_norm.bias": "ln_1.bias",
    "attention.output.bias": "attn.c_proj.bias",
    "mlp_norm.weight": "ln_2.weight",
    "mlp_norm.bias": "ln_2.bias",
    "expand.bias": "mlp.c_fc.bias",
    "contract.bias": "mlp.c_proj.bias",
}
_TRANSPOSED = {
    "attention.output.weight": "attn.c_proj.weight",
    "expand.weight": "mlp.c_fc.weight",
    "contract.weight": "mlp.c_proj.weight",
}
_ENDS = {
    "tokens.weight": "wte.weight",
    "positions.weight": "wpe.weight",
    "norm.weight": "ln_f.weight",
    "norm.bias": "ln_f.bias",
}
_FUSED = ("query", "key", "value")
_PREFIX = "transformer."


def _to_file(state: Mapping[str, Tensor], shape: Shape) -> dict[str, Tensor]:
    """The tensors under their names in the file, contiguous."""
    out = {_PREFIX + theirs: state[ours] for ours, theirs in _ENDS.items()}
    for index in range(shape.layers):
        ours, theirs = f"layers.{index}.", f"{_PREFIX}h.{index}."
        out |= {theirs + name: state[ours + own] for own, name in _COPIED.items()}
        out |= {theirs + name: state[ours + own].t() for own, name in _TRANSPOSED.items()}
        parts = [ours + f"attention.{name}." for name in _FUSED]
        fused = torch.cat([state[part + "weight"].t() for part in parts], dim=1)
        out[theirs + "attn.c_attn.weight"] = fused
        out[theirs + "attn.c_attn.bias"] = torch.cat([state[part + "bias"] for part in parts])
    return {name: tensor.contiguous() for name, tensor in out.items()}


def _from_file(tensors: Mapping[str, Tensor], shape: Shape) -> dict[str, Tensor]:
    """The inverse of ``_to_file``; names come without the prefix."""
    out = {ours: tensors[theirs] for ours, theirs in _ENDS.items()}
    for index in range(shape.layers):
        ours, theirs = f"layers.{index}.", f"h.{index}."
        out |= {ours + own: tensors[theirs + name] for own, name in _COPIED.items()}
        out |= {ours + own: tensors[theirs + name].t() for own, name in _TRANSPOSED.items()}
        weights = tensors[theirs + "attn.c_attn.weight"].chunk(3, dim=1)
        biases = tensors[theirs + "attn.c_attn.bias"].chunk(3)
        for name, weight, bias in zip(_FUSED, weights, biases, strict=True):
            out[f"{ours}attention.{name}.weight"] = weight.t()
            out[f"{ours}attention.{name}.bias"] = bias
    return out


# Keys of a config that decide what is computed: what each may say, and its meaning where absent.
_REQUIRED: dict[str, tuple[tuple[Any, ...], Any]] = {
    "activation_function": (("gelu_new", "gelu_pytorch_tanh"), "gelu_new"),
    "add_cross_attention": ((False,), False),
    "layer_norm_epsilon": ((EPS,), EPS),
    "scale_attn_by_inverse_layer_idx": ((False,), False),
    "scale_attn_weights": ((True,), True),
    "tie_word_embeddings": ((True,), True),
}
_NUMBERS = {
    "layers": "n_layer",
    "heads": "n_head",
    "width": "n_embd",
    "context": "n_positions",
    "vocabulary": "vocab_size",
    "embedding_dropout": "embd_pdrop",
    "attention_dropout": "attn_pdrop",
    "residual_dropout": "resid_pdrop",
}


def _config(shape: Shape) -> dict[str, Any]:
    """The keys of ``config.json`` that describe the shape."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "layer_norm_epsilon": EPS,
        "tie_word_embeddings": True,
        **{theirs: getattr(shape, ours) for ours, theirs in _NUMBERS.items()},
    }


def _read_config(folder: Path) -> dict[str, Any]:
    required = f"a folder with {CONFIG} and {WEIGHTS}"
    try:
        values = json.loads((folder / CONFIG).read_text())
    except OSError as error:
        raise InvalidArgument("folder", f"{folder} ({error.strerror})", required) from None
    except ValueError as error:
        came = f"{folder / CONFIG}, which is not JSON ({error})"
        raise InvalidArgument("folder", came, required) from None
    if not isinstance(values, dict) or values.get("model_type") != "gpt2":
        kind = values.get("model_type") if isinstance(values, dict) else None
        raise InvalidArgument("folder", f"{folder}, a model of type {kind!r}", "type 'gpt2'")
    return values


def _shape(values: Mapping[str, Any]) -> Shape:
    for key, (allowed, absent) in _REQUIRED.items():
        if values.get(key, absent) not in allowed:
            raise Unsupported(f"a GPT-2 with {key} {values[key]!r}: only {allowed[0]!r} is known")
    missing = [key for key in list(_NUMBERS.values())[:5] if not isinstance(values.get(key), int)]
    if missing:
        raise InvalidArgument(CONFIG, f"no whole number for {missing[0]}", "one")
    given = {ours: values.get(theirs, 0.1) for ours, theirs in _NUMBERS.items()}  # of dropout
    shape = Shape(**given)
    if values.get("n_inner") not in (None, 4 * shape.width):
        raise Unsupported(f"a GPT-2 with n_inner {values['n_inner']}: only 4 * n_embd is known")
    return shape


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, names without prefix, half types widened, stored masks left out."""
    try:
        with safe_open(path, framework="pt") as file:
            found = {name.removeprefix(_PREFIX): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise InvalidArgument("folder", f"{path} ({error})", "a file of safetensors") from None
    head = found.pop("lm_head.weight", None)
    if head is not None and not torch.equal(head, found.get("wte.weight", head.new_empty(0))):
        raise Unsupported(f"{path}: a head that is not the token embedding")
    return {
        name: tensor if tensor.dtype == torch.float64 else tensor.float()
        for name, tensor in found.items()
        if not name.endswith((".attn.bias", ".attn.masked_bias"))  # causal masks of old files
    }


def _check_tensors(
    path: Path, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> None:
    wanted = {name.removeprefix(_PREFIX): list(each.shape) for name, each in expected.items()}
    for words, odd in (
        ("no tensor", wanted.keys() - tensors.keys()),
        ("an unknown tensor", tensors.keys() - wanted.keys()),
    ):
        if odd:
            required = f"the {len(wanted)} tensors of the GPT-2 that {CONFIG} describes"
            raise InvalidArgument(str(path), f"{words} {min(odd)!r}", required)
    for name, shape in wanted.items():
        if list(tensors[name].shape) != shape:
            came = f"{name} of shape {list(tensors[name].shape)}"
            raise InvalidArgument(str(path), came, f"shape {shape}, as {CONFIG} says")
