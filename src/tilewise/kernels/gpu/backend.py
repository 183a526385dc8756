"""The GPU backend: allocates results and runs the launches of the passes; imports Triton late.

It takes blocks that were measured on the chip where they fit, and says where blocks come from.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from tilewise.errors import Unsupported
from tilewise.kernels import Backend, Places, Prepared, gpu
from tilewise.kernels.gpu.config import (
    FAMILIES,
    KINDS,
    LARGEST_WIDTH,
    MEASURED,
    PASSES,
    UNPROVEN,
    WIDEST_KEYS,
    WIDTHS,
    Config,
    Pass,
    config_for,
    decodes,
    family_of,
    holds,
    listed_blocks,
    place_of,
    shared_need,
    table_blocks,
    tail_of,
)
from tilewise.kernels.gpu.replay import Replays
from tilewise.plan import Tiles
from tilewise.plan.loops import Loops
from tilewise.plan.tuned import NOTHING, STORE, Blocks, Entry, Found, shown
from tilewise.problem import Grads, Needs, Operands, Problem, Result, Statistics, output_like
from tilewise.reference.programs import Grid
from tilewise.variants.float8 import FLOAT8

if TYPE_CHECKING:
    from tilewise.kernels.gpu.expressions import Variant

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, FLOAT8)
# What the emitter takes for granted where it computes in 32 bits.
_MOST_ROWS, _MOST_HEADS = 2**24, 2**16
_MOST_KEYS = 2**31 - 2**10  # of a block table: positions in the last tile still take 32 bits


class GpuBackend(Backend):
    """Runs the Triton kernels of this folder."""

    name: ClassVar[str] = "gpu"
    reads_on_device: ClassVar[bool] = True
    # Triton's own interpreter multiplies the bits of bfloat16 as if they were integers, silently.
    # The tests mend that (tests/kernels/gpu/interpreter.py) and say so here.
    interprets_bfloat16: ClassVar[bool] = False

    def absence(self) -> str | None:
        """Return whether Triton or a GPU is missing."""
        if not _interprets() and not torch.cuda.is_available():
            return "torch sees no GPU"
        if not _has_triton():
            return "Triton is not installed (pip install triton)"
        return None

    def in_question(self, problem: Problem) -> bool:
        """CPU tensors only go through Triton's interpreter, which nobody wants by chance."""
        return problem.device != "cpu"

    def why_not(self, problem: Problem) -> list[str]:
        """The limits of the kernels."""
        reasons = []
        where = ("cpu",) if _interprets() else ("cuda",)
        if problem.device not in where:
            told = " (TRITON_INTERPRET is set)" if _interprets() else ""
            reasons.append(f"it computes on {where[0]}{told}; the tensors are on {problem.device}")
        elif _family(problem.device) is None:
            reasons.append("it has no blocks for this chip")
        if problem.dtype not in _DTYPES:
            named = ", ".join([str(dtype).removeprefix("torch.") for dtype in _DTYPES])
            reasons.append(f"it computes {named}; not {problem.dtype}")
        wrong = problem.dtype in (torch.bfloat16, FLOAT8) and not self.interprets_bfloat16
        if wrong and _interprets():
            name = str(problem.dtype).removeprefix("torch.")
            reasons.append(f"Triton's interpreter gets products of {name} wrong; use float16")
        if problem.page_size and problem.keys >= _MOST_KEYS:
            reasons.append(
                f"a block table for {problem.keys} keys is over its limit of {_MOST_KEYS}"
            )
        for what, size, limit in (
            ("D", problem.head_dim, LARGEST_WIDTH if problem.dtype is FLOAT8 else WIDEST_KEYS),
            ("Dv", problem.value_dim, LARGEST_WIDTH),
        ):
            if size > limit:
                reasons.append(f"{what} = {size} is over its limit of {limit}")
        if not _holds(problem):
            reasons.append(
                f"the shared memory of this chip is too small for D = {problem.head_dim} and Dv = "
                f"{problem.value_dim} in {problem.dtype}; 16-bit operands or smaller widths fit"
            )
        for what, size, limit in (
            ("queries", problem.queries, _MOST_ROWS),
            ("keys", problem.keys, _MOST_ROWS),
            ("batch items", problem.batch, _MOST_HEADS),
            ("heads", problem.heads, _MOST_HEADS),
        ):
            if (problem.mask or problem.score) and size > limit:
                reasons.append(f"{size} {what} are over its limit of {limit} with a mask or score")
        return reasons

    def notes(self, problem: Problem) -> tuple[tuple[str, str], ...]:
        """Return each pass of the call with its blocks, and where they come from."""
        config = _config(problem)
        left_out = {"forward" if decodes(problem) else "decode"}
        if problem.page_size or tail_of(problem.head_dim):
            left_out |= {"dkdv", "dq"}
        fused = config.fused(problem)
        if fused is not None:
            left_out |= {"dkdv", "dq"}
        found: list[tuple[str, str]] = [
            (name, _way(config, name, problem)) for name in PASSES if name not in left_out
        ]
        if fused is not None:
            said = (
                f"{fused}: one kernel of five products (Gluon), {origin(config, 'fused', problem)}"
            )
            found.append(("backward", said))
        if tail_of(problem.head_dim):
            found.append(("backward", f"none: gradients end at D = {LARGEST_WIDTH}"))
        return tuple(found)

    def tiles(self, problem: Problem) -> Tiles:
        """Return the blocks of the forward pass."""
        config = _config(problem)
        if decodes(problem):
            blocks, splitting = config.blocks("decode", problem), config.splitting()
            count = splitting.splits_within if problem.page_size else splitting.splits
            return Tiles(blocks.queries, blocks.keys, count(problem.keys))
        blocks = _blocks(config, "forward", problem)
        return Tiles(blocks.queries, blocks.keys)

    def loops(self, problem: Problem, family: str = "") -> Loops:
        """Return a walk over the keys for dQ, and one over the queries for dK and dV."""
        config = config_for(family) if family else _config(problem)
        back = listed_blocks if problem.page_size else _blocks  # pages: those of key lists
        first: Pass = "decode" if decodes(problem) else "forward"
        forward, dq, dkdv = (
            (blocks.queries, blocks.keys)
            for blocks in (
                _blocks(config, first, problem),
                back(config, "dq", problem),
                back(config, "dkdv", problem),
            )
        )
        found = Loops(forward, "by_tiles", dq, dkdv, products=_products(problem, config.family))
        if fused := config.fused(problem):
            found = found._replace(
                order="in_turns", backward=(fused.queries, fused.keys), keys=None
            )
        if not decodes(problem):
            return found
        return found._replace(split_keys=config.splitting().size(problem.keys), shared=True)

    def covers(self, problem: Problem, operands: Operands, grid: Grid) -> Tensor:
        """Return the table of a mask, made on the device of its tensors."""
        from tilewise.kernels.gpu.expressions import variant_of
        from tilewise.kernels.gpu.walk.cover import cover_launches

        device = operands.q.device
        starts = [
            None if cu is None else cu.to(device)
            for cu in (operands.cu_seqlens_q, operands.cu_seqlens_k)
        ]
        operands = operands._replace(cu_seqlens_q=starts[0], cu_seqlens_k=starts[1])
        variant = variant_of(problem, tuple(x.dim() for x in operands.mask_tensors), ())
        with device_of(operands.q):
            table = torch.empty(grid[2:], dtype=torch.uint8, device=device)
            gpu.run(cover_launches(problem, operands, grid, table, variant))
        return table

    def prepare(self, problem: Problem) -> Prepared:
        """Return both passes, with the functions of mask and score kept from the first call on."""
        passes = _Passes(problem)
        in_place = passes.in_place if problem.page_size else None
        return Prepared(passes.forward, passes.backward, in_place=in_place)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _interprets() -> bool:
    """Return whether kernels run in Triton's interpreter, on CPU tensors: as Triton itself asks."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def _family(device: str) -> str | None:
    return family_of(torch.device(device))


def _chip(device: str) -> str:
    return chip_of(torch.device(device))


def _holds(problem: Problem) -> bool:
    """Return whether the chip has room for the widths; an unknown chip has its own reason."""
    family = _family(problem.device)
    wide = problem.head_dim > WIDEST_KEYS or problem.value_dim > LARGEST_WIDTH
    if family is None or wide:
        return True
    return holds(family, problem.dtype, problem.head_dim, problem.value_dim)


def _blocks(config: Config, name: Pass, problem: Problem) -> Blocks:
    """Return the blocks of whichever kernel does a pass."""
    return config.in_groups(name, problem) or config.blocks(name, problem)


def _way(config: Config, name: Pass, problem: Problem) -> str:
    """Say which blocks a pass has, and where they come from."""
    grouped = config.in_groups(name, problem)
    if grouped is not None:
        said = f"{grouped}: two groups of warps and a loading warp (Gluon)"
        run = "measured on an H200"
        if problem.dtype is FLOAT8:
            run = origin(config, "grouped8", problem)
        elif name == "forward" and UNPROVEN.get(("grouped", config.family, problem.head_dim)):
            said, run = f"{said}, products by another", origin(config, "grouped", problem)
        return f"{said}, {run}"
    return f"{config.blocks(name, problem)}: {origin(config, name, problem)}"


def _products(problem: Problem, family: str) -> str:
    """Return the dtype that the forward multiplies in if it is not the operands'; else "".

    ``walk.float8.fp8_products`` decides it. Explaining a chip that is not here needs no Triton.
    """
    if problem.dtype is not FLOAT8:
        return ""
    own = FAMILIES[family].fp8 != "halves" and not decodes(problem) and not problem.page_size
    return "" if own else "float16"


def _config(problem: Problem) -> Config:
    family = _family(problem.device)
    if family is None:
        raise Unsupported("the GPU backend has no blocks for this chip")
    return config_for(family, measured_on(_chip(problem.device), family))


def empty_result(problem: Problem, q: Tensor, statistics: Statistics) -> Result:
    """Return memory for a result, on the device of q [B, Hq, M, D] (packed [Tq, Hq, D]).

    The shapes are those of ``tilewise.problem.Result``.
    """
    shape = (
        (problem.heads, problem.queries)
        if problem.layout == "varlen"
        else (problem.batch, problem.heads, problem.queries)
    )
    lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    stats = lse.new_empty((3 if statistics else 2, *shape))
    result = Result(output_like(q, problem.value_dim), lse, stats)
    if statistics:
        result = result._replace(max_logit=torch.empty_like(lse), entropy=torch.empty_like(lse))
    if statistics == "top1":
        result = result._replace(top_key=torch.empty_like(lse, dtype=torch.int64))
    return result


class _Passes:
    """A problem with the jit functions of its mask and score."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._variant: Variant | None = None
        self._replays, self._measured = Replays(), NOTHING

    def forward(self, operands: Operands, statistics: Statistics = "") -> Result:
        from tilewise.kernels.gpu.forward import Forward
        from tilewise.kernels.gpu.forward.attend import forward_launches
        from tilewise.kernels.gpu.forward.decode import decode_launches

        problem = self._problem
        if operands.for_backward and tail_of(problem.head_dim):
            raise Unsupported(
                f"the GPU backend has no gradients of D = {problem.head_dim}: they end at "
                f"{LARGEST_WIDTH}",
                fix="call it under torch.no_grad(), or train the form with keys and values of heads"
                " of their own",
            )
        launches = decode_launches if decodes(problem) else forward_launches
        with device_of(operands.q):
            result = empty_result(problem, operands.q, statistics)
            config = _config(problem)
            self._launch(
                config,
                statistics,
                (*operands, *result),
                lambda: launches(
                    Forward(problem, operands, result, config, self._functions(operands))
                ),
            )
        return result

    def backward(
        self,
        operands: Operands,
        result: Result,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        needs: Needs,
        grad_entropy: Tensor | None = None,
    ) -> Grads:
        from tilewise.kernels.gpu.backward import Upstream, backward_of
        from tilewise.kernels.gpu.backward.passes import backward_launches

        with device_of(operands.q):
            grads = _empty_grads(operands, needs)
            config = _config(self._problem)
            self._launch(
                config,
                needs,
                (*operands, *result, grad_out, grad_lse, grad_entropy, *grads),
                lambda: backward_launches(
                    backward_of(
                        self._problem,
                        operands,
                        result,
                        Upstream(grad_out, grad_lse, grad_entropy),
                        needs,
                        config,
                        self._functions(operands),
                    ),
                    grads,
                ),
            )
        return grads

    def in_place(
        self,
        operands: Operands,
        result: Result,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        needs: Needs,
        places: Places,
        grad_entropy: Tensor | None = None,
    ) -> Grads:
        from tilewise.kernels.gpu.backward import Upstream, backward_of
        from tilewise.kernels.gpu.backward.listed import listed_launches

        with device_of(operands.q):
            grads = _empty_grads(operands, needs._replace(k=False, v=False))
            call = backward_of(
                self._problem,
                operands,
                result,
                Upstream(grad_out, grad_lse, grad_entropy),
                needs,
                _config(self._problem),
                self._functions(operands),
            )
            gpu.run(listed_launches(call, places, grads))
        return grads

    def _launch(
        self,
        config: Config,
        wanted: Hashable,
        given: tuple[Any, ...],
        launches: Callable[[], list[gpu.Launch]],
    ) -> None:
        """Launch what a pass launches, or replay it: see ``Replays.run``."""
        if config.measured is not self._measured:  # other blocks than those of earlier calls
            self._measured, self._replays = config.measured, Replays()
        self._replays.run((wanted, config.precision), given, launches)

    def _functions(self, operands: Operands) -> Variant:
        """The functions; the ranks of captured tensors are the program's, so any call's will do."""
        if self._variant is None:
            from tilewise.kernels.gpu.expressions import variant_of

            mask_ranks = tuple(tensor.dim() for tensor in operands.mask_tensors)
            score_ranks = tuple(tensor.dim() for tensor in operands.score_tensors)
            self._variant = variant_of(self._problem, mask_ranks, score_ranks)
        return self._variant


