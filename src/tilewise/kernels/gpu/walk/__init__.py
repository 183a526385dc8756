"""Parts of every walk over the pairs: tiles in memory, which to visit, which pairs attend."""
