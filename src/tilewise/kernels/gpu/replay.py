"""Launches of a call that came before in the same form, made again without their host code.

What the host works out for a pass (blocks, constants, grids, strides, and in Triton the choice of
the compiled kernel) depends on dtypes, sizes, strides and alignment of tensors, and never on their
values. So ``Replays`` works it out once for each form of a call. Later calls of this form hand new
addresses to the compiled kernels. Host code must therefore do nothing but make launches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from tilewise.kernels import gpu
from tilewise.kernels.gpu import Launch

_MOST = 32  # forms of calls that one plan remembers
_ALIGNED = 16  # bytes: Triton compiles for addresses that are multiples of it, and for others
_Made = TypeVar("_Made", bound=tuple[Tensor, ...])


class _Slot(NamedTuple):
    """An address in the place of a tensor: bytes after the beginning of a tensor by number."""

    tensor: int
    offset: int


class _Rows(NamedTuple):
    """A tensor descriptor in the place of one: where its tensor begins, and the rest of it."""

    slot: _Slot
    descriptor: Any


class _Address:
    """The tensor of a descriptor, of which the launcher asks the address and nothing else."""

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


_MOVING = (_Slot, _Rows, list)  # what is filled in each replay


class _Step(NamedTuple):
    """A launch of a compiled kernel.

    Args:
        start: launches the kernel on its grid.
        arguments: all of them in order, constexprs too.
        moving: numbers of those in which there are slots.
    """

    start: Callable[..., None]
    arguments: list[Any]
    moving: list[int]


class _Renewal(NamedTuple):
    """What ``renewed`` was called with, the sources as numbers of given tensors."""

    make: Callable[..., tuple[Tensor, ...]]
    sources: list[int | None]
    how: tuple[Hashable, ...]


class _Replay(NamedTuple):
    """The steps of a call, and what they need beyond the given tensors.

    Args:
        steps: in order.
        scratch: the bytes of each tensor of ``scratch``.
        renewals: what makes the tensors of ``renewed``.
        form: of these tensors. The steps hold for no other.
    """

    steps: list[_Step]
    scratch: list[int]
    renewals: list[_Renewal]
    form: list[Hashable]


class _Notes(NamedTuple):
    """Tensors that host code makes for itself: scratch memory, and those of ``renewed``.

    The latter by their arguments, which are a part of each value.
    """

    scratch: list[Tensor]
    renewed: dict[Hashable, tuple[Any, ...]]


_NOTED: ContextVar[_Notes | None] = ContextVar("tilewise_notes", default=None)


def scratch(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return memory for what one launch of a call leaves to the next: of any values, like a tensor.

    Tensors that host code makes in any way but this and ``renewed`` keep a call from being
    replayed.
    """
    made = like.new_empty(shape)
    noted = _NOTED.get()
    if noted is not None:
        noted.scratch.append(made)
    return made


def renewed(
    make: Callable[..., _Made], sources: tuple[Tensor | None, ...], *how: Hashable
) -> _Made:
    """Return ``make(sources, *how)``, which each later call of this form makes again, or finds.

    Args:
        make: returns a tuple of tensors. What it is depends on nothing but the arguments. Sizes,
            strides and dtypes of what it returns depend on no values.
        sources: tensors that the call was given, or None.
        how: further arguments. A replay keeps them, so no tensors are among them.
    """
    noted = _NOTED.get()
    if noted is None:
        return make(sources, *how)
    key = make, tuple([id(each) for each in sources]), how
    if key not in noted.renewed:
        noted.renewed[key] = make(sources, *how), make, sources, how
    found: _Made = noted.renewed[key][0]
    return found


