"""Rows of ``docs/compatibility.md`` for torch's own attention functions."""

from __future__ import annotations

from typing import Literal, TypeAlias

from tilelab.compatibility.rows import Row, Table

__all__ = ["TABLES"]

_State: TypeAlias = Literal["covered", "accepted", "refused"]
_Line: TypeAlias = tuple[tuple[str, ...], str, _State, str]

_SDPA = ("scaled_dot_product_attention",)
_SWITCH = ("tilewise.sdpa", "tilewise.compat.sdpa.enable")
_IMPL = ("activate_flash_attention_impl",)
_FLEX = ("flex_attention",)
_MASKS = ("create_block_mask",)
_JOIN = ("and_masks", "or_masks")
_SAME = ("create_mask", "noop_mask", "AuxRequest", "AuxOutput", "BlockMask")

_SDPA_INTRO = """
`tilewise.compat.sdpa.scaled_dot_product_attention` has the signature and the errors of torch's
function. Two switches let it take calls of `F.scaled_dot_product_attention`:

- `with tilewise.sdpa() as report:` takes the calls of this thread.
- `tilewise.compat.sdpa.enable()` takes the calls of all threads.

Calls that it does not take go to torch. The report says how many these were, and why.
"""

_SDPA_ROWS: tuple[_Line, ...] = (
    (
        _SDPA,
        "query, key, value",
        "covered",
        "two dimensions or more, broadcast; float32, bfloat16, float16, float64; Dv != D; empty; "
        "jagged nested tensors without a mask",
    ),
    (_SDPA, "query, key, value of other dtypes", "refused", "torch's own error"),
    (_SDPA, "head widths over 512", "refused", "the switch leaves them to torch"),
    (_SDPA, "attn_mask", "covered", "bool (True = attend) or added floats, with a gradient"),
    (
        _SDPA,
        "attn_mask with is_causal",
        "refused",
        "as torch's page says; its flash kernel on the CPU applies both",
    ),
    (_SDPA, "dropout_p", "covered", "repeated by torch.manual_seed, but with other numbers"),
    (_SDPA, "is_causal", "covered", "aligned to the top left"),
    (_SDPA, "scale", "covered", "a finite number; others are refused, and left by the switch"),
    (_SDPA, "enable_gqa", "covered", "key and value may have different numbers of heads"),
    (
        _SDPA,
        "a row that sees no key",
        "covered",
        "0 with zero gradients, as torch 2.13 on the CPU, for bool and -inf masks",
    ),
    (
        _SDPA,
        "NaN in a key that a mask hides",
        "covered",
        "stays hidden; torch's plain path spreads it",
    ),
    (_SWITCH, "torch.nn.functional.scaled_dot_product_attention", "covered", "at each lookup"),
    (
        _SWITCH,
        "a name imported before, and the fast path of nn.MultiheadAttention in eval mode",
        "refused",
        "not reached, and so not counted; `tilewise.nn.convert` replaces that module",
    ),
    (_SWITCH, "tensor subclasses, torch.func.vmap", "refused", "left to torch, and counted"),
    (
        _SWITCH,
        "torch.compile",
        "covered",
        "a graph is compiled for the switch that is on, and again when that changes; calls are "
        "counted when traced",
    ),
    (_IMPL, '"tilewise"', "covered", "what torch's flash path takes, on the CPU and on CUDA"),
    (_IMPL, "dropout_p on CUDA", "refused", "the switch has dropout"),
)

_FLEX_INTRO = """
Import `tilewise.compat.flex_attention` instead of `torch.nn.attention.flex_attention`. It works
eager and under `torch.compile(fullgraph=True)`, also on the CPU, with a backward everywhere.
"""

_FLEX_ROWS: tuple[_Line, ...] = (
    (_FLEX, "query, key, value", "covered", "[B, H, S, E]; one batch item of keys for all"),
    (_FLEX, "key, value of fewer bits than query", "refused", ""),
    (
        _FLEX,
        "score_mod",
        "covered",
        "in the language of docs/variants.md, with gradients of the tensors that it indexes; other "
        "functions are refused by name; indices below 0 do not wrap",
    ),
    (
        _FLEX,
        "block_mask",
        "covered",
        "torch's BlockMask or a tilewise.BlockMask; mask_mod in the same language, evaluated in "
        "partial blocks only; slices `block_mask[:, :, i]` with a mask_mod of their own, for as "
        "many queries as their blocks have; `_adjust`, and lengths that are set; the empty mask",
    ),
    (_FLEX, "scale", "covered", ""),
    (_FLEX, "enable_gqa", "covered", ""),
    (_FLEX, "return_lse", "covered", "without torch's warning that it is deprecated"),
    (_FLEX, "kernel_options", "accepted", "hints for torch's kernels; unknown names are refused"),
    (_FLEX, "return_aux", "covered", "lse with gradient; max_scores detached, on the CPU too"),
    (
        _MASKS,
        "mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE, separate_full_blocks",
        "covered",
        "torch's BlockMask, made in O(blocks) memory",
    ),
    (_MASKS, "_compile, dq_kv_order", "accepted", ""),
    (_MASKS, "compute_dq_write_order", "refused", "the backward is deterministic without it"),
    (_MASKS, "while torch.compile traces", "refused", "make it outside, and pass it in"),
    (_JOIN, "mask_mods", "covered", ""),
    (_SAME, "all", "covered", "torch's own"),
)

_NESTED_INTRO = """
Pass nested tensors [B, H, j, D] of layout `torch.jagged` to `tilewise.attention` as they are.
There is no padding and no copy. Gradients work, eager and compiled. The output is nested as q
is.
"""

_NESTED_ROWS: tuple[_Line, ...] = (
    (("attention",), "q, k, v", "covered", "ragged in dimension 2; k and v of the same lengths"),
    (("attention",), "mask, score, sinks, dropout_p", "covered", "counted within a sequence"),
    (("attention",), "nested tensors of layout torch.strided, or with holes", "refused", ""),
)


def _table(title: str, intro: str, functions: tuple[str, ...], lines: tuple[_Line, ...]) -> Table:
    return Table(title, intro, functions, tuple([Row(*line) for line in lines]))


TABLES = (
    _table(
        "`torch.nn.functional.scaled_dot_product_attention`",
        _SDPA_INTRO,
        (*_SDPA, *_SWITCH, *_IMPL),
        _SDPA_ROWS,
    ),
    _table(
        "`torch.nn.attention.flex_attention`",
        _FLEX_INTRO,
        (*_FLEX, *_MASKS, *_JOIN, *_SAME),
        _FLEX_ROWS,
    ),
    _table("Nested tensors", _NESTED_INTRO, ("attention",), _NESTED_ROWS),
)
