"""Every exception and warning that a user of tilewise can meet.

Each message names the argument, says what came and what is required, and how to put it right.
"""

from collections.abc import Mapping, Sequence

__all__ = [
    "InvalidArgument",
    "InvalidType",
    "LostThreads",
    "OutOfPages",
    "SlowPathWarning",
    "TilewiseError",
    "TunedBlocksWarning",
    "Unsupported",
]


class TilewiseError(Exception):
    """The base of every error that tilewise raises on purpose."""


class _ArgumentError(TilewiseError):
    """Common base of InvalidArgument and InvalidType.

    Args:
        argument: the name of the argument as the caller wrote it, e.g. ``"cu_seqlens_q"``.
        came: what was given, in words.
        required: what is required instead, in words.
        fix: how to put it right; may be empty where ``required`` already says it.
    """

    # The message is made when it is read: torch.compile can then trace the raising, and pickle
    # rebuilds the error from its fields.
    def __init__(self, argument: str, came: str, required: str, fix: str = "") -> None:
        self.argument = argument
        self.came = came
        self.required = required
        self.fix = fix

    def __str__(self) -> str:
        text = f"{self.argument}: got {self.came}; required: {self.required}"
        return f"{text}. {self.fix}" if self.fix else text


class InvalidArgument(_ArgumentError, ValueError):  # noqa: N818  reads as what is wrong
    """An argument has a value, shape, dtype or device that the call cannot mean."""


class InvalidType(_ArgumentError, TypeError):  # noqa: N818  reads as what is wrong
    """An argument has a Python type that the call does not take."""


class Unsupported(TilewiseError, NotImplementedError):  # noqa: N818  reads as what is wrong
    """The request is meaningful, but nothing here can do it.

    Args:
        what: the request in words.
        reasons: why each backend cannot, by backend name; empty where no backend was asked.
        fix: what to do instead.
    """

    def __init__(
        self, what: str, reasons: Mapping[str, Sequence[str]] | None = None, fix: str = ""
    ) -> None:
        self.what = what
        self.reasons = dict(reasons or {})
        self.fix = fix

    def __str__(self) -> str:
        lines = [self.what]
        for name, why in self.reasons.items():
            lines += [f"  backend {name!r}: {reason}" for reason in why]
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)


class LostThreads(TilewiseError):  # noqa: N818  reads as what is wrong
    """A call on several threads in a forked process whose parent kept the threads.

    Args:
        threads: of the call.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def __str__(self) -> str:
        return (
            f"a call on {self.threads} threads in a forked process: the threads stayed in the "
            "parent, which has computed attention on several, and the call would wait for them "
            "forever. Call torch.set_num_threads(1) in the child, or start it by spawn: "
            'multiprocessing.get_context("spawn"), DataLoader(multiprocessing_context="spawn")'
        )


class OutOfPages(TilewiseError):  # noqa: N818  reads as what is wrong
    """A cache has too few pages left; nothing was changed.

    Args:
        wanted: how many pages the call needs.
        free: how many nobody holds.
        pages: how many there are.
    """

    def __init__(self, wanted: int, free: int, pages: int) -> None:
        self.wanted = wanted
        self.free = free
        self.pages = pages

    def __str__(self) -> str:
        return (
            f"{self.wanted} pages are needed, and {self.free} of {self.pages} are free: remove "
            "sequences first, or make a cache of more pages"
        )


class SlowPathWarning(UserWarning):
    """The call runs and is exact, but on a path that is slow (the core is not compiled)."""


class TunedBlocksWarning(UserWarning):
    """A file of measured blocks is not used; the calls run in the blocks of the table."""
