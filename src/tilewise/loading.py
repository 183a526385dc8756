"""What is otherwise while tilewise loads: the garbage collector and Ctrl-C."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130


def command_loads() -> bool:
    """Return whether this process is the command ``tilewise``, or ``python -m tilewise``."""
    program = sys.argv[0] if sys.argv else ""
    asked = sys.orig_argv[1:3] == ["-m", __package__]
    return asked or os.path.basename(program).removesuffix(".exe") == "tilewise"


@contextmanager
def ending_at_once(wanted: bool = True) -> Iterator[None]:
    """End the process with status 130 on Ctrl-C while the block lasts.

    Loading takes two seconds, most of them torch's. An interrupt in an import comes up as a
    traceback, or as an error of a package that was loaded by half. So the command ends at once.
    Programs that import tilewise keep Python's own way: only the command, by its name, asks for
    this.

    ``wanted=False`` changes nothing. Neither does another thread than the main one, nor a program
    that handles or ignores Ctrl-C itself.
    """
    main = threading.current_thread() is threading.main_thread()
    if not (wanted and main) or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def collecting_later() -> Iterator[None]:
    """Leave the garbage collector off while the block lasts, if it was on.

    Our imports make enough objects for a full collection. It reads all of torch's objects too, and
    takes longer than the imports. So the block ends without one: freezing and thawing makes every
    object an old one and sets Python's counts to zero, at no cost. A program that has frozen
    objects itself keeps them so. There the block ends with a collection of young objects.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() == 0:
            gc.freeze()
            gc.unfreeze()
        elif collects:
            gc.collect(0)
        if collects:
            gc.enable()


def _end(number: int, frame: FrameType | None) -> None:
    """Not by an exception: what is loaded by half need not be tidied up."""
    os._exit(INTERRUPTED)
