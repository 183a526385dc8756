"""What surrounds a call: refuse transforms without rules, and read the gradients that come."""

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from tilewise.errors import InvalidArgument, Unsupported
from tilewise.torch_private import (
    dispatch_modes,
    functorch_active,
    in_forward_level,
    is_batched,
    is_tracked,
    jit_tracing,
    sees_operations,
    vmap_active,
    with_memory,
)
from tilewise.variants.outside import is_checked
from tilewise.variants.program import RAW, Program
from tilewise.variants.values import Score

PLAIN = frozenset((Tensor, Parameter))
_is_compiling = torch.compiler.is_compiling


def traced() -> bool:
    """Return whether a program that watches torch's operations is active around the call."""
    return _is_compiling() or dispatch_modes() > 0 or jit_tracing() is not None


def readable(grad: Tensor) -> Tensor:
    """Return a gradient as kernels read it: its zeros in memory, its sign in its numbers.

    Raises:
        Unsupported: its type may keep the numbers elsewhere (``wraps``).
    """
    if wraps(grad):
        raise Unsupported(
            f"tilewise has no gradient of an eager call from a {type(grad).__name__}",
            fix="call it with q, k and v of that type, or give its backward a plain tensor",
        )
    return with_memory(grad).resolve_neg()


def wraps(tensor: Tensor) -> bool:
    """Return whether a tensor is a subclass that sees torch's operations, and may have no memory.

    Kernels cannot read one. The torch ops reach what is inside.
    """
    return type(tensor) not in PLAIN and sees_operations(type(tensor))


def transforms_active() -> bool:
    """Return whether a torch.func transform or a forward-mode level is active around the call."""
    return functorch_active() or in_forward_level()


def refuse_transforms(tensors: tuple[Tensor | None, ...], traced: bool) -> None:
    """Refuse any transform of a call that goes through the torch ops."""
    if traced:
        if functorch_active():
            _refuse_traced("torch.func transforms (grad, vjp, jvp, vmap, jacrev, hessian, ...)")
        for tensor in tensors:
            if isinstance(tensor, Tensor) and is_tracked(tensor):
                refuse_forward_mode()


def refuse_batched(starts: tuple[Tensor, Tensor] | None) -> None:
    """Refuse, under vmap, cu_seqlens that each call has, and indices that are looked at."""
    if not vmap_active():
        return
    if starts is not None and any(is_batched(each) for each in starts):
        raise Unsupported(
            "tilewise has no cu_seqlens that differ from call to call under torch.func.vmap",
            fix="pack the sequences of all calls into one, and call it once",
        )
    if is_checked():
        raise Unsupported(
            "tilewise looks at no index (TILEWISE_CHECKED, tilewise.checked()) under "
            "torch.func.vmap",
            fix="check the call outside of vmap",
        )


def refuse_constants(score: Score) -> None:
    """Refuse derivatives by what is constant here: they would silently be 0.

    ALiBi's slopes are constants, and so are the tensors of a raw score.
    """
    for instr in score.program:
        if instr.op == RAW and any(is_tracked(score.captured[slot]) for slot in instr.slots):
            raise Unsupported(
                f"the raw score {instr.params[0]!r} has no derivative with respect to a tensor "
                "that it is given",
                fix="pass tensor.detach()",
            )
        if instr.op == "alibi" and is_tracked(score.captured[instr.slots[0]]):
            raise InvalidArgument(
                "score (alibi slopes)",
                "a tensor that a transform differentiates by",
                "no derivative: ALiBi's slopes are constants here",
                "Pass slopes.detach(); a learned additive term is scores.bias(tensor).",
            )


def refuse_beyond_first(score: Program) -> None:
    """Refuse tangents and second derivatives of a score of which only the slope is known."""
    for instr in score:
        if instr.op == RAW:
            raise Unsupported(
                f"the raw score {instr.params[0]!r} has no forward-mode and no second derivative: "
                "only d score / d s was registered",
                fix="write the score in the language of variants (tilewise.scores.function)",
            )


def refuse_forward_mode() -> NoReturn:
    """Raise Unsupported: a traced graph in a forward-mode level does not even see its tangents."""
    _refuse_traced("forward-mode derivatives (jvp, torch.autograd.forward_ad)")


def _refuse_traced(what: str) -> NoReturn:
    raise Unsupported(
        f"tilewise has no {what} in torch.compile, exported graphs, torch.jit.trace, tensor "
        "subclasses and dispatch modes yet",
        fix="call it eagerly with plain tensors, where torch.func.grad, vjp and jvp, forward_ad "
        "and create_graph=True work",
    )


def refuse_vmap(*_: Any) -> NoReturn:
    """Raise Unsupported: the batching rule of the ops."""
    raise Unsupported(
        "tilewise's torch ops (torch.compile, exported graphs, pages) have no batching rule for "
        "torch.func.vmap yet",
        fix="call tilewise.attention eagerly, or put the vmapped dimension into the batch: "
        "x.flatten(0, 1)",
    )


def refuse_second_derivative(*_: Any) -> NoReturn:
    """Raise Unsupported: the derivative of the op of the gradients."""
    _refuse_traced("second derivative")
