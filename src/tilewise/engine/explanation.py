"""The result of ``tilewise.explain``: why a call runs as it does, and what that costs.

It writes masks and scores as formulas: ``s + t0[h, m - n]`` in place of a postfix program.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch

from tilewise.plan import Plan, Tiles
from tilewise.problem import Problem
from tilewise.variants import expr as expressions
from tilewise.variants.expr import Expr, Node
from tilewise.variants.program import BY_USER, EXPR, Instr, decode

if TYPE_CHECKING:  # the IO model: imported for those who ask
    from tilewise.chips import Chip
    from tilewise.plan.traffic import Account

_SIZES = ("batch", "heads", "kv_heads", "queries", "keys", "head_dim", "value_dim")
_WIDTH = 9


class Explanation(NamedTuple):
    """Reasons why a call runs as it does; ``str()`` is for people.

    Args:
        plan: the plan, or None if nothing can do the call.
        reasons: for every backend not chosen, its name and why not.
        notes: what a mask with a table says of it, and what else the chosen backend says of how
            it does the call, as (name, text) pairs.
        account: what the call moves, beside plain attention; None where nothing can do it.
        chip: the row of the chip that the times are for; None where it is not known.
    """

    plan: Plan | None
    reasons: tuple[tuple[str, tuple[str, ...]], ...]
    notes: tuple[tuple[str, str], ...] = ()
    account: Account | None = None
    chip: Chip | None = None

    def __str__(self) -> str:
        found = ["nothing here can do this call"]
        if self.plan is not None:
            plan = self.plan
            texts = plan.mask_text, plan.score_text
            found = described(plan.problem, plan.backend, plan.tiles, *texts)
        found += _aligned(self.notes)
        if self.account is not None:
            from tilewise.plan.traffic.report import lines

            found += _aligned(lines(self.account, self.chip))
        for name, why in self.reasons:
            found.append(f"not {name}:")
            found += [f"  {reason}" for reason in why]
        return "\n".join(found)


def described(
    problem: Problem, backend: str, tiles: Tiles, mask_text: str, score_text: str
) -> list[str]:
    """Return the lines that say what is asked, and how it is done."""
    sizes = [f"{name} {value}" for name, value in zip(_SIZES, problem[:7], strict=True)]
    dtype = str(problem.dtype).removeprefix("torch.")
    pages = [f"of {problem.page_size} keys"] if problem.page_size else []
    if problem.stored is not None:
        stored = str(problem.stored).removeprefix("torch.")
        pages.append(f"in {stored}, with a scale for each row")
    return _aligned(
        (
            ("backend", backend),
            (
                "tiles",
                f"{tiles.query_tile} query rows x {tiles.key_tile} keys, "
                f"{tiles.splits} split" + ("s" if tiles.splits != 1 else ""),
            ),
            ("problem", f"{problem.layout}, {dtype} on {problem.device}, " + ", ".join(sizes)),
            *([("pages", " ".join(pages))] if pages else []),
            ("mask", mask_formula(mask_text) or "none: every pair attends"),
            ("score", score_formula(score_text) or "unchanged"),
            ("scale", f"{problem.scale:g}"),
            ("dropout", f"{problem.dropout_p:g}"),
            ("sinks", "yes" if problem.sinks else "no"),
        )
    )


def _aligned(pairs: Iterable[tuple[str, str]]) -> list[str]:
    return [f"{name:{_WIDTH}} {text}" for name, text in pairs]


def chip_of(device: torch.device) -> Chip | None:
    """Return the row of the chip of a device; None where the table has none."""
    from tilewise.chips import named, row_of

    if device.type == "cpu":
        return named()
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return row_of(
        torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
    )


# Signs with the precedence that they have in Python; an atom has the highest.
_BETWEEN = {
    "lt": ("<", 0),
    "le": ("<=", 0),
    "eq": ("==", 0),
    "ne": ("!=", 0),
    "or": ("|", 1),
    "xor": ("^", 2),
    "and": ("&", 3),
    "shl": ("<<", 4),
    "shr": (">>", 4),
    "add": ("+", 5),
    "sub": ("-", 5),
    "mul": ("*", 6),
    "div": ("/", 6),
    "floordiv": ("//", 6),
    "mod": ("%", 6),
    "pow": ("**", 8),
}
_BEFORE = {"neg": ("-", 7), "not": ("~", 7)}
_COMPARISON, _ATOM = 0, 9
_REPEATABLE = ("add", "mul", "and", "or", "xor")  # a + (b + c) needs no brackets
_AXES = "bhmn0"  # what indexes a dimension of a tensor that a user indexed
_NAMES = {"to_float": "float", "to_int": "int", "min": "minimum", "max": "maximum"}
_LONGEST = 200  # letters of a part; a graph that uses values again and again would be endless

_Text = tuple[str, int]  # a formula and the precedence of its outermost sign


def mask_formula(text: str) -> str:
    """Return the text of a mask's program as a formula of b, h, m, n, M and N.

    ``t0`` is the first tensor that the mask captured. The usual bands have the names that
    ``--mask`` gives them, and other built-in masks their own.
    """
    stack: list[_Text] = []
    for instr in decode(text):
        if instr.op == "tiles":  # it says what is known of the mask before it
            found, _ = stack.pop()
            queries, keys = instr.params[:2]
            stack.append((f"{found}, with a table of tiles of {queries} x {keys}", _ATOM))
        elif instr.op in ("and", "or", "not"):
            count = 1 if instr.op == "not" else 2
            args = stack[-count:]
            del stack[-count:]
            stack.append(_joined(instr.op, args))
        elif instr.op == "band":
            stack.append(_band(*[int(value) for value in instr.params]))
        else:
            stack.append(_leaf(instr))
    return stack[0][0] if stack else ""


def score_formula(text: str) -> str:
    """Return the text of a score's program as formulas, one for each of its steps.

    ``s`` is the score that a step gets, ``t0`` the first tensor that the score captured.
    """
    return ", then ".join(_leaf(instr)[0] for instr in decode(text))


def _band(left: int, right: int, anchor: int) -> _Text:
    """Name the causal mask and windows of the last rows and keys; others are inequalities."""
    if anchor and right == 0:
        return ("causal" if left < 0 else f"causal+window:{left}"), _ATOM
    if anchor and left == right >= 0:
        return f"window:{left}", _ATOM
    row = "m + N - M" if anchor else "m"
    found = [(f"{row} - n <= {left}", _COMPARISON)] if left >= 0 else []
    if right >= 0:
        found.append((f"n - ({row}) <= {right}" if anchor else f"n - m <= {right}", _COMPARISON))
    if not found:
        return "every pair", _ATOM
    return found[0] if len(found) == 1 else _joined("and", found)


def _leaf(instr: Instr) -> _Text:
    """Return an expression as a formula, and a built-in as a call with its tensors."""
    op, params, slots = instr
    if op == EXPR:
        return _formula(expressions.decode(str(params[0])), slots)
    tensors = [f"t{slot}" for slot in slots]
    if slots and params and params[0] == BY_USER:
        axes = [_AXES[int(axis)] for axis in params[1:]]
        tensors = [f"{tensor}[{', '.join(axes)}]" if axes else tensor for tensor in tensors]
        params = ()
    return f"{op}({', '.join([*map(str, params), *tensors])})", _ATOM


def _formula(expr: Expr, slots: tuple[int, ...]) -> _Text:
    """Return an expression as a formula; ``t2[m, n]`` is an element of the tensor in slot 2."""
    texts: list[_Text] = []
    for node in expr.nodes:
        text, level = _node(node, [texts[place] for place in node.args], slots)
        texts.append(("(...)", _ATOM) if len(text) > _LONGEST else (text, level))
    return texts[expr.outputs[0]]


def _node(node: Node, args: list[_Text], slots: tuple[int, ...]) -> _Text:
    if node.op in expressions.LEAVES:
        return node.op, _ATOM
    if node.op.startswith("const_"):
        level = _BEFORE["neg"][1] if repr(node.value).startswith("-") else _ATOM
        return re.sub(r"\.0$", "", repr(node.value)), level
    if node.op.startswith("load_"):
        assert isinstance(node.value, int)
        return f"t{slots[node.value]}[{', '.join(text for text, _ in args)}]", _ATOM
    if node.op in _BETWEEN or node.op in _BEFORE:
        return _joined(node.op, args)
    name = _NAMES.get(node.op, node.op)
    return f"{name}({', '.join(text for text, _ in args)})", _ATOM


def _joined(op: str, args: list[_Text]) -> _Text:
    """Put an operation's sign between its arguments, or before the only one."""
    if op in _BEFORE:
        sign, level = _BEFORE[op]
        return sign + _bracketed(args[0], level), level
    sign, level = _BETWEEN[op]
    left_level = level + (op == "pow" or level == _COMPARISON)
    right_level = level + (op not in _REPEATABLE)
    first, second = _bracketed(args[0], left_level), _bracketed(args[1], right_level)
    return f"{first} {sign} {second}", level


def _bracketed(text: _Text, least: int) -> str:
    return text[0] if text[1] >= least else f"({text[0]})"
