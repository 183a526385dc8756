"""Emulates the Gluon kernels for Hopper and Blackwell: their own Python source, in numpy.

Gluon has no interpreter. Here the source of a kernel and of all functions that it calls runs with
stand-ins for ``gl``, ``tl`` and the instructions of both chips. Each partition of
``warp_specialize`` is an actor. One actor runs at a time. At each instruction that others can
notice, a seed decides who runs next, so every run can be repeated.

What the chip may do at any time happens at a random time:

* a copy into shared memory makes its destination NaN when it is issued, and lands later;
* an asynchronous product reads its operands when it is issued, or when a wait finishes it;
* products into tensor memory, and what arrives after them, run one after the other. Each reads its
  operands when it starts or when it ends, and its result is NaN between;
* a copy out of shared memory reads it when it is issued, or when a wait finishes it. It writes or
  adds at some time after, at the latest when the kernel waits for that.

Programs run one after the other, or several at the same time: then those that wait for one another
by integers in memory meet in every order.

So a missing wait, an early release or a wrong phase shows as NaN, as wrong numbers or as an
``EmulatorError``, which is raised where

* no actor can go on, or a barrier gets more arrivals than it counts;
* a product is used before a wait has finished it;
* the copy engine or a product reads what was stored without a fence since;
* an actor ends with products or copies under way;
* a load or a store goes beyond its tensor.

Not modelled: the order of accesses that fences and atomics ask for, layouts, registers, the
threads of a warp, the order of sums in a product, and approximate exponentials. The compiler checks
layouts.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import triton.language as tl
from numpy.lib.mixins import NDArrayOperatorsMixin
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import blackwell, hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.kernels.gpu.floats import Array
from tilewise.kernels.gpu import Launch
from tilewise.kernels.gpu.walk.groups import (
    async_atomic_add,
    async_load,
    async_store,
    rows_layout,
    taken_as,
)

_NARROW = {
    gl.bfloat16: torch.bfloat16,
    gl.float16: torch.float16,
    gl.float8e4nv: torch.float8_e4m3fn,
}
_WIDE = {gl.float32: np.float32, gl.int32: np.int32, gl.int64: np.int64, gl.int1: np.bool_}
_DTYPES = {np.dtype(numpy_kind): kind for kind, numpy_kind in _WIDE.items()}
_LATE = 0.25  # the share of all that happens that is put off as long as anything else can happen

_LAYOUT = SimpleNamespace()  # any layout
_LAYOUT.parent = _LAYOUT


class EmulatorError(AssertionError):
    """A kernel did what it must not do on a chip."""


class _StoppedError(Exception):
    """Ends an actor after the fault of another."""


# ---- values --------------------------------------------------------------------------------------


def _quotient(a: Array, b: Array) -> Array:
    return (a - np.fmod(a, b)) // b


# Integers are divided as in C.
_INSTEAD: dict[Any, Any] = {np.floor_divide: _quotient, np.remainder: np.fmod}


class Block(NDArrayOperatorsMixin):
    """A tensor or a number of a kernel; narrower types are float32 that fit."""

    def __init__(self, data: Any, dtype: Any = None) -> None:
        self._data = np.asarray(data)
        self.dtype = dtype or _DTYPES[self._data.dtype]
        self.type = SimpleNamespace(layout=_LAYOUT)

    @property
    def data(self) -> Array:
        return self._data

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None) -> Block:
        # ``out`` is that of ``+=``: blocks do not change, it makes a new one.
        return Block(_INSTEAD.get(ufunc, ufunc)(*[_wide(each) for each in inputs]))

    def __getitem__(self, key: Any) -> Block:
        return Block(self.data[key], self.dtype)

    def __index__(self) -> int:
        return int(self.data)

    def __bool__(self) -> bool:
        return bool(self.data)

    def reshape(self, shape: Sequence[int]) -> Block:
        return Block(self.data.reshape(shape), self.dtype)

    def permute(self, order: Sequence[int]) -> Block:
        return Block(self.data.transpose(order), self.dtype)

    def to(self, dtype: Any) -> Block:
        """Round to a narrow type, or cast to another."""
        if dtype in _NARROW:
            rounded = torch.from_numpy(np.ascontiguousarray(self.data)).to(_NARROW[dtype])
            return Block(rounded.float().numpy(), dtype)
        return Block(self.data.astype(_WIDE[dtype]))


def _wide(value: Any) -> Any:
    """The numbers of an operand of arithmetic; blocks of narrow types are none."""
    if not isinstance(value, Block):
        return value
    if value.dtype in _NARROW:
        raise NotImplementedError(f"arithmetic in {value.dtype}")
    return value.data


class Product(Block):
    """An asynchronous product: its numbers are there once a wait has finished it."""

    def __init__(self, finish: Callable[[], Array]) -> None:
        super().__init__(np.float32(0))
        self.finish = finish
        self.finished = False

    @property
    def data(self) -> Array:
        if not self.finished:
            raise EmulatorError("a product is used before a wait finished it")
        return self._data

    def complete(self) -> None:
        """Compute it."""
        self._data, self.finished = self.finish(), True


class Pointer:
    """A place in a tensor, or a block of places, counted in elements."""

    def __init__(self, memory: Array, places: Any, dtype: Any) -> None:
        self.memory, self.places, self.dtype = memory, places, dtype

    @classmethod
    def into(cls, tensor: Tensor) -> Pointer:
        """Point at the first element of a tensor."""
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        extent = 1 + sum((size - 1) * stride for size, stride in steps)
        flat = tensor.detach().as_strided((extent,), (1,))
        dtype = next((kind for kind in _NARROW if _NARROW[kind] == tensor.dtype), None)
        memory = flat.numpy() if dtype is None else flat.float().numpy()
        return cls(memory, Block(np.int64(0)), dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.places + offset, self.dtype)

    def __sub__(self, offset: Any) -> Pointer:
        return self + -offset

    def chosen(self, mask: Any) -> tuple[Array, Array]:
        """Return the places and the mask, of one shape; fail where a place is beyond the tensor."""
        places, mask = np.broadcast_arrays(self.places.data, True if mask is None else mask.data)
        inside = (places >= 0) & (places < self.memory.size)
        if not (inside | ~mask).all():
            raise EmulatorError("a load or a store beyond its tensor")
        return places, mask


def _load(pointer: Pointer, mask: Any = None, other: Any = None) -> Block:
    places, mask = pointer.chosen(mask)
    found = np.full(places.shape, np.nan if other is None else other, pointer.memory.dtype)
    found[mask] = pointer.memory[places[mask]]
    return Block(found, pointer.dtype)


def _store(pointer: Pointer, value: Block, mask: Any = None) -> None:
    if pointer.dtype is not None:
        raise NotImplementedError(f"a store of {pointer.dtype}: its memory is a copy")
    places, mask = pointer.chosen(mask)
    pointer.memory[places[mask]] = np.broadcast_to(value.data, places.shape)[mask]


# ---- shared memory and barriers ------------------------------------------------------------------


class Ring:
    """Places of shared memory, or barriers."""

    def __init__(self, places: Sequence[Any], dtype: Any) -> None:
        self.places, self.dtype = places, dtype

    def index(self, place: Any) -> Any:
        if not 0 <= int(place) < len(self.places):
            raise EmulatorError(f"place {int(place)} of a ring of {len(self.places)}")
        return self.places[int(place)]


class Shared:
    """A place of shared memory, or a view of one."""

    def __init__(self, array: Array, dtype: Any, stage: Stage) -> None:
        self.array, self.dtype, self.stage = array, dtype, stage

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        part = (slice(None),) * dim + (slice(start, start + length),)
        return Shared(self.array[part], self.dtype, self.stage)

    def reshape(self, shape: Sequence[int]) -> Shared:
        return Shared(self.array.reshape(shape), self.dtype, self.stage)

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.array.transpose(order), self.dtype, self.stage)

    def load(self, layout: Any) -> Block:
        return Block(self.array.copy(), self.dtype)

    def store(self, values: Block) -> None:
        if values.dtype != self.dtype:
            raise TypeError(f"{values.dtype} is stored as {self.dtype}")
        assert self.stage.actor is not None
        self.stage.actor.unfenced.append(self.array)
        self.array[...] = values.data

    def read(self) -> Array:
        """Read as the copy engine and products do: they see no store without a fence after it."""
        for actor in self.stage.actors:
            if any(np.may_share_memory(self.array, stored) for stored in actor.unfenced):
                raise EmulatorError(f"{actor.name} stored without a fence to what is read")
        return self.array.copy()


class TensorMemory:
    """A place of tensor memory, or a part of its columns, of 32 bits each.

    ``bits`` are bytes [rows, columns * 4]: what is of another type lies in the same columns.
    """

    def __init__(self, bits: Array, dtype: Any, stage: Stage) -> None:
        self.bits, self.dtype, self.stage = bits, dtype, stage

    def slice(self, start: int, length: int) -> TensorMemory:
        size = self.bits.shape[1] // self.numbers.shape[1]
        part = self.bits[:, start * size : (start + length) * size]
        return TensorMemory(part, self.dtype, self.stage)

    @property
    def numbers(self) -> Array:
        bits = self.bits.copy()
        if self.dtype not in _NARROW:
            return bits.view(_WIDE[self.dtype])
        return torch.from_numpy(bits.view(np.int16)).view(_NARROW[self.dtype]).float().numpy()

    def write(self, values: Array) -> None:
        """Write numbers that fit the type."""
        values = np.ascontiguousarray(values, np.float32)
        if self.dtype in _NARROW:
            narrow = torch.from_numpy(values).to(_NARROW[self.dtype])
            values = narrow.view(torch.int16).numpy()
        self.bits[...] = values.view(np.uint8).reshape(self.bits.shape)

    def load(self, layout: Any) -> Block:
        self.stage.pause()
        return Block(self.numbers, self.dtype)

    def store(self, values: Block) -> None:
        if values.dtype != self.dtype:
            raise TypeError(f"{values.dtype} is stored as {self.dtype}")
        self.stage.pause()
        self.write(values.data)


class Barrier:
    """An mbarrier: a phase ends after ``count`` arrivals, when all expected bytes have landed."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phases = 0

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def arrive(self, count: int = 1, expected: int = 0) -> None:
        if self.pending < count:
            raise EmulatorError("a barrier gets more arrivals than it counts")
        self.pending -= count
        self.land(-expected)

    def land(self, size: int) -> None:
        """Count bytes that have landed."""
        self.bytes -= size
        if self.pending == self.bytes == 0:
            self.phases += 1
            self.pending = self.count

    def ended(self, parity: Any) -> bool:
        """Whether the phase of this parity has ended: the one before the present."""
        return self.phases & 1 != int(parity)


