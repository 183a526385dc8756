"""Everything of torch that tilelab uses and that has no public name, in one place.

``tests/test_torch_private.py`` holds every name here to what it promises, and finds private names
of torch anywhere else.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

softmax_backward_data: Callable[..., Tensor] = torch._softmax_backward_data


def keep_busy(cycles: int) -> None:
    """Let the GPU wait for some cycles."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def keep_buffers() -> None:
    """Let the gradients of a compiled graph be asked for again and again."""
    from torch._functorch import config

    config.donated_buffer = False


def instruction_sets() -> dict[str, bool]:
    """Return which instruction sets the processor has, by the names that vLLM's libraries have."""
    return {
        "amx": torch.cpu._is_amx_tile_supported(),
        "avx512_bf16": torch.cpu._is_avx512_bf16_supported(),
        "avx512": torch.cpu._is_avx512_supported(),
    }


def allow_amx() -> bool:
    """Ask the system for AMX tiles; False where it refuses."""
    return torch.cpu._init_amx()


def operators_of(library: Path) -> Any:
    """Load a library that registers its operators in the namespace ``_C``, and return that."""
    torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    return torch.ops._C
