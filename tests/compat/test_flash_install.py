"""``compat.install("flash_attn")``: the name, its modules, its metadata, and undoing it."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ran
from tilewise import compat
from tilewise.compat import flash_attn as ours
from tilewise.errors import InvalidArgument, Unsupported

pytestmark = pytest.mark.skipif(
    "flash_attn" in sys.modules or importlib.util.find_spec("flash_attn") is not None,
    reason="flash_attn itself is installed",
)


@pytest.fixture(name="stand_in")
def _stand_in() -> Iterator[None]:
    compat.install("flash_attn")
    yield
    compat.uninstall("flash_attn")


def alone(code: str, *folders: Path) -> str:
    """What a fresh interpreter prints."""
    lead = f"import sys\nsys.path[:0] = {[str(folder) for folder in folders]}\n"
    return ran(sys.executable, "-W", "error", "-c", lead + textwrap.dedent(code)).stdout.strip()


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("flash_attn", "flash_attn_func"),
        ("flash_attn", "flash_attn_qkvpacked_func"),
        ("flash_attn", "flash_attn_with_kvcache"),
        ("flash_attn.flash_attn_interface", "flash_attn_varlen_func"),
        ("flash_attn.flash_attn_interface", "_flash_attn_forward"),
        ("flash_attn.flash_attn_interface", "_flash_attn_backward"),
        ("flash_attn.flash_attn_interface", "_flash_attn_varlen_forward"),
        ("flash_attn.flash_attn_interface", "_flash_attn_varlen_backward"),
        ("flash_attn.bert_padding", "unpad_input"),
        ("flash_attn.bert_padding", "pad_input"),
        ("flash_attn.bert_padding", "index_first_axis"),
        ("flash_attn.layers.rotary", "apply_rotary_emb"),
        ("flash_attn.layers.rotary", "RotaryEmbedding"),
        ("flash_attn.ops.triton.rotary", "apply_rotary"),
        ("flash_attn.cute", "flash_attn_varlen_func"),
        ("flash_attn.cute.interface", "flash_attn_func"),
    ],
)
def test_names_are_found(module: str, name: str) -> None:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    found = getattr(importlib.import_module(module), name)
    assert found.__module__.startswith("tilewise.compat.flash_attn")
    assert found is getattr(importlib.import_module(found.__module__), name)


@pytest.mark.usefixtures("stand_in")
def test_metadata() -> None:
    assert importlib.import_module("flash_attn").__version__ == "2.8.3" == ours.__version__
    for name in ("flash_attn", "flash-attn", "Flash-Attn"):
        assert importlib.metadata.version(name) == "2.8.3"
    assert "tilewise" in importlib.metadata.metadata("flash-attn")["Summary"]
    assert importlib.metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
    assert importlib.metadata.version("torch")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_attn.losses")


def test_metadata_imports_nothing() -> None:
    """Entry points are read while modules are imported: torch._dynamo does so for Triton's."""
    code = """
    import importlib.metadata
    from tilewise import compat
    compat.install("flash_attn")
    found = importlib.metadata.version("flash-attn"), importlib.metadata.entry_points(group="x")
    print(found[0], [x for x in sys.modules if x.startswith(("flash_attn", "tilewise.compat.f"))])
    """
    assert alone(code) == "2.8.3 []"


def test_install_twice_and_undo() -> None:
    before = list(sys.meta_path), set(sys.modules)
    compat.install("flash_attn")
    compat.install("flash_attn")
    assert len(sys.meta_path) == len(before[0]) + 1
    importlib.import_module("flash_attn.layers.rotary")
    compat.uninstall("flash_attn")
    assert list(sys.meta_path) == before[0]
    assert not {name for name in sys.modules if name.partition(".")[0] == "flash_attn"}
    assert importlib.util.find_spec("flash_attn") is None
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash-attn")
    with pytest.raises(InvalidArgument, match="not installed"):
        compat.uninstall("flash_attn")


def test_the_third_version_stands_in_by_itself() -> None:
    """Beside the second, each undone alone."""
    compat.install("flash_attn_interface")
    compat.install("flash_attn")
    found = importlib.import_module("flash_attn_interface").flash_attn_func
    assert found.__module__ == "tilewise.compat.flash_attn.version_3"
    assert importlib.metadata.version("flash_attn_3") == "3.0.0"
    compat.uninstall("flash_attn_interface")
    assert importlib.util.find_spec("flash_attn_interface") is None
    assert importlib.util.find_spec("flash_attn") is not None
    compat.uninstall("flash_attn")


def test_names_that_cannot_be_stood_in_for() -> None:
    for call in (compat.install, compat.uninstall):
        with pytest.raises(InvalidArgument, match="'flash_attn'"):
            call("apex")


def test_the_real_package_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flash_attn.py").write_text("real = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.meta_path)
    with pytest.raises(Unsupported, match="flash_attn itself is installed"):
        compat.install("flash_attn")
    assert list(sys.meta_path) == before
