"""Watches the memory of interpreted kernels: bounds, races, order, lanes that nobody wrote.

The interpreter runs the programs of a launch one after another on whatever addresses they name.
Within ``guarded`` a kernel fails with ``GuardError`` where it

* reads or writes outside of the tensor that its pointer came from: beyond its ends, or in the
  gaps of a strided view, even if other memory of the caller's is there;
* lets two programs of a launch touch the same element, one of them writing: whatever the later
  one sees, on a chip there is no later one. Atomic operations on integers may meet their own
  kind; sums of floats may not, for their bits depend on the order;
* writes two different values to one element in one store;
* computes a signed number that its type does not hold, which on a chip wraps.

Programs run in a random order, the same for the same seed. Lanes that a mask hides from a load
without ``other`` are undefined: they become NaN, or an integer far off.

A tensor is described once a launch; each access costs some numpy calls on its block of pointers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as upstream

from tests.kernels.gpu.floats import FP8, Array

MANY = -1  # programs; 0 is none, and a program's number is its place in the grid plus one
FAR_OFF = 0x5A5A5  # an index that no small tensor has and that no product of which overflows
# Atomic operations on integers that commute with themselves; any other one is number 0.
_COMMUTING = {
    getattr(upstream._ir.ATOMIC_OP, name): number
    for number, name in enumerate(("ADD", "MAX", "MIN", "UMAX", "UMIN", "AND", "OR", "XOR"), 1)
}
_EXACTLY = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

Handle = upstream.TensorHandle
Builder = upstream.InterpreterBuilder
_set_place = Builder.set_grid_idx
# What makes pointers of pointers.
_DERIVING = (
    "create_addptr",
    "create_bitcast",
    "create_broadcast",
    "create_expand_dims",
    "create_int_to_ptr",
    "create_ptr_to_int",
    "create_reshape",
    "create_splat",
    "create_trans",
    "create_unsplat",
)


class _Memory:
    """A storage that a launch was given, in cells: which program read and wrote each.

    Args:
        start, end: addresses that the launch's tensors in it lie between.
        cell_bytes: the smallest element among those tensors.
    """

    def __init__(self, start: int, end: int, cell_bytes: int) -> None:
        self.start = start
        self.cell_bytes = cell_bytes
        self.cells = (end - start) // cell_bytes
        self.stored, self.updated, self.read = np.zeros((3, self.cells), np.int32)
        self.operation = np.zeros(self.cells, np.int8)  # of the last atomic update
        self.written = False

    def cells_of(self, addresses: Array, width_bytes: int) -> Array:
        """The cells of elements at addresses; -1 where that is none of this memory's."""
        offsets = (addresses - np.uint64(self.start)).view(np.int64)
        cells, rest = np.divmod(offsets, self.cell_bytes)
        if width_bytes > self.cell_bytes:
            steps = np.arange(width_bytes // self.cell_bytes)
            cells, rest = (cells[:, None] + steps).ravel(), np.repeat(rest, steps.size)
        aligned = rest % min(width_bytes, self.cell_bytes) == 0
        return np.where(aligned & (cells >= 0) & (cells < self.cells), cells, -1)


class _Region:
    """A tensor argument: which cells of its memory are its own."""

    def __init__(self, name: str, tensor: Any, memory: _Memory) -> None:
        self.name = name
        self.shape = tuple(tensor.shape)
        self.start = tensor.data_ptr()
        self.memory = memory
        self.own = np.zeros(memory.cells + 1, np.bool_)  # the last one, -1, is nobody's
        if all(self.shape):
            per_element = tensor.element_size() // memory.cell_bytes
            first = (self.start - memory.start) // memory.cell_bytes
            np.lib.stride_tricks.as_strided(
                self.own[first:],
                (*self.shape, per_element),
                (*(stride * per_element for stride in tensor.stride()), 1),
            )[...] = True


def _extent(tensor: Any) -> tuple[int, int]:
    """Addresses of a tensor's first element and of the end of its last one."""
    sizes, strides = tensor.shape, tensor.stride()
    last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size() if all(sizes) else start


def _storage(tensor: Any) -> int:
    return int(getattr(tensor, "base", tensor).untyped_storage().data_ptr())


def _regions_of(named: dict[str, Any]) -> dict[int, _Region]:
    """The regions of tensors, by ``id``; tensors of one storage share its memory."""
    sharing: dict[int, list[Any]] = {}
    for tensor in named.values():
        sharing.setdefault(_storage(tensor), []).append(tensor)
    memories = {}
    for storage, tensors in sharing.items():
        starts, ends = zip(*map(_extent, tensors), strict=True)
        cell_bytes = min(tensor.element_size() for tensor in tensors)
        memories[storage] = _Memory(min(starts), max(ends), cell_bytes)
    return {
        id(tensor): _Region(name, tensor, memories[_storage(tensor)])
        for name, tensor in named.items()
    }


def _tensors_in(argument: Any, name: str) -> dict[str, Any]:
    """The tensors in an argument by name: itself, those of a tuple, or that of a descriptor."""
    if isinstance(argument, tuple):
        found: dict[str, Any] = {}
        for index, each in enumerate(argument):
            found |= _tensors_in(each, f"{name}[{index}]")
        return found
    if hasattr(argument, "block_shape"):
        return {name: argument.base}
    return {name: argument} if hasattr(argument, "data_ptr") else {}


class GuardError(AssertionError):
    """A kernel did to memory what it must not do on a chip."""


def _others(owners: Array, program: int) -> Array:
    return owners[(owners != 0) & (owners != program)]


def _joined(owners: Array, program: int) -> Array:
    """Of cells with these owners, those when a program joins them."""
    return np.where((owners == 0) | (owners == program), program, MANY)


class Watch:
    """One launch after another, seen through the interpreter's hooks."""

    def __init__(self, seed: int | None) -> None:
        self.seed = seed
        self.launches = 0
        self.kernel = ""
        self.regions: dict[int, _Region] = {}
        self.grid: tuple[int, ...] = (1, 1, 1)
        self.order = np.zeros(1, np.int64)
        self.program = 1

    def reseed(self, seed: int | None) -> None:
        """Draw orders from another seed from now on; None runs programs as upstream does."""
        self.seed, self.launches = seed, 0

    def begin(self, kernel: str, named: dict[str, Any]) -> None:
        """Describe the tensors of a launch."""
        self.kernel = kernel
        self.regions = _regions_of(named)

    def lay_out(self, grid: tuple[int, ...]) -> None:
        """Draw the order of a launch's programs."""
        self.grid = grid
        self.launches += 1
        self.order = np.arange(np.prod(grid))
        if self.seed is not None:
            np.random.default_rng((self.seed, self.launches)).shuffle(self.order)

    def step(self, place: tuple[int, ...]) -> tuple[int, ...]:
        """The program that runs when upstream would run the one at a place."""
        number = self.order[np.ravel_multi_index(place, self.grid)]
        self.program = int(number) + 1
        return tuple(map(int, np.unravel_index(number, self.grid)))

    def fail(self, message: str) -> None:
        """Raise GuardError, saying where."""
        at = self._name(self.program)
        raise GuardError(f"{self.kernel}, {at} (order by seed {self.seed}): {message}")

    def _name(self, program: int) -> str:
        if program == MANY:
            return "several programs"
        return f"program {tuple(map(int, np.unravel_index(program - 1, self.grid)))}"

    def touch(self, verb: str, pointers: Any, mask: Array) -> tuple[_Region, Array]:
        """The region that pointers lie in and their cells in it; fails where they lie outside."""
        region: _Region | None = pointers.attr.get("region")
        if region is None:
            raise GuardError(f"{self.kernel}: it is not known which tensor a pointer points into")
        addresses, chosen = np.broadcast_arrays(pointers.data, mask)
        addresses = addresses.ravel() if chosen.all() else addresses[chosen]
        width_bytes = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        cells = region.memory.cells_of(addresses, width_bytes)
        inside = region.own[cells]
        if not inside.all():
            lane = int(np.argmin(inside)) * addresses.size // inside.size
            offset = int(addresses[lane]) - region.start
            self.fail(
                f"{verb} out of bounds of {region.name} {region.shape}: "
                f"{np.count_nonzero(~inside)} of {inside.size} elements, "
                f"the first {offset} bytes from its start"
            )
        return region, cells

    def _meet(self, owners: Array, deed: str, region: _Region) -> None:
        others = _others(owners, self.program)
        if others.size:
            self.fail(f"race: {deed} of {region.name} by {self._name(int(others[0]))}")

    def load(self, pointers: Any, mask: Array) -> None:
        region, cells = self.touch("load", pointers, mask)
        memory = region.memory
        if memory.written:
            self._meet(memory.stored[cells], "reads an element that was written", region)
            self._meet(memory.updated[cells], "reads an element that was updated", region)
        readers = memory.read[cells]
        if (readers != self.program).any():
            memory.read[cells] = _joined(readers, self.program)

    def store(self, pointers: Any, mask: Array) -> None:
        region, cells = self.touch("store", pointers, mask)
        memory = region.memory
        memory.written = True
        self._meet(memory.stored[cells], "writes an element that was written", region)
        self._meet(memory.updated[cells], "writes an element that was updated", region)
        self._meet(memory.read[cells], "writes an element that was read", region)
        memory.stored[cells] = self.program

    def update(self, pointers: Any, mask: Array, operation: int) -> None:
        """An atomic one: programs may share an element by one operation that commutes."""
        region, cells = self.touch("atomic", pointers, mask)
        memory = region.memory
        memory.written = True
        self._meet(memory.stored[cells], "updates an element that was written", region)
        self._meet(memory.read[cells], "updates an element that was read", region)
        clash = (operation == 0) | (memory.operation[cells] != operation)
        deed = "updates, in a way whose result depends on the order, an element that was updated"
        self._meet(np.where(clash, memory.updated[cells], 0), deed, region)
        memory.updated[cells] = _joined(memory.updated[cells], self.program)
        memory.operation[cells] = operation

    def settle(self, pointers: Any, value: Any, mask: Array) -> None:
        """Fail unless a store left its value: two lanes of it may have met."""
        kind = upstream._get_np_dtype(pointers.get_element_ty())
        if kind != value.data.dtype:
            return
        wanted = np.ascontiguousarray(value.data)
        left = upstream._interpreter.load(pointers.data, mask, wanted, kind)
        if wanted.tobytes() != left.tobytes():
            name = pointers.attr["region"].name
            self.fail(f"race: one store writes different values to one element of {name}")


def _undefined(pointers: Any) -> Any:
    """What a load gives where its mask is false and it has no ``other``."""
    dtype = pointers.get_element_ty()
    kind = upstream._get_np_dtype(dtype)
    if dtype == tl.bfloat16:
        value: Any = 0x7FC0
    elif dtype in FP8:
        value = 0x7F
    elif kind.kind == "f":
        value = np.nan
    else:
        value = FAR_OFF if kind.itemsize > 2 else 0x5A
    return Handle(np.full(pointers.data.shape, value, kind), dtype)


def _overflow(watch: Watch, left: Any, right: Any, operation: Any) -> None:
    dtype = left.type.scalar
    if dtype.is_int_unsigned() or dtype.int_bitwidth >= 64:
        return
    a, b = (each.handle.data.astype(np.int64) for each in (left, right))
    exact = _EXACTLY[operation.__name__](a, b)
    limit = 1 << (dtype.int_bitwidth - 1)
    if exact.size and (exact.max() >= limit or exact.min() < -limit):
        watch.fail(f"{operation.__name__} overflows {dtype}")


def _cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _truth(mask: Any) -> Array:
    return np.asarray(mask.data)


def _memory_hooks(watch: Watch) -> dict[str, Any]:
    """What stands in for the builder's accesses."""
    load, store = Builder.create_masked_load, Builder.create_masked_store
    update, swap = Builder.create_atomic_rmw, Builder.create_atomic_cas

    def masked_load(
        self: Any, pointers: Any, mask: Any, other: Any, *rest: Any, **named: Any
    ) -> Any:
        chosen = _truth(mask)
        watch.load(pointers, chosen)
        if other is None and not chosen.all():
            other = _undefined(pointers)
        return load(self, pointers, mask, other, *rest, **named)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        watch.store(pointers, _truth(mask))
        done = store(self, pointers, value, mask, *rest)
        watch.settle(pointers, value, _truth(mask))
        return done

    def atomic(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        watch.update(pointers, _truth(mask), _COMMUTING.get(operation, 0))
        return update(self, operation, pointers, value, mask, *rest)

    def compare_and_swap(self: Any, pointers: Any, *rest: Any) -> Any:
        watch.update(pointers, np.ones(1, np.bool_), 0)
        return swap(self, pointers, *rest)

    return {
        "create_masked_load": masked_load,
        "create_masked_store": masked_store,
        "create_atomic_rmw": atomic,
        "create_atomic_cas": compare_and_swap,
    }


def _deriving(name: str) -> Any:
    """A builder's method whose result points where its pointer argument does."""
    before = getattr(Builder, name)

    def derive(self: Any, *arguments: Any) -> Any:
        made = before(self, *arguments)
        for each in arguments:
            if "region" in getattr(each, "attr", ()):
                made.attr["region"] = each.attr["region"]
        return made

    return derive


_DESCRIPTOR = upstream.TensorDescHandle
_materialize = _DESCRIPTOR.materialize_pointers


def _described(self: Any, offsets: Any) -> Any:
    """The pointers of a tensor descriptor's block: they point where its tensor is."""
    pointers, mask = _materialize(self, offsets)
    if "region" in self.base.attr:
        pointers.attr["region"] = self.base.attr["region"]
    return pointers, mask


def _launch_hooks(watch: Watch) -> dict[Any, dict[str, Any]]:
    """What stands in for upstream's handling of a launch: its arguments, its grid, its errors."""
    executor = upstream.GridExecutor
    take, call, convert = executor._init_args_hst, executor.__call__, upstream._implicit_cvt
    set_grid, set_place = Builder.set_grid_dim, Builder.set_grid_idx

    def take_arguments(self: Any, positional: Any, named: dict[str, Any]) -> Any:
        arguments, keywords = taken = take(self, positional, named)
        found: dict[str, Any] = {}
        for name, each in (*zip(self.arg_names, arguments, strict=False), *keywords.items()):
            found |= _tensors_in(each, name)
        watch.begin(self.fn.__name__, found)
        return taken

    def convert_argument(argument: Any) -> Any:
        made = convert(argument)
        if id(argument) in watch.regions and hasattr(argument, "data_ptr"):
            made.handle.attr["region"] = watch.regions[id(argument)]
        return made

    def lay_out(self: Any, *grid: int) -> None:
        set_grid(self, *grid)
        watch.lay_out(grid)

    def step(self: Any, *place: int) -> None:
        set_place(self, *watch.step(place))

    def launch(self: Any, *positional: Any, **named: Any) -> Any:
        try:
            return call(self, *positional, **named)
        except upstream.InterpreterError as error:
            cause = _cause(error)
            raise (cause if isinstance(cause, GuardError) else error) from cause
        finally:
            watch.regions = {}

    return {
        executor: {"_init_args_hst": take_arguments, "__call__": launch},
        upstream: {"_implicit_cvt": convert_argument},
        Builder: {"set_grid_dim": lay_out, "set_grid_idx": step},
    }


@contextmanager
def guarded(seed: int | None = 0) -> Iterator[Watch]:
    """Watch every launch meanwhile; programs run in an order drawn from ``seed``, or as upstream.

    Raises:
        GuardError: from a launch, as the module says.
        RuntimeError: within another such context.
    """
    if Builder.set_grid_idx is not _set_place:
        raise RuntimeError("kernels are already guarded: reseed that guard")
    watch = Watch(seed)
    changes: list[tuple[Any, dict[str, Any]]] = [
        *_launch_hooks(watch).items(),
        (Builder, _memory_hooks(watch)),
        (Builder, {name: _deriving(name) for name in _DERIVING}),
        (_DESCRIPTOR, {"materialize_pointers": _described}),
        (
            TritonSemantic,
            {"binary_op_sanitize_overflow_impl": lambda _, *each: _overflow(watch, *each)},
        ),
    ]
    with ExitStack() as stack:
        for owner, members in changes:
            for name, value in members.items():
                stack.enter_context(mock.patch.object(owner, name, value))
        yield watch
