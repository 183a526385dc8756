"""The command line: doctor, explain, and what wrong usage says."""

from __future__ import annotations

import io
import os
import shlex
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from importlib.metadata import version
from pathlib import Path

import pytest

import tilewise
from tests.conftest import NO_CORE, available_isas, ran
from tilewise import cli, commands, doctor
from tilewise.doctor import Check, examine, openmp_runtimes, report

MAPS = """\
7f00-7f01 r-xp 00000000 08:01 1 /usr/lib/libc.so.6
7f01-7f02 r-xp 00000000 08:01 2 /venv/torch/lib/libgomp-a34b.so.1
7f02-7f03 r--p 00000000 08:01 2 /venv/torch/lib/libgomp-a34b.so.1
7f03-7f04 rw-p 00000000 00:00 0
7f04-7f05 r-xp 00000000 08:01 3 /a folder/libomp.so (deleted)
"""


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for command in ("doctor", "explain", "demo", "bench", "study", "tune"):
        assert command in text


@pytest.mark.parametrize("command", ["explain", "demo", "bench", "study", "tune"])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main([command, "--help"])
    assert stopped.value.code == 0
    assert f"usage: tilewise {command}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """The package, its metadata and the command name one version."""
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"tilewise {tilewise.__version__}\n"
    assert version("tilewise") == tilewise.__version__


def test_the_package_is_the_command() -> None:
    found = ran(sys.executable, "-m", "tilewise", "--version")
    assert found.stdout == f"tilewise {tilewise.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "seen"),
    [
        (["teleport"], "unknown command 'teleport'"),
        (["doctr"], "'doctor'"),
        (["bench", "sped"], "'speed'"),
        (["bench", "nosuite"], "There are:"),
    ],
)
def test_what_was_meant_is_suggested(
    argv: list[str], seen: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        sys.exit(cli.main(argv))
    assert stopped.value.code == 2
    text = capsys.readouterr().err
    assert seen in text
    if argv[0] == "bench":
        for suite in ("cpu", "speed", "memory", "accuracy", "paper", "models", "variants", "all"):
            assert suite in text


@pytest.mark.parametrize("argv", [["show", "none.json"], ["compare", "none.json", "b.json"]])
def test_the_bench_names_the_argument_that_is_wrong(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *argv]) == 1
    text = capsys.readouterr().err
    assert text.startswith("tilewise bench: A.json:" if len(argv) > 2 else "tilewise bench: FILE")
    assert "--from" not in text


@pytest.mark.parametrize("when", ["torch", "tilelab.study.command"])
def test_ctrl_c_while_the_command_loads(when: str) -> None:
    code = f"""
import signal, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {when!r}:
            signal.raise_signal(signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupting())
sys.argv = [sys.argv[1], "study", "list"]
from tilewise.cli import main
sys.exit(main())
"""
    done = ran(sys.executable, "-c", code, "/somewhere/bin/tilewise", status=130)
    assert done.stdout + done.stderr == ""
    # A program of another name keeps Python's way.
    other = subprocess.run(
        [sys.executable, "-c", code, "/somewhere/train.py"], capture_output=True, text=True
    )
    assert ("KeyboardInterrupt" in other.stderr) == (when == "torch")


def test_our_errors_are_messages_not_tracebacks(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "1", "3", "8", "4", "--kv-heads", "2"]) == 1
    assert capsys.readouterr().err.startswith("tilewise explain: ")


def test_a_missing_package_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken:
        def load(self) -> None:
            raise ModuleNotFoundError("No module named 'rich'", name="rich")

    monkeypatch.setattr(commands, "entry_points", lambda **_: [Broken()])
    assert cli.main(["demo"]) == 1
    said = capsys.readouterr().err
    assert "'rich' is missing" in said
    assert "tilewise[lab]" in said


def test_a_command_of_the_lab_without_the_lab(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "entry_points", lambda **_: [])
    assert cli.main(["study"]) == 1
    said = capsys.readouterr().err
    assert "study is part of the package tilelab" in said
    assert "tilewise[lab]" in said


def test_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "main", interrupt)
    assert cli.main(["doctor"]) == 130


def test_explain_gives_backend_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["explain", "1", "4", "64", "16", "--kv-heads", "2", "--causal", "--backend", "tiled"]
    assert cli.main(argv) == 0
    text = capsys.readouterr().out
    assert "tiled" in text
    assert "mask      causal" in text
    assert "not cpu" in text


def test_doctor_reports_everything(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["doctor"])
    text = capsys.readouterr().out
    for what in ("core", "chip", "caches", "threads", "backend cpu", "backend tiled", "OpenMP"):
        assert what in text
    assert "torch" in text


def test_doctor_names_the_instruction_set_that_runs(isa: str) -> None:
    found = {check.what: check.found for check in examine()}
    assert found["instruction set"].startswith(f"{isa} runs")


def test_doctor_says_what_is_fast(
    isa: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["doctor"])
    assert capsys.readouterr().out.endswith(f"\n{doctor.FAST[isa]}\n")  # its last sentence
    monkeypatch.setattr(doctor, "absence", lambda: "it is not built")
    assert "without the compiled core" in doctor.what_is_fast()


def test_doctor_knows_every_instruction_set() -> None:
    sources = Path(__file__).parents[1] / "csrc" / "isa"
    named = {each.stem for each in sources.glob("*.cc")} - {"dispatch"}
    sets = {each for each in named if not each.startswith(("decode_", "passes_", "pieces_"))}
    assert sets == doctor.FAST.keys()


@pytest.fixture(scope="module")
def completions() -> dict[str, str]:
    """The completion script of each shell."""
    made = {}
    for shell in ("bash", "zsh", "fish"):
        said = io.StringIO()
        with redirect_stdout(said):
            assert cli.main(["completion", shell]) == 0
        made[shell] = said.getvalue()
    return made


typed_and_offered = pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["ben"], ["bench"]),
        (["bench", "m"], ["me", "memory", "models"]),
        (["bench", "--pict"], ["--picture"]),
        (["study", "wiki"], ["wikitext"]),
        (["study", "--dry"], ["--dry-run"]),
        (["explain", "--kv"], ["--kv-heads"]),
        (["completion", "f"], ["fish"]),
        (["nonsense", ""], []),
    ],
)


@typed_and_offered
def test_bash_completes(completions: dict[str, str], typed: list[str], offered: list[str]) -> None:
    words = " ".join(f"'{word}'" for word in ["tilewise", *typed])
    program = (
        f"{completions['bash']}\nCOMP_WORDS=({words}); COMP_CWORD={len(typed)}; _tilewise; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = ran("bash", "-c", program)
    assert sorted(done.stdout.split()) == offered


def test_a_reader_who_goes_gets_no_traceback() -> None:
    """As ``tilewise completion bash | head -0`` leaves it."""
    command = [sys.executable, "-m", "tilewise", "completion", "bash"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait() == 1


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
@typed_and_offered
def test_fish_completes(
    completions: dict[str, str], typed: list[str], offered: list[str], tmp_path: Path
) -> None:
    """Where the script offers nothing, fish offers the files of the folder: here are none."""
    line = " ".join(["tilewise", *typed])
    program = f"{completions['fish']}\ncd {tmp_path}\ncomplete -C '{line}'"
    done = ran("fish", "--no-config", "-c", program)
    assert sorted(each.split("\t")[0] for each in done.stdout.splitlines()) == offered


def test_other_shells_offer_the_same_words(completions: dict[str, str]) -> None:
    assert completions["zsh"].endswith(completions["bash"])
    fish = completions["fish"].splitlines()
    assert {shlex.split(line)[0] for line in fish} == {"complete"}  # every quote is closed
    assert "complete -c tilewise -n '__fish_seen_subcommand_from bench' -l picture" in fish
    assert "complete -c tilewise -n '__fish_seen_subcommand_from study' -a wikitext" in fish
    for name in ("doctor", "bench", "study", "explain", "tune", "demo", "completion"):
        assert any(f"__fish_use_subcommand -f -a {name}" in line for line in fish)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_takes_the_script_before_and_after_its_own(
    completions: dict[str, str], tmp_path: Path
) -> None:
    """A ~/.zshrc need not have loaded zsh's completion."""
    script = tmp_path / "script"
    script.write_text(completions["zsh"])
    for before in ("", "autoload -U compinit && compinit -i; "):
        program = f"{before}source {script} && print -- $_comps[tilewise]"
        done = ran("zsh", "-f", "-c", program, env=os.environ | {"ZDOTDIR": str(tmp_path)})
        assert done.stderr == ""
        assert "_tilewise" in done.stdout


