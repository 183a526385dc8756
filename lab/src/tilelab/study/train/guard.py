"""The guard: which attention kernel a layer really ran, read from the autograd graph.

``scaled_dot_product_attention`` chooses among kernels by itself. Attention dropout on a CPU makes
it leave its fused kernel for the textbook form, without a word. An arm that was to change
regularisation then also changes speed and memory. The graph that a forward pass leaves behind names
the kernel whose backward will run, so nothing has to be guessed or patched.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tilelab.study.records.events import PROBED, Kernels, LayerKernel
from tilewise.inspect.calls import backend_of

__all__ = ["Guard", "kernel_of"]

_FUSED = re.compile(r"ScaledDotProduct(\w+?)Attention(ForCpu)?Backward")
_SOFTMAX = re.compile(r"(Safe)?SoftmaxBackward")
_MOST_NODES = 200  # a layer has some twenty; the walk must end even in a graph of another shape


def kernel_of(output: Tensor, source: Tensor, implementation: str) -> str:
    """Return the attention kernel between a layer's input and its output.

    Returns:
        ``"tilewise <backend>"``, ``"sdpa flash (cpu)"``, ``"sdpa flash"``, ``"sdpa efficient"``,
        ``"sdpa cudnn"``, ``"sdpa math"``, ``"plain"``, or ``"<implementation>: unknown"`` where the
        graph holds none of them. ``flash (cpu)`` and ``flash`` are different kernels.
    """
    for node in _nodes(output, source):
        backend = backend_of(node)
        if backend is not None:
            return f"tilewise {backend}"
        name = node.name()
        fused = _FUSED.match(name)
        if fused:
            return f"sdpa {fused[1].lower()}{' (cpu)' if fused[2] else ''}"
        if _SOFTMAX.match(name):
            return "plain" if implementation == "plain" else f"{implementation} math"
    return f"{implementation}: unknown"


def _nodes(output: Tensor, source: Tensor) -> Iterator[Any]:
    """Yield the graph from the output to the input, nearest first."""
    seen: set[Any] = {source.grad_fn, None}
    queue: deque[Any] = deque([output.grad_fn])
    for _ in range(_MOST_NODES):
        if not queue:
            return
        node = queue.popleft()
        if node in seen:
            continue
        seen.add(node)
        yield node
        queue.extend(following for following, _ in node.next_functions)


class Guard:
    """Counts the kernels of a model's attention layers: its modules with an ``implementation``.

    Forward hooks watch eager models, in every training forward pass. A hook would break the graph
    of a compiled model, so the guard probes that one instead. A forward pass of the model that was
    not compiled names the kernels, and the names say so.
    """

    def __init__(self, model: nn.Module, hooks: bool = True) -> None:
        self._counts: Counter[tuple[int, str]] = Counter()
        self._watching = False
        self._probed: list[tuple[int, str]] | None = None
        self._layers = [each for each in model.modules() if hasattr(each, "implementation")]
        if hooks:
            for place, layer in enumerate(self._layers):
                layer.register_forward_hook(self._hook(place))

    @property
    def probed(self) -> bool:
        """Whether ``probe`` was called."""
        return self._probed is not None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count the forward passes of this block.

        The backward pass stays outside: what activation checkpointing computes again in it is not
        counted twice. So do evaluations and measurements.
        """
        self._watching = True
        try:
            yield
        finally:
            self._watching = False
        for place in self._probed or ():
            self._counts[place] += 1

    def probe(self, model: nn.Module, *inputs: Any) -> None:
        """Name the kernels of a compiled model by a training forward pass of its original."""
        found: list[tuple[int, str]] = []
        handles = [
            layer.register_forward_hook(
                lambda layer, args, output, place=place: found.append(
                    (place, kernel_of(output, args[0], layer.implementation) + PROBED)
                )
            )
            for place, layer in enumerate(self._layers)
        ]
        with torch.random.fork_rng():
            model(*inputs)
        for handle in handles:
            handle.remove()
        self._probed = found

    def kernels(self) -> Kernels:
        """Return the kernels that ran so far, for the record."""
        return Kernels(
            [LayerKernel(*place, calls) for place, calls in sorted(self._counts.items())]
        )

    def as_json(self) -> list[list[Any]]:
        """Return the counts, for a checkpoint."""
        return [[*place, calls] for place, calls in sorted(self._counts.items())]

    def restore(self, counts: list[list[Any]]) -> None:
        """Go on from the counts of a checkpoint."""
        self._counts = Counter({(layer, kernel): calls for layer, kernel, calls in counts})

    def _hook(self, place: int) -> Any:
        def note(layer: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
            if self._watching:
                self._counts[place, kernel_of(output, args[0], layer.implementation)] += 1

        return note
