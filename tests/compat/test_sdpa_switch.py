"""The switch: which calls it takes, what it counts, and that torch is afterwards what it was."""

from __future__ import annotations

import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import tilewise
from tilewise.compat import sdpa

BUILTIN: Any = torch.nn.functional.scaled_dot_product_attention
OURS: Any = sdpa.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def restored() -> Any:
    """Torch's names hold what they held, whatever a test did."""
    yield
    assert functional.scaled_dot_product_attention is BUILTIN
    assert torch._C._nn.scaled_dot_product_attention is BUILTIN


def tensors(rows: int = 9, width: int = 8, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(2, 3, rows, width, generator=generator).to(dtype) for _ in range(3)]


def call(*args: Any, **keywords: Any) -> Tensor:
    return functional.scaled_dot_product_attention(*args, **keywords)


def test_a_report_without_calls_says_what_to_do() -> None:
    module, x = torch.nn.MultiheadAttention(8, 2), torch.randn(3, 1, 8)
    with tilewise.sdpa() as report:
        module(x, x, x)  # which writes its weights
    assert str(report).startswith("0 of 0 calls taken\n  nothing called torch.nn.functional.")
    assert str(report).endswith("tilewise.nn.convert(model)")
    with tilewise.sdpa() as report:
        call(*tensors())
    assert str(report) == "1 of 1 calls taken"


def test_taken_and_left_are_counted() -> None:
    qkv = tensors()
    with tilewise.sdpa() as report:
        assert torch.equal(call(*qkv), OURS(*qkv))
        call(*qkv, is_causal=True)
        with pytest.raises(RuntimeError, match="dropout probability"):
            call(*qkv, dropout_p=2.0)
        wide = tensors(2, 600)
        assert torch.equal(call(*wide), BUILTIN(*wide))
        assert call(*qkv, scale=float("inf")).isnan().all()
        with pytest.raises(TypeError, match="must be Tensor, not str"):
            call("a", *qkv[1:])
        with pytest.raises(TypeError, match="missing 3 required"):
            call()
    assert report.taken == 2
    assert report.calls == 7
    reasons = dict(report.left)
    assert reasons.pop("what torch refuses (dropout_p)") == 1
    assert reasons.pop("what torch refuses (types)") == 2
    assert reasons.pop("a scale that is not finite") == 1
    (reason,) = reasons
    assert "backend 'cpu': D = 600 is over its limit of 576" in reason
    assert "2 of 7 calls taken\n  2 left: what torch refuses (types)\n" in str(report)
    call(*qkv)
    assert report.calls == 7


def test_blocks_nest_and_survive_errors() -> None:
    qkv = tensors()
    with tilewise.sdpa() as outer:
        call(*qkv)
        with pytest.raises(ZeroDivisionError), tilewise.sdpa() as inner:  # noqa: PT012
            call(*qkv)
            _ = 1 / 0
        assert functional.scaled_dot_product_attention is not BUILTIN
        call(*qkv)
    assert (inner.taken, outer.taken) == (1, 3)


def test_a_block_is_of_its_thread() -> None:
    qkv = tensors()
    found: list[Tensor] = []
    theirs: list[sdpa.Report] = []

    def other(inside: bool) -> None:
        if inside:
            with tilewise.sdpa() as report:
                found.append(call(*qkv))
                theirs.append(report)
        else:
            found.append(call(*qkv))

    with tilewise.sdpa() as report:
        for inside in (False, True):
            thread = threading.Thread(target=other, args=(inside,))
            thread.start()
            thread.join()
    assert report.calls == 0
    assert theirs[0].taken == 1
    assert torch.equal(found[0], BUILTIN(*qkv))
    assert torch.equal(found[1], OURS(*qkv))


def test_for_all_threads() -> None:
    qkv = tensors()
    report = sdpa.enable()
    assert sdpa.enable() is report
    thread = threading.Thread(target=lambda: call(*qkv))
    thread.start()
    thread.join()
    with tilewise.sdpa() as block:
        call(*qkv)
        assert sdpa.disable() is report
        call(*qkv)
    assert report.taken == 2
    assert block.taken == 2
    assert sdpa.disable().calls == 0


def test_many_threads_at_once() -> None:
    qkv, barrier = tensors(), threading.Barrier(4)

    def work(_: int) -> None:
        barrier.wait(30)
        for _ in range(20):
            with tilewise.sdpa() as report:
                call(*qkv)
                call(*qkv)
            assert report.taken == 2

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_who_patched_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left goes to whoever was there before; what came later stays."""
    calls: list[str] = []

    def before(*args: Any, **keywords: Any) -> Tensor:
        calls.append("before")
        return BUILTIN(*args, **keywords)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", before)
    with tilewise.sdpa() as report:
        held: Any = functional.scaled_dot_product_attention
        call(*tensors())
        call(*tensors(2, 600))
    assert functional.scaled_dot_product_attention is before
    assert (report.taken, calls) == (1, ["before"])
    held(*tensors())  # a name that somebody kept: as if it had not been there
    assert (report.calls, calls) == (2, ["before"] * 2)
    with tilewise.sdpa():
        functional.scaled_dot_product_attention = BUILTIN
    assert functional.scaled_dot_product_attention is BUILTIN


def test_a_wrapper_that_somebody_left_over_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stood there before the next block: calls go through it once, and on to torch."""
    qkv, calls = tensors(), []
    monkeypatch.setattr(functional, "scaled_dot_product_attention", BUILTIN)

    def wrap() -> Any:
        inner: Any = functional.scaled_dot_product_attention

        def wrapper(*args: Any, **keywords: Any) -> Tensor:
            calls.append(wrapper)
            return inner(*args, **keywords)

        functional.scaled_dot_product_attention = wrapper
        return wrapper

    with tilewise.sdpa():
        first = wrap()
    with tilewise.sdpa() as report:
        assert call(*qkv, scale=float("inf")).isnan().all()
        assert torch.equal(call(*qkv), OURS(*qkv))
        second = wrap()
    assert (report.taken, report.calls, calls) == (1, 2, [first])
    assert torch.equal(call(*qkv), BUILTIN(*qkv))
    assert calls == [first, second, first]
    with tilewise.sdpa() as report:
        assert call(*qkv, scale=float("inf")).isnan().all()
    assert (report.calls, calls[3:]) == (1, [second, first])


