"""diffusers' attention backends: which of them tilewise takes, and that no other can be added.

Its list of names is an Enum with members, which Python closes. ``xformers`` is one of them.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests.blocks import block_of, executes
from tests.conftest import ran
from tests.contract import assert_all_exact, assert_exact
from tilewise import compat
from tilewise.integrations.diffusers import register

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("diffusers") is None,
        reason="needs diffusers: pip install --no-deps -r .ci/diffusers.txt",
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("xformers") is not None, reason="xformers itself is installed"
    ),
]


@pytest.fixture(scope="module", name="dispatch")
def _dispatch() -> Iterator[Any]:
    compat.install("xformers")  # diffusers looks for it when it is imported
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from diffusers.models import attention_dispatch
    register()
    yield attention_dispatch
    compat.uninstall("xformers")


def drawn(heads: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q [B, M, H, K], and k and v, of which a gradient is wanted."""
    generator = torch.Generator().manual_seed(2)
    sizes = ((2, 7, 4, 16), (2, 9, heads, 16), (2, 9, heads, 16))
    tensors = [torch.randn(*size, generator=generator) for size in sizes]
    return [x.to(dtype).requires_grad_() for x in tensors]


PADDING = torch.arange(9) < torch.tensor([[5], [9]])
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.3},
    "causal": {"is_causal": True},
    "groups": {"enable_gqa": True},
    "padding": {"attn_mask": PADDING},
    "boolean padding": {"attn_mask": PADDING[:, None, None]},
    "boolean": {"attn_mask": (torch.arange(63) % 5 > 0).reshape(1, 1, 7, 9)},
    "added": {"attn_mask": torch.linspace(-2, 2, 63).reshape(1, 1, 7, 9)},
}


@pytest.mark.parametrize("name", CALLS)
def test_its_xformers_backend_is_tilewise(dispatch: Any, name: str) -> None:
    assert dispatch.xops.memory_efficient_attention.__module__ == "tilewise.compat.xformers.fmha"
    heads, words = 2 if name == "groups" else 4, CALLS[name]

    def run(backend: str, dtype: torch.dtype) -> list[Tensor]:
        q, k, v = drawn(heads, dtype)
        given = dict(words)
        mask = given.get("attn_mask")
        if mask is not None and backend == "native":
            given["attn_mask"] = mask.to(dtype) if mask.is_floating_point() else mask
        out = dispatch.dispatch_attention_fn(q, k, v, backend=backend, **given)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))]

    found, near = (run(backend, torch.float32) for backend in ("xformers", "native"))
    truth = run("native", torch.float64)
    names = ("out", "dq", "dk", "dv")
    assert_all_exact(found, near, truth, names)


def model() -> tuple[Any, dict[str, Tensor]]:
    """A tiny Flux with random weights, and its input."""
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    made = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    ).eval()
    sizes: dict[str, tuple[int, ...]]
    sizes = {"hidden_states": (1, 16, 4), "encoder_hidden_states": (1, 8, 32)}
    sizes |= {"pooled_projections": (1, 32), "img_ids": (16, 3), "txt_ids": (8, 3)}
    given = {name: torch.randn(*size) for name, size in sizes.items()}
    return made, given | {"timestep": torch.ones(1)}


def test_a_model_is_set_to_it(dispatch: Any) -> None:
    made, given = model()
    with torch.no_grad():
        native = made(**given).sample
        truth = made.double()(**{name: x.double() for name, x in given.items()}).sample
        made.float().set_attention_backend("xformers")
        assert_exact(made(**given).sample, native, truth, "Flux")


SHOWN = """
from pathlib import Path
import diffusers.models.attention_dispatch as dispatch
import torch
print(dispatch.xops.memory_efficient_attention.__module__)
with torch.no_grad():
    torch.save(transformer(**torch.load(Path(name, "given.pt"))).sample, Path(name, "out.pt"))
"""


@executes("docs/model-libraries.md", 4)
def test_the_block_of_the_page(dispatch: Any, tmp_path: Path) -> None:
    """In a process of its own, where nothing has imported diffusers or asked for the stand-in."""
    made, given = model()
    made.save_pretrained(tmp_path)
    torch.save(given, tmp_path / "given.pt")
    code = f"name = {str(tmp_path)!r}\n{block_of('docs/model-libraries.md', 4).code}{SHOWN}"
    done = ran(sys.executable, "-W", "ignore", "-c", code, timeout=None)
    assert done.stdout.split()[-1] == "tilewise.compat.xformers.fmha"
    with torch.no_grad():
        native = made(**given).sample
        truth = made.double()(**{name: x.double() for name, x in given.items()}).sample
    assert_exact(torch.load(tmp_path / "out.pt"), native, truth, "Flux")


def test_the_switch_takes_its_native_backend(dispatch: Any) -> None:
    made, given = model()
    made.set_attention_backend("native")
    with torch.no_grad(), tilewise.sdpa() as report:
        made(**given)
    assert report.taken == report.calls == 2


def test_no_other_name_can_be_registered(dispatch: Any) -> None:
    """``docs/model-libraries.md`` says so: if this fails, register one there."""
    registry: Any = dispatch._AttentionBackendRegistry
    registry.register("tilewise")(tilewise.attention)
    try:
        with pytest.raises(ValueError, match="is not a valid AttentionBackendName"):
            dispatch.dispatch_attention_fn(*drawn(4), backend="tilewise")
    finally:
        for table in (registry._backends, registry._constraints, registry._supported_arg_names):
            del table["tilewise"]
    made, _ = model()
    with pytest.raises(ValueError, match="must be one of the following"):
        made.set_attention_backend("tilewise")
