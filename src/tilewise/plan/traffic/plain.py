"""Attention that writes its matrix, counted pass by pass: what torch does operation by operation.

Algorithms 0 (forward) and 3 (backward) of the FlashAttention paper, with the passes that a model
has besides: repeating the keys of groups, score, mask, dropout. Conventions:

* every operation is a pass of its own, which reads its inputs and writes its output whole;
* a matrix product reads each operand once, and scales for nothing;
* the softmax is one pass, forward and backward, though its row is walked over several times;
* a mask is added (``"add"``) or filled in (``"fill"``); its backward is no pass for ``"add"`` and
  one pass for ``"fill"``;
* a mask is stored once for all batch items and heads, and read once in a pass;
* each step of a score is a pass, forward and backward, besides what it captures;
* dropout writes a byte for each pair that says whether it is kept, and reads it in the backward;
* the matrix has the operands' dtype; nothing is skipped, however little attends;
* keys in pages are first gathered by the block table into rows that lie one after the other; those
  in 8 bits are then multiplied by their scales;
* no operation here attends in float8: a pass first converts the operands, times their scales, to
  bfloat16. It reads one byte per number and writes two. Everything else is in bfloat16. (The 2x
  rule's plain implementation in float8, ``reference.dense``, is another one.)

So with S the bytes of the matrix of all heads, in two bytes a number: scores 1 S, mask 2, softmax
2, dropout 2.5, product 1; backward dV 1, dP 1, dropout 2.5, softmax 3, dQ 1, dK 1. That is 18 S.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from tilewise.errors import InvalidArgument
from tilewise.plan.traffic.count import ENTRY_BYTES, Operand, Pass, Traffic, stored_row
from tilewise.problem import Problem
from tilewise.variants.float8 import output_dtype

MaskStyle = Literal["add", "fill"]


class _Sizes:
    """Bytes of what the passes move."""

    def __init__(self, problem: Problem, lengths: Sequence[tuple[int, int]] | None) -> None:
        self.problem, e = problem, output_dtype(problem.dtype).itemsize
        shapes = [(problem.queries, problem.keys)] * problem.batch if lengths is None else lengths
        if (problem.layout == "varlen" or problem.page_size) and lengths is None:
            raise InvalidArgument("lengths", "None", "queries and keys of every sequence")
        self.pairs = problem.heads * sum(m * n for m, n in shapes)
        self.matrix = self.pairs * e
        # One mask serves the batch; sequences of their own have masks of their own.
        longest = shapes[:1] if lengths is None else shapes
        self.mask = sum(m * n for m, n in longest) * e if problem.mask else 0
        rows, keys = (sum(shape[side] for shape in shapes) for side in (0, 1))
        self.q = problem.heads * rows * problem.head_dim * e
        self.out = problem.heads * rows * problem.value_dim * e
        self.k = problem.heads * keys * problem.head_dim * e  # as the products read them
        self.v = problem.heads * keys * problem.value_dim * e
        self.group = problem.heads // problem.kv_heads
        self.kept = {
            "k": problem.kv_heads * keys * stored_row(problem, problem.head_dim),
            "v": problem.kv_heads * keys * stored_row(problem, problem.value_dim),
        }
        self.pages = sum(-(-n // problem.page_size) for _, n in shapes) if problem.page_size else 0

    @property
    def converts(self) -> bool:
        """Return whether the operands have eight bits."""
        return output_dtype(self.problem.dtype) is not self.problem.dtype

    def before(self) -> list[Pass]:
        """Return what is done to the operands before the products."""
        stored = {"k": self.k // self.group, "v": self.v // self.group}
        passes = []
        if self.problem.page_size:
            entries = Operand("block_table", 2 * self.pages * ENTRY_BYTES)
            copied = [Operand(name, size, size) for name, size in self.kept.items()]
            passes.append(Pass("gather", (entries, *copied)))
        if self.converts or self.problem.stored is not None:
            made = [Operand(name, self.kept[name], size) for name, size in stored.items()]
            if self.converts:
                made.insert(0, Operand("q", self.q // 2, self.q))
            passes.append(Pass("convert", tuple(made)))
        if self.group > 1:
            repeated = [Operand(name, size, size * self.group) for name, size in stored.items()]
            passes.append(Pass("repeat", tuple(repeated)))
        return passes

    def product(self, width: int) -> int:
        """Operations of a product with the matrix."""
        return 2 * self.pairs * width

    def step(self, name: str, read: str, written: str, *more: Operand) -> Pass:
        """An operation on every element of the matrix."""
        moved = Operand(read, self.matrix), Operand(written, 0, self.matrix)
        return Pass(name, (*moved, *more))


def forward(problem: Problem, lengths: Sequence[tuple[int, int]] | None = None) -> Traffic:
    """Algorithm 0: S = Q K^T, P = softmax(S), O = P V, each through slow memory.

    Args:
        problem: what to compute.
        lengths: queries and keys of each sequence of a variable-length call, done one by one.
    """
    size = _Sizes(problem, lengths)
    passes = size.before()
    passes.append(
        Pass(
            "scores",
            (Operand("q", size.q), Operand("k", size.k), Operand("s", 0, size.matrix)),
            size.product(problem.head_dim),
        )
    )
    passes += [size.step("score", "s", "s")] * len(problem.score)
    if problem.mask:
        passes.append(size.step("mask", "s", "s", Operand("mask", size.mask)))
    passes.append(size.step("softmax", "s", "p")._replace(exponentials=size.pairs))
    kept = "p"
    if problem.dropout_p:
        kept = "dropped"
        passes.append(size.step("dropout", "p", kept, Operand("keep", 0, size.pairs)))
    passes.append(
        Pass(
            "product",
            (Operand(kept, size.matrix), Operand("v", size.v), Operand("out", 0, size.out)),
            size.product(problem.value_dim),
        )
    )
    if size.converts:
        dtype = str(output_dtype(problem.dtype)).removeprefix("torch.")
        passes = [each._replace(dtype=dtype) for each in passes]
    return Traffic(tuple(passes), _omitted(problem))


def backward(
    problem: Problem, lengths: Sequence[tuple[int, int]] | None = None, mask: MaskStyle = "add"
) -> Traffic:
    """Algorithm 3: dV, dP, dS, dQ and dK from the P that was kept, in sixteen bits or more.

    ``lengths`` are the queries and keys of each sequence of a variable-length call, done one by
    one. ``mask`` says how the forward applied it.
    """
    size = _Sizes(problem, lengths)
    head_dim, value_dim = problem.head_dim, problem.value_dim
    kept, incoming = ("dropped", "grad_dropped") if problem.dropout_p else ("p", "grad_p")
    grad_out, matrix = Operand("grad_out", size.out), size.matrix
    passes = [
        Pass(
            "dv",
            (Operand(kept, matrix), grad_out, Operand("grad_v", 0, size.v)),
            size.product(value_dim),
        ),
        Pass(
            "dp",
            (grad_out, Operand("v", size.v), Operand(incoming, 0, matrix)),
            size.product(value_dim),
        ),
    ]
    if problem.dropout_p:
        passes.append(size.step("dropout", incoming, "grad_p", Operand("keep", size.pairs)))
    passes.append(size.step("softmax", "grad_p", "grad_s", Operand("p", matrix)))
    if problem.mask and mask == "fill":
        passes.append(size.step("mask", "grad_s", "grad_s", Operand("mask", size.mask)))
    passes += [size.step("score", "grad_s", "grad_s")] * len(problem.score)
    for name, other, read, written in (("dq", "k", size.k, size.q), ("dk", "q", size.q, size.k)):
        moved = (
            Operand("grad_s", matrix),
            Operand(other, read),
            Operand(f"grad_{name[1]}", 0, written),
        )
        passes.append(Pass(name, moved, size.product(head_dim)))
    if size.group > 1:
        summed = [
            Operand(name, whole, whole // size.group)
            for name, whole in (("grad_k", size.k), ("grad_v", size.v))
        ]
        passes.append(Pass("sum groups", tuple(summed)))
    return Traffic(tuple(passes), _omitted(problem))


def _omitted(problem: Problem) -> tuple[str, ...]:
    return ("what scores load, in plain attention",) if problem.score else ()
