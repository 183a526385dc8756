"""A study on a local Ray cluster of two workers, one of which is killed."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.lab.study.conduct.conducting import FAKE, Conducted
from tests.lab.study.records_of import config_of, experiment_of, study_of
from tilelab.common import environment
from tilelab.study.ask.run import RECORD, Execution, RunSpec
from tilelab.study.conduct import cluster
from tilelab.study.conduct.cluster import Cluster
from tilelab.study.conduct.pool import RunError
from tilelab.study.need import NotEnoughMemoryError, gpu_need, host_need
from tilelab.study.plan import planned
from tilewise.errors import InvalidArgument

_WAIT_S = 120.0
_STARTS = 4  # a node gets 30 seconds to start, which other work beside it may take

pytestmark = pytest.mark.usefixtures("quick_report")
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="needs ray: pip install --no-deps -r .ci/ray.txt",
)


@pytest.fixture(scope="module")
def _two_workers() -> Iterator[Any]:
    """A cluster of this machine alone that has room for two runs, whatever the machine has."""
    ray = importlib.import_module("ray")
    before = dict(os.environ)
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        "OMP_NUM_THREADS": "1",
    }
    for left in reversed(range(_STARTS)):
        try:
            ray.init(address="local", num_cpus=2, log_to_driver=False, logging_level="ERROR")
            break
        except Exception as error:  # Ray raises no narrower type when its 30 seconds are over
            ray.shutdown()
            if not left or "timed out during startup" not in str(error):
                raise
    yield ray
    ray.shutdown()
    os.environ.clear()
    os.environ |= before


def on_ray(place: Path, acts: str = "quick", **fields: Any) -> Conducted:
    """A study on the cluster, with as many runs at once as there is room for."""
    return Conducted(place, acts, options={"on": "ray", "jobs": None}, **fields)


def test_without_ray_it_says_how_to_get_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    conducted = on_ray(place)
    with pytest.raises(InvalidArgument, match=r"--on: got ray.*pip install 'tilewise\[ray\]'"):
        conducted.go()
    assert not conducted.folder.exists()


class Nodes:
    """Stands in for Ray: machines with these resources, and the tasks that were asked for."""

    def __init__(self, *resources: dict[str, float]) -> None:
        self._nodes = [{"Alive": True, "Resources": each} for each in resources]
        self.asked: list[dict[str, Any]] = []

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": False, "Resources": {}}, *self._nodes]

    def remote(self, *args: Any, **options: Any) -> Any:
        return (lambda train: self) if "max_retries" in options else None

    def options(self, **asked: Any) -> Nodes:
        self.asked.append(asked)
        return self


def started(place: Path, nodes: Nodes, **fields: Any) -> int:
    """How many runs at once there is room for; the first one is started."""
    ours = Cluster(nodes, Execution(folder=place, cache=place / "cache", **fields))
    run = planned(study_of(experiment_of(baseline=config_of(), seeds=(0,))))[0]
    jobs = ours.jobs(None, [run])
    ours.start(run, ())
    return jobs


def test_a_run_asks_for_no_more_than_what_was_there_when_it_was_checked(place: Path) -> None:
    each = host_need(config_of()).total
    small = Nodes({"CPU": 4, "memory": 2 * each - 1})
    with pytest.raises(NotEnoughMemoryError, match="of memory in 2 processes"):
        started(place, small, processes=2)
    enough = Nodes({"CPU": 1, "memory": 9 * each}, {"CPU": 4, "memory": 2 * each})
    assert started(place, enough, processes=2) == 2
    (asked,) = enough.asked
    assert (asked["num_cpus"], asked["num_gpus"], asked["memory"]) == (2, 0, 2 * each)


def test_what_the_study_is_told_by_its_environment_runs_are_told_too(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("TILEWISE_DATA", "sets")
    monkeypatch.setenv("TILEWISE_TUNED", "off")
    monkeypatch.setenv("TILEWISE_STUDY_JOB", "of one run")
    told = environment.variables()
    assert told["TILEWISE_DATA"] == str(place / "sets")
    assert told["TILEWISE_TUNED"] == "off"
    assert "TILEWISE_STUDY_JOB" not in told
    execution = Execution(
        folder=place, cache=place / "cache", module=FAKE, variables=told, working=Path.cwd()
    )
    # As on a machine of the cluster, which was started before the study and elsewhere.
    for name in told:
        monkeypatch.delenv(name)
    monkeypatch.delenv("TILEWISE_STUDY_JOB")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (place / "other").mkdir()
    monkeypatch.chdir(place / "other")
    run = RunSpec("optimizers", "lion", 0, config_of(**{"data.source": "where"}))
    outcome = cluster._train(run.executed(execution))
    assert outcome.lines == [f"keeps 1073741824, data in {place / 'sets'}, works in {place}"]


def test_memory_of_a_gpu_is_not_asked_of_its_machine(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = replace(gpu_need(config_of()), activations=20 << 30)
    monkeypatch.setattr(cluster, "gpu_need", lambda config: needed)
    host = {"CPU": 2, "GPU": 2, "memory": 2 * host_need(config_of(), "cuda").total}
    options: dict[str, Any] = {"device": "cuda", "processes": 2}
    for known in ({"accelerator_type:A100": 1}, {"accelerator_type:ours": 1}, {}):
        nodes = Nodes({**host, **known}, {**host, "accelerator_type:T4": 1})
        assert started(place, nodes, **options) == 2
        assert nodes.asked[0]["memory"] == host["memory"]
        assert nodes.asked[0]["num_gpus"] == 2
    with pytest.raises(NotEnoughMemoryError, match=r"of GPU memory, and 17\.2 GB are free"):
        started(place, Nodes({**host, "accelerator_type:T4": 1}), **options)
    with pytest.raises(NotEnoughMemoryError, match="of memory in 2 processes"):
        started(place, Nodes({**host, "memory": host["memory"] - 1}), **options)


@needs_ray
@pytest.mark.usefixtures("_two_workers")
def test_every_run_is_done_once(place: Path) -> None:
    conducted = on_ray(place)
    assert conducted.go() == 0
    assert "4 runs to do, 2 at once" in conducted.said
    records = conducted.records
    assert len(records) == 4
    for record in records.values():
        assert record.done
        assert len(record.starts) == 1
        assert len(record.steps) == 3
        # Where it ran is what its own machine says, and nothing is pinned there.
        assert record.start.environment["core"] is None
        assert record.start.environment["cores"] >= 1
    before = {path: path.read_bytes() for path in conducted.folder.rglob(RECORD)}
    assert conducted.go() == 0
    assert {path: path.read_bytes() for path in conducted.folder.rglob(RECORD)} == before


@needs_ray
@pytest.mark.usefixtures("_two_workers")
@pytest.mark.parametrize(
    ("acts", "message"),
    [
        ("wrong", r"^optimizers/lion/seed-\d: the text is missing: get it$"),
        ("where", r"data in (\S+)/sets, works in \1$"),
        ("killed", r"its worker was lost 3 times in a row.*ended by signal 9"),
    ],
)
def test_a_run_that_fails_ends_the_study(
    place: Path, acts: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Set after the cluster was started: it does not know of it.
    monkeypatch.setenv("TILEWISE_DATA", str(place / "sets"))
    monkeypatch.chdir(place)
    conducted = on_ray(place, acts)
    with pytest.raises(RunError, match=message):
        conducted.go()


@needs_ray
@pytest.mark.usefixtures("_two_workers")
def test_what_no_machine_has_is_refused(place: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"without 1 CPU and 1 GPU on one machine"):
        on_ray(place).go(device="cuda")
    with pytest.raises(InvalidArgument, match=r"without 3 CPU on one machine"):
        on_ray(place).go(threads=3)
    large = on_ray(place, changes={"model.width": 1 << 16})
    with pytest.raises(NotEnoughMemoryError, match="weights, gradients and optimizer state"):
        large.go()


@needs_ray
@pytest.mark.usefixtures("_two_workers")
def test_a_run_whose_worker_is_killed_is_taken_up_again_to_the_same_bits(place: Path) -> None:
    changes = {
        "model.layers": 1,
        "model.width": 16,
        "model.context": 16,
        "model.dropout.residual": 0.1,
        "budget.steps": 450,
        "evaluation.every": 150,
    }
    conducted = on_ray(place, changes=changes, seeds=(0,))
    options: dict[str, Any] = {"module": None, "checkpoint_every_s": 0.05}
    victim = conducted.folder / "runs" / "optimizers/lion/seed-0"
    killer = threading.Thread(target=_kill_the_worker_of, args=(victim,))
    killer.start()
    try:
        assert conducted.go(**options) == 0
    finally:
        killer.join()
    records = conducted.records
    assert "optimizers/lion/seed-0 was lost" in conducted.said
    assert len(records["optimizers/baseline/seed-0"].starts) == 1
    starts = [start.from_step for start in records["optimizers/lion/seed-0"].starts]
    assert starts[0] == 0
    assert starts[1] > 0
    assert len(starts) == 2
    for record in records.values():
        assert [step.step for step in record.steps] == list(range(1, 451))
        assert [each.step for each in record.evaluations] == [0, 150, 300, 450]

    (place / "undisturbed").mkdir()
    whole = on_ray(place, changes=changes, seeds=(0,))
    whole.out = place / "undisturbed"
    assert whole.go(on="here", jobs=2, module=None) == 0
    for name, record in whole.records.items():
        assert records[name].end == record.end
        assert [step.loss for step in records[name].steps] == [step.loss for step in record.steps]


def _kill_the_worker_of(folder: Path) -> None:
    """Kill the worker of Ray whose process has written a checkpoint of the run in a folder."""
    deadline = time.monotonic() + _WAIT_S
    while time.monotonic() < deadline:
        path = folder / RECORD
        if path.exists() and b'"event":"checkpoint"' in path.read_bytes():
            os.kill(_parent(_process_in(folder)), signal.SIGKILL)
            return
        time.sleep(0.005)


def _process_in(folder: Path) -> int:
    """The process that holds the lock of a run's folder; the newest first, as it is one of them."""
    lock = str(folder / ".lock")
    for process in sorted((int(each.name) for each in Path("/proc").glob("[0-9]*")), reverse=True):
        with suppress(OSError):  # gone, or somebody else's
            if any(_link(each) == lock for each in Path(f"/proc/{process}/fd").iterdir()):
                return process
    raise AssertionError(f"nobody works in {folder}")


def _link(file: Path) -> str:
    """What an open file is; nothing for one that was closed meanwhile, as a checkpoint is."""
    with suppress(OSError):
        return os.readlink(file)
    return ""


def _parent(process: int) -> int:
    status = Path(f"/proc/{process}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("PPid"))[5:])
