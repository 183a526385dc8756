"""A study of fine-tuning by its command: BERT from scratch, and from the folder of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from tests.lab.study.in_process import page_of, quickly, records, run, verdicts
from tests.lab.study.tasks.small import needs_wordpiece, write_glue
from tilelab.models.bert import BERT, Shape

pytestmark = needs_wordpiece

RECIPE = '''
from pathlib import Path

from tests.lab.study.tasks.small import config_of
from tilelab.study.ask.config import *

def tuned(*, weights: str = "") -> Study:
    """From scratch, and from a checkpoint."""
    here = Path(__file__).parent
    experiment = Experiment(
        name="rte",
        question="?",
        baseline=config_of(here / "glue", "rte"),
        arms=(Arm(name="tuned", changes={"model.checkpoint": weights or str(here / "weights")}),),
        seeds=(0, 1),
        smallest_effect=0.02,
        metric="accuracy",
    )
    return Study(name="tuned", question="?", experiments=(experiment,))
'''


def test_from_scratch_and_from_a_checkpoint(tmp_path: Path) -> None:
    write_glue(tmp_path / "glue", "rte")
    shape = Shape(layers=1, heads=2, width=16, context=32, vocabulary=30522)
    BERT(shape, seed=9).save(tmp_path / "weights")
    (tmp_path / "recipe.py").write_text(RECIPE)
    with quickly(tmp_path):
        status, _ = run(f"{tmp_path / 'recipe.py'}:tuned", tmp_path / "out")
    assert status == 0
    found = records(tmp_path / "out")
    for seed in (0, 1):
        scratch, tuned = (found[f"rte/{arm}/seed-{seed}"] for arm in ("baseline", "tuned"))
        assert scratch.start.weights_sha256 != tuned.start.weights_sha256
        assert scratch.steps[0].tokens == tuned.steps[0].tokens  # the same sentences
        for record in (scratch, tuned):
            assert record.end is not None
            assert record.end.status == "done"
    ((only,),) = (each["arms"] for each in verdicts(tmp_path / "out"))
    assert (only["arm"], only["n"]) == ("tuned", 2)
    assert "model.<wbr>checkpoint" in page_of(tmp_path / "out")
