"""Hugging Face's ``Trainer`` in a study: one callback, which reports what the trainer logs.

Evaluate during training (``eval_strategy``), so that the metric, such as ``eval_loss``, is logged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

try:
    from transformers import TrainerCallback as _TrainerCallback
except ImportError as error:
    raise ImportError(
        "tilelab.huggingface needs transformers: pip install 'tilelab[huggingface]'"
    ) from error

_NAMES = {"learning_rate": "lr", "num_input_tokens_seen": "tokens"}


class TrainerCallback(_TrainerCallback):  # type: ignore[misc]
    """Reports every number that a ``Trainer`` logs, with its step.

    ``learning_rate`` is reported as ``lr``, ``num_input_tokens_seen`` as ``tokens``. Of several
    processes the first one reports.

    Args:
        log: takes the lines, as a function of a study is given; None to print them as JSON, as a
            command does.
    """

    def __init__(self, log: Callable[[dict[str, Any]], None] | None = None) -> None:
        self._log = log or (lambda line: print(json.dumps(line), flush=True))

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any
    ) -> None:
        """Report what was logged."""
        if not state.is_world_process_zero:
            return
        numbers = {
            _NAMES.get(name, name): value
            for name, value in (logs or {}).items()
            if isinstance(value, int | float)
        }
        self._log({"step": state.global_step, **numbers})
