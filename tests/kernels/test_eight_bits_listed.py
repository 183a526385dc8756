"""Pages in 8 bits by key lists: exact for the numbers that the listed rows stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import tilewise
from tests.cases import Case, build
from tests.contract import assert_all_same_bits, assert_exact, assert_same_bits
from tests.kernels.targets import Target
from tests.kernels.test_eight_bits import SIZES, STORAGES, narrow, stands_for, truths
from tests.paged import in_pages, sequences_of
from tests.peak import only_linux, printed
from tests.test_key_lists import share_short_lists
from tests.test_paged import keywords_of
from tilewise import KeyBlocks, masks
from tilewise.errors import Unsupported

LENGTHS = ((1, 300), (20, 130), (3, 65), (2, 0), (0, 5))
MOST = max(keys for _, keys in LENGTHS)
LISTED = 40
CASES = [
    Case("plain", **SIZES, sequences=LENGTHS),
    Case("causal", **SIZES, sequences=LENGTHS, mask=("causal",), sinks=True),
    Case("scored", **SIZES, sequences=LENGTHS, mask=("window",), score=("softcap", "alibi_each")),
]


@pytest.fixture(autouse=True)
def short_lists_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long ones are: the calls here are small."""
    share_short_lists(monkeypatch)


def lists_of(heads: int, alike: bool, block: int = 1) -> Tensor:
    """Lists [heads, Tq, K] of packed rows, with holes and repeats; alike ones are shared."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for queries, keys in LENGTHS:
        named = -(-keys // block)
        shape = (heads, queries, LISTED // block)
        rows = torch.randint(-1, max(named, 1), shape, generator=generator)
        rows = rows if named else torch.full_like(rows, -1)
        for row in range(1, queries if alike else 0):
            rows[:, row, row % 3 == 0 :] = rows[:, row - 1, row % 3 == 0 :]
        found.append(rows)
    return torch.cat(found, dim=1)


def seen_by(lists: Tensor, block: int = 1) -> Tensor:
    """What lists name, as a mask [sequences, Hq, longest rows, longest keys]."""
    heads, _, width = lists.shape
    most = max(queries for queries, _ in LENGTHS)
    seen = torch.zeros(len(LENGTHS), heads, most, MOST + block + 1, dtype=torch.bool)
    first = 0
    for b, (queries, _) in enumerate(LENGTHS):
        own = lists[:, first : first + queries, :, None]
        keys = torch.where(own < 0, MOST + block, own * block + torch.arange(block))
        seen[b, :, :queries].scatter_(-1, keys.reshape(heads, queries, width * block), True)
        first += queries
    return seen[..., :MOST].repeat_interleave(SIZES["heads"] // heads, dim=1)


@STORAGES
@pytest.mark.parametrize("alike", [False, True], ids=["random", "alike"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_rule_of_two(
    target: Target, case: Case, dtype: torch.dtype, alike: bool, storage: torch.dtype
) -> None:
    """As attention with a mask of what the lists name, with every statistic; blocks of keys too."""
    inputs = build(case.of(dtype)).detached()
    assert inputs.cu_seqlens is not None
    given = keywords_of(inputs)
    paged, scales = narrow(in_pages(*sequences_of(inputs), 13), storage)
    for heads, block in ((1, 1), (2, 1), (2, 8)):
        lists = lists_of(heads, alike, block)
        listed = masks.dense(seen_by(lists, block))
        mask = listed if given["mask"] is None else given["mask"] & listed
        plain, oracle = truths(inputs._replace(mask=mask), storage)
        options = {**given, **scales, "backend": target.backend, "return_lse": True}
        options |= {"return_stats": "top1", "keys": KeyBlocks(lists, block)}
        got = tilewise.attention_paged(inputs.q, *paged, inputs.cu_seqlens[0], **options)
        found = {"out": got.out, "lse": got.lse}
        found |= {name: getattr(got.stats, name) for name in ("max_logit", "entropy")}
        for name, actual in found.items():
            about = f"{name}, {heads} heads, blocks of {block}"
            assert_exact(actual, getattr(plain, name), getattr(oracle, name), about)
        options |= {"return_lse": False, "return_stats": False}
        alone = tilewise.attention_paged(inputs.q, *paged, inputs.cu_seqlens[0], **options)
        assert_exact(alone, plain.out, oracle.out, "out alone")


def decoding(storage: torch.dtype, **changes: Any) -> dict[str, Any]:
    """Two sequences of one query, as keywords: lists of 30 of up to 200 keys."""
    generator = torch.Generator().manual_seed(0)
    counts = (200, 90)
    keys, values = (
        [torch.randn(2, n, width, generator=generator) for n in counts] for width in (32, 24)
    )
    paged, scales = narrow(in_pages(keys, values, 16), storage)
    q = torch.randn(2, 8, 1, 32, generator=generator)
    lists = torch.randint(90, (2, 2, 1, 30), generator=generator)
    return {"q": q, **paged._asdict(), **scales, "keys": lists, "return_lse": True, **changes}


@STORAGES
def test_any_layout_of_scales_and_rows(target: Target, storage: torch.dtype) -> None:
    """Rows before heads, keys and values in one memory, one scale for all rows of a head."""
    given = decoding(storage, backend=target.backend)
    due = tilewise.attention_paged(**given)
    k, v, k_scale = given["k_pages"], given["v_pages"], given["k_scale"]
    rows_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    wide = torch.zeros(len(k), 3, 2, 16, 32, dtype=torch.int8)
    joint = wide.view(storage)[:, :2].unbind(1)
    for own, x in zip(wide.unbind(1), (k, v), strict=False):
        own[..., : x.shape[-1]] = x.view(torch.int8)
    joint = joint[0], joint[1][..., :24]
    for pages in (rows_first, joint, (k, rows_first[1])):
        got = tilewise.attention_paged(**given | {"k_pages": pages[0], "v_pages": pages[1]})
        torch.testing.assert_close(got.out, due.out, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(got.lse, due.lse, rtol=1e-5, atol=1e-6)
    few = torch.tensor([0.5, 0.25])[None, :, None].expand(k_scale.shape)
    given |= {"k_scale": few, "v_scale": few}
    got = tilewise.attention_paged(**given)
    due = tilewise.attention_paged(**given | {"k_scale": few.clone(), "v_scale": few.clone()})
    torch.testing.assert_close(got.out, due.out, rtol=1e-5, atol=1e-6)


def test_a_sequence_without_keys_may_name_any_page() -> None:
    """Also where rows are copied, because they have other strides than their scales."""
    given = decoding(torch.int8)
    given["k_scale"] = torch.tensor(0.1).expand(given["k_scale"].shape)
    given["v_scale"] = given["k_scale"]
    given["key_lengths"] = torch.tensor([200, 0], dtype=torch.int32)
    given["block_table"][1] = 2**31 - 1
    given["keys"][1] = -1
    out, lse, _ = tilewise.attention_paged(**given)
    assert bool((out[1] == 0).all())
    assert bool((lse[1] == -torch.inf).all())
    assert bool(out[0].isfinite().all())


@STORAGES
def test_latent_pages(target: Target, storage: torch.dtype) -> None:
    """Values that are the first numbers of the keys, and have their scales."""
    generator = torch.Generator().manual_seed(0)
    latent = torch.randn(1, 200, 72, generator=generator)
    paged, scales = narrow(in_pages([latent], [latent], 16), storage)
    k, scale = paged.k_pages, scales["k_scale"]
    q = torch.randn(1, 16, 2, 72, generator=generator)
    lists = torch.randint(200, (1, 1, 2, 50), generator=generator)
    given: dict[str, Any] = {"keys": lists, "k_scale": scale, "v_scale": scale}
    given["backend"] = target.backend
    got = tilewise.attention_paged(q, k, k[..., :64], *paged[2:], **given)
    rows = stands_for(latent, storage)[None]
    plain, oracle = (
        tilewise.attention(q.to(dtype), rows.to(dtype), rows[..., :64].to(dtype), keys=lists)
        for dtype in (torch.float32, torch.float64)
    )
    assert_exact(got, plain, oracle, "out")


@STORAGES
def test_rows_that_no_list_names_are_not_read(storage: torch.dtype) -> None:
    given = decoding(storage)
    due = tilewise.attention_paged(**given)
    step = tilewise.PagedStep(given["block_table"], given["key_lengths"], page_size=16)
    hidden = given["block_table"][0, 90 // 16 + 1 : 200 // 16 + 1].long()
    for name in ("k_scale", "v_scale"):
        given[name][hidden] = torch.nan
    given |= {"block_table": step, "key_lengths": None}
    assert_all_same_bits(tilewise.attention_paged(**given)[:2], due[:2], "with NaN elsewhere")


def test_what_traces_see() -> None:
    given = decoding(torch.int8)
    tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}

    def call(*each: Tensor) -> Any:
        named: dict[str, Any] = dict(zip(tensors, each, strict=True))
        return tilewise.attention_paged(**named)

    graph = make_fx(call)(*tensors.values())
    assert "attention_lists" in graph.code
    assert_same_bits(graph(*tensors.values()), call(*tensors.values()), "traced")


def test_gradients_are_refused() -> None:
    given = decoding(torch.int8)
    for name in ("q", "k_scale"):
        with pytest.raises(Unsupported, match="no gradients of paged keys"):
            tilewise.attention_paged(**given | {name: given[name].clone().requires_grad_()})


@only_linux
def test_memory_follows_the_lists() -> None:
    """Of 128 MiB of rows and 4 MiB of scales nothing is copied but what lists name."""
    code = """
import torch, tilewise
from tests.peak import Peak
torch.set_num_threads(1)
pages = torch.zeros(8192, 1, 128, 128, dtype=torch.int8)
step = tilewise.PagedStep(torch.arange(8192)[None], torch.tensor([1 << 20]), page_size=128)
keys = torch.arange(0, 1 << 20, 1 << 12, dtype=torch.int32)[None, None, None]
q = torch.randn(1, 2, 1, 128)
def measure(scale):
    peak = Peak()
    given = {"k_scale": scale, "v_scale": scale}
    tilewise.attention_paged(q, pages, pages, step, keys=keys, **given)
    return peak.mib()
each = torch.ones(8192, 1, 128)
few = torch.ones(8192, 1, 1).expand(each.shape)
measure(each), measure(few)
print(measure(each), measure(few))
"""
    ((by_rows, by_pages),) = printed(code)
    assert float(by_rows) < 2
    assert float(by_pages) < 2
