"""Keys in pages by the reference: what it gives, what it refuses, and what traces see of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import tilewise
from tests.cases import Case, Inputs, build
from tests.contract import assert_same_bits
from tests.extended import extended
from tests.paged import Paged, in_pages, sequences_of
from tests.plain import attend
from tilelab.cases.dense import dense
from tilewise import BlockMask, masks, scores
from tilewise.errors import InvalidArgument, InvalidType, Unsupported
from tilewise.problem import START, Operands
from tilewise.reference import tiled
from tilewise.validation import check_page_tensors, paged_problem
from tilewise.variants.float8 import FLOAT8

ours = "ignore:`torch.jit"  # torch's own, inside torch.compile
pytestmark = pytest.mark.filterwarnings(ours)

LENGTHS = ((33, 20), (0, 5), (1, 40), (17, 0), (16, 16), (2, 133))
EQUAL = tuple((7, keys) for keys in (20, 0, 133, 1))
GQA: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 8, "value_dim": 5}
CASES = [
    Case("plain", **GQA, sequences=LENGTHS),
    Case("causal", **GQA, sequences=LENGTHS, mask=("causal",), sinks=True),
    Case("all", **GQA, sequences=LENGTHS, mask=("lengths", "window", "and"), score=("softcap",)),
    Case("document", **GQA, sequences=LENGTHS, mask=("document_each",), score=("alibi_each",)),
    Case("bias", **GQA, sequences=LENGTHS, mask=("bool",), score=("bias", "bias_keys")),
    Case("equal", **GQA, sequences=EQUAL, mask=("causal",), score=("bias_heads",), sinks=True),
    Case("none", **GQA, sequences=()),
]


def paged_of(inputs: Inputs, page_size: int, **keywords: Any) -> Paged:
    """The keys and values of packed inputs in pages."""
    keys, values = sequences_of(inputs)
    if keys:
        return in_pages(keys, values, page_size, **keywords)
    k, v = (x.new_empty(3, x.shape[1], page_size, x.shape[2]) for x in (inputs.k, inputs.v))
    empty = torch.empty(0, 4, dtype=torch.int32)
    return Paged(k, v, empty, empty[:, 0])


def keywords_of(inputs: Inputs) -> dict[str, Any]:
    """The keywords of ``attention_paged`` that the inputs have."""
    names = ("mask", "score", "sinks", "scale")
    return {name: inputs.keywords()[name] for name in names}


@pytest.mark.parametrize("packed", [False, True])
def test_the_oracles_read_pages_too(packed: bool) -> None:
    """Plain attention in float64 and beyond it."""
    keys, values = ([torch.randn(2, n, 8).double() for n in (20, 0, 7)] for _ in range(2))
    paged = in_pages(keys, values, 4)
    q = torch.randn(3, 2, 5, 8).double()
    q, cu = (q.transpose(1, 2).flatten(0, 1), 5 * torch.arange(4)) if packed else (q, None)
    none: dict[str, Any] = {"mask": (), "score": (), "scale": None, "sinks": None}
    problem = paged_problem(q, *paged, cu, **none)
    operands = Operands(q, *paged[:2], (), (), None, cu, None, 0, START, *paged[2:])
    expected = tiled.forward(problem, operands, "top1")
    plain, wide = dense(problem, operands), extended(problem, operands)
    for name in ("out", "lse", "max_logit", "entropy", "top_key"):
        torch.testing.assert_close(getattr(plain, name), getattr(expected, name), msg=name)
        if name != "top_key":
            found = torch.from_numpy(getattr(wide, name).astype("float64"))
            torch.testing.assert_close(found, getattr(expected, name), msg=name)


def small(seed: int = 0, **changes: Any) -> dict[str, Any]:
    """Two sequences of 5 and 9 keys in pages of 4, three queries each."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = ([torch.randn(2, n, 8, generator=generator) for n in (5, 9)] for _ in range(2))
    paged = in_pages(keys, values, 4)
    given: dict[str, Any] = {"q": torch.randn(2, 4, 3, 8, generator=generator)}
    return {**given, **paged._asdict(), "backend": "tiled", **changes}


