"""Unmodified models train with their sequence split, and every row has what one process gives it.

Protects ``context_parallel``: layers of ``nn.Attention``, models of torch's own function, models of
transformers; DDP and FSDP2 beside it; what the block does to its buffers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import tilewise
from tests.distributed.calls import NAMES, WAYS, Way
from tests.distributed.ranks import Ranks
from tests.variants.calls import Call, Sizes
from tilewise import masks
from tilewise.distributed import (
    context_parallel,
    context_parallel_attention,
    shard,
    unshard,
)
from tilewise.errors import InvalidArgument, Unsupported

ROWS, WIDTH = 30, 16


class Layers(nn.Module):
    """Two layers, one of tilewise and one of torch, over positions that are learned."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.places = nn.Embedding(ROWS, WIDTH)
        self.first = tilewise.nn.Attention(WIDTH, 4, kv_heads=2, mask=masks.causal(), sinks=True)
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.double()

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.places(positions)
        x = x + self.first(x)
        q, k, v = self.project(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + out.transpose(1, 2).flatten(2)


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.arange(ROWS)


def layers(group: dist.ProcessGroup, way: Way, compiled: bool) -> dict[str, Tensor]:
    """The outputs of all rows, and gradients added up over the processes.

    torch.compile leaves attention between its graphs.
    """
    model, (x, positions) = Layers(), inputs()
    run = torch.compile(model, backend="aot_eager") if compiled else model
    before, mesh = x.clone(), way.mesh(group)
    shared = context_parallel(
        mesh, buffers=[x, positions], buffer_seq_dims=[1, 0], schedule=way.schedule
    )
    with tilewise.sdpa(), shared:
        assert x.shape[1] < ROWS
        out = run(x, positions)
        out.square().sum().backward()
        found = {"out": unshard(out.detach(), mesh, 1, way.schedule, length=ROWS)}
    assert torch.equal(x, before)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=group)
        found[name] = parameter.grad
    return found


@pytest.mark.parametrize(
    ("way", "compiled", "count"), [*((way, False, 0) for way in WAYS), ("zigzag", True, 2)]
)
def test_layers(ranks: Ranks, way: str, compiled: bool, count: int) -> None:
    model = Layers()
    with tilewise.sdpa():
        out = model(*inputs())
    out.square().sum().backward()
    for found in ranks.run(layers, WAYS[way], compiled, count=count):
        torch.testing.assert_close(found.pop("out"), out.detach())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, msg=name)


def language_model(kind: str) -> Any:
    import transformers

    from tilewise.integrations import transformers as hook

    hook.register()
    torch.manual_seed(0)
    common = {"vocab_size": 50, "attn_implementation": "tilewise"}
    if kind == "gpt2":
        config: Any = transformers.GPT2Config(
            n_layer=2, n_head=4, n_embd=32, n_positions=64, attn_pdrop=0.0, resid_pdrop=0.0,
            embd_pdrop=0.0, **common,
        )  # fmt: skip
    else:
        config = transformers.LlamaConfig(
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=32,
            intermediate_size=48, **common,
        )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).double()


def tokens() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(50, (2, ROWS), generator=generator), torch.arange(ROWS)[None]


def of_transformers(group: dist.ProcessGroup, kind: str) -> dict[str, Tensor]:
    """Logits of all rows, and gradients added up over the processes."""
    model, (ids, positions) = language_model(kind), tokens()
    with context_parallel(group, buffers=[ids, positions], buffer_seq_dims=[1, 1]):
        if dist.get_rank(group) == 0:  # the rows of the other one are neighbours
            with pytest.raises(Unsupported, match="not consecutive"):
                model(input_ids=ids, position_ids=positions, use_cache=False)
        with pytest.raises(Unsupported, match="padding"):
            model(input_ids=ids, position_ids=positions, attention_mask=torch.zeros_like(ids))
        logits = model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=torch.ones_like(ids),
            use_cache=False,
        ).logits
        logits.square().sum().backward()
        found = {"logits": unshard(logits.detach(), group, 1, length=ROWS)}
    for name, parameter in model.named_parameters():
        dist.all_reduce(parameter.grad, group=group)
        found[name] = parameter.grad
    return found


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_models_of_transformers(ranks: Ranks, kind: str) -> None:
    pytest.importorskip("transformers")
    model, (ids, positions) = language_model(kind), tokens()
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    logits.square().sum().backward()
    for found in ranks.run(of_transformers, kind, count=2):
        torch.testing.assert_close(found["logits"], logits.detach())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, msg=name)


