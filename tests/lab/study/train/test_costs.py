"""Operations and peaks by hand; sums over storages, saved activations, the peak of memory.

The guard tells the kernels apart that really run, dropout's silent change among them.
"""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tilelab.common.memory import resident_bytes
from tilelab.models.gpt2 import GPT2, Shape
from tilelab.study.ask.config import Model, RunConfig
from tilelab.study.tasks.task import dtype_of
from tilelab.study.train.costs import (
    Guard,
    PeakMeter,
    gemm_peak_flops_s,
    kernel_of,
    peak_flops_s,
    per_token,
    saved_bytes,
    storage_bytes,
)
from tilewise import masks, scores
from tilewise.inspect import peaks
from tilewise.kernels.cpu import absence
from tilewise.nn import Attention, Implementation


def test_operations_per_token_by_hand_and_dtypes() -> None:
    config = RunConfig(model=Model(layers=3, heads=2, width=10, context=7))
    found = per_token(config, {"total": 1000, "embedding": 70})
    assert found == {
        "full": 6 * 930 + 12 * 3 * 10 * 7,
        "causal": 6 * 930 + 6 * 3 * 10 * 7,
    }
    precisions = ("float32", "bf16", "fp16")
    assert [dtype_of(each) for each in precisions] == [torch.float32, torch.bfloat16, torch.float16]


def test_a_product_is_not_faster_than_the_peak() -> None:
    peak = gemm_peak_flops_s(torch.float32, torch.device("cpu"))
    a = torch.ones(256, 256)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - begin)
    # Generous on both sides: other processes share these cores.
    assert peak > 0.2 * 2 * 256**3 / min(times)
    assert peak < 1e15


def _busy(right: torch.Tensor) -> None:
    """Take longer with one of the layouts: the peak is that of the better one."""
    begin = time.process_time()
    while right.is_contiguous() and time.process_time() < begin + 0.05:
        pass


def _wait(right: torch.Tensor) -> None:
    """As if another process had the core."""
    time.sleep(0.03)


