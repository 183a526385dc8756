"""Key lists at their edges: nothing to read, memory of odd strides, wide blocks, symbols."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

import tilewise
from tests.contract import assert_all_same_bits, assert_same_bits
from tests.test_key_lists import SIZES, lists_of, seen_by
from tests.variants_catalogue import assert_all_close
from tilewise import KeyBlocks, masks, scores
from tilewise.engine import listed
from tilewise.errors import InvalidArgument, Unsupported

NO_LIST = torch.full((2, 1, 37, 3), -1)


def drawn(batch: int = 2, queries: int = 37, keys: int = 53, heads: int = 4) -> list[Tensor]:
    """Return q [B, Hq, M, 8], k [B, 2, N, 8] and v [B, 2, N, 5], each a leaf."""
    generator = torch.Generator().manual_seed(4)
    shapes = (batch, heads, queries, 8), (batch, 2, keys, 8), (batch, 2, keys, 5)
    leaves = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [leaf.requires_grad_() for leaf in leaves]


@pytest.mark.parametrize("query_block", [1, 8])
def test_no_batch_items(query_block: int) -> None:
    """Nothing comes back, in the right shapes, and so do gradients."""
    leaves = drawn(batch=0)
    lists = torch.zeros(0, 2, -(-37 // query_block), 3, dtype=torch.int32)
    given: dict[str, Any] = {"keys": KeyBlocks(lists, 1, query_block), "return_lse": True}
    out, lse, _ = tilewise.attention(*leaves, **given)
    out.sum().backward()
    assert (out.shape, lse.shape) == ((0, 4, 37, 5), (0, 4, 37))
    for leaf in leaves:
        assert leaf.grad is not None
        assert leaf.grad.shape == leaf.shape


@pytest.mark.parametrize("packed", [False, True])
def test_no_keys(packed: bool) -> None:
    """With a mask and a bias, which have no columns; and no index names a key."""
    q, k, v = drawn(batch=1, keys=0)
    bias = torch.zeros(37, 0, dtype=torch.float64, requires_grad=True)
    lists = NO_LIST[:1, 0] if packed else NO_LIST[:1]
    given: dict[str, Any] = {"mask": torch.ones(37, 0, dtype=torch.bool), "return_lse": True}
    given["score"] = scores.bias(bias)

    def call(keys: Tensor) -> Any:
        if not packed:
            return tilewise.attention(q, k, v, keys=keys, **given)
        q1, k1, v1 = (x[0].transpose(0, 1) for x in (q, k, v))
        ends = torch.tensor([0, 37]), torch.tensor([0, 0])
        return tilewise.attention_varlen(q1, k1, v1, *ends, keys=keys, **given)

    out, lse, _ = call(lists)
    out.sum().backward()
    assert bool((out == 0).all())
    assert bool((lse == -math.inf).all())
    for leaf in (q, k, v, bias):
        assert leaf.grad is not None
        assert bool((leaf.grad == 0).all())
    with pytest.raises(InvalidArgument, match="got 0 in list 0"):
        call(torch.zeros_like(lists))


@pytest.mark.parametrize("packed", [False, True])
def test_an_index_that_leaves_its_tensor_is_refused(packed: bool) -> None:
    """As without lists, whether a kernel knows the step by name (a sum is a bias) or not."""
    q, k, v = drawn(batch=1)
    lists = torch.zeros(1, 1, 37, 3, dtype=torch.int32)
    table, heads = torch.zeros(10), torch.zeros(1)
    wrong: list[Any] = [
        lambda s, b, h, m, n: s + table[n],
        lambda s, b, h, m, n: s * table[n],
        lambda s, b, h, m, n: s + table[m],
        lambda s, b, h, m, n: s + heads[h],
    ]

    def call(score: Any) -> Any:
        if packed:
            q1, k1, v1 = (x[0].transpose(0, 1) for x in (q, k, v))
            ends = torch.tensor([0, 37]), torch.tensor([0, 53])
            return tilewise.attention_varlen(q1, k1, v1, *ends, keys=lists[0], score=score)
        return tilewise.attention(q, k, v, keys=lists, score=score)

    for score in wrong:
        with pytest.raises(InvalidArgument, match="score: got the index"):
            call(score)


@pytest.mark.parametrize("many", [1 << 31, (1 << 32) + 10])
def test_more_keys_than_numbers_of_32_bits(many: int) -> None:
    """Refused for what they are; larger blocks are fewer."""
    q, k = torch.randn(1, 1, 2, 8), torch.randn(1, 1, 1, 8)
    every = k.expand(1, 1, many, 8)
    with pytest.raises(Unsupported, match=rf"no {many} keys [^$]*KeyBlocks"):
        tilewise.attention(q, every, every, keys=torch.zeros(1, 1, 2, 1, dtype=torch.int64))
    blocks = KeyBlocks(torch.full((1, 1, 2, 1), (many - 1) // 64), 64)
    out = tilewise.attention(q, every, every, keys=blocks)
    torch.testing.assert_close(out, k.expand(1, 1, 2, 8))


def test_packed_queries_of_none() -> None:
    """No query rows in all."""
    q, k, v = (x[0].transpose(0, 1) for x in drawn(queries=0))
    ends = torch.tensor([0, 0]), torch.tensor([0, 53])
    lists = torch.full((1, 0, 3), -1)
    assert tilewise.attention_varlen(q, k, v, *ends, keys=lists).shape == (0, 4, 5)


@pytest.mark.parametrize("pages", [(3, 0), (0, 1)])
def test_no_pages(pages: tuple[int, int]) -> None:
    """A block table without columns, and no pages: no sequence has keys."""
    many, columns = pages
    q = drawn()[0].detach()
    k, v = torch.zeros(many, 2, 4, 8).double(), torch.zeros(many, 2, 4, 5).double()
    table, lengths = torch.zeros(2, columns, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    assert bool((tilewise.attention_paged(q, k, v, table, lengths, keys=NO_LIST) == 0).all())


def test_gradients_of_pages_are_refused_at_once() -> None:
    """By the call, as without lists, and not by its backward."""
    q, k, v = drawn()
    table, lengths = torch.tensor([[0], [1]]), torch.tensor([53, 53])
    with pytest.raises(Unsupported, match="gradients of paged keys"):
        tilewise.attention_paged(q, k, v, table, lengths, keys=NO_LIST)


def test_nested_tensors_are_refused_by_name() -> None:
    """The error says which call takes their packed values."""
    q = torch.nested.nested_tensor([torch.zeros(3, 2, 4)], layout=torch.jagged).transpose(1, 2)
    with pytest.raises(Unsupported, match=r"nested tensors with key lists[^$]*attention_varlen"):
        tilewise.attention(q, q, q, keys=torch.zeros(1, 1, 3, 2, dtype=torch.int32))


def _strided(x: Tensor, *strides: int) -> Tensor:
    buffer = x.new_full((2 * x.numel() + sum(strides),), math.nan)
    return buffer.as_strided(x.shape, strides).copy_(x)


def test_the_stride_of_one_item_means_nothing() -> None:
    """One batch item, head or key may have any stride: it is never taken."""
    q, k, v = (x.detach() for x in drawn())
    one_key = torch.tensor([0, -1]).expand(2, 1, 37, 2)
    for queries, keys, values, lists in (
        (q[:1], _strided(k[:1], 7, 53 * 8, 8, 1), v[:1], lists_of(SIZES, 1)[:1]),
        (q, _strided(k[:, :1], 53 * 8, 3, 8, 1), v[:, :1], lists_of(SIZES, 1)),
        (q, _strided(k[:, :, :1], 16, 8, 5, 1), v[:, :, :1], one_key),
        (q[:1], k[:1], _strided(v[:1], 11, 53 * 5, 5, 1), lists_of(SIZES, 1)[:1]),
    ):
        got = tilewise.attention(queries, keys, values, keys=lists)
        compact = (x.clone(memory_format=torch.contiguous_format) for x in (keys, values))
        assert_same_bits(got, tilewise.attention(queries, *compact, keys=lists), "out")


def test_keys_beyond_what_int32_counts() -> None:
    """Batch items that lie 2^31 numbers and more apart, in steps of one number."""
    step = 2**31 + 9
    # Of which four pages are touched: torch.empty would fill all of it with NaN here.
    memory = torch.from_numpy(np.zeros(step + 32, dtype=np.float16))
    k = memory.as_strided((2, 1, 4, 8), (step, 8, 8, 1)).copy_(torch.randn(2, 1, 4, 8))
    q, lists = torch.randn(2, 4, 3, 8).half(), torch.tensor([3, 1]).expand(2, 1, 3, 2)
    due = tilewise.attention(q, k.contiguous(), k.contiguous(), keys=lists)
    assert_same_bits(tilewise.attention(q, k, k, keys=lists), due, "out")


def test_blocks_that_are_longer_than_the_call() -> None:
    """They are one block, and take no memory for what is not there."""
    q, k, v = drawn()
    whole = torch.zeros(2, 1, 1, 1, dtype=torch.int32)
    got = tilewise.attention(q, k, v, keys=KeyBlocks(whole, 2**40, 2**40))
    assert_all_close({"out": got}, {"out": tilewise.attention(q, k, v)})
    assert "2 of 53 keys" in str(tilewise.explain(q, k, v, keys=KeyBlocks(whole, 2**40, 2**40)))


def test_sinks_of_minus_infinity() -> None:
    """Such a sink is none, also for the entropy and its gradients, and in rows without keys."""
    lists, results = lists_of(SIZES, 2), []
    seen = seen_by(lists, SIZES.keys).repeat_interleave(2, 1)
    ways: tuple[dict[str, Any], ...] = {"keys": lists}, {"mask": seen}
    for given in ways:
        leaves = [*drawn(), torch.tensor([0.5, -math.inf, 2.0, -math.inf]).double()]
        sinks = leaves[3].requires_grad_()
        found = tilewise.attention(*leaves[:3], sinks=sinks, return_stats=True, **given)
        grads = torch.autograd.grad(found.out.sum() + found.stats.entropy.sum(), leaves)
        by_name = dict(zip("qkvs", grads, strict=True))
        results.append({"entropy": found.stats.entropy.detach(), **by_name})
    assert_all_close(*results)


def test_threads_change_no_bit_of_a_gradient() -> None:
    """Some are sums over all lists; 64 rows a list make parts of many sizes."""
    generator = torch.Generator().manual_seed(5)
    q, k = (torch.randn(1, h, 512, 16, generator=generator).requires_grad_() for h in (64, 1))
    lists = torch.randint(0, 512, (1, 1, 512, 128), generator=generator)
    found: list[tuple[Tensor, ...]] = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        bias = torch.zeros(64, 1, 1, requires_grad=True)
        out = tilewise.attention(q, k, k, keys=lists, score=scores.bias(bias))
        found.append(torch.autograd.grad(out.square().sum(), (bias, q, k)))
    assert_all_same_bits(found[1], found[0], "gradient")


def test_what_no_list_names_may_hold_anything() -> None:
    """NaN in the first and the last keys reaches neither the output nor a gradient."""
    q, k, v = drawn()
    lists = lists_of(SIZES, 1) + 1
    lists[(lists == 0) | (lists > 50)] = -1
    with torch.no_grad():
        for x in (k, v):
            x[:, :, [0, 51, 52]] = math.nan
    for mask in (None, masks.causal()):
        out = tilewise.attention(q, k, v, keys=lists, mask=mask)
        for found in (out, *torch.autograd.grad(out.sum(), (q, k, v))):
            assert bool(found.isfinite().all())


def test_symbolic_sizes() -> None:
    """torch.compile with symbols for sizes: as many keys in a list as heads."""

    def call(*tensors: Tensor) -> Any:
        q, k, v, keys, bias, sinks = tensors
        asked: dict[str, Any] = {"mask": masks.causal(), "return_stats": True}
        score = scores.bias(bias)
        return tilewise.attention(q, k, v, keys=keys, sinks=sinks, score=score, **asked).out

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    sinks = torch.zeros(4, requires_grad=True)
    for queries, keys in ((5, 12), (9, 20)):
        leaves = drawn(queries=queries, keys=keys)
        bias = torch.randn(queries, keys, dtype=torch.float64, requires_grad=True)
        lists = torch.randint(-1, keys, (2, 2, queries, 4))
        given = (*leaves, lists, bias, sinks)
        eager, traced = call(*given), compiled(*given)
        assert_same_bits(traced, eager, "out")


def test_results_may_be_changed_in_place() -> None:
    """Also those of a call in no_grad, later, where gradients are wanted."""
    q, k, v = drawn()
    lists, weight = lists_of(SIZES, 1), torch.ones(1, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        out, lse, stats = tilewise.attention(
            q, k, v, keys=lists, return_lse=True, return_stats=True
        )
    for x in (out, lse, stats.entropy):
        x.mul_(weight)
        x.sum().backward()
    assert weight.grad is not None
    for x in tilewise.attention(q, k, v, keys=lists, return_lse=True)[:2]:
        assert not x._is_view()


def test_what_calls_share_serves_every_mode() -> None:
    """A call in inference mode, then one with gradients of the same signature."""
    leaves = drawn(queries=3, keys=29)
    lists = torch.tensor([5, 1, 28]).expand(2, 1, 3, 3)
    with torch.inference_mode():
        first = tilewise.attention(*leaves, keys=lists, mask=masks.causal())
    out = tilewise.attention(*leaves, keys=lists, mask=masks.causal())
    out.sum().backward()
    assert_all_close({"out": out.detach()}, {"out": first.clone()})
    with torch.no_grad():
        other = tilewise.attention(*leaves, keys=lists - 1, mask=masks.causal())
    assert not torch.equal(other, first)
    with pytest.raises(InvalidArgument, match="29 in list 0"):
        tilewise.attention(*leaves, keys=lists + 24)


@pytest.mark.parametrize("queries", [1, 5])
def test_a_gradient_may_be_torchs_zeros_without_memory(queries: int) -> None:
    """The derivative of torch.sgn."""
    leaves = drawn(queries=queries)
    given: dict[str, Any] = {"return_lse": True, "return_stats": True}
    lists = torch.randint(53, (2, 2, queries, 3))
    out, lse, stats = tilewise.attention(*leaves, keys=lists, **given)
    for x in (out, lse, stats.entropy):
        found = torch.autograd.grad(x.sgn().sum(), leaves, retain_graph=True)
        assert not any(grad.any() for grad in found)


def test_a_gradient_may_wrap_others() -> None:
    """The torch op reaches what is inside."""
    leaves = drawn()
    out = tilewise.attention(*leaves, keys=lists_of(SIZES, 1))
    weight = torch.randn_like(out)
    wanted = torch.autograd.grad((out * weight).sum(), leaves, retain_graph=True)
    found = torch.autograd.grad((out * TwoTensor(weight, 2 * weight)).sum(), leaves)
    for grad, want in zip(found, wanted, strict=True):
        assert isinstance(grad, TwoTensor)
        assert_all_close({"a": grad.a, "b": grad.b}, {"a": want, "b": 2 * want})


def test_a_backward_pass_may_be_traced_alone() -> None:
    """The graph has the op, and the results of another gradient are not those of the first."""
    leaves = drawn()
    out = tilewise.attention(*leaves, keys=lists_of(SIZES, 1))

    def backward(grad: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, grad, retain_graph=True)

    traced = make_fx(backward)(torch.ones_like(out))
    grad = torch.randn_like(out)
    for found, wanted in zip(traced(grad), backward(grad), strict=True):
        assert_same_bits(found, wanted, "gradient")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert isinstance(backward(mode.from_tensor(grad))[0], FakeTensor)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch asks for it
def test_compiled_autograd_of_an_eager_call() -> None:
    leaves = drawn()
    out = tilewise.attention(*leaves, keys=lists_of(SIZES, 1))
    wanted = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    torch._dynamo.reset()
    with compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        out.sum().backward()
    for leaf, want in zip(leaves, wanted, strict=True):
        assert leaf.grad is not None
        assert_same_bits(leaf.grad, want, "gradient")


@pytest.mark.parametrize("strided", [False, True])
def test_lengths_of_any_strides(strided: bool) -> None:
    """Key lengths in int64 with a stride of 2 or 0, one list for each sequence."""
    q, pages = torch.randn(2, 4, 1, 8), torch.randn(4, 2, 8, 8)
    table, lists = torch.arange(4).view(2, 2), torch.tensor([0, 5]).expand(2, 1, 1, 2)
    lengths = torch.full((4,), 16)[::2] if strided else torch.tensor(16).expand(2)
    found = tilewise.attention_paged(q, pages, pages, table, lengths, keys=lists)
    wanted = tilewise.attention_paged(q, pages, pages, table, lengths.contiguous(), keys=lists)
    assert_same_bits(found, wanted, "out")


def _twins(x: Tensor) -> TwoTensor:
    return TwoTensor(x, x)


def _with_wrapper(name: str) -> TwoTensor:
    """Return a call in which one tensor wraps others, beside plain q, k, v and lists."""
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 16, 8)
    table, lengths, lists = torch.arange(4).view(2, 2), torch.tensor([9, 16]), NO_LIST[:, :, :5]
    given: dict[str, Any] = {"keys": lists}
    if name in ("bias", "slopes"):
        of_score = scores.bias if name == "bias" else scores.alibi
        given["score"] = of_score(_twins(torch.rand((5, 16) if name == "bias" else 4)))
    elif name == "mask":
        given["mask"] = _twins(torch.rand(5, 16) < 0.5)
    elif name == "sinks":
        given["sinks"] = _twins(torch.zeros(4))
    if name in ("table", "lengths"):
        table = _twins(table) if name == "table" else table
        lengths = _twins(lengths) if name == "lengths" else lengths
        pages = k.view(2, 2, 2, 8, 8).transpose(1, 2).flatten(0, 1)
        out: TwoTensor = tilewise.attention_paged(q, pages, pages, table, lengths, **given)
    elif name == "packed":
        ends = _twins(torch.tensor([0, 5])), _twins(torch.tensor([0, 16]))
        q, k = (x[0].transpose(0, 1) for x in (q, k))
        out = tilewise.attention_varlen(q, k, k, *ends, keys=lists[0])
    else:
        out = tilewise.attention(q, k, k, **given)
    return out


@pytest.mark.parametrize("name", ["bias", "slopes", "mask", "sinks", "table", "lengths", "packed"])
def test_any_tensor_may_wrap_others(name: str) -> None:
    assert isinstance(_with_wrapper(name), TwoTensor)


def test_parameters_are_plain_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not go the way of the op."""
    q, k, v = (torch.nn.Parameter(x.detach()) for x in drawn())
    sinks, bias = torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(37, 53))
    monkeypatch.setattr(listed, "lists_call", None)
    with torch.no_grad():
        given: dict[str, Any] = {"sinks": sinks, "score": scores.bias(bias)}
        assert type(tilewise.attention(q, k, v, keys=NO_LIST, **given)) is Tensor


def test_another_default_device_changes_nothing() -> None:
    """Also where neighbours share lists."""
    q, k, v = drawn(batch=1, queries=131, keys=257)
    lists = torch.arange(160).expand(1, 1, 131, 160)
    sinks = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(131, 257, dtype=torch.float64, requires_grad=True)

    def call() -> tuple[Tensor, ...]:
        given: dict[str, Any] = {"score": scores.bias(bias), "sinks": sinks, "keys": lists}
        out, _, stats = tilewise.attention(q, k, v, return_stats="top1", **given)
        leaves = (q, k, v, sinks, bias)
        return (out, stats.top1, *torch.autograd.grad(out.sum() + stats.entropy.sum(), leaves))

    with torch.device("meta"):  # first: what is kept may not lie there
        found = call()
    for x, wanted in zip(found, call(), strict=True):
        assert_same_bits(x, wanted, "result or gradient")


def test_indices_with_a_flag_for_their_sign() -> None:
    q, k, v = drawn()
    lists = lists_of(SIZES, 1)
    out = tilewise.attention(q, k, v, keys=torch._neg_view(-lists))
    assert_same_bits(out, tilewise.attention(q, k, v, keys=lists), "out")
