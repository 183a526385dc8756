"""``tilewise study list`` and ``show``: what there is, what a run was, and how a name finds it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table

from tilelab.common.terminal import Text, in_words, say
from tilelab.study.ask.metrics import METRICS
from tilelab.study.ask.run import RECORD
from tilelab.study.ask.run_config import parts_used
from tilelab.study.ask.values import nearest
from tilelab.study.plan import Agenda
from tilelab.study.records.events import CorruptRecordError, RunRecord
from tilelab.study.records.store import (
    STUDY,
    flat,
    read_study,
    readable_records,
    study_folders,
    worked_on,
)
from tilelab.study.verdict.judge import judge
from tilelab.study.verdict.measures import Values, measure
from tilelab.study.verdict.text import amount
from tilewise.errors import InvalidArgument, TilewiseError

WITHHELD = "withheld"  # in place of a speed that the verdict does not show

_REQUIRED = (
    "a study (laptop, laptop-0123456789ab or its folder), or in it an arm or a run "
    "(choices/lion, choices/lion/seed-0; another study's: laptop:choices/lion)"
)


@dataclass(frozen=True)
class Found:
    """Part of a study."""

    folder: Path  # of the study
    part: str  # ``""`` for all of it, ``experiment``, ``experiment/arm``, or a run's name
    records: dict[str, RunRecord]  # of the runs of that part that have begun, by name
    damaged: dict[str, str]  # why a record of that part cannot be read, by run
    study_records: dict[str, RunRecord]  # of all runs of the study that have begun

    @property
    def name(self) -> str:
        """The name that the command line takes."""
        return f"{self.folder.name}:{self.part}" if self.part else self.folder.name

    def withheld(self) -> dict[str, str]:
        """``experiment/arm`` -> why its speed is not shown; the other arms are not in it."""
        verdict = judge(read_study(self.folder).study, self.study_records)
        return {
            f"{experiment.experiment}/{arm.arm}": arm.speed_withheld
            for experiment in verdict.experiments
            for arm in experiment.arms
            if arm.speed_withheld
        }


def arm_of(run: str) -> str:
    """``experiment/arm`` of the name of a run."""
    return run.rpartition("/")[0]


def find_study(name: str, out: Path) -> Path:
    """Return the folder of a study: by path, by its folder's name, or the newest of that name."""
    if (Path(name) / STUDY).is_file():
        return Path(name)
    folders = study_folders(out)
    for folder in folders:
        if name in (folder.name, _study_name(folder)):
            return folder
    known = {known for folder in folders for known in (folder.name, _study_name(folder))}
    raise InvalidArgument("study", _there_is(name, out, folders), _REQUIRED, nearest(name, known))


def _there_is(name: str, out: Path, folders: Sequence[Path]) -> str:
    return f"{name!r}; in {out} there is {', '.join(each.name for each in folders) or 'none'}"


def find(name: str, out: Path) -> Found:
    """Return the study, experiment, arm or run of that name; without a study's name, of the newest.

    Raises:
        CorruptRecordError: all that there is of it is damaged.
    """
    study, colon, part = name.partition(":")
    if colon and not Path(name).exists():
        return _part(find_study(study, out), part.strip("/"), name)
    if Path(name).is_dir():
        folder, part = _above(Path(name).resolve(), name)
        return _part(folder, part, name)
    folders = study_folders(out)
    if any(name in (folder.name, _study_name(folder)) for folder in folders):
        return _part(find_study(name, out), "", name)
    for folder in folders:
        found = _below(folder, name.strip("/"))
        if found is not None:
            return found
    known = [run for folder in folders[:1] for run in _known(folder)]
    raise InvalidArgument("name", _there_is(name, out, folders), _REQUIRED, nearest(name, known))


def find_run(name: str, out: Path) -> tuple[Path, RunRecord]:
    """Return the folder and the record of the one run that is called so."""
    found = find(name, out)
    if len(found.records) != 1:
        some = f" ({', '.join(list(found.records)[:2])}, ...)" if found.records else ""
        came = f"{name!r}, which is {len(found.records)} runs{some}"
        raise InvalidArgument("run", came, "a single one, e.g. choices/lion/seed-0")
    ((run, record),) = found.records.items()
    return found.folder / "runs" / run, record


def _study_name(folder: Path) -> str:
    """``laptop`` of ``laptop-0123456789ab``."""
    return folder.name.rpartition("-")[0]


def _above(path: Path, name: str) -> tuple[Path, str]:
    """Return the study's folder that a folder lies in, and the part that it is."""
    for folder in (path, *path.parents):
        if (folder / STUDY).is_file():
            part = path.relative_to(folder).as_posix().removeprefix("runs").strip("/.")
            return folder, part
    raise InvalidArgument("name", f"{name!r}, a folder that is in no study", _REQUIRED)


