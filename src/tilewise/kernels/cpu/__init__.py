"""The CPU backend: the compiled core's kernels over torch's CPU tensors."""
