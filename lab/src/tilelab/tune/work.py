"""One problem on the device, and a pass of it run in any blocks. This module imports Triton."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tilelab.gpu_check.outcomes import SEED, Outcome, build
from tilelab.gpu_check.problems import ProblemCase
from tilelab.gpu_check.setting import Setting
from tilelab.tune.probes import PAGED
from tilewise.engine.call import build_operands, build_problem, read_keywords
from tilewise.engine.pages import Pages
from tilewise.kernels.gpu.backend import empty_result
from tilewise.kernels.gpu.backward.passes import backward_launches, key_kernel, query_kernel
from tilewise.kernels.gpu.config import Blocks, Config, Pass, config_for, decodes
from tilewise.kernels.gpu.expressions.variant import variant_of
from tilewise.kernels.gpu.forward.attend import attend, forward_launches
from tilewise.kernels.gpu.forward.decode import attend_split, decode_launches
from tilewise.kernels.gpu.launch import Launch, run
from tilewise.problem import Grads, Needs, Result

__all__ = ["Work", "spills_in"]

_KERNELS: dict[Pass, Any] = {
    "forward": attend,
    "dkdv": key_kernel,
    "dq": query_kernel,
    "decode": attend_split,
}
_PAGE = 16


class Work:
    """A problem with its tensors and with the result of its forward pass, in the table's blocks.

    Args:
        setting: where.
        case: the problem.
        dtype: of its tensors.
        family: the chip's.

    Attributes:
        inputs: the tensors as a user has them; the reference takes them.
    """

    def __init__(
        self, setting: Setting, case: ProblemCase, dtype: torch.dtype, family: str
    ) -> None:
        self.inputs = inputs = build(setting, case, dtype)
        dropout_p, cu = case.dropout_p, inputs.cu_seqlens
        q, k, v = (x.detach() for x in (inputs.q, inputs.k, inputs.v))
        pages = None
        if case.layout == PAGED:
            pages = _pages(k)
            k, v = (_in_pages(x, pages.block_table) for x in (k, v))
        said = (inputs.mask, inputs.score, case.scale, dropout_p, inputs.sinks)
        asked = read_keywords(*said, setting.backend, cu, pages)
        self._problem = build_problem(q, k, v, asked)
        seed = SEED if dropout_p else None
        operands = build_operands(self._problem, q, k, v, asked, seed)
        self._learned = tuple(x.requires_grad for x in operands.score_tensors)
        score_tensors = tuple(x.detach() for x in operands.score_tensors)
        self._operands = operands._replace(score_tensors=score_tensors)
        ranks = [
            tuple(x.dim() for x in tensors) for tensors in (operands.mask_tensors, score_tensors)
        ]
        self._variant = variant_of(self._problem, *ranks)
        self._config = config_for(family)
        self._result, self._other = (empty_result(self._problem, q, "") for _ in range(2))
        self._rooms: Outcome = {}
        run(self._forward(self._config, self._result))

    def launches(self, pass_name: Pass, blocks: Blocks) -> tuple[list[Launch], Outcome]:
        """Return what a pass launches in these blocks, and where its results will be.

        All blocks share this memory, which now holds NaN: no blocks get another's results.
        """
        config = self._config._replace(overrides=((pass_name, blocks),))
        if pass_name in ("forward", "decode"):
            outcome = {"out": self._other.out, "lse": self._other.lse}
            launches = self._forward(config, self._other)
        else:
            launches, outcome = self._backward(pass_name, config)
        for room in outcome.values():
            room.fill_(math.nan)
        return launches, outcome

    def own(self, pass_name: Pass, launches: list[Launch]) -> list[Launch]:
        """Return the launches that walk over the pairs: only these are timed."""
        return [launch for launch in launches if launch.kernel is _KERNELS[pass_name]]

    def _forward(self, config: Config, result: Result) -> list[Launch]:
        make = decode_launches if decodes(self._problem) else forward_launches
        return make(self._problem, self._operands, result, config, self._variant)

    def _backward(self, pass_name: Pass, config: Config) -> tuple[list[Launch], Outcome]:
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
        inputs = self.inputs
        launches = backward_launches(
            self._problem,
            operands,
            self._result,
            inputs.grad_out,
            inputs.grad_lse,
            needs,
            None,
            grads,
            config,
            self._variant,
        )
        return launches, wanted


def _pages(k: Tensor) -> Pages:
    """Return a block table for keys [B, Hk, N, D]: pages in no order, N keys in every sequence."""
    batch, keys = k.shape[0], k.shape[2]
    per_sequence = -(-keys // _PAGE)
    generator = torch.Generator().manual_seed(3)
    order = torch.randperm(batch * per_sequence, generator=generator).to(k.device, torch.int32)
    lengths = torch.full((batch,), keys, dtype=torch.int32, device=k.device)
    return Pages(order.view(batch, per_sequence), lengths, None)


def _in_pages(rows: Tensor, block_table: Tensor) -> Tensor:
    """Rows [B, Hk, N, D] in pages [pages, Hk, page_size, D]; NaN behind the last."""
    batch, heads, keys, width = rows.shape
    count = block_table.shape[1]
    filled = rows.new_full((batch, heads, count * _PAGE, width), math.nan)
    filled[:, :, :keys] = rows
    cut = filled.view(batch, heads, count, _PAGE, width).transpose(1, 2).flatten(0, 1)
    pages = torch.empty_like(cut)
    pages[block_table.flatten().long()] = cut
    return pages


def spills_in(launches: list[Launch]) -> int:
    """Run launches and count the registers that their kernels spill; 0 in the interpreter."""
    count = 0
    for kernel, grid, arguments, constants, warps, stages in launches:
        if all(grid):
            compiled = kernel[grid](**arguments, **constants, num_warps=warps, num_stages=stages)
            count += getattr(compiled, "n_spills", None) or 0
    return count
