"""The gate: compile the Triton kernels for absent chips and judge the result.

``python -m tilelab.gate`` needs Triton and no GPU: Triton's wheels hold the compilers for NVIDIA
and AMD chips, and NVIDIA's disassembler. The gate takes the launches of the host functions
(``kernels.gpu.Launch``, made from ``meta`` tensors) and compiles each once per chip. It fails on a
spill, on too much shared memory, on a product without matrix instructions, and on code that grew.

The command itself never imports Triton: a process of its own compiles for each chip.
"""
