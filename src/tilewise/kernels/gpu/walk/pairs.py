"""Hide and drop pairs of a tile, in forward and backward kernels.

A tile has queries ``m`` and keys ``n``, integer blocks that broadcast against one another:
``[BM, 1]`` and ``[1, BN]``, or transposed. ``b`` and ``h`` are numbers: the batch item (in a
variable-length call the sequence) and the query head; ``M`` and ``N`` count its queries and keys.

The functions of a variant (``expressions/``) come as constexprs, and what they read as tuples:
tensors and shape numbers of its captures.
"""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def shown(b, h, m, n, M, N, mask_tensors, mask_shapes, SEEN: tl.constexpr):
    """Return which pairs of a tile attend: within M and N, and shown by ``SEEN`` if not None."""
    inside = (m < M) & (n < N)
    if SEEN is not None:
        inside = inside & SEEN(b, h, m, n, M, N, mask_tensors, mask_shapes)
    return inside


@triton.jit
def _philox_round(c0, c1, c2, c3, k0, k1):
    low0 = (c0 * 0xD2511F53).to(tl.uint32)
    low1 = (c2 * 0xCD9E8D57).to(tl.uint32)
    high0 = tl.umulhi(c0, 0xD2511F53)
    high1 = tl.umulhi(c2, 0xCD9E8D57)
    return high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0


@triton.jit
def drawing(seed):
    """Return what ``kept`` draws with: the halves of the seed, and from where pairs are counted.

    Args:
        seed: None without dropout; else pointers to the seed (int64) and, where these are not 0,
            to the first batch item, head, query and key (int64, four of them).

    The kernel reads the seed, not the host: a CUDA graph that is replayed then sees the value that
    stands there at that time.
    """
    low, high = 0, 0
    b0, h0, m0, n0 = 0, 0, 0, 0
    if seed is not None:
        bits = tl.load(seed[0])
        low, high = bits.to(tl.int32), (bits >> 32).to(tl.int32)
        if len(seed) > 1:
            b0, h0 = tl.load(seed[1]).to(tl.int32), tl.load(seed[1] + 1).to(tl.int32)
            m0, n0 = tl.load(seed[1] + 2).to(tl.int32), tl.load(seed[1] + 3).to(tl.int32)
    return low, high, b0, h0, m0, n0


@triton.jit
def kept(drawn, threshold, b, h, m, n):
    """Return whether dropout keeps each pair: ``reference/philox.py``, bit for bit.

    ``drawn`` is what ``drawing`` returns. The threshold, below which a word means "dropped", has 32
    bits, as the halves of the seed have.
    """
    seed_low, seed_high, b0, h0, m0, n0 = drawn
    b, h, m, n = b + b0, h + h0, m + m0, n + n0
    zero = (m + n).to(tl.uint32) * 0
    # Philox gives four words at once: those of four keys side by side.
    c0 = (n // 4).to(tl.uint32) + zero
    c1 = m.to(tl.uint32) + zero
    c2 = zero + h.to(tl.uint32)
    c3 = zero + b.to(tl.uint32)
    k0 = seed_low.to(tl.uint32, bitcast=True) + zero
    k1 = seed_high.to(tl.uint32, bitcast=True) + zero
    for _ in tl.static_range(10):
        c0, c1, c2, c3 = _philox_round(c0, c1, c2, c3, k0, k1)
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    lane = (n % 4) + zero.to(tl.int32)
    word = tl.where(lane == 0, c0, tl.where(lane == 1, c1, tl.where(lane == 2, c2, c3)))
    return word >= threshold.to(tl.uint32, bitcast=True)
