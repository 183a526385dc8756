"""The gate: the Triton kernels compiled for chips that are not there, and what came out judged.

``python -m tilelab.gate`` needs Triton and no GPU: Triton's wheels hold the compilers
for NVIDIA and AMD chips, and NVIDIA's disassembler. What the host functions of the passes would
launch (``launch.Launch``, made from ``meta`` tensors) is compiled once per chip; a spill, too much
shared memory, a product without matrix instructions, or code that grew fails the gate.

The command itself never imports Triton: each chip is compiled for in a process of its own.
"""
