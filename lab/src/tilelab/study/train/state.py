"""The state of a run on disk: one safetensors file, whole or not there.

Everything that decides the rest of a run is in it: weights, optimizer state, scaling of
gradients, the step. Tensors are tensors of the file; the rest is JSON in its metadata, which
gives every float back to the bit. Nothing is pickled, so nothing in a checkpoint can run.

A checkpoint is written beside the last one, synced, and then renamed over it: whatever happens, one
whole checkpoint is there. Once a run is done its checkpoint keeps what an export needs: the
weights, and of an optimizer that averages its state too.

**Trunks** are first steps that several runs of a study have in common, trained once. Runs of a
ladder that differ in their length alone, with a schedule whose first steps do not depend on it
(``wsd`` with ``warmup_steps``), take the same steps up to the point where the shorter one begins to
decay. The shorter run leaves its state there, and a longer one goes on from it. All of it is to the
bit what the longer run would have trained by itself, so it does not matter whether a trunk is
found.

A trunk is a file ``trunks/RUNS-STEP-RATES.safetensors`` in the study's folder. ``RUNS`` is the hash
of the seed and of all of the config but the budget, the evaluation and the schedule; ``RATES`` is
the hash of the learning rates' shares of the steps so far. Whatever schedule a run has, it may go
on from a trunk whose rates are its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from tilelab.common.files import telling_full_disk
from tilelab.study.ask.config import RunConfig
from tilelab.study.ask.run import RECORD, RunSpec
from tilelab.study.ask.values import hash_of
from tilelab.study.choices import schedules
from tilelab.study.records.events import CorruptRecordError, Evaluation, RunRecord, Step
from tilelab.study.train.team import whole
from tilewise.errors import TilewiseError

CHECKPOINT = "checkpoint.safetensors"  # in the folder of a run
FORMAT = "1"

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class CheckpointError(TilewiseError):
    """A checkpoint cannot be used."""


@dataclass
class State:
    """A run between two steps."""

    identity: dict[str, str]  # only a run with the same one goes on from here
    step: int  # optimizer steps done
    tensors: dict[str, Tensor]  # all tensors by name, on the CPU
    values: dict[str, Any]  # what else decides the rest, in JSON's types (``pack``)
    totals: dict[str, Any] = field(default_factory=dict)  # only counted, not hashed

    @property
    def sha256(self) -> str:
        """The hash of everything that decides the rest of the run."""
        return state_sha256(self.tensors, {"step": self.step, **self.values})


def weights_sha256(model: nn.Module) -> str:
    """Hash all weights in the order of their names: names, dtypes, shapes, bits."""
    return state_sha256(whole(dict(model.named_parameters())), {})


def state_sha256(tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> str:
    """Hash tensors in the order of their names, and values in JSON's types."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(_bytes(tensor))
    digest.update(json.dumps(values, sort_keys=True).encode())
    return digest.hexdigest()


def pack(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return a nested value, such as a ``state_dict``, as JSON; its tensors go to ``tensors``.

    Raises:
        TypeError: something of another type is in it.
    """
    match value:
        case Tensor():
            tensors[name] = value.detach()
            return {"tensor": name}
        case dict():
            items = [[key, pack(each, f"{name}.{key}", tensors)] for key, each in value.items()]
            return {"dict": items}
        case list() | tuple():
            items = [pack(each, f"{name}.{at}", tensors) for at, each in enumerate(value)]
            return {"list" if isinstance(value, list) else "tuple": items}
        case None | bool() | int() | float() | str():
            return value
    raise TypeError(f"{name}: a {type(value).__name__} has no place in a checkpoint")


def unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the inverse of ``pack``; every tensor is a copy."""
    match packed:
        case {"tensor": str(name)}:
            return tensors[name].clone()
        case {"dict": list(items)}:
            return {key: unpack(each, tensors) for key, each in items}
        case {"list": list(items)}:
            return [unpack(each, tensors) for each in items]
        case {"tuple": list(items)}:
            return tuple(unpack(each, tensors) for each in items)
    return packed


def write(state: State, path: Path) -> None:
    """Put a state on disk in place of the one that is there.

    Raises:
        DiskFullError: there is no room; the old checkpoint is still there.
        OSError: it cannot be written for another reason; so is it then.
    """
    new = path.with_name(path.name + ".new")
    with telling_full_disk(path):
        try:
            with new.open("wb") as file:
                for part in _parts(state):
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
            new.replace(path)
        except OSError:
            with suppress(OSError):
                new.unlink()
            raise
    _sync_folder(path.parent)


def _parts(state: State) -> Iterator[bytes | memoryview]:
    """Yield the file piece by piece, so that a large model is never in memory twice."""
    header: dict[str, Any] = {
        "__metadata__": {
            "format": FORMAT,
            "identity": json.dumps(state.identity),
            "step": str(state.step),
            "sha256": state.sha256,
            "values": json.dumps(state.values),
            "totals": json.dumps(state.totals),
        }
    }
    # Wide types first: every tensor is then aligned to its own width.
    names = sorted(state.tensors, key=lambda name: (-state.tensors[name].element_size(), name))
    at = 0
    for name in names:
        tensor = state.tensors[name]
        end = at + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text))
    yield text
    for name in names:
        yield _bytes(state.tensors[name])


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _sync_folder(folder: Path) -> None:
    """Make a rename outlive a power cut, where the system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def read(path: Path, identity: Mapping[str, str]) -> State | None:
    """Return the state in a file, for the run of that identity; None where there is none.

    Raises:
        CheckpointError: it is of another run, or its bits are not those that were written.
    """
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        state = State(
            json.loads(metadata["identity"]),
            int(metadata["step"]),
            tensors,
            json.loads(metadata["values"]),
            json.loads(metadata["totals"]),
        )
        whole = metadata["format"] == FORMAT and state.sha256 == metadata["sha256"]
    except (SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(_corrupt(path, str(error))) from None
    if state.identity != dict(identity):
        raise CheckpointError(_of_another(path, state.identity, identity))
    if not whole:
        raise CheckpointError(_corrupt(path, "its checksum does not match"))
    return state


def step_of(path: Path) -> int | None:
    """Return the step of the state in a file by its header alone; None where nothing can say."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return int((file.metadata() or {})["step"])
    except (OSError, SafetensorError, KeyError, ValueError):
        return None


