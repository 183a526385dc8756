"""The Triton backend: attention on GPUs of several makers, with two kernels for Hopper alone."""
