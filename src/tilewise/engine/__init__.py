"""From a call to a kernel: the backends, the plan cache, autograd, and the torch ops."""
