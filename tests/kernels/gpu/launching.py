"""Launches kernels for a GPU that is not there; run as a program, without interpreting.

Everything is Triton's own, down to how the arguments are packed; only ``libcuda`` is a stub
(``driver_stub.c``). So what goes wrong between a Launch and the GPU goes wrong here.

``python -m tests.kernels.gpu.launching FOLDER cases NAME...`` launches cases of the gate,
``... problems NAME...`` what the GPU check asks of the public call, ``... replays NAME...`` the
same again by ``kernels/gpu/replay.py``, ``... arguments`` a kernel with every kind of argument. It
prints a line of JSON for each.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

_EIGHT = "float8 full"  # a problem of no row, named to be run
FAMILY, CHIP = os.environ.get("STUB_FAMILY", "sm_90"), "a chip that is not there"
_SOURCE = Path(__file__).with_name("driver_stub.c")


class Stub:
    """The stub of libcuda, in the place of the one that Triton would load.

    Args:
        folder: where to build it.
        include: where ``cuda.h`` is.
    """

    def __init__(self, folder: Path, include: Path) -> None:
        file = folder / "libcuda.so.1"
        flags = ["-shared", "-fPIC", f"-Wl,-soname,{file.name}", f"-I{include}"]
        subprocess.run(["gcc", *flags, str(_SOURCE), "-o", str(file)], check=True)
        os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
        self._library = ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)

    @property
    def launches(self) -> int:
        """How many there were."""
        return ctypes.c_int.in_dll(self._library, "launches").value

    @property
    def grid(self) -> tuple[int, ...]:
        """Programs of the last launch."""
        return tuple((ctypes.c_uint * 3).in_dll(self._library, "grid"))

    @property
    def threads(self) -> int:
        """Threads of a program of the last launch."""
        return ctypes.c_uint.in_dll(self._library, "threads").value

    def remember(self, count: int) -> None:
        """Have the first words of so many arguments kept."""
        ctypes.c_int.in_dll(self._library, "wanted").value = count

    def words(self, count: int) -> list[int]:
        """The words that were kept, of the last launch."""
        return list((ctypes.c_uint64 * 256).in_dll(self._library, "words"))[:count]


def _pretend(stub: Stub) -> None:
    """Make Triton believe that there is a GPU, and tilewise that tensors on the CPU are on it."""
    import torch
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime import driver

    from tilelab.gpu_check.setting import Setting
    from tilewise.kernels.gpu import backend

    changes: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "get_device_capability", lambda device=None: divmod(int(FAMILY[3:]), 10)),
        (torch._C, "_cuda_getCurrentRawStream", lambda device: 0),
        (backend, "_family", lambda device: FAMILY),
        (backend, "_chip", lambda device: CHIP),
        (backend.GpuBackend, "absence", lambda self: None),
        (backend.GpuBackend, "why_not", lambda self, problem: []),
        (Setting, "device", property(lambda self: torch.device("cpu"))),
    ]
    for owner, name, value in changes:
        setattr(owner, name, value)
    driver.set_active(CudaDriver())


def _cases(stub: Stub, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Launch cases of the gate; every one without names."""
    from tilelab.gate.cases import CASES
    from tilewise.kernels.gpu import run

    for case in CASES:
        if names and case.name not in names:
            continue
        for launch in case.launches(FAMILY):
            before = stub.launches
            (kernel,) = run([launch])
            yield {
                "name": f"{case.name} / {launch.kernel.__name__}",
                "launches": stub.launches - before,
                "grid": stub.grid,
                "expected": (*launch.grid, 1, 1)[:3],
                "threads": stub.threads,
                "warps": kernel.metadata.num_warps if all(launch.grid) else launch.warps,
            }


def _accuracy(names: Sequence[str]) -> Iterator[tuple[str, Callable[[], partial[Any]]]]:
    """Name the problems of the accuracy step, all without names; each makes calls of both passes.

    Every call that it makes has tensors of its own.
    """
    import torch

    from tilelab.cases import inputs, table
    from tilelab.gpu_check import accuracy
    from tilelab.gpu_check.setting import Setting, attend, sized

    setting = Setting()
    known = {case.name for case in table.rows("accuracy")}
    for job in accuracy.jobs(setting):
        kind, _, name = job.partition(" ")
        if name not in known or (names and job not in names):
            continue
        case = sized(setting, table.find("accuracy", name)).of(getattr(torch, kind))

        def made(case: Any = case) -> partial[Any]:
            return partial(attend, setting, inputs.build(case), backward=True)

        yield job, made
    if _EIGHT in names:
        yield _EIGHT, _eight_bits


def _eight_bits() -> partial[Any]:
    """A forward call of float8, with scales."""
    import torch

    import tilewise
    from tilewise import float8

    q, k, v = (torch.randn(1, 2, 160, 64) for _ in range(3))
    given = float8.quantised(q, k, v)

    def call(*tensors: Any) -> Any:
        return tilewise.attention(**float8.Quantised(*tensors)._asdict(), backend="gpu")

    return partial(call, *given)


