"""Chip families, and the blocks that each kernel works in on them: one table, no measuring.

A block decides how a row is rounded. So it depends only on the family, the pass, the dtype, the
widths, the layout and the kind of mask and score. Blocks that ``tilewise tune`` measured on the
chip come before the table (``plan/tuned.py``), and depend on the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch

from tilewise.plan.tuned import NOTHING, Found, Place
from tilewise.plan.tuned import Blocks as Blocks  # kernels take it from here
from tilewise.problem import Problem
from tilewise.variants.float8 import FLOAT8
from tilewise.variants.program import EXPR, RAW, Instr

# The last three have no rows in the table: "fused" is "dq" and "dkdv" in one kernel, "grouped" is
# "forward" in groups of warps, and "grouped8" is that of float8. See ``UNPROVEN``.
Pass: TypeAlias = Literal["forward", "dkdv", "dq", "decode", "fused", "grouped", "grouped8"]
MEASURED: tuple[Pass, ...] = get_args(Pass)
PASSES: tuple[Pass, ...] = MEASURED[:4]

LARGEST_WIDTH = 512
# Of queries and keys in the forward pass: latent vectors of 512 and what is rotated. The columns
# beyond LARGEST_WIDTH are a tile of their own, the tail, so that a tile need not have 1024.
WIDEST_KEYS = 576
_FEW = 16  # queries of a head, up to which its keys are split among programs
_LEAST = 16  # of a block's sides: what matrix instructions take
_INTERPRETER = "interpreter"
# Of the tiles for dK and dV of key lists: their rows, and what four warps have registers for.
_LISTED_ROWS, _LISTED_PAIRS, _LISTED_WIDTH = 64, 1024, 128


class Parts(NamedTuple):
    """Widths beyond which products of rows are summed over parts of their columns.

    Where a thread's registers hold whole rows of operands, wide ones do not fit. In parts they are
    read twice: from the caches, for the scores, and whole for the sums.

    Args:
        forward, dkdv, dq: of each pass the widest of D and Dv that is multiplied whole, with 16
            bits.
        forward_single, single: of the forward pass and of the others, with float32.
        columns: of a part.
        listed: as ``dkdv`` for the kernel of key lists, which has more rows to hold; not more.
    """

    forward: int
    dkdv: int
    dq: int
    forward_single: int
    single: int
    columns: int = 16
    listed: int = LARGEST_WIDTH

    def of(self, kernel: str, dtype: torch.dtype, head_dim: int, value_dim: int) -> int:
        """Return the columns of a part; 0 where products are not summed in parts."""
        wide = dtype.itemsize > 2
        whole = {
            "forward": self.forward_single if wide else self.forward,
            "dkdv": self.single if wide else self.dkdv,
            "dq": self.single if wide else self.dq,
            "listed": self.single if wide else min(self.dkdv, self.listed),
        }
        widest = max(padded(min(head_dim, LARGEST_WIDTH)), padded(value_dim))
        return self.columns if widest > whole.get(kernel, LARGEST_WIDTH) else 0


class Family(NamedTuple):
    """Chips that run the same machine code.

    Args:
        name: "sm_90", "gfx942" and so on.
        maker: "cuda" or "hip"; "" for Triton's interpreter.
        shared_bytes: on-chip memory that one program may take.
        unit: the matrix instructions.
        warp: threads in a warp.
        table: whose rows of the table it takes.
        fp8: how it multiplies float8 e4m3: "halves", as float16, for want of instructions or of
            a compiler that makes them; "short", by units that add with few bits; "whole", by
            units that add in float32.
        parts: None where registers hold whole rows of operands of every width.
        exact: whether its code runs on this very chip only: Triton compiles for "sm_90a".
        descriptors: whether its copy engine (TMA) reads the blocks of key lists; of sm_120 such
            kernels spill.
    """

    name: str
    maker: str
    shared_bytes: int
    unit: str
    warp: int
    table: str
    fp8: str
    parts: Parts | None = None
    exact: bool = False
    descriptors: bool = False


class Splitting(NamedTuple):
    """Split of the keys of a decode call: by their own number alone.

    A split is the least multiple of ``least`` keys of which ``most`` are enough.

    Args:
        least: keys of a split, a multiple of every block of keys of the pass "decode".
        most: splits, a power of two.
    """

    least: int
    most: int

    def size(self, keys: int) -> int:
        """Return how many keys a split of this many keys has."""
        return self.least * max(1, -(-keys // (self.least * self.most)))

    def splits(self, keys: int) -> int:
        """Return how many splits this many keys make, at least one."""
        return max(1, -(-keys // self.size(keys)))

    def splits_within(self, keys: int) -> int:
        """Return the most splits of any sequence of up to so many keys."""
        return max(1, min(self.most, -(-keys // self.least)))


# 8 heads of keys of one sequence make 256 programs of 8k keys, and 512 of 32k: two and four for
# each multiprocessor of the largest chips, enough to keep a memory busy. Longer sequences and
# larger batches need no smaller splits; each adds a row of floats per query, written and read
# again: of 512 keys, with D = 128 and four heads to a group, 1.6 % of the bytes.
_SPLITTING = Splitting(256, 64)
_SPLITTING_INTERPRETED = Splitting(64, 4)

_KB = 1024
_CDNA4_PARTS = Parts(LARGEST_WIDTH, 256, LARGEST_WIDTH, LARGEST_WIDTH, 256, 32)
_RDNA3_PARTS = Parts(128, 64, 64, 32, 32, listed=32)
_RDNA4_PARTS = Parts(LARGEST_WIDTH, 128, 128, 32, 32, listed=64)
FAMILIES = {
    family.name: family
    for family in (
        Family("sm_75", "cuda", 64 * _KB, "mma", 32, "turing", "halves"),
        Family("sm_80", "cuda", 163 * _KB, "mma", 32, "ampere", "halves"),
        Family("sm_86", "cuda", 99 * _KB, "mma", 32, "small", "halves"),
        Family("sm_89", "cuda", 99 * _KB, "mma", 32, "small", "short"),
        Family("sm_90", "cuda", 227 * _KB, "wgmma", 32, "hopper", "short", None, True, True),
        Family("sm_100", "cuda", 227 * _KB, "tcgen05", 32, "blackwell", "whole", None, True, True),
        Family("sm_120", "cuda", 99 * _KB, "mma", 32, "small", "whole", exact=True),
        Family("gfx90a", "hip", 64 * _KB, "mfma", 64, "cdna", "halves"),
        Family("gfx942", "hip", 64 * _KB, "mfma", 64, "cdna", "halves"),
        Family("gfx950", "hip", 160 * _KB, "mfma", 64, "cdna4", "whole", _CDNA4_PARTS),
        Family("gfx1100", "hip", 64 * _KB, "wmma", 32, "rdna3", "halves", _RDNA3_PARTS),
        Family("gfx1201", "hip", 64 * _KB, "wmma", 32, "rdna4", "whole", _RDNA4_PARTS),
        Family(_INTERPRETER, "", 1024 * _KB, "", 32, _INTERPRETER, "whole", descriptors=True),
    )
}

# Tiles of the Gluon kernels (``groups.py``) by family, pass and width, "pass+" with a score; stages
# are those of a ring. The forward pass gains nothing with a score, and D = 64 in no case.
_GROUPED = {
    ("sm_90", "forward", 128): Blocks(128, 128, 8, 2),
    ("sm_90", "dkdv", 64): Blocks(64, 128, 8, 2),
    ("sm_90", "dkdv", 128): Blocks(64, 128, 8, 3),
    ("sm_90", "dkdv+", 64): Blocks(32, 128, 8, 4),
    ("sm_90", "dkdv+", 128): Blocks(32, 128, 8, 4),
}
# Tiles of kernels that no GPU has run yet, by pass, family and width. They are taken only where
# ``tilewise tune`` measured that they are faster on the chip, or where they are asked for.
UNPROVEN: dict[tuple[Pass, str, int], Blocks] = {
    ("fused", "sm_90", 64): Blocks(64, 128, 8, 3),
    ("fused", "sm_90", 128): Blocks(64, 128, 8, 2),
    ("grouped", "sm_90", 256): Blocks(128, 64, 8, 2),
    ("grouped", "sm_100", 64): Blocks(256, 128, 8, 4),
    ("grouped", "sm_100", 128): Blocks(256, 128, 8, 2),
    ("grouped8", "sm_90", 64): Blocks(128, 128, 8, 4),
    ("grouped8", "sm_90", 128): Blocks(128, 128, 8, 4),
}
_EDGE = 128  # what edges of bands are multiples of, so that no tile has keys that all rows hide

# The widest of D and Dv, padded, up to which a row of the table holds.
WIDTHS = (64, 128, 256, LARGEST_WIDTH)
KINDS = ("plain", "+", "*")  # of mask and score: see the table
_Row: TypeAlias = tuple[Blocks, Blocks, Blocks, Blocks]


def _rows(text: str) -> dict[tuple[str, str], _Row]:
    """Return the lines "table pass", then "queries x keys / warps / stages" for each of WIDTHS."""
    rows = {}
    for line in text.strip().splitlines():
        table, name, *cells = line.split()
        first, second, third, fourth = (
            Blocks(*(int(number) for number in re.split("[x/]", cell))) for cell in cells
        )
        rows[table, name] = (first, second, third, fourth)
    return rows


# "pass+" is of calls that are heavy, "pass*" of masks that may leave blocks in which nothing
# attends without saying where; a row that is missing is that of the name before it. "pass8" is of
# float8, whatever the call, on chips whose other rows spill with it, "pass~" of pages in 8 bits,
# "pass@" of other pages without a score, with the stages that dense keys would have, "pass^" of
# scores that read an element of a tensor for each pair.
# 16-bit operands. float32 ("single") is multiplied without matrix instructions, or with tf32's. The
# interpreter has no registers to run out of; small blocks put many edges into small tests.
_TABLE = _rows(
    """
    turing       forward  64x32/4/1     64x32/4/1     32x32/4/1     16x16/4/1
    ampere       forward  128x64/4/3    128x64/8/3    64x32/8/2     32x32/8/2
    small        forward  128x64/8/3    128x32/8/3    64x32/8/2     32x32/8/1
    hopper       forward  128x64/4/3    64x64/4/3     128x64/8/2    32x32/8/2
    blackwell    forward  128x128/8/2   128x64/8/3    128x32/8/2    32x32/8/2
    cdna         forward  128x64/4/1    128x32/4/1    64x32/8/1     32x16/8/1
    cdna4        forward  128x64/4/2    128x64/8/2    64x32/8/2     32x32/8/1
    rdna3        forward  64x32/4/1     64x32/8/1     32x32/8/1     16x16/8/1
    rdna4        forward  128x32/8/1    64x32/8/1     32x32/8/1     16x16/8/1
    turing       dkdv     32x32/4/1     32x32/8/1     16x32/8/1     16x16/8/1
    ampere       dkdv     32x128/8/3    32x128/8/3    32x32/8/1     16x16/8/1
    small        dkdv     32x64/8/1     32x64/8/1     16x32/8/1     16x16/8/1
    hopper       dkdv     64x64/4/2     32x128/8/3    32x32/4/2     16x16/8/2
    blackwell    dkdv     64x128/8/3    32x128/8/3    16x32/8/3     32x16/8/1
    cdna         dkdv     32x128/4/1    16x64/4/1     16x32/8/1     16x16/4/1
    cdna4        dkdv     32x64/8/1     32x32/4/1     16x32/8/1     16x32/8/1
    rdna3        dkdv     16x32/4/1     32x32/4/1     32x32/8/1     16x16/8/1
    rdna4        dkdv     32x32/8/1     16x32/8/1     32x32/8/1     16x16/8/1
    turing       dq       32x32/4/1     32x32/8/1     32x16/8/1     16x16/8/1
    ampere       dq       128x64/8/3    128x32/8/3    32x32/8/1     16x16/8/1
    ampere       dq+      128x32/8/3    128x32/8/3    32x32/8/1     16x16/8/1
    small        dq       64x32/4/2     64x64/8/2     64x16/8/1     16x16/8/1
    hopper       dq       64x64/4/3     128x64/8/3    128x32/8/2    32x16/8/1
    blackwell    dq       128x64/8/2    64x64/8/2     64x32/8/1     32x16/8/1
    cdna         dq       128x32/4/1    64x32/2/1     32x16/8/1     16x16/4/1
    cdna4        dq       64x64/8/1     64x32/8/1     32x16/8/1     16x16/4/1
    rdna3        dq       32x32/8/1     32x16/8/1     32x32/8/1     16x16/8/1
    rdna4        dq       32x32/8/1     32x16/8/1     32x32/8/1     16x16/8/1
    small        forward+ 64x64/8/3     64x64/8/3     64x32/8/2     32x32/8/1
    hopper       decode+  16x128/4/3    16x32/4/3     16x64/8/2     16x16/4/2
    small        decode+  16x32/4/3     16x32/4/2     16x32/8/2     16x16/4/2
    small        decode*  16x32/4/3     16x32/8/3     16x32/8/2     16x16/4/2
    ampere       decode*  16x32/4/3     16x32/4/3     16x32/8/2     16x16/4/2
    hopper       forward+ 64x64/4/3     128x64/8/3    128x32/8/3    32x32/8/2
    hopper       forward* 128x64/4/2    128x32/8/3    64x16/8/3     32x32/8/2
    hopper       dkdv*    64x64/4/2     32x128/8/2    16x32/8/1     16x16/8/2
    blackwell    dkdv+    32x64/8/3     32x64/8/3     16x32/8/3     32x16/8/1
    blackwell    dq+      128x64/8/2    64x32/8/2     64x32/8/1     32x16/8/1
    cdna4        dkdv+    32x32/4/1     32x32/4/1     16x32/8/1     16x32/8/1
    rdna3        forward+ 64x32/4/1     64x16/8/1     32x32/8/1     16x16/8/1
    ampere       forward8 128x64/4/3    64x64/8/3     64x32/8/2     32x32/8/2
    hopper       forward8 128x128/8/2   128x128/8/2   64x64/8/2     32x32/8/2
    cdna         forward* 128x64/4/1    128x32/8/1    64x32/8/1     32x16/8/1
    cdna4        forward^ 128x64/4/2    128x16/8/2    64x16/8/2     64x16/4/2
    rdna3        forward^ 64x16/4/1     64x16/8/1     32x32/8/1     16x16/8/1
    ampere       forward~ 128x64/8/3    64x64/8/3     64x32/8/2     32x32/8/2
    blackwell    decode~  16x64/4/3     16x32/4/3     16x64/8/2     16x16/4/2
    cdna         forward~ 128x64/8/1    128x32/8/1    64x32/8/1     32x16/8/1
    cdna4        forward~ 128x64/8/2    64x32/8/2     64x32/8/2     64x16/8/2
    cdna         forward8 128x64/4/1    128x32/8/1    64x32/8/1     32x16/8/1
    rdna3        forward8 64x32/4/1     32x32/8/1     16x16/8/1     16x16/8/1
    cdna         dkdv+    16x64/4/1     16x64/4/1     16x32/8/1     16x16/4/1
    ampere       forward+ 128x64/8/3    128x64/8/3    64x32/8/2     32x32/8/2
    ampere       forward* 128x32/8/3    128x32/8/3    32x16/8/3     32x32/8/2
    ampere       dkdv+    16x128/8/3    16x128/8/3    32x32/8/1     16x16/8/1
    ampere       dkdv*    32x64/8/1     32x64/8/2     32x32/8/1     16x16/8/1
    ampere       dq*      128x32/8/3    64x32/8/2     32x32/8/1     16x16/8/1
    small        forward* 64x64/8/3     128x16/8/3    32x16/8/3     32x32/8/1
    small        dq+      64x32/4/2     32x32/8/2     32x16/4/3     16x16/8/1
    small        dkdv+    16x128/8/1    32x64/8/1     16x32/8/1     16x16/8/1
    small        dkdv*    32x64/8/1     32x64/8/1     16x32/8/1     16x16/8/1
    small        dq*      64x32/4/2     64x64/8/2     32x16/8/1     16x16/8/1
    hopper       dq*      64x64/4/3     128x32/8/3    32x16/8/3     32x16/8/1
    ampere:single forward  32x32/4/2     64x16/8/3     32x16/8/1     16x16/8/1
    ampere:single dkdv+    16x32/8/1     16x32/8/1     16x16/8/1     16x16/8/1
    ampere:single dq+      32x32/8/1     32x16/8/1     16x16/8/1     16x16/8/1
    small:single forward   64x32/8/2     32x16/8/2     32x16/8/1     16x16/8/1
    small:single dkdv+    16x64/8/1     16x32/8/1     16x16/8/1     16x16/8/1
    sm_120:single dkdv+   32x32/8/1     16x32/8/1     16x16/8/1     16x16/8/1
    sm_120       dq+      64x32/4/2     32x32/8/3     32x16/8/2     16x16/8/1
    sm_120       decode   16x32/4/3     16x32/4/3     16x32/4/2     16x16/4/2
    hopper:single forward  64x16/8/3     32x16/8/2     32x16/8/1     16x16/8/1
    hopper:single dkdv+    32x32/4/2     16x32/8/1     16x16/8/1     16x16/8/1
    cdna:single  dkdv     32x32/4/1     16x32/8/1     16x16/4/1     16x16/4/1
    cdna:single  dq       32x32/4/1     32x16/8/1     16x16/4/1     16x16/4/1
    cdna4:single dkdv     32x32/4/1     16x32/8/1     16x16/4/1     16x16/4/1
    cdna4:single dq       32x32/4/1     32x16/8/1     16x16/4/1     16x16/4/1
    blackwell    forward* 128x64/8/2    128x32/8/3    128x16/8/3    32x32/8/2
    blackwell    dq*      128x64/8/2    128x32/8/3    64x16/8/3     32x16/8/1
    blackwell:single forward  64x16/8/3     32x16/8/2     32x16/8/1     16x16/8/1
    blackwell:single dkdv+    32x32/8/1     16x32/8/1     16x16/8/1     16x16/8/1
    rdna3:single forward  32x32/8/1     16x16/8/1     16x16/16/1    16x16/16/1
    rdna3:single dkdv     16x32/8/1     16x32/8/1     16x16/8/1     16x16/8/1
    rdna3:single dq       32x32/8/1     32x16/8/1     16x16/8/1     16x16/8/1
    rdna4:single forward  32x32/8/1     16x16/8/1     16x16/16/1    16x16/16/1
    rdna4:single dkdv     16x32/8/1     16x32/8/1     16x16/8/1     16x16/8/1
    rdna4:single dq       32x32/8/1     32x32/8/1     16x16/8/1     16x16/8/1
    cdna4        forward+ 128x64/4/2    128x32/8/2    64x32/8/2     64x16/8/2
    cdna4:single forward  32x32/4/2     32x16/8/2     32x16/8/1     16x16/4/2
    single       forward  32x32/4/2     32x16/8/2     32x16/8/1     16x16/8/1
    single       dkdv     32x32/4/1     16x32/8/1     16x16/8/1     16x16/8/1
    single       dq       32x32/4/1     32x16/8/1     16x16/8/1     16x16/8/1
    turing       decode   16x64/4/1     16x64/4/1     16x32/4/1     16x16/4/1
    ampere       decode   16x64/4/3     16x32/4/3     16x32/8/2     16x16/4/2
    small        decode   16x32/4/3     16x32/4/3     16x32/8/2     16x16/4/2
    hopper       decode   16x128/4/4    16x64/4/4     16x64/8/2     16x16/4/2
    hopper       decode@  16x128/4/4    16x64/4/4     16x64/8/2     16x16/4/2
    ampere       forward@ 128x64/4/3    128x64/8/3    64x32/8/2     32x32/8/2
    rdna3        forward@ 64x32/4/1     64x32/8/1     32x16/8/1     16x16/8/1
    blackwell    decode   16x128/4/3    16x64/4/3     16x64/8/2     16x16/4/2
    cdna         decode   16x64/4/1     16x64/4/1     16x32/4/1     16x16/4/1
    cdna4        decode   16x64/4/2     16x64/4/2     16x32/4/2     16x32/4/1
    rdna3        decode   16x64/4/1     16x32/4/1     16x16/8/1     16x16/8/1
    rdna3        decode+  16x64/4/1     16x16/4/1     16x16/8/1     16x16/8/1
    rdna4        decode   16x64/4/1     16x32/4/1     16x16/4/1     16x16/4/1
    single       decode   16x16/4/2     16x16/8/2     16x16/8/1     16x16/8/1
    rdna4:single decode   16x16/4/2     16x16/8/1     16x16/8/1     16x16/8/1
    interpreter  forward  64x32/4/1     64x32/4/1     64x32/4/1     64x32/4/1
    interpreter  decode   16x32/4/1     16x32/4/1     16x32/4/1     16x32/4/1
    interpreter  dkdv     32x64/4/1     32x64/4/1     32x64/4/1     32x64/4/1
    interpreter  dq       64x32/4/1     64x32/4/1     64x32/4/1     64x32/4/1
    """
)


class Config(NamedTuple):
    """Facts about the chip that the host code of a pass needs.

    Args:
        family: a name of FAMILIES.
        precision: of products of float32: "ieee", or "tf32" where torch allows it.
        overrides: (pass, blocks) pairs that stand before everything, for whatever is asked: of the
            tests, the gate and the tuner.
        measured: blocks by place that stand before the table.
        parts: as in FAMILIES.
    """

    family: str
    precision: str = "ieee"
    overrides: tuple[tuple[str, Blocks], ...] = ()
    measured: Found = NOTHING
    parts: Parts | None = None

    def blocks(self, pass_name: Pass, problem: Problem) -> Blocks:
        """Return the blocks of a pass for a problem."""
        for name, blocks in self.overrides:
            if name == pass_name:
                return blocks
        found = self._of_table(pass_name, problem)
        if self.measured.entries and problem.stored is None:
            entry = self.measured.entries.get(place_of(pass_name, problem))
            if entry is not None:
                found = entry.blocks
        if not _reads_by_pair(problem):
            return found
        # A table's element for each pair of a block takes as many registers as a scattered walk.
        least = self._of_table(pass_name, problem, by_pair=True)
        return min(found, least, key=lambda each: each.queries * each.keys)

    def _of_table(self, pass_name: Pass, problem: Problem, by_pair: bool = False) -> Blocks:
        return tiles_for(
            self.family,
            pass_name,
            problem.dtype,
            problem.head_dim,
            problem.value_dim,
            _is_heavy(problem),
            by_pair or _is_scattered(problem),
            problem.stored is not None,
            problem.page_size > 0 and not _is_heavy(problem._replace(page_size=0)),
            by_pair,
        )

    def in_groups(self, pass_name: Pass, problem: Problem) -> Blocks | None:
        """Return the tiles of a pass in groups of warps; None where the Triton kernel does it.

        The kernels in groups load whole tiles by the chip's copy engine. So rows that the mask
        hides from all of a tile must not be in it: what they hold would count.
        """
        if any(name == pass_name for name, _ in self.overrides):
            return None
        name = f"{pass_name}+" if problem.score else pass_name
        eight = problem.dtype is FLOAT8
        blocks = None if eight else _GROUPED.get((self.family, name, problem.head_dim))
        if name == "forward":
            blocks = blocks or self._unproven("grouped8" if eight else "grouped", problem)
        plain = (
            problem.layout == "dense"
            and problem.value_dim == problem.head_dim
            and problem.dtype in (torch.bfloat16, torch.float16, FLOAT8)
            and not (problem.dropout_p or problem.page_size or calls_raw(problem))
            and _has_even_tiles(problem)
        )
        return blocks if plain else None

    def fused(self, problem: Problem) -> Blocks | None:
        """Return the tiles of the kernel that makes all gradients; None where two kernels do.

        It is one of ``UNPROVEN``. It serves what ``in_groups`` serves but
        scores and, at D = 128, bands that are joined, which spill, and lists of tiles: their order
        would make programs wait.
        """
        listed = any(instr.op == "tiles" for instr in problem.mask)
        spills = problem.score or (len(problem.mask) > 1 and problem.head_dim > 64)
        asked = dict(self.overrides)
        if spills or listed or "dq" in asked or not self.in_groups("dkdv", problem):
            return None
        return self._unproven("fused", problem)

    def _unproven(self, pass_name: Pass, problem: Problem) -> Blocks | None:
        if (pass_name, self.family, problem.head_dim) not in UNPROVEN:
            return None
        entry = self.measured.entries.get(place_of(pass_name, problem))
        return dict(self.overrides).get(pass_name) or (None if entry is None else entry.blocks)

    def part(self, kernel: str, problem: Problem) -> int:
        """Return how many columns of its operands a kernel multiplies at a time; 0 for all.

        Args:
            kernel: a pass, or "listed" for that of dK and dV of key lists.
            problem: of the call. Over pages, the forward pass multiplies whole rows.
        """
        forward_of_pages = problem.page_size and kernel == "forward"
        if self.parts is None or problem.dtype is FLOAT8 or forward_of_pages:
            return 0
        return self.parts.of(kernel, problem.dtype, problem.head_dim, problem.value_dim)

    def splitting(self) -> Splitting:
        """Return how the pass "decode" splits keys."""
        return _SPLITTING_INTERPRETED if self.family == _INTERPRETER else _SPLITTING


def table_blocks(family: str, place: Place) -> Blocks:
    """Return the blocks that measured ones of a place come before.

    Those of the fused backward come before the two kernels: it returns the blocks of dK and dV.
    Those of a forward pass in groups come before the Triton kernel's.
    """
    name: Pass = next(each for each in MEASURED if each == place.pass_name)
    if name == "fused":
        return _GROUPED[family, "dkdv", place.width]
    if name in ("grouped", "grouped8"):
        name = "forward"
    heavy, scattered = place.kind != "plain", place.kind == "*"
    return tiles_for(family, name, place.dtype, place.width, place.width, heavy, scattered)


def _has_even_tiles(problem: Problem) -> bool:
    """Return whether what a mask is known to leave a tile of rows is whole tiles, or listed ones.

    A table of the whole mask lists tiles, whatever the mask does: then only bands and lengths bound
    the rows. A table of a part is no help: it lists tiles of which the other part hides everything.
    """
    names = [instr.op for instr in problem.mask]
    others = set(names) - {"band", "and"}
    if names[-1:] == ["tiles"]:
        others = others & {"below"}
    bands = [instr for instr in problem.mask if instr.op == "band"]
    return not others and all(_has_even_edges(instr, problem) for instr in bands)


def _has_even_edges(instr: Instr, problem: Problem) -> bool:
    """Return whether the edges of a band are those of whole tiles.

    Keys n of query m are m + more - left <= n <= m + more + right. The last tile of rows may be
    short: then what it sees must end where the keys end, and likewise for keys and their queries.
    """
    left, right, anchor = (int(number) for number in instr.params)
    rows, keys = problem.queries, problem.keys
    more = keys - rows if anchor else 0
    return (
        left == -1
        or ((left - more) % _EDGE == 0 and (keys % _EDGE == 0 or keys - more + left >= rows))
    ) and (
        right == -1
        or ((right + more) % _EDGE == 0 and (rows % _EDGE == 0 or rows + more + right >= keys))
    )


def decodes(problem: Problem) -> bool:
    """Return whether the forward pass is the decode pass.

    In a packed call, the number of queries of a sequence is not known without reading it. The
    call's total depends on the other sequences. So such a call takes the ordinary pass. A raw score
    does too, because it takes the head as a number, and rows of several heads share a block here.
    """
    return problem.layout == "dense" and problem.queries <= _FEW and not calls_raw(problem)


def calls_raw(problem: Problem) -> bool:
    """Return whether a user's own Triton function is a stage of the score."""
    return any(instr.op == RAW for instr in problem.score)


