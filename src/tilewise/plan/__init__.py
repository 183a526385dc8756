"""Floor 3: how a problem is done: the plan and the choice of its backend."""