@pytest.mark.parametrize("slow", [_busy, _wait])
def test_what_is_not_the_product_does_not_lower_the_peak(
    slow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = torch.mm

    def slowed(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        slow(right)
        return product(left, right, out=out)

    alone = gemm_peak_flops_s(torch.float32, torch.device("cpu"))
    monkeypatch.setattr(torch, "mm", slowed)
    assert gemm_peak_flops_s(torch.float32, torch.device("cpu")) > 0.2 * alone


@pytest.mark.skipif(absence() is not None, reason="the compiled core is not built")
def test_the_peak_is_the_bare_loop_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    device, asked = torch.device("cpu"), []

    def loop(kind: str, threads: int, clock: str) -> float:
        asked.append((threads, clock))
        return 1e18

    monkeypatch.setattr(peaks, "measure", loop)
    assert peak_flops_s(torch.float32, device) == 1e18
    assert set(asked) == {(torch.get_num_threads(), "cpu")}
    monkeypatch.setattr(peaks, "measure", lambda *_: 0.0)
    assert 1e6 < peak_flops_s(torch.float32, device) < 1e15


MIB = 1 << 20


def test_a_storage_counts_once_however_many_views_share_it() -> None:
    x = torch.zeros(6, 4)
    assert storage_bytes([x, x[1:], x.t(), torch.zeros(3)]) == 6 * 4 * 4 + 3 * 4


def test_saved_bytes_count_each_storage_once_and_no_weight() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    x = torch.randn(4, 8)
    # exp keeps its result and the product keeps x, 4 x 8 floats each; the weight does not count.
    _, kept = saved_bytes(lambda: (x @ weight).exp().sum(), [weight])
    assert kept == 2 * 4 * 8 * 4
    doubled = x.clone().requires_grad_()
    _, kept = saved_bytes(lambda: (doubled * doubled.view(4, 8)).sum(), [])
    assert kept == 4 * 8 * 4


def test_what_was_counted_is_freed() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    results: list[weakref.ref[torch.Tensor]] = []

    def run() -> torch.Tensor:
        result = (weight @ weight).exp()  # its own graph saves it
        results.append(weakref.ref(result))
        return result.sum()

    saved_bytes(run, [weight])
    gc.collect()
    assert [result() for result in results] == [None]


@pytest.mark.skipif(resident_bytes() == 0, reason="this system does not tell")
def test_a_pause_does_not_count_towards_the_peak() -> None:
    meter = PeakMeter(torch.device("cpu"))
    held = torch.ones(16 * MIB // 4)
    meter.pause()
    much = torch.ones(128 * MIB // 4)
    del much
    meter.resume()
    peak = meter.peak_bytes()
    assert 12 * MIB < peak < 100 * MIB
    more = torch.ones(64 * MIB // 4)
    assert meter.peak_bytes() > peak + 30 * MIB
    del held, more
    meter.pause()
    meter.resume()
    assert meter.peak_bytes() > peak + 30 * MIB, "a peak before a pause stays"


X = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0))


def _kernel(implementation: Implementation, **options: Any) -> str:
    # In a model the input of a layer has a graph of its own, in which nothing may be found.
    below = Attention(32, 2, mask=masks.causal(), implementation="plain")
    layer = Attention(32, 2, implementation=implementation, **{"mask": masks.causal(), **options})
    source = below(X)
    return kernel_of(layer(source), source, implementation)


@pytest.mark.parametrize(
    ("implementation", "dropout_p", "kernel"),
    [
        ("plain", 0.0, "plain"),
        ("plain", 0.1, "plain"),
        ("sdpa", 0.0, "sdpa flash (cpu)"),
        ("sdpa", 0.1, "sdpa math"),
        ("tilewise", 0.0, "tilewise cpu"),
        ("tilewise", 0.1, "tilewise cpu"),
    ],
)
def test_each_implementation_by_its_kernel(
    implementation: Implementation, dropout_p: float, kernel: str
) -> None:
    assert _kernel(implementation, dropout_p=dropout_p) == kernel


@pytest.mark.parametrize("implementation", ["plain", "sdpa", "tilewise"])
def test_variants_biases_and_narrow_types_are_seen_through(implementation: Implementation) -> None:
    expected = {"plain": "plain", "sdpa": "sdpa flash (cpu)", "tilewise": "tilewise cpu"}
    slopes = torch.tensor([0.5, 0.25])
    options: list[dict[str, Any]] = [
        {"bias": True},
        {"mask": masks.window(4, 0)},
        {"score": scores.alibi(slopes)},
        {"qk_norm": True},
        {"kv_heads": 1},
    ]
    for each in options:
        assert _kernel(implementation, **each) == expected[implementation], each
    with torch.autocast("cpu", torch.bfloat16):
        assert _kernel(implementation) == expected[implementation]


class _Node:
    """A node of an autograd graph that another device would leave."""

    def __init__(self, name: str, *following: _Node) -> None:
        self._name = name
        self.next_functions = tuple((each, 0) for each in following)

    def name(self) -> str:
        return self._name


class _Output:
    def __init__(self, node: _Node | None) -> None:
        self.grad_fn = node


@pytest.mark.parametrize(
    ("node", "kernel"),
    [
        ("ScaledDotProductFlashAttentionBackward0", "sdpa flash"),
        ("ScaledDotProductEfficientAttentionBackward0", "sdpa efficient"),
        ("ScaledDotProductCudnnAttentionBackward0", "sdpa cudnn"),
        ("SafeSoftmaxBackward0", "sdpa math"),
        ("MulBackward0", "sdpa: unknown"),
    ],
)
def test_the_nodes_of_a_gpu(node: str, kernel: str) -> None:
    beyond = _Node("SoftmaxBackward0")
    source: Any = _Output(_Node("AddBackward0", beyond))
    output: Any = _Output(_Node("ViewBackward0", _Node(node, source.grad_fn)))
    assert kernel_of(output, source, "sdpa") == kernel


def _model(**options: Any) -> GPT2:
    dropout = options.pop("dropout", 0.0)
    shape = Shape(2, 2, 16, context=16, vocabulary=32, attention_dropout=dropout)
    return GPT2(shape, **options)


TOKENS = torch.randint(0, 32, (2, 16), generator=torch.Generator().manual_seed(0))


def _found(guard: Guard) -> list[tuple[int, str, int]]:
    return [(each.layer, each.kernel, each.calls) for each in guard.kernels().layers]


def test_training_passes_are_counted_and_no_others() -> None:
    model = _model(implementation="sdpa", dropout=0.1)
    guard = Guard(model)
    for _ in range(3):
        with guard.watching():
            out = model(TOKENS)
        out.sum().backward()
    model(TOKENS)
    assert _found(guard) == [(0, "sdpa math", 3), (1, "sdpa math", 3)]


def test_what_checkpointing_computes_again_is_not_counted() -> None:
    model = _model(implementation="sdpa", checkpointing=True)
    guard = Guard(model)
    with guard.watching():
        out = model(TOKENS)
    out.sum().backward()
    assert _found(guard) == [(0, "sdpa flash (cpu)", 1), (1, "sdpa flash (cpu)", 1)]


def test_a_change_of_kernel_in_the_middle_shows_as_a_second_line() -> None:
    model = _model(implementation="tilewise")
    guard = Guard(model)
    with guard.watching():
        model(TOKENS)
    _, last = [each for each in model.modules() if isinstance(each, Attention)]
    last.implementation = "plain"
    with guard.watching():
        model(TOKENS)
    assert _found(guard) == [(0, "tilewise cpu", 2), (1, "plain", 1), (1, "tilewise cpu", 1)]


def test_a_compiled_model_is_probed_without_hooks_or_random_numbers() -> None:
    model = _model(implementation="sdpa", dropout=0.1)
    guard = Guard(model, hooks=False)
    assert not any(module._forward_hooks for module in model.modules())
    before = torch.get_rng_state()
    assert not guard.probed
    guard.probe(model, TOKENS)
    assert guard.probed
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(module._forward_hooks for module in model.modules())
    assert _found(guard) == []
    for _ in range(2):
        with guard.watching():
            pass
    assert _found(guard) == [(0, "sdpa math (eager probe)", 2), (1, "sdpa math (eager probe)", 2)]


def test_the_walk_is_bounded_and_stops_at_the_source() -> None:
    class Long(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(1000):
                x = x + 1.0
            return x

    x = X.clone().requires_grad_()
    deep = checkpoint(Long(), x.softmax(dim=-1), use_reentrant=False)
    assert kernel_of(deep, x, "sdpa") == "sdpa: unknown"
    source = x.softmax(dim=-1)
    assert kernel_of(source + 1.0, source, "plain") == "plain: unknown"