def _of_another(path: Path, found: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    keys = [key for key in {**wanted, **found} if found.get(key) != wanted.get(key)]
    pairs = [f"{key} {found.get(key)}, not {wanted.get(key)}" for key in keys]
    return (
        f"{path}: a checkpoint of another {keys[0]} ({'; '.join(pairs)}). Give the study another "
        f"folder, or remove {path.parent} to begin this run again"
    )


def _corrupt(path: Path, why: str) -> str:
    return (
        f"{path}: the checkpoint is damaged ({why}); remove {path.parent} to begin this run again"
    )


_TRUNKS = "trunks"
_FREE = {"budget", "evaluation", "schedule"}  # what runs of one trunk may differ in
_TRAINED = "run"  # in the totals of a trunk: who trained it


class Trunk(NamedTuple):
    """A state that a run may go on from, and what its record says of the steps so far."""

    state: State
    steps: list[Step]
    evaluations: list[Evaluation]


def branch_step(config: RunConfig) -> int:
    """Return the number of first steps that a longer run of the same config would take too."""
    steps, schedule = config.steps, config.schedule
    for step in range(steps):
        own = schedules.factor(schedule, step, steps)
        if own != schedules.factor(schedule, step, 2 * steps):
            return step
    return steps


def leave_trunk(run: RunSpec, state: State) -> None:
    """Put down the state of a run for longer ones; nothing where it is there already."""
    path = _trunk_path(run, state.step)
    if path.exists():
        return
    path.parent.mkdir(exist_ok=True)
    totals = {**state.totals, _TRAINED: run.name}
    write(replace(state, identity=_trunk_identity(run, state.identity), totals=totals), path)


def find_trunk(run: RunSpec, identity: dict[str, str]) -> Trunk | None:
    """Return the longest trunk that the run may go on from; None where there is none.

    Raises:
        CheckpointError: a trunk is damaged, or was trained on another text.
    """
    alike = (run.execution.folder / _TRUNKS).glob(f"{trunk_family(run)}-*.safetensors")
    for step in sorted((int(path.stem.split("-")[1]) for path in alike), reverse=True):
        path = _trunk_path(run, step)
        if step > branch_step(run.config) or not path.exists():  # rates of another schedule
            continue
        state = read(path, _trunk_identity(run, identity))
        assert state is not None
        trained = str(state.totals.pop(_TRAINED))
        try:
            record = RunRecord.read(run.execution.folder / "runs" / trained / RECORD)
        except CorruptRecordError:
            continue  # the run trains these steps itself
        if record.whole_steps < step:
            continue
        state.identity = dict(identity)
        evaluations = [each for each in record.evaluations if each.step <= step]
        return Trunk(state, record.steps[:step], evaluations)
    return None


def _trunk_path(run: RunSpec, step: int) -> Path:
    config = run.config
    rates = [schedules.factor(config.schedule, at, config.steps) for at in range(step)]
    digest = hashlib.sha256(json.dumps(rates).encode()).hexdigest()[:12]
    return run.execution.folder / _TRUNKS / f"{trunk_family(run)}-{step}-{digest}.safetensors"


def trunk_family(run: RunSpec) -> str:
    """Return the hash of the seed and of all of the config that runs of one trunk share."""
    config = run.config.model_dump(mode="json", exclude=_FREE)
    return hash_of({"seed": run.seed, "config": config})


def _trunk_identity(run: RunSpec, own: dict[str, str]) -> dict[str, str]:
    """Return a run's identity with the runs of the trunk in place of its own config."""
    return {**own, "config": trunk_family(run)}
