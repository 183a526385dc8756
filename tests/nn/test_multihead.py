"""nn.MultiheadAttention is torch's: numbers, gradients, weights, parameters, options, mistakes."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.nn.drop_in import assert_like_torch, drawn, outcome, spread
from tilewise.errors import InvalidArgument, InvalidType, SlowPathWarning
from tilewise.nn import MultiheadAttention, multihead

B, H, E, L, S = 3, 4, 24, 19, 27
Inputs = dict[str, Tensor | None]


def hidden(*shape: int) -> Tensor:
    """A third of the pairs; the first key of each row is seen."""
    found = drawn(*shape) > 0.4
    found[..., 0] = False
    return found


def causal(size: int, dtype: torch.dtype | None = None) -> Tensor:
    mask = torch.ones(size, size, dtype=torch.bool).triu(1)
    return mask if dtype is None else torch.zeros(size, size, dtype=dtype).masked_fill(mask, -1e999)


def padding() -> Tensor:
    return torch.arange(S)[None] >= torch.tensor([S, 5, 20])[:, None]


def infinite(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(mask, -math.inf)


# name: (options of the constructor, masks and options of the call)
CASES: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "nothing": ({}, dict),
    "no bias": ({"bias": False}, dict),
    "batch first": ({"batch_first": True}, lambda: {"attn_mask": hidden(L, S)}),
    "bool": ({}, lambda: {"attn_mask": hidden(L, S)}),
    "bool of heads": ({"batch_first": True}, lambda: {"attn_mask": hidden(B * H, L, S)}),
    "float": ({}, lambda: {"attn_mask": drawn(L, S)}),
    "float of heads": ({}, lambda: {"attn_mask": drawn(B * H, L, S)}),
    "padding": ({"batch_first": True}, lambda: {"key_padding_mask": padding()}),
    "scattered padding": ({}, lambda: {"key_padding_mask": hidden(B, S)}),
    "float padding": ({}, lambda: {"key_padding_mask": drawn(B, S)}),
    "both bool": ({}, lambda: {"attn_mask": hidden(L, S), "key_padding_mask": padding()}),
    "both float": ({}, lambda: {"attn_mask": drawn(L, S), "key_padding_mask": drawn(B, S)}),
    "both of heads": (
        {},
        lambda: {"attn_mask": drawn(B * H, L, S), "key_padding_mask": drawn(B, S)},
    ),
    "bias_kv": ({"add_bias_kv": True}, lambda: {"attn_mask": hidden(L, S)}),
    "zero_attn": (
        {"add_zero_attn": True, "batch_first": True},
        lambda: {"attn_mask": drawn(B * H, L, S), "key_padding_mask": padding()},
    ),
    "both added": (
        {"add_zero_attn": True, "add_bias_kv": True, "bias": False},
        lambda: {"key_padding_mask": padding()},
    ),
    "kdim": ({"kdim": 10, "vdim": 7}, lambda: {"attn_mask": drawn(L, S)}),
    "kdim without bias": ({"kdim": 10, "bias": False, "batch_first": True}, dict),
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Both say things that are not under test: torch of mixed masks, ours of weights."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=SlowPathWarning)
        warnings.filterwarnings("ignore", message="Support for mismatched")
        warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors")
        yield


def pair(**options: Any) -> tuple[torch.nn.MultiheadAttention, MultiheadAttention]:
    """Torch's and ours, float64, with the same values."""
    theirs = torch.nn.MultiheadAttention(E, H, dtype=torch.float64, **options)
    spread(theirs)
    ours = MultiheadAttention(E, H, dtype=torch.float64, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def inputs(module: torch.nn.MultiheadAttention, which: str = "qkv") -> Inputs:
    """Query, key and value: all different, key and value one, or all one."""

    def rows(length: int, width: int, seed: int) -> Tensor:
        x = drawn(length, B, width, seed=seed)
        return x.transpose(0, 1).contiguous() if module.batch_first else x

    q = rows(L, E, 1)
    if which == "self":
        return {"query": q, "key": q, "value": q}
    k = rows(S, module.kdim, 2)
    v = k if which == "memory" else rows(S, module.vdim, 3)
    return {"query": q, "key": k, "value": v}


def compare(
    theirs: torch.nn.Module,
    ours: torch.nn.Module,
    given: Inputs,
    call: dict[str, Any],
) -> None:
    """With the weights and without them."""
    call = dict(call)
    masks = {name: call.pop(name, None) for name in ("attn_mask", "key_padding_mask")}
    for need_weights in (True, False):

        def run(module: torch.nn.Module, dtype: torch.dtype, **options: Any) -> Any:
            return outcome(module, given | masks, dtype, **call, **options)

        assert_like_torch(
            partial(run, ours, need_weights=need_weights),
            partial(run, theirs, need_weights=need_weights),
        )


@pytest.mark.parametrize("name", CASES)
def test_torchs_numbers(name: str) -> None:
    options, call = CASES[name]
    theirs, ours = pair(**options)
    compare(theirs, ours, inputs(ours), call())


@pytest.mark.parametrize("which", ["self", "memory"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_one_tensor_for_several(which: str, batch_first: bool) -> None:
    theirs, ours = pair(batch_first=batch_first)
    compare(theirs, ours, inputs(ours, which), {"average_attn_weights": False})


@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
@pytest.mark.parametrize("mask", [causal(L), causal(L, torch.float32)], ids=["bool", "float"])
def test_causal_by_hint_and_by_mask(options: dict[str, Any], mask: Tensor) -> None:
    theirs, ours = pair(**options)
    x = drawn(L, B, E)
    hints: list[dict[str, Any]] = [{"attn_mask": mask}, {"is_causal": True}]
    with torch.no_grad():
        wanted, weights = theirs(x, x, x, attn_mask=causal(L, x.dtype))
        for call in (*hints, hints[0] | hints[1]):
            out, got = ours(x, x, x, **call)
            torch.testing.assert_close(got, weights, rtol=1e-12, atol=1e-12)
            for each in (out, ours(x, x, x, need_weights=False, **call)[0]):
                torch.testing.assert_close(each, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 5, 5), (2, 0, 5), (2, 5, 0)])
def test_nothing_to_attend(batch: int, queries: int, keys: int) -> None:
    theirs, ours = pair()
    x, memory = drawn(queries, batch, E), drawn(keys, batch, E)
    mask = torch.zeros(queries, keys, dtype=torch.bool)
    for need_weights in (True, False):
        call = {"attn_mask": mask, "need_weights": need_weights}
        torch.testing.assert_close(
            ours(x, memory, memory, **call), theirs(x, memory, memory, **call)
        )


def test_a_hint_does_not_lose_a_gradient() -> None:
    _, ours = pair()
    x, mask = drawn(L, B, E), causal(L, torch.float64).requires_grad_()
    ours(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0].sum().backward()
    assert mask.grad is not None
    assert mask.grad.tril().abs().max() > 0


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("average", [False, True])
def test_unbatched(batch_first: bool, average: bool) -> None:
    theirs, ours = pair(batch_first=batch_first)
    given: Inputs = {"query": drawn(L, E), "key": drawn(S, E), "value": drawn(S, E, seed=4)}
    masks = {"attn_mask": hidden(H, L, S), "key_padding_mask": padding()[1]}
    compare(theirs, ours, given, masks | {"average_attn_weights": average})


def test_a_query_that_sees_nothing_gives_the_bias() -> None:
    _, ours = pair(batch_first=True)
    given = inputs(ours)
    mask = hidden(L, S)
    mask[4] = True
    for shape in (mask, infinite(mask).double(), mask.expand(B * H, L, S)):
        found = outcome(ours, given, torch.float64, attn_mask=shape, need_weights=False)
        out, weights = ours(*given.values(), attn_mask=shape)
        for each in (found["output 0"], out):
            torch.testing.assert_close(each[:, 4], ours.out_proj.bias.expand(B, E))
        assert weights[:, 4].eq(0).all()
        assert all(bool(each.isfinite().all()) for each in found.values())


def test_the_same_seed_gives_the_same_parameters_and_back() -> None:
    for options in ({}, {"bias": False}, {"kdim": 5, "vdim": 6, "add_bias_kv": True}):
        made = []
        for kind in (torch.nn.MultiheadAttention, MultiheadAttention):
            torch.manual_seed(3)
            made.append(kind(E, H, **options).state_dict())
        theirs, ours = made
        assert list(theirs) == list(ours)
        assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
        torch.nn.MultiheadAttention(E, H, **options).load_state_dict(ours)


def test_copies_and_pickles() -> None:
    _, ours = pair()
    x = drawn(L, B, E)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(other) is MultiheadAttention
        assert torch.equal(other(x, x, x)[0], ours(x, x, x)[0])


@pytest.mark.parametrize("need_weights", [True, False])
def test_dropout_is_for_training(need_weights: bool) -> None:
    _, ours = pair(dropout=0.5)
    x = drawn(L, B, E)

    def run() -> Tensor:
        return ours(x, x, x, need_weights=need_weights)[0].detach()

    ours.eval()
    exact = run()
    assert torch.equal(run(), exact)
    ours.train()
    torch.manual_seed(0)
    first = run()
    torch.manual_seed(0)
    assert torch.equal(run(), first)
    draws = torch.stack([run() for _ in range(40)])
    error = (draws.mean(dim=0) - exact).abs().max()
    assert error < 6 * draws.std(dim=0).max() / 40**0.5
    ours.dropout = 1.0
    torch.testing.assert_close(run(), ours.out_proj.bias.detach().expand(L, B, E))


def test_weights_are_those_that_dropout_left() -> None:
    _, ours = pair(dropout=0.5)
    x = drawn(L, B, E)
    weights = ours(x, x, x, average_attn_weights=False)[1]
    assert 0.3 < weights.eq(0).double().mean() < 0.7


def test_weights_are_warned_of_once() -> None:
    _, ours = pair()
    x = drawn(L, B, E)
    multihead._warn_of_weights.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours(x, x, x, need_weights=False)
        assert not caught
        ours(x, x, x)
        ours(x, x, x)
    assert [each.category for each in caught] == [SlowPathWarning]
    assert caught[0].filename == __file__
    assert "need_weights=False" in str(caught[0].message)


def test_weights_can_be_given_up() -> None:
    _, ours = pair()
    x = drawn(L, B, E)
    fused = ours(x, x, x, need_weights=False)
    ours.drop_weights = True
    out, weights = ours(x, x, x)
    assert weights is None
    assert torch.equal(out, fused[0])


def test_nothing_of_the_size_of_the_pairs_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks reach the kernel as they were given, by address."""
    _, ours = pair()
    given = inputs(ours)
    seen: list[Tensor] = []

    def spy(q: Tensor, k: Tensor, v: Tensor, mask: Any, score: Any, dropout_p: float) -> Tensor:
        seen.extend([*mask.captured, *score.captured])
        return q

    monkeypatch.setattr(multihead, "by_the_faster", spy)
    masks = {"attn_mask": hidden(B * H, L, S), "key_padding_mask": drawn(B, S)}
    ours(*given.values(), need_weights=False, **masks)
    assert {x.data_ptr() for x in seen} == {x.data_ptr() for x in masks.values()}


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_is_each_sequence_alone(layout: torch.layout) -> None:
    _, ours = pair(batch_first=True)
    parts = [drawn(length, E) for length in (5, 1, 12)]
    nested = torch.nested.nested_tensor(parts, layout=layout, requires_grad=True)
    for is_causal in (False, True):
        out = ours(nested, nested, nested, need_weights=False, is_causal=is_causal)[0]
        assert out.layout == layout
        for row, part in zip(out.unbind(), parts, strict=True):
            wanted = ours(part, part, part, need_weights=False, is_causal=is_causal)[0]
            torch.testing.assert_close(row, wanted)
        (gradient,) = torch.autograd.grad(torch.cat(out.unbind()).square().sum(), nested)
        assert torch.cat(gradient.unbind()).abs().min() > 0


def test_compiles_into_one_graph() -> None:
    _, ours = pair(batch_first=True)
    x = drawn(B, L, E)
    call: Any = {"key_padding_mask": hidden(B, L), "attn_mask": hidden(L, L), "need_weights": False}
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, x, x, **call)[0], ours(x, x, x, **call)[0])


def test_autocast() -> None:
    theirs, ours = (module.float() for module in pair())
    x, mask = drawn(L, B, E).float(), drawn(L, L).float()
    with torch.autocast("cpu", torch.bfloat16):
        wanted = theirs(x, x, x, attn_mask=mask, need_weights=False)[0]
        out = ours(x, x, x, attn_mask=mask, need_weights=False)[0]
    assert out.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(out, wanted, rtol=0.05, atol=0.05)


def call(*shapes: tuple[int, ...], **masks: Any) -> Callable[[], object]:
    return lambda: MultiheadAttention(E, H)(*map(torch.zeros, shapes), **masks)


NESTED = torch.nested.nested_tensor([torch.zeros(2, E)], layout=torch.jagged)
LONGER, OTHER = (
    torch.nested.nested_tensor([torch.zeros(n, E) for n in lengths], layout=torch.jagged)
    for lengths in ((2, 5), (5, 2))
)
ERRORS: dict[type[Exception], dict[str, Callable[[], object]]] = {
    InvalidArgument: {
        r"query.*\[L?S?, B, E\]": call((5, 2, 9), (5, 2, E), (5, 2, E)),
        "query.*24": call((1, 5, 2, E), (5, 2, E), (5, 2, E)),
        "key.*dimensions as query": call((5, E), (5, 2, E), (5, 2, E)),
        "key.*batch of query, 2": call((5, 2, E), (5, 3, E), (5, 3, E)),
        "value.*of key": call((5, 2, E), (6, 2, E), (5, 2, E)),
        r"key_padding_mask.*\[2, 5\]": call(
            *[(5, 2, E)] * 3, key_padding_mask=torch.zeros(5, 2, dtype=torch.bool)
        ),
        r"key_padding_mask.*\[S\], \[5\]": call(
            *[(5, E)] * 3, key_padding_mask=torch.zeros(1, 5, dtype=torch.bool)
        ),
        r"attn_mask.*\[8, 5, 5\]": call(*[(5, 2, E)] * 3, attn_mask=torch.zeros(2, 5, 5)),
        "attn_mask.*int64.*does not attend": call(
            *[(5, 2, E)] * 3, attn_mask=torch.zeros(5, 5, dtype=torch.int64)
        ),
        "need_weights.*nested": lambda: MultiheadAttention(E, H, batch_first=True)(
            NESTED, NESTED, NESTED
        ),
        "value.*lengths.*key": lambda: MultiheadAttention(E, H)(
            LONGER, LONGER, OTHER, need_weights=False
        ),
        "key.*not nested": lambda: MultiheadAttention(E, H)(
            NESTED, torch.zeros(1, 2, E), NESTED, need_weights=False
        ),
    },
    InvalidType: {
        "attn_mask.*str": call(*[(5, 2, E)] * 3, attn_mask="causal"),
    },
}


@pytest.mark.parametrize(
    ("kind", "message"), [(kind, message) for kind, rows in ERRORS.items() for message in rows]
)
def test_errors_name_the_argument(kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        ERRORS[kind][message]()


def test_the_constructors_mistakes_are_torchs() -> None:
    with pytest.raises(AssertionError, match="divisible"):
        MultiheadAttention(10, 3)
    with pytest.raises(ValueError, match="greater than 0"):
        MultiheadAttention(0, 3)
