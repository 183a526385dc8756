"""The backward pass: gradients of q, k and v, and of what a score captures."""
