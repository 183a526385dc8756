"""A study from its config to its report: everything that ``tilewise study run`` does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from tilelab.common import environment
from tilelab.common.durations import in_words
from tilelab.common.files import DiskFullError
from tilelab.common.signals import interrupts_ignored
from tilelab.common.terminal import Text
from tilelab.common.threads import crowded
from tilelab.study import report
from tilelab.study.ask.config import Study
from tilelab.study.ask.run import Run
from tilelab.study.conduct import words
from tilelab.study.conduct.board import Board
from tilelab.study.conduct.checkpoints import check_checkpoints
from tilelab.study.conduct.cluster import Cluster, connected
from tilelab.study.conduct.cores import Cores, lock_folder
from tilelab.study.conduct.forecast import data_key, forecast_s
from tilelab.study.conduct.index import write_index
from tilelab.study.conduct.local import Local
from tilelab.study.conduct.pool import Pool, Watcher
from tilelab.study.conduct.process import CHILD, Setting
from tilelab.study.conduct.progress import showing
from tilelab.study.conduct.room import available_bytes, room_for
from tilelab.study.conduct.target import check_target
from tilelab.study.need import gpu_need, host_need
from tilelab.study.plan import Agenda, Task
from tilelab.study.records import store
from tilelab.study.records.events import RunRecord
from tilelab.study.track.tracking import Tracking, trackers
from tilelab.study.train.state import CHECKPOINT, step_of
from tilelab.study.train.team import Strategy, check
from tilelab.study.verdict.judge import judge
from tilewise.chips import CHIPS
from tilewise.errors import InvalidArgument, TilewiseError

__all__ = ["Request", "conduct", "report_again"]

INTERRUPTED = 130
_LONG_S = 30 * 60.0


@dataclass(frozen=True)
class Request:
    """The request of a user.

    Args:
        study: the config.
        command: what repeats it, as typed in a shell.
        out: folder of studies.
        jobs: runs at once; None for as many as there are cores.
        threads: of each run.
        device: ``"cpu"`` or ``"cuda"``.
        processes: that train each run together.
        strategy: how they share its model, ``"ddp"`` or ``"fsdp"``.
        on: ``"here"``, or ``"ray"`` for the machines of a Ray cluster.
        track: names of trackers that are told of the runs.
        confirm: asked before a long study starts, with its duration in words; False stops it.
        checkpoint_every_s: seconds between checkpoints of a run.
        module: of the child process; tests have others.
    """

    study: Study
    command: str
    out: Path
    jobs: int | None = None
    threads: int = 1
    device: str = "cpu"
    processes: int = 1
    strategy: Strategy = "ddp"
    on: str = "here"
    track: tuple[str, ...] = ()
    confirm: Callable[[str], bool] | None = None
    checkpoint_every_s: float = 10.0
    module: str = CHILD


def conduct(request: Request, console: Console) -> int:
    """Run what is not done yet, then write the report of all that is.

    Returns:
        0: every run is over. 1: the user did not want it to start, or a systems arm changed what
        is learnt. 130: stopped with Ctrl-C; what
        was done is reported.

    Raises:
        TilewiseError: what is asked cannot be done, or a run failed; what was done is reported.
    """
    _check_meant(request)
    where = environment.describe(request.threads)
    began = datetime.now(UTC).isoformat(timespec="seconds")
    folder = store.folder_of(request.study, request.out)
    if request.on == "here":
        _check_device(request.device, request.processes)
    with store.locked(folder):
        store.begin(folder, store.StoredStudy(request.study, request.command, where, began))
        agenda = Agenda(request.study, store.read_records(folder))
        agenda.check()
        try:
            code = _work(request, folder, agenda, where, console)
        except KeyboardInterrupt:
            code = INTERRUPTED
        except TilewiseError:
            with interrupts_ignored():
                if not store.forget_empty(folder):
                    _report_if_possible(request.study, folder, console)
            raise
        with interrupts_ignored():
            if code == INTERRUPTED:
                _say(console, "Stopped with Ctrl-C. The same command goes on from here.")
            if not store.forget_empty(folder):
                parted = _report(request.study, folder, console)
                code = 1 if parted and code == 0 else code
    return code


def _check_meant(request: Request) -> None:
    """A study of a GPU's size does not start on a processor, on which it would take months."""
    study = request.study
    if not study.chip:
        return
    there = request.on != "here" or torch.cuda.is_available()
    if request.device != "cuda" or not there:
        came = "cpu" if request.device == "cpu" else "cuda, and torch finds no GPU that it can use"
        required = f"cuda, on a machine with a GPU: {study.name} is of a size for "
        fix = (
            "`--dry-run` in its place says what it would take, and runs nothing; `--set chip=` "
            "starts what was cut down to a size for another device."
        )
        raise InvalidArgument("--device", came, required + CHIPS[study.chip].name, fix)


