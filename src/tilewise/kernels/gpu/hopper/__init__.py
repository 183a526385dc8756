"""Kernels for Hopper alone, in Gluon: a producer warp loads tiles, two groups of warps multiply."""
