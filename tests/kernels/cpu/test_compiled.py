"""Compiled expressions against the interpreter and the reference; fallbacks, and what is said."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests.cases import FLOATS
from tests.conftest import ROOT
from tests.contract import assert_same_bits
from tests.kernels.cpu.dense import Sizes, Variant, as_mask, as_score, check, check_bits, inputs
from tests.kernels.cpu.test_expressions import CPU_TARGETS, PACKED, VARIANTS, _used, only_cpu
from tests.kernels.targets import Target
from tilewise import masks
from tilewise.engine.dispatch import PLANS
from tilewise.errors import SlowPathWarning
from tilewise.kernels.cpu import compiled
from tilewise.kernels.cpu.emit import emit, program_of
from tilewise.variants.expr import OPS, Graph, encode
from tilewise.variants.program import Instr
from tilewise.variants.values import Score

HAS_COMPILER = any(shutil.which(name) for name in ("c++", "g++", "clang++"))
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all tests of this file: what is compiled is compiled once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TILEWISE_CACHE", str(folder))
    monkeypatch.delenv("TILEWISE_COMPILE", raising=False)
    return folder


@pytest.fixture
def forgetful(here: Path) -> Iterator[None]:
    """Forget what this process knows of compilers and code, before and after."""

    def forget() -> None:
        compiled._memory = compiled._Memory()
        compiled._found.cache_clear()

    forget()
    yield
    forget()


def _every_op(wide: bool, half: int) -> tuple[Score, int]:
    """A score whose key says which operation it is the value of, and the number of operations.

    Of every second one: an expression has no room for all of them.

    Arguments come from tables, special values among them.
    """
    graph = Graph()
    m, n, s = graph.leaf("m"), graph.leaf("n"), graph.leaf("s")
    # Of query and key, so that nothing but compiled code computes it.
    both = graph.apply("add", m, graph.apply("mul", n, graph.constant(2)))
    at = [graph.apply("mod", both, graph.constant(size)) for size in (13, 7, 2)]
    real = [graph.load("float", 0, [at[0]]), graph.load("float", 1, [graph.apply("add", at[1], n)])]
    real[1] = graph.apply("add", real[1], graph.apply("mul", s, graph.constant(1e-3)))
    whole = [graph.load("int", 2, [at[0]]), graph.load("int", 3, [graph.apply("sub", n, at[1])])]
    truth = [graph.load("bool", 4, [at[2]]), graph.apply("lt", real[1], graph.constant(0.1))]
    by_kind = {"f": real, "i": whole, "b": truth}
    found = []
    for name, op in OPS.items():
        for letter in op.takes[-1]:
            args = [by_kind[letter][i % 2] for i in range(len(op.takes))]
            if name == "where":
                args = [truth[1], *args[1:]]
            if name in ("shl", "shr"):
                args[1] = graph.apply("mod", args[1], graph.constant(9))
            if name in ("floordiv", "mod") and letter == "i":
                args[1] = graph.apply("max", args[1], graph.constant(1))
                found.append(graph.apply(name, args[0], graph.constant(4)))
                found.append(graph.apply(name, args[0], graph.constant(-3)))
            if name == "to_int" and letter == "f":
                args[0] = graph.apply("tanh", graph.apply("min", s, graph.constant(2.0)))
            found.append(graph.apply(name, *args))
    found = found[half::2]
    value = graph.constant(0.5)
    which = graph.apply("mod", n, graph.constant(len(found)))
    for number, node in enumerate(found):
        kind = graph.kinds[node]
        cast = node if kind == "float" else graph.apply("to_float", node)
        value = graph.apply("where", graph.apply("eq", which, graph.constant(number)), cast, value)
    inf = torch.inf
    large = 2**40 if wide else 1000
    tables = (
        torch.tensor(
            [0.0, -0.0, inf, -inf, torch.nan, 1e-40, 3e38, -2.5, 0.5, 1.5, 1.0, 7.25, -1e6]
        ),
        torch.linspace(-3, 3, 400),
        torch.tensor([0, 1, -1, 7, -7, 64, -64, large, -large, 3, 5, 2, -2]),
        torch.arange(400) % 11 - 5,
        torch.tensor([True, False]),
    )
    text = encode(graph.expr(value))
    return Score((Instr("expr", (text,), tuple(range(5))),), tables), len(found)


def _diagonal(count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """For attention in which row m sees the key m alone: lse is that pair's score."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, 1, count, 4, generator=generator).to(dtype) for _ in range(3))
    return q, k, v


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.float32, False),
        pytest.param(torch.float32, True, marks=pytest.mark.slow),
        pytest.param(torch.float64, True, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, False, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize(
    "target",
    [
        pytest.param(target, marks=() if target.rank == 0 else (pytest.mark.slow,))
        for target in CPU_TARGETS
    ],
    ids=str,
    indirect=True,
)
def test_every_operation(
    target: Target, here: Path, dtype: torch.dtype, wide: bool, half: int
) -> None:
    """What the interpreter says of each operation and of special values, compiled code says too."""
    score, count = _every_op(wide, half)
    score = Score(
        score.program,
        tuple(
            t.to(torch.float64) if t.dtype == torch.float32 and dtype is torch.float64 else t
            for t in score.captured
        ),
    )
    assert count % 13 != 0
    x = _diagonal(26 * count + 5, dtype)

    def lse() -> Tensor:
        found = tilewise.attention(
            *x, score=score, mask=masks.window(0, 0), backend="cpu", return_lse=True
        )
        assert found.lse is not None
        return found.lse

    expected = lse()
    with warnings.catch_warnings(), compiled.compiling():
        warnings.simplefilter("error")
        got = lse()
    assert expected.isfinite().float().mean() > 0.7
    torch.testing.assert_close(got, expected, rtol=3e-7, atol=0, equal_nan=True)


@needs_compiler
def test_trains(here: Path) -> None:
    """Forward, backward and the gradients of loads of a masked score, by compiled code."""
    with warnings.catch_warnings(), compiled.compiling():
        warnings.simplefilter("error")
        check(VARIANTS[3], Sizes(), torch.float32)


def _pairs() -> list[Any]:
    return [
        pytest.param(target, variant, dtype, id=f"{target}-{variant}-{dtype}")
        for target in CPU_TARGETS
        for i, variant in enumerate(VARIANTS)
        for j, dtype in enumerate(FLOATS)
        if target.rank == 0 or (i + j) % 4 == target.rank
    ]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("target", "variant", "dtype"), _pairs(), indirect=["target"])
