"""Cases over ``gate_kernels``; a module like ``gate/cases.py``: importing it imports no Triton."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import torch

from tilelab.gate.record import Case
from tilewise.kernels.gpu import Launch


def _square(
    size: int, warps: int = 4, stages: int = 2, kernel: str = "good"
) -> Callable[[str], list[Launch]]:
    def launches(family: str) -> list[Launch]:
        from tests.kernels.gpu import gate_kernels

        one = torch.empty(9, size, size, dtype=torch.bfloat16, device="meta")
        given = {"a": one, "b": one, "out": one[0], "steps": 9}
        made = getattr(gate_kernels, kernel)
        return [Launch(made, (1,), given, {"SIZE": size}, warps, stages)]

    return launches


def _by_hand(family: str) -> list[Launch]:
    from tests.kernels.gpu.gate_kernels import by_hand

    one = torch.empty(16, 16, dtype=torch.float16, device="meta")
    return [Launch(by_hand, (1,), {"a": one, "b": one, "out": one}, {"SIZE": 16}, 4, 1)]


def _broken(family: str) -> list[Launch]:
    from tests.kernels.gpu.gate_kernels import broken

    return [Launch(broken, (1,), {"a": torch.empty(1, device="meta")}, {})]


def _twice(family: str) -> list[Launch]:
    return [*_by_hand(family), *_by_hand(family)]


def _crash(family: str) -> list[Launch]:
    os.kill(os.getpid(), signal.SIGSEGV)
    return []


def _hang(family: str) -> list[Launch]:
    class Sleeper:
        __name__ = "sleeper"

        def __getattr__(self, name: str) -> object:
            time.sleep(60)
            return None

    return [Launch(Sleeper(), (1,), {}, {})]


def _unmade(family: str) -> list[Launch]:
    raise ValueError(f"nothing to launch on {family}")


CASES = (
    Case("good", _square(64, stages=3), key=True),
    Case("spills", _square(128, warps=2)),
    Case("shared", _square(128, warps=8, stages=5)),
    Case("by hand", _by_hand),
    Case("by hand and meant so", _by_hand, without_products=frozenset({"by_hand"})),
    Case("by hand in float32", _by_hand, sixteen_bit=False),
    Case("broken", _broken),
    Case("twice", _twice),
    Case("crash", _crash),
    Case("hang", _hang, families=("gfx942",)),
    Case("unmade", _unmade),
    Case("hopper only", _square(64), families=("sm_90",)),
    Case("chain of 8", _square(64, 8, 3, "chain"), families=("sm_90",)),
    Case("chain of 4", _square(64, 4, 3, "chain"), families=("sm_90",)),
    Case("chain of one stage", _square(64, 4, 1, "chain"), families=("sm_90",)),
)
