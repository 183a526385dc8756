"""tilewise in other libraries' models, through their own interfaces; each is imported by name."""

from __future__ import annotations

import os
from importlib import import_module

__all__ = ["vllm_plugin"]


def vllm_plugin() -> None:
    """Register tilewise with vLLM if the environment says ``TILEWISE_VLLM=1``.

    vLLM's plugin loader calls it in each process (entry point ``vllm.general_plugins``).
    """
    if os.environ.get("TILEWISE_VLLM") == "1":
        import_module("tilewise.integrations.vllm").register()
