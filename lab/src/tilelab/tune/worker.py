"""The worker process: tries blocks on small problems ("check"), and times them ("measure").

``python -m tilelab.tune.worker SETTING`` speaks as the worker of the GPU check does. A job is
the words of a ``Job`` and the blocks that are asked about, the table's first where they are timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial

import torch

from tilelab.cases.case import Case
from tilelab.common.exactness import judge
from tilelab.gpu_check.outcomes import Outcome, refer
from tilelab.gpu_check.record import Row, in_short
from tilelab.gpu_check.setting import Setting
from tilelab.gpu_check.worker import main
from tilelab.tune import probes
from tilelab.tune.jobs import Job, read_job
from tilelab.tune.work import Work, spills_in
from tilewise.inspect.gpu import Blocks, Launch, family_of, run

_BUDGET_S = 1.0  # of the rounds in which blocks are timed in turn


def perform(setting: Setting, step: str, words: str) -> Iterator[Row]:
    """The row of a job.

    Args:
        setting: where.
        step: "check" or "measure".
        words: "forward bfloat16 128 plain 128x64/8/2".
    """
    job, blocks = read_job(words)
    yield _check(setting, job, blocks[0]) if step == "check" else _measure(setting, job, blocks)


def _check(setting: Setting, job: Job, blocks: Blocks) -> Row:
    """Return whether a pass in these blocks is exact on every small problem, and what it spills."""
    ratios: dict[str, float] = {}
    spills = 0
    for case in probes.small(job, setting.self_test):
        work, references = _small(setting, case)
        launches, outcome = work.launches(job.pass_name, blocks)
        spills += spills_in(launches)
        for key, actual in outcome.items():
            verdict = judge(actual, *(reference[key] for reference in references))
            ratios[f"{case.name}, {key}"] = verdict.ratio
            if fault := verdict.fault(key):
                note, values = f"{case.name}: {fault}", {"ratios": ratios, "spills": spills}
                return Row("check", str(job), "wrong", note, values)
    return Row("check", str(job), values={"ratios": ratios, "spills": spills})


@lru_cache(maxsize=8)
def _small(setting: Setting, case: Case) -> tuple[Work, tuple[Outcome, Outcome]]:
    """A small problem, and its results by plain torch in its dtype and in float64."""
    work = Work(setting, case, _family(setting))
    return work, (refer(work.inputs, case.dtype), refer(work.inputs, torch.float64))


def _measure(setting: Setting, job: Job, blocks: list[Blocks]) -> Row:
    """Seconds of a pass on the large problems in each of these blocks, in turn.

    Others than the table's may fail where there is more to do; the row says so.
    """
    works = _large(setting, job)
    calls, failed = {}, {}
    for number, each in enumerate(blocks):
        try:
            calls[str(each)] = partial(run, _timed(works, job, each))
            setting.synchronize()
        except Exception as error:
            if number == 0:
                raise
            calls.pop(str(each), None)
            failed[str(each)] = in_short(error)
    samples = setting.race(calls, _BUDGET_S)
    return Row("measure", str(job), values={"samples_s": samples, "failed": failed})


def _timed(works: list[Work], job: Job, blocks: Blocks) -> list[Launch]:
    """The launches that are timed; whatever they read is there, and they are compiled."""
    own: list[Launch] = []
    for work in works:
        launches, _ = work.launches(job.pass_name, blocks)
        run(launches)
        own += work.own(job.pass_name, launches)
    return own


@lru_cache(maxsize=1)
def _large(setting: Setting, job: Job) -> list[Work]:
    cases = probes.large(job, setting.self_test)
    return [Work(setting, case, _family(setting)) for case in cases]


def _family(setting: Setting) -> str:
    family = family_of(setting.device)
    assert family is not None, "the parent asks for chips only that have one"
    return family


if __name__ == "__main__":
    main(perform)
