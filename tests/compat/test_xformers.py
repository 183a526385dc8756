"""xformers' attention and its biases, against plain torch in float64 (see ``xformers_cases``)."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import peak, plain
from tests.compat.xformers_cases import CASES, ROWS, Case
from tests.conftest import ran
from tests.contract import assert_all_same_bits, assert_exact, assert_same_bits
from tilewise import compat
from tilewise.compat import xformers as ours
from tilewise.compat.xformers import attn_bias
from tilewise.compat.xformers.calls import read_call
from tilewise.compat.xformers.reading import NAMES
from tilewise.errors import InvalidArgument, Unsupported

XOPS: Any = ours
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def drawn(
    *sizes: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 3
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*size, generator=generator).to(dtype) for size in sizes]


def reference(
    tensors: list[Tensor], dtype: torch.dtype, seen: Tensor | None, added: Tensor | None = None
) -> list[Tensor]:
    """Out [B, M, H, Kv], lse [B, H, M], and the gradients of ``sum(weights * out)``."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in tensors[:3]]
    if added is not None:
        leaves.append(added.detach().to(dtype).requires_grad_())
    q, k, v = (x.transpose(1, 2) for x in leaves[:3])
    mask = None if seen is None else lambda b, h, m, n: seen[m, n]
    score = None if added is None else lambda s, b, h, m, n: s + leaves[3]
    found = plain.attend(q, k, v, mask=mask, score=score)
    out = found.out.transpose(1, 2)
    grads = torch.autograd.grad((out * tensors[3].to(dtype)).sum(), leaves)
    return [out.detach(), found.lse.detach(), *grads]


def check(found: list[Tensor], tensors: list[Tensor], *more: Any) -> None:
    """Each of out, lse and gradients by the 2x rule; None is not looked at."""
    near = reference(tensors, tensors[0].dtype, *more)
    truth = reference(tensors, torch.float64, *more)
    names = ("out", "lse", "dq", "dk", "dv", "d bias")
    for name, got, plainly, exact in zip(names, found, near, truth, strict=False):
        if got is not None:
            assert_exact(got, plainly, exact, name)


