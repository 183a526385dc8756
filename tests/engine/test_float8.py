"""float8 by the public calls: what is accepted, what is refused and in which words, and the tiled
reference that computes it anywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException

import tilewise
from tests.contract import assert_exact, assert_same_bits
from tilelab.cases.dense import dense
from tilewise import masks, scores
from tilewise.engine.call import with_scales
from tilewise.errors import InvalidArgument, InvalidType, Unsupported
from tilewise.problem import Operands
from tilewise.variants.float8 import FLOAT8, Scales

TILED: dict[str, Any] = {"backend": "tiled"}


def _qkv(batch: int = 2, heads: int = 4, kv_heads: int = 2, rows: int = 33) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    shapes = ((heads, rows, 16), (kv_heads, 45, 16), (kv_heads, 45, 24))
    return tuple(torch.randn(batch, *shape).to(FLOAT8) for shape in shapes)


def test_scales_of_every_shape_mean_the_same() -> None:
    """One element in any shape, one per head, one per head of each item; other floats too."""
    q, k, v = _qkv()
    expected = tilewise.attention(
        q, k, v, q_scale=torch.full((2, 4), 0.5), v_scale=torch.full((2, 2), 2.0), **TILED
    )
    assert expected.dtype is torch.bfloat16
    for q_scale, v_scale in (
        (torch.tensor(0.5), torch.tensor([2.0])),
        (torch.full((4,), 0.5), torch.full((1, 1, 1, 1), 2.0)),
        (torch.full((2, 4), 0.5, dtype=torch.float64), torch.full((2,), 2.0, dtype=torch.bfloat16)),
        (torch.full((4, 2), 0.5).T, torch.tensor(2.0).expand(2, 2)),
    ):
        got = tilewise.attention(q, k, v, q_scale=q_scale, v_scale=v_scale, **TILED)
        assert_same_bits(got, expected, str(tuple(q_scale.shape)))


def test_the_2x_rule() -> None:
    """The reference against the plain implementation, with everything that a call may have."""
    q, k, v = _qkv(rows=61)
    call: dict[str, Any] = {"mask": masks.causal(), "score": scores.softcap(3.0)}
    plan = tilewise.plan(q, k, v, **call, dropout_p=0.2, backend="tiled")
    scales = Scales(torch.rand(4) + 0.5, torch.tensor(-1.5), torch.rand(2, 2))
    operands = with_scales(Operands(q, k, v, seed=7), scales, plan.problem)
    got = plan.forward(operands, "rows")
    plain = dense(plan.problem, operands, dtype=FLOAT8)
    oracle = dense(plan.problem, operands)
    for name in ("out", "lse", "entropy"):
        assert_exact(getattr(got, name), getattr(plain, name), getattr(oracle, name), name)


def test_the_plain_implementation_rounds_its_probabilities() -> None:
    """It is less exact than the reference, but no further off than e4m3 is coarse."""
    q, k, v = _qkv()
    problem = tilewise.plan(q, k, v, backend="tiled").problem
    plain = dense(problem, Operands(q, k, v), dtype=FLOAT8)
    oracle = dense(problem, Operands(q, k, v))
    error = (plain.out.double() - oracle.out).abs().max()
    ours = (tilewise.attention(q, k, v, **TILED).double() - oracle.out).abs().max()
    assert plain.out.dtype is torch.bfloat16
    assert plain.lse.dtype is torch.float32
    assert 1.2 * ours < error < 2.0**-4 * v.double().abs().max()


def test_packed_sequences() -> None:
    """A scale per head of each sequence, which may be empty; and none at all."""
    torch.manual_seed(1)
    cu = torch.tensor([0, 20, 20, 53])
    q, k, v = (torch.randn(53, 2, 16).to(FLOAT8) for _ in range(3))
    k_scale = torch.rand(3, 2) + 0.5
    got = tilewise.attention_varlen(q, k, v, cu, cu, k_scale=k_scale, **TILED)
    for i, (begin, end) in enumerate(cu.unfold(0, 2, 1).tolist()):
        parts = [x[begin:end].transpose(0, 1)[None] for x in (q, k, v)]
        alone = tilewise.attention(*parts, k_scale=k_scale[i], backend="tiled")
        assert_same_bits(got[begin:end], alone[0].transpose(0, 1), f"sequence {i}")
    none = torch.zeros(1, dtype=torch.int64)
    empty = tilewise.attention_varlen(q[:0], k[:0], v[:0], none, none, **TILED)
    assert empty.shape == (0, 2, 16)
    assert empty.dtype is torch.bfloat16


def test_the_memory_order_of_q() -> None:
    q, k, v = (torch.randn(2, 33, 2, 16).to(FLOAT8).transpose(1, 2) for _ in range(3))
    out = tilewise.attention(q, k, v, **TILED)
    assert out.dtype is torch.bfloat16
    assert out.transpose(1, 2).is_contiguous()


def test_a_held_plan() -> None:
    """It serves calls with scales and without; scales that do not fit are refused as ever."""
    q, k, v = _qkv()
    plan = tilewise.plan(q, k, v, backend="tiled")
    scale = torch.tensor(0.5)
    got = tilewise.attention(q, k, v, q_scale=scale, plan=plan)
    assert_same_bits(got, tilewise.attention(q, k, v, q_scale=scale, **TILED), "out")
    assert_same_bits(
        tilewise.attention(q, k, v, plan=plan), tilewise.attention(q, k, v, **TILED), "out"
    )
    with pytest.raises(InvalidArgument, match=r"^q_scale: got shape \(3,\)"):
        tilewise.attention(q, k, v, q_scale=torch.ones(3), plan=plan)


def test_no_backend_takes_it_by_chance() -> None:
    """The CPU's kernels decline with a reason; the slow reference is taken by name only."""
    q, k, v = _qkv()
    with pytest.raises(Unsupported, match="float8_e4m3fn") as caught:
        tilewise.attention(q, k, v, backend="cpu")
    assert list(caught.value.reasons) == ["cpu"]


