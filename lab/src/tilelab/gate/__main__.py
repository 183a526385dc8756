"""``python -m tilelab.gate``: compile, print the table, keep the JSON, fail or not.

Child processes compile (``compiling``), one per chip and at most so many at once. Triton keeps what
it compiled by the kernel and not by the chip: a process that switched chips would be handed stale
code. A compiler that crashes or hangs takes its process with it; this one sees how far it came, and
goes on in another.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tilelab.common.worker import Child, ChildError
from tilelab.gate.record import (
    FOLDER,
    TARGETS,
    Baseline,
    Case,
    Record,
    Target,
    baseline_path,
    cases_of,
    faults,
    has_baseline,
    load,
    out_of_date,
    store,
    table,
)
from tilewise.errors import TilewiseError
from tilewise.plan.tuned import installed_triton

DEFAULT_CASES = "tilelab.gate.cases"
_CHILD = "tilelab.gate.compiling"  # it has the case ``probe`` too


def main(argv: Sequence[str] | None = None) -> int:
    """Run the gate.

    Returns:
        0 if every kernel is good, 1 if one is not, 2 if the gate could not run.
    """
    options = _options(argv)
    if find_spec("triton") is None:
        print("gate: Triton is not installed", file=sys.stderr)
        return 2
    try:
        return _run(options)
    except TilewiseError as error:
        print(f"gate: {error}", file=sys.stderr)
        return 2


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tilelab.gate",
        description="Compile the Triton kernels for chips that are not here, and judge the code.",
    )
    names = [target.name for target in TARGETS]
    parser.add_argument("--quick", action="store_true", help="the key kernels only")
    parser.add_argument("--targets", help="by name, with commas: " + ",".join(names))
    parser.add_argument("--cases", default="", help="only cases with this in their name")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once")
    parser.add_argument("--json", type=Path, help="write every kernel's numbers to this file")
    parser.add_argument("--store", action="store_true", help="make this run the baseline")
    parser.add_argument("--baselines", type=Path, default=FOLDER, help="the folder of baselines")
    parser.add_argument("--module", default=DEFAULT_CASES, help="where CASES are listed")
    options = parser.parse_args(argv)
    chosen = options.targets.split(",") if options.targets else names
    if unknown := set(chosen) - set(names):
        parser.error(f"--targets: no {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    if options.jobs < 1:
        parser.error("--jobs: at least one")
    options.targets = [target for target in TARGETS if target.name in chosen]
    return options


def _run(options: argparse.Namespace) -> int:
    begun = time.perf_counter()
    cases = cases_of(options.module)
    names = {target.name: _chosen(cases, target, options) for target in options.targets}
    if not any(names.values()):
        raise TilewiseError(f"no case has {options.cases!r} in its name: {', '.join(cases)}")
    version = installed_triton()
    path = baseline_path(version, options.baselines)
    baseline: Baseline = {} if options.store else load(path)
    print(f"Triton {version}, baseline {path.name if baseline else 'none'}", flush=True)
    records: list[Record] = []
    bad: list[str] = []
    fresh = 0
    for target, found in compile_all(options.targets, names, options.module, options.jobs):
        if target.why_not:
            print(f"{target.name}\n  left out: {target.why_not}", flush=True)
            # Its probe must bear that out.
            said = [out_of_date(record, target) for record in found]
            bad += [f"{target.name}: {words}" for words in said if words]
            continue
        before = baseline.get(target.name, {})
        judged = [
            (record, faults(record, cases[record.case], target, before.get(record.key)))
            for record in found
        ]
        print(table(target, judged), flush=True)
        bad += [f"{target.name} {record.key}: {x}" for record, wrong in judged for x in wrong]
        records += found
        fresh += sum(
            record.key not in before for record in found if has_baseline(record, cases[record.case])
        )
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join(json.dumps(record._asdict()) for record in records)
        options.json.write_text(f"[\n{lines}\n]\n")
    if options.store:
        kept = [record for record in records if has_baseline(record, cases[record.case])]
        store(path, kept, whole=not options.cases)
        print(f"baseline written: {path}")
    elif fresh:
        print(f"{fresh} kernels have no baseline; --store makes one")
    for line in bad:
        print(f"FAIL {line}")
    seconds = time.perf_counter() - begun
    print(f"{len(records)} kernels, {len(bad)} bad, {seconds:.0f} s")
    return 1 if bad else 0


def _chosen(cases: dict[str, Case], target: Target, options: argparse.Namespace) -> list[str]:
    return [
        case.name
        for case in cases.values()
        if options.cases in case.name
        and (case.key or not options.quick)
        and (not case.families or target.family.name in case.families)
    ]


Compiled = tuple[Target, list[Record]]  # of a chip: a record per kernel, in the order of the cases


def compile_all(
    targets: Sequence[Target],
    names: dict[str, list[str]],
    module: str,
    jobs: int,
    limit_s: int = 300,
) -> Iterator[Compiled]:
    """Compile cases for chips; each chip's result as soon as it and those before it are there.

    A target with a reason ``why_not`` compiles the probe only. ``names`` has the cases' names by
    the chip's name. After ``limit_s`` one kernel's compilation is given up.

    Raises:
        TilewiseError: a child could not even start on its cases.
    """

    def one(target: Target) -> Compiled:
        if target.why_not:
            return _compile_on(target, ["probe"], _CHILD, limit_s)
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
    with tempfile.TemporaryDirectory() as cache, Child(_CHILD, environment(cache)) as child:
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


if __name__ == "__main__":
    sys.exit(main())
