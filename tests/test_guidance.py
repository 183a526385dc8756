"""What other libraries call things is refused with what to write here, and that is right."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import tilewise
from tilewise import masks, scores
from tilewise.errors import InvalidType
from tilewise.variants import guidance

Q, K = torch.randn(2, 4, 3, 8), torch.randn(2, 4, 5, 8)
CALLS: dict[str, Any] = {
    "attention": (Q, K, K),
    "plan": (Q, K, K),
    "explain": (Q, K, K),
    "attention_varlen": (
        Q[:, :, 0], K[:, :, 0], K[:, :, 0], torch.tensor([0, 2]), torch.tensor([0, 2])
    ),
    "attention_paged": (Q, K, K, torch.tensor([[0], [1]]), torch.tensor([3, 5])),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"is_causal": True}, "mask=tilewise.masks.causal()"),
        ({"causal": True}, "mask=tilewise.masks.causal()"),
        ({"attn_mask": torch.ones(3, 5)}, "score=tilewise.scores.bias(tensor)"),
        ({"window": 4}, "mask=tilewise.masks.window(256)"),
        ({"window_size": (4, 0)}, "mask=tilewise.masks.window(256)"),
        ({"softmax_scale": 0.3}, "scale="),
        ({"enable_gqa": True}, "fewer heads"),
        ({"block_mask": None}, "BlockMask.from_flex"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_keywords_of_other_libraries(call: str, given: dict[str, Any], says: str) -> None:
    (name,) = given
    with pytest.raises(TypeError) as caught:
        getattr(tilewise, call)(*CALLS[call], **given)
    assert isinstance(caught.value, InvalidType)
    text = str(caught.value)
    assert text.startswith(f"{name}: got ")
    assert f"tilewise.{call} has mask, score" in text
    assert says in text
    assert "tensor(" not in text


def test_other_keywords_are_refused_as_python_does_it() -> None:
    with pytest.raises(TypeError, match=r"maks: got None.*Did you mean mask="):
        tilewise.attention(Q, K, K, maks=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^quux: got 3; required: no such keyword"):
        tilewise.attention(Q, K, K, quux=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("argument", "name", "says"),
    [
        ("mask", "causal", "mask=tilewise.masks.causal()"),
        ("mask", "Causal", "mask=tilewise.masks.causal()"),
        ("mask", "sliding_window", "mask=tilewise.masks.window(256)"),
        ("mask", "none", "leave mask out"),
        ("mask", "xyz", "See tilewise.masks."),
        ("score", "alibi", "score=tilewise.scores.alibi(slopes)"),
        ("score", "xyz", "See tilewise.scores."),
    ],
)
def test_masks_and_scores_by_name(argument: str, name: str, says: str) -> None:
    given: dict[str, Any] = {argument: name}
    with pytest.raises(TypeError) as caught:
        tilewise.attention(Q, K, K, **given)
    text = str(caught.value)
    assert text.startswith(f"{argument}: got the text {name!r}; required: a ")
    assert says in text


def test_what_is_to_be_written_instead_can_be_written() -> None:
    """Every expression of the package in the words is one that runs."""
    words = " ".join((*guidance._KEYWORDS.values(), *guidance._MASKS.values()))
    words += " ".join(guidance._SCORES.values())
    scope: dict[str, Any] = {
        "tilewise": tilewise,
        "masks": masks,
        "slopes": torch.ones(4),
        "tensor": torch.zeros(3, 5),
        "table": torch.zeros(3, 5),
        "cap": 3.0,
        "length": 2,
        "lengths": torch.tensor([2, 3]),
        "ids": torch.tensor([0, 0, 0, 1, 1]),
        "real": torch.ones(2, 5, dtype=torch.bool),
    }
    found = re.findall(r"(mask|score)=((?:tilewise\.)?(?:masks|scores)\.\w+\([^()]*\))", words)
    assert len(found) > 10
    for argument, code in found:
        kind = masks.Mask if argument == "mask" else scores.Score
        assert isinstance(eval(code, scope), kind), code
    pads = re.search(r"mask=(real\[[^\]]*\])", words)
    assert pads is not None
    tilewise.attention(Q, K, K, mask=eval(pads[1], scope))
    parameters = re.findall(r"\b(\w+)=(?=$|,| |;)", words)
    assert {"scale", "dropout_p", "sinks", "mask", "score"} >= set(parameters)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"mask": masks.causal}, r"Call it: mask=tilewise\.masks\.causal\(\)\."),
        ({"mask": masks.dense}, r"Call it: mask=tilewise\.masks\.dense\(\.\.\.\)\."),
        ({"score": scores.alibi}, r"Call it: score=tilewise\.scores\.alibi\(slopes\)\."),
    ],
    ids=["causal", "dense", "alibi"],
)
def test_a_variant_that_was_not_called(given: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidType, match=says):
        tilewise.attention(Q, K, K, **given)


def test_the_advice_on_causality_is_what_torch_computes() -> None:
    expected = torch.nn.functional.scaled_dot_product_attention(Q, K, K, is_causal=True)
    assert "'top_left'" in guidance._KEYWORDS["is_causal"]
    found = tilewise.attention(Q, K, K, mask=masks.causal("top_left"))
    torch.testing.assert_close(found, expected)


def test_a_window_to_the_left() -> None:
    for left in (0, 2, None):
        assert masks.window(left).text == masks.window(left, 0).text
        assert masks.window(left, align="top_left").text == masks.window(left, 0, "top_left").text
    own = torch.arange(3)[:, None] + 2
    n = torch.arange(5)
    seen = tilewise.visible_pairs(masks.window(1), 3, 5)[0, 0]
    assert torch.equal(seen, (n >= own - 1) & (n <= own))
    assert masks.window(2, 1).text != masks.window(2).text