def _empty_grads(operands: Operands, needs: Needs) -> Grads:
    """Memory for the gradients that are wanted."""
    q, k, v = (
        output_like(tensor, tensor.shape[-1]) if wanted else None
        for tensor, wanted in zip(operands[:3], needs[:3], strict=True)
    )
    scores = tuple(
        torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) if wanted else None
        for tensor, wanted in zip(operands.score_tensors, needs.score_tensors, strict=True)
    )
    sinks = torch.empty_like(operands.sinks) if needs.sinks and operands.sinks is not None else None
    return Grads(q, k, v, scores, sinks)


def device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Launches go to the current device; make it the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def chip_of(device: torch.device) -> str:
    """The name of the chip of a device, as its maker gives it; the CPU's is the interpreter."""
    if device.type == "cpu":
        return "interpreter"
    properties = torch.cuda.get_device_properties(device)
    return str(properties.name or getattr(properties, "gcnArchName", ""))


def measured_on(chip: str, family: str) -> Found:
    """Return the measured blocks of a chip; the file is read at the first call."""
    return STORE.find(chip, family, why_unfit)


def why_unfit(family: str, entry: Entry) -> str:
    """Return why the blocks of an entry cannot be taken on a family; "" if they can."""
    (pass_name, dtype, width, kind), blocks = entry.place, entry.blocks
    for what, value, known in (
        ("pass", pass_name, MEASURED),
        ("width", width, WIDTHS),
        ("kind", kind, KINDS),
    ):
        if value not in known:
            return f"{what} {value!r} is none of {', '.join(str(each) for each in known)}"
    name: Pass = next(each for each in MEASURED if each == pass_name)
    if name not in PASSES and (
        blocks != UNPROVEN.get((name, family, width))
        or kind != "plain"
        or dtype.itemsize != (1 if name == "grouped8" else 2)
    ):
        return f"there is no {name} kernel of {dtype}, width {width}, kind {kind} in {blocks}"
    need = shared_need(name, blocks, dtype.itemsize, width, width)
    if need > FAMILIES[family].shared_bytes:
        most = FAMILIES[family].shared_bytes
        return f"{blocks} need {need} bytes of shared memory, {family} has {most}"
    least = Config(family).splitting().least
    if name == "decode" and least % blocks.keys:
        return f"{blocks} do not divide a split of {least} keys"
    table = table_blocks(family, entry.place)
    if table != entry.table_blocks:
        return f"the table now has {table}, and they were compared with {entry.table_blocks}"
    return ""


def origin(config: Config, pass_name: Pass, problem: Problem) -> str:
    """Where the blocks of a pass for a problem come from, in words."""
    if any(name == pass_name for name, _ in config.overrides):
        return "blocks that were asked for"
    found = config.measured
    entry = found.entries.get(place_of(pass_name, problem))
    file = "" if found.path is None else shown(found.path)
    if entry is not None:
        other = "two kernels" if pass_name == "fused" else f"the table's {entry.table_blocks}"
        gain = f"{entry.ratio:.2f} times as fast as {other}"
        return f"blocks measured by tilewise tune on {found.date} ({gain}), from {file}"
    if found.refusal:
        return f"blocks of the table; {file} is not used: {found.refusal}"
    if found.path is not None:
        return f"blocks of the table; {file} has no faster ones"
    return "blocks of the table"
