"""The backends there are, in order of preference, imported when first asked for."""

from functools import cache
from importlib import import_module

from tilewise.errors import InvalidArgument, InvalidType
from tilewise.kernels.base import Backend, Reader

# By name, the module and the class.
_BACKENDS = {
    "cpu": ("tilewise.kernels.cpu.backend", "CpuBackend"),
    "gpu": ("tilewise.kernels.gpu.backend", "GpuBackend"),
    "tiled": ("tilewise.kernels.tiled", "TiledBackend"),
}
BACKEND_NAMES = tuple(_BACKENDS)


@cache
def load(name: str) -> Backend:
    """Return the backend of that name, one instance per process."""
    module, kind = _BACKENDS[name]
    backend: Backend = getattr(import_module(module), kind)()
    return backend


@cache
def tensor_reader() -> Reader | None:
    """Return the reading of tensors of the first backend that has one."""
    found = (load(name).tensor_reader() for name in BACKEND_NAMES)
    return next((reader for reader in found if reader is not None), None)


def check_name(name: object) -> str | None:
    """``backend=`` as given, if it names a backend or is None."""
    *first, last = map(repr, BACKEND_NAMES)
    required = f"{', '.join(['None (choose)', *first])} or {last}"
    if name is None:
        return None
    if not isinstance(name, str):
        raise InvalidType("backend", f"a {type(name).__name__}", required)
    if name not in BACKEND_NAMES:
        is_gpu = name.lower() in ("cuda", "hip", "rocm", "triton")
        fix = "NVIDIA and AMD GPUs are backend='gpu'." if is_gpu else ""
        raise InvalidArgument("backend", repr(name), required, fix)
    return name
