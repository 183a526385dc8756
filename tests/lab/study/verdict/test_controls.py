"""Positive controls: what they compute wrongly, and what is said where they are not flagged."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from tests.lab.study.records_of import Behaviour, config_of, experiment_of, records_of, study_of
from tilelab.models.bert import Head
from tilelab.models.layers import pack
from tilelab.study.ask.config import Arm, Experiment, RunConfig, change
from tilelab.study.ask.run import finals
from tilelab.study.recipes.arms import compare_kernels
from tilelab.study.records.events import RunRecord
from tilelab.study.report.verdicts import meaning
from tilelab.study.tasks.families import bert_of, gpt2_of
from tilelab.study.verdict.judge import judge
from tilelab.study.verdict.result import ArmVerdict, ExperimentVerdict
from tilewise.errors import InvalidArgument

TINY = config_of(**{"model.layers": 1, "model.context": 8})
IMPLEMENTATIONS = ("plain", "sdpa", "tilewise")


def with_fault(config: RunConfig, implementation: str, fault: str) -> RunConfig:
    return change(config, {"attention.implementation": implementation, "attention.fault": fault})


def probabilities(config: RunConfig, fault: str, hidden: Tensor) -> Tensor:
    """Who a query looks at by the definition of the fault: [M, N], for scores [M, N]."""
    m, n = torch.arange(hidden.shape[0])[:, None], torch.arange(hidden.shape[1])
    causal = config.model.family == "gpt2"
    seen = n <= m if causal else torch.ones_like(hidden, dtype=torch.bool)
    if fault == "mask":
        seen &= ((n < m) if causal else (n > 0)) | (m == 0)
    factor = 1.01 if fault == "scale" else 1.0
    return (hidden * factor).masked_fill(~seen, -math.inf).softmax(-1)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("fault", ["none", "scale", "mask"])
@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_a_fault_is_what_it_says(
    family: str, fault: Literal["none", "scale", "mask"], implementation: str
) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, TINY.model.width)
    attention: Any
    if family == "gpt2":
        config = with_fault(TINY, implementation, fault)
        attention = gpt2_of(config, 256, 0, torch.device("cpu")).layers[0].attention
        inputs: tuple[Any, ...] = (x[None],)
    else:
        encoder = {"model.family": "bert", "attention.variant": "full"}
        words = {"data.tokenizer": "wordpiece", "task": "masked-language-modelling"}
        config = with_fault(change(TINY, {**encoder, **words}), implementation, fault)
        model = bert_of(config, 256, Head("masked"), 0, torch.device("cpu"))
        attention = model.layers[0].attention
        mask = None if model.pattern is None else model.pattern(8)
        inputs = x, pack([list(range(8))]), mask
    for parameter in attention.parameters():  # as they are drawn, nobody looks anywhere
        torch.nn.init.normal_(parameter, std=0.3)
    q, k, v = (
        project(x).unflatten(-1, (config.model.heads, -1)).transpose(0, 1)
        for project in (attention.query, attention.key, attention.value)
    )
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    heads = [
        probabilities(config, fault, head) @ value for head, value in zip(scores, v, strict=True)
    ]
    expected = attention.output(torch.cat(heads, dim=-1))
    torch.testing.assert_close(attention(*inputs).view(8, -1), expected, rtol=1e-4, atol=1e-5)


def compared(**changes: Any) -> Experiment:
    config = config_of(**changes)
    return compare_kernels("kernels", "The same?", config, (0, 1, 2))


def judged(experiment: Experiment, apart: dict[str, float]) -> ExperimentVerdict:
    """The verdict where the losses of some arms are off by so much of their value."""
    study = study_of(experiment)
    records = records_of(study, dict.fromkeys(experiment.arm_names, Behaviour(twin=True, noise=0)))

    def moved(record: RunRecord) -> RunRecord:
        factor = 1 + apart.get(record.start.arm, 0.0)
        steps = [replace(each, loss=each.loss and each.loss * factor) for each in record.steps]
        return replace(record, steps=steps)

    known = {run.name for run in finals(experiment)}
    return judge(study, {k: moved(each) for k, each in records.items() if k in known}).experiments[
        0
    ]


def arm(verdict: ExperimentVerdict, name: str) -> ArmVerdict:
    return next(each for each in verdict.arms if each.arm == name)


def test_a_control_that_is_not_flagged_is_said_and_one_that_is_counts_for_nothing() -> None:
    experiment = compared()
    found = judged(experiment, {"wrong-scale": 1e-7, "wrong-mask": 1e-4, "tilewise": 1e-7})
    assert [arm(found, name).flagged for name in ("tilewise", "wrong-scale", "wrong-mask")] == [
        None,
        False,
        True,
    ]
    (note,) = [each for each in found.notes if "could not have seen" in each]
    assert "a softmax scale that is wrong by 1 %: the control wrong-scale" in note
    assert not any(each.changed_what_is_learnt for each in found.arms)
    assert len(arm(found, "wrong-mask").per_seed) == 1
    assert "wrong-mask was flagged, as it should be; wrong-scale was not seen" in meaning(found)
    both = judged(experiment, {"wrong-scale": 2e-6, "wrong-mask": 1e-4})
    assert not [each for each in both.notes if "could not have seen" in each]


def test_controls_leave_the_verdicts_on_the_others_as_they_are() -> None:
    with_them = compared(**{"training.precision": "bf16"})
    without = with_them.model_copy(update={"arms": with_them.arms[:2]})
    assert with_them.seeds_of("wrong-scale") == (0, 1, 2)  # no drift decides there
    one, other = (judged(each, {}) for each in (with_them, without))
    assert one.arms[:2] == other.arms


def test_a_control_needs_something_to_control() -> None:
    with pytest.raises(ValueError, match="a systems arm that it is the control of"):
        experiment_of(Arm(name="wrong", changes={"attention.fault": "mask"}, kind="control"))
    with pytest.raises(InvalidArgument, match=r"attention\.fault"):
        config_of(**{"attention.fault": "other"})
