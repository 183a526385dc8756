"""The CPU backend: the compiled core's kernels over torch's CPU tensors.

Here is the core as far as it is there: its instruction set, its modes, and its threads.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from functools import cache
from types import ModuleType
from typing import Any

import torch  # before the core, which borrows its OpenMP runtime

from tilewise.errors import InvalidArgument, LostThreads
from tilewise.torch_private import onednn_products

# By their code in the core.
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}

_BUILD = "in a checkout `./run setup` builds it, elsewhere `pip install .` with a C++20 compiler"


@cache
def _load() -> tuple[ModuleType | None, str]:
    """Return the module, or None and why not."""
    try:
        module = importlib.import_module("tilewise._core")
    except ImportError as error:
        return None, f"the compiled core is not there ({error}); {_BUILD}"
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        version = torch.__version__
        return None, f"the compiled core needs torch 2.11 or newer, and this is torch {version}"
    module.set_tensor_type(torch.Tensor)
    forced = os.environ.get("TILEWISE_ISA")
    if forced:
        available = module.isa_available()
        if forced not in available:
            raise InvalidArgument(
                "TILEWISE_ISA (environment)",
                repr(forced),
                f"one of {', '.join(available)}, the instruction sets of this machine and build",
            )
        module.set_isa(forced)
    return module, ""


def absence() -> str | None:
    """Return why the compiled core is not there; None if it is."""
    module, why = _load()
    return None if module is not None else why


def core() -> ModuleType:
    """Return the compiled core; call only where ``absence()`` is None."""
    module, why = _load()
    assert module is not None, why
    return module


def fast_products(dtype: torch.dtype) -> bool:
    """Return whether torch's products of matrices take no longer in a dtype than in float32.

    Intel processors that have dot products of bfloat16, and no matrix tiles or no leave to use
    them, do half as much in bfloat16.
    """
    if not onednn_products(dtype):
        return False
    # The core has its instruction sets in the order of their speed in bfloat16.
    slow = dtype == torch.bfloat16 and absence() is None and core().isa_available()[0] == "avx512"
    return not slow


_WAYS = ("torch", "exact", "tiles")


class _Float32:
    """How float32 is computed where there are matrix tiles."""

    way = "torch"
    in_tiles = False  # what the core was told last


def set_float32(way: str) -> None:
    """Choose how the CPU backend computes float32, for the whole process.

    ``"exact"`` multiplies float32 by float32. ``"tiles"`` lets processors with matrix tiles (AMX)
    take each number as the exact sum of three bfloat16 pieces, and multiply these. That is faster,
    and rounds no more: of the nine products of two numbers' pieces those three are left out that
    are below the rounding of float32. Numbers below 2^-110 have fewer digits, and below 2^-126
    count as zero. ``"torch"``, the default, is ``"tiles"`` after
    ``torch.set_float32_matmul_precision("high")`` or ``"medium"`` (torch's setting
    ``torch.backends.mkldnn.matmul.fp32_precision`` is "tf32" or "bf16"), else ``"exact"``.

    Forward and backward passes are computed so, and forward passes of up to 8 queries only where a
    gradient may follow. Other processors stay as they are. A backward pass computes the scores
    again: do not change this between a forward pass and its backward pass.

    Raises:
        InvalidArgument: ``way`` is another word.
    """
    if way not in _WAYS:
        raise InvalidArgument("way", repr(way), "'torch', 'exact' or 'tiles'")
    _Float32.way = way
    settle_float32()


def get_float32() -> str:
    """Return what ``set_float32`` said last, or ``"torch"``."""
    return _Float32.way


def settle_float32() -> bool:
    """Tell the core whether float32 may be in matrix tiles now, and return it."""
    wanted = _Float32.way == "tiles"
    if _Float32.way == "torch":
        backends: Any = torch.backends
        wanted = backends.mkldnn.matmul.fp32_precision in ("tf32", "bf16")
    if wanted is not _Float32.in_tiles and absence() is None:
        core().set_float_tiles(wanted)
        _Float32.in_tiles = wanted
    return wanted


@cache
def has_tiles() -> bool:
    """Return whether the processor has matrix tiles."""
    return absence() is None and "avx512_amx" in core().isa_available()


# Why a forked process may have only one thread: a fork copies the thread that calls it and no
# other. GNU's OpenMP runtime does not notice: where the forking thread had a team, the child would
# wait forever for threads that it does not have. Torch's own operations hang there too. So the
# first call on several threads raises instead.
_forked: int | None = None  # the thread without its team; None where nothing is lost


def threads() -> int:
    """Return how many threads a call may take: as many as torch does.

    Raises:
        LostThreads: this process is a fork, and the threads stayed in its parent.
    """
    wished: int = torch.get_num_threads()
    if _forked is not None and wished > 1 and threading.get_ident() == _forked:
        raise LostThreads(wished)
    return wished


def _after_fork() -> None:
    global _forked
    module = sys.modules.get("tilewise._core")
    if module is not None and module.fork_loses_team():
        _forked = threading.get_ident()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
