"""The timed cases, and their steps: speed, shorter lengths, compiling before it, bits repeated.

Cases are rows of the table at widths and lengths, and there are several ways to do them.
Ours and the others are timed in turn, forward and backward, each with its operations per second. A
case whose sampled rows are not exact is not timed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tilewise
from tilelab.cases.case import Case, Pass
from tilelab.cases.table import rows
from tilelab.cases.variants import uneven
from tilelab.common.clock import Call, seconds_of
from tilelab.common.exactness import judge
from tilelab.common.memory import too_large
from tilelab.gpu_check.record import FLEX, OURS, Row, Status, in_short
from tilelab.gpu_check.setting import Setting, Sizes, quantised, references
from tilelab.peers import methods
from tilelab.peers.methods import Method
from tilelab.peers.work import Attend, Given, Work, call_of, compare, cut, draw, flops, sampled
from tilewise import BlockMask, masks
from tilewise.errors import Unsupported
from tilewise.variants.float8 import Scales

_CAUSAL = ("causal",)
_PACKED, _DECODED, _EIGHT_BITS = "varlen", "decode", "fp8"


def sized(sizes: Sizes, row: Case, width: int, length: int) -> Case:
    """Return a row at a width and a length; its kind in records is the row's name."""
    few = row.queries == 1
    keys = sizes.decode_keys if few else length
    heads = row.heads if few else sizes.hidden // width
    return replace(
        row,
        name=f"D{width} {row.name} {keys}",
        kind=row.name,
        batch=sizes.decode_batch if few else sizes.tokens // length,
        heads=heads,
        kv_heads=row.kv_heads if few else heads,
        queries=1 if few else length,
        keys=keys,
        head_dim=width,
        value_dim=width,
    )


def cases(sizes: Sizes) -> list[Case]:
    """Return every case, those with a goal first."""
    return [*with_goals(sizes), *other_lengths(sizes)]


def with_goals(sizes: Sizes) -> list[Case]:
    """Return the two greatest lengths, the variants, and what is no square problem.

    One of each kind comes first: time that runs out costs a second width or length.
    """
    longest, second = sizes.lengths[:2]
    first, others = sizes.widths[0], sizes.widths[1:2]
    variants = rows("widths")
    once = [*variants, *rows("one width")]
    return [
        *(sized(sizes, row, width, longest) for width in sizes.widths for row in rows("lengths")),
        *(sized(sizes, row, first, longest) for row in once),
        *(sized(sizes, row, width, longest) for width in others for row in variants),
        *(sized(sizes, row, width, second) for width in sizes.widths for row in rows("lengths")),
    ]


def other_lengths(sizes: Sizes) -> list[Case]:
    """Shorter lengths, at the same number of tokens."""
    lengths, widths = sizes.lengths[2:], sizes.widths
    return [sized(sizes, row, d, n) for n in lengths for d in widths for row in rows("lengths")]


def names(chosen: Callable[[Sizes], list[Case]]) -> Callable[[Setting], list[str]]:
    """Return what names some cases in a setting."""
    return lambda setting: [case.name for case in chosen(setting.sizes)]


def find(sizes: Sizes, name: str) -> Case:
    """Return the case of that name."""
    return next(case for case in cases(sizes) if case.name == name)


def _directions(case: Case) -> tuple[Pass, ...]:
    return ("forward", "backward") if case.passes == "both" else ("forward",)


def amount(work: Work) -> float:
    """Operations of the passes of a work; of decoding the bytes of keys and values."""
    if work.kind == _DECODED:
        return 2.0 * work.batch * work.kv_heads * work.keys * work.head_dim * work.dtype.itemsize
    return flops(work)


def ours(case: Case) -> dict[str, Method]:
    """Our ways of doing a case: ``ours``, and ``table`` where a BlockMask may serve better."""
    if case.kind == _PACKED:
        return {"ours": Method("ours", _packed)}
    if case.kind == _EIGHT_BITS:
        return {"ours": Method("ours", _in_float8)}
    found = {"ours": methods.ours()}
    if case.kind == "document":
        found["table"] = Method("table", _by_table)
    return found


def _ends(work: Work) -> Tensor:
    """Where the documents of a packed case begin and end, int32 [documents + 1]."""
    return torch.tensor(uneven(work.keys), dtype=torch.int32, device=work.device)


def _packed(work: Work, given: Given) -> Attend:
    """Attention over packed documents, of one sequence [1, H, T, D] that holds them all."""
    ends = _ends(work)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        out: Tensor = tilewise.attention_varlen(
            q, k, v, ends, ends, mask=masks.causal(), backend=work.backend
        )
        return out.transpose(0, 1)[None]

    return attend


