"""The tiled algorithm in the loop orders of the kernels and of the papers, to count what they move.

``tiled`` has one order, queries outside, and its backward keeps the sums of the keys in slow
memory. Here are the others, each with the same mathematics:

    backward_by_tiles     dQ by tiles of queries, dK and dV by tiles of keys: the GPU backend
    backward_in_turns     tiles of keys outside, dQ by a last pass: Hopper's fused kernel
    forward_keys_outside  FlashAttention's algorithm 1: output and statistics go to and fro
    backward_keys_outside its algorithm 4, and the CPU core's: dQ goes to and fro
    forward_in_parts      keys split among programs, partial results merged: decoding

They serve ``plan.traffic`` as what its counts are held against, and tests as what its text says.
Gradients of q, k and v only.

Sources: Dao et al., "FlashAttention", NeurIPS 2022, algorithms 1 and 4; Dao, "FlashAttention-2",
2023, algorithms 1 and 2.
"""
