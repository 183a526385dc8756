"""Runs as tasks of Ray, on whatever machines its cluster has.

A task starts the same child process that a study starts on one machine, and waits for it. The child
writes to the study's folder, which every machine has to see; the records come from there. When a
worker of Ray or its machine dies, the child ends too (its standard input closes), and the pool
takes the run up again elsewhere. Ray's own retries are off: Ray cannot tell a run that failed from
one that was lost.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from tilelab.common import environment
from tilelab.study.ask.config import RunConfig
from tilelab.study.ask.run import Execution, RunSpec
from tilelab.study.conduct.pool import Lost, RunError, Worker
from tilelab.study.conduct.process import Follower, Outcome, Process, record_after
from tilelab.study.need import Need, gpu_need, host_need, room_for
from tilelab.study.records.events import RunRecord
from tilewise.errors import InvalidArgument

_SEEN_S = 60.0  # for a network's file system to show what another machine wrote
_KIND = "accelerator_type:"  # what a resource is called that names a machine's GPU
# Ray knows a GPU's name and not its memory: here is the largest of each name.
_GPU_GIB = {
    "T4": 16, "V100": 32, "L4": 24, "A10G": 24, "L40S": 48, "A100": 80, "H100": 96, "H200": 141,
    "B200": 192,
}  # fmt: skip


@contextmanager
def connected() -> Iterator[Any]:
    """The module ``ray``, connected to the cluster of ``RAY_ADDRESS``, or one on this machine.

    A connection that is there already is used and left as it is.

    Raises:
        InvalidArgument: ray is not installed, or there is no cluster at that address.
    """
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        came, fix = f"ray, and it cannot be imported ({error})", "pip install 'tilewise[ray]'"
        raise InvalidArgument("--on", came, "a Python with the package ray", fix) from None
    if ray.is_initialized():
        yield ray
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody
    try:
        ray.init(log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        address = os.environ.get("RAY_ADDRESS", "local")
        came = f"no answer from the Ray cluster at {address} ({str(error).splitlines()[0]})"
        required = "a cluster that runs (`ray start --head`), with RAY_ADDRESS naming it"
        raise InvalidArgument("--on", came, required) from None
    try:
        yield ray
    finally:
        ray.shutdown()


class Cluster:
    """The machines of a Ray cluster; the study's folder is at the same path on all of them."""

    def __init__(self, ray: Any, execution: Execution) -> None:
        self._ray, self._execution = ray, execution
        self._train = ray.remote(max_retries=0)(_train)

    def jobs(self, wished: int | None, runs: Sequence[RunSpec]) -> int:
        """Runs at once: as many as there is room for, and at most as many as were wished.

        Raises:
            InvalidArgument: no machine has what a single run needs.
            NotEnoughMemoryError: no machine has the memory.
        """
        wants, places = self._wants(), 0
        memory: list[int] = []
        gpus: list[int | None] = []
        for node in self._ray.nodes():
            has = node["Resources"]
            fitting = min(int(has.get(name, 0) // count) for name, count in wants.items())
            if node["Alive"] and fitting:
                places += fitting
                memory.append(int(has.get("memory", 0)))
                gpus.append(_gpu_bytes(has))
        if not places:
            came = "a Ray cluster without " + " and ".join(f"{n:g} {k}" for k, n in wants.items())
            fix = "Add such a machine, or take fewer --threads or another --device."
            raise InvalidArgument("--on", f"{came} on one machine", "one for each run", fix)
        room_for(runs, 1, max(memory), self._need, self._execution.processes)
        known = [each for each in gpus if each is not None]
        if "GPU" in wants and len(known) == len(gpus):
            room_for(runs, 1, max(known), gpu_need, kind="GPU memory")
        return places if wished is None else min(wished, places)

    def start(self, run: RunSpec, running: Sequence[Worker]) -> Worker:
        """Start the task of a run; see ``pool.Place``."""
        run = run.executed(self._execution)
        # The follower first: it is to show what comes from now on.
        follower = Follower(run.record)
        wants = self._wants()
        train = self._train.options(
            name=run.name,
            num_cpus=wants["CPU"],
            num_gpus=wants.get("GPU", 0),
            memory=self._need(run.config).total * self._execution.processes,
        )
        return _RemoteWorker(self._ray, run, train.remote(run), follower)

    def _need(self, config: RunConfig) -> Need:
        """Return the host memory that a process of a run takes; Ray counts nothing else."""
        return host_need(config, self._execution.device)

    def _wants(self) -> dict[str, int]:
        processes = self._execution.processes
        wants = {"CPU": self._execution.threads * processes}
        return wants if self._execution.device == "cpu" else {**wants, "GPU": processes}


def _gpu_bytes(resources: Mapping[str, float]) -> int | None:
    """Return the memory of a machine's GPU by its name in Ray; None for an unknown one."""
    names = [each.removeprefix(_KIND) for each in resources if each.startswith(_KIND)]
    known = [_GPU_GIB[each] for each in names if each in _GPU_GIB]
    return max(known) << 30 if known else None


def _train(run: RunSpec) -> Outcome:
    """Do a run in a process beside this one, which ends with it, on a machine of the cluster."""
    execution = run.execution
    # The record says of that machine where it ran.
    where = {**execution.environment, **environment.describe(execution.threads)}
    process = Process(run.executed(execution, environment=where))
    try:
        return process.outcome()
    finally:
        process.close()


class _RemoteWorker:
    """One task of Ray, and the record that its process writes; see ``pool.Worker``."""

    def __init__(self, ray: Any, run: RunSpec, reference: Any, follower: Follower) -> None:
        self.run, self.new_events = run, follower.new
        self._ray, self._reference = ray, reference
        self._stopped = False

    @property
    def over(self) -> bool:
        return bool(self._ray.wait([self._reference], timeout=0)[0])

    def result(self) -> RunRecord:
        run, exceptions = self.run, self._ray.exceptions
        try:
            outcome: Outcome = self._ray.get(self._reference)
        except exceptions.RayTaskError as error:
            cause = str(error).strip().splitlines()[-1]
            raise RunError(f"{run.name}: its machine could not start it: {cause}") from None
        except exceptions.RayError as error:
            # The worker, its machine or Ray itself: nothing that the run did.
            raise Lost(type(error).__name__) from None
        _wait_for(run, outcome.size)
        return record_after(run, outcome)

    def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            with suppress(self._ray.exceptions.RayError, ValueError):
                self._ray.cancel(self._reference, force=True)

    def close(self, deadline: float = 0.0) -> None:
        """Cancelling ends the task by force already; it is waited for."""
        self.stop()
        left = max(0.0, deadline - time.monotonic())
        self._ray.wait([self._reference], timeout=left)


def _wait_for(run: RunSpec, size: int) -> None:
    """Wait until this machine sees the whole record that another one wrote."""
    path = run.record
    deadline = time.monotonic() + _SEEN_S
    while (path.stat().st_size if path.exists() else 0) < size:
        if time.monotonic() > deadline:
            raise RunError(
                f"{run.name}: {path} is not what the machine of the run wrote: the study's folder "
                "(--out) must be one that every machine of the cluster sees at the same path"
            )
        time.sleep(0.1)
