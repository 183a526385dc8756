"""What importing tilewise, and calling it, does not do: load other libraries, or change torch."""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
from importlib import import_module

import pytest

from tests.conftest import ran

# Steps in one fresh process, each with what its expression is then.
STEPS: dict[str, tuple[str, str, str]] = {
    "tilewise does not import compat": (
        "import gc, sys, torch\n"
        "collections = gc.get_stats()[2]['collections']\n"
        "before, sdpa = list(sys.meta_path), torch.nn.functional.scaled_dot_product_attention\n"
        "import tilewise",
        "[name for name in sys.modules if name.startswith('tilewise.compat')]",
        "[]",
    ),
    "nor the layers, of which graphs that were exported elsewhere may have the ops": (
        "ops = ['attention', 'attention_backward', 'attention_lists', 'attention_lists_backward', "
        "'attention_paged', 'head_rows', 'head_rows_backward', 'linear_cross_entropy', 'top_keys']",
        "[name for name in sys.modules if name.startswith(('tilewise.nn', 'tilewise.serving'))], "
        "[name for name in ops if not hasattr(torch.ops.tilewise, name)]",
        "([], [])",
    ),
    "nor the IO model, nor second derivatives": (
        "late = 'tilewise.chips', 'tilewise.plan.traffic', 'tilewise.reference.derivatives'",
        "[name for name in sys.modules if name.startswith(late)]",
        "[]",
    ),
    # A collection of torch's objects takes longer than the imports.
    "nor collects": (
        "pass",
        "gc.get_stats()[2]['collections'] - collections, gc.isenabled()",
        "(0, True)",
    ),
    "nor Triton, to make a raw score": (
        "from types import SimpleNamespace as S\n"
        "f = S(fn=abs, arg_names=list('sbhmnMNts'))\n"
        "tilewise.scores.register_triton('x', f, f); tilewise.scores.raw('x')",
        "'triton' in sys.modules",
        "False",
    ),
    # torch._dynamo takes a second and 100 MB to import.
    "nor the compiler, for an eager call": (
        "q = torch.ones(1, 1, 2, 4, requires_grad=True)\n"
        "tilewise.attention(q, q, q, backend='tiled').sum().backward()\n"
        "tilewise.top_keys(q, q, q[0, ..., :1], 1)",
        "'torch._dynamo' in sys.modules",
        "False",
    ),
    "nor Triton, to ask whether it is there": (
        "import tilewise.kernels.gpu.backend as gpu; gpu.GpuBackend().absence()",
        "'triton' in sys.modules and 'triton.language' in sys.modules",
        "False",
    ),
    "nor the libraries that it integrates": (
        "import tilewise.integrations.transformers, tilewise.integrations.timm",
        "{'transformers', 'timm'} & sys.modules.keys()",
        "set()",
    ),
    "layers and caches are attributes": (
        "listed = {'nn', 'serving', 'attention'} <= set(dir(tilewise))\n"
        "layer, cache = tilewise.nn.Attention, tilewise.serving.KVCache\n"
        "from tilewise import nn, serving",
        "listed, layer is nn.Attention, cache is serving.KVCache",
        "(True, True, True)",
    ),
    "the switch switches nothing": (
        "import tilewise.compat.sdpa, tilewise.compat.flex_attention",
        "torch.nn.functional.scaled_dot_product_attention is sdpa, "
        "torch.nn.attention.current_flash_attention_impl(), "
        "tilewise.sdpa is tilewise.compat.sdpa.sdpa",
        "(True, None, True)",
    ),
    "flash_attn is not installed": (
        "import tilewise.compat.flash_attn, importlib.util",
        "sys.meta_path[-len(before):] == before, "
        "[x for x in sys.meta_path if type(x).__module__.startswith('tilewise')], "
        "importlib.util.find_spec('flash_attn'), 'flash_attn' in sys.modules",
        "(True, [], None, False)",
    ),
}


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """What the process said at each step."""
    program = "".join(
        f"try:\n    exec({code!r}); print(repr(eval({expression!r})))\n"
        "except Exception as error:\n    print(repr(error))\n"
        for code, expression, _ in STEPS.values()
    )
    done = ran(sys.executable, "-W", "error", "-c", program)
    return dict(zip(STEPS, done.stdout.splitlines(), strict=True))


