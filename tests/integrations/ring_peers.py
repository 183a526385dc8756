"""ring-flash-attention and yunchang over tilewise: what a rank of their tests and of ours runs.

Both split a sequence among processes and call flash-attn's passes on blocks. Here they find
tilewise under that name, gloo instead of NCCL, and tensors on the CPU. They themselves are as they
were published. Their tests are changed where they name a GPU (``_as_on_a_cpu``).
"""

from __future__ import annotations

import io
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from tests.compat.flash_reference import Flags
from tests.conftest import ROOT
from tilewise import compat

RING, YUNCHANG = "ring_flash_attn", "yunchang"
SOURCES = {name: ROOT / "build" / "integrations" / f"{name}-source" for name in (RING, YUNCHANG)}
ULYSSES = 2  # processes that exchange heads in yunchang's calls, of COUNT


class Own(NamedTuple):
    """One of their tests: a script, its arguments, and what docs/compatibility.md says of it."""

    library: str
    script: str
    arguments: str = ""
    state: str = "passes"
    note: str = ""
    fails: str = ""  # the error that it ends with

    def row(self) -> str:
        """Return its row on the page."""
        command = f"{self.script} {self.arguments}".rstrip()
        return f"| {self.library.replace('_', '-')} | `{command}` | {self.state} | {self.note} |"


_HYBRID = "--sp_ulysses_degree 2 --attn_impl fa --use_bwd"
OWN = (
    Own(RING, "test_ring_flash_attn_func.py"),
    Own(RING, "test_ring_flash_attn_varlen_func.py"),
    Own(RING, "test_zigzag_ring_flash_attn_func.py"),
    Own(RING, "test_zigzag_ring_flash_attn_varlen_func.py"),
    Own(RING, "test_stripe_flash_attn_func.py"),
    Own(RING, "test_llama3_flash_attn_varlen_func.py"),
    Own(RING, "test_llama3_prepare_cu_seqlens.py"),
    Own(RING, "test_triton_kernels.py", "", "not run", "its own Triton kernels, which need a GPU"),
    Own(YUNCHANG, "test_ulysses_attn.py"),
    Own(YUNCHANG, "test_hybrid_attn.py", f"{_HYBRID} --ring_impl_type zigzag --causal"),
    Own(YUNCHANG, "test_hybrid_attn.py", f"{_HYBRID} --ring_impl_type basic --causal"),
    Own(YUNCHANG, "test_hybrid_attn.py", f"{_HYBRID} --ring_impl_type basic"),
    Own(YUNCHANG, "test_hybrid_qkvpacked_attn.py", "zigzag", note="one of the schedules it tries"),
    Own(
        *(YUNCHANG, "test_hybrid_qkvpacked_attn.py", "basic", "fails"),
        "in yunchang, with any attention: its call leaves out the argument `attn_processor`",
        "missing 1 required positional argument: 'attn_processor'",
    ),
    Own(YUNCHANG, "test_hybrid_attn_npu.py", "", "not run", "needs Ascend's NPU"),
    Own(YUNCHANG, "test_ulysses_attn_npu.py", "", "not run", "needs Ascend's NPU"),
)


class Logged(NamedTuple):
    """What a test of theirs says of a tensor: its largest absolute value."""

    message: str
    largest: float


def own(group: dist.ProcessGroup, test: Own) -> list[Logged]:
    """Run one of their tests on this rank, and return what it says."""
    found: list[Logged] = []

    def log(message: str, tensor: Tensor, rank0_only: bool = False) -> None:
        found.append(Logged(message, float(tensor.detach().abs().max())))

    script = SOURCES[test.library] / "test" / test.script
    utils = ModuleType("utils")  # beside ring-flash-attention's tests, but not in its archive
    utils.__dict__.update(log=log, set_seed=torch.manual_seed)
    sys.modules[utils.__name__] = utils
    with (
        _libraries(script.parent),
        mock.patch.dict(os.environ, LOCAL_RANK=str(dist.get_rank(group))),
        mock.patch.object(sys, "argv", [script.name, *test.arguments.split()]),
        mock.patch.object(torch.cuda, "max_memory_allocated", return_value=0),
        mock.patch.object(torch.cuda, "reset_peak_memory_stats"),
        redirect_stdout(io.StringIO()),
    ):
        code = compile(_as_on_a_cpu(script.read_text(), test), str(script), "exec")
        exec(code, {"__name__": "__main__", "log": log})
    return found


def _as_on_a_cpu(text: str, test: Own) -> str:
    """Return a test with CPUs in the place of GPUs, in the process group that there is.

    Its ``log``, which prints, gives way to ours; a loop over schedules, to the one in question.
    """
    text = text.replace('dist.init_process_group("nccl")', "pass")
    text = text.replace("dist.destroy_process_group()", "pass")
    text = re.sub(r'torch\.device\(f?"cuda[^"]*"\)', 'torch.device("cpu")', text)
    text = text.replace('["basic", "zigzag"]:', f'["{test.arguments}"]:')
    return text.replace("def log(", "def _printed(")


