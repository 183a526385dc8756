"""The floors: a module imports only from floors below its own, and nothing imports in a circle.

The rooms of the C++ core are floors too: a file includes only its own room and those before it.

Every import counts: absolute, ``from``, relative, inside functions and under TYPE_CHECKING. The
rules run on the real tree and, so that the test itself is tested, on small made-up trees that break
each of them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (ROOT / "src", ROOT / "lab" / "src")

# From the ground up. A unit is a room of one of the two packages: a module or folder directly
# under it, or under ``tilelab.study``; a package's own face is its bare name. Within a unit modules
# import one another freely (but neither they nor their folders in a circle); units of one floor do
# not.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("tilewise.errors", "tilewise.folders", "tilewise.loading", "tilewise.torch_private"),
    ("tilewise.checks",),
    ("tilewise.chips", "tilewise.variants"),
    ("tilewise.float8", "tilewise.problem"),
    ("tilewise.validation",),
    ("tilewise.reference",),
    ("tilewise.plan",),
    ("tilewise._core",),
    ("tilewise.kernels",),
    ("tilewise.engine",),
    ("tilewise.cross_entropy", "tilewise.functional", "tilewise.head_rows", "tilewise.sparse"),
    ("tilewise.preference",),
    ("tilewise.indexer", "tilewise.merging", "tilewise.routes"),
    ("tilewise.serving", "tilewise.distributed"),
    ("tilewise.nn",),
    ("tilewise.compat",),
    ("tilewise.integrations",),
    ("tilewise",),
    ("tilewise.inspect",),
    ("tilewise.commands",),
    ("tilewise.doctor",),
    ("tilewise.cli",),
    ("tilewise.__main__",),
    ("tilelab",),
    ("tilelab.common", "tilelab.huggingface", "tilelab.stats"),
    ("tilelab.cases",),
    ("tilelab.models", "tilelab.counted", "tilelab.gate"),
    ("tilelab.peers",),
    ("tilelab.bench", "tilelab.gpu_check", "tilelab.explain"),
    ("tilelab.tune",),
    ("tilelab.study.ask",),
    ("tilelab.study.need", "tilelab.study.data", "tilelab.study.records"),
    ("tilelab.study.choices",),
    ("tilelab.study.tasks",),
    ("tilelab.study.train",),
    ("tilelab.study.verdict",),
    ("tilelab.study.plan",),
    ("tilelab.study.recipes",),
    ("tilelab.study.track",),
    ("tilelab.study.report",),
    ("tilelab.study.conduct",),
    ("tilelab.study.browse",),
    ("tilelab.study.command",),
    ("tilelab.study",),
    ("tilewise.lab",),  # the lab's old name
)
FLOOR = {unit: number for number, units in enumerate(FLOORS) for unit in units}

# (importer, imported): prefixes of names that stay apart although the floors would let them.
APART = (
    ("tilewise.kernels.cpu", "tilewise.kernels.gpu"),
    ("tilewise.kernels.gpu", "tilewise.kernels.cpu"),
)
# The compiled core is known to its backend alone.
CORE_USERS = ("tilewise.kernels.cpu",)
# The engine knows backends by one list of them; everything else there goes through their interface.
BACKENDS = ("tilewise.kernels.cpu", "tilewise.kernels.gpu", "tilewise.kernels.tiled")
BACKEND_LIST = "tilewise.engine.dispatch"

# What tilelab may import of tilewise (docs/design.md); ".*" stands for what is in a package.
PUBLIC = (
    "tilewise",
    "tilewise.chips",
    "tilewise.commands",
    "tilewise.compat.*",
    "tilewise.distributed",
    "tilewise.errors",
    "tilewise.folders",
    "tilewise.inspect.*",
    "tilewise.nn",
    "tilewise.plan.traffic.*",
    "tilewise.plan.tuned",
    "tilewise.problem",
    "tilewise.serving",
    "tilewise.variants.derive",
    "tilewise.variants.expr",
    "tilewise.variants.float8",
    "tilewise.variants.program",
    "tilewise.variants.values",
)
Graph = dict[str, set[str]]


def module_name(path: Path, source: Path) -> str:
    """src/tilewise/plan/tuned.py -> "tilewise.plan.tuned"; an __init__ -> its package."""
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(
    tree: ast.AST, module: str, is_package: bool
) -> Iterator[tuple[str, str | None]]:
    """(module, name): what each import statement names."""
    here = module.split(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, None
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                up = node.level - (1 if is_package else 0)
                base = here[: len(here) - up]
                source = ".".join([*base, *([source] if source else [])])
            for alias in node.names:
                yield source, alias.name


def strings(tree: ast.AST) -> Iterator[str]:
    """Every string of a module: it may name another that is imported by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def import_graph(*sources: Path) -> Graph:
    """Which module imports which, by full name; the compiled ``_core`` counts."""
    paths = {module_name(path, source): path for source in sources for path in source.rglob("*.py")}
    known = {*paths, "tilewise._core"}
    graph: Graph = {}
    for module, path in paths.items():
        found = graph.setdefault(module, set())
        tree = ast.parse(path.read_text(), str(path))
        for source, name in imported_names(tree, module, path.name == "__init__.py"):
            submodule = f"{source}.{name}"
            if name and submodule in known:
                found.add(submodule)
            elif source.partition(".")[0] in ("tilewise", "tilelab"):
                found.add(source)
        # A string that names the module's own package finds files in it.
        found |= {each for each in strings(tree) if "." in each and each in known} - {
            each for each in known if within(module, each)
        }
        found.discard(module)
    return graph


