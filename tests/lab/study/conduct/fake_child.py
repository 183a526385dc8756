"""Stands in for the child process: writes a record as a run would, without training anything.

It imports nothing of tilewise, so that it starts at once. The name of its run's text says what it
does besides: ``slow`` takes its time, ``wrong`` refuses, ``crash`` crashes, ``killed`` is killed,
``lazy`` ends without having done its run, ``stubborn`` ignores that standard input is closed,
``where`` says where it is.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any


def main() -> int:
    run = json.loads(sys.stdin.readline())
    acts = Path(run["config"]["data"]["source"]).name.split("+")
    if "stubborn" not in acts:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    if "wrong" in acts and run["arm"] != "baseline":
        print("something else", file=sys.stderr)
        print("the text is missing: get it", file=sys.stderr)
        return 3
    if "crash" in acts and run["arm"] != "baseline":
        raise ValueError("a bug of ours")
    if "killed" in acts:
        os.kill(os.getpid(), signal.SIGKILL)
    if "where" in acts:
        kept = os.environ.get("MALLOC_TRIM_THRESHOLD_")
        data = os.environ.get("TILEWISE_DATA")
        print(f"keeps {kept}, data in {data}, works in {Path.cwd()}", file=sys.stderr)
        return 3
    if "lazy" in acts:
        return 0
    _work(run, 0.05 if "slow" in acts else 0.0)
    return 0


def _work(run: dict[str, Any], pause_s: float) -> None:
    config, execution = run["config"], run["execution"]
    place = Path(execution["folder"], "runs", _name(run))
    place.mkdir(parents=True, exist_ok=True)
    done = 0
    path = place / "record.jsonl"
    if path.exists():
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        done = max((line["step"] for line in lines if line["event"] == "step"), default=0)
    with path.open("a", buffering=1) as file:

        def write(event: str, **values: Any) -> None:
            file.write(json.dumps({"event": event, **values}) + "\n")

        write(
            "start",
            **{key: value for key, value in run.items() if key not in ("config", "execution")},
            run=_name(run),
            config=config,
            from_step=done,
            time="2026-01-02T03:04:05+00:00",
            environment={**execution["environment"], "core": execution["core"]},
            corpus={"sha256": "0"},
            parameters={"total": 1, "embedding": 0},
            groups={},
            flops_per_token={"full": 1.0, "causal": 1.0},
            peak_flops_s=1.0,
            format=1,
        )
        loss = config["optimizer"]["lr"]  # the best rate is the smallest
        diverged = loss >= 1.0
        for step in range(done, config["budget"]["steps"] + 1):
            if step > done:
                write(
                    "step", step=step, loss=loss, lr=0.1, gradient_norm=1.0, wall_s=0.1, cpu_s=0.1,
                    warmup=False,
                )  # fmt: skip
                time.sleep(pause_s)
            if step in (0, config["budget"]["steps"]):
                start = 5.5 if step == 0 else loss
                write(
                    "evaluation", step=step, tokens=step, loss=start,
                    train_wall_s=0.1 * step, train_cpu_s=0.1 * step,
                    bits_per_byte=start, word_perplexity=None, wall_s=0.1,
                )  # fmt: skip
        write(
            "end",
            status="diverged" if diverged else "done",
            step=config["budget"]["steps"],
            reason="too much" if diverged else "",
            weights_sha256="0",
            state_sha256="0",
        )


def _name(run: dict[str, Any]) -> str:
    trial = f"sweep-{run['candidate']:g}-" if run["phase"] == "sweep" else ""
    trial += "" if run["rung"] is None else f"rung-{run['rung']}-"
    return f"{run['experiment']}/{run['arm']}/{trial}seed-{run['seed']}"


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(4)


if __name__ == "__main__":
    sys.exit(main())
