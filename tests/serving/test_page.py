"""The examples of docs/serving.md run."""

from __future__ import annotations

import re

from tests.conftest import ROOT


def test_the_examples_run() -> None:
    text = (ROOT / "docs" / "serving.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        names: dict[str, object] = {}
        exec(compile(example, "docs/serving.md", "exec"), names)
        found = names.get("tokens")
        if isinstance(found, list):
            assert [len(each) for each in found] == [20, 5]
