"""The account of bytes: what attention moves between slow and fast memory, predicted.

    count     operands, passes and their sums; what a cache in between saves
    visits    which tiles a walk visits, for any mask, and what those of bands and lengths share
    tiled     the tiled algorithm in every loop order, byte for byte
    plain     attention that writes its matrix, pass by pass
    time      bytes, operations and exponentials against a chip
    memory    what has to be held at once, and what fits
    account   all of it for a problem: what a plan and ``tilewise explain`` say

Source: Dao, Fu, Ermon, Rudra and Re, "FlashAttention", NeurIPS 2022.
"""

from tilewise.plan.traffic.count import Operand, Pass, Traffic
from tilewise.plan.traffic.visits import Visits, visits_of

__all__ = ["Operand", "Pass", "Traffic", "Visits", "visits_of"]
