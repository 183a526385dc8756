"""The child process of one arm: it trains when told to, and answers in lines of JSON.

Every arm has a process of its own, so that the peak of the process's memory is the arm's alone.
Requests come on standard input and replies go to standard output, one JSON object a line; the
process ends when its input does. The first line it reads is a ``Job``.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TextIO

import torch
from torch import nn

from tilewise.lab.demo.corpus import Windows
from tilewise.lab.demo.model import GPT, nudge, write
from tilewise.lab.demo.settings import Settings
from tilewise.lab.memory import peak_bytes, reset_peak, resident_bytes
from tilewise.lab.study.train.memory_split import saved_bytes
from tilewise.nn import Implementation

PROMPT = b"def "
EVALUATION_WINDOWS = 8


class Job(NamedTuple):
    """What a child is for.

    Args:
        settings: the run's.
        corpus: path of the file of bytes to train on.
        implementation: which attention its model uses.
        nudge_seed: seed of the one-ulp change of the initial weights; None for no change.
    """

    settings: dict[str, Any]
    corpus: str
    implementation: Implementation
    nudge_seed: int | None


class Trainer:
    """A model, its optimizer and its data: everything of an arm, repeatable from the settings."""

    def __init__(self, settings: Settings, windows: Windows, job: Job) -> None:
        self.settings, self.windows = settings, windows
        self.model = GPT(
            settings.width, settings.heads, settings.layers, job.implementation, settings.seed
        )
        if job.nudge_seed is not None:
            nudge(self.model, job.nudge_seed)
        weights = list(self.model.parameters())
        groups = [
            {"params": [weight for weight in weights if weight.dim() > 1], "weight_decay": 0.1},
            {"params": [weight for weight in weights if weight.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95))
        self.done = 0

    def step(self) -> float:
        """One optimizer step; the loss before it, in nats per byte."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * schedule(self.done, self.settings.steps)
        inputs, targets = self.windows.draw(self.settings.batch)
        loss = self.model.loss(inputs, targets)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.done += 1
        return loss.item()

    @torch.no_grad()
    def held_out(self) -> float:
        """The loss on the held-out windows, in nats per byte, one window at a time."""
        inputs, targets = self.windows.evaluation(EVALUATION_WINDOWS)
        pairs = zip(inputs[:, None], targets[:, None], strict=True)
        return statistics.fmean(self.model.loss(*pair).item() for pair in pairs)


def _warm_torch() -> None:
    """Make torch take what it takes once, tens of megabytes, so that no arm is charged for it."""
    model = GPT(16, 1, 1, "plain", seed=0)
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    model.loss(tokens, tokens).backward()  # type: ignore[no-untyped-call]
    torch.optim.AdamW(model.parameters()).step()


def schedule(step: int, steps: int) -> float:
    """Fraction of the peak learning rate: up over a sixth of the run, down to 0 over its half."""
    warmup = max(steps // 6, 1)
    left = (steps - step) / max(steps - steps // 2, 1)
    return min((step + 1) / warmup, 1.0, left)


class Worker:
    """Answers requests: each ``do`` is the method of that name, the other keys its arguments."""

    def __init__(self, job: Job) -> None:
        self.settings = Settings.from_json(job.settings)
        torch.set_num_threads(self.settings.threads)
        with open(job.corpus, "rb") as file:
            data = file.read()
        self.windows = Windows(data, self.settings.context, self.settings.seed + 1)
        del data
        self.job = job
        _warm_torch()
        self.base = resident_bytes()  # with torch and the text in memory, before the model
        reset_peak()
        self.trainer = Trainer(self.settings, self.windows, job)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to one request."""
        arguments = dict(request)
        actions: dict[str, Callable[..., dict[str, Any]]] = {
            "steps": self.steps,
            "held_out": self.held_out,
            "sample": self.sample,
            "long_step": self.long_step,
        }
        return actions[arguments.pop("do")](**arguments)

    def steps(self, count: int) -> dict[str, Any]:
        """Train ``count`` steps: losses, wall and CPU seconds of each, peak memory so far."""
        reply: dict[str, Any] = {"losses": [], "wall_s": [], "cpu_s": []}
        for _ in range(count):
            wall, cpu = time.perf_counter(), time.process_time()
            reply["losses"].append(self.trainer.step())
            reply["wall_s"].append(time.perf_counter() - wall)
            reply["cpu_s"].append(time.process_time() - cpu)
        return {**reply, "peak_bytes": peak_bytes() - self.base}

    def held_out(self) -> dict[str, Any]:
        """The loss on the held-out text, and what a forward pass keeps for the backward pass."""
        model, batch = self.trainer.model, self.windows.draw(self.settings.batch)
        _, kept = saved_bytes(lambda: model.loss(*batch), list(model.parameters()))
        return {"held_out": self.trainer.held_out(), "saved_bytes": kept}

    def sample(self) -> dict[str, Any]:
        """Text of the trained model, as Latin-1 (one character a byte)."""
        settings = self.settings
        text = write(
            self.trainer.model, PROMPT, settings.sample_bytes, settings.context, settings.seed + 2
        )
        return {"sample": text.decode("latin-1")}

    def long_step(self, repeats: int) -> dict[str, Any]:
        """Forward and backward of one window of the whole context: seconds, memory, loss."""
        model = self.trainer.model
        inputs, targets = self.windows.draw(1)
        model.loss(inputs[:, :64], targets[:, :64]).backward()  # type: ignore[no-untyped-call]
        wall_s, cpu_s = [], []
        for _ in range(repeats):
            wall, cpu = time.perf_counter(), time.process_time()
            loss, kept = saved_bytes(lambda: model.loss(inputs, targets), list(model.parameters()))
            loss.backward()  # type: ignore[no-untyped-call]
            wall_s.append(time.perf_counter() - wall)
            cpu_s.append(time.process_time() - cpu)
        return {
            "wall_s": wall_s,
            "cpu_s": cpu_s,
            "loss": loss.item(),
            "saved_bytes": kept,
            "peak_bytes": peak_bytes() - self.base,
        }


def main() -> None:
    """Read a job, then answer requests until the input ends."""
    replies = _private_output()
    lines = iter(sys.stdin.readline, "")
    job = Job(**json.loads(next(lines)))
    worker = Worker(job)
    _reply(replies, {"ready": True})
    for line in lines:
        _reply(replies, worker.answer(json.loads(line)))


def _private_output() -> TextIO:
    """Standard output for replies alone: what else prints there goes to standard error."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return replies


def _reply(replies: TextIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
