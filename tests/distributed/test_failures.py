"""Calls that cannot work end with an error on every process, and none of them hangs.

Protects the errors of ``tilewise.distributed``: calls that differ, rows that were cut otherwise,
processes that end or sleep in any phase.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.calls import WAYS, Way
from tests.distributed.ranks import ENDED, Ranks
from tilewise import masks, scores
from tilewise.distributed import (
    LostPeer,
    context_parallel_attention,
    parts,
    peers,
    shard,
    split_cache_attention,
    unshard,
)
from tilewise.distributed.layout import Schedule
from tilewise.distributed.peers import Peers, in_words
from tilewise.engine.dispatch import plan_of
from tilewise.errors import InvalidArgument, InvalidType, TilewiseError, Unsupported

VICTIM = 1
CLOSE = peers._close
# Phases of a call with gradients, by schedule. Each takes processes of its own, some seconds.
PHASES = [
    ("zigzag", "gradients of keys and values"),
    *(
        pytest.param(*each, marks=pytest.mark.thorough)
        for each in (
            ("zigzag", "sizes"),
            ("zigzag", "keys and values"),
            ("gather", "keys and values"),
            ("gather", "gradients of keys and values"),
            ("ulysses", "heads"),
            ("ulysses", "rows"),
        )
    ),
]


def attend(group: dist.ProcessGroup, way: Way, rows: int = 24, **keywords: Any) -> str:
    """Do a call with gradients; return what was raised, in words."""
    q, k, v = (torch.ones(1, 4, rows, 8, requires_grad=True) for _ in range(3))
    mesh = way.mesh(group)
    try:
        parts = (shard(x, mesh, 2, way.schedule) for x in (q, k, v))
        out = context_parallel_attention(*parts, mesh=mesh, schedule=way.schedule, **keywords)
        out.sum().backward()
    except (TilewiseError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def other_calls(group: dist.ProcessGroup, way: Way) -> list[str]:
    """Calls in which one process differs; all but the last in more than its rows."""
    odd = dist.get_rank(group) == VICTIM
    learned = torch.ones(4, requires_grad=odd)
    return [
        attend(group, way, mask=masks.window(2 + odd, 0)),
        attend(group, way, scale=0.1 + odd),
        attend(group, way, backend="no such" if odd else None),
        attend(group, way, sinks=torch.ones(4) if odd else None),
        attend(group, way, score=lambda s, b, h, m, n: s + learned[h]),
        attend(group, way, rows=24 + 8 * odd),
    ]


@pytest.mark.parametrize("way", WAYS)
def test_calls_that_differ(ranks: Ranks, way: str) -> None:
    """Of a mesh of two dimensions, too, each process says who differs."""
    count = 4 if WAYS[way].rings else 3
    others = str([rank for rank in range(count) if rank != VICTIM])
    for rank, (*differing, rows) in enumerate(ranks.run(other_calls, WAYS[way], count=count)):
        odd = others if rank == VICTIM else str([VICTIM])
        for found in differing:
            assert f"another one at positions {odd}" in found, found
            assert "the same call on every process" in found, found
        assert "rows of" in rows, rows
        assert "shard" in rows, rows


def other_values(group: dist.ProcessGroup) -> list[str]:
    """Calls whose tensors have one other number on one process, and one whose memory differs."""
    odd = dist.get_rank(group) == VICTIM
    seen = torch.ones(1, 1, 24, 24, dtype=torch.bool).tril()
    seen[0, 0, 5, 3] = not odd
    ids = torch.arange(24)[None] // 8
    ids[0, 8] -= int(odd)
    bias = torch.zeros(1, 4, 1, 24)
    added = bias.clone()
    added[0, 2, 0, 7] = float(odd)
    sinks = torch.tensor([0.0, 0.0, 0.0, float(odd)])
    way, other = WAYS["zigzag"], bias.expand(1, 4, 24, 24)
    return [
        attend(group, way, mask=seen),
        attend(group, way, mask=masks.causal() & masks.document(ids)),
        attend(group, way, score=scores.bias(added)),
        attend(group, way, sinks=sinks),
        attend(group, way, score=scores.bias(other.contiguous() if odd else other)),
    ]


def test_tensors_that_differ(ranks: Ranks) -> None:
    """Every process says which of them: the results would be those of neither."""
    for rank, (*differing, same) in enumerate(ranks.run(other_values, count=3)):
        names = ["mask tensor 0 bool [1, 1, 24, 24]", "mask tensor 0 int64 [1, 24]"]
        names += ["score tensor 0 float32 [1, 4, 1, 24]", "tensor of sinks float32 [4]"]
        odd = [each for each in range(3) if each != VICTIM] if rank == VICTIM else [VICTIM]
        for found, name in zip(differing, names, strict=True):
            here, there = found.split(f"; another one at positions {odd}: ")
            assert here.startswith(f"InvalidArgument: call: got position {rank}: {name} of digest ")
            assert there.startswith(f"{name} of digest ")
        assert same == "no error"


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (9,), (3, 8), (2, 1, 5, 13), (4, 1, 700, 1500)])
def test_a_digest(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Of every element and its place, and not of strides."""
    x = (torch.arange(math.prod(shape)).view(shape) % 3 == 1).to(dtype)
    (text,) = in_words({"x": x}).values()
    assert text.startswith(f"{str(dtype)[6:]} {list(shape)} of digest ")
    turned = x.movedim(0, -1).contiguous().movedim(-1, 0) if shape else x
    wide = x[:1].expand(3, *shape[1:]) if shape else x
    shifted = torch.cat([x.flatten()[:1], x.flatten()])[1:].view(shape)
    strange = x.as_strided((1, *shape), (3, *x.stride()))
    same = ((x, turned), (x, shifted), (wide, wide.contiguous()), (x[None], strange))
    for one, other in same:
        assert in_words({"x": one}) == in_words({"x": other})
    flat = x.flatten()
    for place in {0, len(flat) // 2, len(flat) - 1}:
        other = flat.clone()
        other[place] = 1 - other[place].to(torch.int64)
        assert in_words({"x": other.view(shape)}) != {"x": text}
        swapped = flat.clone()
        swapped[[place, place - 1]] = flat[[place - 1, place]]
        assert (in_words({"x": swapped.view(shape)}) == {"x": text}) == torch.equal(swapped, flat)
    assert in_words({"x": torch.empty(0, 3)}) == {"x": "float32 [0, 3] of digest " + "0" * 16}


def broken(b: Any, h: Any, m: Any, n: Any) -> Any:
    """A mask that cannot be read."""
    raise ValueError("no such file")


def refused_by_one(group: dist.ProcessGroup, way: Way) -> list[tuple[str, float]]:
    """Calls that one process refuses before it compares them; and one that works."""
    odd = dist.get_rank(group) == VICTIM
    calls: list[dict[str, Any]] = [
        {"mask": broken},
        {"dropout_p": 2.0},
        {"mask": "casual"},
        {"sinks": torch.ones(3)},
        {"keys": torch.zeros(1, 1, 24, 2)},
        {"cu_seqlens_q": torch.tensor([0, 24])},
    ]
    found = []
    for call in calls:
        began = time.monotonic()
        text = attend(group, way, **(call if odd else {}))
        found.append((text, time.monotonic() - began))
    assert attend(group, way) == "no error"
    return found


@pytest.mark.parametrize(("way", "count"), [("zigzag", 2), ("ulysses", 3), ("zigzag-ulysses", 4)])
def test_an_error_on_one_process(ranks: Ranks, way: str, count: int) -> None:
    """All raise at once, long before the timeout; the others say who, and what it said."""
    found = ranks.run(refused_by_one, WAYS[way], count=count)
    for number, (own, _) in enumerate(found[VICTIM]):
        kind, text = own.split(": ", 1)
        assert kind in ("ValueError", "InvalidArgument", "InvalidType", "Unsupported"), own
        for rank, each in enumerate(found):
            told, seconds = each[number]
            assert seconds < 10, (own, seconds)
            if rank != VICTIM:
                assert told.startswith(f"InvalidArgument: call: got an error at position {VICTIM}")
                assert f"{kind}: {text}" in told


def other_caches(group: dist.ProcessGroup) -> list[str]:
    """Calls over a split cache that one process refuses, or makes with other queries."""
    odd = dist.get_rank(group) == VICTIM
    q, k = torch.ones(1, 2, 1, 8), torch.ones(1, 2, 5, 8)
    table, lengths = torch.tensor([[0, 1 + 7 * odd]], dtype=torch.int32), torch.tensor([7])
    pages = torch.ones(2, 2, 4, 8), torch.ones(2, 2, 4, 8)
    sequence: dict[str, Any] = {"mask": masks.lengths(torch.tensor([9 + odd]))}
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((q + odd, k, k), {}),
        ((q, k, k), {"mask": "casual"} if odd else {}),
        ((q[:, 0] if odd else q, k, k), {}),
        ((q, *pages, table, lengths), {}),
        ((q, k, k), sequence),
    ]
    found = []
    for operands, keywords in calls:
        try:
            split_cache_attention(*operands, mesh=group, **keywords)
            found.append("no error")
        except TilewiseError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_caches_that_differ(ranks: Ranks) -> None:
    mine = ranks.run(other_caches, count=2)
    assert not any("no error" in each for each in mine), mine
    for rank, (query, name, shape, pages, mask) in enumerate(mine):
        assert f"got position {rank}: q float32 [1, 2, 1, 8] of digest" in query
        assert f"got position {rank}: mask tensor 0 int64 [1] of digest" in mask
        if rank != VICTIM:
            for found in (name, shape, pages):
                assert f"an error at position {VICTIM}: " in found, found


