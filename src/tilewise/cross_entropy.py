"""``linear_cross_entropy``, the loss of a vocabulary without tokens x vocabulary.

Plain code writes the logits of every token, T V numbers, and their gradient beside them: with
128,000 words and 8,192 tokens that is 8 GB. Here a block of logits is made, becomes its part of the
loss and of the gradients, and is written over by the next.

* With weights in 32 or 64 bits a block is some tokens by all words. Its logits become their own
  gradient in place, which is added to those of hidden states and weights at once: three products in
  all, as in plain code. Products are in the dtype of the hidden states, which may have 16 bits. A
  CPU that has no fast products of 16 bits (without AVX-512) computes them in float32 by pieces.
* With weights in 16 bits a sum over blocks would round again and again. So their gradient is
  computed by blocks of words over all tokens, each of them one product. That makes four products:
  the logits are computed twice. Where one block has all tokens there is no sum, and three do.

Where one number comes out (``mean``, ``sum``), the gradients are computed in the forward pass, up
to the factor that only the backward pass knows. With ``none`` they wait for the backward pass.
"""

from __future__ import annotations

import math
import operator
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor

from tilewise.checks import FLOATING, check_tensor, check_whole, named
from tilewise.engine.modes import PLAIN, readable, refuse_vmap, traced, transforms_active
from tilewise.engine.ops import define
from tilewise.engine.run import AUTOCAST_FROM, autocast_dtype, road
from tilewise.errors import InvalidArgument, InvalidType, Unsupported
from tilewise.kernels.cpu import DTYPES, absence, threads
from tilewise.kernels.cpu.rows import InCore
from tilewise.kernels.cross_entropy import (
    PIECE,
    InTorch,
    Loss,
    RowKernel,
    Rows,
    add_product,
    target_logits,
    wide,
    write_logits,
    write_product,
)
from tilewise.torch_private import has_batch
from tilewise.validation import check_real
from tilewise.variants.lower import check_cap

