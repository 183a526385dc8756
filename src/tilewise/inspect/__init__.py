"""What a profiler, a tuner or a study may ask of tilewise beyond the results of calls.

    calls          the problem and the operands that a call becomes, and what a mask and a score
                   mean, rectangle by rectangle
    answer         how a call of some shape would run, here or on a chip that is not here
    known_models   the shapes of well-known models
    peaks          the compiled core: whether it is there, its instruction set, its bare loops
    gpu            the chips and blocks of the GPU kernels, and what a pass launches

These modules are public. docs/design.md says what else is.
"""
