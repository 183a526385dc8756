"""The eager path's autograd, over a plan's two kernels: one gradient, and everything beyond it.

A torch custom op in Python costs 10 to 25 us a call, so eager calls come here: to ``Attention``, if
they want one gradient. ``ops.py`` serves torch.compile and export over the same kernels.

Beyond that there are four Functions that are one another's derivatives. With x the operands
(q, k, v, sinks, score tensors), u tangents of x, c cotangents of (out, lse):

    Attend(x)          out, lse
    Gradients(x, c)    J(x)^T c                          the plan's backward kernel
    Tangents(x, u)     J(x) u                            reference/derivatives.py, for every backend
    Second(x, u, c)    the gradient by x of <c, J(x) u>  reference/derivatives.py, for every backend

    function    its gradient, for cotangents                 its tangent, for tangents
    Attend      Gradients(x, c)                              Tangents(x, u)
    Gradients   by x: Second(x, w, c); by c: Tangents(x, w)  Gradients(x, c') + Second(x, u, c)
    Tangents    by x: Second(x, u, c); by u: Gradients(x, c) refused
    Second      by u: Second(x, w, c); by x and c: refused   likewise

They have ``setup_context``, so torch.func transforms nest over them in any order. That costs some
microseconds a call. So plain eager calls come to them only from the backward of ``Attention``.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from tilewise.engine.batching import NONE, Given, applied, batched
from tilewise.engine.call import Call, Tensors, flat, leaves_of, needs_of, split, wanted
from tilewise.engine.modes import readable, refuse_beyond_first, transforms_active
from tilewise.errors import Unsupported
from tilewise.plan import Plan
from tilewise.problem import Operands, Result, Statistics
from tilewise.torch_private import has_batch


def differentiable(operands: Operands, plan: Plan, statistics: Statistics = "") -> Result:
    """Run a plan's forward so that autograd knows its backward; operands are ``for_backward``."""
    call = Call(plan, operands.seed, len(operands.mask_tensors), operands.origin)
    return Result(
        *Attention.apply(call, statistics, operands, *flat(operands))  # type: ignore[no-untyped-call]
    )


class Attention(torch.autograd.Function):
    """Attention over the flat tensors of a call; gradients of its leaves."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, statistics: Statistics, operands: Operands, *x: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Run the kernel and keep what its backward reads."""
        ctx.call = call
        # An lse that nobody used then comes back as None and costs the kernel nothing.
        ctx.set_materialize_grads(False)
        result: Result = call.plan.forward(operands, statistics)
        out, lse, stats = result[:3]
        ctx.save_for_backward(out, lse, stats, *x)
        if not statistics:
            ctx.mark_non_differentiable(stats)
            return out, lse, stats
        fixed = [x for x in (stats, result.max_logit, result.top_key) if x is not None]
        ctx.mark_non_differentiable(*fixed)
        return tuple(result)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *rest: Any) -> Any:
        """Return the gradients that autograd requests, in the order of forward's arguments."""
        # Those of stats, max_logit, entropy and top_key, as far as the call had them.
        grad_entropy = rest[2] if len(rest) > 1 else None
        call: Call = ctx.call
        saved = ctx.saved_tensors
        (out, lse, stats), x = saved[:3], saved[3:]
        needs = call.leaves(ctx.needs_input_grad[3:])
        several = any(each is not None and has_batch(each) for each in (grad_out, grad_lse, *rest))
        if several or torch.is_grad_enabled() or transforms_active():
            # With create_graph, or inside of transforms: the gradients have derivatives too.
            if grad_entropy is not None:
                raise Unsupported(
                    "tilewise has no second derivative and no batched gradient of the entropy",
                    fix="use the mathematics in plain torch where its gradient is differentiated; "
                    "ask for one gradient after the other",
                )
            found = _gradients(call, needs, (out, lse, stats[:2]), (grad_out, grad_lse), x)
            return (None, None, None, *call.spread(found))
        grad_out = torch.zeros_like(out) if grad_out is None else readable(grad_out)
        if grad_lse is not None:
            grad_lse = readable(grad_lse)
        if grad_entropy is not None:
            grad_entropy = readable(grad_entropy)
        grads = call.plan.backward(
            call.operands(x),
            Result(out, lse, stats),
            grad_out,
            grad_lse,
            needs_of(needs),
            grad_entropy,
        )
        return (None, None, None, *call.spread(leaves_of(grads)))


