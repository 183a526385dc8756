"""Floor 0: every exception and warning that a user of tilewise can meet.

Each message names the argument, says what came and what is required, and how to put it right.
"""

from collections.abc import Mapping, Sequence

__all__ = [
    "InvalidArgument",
    "InvalidType",
    "SlowPathWarning",
    "TilewiseError",
    "Unsupported",
]


class TilewiseError(Exception):
    """The base of every error that tilewise raises on purpose."""


class InvalidArgument(TilewiseError, ValueError):  # noqa: N818  reads as what is wrong
    """An argument has a value, shape, dtype or device that the call cannot mean.

    Args:
        argument: the name of the argument as the caller wrote it, e.g. ``"cu_seqlens_q"``.
        came: what was given, in words.
        required: what is required instead, in words.
        fix: how to put it right; may be empty where ``required`` already says it.
    """

    def __init__(self, argument: str, came: str, required: str, fix: str = "") -> None:
        self.argument = argument
        super().__init__(_sentence(argument, came, required, fix))


class InvalidType(TilewiseError, TypeError):  # noqa: N818  reads as what is wrong
    """An argument has a Python type that the call does not take (arguments as InvalidArgument)."""

    def __init__(self, argument: str, came: str, required: str, fix: str = "") -> None:
        self.argument = argument
        super().__init__(_sentence(argument, came, required, fix))


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
        self.reasons = {name: tuple(why) for name, why in (reasons or {}).items()}
        lines = [what]
        for name, why in self.reasons.items():
            lines += [f"  backend {name!r}: {reason}" for reason in why]
        if fix:
            lines.append(f"  fix: {fix}")
        super().__init__("\n".join(lines))


class SlowPathWarning(UserWarning):
    """The call runs and is exact, but on a path that is slow (the core is not compiled)."""


def _sentence(argument: str, came: str, required: str, fix: str) -> str:
    text = f"{argument}: got {came}; required: {required}"
    return f"{text}. {fix}" if fix else text
