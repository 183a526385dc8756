"""Lower captured tensors to the form that kernels read, checked against the call's extents.

Kernels then see only these:

* lengths: int64 [B], contiguous.
* ids: int64 [B|1, S].
* boolean masks and biases: 4-D views [B|1, Hq|1, M|1, N|1] whose broadcast dimensions keep size 1.
* slopes: [B|1, Hq] in float32 (float64 for float64).

Lowering a lowered tensor returns it as it is. Every step on a bias is a differentiable torch
operation, so autograd reduces and reshapes its gradient.
"""

from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from tilewise.checks import FLOATING, INTEGERS, check_tensor
from tilewise.errors import InvalidArgument, Unsupported
from tilewise.torch_private import is_batched, without_wrappers
from tilewise.variants.float8 import output_dtype
from tilewise.variants.program import BY_USER, EXPR, RAW, Instr, Number, Program

# Up to this many values a Python list is quicker to search than a tensor.
_LIST_LIMIT = 512
_FIRST = 4  # the code of a dimension whose index is the constant 0
_LARGEST_SINGLE = torch.finfo(torch.float32).max / 2
_LARGEST_WIDE = torch.finfo(torch.float64).max / 2


class Extent(NamedTuple):
    """What captured tensors are broadcast against."""

    # Both: B (sequences in a variable-length call) and Hq.
    batch: int
    heads: int
    # Both: M and N; the longest sequence's in a variable-length call, and 0 where that is not known
    # yet (while tracing).
    queries: int
    keys: int
    # A variable-length call: captured dimensions may then be longer than needed.
    ragged: bool = False
    # Both: the keys and queries of each sequence, where lengths are checked one by one.
    key_counts: tuple[int, ...] = ()
    query_counts: tuple[int, ...] = ()
    check_values: bool = True  # whether values may be read (false for fake and device tensors)

    @classmethod
    def of_sequences(
        cls, heads: int, query_counts: tuple[int, ...], key_counts: tuple[int, ...]
    ) -> "Extent":
        """Return the extent of a variable-length call with so many queries and keys in each."""
        return cls(
            len(query_counts),
            heads,
            max(query_counts, default=0),
            max(key_counts, default=0),
            ragged=True,
            key_counts=key_counts,
            query_counts=query_counts,
        )


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums, lse, slopes and sinks: float32, and float64 for float64."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def largest_factor(dtype: torch.dtype) -> float:
    """The largest scale or cap: times log2(e) (kernels count in powers of 2) it still is finite."""
    return _LARGEST_WIDE if dtype is torch.float64 else _LARGEST_SINGLE


def check_cap(name: str, cap: float, dtype: torch.dtype, none: str = "") -> None:
    """A cap and its reciprocal are finite in the type computed in; ``none`` ends the error."""
    largest = largest_factor(dtype)
    if not 2 / largest <= cap <= largest:
        required = f"a cap from {2 / largest:.2g} to {largest:.2g} for {dtype} (computed in "
        required += f"{statistics_dtype(dtype)}){none}"
        raise InvalidArgument(name, str(cap), required)


def check_caps(program: Program, dtype: torch.dtype) -> None:
    """The caps of a score are ones that the type computed in has."""
    for instr in program:
        if instr.op == "softcap":
            check_cap("score (softcap)", float(instr.params[0]), dtype)


def lower_mask(
    program: Program,
    captured: tuple[Tensor, ...],
    extent: Extent,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, ...]:
    """The captured tensors of a mask in kernel form, in slot order (``dtype`` is the query's).

    Raises:
        InvalidArgument: a tensor does not broadcast, lies elsewhere, or a length is out of range.
    """
    lowered = list(captured)
    for instr in program:
        for position, slot in enumerate(instr.slots):
            tensor = captured[slot]
            _check_device(_mask_name(instr, position), tensor, device)
            if instr.op == EXPR:
                lowered[slot] = _element(tensor, dtype)
            elif instr.op in ("blocks", "tiles"):
                lowered[slot] = lower_table(instr, position, tensor, extent, dtype)
            elif instr.params and instr.params[0] == BY_USER:
                lowered[slot] = _as_indexed(instr, position, tensor, extent)
            elif instr.op == "below":
                lowered[slot] = _lengths(tensor, extent)
            elif instr.op == "same_document":
                lowered[slot] = _ids(tensor, position, extent)
            else:
                if tensor.dtype is not torch.bool:
                    raise InvalidArgument("mask", f"a tensor of {tensor.dtype}", "torch.bool")
                lowered[slot] = _four_dims("mask", tensor, extent)
    return tuple(lowered)


