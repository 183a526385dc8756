"""Memory beyond inputs and outputs: it must grow with N, and not with N squared."""

from __future__ import annotations

from collections.abc import Iterator

from tilelab.common.memory import highest
from tilelab.gpu_check.record import Row
from tilelab.gpu_check.setting import Setting
from tilelab.peers.methods import Method, ours, written_out
from tilelab.peers.work import Pass, call_of, draw
from tilewise import masks

STEP = "memory"
_HEADS, _WIDTH = 8, 64
# What may be held beside inputs and outputs, for each row of each head: lse and two statistics,
# the row sums of the backward pass, and gradients of grouped keys in float32.
_ROW_BYTES = 4 * (4 + 2 * _WIDTH)
_PLAIN_LONGEST = 16384


def jobs(setting: Setting) -> list[str]:
    """Both passes; in the self-test the same calls, of which nothing is claimed."""
    return ["forward", "backward"]


def run(setting: Setting, job: str) -> Iterator[Row]:
    """Extra bytes at every length, ours and plain attention's."""
    lengths = setting.sizes.memory
    held = [_extra_bytes(setting, length, job, ours()) for length in lengths]
    fitting = [length for length in lengths if length <= _PLAIN_LONGEST]
    plain = [_extra_bytes(setting, length, job, written_out()) for length in fitting]
    allowed = [_HEADS * length * _ROW_BYTES for length in lengths]
    values = {
        "lengths": list(lengths),
        "extra_bytes": held,
        "plain_bytes": plain,
        "allowed_bytes": allowed,
    }
    over = [n for n, extra, most in zip(lengths, held, allowed, strict=True) if extra > most]
    if over and not setting.self_test:
        note = f"more than a constant for each row at N = {', '.join(map(str, over))}"
        yield Row(STEP, job, "wrong", note, values)
    else:
        yield Row(STEP, job, values=values)


def _extra_bytes(setting: Setting, length: int, direction: str, method: Method) -> int:
    """Return the peak of a pass, less what was held before it and less what it gives."""
    passes: Pass = "forward" if direction == "forward" else "both"
    work = setting.work(STEP, direction, length, _HEADS, _WIDTH, passes=passes, mask=masks.causal())
    given = draw(work)
    call = call_of(work, given, method.make(work, given))
    call()  # what is loaded once is no part of it
    extra, _, _ = highest(call, "cpu" if setting.self_test else "cuda")
    outputs = 1 if direction == "forward" else 4
    return max(0, extra - outputs * given.q.numel() * given.q.element_size())