@pytest.mark.parametrize(
    ("name", "scale", "words"),
    [
        ("q_scale", torch.ones(2), r"got shape \(2,\); required: .* of one element, \[4\]"),
        ("k_scale", torch.ones(4), r"got shape \(4,\); required: .* of one element, \[2\]"),
        ("v_scale", torch.ones(1, 2), r"got shape \(1, 2\); required: .* or \[2, 2\]"),
        ("v_scale", torch.ones(0), r"got shape \(0,\)"),
        ("q_scale", torch.ones(4, dtype=torch.int32), "got a tensor of torch.int32"),
        ("q_scale", torch.ones(4).to(FLOAT8), "got a tensor of torch.float8_e4m3fn"),
        ("q_scale", torch.ones(4, device="meta"), "got device meta; required: q's device, cpu"),
    ],
)
def test_scales_that_do_not_fit(name: str, scale: Tensor, words: str) -> None:
    q, k, v = _qkv()
    keywords: dict[str, Any] = {name: scale, **TILED}
    with pytest.raises(InvalidArgument, match=f"^{name}: {words}"):
        tilewise.attention(q, k, v, **keywords)


def test_a_scale_that_is_a_number() -> None:
    q, k, v = _qkv()
    wrong: Any = 0.5
    with pytest.raises(InvalidType, match=r"^k_scale: got a float; .* torch.tensor\(scale"):
        tilewise.attention(q, k, v, k_scale=wrong, **TILED)


def test_scales_of_other_dtypes() -> None:
    q, k, v = (x.bfloat16() for x in _qkv())
    with pytest.raises(InvalidArgument, match=r"^v_scale: .*bfloat16.* Multiply v by it, or quant"):
        tilewise.attention(q, k, v, v_scale=torch.ones(1))


def test_other_float8_types() -> None:
    """e5m2 is wrong for attention; AMD's older formats are another thing, said with its fix."""
    q = torch.randn(1, 1, 4, 16)
    coarse = q.to(torch.float8_e5m2)
    with pytest.raises(InvalidArgument, match=r"^q: got torch.float8_e5m2; .*Two bits of fraction"):
        tilewise.attention(coarse, coarse, coarse)
    for dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
        other = q.to(dtype)
        with pytest.raises(Unsupported, match=r"gfx942.*\n *fix: convert it: x.float\(\)"):
            tilewise.attention(other, other, other)
    with pytest.raises(InvalidArgument, match=r"^k: got torch.float32; required: q's dtype"):
        tilewise.attention(q.to(FLOAT8), q, q)


@pytest.mark.parametrize("of", ["q", "v", "k_scale", "sinks", "bias"])
def test_gradients_are_refused(of: str) -> None:
    """Of whatever requires one, unless torch records nothing."""
    q, k, v = _qkv()
    tensors = {"q": q, "k": k, "v": v, "k_scale": torch.ones(2), "sinks": torch.zeros(4)}
    bias = torch.zeros(45)
    (bias if of == "bias" else tensors[of]).requires_grad_()

    def call() -> Any:
        q, k, v, k_scale, sinks = tensors.values()
        score = scores.bias(bias)
        return tilewise.attention(q, k, v, k_scale=k_scale, sinks=sinks, score=score, **TILED)

    with pytest.raises(Unsupported, match="float8 forward only"):
        call()
    with torch.no_grad():
        assert not call().requires_grad


