"""nn.Attention: the implementations agree, rotary is the textbook's, errors name what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tilewise import masks, scores
from tilewise.errors import InvalidArgument, InvalidType, Unsupported
from tilewise.nn import Attention, Rotary, YarnScaling, rotary

B, S, WIDTH, HEADS = 2, 37, 48, 6
IDS = torch.arange(S) // 9
SLOPES = 2.0 ** -torch.arange(1, HEADS + 1, dtype=torch.float64)
HIDDEN = torch.rand(B, 1, S, S, generator=torch.Generator().manual_seed(5)) < 0.7


def _bias() -> Tensor:
    generator = torch.Generator().manual_seed(6)
    return torch.randn(1, HEADS, S, S, generator=generator, dtype=torch.float64)


def _bias_with_dead_row() -> Tensor:
    bias = _bias()
    bias[:, :, 3] = -torch.inf
    bias[:, :, 5, 7] = -torch.inf
    return bias


Options = Callable[[], dict[str, Any]]
SAID_BY_ALL: dict[str, Options] = {
    "full": dict,
    "causal": lambda: {"mask": masks.causal()},
    "window": lambda: {"mask": masks.window(8, 2)},
    "prefix": lambda: {"mask": masks.prefix(torch.tensor([0, 11]))},
    "lengths": lambda: {"mask": masks.lengths(torch.tensor([37, 20]))},
    "dead batch item": lambda: {"mask": masks.lengths(torch.tensor([0, 5]))},
    "documents": lambda: {"mask": masks.causal() & masks.document(IDS)},
    "not": lambda: {"mask": ~masks.window(4, 4)},
    "boolean": lambda: {"mask": HIDDEN},
    "function": lambda: {"mask": lambda b, h, m, n: (m // 4 + n // 5 + h) % 3 != b},
    "alibi": lambda: {"mask": masks.causal(), "score": scores.alibi(SLOPES)},
    "bias": lambda: {"score": scores.bias(_bias())},
    "bias of -inf": lambda: {"mask": masks.causal(), "score": scores.bias(_bias_with_dead_row())},
    "two scores": lambda: {"score": [scores.alibi(SLOPES), scores.bias(_bias())]},
    "multi-query": lambda: {"kv_heads": 1, "mask": masks.causal()},
    "grouped": lambda: {"kv_heads": 2, "head_dim": 10, "bias": True},
    "rotary": lambda: {"rotary": Rotary(base=500.0, dim=4), "mask": masks.causal()},
    "qk norm": lambda: {"qk_norm": True, "scale": 0.3, "kv_heads": 3},
    "qk norm and rotary": lambda: {"qk_norm": True, "rotary": Rotary(), "kv_heads": 2},
    "gate": lambda: {"gate": True, "bias": True},
}
NOT_BY_SDPA: dict[str, Options] = {
    "softcap": lambda: {"score": scores.softcap(1.5), "mask": masks.causal()},
    "softcap then bias": lambda: {"score": [scores.softcap(2.0), scores.bias(_bias())]},
    "function": lambda: {"score": lambda s, b, h, m, n: s * (1 + h) - ((m - n) % 5) * SLOPES[h]},
    "sinks": lambda: {"sinks": True, "mask": masks.causal()},
    "sinks and dead rows": lambda: {"sinks": True, "mask": masks.lengths(torch.tensor([0, 9]))},
}


def _layer(**options: Any) -> Attention:
    torch.manual_seed(1)
    layer = Attention(WIDTH, HEADS, **options).double()
    if layer.sinks is not None:
        nn.init.normal_(layer.sinks)
    return layer


def _run(layer: Attention, implementation: Any, *inputs: Tensor, **call: Any) -> dict[str, Tensor]:
    """Output and every gradient of a weighted sum of it."""
    layer.implementation = implementation
    layer.zero_grad()
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    out = layer(*leaves, **call)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=out.dtype)
    (out * weights).sum().backward()
    found = {"out": out.detach()}
    found |= {
        f"input {index}": leaf.grad for index, leaf in enumerate(leaves) if leaf.grad is not None
    }
    found |= {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    assert len(found) == 1 + len(inputs) + len(list(layer.parameters()))
    return found


def _assert_agree(layer: Attention, *inputs: Tensor, names: tuple[str, ...], **call: Any) -> None:
    wanted = _run(layer, "plain", *inputs, **call)
    assert all(bool(tensor.isfinite().all()) for tensor in wanted.values())
    for name in names:
        found = _run(layer, name, *inputs, **call)
        assert found.keys() == wanted.keys()
        for key, tensor in wanted.items():
            error = (found[key] - tensor).abs().max().item()
            assert error <= 1e-10 * (1.0 + tensor.abs().max().item()), (
                f"{name}: {key} is off by {error}"
            )


def _x(batch: int = B, length: int = S, width: int = WIDTH) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randn(batch, length, width, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("options", SAID_BY_ALL.values(), ids=SAID_BY_ALL)
def test_three_implementations_agree(options: Options) -> None:
    _assert_agree(_layer(**options()), _x(), names=("sdpa", "tilewise"))


@pytest.mark.parametrize("options", NOT_BY_SDPA.values(), ids=NOT_BY_SDPA)
def test_what_sdpa_cannot_say_raises_and_the_others_agree(options: Options) -> None:
    layer = _layer(**options())
    _assert_agree(layer, _x(), names=("tilewise",))
    layer.implementation = "sdpa"
    with pytest.raises(Unsupported, match=r"(?s)scaled_dot_product_attention.*tilewise"):
        layer(_x())


def test_cross_attention_agrees() -> None:
    layer = _layer(context_width=20, rotary=Rotary(), mask=masks.causal("top_left"))
    call = {"positions": torch.arange(11), "context_positions": torch.arange(29) * 2}
    _assert_agree(layer, _x(2, 11), _x(2, 29, 20), names=("sdpa", "tilewise"), **call)


@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
def test_causal_alignment_is_kept_when_lengths_differ(align: str) -> None:
    layer = _layer(mask=masks.causal(align))
    context = _x(1, 13)
    for implementation in ("plain", "sdpa", "tilewise"):
        layer.implementation = implementation
        before = layer(_x(1, 5), context)
        changed = context.clone()
        changed[:, 9:] += 1.0  # row 0 sees key 0 (top left), or keys 0 to 8 (bottom right)
        after = layer(_x(1, 5), changed)
        same = (before == after).all(dim=-1)[0].tolist()
        assert same == ([True] * 5 if align == "top_left" else [True] + [False] * 4)


def test_call_narrows_the_mask_and_appends_to_the_score() -> None:
    layer = _layer(mask=masks.causal(), score=scores.softcap(3.0))
    lengths, bias = masks.lengths(torch.tensor([30, 8])), scores.bias(_bias())
    both = _layer(mask=masks.causal() & lengths, score=[scores.softcap(3.0), bias])
    for implementation in ("plain", "tilewise"):
        layer.implementation = both.implementation = implementation
        torch.testing.assert_close(layer(_x(), mask=lengths, score=bias), both(_x()))


def test_a_learned_bias_gets_its_gradient() -> None:
    layer = _layer(mask=masks.causal())
    gradients = []
    for implementation in ("plain", "sdpa", "tilewise"):
        layer.implementation = implementation
        bias = _bias().requires_grad_()
        layer(_x(), score=scores.bias(bias)).square().sum().backward()
        assert bias.grad is not None
        gradients.append(bias.grad)
    torch.testing.assert_close(gradients[1], gradients[0])
    torch.testing.assert_close(gradients[2], gradients[0])


def test_state_dict_does_not_depend_on_the_implementation() -> None:
    options: dict[str, Any] = {"sinks": True, "qk_norm": True, "bias": True, "kv_heads": 2}
    plain = Attention(WIDTH, HEADS, implementation="plain", **options)
    fused = Attention(WIDTH, HEADS, implementation="tilewise", **options)
    fused.load_state_dict(plain.state_dict())
    torch.testing.assert_close(fused(_x().float()), plain(_x().float()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", ["plain", "sdpa", "tilewise"])
def test_dropout_is_for_training_only(implementation: Any) -> None:
    layer = _layer(dropout_p=0.5, implementation=implementation)
    x = _x()
    layer.eval()
    exact = layer(x)
    assert torch.equal(layer(x), exact)
    layer.train()
    torch.manual_seed(0)
    draws = torch.stack([layer(x).detach() for _ in range(60)])
    assert not torch.equal(draws[0], draws[1])
    # The kept probabilities are scaled up, so that the mean over draws is the undropped output.
    error = (draws.mean(dim=0) - exact).abs().max()
    assert error < 6 * draws.std(dim=0).max() / 60**0.5


def test_a_gate_multiplies_the_heads_output() -> None:
    layer, ungated = _layer(gate=True), _layer()
    ungated.load_state_dict(layer.state_dict(), strict=False)
    assert layer.gate is not None
    rows: list[Tensor] = []
    ungated.output.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0]))
    ungated(_x())
    gated = rows[0] / (1 + torch.exp(-_x() @ layer.gate.weight.T))
    torch.testing.assert_close(layer(_x()), gated @ layer.output.weight.T)


def test_rotary_is_a_product_of_complex_numbers() -> None:
    x = torch.randn(2, 3, 11, 14, dtype=torch.float64)
    positions = torch.randint(0, 5000, (2, 11))
    dim, base = 10, 750.0
    pairs = torch.complex(x[..., : dim // 2], x[..., dim // 2 : dim])
    frequency = torch.tensor([base ** (-2 * i / dim) for i in range(dim // 2)], dtype=torch.float64)
    angle = positions[:, None, :, None] * frequency
    turned = pairs * torch.polar(torch.ones_like(angle), angle)
    wanted = torch.cat([turned.real, turned.imag, x[..., dim:]], dim=-1)
    torch.testing.assert_close(rotary(x, positions, base=base, dim=dim), wanted)


def test_rotary_of_half_types_is_rotated_in_float32() -> None:
    x = torch.randn(1, 2, 9, 16).bfloat16()
    positions = torch.arange(9) + 1000
    assert torch.equal(rotary(x, positions), rotary(x.float(), positions).bfloat16())


@pytest.mark.parametrize(
    "implementation",
    [*(pytest.param(name, marks=pytest.mark.thorough) for name in ("plain", "sdpa")), "tilewise"],
)
def test_compiles_into_one_graph(implementation: Any) -> None:
    layer = _layer(
        kv_heads=2,
        qk_norm=True,
        rotary=Rotary(scaling=YarnScaling(factor=4.0, original_length=16)),
        mask=masks.causal(),
        implementation=implementation,
    ).float()
    x = _x().float()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))
    compiled(x).sum().backward()
    assert layer.query.weight.grad is not None


@pytest.mark.parametrize("implementation", ["plain", "sdpa", "tilewise"])
def test_autocast_with_qk_norm(implementation: Any) -> None:
    layer = _layer(qk_norm=True, rotary=Rotary(), implementation=implementation).float()
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(_x().float())
    assert out.dtype == torch.bfloat16
    layer.implementation = "plain"
    torch.testing.assert_close(out.float(), layer(_x().float()), rtol=0.05, atol=0.05)


ERRORS: dict[type[Exception], dict[str, Callable[[], object]]] = {
    InvalidArgument: {
        "kv_heads.*4.*divisor": lambda: Attention(48, 6, kv_heads=4),
        "width.*50.*head_dim": lambda: Attention(50, 6),
        "heads.*0": lambda: Attention(48, 0),
        "dropout_p.*1.0": lambda: Attention(48, 6, dropout_p=1.0),
        "implementation.*'flash'.*'plain'": lambda: Attention(48, 6, implementation="flash"),  # type: ignore[arg-type]
        r"x.*\[2, 37, 40\].*48": lambda: _layer()(_x(width=40)),
        r"context.*\[2, 5, 48\].*20": lambda: _layer(context_width=20)(_x(), _x(2, 5)),
        "context_positions.*None": lambda: _layer(rotary=Rotary())(
            _x(), _x(), positions=torch.arange(S)
        ),
        r"positions.*\[5\]": lambda: _layer(rotary=Rotary())(_x(), positions=torch.arange(5)),
        "dim.*5.*even": lambda: _layer(rotary=Rotary(dim=5))(_x()),
        "base.*-1": lambda: _layer(rotary=Rotary(base=-1))(_x()),
        r"^x: got a tensor of torch.int64": lambda: rotary(_x()[None].long(), torch.arange(S)),
        r"^x: got a tensor of torch.complex64": lambda: rotary(
            _x()[None].to(torch.complex64), torch.arange(S)
        ),
        r"^x: got shape \(2, 37, 48\)": lambda: rotary(_x(), torch.arange(S)),
        r"^positions: got a tensor of torch.complex64": lambda: rotary(
            _x()[None], torch.zeros(S, dtype=torch.complex64)
        ),
        "broadcastable": lambda: _layer(
            score=scores.bias(torch.zeros(3, S, S)), implementation="plain"
        )(_x()),
    },
    InvalidType: {
        "heads.*float": lambda: Attention(48, 6.0),  # type: ignore[arg-type]
        "mask": lambda: Attention(48, 6, mask="causal"),  # type: ignore[arg-type]
        r"^positions: got a list": lambda: rotary(_x()[None], [0, 1]),  # type: ignore[arg-type]
    },
}


@pytest.mark.parametrize(
    ("kind", "message"), [(kind, message) for kind, rows in ERRORS.items() for message in rows]
)
def test_errors_name_the_argument(kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        ERRORS[kind][message]()


class Llama(nn.Module):
    """The decoder of `models/random-llama-gqa`, over our attention."""

    def __init__(self, config: dict[str, Any], implementation: Any) -> None:
        super().__init__()
        width, heads = config["hidden_size"], config["num_attention_heads"]
        self.eps = config["rms_norm_eps"]
        self.attention = nn.ModuleList(
            Attention(
                width,
                heads,
                kv_heads=config["num_key_value_heads"],
                head_dim=config["head_dim"],
                rotary=Rotary(base=config["rope_parameters"]["rope_theta"]),
                mask=masks.causal(),
                implementation=implementation,
            )
            for _ in range(config["num_hidden_layers"])
        )

    def forward(self, weights: dict[str, Tensor], ids: Tensor) -> Tensor:
        def norm(x: Tensor, name: str) -> Tensor:
            weight = weights[f"model.{name}.weight"]
            return nn.functional.rms_norm(x, weight.shape, weight, self.eps)

        names = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
        x = weights["model.embed_tokens.weight"][ids]
        for index, layer in enumerate(self.attention):
            at = f"model.layers.{index}"
            for ours, theirs in names.items():
                layer.get_submodule(ours).weight = nn.Parameter(
                    weights[f"{at}.self_attn.{theirs}.weight"]
                )
            x = x + layer(norm(x, f"layers.{index}.input_layernorm"))
            hidden = norm(x, f"layers.{index}.post_attention_layernorm")
            gate, up, down = (
                weights[f"{at}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down")
            )
            x = x + (nn.functional.silu(hidden @ gate.T) * (hidden @ up.T)) @ down.T
        return norm(x, "norm") @ weights["lm_head.weight"].T


@pytest.mark.parametrize("implementation", ["plain", "sdpa", "tilewise"])
def test_a_real_llama_gives_its_reference_logits(shared_data: Path, implementation: str) -> None:
    folder = shared_data / "models" / "random-llama-gqa"
    config = json.loads((folder / "config.json").read_text())
    with np.load(folder / "reference.npz") as reference:
        ids = torch.from_numpy(reference["input_ids"]).long()
        wanted = torch.from_numpy(reference["output"])
    with torch.no_grad():
        weights = {
            name: each.double() for name, each in load_file(folder / "model.safetensors").items()
        }
        logits = Llama(config, implementation)(weights, ids)
    # The reference took its angles in float32, even in its float64 run: 300 radians are 3e-5 off.
    torch.testing.assert_close(logits.float(), wanted, rtol=0.0, atol=1e-4)
    assert wanted.std() > 0.5