def of(case: Case, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v and weights of the output for a case."""
    rows, batch = (sum(ROWS), 1) if case.keys else (7, 2)
    sizes = ((batch, rows, 4, 16), (batch, case.total, 4, 16), (batch, case.total, 4, 24))
    return drawn(*sizes, (batch, rows, 4, 24), dtype=dtype)


def test_every_bias_has_a_case() -> None:
    assert {case.name for case in CASES} == set(NAMES) - {"LowerTriangularMaskWithTensorBias"}
    assert all(hasattr(attn_bias, name) for name in attn_bias.__all__)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_bias_does_what_its_definition_says(case: Case, dtype: torch.dtype) -> None:
    *qkv, weights = tensors = of(case, dtype)
    bias = case.make(attn_bias)
    assert type(bias).__name__ == case.name
    leaves = [x.clone().requires_grad_() for x in qkv]
    out = XOPS.memory_efficient_attention(*leaves, bias)
    grads = torch.autograd.grad((out * weights).sum(), leaves)
    alone = XOPS.memory_efficient_attention(*qkv, bias)  # without gradients keys stay in place
    _, lse = XOPS.memory_efficient_attention_forward_requires_grad(*qkv, bias)
    check([alone, lse], tensors, case.seen())
    check([out.detach(), None, *grads], tensors, case.seen())  # type: ignore[list-item]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_separate_passes_give_the_same_gradients(case: Case) -> None:
    *qkv, weights = tensors = of(case)
    bias = case.make(attn_bias)
    out, lse = XOPS.memory_efficient_attention_forward_requires_grad(*qkv, bias)
    grads = XOPS.memory_efficient_attention_backward(weights, out, lse, *qkv, bias)
    check([out, lse, *grads], tensors, case.seen())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_materialize_is_the_definition(case: Case) -> None:
    bias, seen = case.make(attn_bias), case.seen()
    found = bias.to("cpu").materialize((2, 3, *seen.shape))
    assert found.shape == (2, 3, *seen.shape)
    assert_same_bits(found[1, 2], torch.zeros(seen.shape).masked_fill(~seen, -torch.inf), case.name)


@pytest.mark.parametrize("case", [x for x in CASES if x.total > 12], ids=lambda case: case.name)
@pytest.mark.parametrize("wanted", [False, True])
def test_keys_that_nobody_sees_may_hold_anything(case: Case, wanted: bool) -> None:
    q, k, v, _ = of(case)
    bias = case.make(attn_bias)
    expected = XOPS.memory_efficient_attention(q.requires_grad_(wanted), k, v, bias)
    used = {row for rows in case.keys or () for row in rows}
    unused = [row for row in range(case.total) if row not in used]
    k[:, unused], v[:, unused] = torch.nan, torch.inf
    found = XOPS.memory_efficient_attention(q, k, v, bias)
    assert_same_bits(found.detach(), expected.detach(), case.name)


@pytest.mark.parametrize("kind", ["tensor", "causal", "broadcast"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_is_added_and_has_its_gradient(kind: str, dtype: torch.dtype) -> None:
    tensors = drawn((2, 7, 4, 16), (2, 9, 4, 16), (2, 9, 4, 24), (2, 7, 4, 24), dtype=dtype)
    *qkv, weights = tensors
    (added,) = drawn((1, 4, 1, 9) if kind == "broadcast" else (2, 4, 7, 9), dtype=dtype, seed=8)
    leaves = [x.clone().requires_grad_() for x in (*qkv, added)]
    bias: Any = leaves[3]
    if kind == "causal":
        bias = attn_bias.LowerTriangularMask().add_bias(bias)
    out = XOPS.memory_efficient_attention(*leaves[:3], bias)
    grads = torch.autograd.grad((out * weights).sum(), leaves)
    seen = torch.ones(7, 9, dtype=torch.bool).tril() if kind == "causal" else None
    found = [out.detach(), None, *grads]
    check(found, tensors, seen, added)


def test_layouts_of_one_head_and_of_groups() -> None:
    q, k, v = drawn((6, 7, 16), (6, 9, 16), (6, 9, 24))
    (added,) = drawn((6, 7, 9))
    single = XOPS.memory_efficient_attention(q, k, v, added)
    four = XOPS.memory_efficient_attention(*(x[:, :, None] for x in (q, k, v)), added[:, None])
    assert_same_bits(single, four[:, :, 0], "[B, M, K]")
    q, k, v = drawn((2, 7, 2, 3, 16), (2, 9, 2, 3, 16), (2, 9, 2, 3, 24))
    (added,) = drawn((2, 2, 3, 7, 9))
    groups, lse = XOPS.memory_efficient_attention_partial(q, k, v, added)
    flat = (x.flatten(2, 3) for x in (q, k, v))
    four, lse4 = XOPS.memory_efficient_attention_partial(*flat, added.flatten(1, 2))
    assert_same_bits(groups.flatten(2, 3), four, "[B, M, G, H, K]")
    assert_same_bits(lse.flatten(1, 2), lse4, "lse")
    broad = XOPS.memory_efficient_attention(q, k, v, added[:, :, :1, :1])
    whole = added[:, :, :1, :1].expand_as(added).contiguous()
    assert_same_bits(broad, XOPS.memory_efficient_attention(q, k, v, whole), "broadcast")


@pytest.mark.parametrize("kind", ["expanded", "leaf", "view of a leaf"])
@pytest.mark.parametrize("shape", [(2, 9, 1, 16), (2, 9, 2, 1, 16), (2, 9, 1, 1, 16)], ids=str)
def test_expanded_heads_have_the_gradient_of_all_heads(shape: tuple[int, ...], kind: str) -> None:
    """Of keys that were expanded it is summed; a leaf with that memory has one for each head."""
    heads = (4,) if len(shape) == 4 else (2, 3)
    q, k, v = drawn((2, 7, *heads, 16), shape, shape)
    (weights,) = drawn(tuple(q.shape), seed=4)
    full = [x.expand(*x.shape[:2], *heads, 16).contiguous().requires_grad_() for x in (k, v)]
    XOPS.memory_efficient_attention(q, *full).backward(weights)
    if kind == "expanded":
        given = [x.requires_grad_() for x in (k, v)]
        wide = [x.expand(*x.shape[:2], *heads, 16) for x in given]
    else:
        given = wide = [x.expand(*x.shape[:2], *heads, 16).requires_grad_() for x in (k, v)]
        wide = wide if kind == "leaf" else [x.transpose(0, 1).transpose(0, 1) for x in wide]
    grads = torch.autograd.grad((XOPS.memory_efficient_attention(q, *wide) * weights).sum(), given)
    for name, found, each in zip("kv", grads, full, strict=True):
        assert each.grad is not None
        due = each.grad.double().sum_to_size(found.shape)
        assert_exact(found, due.float(), due, f"d{name}")


def test_expanded_heads_are_read_as_one() -> None:
    q, k, v = drawn((2, 7, 2, 3, 16), (2, 9, 2, 1, 16), (2, 9, 2, 1, 24))
    wide_k, wide_v = (x.expand(-1, -1, -1, 3, -1) for x in (k, v))
    call = read_call(q, wide_k, wide_v, None)
    assert call.k.shape == (2, 9, 2, 16)
    assert call.v.data_ptr() == v.data_ptr()


def test_dropout_scale_and_output_dtype() -> None:
    q, k, v = drawn((2, 7, 4, 16), (2, 9, 4, 16), (2, 9, 4, 24), dtype=torch.bfloat16)
    expected = XOPS.memory_efficient_attention(q * 2, k, v)
    assert_same_bits(XOPS.memory_efficient_attention(q, k, v, scale=0.5), expected, "scale")
    wide = XOPS.memory_efficient_attention(q, k, v, output_dtype=torch.float32)
    exact = XOPS.memory_efficient_attention(*(x.float() for x in (q, k, v)))
    assert_same_bits(wide, exact, "wider")
    narrow = XOPS.memory_efficient_attention(
        *(x.float() for x in (q, k, v)), output_dtype=torch.float16
    )
    assert_same_bits(narrow, exact.half(), "narrower")
    ones = torch.ones(1, 9, 4, 24)
    torch.manual_seed(5)
    first = XOPS.memory_efficient_attention(ones, ones, ones, p=0.4)
    torch.manual_seed(5)
    assert_same_bits(XOPS.memory_efficient_attention(ones, ones, ones, p=0.4), first, "seed")
    assert first.unique().numel() > 1
    bias = attn_bias.BlockDiagonalPaddedKeysMask.from_seqlens([4, 5], 8, [3, 6], device="cpu")
    keys = torch.ones(1, 16, 4, 24)
    dropped = XOPS.memory_efficient_attention(ones, keys, keys, bias, p=0.4)
    assert 0.7 < dropped.mean() < 1.3
    assert dropped.unique().numel() > 1


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("heads", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_are_merged_with_gradients(
    dtype: torch.dtype, heads: tuple[int, ...], stacked: bool
) -> None:
    sizes = [(2, rows, *heads, 16) for rows in (7, 12, 12, 7)]
    tensors = drawn(*sizes, dtype=dtype)
    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    q, k, v = leaves
    parts = [
        XOPS.memory_efficient_attention_partial(q, k[:, piece], v[:, piece])
        for piece in (slice(0, 6), slice(6, 12))
    ]
    outs, lses = ([part[at] for part in parts] for at in (0, 1))
    assert all(out.dtype == torch.float32 for out in outs)
    lses[0] = torch.nn.functional.pad(lses[0], (0, 2 * (not stacked)))  # as some kernels lay it out
    given = (torch.stack(outs), torch.stack(lses)) if stacked else (outs, lses)
    out, lse = XOPS.merge_attentions(*given, output_dtype=dtype)
    assert out.dtype == dtype
    grads = torch.autograd.grad((out * tensors[3]).sum(), leaves)
    flat = [x.flatten(2, -2) for x in (out.detach(), *grads)]
    check(
        [flat[0], lse.detach().flatten(1, -2), *flat[1:]], [x.flatten(2, -2) for x in tensors], None
    )
    again, none = XOPS.merge_attentions(*given, write_lse=False)
    assert none is None
    assert again.dtype == torch.float32


def test_a_backward_of_merged_results_is_that_of_its_keys() -> None:
    """As ring attention does it: each part with the output and lse of all keys."""
    *qkv, weights = tensors = drawn((1, 7, 4, 16), (1, 12, 4, 16), (1, 12, 4, 16), (1, 7, 4, 16))
    q, k, v = qkv
    pieces = [(k[:, :6], v[:, :6]), (k[:, 6:], v[:, 6:])]
    parts = [XOPS.memory_efficient_attention_forward_requires_grad(q, *piece) for piece in pieces]
    out, lse = XOPS.merge_attentions(*zip(*parts, strict=True))
    found = [
        XOPS.memory_efficient_attention_backward(weights, out, lse, q, *piece) for piece in pieces
    ]
    dq = found[0][0] + found[1][0]
    dk, dv = (torch.cat([part[at] for part in found], 1) for at in (1, 2))
    check([out, lse, dq, dk, dv], tensors, None)


def test_lists_of_tensors_are_packed_and_split() -> None:
    lists = drawn((2, 3, 4, 16), (1, 5, 4, 16), seed=1)
    bias, packed = attn_bias.BlockDiagonalMask.from_tensor_list(lists)
    assert packed.shape == (1, 11, 4, 16)
    assert_all_same_bits(bias.split(packed), lists, "split")
    keys = drawn((2, 4, 4, 16), (1, 6, 4, 16), seed=2)
    bias, q, k, v = attn_bias.BlockDiagonalMask.from_tensor_lists_qkv(lists, keys, keys)
    out = bias.split_queries(XOPS.memory_efficient_attention(q, k, v, bias))
    for found, own, its in zip(out, lists, keys, strict=True):
        alone = XOPS.memory_efficient_attention(own, its, its)
        assert_exact(found, alone, alone.double(), "of a list")
    assert [x.shape for x in bias.split_kv(k)] == [x.shape for x in keys]
    with pytest.raises(InvalidArgument, match="split_queries or split_kv"):
        bias.split(q)


def test_a_gap_and_padding_become_pages() -> None:
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    q, k, v = drawn((1, 4, 2, 16), (1, 16, 2, 16), (1, 16, 2, 16))
    padded = attn_bias.BlockDiagonalPaddedKeysMask.from_seqlens([1, 3], 8, [5, 7], device="cpu")
    gappy = attn_bias.BlockDiagonalGappyKeysMask.from_seqlens(
        [1, 3], [2, 9, 16], [5, 7], device="cpu"
    )
    pages = padded.make_paged(table, 4, attn_bias.PagedBlockDiagonalPaddedKeysMask)
    given = (gappy.make_paged(table, 4, 8, attn_bias.PagedBlockDiagonalGappyKeysMask), gappy)
    inner = attn_bias.PagedBlockDiagonalGappyKeysMask.from_seqlens([1, 3], [2, 1], [5, 7], table, 4)
    for one, other in ((pages, padded), given, (inner, gappy)):
        found = XOPS.memory_efficient_attention(q, k, v, one)
        assert_same_bits(found, XOPS.memory_efficient_attention(q, k, v, other), "pages")


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("kind", ["Padded", "Gappy"])
def test_lengths_may_be_written_into_a_bias(kind: str, wanted: bool) -> None:
    q, k, v = drawn((1, 4, 2, 16), (1, 16, 2, 16), (1, 16, 2, 16))
    where: Any = 8 if kind == "Padded" else [0, 8, 16]
    made = getattr(attn_bias, f"BlockDiagonal{kind}KeysMask").from_seqlens
    bias, longer = (made([1, 3], where, keys, device="cpu") for keys in ([2, 3], [5, 7]))
    expected = XOPS.memory_efficient_attention(q.requires_grad_(wanted), k, v, longer)
    bias.k_seqinfo.seqlen.copy_(torch.tensor([5, 7]))
    found = XOPS.memory_efficient_attention(q, k, v, bias)
    assert_same_bits(found.detach(), expected.detach(), "written into")


def test_passes_without_a_graph_say_so() -> None:
    q, k, v = (x.requires_grad_() for x in drawn(*[(1, 5, 2, 8)] * 3))
    for name in ("forward", "forward_requires_grad"):
        found = getattr(XOPS, f"memory_efficient_attention_{name}")(q, k, v)
        out = found if isinstance(found, Tensor) else found[0]
        with pytest.raises(Unsupported, match="query requires a gradient"):
            out.sum().backward()


def test_it_compiles_in_one_graph() -> None:
    q, k, v = drawn((1, 9, 4, 16), (1, 12, 4, 16), (1, 12, 4, 16))
    blocks = attn_bias.BlockDiagonalMask.from_seqlens([4, 5], [6, 6], device="cpu")
    for bias in (None, attn_bias.LowerTriangularMask(), blocks):
        compiled = torch.compile(
            lambda *x: XOPS.memory_efficient_attention(*x),
            fullgraph=True,
            backend="aot_eager",
        )
        found = compiled(q, k, v, bias)
        assert_same_bits(found, XOPS.memory_efficient_attention(q, k, v, bias), "compiled")


@peak.only_linux
def test_a_cache_of_sequences_takes_no_matrix() -> None:
    """A matrix of 4,096 rows and 32,768 keys would be 512 MiB for each head."""
    code = """
import torch
from tests.peak import Peak
from tilewise.compat.xformers import attn_bias, memory_efficient_attention

torch.set_num_threads(1)
q, k, v = torch.randn(1, 4096, 2, 16), *torch.randn(2, 1, 32768, 2, 16)
made = attn_bias.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens
bias = made([1024] * 4, 8192, [1500, 1024, 2000, 1200], device="cpu")
memory_efficient_attention(q[:, :8], k[:, :8], v[:, :8])
watch = Peak()
memory_efficient_attention(q, k, v, bias)
memory_efficient_attention(q.requires_grad_(), k.requires_grad_(), v, bias).sum().backward()
print(watch.mib())
"""
    ((most,),) = peak.printed(code)
    assert float(most) < 64


STAND_IN = """
from tilewise import compat
compat.install("xformers")
import importlib.metadata, importlib.util
import xformers, xformers.ops as xops
from xformers.ops import fmha, memory_efficient_attention
from xformers.ops.fmha.attn_bias import BlockDiagonalCausalMask
assert xops.fmha.attn_bias.BlockDiagonalCausalMask is BlockDiagonalCausalMask
assert fmha.BlockDiagonalMask in BlockDiagonalCausalMask.__mro__
assert importlib.metadata.version("xformers") == xformers.__version__
assert importlib.util.find_spec("xformers.ops.swiglu_op") is None
assert not hasattr(xops, "SwiGLU")
compat.uninstall("xformers")
assert importlib.util.find_spec("xformers") is None
print(memory_efficient_attention.__module__)
"""


@pytest.mark.skipif(
    any(each.name == "xformers" for each in importlib.metadata.distributions()),
    reason="xformers itself is installed",
)
def test_a_stand_in_is_found_by_its_names() -> None:
    done = ran(sys.executable, "-W", "error", "-c", STAND_IN)
    assert done.stdout.strip() == "tilewise.compat.xformers.fmha"
    assert compat.install is not None
