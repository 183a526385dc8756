"""``top_keys``, the keys that an indexer scores highest, without queries x keys.

Plain code writes a product per head, query and key, Hi M N numbers, and from them M N scores: with
64 heads and 4,096 queries and keys that is 4 GiB. Here the heads' products of a block of rows and a
tile of keys are made, summed to scores, and overwritten by the next. Scores meet the best ones so
far a strip at a time, and only the k best go on. Tiles that the mask hides are never computed.

A sort must put equal scores in the order of their keys: ReLU makes many of them 0. So a score is
compared as an integer of the same order. In 32 bits its key goes into the low half of 64 bits, and
no two candidates are equal. In 64 bits there is no room: a stable sort keeps the order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, NoReturn, overload

import torch
from torch import Tensor
from torch.nn import functional

from tilewise.checks import check_tensor, check_whole
from tilewise.engine.ops import define
from tilewise.engine.run import road
from tilewise.errors import InvalidArgument, Unsupported
from tilewise.functional import MaskLike
from tilewise.reference.blocks import Block, cut
from tilewise.reference.programs import Cover, cover, visible
from tilewise.sparse.tables import depends_on
from tilewise.validation import check_scale
from tilewise.variants.float8 import FLOAT8, STORED
from tilewise.variants.lower import Extent, lower_mask
from tilewise.variants.outside import refuse_outside
from tilewise.variants.program import Program, decode
from tilewise.variants.values import Mask, as_mask

__all__ = ["TopKeys", "top_keys"]

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_READ = (*_DTYPES, *STORED)  # of queries and keys
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
# Scores that meet the best ones so far at once, unless k is more: a merge costs a pass over both.
_STRIP_KEYS = 16384
_LOW_HALF = 0xFFFFFFFF
_WHOLE = 128  # keys of a tile are a multiple: see ``reference.tiles.product``


class TopKeys(NamedTuple):
    """Result of ``top_keys`` with ``return_scores``.

    Args:
        keys: int32 [B, 1, M, k], the largest score first; -1 where there is no key.
        scores: [B, 1, M, k], their scores, float32 (float64 for float64); -inf where there is no
            key.
    """

    keys: Tensor
    scores: Tensor


class _Sizes(NamedTuple):
    """The rows of a block, and the bytes and keys that a tile of the heads' products may have."""

    rows: int
    tile_bytes: int
    tile_keys: int


# On a CPU a tile stays in its cache (notes/performance-log.md). Elsewhere it hides launches.
_CPU = _Sizes(32, 2 * 1024 * 1024, 2048)
_ELSEWHERE = _Sizes(256, 256 * 1024 * 1024, 8192)


@overload
def top_keys(
    queries: Tensor,
    keys: Tensor,
    weights: Tensor,
    k: int,
    *,
    mask: MaskLike = None,
    scale: float | None = None,
    key_scales: Tensor | None = None,
    return_scores: Literal[False] = False,
) -> Tensor: ...


@overload
def top_keys(
    queries: Tensor,
    keys: Tensor,
    weights: Tensor,
    k: int,
    *,
    mask: MaskLike = None,
    scale: float | None = None,
    key_scales: Tensor | None = None,
    return_scores: Literal[True],
) -> TopKeys: ...