Reduction = Literal["mean", "sum", "none"]
# A block may take this part of the bytes of operands and gradients. With a smaller one the loss is
# slower than plain code: the weights' gradient is read and written for each block
# (notes/performance-log.md).
_PART = 1 / 12
_LEAST_BYTES = 4 * 1024 * 1024
_LEAST_TOKENS, _LEAST_WORDS = 32, 64  # of a block: smaller products are slow
# On a GPU each block also reads and writes the float32 gradient of the weights. By an H100's peak
# rates that adds 14 % to the products of 2,048 tokens, and doubles the time of those of 256.
_LEAST_ON_GPU = 2048


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    *,
    token_weights: Tensor | None = None,
    return_nll: bool = False,
    block_tokens: int | None = None,
) -> Any:
    """Cross entropy of a linear layer's logits, which are never all in memory.

    With the logits ``z = hidden @ weight.T + bias`` of a token (``c tanh(z / c)`` of them with
    ``softcap`` c), its target y, ``lse = log sum_v exp(z_v)`` and the label smoothing e::

        loss = (1 - e) (lse - z_y) + e (lse - mean_v z_v) + z_loss lse^2

    The mean is ``sum_t w_t loss_t / sum_t w_t`` over the tokens that are not ignored, with the
    token weights w, or 1. It is nan where there is no such token, as in torch. The same operands
    give the same bits with the same number of threads.

    Peak memory is 1.08 times that of operands and gradients in float32 and 1.10 times in bfloat16,
    as measured on a CPU with 32,000 to 256,000 words, and 1.07 to 1.09 times with float32 weights
    beside bfloat16 hidden states. On a GPU a block has 2,048 tokens at least. Differentiable once,
    in hidden, weight and bias.

    Products are in the dtype of hidden. A float32 weight beside hidden states in 16 bits is
    rounded to theirs for the products, and its gradient is added up in float32. Under autocast,
    hidden takes its dtype, and a float32 weight stays what it is; all in float64 stays so.
    Gradients are computed before the loss is scaled, so a scaled loss does not keep those of
    float16 hidden states from underflow.

    The compiled core goes over the logits on a CPU, and a Triton kernel on a GPU, both in place.
    Operations of torch do it for float64 on a GPU, and where the core or Triton is missing. The
    Triton kernel meets the 2x rule on an H200; its speed has not been measured.

    Sources: label smoothing: Szegedy et al. 2016; z-loss: Chowdhery et al., PaLM, 2022, section 5;
    softcap of logits: Gemma 2, 2024. Blocks of logits: Wijmans et al., Cut Your Losses in
    Large-Vocabulary Language Models, 2024; gradients in the forward pass: Hsu et al., Liger Kernel,
    2024.

    Args:
        hidden: floating [..., D], in 16 bits or more.
        weight: [V, D], on the same device, of the same dtype or float32 beside 16 bits.
        targets: int64 or int32 [...]: words below V, or ``ignore_index``.
        bias: [V], of a dtype that weight may have, or None.
        reduction: ``"mean"``, ``"sum"`` of ``w_t loss_t``, or ``"none"`` for these one by one.
        ignore_index: a target whose token has loss 0 and no gradient.
        label_smoothing: e, 0 to 1.
        z_loss: the factor of ``lse^2``, 0 or more.
        softcap: c, above 0; None for none.
        token_weights: floating [...], constants; None for 1 each.
        return_nll: return ``lse - z_y`` too, reduced as the loss is: a constant.
        block_tokens: tokens whose logits are in memory at once, or with weights in 16 bits as many
            logits as theirs; None chooses.

    Returns:
        A number, or [...] with ``"none"``: float32, float64 for operands in float64. With
        ``return_nll`` a pair of these.

    Raises:
        InvalidArgument: shapes, dtypes, devices or values that do not fit; on a CPU also targets
            that are no word. On a GPU the loss of such a token is nan, because nothing there waits
            for values.
        InvalidType: what is no tensor or no number.
        LostThreads: as ``tilewise.attention``.
        Unsupported: forward mode, ``torch.func`` transforms, or a second derivative.
    """
    _check(hidden, weight, targets, bias, token_weights)
    loss = _checked_loss(reduction, ignore_index, label_smoothing, z_loss, softcap)
    if block_tokens is not None:
        check_whole("block_tokens", block_tokens, 1)
    way = road(hidden, weight, targets)
    if way.startswith("transformed"):
        _refuse("forward mode and no torch.func transforms")
    narrower = autocast_dtype(hidden)
    if narrower is not None:
        hidden = hidden.to(narrower)
        weight = _summable(weight, narrower)
        bias = None if bias is None else _summable(bias, narrower)
    if loss.softcap:
        check_cap("softcap", loss.softcap, hidden.dtype, ", or None")
    rows = hidden.reshape(-1, hidden.shape[-1])
    words = targets.reshape(-1).long().contiguous()
    scales = (words != loss.ignore_index).to(wide(rows.dtype))
    if token_weights is not None:
        scales = scales * token_weights.reshape(-1).to(scales.dtype)
    if reduction == "mean":
        scales = scales / scales.sum()
    once, block = reduction != "none", block_tokens or 0
    if way == "watched":
        tensors = (rows, weight, words, bias, scales)
        wanted = torch.is_grad_enabled() and any(
            each is not None and each.requires_grad for each in (rows, weight, bias)
        )
        op = torch.ops.tilewise.linear_cross_entropy
        total, losses, nll, *_ = op(*tensors, *loss, once, wanted, block)
        found: Tensor = total if once else losses
    elif once:
        found, nll = _Total.apply(rows, weight, words, bias, scales, loss, block)  # type: ignore[no-untyped-call]
    else:
        found, nll = _Each.apply(rows, weight, words, bias, loss, block)  # type: ignore[no-untyped-call]
    if not once:
        found, nll = ((each * scales).reshape(targets.shape) for each in (found, nll))
        return (found, nll) if return_nll else found
    # The mean of no token is nan, as torch's, where the sum over nothing is 0. Gradients are 0.
    of_nothing = reduction == "mean" and words.shape[0] == 0
    found = found + math.nan if of_nothing else found
    if not return_nll:
        return found
    nll = _weighted(nll, scales)
    return found, nll + math.nan if of_nothing else nll


