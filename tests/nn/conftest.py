"""What the tests of tilewise.nn share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_initial_weights() -> None:
    """Modules draw them from the global state: without this a test's would depend on its order."""
    torch.manual_seed(0)
