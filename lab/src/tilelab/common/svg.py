"""Figures drawn by matplotlib, as SVG that belongs to the page: its fonts and its colours.

matplotlib draws with marker colours. ``finish`` replaces each marker by a CSS variable, replaces
fonts by classes, drops font sizes in points (the page decides) and makes every id unique within the
page.
"""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import matplotlib
import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

_POINTS_PER_INCH = 72
_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # letters stay letters: they can be selected, searched and restyled
    "svg.hashsalt": "tilewise",  # the same figure gives the same bytes
    "font.family": "DejaVu Sans",  # comes with matplotlib: nothing is looked up on the machine
    "font.size": 12.5,
    "path.simplify_threshold": 0.2,
}
# Of pictures in documents: letters become paths, and look the same in every viewer.
_STYLE_OF_FILES: dict[Any, Any] = {
    "svg.hashsalt": "tilewise",
    "font.family": "DejaVu Sans",
    "svg.fonttype": "path",
}

# Colours that no figure shows: each stands for a variable of report.css.
INK, SOFT, RULE, CARD = "#000001", "#000002", "#000003", "#000004"
BETTER, WORSE = "#000005", "#000006"
ARM_COLOURS = 8  # the baseline and seven more; after them they come round again, dashed
_DASHES: tuple[str | tuple[int, tuple[float, ...]], ...] = ("solid", (0, (4, 2)), (0, (1, 1.4)))
PART_COLOURS = tuple(f"#0000c{index}" for index in range(5))
_VARIABLES = {
    INK: "--ink",
    SOFT: "--soft",
    RULE: "--rule",
    CARD: "--card",
    BETTER: "--better",
    WORSE: "--worse",
    **{f"#0000a{index}": f"--arm-{index}" for index in range(ARM_COLOURS)},
    **{colour: f"--part-{index}" for index, colour in enumerate(PART_COLOURS)},
}


def arm_colour(index: int) -> str:
    """Return the marker colour of an arm; 0 is the baseline."""
    return f"#0000a{0 if index == 0 else (index - 1) % (ARM_COLOURS - 1) + 1}"


