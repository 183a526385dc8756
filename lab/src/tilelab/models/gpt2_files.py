"""The numbers of a GPT-2, and its files in the Hugging Face layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from tilelab.models import folders
from tilelab.models.folders import CONFIG
from tilewise.errors import InvalidArgument, Unsupported

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


EPS = 1e-5

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
# Those that GPT-2 itself lacks.
_QK_NORM = {
    "attention.query_norm.weight": "attn.q_norm.weight",
    "attention.key_norm.weight": "attn.k_norm.weight",
}
_FUSED = ("query", "key", "value")
_PREFIX = "transformer."


def _copied(shape: Shape) -> dict[str, str]:
    names = {**_COPIED, **(_QK_NORM if shape.qk_norm else {})}
    return {ours: theirs for ours, theirs in names.items() if _has(shape, ours)}


def _ends(shape: Shape) -> dict[str, str]:
    return {ours: theirs for ours, theirs in _ENDS.items() if _has(shape, ours)}


def _has(shape: Shape, name: str) -> bool:
    if name == "positions.weight":
        return shape.positions == "learned"
    return shape.norm == "layer" or not name.endswith("norm.bias")


def to_file(state: Mapping[str, Tensor], shape: Shape) -> dict[str, Tensor]:
    """Return the tensors of a model under their names in the file, contiguous."""
    out = {_PREFIX + theirs: state[ours] for ours, theirs in _ends(shape).items()}
    for index in range(shape.layers):
        ours, theirs = f"layers.{index}.", f"{_PREFIX}h.{index}."
        out |= {theirs + name: state[ours + own] for own, name in _copied(shape).items()}
        out |= {theirs + name: state[ours + own].t() for own, name in _TRANSPOSED.items()}
        parts = [ours + f"attention.{name}." for name in _FUSED]
        fused = torch.cat([state[part + "weight"].t() for part in parts], dim=1)
        out[theirs + "attn.c_attn.weight"] = fused
        out[theirs + "attn.c_attn.bias"] = torch.cat([state[part + "bias"] for part in parts])
    return {name: tensor.contiguous() for name, tensor in out.items()}


def from_file(tensors: Mapping[str, Tensor], shape: Shape) -> dict[str, Tensor]:
    """Return the inverse of ``to_file``; names come without the prefix."""
    out = {ours: tensors[theirs] for ours, theirs in _ends(shape).items()}
    widths = [shape.width, shape.kv_width, shape.kv_width]
    for index in range(shape.layers):
        ours, theirs = f"layers.{index}.", f"h.{index}."
        out |= {ours + own: tensors[theirs + name] for own, name in _copied(shape).items()}
        out |= {ours + own: tensors[theirs + name].t() for own, name in _TRANSPOSED.items()}
        weights = tensors[theirs + "attn.c_attn.weight"].split_with_sizes(widths, dim=1)
        biases = tensors[theirs + "attn.c_attn.bias"].split_with_sizes(widths)
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


# What GPT-2 itself has none of; said in the file of a model that has it, which is another type: no
# library shall take it for a GPT-2.
_FACTORS = ("kv_heads", "positions", "norm", "qk_norm")
_STANDARD = {"kv_heads": None, "positions": "learned", "norm": "layer", "qk_norm": False}
_ARCHITECTURE, _TYPE, _OTHER_TYPE = "GPT2LMHeadModel", "gpt2", "tilewise-gpt2"


def config_of(shape: Shape) -> dict[str, Any]:
    """Return the keys of ``config.json`` that describe a shape."""
    factors = {name: getattr(shape, name) for name in _FACTORS}
    standard = factors == _STANDARD
    return {
        "architectures": [_ARCHITECTURE] if standard else [],
        "model_type": _TYPE if standard else _OTHER_TYPE,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": EPS,
        "tie_word_embeddings": True,
        **{theirs: getattr(shape, ours) for ours, theirs in _NUMBERS.items()},
        **({} if standard else factors),
    }


def read_config(folder: Path) -> dict[str, Any]:
    """Read ``config.json`` of a folder.

    Raises:
        InvalidArgument: it is not there, or not of a GPT-2.
    """
    return folders.read_config(folder, (_TYPE, _OTHER_TYPE))


def numbers_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the ``Shape`` that a config describes.

    Raises:
        InvalidArgument: a number that is missing.
        Unsupported: a GPT-2 that computes something else.
    """
    for key, (allowed, absent) in _REQUIRED.items():
        if values.get(key, absent) not in allowed:
            raise Unsupported(f"a GPT-2 with {key} {values[key]!r}: only {allowed[0]!r} is known")
    missing = [key for key in list(_NUMBERS.values())[:5] if not isinstance(values.get(key), int)]
    if missing:
        raise InvalidArgument(CONFIG, f"no whole number for {missing[0]}", "one")
    given = {ours: values.get(theirs, 0.1) for ours, theirs in _NUMBERS.items()}  # of dropout
    if values.get("n_inner") not in (None, 4 * given["width"]):
        raise Unsupported(f"a GPT-2 with n_inner {values['n_inner']}: only 4 * n_embd is known")
    if values["model_type"] == _OTHER_TYPE:
        given |= {name: values.get(name, _STANDARD[name]) for name in _FACTORS}
    return given


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a file, names without prefix, half types widened, stored masks left out.

    Raises:
        InvalidArgument: no such file.
        Unsupported: a head of its own.
    """
    found = {name.removeprefix(_PREFIX): each for name, each in folders.read_tensors(path).items()}
    head = found.pop("lm_head.weight", None)
    if head is not None and not torch.equal(head, found.get("wte.weight", head.new_empty(0))):
        raise Unsupported(f"{path}: a head that is not the token embedding")
    return {
        name: tensor
        for name, tensor in found.items()
        if not name.endswith((".attn.bias", ".attn.masked_bias"))  # causal masks of old files
    }


def check_tensors(
    path: Path, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> None:
    """Check that a file has the tensors of its config.

    Raises:
        InvalidArgument: one is missing, too many or misshapen.
    """
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