def lower_score(
    program: Program,
    captured: tuple[Tensor, ...],
    extent: Extent,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, ...]:
    """The captured tensors of a score in kernel form, in slot order (``dtype`` is the query's).

    Raises:
        InvalidArgument: a tensor does not broadcast, lies elsewhere, or requires a gradient that
            is not defined.
        Unsupported: a tensor of a raw score requires a gradient.
    """
    lowered = list(captured)
    for instr in program:
        for slot in instr.slots:
            tensor = captured[slot]
            name = "score (alibi slopes)" if instr.op == "alibi" else f"score ({instr.op})"
            _check_device(name, tensor, device)
            if instr.op == EXPR:
                lowered[slot] = _element(tensor, dtype)
                continue
            if instr.op == RAW:
                lowered[slot] = _as_given(str(instr.params[0]), tensor)
                continue
            if instr.params and instr.params[0] == BY_USER:
                tensor = _arranged(tensor, instr.params[1:], extent)
                tensor = tensor[..., 0, 0] if instr.op == "alibi" else tensor
            if instr.op == "alibi":
                lowered[slot] = _slopes(tensor, extent, dtype)
            else:
                lowered[slot] = _four_dims("score (bias)", _bias_dtype(tensor, dtype), extent)
    return tuple(lowered)


def _as_given(name: str, tensor: Tensor) -> Tensor:
    """A tensor of a raw score: its functions read it as it is."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise Unsupported(
            f"the raw score {name!r} has no gradient with respect to a tensor that it is given",
            fix="pass tensor.detach(); what is to be learnt goes into a score of the language of "
            "variants, before or after it in the list",
        )
    if tensor.is_complex():
        required = "real or integer numbers, or booleans"
        raise InvalidArgument("score (raw)", f"a tensor of {tensor.dtype}", required)
    return tensor.detach().resolve_neg()


def _element(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor whose elements an expression reads: booleans, int64, or the statistics' floats."""
    if tensor.dtype is torch.bool:
        return tensor
    if tensor.dtype.is_floating_point:
        return tensor.to(statistics_dtype(dtype)).resolve_neg()
    return tensor.to(torch.int64)


def _as_indexed(instr: Instr, position: int, tensor: Tensor, extent: Extent) -> Tensor:
    """A tensor that a user's mask indexes, as the kernels of the built-in ones read it."""
    if instr.op == "below":
        return _reaching(tensor, 0, extent.batch).to(torch.int64).contiguous()
    if instr.op == "same_document":
        ids = tensor[None] if tensor.dim() == 1 else tensor
        size = (extent.queries, extent.keys)[position]
        if ids.shape[0] > 1:
            ids = _reaching(ids, 0, extent.batch)
        return (_reaching(ids, 1, size) if size else ids).to(torch.int64)
    return _arranged(tensor, instr.params[1:], extent)


def _arranged(tensor: Tensor, axes: Sequence[Number], extent: Extent) -> Tensor:
    """Return a 4-D view [B|1, Hq|1, M|1, N|1] of a tensor that the positions ``axes`` index."""
    codes = [int(axis) for axis in axes]
    if tensor.dim() != len(codes):
        raise InvalidArgument(
            "mask or score", f"a tensor of {tensor.dim()} dimensions", f"{len(codes)}, as indexed"
        )
    for dim in reversed(range(len(codes))):
        if codes[dim] == _FIRST:
            tensor = tensor.select(dim, 0)
            del codes[dim]
    tensor = tensor.permute(sorted(range(len(codes)), key=codes.__getitem__))
    sizes = (extent.batch, extent.heads, extent.queries, extent.keys)
    for axis, size in enumerate(sizes):
        if axis not in codes:
            tensor = tensor.unsqueeze(axis)
        elif not extent.ragged or (size and not (axis > 1 and tensor.shape[axis] >= size)):
            # A size of 0 may be unknown in a ragged extent; in any other nothing is read.
            tensor = _reaching(tensor, axis, size)
    return tensor


