"""The table of blocks, and what the GPU backend says where there is no GPU or no Triton."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from tilewise import masks, scores
from tilewise.kernels.gpu import backend as gpu
from tilewise.kernels.gpu import config
from tilewise.kernels.gpu.config import FAMILIES, Blocks, Config, Pass, shared_need, tiles_for
from tilewise.problem import Problem
from tilewise.validation import dense_problem

PASSES: tuple[Pass, ...] = ("forward", "dkdv", "dq", "decode")
WIDTHS = (1, 16, 40, 64, 65, 128, 200, 256, 300, 512)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


def _problem(**changed: Any) -> Problem:
    q = torch.empty(1, 2, 8, 64, dtype=torch.bfloat16)
    problem = dense_problem(q, q, q, mask=(), score=(), scale=None, dropout_p=0.0, sinks=None)
    return problem._replace(**changed)


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_fit_for_every_width(family: str, name: Pass) -> None:
    """Powers of two of at least 16, within the shared memory of the chip."""
    for dtype in DTYPES:
        for head_dim in WIDTHS:
            for value_dim in (head_dim, 512):
                for variant in (False, True):
                    blocks = tiles_for(family, name, dtype, head_dim, value_dim, variant)
                    need = shared_need(name, blocks, dtype.itemsize, head_dim, value_dim)
                    least = blocks.queries == blocks.keys == 16 and blocks.stages == 1
                    assert need <= FAMILIES[family].shared_bytes or least
                    for size in blocks[:3]:
                        assert size & (size - 1) == 0
                    assert min(blocks[:2]) >= 16


def test_where_products_are_summed_in_parts() -> None:
    """By family, pass, dtype and the wider of D and Dv, padded; never in pages or 8 bits."""

    def part(family: str, name: Pass, width: int, dtype: torch.dtype = torch.bfloat16) -> int:
        problem = _problem(head_dim=16, value_dim=width, dtype=dtype)
        return config.config_for(family).part(name, problem)

    assert [part("gfx1100", "dkdv", width) for width in (64, 65, 512)] == [0, 16, 16]
    assert [part("gfx1100", "dq", width) for width in (64, 65)] == [0, 16]
    assert [part("gfx1201", "dkdv", width) for width in (128, 129)] == [0, 16]
    assert [part("gfx1201", "dq", width) for width in (128, 129)] == [0, 16]
    assert [part("gfx1100", "forward", width) for width in (128, 129)] == [0, 16]
    assert [part("gfx1201", "forward", width) for width in (256, 512)] == [0, 0]
    assert [part("gfx950", "dkdv", width) for width in (256, 257)] == [0, 32]
    for family, whole, forward, some in (
        ("gfx1100", 32, 32, 16),
        ("gfx1201", 32, 32, 16),
        ("gfx950", 256, 512, 32),
    ):
        most = {"forward": forward, "dkdv": whole, "dq": whole, "decode": 512}
        for name in PASSES:
            assert part(family, name, most[name], torch.float32) == 0
            wider = part(family, name, min(most[name] + 1, 512), torch.float32)
            assert wider == (some if most[name] < 512 else 0)
    wide = _problem(head_dim=512, value_dim=512)
    for other in (wide._replace(page_size=16), wide._replace(dtype=torch.float8_e4m3fn)):
        assert config.config_for("gfx1100").part("forward", other) == 0
    others = [name for name, chip in FAMILIES.items() if chip.parts is None]
    assert {"sm_90", "gfx942", "interpreter"} < set(others)
    for family in others:
        assert not any(part(family, name, 512, dtype) for name in PASSES for dtype in DTYPES)


def test_a_width_is_declined_where_no_block_of_it_fits() -> None:
    """The smallest blocks of dK and dV hold 16 rows of four operands: 128 KiB at 512 floats."""
    small = {name for name, chip in FAMILIES.items() if chip.shared_bytes < 128 * 1024}
    assert {"sm_86", "sm_120", "gfx942"} < small
    for name in FAMILIES:
        assert config.holds(name, torch.float32, 512, 512) == (name not in small), name
        assert config.holds(name, torch.float32, 256, 256)
        assert config.holds(name, torch.bfloat16, 512, 512)


def test_an_error_names_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_interprets", lambda: False)
    monkeypatch.setattr(gpu, "_family", lambda device: "sm_86")
    wide = _problem(device="cuda", head_dim=300, value_dim=512)
    backend = gpu.GpuBackend()
    assert backend.why_not(wide) == []
    (reason,) = backend.why_not(wide._replace(dtype=torch.float32))
    assert reason == (
        "the shared memory of this chip is too small for D = 300 and Dv = 512 in torch.float32; "
        "16-bit operands or smaller widths fit"
    )


@pytest.mark.parametrize(("family", "own"), [("sm_80", True), ("sm_90", True), ("gfx942", False)])
def test_float32_has_rows_of_its_own(family: str, own: bool) -> None:
    """Those of the family where there are any, else those of all."""
    table = FAMILIES[family].table
    assert ((f"{table}:single", "forward") in config._TABLE) == own
    row = config._TABLE[f"{table}:single" if own else "single", "forward"]
    assert tiles_for(family, "forward", torch.float32, 64, 64, False) == row[0]


def test_columns_that_are_padded_need_registers() -> None:
    """D = 40 is held as 64, of which 24 are hidden: it takes the blocks of a heavy call."""
    plain, padded = (tiles_for("sm_100", "forward", torch.float16, d, d, False) for d in (64, 40))
    assert plain.queries * plain.keys > padded.queries * padded.keys
    assert padded == tiles_for("sm_100", "forward", torch.float16, 64, 64, True)


def test_stages_go_before_blocks_shrink() -> None:
    """What does not fit loses its pipeline first, and then its longer side."""
    roomy, tight = (
        config._fitting(Blocks(64, 128, 4, 4), "forward", FAMILIES[name], 2, 128, 128)
        for name in ("sm_90", "sm_75")
    )
    assert roomy == Blocks(64, 128, 4, 3)
    assert tight == Blocks(64, 64, 4, 1)


def test_a_variant_that_needs_registers_has_smaller_blocks() -> None:
    """Bands do not; documents, scores, dropout and packed sequences do."""
    chip, wide = Config("sm_100"), {"head_dim": 64, "value_dim": 64}
    plain = chip.blocks("forward", _problem(**wide))
    assert plain.keys == 128
    band = masks.causal().program
    assert chip.blocks("forward", _problem(mask=band, **wide)) == plain
    heavy: tuple[dict[str, Any], ...] = (
        {"mask": (~masks.causal()).program},
        {"score": scores.softcap(2.0).program},
        {"dropout_p": 0.5},
        {"layout": "varlen"},
    )
    for changed in heavy:
        assert chip.blocks("forward", _problem(**changed, **wide)).keys < plain.keys, changed


def test_rows_that_share_a_list_have_fewer_keys_where_they_lost_registers() -> None:
    """A problem that needs registers, and has fewer warps than the pass has elsewhere."""

    def keys(width: int, warps: int) -> int:
        chip = Config("sm_90", overrides=(("dq", Blocks(64, 64, warps, 2)),))
        found = config.listed_blocks(chip, "dq", _problem(head_dim=width, value_dim=width))
        assert found._replace(keys=64) == Blocks(16, 64, 4, 3)
        return found.keys

    assert [keys(256, 8), keys(256, 4), keys(64, 8), keys(64, 4)] == [32, 64, 64, 64]


def test_overrides_stand_before_the_table() -> None:
    """For the passes that they name."""
    mine = Blocks(16, 64, 2, 1)
    chip = Config("sm_80", overrides=(("dq", mine),))
    assert chip.blocks("dq", _problem()) == mine
    assert chip.blocks("forward", _problem()) == Config("sm_80").blocks("forward", _problem())


def test_a_split_depends_on_the_keys_alone() -> None:
    """Short sequences have short splits, long ones no more than so many; none is empty."""
    splitting = Config("sm_90").splitting()
    counts = {n: splitting.splits(n) for n in (0, 1, 256, 257, 8192, 16384, 16385, 32768, 2**20)}
    assert counts == {0: 1, 1: 1, 256: 1, 257: 2, 8192: 32, 16384: 64, 16385: 33, 32768: 64,
                      2**20: 64}  # fmt: skip
    for keys in (*range(1, 70000, 997), 2**24 - 1):
        splits = splitting.splits(keys)
        size = splitting.least * -(-keys // (splitting.least * splitting.most))
        assert (splits - 1) * size < keys <= splits * size
    most = [max(splitting.splits(n) for n in range(keys + 1)) for keys in range(0, 20000, 1999)]
    assert most == [splitting.splits_within(keys) for keys in range(0, 20000, 1999)]


def test_a_split_is_whole_blocks_of_keys() -> None:
    """In every family, width and dtype; the rows of a block are as many in all of them."""
    for family in FAMILIES:
        least = Config(family).splitting().least
        for dtype in DTYPES:
            for width in WIDTHS:
                for heavy, scattered in ((False, False), (True, False), (True, True)):
                    blocks = tiles_for(family, "decode", dtype, width, width, heavy, scattered)
                    assert blocks.queries == 16
                    assert least % blocks.keys == 0


@pytest.mark.parametrize(
    ("capability", "family"),
    [(70, None), (75, "sm_75"), (80, "sm_80"), (87, "sm_86"), (89, "sm_89"), (90, "sm_90"),
     (100, "sm_100"), (103, "sm_100"), (110, None), (120, "sm_120"), (121, "sm_120")],
)  # fmt: skip
def test_chips_run_the_blocks_of_an_older_one_of_their_kind(
    capability: int, family: str | None
) -> None:
    """And are declined where there is none."""
    assert config._cuda_family(capability) == family


def test_absence_and_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, without Triton, with either in the wrong place."""
    backend = gpu.GpuBackend()
    for name in ("_interprets", "_has_triton"):
        monkeypatch.setattr(gpu, name, lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert backend.absence() == "torch sees no GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "Triton is not installed" in str(backend.absence())
    monkeypatch.setattr(gpu, "_has_triton", lambda: True)
    assert backend.absence() is None
    assert backend.why_not(_problem()) == ["it computes on cuda; the tensors are on cpu"]
    with monkeypatch.context() as interpreting:
        interpreting.setattr(gpu, "_interprets", lambda: True)
        assert backend.why_not(_problem(dtype=torch.float16)) == []
        (reason,) = backend.why_not(_problem())
        assert "products of bfloat16 wrong" in reason
    monkeypatch.setattr(gpu, "_family", lambda device: None)
    assert backend.why_not(_problem(device="cuda")) == ["it has no blocks for this chip"]
    monkeypatch.setattr(gpu, "_family", lambda device: "sm_90")
    monkeypatch.setattr(gpu, "_chip", lambda device: "")
    assert backend.why_not(_problem(device="cuda")) == []
    long = _problem(device="cuda", keys=2**24 + 1)
    assert backend.why_not(long) == []
    assert "over its limit of 16777216" in str(
        backend.why_not(long._replace(mask=masks.causal().program))
    )
    assert backend.tiles(_problem(device="cuda", queries=64)).key_tile == 64


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sizes", [{"queries": 64}, {"queries": 1}, {"page_size": 4}])
def test_the_dtype_of_products_is_that_of_the_kernels(family: str, sizes: dict[str, int]) -> None:
    """``loops`` may not load Triton: it says for itself what ``fp8_products`` decides."""
    pytest.importorskip("triton")
    from tilewise.kernels.gpu.walk.float8 import fp8_products

    backend, problem = gpu.GpuBackend(), _problem(dtype=torch.float8_e4m3fn, **sizes)
    fp8 = fp8_products(problem, family, whole_walk=not config.decodes(problem))
    expected = "float16" if fp8 in ("halves", "casts") else ""
    assert backend.loops(problem, family).products == expected
    assert backend.loops(problem._replace(dtype=torch.float16), family).products == ""


_SETTINGS = {
    "torch's own": ("", "ieee"),
    "the old flag": ("matmul.allow_tf32 = True", "tf32"),
    "the old function": ("torch.set_float32_matmul_precision('high')", "tf32"),
    "its least": ("torch.set_float32_matmul_precision('medium')", "tf32"),
    "the new one": ("matmul.fp32_precision = 'tf32'", "tf32"),
    "the new one, off": ("matmul.fp32_precision = 'ieee'", "ieee"),
    "of everything": ("torch.backends.fp32_precision = 'tf32'", "tf32"),
    "of everything, off": ("torch.backends.fp32_precision = 'ieee'", "ieee"),
    "inherited": (
        "torch.backends.fp32_precision = 'tf32'; matmul.fp32_precision = 'none'",
        "tf32",
    ),
    "of everything but this": (
        "torch.backends.fp32_precision = 'tf32'; matmul.fp32_precision = 'ieee'",
        "ieee",
    ),
    "of all of CUDA": ("torch.backends.cudnn.fp32_precision = 'tf32'", "tf32"),
    # Of mixed settings torch goes by the last one; reading an old one raises.
    "on, then off": ("matmul.allow_tf32 = True; matmul.fp32_precision = 'ieee'", "ieee"),
    "off, then on": ("matmul.allow_tf32 = False; matmul.fp32_precision = 'tf32'", "tf32"),
}


def test_tf32_by_any_of_torch_s_settings() -> None:
    """Each in a process of its own: torch's settings cannot all be put back."""
    program = (
        "import os, torch\n"
        "from tilewise.kernels.gpu.config import config_for\n"
        "matmul = torch.backends.cuda.matmul\n"
        f"for code in {[code for code, _ in _SETTINGS.values()]!r}:\n"
        "    if os.fork() == 0:\n"
        "        exec(code)\n"
        "        chips = ('sm_90', 'sm_75', 'gfx942')\n"
        "        print(*(config_for(chip).precision for chip in chips), flush=True)\n"
        "        os._exit(0)\n"
        "    assert os.wait()[1] == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = dict(zip(_SETTINGS, done.stdout.splitlines(), strict=True))
    assert found == {name: f"{word} ieee ieee" for name, (_, word) in _SETTINGS.items()}
