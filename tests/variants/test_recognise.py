"""What kernels know by structure is found in any spelling, and nothing else is taken for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewise
from tilewise import masks, scores
from tilewise.variants.program import encode
from tilewise.variants.recognise import as_expression
from tilewise.variants.trace import trace_score
from tilewise.variants.values import as_mask, as_score

LENGTHS = torch.tensor([3, 5])
IDS, LINE = torch.zeros(2, 9, dtype=torch.int64), torch.zeros(9, dtype=torch.int64)
ALLOWED = torch.ones(2, 4, 9, 9, dtype=torch.bool)
BIAS, SLOPES = torch.zeros(4, 9, 9), torch.zeros(4)

KNOWN: dict[str, Callable[..., Any]] = {
    "band(-1,0,0)": lambda b, h, m, n: m >= n,
    "band(-1,2,0)": lambda b, h, m, n: n - m < 3,
    "band(4,-1,0)": lambda b, h, m, n: n + 4 >= m,
    "band(-1,0,1)": lambda b, h, m, n: m - n + n.length - m.length >= 0,
    "band(4,0,0)": lambda b, h, m, n: (m - n <= 4) & (n <= m),
    "band(4,3,1)": lambda b, h, m, n: (
        (n <= m + n.length - m.length + 3) & (n >= m + (n.length - m.length) - 4)
    ),
    "band(5,5,0)": lambda b, h, m, n: abs(m - n) < 6,
    "band(5,5,1)": lambda b, h, m, n: abs(n - m - n.length + m.length) <= 5,
    "below(6)": lambda b, h, m, n: n < 6,
    "below(0)": lambda b, h, m, n: n < 0,
    "below(1)[0]": lambda b, h, m, n: n < LENGTHS[b],
    "same_document(1)[0,1]": lambda b, h, m, n: IDS[b, n] == IDS[b, m],
    "dense(1,0,1,2,3)[0]": lambda b, h, m, n: ALLOWED[b, h, m, n],
    "dense(1,0,4,4,3)[0]": lambda b, h, m, n: ALLOWED[b, 0, 0, n],
    "band(-1,0,0) same_document(1)[0,1] and": lambda b, h, m, n: (m >= n) & (LINE[m] == LINE[n]),
    "band(-1,0,0) below(4) or not": lambda b, h, m, n: ~((m >= n) | (n < 4)),
    "": lambda b, h, m, n: True,
}


@pytest.mark.parametrize("text", KNOWN)
def test_a_mask_in_another_spelling(text: str) -> None:
    assert as_mask(KNOWN[text]).text == text


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda b, h, m, n: m >= 0, ""),
        (lambda b, h, m, n: (n > -1) & (h >= -2), ""),
        (lambda b, h, m, n: ~(b < 0) & (n <= m), "band(-1,0,0)"),
        (lambda b, h, m, n: (m < 0) | (n <= m), "band(-1,0,0)"),
        (lambda b, h, m, n: n <= -1, "below(0)"),
        (lambda b, h, m, n: m > 0, "expr{const_int:0;m;lt(0,1)}"),
    ],
)
def test_what_all_positions_are_is_known(function: Callable[..., Any], text: str) -> None:
    assert as_mask(function).text == text


UNKNOWN: dict[str, Callable[..., Any]] = {
    "a band that begins beyond the diagonal": lambda b, h, m, n: n > m,
    "two rows a key": lambda b, h, m, n: n <= 2 * m,
    "a band by head": lambda b, h, m, n: n <= m + h,
    "a bound from the end": lambda b, h, m, n: n < n.length - 2,
    "rows": lambda b, h, m, n: m < 4,
    "keys of another length": lambda b, h, m, n: n < LENGTHS[h],
    "documents of another row": lambda b, h, m, n: IDS[b, m + 1] == IDS[b, n],
    "documents of rows alone": lambda b, h, m, n: IDS[b, m] == IDS[b, 0],
    "a tensor at one place twice": lambda b, h, m, n: ALLOWED[b, h, m, m],
    "a tensor elsewhere": lambda b, h, m, n: ALLOWED[b, h, m // 2, n],
    "a distance of other factors": lambda b, h, m, n: abs(2 * m - n) < 6,
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_only_looks_alike_stays_an_expression(name: str) -> None:
    (only,) = as_mask(UNKNOWN[name]).program
    assert only.op == "expr"


def test_scores_are_taken_off_from_the_outside() -> None:
    def score(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        capped = 30.0 * torch.tanh((s * s) / 30.0)
        return capped + BIAS[h, m, n] - SLOPES[h] * abs(m + n.length - m.length - n)

    found = as_score(score)
    assert found.text == "expr{s;mul(0,0)} softcap(30.0) bias(1,1,2,3)[0] alibi(1,1)[1]"
    assert [x is y for x, y in zip(found.captured, (BIAS, SLOPES), strict=True)] == [True, True]


LOOKS_ALIKE: dict[str, Callable[..., Any]] = {
    "two caps": lambda s, b, h, m, n: 30.0 * torch.tanh(s / 20.0),
    "a negative cap": lambda s, b, h, m, n: -30.0 * torch.tanh(s / -30.0),
    "signed distance": lambda s, b, h, m, n: s - SLOPES[h] * (m - n),
    "distance from the top": lambda s, b, h, m, n: s - SLOPES[h] * abs(m + 1 - n),
    "a bias taken away": lambda s, b, h, m, n: s - BIAS[h, m, n],
    "a table": lambda s, b, h, m, n: s + BIAS[h, m - n, 0],
    "a product": lambda s, b, h, m, n: s * BIAS[h, m, n],
}


@pytest.mark.parametrize("name", LOOKS_ALIKE)
def test_scores_that_only_look_alike_stay_expressions(name: str) -> None:
    (only,) = as_score(LOOKS_ALIKE[name]).program
    assert only.op == "expr"


def test_slopes_that_are_learned_are_no_constants() -> None:
    slopes = torch.zeros(4, requires_grad=True)
    found = as_score(lambda s, b, h, m, n: s - slopes[h] * abs(m + n.length - m.length - n))
    assert [instr.op for instr in found.program] == ["expr"]


def test_the_built_ins_say_what_their_definitions_say() -> None:
    def left_right(b: Any, h: Any, m: Any, n: Any) -> Any:
        own = m + n.length - m.length
        return (n >= own - 5) & (n <= own + 2)

    assert masks.window(5, 2).text == as_mask(left_right).text
    assert masks.causal("top_left").text == as_mask(lambda b, h, m, n: n <= m).text
    assert masks.window(None, None).text == ""
    capped = as_score(lambda s, b, h, m, n: 20.0 * torch.tanh(s / 20.0))
    assert scores.softcap(20.0).text == capped.text


def test_everything_and_nothing_compose() -> None:
    everything, causal = masks.window(None, None), masks.causal()
    assert (everything & causal).text == (causal & everything).text == causal.text
    assert (everything | causal).text == (causal | everything).text == ""
    assert (~everything).text == "below(0)"


def test_functions_compose_with_masks() -> None:
    mixed = masks.causal() & (lambda b, h, m, n: (m - n) % 2 == 0) | LINE.bool()
    assert [instr.op for instr in mixed.program] == ["band", "expr", "and", "dense", "or"]
    ahead = (lambda b, h, m, n: n < 3) | masks.causal()
    assert ahead.text == "below(3) band(-1,0,1) or"


@pytest.mark.parametrize("deep", [12, 40, 400])
def test_a_mask_of_too_many_parts_is_one_expression(deep: int) -> None:
    """Each step uses the one before twice: written apart it would be 2^deep parts."""

    def parity(b: Any, h: Any, m: Any, n: Any) -> Any:
        found = n >= m
        for step in range(2, deep):
            found = (found & (n % step != 1)) | (~found & (m % step == 0))
        return found

    found = as_mask(parity)
    assert [instr.op for instr in found.program] == ["expr"]
    m, n = torch.arange(9)[:, None], torch.arange(13)
    assert torch.equal(tilewise.visible_pairs(found, 9, 13)[0, 0], parity(0, 0, m, n))


def test_a_score_of_too_many_steps_begins_with_an_expression() -> None:
    tables = [torch.randn(2, 9, 13) for _ in range(12)]

    def many(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        for table in tables:
            s = s + table[h, m, n]
        return s

    found = as_score(many)
    assert [instr.op for instr in found.program] == ["expr", *["bias"] * 7]
    assert [each is table for each, table in zip(found.captured, tables, strict=True)] == [
        True
    ] * 12
    q, k = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 13, 8)
    whole = scores.bias(sum(tables[1:], tables[0]))
    torch.testing.assert_close(*(tilewise.attention(q, k, k, score=x) for x in (found, whole)))


def test_an_index_that_is_added_to_itself_again_and_again() -> None:
    def doubled(b: Any, h: Any, m: Any, n: Any) -> Any:
        far = m
        for _ in range(40):
            far = far + far
        return n * 2**40 <= far

    assert [instr.op for instr in as_mask(doubled).program] == ["expr"]


def test_a_chain_is_one_expression_up_to_the_last_unknown_step() -> None:
    def squared(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        return s * s

    found = as_score([scores.softcap(4.0), scores.bias(BIAS), squared, scores.alibi(SLOPES)])
    assert [instr.op for instr in found.program] == ["expr", "alibi"]
    assert [x is y for x, y in zip(found.captured, (BIAS, SLOPES), strict=True)] == [True, True]
    whole, _ = trace_score(
        lambda s, b, h, m, n: squared(4.0 * torch.tanh(s / 4.0) + BIAS[h, m, n], b, h, m, n)
    )
    first = scores.softcap(4.0).program + as_score(squared).program
    assert encode(found.program[:1]).startswith("expr{const_float:4.0;s;")
    assert len(as_expression(first, []).nodes) < len(whole.nodes)


def test_each_operation_captures_in_its_own_form() -> None:
    table = torch.zeros(4, 9)
    found = as_score(lambda s, b, h, m, n: s * table[h, m] + table[h, n])
    assert found.text == "expr{s;h;m;load_float:0(1,2);mul(0,3)}[0] bias(1,1,3)[1]"
    assert [x is table for x in found.captured] == [True, True]
