"""Floor 3: the mathematics of attention, written to be read and to be trusted.

``dense`` is the definition, ``extended`` the same beyond float64, ``tiled`` the algorithm of the
kernels in plain torch, ``merge`` how results over separate keys combine, ``philox`` the dropout
mask, ``programs`` what mask and score programs mean on a block. ``tangents`` and ``second`` are the
forward-mode and the second derivative, over the tiles of ``jets``.
"""