def unit_of(module: str) -> str:
    """The room of the table above that a module is in."""
    parts = module.split(".")
    return ".".join(parts[: 3 if parts[:2] == ["tilelab", "study"] else 2])


def is_backend(module: str) -> bool:
    """Whether a module is one of a backend's."""
    return any(within(module, backend) for backend in BACKENDS)


def within(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def complaints(graph: Graph) -> list[str]:
    """Every broken rule, in words; empty when the house stands."""
    found = []
    for module, imports in sorted(graph.items()):
        unit = unit_of(module)
        if unit not in FLOOR:
            found.append(f"{module} has no floor: give it one in tests/test_floors.py")
            continue
        for target in sorted(imports):
            other = unit_of(target)
            if other not in FLOOR:
                found.append(f"{module} imports {target}, which has no floor")
            elif other != unit and FLOOR[other] >= FLOOR[unit]:
                found.append(
                    f"{module} (floor {FLOOR[unit]}) imports {target} (floor {FLOOR[other]})"
                )
            elif other == "tilewise._core" and not any(within(module, u) for u in CORE_USERS):
                found.append(f"{module} imports _core, which only {', '.join(CORE_USERS)} may")
            elif unit == "tilewise.engine" and module != BACKEND_LIST and is_backend(target):
                found.append(f"{module} imports {target}, which only {BACKEND_LIST} may")
            elif any(within(module, a) and within(target, b) for a, b in APART):
                found.append(f"{module} imports {target}: these two stay apart")
    found += [f"a circle: {' -> '.join(circle)}" for circle in circles(graph)]
    return found + [
        f"a circle of rooms: {' -> '.join(circle)}"
        for rooms in room_graphs(graph)
        for circle in circles(rooms)
    ]


def room_graphs(graph: Graph) -> Iterator[Graph]:
    """For every folder: which of the folders directly in it import which others of them."""
    folders = {
        module.rsplit(".", up)[0] for module in graph for up in range(1, module.count(".") + 1)
    }
    for folder in sorted(folders):
        rooms: Graph = {}
        for module, imports in graph.items():
            here = room_in(folder, module, folders)
            for target in imports:
                there = room_in(folder, target, folders)
                if here and there and here != there:
                    rooms.setdefault(here, set()).add(there)
        yield rooms


def room_in(folder: str, module: str, folders: set[str]) -> str | None:
    """The folder directly in ``folder`` that holds a module; None where none does."""
    if not module.startswith(folder + "."):
        return None
    room = f"{folder}.{module.removeprefix(folder + '.').partition('.')[0]}"
    return room if room in folders else None


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


@pytest.fixture(scope="module")
def house() -> Graph:
    """The imports of the two packages."""
    return import_graph(*SOURCES)


def test_the_house_stands(house: Graph) -> None:
    assert len(house) > 10, "the test looks at the wrong folder"
    assert complaints(house) == []


def is_public(module: str) -> bool:
    """Whether tilelab may import a module of tilewise."""
    return module in PUBLIC or any(
        within(module, name[:-2]) for name in PUBLIC if name.endswith(".*")
    )


def internals_used(graph: Graph) -> set[tuple[str, str]]:
    """(importer, module): the modules of tilewise that are not public and that tilelab imports."""
    return {
        (module, target)
        for module, imports in graph.items()
        if within(module, "tilelab")
        for target in imports
        if within(target, "tilewise") and not is_public(target)
    }


def test_tilelab_uses_what_is_public(house: Graph) -> None:
    for importer, target in sorted(internals_used(house)):
        pytest.fail(f"{importer} imports {target}, which is not public: see docs/design.md")
    assert {name.removesuffix(".*") for name in PUBLIC} <= set(house)


@pytest.mark.parametrize(
    "text",
    [
        "from tilewise.kernels.base import Backend\n",
        "from tilewise.kernels import base\n",
        "def f():\n    import tilewise.kernels.base\n",
        "if TYPE_CHECKING:\n    from tilewise.kernels.base import Backend\n",
        'NAME = "tilewise.kernels.base"\n',
    ],
)
def test_an_internal_that_tilelab_imports_is_found(tmp_path: Path, text: str) -> None:
    assert not internals_used(build(tmp_path / "sound", SOUND))
    graph = build(tmp_path / "broken", SOUND | {"tilelab/common/files.py": text})
    assert internals_used(graph) == {("tilelab.common.files", "tilewise.kernels.base")}


def build(folder: Path, files: dict[str, str]) -> Graph:
    for name, text in files.items():
        path = folder / ("tilewise" if not name.startswith("tilelab/") else "") / name
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
    "kernels/gpu/forward/attend.py": "from tilewise.kernels.gpu.backward import shared\n",
    "kernels/gpu/backward/shared.py": "",
    "kernels/gpu/backward/passes.py": "",
    "functional.py": "def f():\n    from tilewise.kernels.cpu import backend\n",
    "lab/__init__.py": "",
    "tilelab/common/files.py": "import tilewise\nfrom tilewise import masks\n",
    "tilelab/study/ask/config.py": "from tilelab.common import files\n",
}


