"""MoBA, MSA, NSA and differential attention of examples/ against their definitions in float64."""

from __future__ import annotations

import math
import runpy
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests.conftest import ROOT
from tests.peak import only_linux, printed
from tests.variants_catalogue import assert_all_close

LENGTHS = [1, 5, 16, 53]
BLOCK, TOP_K = 8, 3


def example(name: str) -> dict[str, Any]:
    """Return the names of an example, which does not run its ``main``."""
    return runpy.run_path(str(ROOT / "examples" / f"{name}.py"))


def leaf(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def best_of(scores: dict[int, float], many: int) -> set[int]:
    """Return the keys of the ``many`` largest values."""
    return set(sorted(scores, key=lambda each: -scores[each])[:many])


def softmax_over(s: Tensor, seen: Tensor) -> Tensor:
    """Return the probabilities of the seen keys; a row without any has zeros."""
    return s.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num()


def results(out: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """The output and the gradients of a weighted sum of it."""
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=out.dtype)
    grads = torch.autograd.grad((out * weights).sum(), list(leaves.values()))
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


def own_and(earlier: Any, shape: tuple[int, int, int], block: int, many: int) -> Tensor:
    """Keys that rows see [B, H, N, N]: the row's block up to the row, and the best earlier ones.

    Args:
        earlier: score of row m for block i, ``(b, h, m, i) -> float``.
        shape: B, H and N.
        block: keys in a block.
        many: of earlier blocks.
    """
    batch, heads, N = shape
    seen = torch.zeros(batch, heads, N, N, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            for m in range(N):
                own = m // block
                for i in {own} | best_of({i: earlier(b, h, m, i) for i in range(own)}, many):
                    seen[b, h, m, i * block : min((i + 1) * block, m + 1)] = True
    return seen


def masked(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Attention over seen keys; k, v and what is seen have as many heads as q, or a divisor."""
    k, v, seen = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v, seen))
    return softmax_over(q @ k.mT / math.sqrt(q.shape[3]), seen) @ v


@pytest.mark.parametrize("N", LENGTHS)
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_moba(N: int, kv_heads: int) -> None:
    """Section 2.2: s_i = <q, mean of K[I_i]>; future blocks hidden, the own one always there."""
    leaves = {"q": leaf(2, 4, N, 8, seed=1)}
    leaves |= {"k": leaf(2, kv_heads, N, 8, seed=2), "v": leaf(2, kv_heads, N, 5, seed=3)}
    q, k, v = leaves.values()
    keys = k.detach().repeat_interleave(4 // kv_heads, 1)

    def affinity(b: int, h: int, m: int, i: int) -> float:
        return float(q[b, h, m].detach() @ keys[b, h, i * BLOCK : (i + 1) * BLOCK].mean(0))

    seen = own_and(affinity, (2, 4, N), BLOCK, TOP_K - 1)
    due = results(masked(q, k, v, seen), leaves)
    moba = example("moba")["moba"]
    assert_all_close(results(moba(q, k, v, BLOCK, TOP_K), leaves), due)
    last = moba(q[:, :, -3:], k, v, BLOCK, TOP_K)
    assert_all_close({"last rows": last.detach()}, {"last rows": due["out"][:, :, -3:]})


@pytest.mark.parametrize("N", LENGTHS)
def test_msa(N: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks by the largest index score of their keys, per group; the KL loss over what is seen."""
    leaves = {"q": leaf(2, 6, N, 8, seed=1), "k": leaf(2, 2, N, 8, seed=2)}
    leaves["v"] = leaf(2, 2, N, 5, seed=3)
    index = {"index_q": leaf(2, 2, N, 4, seed=4), "index_k": leaf(2, 1, N, 4, seed=5)}
    q, k, v = leaves.values()
    index_q, index_k = index.values()
    s = index_q @ index_k.mT / 2
    fixed = s.detach()

    def largest(b: int, h: int, m: int, i: int) -> float:
        return float(fixed[b, h, m, i * BLOCK : (i + 1) * BLOCK].max())

    seen = own_and(largest, (2, 2, N), BLOCK, TOP_K - 1)
    due = results(masked(q, k, v, seen), leaves)
    names = example("msa")
    monkeypatch.setitem(names["choose_blocks"].__globals__, "ROWS", 7)
    blocks = names["choose_blocks"](index_q, index_k, BLOCK, TOP_K)
    assert_all_close(results(names["msa"](q, k, v, blocks, BLOCK), leaves), due)
    last = names["choose_blocks"](index_q[:, :, -3:], index_k, BLOCK, TOP_K)
    assert torch.equal(last, blocks[:, :, -3:])

    target = (q @ k.repeat_interleave(3, 1).mT / math.sqrt(8)).detach()
    target = softmax_over(target, seen.repeat_interleave(3, 1)).unflatten(1, (2, 3)).mean(2)
    logs = s.masked_fill(~seen, -math.inf).log_softmax(-1).masked_fill(~seen, 0)
    kl = (torch.special.xlogy(target, target) - target * logs).sum(-1).mean()
    loss = names["index_loss"](q, k, index_q, index_k, blocks, BLOCK)
    entropy = -torch.special.xlogy(target, target).sum(-1).mean()
    assert_all_close(results(loss - entropy, index), results(kl, index))
    assert all(each is None for each in torch.autograd.grad(loss, [q, k], allow_unused=True))


def compressed(module: Any, x: Tensor, length: int, stride: int) -> Tensor:
    """Equation 7: an MLP of each ``length`` tokens, ``stride`` apart, with their positions."""
    starts = range(0, x.shape[2] - length + 1, stride)
    found = [module.mlp((x[:, :, i : i + length] + module.position).flatten(2)) for i in starts]
    return torch.stack(found, 2) if found else x[:, :, :0]


def nsa_by_definition(model: Any, x: Tensor) -> Tensor:
    """Equations 5 to 11 of the paper, head after head and row after row."""
    length, stride, block, top_k, window = model.sizes
    batch, N = x.shape[:2]
    heads, head = model.q.out_features // model.head, model.head
    q = model.q(x).view(batch, N, heads, head).transpose(1, 2)
    kv = model.kv(x).view(batch, N, 3, 2, model.groups, head)
    k, v = ([kv[:, :, branch, i].transpose(1, 2) for branch in range(3)] for i in (0, 1))
    k[0] = compressed(model.compress_k, k[0], length, stride)
    v[0] = compressed(model.compress_v, v[0], length, stride)
    row, key = torch.arange(N)[:, None], torch.arange(N)
    past = torch.arange(k[0].shape[2]) * stride + length - 1 <= row
    seen = [past.expand(batch, 1, -1, -1)]
    wide = k[0].repeat_interleave(heads // model.groups, 1)
    p = softmax_over(q @ wide.mT / math.sqrt(head), past).detach()
    p = p.unflatten(1, (model.groups, -1)).sum(2)  # equation 10
    selected = torch.zeros(batch, model.groups, N, N, dtype=torch.bool)
    for b in range(batch):
        for g in range(model.groups):
            for t in range(N):
                own = t // block
                fixed = {0, own, max(0, own - 1)}
                rest = {j: score(p[b, g, t], j, model.sizes) for j in range(own + 1)}
                rest = {j: value for j, value in rest.items() if j not in fixed}
                for j in fixed | best_of(rest, max(0, top_k - len(fixed))):
                    selected[b, g, t, j * block : min((j + 1) * block, t + 1)] = True
    seen += [selected, ((key <= row) & (key > row - window)).expand(batch, 1, -1, -1)]
    gates = model.gates(x).sigmoid().view(batch, N, heads, 3)
    out = torch.zeros_like(q)
    for branch in range(3):
        part = masked(q, k[branch], v[branch], seen[branch])
        out = out + gates[..., branch].transpose(1, 2)[..., None] * part
    return model.out(out.transpose(1, 2).reshape(batch, N, -1))


def score(p: Tensor, j: int, sizes: Any) -> float:
    """Equation 9, whose indices count from 1: block j by the probabilities of compressed keys."""
    length, stride, block = sizes[:3]
    total = 0.0
    for m in range(block // stride):
        for n in range(length // stride):
            at = (block // stride) * (j + 1) - m - n  # from 1
            if 1 <= at <= len(p):
                total += float(p[at - 1])
    return total


@pytest.mark.parametrize("N", LENGTHS)
@pytest.mark.parametrize("sizes", [(4, 2, 8, 4, 6), (8, 4, 4, 5, 1), (4, 4, 8, 3, 60)], ids=str)
def test_nsa(N: int, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and the gradients of the tokens and of every parameter."""
    names = example("nsa")
    monkeypatch.setitem(names["choose_blocks"].__globals__, "ROWS", 7)
    torch.manual_seed(0)
    model = names["NativeSparseAttention"](12, 6, 2, 8, names["Sizes"](*sizes)).double()
    x = leaf(2, N, 12, seed=1)
    leaves = {"x": x, **dict(model.named_parameters())}
    if sizes[0] > N:  # no compressed key: its MLPs have no part
        leaves = {name: each for name, each in leaves.items() if "compress" not in name}
    got, due = (results(each, leaves) for each in (model(x), nsa_by_definition(model, x)))
    assert_all_close(got, due)


@only_linux
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["moba", "msa", "nsa"])
def test_memory_follows_the_lists(name: str) -> None:
    """Forward and backward of 8,192 rows take less than a mask of N x N bytes."""
    code = f"""
import runpy, torch
from tests.peak import Peak
names = runpy.run_path("examples/{name}.py")
torch.set_num_threads(1)
def run(n):
    q = torch.randn(1, 1, n, 16, requires_grad=True)
    if "{name}" == "moba":
        return names["moba"](q, q, q, 16, 2)
    if "{name}" == "msa":
        blocks = names["choose_blocks"](q[..., :4], q[..., :4], 16, 2)
        loss = names["index_loss"](q, q, q[..., :4], q[..., :4], blocks, 16)
        return names["msa"](q, q, q, blocks, 16).sum() + loss
    sizes = names["Sizes"](32, 16, 16, 3, 32)
    return names["NativeSparseAttention"](16, 1, 1, 16, sizes)(q[0])
run(256).sum().backward()
peak = Peak()
run(8192).sum().backward()
print(peak.mib())
"""
    ((most,),) = printed(code)
    assert float(most) < 64


def test_differential() -> None:
    """Both maps in one call: output and gradients."""
    given = leaf(2, 2, 4, 9, 8, seed=1), leaf(2, 2, 2, 9, 8, seed=2), leaf(2, 2, 9, 5, seed=3)
    weight = leaf(1, seed=4)
    leaves = (*given, weight)
    got = example("differential")["differential"](*given, weight, tilewise.masks.causal())

    q, k, v = given
    seen = torch.ones(9, 9, dtype=torch.bool).tril()
    s = q @ k.repeat_interleave(2, 2).transpose(-1, -2) / math.sqrt(8)
    one, two = softmax_over(s, seen).unbind(1)
    due = (one - weight * two) @ v.repeat_interleave(2, 1)
    along = leaf(*due.shape, seed=5).detach()
    found = [
        {
            "out": out.detach(),
            **dict(zip("qkvw", torch.autograd.grad(out, leaves, along), strict=True)),
        }
        for out in (got, due)
    ]
    assert_all_close(*found)