class Descriptor:
    """A tensor descriptor: boxes of a tensor, beyond which there are zeros."""

    def __init__(self, given: TensorDescriptor) -> None:
        self.tensor = given.base.detach().as_strided(given.shape, given.strides)
        narrow = [kind for kind in _NARROW if _NARROW[kind] == given.base.dtype]
        self.dtype = narrow[0] if narrow else gl.float32
        self.layout = _LAYOUT
        self.shape = tuple(given.block_shape)
        nbytes = int(np.prod(self.shape)) * given.base.dtype.itemsize
        self.block_type = SimpleNamespace(shape=self.shape, nbytes=nbytes)

    def _box(self, place: Sequence[Any]) -> tuple[slice, ...]:
        starts = [int(each) for each in place]
        if min(starts) < 0:
            raise NotImplementedError("a box that begins before its tensor")
        return tuple(slice(at, at + size) for at, size in zip(starts, self.shape, strict=True))

    def load(self, place: Sequence[Any]) -> Array:
        found = self.tensor[self._box(place)].float().numpy()
        room = [(0, size - there) for size, there in zip(self.shape, found.shape, strict=True)]
        return np.pad(found, room)

    def store(self, place: Sequence[Any], values: Array, add: bool) -> None:
        target = self.tensor[self._box(place)]
        there = tuple(slice(size) for size in target.shape)
        new = torch.from_numpy(values)[there]
        target.copy_(target + new if add else new)


