"""docs/compatibility.md says something of every argument.

Of flash-attn, of torch's functions and of the drop-ins of tilewise.nn: every parameter has a row,
and no row is of something that is not there.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch

from tests.conftest import ROOT
from tests.integrations.ring_peers import OWN
from tilewise import nn
from tilewise.compat import flex_attention, sdpa, xformers
from tilewise.compat.xformers.reading import NAMES

FLASH = "`tilewise.compat.flash_attn`"
CACHE = "flash_attn_with_kvcache"
ATTENTION = (
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_kvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_varlen_kvpacked_func",
    CACHE,
)
PASSES = (
    "flash_attn_interface._flash_attn_forward",
    "flash_attn_interface._flash_attn_varlen_forward",
    "flash_attn_interface._flash_attn_backward",
    "flash_attn_interface._flash_attn_varlen_backward",
)
NEWER = "FlashAttention-3 and -4"
THIRD = (
    "version_3.flash_attn_func",
    "version_3.flash_attn_qkvpacked_func",
    "version_3.flash_attn_varlen_func",
    "version_3.flash_attn_with_kvcache",
)
FOURTH = ("cute.flash_attn_func", "cute.flash_attn_varlen_func")
# What the page calls functions of flash-attn where a row is of just these.
GROUPS = {
    "every attention": ATTENTION,
    f"every attention but `{CACHE}`": tuple(name for name in ATTENTION if name != CACHE),
    "every pass": PASSES,
    "every newer attention": (*THIRD, *FOURTH),
    "every newer attention but `cute`": THIRD,
    "every newer attention but packed": (THIRD[0], *THIRD[2:], *FOURTH),
}
FLASH_FUNCTIONS = (
    *ATTENTION,
    *PASSES,
    "bert_padding.unpad_input",
    "bert_padding.unpad_input_for_concatenated_sequences",
    "bert_padding.pad_input",
    "bert_padding.index_first_axis",
    "bert_padding.index_put_first_axis",
    "bert_padding.index_first_axis_residual",
    "layers.rotary.apply_rotary_emb",
    "ops.triton.rotary.apply_rotary",
    "layers.rotary.apply_rotary_emb_qkv_",
    "layers.rotary.apply_rotary_emb_kv_",
    "layers.rotary.RotaryEmbedding",
)
XFORMERS = "`tilewise.compat.xformers`"
XFORMERS_FUNCTIONS = tuple(xformers.fmha.__all__)
# What the page calls functions of xformers where a row is of just these.
GROUPS["every attention of xformers"] = XFORMERS_FUNCTIONS[:-1]
NN = ("MultiheadAttention", "TransformerEncoderLayer", "TransformerDecoderLayer", "convert")
# The functions of each section of the page.
SECTIONS = {
    FLASH: FLASH_FUNCTIONS,
    NEWER: (*THIRD, *FOURTH),
    XFORMERS: (*XFORMERS_FUNCTIONS, *(f"attn_bias.{name}" for name in NAMES)),
    "`torch.nn.functional.scaled_dot_product_attention`": (
        "scaled_dot_product_attention",
        "tilewise.sdpa",
        "tilewise.compat.sdpa.enable",
        "activate_flash_attention_impl",
    ),
    "`torch.nn.attention.flex_attention`": tuple(flex_attention.__all__),
    "Nested tensors": ("attention",),
    "`torch.nn.MultiheadAttention` and the transformer layers": NN,
    "`tilewise.integrations.transformers`": ("AttentionInterface", "AttentionMaskInterface"),
    "`tilewise.integrations.timm`": ("enable", "disable"),
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": sdpa.scaled_dot_product_attention,
    "flex_attention": flex_attention.flex_attention,
    "create_block_mask": flex_attention.create_block_mask,
    "and_masks": flex_attention.and_masks,
    "or_masks": flex_attention.or_masks,
    **{name: getattr(nn, name) for name in NN},
    **{name: getattr(xformers, name) for name in XFORMERS_FUNCTIONS},
}


class Row(NamedTuple):
    """One line of a table."""

    functions: tuple[str, ...]
    argument: str
    state: str


def _rows(section: str) -> Iterator[Row]:
    lines = [line for line in section.splitlines() if line.startswith("|")]
    assert lines[:2] == ["| function | argument | | note |", "|---|---|---|---|"]
    for line in lines[2:]:
        functions, argument, state, _ = (cell.strip() for cell in line.strip("|").split(" | "))
        listed = tuple(re.findall(r"`([^`]+)`", functions))
        yield Row(GROUPS.get(functions, listed), argument.strip("`"), state)


def page() -> dict[str, str]:
    """The text of each section."""
    _, *sections = (ROOT / "docs" / "compatibility.md").read_text().split("\n## ")
    return {each.partition("\n")[0]: each for each in sections}


PAGE = page()
TESTS_OF_PEERS = PAGE.pop("ring-flash-attention and yunchang")
ROWS = {title: list(_rows(text)) for title, text in PAGE.items()}


def test_every_function_has_a_row_and_no_row_is_of_another() -> None:
    assert list(ROWS) == list(SECTIONS)
    for title, rows in ROWS.items():
        assert {name for row in rows for name in row.functions} == set(SECTIONS[title]), title
        for row in rows:
            assert row.functions, row
            assert row.argument
            assert row.state in ("covered", "accepted", "refused")


def test_the_tests_of_ring_libraries_are_those_that_run() -> None:
    """tests/integrations/test_ring_peers.py runs these, and holds them to what a row says."""
    _, _, *rows = [line for line in TESTS_OF_PEERS.splitlines() if line.startswith("|")]
    assert rows == [test.row() for test in OWN]
    for library in ("ring_flash_attn", "yunchang"):
        requirement = (ROOT / ".ci" / f"{library}.txt").read_text().partition("==")
        version = requirement[2].partition("\n")[0]
        assert f"{library.replace('_', '-')} {version}" in TESTS_OF_PEERS


def function(name: str) -> Callable[..., Any]:
    """The function that the table of flash-attn names."""
    module, _, own = f"flash_attn.{name}".rpartition(".")
    module = module.replace("ops.triton", "layers")
    return getattr(import_module(f"tilewise.compat.{module}"), own)


def arguments(row: Row) -> list[str]:
    return [name.partition(" ")[0].partition("=")[0] for name in row.argument.split(", ")]


@pytest.mark.parametrize("name", [*FLASH_FUNCTIONS, *THIRD, *FOURTH])
def test_every_argument_of_flash_attn_has_a_row(name: str) -> None:
    section = FLASH if name in FLASH_FUNCTIONS else NEWER
    rows = [row for row in ROWS[section] if name in row.functions]
    found = [own for row in rows if row.state != "refused" for own in arguments(row)]
    named = {own for row in rows if row.state == "refused" for own in row.argument.split(", ")}
    parameters = inspect.signature(function(name)).parameters
    assert sorted([*found, *named.intersection(parameters)]) == sorted(parameters)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_parameter_of_torch_and_nn_has_a_row(name: str) -> None:
    function = FUNCTIONS[name]
    parameters = set(inspect.signature(function).parameters)
    if isinstance(function, type) and issubclass(function, torch.nn.Module):
        parameters |= set(inspect.signature(function.forward).parameters) - {"self"}
    rows = [row for title, rows in ROWS.items() if title != FLASH for row in rows]
    arguments = [row.argument for row in rows if name in row.functions]
    assert parameters <= set(re.findall(r"\w+", " ".join(arguments)))
