"""Variants of attention as data: programs, and the public masks and scores."""
