"""Whatever program, numbers and tensors the core is handed, it computes or raises: it never dies.

Only addresses have to be believed, so that those that are drawn here are of memory that is there.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise.kernels.cpu import absence
from tilewise.kernels.cpu import core as _loaded

if absence() is not None:
    pytest.skip(f"no core: {absence()}", allow_module_level=True)
core = _loaded()

# What a wrong argument may raise: the core's own errors are ValueErrors.
REFUSED = (ValueError, TypeError, OverflowError, RuntimeError, MemoryError, IndexError)
DIMS = (1, 2, 1, 5, 7, 8, 8)  # B Hq Hk M N D Dv
FLOATS = {0: torch.float32, 1: torch.float64, 2: torch.bfloat16}
NAMES = (
    *("s", "b", "h", "m", "n", "M", "N", "const_bool", "const_int", "const_float"),
    *("load_bool", "load_int", "load_float", "add", "sub", "mul", "floordiv", "mod", "min", "max"),
    *("neg", "abs", "sign", "div", "pow", "exp", "log", "tanh", "sigmoid", "sqrt", "round", "shl"),
    *("shr", "and", "or", "xor", "not", "lt", "le", "eq", "ne", "where", "to_float", "to_int"),
)
NODE = tuple[Any, ...]
ROWS = torch.zeros(3, 4, 64)


def _tensors(dtype: int, shift: int = 0) -> list[Tensor]:
    """q, k, v, out and their gradients."""
    b, heads, kv_heads, queries, keys, width, value_width = DIMS
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (b, heads, queries + shift, width),
        (b, kv_heads, keys, width),
        (b, kv_heads, keys, value_width),
        (b, heads, queries, value_width),
    ]
    drawn = [torch.randn(x, generator=generator).to(FLOATS[dtype]) for x in shapes]
    return [*drawn, drawn[3].clone(), *[torch.zeros_like(x) for x in drawn[:3]]]


class Drawn:
    """Programs with one mistake in them, or none, or nothing but mistakes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.dtype = self.random.choice((0, 1, 2))
        real = torch.float64 if self.dtype == 1 else torch.float32
        self.held = [
            torch.randn(2, 3).to(real),
            torch.randint(-5, 5, (4,)),
            torch.ones(1, 1, 5, 100, dtype=torch.bool)[..., :7],
            torch.zeros(0, 2).to(real),
            torch.randn(1, 2, 5, 7).to(FLOATS[self.dtype]),
        ]

    def captured(self) -> tuple[Any, ...]:
        """Most of the captured tensors, most of them described as they are."""
        codes = {torch.int64: 4, torch.bool: 5, torch.float32: 0, torch.float64: 1}
        codes[torch.bfloat16] = 2
        found = []
        for x in self.held:  # as the backend does: a dimension of size 1 is broadcast
            strides = [n if size > 1 else 0 for size, n in zip(x.shape, x.stride(), strict=True)]
            found.append((x.data_ptr(), tuple(strides), codes[x.dtype], tuple(x.shape)))
        pick = self.random.random()
        if pick < 0.1:
            return tuple(found[: self.random.randint(0, 4)])
        if pick < 0.2:
            place = self.random.randint(0, 4)
            cut = self.random.randint(0, 3)
            found[place] = found[place][:cut]  # type: ignore[assignment]
        return tuple(found)

    def small(self) -> int:
        return self.random.choice((-1, 0, 0, 1, 1, 2, 3, 7, 40, 2**31, 2**40, -(2**63)))

    def node(self, place: int) -> NODE:
        name = self.random.choice(NAMES)
        if self.random.random() < 0.03:
            name = self.random.choice(("", "adds", "const", "load_", "shr_by", "difference"))
        count = self.random.choice((0, 1, 1, 2, 2, 2, 3, 4, 7))
        low = -1 if self.random.random() < 0.05 else 0
        args = tuple(self.random.randint(low, max(place - 1, 0)) for _ in range(count))
        value: Any = None
        if name.startswith(("const_", "load_")) or self.random.random() < 0.03:
            value = self.random.choice((0, 1, 2, 3, 4, -1, 5.5, float("nan"), True, 2**62))
        return (name, args, value)

    def sound(self, kinds: list[str], op: str) -> NODE:
        """A node that fits what stands before it, where its operation is drawn."""
        of = {kind: [i for i, each in enumerate(kinds) if each == kind] for kind in "bif"}
        kind = self.random.choice([kind for kind in "if" if of[kind]])
        pick = self.random.choice
        if op == "where" and of["b"]:
            kinds.append(kind)
            return ("where", (pick(of["b"]), pick(of[kind]), pick(of[kind])), None)
        if op == "load_float" and of["i"]:
            kinds.append("f")
            slot = self.random.choice((0, 3))
            return (op, (pick(of["i"]), pick(of["i"])), slot)
        if op == "load_int" and of["i"]:
            kinds.append("i")
            return (op, (pick(of["i"]),), 1)
        if op in ("lt", "eq"):
            kinds.append("b")
            return (op, (pick(of[kind]), pick(of[kind])), None)
        kinds.append(kind)
        return (pick(("add", "sub", "mul", "floordiv", "mod")), (pick(of[kind]),) * 2, None)

    def program(self) -> tuple[tuple[NODE, ...], list[str]]:
        leaves = [("s", "f"), ("m", "i"), ("n", "i"), ("h", "i")]
        nodes: list[NODE] = [(name, (), None) for name, _ in leaves]
        kinds = [kind for _, kind in leaves]
        for _ in range(self.random.randint(1, 12)):
            op = self.random.choice(("where", "load_float", "load_int", "lt", "eq", "add", "add"))
            nodes.append(self.sound(kinds, op))
        if self.random.random() < 0.4:  # a mistake
            place = self.random.randint(0, len(nodes) - 1)
            nodes[place] = self.node(place)
        return tuple(nodes), kinds

    def chosen(self, kinds: list[str], kind: str, count: int) -> list[int]:
        fitting = [i for i, each in enumerate(kinds) if each == kind] or [0]
        found = [self.random.choice(fitting) for _ in range(count)]
        if self.random.random() < 0.1:
            found.append(self.small() % 2**31)
        return found


