"""The child process that compiles launches for a chip that need not be there, and its probe.

``python -m tilelab.gate.compiling`` gets its cases from the gate's command. The probe stands for a
chip that is left out, and is a product of two small matrices. Does Triton make matrix instructions
for it at all? This module imports Triton.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import create_function_from_signature

from tilelab.common.worker import serve
from tilelab.gate.machine import buffers, needed_products, of_amdgcn, of_cubin
from tilelab.gate.record import Case, Record, Target, cases_of, target_named
from tilewise.inspect.gpu import Launch


@triton.jit
def product(a, b, out, SIZE: tl.constexpr):
    """The product a b, all of them [SIZE, SIZE] and contiguous."""
    row = tl.arange(0, SIZE)[:, None] * SIZE
    column = tl.arange(0, SIZE)[None, :]
    value = tl.dot(tl.load(a + row + column), tl.load(b + row + column))
    tl.store(out + row + column, value.to(out.dtype.element_ty))


def _launches(family: str) -> list[Launch]:
    half = torch.empty(32, 32, dtype=torch.float16, device="meta")
    return [Launch(product, (1,), {"a": half, "b": half, "out": half}, {"SIZE": 32})]


CASES = (Case("probe", _launches),)


def signature(launch: Launch, target: Target) -> tuple[ASTSource, dict[str, Any]]:
    """Return what Triton would compile for a launch: the source with its types, and the options.

    Triton's own functions look at the arguments. They see dtypes, divisibility by 16, ones that
    become constants, AMD's small tensors, and tuples as in a real launch. Tensors may be on the
    ``meta`` device: their addresses count as aligned.

    Raises:
        TypeError: the arguments are not those of the kernel.
    """
    kernel = launch.kernel
    backend = make_backend(_gpu(target))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    given = {"num_warps": launch.warps, "num_stages": launch.stages}
    bound, special, options = bind(**launch.arguments, **launch.constants, **given)
    parsed, types, constants, attributes = kernel._pack_args(
        backend, given, bound, special, options
    )
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    return source(kernel, types, constants, attributes), parsed.__dict__


def compile_launch(case: str, name: str, launch: Launch, target: Target) -> Record:
    """Compile a launch and count what came out.

    Returns:
        The record; where Triton fails, one with the error.
    """
    record = Record(target.name, case, name, _tile(launch), launch.warps, launch.stages)
    begun = time.perf_counter()
    try:
        source, options = signature(launch, target)
        compiled = triton.compile(source, target=_gpu(target), options=options)
        record = record._replace(seconds=round(time.perf_counter() - begun, 2))
        if "cubin" in compiled.asm:
            tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
            machine = of_cubin(compiled.asm["cubin"], tools)
        else:
            machine = of_amdgcn(compiled.asm["amdgcn"])
    except Exception as error:
        return record._replace(error=_words(error))
    warps, own = compiled.metadata.num_warps, compiled.asm["ttgir"]
    found = machine._asdict()
    issued, needed = found.pop("warp_products"), needed_products(own)
    return record._replace(
        warps=warps,
        shared_bytes=compiled.metadata.shared,
        # Of a kernel in groups of warps, each group has its own instructions.
        issued=round(issued * launch.warps / needed, 3) if issued and needed else 0.0,
        buffers=buffers(own),
        **found,
    )


def _gpu(target: Target) -> GPUTarget:
    return GPUTarget(target.family.maker, target.arch, target.family.warp)


def _tile(launch: Launch) -> dict[str, int]:
    """Return the constants that are a choice and do not follow from the problem."""
    constants = dict(launch.constants)
    if "FORM" in constants:
        constants |= constants["FORM"]._asdict()
    return {
        name: value
        for name, value in constants.items()
        if type(value) is int and name.startswith(("BM", "BN", "BLOCK"))
    }


def _words(error: Exception) -> str:
    """Return the error in one line.

    Triton's messages begin with the place in the kernel, quote it, and end with what is wrong.
    """
    lines = [line.strip(" ^:") for line in str(error).splitlines() if line.strip(" ^")]
    place = f" ({lines[0]})" if len(lines) > 1 and lines[0].startswith("at ") else ""
    return f"{type(error).__name__}: {lines[-1] if lines else ''}{place}"[:300]


def _perform(job: tuple[str, str, int, str]) -> Iterator[dict[str, Any]]:
    """Compile a case in the child: the name of each launch before it is compiled, and its record.

    A job has the names of the chip, the module and the case, and seconds for one kernel.
    """
    target_name, module, limit_s, name = job
    target = target_named(target_name)
    case = cases_of(module)[name]
    yield {"kernel": "-"}
    seen: Counter[str] = Counter()
    for launch in case.launches(target.family.name):
        kernel = launch.kernel.__name__
        seen[kernel] += 1
        if seen[kernel] > 1:
            kernel = f"{kernel} {seen[kernel]}"
        yield {"kernel": kernel}
        signal.alarm(limit_s)  # nobody handles it: it ends the process
        record = compile_launch(name, kernel, launch, target)
        signal.alarm(0)
        yield {"record": record._asdict()}


if __name__ == "__main__":
    serve(_perform)
