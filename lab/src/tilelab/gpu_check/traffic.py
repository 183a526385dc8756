"""Bytes of memory that attention moves, counted by ncu, beside those that the model predicts.

The check is optional: where counters cannot be read, the rows say why, and that is no failure. Only
bytes read are compared; bytes written may still be in the cache when a kernel ends.
``python -m tilelab.gpu_check.traffic SETTING JOB`` is the process that ncu watches.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict

import torch
from torch import Tensor

import tilewise
from tilelab.gpu_check import counters
from tilelab.gpu_check.child import environment
from tilelab.gpu_check.row import Row
from tilelab.gpu_check.setting import Setting
from tilewise.plan.traffic.count import Traffic

__all__ = ["jobs", "main", "predicted", "run"]

STEP = "traffic"
_LIMIT_S = 35.0
_WIDTH = 64
_LENGTH, _HEADS = 4096, 32
_TINY_LENGTH, _TINY_HEADS = 64, 2


def jobs(setting: Setting) -> list[str]:
    """Ours forward and backward, and plain attention forward."""
    return ["forward", "backward", "plain forward"]


def run(setting: Setting, job: str) -> Iterator[Row]:
    """Yield rows of the bytes read and written, counted and predicted."""
    model = predicted(setting, job)
    values: dict[str, object] = {"predicted_read": model.read, "predicted_written": model.written}
    if setting.self_test:
        _call(setting, job)()
        yield Row(STEP, job, note="the self-test has no counters", values=values)
        return
    command = [sys.executable, "-m", "tilelab.gpu_check.traffic"]
    command += [json.dumps(asdict(setting)), job]
    try:
        kernels = counters.count(command, environment(setting, parallel=False), _LIMIT_S)
    except counters.CannotCount as error:
        # Not "skipped", which is for want of time and a failure.
        yield Row(STEP, job, "unsupported", f"skipped: {error}", values)
        return
    read, written = (sum(kernel[name] for kernel in kernels) for name in counters.METRICS)
    values |= {"read": read, "written": written, "kernels": len(kernels)}
    yield Row(STEP, job, values=values)


def predicted(setting: Setting, job: str) -> Traffic:
    """Predict the traffic to this chip's memory: each pass starts from cold caches.

    The self-test has no chip, and no cache then.
    """
    q, k, v = _operands(setting)
    told = tilewise.explain(q, k, v, backend=setting.backend)
    account = told.account
    if account is None:  # the call itself says why the backend cannot
        return Traffic(())
    if job == "plain forward":
        return account.forward.plain
    ours = account.forward.ours if job == "forward" else account.backward.ours
    return ours if told.chip is None or setting.self_test else account.reaching(ours, told.chip)


def _operands(setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, small: a kernel that is counted begins with cold caches."""
    length, heads = (_LENGTH, _HEADS) if not setting.self_test else (_TINY_LENGTH, _TINY_HEADS)
    size = (1, heads, length, _WIDTH)
    made = [torch.randn(size, device=setting.device).to(setting.dtype) for _ in range(3)]
    return made[0], made[1], made[2]


def _call(setting: Setting, job: str) -> Callable[[], object]:
    """Return the call to count; everything before the call is done here."""
    q, k, v = _operands(setting)
    if job == "plain forward":  # unscaled: one pass less, and the same matrices
        return lambda: torch.matmul((q @ k.mT).softmax(-1), v)
    if job == "forward":
        return lambda: tilewise.attention(q, k, v, backend=setting.backend)
    leaves = tuple(x.requires_grad_() for x in (q, k, v))
    out = tilewise.attention(*leaves, backend=setting.backend)
    grad = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def main() -> None:
    """Do a job once to compile it, and once more between start and stop of the profiler."""
    setting, job = Setting(**json.loads(sys.argv[1])), sys.argv[2]
    call = _call(setting, job)
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