def _problems(stub: Stub, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Both passes of the problems of the accuracy step."""
    for job, made in _accuracy(names):
        before = stub.launches
        made()()
        yield {"name": job, "launches": stub.launches - before}


def _replays(stub: Stub, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The same for other tensors, replayed and by the host code; what the kernels are given."""
    import torch
    from triton.backends.nvidia.driver import CudaLauncher

    from tilewise.kernels import gpu
    from tilewise.kernels.gpu import backend, replay, run
    from tilewise.kernels.gpu.walk.lists import _KEPT

    given: list[Any] = []
    kernels: list[str] = []
    replayed: list[Any] = []
    memory: dict[Any, Any] = {}  # results and gradients, the same for both ways
    held: list[Any] = []  # tensors of a call live on, so that no other takes their addresses
    launch, again, replaying = CudaLauncher.__call__, replay._replay, replay.Replays.run
    empty = torch.empty

    def noting(self: Any, x: int, y: int, z: int, stream: Any, function: Any, *rest: Any) -> None:
        given.append((x, y, z, id(self), rest[4:]))
        launch(self, x, y, z, stream, function, *rest)

    def naming(launches: Sequence[Any]) -> list[Any]:
        kernels.extend(each.kernel.__name__ for each in launches)
        return run(launches)

    def counting(plan: Any, *rest: Any) -> bool:
        replayed.extend(plan.steps)
        return again(plan, *rest)

    def holding(*arguments: Any, **named: Any) -> Any:
        held.append(empty(*arguments, **named))
        return held[-1]

    def kept(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, *rest: memory.setdefault((make, rest[-1]), make(x, *rest))

    def quick(self: Any, place: Any, tensors: Any, launches: Callable[[], Any]) -> None:
        held.append(tensors)
        replaying(self, place, tensors, launches)

    def plain(self: Any, place: Any, tensors: Any, launches: Callable[[], Any]) -> None:
        held.append(tensors)
        run(launches())

    changes: list[tuple[Any, str, Any]] = [
        (CudaLauncher, "__call__", noting),
        (gpu, "run", naming),
        (replay, "_replay", counting),
        (torch, "empty", holding),
        (backend, "empty_result", kept(backend.empty_result)),
        (backend, "_empty_grads", kept(backend._empty_grads)),
    ]
    for owner, name, value in changes:
        setattr(owner, name, value)
    ways: tuple[Any, ...] = (quick, plain)
    for job, made in _accuracy(names):
        kernels.clear()
        made()()
        names = list(kernels)
        before, other = dict(memory), made()  # what came before stays where it is
        memory.clear()
        replayed.clear()
        found = []
        for way in ways:
            replay.Replays.run = way  # type: ignore[method-assign]
            given.clear()
            held.clear()
            other()
            lists = list(_KEPT.values())  # the same for both ways as well
            known = [(x.data_ptr(), x.nbytes) for x in _tensors((memory, other.args, lists))]
            found.append(_addressed(given, known))
        replay.Replays.run = replaying  # type: ignore[method-assign]
        same = found[0] == found[1] and bool(before)
        memory.clear()
        counts = {"launches": len(found[1]), "replayed": len(replayed)}
        yield {"name": job, **counts, "same": same, "kernels": names}


def _tensors(x: Any) -> Iterator[Any]:
    """Every tensor in tuples, dicts and objects."""
    if hasattr(x, "data_ptr"):
        yield x
    elif isinstance(x, tuple | list | dict):
        for each in x.values() if isinstance(x, dict) else x:
            yield from _tensors(each)
    elif hasattr(x, "__dict__") and not callable(x):
        yield from _tensors(vars(x))


def _addressed(launches: list[Any], known: Sequence[tuple[int, int]]) -> list[Any]:
    """Return launches with addresses in the place of tensors.

    Those outside of known memory are of what a call makes for itself: they are numbered.
    """
    numbers: dict[int, str] = {}

    def of(argument: Any) -> Any:
        if isinstance(argument, tuple | list):
            return [of(each) for each in argument]
        if hasattr(argument, "block_shape"):  # a tensor descriptor
            rest = argument.shape, argument.strides, argument.block_shape, argument.padding
            return [of(argument.base), *rest, str(argument.layout)]
        address = argument.data_ptr() if hasattr(argument, "data_ptr") else argument
        if not isinstance(address, int) or address < 2**40:
            return address
        if any(first <= address < first + size for first, size in known):
            return address
        return numbers.setdefault(address, f"memory {len(numbers)}")

    return [(*place, of(arguments)) for *place, arguments in launches]


def _arguments(stub: Stub, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """One launch with every kind of argument, and what arrived of it."""
    import torch

    from tests.kernels.gpu.gate_kernels import many_kinds
    from tilewise.kernels.gpu import Launch, run

    whole = torch.empty(64, dtype=torch.bfloat16)
    given = {
        "tensor": whole,
        "number": 48,
        "one": 1,
        "tuples": ((whole[1:], whole[8:]), 3, 1),
        "floating": 0.5,
        "nothing": None,
        "flag": True,
    }
    stub.remember(7)
    run([Launch(many_kinds, (5, 4), given, {"FUNCTION": (3, None, many_kinds)})])
    yield {
        "grid": stub.grid,
        "threads": stub.threads,
        "words": stub.words(7),
        "address": whole.data_ptr(),
    }


_WAYS: dict[str, Callable[[Stub, Sequence[str]], Iterator[dict[str, Any]]]] = {
    "cases": _cases,
    "problems": _problems,
    "replays": _replays,
    "arguments": _arguments,
}


def main(folder: str, way: str, names: Sequence[str]) -> None:
    """Launch, and say what was launched."""
    from importlib.util import find_spec

    found = find_spec("triton")
    assert found is not None
    assert found.origin is not None
    include = Path(found.origin).parent / "backends" / "nvidia" / "include"
    stub = Stub(Path(folder), include)  # before anything looks for a GPU
    _pretend(stub)
    for said in _WAYS[way](stub, names):
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
