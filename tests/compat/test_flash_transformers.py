"""transformers on the stand-ins for flash-attn 2, 3 and 4: what it looks for, a model by each.

It asks torch for a CUDA device before it looks for flash_attn; the processes here say that there is
one, and compute on the CPU.
"""

from __future__ import annotations

import importlib.util

import pytest

from tests.compat.test_flash_install import alone

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None
    or importlib.util.find_spec("flash_attn") is not None,
    reason="needs transformers, and flash_attn absent",
)

# The stand-in that a version needs. transformers takes flash-attn 4 where a package of that name
# is installed, so the test says that it is.
STAND_INS = {2: "flash_attn", 3: "flash_attn_interface", 4: "flash_attn"}
LEAD = """
import warnings
warnings.simplefilter("ignore")
import torch
torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda *_: (9, 0)
torch.set_num_threads(1)
import tilewise.compat
version = {version}
tilewise.compat.install("{stand_in}")
import transformers.utils.import_utils as found
if version == 4:
    named = found._package_distribution_mapping()
    found._package_distribution_mapping = lambda: named | {{"flash_attn": ["flash-attn-4"]}}
"""


def lead(version: int) -> str:
    return LEAD.format(version=version, stand_in=STAND_INS[version])


def test_what_transformers_looks_for() -> None:
    code = lead(2) + (
        "from transformers.utils import is_flash_attn_2_available, is_flash_attn_greater_or_equal\n"
        "print(is_flash_attn_2_available(), is_flash_attn_greater_or_equal('2.3.3'))"
    )
    assert alone(code) == "True True"


@pytest.mark.parametrize("version", STAND_INS)
def test_a_model_equals_eager(version: int) -> None:
    code = lead(version) + (
        """
from transformers import LlamaConfig, LlamaForCausalLM
import transformers.modeling_flash_attention_utils as flash

sizes = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
torch.manual_seed(0)
models = {}
for kind, dtype in ((f"flash_attention_{version}", torch.bfloat16), ("eager", torch.bfloat16),
                    ("eager", torch.float32)):
    config = LlamaConfig(**sizes, **heads)
    model = LlamaForCausalLM._from_config(config, attn_implementation=kind, dtype=dtype)
    models[kind, dtype] = model.eval()
ours, eager, wide = models.values()
for model in (eager, wide):
    model.load_state_dict(ours.state_dict())
ids = torch.randint(0, 99, (3, 17))
mask = torch.ones_like(ids)
mask[0, :5] = mask[2, 11:] = 0
for said in ({}, {"attention_mask": mask}):
    kept = mask.bool() if said else torch.ones_like(mask).bool()
    logits = [model(ids, **said).logits.float()[kept] for model in models.values()]
    error, plain = (float((each - logits[2]).abs().max()) for each in logits[:2])
    assert error <= 2 * plain, (error, plain)
    ours.zero_grad()
    ours(ids, **said, labels=ids).loss.backward()
    assert all(bool(p.grad.isfinite().all()) for p in ours.parameters())
room = {2: "flash_attn_interface", 3: "version_3", 4: "cute"}[version]
taken = {flash._flash_fn.__module__, flash._flash_varlen_fn.__module__}
assert taken == {f"tilewise.compat.flash_attn.{room}"}
answers = [model.generate(ids[:1], max_new_tokens=6, do_sample=False) for model in (ours, eager)]
assert answers[0].shape == (1, 23)
print("equal" if torch.equal(*answers) else answers)
"""
    )
    assert alone(code) == "equal"
