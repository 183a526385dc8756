"""The batching rule of the Functions of ``autograd.py``: vmap and batched gradients.

A vmapped dimension of V calls is folded into the batch, with the masks and captured tensors: one
call for all. In some cases that would be a different call:

* packed sequences;
* sinks or tensors of raw scores that differ from call to call;
* dropout, which drops the same pairs in each call (torch's randomness="same").

Then the rule makes the calls one by one and stacks their results.

Within a rule, the tensors may belong to an outer vmap. The Function is applied again, so vmaps
nest.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.engine.call import Call
from tilewise.engine.dispatch import plan_of
from tilewise.plan import Plan
from tilewise.problem import Problem
from tilewise.torch_private import has_batch, left_alone, with_batch, without_batch
from tilewise.variants.graphs import Role, folded, roles

Apply = Callable[..., tuple[Tensor, ...]]
_STATS = 2  # the place of stats among rows


class Given(NamedTuple):
    """Tensors of one kind among the arguments of a Function."""

    tensors: Sequence[Any]  # None where there is none
    # The vmapped dimension of each; None where it is the same for all calls.
    dims: Sequence[int | None]


NONE = Given((), ())


class _Part(NamedTuple):
    """The same with the vmapped dimension first, where ``flags`` says that there is one."""

    tensors: list[Any]
    flags: list[bool]

    def of_call(self, index: int) -> list[Any]:
        return [x.select(0, index) if flag else x for x, flag in zip(*self, strict=True)]


@left_alone
def applied(
    apply: Apply,
    call: Call,
    needs: tuple[bool, ...] | None,
    rows: Sequence[Any],
    u: Sequence[Any],
    x: Sequence[Any],
) -> tuple[Tensor, ...]:
    """Apply a Function, also to tensors of ``torch.autograd.grad(..., is_grads_batched=True)``.

    The arguments are those of ``batched``.
    """
    tensors = (*rows, *u, *x)
    if not any(y is not None and has_batch(y) for y in tensors):
        return apply(*((call,) if needs is None else (call, needs)), *tensors)
    parts = [
        Given(*zip(*map(without_batch, part), strict=True)) if part else NONE
        for part in (rows, u, x)
    ]
    calls = next(
        y.shape[0] for part in parts for y, at in zip(*part, strict=True) if at is not None
    )
    found = batched(apply, calls, call, needs, *parts)
    return tuple([with_batch(y, at) for y, at in zip(*found, strict=True)])


@left_alone
def batched(
    apply: Apply,
    calls: int,
    call: Call,
    needs: tuple[bool, ...] | None,
    rows: Given,
    u: Given,
    x: Given,
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Return the results of all calls, and their vmapped dimensions, as a vmap rule does.

    ``apply`` takes ``call``, ``needs`` and the tensors. ``needs`` says for each leaf whether the
    Function returns its gradient; None where it returns rows. ``rows`` have a row for each of the
    output's: out, lse and stats or none of the three, and cotangents or none. ``u`` are the
    tangents of the leaves, or none, and ``x`` the tensors of the call.
    """
    head = (call,) if needs is None else (call, needs)
    parts = [_front(each) for each in (rows, u, x)]
    alike = _alike(call, needs, parts[1], parts[2])
    if alike is None:
        found = [
            apply(*head, *(y for part in parts for y in part.of_call(at))) for at in range(calls)
        ]
        if not found:  # the shapes of the results are those of any call
            blank = [[_blank(y, f) for y, f in zip(*part, strict=True)] for part in parts]
            some = apply(*head, *(y for part in blank for y in part))
            return tuple([y.new_empty((0, *y.shape)) for y in some]), (0,) * len(some)
        stacked = tuple([torch.stack(each) for each in zip(*found, strict=True)])
        return stacked, (0,) * len(stacked)
    return _fold(apply, calls, call, needs, parts, alike)


def _front(given: Given) -> _Part:
    pairs = zip(*given, strict=True)
    moved = [x if x is None or at is None else x.movedim(at, 0) for x, at in pairs]
    return _Part(moved, [at is not None for at in given.dims])


def _blank(tensor: Any, flag: bool) -> Any:
    return tensor.new_zeros(tensor.shape[1:]) if flag else tensor


def _roles(call: Call, count: int) -> tuple[Role, ...]:
    """Return the role of each of ``count`` tensors of a call."""
    problem, masks = call.plan.problem, call.masks
    of_scores = roles(problem.score, count - 6 - masks)
    every: tuple[Role, ...] = ("each", "each", "each", "fixed", "fixed", "fixed")
    return (*every, *roles(problem.mask, masks), *of_scores)


