"""``linear_cross_entropy``: exact, in blocks, in little memory, under torch.compile."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import tilewise
from tests.contract import assert_all_exact, assert_all_same_bits, assert_exact, assert_same_bits
from tests.peak import only_linux, printed
from tilewise import cross_entropy as module
from tilewise.errors import InvalidArgument, InvalidType, Unsupported
from tilewise.kernels import cross_entropy as products
from tilewise.kernels.cross_entropy import InTorch, Rows

TOKENS, WIDTH, WORDS = 75, 24, 523  # no multiple of any block or vector
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 0.01, "reduction": "none"},
    "softcap": {"softcap": 4.0},
    "ignored": {"ignore_index": 3},
    "all": {"label_smoothing": 0.2, "z_loss": 0.02, "softcap": 4.0, "reduction": "none"},
}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few tokens and a few words, so that there are many."""
    monkeypatch.setattr(module, "_LEAST_BYTES", 64)
    monkeypatch.setattr(module, "_LEAST_TOKENS", 16)
    monkeypatch.setattr(module, "_LEAST_WORDS", 48)
    monkeypatch.setattr(module, "_PART", 0.0)


@pytest.fixture(params=["core", "torch", "by float32"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What goes over the rows of logits; and as on a CPU without products of 16 bits."""
    if request.param == "torch":
        monkeypatch.setattr(module, "_kernel", lambda _: InTorch())
    for name in ("fast_products", "onednn_products"):
        monkeypatch.setattr(products, name, lambda _: request.param != "by float32")
    monkeypatch.setattr(products, "PIECE", 20)
    return str(request.param)


def operands(
    dtype: torch.dtype, bias: bool = True, ignored: int = -100
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Hidden states, weights and a bias; targets, some ignored; weights of the tokens."""
    torch.manual_seed(7)
    tensors = [torch.randn(TOKENS, WIDTH), torch.randn(WORDS, WIDTH), torch.randn(WORDS)]
    leaves = [each.to(dtype).requires_grad_() for each in tensors[: 3 if bias else 2]]
    targets = torch.randint(0, WORDS, (TOKENS,))
    targets[::6] = ignored
    return leaves, targets, torch.rand(TOKENS) + 0.5


def plain(
    leaves: list[Tensor],
    targets: Tensor,
    weights: Tensor | None = None,
    *,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """The formula, over all logits at once."""
    logits = functional.linear(*leaves)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    lse, kept = logits.logsumexp(1), targets != ignore_index
    at = logits.gather(1, targets.clamp(0)[:, None])[:, 0]
    losses = lse - (1 - label_smoothing) * at - label_smoothing * logits.mean(1)
    losses = torch.where(kept, losses + z_loss * lse**2, 0.0)
    scales = kept.to(losses.dtype) * (1 if weights is None else weights.to(losses.dtype))
    if reduction == "none":
        return losses * scales
    return (losses * scales).sum() / (scales.sum() if reduction == "mean" else 1)


def with_gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """The loss, and its gradients for a certain gradient of it."""
    torch.manual_seed(8)
    upstream = torch.randn(loss.shape).to(loss.dtype) + 0.3
    return [loss.detach(), *torch.autograd.grad(loss, leaves, upstream)]


@pytest.mark.usefixtures("small_blocks", "kernel")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", OPTIONS)
def test_losses_and_gradients_are_exact(name: str, dtype: torch.dtype, isa: str) -> None:
    options = OPTIONS[name]
    ignored = options.get("ignore_index", -100)
    leaves, targets, weights = operands(dtype, bias=name != "sum", ignored=ignored)
    if name not in ("none", "all"):
        weights = torch.ones(TOKENS)
    wide = [each.detach().double().requires_grad_() for each in leaves]
    truth = with_gradients(plain(wide, targets, weights, **options), wide)
    naive = with_gradients(plain(leaves, targets, weights, **options), leaves)
    hidden, weight, *bias = leaves
    found = tilewise.linear_cross_entropy(
        hidden, weight, targets, bias[0] if bias else None, token_weights=weights, **options
    )
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    names = ("loss", "grad hidden", "grad weight", "grad bias")
    mine = with_gradients(found, leaves)
    for what, got, near, true in zip(names[: len(mine)], mine, naive, truth, strict=True):
        if dtype == torch.float64:
            torch.testing.assert_close(got, true, rtol=1e-12, atol=1e-13, msg=what)
        else:
            assert_exact(got, near, true, what)


@pytest.mark.usefixtures("small_blocks", "kernel")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_float32_beside_hidden_states_in_16_bits(dtype: torch.dtype) -> None:
    (hidden, *_), targets, weights = operands(dtype)
    leaves = [hidden, *operands(torch.float32)[0][1:]]
    rounded = [each.detach().to(dtype).double().requires_grad_() for each in leaves]
    truth = with_gradients(plain(rounded, targets, weights), rounded)
    narrow = [each.to(dtype) for each in leaves]
    naive = with_gradients(plain(narrow, targets, weights), leaves)
    found = tilewise.linear_cross_entropy(
        hidden, leaves[1], targets, leaves[2], token_weights=weights
    )
    mine = with_gradients(found, leaves)
    assert [each.dtype for each in mine[1:]] == [dtype, torch.float32, torch.float32]
    names = ("loss", "grad hidden", "grad weight", "grad bias")
    assert_all_exact(mine, naive, truth, names)


@pytest.mark.usefixtures("small_blocks", "kernel")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", ["plain", "all"])
def test_the_nll_is_the_loss_without_smoothing_and_z_loss(name: str, reduction: str) -> None:
    options = {**OPTIONS[name], "reduction": reduction}
    leaves, targets, weights = operands(torch.float64)
    hidden, weight, bias = leaves

    def call(bias: Tensor, **more: Any) -> Any:
        return tilewise.linear_cross_entropy(
            hidden, weight, targets, bias, token_weights=weights, **options, **more
        )

    loss, nll = call(bias, return_nll=True)
    assert_same_bits(loss.detach(), call(bias).detach(), "loss")
    softcap = options.get("softcap")
    expected = plain(leaves, targets, weights, reduction=reduction, softcap=softcap)
    torch.testing.assert_close(nll, expected.detach())
    assert not nll.requires_grad
    traced = torch.compile(call, fullgraph=True, backend="aot_eager")(bias, return_nll=True)
    torch.testing.assert_close(traced, (loss, nll))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_so_many_tokens_a_block(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    class Seen(InTorch):
        in_place = True

        def close(self, rows: Rows) -> Any:
            sizes.append(rows.logits.numel())
            return super().close(rows)

        def differentiate(self, rows: Rows, *rest: Any) -> Any:
            sizes.append(rows.logits.numel())
            return super().differentiate(rows, *rest)

    monkeypatch.setattr(module, "_kernel", lambda _: Seen())
    (hidden, weight, _), targets, _ = operands(dtype)
    tilewise.linear_cross_entropy(hidden, weight, targets, block_tokens=32)
    assert max(sizes) == 32 * WORDS
    if dtype == torch.float32:
        assert sizes == [32 * WORDS, 32 * WORDS, 11 * WORDS]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_it_is_torchs_cross_entropy(reduction: str) -> None:
    leaves, targets, _ = operands(torch.float64)
    hidden, weight, bias = leaves
    for smoothing in (0.0, 0.1):
        options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
        mine = tilewise.linear_cross_entropy(hidden, weight, targets, bias, **options)
        theirs = functional.cross_entropy(functional.linear(*leaves), targets, **options)
        torch.testing.assert_close(mine, theirs)


def test_a_gradient_may_be_torchs_zeros_without_memory() -> None:
    """The derivative of torch.sgn."""
    (hidden, weight, bias), targets, _ = operands(torch.float32)
    losses = tilewise.linear_cross_entropy(hidden, weight, targets, bias, reduction="none")
    found = torch.autograd.grad(losses.sgn().sum(), (hidden, weight, bias))
    assert not any(each.any() for each in found)


def test_options_may_follow_in_their_order() -> None:
    leaves, targets, _ = operands(torch.float64)
    hidden, weight, bias = leaves
    found = tilewise.linear_cross_entropy(
        hidden, weight, targets, bias, "sum", -100, 0.1, 1e-3, 5.0
    )
    named: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 5.0}
    call = hidden, weight, targets, bias
    assert found == tilewise.linear_cross_entropy(*call, reduction="sum", **named)


def test_leading_dimensions_and_int32_targets() -> None:
    (hidden, weight, _), targets, weights = operands(torch.float32)
    flat = tilewise.linear_cross_entropy(
        hidden, weight, targets, token_weights=weights, reduction="none"
    )
    shaped = tilewise.linear_cross_entropy(
        hidden.view(5, 15, WIDTH),
        weight,
        targets.view(5, 15).int(),
        token_weights=weights.view(5, 15),
        reduction="none",
    )
    assert shaped.shape == (5, 15)
    assert_same_bits(shaped.flatten(), flat, "losses")


def test_rows_with_strides_and_weights_that_are_transposed() -> None:
    (hidden, weight, _), targets, _ = operands(torch.float32)
    expected = tilewise.linear_cross_entropy(hidden, weight, targets)
    strided = hidden.detach().repeat_interleave(2, 1)[:, ::2]
    gapped = torch.stack([targets, targets], 1)[:, 0]
    turned = weight.detach().T.contiguous().T
    assert not strided.is_contiguous()
    assert not turned.is_contiguous()
    assert not gapped.is_contiguous()
    torch.testing.assert_close(
        tilewise.linear_cross_entropy(strided, turned, gapped), expected.detach()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_second_backward_pass_leaves_the_first_alone(dtype: torch.dtype) -> None:
    leaves, targets, _ = operands(dtype)
    hidden, weight, bias = leaves
    loss = tilewise.linear_cross_entropy(hidden, weight, targets, bias)
    first = torch.autograd.grad(loss * 3, leaves, retain_graph=True)
    kept = [each.clone() for each in first]
    second = torch.autograd.grad(loss * 3, leaves)
    for a, b, c in zip(first, kept, second, strict=True):
        assert_same_bits(a, b, "the first gradient")
        assert_same_bits(a, c, "the second gradient")


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("block", [None, 16], ids=["one block", "blocks"])
@pytest.mark.parametrize(
    ("dtype", "weights"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
)
def test_equal_calls_have_equal_bits_whatever_new_memory_holds(
    dtype: torch.dtype, weights: torch.dtype, block: int | None
) -> None:
    (hidden, *others), targets, _ = operands(dtype)
    leaves = [hidden, *(each.detach().to(weights).requires_grad_() for each in others)]

    def found() -> list[Tensor]:
        hidden, weight, bias = leaves
        loss = tilewise.linear_cross_entropy(hidden, weight, targets, bias, block_tokens=block)
        return with_gradients(loss, leaves)

    expected = found()
    assert_all_same_bits(found(), expected, "a second call")
    torch.use_deterministic_algorithms(True)  # torch fills new memory with nan
    try:
        assert torch.empty(1).isnan()
        assert_all_same_bits(found(), expected, "a call in such memory")
    finally:
        torch.use_deterministic_algorithms(False)


def test_nothing_but_ignored_tokens() -> None:
    (hidden, weight, bias), targets, _ = operands(torch.float32)
    targets[:] = -100
    assert tilewise.linear_cross_entropy(hidden, weight, targets, bias).isnan()
    total = tilewise.linear_cross_entropy(hidden, weight, targets, bias, reduction="sum")
    total.backward()
    assert total == 0
    assert hidden.grad is not None
    assert not hidden.grad.any()
    none = tilewise.linear_cross_entropy(hidden[:0], weight, targets[:0], reduction="none")
    assert none.shape == (0,)
    for reduction in ("mean", "sum"):
        weight.grad = None
        call = (hidden[:0], weight, targets[:0], bias)
        keywords: dict[str, Any] = {"reduction": reduction}
        loss, nll = tilewise.linear_cross_entropy(*call, **keywords, return_nll=True)
        expected = functional.cross_entropy(hidden[:0] @ weight.T, targets[:0], **keywords)
        assert_all_same_bits((loss, nll), (expected, expected), reduction)
        loss.backward()
        assert weight.grad is not None
        assert not weight.grad.any()


@pytest.mark.usefixtures("kernel")
def test_a_hidden_state_that_is_not_finite_touches_its_token_alone() -> None:
    (hidden, weight, _), targets, _ = operands(torch.float32)
    bad = hidden.detach().clone()
    bad[1] = float("nan")
    found = tilewise.linear_cross_entropy(bad, weight, targets, reduction="none")
    assert found.isnan().nonzero().tolist() == [[1]]
    targets[1] = -100
    found = tilewise.linear_cross_entropy(bad, weight, targets, reduction="none")
    assert not found.isnan().any()


def test_under_autocast_operands_take_its_dtype() -> None:
    (hidden, weight, bias), targets, _ = operands(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = tilewise.linear_cross_entropy(hidden, weight, targets, bias)
    narrow = [each.detach().bfloat16() for each in (hidden, weight, bias)]
    expected = tilewise.linear_cross_entropy(narrow[0], narrow[1], targets, narrow[2])
    assert_same_bits(loss.detach(), expected, "loss")
    loss.backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.float32


def test_autocast_leaves_float64_alone() -> None:
    leaves, targets, _ = operands(torch.float64)
    hidden, weight, bias = leaves
    expected = with_gradients(
        tilewise.linear_cross_entropy(hidden, weight, targets, bias, softcap=1e39), leaves
    )
    with torch.autocast("cpu", torch.bfloat16):
        loss = tilewise.linear_cross_entropy(hidden, weight, targets, bias, softcap=1e39)
        with pytest.raises(InvalidArgument, match=r"weight: got a tensor of torch\.float64"):
            tilewise.linear_cross_entropy(hidden.float(), weight, targets)
        with pytest.raises(InvalidArgument, match=r"weight: got a tensor of torch\.float32"):
            tilewise.linear_cross_entropy(hidden, weight.float(), targets)
    assert_all_same_bits(with_gradients(loss, leaves), expected, "a result")


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_backward_pass_under_another_autocast_multiplies_as_the_forward(reduction: Any) -> None:
    (hidden, weight, _), targets, _ = operands(torch.float32)
    hidden = hidden.detach().bfloat16().requires_grad_()
    leaves = (hidden, weight)
    loss = tilewise.linear_cross_entropy(hidden, weight, targets, reduction=reduction).sum()
    torch.autograd.grad(loss, leaves, retain_graph=True)  # those made in the forward pass
    expected = torch.autograd.grad(loss, leaves, retain_graph=True)
    with torch.autocast("cpu", torch.float16):
        found = torch.autograd.grad(loss, leaves)
    assert_all_same_bits(found, expected, "a gradient")


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_compile_gives_the_same_bits(dtype: torch.dtype, reduction: Any) -> None:
    leaves, targets, weights = operands(dtype)

    def call(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return tilewise.linear_cross_entropy(
            hidden, weight, targets, bias, token_weights=weights, reduction=reduction, softcap=5.0
        )

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        with_gradients(compiled(*leaves), leaves),
        with_gradients(call(*leaves), leaves),
        rtol=1e-2 if dtype == torch.bfloat16 else 1e-6,
        atol=1e-6,
    )


def test_meta_tensors_give_shapes() -> None:
    (hidden, weight, _), targets, _ = operands(torch.float32)
    hidden, weight, targets = (each.to("meta") for each in (hidden, weight, targets))
    found = tilewise.linear_cross_entropy(hidden, weight, targets, reduction="none")
    assert (found.shape, found.dtype, found.device.type) == (targets.shape, torch.float32, "meta")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's
def test_the_op_is_well_formed() -> None:
    (hidden, weight, bias), targets, weights = operands(torch.float32)
    for once in (True, False):
        arguments = (hidden, weight, targets, bias, weights, -100, 0.1, 0.0, 0.0, once, True)
        torch.library.opcheck(torch.ops.tilewise.linear_cross_entropy.default, arguments)


MEMORY = """
import sys, torch, tilewise
from tests.peak import Peak
torch.set_num_threads(1)
tokens, width, words = 2048, 768, 32000
dtypes = [getattr(torch, name) for name in sys.argv[1].split()]
hidden = torch.randn(tokens, width).to(dtypes[0]).requires_grad_()
weight = torch.randn(words, width).to(dtypes[-1]).requires_grad_()
targets = torch.randint(0, words, (tokens,))
tilewise.linear_cross_entropy(hidden[:4], weight[:64], targets[:4] % 64).backward()
hidden.grad = weight.grad = None
both = 2 * (hidden.nbytes + weight.nbytes) / 2**20
peak = Peak()
tilewise.linear_cross_entropy(hidden, weight, targets).backward()
print(both, both / 2 + peak.mib())
"""


@only_linux
@pytest.mark.parametrize("dtypes", ["float32", "bfloat16", "bfloat16 float32"])
def test_peak_memory_is_that_of_operands_and_gradients(dtypes: str) -> None:
    ((both, peak),) = printed(MEMORY, dtypes)
    # All logits in float32 would be 250 MiB. The products of torch take 3 MiB for themselves.
    assert float(peak) < 1.1 * float(both) + 4


def test_what_cannot_be_is_refused() -> None:
    (hidden, weight, bias), targets, weights = operands(torch.float32)
    call = tilewise.linear_cross_entropy
    wrong: list[tuple[str, Any]] = [
        ("weight: got shape", lambda: call(hidden, weight.T, targets)),
        ("weight: got a tensor of torch.float64", lambda: call(hidden, weight.double(), targets)),
        ("targets: got shape", lambda: call(hidden, weight, targets[1:])),
        ("targets: got a tensor of torch.float32", lambda: call(hidden, weight, weights)),
        ("targets: got 523 among", lambda: call(hidden, weight, targets.fill_(WORDS))),
        ("bias: got shape", lambda: call(hidden, weight, targets, bias[1:])),
        (
            "reduction: got 'max'",
            lambda: call(hidden, weight, targets, reduction=cast("Any", "max")),
        ),
        ("label_smoothing: got 1.5", lambda: call(hidden, weight, targets, label_smoothing=1.5)),
        ("z_loss: got -1", lambda: call(hidden, weight, targets, z_loss=-1)),
        ("block_tokens: got 0", lambda: call(hidden, weight, targets, block_tokens=0)),
        ("softcap: got 0", lambda: call(hidden, weight, targets, softcap=0)),
        (
            r"softcap: got 1e\+39; .* for torch.float32",
            lambda: call(hidden, weight, targets, softcap=1e39),
        ),
        ("softcap: got 1e-39", lambda: call(hidden, weight, targets, softcap=1e-39)),
        (f"ignore_index: got {2**63}", lambda: call(hidden, weight, targets, ignore_index=2**63)),
        (
            "hidden: got a tensor of torch.float8",
            lambda: call(hidden.to(torch.float8_e4m3fn), weight, targets),
        ),
        (
            "token_weights: got a tensor with gradient",
            lambda: call(hidden, weight, targets, token_weights=weights.requires_grad_()),
        ),
    ]
    for message, refused in wrong:
        with pytest.raises(InvalidArgument, match=message):
            refused()
    with pytest.raises(InvalidType, match="hidden: got a list"):
        call(cast("Any", [1.0]), weight, targets)
    for ignored in (1.5, None):
        with pytest.raises(InvalidType, match="ignore_index: got a"):
            call(hidden, weight, targets, ignore_index=cast("Any", ignored))
    for name in ("label_smoothing", "z_loss", "softcap"):
        for number in ("1", torch.tensor(0.5), True):
            with pytest.raises(InvalidType, match=f"{name}: got a"):
                call(hidden, weight, targets, **cast("Any", {name: number}))


def test_derivatives_that_have_no_rule_are_refused() -> None:
    (hidden, weight, _), targets, _ = operands(torch.float32)
    for reduction in ("mean", "none"):
        loss = tilewise.linear_cross_entropy(hidden, weight, targets, reduction=reduction).sum()
        (first,) = torch.autograd.grad(loss, hidden, create_graph=True)
        with pytest.raises(Unsupported, match="no second derivative"):
            (first.square().sum() + hidden.sum()).backward()
    with pytest.raises(Unsupported, match=r"no forward mode and no torch\.func transforms"):
        torch.func.grad(lambda x: tilewise.linear_cross_entropy(x, weight, targets))(hidden)
