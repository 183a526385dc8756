"""The mathematics of attention in plain torch, written to be read and to be trusted.

* ``tiled`` is the algorithm of the kernels.
* ``merge`` combines results over separate keys.
* ``philox`` makes the dropout mask.
* ``programs`` defines what mask and score programs mean on a block.
* ``derivatives`` are the forward-mode and the second derivative, over the tiles of ``jets``.
"""
