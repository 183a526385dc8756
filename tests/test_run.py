"""``./run`` on systems where something is missing: clear messages, and a build without a compiler.

Each test has its own small copy of the checkout and a PATH of its own, made of links to the few
programs that it may see. The quick ones stop before anything is installed; the slow ones build.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import cmake
import nanobind
import ninja
import pytest

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("run", "pyproject.toml", "constraints.txt", "CMakeLists.txt", "LICENSE", "README.md")
# What every POSIX system has; no compiler, no linker, no Python.
TOOLS = """
    awk bash cat chmod cksum cp dirname env find flock grep head ls mkdir mktemp mv rm sed sh sort
    tail tee touch tr uname xargs
"""

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what ``./run`` works with, the package and the core's sources included."""
    folder = tmp_path / "a checkout"  # the space is on purpose
    folder.mkdir()
    for name in COPIED:
        shutil.copy(ROOT / name, folder / name)
    ignore = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "src", folder / "src", ignore=ignore)
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    shutil.copytree(ROOT / "lab", folder / "lab", ignore=ignore)
    return folder


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder of links, to be the whole PATH: the usual tools and nothing that compiles."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in TOOLS.split():
        found = shutil.which(name)
        if found:
            (folder / name).symlink_to(found)
    return folder


@pytest.fixture
def run(checkout: Path, tools: Path) -> Run:
    """Call ``./run`` in the copy with that PATH: run(*arguments, **environment)."""
    kept = {key: value for key, value in os.environ.items() if key.startswith(("PIP_", "HOME"))}

    def call(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        process = subprocess.Popen(
            [checkout / "run", *arguments],
            env=kept | {"PATH": str(tools)} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            stdout, stderr = process.communicate(timeout=1800)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # a build has children of its own
            process.communicate()
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    return call


def program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def real_python(tools: Path) -> None:
    """Let the Python that runs the tests be ``python3``; not the link in its venv, which is one."""
    (tools / "python3").symlink_to(Path(sys.base_prefix, "bin", "python3"))


def test_help_names_every_command(run: Run) -> None:
    done = run("help")
    assert done.returncode == 0
    for command in ("study", "demo", "test", "fuzz", "bench", "tilewise", "setup", "docs"):
        assert f"./run {command}" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [((), "a command is missing"), (("teleport",), "unknown command 'teleport'")],
)
def test_no_or_an_unknown_command(
    run: Run, checkout: Path, arguments: tuple[str, ...], complaint: str
) -> None:
    done = run(*arguments)
    assert done.returncode == 1
    assert complaint in done.stderr
    assert "./run study" in done.stderr
    assert not (checkout / ".venv").exists()


OLD = '[ "$1" = --version ] && echo "Python 3.9.2" && exit 0; exit 1'
WITHOUT_VENV = 'case "$2" in *version_info*) exit 0;; esac; exit 1'
# Programs, and what is said where these are all there is.
PYTHONS: dict[str, tuple[dict[str, str], list[str]]] = {
    "none": ({}, ["Python 3.11 or newer is needed; found: none", "TILEWISE_PYTHON="]),
    "old": ({"python3": OLD}, ["3.11 or newer is needed; found: python3 (Python 3.9.2)"]),
    "newer under another name": (
        {"python3": OLD, "python3.12": WITHOUT_VENV},
        ["python3.12 cannot make virtual environments"],
    ),
    "no module venv": (
        {"python3": WITHOUT_VENV},
        ["no module venv or ensurepip", "python3-venv"],
    ),
}


@pytest.mark.parametrize("name", PYTHONS)
def test_a_python_that_does_not_serve(name: str, run: Run, tools: Path) -> None:
    programs, words = PYTHONS[name]
    for each, script in programs.items():
        program(tools, each, script)
    done = run("test")
    assert done.returncode == 1
    for said in words:
        assert said in done.stderr


def test_pip_without_a_compiler_says_what_to_do(
    checkout: Path, tools: Path, tmp_path: Path
) -> None:
    """``pip install .`` runs CMake, which looks for the compiler."""
    program = Path(cmake.CMAKE_BIN_DIR, "cmake")
    make = f"-DCMAKE_MAKE_PROGRAM={Path(ninja.BIN_DIR, 'ninja')}"
    done = subprocess.run(
        [program, "-G", "Ninja", make, "-S", checkout, "-B", tmp_path / "build"],
        env={"PATH": str(tools)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "no C++20 compiler was found" in done.stderr
    assert "./run setup" in done.stderr
    assert "wheel.cmake=false" in done.stderr


def test_the_build_finds_its_folders_where_a_path_has_a_space(
    checkout: Path,
) -> None:
    """Each folder of quoted includes reaches the compiler whole. (The slow tests build there.)"""
    place = checkout / "build/plan"
    settings = {
        "CMAKE_MAKE_PROGRAM": Path(ninja.BIN_DIR, "ninja"),
        "CMAKE_EXPORT_COMPILE_COMMANDS": "ON",
        "Python_EXECUTABLE": sys.executable,
        "nanobind_DIR": nanobind.cmake_dir(),
    }
    options = [f"-D{name}={value}" for name, value in settings.items()]
    program = Path(cmake.CMAKE_BIN_DIR, "cmake")
    subprocess.run(
        [program, "-G", "Ninja", *options, "-S", checkout, "-B", place],
        capture_output=True,
        check=True,
    )
    folders = set()
    for each in json.loads((place / "compile_commands.json").read_text()):
        words = shlex.split(each["command"])
        folders |= {words[i + 1] for i, word in enumerate(words) if word == "-iquote"}
    assert folders == {str(checkout / "csrc"), str(place / "code")}


@pytest.mark.slow
def test_a_package_that_comes_or_goes_means_another_installation(tmp_path: Path) -> None:
    """An editable install would look for modules in packages that are gone."""
    state = re.search(r"^state\(\) .*?^}$", (ROOT / "run").read_text(), re.MULTILINE | re.DOTALL)
    assert state is not None
    script = f"compiler_candidates() {{ :; }}; root={tmp_path}; {state[0]}; state"
    package = tmp_path / "lab" / "src" / "tilelab" / "bench"
    package.mkdir(parents=True)
    (tmp_path / "src").mkdir()

    def found() -> str:
        text = subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True)
        assert text.stdout.count("\n") == 1
        return text.stdout

    before = found()
    (package / "suites.py").touch()
    assert found() == before  # Python sources are live
    (package / "__init__.py").touch()
    assert found() != before


def test_no_network(run: Run, tools: Path, checkout: Path) -> None:
    real_python(tools)
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    done = run("test", **offline)
    assert done.returncode == 1
    assert "If there is no network here" in done.stderr
    assert "Compute Platform CPU" in done.stderr or sys.platform != "linux"
    assert not (checkout / ".venv/tilewise-stamp").exists()


@pytest.mark.slow
def test_without_a_compiler_zig_builds_the_core(run: Run, tools: Path, checkout: Path) -> None:
    real_python(tools)
    done = run("tilewise", "doctor")
    assert "ziglang" in done.stderr
    assert "WARNING: no compiled core" not in done.stderr
    assert "instruction set" in done.stdout
    again = run("tilewise", "doctor")
    assert again.stderr == ""  # nothing to install: it starts at once
    assert again.stdout == done.stdout
    with (checkout / "csrc/isa/dispatch.cc").open("a") as source:
        source.write("\n// changed\n")
    assert "building" in run("tilewise", "doctor").stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="wheels for distribution are made on Linux")
def test_the_wheel_for_distribution_asks_for_glibc_2_28(
    run: Run, tools: Path, tmp_path: Path
) -> None:
    """auditwheel names a wheel so only when the core calls no later function of the C library."""
    real_python(tools)
    done = run("wheel", str(tmp_path / "dist"))
    assert done.returncode == 0, done.stderr
    lab, wheel = sorted(each.name for each in (tmp_path / "dist").iterdir())
    assert lab.startswith("tilelab-")
    assert "-manylinux_2_28_" in wheel
    machine = "aarch64" if platform.machine() == "x86_64" else "x86_64"
    done = run("wheel", str(tmp_path / "other"), machine)
    if sys.version_info < (3, 12):
        assert done.returncode == 1
        assert "by Python 3.12 or newer" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert len(list((tmp_path / "other").glob(f"*-abi3-manylinux_2_*_{machine}.whl"))) == 1


@pytest.mark.slow
def test_without_compiler_and_zig_the_reference_runs_loudly(
    run: Run, tools: Path, checkout: Path
) -> None:
    real_python(tools)
    constraints = checkout / "constraints.txt"
    constraints.write_text(constraints.read_text().replace("ziglang==0", "ziglang==9999"))
    done = run("tilewise", "doctor")
    assert "WARNING: no compiled core: there is no C++20 compiler" in done.stderr
    assert "! compiled core" in done.stdout
    assert done.returncode == 1
    # It is said every time, not only the first.
    assert "WARNING: no compiled core" in run("tilewise", "--help").stderr
    required = run("setup", TILEWISE_REQUIRE_CORE="1")
    assert required.returncode == 1
    assert "there is no C++20 compiler" in required.stderr