def _attempt(call: Callable[[], object]) -> bool:
    """Whether it raised nothing; anything but an error ends the test."""
    try:
        call()
    except REFUSED:
        return False
    return True


def _once(seed: int) -> int:
    """One kernel with drawn programs, called in every way; how many calls were computed."""
    drawn = Drawn(seed)
    pick = drawn.random
    dims = DIMS if pick.random() < 0.9 else tuple(pick.choice((0, 1, -3, 600)) for _ in DIMS)
    try:
        kernel = core.Kernel(drawn.dtype, dims, 0.3, pick.choice((0.0, 0.2)), False)
    except REFUSED:
        return 0
    slots = [0, 1, 2, 3] if pick.random() < 0.9 else [drawn.small() % 2**31 for _ in range(4)]
    for _ in range(pick.randint(0, 3)):
        op = pick.choice(("band", "below", "dense", "and", "or", "not", "blocks", "same_document"))
        slot = pick.choice((-1, 2, 2, 77))
        _attempt(partial(kernel.add_mask, op, True, 2, 1, True, 3, slot, slot))
    nodes, kinds = drawn.program()
    if pick.random() < 0.3:
        outputs = drawn.chosen(kinds, "b", 1)
        _attempt(lambda: kernel.add_mask_expr(nodes, outputs, slots))
    nodes, kinds = drawn.program()
    outputs = drawn.chosen(kinds, "f", 1)
    _attempt(lambda: kernel.add_score_expr(nodes, outputs, slots))
    reads = [i for i, node in enumerate(nodes) if node[0] == "load_float"]
    loads = [pick.choice(reads) for _ in range(pick.randint(0, 2))] if reads else []
    derivatives = drawn.chosen(kinds, "f", 2 + len(loads))
    _attempt(lambda: kernel.set_score_derivative(nodes, derivatives, loads))
    if pick.random() < 0.3:
        slot = pick.choice((-1, 4, 4, 77))
        _attempt(lambda: kernel.add_score(pick.choice(("bias", "softcap")), 2.0, slot))

    tensors = _tensors(drawn.dtype, 1 if pick.random() < 0.05 else 0)
    captured = drawn.captured()
    row = ROWS.data_ptr() if pick.random() < 0.9 else 0
    threads = 1 if pick.random() < 0.9 else pick.choice((0, -1, 10**6))
    rows = (row, row + 1024, 0, row + 2048, 0, 0, 0)[: 7 if pick.random() < 0.95 else 4]
    given = (kernel, threads, 1)
    rest = (0, captured, captured, ())
    forward = (*given, *tensors[:4], row, row + 1024 if row else 0, row + 2048 if row else 0)
    grads = [torch.zeros(6, dtype=torch.float64), *[None] * 4]
    addresses = tuple(0 if x is None else x.data_ptr() for x in grads)
    if pick.random() < 0.3:
        addresses = addresses[: pick.randint(0, 4)]
    backward = (*given, tuple(tensors), rows, *rest)
    calls = (
        lambda: core.forward(*forward, *rest, (), True),
        lambda: core.backward(*backward),
        lambda: core.load_backward(*backward, addresses),
        lambda: core.bias_backward(*backward, pick.randint(-1, 3), row, (70, 35, 7, 1), True),
    )
    return sum(_attempt(call) for call in calls[: 4 if row else 3])