def test_exact(target: Target, here: Path, variant: Variant, dtype: torch.dtype) -> None:
    """The 2x rule against torch's autograd, dense and packed, and the bits on two threads."""
    with warnings.catch_warnings(), compiled.compiling():
        warnings.simplefilter("error")
        check(_used(variant), Sizes(), dtype)
        check(_used(variant), PACKED, dtype)
        check_bits(_used(variant), inputs(_used(variant), Sizes(), dtype), (1, 2))


@needs_compiler
@pytest.mark.slow
@only_cpu
def test_sizes(target: Target, here: Path) -> None:
    """One row, no row, no key, no element in a tensor, tails of pieces, and dropout."""
    with warnings.catch_warnings(), compiled.compiling():
        warnings.simplefilter("error")
        for queries, keys in ((1, 1), (0, 5), (3, 0), (64, 16), (65, 129), (33, 15)):
            check(VARIANTS[0], Sizes(queries=queries, keys=keys), torch.float32)
        check(VARIANTS[0], Sizes(dropout_p=0.3), torch.float32)
        empty = torch.empty(0, 3)
        q = torch.ones(1, 1, 5, 2)
        found = tilewise.attention(
            q,
            q,
            q,
            score=as_score(lambda s, b, h, m, n: s + empty[m, n]),
            backend="cpu",
            return_lse=True,
        )
        assert found.lse is not None
        assert bool(found.lse.isfinite().all())


SLOPE = as_score(lambda s, b, h, m, n: s * 0.5 + (m % 3 - n % 5) * 0.25)


def _attend(**keywords: Any) -> Tensor:
    q = torch.randn(1, 1, 20, 8, generator=torch.Generator().manual_seed(1))
    return tilewise.attention(q, q, q, score=SLOPE, backend="cpu", **keywords)


def _said() -> str:
    q = torch.randn(1, 1, 20, 8)
    return str(tilewise.explain(q, q, q, score=SLOPE, backend="cpu"))


def test_not_asked_for(here: Path) -> None:
    """Nothing is compiled by default, and explain says how it would be."""
    _attend()
    assert "interpreted; TILEWISE_COMPILE=1 has them compiled" in _said()
    assert not (here / "kernels").exists() or HAS_COMPILER


