"""Other packages in the bench: their table with made-up packages, and the real ones where they are.

The made-up ones are installed because torch is, whose version they say they have.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tilelab.bench import command, main
from tilelab.bench.goals import GoalRecord, PeerResult, measure, standing
from tilelab.bench.tables import peer_lines, tables
from tilelab.cases.case import Case
from tilelab.common.clock import Samples, elsewhere
from tilelab.peers.packages import Package, first_line, packages
from tilelab.peers.work import Given, Prepared, Work, compare, draw, work_of
from tilewise.errors import Unsupported
from tilewise.kernels.cpu import absence

needs_core = pytest.mark.skipif(absence() is not None, reason="the compiled core is not built")
SMALL = Case("small", 1, 2, 2, 40, 40, 16, 16)
RECORDS = sorted(Path(__file__).parents[3].glob("benchmarks/*/cpu.json"))


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    torch.set_num_threads(1)


class Fake:
    """A made-up package's call, which counts what is called."""

    def __init__(self, change: Callable[[Tensor], Tensor] = lambda out: out) -> None:
        self.change, self.calls, self.packed = change, 0, 0

    def prepare(self, work: Work, given: Given) -> Prepared:
        def pack() -> None:
            self.packed += 1

        def call() -> Tensor:
            pack()
            self.calls += 1
            return self.change(scaled_dot_product_attention(*given.leaves))

        return Prepared(call, pack, "made up")

    def package(self, name: str = "Good", **more: Any) -> Package:
        return Package(name, "torch", self.prepare, **more)


def refusing(work: Work, given: Given) -> Prepared:
    raise ValueError("/home/someone/lib/a.so: undefined symbol\nand more")


def measured(*given: Package, **changes: Any) -> tuple[PeerResult, ...]:
    case = Case(**{**SMALL.__dict__, **changes})
    return measure(case, 0.01, (2, 2), 1, given).peers


@needs_core
def test_a_package_is_measured_with_its_packing_apart() -> None:
    fake = Fake()
    (found,) = measured(fake.package())
    assert (found.name, found.version, found.path) == ("Good", torch.__version__, "made up")
    assert not found.wrong
    assert not found.why_not
    assert len(found.samples.cpu_s) == len(found.packing.cpu_s) == 2
    assert min(found.samples.cpu_s) > min(found.packing.cpu_s) > 0
    assert fake.packed > fake.calls > 2


@needs_core
def test_a_wrong_package_is_not_timed() -> None:
    fake = Fake(lambda out: out + 0.5)
    (found,) = measured(fake.package())
    assert found.wrong.startswith("out: largest error 5.00e-01, allowed")
    assert found.samples == Samples.of()
    assert fake.calls == 1
    assert found.cell("cpu", 1.0) == "WRONG"


@needs_core
def test_what_a_package_refuses_is_said() -> None:
    fake = Fake()
    never = fake.package("Never", why_not=lambda _: "it takes no such work")
    found = measured(Package("Broken", "torch", refusing), never)
    assert [each.why_not for each in found] == ["a.so: undefined symbol", "it takes no such work"]
    (back,) = measured(fake.package(), passes="backward")
    (dropping,) = measured(fake.package(), dropout_p=0.1)
    assert (back.why_not, dropping.why_not) == ("it has no backward pass", "it has no dropout")
    assert fake.calls == 0


@needs_core
def test_work_on_other_threads_is_not_measured_by_the_clock_of_one() -> None:
    def busy(out: Tensor) -> Tensor:
        thread = Thread(target=lambda: sum(range(300_000)))
        thread.start()
        thread.join()
        return out

    (found,) = measured(Fake(busy).package())
    assert "other threads do" in found.why_not
    assert elsewhere(lambda: sum(range(100_000))) < 0.1


def test_a_package_that_is_not_here_is_a_line() -> None:
    absent = Package("Absent", "no-such-distribution", refusing, ("nor-this",))
    unfit = Fake().package("Unfit", unfit=lambda: "it is for another machine")
    found = standing([absent, unfit, Fake().package()])
    missing = "no-such-distribution and nor-this are not installed"
    assert found["Absent"] == {"version": "", "why_not": missing}
    assert peer_lines(found, []) == [
        f"peer Absent: not measured: {missing}",
        "peer Unfit: not measured: it is for another machine",
    ]


def test_a_reason_is_a_line_of_its_packages_and_cases() -> None:
    no = [PeerResult(name, "1", why_not="no backward") for name in ("A", "B")]
    bad = PeerResult("C", "1", wrong="out: NaN in the wrong places")
    found = [(f"case {n}", each) for n in range(5) for each in no]
    assert peer_lines({}, [*found, ("case 1", bad), ("case 2", PeerResult("D", "1"))]) == [
        "peer A, B: not measured: no backward (case 0; case 1; case 2 and 2 more)",
        "peer C: WRONG: out: NaN in the wrong places (case 1)",
    ]


def test_a_cell() -> None:
    times, packing = (Samples([s] * 3, [9.0] * 3) for s in (0.004, 0.001))
    found = PeerResult("A", "1", "amx", samples=times, packing=packing)
    assert found.cell("cpu", 0.002) == "4 ±0% (amx; packing 1), 2.00x"
    assert PeerResult("A", "1", samples=times).cell("wall", 4.5) == "9000 ±0%, 2.00x"
    assert PeerResult("A", "1", why_not="no").cell("cpu", 1.0) == "-"


