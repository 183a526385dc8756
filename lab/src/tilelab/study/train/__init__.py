"""One run of a study: the training loop, its state on disk, and what is measured beside it."""
