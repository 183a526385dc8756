"""A child whose second process fails as told when it is to take step 4, or after its work."""

from __future__ import annotations

import atexit
import os
import signal
from typing import Any

from tilelab.study.train import child
from tilelab.study.train.trainer import Trainer
from tilewise.errors import TilewiseError

_take = Trainer.step


def _step(self: Trainer) -> Any:
    if self.team.rank == 1 and self.done == 3:
        match os.environ["TILEWISE_TEST_FAILS"]:
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "wrong":
                raise TilewiseError("the text is gone: get it back")
            case "crash":
                raise ValueError("a bug of ours")
            case "teardown":
                atexit.register(os.abort)
    return _take(self)


if __name__ == "__main__":
    Trainer.step = _step  # type: ignore[method-assign]
    child.leave(child.main())
