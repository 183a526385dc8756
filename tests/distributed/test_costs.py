"""What several processes will cost, predicted: bytes against runs, times against small sums.

Protects ``forecast``, ``compare`` and the replay of schedules: exact bytes of every rank, who waits
for whom, which schedule is taken.
"""

from __future__ import annotations

import math
import re
import shlex
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.calls import WAYS, Way
from tests.distributed.ranks import Ranks
from tilewise import cli, masks
from tilewise.chips import CHIPS
from tilewise.distributed import (
    LINKS,
    Layout,
    Link,
    compare,
    context_parallel_attention,
    forecast,
    shard,
)
from tilewise.distributed.costs import _Cells, _Speed
from tilewise.distributed.layout import layout_of
from tilewise.distributed.parts import Part, Piece, Whole
from tilewise.distributed.peers import Peers
from tilewise.distributed.replay import (
    Compute,
    Event,
    Leg,
    Message,
    Replay,
    Start,
    Wait,
    link_named,
)
from tilewise.errors import InvalidArgument
from tilewise.validation import dense_problem

ROWS, COLUMNS = 37, 53
MASKS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "causal": masks.causal,
    "window": lambda: masks.window(6, 0),
    "documents": lambda: masks.document(
        torch.arange(COLUMNS)[None] // 9, torch.arange(ROWS)[None] // 9
    ),
}
PACKED = "packed"
CHIP = "graviton3"
STARTS = torch.tensor([0, 9, 9, 21, COLUMNS])


