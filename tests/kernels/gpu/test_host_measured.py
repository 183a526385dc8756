"""Measured blocks before the table: for what they are, what is refused, and what is said."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewise
from tilewise import masks, scores
from tilewise.errors import TunedBlocksWarning
from tilewise.kernels.gpu import backend as gpu
from tilewise.kernels.gpu.backend import measured_on, origin, why_unfit
from tilewise.kernels.gpu.config import (
    KINDS,
    PASSES,
    UNPROVEN,
    WIDTHS,
    Blocks,
    Config,
    Pass,
    config_for,
    tiles_for,
)
from tilewise.plan import tuned
from tilewise.plan.traffic import account
from tilewise.plan.tuned import Entry, Found, Place, Store, Tuned, write
from tilewise.problem import Problem
from tilewise.validation import dense_problem
from tilewise.variants.float8 import FLOAT8
from tilewise.variants.program import Instr

CHIP, FAMILY = "NVIDIA H200", "sm_90"
MINE = Blocks(64, 32, 4, 2)
KIND_OF: dict[str, dict[str, Any]] = {
    "plain": {"mask": masks.causal().program},
    "+": {"score": scores.softcap(2.0).program},
    "*": {"mask": (~masks.causal()).program},
}


def problem(width: int = 64, dtype: torch.dtype = torch.bfloat16, **changed: Any) -> Problem:
    q = torch.empty(1, 2, 40, width, dtype=dtype)
    made = dense_problem(q, q, q, mask=(), score=(), scale=None, dropout_p=0.0, sinks=None)
    return made._replace(**changed)


def entry(
    pass_name: Pass = "forward",
    dtype: torch.dtype = torch.bfloat16,
    width: int = 64,
    kind: str = "plain",
    blocks: Blocks = MINE,
) -> Entry:
    table = tiles_for(FAMILY, pass_name, dtype, width, width, kind != "plain", kind == "*")
    return Entry(Place(pass_name, dtype, width, kind), blocks, 1e-3, 0.01, table, 1.1e-3, 0.01)


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the file of the chip is looked for, in a process that has looked for none."""
    monkeypatch.delenv("TILEWISE_TUNED", raising=False)
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    monkeypatch.setattr(gpu, "STORE", Store())
    monkeypatch.setattr(tuned, "installed_triton", lambda: "3.6.0")
    return tmp_path / "tuned" / "nvidia-h200.json"


def keep(place: Path, *entries: Entry) -> None:
    write(place, Tuned(CHIP, FAMILY, "2.11.0", "3.6.0", "2026-11-20", entries))


def test_a_measured_entry_is_of_its_place_and_no_other(place: Path) -> None:
    """Of one pass, dtype, class of widths and kind; the table is there for all the rest."""
    keep(place, entry("dq", torch.float16, 128, "+"))
    chip = config_for(FAMILY, measured_on(CHIP, FAMILY))
    changed = 0
    for name in PASSES:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for width in (1, 64, 65, 100, 128, 129, 512):
                for kind, said in KIND_OF.items():
                    one = problem(width, dtype, **said)
                    own = (name, dtype, kind) == ("dq", torch.float16, "+") and 64 < width <= 128
                    table = Config(FAMILY).blocks(name, one)
                    assert chip.blocks(name, one) == (MINE if own else table)
                    changed += own
    assert changed == 3


def test_the_wider_of_both_widths_counts(place: Path) -> None:
    keep(place, entry(width=128))
    chip = config_for(FAMILY, measured_on(CHIP, FAMILY))
    assert chip.blocks("forward", problem(64, value_dim=128)) == MINE
    assert chip.blocks("forward", problem(64, value_dim=64)) != MINE


def test_blocks_depend_on_nothing_else(place: Path) -> None:
    keep(place, entry())
    chip = config_for(FAMILY, measured_on(CHIP, FAMILY))
    others: dict[str, Any] = {
        "batch": 7,
        "heads": 16,
        "queries": 1,
        "keys": 10**6,
        "scale": 2.0,
        "sinks": True,
    }
    for name, value in others.items():
        assert chip.blocks("forward", problem(**{name: value})) == MINE, name


def test_overrides_stand_before_what_is_measured(place: Path) -> None:
    keep(place, entry("dq"))
    other = Blocks(16, 16, 1, 1)
    chip = config_for(FAMILY, measured_on(CHIP, FAMILY))._replace(overrides=(("dq", other),))
    assert chip.blocks("dq", problem()) == other
    assert origin(chip, "dq", problem()) == "blocks that were asked for"


def test_the_table_alone_without_a_chip_or_for_another(place: Path) -> None:
    """The gate asks for no chip, so that a file on the machine does not change what it judges."""
    keep(place, entry())
    assert config_for(FAMILY).measured == tuned.NOTHING
    assert (
        config_for(FAMILY, measured_on("NVIDIA H100", FAMILY)).blocks("forward", problem()) != MINE
    )


