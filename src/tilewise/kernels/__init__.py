"""Backends: the interface, and the kernels of each."""
