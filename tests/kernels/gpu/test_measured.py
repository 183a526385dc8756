"""A measured entry in interpreted calls: it changes the pass that it is of, and no other's bits."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tilewise import masks
from tilewise.kernels import gpu
from tilewise.kernels.gpu import Launch, backend
from tilewise.kernels.gpu.config import Blocks, Pass, tiles_for
from tilewise.plan.tuned import Entry, Place, Store, Tuned, installed_triton, write

INTERPRETER = "interpreter"
OUTPUTS = ("out", "lse", "dq", "dk", "dv")
# The kernel of a pass, and the outputs whose bits its blocks decide: the backward passes read the
# row sums that the forward pass leaves.
OF_PASS: dict[Pass, tuple[str, set[str]]] = {
    "forward": ("attend", set(OUTPUTS)),
    "dkdv": ("key_kernel", {"dk", "dv"}),
    "dq": ("query_kernel", {"dq"}),
    "decode": ("attend_split", set(OUTPUTS)),
}


def run(queries: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    q, k, v, sent = (
        torch.randn(1, 2, rows, 24, generator=generator) for rows in (queries, 75, 75, queries)
    )
    leaves = tuple(x.requires_grad_() for x in (q, k, v))
    mask = masks.causal()
    out, lse, _ = tilewise.attention(*leaves, mask=mask, return_lse=True, backend="gpu")
    grads = torch.autograd.grad(out, leaves, sent)
    return dict(zip(OUTPUTS, (out.detach(), lse.detach(), *grads), strict=True))


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, int]]:
    """The sides of the blocks that each kernel was last launched in."""
    found: dict[str, tuple[int, int]] = {}
    real = gpu.run

    def run(launches: Iterable[Launch]) -> list[Any]:
        launches = list(launches)
        for each in launches:
            form = each.constants.get("FORM")
            if form is not None:
                found[each.kernel.__name__] = form.BM, form.BN
        return real(launches)

    monkeypatch.setattr(gpu, "run", run)
    return found


@pytest.mark.parametrize("pass_name", OF_PASS)
def test_one_pass_alone_is_changed(
    pass_name: Pass,
    sides: dict[str, tuple[int, int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "mine.json"
    table = tiles_for(INTERPRETER, pass_name, torch.float32, 24, 24, False)
    place = Place(pass_name, torch.float32, 64, "plain")
    entry = Entry(place, Blocks(16, 16, 4, 1), 1.0, 0.0, table, 2.0, 0.0)
    versions = (torch.__version__, installed_triton())
    write(path, Tuned(INTERPRETER, INTERPRETER, *versions, "2026-11-20", (entry,)))
    outputs, used = [], []
    for named in ("off", str(path)):
        monkeypatch.setenv("TILEWISE_TUNED", named)
        monkeypatch.setattr(backend, "STORE", Store())
        outputs.append(run(3 if pass_name == "decode" else 37))
        used.append(dict(sides))
    kernel, may_change = OF_PASS[pass_name]
    assert len(used[0]) >= 3
    assert used[0][kernel] == (table.queries, table.keys)
    assert used[1] == used[0] | {kernel: (16, 16)}
    before, after = outputs
    for name in OUTPUTS:
        torch.testing.assert_close(after[name], before[name], rtol=1e-5, atol=1e-5)
        if name not in may_change:
            assert torch.equal(before[name], after[name]), name