def failing(which: str) -> Any:
    """Return a ``plan_of`` whose plans have no room in one of their passes."""

    def fails(*_: Any, **__: Any) -> Any:
        raise MemoryError("no room for 3 GiB")

    changed: Any = {which: fails}
    return lambda *given: plan_of(*given)._replace(**changed)


def fails_in(_: dist.ProcessGroup, way: Way | None, which: str) -> tuple[str, float]:
    """Do a call in which one process fails, of a split cache without a way; what all raised."""
    group = dist.new_group(list(range(dist.get_world_size())))  # it is left, and of no use then
    odd = dist.get_rank() == VICTIM
    parts.plan_of = failing(which) if odd else plan_of  # type: ignore[attr-defined]
    x = torch.ones(1, 4, 6, 8)
    began = time.monotonic()
    try:
        if way is None:
            split_cache_attention(x, x, x, mesh=group)
            return "no error", 0.0
        return attend(group, way), time.monotonic() - began
    except (MemoryError, LostPeer) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    finally:
        parts.plan_of = plan_of  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("way", "which"),
    [(None, "forward"), *[(way, which) for way in WAYS for which in ("forward", "backward")]],
)
def test_an_error_in_the_middle(ranks: Ranks, way: str | None, which: str) -> None:
    """All raise at once, and say who was first and why: also those who wait for another one."""
    found = ranks.run(fails_in, WAYS[way] if way else None, which)
    for rank, (told, seconds) in enumerate(found):
        assert seconds < 10, (rank, told, seconds)
        if rank == VICTIM:
            assert told == "MemoryError: no room for 3 GiB"
        else:
            assert told.startswith(LostPeer.__name__), told
            assert f"the first error: rank {VICTIM} raised MemoryError: no room" in told, told


