"""``torch.nn.attention.varlen`` over tilewise, where it is torch's flash implementation."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import attention

import tilewise.compat.sdpa  # noqa: F401  # it lets torch know the name
from tests.compat.flash_reference import Flags, attend, attend_packed
from tests.contract import assert_all_same_bits, assert_exact, assert_same_bits
from tilewise.compat.flash_impl import OF_SEQUENCES
from tilewise.errors import Unsupported

varlen: Any = pytest.importorskip("torch.nn.attention.varlen", reason="of torch 2.11 and later")
pytestmark = pytest.mark.skipif(
    "block_table" not in inspect.signature(varlen.varlen_attn).parameters,
    reason="this torch's varlen_attn has other arguments",
)
LENGTHS = ((7, 20), (9, 13), (0, 4), (5, 0), (8, 3))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WINDOWS = [(-1, -1), (-1, 0), (4, 0), (3, 2)]


@pytest.fixture(name="active", autouse=True)
def _active() -> Iterator[None]:
    attention.activate_flash_attention_impl("tilewise")
    yield
    attention.restore_flash_attention_impl()


def drawn(dtype: torch.dtype = torch.float32, heads: int = 2) -> tuple[list[Tensor], list[Tensor]]:
    """q, k, v and weights of the output, and the starts of rows and keys."""
    generator = torch.Generator().manual_seed(5)
    rows, keys = (sum(each) for each in zip(*LENGTHS, strict=True))
    sizes = ((rows, 4, 16), (keys, heads, 16), (keys, heads, 16), (rows, 4, 16))
    tensors = [torch.randn(*size, generator=generator).to(dtype) for size in sizes]
    starts = [
        torch.tensor([0, *each]).cumsum(0).to(torch.int32) for each in zip(*LENGTHS, strict=True)
    ]
    return tensors, starts


def reference(tensors: list[Tensor], window: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """Out, lse as flash-attn has it, and the gradients of ``sum(weights * out)``."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in tensors[:3]]
    q, k, v = leaves
    out, lse = attend_packed(q, k, v, LENGTHS, Flags(window_size=window), None, dtype)
    grads = torch.autograd.grad((out * tensors[3].to(dtype)).sum(), leaves)
    return [out.detach(), lse.detach(), *grads]


def check(found: list[Tensor], tensors: list[Tensor], window: tuple[int, int]) -> None:
    near = reference(tensors, window, tensors[0].dtype)
    truth = reference(tensors, window, torch.float64)
    for name, got, plainly, exact in zip(
        ("out", "lse", "dq", "dk", "dv"), found, near, truth, strict=False
    ):
        assert_exact(got, plainly, exact, name)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sequences_with_gradients(dtype: torch.dtype, window: tuple[int, int]) -> None:
    tensors, starts = drawn(dtype)
    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    out, lse = varlen.varlen_attn(
        *leaves,
        *starts,
        9,
        20,
        window_size=window,
        enable_gqa=True,
        return_aux=varlen.AuxRequest(lse=True),
    )
    grads = torch.autograd.grad((out * tensors[3]).sum(), leaves)
    check([out.detach(), lse.detach(), *grads], tensors, window)


def test_an_output_that_is_there_already() -> None:
    tensors, starts = drawn(heads=4)
    out = torch.full_like(tensors[3], torch.nan)
    given = varlen.AuxRequest(lse=True)
    found, lse = varlen.varlen_attn_out(out, *tensors[:3], *starts, 9, 20, return_aux=given)
    assert found is out
    check([out, lse], tensors, (-1, -1))


def test_pages_and_used_keys() -> None:
    """A cache of pages, and one in rows with room behind the keys in use, which may hold NaN."""
    (q, k, v, _), starts = drawn(heads=4)
    used = torch.tensor([keys for _, keys in LENGTHS], dtype=torch.int32)
    expected = varlen.varlen_attn(q, k, v, *starts, 9, 20, window_size=(-1, 0))
    spans = [slice(*starts[1][i : i + 2].tolist()) for i in range(len(LENGTHS))]
    room = torch.arange(len(LENGTHS) + 1, dtype=torch.int32) * 24
    wide = []
    for x in (k, v):
        rows = x.new_full((24 * len(LENGTHS), *x.shape[1:]), torch.nan)
        for i, span in enumerate(spans):
            rows[24 * i : 24 * i + span.stop - span.start] = x[span]
        wide.append(rows)
    found = varlen.varlen_attn(
        q, *wide, starts[0], room, 9, 24, window_size=(-1, 0), seqused_k=used
    )
    assert_exact(found, expected, expected.double(), "used")
    pages = [x.unflatten(0, (-1, 8)) for x in wide]
    table = torch.arange(3 * len(LENGTHS), dtype=torch.int32).reshape(-1, 3)
    found = varlen.varlen_attn(
        q, *pages, starts[0], None, 9, 24, window_size=(-1, 0), seqused_k=used, block_table=table
    )
    assert_exact(found, expected, expected.double(), "pages")


def test_a_batch_without_sequences() -> None:
    """The operators themselves take [B, S, H, D] too, as torch's do."""
    generator = torch.Generator().manual_seed(1)
    q, k, v, weights = (torch.randn(2, 7, 4, 16, generator=generator) for _ in range(4))
    flash: Any = torch.ops.aten
    out, lse, state, unused, _ = flash._flash_attention_forward(
        q, k, v, None, None, 7, 7, 0.0, True, False
    )

    def due(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        rows = attend(leaves[0], leaves[1], leaves[2], Flags(causal=True), None, dtype)[0]
        return rows.detach(), *torch.autograd.grad((rows * weights.to(dtype)).sum(), leaves)

    given = (weights, q, k, v, out, lse, None, None, 7, 7, 0.0, True, state, unused)
    found = OF_SEQUENCES["_flash_attention_backward"](*given)
    for each in zip((out, *found), due(torch.float32), due(torch.float64), strict=True):
        assert_exact(*each, "dense")


def test_it_compiles_in_one_graph() -> None:
    tensors, starts = drawn(heads=4)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return varlen.varlen_attn(q, k, v, *starts, 9, 20, window_size=(-1, 0))

    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    compiled: Any = torch.compile(call, fullgraph=True, backend="aot_eager")
    outs = [each(*leaves) for each in (compiled, call)]
    grads = [torch.autograd.grad((out * tensors[3]).sum(), leaves) for out in outs]
    assert_same_bits(outs[0].detach(), outs[1].detach(), "out")
    assert_all_same_bits(grads[0], grads[1], "gradient")


def test_what_torch_has_besides_is_refused() -> None:
    (q, k, v, _), starts = drawn(heads=4)
    flash: Any = torch.ops.aten._flash_attention_forward
    with pytest.raises(Unsupported, match="dropout_p in the flash-attention implementation"):
        flash(q, k, v, *starts, 9, 20, 0.1, False, False)
    with pytest.raises(Unsupported, match="return_debug_mask"):
        flash(q, k, v, *starts, 9, 20, 0.0, False, True)
    with pytest.raises(Unsupported, match="alibi_slopes"):
        flash(q, k, v, *starts, 9, 20, 0.0, False, False, alibi_slopes=torch.ones(4))


def test_torch_is_afterwards_what_it_was() -> None:
    (q, k, v, _), starts = drawn(heads=4)
    varlen.varlen_attn(q, k, v, *starts, 9, 20)
    attention.restore_flash_attention_impl()
    with pytest.raises(NotImplementedError, match="CPU"):  # torch has none there
        varlen.varlen_attn(q, k, v, *starts, 9, 20)
    attention.activate_flash_attention_impl("tilewise")