def _check_device(device: str, processes: int) -> None:
    if device == "cuda" and 0 < torch.cuda.device_count() < processes:
        came, there = f"{processes} with --device cuda", torch.cuda.device_count()
        raise InvalidArgument("--processes", came, f"at most {there}, the GPUs that there are")
    if device == "cuda" and not torch.cuda.is_available():
        came = f"cuda, and torch {torch.__version__} finds no GPU that it can use"
        fix = "`--device cpu` is the standard; a GPU needs its driver and torch built for CUDA."
        raise InvalidArgument("--device", came, "a device that is there", fix)


def _work(
    request: Request, folder: Path, agenda: Agenda, where: dict[str, Any], console: Console
) -> int:
    study = request.study
    _say(console, words.opening(study, folder))
    for record in agenda.records.values():
        for each in record.evaluations[:1]:
            check_target(study, record.start.experiment, vars(each))
    tracking = Tracking(folder, trackers(request.track, folder), lambda text: _say(console, text))
    try:
        tracking.catch_up(agenda.records)
        code = 0
        if agenda.finished:
            _say(console, f"All {agenda.total} runs are done already.")
        else:
            code = _train(request, folder, agenda, where, tracking, console)
    finally:
        with interrupts_ignored():
            tracking.close()
    return 1 if tracking.failed else code


def _train(
    request: Request,
    folder: Path,
    agenda: Agenda,
    where: dict[str, Any],
    tracking: Tracking,
    console: Console,
) -> int:
    """Run what is left of the agenda, if the user wants it to start."""
    study, tasks, records = request.study, agenda.tasks, agenda.records
    todo = [
        task for task in tasks if task.run.name not in records or not records[task.run.name].done
    ]
    setting = Setting(
        folder=folder.absolute(),
        cache=store.cache_folder().absolute(),
        threads=request.threads,
        device=request.device,
        processes=request.processes,
        strategy=request.strategy,
        environment=where,
        checkpoint_every_s=request.checkpoint_every_s,
        module=request.module,
        variables=environment.variables(),
        working=Path.cwd(),
    )
    if request.on == "here" and (warning := crowded(request.threads)):
        _say(console, warning)
    _say_what_begins_again(setting, todo, records, console)
    for task in todo:
        check(task.run.config, request.processes, request.strategy)
    with _places(request, setting, console) as place:
        if isinstance(place, Cluster):
            jobs = place.jobs(request.jobs, todo)
        else:
            jobs = _jobs(request, todo, console)
        forecast = _forecast(request, todo, console)
        board = Board(tasks, records, forecast, jobs)
        expected = board.left_s() if forecast else None
        _say(console, words.start(todo, len(tasks), jobs, request.threads, expected))
        long = expected is not None and expected > _LONG_S
        if long and request.confirm and not request.confirm(in_words(expected or 0.0)):
            return 1
        with showing(study, board, console) as progress:
            watchers = _Watchers(study, (progress, tracking), lambda: board.expect(agenda.tasks))
            Pool(place, jobs).work(agenda, watchers)
    return 0


def _say_what_begins_again(
    setting: Setting, todo: Sequence[Task], records: Mapping[str, RunRecord], console: Console
) -> None:
    """Name the runs whose records lost steps; ``Session`` trains them from the first step on."""
    for task in todo:
        record = records.get(task.run.name)
        if record is None:
            continue
        lost = record.missing
        step = step_of(setting.record(task.run).with_name(CHECKPOINT))
        if step is not None and step > record.whole_steps:
            lost = f"{record.whole_steps} of {step} steps are in the record"
        if lost:
            _say(console, f"{task.run.name}: {lost}. The run is trained again from the first step.")


