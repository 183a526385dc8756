"""Key lists of packed sequences, whose neighbouring rows share lists: equal to each one alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import tilewise
from tests.contract import assert_all_same_bits, assert_exact
from tests.kernels.targets import TARGETS, Target, forced
from tests.plain import attend
from tests.test_key_lists import both, lists_of, seen_by, share_short_lists
from tests.variants_catalogue import Sizes, assert_all_close
from tilewise import KeyBlocks, masks, scores
from tilewise.engine.shared_lists import Shared, shared

# Rows and keys: whole groups and not, none of either, fewer than a group, one; a long one.
LENGTHS = ((37, 53), (0, 20), (5, 9), (16, 53), (20, 0), (1, 30), (90, 300), (3, 4), (45, 60))
LISTED = 11
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


@pytest.fixture(autouse=True)
def short_lists_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long ones are: the calls here are small."""
    share_short_lists(monkeypatch)


class Packed(NamedTuple):
    """Packed sequences, and a list for each row [Hk or 1, Tq, K]."""

    q: Tensor
    k: Tensor
    v: Tensor
    starts_q: Tensor
    starts_k: Tensor
    lists: Tensor

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return self[:3]

    def alone(self, at: int) -> Packed:
        """Return one sequence."""
        rows, keys = (slice(*x[at : at + 2].tolist()) for x in (self.starts_q, self.starts_k))
        q, k, v = (
            x[s].detach().requires_grad_()
            for x, s in zip(self.leaves, (rows, keys, keys), strict=True)
        )
        ends_q, ends_k = (torch.tensor([0, each.stop - each.start]) for each in (rows, keys))
        return Packed(q, k, v, ends_q, ends_k, self.lists[:, rows])

    def call(self, **given: Any) -> Any:
        return tilewise.attention_varlen(
            *self[:5], **{"keys": self.lists, "return_lse": True, **given}
        )


def packed(dtype: torch.dtype, heads: int = 2, apart: tuple[int, ...] = (6,)) -> Packed:
    """Return sequences whose neighbours read much the same, but for those that are ``apart``.

    Each row of the last one has two keys that the row before it has not, so groups read more.
    """
    generator = torch.Generator().manual_seed(1)
    lists = []
    for at, (rows, keys) in enumerate(LENGTHS):
        found = torch.zeros(heads, 0, LISTED, dtype=torch.int64)
        if rows:
            found = lists_of(Sizes(1, 4, rows, keys), heads, LISTED, at, alike=at not in apart)[0]
        lists.append(found)
    for row in range(1, LENGTHS[-1][0]):
        fresh = torch.arange(2 * row, 2 * row + 2)
        lists[-1][:, row] = lists[-1][:, row - 1]
        lists[-1][:, row, fresh % LISTED] = fresh * 7 % LENGTHS[-1][1]
    starts = torch.tensor([(0, 0), *LENGTHS]).cumsum(0).int()
    rows, keys = starts[-1].tolist()
    shapes = (rows, 4, 8), (keys, 2, 8), (keys, 2, 5)
    drawn = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    q, k, v = (x.requires_grad_() for x in drawn)
    return Packed(q, k, v, starts[:, 0], starts[:, 1], torch.cat(lists, dim=1))


