"""What ``./run test`` leaves out: the sample still has each value of each parameter."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.cases import FLOATS, TABLE
from tests.tiers import sample

pytest_plugins = ["pytester"]

ISAS = ("avx512", "avx2", "portable")


def test_each_case_dtype_and_instruction_set_is_in_the_sample() -> None:
    cases: dict[str, dict[str, Any]] = {
        f"test[{isa}-{case.of(dtype)}]": {"isa": isa, "case": case.of(dtype)}
        for isa, case, dtype in product(ISAS, TABLE, FLOATS)
    }
    chosen = [cases[name] for name in sample(cases)]
    assert {case["case"].name for case in chosen} == {case.name for case in TABLE}
    # No instruction set and no dtype has all of the sample, as the first of each case would be.
    for isa in ISAS:
        assert sum(case["isa"] == isa for case in chosen) > len(TABLE) / 6
    for dtype in FLOATS:
        assert sum(case["case"].dtype == dtype for case in chosen) > len(TABLE) / 8
    assert len(chosen) < 1.2 * len(TABLE)


def test_each_instruction_set_has_its_share_of_the_functions() -> None:
    functions = [{f"test_{at}[{isa}]": {"isa": isa} for isa in ISAS} for at in range(60)]
    chosen = [function[name]["isa"] for function in functions for name in sample(function)]
    assert len(chosen) == 60
    assert all(chosen.count(isa) > 10 for isa in ISAS)


def test_cases_that_share_no_value_are_all_in_the_sample() -> None:
    cases = {str(number): {"seed": number} for number in range(20)}
    assert sample(cases) == set(cases)


def test_marks(pytester: pytest.Pytester) -> None:
    """Slow and thorough cases stand for nothing; tests without parameters keep their own marks."""
    pytester.makeconftest(
        "import pytest\n"
        "from tests.tiers import mark_thorough\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_collection_modifyitems(items):\n"
        "    mark_thorough(items)\n"
    )
    pytester.makepyfile("""
        import pytest
        SLOW = pytest.param(0, marks=pytest.mark.slow)
        MORE = pytest.param(3, marks=pytest.mark.thorough)
        @pytest.mark.parametrize("a", [SLOW, 1, 2, MORE])
        @pytest.mark.parametrize("b", range(5))
        def test_many(a, b): pass
        def test_one(): pass
        @pytest.mark.thorough
        def test_more(): pass
    """)
    ran = pytester.inline_run("-m", "not slow and not thorough").listoutcomes()[0]
    names = [report.nodeid.partition("::")[2] for report in ran]
    assert "test_one" in names
    assert "test_more" not in names
    assert 5 <= sum(name.startswith("test_many") for name in names) <= 6
    assert not any(name.endswith(("-0]", "-3]")) for name in names)
