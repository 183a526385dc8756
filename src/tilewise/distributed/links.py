"""Links between processes: one row per kind, with its bandwidth, its latency and their source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

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
