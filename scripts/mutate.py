"""Plant single faults in the Python sources and say which of them the tests catch.

    .venv/bin/python -m pip install pytest-cov
    .venv/bin/python scripts/mutate.py --faults 30 --seed 1 [--rooms variants engine]

A fault flips a comparison, moves a whole number by one, swaps an operator, negates a condition or
drops a returned value. A room of ROOMS gives the places, and its tests judge them: first those of
``./run test``, then those that only ``./run test --all`` has. The tests run once without a fault,
under coverage. A fault is judged by the tests that reach its lines, or by all of the room where
none is known: code that runs at import or in a child. What survives is printed as a difference, to
be read: it is a hole in the tests, or code that means the same.

The faults are planted in a copy of a commit (build/mutate), never in the working tree. With
``--tests COMMIT`` other tests judge the same faults: what a change of the tests lost.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import unified_diff
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import coverage

from tilewise import _core

ROOT = Path(__file__).resolve().parent.parent
COPY = ROOT / "build" / "mutate"
FIRST = 30  # tests that judge a fault first: most faults fail most tests
EXACT = "tests/kernels/test_catalogue.py tests/kernels/test_exact.py"
# A room: where faults are planted, and what judges them.
ROOMS: dict[str, tuple[str, str]] = {
    "records": (
        "lab/src/tilelab/study/records",
        "tests/lab/study/test_records.py tests/lab/study/test_store.py",
    ),
    "verdict": ("lab/src/tilelab/study/verdict", "tests/lab/study/verdict tests/lab/study/report"),
    "variants": ("src/tilewise/variants", "tests/variants tests/test_variants.py tests/engine"),
    "engine": ("src/tilewise/engine", "tests/engine tests/test_errors.py tests/test_paged.py"),
    "kernels": ("src/tilewise/kernels/cpu", f"tests/kernels/cpu {EXACT}"),
    "gpu": ("src/tilewise/kernels/gpu", "tests/kernels/gpu"),
}
TIERS = {"./run test": "not slow and not thorough", "--all": "not slow and thorough"}
PAIRS: tuple[tuple[Any, Any], ...] = (
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn),
    (ast.Add, ast.Sub),
    (ast.Mult, ast.FloorDiv),
    (ast.Mod, ast.Div),
    (ast.And, ast.Or),
    (ast.BitAnd, ast.BitOr),
    (ast.LShift, ast.RShift),
)
SWAPPED: dict[Any, Any] = dict(PAIRS) | {other: one for one, other in PAIRS}


class Fault(NamedTuple):
    """A span of a file, from line and column to line and column, and what stands there instead."""

    room: str
    path: str
    span: tuple[int, int, int, int]
    kind: str
    text: str

    def planted(self, source: str) -> str:
        """Return the source with the fault; columns count bytes, as those of ``ast`` do."""
        lines = source.encode().splitlines(keepends=True)
        first, start, last, end = self.span
        kept = b"".join(lines[: first - 1]) + lines[first - 1][:start]
        rest = lines[last - 1][end:] + b"".join(lines[last:])
        return (kept + self.text.encode() + rest).decode()


def faults(room: str, path: str, source: str) -> Iterator[Fault]:
    """Yield every fault of one file."""
    for role, node in _code(ast.parse(source)):
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        span = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
        for kind, changed in _changes(role, node):
            yield Fault(room, path, span, kind, f"({ast.unparse(changed)})")


def _code(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Walk over what runs, with its role: no annotations, no f-strings (no exact positions)."""
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if name in ("annotation", "returns") or isinstance(child, ast.JoinedStr):
                continue
            if isinstance(child, ast.expr):
                yield "return" if isinstance(node, ast.Return) else name, child
            if isinstance(child, ast.AST):
                yield from _code(child)


