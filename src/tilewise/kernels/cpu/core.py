"""The compiled core as far as it is there, and the instruction set that it runs."""

import importlib
import os
from functools import cache
from types import ModuleType

from tilewise.errors import InvalidArgument

_BUILD = "in a checkout `./run setup` builds it, elsewhere `pip install .` with a C++20 compiler"


@cache
def _load() -> tuple[ModuleType | None, str]:
    """Return the module, or None and why not."""
    torch = importlib.import_module("torch")  # its OpenMP runtime is the one that the core borrows
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


_float_tiles = False


def set_float_tiles(wanted: bool) -> None:
    """Say whether float32 may be computed by matrix tiles, where there are some."""
    global _float_tiles
    _float_tiles = wanted
    if absence() is None:
        core().set_float_tiles(wanted)


def float_tiles() -> bool:
    """Return what ``set_float_tiles`` said last."""
    return _float_tiles
