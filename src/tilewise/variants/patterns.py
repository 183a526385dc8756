"""Published sparse patterns, public as ``tilewise.patterns``: masks for block-sparse attention.

Each is a mask like any other: it composes with ``&``, ``|`` and ``~`` (``& masks.causal()`` makes a
causal one), and ``BlockMask.of(pattern, M, N)`` gives it a table of its tiles.

Patterns of blocks count queries and keys in blocks of one size; the kernels' tiles are 64 queries x
128 keys, so multiples of 128 waste nothing.
"""

from typing import Any

import torch
from torch import Tensor

from tilewise.checks import check_block, check_tensor, check_whole
from tilewise.errors import InvalidArgument
from tilewise.variants.program import Instr
from tilewise.variants.values import Mask, mask_of

__all__ = ["bigbird", "butterfly", "dilated", "fixed", "layout", "local_global", "strided"]


def layout(tiles: Tensor, block: tuple[int, int]) -> Mask:
    """A boolean per block of pairs: all of a block's pairs attend, or none.

    Args:
        tiles: bool [.., M / block[0], N / block[1]], rounded up; before that Hq, and before that
            B, either of them 1 or left out. It is copied.
        block: queries and keys of a block.

    Raises:
        InvalidArgument, InvalidType: it is no boolean tensor of two to four dimensions.
    """
    required = "a boolean tensor [.., M / block[0], N / block[1]]"
    check_tensor("tiles", tiles, required)
    if tiles.dtype is not torch.bool or not 2 <= tiles.dim() <= 4:
        raise InvalidArgument("tiles", f"{tiles.dtype} of shape {tuple(tiles.shape)}", required)
    table = tiles[(None,) * (4 - tiles.dim())].clone(memory_format=torch.contiguous_format)
    return Mask((Instr("blocks", check_block(block), (0,)),), (table,))


def butterfly(block: int = 128, reach: int | None = None, low_rank: int = 0) -> Mask:
    """The fixed butterfly pattern of the FlashAttention paper.

    Blocks (i, j) with i = j, or whose numbers differ in exactly one bit: the supports of all
    butterfly factors laid over each other, log2(blocks) + 1 blocks per row. With a low rank it is
    the pixelated butterfly.

    Sources: Dao et al., "FlashAttention", NeurIPS 2022, section 3.3 (block-sparse FlashAttention
    uses this pattern); Chen, Dao et al., "Pixelated Butterfly", ICLR 2022, section 3 (flat block
    butterfly plus low rank).

    Args:
        block: queries and keys of a block.
        reach: only bits below it: the largest distance in blocks is less than ``reach``; None for
            all.
        low_rank: the first so many blocks of rows see every key, and every row sees their keys.

    Raises:
        InvalidArgument, InvalidType: an argument is not a whole number in its range.
    """
    check_whole("block", block, 1)
    check_whole("low_rank", low_rank, 0)
    far = None if reach is None else check_whole("reach", reach, 1)

    def crossing(b: Any, h: Any, m: Any, n: Any) -> Any:
        row, column = m // block, n // block
        differing = row ^ column
        seen = (differing & (differing - 1)) == 0
        if far is not None:
            seen = seen & (differing < far)
        if low_rank:
            seen = seen | (row < low_rank) | (column < low_rank)
        return seen

    return mask_of(crossing)


def local_global(window: int, tokens: int) -> Mask:
    """A window around each row's own position, and global tokens at the start.

    ``|m - n| <= window``, or m or n is one of the first ``tokens``, which see and are seen by all.

    Source: Beltagy, Peters and Cohan, "Longformer", 2020, section 3.1 (sliding window and global
    attention; its window of width w is ``window = w // 2``).

    Args:
        window: keys on either side.
        tokens: how many global tokens.

    Raises:
        InvalidArgument, InvalidType: an argument is not a whole number in its range.
    """
    check_whole("window", window, 0)
    check_whole("tokens", tokens, 0)

    def near_or_global(b: Any, h: Any, m: Any, n: Any) -> Any:
        near = (n >= m - window) & (n <= m + window)
        return near | (n < tokens) | (m < tokens)

    return mask_of(near_or_global)


