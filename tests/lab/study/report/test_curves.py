"""The loss curves of studies that have hardly begun, and of those with many arms."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from tilelab.study.report.curves import loss_chart
from tilelab.study.report.series import Series


@pytest.mark.parametrize("loss", [5.5, 0.0])
def test_losses_that_are_all_one_number_have_a_frame(loss: float) -> None:
    same = (loss, loss)
    series = Series("baseline", 0, (0.0, 10.0), same, same, same, 1, broken=False)
    assert loss_chart([series], "tokens", "bits_per_byte", "curve") is not None


def test_the_names_of_sixteen_arms_do_not_touch() -> None:
    ends = (1.0, 1.001, 1.002)  # all at one height
    drawn = [
        Series(f"arm-{place}", place, (0.0, 10.0), *((5.0, ends[place % 3]),) * 3, 1, False)
        for place in range(16)
    ]
    chart = loss_chart(drawn, "tokens", "bits_per_byte", "curve")
    assert chart is not None
    names = re.findall(r'<text[^>]*y="([\d.]+)"[^>]*>arm-\d+<', chart.svg)
    heights = sorted(map(float, names))
    assert len(heights) == 16
    assert min(b - a for a, b in pairwise(heights)) > 18.5  # a line is 16
