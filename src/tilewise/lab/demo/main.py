"""``tilewise demo``: train, compare, report.

Exit status: 0 the losses agree, 1 they do not or the run failed, 2 a wrong option or text,
130 stopped with Ctrl-C (the report of what was done is written all the same).
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from tilewise.errors import InvalidArgument
from tilewise.lab.demo import contest, corpus, longtable, report, words
from tilewise.lab.demo.child import ChildError
from tilewise.lab.demo.contest import DivergenceError
from tilewise.lab.demo.forecast import forecast_s, in_words
from tilewise.lab.demo.longtable import Cell
from tilewise.lab.demo.progress import Progress
from tilewise.lab.demo.record import COMPLETE, Record
from tilewise.lab.demo.settings import Settings, parse

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo.

    Args:
        argv: the options; None takes them from the command line.

    Returns:
        The exit status (see the module).
    """
    try:
        settings = parse(list(sys.argv[1:] if argv is None else argv))
        record = _prepare(settings)
    except InvalidArgument as error:
        print(f"tilewise demo: {error}", file=sys.stderr)
        return 2
    progress = Progress(record.arms, settings.steps, sys.stdout)
    _announce(record, progress)
    code = _run(record, progress)
    if not record.arms[0].losses:
        progress.say(f"Nothing to report: {record.status}.")
        return code
    with _interrupts_ignored():
        page = report.write(record)
    progress.say(report.summary(record))
    progress.say(f"Report: {page.resolve()}\nRaw numbers: {page.with_suffix('.json').resolve()}")
    return code


def _prepare(settings: Settings) -> Record:
    """Everything that can be wrong with what was asked, before anything takes time."""
    text = corpus.load(settings.text, corpus.bytes_needed(settings.context))
    try:
        settings.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        came = f"{settings.out} ({error.strerror})"
        raise InvalidArgument("--out", came, "a folder, there or to be made") from None
    torch.set_num_threads(settings.threads)
    return Record.begin(settings, text)


def _announce(record: Record, progress: Progress) -> None:
    settings, text = record.settings, record.corpus
    progress.say(
        f"Training a byte-level GPT ({settings.layers} layers, width {settings.width}, "
        f"{settings.heads} heads, context {settings.context:,})\n"
        f"on {text.name} ({len(text.data):,} bytes of {words.count(text.files, 'file')}, "
        f"sha256 {text.sha256[:12]}),\n"
        f"{words.count(settings.steps, 'step')} of {record.tokens:,} bytes: once with plain "
        "attention, once with tilewise, and twice more with plain\n"
        "attention from weights moved by one ulp, to see how much rounding alone changes."
    )
    threads = words.count(settings.threads, "thread")
    progress.say(
        f"tilewise runs its backend {record.environment['backend']!r}.\n"
        f"Expected time: {in_words(forecast_s(settings))} on {threads}. "
        "Ctrl-C stops early and still writes the report."
    )


def _run(record: Record, progress: Progress) -> int:
    """The whole run; whatever stops it is in the record's status afterwards."""
    started = time.perf_counter()
    try:
        with _corpus_file(record.corpus.data) as path:
            contest.run(record.settings, record.arms, path, progress)
            progress.end()
            _long_contexts(record, path, progress)
        record.status = COMPLETE
        code = 0 if all(check.passed for check in record.checks()) else 1
    except KeyboardInterrupt:
        progress.end()
        record.status = "stopped with Ctrl-C"
        code = 130
    except (ChildError, DivergenceError) as error:
        progress.end()
        record.status = str(error)
        print(f"tilewise demo: {error}", file=sys.stderr)
        code = 1
    record.seconds = time.perf_counter() - started
    return code


def _long_contexts(record: Record, path: str, progress: Progress) -> None:
    def told(cell: Cell) -> None:
        progress.say(f"  {report.cell_line(cell)}")

    if record.settings.long_contexts:
        progress.say("One forward and backward of a long window:")
        longtable.fill(record.settings, len(record.corpus.data), path, record.cells, told)


@contextmanager
def _corpus_file(data: bytes) -> Iterator[str]:
    """The text as a file that the children read, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="tilewise-demo-") as folder:
        path = Path(folder, "corpus")
        path.write_bytes(data)
        yield str(path)


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """A second Ctrl-C must not cost the report that the first one asked for."""
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not the main thread, where no signal arrives anyway
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    sys.exit(main())
