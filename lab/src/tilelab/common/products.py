"""Products of matrices of 16 bits, on processors that multiply float32 faster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from tilelab.common.torch_private import TorchDispatchMode
from tilewise.inspect.peaks import fast_products

_ATEN = torch.ops.aten
_PRODUCTS = (_ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default, _ATEN.baddbmm.default)
_NARROW = (torch.bfloat16, torch.float16)


class ProductsInFloat32(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Multiply matrices of 16 bits in float32, and round the results to 16 bits.

    A product of two such numbers is exact in float32, so the results differ from torch's by the
    order of their sums alone. Backward passes are part of it.
    """

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """See above."""
        kwargs = kwargs or {}
        if func not in _PRODUCTS or args[0].dtype not in _NARROW or not args[0].is_cpu:
            return func(*args, **kwargs)
        return func(*(each.float() for each in args), **kwargs).to(args[0].dtype)


def products(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    """Return what multiplies matrices of a dtype on a device in the faster way."""
    slow = device.type == "cpu" and dtype in _NARROW and not fast_products(dtype)
    return ProductsInFloat32() if slow else nullcontext()  # type: ignore[no-untyped-call]