def _in_float8(work: Work, given: Given) -> Attend:
    """Attention of the tensors in float8 e4m3, whatever it is called with."""
    pairs = [quantised(x) for x in (given.q, given.k, given.v)]
    (q, k, v), scales = (x for x, _ in pairs), [scale for _, scale in pairs]
    names = ("q_scale", "k_scale", "v_scale")
    keywords: dict[str, Any] = dict(zip(names, scales, strict=True))
    return lambda *_: tilewise.attention(q, k, v, **keywords, backend=work.backend)


def _by_table(work: Work, given: Given) -> Attend:
    mask = BlockMask.of(work.drawn_mask, work.keys, dtype=given.q.dtype)
    return lambda q, k, v: tilewise.attention(q, k, v, mask=mask, backend=work.backend)


def _peers(setting: Setting, case: Case) -> dict[str, Method]:
    """Return the others by name; FlexAttention, which compiles, is last."""
    found: dict[str, Method] = {}
    if case.mask in ((), _CAUSAL) and not case.score and case.kind != _EIGHT_BITS:
        found |= {name: methods.sdpa(name) for name in ("cudnn", "flash", "efficient")}
    if case.kind == _PACKED:
        found["flash"] = Method("flash", _torch_varlen)
    elif case.kind != _EIGHT_BITS:
        found["plain"] = methods.written_out()
    return found | _flex(setting, case)


def _flex(setting: Setting, case: Case) -> dict[str, Method]:
    """FlexAttention where it can do a case; in the self-test it is not compiled."""
    if case.kind == _EIGHT_BITS:
        return {}
    return {FLEX: methods.flex(compiled=not setting.self_test)}


def _torch_varlen(work: Work, given: Given) -> Attend:
    ends = _ends(work)
    longest = int(ends.diff().max())

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # New in torch, and said differently in each release.
        from torch.nn.attention.varlen import varlen_attn

        call: Any = varlen_attn
        packed = (*(x[0].transpose(0, 1) for x in (q, k, v)), ends, ends, longest, longest)
        try:
            out: Tensor = call(*packed, is_causal=True)
        except TypeError:
            out = call(*packed, window_size=(-1, 0))
        return out.transpose(0, 1)[None]

    return attend


_BUDGET_S = 0.5  # of the rounds of one pass of one case
_OF_A_SELF_TEST = 2  # cases that are prepared: nothing is compiled
_TIMES = 8  # of a call whose bits are compared


class _Tried(NamedTuple):
    """What came of calling every method once: which can be timed, and why the others cannot."""

    attends: dict[str, Attend]
    calls: dict[str, Call]
    first_s: dict[str, float]
    declined: dict[str, str]
    failed: dict[str, str]


def to_prepare(setting: Setting) -> list[str]:
    """Return a job for each timed case."""
    names = [case.name for case in cases(setting.sizes)]
    return names[:_OF_A_SELF_TEST] if setting.self_test else names


