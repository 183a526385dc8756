"""The gate sees what it is there to see, and says nothing of a good kernel.

It compiles in processes of its own and runs with or without Triton's interpreter around it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.gpu import variant_cases
from tilelab.gate.__main__ import compile_all, environment, main
from tilelab.gate.cases import CASES
from tilelab.gate.machine import (
    buffers,
    hidden_exponentials,
    hot,
    loops,
    needed_products,
    of_amdgcn,
    of_sass,
    sass,
)
from tilelab.gate.record import (
    TARGETS,
    Case,
    Entry,
    Record,
    baseline_path,
    cases_of,
    faults,
    load,
    out_of_date,
    store,
    table,
    target_named,
)
from tilelab.gate.search import ladder
from tilewise.kernels.gpu.config import Pass, shared_need

OWN = "tests.kernels.gpu.gate_cases"
AMPERE, HOPPER = target_named("sm_80"), target_named("sm_90a")
PRODUCTS = Case("c", lambda family: [])
GOOD = Record(
    "sm_80", "c", "k", {"BM": 64}, 4, 2, 100, 0, 0, 4096, 1000, {"mma": 32}, {"cp.async": 8}, 1.0
)

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def compiled(target: str, *names: str, module: str = OWN, limit_s: int = 300) -> list[Record]:
    """What the gate's children make of some cases of a module on one chip."""
    chip = target_named(target)
    ((found, records),) = compile_all([chip], {target: list(names)}, module, 1, limit_s)
    assert found == chip
    return records


def gate(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The gate's exit status and what it printed, on the small cases."""
    status = main(["--module", OWN, "--jobs", "1", *arguments])
    return status, capsys.readouterr().out


# ---- verdicts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, []),
        ({"spills": 3, "loop_spills": 1}, ["1 of 3 spills are in loops"]),
        ({"spills": 3, "scratch_bytes": 12}, []),  # outside of loops
        ({"shared_bytes": 163 * 1024}, []),
        (
            {"shared_bytes": 163 * 1024 + 1},
            ["166913 bytes of shared memory, the chip has 166912"],
        ),
        ({"matrix": {}}, ["no matrix instruction"]),
        ({"error": "RuntimeError: no"}, ["RuntimeError: no"]),
    ],
)
def test_fault(change: dict[str, Any], words: list[str]) -> None:
    assert faults(GOOD._replace(**change), PRODUCTS, AMPERE, None) == words


KEY = PRODUCTS._replace(key=True)
BUSY = GOOD._replace(
    matrix={"wgmma": 32}, issued=1.0, narrowest=64, buffers=2, hidden=0, exponentials=64
)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"issued": 1.5}, "matrix instructions do 1.50 times what the products need"),
        ({"issued": 1.06}, "matrix instructions do 1.06 times what the products need"),
        ({"narrowest": 32}, "a wgmma of 32 columns, 64 are due"),
        ({"waiting": 1}, "1 loops without an asynchronous copy"),
        ({"buffers": 1}, "1 buffers for a tile that a loop copies, 2 are due"),
        ({"buffers": 0}, "0 buffers for a tile that a loop copies, 2 are due"),
    ],
)
def test_loops_of_key_kernels(change: dict[str, Any], words: str) -> None:
    """Rules for the key kernels of the chips that are held to them, and for no others."""
    record = BUSY._replace(**change)
    assert faults(record, KEY, HOPPER, None) == [words]
    assert not faults(record, PRODUCTS, HOPPER, None)
    other = target_named("sm_86")
    assert not faults(record._replace(matrix={"mma": 1}), KEY, other, None)


def test_loops_that_are_good() -> None:
    for change in ({}, {"issued": 1.05}, {"issued": 0.0}, {"narrowest": 0}):
        assert not faults(BUSY._replace(**change), KEY, HOPPER, None)
    assert not faults(BUSY._replace(narrowest=32), KEY._replace(columns=32), HOPPER, None)
    # AMD's units have no copies of this kind, and are held to the number of products alone.
    alone = BUSY._replace(matrix={"mfma": 9}, waiting=1, buffers=0)
    amd = target_named("gfx942")
    assert not faults(alone, KEY, amd, None)
    twice = alone._replace(issued=6.0)
    assert faults(twice, KEY, amd, None)
    assert not faults(twice._replace(kernel="attend_split"), KEY, amd, None)
    assert faults(BUSY._replace(issued=6.0, kernel="attend_split"), KEY, HOPPER, None)


