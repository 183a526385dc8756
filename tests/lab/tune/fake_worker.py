"""A worker for the tests: what becomes of blocks is written in them."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

NOTES = {
    "16x16/1/1": ("wrong", "out: 3.00 times the error that is allowed"),
    "16x16/2/1": ("error", "OutOfResources: shared memory"),
}
SPILLS = {"16x16/4/1": 12}

for line in sys.stdin:
    asked = json.loads(line)
    *_, blocks = asked["job"].split()
    if blocks == "16x16/8/1":
        print("an illegal access", file=sys.stderr, flush=True)
        os._exit(7)
    if blocks == "16x16/4/3":
        time.sleep(60)
    status, note = NOTES.get(blocks, ("ok", ""))
    values: dict[str, Any] = {"spills": SPILLS.get(blocks, 0), "pid": os.getpid()}
    row = {"step": asked["step"], "name": "", "status": status, "note": note, "values": values}
    print(json.dumps({"answer": row}), flush=True)
    print(json.dumps({"done": True}), flush=True)
