"""The words of the report in a sentence each; ``docs/metrics.md`` has formulas and sources."""

from __future__ import annotations

from tilewise.lab.study.report.view import Fact

__all__ = ["DEFINITIONS"]

DEFINITIONS = (
    Fact(
        "Effect",
        "The mean over seeds of an arm's final held-out metric less the baseline's with the same "
        "seed. Both metrics are losses: below zero is better.",
    ),
    Fact(
        "Interval",
        "The t interval of that mean: what the effect would be with many more seeds, at the stated "
        "confidence and not adjusted for the number of arms.",
    ),
    Fact(
        "p (Holm)",
        "Of the paired t test that there is no effect, made larger by Holm's method for the number "
        "of arms that are judged together.",
    ),
    Fact(
        "Better, worse",
        "The Holm-adjusted test says that there is an effect, and it was not found too small to "
        "matter.",
    ),
    Fact(
        "No difference",
        "Two one-sided tests (Holm-adjusted) say that the effect is smaller than the smallest that "
        "matters, in either direction. This is found, not assumed.",
    ),
    Fact(
        "Undecided",
        "Neither was found with these seeds. The number of seeds that it still needs is for the "
        "wished power to see the smallest effect that matters.",
    ),
    Fact(
        "Diverged",
        "A loss or a gradient was not finite. Such a run counts; it is never left out.",
    ),
    Fact(
        "Speed withheld",
        "An arm that only computes differently (a systems arm) shows its speed once its losses "
        "have been found equal to the baseline's; before that the comparison would mean nothing.",
    ),
    Fact(
        "tokens/s",
        "Tokens of optimizer steps over the time of these steps; evaluation and the first steps of "
        "a process are left out. Per CPU-second: over the CPU time of all threads.",
    ),
    Fact(
        "MFU",
        "Model operations per second over the measured peak of matrix multiplication: 6 per "
        "multiplied weight and token, and c · layers · width · context for attention, where c = 12 "
        "counts every pair and c = 6 only those that a causal mask lets through.",
    ),
    Fact(
        "Spikes",
        "The share of steps whose training loss jumped over that of the steps before it.",
    ),
    Fact(
        "Kernel flag",
        "In every run the kernel that each attention layer really ran is recorded. An arm whose "
        "kernels differ from the baseline's changed more than it says.",
    ),
)
