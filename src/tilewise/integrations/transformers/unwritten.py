"""Objects in the place of queries x keys tensors, for code of models that would write them.

The code of an indexer runs on them as it is: they note what is asked of them, and compute a tile at
a time once the answer is small. What they do not know raises an error.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode, resolve_name

from tilewise.errors import Unsupported
from tilewise.indexer import largest, top_keys
from tilewise.integrations.transformers.masks import Hidden
from tilewise.variants import masks
from tilewise.variants.values import Mask

_LATER = (torch.Tensor.gt, torch.Tensor.ge)
UNDO = "untile_indexers(model) gives the model its own way back"


def choose_keys(indexer: Any, *given: Any, **named: Any) -> Any:
    """Stand in for the forward of an indexer like that of DeepSeek-V3.2."""
    return _by_tiles(_Scores, indexer, *given, **named)


def choose_blocks(indexer: Any, *given: Any, **named: Any) -> Any:
    """Stand in for the forward of an indexer like that of MiniMax-M3."""
    return _by_tiles(_BlockScores, indexer, *given, **named)


def refuse_compiled() -> None:
    """Raise an error in compiled code: it would hold what an object was asked in one call."""
    if torch.compiler.is_compiling():
        raise Unsupported("an indexer by tiles under torch.compile", fix=UNDO)


def _by_tiles(
    kind: type[_Scores] | type[_BlockScores], indexer: Any, *given: Any, **named: Any
) -> Any:
    refuse_compiled()
    with _Unwritten(kind):
        return type(indexer).forward(indexer, *given, **named)


class Later(NamedTuple):
    """Pairs that are hidden because the key comes later: places[b, n] >= limits[b, m]."""

    places: Tensor  # [B or 1, N]
    limits: Tensor  # [B or 1, M]

    def others(self, batch: int) -> Mask:
        """Return the mask of the pairs of B batch items that are not hidden."""
        places, limits = self.places.expand(batch, -1), self.limits.expand(batch, -1)
        return masks.function(lambda b, h, m, n: places[b, n] < limits[b, m])


class _Chosen(NamedTuple):
    """As ``torch.topk`` returns it; an object that makes no values has None."""

    values: Tensor | None
    indices: Tensor


class _Unwritten(TorchFunctionMode):
    """Gives an object of a kind in the place of a product of q [B, _, _, D] and k [B, 1, D, N].

    And in the place of the comparison of keys with queries that follows it, to hide later keys.
    """

    def __init__(self, kind: type[_Scores] | type[_BlockScores]) -> None:
        super().__init__()
        self.kind = kind
        self.scores: _Scores | _BlockScores | None = None
        self.compared = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.matmul and all(isinstance(x, Tensor) and x.dim() == 4 for x in args):
            q, k = args
            if k.shape[1] == 1:
                self.scores = self.kind(q, k.transpose(-1, -2))
                return self.scores
        if self.scores is not None and not self.compared and func in _LATER:
            keys, queries = args
            if isinstance(queries, Tensor) and keys.numel() == keys.shape[-1]:
                self.compared = True
                limits = queries.squeeze(-1).flatten(1)
                return Later(keys.flatten()[None], limits + (func is torch.Tensor.gt))
        return func(*args, **(kwargs or {}))


class _Scores:
    """Scores of an indexer like that of DeepSeek-V3.2.

        scores = relu(matmul(q, k^T) * scale)                    [B, M, Hi, N]
        index_scores = matmul(weights, scores)                   [B, M, N]
        index_scores.masked_fill(~mask, -inf).topk(K).indices    [B, M, K]

    ``queries`` are [B, M, Hi, D], ``keys`` [B, 1, N, D].
    """

    def __init__(self, queries: Tensor, keys: Tensor) -> None:
        self.queries, self.keys = queries.transpose(1, 2), keys
        self.scale = 1.0
        self.weights: Tensor | None = None
        self.mask: Mask | None = None
        self.shown = keys.shape[2]  # keys that the mask speaks of, the first ones

    @property
    def dtype(self) -> torch.dtype:
        return self.queries.dtype

    @property
    def device(self) -> torch.device:
        return self.queries.device

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return that of the weighted sum."""
        return self.queries.shape[0], self.queries.shape[2], self.keys.shape[2]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> _Scores:
        *weights, scores = args
        if isinstance(scores, cls):
            if func is torch.nn.functional.relu:  # top_keys has it
                return scores
            if func is torch.matmul:
                scores.weights = weights[0].squeeze(-2)
                return scores
        raise _not_known(resolve_name(func) or str(func))

    def __mul__(self, factor: float | Tensor) -> _Scores:
        if isinstance(factor, Tensor):  # weights [B, M, Hi, 1], before a sum over heads
            self.weights = factor.squeeze(-1)
        else:
            self.scale *= factor
        return self

    def sum(self, dim: int) -> _Scores:
        assert dim == 2
        assert self.weights is not None
        return self

    def squeeze(self, _: int) -> _Scores:
        return self

    def masked_fill(self, hidden: Hidden | Later | Tensor, _: float) -> _Scores:
        if isinstance(hidden, Later):
            self.mask = hidden.others(len(self.queries))
        elif isinstance(hidden, Hidden):
            self.mask, self.shown = hidden.pairs.mask, hidden.pairs.keys
        else:
            self.mask = masks.dense(~hidden[:, None])
        return self

    def __add__(self, _: object) -> NoReturn:
        raise _not_known("adding a floating mask")

    def topk(self, k: int, dim: int = -1) -> _Chosen:
        assert dim == -1
        assert self.weights is not None
        if k == 0:
            return _Chosen(None, self.queries.new_empty((*self.shape[:2], 0), dtype=torch.int32))
        keys = self.keys[:, :, : self.shown]
        found = top_keys(self.queries, keys, self.weights, k, mask=self.mask, scale=self.scale)
        assert isinstance(found, Tensor)
        return _Chosen(None, found[:, 0])

    def __getattr__(self, name: str) -> NoReturn:
        raise _not_known(f".{name}")


