"""diffusers' models split by its ContextParallelConfig, with attention by tilewise.

Protects ``tilewise.integrations.diffusers``: rings and Ulysses over two processes, padding masks
(which diffusers' own ring refuses), gradients, and what is refused.
"""

from __future__ import annotations

import importlib.util
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.blocks import Block, block_of, executes, run
from tests.distributed.ranks import Ranks
from tilewise import compat
from tilewise.errors import InvalidArgument, Unsupported

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("diffusers") is None,
        reason="needs diffusers: pip install --no-deps -r .ci/diffusers.txt",
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("xformers") is not None, reason="xformers itself is installed"
    ),
]
CONFIGS = {"ring": {"ring_degree": 2}, "ulysses": {"ulysses_degree": 2}}


@pytest.fixture(scope="module", name="two")
def _two() -> Iterator[Ranks]:
    """As many processes as a config wants: it takes all of the world."""
    found = Ranks(2)
    yield found
    found.close()


def ready() -> Any:
    """Return diffusers, whose backend xformers is tilewise, as docs/model-libraries.md does."""
    if not compat.installed("xformers"):
        compat.install("xformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import diffusers
    from tilewise.integrations.diffusers import register

    register()
    register()  # a second time changes nothing
    return diffusers


def flux(diffusers: Any) -> tuple[Any, dict[str, Any]]:
    """A tiny Flux, whose rows all see one another."""
    made = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    sizes: dict[str, tuple[int, ...]]
    sizes = {"hidden_states": (2, 16, 4), "encoder_hidden_states": (2, 8, 32)}
    sizes |= {"pooled_projections": (2, 32), "img_ids": (16, 3), "txt_ids": (8, 3)}
    given = {name: torch.randn(*size, dtype=torch.float64) for name, size in sizes.items()}
    return made.double(), given | {"timestep": torch.ones(2, dtype=torch.float64)}


def qwen(diffusers: Any) -> tuple[Any, dict[str, Any]]:
    """A tiny Qwen-Image, with texts of different lengths: padding masks."""
    made = diffusers.QwenImageTransformer2DModel(
        patch_size=1, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    seen = torch.arange(8) < torch.tensor([[3], [7]])
    given = {
        "hidden_states": torch.randn(2, 16, 4, dtype=torch.float64),
        "encoder_hidden_states": torch.randn(2, 8, 32, dtype=torch.float64),
        "encoder_hidden_states_mask": seen,
        "timestep": torch.ones(2, dtype=torch.float64),
        "img_shapes": [[(1, 4, 4)]] * 2,
    }
    return made.double(), given


MODELS = {"flux": flux, "qwen": qwen}


def results(made: Any, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the output, and the gradient of the image that this process has."""
    image = given["hidden_states"].requires_grad_()
    (out,) = made(**given, return_dict=False)
    (grad,) = torch.autograd.grad(out.square().sum(), image)
    return out.detach(), grad


def split(group: dist.ProcessGroup, name: str, config: str) -> tuple[float, float, float]:
    """Return the largest differences from one process, and what masking changes."""
    diffusers = ready()
    torch.manual_seed(0)
    made, given = MODELS[name](diffusers)
    for p in made.parameters():  # attention far from even: a wrong mask is seen
        torch.nn.init.normal_(p, std=0.3)
    made.set_attention_backend("native")
    out, grad = results(made, given)
    unmasked = made(**{key: x for key, x in given.items() if "mask" not in key}).sample
    made.set_attention_backend("xformers")
    # It divides by the number of accelerators, of which there are none here.
    torch.accelerator.device_count = lambda: 1
    made.enable_parallelism(config=diffusers.ContextParallelConfig(**CONFIGS[config]))
    shared, parts = results(made, given)
    dist.all_reduce(parts, group=group)
    pairs = (shared, out), (parts, grad), (unmasked, out)
    found = [float((one - other).abs().max() / other.abs().max()) for one, other in pairs]
    return found[0], found[1], found[2]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_is_split(two: Ranks, name: str, config: str) -> None:
    for out, grad, masking in two.run(split, name, config):
        assert out < 1e-9
        assert grad < 1e-9
        assert (masking > 1e-4) == (name == "qwen"), masking


def shown(group: dist.ProcessGroup, block: Block) -> float:
    """Return the largest difference of the block's model, which is loaded, from one process."""
    diffusers = ready()
    torch.manual_seed(0)
    made, given = qwen(diffusers)
    torch.accelerator.device_count = lambda: 1  # as above
    with tempfile.TemporaryDirectory() as folder:
        made.float().save_pretrained(folder)
        transformer = run([block], {"name": folder})["transformer"].double()
    config = transformer._parallel_config.context_parallel_config
    assert (config.ring_degree, config.ulysses_degree) == (2, 1)
    made.double().set_attention_backend("native")
    out, _ = results(made, given)
    shared, _ = results(transformer, given)
    return float((shared - out).abs().max() / out.abs().max())


@executes("docs/model-libraries.md", 5)
def test_the_block_of_the_page(two: Ranks) -> None:
    for difference in two.run(shown, block_of("docs/model-libraries.md", 5)):
        assert difference < 1e-9


def refusals(group: dist.ProcessGroup) -> None:
    diffusers = ready()
    from diffusers.models import attention_dispatch
    from diffusers.models._modeling_parallel import ParallelConfig

    config = diffusers.ContextParallelConfig(ring_degree=2)
    given = ParallelConfig(context_parallel_config=config)
    x = torch.ones(1, 4, 2, 8)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("ring", "ulysses"))
    given.setup(dist.get_rank(), 2, torch.device("cpu"), mesh=mesh)

    def call(**more: Any) -> Tensor:
        more |= {"backend": "xformers", "parallel_config": given}
        found: Tensor = attention_dispatch.dispatch_attention_fn(x, x, x, **more)
        return found

    torch.testing.assert_close(call(), x)
    added = torch.zeros(1, 1, 1, 4)
    torch.testing.assert_close(call(attn_mask=added), x)
    with pytest.raises(InvalidArgument, match=r"attn_mask: got shape \(1, 1, 4, 8\)"):
        call(attn_mask=torch.ones(1, 1, 4, 8, dtype=torch.bool))
    with pytest.raises(Unsupported, match="is_causal=True"):
        call(is_causal=True)


def test_what_is_refused(two: Ranks) -> None:
    two.run(refusals)