def prepare(setting: Setting, job: str) -> Iterator[Row]:
    """Call ours and FlexAttention once; what does not work says so when it is timed."""
    case = find(setting.sizes, job)
    first_s: dict[str, dict[str, float]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of others, about themselves
        for ways in (ours(case), _flex(setting, case)):
            for direction in _directions(case):
                work = setting.work(case, passes=direction)
                found = _attempt(setting, work, draw(work), ways)
                first_s.setdefault(direction, {}).update(found.first_s)
            if setting.scratch and FLEX in ways:
                _marker(setting, case).touch()
    yield Row("prepare", job, values={"first_call_s": first_s})


def to_repeat(setting: Setting) -> list[str]:
    """Return the widest lengths of each kind that has gradients."""
    chosen = [case for case in cases(setting.sizes) if case.passes == "both"]
    return [case.name for case in chosen if case.keys == setting.sizes.lengths[0]]


def repeat(setting: Setting, job: str) -> Iterator[Row]:
    """Output and gradients, every time with the bits of the first."""
    case = find(setting.sizes, job)
    work = setting.work(case)
    given = draw(work)
    attend, leaves = ours(case)["ours"].make(work, given), given.leaves
    first: tuple[torch.Tensor, ...] = ()
    unequal = 0
    for number in range(2 if setting.self_test else _TIMES):
        if number % 2 and not setting.self_test:
            _other_work(setting)
        out = attend(*leaves)
        found = (out.detach(), *torch.autograd.grad(out, leaves, given.grad))
        first = first or found
        unequal += not all(bool((a == b).all()) for a, b in zip(first, found, strict=True))
    setting.synchronize()
    note = f"{unequal} of {_TIMES} times other bits" if unequal else ""
    yield Row("repeat", case.name, "wrong" if unequal else "ok", note, {"times": _TIMES})


def _other_work(setting: Setting) -> None:
    """A matrix product on another stream, so that blocks are given out in another order."""
    size = setting.sizes.matrix // 2
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        a = torch.randn(size, size, device=setting.device, dtype=setting.dtype)
        for _ in range(4):
            a = a @ a


DTYPES = "dtypes"
_OTHER_DTYPES = ("float16", "float32")


def in_other_dtypes(setting: Setting) -> list[str]:
    """Return jobs of the causal case of each width, in the dtypes that other steps do not time."""
    chosen = [case for case in with_goals(setting.sizes) if case.kind == "causal"]
    longest = [case.name for case in chosen if case.keys == setting.sizes.lengths[0]]
    return [f"{dtype} {name}" for dtype in _OTHER_DTYPES for name in longest]


def measure_dtype(setting: Setting, job: str) -> Iterator[Row]:
    """Time a case in a dtype of its own: "float16 D128 causal 16384"."""
    dtype, _, name = job.partition(" ")
    for row in measure(DTYPES, setting, name, getattr(torch, dtype)):
        yield replace(row, name=f"{row.name} {dtype}", values={**row.values, "dtype": dtype})


def measure(
    step: str, setting: Setting, job: str, dtype: torch.dtype | None = None
) -> Iterator[Row]:
    """The forward pass of a case, and where it has one the backward pass, for a step."""
    case = find(setting.sizes, job)
    own, others = ours(case), _peers(setting, case)
    absent: dict[str, str] = {}
    ready = setting.self_test or not setting.scratch or _marker(setting, case).exists()
    if not ready and others.pop(FLEX, None) is not None:
        absent[FLEX] = "its compilation did not end in time"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of others, about themselves
        for direction in _directions(case):
            work = setting.work(case, passes=direction, dtype=dtype or setting.dtype)
            yield Row(step, f"{direction} {job}", *_pass(setting, work, own, others, absent))


def _marker(setting: Setting, case: Case) -> Path:
    """The file that says that FlexAttention is compiled for a case."""
    return Path(setting.scratch) / f"flex {case.name}"


def _pass(
    setting: Setting,
    work: Work,
    own: dict[str, Method],
    others: dict[str, Method],
    absent: dict[str, str],
) -> tuple[Status, str, dict[str, Any]]:
    """Return the status, the note and the values of a row."""
    given = draw(work)
    tried = _attempt(setting, work, given, own)
    status, note = _verdict(work, given, tried)  # before matrices of others take the memory
    beside = _attempt(setting, work, given, others)
    calls = {name: call for name, call in tried.calls.items() if status == "ok" or name not in OURS}
    values = {
        "direction": work.passes,
        "kind": work.kind,
        "head_dim": work.head_dim,
        "length": work.keys,
        "unit": "TB/s" if work.kind == _DECODED else "TFLOP/s",
        "amount": amount(work),
        "absent": absent | (tried.declined | beside.declined) | (tried.failed | beside.failed),
        "samples_s": setting.race(calls | beside.calls, _BUDGET_S),
    }
    return status, note, values


def _verdict(work: Work, given: Given, tried: _Tried) -> tuple[Status, str]:
    """Return whether ours ran at all, and was exact."""
    for name in OURS:
        if name in tried.failed:
            return "error", f"{name}: {tried.failed[name]}"
    for name in OURS:
        if name in tried.attends:
            attend = tried.attends[name]
            if work.kind == _EIGHT_BITS:
                complaint = _fault_in_float8(given, attend)
            else:
                complaint = compare(work, given, attend).complaint
            if complaint:
                return "wrong", f"{name}: {complaint}"
    if "ours" in tried.declined:
        return "unsupported", tried.declined["ours"]
    return "ok", ""


def _fault_in_float8(given: Given, attend: Attend) -> str:
    """Return what is wrong with sampled rows of the last head in float8; "" if nothing."""
    found, rows = attend(given.q, given.k, given.v), sampled(given.q.shape[2])
    pairs = [quantised(x) for x in given.leaves]
    (q, k, v), scales = (x[-1:, -1:] for x, _ in pairs), [scale[-1:] for _, scale in pairs]
    plain, oracle = references(cut(q, rows), k, v, Scales(*scales))
    return judge(cut(found[-1:, -1:], rows), plain.out, oracle.out).fault("out")


def _attempt(setting: Setting, work: Work, given: Given, ways: dict[str, Method]) -> _Tried:
    found = _Tried({}, {}, {}, {}, {})

    def first(name: str, method: Method) -> None:
        attend = method.make(work, given)
        call = call_of(work, given, attend)
        call()
        found.attends[name], found.calls[name] = attend, call

    for name, method in ways.items():
        if why := method.why_not(work) or too_large(method.bytes(work), work.device):
            found.failed[name] = why
            continue
        try:
            found.first_s[name] = seconds_of(lambda: first(name, method), setting.timer)  # noqa: B023
        except Unsupported as error:
            found.declined[name] = in_short(error)
        except Exception as error:
            found.failed[name] = in_short(error)
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()
    return found
