"""Attention whose keys come from the other positions: in turn (ring), or all at once (gather).

**Ring.** In step s a position computes with the keys of the position s places before it. It
receives only those chunks that one of its rows sees, while it computes with those of the step
before. So no more than the keys of four positions are in its memory: its own, those at work, those
that come, and a copy of its own that goes. The results of a chunk of rows are merged in the order
of the steps. In the backward pass, the gradients of keys and values go back to their owner after
each step. The owner adds them up in the order of the steps too.

**Gather.** Every position receives all keys and computes once: all keys are in its memory. The
gradients go back to the owners, who add them up in the order of positions.

Both orders follow from the layouts alone. So the bits are the same from run to run, and do not
depend on who holds which position or on whose message comes first.

A **reader** is a position whose rows compute with keys, and an **owner** the position that holds
them. At distance d the owner is d places before the reader. Keys travel from owner to reader,
gradients of keys from reader to owner. At distance 0 both are one position, and nothing travels.
``ring_events`` says what happens in which order. This module runs these events at its position;
``costs`` gives them their bytes and seconds at every position, and ``replay`` their times.

Source: Liu, Zaharia, Abbeel, Ring Attention with Blockwise Transformers for Near-Infinite Context,
2023; the balanced order of chunks: Brandon et al., Striped Attention, 2023, as chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from tilewise.distributed.layout import Layout
from tilewise.distributed.parts import Part, Rows, Running, Whole
from tilewise.distributed.peers import Peers, Pending, refuse_second_derivatives
from tilewise.engine.modes import readable
from tilewise.problem import Needs, output_like

What: TypeAlias = Literal["keys and values", "gradients of keys and values"]
KEYS: What = "keys and values"
GRADIENTS: What = "gradients of keys and values"


class Event(NamedTuple):
    """An event of a pass, the same at every position."""

    # An exchange starts, or it is waited for; or all compute.
    kind: Literal["start", "wait", "compute"]
    what: What  # is exchanged; KEYS where all compute
    distances: tuple[int, ...]  # between the readers and the owners of these keys


def owner_of(reader: Any, distance: Any, count: int) -> Any:
    """Return the position whose keys a reader gets; of whole numbers, or of arrays of them."""
    return (reader - distance) % count


def reader_of(owner: Any, distance: Any, count: int) -> Any:
    """Return the position that gets the keys of an owner; likewise."""
    return (owner + distance) % count


def ring_events(count: int, gathers: bool, gradients: bool) -> Iterator[Event]:
    """Yield the events of a pass over so many positions.

    ``gathers``: all keys come at once. Else those of one distance come in each turn, while all
    compute with those of the turn before. ``gradients``: those of keys go to their owners. Those of
    a turn travel while all compute in the next one.
    """
    every = tuple(range(count))
    turns = [every] if gathers else [every[at : at + 1] for at in every]
    yield Event("start", KEYS, turns[0])
    for number, turn in enumerate(turns):
        yield Event("wait", KEYS, turn)
        if number + 1 < len(turns):
            yield Event("start", KEYS, turns[number + 1])
        yield Event("compute", KEYS, turn)
        if gradients:
            if number > 1:
                yield Event("wait", GRADIENTS, turns[number - 1])
            yield Event("start", GRADIENTS, turn)
            if number in (0, len(turns) - 1):  # the first ones are at home already
                yield Event("wait", GRADIENTS, turn)


Pieces: TypeAlias = dict[
    int, tuple[Tensor, Tensor]
]  # keys and values, or their gradients, by chunk


class Split(NamedTuple):
    """A call over a whole sequence, and who holds what of it.

    ``rows`` is the layout of queries, and ``columns`` that of keys. ``gathers``: all keys come at
    once.
    """

    whole: Whole
    rows: Layout
    columns: Layout
    peers: Peers
    gathers: bool


def attend(
    split: Split, q: Tensor, k: Tensor, v: Tensor, score_tensors: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return out and lse of this position's rows, differentiable.

    q is [B, H, rows of this position, D], k and v are [B, Hk, keys of this position, D or Dv]. The
    score's tensors are those of the whole, in kernel form; their gradients here are those of this
    position's rows.
    """
    found: tuple[Tensor, Tensor] = _Attend.apply(split, q, k, v, *score_tensors)  # type: ignore[no-untyped-call]
    return found


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, split: Split, q: Tensor, k: Tensor, v: Tensor, *score_tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        # What is captured is saved as q is, so that torch sees who writes into it meanwhile.
        masks = split.whole.mask_tensors
        ctx.split = split._replace(whole=split.whole._replace(mask_tensors=(), score_tensors=()))
        ctx.masks = len(masks)
        ctx.set_materialize_grads(False)
        work = _Work(split, q, k, v)
        out, lse = work.forward(for_backward=any(ctx.needs_input_grad))
        ctx.tilewise_backend = work.backend  # for inspect.backend_of
        ctx.save_for_backward(q, k, v, out, lse, *masks, *score_tensors)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        refuse_second_derivatives()
        q, k, v, out, lse, *captured = ctx.saved_tensors
        masks, scores = tuple(captured[: ctx.masks]), tuple(captured[ctx.masks :])
        whole = ctx.split.whole._replace(mask_tensors=masks, score_tensors=scores)
        of_q, of_k, of_v, *of_score = ctx.needs_input_grad[1:]
        needs = Needs(of_q, of_k, of_v, tuple(of_score))
        with ctx.split.peers.together():
            work = _Work(ctx.split._replace(whole=whole), q, k, v)
            return None, *work.backward(needs, out, lse, *grads)


