"""The account of bytes held against counted ones: ``python -m tilelab.counted``.

    paper        the account of the FlashAttention paper, made again; its asymptotic forms
    cases        what is run, what the model says that the cache takes in, and the table of both
    __main__     last-level misses of all cases, one after the other, as JSON and as a table

``scripts/counted.sh`` builds the driver (``csrc/tests/counted.cc``) and runs it.
"""