def top_keys(
    queries: Tensor,
    keys: Tensor,
    weights: Tensor,
    k: int,
    *,
    mask: MaskLike = None,
    scale: float | None = None,
    key_scales: Tensor | None = None,
    return_scores: bool = False,
) -> Tensor | TopKeys:
    """Return the k keys that an indexer scores highest for each query, of those that it may see.

    The score of key n for query m of batch item b is a weighted sum over the indexer's heads::

        score[m, n] = sum_h weights[b, m, h] * relu(scale * queries[b, h, m] . keys[b, 0, n])

    With ``key_scales`` it is this sum times ``key_scales[b, 0, n]``.

    The largest score comes first, and of equal scores the lowest key. ``-0.0`` equals ``0.0``. A
    NaN score counts as the largest, as for ``torch.topk``. A key that the mask hides is never
    chosen, whatever it holds.

    Scores are float32, or float64 if an operand is float64; narrower operands are widened, under
    autocast too: products in 16 bits would make ties of keys that are none. The number of threads
    changes no bit. The result has no gradient.

    Queries and keys may have 8 bits, as in DeepSeek's indexer. Pass the scales of keys in
    ``key_scales``, and multiply the weights by those of queries: a factor above 0 passes through
    ReLU. Keys are widened a tile at a time.

    Memory beyond operands and result does not grow with M, nor with N beyond 16,384 keys. On a CPU
    it is 2 MiB of products (more from 129 heads on) and the scores of 32 rows and 16,384 keys, or k
    if that is more: 15 MiB in all at k = 2,048, 33 MiB in float64. Elsewhere products take 256 MiB.
    Not yet run on a GPU.

    Source: the lightning indexer of DeepSeek-V3.2-Exp, 2025, equation 1.

    Args:
        queries: floating, int8 or float8_e4m3fn [B, Hi, M, Di], any strides: memory [B, M, Hi, Di]
            is passed as ``queries.transpose(1, 2)``.
        keys: [B, 1, N, Di] of one of these dtypes: one head, which all heads of the queries share.
        weights: floating [B, M, Hi], as a linear layer over the hidden states gives them.
        k: how many keys, 1 or more. It may be more than N.
        mask: what ``attention`` takes, the same for all heads: ``tilewise.masks.causal()``, a
            function ``(b, h, m, n) -> bool``, or a boolean tensor that broadcasts to [B, 1, M, N].
            None shows every key.
        scale: 1/sqrt(Di) if None; 1.0 where the weights have it already.
        key_scales: floating [B, 1, N], a factor for each key; None for 1.
        return_scores: return a ``TopKeys``, which has the scores too.

    Returns:
        int32 [B, 1, M, k], with -1 at the end of a row that sees fewer than k keys; or a TopKeys.

    Raises:
        InvalidArgument: shapes, dtypes, devices or values that do not fit; a mask that depends on
            the head.
        InvalidType: what is no tensor, no mask or no integer.
        Unsupported: under ``torch.func.vmap``.
    """
    dtype = _check(queries, keys, weights, key_scales)
    count = check_whole("k", k, 1)
    factor = check_scale(scale, queries.shape[-1], dtype)
    read = Mask(()) if mask is None else as_mask(mask)
    if depends_on(read)[1]:
        required = "one that says the same for all heads: they share one list of keys"
        raise InvalidArgument("mask", "a mask that depends on the head h", required)
    operands = (queries.detach(), keys.detach(), weights.detach())
    scales = None if key_scales is None else key_scales.detach()
    captured = [each.detach() for each in read.captured]
    eager = road(*operands) == "eager"
    if scales is not None:
        eager = eager and road(*operands[:2], scales) == "eager"
    # An op written in Python loads the compiler at its first eager call: seconds, and 150 MB.
    call = _search if eager else torch.ops.tilewise.top_keys
    found, scores = call(*operands, scales, captured, read.text, count, factor, return_scores)
    return TopKeys(found, scores) if return_scores else found


def _check(
    queries: Tensor, keys: Tensor, weights: Tensor, key_scales: Tensor | None
) -> torch.dtype:
    """Check the operands, and return the dtype of the scores."""
    kind = "a floating, int8 or float8_e4m3fn tensor"
    required = f"{kind} [B, Hi, M, Di], Hi and Di of 1 or more"
    check_tensor("queries", queries, required, _READ, dims=4)
    batch, heads, rows, width = queries.shape
    if heads == 0 or width == 0:
        raise InvalidArgument("queries", f"shape {tuple(queries.shape)}", required)
    device = queries.device.type
    required = f"{kind} [B, 1, N, Di] = [{batch}, 1, N, {width}] on {queries.device}"
    fix = "Keys [B, N, Di] are passed as keys[:, None]."
    every = (batch, 1, None, width)
    check_tensor("keys", keys, required, _READ, shape=every, device=device, fix=fix)
    required = f"a floating tensor [B, M, Hi] = {[batch, rows, heads]} on {queries.device}"
    fix = "Weights [B, Hi, M] are passed as weights.transpose(1, 2)."
    shape = (batch, rows, heads)
    check_tensor("weights", weights, required, _DTYPES, shape=shape, device=device, fix=fix)
    if key_scales is not None:
        total = keys.shape[2]
        required = f"a floating tensor [B, 1, N] = [{batch}, 1, {total}] on {queries.device}"
        fix = "Scales [B, N] are passed as key_scales[:, None], those [B, N, 1] as key_scales.mT."
        one = (batch, 1, total)
        check_tensor("key_scales", key_scales, required, _DTYPES, shape=one, device=device, fix=fix)
    return _scores_dtype(queries, keys, weights, key_scales)


def _scores_dtype(*operands: Tensor | None) -> torch.dtype:
    wide = any(each is not None and each.dtype is torch.float64 for each in operands)
    return torch.float64 if wide else torch.float32