class _Moving(NamedTuple):
    """An exchange on its way: what comes, by position, and what must live meanwhile."""

    pending: Pending
    coming: dict[int, Tensor]
    chunks: dict[int, list[int]]  # that come
    sent: dict[int, Tensor]


class _Pass:
    """A pass of this position, which has k and v, through the events of a ring.

    Chunks travel in buffers: the keys and values of one, then those of the next. ``sums`` is the
    dtype of the gradients of keys and values; None where nobody wants them.
    """

    def __init__(self, split: Split, k: Tensor, v: Tensor, sums: torch.dtype | None) -> None:
        self.split, self.peers, self.here = split, split.peers, split.peers.position
        self.like, self._sums = (k, v), sums
        spans = split.columns.spans(self.here)
        self._own = self._room(list(spans), k.dtype)
        for chunk, pair in self._pieces(self._own, list(spans)).items():
            for into, x in zip(pair, self.like, strict=True):
                into.copy_(x[:, :, spans[chunk]])
        self._known: dict[tuple[int, int], list[int]] = {}
        self._moving: dict[What, _Moving] = {}
        self._keys: Pieces = {}
        self._gradients: dict[int, Tensor] = {}  # of the keys at work, by owner
        self.totals: list[Tensor] = []  # gradients of k and v; none where nobody wants them
        if sums is not None:
            self.totals = [torch.zeros(x.shape, dtype=sums, device=x.device) for x in self.like]

    def turns(self) -> Iterator[tuple[Pieces, Pieces]]:
        """Run the events; yield the keys of each turn, and zeros that take their gradients."""
        gathers, count = self.split.gathers, self.peers.count
        for kind, what, distances in ring_events(count, gathers, self._sums is not None):
            if kind == "start":
                self._start(what, distances)
            elif kind == "wait":
                self._wait(what)
            else:
                found: Pieces = {}
                if self._sums is not None:
                    for owner, chunks in self._chunks(owner_of, distances).items():
                        self._gradients[owner] = self._room(chunks, self._sums).zero_()
                        found |= self._pieces(self._gradients[owner], chunks)
                yield self._keys, found

    def _chunks(self, of: Callable[..., int], distances: Sequence[int]) -> dict[int, list[int]]:
        """Return the chunks that travel over distances, by their owners or by their readers."""
        here, found = self.here, {}
        for distance in distances:
            other = of(here, distance, self.peers.count)
            pair = (here, other) if of is owner_of else (other, here)
            found[other] = self._seen(*pair)
        return found

    def _seen(self, reader: int, owner: int) -> list[int]:
        """Return the key chunks of an owner that some row of a reader sees; of gather, all."""
        if (reader, owner) not in self._known:
            split, columns = self.split, self.split.columns
            rows = split.rows.ranges(reader)
            self._known[reader, owner] = [
                chunk
                for chunk in columns.chunks(owner)
                if split.gathers
                or any(split.whole.any_pair(each, columns.rows_of(chunk)) for each in rows)
            ]
        return self._known[reader, owner]

    def _numbers(self, chunks: Sequence[int]) -> int:
        """Return how many numbers the keys and values of chunks are."""
        rows = sum(len(self.split.columns.rows_of(chunk)) for chunk in chunks)
        return rows * self.split.whole.key_numbers

    def _room(self, chunks: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a buffer for keys and values of chunks."""
        return self.like[0].new_empty(self._numbers(chunks), dtype=dtype)

    def _pieces(self, buffer: Tensor, chunks: Sequence[int]) -> Pieces:
        """Return the keys and values of chunks, views of their buffer."""
        found: Pieces = {}
        start = 0
        for chunk in chunks:
            pair = []
            for like in self.like:
                shape = (*like.shape[:2], len(self.split.columns.rows_of(chunk)), like.shape[3])
                pair.append(buffer[start : start + math.prod(shape)].view(shape))
                start += math.prod(shape)
            found[chunk] = pair[0], pair[1]
        return found

    def _sent(self, chunks: Sequence[int]) -> Tensor:
        """Return a buffer with some of this position's own chunks: a view, if they are the first.

        A causal mask asks for all chunks, or for the first ones.
        """
        every = list(self.split.columns.chunks(self.here))
        if chunks == every[: len(chunks)]:
            return self._own[: self._numbers(chunks)]
        buffer = self._room(chunks, self._own.dtype)
        own = self._pieces(self._own, every)
        for chunk, pair in self._pieces(buffer, chunks).items():
            for into, x in zip(pair, own[chunk], strict=True):
                into.copy_(x)
        return buffer

    def _start(self, what: What, distances: Sequence[int]) -> None:
        """Start an exchange. What this position sends to itself comes without a message."""
        if what == KEYS:
            chunks, dtype = self._chunks(owner_of, distances), self._own.dtype
            sent = {to: self._sent(each) for to, each in self._chunks(reader_of, distances).items()}
        else:
            assert self._sums is not None
            chunks, dtype = self._chunks(reader_of, distances), self._sums
            sent, self._gradients = self._gradients, {}
        coming = {p: self._room(each, dtype) for p, each in chunks.items() if p != self.here}
        pending = self.peers.start(what, sent, coming)
        self._moving[what] = _Moving(pending, coming, chunks, sent)

    def _wait(self, what: What) -> None:
        """End an exchange. Gradients are added up in the order of positions."""
        pending, coming, chunks, _ = self._moving.pop(what)
        pending.wait()
        spans = self.split.columns.spans(self.here)
        pieces = {who: self._pieces(coming[who], chunks[who]) for who in sorted(coming)}
        if what == KEYS:
            self._keys = {chunk: pair for own in pieces.values() for chunk, pair in own.items()}
            return
        for own in pieces.values():
            for chunk, pair in own.items():
                for into, x in zip(self.totals, pair, strict=True):
                    into[:, :, spans[chunk]].add_(x)


class _Work:
    """What one position does for a call, in one of its passes."""

    def __init__(self, split: Split, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.split, self.whole, self.q, self.k, self.v = split, split.whole, q, k, v
        self.backend = ""  # that did the parts
        self.spans = split.rows.spans(split.peers.position)

    def _parts(self, pieces: Pieces) -> Iterator[tuple[int, Part, tuple[int, ...]]]:
        """Yield (row chunk, part, its key chunks): what there is to compute with some keys."""
        columns: list[tuple[range, tuple[int, ...]]]
        columns = [(self.split.columns.rows_of(chunk), (chunk,)) for chunk in sorted(pieces)]
        if self.split.gathers and pieces:
            columns = [(range(self.split.columns.length), tuple(sorted(pieces)))]
        for mine in self.spans:
            rows = self.split.rows.rows_of(mine)
            for of, chunks in columns:
                for piece in self.whole.pieces(rows, of):
                    yield mine, Part(self.whole, piece), chunks

    def forward(self, for_backward: bool) -> tuple[Tensor, Tensor]:
        """Return out and lse of this position's rows."""
        width = self.v.shape[3]
        running = {
            mine: Running(self.q[:, :, at], width, self.whole.floats)
            for mine, at in self.spans.items()
        }
        for pieces, _ in _Pass(self.split, self.k, self.v, None).turns():
            for mine, part, chunks in self._parts(pieces):
                k, v = _joined(pieces, chunks)
                self.backend = part.plan.backend
                found = part.forward(self.q[:, :, self.spans[mine]], k, v, for_backward)
                running[mine].add(part.rows, *found)
        out = output_like(self.q, width)
        lse = self.q.new_empty(self.q.shape[:3], dtype=self.whole.floats)
        for mine, at in self.spans.items():
            out[:, :, at], lse[:, :, at] = running[mine].close()
        return out, lse

    def backward(
        self,
        needs: Needs,
        out: Tensor,
        lse: Tensor,
        grad_out: Tensor | None,
        grad_lse: Tensor | None,
    ) -> list[Tensor | None]:
        """Return the gradients of q, k, v and the tensors of the score."""
        floats = self.whole.floats
        grad_out = torch.zeros_like(out) if grad_out is None else readable(grad_out)
        grad_lse = None if grad_lse is None else readable(grad_lse)
        own = Rows(out, lse, grad_out, grad_lse)
        rows = {mine: own.cut(at) for mine, at in self.spans.items()}
        of_q = torch.zeros(self.q.shape, dtype=floats, device=self.q.device)
        of_score = [
            torch.zeros_like(x, dtype=floats) if need else None
            for x, need in zip(self.whole.score_tensors, needs.score_tensors, strict=True)
        ]
        of_keys = _Pass(self.split, self.k, self.v, floats if needs.k or needs.v else None)
        for pieces, found in of_keys.turns():
            for mine, part, chunks in self._parts(pieces):
                at = self.spans[mine]
                k, v = _joined(pieces, chunks)
                grads = part.backward(self.q[:, :, at], k, v, rows[mine], needs)
                if grads.q is not None:
                    of_q[:, :, at][:, :, part.rows] += grads.q
                part.add_score_gradients(of_score, grads)
                _add_rows(found, chunks, part.columns, (grads.k, grads.v))
        sums = of_q, *(of_keys.totals or (None, None)), *of_score
        likes = self.q, self.k, self.v, *self.whole.score_tensors
        wanted = *needs[:3], *needs.score_tensors
        return [
            grad.to(like.dtype) if need and grad is not None else None
            for grad, like, need in zip(sums, likes, wanted, strict=True)
        ]


def _joined(pieces: Pieces, chunks: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return keys and values of neighbouring chunks in one piece."""
    if len(chunks) == 1:
        return pieces[chunks[0]]
    k, v = (torch.cat([pieces[chunk][at] for chunk in chunks], dim=2) for at in (0, 1))
    return k, v


def _add_rows(
    sums: Pieces, chunks: Sequence[int], at: slice, grads: tuple[Tensor | None, Tensor | None]
) -> None:
    """Add the gradients of some keys of neighbouring chunks to those of each chunk."""
    for which, grad in enumerate(grads):
        if grad is None:
            continue
        start = 0
        for chunk in chunks:
            into = sums[chunk][which]
            stop = start + into.shape[2]
            first, last = max(start, at.start), min(stop, at.stop)
            if first < last:
                part = grad[:, :, first - at.start : last - at.start]
                into[:, :, first - start : last - start].add_(part)
            start = stop
