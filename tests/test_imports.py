"""What importing tilewise, and calling it, does not do: load other libraries, or change torch."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

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
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return dict(zip(STEPS, done.stdout.splitlines(), strict=True))


@pytest.mark.parametrize("name", STEPS)
def test_importing(name: str, said: dict[str, str]) -> None:
    if name == "flash_attn is not installed" and importlib.util.find_spec("flash_attn"):
        pytest.skip("it is, and not by tilewise")
    assert said[name] == STEPS[name][2]
