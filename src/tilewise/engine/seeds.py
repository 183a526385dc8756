"""Draw and check the seed of dropout, and bring it to where the kernels read it.

The core takes a number. The GPU's kernels read a tensor on their device, so nothing waits for the
device. A CUDA graph draws anew at each replay, because the captured draw is part of the graph.
"""

import torch
from torch import Tensor

from tilewise.errors import InvalidArgument, InvalidType, Unsupported
from tilewise.problem import Problem
from tilewise.reference.philox import seed_tensor
from tilewise.torch_private import is_batched, without_wrappers

_SEED_BITS = 0xFFFF_FFFF_FFFF_FFFF
# torch.randint's largest bound: 63 random bits.
_SEED_LIMIT = 2**63 - 1


def draw_seed(device: torch.device) -> Tensor:
    """Draw one int64 from torch's generator of a device; checkpointing and compile replay it."""
    return torch.randint(0, _SEED_LIMIT, (), dtype=torch.int64, device=device)


def read_seed(
    seed: int | Tensor | None, problem: Problem, device: torch.device, on_device: bool
) -> int | Tensor:
    """Return the seed of a call as its kernels take it; drawn if there is none.

    Returns:
        A number in [0, 2**64); with ``on_device`` an int64 tensor of one element, which is not
        read here.

    Raises:
        Unsupported: a seed that a vmap made one for each call.
        InvalidArgument, InvalidType: no seed; or a CPU tensor while a CUDA graph is captured.
    """
    if seed is None:
        seed = draw_seed(device) if problem.dropout_p else 0
    if isinstance(seed, Tensor):
        if seed.numel() != 1 or seed.dtype != torch.int64:
            raise InvalidArgument(
                "seed",
                f"a tensor of {seed.dtype}, shape {tuple(seed.shape)}",
                "an integer or an int64 tensor of one element",
            )
    elif isinstance(seed, bool) or not isinstance(seed, int):
        raise InvalidType(
            "seed", f"a {type(seed).__name__}", "an integer or an int64 tensor of one element"
        )
    elif not -(2**63) <= seed < 2**64:
        raise InvalidArgument("seed", str(seed), "a number of 64 bits")
    if not problem.dropout_p:
        return 0
    if isinstance(seed, Tensor):
        if is_batched(seed):
            raise Unsupported(
                "tilewise has no dropout that differs from call to call under torch.func.vmap",
                fix='vmap(..., randomness="same"), or put the vmapped dimension into the batch',
            )
        seed = without_wrappers(seed)
    if not on_device:
        return (seed if isinstance(seed, int) else int(seed.item())) & _SEED_BITS
    if not isinstance(seed, Tensor):
        return seed_tensor(seed, device)
    if seed.device != device and _capturing(device):
        raise InvalidArgument(
            "seed",
            f"a tensor on {seed.device} while a CUDA graph is captured, which would repeat the "
            "value of this moment at every replay",
            f"an int64 tensor on {device}, or None",
            "Leave seed out, and each replay draws another mask; or fill a tensor on the device "
            "before each replay.",
        )
    # A copy: the backward pass needs the value of now, whatever is written there meanwhile.
    return without_wrappers(seed.detach().reshape(()).to(device, copy=True))


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
