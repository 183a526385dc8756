"""Expressions as machine code: C++ by the system's compiler, kept on disk by content.

It is asked for with ``TILEWISE_COMPILE=1`` (or ``compiling()``), since a compiler takes seconds at
the first call of an expression that was never seen. Where it cannot be done, the interpreter of
the core goes on, a warning says why once, and ``tilewise.explain`` says it at any time.

Code that a process loads is code that it runs. So nothing is loaded that another user could have
put there:

* The folder is the user's own, with no rights for others.
* No folder above it lets others rename things.
* Each file is checked against a digest, which a truncated file does not have.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from tilewise.errors import SlowPathWarning
from tilewise.folders import cache_folder, private_folder
from tilewise.kernels.cpu import core
from tilewise.kernels.cpu.emit import emit, program_of, why_not

_DIGEST = hashlib.sha256().digest_size


def folder() -> Path:
    """``kernels`` in ``$TILEWISE_CACHE``, else in ``tilewise`` of the user's cache folder."""
    return cache_folder().absolute() / "kernels"


class Cache:
    """The shared objects in a folder, by name.

    Raises:
        NotPrivate: the folder or one above it could be written by another user.
        OSError: it cannot be made.
    """

    def __init__(self, where: Path) -> None:
        self.where = private_folder(where)

    def find(self, name: str) -> Path | None:
        """Return the file of that name; None if it is not there, or not as it was written."""
        path = self.where / name
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        with os.fdopen(file, "rb") as opened:
            found = os.fstat(opened.fileno())
            if found.st_uid != os.geteuid() or found.st_mode & 0o022:
                return None
            content = opened.read()
        body, digest = content[:-_DIGEST], content[-_DIGEST:]
        return path if hashlib.sha256(body).digest() == digest else None

    def draft(self) -> Path:
        """A new file with a name of its own, for ``keep``; the caller removes what is not kept."""
        file, path = tempfile.mkstemp(prefix="draft-", suffix=".so", dir=self.where)
        os.close(file)
        return Path(path)

    def keep(self, draft: Path, name: str) -> Path:
        """Give a finished draft its name, in one step: no process sees half of it."""
        content = draft.read_bytes()
        path = self.where / name
        # What stands behind the sections of a shared object is not looked at by who loads it.
        with draft.open("ab") as opened:
            opened.write(hashlib.sha256(content).digest())
            opened.flush()
            os.fsync(opened.fileno())
        draft.chmod(0o700)
        draft.replace(path)
        return path


