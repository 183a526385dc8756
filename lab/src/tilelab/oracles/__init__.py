"""Slow and exact: dense attention, extended precision, and other loop orders."""
