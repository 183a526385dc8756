"""Key lists on the GPU backend, in Triton's interpreter: read in place, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

import tilewise
from tests.cases import Case, Inputs, build, drawn
from tests.contract import assert_all_exact, assert_all_same_bits, assert_exact, assert_same_bits
from tests.oracle import Outcome, Sent, attend, check_all
from tests.test_key_lists import seen_by
from tilewise import KeyBlocks, masks, scores
from tilewise.engine.gathered import Gathering
from tilewise.kernels.gpu import backend as gpu
from tilewise.kernels.gpu.config import FAMILIES, Parts, config_for
from tilewise.kernels.gpu.walk import descriptors
from tilewise.variants.values import as_score

QUERIES, KEYS = 7, 80  # ten blocks of 8, five of 16, three of 32 of which the last is half
SIZES: dict[str, Any] = {"batch": 1, "heads": 4, "queries": QUERIES, "keys": KEYS}
SIZES |= {"head_dim": 16, "value_dim": 24}
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


@pytest.fixture(autouse=True)
def without_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here may copy the keys of lists."""

    def refuse(*_: Any) -> None:
        raise AssertionError("keys were copied")

    monkeypatch.setattr(Gathering, "_copies", refuse)


def lists_of(many: int, most: int, groups: int = QUERIES, heads: int = 2) -> Tensor:
    """Random lists [1, heads, groups, many] with repeats and holes; the first is empty."""
    drawing = torch.Generator().manual_seed(many)
    lists = torch.randint(-1, most, (1, heads, groups, many), generator=drawing)
    lists[:, :, 0] = -1
    return lists


