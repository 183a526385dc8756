"""transformers on the stand-in for flash_attn: what it looks for, and a model against eager.

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

LEAD = """
import warnings
warnings.simplefilter("ignore")
import torch
torch.cuda.is_available = lambda: True
torch.set_num_threads(1)
import tilewise.compat
tilewise.compat.install("flash_attn")
"""


def test_what_transformers_looks_for() -> None:
    code = LEAD + (
        "from transformers.utils import is_flash_attn_2_available, is_flash_attn_greater_or_equal\n"
        "print(is_flash_attn_2_available(), is_flash_attn_greater_or_equal('2.3.3'))"
    )
    assert alone(code) == "True True"


def test_a_model_equals_eager() -> None:
    code = LEAD + (
        """
from transformers import LlamaConfig, LlamaForCausalLM
import transformers.modeling_flash_attention_utils as flash

sizes = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
torch.manual_seed(0)
models = {}
for kind, dtype in (("flash_attention_2", torch.bfloat16), ("eager", torch.bfloat16),
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
assert "tilewise" in flash._flash_fn.__module__ and "tilewise" in flash._flash_varlen_fn.__module__
answers = [model.generate(ids[:1], max_new_tokens=6, do_sample=False) for model in (ours, eager)]
assert answers[0].shape == (1, 23)
print("equal" if torch.equal(*answers) else answers)
"""
    )
    assert alone(code) == "equal"
