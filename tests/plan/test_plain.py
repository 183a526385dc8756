"""Plain attention, pass by pass."""

from __future__ import annotations

import pytest
import torch

from tests.plan.some_problems import problem
from tilewise.errors import InvalidArgument
from tilewise.plan.traffic import plain
from tilewise.plan.traffic.count import Traffic
from tilewise.variants import masks, scores

CAUSAL = masks.causal().program
MATRIX = 2 * 4 * 64 * 64 * 2  # B Hq M N e
ROWS = 2 * 4 * 64 * 32 * 2  # an operand


def names(traffic: Traffic) -> list[str]:
    return [each.name for each in traffic.passes]


def test_algorithm_0() -> None:
    """Q and K read, S written, S read, P written, P and V read, O written."""
    traffic = plain.forward(problem())
    assert names(traffic) == ["scores", "softmax", "product"]
    assert [each.bytes for each in traffic.passes] == [
        2 * ROWS + MATRIX,
        2 * MATRIX,
        2 * ROWS + MATRIX,
    ]
    assert traffic.flops == 2 * 2 * (2 * 4 * 64 * 64) * 32
    assert traffic.exponentials == 2 * 4 * 64 * 64


def test_algorithm_3() -> None:
    traffic = plain.backward(problem())
    assert names(traffic) == ["dv", "dp", "softmax", "dq", "dk"]
    assert traffic.bytes == 7 * MATRIX + 8 * ROWS
    assert traffic.flops == 4 * 2 * (2 * 4 * 64 * 64) * 32


def test_mask_and_dropout_make_it_18_passes() -> None:
    case = problem(mask=CAUSAL, dropout_p=0.1)
    forward, backward = plain.forward(case), plain.backward(case)
    mask = 64 * 64 * 2
    assert forward.bytes + backward.bytes == 18 * MATRIX + 12 * ROWS + mask
    assert names(forward) == ["scores", "mask", "softmax", "dropout", "product"]
    filled = plain.backward(case, mask="fill")
    assert filled.bytes - backward.bytes == 2 * MATRIX + mask


def test_a_score_is_a_pass_for_each_step() -> None:
    score = (*scores.softcap(5.0).program, *scores.softcap(3.0).program)
    case = problem(score=score)
    assert plain.forward(case).bytes - plain.forward(problem()).bytes == 4 * MATRIX
    assert plain.backward(case).bytes - plain.backward(problem()).bytes == 4 * MATRIX
    assert plain.forward(case).omitted


def test_groups_are_repeated_and_summed() -> None:
    case = problem(kv_heads=2)
    forward, backward = plain.forward(case), plain.backward(case)
    assert names(forward)[0] == "repeat"
    assert forward.passes[0].bytes == 2 * (ROWS // 2 + ROWS)
    assert names(backward)[-1] == "sum groups"
    assert backward.passes[-1].bytes == 2 * (ROWS + ROWS // 2)


def test_eight_bits_become_sixteen_first() -> None:
    """q, k and v are read in one byte and written in two; all else is as in bfloat16."""
    case = problem(kv_heads=2, dtype=torch.float8_e4m3fn)
    forward = plain.forward(case)
    wide = plain.forward(case._replace(dtype=torch.bfloat16))
    assert names(forward) == ["convert", *names(wide)]
    convert = forward.passes[0]
    assert [(each.name, each.read * 2 == each.written) for each in convert.operands] == [
        ("q", True),
        ("k", True),
        ("v", True),
    ]
    assert convert.bytes == (ROWS + 2 * (ROWS // 2)) * 3 // 2
    assert forward.bytes - wide.bytes == convert.bytes
    assert {each.dtype for each in forward.passes} == {"bfloat16"}
    assert {each.dtype for each in wide.passes} == {""}


def test_pages_are_gathered_first() -> None:
    """Copied by a table of four bytes an entry, once for the keys and once for the values."""
    lengths = [(3, 33), (5, 16), (1, 0)]
    case = problem(batch=3, queries=9, keys=48, kv_heads=2, layout="varlen")
    packed = plain.forward(case, lengths)
    paged = plain.forward(case._replace(page_size=16), lengths)
    assert names(paged) == ["gather", *names(packed)]
    copied = 2 * 49 * 32 * 2  # of k, and of v
    assert paged.passes[0].bytes == 2 * (3 + 1) * 4 + 2 * 2 * copied
    with pytest.raises(InvalidArgument, match="lengths"):
        plain.forward(case._replace(page_size=16, layout="dense"))
    narrow = plain.forward(case._replace(page_size=16, stored=torch.int8), lengths)
    assert names(narrow) == ["gather", "convert", *names(packed)]
    stored = 2 * 2 * 49 * (32 + 4)  # of both: a byte for a number, four for a row's scale
    assert narrow.passes[0].bytes == 2 * (3 + 1) * 4 + 2 * stored
    assert narrow.passes[1].bytes == stored + 2 * copied


def test_sequences_are_done_one_by_one() -> None:
    lengths = [(3, 5), (0, 4), (7, 1)]
    case = problem(batch=3, queries=10, keys=10, layout="varlen")
    pairs = 4 * (15 + 0 + 7)
    forward = plain.forward(case, lengths)
    assert forward.exponentials == pairs
    assert forward.bytes == 4 * pairs * 2 + 4 * (4 * 10 * 32 * 2)
    with pytest.raises(InvalidArgument, match="lengths"):
        plain.forward(case)
