"""vmap and batched gradients: one call for all, with what its masks and scores read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, func

import tilewise
from tests.engine.samples import packed
from tests.plain import attend
from tilewise import masks, scores
from tilewise.errors import Unsupported

# torch's own, when forward mode first runs.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")

Call = Callable[..., Tensor]
DOUBLE = torch.float64
CALLS, B, HEADS, ROWS, KEYS = 3, 2, 2, 3, 4


def _draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(CALLS, *shape, generator=generator, dtype=DOUBLE)


Q, K, V = _draw(B, HEADS, ROWS, 2), _draw(B, 1, KEYS, 2), _draw(B, 1, KEYS, 2, seed=1)
LENGTHS = torch.tensor([[1, 4], [3, 0], [2, 2]])
IDS = torch.arange(CALLS * KEYS).view(CALLS, KEYS) % 3 // 2


def _case(**keywords: Any) -> Callable[[str], Call]:
    """A call whose keywords are made from its last tensor."""

    def made(backend: str) -> Call:
        def call(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
            given = {name: make(*more) for name, make in keywords.items()}
            return tilewise.attention(q, k, v, **given, backend=backend)

        return call

    return made


def _score(make: Callable[[Tensor], Any]) -> Callable[[str], Call]:
    return _case(score=make)


def _mask(make: Callable[[Tensor], Any]) -> Callable[[str], Call]:
    return _case(mask=make)


CASES: dict[str, tuple[Callable[[str], Call], tuple[Tensor, ...]]] = {
    "causal": (_case(mask=masks.causal), ()),
    "expression": (_score(lambda t: lambda s, b, h, m, n: s * t[h] + b), (_draw(HEADS),)),
    "by item": (_score(lambda t: lambda s, b, h, m, n: s * t[b, h].tanh()), (_draw(B, HEADS),)),
    "bias": (_score(scores.bias), (_draw(HEADS, 1, KEYS),)),
    "bias by item": (_score(scores.bias), (_draw(B, 1, ROWS, KEYS),)),
    "alibi": (_score(lambda t: scores.alibi(t.detach())), (_draw(HEADS).abs(),)),
    "boolean": (_mask(lambda t: t), (_draw(ROWS, KEYS) > -0.5,)),
    "lengths": (_mask(masks.lengths), (LENGTHS,)),
    "document": (_mask(lambda t: masks.document(t, query_ids=t[:ROWS])), (IDS,)),
    "mask expression": (_mask(lambda t: lambda b, h, m, n: (t[n] == 1) | (n <= m + b)), (IDS,)),
    "sinks": (_case(sinks=lambda t: t), (_draw(HEADS),)),
    "dropout": (_case(dropout_p=lambda: 0.3, seed=lambda: 5), ()),
}


def _stacked(call: Call, arguments: tuple[Tensor, ...], dims: tuple[int | None, ...]) -> Any:
    found = [
        call(*(x if at is None else x.select(at, i) for x, at in zip(arguments, dims, strict=True)))
        for i in range(CALLS)
    ]
    if isinstance(found[0], tuple):
        return tuple(torch.stack(each) for each in zip(*found, strict=True))
    return torch.stack(found)


def _floats(arguments: tuple[Tensor, ...], name: str) -> tuple[int, ...]:
    found = [at for at, x in enumerate(arguments) if x.is_floating_point()]
    return tuple(found[:3] if name == "alibi" else found)


@pytest.mark.parametrize("name", CASES)
def test_vmap(name: str, backend: str) -> None:
    """Of every argument, of all but one, and along a last dimension."""
    make, more = CASES[name]
    call, arguments = make(backend), (Q, K, V, *more)
    every = (0,) * len(arguments)
    torch.testing.assert_close(func.vmap(call)(*arguments), _stacked(call, arguments, every))
    for held in range(len(arguments)):
        dims = tuple(None if at == held else 0 for at in range(len(arguments)))
        some = tuple(x[0] if at == held else x for at, x in enumerate(arguments))
        found = func.vmap(call, in_dims=dims)(*some)
        torch.testing.assert_close(found, _stacked(call, some, dims))
    last = tuple(x.movedim(0, -1) for x in arguments)
    found = func.vmap(call, in_dims=-1, out_dims=-1)(*last)
    torch.testing.assert_close(found.movedim(-1, 0), _stacked(call, arguments, every))


@pytest.mark.parametrize("name", CASES)
def test_vmap_of_gradients(name: str, backend: str) -> None:
    make, more = CASES[name]
    call, arguments = make(backend), (Q, K, V, *more)

    def scalar(*x: Tensor) -> Tensor:
        return call(*x).sin().sum()

    grad = func.grad(scalar, argnums=_floats(arguments, name))
    due = _stacked(grad, arguments, (0,) * len(arguments))
    torch.testing.assert_close(func.vmap(grad)(*arguments), due)


@pytest.mark.parametrize("name", CASES)
def test_jacobians(name: str, backend: str) -> None:
    """Both ways, and row by row: a gradient of each leaf for every element of the output."""
    make, more = CASES[name]
    arguments = tuple(x[0] for x in (Q, K, V, *more))
    call, wanted = make(backend), _floats(arguments, name)
    due = func.jacrev(call, argnums=wanted, chunk_size=1)(*arguments)
    torch.testing.assert_close(func.jacrev(call, argnums=wanted)(*arguments), due)
    torch.testing.assert_close(func.jacfwd(call, argnums=wanted)(*arguments), due)


@pytest.mark.parametrize("name", CASES)
def test_batched_gradients(name: str, backend: str) -> None:
    """``is_grads_batched`` is another vmap of torch's, which asks no rule."""
    make, more = CASES[name]
    arguments = tuple(x[0].clone() for x in (Q, K, V, *more))
    leaves = [arguments[at].requires_grad_() for at in _floats(arguments, name)]
    out = make(backend)(*arguments)
    toward = _draw(*out.shape, seed=3)
    due = [torch.autograd.grad(out, leaves, each, retain_graph=True) for each in toward]
    found = torch.autograd.grad(out, leaves, toward, is_grads_batched=True)
    torch.testing.assert_close(found, tuple(map(torch.stack, zip(*due, strict=True))))