def test_the_chips_own_matrix_instruction() -> None:
    """Old instructions run on a newer chip, at a fraction of its speed."""
    assert faults(GOOD, PRODUCTS, HOPPER, None) == ["mma instead of wgmma"]
    both = GOOD._replace(matrix={"mma": 1, "wgmma": 1})
    assert faults(both, PRODUCTS, HOPPER, None) == []
    by_queries = GOOD._replace(kernel="attend")
    assert faults(by_queries._replace(tile={"BM": 32, "BN": 32}), PRODUCTS, HOPPER, None) == []
    assert faults(by_queries._replace(tile={"BM": 16, "BN": 64}), PRODUCTS, HOPPER, None) == []
    assert faults(by_queries._replace(tile={"BM": 64, "BN": 32}), PRODUCTS, HOPPER, None)
    assert faults(GOOD._replace(tile={"BM": 32, "BN": 64}), PRODUCTS, HOPPER, None)
    listed = GOOD._replace(kernel="listed_key_kernel", tile={"BM": 64, "BN": 32})
    assert faults(listed, PRODUCTS, HOPPER, None) == []
    assert faults(GOOD._replace(tile={}), PRODUCTS, HOPPER, None)


def test_kernels_without_products() -> None:
    bare = GOOD._replace(matrix={}, kernel="k 2")
    assert faults(bare, PRODUCTS, AMPERE, None)
    assert not faults(bare, PRODUCTS._replace(without_products=frozenset({"k"})), AMPERE, None)
    assert faults(bare, PRODUCTS._replace(without_products=frozenset({"other"})), AMPERE, None)
    assert not faults(bare, PRODUCTS._replace(sixteen_bit=False), AMPERE, None)


@pytest.mark.parametrize("field", ["registers", "instructions"])
def test_growth(field: str) -> None:
    """Five per cent more is within reason; more is not, and a new tile is named."""
    before = Entry(100, 1000, GOOD.choice)
    most = round(getattr(before, field) * 1.05)
    assert not faults(GOOD._replace(**{field: most}), PRODUCTS, AMPERE, before)
    grown = GOOD._replace(**{field: most + 1})
    (words,) = faults(grown, PRODUCTS, AMPERE, before)
    assert words.startswith(f"{field} {getattr(before, field)} -> {most + 1} (+")
    (words,) = faults(grown, PRODUCTS, AMPERE, before._replace(choice="BM=32 4 warps 2 stages"))
    assert "was BM=32 4 warps 2 stages, is BM=64 4 warps 2 stages" in words


def test_a_chip_left_out() -> None:
    """The reason is borne out by the probe, or it is out of date."""
    old = target_named("sm_75")
    assert out_of_date(GOOD._replace(matrix={}), old) == ""
    assert "out of date" in out_of_date(GOOD, old)
    assert "failed: no" in out_of_date(GOOD._replace(error="no"), old)


# ---- baselines ---------------------------------------------------------------------------------


def test_baseline_file(tmp_path: Path) -> None:
    path = baseline_path("3.9.9+git1234", tmp_path / "new")
    assert path.name == "3.9.9.json"
    assert load(path) == {}
    other = GOOD._replace(case="d", registers=7)
    store(path, [GOOD, other, GOOD._replace(case="e", error="no")], whole=True)
    first = Entry(100, 1000, "BM=64 4 warps 2 stages")
    assert load(path) == {"sm_80": {"c / k": first, "d / k": first._replace(registers=7)}}
    # A part of the cases leaves the others; all of them are all there is. Other chips stay.
    store(path, [GOOD._replace(registers=5)], whole=False)
    assert load(path)["sm_80"].keys() == {"c / k", "d / k"}
    assert load(path)["sm_80"]["c / k"].registers == 5
    store(path, [GOOD._replace(target="sm_86")], whole=True)
    store(path, [GOOD], whole=True)
    assert load(path) == {"sm_80": {"c / k": first}, "sm_86": {"c / k": first}}


# ---- machine code ------------------------------------------------------------------------------