def dilated(window: int, dilation: int) -> Mask:
    """A window with gaps: every ``dilation``-th key, up to ``window`` of them on either side.

    Source: Beltagy, Peters and Cohan, "Longformer", 2020, section 3.1 (dilated sliding window).

    Args:
        window: keys on either side that are seen.
        dilation: the distance from one to the next; 1 is a plain window.

    Raises:
        InvalidArgument, InvalidType: an argument is not a whole number in its range.
    """
    reach = check_whole("window", window, 0) * check_whole("dilation", dilation, 1)

    def with_gaps(b: Any, h: Any, m: Any, n: Any) -> Any:
        return (n >= m - reach) & (n <= m + reach) & ((m - n) % dilation == 0)

    return mask_of(with_gaps)


def strided(stride: int) -> Mask:
    """The strided pattern of the Sparse Transformer: the last keys, and every stride-th before.

    Causal: ``n <= m``, and ``m - n < stride`` or ``(m - n) % stride == 0``. Both of the paper's
    heads in one.

    Source: Child, Gray, Radford and Sutskever, "Generating Long Sequences with Sparse
    Transformers", 2019, section 4.2.

    Args:
        stride: l of the paper, near sqrt(N).

    Raises:
        InvalidArgument, InvalidType: it is not a whole number of at least 1.
    """
    check_whole("stride", stride, 1)

    def near_or_stride(b: Any, h: Any, m: Any, n: Any) -> Any:
        return (n <= m) & ((n > m - stride) | ((m - n) % stride == 0))

    return mask_of(near_or_stride)


def fixed(stride: int, summary: int = 1) -> Mask:
    """The fixed pattern of the Sparse Transformer: the own block, and the ends of all before.

    Causal: ``n <= m``, and m and n lie in the same block of ``stride``, or n is one of the last
    ``summary`` of its block. Both of the paper's heads in one.

    Source: Child, Gray, Radford and Sutskever, "Generating Long Sequences with Sparse
    Transformers", 2019, section 4.2.

    Args:
        stride: l of the paper.
        summary: c of the paper, at most ``stride``.

    Raises:
        InvalidArgument, InvalidType: an argument is not a whole number in its range.
    """
    check_whole("stride", stride, 1)
    first = stride - check_whole("summary", summary, 0)
    if first < 0:
        raise InvalidArgument("summary", str(summary), f"at most stride, {stride}")

    def own_or_summary(b: Any, h: Any, m: Any, n: Any) -> Any:
        return (n <= m) & ((n // stride == m // stride) | (n % stride >= first))

    return mask_of(own_or_summary)


def bigbird(
    queries: int,
    keys: int | None = None,
    *,
    block: int = 64,
    window: int = 3,
    globals: int = 2,
    random: int = 3,
    seed: int = 0,
    heads: int = 1,
) -> Mask:
    """BigBird: in blocks, a window, global blocks at the start, and random ones for each row.

    Source: Zaheer et al., "Big Bird: Transformers for Longer Sequences", NeurIPS 2020, section 2
    and appendix D (block size 64, 2 global, 3 window and 3 random blocks).

    Args:
        queries: M, query rows.
        keys: N; M if None.
        block: queries and keys of a block.
        window: blocks around a row's own, itself included, an odd number.
        globals: the first so many blocks see and are seen by all.
        random: blocks that each block of rows draws, none twice; fewer where there are fewer.
        seed: of the drawing, which is the same on every machine.
        heads: Hq for draws of each head's own; 1 for one that serves all.

    Raises:
        InvalidArgument, InvalidType: an argument is not a whole number in its range.
    """
    check_whole("block", block, 1)
    if check_whole("window", window, 1) % 2 == 0:
        raise InvalidArgument(
            "window", str(window), "an odd number of blocks, the own one included"
        )
    rows = -(-check_whole("queries", queries, 0) // block)
    columns = -(-check_whole("keys", queries if keys is None else keys, 0) // block)
    check_whole("globals", globals, 0)
    check_whole("heads", heads, 1)
    generator = torch.Generator().manual_seed(check_whole("seed", seed, 0))
    drawn = torch.rand(heads, rows, columns, generator=generator)
    chosen = drawn.topk(min(check_whole("random", random, 0), columns), dim=-1).indices
    row, column = torch.arange(rows)[:, None], torch.arange(columns)
    seen = ((row - column).abs() <= window // 2) | (row < globals) | (column < globals)
    return layout(seen.expand(heads, rows, columns).scatter(-1, chosen, True), (block, block))
