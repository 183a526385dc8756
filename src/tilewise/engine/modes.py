"""What is refused: transforms of a call whose rules are not written; and what is not compiled."""

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad

from tilewise.errors import InvalidArgument, Unsupported
from tilewise.variants.program import RAW, Program
from tilewise.variants.values import Score

__all__ = [
    "left_alone",
    "refuse_beyond_first",
    "refuse_constants",
    "refuse_forward_mode",
    "refuse_second_derivative",
    "refuse_transforms",
    "refuse_vmap",
    "transforms_active",
]

_functorch_active = torch._C._are_functorch_transforms_active


_Function = TypeVar("_Function", bound=Callable[..., Any])


def left_alone(function: _Function) -> _Function:
    """A function that torch.compile neither tries by itself, after a graph break, nor inlines.

    It is for those that call the core, of which torch.compile knows nothing and warns, and for
    those whose numbers change from call to call: each would be another graph. What
    ``torch.compiler.disable`` does takes a second for the first call of a process.
    """
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    function.__dict__["_torchdynamo_disable"] = True
    function.__dict__["_torchdynamo_disable_msg"] = (
        f"tilewise's {function.__qualname__} cannot be part of a graph: without fullgraph=True it "
        "runs between two of them"
    )
    return function


def transforms_active() -> bool:
    """Whether a torch.func transform or a forward-mode level is active around the call."""
    return _functorch_active() or forward_ad._current_level >= 0


def refuse_transforms(tensors: tuple[Tensor | None, ...], traced: bool) -> None:
    """Refuse what has no rule: vmap, and any transform of a call that goes through the torch ops.

    Args:
        tensors: the tensors of the call.
        traced: whether it goes through the ops (``run.run``), which have no rules for transforms.

    Raises:
        Unsupported: under vmap; or ``traced`` with a transform or a tangent.
    """
    if traced:
        if _functorch_active():
            _refuse_traced("torch.func transforms (grad, vjp, jvp, vmap, jacrev, hessian, ...)")
        for tensor in tensors:
            if isinstance(tensor, Tensor) and _is_tracked(tensor):
                refuse_forward_mode()
    elif _vmap_active():
        refuse_vmap()


def refuse_constants(score: Score) -> None:
    """Refuse derivatives by what is constant here: they would silently be 0.

    Raises:
        InvalidArgument: ALiBi's slopes carry a tangent, or a transform differentiates by them.
        Unsupported: so it is with a tensor of a raw score.
    """
    for instr in score.program:
        if instr.op == RAW and any(_is_tracked(score.captured[slot]) for slot in instr.slots):
            raise Unsupported(
                f"the raw score {instr.params[0]!r} has no derivative with respect to a tensor "
                "that it is given",
                fix="pass tensor.detach()",
            )
        if instr.op == "alibi" and _is_tracked(score.captured[instr.slots[0]]):
            raise InvalidArgument(
                "score (alibi slopes)",
                "a tensor that a transform differentiates by",
                "no derivative: ALiBi's slopes are constants here",
                "Pass slopes.detach(); a learned additive term is scores.bias(tensor).",
            )


def refuse_beyond_first(score: Program) -> None:
    """Refuse tangents and second derivatives of a score of which only the slope is known.

    Raises:
        Unsupported: there is a raw score in the program.
    """
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
        "tilewise has no batching rule for torch.func.vmap yet",
        fix="put the vmapped dimension into the batch: x.flatten(0, 1); for a Jacobian call "
        "torch.func.jvp or vjp once for each direction",
    )


def refuse_second_derivative(*_: Any) -> NoReturn:
    """Raise Unsupported: the derivative of the op of the gradients."""
    _refuse_traced("second derivative")


def _vmap_active() -> bool:
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() == torch._C._functorch.TransformType.Vmap for level in stack)


# While it traces, torch.compile takes the inputs of a graph for tensors without tangents.
@_disable_dynamo
def _is_tracked(tensor: Tensor) -> bool:
    """Whether a tensor has a tangent or, inside of torch.func, a gradient at any level."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        if tensor.requires_grad or _has_tangent(tensor):
            return True
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return _has_tangent(tensor)


def _has_tangent(tensor: Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]