def test_tf32_is_asked_at_every_call(place: Path) -> None:
    keep(place, entry())
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for allowed, precision in ((True, "tf32"), (False, "ieee"), (True, "tf32")):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            assert config_for(FAMILY, measured_on(CHIP, FAMILY)).precision == precision
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (entry(blocks=Blocks(256, 256, 8, 4)), r"256x256/8/4 need \d+ bytes .* sm_90 has 232448"),
        (
            entry(width=512, blocks=Blocks(64, 128, 4, 2)),
            "64x128/4/2 need 589824 bytes of shared memory",
        ),
        (entry("decode", blocks=Blocks(16, 512, 4, 1)), "do not divide a split of 256 keys"),
        (entry()._replace(table_blocks=MINE), "the table now has 128x64/4/3"),
        (entry()._replace(place=Place("prefill", torch.float16, 64, "+")), "pass 'prefill'"),
        (entry()._replace(place=Place("dq", torch.float16, 80, "+")), "width 80 is none of 64"),
        (entry()._replace(place=Place("dq", torch.float16, 64, "")), "kind '' is none of plain"),
    ],
)
def test_what_does_not_fit_is_refused_with_all_the_rest(
    place: Path, wrong: Entry, match: str
) -> None:
    fine = entry("dkdv", torch.float32)
    if wrong.place.kind:  # an empty one is refused before it is looked at
        keep(place, fine, wrong)
        with pytest.warns(TunedBlocksWarning, match=f"entry 1: .*{match}"):
            assert measured_on(CHIP, FAMILY).entries == {}
    assert not why_unfit(FAMILY, fine)
    assert why_unfit(FAMILY, wrong)


def test_every_row_of_the_table_would_fit() -> None:
    """So that the tuner's own candidates are judged by what the table is."""
    for name in PASSES:
        for width in WIDTHS:
            for kind in KINDS:
                own = entry(name, width=width, kind=kind)
                fits = why_unfit(FAMILY, own._replace(blocks=own.table_blocks))
                assert fits == "", own.place


def explained(monkeypatch: pytest.MonkeyPatch, of: Problem | None = None) -> dict[str, str]:
    """What is said of a call on a chip that is not there."""
    monkeypatch.setattr(gpu, "_family", lambda device: FAMILY)
    monkeypatch.setattr(gpu, "_chip", lambda device: CHIP)
    return dict(gpu.GpuBackend().notes(of or problem(device="cuda")))


def test_the_notes_say_where_blocks_come_from(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(place.parent))
    keep(place, entry("forward"))
    notes = explained(monkeypatch)
    assert list(notes) == ["forward", "dkdv", "dq"]
    assert notes["forward"] == (
        "64x32/4/2: blocks measured by tilewise tune on 2026-11-20 (1.10 times as fast as the "
        "table's 128x64/4/3), from ~/nvidia-h200.json"
    )
    assert notes["dq"] == "64x64/4/3: blocks of the table; ~/nvidia-h200.json has no faster ones"
    assert gpu.GpuBackend().tiles(problem(device="cuda")) == (64, 32, 1), "and so does the plan"


def test_few_queries_have_a_pass_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_family", lambda device: FAMILY)
    monkeypatch.setattr(gpu, "_chip", lambda device: CHIP)
    notes = dict(gpu.GpuBackend().notes(problem(device="cuda", queries=16)))
    assert set(notes) == {"decode", "dkdv", "dq"}
    few_in_pages = problem(device="cuda", queries=16, page_size=16)
    assert [name for name, _ in gpu.GpuBackend().notes(few_in_pages)] == ["decode"]


