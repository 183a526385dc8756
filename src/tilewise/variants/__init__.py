"""Floor 1: variants of attention as data: programs, and the public masks and scores."""