def leaves_unheard(_: dist.ProcessGroup, way: Way) -> tuple[str, float]:
    """As ``fails_in``; the process that fails closes no connection, and stays."""
    if dist.get_rank() == VICTIM:
        peers._close = lambda peers: None
    try:
        return fails_in(_, way, "forward")
    finally:
        peers._close = CLOSE


def hears_nothing(_: dist.ProcessGroup, way: Way) -> tuple[str, float]:
    """As ``fails_in``; no connection is closed anywhere, so no wait in gloo ever ends."""
    peers._close = lambda peers: None
    try:
        return fails_in(_, way, "backward")
    finally:
        peers._close = CLOSE


@pytest.mark.parametrize("way", ["ring", "gather"])
@pytest.mark.parametrize("task", [leaves_unheard, hears_nothing])
def test_who_waits_asks_whether_somebody_left(
    ranks: Ranks, task: Callable[..., tuple[str, float]], way: str
) -> None:
    """Where the news of a closed connection is lost, the group's store still has it.

    Nobody waits for the group's timeout, not even in a wait that gloo does not end.
    """
    for rank, (told, seconds) in enumerate(ranks.run(task, WAYS[way])):
        assert seconds < 20, (rank, told, seconds)
        if rank != VICTIM:
            assert f"the first error: rank {VICTIM} raised MemoryError: no room" in told, told