def test_the_notes_name_the_kernels_in_groups(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that were measured are of the Triton kernel: they do not stand before those."""
    keep(place, entry("dkdv"))
    assert explained(monkeypatch)["dkdv"].startswith("64x128/8/2: two groups of warps")


FUSED_HERE = Entry(
    Place("fused", torch.bfloat16, 128, "plain"), Blocks(64, 128, 8, 2), 1.0, 0.0,
    Blocks(64, 128, 8, 3), 1.25, 0.0,
)  # fmt: skip


def test_the_fused_backward_is_taken_where_it_was_measured(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(place.parent))
    one = problem(128, torch.bfloat16)
    assert config_for(FAMILY).fused(one) is None
    keep(place, FUSED_HERE)
    chip = config_for(FAMILY, measured_on(CHIP, FAMILY))
    assert chip.fused(one) == FUSED_HERE.blocks
    assert chip.in_groups("dkdv", one) == FUSED_HERE.table_blocks
    for other in (
        problem(64, torch.bfloat16),
        problem(128, torch.float16),
        problem(128, torch.float32),
        problem(128, torch.bfloat16, dropout_p=0.1),
        problem(128, torch.bfloat16, score=(Instr("softcap", (2.0,)),)),
        problem(128, torch.bfloat16, mask=(Instr("tiles", (128, 128, 0, 0, 384, 384, 0), (0,)),)),
    ):
        assert chip.fused(other) is None
    asked = chip._replace(overrides=(("dq", Blocks(64, 64, 4, 2)),))
    assert asked.fused(one) is None
    notes = explained(monkeypatch, one._replace(device="cuda"))
    assert list(notes) == ["forward", "backward"]
    assert notes["backward"] == (
        "64x128/8/2: one kernel of five products (Gluon), blocks measured by tilewise tune on "
        "2026-11-20 (1.25 times as fast as two kernels), from ~/nvidia-h200.json"
    )
    loops = gpu.GpuBackend().loops(one._replace(device="cuda"))
    assert loops.order == "in_turns"
    assert loops.backward == (64, 128)
    passes = account(one, loops).backward.ours.passes
    assert [each.name for each in passes] == ["delta", "dqkv", "narrow"]


@pytest.mark.parametrize(
    "changed",
    [
        {"blocks": Blocks(64, 128, 8, 3)},
        {"table_blocks": Blocks(64, 128, 8, 2)},
        {"place": FUSED_HERE.place._replace(kind="+")},
        {"place": FUSED_HERE.place._replace(width=256)},
        {"place": FUSED_HERE.place._replace(dtype=torch.float32)},
    ],
    ids=str,
)
def test_other_blocks_of_the_fused_backward_are_refused(changed: dict[str, Any]) -> None:
    assert not why_unfit(FAMILY, FUSED_HERE)
    assert why_unfit(FAMILY, FUSED_HERE._replace(**changed))
    assert why_unfit("sm_100", FUSED_HERE)


def test_a_forward_in_groups_is_taken_where_it_was_measured() -> None:
    """On Blackwell, beside the blocks of the Triton kernel, which other calls keep."""
    own = Place("grouped", torch.bfloat16, 128, "plain")
    table = config_for("sm_100").blocks("forward", problem(128, torch.bfloat16))
    mine = Entry(own, UNPROVEN["grouped", "sm_100", 128], 1.0, 0.0, table, 1.25, 0.0)
    assert not why_unfit("sm_100", mine)
    assert why_unfit(FAMILY, mine)
    found = Found({own: mine}, "2026-11-30")
    chip = config_for("sm_100", found)
    assert chip.in_groups("forward", problem(128, torch.bfloat16)) == mine.blocks
    packed = problem(128, torch.bfloat16, dropout_p=0.1)
    assert chip.in_groups("forward", packed) is None
    assert chip.blocks("forward", packed) == config_for("sm_100").blocks("forward", packed)
    said = gpu._way(chip, "forward", problem(128, torch.bfloat16))
    assert said.startswith("256x128/8/2: two groups of warps and a loading warp (Gluon), products")
    assert "1.25 times as fast as the table's" in said


def test_float8_in_groups_is_taken_where_it_was_measured() -> None:
    """Beside the blocks of the Triton kernel, and by no other type."""
    one = problem(128, FLOAT8)
    table = config_for(FAMILY).blocks("forward", one)
    blocks = UNPROVEN["grouped8", FAMILY, 128]
    mine = Entry(Place("grouped8", FLOAT8, 128, "plain"), blocks, 1.0, 0.0, table, 1.5, 0.0)
    assert not why_unfit(FAMILY, mine)
    assert why_unfit("sm_100", mine)
    assert why_unfit(FAMILY, mine._replace(place=mine.place._replace(dtype=torch.bfloat16)))
    chip = config_for(FAMILY, Found({mine.place: mine}, "2026-11-30"))
    assert chip.in_groups("forward", one) == blocks
    assert chip.in_groups("forward", problem(64, FLOAT8)) is None
    assert chip.in_groups("forward", problem(128, torch.bfloat16)) == Blocks(128, 128, 8, 2)
    assert config_for(FAMILY).in_groups("forward", one) is None
    said = gpu._way(chip, "forward", one)
    assert said.startswith("128x128/8/4: two groups of warps and a loading warp (Gluon), blocks")
    assert "1.50 times as fast as the table's" in said


def test_the_notes_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    assert explained(monkeypatch)["forward"] == "128x64/4/3: blocks of the table"


def test_the_notes_say_why_a_file_is_not_used(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.parent.mkdir()
    place.write_text("{")
    with pytest.warns(TunedBlocksWarning, match="it is no JSON"):
        said = explained(monkeypatch)["dq"]
    assert said.startswith("64x64/4/3: blocks of the table; ")
    assert "nvidia-h200.json is not used: it is no JSON" in said
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert explained(monkeypatch)["dq"] == said, "said once, and explained always"


def test_explain_has_the_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process where Triton interprets: the chip is then the interpreter."""
    monkeypatch.setattr(gpu, "_interprets", lambda: True)
    monkeypatch.setattr(gpu, "_has_triton", lambda: True)
    q = torch.empty(1, 1, 40, 16, dtype=torch.float16)
    text = str(tilewise.explain(q, q, q, backend="gpu"))
    assert "forward   64x32/4/1: blocks of the table" in text
    assert "dkdv      32x64/4/1: blocks of the table" in text