def test_blocks_that_overlap_and_end_elsewhere() -> None:
    """As blocks of generators may: each takes calls until its own end, and nothing stays on."""
    qkv = tensors()
    first, second = tilewise.sdpa(), tilewise.sdpa()
    one = first.__enter__()
    two = contextvars.copy_context().run(second.__enter__)
    with tilewise.sdpa() as third:
        first.__exit__(None, None, None)
        call(*qkv)
    call(*qkv)
    second.__exit__(None, None, None)
    with tilewise.sdpa():
        call(*qkv)
    assert (one.calls, two.calls, third.taken) == (0, 0, 1)


def test_multihead_attention_reaches_it() -> None:
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    x = torch.randn(2, 9, 16)
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[1, 6:] = True
    expected, _ = layer(x, x, x, key_padding_mask=padding, need_weights=False)
    with tilewise.sdpa() as report:
        found, _ = layer(x, x, x, key_padding_mask=padding, need_weights=False)
    assert report.taken == 1
    torch.testing.assert_close(found, expected)


class Marked(Tensor):
    """A class of somebody's own."""


def test_vmap_is_taken() -> None:
    """One call for all; a mask of each call too."""
    qkv = [torch.stack([x, -x, 2 * x]) for x in tensors()]
    masks = torch.rand(3, 1, 1, qkv[1].shape[-2]) < 0.8
    with tilewise.sdpa() as report:
        found = torch.func.vmap(call)(*qkv)
        masked = torch.func.vmap(lambda *x: call(*x[:3], attn_mask=x[3]))(*qkv, masks)
    assert report.taken == 2
    for at in range(3):
        torch.testing.assert_close(found[at], BUILTIN(*[x[at] for x in qkv]))
        due = BUILTIN(*[x[at] for x in qkv], attn_mask=masks[at])
        torch.testing.assert_close(masked[at], due)


def test_other_classes_and_transforms_are_left() -> None:
    qkv = tensors()
    with tilewise.sdpa() as report:
        marked = [x.as_subclass(Marked) for x in qkv]
        assert isinstance(call(*marked), Marked)
        proxy = torch.fx.symbolic_trace(lambda q, k, v: call(q, k, v))
    assert "scaled_dot_product_attention" in proxy.code
    assert report.left["a tensor of another class (Marked)"] == 1
    assert report.taken == 0


def targets(counter: CompileCounterWithBackend) -> str:
    return " ".join(str(node.target) for node in counter.graphs[-1].graph.nodes)


def test_compiled_for_whoever_is_on() -> None:
    qkv = tensors()
    counter = CompileCounterWithBackend("aot_eager")
    model = torch.compile(lambda q, k, v: call(2 * q, k, v), backend=counter, fullgraph=True)
    plain = model(*qkv)
    assert "tilewise" not in targets(counter)
    with tilewise.sdpa() as report:
        taken = model(*qkv)
        assert "tilewise.attention" in targets(counter)
        with tilewise.sdpa() as inner:
            model(*qkv)
    assert report.taken == 1  # when it was traced
    assert inner.calls == 0
    model(*qkv)
    assert counter.frame_count == 2
    torch.testing.assert_close(taken, plain)
    with tilewise.sdpa() as report:
        wide = tensors(2, 600)
        torch.testing.assert_close(model(*wide), BUILTIN(2 * wide[0], *wide[1:]))
    assert set(report.left) == {"a width over 512"}


def test_another_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'spda'"):
        _ = tilewise.spda


def test_a_checkpoint_is_computed_again_inside() -> None:
    q, k, v = (x.requires_grad_() for x in tensors())
    # Stopped early, the second computation would not come back to be counted.
    with tilewise.sdpa() as report, set_checkpoint_early_stop(False):
        plain = torch.autograd.grad(call(q, k, v, dropout_p=0.3).sum(), q)[0]
        assert plain.isfinite().all()
        out = checkpoint(call, q, k, v, is_causal=True, use_reentrant=False)
        found = torch.autograd.grad(out.sum(), (q, k, v))
    assert report.taken == 3
    want = torch.autograd.grad(BUILTIN(q, k, v, is_causal=True).sum(), (q, k, v))
    torch.testing.assert_close(found, want)
