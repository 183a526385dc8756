"""nn.Attention with a cache: a sequence in pieces gives what it gives at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.nn.drop_in import drawn
from tilewise import masks, scores
from tilewise.errors import InvalidArgument, InvalidType, OutOfPages, Unsupported
from tilewise.nn import Attention, DynamicNtkScaling, Llama3Scaling, Rotary, YarnScaling
from tilewise.serving import KVCache, PagedKVCache

B, S, WIDTH, HEADS, KV_HEADS, D = 3, 21, 24, 4, 2, 6
SLOPES = 2.0 ** -torch.arange(1, HEADS + 1, dtype=torch.float64)
PIECES = {"at once": [S], "token by token": [1] * S, "in pieces": [9, 1, 1, 7, 3]}

OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "causal": lambda: {"mask": masks.causal()},
    "rotary": lambda: {"mask": masks.causal(), "rotary": Rotary(base=500.0, dim=4)},
    "yarn and qk norm": lambda: {
        "mask": masks.causal(),
        "qk_norm": True,
        "rotary": Rotary(scaling=YarnScaling(4.0, 8)),
    },
    "window and sinks": lambda: {
        "mask": masks.window(6, 0),
        "sinks": True,
        "rotary": Rotary(scaling=Llama3Scaling(8.0, 16)),
    },
    "alibi": lambda: {"mask": masks.causal(), "score": scores.alibi(SLOPES)},
    "function": lambda: {"mask": lambda b, h, m, n: n <= m + n.length - m.length, "bias": True},
}


def layer(**options: Any) -> Attention:
    torch.manual_seed(1)
    made = Attention(WIDTH, HEADS, kv_heads=KV_HEADS, **options).double().eval()
    if made.sinks is not None:
        nn.init.normal_(made.sinks)
    return made


def rows(**options: Any) -> KVCache:
    sizes = {"batch": B, "kv_heads": KV_HEADS, "head_dim": D, "capacity": S}
    return KVCache(**{**sizes, "dtype": torch.float64, **options})


def pages(**options: Any) -> PagedKVCache:
    sizes = {"pages": 24, "page_size": 4, "kv_heads": KV_HEADS, "head_dim": D}
    return PagedKVCache(**{**sizes, "dtype": torch.float64, **options})


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@torch.no_grad()
def test_in_pieces_as_at_once(options: Any, pieces: list[int]) -> None:
    attend, x = layer(**options()), drawn(B, S, WIDTH)
    wanted = attend(x)
    flat, paged = rows(), pages()
    sequences = [paged.add() for _ in range(B)]
    for found in (
        [attend(piece, cache=flat) for piece in x.split(pieces, dim=1)],
        [attend(piece, cache=paged, sequences=sequences) for piece in x.split(pieces, dim=1)],
    ):
        close(torch.cat(found, dim=1), wanted)
    assert len(flat) == paged.length(sequences[0]) == S


@pytest.mark.parametrize("implementation", ["plain", "sdpa"])
@torch.no_grad()
def test_other_implementations(implementation: Any) -> None:
    attend = layer(mask=masks.causal(), rotary=Rotary(), implementation=implementation)
    x, cache = drawn(B, S, WIDTH), rows()
    found = [attend(piece, cache=cache) for piece in x.split([9, 1, 11], dim=1)]
    close(torch.cat(found, dim=1), attend(x))


@torch.no_grad()
def test_sequences_of_different_lengths() -> None:
    """Three prompts, then all go on together, one of them twice from a common start."""
    attend, cache = layer(mask=masks.causal(), rotary=Rotary()), pages()
    x = drawn(B, S, WIDTH)
    lengths = [5, 12, 1]
    sequences = [cache.add() for _ in lengths]
    for row, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
        attend(x[row : row + 1, :length], cache=cache, sequences=[sequence])
    sequences.append(cache.fork(sequences[1]))
    origin = [0, 1, 2, 1]
    for step in range(4):
        at = [lengths[row] + step for row in origin]
        tokens = torch.stack([x[row, place] for row, place in zip(origin, at, strict=True)])
        found = attend(tokens[:, None], cache=cache, sequences=sequences)
        for index, (row, place) in enumerate(zip(origin, at, strict=True)):
            close(found[index, 0], attend(x[row : row + 1, : place + 1])[0, -1])


@torch.no_grad()
def test_own_positions_and_a_narrower_mask() -> None:
    attend, cache, x = layer(rotary=Rotary(), mask=masks.causal()), rows(), drawn(B, S, WIDTH)
    positions = torch.arange(S) * 2 + 5
    near = masks.window(3, 0)
    wanted = attend(x, positions=positions, mask=near)
    for start in range(0, S, 7):
        here = slice(start, start + 7)
        found = attend(x[:, here], positions=positions[here], mask=near, cache=cache)
        close(found, wanted[:, here])


def call(attend: Attention, **options: Any) -> Callable[[], object]:
    def run() -> object:
        with torch.no_grad():
            return attend(torch.zeros(B, 2, WIDTH, dtype=torch.float64), **options)

    return run


def wants_gradients() -> object:
    return layer()(torch.zeros(B, 2, WIDTH, dtype=torch.float64), cache=rows())


ERRORS: dict[type[Exception], dict[str, Callable[[], object]]] = {
    InvalidArgument: {
        r"cache.*gradients.*no_grad\(\)": wants_gradients,
        r"cache.*dropout.*module.eval\(\)": call(layer(dropout_p=0.1).train(), cache=rows()),
        "cache.*context": call(layer(), cache=rows(), context=torch.zeros(B, 2, WIDTH)),
        "cache.*DynamicNtkScaling.*grows": call(
            layer(rotary=Rotary(scaling=DynamicNtkScaling(2.0, 8))), cache=rows()
        ),
        r"mask.*top_left.*masks.causal\(\)": call(
            layer(mask=masks.causal("top_left")), cache=rows()
        ),
        "sequences.*cache": call(layer(), sequences=[0]),
        "sequences.*no pages": call(layer(), cache=rows(), sequences=[0, 1, 2]),
        "sequences.*None.*3": call(layer(), cache=pages()),
        "sequences.*1 of them.*3": call(layer(), cache=pages(), sequences=[0]),
        "k.*float64.*float32": call(layer(), cache=rows(dtype=torch.float32)),
        "k.*capacity of 1": call(layer(), cache=rows(capacity=1)),
    },
    InvalidType: {
        "cache.*dict.*KVCache": call(layer(), cache={}),
    },
    Unsupported: {
        "'plain' with a cache of pages": call(
            layer(implementation="plain"), cache=pages(), sequences=[0, 1, 2]
        ),
    },
}


@pytest.mark.parametrize(
    ("kind", "message"), [(kind, message) for kind, rows in ERRORS.items() for message in rows]
)
def test_errors_name_the_argument(kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        ERRORS[kind][message]()


def test_too_few_pages() -> None:
    cache = pages(pages=2)
    sequences = [cache.add() for _ in range(B)]
    with pytest.raises(OutOfPages):
        call(layer(), cache=cache, sequences=sequences)()
    assert cache.length(sequences[0]) == 0


@pytest.mark.parametrize(("paged", "window"), [(False, None), (True, None), (True, 5)])
def test_a_refused_call_leaves_the_cache_as_it_was(paged: bool, window: int | None) -> None:
    """Called again, without what was wrong, it does not find its keys there already."""
    mask = masks.causal() if window is None else masks.window(window - 1, 0)
    attend, x = layer(mask=mask), drawn(B, S, WIDTH)
    cache: Any = pages(window=window) if paged else rows()
    sequences = [cache.add() for _ in range(B)] if paged else None

    def step(part: Tensor, **more: Any) -> Tensor:
        return attend(part, cache=cache, sequences=sequences, **more)

    with torch.no_grad():
        found = [step(x[:, :10])]
        held = cache.free_pages if paged else len(cache)
        wrong: dict[str, Any] = {"mask": torch.ones(2, 2, dtype=torch.bool)}
        for refused in (wrong, {"score": scores.bias(torch.zeros(1, 1, 2, 2))}):
            with pytest.raises(InvalidArgument, match=r"^(mask|score).*shape"):
                step(x[:, 10:], **refused)
            if paged:
                assert [cache.length(each) for each in sequences or ()] == [10] * B
                assert cache.free_pages >= held
            else:
                assert len(cache) == held
        found.append(step(x[:, 10:]))
        close(torch.cat(found, 1), attend(x))
        if not paged:
            attend.implementation = "sdpa"
            attend.sinks = nn.Parameter(torch.zeros(HEADS))
            cache.truncate(10)
            with pytest.raises(Unsupported, match="no sinks"):
                step(x[:, 10:])
            assert len(cache) == 10
            cache.truncate(10)  # which it is already
            with pytest.raises(InvalidArgument, match=r"length: got 11; required: in \[0, 10\]"):
                cache.truncate(11)
