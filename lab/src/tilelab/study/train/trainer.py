"""One run in memory: a model, its optimizer and its data, moved on one optimizer step at a time.

Everything follows from the run's config and seed, and from the state of a checkpoint: the same
steps give the same bits, interrupted or not. Wall-clock time decides nothing here. Dropout is
drawn from the seed, the step and the number of the micro-batch: no random state is carried on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tilelab.models.layers import products
from tilelab.study.ask.run import RunSpec
from tilelab.study.choices import optimizers, schedules
from tilelab.study.data.order import micro_batch_seed
from tilelab.study.records.events import Memory
from tilelab.study.tasks.task import AbstractTask, Batch, Prepared, dtype_of
from tilelab.study.train.costs import Guard, saved_bytes, storage_bytes, synchronise
from tilelab.study.train.state import State, pack, unpack
from tilelab.study.train.team import ALONE, Team, cut_like, whole

_WEIGHT = "model."


class Diverged(Exception):  # noqa: N818  reads as what happened; it never leaves the lab
    """A number that training needs is not finite any more."""


class Taken(NamedTuple):
    """An optimizer step that was taken."""

    step: int  # 1 for the first
    loss: float  # of its batch before it, without smoothing and z-loss
    lr: float
    gradient_norm: float  # before clipping; not finite: fp16 overflowed, step skipped
    wall_s: float
    cpu_s: float
    tokens: int  # learnt from


def weights_of(state: State) -> dict[str, Tensor]:
    """Return the weights in a state, in training mode, by their names in the model."""
    return {
        name.removeprefix(_WEIGHT): each
        for name, each in state.tensors.items()
        if name.startswith(_WEIGHT)
    }


class Trainer:
    """Trains the model of one run, alone or with the other processes of a team.

    Dropout draws from torch's global generator, which the trainer seeds: one of them at a time. All
    processes of the team call the same methods in the same order.
    """

    def __init__(
        self, run: RunSpec, data: Prepared, device: torch.device, team: Team = ALONE
    ) -> None:
        config, training = run.config, run.config.training
        self.run, self.config, self.device, self.done = run, config, device, 0
        self.task: AbstractTask = config.learning
        self.team = team
        self.identity = {
            "config": run.config_hash,
            "seed": str(run.seed),
            "corpus": data.sha256,
        }
        self.model = self.task.model(config, data, run.seed, device)
        team.spread(self.model)
        self.model.train()
        self._learner = self.task.learner(self.model, training)
        self._forward: nn.Module | Any = self._learner
        if training.compile:
            self._forward = torch.compile(self._learner)
        self._shared: nn.Module | Any = team.wrapped(self._forward)
        self.guard = Guard(self.model, hooks=not training.compile)
        self.optimizer, self.groups = optimizers.build(config.optimizer, self.model)
        self._scaler = torch.amp.GradScaler(device.type, enabled=training.precision == "fp16")
        self._batches = self.task.batches(config, data, run.seed)

    @property
    def over(self) -> bool:
        """Whether all steps of the budget are done."""
        return self.done >= self.config.steps

    @property
    def parameters(self) -> dict[str, int]:
        """The number of trained parameters, and how many of them are only looked up."""
        total = sum(each.numel() for each in self.model.parameters() if each.requires_grad)
        return {"total": total, "embedding": self.task.looked_up(self.model)}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of matrix products; the weights are float32 always."""
        return dtype_of(self.config.training.precision)

    def autocast(self) -> torch.autocast:
        """Return the context of a forward pass in the run's precision."""
        narrow = self.dtype != torch.float32
        return torch.autocast(self.device.type, self.dtype if narrow else None, enabled=narrow)

    def _products(self) -> AbstractContextManager[object]:
        """Return the context of a forward and a backward pass; compiled code allows none."""
        compiled = self.config.training.compile
        return nullcontext() if compiled else products(self.device, self.dtype)

    def step(self) -> Taken:
        """Take one optimizer step, or raise ``Diverged`` and leave the weights as they were."""
        synchronise(self.device)
        wall, cpu = time.perf_counter(), time.process_time()
        factor = schedules.factor(self.config.schedule, self.done, self.config.steps)
        optimizers.set_lr(self.optimizer, factor)
        batches = self._batches(self.done)
        with self._products():
            loss = self._gradients(batches)
        norm = self._update(loss)
        self.done += 1
        synchronise(self.device)
        wall = time.perf_counter() - wall
        cpu = self.team.total(time.process_time() - cpu, self.device)
        rate = float(self.config.optimizer.options["lr"]) * factor
        return Taken(self.done, loss, rate, norm, wall, cpu, sum(each.tokens for each in batches))

    def _gradients(self, batches: Sequence[Batch]) -> float:
        """Add up the gradients of the step's micro-batches; the mean loss over their targets."""
        training = self.config.training
        self.optimizer.zero_grad(set_to_none=True)
        if training.compile and not self.guard.probed:
            with self.autocast():
                self.guard.probe(self._learner, *batches[0].to(self.device).inputs)
        targets = sum(each.counted for each in batches)
        own = self.team.share(list(enumerate(batches)))
        found = []
        for index, batch in own:
            torch.manual_seed(micro_batch_seed(self.run.seed, self.done, index))
            parts = targets / batch.counted  # as many as there are batches, where they are equal
            with self.team.adding_up(self._shared, last=index == own[-1][0]):
                with self.guard.watching():
                    objective, plain = self._losses(self._shared, batch)
                # The gradients of the processes are averaged: each counts as often as there are.
                share = objective / (parts / self.team.size)
                self._scaler.scale(share).backward()  # type: ignore[no-untyped-call]
            found.append(plain / parts)
        total = torch.zeros((), device=self.device)
        for part in self.team.in_order(found):
            total += part
        return total.item()

    def _losses(self, forward: nn.Module | Any, batch: Batch) -> tuple[Tensor, Tensor]:
        with self.team.sharing(batch.to(self.device)) as (own, share):
            with self.autocast():
                output = forward(*own.inputs)
            objective, plain = self.task.losses(output, own.targets, self.config.training)
        return objective * share, plain * share

    def _update(self, loss: float) -> float:
        """Clip the gradient and let the optimizer use it; its norm before that."""
        number = self.done + 1
        if not math.isfinite(loss):
            raise Diverged(f"the loss of step {number} is {loss}")
        self._scaler.unscale_(self.optimizer)
        gradients = [each.grad for each in self.model.parameters() if each.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        norm = whole({"norm": norm})["norm"]
        found = norm.item()
        # With scaled gradients an overflow is routine: the scaler skips the step and scales less.
        if not math.isfinite(found) and not self._scaler.is_enabled():
            raise Diverged(f"the norm of the gradient of step {number} is {found}")
        if self.config.training.clip:
            nn.utils.clip_grads_with_norm_(self.model.parameters(), self.config.training.clip, norm)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        if self._scaler.is_enabled() and self._scaler.get_scale() < 1.0:
            raise Diverged(f"the gradient of step {number} is not finite at any scale")
        return found

    def split(self) -> Memory:
        """Split the memory (the peak is 0) between two steps: one forward pass, no bit changes.

        The gradients of the last step are measured and then dropped, as the next step would.
        """
        weights = list(self.model.parameters())
        kept = (value for state in self.optimizer.state.values() for value in state.values())
        held = (
            storage_bytes(weights),
            storage_bytes(each.grad for each in weights if each.grad is not None),
            storage_bytes(each for each in kept if isinstance(each, Tensor)),
        )
        self.optimizer.zero_grad(set_to_none=True)
        batch = self._batches(self.config.steps - 1)[0]  # rows may grow
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            _, activations = saved_bytes(lambda: self._losses(self._forward, batch)[0], weights)
        return Memory(*held, activations, peak_bytes=0)

    def state(self, totals: dict[str, Any]) -> State:
        """Return all that decides the rest of the run, and what was counted so far.

        It is the same however many processes there are; they all have to ask for it.
        """
        tensors = {_WEIGHT + name: each for name, each in self.model.state_dict().items()}
        values = {
            "optimizer": pack(self.optimizer.state_dict(), "optimizer", tensors),
            "scaler": pack(self._scaler.state_dict(), "scaler", tensors),
        }
        return State(self.identity, self.done, whole(tensors), values, totals)

    def last(self, state: State) -> State:
        """Return what is kept of the state of a run that is done: what an export needs."""
        if optimizers.averages(self.optimizer):
            return state
        weights = {name: each for name, each in state.tensors.items() if name.startswith(_WEIGHT)}
        return replace(state, tensors=weights, values={})

    def restore(self, state: State) -> None:
        """Go on from a state of this very run, to the bit, whatever the number of processes."""
        weights = weights_of(state)
        own = self.model.state_dict()
        self.model.load_state_dict({name: cut_like(weights[name], own[name]) for name in weights})
        self.optimizer.load_state_dict(unpack(state.values["optimizer"], state.tensors))
        for parameter, kept in self.optimizer.state.items():
            for name, value in kept.items():
                if isinstance(value, Tensor):
                    kept[name] = cut_like(value, parameter)
        self._scaler.load_state_dict(unpack(state.values["scaler"], state.tensors))
        self.done = state.step
