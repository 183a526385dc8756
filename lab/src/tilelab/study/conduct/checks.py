"""Before the first run: checkpoints fit, the target is ahead, memory has room.

A target that untrained weights reach already would time nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tilelab.common import memory
from tilelab.study.ask.config import Experiment, RunConfig, Study
from tilelab.study.ask.metrics import METRICS, reached, value_in
from tilelab.study.ask.run import RunSpec
from tilelab.study.need import Need, host_need
from tilelab.study.tasks.task import Prepared, data_key
from tilewise.errors import InvalidArgument, TilewiseError, Unsupported


def check_checkpoints(runs: Sequence[RunSpec], corpora: Mapping[str, Prepared]) -> None:
    """Load each checkpoint once, as its runs will: on the CPU, one at a time, and forget it.

    Raises:
        InvalidArgument: a checkpoint is not there, or is not of the model that the config says.
        Unsupported: it computes something else.
    """
    seen = set()
    for run in runs:
        config = run.config
        # Everything that loading depends on.
        model = config.model.model_dump_json(exclude={"dropout", "nudge"})
        key = model, data_key(config)
        if not config.model.checkpoint or key in seen:
            continue
        seen.add(key)
        arm = f"{run.experiment}/{run.arm}"
        try:
            config.learning.model(config, corpora[data_key(config)], 0, torch.device("cpu"))
        except InvalidArgument as error:
            argument = "model.checkpoint" if error.argument == "folder" else error.argument
            parts = error.came, error.required, error.fix
            raise InvalidArgument(f"{arm}: {argument}", *parts) from None
        except Unsupported as error:
            what = f"{arm}: {config.model.checkpoint}: {error.what}"
            raise Unsupported(what, error.reasons, error.fix) from None


def check_target(study: Study, experiment: str, evaluation: Mapping[str, Any]) -> None:
    """Compare an experiment's target with an evaluation of the first weights; ignore later ones.

    Raises:
        InvalidArgument: the target is not better than the first weights are.
    """
    found = _of_config(study, experiment)
    if found is None or found.target is None or evaluation["step"]:
        return
    first = value_in(evaluation, found.metric)
    if first is None:
        return
    if not reached(found.metric, first, found.target):
        return
    higher = METRICS[found.metric].higher_is_better
    example = (1 + first) / 2 if higher else 0.6 * first
    raise InvalidArgument(
        f"{experiment}.target",
        f"{found.target:g} {METRICS[found.metric].unit}",
        f"{'more' if higher else 'less'} than {first:.4g}, the held-out metric of weights that are "
        "not trained yet",
        f"Set it, for example: --set {experiment}.target={example:.3g}",
    )


def _of_config(study: Study, experiment: str) -> Experiment | None:
    """Return the experiment of that name, or the one whose stage it is; None for a stranger."""
    known = {each.name: each for each in study.experiments}
    while experiment and experiment not in known:
        experiment = experiment.rpartition(".")[0]
    return known.get(experiment)


class NotEnoughMemoryError(TilewiseError):
    """A run would need more memory than there is."""


def available_bytes(device: str) -> int | None:
    """Memory of a device that new processes could take now; None where nobody knows."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return memory.available_bytes()


def room_for(
    runs: Sequence[RunSpec],
    jobs: int,
    available: int | None,
    needed: Callable[[RunConfig], Need] = host_need,
    processes: int = 1,
    kind: str = "memory",
) -> int:
    """Return how many runs may run at once, at least 1 and at most ``jobs``.

    ``needed`` is what one process of a run takes of the ``available`` bytes. Nothing is refused
    where nobody knows these (None).

    Raises:
        NotEnoughMemoryError: a single one needs more than there is.
    """
    if available is None or not runs:
        return jobs
    found = sorted(((needed(run.config), run) for run in runs), key=lambda each: -each[0].total)
    needs = [processes * each.total for each, _ in found]
    if needs[0] > available:
        raise NotEnoughMemoryError(_too_much(*found[0], available, processes, kind))
    while jobs > 1 and sum(needs[:jobs]) > available:
        jobs -= 1
    return jobs


def _too_much(wanted: Need, run: RunSpec, available: int, processes: int, kind: str) -> str:
    total = processes * wanted.total
    reads = wanted.reading > wanted.training
    parts = ("reading",) if reads else ("activations", "matrix", "state", "data")
    largest = max(parts, key=lambda part: getattr(wanted, part))
    words, fix = _REMEDIES[largest]
    size = processes * getattr(wanted, largest)
    several = f" in {processes} processes" if processes > 1 else ""
    return (
        f"arm {run.arm} of {run.experiment} needs about {_gb(total)} of {kind}{several}, and "
        f"{_gb(available)} are free. Most of it, {_gb(size)}, is {words}: {fix}"
    )


_REMEDIES = {
    "activations": (
        "what the backward pass reads again",
        "use a smaller training.batch (with more training.accumulation the step stays the same), "
        "a smaller model.context, or training.checkpointing=true",
    ),
    "matrix": (
        "the N x N matrices of its attention",
        "use attention.implementation=tilewise, which writes none, a smaller model.context or "
        "a smaller training.batch",
    ),
    "state": (
        "weights, gradients and optimizer state",
        "use a smaller model.width or fewer model.layers",
    ),
    "data": ("its data", "use less of it: a task.train_examples, or smaller files"),
    "reading": ("its data while it is read", "use smaller files"),
}


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
