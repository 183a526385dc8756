"""Text, its tokens, their order, and the loss on what was held out.

``corpus`` finds and splits a text, ``tokens`` turns it into numbers (once, kept in a cache),
``order`` says which window comes when, ``evaluate`` scores a model. This folder knows nothing of
arms: every arm sees the same.
"""
