"""The Hugging Face kernel: assembled, loaded by ``kernels`` where tilewise is not, and in a model.

Processes of their own, in which ``import tilewise`` is an error unless a test says otherwise.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.blocks import block_of, executes
from tests.compat.flash_reference import Flags, attend
from tests.conftest import ran
from tests.contract import assert_all_exact, assert_exact

ROOT = Path(__file__).resolve().parent.parent.parent
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("kernels") is None,
    reason="needs kernels: pip install --no-deps -r .ci/kernels.txt",
)

ABSENT = "import sys; sys.modules['tilewise'] = None\n"
NO_NUMPY = "sys.modules['numpy'] = None\n"  # torch takes it where it is, and needs none
LOAD = """
import os, torch, kernels
from pathlib import Path
torch.set_num_threads(1)
kernel = kernels.get_local_kernel(Path(os.environ["KERNEL"]), backend="cpu")
"""
CALLS = """
place = Path(os.environ["PLACE"])
q, k, v, grad = (x.requires_grad_() for x in torch.load(place / "inputs.pt"))
cu = torch.tensor([0, 13, 13, 60], dtype=torch.int32)
plain = {"causal": True, "window_size": (9, -1)}
done = []
for how in (
    lambda *x: kernel.flash_attn_func(*(y[None] for y in x), **plain)[0],
    lambda *x: kernel.flash_attn_varlen_func(*x, cu, cu, 47, 47, **plain),
    torch.compile(lambda *x: kernel.flash_attn_func(*(y[None] for y in x), **plain)[0],
                  backend="aot_eager", fullgraph=True),
):
    out = how(q, k, v)
    done.append((out.detach(), *torch.autograd.grad(out, (q, k, v), grad)))
torch.save(done, place / "outputs.pt")
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that scripts/hf_kernel.py makes of the core of this environment."""
    folder = tmp_path_factory.mktemp("kernel")
    ran(sys.executable, ROOT / "scripts/hf_kernel.py", folder, timeout=None)
    return folder


def run(code: str, kernel: Path, place: Path) -> str:
    environment = os.environ | {"KERNEL": str(kernel), "PLACE": str(place), "HF_HUB_OFFLINE": "1"}
    environment |= {"LOCAL_KERNELS": f"me/tilewise-attention={kernel}"}
    done = ran(sys.executable, "-W", "ignore", "-c", code, timeout=None, env=environment)
    return done.stdout.strip()


def by_formula(given: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Out and the gradients of q, k and v, from those three and the gradient of out."""
    flags = Flags(causal=True, window_size=(9, -1))
    q, k, v, grad = (x.to(dtype) for x in given)
    inputs = [x.requires_grad_() for x in (q.clone(), k.clone(), v.clone())]
    out, _, _ = attend(inputs[0][None], inputs[1][None], inputs[2][None], flags, None, dtype)
    return [out[0].detach(), *torch.autograd.grad(out[0], inputs, grad)]


def test_a_process_without_tilewise_and_numpy(kernel: Path, tmp_path: Path) -> None:
    """Both functions, forward and backward, eager and as one graph, by the 2x rule."""
    torch.manual_seed(0)
    q, grad = torch.randn(60, 4, 24), torch.randn(60, 4, 24)
    k, v = torch.randn(60, 2, 24), torch.randn(60, 2, 24)
    given = [q, k, v, grad]
    torch.save(given, tmp_path / "inputs.pt")
    run(ABSENT + NO_NUMPY + LOAD + CALLS, kernel, tmp_path)
    padded, packed, compiled = torch.load(tmp_path / "outputs.pt")
    plain, truth = (by_formula(given, dtype) for dtype in (torch.float32, torch.float64))
    names = ("out", "grad_q", "grad_k", "grad_v")
    for got in (padded, compiled):
        assert_all_exact(got, plain, truth, names)
    for rows in (slice(0, 13), slice(13, 60)):
        cut = [x[rows] for x in given]
        plain, truth = (by_formula(cut, dtype) for dtype in (torch.float32, torch.float64))
        for one, other, oracle, name in zip(packed, plain, truth, names, strict=True):
            assert_exact(one[rows], other, oracle, name)


@executes("docs/install.md", 0)
def test_the_call_that_the_page_shows(kernel: Path, tmp_path: Path) -> None:
    code = block_of("docs/install.md", 0).code.replace('"KERNEL"', repr(str(kernel)))
    given = "import torch\nq = k = v = torch.ones(1, 5, 2, 8)\n"
    assert run(f"{ABSENT}{given}{code}\nprint(out.shape)", kernel, tmp_path).endswith("5, 2, 8])")


def test_beside_tilewise(kernel: Path, tmp_path: Path) -> None:
    """The same bits from modules, ops and a core of its own; either may be imported first."""
    code = """
import sys, tilewise
from tilewise.compat.flash_attn import flash_attn_func
q = torch.randn(1, 33, 2, 16)
assert torch.equal(kernel.flash_attn_func(q, q, q), flash_attn_func(q, q, q))
core = sys.modules[f"{kernel.__name__}._core"]
print(kernel.__name__, core.__file__.startswith(os.environ["KERNEL"]), core is not tilewise._core)
assert hasattr(torch.ops, kernel.__name__)
"""
    first, second = LOAD + code, "import tilewise\n" + LOAD + code
    for each in (first, second):
        name, own, other = run(each, kernel, tmp_path).split()
        assert name.startswith("_tilewise_attention_cpu_")
        assert (own, other) == ("True", "True")


@executes("docs/install.md", 1)
def test_the_attention_of_a_model(kernel: Path, tmp_path: Path) -> None:
    """``attn_implementation`` of transformers, found by the repository's name, and trained."""
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers: pip install --no-deps -r .ci/kernels.txt")
    if torch.version.cuda is not None:
        pytest.skip("transformers asks for the kernels of torch's build, which is for CUDA")
    shown = block_of("docs/install.md", 1).code
    code = ABSENT + (
        """
import os, torch
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
torch.set_num_threads(1)
sizes = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
ids = torch.randint(0, 99, (3, 17))
mask = torch.ones_like(ids)
mask[0, :5] = mask[2, 11:] = 0
done = []
for name, dtype in (("me/tilewise-attention", torch.float32), ("sdpa", torch.float32),
                    ("sdpa", torch.float64)):
    model.to(dtype).set_attn_implementation(name, allow_all_kernels=True)
    assert model.config._attn_implementation == name
    logits = model(ids, attention_mask=mask).logits[mask.bool()]
    parameters = list(model.parameters())
    grads = torch.autograd.grad(logits.square().mean(), parameters)
    done.append([logits.detach(), torch.cat([x.flatten() for x in grads])])
torch.save(done, Path(os.environ["PLACE"]) / "outputs.pt")
"""
        f"{shown}assert model.config._attn_implementation == 'me/tilewise-attention'\n"
    )
    run(code, kernel, tmp_path)
    ours, plain, truth = torch.load(tmp_path / "outputs.pt")
    for each in zip(ours, plain, truth, ("logits", "grads"), strict=True):
        assert_exact(*each)
