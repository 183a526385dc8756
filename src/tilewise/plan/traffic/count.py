"""The parts of an account of bytes: operands, passes, their sum, and its seconds on a chip.

A **pass** is one walk over the operands, as one kernel makes it. Bytes go between slow and fast
memory. When several tiles walk over an operand, ``read`` counts every one of these walks, and
``once`` each byte a single time. The savings of a cache in between lie between the two
(``behind``).

``predict`` turns an account into seconds. The model assumes that memory, matrix products and
exponentials all run at once inside a pass, each at its ceiling. So a pass takes as long as the
longest of them. Passes follow one another and do not overlap. The model leaves out launch costs and
how far kernels stay below the ceilings. So it is a lower bound; good kernels come within some tens
of percent of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from tilewise.chips import Chip
from tilewise.errors import InvalidArgument
from tilewise.problem import Problem

ENTRY_BYTES = 4  # of an entry of a block table
SCALE_BYTES = 4  # of a row in 8 bits


def stored_row(problem: Problem, width: int) -> int:
    """Return bytes of a row of keys or values, with its scale where pages are in 8 bits."""
    if problem.stored is None:
        return width * problem.dtype.itemsize
    return width * problem.stored.itemsize + SCALE_BYTES


class Operand(NamedTuple):
    """The bytes of one operand in one pass.

    Args:
        name: as in ``Operands``, ``Result`` and ``Grads``.
        read: from slow to fast memory.
        written: from fast to slow memory.
        once: of ``read``, what there would be if nothing were read twice; None for all of it.
    """

    name: str
    read: int = 0
    written: int = 0
    once: int | None = None

    @property
    def distinct(self) -> int:
        """Return bytes read at least once."""
        return self.read if self.once is None else self.once


class Sharing(NamedTuple):
    """Which tiles walk over the same operand.

    Args:
        groups: in so many groups of tiles, each with memory of its own to walk over;
        walks: of so many tiles each,
        bytes_each: over so many bytes.
    """

    groups: int
    walks: int
    bytes_each: int


class Pass(NamedTuple):
    """One walk over the operands.

    Args:
        name: what it computes.
        operands: what it moves.
        flops: operations of its matrix products; a multiply-add is two.
        exponentials: powers that it takes.
        sharing: who walks over the same memory; None where nothing is read twice.
        held: bytes of the cache that its tiles and what goes by take up while they walk; 0 where
            they have memory of their own, registers or a GPU's shared memory.
        dtype: of its products, e.g. "bfloat16", where it is not that of the operands.
    """

    name: str
    operands: tuple[Operand, ...]
    flops: int = 0
    exponentials: int = 0
    sharing: Sharing | None = None
    held: int = 0
    dtype: str = ""

    @property
    def bytes(self) -> int:
        """Read and written."""
        return sum(each.read + each.written for each in self.operands)


class Traffic(NamedTuple):
    """An account of bytes.

    Args:
        passes: one after the other.
        omitted: what is not in it, in words.
    """

    passes: tuple[Pass, ...]
    omitted: tuple[str, ...] = ()

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Return each operand once, summed over the passes, largest first."""
        return merged(operand for each in self.passes for operand in each.operands)

    @property
    def read(self) -> int:
        """Return bytes from slow to fast memory."""
        return sum(each.read for each in self.operands)

    @property
    def written(self) -> int:
        """Return bytes from fast to slow memory."""
        return sum(each.written for each in self.operands)

    @property
    def bytes(self) -> int:
        """Read and written."""
        return self.read + self.written

    @property
    def flops(self) -> int:
        """Operations of matrix products."""
        return sum(each.flops for each in self.passes)

    @property
    def exponentials(self) -> int:
        """Powers taken."""
        return sum(each.exponentials for each in self.passes)

    @property
    def intensity(self) -> float:
        """Operations for a byte moved."""
        return self.flops / self.bytes if self.bytes else 0.0

    def plus(self, other: Traffic) -> Traffic:
        """Return both, one after the other."""
        omitted = tuple(dict.fromkeys(self.omitted + other.omitted))
        return Traffic(self.passes + other.passes, omitted)

    def behind(self, cache_bytes: int | None, programs: int) -> Traffic:
        """Return the part of this traffic that reaches the memory behind a cache.

        Tiles that share an operand run next to one another, ``programs`` at a time. The groups in
        flight walk over some operands, and the tiles hold others in the cache. If all of these fit,
        each byte is fetched once. If not, the groups in flight walk in step, and each byte is
        fetched once per round of them.

        Writes, and reads by one tile alone, go through. For one program cachegrind has counted this
        (``tilelab.counted``); that several programs keep step is an assumption.

        Args:
            cache_bytes: of the cache; None for no cache.
            programs: how many tiles are worked on at once.
        """
        return Traffic(tuple(_behind(one, cache_bytes, programs) for one in self.passes))


