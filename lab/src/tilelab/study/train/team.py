"""The processes that train one run together, each on a device of its own.

A step's micro-batches are dealt out to them: process r of P takes number r, r + P, r + 2 P, ...
They do all else alike, evaluations included, and the first one, the lead, writes everything down.
So the number of processes changes only the order in which gradients are added up. Losses are added
in the order of the micro-batches, whoever computed them. Dropout is drawn from the seed, the step
and the number of the micro-batch.

There are two strategies. With ``ddp`` every process holds the whole model
(``DistributedDataParallel``). With ``fsdp`` weights, gradients and optimizer state are cut into P
parts (``fully_shard``), put together a layer at a time. The parts of torch that only ``fsdp`` needs
are imported there.

With a ``context`` of C, neighbouring processes share the sequences of a micro-batch: each has its
own rows, and attention is shared among them (``tilewise.distributed``). P / C of such groups deal
out the micro-batches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from tilelab.models.gpt2 import Rows
from tilelab.study.ask.config import RunConfig
from tilelab.study.ask.run import Strategy
from tilelab.study.choices import optimizers
from tilelab.study.tasks.task import Batch
from tilewise.errors import InvalidArgument

_T = TypeVar("_T")


@dataclass(frozen=True)
class Team:
    """The view that one process has of the others."""

    rank: int = 0  # its number; 0 leads
    size: int = 1  # how many there are
    strategy: Strategy = "ddp"
    context: int = 1  # neighbours that share sequences
    neighbours: distributed.ProcessGroup | None = None  # those of this process, where there are

    @property
    def lead(self) -> bool:
        """Whether this process writes records and checkpoints."""
        return self.rank == 0

    def share(self, items: Sequence[_T]) -> Sequence[_T]:
        """Return this process's share of a step's micro-batches."""
        return items[self.rank // self.context :: self.size // self.context]

    @contextmanager
    def sharing(self, batch: Batch) -> Iterator[tuple[Batch, float]]:
        """This process's rows of a micro-batch, and which share of its targets they have."""
        if self.neighbours is None:
            yield batch, 1.0
            return
        from tilewise.distributed import context_parallel, shard

        (tokens,) = batch.inputs
        length = tokens.shape[1]
        places = torch.arange(length, device=tokens.device)
        own = [shard(x, self.neighbours, 1) for x in (tokens, batch.targets, places[None])]
        rows = Rows(own[2][0], length)
        with context_parallel(self.neighbours):
            cut = batch._replace(inputs=(own[0], None, rows), targets=own[1])
            yield cut, own[1].shape[1] / length

    def spread(self, model: nn.Module) -> None:
        """Leave this process its part of the weights, where the strategy cuts them."""
        if self.size == 1 or self.strategy == "ddp":
            return
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        device = next(model.parameters()).device.type
        mesh = init_device_mesh(device, (self.size,))
        for each in model.modules():
            if isinstance(each, nn.ModuleList):  # every one is a list of layers
                for layer in each:
                    fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)

    def wrapped(self, model: nn.Module | Any) -> nn.Module | Any:
        """Return the module to call in training; its backward pass adds up all gradients."""
        if self.size == 1 or self.strategy == "fsdp":
            return model
        return DistributedDataParallel(model)

    def adding_up(self, forward: nn.Module | Any, last: bool) -> AbstractContextManager[None]:
        """Return the context of one pass; gradients travel with this process's last of the step."""
        if last or not isinstance(forward, DistributedDataParallel):
            return nullcontext()
        context: AbstractContextManager[None] = forward.no_sync()
        return context

    def in_order(self, own: Sequence[Tensor]) -> list[Tensor]:
        """Return a number of every micro-batch of a step in order, from those of ``share``."""
        if self.size == 1:
            return list(own)
        mine = torch.stack(list(own))
        found = [torch.empty_like(mine) for _ in range(self.size)]
        distributed.all_gather(found, mine)
        # Those who share a micro-batch have parts of its number.
        groups = torch.stack(found).view(-1, self.context, len(mine)).sum(1)
        return list(groups.T.flatten())

    def total(self, value: float, device: torch.device) -> float:
        """Return the sum of everybody's numbers."""
        if self.size == 1:
            return value
        sum_of = torch.tensor(value, dtype=torch.float64, device=device)
        distributed.all_reduce(sum_of)
        return sum_of.item()

    def agreed(self, value: _T) -> _T:
        """Return the lead's value, in all processes."""
        if self.size == 1:
            return value
        held: list[Any] = [value]
        distributed.broadcast_object_list(held, src=0)
        found: _T = held[0]
        return found

    def first(self, make: Callable[[], _T]) -> _T:
        """Make something in every process, in the lead before the others: they find its files."""
        if not self.lead:
            self.wait()
        made = make()
        if self.lead:
            self.wait()
        return made

    def wait(self) -> None:
        """Until all have come here."""
        if self.size > 1:
            distributed.barrier()


