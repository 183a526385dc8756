"""Key lists: equal to plain attention where only the listed keys are seen, gradients included."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional

import tilewise
from tests.cases import Case, Inputs, build
from tests.contract import assert_all_same_bits, assert_same_bits
from tests.kernels.targets import TARGETS, Target, forced
from tests.oracle import Outcome, Sent, check_all
from tests.oracle import attend as attended
from tests.peak import only_linux, printed
from tests.plain import attend
from tests.variants_catalogue import CATALOGUE, Call, Sizes, Variant, assert_all_close
from tilewise import KeyBlocks, masks, scores
from tilewise.engine import key_lists, shared_lists
from tilewise.engine.key_lists import listed, page_size
from tilewise.engine.shared_lists import rows_together
from tilewise.errors import InvalidArgument, InvalidType, Unsupported

SIZES = Sizes()  # 2 batch items, 4 heads (of keys: 2), 37 queries, 53 keys
LISTED = 11
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


def share_short_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of small calls share lists too, where these are alike, and in both passes."""
    rule = shared_lists._BACKWARD._replace(packing=4, marked=8, least=0)
    for name in ("_FORWARD", "_BACKWARD"):
        monkeypatch.setattr(shared_lists, name, rule)


@pytest.fixture(autouse=True)
def short_lists_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long ones are: the calls here are small."""
    share_short_lists(monkeypatch)


def lists_of(
    sizes: Sizes, heads: int, many: int = LISTED, seed: int = 0, alike: bool = False
) -> Tensor:
    """Random lists [B, heads, M, K] in random order, with repeats, holes and one that is empty.

    Args:
        alike: whether rows read what the row before them read, but for one key in every third row:
            neighbours then share their lists (``engine/shared_lists.py``).
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (sizes.batch, heads, sizes.queries, many)
    found = torch.randint(-1, max(sizes.keys, 1), shape, generator=generator)
    for row in range(1, sizes.queries if alike else 0):
        found[:, :, row, row % 3 == 0 :] = found[:, :, row - 1, row % 3 == 0 :]
    if found.numel():
        found[0, 0, 0] = -1
    return found if sizes.keys else torch.full_like(found, -1)


def seen_by(lists: Tensor, keys: int) -> Tensor:
    """Return what lists name as a mask [B, heads, M, N]."""
    spare = lists.new_full((), keys)
    mask = torch.zeros(*lists.shape[:-1], keys + 1, dtype=torch.bool)
    return mask.scatter(-1, torch.where(lists < 0, spare, lists), True)[..., :keys]