def _summable(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return weights whose products are in ``dtype``: as they are if gradients add up in theirs."""
    return weight if weight.dtype == wide(dtype) else weight.to(dtype)


def _refuse(what: str) -> NoReturn:
    raise Unsupported(
        f"tilewise.linear_cross_entropy has no {what}",
        fix="use torch.nn.functional.linear and cross_entropy there",
    )


def _check(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    token_weights: Tensor | None,
) -> None:
    required = "a floating tensor [..., D] in 16 bits or more"
    check_tensor("hidden", hidden, required, (*AUTOCAST_FROM, torch.float64))
    if hidden.dim() == 0 or hidden.shape[-1] == 0:
        raise InvalidArgument("hidden", f"shape {tuple(hidden.shape)}", "[..., D], D of 1 or more")
    width, device = hidden.shape[-1], hidden.device.type
    mixed = autocast_dtype(hidden) is not None  # it brings all to one dtype
    dtypes = AUTOCAST_FROM if mixed else tuple(dict.fromkeys((hidden.dtype, wide(hidden.dtype))))
    of_dtypes = f"on {hidden.device} in {' or '.join(map(str, dtypes))}"
    required = f"a tensor [V, {width}] {of_dtypes}"
    check_tensor("weight", weight, required, dtypes, shape=(None, width), device=device)
    if weight.shape[0] == 0:
        raise InvalidArgument("weight", "a vocabulary of 0", "1 word or more")
    required = f"int64 or int32 {list(hidden.shape[:-1])} on {hidden.device}"
    integers = (torch.int64, torch.int32)
    check_tensor(
        "targets", targets, required, integers, shape=tuple(hidden.shape[:-1]), device=device
    )
    if bias is not None:
        required = f"a tensor [{weight.shape[0]}] {of_dtypes}"
        check_tensor("bias", bias, required, dtypes, shape=(weight.shape[0],), device=device)
    if token_weights is not None:
        required = f"a floating tensor {list(targets.shape)} on {hidden.device}, without gradient"
        shape = tuple(targets.shape)
        check_tensor("token_weights", token_weights, required, FLOATING, shape=shape, device=device)
        if token_weights.requires_grad:
            fix = 'Pass token_weights.detach(), or multiply the losses of reduction="none".'
            raise InvalidArgument("token_weights", "a tensor with gradient", required, fix)


def _checked_loss(
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> Loss:
    if reduction not in ("mean", "sum", "none"):
        raise InvalidArgument("reduction", repr(reduction), "'mean', 'sum' or 'none'")
    required = "a number from 0 to 1"
    smoothing = check_real("label_smoothing", label_smoothing, required)
    if not 0 <= smoothing <= 1:
        raise InvalidArgument("label_smoothing", str(label_smoothing), required)
    required = "a finite number, 0 or more"
    factor = check_real("z_loss", z_loss, required)
    if not 0 <= factor < math.inf:
        raise InvalidArgument("z_loss", str(z_loss), required)
    required = "a finite number above 0, or None"
    cap = 0.0 if softcap is None else check_real("softcap", softcap, required)
    if softcap is not None and not 0 < cap < math.inf:
        raise InvalidArgument("softcap", str(softcap), required)
    required = "an integer of 64 bits"
    try:
        ignored = operator.index(ignore_index)
    except TypeError:
        raise InvalidType("ignore_index", named(ignore_index), required) from None
    if not -(2**63) <= ignored < 2**63:
        raise InvalidArgument("ignore_index", str(ignored), required)
    return Loss(ignored, smoothing, factor, cap)


class _Operands(NamedTuple):
    """Hidden states [T, D], weights [V, D], targets int64 [T] and the bias [V]."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    bias: Tensor | None


class _Grads(NamedTuple):
    """The gradients of ``sum_t scales_t loss_t``."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor  # empty without a bias


def _losses(
    of: _Operands, loss: Loss, scales: Tensor | None, block_tokens: int
) -> tuple[Tensor, Tensor, _Grads | None]:
    """Return losses and nll [T], and with ``scales`` [T] the gradients of the losses' sum."""
    tokens, words = len(of.hidden), len(of.weight)
    _check_targets(of.targets, words, loss.ignore_index)
    kernel = _kernel(of.hidden)
    dtype, dtype_of_sums = of.hidden.dtype, wide(of.hidden.dtype)
    bias = None if of.bias is None else of.bias.to(dtype)
    losses = of.hidden.new_empty(tokens, dtype=dtype_of_sums)
    lse, nll = torch.empty_like(losses), torch.empty_like(losses)
    step, block = _block(of, kernel.in_place, block_tokens)
    again = of.weight.dtype != dtype_of_sums and step < tokens
    grads = None
    if scales is not None:
        scales = scales.contiguous()
        # Sums begin with the first block's product. Without tokens there is none.
        of_weight = (torch.empty_like if tokens else torch.zeros_like)(of.weight)
        of_bias = losses.new_zeros(0 if bias is None else words)
        grads = _Grads(torch.empty_like(of.hidden), of_weight, of_bias)
    # One room for all blocks: a new one for each would be there beside the last.
    size = max(min(step, tokens) * words, tokens * min(block, words) if again and grads else 0)
    room = of.hidden.new_empty(size)
    # Wider weights are rounded part by part, twice for each block of tokens: all of them rounded
    # once would take a quarter of the memory of operands and gradients.
    parts = [slice(None)] if of.weight.dtype == dtype else _slices(words, block)
    for rows in _slices(tokens, step):
        hidden, targets = of.hidden[rows], of.targets[rows]
        some = None if scales is None else scales[rows]
        logits = room[: len(hidden) * words].view(len(hidden), words)
        for part in parts:
            of_words = None if bias is None else bias[part]
            write_logits(hidden, of.weight[part], of_words, logits[:, part])
        at = target_logits(logits, targets, loss)  # now: the kernel writes over them
        losses[rows], lse[rows], change = kernel.close(Rows(logits, targets, some, loss))
        nll[rows] = torch.where(targets == loss.ignore_index, 0.0, lse[rows] - at)
        if grads is None or change is None:
            continue
        _add_gradients(grads, of, rows, parts, change, add_weight=not again)
        del change  # of a kernel that does not work in place
    if grads is None or scales is None:
        return losses, nll, None
    if again:
        for part in _slices(words, block):
            of_words = None if bias is None else bias[part]
            weight = of.weight[part]
            logits = room[: tokens * len(weight)].view(tokens, len(weight))
            write_logits(of.hidden, weight, of_words, logits)
            rows_of = Rows(logits, of.targets, scales, loss)
            change = kernel.differentiate(rows_of, lse, part.start, words)
            write_product(change.T, of.hidden, grads.weight[part])
    return losses, nll, grads if of.bias is None else grads._replace(bias=grads.bias.to(of.bias))


def _add_gradients(
    grads: _Grads,
    of: _Operands,
    rows: slice,
    parts: list[slice],
    change: Tensor,
    add_weight: bool,
) -> None:
    """Write the gradients of some hidden states, and add theirs of the bias and of the weights.

    ``change`` [T', V]: the gradients of their logits. Wider weights are taken in ``parts``.
    """
    if of.bias is not None:
        grads.bias.add_(change.sum(0, dtype=grads.bias.dtype))
    of_hidden = grads.hidden[rows]
    if len(parts) == 1:
        write_product(change, of.weight, of_hidden)
    else:
        sums = torch.zeros_like(of_hidden, dtype=wide(of_hidden.dtype))
        for part in parts:
            add_product(sums, change[:, part], of.weight[part])
        of_hidden.copy_(sums)
    if add_weight:
        for part in parts:
            first = rows.start == 0
            add_product(grads.weight[part], change[:, part].T, of.hidden[rows], first)


def _slices(size: int, step: int) -> list[slice]:
    return [slice(first, min(first + step, size)) for first in range(0, size, step)]


def _kernel(hidden: Tensor) -> RowKernel:
    if hidden.device.type == "cpu" and absence() is None and hidden.dtype in DTYPES:
        threads()  # raises: without its threads torch waits for ever in the products before it
        return InCore()
    if hidden.is_cuda and hidden.dtype != torch.float64:
        from tilewise.kernels.gpu.backend import GpuBackend

        if GpuBackend().absence() is None:
            from tilewise.kernels.gpu.cross_entropy import InTriton

            return InTriton()
    return InTorch()


def _check_targets(targets: Tensor, words: int, ignore_index: int) -> None:
    if targets.device.type != "cpu":
        return  # values there are not waited for
    wrong = ((targets < 0) | (targets >= words)) & (targets != ignore_index)
    if wrong.any():
        came = f"{targets[wrong][0].item()} among them"
        required = f"words from 0 to {words - 1}, or ignore_index, which is {ignore_index}"
        raise InvalidArgument("targets", came, required)


def _block(of: _Operands, in_place: bool, block_tokens: int) -> tuple[int, int]:
    """Return the tokens of a block of all words, and the words of a part of the weights.

    A part has as many logits for all tokens as a block, where weights have 16 bits. Where they are
    wider than hidden states, it is what is rounded at once; it and a product of its size take half
    as many bytes as a block.
    """
    tokens, (words, width) = max(1, len(of.hidden)), of.weight.shape
    size = of.hidden.element_size()
    each = size if in_place else size + 4 * max(4, size)
    mixed = of.weight.element_size() != size
    moved = 2 * width * (words * of.weight.element_size() + tokens * size)
    bytes_ = max(_LEAST_BYTES, int(moved * _PART * (2 / 3 if mixed else 1)))
    least = (_LEAST_ON_GPU, _LEAST_ON_GPU) if of.hidden.is_cuda else (_LEAST_TOKENS, _LEAST_WORDS)
    if block_tokens:
        bytes_, least = block_tokens * words * each, (block_tokens, 1)
    fit = bytes_ // (4 * width * size if mixed else tokens * each)
    whole = PIECE if mixed and fit > PIECE else 16
    return max(least[0], bytes_ // (words * each) // 16 * 16), max(least[1], fit // whole * whole)


def _needed(grads: _Grads, factor: Tensor | None, needs: tuple[bool, ...]) -> tuple[Any, ...]:
    """Return the gradients that are needed, times a factor in place, in the order of operands."""
    found = (grads.hidden, grads.weight, None, grads.bias)
    return tuple(
        None if each is None or not need else each if factor is None else each.mul_(factor)
        for each, need in zip(found, needs, strict=True)
    )


class _Total(torch.autograd.Function):
    """``sum_t scales_t loss_t`` and the nll; its gradients are computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        bias: Tensor | None,
        scales: Tensor,
        loss: Loss,
        block_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        of = _Operands(hidden, weight, targets, bias)
        wanted = any(ctx.needs_input_grad)
        losses, nll, ctx.grads = _losses(of, loss, scales if wanted else None, block_tokens)
        if wanted:
            ctx.save_for_backward(hidden, weight, targets, bias, scales)
            ctx.loss = loss, block_tokens
        ctx.mark_non_differentiable(nll)
        return _weighted(losses, scales), nll

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
        *operands, scales = ctx.saved_tensors
        grads, ctx.grads = ctx.grads, None
        with torch.no_grad():
            if grads is None:  # a second backward pass: the first gave its gradients away
                loss, block_tokens = ctx.loss
                _, _, grads = _losses(_Operands(*operands), loss, scales, block_tokens)
            found = _needed(grads, None if _is_one(grad) else grad, ctx.needs_input_grad[:4])
        return (*_differentiable_once(found, (grad, *operands)), None, None, None)


def _is_one(grad: Tensor) -> bool:
    """Return whether the loss's gradient can be seen to be 1: then others need no pass over them.

    With 32 tokens and 50,000 words that pass takes a tenth of the time.
    """
    watched = traced() or transforms_active() or has_batch(grad)
    return grad.is_cpu and type(grad) in PLAIN and not watched and bool(grad == 1)


class _Each(torch.autograd.Function):
    """The losses of the tokens one by one, and the nll."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        bias: Tensor | None,
        loss: Loss,
        block_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, targets, bias)
        ctx.loss = loss, block_tokens
        losses, nll, _ = _losses(_Operands(hidden, weight, targets, bias), loss, None, block_tokens)
        ctx.mark_non_differentiable(nll)
        return losses, nll

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
        operands, (loss, block_tokens) = ctx.saved_tensors, ctx.loss
        with torch.no_grad():
            _, _, grads = _losses(_Operands(*operands), loss, readable(grad), block_tokens)
            assert grads is not None
            found = _needed(grads, None, ctx.needs_input_grad[:4])
        return (*_differentiable_once(found, (grad, *operands)), None, None)


class _Once(torch.autograd.Function):
    """A gradient, of which a derivative would silently be 0 if nothing refused it."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *depends: Tensor | None) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        _refuse("second derivative")


def _differentiable_once(
    grads: tuple[Any, ...], depends: tuple[Tensor | None, ...]
) -> tuple[Any, ...]:
    if not torch.is_grad_enabled():
        return grads
    return tuple(
        None if each is None else _Once.apply(each, *depends)  # type: ignore[no-untyped-call]
        for each in grads
    )


def _weighted(losses: Tensor, scales: Tensor) -> Tensor:
    return (losses * scales).sum()


def _op(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    scales: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    once: bool,
    wanted: bool,
    block_tokens: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the total, losses, nll and, with ``once`` and ``wanted``, the total's gradients."""
    of = _Operands(hidden, weight, targets, bias)
    loss = Loss(ignore_index, label_smoothing, z_loss, softcap)
    losses, nll, grads = _losses(of, loss, scales if once and wanted else None, block_tokens)
    if grads is None:
        grads = _Grads(hidden.new_empty(0), hidden.new_empty(0), hidden.new_empty(0))
    return _weighted(losses, scales), losses, nll, *grads


def _op_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    (hidden, weight, _, bias, scales), (once, wanted) = arguments[:5], arguments[9:11]
    found = scales.new_empty(()), torch.empty_like(scales), torch.empty_like(scales)
    if not (once and wanted):
        return *found, hidden.new_empty(0), hidden.new_empty(0), hidden.new_empty(0)
    of_bias = scales.new_empty(0) if bias is None else bias.new_empty(len(bias))
    return *found, hidden.new_empty(hidden.shape), weight.new_empty(weight.shape), of_bias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *_, once, _, block_tokens = inputs
    total, losses, nll, *grads = output
    ctx.mark_non_differentiable(losses if once else total, nll, *grads)
    ctx.set_materialize_grads(False)
    ctx.once, ctx.loss, ctx.block_tokens = once, inputs[5:9], block_tokens
    ctx.save_for_backward(*inputs[:4], *grads)


def _op_backward(ctx: Any, total: Tensor | None, losses: Tensor | None, *_: Any) -> Any:
    rest = (None,) * 8
    grad = total if ctx.once else losses
    if grad is None:
        return (None,) * 4 + rest
    hidden, weight, targets, bias, *grads = ctx.saved_tensors
    operands = (hidden, weight, targets, bias)
    with torch.no_grad():
        if ctx.once:
            grads = [each * grad.to(each.dtype) for each in grads]
        else:
            arguments = (*operands, grad, *ctx.loss, True, True, ctx.block_tokens)
            _, _, _, *grads = torch.ops.tilewise.linear_cross_entropy(*arguments)
        found = _needed(_Grads(*grads), None, ctx.needs_input_grad[:4])
    return (*_differentiable_once(found, (grad, *operands)), *rest)


define("linear_cross_entropy", _op, _op_fake, backward=_op_backward, save=_save, vmap=refuse_vmap)
