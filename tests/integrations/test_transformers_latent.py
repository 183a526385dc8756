"""The absorbed form of MLA in models of transformers: equal to the naive one, of the same cache."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.contract import assert_exact
from tests.integrations.tiny_models import INDEXED, LATENT, assert_equal_to_float32, both, tokens
from tilewise.errors import InvalidArgument, Unsupported

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # those of transformers
    pytest.mark.usefixtures("transformers_with_tilewise"),
]
NAMES = sorted({*LATENT, *INDEXED} - {"minimax_m3_vl"})


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of an absorbed layer took the absorbed form."""
    from tilewise.integrations.transformers import forward, latent

    taken: list[bool] = []

    def noted(*given: Any) -> Any:
        found = latent.operands(*given)
        taken.append(found[-1] is not None)
        return found

    monkeypatch.setattr(forward, "operands", noted)
    return taken


def absorbed(name: str) -> tuple[Any, Any]:
    """The model by eager, and by tilewise with its layers absorbed."""
    from tilewise.integrations.transformers import absorb

    eager, ours = both(name)
    absorb(ours)
    return eager, ours


def pieces(model: Any, ids: Tensor, cache: Any = None, **given: Any) -> Tensor:
    """Logits of a prompt of 9, a piece of 2 and tokens one by one, through a cache."""
    parts = []
    with torch.no_grad():
        for piece in ids.split([9, 2, *[1] * (ids.shape[1] - 11)], 1):
            out = model(piece, past_key_values=cache, use_cache=True, **given)
            cache = out.past_key_values
            parts.append(out.logits)
    return torch.cat(parts, 1)


@pytest.mark.parametrize("own_cache", [False, True], ids=["dynamic", "latent"])
@pytest.mark.parametrize("name", NAMES)
def test_pieces_of_a_prompt_and_tokens(name: str, own_cache: bool, forms: list[bool]) -> None:
    from tilewise.integrations.transformers import latent_cache

    eager, ours = absorbed(name)
    ids = tokens(2, 15)
    found = pieces(ours, ids, latent_cache(ours) if own_cache else None)
    assert_equal_to_float32(found, eager(ids, use_cache=False).logits)
    assert set(forms[: len(forms) // 6]) == {False}, "the prompt is cheaper in the naive form"
    assert forms.count(True) >= 5 * forms.count(False), "all calls after it are absorbed"


@pytest.mark.parametrize("cache", ["dynamic", "static", "latent"])
@pytest.mark.parametrize("name", NAMES)
def test_generate_from_prompts_padded_on_the_left(name: str, cache: str, forms: list[bool]) -> None:
    from tilewise.integrations.transformers import latent_cache

    ids = tokens(3, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[1, :1] = 0
    said: dict[str, Any] = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    said |= {"attention_mask": mask}
    eager, ours = absorbed(name)
    due = eager.generate(ids * mask, **said)
    kind = "past_key_values" if cache == "latent" else "cache_implementation"
    given = latent_cache(ours) if cache == "latent" else cache
    assert torch.equal(ours.generate(ids * mask, **said, **{kind: given}), due)
    assert len(set(due[:, -12:].flatten().tolist())) > 1, "the test would see nothing"
    assert any(forms)
