"""Text, its tokens, and their order. This folder knows nothing of arms: every arm sees the same."""
