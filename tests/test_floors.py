"""The floors: a module imports only from floors below its own, and nothing imports in a circle.

Every import counts: absolute, ``from``, relative, inside functions and under TYPE_CHECKING. The
rules run on the real tree and, so that the test itself is tested, on small made-up trees that break
each of them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "tilewise"
ROOT = "tilewise"

# From the ground up. A unit is a module or folder directly under the package; "" is the package's
# own face, ``tilewise/__init__.py``. Within a unit modules import one another freely (but never in
# a circle); units of one floor do not.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors", "folders"),
    ("chips", "variants"),
    ("problem",),
    ("validation",),
    ("reference",),
    ("plan",),
    ("_core",),
    ("kernels",),
    ("engine",),
    ("functional", "sparse"),
    ("merging", "nn"),
    ("serving", "distributed"),
    ("",),
    ("compat", "lab"),
    ("integrations",),
    ("doctor",),
    ("cli",),
)
FLOOR = {unit: number for number, units in enumerate(FLOORS) for unit in units}

# (importer, imported): prefixes of names that stay apart although the floors would let them.
APART = (("kernels.cpu", "kernels.gpu"), ("kernels.gpu", "kernels.cpu"))
# The compiled core is known to its backend, and to the bench, which measures its peak.
CORE_USERS = ("kernels.cpu", "lab.bench")

Graph = dict[str, set[str]]


def module_name(path: Path, package: Path) -> str:
    """kernels/cpu/backend.py -> "kernels.cpu.backend"; the package's own __init__ -> ""."""
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(
    tree: ast.AST, module: str, is_package: bool
) -> Iterator[tuple[str, str | None]]:
    """(module, name): what each import statement names, below the package, without its root."""
    here = module.split(".") if module else []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                head, _, rest = alias.name.partition(".")
                if head == ROOT:
                    yield rest, None
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                up = node.level - (1 if is_package else 0)
                base = here[: len(here) - up]
                source = ".".join([*base, *([source] if source else [])])
            elif source.partition(".")[0] == ROOT:
                source = source.partition(".")[2]
            else:
                continue
            for alias in node.names:
                yield source, alias.name


def import_graph(package: Path) -> Graph:
    """Which module imports which, by name below the package; the compiled ``_core`` counts."""
    paths = {module_name(path, package): path for path in package.rglob("*.py")}
    known = {*paths, "_core"}
    graph: Graph = {}
    for module, path in paths.items():
        found = graph.setdefault(module, set())
        tree = ast.parse(path.read_text(), str(path))
        for source, name in imported_names(tree, module, path.name == "__init__.py"):
            submodule = ".".join(filter(None, (source, name)))
            found.add(submodule if name and submodule in known else source)
        found.discard(module)
    return graph


def within(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def complaints(graph: Graph) -> list[str]:
    """Every broken rule, in words; empty when the house stands."""
    found = []
    for module, imports in sorted(graph.items()):
        unit = module.partition(".")[0]
        if unit not in FLOOR:
            found.append(f"{module} has no floor: give it one in tests/test_floors.py")
            continue
        for target in sorted(imports):
            other = target.partition(".")[0]
            if other not in FLOOR:
                found.append(f"{module} imports {target}, which has no floor")
            elif other != unit and FLOOR[other] >= FLOOR[unit]:
                found.append(
                    f"{module} (floor {FLOOR[unit]}) imports {target or 'the package face'} "
                    f"(floor {FLOOR[other]})"
                )
            elif other == "_core" and not any(within(module, user) for user in CORE_USERS):
                found.append(f"{module} imports _core, which only {', '.join(CORE_USERS)} may")
            elif any(within(module, a) and within(target, b) for a, b in APART):
                found.append(f"{module} imports {target}: these two stay apart")
    return found + [f"a circle: {' -> '.join(circle)}" for circle in circles(graph)]


def circles(graph: Graph) -> list[list[str]]:
    """One path around each circle that a depth-first walk closes."""
    found: list[list[str]] = []
    done: set[str] = set()

    def walk(module: str, path: list[str]) -> None:
        if module in path:
            found.append([*path[path.index(module) :], module])
            return
        if module in done:
            return
        for target in sorted(graph.get(module, ())):
            walk(target, [*path, module])
        done.add(module)

    for module in sorted(graph):
        walk(module, [])
    return found


def test_the_house_stands() -> None:
    graph = import_graph(PACKAGE)
    assert len(graph) > 10, "the test looks at the wrong folder"
    assert complaints(graph) == []


def build(folder: Path, files: dict[str, str]) -> Graph:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return import_graph(folder)


SOUND = {
    "__init__.py": "from tilewise.functional import attention\n",
    "errors.py": "import os\nfrom collections import abc\n",
    "variants/__init__.py": "from . import masks\nfrom .values import Mask\n",
    "variants/values.py": "from ..errors import E\n",
    "variants/masks.py": "from tilewise.variants.values import Mask\nfrom tilewise import errors\n",
    "problem.py": "from tilewise.variants import masks, Mask\n",
    "kernels/base.py": "import tilewise.problem\n",
    "kernels/cpu/backend.py": "from .. import base\nfrom tilewise import _core\n",
    "functional.py": "def f():\n    from tilewise.kernels.cpu import backend\n",
    "lab/tool.py": "import tilewise\nfrom tilewise import masks\n",
}


def test_a_sound_tree_passes(tmp_path: Path) -> None:
    assert complaints(build(tmp_path, SOUND)) == []


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("errors.py", "import tilewise.problem\n", "errors (floor 0) imports problem"),
        ("errors.py", "from tilewise.problem import P\n", "errors (floor 0) imports problem"),
        ("errors.py", "from tilewise import problem\n", "errors (floor 0) imports problem"),
        ("errors.py", "from . import problem\n", "errors (floor 0) imports problem"),
        ("errors.py", "from .problem import P\n", "errors (floor 0) imports problem"),
        ("errors.py", "import tilewise\n", "errors (floor 0) imports the package face"),
        (
            "errors.py",
            "from tilewise import attention\n",
            "errors (floor 0) imports the package face",
        ),
        ("errors.py", "def f():\n    from .problem import P\n", "errors (floor 0) imports problem"),
        (
            "problem.py",
            "if TYPE_CHECKING:\n    import tilewise.nn\n",
            "problem (floor 2) imports nn",
        ),
        (
            "variants/values.py",
            "from ..problem import P\n",
            "variants.values (floor 1) imports problem",
        ),
        ("variants/__init__.py", "from ..problem import P\n", "variants (floor 1) imports problem"),
        ("variants/__init__.py", "from .. import problem\n", "variants (floor 1) imports problem"),
        (
            "chips.py",
            "from tilewise.variants.values import Mask\n",
            "chips (floor 1) imports variants.values",
        ),
        (
            "variants/values.py",
            "from .masks import causal\n",
            "a circle: variants.masks -> variants.values",
        ),
        (
            "kernels/gpu/backend.py",
            "from tilewise.kernels.cpu import backend\n",
            "these two stay apart",
        ),
        ("kernels/cpu/tape.py", "from ..gpu.emit import emit\n", "these two stay apart"),
        ("functional.py", "from tilewise import _core\n", "functional imports _core"),
        ("attic.py", "", "attic has no floor"),
        ("nn.py", "from tilewise.attic import old\n", "nn imports attic, which has no floor"),
    ],
)
def test_a_broken_tree_fails(tmp_path: Path, file: str, text: str, complaint: str) -> None:
    found = complaints(build(tmp_path, SOUND | {file: text}))
    assert any(complaint in line for line in found), found
