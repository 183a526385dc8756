"""``merge``, attention over disjoint sets of keys made into attention over all of them."""

from __future__ import annotations

from torch import Tensor

from tilewise.errors import InvalidArgument, InvalidType
from tilewise.functional import AttentionResult
from tilewise.reference.merge import as_partial, check_partials, merge_partial
from tilewise.validation import check_sinks


def merge(*results: AttentionResult, sinks: Tensor | None = None) -> AttentionResult:
    """Attention over the union of disjoint sets of keys, from the attention over each of them.

    With ``(out_i, lse_i)`` of the same queries over the key set i::

        lse = log sum_i exp(lse_i),    out = sum_i exp(lse_i - lse) out_i

    So keys may lie in several places (a shared prefix, a cache in parts, other devices), or come
    one after the other. The order and the grouping change nothing but rounding. A result that saw
    no key of a row (lse -inf) adds nothing to it, whatever its output holds; a row that none saw
    has 0 and -inf. Differentiable in every out and lse, and in the sinks.

    Masks, scores and dropout of each call count its own keys from 0. A call with sinks has them in
    its lse; give them to ``merge`` instead, so that they count once.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, section 3.1.

    Args:
        results: at least one, of calls with ``return_lse=True``: out [B, Hq, M, Dv] with lse
            [B, Hq, M], or packed [Tq, Hq, Dv] with [Hq, Tq], of one dtype.
        sinks: floating [Hq]: one extra logit per query head, of a set without keys.

    Returns:
        The result over all keys; out in the dtype of the results, stats None: statistics of rows
        are not merged.

    Raises:
        InvalidArgument: no result, one without lse, or shapes, dtypes or devices that differ.
        InvalidType: what is no AttentionResult.
    """
    outs, lses = _checked(results)
    check_partials(outs, lses)
    if sinks is not None:
        check_sinks(sinks, outs[0].shape[1], outs[0].device.type)
        of_sinks, own_lse = as_partial(sinks, outs[0], lses[0])
        outs.append(of_sinks)
        lses.append(own_lse)
    out, lse = merge_partial(outs, lses)
    return AttentionResult(out, lse, None)


def _checked(results: tuple[AttentionResult, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and lses, of one dtype on one device."""
    if not results:
        raise InvalidArgument("results", "none", "at least one AttentionResult")
    outs, lses = [], []
    for i, result in enumerate(results):
        name, first = f"results[{i}]", results[0]
        if not isinstance(result, AttentionResult):
            fix = "Call attention(..., return_lse=True)."
            raise InvalidType(name, f"a {type(result).__name__}", "an AttentionResult", fix)
        if result.lse is None:
            fix = "Call attention(..., return_lse=True)."
            raise InvalidArgument(name, "a result without lse", "one with it", fix)
        for what in ("dtype", "device"):
            came, due = getattr(result.out, what), getattr(first.out, what)
            if came != due:
                raise InvalidArgument(name, f"{what} {came}", f"that of the first, {due}")
        outs.append(result.out)
        lses.append(result.lse)
    return outs, lses
