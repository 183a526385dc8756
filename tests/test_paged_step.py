"""``PagedStep``: the bits of the tensors that it was made of; what is stale or wrong is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests.cases import Case, build
from tests.contract import assert_same_bits
from tests.test_paged import CASES, keywords_of, paged_of, small
from tilewise import PagedStep, masks
from tilewise.engine import pages as engine
from tilewise.errors import InvalidArgument, InvalidType

FOUND = ("block_table", "key_lengths", "cu_seqlens_q")
ANY: dict[str, Any] = {"backend": None}  # the core, where it is there


def stepped(given: dict[str, Any], page_size: int = 4) -> dict[str, Any]:
    """The arguments of a call with a step for what finds its keys."""
    rest = {name: each for name, each in given.items() if name not in FOUND}
    found = {name: given[name] for name in FOUND if name in given}
    return {**rest, "block_table": PagedStep(**found, page_size=page_size)}


def same(got: Any, expected: Any, what: str) -> None:
    """All tensors of two results have the same bits."""
    if isinstance(expected, Tensor):
        assert_same_bits(got, expected, what)
    elif expected is not None:
        for one, other in zip(got, expected, strict=True):
            same(one, other, what)


@pytest.mark.parametrize("backend", [None, "tiled"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_bits_of_a_call_with_tensors(case: Case, backend: str | None) -> None:
    """Packed calls with masks, scores, captured tensors, sinks and statistics."""
    inputs = build(case).detached()
    assert inputs.cu_seqlens is not None
    given: dict[str, Any] = {"q": inputs.q, **paged_of(inputs, 16)._asdict(), "backend": backend}
    given |= {**keywords_of(inputs), "cu_seqlens_q": inputs.cu_seqlens[0]}
    by_step = stepped(given, 16)
    for asked in ({}, {"return_lse": True}, {"return_stats": "top1"}):
        expected = tilewise.attention_paged(**given, **asked)
        same(tilewise.attention_paged(**by_step, **asked), expected, str(asked))


@pytest.mark.parametrize("backend", [None, "tiled"])
def test_queries_of_a_batch(backend: str | None) -> None:
    """Layers of several masks and queries, by one step of int64 tensors; held plans."""
    given = small()
    step = stepped({**given, "block_table": given["block_table"].long()})["block_table"]
    for queries, mask in ((3, None), (1, masks.causal()), (2, masks.dense(torch.ones(9) > 0))):
        q, k, v = torch.randn(2, 8, queries, 8), given["k_pages"], given["v_pages"]
        asked: dict[str, Any] = {"mask": mask, "backend": backend}
        tables = {name: given[name] for name in FOUND[:2]}
        expected = tilewise.attention_paged(q, k, v, **tables, **asked)
        got = tilewise.attention_paged(q, k, v, step, **asked)
        assert_same_bits(got, expected, "step")
        plan = tilewise.plan(q, k, v, **tables, **asked)
        got = tilewise.attention_paged(q, k, v, step, **asked, plan=plan)
        assert_same_bits(got, expected, "held plan")


@pytest.mark.parametrize("packed", [False, True])
def test_a_scheduler_may_overwrite_its_tensors(packed: bool) -> None:
    """What the step was made of changes, by torch and behind its back: the step does not."""
    given = small(**ANY)
    if packed:
        rows = given["q"].transpose(1, 2).flatten(0, 1)
        given |= {"q": rows, "cu_seqlens_q": torch.tensor([0, 3, 6])}
    expected = tilewise.attention_paged(**given)
    by_step = stepped(given)
    for name in FOUND[: 2 + packed]:
        given[name].numpy()[...] = 2**30
        given[name].fill_(-7)
    assert_same_bits(tilewise.attention_paged(**by_step), expected, "out")


def test_values_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call looks at them again, with captured tensors neither."""
    by_step = stepped(small(mask=masks.dense(torch.ones(1, 1, 3, 9) > 0), **ANY))
    plain = stepped(small(**ANY))
    for name in ("_checked_lengths", "check_entries", "check_cu_seqlens"):
        monkeypatch.setattr(engine, name, None)
    tilewise.attention_paged(**by_step)
    tilewise.attention_paged(**plain)
    with pytest.raises(TypeError, match="not callable"):
        tilewise.attention_paged(**small(**ANY))


def _with(**changes: Any) -> dict[str, Any]:
    return {**stepped(small(**ANY)), **changes}


