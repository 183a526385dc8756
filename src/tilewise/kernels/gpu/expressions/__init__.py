"""Masks and scores as Triton functions, made from the text of their expressions."""
