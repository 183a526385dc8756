"""One problem on the device, and a pass of it run in any blocks. This module imports Triton."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tilelab.cases.case import Case
from tilelab.cases.inputs import build, problem_of, send
from tilelab.gpu_check.outcomes import Outcome, block_table, in_pages
from tilelab.gpu_check.setting import Setting
from tilewise.inspect import gpu
from tilewise.inspect.gpu import KERNELS, Blocks, Launch, Overrides, Pass
from tilewise.problem import Grads, Needs, Result


class Work:
    """A problem with its tensors and with the result of its forward pass, in the table's blocks.

    Args:
        setting: where.
        case: the problem.
        family: the chip's.

    Attributes:
        inputs: the tensors as a user has them; the reference takes them.
    """

    def __init__(self, setting: Setting, case: Case, family: str) -> None:
        self.inputs = inputs = build(case, device=setting.device)
        self._sent = send(inputs)
        q, k, v = (x.detach() for x in (inputs.q, inputs.k, inputs.v))
        pages: dict[str, Tensor] = {}
        if case.page_size:
            k, v, pages = _in_pages(k, v, case.page_size)
        self._problem, operands = problem_of(
            inputs._replace(q=q, k=k, v=v), setting.backend, **pages
        )
        self._learned = tuple(x.requires_grad for x in operands.score_tensors)
        score_tensors = tuple(x.detach() for x in operands.score_tensors)
        self._operands = operands._replace(score_tensors=score_tensors)
        self._family = family
        self._result, self._other = (gpu.empty_result(self._problem, q, "") for _ in range(2))
        self._rooms: Outcome = {}
        gpu.run(self._forward(self._result))

    def launches(self, pass_name: Pass, blocks: Blocks) -> tuple[Sequence[Launch], Outcome]:
        """Return what a pass launches in these blocks, and where its results will be.

        All blocks share this memory, which now holds NaN: no blocks get another's results.
        """
        overrides = [(pass_name, blocks)]
        if pass_name in ("forward", "decode"):
            outcome = {"out": self._other.out, "lse": self._other.lse}
            launches = self._forward(self._other, overrides)
        else:
            launches, outcome = self._backward(pass_name, overrides)
        for room in outcome.values():
            room.fill_(math.nan)
        return launches, outcome

    def own(self, pass_name: Pass, launches: Sequence[Launch]) -> list[Launch]:
        """Return the launches that walk over the pairs: only these are timed."""
        return [launch for launch in launches if launch.kernel.__name__ == KERNELS[pass_name]]

    def _forward(self, result: Result, overrides: Overrides = ()) -> Sequence[Launch]:
        return gpu.forward_launches(self._problem, self._operands, result, self._family, overrides)

    def _backward(self, pass_name: Pass, overrides: Overrides) -> tuple[Sequence[Launch], Outcome]:
        """Gradients of keys and values, or of the queries and of what the score captured."""
        operands, by_keys = self._operands, pass_name == "dkdv"
        learned = tuple(each and not by_keys for each in self._learned)
        needs = Needs(not by_keys, by_keys, by_keys, learned, False)
        wanted: Outcome = {}

        def room(name: str, tensor: Tensor, need: bool) -> Tensor | None:
            if not need:
                return None
            key = f"grad of {name}"
            wanted[key] = self._rooms.setdefault(key, torch.empty_like(tensor))
            return wanted[key]

        captured = zip(operands.score_tensors, learned, strict=True)
        grads = Grads(
            room("q", operands.q, not by_keys),
            room("k", operands.k, by_keys),
            room("v", operands.v, by_keys),
            tuple(room(f"captured {i}", x, need) for i, (x, need) in enumerate(captured)),
            None,
        )
        launches = gpu.backward_launches(
            self._problem,
            operands,
            self._result,
            (self._sent.out, self._sent.lse),
            needs,
            grads,
            self._family,
            overrides,
        )
        return launches, wanted


def _in_pages(k: Tensor, v: Tensor, size: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return keys and values [B, Hk, N, D] in pages, in no order, and how the pages are found."""
    batch, keys = k.shape[0], k.shape[2]
    ends = torch.arange(0, (batch + 1) * keys, keys, dtype=torch.int32, device=k.device)
    table = block_table(ends, size, seed=3)
    k, v = (in_pages(x.transpose(1, 2).flatten(0, 1), ends, table, size) for x in (k, v))
    return k, v, {"block_table": table, "key_lengths": ends.diff()}


def spills_in(launches: Sequence[Launch]) -> int:
    """Run launches and count the registers that their kernels spill; 0 in the interpreter."""
    count = 0
    for kernel, grid, arguments, constants, warps, stages in launches:
        if all(grid):
            compiled = kernel[grid](**arguments, **constants, num_warps=warps, num_stages=stages)
            count += getattr(compiled, "n_spills", None) or 0
    return count
