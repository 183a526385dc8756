"""Records: what is written is read, what is torn is dropped, what was changed is refused."""

from __future__ import annotations

import errno
import json
import math
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.lab.study.records_of import Behaviour, config_of, experiment_of, records_of, study_of
from tilelab.study.records import store
from tilelab.study.records.events import (
    Checkpoint,
    CorruptRecordError,
    End,
    Evaluation,
    Event,
    Kernels,
    LayerKernel,
    Memory,
    RunRecord,
    Start,
    Step,
    Writer,
    condensed,
)
from tilelab.study.verdict.measures import cost, measure


def start(from_step: int = 0) -> Start:
    some = records_of(study_of())["optimizers/lion/seed-0"].start
    return replace(some, config={"model": {"width": 32}}, from_step=from_step)


def step(number: int, loss: float | None = 2.0, wall_s: float = 0.5) -> Step:
    return Step(number, loss, 1e-3, 1.5, wall_s, 0.4, warmup=number == 1)


def evaluation(number: int, loss: float | None = 2.5) -> Evaluation:
    return Evaluation(number, number * 64, 1.0, 0.9, loss, 3.6, None, 0.2)


def end(status: Any = "done") -> End:
    return End(status, 2, "", "aa", "bb")


def written(path: Path, *events: Event) -> Path:
    writer = Writer(path)
    for event in events:
        writer.write(event)
    writer.close()
    return path


def test_everything_that_is_written_is_read(tmp_path: Path) -> None:
    memory = Memory(1, 2, 3, 4, 5)
    kernels = Kernels([LayerKernel(0, "sdpa flash", 8), LayerKernel(1, "sdpa math", 8)])
    events = (start(), evaluation(0), step(1), step(2), memory, kernels, Checkpoint(2), end())
    record = RunRecord.read(written(tmp_path / "r", *events))
    assert record == RunRecord(
        starts=[start()],
        steps=[step(1), step(2)],
        evaluations=[evaluation(0)],
        memory=memory,
        kernels=kernels,
        checkpoint=2,
        end=end(),
    )
    assert record.start == start()
    assert record.done
    assert not record.diverged
    absent = RunRecord.read(tmp_path / "absent")
    assert absent == RunRecord()
    assert not absent.done


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_null(tmp_path: Path, value: float) -> None:
    path = written(tmp_path / "r", step(1, loss=value), end("diverged"))
    assert json.loads(path.read_text().splitlines()[0])["loss"] is None
    record = RunRecord.read(path)
    assert record.steps[0].loss is None
    assert record.diverged


def test_numbers_inside_lists_and_mappings_are_made_finite_too() -> None:
    nested = replace(start(), environment={"load": [1.0, math.nan, (math.inf,)]})
    assert json.loads(nested.line())["environment"] == {"load": [1.0, None, [None]]}


def test_a_record_that_is_cut_anywhere_loses_the_line_in_flight_only(tmp_path: Path) -> None:
    events = (start(), step(1), step(2))
    data = written(tmp_path / "whole", *events).read_bytes()
    ends = [position + 1 for position, byte in enumerate(data) if byte == ord("\n")]
    around = {position + by for position in (0, *ends) for by in (-1, 0, 1)}
    for length in sorted({*range(0, len(data), 29), *around} & set(range(len(data) + 1))):
        path = tmp_path / "torn"
        path.write_bytes(data[:length])
        whole = sum(position <= length for position in ends)
        record = RunRecord.read(path)
        assert len(record.starts) + len(record.steps) == whole
        written(path, step(3))  # the next writer mends it
        mended = RunRecord.read(path)
        assert mended.steps == [*record.steps, step(3)]


