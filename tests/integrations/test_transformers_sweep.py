"""Every architecture of transformers for text: tilewise gives what eager gives, or says why not.

The default config of each is made small by the names of its fields. Where that does not make a
model, the architecture is left out; a floor says how many must be compared.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations.tiny_models import TOKENS, tokens
from tilewise.errors import Unsupported

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # those of transformers
    pytest.mark.usefixtures("transformers_with_tilewise"),
]

# The first pattern that a field's whole name matches says its value; "..." keeps the default.
SIZES: tuple[tuple[str, Any], ...] = (
    (r"_.*|type_vocab_size|num_labels|num_codebooks|chunk_size_feed_forward|block_size", ...),
    (r"pad_token_id", 0),
    (r"(bos|cls|decoder_start)_token_id", 1),
    (r"(eos|sep)_token_id", 2),
    (r".*(token_id|token_index)", TOKENS - 1),
    (r".*vocab_size", TOKENS),
    (r"num_nextn_predict_layers", 0),
    (r"(n|topk)_group|n_shared_experts|mamba_n_?groups|n_groups|num_hidden_groups", 1),
    (r"(max_window|num_dense)_layers|first_k_dense_replace", 1),
    (r"num_experts_per_tok(en)?|moe_top_?k|moe_k|(attn|expert)_layer_period|layer_group_size", 2),
    (r"mamba_(n|num)_heads", 8),
    (r"linear_num_key_heads", 2),
    (r".*heads?", 4),
    (r".*(num|n|local|routed)_experts", 4),
    (r"(qk_nope|qk_rope)_head_dim|mamba_dt_rank|chunk_size|rotary_dim", 8),
    (r".*head_dim|d_kv|kv_lora_rank|query_pre_attn_scalar|.*_state|state_size|mamba_d_head", 16),
    (r"q_lora_rank|(moe|shared_expert|expert)_.*(intermediate|hidden)_size", 32),
    (r".*(intermediate_size|ffn_dim|ffn_hidden_size)|d_ff|n_inner|mlp_dim", 96),
    (r"mamba_d_ssm", 128),
    (
        r".*(hidden_size|hidden_dim|embed_dim|embedding_size|proj_dim)|d_model|n_embd|dim|lru_width",
        64,
    ),
    (r".*(sliding_window|window_size)|local_attention|attention_chunk_size", 6),
    (r".*positions|max_position_embeddings|max_.*position_embeddings|n_ctx|max_seq_len", 128),
    (r"relative_attention_(num_buckets|max_distance)", 12),
    (r"image_size", 28),
    (r".*layers?|depth", 2),
)
FLOORS = {
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": ("AutoModelForCausalLM", 130),
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": ("AutoModelForMaskedLM", 24),
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": ("AutoModelForSeq2SeqLM", 27),
}
# Three with sizes of other names, which are slow, and one whose default decoder is an encoder.
LEFT_OUT = {"blt", "perceiver", "vibevoice_asr", "encoder-decoder"}


def small(default: Any) -> Any:
    """Return a config of the class of a default one, with small sizes."""
    from transformers import PreTrainedConfig

    said: dict[str, Any] = {}
    held = vars(default)
    layers = next((held[name] for name in ("num_hidden_layers", "num_layers") if held.get(name)), 0)
    lists = {
        name: each
        for name, each in held.items()
        if isinstance(each, list | tuple) and len(each) == layers > 1 and name[0] != "_"
    }
    kinds = [tuple(str(each[i]) for each in lists.values()) for i in range(layers)]
    one_of_each = sorted({kind: i for i, kind in reversed(list(enumerate(kinds)))}.values())[:6]
    kept = one_of_each if len(one_of_each) > 1 else [0, 1]
    for name, value in held.items():
        found = next((size for form, size in SIZES if re.fullmatch(form, name)), ...)
        if isinstance(value, PreTrainedConfig):
            said[name] = small(value)
        elif name == "head_dim" and "qk_rope_head_dim" in held:
            continue  # it follows from others
        elif name == "head_dim":
            said[name] = 16
        elif name in lists:
            said[name] = [value[i] for i in kept]
        elif lists and name in ("num_hidden_layers", "num_layers"):
            said[name] = len(kept)
        elif "drop" in name and isinstance(value, float):
            said[name] = 0.0
        elif name in ("initializer_range", "init_std"):
            said[name] = 0.2  # so large that attention is far from even
        elif name == "num_key_value_heads" and value:
            said[name] = 1 if value == 1 else 4 if value == held.get("num_attention_heads") else 2
        elif found is not ... and isinstance(value, int) and not isinstance(value, bool) and value:
            said[name] = found
    return type(default)(**said)


def outcome(auto: Any, key: str, seed: int) -> str:
    """Say what came of an architecture: compared, differs, refused or left out, and why."""
    from transformers import CONFIG_MAPPING

    def made(kind: str) -> Any:
        torch.manual_seed(seed)
        return auto.from_config(small(CONFIG_MAPPING[key]()), attn_implementation=kind).eval()

    ids, mask = tokens(3, 17), torch.ones(3, 17, dtype=torch.long)
    mask[0, :5] = mask[1, 13:] = 0
    given: dict[str, Tensor] = {"input_ids": ids, "attention_mask": mask}

    def results(model: Any) -> list[Tensor]:
        with torch.no_grad():
            logits = model(**given).logits
        found = [logits[mask.bool()] if logits.shape[:2] == mask.shape else logits]
        if model.can_generate():
            said: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
            if "decoder_input_ids" in given:
                said["decoder_start_token_id"] = 1
            prompt = {name: each[:, :9] for name, each in given.items() if "decoder" not in name}
            found.append(model.generate(**prompt, **said))
        return found

    try:
        eager = made("eager")
        if "decoder_input_ids" in inspect.signature(eager.forward).parameters:
            given["decoder_input_ids"] = tokens(3, 11, seed=3)
        expected = results(eager)
    except Exception as error:  # sizes that do not fit, or a library that is not there
        return f"left out: {type(error).__name__}: {error}"
    try:
        ours = made("tilewise")
        ours.load_state_dict(eager.state_dict())
        found = results(ours)
    except (AttributeError, KeyError, Unsupported) as error:
        return f"refused: {error}"
    for one, other in zip(found, expected, strict=True):
        off = float((one - other).abs().max()) / max(1.0, float(other.abs().max()))
        if not off < 1e-4:  # some models enlarge the rounding of float32 tenfold
            return f"differs: {off}"
    return "compared"


@pytest.mark.parametrize("names", FLOORS)
def test_every_architecture(names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers
    from transformers.models.auto import modeling_auto

    from tilewise.integrations.transformers import attention_forward

    auto, floor = FLOORS[names]
    calls = []

    def counted(*operands: Any, **keywords: Any) -> Any:
        calls.append(1)
        return attention_forward(*operands, **keywords)

    mapping = transformers.AttentionInterface._global_mapping
    monkeypatch.setitem(mapping, "tilewise", counted)
    outcomes: dict[str, str] = {}
    for key in sorted(getattr(modeling_auto, names).keys() - LEFT_OUT):
        calls.clear()
        what = outcome(getattr(transformers, auto), key, seed=0)
        if what.startswith("differs"):  # a router may choose another expert for a rounded state
            what = outcome(getattr(transformers, auto), key, seed=1)
        outcomes[key] = "no attention by tilewise" if what == "compared" and not calls else what
        if what.startswith("refused"):  # the KeyError is that of a table of transformers
            assert re.search("'tilewise'$|attn_implementation='(eager|sdpa)'", what), (key, what)
        assert not what.startswith("differs"), (key, what)
    print(f"{names}: {Counter(what.split(':')[0] for what in outcomes.values())}")
    assert list(outcomes.values()).count("compared") >= floor, outcomes