def attend(operands: Operands, plan: Plan) -> Result:
    """Run a plan's forward inside of transforms or of a forward-mode level."""
    call = Call(plan, operands.seed, len(operands.mask_tensors), operands.origin)
    return Result(*Attend.apply(call, *flat(operands)))  # type: ignore[no-untyped-call]


def _gradients(
    call: Call, needs: Sequence[bool], result: Tensors, cotangents: Tensors, x: Tensors
) -> list[Tensor | None]:
    """``Gradients`` of the leaves that are needed, None for the others.

    ``needs`` has a flag for each leaf, ``result`` out, lse and stats; ``cotangents`` are of out and
    lse, None for zero.
    """
    if not any(needs):
        return [None] * len(needs)
    # Derivatives are taken through x: of the result only the values count.
    out, lse, stats = (tensor.detach() for tensor in result if tensor is not None)
    grad_out, grad_lse = cotangents
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    found = iter(
        applied(Gradients.apply, call, tuple(needs), (out, lse, stats, grad_out, grad_lse), (), x)
    )
    return [next(found) if need else None for need in needs]


def _seconds(
    call: Call, needs: Sequence[bool], cotangents: Tensors, u: Tensors, x: Tensors
) -> list[Tensor | None]:
    """``Second`` of the leaves that are needed, None for the others."""
    if not any(needs) or all(tangent is None for tangent in u):
        return [None] * len(needs)
    refuse_beyond_first(call.plan.problem.score)
    found = iter(applied(_fenced, call, tuple(needs), cotangents, u, x))
    return [next(found) if need else None for need in needs]


def _fenced(call: Call, needs: tuple[bool, ...], *tensors: Any) -> tuple[Tensor, ...]:
    """``Second`` of which the cotangents and the operands have no derivative."""
    u, x = split(call, tensors[2:])
    fenced = Fence.apply(*tensors[:2], *x)  # type: ignore[no-untyped-call]
    found: tuple[Tensor, ...] = Second.apply(  # type: ignore[no-untyped-call]
        call, needs, *fenced[:2], *u, *fenced[2:]
    )
    return found


def _tangents(call: Call, result: Tensors, u: Tensors, x: Tensors) -> tuple[Tensor, Tensor]:
    """``Tangents`` of out and lse."""
    refuse_beyond_first(call.plan.problem.score)
    out, lse, stats = (tensor.detach() for tensor in result if tensor is not None)
    out, lse = applied(Tangents.apply, call, None, (out, lse, stats), u, x)
    return out, lse


def _keep(ctx: Any, tensors: Tensors) -> None:
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)
    # What nobody used then comes as None and costs nothing.
    ctx.set_materialize_grads(False)


def _plain_arithmetic(call: Call) -> torch.autocast:
    return torch.autocast(call.plan.problem.device, enabled=False)


def _toward(operands: Operands, u: Sequence[Any]) -> Operands:
    from tilewise.reference.jets import direction

    q, k, v, sinks, *score_tensors = u
    return direction(operands, q, k, v, sinks, score_tensors)


def _refuse(what: str, fix: str) -> NoReturn:
    raise Unsupported(f"tilewise has no {what}", fix=fix)