def test_transforms_are_refused() -> None:
    q, k, v = _qkv()
    with pytest.raises(Unsupported, match="float8 forward only"):
        torch.func.grad(lambda s: tilewise.attention(q, k, v, q_scale=s, **TILED).float().sum())(
            torch.ones(())
        )
    with pytest.raises(Unsupported, match="float8 forward only"):
        torch.func.vmap(lambda q: tilewise.attention(q, k, v, **TILED))(q[None])


def test_autocast_leaves_it_alone() -> None:
    q, k, v = _qkv()
    expected = tilewise.attention(q, k, v, **TILED)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same_bits(tilewise.attention(q, k, v, **TILED), expected, "out")


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_equals_eager(dynamic: bool) -> None:
    torch._dynamo.reset()
    q, k, v = _qkv()
    scales = {"q_scale": torch.rand(4) + 0.5, "v_scale": torch.tensor(0.5)}

    def call(q: Tensor, k: Tensor, v: Tensor, scales: Any) -> Any:
        return tilewise.attention(
            q, k, v, mask=masks.causal(), return_lse=True, backend="tiled", **scales
        )

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    got, expected = compiled(q, k, v, scales), call(q, k, v, scales)
    assert_same_bits(got.out, expected.out, "out")
    assert_same_bits(got.lse, expected.lse, "lse")
    # Of the refusal torch 2.11 keeps the type in its own words, without ours.
    said = r"float8 forward only|raised exception Unsupported\("
    with pytest.raises(TorchDynamoException, match=said):
        compiled(q, k, v, {**scales, "q_scale": torch.rand(4).requires_grad_()})


def test_the_op() -> None:
    """torch's checks of the op, as far as they know float8; its derivative is refused."""
    q, k, v = _qkv()
    none: list[Tensor] = []
    head = (q, k, v, none, none, None, None, None, None, "", "", None, 0.0, "tiled", "top1")
    scales = (torch.ones(2, 4), torch.ones(2, 2), torch.ones(2, 2))
    checks = ("test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.tilewise.attention.default, (*head, *scales), test_utils=checks)
    leaf = scales[2].clone().requires_grad_()
    out = torch.ops.tilewise.attention(*head, None, None, leaf)[0]
    with pytest.raises(Unsupported, match="float8 forward only"):
        out.float().sum().backward()


def test_on_meta_tensors() -> None:
    """Shapes and dtypes without a value: what tracing sees."""
    q, k, v = (x.to("meta") for x in _qkv())
    result = tilewise.attention(
        q, k, v, q_scale=torch.ones(4, device="meta"), return_stats="top1", return_lse=True
    )
    assert result.out.dtype is torch.bfloat16
    assert result.lse.dtype is torch.float32
    assert result.out.shape == (2, 4, 33, 24)


def test_keys_in_pages() -> None:
    """As if the pages were laid out; a gradient of a scale is refused there too."""
    q, k, v = _qkv(batch=1)
    table, lengths = torch.tensor([[2, 0, 1]]), torch.tensor([45])
    scales: dict[str, Any] = {"k_scale": torch.tensor([[0.5, 2.0]]), "v_scale": torch.tensor(3.0)}
    in_pages = [
        x.view(torch.uint8)[0].unflatten(1, (3, 15)).transpose(0, 1)[[1, 2, 0]].view(FLOAT8)
        for x in (k, v)
    ]
    k_pages, v_pages = in_pages
    expected = tilewise.attention(q, k, v, **scales, **TILED)
    got = tilewise.attention_paged(q, k_pages, v_pages, table, lengths, **scales, **TILED)
    assert_same_bits(got, expected, "out")
    scales["v_scale"].requires_grad_()
    with pytest.raises(Unsupported, match="no gradients of paged keys"):
        tilewise.attention_paged(q, k_pages, v_pages, table, lengths, **scales, **TILED)


def test_a_block_mask() -> None:
    """Made for float8, it is that of float32: masks compute in float32 for both."""
    q, k, v = _qkv(heads=2, rows=45)
    mask = tilewise.BlockMask.of(masks.window(5, 5), 45, block=(16, 16), dtype=FLOAT8)
    got = tilewise.attention(q, k, v, mask=mask, **TILED)
    assert_same_bits(got, tilewise.attention(q, k, v, mask=masks.window(5, 5), **TILED), "out")
