"""The processes of runs: ``python -m tilelab.study.train.child``, with ``serve`` or ``launch``.

**Alone** it does one run. It reads one line of JSON from standard input, a ``RunSpec``, and writes
to the folder of its run. It ends when its work is done, and at once when its standard input closes.
So a parent that is gone, killed or not, leaves no process behind.

Exit status:

* 0: the run is over (done or diverged; its record tells), or time is up (``Execution.until``);
* 3: an error that its user can put right, said in the last line of standard error;
* anything else: a crash.

With **serve** it does several runs, one after the other. It reads a line for each, and writes a
line of JSON to standard output when that run is over, or time is up. Everything else that is
printed goes to standard error. It ends after a run that failed: what a failed run leaves behind is
not to meet the next one.

Runs whose configs differ in optimizer, schedule, length or evaluation alone share what
``torch.compile`` made for the first of them: it compiles once. Before any other run the compiler
forgets everything. So a run computes what it computes in a process of its own, to the bit.

With **launch CHILD** it does a run in several processes of the module CHILD. It reads the same job,
ends at once when standard input closes, and has the same exit status. In between it starts the
processes as ``torchrun --standalone`` does, with torch's own agent: that one names them, watches
them, and ends all when one fails.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import cuda

from tilelab.common import memory
from tilelab.common.files import telling_full_disk
from tilelab.study.ask.config import RunConfig
from tilelab.study.ask.run import RunSpec
from tilelab.study.tasks.task import Prepared, data_key, dtype_of
from tilelab.study.train.costs import PeakMeter, peak_flops_s
from tilelab.study.train.session import Session
from tilelab.study.train.team import check, device_of, joined
from tilelab.study.train.trainer import Trainer
from tilewise.errors import TilewiseError

if TYPE_CHECKING:  # most runs have one process
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

EXPECTED_ERROR = 3
ORPHANED = 4
JOB = "TILEWISE_STUDY_JOB"  # holds the line where there are several processes for one input
_LOCK = ".lock"
_LOCK_WAIT_S = 10.0  # for a process that is just ending
_MONITOR_S = 0.1
_NO_MEMORY = "can't allocate memory"  # what torch says on a CPU
_COMPILED = ("model", "attention", "training", "data", "task")  # what graphs and shapes follow from


def main() -> int:
    """Do the job on standard input, or in the environment; the exit status."""
    line = os.environ.get(JOB) or sys.stdin.readline()
    threading.Thread(target=end_with_parent, daemon=True).start()
    return attempt(line, work)


def attempt(line: str, do: Callable[[RunSpec], None]) -> int:
    """Do the job in a line; return the exit status, or raise what is a crash."""
    try:
        with telling_full_disk():
            do(RunSpec.from_json(json.loads(line)))
    except TilewiseError as error:
        return _refuse(str(error))
    except Exception as error:
        full = isinstance(error, RuntimeError) and _NO_MEMORY in str(error)
        if full or isinstance(error, torch.OutOfMemoryError):
            return _refuse(
                f"out of memory ({str(error).splitlines()[0]}): take a smaller training.batch with "
                "more training.accumulation, training.checkpointing=true, or fewer --jobs"
            )
        _tell_agent(traceback.format_exc())
        raise
    return 0


def work(run: RunSpec, prepared: Callable[[RunConfig, Path], Prepared] | None = None) -> None:
    """Do a run in this process.

    ``prepared`` gives the data of a config, from that folder of caches; None: its task does.

    Raises:
        TilewiseError: something that the user can put right: data, a checkpoint of another config,
            a folder in use.
        OSError: something cannot be written.
    """
    config, execution = run.config, run.execution
    if execution.core is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {execution.core})
    torch.set_num_threads(execution.threads)
    check(config, execution.processes, execution.strategy, execution.context)
    device = device_of(execution.device)
    folder = run.folder(execution.folder)
    folder.mkdir(parents=True, exist_ok=True)
    with (
        joined(execution.processes, execution.strategy, device, execution.context) as team,
        locked(folder) if team.lead else contextlib.nullcontext(),  # the others do not write
    ):
        prepare = config.learning.prepare if prepared is None else prepared
        data = team.first(lambda: prepare(config, execution.cache))
        _warm(config, data, device)
        dtype = dtype_of(config.training.precision)
        # Before the meter: it takes memory. The lead measures while the others are idle.
        peak = team.agreed(peak_flops_s(dtype, device) if team.lead else 0.0) * team.size
        meter = PeakMeter(device)
        trainer = Trainer(run, data, device, team)
        # A gradient is as large as its weight, and is taken anew in each step.
        memory.keep(max(each.nbytes for each in trainer.model.parameters()))
        session = Session(
            trainer,
            data,
            folder,
            meter,
            peak_flops_s=peak,
            checkpoint_every_s=execution.checkpoint_every_s,
            environment={
                **execution.environment,
                "threads": execution.threads,
                "processes": team.size,
                "strategy": team.strategy if team.size > 1 else None,
                **({"context": team.context} if team.context > 1 else {}),
                "core": execution.core,
                "device": device.type if device.type != "cuda" else cuda.get_device_name(device),
            },
        )
        session.work()


def _warm(config: RunConfig, data: Prepared, device: torch.device) -> None:
    """Let the process take what torch takes once, so that no arm is charged for it as memory."""
    task = config.learning
    numbers = {"layers": 1, "heads": 1, "kv_heads": None, "width": 16}
    others = {"checkpoint": "", "feed_forward": None}
    if not task.sized_by_data:
        numbers["context"] = 16
    small = config.model.model_copy(update={**numbers, **others})
    training = config.training.model_copy(update={"batch": 1, "accumulation": 1})
    cut = config.model_copy(update={"model": small, "training": training})
    model = task.model(cut, data, 0, device)
    (batch,) = task.batches(cut, data, 0)(0)
    model(*batch.to(device).inputs).sum().backward()
    torch.optim.AdamW(model.parameters(), fused=True).step()


def end_with_parent() -> None:
    """Wait for the end of standard input, then end the process, whatever it is doing.

    Read without Python's buffer, whose lock would disturb an orderly end of the interpreter.
    """
    with contextlib.suppress(OSError):
        while os.read(sys.stdin.fileno(), 4096):
            pass
    os._exit(ORPHANED)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Nobody else works in this folder while the block lasts; the system ends the lock."""
    with (folder / _LOCK).open("a") as file:
        deadline = time.monotonic() + _LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    message = f"{folder}: another process works on this run; wait for it or end it"
                    raise TilewiseError(message) from None
                time.sleep(0.05)
        yield


