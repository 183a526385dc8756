"""Calls of other code that torch computes faster: who does, and what was measured."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import tilewise
from tilewise import preference
from tilewise.errors import InvalidArgument
from tilewise.preference import SLOWER, Slower

ROOT = Path(__file__).parents[1]
STORED = sorted((ROOT / "benchmarks").glob("*/suites/doors.json"))


@pytest.fixture(autouse=True)
def by_speed() -> Iterator[None]:
    tilewise.prefer("speed")
    yield
    tilewise.prefer("tilewise")  # as all other tests have it (tests/conftest.py)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch is faster on this processor: float32 with gradients, and bfloat16 without."""
    core = pytest.importorskip("tilewise._core")
    isa = core.isa_active()
    rows = (
        Slower(isa, torch.float32, True, (0.5, 0.9), (2 * 4 * 7 * 7 * 16, 2 * 4 * 9 * 9 * 16)),
        Slower(isa, torch.bfloat16, False, (0.5, 0.9), (0, 9999), (1, 2), alone=True),
        Slower("another", torch.float16, False, (0.5, 0.9), (0, 1 << 40)),
    )
    monkeypatch.setattr(preference, "SLOWER", rows)
    monkeypatch.setattr(preference._State, "left", preference.Report())


def tensors(
    rows: int = 8, heads: int = 4, dtype: torch.dtype = torch.float32, grad: bool = True
) -> list[Any]:
    generator = torch.Generator().manual_seed(rows)
    sizes = ((2, 4, rows, 8), (2, heads, rows, 8), (2, heads, rows, 8))
    made = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
    return [x.requires_grad_(grad) for x in made]


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "with gradients": ({}, {}, True),
    "causal": ({}, {"is_causal": True}, True),
    "its own scale": ({}, {"scale": 0.3}, True),
    "grouped": ({"heads": 2}, {"enable_gqa": True}, True),
    "as few products as the row has": ({"rows": 7}, {}, True),
    "less": ({"rows": 6}, {}, False),
    "as many": ({"rows": 9}, {}, False),
    "without gradients": ({"grad": False}, {}, False),
    "another dtype": ({"dtype": torch.float64}, {}, False),
    "another instruction set": ({"dtype": torch.float16, "grad": False}, {}, False),
    "two queries of bfloat16": ({"rows": 2, "dtype": torch.bfloat16, "grad": False}, {}, True),
    "three": ({"rows": 3, "dtype": torch.bfloat16, "grad": False}, {}, False),
    "heads that share keys": (
        {"rows": 2, "dtype": torch.bfloat16, "grad": False, "heads": 2},
        {"enable_gqa": True},
        False,
    ),
    "dropout": ({}, {"dropout_p": 0.1}, False),
    "a mask": ({}, {"attn_mask": torch.ones(8, 8).tril().bool()}, False),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_switch_leaves_what_torch_computes_faster(table: None, name: str) -> None:
    sizes, keywords, left = CALLS[name]
    operands = tensors(**sizes)
    right = scaled_dot_product_attention(*operands, **keywords)
    with tilewise.sdpa() as report:
        found = torch.nn.functional.scaled_dot_product_attention(*operands, **keywords)
    assert (report.taken, report.calls) == (0 if left else 1, 1)
    if left:
        assert torch.equal(found, right)
        assert all("torch is faster (1.1 to 2 times)" in reason for reason in report.left)
    tilewise.prefer("tilewise")
    with tilewise.sdpa() as report:
        torch.nn.functional.scaled_dot_product_attention(*operands, **keywords)
    assert report.taken == 1


def test_layers_leave_it_too_and_count(table: None) -> None:
    torch.manual_seed(0)
    layer = tilewise.nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(2, 8, 32)
    mask = torch.ones(8, 8).triu(1).bool()
    calls: list[dict[str, Any]] = [{}, {"is_causal": True}, {"attn_mask": mask}]
    found = [layer(x, x, x, need_weights=False, **each)[0] for each in calls]
    assert tilewise.left_to_torch().calls == 2  # a mask is no plain call
    tilewise.prefer("tilewise")
    taken = [layer(x, x, x, need_weights=False, **each)[0] for each in calls]
    assert tilewise.left_to_torch().calls == 2
    for mine, right in zip(found, taken, strict=True):
        torch.testing.assert_close(mine, right)


def test_attention_itself_is_never_left(table: None) -> None:
    operands = tensors()
    before = tilewise.attention(*operands)
    tilewise.prefer("tilewise")
    assert torch.equal(tilewise.attention(*operands), before)
    assert tilewise.left_to_torch().calls == 0


def test_words() -> None:
    assert tilewise.preferred() == "speed"
    with pytest.raises(InvalidArgument, match="'speed' or 'tilewise'"):
        tilewise.prefer("torch")


# ---- what was measured

ENOUGH = 0.95  # of torch's speed: what is above counts as not slower


class Measured(NamedTuple):
    """A case of the suite ``doors``."""

    isa: str
    dtype: torch.dtype
    gradient: bool
    queries: int
    products: int
    alone: bool
    ratio: float  # torch's time over ours
    name: str


def measured(path: Path) -> list[Measured]:
    record = json.loads(path.read_text())
    times: dict[Any, Any] = {}
    isa = record["machine"]["instruction_set"]
    for point in record["points"]:
        if "samples" not in point:  # its result was not exact enough
            continue
        key = point["case"], point["length"], point["dtype"]
        times.setdefault(key, (point["shape"], {}))[1][point["method"]] = point["samples"]
    found = []
    for (case, keys, dtype), (shape, samples) in times.items():
        if len(samples) < 2:
            continue
        queries = int(case.split(",")[1].split()[0])
        products = shape["heads"] * queries * keys * 2 * shape["head_dim"]
        ratio = statistics.median(samples["sdpa"]) / statistics.median(samples["tilewise"])
        alone = shape["heads"] == shape["kv_heads"]
        about = getattr(torch, dtype), case.startswith("training"), queries, products, alone
        found.append(Measured(isa, *about, ratio, f"{case}, {keys} keys, {dtype}"))
    return found


def covers(row: Slower, case: Measured) -> bool:
    same = (row.isa, row.dtype, row.gradient) == (case.isa, case.dtype, case.gradient)
    return same and row.holds(case.queries, case.products, case.alone)


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.parts[-3])
def test_the_table_names_what_is_slower(path: Path) -> None:
    cases = measured(path)
    assert len(cases) > 100
    missing = [
        each
        for each in cases
        if each.ratio < ENOUGH and not any(covers(row, each) for row in SLOWER)
    ]
    assert missing == []


@pytest.mark.parametrize("row", SLOWER, ids=str)
def test_a_row_of_the_table_was_measured(row: Slower) -> None:
    ratios = [each.ratio for path in STORED for each in measured(path) if covers(row, each)]
    assert ratios, "no stored measurement"
    assert max(ratios) < 1
    assert row.ratio == (round(min(ratios), 2), round(max(ratios), 2))
