"""Everything of torch that tilelab uses and that has no public name, in one place.

``tests/test_torch_private.py`` holds every name here to what it promises, and finds private names
of torch anywhere else.
"""

from collections.abc import Callable

import torch
from torch import Tensor

softmax_backward_data: Callable[..., Tensor] = torch._softmax_backward_data


def keep_busy(cycles: int) -> None:
    """Let the GPU wait for some cycles."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def keep_buffers() -> None:
    """Let the gradients of a compiled graph be asked for again and again."""
    from torch._functorch import config

    config.donated_buffer = False
