"""Attention of inference runtimes: models of one operator, whose tensors are bound and not copied.

All of them run on as many threads as torch has when they are prepared.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from tilelab.peers.methods import added, as_dense
from tilelab.peers.work import Given, Prepared, Work
from tilewise.chips import detect

_ONNX_TYPES = {torch.float32: "FLOAT", torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16"}
_OPSET = 24  # the newest Attention of ONNX


def openvino(work: Work, given: Given) -> Prepared:
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


def onnx_runtime(work: Work, given: Given) -> Prepared:
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


def zentorch(work: Work, given: Given) -> Prepared:
    """Prepare zentorch's sdpa."""
    import_module("zentorch")  # registers it
    causal, (q, k, v, *mask) = _inputs(work, given)
    added_mask = mask[0] if mask else None
    function = torch.ops.zentorch.zentorch_sdpa

    def call() -> Tensor:
        out: Tensor = function(q, k, v, 0.0, causal, attn_mask=added_mask)[0]
        return out

    return Prepared(call)


def zentorch_machine() -> str:
    """Return why zentorch is not for this machine; empty if it is."""
    name = detect().name
    return "" if "AMD" in name.upper() else f"it is for AMD's processors, and this is {name}"


def no_score(work: Work) -> str:
    """Return that the work has a score that is more than a bias; empty if it has none."""
    return "it takes no score function" if work.score and added(work) is None else ""


def not_of_openvino(work: Work) -> str:
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
