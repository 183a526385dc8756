"""The blocks of pages that need a library: they run as they stand there, with small models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.blocks import block_of, executes, run
from tests.integrations.tiny_models import MODELS, tokens


class AutoModelForCausalLM:
    """In the place of transformers' class: models of random weights."""

    @staticmethod
    def from_pretrained(name: str, attn_implementation: str) -> Any:
        import transformers

        model, config, sizes = MODELS[name]
        made = getattr(transformers, model)._from_config(
            getattr(transformers, config)(**sizes), attn_implementation=attn_implementation
        )
        made.generation_config.max_new_tokens = 3
        return made


@executes("docs/model-libraries.md", 0, 1, 2)
@pytest.mark.filterwarnings("ignore")  # those of the library
@pytest.mark.usefixtures("transformers_with_tilewise")
def test_blocks_with_transformers() -> None:
    names: dict[str, Any] = {"AutoModelForCausalLM": AutoModelForCausalLM, "name": "llama"}
    model = run([block_of("docs/model-libraries.md", 0)], names)["model"]
    ids = tokens(1, 7)
    assert model(ids).logits.isfinite().all()
    shown = block_of("docs/model-libraries.md", 1)
    code = shown.code.replace("256", "3")  # keys of 7
    found = run([shown._replace(code=code)], {"model": model, "ids": ids})["logits"]
    seen = torch.ones(7, 7, dtype=torch.bool).tril().triu(-2)[None, None]
    model.set_attn_implementation("eager")
    hidden = torch.zeros(1, 1, 7, 7).masked_fill(~seen, torch.finfo(torch.float32).min)
    assert torch.allclose(found, model(ids, attention_mask=hidden).logits, atol=1e-5)
    names = {**names, "name": "deepseek_v3", "ids": tokens(1, 7)}
    run([block_of("docs/model-libraries.md", 2)], names)  # makes tokens over its latent cache


@executes("docs/serving.md", 4)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("transformers_with_tilewise")
def test_the_block_with_pages_of_transformers() -> None:
    shown = block_of("docs/serving.md", 4)
    code = shown.code.replace("from_pretrained(...,", "from_pretrained('llama',")
    names = run([shown._replace(code=code)], {"AutoModelForCausalLM": AutoModelForCausalLM})
    assert [0 < len(each) <= 100 for each in names["tokens"]] == [True, True]


@executes("docs/model-libraries.md", 3)
@pytest.mark.filterwarnings("ignore")
def test_the_block_with_timm(timm: torch.library.Library) -> None:
    import timm as library

    names = {"timm": library, "images": torch.randn(1, 3, 224, 224)}
    report = run([block_of("docs/model-libraries.md", 3)], names)["report"]
    assert "12 of 12 calls taken" in str(report)
