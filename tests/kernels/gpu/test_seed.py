"""The seed of dropout stays in memory that the kernels read, so that a CUDA graph can replay it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests.contract import assert_all_same_bits, assert_same_bits
from tests.kernels.test_dropout import ORIGINS, check_part
from tilewise.kernels import gpu
from tilewise.kernels.gpu import Launch

ROWS = pytest.mark.parametrize("rows", [37, 3], ids=["forward", "decode"])


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """The launches of the calls, as a graph that is captured while they run holds them."""
    found: list[Launch] = []
    run = gpu.run

    def capture(launches: Any) -> list[Any]:
        found.extend(launches := list(launches))
        return run(launches)

    monkeypatch.setattr(gpu, "run", capture)
    return found


def seed_of(one: Launch) -> Tensor | None:
    """The memory of the seed, which every walk has as the third of three scalars."""
    call = one.arguments.get("call")
    scalars = one.arguments.get("scalars") if call is None else call.numbers
    return None if scalars is None or scalars[2] is None else scalars[2][0]


def _leaves(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    shapes = ((1, 2, rows, 16), (1, 2, 45, 16), (1, 2, 45, 16))
    q, k, v = (torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)
    return q, k, v


def _step(leaves: tuple[Tensor, Tensor, Tensor], seed: int | Tensor | None) -> tuple[Tensor, ...]:
    """The output and the gradients of a call."""
    mask = tilewise.masks.causal()
    out = tilewise.attention(*leaves, mask=mask, dropout_p=0.4, seed=seed, backend="gpu")
    return out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))


@ROWS
def test_a_replay_drops_by_the_value_that_stands_there(taken: list[Launch], rows: int) -> None:
    leaves = _leaves(rows)
    due = [_step(leaves, seed) for seed in (5, -7)]
    taken.clear()
    got = _step(leaves, 5)
    graph = list(taken)
    places = [place for place in map(seed_of, graph) if place is not None]
    assert len(places) >= 3  # the forward pass, and the gradients by queries and by keys
    assert len({place.data_ptr() for place in places}) == 1
    for before, expected in zip((5, -7), due, strict=True):
        places[0].fill_(before)
        gpu.run(graph)
        for name, x, y in zip(("out", "dq", "dk", "dv"), got, expected, strict=True):
            assert_same_bits(x, y, f"{name} of {before}")
    assert not torch.equal(due[0][0], due[1][0])


@pytest.mark.parametrize("given", [None, 5, torch.tensor(5), torch.tensor([5])], ids=str)
def test_the_host_never_reads_the_seed(
    given: int | Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that would wait for everything before it; a graph would keep the number."""

    def read(tensor: Tensor, *_: object) -> Any:
        raise AssertionError(f"the host reads {tensor.dtype} {tuple(tensor.shape)}")

    leaves = _leaves(37)
    torch.manual_seed(3)
    due = _step(leaves, int(torch.randint(0, 2**63 - 1, ())) if given is None else 5)
    for name in ("item", "tolist", "__int__", "__index__", "__bool__", "__float__"):
        monkeypatch.setattr(Tensor, name, read)
    torch.manual_seed(3)
    got = _step(leaves, given)
    monkeypatch.undo()
    assert_all_same_bits(got, due, "a result")


def test_the_backward_pass_keeps_the_seed_of_its_forward_pass() -> None:
    """Also where the caller writes the next one into the same memory before it."""
    leaves, seed = _leaves(37), torch.tensor(5)
    due = _step(leaves, 5)
    mask = tilewise.masks.causal()
    out = tilewise.attention(*leaves, mask=mask, dropout_p=0.4, seed=seed, backend="gpu")
    seed.add_(1)
    got = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert_all_same_bits(got, due[1:], "a gradient")


@pytest.mark.parametrize("seed", [5, torch.tensor(5)], ids=["number", "tensor"])
def test_derivatives_beyond_the_first_drop_the_same(seed: int | Tensor) -> None:
    leaves = _leaves(9)

    def second(backend: str, seed: int | Tensor) -> tuple[Tensor, ...]:
        out = tilewise.attention(*leaves, dropout_p=0.4, seed=seed, backend=backend)
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(torch.cat([x.flatten() for x in first]).square().sum(), leaves)

    torch.testing.assert_close(second("gpu", seed), second("tiled", 5))


def test_without_dropout_there_is_no_seed(taken: list[Launch]) -> None:
    q, k, v = _leaves(37)
    tilewise.attention(q, k, v, seed=5, backend="gpu")
    assert all(seed_of(each) is None for each in taken)


@pytest.mark.parametrize("origin", ORIGINS, ids=str)
@pytest.mark.parametrize("queries", [3, 70])
def test_a_part_drops_what_the_whole_drops(queries: int, origin: tuple[int, int, int, int]) -> None:
    check_part("gpu", queries, origin)