@contextmanager
def _libraries(*folders: Path) -> Iterator[None]:
    """Within the block their modules are found, with tilewise in the place of flash-attn."""
    compat.install("flash_attn")
    # ring-flash-attention imports it with itself, and it needs a transformers like 4.53.
    adapters = ModuleType("ring_flash_attn.adapters")
    adapters.__dict__.update(substitute_hf_flash_attn=None, update_ring_flash_attn_params=None)
    sys.modules.setdefault(adapters.__name__, adapters)
    paths = [str(each) for each in (*folders, *SOURCES.values())]
    with mock.patch.object(sys, "path", [*paths, *sys.path]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that torch has newer ones for
        yield


class Call(NamedTuple):
    """A call of theirs: who has which rows, and the flags."""

    library: str
    way: str
    flags: Flags = Flags(causal=True, softmax_scale=0.3)
    lengths: tuple[int, ...] = ()  # of packed sequences; none for a batch of whole ones

    @property
    def adds_in_place(self) -> bool:
        """Return whether they add up float32 gradients where the next block writes its own."""
        return self.way not in ("llama3", "ulysses")

    def title(self) -> str:
        """Return what it is in a few words."""
        flags = (f"{name}={value}" for name, value in self.flags._asdict().items() if value)
        return " ".join((self.library, self.way, "packed" if self.lengths else "dense", *flags))

    @property
    def starts(self) -> list[int]:
        """Return where sequences start, and the end of the last."""
        lengths = self.lengths or (64,)
        return [sum(lengths[:i]) for i in range(len(lengths) + 1)]

    def operands(self, dtype: torch.dtype) -> list[Tensor]:
        """Return q, k, v and the gradient of the output, [B, S, H, D] or [T, H, D]."""
        torch.manual_seed(7)
        shape = (self.starts[-1],) if self.lengths else (2, self.starts[-1])
        return [torch.randn(*shape, heads, 16, dtype=dtype) for heads in (8, 4, 4, 8)]

    def rows_of(self, rank: int, world: int) -> Tensor:
        """Return the rows that a rank holds, in its order."""
        share, inner = 0, 1
        if self.library == YUNCHANG:
            inner = world if self.way == "ulysses" else ULYSSES
            rank, share, world = rank // inner, rank % inner, world // inner
        starts = [0, self.starts[-1]] if self.way == "llama3" else self.starts
        found = []
        for first, last in pairwise(starts):
            rows = torch.arange(first, last)
            if self.way == "stripe":
                found.append(rows[rank::world])
            elif self.way == "zigzag":
                pieces = rows.chunk(2 * world)
                found += [pieces[rank], pieces[-1 - rank]]
            else:
                found.append(rows.chunk(world)[rank])
        return torch.cat(found).chunk(inner)[share]


def results(
    group: dist.ProcessGroup, call: Call, dtype: torch.dtype, backward: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return this rank's rows; and of them out, lse if it comes with it, and the gradients."""
    rows = call.rows_of(dist.get_rank(group), dist.get_world_size(group))
    along = 0 if call.lengths else 1
    *leaves, dout = (x.index_select(along, rows) for x in call.operands(dtype))
    for leaf in leaves:
        leaf.requires_grad_()
    with _libraries():
        make = _of_yunchang if call.library == YUNCHANG else _of_ring_flash_attn
        out, lse = make(call, group, leaves)
        found = {"out": out.detach()} if lse is None else {"out": out.detach(), "lse": lse.detach()}
        if backward:
            grads = torch.autograd.grad(out, leaves, dout)
            found |= zip(("dq", "dk", "dv"), grads, strict=True)
    return rows, found


_NAMES = {"ring": "ring", "zigzag": "zigzag_ring", "stripe": "stripe", "llama3": "llama3"}


def _of_ring_flash_attn(
    call: Call, group: dist.ProcessGroup, leaves: Sequence[Tensor]
) -> tuple[Tensor, Tensor | None]:
    theirs: Any = import_module(RING)
    name = f"{_NAMES[call.way]}_flash_attn_{'varlen_' if call.lengths else ''}func"
    said: dict[str, Any] = call.flags._asdict()
    del said["softcap"], said["alibi"]  # it has neither
    packing: tuple[Any, ...] = ()
    if call.lengths:
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        starts = torch.tensor(call.starts, dtype=torch.int32)
        packing = (starts // world, max(call.lengths) // world)
        if call.way == "llama3":
            prepare = theirs.llama3_flash_attn_prepare_cu_seqlens
            *packing, keys = prepare(starts, said["causal"], rank, world)
            said |= {"heads_k_stride": 1, "local_k_slice": keys}
    found = getattr(theirs, name)(*leaves, *packing, **said, return_attn_probs=True, group=group)
    return found[0], found[1]


def _of_yunchang(
    call: Call, group: dist.ProcessGroup, leaves: Sequence[Tensor]
) -> tuple[Tensor, Tensor | None]:
    theirs: Any = import_module(YUNCHANG)
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    said: dict[str, Any] = call.flags._asdict()
    del said["alibi"]  # a ring refuses it
    if call.way == "ulysses":
        layer = theirs.UlyssesAttention(group)
    else:
        theirs.set_seq_parallel_pg(ULYSSES, world // ULYSSES, rank, world)
        kind = {"ring": "basic", "zigzag": "zigzag", "stripe": "strip"}[call.way]
        layer = theirs.LongContextAttention(ring_impl_type=kind)
    return layer(*leaves, **said), None
