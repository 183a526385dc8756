"""Assembles the Hugging Face kernel tilewise-attention: scripts/hf_kernel.py FOLDER [WHEEL].

FOLDER gets ``build.toml``, ``torch-ext/`` and one build per system, which ``kernels`` loads::

    kernels.get_local_kernel(Path(FOLDER))

A build is the modules of tilewise that ``packaging/kernel/torch-ext`` needs, and the compiled core:
out of the wheels given (those of one system share a build), or the one of this environment. Modules
and torch ops are renamed to the kernel's id, so that it loads beside tilewise and beside other
versions of itself. Needs torch and the standard library, as the kernel does.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import platform
import re
import shutil
import sys
import tomllib
import zipfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "tilewise"
KERNEL = ROOT / "packaging" / "kernel"
SYSTEMS = {  # how the tag of a wheel ends: how a build is called
    "manylinux.*_x86_64": "x86_64-linux",
    "manylinux.*_aarch64": "aarch64-linux",
    "linux_x86_64": "x86_64-linux",
    "linux_aarch64": "aarch64-linux",
    "macosx.*_arm64": "aarch64-darwin",
    "win_amd64": "x86_64-windows",
}
Cores = dict[str, bytes]  # file names and contents


def path_of(module: str) -> Path | None:
    """Return the file of a module of tilewise such as ``tilewise.errors``; None if it is none."""
    base = SOURCE.joinpath(*module.split(".")[1:])
    found = [each for each in (base / "__init__.py", base.with_suffix(".py")) if each.exists()]
    return found[0] if module.split(".")[0] == "tilewise" and found else None


def named(tree: ast.AST) -> set[str]:
    """Return the modules of tilewise that some code imports, or names in a string."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module is not None:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return {name for name in names if name.startswith("tilewise.") and path_of(name)}


def needed() -> dict[str, str]:
    """Return the sources that the kernel's functions need, by path in the package, sorted."""
    entry = ast.parse((KERNEL / "torch-ext" / "tilewise_attention" / "__init__.py").read_text())
    waiting = {
        f"tilewise.{node.module}"
        for node in ast.walk(entry)
        if isinstance(node, ast.ImportFrom) and node.level
    }
    found: dict[str, str] = {}
    while waiting:
        module = waiting.pop()
        path = path_of(module)
        key = str(path.relative_to(SOURCE)) if path else ""
        if path is None or key in found or module == "tilewise":
            continue
        found[key] = path.read_text()
        waiting |= named(ast.parse(found[key])) | {module.rpartition(".")[0]}
    return dict(sorted(found.items()))


def renamed(text: str, to: str) -> str:
    """Return a module of tilewise as one of the package ``to``."""
    rooms = "|".join(sorted({each.stem for each in SOURCE.iterdir() if each.stem[0] != "_"}))
    text = re.sub(r"^(\s*)(from|import) tilewise\b", rf"\1\2 {to}", text, flags=re.M)
    text = re.sub(rf"([\"'])tilewise(?=::|\.(?:_core|{rooms})\b)", rf"\1{to}", text)
    return re.sub(r"\btorch\.ops\.tilewise\b", f"torch.ops.{to}", text)


def cores_here() -> dict[str, Cores]:
    """Return the core of this environment, under the name of this system."""
    spec = importlib.util.find_spec("tilewise._core")
    if spec is None or spec.origin is None:
        sys.exit("hf_kernel: tilewise has no compiled core here: call ./run setup, or name wheels")
    machine = {"arm64": "aarch64", "AMD64": "x86_64"}.get(platform.machine(), platform.machine())
    core = Path(spec.origin)
    return {f"{machine}-{platform.system().lower()}": {core.name: core.read_bytes()}}


def cores_in(wheels: list[Path]) -> dict[str, Cores]:
    """Return the cores in some wheels, by system."""
    found: dict[str, Cores] = defaultdict(dict)
    for wheel in wheels:
        tag = wheel.stem.rpartition("-")[2].split(".")[0]
        systems = [name for pattern, name in SYSTEMS.items() if re.fullmatch(pattern, tag)]
        with zipfile.ZipFile(wheel) as archive:
            cores = [name for name in archive.namelist() if name.startswith("tilewise/_core.")]
            if not systems or len(cores) != 1:
                sys.exit(
                    f"hf_kernel: {wheel} is no wheel of tilewise with a core for a known system"
                )
            found[systems[0]][Path(cores[0]).name] = archive.read(cores[0])
    return found


def assemble(folder: Path, cores: dict[str, Cores]) -> list[Path]:
    """Write the kernel into a folder, and return its builds."""
    general = tomllib.loads((KERNEL / "build.toml").read_text())["general"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = (each for each in project["dependencies"] if each.startswith("torch>="))
    oldest = "".join(torch.removeprefix("torch>=").split(".")[:2])
    sources = needed()
    shutil.copytree(KERNEL, folder, dirs_exist_ok=True)
    shutil.copy(ROOT / "LICENSE", folder)
    builds = []
    for system, files in cores.items():
        content = json.dumps(sources).encode() + b"".join(files[name] for name in sorted(files))
        mark = hashlib.sha256(content).hexdigest()[:7]
        name = f"_{general['name'].replace('-', '_')}_cpu_{mark}"
        build = folder / "build" / f"torch-stable-abi{oldest}-cpu-{system}"
        shutil.rmtree(build, ignore_errors=True)
        shutil.copytree(KERNEL / "torch-ext" / "tilewise_attention", build)
        for path, text in sources.items():
            (build / path).parent.mkdir(parents=True, exist_ok=True)
            (build / path).write_text(renamed(text, name))
        for core, binary in files.items():
            (build / core).write_bytes(binary)
        about = {key: general[key] for key in ("name", "version", "license", "python-depends")}
        about |= {"id": name, "backend": {"type": "cpu"}}
        (build / "metadata.json").write_text(json.dumps(about, indent=2) + "\n")
        builds.append(build)
    return builds


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    wheels = [Path(each) for each in sys.argv[2:]]
    for made in assemble(Path(sys.argv[1]), cores_in(wheels) if wheels else cores_here()):
        print(made)
