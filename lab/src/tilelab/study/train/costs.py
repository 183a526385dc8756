"""What a run costs, and which attention kernels it really ran.

A model-FLOPs utilisation (MFU) is operations per token times tokens per second over the peak. It is
only comparable where its convention is named, so both common ones are recorded.

The memory of a step has four parts: weights, gradients, optimizer state and activations. Each is an
exact sum over storages, the same on every machine. A storage that several tensors share counts
once. The peak is what the process (or the GPU's allocator) really held.

``scaled_dot_product_attention`` chooses among kernels by itself. Attention dropout on a CPU makes
it leave its fused kernel for the textbook form, without a word. An arm that was to change
regularisation then also changes speed and memory. The graph that a forward pass leaves behind names
the kernel whose backward will run, so nothing has to be guessed or patched.
"""

from __future__ import annotations

import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tilelab.common import memory
from tilelab.study.ask.config import RunConfig
from tilelab.study.records.events import PROBED, UNNAMED, Kernels, LayerKernel
from tilelab.study.train.team import local
from tilewise.inspect import peaks
from tilewise.inspect.calls import backend_of
from tilewise.inspect.peaks import absence

_FULL, _CAUSAL = 12, 6
_SAMPLE_S = 0.02  # a matrix product of at least this long is timed
_LARGEST = 4096
_SAMPLES = 5


def per_token(
    config: RunConfig, parameters: dict[str, int], attended: float | None = None
) -> dict[str, float]:
    """Operations of the forward and backward pass per trained token: 6 (N - E) + c L d T.

    N counts all parameters, E those that are looked up and not multiplied, as the positions are. A
    token embedding that is tied to a head is multiplied there: it counts, once. L layers of width d
    attend over the context T, or over ``attended`` keys where sequences are shorter. Recomputation
    by activation checkpointing does not count.

    * ``full``: c = 12, every query with every key, the custom of PaLM and most others.
    * ``causal``: c = 6, the half that a causal mask leaves.

    Source: Chowdhery et al., PaLM (2022), appendix B.
    """
    model = config.model
    dense = 6.0 * (parameters["total"] - parameters["embedding"])
    attention = model.layers * model.width * float(attended or model.context)
    return {"full": dense + _FULL * attention, "causal": dense + _CAUSAL * attention}


def peak_flops_s(dtype: torch.dtype, device: torch.device) -> float:
    """Operations per second of this process's threads at their best.

    On a CPU with the compiled core this is the rate of its bare loop of multiply-adds, which
    nothing exceeds. The matrix product of torch, much slower than that on some processors, counts
    where it is faster and where there is no such loop.
    """
    product = gemm_peak_flops_s(dtype, device)
    if device.type != "cpu" or absence() is not None:
        return product
    kind = peaks.loop(str(dtype).removeprefix("torch."), peaks.isa())
    threads = torch.get_num_threads()
    return max(product, *(peaks.measure(kind, threads, "cpu") for _ in range(_SAMPLES)))


def gemm_peak_flops_s(dtype: torch.dtype, device: torch.device) -> float:
    """Operations per second of torch's square matrix product with this process's threads.

    The size doubles until a product takes long enough to be timed, then a few more are made; the
    best rate of all of them counts. On a CPU it is a rate of CPU time. It leaves out the time that
    threads wait while other processes have their cores, so a busy machine does not lower the peak.
    The measurement takes a fraction of a second, much of it only where the dtype has no fast path.
    """
    size = 128
    _product_s(size, dtype, device)  # the first one starts threads and makes kernels
    # Layers multiply by a transposed weight, which torch does several times faster in float16.
    layouts = (False, True)
    transposed = min(layouts, key=lambda each: min(_samples(size, dtype, device, each)))
    rates = []
    while True:
        taken = _product_s(size, dtype, device, transposed)
        rates.append(2.0 * size**3 / taken)
        if taken >= _SAMPLE_S or size >= _LARGEST:
            break
        size *= 2
    return max(*rates, 2.0 * size**3 / min(_samples(size, dtype, device, transposed)))


def _samples(size: int, dtype: torch.dtype, device: torch.device, transposed: bool) -> list[float]:
    return [_product_s(size, dtype, device, transposed) for _ in range(_SAMPLES)]


def _product_s(
    size: int, dtype: torch.dtype, device: torch.device, transposed: bool = False
) -> float:
    left = torch.full((size, size), 0.5, dtype=dtype, device=device)
    right, out = torch.full_like(left, 0.25), torch.empty_like(left)
    right = right.t() if transposed else right
    synchronise(device)
    begin = _now(device)
    torch.mm(left, right, out=out)
    synchronise(device)
    return max(_now(device) - begin, 1e-9)  # a clock that stands still is no infinite rate


def _now(device: torch.device) -> float:
    """Wall time of a GPU; on a CPU the mean CPU time of torch's threads."""
    if device.type == "cuda":
        return time.perf_counter()
    return time.process_time() / torch.get_num_threads()


def synchronise(device: torch.device) -> None:
    """Wait until a device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Count the bytes behind some tensors, each storage once; of cut ones this process's."""
    storages = (local(tensor).untyped_storage() for tensor in tensors)
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def saved_bytes(run: Callable[[], Tensor], weights: Iterable[Tensor]) -> tuple[Tensor, int]:
    """Return ``run``'s result, and the bytes that autograd keeps of it for the backward pass.

    Each storage counts once, however many views of it are kept. Weights do not count, but their
    copies that autocast makes in a narrower type do.
    """
    storages: dict[int, int] = {}
    own = {local(weight).untyped_storage().data_ptr() for weight in weights}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # a result that its own graph saves would never be freed

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()
    return result, sum(size for address, size in storages.items() if address not in own)


class PeakMeter:
    """The most memory held while training, less what was held before the model was made.

    Make it before the model. Leave out what evaluations and checkpoints take on top: call ``pause``
    before them and ``resume`` after. With ``torch.compile`` the compiler's own memory counts too.
    On a CPU pages of files do not count: which code a process has used before depends on whether it
    was forked, and no arm is to be charged for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._highest = 0
        memory.release()  # memory that is freed but kept would count as held before the model
        self._base = self._now()
        self.resume()

    def peak_bytes(self) -> int:
        """Return the peak so far."""
        return max(self._highest, self._peak())

    def pause(self) -> None:
        """Keep the peak so far: what comes next does not count."""
        self._highest = self.peak_bytes()

    def resume(self) -> None:
        """Count again from here on."""
        if self._cuda is None:
            memory.release()  # else what the pause has freed lies beside what training takes anew
            memory.reset_peak()
        else:
            torch.cuda.reset_peak_memory_stats(self._cuda)

    def _now(self) -> int:
        if self._cuda is None:
            return memory.resident_bytes() - memory.file_bytes()
        return int(torch.cuda.memory_allocated(self._cuda))

    def _peak(self) -> int:
        if self._cuda is None:
            return memory.peak_bytes() - memory.file_bytes() - self._base
        return int(torch.cuda.max_memory_allocated(self._cuda)) - self._base


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
    return implementation + UNNAMED


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
        layers = [each for each in model.modules() if hooks and hasattr(each, "implementation")]
        self._handles = [
            layer.register_forward_hook(self._hook(place)) for place, layer in enumerate(layers)
        ]

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
        eager = Guard(model)
        with torch.random.fork_rng(), eager.watching():
            model(*inputs)
        for handle in eager._handles:
            handle.remove()
        self._probed = [(place, kernel + PROBED) for place, kernel in eager._counts.elements()]

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
