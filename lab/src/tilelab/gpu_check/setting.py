"""The device of the check and the size of its problems: on a GPU, or in the self-test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tilelab.cases.case import Case
from tilelab.common import clock, worker
from tilelab.peers.work import Work, work_of


class Model(NamedTuple):
    """A model of the training step."""

    layers: int  # these four: of the transformer
    heads: int
    width: int
    vocabulary: int
    context: int  # positions of a sequence
    batch: int  # sequences of a step
    causal: bool  # a decoder as GPT-2 is, and not an encoder as BERT is


class Sizes(NamedTuple):
    """Sizes of the problems."""

    # Of every speed case: batch = tokens / length, heads = hidden / width.
    tokens: int = 16384
    hidden: int = 2048
    # These two: of the speed cases, the longest first; the two greatest lengths have goals.
    lengths: tuple[int, ...] = (16384, 8192, 4096, 2048, 1024, 512)
    widths: tuple[int, ...] = (128, 64, 256)
    decode_batch: int = 16  # these two: of decoding, with 32 query heads on 8
    decode_keys: int = 32768
    # What lengths of the accuracy cases are divided by; their widths by the root of it.
    shrink: int = 1
    long: int = 16384  # these two: the long accuracy cases
    long_width: int = 128
    huge: int = 8200  # batch items of the case whose operands pass 2^31 elements
    memory: tuple[int, ...] = (4096, 8192, 16384, 32768)  # lengths at which memory is measured
    matrix: int = 8192  # these two: of the ceilings
    copy_bytes: int = 2**32
    models: tuple[tuple[str, Model], ...] = (
        ("GPT-2 small", Model(12, 12, 768, 50304, 1024, 16, True)),
        ("BERT-large", Model(24, 16, 1024, 30592, 512, 32, False)),
        ("GPT-2 medium", Model(24, 16, 1024, 50304, 1024, 8, True)),
    )
    steps: int = 10  # training steps that are timed


_ROUNDS = (5, 25)  # of timed calls, whatever the budget
REAL = Sizes()
TINY = Sizes(
    tokens=64,
    hidden=32,
    lengths=(64, 48, 32),
    widths=(16,),
    decode_batch=1,
    decode_keys=96,
    shrink=16,
    long=80,
    long_width=16,
    huge=2,
    memory=(32, 64),
    matrix=32,
    copy_bytes=2**16,
    models=(
        ("GPT-2 small", Model(1, 2, 32, 64, 32, 1, True)),
        ("BERT-large", Model(1, 2, 32, 64, 32, 1, False)),
        ("GPT-2 medium", Model(1, 2, 32, 64, 24, 1, True)),
    ),
    steps=1,
)


@dataclass(frozen=True)
class Setting:
    """The setting of a job."""

    backend: str = "gpu"  # of ``tilewise.attention``; it never falls back
    self_test: bool = False  # on the CPU in Triton's interpreter, tiny, with no claim about time
    scratch: str = ""  # a folder in which jobs leave word for later ones; "" for none

    @property
    def device(self) -> torch.device:
        """The device of the tensors; a GPU with its index, as tensors on it say."""
        return torch.device("cpu") if self.self_test else torch.device("cuda", 0)

    @property
    def sizes(self) -> Sizes:
        """Sizes of the problems."""
        return TINY if self.self_test else REAL

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of timed calls.

        The self-test has no bfloat16: Triton's interpreter multiplies its bits as if they were
        whole numbers.
        """
        return torch.float16 if self.self_test else torch.bfloat16

    def work(self, case: Case, **more: Any) -> Work:
        """Return a case to measure here, in the dtype of timed calls."""
        more = {"backend": self.backend, "dtype": self.dtype, **more}
        return work_of(case, device=self.device.type, **more)

    def square(self, name: str, length: int, heads: int, width: int, **more: Any) -> Work:
        """Return a work of one batch item and as many keys as queries."""
        return self.work(Case(name, 1, heads, heads, length, length, width, width), **more)

    def environment(self, parallel: bool = False) -> dict[str, str]:
        """Return a worker's environment: in self-tests with Triton's interpreter."""
        found = worker.environment()
        if self.self_test:
            found["TRITON_INTERPRET"] = "1"
        elif parallel:
            # One compiler each: the processes are as many as the cores already.
            found |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
        return found

    @property
    def timer(self) -> str:
        """What times its calls: events of a GPU, or in the self-test the processor."""
        return "cpu" if self.self_test else "cuda"

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given."""
        if not self.self_test:
            torch.cuda.synchronize()

    def race(self, calls: Mapping[str, clock.Call], budget_s: float) -> dict[str, list[float]]:
        """Time warm calls in turn, as ``clock.race`` does; in the self-test once each."""
        if self.self_test:
            return {name: [clock.seconds_of(call)] for name, call in calls.items()}
        return clock.race(calls, budget_s, _ROUNDS, self.timer)
