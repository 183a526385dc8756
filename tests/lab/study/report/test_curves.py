"""The loss curves of studies that have hardly begun."""

from __future__ import annotations

import pytest

from tilewise.lab.study.report.curves import loss_chart
from tilewise.lab.study.report.series import Series


@pytest.mark.parametrize("loss", [5.5, 0.0])
def test_losses_that_are_all_one_number_have_a_frame(loss: float) -> None:
    same = (loss, loss)
    series = Series("baseline", 0, (0.0, 10.0), same, same, same, 1, broken=False)
    assert loss_chart([series], "tokens", "bits_per_byte", "curve") is not None