def _search(
    queries: Tensor,
    keys: Tensor,
    weights: Tensor,
    key_scales: Tensor | None,
    mask_tensors: Sequence[Tensor],
    mask: str,
    k: int,
    scale: float,
    return_scores: bool,
) -> tuple[Tensor, Tensor]:
    """Return the keys, and the scores or an empty tensor."""
    dtype, device = _scores_dtype(queries, keys, weights, key_scales), queries.device
    program = decode(mask)
    batch, _, rows, _ = queries.shape
    extent = Extent(batch, 1, rows, keys.shape[2], check_values=device.type == "cpu")
    refuse_outside(program, (), mask_tensors, (), extent)
    captured = lower_mask(program, tuple(mask_tensors), extent, device, dtype)
    found = torch.full((batch, 1, rows, k), -1, dtype=torch.int32, device=device)
    scores = torch.full(found.shape if return_scores else (0,), -math.inf, dtype=dtype).to(device)
    with torch.autocast(device.type, enabled=False):
        for b in range(batch):
            tensors = cut(program, captured, b, rows, keys.shape[2])
            scales = None if key_scales is None else key_scales[b, 0]
            operands = queries[b], keys[b, 0], weights[b], scales
            item = _Item(b, *operands, scale, dtype, program, tensors)
            item.search(k, found[b, 0], scores[b, 0] if return_scores else None)
    return found, scores


