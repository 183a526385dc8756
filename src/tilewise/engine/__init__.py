"""From a call to a kernel: the registry, the plan cache, autograd, and the torch ops."""
