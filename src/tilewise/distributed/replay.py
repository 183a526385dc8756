"""Links between processes, and the replay of a schedule: when each rank computes, sends and waits.

All ranks run the same **events**, one after the other, each with numbers of its own:

* ``Start`` begins an exchange. A rank goes on at once.
* ``Wait`` ends when what the rank sends and receives in an exchange has travelled.
* ``Compute`` takes its seconds.

A message begins when both its ranks have started the exchange, and their links are free. A link
carries one message each way, in the order of the events, at the rate of ``Link``. So the result is
a lower bound: nothing else uses the links, and no two messages disturb each other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tilewise.errors import InvalidArgument


class Link(NamedTuple):
    """What bounds a message.

    A message takes ``latency_s + bytes / bytes_s``. A process sends at this rate and receives at it
    at once.

    Args:
        name: for people.
        bytes_s: of one process, one way.
        latency_s: from the start of a message to its first byte.
        source: where the figures are from.
    """

    name: str
    bytes_s: float
    latency_s: float = 0.0
    source: str = ""


# Latencies of the first three kinds are those of NCCL's tuning model (graph/tuning.cc: ring,
# protocol Simple) for NVLink, PCI and networks.
LINKS: Mapping[str, Link] = {
    "nvlink": Link(
        "NVLink 4", 450e9, 3.4e-6, "NVIDIA H100 datasheet: 900 GB/s, both ways together"
    ),
    "pcie5": Link(
        "PCIe 5.0 x16", 63e9, 5.7e-6, "PCI Express 5.0: 16 lanes of 32 GT/s, 128 bits in 130"
    ),
    "infiniband": Link(
        "InfiniBand NDR 400G", 50e9, 14e-6, "NVIDIA ConnectX-7 datasheet: a port of 400 Gb/s"
    ),
    "ethernet": Link(
        "100 GbE", 12.5e9, 30e-6, "IEEE 802.3: 100 Gb/s; the latency is assumed, for TCP"
    ),
    "loopback": Link(
        "gloo on one machine",
        0.34e9,
        30e-6,
        "measured: two processes that send and receive at once, on two cores of an AMD EPYC that "
        "had other work too",
    ),
}


def link_named(text: str) -> Link:
    """Return a link by its name in ``LINKS``, or by its bandwidth one way, e.g. "25GB/s".

    Raises:
        InvalidArgument: it is neither.
    """
    name = text.strip().lower()
    if name in LINKS:
        return LINKS[name]
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:gb/s)?", name)
    if found is None or not float(found[1]):
        raise InvalidArgument("link", repr(text), f"{', '.join(LINKS)}, or GB/s one way, e.g. 25")
    return Link(f"{found[1]} GB/s", float(found[1]) * 1e9, source="as given, without latency")


Numbers: TypeAlias = NDArray[np.int64]
Times: TypeAlias = NDArray[np.float64]


class Message(NamedTuple):
    """A message of every rank.

    Args:
        to: [ranks] whom each sends to: every rank is the target of one other, or of itself.
        sizes: [ranks] bytes that each sends; 0 where nothing travels.
    """

    to: Numbers
    sizes: Numbers


class Start(NamedTuple):
    """An exchange begins: messages that travel one after the other."""

    exchange: str
    messages: tuple[Message, ...]


class Wait(NamedTuple):
    """An exchange, by its name, has ended."""

    exchange: str


class Compute(NamedTuple):
    """Every rank is busy: [ranks] seconds."""

    seconds: Times


Event: TypeAlias = Start | Wait | Compute


class Leg(NamedTuple):
    """A part of the critical path: a rank computes, or sends to another, from ``begin`` to ``end``.

    ``to`` is the rank itself where it computes.
    """

    what: Literal["compute", "message"]
    rank: int
    to: int
    begin: float
    end: float


class _Sent(NamedTuple):
    """A message with its times by sender: on the link until ``left``, there at ``end``."""

    number: int
    event: int
    message: Message
    begin: Times
    left: Times
    end: Times


class Replay:
    """A schedule that was replayed.

    Args:
        events: of all ranks, in the order in which each runs them.
        ranks: how many there are.
        link: between any two of them.
        slow: by rank, the factor by which its computing takes longer.

    Attributes:
        ends: [ranks] when each has run all events.
    """

    def __init__(
        self,
        events: Sequence[Event],
        ranks: int,
        link: Link,
        slow: Mapping[int, float] | None = None,
    ) -> None:
        self._events, self._link = events, link
        factors = np.ones(ranks)
        for rank, factor in (slow or {}).items():
            factors[rank] = factor
        self._out, self._in = np.zeros(ranks), np.zeros(ranks)  # when links are free again
        self._sent: list[_Sent] = []
        self._of: dict[str, list[_Sent]] = {}  # by exchange
        self._after: list[Times] = []
        clock = np.zeros(ranks)
        for at, event in enumerate(events):
            if isinstance(event, Compute):
                clock = clock + event.seconds * factors
            elif isinstance(event, Start):
                self._start(at, event, clock)
            else:
                clock = self._arrived(event, clock)
            self._after.append(clock)
        self.ends = clock

    @property
    def seconds(self) -> float:
        """When the last rank ends."""
        return float(self.ends.max())

    def _start(self, at: int, event: Start, clock: Times) -> None:
        own = self._of.setdefault(event.exchange, [])
        for message in event.messages:
            to, travels = message.to, message.sizes > 0
            begin = np.maximum.reduce([clock, clock[to], self._out, self._in[to]])
            left = begin + message.sizes / self._link.bytes_s
            self._out = np.where(travels, left, self._out)
            self._in[to] = np.where(travels, left, self._in[to])
            sent = _Sent(len(self._sent), at, message, begin, left, left + self._link.latency_s)
            own.append(sent)
            self._sent.append(sent)

    def _arrived(self, event: Wait, clock: Times) -> Times:
        clock = clock.copy()
        for sent in self._of[event.exchange]:
            travels = sent.message.sizes > 0
            np.maximum(clock, np.where(travels, sent.left, 0.0), out=clock)
            to = sent.message.to
            clock[to] = np.maximum(clock[to], np.where(travels, sent.end, 0.0))
        return clock

    def critical_path(self) -> tuple[Leg, ...]:
        """Return what the last rank's end follows from, back to the beginning, in order of time.

        Time between two legs is latency.
        """
        legs: list[Leg] = []
        rank, at = int(self.ends.argmax()), len(self._events) - 1
        while at >= 0:
            now = self._after[at][rank]
            before = self._after[at - 1][rank] if at else 0.0
            event = self._events[at]
            if now == before:
                at -= 1
            elif isinstance(event, Compute):
                legs.append(Leg("compute", rank, rank, float(before), float(now)))
                at -= 1
            else:
                assert isinstance(event, Wait)
                rank, at = self._back(legs, self._last(event.exchange, rank, float(now)))
        return tuple(_joined(legs[::-1]))

    def _last(self, exchange: str, rank: int, now: float) -> tuple[_Sent, int]:
        """Return the message of an exchange that a rank waited for until now, and who sent it."""
        for sent in self._of[exchange]:
            sizes, to = sent.message.sizes, sent.message.to
            source = int(np.flatnonzero(to == rank)[0])
            if sizes[source] and sent.end[source] == now:
                return sent, source
            if sizes[rank] and sent.left[rank] == now:
                return sent, rank
        raise AssertionError("a wait without its message")

    def _back(self, legs: list[Leg], found: tuple[_Sent, int]) -> tuple[int, int]:
        """Add the messages before and with this one; return the rank and event that it is from."""
        sent, source = found
        while True:
            to, begin = int(sent.message.to[source]), float(sent.begin[source])
            legs.append(Leg("message", source, to, begin, float(sent.left[source])))
            clock = self._after[sent.event]
            for rank in (source, to):
                if clock[rank] == begin:
                    return rank, sent.event - 1
            sent, source = self._blocking(sent, source, to, begin)

    def _blocking(self, sent: _Sent, source: int, to: int, begin: float) -> tuple[_Sent, int]:
        """Return the message that was on a link until another one began."""
        for number in range(sent.number - 1, -1, -1):
            other = self._sent[number]
            for who in (source, int(np.flatnonzero(other.message.to == to)[0])):
                if other.message.sizes[who] and other.left[who] == begin:
                    return other, who
        raise AssertionError("a message that waits for nothing")


def _joined(legs: Sequence[Leg]) -> list[Leg]:
    """Return legs with neighbours joined where one rank goes on computing."""
    found: list[Leg] = []
    for leg in legs:
        last = found[-1] if found else None
        if last and leg.what == last.what == "compute" and leg[1] == last[1]:
            found[-1] = last._replace(end=leg.end)
        else:
            found.append(leg)
    return found
