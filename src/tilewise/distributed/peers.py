"""Messages among the processes that share a sequence, with errors that say who is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Lock, Thread
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.errors import TilewiseError, Unsupported

_FIRST_ERROR = "tilewise: the first error"  # in the store of a group
_STORE_S = 5.0  # for an answer of the store: its machine may be the one that is lost
_NO_TAG = 0x7469_6C65  # of messages that nobody sends
_LOOK_S, _PATIENCE_S = 1.0, 2.0  # between two looks after waits; of a wait before the first look


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

    def __init__(self, peers: Peers, phase: str, messages: Sequence[_Message]) -> None:
        self._peers, self._phase, self._messages = peers, phase, messages

    def wait(self) -> None:
        """Wait for all of them, or raise ``LostPeer``."""
        for work, position in self._messages:
            try:
                self._peers.wait(work)
            except RuntimeError as error:
                raise self._peers.lost(self._phase, position, error) from error
        self._messages = ()


class Peers:
    """The processes that share a sequence.

    Args:
        group: of torch.distributed.
        timeout: of a message; None for the group's own.

    Attributes:
        groups: those of this process in a call, this one among them. It leaves them together.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta | None = None) -> None:
        self.group, self.timeout = group, timeout
        self.position = dist.get_rank(group)
        self.count = dist.get_world_size(group)
        self.groups = [self]

    def wait(self, work: dist.Work) -> None:
        """Wait for a message; RuntimeError where it does not come."""
        _WAITS.begin(self)
        try:
            if self.timeout is None:
                work.wait()
            else:
                work.wait(self.timeout)
        finally:
            _WAITS.end(self)

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

        Args:
            unless: errors that all processes raise.
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

        What a position would send to itself stays there: ``received`` has it at once.

        Args:
            phase: what they are, for errors.
            sent: contiguous tensors, by the position that they go to.
            received: contiguous tensors to fill, by the position that they come from.
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
            return Pending(self, phase, ())
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise self.lost(phase, None, error) from error
        positions: list[int | None] = [each.group_peer for each in operations]
        if len(works) != len(positions):  # NCCL has one work for all of them
            positions = [positions[0] if len(set(positions)) == 1 else None] * len(works)
        return Pending(
            self, phase, [_Message(*each) for each in zip(works, positions, strict=True)]
        )

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
            self.wait(work)
        except RuntimeError as error:
            raise self.lost(phase, None, error) from error
        return [each.tolist() for each in every]


def _said_first(store: dist.distributed_c10d.Store, why: str) -> str:
    """Tell the others why, unless one of them was first; return what the first one said."""
    found = [why]

    def ask() -> None:
        with suppress(RuntimeError):
            found.append(store.compare_set(_FIRST_ERROR, "", why).decode())

    asking = Thread(target=ask, daemon=True)
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


class _Waits:
    """The groups of gloo that this process waits in, and a thread that looks after long waits.

    A process that leaves closes its connections, and whoever waits for it gets an error. Under load
    that news was lost once with torch 2.14, and the wait did not end. So the thread asks the
    group's store whether somebody left, and closes the connections of this process then, which ends
    its wait. It does not always: one send in gloo kept waiting after that (torch 2.13, seen once),
    and then ends with the group's timeout alone. The thread ends when nobody waits.
    """

    def __init__(self) -> None:
        self._since: dict[Peers, float] = {}
        self._lock = Lock()
        self._thread: Thread | None = None

    def begin(self, peers: Peers) -> None:
        """Look after a wait from now on."""
        if "gloo" not in dist.get_backend_config(peers.group):
            return
        with self._lock:
            self._since[peers] = time.monotonic()
            # That of a process before a fork is not alive here.
            if self._thread is None or not self._thread.is_alive():
                self._thread = Thread(target=self._look, daemon=True)
                self._thread.start()

    def end(self, peers: Peers) -> None:
        """Stop looking after a wait."""
        with self._lock:
            self._since.pop(peers, None)

    def _look(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            with self._lock:
                if not self._since:
                    self._thread = None
                    return
                late = time.monotonic() - _PATIENCE_S
                long = [peers for peers, since in self._since.items() if since < late]
            for peers in long:
                with suppress(RuntimeError):
                    if peers.group.get_group_store().check([_FIRST_ERROR]):
                        _close(peers)


_WAITS = _Waits()


def refuse_second_derivatives() -> None:
    """Refuse a backward pass that is differentiated itself: messages are not in its graph."""
    if torch.is_grad_enabled():
        raise Unsupported(
            "second derivatives of attention over several processes",
            fix="take one gradient, without create_graph=True",
        )
