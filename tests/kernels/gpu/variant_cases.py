"""Both passes of some variants of the catalogue, as cases of the gate."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.variants_catalogue import CATALOGUE, Call, Variant
from tilelab.gate.cases import backward_tensors
from tilelab.gate.record import Case
from tilewise.inspect import gpu
from tilewise.kernels.gpu import Launch

NAMES = ("prefix", "documents", "layout", "alibi", "softcap", "power", "sawtooth", "everything")


def _passes(variant: Variant) -> Callable[[str], list[Launch]]:
    def launches(family: str) -> list[Launch]:
        problem, operands = Call(variant, torch.float32).asked()
        result = gpu.empty_result(problem, operands.q, "")
        grad_out, needs, grads = backward_tensors(problem, operands)
        given = problem, operands, result
        return [
            *gpu.forward_launches(*given, family, ()),
            *gpu.backward_launches(*given, (grad_out, None), needs, grads, family, ()),
        ]

    return launches


CASES = [Case(each.name, _passes(each)) for each in CATALOGUE if each.name in NAMES]
