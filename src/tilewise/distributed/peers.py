"""Messages among the processes that share a sequence, with errors that say who is lost.

With the first message of a call all processes make the same call, or all of them raise. Its numbers
say whether a process has refused its call, and what the call is. Where these differ, or one has
refused, a second message says what each of them has. So all know, and nobody waits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import lru_cache
from itertools import chain
from queue import Empty, SimpleQueue
from threading import Thread
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.errors import InvalidArgument, TilewiseError, Unsupported

_FIRST_ERROR = "tilewise: the first error"  # in the store of a group
_STORE_S = 5.0  # for an answer of the store: its machine may be the one that is lost
_NO_TAG = 0x7469_6C65  # of messages that nobody sends
_LOOK_S = 1.0  # between two looks of who waits

T = TypeVar("T")


class LostPeer(TilewiseError):  # noqa: N818  reads as what is wrong
    """A process of the group did not answer: it ended, failed, or took longer than the timeout.

    Args:
        phase: what was exchanged.
        position: of the process that was waited for; None where torch does not say.
        rank: its number among all processes.
        reason: what torch says.
        first: what the first process that failed said, if that was another error than this one.
    """

    def __init__(
        self, phase: str, position: int | None, rank: int | None, reason: str, first: str = ""
    ) -> None:
        self.phase, self.position, self.rank, self.reason = phase, position, rank, reason
        self.first = first

    @property
    def what(self) -> str:
        """A sentence that says who did not answer, and when."""
        who = "a process" if self.rank is None else f"rank {self.rank} (position {self.position})"
        return f"{who} did not answer while {self.phase} were exchanged"

    def __str__(self) -> str:
        first = f"  the first error: {self.first}\n" if self.first else ""
        return (
            f"{self.what}\n{first}"
            f"  torch says: {self.reason}\n"
            "  fix: look for the first error among all processes, and start again from the last "
            "checkpoint; a slow process needs a longer timeout="
        )


class _Message(NamedTuple):
    """A message on its way, and whose it is; None of several at once."""

    work: dist.Work
    position: int | None


class Pending:
    """Messages on their way. They need their tensors until ``wait`` returns."""

    def __init__(
        self, peers: Peers, phase: str, messages: Sequence[_Message], device: torch.device
    ) -> None:
        self._peers, self._phase, self._messages = peers, phase, messages
        self._device = device

    def wait(self) -> None:
        """Wait for all of them, or raise ``LostPeer``."""
        for work, position in self._messages:
            try:
                self._peers.wait(work, self._device)
            except RuntimeError as error:
                raise self._peers.lost(self._phase, position, error) from error
        self._messages = ()


class Peers:
    """The processes that share a sequence.

    ``timeout`` is that of a message; None for the group's own.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta | None = None) -> None:
        self.group, self.timeout = group, timeout
        self.position = dist.get_rank(group)
        self.count = dist.get_world_size(group)
        self.groups = [self]  # those of this process in a call, which it leaves together

    def wait(self, work: dist.Work, device: torch.device) -> None:
        """Wait for a message of tensors of a device; RuntimeError where it does not come.

        A process that leaves closes its connections of gloo, and whoever waits for it gets an
        error. That news can be lost: under load a send or a receive then kept waiting (torch 2.13
        and 2.14), and nothing ends such a wait but the group's timeout. So another thread waits in
        gloo, and this one asks the group's store meanwhile whether somebody left.
        """
        arguments = () if self.timeout is None else (self.timeout,)
        # On a GPU a wait is a matter of this thread's stream.
        if device.type != "cpu" or "gloo" not in dist.get_backend_config(self.group):
            work.wait(*arguments)
            return
        waiter = _Waiter.free()
        waiter.give(lambda: work.wait(*arguments))
        looks = 0
        while not waiter.answered(_LOOK_S):
            looks += 1
            if looks > 1 and _somebody_left(self):
                _close(self)
                if not waiter.answered(_LOOK_S):  # it waits on, and keeps what it waits for
                    raise RuntimeError("a process left, and gloo does not end the wait for it")
                break
        waiter.result()

    def lost(self, phase: str, position: int | None, error: Exception) -> LostPeer:
        """Return the error for a message that failed, and leave: the others would wait too."""
        rank = None if position is None else dist.get_global_rank(self.group, position)
        found = LostPeer(phase, position, rank, " ".join(str(error).split()))
        first = self.leave(found.what)
        found.first = first if first != found.what else ""
        return found

    @contextmanager
    def together(self, unless: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Within the block, an error of this process ends the call on the others too.

        Errors in ``unless`` do not: all processes raise them.
        """
        try:
            yield
        except BaseException as error:
            if not isinstance(error, (LostPeer, *unless)):  # of LostPeer it has left already
                self.leave(f"rank {dist.get_rank()} raised {type(error).__name__}: {error}")
            raise

    def leave(self, why: str) -> str:
        """Leave the groups in the middle of an exchange; return why the first process did.

        Messages are on their way, so the groups are of no use any more. With gloo all connections
        of this process are closed: who waits for it gets an error at once and leaves too, so that
        nobody waits. With another backend the others wait for their timeout.
        """
        others = [each for each in self.groups if each is not self]
        gloo = [x for x in (self, *others) if "gloo" in dist.get_backend_config(x.group)]
        first = why
        for peers in gloo:  # what was first in one of them is said in the next
            first = _said_first(peers.group.get_group_store(), first)
        for peers in gloo:
            _close(peers)
        return first

    def start(self, phase: str, sent: Mapping[int, Tensor], received: dict[int, Tensor]) -> Pending:
        """Start to send and to receive, a tensor for each position; empty ones do not travel.

        ``sent`` are contiguous tensors by the position that they go to; those in ``received`` are
        filled by the position that they come from. What a position would send to itself stays
        there: ``received`` has it at once. ``phase`` says what they are, for errors.
        """
        if self.position in sent:
            received[self.position] = sent[self.position]
        operations = [
            dist.P2POp(run, tensor, group=self.group, group_peer=position)
            for run, tensors in ((dist.isend, sent), (dist.irecv, received))
            for position, tensor in tensors.items()
            if tensor.numel() and position != self.position
        ]
        if not operations:
            return Pending(self, phase, (), torch.device("cpu"))
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise self.lost(phase, None, error) from error
        positions: list[int | None] = [each.group_peer for each in operations]
        if len(works) != len(positions):  # NCCL has one work for all of them
            positions = [positions[0] if len(set(positions)) == 1 else None] * len(works)
        messages = [_Message(*each) for each in zip(works, positions, strict=True)]
        return Pending(self, phase, messages, operations[0].tensor.device)

    def everywhere(self, phase: str, x: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return the tensors of all positions, in their order; each has a shape of its own."""
        x = x.contiguous()
        found = {p: x.new_empty(*shape) for p, shape in enumerate(shapes) if p != self.position}
        self.start(phase, dict.fromkeys(range(self.count), x), found).wait()
        return [found[p] for p in range(self.count)]

    def gathered(self, phase: str, own: Sequence[int], device: torch.device) -> list[list[int]]:
        """Return the whole numbers of every position, in the order of positions."""
        mine = torch.tensor(own, dtype=torch.int64, device=device)
        every = [torch.empty_like(mine) for _ in range(self.count)]
        try:
            work = dist.all_gather(every, mine, group=self.group, async_op=True)
            assert work is not None
            self.wait(work, device)
        except RuntimeError as error:
            raise self.lost(phase, None, error) from error
        return [each.tolist() for each in every]


def _said_first(store: dist.distributed_c10d.Store, why: str) -> str:
    """Tell the others why, unless one of them was first; return what the first one said."""
    return _answer_of(lambda: store.compare_set(_FIRST_ERROR, "", why).decode(), why)


def _somebody_left(peers: Peers) -> bool:
    """Return whether a process of the group said an error."""
    store = peers.group.get_group_store()
    return _answer_of(lambda: bool(store.check([_FIRST_ERROR])), False)


def _answer_of(ask: Callable[[], T], otherwise: T) -> T:
    """Return a store's answer; ``otherwise`` where none comes in time."""
    found = [otherwise]

    def asked() -> None:
        with suppress(RuntimeError):
            found.append(ask())

    asking = Thread(target=asked, daemon=True)
    asking.start()
    asking.join(_STORE_S)
    return found[-1]


def _close(peers: Peers) -> None:
    """Close this process's connections of a group of gloo, as it does when a message is late."""
    for other in range(1, peers.count):
        source = (peers.position + other) % peers.count
        # One that is closed already raises at once, and says nothing to the others.
        with suppress(RuntimeError):
            late = dist.irecv(torch.empty(1), group=peers.group, group_src=source, tag=_NO_TAG)
            assert late is not None
            late.wait(timedelta(milliseconds=1))


class _Waiter:
    """A thread that waits for others, one wait after the other.

    One that never gets an answer is left to itself: it is no more among the free ones. A thread for
    each wait would cost 0.1 ms.
    """

    _free: list[_Waiter] = []  # noqa: RUF012  of the process

    def __init__(self) -> None:
        self._given: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._errors: SimpleQueue[Exception | None] = SimpleQueue()
        self._error: Exception | None = None
        self._thread = Thread(target=self._work, daemon=True)
        self._thread.start()

    @classmethod
    def free(cls) -> _Waiter:
        """Return one that has nothing to do."""
        while cls._free:
            found = cls._free.pop()
            if found._thread.is_alive():  # that of a process before a fork is not alive here
                return found
        return cls()

    def give(self, wait: Callable[[], object]) -> None:
        """Let it wait."""
        self._given.put(wait)

    def answered(self, seconds: float) -> bool:
        """Return whether the wait has ended, after so many seconds at most."""
        try:
            self._error = self._errors.get(timeout=seconds)
        except Empty:
            return False
        return True

    def result(self) -> None:
        """Raise what the wait has raised; it is free then."""
        error, self._error = self._error, None
        self._free.append(self)
        if error is not None:
            raise error

    def _work(self) -> None:
        while True:
            wait = self._given.get()
            try:
                wait()
            except Exception as error:
                self._errors.put(error)
            else:
                self._errors.put(None)
            del wait  # a message's memory is not kept until the next one


def refuse_second_derivatives() -> None:
    """Refuse a backward pass that is differentiated itself: messages are not in its graph."""
    if torch.is_grad_enabled():
        raise Unsupported(
            "second derivatives of attention over several processes",
            fix="take one gradient, without create_graph=True",
        )


_NUMBERS = 4  # of each process, the same in every call: messages of other lengths end a process
_BLOCK_BYTES = 1 << 22


class _First(NamedTuple):
    """The first message of a process, with the length in bytes and a digest of its text."""

    refused: bool
    length: int
    digest: int
    numbers: tuple[int, ...]


@contextmanager
def refusals_told(groups: Sequence[Peers], q: Tensor) -> Iterator[None]:
    """Tell the other processes of an error that is raised within, so that they raise too.

    ``agreed`` with the same groups is called next if there is no error. Messages travel on q's
    device.
    """
    device = q.device if isinstance(q, Tensor) else torch.device("cpu")
    try:
        yield
    except Exception as error:
        try:
            _compared(groups, f"{type(error).__name__}: {error}", (), device, refused=True)
        except LostPeer as lost:
            error.add_note(f"The other processes were not told, and may wait: {lost}")
        raise


def agreed(
    groups: Sequence[Peers], call: Mapping[str, str], numbers: Sequence[int], device: torch.device
) -> list[tuple[int, ...]]:
    """Return the whole numbers of every process, in their order, if all make the same call.

    All processes know of all before one of them raises. So all of them raise.

    ``groups`` are those of this process; of a mesh of two dimensions, its last one first. ``call``
    has what must be the same, by name. This process has at most four ``numbers``.

    Raises:
        InvalidArgument: another process makes another call, or has refused its own.
        LostPeer: one did not answer.
    """
    text = "\n".join(f"{name}: {value}" for name, value in call.items())
    every, texts = _compared(groups, text, numbers, device)
    position = 0
    for peers in reversed(groups):
        position = position * peers.count + peers.position
    for other, first in enumerate(every):
        if first.refused:
            came = f"an error at position {other}: {texts[other]}"
            raise InvalidArgument("call", came, "a call that no process refuses")
    differing = [
        other for other, first in enumerate(every) if first.digest != every[position].digest
    ]
    if differing:
        theirs = dict(line.split(": ", 1) for line in texts[differing[0]].split("\n"))
        names = [name for name in {**call, **theirs} if call.get(name) != theirs.get(name)]
        here, there = (
            ", ".join(f"{name} {given.get(name, 'none')}" for name in names)
            for given in (call, theirs)
        )
        came = f"position {position}: {here}; another one at positions {differing}: {there}"
        raise InvalidArgument("call", came, "the same call on every process, but for rows")
    return [first.numbers[: len(numbers)] for first in every]


def _compared(
    groups: Sequence[Peers],
    text: str,
    numbers: Sequence[int],
    device: torch.device,
    refused: bool = False,
) -> tuple[list[_First], list[str]]:
    """Return the first message of every process; and their texts, where not all are the same."""
    content = text.encode()
    digest = int.from_bytes(hashlib.sha256(content).digest()[:7], "big")
    padded = *numbers, *([0] * (_NUMBERS - len(numbers)))
    own = [int(refused), len(content), digest, *padded]
    found = _everyone(groups, "sizes", own, device)
    every = [_First(bool(x[0]), x[1], x[2], tuple(x[3:])) for x in found]
    if len({first.digest for first in every}) == 1 and not any(first.refused for first in every):
        return every, []
    longest = max(first.length for first in every)
    found = _everyone(groups, "errors", content.ljust(longest), device)
    return every, [bytes(each).decode().rstrip() for each in found]


def _everyone(
    groups: Sequence[Peers], phase: str, own: Sequence[int], device: torch.device
) -> list[list[int]]:
    """Return as many whole numbers of every process, in their order."""
    every, width = [list(own)], len(own)
    for peers in groups:
        found = peers.gathered(phase, list(chain(*every)), device)
        every = [part[at : at + width] for part in found for at in range(0, len(part), width)]
    return every


def in_words(named: Mapping[str, Tensor]) -> dict[str, str]:
    """Return what tensors are, by name: dtype, shape and a digest of their values."""
    return {
        name: f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)} of digest {_digest(x):016x}"
        for name, x in named.items()
    }


