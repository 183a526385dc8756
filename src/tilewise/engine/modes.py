"""What is refused: transforms of a call whose rules are not written."""

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad

from tilewise.errors import Unsupported

__all__ = [
    "refuse_forward_mode",
    "refuse_transforms",
    "refuse_vmap",
    "transforms_active",
]

_functorch_active = torch._C._are_functorch_transforms_active


def transforms_active() -> bool:
    """Whether a torch.func transform or a forward-mode level is active around the call."""
    return _functorch_active() or forward_ad._current_level >= 0


def refuse_transforms(tensors: tuple[Tensor | None, ...]) -> None:
    """Refuse transforms whose rules are not written: their results would be silently wrong.

    Raises:
        Unsupported: under torch.func (grad, vjp, jvp, vmap, ...), or with a forward-mode tangent.
    """
    if _functorch_active():
        raise Unsupported(
            "tilewise does not run inside torch.func transforms (grad, vjp, jvp, vmap, jacrev, "
            "hessian, ...) yet",
            fix="use torch.autograd.grad or .backward() for gradients, and put a vmapped "
            "dimension into the batch: x.flatten(0, 1)",
        )
    for tensor in tensors:
        if isinstance(tensor, Tensor) and _has_tangent(tensor):
            refuse_forward_mode()


def refuse_forward_mode() -> NoReturn:
    """Raise Unsupported: a traced graph in a forward-mode level does not even see its tangents."""
    raise Unsupported(
        "tilewise has no forward-mode derivative (jvp, torch.autograd.forward_ad) yet",
        fix="use reverse mode: torch.autograd.grad or .backward()",
    )


def refuse_vmap(*_: Any) -> NoReturn:
    """Raise Unsupported: the batching rule of the ops."""
    raise Unsupported(
        "tilewise has no batching rule for torch.func.vmap yet",
        fix="put the vmapped dimension into the batch: x.flatten(0, 1)",
    )


# While it traces, torch.compile takes the inputs of a graph for tensors without tangents.
@_disable_dynamo
def _has_tangent(tensor: Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]
