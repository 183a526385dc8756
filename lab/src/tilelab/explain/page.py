"""An explanation as one HTML page that loads nothing."""

from __future__ import annotations

from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from tilelab.common.svg import style_sheet
from tilelab.explain import figures
from tilewise.errors import InvalidArgument
from tilewise.inspect.answer import Asked, Told
from tilewise.plan.traffic.account import Account
from tilewise.plan.traffic.count import Traffic, merged
from tilewise.plan.traffic.words import amount, lead

__all__ = ["page"]


class _Row(NamedTuple):
    """An operand in a pass, in words."""

    name: str
    passed: str
    read: str
    written: str


class _Table(NamedTuple):
    """The passes of one way and direction."""

    title: str
    rows: list[_Row]


def page(asked: Asked, found: Told) -> str:
    """Return the page.

    Args:
        asked: what was asked.
        found: the explanation of it.
    """
    account, chip = found.account, found.chip
    roofline: Markup | None = None
    missing = "Nothing here can do this call."
    if account is not None:
        missing = "The chip is not in the table."
        if chip is not None:
            try:
                roofline = figures.roofline(account, chip)
            except InvalidArgument as error:
                missing = f"{error.came}. {error.fix}"
    environment = Environment(
        loader=PackageLoader("tilelab.explain"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = style_sheet()
    batch, heads, queries, head_dim = asked.queries
    return environment.get_template("page.html").render(
        style=Markup(style),
        lead="" if account is None else lead(account, chip),
        title=f"{batch} x {heads} x {queries} x {head_dim}",
        chip="" if chip is None else chip.name,
        source="" if chip is None else chip.source,
        text=found.text,
        notes=asked.notes,
        roofline=roofline,
        missing=missing,
        bars=None if account is None else figures.bars(account, chip),
        tables=[] if account is None else _tables(account),
    )


def _tables(account: Account) -> list[_Table]:
    directions = (("Forward", account.forward), ("Backward", account.backward))
    return [
        _Table(f"{direction}, {who}", _rows(traffic))
        for direction, comparison in directions
        for who, traffic in (("tilewise", comparison.ours), ("plain", comparison.plain))
    ]


def _rows(traffic: Traffic) -> list[_Row]:
    rows = [
        _Row(
            operand.name,
            each.name,
            amount(operand.read) if operand.read else "",
            amount(operand.written) if operand.written else "",
        )
        for each in traffic.passes
        for operand in merged(each.operands)
    ]
    return [*rows, _Row("all", "", amount(traffic.read), amount(traffic.written))]
