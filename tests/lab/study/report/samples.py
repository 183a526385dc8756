"""Studies for the tests of the report: their folders, as if they had been run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.lab.study.records_of import Behaviour, config_of, experiment_of, records_of, study_of
from tilelab.study.ask.config import Arm, Study, Sweep
from tilelab.study.ask.run import finals
from tilelab.study.records.events import RunRecord
from tilelab.study.verdict.sweeps import sweep_results

EVIL = "</pre></table><script>alert('x')</script><img src=x onerror=alert(1)>`|*_[a](b)\u202e&"


def kernels_experiment() -> Any:
    """Plain attention against two that only compute differently."""
    return experiment_of(
        Arm(name="sdpa", changes={"attention.implementation": "sdpa"}, kind="systems"),
        Arm(name="tilewise", changes={"attention.implementation": "tilewise"}, kind="systems"),
        name="kernels",
        question="What does attention that never writes the N x N matrix buy?",
        baseline=config_of(**{"attention.implementation": "plain"}),
        baseline_name="plain",
        metric="loss",
        smallest_effect=0.01,
        target=2.0,
    )


def rich_study() -> tuple[Study, dict[str, RunRecord]]:
    """A study in which every kind of verdict occurs."""
    arms = (
        Arm(name="lion", changes={"optimizer.name": "lion", "optimizer.lr": 0.0003}),
        Arm(name="wsd", changes={"schedule.name": "wsd"}),
        Arm(name="lion+wsd", changes={"optimizer.name": "lion", "schedule.name": "wsd"}),
        Arm(name="dropout", changes={"model.dropout.attention": 0.1}),
        Arm(name="z-loss", changes={"training.z_loss": 1e-4}),
        Arm(name="hot", changes={"optimizer.lr": 0.1}),
        Arm(name="noclip", changes={"training.clip": 0.0}),
    )
    choices = experiment_of(
        *arms,
        name="choices",
        question="Which training choices learn more from the same tokens?",
        target=2.6,
    )
    swept = experiment_of(
        Arm(name="muon", changes={"optimizer.name": "muon"}),
        name="swept",
        question="Is Muon better than AdamW when both are tuned?",
        sweep=Sweep(values=dict.fromkeys(("baseline", "muon"), (0.0001, 0.001, 0.01, 0.1))),
    )
    study = study_of(kernels_experiment(), choices, swept).model_copy(
        update={
            "name": "everything",
            "question": "Which training choices, on top of efficient attention, are worth having?",
        }
    )
    behaviours = {
        "kernels/plain": Behaviour(kernels=("plain",), activations=4.0, noise=1e-7),
        "kernels/sdpa": Behaviour(kernels=("sdpa flash (cpu)",), pace=1.6, noise=1e-7),
        "kernels/tilewise": Behaviour(pace=2.4, activations=0.9, noise=1e-7),
        "lion": Behaviour(effect=-0.06, noise=0.004),
        "wsd": Behaviour(effect=-0.11, noise=0.004, pace=1.02),
        "lion+wsd": Behaviour(effect=-0.15, noise=0.004),
        "dropout": Behaviour(effect=0.09, kernels=("sdpa math",), pace=0.6, activations=2.1),
        "z-loss": Behaviour(effect=0.0005, noise=0.0006),
        "hot": Behaviour(diverged={0: 14, 2: 22}),
        "noclip": Behaviour(effect=-0.01, noise=0.03, spikes=(9, 20)),
        "swept/baseline": Behaviour(best=1e-3, survives=0.05),
        "muon": Behaviour(effect=-0.08, best=1e-2),
    }
    records = records_of(study, behaviours)
    choose(study, records)
    return study, records


def choose(study: Study, records: dict[str, RunRecord]) -> None:
    """Give the runs that count what the sweeps chose, as the conductor does."""
    for experiment in study.experiments:
        if experiment.sweep is None:
            continue
        chosen = {each.arm: each.values for each in sweep_results(experiment, records)}
        for run in finals(experiment, chosen):
            record = records[run.name]
            config = run.config.model_dump(mode="json")
            record.starts = [
                replace(start, config=config, config_hash=run.config_hash)
                for start in record.starts
            ]