def names_no_key(_: dist.ProcessGroup) -> str:
    group = dist.new_group(list(range(dist.get_world_size())))
    keys = torch.zeros(1, 1, 6, 2, dtype=torch.int32)  # of the 6 rows of each process
    keys[0, 0, 3, 1] = 24 * (dist.get_rank() == VICTIM)
    return attend(group, WAYS["gather"], keys=keys)


def test_a_list_that_names_no_key(ranks: Ranks) -> None:
    """The others see it at their next message: they have all keys by then."""
    for rank, told in enumerate(ranks.run(names_no_key)):
        if rank == VICTIM:
            assert told.startswith("InvalidArgument: keys"), told
        else:
            assert f"the first error: rank {VICTIM} raised InvalidArgument: keys" in told, told


def never_calls(group: dist.ProcessGroup) -> str:
    if dist.get_rank(group) == VICTIM:
        return "an error of its own"
    return attend(group, WAYS["ring"], timeout=timedelta(seconds=2))


def test_an_error_before_the_call(some_ranks: Ranks) -> None:
    """Nobody can see it: the others wait for the timeout, and no longer."""
    for rank, told in enumerate(some_ranks.run(never_calls, count=2)):
        assert told.startswith("an error" if rank == VICTIM else LostPeer.__name__), told


def cut_otherwise(group: dist.ProcessGroup, way: Way) -> str:
    """Cut ten rows as ``torch.chunk`` does: most processes have another number of rows, one not."""
    x = torch.ones(1, 4, 10, 8).chunk(4, dim=2)[dist.get_rank(group)]
    with pytest.raises(InvalidArgument, match="rows of 10 at position") as caught:
        context_parallel_attention(x, x, x, mesh=way.mesh(group), schedule=way.schedule)
    return str(caught.value)


@pytest.mark.parametrize("way", ["ring", "ulysses", "zigzag-ulysses"])
def test_rows_that_were_cut_otherwise(ranks: Ranks, way: str) -> None:
    """All processes raise, so that nobody waits: also those whose own rows fit."""
    assert len(set(ranks.run(cut_otherwise, WAYS[way]))) == 1


def other_sequences(group: dist.ProcessGroup) -> None:
    x = torch.ones(5, 4, 8)
    cu = torch.tensor([0, 3 + dist.get_rank(group), 10])
    with pytest.raises(InvalidArgument, match="the same call"):
        context_parallel_attention(x, x, x, cu, cu, mesh=group, schedule="ring")


def test_sequences_that_differ(ranks: Ranks) -> None:
    ranks.run(other_sequences, count=2)


def refusals(group: dist.ProcessGroup) -> None:
    """What is refused before anything is sent."""
    x = torch.ones(1, 2, 8, 4)
    with pytest.raises(InvalidType, match="mesh"):
        context_parallel_attention(x, x, x, mesh=3)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="schedule"):
        context_parallel_attention(x, x, x, mesh=group, schedule="turns")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="cu_seqlens_k"):
        context_parallel_attention(x[0], x[0], x[0], torch.tensor([0, 1]), mesh=group)
    with pytest.raises(InvalidArgument, match="dim"):
        shard(x, group, 4)
    with pytest.raises(InvalidArgument, match=r"x: got 8 rows"):
        unshard(x, group, 2, length=8)
    leaf = x.clone().requires_grad_()
    lists: dict[str, Any] = {"keys": torch.zeros(1, 1, 4, 2, dtype=torch.int32)}
    calls: list[tuple[Schedule, dict[str, Any]]]
    calls = [("zigzag", {}), ("ulysses", {}), ("gather", lists)]
    for schedule, more in calls:
        parts = (shard(leaf, group, 2, schedule) for _ in range(3))
        out = context_parallel_attention(*parts, mesh=group, schedule=schedule, **more)
        with pytest.raises(Unsupported, match="second derivatives"):
            torch.autograd.grad(out.sum(), leaf, create_graph=True)


