"""What is held, and what fits."""

from __future__ import annotations

import pytest
import torch

from tests.plan.some_problems import problem
from tilewise.errors import InvalidArgument
from tilewise.plan.traffic.memory import fit, plain_held, tiled_held
from tilewise.problem import Problem


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("what", ["batch", "length"])
@pytest.mark.parametrize("layers", [1, 12])
def test_the_largest_fits_and_the_next_does_not(training: bool, what: str, layers: int) -> None:
    room, asked = 10**8, problem(kv_heads=2, dropout_p=0.1)
    found = fit(asked, room, what, layers, training)
    assert found.plain < found.tiled

    def sized(size: int) -> Problem:
        if what == "batch":
            return asked._replace(batch=size)
        return asked._replace(queries=size, keys=size)

    for held, size in ((plain_held, found.plain), (tiled_held, found.tiled)):
        assert held(sized(size), training).peak(layers) <= room
        assert held(sized(size + 1), training).peak(layers) > room


def test_ours_grows_with_the_length_and_plain_with_its_square() -> None:
    small, large = problem(queries=1024, keys=1024), problem(queries=2048, keys=2048)
    assert tiled_held(large).peak() == 2 * tiled_held(small).peak()
    assert plain_held(large).peak() > 3.5 * plain_held(small).peak()


def test_the_softmax_holds_two_matrices() -> None:
    asked = problem()
    matrix, operand = 2 * 4 * 64 * 64 * 2, 2 * 4 * 64 * 32 * 2
    assert plain_held(asked, training=False).peak() == 4 * operand + 2 * matrix
    assert plain_held(asked).kept == 4 * operand + matrix
    with_dropout = plain_held(asked._replace(dropout_p=0.1))
    assert with_dropout.kept == 4 * operand + 2 * matrix + matrix // 2


def test_eight_bits() -> None:
    """Ours reads a byte a number and gives two; plain attention has copies in sixteen bits."""
    asked = problem(kv_heads=2, dtype=torch.float8_e4m3fn)
    number, rows = 2 * 4 * 64 * 32, 3 * 2 * 4 * 64 * 4
    assert tiled_held(asked, training=False).peak() == 2 * number + 2 * number + rows
    wide = plain_held(asked._replace(dtype=torch.bfloat16), training=False)
    assert plain_held(asked, training=False).peak() == wide.peak() + 2 * number


def test_nothing_fits_into_next_to_nothing() -> None:
    assert fit(problem(), 10, "batch") == (0, 0)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="fit"):
        fit(problem(), 0, "batch")
    with pytest.raises(InvalidArgument, match="what"):
        fit(problem(), 100, "width")
    with pytest.raises(InvalidArgument, match="dense"):
        plain_held(problem(layout="varlen"))