def _part(folder: Path, part: str, name: str) -> Found:
    found = _below(folder, part)
    if found is None and part:
        fix = nearest(part, _known(folder))
        raise InvalidArgument("name", f"{name!r}, of which nothing has run", _REQUIRED, fix)
    return found or Found(folder, part, {}, {}, {})


def _below(folder: Path, part: str) -> Found | None:
    """Return the runs of a part; None where nothing of it has run."""
    whole, damaged = readable_records(folder)
    names = [name for name in (*whole, *damaged) if not part or f"{name}/".startswith(f"{part}/")]
    records = {name: whole[name] for name in names if name in whole}
    lost = {name: damaged[name] for name in names if name in damaged}
    if lost and not records:
        raise CorruptRecordError("\n".join(lost.values()))
    return Found(folder, part, records, lost, whole) if records else None


def _known(folder: Path) -> list[str]:
    """Return the runs and the arms of a study that have begun."""
    runs = list(readable_records(folder).whole)
    return [*runs, *set(map(arm_of, runs))]


_BARS = "▁▂▃▄▅▆▇█"
_CURVE = 48  # columns of the loss curve


def list_studies(out: Path, console: Console) -> None:
    """Print all studies of a folder, the newest first."""
    folders = study_folders(out)
    if not folders:
        console.print(Text(f"No studies in {out}. `tilewise study recipes` shows what to run."))
        return
    lost: list[str] = []
    table = table_of("study", "runs done", "diverged", "last worked on", "question")
    for folder in folders:
        try:
            study, (records, damaged) = read_study(folder).study, readable_records(folder)
        except TilewiseError as error:
            add_row(table, folder.name, "unreadable", "", "", str(error))
            continue
        lost += [f"{folder.name}:{name}" for name in damaged]
        agenda = Agenda(study, records)
        diverged = sum(record.diverged for record in records.values())
        add_row(
            table,
            folder.name,
            f"{agenda.done}/{agenda.total}",
            str(diverged or ""),
            datetime.fromtimestamp(worked_on(folder), UTC).strftime("%Y-%m-%d %H:%M UTC"),
            study.question,
        )
    console.print(table)
    say_damaged(lost, console)


def say_damaged(runs: Iterable[str], console: Console) -> None:
    """Name the runs whose records cannot be read."""
    for name in runs:
        say(console, f"{name}: its record is damaged and left out.")


def show(found: Found, console: Console) -> None:
    """Print a run, or a table of the runs of an arm, an experiment or a study."""
    if list(found.records) == [found.part]:
        console.print(_run(found))
        return
    stored = read_study(found.folder)
    say(console, f"{found.name}: {stored.study.question}")
    say(console, f"Command: {stored.command}")
    held = found.withheld()
    console.print(_runs(found.records, held))
    for arm in dict.fromkeys(map(arm_of, found.records)):
        if arm in held:
            say(console, f"{arm}: {held[arm]}")
    say_damaged(found.damaged, console)
    if not found.part:
        for experiment in stored.study.experiments:
            arms = ", ".join(experiment.arm_names)
            say(console, f"{experiment.name}: {arms}")


