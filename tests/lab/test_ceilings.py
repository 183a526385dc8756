"""Ceilings are measured, kept, and found again."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from tilewise import chips, doctor
from tilewise.chips import Chip, detect, measured, named
from tilewise.kernels.cpu import absence

MADE_UP = Chip(
    "made up",
    "cpu",
    3,
    bandwidth_bytes_s=2e9,
    peak_flops_s=(("float32", 5e9),),
    exponentials_s=1e8,
)


def test_what_is_kept_is_found(tmp_path: Path) -> None:
    path = tmp_path / "below" / "ceilings.json"
    assert doctor.keep(MADE_UP, path) == path
    bare = Chip("made up", "cpu", 3, l1_bytes=7)
    found = measured(bare, path)
    assert (found.bandwidth_bytes_s, found.exponentials_s) == (2e9, 1e8)
    assert (found.peak("float32"), found.l1_bytes) == (5e9, 7)
    assert found.source.startswith("measured here on 20")
    assert measured(Chip("made up", "cpu", 2), path) == Chip("made up", "cpu", 2)


def test_other_chips_stay_and_rubbish_does_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "ceilings.json"
    for rubbish in ("", "[1, 2]", '{"made up x 3": {"date": 5}}', "{"):
        path.write_text(rubbish)
        bare = Chip("made up", "cpu", 3)
        assert measured(bare, path) == bare
        doctor.keep(MADE_UP, path)
    doctor.keep(Chip("other", "cpu", 1, bandwidth_bytes_s=1.0, exponentials_s=1.0), path)
    assert set(json.loads(path.read_text())) == {"made up x 3", "other x 1"}
    assert os.listdir(tmp_path) == ["ceilings.json"]


@pytest.mark.skipif(absence() is not None, reason="needs the compiled core")
def test_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    threads = torch.get_num_threads()
    chip = doctor.measure(detect(), stream=2**18)
    assert torch.get_num_threads() == threads
    doctor.keep(chip)
    found = named("this")
    assert found.name == detect().name
    for rate in (found.bandwidth_bytes_s, found.exponentials_s, found.peak("bfloat16")):
        assert rate is not None
        assert 1e6 < rate < 1e16
    assert (found.peak("float32") or 0) >= (found.peak("float64") or 0) > 0


def test_chips_are_found_in_capitals_and_their_powers_cost_something() -> None:
    for key, chip in chips.CHIPS.items():
        assert chips.named(key.upper()) is chip
        # A power costs more than a multiply-add and less than a thousand of them.
        ratio = (chip.peak("float32") or 0) / (chip.exponentials_s or 1)
        assert 4 < ratio < 1000, key
