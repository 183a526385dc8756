"""Everything of torch that has no public name, in one place: what changes with torch's versions.

``tests/test_torch_private.py`` holds every name here to what it promises, on each torch that
``scripts/matrix.sh`` runs, and finds private names of torch anywhere else.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _functorch
from torch._C._dynamo import eval_frame
from torch._compile import _disable_dynamo
from torch._subclasses import fake_tensor
from torch.autograd import forward_ad

FakeTensor = fake_tensor.FakeTensor
any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
functorch_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
# The state of torch.jit.trace; None where nothing is traced.
jit_tracing: Callable[[], Any] = torch._C._get_tracing_state

_Function = TypeVar("_Function", bound=Callable[..., Any])


def left_alone(function: _Function) -> _Function:
    """Return a function that torch.compile neither tries after a graph break, nor inlines.

    Use it for functions that call the core, which torch.compile does not know and warns about. Use
    it also for functions whose numbers change from call to call, because each value would be
    another graph. ``torch.compiler.disable`` would take a second for the first call of a process.
    """
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    function.__dict__["_torchdynamo_disable"] = True
    function.__dict__["_torchdynamo_disable_msg"] = (
        f"tilewise's {function.__qualname__} cannot be part of a graph: without fullgraph=True it "
        "runs between two of them"
    )
    return function


def constant_while_compiling(function: _Function) -> _Function:
    """Let torch.compile run a function of constants, and not trace it.

    This is torch.compiler.assume_constant_result, which would load the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def onednn_products(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies matrices of 16 bits on this CPU; torch alone is slow."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype != torch.float16 or bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def in_forward_level() -> bool:
    """Return whether a level of forward-mode AD is active."""
    return forward_ad._current_level >= 0


@left_alone
def vmap_active() -> bool:
    """Return whether a vmap is active, at any level."""
    stack = _functorch.get_interpreter_stack() or ()
    return any(level.key() == _functorch.TransformType.Vmap for level in stack)


@left_alone
def is_batched(tensor: Tensor) -> bool:
    """Return whether a tensor has a vmapped dimension, at any level."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if _functorch.is_batchedtensor(tensor):
            return True
        tensor = _functorch.get_unwrapped(tensor)
    return False


@left_alone
def without_wrappers(tensor: Tensor) -> Tensor:
    """Return the tensor of values under the wrappers of torch.func, vmapped dimensions included."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


@left_alone
def has_batch(tensor: Tensor) -> bool:
    """Return whether a tensor is one of ``torch.autograd.grad(..., is_grads_batched=True)``.

    That still has torch's first vmap, which knows no rules of Functions.
    """
    found: bool = _functorch.is_legacy_batchedtensor(tensor)
    return found


def with_memory(tensor: Tensor) -> Tensor:
    """Return a tensor with memory: torch has tensors of zeros without, as the derivative of sgn."""
    return tensor.clone() if tensor._is_zerotensor() else tensor


def sees_operations(kind: type) -> bool:
    """Return whether tensors of a type see torch's operations, and may have no memory."""
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__  # type: ignore[attr-defined]


def without_batch(tensor: Tensor | None) -> tuple[Tensor | None, int | None]:
    """Return a tensor with its batch first, if it ``has_batch``, and where that is (0 or None)."""
    if tensor is None or not has_batch(tensor):
        return tensor, None
    return torch._remove_batch_dim(tensor, _batch_level(), 0, 0), 0


def with_batch(tensor: Tensor, dim: int) -> Tensor:
    """Return the inverse of ``without_batch`` for a tensor whose batch is a dimension."""
    return torch._add_batch_dim(tensor, dim, _batch_level())


def _batch_level() -> int:
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return level


# While it traces, torch.compile takes the inputs of a graph for tensors without tangents.
@_disable_dynamo
def is_tracked(tensor: Tensor) -> bool:
    """Return whether a tensor has a tangent or, inside of torch.func, a gradient at any level."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if tensor.requires_grad or has_tangent(tensor):
            return True
        tensor = _functorch.get_unwrapped(tensor)
    return has_tangent(tensor)


def has_tangent(tensor: Tensor) -> bool:
    """Return whether a tensor has a tangent in the active level of forward-mode AD."""
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]
