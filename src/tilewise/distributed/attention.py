"""Attention over a sequence that several processes hold in parts.

``context_parallel_attention`` is the call. ``context_parallel`` is a block whose attention is that
call, for models that know nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from tilewise import routes
from tilewise.checks import check_both
from tilewise.distributed.heads import Exchange, share_heads
from tilewise.distributed.layout import (
    Layout,
    Mesh,
    Schedule,
    Standing,
    groups_of,
    is_dtensor,
    standing,
    unwrap,
)
from tilewise.distributed.parts import Part, Starts, Whole
from tilewise.distributed.peers import agreed, in_words, refusals_told
from tilewise.distributed.ring import Split, attend
from tilewise.distributed.sharding import every_row, shard
from tilewise.engine.autograd import differentiable
from tilewise.engine.call import (
    Keywords,
    build_problem,
    read_keywords,
    read_seed,
    reads_on_device,
)
from tilewise.engine.dispatch import plan_of
from tilewise.engine.key_lists import KeyBlocks, KeyLists, checked_key_lists, read_key_lists
from tilewise.engine.listed import attend_lists
from tilewise.engine.run import autocast
from tilewise.errors import InvalidArgument, TilewiseError, Unsupported
from tilewise.functional import AttentionResult, MaskLike, ScoreLike
from tilewise.problem import Problem
from tilewise.reference.merge import as_partial, merge_partial
from tilewise.reference.philox import seed_tensor
from tilewise.torch_private import left_alone
from tilewise.validation import check_cu_seqlens, check_cu_tensors, lower_sinks
from tilewise.variants.placing import Place, placed
from tilewise.variants.values import Mask, Score

_HALF = 0xFFFF_FFFF


@left_alone
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    mesh: Mesh | None = None,
    schedule: Schedule | Layout = "zigzag",
    mask: MaskLike = None,
    score: ScoreLike = None,
    scale: float | None = None,
    keys: KeyLists | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    timeout: timedelta | None = None,
) -> Any:
    """Compute ``attention`` over a sequence of which each process holds some rows.

    Every process calls it with its own rows of q, k and v, as ``shard`` cuts them, and gets the
    output of its rows of q. Masks and scores count rows and keys in the whole sequence, and the
    tensors that they capture are for the whole sequence, the same on every process.

    +-----------+--------------------------------+-------------------------------------------+
    | schedule  | a process holds                | keys in its memory, of S over P processes |
    +===========+================================+===========================================+
    | "ring"    | one run of rows                | 4 S / P: they come in turn                |
    +-----------+--------------------------------+-------------------------------------------+
    | "zigzag"  | two runs, one from either end  | 4 S / P; even work under a causal mask    |
    +-----------+--------------------------------+-------------------------------------------+
    | "gather"  | one run of rows                | S: they come at once                      |
    +-----------+--------------------------------+-------------------------------------------+
    | "ulysses" | one run of rows                | S, of its share of the heads              |
    +-----------+--------------------------------+-------------------------------------------+
    | a Layout  | what ``balanced_layout`` found | 4 S / P; even work under that mask        |
    +-----------+--------------------------------+-------------------------------------------+

    With a mesh of two dimensions the first one is the ring, and the processes along the second one
    share rows and exchange them for heads, as Ulysses does.

    Args:
        q: [B, Hq, rows, D] of this process; or packed [rows, Hq, D], with cu_seqlens.
        k: [B, Hk, keys, D], of a sequence of the same length or another; or [keys, Hk, D].
        v: [B, Hk, keys, Dv] or [keys, Hk, Dv].
        cu_seqlens_q: int32 or int64 [sequences + 1], as in ``attention_varlen``: of all packed
            rows, the same on every process. None for a dense call.
        cu_seqlens_k: likewise.
        mesh: a DeviceMesh of one or two dimensions, or a ProcessGroup. None for DTensors, which
            have one: q, k and v may be DTensors that are sharded evenly along the sequence. A
            DTensor gives a process one run of rows, so it needs another schedule than "zigzag".
        schedule: who holds which rows, and how keys travel; the same in ``shard``.
        mask: as in ``attention``.
        score: as in ``attention``, but for Triton code (``raw``).
        scale: as in ``attention``.
        keys: as in ``attention``: the lists of this process's rows, which name keys of the whole
            sequence. Only with the schedule "gather", as any key may be named; not packed.
        sinks: as in ``attention``, the same on every process.
        dropout_p: as in ``attention``. What is dropped depends on the seed and the places in the
            whole sequence alone, so it is what one process drops.
        seed: as in ``attention``; the first process's counts for all.
        return_lse: ask for an AttentionResult with lse.
        backend: as in ``attention``.
        timeout: how long to wait for a message; None for the group's own.

    Returns:
        The output [B, Hq, rows, Dv] (packed [rows, Hq, Dv]), or an AttentionResult with lse
        [B, Hq, rows] (packed [Hq, rows]); DTensors sharded likewise for DTensors. Gradients are
        defined for q, k and v. Those of sinks and of what a score captures are the sums over this
        process's rows: add them up over all processes, as DDP does (which divides by their number).

    Raises:
        InvalidArgument, InvalidType, Unsupported: as ``attention``; rows that ``shard`` would not
            cut like this, calls that differ among the processes, also in the values of captured
            tensors, or a call that another process has refused.
        LostPeer: a process did not answer in time, or failed in the middle of the call. Then the
            group of the processes is of no use any more.

    Source: ring attention (Liu et al., 2023); Ulysses (Jacobs et al., 2023); the merging of partial
    results: Milakov and Gimelshein, 2018.
    """
    wrap, packed, lists = None, None, None
    given: list[Any] = [x for x in (q, k, v) if is_dtensor(x)]
    if mesh is None and given:
        mesh = given[0].device_mesh
    with refusals_told(groups_of(mesh, timeout), q):
        if given:
            rows = 2 if cu_seqlens_q is None else 0
            q, k, v, sinks, wrap = unwrap(q, k, v, sinks, rows, schedule)
        stands = standing(mesh, schedule, timeout)
        q, k, v = autocast(q, k, v)
        starts = starts_of(cu_seqlens_q, cu_seqlens_k)
        if cu_seqlens_q is not None and cu_seqlens_k is not None:
            packed = cu_seqlens_q, cu_seqlens_k
        keywords = read_keywords(mask, score, scale, dropout_p, sinks, backend, packed)
        problem = build_problem(q, k, v, keywords)
        if keys is not None:
            lists = _lists(stands, keys, starts)
            checked_key_lists(lists, problem, q.device)
        own = read_seed(seed, problem, q.device, on_device=False)
        learning = q, k, v, *keywords.score.captured
        facts = _facts(stands, problem, keywords, starts, keys is not None, learning)
    queries, all_keys, shared_seed = _agree(stands, facts, problem, int(own), q.device)
    peers = stands.groups[0]
    # What cannot be computed is refused here by all of them. Nobody waits for a message yet.
    with peers.together(unless=(TilewiseError,)):
        if starts is not None:
            check_starts(starts, queries, all_keys)
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        problem = problem._replace(queries=queries, keys=all_keys, sinks=False)
        on_device = problem.device != "cpu" or reads_on_device(keywords.backend)
        draws = problem.dropout_p and on_device
        drawn = seed_tensor(shared_seed, q.device) if draws else shared_seed
        whole = Whole.of(problem, keywords, starts, drawn, q.device)
        everything = whole.everything()
        placed(everything.problem.score, "score", everything.place)
        plan_of(everything.problem, whole.backend)
    call = _Call(stands, whole, keywords)
    with peers.together():
        out, lse = call.attend(q, k, v) if lists is None else call.attend_lists(q, k, v, lists)
    if starts is not None:
        out, lse = out[0].transpose(0, 1), lse[0]
    if wrap is not None:
        out, lse = wrap(out, rows), wrap(lse, 2 if starts is None else 1)
    return AttentionResult(out, lse, None) if return_lse else out


def starts_of(cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> Starts | None:
    """Return where packed sequences begin; None of a dense call."""
    check_both("cu_seqlens_q", cu_seqlens_q, "cu_seqlens_k", cu_seqlens_k)
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return None
    check_cu_tensors(cu_seqlens_q, cu_seqlens_k)
    return Starts(tuple(cu_seqlens_q.tolist()), tuple(cu_seqlens_k.tolist()))


def check_starts(starts: Starts | None, queries: int, keys: int) -> None:
    """Refuse starts that do not fit so many packed rows and keys."""
    if starts is not None:
        check_cu_seqlens("cu_seqlens_q", torch.tensor(starts.queries), queries)
        check_cu_seqlens("cu_seqlens_k", torch.tensor(starts.keys), keys)


def _agree(
    stands: Standing, call: Mapping[str, str], problem: Problem, seed: int, device: torch.device
) -> tuple[int, int, int]:
    """Return M, N and the seed of the whole, if all make the same call with rows that fit."""
    halves = seed & _HALF, seed >> 32
    every = agreed(stands.groups, call, (problem.queries, problem.keys, *halves), device)
    totals = [sum(each[at] for each in every) for at in (0, 1)]
    for at, name in enumerate("qk"):
        for position, due in enumerate(stands.counts(totals[at])):
            rows = every[position][at]
            if rows != due:
                came = f"{rows} rows of {totals[at]} at position {position}"
                fix = (
                    "Cut the whole by tilewise.distributed.shard, with the same mesh and schedule."
                )
                raise InvalidArgument(name, came, f"{due} there", fix)
    low, high = every[0][2:]
    return totals[0], totals[1], high << 32 | low


def _facts(
    stands: Standing,
    problem: Problem,
    keywords: Keywords,
    starts: Starts | None,
    listed: bool,
    learning: Sequence[Tensor],
) -> dict[str, str]:
    """Return what has to be the same on every process. ``learning`` are tensors that may."""
    facts = shared_facts(problem, keywords) | {"schedule": str(stands.schedule)}
    if torch.is_grad_enabled():
        facts["gradients"] = str([each.requires_grad for each in learning])
    if starts is not None:
        facts["cu_seqlens"] = f"of checksum {crc32(str(starts).encode()):08x}"
    return facts | {"keys": "lists"} if listed else facts


def shared_facts(problem: Problem, keywords: Keywords) -> dict[str, str]:
    """Return what a problem is beyond its rows and keys, and the tensors beside q, k and v."""
    mask, score = keywords.mask, keywords.score
    own = {"queries": "", "keys": "", "mask": mask.text, "score": score.text}
    own["backend"] = str(keywords.backend)
    tensors = {
        f"{name} tensor {number}": x
        for name, given in (("mask", mask), ("score", score))
        for number, x in enumerate(given.captured)
    }
    if keywords.sinks is not None:
        tensors["tensor of sinks"] = keywords.sinks
    facts = {name: str(value) for name, value in (problem._asdict() | own).items()}
    return facts | in_words(tensors)


def _lists(stands: Standing, keys: KeyLists, starts: Starts | None) -> KeyBlocks:
    """Return key lists as blocks, if the schedule brings all keys that they may name."""
    if not stands.gathers or stands.ulysses is not None or starts is not None:
        raise Unsupported(
            "key lists (keys=) over a sequence that is split, but for dense calls with the "
            'schedule "gather"',
            fix="cut the sequence by shard(..., 'gather') and pass schedule='gather'",
        )
    return read_key_lists(keys)


class _Call(NamedTuple):
    """A call over the whole sequence, and where this process stands."""

    stands: Standing
    whole: Whole
    keywords: Keywords

    @property
    def sinks(self) -> Tensor | None:
        return self.keywords.sinks

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return out and lse of this process's rows."""
        problem, ulysses = self.whole.problem, self.stands.ulysses
        if ulysses is None:
            return self._with_sinks(*self._ring(q, k, v, range(problem.heads)))
        shares = share_heads(problem.heads, problem.kv_heads, ulysses.count)
        of_rows, of_keys = (self.stands.shared(x) for x in (problem.queries, problem.keys))
        assert of_rows is not None
        assert of_keys is not None
        queries = Exchange(ulysses, of_rows, shares.queries, problem.heads)
        keys = Exchange(ulysses, of_keys, shares.keys, problem.kv_heads)
        heads = shares.of(ulysses.position)
        q, k, v = queries.to_heads(q), keys.to_heads(k), keys.to_heads(v)
        alone = self.stands.ring is None
        out, lse = (self._alone if alone else self._ring)(q, k, v, heads)
        out, lse = queries.to_rows(out), queries.to_rows(lse[..., None])[..., 0]
        return (out, lse) if alone else self._with_sinks(out, lse)

    def attend_lists(
        self, q: Tensor, k: Tensor, v: Tensor, keys: KeyBlocks
    ) -> tuple[Tensor, Tensor]:
        """Return out and lse of this process's rows over their lists of keys."""
        stands, problem = self.stands, self.whole.problem
        assert stands.ring is not None
        layout = stands.layout(problem.keys)
        k, v = (every_row(stands.ring, layout, x, 2) for x in (k, v))
        (rows,) = stands.layout(problem.queries).ranges(stands.place) or [range(0)]
        every = range(problem.batch), range(problem.heads)
        place = Place(*every, rows, range(problem.keys), problem.queries, problem.keys)
        mask = placed(problem.mask, "mask", place)
        score = placed(problem.score, "score", place)
        keywords = self.keywords._replace(
            mask=Mask(mask.program, mask.tensors(self.whole.mask_tensors, q.dtype)),
            score=Score(score.program, score.tensors(self.whole.score_tensors, q.dtype)),
        )
        result = attend_lists(q, k, v, keywords, keys)
        return result.out, result.lse

    def _ring(self, q: Tensor, k: Tensor, v: Tensor, heads: range) -> tuple[Tensor, Tensor]:
        """Return out and lse of the rows of this place in the ring, without sinks."""
        stands, problem = self.stands, self.whole.problem
        assert stands.ring is not None
        layouts = stands.layout(problem.queries), stands.layout(problem.keys)
        whole = self.whole.of_heads(heads, k.shape[1])
        split = Split(whole, *layouts, stands.ring, stands.gathers)
        return attend(split, q, k, v, whole.score_tensors)

    def _alone(self, q: Tensor, k: Tensor, v: Tensor, heads: range) -> tuple[Tensor, Tensor]:
        """Return out and lse of all rows of some heads: those of one process, to the bit."""
        sinks = None if self.sinks is None else self.sinks[heads.start : heads.stop]
        if not heads:
            # Nothing to compute. But both results need a gradient wherever those of the other
            # processes do: the backward pass exchanges, and waits for this process too.
            read = (q, k, v, *self.whole.score_tensors, *(() if sinks is None else (sinks,)))
            reached = sum([x.flatten()[:0].sum() for x in read], q.new_zeros(()))
            lse = q.new_zeros(q.shape[:3], dtype=self.whole.floats) + reached
            return q.new_zeros((*q.shape[:3], v.shape[3])) + reached, lse
        whole = self.whole.of_heads(heads, k.shape[1])
        whole = whole._replace(problem=whole.problem._replace(sinks=sinks is not None))
        part = Part(whole, whole.everything())
        operands = part.operands(q, k, v, for_backward=True)
        ulysses = self.stands.ulysses
        assert ulysses is not None
        plan = part.plan._replace(backward=ulysses.together()(part.plan.backward))
        result = differentiable(operands._replace(sinks=lower_sinks(sinks, q.dtype)), plan)
        return part.back(result.out, result.lse)

    def _with_sinks(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Return the result with one more key for each head, whose value is 0."""
        if self.sinks is None:
            return out, lse
        nothing, sink = as_partial(self.sinks, out, lse)
        return merge_partial((out, nothing), (lse, sink))


@contextmanager
def context_parallel(
    mesh: Mesh,
    *,
    buffers: Sequence[Tensor] = (),
    buffer_seq_dims: Sequence[int] = (),
    no_restore_buffers: Sequence[Tensor] = (),
    schedule: Schedule | Layout = "zigzag",
    timeout: timedelta | None = None,
) -> Iterator[None]:
    """Within the block, attention is ``context_parallel_attention``, in a model as it is.

    That holds for ``tilewise.nn.Attention``, for what ``tilewise.sdpa()`` takes of torch's
    function, and for ``attn_implementation="tilewise"`` of transformers. ``tilewise.attention``
    called by name stays on one process. Everything else of a model works row by row, so each
    process computes with its own rows of the buffers: tokens, positions, labels. Take the backward
    pass inside of the block if it computes attention anew (activation checkpointing); else it may
    come later.

    The shape is that of ``torch.distributed.tensor.experimental.context_parallel``.

    Args:
        mesh: as in ``context_parallel_attention``.
        buffers: tensors [..., S, ...] with the whole sequence, the same on every process. Within
            the block they hold the rows of this process, [..., rows, ...]; after it they are whole
            again, with what they held.
        buffer_seq_dims: the dimension of the sequence, of each buffer.
        no_restore_buffers: those of the buffers that may stay cut, [..., rows, ...].
        schedule: as in ``context_parallel_attention``.
        timeout: likewise.

    Raises:
        InvalidArgument: not a dimension for each buffer, a buffer that requires a gradient, or one
            of ``no_restore_buffers`` that is not among them.
    """
    if len(buffers) != len(buffer_seq_dims):
        required = f"a dimension for each of the {len(buffers)} buffers"
        raise InvalidArgument("buffer_seq_dims", str(list(buffer_seq_dims)), required)
    for at, buffer in enumerate(buffers):
        if buffer.requires_grad:
            fix = "Cut it by tilewise.distributed.shard, whose gradient is defined."
            raise InvalidArgument(f"buffers[{at}]", "a tensor with gradient", "one without", fix)
    kept = {id(buffer) for buffer in no_restore_buffers}
    if not kept <= {id(buffer) for buffer in buffers}:
        raise InvalidArgument("no_restore_buffers", "a tensor of its own", "some of the buffers")
    parts = [
        shard(buffer, mesh, dim, schedule)
        for buffer, dim in zip(buffers, buffer_seq_dims, strict=True)
    ]
    # ``set_`` gives a tensor another memory; what it had stays alive in a view.
    whole = [x.detach().view_as(x) for x in buffers]
    cut: list[tuple[Tensor, Tensor]] = []
    try:
        for buffer, part, before in zip(buffers, parts, whole, strict=True):
            _set(buffer, part)
            cut.append((buffer, before))
        with routes.routed(_Shared(mesh, schedule, timeout)):
            cut = [(buffer, before) for buffer, before in cut if id(buffer) not in kept]
            yield
    finally:  # also where one of them refused: then all that were cut become whole
        for buffer, before in cut:
            _set(buffer, before)


@torch.no_grad()
def _set(tensor: Tensor, memory: Tensor) -> None:
    tensor.set_(memory)  # type: ignore[call-overload]


class _Shared(NamedTuple):
    """The route of a block."""

    mesh: Mesh
    schedule: Schedule | Layout
    timeout: timedelta | None

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Any:
        """Compute ``tilewise.attention`` over the rows of all processes."""
        return self._call(q, k, v, keywords)

    def attention_varlen(
        self, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, **keywords: Any
    ) -> Any:
        """Compute ``tilewise.attention_varlen`` over the rows of all processes."""
        return self._call(q, k, v, keywords | {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k})

    def _call(self, q: Tensor, k: Tensor, v: Tensor, keywords: dict[str, Any]) -> Any:
        given = {name: x for name, x in keywords.items() if x is not None and x is not False}
        for name in ("return_stats", "plan"):
            if name in given:
                raise Unsupported(
                    f"{name}= with a sequence that several processes share",
                    fix="leave it out, or compute this layer on one process",
                )
        return context_parallel_attention(
            q, k, v, mesh=self.mesh, schedule=self.schedule, timeout=self.timeout, **given
        )