def together(found: Any, leaves: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Output, lse and the gradients of both, by fixed weights."""
    out, lse = found[:2]
    weights = [torch.cos(torch.arange(x.numel())).view_as(x).to(x.dtype) for x in (out, lse)]
    grads = torch.autograd.grad([out, lse], leaves, weights)
    named = {f"d{at}": each for at, each in enumerate(grads)}
    return {"out": out.detach(), "lse": lse.detach(), **named}


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[list[Shared]]:
    """What calls choose, one after the other."""
    found: list[list[Shared]] = []

    def spy(*given: Any) -> list[Shared]:
        found.append(shared(*given))
        return found[-1]

    monkeypatch.setattr("tilewise.engine.listed_work.shared", spy)
    return found


def of_items(parts: list[Shared]) -> dict[int, tuple[int, list[int], Tensor, Tensor | None]]:
    """Return the rows of a group, first rows of groups, lists and readers of each sequence."""
    found = {}
    for part in parts:
        for item in part.items.tolist():
            own = part.groups.item == item
            readers = None if part.readers is None else part.readers[own]
            lists = part.listed.indices[own]
            found[item] = part.rows, part.groups.first[own].tolist(), lists, readers
    return found


@pytest.mark.parametrize("heads", [1, 2])
def test_rows_of_one_sequence_share(heads: int, chosen: list[list[Shared]]) -> None:
    """Groups have all rows of a sequence once; they and their lists follow from it alone."""
    case = packed(torch.float32, heads)
    case.call()
    found = of_items(chosen[0])
    assert [found[at][0] for at in (0, 1, 4, 5, 6)] == [8, 1, 1, 1, 1]
    assert [found[at][0] for at in (2, 3, 8)] == [4, 8, 4]
    assert found[2][2].shape[-1] < found[8][2].shape[-1], "groups of one width"
    for at, (many, _) in enumerate(LENGTHS):
        rows, firsts, lists, readers = found[at]
        assert firsts == list(range(0, many, rows))
        if rows > 1:
            case.alone(at).call()
            alone = of_items(chosen[-1])[0]
            assert alone[:2] == (rows, firsts)
            assert torch.equal(alone[2], lists)
            assert alone[3] is not None
            assert readers is not None
            assert torch.equal(alone[3], readers)


@pytest.mark.parametrize("heads", [1, 2])
def test_a_sequence_has_the_bits_that_it_has_alone(heads: int) -> None:
    """In a batch, packed alone, and as the one item of a dense call; gradients too."""
    case = packed(torch.float32, heads)
    score = scores.alibi(SLOPES)
    asked: dict[str, Any] = {"return_stats": "top1", "mask": masks.causal(), "score": score}

    def of(found: Any, leaves: tuple[Tensor, ...]) -> list[Tensor]:
        out, lse, stats = found
        loss = out.square().sum() + stats.entropy.sum() + lse.exp().sum()
        grads = torch.autograd.grad(loss, leaves)
        return [out, lse, stats.max_logit, stats.entropy, stats.top1, *grads]

    out, lse, top, entropy, key, by_q, by_k, by_v = of(case.call(**asked), case.leaves)
    for at in range(len(LENGTHS)):
        rows, keys = (slice(*x[at : at + 2].tolist()) for x in (case.starts_q, case.starts_k))
        numbers = [x[:, rows] for x in (lse, top, entropy, key)]
        mine = [out[rows], *numbers, by_q[rows], by_k[keys], by_v[keys]]
        one = case.alone(at)
        assert_all_same_bits(of(one.call(**asked), one.leaves), mine, f"sequence {at}, packed")
        dense = [x.detach().transpose(0, 1)[None].requires_grad_() for x in one.leaves]
        result = tilewise.attention(*dense, keys=one.lists[None], return_lse=True, **asked)
        found = of(result, tuple(dense))
        by_rows = [x[0].transpose(0, 1) for x in (found[0], *found[5:])]
        due = [by_rows[0], *(x[0] for x in found[1:5]), *by_rows[1:]]
        assert_all_same_bits(due, mine, f"sequence {at}, dense")


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_2x_rule(target: Target, dtype: torch.dtype) -> None:
    """Against the plain formula of each sequence, with a mask, a score and gradients."""
    case = packed(dtype)

    def plain(leaves: tuple[Tensor, ...]) -> Any:
        outs, lses = [], []
        for at, (_, keys) in enumerate(LENGTHS):
            rows, listed = (slice(*x[at : at + 2].tolist()) for x in case[3:5])
            seen = both(seen_by(case.lists[None, :, rows], keys), lambda b, h, m, n: n <= m + 16)
            q, k, v = leaves[0][rows], leaves[1][listed], leaves[2][listed]
            found = attend(
                *(x.transpose(0, 1)[None] for x in (q, k, v)),
                mask=seen,
                score=lambda s, b, h, m, n: s - SLOPES.to(s.dtype)[h] * (m - n).abs(),
            )
            outs.append(found.out[0].transpose(0, 1))
            lses.append(found.lse[0])
        return torch.cat(outs), torch.cat(lses, dim=1)

    with forced(target):
        given = {
            "mask": lambda b, h, m, n: n <= m + 16,
            "score": lambda s, b, h, m, n: s - SLOPES[h] * abs(m - n),
        }
        got = together(case.call(**given, backend=target.backend), case.leaves)
    wide = tuple(x.detach().double().requires_grad_() for x in case.leaves)
    simple, oracle = together(plain(case.leaves), case.leaves), together(plain(wide), wide)
    for name, tensor in got.items():
        assert_exact(tensor, simple[name].to(tensor.dtype), oracle[name], name)


def test_a_score_with_gradients_over_blocks_of_keys(chosen: list[list[Shared]]) -> None:
    """Against the same call with the lists as a mask, in float64; sinks and a bias learn too."""
    case, block = packed(torch.float64), 6
    longest = [max(each) for each in zip(*LENGTHS, strict=True)]
    counts = [-(-keys // block) for _, keys in LENGTHS]
    lists = case.lists.clone()
    seen = torch.zeros(len(LENGTHS), 2, *longest, dtype=torch.bool)
    for at, (many, keys) in enumerate(LENGTHS):
        rows = slice(*case.starts_q[at : at + 2].tolist())
        if counts[at]:
            lists[:, rows] = torch.where(lists[:, rows] < 0, -1, lists[:, rows] % counts[at])
        named = seen_by(lists[None, :, rows], counts[at]).repeat_interleave(block, -1)
        seen[at, :, :many, :keys] = named[0, :, :, :keys]
    bias = torch.randn(4, longest[0], 1, dtype=torch.float64, requires_grad=True)
    sinks = torch.tensor([0.5, -2.0, 3.0, 1.0], dtype=torch.float64, requires_grad=True)
    given: dict[str, Any] = {"sinks": sinks, "score": lambda s, b, h, m, n: s + bias[h, m, 0] * n}
    leaves = (*case.leaves, bias, sinks)
    got = together(case.call(keys=KeyBlocks(lists, block), **given), leaves)
    assert any(part.rows > 1 for part in chosen[0])
    mask = masks.dense(seen.repeat_interleave(2, 1))
    due = together(case.call(keys=None, mask=mask, **given), leaves)
    assert_all_close(got, due)


def test_all_rows_share_beside_a_sequence_without_any(chosen: list[list[Shared]]) -> None:
    """The part of the sequences whose rows have lists of their own then has no rows."""
    q, k = torch.randn(16, 4, 8, requires_grad=True), torch.randn(50, 2, 8, requires_grad=True)
    ends = torch.tensor([0, 0, 16]), torch.tensor([0, 20, 50])
    lists = torch.arange(9).expand(1, 16, -1)
    out = tilewise.attention_varlen(q, k, k, *ends, keys=lists)
    grads = torch.autograd.grad(out.sum(), (q, k))
    assert [(part.rows, len(part.groups.item)) for part in chosen[0]] == [(1, 0), (16, 1)]
    alone = tilewise.attention_varlen(q, k[20:], k[20:], *(x[1:] - x[1] for x in ends), keys=lists)
    assert_all_same_bits([alone, *torch.autograd.grad(alone.sum(), (q, k))], [out, *grads], "rows")


@pytest.mark.parametrize("at", [0, 3])
def test_other_sequences_may_hold_anything(at: int) -> None:
    """NaN in one sequence reaches no row and no gradient of another."""
    case = packed(torch.float32, apart=())
    rows, keys = (slice(*x[at : at + 2].tolist()) for x in (case.starts_q, case.starts_k))
    with torch.no_grad():
        for x, own in ((case.q, rows), (case.k, keys), (case.v, keys)):
            x[own] = torch.nan
    out = case.call().out
    by_q, by_k, by_v = torch.autograd.grad(out.sum(), case.leaves)
    for x, own in ((out, rows), (by_q, rows), (by_k, keys), (by_v, keys)):
        others = torch.cat([x[: own.start], x[own.stop :]])
        assert bool(others.isfinite().all())
    assert not bool(out[rows].isfinite().all())


def test_pages_of_packed_rows(chosen: list[list[Shared]]) -> None:
    """Keys that lie in pages, forward: the bits of the packed call."""
    case, size = packed(torch.float32), 4
    counts = torch.tensor([keys for _, keys in LENGTHS])
    pages = [-(-keys // size) for _, keys in LENGTHS]
    order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(2))
    table = torch.zeros(len(LENGTHS), max(pages), dtype=torch.int32)
    stores = [torch.zeros(sum(pages), 2, size, x.shape[-1]) for x in case[1:3]]
    for at, (many, own) in enumerate(zip(pages, order.split(pages), strict=True)):
        table[at, :many] = own
        keys = slice(*case.starts_k[at : at + 2].tolist())
        for store, x in zip(stores, case[1:3], strict=True):
            short = many * size - (keys.stop - keys.start)
            padded = torch.nn.functional.pad(x.detach()[keys], (0, 0, 0, 0, 0, short))
            store[own.long()] = padded.unflatten(0, (many, size)).transpose(1, 2)
    given: dict[str, Any] = {"keys": case.lists, "mask": masks.causal(), "return_lse": True}
    got = tilewise.attention_paged(
        case.q.detach(), stores[0], stores[1], table, counts, case.starts_q, **given
    )
    assert any(part.rows > 1 for part in chosen[0])
    with torch.no_grad():
        due = case.call(mask=masks.causal())
    assert_all_same_bits(got[:2], due[:2], "pages")


def test_explain_says_that_packed_rows_share() -> None:
    """As it does of a dense call."""
    case = packed(torch.float32)
    text = str(tilewise.explain(*case[:5], keys=case.lists))
    assert "up to 16 neighbours whose lists name mostly the same keys" in text
