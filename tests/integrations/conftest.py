"""The libraries that the tests of a file need, or a skip where they are absent."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def transformers_with_tilewise() -> Iterator[None]:
    """Registered for the time of a test."""
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers: pip install --no-deps -r .ci/transformers.txt")
    from tilewise.integrations.transformers import register, unregister

    register()
    yield
    unregister()


@pytest.fixture(scope="session")
def timm() -> torch.library.Library:
    """It imports torchvision, whose wheel on PyPI is for CUDA.

    Beside torch for the CPU its compiled operators are not there, and two must have names, for as
    long as what is returned lives.
    """
    if importlib.util.find_spec("timm") is None or importlib.util.find_spec("torchvision") is None:
        pytest.skip("needs timm: pip install --no-deps -r .ci/timm.txt")
    names = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            names.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return names