class Attend(torch.autograd.Function):
    """Attention inside of transforms: out, lse and stats."""

    @staticmethod
    def forward(call: Call, *x: Tensor | None) -> tuple[Tensor, ...]:
        """Run the plan's forward kernel."""
        out, lse, stats, *_ = call.plan.forward(call.operands(x)._replace(for_backward=True))
        return out, lse, stats

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep everything."""
        ctx.call, *x = inputs
        ctx.mark_non_differentiable(output[2])
        _keep(ctx, (*output, *x))

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: Any) -> Any:
        """``Gradients``."""
        call, (out, lse, stats, *x) = ctx.call, ctx.saved_tensors
        needs = call.leaves(ctx.needs_input_grad[1:])
        grads = _gradients(call, needs, (out, lse, stats), (grad_out, grad_lse), x)
        return (None, *call.spread(grads))

    @staticmethod
    def jvp(ctx: Any, _: None, *moves: Tensor | None) -> Any:
        """``Tangents``."""
        call, (out, lse, stats, *x) = ctx.call, ctx.saved_tensors
        return (*_tangents(call, (out, lse, stats), call.leaves(moves), x), None)

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], call: Call, *x: Tensor | None) -> Any:
        """The calls in one."""
        return batched(Attend.apply, info.batch_size, call, None, NONE, NONE, Given(x, dims[1:]))


class Gradients(torch.autograd.Function):
    """The gradients by the needed leaves, as a function of the operands and the cotangents."""

    @staticmethod
    def forward(
        call: Call,
        needs: tuple[bool, ...],
        out: Tensor,
        lse: Tensor,
        stats: Tensor,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        *x: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Run the plan's backward kernel."""
        grad_out = readable(grad_out)
        grad_lse = None if grad_lse is None else readable(grad_lse)
        result = Result(out, lse, stats)
        grads = call.plan.backward(call.operands(x), result, grad_out, grad_lse, needs_of(needs))
        return wanted(call, grads, needs, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep everything but the gradients."""
        ctx.call, ctx.needs, *tensors = inputs
        _keep(ctx, tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        """``Second`` by the operands, ``Tangents`` by the cotangents."""
        call, (out, lse, stats, grad_out, grad_lse, *x) = ctx.call, ctx.saved_tensors
        came = iter(cotangents)
        u = [next(came) if need else None for need in ctx.needs]
        needs_out, needs_lse, *needs_x = ctx.needs_input_grad[5:]
        grads = _seconds(call, call.leaves(needs_x), (grad_out, grad_lse), u, x)
        by_out = by_lse = None
        if needs_out or needs_lse:
            by_out, by_lse = _tangents(call, (out, lse, stats), u, x)
        return (
            *(None,) * 5,
            by_out if needs_out else None,
            by_lse if needs_lse else None,
            *call.spread(grads),
        )

    @staticmethod
    def jvp(ctx: Any, *moves: Tensor | None) -> Any:
        """``Gradients`` of what the cotangents move by, and ``Second`` of what the operands do."""
        call, (out, lse, stats, grad_out, grad_lse, *x) = ctx.call, ctx.saved_tensors
        move_out, move_lse, *move_x = moves[5:]
        parts = [_seconds(call, ctx.needs, (grad_out, grad_lse), call.leaves(move_x), x)]
        if move_out is not None or move_lse is not None:
            parts.append(_gradients(call, ctx.needs, (out, lse, stats), (move_out, move_lse), x))
        found = []
        for need, leaf, *terms in zip(ctx.needs, call.leaves(x), *parts, strict=True):
            if need:
                there = [term for term in terms if term is not None]
                found.append(sum(there[1:], there[0]) if there else torch.zeros_like(leaf))
        return tuple(found)

    @staticmethod
    def vmap(
        info: Any, dims: tuple[Any, ...], call: Call, needs: Any, *tensors: Tensor | None
    ) -> Any:
        """The calls in one."""
        rows, x = Given(tensors[:5], dims[2:7]), Given(tensors[5:], dims[7:])
        return batched(Gradients.apply, info.batch_size, call, needs, rows, NONE, x)


class Tangents(torch.autograd.Function):
    """The tangents of out and lse, as a function of the operands and their tangents."""

    @staticmethod
    def forward(
        call: Call, out: Tensor, lse: Tensor, stats: Tensor, *rest: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Walk over the tiles."""
        from tilewise.reference.derivatives import tangents  # few calls want them

        u, x = split(call, rest)
        operands = call.operands(x)
        with _plain_arithmetic(call):
            return tangents(call.plan.problem, operands, _toward(operands, u))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep everything but the tangents of out and lse."""
        ctx.call, *tensors = inputs
        _keep(ctx, tensors)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        """``Second`` by the operands, ``Gradients`` by the tangents."""
        call, (out, lse, stats, *rest) = ctx.call, ctx.saved_tensors
        u, x = split(call, rest)
        needs_u, needs_x = split(call, ctx.needs_input_grad[4:])
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        cotangents = (grad_out, grad_lse)
        by_u = _gradients(call, needs_u, (out, lse, stats), cotangents, x)
        by_x = _seconds(call, call.leaves(needs_x), cotangents, u, x)
        return (*(None,) * 4, *by_u, *call.spread(by_x))

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        """Refuse."""
        _refuse(
            "tangent of a tangent (torch.func.jvp inside of jvp) yet",
            "let one of the two be reverse mode: torch.func.grad or vjp, inside or outside",
        )

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], call: Call, *tensors: Tensor | None) -> Any:
        """The calls in one."""
        (u, x), (u_dims, x_dims) = split(call, tensors[3:]), split(call, dims[4:])
        parts = (Given(tensors[:3], dims[1:4]), Given(u, u_dims), Given(x, x_dims))
        return batched(Tangents.apply, info.batch_size, call, None, *parts)


class Second(torch.autograd.Function):
    """The gradient by the needed leaves of the cotangents times the tangents of out and lse."""

    @staticmethod
    def forward(
        call: Call,
        needs: tuple[bool, ...],
        grad_out: Tensor,
        grad_lse: Tensor | None,
        *rest: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Walk over the tiles."""
        from tilewise.reference.derivatives import second

        u, x = split(call, rest)
        operands = call.operands(x)
        toward = _toward(operands, u)
        problem = call.plan.problem
        with _plain_arithmetic(call):
            grads = second(problem, operands, toward, grad_out, grad_lse, needs_of(needs))
        return wanted(call, grads, needs, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep everything but the gradients."""
        ctx.call, ctx.needs, *tensors = inputs
        _keep(ctx, tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        """Use ``Second`` again by the tangents, since the Hessian is symmetric; fence the rest."""
        call, (grad_out, grad_lse, *rest) = ctx.call, ctx.saved_tensors
        u, x = split(call, rest)
        needs_u, _ = split(call, ctx.needs_input_grad[4:])
        came = iter(cotangents)
        w = [next(came) if need else None for need in ctx.needs]
        by_u = _seconds(call, needs_u, (grad_out, grad_lse), w, x)
        # The fence takes these for what they are: a sign that a third derivative is wanted.
        signs = [
            tensor.new_zeros(()).expand(tensor.shape) if need else None
            for tensor, need in zip(ctx.saved_tensors, ctx.needs_input_grad[2:], strict=True)
        ]
        return (None, None, *signs[:2], *by_u, *signs[2 + len(u) :])

    @staticmethod
    def jvp(ctx: Any, *moves: Tensor | None) -> Any:
        """``Second`` of what the tangents move by; the fence lets nothing else move."""
        call, (grad_out, grad_lse, *rest) = ctx.call, ctx.saved_tensors
        _, x = split(call, rest)
        moves_u, _ = split(call, moves[4:])
        found = _seconds(call, ctx.needs, (grad_out, grad_lse), moves_u, x)
        return tuple(grad for grad, need in zip(found, ctx.needs, strict=True) if need)

    @staticmethod
    def vmap(
        info: Any, dims: tuple[Any, ...], call: Call, needs: Any, *tensors: Tensor | None
    ) -> Any:
        """The calls in one."""
        (u, x), (u_dims, x_dims) = split(call, tensors[2:]), split(call, dims[4:])
        parts = (Given(tensors[:2], dims[2:4]), Given(u, u_dims), Given(x, x_dims))
        return batched(Second.apply, info.batch_size, call, needs, *parts)


class Fence(torch.autograd.Function):
    """Passes tensors on; a derivative through here would be a third one, and is refused.

    autograd calls only nodes that lead to the requested gradients. So it does not come here when
    ``Second`` is differentiated by its tangents alone (``torch.autograd.functional.hvp``).
    """

    @staticmethod
    def forward(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        """The tensors as they are."""
        return tuple(None if tensor is None else tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """Keep nothing."""

    @staticmethod
    def vmap(_: Any, dims: tuple[int | None, ...], *tensors: Tensor | None) -> Any:
        """The tensors as they are, as a function of no batch."""
        return Fence.apply(*tensors), dims  # type: ignore[no-untyped-call]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Refuse."""
        _refuse_third()

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        """Refuse."""
        _refuse_third()


def _refuse_third() -> NoReturn:
    _refuse(
        "third derivative",
        "use the mathematics in plain torch where a second derivative is differentiated again",
    )
