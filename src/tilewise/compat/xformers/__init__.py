"""xformers' attention over tilewise: its functions and its attention biases.

``tilewise.compat.install("xformers")`` makes ``import xformers.ops`` find it.
``docs/compatibility.md`` lists what it covers.
"""

from tilewise.compat.stand_in_version import XFORMERS_VERSION
from tilewise.compat.xformers import attn_bias
from tilewise.compat.xformers.attn_bias import (
    AttentionBias,
    BlockDiagonalMask,
    LowerTriangularFromBottomRightMask,
    LowerTriangularMask,
    LowerTriangularMaskWithTensorBias,
)
from tilewise.compat.xformers.fmha import (
    memory_efficient_attention,
    memory_efficient_attention_backward,
    memory_efficient_attention_forward,
    memory_efficient_attention_forward_requires_grad,
    memory_efficient_attention_partial,
    merge_attentions,
)

__all__ = [
    "AttentionBias",
    "BlockDiagonalMask",
    "LowerTriangularFromBottomRightMask",
    "LowerTriangularMask",
    "LowerTriangularMaskWithTensorBias",
    "__version__",
    "attn_bias",
    "memory_efficient_attention",
    "memory_efficient_attention_backward",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
    "memory_efficient_attention_partial",
    "merge_attentions",
]

__version__ = XFORMERS_VERSION  # whose interface this is
