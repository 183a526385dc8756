"""A study from its config to its report: everything that ``tilewise study run`` does."""

from __future__ import annotations

import time
from collections import Counter
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
from tilelab.common.files import DiskFullError
from tilelab.common.terminal import crowded, in_words, interrupts_ignored, say
from tilelab.study.ask.config import Experiment, Study
from tilelab.study.ask.metrics import METRICS, Floor, reached, value_in
from tilelab.study.ask.run import STANDARD, Execution, RunSpec, final_name
from tilelab.study.conduct import progress
from tilelab.study.conduct.cluster import Cluster, connected
from tilelab.study.conduct.forks import Forks
from tilelab.study.conduct.pool import Pool, TimeUp
from tilelab.study.conduct.predict import checked, checked_table, forecast_s, write_checked
from tilelab.study.conduct.process import Cores, Local, OneProcess, lock_folder
from tilelab.study.need import available_bytes, gpu_need, host_need, room_for
from tilelab.study.plan import Agenda, Watcher
from tilelab.study.records import store
from tilelab.study.records.events import RunRecord, is_over
from tilelab.study.tasks.task import Prepared, data_key
from tilelab.study.track.tracker import Tracking, trackers
from tilelab.study.train.state import CHECKPOINT, step_of
from tilelab.study.train.team import check
from tilelab.study.verdict.detect import check_designs, plan_lines
from tilelab.study.verdict.judge import unfolded
from tilelab.study.verdict.sweeps import check_search
from tilewise.chips import CHIPS
from tilewise.errors import InvalidArgument, TilewiseError, Unsupported
from tilewise.folders import cache_folder

GO_ON, INTERRUPTED = 75, 130
_LONG_S = 30 * 60.0


