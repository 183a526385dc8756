"""Check, before the first run, that the checkpoints that runs begin with exist and fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tilelab.study.ask.config import RunConfig
from tilelab.study.ask.run import RunSpec
from tilelab.study.conduct.forecast import data_key
from tilelab.study.tasks.task import Prepared
from tilewise.errors import InvalidArgument, Unsupported

__all__ = ["check_checkpoints"]


def check_checkpoints(runs: Sequence[RunSpec], corpora: Mapping[str, Prepared]) -> None:
    """Load each checkpoint once, as its runs will: on the CPU, one at a time, and forget it.

    Args:
        runs: of the study.
        corpora: their data, ready, by ``data_key``.

    Raises:
        InvalidArgument: a checkpoint is not there, or is not of the model that the config says.
        Unsupported: it computes something else.
    """
    seen = {""}
    for run in runs:
        config = run.config
        key = _key(config)
        if key in seen:
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


def _key(config: RunConfig) -> str:
    """Return a key of everything that loading depends on; empty without a checkpoint."""
    if not config.model.checkpoint:
        return ""
    return f"{config.model.model_dump_json(exclude={'dropout', 'nudge'})} {data_key(config)}"
