"""ring-flash-attention and yunchang over tilewise: their own tests, and their calls by the 2x rule.

They run on four processes of this machine, from the sources that ``bash .ci/run integrations`` puts
in build/. docs/compatibility.md says which tests of theirs pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from tests.compat.flash_reference import Flags, attend, attend_packed
from tests.contract import assert_exact
from tests.distributed.ranks import Ranks
from tests.integrations.ring_peers import OWN, RING, SOURCES, YUNCHANG, Call, Own, own, results

pytestmark = pytest.mark.skipif(
    not all(folder.exists() for folder in SOURCES.values()) or find_spec("einops") is None,
    reason="needs the sources of ring-flash-attn and yunchang, and einops: .ci/run integrations",
)
# What their tests compare differs by what bfloat16 rounds, a unit or two in the last place of the
# largest; an lse is of sums in float32 of what was rounded.
ROUNDED, ROUNDED_LSE = 2 * torch.finfo(torch.bfloat16).eps, 2.0**-12
SILENT = "test_llama3_prepare_cu_seqlens.py"  # it asserts, and compares no attention


@pytest.fixture(name="ranks", scope="module")
def _ranks() -> Iterator[Ranks]:
    found = Ranks()
    yield found
    found.close()


def test_every_test_of_theirs_is_named() -> None:
    for library, folder in SOURCES.items():
        there = {path.name for path in (folder / "test").glob("test_*.py")}
        assert there - {"test_utils.py"} == {test.script for test in OWN if test.library == library}


@pytest.mark.parametrize(
    "test", [test for test in OWN if test.state != "not run"], ids=lambda test: " ".join(test[:3])
)
def test_their_own(ranks: Ranks, test: Own) -> None:
    if test.fails:
        with pytest.raises(AssertionError, match=test.fails):
            ranks.run(own, test)
        return
    for logged in ranks.run(own, test):
        largest, compared = {"out": 0.0, "lse": 0.0, "d": 0.0}, set()
        for message, size in logged:
            kind = next(kind for kind in ("lse", "out", "d") if kind in message)
            if "diff" not in message:
                largest[kind] = max(size, largest[kind])
                continue
            compared.add(kind)
            bound = ROUNDED_LSE if kind == "lse" else ROUNDED * largest[kind]
            assert size <= bound, (message, size, bound)
        assert compared >= {"out", "d"} or test.script == SILENT


PLAIN, WINDOW = Flags(softmax_scale=0.3), Flags(causal=True, window_size=(9, 0))
CAPPED, LENGTHS, UNEVEN = Flags(causal=True, softcap=2.0), (16, 48, 8), (5, 40, 27)
CALLS = (
    Call(RING, "ring"),
    Call(RING, "ring", PLAIN),
    Call(RING, "zigzag"),
    Call(RING, "stripe"),
    Call(RING, "ring", lengths=LENGTHS),
    Call(RING, "ring", PLAIN, LENGTHS),
    Call(RING, "zigzag", lengths=LENGTHS),
    Call(RING, "llama3", lengths=UNEVEN),
    Call(RING, "llama3", PLAIN, UNEVEN),
    Call(RING, "llama3", WINDOW, UNEVEN),
    Call(YUNCHANG, "ring", CAPPED),
    Call(YUNCHANG, "ring", PLAIN),
    Call(YUNCHANG, "zigzag", CAPPED),
    Call(YUNCHANG, "stripe", CAPPED),
    Call(YUNCHANG, "ulysses", CAPPED),
    Call(YUNCHANG, "ulysses", WINDOW),
)


def whole(ranks: Ranks, call: Call, dtype: torch.dtype, backward: bool) -> dict[str, Tensor]:
    """The results of all ranks, put together."""
    found: dict[str, Tensor] = {}
    for rows, parts in ranks.run(results, call, dtype, backward):
        for name, part in parts.items():
            along = -1 if name == "lse" else 0 if call.lengths else 1
            shape = list(part.shape)
            shape[along] = call.starts[-1]
            found.setdefault(name, part.new_full(shape, torch.nan)).index_copy_(along, rows, part)
    return found


def dense(call: Call, dtype: torch.dtype, kind: torch.dtype) -> dict[str, Tensor]:
    """The same by the formula, computed in another dtype."""
    q, k, v, dout = (x.to(kind).requires_grad_() for x in call.operands(dtype))
    if call.lengths:
        lengths = [(length, length) for length in call.lengths]
        out, lse = attend_packed(q, k, v, lengths, call.flags, None, kind)
    else:
        out, lse, _ = attend(q, k, v, call.flags, None, kind)
    grads = torch.autograd.grad(out, (q, k, v), dout.detach())
    return {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("call", CALLS, ids=Call.title)
def test_the_2x_rule(ranks: Ranks, call: Call, dtype: torch.dtype) -> None:
    plain, oracle = dense(call, dtype, dtype), dense(call, dtype, torch.float64)
    backward = not (call.adds_in_place and dtype == torch.float32)
    got = whole(ranks, call, dtype, backward)
    assert ("dq" in got) == backward
    assert ("lse" in got) == (call.library == RING)
    for name, tensor in got.items():
        near = plain[name]
        if name == "dq" and call.way == "ring":  # they round it to bfloat16, whatever q has
            near, tensor = near.bfloat16(), tensor.bfloat16()
        assert_exact(tensor, near, oracle[name], name)


@pytest.mark.parametrize("call", [each for each in CALLS if each.adds_in_place], ids=Call.title)
def test_gradients_that_a_ring_would_spoil_are_refused(ranks: Ranks, call: Call) -> None:
    """No message may be left on its way: yunchang has a group for each call."""
    count = 1 if call.library == RING else 0
    with pytest.raises(AssertionError, match=rf"Unsupported: float32 in a ring of {call.library}"):
        ranks.run(results, call, torch.float32, count=count)
