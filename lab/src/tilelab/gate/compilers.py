"""Child processes that compile, one per chip and at most so many at once.

Triton keeps what it compiled by the kernel and not by the chip: a process that switched chips
would be handed stale code. A compiler that crashes or hangs takes its process with it; the parent
sees how far it came, and goes on in another.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tilelab.common.worker import Child, ChildError, serve
from tilelab.gate.record import Record, Target, target_named
from tilewise.errors import TilewiseError

PROBE = "tilelab.gate.compiling"
_MODULE = "tilelab.gate.compilers"


Compiled = tuple[Target, list[Record]]  # of a chip: a record per kernel, in the order of the cases


def compile_all(
    targets: Sequence[Target],
    names: dict[str, list[str]],
    module: str,
    jobs: int,
    limit_s: int = 300,
) -> Iterator[Compiled]:
    """Compile cases for chips; each chip's result as soon as it and those before it are there.

    Args:
        targets: the chips; one with a reason ``why_not`` compiles the probe only.
        names: the cases' names by the chip's name.
        module: where the cases are listed.
        jobs: processes at once.
        limit_s: after which one kernel's compilation is given up.

    Raises:
        TilewiseError: a child could not even start on its cases.
    """

    def one(target: Target) -> Compiled:
        if target.why_not:
            return _compile_on(target, ["probe"], PROBE, limit_s)
        return _compile_on(target, names[target.name], module, limit_s)

    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(one, targets)


def environment(cache: str) -> dict[str, str]:
    """Return a child's environment: our modules, and no Triton settings but its own cache."""
    found = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [*sys.path, os.environ.get("PYTHONPATH")]))
    found["TRITON_CACHE_DIR"] = cache
    return found


def _compile_on(target: Target, names: list[str], module: str, limit_s: int) -> Compiled:
    """Compile all cases on one chip; after a child dies, another one does the cases left."""
    records: list[Record] = []
    with tempfile.TemporaryDirectory() as cache, Child(_MODULE, environment(cache)) as child:
        for name in names:
            try:
                answers = child.ask([target.name, module, limit_s, name])
            except ChildError as error:
                answers = error.answers
                kernels = [answer["kernel"] for answer in answers if "kernel" in answer]
                if not kernels:
                    said = f"the process that compiles for {target.name} failed: {error}"
                    raise TilewiseError(said) from None
                answers.append({"record": _died(target, name, kernels[-1], error, limit_s)})
            found = [answer["record"] for answer in answers if "record" in answer]
            records += [Record(**each) for each in found]
    return target, records


def _died(target: Target, case: str, kernel: str, died: ChildError, limit_s: int) -> dict[str, Any]:
    """Return a record of the launch on which a child ended; the rest of its case goes with it."""
    status = died.status or 0
    if status == -signal.SIGALRM:
        error = f"not compiled in {limit_s} s"
    elif status < 0:
        error = f"the compiler died of {signal.Signals(-status).name}: {died}"
    else:
        error = str(died)
    return Record(target.name, case, kernel, {}, 0, 0, error=error)._asdict()


def _perform(job: tuple[str, str, int, str]) -> Iterator[dict[str, Any]]:
    """Compile a case in the child: the name of each launch before it is compiled, and its record.

    Args:
        job: names of the chip, the module and the case, and seconds for one kernel.
    """
    # Imported here: the parent imports no Triton.
    from tilelab.gate.compiling import compile_launch
    from tilelab.gate.record import cases_of

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
