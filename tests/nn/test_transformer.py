"""nn.TransformerEncoderLayer and DecoderLayer are torch's, alone and in torch's containers."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.nn.drop_in import assert_like_torch, drawn, outcome, spread
from tilewise.errors import SlowPathWarning
from tilewise.nn import (
    MultiheadAttention,
    TransformerDecoderLayer,
    TransformerEncoderLayer,
    multihead,
)

B, H, E, S, T = 3, 4, 16, 13, 9
KINDS = {
    TransformerEncoderLayer: torch.nn.TransformerEncoderLayer,
    TransformerDecoderLayer: torch.nn.TransformerDecoderLayer,
}


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    """Nobody asks for weights here; torch speaks of nested tensors and of mixed masks."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", SlowPathWarning)
        warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors")
        warnings.filterwarnings("ignore", message="enable_nested_tensor is True")
        yield


def pair(kind: Any = TransformerEncoderLayer, **options: Any) -> tuple[Any, Any]:
    """Torch's and ours, float64, with the same values, and no dropout."""
    options = {"dim_feedforward": 20, "dropout": 0.0, "dtype": torch.float64, **options}
    theirs = KINDS[kind](E, H, **options)
    spread(theirs)
    ours = kind(E, H, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def rows(module: Any, length: int, seed: int = 0) -> Tensor:
    x = drawn(length, B, E, seed=seed)
    return x.transpose(0, 1).contiguous() if module.self_attn.batch_first else x


def hidden(*shape: int) -> Tensor:
    """Some of the pairs; the first key is always seen."""
    found = drawn(*shape) > 0.3
    found[..., 0] = False
    return found


def padding() -> Tensor:
    return torch.arange(S)[None] >= torch.tensor([S, 4, 8])[:, None]


def spied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernel's functions, as they are called."""
    calls: list[str] = []

    def watched(name: str) -> Callable[..., Any]:
        function = getattr(multihead, name)

        def call(*args: Any, **keywords: Any) -> Any:
            calls.append(name)
            return function(*args, **keywords)

        return call

    for name in ("by_the_faster", "attention_varlen"):
        monkeypatch.setattr(multihead, name, watched(name))
    return calls


ENCODERS: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "plain": ({}, dict),
    "norm first": ({"norm_first": True}, lambda: {"src_mask": hidden(S, S)}),
    "gelu": ({"activation": "gelu", "batch_first": True}, lambda: {"src_mask": drawn(S, S)}),
    "callable": ({"activation": torch.tanh}, lambda: {"src_key_padding_mask": padding()}),
    "no bias": ({"bias": False, "batch_first": True}, lambda: {"src_key_padding_mask": padding()}),
    "both": (
        {"norm_first": True, "batch_first": True, "activation": torch.nn.GELU()},
        lambda: {"src_mask": hidden(B * H, S, S), "src_key_padding_mask": padding()},
    ),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_layers_numbers(name: str) -> None:
    options, call = ENCODERS[name]
    theirs, ours = pair(**options)
    given = {"src": rows(ours, S), **call()}
    assert_like_torch(partial(outcome, ours, given), partial(outcome, theirs, given))


@pytest.mark.parametrize("options", [{"norm_first": True}, {"batch_first": True}], ids=str)
def test_a_decoder_layers_numbers(options: dict[str, Any]) -> None:
    theirs, ours = pair(TransformerDecoderLayer, **options)
    given: dict[str, Tensor | None] = {
        "tgt": rows(ours, T),
        "memory": rows(ours, S, 1),
        "tgt_mask": hidden(T, T),
        "memory_key_padding_mask": padding(),
        "memory_mask": hidden(T, S),
    }
    assert_like_torch(partial(outcome, ours, given), partial(outcome, theirs, given))


@pytest.mark.parametrize("kind", KINDS)
def test_constructed_as_torchs(kind: Any) -> None:
    assert inspect.signature(kind) == inspect.signature(KINDS[kind])
    states = []
    for each in (kind, KINDS[kind]):
        torch.manual_seed(4)
        states.append(each(E, H, 20).state_dict())
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    ours = kind(E, H, 20)
    assert isinstance(ours.self_attn, MultiheadAttention)
    assert isinstance(ours, KINDS[kind])


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("enable_nested_tensor", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_in_torchs_encoder_in_eval_mode(
    batch_first: bool, enable_nested_tensor: bool, grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's container makes nested tensors, and torch's layer takes its fast path."""
    layers = pair(batch_first=batch_first)
    theirs, ours = (
        torch.nn.TransformerEncoder(each, 2, enable_nested_tensor=enable_nested_tensor).eval()
        for each in layers
    )
    calls = spied(monkeypatch)
    x = rows(ours.layers[0], S)
    pads = padding()
    given: list[dict[str, Any]] = [
        {},
        {"src_key_padding_mask": pads},
        {"mask": hidden(S, S)},
        {"mask": hidden(S, S), "src_key_padding_mask": pads},
        {"mask": torch.nn.Transformer.generate_square_subsequent_mask(S, dtype=x.dtype)},
    ]
    with torch.set_grad_enabled(grad):
        for call in given:
            found, wanted = ours(x, **call), theirs(x, **call)
            torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)
    kernels = ["by_the_faster"] * len(given)
    if enable_nested_tensor and batch_first and not grad:
        kernels[1] = "attention_varlen"
    assert calls == [name for name in kernels for _ in ours.layers]


def test_in_torchs_decoder() -> None:
    theirs, ours = (torch.nn.TransformerDecoder(each, 2) for each in pair(TransformerDecoderLayer))
    x, memory = drawn(T, B, E), drawn(S, B, E)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(T, dtype=x.dtype)
    wanted = theirs(x, memory, tgt_mask=mask)
    torch.testing.assert_close(ours(x, memory, tgt_mask=mask), wanted, rtol=1e-11, atol=1e-11)
    alone = ours(x, memory, tgt_is_causal=True)
    torch.testing.assert_close(alone, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("norm_first", [False, True])
def test_nested_is_each_sequence_alone(layout: torch.layout, norm_first: bool) -> None:
    _, ours = pair(batch_first=True, norm_first=norm_first)
    parts = [drawn(length, E) for length in (5, 1, 12)]
    nested = torch.nested.nested_tensor(parts, layout=layout)
    out = ours(nested, is_causal=True)
    for row, part in zip(out.unbind(), parts, strict=True):
        torch.testing.assert_close(row, ours(part, is_causal=True))


def test_dropout_is_for_training() -> None:
    _, ours = pair(dropout=0.4)
    x = rows(ours, S)
    assert not torch.equal(ours(x), ours(x))
    ours.eval()
    assert torch.equal(ours(x), ours(x))


def test_hooks_run_in_eval_mode() -> None:
    _, ours = pair(batch_first=True)
    seen: list[str] = []
    ours.self_attn.register_forward_hook(lambda *_: seen.append("self_attn"))
    with torch.no_grad():
        ours.eval()(rows(ours, S))
    assert seen == ["self_attn"]
