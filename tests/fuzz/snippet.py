"""A case as a script that needs nothing but torch and the library."""

from __future__ import annotations

from tests.fuzz.case import PLAIN, Case, Layout
from tests.fuzz.check import isa_of
from tests.fuzz.memory import strides_of

_HEAD = """import zlib
import torch
import tilewise
import tilewise._core
from tilewise import masks, maximum, minimum, scores, where

def numbers(name, sizes, draw=torch.randn):
    generator = torch.Generator().manual_seed(zlib.crc32(f"{VALUES} {name}".encode()))
    return draw(sizes, generator=generator, dtype=torch.float64)
"""


def _placed(name: str, sizes: tuple[int, ...], layout: Layout) -> list[str]:
    """Lines that move a tensor to where the layout says."""
    if layout == PLAIN or 0 in sizes:
        return []
    strides = strides_of(sizes, layout)
    if layout.expanded:  # several elements in one place: nothing can be copied there
        return []
    return [f"{name} = torch.empty_strided({sizes}, {strides}, dtype={name}.dtype).copy_({name})"]


def snippet(case: Case) -> str:
    """The call of a case in Python, with the same numbers (offsets and gaps left out)."""
    dtype, lines = case.dtype, [_HEAD.replace("{VALUES}", str(case.values))]
    spans = case.sequences
    heads, kv_heads = case.heads, case.kv_heads
    shape: dict[str, tuple[int, ...]]
    if spans is None:
        shape = {"q": (case.batch, heads, case.queries), "k": (case.batch, kv_heads, case.keys)}
    else:
        shape = {"q": (sum(m for m, _ in spans), heads), "k": (sum(n for _, n in spans), kv_heads)}
    sizes = {
        "q": (*shape["q"], case.head_dim),
        "k": (*shape["k"], case.head_dim),
        "v": (*shape["k"], case.value_dim),
        "grad_out": (*shape["q"], case.value_dim),
    }
    for name, layout in zip(sizes, case.layouts, strict=True):
        if name == "grad_out" and not case.differentiated:
            continue
        gain = f" * {case.gain}" if name in "qk" and case.gain != 1 else ""
        lines.append(f"{name} = (numbers({name!r}, {sizes[name]}){gain}).to(torch.{dtype})")
        lines += [
            f"{name} = {name}.narrow({dim}, 0, 1).expand({sizes[name]})"
            for dim in layout.expanded
            if sizes[name][dim]
        ]
        lines += _placed(name, sizes[name], layout)
    narrow = "float64" if dtype == "float64" else "float32"
    if case.sinks:
        lines.append(f"sinks = numbers('sinks', ({heads},)).to(torch.{narrow})")
    for i, table in enumerate(case.tables):
        if i not in case.used():
            continue
        name = f"t{i}"
        drawn = f"numbers({name!r}, {table.sizes}, torch.rand)"
        kind = narrow if table.wide else dtype
        if table.kind == "bool":
            lines.append(f"{name} = {drawn} < 0.6")
        elif table.kind == "int":
            span = table.high + 1 - table.low
            lines.append(f"{name} = torch.floor({table.low} + {span} * {drawn}).long()")
            lines += [f"{name} = {name}.sort(dim=-1).values"] if table.how == "sorted" else []
        else:
            span = table.high - table.low
            lines.append(f"{name} = ({table.low} + {span} * {drawn}).to(torch.{kind})")
            lines += [f"{name}[torch.rand({table.sizes}) < 1 / 3] = -torch.inf"] * (
                table.how == "holes"
            )
        lines += _placed(name, table.sizes, table.layout)
    if case.listed:
        list_heads = 1 if case.lists_shared else kv_heads
        sizes_of_lists = case.batch, list_heads, case.queries, case.listed
        kind, places = ("int64", "int32")[case.values % 2], -(-case.keys // case.list_block)
        lines += [
            f"drawn = torch.Generator().manual_seed(zlib.crc32(b'{case.values} lists'))",
            f"lists = torch.randint(-1, {places}, {sizes_of_lists}, generator=drawn)",
            f"lists = lists.to(torch.{kind})",
        ]
    learned = [*case.grads, *[f"t{i}" for i in sorted(case.used()) if case.tables[i].grad]]
    lines += [f"{name}.requires_grad_()" for name in learned]
    return "\n".join([*lines, *_called(case, learned)]) + "\n"


def _called(case: Case, learned: list[str]) -> list[str]:
    """The lines of the call and of its backward."""
    spans, words = case.sequences, ["q", "k", "v"]
    lines = [f"tilewise._core.set_isa({isa_of(case)!r})", f"torch.set_num_threads({case.threads})"]
    name = "attention"
    if spans is not None:
        name = "attention_varlen"
        for i in (0, 1):
            ends = [sum(pair[i] for pair in spans[:j]) for j in range(len(spans) + 1)]
            lines.append(f"cu{i} = torch.tensor({ends})")
        words += ["cu0", "cu1"]
    if case.page_size:
        lines.append(f"# The case calls attention_paged with pages of {case.page_size} rows.")
    if case.mask is not None:
        words.append(f"mask={case.mask.source()}")
    if case.scores:
        words.append(f"score=[{', '.join(node.source() for node in case.scores)}]")
    if case.listed:
        blocks = f"tilewise.KeyBlocks(lists, {case.list_block})"
        words.append(f"keys={blocks if case.list_block > 1 else 'lists'}")
    words += [f"scale={case.scale}"] if case.scale is not None else []
    words += ["sinks=sinks"] if case.sinks else []
    if case.dropout_p:
        words += [f"dropout_p={case.dropout_p}", f"seed={case.values * 2654435761 % 2**63}"]
    stats = "top1" if case.stats == "top1" else bool(case.stats)
    words += ["return_lse=True", f"return_stats={stats!r}"]
    lines.append(f"result = tilewise.{name}({', '.join(words)})")
    lines.append("print(result)")
    if learned:
        terms = ["(result.out * grad_out).sum()"]
        terms += ["result.lse.sum()  # the case sends random numbers"] * case.lse_grad
        if case.entropy_grad:
            terms.insert(1, "result.stats.entropy.sum()")
        lines.append(f"loss = {' + '.join(terms)}")
        lines.append(f"print(torch.autograd.grad(loss, [{', '.join(learned)}], allow_unused=True))")
    return lines
