"""Every wrong argument raises an error that names it, says what came, and what is required."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tilewise import masks, scores
from tilewise.engine import dispatch
from tilewise.errors import InvalidArgument, InvalidType, TilewiseError, Unsupported

Call = Callable[[], Any]


def q(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape or (2, 4, 3, 8), dtype=dtype)


def kv(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape or (2, 2, 5, 8), dtype=dtype)


def attend(q: Any, k: Any, v: Any, **keywords: Any) -> Any:
    return tilewise.attention(q, k, v, **{"backend": "tiled", **keywords})


def with_keywords(**keywords: Any) -> Call:
    return lambda: attend(q(), kv(), kv(), **keywords)


def packed(
    cu_q: Any, cu_k: Any, rows: int = 6, keys: int = 6, device: str = "cpu", **keywords: Any
) -> Call:
    return lambda: tilewise.attention_varlen(
        torch.zeros(rows, 4, 8, device=device),
        torch.zeros(keys, 2, 8, device=device),
        torch.zeros(keys, 2, 8, device=device),
        cu_q,
        cu_k,
        **{"backend": "tiled", **keywords},
    )


def nested(layout: torch.layout = torch.strided) -> Tensor:
    """A [2, H, (5, 3), 8] that is no rectangle."""
    parts = [torch.zeros(5, 2, 8), torch.zeros(3, 2, 8)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a prototype
        return torch.nested.nested_tensor(parts, layout=layout).transpose(1, 2)


def cu(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def op(mask: str, *tensors: Tensor, score: str = "", score_tensors: Sequence[Tensor] = ()) -> Call:
    """The torch op with these programs and captured tensors."""
    rest = (None, None, None, None, mask, score, None, 0.0, "tiled", "")
    return lambda: torch.ops.tilewise.attention(
        q(), kv(), kv(), list(tensors), list(score_tensors), *rest
    )


VALUES: dict[str, tuple[Call, str]] = {
    "rank of q": (lambda: attend(q(4, 3, 8), kv(), kv()), r"^q: got shape \(4, 3, 8\).*varlen"),
    "rank of k": (lambda: attend(q(), kv(5, 8), kv()), r"^k: got shape \(5, 8\).*\[B, H, S, D\]"),
    "rank of v": (lambda: attend(q(), kv(), kv(1, 2, 2, 5, 8)), "^v: got shape"),
    "batch": (lambda: attend(q(), kv(1, 2, 5, 8), kv()), "^k: got batch 1.*expand"),
    "heads that do not divide": (
        lambda: attend(q(), kv(2, 3, 5, 8), kv(2, 3, 5, 8)),
        "^k: got 3 key/value heads for 4 query heads.*divides",
    ),
    "no heads": (lambda: attend(q(2, 0, 3, 8), kv(), kv()), "^q: got 0 heads"),
    "no key heads": (
        lambda: attend(q(), kv(2, 0, 5, 8), kv(2, 0, 5, 8)),
        "^k: got 0 heads; required: at least one",
    ),
    "heads of v": (lambda: attend(q(), kv(), kv(2, 1, 5, 8)), "^v: got 1 heads.*k's heads, 2"),
    "width of k": (lambda: attend(q(), kv(2, 2, 5, 7), kv()), "^k: got width D = 7.*8"),
    "width 0": (lambda: attend(q(2, 4, 3, 0), kv(2, 2, 5, 0), kv()), "^q: got width 0"),
    "keys of v": (lambda: attend(q(), kv(), kv(2, 2, 4, 8)), "^v: got 4 keys.*5"),
    "dtype mix": (
        lambda: attend(q(), kv(dtype=torch.bfloat16), kv()),
        "^k: got torch.bfloat16; required: q's dtype, torch.float32",
    ),
    "dtype of q": (
        lambda: attend(q(dtype=torch.int32), kv(), kv()),
        "^q: got torch.int32; required: one of torch.float32",
    ),
    "device mix": (
        lambda: attend(q(), kv().to("meta"), kv()),
        "^k: got device meta; required: q's device, cpu",
    ),
    "sparse": (lambda: attend(q().to_sparse(), kv(), kv()), "^q: got layout torch.sparse_coo"),
    "sparse key lists": (
        with_keywords(keys=torch.zeros(2, 1, 3, 1).int().to_sparse()),
        r"^keys: got layout torch.sparse_coo.*to_dense\(\)",
    ),
    "sparse targets": (
        lambda: tilewise.linear_cross_entropy(
            torch.zeros(3, 8), torch.zeros(5, 8), torch.zeros(3).long().to_sparse()
        ),
        "^targets: got layout torch.sparse_coo",
    ),
    "NaN scale": (with_keywords(scale=float("nan")), "^scale: got nan; required: a finite number"),
    "infinite scale": (with_keywords(scale=float("inf")), "^scale: got inf"),
    "scale beyond float32": (with_keywords(scale=1e300), r"^scale: got 1e\+300; .*float32 up to"),
    "scale beyond bfloat16's float32": (
        lambda: attend(*(x(dtype=torch.bfloat16) for x in (q, kv, kv)), scale=-1e39),
        r"^scale: got -1e\+39; .*bfloat16",
    ),
    "cap beyond float32": (
        with_keywords(score=scores.softcap(1e39)),
        r"^score \(softcap\): got 1e\+39; required: .*float32",
    ),
    "cap without a reciprocal": (
        with_keywords(score=scores.softcap(1e-39)),
        r"^score \(softcap\): got 1e-39",
    ),
    "varlen cap": (
        packed(cu(0, 6), cu(0, 6), score=scores.softcap(1e39)),
        r"^score \(softcap\): got 1e\+39",
    ),
    "nested": (lambda: attend(nested(), kv(), kv()), "^q: got a nested tensor; required: strided"),
    "nested values": (lambda: attend(q(), kv(), nested()), "^v: got a nested tensor"),
    "jagged": (lambda: attend(q(), nested(torch.jagged), kv()), "^k: got a nested tensor"),
    "nested with a plan": (
        lambda: attend(nested(), kv(), kv(), plan=tilewise.plan(q(), kv(), kv(), backend="tiled")),
        "^q: got a nested tensor",
    ),
    "dropout 1": (with_keywords(dropout_p=1.0), r"^dropout_p: got 1.0; .*\[0, 1\)"),
    "dropout below 0": (with_keywords(dropout_p=-0.1), r"^dropout_p: got -0.1"),
    "return_stats of a word": (
        with_keywords(return_stats="entropy"),
        r"^return_stats: got 'entropy'; .*True, False or \"top1\"",
    ),
    "NaN dropout": (with_keywords(dropout_p=float("nan")), r"^dropout_p: got nan"),
    "seed of 65 bits": (with_keywords(seed=2**64), "^seed: got .*64 bits"),
    "float seed tensor": (with_keywords(seed=torch.tensor(1.0)), "^seed: got a tensor of"),
    "many seeds": (with_keywords(seed=torch.tensor([1, 2])), r"^seed: .* shape \(2,\)"),
    "backend": (with_keywords(backend="cuda"), "^backend: got 'cuda'; required: None.*='gpu'"),
    "sinks per head": (with_keywords(sinks=torch.zeros(2)), r"^sinks: got shape \(2,\).*Hq = 4"),
    "integer sinks": (with_keywords(sinks=cu(1, 2, 3, 4)), "^sinks: got a tensor of torch.int64"),
    "mask shape": (
        with_keywords(mask=torch.ones(3, 4, dtype=torch.bool)),
        r"^mask: got shape \(3, 4\).*\[2, 4, 3, 5\]",
    ),
    "mask batch": (with_keywords(mask=torch.ones(3, 1, 1, 5, dtype=torch.bool)), "^mask: got"),
    "float mask": (with_keywords(mask=torch.zeros(3, 5)), "^mask: .*float32.*scores.bias"),
    "integer mask": (
        with_keywords(mask=torch.ones(3, 5, dtype=torch.int64)),
        r"^mask: got a tensor of torch.int64; .*mask\.bool\(\)",
    ),
    "padding without heads": (
        with_keywords(mask=torch.ones(2, 5, dtype=torch.bool)),
        r"^mask: got shape \(2, 5\).*x\[:, None, None, :\]",
    ),
    "pairs without heads": (
        with_keywords(mask=torch.ones(2, 3, 5, dtype=torch.bool)),
        r"^mask: got shape \(2, 3, 5\).*x\[:, None\]",
    ),
    "mask rank": (with_keywords(mask=torch.ones(1, 1, 1, 3, 5, dtype=torch.bool)), "^mask: got"),
    "mask device": (
        with_keywords(mask=torch.ones(3, 5, dtype=torch.bool, device="meta")),
        "^mask: got a tensor on meta",
    ),
    "bias shape": (
        with_keywords(score=scores.bias(torch.zeros(4, 4, 5))),
        r"^score \(bias\): got shape \(4, 4, 5\)",
    ),
    "slopes shape": (
        with_keywords(score=scores.alibi(torch.zeros(2))),
        r"^score \(alibi slopes\): got shape.*Hq = 4",
    ),
    "slopes that require grad": (
        with_keywords(score=scores.alibi(torch.zeros(4, requires_grad=True))),
        r"^score \(alibi slopes\): got a tensor that requires grad.*detach",
    ),
    "lengths above N": (with_keywords(mask=masks.lengths(cu(5, 6))), r"the length 6.*N = 5"),
    "negative length": (with_keywords(mask=masks.lengths(cu(-1, 5))), r"the length -1"),
    "number of lengths": (with_keywords(mask=masks.lengths(cu(1, 2, 3))), r"shape \(3,\).*B = 2"),
    "prefix above N": (with_keywords(mask=masks.prefix(cu(0, 9))), "the length 9"),
    "ids of M != N": (with_keywords(mask=masks.document(cu(0, 0, 1, 1, 1))), "query_ids="),
    "ids of another batch": (
        with_keywords(mask=masks.document(torch.zeros(3, 5).long(), torch.zeros(3).long())),
        r"^mask \(document ids\): got shape \(3, 5\)",
    ),
    "cu_seqlens from 1": (packed(cu(1, 6), cu(0, 6)), "^cu_seqlens_q: got 1 as its first entry"),
    "cu_seqlens falls": (
        packed(cu(0, 6), cu(0, 4, 3, 6)[:2]),
        "^cu_seqlens_k: got 4 as its last entry, before the end",
    ),
    "cu_seqlens decreases": (
        packed(cu(0, 4, 3, 6), cu(0, 2, 4, 6)),
        "^cu_seqlens_q: got 4 followed by 3 at entry 2",
    ),
    "cu_seqlens passes the end": (
        packed(cu(0, 6), cu(0, 7)),
        "^cu_seqlens_k: got 7 as its last entry, past the end",
    ),
    "cu_seqlens dtype": (
        packed(cu(0, 6, dtype=torch.int16), cu(0, 6)),
        "^cu_seqlens_q: got a tensor of torch.int16; required: an int32 or int64 tensor",
    ),
    "cu_seqlens float": (packed(cu(0, 6), torch.tensor([0.0, 6.0])), "^cu_seqlens_k: .*float32"),
    "cu_seqlens rank": (packed(cu(0, 6)[None], cu(0, 6)), "^cu_seqlens_q: got shape"),
    "cu_seqlens empty": (packed(cu(), cu()), "^cu_seqlens_q: got shape"),
    "cu_seqlens counts": (packed(cu(0, 6), cu(0, 3, 6)), "^cu_seqlens_k: got 3 entries.*2"),
    "varlen lengths": (
        packed(cu(0, 3, 6), cu(0, 2, 6), mask=masks.lengths(cu(3, 4))),
        r"3 for sequence 0; required: in \[0, 2\]",
    ),
    "varlen bias": (
        packed(cu(0, 3, 6), cu(0, 2, 6), score=scores.bias(torch.zeros(3, 3))),
        r"^score \(bias\): got shape \(3, 3\).*longest",
    ),
    "varlen rank": (
        lambda: tilewise.attention_varlen(q(), kv(), kv(), cu(0, 1), cu(0, 1)),
        r"^q: got shape \(2, 4, 3, 8\)",
    ),
    "align": (lambda: masks.causal(align="bottom"), "^align: got 'bottom'"),
    "negative window": (lambda: masks.window(-2, 0), "^left: got -2"),
    "negative prefix": (lambda: masks.prefix(-1), "^length: got -1"),
    "float lengths": (lambda: masks.lengths(torch.zeros(2)), "^lengths: got a tensor of"),
    "lengths rank": (lambda: masks.lengths(torch.zeros(2, 2).long()), "^lengths: got shape"),
    "float ids": (lambda: masks.document(torch.zeros(2)), "^ids: got a tensor of"),
    "ids rank": (lambda: masks.document(cu(1), cu(1)[None, None]), "^query_ids: got shape"),
    "cap 0": (lambda: scores.softcap(0.0), "^cap: got 0.0"),
    "NaN cap": (lambda: scores.softcap(float("nan")), "^cap: got nan"),
    "boolean bias": (lambda: scores.bias(torch.ones(2).bool()), "^tensor: .*mask=tensor"),
    "bias rank": (lambda: scores.bias(torch.ones(1, 1, 1, 1, 1)), "^tensor: got shape"),
    "slopes rank": (lambda: scores.alibi(torch.ones(1, 1, 1)), "^slopes: got shape"),
    "half a pair": (lambda: tilewise.plan(q(), kv(), kv(), cu(0, 1)), "^cu_seqlens_k: got None"),
}

VALUES |= {
    # The op takes any tensors for its programs: nothing may be read as what it is not.
    "op: float mask": (op("dense()[0]", torch.ones(3, 5)), "^mask: got a tensor of torch.float32"),
    "op: five-dimensional mask": (
        op("dense()[0]", torch.ones(1, 1, 1, 3, 5, dtype=torch.bool)),
        "^mask: got shape.*four",
    ),
    "op: float lengths": (
        op("below()[0]", torch.ones(2)),
        r"^mask \(lengths\): got a tensor of torch.float32",
    ),
    "op: float ids": (
        op("same_document()[0,1]", torch.ones(3), torch.ones(5)),
        r"^mask \(document query_ids\): got a tensor of torch.float32",
    ),
    "op: ids of three dimensions": (
        op("same_document()[0,1]", cu(1)[None, None], cu(1)),
        r"^mask \(document query_ids\): got shape",
    ),
    "op: integer slopes": (
        op("", score="alibi()[0]", score_tensors=[cu(1, 1, 1, 1)]),
        r"^score \(alibi slopes\): got a tensor of torch.int64",
    ),
    "op: integer bias": (
        op("", score="bias()[0]", score_tensors=[cu(1)]),
        r"^score \(bias\): got a tensor of torch.int64",
    ),
    "op: a fraction of a key": (op("band(1.5,0,1)"), "^program: got .*whole constants"),
    "op: a huge band": (op(f"band({2**70},0,1)"), "^program: got .*whole constants"),
    "op: a score as a mask": (op("softcap(2.0)"), "^program: got .*mask operations only"),
    "op: a mask as a score": (op("", score="band(-1,0,1)"), "^program: got .*score steps only"),
}

TYPES: dict[str, tuple[Call, str]] = {
    "q": (lambda: attend([1.0], kv(), kv()), "^q: got a list; required: a tensor"),
    "v": (lambda: attend(q(), kv(), None), "^v: got a NoneType; required: a tensor"),
    "scale": (with_keywords(scale=torch.tensor(1.0)), "^scale: got a Tensor"),
    "scale text": (with_keywords(scale="1"), "^scale: got a str"),
    "dropout": (with_keywords(dropout_p=None), "^dropout_p: got a NoneType"),
    "return_stats": (with_keywords(return_stats=None), "^return_stats: got a NoneType"),
    "unhashable dropout": (with_keywords(dropout_p=[0.1]), "^dropout_p: got a list"),
    "dropout tensor": (
        lambda: tilewise.attention(q(), kv(), kv(), dropout_p=cu(1, 2)),  # type: ignore[arg-type]
        "^dropout_p: got a Tensor",
    ),
    "seed": (with_keywords(seed=1.5), "^seed: got a float"),
    "backend": (with_keywords(backend=3), "^backend: got a int"),
    "sinks": (with_keywords(sinks=[0.0] * 4), "^sinks: got a list"),
    "mask": (
        with_keywords(mask=lambda m, n: m >= n),
        r"^mask: got a function of \(m, n\); required: .*\(b, h, m, n\)",
    ),
    "score as mask": (with_keywords(mask=scores.softcap(1.0)), "^mask: got a Score.*score="),
    "mask as score": (with_keywords(score=masks.causal()), "^score: got a Mask.*mask="),
    "tensor as score": (with_keywords(score=torch.zeros(3, 5)), "^score: got a Tensor.*bias"),
    "score in a list": (with_keywords(score=[scores.softcap(1.0), 2]), r"^score\[1\]: got a int"),
    "cu_seqlens": (packed([0, 6], cu(0, 6)), "^cu_seqlens_q: got a list"),
    "plan": (with_keywords(plan="fast"), "^plan: got a str; required: a Plan"),
    "window": (lambda: masks.window(1.5, 0), "^left: got a float"),  # type: ignore[arg-type]
    "lengths": (lambda: masks.lengths([1, 2]), "^lengths: got a list"),  # type: ignore[arg-type]
    "document": (lambda: masks.document([1]), "^ids: got a list"),  # type: ignore[arg-type]
    "dense": (lambda: masks.dense([True]), "^tensor: got a list"),  # type: ignore[arg-type]
    "bias": (lambda: scores.bias(0.0), "^tensor: got a float"),  # type: ignore[arg-type]
    "truth of a mask": (lambda: masks.causal() and masks.causal(), "^mask: .*a & b"),
}


@pytest.mark.parametrize("name", TYPES)
def test_a_wrong_type_is_named(name: str) -> None:
    call, message = TYPES[name]
    with pytest.raises(InvalidType, match=message):
        call()


@pytest.mark.parametrize("name", VALUES)
def test_a_wrong_value_is_named(name: str) -> None:
    """A call that failed once must not be let through by the plan cache."""
    call, message = VALUES[name]
    for _ in range(2):
        with pytest.raises(InvalidArgument, match=message):
            call()


DEFAULT = ("rank of q", "dtype mix", "scale beyond float32", "cap beyond float32", "nested")


@pytest.mark.parametrize("name", DEFAULT)
def test_the_default_backend_names_it_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same words where no backend is named."""
    call, message = VALUES[name]
    monkeypatch.setattr(tilewise, "attention", _without_backend(tilewise.attention))
    with pytest.raises(InvalidArgument, match=message):
        call()