def _digest(x: Tensor) -> int:
    """Return 64 bits that tell tensors of one shape apart, however they lie in memory.

    Bytes of a row are taken as words of 8. The digest is the sum of all words, each times a weight
    for its place in every dimension, modulo 2^64. A dimension that is expanded is read once.
    """
    if not x.numel():
        return 0
    x = x.detach().resolve_neg()
    x = x[None] if x.dim() == 0 else x
    shape, strides = x.shape, x.stride()[:-1]
    for dim, stride in enumerate(strides):
        x = x.narrow(dim, 0, 1) if stride == 0 else x
    rows = x.flatten(0, -2) if x.dim() > 1 else x[None]
    many = max(1, _BLOCK_BYTES // (rows.shape[1] * rows.element_size()))
    sums = torch.cat([_row_sums(some) for some in torch.split(rows, many)]).view(x.shape[:-1])
    for dim, stride in reversed(list(enumerate(strides))):
        weights = _weights(shape[dim], x.device)
        sums = (sums * (weights.sum() if stride == 0 else weights)).sum(-1)
    return int(sums) & (1 << 64) - 1


def _row_sums(rows: Tensor) -> Tensor:
    """Return the weighted sum of each row's words."""
    # A dimension of one entry may have any stride, also where the memory is in one piece.
    content = rows.contiguous().as_strided(rows.shape, (rows.shape[1], 1)).view(torch.uint8)
    if content.shape[1] % 8:
        content = torch.nn.functional.pad(content, (0, -content.shape[1] % 8))
    flat = content.flatten()
    # A slice may begin anywhere in its memory; words begin at multiples of 8 bytes.
    flat = flat.clone() if flat.storage_offset() % 8 else flat
    words = flat.view(torch.int64).view(len(rows), -1)
    weights = _weights(words.shape[1], words.device)
    # On a GPU torch has no product of a matrix of whole numbers and a vector.
    return words @ weights if words.is_cpu else (words * weights).sum(-1)


@lru_cache(maxsize=64)
def _weights(count: int, device: torch.device) -> Tensor:
    """Return odd numbers without a pattern, int64 [count]: splitmix64 (Steele et al., 2014)."""
    x = torch.arange(1, count + 1, device=device) * -0x61C8864680B583EB
    x = (x ^ (x >> 30)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27)) * -0x6B2FB644ECCEEE15
    return (x ^ (x >> 31)) | 1
