"""The record of a run: one append-only file of JSON lines. Nothing else is ever believed.

Every line is one event. A line is written whole and flushed, so a crash loses at most the line in
flight; a reader drops a last line that does not end. A
run that is resumed writes another ``Start`` with the step it goes on from. A reader forgets the
steps and evaluations after that step: they are done again, with the same bits but other timings. A
record that lacks steps is not done, whatever its end says.

Losses of language models are in nats per token. A number that is not finite is stored as null;
``End`` says why.

A line is a JSON object whose last field is ``check``: the CRC-32 of the line before, then of this
line without the field. So a number that was edited, and a line that was removed, doubled or moved,
are noticed. Lines of records that older versions wrote have no checksum: they come first, or are
all there are.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from tilewise.errors import TilewiseError

_CHECK = re.compile(rb',"check":"([0-9a-f]{8})"\}$')


class _DamagedLine(ValueError):  # noqa: N818  reads as what is wrong
    """A line is not as it was written, or does not follow the line before it."""


def _sealed(line: str, before: bytes) -> bytes:
    """Return a line of JSON, newline included, with a checksum of it and the line before."""
    body = line.rstrip("\n").encode()
    return body[:-1] + b',"check":"%08x"}\n' % zlib.crc32(body, zlib.crc32(before))


def _whole_lines(path: Path) -> Iterator[tuple[int, bytes, _DamagedLine | None]]:
    """Yield number and text of every whole line, and what is wrong with it."""
    # A last line that does not end was in flight when the writer died.
    *whole, _torn = path.read_bytes().split(b"\n")
    before, seals = b"", False
    for number, line in enumerate(whole, 1):
        found = _CHECK.search(line)
        wrong = None
        if found:
            seals = True
            body = line[: found.start()] + b"}"
            if int(found[1], 16) != zlib.crc32(body, zlib.crc32(before)):
                wrong = _DamagedLine("its checksum is of another line, or of another line before")
        elif seals:
            wrong = _DamagedLine("it has no checksum, and a line before it has one")
        yield number, line, wrong
        before = line + b"\n"


def _mended(path: Path) -> bytes:
    """Cut off a torn last line; return the last whole line, empty where there is none."""
    if not path.exists():
        return b""
    data = path.read_bytes()
    *whole, torn = data.split(b"\n")
    os.truncate(path, len(data) - len(torn))
    return whole[-1] + b"\n" if whole else b""


FORMAT = 1
PROBED = " (eager probe)"  # end of a kernel's name: of a compiled model, see ``train/costs.py``
UNNAMED = ": unknown"  # the same: its graph did not show which


class CorruptRecordError(TilewiseError):
    """A line of a record cannot be read, or is not as it was written."""


@dataclass(frozen=True)
class Event:
    """One line; ``event`` names its type."""

    event: ClassVar[str]

    def line(self) -> str:
        """Return the event as one line of JSON, newline included."""
        values = {"event": self.event, **finite(asdict(self))}
        return json.dumps(values, separators=(",", ":"), allow_nan=False) + "\n"


@dataclass(frozen=True)
class Start(Event):
    """A process took up the run."""

    event = "start"
    run: str  # its name, ``experiment/arm/seed-0`` (a sweep's trial: ``.../sweep-0.003-seed-1000``)
    experiment: str
    arm: str
    seed: int
    phase: Literal["final", "sweep"]
    candidate: float | None  # the swept value of a trial
    config: dict[str, Any]  # everything of the run but its seed, written out
    config_hash: str  # of ``config``
    from_step: int  # optimizer steps already done (0 for a new run)
    time: str  # ISO 8601, UTC
    environment: dict[str, Any]  # versions, chip, threads, git commit
    corpus: dict[str, Any]  # name, sha256, tokens and bytes of the training and the held-out text
    parameters: dict[str, int]  # total, and ``embedding`` (looked up only)
    groups: dict[str, list[str]]  # name of each parameter group -> the names of its parameters
    flops_per_token: dict[str, float]  # ``full`` (12 L d T) and ``causal`` (6 L d T) conventions
    peak_flops_s: float  # measured in its precision; on a CPU per second of CPU time
    weights_sha256: str = ""  # before the first step; empty where not recorded
    shared_steps: int = 0  # first ones, which another run took: ``train/state.py``
    same_as: str = ""  # the run of the study that was trained in this one's place, by its name
    format: int = FORMAT

    @property
    def tokens_per_step(self) -> int:
        """Tokens that an optimizer step can learn from: whole sequences, no padding."""
        training = self.config["training"]
        return int(training["batch"] * training["accumulation"] * self.config["model"]["context"])


@dataclass(frozen=True)
class Step(Event):
    """One optimizer step is done."""

    event = "step"
    step: int  # 1 for the first
    loss: float | None  # of the step's batch before the step, without smoothing and z-loss
    lr: float
    gradient_norm: float | None  # before clipping
    wall_s: float  # all micro-batches
    cpu_s: float  # over all threads
    warmup: bool  # left out of throughput (the first ones of a process)
    tokens: int | None = None  # learnt from; None in old records: as the config says
    # Steps that the line stands for, this the last of them: see ``condensed``. Of a script those
    # since its line before: 0 where it says more of the same step.
    of: int = 1


@dataclass(frozen=True)
class LayerSoftmax:
    """Softmax statistics of an attention layer, over some held-out windows."""

    layer: int
    entropy: float | None  # mean over windows, heads and rows, in nats
    lowest_head: float | None  # of the head whose mean entropy is lowest
    max_logit: float | None  # after the scale and what a variant does


@dataclass(frozen=True)
class Evaluation(Event):
    """The held-out loss after a step."""

    event = "evaluation"
    step: int  # optimizer steps done; 0 before the first
    tokens: int  # trained on so far
    train_wall_s: float  # in optimizer steps so far, over all resumes
    train_cpu_s: float
    loss: float | None  # mean nats per token on the held-out windows; of other tasks their own loss
    bits_per_byte: float | None  # the same per byte of the text, base 2; None of other tasks
    word_perplexity: float | None  # exp(total nats / original words), for WikiText; None elsewhere
    wall_s: float  # of the evaluation itself
    softmaxes: list[LayerSoftmax] | None = None  # None: no statistics, or not asked for
    metrics: dict[str, float | None] = field(default_factory=dict)  # ``ask.metrics.METRICS``
    # Of the last one where it scores all of the text: the metrics on the windows of the others.
    on_windows: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Memory(Event):
    """The parts of memory: sums of storages, and the peak over what was held before the model.

    Whole numbers in a record; in a verdict the means over an arm's seeds. Of a script the peak
    alone is known: ``conduct/script.py``.
    """

    event = "memory"
    weights_bytes: float | None = None
    gradients_bytes: float | None = None
    optimizer_bytes: float | None = None
    activations_bytes: float | None = None  # what autograd saves of one micro-batch, no weights
    peak_bytes: float = 0.0  # on a GPU the allocator's


@dataclass(frozen=True)
class LayerKernel:
    """The attention kernel that a layer ran in training, and how often."""

    layer: int
    kernel: str  # e.g. ``"tilewise cpu"``, ``"sdpa flash"``, ``"sdpa math"``, ``"plain"``.
    calls: int  # forward passes since the run began


@dataclass(frozen=True)
class Kernels(Event):
    """The kernels that the guard saw, cumulative over the run."""

    event = "kernels"
    layers: list[LayerKernel]


@dataclass(frozen=True)
class Checkpoint(Event):
    """The state after ``step`` is safely on disk."""

    event = "checkpoint"
    step: int


@dataclass(frozen=True)
class Sample(Event):
    """The text that the model of the last step writes."""

    event = "sample"
    prompt: str  # the beginning of the held-out text
    text: str


@dataclass(frozen=True)
class End(Event):
    """The run is over."""

    event = "end"
    status: Literal["done", "diverged"]
    step: int  # the last step that was taken
    reason: str  # in words; empty for ``"done"``
    weights_sha256: str  # of all weights in the order of their names
    state_sha256: str  # of weights and optimizer state


_TYPES: dict[str, type[Event]] = {
    kind.event: kind for kind in (Start, Step, Evaluation, Memory, Kernels, Checkpoint, Sample, End)
}


@dataclass
class RunRecord:
    """A run as its file tells it. Empty lists and None where it has not come so far.

    ``missing`` says which steps were lost; the run has no end then.
    """

    starts: list[Start] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    memory: Memory | None = None
    kernels: Kernels | None = None
    checkpoint: int = 0
    sample: Sample | None = None
    end: End | None = None
    missing: str = ""

    @property
    def start(self) -> Start:
        """The first start: what the run is."""
        return self.starts[0]

    @property
    def done(self) -> bool:
        """Whether the run is over, well or not."""
        return self.end is not None

    @property
    def diverged(self) -> bool:
        """Whether the run ended because a number was not finite."""
        return self.end is not None and self.end.status == "diverged"

    @property
    def weights_sha256(self) -> str:
        """The hash of the weights at its end; empty before it."""
        return "" if self.end is None else self.end.weights_sha256

    @classmethod
    def read(cls, path: Path) -> RunRecord:
        """Return the record in a file; an empty record where there is no file.

        Raises:
            CorruptRecordError: a line other than a torn last one is not an event, or was changed;
                or nothing can be read.
        """
        record = cls()
        for event in _events(path):
            record._add(event)
        record.missing = record._lost()
        if record.missing:
            record.end = None
        return record

    @property
    def of_script(self) -> bool:
        """Whether the run is of a script: its steps are the lines that it reported."""
        return bool(self.starts) and self.start.config.get("task", {}).get("name") == "script"

    @property
    def one_thread(self) -> bool:
        """Whether its processor time is what its wall time would be without other work.

        That is so on one thread of a CPU. Nobody knows what a script runs on.
        """
        if self.of_script or not self.starts:
            return False
        where = self.start.environment
        device, processes = where.get("device", "cpu"), where.get("processes") or 1
        return device == "cpu" and where.get("threads") == 1 and processes == 1

    @property
    def whole_steps(self) -> int:
        """Steps from the first one on, up to the first that is missing.

        A script reports the steps that it wants: none of them is missing.
        """
        if self.of_script:
            return self.steps[-1].step if self.steps else 0
        at = 0
        for each in self.steps:
            if each.step - each.of != at:
                break
            at = each.step
        return at

    def _lost(self) -> str:
        """Return the steps that must be there by what the record says, and are not; in words."""
        if not self.starts:
            return ""
        last = max([self.starts[-1].from_step, *(each.step for each in self.steps)])
        if self.end is not None:
            last = max(last, self.end.step)
            if self.end.status == "done" and not self.of_script:
                last = max(last, _planned_steps(self.start))
        if self.whole_steps >= last:
            return ""
        return f"{self.whole_steps} of {last} steps are in the record"

    def _add(self, event: Event) -> None:
        match event:
            case Start():
                self.starts.append(event)
                self.checkpoint, self.end = event.from_step, None
                if not event.from_step:
                    self.steps, self.evaluations = [], []
                # An evaluation after the step of the checkpoint is in the checkpoint too.
                last = event.from_step
                self.steps = [each for each in self.steps if each.step <= last]
                self.evaluations = [each for each in self.evaluations if each.step <= last]
            case Step():
                self.steps.append(event)
            case Evaluation():
                # One that a resumed run makes again takes the place of the first.
                kept = [each for each in self.evaluations if each.step != event.step]
                self.evaluations = [*kept, event]
            case Checkpoint():
                self.checkpoint = event.step
            case Memory() | Kernels() | Sample() | End():  # the last one counts
                setattr(self, event.event, event)


def is_over(run: str, records: Mapping[str, RunRecord]) -> bool:
    """Return whether the run of that name is over, by the records so far."""
    return run in records and records[run].done


_WHOLE_STEPS = 32  # first ones that are kept apart: kernels are compared by them
_BLOCK = 32


def renamed(path: Path, **changes: Any) -> bytes:
    """Return a whole record with other values in its starts: the record of a run like that one."""
    return _as_bytes(
        replace(each, **changes) if isinstance(each, Start) else each for each in _events(path)
    )


def condensed(path: Path) -> bytes:
    """Return a record with blocks of steps as one line each, for storing; it reads like the whole.

    A block has the mean loss, the largest gradient norm, the last rate, and sums of times and
    tokens. The first steps, those of a warm-up and those that are not finite stay apart.
    """
    events = list(_events(path))
    # A script says no norms at all.
    norms = any(isinstance(each, Step) and each.gradient_norm is not None for each in events)
    found: list[Event] = []
    block: list[Step] = []

    def flush() -> None:
        if block:
            found.append(_as_one(block))
            block.clear()

    for event in events:
        if isinstance(event, Step) and not _apart(event, norms):
            block.append(event)
            if event.step % _BLOCK == 0:
                flush()
        else:
            flush()
            found.append(event)
    flush()
    return _as_bytes(found)


def _as_bytes(events: Iterable[Event]) -> bytes:
    lines, before = [], b""
    for event in events:
        before = _sealed(event.line(), before)
        lines.append(before)
    return b"".join(lines)


def _apart(step: Step, norms: bool) -> bool:
    finite = step.loss is not None and (step.gradient_norm is not None or not norms)
    return step.step <= _WHOLE_STEPS or step.warmup or not finite


def _as_one(block: Sequence[Step]) -> Step:
    tokens = [each.tokens for each in block if each.tokens is not None]
    norms = [each.gradient_norm for each in block if each.gradient_norm is not None]
    return replace(
        block[-1],
        loss=statistics.fmean(each.loss for each in block if each.loss is not None),
        gradient_norm=max(norms, default=None),
        wall_s=sum(each.wall_s for each in block),
        cpu_s=sum(each.cpu_s for each in block),
        tokens=sum(tokens) if tokens else None,
        of=sum(each.of for each in block),
    )


class Writer:
    """Appends events to a record; mends a torn last line first."""

    def __init__(self, path: Path) -> None:
        self._before = _mended(path)
        self._file = path.open("ab", buffering=0)

    def write(self, event: Event) -> None:
        """Append one event: one write, so that it is there whole or torn, never mixed.

        Raises:
            OSError: there is no room. What is in the file already stays as it was.
        """
        line = whole = _sealed(event.line(), self._before)
        before = os.fstat(self._file.fileno()).st_size
        try:
            while line:  # a disk that fills up takes a part first, and refuses the rest
                line = line[self._file.write(line) :]
        except OSError:
            self._file.truncate(before)
            raise
        self._before = whole

    def sync(self) -> None:
        """Make what was written outlive a power cut."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _planned_steps(start: Start) -> int:
    """Steps of the whole run by its config as written; 0 where it does not say."""
    try:
        budget = start.config["budget"]
        if budget["tokens"] is None:
            return int(budget["steps"])
        return int(-(-budget["tokens"] // start.tokens_per_step))
    except (LookupError, TypeError, ValueError, ZeroDivisionError):
        return 0


def _events(path: Path) -> Iterator[Event]:
    if not path.exists():
        return
    try:
        lines = list(_whole_lines(path))
    except OSError as error:
        fix = "Move the folder of the run away to train it again."
        raise CorruptRecordError(f"{path}: cannot be read ({error.strerror}). {fix}") from None
    for number, line, wrong in lines:
        try:
            event = _event(json.loads(line))
            if wrong is not None:
                raise wrong
            yield event
        except (ValueError, KeyError, TypeError) as error:
            why = f"{type(error).__name__}: {error}"
            message = (
                f"{path}, line {number}: not an event of a study ({why}); the file was changed "
                "or the disk lost it. Move the folder of the run away to train it again."
            )
            raise CorruptRecordError(message) from None


def _event(values: object) -> Event:
    if not isinstance(values, dict):
        raise TypeError(f"a {type(values).__name__}")
    kind = _TYPES[values.pop("event")]
    if kind is Start and values["format"] != FORMAT:
        raise ValueError(f"format {values['format']}, and this tilewise reads format {FORMAT}")
    if kind is Kernels:
        return Kernels([LayerKernel(**each) for each in values["layers"]])
    known = {each.name for each in fields(kind)}
    given = {key: value for key, value in values.items() if key in known}
    if given.get("softmaxes") is not None:
        given["softmaxes"] = [LayerSoftmax(**each) for each in given["softmaxes"]]
    return kind(**given)


def finite(value: Any) -> Any:
    """Return the values with null for every number that is not finite, however deep inside."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return value