def test_a_sound_tree_passes(tmp_path: Path) -> None:
    assert complaints(build(tmp_path, SOUND)) == []


@pytest.mark.parametrize(
    ("file", "text", "imported"),
    [
        ("errors.py", "import tilewise.problem\n", "tilewise.problem"),
        ("errors.py", "from tilewise.problem import P\n", "tilewise.problem"),
        ("errors.py", "from tilewise import problem\n", "tilewise.problem"),
        ("errors.py", "from . import problem\n", "tilewise.problem"),
        ("errors.py", "from .problem import P\n", "tilewise.problem"),
        ("errors.py", "import tilewise\n", "tilewise"),
        ("errors.py", "from tilewise import attention\n", "tilewise"),
        ("errors.py", "def f():\n    from .problem import P\n", "tilewise.problem"),
        ("problem.py", "if TYPE_CHECKING:\n    import tilewise.nn\n", "tilewise.nn"),
        ("variants/values.py", "from ..problem import P\n", "tilewise.problem"),
        ("variants/__init__.py", "from ..problem import P\n", "tilewise.problem"),
        ("variants/__init__.py", "from .. import problem\n", "tilewise.problem"),
        ("chips.py", "from tilewise.variants.values import M\n", "tilewise.variants.values"),
        ("functional.py", 'LAB = "tilelab.common.files"\n', "tilelab.common.files"),
        (
            "tilelab/common/files.py",
            "from tilelab.study.ask import config\n",
            "tilelab.study.ask.config",
        ),
    ],
)
def test_an_upward_import_is_found(tmp_path: Path, file: str, text: str, imported: str) -> None:
    importer = module_name(Path(file), Path())
    importer = importer if within(importer, "tilelab") else f"tilewise.{importer}"
    complaint = f"{importer} (floor {FLOOR[unit_of(importer)]}) imports {imported} (floor "
    found = complaints(build(tmp_path, SOUND | {file: text}))
    assert any(line.startswith(complaint) for line in found), found


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        (
            "variants/values.py",
            "from .masks import causal\n",
            "a circle: tilewise.variants.masks -> tilewise.variants.values",
        ),
        (
            "kernels/gpu/backend.py",
            "from tilewise.kernels.cpu import backend\n",
            "these two stay apart",
        ),
        ("kernels/cpu/tape.py", "from ..gpu.emit import emit\n", "these two stay apart"),
        (
            "engine/call.py",
            "from tilewise.kernels.cpu import backend\n",
            "imports tilewise.kernels.cpu.backend, which only tilewise.engine.dispatch may",
        ),
        ("functional.py", "from tilewise import _core\n", "tilewise.functional imports _core"),
        (
            "kernels/gpu/backward/passes.py",
            "from tilewise.kernels.gpu.forward import attend\n",
            "a circle of rooms: tilewise.kernels.gpu.backward -> tilewise.kernels.gpu.forward",
        ),
        ("attic.py", "", "tilewise.attic has no floor"),
        (
            "nn.py",
            "from tilewise.attic import old\n",
            "tilewise.nn imports tilewise.attic, which has no floor",
        ),
    ],
)
def test_a_broken_tree_fails(tmp_path: Path, file: str, text: str, complaint: str) -> None:
    found = complaints(build(tmp_path, SOUND | {file: text}))
    assert any(complaint in line for line in found), found