def _behind(one: Pass, cache_bytes: int | None, programs: int) -> Pass:
    if one.sharing is None or cache_bytes is None:
        return one
    groups, walks, bytes_each = one.sharing
    at_once = min(groups, -(-programs // max(1, walks)))
    times = 1 if at_once * bytes_each + one.held <= cache_bytes else -(-walks // max(1, programs))
    operands = [each._replace(read=min(each.read, each.distinct * times)) for each in one.operands]
    return one._replace(operands=tuple(operands))


def merged(operands: Iterable[Operand]) -> tuple[Operand, ...]:
    """Each name once, its bytes added up, largest first; those without bytes are left out."""
    found: dict[str, Operand] = {}
    for each in operands:
        before = found.get(each.name, Operand(each.name, once=0))
        found[each.name] = Operand(
            each.name,
            before.read + each.read,
            before.written + each.written,
            before.distinct + each.distinct,
        )
    moving = [each for each in found.values() if each.read or each.written]
    return tuple(sorted(moving, key=lambda each: -(each.read + each.written)))


Bound = Literal["memory", "matrix", "exponential"]


class Seconds(NamedTuple):
    """How long an account takes on a chip.

    Args:
        memory, matrix, exponential: what each ceiling alone asks for, over all passes.
        total: pass after pass the longest of the three.
        bound: which of them the most of ``total`` is.
    """

    memory: float
    matrix: float
    exponential: float
    total: float
    bound: Bound


def predict(traffic: Traffic, chip: Chip, dtype: str) -> Seconds:
    """Return the time of an account.

    Args:
        traffic: bytes as they reach memory (``Traffic.behind`` takes the caches out).
        chip: with bandwidth and peaks.
        dtype: of the products of passes that name none of their own, e.g. "bfloat16".

    Raises:
        InvalidArgument: the chip's row lacks a figure.
    """
    sums, held = [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]
    for one in traffic.passes:
        ceilings = _ceilings(chip, one.dtype or dtype)
        amounts = (one.bytes, one.flops, one.exponentials)
        times = [amount / rate for amount, rate in zip(amounts, ceilings, strict=True)]
        longest = max(range(3), key=lambda index: times[index])
        held[longest] += times[longest]
        sums = [total + share for total, share in zip(sums, times, strict=True)]
    names: tuple[Bound, ...] = ("memory", "matrix", "exponential")
    bound = names[max(range(3), key=lambda index: held[index])]
    memory, matrix, exponential = sums
    return Seconds(memory, matrix, exponential, sum(held), bound)


def balance(chip: Chip, dtype: str) -> float:
    """Operations for a byte at which memory and matrix products take as long: the ridge."""
    bandwidth, flops, _ = _ceilings(chip, dtype)
    return flops / bandwidth


def _ceilings(chip: Chip, dtype: str) -> tuple[float, float, float]:
    found = (
        ("memory bandwidth", chip.bandwidth_bytes_s),
        (f"peak in {dtype}", chip.peak(dtype)),
        ("rate of exponentials", chip.exponentials_s),
    )
    rates = []
    for what, rate in found:
        if not rate:
            fix = "Measure it: `tilewise doctor --peak`." if chip.kind == "cpu" else ""
            raise InvalidArgument("chip", f"{chip.name}, without a {what}", f"a known {what}", fix)
        rates.append(rate)
    return rates[0], rates[1], rates[2]