def _changes(role: str, node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yield the kinds of fault that an expression can have, each with what stands in its place."""
    if role == "test":
        yield "condition", ast.UnaryOp(ast.Not(), node)
    if role == "return" and ast.unparse(node) != "None":
        yield "return", ast.Constant(None)
    match node:
        case ast.Compare(ops=[only]) if type(only) in SWAPPED:
            yield "comparison", ast.Compare(node.left, [SWAPPED[type(only)]()], node.comparators)
        case ast.BinOp(op=only) if type(only) in SWAPPED:
            yield "operator", ast.BinOp(node.left, SWAPPED[type(only)](), node.right)
        case ast.BoolOp(op=only):
            yield "operator", ast.BoolOp(SWAPPED[type(only)](), node.values)
        case ast.Constant(value=bool(value)):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield "constant", ast.Constant(value + 1)


def draw(rooms: Sequence[str], count: int, seed: int) -> list[Fault]:
    """Draw faults, as many from each room, at places that are as likely as each other."""
    found = []
    for index, room in enumerate(rooms):
        share = count // len(rooms) + (index < count % len(rooms))
        files = sorted((COPY / ROOMS[room][0]).rglob("*.py"))
        texts = {str(file.relative_to(COPY)): file.read_text() for file in files}
        every = [fault for path, text in texts.items() for fault in faults(room, path, text)]
        found += random.Random(f"{seed} {room}").sample(every, min(share, len(every)))
    return found


def prepare(commit: str, tests: str) -> Path:
    """Lay a commit into COPY, with the core that is built; return a Python that uses it."""
    shutil.rmtree(COPY, ignore_errors=True)
    COPY.mkdir(parents=True)
    _lay(commit)
    if tests:
        shutil.rmtree(COPY / "tests")
        _lay(tests, "tests")
    shutil.copy(str(_core.__file__), COPY / "src" / "tilewise")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", COPY / ".venv"], check=True)
    python = COPY / ".venv" / "bin" / "python"
    # A folder that a .pth names has its packages found but its own .pth files, the editable
    # installs of the working tree, not read.
    name = Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    paths = (COPY / "src", COPY / "lab" / "src", sysconfig.get_path("purelib"))
    (COPY / ".venv" / name / "borrowed.pth").write_text("\n".join(map(str, paths)))
    return python


def _lay(commit: str, *folders: str) -> None:
    command = ["git", "archive", commit, *folders]
    archive = subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    subprocess.run(["tar", "-x"], cwd=COPY, input=archive.stdout, check=True)


Reached = dict[tuple[str, int], list[str]]  # file and line: the tests that run it


class Judge:
    """The tests of one room: which of them run which line, and what they say of a fault.

    Args:
        python: of the copy.
        room: one of ROOMS.
        timeout: seconds for one run of pytest.
    """

    def __init__(self, python: Path, room: str, timeout: float) -> None:
        self.python, self.room, self.timeout = python, room, timeout
        self.reached = {tier: self._reached(marks) for tier, marks in TIERS.items()}

    def of(self, fault: Fault) -> str:
        """Return the tier that catches a fault, or that none does."""
        lines = range(fault.span[0], fault.span[2] + 1)
        for tier, marks in TIERS.items():
            reached = self.reached[tier]
            tests = {test for line in lines for test in reached.get((fault.path, line), ())}
            if not self._known(fault.path, lines):
                code = self._run(marks, ROOMS[self.room][1].split())
            else:
                code = self._run_some(marks, sorted(tests))
            if code not in (0, 5):  # 5: the tier has no test here
                return tier if code else "too long"
        return "survived"

    def _known(self, path: str, lines: Sequence[int]) -> bool:
        return any(each.get((path, line)) for each in self.reached.values() for line in lines)

    def _run_some(self, marks: str, tests: list[str]) -> int | None:
        """Run some cases of different functions first, then all of them."""
        drawn = random.Random(0).sample(tests, len(tests))
        some = list({test.partition("[")[0]: test for test in drawn}.values())[:FIRST]
        for part in (some, [test for test in tests if test not in some]):
            if part and (code := self._run(marks, part)) not in (0, 5):
                return code
        return 0

    def _reached(self, marks: str) -> Reached:
        """Run a tier without a fault; return the tests that run each line."""
        data = COPY / ".coverage"
        data.unlink(missing_ok=True)
        watched = ["--cov", ROOMS[self.room][0], "--cov-context=test", "--cov-report="]
        code = self._run(marks, [*ROOMS[self.room][1].split(), *watched], timeout=None)
        if code not in (0, 5):
            sys.exit(f"{self.room}: the tests fail without any fault")
        reached: Reached = {}
        if data.exists():
            measured = coverage.CoverageData(str(data))
            measured.read()
            for file in measured.measured_files():
                for line, contexts in measured.contexts_by_lineno(file).items():
                    tests = sorted({each.rpartition("|")[0] for each in contexts} - {""})
                    reached[str(Path(file).relative_to(COPY)), line] = tests
        return reached

    def _run(self, marks: str, arguments: Sequence[str], **options: Any) -> int | None:
        """Run pytest until the first failure; return its status, None where it takes too long."""
        own = {"TRITON_INTERPRET": "1"} if self.room == "gpu" else {}
        data = os.environ.get("TILEWISE_DATA", str(ROOT.parent / "shared" / "data"))
        environment = os.environ | own | {"TILEWISE_DATA": data, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [self.python, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", marks]
        run = partial(subprocess.run, cwd=COPY, env=environment, capture_output=True)
        try:
            return run([*command, *arguments], **{"timeout": self.timeout} | options).returncode
        except subprocess.TimeoutExpired:
            return None


def main() -> int:
    """Plant the faults one by one and print what caught them; 1 if one survived."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rooms", nargs="+", choices=ROOMS, default=list(ROOMS))
    parser.add_argument("--timeout", type=float, default=600, help="seconds for a run of tests")
    parser.add_argument("--commit", default="HEAD", help="whose sources and tests (HEAD)")
    parser.add_argument("--tests", default="", help="a commit whose tests judge, if another")
    options = parser.parse_args()
    python = prepare(options.commit, options.tests)
    drawn = draw(options.rooms, options.faults, options.seed)
    results: Counter[str] = Counter()
    for room, planted in groupby(drawn, lambda fault: fault.room):
        judge = Judge(python, room, options.timeout)
        for fault in planted:
            results[plant(fault, judge)] += 1
    print(", ".join(f"{name}: {count}" for name, count in results.most_common()))
    return int("survived" in results)


def plant(fault: Fault, judge: Judge) -> str:
    """Plant one fault, print what catches it, and take it out again."""
    file = COPY / fault.path
    source = file.read_text()
    changed = fault.planted(source)
    file.write_text(changed)
    result = judge.of(fault)
    file.write_text(source)
    print(f"{result:10} {fault.kind:10} {fault.path}:{fault.span[0]}", flush=True)
    if result == "survived":
        lines = unified_diff(source.splitlines(), changed.splitlines(), n=0, lineterm="")
        print(*lines, sep="\n", flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main())