def shadowed(source: Path) -> list[str]:
    """Names that a package defines and that its modules have: the import of a module takes them."""
    found = []
    for path in sorted(source.rglob("__init__.py")):
        defined = {
            node.name
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }
        modules = {each.stem for each in path.parent.glob("*.py")}
        modules |= {each.parent.name for each in path.parent.glob("*/__init__.py")}
        package = module_name(path, source)
        found += [f"{package}.{name}" for name in sorted(defined & modules)]
    return found


@pytest.mark.parametrize("source", SOURCES, ids=["tilewise", "tilelab"])
def test_no_function_has_the_name_of_a_module_beside_it(source: Path) -> None:
    assert shadowed(source) == []


def test_a_function_with_the_name_of_a_module_is_found(tmp_path: Path) -> None:
    (tmp_path / "room" / "inner").mkdir(parents=True)
    (tmp_path / "room" / "__init__.py").write_text(
        "from room.other import other\ndef one(): ...\nclass inner: ...\ndef two(): ...\n"
    )
    (tmp_path / "room" / "inner" / "__init__.py").write_text("")
    for name in ("one", "other"):
        (tmp_path / "room" / f"{name}.py").write_text("")
    assert shadowed(tmp_path) == ["room.inner", "room.one"]


CORE_ROOMS = (
    *("base", "products", "expressions", "variants", "passes"),
    *("decode", "isa", "bind", "tests"),
)
GENERATED = {"expr_code.h"}


def upward_includes(files: dict[str, str]) -> list[str]:
    """The includes that lead to a later room, or nowhere.

    Args:
        files: text by path below ``csrc``.
    """
    found = []
    for name, text in files.items():
        here = name.split("/")[0]
        for target in re.findall(r'#include "([^"]+)"', text):
            path = f"tests/{target}" if here == "tests" and "/" not in target else target
            if target in GENERATED:
                continue
            if path not in files or CORE_ROOMS.index(path.split("/")[0]) > CORE_ROOMS.index(here):
                found.append(f"{name} includes {target}")
    return found


def _core() -> dict[str, str]:
    folder = ROOT / "csrc"
    files = [path for path in folder.rglob("*") if path.suffix in (".h", ".cc")]
    return {path.relative_to(folder).as_posix(): path.read_text() for path in files}


def test_rooms_include_only_earlier_rooms() -> None:
    core = _core()
    assert len(core) > 60
    assert {name.split("/")[0] for name in core} == set(CORE_ROOMS)
    assert upward_includes(core) == []


def test_an_include_of_a_later_room_is_found() -> None:
    files = {
        "base/a.h": '#include "decode/b.h"',
        "decode/b.h": '#include "base/a.h"\n#include "expr_code.h"',
        "passes/c.h": '#include "base/gone.h"',
    }
    expected = ["base/a.h includes decode/b.h", "passes/c.h includes base/gone.h"]
    assert upward_includes(files) == expected


def test_the_contributing_page_lists_the_rooms_in_order() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert re.findall(r"^\| `(\w+)/` \|", page, re.MULTILINE) == list(CORE_ROOMS)