def test_completion_without_the_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "entry_points", lambda **_: [])
    said = io.StringIO()
    with redirect_stdout(said):
        assert cli.main(["completion", "bash"]) == 0
    assert 'doctor) words="--help --peak"' in said.getvalue()
    assert "study)" not in said.getvalue()


def test_an_unknown_instruction_set_is_an_error() -> None:
    if available_isas() == [NO_CORE]:
        pytest.skip("the compiled core is not built: ./run setup says why")
    environment = os.environ | {"TILEWISE_ISA": "mmx"}
    done = ran(sys.executable, "-m", "tilewise", "doctor", status=1, env=environment)
    assert "TILEWISE_ISA" in done.stderr
    assert "'mmx'" in done.stderr
    assert all(isa in done.stderr for isa in available_isas())
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "isa",
    [
        pytest.param(isa, marks=pytest.mark.slow if at else ())
        for at, isa in enumerate(available_isas())
    ],
    indirect=True,
)
def test_a_forced_instruction_set_runs(isa: str, tmp_path: Path) -> None:
    run = [sys.executable, "-m", "tilewise", "doctor", "--peak"]
    environment = os.environ | {"TILEWISE_ISA": isa, "TILEWISE_CACHE": str(tmp_path)}
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=120)
    assert f"{isa} runs, forced by TILEWISE_ISA={isa}" in done.stdout
    assert "float32 multiply-add" in done.stdout
    assert ("bfloat16 dot product" in done.stdout) == (isa in ("avx512_bf16", "neon_bf16"))
    assert "GB/s" in done.stdout
    assert "not kept, because TILEWISE_ISA" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_doctor_fails_on_what_needs_mending() -> None:
    checks = [Check("a", "well"), Check("bb", "ill", ok=False)]
    assert report(checks) == "  a   well\n! bb  ill"


def test_openmp_runtimes_are_counted_by_file(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(MAPS)
    assert openmp_runtimes(maps) == [
        "/a folder/libomp.so (deleted)",
        "/venv/torch/lib/libgomp-a34b.so.1",
    ]
    assert openmp_runtimes(tmp_path / "absent") == []


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
def test_one_openmp_runtime_after_a_call() -> None:
    """In a fresh process, so that nothing another test loaded counts."""
    code = (
        "import torch, tilewise\n"
        "from tilewise.doctor import openmp_runtimes\n"
        "x = torch.ones(1, 4, 300, 16)\n"
        "tilewise.attention(x, x, x)\n"
        "torch.nn.functional.scaled_dot_product_attention(x, x, x)\n"
        "print(len(openmp_runtimes()))\n"
    )
    done = ran(sys.executable, "-W", "ignore", "-c", code)
    assert done.stdout.strip() == "1"
