"""The page of ``tilewise explain``: an explanation as one HTML file that loads nothing."""

from __future__ import annotations

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from tilelab.common.svg import INK, RULE, SOFT, arm_colour, beside, canvas, finish, page_of, place
from tilewise.chips import Chip
from tilewise.errors import InvalidArgument
from tilewise.inspect.answer import Answer, Question
from tilewise.plan.traffic import Account
from tilewise.plan.traffic.count import Traffic, balance, merged
from tilewise.plan.traffic.report import amount, lead

_WIDTH = 680.0
_OURS = "tilewise, "
_Rows = list[tuple[str, str, str, str]]  # an operand, its pass, and what it reads and writes


def _ways(account: Account) -> dict[str, Traffic]:
    return {
        f"{_OURS}forward": account.forward.ours,
        "plain, forward": account.forward.plain,
        f"{_OURS}backward": account.backward.ours,
        "plain, backward": account.backward.plain,
    }


def _colour(way: str) -> str:
    return arm_colour(int(way.startswith(_OURS)))


def draw_roofline(account: Account, chip: Chip) -> Markup:
    """Operations per second against operations per byte that reaches memory, both logarithmic."""
    ridge, peak = balance(chip, account.dtype), chip.peak(account.dtype) or 1.0
    points = []
    for way, traffic in _ways(account).items():
        seconds = account.seconds(traffic, chip).total
        reaching = account.reaching(traffic, chip)
        if seconds and reaching.bytes:
            points.append((way, reaching.intensity, traffic.flops / seconds))
    reached = [ridge, *(x for _, x, _ in points)]
    left, right = min(reached) / 8, max(reached) * 8
    figure = canvas(_WIDTH, 360)
    axes = place(figure, 92, 52, 24, 18)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left, right)
    low = min([peak * left / ridge, *(y for _, _, y in points)])
    axes.set_ylim(low / 2, peak * 3)
    axes.plot([left, ridge, right], [peak * left / ridge, peak, peak], color=INK, linewidth=1.6)
    axes.plot([ridge, ridge], [low / 2, peak], color=RULE, linewidth=1, linestyle=(0, (3, 3)))
    for way, x, y in points:
        colour = _colour(way)
        axes.plot([x], [y], marker="o", markersize=8, color=colour, linewidth=0, clip_on=False)
        under = (0, -20) if "backward" in way else (0, 12)
        shift = under if way.startswith(_OURS) else (10, -6)  # right of points on the slope
        axes.annotate(
            way,
            (x, y),
            xytext=shift,
            textcoords="offset points",
            ha="left" if shift[0] else "center",
            color=colour,
            annotation_clip=False,
        )
    _logarithmic(axes)
    axes.set_xlabel("operations for a byte of memory traffic", color=SOFT, labelpad=7)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: amount(y, "FLOP/s")))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    said = "; ".join(f"{way}: {x:.3g} FLOP/B, {amount(y, 'FLOP/s')}" for way, x, y in points)
    return finish(figure, "roofline", f"Roofline of {chip.name}, ridge at {ridge:.3g}. {said}")


def draw_bars(account: Account, chip: Chip | None) -> Markup:
    """Draw the bytes that reach memory, a bar for each way and direction, on a logarithmic axis."""
    found = {
        way: (account.reaching(traffic, chip) if chip else traffic).bytes
        for way, traffic in _ways(account).items()
    }
    figure = canvas(_WIDTH, 60 + 40 * len(found))
    axes = place(figure, 152, 44, 92, 8)
    least = max(1, min(found.values()))
    axes.set_xscale("log")
    axes.set_xlim(least / 4, max(2 * least, *found.values()) * 1.5)
    for row, (way, size) in enumerate(found.items()):
        long = max(size, 1) - least / 4
        axes.barh(row, long, left=least / 4, height=0.6, color=_colour(way))
        beside(axes, (max(size, least / 4), row), amount(size))
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=RULE, linewidth=1)
    _logarithmic(axes)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: amount(x)))
    axes.set_xlabel("bytes to and from memory", color=SOFT, labelpad=7)
    said = "; ".join(f"{way} {amount(size)}" for way, size in found.items())
    return finish(figure, "bars", f"Memory traffic. {said}")


def _logarithmic(axes: Axes) -> None:
    """Labels at powers of ten only."""
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())


def page(question: Question, found: Answer) -> str:
    """Return the page."""
    account, chip = found.account, found.chip
    roofline: Markup | None = None
    missing = "Nothing here can do this call."
    if account is not None:
        missing = "The chip is not in the table."
        if chip is not None:
            try:
                roofline = draw_roofline(account, chip)
            except InvalidArgument as error:
                missing = f"{error.came}. {error.fix}"
    batch, heads, queries, head_dim = question.queries
    return page_of(
        "tilelab.explain",
        lead="" if account is None else lead(account, chip),
        title=f"{batch} x {heads} x {queries} x {head_dim}",
        chip="" if chip is None else chip.name,
        source="" if chip is None else chip.source,
        text=found.text,
        notes=question.notes,
        roofline=roofline,
        missing=missing,
        bars=None if account is None else draw_bars(account, chip),
        tables={} if account is None else _tables(account),
    )


def _tables(account: Account) -> dict[str, _Rows]:
    """Return the passes of each way, by its title."""
    found = {}
    for way, traffic in _ways(account).items():
        who, direction = way.split(", ")
        found[f"{direction.capitalize()}, {who}"] = _rows(traffic)
    return found


def _rows(traffic: Traffic) -> _Rows:
    rows = [
        (
            operand.name,
            each.name,
            amount(operand.read) if operand.read else "",
            amount(operand.written) if operand.written else "",
        )
        for each in traffic.passes
        for operand in merged(each.operands)
    ]
    return [*rows, ("all", "", amount(traffic.read), amount(traffic.written))]
