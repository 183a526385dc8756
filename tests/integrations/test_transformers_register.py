"""What is registered, and when, and what attn_implementation="tilewise" refuses."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.tiny_models import both, tokens
from tilewise.errors import InvalidArgument, InvalidType, Unsupported

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers


@pytest.mark.skipif(importlib.util.find_spec("transformers") is not None, reason="it is there")
def test_without_transformers() -> None:
    from tilewise.integrations.transformers import register

    with pytest.raises(Unsupported, match=r"(?s)without transformers.*fix: pip install"):
        register()


def names() -> list[bool]:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ["tilewise" in all_ for all_ in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)]


@pytest.mark.usefixtures("transformers_with_tilewise")
def test_register_and_unregister() -> None:
    from tilewise.integrations.transformers import register, unregister

    assert names() == [True, True]
    register()
    unregister()
    assert names() == [False, False]
    unregister()
    with pytest.raises(ValueError, match="tilewise"):
        both("llama")
    register()
    assert names() == [True, True]


@pytest.mark.usefixtures("transformers_with_tilewise")
def test_a_name_that_is_taken() -> None:
    import transformers

    from tilewise.integrations.transformers import register, unregister

    unregister()
    transformers.AttentionInterface.register("tilewise", print)
    with pytest.raises(Unsupported, match="AttentionInterface of transformers has another"):
        register()
    unregister()
    assert names() == [True, False], "what another registered stays"
    del transformers.AttentionInterface._global_mapping["tilewise"]


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "whisper"])
@pytest.mark.usefixtures("transformers_with_tilewise")
def test_attention_weights_are_refused(name: str) -> None:
    from tests.integrations.tiny_models import inputs

    _, ours = both(name)
    with pytest.raises(Unsupported, match=r"(?s)output_attentions=True.*set_attn_implementation"):
        ours(**inputs(name), output_attentions=True)
    ours.set_attn_implementation("eager")
    found = ours(**inputs(name), output_attentions=True)
    assert len(found.get("attentions") or found.get("decoder_attentions")) == 2


@pytest.mark.usefixtures("transformers_with_tilewise")
def test_what_the_attention_function_refuses() -> None:
    from tilewise.integrations.transformers import attention_forward, make_mask

    q = torch.randn(2, 4, 5, 16)
    layer: Any = torch.nn.Module()

    def call(mask: Any = None, **more: Any) -> Any:
        return attention_forward(layer, q, q, q, mask, **more)

    assert call()[0].shape == (2, 5, 4, 16)
    with pytest.raises(Unsupported, match="head_mask"):
        call(head_mask=torch.ones(4))
    with pytest.raises(Unsupported, match="continuous batching"):
        call(cache=object())
    with pytest.raises(Unsupported, match=r"sliding_window=3 over 5 keys"):
        call(sliding_window=3)
    with pytest.raises(InvalidArgument, match="one for the 5 queries and 5 keys"):
        call(make_mask(2, 5, 6))
    with pytest.raises(InvalidArgument, match="got one for 1 queries and 5 keys"):
        call(make_mask(2, 1, 5, mask_function=lambda b, h, m, n: n >= 0))  # BridgeTower's
    with pytest.raises(InvalidArgument, match=r"attention_mask: got torch.float32 of shape"):
        call(torch.ones(2, 5))
    with pytest.raises(InvalidType, match="attention_mask: got a str"):
        call("causal")
    with pytest.raises(InvalidArgument, match="cu_seq_lens_q: got one for 2 batch items"):
        call(cu_seq_lens_q=torch.tensor([0, 2, 5]))
    with pytest.raises(InvalidArgument, match="cu_seq_lens_q: got one with a bias"):
        call(cu_seq_lens_q=torch.tensor([0, 2, 5]), position_bias=torch.zeros(1, 4, 5, 5))
    chosen = torch.zeros(2, 5, 1, dtype=torch.int32)
    with pytest.raises(InvalidArgument, match="cu_seq_lens_q: got one with an indexer"):
        call(cu_seq_lens_q=torch.tensor([0, 2, 5]), indices=chosen)
    with pytest.raises(Unsupported, match="no dropout with key lists"):
        call(dropout=0.5, indices=chosen)


@pytest.mark.usefixtures("transformers_with_tilewise")
def test_without_a_mask_a_layer_is_causal_where_it_says_so() -> None:
    from tilewise.integrations.transformers import attention_forward

    q = torch.randn(1, 2, 5, 8)
    layer: Any = torch.nn.Module()
    causal, every = (
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=is_causal)
        for is_causal in (True, False)
    )
    for said, argument, expected in (
        (None, None, causal),
        (False, None, every),
        (False, True, causal),
        (True, False, every),
    ):
        if said is not None:
            layer.is_causal = said
        found, weights = attention_forward(layer, q, q, q, None, is_causal=argument)
        torch.testing.assert_close(found.transpose(1, 2), expected, rtol=1e-5, atol=1e-6)
        assert weights is None


@pytest.mark.usefixtures("transformers_with_tilewise")
def test_a_model_may_change_to_it_and_back() -> None:
    eager, ours = both("llama")
    ids = tokens(2, 9)
    eager.set_attn_implementation("tilewise")
    assert torch.equal(eager(ids).logits, ours(ids).logits)


# What models hand to the attention function by name, and it does not read: a window is in the mask.
UNREAD = {"sliding_window"}


def test_the_attention_function_knows_every_keyword_of_eager_attention() -> None:
    """It takes any keyword, so one that it does not know would change nothing, silently."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        pytest.skip("needs transformers: pip install --no-deps -r .ci/transformers.txt")
    from tilewise.integrations.transformers import attention_forward

    known = {*inspect.signature(attention_forward).parameters, *UNREAD}
    known |= {f"{name}_states" for name in ("query", "key", "value")}
    defined = re.compile(r"^def eager_attention_forward\((.*?)\)(?: ->.*?)?:$", re.DOTALL | re.M)
    read = 0
    for path in Path(spec.origin).parent.glob("models/*/modeling_*.py"):
        for arguments in defined.findall(path.read_text(encoding="utf-8")):
            function = ast.parse(f"def f({arguments}): ...").body[0]
            assert isinstance(function, ast.FunctionDef)
            names = {each.arg for each in (*function.args.args, *function.args.kwonlyargs)}
            assert names <= known, f"{path.name}: {sorted(names - known)}"
            read += 1
    assert read > 300
