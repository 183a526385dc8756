"""What every walk over the pairs shares: tiles in memory, which of them to visit, what attends."""