def test_a_tail_of_zeros_after_a_power_cut_is_torn(tmp_path: Path) -> None:
    path = written(tmp_path / "r", step(1))
    with path.open("ab") as file:
        file.write(bytes(100))
    assert RunRecord.read(path).steps == [step(1)]
    written(path, step(2))
    assert RunRecord.read(path).steps == [step(1), step(2)]


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("garbage", "JSON"),
        ("", "JSON"),
        ("3", "int"),
        ("null", "None"),
        ('{"step": 3}', "event"),
        ('{"event": "dance"}', "dance"),
        ('{"event": "checkpoint"}', "step"),
        (start().line().strip().replace('"format":1', '"format":2'), "format 2"),
        ('{"event": "kernels", "layers": [{"depth": 3}]}', "depth"),
        ('{"event": "kernels", "layers": 3}', "int"),
        ("\x80", "decode"),
    ],
)
def test_a_line_that_is_no_event_is_an_error_that_names_it(
    tmp_path: Path, line: str, word: str
) -> None:
    path = tmp_path / "r"
    later = json.dumps({"event": "checkpoint", "step": 4, "by": "a later version"}) + "\n"
    data = later + line + "\n" + step(2).line()
    path.write_text(later)
    assert RunRecord.read(path).checkpoint == 4, "what it does not know is left out"
    path.write_bytes(data.encode("latin-1"))
    with pytest.raises(CorruptRecordError) as error:
        RunRecord.read(path)
    assert f"{path}, line 2" in str(error.value)
    assert word in str(error.value)
    assert "Move the folder" in str(error.value)


def test_a_resumed_run_forgets_what_it_does_again(tmp_path: Path) -> None:
    first = (start(), evaluation(0), step(1), step(2), evaluation(2), Checkpoint(2), step(3))
    again = (start(from_step=2), step(3, wall_s=9.0), step(4), evaluation(4), Checkpoint(4))
    record = RunRecord.read(written(tmp_path / "r", *first, evaluation(3), *again))
    assert [each.step for each in record.steps] == [1, 2, 3, 4]
    assert record.steps[2].wall_s == 9.0
    assert [each.step for each in record.evaluations] == [0, 2, 4]
    assert record.checkpoint == 4
    assert [each.from_step for each in record.starts] == [0, 2]
    assert record.start.from_step == 0
    path = written(tmp_path / "r", Checkpoint(4), start(from_step=4), evaluation(4, loss=9.0))
    assert RunRecord.read(path).evaluations[-1] == evaluation(4, loss=9.0), "made again"
    assert len(RunRecord.read(path).evaluations) == 3


def test_a_run_that_begins_again_forgets_everything(tmp_path: Path) -> None:
    first = (start(), evaluation(0), step(1), Checkpoint(1), end())
    record = RunRecord.read(written(tmp_path / "r", *first, start()))
    assert record == RunRecord(starts=[start(), start()])
    assert not record.done


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize("at", range(4))
def test_a_line_that_is_edited_missing_or_doubled_is_noticed(tmp_path: Path, at: int) -> None:
    path = written(tmp_path / "r", start(), step(1), evaluation(1), step(2), end())
    lines = lines_of(path)
    edits = [(b'"seed":0', b'"seed":1'), (b"2.0", b"1.0"), (b"2.5", b"2.6"), (b"2.0", b"1.0")]
    old, new = edits[at]
    assert old in lines[at]
    path.write_bytes(b"".join([*lines[:at], lines[at].replace(old, new), *lines[at + 1 :]]))
    with pytest.raises(CorruptRecordError, match=rf"line {at + 1}: .*checksum"):
        RunRecord.read(path)
    for changed in ([*lines[:at], *lines[at + 1 :]], [*lines[: at + 1], *lines[at:]]):
        path.write_bytes(b"".join(changed))
        with pytest.raises(CorruptRecordError, match="checksum"):
            RunRecord.read(path)


def test_a_record_without_checksums_is_read_and_goes_on_with_them(tmp_path: Path) -> None:
    path = tmp_path / "r"
    path.write_text(start().line() + step(1).line())
    assert RunRecord.read(path).steps == [step(1)]
    written(path, step(2), end())
    assert RunRecord.read(path).done
    path.write_text(path.read_text().replace("1.5", "1.6"))  # in the old lines too: the next knows
    with pytest.raises(CorruptRecordError, match="line 3"):
        RunRecord.read(path)


