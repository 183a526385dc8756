"""How float32 is computed where the processor has matrix tiles."""

from tilewise.errors import InvalidArgument
from tilewise.kernels.cpu import core

_WAYS = ("torch", "exact", "tiles")


def set_float32(way: str) -> None:
    """Choose how the CPU backend computes float32, for the whole process.

    ``"exact"`` multiplies float32 by float32. ``"tiles"`` lets processors with matrix tiles (AMX)
    take each number as the exact sum of three bfloat16 pieces, and multiply these. That is faster,
    and rounds no more: of the nine products of two numbers' pieces those three are left out that
    are below the rounding of float32. Numbers below 2^-110 have fewer digits, and below 2^-126
    count as zero. ``"torch"``, the default, is ``"tiles"`` after
    ``torch.set_float32_matmul_precision("high")`` or ``"medium"`` (torch's setting
    ``torch.backends.mkldnn.matmul.fp32_precision`` is "tf32" or "bf16"), else ``"exact"``.

    Forward passes of more than 8 queries are computed so where no gradient may follow. All else,
    and other processors, stay as they are.

    Raises:
        InvalidArgument: ``way`` is another word.
    """
    if way not in _WAYS:
        raise InvalidArgument("way", repr(way), "'torch', 'exact' or 'tiles'")
    core.set_float32(way)


def get_float32() -> str:
    """Return what ``set_float32`` said last, or ``"torch"``."""
    return core.float32_way()
