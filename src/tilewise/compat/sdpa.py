"""``scaled_dot_product_attention`` by torch's signature, and what puts it in torch's place.

Three ways to it, each asked for (importing this module patches nothing):

* ``tilewise.compat.sdpa.scaled_dot_product_attention`` is a function to call;
* ``with tilewise.sdpa():`` takes the calls of a block, ``enable()`` and ``disable()`` those of the
  process (``sdpa_switch.py``);
* ``torch.nn.attention.activate_flash_attention_impl("tilewise")`` makes it torch's flash kernel
  (``flash_impl.py``); the name is known to torch once this module is imported.
"""

import torch
import torch.nn.attention
from torch import Tensor

from tilewise.choice import Report
from tilewise.compat import flash_impl
from tilewise.compat.sdpa_call import (
    Call,
    attend,
    attend_usual,
    cast,
    is_usual,
    mistake,
    raise_as_torch,
    raise_unsupported,
    why_not,
)
from tilewise.compat.sdpa_switch import disable, enable, sdpa

__all__ = ["Report", "disable", "enable", "scaled_dot_product_attention", "sdpa"]

if hasattr(torch.nn.attention, "register_flash_attention_impl"):
    flash_impl.register()


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run torch's ``scaled_dot_product_attention`` by ``tilewise.attention``, in O(L + S) memory.

    ``softmax(scale query key^T + attn_mask) value``, over the last two dimensions.

    Torch's own paths differ from one another in these cases; this function does the following:

    * A row that sees no key gives 0, with zero gradients. This holds for a bool mask, -inf in a
      float mask, and S = 0. Every path of torch 2.13 does so on the CPU.
    * ``attn_mask`` together with ``is_causal`` is refused, as torch's page says and its plain path
      does; its flash kernel on the CPU applies both.
    * NaN: a NaN query, and a NaN key or value that is attended, give NaN. A hidden value counts as
      0 * NaN inside of a computed tile, as in torch. A hidden NaN key does not: torch's plain path
      spreads it (NaN - inf), its flash kernel with ``is_causal`` does not either.
    * Dropout draws from torch's generator, so that ``torch.manual_seed`` repeats it, but not the
      numbers that torch draws.

    Args:
        query: [.., Hq, L, E], two dimensions or more; what stands before L and E broadcasts.
        key: [.., H, S, E].
        value: [.., H, S, Ev]. All three of one dtype: float32, bfloat16, float16 or float64; or
            all three jagged nested tensors [B, H, j, E], without attn_mask.
        attn_mask: broadcasts to the scores [.., Hq, L, S]: bool (True = attend), or floats to be
            added, float32 or query's dtype, with a gradient.
        dropout_p: in [0, 1]; not switched off by anything: pass 0.0 when evaluating.
        is_causal: row m sees keys 0 to m: top left aligned, whatever L and S are.
        scale: 1/sqrt(E) if None.
        enable_gqa: heads of key and value (dimension -3) divide those of query, and each serves
            a group of them.

    Returns:
        [.., Hq, L, Ev] in query's dtype.

    Raises:
        RuntimeError, TypeError, IndexError: torch's own, for what torch refuses.
        Unsupported: what torch computes and nothing here does, with the reason.

    Source: https://docs.pytorch.org/docs/stable/generated/
    torch.nn.functional.scaled_dot_product_attention.html
    """
    call = Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if not torch.compiler.is_compiling() and is_usual(call):
        return attend_usual(call)
    if isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor):
        call = cast(call)
    wrong = mistake(call)
    if wrong is not None:
        raise_as_torch(call, wrong)
    uncovered = why_not(call)
    if uncovered is not None:
        raise_unsupported(call, uncovered)
    return attend(call)
