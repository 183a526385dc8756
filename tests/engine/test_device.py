"""What stays on its device, unread on the way to a kernel: lengths, captured tensors, seeds."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise import masks, scores
from tilewise.engine.call import build_operands, build_problem, read_keywords
from tilewise.engine.seeds import draw_seed, read_seed
from tilewise.errors import InvalidArgument, TilewiseError
from tilewise.problem import Operands, Problem
from tilewise.reference.philox import keep_mask
from tilewise.validation import dense_problem
from tilewise.variants.checked import checked


def _packed(device: str, dtype: torch.dtype = torch.int32) -> tuple[Tensor, ...]:
    q, k, v = (torch.empty(9, 2, 4, device=device) for _ in range(3))
    cu = torch.tensor([0, 4, 9], dtype=dtype).to(device)
    return q, k, v, cu


def _operands(device: str, **keywords: Any) -> Operands:
    q, k, v, cu = _packed(device)
    mask = masks.document(torch.zeros(2, 5, dtype=torch.int64, device=device)) & masks.lengths(
        torch.tensor([1, 2]).to(device)
    )
    score = scores.bias(torch.zeros(5, 5, device=device))
    backend = keywords.get("backend")
    read = read_keywords(mask, score, None, 0.0, None, backend, (cu, cu))
    return build_operands(build_problem(q, k, v, read), q, k, v, read, None)


def test_cu_seqlens_of_a_device_stay_there_unread() -> None:
    """Meta tensors have no values: reading one would fail."""
    operands = _operands("meta")
    for cu in (operands.cu_seqlens_q, operands.cu_seqlens_k):
        assert cu is not None
        assert (cu.device.type, cu.dtype, cu.shape) == ("meta", torch.int64, (3,))
    assert [tensor.device.type for tensor in operands.mask_tensors] == ["meta"] * 3


def test_the_reference_reads_them() -> None:
    """It needs them on the CPU, wherever the tensors are."""
    with pytest.raises((RuntimeError, NotImplementedError)):
        _operands("meta", backend="tiled")


def test_checked_mode_reads_them() -> None:
    """What is asked for is done: cu_seqlens that are wrong are named."""
    with checked(), pytest.raises((RuntimeError, NotImplementedError)):
        _operands("meta")


def test_on_the_cpu_they_are_checked_as_ever() -> None:
    """A wrong end is an error."""
    q, k, v, cu = _packed("cpu")
    read = read_keywords(None, None, None, 0.0, None, "gpu", (cu, cu - 1))
    problem = build_problem(q, k, v, read)
    with pytest.raises(InvalidArgument, match="cu_seqlens_k"):
        build_operands(problem, q, k, v, read, None)
    assert issubclass(InvalidArgument, TilewiseError)


META, CPU = torch.device("meta"), torch.device("cpu")


def _problem(**changed: object) -> Problem:
    q = torch.empty(1, 2, 8, 64)
    problem = dense_problem(q, q, q, mask=(), score=(), scale=None, dropout_p=0.5, sinks=None)
    return problem._replace(**changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "seed", [None, 5, 2**64 - 1, torch.empty((), dtype=torch.int64, device=META)]
)
def test_a_device_keeps_its_seed(seed: int | torch.Tensor | None) -> None:
    """A meta tensor raises where its value is read."""
    got = read_seed(seed, _problem(device="cuda:0"), META, on_device=True)
    assert isinstance(got, torch.Tensor)
    assert (got.device, got.dtype, got.shape) == (META, torch.int64, ())
    assert got is not seed


def test_the_core_gets_a_number_from_the_generator_of_the_cpu() -> None:
    torch.manual_seed(2)
    due = int(torch.randint(0, 2**63 - 1, ()))
    torch.manual_seed(2)
    assert read_seed(None, _problem(), CPU, on_device=False) == due
    assert read_seed(torch.tensor([-1]), _problem(), CPU, on_device=False) == 2**64 - 1
    assert draw_seed(META).device == META


def test_a_tensor_of_the_host_is_refused_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its value would be part of the graph, and every replay would drop the same pairs."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    words = "seed: got a tensor on cpu while a CUDA graph is captured"
    with pytest.raises(InvalidArgument, match=re.escape(words)):
        read_seed(
            torch.tensor(5), _problem(device="cuda:0"), torch.device("cuda:0"), on_device=True
        )


@pytest.mark.parametrize("seed", [0, 5, 2**64 - 3, -(2**63)])
def test_a_tensor_of_a_seed_drops_what_its_number_drops(seed: int) -> None:
    ranges = {"batches": range(2), "heads": range(3), "queries": range(4), "keys": range(3, 40)}
    signed = torch.tensor(seed - 2**64 if seed >= 2**63 else seed)
    assert torch.equal(keep_mask(signed, 0.3, **ranges), keep_mask(seed, 0.3, **ranges))
    on_device = keep_mask(signed.to(META), 0.3, **ranges)
    assert on_device.device == META
