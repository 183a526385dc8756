"""torch's private names stand in one module, and keep what it promises of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, func
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from tilelab.common import torch_private as of_lab
from tilewise import torch_private as private

# torch's own, when forward mode first runs.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")

PACKAGE, LAB = Path(private.__file__).parent, Path(of_lab.__file__).parent.parent


def private_names(source: str) -> Iterator[str]:
    """The names with a leading underscore that a module takes from torch."""
    tree = ast.parse(source)
    roots = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    roots.add(alias.asname or "torch")
                    yield from _hidden(alias.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                roots.add(alias.asname or alias.name)
                yield from _hidden(f"{node.module}.{alias.name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            base: ast.expr = node
            while isinstance(base, ast.Attribute):
                base = base.value
            if isinstance(base, ast.Name) and base.id in roots:
                yield from _hidden(node.attr)


def _hidden(path: str) -> Iterator[str]:
    parts = path.split(".")
    if any(part.startswith("_") and not part.startswith("__") for part in parts):
        yield path


def test_no_other_module_has_private_names() -> None:
    found = {
        str(path.relative_to(package)): names
        for package in (PACKAGE, LAB)
        for path in package.rglob("*.py")
        if (names := sorted(set(private_names(path.read_text()))))
    }
    assert set(found) == {"torch_private.py", "common/torch_private.py"}, found


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._C.f()",
        "from torch._dynamo import reset",
        "from torch.autograd import forward_ad\nforward_ad._current_level",
        "import torch._functorch.config",
        "import torch as t\nt.nn._reduction",
    ],
)
def test_the_search_finds_them(source: str) -> None:
    assert list(private_names(source))
    assert not list(private_names("import torch\ntorch.__version__; self._torch; torch.nn.Linear"))


def test_what_is_active() -> None:
    assert not private.functorch_active()
    assert not private.in_forward_level()
    assert not private.vmap_active()
    assert private.jit_tracing() is None
    assert private.dispatch_modes() == 0
    assert not private.any_autocast()
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append((private.functorch_active(), private.vmap_active(), private.is_batched(x)))
        return x.sum()

    func.vmap(func.grad(look))(torch.ones(2, 3))
    func.grad(look)(torch.ones(3))
    assert seen == [(True, True, True), (True, False, False)]
    with forward_ad.dual_level():
        assert private.in_forward_level()
    with torch.autocast("cpu", torch.bfloat16):
        assert private.any_autocast()
    with FlopCounterMode(display=False):
        assert private.dispatch_modes() > 0


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_tracing_is_seen() -> None:
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append(private.jit_tracing() is not None)
        return x + 1

    torch.jit.trace(look, torch.ones(2), check_trace=False)
    assert seen == [True]


def test_wrappers_come_off() -> None:
    x = torch.arange(6.0).view(2, 3)
    seen: list[Tensor] = []

    def look(y: Tensor) -> Tensor:
        seen.append(private.without_wrappers(y))
        return y.sum()

    func.vmap(func.grad(look))(x)
    assert torch.equal(seen[0], x)
    assert private.without_wrappers(x) is x


def test_who_has_a_derivative() -> None:
    x = torch.ones(3)
    tracked = []

    def look(y: Tensor) -> Tensor:
        tracked.append(private.is_tracked(y))
        return y.sum()

    func.grad(look)(x)
    func.jvp(look, (x,), (x,))
    func.vmap(look)(x[None])
    assert tracked == [True, True, False]
    with forward_ad.dual_level():
        assert private.has_tangent(forward_ad.make_dual(x, x))
        assert not private.has_tangent(x)


def test_tensors_without_memory() -> None:
    """Zeros that have none get some; types that see torch's operations may have none."""
    x = torch.ones(3, requires_grad=True)
    (zeros,) = torch.autograd.grad(x.sgn().sum(), x)
    assert zeros._is_zerotensor()
    found = private.with_memory(zeros)
    assert not found._is_zerotensor()
    assert torch.equal(found, torch.zeros(3))
    assert private.with_memory(x) is x
    kinds = (Tensor, torch.nn.Parameter, type("Plain", (Tensor,), {}), private.FakeTensor)
    assert [private.sees_operations(kind) for kind in kinds] == [False, False, False, True]


def test_batches_of_gradients() -> None:
    """A Function whose backward pass takes the batch off, and puts it back at another place."""
    seen = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            plain, at = private.without_batch(grad)
            assert plain is not None
            seen.append((private.has_batch(grad), tuple(plain.shape), at))
            return private.with_batch(2 * plain.mT, 1)

    x = torch.ones(3, requires_grad=True)
    toward = torch.arange(12.0).view(4, 3)
    (found,) = torch.autograd.grad(Doubled.apply(x), x, toward, is_grads_batched=True)
    assert torch.equal(found, 2 * toward)
    assert seen == [(True, (4, 3), 0)]
    assert private.without_batch(toward) == (toward, None)
    assert private.without_batch(None) == (None, None)


def test_what_torch_compile_leaves_alone_and_takes_for_constant() -> None:
    torch.compiler.reset()
    ran = []

    @private.left_alone
    def alone(x: Tensor) -> Tensor:
        ran.append(torch.compiler.is_compiling())
        return x + 1

    @private.constant_while_compiling
    def constant(x: int) -> int:
        ran.append(False)
        return x + len(ran) * 0

    compiled = torch.compile(lambda x: 2 * alone(2 * x) + constant(3), backend="eager")
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 9.0))
    assert ran
    assert not any(ran)


def test_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[int] = []
    assert callable(torch.cuda._sleep)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    of_lab.keep_busy(5)
    assert slept == [5]
    from torch._functorch import config

    before = config.donated_buffer
    try:
        of_lab.keep_buffers()
        assert config.donated_buffer is False
    finally:
        config.donated_buffer = before
    has = of_lab.instruction_sets()
    assert has["avx512"] or not has["avx512_bf16"]
    assert of_lab.allow_amx() or not has["amx"]
    loaded: list[str] = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    assert of_lab.operators_of(Path("lib.so")) is torch.ops._C
    assert loaded == ["lib.so"]
    p = torch.randn(2, 5).softmax(-1)
    grad = torch.randn(2, 5)
    due = p * (grad - (p * grad).sum(-1, keepdim=True))
    torch.testing.assert_close(of_lab.softmax_backward_data(grad, p, -1, p.dtype), due)
    with torch._subclasses.FakeTensorMode():
        assert type(torch.empty(2)) is private.FakeTensor


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_products_of_onednn(dtype: torch.dtype) -> None:
    """Those of bfloat16 need AVX-512 on x86; wider ones are fast everywhere."""
    found = private.onednn_products(dtype)
    assert type(found) is bool
    about = Path("/proc/cpuinfo")
    flags = about.read_text().split() if about.exists() else []
    if dtype.itemsize > 2:
        assert found
    elif dtype == torch.bfloat16 and "avx2" in flags and "avx_ne_convert" not in flags:
        assert found == ("avx512bw" in flags)