def test_the_core_survives_any_program(isa: str) -> None:
    """Errors for what is wrong, results for what is not; a crash would end the whole process."""
    computed = sum(_once(seed) for seed in range(1500))
    assert computed > 500


def _kernel(nodes: tuple[NODE, ...], outputs: tuple[int, ...]) -> Any:
    kernel = core.Kernel(0, DIMS, 0.3, 0.0, False)
    kernel.add_score_expr(nodes, (outputs[0],), (0,))
    kernel.set_score_derivative(nodes, outputs, ())
    return kernel


def test_a_score_without_derivative_by_its_loads_leaves_zeros(isa: str) -> None:
    """A gradient of a tensor that no output needs: nothing is added to it."""
    nodes = (("s", (), None), ("h", (), None), ("load_float", (1,), 0), ("const_float", (), 1.0))
    kernel = _kernel(nodes, (0, 3))
    table, grad = torch.randn(2), torch.zeros(2, dtype=torch.float64)
    captured = ((table.data_ptr(), (1,), 0, (2,)),)
    rows = (ROWS.data_ptr(), ROWS.data_ptr() + 1024, 0, ROWS.data_ptr() + 2048, 0, 0, 0)
    call = (kernel, 1, 1, tuple(_tensors(0)), rows, 0, (), captured, ())
    core.load_backward(*call, (grad.data_ptr(),))
    assert not bool(grad.any())


def test_what_is_wrong_is_named() -> None:
    q, k, v, out, *_ = _tensors(0)
    kernel = core.Kernel(0, DIMS, 0.3, 0.0, False)
    with pytest.raises(ValueError, match="q has size 5 in dimension 2 where the kernel is for 7"):
        core.output(core.Kernel(0, (1, 2, 1, 7, 7, 8, 8), 0.3, 0.0, False), 1, q, k, v, out)
    with pytest.raises(ValueError, match="k has another dtype than the kernel"):
        core.output(kernel, 1, q, k.double(), v, out)
    with pytest.raises(ValueError, match="threads must be 1 to"):
        core.output(kernel, 0, q, k, v, out)
    with pytest.raises(ValueError, match="before its operands"):
        kernel.add_mask("and", False, 0, 0, False, 0, -1, -1)
    with pytest.raises(ValueError, match="reads a tensor and has no slot"):
        kernel.add_mask("dense", False, 0, 0, False, 0, -1, -1)
    with pytest.raises(ValueError, match="'bias' reads a tensor and has no slot"):
        kernel.add_score("bias", 0.0, -1)
    for _ in range(2):
        kernel.add_mask("band", True, 1, 1, True, 0, -1, -1)
    with pytest.raises(ValueError, match="must leave one value"):
        core.output(kernel, 1, q, k, v, out)
    with pytest.raises(ValueError, match="Hq must be a multiple of Hk"):
        core.Kernel(0, (1, 3, 2, 5, 7, 8, 8), 0.3, 0.0, False)
    with pytest.raises(ValueError, match="dtype codes are 0 to 3"):
        core.Kernel(9, DIMS, 0.3, 0.0, False)
    node = (("const_float", (), 1.0),)
    with pytest.raises(ValueError, match="1 to 18 outputs, not 0"):
        kernel.add_score_expr(node, (), ())