def _packed(rows: int) -> dict[str, Any]:
    starts = torch.tensor([0, 2, 3])
    return {**stepped(small(**ANY, cu_seqlens_q=starts)), "q": torch.zeros(rows, 4, 8)}


POOL = torch.zeros(6, 2, 4, 8)
STALE: dict[str, tuple[dict[str, Any], str]] = {
    "pages of another size": (
        _with(k_pages=torch.zeros(6, 2, 8, 8), v_pages=torch.zeros(6, 2, 8, 8)),
        r"^block_table: got PagedStep\(2 sequences, up to 4 pages of 4 keys\); required: one for "
        "the pages of this call, of 8 keys",
    ),
    "fewer pages": (
        _with(k_pages=POOL[:2], v_pages=POOL[:2]),
        "^block_table: got page .* in slot .* of sequence .*one of the 2 pages",
    ),
    "more sequences": (_with(q=torch.zeros(3, 4, 3, 8)), "^block_table: got 2 rows"),
    "more packed queries": (_packed(4), "^q: got 4 packed rows; required: the 3 of the step"),
    "fewer packed queries": (_packed(2), "^q: got 2 packed rows; required: the 3 of the step"),
    "queries of a batch for packed ones": (
        {**_packed(3), "q": torch.zeros(2, 4, 3, 8)},
        r"^q: got shape .*\[T, Hq, D\]",
    ),
    "packed queries for those of a batch": (
        _with(q=torch.zeros(6, 4, 8)),
        r"^q: got shape .*\[B, Hq, M, D\]",
    ),
    "lengths beside it": (
        _with(key_lengths=torch.tensor([5, 9])),
        "^key_lengths: got one with a PagedStep",
    ),
    "starts beside it": (
        _with(cu_seqlens_q=torch.tensor([0, 3, 6])),
        "^cu_seqlens_q: got one with a PagedStep",
    ),
}


@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("name", STALE)
def test_a_step_of_another_call_is_refused(name: str, statistics: bool) -> None:
    """Also where a call of the right shapes made its plan before."""
    tilewise.attention_paged(**_with())
    given, message = STALE[name]
    with pytest.raises(InvalidArgument, match=message):
        tilewise.attention_paged(**given, return_stats=statistics)


NO_STEP: dict[str, tuple[dict[str, Any], str]] = {
    "rank of the table": ({"block_table": torch.zeros(6).int()}, "^block_table: got shape"),
    "entries of the lengths": ({"key_lengths": torch.tensor([1])}, "^key_lengths: got 1 entries"),
    "a negative page": (
        {"block_table": torch.tensor([[0, 1, -1], [3, -1, -1]])},
        "^block_table: got page -1 in slot 1 of sequence 1, which has 9 keys; required: 0 to ",
    ),
    "a page that int32 would cut": (
        {"block_table": torch.tensor([[0, 1, -1], [3, 2**32, 2]])},
        f"^block_table: got page {2**32} in slot 1 of sequence 1.*: 0 to {2**31 - 1}",
    ),
    "a length over the table": (
        {"key_lengths": torch.tensor([17, 3])},
        r"^key_lengths: got 17 for sequence 0; required: in \[0, 16\].* 4 pages of 4",
    ),
    "falling starts": ({"cu_seqlens_q": torch.tensor([0, 3, 2])}, "^cu_seqlens_q: got 3 followed"),
    "no page at all": ({"page_size": 0}, "^page_size: got 0"),
}


@pytest.mark.parametrize("name", NO_STEP)
def test_wrong_values_are_named_when_it_is_made(name: str) -> None:
    changes, message = NO_STEP[name]
    given = {each: value for each, value in small().items() if each in FOUND}
    with pytest.raises(InvalidArgument, match=message):
        PagedStep(**{**given, "page_size": 4, **changes})


def test_a_table_alone_is_no_step() -> None:
    given = small()
    del given["key_lengths"]
    with pytest.raises(InvalidType, match=r"^key_lengths: got None"):
        tilewise.attention_paged(**given)


def test_in_a_graph() -> None:
    """A graph reads the step's tensors; its op looks at their values again."""
    torch._dynamo.reset()
    given = small()
    by_step = stepped(given)
    step = by_step.pop("block_table")

    def call(q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Any:
        return tilewise.attention_paged(q, k_pages, v_pages, step, backend="tiled")

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    tensors = tuple(by_step[name] for name in ("q", "k_pages", "v_pages"))
    assert_same_bits(compiled(*tensors), tilewise.attention_paged(**given), "compiled")