def as_mask(keys: Tensor | KeyBlocks, queries: int = QUERIES, count: int = KEYS) -> Tensor:
    """Return what lists name as booleans [1, 4, M, N]."""
    if isinstance(keys, Tensor):
        keys = KeyBlocks(keys, 1)
    blocks = -(-count // keys.block)
    seen = seen_by(keys.indices, blocks).repeat_interleave(keys.block, -1)[..., :count]
    seen = seen.repeat_interleave(keys.query_block, 2)[:, :, :queries]
    return seen.repeat_interleave(4 // seen.shape[1], 1)


def results(call: Any, leaves: list[Tensor]) -> dict[str, Tensor]:
    """Return output, lse, entropy and the gradients of all leaves through the three."""
    out, lse, stats = call(*leaves)
    sent = [drawn(*x.shape, seed=7 + i).to(x.dtype) for i, x in enumerate((out, lse, lse))]
    grads = torch.autograd.grad([out, lse, stats.entropy], leaves, sent, materialize_grads=True)
    found = {"out": out, "lse": lse, "entropy": stats.entropy}
    found |= {f"gradient {i}": grad for i, grad in enumerate(grads)}
    return {name: tensor.detach() for name, tensor in found.items()}


def check(
    lists: Tensor | KeyBlocks, mask: Any = None, score: Any = None, draws: int = 1, **sizes: Any
) -> Outcome:
    """Hold a call with lists to the 2x rule, against plain attention with the lists as a mask.

    Several draws count as one problem: the largest error of few numbers says little. What came is
    returned, with a dimension of draws.
    """
    keys = lists if isinstance(lists, KeyBlocks) else KeyBlocks(lists, 1)
    case = Case("lists", **{**SIZES, **sizes})
    given = {"mask": mask, "score": None if score is None else as_score(score), "keys": keys}
    inputs = [build(case, draw)._replace(**given) for draw in range(draws)]

    def run(each: Inputs, sent: Sent) -> Outcome:
        return attend(each, "gpu", sent, statistics=True)

    return check_all(inputs, run, "lists", entropy=True)


LISTS: dict[str, Tensor | KeyBlocks] = {
    "keys": lists_of(9, KEYS),
    "keys of all heads": lists_of(30, KEYS, heads=1),
    "many keys": lists_of(130, KEYS),  # with repeats nearly all of them
    "neighbours": torch.arange(5, 30).expand(1, 2, QUERIES, 25).clone(),
    "one key": lists_of(1, KEYS),
    "blocks of 8": KeyBlocks(lists_of(3, 10), 8),
    "blocks of 16": KeyBlocks(lists_of(3, 5), 16),
    "blocks of 16, shared": KeyBlocks(lists_of(3, 5, groups=2), 16, 4),
    "blocks of 40": KeyBlocks(lists_of(2, 2, groups=2, heads=1), 40, 4),
    "a shorter last block": KeyBlocks(lists_of(2, 3), 32),
    "one block": KeyBlocks(lists_of(1, 1, groups=1), 80, 7),
    "a tile of a page": KeyBlocks(lists_of(2, 2, groups=2), 64, 4),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_and_blocks(name: str) -> None:
    """Of single keys and of blocks, for each head and for all; with a mask and a score."""
    count = 128 if name == "a tile of a page" else KEYS
    check(LISTS[name], masks.causal(), scores.alibi(SLOPES), keys=count)


@pytest.mark.parametrize("name", ["keys", "blocks of 40", "a shorter last block"])
def test_products_in_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where registers cannot hold whole rows: what a part reads is found by its own names."""
    config = config_for("interpreter")._replace(parts=Parts(0, 0, 0, 0, 0))
    monkeypatch.setattr(gpu, "_config", lambda problem: config)
    check(LISTS[name], masks.causal(), head_dim=40)


@pytest.mark.parametrize(
    ("dtype", "heads"), [(torch.float16, 1), (torch.float16, 4), (torch.bfloat16, 2)], ids=str
)
def test_sixteen_bits_and_groups(dtype: torch.dtype, heads: int) -> None:
    """Heads that share keys, and that do not; no mask and no score."""
    sizes: dict[str, Any] = {"dtype": dtype, "kv_heads": heads}
    check(lists_of(12, KEYS, heads=heads), **sizes)
    check(KeyBlocks(lists_of(2, 5, groups=2, heads=1), 16, 4), **sizes)


def test_sinks_and_dead_rows() -> None:
    """Rows that see nothing, by their list or by the mask, and one more logit for each head."""
    check(lists_of(20, KEYS), masks.window(30, 9, align="top_left"), sinks=True, draws=6)


LEARNED: dict[str, tuple[tuple[int, ...], Any]] = {
    "a factor of heads": (
        (4,),
        lambda heat: lambda s, b, h, m, n: s * (1 + 0.1 * heat[h]),
    ),
    "of keys": ((4, KEYS), lambda t: lambda s, b, h, m, n: s + t[h, n]),
    "of rows": ((QUERIES,), lambda t: lambda s, b, h, m, n: s + t[m]),
    "of distances": (
        (4, KEYS + QUERIES),
        lambda t: lambda s, b, h, m, n: s + t[h, n - m + QUERIES],
    ),
    "of buckets": (
        (4, 7),
        lambda t: lambda s, b, h, m, n: s + t[h, tilewise.minimum(abs(m - n) // 8, 6)],
    ),
    "a bias": ((1, 4, QUERIES, KEYS), scores.bias),
}


@pytest.mark.parametrize("name", LEARNED)
def test_gradients_of_what_a_score_captures(name: str) -> None:
    """Numbers of heads, rows, keys, distances and pairs; single keys, and blocks."""
    shape, score = LEARNED[name]
    by_blocks = name in ("of keys", "of buckets")
    keys = KeyBlocks(lists_of(2, 5, groups=2), 16, 4) if by_blocks else lists_of(9, KEYS)
    check(keys, score=score(drawn(*shape, seed=9).requires_grad_()))


def test_gradients_alone() -> None:
    """Each of q, k and v alone has the bits that it has beside the others."""
    keys = lists_of(9, KEYS)
    leaves = [drawn(1, 4, QUERIES, 16), drawn(1, 2, KEYS, 16), drawn(1, 2, KEYS, 24)]

    def grads(wanted: tuple[int, ...]) -> tuple[Tensor, ...]:
        own = [x.clone().requires_grad_(i in wanted) for i, x in enumerate(leaves)]
        out = tilewise.attention(*own, keys=keys, backend="gpu")
        return torch.autograd.grad(out.square().sum(), [own[i] for i in wanted])

    for i, due in enumerate(grads((0, 1, 2))):
        assert_same_bits(grads((i,))[0], due, f"gradient {i}")


def test_a_list_is_a_set() -> None:
    """Order, the memory of keys and values, and a second run change no bit of a gradient."""
    keys = lists_of(9, KEYS, heads=1)
    shuffled = keys[..., torch.randperm(9, generator=torch.Generator().manual_seed(1))]
    fused = drawn(1, KEYS, 3, 2, 16)
    sources = [(fused[:, :, 1], fused[:, :, 2], keys), (fused[:, :, 1], fused[:, :, 2], shuffled)]
    sources.append((sources[0][0].clone(), sources[0][1].clone(), keys))
    sources.append((fused[:, :, 1], sources[0][1].clone(), keys))  # steps that differ
    sources.append(sources[0])
    found = []
    for k, v, lists in sources:
        q = drawn(1, 4, QUERIES, 16).requires_grad_()
        own = [x.transpose(1, 2).detach().requires_grad_() for x in (k, v)]
        out = tilewise.attention(q, *own, keys=lists, backend="gpu")
        found.append((out, *torch.autograd.grad(out.square().sum(), (q, *own))))
    for other in found[1:]:
        assert_all_same_bits(other, found[0], "of a set")


@pytest.mark.parametrize("block", [1, 16])
def test_what_is_no_key_counts_as_none(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device, where nobody waits to look at values."""
    monkeypatch.setattr("tilewise.engine.key_lists.by_core", lambda _: False)
    monkeypatch.setattr("tilewise.engine.key_lists._check_values", lambda *_: None)
    count = KEYS // block
    lists = lists_of(9, count)
    wrong = lists.clone()
    wrong[..., 1::4] = torch.tensor([count, 2**31 - 1, -(2**31)], dtype=torch.int64)[
        : wrong[..., 1::4].shape[-1]
    ]
    right = torch.where((wrong < 0) | (wrong >= count), -1, wrong)
    assert not torch.equal(wrong, right)
    found = []
    for keys in (wrong, right):
        q = drawn(1, 4, QUERIES, 16).requires_grad_()
        own = [drawn(1, 2, KEYS, 16, seed=seed).requires_grad_() for seed in (1, 2)]
        out = tilewise.attention(q, *own, keys=KeyBlocks(keys, block), backend="gpu")
        found.append((out, *torch.autograd.grad(out.square().sum(), (q, *own))))
    assert_all_same_bits(found[0], found[1], "without them")


def test_values_that_are_a_part_of_the_keys() -> None:
    """A latent cache in the absorbed form: the gradients of both views meet in one tensor."""
    keys = lists_of(9, KEYS, heads=1)
    found = []
    for backend, dtype in (("gpu", torch.float32), ("tiled", torch.float32), ("tiled", None)):
        q, latent = (
            x.to(dtype or torch.float64).requires_grad_()
            for x in (drawn(1, 4, QUERIES, 48), drawn(1, 1, KEYS, 48, seed=1))
        )
        own: dict[str, Any] = {"keys": keys} if backend == "gpu" else {"mask": as_mask(keys)}
        out = tilewise.attention(q, latent, latent[..., :32], backend=backend, **own)
        found.append((out.detach(), *torch.autograd.grad(out.square().sum(), (q, latent))))
    assert_all_exact(found[0], found[1], found[2], ("out", "dq", "dlatent"))


@pytest.mark.parametrize("sinks", [False, True])
def test_packed_sequences(sinks: bool) -> None:
    """Tiles of packed keys have keys of two sequences; one has no keys, and one no rows."""
    ends_q, ends_k = torch.tensor([0, 5, 5, 9, 12]), torch.tensor([0, 7, 30, 30, 45])
    lists = torch.full((2, 12, 6), -1)
    drawing = torch.Generator().manual_seed(3)
    for i in (0, 3):
        many = int(ends_k[i + 1] - ends_k[i])
        rows = slice(int(ends_q[i]), int(ends_q[i + 1]))
        shape = lists[:, rows].shape
        lists[:, rows] = torch.randint(-1, many, shape, generator=drawing)
    seen = torch.zeros(4, 4, 5, 23, dtype=torch.bool)
    for i in range(4):
        rows = slice(int(ends_q[i]), int(ends_q[i + 1]))
        named = seen_by(lists[None, :, rows], 23)[0].repeat_interleave(2, 0)
        seen[i, :, : named.shape[1]] = named
    tensors = [drawn(12, 4, 16), drawn(45, 2, 16, seed=1), drawn(45, 2, 24, seed=2), SLOPES]

    def found(backend: str, dtype: torch.dtype) -> dict[str, Tensor]:
        own: dict[str, Any] = {"mask": masks.causal()}
        own |= {"keys": lists} if backend == "gpu" else {}
        if backend != "gpu":
            own["mask"] = masks.dense(seen) & masks.causal()

        def call(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Any:
            given: dict[str, Any] = {**own, "sinks": sink if sinks else None, "backend": backend}
            return tilewise.attention_varlen(
                q, k, v, ends_q, ends_k, return_lse=True, return_stats=True, **given
            )

        return results(call, [x.to(dtype).requires_grad_() for x in tensors])

    got, plain, oracle = (
        found(backend, dtype)
        for backend, dtype in (
            ("gpu", torch.float32),
            ("tiled", torch.float32),
            ("tiled", torch.float64),
        )
    )
    for name, tensor in got.items():
        assert_exact(tensor, plain[name], oracle[name], name)


@pytest.mark.parametrize("lists", [lists_of(0, 1), torch.full((1, 1, QUERIES, 3), -1)])
def test_nothing_listed(lists: Tensor) -> None:
    """No list names a key: everything is 0."""
    leaves = [drawn(1, 4, QUERIES, 16), drawn(1, 2, KEYS, 16), drawn(1, 2, KEYS, 24)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    out = tilewise.attention(*leaves, keys=lists, backend="gpu")
    for found in (out, *torch.autograd.grad(out.square().sum(), leaves)):
        assert bool((found == 0).all())


@pytest.mark.parametrize(("queries", "count"), [(1, 1), (0, 5), (5, 0), (1, 300)])
def test_small_sizes(queries: int, count: int) -> None:
    """One pair; no rows; no keys; one row of more keys than a split has."""
    drawing = torch.Generator().manual_seed(0)
    lists = torch.randint(-1, max(count, 1), (1, 2, queries, 150), generator=drawing)
    lists = lists if count else torch.full_like(lists, -1)
    check(lists, queries=queries, keys=count)


def test_lists_in_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums go on over the calls that lists are divided among, in the order of the rows."""
    whole = check(lists_of(9, KEYS))
    monkeypatch.setattr("tilewise.engine.gathered._INVERTED", 4 * 9 * 2)
    parts = check(lists_of(9, KEYS))
    for name, grad in whole.grads.items():
        torch.testing.assert_close(parts.grads[name], grad, rtol=1e-5, atol=1e-6)


HALF = torch.float16
BY_ENGINE: dict[str, tuple[int, int, int, torch.dtype, bool]] = {
    # rows of a list, width, keys of a block, dtype; whether descriptors are made
    "decoding": (1, 16, 64, HALF, True),
    "rows": (24, 24, 64, torch.bfloat16, True),
    "longer blocks": (24, 16, 128, HALF, True),
    "single keys": (24, 16, 1, HALF, False),
    "shorter blocks": (24, 16, 32, HALF, False),
    "32 bits": (24, 16, 64, torch.float32, False),
    "rows of 40 bytes": (24, 20, 64, HALF, False),
}


@pytest.mark.parametrize("name", BY_ENGINE)
def test_the_copy_engine_reads_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 64 keys and more by tensor descriptors (TMA): the bits of loads by pointers.

    What no list names may be NaN.
    """
    rows, width, block, dtype, described = BY_ENGINE[name]
    made: list[list[int]] = []

    def noted(tensor: Tensor, sizes: list[int], steps: list[int], of: list[int]) -> Any:
        made.append(of)
        return maker(tensor, sizes, steps, of)

    maker = TensorDescriptor
    monkeypatch.setattr(descriptors, "TensorDescriptor", noted)
    blocks = 512 // block
    lists = torch.randint(-1, blocks, (1, 1, 2, 2), generator=torch.Generator().manual_seed(5))
    lists[lists == blocks - 2] = 0
    leaves = [
        drawn(1, heads, length, width, seed=seed).to(dtype)
        for seed, (heads, length) in enumerate([(2, 2 * rows), (1, 512), (1, 512)])
    ]
    for each in leaves[1:]:
        each[:, :, -2 * block : -block] = torch.nan  # the block that no list names
    found = []
    family = FAMILIES["interpreter"]
    assert family.descriptors
    for reads in (True, False):
        monkeypatch.setitem(FAMILIES, family.name, family._replace(descriptors=reads))
        inputs = [each.clone().requires_grad_() for each in leaves]
        keys = KeyBlocks(lists, block, rows)
        out, lse, _ = tilewise.attention(
            *inputs, keys=keys, mask=masks.causal(), backend="gpu", return_lse=True
        )
        grad_q = torch.autograd.grad(out, inputs[0], torch.ones_like(out))
        found.append((out.detach(), lse.detach(), *grad_q))
        assert out.isfinite().all()
        assert len(made) == (4 if described else 0)  # forward and dQ, of keys and of values
    assert_all_same_bits(found[0], found[1], name)


def test_what_is_moved() -> None:
    """Explain says which backward runs, and counts its bytes: of blocks exactly."""
    q, k, v = (torch.empty(1, heads, n, 16) for heads, n in ((4, QUERIES), (2, KEYS), (2, KEYS)))

    def passes(keys: Tensor | KeyBlocks, *packed: Tensor) -> dict[str, dict[str, tuple[int, int]]]:
        qkv = [x[0].transpose(0, 1) if packed else x for x in (q, k, v)]
        found = tilewise.explain(*qkv, *packed, keys=keys, backend="gpu")
        assert "dK and dV by inverse lists, in tiles of 16 keys" in str(found)
        assert found.account is not None
        return {
            each.name: {of.name: (of.read, of.written) for of in each.operands}
            for each in found.account.backward.ours.passes
        }

    blocks = passes(KeyBlocks(lists_of(3, 5), 16))
    assert list(blocks) == ["inverse", "delta", "dq", "dkdv", "sums"]
    entries, stored = QUERIES * 2 * 3, 2 * KEYS * 16  # lists of both heads; numbers of a tensor
    assert blocks["dkdv"]["q"] == (entries * 2 * 16 * 4, 0)  # of the two rows of each list
    assert blocks["dkdv"]["k"] == (stored * 4, 0)
    assert blocks["dkdv"]["grad_v"] == (stored * 4, stored * 4)
    assert blocks["dkdv"]["inverse"] == (entries * 4, 0)
    singles = passes(lists_of(9, KEYS))
    assert singles["dkdv"]["q"] == (QUERIES * 2 * 9 * 2 * 16 * 4, 0)
    starts = torch.tensor([0, 3, QUERIES]), torch.tensor([0, 20, KEYS])
    assert passes(lists_of(9, KEYS)[0], *starts) == singles
    more = passes(lists_of(18, KEYS))
    assert more["dkdv"]["q"][0] == 2 * singles["dkdv"]["q"][0]
    assert more["dq"]["k"][0] == 2 * singles["dq"]["k"][0]
    assert more["dkdv"]["k"] == singles["dkdv"]["k"]
