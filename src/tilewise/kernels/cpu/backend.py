"""The CPU backend: allocates results and hands pointers, strides and sizes to the compiled core."""

import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from tilewise.kernels import Backend, Prepared, Reader, raw_reasons
from tilewise.kernels.cpu import DTYPES, absence, compiled, core, has_tiles, settle_float32, threads
from tilewise.plan import Tiles
from tilewise.plan.loops import Loops
from tilewise.problem import START, Grads, Needs, Operands, Problem, Result, Statistics, output_like
from tilewise.reference.programs import Grid
from tilewise.variants.derive import Derivative, differentiate
from tilewise.variants.expr import Expr, decode
from tilewise.variants.program import Program, encode

_CODES = {**DTYPES, torch.int64: 4, torch.bool: 5}
_LOG2E, _LN2 = math.log2(math.e), math.log(2.0)
_IN_TILES = "by matrix tiles, and by vectors where up to 8 queries need no gradient"
_NO_TILES = "as without set_float32: the instruction set has no matrix tiles"
_LEAST_SCALE = 1e-30  # kLeastScale of the core
# Sizes of the core's loops, to whose headers a test holds them. Of the backward's chunks of keys:
# csrc/base/schedule.h and passes/key_sums.h; of the forward pass of few queries: decode/tasks.h.
_BLOCK_KEYS, _CHUNK_BLOCKS, _MOST_CHUNKS = 128, 8, 8
_FEW_QUERIES, _DECODE_ROWS, _SPLIT_BLOCKS, _MOST_SPLITS = 8, 64, 4, 32


