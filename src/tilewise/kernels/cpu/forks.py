"""The number of threads of a call, and why a forked process may have only one.

A fork copies the thread that calls it and no other. GNU's OpenMP runtime does not notice: where the
forking thread had a team, the child would wait forever for threads that it does not have. Torch's
own operations hang there too. So the first call on several threads raises instead.
"""

from __future__ import annotations

import os
import sys
import threading

import torch

from tilewise.errors import LostThreads

_forked: int | None = None  # the thread without its team; None where nothing is lost


def threads() -> int:
    """Return how many threads a call may take: as many as torch does.

    Raises:
        LostThreads: this process is a fork, and the threads stayed in its parent.
    """
    wished: int = torch.get_num_threads()
    if _forked is not None and wished > 1 and threading.get_ident() == _forked:
        raise LostThreads(wished)
    return wished


def _after_fork() -> None:
    global _forked
    core = sys.modules.get("tilewise._core")
    if core is not None and core.fork_loses_team():
        _forked = threading.get_ident()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
