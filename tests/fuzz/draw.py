"""A case from one integer: the same number draws the same call everywhere.

The instruction set is drawn last, as a place in a list of names; where the machine does not have
it, ``check`` keeps the one that is active, and nothing else of the case changes.
"""

from __future__ import annotations

from random import Random

from tests.fuzz.case import PLAIN, Case, Layout, Node
from tests.fuzz.trees import Trees

ISAS = ("avx512_amx", "avx512_bf16", "avx512", "avx2", "neon_bf16", "portable")
DTYPES = ("float32", "float32", "float32", "bfloat16", "bfloat16", "float16", "float64")
EDGES = (15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 127, 128, 129, 191, 255, 256, 257)
WIDTHS = (8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 72, 80, 96, 111, 128, 129, 160, 192, 256)
_PER_PAIR = 64  # what the reference does for a pair, in multiplications
# Most problems are small and quick; some have many tiles, along which things are summed and cut.
_MOST_WORK = (300_000, 300_000, 300_000, 300_000, 1_000_000, 1_000_000, 4_000_000)
_SLOWER = {"float64": 4}  # numpy multiplies long doubles one by one


def _length(random: Random) -> int:
    chance = random.random()
    if chance < 0.03:
        return 0
    if chance < 0.1:
        return 1
    if chance < 0.5:
        return random.randint(2, 20)
    return random.choice(EDGES) if chance < 0.8 else random.randint(21, 300)


def _width(random: Random) -> int:
    chance = random.random()
    if chance < 0.35:
        return random.randint(1, 20)
    if chance < 0.9:
        return random.choice(WIDTHS)
    return random.randint(130, 512)


def _scale(random: Random, dtype: str) -> float | None:
    """No zero in 16 bits: the scores are the same in every draw, and so is plain torch's luck."""
    scale = random.choice((None, None, None, None, 1.0, -0.5, 0.0, 0.3))
    return 1.0 if scale == 0 and dtype in ("bfloat16", "float16") else scale


def _layout(random: Random, rank: int, expands: bool) -> Layout:
    """Contiguous, heads last, strided, sliced, transposed, broadcast, or some of it at once."""
    if random.random() < 0.5:
        return PLAIN
    if random.random() < 0.4:
        return Layout((1, 0, 2))  # [B, S, H, D] memory; packed [H, T, D]
    order = random.choice(((0, 1, 2), (1, 0, 2), (0, 2, 1), (2, 0, 1), (1, 2, 0)))
    pads = tuple(random.choice((0, 0, 0, 1, 3, 8)) for _ in order)
    step, offset = random.choice((1, 1, 1, 2, 3)), random.choice((0, 0, 1, 5, 64))
    dims: tuple[int, ...] = ()
    if expands and random.random() < 0.5:
        dims = tuple(dim for dim in range(rank) if random.random() < 0.35)
    return Layout(order, pads, step, offset, dims)


