"""Text for the terminal: what a study or a record says is shown and never obeyed."""

from __future__ import annotations

from typing import Any

import rich.text

from tilewise.commands.visible import visible

__all__ = ["Text"]


class Text(rich.text.Text):
    r"""Rich's text, with every control character shown by its code, like ``\x1b``."""

    def __init__(self, text: str = "", *args: Any, **options: Any) -> None:
        super().__init__(visible(text), *args, **options)

    def append(self, text: rich.text.Text | str, *args: Any, **options: Any) -> rich.text.Text:
        """Add to the end, as rich's does."""
        return super().append(visible(text) if isinstance(text, str) else text, *args, **options)
