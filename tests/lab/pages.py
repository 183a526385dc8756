"""Pages of HTML, read and checked."""

from __future__ import annotations

from html.parser import HTMLParser


class Page(HTMLParser):
    """Collects text, tags and links, and checks that what opens is closed in order."""

    VOID = frozenset({"meta", "link", "br", "wbr"})

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag in ("td", "th", "p", "dt", "dd", "small", "li"):
            self.text += " "
        kinds = ("href", "src", "xlink:href")
        self.links += [value or "" for name, value in attrs if name in kinds]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data: str) -> None:
        self.text += data