def _refuse(words: str) -> int:
    line = " ".join(words.split("\n"))
    print(line, file=sys.stderr)
    _tell_agent(line)
    return EXPECTED_ERROR


def _tell_agent(words: str) -> None:
    """Leave the reason where torch's agent looks for it, if one started this process."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"timestamp": int(time.time()), "py_callstack": words}
        message = {"message": words, "extraInfo": extra}
        Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")


def leave(status: int) -> NoReturn:
    """End this process with an exit status.

    One of several processes skips the end of the interpreter. Gloo's threads may still hold tensors
    there, and a thread that wants the interpreter's lock too late aborts a process whose work is
    done (pytorch/pytorch#179291).
    """
    if JOB not in os.environ:
        sys.exit(status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Opened:
    """The data of the last run: runs in a row that share it read and check it once."""

    def __init__(self) -> None:
        self._data: dict[str, Prepared] = {}  # by ``data_key``

    def __call__(self, config: RunConfig, cache: Path) -> Prepared:
        """Return the data of a config, from that folder of caches."""
        key = f"{data_key(config)} {cache}"
        if key not in self._data:
            self._data = {key: config.learning.prepare(config, cache)}
        return self._data[key]


class Server:
    """Does runs in this process."""

    def __init__(self) -> None:
        self._graphs = ""  # what the compiled code in this process was made for
        self._opened = Opened()

    def work(self, run: RunSpec) -> None:
        """Do a run; raise what the function ``work`` raises."""
        parts = (getattr(run.config, name).model_dump_json() for name in _COMPILED)
        graphs = " ".join([run.execution.device, *parts])
        if graphs != self._graphs:
            self._graphs = graphs
            if "torch._dynamo" in sys.modules:  # which takes a second to import
                torch.compiler.reset()
        # Memory that the last run left counts as held before this one.
        gc.collect()
        if run.execution.device == "cuda":
            torch.cuda.empty_cache()
        work(run, self._opened)


def serve() -> int:
    """Do the jobs on standard input until one fails; return the exit status."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=partial(_read, lines), daemon=True).start()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        server = Server()
        while True:
            status = attempt(lines.get(), server.work)
            if status:
                return status
            print(json.dumps({"status": status}), file=answers, flush=True)


def _read(lines: queue.SimpleQueue[str]) -> None:
    """Put down the lines of standard input; end the process with it, whatever it is doing."""
    rest = b""
    while data := os.read(sys.stdin.fileno(), 1 << 16):
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            lines.put(line.decode())
    os._exit(ORPHANED)


def launch(module: str) -> int:
    """Do the job on standard input in processes of a module; return the exit status."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    line = sys.stdin.readline()
    threading.Thread(target=end_with_parent, daemon=True).start()
    os.environ[JOB] = line  # standard input is for all of them to see that it closes
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=json.loads(line)["execution"]["processes"],
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=_MONITOR_S,
    )
    try:
        elastic_launch(config, sys.executable)("-m", module)
    except ChildFailedError as error:
        return _reported(error)
    return 0


def _reported(error: ChildFailedError) -> int:
    """Say which process failed first and why; the exit status is its own."""
    rank, failure = min(error.failures.items(), key=lambda each: _order(each[1]))
    if failure.exitcode == EXPECTED_ERROR:
        print(failure.message, file=sys.stderr)
        return EXPECTED_ERROR
    if failure.exitcode < 0:
        print(f"process {rank} was ended by signal {-failure.exitcode}", file=sys.stderr)
        # To end the same way: whoever started this one tells a signal from an error.
        if failure.exitcode != -signal.SIGKILL:
            signal.signal(-failure.exitcode, signal.SIG_DFL)
        os.kill(os.getpid(), -failure.exitcode)
    print(f"process {rank} ended with status {failure.exitcode}", file=sys.stderr)
    print(failure.message, file=sys.stderr)
    return failure.exitcode


def _order(failure: ProcessFailure) -> tuple[int, int]:
    """Return a sort key with the cause first: when a process dies, others fail waiting for it."""
    code = failure.exitcode
    if code == -signal.SIGTERM:  # by which the agent ends the rest
        rank = 3
    elif code < 0:
        rank = 0
    else:
        rank = 1 if code == EXPECTED_ERROR else 2
    return rank, failure.timestamp


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve"]:
            sys.exit(serve())
        case ["launch", child]:
            sys.exit(launch(child))
    leave(main())