@needs_compiler
def test_by_environment(forgetful: None, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment asks for it; explain says what will be, then what was."""
    expected = _attend()
    monkeypatch.setenv("TILEWISE_COMPILE", "1")
    assert "to be compiled when first run, by " in _said()
    PLANS.clear()
    got = _attend()
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    assert "compiled by " in _said()
    assert stat.S_IMODE((here / "kernels").stat().st_mode) == 0o700
    monkeypatch.delenv("TILEWISE_COMPILE")
    with compiled.compiling():
        pass
    assert_same_bits(_attend(), expected, "back in the interpreter")


def _fake_compiler(folder: Path, text: str) -> str:
    path = folder / "fake-c++"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return str(path)


def _no_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("CXX", "no-such-compiler")
    return "no C++ compiler runs here (asked: no-such-compiler)"


def _failing_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    text = '[ "$1" = --version ] && echo fake 1.0 && exit 0\necho "x.cc:1: broken" >&2\nexit 1'
    monkeypatch.setenv("CXX", _fake_compiler(folder, text))
    return "fake-c++ failed: x.cc:1: broken"


def _wrong_output(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("CXX", _fake_compiler(folder, "echo fake 1.0"))
    return "cannot be loaded"


def _open_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (folder / "kernels").mkdir()
    (folder / "kernels").chmod(0o755)
    monkeypatch.setenv("CXX", _fake_compiler(folder, "echo fake 1.0"))
    return "is not private: it has owner"


@pytest.mark.parametrize("spoil", [_no_compiler, _failing_compiler, _wrong_output, _open_folder])
def test_falls_back(
    forgetful: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Path, pytest.MonkeyPatch], str],
) -> None:
    """The interpreter goes on, a warning says why once, explain always does."""
    expected = _attend()
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    reason = spoil(tmp_path, monkeypatch)
    with compiled.compiling():
        with pytest.warns(SlowPathWarning) as caught:
            got = _attend()
        assert len(caught) == 1
        assert reason in str(caught[0].message)
        assert_same_bits(got, expected, "interpreted")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _attend()
        said = _said()
        assert "interpreted: " in said
        assert reason in said


@needs_compiler
def test_found_again(forgetful: None, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is on disk is not compiled again; a spoiled file is, and is never loaded."""
    with compiled.compiling():
        expected = _attend()
    files = sorted((here / "kernels").glob("*.so"))
    times = {path: path.stat().st_mtime_ns for path in files}
    compiled._memory = compiled._Memory()
    with compiled.compiling():
        assert_same_bits(_attend(), expected, "found on disk")
    assert {path: path.stat().st_mtime_ns for path in files} == times
    for path in files:
        # A new file: what this process has loaded stays as it is.
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content[: len(content) // 2])
        path.chmod(0o700)
    compiled._memory = compiled._Memory()
    with compiled.compiling():
        assert_same_bits(_attend(), expected, "compiled anew")
    assert any(path.stat().st_mtime_ns != times[path] for path in files)


_PROCESS = """
import torch, tilewise
from tests.kernels.cpu.dense import as_score
score = as_score(lambda s, b, h, m, n: s * 0.125 + (m - n))
q = torch.randn(1, 1, 20, 8, generator=torch.Generator().manual_seed(1))
out = tilewise.attention(q, q, q, score=score, backend="cpu")
print(tilewise.explain(q, q, q, score=score, backend="cpu"))
print(float(out.double().sum()))
"""


@needs_compiler
@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    """Both compile at once, both run, one file is left."""
    environment = os.environ | {"TILEWISE_CACHE": str(tmp_path), "TILEWISE_COMPILE": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", _PROCESS],
            env=environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    said = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert said[0] == said[1]
    assert "compiled by" in said[0]
    assert len(list((tmp_path / "kernels").iterdir())) == 1


def test_source_depends_on_the_program_alone() -> None:
    """The same program gives the same source: its digest is its name."""
    values = (
        ("m", 1, 0, 1, (), 0, -1, 0, 0.0),
        ("constant", 1, 0, 0, (), 0, -1, -(2**63), 0.0),
        ("n", 1, 0, 2, (), 0, -1, 0, 0.0),
        ("mul", 1, 1, 2, (1, 2), 1, -1, 0, 0.0),
        ("lt", 0, 1, 3, (0, 3), 0, -1, 0, 0.0),
    )
    program = program_of(("avx2", 32, 64, False, "mask", values, (4,), ()))
    assert emit(program, "") == emit(program, "")
    assert "(-9223372036854775807LL - 1)" in emit(program, "")


def test_notes() -> None:
    """A call without expressions has nothing to say of them."""
    q = torch.randn(1, 1, 4, 8)
    assert tilewise.explain(q, q, q, mask=masks.causal(), backend="cpu").notes == ()
    noted = tilewise.explain(q, q, q, mask=as_mask(lambda b, h, m, n: m >= n), backend="cpu").notes
    assert [name for name, _ in noted] == ["functions"]
