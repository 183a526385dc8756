"""Small models of timm with random weights, with attention as timm spells it out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_VIT: dict[str, Any] = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 48,
    "depth": 2,
    "num_heads": 3,
    "num_classes": 5,
}


def _vit(**more: Any) -> Any:
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(**{**_VIT, **more})


def _parallel() -> Any:
    from timm.models.vision_transformer import ParallelScalingBlock

    return _vit(block_fn=ParallelScalingBlock)


def _relative() -> Any:
    from timm.models.vision_transformer_relpos import VisionTransformerRelPos

    return VisionTransformerRelPos(**_VIT, rel_pos_type="bias", init_values=None)


def _beit() -> Any:
    from timm.models.beit import Beit

    return Beit(**_VIT, use_abs_pos_emb=False, use_rel_pos_bias=True)


def _eva(**more: Any) -> Any:
    from timm.models.eva import Eva

    return Eva(**_VIT, use_rot_pos_emb=True, **more)


def _swin() -> Any:
    """Windows of 4 x 4 of a map of 16 x 16, and of 8 x 8: 16 and 4 of them."""
    from timm.models.swin_transformer import SwinTransformer

    sizes = {"img_size": 32, "patch_size": 2, "window_size": 4, "num_classes": 5}
    return SwinTransformer(**sizes, embed_dim=32, depths=(2, 2), num_heads=(2, 4))


MODELS: dict[str, Callable[[], Any]] = {
    "vit": lambda: _vit(qkv_bias=True, qk_norm=True),
    "pooled by attention": lambda: _vit(global_pool="map", class_token=False),
    "parallel": _parallel,
    "differential": lambda: _vit(attn_layer="diff", num_heads=2),
    "relative": _relative,
    "beit": _beit,
    "eva": _eva,
    "rope": lambda: _eva(attn_type="rope"),
    "swin": _swin,
}


def made(name: str) -> Any:
    """The model in eval mode, and every layer of it on the path that writes the weights."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for layer in model.modules():
        if hasattr(layer, "fused_attn"):
            layer.fused_attn = False
    with torch.no_grad():
        for path, each in model.named_parameters():
            if each.dim() > 1 or "bias" in path:  # so large that attention is far from even
                each.copy_(torch.randn(each.shape) / max(3.0, each.shape[-1] ** 0.5))
    return model


def images(dtype: torch.dtype = torch.float32) -> Tensor:
    """Two of them."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 3, 32, 32, generator=generator).to(dtype)
