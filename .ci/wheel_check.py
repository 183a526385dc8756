"""The installed wheel, away from the source tree (the argument): it is right, with one OpenMP."""

import sys
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

import tilewise
import tilewise._core
from tilewise.doctor import openmp_runtimes

source = Path(sys.argv[1])
assert source not in Path(tilewise.__file__).parents, (
    f"this is the source tree: {tilewise.__file__}"
)

torch.manual_seed(0)
q, k, v = (torch.randn(2, 4, 300, 64) for _ in range(3))
ours = tilewise.attention(q, k, v, mask=tilewise.masks.causal(), backend="cpu")
torchs = scaled_dot_product_attention(q, k, v, is_causal=True)
torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-5)
runtime = tilewise._core.openmp_runtime()
assert runtime or torch.get_num_threads() == 1, "the core does not find torch's OpenMP runtime"
if sys.platform == "linux":  # elsewhere nothing lists what is mapped
    assert openmp_runtimes() == [runtime], openmp_runtimes()
print(f"the wheel works: {tilewise._core.isa_active()}, {runtime}")
