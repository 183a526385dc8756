"""A worker for the tests: does what the name of a job says."""

from __future__ import annotations

import json
import os
import sys
import time


def say(**words: object) -> None:
    print(json.dumps(words), flush=True)


for line in sys.stdin:
    asked = json.loads(line)
    job, step = asked["job"], asked["step"]
    row = {"step": step, "name": job, "status": "ok", "note": "", "values": {"pid": os.getpid()}}
    if job.startswith("sleep"):
        say(answer=row)
        time.sleep(60)
    elif job.startswith("die"):
        print("the last words", file=sys.stderr, flush=True)
        os._exit(7)
    elif job.startswith("babble"):
        print("{ no json", flush=True)
        continue
    elif job.startswith("lost"):
        say(answer={**row, "status": "error", "note": "illegal access"})
        say(done=True)
        os._exit(3)
    say(answer=row)
    say(done=True)