def operands(case: str, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    shapes: list[tuple[int, ...]] = [(2, 4, ROWS, 8), (2, 2, COLUMNS, 8), (2, 2, COLUMNS, 6)]
    if case == PACKED:
        shapes = [(COLUMNS, *shape[1::2]) for shape in shapes]
    return [torch.ones(shape, dtype=dtype, device=device) for shape in shapes]


def keywords(case: str) -> dict[str, Any]:
    if case == PACKED:
        return {"cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS, "mask": masks.causal()}
    return {"mask": MASKS[case]()}


def counted(
    group: dist.ProcessGroup, way: Way, cases: list[tuple[str, torch.dtype, bool]]
) -> list[list[tuple[float, ...]]]:
    """What this rank did in the two passes of each case.

    Returns:
        Bytes that ``Peers.start`` sent and received, and the predicted seconds of the parts that
        the kernels computed.
    """
    real_start, real_init, mesh = Peers.start, Part.__init__, way.mesh(group)
    total: list[float] = [0, 0, 0]

    def start(self: Peers, phase: str, *both: Any) -> Any:
        for which, tensors in enumerate(both):
            others = [x for position, x in tensors.items() if position != self.position]
            total[which] += sum(x.numel() * x.element_size() for x in others)
        return real_start(self, phase, *both)

    def init(self: Part, whole: Whole, piece: Piece) -> None:
        real_init(self, whole, piece)
        plan, merges = self.plan, way.schedule != "ulysses"
        seconds = _Speed(whole, CHIPS[CHIP], merges).of(piece)

        def adding(which: int, kernel: Any) -> Any:
            def call(*arguments: Any) -> Any:
                total[2] += seconds[which]
                return kernel(*arguments)

            return call

        self.plan = plan._replace(
            forward=adding(0, plan.forward), backward=adding(1, plan.backward)
        )

    found = []
    for case, dtype, with_lse in cases:
        dim = 0 if case == PACKED else 2
        own = [shard(x, mesh, dim, way.schedule) for x in operands(case, dtype)]
        q, k, v = (x.requires_grad_() for x in own)
        Peers.start, Part.__init__ = start, init  # type: ignore[method-assign,assignment]
        try:
            total[:] = 0, 0, 0
            out, lse, _ = context_parallel_attention(
                q, k, v, mesh=mesh, schedule=way.schedule, return_lse=True, **keywords(case)
            )
            forward = tuple(total)
            (out.sum() + lse.sum() if with_lse else out.sum()).backward()
            backward = tuple(all_ - of for all_, of in zip(total, forward, strict=True))
            found.append([forward, backward])
        finally:
            Peers.start, Part.__init__ = real_start, real_init  # type: ignore[method-assign]
    return found


# Chunks of any sizes, also empty ones, that belong to any position.
UNEVEN = Way(Layout((0, 3, 3, 20, 21, COLUMNS), (3, 0, 1, 1, 0), 4))


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("way", [*WAYS, "layout"])
def test_a_forecast_counts_what_every_rank_does(ranks: Ranks, way: str, count: int) -> None:
    """Bytes are those that are sent, and the work is that of the parts which are computed.

    Exactly, of every rank, forward and backward. How close seconds come to a clock is measured by
    ``scripts/bench_context.py``, for a test would fail beside other work.
    """
    chosen = UNEVEN if way == "layout" else WAYS[way]
    if count == 2 and (chosen.rings or way == "layout"):
        pytest.skip("of four ranks")
    # A Layout is for queries and keys of one length.
    names = [PACKED] if way == "layout" else [*MASKS, PACKED]
    cases = [(name, torch.float32, False) for name in names]
    cases.append((PACKED, torch.bfloat16, True))
    runs = ranks.run(counted, chosen, cases, count=count)
    mesh: Any = (chosen.rings, count // chosen.rings) if chosen.rings else count
    for at, (case, dtype, with_lse) in enumerate(cases):
        predicted = forecast(
            *operands(case, dtype, "meta"),
            mesh=mesh,
            schedule=chosen.schedule,
            chip=CHIP,
            link="nvlink",
            lse_gradient=with_lse,
            **keywords(case),
        )
        assert predicted.backward is not None
        for which, cost in enumerate((predicted.forward, predicted.backward)):
            sent, received, seconds = zip(*(run[at][which] for run in runs), strict=True)
            assert cost.sent == sent, (case, dtype, which)
            assert cost.received == received, (case, dtype, which)
            assert cost.computing == pytest.approx(seconds, rel=1e-9), (case, dtype, which)
        assert sum(predicted.forward.sent) > 0


@pytest.mark.parametrize("schedule", ["ring", "zigzag"])
@pytest.mark.parametrize("name", MASKS)
def test_chunks_are_looked_at_together(name: str, schedule: Any) -> None:
    """Many at once give what each pair of chunks gives by itself, which is what runs."""
    keywords_ = keywords(name)["mask"]
    problem = dense_problem(
        *operands(name, torch.float32),
        mask=() if keywords_ is None else keywords_.program,
        score=(), scale=None, dropout_p=0.0, sinks=None,
    )  # fmt: skip
    captured = () if keywords_ is None else keywords_.captured
    whole = Whole(problem, range(4), captured, (), 0, None)
    rows, columns = (layout_of(schedule, length, 20) for length in (ROWS, COLUMNS))

    class Pairs:
        def of(self, piece: Piece) -> tuple[float, float]:
            small = piece.problem
            return small.queries * small.keys + 0.5 * bool(small.mask), 0.0

    cells = _Cells(whole, rows, columns, Pairs())  # type: ignore[arg-type]
    for r in range(len(rows.owners)):
        for c in range(len(columns.owners)):
            pair = rows.rows_of(r), columns.rows_of(c)
            assert cells.seen[r, c] == whole.any_pair(*pair)
            expected = sum(Pairs().of(piece)[0] for piece in whole.pieces(*pair))
            assert cells.seconds[0, r, c] == expected


# ---- the replay, by hand

NEXT = np.array([1, 2, 0])
UNIT = Link("a byte a second", 1.0)


def shift(*sizes: int) -> Message:
    return Message(NEXT[: len(sizes)] % len(sizes), np.array(sizes))


def test_a_message_is_hidden_or_waited_for() -> None:
    """It begins when both have started, takes size / rate, and one waits for what is not hidden."""
    events: list[Event] = [
        Start("a", (shift(2, 2, 2),)),
        Compute(np.array([5.0, 1.0, 1.0])),
        Wait("a"),
        Compute(np.ones(3)),
    ]
    assert Replay(events, 3, UNIT).ends.tolist() == [6.0, 3.0, 3.0]
    late = Link("late", 1.0, latency_s=0.5)
    assert Replay(events, 3, late).ends.tolist() == [6.0, 3.5, 3.5]
    fast = Link("fast", 4.0)
    assert Replay(events, 3, fast).ends.tolist() == [6.0, 2.0, 2.0]


def test_a_message_begins_when_both_have_started() -> None:
    """Rank 0 is late: who gets from it, and who sends to it, waits; and so on."""
    events: list[Event] = [
        Compute(np.array([4.0, 0.0, 0.0])),
        Start("a", (shift(2, 0, 3),)),
        Wait("a"),
    ]
    found = Replay(events, 3, UNIT)
    assert found.ends.tolist() == [7.0, 6.0, 7.0]
    assert found.critical_path() == (Leg("compute", 0, 0, 0.0, 4.0), Leg("message", 2, 0, 4.0, 7.0))


def test_messages_of_an_exchange_share_a_link() -> None:
    """One after the other, both ways at once; the path names the one that was in the way."""
    back = Message(np.array([2, 0, 1]), np.array([1, 1, 1]))
    events: list[Event] = [
        Start("a", (shift(2, 2, 2), back)),
        Wait("a"),
        Compute(np.array([0.0, 1.0, 0.0])),
    ]
    found = Replay(events, 3, UNIT)
    assert found.ends.tolist() == [3.0, 4.0, 3.0]
    *before, message, compute = found.critical_path()
    assert [leg[3:] for leg in before] == [(0.0, 2.0)]
    assert message[3:] == (2.0, 3.0)
    assert compute == Leg("compute", 1, 1, 3.0, 4.0)


def test_a_straggler() -> None:
    """One rank that takes three times as long holds up those that need its keys, in every step."""
    two: list[Event] = [
        Start("1", (shift(1, 1),)),
        Compute(np.ones(2)),
        Wait("1"),
        Start("2", (shift(1, 1),)),
        Compute(np.ones(2)),
        Wait("2"),
    ]
    assert Replay(two, 2, UNIT).ends.tolist() == [2.0, 2.0]
    found = Replay(two, 2, UNIT, slow={1: 3.0})
    # Rank 0 starts its second exchange at 1, rank 1 at 3; the message is there at 4.
    assert found.ends.tolist() == [4.0, 6.0]
    assert found.critical_path() == (Leg("compute", 1, 1, 0.0, 6.0),)


@pytest.mark.parametrize("ranks", [2, 1024])
def test_a_ring_of_any_size(ranks: int) -> None:
    """P steps, each as long as the longer of its work and its message."""
    there = (np.arange(ranks) + 1) % ranks
    sizes, work = np.full(ranks, 3), np.ones(ranks)
    events: list[Event] = [Start("1", (Message(there, sizes),)), Compute(work)]
    for step in range(1, ranks):
        events += [Wait(f"{step}"), Start(f"{step + 1}", (Message(there, sizes),)), Compute(work)]
    assert Replay(events, ranks, UNIT).seconds == 3 * (ranks - 1) + 1
    assert Replay(events, ranks, Link("fast", 6.0)).seconds == ranks


# ---- the shape of what is predicted


def predicted(schedule: Any, mesh: Any = 8, link: Any = "nvlink", **more: Any) -> Any:
    q = torch.empty(1, 16, 2**16, 128, dtype=torch.bfloat16, device="meta")
    k = torch.empty(1, 8, 2**16, 128, dtype=torch.bfloat16, device="meta")
    given: dict[str, Any] = {"mask": masks.causal(), "chip": "h100"} | more
    return forecast(q, k, k, mesh=mesh, schedule=schedule, link=link, **given)


def test_zigzag_has_even_work() -> None:
    ring, zigzag = predicted("ring"), predicted("zigzag")
    # The last rank of a ring sees all keys: 15 of 64 squares' work where the mean is 8.5 of them.
    assert ring.forward.unevenness == pytest.approx(15 / 8, rel=0.02)
    assert zigzag.forward.unevenness == pytest.approx(1.0, abs=1e-9)
    assert zigzag.seconds < 0.6 * ring.seconds
    even = predicted("ring", mask=None)
    assert even.forward.unevenness == 1.0
    assert even.seconds <= predicted("zigzag", mask=None).seconds


def test_a_faster_link_hides_more() -> None:
    links = [Link(f"{rate}", rate) for rate in (1e9, 1e10, 1e11, 1e12)]
    costs = [predicted("zigzag", link=link).forward for link in links]
    hidden = [cost.hidden for cost in costs]
    assert hidden == sorted(hidden)
    assert hidden[0] < 0.6 < 0.95 < hidden[-1]
    assert costs[-1].seconds == pytest.approx(max(costs[-1].computing))
    assert costs[0].seconds > sum(max(costs[0].sent, costs[0].received)) / 8e9 / 8
    assert [cost.sent for cost in costs] == [costs[0].sent] * 4


def test_a_window_asks_its_neighbour_alone() -> None:
    found = predicted("ring", mask=masks.window(64, 0))
    keys = 8 * 2**16 // 8 * 2 * 128 * 2
    assert found.forward.sent == (keys,) * 7 + (0,)
    assert found.forward.received == (0, *(keys,) * 7)
    assert found.backward.sent == (keys, *(3 * keys,) * 6, 2 * keys)


def test_memory() -> None:
    """Of ring attention: in S over P, whatever the rank; of gathered keys in S."""
    row = 2**16 // 8 * 128 * 2
    ring, more = predicted("ring", mask=None, training=False).memory, predicted("ring", 16).memory
    assert (ring.q, ring.keys, ring.gradients) == (16 * row, 2 * 8 * row, 0)
    assert ring.out == 16 * row + 16 * 2**13 * 4
    assert ring.in_flight == 3 * ring.keys  # at work, on its way here, on its way from here
    assert more.peak() == pytest.approx(predicted("ring").memory.peak() / 2, rel=0.01)
    assert predicted("gather").memory.in_flight > 8 * ring.keys
    trained = predicted("ring").memory
    kept = trained.q + trained.keys + trained.out
    assert trained.peak(3) - trained.peak() == 2 * kept


def test_the_schedule_that_is_taken() -> None:
    """The fastest that fits; as fast ones by their memory; and why none of the others."""
    k = torch.empty(1, 4, 2**16, 128, dtype=torch.bfloat16, device="meta")
    q = torch.cat([k, k], dim=1)
    call: dict[str, Any] = {"ranks": 8, "mask": masks.causal(), "chip": "h100"}
    found = compare(q, k, k, link="nvlink", **call)
    names = [each.name for each in found.forecasts]
    inside = {"zigzag 4 x ulysses 2", "zigzag 2 x ulysses 4"}
    assert set(names) == {"ring", "zigzag", "gather", "ulysses", *inside}
    why = dict(zip(names, found.reasons, strict=True))
    assert re.search(r"as long: its busiest rank has 1\.8\d times the mean work", why["ring"])
    best = found.forecasts[0]
    assert all(best.seconds <= 1.01 * each.seconds for each in found.forecasts)
    # Over a slow link those win that hide their messages.
    slow = compare(q, k, k, link="1GB/s", **call)
    assert slow.forecasts[0].seconds < slow.forecasts[-1].seconds
    assert "for messages" in slow.reasons[-1]
    # Of a chip that holds less than gathered keys take, they are not, however fast.
    held = {each.name: each.memory.peak() for each in found.forecasts}
    room = (held["gather"] + max(held[name] for name in held if name != "gather")) // 2
    small = replace(CHIPS["h100"], memory_bytes=room)
    least = compare(q, k, k, link="nvlink", **call | {"chip": small})
    assert least.forecasts[-1].name == "gather"
    assert "it holds" in least.reasons[-1]


PAGE = Path(__file__).parents[2] / "docs" / "long-context.md"


def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    shown = re.search(
        r"^    \$ tilewise (explain .*)\n    \.\.\.\n((?:    .*\n)+)", PAGE.read_text(), re.M
    )
    assert shown is not None
    assert cli.main(shlex.split(shown[1])) == 0
    printed = capsys.readouterr().out
    assert printed.endswith("\n" + textwrap.dedent(shown[2]))


def test_the_command_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["explain", "--shape", "1x2x64x16", "--chip", "h100"]
    assert cli.main([*argv, "--link", "nvlink"]) == 1
    told = capsys.readouterr()
    assert "--context-parallel RANKS" in told.err
    assert not told.out  # nothing is printed of a command that is refused
    assert cli.main([*argv, "--context-parallel", "0"]) == 1
    assert "--context-parallel: got 0; required: 1 rank or more" in capsys.readouterr().err


def test_one_rank_sends_nothing() -> None:
    for schedule in ("ring", "zigzag", "gather", "ulysses"):
        found = predicted(schedule, 1)
        assert found.forward.sent == found.backward.received == (0,)
        assert found.forward.hidden == 1.0
    assert predicted("zigzag", training=False).backward is None


def test_what_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="one of this, a100"):
        predicted("ring", chip="abacus")
    with pytest.raises(InvalidArgument, match="link: got 'string'"):
        predicted("ring", link="string")
    with pytest.raises(InvalidArgument, match="mesh"):
        predicted("ring", 0)
    with pytest.raises(InvalidArgument, match="mesh"):
        predicted("ulysses", (2, 4))
    with pytest.raises(InvalidArgument, match="schedule"):
        predicted("circle")


def test_links() -> None:
    assert link_named("NVLink") is LINKS["nvlink"]
    assert link_named("25GB/s").bytes_s == link_named("25").bytes_s == 25e9
    for name, link in LINKS.items():
        assert link.source, name
        assert 0 < link.latency_s < 1e-3, name
        assert math.isfinite(link.bytes_s), name
    rates = [LINKS[name].bytes_s for name in ("nvlink", "pcie5", "infiniband", "ethernet")]
    assert rates == sorted(rates, reverse=True)
