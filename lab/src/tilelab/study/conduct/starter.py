"""Start a command from a small process: ``python -I -S starter.py DESCRIPTOR WORD ...``.

Linux carries the peak memory of a process through ``exec``. So a command that a large process
starts seems to be as large as that one. This file is run by its path and imports next to nothing,
which takes some 10 MB: the least that a command is said to take. It asks macOS for the same figure,
which no test has run there.

It writes two lines to the descriptor:

* ``started PID``, or ``failed ERRNO`` where the command cannot be started;
* ``ended STATUS CPU_S PEAK_BYTES``: the status as ``subprocess`` has it, CPU seconds of the command
  and of the processes that it waited for, and the peak of the largest of them.

A SIGTERM goes on to the command, and a second one kills it.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress


def main() -> None:
    """Start the command, wait for its end, and report both."""
    report, words = int(sys.argv[1]), sys.argv[2:]
    os.set_inheritable(report, False)
    failure, told = os.pipe()  # closed by exec
    process = os.fork()
    if process == 0:
        try:
            for each in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
                signal.signal(each, signal.SIG_DFL)
            os.execvp(words[0], words)
        except OSError as error:
            os.write(told, str(error.errno).encode())
        finally:
            os._exit(127)
    os.close(told)
    if number := os.read(failure, 16):
        os.waitpid(process, 0)
        os.write(report, b"failed %s\n" % number)
        return
    ways = [signal.SIGKILL, signal.SIGTERM]

    def end(*_: object) -> None:
        with suppress(ProcessLookupError):
            os.kill(process, ways.pop() if len(ways) > 1 else ways[0])

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the command has it too
    os.write(report, b"started %d\n" % process)
    if hasattr(os, "waitid"):  # so that nobody else has its number while it may be signalled
        os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _, code, spent = os.wait4(process, 0)
    status, cpu_s = os.waitstatus_to_exitcode(code), spent.ru_utime + spent.ru_stime
    peak = spent.ru_maxrss if sys.platform == "darwin" else spent.ru_maxrss * 1024
    os.write(report, f"ended {status} {cpu_s} {peak}\n".encode())


if __name__ == "__main__":
    main()