def test_captured_functions_count_within_sequences() -> None:
    """b, n and N of a user's mask and score are the sequence's own."""
    table = torch.randn(2, 4)
    given = small(
        mask=lambda b, h, m, n: n % 2 == b % 2,
        score=lambda s, b, h, m, n: s + table[b, h] * n,
    )
    got = tilewise.attention_paged(**given)
    functions = {name: given[name] for name in ("mask", "score")}
    for b, count in enumerate(given["key_lengths"].tolist()):
        used = given["block_table"][b, : -(-count // 4)].long()
        k, v = (
            given[name][used].transpose(0, 1).flatten(1, 2)[None, :, :count]
            for name in ("k_pages", "v_pages")
        )
        alone = attend(given["q"][b : b + 1], k, v, **functions, first_batch=b)
        torch.testing.assert_close(got[b], alone.out[0])


def test_tables_of_64_bits_and_slices_of_larger_ones() -> None:
    given = small()
    expected = tilewise.attention_paged(**given)
    wide = torch.nn.functional.pad(given["block_table"], (0, 5), value=-1)
    for table in (given["block_table"].long(), wide, wide[:, :3]):
        lengths = given["key_lengths"].to(table.dtype)
        got = tilewise.attention_paged(**{**given, "block_table": table, "key_lengths": lengths})
        assert_same_bits(got, expected, str(table.shape))


@pytest.mark.parametrize(
    "shape", [(0, 4, 3, 8), (2, 4, 0, 8), (2, 4, 3, 8)], ids=["batch", "queries", "keys"]
)
def test_nothing_of_something(shape: tuple[int, ...]) -> None:
    """No sequences, no queries, no keys, no pages and no slots at all."""
    for held, slots in ((0, 0), (0, 2), (3, 0), (3, 2)):
        pages = torch.full((held, 2, 4, 8), math.nan)
        table = torch.full((shape[0], slots), -1, dtype=torch.int32)
        lengths = torch.zeros(shape[0], dtype=torch.int32)
        got, lse, _ = tilewise.attention_paged(
            torch.randn(shape), pages, pages, table, lengths, return_lse=True, backend="tiled"
        )
        assert got.shape == shape
        assert bool((got == 0).all())
        assert bool((lse == -math.inf).all())


def test_a_block_mask_is_one_of_the_lengths() -> None:
    inputs = build(Case("table", **GQA, sequences=((64, 300), (4, 133), (33, 0)))).detached()
    assert inputs.cu_seqlens is not None
    cu_q, cu_k = inputs.cu_seqlens
    paged = paged_of(inputs, 16)
    mask = masks.window(70, 0)
    table = BlockMask.of(mask, block=(16, 16), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    for backend in (None, "tiled"):
        plain = tilewise.attention_paged(inputs.q, *paged, cu_q, mask=mask, backend=backend)
        got = tilewise.attention_paged(inputs.q, *paged, cu_q, mask=table, backend=backend)
        assert_same_bits(got, plain, "out")
    longer = torch.tensor([0, 300, 434, 434])
    other = BlockMask.of(mask, block=(16, 16), cu_seqlens_q=cu_q, cu_seqlens_k=longer)
    words = (
        r"^mask \(BlockMask\): got one for sequences of \[300, 134, 0\] keys; required: \[300, 133"
    )
    with pytest.raises(InvalidArgument, match=words):
        tilewise.attention_paged(inputs.q, *paged, cu_q, mask=other, backend="tiled")
    longer = torch.tensor([0, 64, 69, 101])
    other = BlockMask.of(mask, block=(16, 16), cu_seqlens_q=longer, cu_seqlens_k=cu_k)
    words = r"got one for sequences of \[64, 5, 32\] queries; required: \[64, 4, 33\]"
    with pytest.raises(InvalidArgument, match=words):
        tilewise.attention_paged(inputs.q, *paged, cu_q, mask=other, backend="tiled")
    square = BlockMask.of(mask, 64, 300)
    with pytest.raises(InvalidArgument, match="required: one for a variable-length call"):
        tilewise.attention_paged(inputs.q, *paged, cu_q, mask=square, backend="tiled")


def _cu(*values: int) -> Tensor:
    return torch.tensor(values)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "q of rank 3": ({"q": torch.zeros(3, 4, 8)}, r"^q: got shape \(3, 4, 8\).*\[B, Hq, M, D\]"),
    "packed q of rank 4": (
        {"cu_seqlens_q": _cu(0, 2, 3)},
        r"^q: got shape .*\[T, Hq, D\], rank 3",
    ),
    "pages of rank 3": ({"k_pages": torch.zeros(9, 4, 8)}, r"^k_pages: .*\[pages, Hk, page_size"),
    "dtype of pages": (
        {"v_pages": torch.zeros(9, 2, 4, 8, dtype=torch.float16)},
        "^v_pages: got torch.float16; required: q's dtype",
    ),
    "device of pages": (
        {"k_pages": torch.zeros(9, 2, 4, 8, device="meta")},
        "^k_pages: got device",
    ),
    "width": ({"k_pages": torch.zeros(9, 2, 4, 6)}, "^k_pages: got width D = 6"),
    "page sizes": ({"v_pages": torch.zeros(6, 2, 5, 8)}, "^v_pages: got 5 keys"),
    "number of pages": ({"v_pages": torch.zeros(9, 2, 4, 8)}, "^v_pages: got 9 pages"),
    "empty pages": (
        {"k_pages": torch.zeros(6, 2, 0, 8), "v_pages": torch.zeros(6, 2, 0, 8)},
        "^k_pages: got page_size 0",
    ),
    "heads": (
        {"k_pages": torch.zeros(6, 3, 4, 8), "v_pages": torch.zeros(6, 3, 4, 8)},
        "^k_pages: got 3 key/value heads for 4",
    ),
    "rows of the table": (
        {"block_table": torch.zeros(3, 2, dtype=torch.int32), "key_lengths": torch.zeros(3).int()},
        "^block_table: got 3 rows; required: one for each of q's 2",
    ),
    "rank of the table": ({"block_table": torch.zeros(6).int()}, "^block_table: got shape"),
    "dtype of the table": ({"block_table": torch.zeros(2, 3)}, "^block_table: got a tensor of"),
    "entries of the lengths": ({"key_lengths": _cu(1, 2, 3)}, "^key_lengths: got 3 entries"),
    "a length that is negative": (
        {"key_lengths": _cu(5, -1)},
        "^key_lengths: got -1 for sequence 1",
    ),
    "a length over the table": (
        {"key_lengths": _cu(17, 3)},
        r"^key_lengths: got 17 for sequence 0; required: in \[0, 16\].* 4 pages of 4",
    ),
    "an entry that nobody set": (
        {"key_lengths": _cu(9, 9)},
        "^block_table: got page .* in slot 2 of sequence 0, which has 9 keys",
    ),
    "an entry that is no page": (
        {"block_table": torch.full((2, 4), 6), "key_lengths": _cu(0, 1)},
        "^block_table: got page 6 in slot 0 of sequence 1.*one of the 6 pages",
    ),
    "entries of cu_seqlens_q": (
        {"q": torch.zeros(6, 4, 8), "cu_seqlens_q": _cu(0, 6)},
        "^cu_seqlens_q: got 2 entries; required: one more than block_table has rows, 3",
    ),
    "end of cu_seqlens_q": (
        {"q": torch.zeros(6, 4, 8), "cu_seqlens_q": _cu(0, 3, 7)},
        "^cu_seqlens_q: got 7 as its last entry",
    ),
    "sinks": ({"sinks": torch.zeros(3)}, "^sinks: got shape"),
    "scale": ({"scale": math.nan}, "^scale: got nan"),
    "mask": ({"mask": masks.dense(torch.ones(1, 1, 3, 8).bool())}, r"^mask: .*the longest"),
    "return_stats": ({"return_stats": "top2"}, "^return_stats: "),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name: str) -> None:
    changes, message = WRONG[name]
    with pytest.raises(InvalidArgument, match=message):
        tilewise.attention_paged(**small(**changes))


@pytest.mark.parametrize("name", ["q", "k_pages", "block_table", "key_lengths"])
def test_what_is_no_tensor_is_named(name: str) -> None:
    with pytest.raises(InvalidType, match=f"^{name}: got a list"):
        tilewise.attention_paged(**{**small(), name: [1]})
    with pytest.raises(InvalidType, match=r"^cu_seqlens_q: "):
        check_page_tensors(torch.zeros(1, 1).int(), torch.zeros(1).int(), 7)  # type: ignore[arg-type]


def test_what_nobody_can_do_names_the_pages() -> None:
    given = small(backend=None)
    q, k, v = (given.pop(name).to(FLOAT8) for name in ("q", "k_pages", "v_pages"))
    with pytest.raises(Unsupported, match="keys in pages of 4") as caught:
        tilewise.attention_paged(q, k, v, **given)
    assert "backend='tiled'" in str(caught.value)
    text = str(tilewise.explain(q, k, v, **{**given, "backend": "tiled"}))
    assert "pages     of 4 keys" in text


def test_a_held_plan() -> None:
    given = small(mask=masks.causal())
    arguments = tuple(given.pop(name) for name in ("q", "k_pages", "v_pages"))
    plan = tilewise.plan(*arguments, **given)
    expected = tilewise.attention_paged(*arguments, **given)
    assert_same_bits(tilewise.attention_paged(*arguments, **given, plan=plan), expected, "out")
    wider = torch.nn.functional.pad(given["block_table"], (0, 1))
    with pytest.raises(InvalidArgument, match=r"^plan: got a plan for a block table \[2, 4\]"):
        tilewise.attention_paged(*arguments, **{**given, "block_table": wider}, plan=plan)
    with pytest.raises(InvalidArgument, match=r"^plan: "):
        tilewise.attention(*arguments, plan=plan, mask=masks.causal(), backend="tiled")
    for missing in ("block_table", "key_lengths"):
        with pytest.raises(InvalidArgument, match=f"^{missing}: got None"):
            tilewise.plan(*arguments, **{**given, missing: None})
    with pytest.raises(InvalidArgument, match=r"^cu_seqlens_k: "):
        tilewise.plan(*arguments, **{**given, "cu_seqlens_k": _cu(0, 3)})
    with pytest.raises(InvalidArgument, match=r"^dropout_p: "):
        tilewise.plan(*arguments, **given, dropout_p=0.1)


@pytest.mark.parametrize("name", ["q", "k_pages", "v_pages", "sinks", "score"])
def test_gradients_are_refused_and_never_dropped(name: str) -> None:
    given = small(sinks=torch.zeros(4))
    if name == "score":
        given["score"] = scores.bias(torch.zeros(1, 4, 1, 1, requires_grad=True))
    else:
        given[name] = given[name].requires_grad_()
    with pytest.raises(Unsupported, match=r"no gradients of paged keys\n.*no_grad"):
        tilewise.attention_paged(**given)
    with torch.no_grad():
        assert not tilewise.attention_paged(**given).requires_grad


def test_transforms_are_refused() -> None:
    given = small()
    q = given.pop("q")

    def call(x: Tensor) -> Tensor:
        found: Tensor = tilewise.attention_paged(x, **given)
        return found.sum()

    calls: list[Callable[[], Any]] = [
        lambda: torch.func.grad(call)(q),
        lambda: torch.func.vmap(call)(q[None]),
        lambda: torch.func.jvp(call, (q,), (q,)),
        lambda: torch.func.grad(torch.compile(call, backend="eager"))(q),
    ]
    for transformed in calls:
        with pytest.raises(Unsupported, match="paged keys"):
            transformed()


def _op_arguments(packed: bool, statistics: str) -> tuple[Any, ...]:
    given = small()
    q, pages = given.pop("q"), [given[name] for name in Paged._fields]
    cu_q = None
    if packed:
        q, cu_q = q[0].transpose(0, 1).contiguous(), _cu(0, 1, 3)
    mask = ("band(-1,0,1) below()[0] and", [torch.tensor([3, 9])])
    score = ("softcap(9.0) bias()[0]", [torch.zeros(1, 4, 1, 9)])
    text = (mask[0], score[0], 0.3, "tiled", statistics)
    return (q, *pages, cu_q, mask[1], score[1], torch.zeros(4), *text)


@pytest.mark.parametrize("statistics", ["", "rows", "top1"])
@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(packed: bool, statistics: str) -> None:
    arguments = _op_arguments(packed, statistics)
    torch.library.opcheck(torch.ops.tilewise.attention_paged.default, arguments)


def test_the_op_has_no_gradient_either() -> None:
    q, *rest = _op_arguments(False, "")
    with pytest.raises(Unsupported, match="no gradients of paged keys"):
        torch.ops.tilewise.attention_paged(q.requires_grad_(), *rest)[0].sum().backward()


@pytest.mark.thorough
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_equals_eager(dynamic: bool) -> None:
    """In one graph, for other lengths and larger tables too."""
    torch._dynamo.reset()
    bias = torch.randn(4, 1, 1)

    def call(q: Tensor, *pages: Tensor) -> Any:
        return tilewise.attention_paged(
            q,
            *pages,
            mask=masks.causal() & (lambda b, h, m, n: n != 2),
            score=lambda s, b, h, m, n: s + bias[h, 0, 0],
            return_stats="top1",
            return_lse=True,
            backend="tiled",
        )

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for lengths in ((5, 9), (8, 13)):
        keys = [torch.randn(2, n, 8) for n in lengths]
        arguments = (torch.randn(2, 4, lengths[0], 8), *in_pages(keys, keys, 4))
        expected, got = call(*arguments), compiled(*arguments)
        assert_same_bits(got.out, expected.out, "out")
        assert_same_bits(got.lse, expected.lse, "lse")
        assert_same_bits(got.stats.top1, expected.stats.top1, "top1")


def test_a_compiled_call_refuses_gradients_too() -> None:
    torch._dynamo.reset()
    given = small()
    q = given.pop("q").requires_grad_()
    compiled = torch.compile(lambda x: tilewise.attention_paged(x, **given), backend="aot_eager")
    with pytest.raises(Exception, match="no gradients of paged keys"):
        compiled(q).sum().backward()


def test_what_traces_sees_the_op() -> None:
    given = small()
    names = ("q", *Paged._fields)

    def call(*tensors: Tensor) -> Any:
        return tilewise.attention_paged(*tensors, backend="tiled")

    arguments = [given[name] for name in names]
    graph = make_fx(call)(*arguments)
    assert "attention_paged" in graph.code
    other = small(seed=1)
    arguments = [other[name] for name in names]
    assert_same_bits(graph(*arguments), call(*arguments), "other numbers")
    exported = torch.export.export(Call(), tuple(arguments))
    assert_same_bits(exported.module()(*arguments), call(*arguments), "exported")


class Call(torch.nn.Module):
    """The call as a module."""

    def forward(self, *tensors: Tensor) -> Any:
        """By the reference."""
        return tilewise.attention_paged(*tensors, backend="tiled")


def test_autocast_chooses_the_dtype() -> None:
    given = small()
    with torch.autocast("cpu", torch.bfloat16):
        got = tilewise.attention_paged(**given)
    for name in ("q", "k_pages", "v_pages"):
        given[name] = given[name].bfloat16()
    assert_same_bits(got, tilewise.attention_paged(**given), "out")


def test_checked_mode_looks_within_sequences() -> None:
    """An index is looked at where a sequence has a key, and not beyond."""
    positions = torch.zeros(9)
    given = small(score=lambda s, b, h, m, n: s + positions[n])
    with tilewise.checked():
        tilewise.attention_paged(**given)
        given["score"] = lambda s, b, h, m, n: s + positions[n + 1]
        with pytest.raises(InvalidArgument, match=r"^score: got the index 9 .*b 1, h 0, m 0, n 8"):
            tilewise.attention_paged(**given)