class _BlockScores:
    """Scores of an indexer like that of MiniMax-M3, which chooses blocks of keys for each head.

        scores = matmul(q, k^T).masked_fill(k_positions > position, -inf)    [B, Hi, M, N]
        block_scores = pad(scores, -inf).view(..., blocks, block).amax(-1)   [B, Hi, M, blocks]
        block_scores.scatter_(-1, local, inf).topk(K)                        [B, Hi, M, K]

    ``queries`` are [B, Hi, M, D], ``keys`` [B, 1, N, D].
    """

    def __init__(self, queries: Tensor, keys: Tensor) -> None:
        self.queries, self.keys = queries, keys
        self.later: Later | None = None
        self.block: int | None = None
        self.local: Tensor | None = None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> _BlockScores:
        scores = args[0]
        if func is torch.nn.functional.pad and isinstance(scores, cls):  # best_blocks does
            return scores
        raise _not_known(resolve_name(func) or str(func))

    def masked_fill(self, hidden: object, _: float) -> _BlockScores:
        if not isinstance(hidden, Later):
            raise _not_known("hiding other keys than later ones")
        self.later = hidden
        return self

    def view(self, *shape: int) -> _BlockScores:
        self.block = shape[-1]
        return self

    def amax(self, dim: int) -> _BlockScores:
        assert dim == -1
        return self

    def scatter_(self, dim: int, index: Tensor, value: float) -> _BlockScores:
        assert (dim, value) == (-1, torch.inf)
        self.local = index
        return self

    def topk(self, k: int, dim: int) -> _Chosen:
        assert dim == -1
        assert self.later is not None
        assert self.block is not None
        found = best_blocks(self.queries, self.keys, *self.later, self.block, k, self.local)
        return _Chosen(*found)

    def __getattr__(self, name: str) -> NoReturn:
        raise _not_known(f".{name}")


def _not_known(what: str) -> Unsupported:
    return Unsupported(f"an indexer by tiles that does this with its scores: {what}", fix=UNDO)


# ---- The blocks that an indexer scores highest. ``tilewise.top_keys`` sums over heads and chooses
# keys. Here each head chooses for itself, and a tile of scores shrinks to one number a block.

_ROWS = 32
_TILE_BYTES = 2 * 1024 * 1024  # stays in the cache of a core, as tiles of ``top_keys``
_WHOLE = 128  # keys of a tile are a multiple: libraries round what remains of one in another way


@torch.no_grad()
def best_blocks(
    queries: Tensor,
    keys: Tensor,
    places: Tensor,
    limits: Tensor,
    block: int,
    k: int,
    local: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the k best blocks of each query and head: the largest score first.

        score[h, m, i] = max of q[h, m] . k[n] over the keys n of block i with places[n] < limits[m]

    Of equal scores the lowest block comes first. A NaN score counts as the largest, as for
    ``torch.topk``.

    Args:
        queries: [B, Hi, M, D].
        keys: [B, 1, N, D], for all heads.
        places: [B or 1, N], positions of the keys.
        limits: [B or 1, M], what the place of a visible key is below.
        block: keys of a block; the last one may have fewer.
        k: how many, at most the number of blocks.
        local: [B, Hi, M, L], blocks whose score is inf; None for none.

    Returns:
        Scores [B, Hi, M, k], -inf for a block without a visible key, and int64 blocks.
    """
    batch, heads, rows, _ = queries.shape
    limits, places = limits.expand(batch, rows), places.expand(batch, -1)
    whole = math.lcm(block, _WHOLE)
    fit = _TILE_BYTES // (_ROWS * heads * queries.element_size())
    tile = max(1, fit // whole) * whole
    scores = queries.new_empty(batch, heads, rows, k)
    blocks = torch.empty(scores.shape, dtype=torch.int64, device=queries.device)
    for b in range(batch):
        for first in range(0, rows, _ROWS):
            span = slice(first, first + _ROWS)
            some = queries[b, :, span], keys[b, 0], places[b], limits[b, span]
            with torch.autocast(queries.device.type, enabled=False):  # 16 bits would make ties
                found = _of_rows(*some, block, tile)
            if local is not None:
                found.scatter_(-1, local[b, :, span], math.inf)
            for h in range(heads):
                scores[b, h, span], blocks[b, h, span] = largest(found[h], k)
    return scores, blocks


def _of_rows(
    queries: Tensor, keys: Tensor, places: Tensor, limits: Tensor, block: int, tile: int
) -> Tensor:
    """Return the scores of all blocks [Hi, m, blocks] for queries [Hi, m, D]."""
    heads, rows, _ = queries.shape
    total = len(keys)
    found = queries.new_full((heads, rows, -(-total // block)), -math.inf)
    whole = math.lcm(block, _WHOLE)
    for first in range(0, total, tile):
        count = min(tile, total - first)
        hidden = places[first : first + count] >= limits[:, None]
        if hidden.is_cpu and hidden.all():
            continue
        missing = -count % whole
        some = functional.pad(keys[first : first + count], (0, 0, 0, missing))
        hidden = functional.pad(hidden, (0, missing), value=True)
        products = (queries.flatten(0, 1) @ some.T).view(heads, rows, -1)
        best = products.masked_fill_(hidden, -math.inf).view(heads, rows, -1, block).amax(-1)
        part = found[..., first // block : (first + tile) // block]
        part.copy_(best[..., : part.shape[-1]])
    return found
