"""Attention of other packages on a CPU, each of them optional.

A package is prepared once for a work, in the layout that it wants, so that the timed call converts
nothing. One that packs keys and values into a cache of its own does so in every call, for the keys
of the call's own rows, as a server does. ``benchmarks/README.md`` says how to install them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from tilelab.common import environment
from tilelab.peers import runtimes, serving
from tilelab.peers.methods import flex
from tilelab.peers.work import Given, Prepared, Work


@dataclass(frozen=True)
class Package:
    """Attention of a package."""

    name: str  # for tables
    distribution: str  # what is installed, and has the version
    # Makes its call on a work; what it raises is why it is not measured.
    prepare: Callable[[Work, Given], Prepared]
    requires: tuple[str, ...] = ()  # other distributions that it needs here
    unfit: Callable[[], str] = lambda: ""  # returns why it is not for this machine; empty if it is
    # Returns what it cannot do of a work; empty if it can.
    why_not: Callable[[Work], str] = lambda _: ""

    @property
    def version(self) -> str:
        """The installed version; empty where there is none."""
        return environment.version(self.distribution)

    def absence(self) -> str:
        """Return why it is not here; empty if it is."""
        needed = (self.distribution, *self.requires)
        missing = [name for name in needed if not environment.version(name)]
        if missing:
            return f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
        return self.unfit()

    def refusal(self, work: Work) -> str:
        """Return what it cannot do of a work; empty if it can."""
        if work.passes != "forward":
            return "it has no backward pass"
        return "it has no dropout" if work.dropout_p else self.why_not(work)


def packages() -> list[Package]:
    """Return every package that the bench knows, installed or not."""
    return [
        Package("vLLM", serving.PACKAGE, serving.vllm),
        Package("SGLang", serving.PACKAGE, serving.sglang),
        Package("OpenVINO", "openvino", runtimes.openvino, why_not=runtimes.not_of_openvino),
        Package(
            "ONNX Runtime",
            "onnxruntime",
            runtimes.onnx_runtime,
            ("onnx",),
            why_not=runtimes.no_score,
        ),
        Package(
            "zentorch",
            "zentorch",
            runtimes.zentorch,
            unfit=runtimes.zentorch_machine,
            why_not=runtimes.no_score,
        ),
        Package("FlexAttention", "torch", _flex, why_not=flex().why_not),
    ]


def _flex(work: Work, given: Given) -> Prepared:
    attend = flex().make(work, given)
    return Prepared(lambda: attend(*given.leaves))


def first_line(error: Exception) -> str:
    """Return an error's first line without folders, which a record must not name."""
    line = (str(error).strip().splitlines() or [""])[0]
    return re.sub(r"(?:[\w.-]*/){2,}", "", line) or type(error).__name__