def _reaching(tensor: Tensor, dim: int, size: int) -> Tensor:
    """``size`` elements along a dimension: the first ones, the last one again where they end."""
    held = tensor.shape[dim]
    if held == size:
        return tensor
    if held > size:
        return tensor.narrow(dim, 0, size)
    if held == 1:
        return tensor.expand(*(size if at == dim else -1 for at in range(tensor.dim())))
    if held == 0:  # there is nothing to read: 0
        return tensor.new_zeros([*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]])
    places = torch.arange(size, device=tensor.device).clamp_(max=held - 1)
    return tensor.index_select(dim, places)


def _mask_name(instr: Instr, position: int) -> str:
    if instr.op == "same_document":
        return "mask (document query_ids)" if position == 0 else "mask (document ids)"
    return "mask (lengths)" if instr.op == "below" else "mask"


def _check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise InvalidArgument(name, f"a tensor on {tensor.device}", f"on q's device, {device}")
    if tensor.layout is not torch.strided:
        came, fix = f"a tensor of layout {tensor.layout}", "Pass tensor.to_dense()."
        raise InvalidArgument(name, came, "layout torch.strided", fix)


def _lengths(tensor: Tensor, extent: Extent) -> Tensor:
    if tensor.dtype is not torch.int64 or tensor.shape != (extent.batch,):
        required = f"an integer tensor [B] with B = {extent.batch}"
        check_tensor("mask (lengths)", tensor, required, INTEGERS, shape=(extent.batch,))
    if extent.check_values:
        _check_length_values(tensor, extent)
    return tensor.to(torch.int64).contiguous()


def _check_length_values(tensor: Tensor, extent: Extent) -> None:
    batched = is_batched(tensor)
    tensor = without_wrappers(tensor)
    if extent.key_counts and not batched:
        for index, (length, keys) in enumerate(
            zip(tensor.tolist(), extent.key_counts, strict=True)
        ):
            if not 0 <= length <= keys:
                raise InvalidArgument(
                    "mask (lengths)",
                    f"{length} for sequence {index}",
                    f"in [0, {keys}], the keys of that sequence",
                )
        return
    if tensor.numel() == 0:
        return
    if tensor.numel() <= _LIST_LIMIT:
        values = tensor.flatten().tolist()
        low, high = min(values), max(values)
    else:
        low, high = (int(bound) for bound in tensor.aminmax())
    keys = max(extent.key_counts, default=extent.keys)
    if low < 0 or high > keys:
        wrong = low if low < 0 else high
        raise InvalidArgument(
            "mask (lengths)",
            f"the length {wrong}",
            f"every length in [0, N] with N = {keys}",
        )


def _ids(tensor: Tensor, position: int, extent: Extent) -> Tensor:
    name, letter, size = (
        ("mask (document query_ids)", "M", extent.queries)
        if position == 0
        else ("mask (document ids)", "N", extent.keys)
    )
    form = f"an integer tensor [{letter}] or [B, {letter}]"
    if tensor.dtype is not torch.int64 or tensor.dim() != 2:
        check_tensor(name, tensor, form, INTEGERS, dims=(1, 2))
    if tensor.dim() == 1:
        tensor = tensor[None]
    rows, columns = tensor.shape
    fits = columns >= size if extent.ragged else columns == size
    if not fits or (rows != 1 and rows != extent.batch):
        fix = "Pass query_ids= to document() when M and N differ." if position == 0 else ""
        raise InvalidArgument(
            name,
            f"shape {tuple(tensor.shape)}",
            f"{form} with B = {extent.batch}, {letter} = {size}"
            + (" or more" if extent.ragged else ""),
            fix,
        )
    return tensor if tensor.dtype is torch.int64 else tensor.to(torch.int64)


def _slopes(tensor: Tensor, extent: Extent, dtype: torch.dtype) -> Tensor:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise InvalidArgument(
            "score (alibi slopes)",
            "a tensor that requires grad",
            "no gradient: ALiBi's slopes are constants here",
            "Pass slopes.detach(); a learned additive term is scores.bias(tensor).",
        )
    check_tensor("score (alibi slopes)", tensor, "a floating tensor", FLOATING)
    if tensor.dim() == 1:
        tensor = tensor[None]
    if (
        tensor.dim() != 2
        or tensor.shape[1] != extent.heads
        or tensor.shape[0] not in (1, extent.batch)
    ):
        raise InvalidArgument(
            "score (alibi slopes)",
            f"shape {tuple(tensor.shape)}",
            f"[Hq] or [B, Hq] with B = {extent.batch}, Hq = {extent.heads}",
        )
    return tensor.detach().to(statistics_dtype(dtype)).resolve_neg()