ALONE = Team()


@contextmanager
def joined(
    processes: int, strategy: Strategy, device: torch.device, context: int = 1
) -> Iterator[Team]:
    """The team of this process, as its environment names it (``RANK``, ``WORLD_SIZE``, ...)."""
    if processes == 1:
        yield ALONE
        return
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, size = distributed.get_rank(), distributed.get_world_size()
    assert size == processes
    neighbours = None
    for first in range(0, size, context) if context > 1 else ():
        group = distributed.new_group(list(range(first, first + context)))
        if first <= rank < first + context:
            neighbours = group
    team = Team(rank, size, strategy, context, neighbours)
    yield team
    # Not after an error: the others may wait where nobody comes any more; their agent ends them.
    team.wait()
    distributed.destroy_process_group()


def device_of(kind: str) -> torch.device:
    """This process's own device of a kind: with several processes GPU 0, 1, ..."""
    if kind == "cuda":
        device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    return torch.device(kind)


def check(config: RunConfig, processes: int, strategy: Strategy, context: int = 1) -> None:
    """Refuse what several processes cannot do alike.

    Raises:
        InvalidArgument: the micro-batches of a step cannot be dealt out evenly, the strategy
            cannot do what the config asks for, or the run is a script.
    """
    if processes % context:
        fix = "Processes that share sequences are a part of --processes."
        raise InvalidArgument("--context-parallel", str(context), f"a divisor of {processes}", fix)
    if processes == 1:
        return
    if context > 1:
        _check_shared(config)
    training, came = config.training, f"{processes} processes"
    if config.learning.external:
        fix = "Put torchrun into its command."
        raise InvalidArgument("--processes", came, "1: a script starts its own", fix)
    processes //= context
    if training.accumulation % processes:
        step = training.batch * training.accumulation
        required = f"a divisor of training.accumulation={training.accumulation}"
        fix = (
            f"Each process takes whole micro-batches. A step of {step} sequences is also "
            f"training.accumulation={processes} and training.batch={step // processes}"
            if step % processes == 0
            else f"Take a training.accumulation that {processes} divides"
        )
        raise InvalidArgument("--processes", came, required, f"{fix}.")
    if training.compile:
        fix = "Leave one of the two out."
        raise InvalidArgument("--processes", f"{came} and training.compile", "one of the two", fix)
    if strategy == "fsdp":
        _check_sharded(config)


def _check_shared(config: RunConfig) -> None:
    """Refuse what processes that share sequences cannot do as one does."""
    dropout = config.model.dropout
    for name, came, allowed, required in (
        ("task", config.task.name, "language-modelling", "language-modelling"),
        ("attention.implementation", config.attention.implementation, "tilewise", "tilewise"),
        ("data.packing", config.data.packing, "stream", "stream: rows that are one text"),
        ("model.dropout.embedding", dropout.embedding, 0.0, "0: each process would draw its own"),
        ("model.dropout.residual", dropout.residual, 0.0, "0: each process would draw its own"),
        ("training.z_loss", config.training.z_loss, 0.0, "0"),
        ("training.length_warmup.steps", config.training.length_warmup.steps, 0, "0"),
    ):
        if came != allowed:
            raise InvalidArgument(f"--context-parallel with {name}", repr(came), required)


def _check_sharded(config: RunConfig) -> None:
    fix = "`--strategy ddp` can do it."
    name = config.optimizer.name
    if name not in optimizers.SHARDED:
        required = f"an optimizer that works on parts of weights: {', '.join(optimizers.SHARDED)}"
        raise InvalidArgument("--strategy", f"fsdp with {name}", required, fix)
    if config.training.loss_tokens:
        required = "0: the head's matrix is in parts where the loss would multiply with it"
        raise InvalidArgument("--strategy", "fsdp with training.loss_tokens", required, fix)
    if config.training.precision == "fp16":
        required = "float32 or bf16: the scale of fp16's gradients is not agreed on between parts"
        raise InvalidArgument("--strategy", "fsdp with training.precision=fp16", required, fix)


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds."""
    part: Tensor = tensor.to_local() if _is_cut(tensor) else tensor  # type: ignore[attr-defined]
    return part


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with cut ones put together; all processes have to call it at once."""
    return {
        name: each.full_tensor() if _is_cut(each) else each  # type: ignore[attr-defined]
        for name, each in tensors.items()
    }


def cut_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor cut as another one of its shape is; itself where that is whole."""
    if not _is_cut(like) or _is_cut(tensor) or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)


def _is_cut(tensor: Tensor) -> bool:
    """Return whether it is a ``DTensor``, the type of torch for a tensor in parts."""
    return hasattr(tensor, "full_tensor")