@pytest.mark.parametrize("name", STEPS)
def test_importing(name: str, said: dict[str, str]) -> None:
    if name == "flash_attn is not installed" and importlib.util.find_spec("flash_attn"):
        pytest.skip("it is, and not by tilewise")
    assert said[name] == STEPS[name][2]


@pytest.mark.parametrize(("frozen", "collected"), [(False, "[] 0"), (True, "[0, 0] True")])
def test_importing_collects_nothing(frozen: bool, collected: str) -> None:
    """Also where Python's counts stand so high that its next collection is one of older objects.

    What a program has frozen stays frozen; then young objects are collected.
    """
    program = (
        "import gc, torch\n"
        "for generation in (2, 1, 0):\n"
        "    gc.collect(generation)\n"  # each counts for the next older one
        f"if {frozen}: gc.freeze()\n"
        "before = gc.get_freeze_count()\n"
        "gc.set_threshold(4000, 0, 0)\n"
        "seen = []\n"
        "gc.callbacks.append(lambda phase, about: seen.append(about['generation']))\n"
        "import tilewise\n"
        "gc.callbacks.clear(); gc.disable()\n"
        "print(seen, before and gc.get_freeze_count() > before // 2)"
    )
    assert ran(sys.executable, "-c", program).stdout == collected + "\n"


def test_flash_attn_needs_torch_alone() -> None:
    """The Hugging Face kernel is these calls and the modules under them (scripts/hf_kernel.py)."""
    program = (
        "import sys; sys.modules['numpy'] = None\n"
        "import torch, tilewise.compat.flash_attn as flash\n"
        "q, cu = torch.ones(1, 5, 2, 8, requires_grad=True), torch.tensor([0, 2, 5])\n"
        "flash.flash_attn_func(q, q, q, causal=True).sum().backward()\n"
        "flash.flash_attn_varlen_func(q[0], q[0], q[0], cu, cu, 3, 3).sum().backward()\n"
        "print(q.grad.isfinite().all().item())"
    )
    assert ran(sys.executable, "-W", "ignore", "-c", program).stdout == "True\n"


# The goal: what ``import tilewise`` may add to ``import torch``, in milliseconds of processor time.
# It holds where torch takes 0.9 s or less; where torch takes longer, so may tilewise.
ADDED_MS = 60
OF_TORCH = 1 / 15


@pytest.mark.thorough
def test_importing_takes_little_time() -> None:
    """The median of fresh processes; the first one may compile Python files and does not count."""
    program = (
        "from time import process_time as now\n"
        "start = now(); import torch; middle = now(); import tilewise; end = now()\n"
        "print(1000 * (middle - start), 1000 * (end - middle))"
    )
    found = []
    for _ in range(12):
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        said = ran(sys.executable, "-c", program, env=environment)
        found.append([float(each) for each in said.stdout.split()])
    torch_ms, added_ms = map(statistics.median, zip(*found[1:], strict=True))
    assert added_ms <= max(ADDED_MS, OF_TORCH * torch_ms), found


# ---- The lab's old name: modules that studies of one's own import from ``tilewise.lab``.


NAMES = {
    "tilewise.lab.study.config": "tilelab.study.ask.config",
    "tilewise.lab.study.recipes.arms": "tilelab.study.recipes.arms",
    "tilewise.lab.study.track.tracker": "tilelab.study.track.tracker",
    "tilewise.lab.models.gpt2": "tilelab.models.gpt2",
}


@pytest.mark.parametrize("old", NAMES)
def test_an_old_name_warns_and_is_the_same_module(old: str) -> None:
    new = import_module(NAMES[old])
    spec = new.__spec__
    for name in [each for each in sys.modules if each.startswith("tilewise.lab.")]:
        del sys.modules[name]
    with pytest.warns(DeprecationWarning, match=f"{old} is now {NAMES[old]}"):
        assert import_module(old) is new
    assert new.__spec__ is spec


def test_a_name_that_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"tilewise\.lab\.nothing"):
        import_module("tilewise.lab.nothing")
