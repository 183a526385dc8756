"""Rotary scaling: each variant by its formula, written out for one channel pair at a time."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.nn.drop_in import drawn
from tilewise.errors import InvalidArgument, InvalidType
from tilewise.nn import (
    Attention,
    DynamicNtkScaling,
    LinearScaling,
    Llama3Scaling,
    NtkScaling,
    Rotary,
    RotaryScaling,
    YarnScaling,
    rotary,
)

BASE, DIM, LENGTH = 10000.0, 64, 900


def linear(f: float, i: int, s: float, length: int) -> float:
    return f / s


def ntk(f: float, i: int, s: float, length: int) -> float:
    return float((BASE * s ** (DIM / (DIM - 2))) ** (-2 * i / DIM))


def dynamic(f: float, i: int, s: float, length: int) -> float:
    return ntk(f, i, s * length / 512 - (s - 1) if length > 512 else 1.0, length)


def yarn(f: float, i: int, s: float, length: int) -> float:
    """By wavelengths: the pair whose wavelength is L0 / turns is the end of a ramp."""

    def place(turns: float) -> float:
        wavelength = 512 / turns
        return DIM / 2 * math.log(wavelength / (2 * math.pi), BASE)

    low, high = math.floor(place(32.0)), math.ceil(place(1.0))
    if i <= low:
        return f
    return f / s if i >= high else f + (f / s - f) * (i - low) / (high - low)


def llama3(f: float, i: int, s: float, length: int) -> float:
    wavelength = 2 * math.pi / f
    if wavelength < 512 / 4.0:
        return f
    if wavelength > 512 / 1.0:
        return f / s
    smooth = (512 / wavelength - 1.0) / 3.0
    return (1 - smooth) * f / s + smooth * f


VARIANTS: dict[str, tuple[RotaryScaling, Callable[[float, int, float, int], float]]] = {
    "linear": (LinearScaling(4.0), linear),
    "ntk": (NtkScaling(4.0), ntk),
    "dynamic": (DynamicNtkScaling(4.0, 512), dynamic),
    "yarn": (YarnScaling(4.0, 512), yarn),
    "llama3": (Llama3Scaling(8.0, 512), llama3),
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("length", [300, LENGTH])
def test_the_formula(name: str, length: int) -> None:
    """A unit vector of a pair turns by the angle of the formula."""
    scaling, formula = VARIANTS[name]
    positions = torch.tensor([0, 1, 57, length - 1])
    x = torch.ones(1, 1, 4, DIM, dtype=torch.float64)
    x[..., DIM // 2 :] = 0.0
    found = rotary(x, positions, base=BASE, scaling=scaling)[0, 0]
    size = 0.1 * math.log(4.0) + 1.0 if name == "yarn" else 1.0
    for i in range(DIM // 2):
        angle = formula(BASE ** (-2 * i / DIM), i, scaling.factor, length) * positions.double()
        torch.testing.assert_close(found[:, i], size * angle.cos(), rtol=0, atol=1e-12)
        torch.testing.assert_close(found[:, i + DIM // 2], size * angle.sin(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_factor_of_one_changes_nothing(name: str) -> None:
    kind = type(VARIANTS[name][0])
    scaling = kind(1.0) if kind in (LinearScaling, NtkScaling) else kind(1.0, 500)  # type: ignore[call-arg]
    x, positions = drawn(1, 2, 9, 16), torch.arange(9) * 50
    torch.testing.assert_close(
        rotary(x, positions, scaling=scaling), rotary(x, positions), rtol=0, atol=1e-12
    )


PARAMETERS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_as_transformers_has_it(name: str) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers: pip install --no-deps -r .ci/transformers.txt")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = SimpleNamespace(
        head_dim=DIM,
        hidden_size=DIM,
        num_attention_heads=1,
        max_position_embeddings=512,
        rope_parameters={"rope_theta": BASE, **PARAMETERS[name]},
        standardize_rope_params=lambda: None,
    )
    wanted, magnitude = ROPE_INIT_FUNCTIONS[name](config, torch.device("cpu"), seq_len=LENGTH)
    scaling = VARIANTS[name][0]
    exponents = torch.arange(0, DIM, 2) / DIM
    found = scaling.frequencies(BASE, exponents, torch.tensor([LENGTH]))
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=0)
    assert scaling.magnitude == pytest.approx(magnitude)


def test_items_of_a_batch_have_lengths_of_their_own() -> None:
    x = drawn(3, 2, 5, 16)
    positions = torch.tensor([[0], [600], [2000]]) + torch.arange(5)
    scaling = DynamicNtkScaling(2.0, 512)
    whole = rotary(x, positions, scaling=scaling)
    for item in range(3):
        alone = rotary(x[item : item + 1], positions[item], scaling=scaling)
        assert torch.equal(whole[item : item + 1], alone)


def test_queries_and_keys_share_a_length() -> None:
    """Scores depend on the distance alone, though queries are at other positions than keys."""
    scaling = DynamicNtkScaling(2.0, 16)
    layer = Attention(16, 1, rotary=Rotary(scaling=scaling)).double()
    x, context = drawn(1, 1, 16), drawn(1, 9, 16, seed=1)
    at, keys = torch.tensor([40]), torch.arange(9) * 3

    def rotated(rows: Tensor, positions: Tensor) -> Tensor:
        return rotary(rows, positions, scaling=scaling, length=torch.tensor([41]))

    q, k = rotated(layer.query(x)[:, None], at), rotated(layer.key(context)[:, None], keys)
    weights = (q @ k.mT / 4.0).softmax(-1)
    wanted = layer.output((weights @ layer.value(context)[:, None])[:, 0])
    found = layer(x, context, positions=at, context_positions=keys)
    torch.testing.assert_close(found, wanted)


def test_no_positions() -> None:
    x = torch.zeros(1, 2, 0, 16)
    found = rotary(x, torch.arange(0), scaling=DynamicNtkScaling(2.0, 512))
    assert found.shape == x.shape


ERRORS: dict[type[Exception], dict[str, Callable[[], object]]] = {
    InvalidArgument: {
        "factor.*0.5.*1 or more": lambda: LinearScaling(0.5),
        "original_length.*0.*above 0": lambda: YarnScaling(4.0, 0),
        "beta_slow.*beta_fast": lambda: YarnScaling(4.0, 8, beta_slow=40),
        "low_freq_factor.*high_freq_factor": lambda: Llama3Scaling(8.0, 512, low_freq_factor=4.0),
        "dim.*2.*at least 4": lambda: rotary(
            torch.zeros(1, 1, 1, 2), torch.arange(1), scaling=NtkScaling(2.0)
        ),
    },
    InvalidType: {
        "factor.*str": lambda: NtkScaling("4"),  # type: ignore[arg-type]
    },
}


@pytest.mark.parametrize(
    ("kind", "message"), [(kind, message) for kind, rows in ERRORS.items() for message in rows]
)
def test_errors_name_the_argument(kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        ERRORS[kind][message]()
