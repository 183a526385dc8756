"""The process of one run of a script: ``python -m tilelab.study.conduct.script``.

It stands where a run of ours has ``train/child.py``: the same job on standard input, the same exit
status, and it ends, with what it started, when its standard input closes.

A script reports **lines**: a JSON object each, on its standard output or in a file, or a dictionary
that its function yields or logs. In a line

* the metric makes it an evaluation; the run's result is that of the last one;
* ``step`` is a whole number that does not fall (the next one, where it is not there);
* ``loss`` is the training loss, ``lr`` the learning rate, ``tokens`` how many were learnt from
  since the run began (the steps stand for them, where no line has them);
* a metric or a loss that is not finite ends the run: it has diverged. Other values are ignored, and
  so is a line that has none of these but a learning rate.

A line is charged with all wall and CPU time since the one before it, the first with the start of
the script too, the last with its end. Speed is that of the lines after the first that go on by
steps: a line of a metric alone, after that of its step, leaves the evaluation out of it.

Memory is the peak of the largest process of a command, with all that it loads: of those that it
waited for, by the system's count at its end. Of a function it is what this process took beyond what
it had before.

A script that was killed is started again with the same folder. Where its first line has a step
above 1, it goes on from there; the record keeps what was reported up to that step.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import queue
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import torch

from tilelab.common.files import telling_full_disk
from tilelab.study.ask.run import RunSpec
from tilelab.study.conduct.command import Command
from tilelab.study.recipes import function_of
from tilelab.study.records.events import End, Evaluation, Memory, RunRecord, Start, Step, Writer
from tilelab.study.tasks.script import Script, arguments
from tilelab.study.train.child import EXPECTED_ERROR, ORPHANED, locked
from tilelab.study.train.costs import PeakMeter
from tilewise.errors import InvalidArgument, TilewiseError

FILES, OUTPUT = "files", "output.txt"  # in the folder of a run: the script's own, what it printed
_POLL_S = 0.1
_QUIET_S = 2.0  # after the end of a command, for what it left running with its standard output


class ScriptError(TilewiseError):
    """A script failed, or did not report what it has to."""


class _Diverged(Exception):  # noqa: N818  reads as what happened
    """A number of the script is not finite."""


def main() -> int:
    """Do the job on standard input; the exit status."""
    line = sys.stdin.readline()
    threading.Thread(target=end_with_parent, daemon=True).start()
    return attempt(line)


def attempt(line: str) -> int:
    """Do the job in a line; return the exit status, or raise what is a crash."""
    try:
        with telling_full_disk():
            work(RunSpec.from_json(json.loads(line)))
    except _Failed as failed:
        print(failed, file=sys.stderr)
        return 1
    except TilewiseError as error:
        print(" ".join(str(error).split("\n")), file=sys.stderr)
        return EXPECTED_ERROR
    return 0


def work(run: RunSpec) -> None:
    """Do a run in this process, or in one that it starts.

    Raises:
        TilewiseError: something that the user can put right: a line that says nothing, a folder in
            use, a command that failed.
    """
    execution, folder = run.execution, run.folder(run.execution.folder)
    if execution.core is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {execution.core})
    files = folder / FILES
    files.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        record = RunRecord.read(run.record)
        if record.done:
            return
        with closing(Writer(run.record)) as writer:
            book = _Book(run, record, writer)
            book.script.check_files()
            if book.script.command:
                _run_command(run, book, files)
            else:
                _run_function(run, book, files)


def _run_function(run: RunSpec, book: _Book, files: Path) -> None:
    script = book.script
    path, _, name = script.function.rpartition(":")
    function = function_of("task.function", Path(path), name)
    given = {
        "seed": run.seed,
        "choices": dict(run.config.choice),
        "folder": files,
        "steps": run.config.steps,
        "log": book.take,
    }
    parameters = inspect.signature(function).parameters.values()
    for each in parameters:
        if each.name not in given and each.default is inspect.Parameter.empty:
            required = f"parameters among {', '.join(given)}"
            raise InvalidArgument(script.function, f"a parameter {each.name!r}", required)
    wanted = {each.name: given[each.name] for each in parameters if each.name in given}
    book.follow(lambda: _lines_of(script, function(**wanted)), script.function)


def _lines_of(script: Script, returned: object) -> Iterable[Mapping[str, Any]]:
    """Return the lines of what a function returned: one, several, or none where it logs."""
    if returned is None:
        return ()
    if isinstance(returned, Mapping):
        return (returned,)
    if isinstance(returned, Iterable) and not isinstance(returned, str):
        return returned
    came = f"a {type(returned).__name__} from the function"
    required = "dictionaries that it yields, returns, or gives to log"
    raise InvalidArgument(script.function, came, required)


def _run_command(run: RunSpec, book: _Book, files: Path) -> None:
    script = book.script
    words = arguments(run.config, script.command, run.seed, files)
    with (files.parent / OUTPUT).open("ab", buffering=0) as output:
        tail = _Tail(files / script.lines) if script.lines else None
        try:
            process = Command(words)
        except OSError as error:
            required = f"a command that can be started ({error.strerror})"
            raise InvalidArgument("task.command", repr(words[0]), required) from None

        def peak_bytes() -> int:
            process.end()  # a run that has diverged is over before its command is
            return process.peak_bytes()

        book.time(process.cpu_s, peak_bytes)
        try:
            book.follow(lambda: _lines(process, output.write, tail), words[0])
        finally:
            process.end()


def _lines(
    process: Command, keep: Callable[[bytes], int], tail: _Tail | None
) -> Iterator[Mapping[str, Any]]:
    """Yield the lines of a command until it ends; ``keep`` takes its whole output."""
    printed: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def read(stream: IO[bytes]) -> None:
        with stream:  # closed here: elsewhere it would wait for a line of what was left running
            for line in stream:
                printed.put(line)
        printed.put(None)

    threading.Thread(target=read, args=(process.stdout,), daemon=True).start()
    open_, heard = True, time.monotonic()
    while open_:
        if process.poll() is None:
            heard = time.monotonic()
        open_ = time.monotonic() - heard < _QUIET_S
        with suppress(queue.Empty):
            line = printed.get(timeout=_POLL_S)
            open_, heard = line is not None, time.monotonic()
            keep(line or b"")
            if tail is None and (found := _parsed(line or b"")) is not None:
                yield found
        if tail is not None:
            yield from tail.new()
    code = process.wait()
    if tail is not None:
        yield from tail.new()
    if code:
        how = f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"
        raise _Failed(f"the command {how}")


class _Failed(Exception):  # noqa: N818  reads as what happened
    """The command of a run ended badly; its own words are on standard error already."""


def _parsed(line: bytes) -> Mapping[str, Any] | None:
    """Return the object of a line; None for any other line, such as a progress bar's."""
    line = line.rstrip().rpartition(b"\r")[2]  # a bar may be before it
    if not line.lstrip().startswith(b"{"):
        return None
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


