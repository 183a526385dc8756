"""Masks and scores as data: their algebra, their text form, and their lowering."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tilewise
from tilewise import masks, scores
from tilewise.engine import dispatch
from tilewise.errors import InvalidArgument
from tilewise.variants.lower import Extent, lower_mask, lower_score
from tilewise.variants.program import (
    LARGEST_COUNT,
    MASK_OPS,
    SCORE_OPS,
    Instr,
    Program,
    decode,
    encode,
)
from tilewise.variants.values import Mask, Score, as_mask, as_score

M, N = 5, 7
CPU = torch.device("cpu")

counts = st.integers(0, 9)
bounds = st.none() | counts
aligns = st.sampled_from(["bottom_right", "top_left"])
id_lists = st.lists(st.integers(0, 3), min_size=M, max_size=M)


def _document(queries: list[int], keys: list[int]) -> Mask:
    return masks.document(torch.tensor([*keys, 0, 1]), torch.tensor(queries))


leaves = st.one_of(
    st.builds(masks.causal, aligns),
    st.builds(masks.window, bounds, bounds, aligns),
    st.builds(masks.prefix, counts),
    st.builds(lambda value: masks.prefix(torch.tensor([value])), st.integers(0, N)),
    st.builds(lambda value: masks.lengths(torch.tensor([value])), st.integers(0, N)),
    st.builds(_document, id_lists, id_lists),
    st.builds(
        lambda rows: masks.dense(torch.tensor(rows)),
        st.lists(st.lists(st.booleans(), min_size=N, max_size=N), min_size=M, max_size=M),
    ),
)
any_mask = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a, b: a | b, inner, inner),
        st.builds(lambda a: ~a, inner),
    ),
    max_leaves=6,
)
any_score = st.lists(
    st.one_of(
        st.builds(scores.softcap, st.floats(1e-3, 1e3)),
        st.builds(lambda value: scores.bias(torch.full((M, N), value)), st.floats(-5, 5)),
        st.builds(lambda value: scores.alibi(torch.tensor([value])), st.floats(0, 1)),
    ),
    max_size=5,
)


def meaning(mask: Mask) -> Tensor:
    """The [M, N] booleans of a mask."""
    return tilewise.visible_pairs(mask, M, N)[0, 0]


@given(any_mask)
def test_text_and_back(mask: Mask) -> None:
    assert decode(encode(mask.program)) == mask.program
    assert mask.text == encode(mask.program)


@given(any_score)
def test_a_sequence_of_scores_keeps_text_order_and_captures(steps: list[Score]) -> None:
    score = as_score(steps)
    assert decode(score.text) == score.program
    captured = [tensor for step in steps for tensor in step.captured]
    assert len(score.captured) == len(captured)
    for instr, step in zip(score.program, steps, strict=True):
        assert instr.op == step.program[0].op
        for slot, tensor in zip(instr.slots, step.captured, strict=True):
            assert score.captured[slot] is tensor


@given(any_mask, any_mask)
def test_composition_means_the_boolean_algebra(a: Mask, b: Mask) -> None:
    assert torch.equal(meaning(a & b), meaning(a) & meaning(b))
    assert torch.equal(meaning(a | b), meaning(a) | meaning(b))
    assert torch.equal(meaning(~a), ~meaning(a))
    assert torch.equal(meaning(~(a & b)), meaning(~a | ~b))


@given(any_mask, any_mask)
def test_composition_keeps_every_capture_in_its_slot(a: Mask, b: Mask) -> None:
    joined = a & b
    assert len(joined.captured) == len(a.captured) + len(b.captured)
    for found, given_ in zip(joined.captured, (*a.captured, *b.captured), strict=True):
        assert found is given_
    slots = [slot for instr in joined.program for slot in instr.slots]
    assert sorted(slots) == list(range(len(joined.captured)))


def test_named_masks_are_these_programs() -> None:
    lengths = torch.tensor([3])
    assert masks.causal().text == "band(-1,0,1)"
    assert masks.causal(align="top_left").text == "band(-1,0,0)"
    assert masks.window(3, None).text == "band(3,-1,1)"
    assert masks.prefix(4).text == "band(-1,0,1) below(4) or"
    assert masks.prefix(lengths).text == "band(-1,0,1) below()[0] or"
    assert (masks.causal() & masks.lengths(lengths)).text == "band(-1,0,1) below()[0] and"
    assert (~masks.document(lengths)).text == "same_document()[0,1] not"
    assert (masks.causal() & torch.ones(1, 1).bool()).text == "band(-1,0,1) dense()[0] and"
    assert (torch.ones(1, 1).bool() & masks.causal()).text == "dense()[0] band(-1,0,1) and"
    assert (torch.ones(1, 1).bool() | masks.causal()).text == "dense()[0] band(-1,0,1) or"


@pytest.mark.parametrize("huge", [sys.maxsize, 10**30, LARGEST_COUNT + 1])
def test_huge_counts_are_one_number(huge: int) -> None:
    """Larger than any memory is as good as open, on every backend."""
    assert masks.window(huge, huge).program == masks.window(10**40, 2**63).program
    assert masks.prefix(huge).program == masks.prefix(2**63).program
    q, k, v = (torch.randn(1, 2, rows, 8) for rows in (M, N, N))
    for backend in ("tiled", None):
        if backend is None and dispatch.load("cpu").absence() is not None:
            continue
        full = tilewise.attention(q, k, v, backend=backend)
        for mask in (
            masks.window(huge, huge),
            masks.window(huge, huge, align="top_left"),
            masks.window(None, huge),
            masks.prefix(huge),
        ):
            assert torch.equal(tilewise.attention(q, k, v, mask=mask, backend=backend), full)
        causal = tilewise.attention(q, k, v, mask=masks.window(huge, 0), backend=backend)
        expected = tilewise.attention(q, k, v, mask=masks.causal(), backend=backend)
        assert torch.equal(causal, expected)


BELOW = Instr("below", (1,))
BAD_MASKS = {
    "no operand": (Instr("not"),),
    "one operand": (BELOW, Instr("and")),
    "two values": (BELOW, BELOW),
    "a score": (BELOW, Instr("softcap", (2.0,))),
    "unknown": (Instr("nothing"),),
    "parameters": (Instr("band", (1, 2)),),
    "a fraction": (Instr("below", (0.5,)),),
    "too large": (Instr("below", (LARGEST_COUNT + 1,)),),
    "negative slot": (Instr("below", (), (-1,)),),
}
BAD_SCORES = {
    "a mask": (BELOW,),
    "no parameter": (Instr("softcap"),),
    "negative cap": (Instr("softcap", (-1.0,)),),
    "no slot": (Instr("bias"),),
    "negative slot": (Instr("bias", (), (-1,)),),
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [*((Mask, name) for name in BAD_MASKS), *((Score, name) for name in BAD_SCORES)],
)
def test_no_program_is_refused(kind: type[Mask | Score], name: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^program: "):
        kind((BAD_MASKS if kind is Mask else BAD_SCORES)[name])


def test_named_scores_are_these_programs() -> None:
    both = [scores.alibi(torch.ones(2)), scores.softcap(30), scores.bias(torch.ones(2))]
    assert as_score(both).text == "alibi()[0] softcap(30.0) bias()[1]"
    assert as_score([]).text == ""


@pytest.mark.parametrize("tensors", [0, 1, 3])
def test_a_variant_has_a_tensor_for_each_slot(tensors: int) -> None:
    program = decode("same_document()[0,1]")
    with pytest.raises(InvalidArgument, match=rf"^captured: got {tensors} tensors.*the 2 that"):
        Mask(program, (torch.zeros(3),) * tensors)


def test_pairs_are_shown_on_the_device_that_is_named() -> None:
    for mask in (None, masks.causal()):
        shown = tilewise.visible_pairs(mask, M, N, device="meta")
        assert (shown.device.type, shown.shape) == ("meta", (1, 1, M, N))


def test_causal_masks_are_built_once() -> None:
    assert masks.causal() is masks.causal()


@pytest.mark.parametrize("value", [masks.causal(), scores.softcap(2.0)], ids=["mask", "score"])
def test_variants_are_immutable_values(value: Any) -> None:
    for attribute in ("program", "captured", "text", "other"):
        with pytest.raises(AttributeError, match="immutable"):
            setattr(value, attribute, ())
    with pytest.raises(AttributeError, match="immutable"):
        del value.program
    for twin in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert (type(twin), twin.program) == (type(value), value.program)


def test_what_a_variant_prints() -> None:
    mask = masks.lengths(torch.tensor([1, 2])) & masks.causal()
    assert repr(mask) == "Mask(below()[0] band(-1,0,1) and, captured: [2])"


BAD_TEXT = [
    "band(1,2)",
    "band(1,2,3)[0]",
    "nothing()",
    "below(x)",
    "below(1) below(2)",
    "and",
    "below(1) softcap(2.0)",
    "dense()[a]",
    "below 1",
]


@pytest.mark.parametrize("text", BAD_TEXT)
def test_text_that_is_no_program_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^program: "):
        decode(text)


def test_every_operation_has_a_text_form() -> None:
    for op, form in {**MASK_OPS, **SCORE_OPS}.items():
        for params, slots in form.arities:
            instr = Instr(op, tuple(range(1, params + 1)), tuple(range(slots)))
            text = encode((instr,))
            if form.pops:
                text = " ".join(["below(1)"] * form.pops + [text])
            assert decode(text)[-1] == instr


EXTENT = Extent(2, 4, M, N)


def _mask(mask: Mask, extent: Extent = EXTENT) -> tuple[Tensor, ...]:
    return lower_mask(mask.program, mask.captured, extent, CPU)


def _score(
    score: Score, extent: Extent = EXTENT, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    return lower_score(score.program, score.captured, extent, dtype, CPU)


def test_lengths_are_lowered_to_contiguous_int64() -> None:
    wide = torch.tensor([3, 0, 7, 0], dtype=torch.int32)[::2]
    (lowered,) = _mask(masks.lengths(wide))
    assert lowered.dtype == torch.int64
    assert lowered.is_contiguous()
    assert lowered.tolist() == [3, 7]


def test_ids_are_lowered_to_two_dimensions() -> None:
    queries, keys = _mask(masks.document(torch.zeros(N).int(), torch.zeros(2, M).short()))
    assert (queries.shape, keys.shape) == ((2, M), (1, N))
    assert queries.dtype == keys.dtype == torch.int64


@pytest.mark.parametrize("shape", [(), (N,), (M, 1), (4, 1, N), (2, 1, M, N), (1, 1, 1, 1)])
def test_dense_masks_and_biases_are_four_dimensional_views(shape: tuple[int, ...]) -> None:
    dense, bias = torch.ones(shape, dtype=torch.bool), torch.zeros(shape)
    (mask_view,) = _mask(as_mask(dense))
    (bias_view,) = _score(scores.bias(bias))
    for view, tensor in ((mask_view, dense), (bias_view, bias)):
        assert view.shape == (*(1,) * (4 - len(shape)), *shape)
        assert view.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize(
    ("bias", "query", "lowered"),
    [
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.bfloat16, torch.float32),
        (torch.float64, torch.float32, torch.float32),
        (torch.float32, torch.float64, torch.float64),
    ],
)
def test_bias_dtypes(bias: torch.dtype, query: torch.dtype, lowered: torch.dtype) -> None:
    (view,) = _score(scores.bias(torch.zeros(N, dtype=bias)), dtype=query)
    assert view.dtype == lowered


def test_slopes_are_lowered_to_the_dtype_of_the_statistics() -> None:
    for dtype, wanted in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        (slopes,) = _score(scores.alibi(torch.ones(4, dtype=torch.float16)), dtype=dtype)
        assert (slopes.shape, slopes.dtype) == ((1, 4), wanted)


@given(any_mask)
def test_lowering_twice_changes_nothing(mask: Mask) -> None:
    extent = Extent(1, 4, M, N)
    once = _mask(mask, extent)
    twice = lower_mask(mask.program, once, extent, CPU)
    assert all(a is b or torch.equal(a, b) for a, b in zip(once, twice, strict=True))
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(once, twice, strict=True))


def test_ragged_captures_may_be_longer_than_the_longest_sequence() -> None:
    extent = EXTENT._replace(ragged=True, key_counts=(N, 2))
    _mask(masks.document(torch.zeros(N + 3).long(), torch.zeros(M + 1).long()), extent)
    _score(scores.bias(torch.zeros(M + 1, N + 3)), extent)
    with pytest.raises(InvalidArgument, match="or more"):
        _score(scores.bias(torch.zeros(M - 1, N)), extent)


def test_many_lengths_are_checked_too() -> None:
    extent = Extent(1000, 1, M, N)
    lengths = torch.full((1000,), N)
    _mask(masks.lengths(lengths), extent)
    lengths[777] = N + 1
    with pytest.raises(InvalidArgument, match=f"the length {N + 1}"):
        _mask(masks.lengths(lengths), extent)


def test_no_lengths_are_fine() -> None:
    empty: Program = masks.lengths(torch.zeros(0).long()).program
    lower_mask(empty, (torch.zeros(0).long(),), Extent(0, 1, M, N), CPU)