def _alike(
    call: Call, needs: tuple[bool, ...] | None, u: _Part, x: _Part
) -> list[tuple[Role, bool]] | None:
    """Return the role of each tensor of a call, and whether it differs from call to call.

    A leaf does if its tangent does, or if each call has a gradient of its own for it. None where
    the calls cannot be folded.
    """
    problem = call.plan.problem
    if problem.layout != "dense" or problem.dropout_p:
        return None
    of_leaves = [flag or bool(needs and needs[at]) for at, flag in enumerate(u.flags)]
    if not of_leaves:
        of_leaves = list(needs or (False,) * len(call.leaves(x.flags)))
    varied = [bool(a or b) for a, b in zip(x.flags, call.spread(of_leaves), strict=True)]
    found = list(zip(_roles(call, len(varied)), varied, strict=True))
    return None if any(role == "fixed" and differs for role, differs in found) else found


def _fold(
    apply: Apply,
    calls: int,
    call: Call,
    needs: tuple[bool, ...] | None,
    parts: list[_Part],
    alike: list[tuple[Role, bool]],
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Return the results of one call of the whole batch."""
    rows, u, x = parts
    batch = call.plan.problem.batch
    of_leaves = call.leaves(alike)
    of_rows = [("each", True, int(at == _STATS)) for at in range(len(rows.tensors))]
    hows: list[Any] = [*of_rows, *of_leaves[: len(u.tensors)], *alike]
    given = [pair for part in parts for pair in zip(*part, strict=True)]
    tensors = [
        y if y is None else _folded(y, flag, calls, batch, *how)
        for (y, flag), how in zip(given, hows, strict=True)
    ]
    whole = Call(_plan(call, calls, alike), call.seed, call.masks, call.origin)
    head = (whole,) if needs is None else (whole, needs)
    found = apply(*head, *tensors)
    if needs is None:
        apart = [
            y.unflatten(int(at == _STATS), (calls, batch))  # type: ignore[no-untyped-call]
            for at, y in enumerate(found)
        ]
        return tuple(apart), tuple([int(at == _STATS) for at in range(len(apart))])
    leaves = zip(call.leaves(x.tensors), call.leaves(x.flags), of_leaves, needs, strict=True)
    wanted = [(y, flag, role) for y, flag, (role, _), need in leaves if need]
    apart = []
    for grad, (leaf, flag, role) in zip(found, wanted, strict=True):
        if role != "indexed":
            grad = grad.unflatten(0, (calls, batch))  # type: ignore[no-untyped-call]
            if role == "full" and leaf.shape[int(flag)] != batch:
                grad = grad.sum(1, keepdim=True)  # of the batch items that share it
        apart.append(grad)
    return tuple(apart), (0,) * len(apart)


def _folded(
    tensor: Tensor,
    flag: bool,
    calls: int,
    batch: int,
    role: Role,
    varied: bool,
    dim: int = 0,
) -> Tensor:
    """Return a tensor of the folded call.

    ``flag``: it has the vmapped dimension, which is first. ``varied``: it is to differ from call to
    call. ``dim`` is that of the batch, without the vmapped one.
    """
    shared = role == "full" and tensor.shape[0] == 1  # by all batch items
    if role == "fixed" or (not varied and (role == "indexed" or shared)):
        return tensor
    if not flag:
        tensor = tensor.expand(calls, *tensor.shape)
    if role == "indexed":
        return tensor
    if role == "full" and tensor.shape[1] != batch:
        tensor = tensor.expand(-1, batch, *tensor.shape[2:])
    together = tensor.movedim(0, dim).flatten(dim, dim + 1)
    # Lengths and statistics lie in one piece wherever kernels read them.
    return together.contiguous() if together.dim() < 4 or dim else together


def _plan(call: Call, calls: int, alike: list[tuple[Role, bool]]) -> Plan:
    """Return the plan of the folded call, by the same backend."""
    problem, first = call.plan.problem, 6 + call.masks
    varied = [role == "indexed" and differs for role, differs in alike]
    programs = []
    for program, flags in ((problem.mask, varied[6:first]), (problem.score, varied[first:])):
        slots = frozenset([slot for slot, flag in enumerate(flags) if flag])
        programs.append(folded(program, problem.batch, calls, slots))
    whole: Problem = problem._replace(
        batch=calls * problem.batch, mask=programs[0], score=programs[1]
    )
    return plan_of(whole, call.plan.backend)
