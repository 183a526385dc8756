"""The table of blocks that these tests were written for: they test the choice, not the table."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tilewise.kernels.gpu import config

_ROWS = """
    hopper       forward  128x64/8/3    128x128/8/2   128x32/8/2    32x32/8/2
    hopper       dkdv     64x128/8/3    64x128/8/3    16x32/8/3     16x16/8/2
    hopper       dq       128x64/8/2    128x64/8/2    128x32/8/2    32x16/8/1
    hopper       forward+ 128x64/8/3    128x64/8/2    128x32/8/2    32x32/8/2
    hopper       forward* 128x64/8/3    128x64/8/3    64x16/8/3     32x32/8/2
    hopper       dkdv+    64x128/8/3    32x128/8/3    16x32/8/3     16x16/8/2
    hopper       dkdv*    64x128/8/3    32x128/8/3    16x32/8/1     16x16/8/2
    hopper       dq+      128x64/8/2    128x64/8/3    64x16/8/3     32x16/8/1
    hopper       dq*      128x64/8/3    128x64/8/3    32x16/8/3     32x16/8/1
"""


@pytest.fixture(autouse=True)
def rows_of_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The candidates of a job are the neighbours of its row: another row has others."""
    for place, row in config._rows(_ROWS).items():
        monkeypatch.setitem(config._TABLE, place, row)
    config.tiles_for.cache_clear()
    yield
    config.tiles_for.cache_clear()
