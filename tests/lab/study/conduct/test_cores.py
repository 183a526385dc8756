"""Cores: one of them for each run, of all studies on the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tilewise.lab.study.conduct.cores import Cores

Make = Callable[[Sequence[int], str], Cores]


@pytest.fixture
def study(tmp_path: Path) -> Iterator[Make]:
    """The cores of another study, with the folder of its locks."""
    with ExitStack() as stack:
        yield lambda processors, name: stack.enter_context(
            closing(Cores(processors, tmp_path / name))
        )


def test_a_free_core_is_taken_before_one_that_has_a_run(study: Make) -> None:
    cores = study((4, 6), "locks")
    assert cores.choose([]) == 4
    assert cores.choose([4]) == 6
    assert cores.choose([6]) == 4
    assert cores.choose([4, 6]) == 4
    assert cores.choose([4, 6, 4]) == 6
    assert cores.choose([4, None]) == 6


def test_two_studies_do_not_share_a_core(study: Make) -> None:
    ours, theirs = study((0, 1), "locks"), study((0, 1), "locks")
    assert ours.choose([]) == 0
    assert theirs.choose([]) == 1
    assert ours.choose([0]) is None
    # Between two runs a core is still its study's.
    assert theirs.choose([]) == 1
    assert study((0, 1), "locks").choose([]) is None
    ours.close()
    assert theirs.choose([1]) == 0
    assert theirs.choose([0, 1, 1]) == 0


def test_nothing_is_pinned_where_there_are_no_cores(study: Make) -> None:
    assert study((), "locks").choose([]) is None


def test_without_a_place_for_locks_there_are_no_other_studies(study: Make, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert [study((0, 1), "file").choose([]) for _ in range(2)] == [0, 0]