def both(seen: Tensor, mask: Any) -> Any:
    """Return a mask as ``tests/plain.py`` takes it: what is seen, and what another lets through."""

    def pair(b: Any, h: Any, m: Any, n: Any) -> Any:
        listed = seen[b, h * seen.shape[1] // 4, m, n]
        return listed if mask is None else listed & mask(b, h, m, n)

    return pair


class Listed(Call):
    """A variant over the keys that lists name."""

    def __init__(self, variant: Variant, lists: Tensor, sizes: Sizes = SIZES) -> None:
        super().__init__(variant, torch.float64, sizes)
        self.lists, self.seen = lists, seen_by(lists, sizes.keys)

    def plain(self) -> dict[str, Tensor]:
        formula = {**self.formula, "mask": both(self.seen, self.made.mask)}
        return self.results(*attend(*self.qkv, **formula)[:2])

    def keywords(self, backend: str | None) -> dict[str, Any]:
        return {**super().keywords(backend), "keys": self.lists}


alike = pytest.mark.parametrize("alike", [False, True], ids=["apart", "alike"])


@alike
@pytest.mark.parametrize("variant", CATALOGUE, ids=str)
def test_every_variant_is_plain_torch(variant: Variant, alike: bool) -> None:
    """Output, lse and every gradient, over lists of each key head."""
    call = Listed(variant, lists_of(SIZES, 2, alike=alike))
    assert_all_close(call.run("cpu"), call.plain())


BUILT_IN: dict[str, dict[str, Any]] = {
    "causal": {"mask": masks.causal()},
    "window": {"mask": masks.window(9, 3, align="top_left")},
    "lengths": {"mask": masks.lengths(torch.tensor([50, 0])) | masks.window(2, 2)},
    "documents": {
        "mask": masks.document(
            torch.arange(SIZES.keys) // 9, query_ids=torch.arange(SIZES.queries) // 7
        )
    },
    "dense": {"mask": torch.rand(1, 4, 37, 53) > 0.3},
    "not": {"mask": ~masks.causal()},
    "bias": {"score": scores.bias(torch.randn(2, 1, 37, 53, dtype=torch.float64))},
    "alibi": {"score": scores.alibi(SLOPES)},
    "several": {"score": [lambda s, b, h, m, n: s + 0.1 * h, scores.softcap(3.0)]},
}


@pytest.mark.parametrize("heads", [1, 2])
@alike
def test_neighbours_share_what_they_all_read(heads: int, alike: bool) -> None:
    """The tests of lists that are alike are of shared ones, and others are left alone."""
    lists = lists_of(SIZES, heads, alike=alike)
    flat = KeyBlocks(lists, 1)
    lengths = torch.full((SIZES.batch * SIZES.queries,), SIZES.keys)
    queries, keys = (torch.full((SIZES.batch,), each) for each in (SIZES.queries, SIZES.keys))
    rows = rows_together(listed(flat, lengths), queries, keys, 2)
    assert rows == [8 if alike else 1] * SIZES.batch


def test_a_batch_item_has_the_bits_that_it_has_alone() -> None:
    """Neighbours share by the lists of their own item: one row, 4 or 16 to a list, wide or not."""
    few, many = Sizes(1, 4, 40, 300), 60
    sizes = few._replace(batch=5)
    apart, near, other = (
        lists_of(few, 1, many, seed, alike=alike) for seed, alike in enumerate((False, True, False))
    )
    other = other[:, :, ::4].repeat_interleave(4, dim=2)
    same = near[:, :, 1:2].expand_as(near)
    lists = torch.cat([near, apart, same, other, torch.full_like(near, -1)])
    flat = torch.full((sizes.batch * sizes.queries,), sizes.keys)
    sets = listed(KeyBlocks(lists, 1), flat)
    queries, keys = (torch.full((5,), each) for each in (few.queries, few.keys))
    rows = rows_together(sets, queries, keys, 2)
    assert len(set(rows)) > 2, f"all items share alike: {rows}"
    leaves = _leaves(torch.float32, sizes)

    def of(leaves: tuple[Tensor, ...], lists: Tensor) -> list[Tensor]:
        given: dict[str, Any] = {"return_lse": True, "return_stats": "top1"}
        out, lse, stats = tilewise.attention(*leaves, keys=lists, **given)
        grads = torch.autograd.grad(out.square().sum() + stats.entropy.sum(), leaves)
        return [out, lse, stats.max_logit, stats.entropy, stats.top1, *grads]

    together = of(leaves, lists)
    for item in range(sizes.batch):
        one = slice(item, item + 1)
        alone = of(tuple(x[one].detach().requires_grad_() for x in leaves), lists[one])
        for number, (mine, all_of_them) in enumerate(zip(alone, together, strict=True)):
            assert_same_bits(mine, all_of_them[one], f"item {item}, result {number}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("block", "many"), [(1, 32), (1, 560), (16, 35)])
@alike
def test_padding_changes_no_bit(dtype: torch.dtype, block: int, many: int, alike: bool) -> None:
    """A batch pads its lists to one width: most are full without it, and none with it.

    Keys are cut into blocks of 128, and a rest of 48 goes with the last of them.
    """
    sizes, generator = Sizes(2, 4, 20, 1600), torch.Generator().manual_seed(0)
    drawn = torch.rand(2, 2, 20, 1600 // block, generator=generator).topk(many + 1).indices.int()
    lists = drawn[:, :, :1, :many].repeat(1, 1, 20, 1) if alike else drawn[..., :many].clone()
    lists[:, :, ::3, 0] = drawn[:, :, :1, many] if alike else drawn[:, :, ::3, many]
    lists[:, :, 4, 5:] = -1
    sets = listed(KeyBlocks(lists, block), torch.full((40,), 1600))
    ends = torch.full((2,), 20), torch.full((2,), 1600)
    for backward in (False, True):
        rows = rows_together(sets, *ends, 2, block, backward)
        assert (min(rows) > 1) == alike

    def of(lists: Tensor) -> list[Tensor]:
        leaves = _leaves(dtype, sizes)
        given: dict[str, Any] = {"mask": masks.causal(), "score": scores.alibi(SLOPES.to(dtype))}
        out, lse, _ = tilewise.attention(
            *leaves, keys=KeyBlocks(lists, block), return_lse=True, **given
        )
        return [out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), leaves)]

    expected = of(lists)
    for more in (1, 700 // block):
        for number, (mine, due) in enumerate(
            zip(of(functional.pad(lists, (0, more), value=-1)), expected, strict=True)
        ):
            assert_same_bits(mine, due, f"{more} more, result {number}")


def test_keys_count_and_not_the_room_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """An item shares by what it lists, however wide the tensor of the batch is."""
    lists, sizes = lists_of(SIZES, 2, alike=True), torch.full((74,), SIZES.keys)
    queries, keys = (torch.full((SIZES.batch,), each) for each in (SIZES.queries, SIZES.keys))
    sets = listed(KeyBlocks(lists, 1), sizes)
    wider = listed(KeyBlocks(functional.pad(lists, (0, 90), value=-1), 1), sizes)
    assert wider.indices.shape[-1] == LISTED + 90
    for item, total in enumerate(sets.counts.view(2, -1).sum(1).tolist()):
        for more in (0, 1):
            rule = shared_lists._FORWARD._replace(least=total // 2 + more)
            monkeypatch.setattr(shared_lists, "_FORWARD", rule)
            for each in (sets, wider):
                assert (rows_together(each, queries, keys, 2)[item] > 1) == (more == 0)
    rule = shared_lists._FORWARD._replace(marked=0, least=0)
    monkeypatch.setattr(shared_lists, "_FORWARD", rule)
    assert rows_together(wider, queries, keys, 2) == [1, 1]


@pytest.mark.parametrize(("backward", "least"), [(False, 1 << 15), (True, 1 << 13)])
def test_few_listed_keys_are_left_alone(
    backward: bool, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Choosing would take longer than it saves: keys count, also those of blocks."""
    monkeypatch.undo()
    full = least // 16
    lists = torch.arange(full, dtype=torch.int32).expand(16, 1, -1)

    def of(rows: int, width: int, block: int = 1) -> list[int]:
        sets, limits = lists[:rows, :, :width].contiguous(), torch.tensor([2 * full])
        these = key_lists.Listed(sets, torch.full((rows, 1), width * block))
        return rows_together(these, torch.tensor([rows]), limits, 2, block, backward)

    assert of(16, full) == [16]
    assert of(15, full) == of(16, full - 1) == of(16, full // 8) == [1]
    assert of(16, full // 8, block=8) == [16]


def test_explain_says_in_which_pass_rows_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    def explained(width: int) -> str:
        q, k = torch.empty(1, 2, 16, 8), torch.empty(1, 1, 4000, 8)
        lists = torch.arange(width).expand(1, 1, 16, -1)
        return str(tilewise.explain(q, k, k, keys=lists))

    assert "neighbours" not in explained(511)
    assert "one problem, in the backward pass alone" in explained(512)
    assert "in the backward pass alone" in explained(2047)
    assert "neighbours" in explained(2048)
    assert "in the backward pass alone" not in explained(2048)


def test_the_backward_pass_shares_where_the_forward_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each pass has its own groups; results are those of rows that share in no pass."""
    leaves = _leaves(torch.float64)
    lists = lists_of(SIZES, 2, alike=True)
    backward = shared_lists._BACKWARD

    def found() -> dict[str, Tensor]:
        given: dict[str, Any] = {"return_lse": True, "return_stats": "top1"}
        return _results(tilewise.attention(*leaves, keys=lists, **given), leaves)

    groups = []

    def spy(*given: Any) -> list[Any]:
        groups.append(shared_lists.shared(*given))
        return groups[-1]

    monkeypatch.setattr("tilewise.engine.listed_work.shared", spy)
    alone = backward._replace(worth=0.0)
    monkeypatch.setattr(shared_lists, "_FORWARD", alone)
    apart = found()
    assert [bool(each) for each in groups] == [True], "the forward pass does not ask"
    monkeypatch.setattr(shared_lists, "_BACKWARD", alone)
    assert_all_close(apart, found())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_the_default_dtype_changes_no_choice(dtype: torch.dtype) -> None:
    """The groups that are looked at are counted in whole numbers: bfloat16 rounds 999 to 1000."""
    found = lists_of(Sizes(1, 4, 16, 64), 1, 8, alike=True).sort(-1).values
    indices = torch.where(found < 0, 64, found).transpose(1, 2).int().repeat(1, 1000, 1, 1)[0]
    sets = key_lists.Listed(indices, (indices < 64).sum(-1))
    queries, keys = torch.tensor([len(sets)]), torch.tensor([64])
    due = rows_together(sets, queries, keys, 2)
    torch.set_default_dtype(dtype)
    try:
        assert rows_together(sets, queries, keys, 2) == due
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("heads", [1, 2])
@alike
def test_built_in_masks_and_scores(name: str, heads: int, alike: bool) -> None:
    """Against the same call with the lists as a mask."""
    lists = lists_of(SIZES, heads, alike=alike)
    q, k, v = _leaves(torch.float64)
    given = {"return_stats": "top1", "return_lse": True, **BUILT_IN[name]}
    got = _results(tilewise.attention(q, k, v, keys=lists, **given), (q, k, v))
    seen = seen_by(lists, SIZES.keys).repeat_interleave(4 // heads, dim=1)
    mask = seen if "mask" not in given else masks.dense(seen) & _mask(given["mask"])
    expected = _results(tilewise.attention(q, k, v, **{**given, "mask": mask}), (q, k, v))
    assert_all_close(got, expected)


def _mask(mask: Any) -> Any:
    return masks.dense(mask) if isinstance(mask, Tensor) else mask


def _leaves(dtype: torch.dtype, sizes: Sizes = SIZES) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = (
        (sizes.batch, 4, sizes.queries, 8),
        (sizes.batch, 2, sizes.keys, 8),
        (sizes.batch, 2, sizes.keys, 5),
    )
    q, k, v = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    )
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def _results(found: Any, leaves: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Output, lse, statistics and the gradients of the leaves through out, lse and entropy."""
    out, lse, stats = found
    entropy = lse if stats is None else stats.entropy
    generator = torch.Generator().manual_seed(2)

    def weights(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.dtype)

    grads = torch.autograd.grad(
        [out, lse, entropy], leaves, [weights(out), weights(lse), weights(entropy)]
    )
    results = {"out": out.detach(), "lse": lse.detach(), "entropy": entropy.detach()}
    if stats is not None:
        results |= {"max": stats.max_logit, "top1": stats.top1.double()}
    return results | {f"d{i}": grad for i, grad in enumerate(grads)}


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@alike
def test_the_2x_rule(target: Target, dtype: torch.dtype, alike: bool) -> None:
    """Of statistics and gradients too, with a mask and sinks."""
    sizes: dict[str, Any] = {"heads": 4, "queries": SIZES.queries, "keys": SIZES.keys}
    sizes |= {"head_dim": 8, "value_dim": 5}
    case = Case("lists", **sizes, dtype=dtype, mask=("causal",), sinks=True)
    keys = KeyBlocks(lists_of(SIZES, 2, alike=alike), 1)
    inputs = [build(case, draw)._replace(keys=keys) for draw in range(2)]

    def run(each: Inputs, sent: Sent) -> Outcome:
        return attended(each, target.backend, sent, statistics=True)

    with forced(target):
        check_all(inputs, run, "lists", entropy=True)


@pytest.mark.parametrize(
    "sizes", [Sizes(2, 4, 1, 9), Sizes(2, 4, 0, 5), Sizes(3, 4, 5, 0)], ids=str
)
def test_sizes(sizes: Sizes) -> None:
    """One row, no rows, no keys; and empty lists, whose rows are 0 with lse -inf."""
    call = Listed(CATALOGUE[0], lists_of(sizes, 1), sizes)
    assert_all_close(call.run("cpu"), call.plain())
    call.lists = call.lists[..., :0]
    found = call.run("cpu")
    assert bool((found["out"] == 0).all())
    assert bool((found["lse"] == -math.inf).all())
    gradients = [value for name, value in found.items() if name not in ("out", "lse")]
    assert gradients
    assert not any(value.any() for value in gradients)


@pytest.mark.parametrize("query_block", [1, 8])
@alike
def test_blocks_of_keys(query_block: int, alike: bool) -> None:
    """Blocks, of which the last is shorter, and rows that share them, of which some lack."""
    sizes, block = SIZES, 6
    groups = -(-sizes.queries // query_block)
    lists = lists_of(Sizes(2, 4, groups, -(-sizes.keys // block)), 2, 4, alike=alike)
    rows = lists.repeat_interleave(query_block, dim=2)[:, :, : sizes.queries]
    seen = seen_by(rows, -(-sizes.keys // block)).repeat_interleave(block, -1)[..., : sizes.keys]
    leaves = _leaves(torch.float64)
    blocks = KeyBlocks(lists, block, query_block)
    given: dict[str, Any] = {"mask": masks.causal(), "score": scores.alibi(SLOPES)}
    got = tilewise.attention(*leaves, keys=blocks, **given, return_lse=True, return_stats=True)
    given["mask"] = masks.dense(seen.repeat_interleave(2, 1)) & masks.causal()
    due = tilewise.attention(*leaves, **given, return_lse=True, return_stats=True)
    got, due = (each._replace(stats=each.stats._replace(top1=each.lse)) for each in (got, due))
    assert_all_close(_results(got, leaves), _results(due, leaves))


def gathered(
    q: Tensor,
    local: tuple[Tensor, Tensor],
    pool: tuple[Tensor, Tensor],
    picked: Tensor,
    sinks: Tensor,
) -> Tensor:
    """One sequence by the definition: a row sees a causal window of 5 and what it picks of a pool.

    The semantics are those of attention-gym's ``gathered_attention``, where a list is a set.

    q [Hq, M, D]; keys and values of one head, [N, D] and [P, D]; picked [M, K], -1 for none.
    """
    rows = torch.arange(q.shape[1])[:, None]
    window = rows - torch.arange(5)
    window = torch.where(window < 0, -1, window)
    keys, values = (
        torch.cat([x[picked.clamp(0)], y[window.clamp(0)]], dim=1)
        for x, y in zip(pool, local, strict=True)
    )
    s = torch.einsum("hmd,mkd->hmk", q, keys) / math.sqrt(q.shape[-1])
    s = s.masked_fill(torch.cat([picked, window], dim=1) < 0, -math.inf)
    p = torch.cat([s, sinks[:, None, None].expand(-1, len(rows), 1)], dim=-1).softmax(-1)
    return torch.einsum("hmk,mkd->hmd", p[..., :-1], values)


def test_repeats_that_count_are_a_score() -> None:
    """attention-gym weighs a key by how often a list names it: a set, and log(count) as a score."""
    generator = torch.Generator().manual_seed(12)
    q, k, v = (torch.randn(1, 1, n, 8, generator=generator).double() for n in (6, 9, 9))
    lists = torch.randint(9, (6, 20), generator=generator)
    counts = torch.zeros(6, 9).double().scatter_add_(1, lists, torch.ones(6, 20).double())

    keys, values = k[0, 0][lists], v[0, 0][lists]  # [M, K, D], repeats and all
    s = torch.einsum("md,mkd->mk", q[0, 0], keys) / math.sqrt(8)
    due = torch.einsum("mk,mkd->md", s.softmax(-1), values)
    weights = counts.log()
    got = tilewise.attention(
        q, k, v, keys=lists[None, None].int(), score=lambda s, b, h, m, n: s + weights[m, n]
    )
    torch.testing.assert_close(got[0, 0], due, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("packed", [False, True], ids=["batched", "packed"])
def test_a_window_beside_what_is_picked_of_a_pool(packed: bool) -> None:
    """Gathered attention: one softmax over both and a sink for each head, one key for all heads."""
    generator = torch.Generator().manual_seed(11)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    rows, pools = (21, 13) if packed else (21, 21), (9, 6) if packed else (9, 9)
    sinks = leaf(4)
    sequences, lists, leaves = [], [], [sinks]
    for many, size in zip(rows, pools, strict=True):
        q, *rest = leaf(4, many, 8), leaf(many, 8), leaf(many, 5), leaf(size, 8), leaf(size, 5)
        order = torch.rand(many, size, generator=generator).argsort(1)
        picked = torch.where(torch.rand(many, 4, generator=generator) < 0.2, -1, order[:, :4])
        window = torch.arange(many)[:, None] - torch.arange(5)
        lists.append(torch.cat([picked, torch.where(window < 0, -1, window + size)], dim=1))
        sequences.append((q, (rest[0], rest[1]), (rest[2], rest[3]), picked))
        leaves += [q, *rest]
    due = [gathered(*each, sinks) for each in sequences]
    operands = (
        [each[0] for each in sequences],
        [torch.cat([pool[0], local[0]])[None] for _, local, pool, _ in sequences],
        [torch.cat([pool[1], local[1]])[None] for _, local, pool, _ in sequences],
    )
    if packed:
        together = [torch.cat(each, dim=1).transpose(0, 1) for each in operands]
        ends = [torch.tensor([0, *(x.shape[1] for x in each)]).cumsum(0) for each in operands[:2]]
        out = tilewise.attention_varlen(*together, *ends, keys=torch.cat(lists)[None], sinks=sinks)
        got = list(out.transpose(0, 1).split(list(rows), dim=1))
    else:
        batch = [torch.stack(each) for each in operands]
        got = list(tilewise.attention(*batch, keys=torch.stack(lists)[:, None], sinks=sinks))
    for mine, other in zip(got, due, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)
    upstream = [torch.randn(each.shape, generator=generator).double() for each in due]
    for mine, other in zip(
        torch.autograd.grad(got, leaves, upstream),
        torch.autograd.grad(due, leaves, upstream),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


@alike
def test_pages(alike: bool) -> None:
    """Keys that lie in pages, forward."""
    q, k, v = (x.detach() for x in _leaves(torch.float32))
    lists = lists_of(SIZES, 2, alike=alike)
    lengths = torch.tensor([53, 53])
    table = torch.randperm(28).view(2, 14)
    padded = [torch.nn.functional.pad(x, (0, 0, 0, 3)).unflatten(2, (14, 4)) for x in (k, v)]
    k_pages, v_pages = (x.new_zeros(28, 2, 4, x.shape[-1]) for x in padded)
    for page, own in zip((k_pages, v_pages), padded, strict=True):
        page[table.flatten()] = own.movedim(2, 1).flatten(0, 1)
    blocks = KeyBlocks(torch.where(lists < 0, lists, lists // 6), 6)
    rest = {"score": scores.softcap(3.0), "sinks": torch.randn(4), "return_stats": "top1"}
    for keys, more in ((lists, {}), (lists, rest), (blocks, rest)):
        given: dict[str, Any] = {"keys": keys, "mask": masks.causal(), "return_lse": True, **more}
        got = tilewise.attention_paged(q, k_pages, v_pages, table, lengths, **given)
        due = tilewise.attention(q, k, v, **given)
        for name, mine, other in (("out", got.out, due.out), ("lse", got.lse, due.lse)):
            if keys is lists:
                assert_same_bits(mine, other, name)
            else:  # pages of 4 keys, blocks of 6
                torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
        if more:
            assert torch.equal(got.stats.top1, due.stats.top1)
            torch.testing.assert_close(got.stats.entropy, due.stats.entropy, rtol=1e-5, atol=1e-5)


@alike
def test_order_repeats_and_threads(alike: bool) -> None:
    """A list is a set. Order and threads change no bit: gradients are added up by rows."""
    lists = lists_of(SIZES, 1, 20, alike=alike)
    shuffled = torch.cat([lists, lists[..., :7]], dim=-1)[..., torch.randperm(27)]
    found = []
    for keys, threads in ((lists, 1), (shuffled, 1), (lists.flip(-1).int(), 2)):
        leaves = _leaves(torch.float32)
        torch.set_num_threads(threads)
        result = tilewise.attention(*leaves, keys=keys, return_lse=True)
        found.append(_results(result, leaves))
    for other in found[1:]:
        for name, tensor in other.items():
            torch.testing.assert_close(tensor, found[0][name], rtol=1e-5, atol=1e-6)
    for name, tensor in found[2].items():
        assert_same_bits(tensor, found[0][name], name)


@alike
def test_odd_memory(alike: bool) -> None:
    """Views: heads inside, a fused qkv, values that are a part of the keys, one key for all."""
    fused = torch.randn(2, 53, 3, 2, 8, dtype=torch.float64)
    q = torch.randn(2, 37, 4, 8, dtype=torch.float64).transpose(1, 2)
    k, v = fused[:, :, 1].transpose(1, 2), fused[:, :, 1, :, :5].transpose(1, 2)
    lists = lists_of(SIZES, 1, alike=alike)
    for keys, values in ((k, v), (k[:1].expand(2, -1, -1, -1), v), (k[..., ::2], v)):
        queries = q[..., : keys.shape[-1]]
        got = tilewise.attention(queries, keys, values, keys=lists)
        due = tilewise.attention(
            queries.contiguous(), keys.contiguous(), values.contiguous(), keys=lists
        )
        assert_same_bits(got, due, "out")
        assert got.stride() == tilewise.attention(queries, keys, values).stride()
        turned = lists.transpose(-1, -2).contiguous().transpose(-1, -2)
        assert_same_bits(tilewise.attention(queries, keys, values, keys=turned), got, "turned")


@alike
def test_compiled(alike: bool) -> None:
    """One graph, forward and backward, equal to the eager call."""
    lists = lists_of(SIZES, 1, alike=alike)

    def loss(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, keys: Tensor) -> Tensor:
        score = scores.bias(bias)
        return tilewise.attention(q, k, v, keys=keys, mask=masks.causal(), score=score).square()

    leaves = (*_leaves(torch.float32), torch.randn(1, 4, 37, 53, requires_grad=True))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = []
    for call in (loss, compiled):
        out = call(*leaves, lists)
        found.append((out, *torch.autograd.grad(out.sum(), leaves)))
    assert_all_same_bits(found[1], found[0], "compiled")


WRONG: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "a list of numbers": ([1, 2], {}, InvalidType, "keys"),
    "floats": (torch.zeros(2, 1, 37, 3), {}, InvalidArgument, "int32 or int64"),
    "too few rows": (torch.zeros(2, 1, 36, 3, dtype=torch.int64), {}, InvalidArgument, "shape"),
    "too many heads": (torch.zeros(2, 4, 37, 3, dtype=torch.int64), {}, InvalidArgument, "Hk"),
    "no heads": (torch.zeros(2, 37, 3, dtype=torch.int64), {}, InvalidArgument, "shape"),
    "beyond the keys": (torch.full((2, 1, 37, 3), 53), {}, InvalidArgument, "53 in list 0"),
    "below -1": (torch.full((2, 1, 37, 3), -2), {}, InvalidArgument, "-2 in list 0"),
    "beyond the blocks": (
        KeyBlocks(torch.full((2, 1, 37, 3), 7), 8), {}, InvalidArgument, "a block below 7",
    ),
    "no block": (KeyBlocks(torch.zeros(2, 1, 37, 3).int(), 0), {}, InvalidArgument, "block"),
    "rows of blocks": (
        KeyBlocks(torch.zeros(2, 1, 37, 3).int(), 8, 4), {}, InvalidArgument, "10 rows of lists",
    ),
    "meta": (torch.zeros(2, 1, 37, 3, device="meta").int(), {}, InvalidArgument, "on meta"),
    "dropout": (torch.zeros(2, 1, 37, 3).int(), {"dropout_p": 0.1}, Unsupported, "dropout"),
    "a plan": (torch.zeros(2, 1, 37, 3).int(), {"plan": 1}, InvalidArgument, "plan"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name: str) -> None:
    """With what came, what is required, and the name of the argument."""
    keys, given, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        tilewise.attention(*_leaves(torch.float32), keys=keys, **given)


@pytest.mark.filterwarnings("ignore:`torch.jit")  # torch's own, once a process
def test_derivatives_that_are_not_done() -> None:
    """They raise, and are not silently wrong."""
    q, k, v = _leaves(torch.float64)
    keys = lists_of(SIZES, 1)
    (grad,) = torch.autograd.grad(
        tilewise.attention(q, k, v, keys=keys).sum(), (q,), create_graph=True
    )
    with pytest.raises(Unsupported, match="second derivative with key lists"):
        grad.sum().backward()
    with pytest.raises(Unsupported, match=r"torch\.func"):
        torch.func.grad(lambda x: tilewise.attention(x, k, v, keys=keys).sum())(q)
    with forward_ad.dual_level(), pytest.raises(Unsupported, match="forward-mode"):
        tilewise.attention(forward_ad.make_dual(q.detach(), torch.ones_like(q)), k, v, keys=keys)


def test_a_page_has_a_whole_block_where_no_block_is_shorter() -> None:
    pages = [page_size(16, keys, alone) for keys in (64, 65) for alone in (True, False)]
    assert pages == [16, 1, 1, 1]


@only_linux
def test_memory_follows_the_lists() -> None:
    """Forward and backward at N = 16,384 take less than a quarter of N x N bytes."""
    code = """
import torch, tilewise
from tests.peak import Peak
torch.set_num_threads(1)
def measure(n, many):
    q, k, v = (torch.randn(1, 1, n, 16, requires_grad=True) for _ in range(3))
    keys = torch.randint(0, n, (1, 1, n, many), dtype=torch.int32)
    grad = torch.randn(1, 1, n, 16)
    peak = Peak()
    tilewise.attention(q, k, v, keys=keys).backward(grad)
    return peak.mib()
measure(256, 32)
print(measure(16384, 32))
"""
    ((most,),) = printed(code)
    assert float(most) < 256 / 4


def test_explained_bytes_follow_the_lists() -> None:
    """Twice the keys of a list are twice the bytes; the keys that there are do not count."""

    def bytes_of(listed: int, keys: int, backward: bool = False) -> int:
        q, k = torch.empty(1, 8, 64, 32), torch.empty(1, 2, keys, 32)
        lists = torch.zeros(1, 1, 64, listed, dtype=torch.int32)
        found = tilewise.explain(q, k, k, keys=lists)
        assert found.account is not None
        assert f"64 of {listed} keys, each for 4 rows of a key head" in str(found)
        assert "up to 16 neighbours whose lists name mostly the same keys" in str(found)
        assert "copies keys and values of a few lists at a time, for a core's cache" in str(found)
        named = "copy" if backward else "lists"
        ours = (found.account.backward if backward else found.account.forward).ours
        return next(each for each in ours.passes if each.name == named).bytes

    assert bytes_of(16, 1000) == 64 * 2 * 16 * 4
    # Keys and values of 2 heads, read and written, and the number of each.
    assert bytes_of(16, 1000, backward=True) == 64 * 2 * 16 * (2 * 2 * 32 * 4 + 8)
    for backward in (False, True):
        once = bytes_of(16, 1000, backward)
        assert bytes_of(32, 1000, backward) == 2 * once == 2 * bytes_of(16, 100_000, backward)


def test_explained_bytes_of_packed_sequences_and_pages() -> None:
    """Lists move what they move in a dense call; pages add a table entry for each listed key."""
    lists = torch.zeros(1, 1, 12, 3, dtype=torch.int32)
    q, k = torch.empty(12, 8, 32), torch.empty(12, 2, 32)
    starts = torch.tensor([0, 5, 12])
    pages = torch.empty(4, 2, 16, 32)
    table, lengths = torch.tensor([[2], [0]], dtype=torch.int32), torch.tensor([5, 7])
    dense, packed, paged = (
        found.account
        for found in (
            tilewise.explain(q.transpose(0, 1)[None], *(k.transpose(0, 1)[None],) * 2, keys=lists),
            tilewise.explain(q, k, k, starts, starts, keys=lists[0]),
            tilewise.explain(
                q, pages, pages, starts, block_table=table, key_lengths=lengths, keys=lists[0]
            ),
        )
    )
    assert dense is not None
    assert packed is not None
    assert paged is not None
    assert packed.forward.ours == dense.forward.ours
    assert packed.backward.ours == dense.backward.ours
    assert paged.forward.ours.bytes == dense.forward.ours.bytes + 12 * 2 * 3 * 4
    assert paged.backward.ours.bytes == paged.backward.plain.bytes == 0
    # Plain attention makes a matrix of each sequence: 5 x 5 and 7 x 7 pairs in place of 12 x 12.
    assert packed.forward.plain.bytes < dense.forward.plain.bytes