class _Tail:
    """The lines that are appended to a file; those that are there already are of an older run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def new(self) -> list[Mapping[str, Any]]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            if file.seek(0, os.SEEK_END) < self._offset:
                self._offset = 0  # it was begun anew
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [found for line in whole.splitlines() if (found := _parsed(line)) is not None]


class _Book:
    def __init__(self, run: RunSpec, record: RunRecord, writer: Writer) -> None:
        self.script: Script = run.config.learning
        self._run, self._record, self._writer = run, record, writer
        self.time(_cpu_s, PeakMeter(torch.device("cpu")).peak_bytes)
        self._wall_s = self._train_cpu_s = 0.0  # since the run began, over all starts
        self._step, self._tokens, self._begun = 0, 0, False
        self._last = 0  # the step of the last evaluation
        self._evaluated = False
        self._seen: dict[str, None] = {}  # what the lines had
        self._counted = False  # whether lines say tokens

    def time(self, cpu_s: Callable[[], float], peak_bytes: Callable[[], float]) -> None:
        """Charge what comes from now on, with CPU time and peak memory as these two count them."""
        self._cpu_s, self._peak_bytes = cpu_s, peak_bytes
        self._wall, self._cpu = time.perf_counter(), cpu_s()

    def follow(self, lines: Callable[[], Iterable[Mapping[str, Any]]], name: str) -> None:
        """Take every line until there are no more, and say that the run is over.

        Raises:
            ScriptError: no line had the metric.
        """
        status, reason = "done", ""
        try:
            for line in lines():
                self.take(line)
            self._charge()
        except _Diverged as diverged:
            status, reason = "diverged", str(diverged)
        if not self._begun:
            self._resume(math.inf)  # nothing is new: it had reported all of it before
        if not self._evaluated and status == "done":
            had = ", ".join(self._seen) or "nothing: there was no line"
            raise ScriptError(
                f"{name} ended, and no line of it has {self.script.key!r}; they had {had}. Report "
                f'a JSON object a line, such as {{"step": 10, "{self.script.key}": 1.5}}'
            )
        last = self._step if status == "diverged" else self._last
        known = self._record.memory  # of an earlier start, which a resumed run has taken too
        peak = max(self._peak_bytes(), known.peak_bytes if known else 0)
        self._writer.write(Memory(peak_bytes=peak))
        self._writer.write(End(status, last, reason, "", ""))  # type: ignore[arg-type]
        self._writer.sync()

    def take(self, line: Mapping[str, Any]) -> None:
        """Write down one line.

        Raises:
            ScriptError: it is not what the top of this file says.
            _Diverged: its metric or its loss is not finite.
        """
        if not isinstance(line, Mapping):
            raise ScriptError(f"a line of {self._what} is {line!r}: it has to be a dictionary")
        self._seen.update(dict.fromkeys(line))
        if not {self.script.key, "step", "loss", "tokens"} & line.keys():
            return  # of something else, such as the settings of the script
        step, first = self._number(line, "step"), not self._begun
        if first:
            self._resume(step)
        now = self._step + 1 if step is None else int(step)
        if now < self._step or step not in (None, now):
            raise ScriptError(
                f"a line of {self._what} has step {line['step']!r} after step {self._step}: steps "
                "are whole numbers that do not fall"
            )
        said = self._number(line, "tokens")
        if said is not None and (said < self._tokens * self._counted or said < 0 or said % 1):
            before = self._tokens if self._counted else 0
            raise ScriptError(
                f"a line of {self._what} has tokens {line['tokens']!r} after tokens {before}: "
                "tokens are whole numbers that do not fall"
            )
        self._counted |= said is not None
        tokens = int(said) if said is not None else self._tokens if self._counted else now
        learnt, steps = max(0, tokens - self._tokens), now - self._step
        self._step, self._tokens = now, tokens
        loss, key = self._number(line, "loss"), self.script.key
        self._charge(loss, self._number(line, "lr"), learnt, steps, timed=steps > 0 and not first)
        if key in line:
            if line[key] is None:
                fix = "leave it out of a line without one; NaN is for a run that diverged"
                raise ScriptError(f"a line of {self._what} has {key} null: {fix}")
            self._evaluate(self._number(line, key))
        there = [name for name in ("loss", key) if line.get(name) is not None]
        if lost := [name for name in there if self._number(line, name) is None]:
            raise _Diverged(f"{lost[0]} after step {now} is {line[lost[0]]}")

    @property
    def _what(self) -> str:
        return self.script.command or self.script.function

    def _number(self, line: Mapping[str, Any], name: str) -> float | None:
        """Return a finite number of a line; None where it is not there, or is not finite."""
        value: Any = line.get(name)
        if hasattr(value, "item"):  # of numpy and torch
            with suppress(ValueError, RuntimeError, TypeError):  # of several numbers
                value = value.item()
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ScriptError(f"a line of {self._what} has {name} {value!r}: it has to be a number")
        try:
            return value if math.isfinite(value) else None
        except OverflowError:  # of an integer that no float can hold
            return None

    def _charge(
        self,
        loss: float | None = None,
        lr: float | None = None,
        learnt: int = 0,
        steps: int = 0,
        timed: bool = False,
    ) -> None:
        wall, cpu = time.perf_counter(), self._cpu_s()
        spent, cpu_s = wall - self._wall, max(0.0, cpu - self._cpu)
        self._wall, self._cpu = wall, max(cpu, self._cpu)
        self._wall_s += spent
        self._train_cpu_s += cpu_s
        if self._begun:
            rate = 0.0 if lr is None else lr
            self._writer.write(
                Step(self._step, loss, rate, None, spent, cpu_s, not timed, learnt, steps)
            )

    def _evaluate(self, value: float | None) -> None:
        self._evaluated, self._last = True, self._step
        self._writer.write(
            Evaluation(
                step=self._step,
                tokens=self._tokens,
                train_wall_s=self._wall_s,
                train_cpu_s=self._train_cpu_s,
                loss=None,
                bits_per_byte=None,
                word_perplexity=None,
                wall_s=0.0,
                metrics={self.script.metric: value},
            )
        )

    def _resume(self, first: float | None) -> None:
        """Say that the run begins, or goes on before ``first``, the step of its first line."""
        self._begun = True
        kept = [each for each in self._record.steps if first is not None and each.step < first]
        self._step = kept[-1].step if kept else 0
        self._tokens = sum(each.tokens or 0 for each in kept) if self._step else 0
        if self._step:
            self._wall_s += sum(each.wall_s for each in kept)
            self._train_cpu_s += sum(each.cpu_s for each in kept)
            older = [each.step for each in self._record.evaluations if each.step <= self._step]
            self._evaluated, self._last = bool(older), max(older, default=0)
        run, execution = self._run, self._run.execution
        source = self.script.prepare(run.config, Path())
        self._writer.write(
            Start(
                **run.facts,
                from_step=self._step,
                time=datetime.now(UTC).isoformat(timespec="seconds"),
                environment={
                    **execution.environment,
                    "threads": execution.threads,
                    "core": execution.core,
                },
                corpus=source.as_json(),
                parameters={},
                groups={},
                flops_per_token={},
                peak_flops_s=0.0,
            )
        )


def _cpu_s() -> float:
    """Return CPU seconds of this process and of what it waited for."""
    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(each.ru_utime + each.ru_stime for each in map(resource.getrusage, whose))


def end_with_parent() -> None:
    """Wait for the end of standard input, then end this process and what it started."""
    with suppress(OSError):
        while os.read(sys.stdin.fileno(), 4096):
            pass
    if os.getpgid(0) == os.getpid():  # a session of its own, as ``process.py`` makes it
        os.killpg(0, signal.SIGKILL)
    os._exit(ORPHANED)


if __name__ == "__main__":
    sys.exit(main())