_ENVIRONMENT = "TILEWISE_COMPILE"
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = (
    *("-std=c++20", "-O3", "-fPIC", "-shared", "-w", "-x", "c++"),
    # As the core is compiled (CMakeLists.txt), for the same rounding and the same NaN.
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-fvisibility=hidden"),
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
_ISA_FLAGS: dict[str, tuple[str, ...]] = {
    "avx512_amx": _AVX512,
    "avx512_bf16": (*_AVX512, "-mavx512bf16"),
    "avx512": _AVX512,
    "avx2": _AVX2,
    "neon_bf16": (),  # no expression multiplies pairs
    "portable": (),
}
_LONGEST_SECONDS = 120
_ERROR_LINES = 3


class _Failure(Exception):  # noqa: N818  reads as what is wrong
    """Reason why an expression is not compiled."""


class _Compiler(NamedTuple):
    """A command, and what it says of its version."""

    command: tuple[str, ...]
    version: str


class _Memory:
    """Memory of this process: functions by content, and the outcome per expression."""

    def __init__(self) -> None:
        self.asked = 0  # whether compiling was asked for within ``compiling()``
        # By label, what became of each of the programs, in words.
        self.outcomes: dict[str, dict[int, str]] = {}
        self.functions: dict[str, int] = {}  # addresses by the name of their file
        self.warned: set[str] = set()


_memory = _Memory()


def wanted() -> bool:
    """Return whether expressions are to be compiled."""
    return _memory.asked > 0 or os.environ.get(_ENVIRONMENT, "") not in ("", "0")


@contextmanager
def compiling() -> Iterator[None]:
    """Compile the expressions of the calls inside, whatever the environment says.

    Outside of it plans go on with what the environment says. For all threads of the process.
    """
    _memory.asked += 1
    core().set_compile_exprs(True)
    try:
        yield
    finally:
        _memory.asked -= 1
        core().set_compile_exprs(wanted())


def bind(kernel: Any, label: str) -> None:
    """Let a kernel of the core ask for the code of its expressions.

    ``label`` names the programs and the dtype: outcomes are remembered by it.
    """
    kernel.set_compiler(partial(_address, label))
    core().set_compile_exprs(wanted())


def state(label: str) -> str:
    """Return how the expressions of the kernels bound with that label run, in words."""
    if not wanted():
        return f"interpreted; {_ENVIRONMENT}=1 has them compiled"
    outcomes = _memory.outcomes.get(label)
    if outcomes:
        return "; ".join(sorted(set(outcomes.values())))
    try:
        return f"to be compiled when first run, by {_compiler().version}, into {_cache().where}"
    except _Failure as why:
        return f"interpreted: {why}"


def _address(label: str, described: tuple[object, ...]) -> int:
    """Return the address of a program's code, or 0: what the core asks."""
    outcomes = _memory.outcomes.setdefault(label, {})
    try:
        address = _function(described)
        outcomes[hash(described)] = f"compiled by {_compiler().version}"
    except _Failure as why:
        outcomes[hash(described)] = f"interpreted: {why}"
        _warn(str(why))
        return 0
    return address


def _warn(why: str) -> None:
    """Say once per reason that what was asked for is not done."""
    if why in _memory.warned:
        return
    _memory.warned.add(why)
    message = (
        f"tilewise interprets an expression that {_ENVIRONMENT}=1 wants compiled (exact, but "
        f"slower): {why}"
    )
    warnings.warn(message, SlowPathWarning, stacklevel=2)


def _function(described: tuple[object, ...]) -> int:
    program = program_of(described)
    refused = why_not(program)
    if refused is not None:
        raise _Failure(refused)
    compiler, kept = _compiler(), _cache()
    source = emit(program, _headers())
    flags = (*_FLAGS, *_ISA_FLAGS[program.isa])
    what = "\0".join([source, *flags, *compiler.command, compiler.version])
    name = hashlib.sha256(what.encode()).hexdigest() + ".so"
    address = _memory.functions.get(name)
    if address is None:
        address = _memory.functions[name] = _loaded(compiler, kept, name, source, flags)
    return address


def _loaded(
    compiler: _Compiler, kept: Cache, name: str, source: str, flags: tuple[str, ...]
) -> int:
    path = kept.find(name)
    if path is None:
        draft = kept.draft()
        try:
            _compile(compiler, source, flags, str(draft))
            path = kept.keep(draft, name)
        except OSError as error:
            raise _Failure(f"{kept.where} cannot be written ({error})") from None
        finally:
            draft.unlink(missing_ok=True)
    try:
        # The library is never closed: kernels keep addresses in it.
        library = ctypes.CDLL(str(path))
        return ctypes.cast(library.tilewise_expression, ctypes.c_void_p).value or 0
    except (OSError, AttributeError) as error:
        raise _Failure(f"{path} cannot be loaded ({error})") from None


def _compile(compiler: _Compiler, source: str, flags: tuple[str, ...], to: str) -> None:
    command = [*compiler.command, *flags, "-o", to, "-", "-lm"]
    try:
        done = subprocess.run(
            command,
            input=source,
            capture_output=True,
            text=True,
            timeout=_LONGEST_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _Failure(f"the compiler did not run ({error})") from None
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        said = " | ".join(lines[:_ERROR_LINES]) or f"exit status {done.returncode}"
        raise _Failure(f"{compiler.command[0]} failed: {said}")


@cache
def _headers() -> str:
    return str(core().expr_code())


def _compiler() -> _Compiler:
    """Return the compiler that the environment names, or the first that is there."""
    found = _found(os.environ.get("CXX", ""), os.environ.get("PATH", ""))
    if isinstance(found, str):
        raise _Failure(found)
    return found


@cache
def _found(named: str, _path: str) -> _Compiler | str:
    commands = [tuple(shlex.split(named))] if named.strip() else [(name,) for name in _COMPILERS]
    for command in commands:
        if shutil.which(command[0]) is None:
            continue
        try:
            done = subprocess.run(
                [*command, "--version"],
                capture_output=True,
                text=True,
                timeout=_LONGEST_SECONDS,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            continue
        lines = done.stdout.splitlines()
        return _Compiler(command, lines[0] if lines else command[0])
    names = named if named.strip() else ", ".join(_COMPILERS)
    return f"no C++ compiler runs here (asked: {names}); CXX names another"


def _cache() -> Cache:
    where = folder()
    try:
        return Cache(where)
    except OSError as error:
        raise _Failure(f"code cannot be kept: {error}") from None