@contextmanager
def _places(request: Request, setting: Setting, console: Console) -> Iterator[Local | Cluster]:
    """Yield the place where the runs run, ready for them."""
    if request.on == "here":
        with closing(Cores(environment.pinnable_cores(), lock_folder())) as cores:
            if cores.trouble:
                _say(console, cores.trouble)
            yield Local(setting, cores)
        return
    with connected() as ray:
        yield Cluster(ray, setting)


def _jobs(request: Request, todo: Sequence[Task], console: Console) -> int:
    """Runs at once here: as many as were asked for or as there are cores, if memory is enough."""
    if request.jobs is not None:
        wished = request.jobs
    elif request.device == "cuda":
        wished = 1  # two runs on one GPU would measure each other
    else:
        cores = environment.pinnable_cores()
        wished = max(1, len(cores) // (request.threads * request.processes))
    room = wished
    if request.device == "cuda":
        room = room_for(todo, room, available_bytes("cuda"), gpu_need, kind="GPU memory")
    # Each process holds a model, or a part and all its activations.
    on_host = partial(host_need, device=request.device)
    room = room_for(todo, room, available_bytes("cpu"), on_host, request.processes)
    if room < wished:
        _say(console, f"Memory is enough for {room} of {wished} runs at once: so many will run.")
    return room


def _forecast(request: Request, todo: Sequence[Task], console: Console) -> dict[str, float]:
    """Return seconds of each run; nothing where this machine lacks their device.

    On the way this prepares the data and looks at checkpoints, before any run starts. So what is
    missing is said once, and the runs find the data ready.
    """
    corpora = {}
    for key, config in {data_key(task.run.config): task.run.config for task in todo}.items():
        corpora[key] = config.learning.prepare(config, store.cache_folder())
        _say(console, str(corpora[key]))
    check_checkpoints(todo, corpora)
    if request.device == "cuda" and not torch.cuda.is_available():
        return {}
    before = torch.get_num_threads()
    torch.set_num_threads(request.threads)
    try:
        return forecast_s(todo, corpora, torch.device(request.device))
    finally:
        torch.set_num_threads(before)


def report_again(folder: Path, console: Console) -> None:
    """Write the report of a study from its records, and say the verdicts.

    Raises:
        TilewiseError: it is no study's folder, or a record is damaged: the report is of the others.
    """
    _report(store.read_study(folder).study, folder, console)
    store.read_records(folder)


class _Watchers:
    """All watchers, after the checks that need the first numbers."""

    def __init__(
        self, study: Study, watchers: Sequence[Watcher], plan_again: Callable[[], None]
    ) -> None:
        self._study, self._watchers, self._plan_again = study, watchers, plan_again

    def started(self, run: Run) -> None:
        for each in self._watchers:
            each.started(run)

    def event(self, run: Run, values: dict[str, Any]) -> None:
        if values["event"] == "evaluation":
            check_target(self._study, run.experiment, values)
        for each in self._watchers:
            each.event(run, values)

    def ended(self, run: Run, record: RunRecord) -> None:
        self._plan_again()  # what follows from the run is known now
        for each in self._watchers:
            each.ended(run, record)

    def lost(self, run: Run, why: str) -> None:
        for each in self._watchers:
            each.lost(run, why)

    def tick(self) -> None:
        for each in self._watchers:
            each.tick()


def _report(study: Study, folder: Path, console: Console) -> bool:
    """Write the index and the report, and say the verdicts.

    Returns:
        whether a systems arm changed what is learnt.
    """
    records, damaged = store.readable_records(folder)
    for name in damaged:
        _say(console, f"{name}: its record is damaged. The report leaves it out.")
    if not records:
        _say(console, "Nothing to report yet.")
        return False
    write_index(folder, records)
    page, text = report.write(folder)
    verdict = judge(study, records)
    console.print(words.verdicts(verdict))
    _say(console, f"Report: {page}\n        {text}")
    arms = [arm for experiment in verdict.experiments for arm in experiment.arms]
    return any(arm.changed_what_is_learnt for arm in arms)


def _report_if_possible(study: Study, folder: Path, console: Console) -> None:
    """The report of what was done, while another error is on its way to the user."""
    try:
        _report(study, folder, console)
    except (DiskFullError, OSError) as error:
        _say(console, f"The report could not be written: {error}")


def _say(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=True)