def _op_fake(
    queries: Tensor, keys: Tensor, weights: Tensor, key_scales: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    _, _, k, _, return_scores = rest
    shape = (queries.shape[0], 1, queries.shape[2], k)
    found = queries.new_empty(shape, dtype=torch.int32)
    dtype = _scores_dtype(queries, keys, weights, key_scales)
    return found, queries.new_empty(shape if return_scores else (0,), dtype=dtype)


def _refuse_vmap(*_: Any) -> NoReturn:
    what = "tilewise.top_keys has no batching rule for torch.func.vmap"
    raise Unsupported(what, fix="put the vmapped dimension into the batch: x.flatten(0, 1)")


define("top_keys", _search, _op_fake, vmap=_refuse_vmap)


class _Item(NamedTuple):
    """One batch item: queries [Hi, M, Di], keys [N, Di], weights [M, Hi], key scales [N], mask."""

    batch: int
    queries: Tensor
    keys: Tensor
    weights: Tensor
    key_scales: Tensor | None
    scale: float
    dtype: torch.dtype
    mask: Program
    mask_tensors: tuple[Tensor, ...]

    def search(self, k: int, keys: Tensor, scores: Tensor | None) -> None:
        """Write the keys [M, k], and their scores if wanted, where there are some."""
        heads, total, _ = self.queries.shape
        sizes = _CPU if self.keys.device.type == "cpu" else _ELSEWHERE
        each = min(sizes.rows, max(1, total))
        fit = sizes.tile_bytes // (each * heads * self.dtype.itemsize)
        tile = max(_WHOLE, min(fit, sizes.tile_keys) // _WHOLE * _WHOLE)
        for first in range(0, total, each):
            rows = range(first, min(first + each, total))
            best = self._best(rows, k, tile)
            if best is None:
                continue
            ranks, places = _unpack(best, self.dtype)
            seen = ranks != torch.iinfo(ranks.dtype).min
            at = slice(rows.start, rows.stop), slice(ranks.shape[1])
            keys[at] = torch.where(seen, places, -1)
            if scores is not None:
                scores[at] = torch.where(seen, _swap(ranks).view(self.dtype), -math.inf)

    def _best(self, rows: range, k: int, tile: int) -> Tensor | None:
        """Return the k best candidates of a block of rows, in order; None if no key is seen."""
        span = slice(rows.start, rows.stop)
        queries = _widened(self.queries[:, span].transpose(0, 1), self.dtype)
        queries = queries * math.copysign(1.0, self.scale)  # its size comes last: see ``_scores``
        weights = self.weights[span, None].to(self.dtype)
        found: list[Tensor] = []
        width = 0
        for first in range(0, len(self.keys), tile):
            keys = range(first, min(first + tile, len(self.keys)))
            block = self._block(rows, keys)
            covered = cover(self.mask, self.mask_tensors, block)
            if covered is Cover.EMPTY:
                continue
            ranks = _ranks(self._scores(queries, weights, keys))
            if covered is Cover.PARTIAL:
                seen = visible(self.mask, self.mask_tensors, block, ranks.device)[0, 0]
                ranks.masked_fill_(~seen, torch.iinfo(ranks.dtype).min)
            found.append(_pack(ranks, keys))
            width += len(keys)
            if width >= max(_STRIP_KEYS, k):
                found, width = [_largest(found, k, in_order=False)], 0
        return _largest(found, k, in_order=True) if found else None

    def _block(self, rows: range, keys: range) -> Block:
        batches = range(self.batch, self.batch + 1)
        total = self.queries.shape[1], len(self.keys)
        return Block(rows, keys, *total, batches, range(1), self.dtype)

    def _scores(self, queries: Tensor, weights: Tensor, keys: range) -> Tensor:
        """Return the scores [rows, keys] of a tile.

        Args:
            queries: [rows, Hi, Di], times the sign of the scale.
            weights: [rows, 1, Hi].
            keys: of the tile.
        """
        some = _widened(self.keys[keys.start : keys.stop], self.dtype)
        # Whole tiles: libraries round what remains of one in another way than the rest.
        if lacking := -len(keys) % _WHOLE:
            some = functional.pad(some, (0, 0, 0, lacking))
        products = (queries.flatten(0, 1) @ some.T).relu_()
        sums: Tensor = (weights @ products.view(*queries.shape[:2], -1))[:, 0, : len(keys)]
        sums = sums * abs(self.scale)  # once, so that its rounding parts no equal scores
        if self.key_scales is not None:
            sums *= self.key_scales[keys.start : keys.stop].to(self.dtype)
        return sums


def _widened(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers in ``dtype``. On a CPU, torch would take five times as long for float8."""
    if numbers.dtype is not FLOAT8 or not numbers.is_cpu:
        return numbers.to(dtype)
    # As the bits of a float16, whose exponent has one bit more, they mean a 256th of the number.
    bits = numbers.view(torch.int8).short().bitwise_left_shift_(7).bitwise_and_(~0x4000)
    wide = bits.view(torch.float16).float().mul_(256)
    # A NaN has become 480. This product is infinite for it, and finite up to 448: inf * 0 is NaN.
    wide += (wide * (torch.finfo(torch.float32).max / 464)).mul_(0)
    return wide.to(dtype)


def largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest scores of each row, in order, and their places; the first of equal ones.

    Args:
        scores: float32 or float64 [rows, n].
        k: at most n.

    Returns:
        scores [rows, k], and their places, int32 [rows, k].
    """
    found = _largest([_pack(_ranks(scores), range(scores.shape[1]))], k, in_order=True)
    ranks, places = _unpack(found, scores.dtype)
    return _swap(ranks).view(scores.dtype), places


def _ranks(scores: Tensor) -> Tensor:
    """Return integers of the same order and width; the largest of all for every NaN."""
    scores = torch.where(scores.isnan(), math.nan, scores + 0.0)  # -0.0 + 0.0 is 0.0
    return _swap(scores.view(_BITS[scores.dtype]))


def _swap(bits: Tensor) -> Tensor:
    """Return the bits of floats as integers of the same order, or these as the bits of floats."""
    limits = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (limits.bits - 1)) & limits.max)  # negatives: the other way round


def _pack(ranks: Tensor, keys: range) -> Tensor:
    """Return candidates, int64 [1 or 2, rows, keys], of ranks [rows, keys].

    Ranks of 32 bits are the high half of a number whose low half is the key, inverted: no two of a
    row are equal. Ranks of 64 bits and keys are numbers of their own.
    """
    places = torch.arange(keys.start, keys.stop, device=ranks.device)
    if ranks.dtype is torch.int64:
        return torch.stack((ranks, places.expand(ranks.shape)))
    return (ranks.long() << 32).bitwise_or_(_LOW_HALF - places)[None]


def _unpack(found: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the ranks and the keys (int32) of candidates, both [rows, n]."""
    if dtype is torch.float64:
        return found[0], found[1].int()
    return (found[0] >> 32).int(), (~found[0]).int()


def _largest(found: list[Tensor], k: int, in_order: bool) -> Tensor:
    """Return the k best candidates, or all if they are fewer: the best first, if ``in_order``.

    Candidates of equal rank come in the order of their keys.
    """
    every = torch.cat(found, 2)
    count = min(k, every.shape[2])
    if len(every) == 1:
        return every.topk(count, sorted=in_order).values
    ranks, order = every[0].sort(descending=True, stable=True)
    return torch.stack((ranks[:, :count], every[1].gather(1, order[:, :count])))