class CpuBackend(Backend):
    """Runs the C++ kernels of the best instruction set of this machine (csrc/)."""

    name: ClassVar[str] = "cpu"

    def tensor_reader(self) -> Reader | None:
        """Return the core's reading, if the core is there."""
        if absence() is not None:
            return None
        read: Reader = core().signature
        return read

    def absence(self) -> str | None:
        """Return why the compiled core is not there."""
        return absence()

    def why_not(self, problem: Problem) -> list[str]:
        """The limits of the kernels."""
        missing = absence()
        if missing:
            return [missing]
        limits = core()
        reasons = raw_reasons(problem)
        if problem.device != "cpu":
            reasons.append(f"it computes on the CPU; the tensors are on {problem.device}")
        if problem.dtype not in DTYPES:
            reasons.append(f"it computes float32, float64, bfloat16, float16; not {problem.dtype}")
        for what, size, limit in (
            ("D", problem.head_dim, limits.MAX_DIM),
            ("Dv", problem.value_dim, limits.MAX_DIM),
            ("the mask's number of instructions", len(problem.mask), limits.MAX_MASK),
            ("the score's number of steps", len(problem.score), limits.MAX_SCORE),
        ):
            if size > limit:
                reasons.append(f"{what} = {size} is over its limit of {limit}")
        for what, program in (("mask", problem.mask), ("score", problem.score)):
            for expr in _exprs(program):
                reasons += _why_not_expr(what, expr)
        return reasons

    def notes(self, problem: Problem) -> tuple[tuple[str, str], ...]:
        """Return how expressions run: interpreted, compiled, and why; and float32 in tiles."""
        notes: tuple[tuple[str, str], ...] = ()
        if _exprs(problem.mask) or _exprs(problem.score):
            notes = (("functions", compiled.state(_label(problem))),)
        if problem.dtype == torch.float32 and settle_float32():
            tiles = core().isa_active() == "avx512_amx"
            notes += (("float32", _IN_TILES if tiles else _NO_TILES),)
        return notes

    def tiles(self, problem: Problem) -> Tiles:
        """64 queries in the lanes against 128 keys; part of the rounding contract."""
        return Tiles(64, 128)

    def loops(self, problem: Problem, family: str = "") -> Loops:
        """Return the loops. In the backward, a chunk of keys stays while the queries go by.

        Chunks are cut by a sequence's own length, in whole blocks. In a packed call that length is
        not known here. Up to 8 x 1024 keys a chunk is the smallest one, and that is assumed for all
        of them.

        A dense decode call without gradients walks as ``csrc/decode/tasks.h`` describes: the heads
        of a group together, over splits of the keys. With enough tasks for all threads, one task
        walks over all splits and writes no partial results. They are counted nevertheless: at most
        32 rows of output per row.
        """
        keys = problem.keys if problem.layout == "dense" else 0
        blocks = (keys + _BLOCK_KEYS // 2) // _BLOCK_KEYS
        chunk = max(_CHUNK_BLOCKS, -(-blocks // _MOST_CHUNKS)) * _BLOCK_KEYS
        block = (64, _BLOCK_KEYS)  # of a chunk: one that no row sees is skipped
        if problem.layout != "dense" or not 0 < problem.queries <= _FEW_QUERIES:
            return Loops(block, "keys_outside", (64, chunk), blocks=block)
        together = min(problem.heads // problem.kv_heads, _DECODE_ROWS // problem.queries)
        split = max(_SPLIT_BLOCKS, -(-blocks // _MOST_SPLITS)) * _BLOCK_KEYS
        tile = (together * problem.queries, _BLOCK_KEYS)
        backward = (64, chunk)
        return Loops(tile, "keys_outside", backward, split_keys=split, shared=True, blocks=block)

    def covers(self, problem: Problem, operands: Operands, grid: Grid) -> Tensor:
        """Return the table of a mask, by the core."""
        table = torch.empty(grid[2:], dtype=torch.uint8, device="cpu")
        call = _Call(operands, _loaded(problem))
        arguments = (call.mask, call.sequences, tuple(grid), table.data_ptr())
        core().covers(_build(problem), threads(), *arguments)
        return table

    def prepare(self, problem: Problem) -> Prepared:
        """Return both passes with the programs already handed to the core."""
        kernel = _Kernel(problem)
        output: Callable[..., Tensor] | None = None
        if kernel.plain and not problem.dropout_p:
            output = kernel.output
        elif kernel.plain_pages:
            output = kernel.output_of_pages
        return Prepared(kernel.forward, kernel.backward, output, kernel.row_max_unit)


def _exprs(program: Program) -> list[Expr]:
    return [decode(str(instr.params[0])) for instr in program if instr.op == "expr"]


def _label(problem: Problem) -> str:
    return f"{problem.dtype} mask {encode(problem.mask)} score {encode(problem.score)}"


def _why_not_expr(what: str, expr: Expr) -> list[str]:
    limits = core()
    loads = [node for node in expr.nodes if node.op.startswith("load_")]
    rank = max([len(node.args) for node in loads], default=0)
    return [
        f"the {what}'s expression has {size} {parts}; its limit is {limit}"
        for parts, size, limit in (
            ("nodes", len(expr.nodes), limits.MAX_NODES),
            ("elements that it loads", len(loads), limits.MAX_LOADS),
            ("dimensions in a tensor that it loads", rank, limits.MAX_RANK),
        )
        if size > limit
    ]


def _bounds(program: Program) -> set[int]:
    """Instructions that are conjuncts of the whole mask: what they exclude nothing else lets in."""
    spans: list[tuple[int, ...]] = []  # the conjuncts of each value on the stack
    for index, instr in enumerate(program):
        if instr.op == "and":
            right = spans.pop()
            spans[-1] += right
        elif instr.op == "or":
            spans.pop()
            spans[-1] = ()
        elif instr.op == "not":
            spans[-1] = ()
        elif instr.op == "tiles":
            continue
        else:
            spans.append((index,))
    return set(spans[0]) if spans else set()


def _build(problem: Problem) -> Any:
    """Return the core's kernel object for a problem."""
    dims = tuple(problem[:7])
    kernel = core().Kernel(
        DTYPES[problem.dtype], dims, problem.scale, problem.dropout_p, problem.layout == "varlen"
    )
    bounds = _bounds(problem.mask)
    for index, instr in enumerate(problem.mask):
        if instr.op == "expr":
            expr = decode(str(instr.params[0]))
            kernel.add_mask_expr(expr.nodes, expr.outputs, instr.slots)
            continue
        numbers = instr.params[:2] if instr.op in ("band", "blocks", "tiles") else (-1, -1)
        anchor = instr.op == "band" and bool(instr.params[2])
        length = instr.params[0] if instr.op == "below" and instr.params else 0
        slots = (*instr.slots, -1, -1)[:2]
        kernel.add_mask(instr.op, index in bounds, *numbers, anchor, length, *slots)
    for instr in problem.score:
        if instr.op == "expr":
            expr = decode(str(instr.params[0]))
            kernel.add_score_expr(expr.nodes, expr.outputs, instr.slots)
            continue
        cap = instr.params[0] if instr.op == "softcap" else 0.0
        kernel.add_score(instr.op, cap, instr.slots[0] if instr.slots else -1)
    if _exprs(problem.mask) or _exprs(problem.score):
        compiled.bind(kernel, _label(problem))
    return kernel


def _broadcast(tensor: Tensor) -> tuple[int, tuple[int, ...], int]:
    """Address, strides with 0 where a dimension has size 1, dtype code (0 for what is not one)."""
    strides = tuple(
        0 if size == 1 else stride
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return tensor.data_ptr(), strides, DTYPES.get(tensor.dtype, 0)


def _sized(tensor: Tensor) -> tuple[int, tuple[int, ...], int, tuple[int, ...]]:
    """Return what an expression reads: address, strides, dtype code, sizes."""
    address, strides, _ = _broadcast(tensor)
    return address, strides, _CODES[tensor.dtype], tuple(tensor.shape)


def _aligned(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy where its elements lie at no multiple of their size."""
    return tensor if tensor.data_ptr() % tensor.element_size() == 0 else tensor.clone()


class _Loaded(NamedTuple):
    """The slots of the captured tensors that expressions read; of ``strided`` nothing else does."""

    mask: frozenset[int] = frozenset()
    score: frozenset[int] = frozenset()
    strided: frozenset[int] = frozenset()


_NO_LOADS = _Loaded()


def _loaded(problem: Problem) -> _Loaded:
    mask, score = (
        frozenset(slot for instr in program if instr.op == "expr" for slot in instr.slots)
        for program in (problem.mask, problem.score)
    )
    others = {slot for instr in problem.mask if instr.op != "expr" for slot in instr.slots}
    return _Loaded(mask, score, mask - others)


class _Call:
    """Arguments that both passes of one call share, as the core takes them."""

    __slots__ = ("held", "mask", "score", "sequences", "sinks")

    def __init__(self, operands: Operands, loaded: _Loaded = _NO_LOADS) -> None:
        # Ids are read along their rows; copies must live as long as the call.
        masks = [
            _aligned(
                tensor.contiguous() if tensor.dim() < 4 and slot not in loaded.strided else tensor
            )
            for slot, tensor in enumerate(operands.mask_tensors)
        ]
        scores = [_aligned(tensor) for tensor in operands.score_tensors]
        self.held = [*masks, *scores]
        self.mask = tuple(
            [
                _sized(tensor) if slot in loaded.mask else _broadcast(tensor)
                for slot, tensor in enumerate(masks)
            ]
        )
        self.score = tuple(
            [
                _sized(tensor) if slot in loaded.score else _broadcast(tensor)
                for slot, tensor in enumerate(scores)
            ]
        )
        self.sinks = self._address(operands.sinks)
        self.sequences: tuple[int, ...] = ()
        cu_q, cu_k = operands.cu_seqlens_q, operands.cu_seqlens_k
        if cu_q is not None and cu_k is not None:
            self.sequences = self._address(cu_q), self._address(cu_k)
        elif operands.block_table is not None and operands.key_lengths is not None:
            tensors = operands.block_table, operands.key_lengths, cu_q
            held, self.sequences = _in_pages(*tensors, operands.k.shape[2])
            self.held += held

    def _address(self, tensor: Tensor | None) -> int:
        if tensor is None:
            return 0
        self.held.append(_aligned(tensor))
        return self.held[-1].data_ptr()


def _in_pages(
    table: Tensor, lengths: Tensor, cu_q: Tensor | None, page_size: int
) -> tuple[list[Tensor], tuple[int, ...]]:
    """Return tensors that must live as long as the call, and what tells the core of them."""
    held = [_aligned(table), _aligned(lengths)]
    starts = 0
    if cu_q is not None:
        held.append(_aligned(cu_q))
        starts = held[2].data_ptr()
    addresses = held[0].data_ptr(), table.shape[1], page_size, held[1].data_ptr()
    return held, (starts, 0, *addresses)


_EMPTY = torch.empty(0, device="cpu")
_NOTHING = _Call(Operands(_EMPTY, _EMPTY, _EMPTY))


def _seed_of(operands: Operands) -> object:
    """Return the seed; with it what dropout counts from, where that is not the start."""
    return operands.seed if operands.origin is START else (operands.seed, *operands.origin)


def _wants_key_delta(operands: Operands, needs: Needs) -> bool:
    """Whether the gradient of a score tensor shows what rounding did to the stored output.

    It does where the tensor is float32 and the call 16 bits, and where all pairs read one number,
    whose gradient cancels most. Then delta is refined over the keys (csrc/passes/key_delta.h).
    """
    size = operands.q.dtype.itemsize
    return any(
        wanted and (tensor.dtype.itemsize > size == 2 or tensor.numel() == 1)
        for wanted, tensor in zip(needs.score_tensors, operands.score_tensors, strict=False)
    )


class _Kernel:
    """A problem in the core's hands."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._kernel = _build(problem)
        self._forward, self._output = core().forward, core().output
        wide = problem.dtype is torch.float64
        self._statistics = torch.float64 if wide else torch.float32
        self._rows = (
            (problem.heads, problem.queries)
            if problem.layout == "varlen"
            else (problem.batch, problem.heads, problem.queries)
        )
        rows = problem.heads * problem.queries
        self._count = rows if problem.layout == "varlen" else problem.batch * rows
        # empty_like of a zero-stride pattern is the cheapest way to new memory, and holds none. The
        # pattern itself stands for what nobody looks at.
        pattern = torch.full((), math.nan, dtype=self._statistics, device="cpu")
        self._lse, self._stats = pattern.expand(self._rows), pattern.expand((2, *self._rows))
        self._step = self._count * pattern.itemsize
        # Nothing but q, k, v and out has an address to hand over.
        slots = any(instr.slots for instr in (*problem.mask, *problem.score))
        bare = not (slots or problem.sinks)
        # As csrc/passes/close_rows.h has it: without a score chain the core does not scale scores.
        plain = not problem.score and problem.scale > _LEAST_SCALE
        self.row_max_unit = problem.scale if plain else 1.0
        self._square = problem.head_dim == problem.value_dim
        self.plain = bare and problem.layout == "dense" and not problem.page_size
        self.plain_pages = bare and problem.page_size > 0 and problem.stored is None
        # Where float32 has two ways, each call asks which one. Few queries have one.
        several = problem.queries > _FEW_QUERIES
        self._settles = several and problem.dtype is torch.float32 and has_tiles()
        self._loaded = _loaded(problem)
        self._derivative: Derivative | None = None

    def forward(self, operands: Operands, statistics: Statistics = "") -> Result:
        if self._settles:
            settle_float32()
        q, k, v = operands.q, operands.k, operands.v
        out = self._room_for(q)
        lse, stats = self._lse, self._stats
        row_lse = row_max = row_sum = 0
        more: tuple[Tensor | None, ...] = ()
        addresses: tuple[int, ...] = ()
        if statistics or not operands.out_alone:
            lse = torch.empty_like(lse, memory_format=torch.contiguous_format)
            if statistics:
                stats, more, addresses = self._room(statistics == "top1")
            else:
                stats = torch.empty_like(stats, memory_format=torch.contiguous_format)
            row_lse, row_max = lse.data_ptr(), stats.data_ptr()
            row_sum = row_max + self._step
        call = _NOTHING if self.plain else _Call(operands, self._loaded)
        self._forward(
            self._kernel,
            threads(),
            _seed_of(operands),
            q,
            k,
            v,
            out,
            row_lse,
            row_max,
            row_sum,
            call.sinks,
            call.mask,
            call.score,
            call.sequences,
            addresses,
            operands.for_backward,
            (operands.k_scale, operands.v_scale) if self._problem.stored else (),
        )
        return Result(out, lse, stats, *more)

    def output(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output of a plain call: ``forward`` without the other results."""
        if self._settles:
            settle_float32()
        out = self._room_for(q)
        self._output(self._kernel, threads(), q, k, v, out)
        return out

    def output_of_pages(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        block_table: Tensor,
        key_lengths: Tensor,
        cu_seqlens_q: Tensor | None,
    ) -> Tensor:
        """Return the output of a call that has no other tensors: ``forward`` without the rest."""
        if self._settles:
            settle_float32()
        out = self._room_for(q)
        found = _in_pages(block_table, key_lengths, cu_seqlens_q, k.shape[2])
        call = (q, k, v, out, 0, 0, 0, 0, (), (), found[1], (), False, ())
        self._forward(self._kernel, threads(), 0, *call)
        return out

    def _room_for(self, q: Tensor) -> Tensor:
        contiguous = self._square and q.is_contiguous()
        return torch.empty_like(q) if contiguous else output_like(q, self._problem.value_dim)

    def _room(self, top1: bool) -> tuple[Tensor, tuple[Tensor | None, ...], tuple[int, ...]]:
        """Stats with a third row, the statistics to be filled in, and where the core puts them."""
        stats = torch.empty((3, *self._rows), dtype=self._statistics, device="cpu")
        max_logit = torch.empty(self._rows, dtype=self._statistics, device="cpu")
        entropy = torch.empty(self._rows, dtype=self._statistics, device="cpu")
        top_key = torch.empty(self._rows, dtype=torch.int64, device="cpu") if top1 else None
        mean = stats.data_ptr() + 2 * self._step
        key = 0 if top_key is None else top_key.data_ptr()
        addresses = (max_logit.data_ptr(), entropy.data_ptr(), mean, key)
        return stats, (max_logit, entropy, top_key), addresses

    def backward(
        self,
        operands: Operands,
        result: Result,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        needs: Needs,
        grad_entropy: Tensor | None = None,
    ) -> Grads:
        q, k, v = operands.q, operands.k, operands.v
        grad_q, grad_k, grad_v = (output_like(x, x.shape[-1]) for x in (q, k, v))
        lse, stats = result.lse, result.stats.contiguous()
        delta = torch.empty(self._rows, dtype=self._statistics, device="cpu")
        if grad_lse is not None:
            grad_lse = grad_lse.to(self._statistics).contiguous()
        if grad_entropy is not None:
            grad_entropy = grad_entropy.to(self._statistics).contiguous()
        tensors = (q, k, v, result.out, grad_out, grad_q, grad_k, grad_v)
        arrays = (
            stats[0].data_ptr(),
            stats[1].data_ptr(),
            0 if grad_lse is None else grad_lse.data_ptr(),
            delta.data_ptr(),
            0 if grad_entropy is None else stats[2].data_ptr(),
            0 if grad_entropy is None else grad_entropy.data_ptr(),
            int(needs.partial),
        )
        call = _Call(operands, self._loaded)
        self._differentiate()
        arguments = (
            self._kernel,
            threads(),
            _seed_of(operands),
            tensors,
            arrays,
            call.sinks,
            call.mask,
            call.score,
            call.sequences,
        )
        core().backward(*arguments)
        if _wants_key_delta(operands, needs) and not needs.partial:
            core().key_delta(*arguments)  # refines delta in place
        return Grads(
            grad_q if needs.q else None,
            grad_k if needs.k else None,
            grad_v if needs.v else None,
            self._score_grads(arguments, operands, needs),
            self._sink_grads(operands, lse, delta, stats, grad_lse, grad_entropy)
            if needs.sinks
            else None,
        )

    def _differentiate(self) -> None:
        """Hand the derivatives of the score's expression over, if there is one, once."""
        score = self._problem.score
        if self._derivative is None and score and score[0].op == "expr":
            derivative = differentiate(decode(str(score[0].params[0])))
            expr, loads = derivative
            self._kernel.set_score_derivative(expr.nodes, expr.outputs, loads)
            self._derivative = derivative  # last: another thread may be here too

    def _load_grads(
        self,
        arguments: tuple[Any, ...],
        operands: Operands,
        needs: Needs,
        grads: list[Tensor | None],
    ) -> None:
        """Put the gradients of what the expression loads at their slots of ``grads``."""
        if self._derivative is None:
            return
        wide = {
            slot: torch.zeros(operands.score_tensors[slot].shape, dtype=torch.float64, device="cpu")
            for slot in self._problem.score[0].slots
            if needs.score_tensors[slot]
        }
        if not wide:
            return
        addresses = [wide[slot].data_ptr() if slot in wide else 0 for slot in range(len(grads))]
        if self._derivative.loads:  # else the score depends on no element of them: zeros
            core().load_backward(*arguments, tuple(addresses))
        for slot, grad in wide.items():
            grads[slot] = grad.to(operands.score_tensors[slot].dtype)

    def _score_grads(
        self, arguments: tuple[Any, ...], operands: Operands, needs: Needs
    ) -> tuple[Tensor | None, ...]:
        grads: list[Tensor | None] = [None] * len(operands.score_tensors)
        self._load_grads(arguments, operands, needs, grads)
        for index, instr in enumerate(self._problem.score):
            if instr.op != "bias" or not needs.score_tensors[instr.slots[0]]:
                continue
            slot = instr.slots[0]
            bias = operands.score_tensors[slot]
            # Where much is added up, in double: float32 would lose the small terms.
            sizes = (self._problem.batch, self._problem.heads, *self._problem[3:5])
            reduced = any(one == 1 < all_ for one, all_ in zip(bias.shape, sizes, strict=True))
            wide = reduced or self._statistics is torch.float64
            dtype = torch.float64 if wide else self._statistics
            grad = torch.zeros(bias.shape, dtype=dtype, device="cpu")
            address, strides, _ = _broadcast(grad)
            core().bias_backward(*arguments, index, address, strides, wide)
            grad = grad.to(bias.dtype)
            previous = grads[slot]
            grads[slot] = grad if previous is None else previous + grad
        return tuple(grads)

    def _sink_grads(
        self,
        operands: Operands,
        lse: Tensor,
        delta: Tensor,
        stats: Tensor,
        grad_lse: Tensor | None,
        grad_entropy: Tensor | None,
    ) -> Tensor:
        """Return the sinks' gradient: -sum over rows of p_sink * delta, p_sink = exp(sink - lse).

        A gradient of lse is taken from delta. One of the entropy adds to it
        grad * (log p_sink + entropy).
        """
        sinks = operands.sinks
        assert sinks is not None
        if grad_lse is not None:
            delta = delta - grad_lse
        if grad_entropy is not None:
            # As in the kernels: base-2 units, less the largest logit, less their mean. A NaN is
            # that of -inf - -inf, in a row without keys.
            exponent = (sinks[:, None] - stats[0] * self.row_max_unit) * _LOG2E
            exponent = exponent.nan_to_num(nan=0.0).clamp(-2000.0, 0.0)
            delta = delta + grad_entropy * (exponent - stats[2]) * _LN2
        # A row without keys or sink has no share to give; exp(-inf - -inf) would be NaN.
        share = torch.where(lse == -torch.inf, 0.0, (sinks[:, None] - lse).exp() * delta)
        over = 1 if self._problem.layout == "varlen" else (0, 2)
        return -share.sum(over)