def table_of(*columns: str, left: Sequence[str] = ("study", "run", "arm", "question")) -> Table:
    """Return an empty table in the house's style; numbers are to the right."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right")
    return table


def add_row(table: Table, *cells: str) -> None:
    """Add a row of plain text: rich would take ``[x]`` in a string for a style."""
    table.add_row(*map(Text, cells))


def _runs(records: Mapping[str, RunRecord], held: Mapping[str, str]) -> Table:
    if records and all(record.of_script for record in records.values()):
        return _runs_of_scripts(records)
    table = table_of("run", "status", "step", "loss", "bits/byte", "tokens/s", "peak memory")
    for name, record in records.items():
        found = measure(record)
        last = record.evaluations[-1] if record.evaluations else None
        add_row(
            table,
            name,
            _status(record),
            str(record.steps[-1].step if record.steps else 0),
            number(last.loss if last else None, ".4f"),
            number(last.bits_per_byte if last else None, ".4f"),
            WITHHELD if arm_of(name) in held else number(found["tokens_per_s"], ",.0f"),
            amount(record.memory.peak_bytes) if record.memory else "",
        )
    return table


def _run(found: Found) -> RenderableType:
    record = found.records[found.part]
    start, took = record.start, measure(record)
    held = found.withheld().get(arm_of(found.part))
    where = [f"{key} {each}" for key, each in flat(start.environment) if each not in (None, "")]
    layers = record.kernels.layers if record.kernels else []
    kernels = [f"layer {each.layer}: {each.kernel} x{each.calls}" for each in layers]
    head = f"{found.name}: {_status(record)}"
    if record.end is not None and record.end.reason:
        head += f" ({record.end.reason})"
    facts = [
        ("record", str(found.folder / "runs" / found.part / RECORD)),
        ("config", start.config_hash),
        ("parameters", ", ".join(f"{count:,} {name}" for name, count in start.parameters.items())),
        *((f"group {name}", _named(names)) for name, names in start.groups.items()),
        ("text", ", ".join(f"{key} {value}" for key, value in start.corpus.items())),
        ("where", ", ".join(where)),
        ("started", ", ".join(f"step {each.from_step} at {each.time}" for each in record.starts)),
        ("speed", f"{WITHHELD}. {held}" if held else _speed(took)),
        ("memory", _memory(record)),
        ("attention", ", ".join(kernels)),
        ("gradient norm", f"median {number(took['gradient_norm'], '.3g')}"),
        ("train loss", _curve([each.loss for each in record.steps])),
    ]
    if record.end is not None:
        facts.append(("weights sha256", record.end.weights_sha256))
    table = Table.grid(padding=(0, 2))
    for name, words in facts:
        table.add_row(Text(name, style="bold"), Text(words))
    config = Table.grid(padding=(0, 2))
    for path, value in flat(parts_used(start.config)):
        config.add_row(Text(path, style="dim"), Text(str(value)))
    sample = record.sample
    written = [] if sample is None else [Text.assemble((sample.prompt, "dim"), sample.text, "\n")]
    return Group(
        Text(head, style="bold"),
        table,
        _evaluations(record, timed=not held),
        *written,
        config,
    )


def _runs_of_scripts(records: Mapping[str, RunRecord]) -> Table:
    metrics = dict.fromkeys(
        name for record in records.values() for each in record.evaluations for name in each.metrics
    )
    units = [METRICS[name].unit for name in metrics]
    table = table_of("run", "status", "step", *units, "time", "CPU time")
    for name, record in records.items():
        last = record.evaluations[-1].metrics if record.evaluations else {}
        add_row(
            table,
            name,
            _status(record),
            str(record.steps[-1].step if record.steps else 0),
            *(number(last.get(each), ".4f") for each in metrics),
            in_words(sum(each.wall_s for each in record.steps)),
            in_words(sum(each.cpu_s for each in record.steps)),
        )
    return table


def _evaluations(record: RunRecord, timed: bool) -> Table:
    words = any(each.word_perplexity is not None for each in record.evaluations)
    names = list(dict.fromkeys(name for each in record.evaluations for name in each.metrics))
    columns = ["step", "tokens", "training time", "held-out loss"]
    columns += [METRICS[name].unit for name in names] if names else ["bits/byte"]
    table = table_of(*columns, *(["word perplexity"] if words else []))
    for each in record.evaluations:
        row = [
            str(each.step),
            f"{each.tokens:,}",
            in_words(each.train_wall_s) if timed else WITHHELD,
            number(each.loss, ".4f"),
        ]
        shown = [each.metrics.get(name) for name in names] if names else [each.bits_per_byte]
        row += [number(value, ".4f") for value in shown]
        add_row(table, *row, *([number(each.word_perplexity, ".2f")] if words else []))
    return table


def number(value: float | None, form: str) -> str:
    """Return a number in that form; empty for none."""
    return "" if value is None else format(value, form)


def difference(value: float) -> str:
    """Return a difference with its sign; one of rounding shows its size."""
    return f"{value:+.4f}" if abs(value) >= 5e-5 or not value else f"{value:+.0e}"


def _status(record: RunRecord) -> str:
    if record.missing:
        return f"incomplete ({record.missing})"
    return "incomplete" if record.end is None else record.end.status


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{len(names)} tensors: {shown}{', ...' if len(names) > 3 else ''}"


def _speed(took: Values) -> str:
    wall, cpu = took["tokens_per_s"], took["tokens_per_cpu_s"]
    if wall is None:
        return "not known yet"
    shares = [("12 L d T", took["mfu_full"]), ("6 L d T", took["mfu_causal"])]
    mfu = ", ".join(f"{share:.1%} MFU ({name})" for name, share in shares if share is not None)
    per_cpu = "" if cpu is None else f", {cpu:,.0f} a CPU-second"
    return f"{wall:,.0f} tokens/s{per_cpu}{', ' if mfu else ''}{mfu}"


def _memory(record: RunRecord) -> str:
    found = record.memory
    if found is None:
        return "not measured yet"
    parts = {name.removesuffix("_bytes"): each for name, each in vars(found).items()}
    return ", ".join(f"{part} {amount(it)}" for part, it in parts.items() if it is not None)


def _curve(losses: Sequence[float | None]) -> str:
    """Return the training loss as a line of blocks, from its highest to its lowest."""
    known = [loss for loss in losses if loss is not None]
    if not known:
        return ""
    columns = min(_CURVE, len(known))
    edges = [round(at * len(known) / columns) for at in range(columns + 1)]
    means = [sum(known[low:high]) / (high - low) for low, high in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    line = "".join(_BARS[round((mean - low) * scale)] for mean in means)
    return f"{known[0]:.3f} {line} {known[-1]:.3f}"