# ---- actors --------------------------------------------------------------------------------------


def _at_once() -> bool:
    return True


class Actor:
    """A program, or a partition of its warps: a thread that runs when it is its turn.

    Args:
        name: for messages.
        program: of which it is a partition; None for a program.
        place: of the program in the grid.
    """

    def __init__(self, name: str, program: Actor | None, place: Sequence[int]) -> None:
        self.name, self.program, self.place = name, program or self, place
        self.turn = threading.Lock()
        self.turn.acquire()
        self.ready: Callable[[], bool] = _at_once
        self.late = False
        self.ended = False
        self.unfenced: list[Array] = []  # where it has stored since its last fence
        self.products: list[Product] = []
        self.stores: list[Callable[[], None]] = []
        self.writes: list[Landing] = []
        self.looked: dict[int, int] = {}  # what an integer in memory was when it looked last


class Landing(NamedTuple):
    """A copy that is under way; ``program`` is whose shared memory it goes to."""

    finish: Callable[[], None]
    late: bool
    program: Actor | None


class Stage:
    """Runs actors in turn; copies land between.

    Args:
        chance: decides.
        slots: programs at the same time.
    """

    def __init__(self, chance: random.Random, slots: int) -> None:
        self.chance, self.slots = chance, slots
        self.actors: list[Actor] = []
        self.actor: Actor | None = None  # whose turn it is
        self.landings: list[Landing] = []
        self.queues: dict[Actor, list[Landing]] = {}  # of matrix units, what is to run after that
        self.fault: BaseException | None = None

    def play(self, program: Callable[[], None], places: Sequence[Sequence[int]]) -> None:
        """Run the programs of these places, until all have ended; they start in this order."""
        waiting = list(places)
        done = threading.Event()

        def go_on() -> None:
            running = sum(not actor.ended for actor in self.actors if actor.program is actor)
            for place in waiting[: self.slots - running]:
                waiting.remove(place)
                self._start(Actor(f"program {place}", None, place), whole, ())

        def whole() -> None:
            program()
            own = self.actor
            if any(landing.program is own for landing in self.landings):
                raise EmulatorError("a copy lands after the program has ended")

        self._go_on, self._done = go_on, done
        self._hand_on()
        done.wait()
        if self.fault is not None:
            raise self.fault

    def part(self, parts: Sequence[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
        """Run functions with their arguments at the same time, as partitions of a program."""
        program = self.actor
        assert program is not None
        partitions = []
        for number, (function, given) in enumerate(parts):
            name = f"{function.__name__} {number} of {program.name}"
            partitions.append(Actor(name, program, program.place))
            self._start(partitions[-1], function, given)
        self.pause(lambda: all(actor.ended for actor in partitions))

    def _start(self, actor: Actor, function: Callable[..., None], given: tuple[Any, ...]) -> None:
        self.actors.append(actor)
        threading.Thread(target=self._act, args=(actor, function, given), daemon=True).start()

    def pause(self, ready: Callable[[], bool] = _at_once) -> Actor:
        """Let others run until ``ready``; the actor whose turn it is."""
        actor = self.actor
        assert actor is not None
        actor.ready, actor.late = ready, self._is_late()
        self._hand_on()
        self._await(actor)
        return actor

    def land(self, finish: Callable[[], None], shared: bool) -> Landing:
        """Let a copy land at some time, in shared memory or elsewhere."""
        actor = self.actor
        assert actor is not None
        landing = Landing(finish, self._is_late(), actor.program if shared else None)
        self.landings.append(landing)
        return landing

    def queue(self, steps: Sequence[Callable[[], None]]) -> None:
        """Let the matrix unit of a program take these steps after all that it was given before."""
        actor = self.actor
        assert actor is not None
        queue = self.queues.setdefault(actor.program, [])
        for step in steps:
            queue.append(Landing(step, self._is_late(), actor.program))
            if len(queue) == 1:
                self.landings.append(queue[0])

    def finish(self, landing: Landing) -> None:
        """Let a copy land now, if it has not, or the matrix unit take its next step."""
        if landing in self.landings:
            self.landings.remove(landing)
            landing.finish()
            queue = self.queues.get(landing.program) if landing.program else None
            if queue and queue[0] is landing:
                queue.pop(0)
                self.landings += queue[:1]

    def _is_late(self) -> bool:
        return self.chance.random() < _LATE

    def _await(self, actor: Actor) -> None:
        actor.turn.acquire()
        if self.fault is not None:
            raise _StoppedError
        self.actor = actor

    def _act(self, actor: Actor, function: Callable[..., None], given: tuple[Any, ...]) -> None:
        try:
            with np.errstate(all="ignore"):
                self._await(actor)
                function(*given)
                if actor.products or actor.stores:
                    raise EmulatorError(f"{actor.name} ends with products or stores under way")
                actor.ended = True
                self._hand_on()
        except _StoppedError:
            pass
        except BaseException as fault:
            self.fault = fault
            self._done.set()
            for other in self.actors:
                if other is not actor and not other.ended:
                    other.ended = True
                    other.turn.release()

    def _hand_on(self) -> None:
        """Choose an actor that can go on; copies land on the way."""
        self._go_on()
        while not all(actor.ended for actor in self.actors):
            able: list[Any] = [each for each in self.actors if not each.ended and each.ready()]
            able += self.landings
            if not able:
                waiting = [actor.name for actor in self.actors if not actor.ended]
                raise EmulatorError(f"deadlock of {', '.join(waiting)}")
            soon = [each for each in able if not each.late]
            # What lands late does so when no actor can go on without it.
            chosen = self.chance.choice(soon or [x for x in able if isinstance(x, Actor)] or able)
            if isinstance(chosen, Actor):
                chosen.turn.release()
                return
            self.finish(chosen)
        for landing in list(self.landings):
            self.finish(landing)
        self._done.set()


# ---- the chip ------------------------------------------------------------------------------------


def _counted(*bounds: Any) -> Iterator[Block]:
    """``range``, whose numbers are int32 as in a compiled loop."""
    return (Block(np.int32(number)) for number in range(*bounds))


def _along(reduce: Callable[..., Any]) -> Callable[..., Block]:
    """A reduction along an axis."""
    return lambda block, axis: Block(reduce(_wide(block), axis))


def _where(which: Any, one: Any, other: Any) -> Block:
    """A choice; numbers of Python's are float32, as in a kernel."""
    numbers = [np.float32(x) if isinstance(x, float) else _wide(x) for x in (one, other)]
    return Block(np.where(_wide(which), *numbers))


def _any_layout(*_: Any, **__: Any) -> Any:
    return _LAYOUT


class Chip:
    """Runs programs of a kernel; what stands in for all that its source names.

    Args:
        seed: of all that happens at random.
        slots: programs at the same time.
    """

    def __init__(self, seed: int, slots: int = 1) -> None:
        self.chance = random.Random(seed)
        self.stage = Stage(self.chance, slots)
        self.count = 0  # of the programs
        self.lifted: dict[Any, FunctionType] = {}
        language = self._language()
        self.stand_ins: dict[int, Any] = {
            id(gl): language,
            id(tl): language,
            id(hopper.mbarrier): SimpleNamespace(
                MBarrierLayout=lambda: Barrier,
                init=lambda barrier, count: barrier.init(count),
                expect=self._expect,
                arrive=self._arrive,
                wait=self._wait,
            ),
            id(hopper.tma): SimpleNamespace(store_wait=self._wait_for_stores),
            id(async_load): self._copy_in,
            id(async_store): self._copy_out,
            id(async_atomic_add): self._add_out,
            id(blackwell.allocate_tensor_memory): self._allocate_tensor_memory,
            id(blackwell.tcgen05_mma): self._multiply_in_turn,
            id(blackwell.tcgen05_commit): self._arrive_in_turn,
            id(blackwell.TensorMemoryLayout): _any_layout,
            id(rows_layout): _any_layout,
            id(taken_as): self._taken_as,
            id(hopper.fence_async_shared): self._fence,
            id(hopper.warpgroup_mma): self._multiply,
            id(hopper.warpgroup_mma_wait): self._wait_for_products,
        }

    def _language(self) -> SimpleNamespace:
        """What stands in for both ``gl`` and ``tl``."""
        return SimpleNamespace(
            **{name: getattr(gl, name) for name in ("float32", "int1", "int32", "int64")},
            program_id=lambda axis: Block(np.int32(self._actor().place[axis])),
            num_programs=lambda axis: Block(np.int32(self.count)),
            atomic_add=self._atomic_add,
            static_range=range,
            arange=lambda low, high, _=None: Block(np.arange(low, high, dtype=np.int32)),
            full=lambda shape, value, dtype, _=None: Block(np.full(shape, value, _WIDE[dtype])),
            cast=lambda value, dtype: Block(np.asarray(_wide(value)).astype(_WIDE[dtype])),
            broadcast_to=lambda block, shape: Block(np.broadcast_to(block.data, shape)),
            where=_where,
            maximum=np.fmax,  # as on the chip, a NaN gives way
            minimum=np.fmin,
            max=_along(np.fmax.reduce),
            sum=_along(np.sum),
            abs=np.abs,
            exp=np.exp,
            exp2=np.exp2,
            log=np.log,
            math=SimpleNamespace(exp2=np.exp2),
            load=_load,
            store=_store,
            convert_layout=lambda block, layout, assert_trivial=False: block,
            split=lambda block: (block[..., 0], block[..., 1]),
            join=lambda *parts: Block(np.stack([each.data for each in parts], -1)),
            float8e4nv=gl.float8e4nv,
            inline_asm_elementwise=self._assembly,
            allocate_shared_memory=self._allocate,
            warp_specialize=lambda parts, warps, registers: self.stage.part(parts),
            NVMMADistributedLayout=_any_layout,
            DotOperandLayout=_any_layout,
            SliceLayout=_any_layout,
            NVMMASharedLayout=SimpleNamespace(get_default_for=_any_layout),
        )

    def run(self, places: Sequence[Sequence[int]], kernel: Any, named: dict[str, Any]) -> None:
        """Run the programs at these places of the grid."""
        function = self.lift(kernel)
        self.count = len(places)
        self.stage.play(lambda: function(**named), places)

    def _actor(self) -> Actor:
        assert self.stage.actor is not None
        return self.stage.actor

    def lift(self, kernel: Any) -> FunctionType:
        """Return the Python function of a jit function, with stand-ins for what it names."""
        source = kernel.fn  # of which Triton's hash is no use here: it refuses interpreted callees
        if source not in self.lifted:
            names: dict[str, Any] = {"range": _counted}
            lifted = FunctionType(source.__code__, names, source.__name__, source.__defaults__)
            self.lifted[source] = lifted
            used = source.__globals__.keys() & set(source.__code__.co_names)
            names |= {name: self.stand_in(source.__globals__[name]) for name in used}
        return self.lifted[source]

    def stand_in(self, value: Any) -> Any:
        """Return what stands for a global name or a constant of a kernel."""
        if id(value) in self.stand_ins:
            return self.stand_ins[id(value)]
        if isinstance(value, tl.constexpr):
            return value.value
        if isinstance(value, ModuleType):
            functions = {name: each for name, each in vars(value).items() if hasattr(each, "fn")}
            return SimpleNamespace(**{name: self.lift(each) for name, each in functions.items()})
        return self.lift(value) if hasattr(value, "fn") else value

    def _allocate(self, dtype: Any, shape: Sequence[int], layout: Any) -> Ring:
        if layout is Barrier:
            return Ring([Barrier() for _ in range(shape[0])], dtype)
        nothing = np.full(shape, np.nan, np.float32)
        return Ring([Shared(place, dtype, self.stage) for place in nothing], dtype)

    def _allocate_tensor_memory(self, dtype: Any, shape: Sequence[int], layout: Any) -> Ring:
        nothing = np.full(shape, np.nan, np.float32).view(np.uint8)
        return Ring([TensorMemory(place, dtype, self.stage) for place in nothing], dtype)

    def _taken_as(self, memory: Ring, dtype: Any, shape: Sequence[int], layout: Any) -> Ring:
        places = [TensorMemory(each.bits, dtype, self.stage) for each in memory.places]
        if any(each.numbers.shape != tuple(shape[1:]) for each in places):
            raise EmulatorError(f"{places[0].numbers.shape} of tensor memory are taken as {shape}")
        return Ring(places, dtype)

    def _multiply_in_turn(
        self, left: Any, right: Shared, total: TensorMemory, *, use_acc: Any = True
    ) -> None:
        self.stage.pause()
        if left.dtype != right.dtype or left.dtype not in _NARROW:
            raise TypeError(f"a product of {left.dtype} and {right.dtype}")
        before = self.chance.random() < 0.5
        read: list[Array] = []

        def operands() -> list[Array]:
            return [x.read() if isinstance(x, Shared) else x.numbers for x in (left, right)]

        def start() -> None:
            own = total.numbers if use_acc else np.zeros_like(total.numbers)
            read.extend([own, *(operands() if before else ())])
            total.write(np.full_like(total.numbers, np.nan))

        def end() -> None:
            own, *given = read
            total.write(own + np.matmul(*(given or operands())))

        self.stage.queue([start, end])

    def _arrive_in_turn(self, barrier: Barrier) -> None:
        self.stage.pause()
        self.stage.queue([barrier.arrive])

    def _expect(self, barrier: Barrier, size: int) -> None:
        self.stage.pause()
        barrier.arrive(expected=size)

    def _arrive(self, barrier: Barrier, *, count: int = 1) -> None:
        self.stage.pause()
        barrier.arrive(count)

    def _wait(self, barrier: Barrier, phase: Any) -> None:
        self.stage.pause(lambda: barrier.ended(phase))

    def _copy_in(
        self, rows: Descriptor, place: Sequence[Any], barrier: Barrier, target: Shared
    ) -> None:
        self.stage.pause()
        values = rows.load(place)
        target.array[...] = np.nan

        def land() -> None:
            target.array[...] = values
            barrier.land(rows.block_type.nbytes)

        self.stage.land(land, shared=True)

    def _copy_out(
        self, rows: Descriptor, place: Sequence[Any], source: Shared, add: bool = False
    ) -> None:
        actor = self.stage.pause()

        def store() -> None:
            values = source.read()
            write = self.stage.land(lambda: rows.store(place, values, add), shared=False)
            actor.writes.append(write)

        if self.chance.random() < 0.5:
            store()
            actor.stores.append(lambda: None)
        else:
            actor.stores.append(store)

    def _add_out(self, rows: Descriptor, place: Sequence[Any], source: Shared) -> None:
        self._copy_out(rows, place, source, add=True)

    def _assembly(
        self, text: str, constraints: str, given: Sequence[Any], dtype: Any, **_: Any
    ) -> Any:
        """Assembly that waits for writes, orders instructions, or has to do with words of bytes."""
        if "e4m3x2" in text:
            four = torch.from_numpy(np.stack([each.data for each in given], -1))
            return Block(four.to(torch.float8_e4m3fn).view(torch.int32)[..., 0].numpy())
        if dtype in _NARROW:  # each word is given for each of its bytes
            words = given[0].data.reshape(-1, 4)
            assert (words == words[:, :1]).all()
            four = torch.from_numpy(words[:, 0].copy()).view(_NARROW[dtype])
            return Block(four.float().numpy().reshape(given[0].shape), dtype)
        if "wait_group 0" in text:
            actor = self.stage.pause()
            self._wait_for_stores(0)
            for write in actor.writes:
                self.stage.finish(write)
            actor.writes.clear()
        return given[0]

    def _atomic_add(self, pointer: Pointer, number: Any, sem: str, scope: str) -> Block:
        """Add to an integer; who adds nothing looks at it, again only when it has changed."""
        place, memory = int(pointer.places.data), pointer.memory
        if not 0 <= place < memory.size:
            raise EmulatorError("a load or a store beyond its tensor")
        looked = self._actor().looked
        look = int(number) == 0
        self.stage.pause(lambda: not look or looked.get(place) != int(memory[place]))
        before = int(memory[place])
        looked.pop(place, None)
        if look:
            looked[place] = before
        memory[place] += int(number)
        return Block(np.int32(before))

    def _wait_for_stores(self, running: int) -> None:
        actor = self.stage.pause()
        while len(actor.stores) > running:
            actor.stores.pop(0)()

    def _fence(self) -> None:
        if self.stage.actor is not None:
            self.stage.actor.unfenced.clear()

    def _multiply(
        self,
        left: Block | Shared,
        right: Shared,
        total: Block,
        use_acc: bool = True,
        is_async: bool = False,
    ) -> Block:
        actor = self.stage.pause()
        if left.dtype != right.dtype or left.dtype not in _NARROW:
            raise TypeError(f"a product of {left.dtype} and {right.dtype}")

        def operands() -> list[Array]:
            return [x.read() if isinstance(x, Shared) else x.data for x in (left, right)]

        early = operands() if self.chance.random() < 0.5 else None

        def finish() -> Array:
            product = np.matmul(*(early or operands()))
            return product + total.data if use_acc else product

        made = Product(finish)
        actor.products.append(made)
        return made if is_async else self._wait_for_products(0, [made])

    def _wait_for_products(self, running: int, deps: Sequence[Block]) -> Any:
        actor = self.stage.pause()
        while len(actor.products) > running:
            actor.products.pop(0).complete()
        found = tuple([Block(each.data) for each in deps])
        return found if len(found) > 1 else found[0]


def _argument(value: Any) -> Any:
    """Return an argument of a launch as a kernel sees it."""
    if isinstance(value, tuple):
        parts = [_argument(each) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, TensorDescriptor):
        return Descriptor(value)
    if isinstance(value, Tensor):
        return Pointer.into(value)
    if isinstance(value, int):
        return Block(np.int32(value))
    return Block(np.float32(value)) if isinstance(value, float) else value


def emulate(launch: Launch, seed: int, slots: int = 1) -> None:
    """Run a launch of a Gluon kernel; all that happens at random follows from the seed.

    Args:
        launch: of the kernel.
        seed: of all that happens at random.
        slots: programs at the same time, at most.

    Raises:
        EmulatorError: as the module says.
    """
    chip = Chip(seed, slots)
    named = {name: _argument(value) for name, value in launch.arguments.items()}
    named |= {name: chip.stand_in(value) for name, value in launch.constants.items()}
    places = list(np.ndindex(*launch.grid))
    chip.chance.shuffle(places)
    chip.run(places, launch.kernel, named)
