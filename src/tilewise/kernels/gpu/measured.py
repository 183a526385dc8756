"""Blocks that were measured on the chip: whether they fit, and what there is to say of them."""

from __future__ import annotations

import torch

from tilewise.kernels.gpu.config import (
    FAMILIES,
    FUSED,
    KINDS,
    MEASURED,
    WIDTHS,
    Config,
    Pass,
    place_of,
    shared_need,
    table_blocks,
)
from tilewise.plan.tuned import STORE, Entry, Found, shown
from tilewise.problem import Problem

_INTERPRETER = "interpreter"


def chip_of(device: torch.device) -> str:
    """The name of the chip of a device, as its maker gives it; the CPU's is the interpreter."""
    if device.type == "cpu":
        return _INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    return str(properties.name or getattr(properties, "gcnArchName", ""))


def measured_on(chip: str, family: str) -> Found:
    """Return the measured blocks of a chip; the file is read at the first call."""
    return STORE.find(chip, family, why_unfit)


def why_unfit(family: str, entry: Entry) -> str:
    """Return why the blocks of an entry cannot be taken on a family; "" if they can."""
    (pass_name, dtype, width, kind), blocks = entry.place, entry.blocks
    for what, value, known in (
        ("pass", pass_name, MEASURED),
        ("width", width, WIDTHS),
        ("kind", kind, KINDS),
    ):
        if value not in known:
            return f"{what} {value!r} is none of {', '.join(str(each) for each in known)}"
    name: Pass = next(each for each in MEASURED if each == pass_name)
    if name == "fused" and (
        blocks != FUSED.get((family, width)) or kind != "plain" or dtype.itemsize != 2
    ):
        return f"there is no fused backward of {dtype}, width {width}, kind {kind} in {blocks}"
    need = shared_need(name, blocks, dtype.itemsize, width, width)
    if need > FAMILIES[family].shared_bytes:
        most = FAMILIES[family].shared_bytes
        return f"{blocks} need {need} bytes of shared memory, {family} has {most}"
    least = Config(family).splitting().least
    if name == "decode" and least % blocks.keys:
        return f"{blocks} do not divide a split of {least} keys"
    table = table_blocks(family, entry.place)
    if table != entry.table_blocks:
        return f"the table now has {table}, and they were compared with {entry.table_blocks}"
    return ""


def origin(config: Config, pass_name: Pass, problem: Problem) -> str:
    """Where the blocks of a pass for a problem come from, in words."""
    if any(name == pass_name for name, _ in config.overrides):
        return "blocks that were asked for"
    found = config.measured
    entry = found.entries.get(place_of(pass_name, problem))
    file = "" if found.path is None else shown(found.path)
    if entry is not None:
        other = "two kernels" if pass_name == "fused" else f"the table's {entry.table_blocks}"
        gain = f"{entry.ratio:.2f} times as fast as {other}"
        return f"blocks measured by tilewise tune on {found.date} ({gain}), from {file}"
    if found.refusal:
        return f"blocks of the table; {file} is not used: {found.refusal}"
    if found.path is not None:
        return f"blocks of the table; {file} has no faster ones"
    return "blocks of the table"