@dataclass(frozen=True)
class Conductor:
    """Works through a study."""

    study: Study
    command: str  # what repeats it, as typed in a shell
    out: Path  # folder of studies
    jobs: int | None = None  # runs at once; None for as many as there are cores
    on: str = "here"  # ``"here"``, or ``"ray"`` for the machines of a Ray cluster
    track: tuple[str, ...] = ()  # names of trackers
    confirm: Callable[[str], bool] | None = None  # asked before a long study, with its duration
    one_process: bool = False  # for all runs, one after the other: they share what was compiled
    minutes: float | None = None  # after which no step begins; None for no limit
    execution: Execution = STANDARD  # without folders and environment
    underpowered: bool = False  # start a study that cannot detect what it asks

    def conduct(self, console: Console) -> int:
        """Run what is not done yet, then write the report of all that is.

        Returns:
            0: every run is over. 1: the user did not want it to start, or a systems arm changed
            what is learnt. 75: time is up, and the same command goes on. 130: stopped with Ctrl-C.
            What was done is reported.

        Raises:
            TilewiseError: what is asked cannot be done, or a run failed; what was done is reported.
        """
        until = None if self.minutes is None else time.time() + 60 * self.minutes
        self.check_chip()
        self._check_one_process()
        where = environment.describe(self.execution.threads)
        began = datetime.now(UTC).isoformat(timespec="seconds")
        study, folder = self.study, store.folder_of(self.study, self.out)
        if self.on == "here":
            _check_device(self.execution)
        if not self.underpowered and not store.begun(folder):
            check_designs(study)
        check_search(study)
        with store.locked(folder):
            store.begin(folder, store.StoredStudy(study, self.command, where, began))
            agenda = Agenda(study, store.read_records(folder))
            agenda.check()
            try:
                code = self._work(folder, agenda, where, console, until)
            except KeyboardInterrupt:
                code = INTERRUPTED
            except TimeUp:
                code = GO_ON
            except TilewiseError:
                with interrupts_ignored():
                    if not store.forget_empty(folder):
                        try:
                            _report(folder, console)
                        except (DiskFullError, OSError) as error:
                            say(console, f"The report could not be written: {error}")
                raise
            with interrupts_ignored():
                if code == INTERRUPTED:
                    say(console, "Stopped with Ctrl-C. The same command goes on from here.")
                if code == GO_ON:
                    done = f"{agenda.done} of {agenda.total} runs are done"
                    say(console, f"Time is up, {done}. The same command goes on from here.")
                if not store.forget_empty(folder):
                    parted = _report(folder, console)
                    code = 1 if parted and code == 0 else code
        return code

    def check_chip(self) -> None:
        """Refuse to start a study of a GPU's size on a processor: it would take months."""
        study, device = self.study, self.execution.device
        if not study.chip:
            return
        there = self.on != "here" or torch.cuda.is_available()
        if device != "cuda" or not there:
            came = "cpu" if device == "cpu" else "cuda, and torch finds no GPU that it can use"
            required = f"cuda, on a machine with a GPU: {study.name} is of a size for "
            fix = (
                "`--dry-run` in its place says what it would take, and runs nothing; "
                "`--set chip=` starts what was cut down to a size for another device."
            )
            raise InvalidArgument("--device", came, required + CHIPS[study.chip].name, fix)

    def _check_one_process(self) -> None:
        if not self.one_process:
            return
        for name, given, allowed in (
            ("--jobs", self.jobs, (None, 1)),
            ("--processes", self.execution.processes, (1,)),
            ("--on", self.on, ("here",)),
        ):
            if given not in allowed:
                required = "one run at a time in one process here"
                raise InvalidArgument(f"--one-process with {name}", str(given), required)

    def _work(
        self,
        folder: Path,
        agenda: Agenda,
        where: dict[str, Any],
        console: Console,
        until: float | None,
    ) -> int:
        study = self.study
        say(console, progress.opening(study, folder))
        for record in agenda.records.values():
            for each in record.evaluations[:1]:
                check_target(study, record.start.experiment, vars(each))
        tracking = Tracking(folder, trackers(self.track, folder), partial(say, console))
        try:
            tracking.catch_up(agenda.records)
            code = 0
            if agenda.finished:
                say(console, f"All {agenda.total} runs are done already.")
            else:
                for line in plan_lines(study):
                    say(console, line)
                if self.on == "here" and (line := _other_processors(agenda.records, where)):
                    say(console, line)
                filled = {
                    "folder": folder.absolute(),
                    "cache": cache_folder().absolute(),
                    "environment": where,
                    "variables": environment.variables(),
                    "working": Path.cwd(),
                    "until": until,
                }
                execution = self.execution.model_copy(update=filled)
                code = self._train(execution, agenda, tracking, console)
        finally:
            with interrupts_ignored():
                tracking.close()
        if code == 0 and until is None:
            complete_floors(study, folder, partial(say, console))
        elif code == 0:
            say(console, "Floors take minutes: the same command without --minutes computes them.")
        return 1 if tracking.failed else code

    def _train(
        self, execution: Execution, agenda: Agenda, tracking: Tracking, console: Console
    ) -> int:
        """Run what is left of the agenda, if the user wants it to start."""
        runs, records = agenda.runs, agenda.records
        todo = [run for run in runs if not is_over(run.name, records)]
        if self.on == "here" and (warning := crowded(execution.threads)):
            say(console, warning)
        for run in todo:
            _say_what_begins_again(run.executed(execution), records.get(run.name), console)
        for run in todo:
            check(run.config, execution.processes, execution.strategy, execution.context)
        with self._place(execution, console) as place:
            if isinstance(place, Cluster):
                jobs = place.jobs(self.jobs, todo)
            else:
                jobs = self._jobs(todo, console)
            forecast = _forecast(execution, agenda, todo, console)
            board = progress.Board(agenda, forecast, jobs)
            expected = board.left_s() if forecast else None
            say(console, progress.start(todo, len(runs), jobs, execution.threads, expected))
            long = expected is not None and expected > _LONG_S
            if long and self.confirm and not self.confirm(in_words(expected or 0.0)):
                return 1
            with progress.showing(self.study, board, console) as shown:
                Pool(place, jobs, execution.folder, execution.until).work(
                    agenda, (_Target(self.study), board, shown, tracking)
                )
        return 0

    @contextmanager
    def _place(
        self, execution: Execution, console: Console
    ) -> Iterator[Local | OneProcess | Cluster]:
        if self.on == "here":
            locks = Cores(environment.pinnable_cores(), lock_folder())
            with closing(locks) as cores, closing(Forks()) as forks:
                if cores.trouble:
                    say(console, cores.trouble)
                local = Local(execution, cores, forks)
                if self.one_process:
                    with closing(OneProcess(local)) as one:
                        yield one
                else:
                    yield local
            return
        with connected() as ray:
            yield Cluster(ray, execution)

    def _jobs(self, todo: Sequence[RunSpec], console: Console) -> int:
        """Runs at once here: as many as were asked for or as there are cores, if memory allows."""
        device, processes = self.execution.device, self.execution.processes
        if self.jobs is not None:
            wished = self.jobs
        elif device == "cuda" or self.one_process:
            wished = 1  # two runs on one GPU would measure each other
        else:
            cores = environment.pinnable_cores()
            wished = max(1, len(cores) // (self.execution.threads * processes))
        room = wished
        if device == "cuda":
            room = room_for(todo, room, available_bytes("cuda"), gpu_need, kind="GPU memory")
        # Each process holds a model, or a part and all its activations.
        on_host = partial(host_need, device=device)
        room = room_for(todo, room, available_bytes("cpu"), on_host, processes)
        if room < wished:
            say(console, f"Memory is enough for {room} of {wished} runs at once: so many will run.")
        return room


def _check_device(execution: Execution) -> None:
    device, processes = execution.device, execution.processes
    if device == "cuda" and 0 < torch.cuda.device_count() < processes:
        came, there = f"{processes} with --device cuda", torch.cuda.device_count()
        raise InvalidArgument("--processes", came, f"at most {there}, the GPUs that there are")
    if device == "cuda" and not torch.cuda.is_available():
        came = f"cuda, and torch {torch.__version__} finds no GPU that it can use"
        fix = "`--device cpu` is the standard; a GPU needs its driver and torch built for CUDA."
        raise InvalidArgument("--device", came, "a device that is there", fix)


def _other_processors(records: Mapping[str, RunRecord], where: Mapping[str, Any]) -> str:
    """Say that runs were made on another processor than this; empty where none was."""
    here, others = _processor(where), Counter[str]()
    for record in records.values():
        others[_processor(record.start.environment)] += int(record.done)
    del others[here]
    if not others.total():
        return ""
    made = ", ".join(f"{count} on {name}" for name, count in others.items() if count)
    return (
        f"Warning: of the runs that are done, {made}; this is {here}. Losses of the same run may "
        "differ between them, in the last digits at first. Speeds of the two do not compare."
    )


def _processor(where: Mapping[str, Any]) -> str:
    return f"{where.get('chip')} ({where.get('instruction_set')})"


def _say_what_begins_again(run: RunSpec, record: RunRecord | None, console: Console) -> None:
    """Name a run whose record lost steps; ``Session`` trains it from the first step on."""
    if record is None:
        return
    lost = record.missing
    step = step_of(run.record.with_name(CHECKPOINT))
    if step is not None and step > record.whole_steps:
        lost = f"{record.whole_steps} of {step} steps are in the record"
    if lost:
        say(console, f"{run.name}: {lost}. The run is trained again from the first step.")


def _forecast(
    execution: Execution, agenda: Agenda, todo: Sequence[RunSpec], console: Console
) -> dict[str, float]:
    """Return seconds of each run of the agenda; nothing where this machine lacks their device."""
    # Before any run starts: what is missing is said once, and the runs find the data ready.
    corpora = {}
    for key, config in {data_key(run.config): run.config for run in todo}.items():
        corpora[key] = config.learning.prepare(config, cache_folder())
        say(console, str(corpora[key]))
    check_checkpoints([run for run in todo if not run.config.learning.external], corpora)
    if execution.device == "cuda" and not torch.cuda.is_available():
        return {}
    before = torch.get_num_threads()
    torch.set_num_threads(execution.threads)
    try:
        runs = [run for run in agenda.runs if not run.config.learning.external]
        return forecast_s(runs, corpora, execution, agenda.records)
    finally:
        if execution.device == "cuda":
            torch.cuda.empty_cache()  # for the runs
        torch.set_num_threads(before)


def check_checkpoints(runs: Sequence[RunSpec], corpora: Mapping[str, Prepared]) -> None:
    """Load each checkpoint once, as its runs will: on the CPU, one at a time, and forget it.

    Raises:
        InvalidArgument: a checkpoint is not there, or is not of the model that the config says.
        Unsupported: it computes something else.
    """
    seen = set()
    for run in runs:
        config = run.config
        # Everything that loading depends on.
        model = config.model.model_dump_json(exclude={"dropout", "nudge"})
        key = model, data_key(config)
        if not config.model.checkpoint or key in seen:
            continue
        seen.add(key)
        arm = f"{run.experiment}/{run.arm}"
        try:
            config.learning.model(config, corpora[data_key(config)], 0, torch.device("cpu"))
        except InvalidArgument as error:
            argument = "model.checkpoint" if error.argument == "folder" else error.argument
            parts = error.came, error.required, error.fix
            raise InvalidArgument(f"{arm}: {argument}", *parts) from None
        except Unsupported as error:
            what = f"{arm}: {config.model.checkpoint}: {error.what}"
            raise Unsupported(what, error.reasons, error.fix) from None


def check_target(study: Study, experiment: str, evaluation: Mapping[str, Any]) -> None:
    """Compare an experiment's target with an evaluation of the first weights; ignore later ones.

    A target that untrained weights reach already would time nothing.

    Raises:
        InvalidArgument: the target is not better than the first weights are.
    """
    found = _of_config(study, experiment)
    if found is None or found.target is None or evaluation["step"]:
        return
    first = value_in(evaluation, found.metric)
    if first is None or not reached(found.metric, first, found.target):
        return
    higher = METRICS[found.metric].higher_is_better
    example = (1 + first) / 2 if higher else 0.6 * first
    raise InvalidArgument(
        f"{experiment}.target",
        f"{found.target:g} {METRICS[found.metric].unit}",
        f"{'more' if higher else 'less'} than {first:.4g}, the held-out metric of weights that are "
        "not trained yet",
        f"Set it, for example: --set {experiment}.target={example:.3g}",
    )


def _of_config(study: Study, experiment: str) -> Experiment | None:
    """Return the experiment of that name, or the one whose stage it is; None for a stranger."""
    known = {each.name: each for each in study.experiments}
    while experiment and experiment not in known:
        experiment = experiment.rpartition(".")[0]
    return known.get(experiment)


def report_again(folder: Path, console: Console) -> None:
    """Write the report of a study from its records, say the verdicts, then complain of damage."""
    _report(folder, console)
    store.read_records(folder)


class _Target(Watcher):
    """Ends a study whose target untrained weights reach, as soon as a run says so."""

    def __init__(self, study: Study) -> None:
        self._study = study

    def event(self, run: RunSpec, values: dict[str, Any]) -> None:
        if values["event"] == "evaluation":
            check_target(self._study, run.experiment, values)


def _report(folder: Path, console: Console) -> bool:
    """Write index and report, say the verdicts; whether a systems arm changed what is learnt."""
    study, records = store.read_study(folder).study, store.readable_records(folder).whole
    if rows := checked(study, records):
        write_checked(rows, folder)
        console.print(checked_table(study, rows))
    try:
        from tilelab.study import report  # slow to import: matplotlib, and much that it needs
    except ModuleNotFoundError as error:
        say(
            console,
            f"No report: the package {error.name} is not installed here. `tilewise study report "
            f"{folder}` writes it where it is; the records are whole.",
        )
        return False
    evidence = report.gather(folder)
    for name in evidence.damaged:
        say(console, f"{name}: its record is damaged. The report leaves it out.")
    if not evidence.records:
        say(console, "Nothing to report yet.")
        return False
    store.write_index(folder, evidence.records)
    page, text = report.write(evidence)
    console.print(progress.verdicts(evidence.verdict))
    say(console, f"Report: {page}\n        {text}")
    arms = [arm for experiment in evidence.verdict.experiments for arm in experiment.arms]
    return any(arm.changed_what_is_learnt for arm in arms)


def complete_floors(study: Study, folder: Path, say: Callable[[str], None]) -> None:
    """Compute and store the floors of each experiment whose baseline has ended with its first seed.

    An experiment that compares kernels alone has none: it asks whether steps are the same, not what
    is learnt in them. Floors are written one experiment after the other, so a study that is stopped
    here goes on here. Data that is missing, or that changed since the runs, is said and has none.
    """
    records = store.readable_records(folder).whole
    known = store.read_floors(folder)
    for planned, _ in unfolded(study, records)[0]:
        record = records.get(final_name(planned, planned.baseline_name, planned.seeds[0]))
        asks = any(arm.kind == "training" for arm in planned.arms)  # what is learnt
        if not asks or planned.name in known or record is None or not record.done:
            continue
        try:
            known[planned.name] = _floors(planned, record, say)
            store.write_floors(folder, known)
        except TilewiseError as error:
            say(f"{planned.name}: no floors. {error}")


def _floors(
    planned: Experiment, record: RunRecord, say: Callable[[str], None]
) -> tuple[Floor, ...]:
    config, cache = planned.baseline, cache_folder()
    data = config.learning.prepare(config, cache)
    if data.sha256 != record.start.corpus.get("sha256"):
        raise TilewiseError(f"The data is not that of {record.start.run} any more.")
    if config.learning.learns_text:
        say(f"{planned.name}: scoring tables of counts and compressors on the held-out text.")
    found: tuple[Floor, ...] = config.learning.floors(config, data, planned.seeds[0], cache)
    return found
