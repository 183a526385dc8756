"""The backends, in order of preference, and from a Problem to a Plan by one of them.

A backend is imported when it is first asked for. The bounded plan cache is the one piece of mutable
state.
"""

import warnings
from collections.abc import Hashable
from functools import cache
from importlib import import_module
from threading import Lock
from typing import Generic, TypeVar

from tilewise.errors import InvalidArgument, InvalidType, SlowPathWarning, Unsupported
from tilewise.kernels import Backend, Reader
from tilewise.plan import Candidate, Choice, Plan, choose
from tilewise.problem import Problem
from tilewise.variants.program import encode

# By name, the module and the class.
_BACKENDS = {
    "cpu": ("tilewise.kernels.cpu.backend", "CpuBackend"),
    "gpu": ("tilewise.kernels.gpu.backend", "GpuBackend"),
    "tiled": ("tilewise.kernels.tiled", "TiledBackend"),
}
BACKEND_NAMES = tuple(_BACKENDS)


@cache
def load(name: str) -> Backend:
    """Return the backend of that name, one instance per process."""
    module, kind = _BACKENDS[name]
    backend: Backend = getattr(import_module(module), kind)()
    return backend


@cache
def tensor_reader() -> Reader | None:
    """Return the reading of tensors of the first backend that has one."""
    found = (load(name).tensor_reader() for name in BACKEND_NAMES)
    return next((reader for reader in found if reader is not None), None)


def check_name(name: object) -> str | None:
    """``backend=`` as given, if it names a backend or is None."""
    *first, last = map(repr, BACKEND_NAMES)
    required = f"{', '.join(['None (choose)', *first])} or {last}"
    if name is None:
        return None
    if not isinstance(name, str):
        raise InvalidType("backend", f"a {type(name).__name__}", required)
    if name not in BACKEND_NAMES:
        is_gpu = name.lower() in ("cuda", "hip", "rocm", "triton")
        fix = "NVIDIA and AMD GPUs are backend='gpu'." if is_gpu else ""
        raise InvalidArgument("backend", repr(name), required, fix)
    return name


def plan_problem(problem: Problem, backend: str | None = None) -> Plan:
    """Return the plan for a problem.

    A backend that is named does it, or nobody does; None chooses.

    Raises:
        Unsupported: the named backend, or every one, declines; with all reasons.
    """
    names = BACKEND_NAMES if backend is None else (backend,)
    considered = candidates(problem, names, by_name=backend is not None)
    choice = (
        Choice(backend if not considered[0].reasons else None)
        if backend
        else _choose(considered, problem)
    )
    reasons = {candidate.name: candidate.reasons for candidate in considered if candidate.reasons}
    if choice.name is None:
        able = [candidate.name for candidate in considered if not candidate.reasons]
        fix = f"ask for the slow reference by name: backend={able[0]!r}." if able else ""
        raise Unsupported(_describe(problem, backend), reasons, fix)
    if choice.slow:
        warn_slow(choice.name, tuple(reasons.items()))
    chosen = load(choice.name)
    prepared = chosen.prepare(problem)
    return Plan(
        problem,
        choice.name,
        chosen.tiles(problem),
        tuple(reasons.items()),
        prepared.forward,
        prepared.backward,
        encode(problem.mask),
        encode(problem.score),
        loops=chosen.loops(problem),
        output=prepared.output,
        row_max_unit=prepared.row_max_unit,
        in_place=prepared.in_place,
    )


def _choose(considered: list[Candidate], problem: Problem) -> Choice:
    """Return the choice; costs are predicted only where there is one."""
    able = [each for each in considered if not each.reasons and not each.last_resort]
    if len(able) < 2:
        return choose(considered)
    from tilewise.plan.traffic import cost

    loops = {each.name: load(each.name).loops(problem) for each in able}
    priced = [
        each._replace(cost=cost(problem, loops[each.name])) if each.name in loops else each
        for each in considered
    ]
    return choose(priced)


def candidates(problem: Problem, names: tuple[str, ...], by_name: bool = False) -> list[Candidate]:
    """Return what each of the named backends says to a problem.

    Unless the caller asked for them ``by_name``, those that are not in question are left out.
    """
    found = []
    for name in names:
        backend = load(name)
        if not (by_name or backend.in_question(problem)):
            continue
        absence = backend.absence()
        reasons = (absence,) if absence is not None else tuple(backend.why_not(problem))
        found.append(Candidate(name, reasons, absence is not None, backend.last_resort))
    return found


def _describe(problem: Problem, backend: str | None) -> str:
    from tilewise.engine.explanation import mask_formula, score_formula

    mask, score = mask_formula(encode(problem.mask)), score_formula(encode(problem.score))
    who = "no backend can" if backend is None else f"backend {backend!r}, asked for, cannot"
    dtype = str(problem.dtype).removeprefix("torch.")
    paged = f", keys in pages of {problem.page_size}," if problem.page_size else ""
    return (
        f"{who} run this attention: {problem.layout}{paged} on {problem.device}, {dtype}, "
        f"D = {problem.head_dim}, Dv = {problem.value_dim}, mask {mask or 'none'}, "
        f"score {score or 'unchanged'}"
    )


@cache
def warn_slow(name: str, reasons: tuple[tuple[str, tuple[str, ...]], ...]) -> None:
    """Say once per process that the fast backends are not there and a slow one goes on."""
    lines = [f"  backend {who!r}: {reason}" for who, why in reasons for reason in why]
    message = f"tilewise runs on its slow reference, {name!r} (exact, but not fast):"
    end = "  `tilewise doctor` says more about this machine."
    warnings.warn("\n".join([message, *lines, end]), SlowPathWarning, stacklevel=2)


_Kept = TypeVar("_Kept")


class Cache(Generic[_Kept]):
    """Values by call signature: bounded, and without a lock or a reordering on a hit.

    Two generations approximate the order of use, with ``size`` values at most in each. A value that
    the young generation misses and the old one has moves back to the young one. When the young one
    is full, it becomes the old one, and the values not used since are dropped.
    """

    def __init__(self, size: int = 512) -> None:
        self.size = size
        self.young: dict[Hashable, _Kept] = {}
        self._old: dict[Hashable, _Kept] = {}
        self._lock = Lock()

    def find(self, key: Hashable) -> _Kept | None:
        """Return the value of a key that is not among the young ones, if there is one."""
        value = self.young.get(key) or self._old.get(key)
        if value is not None:
            self.add(key, value)
        return value

    def add(self, key: Hashable, value: _Kept) -> None:
        """Keep a value, and drop what has not been used for a generation when full."""
        with self._lock:
            if len(self.young) >= self.size:
                self._old, self.young = self.young, {}
            self.young[key] = value

    def clear(self) -> None:
        """Forget every value."""
        with self._lock:
            self.young, self._old = {}, {}

    def __len__(self) -> int:
        return len({**self._old, **self.young})


PLANS: Cache[Plan] = Cache()


def plan_of(problem: Problem, backend: str | None) -> Plan:
    """Return the plan of a problem that calls became: a part of one, or several folded."""
    key = problem, backend
    plan = PLANS.young.get(key) or PLANS.find(key)
    if plan is None:
        plan = plan_problem(problem, backend)
        PLANS.add(key, plan)
    return plan
