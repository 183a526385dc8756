"""The choice of an indexer, a tile of scores at a time: no queries x keys tensor is written.

The indexers of DeepSeek-V3.2 and of the models that took it over score all keys for each query, and
choose the best. Their last lines are the same::

    scores = relu(matmul(q, k^T) * scale)                    [B, M, Hi, N]
    index_scores = matmul(weights, scores)                   [B, M, N]
    index_scores.masked_fill(~mask, -inf).topk(K).indices    [B, M, K]

``tile_indexers`` lets them run on an object that stands for the scores. It notes what is asked of
it, and its ``topk`` is ``tilewise.top_keys``. What comes before, such as norms and rotations, is
the model's own code.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from tilewise.errors import Unsupported
from tilewise.indexer import top_keys
from tilewise.integrations.transformers.masks import Hidden, by_tiles
from tilewise.variants import masks
from tilewise.variants.values import Mask

_PARTS = ("wq_b", "wk", "weights_proj", "index_topk", "config")  # of an indexer of this form
_FIX = "untile_indexers(model) gives the model its own way back"


def tile_indexers(model: nn.Module) -> None:
    """Let the indexers of a model choose tile by tile, until ``untile_indexers``. Twice is as once.

    A call then holds no queries x keys tensor. The choice is that of the model but for keys whose
    scores differ by rounding: of equal scores it takes the lowest key.

    Args:
        model: of transformers, with ``attn_implementation="tilewise"`` and indexers as those of
            DeepSeek-V3.2.

    Raises:
        Unsupported: it has no such indexer; or, in a later call, it is compiled, does something
            else with its scores, or gets a mask that adds numbers.
    """
    for indexer in _indexers(model):
        indexer.forward = partial(_choose, indexer)
    _mark(model, True)


def untile_indexers(model: nn.Module) -> None:
    """Undo ``tile_indexers``.

    Raises:
        Unsupported: the model has no such indexer.
    """
    for indexer in _indexers(model):
        vars(indexer).pop("forward", None)
    _mark(model, False)


def _mark(model: nn.Module, switch: bool) -> None:
    """Note it for the masks, which are made with the model's config.

    An indexer's own may be a copy of it, as in dots3.note.
    """
    for module in model.modules():
        if hasattr(module, "config"):
            by_tiles(module.config, switch)


def _indexers(model: nn.Module) -> list[Any]:
    found = [each for each in model.modules() if all(hasattr(each, name) for name in _PARTS)]
    if not found:
        what = f"{type(model).__name__}, which has no indexer with {', '.join(_PARTS)}"
        fix = "hand over a model such as DeepseekV32ForCausalLM of transformers 5.23"
        raise Unsupported(what, fix=fix)
    return found


def _choose(indexer: Any, *operands: Any, **keywords: Any) -> Any:
    if torch.compiler.is_compiling():
        raise Unsupported("an indexer by tiles under torch.compile", fix=_FIX)
    with _Products():
        return type(indexer).forward(indexer, *operands, **keywords)


class _Products(TorchFunctionMode):
    """Gives an object in the place of a product of q [B, M, Hi, D] and k [B, 1, D, N]."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.matmul and all(isinstance(x, Tensor) and x.dim() == 4 for x in args):
            q, k = args
            if k.shape[1] == 1 < q.dim():
                return _Scores(q.transpose(1, 2), k.transpose(-1, -2))
        return func(*args, **(kwargs or {}))


class _Chosen(NamedTuple):
    """As ``torch.topk`` returns it, without the values."""

    indices: Tensor


class _Scores:
    """Scores of an indexer that nobody has written.

    Args:
        queries: [B, Hi, M, D].
        keys: [B, 1, N, D].
    """

    def __init__(self, queries: Tensor, keys: Tensor) -> None:
        self.queries, self.keys = queries, keys
        self.scale = 1.0
        self.weights: Tensor | None = None
        self.mask: Mask | None = None
        self.shown = keys.shape[2]  # keys that the mask speaks of, the first ones

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

    def __mul__(self, factor: float) -> _Scores:
        self.scale *= factor
        return self

    def squeeze(self, _: int) -> _Scores:
        return self

    def masked_fill(self, hidden: Hidden | Tensor, _: float) -> _Scores:
        if isinstance(hidden, Hidden):
            self.mask, self.shown = hidden.pairs.mask, hidden.pairs.keys
        else:
            self.mask = masks.dense(~hidden[:, None])
        return self

    def __add__(self, _: object) -> NoReturn:
        raise _not_known("adding a floating mask")

    def topk(self, k: int, dim: int = -1) -> _Chosen:
        assert dim == -1
        assert self.weights is not None
        keys = self.keys[:, :, : self.shown]
        found = top_keys(self.queries, keys, self.weights, k, mask=self.mask, scale=self.scale)
        assert isinstance(found, Tensor)
        return _Chosen(found[:, 0])

    def __getattr__(self, name: str) -> NoReturn:
        raise _not_known(f".{name}")


def _not_known(what: str) -> Unsupported:
    return Unsupported(f"an indexer by tiles that does this with its scores: {what}", fix=_FIX)