USAGE = """
Resource usage:
 Common:
  GLOBAL:0
 Function good:
  REG:77 STACK:40 SHARED:1024 LOCAL:8 CONSTANT[0]:592 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
SASS = """
	.sectionflags	@"SHF_BARRIERS=1"
good:
.text.good:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/               @P0 STL [R1+0x8], R3 ;
.L_x_0:
        /*0020*/             @!UP1 LDL.LU R3, [R1+0x8] ;
        /*0030*/              @!P0 LDGSTS.E.BYPASS.128 [R7+0x4000], desc[UR14][R4.64] ;
        /*0040*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ;
        /*0050*/                   HMMA.16816.F32.BF16 R4, R16, R20, R4 ;
        /*0060*/                   UTMALDG.2D [UR8], [UR4] ;
        /*0070*/             @!PT  LDS RZ, [RZ] ;
        /*0080*/                   BRA `(.L_x_0);
        /*0090*/                   NOP ;
"""


def test_sass() -> None:
    found = of_sass(USAGE, SASS)
    assert found.registers == 77
    assert found.spills == 2
    assert found.scratch_bytes == 48
    assert found.matrix == {"mma": 1, "wgmma": 1}
    assert found.copies == {"cp.async": 1, "tma": 1}
    assert found.instructions == 8
    assert found.warp_products == 16 * 64 * 16 + 16 * 8 * 16
    assert found.loop_spills == 1  # what is before the loop is none


LOOP = """
.text.k:
        /*0000*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ;
        /*0010*/                   STL [R1+0x8], R3 ;
        /*0020*/               @P0 BRA `(.L_x_1) ;
.L_x_0:
        /*0030*/                   LDGSTS.E.BYPASS.128 [R7+0x4000], desc[UR14][R4.64] ;
        /*0040*/                   HGMMA.64x32x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ;
        /*0050*/                   MUFU.EX2 R3, R3 ;
        /*0060*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0070*/                   MUFU.EX2 R4, R4 ;
        /*0080*/                   LDL R3, [R1+0x8] ;
        /*0090*/              @!P0 BRA `(.L_x_0) ;
.L_x_1:
        /*00a0*/                   LDL R3, [R1+0x8] ;
.L_x_2:
        /*00b0*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ;
        /*00c0*/                   BRA.U !UP0, `(.L_x_2) ;
        /*00d0*/               @P1 BRA `(.L_x_1) ;
        /*00e0*/                   EXIT ;
.L_x_3:
        /*00f0*/                   BRA `(.L_x_3);
"""


def test_loops_in_sass() -> None:
    """Two hot loops, one of them within another, which has no matrix instruction of its own."""
    code = sass(LOOP)
    assert sorted(map(sorted, loops(code))) == [[*range(3, 10)], [*range(10, 14)], [11, 12]]
    first, second = hot(code, lambda line: "GMMA" in line)
    assert len(first) == 7
    assert len(second) == 2
    assert hidden_exponentials(first) == (1, 2)
    found = of_sass(USAGE, LOOP)
    assert (found.spills, found.loop_spills) == (3, 1)
    assert found.narrowest == 32  # 128 are outside of loops
    assert found.waiting == 1  # the second
    assert (found.hidden, found.exponentials) == (1, 2)
    assert found.warp_products == 16 * 16 * (128 + 32 + 64)


def test_branches_back_that_are_no_loop() -> None:
    """A block that was laid behind what it goes on to."""
    code = sass(LOOP.replace("`(.L_x_1) ;\n.L_x_0", "`(.L_x_9) ;\n.L_x_0"))
    assert len(loops(code)) == 3
    late = """
        /*0000*/               @P0 BRA `(.L_x_1) ;
.L_x_0:
        /*0010*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ;
        /*0020*/                   EXIT ;
.L_x_1:
        /*0030*/                   LDL R3, [R1+0x8] ;
        /*0040*/                   BRA `(.L_x_0) ;
"""
    assert loops(sass(late)) == []
    assert of_sass(USAGE, late).loop_spills == 0


TTGIR = """
    %a = ttng.warp_group_dot %x, %y, %z {inputPrecision = 0 : i32} : !ttg.memdesc<64x128xbf16, \
#shared, #smem> * !ttg.memdesc<128x32xbf16, #shared1, #smem, mutable> -> tensor<64x32xf32, #mma>
    %b:3 = ttng.warp_group_dot_wait %a, %x, %y {pendings = 0 : i32} : tensor<64x32xf32, #mma>, \