@pytest.mark.parametrize("script", [False, True], ids=["own", "script"])
def test_a_condensed_record_measures_like_the_whole(tmp_path: Path, script: bool) -> None:
    """A script says no norms of gradients, and its steps are not taken for diverged ones."""
    study = study_of(experiment_of("lion", baseline=config_of(**{"budget.steps": 400})))
    lines, sizes = {}, {}
    for name, record in records_of(study, {"lion": Behaviour(diverged={1: 300})}).items():
        if script:
            record.steps[:] = [replace(each, gradient_norm=None) for each in record.steps]
        path = written(tmp_path / name.replace("/", "-"), *record.starts, *record.steps)
        data = condensed(path)
        sizes[name], lines[name] = path.stat().st_size / len(data), data.count(b"\n")
        path.write_bytes(data)
        read = RunRecord.read(path)
        assert read.whole_steps == record.whole_steps
        assert read.steps[:32] == record.steps[:32]
        for one, other in zip(costs_of(read), costs_of(record), strict=True):
            assert one == (other if other is None else pytest.approx(other, rel=1e-12))
    assert min(sizes.values()) > 4
    assert lines["optimizers/lion/seed-1"] == 1 + 32 + 9 + 1, "the step that diverged stays apart"


def costs_of(record: RunRecord) -> tuple[Any, ...]:
    found, paid = measure(record), cost([record])
    names = ("tokens_per_s", "tokens_per_cpu_s", "gradient_norm_max")
    return (*(found[name] for name in names), paid.tokens, paid.wall_s, paid.cpu_s)


def test_a_line_without_a_checksum_after_lines_with_one_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path / "r", start(), step(1))
    path.write_text(path.read_text() + step(2).line())
    with pytest.raises(CorruptRecordError, match="it has no checksum"):
        RunRecord.read(path)


@pytest.mark.parametrize(
    ("events", "missing"),
    [
        ((start(), step(1), end()), "1 of 2 steps"),
        ((start(), step(2), end()), "0 of 2 steps"),
        ((start(), step(1), start(from_step=2), end()), "1 of 2 steps"),
        ((start(), step(1), start(from_step=2), step(3)), "1 of 3 steps"),
    ],
)
def test_a_record_that_lacks_steps_is_not_done(
    tmp_path: Path, events: tuple[Event, ...], missing: str
) -> None:
    record = RunRecord.read(written(tmp_path / "r", *events))
    assert not record.done
    assert record.end is None
    assert missing in record.missing
    again = RunRecord.read(written(tmp_path / "r", start(), step(1), step(2), end()))
    assert again.done
    assert again.missing == ""


@pytest.mark.parametrize(
    "config",
    [
        {"budget": {"steps": 3, "tokens": None}, "training": {}},
        {
            "budget": {"steps": None, "tokens": 129},
            "training": {"batch": 2, "accumulation": 2},
            "model": {"context": 16},
        },
    ],
)
def test_a_run_is_done_after_all_its_planned_steps(tmp_path: Path, config: dict[str, Any]) -> None:
    first = replace(start(), config=config)
    path = written(tmp_path / "r", first, step(1), step(2), end())
    assert RunRecord.read(path).missing == "2 of 3 steps are in the record"
    early = written(tmp_path / "diverged", first, step(1), step(2), end("diverged"))
    assert RunRecord.read(early).diverged


STORED = sorted((ROOT / "benchmarks/studies").glob("*/records.tar.gz"))


@pytest.mark.parametrize("archive", STORED, ids=lambda path: path.parent.name)
def test_stored_records_are_whole(tmp_path: Path, archive: Path) -> None:
    """Written before there were checksums; their verdicts are of every run in them."""
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    found = store.readable_records(tmp_path)
    assert found.damaged == {}
    assert len(found.whole) >= 12
    assert {name: record.missing for name, record in found.whole.items() if record.missing} == {}
    assert all(record.done for record in found.whole.values())


class FullDisk:
    """A file that has room for some bytes, and takes few at once."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        done: int = self.file.write(data[: min(self.room, 7)])
        self.room -= done
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@pytest.mark.parametrize("room", [0, 1, 20])
def test_a_full_disk_is_an_error_and_leaves_what_was_there(tmp_path: Path, room: int) -> None:
    path = written(tmp_path / "r", step(1))
    before = path.read_bytes()
    writer = Writer(path)
    writer._file = FullDisk(writer._file, room)  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space"):
        writer.write(step(2))
    assert path.read_bytes() == before
    writer._file.room = 10_000  # type: ignore[attr-defined]
    writer.write(step(2))  # there is room again
    writer.sync()
    writer.close()
    assert RunRecord.read(path).steps == [step(1), step(2)]
