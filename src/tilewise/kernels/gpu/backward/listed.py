"""The backward pass of key lists, in place: dQ by the lists, dK and dV by inverse lists.

A batch item of the problem is one list: its block table names the keys, and its rows share them.

* dQ, and the gradients of what a score captures, are the walks of ``passes`` and ``captured`` over
  keys in pages.
* dK and dV have a program for each tile of keys in memory. The **inverse list** of a tile has the
  lists that name a key of it, in ascending order. So every sum has one owner and a fixed order, and
  nothing is added atomically.

Where pages are as long as tiles or longer, a list names all of a tile or nothing: the inverse lists
are of pages. Elsewhere they are of tiles. The kernel then finds which keys of a tile a list names
by comparing them with the next keys of the list, which rise.

Inverse lists take one number for each key of a list, or one for each page. They are made on the
device by a stable sort, and no value is read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels import Places
from tilewise.kernels.gpu import Launch
from tilewise.kernels.gpu.backward import Backward
from tilewise.kernels.gpu.backward.captured import captured_launches
from tilewise.kernels.gpu.backward.gradients import (
    heads_at,
    held_pair,
    key_step,
    numbers_of,
    store_sums,
)
from tilewise.kernels.gpu.backward.passes import query_launch
from tilewise.kernels.gpu.backward.rows import row_launches
from tilewise.kernels.gpu.config import Blocks, listed_blocks
from tilewise.kernels.gpu.walk.forms import wide
from tilewise.kernels.gpu.walk.tiles import COUNTS, head_of, keys_in, launch_of
from tilewise.problem import Grads, Operands, Problem


class Inverse(NamedTuple):
    """Which lists name a key of each unit: a tile of keys in memory, or a page.

    Args:
        starts: int64 [units + 1], where the entries of each unit begin in ``order``.
        order: int32 or int64, entries of the units in turn, rising in each: ``item * N`` plus the
            place in the list of the first key that is in the unit. After the last unit's entries
            there are numbers without a meaning.
        unit: keys of a unit.
        of_line: units of a head.
        whole: whether a list names all of a tile or nothing.
    """

    starts: Tensor
    order: Tensor
    unit: int
    of_line: int
    whole: bool


def inverse_of(operands: Operands, places: Places, problem: Problem, tile: int) -> Inverse:
    """Return the inverse lists of a call for tiles of ``tile`` keys; no value is read.

    Args:
        operands: with the lengths of the lists.
        places: where their keys lie.
        problem: of the call; its lists have no more than ``keys`` keys.
        tile: keys of a tile.
    """
    assert operands.key_lengths is not None
    step = problem.page_size if problem.page_size % tile == 0 else 1
    unit = step if step > 1 else tile
    outer, heads, rows = places.k.shape[:3]
    of_line = -(-rows // unit)
    units = outer * heads * of_line
    inner = places.inner[:, ::step]
    at = torch.arange(0, problem.keys, step, device=inner.device)
    # The widths of integers follow from sizes alone, so nothing waits for a value.
    number = inner.div(unit, rounding_mode="floor")
    number = number + (places.lines * of_line)[:, None].to(_integer(units))
    there = at < operands.key_lengths[:, None]
    if step == 1:
        there[:, 1:] &= number[:, 1:] != number[:, :-1]
    number = torch.where(there, number, units).flatten()
    found, order = number.sort(stable=True)
    starts = torch.searchsorted(found, torch.arange(units + 1, device=found.device).to(found.dtype))
    if step > 1:
        slots = inner.shape[1]
        order = order.div(slots, rounding_mode="floor") * problem.keys + order % slots * step
    order = order.to(_integer(problem.batch * problem.keys))
    return Inverse(starts, order, unit, of_line, step > 1)


def _integer(most: int) -> torch.dtype:
    return torch.int32 if most < 2**31 else torch.int64


@triton.jit(do_not_specialize=COUNTS)
def listed_key_kernel(
    call,
    memory,
    sums,
    strides,
    inverse,
    kv_heads,
    stored,
    tiles,
    units,
    queries,
    keys,
    row_tiles,
    plane,
    threshold,
    SCORE: tl.constexpr,
    GAIN: tl.constexpr,
    SEEN: tl.constexpr,
    UNIT: tl.constexpr,
    WHOLE: tl.constexpr,
    FORM: tl.constexpr,
):
    """Add to the sums of one tile of keys and values, over the rows of the lists that name them.

    ``memory`` are all keys and values, ``sums`` those of their gradients, of which one may be None;
    ``strides`` are those of the four. ``inverse`` is (starts, order, inner, lengths of lists);
    ``stored`` counts the keys of a head in memory, ``keys`` the most of a list, ``row_tiles`` the
    tiles of a list's rows. Blocks of pairs are [keys, queries].
    """
    k, v = memory
    k_strides, v_strides = strides[:2]
    starts, order, inner, lengths = inverse
    program = tl.program_id(0)
    line = program // tiles
    n0 = program % tiles * FORM.BN
    outer, head = line // kv_heads, line % kv_heads
    place = starts + (tl.cast(line, tl.int64) * units + n0 // UNIT)
    first = tl.load(place)
    count = (tl.load(place + 1) - first).to(tl.int32) * row_tiles
    if count == 0:
        return
    k_rows = (head_of(k, k_strides, outer, head, 0), k_strides, n0, 0, stored)
    v_rows = (head_of(v, v_strides, outer, head, 0), v_strides, n0, 0, stored)
    own = held_pair((k_rows, v_rows), FORM.BN, True, FORM)
    numbers = numbers_of(call, threshold)
    total_k = tl.full([FORM.BN, FORM.D_PADDED], 0.0, tl.float32)
    total_v = tl.full([FORM.BN, FORM.DV_PADDED], 0.0, tl.float32)
    i = tl.arange(0, FORM.BN)
    for step in range(count):
        entry = tl.load(order + first + step // row_tiles)
        m0 = step % row_tiles * FORM.BM
        b = (entry // keys).to(tl.int32)
        at = (entry % keys).to(tl.int32)
        N = keys_in(lengths, b, keys)
        if WHOLE:
            n = at + n0 % UNIT + i
        else:
            listed = at + i
            named = inner + tl.cast(b, tl.int64) * keys + listed
            named = tl.load(named, mask=listed < N, other=-1)
            same = named[None, :] == (n0 + i)[:, None]
            n = tl.min(tl.where(same, listed[None, :], N), 1)  # N: it is not listed
        n = n[:, None]
        row_heads = heads_at(call, b, 0, 0)
        owned = (b, b * 0, n, queries, N)
        fixed = sums, own, row_heads, owned, (0, queries), numbers, plane
        totals = (total_k, total_v)
        total_k, total_v = key_step(call, totals, fixed, m0, SCORE, GAIN, SEEN, True, FORM)
    place = (outer, head, 0)
    totals = (total_k, total_v)
    store_sums(totals, sums, strides[2:], place, n0, stored, numbers, True, FORM)


def listed_launches(call: Backward, places: Places, grads: Grads) -> list[Launch]:
    """Return the launches of a backward pass of key lists, for tensors on any device.

    Args:
        call: the pass; its problem is paged, with a batch item of one head for each list.
        places: where keys lie, and the sums that their gradients are added to.
        grads: where those of q and of the score go; every element is written.
    """
    config, needs = call.config, call.needs
    chosen = tuple([(name, listed_blocks(config, name, call.problem)) for name in ("dq", "dkdv")])
    config = config._replace(overrides=(*config.overrides, *chosen))
    call = call._replace(config=config)
    launches = row_launches(call, None)
    if places.grad_k is not None or places.grad_v is not None:
        launches.append(_key_launch(call, places, config.blocks("dkdv", call.problem)))
    if needs.q and grads.q is not None:
        launches.append(query_launch(call, grads.q))
    if any(needs.score_tensors):
        launches += captured_launches(call, grads.score_tensors)
    return launches


def _key_launch(call: Backward, places: Places, blocks: Blocks) -> Launch:
    problem, variant = call.problem, call.variant
    inverse = inverse_of(call.operands, places, problem, blocks.keys)
    outer, heads, stored = places.k.shape[:3]
    tiles = -(-stored // blocks.keys)
    shared, form = call.arguments(), call.form("dkdv", blocks)
    arguments = {
        "call": shared["call"],
        "memory": (places.k, places.v),
        "sums": (places.grad_k, places.grad_v),
        "strides": tuple(
            [
                None if tensor is None else tensor.stride()
                for tensor in (places.k, places.v, places.grad_k, places.grad_v)
            ]
        ),
        "inverse": (inverse.starts, inverse.order, places.inner, call.operands.key_lengths),
        "kv_heads": heads,
        "stored": stored,
        "tiles": tiles,
        "units": inverse.of_line,
        "queries": problem.queries,
        "keys": problem.keys,
        "row_tiles": -(-problem.queries // blocks.queries),
        "plane": shared["plane"],
        "threshold": shared["threshold"],
    }
    constants = {
        "SCORE": variant.score,
        "GAIN": variant.gain,
        "SEEN": variant.seen,
        "UNIT": inverse.unit,
        "WHOLE": inverse.whole,
        "FORM": form._replace(
            WIDE=form.WIDE or wide(places[:2], problem, blocks),
            PART=call.config.part("listed", problem),
        ),
    }
    grid = (outer * heads * tiles,)
    return launch_of(listed_key_kernel, grid, arguments, constants, blocks)