!ttg.memdesc<64x128xbf16, #shared, #smem>, !ttg.memdesc<128x32xbf16, #shared1, #smem>
    %c = tt.dot %p, %v, %acc, inputPrecision = tf32 : tensor<16x32xbf16, #ttg.dot_op<{opIdx = 0, \
parent = #mma1}>> * tensor<32x64xbf16, #ttg.dot_op<{opIdx = 1}>> -> tensor<16x64xf32, #mma1>
    %d = ttg.local_alloc : () -> !ttg.memdesc<3x64x128xbf16, #shared, #smem, mutable>
    %e = ttg.local_alloc : () -> !ttg.memdesc<2x1x1x64x128xf8E4M3FN, #shared, #smem, mutable>
    %f = ttg.local_alloc : () -> !ttg.memdesc<1x64xf32, #shared, #smem, mutable>
    %g = ttg.local_alloc %h : (tensor<64x128xbf16, #b>) -> !ttg.memdesc<64x128xbf16, #shared>
""".replace("\\\n", "")


def test_what_the_products_need() -> None:
    assert needed_products(TTGIR) == 64 * 128 * 32 + 16 * 32 * 64
    assert buffers(TTGIR) == 2
    assert buffers(TTGIR.replace("<2x1x1", "<4x1x1")) == 3
    assert (needed_products(""), buffers("")) == (0, 0)


@pytest.mark.parametrize(("usage", "code"), [("", SASS), (USAGE, "")])
def test_sass_of_a_tool_that_said_nothing(usage: str, code: str) -> None:
    with pytest.raises(RuntimeError, match="nothing of use"):
        of_sass(usage, code)


GCN = """
good:
	s_load_dwordx2 s[2:3], s[0:1], 0x0
	; v_mfma_remark
	v_mfma_f32_32x32x8_bf16_1k a[0:15], v[4:5], v[6:7], a[0:15]
	v_wmma_f32_16x16x16_bf16 v[82:89], v[49:52], v[114:117], 0
	buffer_load_dword v1, s[0:3], 0 offen lds
	buffer_load_dwordx4 v[1:4], v5, s[0:3], 0 offen
	global_load_lds_dwordx4 v[1:2], off
	s_nop 0
	s_endpgm
	.amdgpu_metadata
    .private_segment_fixed_size: 28
    .sgpr_spill_count: 9
    .vgpr_count:     132
    .vgpr_spill_count: 6
"""


def test_amdgcn() -> None:
    found = of_amdgcn(GCN)
    assert found.registers == 132
    assert found.spills == 6
    assert found.scratch_bytes == 28
    assert found.matrix == {"mfma": 1, "wmma": 1}
    assert found.copies == {"lds": 2}
    assert found.instructions == 7
    assert found.warp_products == 32 * 32 * 8 + 16 * 16 * 16
    with pytest.raises(RuntimeError, match="does not say vgpr_count"):
        of_amdgcn("")


def test_amdgcn_loops() -> None:
    """Those of the compiler's own remarks, and products of several blocks at once."""
    body = """
.LBB0_1:
	scratch_load_dword v3, off, off offset:8 ; 4-byte Folded Reload
	v_mfma_f32_4x4x4_16b_f16 a[0:3], v[4:5], v[6:7], a[0:3]
	s_cbranch_scc1 .LBB0_1
	scratch_load_dword v3, off, off offset:8 ; 4-byte Folded Reload
	s_endpgm
"""
    found = of_amdgcn(GCN.replace("	s_endpgm\n", body))
    assert found.loop_spills == 1
    assert found.waiting == 1
    assert found.warp_products == 32 * 32 * 8 + 16 * 16 * 16 + 4 * 4 * 4 * 16


# ---- cases and the table -----------------------------------------------------------------------


def test_targets_and_cases() -> None:
    """The chips of the project, cases with names of their own, a quick part on each chip."""
    assert " ".join(target.name for target in TARGETS) == (
        "sm_75 sm_80 sm_86 sm_89 sm_90a sm_100a sm_120a gfx90a gfx942 gfx950 gfx1100 gfx1201"
    )
    assert len({case.name for case in CASES}) == len(CASES)
    for target in TARGETS:
        name = target.family.name
        assert any(case.key and (not case.families or name in case.families) for case in CASES)


@pytest.mark.parametrize("pass_name", ["forward", "dkdv", "dq"])
def test_ladder(pass_name: Pass) -> None:
    """Falling sizes that fit; the longer side is of what a program owns."""
    for target in TARGETS:
        rungs = list(ladder(target.family, pass_name, 128, 2))
        areas = [blocks.queries * blocks.keys for blocks in rungs]
        assert areas == sorted(areas, reverse=True)
        assert len(set(rungs)) == len(rungs) > 5
        for blocks in rungs:
            need = shared_need(pass_name, blocks, 2, 128, 128)
            assert need <= target.family.shared_bytes
            sides = (blocks.queries, blocks.keys)
            assert sides == tuple(sorted(sides, reverse=pass_name != "dkdv"))


def test_table() -> None:
    broken = Record("sm_80", "other", "k", {}, 0, 0, error="RuntimeError: no")
    text = table(AMPERE, [(GOOD, []), (broken, ["RuntimeError: no"])])
    head, names, good, bad = text.splitlines()
    assert head == "sm_80"
    assert " ".join(names.split()) == (
        "case kernel tile regs spill in loops shared KB matrix issued n async buffers hidden exp2 "
        "instr s verdict"
    )
    assert " ".join(good.split()) == (
        "c k BM=64 w4 s2 100 0 0 4.0/163 32 mma - - 8 cp.async - - 1000 1.0 ok"
    )
    assert bad.endswith("FAIL: RuntimeError: no")


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--targets", "sm_80,sm_1"])
    assert "no sm_1; there are sm_75, sm_80" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--jobs", "0"])


def test_imports_no_triton() -> None:
    """Neither the gate nor the lists of cases do: the children must come first."""
    code = (
        "import sys, tilelab.gate.__main__ as gate; "
        f"gate.cases_of(gate.DEFAULT_CASES); gate.cases_of({OWN!r}); "
        "sys.exit('triton' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=environment("unused"))


def test_without_triton(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tilelab.gate.__main__.find_spec", lambda name: None)
    assert main([]) == 2
    assert capsys.readouterr().err == "gate: Triton is not installed\n"


# ---- compiling ---------------------------------------------------------------------------------


@needs_triton
@pytest.mark.slow
def test_the_gate_sees(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A good kernel passes; each bad one fails with its own reason; the JSON has all of them."""
    file = tmp_path / "made" / "records.json"
    status, said = gate(capsys, "--targets", "sm_80", "--json", str(file))
    assert status == 1
    failed = [line for line in said.splitlines() if line.startswith("FAIL ")]
    expected = [
        ("spills / good", "spills are in loops"),
        ("shared / good", "262144 bytes of shared memory, the chip has 166912"),
        ("by hand / by_hand", "no matrix instruction"),
        ("broken / broken", "CompileTimeAssertionFailure: broken on purpose"),
        ("twice / by_hand", "no matrix instruction"),
        ("twice / by_hand 2", "no matrix instruction"),
        ("crash / -", "the compiler died of SIGSEGV"),
        ("unmade / -", "ValueError: nothing to launch on sm_80"),
    ]
    assert len(failed) == len(expected)
    for line, (key, reason) in zip(failed, expected, strict=True):
        assert line.startswith(f"FAIL sm_80 {key}: ")
        assert reason in line
    records = [Record(**each) for each in json.loads(file.read_text())]
    assert len(records) == len(expected) + 3
    good = records[0]
    assert good.matrix["mma"] == 32
    assert good.copies["cp.async"] > 0
    assert good.shared_bytes == 32768
    assert 40 < good.registers < 256
    assert not faults(good, cases_of(OWN)["good"], AMPERE, None)


@needs_triton
@pytest.mark.slow
def test_a_product_that_is_done_twice() -> None:
    """Chained products of 64 rows: eight warps do them twice, four do not; one stage waits."""
    twice, once, waiting = compiled("sm_90a", "chain of 8", "chain of 4", "chain of one stage")
    said = [faults(each, KEY, HOPPER, None) for each in (twice, once, waiting)]
    assert any(line.startswith("matrix instructions do 1.50 times") for line in said[0])
    assert any(line.startswith("a wgmma of 32 columns") for line in said[0])
    assert said[1] == []
    assert (once.issued, once.narrowest, once.waiting) == (1.0, 64, 0)
    assert said[2] == [
        "1 loops without an asynchronous copy",
        "0 buffers for a tile that a loop copies, 2 are due",
    ]


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("target", [target.name for target in TARGETS if not target.why_not])
def test_every_chip(target: str) -> None:
    """A product is good on every chip; where code is larger than before, it fails."""
    (record,) = compiled(target, "good")
    case, chip = cases_of(OWN)["good"], target_named(target)
    assert faults(record, case, chip, None) == []
    assert record.matrix.keys() == {chip.family.unit}
    small = Entry(record.registers * 2, record.instructions // 2, record.choice)
    (words,) = faults(record, case, chip, small)
    assert words.startswith("instructions")


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("target", [target.name for target in TARGETS])
def test_the_whole_gate(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every kernel for every chip is good; some minutes each."""
    status = main(["--targets", target, "--jobs", "1"])
    assert status == 0, capsys.readouterr().out


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "gfx942", "gfx1100"])
def test_functions_of_the_catalogue_compile(target: str) -> None:
    records = compiled(target, *variant_cases.NAMES, module=variant_cases.__name__)
    assert {each.case for each in records} == set(variant_cases.NAMES)
    assert {each.error for each in records} == {""}


@needs_triton
@pytest.mark.slow
def test_a_crash_costs_only_its_case() -> None:
    crash, hang, good = compiled("gfx942", "crash", "hang", "good", limit_s=8)
    assert crash.error.startswith("the compiler died of SIGSEGV")
    assert hang.error == "not compiled in 8 s"
    assert hang.kernel == "sleeper"
    assert good.matrix["mfma"] > 0


@needs_triton
@pytest.mark.slow
def test_baseline_of_a_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Stored, held to, and failed when the file says that it was less."""
    chosen = ("--quick", "--targets", "gfx942,sm_75", "--baselines", str(tmp_path))
    status, said = gate(capsys, *chosen)
    assert status == 0
    assert "1 kernels have no baseline" in said
    assert "left out: Triton makes no matrix instructions" in said
    assert gate(capsys, *chosen, "--store")[0] == 0
    (file,) = tmp_path.iterdir()
    status, said = gate(capsys, *chosen)
    assert status == 0
    assert "no baseline" not in said
    content = json.loads(file.read_text())
    content["gfx942"]["good / good"][0] //= 2
    file.write_text(json.dumps(content))
    status, said = gate(capsys, *chosen)
    assert status == 1
    assert "FAIL gfx942 good / good: registers" in said


@needs_triton
@pytest.mark.slow
def test_signature() -> None:
    """Types, constants and divisibility as Triton itself sees them in a launch."""
    code = """
import json, torch
from tests.kernels.gpu.gate_kernels import many_kinds
from tilelab.gate.compiling import signature
from tilelab.gate.record import target_named
from tilewise.kernels.gpu import Launch
whole = torch.empty(64, dtype=torch.bfloat16, device="meta")
given = dict(tensor=whole, number=48, one=1, tuples=((whole[1:], whole[8:]), 3, 1), floating=0.5,
             nothing=None, flag=True)
source, options = signature(Launch(many_kinds, (1,), given, {"FUNCTION": 7}, 8, 3),
                            target_named("sm_90a"))
divisible = [k for k, v in source.attrs.items() if ["tt.divisibility", 16] in v]
print(json.dumps([source.signature, sorted(map(str, source.constants.items())),
                  sorted(map(str, divisible)), options["num_warps"], options["num_stages"]]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment("unused")
    )
    assert done.returncode == 0, done.stderr
    types, constants, divisible, warps, stages = json.loads(done.stdout)
    assert types == {
        "tensor": "*bf16",
        "number": "i32",
        "one": "constexpr",
        "tuples": [["*bf16", "*bf16"], "i32", "constexpr"],
        "floating": "fp32",
        "nothing": "constexpr",
        "flag": "u1",
        "FUNCTION": "constexpr",
    }
    assert constants == ["((2,), 1)", "((3, 2), 1)", "((5,), None)", "((7,), 7)"]
    assert divisible == ["(0,)", "(1,)", "(3, 0, 1)"]
    assert (warps, stages) == (8, 3)
