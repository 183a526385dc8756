"""Verdicts: what the records of a study say about its arms, with intervals and what it cost."""
