"""Define a torch op: the one place where tilewise registers its own."""

from collections.abc import Callable
from typing import Any

import torch


def define(
    name: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    schema: str | None = None,
    *,
    backward: Callable[..., Any] | None = None,
    save: Callable[..., None] | None = None,
    vmap: Callable[..., Any] | None = None,
) -> None:
    """Define ``torch.ops.tilewise.NAME``, which changes none of its arguments.

    Each definition looks for the source of its caller. The first one in a file reads the paths of
    all modules that are loaded, a millisecond beside torch. So all ops come through this file.

    Args:
        name: of the op, without the namespace.
        kernel: computes it, on any device.
        fake: returns tensors like the kernel's, without values.
        schema: arguments and results; those that the annotations of the kernel say, if None.
        backward: its derivative, as ``torch.library.register_autograd`` takes it. Where None, a
            backward pass through the op raises.
        save: its ``setup_context``.
        vmap: its batching rule.
    """
    op = torch.library.custom_op(f"tilewise::{name}", kernel, mutates_args=(), schema=schema)
    op.register_fake(fake)
    if backward is not None:
        op.register_autograd(backward, setup_context=save)
    if vmap is not None:
        op.register_vmap(vmap)