def block(group: dist.ProcessGroup) -> None:
    """What the block refuses, and what it leaves behind."""
    x = torch.arange(12.0)[None]
    q = torch.ones(1, 2, 6, 4)
    with pytest.raises(InvalidArgument, match="buffer_seq_dims"):
        context_parallel(group, buffers=[x]).__enter__()
    with pytest.raises(InvalidArgument, match="gradient"):
        context_parallel(
            group, buffers=[x.clone().requires_grad_()], buffer_seq_dims=[1]
        ).__enter__()
    with pytest.raises(InvalidArgument, match="no_restore_buffers"):
        context_parallel(group, no_restore_buffers=[x]).__enter__()
    stays = x.clone()
    with (
        context_parallel(
            group, buffers=[x, stays], buffer_seq_dims=[1, 1], no_restore_buffers=[stays]
        ),
        pytest.raises(Unsupported, match="return_stats"),
    ):
        tilewise.routes.attention(q, q, q, return_stats=True)
    assert x.shape == (1, 12)
    assert stays.shape == (1, 6)
    assert not tilewise.routes.elsewhere()
    stays = x.clone()
    with torch.inference_mode():
        fixed = x.clone()
    both: Any = {"buffers": [x, stays, fixed], "buffer_seq_dims": [1, 1, 1]}
    with pytest.raises(RuntimeError, match="inference tensor"):
        context_parallel(group, **both, no_restore_buffers=[stays]).__enter__()
    assert x.shape == stays.shape == (1, 12)


def test_the_block(ranks: Ranks) -> None:
    ranks.run(block, count=2)


def sharded(group: dist.ProcessGroup, name: str, rings: int) -> None:
    """DTensors give what plain tensors give, with their placements."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    call = Call(NAMES[name], torch.float64, Sizes(queries=24, keys=24))
    mesh = WAYS["zigzag-ulysses"]._replace(rings=rings).mesh(group)
    if not rings:
        mesh = DeviceMesh("cpu", list(range(dist.get_world_size(group))))
    spread = [Shard(2)] * mesh.ndim
    leaves = {
        each: DTensor.from_local(
            shard(leaf.detach(), mesh, 2, "ring"), mesh, spread, run_check=False
        ).requires_grad_()
        for each, leaf in call.leaves.items()
        if each in "qkv"
    }
    keywords = call.formula
    if "sinks" in call.leaves:
        leaves["sinks"] = DTensor.from_local(
            call.leaves["sinks"].detach(), mesh, [Replicate()] * mesh.ndim, run_check=False
        ).requires_grad_()
        keywords["sinks"] = leaves["sinks"]
    out, lse, _ = context_parallel_attention(
        leaves["q"], leaves["k"], leaves["v"], schedule="ring", return_lse=True, **keywords
    )
    assert list(out.placements) == list(lse.placements) == spread
    incoming = [shard(x, mesh, 2, "ring") for x in (call.grad_out, call.grad_lse)]
    local = out.to_local(), lse.to_local()
    grads = torch.autograd.grad(local, list(leaves.values()), incoming)
    expected = call.plain()
    whole = unshard(local[0].detach(), mesh, 2, "ring", length=24)
    torch.testing.assert_close(whole, expected["out"])
    for each, grad in zip(leaves, grads, strict=True):
        assert isinstance(grad, DTensor)
        torch.testing.assert_close(grad.full_tensor(), expected[each], msg=each)
    with pytest.raises(InvalidArgument, match="schedule: got 'zigzag'; required: 'ring'"):
        context_parallel_attention(leaves["q"], leaves["k"], leaves["v"])
    with pytest.raises(InvalidArgument, match="k: got a plain tensor"):
        context_parallel_attention(leaves["q"], call.leaves["k"], leaves["v"])
    odd = DTensor.from_local(call.leaves["k"], mesh, [Replicate()] * mesh.ndim, run_check=False)
    with pytest.raises(InvalidArgument, match=r"k: got .*Replicate"):
        context_parallel_attention(leaves["q"], odd, leaves["v"])


@pytest.mark.parametrize("rings", [0, 2])
@pytest.mark.parametrize("name", ["causal", "sinks"])
def test_dtensors(ranks: Ranks, name: str, rings: int) -> None:
    ranks.run(sharded, name, rings)


def beside(group: dist.ProcessGroup, strategy: str) -> dict[str, Tensor]:
    """Gradients of two batch items over two processes each, by DDP or FSDP2 over all four."""
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("data", "context"))
    model, (x, positions) = Layers(), inputs()
    item = mesh.get_local_rank("data")
    buffers = [x[item : item + 1].clone(), positions]
    run: Any = model
    if strategy == "ddp":
        run = nn.parallel.DistributedDataParallel(model, process_group=group)
    else:
        fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    shared = context_parallel(mesh["context"], buffers=buffers, buffer_seq_dims=[1, 0])
    with tilewise.sdpa(), shared:
        run(*buffers).square().sum().backward()
    found = {}
    for name, parameter in model.named_parameters():
        grad: Any = parameter.grad
        found[name] = 4 * (grad.full_tensor() if strategy == "fsdp" else grad)
    return found


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_beside_parallel_data(ranks: Ranks, strategy: str) -> None:
    """Both take the mean over all processes, and gradients of rows are to be added up."""
    model = Layers()
    with tilewise.sdpa():
        model(*inputs()).square().sum().backward()
    for found in ranks.run(beside, strategy):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, msg=name)
