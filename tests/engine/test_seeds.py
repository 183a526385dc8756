"""The seed of dropout: a number for the core, a tensor that stays on its device for others."""

from __future__ import annotations

import re

import pytest
import torch

from tilewise.engine.seeds import draw_seed, read_seed
from tilewise.errors import InvalidArgument
from tilewise.problem import Problem
from tilewise.reference.philox import keep_mask
from tilewise.validation import dense_problem

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
    got = read_seed(seed, _problem(device="cuda:0"), None, META)
    assert isinstance(got, torch.Tensor)
    assert (got.device, got.dtype, got.shape) == (META, torch.int64, ())
    assert got is not seed


def test_the_core_gets_a_number_from_the_generator_of_the_cpu() -> None:
    torch.manual_seed(2)
    due = int(torch.randint(0, 2**63 - 1, ()))
    torch.manual_seed(2)
    assert read_seed(None, _problem(), None, CPU) == due
    assert read_seed(torch.tensor([-1]), _problem(), None, CPU) == 2**64 - 1
    assert draw_seed(META).device == META


def test_a_tensor_of_the_host_is_refused_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its value would be part of the graph, and every replay would drop the same pairs."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    words = "seed: got a tensor on cpu while a CUDA graph is captured"
    with pytest.raises(InvalidArgument, match=re.escape(words)):
        read_seed(torch.tensor(5), _problem(device="cuda:0"), None, torch.device("cuda:0"))


@pytest.mark.parametrize("seed", [0, 5, 2**64 - 3, -(2**63)])
def test_a_tensor_of_a_seed_drops_what_its_number_drops(seed: int) -> None:
    ranges = {"batches": range(2), "heads": range(3), "queries": range(4), "keys": range(3, 40)}
    signed = torch.tensor(seed - 2**64 if seed >= 2**63 else seed)
    assert torch.equal(keep_mask(signed, 0.3, **ranges), keep_mask(seed, 0.3, **ranges))
    on_device = keep_mask(signed.to(META), 0.3, **ranges)
    assert on_device.device == META