def _plain(q: Tensor) -> Tensor:
    return attend(q, K[0], V[0], mask=lambda b, h, m, n: n <= m + KEYS - ROWS).out


@pytest.mark.parametrize("way", ["func", "autograd", "autograd, vectorized"])
def test_hessian(way: str, backend: str) -> None:
    """The first is two vmaps, one within the other."""

    def ours(q: Tensor) -> Tensor:
        return tilewise.attention(q, K[0], V[0], mask=masks.causal(), backend=backend)

    def hessian(f: Call) -> Any:
        def scalar(q: Tensor) -> Tensor:
            return f(q).sin().sum()

        if way == "func":
            return func.hessian(scalar)(Q[0])
        vectorize = way.endswith("vectorized")
        return torch.autograd.functional.hessian(scalar, Q[0], vectorize=vectorize)

    torch.testing.assert_close(hessian(ours), hessian(_plain))


def test_vmaps_nest(backend: str) -> None:
    call = CASES["expression"][0](backend)
    twice = func.vmap(func.vmap(call, in_dims=(0, None, None, 0)), in_dims=(0, 0, 0, None))
    gates = _draw(HEADS)
    found = twice(torch.stack([Q, 2 * Q]), K[:2], V[:2], gates)
    for i in range(2):
        for j in range(CALLS):
            due = call((1 + i) * Q[j], K[i], V[i], gates[j])
            torch.testing.assert_close(found[i, j], due)


def test_vmap_of_packed_sequences(backend: str) -> None:
    q, k, v, cu_q, cu_k = packed(grad=False)
    several = torch.stack([q, -q])

    def call(q: Tensor) -> Tensor:
        return tilewise.attention_varlen(q, k, v, cu_q, cu_k, backend=backend)

    found = func.vmap(call)(several)
    for each, out in zip(several, found, strict=True):
        torch.testing.assert_close(out, call(each))


@pytest.mark.parametrize("name", ["causal", "dropout"])
def test_vmap_of_no_call(name: str, backend: str) -> None:
    call = CASES[name][0](backend)
    assert func.jacrev(call)(Q[0][:, :, :0], K[0], V[0]).shape == (B, HEADS, 0, 2, B, HEADS, 0, 2)


def test_drawn_dropout_goes_by_randomness(backend: str) -> None:
    """torch's own refusal by default; the same pairs in every call; others are not there."""

    def call(q: Tensor) -> Tensor:
        return tilewise.attention(q, K[0], V[0], dropout_p=0.5, backend=backend)

    alike = Q[:1].expand(CALLS, *Q.shape[1:])
    with pytest.raises(RuntimeError, match="randomness"):
        func.vmap(call)(alike)
    same = func.vmap(call, randomness="same")(alike)
    torch.testing.assert_close(same, same[:1].expand_as(same))
    with pytest.raises(Unsupported, match="randomness"):
        func.vmap(call, randomness="different")(alike)


def test_a_wrong_length_is_found_under_vmap(backend: str) -> None:
    call = CASES["lengths"][0](backend)
    with pytest.raises(tilewise.errors.InvalidArgument, match="the length 5"):
        func.vmap(call)(Q, K, V, torch.tensor([[1, 4], [3, 5], [2, 2]]))


def test_what_vmap_cannot_give_to_each_call_is_refused(backend: str) -> None:
    q, k, v, cu_q, cu_k = packed(grad=False)

    def call(cu_q: Tensor) -> Tensor:
        return tilewise.attention_varlen(q, k, v, cu_q, cu_k, backend=backend)

    with pytest.raises(Unsupported, match="cu_seqlens"):
        func.vmap(call)(torch.stack([cu_q, cu_q]))
    gates = _draw(HEADS)
    with tilewise.checked(), pytest.raises(Unsupported, match="TILEWISE_CHECKED"):
        func.vmap(CASES["expression"][0](backend))(Q, K, V, gates)
