"""The Triton backend: the same attention on GPUs of several makers, from one set of kernels."""
