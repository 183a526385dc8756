"""How a problem is done: the plan, the choice of its backend, measured blocks."""