def arm_dashes(index: int) -> str | tuple[int, tuple[float, ...]]:
    """Return the line style of an arm: solid, dashed where the colours repeat, then dotted."""
    return _DASHES[max(index - 1, 0) // (ARM_COLOURS - 1) % len(_DASHES)]


@contextmanager
def house_style() -> Iterator[None]:
    """Figures that are made within look like the page; what matplotlib knew before comes back."""
    with matplotlib.rc_context(_STYLE):
        yield


@contextmanager
def plotted(path: Path, size: tuple[float, float], *grid: int, **options: Any) -> Iterator[Any]:
    """Yield axes, and write them as an SVG file that stands alone: the same bytes every time."""
    with matplotlib.rc_context(_STYLE_OF_FILES):
        figure = Figure(figsize=size, layout="constrained")
        yield figure.subplots(*grid, **options)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": "tilewise"})


def canvas(width: float, height: float) -> Figure:
    """Return an empty figure, in units of which a line of text is some 16 high."""
    figure = Figure(figsize=(width / _POINTS_PER_INCH, height / _POINTS_PER_INCH), frameon=False)
    FigureCanvasSVG(figure)
    return figure


def place(figure: Figure, left: float, bottom: float, right: float, top: float) -> Axes:
    """Axes with margins of a fixed size, so that figures beside each other line up."""
    width, height = (inches * _POINTS_PER_INCH for inches in figure.get_size_inches())
    across, up = width - left - right, height - bottom - top
    axes = figure.add_axes((left / width, bottom / height, across / width, up / height))
    quiet(axes)
    return axes


def quiet(axes: Axes) -> None:
    """Only what is needed to read a value: hairlines across, a base line, soft numbers."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(RULE)
    axes.tick_params(length=0, pad=6, colors=SOFT, which="both")
    axes.tick_params(axis="x", pad=8, which="both")
    axes.grid(axis="y", color=RULE, linewidth=1)
    axes.set_axisbelow(True)


def beside(
    axes: Axes, at: tuple[float, float], words: str, gap: float = 6, colour: str = INK
) -> None:
    """Words to the right of the end of a bar."""
    axes.annotate(
        words,
        at,
        xytext=(gap, 0),
        textcoords="offset points",
        va="center",
        color=colour,
        annotation_clip=False,
    )


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places for labels, as near as may be to where they are wanted, none closer than ``gap``.

    They lie from ``low`` to ``high``, in the order of ``wanted``, and closer where they do not all
    fit. By least squares: less the gaps below, they are an isotonic regression of what is wanted.
    """
    from scipy.optimize import isotonic_regression  # half a second, where something is drawn

    if len(wanted) < 2:
        return [min(max(each, low), high) for each in wanted]
    below = min(gap, (high - low) / (len(wanted) - 1)) * np.arange(len(wanted))
    order, places = np.argsort(wanted, kind="stable"), np.empty(len(wanted))
    fitted = isotonic_regression(np.take(wanted, order) - below).x
    places[order] = fitted.clip(low, high - below[-1]) + below
    found: list[float] = places.tolist()
    return found


class LineEnd(NamedTuple):
    """The end of a line, for its label."""

    name: str
    place: int  # among the lines: the colour
    x: float  # of the last point
    y: float
    broken: bool = False  # it ends because a run diverged
    strong: bool = True  # whether the label is bold


LABEL_GAP = 19.0  # between the middles of two labels
LONGEST_LABEL = 15  # letters; the table has the whole name


def label_ends(axes: Axes, ends: Sequence[LineEnd], longest: int = LONGEST_LABEL) -> None:
    """Names beside the frame, level with the ends of the lines, moved apart where they would touch.

    The axes have the limits that they will keep, and a margin on the right.
    """
    low, high = axes.get_ylim()
    right = axes.get_xlim()[1]
    frame = axes.get_window_extent()
    width, height = (side * _POINTS_PER_INCH / axes.figure.dpi for side in frame.size)
    levels = [min(max(each.y, low), high) for each in ends]
    ends_of = axes.transData.transform([(right, level) for level in levels])
    heights = [float(y) for _, y in axes.transAxes.inverted().transform(ends_of)]
    places = spread(heights, LABEL_GAP / height, 0.0, 1.0)
    for each, level, wanted, at in zip(ends, levels, heights, places, strict=True):
        colour = arm_colour(each.place)
        if not each.broken and each.x < right:  # it has ended; its loss stays what it is
            axes.plot(
                [each.x, right],
                [level, level],
                color=colour,
                linewidth=1.1,
                linestyle=(0, (1, 3)),
                alpha=0.8,
                zorder=2,
            )
        name = short_name(each.name, longest)
        leader = {
            "arrowstyle": "-",
            "color": colour,
            "linewidth": 0.8,
            "alpha": 0.6,
            "shrinkA": 2,
            "shrinkB": 6,
            "relpos": (0, 0.5),
        }
        axes.annotate(
            f"{name} \N{MULTIPLICATION SIGN}" if each.broken else name,
            xy=(each.x if each.broken else right, level),
            xytext=(1 + 13 / width, at),
            textcoords="axes fraction",
            color=colour,
            weight="bold" if each.strong else "normal",
            va="center",
            parse_math=False,
            annotation_clip=False,
            arrowprops=leader if each.broken or abs(at - wanted) * height >= 5 else None,
        )


def short_name(name: str, most: int) -> str:
    """Return the name of an arm in a figure: ``dro+dec+wsd+muo`` still says which factors are on.

    ``most`` counts letters, 7 or more.
    """
    if len(name) <= most:
        return name
    parts = name.split("+")
    longest = (most + 1) // len(parts) - 1
    if len(parts) == 1 or longest < 2:
        return f"{name[: most - 1]}\N{HORIZONTAL ELLIPSIS}"
    while sum(len(part[: longest + 1]) + 1 for part in parts) <= most + 1:
        longest += 1  # short parts leave room to the long ones
    return "+".join(part[:longest] for part in parts)


def finish(figure: Figure, name: str, summary: str) -> Markup:
    """Return the figure as an ``<svg>`` element for the page.

    ``name`` is unique in the page, of letters, digits and dashes. ``summary`` is the figure in a
    sentence, for those who cannot see it.
    """
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with house_style():
        figure.savefig(buffer, format="svg", metadata=nothing, transparent=True)
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    root = ElementTree.fromstring(buffer.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith(("}style", "}metadata")):
                parent.remove(child)
    used = set(re.findall(r"(?:url\(|href=\")#([^)\"]+)", buffer.getvalue()))
    for element in root.iter():
        _belong(element, name, used)
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.set("role", "img")
    root.set("aria-label", summary)
    text = ElementTree.tostring(root, encoding="unicode")
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return Markup(text)  # made here from numbers and from texts that ElementTree has escaped


def style_sheet() -> str:
    """Return the style sheet of every page and figure."""
    return resources.files("tilelab.common").joinpath("house.css").read_text("utf-8")


def page_of(package: str, **values: Any) -> str:
    """Return a page that loads nothing, from a template that escapes every text from outside.

    The package's folder ``templates`` has ``page.html``. ``values`` are names in it; ``style`` is
    the style sheet.
    """
    environment = Environment(
        loader=PackageLoader(package),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(style=Markup(style_sheet()), **values)


def standalone(drawing: Markup) -> str:
    """Return a figure of ``finish`` as a file, with the page's card and light or dark colours."""
    colours, _, _ = style_sheet().partition("\n* {")
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawing)
    assert box is not None
    width, height = box.groups()
    inside = (
        f"<style>{colours} svg {{ font: 12.5px system-ui, sans-serif; }}</style>"
        f'<rect width="{width}" height="{height}" rx="14" style="fill: var(--card)"/>'
    )
    start = drawing.index(">") + 1
    opening = f'{drawing[: start - 1]} width="{width}" height="{height}">'
    return f"{opening}{inside}{drawing[start:]}\n"


def _belong(element: ElementTree.Element, name: str, used: Collection[str]) -> None:
    """Make one element the page's: unique ids where any are needed, classes for fonts."""
    if element.get("id") not in used:
        element.attrib.pop("id", None)
    for key in ("id", "clip-path", f"{{{_XLINK}}}href"):
        value = element.get(key)
        if value is not None:
            element.set(key, re.sub(r"^(url\(#|#|)", rf"\g<1>{name}-", value))
    if element.get("transform", "").startswith("rotate(-0 "):
        del element.attrib["transform"]
    if element.tag == f"{{{_SVG}}}text":
        style = element.get("style", "")
        if re.search(r"font(?:-weight)?: *(?:bold|[67]00)", style):
            element.set("class", "strong")
        element.set("style", re.sub(r"font(?:-[a-z]+)?:[^;]*(;|$)", "", style).strip("; "))