def test_errors_name_no_folder() -> None:
    assert first_line(OSError("/a/b-1/c.so: bad\nmore")) == "c.so: bad"
    assert first_line(ValueError("at src/core/x.hpp:5: 1/2")) == "at x.hpp:5: 1/2"
    assert first_line(KeyError()) == "KeyError"


@needs_core
def test_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    absent = Package("Absent", "no-such-distribution", refusing)
    wrong = Fake(lambda out: out * 2).package("Wrong")
    monkeypatch.setattr(command, "packages", lambda: [Fake().package(), wrong, absent])
    path = tmp_path / "cpu.json"
    options = ["--cases", "short 33", "--dtype", "float32", "--rounds", "2", "--json", str(path)]
    assert main(["cpu", "--peers", *options]) == 0
    text = capsys.readouterr().out
    for line in (
        f"Good {torch.__version__}",
        "(made up; packing",
        "peer Absent: not measured: no-such-distribution is not installed",
        "peer Wrong: WRONG: out: largest error",
    ):
        assert line in text
    values = json.loads(path.read_text())
    assert values["machine"]["peers"]["Good"] == {"version": torch.__version__, "why_not": ""}
    good, bad = values["cases"][0]["peers"]
    assert len(good["samples"]["cpu_s"]) == 2
    assert bad["wrong"]
    again = tmp_path / "again.json"
    GoalRecord.read(path).write(again)
    assert GoalRecord.read(again) == GoalRecord.read(path)
    assert main(["--from", str(path)]) == 0
    assert "(made up; packing" in capsys.readouterr().out
    assert main(["cpu", *options]) == 0
    assert "Other packages" not in capsys.readouterr().out


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.parent.name)
def test_a_record_from_before_is_read(path: Path) -> None:
    text = path.read_text()
    without = json.loads(text)
    without["machine"].pop("peers", None)
    for case in without["cases"]:
        case.pop("peers", None)
    record = GoalRecord.from_json(without)
    assert all(not case.peers for case in record.cases)
    assert not any(table.title.startswith("Other packages") for table in tables(record))


def test_the_table_of_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [each.name for each in packages()]
    assert names == ["vLLM", "SGLang", "OpenVINO", "ONNX Runtime", "zentorch", "FlexAttention"]
    for chip, said in (("AMD EPYC", ""), ("Xeon", "it is for AMD's processors, and this is Xeon")):
        found = SimpleNamespace(name=chip)
        monkeypatch.setattr("tilelab.peers.packages.detect", lambda found=found: found)
        assert packages()[names.index("zentorch")].unfit() == said


_GROUPED = {"heads": 4, "kv_heads": 2}
_REAL = [each for each in packages() if each.name != "FlexAttention"]  # test_gate.py has it
_WORKS: dict[str, dict[str, Any]] = {
    "full": {"queries": 70, "keys": 70},
    "causal": {"queries": 70, "keys": 70, "mask": ("causal",)},
    "grouped": {"queries": 70, "keys": 70, "mask": ("causal",), **_GROUPED},
    "one query": {"queries": 1, "keys": 200},
    "one query, grouped": {"queries": 1, "keys": 200, **_GROUPED},
    "some queries": {"queries": 4, "keys": 200},
    "some queries, causal": {"queries": 4, "keys": 200, "mask": ("causal",)},
    "window": {"queries": 300, "keys": 300, "mask": ("window_256",)},
    "bias": {"queries": 70, "keys": 70, "score": ("bias_of_pairs",)},
}
_TAKEN = {
    "vLLM": set(_WORKS) - {"bias"},
    "SGLang": set(_WORKS) - {"bias", "window"},
    "OpenVINO": {name for name, of in _WORKS.items() if "kv_heads" not in of},
    "ONNX Runtime": set(_WORKS),
    "zentorch": set(_WORKS),
}


@pytest.mark.parametrize("work", _WORKS)
@pytest.mark.parametrize("package", _REAL, ids=lambda package: package.name)
def test_a_real_package_is_exact(package: Package, work: str) -> None:
    if missing := package.absence():
        pytest.skip(f"{package.name}: {missing}")
    # Two of a batch: what is packed for one must not reach the other.
    sizes = {"batch": 2, "heads": 2, "kv_heads": 2, "head_dim": 64, "value_dim": 64}
    dtypes = [torch.bfloat16] if package.name == "SGLang" else [torch.float32]
    for dtype in [*dtypes, *([torch.bfloat16] if package.name == "vLLM" else [])]:
        case = work_of(Case(work, **{**sizes, **_WORKS[work]}, dtype=dtype))
        given = draw(case)
        if work not in _TAKEN[package.name]:
            if not package.refusal(case):
                with pytest.raises(Unsupported, match="it "):
                    package.prepare(case, given)
            continue
        assert not package.refusal(case)
        prepared = package.prepare(case, given)
        for _ in range(2):  # what a call packs again is the same
            assert not compare(case, given, lambda q, k, v: prepared.call()).complaint  # noqa: B023