def _without_backend(attention: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, backend: str | None = None, **keywords: Any) -> Any:
        return attention(*args, **keywords)

    return call


SIZES = {"D = 577": 577, "Dv = 600": 600}


@pytest.mark.parametrize("said", SIZES)
def test_unsupported_names_the_limit_of_a_width(said: str) -> None:
    """Through the default backend: the limit is said, and no slow path taken instead."""
    _need_core()
    wide, narrow = torch.zeros(1, 1, 2, SIZES[said]), torch.zeros(1, 1, 2, 8)
    key, value = (wide, narrow) if said.startswith("D ") else (narrow, wide)
    with pytest.raises(Unsupported, match=rf"backend 'cpu': {said} is over its limit of 576"):
        tilewise.attention(key, key, value)


def test_unsupported_names_the_limits_of_programs() -> None:
    _need_core()
    mask = masks.causal()
    for _ in range(16):  # 33 instructions
        mask = mask & masks.causal()
    with pytest.raises(Unsupported, match=r"backend 'cpu': .*\b33\b.* over its limit of 32"):
        tilewise.attention(q(), kv(), kv(), mask=mask)
    with pytest.raises(Unsupported, match=r"backend 'cpu': .*\b9\b.* over its limit of 8"):
        tilewise.attention(q(), kv(), kv(), score=[scores.softcap(2.0)] * 9)
    assert attend(q(), kv(), kv(), mask=mask, score=[scores.softcap(2.0)] * 9).shape == q().shape


def _need_core() -> None:
    if dispatch.load("cpu").absence() is not None:
        pytest.skip("the compiled core is not built: ./run setup says why")


def test_slopes_that_require_grad_are_fine_without_gradients() -> None:
    slopes = torch.ones(4, requires_grad=True)
    with torch.no_grad():
        assert attend(q(), kv(), kv(), score=scores.alibi(slopes)).shape == (2, 4, 3, 8)


ERRORS = [
    InvalidArgument("k", "3 heads", "a divisor of 4", "Repeat them."),
    InvalidType("q", "a list", "a tensor"),
    Unsupported("nothing runs this", {"cpu": ["no core"], "tiled": ["on a GPU"]}, "build it"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_are_one_family_and_pickle(error: TilewiseError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
    assert isinstance(error, TilewiseError)


def test_errors_are_also_python_s_own() -> None:
    assert issubclass(InvalidArgument, ValueError)
    assert issubclass(InvalidType, TypeError)
    assert issubclass(Unsupported, NotImplementedError)


def test_unsupported_lists_every_reason() -> None:
    assert str(ERRORS[2]).splitlines() == [
        "nothing runs this",
        "  backend 'cpu': no core",
        "  backend 'tiled': on a GPU",
        "  fix: build it",
    ]