def listed_blocks(config: Config, pass_name: Pass, problem: Problem) -> Blocks:
    """Return the blocks of a backward pass of key lists (``backward/listed.py``).

    They are those of the pass, with no more rows than share a list, and no more warps than these
    rows are work for. Fewer warps have registers for half as many pairs, where a score or wide rows
    need some too. Loads of what a list names wait for loads of names, which take stages of
    their own. The tile of keys of dK and dV lies in one page. Where pages are shorter than any tile
    it is as small as tiles get: a list names few keys that are neighbours.

    Args:
        config: of the chip.
        pass_name: "dq" or "dkdv".
        problem: paged, a batch item for each list.
    """
    blocks, rows = config.blocks(pass_name, problem), padded(problem.queries)
    wide = max(padded(problem.head_dim), padded(problem.value_dim)) > _LISTED_WIDTH
    # float32 has no matrix instructions, whose rows would stay empty: all of its warps find work.
    halves, pressed = problem.dtype.itemsize == 2, wide or bool(problem.score)
    if pass_name == "dq":
        queries = min(blocks.queries, rows)
        least, high = (2, 32) if FAMILIES[config.family].unit == "mfma" else (4, 16)
        warps = min(blocks.warps, max(least, queries // high)) if halves else blocks.warps
        stages = blocks.stages if _reads_by_pair(problem) else 2 * blocks.stages - 1
        found = Blocks(queries, blocks.keys, warps, stages)
        return _halved(found) if pressed and warps < blocks.warps else found
    in_page = problem.page_size & -problem.page_size  # the largest power of two that divides it
    keys = min(blocks.keys, max(in_page, _LEAST))
    queries = blocks.queries
    if not wide:
        queries = max(queries, min(queries * blocks.keys // keys, _LISTED_ROWS))
    queries = min(rows, queries)
    few = halves and not pressed and queries * keys <= _LISTED_PAIRS
    warps = min(blocks.warps, 4) if few else blocks.warps
    fitting = _fitting(
        Blocks(queries, keys, warps, blocks.stages),
        pass_name,
        FAMILIES[config.family],
        problem.dtype.itemsize,
        problem.head_dim,
        problem.value_dim,
    )
    return fitting._replace(stages=fitting.stages * min(fitting.stages, 2))


def _halved(blocks: Blocks) -> Blocks:
    """Return blocks with half of the keys, or of the rows where keys are few already."""
    if blocks.keys > _LEAST:
        return blocks._replace(keys=blocks.keys // 2)
    return blocks._replace(queries=max(_LEAST, blocks.queries // 2))


def place_of(pass_name: Pass, problem: Problem) -> Place:
    """Return what the blocks of a pass for a problem may depend on."""
    kind = "*" if _is_scattered(problem) else "+" if _is_heavy(problem) else "plain"
    width = _class_of(problem.head_dim, problem.value_dim)
    return Place(pass_name, problem.dtype, width, kind)


def _class_of(head_dim: int, value_dim: int) -> int:
    """Return the width whose row of the table holds for these; a tail counts with the widest."""
    widest = max(padded(min(head_dim, LARGEST_WIDTH)), padded(value_dim))
    return next(width for width in WIDTHS if widest <= width)


def _is_heavy(problem: Problem) -> bool:
    """Return whether a kernel does more per pair than compare its place with a bound or two."""
    bands = all(instr.op in ("band", "below", "and") for instr in problem.mask)
    found = problem.layout == "varlen" or problem.page_size > 0
    return bool(problem.score or problem.dropout_p) or found or not bands


def _is_scattered(problem: Problem) -> bool:
    """Return whether a walk checks each block for attending pairs; that branch needs registers."""
    names = {instr.op for instr in problem.mask}
    return not names <= {"band", "below", "and"} and "tiles" not in names


def _reads_by_pair(problem: Problem) -> bool:
    """Return whether the score is a function that reads tensors, at a place of its own per pair."""
    return any(instr.op == EXPR and instr.slots for instr in problem.score)


def padded(width: int) -> int:
    """Return a width as kernels hold it: the next power of two, at least 16."""
    return max(_LEAST, 1 << (width - 1).bit_length())


def tail_of(width: int) -> int:
    """Return how many columns of queries and keys are a tile of their own."""
    return max(0, width - LARGEST_WIDTH)


def _columns(width: int) -> int:
    """Return how many columns the tiles of queries or keys have."""
    tail = tail_of(width)
    return padded(width - tail) + (padded(tail) if tail else 0)


@lru_cache(maxsize=1024)
def tiles_for(
    family: str,
    pass_name: Pass,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    has_variant: bool,
    scattered: bool = False,
    stored: bool = False,
    paged: bool = False,
    by_pair: bool = False,
) -> Blocks:
    """Return the blocks of a pass, small enough for the shared memory of the family.

    Args:
        family: a name of FAMILIES.
        pass_name: "forward", "dkdv", "dq" or "decode".
        dtype: of q, k and v.
        head_dim: D, the width of a head.
        value_dim: Dv.
        has_variant: whether there is a mask or a score that needs registers.
        scattered: whether blocks in which nothing attends are found out on the way.
        stored: whether keys and values are in 8 bits, and widened on the way.
        paged: whether a tile of keys waits for an entry of a block table, and for nothing else.
        by_pair: whether a score reads an element of a tensor for each pair.
    """
    chip = FAMILIES[family]
    # Columns that are not there are hidden one by one, in registers.
    has_variant |= padded(head_dim) != head_dim or padded(value_dim) != value_dim
    index = WIDTHS.index(_class_of(head_dim, value_dim))
    own = ("~",) * stored + ("8",) * (dtype is FLOAT8) + ("@",) * (paged and not stored)
    own += ("^",) * by_pair
    row = _row(chip, pass_name, dtype, (*own, *("*",) * scattered, *("+",) * has_variant, ""))
    blocks = row[index]
    if has_variant and blocks.queries * blocks.keys > 128 * 64:
        blocks = blocks._replace(keys=blocks.keys // 2)
    # What is decoded on the way is held in 16 bits.
    itemsize = 2 if dtype is FLOAT8 and chip.fp8 == "halves" else dtype.itemsize
    blocks = _fitting(blocks, pass_name, chip, itemsize, head_dim, value_dim)
    if paged and (chip.table, f"{pass_name}@") in _TABLE and blocks.stages > 2:
        # Triton spreads two loads in turn over the stages: so many keep as many tiles in flight.
        blocks = blocks._replace(stages=2 * blocks.stages - 1)
    return blocks


def _row(chip: Family, pass_name: Pass, dtype: torch.dtype, marks: Sequence[str]) -> _Row:
    """The first of these rows that there is; of two such a chip's own before that of its table."""
    tables: tuple[str, ...] = (chip.name, chip.table)
    if dtype.itemsize > 2 and chip.table != _INTERPRETER:
        tables = (*(f"{table}:single" for table in tables), "single")
    for mark in marks:
        for where in tables:
            if (where, pass_name + mark) in _TABLE:
                return _TABLE[where, pass_name + mark]
    raise KeyError(f"no blocks for {pass_name} on {chip.table}")


def shared_need(
    pass_name: Pass, blocks: Blocks, itemsize: int, head_dim: int, value_dim: int
) -> int:
    """About how many bytes of shared memory a pass needs: operands held, and those in flight."""
    both = (_columns(head_dim) + padded(value_dim)) * itemsize
    if pass_name in ("forward", "grouped", "grouped8", "decode"):
        held, moving = blocks.queries * _columns(head_dim) * itemsize, blocks.keys * both
    elif pass_name == "dq":
        held, moving = blocks.queries * both, blocks.keys * both
    else:
        held, moving = blocks.keys * both, blocks.queries * both
    return held + blocks.stages * moving


def holds(family: str, dtype: torch.dtype, head_dim: int, value_dim: int) -> bool:
    """Return whether a family has the shared memory for the smallest blocks of both passes.

    With a tail there is no backward pass.
    """
    chip = FAMILIES[family]
    least = Blocks(_LEAST, _LEAST, 1, 1)
    passes: tuple[Pass, ...] = ("forward", "decode") if tail_of(head_dim) else PASSES
    needs = (shared_need(name, least, dtype.itemsize, head_dim, value_dim) for name in passes)
    return max(needs) <= chip.shared_bytes


def _fitting(
    blocks: Blocks, pass_name: Pass, chip: Family, itemsize: int, head_dim: int, value_dim: int
) -> Blocks:
    """Return the blocks with fewer stages, then smaller, until they fit."""
    while shared_need(pass_name, blocks, itemsize, head_dim, value_dim) > chip.shared_bytes:
        queries, keys, warps, stages = blocks
        if stages > 1:
            blocks = Blocks(queries, keys, warps, stages - 1)
        elif max(queries, keys) == _LEAST:
            break
        elif keys >= queries:
            blocks = Blocks(queries, keys // 2, warps, stages)
        else:
            blocks = Blocks(queries // 2, keys, warps, stages)
    return blocks


def family_of(device: torch.device) -> str | None:
    """Return the family of the chip of a device; None where it is of none that is known.

    The CPU's is the interpreter. Chips newer than a family of their kind run its code's blocks.
    """
    if device.type == "cpu":
        return _INTERPRETER
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        name = str(properties.gcnArchName).split(":", maxsplit=1)[0]
        return name if name in FAMILIES else None
    return _cuda_family(properties.major * 10 + properties.minor)


@cache
def _cuda_family(capability: int) -> str | None:
    """Return the family: for capability 8.7 that of 8.6, for 10.3 of 10.0, for 12.1 of 12.0."""
    known = [int(f.name[3:]) for f in FAMILIES.values() if f.maker == "cuda"]
    below = [each for each in known if each <= capability and each // 10 == capability // 10]
    return f"sm_{max(below)}" if below else None


def config_for(family: str, measured: Found = NOTHING) -> Config:
    """Return the configuration of a family, with the precision that torch allows at this time.

    Args:
        family: a name of FAMILIES.
        measured: what stands before the table.
    """
    chip = FAMILIES[family]
    # This setting answers for torch's old ones and its global one too. Reading an old one raises
    # as soon as a new one was set.
    allowed = torch.backends.cuda.matmul.fp32_precision == "tf32"
    tf32 = allowed and chip.maker == "cuda" and family != "sm_75"
    return Config(family, "tf32" if tf32 else "ieee", (), measured, chip.parts)
