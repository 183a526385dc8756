"""Words of errors: what other libraries call things, and what to write here."""

import difflib
from collections.abc import Iterable, Mapping
from typing import NoReturn

from torch import Tensor

from tilewise.errors import InvalidType, Unsupported

_CAUSAL = (
    "mask=tilewise.masks.causal() sets the last query against the last key, "
    "masks.causal('top_left') the first against the first, as torch's is_causal=True does"
)
_ADDED = (
    "a boolean tensor (True = attend) is mask=tensor, an additive one "
    "score=tilewise.scores.bias(tensor)"
)
_WINDOW = (
    "mask=tilewise.masks.window(256) sees 256 keys to the left and the row's own, "
    "masks.window(256, 256) as many to the right"
)
_ALIBI = "score=tilewise.scores.alibi(slopes)"
_GROUPED = "leave it out: k and v may have fewer heads than q"
_SCALE, _DROPOUT = "scale=", "dropout_p=, which drops in evaluation too"
_PADDING = (
    "mask=tilewise.masks.lengths(lengths) where padding is on the right, else "
    "mask=real[:, None, None, :] with a boolean real [B, N] (True = attend)"
)
_PACKED = "tilewise.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k)"
# Keywords of torch, flash-attn, xformers, transformers and JAX.
_KEYWORDS = {
    **dict.fromkeys(("is_causal", "causal"), _CAUSAL),
    **dict.fromkeys(("attn_mask", "attention_mask", "attn_bias", "bias"), _ADDED),
    **dict.fromkeys(("window", "window_size", "sliding_window", "local_window_size"), _WINDOW),
    **dict.fromkeys(("key_padding_mask", "padding_mask"), _PADDING),
    **dict.fromkeys(("key_lengths", "seqlens", "query_seq_lengths"), _PADDING),
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"), _PACKED),
    **dict.fromkeys(("softmax_scale", "scaling", "sm_scale"), _SCALE),
    **dict.fromkeys(("dropout", "p"), _DROPOUT),
    **dict.fromkeys(("softcap", "logits_soft_cap"), "score=tilewise.scores.softcap(cap)"),
    "alibi_slopes": _ALIBI,
    "enable_gqa": _GROUPED,
    "score_mod": "score=, with a function of the same arguments",
    "mask_mod": "mask=, with a function of the same arguments",
    "block_mask": "mask=tilewise.BlockMask.from_flex(block_mask)",
    "s_aux": "sinks=",
    "return_attn_probs": "return_lse=True; probabilities are never written",
    "need_weights": "return_stats='top1' says which key has the most; weights are never written",
    "deterministic": "leave it out: the same call always gives the same bits",
}
_MASKS = {
    "causal": "mask=tilewise.masks.causal()",
    **dict.fromkeys(("window", "sliding_window", "local"), "mask=tilewise.masks.window(256)"),
    "prefix": "mask=tilewise.masks.prefix(length)",
    **dict.fromkeys(("padding", "lengths"), "mask=tilewise.masks.lengths(lengths)"),
    "document": "mask=tilewise.masks.document(ids)",
    **dict.fromkeys(("none", "full", "bidirectional"), "leave mask out"),
}
_SCORES = {
    "alibi": "score=tilewise.scores.alibi(slopes)",
    "softcap": "score=tilewise.scores.softcap(cap)",
    "bias": "score=tilewise.scores.bias(table)",
    "none": "leave score out",
}


def refuse_keywords(call: str, given: Mapping[str, object], known: Iterable[str]) -> NoReturn:
    """Refuse a keyword that a call does not have, saying what to write in its place."""
    name, value = next(iter(given.items()))
    if name in _KEYWORDS:
        fix = f"Write instead: {_KEYWORDS[name]}."
    else:
        close = difflib.get_close_matches(name, list(known), n=1)
        fix = f"Did you mean {close[0]}=?" if close else ""
    came = f"a {type(value).__name__}" if isinstance(value, Tensor) else repr(value)
    required = f"no such keyword: tilewise.{call} has {', '.join(known)}"
    raise InvalidType(name, came, required, fix)


def not_expressed(what: str, function: object, error: Exception, instead: str) -> Unsupported:
    """Return the error for another library's function that is not in the language, and why.

    ``instead`` says what else to do.
    """
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return Unsupported(
        f"{what} {getattr(function, '__module__', '?')}.{name} is not in the language of tilewise: "
        f"{error}",
        fix="say it in plain Python and torch over the positions, with tensors indexed by "
        f"integers (docs/variants.md); or {instead}",
    )


def named_mask(name: str) -> str:
    """Return what to write for a mask that is given by its name."""
    return _instead(name, _MASKS, "See tilewise.masks.")


def named_score(name: str) -> str:
    """Return what to write for a score that is given by its name."""
    return _instead(name, _SCORES, "See tilewise.scores.")


def _instead(name: str, known: Mapping[str, str], otherwise: str) -> str:
    close = difflib.get_close_matches(name.lower(), list(known), n=1)
    return f"Write instead: {known[close[0]]}." if close else otherwise


def uncalled(argument: str, function: object) -> str:
    """Return what to write if a function of ``masks`` or ``scores`` came uncalled; else ""."""
    if getattr(function, "__module__", "") != f"tilewise.variants.{argument}s":
        return ""
    name = getattr(function, "__name__", "")
    known = _MASKS if argument == "mask" else _SCORES
    return f"Call it: {known.get(name, f'{argument}=tilewise.{argument}s.{name}(...)')}."
