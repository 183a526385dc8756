"""The words of the report in a sentence each; ``docs/metrics.md`` has formulas and sources."""

from __future__ import annotations

from tilelab.study.report.view import Definition

__all__ = ["DEFINITIONS"]

DEFINITIONS = (
    Definition(
        "Effect",
        "The mean over seeds of an arm's final held-out metric less the baseline's with the same "
        "seed. Of a loss, below zero is better; of an accuracy or a correlation, above zero.",
        "verdicts",
    ),
    Definition(
        "Interval",
        "The t interval of that mean: what the effect would be with many more seeds, at the stated "
        "confidence and not adjusted for the number of arms.",
        "verdicts",
    ),
    Definition(
        "p (Holm)",
        "Of the paired t test that there is no effect, made larger by Holm's method for the number "
        "of arms that are judged together.",
        "verdicts",
    ),
    Definition(
        "Better, worse",
        "The Holm-adjusted test says that there is an effect, and it was not found too small to "
        "matter.",
        "verdicts",
    ),
    Definition(
        "No difference",
        "Two one-sided tests (Holm-adjusted) say that the effect is smaller than the smallest that "
        "matters, in either direction. This is found, not assumed.",
        "verdicts",
    ),
    Definition(
        "Undecided",
        "Neither was found with these seeds. The number of seeds that it still needs is for the "
        "wished power to see the smallest effect that matters.",
        "verdicts",
    ),
    Definition(
        "Diverged",
        "A loss, a gradient or a held-out loss was not finite. Such a run counts; it is never "
        "left out.",
        "stability",
    ),
    Definition(
        "Speed withheld",
        "An arm that only computes differently (a systems arm) shows its speed once its losses "
        "have been found equal to the baseline's; before that the comparison would mean nothing.",
        "what-is-withheld-and-what-is-warned-of",
    ),
    Definition(
        "tokens/s",
        "Tokens of optimizer steps over the time of these steps; evaluation and the first steps of "
        "a process are left out. Per CPU-second: over the CPU time of all threads.",
        "speed",
    ),
    Definition(
        "MFU",
        "Model operations per second over the measured peak of multiply-adds: 6 per "
        "multiplied weight and token, and c · layers · width · context for attention, where c = 12 "
        "counts every pair and c = 6 only those that a causal mask lets through. The speed is per "
        "second of wall time, the peak of a CPU per second of CPU time: waiting lowers it.",
        "speed",
    ),
    Definition(
        "Spikes",
        "The share of steps whose training loss lay more than seven robust standard deviations "
        "over that of the steps before.",
        "stability",
    ),
    Definition(
        "Attention logits, entropy",
        "Of a few held-out windows, from the attention kernel's own statistics: the largest score "
        "before the softmax, and the entropy of the weights of a query, in nats.",
        "stability",
    ),
    Definition(
        "Kernel flag",
        "In every run the kernel that each attention layer really ran is recorded. An arm whose "
        "kernels differ from the baseline's changed more than it says.",
        "attention-kernels",
    ),
)