def _bias_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Kernels read biases in the output's dtype or in the dtype of the statistics."""
    if tensor.dtype is not output_dtype(dtype):
        check_tensor("score (bias)", tensor, "a floating tensor", FLOATING)
        tensor = tensor.to(statistics_dtype(dtype))
    return tensor.resolve_neg()


def _four_dims(name: str, tensor: Tensor, extent: Extent) -> Tensor:
    missing = 4 - tensor.dim()
    if missing > 0:
        tensor = tensor[(None,) * missing]
    if missing < 0:
        raise InvalidArgument(name, f"shape {tuple(tensor.shape)}", "at most four dimensions")
    sizes = tensor.shape
    full = (extent.batch, extent.heads, extent.queries, extent.keys)
    for dim in range(4):
        size = sizes[dim]
        if size == full[dim] or size == 1 or (extent.ragged and dim > 1 and size >= full[dim]):
            continue
        raise InvalidArgument(
            name,
            f"shape {tuple(sizes[missing:])}",
            f"broadcastable to [B, Hq, M, N] = {list(full)}"
            + (" (M, N: the longest sequence's, or more)" if extent.ragged else ""),
            _with_four_dims(tuple(sizes[missing:]), full),
        )
    return tensor


def _with_four_dims(shape: tuple[int, ...], full: tuple[int, int, int, int]) -> str:
    """Say how to write a tensor of one row or one matrix for each batch item."""
    batch, _, queries, keys = full
    if shape == (batch, keys):
        return "If it is padding [B, N], write x[:, None, None, :]."
    return "If it is [B, M, N], write x[:, None]." if shape == (batch, queries, keys) else ""


def lower_table(
    instr: Instr, position: int, tensor: Tensor, extent: Extent, dtype: torch.dtype
) -> Tensor:
    """A table, or the lengths of the sequences that it is for, as it is, if it is for this call."""
    if position == 0:
        _check_shape(instr, tensor, extent)
        if instr.op == "tiles":
            _check_sizes(instr, extent, dtype)
        return tensor
    counts = (extent.query_counts, extent.key_counts)[position - 1]
    if counts and tensor.tolist() != list(counts):
        which = ("queries", "keys")[position - 1]
        _wrong(f"one for sequences of {tensor.tolist()} {which}", str(list(counts)))
    return tensor


def _check_shape(instr: Instr, tensor: Tensor, extent: Extent) -> None:
    wanted = torch.bool if instr.op == "blocks" else torch.uint8
    if tensor.dim() != 4 or tensor.dtype is not wanted:
        _wrong(f"a table {list(tensor.shape)} of {tensor.dtype}", f"4 dimensions of {wanted}")
    block_queries, block_keys = (int(size) for size in instr.params[:2])
    rows, columns = -(-extent.queries // block_queries), -(-extent.keys // block_keys)
    fits = all(
        size == least or (extent.ragged and size > least)
        for size, least in zip(tensor.shape[2:], (rows, columns), strict=True)
    )
    batch, heads = tensor.shape[:2]
    if not fits or batch not in (1, extent.batch) or heads not in (1, extent.heads):
        _wrong(
            f"a table {list(tensor.shape)}",
            f"[1 or {extent.batch}, 1 or {extent.heads}, {rows}, {columns}]"
            + (" or more rows and columns" if extent.ragged else ""),
        )


def _check_sizes(instr: Instr, extent: Extent, dtype: torch.dtype) -> None:
    if (len(instr.slots) == 3) != extent.ragged:
        kinds = ("one for sequences of one length", "one for a variable-length call")
        _wrong(kinds[len(instr.slots) == 3], kinds[extent.ragged])
    _, _, batch, heads, queries, keys, width = instr.params
    if not extent.ragged and (queries, keys) != (extent.queries, extent.keys):
        _wrong(f"one for M = {queries}, N = {keys}", f"M = {extent.queries}, N = {extent.keys}")
    for name, made, now in (("B", batch, extent.batch), ("Hq", heads, extent.heads)):
        if made not in (0, now):
            _wrong(f"one for {name} = {made}", f"{name} = {now}")
    floats = statistics_dtype(dtype)
    if width not in (0, 1 + (floats is torch.float64)):
        _wrong("one of a mask that computes in other floats", f"dtype={dtype}")


def _wrong(came: str, required: str) -> NoReturn:
    raise InvalidArgument(
        "mask (BlockMask)", came, required, "Make it with BlockMask.of for this call's sizes."
    )