class Replays:
    """The forms of calls of one plan that came before."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Replay] = {}

    def run(
        self,
        place: Hashable,
        given: Iterable[Any],
        launches: Callable[[], list[Launch]],
    ) -> None:
        """Run the launches of a call.

        Args:
            place: what they depend on besides what is given.
            given: tensors, tuples of tensors, and values that the launches depend on. Every tensor
                that the launches read or write is among them, or comes from ``scratch`` or
                ``renewed``.
            launches: makes them, with the host code of the pass.
        """
        tensors: list[Tensor] = []
        form: list[Hashable] = [place]
        _take(given, tensors, form)
        form.append(tensors[0].device)  # a compiled kernel is loaded on one device
        addresses = [tensor.data_ptr() for tensor in tensors]
        # Some host code asks whether two tensors begin at one place, as in a latent cache.
        form += [(address % _ALIGNED, addresses.index(address)) for address in addresses]
        key = tuple(form)
        replay = self._known.get(key)
        if replay is not None and _replay(replay, addresses, tensors):
            return
        noted = _Notes([], {})
        before = _NOTED.set(noted)
        try:
            made = launches()
        finally:
            _NOTED.reset(before)
        replay = _recorded(made, gpu.run(made), tensors, noted)
        if replay is not None:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[key] = replay


def _take(given: Iterable[Any], tensors: list[Tensor], form: list[Hashable]) -> None:
    """Sort what is given into tensors and what the form of a call says of them."""
    for each in given:
        if isinstance(each, Tensor):
            form.append((each.dtype, each.shape, each.stride()))
            tensors.append(each)
        elif type(each) is tuple:
            form.append(len(each))
            _take(each, tensors, form)
        else:
            form.append(each)


def _form_of(made: Iterable[Tensor]) -> list[Hashable]:
    """Return what compiled kernels and their numbers depend on of tensors of ``renewed``."""
    return [(x.dtype, x.shape, x.stride(), x.data_ptr() % _ALIGNED) for x in made]


def _replay(replay: _Replay, addresses: list[int], tensors: Sequence[Tensor]) -> bool:
    """Launch the steps with these addresses, or return False: what is renewed has another form.

    Scratch memory and renewed tensors live until all steps are launched.
    """
    made = [
        tensor
        for make, sources, how in replay.renewals
        for tensor in make(tuple([None if at is None else tensors[at] for at in sources]), *how)
    ]
    if made and _form_of(made) != replay.form:
        return False
    rooms = [
        torch.empty(size, dtype=torch.uint8, device=tensors[0].device) for size in replay.scratch
    ]
    addresses += [room.data_ptr() for room in (*rooms, *made)]
    for start, arguments, moving in replay.steps:
        filled = arguments.copy()
        for at in moving:
            filled[at] = _filled(arguments[at], addresses)
        start(*filled)
    return True


def _filled(argument: Any, addresses: Sequence[int]) -> Any:
    """Put addresses in the place of slots."""
    kind = type(argument)
    if kind is _Slot:
        return addresses[argument[0]] + argument[1]
    if kind is list:
        return tuple([_filled(each, addresses) for each in argument])
    if kind is _Rows:
        slot, descriptor = argument
        return _with_base(descriptor, _Address(addresses[slot[0]] + slot[1]))
    return argument


def _with_base(descriptor: Any, base: Any) -> Any:
    """Return a tensor descriptor of other memory; its own checks were made for the first."""
    made = object.__new__(type(descriptor))
    made.__dict__.update(descriptor.__dict__)
    made.base = base
    return made


class _Known:
    """The tensors of a call, and where its arguments lie in them.

    Args:
        tensors: as slots number them.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.places = {id(tensor): number for number, tensor in enumerate(tensors)}
        self._owners: dict[int, list[int]] = {}
        for number, tensor in enumerate(tensors):
            self._owners.setdefault(tensor.untyped_storage()._cdata, []).append(number)

    def slotted(self, argument: Any) -> Any:
        """Put slots in the place of tensors; LookupError or ValueError if one is unknown."""
        if isinstance(argument, Tensor):
            number = self.places.get(id(argument))
            if number is None:  # a view
                owners, start = self._owners[argument.untyped_storage()._cdata], argument.data_ptr()
                # Of several in one memory, as parts of qkv, it is of one that begins where it does.
                (number,) = [n for n in owners if self.tensors[n].data_ptr() == start][:1] or owners
            return _Slot(number, argument.data_ptr() - self.tensors[number].data_ptr())
        if isinstance(argument, tuple):
            parts = [self.slotted(each) for each in argument]
            return parts if any(type(each) in _MOVING for each in parts) else argument
        if hasattr(argument, "block_shape"):  # a tensor descriptor
            return _Rows(self.slotted(argument.base), _with_base(argument, None))
        if argument is None or isinstance(argument, int | float | str):
            return argument
        raise LookupError


def _recorded(
    launches: Sequence[Launch],
    kernels: Sequence[Any],
    tensors: Sequence[Tensor],
    noted: _Notes,
) -> _Replay | None:
    """Return how to make these launches again; None if they have an argument of unknown origin.

    None as well in the interpreter, which compiles nothing, and where a tensor was given twice:
    it would be open which of both an argument is.
    """
    made = [tensor for found, *_ in noted.renewed.values() for tensor in found]
    known = _Known([*tensors, *noted.scratch, *made])
    if len(known.places) < len(known.tensors):
        return None
    renewals = []
    for _, make, sources, how in noted.renewed.values():
        numbers = [None if each is None else known.places.get(id(each)) for each in sources]
        if any(
            each is not None and (at is None or at >= len(tensors))
            for each, at in zip(sources, numbers, strict=True)
        ):
            return None  # a source that is not given
        renewals.append(_Renewal(make, numbers, how))
    steps = []
    for one, kernel in zip(launches, kernels, strict=True):
        if not all(one.grid):
            continue
        if kernel is None:
            return None
        try:
            moved = {name: known.slotted(each) for name, each in one.arguments.items()}
        except (LookupError, ValueError):
            return None
        named = one.constants | moved
        arguments = [named[name] for name in one.kernel.arg_names]
        grid = (*one.grid, 1, 1)[:3]
        moving = [i for i, each in enumerate(arguments) if type(each) in _MOVING]
        steps.append(_Step(kernel[grid], arguments, moving))
    return _Replay(steps, [room.nbytes for room in noted.scratch], renewals, _form_of(made))