def test_refusals(ranks: Ranks) -> None:
    ranks.run(refusals, count=2)


def no_backend(group: dist.ProcessGroup) -> None:
    """A call that cannot run leaves no message on its way: the next one works."""
    x = torch.ones(1, 2, 4, 4, dtype=torch.float64)
    for schedule in ("zigzag", "gather", "ulysses"):
        keywords: dict[str, Any] = {"mesh": group, "schedule": schedule}
        with pytest.raises(Unsupported, match="cannot run"):
            context_parallel_attention(x, x, x, backend="gpu", **keywords)
        context_parallel_attention(x, x, x, **keywords)


def test_a_backend_that_cannot(ranks: Ranks) -> None:
    ranks.run(no_backend, count=2)


def written_over(group: dist.ProcessGroup) -> None:
    x = torch.ones(1, 2, 4, 4, requires_grad=True)
    for schedule in ("zigzag", "gather", "ulysses"):
        bias = torch.ones(1, 2, 8, 8, requires_grad=True)
        seen = torch.ones(1, 1, 8, 8, dtype=torch.bool)
        for captured, more in ((bias, {"score": scores.bias(bias)}), (seen, {"mask": seen})):
            out = context_parallel_attention(x, x, x, mesh=group, schedule=schedule, **more)
            captured.detach().zero_()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()


def test_what_is_captured_is_not_written_over(ranks: Ranks) -> None:
    """The backward pass reads it: it is an error to change it before, as on one process."""
    ranks.run(written_over, count=2)


def end_in(group: dist.ProcessGroup, way: Way, phase: str, sleep: float) -> tuple[str, float]:
    """Do a call in which one process ends, or sleeps, in a phase; what was raised, and when."""
    attend(group, way)  # what a first call loads may take seconds: not in the 4 below
    saved = Peers.start, Peers.gathered

    def stopping(method: Any) -> Any:
        def stops(self: Peers, name: str, *rest: Any) -> Any:
            if name == phase and dist.get_rank(group) == VICTIM:
                if not sleep:
                    os._exit(1)
                time.sleep(sleep)
            return method(self, name, *rest)

        return stops

    for method in saved:
        setattr(Peers, method.__name__, stopping(method))
    began = time.monotonic()
    try:
        return attend(group, way, timeout=timedelta(seconds=4)), time.monotonic() - began
    finally:
        for method in saved:
            setattr(Peers, method.__name__, method)


@pytest.fixture
def some_ranks() -> Iterator[Ranks]:
    """Processes of a test's own: it will not leave them whole."""
    found = Ranks(count=3, timeout_s=30.0)
    yield found
    found.close()


@pytest.mark.parametrize(("way", "phase"), PHASES)
def test_a_process_that_ends(some_ranks: Ranks, way: str, phase: str) -> None:
    for rank, answer in enumerate(some_ranks.try_run(end_in, WAYS[way], phase, 0.0)):
        if rank == VICTIM:
            assert answer is ENDED
            continue
        text, seconds = answer
        assert text.startswith(LostPeer.__name__), text
        assert seconds < 40, seconds


@pytest.mark.thorough
@pytest.mark.parametrize("phase", ["sizes", "keys and values"])
def test_a_process_that_sleeps(some_ranks: Ranks, phase: str) -> None:
    answers = some_ranks.try_run(end_in, WAYS["zigzag"], phase, 16.0)
    for rank, (text, _) in enumerate(answers):
        if rank != VICTIM:
            assert text.startswith(LostPeer.__name__), text
            assert "did not answer" in text
            assert "timeout" in text.lower()
