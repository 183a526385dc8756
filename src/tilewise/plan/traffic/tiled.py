"""Count what each walk of the tiled algorithm moves for given tiles.

Letters of the formulas: R query rows and K keys of all heads (key heads for K). W_k and W_r are the
keys and the rows of all visited tiles, P the pairs in them. An operand's element has e bytes, a row
statistic's f bytes. ``Visits`` has these sums. With tiles of m x n and no mask, W_k = R N / m and
W_r = Hq/Hk K M / n: larger tiles of queries read keys less often.

Each function is the account of a function of ``reference.tiled`` or ``reference.orders``, byte for
byte. None includes the gradients of the sinks or of tensors that a score reads.
"""

from __future__ import annotations

import torch

from tilewise.errors import InvalidArgument
from tilewise.plan.traffic.count import ENTRY_BYTES, Operand, Pass, Sharing, Traffic, stored_row
from tilewise.plan.traffic.visits import Visits
from tilewise.problem import Problem, Statistics
from tilewise.variants.float8 import output_dtype
from tilewise.variants.lower import statistics_dtype


def statistic_bytes(dtype: torch.dtype) -> int:
    """Return bytes of a row statistic: float32's, or float64's for float64."""
    return statistics_dtype(dtype).itemsize


class _Sizes:
    """The bytes of rows and keys that the formulas are made of."""

    def __init__(self, problem: Problem, visits: Visits) -> None:
        self.problem, self.visits = problem, visits
        self.e, self.f = problem.dtype.itemsize, statistic_bytes(problem.dtype)
        self.head, self.value = problem.head_dim * self.e, problem.value_dim * self.e
        self.out = problem.value_dim * output_dtype(problem.dtype).itemsize
        self.widths = problem.head_dim, problem.value_dim
        # Of a row of keys and one of values; those in 8 bits have a scale.
        self.key_row, self.value_row = (stored_row(problem, width) for width in self.widths)

    def keys_walked(self, times: int = 1) -> tuple[Operand, Operand]:
        """Keys and values that the tiles of queries walk over, each query head by itself."""
        visits = self.visits
        walked = visits.keys_walked * times
        distinct = min(visits.keys, visits.keys_walked)
        return (
            Operand("k", walked * self.key_row, once=distinct * self.key_row),
            Operand("v", walked * self.value_row, once=distinct * self.value_row),
        )

    def keys_held(self) -> tuple[Operand, Operand]:
        """Keys and values of tiles that stay while queries go by."""
        keys = self.visits.keys
        return Operand("k", keys * self.head), Operand("v", keys * self.value)

    def pages_walked(self) -> Operand:
        """Return what the block table says of the keys that the tiles of queries walk over."""
        size, visits = self.problem.page_size, self.visits
        held = sum(each.items * -(-each.keys // size) for each in visits.extents) if size else 0
        distinct = min(held, visits.pages)
        return Operand("block_table", visits.pages * ENTRY_BYTES, once=distinct * ENTRY_BYTES)

    def rows_walked(self, name: str, row_bytes: int) -> Operand:
        """Something of the rows that the tiles of keys walk over."""
        visits = self.visits
        distinct = min(visits.rows, visits.rows_walked)
        return Operand(name, visits.rows_walked * row_bytes, once=distinct * row_bytes)

    def key_gradients(self) -> tuple[Operand, Operand]:
        """Finished gradients of keys and values."""
        keys = self.visits.keys
        return (
            Operand("grad_k", written=keys * self.head),
            Operand("grad_v", written=keys * self.value),
        )

    def delta_pass(self) -> Pass:
        """Two numbers per row, from its statistics and rowsum(dO * O): on GPUs."""
        rows, two = self.visits.rows, 2 * self.f
        operands = (
            Operand("out", rows * self.value),
            Operand("grad_out", rows * self.value),
            Operand("stats", rows * two),
            Operand("delta", written=rows * two),
        )
        return Pass("delta", operands)

    def captured(self, times: int = 1) -> tuple[Operand, ...]:
        """Return the tensors of mask and score, and sinks, for so many walks."""
        visits = self.visits
        return (
            Operand("mask", times * visits.mask_bytes),
            Operand("score", times * visits.score_bytes),
        )

    def sinks(self, times: int = 1) -> tuple[Operand, ...]:
        """One number for every tile of rows."""
        tiles = self.visits.row_tiles * times
        return (Operand("sinks", tiles * self.f),) if self.problem.sinks else ()

    def of_keys(self) -> Sharing:
        """Tiles of queries that walk over the keys of one key head."""
        visits, groups = self.visits, max(1, self.visits.groups)
        size = -(-visits.keys // groups) * (self.key_row + self.value_row)
        return Sharing(groups, -(-visits.row_tiles // groups), size)

    def of_rows(self) -> Sharing:
        """Tiles of keys that walk over the queries and gradients of one key head's group."""
        visits, groups = self.visits, max(1, self.visits.groups)
        size = -(-visits.rows // groups) * (self.head + self.value + 3 * self.f)
        tiles = visits.key_tiles * visits.kv_heads // visits.heads
        return Sharing(groups, -(-tiles // groups), size)


def forward(problem: Problem, visits: Visits, statistics: Statistics = "") -> Traffic:
    """Queries outside, keys inside: FlashAttention-2's algorithm 1, and all our kernels.

    Reads R D e + W_k (D + Dv) e, writes R (Dv e + 3 f).
    """
    size = _Sizes(problem, visits)
    rows, row = visits.rows, visits.rows * size.f
    operands = (
        Operand("q", rows * size.head),
        *size.sinks(),
        *size.keys_walked(),
        size.pages_walked(),
        *size.captured(),
        Operand("out", written=rows * size.out),
        Operand("lse", written=row),
        Operand("stats", written=(3 if statistics else 2) * row),
        Operand("max_logit", written=row if statistics else 0),
        Operand("entropy", written=row if statistics else 0),
        Operand("top_key", written=rows * 8 if statistics == "top1" else 0),
    )
    flops = 2 * visits.pairs * sum(size.widths)
    powers = visits.pairs + visits.rows_walked
    one = Pass("forward", operands, flops, powers, size.of_keys())
    return Traffic((one,), visits.omitted)


def forward_in_parts(
    problem: Problem, visits: Visits, split_keys: int, shared: bool = False
) -> Traffic:
    """Decoding: the keys of a sequence split among programs, whose results are merged.

    With c = ceil(N / split_keys) parts the queries are read c times, and c R (Dv + 2) f bytes of
    partial results are written and read again, if c > 1.

    Args:
        problem: what to compute.
        visits: of its tiles.
        split_keys: keys of a part, a whole number of tiles.
        shared: whether the queries of a group of heads walk together, in blocks of as many rows as
            a tile has, each of which reads the keys once. A tile then holds all queries of a head.
    """
    if split_keys < 1 or split_keys % visits.tile[1]:
        raise InvalidArgument(
            "split_keys", str(split_keys), f"a multiple of the tile's {visits.tile[1]} keys"
        )
    size = _Sizes(problem, visits)
    repeated = tiles = partial = 0
    for each in visits.extents:
        count = max(1, -(-each.keys // split_keys))
        rows = visits.heads * each.items * each.queries
        repeated += rows * count
        tiles += visits.heads * each.items * -(-each.queries // visits.tile[0]) * count
        partial += rows * count * (problem.value_dim + 2) * size.f if count > 1 else 0
    walked: tuple[Operand, ...] = (*size.keys_walked(), size.pages_walked())
    if shared:
        group = visits.heads // visits.kv_heads
        blocks = _shared_blocks(visits, group)
        walked = tuple(each._replace(read=each.read // group * blocks) for each in walked)
    rows = visits.rows
    sinks = (Operand("sinks", tiles * size.f),) if problem.sinks else ()
    attend = (
        Operand("q", repeated * size.head),
        *sinks,
        *walked,
        *size.captured(),
        Operand("partial", written=partial),
    )
    results = (
        Operand("partial", read=partial),
        Operand("out", written=rows * size.out),
        Operand("lse", written=rows * size.f),
        Operand("stats", written=2 * rows * size.f),
    )
    flops = 2 * visits.pairs * sum(size.widths)
    powers = visits.pairs + visits.rows_walked
    passes = Pass("parts", attend, flops, powers, size.of_keys()), Pass("merge", results)
    return Traffic(passes, visits.omitted)


def _shared_blocks(visits: Visits, group: int) -> int:
    """Blocks of rows in which the queries of a group walk together."""
    counts = {each.queries for each in visits.extents if each.items}
    if len(counts) > 1 or max(counts, default=0) > visits.tile[0]:
        raise InvalidArgument(
            "shared",
            f"tiles of {visits.tile[0]} queries for {sorted(counts)} of them",
            "one number of queries, all of them in one tile",
        )
    return max(1, -(-group * max(counts, default=0) // visits.tile[0]))


def forward_keys_outside(
    problem: Problem, visits: Visits, partial_bytes: int | None = None
) -> Traffic:
    """Count FlashAttention's algorithm 1: keys outside; output and statistics go to and fro.

    It reads K (D + Dv) e + W_r D e. Except at the first visit of a row, it also reads the row's Dv
    output numbers and two statistics. It writes these at every visit.

    Calls with sinks are not counted. ``partial_bytes`` are those of a number of the unfinished
    output; None for f.
    """
    size = _Sizes(problem, visits)
    kept = problem.value_dim * (size.f if partial_bytes is None else partial_bytes)
    again = visits.rows_walked - visits.rows_seen
    untouched = visits.rows - visits.rows_seen
    stats = 2 * size.f
    operands = (
        *size.keys_held(),
        size.rows_walked("q", size.head),
        *size.captured(),
        Operand("out", again * kept, again * kept + visits.rows * size.value),
        Operand("stats", again * stats, (visits.rows_walked + untouched) * stats),
    )
    flops = 2 * visits.pairs * sum(size.widths)
    powers = visits.pairs + visits.rows_walked
    one = Pass("forward", operands, flops, powers, size.of_rows())
    return Traffic((one,), visits.omitted)


def backward_by_tiles(
    problem: Problem, visits: Visits, key_visits: Visits | None = None
) -> Traffic:
    """Count three passes, each sum with one owner, as the GPU backend runs them.

    The three passes are:

    * A pass over the rows makes two numbers per row, from the statistics and delta =
      rowsum(dO * O).
    * dQ: each tile of queries walks over the keys.
    * dK and dV: each tile of keys walks over the queries of its group.

    The scores are computed twice: seven products in place of five.

    Args:
        problem: what to compute.
        visits: of the tiles of the walk for dQ.
        key_visits: of those of the walk for dK and dV; None for the same.
    """
    size, held = _Sizes(problem, visits), _Sizes(problem, key_visits or visits)
    rows, two = visits.rows, 2 * size.f
    head_dim, value_dim = size.widths
    by_rows = (
        Operand("q", rows * size.head),
        Operand("grad_out", rows * size.value),
        Operand("delta", rows * two),
        *size.keys_walked(),
        *size.captured(),
        Operand("grad_q", written=rows * size.head),
    )
    by_keys = (
        *held.keys_held(),
        held.rows_walked("q", size.head),
        held.rows_walked("grad_out", size.value),
        held.rows_walked("delta", two),
        *held.captured(),
        *held.key_gradients(),
    )
    walk, pairs = visits.pairs, held.visits.pairs
    products = 2 * pairs * (2 * head_dim + 2 * value_dim)
    return Traffic(
        (
            size.delta_pass(),
            Pass("dq", by_rows, 2 * walk * (2 * head_dim + value_dim), walk, size.of_keys()),
            Pass("dkdv", by_keys, products, pairs, held.of_rows()),
        ),
        visits.omitted,
    )


def backward_in_turns(problem: Problem, visits: Visits) -> Traffic:
    """Keys outside, five products; dQ is float32 sums until a last pass: Hopper's fused kernel.

    The first visit of a row writes its sums. Each later one adds to them, which reads them too. The
    last pass reads the sums of the rows that were visited, and writes dQ.
    """
    size = _Sizes(problem, visits)
    head_dim, value_dim = size.widths
    kept, two = head_dim * size.f, 2 * size.f
    walked, seen = visits.rows_walked, visits.rows_seen
    walk = (
        *size.keys_held(),
        size.rows_walked("q", size.head),
        size.rows_walked("grad_out", size.value),
        size.rows_walked("delta", two),
        *size.captured(),
        Operand("sums", (walked - seen) * kept, walked * kept),
        *size.key_gradients(),
    )
    last = (Operand("sums", seen * kept), Operand("grad_q", written=visits.rows * size.head))
    flops = 2 * visits.pairs * (3 * head_dim + 2 * value_dim)
    passes = (
        size.delta_pass(),
        Pass("dqkv", walk, flops, visits.pairs, size.of_rows()),
        Pass("narrow", last),
    )
    return Traffic(passes, visits.omitted)


def backward_keys_outside(
    problem: Problem,
    visits: Visits,
    partial_bytes: int | None = None,
    delta: str = "pass",
    computed: Visits | None = None,
) -> Traffic:
    """Keys outside, five products; dQ of a row is a sum in slow memory: the CPU core's order.

    Args:
        problem: what to compute.
        visits: of its tiles; a tile of keys is all that stays while the queries go by.
        partial_bytes: of a number of the unfinished dQ; None for f.
        delta: where rowsum(dO * O) comes from: a "pass" of its own, the "first" visit of a tile of
            rows, which stores it, or "each" visit again (algorithm 4 to the letter).
        computed: visits of the blocks in which a tile is computed; None for the tile as a whole.
    """
    size = _Sizes(problem, visits)
    head_dim, value_dim = size.widths
    kept = head_dim * (size.f if partial_bytes is None else partial_bytes)
    rows, walked, seen = visits.rows, visits.rows_walked, visits.rows_seen
    again = walked - seen
    walk: tuple[Operand, ...] = (
        *size.keys_held(),
        size.rows_walked("q", size.head),
        size.rows_walked("grad_out", size.value),
        size.rows_walked("stats", 2 * size.f),
        *size.captured(),
        Operand("grad_q", again * kept, again * kept + rows * size.head),
        *size.key_gradients(),
    )
    before: tuple[Pass, ...] = ()
    if delta == "pass":
        first = (
            Operand("out", rows * size.value),
            Operand("grad_out", rows * size.value),
            Operand("delta", written=rows * size.f),
        )
        before = (Pass("delta", first),)
        walk += (size.rows_walked("delta", size.f),)
    elif delta == "first":
        walk += (Operand("out", seen * size.value), Operand("delta", again * size.f, seen * size.f))
    elif delta == "each":
        walk += (size.rows_walked("out", size.value),)
    else:
        raise InvalidArgument("delta", repr(delta), '"pass", "first" or "each"')
    pairs = (computed or visits).pairs
    flops = 2 * pairs * (3 * head_dim + 2 * value_dim)
    one = Pass("dqkv", walk, flops, pairs, size.of_rows())
    return Traffic((*before, one), visits.omitted)


def backward_rows_outside(problem: Problem, visits: Visits, lse_gradient: bool = False) -> Traffic:
    """Queries outside, the sums of keys in slow memory: the order of ``reference.tiled``.

    Two walks over the keys for every tile of queries, one of them for delta. The gradients of keys
    are summed in the compute dtype, from zeros, and become the operands' dtype in the end.
    """
    size = _Sizes(problem, visits)
    rows, keys = visits.rows, visits.keys
    head_dim, value_dim = size.widths
    narrow = problem.dtype.itemsize != size.f
    # A group's share is summed before it is added.
    added = visits.keys_walked * visits.kv_heads // visits.heads
    gradients = [
        Operand(
            "grad_q",
            rows * head_dim * size.f * narrow,
            rows * head_dim * size.f + rows * size.head * narrow,
        )
    ]
    for name, width in (("grad_k", head_dim), ("grad_v", value_dim)):
        wide = width * size.f
        written = (added + keys) * wide + keys * width * size.e * narrow
        gradients.append(Operand(name, added * wide + keys * wide * narrow, written))
    operands = (
        Operand("q", rows * size.head),
        *size.sinks(),
        Operand("grad_out", rows * size.value),
        Operand("stats", 2 * rows * size.f),
        Operand("grad_lse", rows * size.f if lse_gradient else 0),
        *size.keys_walked(2),
        *size.captured(2),
        *gradients,
    )
    flops = 2 * visits.pairs * (4 * head_dim + 3 * value_dim)
    one = Pass("backward", operands, flops, 2 * visits.pairs, size.of_keys())
    return Traffic((one,), visits.omitted)
