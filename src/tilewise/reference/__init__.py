"""Floor 3: the mathematics of attention, written to be read and to be trusted.

* ``dense`` is the definition, ``extended`` the same beyond float64.
* ``tiled`` is the algorithm of the kernels in plain torch.
* ``merge`` combines results over separate keys.
* ``philox`` makes the dropout mask.
* ``programs`` defines what mask and score programs mean on a block.
* ``tangents`` and ``second`` are the forward-mode and the second derivative, over the tiles of
  ``jets``.
"""
