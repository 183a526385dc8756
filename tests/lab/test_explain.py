"""``tilewise explain``: what it reads, what it prints, and the page."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from textwrap import dedent
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import tilewise
from tests.blocks import TEXTS
from tests.conftest import SHARED_DATA
from tilewise import cli
from tilewise.chips import CHIPS, row_of
from tilewise.commands.explain import DTYPES, room
from tilewise.engine.explanation import mask_formula, score_formula
from tilewise.errors import InvalidArgument
from tilewise.inspect.known_models import KNOWN_MODELS, known_model
from tilewise.plan.traffic import visits
from tilewise.plan.traffic.report import amount, duration
from tilewise.variants import masks

H200 = [
    *("--shape", "1x32x8192x128", "--kv-heads", "8"),
    *("--dtype", "bf16", "--mask", "causal", "--chip", "h200"),
]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert cli.main(["explain", *argv]) == 0
    return capsys.readouterr().out


def test_a_chip_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, *H200)
    for part in (
        "backend   gpu",
        "tiles     128 query rows x 128 keys",
        "dense, bfloat16 on cuda, batch 1, heads 32, kv_heads 8",
        "mask      causal",
        "NVIDIA H200 SXM: 4.8 TB/s, 989 TFLOP/s in bfloat16, ridge at 206 FLOP/B",
        "bound by matrix products",
        "right of the ridge",
        "times less",
        "not cpu:",
    ):
        assert part in text, part
    assert re.search(r"forward +171 MB to memory \(tiles move 4\.5 GB\), plain 26\.3 GB", text)


def test_the_pages_show_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    shown = re.findall(
        r"^    \$ tilewise (explain .*)\n((?:    .*\n)+)", "".join(TEXTS.values()), re.M
    )
    assert len(shown) == 2
    for command, lines in shown:
        assert cli.main(shlex.split(command)) == 0
        text = capsys.readouterr().out
        parts = [dedent(part).strip("\n") for part in re.split(r"^    \.\.\.\n", lines, flags=re.M)]
        assert [part for part in parts if part not in text] == []


def test_the_old_form_still_works(capsys: pytest.CaptureFixture[str]) -> None:
    old = run(capsys, "1", "4", "64", "16", "--kv-heads", "2", "--window", "5")
    new = run(capsys, "--shape", "1x4x64x16", "--kv-heads", "2", "--mask", "window:5")
    word = run(capsys, "1x4x64x16", "--kv-heads", "2", "--mask", "window:5")
    assert old == new == word
    assert "mask      window:5" in old


@pytest.mark.parametrize("name", sorted(CHIPS))
def test_every_chip(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "--shape", "2x8x512x64", "--dtype", "fp16", "--chip", name)
    assert CHIPS[name].name in text
    assert "bound by" in text or "memory-bound" in text


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ((), "shape: got no sizes"),
        (("--shape", "1x2x3x4", "--model", "gpt2"), "more than one"),
        (("--shape", "1x2x3"), "four sizes"),
        (("--shape", "1x2xthreex4"), "four sizes"),
        (("1", "2", "three", "4"), "four sizes"),
        (("--model", "gpt5"), "llama-3-8b"),
        (("1", "2", "3", "4", "--mask", "diagonal"), "causal+window:N"),
        (("1", "2", "3", "4", "--mask", "window"), "Give a number of keys: window:256."),
        (("1", "2", "3", "4", "--chip", "h300"), "h200"),
        (("1", "2", "3", "4", "--fit", "lots"), "24GB"),
        (("1", "2", "3", "4", "--chip", "h200", "--backend", "cpu"), "backend"),
        (("1", "2", "3", "4", "--chip", "h200", "--dtype", "float64"), "float64"),
        (("1", "2", "3", "1024", "--chip", "h200"), "limit of 512"),
        (("1", "3", "8", "4", "--kv-heads", "2"), "divides"),
    ],
)
def test_mistakes_are_named(
    argv: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", *argv]) == 1
    error = capsys.readouterr().err
    assert error.startswith("tilewise explain: ")
    assert says in error


def test_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "--model", "Gemma-2-9b", "--chip", "h100", "--dtype", "bf16")
    assert "gemma-2-9b, 42 layers: Lightning-AI/litgpt" in text
    assert "21 of the layers see 4095 keys back" in text
    assert "softcap(50" in text
    assert "heads 16, kv_heads 8, queries 8192, keys 8192, head_dim 256" in text
    windowed = run(capsys, "--model", "mistral-7b", "--queries", "100", "--batch", "3")
    assert "mask      causal+window:4095" in windowed
    assert "batch 3, heads 32, kv_heads 8, queries 100" in windowed


@pytest.mark.parametrize(
    ("argv", "dtype", "why"),
    [
        (("--model", "llama-3-8b"), "bfloat16", "as the model is usually run"),
        (("--model", "llama-3-8b", "--chip", "t4"), "float16", "NVIDIA T4 multiplies no bfloat16"),
        (("--model", "gpt2"), "float32", "as the model is usually run"),
        (("--model", "gpt2", "--chip", "h100"), "bfloat16", "on a GPU"),
        (("--model", "whisper-large-v3", "--chip", "h100"), "float16", "as the model"),
        (("1", "2", "64", "32"), "float32", "on a processor"),
        (("1", "2", "64", "32", "--chip", "graviton3"), "float32", "on a processor"),
        (("1", "2", "64", "32", "--chip", "a100"), "bfloat16", "on a GPU"),
    ],
)
def test_a_dtype_that_nobody_asked_for_is_said(
    argv: tuple[str, ...], dtype: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = run(capsys, *argv, "--queries", "64")
    assert re.search(rf"dtype +{dtype}: .*{why}", text), text
    assert f"dense, {dtype} on " in text
    asked = run(capsys, *argv, "--queries", "64", "--dtype", dtype)
    assert "dtype " not in asked
    assert asked in text or set(asked.splitlines()) < set(text.splitlines())


def test_eight_bits(capsys: pytest.CaptureFixture[str]) -> None:
    """A chip without products of float8 multiplies float16; plain attention bfloat16."""
    asked = ("--shape", "1x32x8192x128", "--dtype", "fp8", "--fit", "24GB", "--chip")
    hopper, ampere = (run(capsys, *asked, chip) for chip in ("h100", "a100"))
    assert "1.98 PFLOP/s in float8_e4m3fn" in hopper
    assert "312 TFLOP/s in float16" in ampere
    for text in (hopper, ampere):
        assert "bound by" in text
        assert "inference: largest batch" in text
        assert "training" not in text
        assert "backward" not in text


def test_the_models_are_those_of_the_public_configurations() -> None:
    path = SHARED_DATA / "shapes" / "attention_shapes.json"
    if not path.exists():
        pytest.skip("needs the shared data sets")
    public = {}
    for model in json.loads(path.read_text())["models"]:
        public[model["model"].lower()] = model
    renamed = {
        "bert-base": "bert-base-uncased",
        "bert-large": "bert-large-uncased",
        "mistral-7b": "mistral-7b-v0.1",
        "vit-base-224": "vit_base_patch16_224",
        "vit-large-384": "vit_large_patch16_384",
        "whisper-tiny": "whisper-tiny/encoder",
        "whisper-large-v3": "whisper-large-v3/encoder",
        "whisper-large-v3-decoder": "whisper-large-v3/decoder-self",
        "sd1.5-64x64": "sd1.5-unet/self-4096",
        "sd1.5-32x32": "sd1.5-unet/self-1024",
    }
    for name, ours in KNOWN_MODELS.items():
        theirs = public[renamed.get(name, name)]
        assert ours.heads == theirs["heads"], name
        assert ours.kv_heads == theirs["kv_heads"], name
        assert ours.head_dim == theirs["head_dim"] == theirs["head_dim_v"], name
        assert ours.causal == theirs["causal"], name
        assert ours.length == theirs["max_seq"], name
        assert ours.softcap == theirs["softcap"], name
        assert ours.window == theirs["window_left"], name
        assert ours.windowed == sum(theirs["window_layers"] or ()), name
        assert theirs["layers"] in (ours.layers, None), name


def test_every_model_has_a_source() -> None:
    assert len(KNOWN_MODELS) >= 20
    assert all(model.source for model in KNOWN_MODELS.values())
    assert all(model.dtype in DTYPES for model in KNOWN_MODELS.values())
    with pytest.raises(InvalidArgument, match="--shape"):
        known_model("nothing")


def test_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, *H200, "--fit", "24GB")
    assert "into 24 GB, one layer's attention alone" in text
    assert re.search(r"training: largest batch 70, plain 1 \(70 times\)", text)
    assert re.search(r"inference: longest sequence \d+, plain \d+", text)
    model = run(capsys, "--model", "gpt2", "--fit", "16GiB", "--dtype", "bf16")
    assert "12 layers' attention alone" in model


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GB", 24 * 10**9), ("16GiB", 2**34), ("1.5g", 15 * 10**8), ("512", 512), ("80 GB", 8e10)],
)
def test_memories(text: str, size: int) -> None:
    assert room(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-3GB", "3XB", "3iB", "1e9"])
def test_what_is_no_memory(text: str) -> None:
    with pytest.raises(InvalidArgument, match="16GiB"):
        room(text)


def test_the_page_is_whole_and_loads_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "page.html"
    text = run(capsys, *H200, "--html", str(path))
    assert str(path) in text
    page = path.read_text()
    assert page.count("<svg") == 2
    assert page.count('role="img"') == 2
    assert "Roofline of NVIDIA H200" in page
    assert not re.search(r"(src|href)=\"(?!#|data:)", page.replace('xlink:href="#', ""))
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(svg)
    again = tmp_path / "again.html"
    run(capsys, *H200, "--html", str(again))
    assert again.read_text() == page


def test_the_page_leads_with_the_ratio_of_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "page.html"
    text = run(capsys, *H200, "--html", str(path))
    ours, plain = re.search(r"([\d.]+) us \(lower bound\), plain ([\d.]+) ms", text).groups()  # type: ignore[union-attr]
    found = re.search(r"<h1>([\d.]+)x faster than plain attention</h1>", path.read_text())
    assert found is not None
    assert float(found[1]) == pytest.approx(float(plain) * 1e3 / float(ours), rel=0.01)


def test_a_page_that_cannot_be_written_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "page.html", tmp_path / "absent" / "page.html", tmp_path):
        assert cli.main(["explain", "1", "4", "64", "16", "--html", str(path)]) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"tilewise explain: --html: got {path} (")
        assert error.count("\n") == 1


def test_a_time_is_said_to_be_a_lower_bound(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "--shape", "1x32x8192x128", "--chip", "h100", "--causal")
    assert "564 us (lower bound), plain 7.81 ms (lower bound)" in text
    assert "at most 989 TFLOP/s" in text
    assert "mask      causal\n" in text


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        ("", ""),
        ("band(-1,0,1)", "causal"),
        ("band(4,0,1) below()[0] and", "causal+window:4 & below(t0)"),
        ("band(3,3,1)", "window:3"),
        ("band(-1,0,0)", "n - m <= 0"),
        ("band(3,-1,1)", "m + N - M - n <= 3"),
        ("band(2,1,1)", "(m + N - M - n <= 2) & (n - (m + N - M) <= 1)"),
        ("band(-1,-1,1)", "every pair"),
        ("band(-1,0,1) dense(1,0,3)[0] or not", "~(causal | dense(t0[b, n]))"),
        ("band(-1,0,1) tiles(64,128,0,0,9,9,0)[0]", "causal, with a table of tiles of 64 x 128"),
    ],
)
def test_a_mask_is_said_as_a_formula(mask: str, said: str) -> None:
    assert mask_formula(mask) == said


def test_functions_are_said_as_formulas() -> None:
    x, table = torch.zeros(1, 2, 64, 16), torch.zeros(2, 128)

    def thirds(b: Any, h: Any, m: Any, n: Any) -> Any:
        return (m - (n + 2) >= 0) & ((m - n) % 3 == 0) | ~((m < 4) & (n == 0))

    def score(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        return tilewise.where(m > n, s * -0.5 - (m - (n - 1)), torch.tanh(s)) + table[h, m - n + 63]

    text = str(tilewise.explain(x, x, x, mask=thirds, score=score)).splitlines()
    said = {line.split()[0]: line[10:] for line in text}
    assert said["mask"] == "(0 <= m - (n + 2)) & ((m - n) % 3 == 0) | ~((m < 4) & (n == 0))"
    chosen = "where(n < m, s * -0.5 - float(m - (n - 1)), tanh(s))"
    assert said["score"] == f"{chosen} + t0[h, m - n + 63]"


def test_a_formula_ends_where_a_graph_uses_values_again_and_again() -> None:
    squares = "s" + "".join(f";mul({place},{place})" for place in range(60))
    assert len(score_formula(f"expr{{{squares}}}")) < 500


def test_a_page_without_ceilings_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "nothing"))
    path = tmp_path / "page.html"
    text = run(capsys, "1", "4", "64", "16", "--html", str(path))
    assert "no time is predicted" in text
    assert "doctor --peak" in path.read_text()
    assert path.read_text().count("<svg") == 1


def test_explain_in_python() -> None:
    x = torch.zeros(1, 2, 300, 16, dtype=torch.bfloat16)
    found = tilewise.explain(x, x, x, mask=masks.causal(), chip="graviton3")
    assert found.chip == CHIPS["graviton3"]
    assert found.account is not None
    assert found.account.seconds(found.account.forward.ours, CHIPS["graviton3"]).total > 0
    assert "Graviton3" in str(found)
    with pytest.raises(InvalidArgument, match="a gpu, for tensors on cpu"):
        tilewise.explain(x, x, x, chip="h200")
    with pytest.raises(InvalidArgument, match="chip"):
        tilewise.explain(x, x, x, chip="abacus")


def test_decoding_on_a_chip_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    """One query a sequence is as fast as its keys can be read."""
    decode = ("--queries", "1", "--keys", "8192", "--batch", "64", "--chip", "h200")
    text = run(capsys, "--model", "llama-3-8b", "--dtype", "bf16", *decode)
    assert "32 splits" in text
    keys = 64 * 8 * 8192 * 128 * 2 * 2
    forward = re.search(r"forward +([\d.]+) GB to memory", text)
    assert forward is not None
    assert float(forward[1]) == pytest.approx(keys / 1e9, rel=0.05)
    assert "memory-bound" in text


def test_explain_of_pages() -> None:
    q, pages = torch.zeros(2, 4, 1, 16), torch.zeros(8, 2, 16, 16)
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    lengths = torch.tensor([5, 60], dtype=torch.int32)
    found = tilewise.explain(
        q, pages, pages, block_table=table, key_lengths=lengths, backend="tiled"
    )
    assert found.account is not None
    assert found.account.visits.all_pairs == 4 * 65
    assert found.account.forward.plain.exponentials == 4 * 65
    assert found.account.backward.ours.bytes == 0
    table_bytes = {each.name: each.read for each in found.account.forward.ours.operands}
    assert table_bytes["block_table"] == 4 * 4 * (1 + 4)
    assert "pages     of 16 keys" in str(found)
    assert "backward" not in str(found)


def test_explain_takes_captured_tensors_and_tables_into_account() -> None:
    x = torch.zeros(2, 2, 256, 16)
    ids = torch.arange(256) // 64
    plain = tilewise.explain(x, x, x, mask=masks.document(ids))
    table = tilewise.BlockMask.of(masks.document(ids), 256, 256)
    tabled = tilewise.explain(x, x, x, mask=table)
    assert plain.account is not None
    assert tabled.account is not None
    assert plain.account.visits.pairs == tabled.account.visits.pairs == 2 * 2 * 4 * 64 * 128
    assert "density" in str(tabled)


def test_explain_says_what_it_cannot_account_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visits, "MOST_TILES", 1)
    x = torch.zeros(1, 2, 300, 16)
    found = tilewise.explain(x, x, x, mask=masks.document(torch.zeros(300, dtype=torch.int64)))
    assert found.account is None
    assert "not predicted" in str(found)
    assert "BlockMask.of" in str(found)


@pytest.mark.parametrize(
    ("name", "memory", "key"),
    [
        ("NVIDIA H200", 141, "h200"),
        ("NVIDIA A100-SXM4-80GB", 80, "a100"),
        ("NVIDIA A100-SXM4-40GB", 40, "a100-40gb"),
        ("NVIDIA GeForce RTX 4090", 24, "rtx4090"),
        ("Tesla T4", 16, "t4"),
        ("AMD Instinct MI300X", 192, "mi300x"),
        ("NVIDIA GeForce GTX 1080", 8, None),
    ],
)
def test_rows_by_the_driver_s_name(name: str, memory: int, key: str | None) -> None:
    assert row_of(name, memory * 10**9) == (None if key is None else CHIPS[key])


def test_words() -> None:
    assert [amount(x) for x in (0, 999, 1000, 1234567, 26.34e9, 1e18)] == [
        "0 B",
        "999 B",
        "1 kB",
        "1.23 MB",
        "26.3 GB",
        "1e+03 PB",
    ]
    assert [duration(x) for x in (2, 0.5, 1e-3, 2.5e-7)] == ["2 s", "500 ms", "1 ms", "0.25 us"]
