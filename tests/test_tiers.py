"""What ``./run test`` leaves out: the sample still has each value of each parameter."""

from __future__ import annotations

import ast
import runpy
from itertools import product
from typing import Any

import pytest

from tests import tiers
from tests.cases import FLOATS, TABLE
from tests.tiers import LONG, TESTS, sample

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


def test_what_is_thorough(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow, thorough and long cases stand for nothing; others keep their own marks."""
    pytester.makeconftest(
        "import pytest\n"
        "from pathlib import Path\n"
        "from tests import tiers\n"
        "tiers.TESTS, tiers.LONG = Path(__file__).parent, Path(__file__).parent / 'long.txt'\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_collection_modifyitems(items):\n"
        "    tiers.mark_thorough(items)\n"
    )
    monkeypatch.setattr(tiers, "LONG", LONG)  # given back after the run in this process
    monkeypatch.setattr(tiers, "TESTS", TESTS)
    pytester.makepyfile(
        test_some="""
        import pytest
        SLOW = pytest.param(0, marks=pytest.mark.slow)
        MORE = pytest.param(3, marks=pytest.mark.thorough)
        @pytest.mark.parametrize("a", [SLOW, 1, 2, MORE])
        @pytest.mark.parametrize("b", range(5))
        def test_many(a, b): pass
        def test_one(): pass
        @pytest.mark.thorough
        def test_more(): pass
        @pytest.mark.parametrize("b", [1, 2, 3])
        @pytest.mark.parametrize("a", [1, 2])
        def test_of_long_cases(a, b): pass
        def test_long(): pass
        def test_long_of_every_day(): pass
    """
    )
    long = ["test_long", *(f"test_of_long_cases[1-{b}]" for b in (1, 2, 3))]
    lines = [f"test_some.py::{name}" for name in long]
    text = "\n".join([*lines, "!test_some.py::test_long_of_every_day"])
    (pytester.path / "long.txt").write_text(text)
    ran = pytester.inline_run("-m", "not slow and not thorough").listoutcomes()[0]
    names = [report.nodeid.partition("::")[2] for report in ran]
    many = [name for name in names if name.startswith("test_many")]
    assert 5 <= len(many) <= 6
    assert not any(name.endswith(("-0]", "-3]")) for name in many)
    others = [name for name in names if name not in many]
    of_cases = [f"test_of_long_cases[2-{b}]" for b in (1, 2, 3)]
    assert others == ["test_one", *of_cases, "test_long_of_every_day"]


def test_parts_share_the_thorough_tests(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in one part; the others in all of them. What is no part is an error."""
    pytester.makeconftest("from tests.conftest import pytest_collection_modifyitems")
    pytester.makepyfile("""
        import pytest
        @pytest.mark.thorough
        @pytest.mark.parametrize("a", range(60))
        def test_thorough(a): pass
        def test_every_day(): pass
    """)
    parts = []
    for number in (1, 2, 3):
        monkeypatch.setenv("TILEWISE_PART", f"{number}/3")
        outcomes = pytester.inline_run().listoutcomes()[0]
        parts.append({report.nodeid.partition("::")[2] for report in outcomes})
        assert len(parts[-1]) > 10
    assert parts[0] & parts[1] == parts[0] & parts[2] == parts[1] & parts[2] == {"test_every_day"}
    assert len(parts[0] | parts[1] | parts[2]) == 61
    monkeypatch.setenv("TILEWISE_PART", "4/3")
    assert pytester.inline_run().ret == pytest.ExitCode.USAGE_ERROR


def test_the_long_tests_are_there() -> None:
    """A test that is renamed or deleted leaves the list."""
    functions: dict[str, set[str]] = {}
    for line in LONG.read_text().splitlines():
        module, _, name = line.removeprefix("!").partition("::")
        if module not in functions:
            tree = ast.parse((TESTS / module).read_text())
            functions[module] = {x.name for x in ast.walk(tree) if isinstance(x, ast.FunctionDef)}
        assert name.partition("[")[0] in functions[module], line


def test_the_list_follows_a_run() -> None:
    """What did not run stays, what became short goes, what is wanted every day is not put in."""
    updated = runpy.run_path(str(TESTS.parent / "scripts" / "long_tests.py"))["updated"]
    before = ["!a::wanted", "a::long", "a::not run", "a::now short"]
    seconds = {"a::wanted": 9.0, "a::long": 2.0, "a::now short": 0.1, "a::new": 2.0, "a::short": 1}
    assert updated(before, seconds, 2.0) == ["!a::wanted", "a::long", "a::new", "a::not run"]
