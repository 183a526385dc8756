"""Plant single faults in the Python sources and say which of them the tests catch.

    .venv/bin/python scripts/mutate.py --faults 30 --seed 1 [--rooms variants engine]

A fault flips a comparison, moves a whole number by one, swaps an operator, negates a condition or
drops a returned value. A room of ROOMS gives the places, and its tests judge them: first those of
``./run test``, then those that only ``./run test --all`` has. What survives both is printed as a
difference, to be read: it is a hole in the tests, or code that means the same.

The faults are planted in a copy of the last commit (build/mutate), never in the working tree.
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
from pathlib import Path
from typing import Any, NamedTuple

from tilewise import _core

ROOT = Path(__file__).resolve().parent.parent
COPY = ROOT / "build" / "mutate"
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


def prepare() -> Path:
    """Lay the last commit into COPY, with the core that is built; return a Python that uses it."""
    shutil.rmtree(COPY, ignore_errors=True)
    COPY.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True)
    subprocess.run(["tar", "-x"], cwd=COPY, input=archive.stdout, check=True)
    shutil.copy(str(_core.__file__), COPY / "src" / "tilewise")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", COPY / ".venv"], check=True)
    python = COPY / ".venv" / "bin" / "python"
    # A folder that a .pth names has its packages found but its own .pth files, the editable
    # installs of the working tree, not read.
    name = Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    paths = (COPY / "src", COPY / "lab" / "src", sysconfig.get_path("purelib"))
    (COPY / ".venv" / name / "borrowed.pth").write_text("\n".join(map(str, paths)))
    return python


def judge(python: Path, room: str, timeout: float) -> str:
    """Run a room's tests, a tier after another; return what fails first."""
    own = {"TRITON_INTERPRET": "1"} if room == "gpu" else {}
    data = os.environ.get("TILEWISE_DATA", str(ROOT.parent / "shared" / "data"))
    environment = os.environ | own | {"TILEWISE_DATA": data, "PYTHONDONTWRITEBYTECODE": "1"}
    for tier, marks in TIERS.items():
        command = [str(python), "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", marks]
        command += ROOMS[room][1].split()
        run = partial(subprocess.run, cwd=COPY, env=environment, capture_output=True)
        try:
            code = run(command, timeout=timeout).returncode
        except subprocess.TimeoutExpired:
            return "too long"
        if code not in (0, 5):  # 5: the tier has no test here
            return tier
    return "survived"


def main() -> int:
    """Plant the faults one by one and print what caught them; 1 if one survived."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rooms", nargs="+", choices=ROOMS, default=list(ROOMS))
    parser.add_argument("--timeout", type=float, default=600, help="seconds for a tier of a room")
    options = parser.parse_args()
    python = prepare()
    for room in options.rooms:
        if (result := judge(python, room, options.timeout)) != "survived":
            sys.exit(f"{room}: {result} without any fault")
    results: Counter[str] = Counter()
    for fault in draw(options.rooms, options.faults, options.seed):
        file = COPY / fault.path
        source = file.read_text()
        changed = fault.planted(source)
        file.write_text(changed)
        result = judge(python, fault.room, options.timeout)
        results[result] += 1
        print(f"{result:10} {fault.kind:10} {fault.path}:{fault.span[0]}", flush=True)
        if result == "survived":
            lines = unified_diff(source.splitlines(), changed.splitlines(), n=0, lineterm="")
            print(*lines, sep="\n")
        file.write_text(source)
    print(", ".join(f"{name}: {count}" for name, count in results.most_common()))
    return int("survived" in results)


if __name__ == "__main__":
    sys.exit(main())
