"""Control characters in text from files, made visible: a terminal would obey them."""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but the tab and the end of a line


def visible(text: str) -> str:
    r"""Replace every control character by its code, the escape character by ``\x1b``."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
