"""Floor 4: backends: the interface, and the kernels of each."""
