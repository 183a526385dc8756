"""The attention of well-known models: shapes, with where each is from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tilewise.errors import InvalidArgument


class KnownModel(NamedTuple):
    """The attention of one model.

    Args:
        layers: how many layers have it.
        heads: Hq.
        kv_heads: Hk.
        head_dim: D and Dv.
        length: the longest sequence, or that of the model's usual input.
        causal: whether a row sees no later key.
        source: where the figures are from.
        softcap: the cap of its scores; None for none.
        window: keys to the left that a row sees beside its own; None for all.
        windowed: layers that have the window.
        dtype: in which it is usually run: that of its published weights, or what its own programs
            cast to.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    length: int
    causal: bool
    source: str
    softcap: float | None = None
    window: int | None = None
    windowed: int = 0
    dtype: str = "float32"


_GPT2 = "transformers 5.23.0 GPT2Config; karpathy/nanoGPT@3adf61e1 model.py"
_BERT = "transformers 5.23.0 BertConfig"
_BERT_LARGE = "tinygrad@a9069c17 examples/mlperf/helpers.py (MLPerf BERT-large)"
_LITGPT = "Lightning-AI/litgpt@26857050 litgpt/config.py"
_TIMM = "timm 1.0.31 timm/models/vision_transformer.py"
_WHISPER = "transformers 5.23.0 WhisperConfig; the public configuration of large-v3"
_SD = (
    "CompVis/stable-diffusion@36de52cb configs/stable-diffusion/v1-inference.yaml: five of the "
    "UNet's transformer blocks at each resolution"
)
_FLUX = "black-forest-labs/flux@1f71c433 src/flux/util.py: 19 double and 38 single blocks"

KNOWN_MODELS: Mapping[str, KnownModel] = {
    "gpt2": KnownModel(12, 12, 12, 64, 1024, True, _GPT2),
    "gpt2-medium": KnownModel(24, 16, 16, 64, 1024, True, _GPT2),
    "gpt2-large": KnownModel(36, 20, 20, 64, 1024, True, _GPT2),
    "gpt2-xl": KnownModel(48, 25, 25, 64, 1024, True, _GPT2),
    "bert-base": KnownModel(12, 12, 12, 64, 512, False, _BERT),
    "bert-large": KnownModel(24, 16, 16, 64, 512, False, _BERT_LARGE),
    "llama-3-8b": KnownModel(32, 32, 8, 128, 8192, True, _LITGPT, dtype="bfloat16"),
    "llama-3-70b": KnownModel(80, 64, 8, 128, 8192, True, _LITGPT, dtype="bfloat16"),
    "llama-3.2-1b": KnownModel(16, 32, 8, 64, 131072, True, _LITGPT, dtype="bfloat16"),
    "mistral-7b": KnownModel(32, 32, 8, 128, 4096, True, _LITGPT, None, 4095, 32, dtype="bfloat16"),
    "gemma-2-9b": KnownModel(42, 16, 8, 256, 8192, True, _LITGPT, 50.0, 4095, 21, dtype="bfloat16"),
    "qwen3-0.6b": KnownModel(28, 16, 8, 128, 40960, True, _LITGPT, dtype="bfloat16"),
    "qwen3-8b": KnownModel(36, 32, 8, 128, 40960, True, _LITGPT, dtype="bfloat16"),
    "vit-base-224": KnownModel(12, 12, 12, 64, 197, False, _TIMM),
    "vit-large-384": KnownModel(24, 16, 16, 64, 577, False, _TIMM),
    "whisper-tiny": KnownModel(4, 6, 6, 64, 1500, False, _WHISPER),
    "whisper-large-v3": KnownModel(32, 20, 20, 64, 1500, False, _WHISPER, dtype="float16"),
    "whisper-large-v3-decoder": KnownModel(32, 20, 20, 64, 448, True, _WHISPER, dtype="float16"),
    "sd1.5-64x64": KnownModel(5, 8, 8, 40, 4096, False, _SD, dtype="float16"),
    "sd1.5-32x32": KnownModel(5, 8, 8, 80, 1024, False, _SD, dtype="float16"),
    "flux.1-dev": KnownModel(57, 24, 24, 128, 4608, False, _FLUX, dtype="bfloat16"),
}


def known_model(name: str) -> KnownModel:
    """Return a model of the table.

    Raises:
        InvalidArgument: there is none of that name.
    """
    found = KNOWN_MODELS.get(name.lower())
    if found is None:
        fix = "Any other: give --shape, --kv-heads and --mask."
        raise InvalidArgument("model", repr(name), f"one of {', '.join(KNOWN_MODELS)}", fix)
    return found
