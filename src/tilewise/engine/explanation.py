"""The result of ``tilewise.explain``: why a call runs as it does, and what that costs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch

from tilewise.plan.plan import Plan, Tiles
from tilewise.problem import Problem
from tilewise.variants.formula import mask_formula, score_formula

if TYPE_CHECKING:  # the IO model: imported for those who ask
    from tilewise.chips import Chip
    from tilewise.plan.traffic.account import Account

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
    pages = [("pages", f"of {problem.page_size} keys")] if problem.page_size else []
    if problem.stored is not None:
        stored = str(problem.stored).removeprefix("torch.")
        pages = [("pages", f"of {problem.page_size} keys in {stored}, with a scale for each row")]
    return _aligned(
        (
            ("backend", backend),
            (
                "tiles",
                f"{tiles.query_tile} query rows x {tiles.key_tile} keys, "
                f"{tiles.splits} split" + ("s" if tiles.splits != 1 else ""),
            ),
            ("problem", f"{problem.layout}, {dtype} on {problem.device}, " + ", ".join(sizes)),
            *pages,
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
