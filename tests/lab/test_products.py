"""Training and evaluation multiply 16 bits in float32 where that is faster."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from tests.lab.study.train.toys import trainer_of
from tilelab.models import layers
from tilelab.models.layers import ProductsInFloat32
from tilelab.study.tasks.scores import evaluating

CPU = torch.device("cpu")
NARROW = [torch.bfloat16, torch.float16]


class Watch(TorchDispatchMode):
    """Notes the dtypes of the operands of products."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in layers._PRODUCTS:
            self.seen.update(each.dtype for each in args)
        return func(*args, **(kwargs or {}))


def gradients(layer: nn.Linear, x: Tensor) -> list[Tensor]:
    out = functional.softmax(layer(x) @ x.mT, -1) @ x
    return [out, *torch.autograd.grad(out.float().square().sum(), [x, *layer.parameters()])]


@pytest.mark.parametrize("dtype", NARROW)
def test_results_are_rounded_sums_of_exact_products(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(48, 48, dtype=dtype)
    x = torch.randn(3, 40, 48).to(dtype).requires_grad_()
    wide = nn.Linear(48, 48, dtype=torch.float64)
    wide.load_state_dict({name: each.double() for name, each in layer.state_dict().items()})
    exact = gradients(wide, x.detach().double().requires_grad_())
    with Watch() as watch, ProductsInFloat32():
        ours = gradients(layer, x)
    assert watch.seen == {torch.float32}
    theirs = gradients(layer, x)
    for own, torchs, due in zip(ours, theirs, exact, strict=True):
        assert own.dtype == dtype
        error, allowed = ((each.double() - due).norm() for each in (own, torchs))
        assert error <= 1.1 * allowed


def test_wider_numbers_and_other_operations_are_left_alone() -> None:
    x = torch.randn(5, 5, dtype=torch.float64)
    with Watch() as watch, ProductsInFloat32():
        assert torch.equal(x @ x, torch.mm(x, x))
        assert x.bfloat16().exp().dtype == torch.bfloat16
    assert watch.seen == {torch.float64}


@pytest.mark.parametrize("fast", [True, False])
def test_a_step_and_an_evaluation_take_the_faster_products(
    fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "fast_products", lambda _: fast)
    trainer = trainer_of({"training.precision": "bf16"})
    due = torch.bfloat16 if fast else torch.float32
    with Watch() as watch:
        trainer.step()
    assert due in watch.seen
    assert fast or torch.bfloat16 not in watch.seen
    (inputs,) = trainer._batches(0)[0].inputs
    with Watch() as watch, evaluating(trainer.model, torch.bfloat16):
        trainer.model(inputs)
    assert due in watch.seen
    assert fast or torch.bfloat16 not in watch.seen


def test_float32_and_gpus_have_no_detour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "fast_products", lambda _: False)
    found = [
        type(layers.products(device, dtype)) is ProductsInFloat32
        for device, dtype in (
            (CPU, torch.bfloat16),
            (CPU, torch.float32),
            (torch.device("cuda"), torch.bfloat16),
        )
    ]
    assert found == [True, False, False]