def _shrunk(random: Random, lengths: list[int], factor: int, most: int) -> list[int]:
    """Lengths [M, N] of which the longer is halved until the work is small enough."""
    lengths = list(lengths)
    while lengths[0] * lengths[1] * factor > most and max(lengths) > 1:
        longer = int(lengths[1] >= lengths[0])
        lengths[longer] = max(1, (lengths[longer] + random.randint(0, 1)) // 2)
    return lengths


def draw(seed: int) -> Case:
    """The case of a seed."""
    random = Random(seed)
    dtype = random.choice(DTYPES)
    most = random.choice(_MOST_WORK) // _SLOWER.get(dtype, 1)
    kv_heads = random.choice((1, 1, 2, 3))
    heads = kv_heads * random.choice((1, 1, 2, 3, 4))
    head_dim = _width(random)
    value_dim = head_dim if random.random() < 0.6 else _width(random)
    batch = random.choice((1, 1, 1, 2, 2, 3, 4, 0 if random.random() < 0.2 else 1))
    few = random.random() < 0.25  # few queries are a road of their own
    packed = random.random() < 0.3
    page_size = random.choice((1, 3, 16, 128, 130)) if packed and random.random() < 0.3 else 0
    differentiated = not page_size and random.random() < 0.65
    factor = heads * (head_dim + value_dim + _PER_PAIR)
    pairs = []
    for _ in range(batch if packed else 1):
        m = random.randint(1, 9) if few else _length(random)
        n = _length(random)
        if few and random.random() < 0.5:
            n = random.randint(100, 1300)
        if random.random() < 0.3 and not few:
            n = m
        share = factor * max(1, batch)
        pairs.append(tuple(_shrunk(random, [m, n], share, most)))
    sequences = tuple((m, n) for m, n in pairs) if packed else None
    m, n = pairs[0] if pairs else (1, 1)
    if packed:
        extents = (batch, heads, *(max((p[i] for p in pairs), default=0) for i in (0, 1)))
        least = min((p[1] for p in pairs), default=0)
    else:
        extents, least = (batch, heads, m, n), n
    trees = Trees(random, (extents[0], extents[1], extents[2], extents[3]), least, packed)
    mask = trees.mask(random.choice((0, 0, 1, 2))) if random.random() < 0.6 else None
    trees.may_learn = differentiated
    scores: tuple[Node, ...] = ()
    if random.random() < 0.55:
        count = random.choice((1, 1, 1, 2, 3))
        scores = tuple(
            trees.score(random.choice((1, 2, 2, 3)), i == count - 1) for i in range(count)
        )
    sinks = random.random() < 0.2
    grads: tuple[str, ...] = ()
    if differentiated:
        grads = tuple(name for name in ("q", "k", "v", "sinks") if random.random() < 0.8)
        grads = tuple(name for name in grads if name != "sinks" or sinks)
        if any(table.grad for table in trees.tables) and random.random() < 0.15:
            grads = ()
    stats = random.choice(("", "", "rows", "top1"))
    rank = 3 if packed else 4
    gains = (1.0, 1.0, 1.0, 0.1, 2.0, 4.0) if scores else (1.0, 1.0, 1.0, 0.1, 3.0, 6.0)
    entropy_grad = differentiated and bool(stats) and random.random() < 0.5
    small = factor * m * n * max(1, batch) < 300_000
    second = differentiated and small and dtype != "float64" and not entropy_grad
    second = second and random.random() < 0.05
    place = random.randrange(len(ISAS))
    dropout_p = 0.0 if page_size else random.choice((0.0, 0.0, 0.0, 0.1, 0.6))
    gain = random.choice(gains)
    listed, list_block, lists_shared = 0, 1, False
    if not (packed or dropout_p or second) and random.random() < 0.25:
        list_block = random.choice((1, 1, 3, 16, 64))
        listed = random.randint(1, min(80, 2 + n // list_block))
        lists_shared = random.random() < 0.4
    return Case(
        values=seed % 1_000_003,
        dtype=dtype,
        threads=random.choice((1, 1, 2, 3)),
        batch=batch if not packed else 1,
        heads=heads,
        kv_heads=kv_heads,
        queries=m if not packed else 1,
        keys=n if not packed else 1,
        head_dim=head_dim,
        value_dim=value_dim,
        sequences=sequences,
        page_size=page_size if pairs else 0,
        mask=mask,
        scores=scores,
        tables=tuple(trees.tables),
        sinks=sinks,
        scale=_scale(random, dtype),
        dropout_p=dropout_p,
        gain=gain,
        layouts=(
            _layout(random, rank, False),
            _layout(random, rank, True),
            _layout(random, rank, True),
            _layout(random, rank, True),
        ),
        grads=grads,
        lse_grad=differentiated and random.random() < 0.4,
        entropy_grad=entropy_grad,
        stats=stats,
        second=second,
        listed=listed,
        list_block=list_block,
        lists_shared=lists_shared,
        isa=ISAS[place],
    )
